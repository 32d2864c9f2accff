"""torchvision's classifiers as they are: a small one of each family always, all 80 in the slow tests."""

import itertools

import pytest
from small_families import FAMILIES, small_family
from tools import torchvision_sweep

#: One composite for each, in turn.
PAIRS = [
    pytest.param(
        name, composite, marks=[pytest.mark.slow] * (name == "swin")
    )  # tests/frontends/test_capture.py has a smaller one
    for name, composite in zip(FAMILIES, itertools.cycle(torchvision_sweep.COMPOSITES), strict=False)
]


@pytest.mark.parametrize("name, composite", PAIRS)
@pytest.mark.sampled(3)
def test_a_small_one_of_each_family(name, composite):
    torchvision_sweep.examine_model(name, *small_family(name), (composite,))


@pytest.mark.parametrize(
    "name, composite",
    [pytest.param("inception_v3", "EpsilonPlus", marks=pytest.mark.slow), ("mnasnet0_5", "EpsilonAlpha2Beta1Flat")],
)
def test_families_that_have_no_small_ones(name, composite):
    torchvision_sweep.examine(name, (composite,))


@pytest.mark.slow
@pytest.mark.parametrize("composite", torchvision_sweep.COMPOSITES)
@pytest.mark.parametrize("name", torchvision_sweep.classifiers())
def test_every_classifier(name, composite):
    run = torchvision_sweep.examine_apart(name, composite)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_table_lists_every_classifier():
    table = torchvision_sweep.DOCUMENT.read_text()
    for name in torchvision_sweep.classifiers():
        assert table.count(f"| {name} | ") == len(torchvision_sweep.COMPOSITES)
