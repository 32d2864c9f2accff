"""Data sets on Ray while its processes, its machines or the script are killed at random times.

The machines are those of a cluster within this one.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from data_sets import Noise, Stream, small_explain_model, tree
from helpers import ROOT
from ray_processes import SETTINGS, Slowly, actors, kill, killing, send, there

import lrpfx
import lrpfx.datasets

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray
COUNT = 1_000
TWO = lrpfx.datasets.RayEngine(explainers=2)
PATHS = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
SCRIPT = """
import sys
import lrpfx.datasets, ray
from data_sets import Noise, small_explain_model
from ray_processes import SETTINGS, Slowly

address, path, count, seed = sys.argv[1:]
ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}})
lrpfx.datasets.attribute(small_explain_model(int(seed)), Slowly(Noise(int(count))), path, engine="ray", **SETTINGS)
"""


def add_machines(cluster):
    """Add machines until there are two beside the first."""
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    cluster.wait_for_nodes()


@pytest.fixture(scope="module")
def cluster():
    """Three machines of one CPU each. This process is on the first."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    add_machines(made)
    ray.init(made.address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": PATHS}})
    yield made
    ray.shutdown()
    made.shutdown()


def embedded(data, path, seed=0):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lrpfx.datasets.attribute(small_explain_model(seed), data, path, **SETTINGS)
    torch.set_num_threads(threads)
    return tree(path)


def completed(cluster, data, path):
    """Run until the store is complete. Each run goes on where the last ended, which said why."""
    before = 0
    while True:
        add_machines(cluster)
        now = there(path)
        assert now >= before, "samples were lost"
        before = now
        try:
            assert lrpfx.datasets.attribute(small_explain_model(), data, path, engine=TWO, **SETTINGS).done.all()
        except lrpfx.InputError as error:
            assert error.topic == "ray"
        else:
            return


def survives(kill_one, kills, cluster, data, path, expected):
    """Stores are whole while something is killed so many times, each time when there is something new in them."""
    last = 0

    def kill_after_progress():
        nonlocal last
        now = there(path)
        if now in (0, last) or not kill_one():
            return False
        last = now
        return True

    with killing(kill_after_progress, kills) as killed:
        while len(killed) < kills:
            shutil.rmtree(path, ignore_errors=True)
            completed(cluster, data, path)
            assert tree(path) == expected
        assert all(killed)


@pytest.mark.parametrize(
    ("kind", "kills"),
    [("indexed", 2), ("stream", 2), *(pytest.param(kind, 30, marks=pytest.mark.slow) for kind in ("indexed", "stream"))],
)
def test_actors_that_are_killed(kind, kills, cluster, tmp_path):
    """Those that explain, and the one that hands out blocks."""
    data, chance = Slowly(Noise(COUNT)), random.Random(f"{kind}{kills}")
    data = Stream(data) if kind == "stream" else data

    def kill_one():
        found = actors("(Worker|Coordinator)")
        return bool(found) and kill([chance.choice(found)])

    survives(kill_one, kills, cluster, data, tmp_path / "ray", embedded(data, tmp_path / "one"))


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_machines_that_are_lost(kills, cluster, tmp_path):
    """Another is there when the next run begins."""
    data, chance = Slowly(Noise(COUNT)), random.Random(kills)

    def kill_one():
        if len(cluster.worker_nodes) < 2:
            return False
        cluster.remove_node(chance.choice(sorted(cluster.worker_nodes, key=lambda node: node.unique_id)), allow_graceful=False)
        return True

    survives(kill_one, kills, cluster, data, tmp_path / "ray", embedded(data, tmp_path / "one"))


def started(cluster, path, count, seed=0):
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-c", SCRIPT, cluster.address, str(path), str(count), str(seed)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed_after(process, path, samples):
    """Kill a script once so many samples are in the store."""
    while process.poll() is None and there(path) < samples:
        time.sleep(0.01)
    process.kill()
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_scripts_that_are_killed(kills, cluster, tmp_path):
    """The cluster lives on."""
    path, chance, before = tmp_path / "ray", random.Random(kills), 0
    expected = embedded(Noise(COUNT), tmp_path / "one")
    for _ in range(kills):
        killed_after(started(cluster, path, COUNT), path, before + chance.randrange(1, COUNT // 4))
        assert there(path) >= before, "samples were lost"
        before = there(path)
        if before > COUNT // 2:  # begin anew, to be killed again
            while actors("(Worker|Coordinator)"):
                time.sleep(0.1)
            shutil.rmtree(path)
            before = 0
    completed(cluster, Slowly(Noise(COUNT)), path)
    assert tree(path) == expected


def test_what_a_killed_script_left_does_not_write_into_another_store(cluster, tmp_path):
    path = tmp_path / "store"
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, *cluster.worker_nodes)]
    process = started(cluster, path, COUNT)
    while there(path) < COUNT // 5:
        time.sleep(0.01)
    orphans = actors("(Worker|Coordinator)")
    send(signal.SIGSTOP, [*orphans, *raylets])  # nobody ends what the script started
    process.kill()
    process.communicate()
    shutil.rmtree(path)
    expected = embedded(Noise(COUNT), path, seed=1)
    send(signal.SIGCONT, orphans)
    time.sleep(2)
    send(signal.SIGCONT, raylets)
    while set(actors("(Worker|Coordinator)")) & set(orphans):
        time.sleep(0.1)
    assert tree(path) == expected
