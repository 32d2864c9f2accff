"""Plain operations in place of modules where multipliers flow: the same relevance, unless somebody watches the modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.runtime.explain_module import RuleModule
from lrpfx.runtime.plain_calls import Called, with_plain_calls


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
    plain, called = with_plain_calls(explain_model), Called(explain_model)
    assert modules_called(plain) < modules_called(explain_model)
    assert len(called.modules) >= 6 and not called.are_observed
    seed = torch.randn(2, 8, dtype=torch.float64)
    for found, direct in zip(relevance_of(plain, input, seed), relevance_of(explain_model, input, seed), strict=True):
        assert torch.equal(found, direct)


def test_parameters_get_no_gradient(explain_model, input):
    plain = with_plain_calls(explain_model)
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


class Tripled(nn.Module):
    """Stands in for a layer, with its parameters, and returns three times its result."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self._parameters.update(layer._parameters)

    def forward(self, *values):
        return 3 * self.layer(*values)


def with_new_module(explain_model):
    explain_model.projection = Tripled(explain_model.projection)


def with_new_forward(explain_model):
    layer = explain_model.projection
    former = layer.forward
    layer.forward = lambda *values: 3 * former(*values)


def with_hook_of_the_backward(explain_model):
    explain_model.projection.register_full_backward_hook(lambda module, given, received: (given[0] * 3, *given[1:]))


@pytest.mark.parametrize("change", [with_new_module, with_new_forward, with_hook_of_the_backward])
@pytest.mark.parametrize("composite", [AttnLRP(), EpsilonPlus()], ids=["plain calls", "modules"])
def test_changes_of_modules_are_noticed_after_the_first_call(input, change, composite):
    """One target and several run other modules, which exist from the first call on."""
    model = Block().double().eval()
    changed, fresh = (lrpfx.transform(model, composite, example_inputs=input) for _ in range(2))
    before = lrpfx.attribute(changed, input, targets=[1, 2]).relevance
    lrpfx.attribute(changed, input, 1)
    change(changed), change(fresh)
    expected = lrpfx.attribute(fresh, input, targets=[1, 2]).relevance
    assert not torch.allclose(expected, before)
    assert torch.equal(lrpfx.attribute(changed, input, targets=[1, 2]).relevance, expected)
    torch.testing.assert_close(lrpfx.attribute(changed, input, 1).relevance, expected[0], rtol=1e-12, atol=1e-15)


def test_errors_print_nothing(explain_model, input, capfd):
    for wrong in (input[..., :5], input.float()):
        with pytest.raises(lrpfx.InputError):
            lrpfx.attribute(explain_model, wrong, 1)
    assert capfd.readouterr().err == ""


def test_inputs_of_unknown_dtype_are_checked_by_modules(input):
    explain_model = lrpfx.transform(Block().double().eval(), AttnLRP(), capture="symbolic")
    assert with_plain_calls(explain_model) is explain_model
    assert torch.isfinite(lrpfx.attribute(explain_model, input, 1).relevance).all()
