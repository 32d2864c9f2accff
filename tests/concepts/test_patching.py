"""Multipliers, and patching estimated by them, against patching itself."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonPlus
from lrpfx.concepts import patching_effects, values_of
from lrpfx.errors import InputError


class Circuit(nn.Module):
    """Two paths, one of them gated by a ReLU, that meet in a sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.gate, self.out = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x, replaced=None):
        values = {}

        def keep(name, value):
            values[name] = replaced[name] if replaced and name in replaced else value
            return values[name]

        hidden = keep("second", self.second(keep("first", self.first(x))))
        gated = keep("relu", torch.relu(keep("gate", self.gate(x))))
        return self.out(keep("add", hidden + gated))


NAMES = ["first", "second", "gate", "relu", "add"]


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 4), torch.randn(3, 4)


def explained():
    return lrpfx.transform(Circuit().eval(), AttnLRP(), example_inputs=torch.randn(3, 4))


def real_effects(x, other, name):
    """The change of output 1 if a node has its value for the other input."""
    model = Circuit().eval()
    value = values_of(explained(), other, name)[name]
    with torch.no_grad():
        return model(x, {name: value})[:, 1] - model(x)[:, 1]


def test_effects_are_those_of_patching_where_the_rest_is_linear(inputs):
    effects = patching_effects(explained(), *inputs, 1, names=NAMES)
    for name in ("first", "second", "relu", "add"):
        assert torch.allclose(effects[name].sum(1), real_effects(*inputs, name), atol=1e-12)
    estimate, real = effects["gate"].sum(1), real_effects(*inputs, "gate")
    assert not torch.allclose(estimate, real) and torch.corrcoef(torch.stack([estimate, real]))[0, 1] > 0.5
    x = inputs[0]
    near = patching_effects(explained(), x, x + 1e-7 * torch.randn_like(x), 1, names="gate")["gate"]
    active = values_of(explained(), x, "gate")["gate"] > 0
    assert (near[~active] == 0.0).all() and (near[active] != 0.0).all(), "a ReLU that is off passes nothing on"


def test_effects_of_differences_from_the_other_inputs_add_up(inputs):
    """All that the output depends on passes through these nodes."""
    model = Circuit().double().eval()
    x, other = (one.double() for one in inputs)
    explain_model = lrpfx.transform(model, DeepLIFT(), example_inputs=x)
    change = (model(other) - model(x))[:, 1].detach()
    for given in ((x, other), ([x], [other]), ({"x": x}, {"x": other})):
        effects = patching_effects(explain_model, *given, 1, names=["add", "relu", "second"])
        torch.testing.assert_close(effects["add"].sum(1), change, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((effects["relu"] + effects["second"]).sum(1), change, rtol=1e-12, atol=1e-12)


def test_multipliers_are_relevance_per_value(inputs):
    x, _ = inputs
    for composite in (AttnLRP(), EpsilonPlus()):
        explain_model = lrpfx.transform(Circuit().eval(), composite, example_inputs=x)
        values = values_of(explain_model, x, NAMES)
        found = lrpfx.attribute(explain_model, x, 1, record=NAMES, record_multipliers=["relu", "add", "second"])
        assert list(found.multipliers) == ["relu", "add", "second"] and list(found.layers) == NAMES
        for name, multiplier in found.multipliers.items():
            assert torch.allclose(multiplier * values[name], found.layers[name], atol=1e-12)
        alone = lrpfx.attribute(explain_model, x, 1, record_multipliers="*e*").multipliers
        assert torch.equal(alone["relu"], found.multipliers["relu"]) and not lrpfx.attribute(explain_model, x).multipliers


def test_zeros_have_multipliers_where_nothing_is_divided(inputs):
    x, _ = inputs
    found = lrpfx.attribute(explained(), x, 1, record_multipliers="relu").multipliers["relu"]
    zeros = values_of(explained(), x, "relu")["relu"] == 0.0
    assert zeros.any() and torch.allclose(found, Circuit().out.weight[1].expand_as(found), atol=1e-12)
    divided = lrpfx.transform(Circuit().eval(), AttnLRP(), example_inputs=x, optimize=False)
    assert (lrpfx.attribute(divided, x, 1, record_multipliers="relu").multipliers["relu"][zeros] == 0.0).all()


def test_multipliers_of_several_targets_conditions_and_compiled_modules(inputs):
    x, _ = inputs
    explain_model = explained()
    conditions = [{"add": [0, 1]}, {"add": [2]}]
    arguments = {"targets": [0, 1], "conditions": conditions, "record_multipliers": ["first", "relu"]}
    several = lrpfx.attribute(explain_model, x, **arguments)
    compiled = lrpfx.attribute(torch.compile(explain_model, backend="aot_eager"), x, **arguments)
    for name in ("first", "relu"):
        assert several.multipliers[name].shape == (2, 2, 3, 5)
        assert torch.allclose(compiled.multipliers[name], several.multipliers[name], atol=1e-12)
        alone = lrpfx.attribute(explain_model, x, 1, conditions=conditions[1:], record_multipliers=name)
        assert torch.allclose(alone.multipliers[name][0], several.multipliers[name][1, 1], atol=1e-12)


def test_what_cannot_be_patched(inputs):
    x, other = inputs
    with pytest.raises(InputError, match="no node or module named 'third'"):
        patching_effects(explained(), x, other, 1, names="third")
    with pytest.raises(InputError, match=r"\(3, 5\) and \(2, 5\)"):
        patching_effects(explained(), x, other[:2], 1, names="add")
    with pytest.raises(InputError, match="no node is named"):
        values_of(explained(), x, [])
