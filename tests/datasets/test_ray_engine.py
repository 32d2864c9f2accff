"""Data sets on Ray: the same stores as in one process, whatever happens to Ray's processes.

One local cluster is for all tests.
"""

import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from data_sets import (
    Crashing,
    Cut,
    Noise,
    Slow,
    Small,
    Stream,
    outputs_as_they_are,
    small_explain_model,
    small_model,
    tree,
)
from helpers import ROOT
from ray_processes import SETTINGS, actors, kill, killing, send, there

import lrpfx
import lrpfx.datasets
from lrpfx.datasets.ray_cluster import _VERSIONS, Coordinator, Worker, numbered, packed, pool_of, portable, unpacked

COUNT = 300
TWO = lrpfx.datasets.RayEngine(explainers=2)
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine: two CPUs for explainers, and one for loading."""
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}},
    )
    yield ray
    ray.shutdown()


def embedded(explain_model, data, path, **settings):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return lrpfx.datasets.attribute(explain_model, data, path, **SETTINGS, **settings)
    finally:
        torch.set_num_threads(threads)


# --- on the cluster ----------------------------------------------------------------------------------------------------------


def interrupted(explain_model, data, path, **settings):
    """A run in this process that ends after a third of the samples."""

    def stop(done, total):
        if done > COUNT // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explain_model, data, path, progress=stop, **SETTINGS, **settings)


@pytest.mark.ray
def test_ray_goes_on_with_a_store_of_one_process(cluster, tmp_path):
    """Each process of Ray compiles for itself."""
    explain_model, data = torch.compile(small_explain_model(), backend="eager"), Noise(COUNT, broken=(5, 40), infinite=(17,))
    expected, path, seen = embedded(explain_model, data, tmp_path / "one"), tmp_path / "ray", []
    interrupted(explain_model, data, path)
    found = lrpfx.datasets.attribute(
        explain_model, data, path, engine="ray", progress=lambda done, total: seen.append(done), **SETTINGS
    )
    assert found.done.all() and found.errors == expected.errors and seen[-1] == COUNT and seen[0] > COUNT // 4
    assert tree(path) == tree(expected.path)
    assert ray.is_initialized()  # it is not ours to stop


@pytest.mark.ray
def test_streams_and_object_stores(cluster, explain_model, tmp_path):
    data, path = Stream(Noise(COUNT, infinite=(17,))), f"objects:/{tmp_path}/ray"
    target = {"target": outputs_as_they_are}
    interrupted(explain_model, data, path, **target)
    found = lrpfx.datasets.attribute(explain_model, data, path, engine="ray", **SETTINGS, **target)
    assert found.done.all() and len(found) == COUNT
    assert tree(tmp_path / "ray") == tree(embedded(explain_model, data, tmp_path / "one", **target).path)


@pytest.mark.ray
def test_processes_that_are_killed_are_replaced(cluster, explain_model, tmp_path):
    """What they left half written does not stay."""
    data, path = Noise(3 * COUNT), tmp_path / "ray"
    expected = embedded(explain_model, data, tmp_path / "one")

    def in_the_midst_of_writing():
        numbers = actors()
        send(signal.SIGSTOP, numbers)
        is_writing = any(path.rglob("*.partial"))
        send(signal.SIGKILL if is_writing else signal.SIGCONT, numbers)
        return is_writing

    with killing(in_the_midst_of_writing, interval=0.002) as killed:
        found = lrpfx.datasets.attribute(explain_model, data, path, engine=TWO, **SETTINGS)
    assert killed and found.done.all()
    assert tree(path) == tree(expected.path)


@pytest.mark.ray
def test_a_reader_that_is_killed_is_replaced(cluster, explain_model, tmp_path):
    """The process that takes its place reads the stream from its beginning; no block is lost by that."""
    data, path, seen = Slow(Noise(COUNT)), tmp_path / "ray", []
    with killing(lambda: there(path) > 30 and kill(actors("Coordinator"))) as killed:
        found = lrpfx.datasets.attribute(
            explain_model, data, path, engine="ray", progress=lambda done, total: seen.append(done), **SETTINGS
        )
    assert killed and len(found) == COUNT and found.done.all()
    assert sorted(seen) == seen and seen[-1] == COUNT
    assert tree(path) == tree(embedded(explain_model, Stream(Noise(COUNT)), tmp_path / "one").path)


@pytest.mark.ray
def test_processes_load_for_each_worker(cluster, explain_model, tmp_path):
    data = Noise(COUNT, broken=(5, 40))
    found = lrpfx.datasets.attribute(explain_model, data, tmp_path / "ray", engine=TWO, workers=3, **SETTINGS)
    assert found.done.all() and tree(found.path) == tree(embedded(explain_model, data, tmp_path / "one").path)


@pytest.mark.ray
def test_a_stream_that_ends_with_an_error_loses_no_block(cluster, explain_model, tmp_path):
    for engine in ("embedded", "ray"):
        with pytest.raises(lrpfx.InputError, match="the archive is cut"):
            lrpfx.datasets.attribute(explain_model, Cut(Noise(COUNT)), tmp_path / engine, engine=engine, **SETTINGS)
        assert lrpfx.datasets.open(tmp_path / engine).done.sum() == 48  # whole blocks


@pytest.mark.ray
def test_a_store_that_cannot_be_written(cluster, tmp_path):
    """The model of an Explainer is compiled before it is sent, with functions of the script."""
    explainer = lrpfx.Explainer(small_model(), composite=lrpfx.composites.EpsilonPlus())
    second, path = torch.tensor([0.0, 1, 0, 0]), tmp_path / "store"
    settings = {"target": lambda output: output * second, "block_size": 16, "batch_size": 8}
    lrpfx.datasets.attribute(explainer, Noise(64), path, **settings)
    (path / "done" / "c" / "2").unlink()
    (path / "relevance" / "c" / "2").rename(path / "relevance" / "c" / "kept")
    (path / "relevance" / "c" / "2").write_text("a file where a folder belongs")
    with pytest.raises(lrpfx.ArtefactError, match="cannot be written"):
        lrpfx.datasets.attribute(explainer, Noise(64), path, engine="ray", **settings)
    assert there(path) == 48


@pytest.mark.ray
@pytest.mark.slow
def test_samples_of_collections_that_fail(cluster, explain_model, tmp_path):
    """One in the first batch, and all of another process's part."""
    path, failed = tmp_path / "collection.npz", [5, *range(280, 560)]
    found = lrpfx.concepts.collect(explain_model, Noise(600, broken=failed), ["first"], path, engine=TWO)
    expected = lrpfx.concepts.collect(explain_model, Noise(600, broken=failed), ["first"])
    assert found.errors == expected.errors and list(found.errors) == failed and found.count == 600 - len(failed)
    assert [one.sample for one in found.top("first", 0)] == [one.sample for one in expected.top("first", 0)]
    again = lrpfx.concepts.collect(explain_model, Noise(600), ["first"], path, engine=TWO, retry_failed=True)
    assert again.count == 600 and not again.errors
    with pytest.raises(lrpfx.InputError, match="no sample of the data set can be loaded; sample 0"):
        lrpfx.concepts.collect(explain_model, Noise(30, broken=range(30)), ["first"], engine="ray")


