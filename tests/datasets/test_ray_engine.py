"""Data sets on Ray: the same stores as in one process, whatever happens to Ray's processes.

One local cluster is for all tests.
"""

import itertools
import os
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
    LAYERS,
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

import lrpfx
import lrpfx.datasets
from lrpfx.datasets.engines import Step
from lrpfx.datasets.ray_cluster import ActorNumbers, count_attempt, new_coordinator, packed, packed_problem, pool_of
from lrpfx.datasets.ray_engine import _steps_in

COUNT = 300
SETTINGS = {"record": LAYERS, "batch_size": 8, "block_size": 16, "dtype": "float16"}
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


def actors(kind="MapWorker"):
    """The process numbers of Ray's actors."""
    return subprocess.run(["pgrep", "-f", f"ray::{kind}"], capture_output=True, text=True).stdout.split()


def kill_in_the_midst_of_writing(folder, stopped):
    """Kill the processes that explain at a moment when one of them has a file half written. Returns whether there was one."""
    while not stopped.wait(0.002):
        numbers = [int(one) for one in actors("MapWorker\\(MapBatches\\(_Explainer")]
        for number in numbers:
            os.kill(number, signal.SIGSTOP)
        is_writing = any(folder.rglob("*.partial"))
        for number in numbers:
            os.kill(number, signal.SIGKILL if is_writing else signal.SIGCONT)
        if is_writing and numbers:
            return True
    return False


@pytest.mark.ray
def test_processes_that_are_killed_are_replaced(cluster, explain_model, tmp_path):
    """Of those that explain, and of those that load. What they left half written does not stay."""
    data, path = Noise(3 * COUNT), tmp_path / "ray"
    expected = embedded(explain_model, data, tmp_path / "one")
    stopped, killed = threading.Event(), []

    def kill():
        while not stopped.wait(0.05) and not there(path):
            pass
        os.kill(int(random.Random(0).choice(actors())), signal.SIGKILL)
        killed.append(kill_in_the_midst_of_writing(path, stopped))

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        found = lrpfx.datasets.attribute(explain_model, data, path, engine=TWO, **SETTINGS)
    finally:
        stopped.set()
        thread.join()
    assert killed == [True] and found.done.all()
    assert tree(path) == tree(expected.path)


@pytest.mark.ray
@pytest.mark.slow
def test_a_reader_that_is_killed_is_replaced(cluster, explain_model, tmp_path):
    """The process that takes its place reads the stream from its beginning; no block is lost by that."""
    data, path, killed, stopped = Slow(Noise(COUNT)), tmp_path / "ray", [], threading.Event()

    def kill():
        while not stopped.wait(0.1) and not killed:
            if (found := actors("ReadRows")) and there(path) > 30:
                os.kill(int(found[0]), signal.SIGKILL)
                killed.append(1)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        found = lrpfx.datasets.attribute(explain_model, data, path, engine="ray", **SETTINGS)
    finally:
        stopped.set()
        thread.join()
    assert killed and len(found) == COUNT and found.done.all()
    assert tree(path) == tree(embedded(explain_model, Stream(Noise(COUNT)), tmp_path / "one").path)


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
    with pytest.raises(lrpfx.InputError, match="4 processes of Ray that were to load block 1 ended"):
        lrpfx.datasets.attribute(explain_model, Crashing(48), tmp_path / "ray", engine=TWO, **SETTINGS)
    assert lrpfx.datasets.open(tmp_path / "ray").done[:16].all()


@pytest.mark.ray
def test_attempts_are_counted(cluster):
    coordinator = new_coordinator(None)
    for number in (0, 1, 0, 0, 0):
        count_attempt(coordinator, "explain block", number)
    with pytest.raises(lrpfx.InputError, match="4 processes of Ray that were to explain block 0 ended"):
        count_attempt(coordinator, "explain block", 0)
    count_attempt(coordinator, "load block", 0)


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

hook, before = sys.excepthook, dict(os.environ)

class Mine(Noise):  # of a script, which no other process can import
    pass

path = sys.argv[1]
engine = lrpfx.datasets.RayEngine(explainers=1)
settings = dict(record=LAYERS, batch_size=8, block_size=16, dtype="float16")
found = lrpfx.datasets.attribute(small_explain_model(), Mine(int(sys.argv[2])), path, engine=engine, **settings)
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


@pytest.mark.ray
@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_a_script_that_is_killed_goes_on(kills, explain_model, tmp_path):
    """Ray is started for the call, ends with it, and leaves the process as it was; the script may be killed at any time."""
    data, path, chance = Noise(320 if kills == 1 else 1000), tmp_path / "ray", random.Random(kills)
    expected = embedded(explain_model, data, tmp_path / "one")
    counts = [0]
    for _ in range(kills):
        process, after = started(path, len(data)), chance.randrange(counts[-1], min(counts[-1] + 200, len(data) - 50))
        while process.poll() is None and (not path.exists() or there(path) <= after):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        output = process.communicate()[0]
        assert process.returncode in (0, -signal.SIGKILL), output
        counts.append(there(path))
        assert counts[-1] >= counts[-2], "samples were lost"
        if counts[-1] > 0.7 * len(data):  # begin anew, to be killed again
            while actors():  # which write what they have before they notice that the script is gone
                time.sleep(0.1)
            shutil.rmtree(path)
            counts.append(0)
    assert 0 < counts[1] < len(data), counts
    process = started(path, len(data))
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert tree(path) == tree(expected.path)


