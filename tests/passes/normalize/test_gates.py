"""Products that scale a signal are found by structure."""

import torch
from helpers import Binary, torchvision_model

import lrpfx
from lrpfx.composites import EpsilonPlus


def test_the_number_of_gates_is_reported():
    """Squeeze-and-excitation blocks are found by structure, and the history says how many and by what they are scaled."""
    for name, count in (("mobilenet_v3_small", 9), ("efficientnet_b0", 16), ("resnet18", 0)):
        stages = {stage.name: stage for stage in lrpfx.history(lrpfx.transform(torchvision_model(name), EpsilonPlus()))}
        assert stages["find_gates"].matches == count
        assert all(detail.startswith("scaled by ") for _, detail in stages["find_gates"].details)
    plain = lrpfx.history(lrpfx.transform(Binary(torch.mul), EpsilonPlus()))
    (reason,) = next(stage for stage in plain if stage.name == "find_gates").reasons
    assert reason == ("mul", "no factor is known to scale the other")