@pytest.mark.ray
@pytest.mark.slow
def test_a_sample_that_ends_its_process(cluster, explain_model, tmp_path):
    with pytest.raises(lrpfx.InputError, match="4 processes of Ray that were to explain block 1 ended"):
        lrpfx.datasets.attribute(explain_model, Crashing(48), tmp_path / "ray", engine=TWO, **SETTINGS)
    assert lrpfx.datasets.open(tmp_path / "ray").done[:16].all()


@pytest.mark.ray
@pytest.mark.slow
def test_a_busy_cluster(cluster, explain_model, tmp_path):
    """A loader with a sampler, on what an actor of another leaves; nothing waits for what it holds."""

    class Held:
        def held(self):
            return True

    holder = ray.remote(num_cpus=1)(Held).remote()
    ray.get(holder.held.remote())
    settings = {"batch_size": 4, "multiprocessing_context": "fork", "num_workers": 1, "generator": torch.Generator()}
    loader = torch.utils.data.DataLoader(Noise(40), sampler=list(range(39, 7, -1)), **settings)
    with pytest.raises(lrpfx.InputError, match="3 CPUs and 0 GPUs, of which 2 and 0 are free"):
        lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", engine=TWO)
    found = lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", engine="ray")
    ray.kill(holder)
    assert found.done.all() and found.labels.tolist() == [number % 4 for number in range(39, 7, -1)]


