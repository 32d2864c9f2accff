"""Modifiers of inputs and parameters."""

import pytest
import torch

import lrpfx
from lrpfx.rules.modifiers import (  # fmt: skip
    Bound,
    Clamp,
    ClampMod,
    GammaMod,
    NoMod,
    Ones,
    OnesMod,
    ParamMod,
    SquareMod,
    Unchanged,
    expand,
    zero_bias,
)

P = torch.tensor([-2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    "modifier, expected",
    [
        (NoMod(), P),
        (ClampMod(min=0.0), torch.tensor([0.0, 0.0, 3.0])),
        (ClampMod(max=0.0), torch.tensor([-2.0, 0.0, 0.0])),
        (GammaMod(0.5, min=0.0), torch.tensor([-2.0, 0.0, 4.5])),
        (GammaMod(0.5, max=0.0), torch.tensor([-3.0, 0.0, 3.0])),
        (SquareMod(), torch.tensor([4.0, 0.0, 9.0])),
        (OnesMod(), torch.ones(3)),
        (ParamMod(lambda p, name: p + len(name)), P + 6),
        (ClampMod(min=0.0, zero_params="weight"), torch.zeros(3)),
        (ClampMod(min=0.0, zero_params=["bias", "weight"]), torch.zeros(3)),
        (ClampMod(min=0.0, zero_params="bias"), torch.tensor([0.0, 0.0, 3.0])),
        (ClampMod(min=0.0, param_keys=["bias"]), P),
        (ClampMod(min=0.0, param_keys=[]), P),
    ],
)
def test_parameter_modifiers(modifier, expected):
    assert torch.equal(modifier.apply(P, "weight"), expected)


def test_required_parameters():
    ClampMod(param_keys=["weight"]).check(["weight", "bias"])
    OnesMod(param_keys=["weight"], require_params=False).check([])
    with pytest.raises(lrpfx.RuleError, match="modifies the parameter 'scale', but the layer has \\['weight'\\]"):
        ClampMod(param_keys=["scale"]).check(["weight"])


def test_ensure():
    modifier = NoMod()
    assert ParamMod.ensure(modifier) is modifier
    assert torch.equal(ParamMod.ensure(lambda p, name: -p).apply(P, "weight"), -P)
    with pytest.raises(lrpfx.InputTypeError, match="ParamMod or a callable"):
        ParamMod.ensure("weight")


@pytest.mark.parametrize(
    "given, expected", [(None, ["bias"]), ("weight", ["weight", "bias"]), (["bias", "scale"], ["bias", "scale"])]
)
def test_zero_bias(given, expected):
    assert zero_bias(given) == expected


def test_keys_tell_modifiers_apart():
    assert ClampMod(min=0.0).key == ClampMod(min=0.0).key
    different = [
        ClampMod(min=0.0),
        ClampMod(max=0.0),
        ClampMod(min=0.0, zero_params="bias"),
        GammaMod(min=0.0),
        GammaMod(0.5, min=0.0),
    ]
    assert len({modifier.key for modifier in different}) == len(different)
    function = lambda p, name: p  # noqa: E731
    assert ParamMod(function).key != ParamMod(function).key, "a user's function is opaque"


def test_input_modifiers():
    x = torch.tensor([[-1.0, 2.0]])
    assert Unchanged()(x) is x
    assert torch.equal(Clamp(min=0.0)(x), torch.tensor([[0.0, 2.0]]))
    assert torch.equal(Ones()(x), torch.ones(1, 2))
    assert torch.equal(Bound(3)(x), torch.full((1, 2), 3.0))
    assert Bound(torch.tensor(3, dtype=torch.int32))(x).dtype == x.dtype
    assert Clamp(min=0.0) == Clamp(min=0.0) != Clamp(max=0.0) and len({Clamp(min=0.0), Clamp(min=0.0)}) == 1
    low, high = torch.zeros(3), torch.ones(3)
    assert Bound(low) == Bound(low) and not any(
        Bound(one) == Bound(other) for one, other in [(low, high), (high, low), (low, low + 0)]
    )
    assert Bound(1.0) != Bound(0.0) != Bound(1.0)
    assert repr(Clamp(min=0.0)) == "Clamp(min=0.0)" and repr(Bound(torch.zeros(3))) == "Bound(Tensor(3,))"


@pytest.mark.parametrize(
    "shape, target, cut",
    [
        ((), (2, 3), False),
        ((2,), (2, 3), False),
        ((1, 3), (2, 3), False),
        ((2, 3), (2, 3, 4, 4), False),
        ((1, 3), (2, 3, 4, 4), False),
        ((5, 3), (2, 3), True),
    ],
)
def test_expand(shape, target, cut):
    tensor = torch.randn(shape)
    aligned = tensor.reshape(*shape, *[1] * (len(target) - len(shape))) if shape else tensor
    expected = (aligned[: target[0]] if cut else aligned).expand(target)
    assert torch.equal(expand(tensor, target, cut_batch_dim=cut), expected)


def test_expand_takes_numbers():
    assert torch.equal(expand(2.0, (2, 2)), torch.full((2, 2), 2.0))


@pytest.mark.parametrize("shape, cut", [((3,), False), ((5, 3), False), ((2, 2), True), ((1, 2, 3), False), ((5, 2), True)])
def test_shapes_that_do_not_expand(shape, cut):
    with pytest.raises(RuntimeError, match="does not expand") as caught:
        expand(torch.zeros(shape), (2, 3), cut_batch_dim=cut)
    assert isinstance(caught.value, lrpfx.LrpfxError)
