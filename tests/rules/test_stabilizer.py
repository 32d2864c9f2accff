"""Stabilizers by their formulas."""

import pytest
import torch

import lrpfx
from lrpfx.rules.stabilizer import Stabilizer, stabilize

Z = torch.tensor([[-2.0, -1e-8, -0.0, 0.0, 1e-8, 3.0]])
SIGN = torch.tensor([[-1.0, -1.0, 1.0, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shift(dtype):
    z = Z.to(dtype)
    result = stabilize(z, 0.25)
    assert result.dtype == dtype and torch.equal(result, z + SIGN.to(dtype) * 0.25)


def test_clip():
    assert torch.equal(stabilize(Z, 0.5, clip=True), torch.tensor([[-2.0, -0.5, 0.5, 0.5, 0.5, 3.0]]))


@pytest.mark.parametrize("dim", [None, (1,), [0, 1], range(2), (-1,), (), 0, 1, -1])
@pytest.mark.parametrize("clip", [True, False])
def test_scaled_by_the_norm(clip, dim):
    z = torch.randn(4, 5)
    dims = (1,) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    epsilon = 0.3 * z.square().mean(dims, keepdim=True).sqrt()
    sign = torch.where(z >= 0, 1.0, -1.0)
    expected = sign * torch.maximum(z.abs(), epsilon.expand_as(z)) if clip else z + sign * epsilon
    torch.testing.assert_close(stabilize(z, 0.3, clip, norm_scale=True, dim=dim), expected)
    torch.testing.assert_close(Stabilizer(0.3, clip, True, dim)(z), expected)
    assert torch.equal(stabilize(z, 0.3, clip, dim=dim), stabilize(z, 0.3, clip))  # without a scale the dimension says nothing


def test_the_class_stores_its_settings():
    z = torch.randn(3, 4)
    assert torch.equal(Stabilizer(0.1, clip=True)(z), stabilize(z, 0.1, clip=True))
    assert repr(Stabilizer(0.1)) == "0.1" and repr(Stabilizer(0.1, clip=True, dim=(1,))) == "Stabilizer(0.1, clip, dim=(1,))"
    assert repr(Stabilizer(0.1, norm_scale=True, dim=0)) == "Stabilizer(0.1, norm_scale, dim=0)"


def test_ensure():
    function = torch.abs
    assert Stabilizer.ensure(function) is function
    assert Stabilizer.ensure(1).epsilon == 1.0 and Stabilizer.ensure(1e-3).epsilon == 1e-3
    stabilizer = Stabilizer()
    assert Stabilizer.ensure(stabilizer) is stabilizer
    for value in ("1e-6", None, True, [1e-6]):
        with pytest.raises(TypeError, match="a stabilizer is a number or a callable") as caught:
            Stabilizer.ensure(value)
        assert isinstance(caught.value, lrpfx.LrpfxError)
