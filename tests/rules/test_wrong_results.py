"""What a user's modifier or hook returns is checked: anything but relevance of the right shape is a `RuleError`."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import LayerMapComposite
from lrpfx.errors import RuleError

WRONG = {
    "None": lambda *given: None,
    "number": lambda *given: 1.0,
    "text": lambda *given: "x",
    "scalar": lambda *given: torch.tensor(1.0),
    "too many": lambda *given: (torch.ones(2, 4),) * 3,
    "none": lambda *given: (),
}


class WithCode(rules.Hook):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def copy(self):
        return WithCode(self.function)

    def backward(self, module, grad_input, grad_output):
        return self.function(grad_input, grad_output)


class WithFormula(rules.Hook):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def copy(self):
        return WithFormula(self.function)

    def propagate(self, call, relevance):
        return self.function(call, relevance)


def rule_with(part, function):
    if part == "code":
        return WithCode(function)
    if part == "formula":
        return WithFormula(function)
    return rules.BasicHook(**{part: [function] if part.endswith("modifiers") else function})


def in_graph(model, composite, x):
    lrpfx.attribute(lrpfx.transform(model, composite, example_inputs=x), x, 0)


def on_module(model, composite, x):
    with composite.context(model) as changed:
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(changed(leaf)[:, 0].sum(), leaf)


@pytest.mark.parametrize("run", [in_graph, on_module])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "part", ["input_modifiers", "param_modifiers", "output_modifiers", "gradient_mapper", "reducer", "code", "formula"]
)
def test_wrong_results_are_named(part, wrong, run):
    if (part, wrong) in (("code", "None"), ("output_modifiers", "scalar")):
        return  # the ordinary gradient; an output may have another shape
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    with pytest.raises(RuleError, match="returned"):
        run(model, LayerMapComposite([(nn.Linear, rule_with(part, WRONG[wrong]))]), x)


@pytest.mark.parametrize("run", [in_graph, on_module])
@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (1, 4), (3, 4), (2, 4, 1)])
@pytest.mark.parametrize("part", ["code", "formula"])
def test_relevance_has_the_shape_of_the_input(part, shape, run):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    with pytest.raises(RuleError, match="returned"):
        run(model, LayerMapComposite([(nn.Linear, rule_with(part, lambda *given: torch.ones(shape)))]), x)


@pytest.mark.parametrize("run", [in_graph, on_module])
def test_no_change_is_no_error(run):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    run(model, LayerMapComposite([(nn.Linear, WithCode(WRONG["None"]))]), x)