@pytest.mark.ray
def test_collections(cluster, explain_model, tmp_path):
    """Rankings of the samples that several processes collected from are those of one process, and a file goes on."""
    data, path = Noise(600), tmp_path / "collection.npz"
    lrpfx.concepts.collect(explain_model, data, ["first", "add"], path, samples=range(40, 80))
    found = lrpfx.concepts.collect(explain_model, data, ["first", "add"], path, engine=TWO)
    expected = lrpfx.concepts.collect(explain_model, data, ["first", "add"])
    assert found.count == lrpfx.concepts.Collection.load(path).count == 600
    for layer, by, reduction in itertools.product(["first", "add"], ["activation", "relevance"], ["sum", "max"]):
        for channel, group in itertools.product(range(6), [{}, {"predicted": 2}, {"true": 3}]):
            ours, theirs = (one.top(layer, channel, by=by, reduction=reduction, **group) for one in (found, expected))
            assert [one.sample for one in ours] == [one.sample for one in theirs]
            np.testing.assert_allclose([one.score for one in ours], [one.score for one in theirs], rtol=1e-12)


# --- Ray of its own ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import logging, os, signal, sys, threading
import lrpfx, lrpfx.datasets, torch
from data_sets import LAYERS, Noise, small_explain_model
from ray_processes import Slowly

hook, before = sys.excepthook, dict(os.environ)

class Mine(Slowly):  # of a script, which no other process can import
    pass

path = sys.argv[1]
engine = lrpfx.datasets.RayEngine(explainers=1)
settings = dict(record=LAYERS, batch_size=8, block_size=16, dtype="float16")
found = lrpfx.datasets.attribute(small_explain_model(), Mine(Noise(int(sys.argv[2]))), path, engine=engine, **settings)
assert found.done.all()
import ray
assert not ray.is_initialized()
assert sys.excepthook is hook and dict(os.environ) == before, set(os.environ) ^ set(before)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and sys.breakpointhook is sys.__breakpointhook__
assert all(one.daemon for one in threading.enumerate() if one is not threading.main_thread()), threading.enumerate()
"""


def started(path, count):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), str(count)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def raylets_of(process):
    """The process number of Ray's own process, which a script has started."""
    found = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "raylet/raylet"], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("victim", "kills"),
    [
        ("script", 1),
        ("raylet", 1),
        *(pytest.param(victim, 30, marks=pytest.mark.slow) for victim in ("script", "raylet")),
    ],
)
def test_a_script_that_is_killed_goes_on(victim, kills, explain_model, tmp_path):
    """Ray is started for the call, ends with it, and leaves the process as it was; either may be killed at any time."""
    data, path, chance = Noise(320 if kills == 1 else 1000), tmp_path / "ray", random.Random(kills)
    expected = embedded(explain_model, data, tmp_path / "one")
    counts = [0]
    for _ in range(kills):
        process, after = started(path, len(data)), chance.randrange(counts[-1], min(counts[-1] + 200, len(data) - 50))
        while process.poll() is None and (not path.exists() or there(path) <= after):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        kill([process.pid] if victim == "script" else raylets_of(process))
        output = process.communicate()[0]
        assert process.returncode in (0, -signal.SIGKILL if victim == "script" else 1), output
        counts.append(there(path))
        assert counts[-1] >= counts[-2], "samples were lost"
        if counts[-1] > 0.7 * len(data):  # begin anew, to be killed again
            while actors("(Worker|Coordinator)"):  # which write what they have before they notice that the script is gone
                time.sleep(0.1)
            shutil.rmtree(path)
            counts.append(0)
    assert 0 < counts[1] < len(data) + (victim == "raylet"), counts  # explainers do not end with the raylet at once
    process = started(path, len(data))
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert tree(path) == tree(expected.path)


