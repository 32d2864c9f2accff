"""Steps of recurrent layers that are written out are found, and nothing else is taken for one."""

import pytest
import torch
from helpers import assert_close
from spellings import SERIES, Series
from torch import nn

import lrpfx
from lrpfx import rules, types
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.concepts import Channel


def kinds(model, x, capture="export"):
    """The rows of the steps that are found."""
    explain_model = lrpfx.transform(model.eval(), EpsilonPlus(), example_inputs=x, capture=capture)
    stages = {stage.name: stage for stage in lrpfx.history(explain_model)}
    return [text.removeprefix("now ") for _, text in stages["find_recurrent"].details]


@pytest.mark.parametrize("name", SERIES)
def test_the_rule_of_signals_gives_both_spellings_one_map(name):
    chosen = AttnLRP(layer_map=[(types.Recurrent, rules.SignalTakesAll(1e-9))])
    maps = []
    for spelling in SERIES[name]:
        model = Series(spelling)
        x = model.example()
        explain_model = lrpfx.transform(model, chosen, example_inputs=x)
        maps.append(lrpfx.attribute(explain_model, x, 1).relevance)
        assert lrpfx.ledger(explain_model, x, 1).unexplained <= 1e-9
    assert_close(*maps, 1e-6 * maps[0].abs().max())


@pytest.mark.parametrize("name", SERIES)
def test_the_relevance_of_steps_is_accounted_for(name):
    model = Series(SERIES[name][1])
    x = model.example()
    assert lrpfx.ledger(lrpfx.transform(model, EpsilonPlus(), example_inputs=x), x, 1).unexplained <= 1e-9


class Function(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(*self.layers, x)


def convolutional(gates, x):
    hidden = cell = x.new_zeros(2, 4, 6, 6)
    for step in range(3):
        enter, keep, candidate, out = gates(torch.cat([x[:, step], hidden], 1)).chunk(4, 1)
        cell = torch.sigmoid(keep + 1.0) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
        hidden = torch.sigmoid(out) * torch.tanh(cell)
    return hidden


def reset_before(gates, candidate, x):
    hidden = x.new_zeros(2, 4)
    for step in range(3):
        reset, gate = torch.sigmoid(gates(torch.cat([x[:, step], hidden], 1))).chunk(2, 1)
        new = torch.tanh(candidate(torch.cat([x[:, step], reset * hidden], 1)))
        hidden = (1.0 - gate) * hidden + gate * new
    return hidden


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_other_recurrent_layers(capture):
    """A convolutional LSTM, and the GRU of Cho et al. 2014, whose gate scales the state that the candidate reads."""
    x = torch.randn(2, 3, 2, 6, 6)
    found = kinds(Function(convolutional, nn.Conv2d(6, 16, 3, padding=1)), x, capture=capture)
    assert found == ["lstm_step"] * 3
    model, x = Function(reset_before, nn.Linear(7, 8), nn.Linear(7, 4)).eval(), torch.randn(2, 3, 3)
    assert kinds(model, x, capture=capture) == ["gru_step"] * 3
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x, capture=capture)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    assert_close(lrpfx.attribute(explain_model, x, 1).relevance, x * gradient, 1e-12)  # Epsilon all the way


def highway(gate, layer, x):
    share = torch.sigmoid(gate(x))
    return share * torch.tanh(layer(x)) + (1 - share) * x


def united(gate, first, second, x):
    """A gated multimodal unit (Arevalo et al. 2017)."""
    share = torch.sigmoid(gate(x))
    return share * torch.tanh(first(x)) + (1 - share) * torch.tanh(second(x))


def perceptron(first, second, x):
    return torch.tanh(second(torch.tanh(first(x))))


@pytest.mark.parametrize("function, layers", [(highway, 2), (united, 3), (perceptron, 2)])
def test_what_is_no_recurrent_layer(function, layers):
    assert kinds(Function(function, *(nn.Linear(4, 4) for _ in range(layers))), torch.randn(2, 4)) == []


def test_a_step_alone():
    """One dense layer that reads its own activation is a step of an RNN, and so is the activation that it reads."""
    layer = nn.Linear(4, 4)
    assert kinds(Function(lambda layer, x: torch.tanh(layer(torch.tanh(layer(x)))), layer), torch.randn(2, 4)) == ["rnn_step"]


def test_channels_of_a_step():
    """A step of a convolutional layer has its channels second."""
    x = torch.randn(2, 3, 2, 6, 6)
    model = Function(convolutional, nn.Conv2d(6, 16, 3, padding=1)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    steps = [row.name for row in lrpfx.assignment(explain_model) if row.kind == "Recurrent"]
    maps = [
        lrpfx.attribute(explain_model, x, lambda output: output, conditions=[{steps[-1]: one}]).relevance
        for one in (1, Channel(1))
    ]
    assert torch.equal(*maps) and maps[0].abs().sum() > 0
