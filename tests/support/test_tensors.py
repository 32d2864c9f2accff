"""Checks of values."""

import pytest
import torch

from lrpfx.support.tensors import all_finite, content_of, only_finite

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


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(()).expand(1, 1),
        torch.ones(()).expand(3),
        torch.randn(3, 4).T,
        torch.ones(2, dtype=torch.bfloat16),
        torch.empty(0),
    ],
)
def test_content_is_that_of_a_copy(value):
    """Whatever its strides are: the bytes of a copy with strides of its own."""
    copied = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    assert list(content_of(value)) == list(content_of(copied)) and len(list(content_of(value))[1]) == value.nbytes
