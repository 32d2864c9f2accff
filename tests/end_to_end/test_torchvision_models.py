"""torchvision's classifiers as they are: one of each family always, all 80 in the slow tests."""

import itertools

import pytest
from tools import torchvision_sweep

FAMILIES = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "mnasnet0_5"),
    *("mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnext50_32x4d"),
    *("shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "vgg11_bn", "vit_b_32"),
)


#: One composite for each, in turn.
PAIRS = list(zip(FAMILIES, itertools.cycle(torchvision_sweep.COMPOSITES), strict=False))


@pytest.mark.parametrize("name, composite", PAIRS)
def test_one_of_each_family(name, composite):
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
