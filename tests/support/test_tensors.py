"""Checks of values."""

import pytest
import torch

from lrpfx.support.tensors import all_finite, only_finite

VALUES = {
    "finite": [1.0, -2.0, 0.0],
    "none": [],
    "a sum that overflows": [6e4, 6e4, 6e4],
    "infinite": [1.0, float("inf")],
    "both signs of infinity": [float("inf"), float("-inf")],
    "not a number": [float("nan"), 1.0],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", VALUES)
def test_finite_values(name, dtype):
    value = torch.tensor(VALUES[name], dtype=dtype)
    finite = value.isfinite()
    assert all_finite(value) is bool(finite.all())
    assert only_finite(value).equal(torch.where(finite, value, torch.zeros_like(value)))
