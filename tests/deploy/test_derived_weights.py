"""Programs compute modified weights from those that they hold anyway, and compute them once."""

import pytest
import torch
from helpers import Layered, assert_agrees
from torch import nn

import lrpfx
from lrpfx.composites import (
    EpsilonAlpha2Beta1Flat,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    LayerMapComposite,
    NameMapComposite,
)
from lrpfx.core import BasicHook, ParamMod
from lrpfx.deploy.backends.exported import fold_constants
from lrpfx.passes.lower import derive_weights as derived_weights
from lrpfx.passes.lower.derive_weights import derive_weights
from lrpfx.types import Linear

COMPOSITES = {
    "plus": EpsilonPlus(),
    "plus, flat": EpsilonPlusFlat(),
    "alpha, beta": EpsilonAlpha2Beta1Flat(),
    "gamma": EpsilonGammaBox(-3.0, 3.0),
    "w square": LayerMapComposite([(Linear, lrpfx.rules.WSquare())]),
}


@pytest.mark.filterwarnings("ignore:the map does not add up")  # ReLU keeps its plain gradient
@pytest.mark.parametrize(
    "name, optimize",
    [
        pytest.param(name, optimize, marks=[] if optimize or name in ("plus", "w square") else [pytest.mark.slow])
        for name in COMPOSITES
        for optimize in (True, False)
    ],
)
@pytest.mark.sampled(3)
def test_weights_of_rules_are_not_held(name, optimize, monkeypatch):
    monkeypatch.setattr(derived_weights, "SMALLEST", 0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    explain_model = lrpfx.transform(model.eval(), COMPOSITES[name], optimize=optimize, unassigned="gradient")
    x = torch.rand(2, 3, 8, 8)
    program = lrpfx.lower(explain_model, x, target="max")
    weights = {one for one, value in program.state_dict.items() if value.ndim > 1}
    assert weights == {"0.merged_weight", "3.weight", "5.weight"}
    assert_agrees(program.module(), explain_model, x, tolerance=1e-12)
    folded = program.module()
    fold_constants(folded)
    computing = [
        node
        for node in folded.graph.nodes
        if node.all_input_nodes and all(one.op == "get_attr" for one in node.all_input_nodes)
    ]
    assert not computing
    assert torch.equal(folded(x)["relevance"], program.module()(x)["relevance"])


def modified(modifier):
    """A program of a network whose convolution has a rule with this modifier of parameters, and its explainable module."""
    rule = BasicHook(
        [lambda x: x], [ParamMod(modifier)], [lambda y: y], lambda r, y: r / (y[0] + 0.1), lambda x, g: x[0] * g[0]
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(layer_map=[(nn.Conv2d, rule)]))
    return lrpfx.lower(explain_model, torch.rand(2, 3, 8, 8), target="max"), explain_model


@pytest.mark.parametrize(
    "elementwise", [lambda weight, name: weight.clamp(min=0), lambda weight, name: 2 * weight.abs() - weight]
)
def test_what_a_modifier_computes_elementwise_is_not_held(elementwise, monkeypatch):
    monkeypatch.setattr(derived_weights, "SMALLEST", 0)
    program, explain_model = modified(elementwise)
    assert set(program.state_dict) == {"0.merged_weight", "0.merged_bias", "4.weight", "4.bias"}
    assert_agrees(program.module(), explain_model, torch.rand(2, 3, 8, 8), tolerance=1e-12)


@pytest.mark.parametrize(
    "modifier",
    [
        lambda weight, name: weight / weight.abs().sum(),
        lambda weight, name: weight * torch.rand_like(weight),  # others each time
        lambda weight, name: weight.flip(0),
    ],
    ids=["normalized", "drawn", "turned"],
)
def test_what_is_not_elementwise_is_held(modifier, monkeypatch):
    monkeypatch.setattr(derived_weights, "SMALLEST", 0)
    program, explain_model = modified(modifier)
    assert {"0.weight_modified", "0.bias_modified"} <= set(program.state_dict)
    assert_agrees(program.module(), explain_model, torch.rand(2, 3, 8, 8), tolerance=1e-12)


def test_models_without_derived_weights():
    model = nn.Sequential(nn.Linear(4, 3))
    composite = NameMapComposite([(["0"], lrpfx.rules.Epsilon())])
    program = lrpfx.lower(lrpfx.transform(model, composite, fold=False), torch.rand(2, 4), target="max")
    assert set(program.state_dict) == {"0.weight", "0.bias"}
    assert derive_weights(program.graph, model, lrpfx.transform(model, composite)) == []


def test_a_file_of_a_small_program_takes_little_memory():
    """What is large is left to each call."""

    class Large(Layered):
        def forward(self, x):
            return x + self.weight.abs().repeat(2000, 2000).sum()

    program = torch.export.export(Large(weight=nn.Parameter(torch.rand(10, 10))), (torch.rand(3),)).module()
    fold_constants(program)
    names = {node.name for node in program.graph.nodes}
    assert "repeat" in names and "abs_1" not in names