# --- without Ray -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "engine", "message"),
    [
        (Noise(8), "dask", "engine is"),
        (Noise(8), lrpfx.datasets.RayEngine(explainers=0), "explainers of a RayEngine"),
        (Noise(8), lrpfx.datasets.RayEngine(cpus=1.5), "cpus of a RayEngine"),
        (Noise(8), lrpfx.datasets.RayEngine(gpus=-1), "gpus of a RayEngine"),
        (iter([torch.zeros(1, 6, 6)]), "ray", "read only once"),
    ],
)
def test_what_cannot_run(data, engine, message, explain_model, tmp_path):
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.datasets.attribute(explain_model, data, tmp_path / "store", engine=engine)
    assert not list(tmp_path.iterdir())


def test_collections_of_streams_take_one_process(explain_model):
    with pytest.raises(lrpfx.InputTypeError, match="length and indices"):
        lrpfx.concepts.collect(explain_model, Stream(Noise(8)), ["first"], engine="ray")


class Resources:
    """What Ray says of a cluster: others hold what is not free, and what is freed is so after a while."""

    def __init__(self, has, free, later=None, answers=3):
        self.has, self.free, self.later, self.answers = has, free, later, answers

    def cluster_resources(self):
        return {**dict(zip(("CPU", "GPU"), map(float, self.has), strict=False)), "object_store_memory": 8.0}

    def available_resources(self):
        self.answers -= 1
        free = self.later if self.later is not None and self.answers < 0 else self.free
        return dict(zip(("CPU", "GPU"), map(float, free), strict=False))


@pytest.mark.parametrize(
    ("wanted", "resources", "workers"),
    [
        ((None, 1, None), Resources([8], [8]), 7),
        ((None, 1, None), Resources([8], [3]), 2),
        ((None, 2, None), Resources([8], [6]), 2),
        ((3, 1, None), Resources([8], [5]), 3),
        ((7, 1, None), Resources([8], [2], [8]), 7),
        ((None, 1, None), Resources([8], [2], [8]), 7),
        ((None, 1, None), Resources([8, 4], [8, 2]), 2),
        ((None, 1, 0.5), Resources([8, 4], [8, 1]), 2),
        ((2, 1, 1), Resources([8, 4], [8, 1], [8, 2]), 2),
        ((10, 1, 0.1), Resources([16, 1], [16, 1]), 10),
        ((None, 1, 0), Resources([8, 4], [4, 0]), 3),
    ],
)
def test_actors_take_what_is_free(wanted, resources, workers):
    assert pool_of(resources, *wanted, patience=0.4).workers == workers


@pytest.mark.parametrize(
    ("wanted", "resources", "free"),
    [
        ((None, 1, None), Resources([2], [1]), "2 CPUs and 0 GPUs, of which 1 and 0 are free"),
        ((None, 1, None), Resources([2], []), "2 CPUs and 0 GPUs, of which 0 and 0 are free"),
        ((4, 1, None), Resources([8], [4]), "8 CPUs and 0 GPUs, of which 4 and 0 are free: 4 explainers"),
        ((None, 4, None), Resources([8], [4]), "of which 4 and 0 are free: 1 explainers of 4 CPUs"),
        (
            (None, 1, None),
            Resources([8, 1], [8, 0]),
            "8 and 0 are free: 1 explainers of 1 CPUs and 1 GPUs",
        ),
        ((2, 1, 1), Resources([8, 2], [8, 1]), "8 CPUs and 2 GPUs, of which 8 and 1 are free"),
        ((9, 1, None), Resources([8], [8]), "8 CPUs and 0 GPUs, of which 8 and 0 are free: 9 explainers"),
    ],
)
def test_what_is_not_free_is_refused(wanted, resources, free):
    with pytest.raises(lrpfx.InputError, match=f"{free}.* would wait for ever"):
        pool_of(resources, *wanted, patience=0.2)


