"""Reductions of relevance, against loops over its entries."""

import itertools

import pytest
import torch

import lrpfx
from lrpfx.request.reduction import ALL, OF_NUMBERS, checked_reduction, reduced


@pytest.mark.parametrize("leading", [1, 2])
@pytest.mark.parametrize("channels", [0, 1, 2])
def test_reductions(leading, channels):
    relevance = torch.randn(2, 3, 4, 5, 6)[0] if leading == 1 else torch.randn(2, 3, 4, 5, 6)
    own = relevance.ndim - leading
    for place in itertools.product(*map(range, relevance.shape[:leading])):
        one = relevance[place]
        at = channels % own
        others = [dimension for dimension in range(own) if dimension != at]
        total = one.sum(at)
        expected = {
            None: one,
            "sum": total,
            "absolute": one.abs().sum(at),
            "channels": one.sum(others),
            "bytes": (total / total.abs().max() * 127 + 128).round().to(torch.uint8),
        }
        for name in ALL:
            torch.testing.assert_close(reduced(relevance, name, at + leading, leading)[place], expected[name])


def test_bytes_of_nothing_and_channels_alone():
    assert reduced(torch.zeros(2, 3, 4), "bytes").tolist() == [[128] * 4] * 2
    vectors = torch.randn(2, 3)
    assert torch.equal(reduced(vectors, "channels"), vectors)


@pytest.mark.parametrize("wrong", ["bytes", "mean", 1, ["sum"], True])
def test_unknown_reductions(wrong):
    with pytest.raises(lrpfx.InputError, match="reduce must be one of None, 'sum', 'absolute', 'channels', not"):
        checked_reduction("reduce", wrong, OF_NUMBERS)
