"""What lrpfx.core adds to what it collects."""

import itertools

import numpy as np
import pytest
import torch
import zennit.core
from torch import nn

import lrpfx
from lrpfx import core


def test_has_zennits_names():
    own = {name for name, value in vars(zennit.core).items() if getattr(value, "__module__", "") == "zennit.core"}
    assert own <= set(core.__all__) and set(core.__all__) - own == {"uncompress"}  # which came after 0.5.1


@pytest.mark.parametrize(
    "zero_params, zeroed", [(None, ""), ([], ""), ("bias", "bias"), (["weight"], "weight"), (["weight", "bias"], "weight bias")]
)
def test_zero_wrap(zero_params, zeroed):
    modify = core.zero_wrap(zero_params)(lambda parameter, name: parameter + 1)
    for name in ("weight", "bias"):
        expected = torch.zeros(2) if name in zeroed.split() else torch.full((2,), 2.0)
        assert torch.equal(modify(torch.ones(2), name), expected)


def test_collect_leaves():
    a, b, c = nn.ReLU(), nn.Linear(1, 1), nn.Tanh()
    assert list(core.collect_leaves(nn.Sequential(a, nn.Sequential(nn.Sequential(b), c)))) == [a, b, c]
    assert list(core.collect_leaves(a)) == [a]


@pytest.mark.parametrize("selector", list(itertools.product([True, False], repeat=4)))
def test_uncompress(selector):
    data = [1, 2, 3, 4]
    squared = [item**2 for item in itertools.compress(data, selector)]
    assert list(core.uncompress(data, selector, squared)) == [i**2 if s else i for i, s in zip(data, selector, strict=True)]


def test_uncompress_ends_with_the_shortest():
    assert list(core.uncompress([1, 2, 3], [False, True, True], [9])) == [1, 9]
    assert list(core.uncompress([1, 2, 3], [False, True], [9, 9])) == [1, 9]
    assert list(core.uncompress([1], [False, True], [9, 9])) == [1]


def test_identity():
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    out_a, out_b = core.Identity.apply(a, b)
    assert torch.equal(out_a, a) and torch.equal(out_b, b) and out_a.requires_grad and not out_b.requires_grad
    assert torch.equal(torch.autograd.grad(out_a, a, b)[0], b)


@pytest.mark.parametrize("tensor, shape", [(np.float32(3.0), ()), (2.0, ()), (2.0, (2, 3)), (torch.ones(4, 1), (2, 3))])
def test_expand_cuts_the_batch(tensor, shape):
    expected = zennit.core.expand(tensor, shape, cut_batch_dim=True)
    assert torch.equal(core.expand(tensor, shape, cut_batch_dim=True), expected)


def test_parameters_are_changed_in_a_context():
    module = nn.Linear(3, 2)
    parameters = dict(module.named_parameters())
    values = {name: value.detach().clone() for name, value in parameters.items()}
    modifier = core.ParamMod(lambda parameter, name: 2 * parameter, zero_params="bias")
    original, modified = modifier.state_dicts(module)
    assert torch.equal(original["weight"], values["weight"]) and torch.equal(modified["weight"], 2 * values["weight"])
    with pytest.raises(ZeroDivisionError), modifier(module) as same:
        assert same is module
        assert torch.equal(module.weight, 2 * values["weight"]) and not module.bias.any()
        raise ZeroDivisionError
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name] and torch.equal(parameter, values[name])


def test_required_and_absent_parameters():
    module = nn.Linear(3, 2, bias=False)
    assert list(core.ParamMod(lambda p, _: p, param_keys=["weight", "bias"]).state_dicts(module)[0]) == ["weight"]
    assert core.ParamMod(lambda p, _: p, param_keys=["scale"], require_params=False).state_dicts(module) == ({}, {})
    with pytest.raises(RuntimeError, match="'scale'") as caught:
        core.ParamMod(lambda p, _: p, param_keys=["scale"]).state_dicts(module)
    assert isinstance(caught.value, lrpfx.LrpfxError)


def test_handles():
    removed = []

    class Item:
        def __init__(self, name):
            self.name = name

        def remove(self):
            removed.append(self.name)

    items = [Item(0), Item(1), Item(2)]
    handles = core.RemovableHandleList([core.RemovableHandle(item) for item in items])
    del items[1]
    handles.remove()
    assert removed == [2, 0] and handles == []