def test_prepared_workers_are_refused(explain_model, tmp_path):
    loader = torch.utils.data.DataLoader(Noise(8), num_workers=1, worker_init_fn=print)
    with pytest.raises(lrpfx.InputError, match="do not call the worker_init_fn="):
        lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", engine="ray")


def test_without_ray(explain_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(lrpfx.InputError, match=r"lrpfx\[ray\]"):
        lrpfx.datasets.attribute(explain_model, Noise(8), tmp_path / "store", engine="ray")


def test_parts_are_handed_out_in_turn():
    coordinator = Coordinator(packed(numbered("abcd")({1})))
    assert [coordinator.take(worker)[0] for worker in (0, 1, 1, 0)] == [(0, "a"), (2, "c"), (3, "d"), None]
    assert coordinator.progress() == ([], False, None)
    for worker, number in ((1, 2), (1, 3), (0, 0)):
        coordinator.report(worker, number, number + 1)
    assert coordinator.progress() == ([(2, 3), (3, 4), (0, 1)], True, None)


def test_parts_that_are_lost_are_handed_out_again():
    coordinator = Coordinator(packed(numbered(range(6))(set())))
    assert [coordinator.take(worker)[0] for worker in (0, 0, 0, 0, 1)] == [(number, number) for number in range(5)]
    for number, result in ((0, "a"), (1, "b"), (None, "remark")):
        coordinator.report(0, number, result)
    assert coordinator.lose(0) is None
    assert coordinator.progress() == ([(0, "a"), (1, "b"), (None, "remark")], False, None)
    coordinator.report(0, 2, "too late")  # of a process that was believed to have ended
    assert coordinator.progress() == ([], False, None)
    assert [coordinator.take(2) for _ in range(4)] == [((2, 2), True), ((3, 3), True), ((5, 5), False), (None, False)]


def test_a_part_that_ends_its_workers_is_given_up():
    coordinator = Coordinator(packed([(5, None)]))
    assert coordinator.take(0) == ((5, None), False)
    for worker in range(3):
        assert coordinator.lose(worker) is None
        assert coordinator.take(worker + 1) == ((5, None), True)
    assert coordinator.lose(3) == 5


def cut():
    yield 7, "content"
    raise lrpfx.InputError("cut")


class Cuts:
    def __iter__(self):
        return cut()


def test_problems_end_the_run_once_what_precedes_is_written():
    coordinator = Coordinator(packed(Cuts()))
    assert coordinator.take(0)[0] == (7, "content") and coordinator.take(1)[0] is None
    _, is_finished, problem = coordinator.progress()
    assert problem is not None and not is_finished
    coordinator.report(0, 7, "done")
    results, is_finished, problem = coordinator.progress()
    assert results == [(7, "done")] and is_finished and "cut" in str(problem)


def test_the_loading_processes_are_split():
    assert [Worker(None, number, 3).share_of(8) for number in range(6)] == [3, 3, 2, 3, 3, 2]


class UnfriendlyError(Exception):
    """An exception that cannot be made from its text."""

    def __init__(self, one, two):
        super().__init__(one)


def test_what_is_sent_lies_on_the_device_of_its_process():
    found = unpacked(packed({"model": torch.ones(2)}), "meta")["model"]
    assert found.device.type == "meta" and found.shape == (2,)


def test_other_releases_are_refused(monkeypatch):
    content = packed("a model")
    monkeypatch.setitem(_VERSIONS, "torch", "1.0")
    with pytest.raises(lrpfx.InputError, match="a machine of Ray has torch"):
        unpacked(content)


def test_exceptions_travel():
    found = pickle.loads(pickle.dumps(portable(UnfriendlyError("here", 2))))
    assert isinstance(found, RuntimeError) and "here" in str(found)
    assert isinstance(portable(MemoryError("much")), MemoryError)


def test_models_that_cannot_be_sent(tmp_path):
    with pytest.raises(lrpfx.InputError, match="cannot be pickled"):
        packed({"model": Small(), "lock": threading.Lock()})
