"""Factors and terms for each channel are a batch norm, where no layer takes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus


class Net(nn.Module):
    """A function of a ReLU's output and of parameters for each channel, and a classifier."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), function
        self.scale, self.shift = nn.Parameter(torch.randn(4, 1, 1)), nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return self.last(torch.relu(self.function(self, torch.relu(self.first(x)))).amax((2, 3)))


def kinds(function):
    model, x = Net(function).double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)
    accounts = lrpfx.ledger(explain_model, x, 1)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
    return [row.kind for row in lrpfx.assignment(explain_model)]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * m.scale + m.shift,
        lambda m, x: (x - m.shift) / m.scale,
        lambda m, x: m.shift - 2 * x * m.scale,
        lambda m, x: torch.add(m.shift, (x + 1) * m.scale[None]),
    ],
)
def test_scale_and_shift_are_a_batch_norm(function):
    assert "BatchNorm" in kinds(function) and not {"Product", "Sum"} & set(kinds(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * m.scale,  # no shift
        lambda m, x: x + m.shift,  # no scale
        lambda m, x: 2 * x + 1,
        lambda m, x: x * (m.scale > 0) + m.shift,  # a mask, which hides channels
        lambda m, x: (x.transpose(1, 3) * m.scale[:, 0, 0] + m.shift[:, 0, 0]).transpose(1, 3),  # channels last
        lambda m, x: F.normalize(x, dim=1) * m.scale + m.shift,  # the affine part of another normalization
        lambda m, x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True) * m.scale + m.shift,
    ],
)
def test_other_arithmetic_stays(function):
    assert "BatchNorm" not in kinds(function)


def test_the_normalization_of_the_input_is_a_matter_of_the_canonizers():
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
            self.register_buffer("mean", torch.rand(3, 1, 1))
            self.register_buffer("std", torch.rand(3, 1, 1) + 0.5)

        def forward(self, x):
            return self.layer((x - self.mean) / self.std)

    explain_model = lrpfx.transform(Normalized().eval(), EpsilonPlus(), example_inputs=torch.rand(2, 3, 6, 6))
    assert "BatchNorm" not in [row.kind for row in lrpfx.assignment(explain_model)]
