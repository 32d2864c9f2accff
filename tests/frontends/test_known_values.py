"""Numbers of dimensions are known from examples."""

import pytest
import torch
from helpers import Unary, assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus


class ByRank(nn.Module):
    """Reads what is known of its inputs: numbers of dimensions, shapes of weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, batch):
        x = batch["image"]
        standardized = (self.weight - self.weight.mean(1, keepdim=True)) / self.weight.size(1) ** 0.5
        if self.weight.shape[0] == 6 and len(standardized.T) == 4 and x.is_floating_point():
            x = F.linear(x, standardized)
        axes = tuple(range(1, x.ndim - 1))
        return x.mean(axes) if axes else x


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 3, 5, 4)])
def test_numbers_of_dimensions_are_known_from_examples_and_guarded(shape):
    model, inputs = ByRank().eval(), ({"image": torch.randn(shape)},)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=inputs, capture="symbolic")
    assert_close(explain_model(*inputs), model(*inputs).detach(), 1e-14)
    with pytest.raises(lrpfx.InputError, match=r"batch\['image'\].* has 5 dimensions"):
        explain_model({"image": torch.randn(2, 4, 4, 4, 4)})
    with pytest.raises(lrpfx.CaptureError):
        lrpfx.transform(model, EpsilonPlus())


def test_a_number_of_dimensions_that_sizes_decide_is_not_known():
    model = Unary(lambda x: x.squeeze() if x.squeeze().ndim == 2 else x)
    with pytest.raises(lrpfx.CaptureError, match="branches on a value"):
        lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 1, 3), capture="symbolic")


class ByBuffer(nn.Module):
    """Branches on a copy of a buffer, to which something was added in place."""

    def __init__(self, added):
        super().__init__()
        self.register_buffer("limit", torch.tensor([-1.0]))
        self.added = added

    def forward(self, x):
        limit = self.limit.clone()
        limit.add_(self.added(x))
        return x * 3.0 if limit > 0 else x


def test_copies_of_buffers_are_known_until_data_is_written_into_them():
    x = torch.rand(2, 3)
    model = ByBuffer(lambda x: 2.0).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="symbolic")
    assert torch.equal(explain_model(x), 3.0 * x)
    with pytest.raises(lrpfx.CaptureError, match="branches on a value"):
        lrpfx.transform(ByBuffer(lambda x: x.sum()).eval(), EpsilonPlus(), example_inputs=x, capture="symbolic")


class OfPieces(nn.Module):
    """Goes on with a list of the pieces of a value, as the blocks of YOLO do."""

    def __init__(self, pieces):
        super().__init__()
        self.first, self.second, self.pieces = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 3, padding=1), pieces

    def forward(self, x):
        found = list(self.pieces(self.first(x)))
        return torch.cat([*found, self.second(found[-1]).relu()], 1).mean((2, 3))


PIECES = {
    "chunk": lambda x: x.chunk(2, 1),
    "chunk by name": lambda x: torch.chunk(x, chunks=2, dim=1),
    "split": lambda x: x.split((4, 4), 1),
    "split by name": lambda x: torch.split(x, [4, 4], dim=1),
    "tensor_split": lambda x: x.tensor_split(2, 1),
}


@pytest.mark.parametrize("pieces", PIECES)
def test_numbers_of_pieces_are_known(pieces):
    model, x = OfPieces(PIECES[pieces]).eval(), torch.rand(2, 3, 6, 6)
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, capture="symbolic")
    other = torch.rand(1, 3, 5, 9)
    assert_close(explain_model(other), model(other).detach(), 1e-14)
    assert lrpfx.ledger(explain_model, other, 1).unexplained < 1e-12


def test_a_number_of_pieces_that_sizes_decide_is_not_known():
    with pytest.raises(lrpfx.CaptureError, match="iterates over values"):
        lrpfx.transform(OfPieces(lambda x: x.split(4, 1)).eval(), EpsilonPlus(), torch.rand(2, 3, 6, 6), capture="symbolic")
    rows = Unary(lambda x: sum(one.mean(2) for one in x.chunk(4, 2)))
    explain_model = lrpfx.transform(rows, EpsilonPlus(), torch.rand(1, 2, 8), capture="symbolic")
    for size in (7, 8, 40):
        x = torch.rand(1, 2, size)
        assert_close(explain_model(x), rows(x), 1e-14)
    with pytest.raises(IndexError):  # three pieces of six
        explain_model(torch.rand(1, 2, 6))
    with pytest.raises(lrpfx.CaptureError, match="iterates over values"):
        lrpfx.transform(rows, EpsilonPlus(), torch.rand(1, 2, 6), capture="symbolic")
