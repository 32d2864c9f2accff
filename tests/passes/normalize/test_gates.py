"""Products that scale a signal are found by structure."""

import torch
from helpers import Binary, torchvision_model
from torch import nn

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


class Routed(nn.Module):
    """Results of experts, times probabilities that are divided by their sum."""

    def forward(self, x, logits):
        chosen = logits.softmax(1).topk(2, 1).values
        return chosen / chosen.sum(1, keepdim=True) * x


def test_probabilities_that_are_divided_by_their_sum_scale_a_signal():
    x, logits = torch.randn(3, 2), torch.randn(3, 4)
    explain_model = lrpfx.transform(Routed().eval(), EpsilonPlus(), example_inputs=(x, logits))
    output = Routed()(x, logits)
    of_signal, of_router = lrpfx.attribute(explain_model, (x, logits), lambda output: output).relevance
    torch.testing.assert_close(of_signal, output)
    assert not of_router.any()


class NotRouted(nn.Module):
    """The numerator is a signal: neither factor is known to scale the other."""

    def forward(self, x, y):
        return x * (y / y.abs().sum(1, keepdim=True))


def test_signals_that_are_divided_are_no_scales():
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    explain_model = lrpfx.transform(NotRouted().eval(), EpsilonPlus(), example_inputs=(x, y))
    output = NotRouted()(x, y)
    for relevance in lrpfx.attribute(explain_model, (x, y), lambda output: output).relevance:
        torch.testing.assert_close(relevance, output / 2)
