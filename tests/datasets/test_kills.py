"""Runs that are killed at random times, and go on."""

import random
import shutil
import signal
import time

import numpy as np
import pytest
from data_sets import run, tree

import lrpfx.datasets

pytestmark = pytest.mark.programs

COUNT = 500


@pytest.fixture(scope="module")
def whole(context, tmp_path_factory):
    """An uninterrupted run of each kind."""
    made = {}

    def of(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp("whole") / "store"
            process = context.Process(target=run, args=(path, COUNT, kind))
            process.start()
            process.join()
            made[kind] = path
        return made[kind]

    return of


def there(path):
    """How many samples are in a store, which may be about to be made."""
    try:
        return int(lrpfx.datasets.open(path).done.sum())
    except lrpfx.LrpfxError:
        return 0


def killed(context, path, kind, batch_size, after, delay):
    """Start a run, and kill it some seconds after so many samples are in the store. How many are there then."""
    process = context.Process(target=run, args=(path, COUNT, kind, batch_size))
    process.start()
    while process.is_alive() and there(path) < after:
        time.sleep(0.002)
    process.join(delay)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), "the run itself failed"
    return int(lrpfx.datasets.open(path).done.sum()) if path.exists() else 0


@pytest.mark.parametrize(
    ("kind", "kills"),
    [("sequence", 2), ("stream", 2), *(pytest.param(kind, 30, marks=pytest.mark.slow) for kind in ("sequence", "stream"))],
)
def test_a_killed_run_goes_on(kind, kills, context, whole, tmp_path):
    expected = whole(kind)
    path, chance = tmp_path / "store", random.Random(f"{kind}{kills}")
    counts = [0]
    for number in range(kills):
        after = chance.randrange(counts[-1], max(counts[-1], COUNT // 2) + 1)
        counts.append(killed(context, path, kind, 8, after, chance.uniform(0, 0.05)))
        assert counts[-1] >= counts[-2], "samples were lost"
        if counts[-1] > 0.7 * COUNT and number < kills - 1:  # start over, to be killed again
            run(path, COUNT, kind)
            assert tree(path) == tree(expected)
            shutil.rmtree(path)
            counts.append(0)
    assert any(0 < count < COUNT for count in counts), f"all kills were too early or too late: {counts}"
    found = run(path, COUNT, kind)
    assert found.done.all()
    assert tree(path) == tree(expected)
    assert [one.name for one in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("kind", [pytest.param("sequence", marks=pytest.mark.slow), "stream"])
def test_another_batch_size_goes_on(kind, context, whole, tmp_path):
    expected, path = whole(kind), tmp_path / "store"
    for batch_size, after in ((8, COUNT // 5), (5, COUNT // 2)):
        killed(context, path, kind, batch_size, after, 0)
    found, other = run(path, COUNT, kind, batch_size=3), lrpfx.datasets.open(expected)
    assert found.done.all() and len(found) == len(other) and found.errors == other.errors
    for name in other.names:
        one, another = found[name][:], other[name][:]
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, another, rtol=2e-3, atol=1e-7 * np.nanmax(np.abs(another)))
        else:
            assert np.array_equal(one, another)
