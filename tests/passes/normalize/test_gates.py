"""Products that scale a signal are found by structure."""

import re

import pytest
import torch
from helpers import Binary, Unary, torchvision_model
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx import rules, types
from lrpfx.composites import CPLRP, EpsilonPlus


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
    with pytest.warns(lrpfx.LrpfxWarning, match="the input 'logits' gets no relevance"):
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


class TwoTowers(nn.Module):
    """Two inputs whose encodings are multiplied by `function`."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.function = function

    def forward(self, a, b):
        return self.head(self.function(self.first(a), self.second(b)))


NORMALIZED = {
    "normalize": lambda a: functional.normalize(a, dim=-1),
    "norm": lambda a: a / a.norm(dim=-1, keepdim=True),
    "norm by hand": lambda a: a * (a**2).sum(-1, keepdim=True).clamp(min=1e-6).rsqrt(),
    "root mean square": lambda a: a / (a * a).mean(-1, keepdim=True).add(1e-6).sqrt(),
    "layer norm": lambda a: (a - a.mean(-1, keepdim=True)) / (a.var(-1, keepdim=True) + 1e-6).sqrt(),
    "reciprocal": lambda a: a * (1 / a.norm(dim=-1, keepdim=True)),
    "magnitudes": lambda a: a / a.abs().sum(-1, keepdim=True),
    "of bounded values": lambda a: functional.normalize(a.tanh(), dim=-1),
    "of a share": lambda a: 3 * a.sigmoid() / a.sigmoid().norm(dim=-1, keepdim=True),
}
TOWERS = {
    "tanh": torch.tanh,
    "half of tanh": lambda a: 0.5 * a.tanh(),
    "clamp": lambda a: a.clamp(-1, 1),
    "erf": torch.erf,
    "relu6": functional.relu6,
    "relu": torch.relu,
}
SCALES = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda a: a.softmax(-1),
    "tanh and a constant": lambda a: 0.5 * (1 + a.tanh()),
    "share of the sum": lambda a: a.sigmoid() / a.sigmoid().sum(-1, keepdim=True),
}


def kinds_of_products(function, capture="symbolic"):
    program = lrpfx.transform(TwoTowers(function).eval(), CPLRP(), example_inputs=inputs_of_towers(), capture=capture)
    return [row.kind for row in lrpfx.assignment(program) if row.kind in ("Product", "Gate", "GatedProduct")]


def inputs_of_towers():
    return torch.randn(2, 6), torch.randn(2, 4)


@pytest.mark.parametrize("name", [*NORMALIZED, *TOWERS])
@pytest.mark.sampled(3)
def test_a_normalized_vector_and_the_end_of_a_tower_are_signals(name):
    encode = (NORMALIZED | TOWERS)[name]
    for function in (lambda a, b: encode(a) * b, lambda a, b: b * encode(a)):
        for capture in ("symbolic", "export"):
            assert kinds_of_products(function, capture)[-1] == "Product"
        explain_model = lrpfx.transform(TwoTowers(function).eval(), CPLRP())
        assert all(one.any() for one in lrpfx.attribute(explain_model, inputs_of_towers(), 0).relevance)


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_from_another_input_takes_nothing_which_is_said_once(name):
    scale = SCALES[name]
    model = TwoTowers(lambda a, b: scale(a) * b).eval()
    explain_model, inputs = lrpfx.transform(model, EpsilonPlus()), inputs_of_towers()
    message = r"the input 'a' gets no relevance, but the output depends on it: mul\w* \(Gate\).*\(types.Gate, Uniform\(\)\)"
    with pytest.warns(lrpfx.LrpfxWarning, match=message):
        of_scale, of_signal = lrpfx.attribute(explain_model, inputs, 0).relevance
    assert of_signal.any() and not of_scale.any()
    lrpfx.attribute(explain_model, inputs, 0)  # a warning would be an error
    (warning,) = lrpfx.check(model, EpsilonPlus(), *inputs).warnings
    assert re.search(message, warning)
    shared = EpsilonPlus(layer_map=[(types.Gate, rules.Uniform())])
    of_scale, of_signal = lrpfx.attribute(lrpfx.transform(model, shared), inputs, 0).relevance
    assert of_signal.any() and of_scale.any()


def test_scales_from_two_inputs_take_nothing():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

        def forward(self, a, b, c):
            first, second, signal = (tower(x) for tower, x in zip(self.towers, (a, b, c), strict=True))
            return (signal * first.sigmoid()) * second.sigmoid()

    inputs = tuple(torch.randn(2, 4) for _ in range(3))
    message = "the inputs 'a' and 'b' get no relevance, but the output depends on them: "
    with pytest.warns(lrpfx.LrpfxWarning, match=message):
        of_a, of_b, of_c = lrpfx.attribute(lrpfx.transform(Scaled(), EpsilonPlus()), inputs, 0).relevance
    assert of_c.any() and not of_a.any() and not of_b.any()


def test_factors_of_one_input_stay_gates():
    x = torch.randn(2, 6)
    for function in (
        lambda x: x.tanh() * x.sigmoid(),
        lambda x: x * torch.tanh(functional.softplus(x)),
        lambda x: x * functional.relu6(x + 3) / 6,
    ):
        kinds = [row.kind for row in lrpfx.assignment(lrpfx.transform(Unary(function), EpsilonPlus(), example_inputs=x))]
        assert "Gate" in kinds and "GatedProduct" not in kinds


def test_queries_that_get_nothing_are_named():
    class Attend(nn.Module):
        def forward(self, query, memory, mask):
            return (query @ memory.transpose(1, 2) + mask).softmax(-1) @ memory

    inputs = (torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.zeros(2, 1, 5))
    explain_model = lrpfx.transform(Attend().eval(), CPLRP(), example_inputs=inputs)
    with pytest.warns(lrpfx.LrpfxWarning, match=r"the input 'query' gets no relevance.*WeightedValues, UniformEpsilon"):
        lrpfx.attribute(explain_model, inputs, lambda output: output)
    shared = CPLRP(layer_map=[(types.WeightedValues, rules.UniformEpsilon())])
    explain_model = lrpfx.transform(Attend().eval(), shared, example_inputs=inputs)
    assert all(one.any() for one in lrpfx.attribute(explain_model, inputs, lambda output: output).relevance[:2])
