"""The simulation of many workers, and the tables of docs/scale.md."""

import json
from dataclasses import replace

import pytest
import scale
from helpers import ROOT

SETTING = scale.Setting("test", explain=0.01, load=0.001, stored=1000.0, read=1000.0, block=100, arrays=8)
CLUSTER = scale.Cluster(start=20.0, lost=0.0, spread=0.0)


def test_one_worker_takes_the_time_of_its_blocks():
    found = scale.simulate(10_000, 1, SETTING, CLUSTER)
    handed_out = 100 / CLUSTER.coordinator
    writing = 8 * CLUSTER.latency / CLUSTER.parallel
    assert found.seconds == pytest.approx(20 + 100 * 0.001 + 10_000 * 0.01 + handed_out + writing, rel=1e-9)
    assert found.requests == 8 * 102 and found.bytes == 10_000 * 1000 and not found.lost and found.limit == "explaining"


@pytest.mark.parametrize(
    ("change", "of_cluster", "limit", "rate"),
    [
        ({}, {"coordinator": 2.0}, "the coordinator", 2.0),
        ({}, {"requests": 16.0}, "requests to the store", 2.0),
        ({}, {"shared": 400_000.0}, "the network", 2.0),
        ({"load": 0.1}, {}, "loading", 100 / 10),
        ({"stored": 25e6}, {"bandwidth": 250e6, "shared": 1e15}, "writing", 100 / 10),
    ],
)
def test_what_is_scarce_limits(change, of_cluster, limit, rate):
    """With a hundred workers, blocks come at the rate of what is shared, or of the slowest part of each worker."""
    samples = 100 * 3_000
    found = scale.simulate(samples, 100, replace(SETTING, **change), replace(CLUSTER, **of_cluster))
    assert found.limit == limit
    assert 3_000 / (found.seconds - 20) == pytest.approx(rate, rel=0.05)


def test_long_runs_go_on_at_the_same_rate(monkeypatch):
    cluster = replace(CLUSTER, spread=0.2, lost=1.0)
    whole = scale.simulate(4_000_000, 20, SETTING, cluster)
    monkeypatch.setattr(scale, "MOST", 12_000)
    assert scale.simulate(4_000_000, 20, SETTING, cluster).seconds == pytest.approx(whole.seconds, rel=0.02)


def test_lost_workers_cost_time():
    one, other = (scale.simulate(100_000, 10, SETTING, replace(CLUSTER, lost=lost)) for lost in (0.0, 20.0))
    assert other.lost > 0 and one.lost == 0 and other.seconds > one.seconds and other.efficiency < one.efficiency


def test_the_document_has_what_the_figures_give(monkeypatch):
    """The tables of a small run are computed here; those of a billion samples take too long."""
    measured = json.loads((ROOT / "benchmarks" / "data_sets.json").read_text())
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for line in (*scale._measured(measured), *scale._rows(list(scale.settings_of(measured).values()))):
        assert line in text
    cluster = scale.Cluster(start=measured["two"]["start"], coordinator=measured["handing out"])
    for line in scale.table(1_281_167, [10, 100], scale.settings_of(measured)["photographs"], cluster):
        assert line in text
