"""Activations that are written out: what is found, and what is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus


class Activated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def found(function):
    """What `find_activations` and `find_gated_products` put in place of a function."""
    model, x = Activated(function).double().eval(), torch.randn(2, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)
    stages = {stage.name: stage for stage in lrpfx.history(explain_model)}
    details = [one for name in ("find_activations", "find_gated_products") for one in stages[name].details]
    return [detail.rpartition(".")[2] for _, detail in details]


FOUND = {
    "sigmoid": lambda x: 0.5 * (1 + torch.tanh(x / 2)),
    "sigmoid of a multiple": lambda x: 0.5 * (1 + torch.tanh(0.85 * x)),
    "sigmoid of the negative": lambda x: 1 - torch.sigmoid(-x),
    "tanh": lambda x: 2 * torch.sigmoid(2 * x) - 1,
    "softplus": lambda x: torch.relu(x) + torch.log1p(torch.exp(-x.abs())),
    "softplus with a steepness": lambda x: torch.log(1 + torch.exp(3 * x)) / 3,
    "exp": lambda x: torch.expm1(x) + 1,
    "elu": lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
    "elu with a number": lambda x: torch.where(x > 0, x, 0.7 * (torch.exp(x) - 1)),
    "celu": lambda x: x.clamp(min=0) + torch.clamp(2 * (torch.exp(x / 2) - 1), max=0),
    "leaky_relu": lambda x: torch.maximum(x, 0.2 * x),
    "hardtanh": lambda x: torch.relu(x + 2) - torch.relu(x - 1) - 2,
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,
    "relu by a mask": lambda x: x * (x > 0).to(x.dtype),
    "relu": lambda x: (x + x.abs()) / 2 + torch.zeros_like(x),
}


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")  # an exponential that remains is named
@pytest.mark.parametrize("name", FOUND)
def test_an_activation_is_known_by_its_values(name):
    assert set(found(FOUND[name])) == {name.partition(" ")[0]}


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x) + 1e-12,  # a stabilizer is no rounding
        lambda x: torch.log(torch.relu(x) + 1e-6),
        lambda x: torch.sigmoid(x) + 1,
        lambda x: F.elu(x) + 1,
        lambda x: torch.relu(x + 3),
        lambda x: 0.5 * (1 + torch.tanh(x / 2)) + 0.1,
        lambda x: x + torch.tanh(x.flip(0)),
        lambda x: 3 * x + 1,
        lambda x: torch.where(x > 0, x * torch.log(x), 0.0),  # as a product with a mask it is nan
        lambda x: x.flip(0) * torch.where(x.flip(0) > 0, x, 0.1 * x),  # a gate of the other factor
        lambda x: torch.where(x > 0, x * x.flip(0), x.flip(0) - 1),
        lambda x: x + x * torch.tanh(x.flip(0)),  # a gate of another value
        lambda x: x * x.flip(0) + x * torch.tanh(x),  # the terms share no constant
    ],
)
def test_other_functions_stay(function):
    assert [name for name in found(function) if name != "sigmoid"] == []


def test_a_value_that_is_a_signal_and_has_a_gate_of_its_own_stays_whole():
    """v * v * sigmoid(v) has three factors."""
    assert found(lambda x: torch.tanh(x + 1) * (x * x * (0.5 * (1 + torch.tanh(x)))))


def test_a_copy_that_orders_entries_in_memory_stays():
    """`flatten` of a moved value is a view of its copy, once torch has replaced what writes in place."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(40, 3)

        def forward(self, x):
            written, moved = torch.empty_like(x), x.transpose(1, 2)
            written[:, :1], written[:, 1:] = 2 * x[:, :1], 3 * x[:, 1:]
            return self.last(torch.cat([written.flatten(1), (moved / (1 + moved.abs())).flatten(1)], 1))

    model, x = Written().double().eval(), torch.randn(3, 5, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    assert torch.allclose(explain_model(x), model(x), rtol=1e-12)
    stages = {stage.name: stage for stage in lrpfx.history(explain_model)}
    assert [detail.rpartition(".")[2] for _, detail in stages["find_activations"].details] == ["softsign"]
