"""Checks of values."""

import pytest
import torch

from lrpfx.support.tensors import all_finite, content_of, mark_of, only_finite

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


SIZES = {"small": 7, "rows": 5000, "many rows": 5 * 2**22 + 3}  # of float32, a row is of 2048


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", SIZES)
def test_marks_change_with_bits_and_places(dtype, name):
    """Also with those that torch does not count: negative entries, in pairs too, and entries in other places."""
    size = SIZES[name] if dtype == torch.float32 else min(SIZES[name], 20000)
    value = torch.arange(size).remainder(101).add(1).to(dtype)
    value[1:3] = torch.tensor([0, 5]).to(dtype)
    before = mark_of(value)
    assert mark_of(value) == before
    places = [(0, 1), (1, 2), (1, 3), (2, size - 1), (size // 2, size - 1)]
    for one, other in places:
        if value[one] != value[other]:
            value.data[[one, other]] = value[[other, one]].clone()
            assert mark_of(value)[0] == before[0] and mark_of(value) != before, (one, other)
            value.data[[one, other]] = value[[other, one]].clone()
        if dtype != torch.bool:
            for changed in ([one, other], slice(one, None, 2), slice(None, None, 2), slice(None)):
                value.data[changed] *= -1
                assert mark_of(value) != before, changed
                value.data[changed] *= -1
    assert mark_of(value) == before
