"""Tensors whose sizes the layers of a model fix are constants in a symbolic trace, as they are where torch.export traces."""

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlusFlat, ExcitationBackprop
from lrpfx.errors import InputError

SIZE = 5


class Between(nn.Module):
    """A function of features, and of their number, between two layers."""

    def __init__(self, first, function, last, settled):
        super().__init__()
        self.first, self.last, self.function, self.settled = first, last, function, settled

    def forward(self, x):
        features = self.first(x)
        return self.last(self.function(features, SIZE if self.settled else features.shape[self.function.dim]))


def of_dimension(dim):
    def given(function):
        function.dim = dim
        return function

    return given


@of_dimension(-1)
def identity(x, size):
    return x @ (torch.eye(size, dtype=x.dtype) - 1 / size)


@of_dimension(-1)
def triangle(x, size):
    return x @ torch.tril(torch.ones((size, size)))


@of_dimension(-1)
def triangle_in_place(x, size):
    matrix = torch.ones((size, size))
    matrix.tril_()
    return x @ matrix.mul_(2)


@of_dimension(-1)
def written_between_two_reads(x, size):
    scale = torch.ones(size)
    x = x * scale
    scale.mul_(torch.linspace(-1, 1, size))
    return x * scale


@of_dimension(-1)
def transform(x, size):
    places = torch.arange(size)
    return x @ torch.cos(places[:, None] * places * (2 * torch.pi / size))


@of_dimension(-1)
def like_features(x, size):
    return x * torch.hann_window(size, dtype=x.dtype, device=x.device) + x.new_ones(size).cumsum(0)


@of_dimension(-1)
def halves(x, size):
    return x * torch.cat([torch.ones(size // 2), -torch.ones(size - size // 2)])


@of_dimension(-1)
def choices(x, size):
    return x @ F.one_hot(torch.arange(size).flip(0), size).to(torch.float64)


@of_dimension(-1)
def root_of_size(x, size):
    return x / -(size**0.5) + 1


@of_dimension(1)
def channels(x, size):
    return x * torch.linspace(-1, 1, size).view(1, size, 1)


def dense():
    return nn.Sequential(nn.Linear(3, SIZE), nn.ReLU()), nn.Linear(SIZE, 2)


def normalized():
    return nn.Sequential(nn.LayerNorm(SIZE), nn.Tanh()), nn.Linear(SIZE, 2)


def by_hand():
    weight, other = (nn.Parameter(torch.randn(shape)) for shape in ((3, SIZE), (2, SIZE)))
    first, last = Product(weight), Product(other, transposed=True)
    return first, last


class Product(nn.Module):
    def __init__(self, weight, transposed=False):
        super().__init__()
        self.weight, self.transposed = weight, transposed

    def forward(self, x):
        return x @ (self.weight.T if self.transposed else self.weight)


def convolutions():
    return nn.Conv1d(3, SIZE, 2), nn.ConvTranspose1d(SIZE, 2, 2)


MATRICES = (identity, triangle, triangle_in_place, transform, like_features, halves, choices, root_of_size)
CASES = {
    **{function.__name__: (dense, function, (4, 3)) for function in MATRICES},
    "normalized": (normalized, identity, (4, SIZE)),
    "by hand": (by_hand, triangle, (4, 3)),
    "channels": (convolutions, channels, (4, 3, 6)),
}


def twins(name):
    layers, function, shape = CASES[name]
    torch.manual_seed(0)
    first, last = layers()
    return [Between(first, function, last, settled).double().eval() for settled in (False, True)], torch.randn(shape)


@pytest.mark.filterwarnings("ignore:the map does not add up")
@pytest.mark.parametrize("composite", [EpsilonPlusFlat, ExcitationBackprop])
@pytest.mark.parametrize("name", CASES)
def test_sizes_that_layers_fix_are_numbers(name, composite):
    models, x = twins(name)
    for options in ({}, {"example_inputs": x}):
        settled, expected = (lrpfx.transform(one, composite(), capture="symbolic", **options) for one in models)
        assert [record.name for record in lrpfx.history(settled)].count("settle_sizes") == 1
        found = [lrpfx.attribute(one, x, lambda output: output).relevance for one in (settled, expected)]
        assert_close(*found, 1e-12)
        assert torch.equal(settled(x), expected(x))


def test_lengths_that_nothing_fixes_stay_open():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return (self.linear(x) * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]).sum(1)

    model, composite = Weighted().double(), EpsilonPlusFlat()
    explain_model = lrpfx.transform(model, composite, example_inputs=torch.randn(2, 4, 3), capture="symbolic")
    assert "settle_sizes" not in [record.name for record in lrpfx.history(explain_model) if record.matches]
    for length in (2, 7):
        x = torch.randn(2, length, 3)
        assert_close(explain_model(x), model(x), 1e-12)


def test_what_is_written_into_a_constant_reaches_later_readers():
    first, last = dense()
    model = Between(first, written_between_two_reads, last, settled=False).double().eval()
    x = torch.randn(4, 3)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), capture="symbolic")
    assert [record.matches for record in lrpfx.history(explain_model) if record.name == "settle_sizes"] == [1]
    assert_close(explain_model(x), model(x), 1e-12)


def test_a_dimension_counted_from_the_first_keeps_their_number():
    """A series without a batch has its length where others have channels."""
    models, x = twins("channels")
    explain_model = lrpfx.transform(models[0], EpsilonPlusFlat(), example_inputs=x, capture="symbolic")
    with pytest.raises(InputError, match="dimensions"):
        explain_model(x[0])


def test_random_numbers_are_refused_as_before():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x * torch.randn(x.shape[-1], dtype=x.dtype) + torch.ones(x.shape[-1], dtype=x.dtype))

    with pytest.raises(lrpfx.CaptureError, match="random"):
        lrpfx.transform(Noisy().double(), EpsilonPlusFlat(), capture="symbolic")
