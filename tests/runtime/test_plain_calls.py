"""Plain operations in place of modules where multipliers flow: the same relevance, unless somebody watches the modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.runtime.explain_module import RuleModule, executed
from lrpfx.runtime.plain_calls import with_plain_calls
from lrpfx.runtime.ruled_operation import Execution


class Block(nn.Module):
    """Attention over a norm, a gate, and a dense layer used twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.projection, self.dense = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        query, key, value = self.projection(self.norm(x)).chunk(3, -1)
        x = x + self.dense(F.scaled_dot_product_attention(query, key, value)) * self.scale
        return self.dense(F.silu(x) * x)[:, 0]


@pytest.fixture
def input():
    return torch.randn(2, 5, 8, dtype=torch.float64)


@pytest.fixture
def explain_model(input):
    return lrpfx.transform(Block().double().eval(), AttnLRP(), example_inputs=input)


def relevance_of(module, input, seed):
    leaf = input.clone().requires_grad_()
    output = module(leaf)
    return output, torch.autograd.grad(output, leaf, seed)[0]


def modules_called(module):
    return {
        str(node.target)
        for node in module.graph.find_nodes(op="call_module")
        if isinstance(module.get_submodule(node.target), RuleModule)
    }


def test_relevance_is_that_of_the_modules(explain_model, input):
    plain, left = with_plain_calls(explain_model)
    assert modules_called(plain) < modules_called(explain_model)
    assert len(left.modules) >= 6 and not left.are_observed
    seed = torch.randn(2, 8, dtype=torch.float64)
    for found, direct in zip(relevance_of(plain, input, seed), relevance_of(explain_model, input, seed), strict=True):
        assert torch.equal(found, direct)


def test_parameters_get_no_gradient(explain_model, input):
    plain, _ = with_plain_calls(explain_model)
    parameters = list(explain_model.parameters())
    assert all(parameter.requires_grad for parameter in parameters)
    output = plain(input.requires_grad_()).sum()
    assert all(found is None for found in torch.autograd.grad(output, parameters, allow_unused=True))


@pytest.mark.parametrize("target", [1, [0, 3]], ids=["one target", "two targets"])
def test_attribution_runs_plain_calls_until_a_module_is_observed(explain_model, input, target):
    seen = []
    layer = explain_model.get_submodule("dense")
    expected = lrpfx.attribute(explain_model, input, target).relevance
    called = type(layer).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuleModule, "forward", lambda self, *values: seen.append(self) or called(self, *values))
        assert torch.equal(lrpfx.attribute(explain_model, input, target).relevance, expected)
        assert layer not in seen
        handle = layer.register_forward_hook(lambda module, args, output: seen.append("hook"))
        assert torch.equal(lrpfx.attribute(explain_model, input, target).relevance, expected)
        assert seen.count("hook") == 1
        handle.remove()
        assert torch.equal(lrpfx.attribute(explain_model, input, target).relevance, expected)
        assert seen.count("hook") == 1


def test_hooks_on_the_whole_and_on_all_modules_are_called(explain_model, input):
    seen = []
    handle = explain_model.register_forward_hook(lambda module, args, output: seen.append(module))
    lrpfx.attribute(explain_model, input, 1)
    assert seen == [explain_model]
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        lrpfx.attribute(explain_model, input, 1)
    finally:
        handle.remove()
    assert explain_model.get_submodule("dense") in seen


def test_a_module_in_place_of_another_is_noticed(explain_model):
    _, left = with_plain_calls(explain_model)
    explain_model.dense = executed(explain_model.dense, Execution(several=True))
    assert left.are_observed


def test_inputs_of_unknown_dtype_are_checked_by_modules(input):
    explain_model = lrpfx.transform(Block().double().eval(), AttnLRP(), capture="symbolic")
    assert not with_plain_calls(explain_model)[1].modules
    assert torch.isfinite(lrpfx.attribute(explain_model, input, 1).relevance).all()