def there(path):
    try:
        return int(lrpfx.datasets.open(path).done.sum())
    except lrpfx.ArtefactError:
        return 0


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
    ("wanted", "resources", "explainers", "loaders"),
    [
        (ActorNumbers(None, 1, None), Resources([8], [8]), 7, 1),
        (ActorNumbers(None, 1, None), Resources([8], [3]), 2, 1),
        (ActorNumbers(None, 2, None), Resources([8], [6]), 2, 2),
        (ActorNumbers(3, 1, None), Resources([8], [5]), 3, 2),
        (ActorNumbers(7, 1, None), Resources([8], [2], [8]), 7, 1),
        (ActorNumbers(None, 1, None), Resources([8], [2], [8]), 7, 1),
        (ActorNumbers(None, 1, None), Resources([8, 4], [8, 2]), 2, 6),
        (ActorNumbers(None, 1, 0.5), Resources([8, 4], [8, 1]), 2, 6),
        (ActorNumbers(2, 1, 1), Resources([8, 4], [8, 1], [8, 2]), 2, 6),
        (ActorNumbers(None, 1, 0), Resources([8, 4], [4, 0]), 3, 1),
    ],
)
def test_actors_take_what_is_free(wanted, resources, explainers, loaders):
    found = pool_of(resources, wanted, patience=0.4)
    assert (found.explainers, found.loaders) == (explainers, loaders)


@pytest.mark.parametrize(
    ("wanted", "resources", "free"),
    [
        (ActorNumbers(None, 1, None), Resources([2], [1]), "2 CPUs and 0 GPUs, of which 1 and 0 are free"),
        (ActorNumbers(None, 1, None), Resources([2], []), "2 CPUs and 0 GPUs, of which 0 and 0 are free"),
        (ActorNumbers(4, 1, None), Resources([8], [4]), "8 CPUs and 0 GPUs, of which 4 and 0 are free: 4 explainers"),
        (ActorNumbers(None, 4, None), Resources([8], [4]), "of which 4 and 0 are free: 1 explainers of 4 CPUs"),
        (
            ActorNumbers(None, 1, None),
            Resources([8, 1], [8, 0]),
            "8 and 0 are free: 1 explainers of 1 CPUs and 1 GPUs",
        ),
        (ActorNumbers(2, 1, 1), Resources([8, 2], [8, 1]), "8 CPUs and 2 GPUs, of which 8 and 1 are free"),
        (ActorNumbers(9, 1, None), Resources([8], [8]), "8 CPUs and 0 GPUs, of which 8 and 0 are free: 9 explainers"),
    ],
)
def test_what_is_not_free_is_refused(wanted, resources, free):
    with pytest.raises(lrpfx.InputError, match=f"{free}.* would wait for ever"):
        pool_of(resources, wanted, patience=0.2)


def test_prepared_workers_are_refused(explain_model, tmp_path):
    loader = torch.utils.data.DataLoader(Noise(8), num_workers=1, worker_init_fn=print)
    with pytest.raises(lrpfx.InputError, match="do not call the worker_init_fn="):
        lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", engine="ray")


def test_without_ray(explain_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(lrpfx.InputError, match=r"lrpfx\[ray\]"):
        lrpfx.datasets.attribute(explain_model, Noise(8), tmp_path / "store", engine="ray")


def test_problems_end_the_run_once_what_precedes_is_written():
    def row(block, samples=0, problem=b""):
        return {"block": block, "samples": samples, "objection": "", "problem": problem}

    end = row(-1, problem=packed_problem(lrpfx.InputError("cut")))
    steps = _steps_in([row(0, 4), end, row(1, 3)])
    assert [next(steps), next(steps), next(steps)] == [Step(4), Step(0), Step(3)]
    with pytest.raises(lrpfx.InputError, match="cut"):
        next(steps)
    steps = _steps_in([row(0, problem=packed_problem(lrpfx.ArtefactError("full"))), row(1, 3)])
    with pytest.raises(lrpfx.ArtefactError, match="full"):
        next(steps)


class UnfriendlyError(Exception):
    """An exception that cannot be made from its text."""

    def __init__(self, one, two):
        super().__init__(one)


def test_exceptions_travel():
    import pickle

    found = pickle.loads(packed_problem(UnfriendlyError("here", 2)))
    assert isinstance(found, RuntimeError) and "here" in str(found)
    assert isinstance(pickle.loads(packed_problem(MemoryError("much"))), MemoryError)


def test_models_that_cannot_be_sent(tmp_path):
    with pytest.raises(lrpfx.InputError, match="cannot be pickled"):
        packed({"model": Small(), "lock": threading.Lock()})
