"""The forms that carry multipliers: R = t m at the ends of a region, shares in between, and no memory for what is not read."""

import pytest
import torch
from torch.nn import functional as F

from lrpfx.operators.layer import Operation, Slot
from lrpfx.operators.table import operator_named
from lrpfx.runtime.multipliers import (
    Derivative,
    HeldScale,
    Ratio,
    WithoutRelevance,
    carry_multiplier,
    carry_relevance,
    relevance_from,
    with_shares,
)


def gradient(function, value, seed):
    value = value.detach().requires_grad_()
    return torch.autograd.grad(function(value), value, seed)[0]


def operation(name, inputs, *args, **options):
    """A call of a row's function, whose first arguments are data."""
    row = operator_named(name)
    slots = tuple(Slot(place) for place in range(inputs + len(args)))
    return Operation(row.canonical, slots, options, inputs, (), row), args


def test_ends_of_a_region():
    value, given = torch.tensor([2.0, -4.0, 0.0]), torch.tensor([3.0, 2.0, 5.0])
    assert torch.equal(gradient(carry_relevance, value, given), torch.tensor([6.0, -8.0, 0.0]))
    assert torch.equal(gradient(carry_multiplier, value, given), torch.tensor([1.5, -0.5, 0.0]))  # no share of a zero
    assert torch.equal(gradient(lambda x: carry_relevance(carry_multiplier(x)), value[:2], given[:2]), given[:2])
    assert torch.equal(carry_relevance(value), value) and torch.equal(carry_multiplier(value), value)


def test_hidden_values_have_no_relevance():
    hidden = torch.tensor([-torch.inf, torch.inf, 1.0])
    assert torch.equal(relevance_from(hidden, torch.tensor([0.0, 2.0, 3.0])), torch.tensor([0.0, 0.0, 3.0]))


def test_shares():
    values, seeds = [torch.randn(3).requires_grad_() for _ in range(4)], [torch.randn(3) for _ in range(4)]
    shares = (0.5, 1.0, 0.0, 0.25)
    shared = with_shares(shares, *values)
    assert all(map(torch.equal, shared, values)) and [one.requires_grad for one in shared] == [True, True, False, True]
    found = torch.autograd.grad([shared[0], shared[1], shared[3]], values, [seeds[0], seeds[1], seeds[3]], allow_unused=True)
    assert found[2] is None
    for place in (0, 1, 3):
        assert torch.equal(found[place], seeds[place] * shares[place])


def test_factors_share():
    made, _ = operation("matmul", 2)
    a, b, seed = torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 4)
    a.requires_grad_(), b.requires_grad_()
    found = torch.autograd.grad(Derivative((0.25, 0.75)).run(made, (a, b)), (a, b), seed)
    assert torch.allclose(found[0], 0.25 * seed @ b.T) and torch.allclose(found[1], 0.75 * a.T @ seed)
    assert Derivative((0.0, 1.0)).keeps_from(0) and not Derivative((0.0, 1.0)).keeps_from(1) and not Derivative().keeps_from(0)


def test_ratios_save_the_input_only():
    made, _ = operation("silu", 1)
    value, seed = torch.randn(1000), torch.randn(1000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        found = gradient(lambda x: Ratio().run(made, (x,)), value, seed)
    assert torch.allclose(found, seed * torch.sigmoid(value)) and len(saved) == 1
    assert torch.equal(Ratio().run(made, (value,)), F.silu(value))


@pytest.mark.parametrize("name, options", [("layer_norm", {"normalized_shape": (8,)}), ("group_norm", {"num_groups": 2})])
def test_held_scales(name, options):
    """The derivative of (x - mean) / sd * weight + bias for a constant sd."""
    made, _ = operation(name, 1, **options)
    value, seed = torch.randn(3, 8), torch.randn(3, 8)
    found = gradient(lambda x: HeldScale().run(made, (x,)), value, seed)
    grouped = (3, 2, 4) if name == "group_norm" else (3, 8)

    def held(x):
        parts = x.reshape(grouped)
        deviation = torch.sqrt(parts.var(-1, keepdim=True, unbiased=False) + 1e-5).detach()
        return ((parts - parts.mean(-1, keepdim=True)) / deviation).reshape(3, 8)

    torch.testing.assert_close(found, gradient(held, value, seed), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(HeldScale().run(made, (value,)), held(value), rtol=1e-12, atol=1e-12)


def test_without_relevance():
    made, _ = operation("silu", 1)
    value = torch.randn(3)
    assert torch.equal(WithoutRelevance().run(made, (value,)), F.silu(value))
    assert WithoutRelevance().absorbed(None, None) == {}


def test_a_form_that_does_not_divide_leaves_the_account_to_the_rule():
    assert all(form.absorbed(None, None) is None for form in (HeldScale(divides=False), Derivative(divides=False), Ratio()))


def test_several_at_once():
    """The forms work under vmap, which propagates several relevances together."""
    made, _ = operation("gelu", 1)
    value, seeds = torch.randn(4).requires_grad_(), torch.randn(3, 4)

    def run(x):
        return carry_multiplier(with_shares((0.5,), Ratio().run(made, (carry_relevance(x),)))[0])

    result = run(value)
    together = torch.func.vmap(lambda seed: torch.autograd.grad(result, value, seed, retain_graph=True)[0])(seeds)
    for seed, found in zip(seeds, together, strict=True):
        torch.testing.assert_close(found, gradient(run, value, seed), rtol=1e-13, atol=1e-13)
