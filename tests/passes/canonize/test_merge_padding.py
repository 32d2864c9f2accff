"""Padding with zeros before a convolution is the convolution's own."""

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat


class Padded(nn.Module):
    """A convolution of a value that a call pads."""

    def __init__(self, layer, pad, **settings):
        super().__init__()
        self.layer, self.pad, self.settings = layer, pad, settings

    def forward(self, x):
        return self.layer(F.pad(x, self.pad, **self.settings))


def images():
    return torch.randn(2, 2, 7, 7)


def merged_and_reasons(explain_model):
    """How many places the pass merged, and why it left others, as both runs say. One that applies to nothing is no stage."""
    stages = [stage for stage in lrpfx.history(explain_model) if stage.name == "merge_padding"]
    return sum(stage.matches for stage in stages), list(dict.fromkeys(text for stage in stages for _, text in stage.reasons))


#: What is padded, and the padding of the layer that it equals.
MERGED = {
    "both dimensions": (lambda: nn.Conv2d(2, 3, 3), (1, 1, 2, 2), (2, 1)),
    "the last dimension": (lambda: nn.Conv2d(2, 3, 3), (2, 2), (0, 2)),
    "channels by nothing": (lambda: nn.Conv2d(2, 3, 3), (1, 1, 1, 1, 0, 0, 0, 0), (1, 1)),
    "a series": (lambda: nn.Conv1d(2, 3, 3), (1, 1), (1,)),
    "what the layer pads too": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2)), (1, 1, 3, 3), (4, 3)),
    "what the layer pads alike": (lambda: nn.Conv2d(2, 3, 3, padding=2), (1, 1, 3, 3), (5, 3)),
    "a valid layer": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (1, 1), (0, 1)),
    "to the same size of an even kernel": (lambda: nn.Conv2d(2, 3, (3, 6), padding="same"), (1, 0, 0, 0), (1, 3)),
    "to the same size": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same", dilation=(2, 1)), (1, 1, 0, 0), (2, 3)),
}


@pytest.mark.parametrize("name", MERGED)
def test_the_padding_is_the_layers(name):
    make, pad, padding = MERGED[name]
    layer = make()
    named = type(layer)(2, 3, layer.kernel_size, dilation=layer.dilation, padding=padding)
    named.load_state_dict(layer.state_dict())
    x = images() if len(layer.kernel_size) == 2 else torch.randn(2, 2, 7)
    explain_model = lrpfx.transform(Padded(layer, pad).eval(), EpsilonPlus(), example_inputs=x)
    assert merged_and_reasons(explain_model) == (1, [])
    assert any(f"padding = {padding}" in stage.code for stage in lrpfx.history(explain_model) if stage.name == "merge_padding")
    expected = lrpfx.attribute(lrpfx.transform(named.eval(), EpsilonPlus(), example_inputs=x), x, torch.cos)
    result = lrpfx.attribute(explain_model, x, torch.cos)
    assert torch.equal(result.output, expected.output) and torch.equal(result.relevance, expected.relevance)


#: What is padded in several steps, or by `cat`, and the padding of the layer that it equals.
IN_STEPS = {
    "evenly in two steps": (lambda: nn.Conv1d(2, 3, 3), lambda x: F.pad(F.pad(x, (1, 0)), (0, 1)), 1),
    "with a layer that pads unevenly by more": (lambda: nn.Conv1d(2, 3, 4, padding="same"), lambda x: F.pad(x, (1, 0)), 2),
    "with a layer that pads unevenly": (lambda: nn.Conv1d(2, 3, 2, padding="same"), lambda x: F.pad(x, (1, 0)), 1),
    "with zeros by cat": (
        lambda: nn.Conv1d(2, 3, 3),
        lambda x: torch.cat([torch.zeros((*x.shape[:-1], 1)), x, x.new_full((2, 2, 1), 0.0)], -1),
        1,
    ),
    "with zeros like an entry": (
        lambda: nn.Conv1d(2, 3, 3, stride=2),
        lambda x: torch.cat([torch.zeros_like(x[:, :, :1]), x, torch.zeros_like(x[..., -1:])], 2),
        1,
    ),
}


class Before(nn.Module):
    """A convolution of a function's result."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.layer(self.function(x))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", IN_STEPS)
def test_padding_in_steps_is_the_layers(name, capture):
    make, pad, padding = IN_STEPS[name]
    layer, x = make().double(), torch.randn(2, 2, 9, dtype=torch.float64)
    whole = nn.Conv1d(2, 3, layer.kernel_size, stride=layer.stride, padding=padding, dtype=torch.float64)
    whole.load_state_dict(layer.state_dict())
    composite = EpsilonGammaBox(low=torch.full((1, 2, 9), -3.0), high=torch.full((1, 2, 9), 3.0))
    explain_model = lrpfx.transform(Before(layer, pad).eval(), composite, example_inputs=x, capture=capture)
    assert merged_and_reasons(explain_model)[0] >= 1 and merged_and_reasons(explain_model)[1] == []
    expected = lrpfx.transform(nn.Sequential(whole).eval(), composite, example_inputs=x)
    found, named = (lrpfx.attribute(one, x, torch.cos) for one in (explain_model, expected))
    assert torch.allclose(found.output, named.output, rtol=1e-12)
    assert torch.allclose(found.relevance, named.relevance, rtol=1e-9, atol=1e-12)


#: Other numbers of zeros on each side, and the layer that pads so itself.
UNEVEN = {
    "one side": (1, (2,), lambda x: F.pad(x, (0, 1))),
    "one dimension": (2, (2, 3), lambda x: F.pad(x, (1, 1, 0, 1))),
    "both dimensions": (2, (4, 2), lambda x: F.pad(x, (0, 1, 1, 2))),
    "in steps": (2, (4, 2), lambda x: F.pad(F.pad(x, (0, 1, 1, 1)), (0, 0, 0, 1))),
    "three dimensions": (3, (1, 2, 4), lambda x: F.pad(x, (1, 2, 0, 1))),
    "by a size": (2, (3, 2), lambda x: F.pad(x, (0, x.shape[2] % 2, 1, x.shape[1] - 1))),
    "by cat": (2, (2, 1), lambda x: torch.cat([x, torch.zeros_like(x[:, :, :1])], 2)),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "composite", [EpsilonPlusFlat(), EpsilonGammaBox(-3.0, 3.0), EpsilonAlpha2Beta1(), EpsilonPlus(zero_params="bias")]
)
@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.sampled(4)
def test_uneven_padding_is_a_part_of_the_layer(name, composite, capture):
    dimensions, kernel, pad = UNEVEN[name]
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    layer, same = (kinds[dimensions](2, 4, kernel, padding=padding, groups=2) for padding in (0, "same"))
    same.load_state_dict(layer.state_dict())
    behind = [nn.ReLU(), kinds[dimensions](4, 3, 1)]
    x = torch.randn(2, 2, *[7] * dimensions)
    explain_model = lrpfx.transform(nn.Sequential(Before(layer, pad), *behind).eval(), composite, x, capture=capture)
    assert merged_and_reasons(explain_model)[1] == []
    named = lrpfx.transform(nn.Sequential(nn.Sequential(same), *behind).eval(), composite, x)
    found, expected = (lrpfx.attribute(one, x, torch.cos) for one in (explain_model, named))
    assert torch.allclose(found.output, expected.output, rtol=1e-12)
    assert torch.allclose(found.relevance, expected.relevance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", UNEVEN)
def test_a_batch_norm_before_uneven_padding_is_merged(name, capture):
    """The zeros stay zeros behind the merge: the bias differs by position, as with even padding."""
    dimensions, kernel, pad = UNEVEN[name]
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    norms = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    layer, same = (kinds[dimensions](2, 4, kernel, padding=padding, groups=2) for padding in (0, "same"))
    same.load_state_dict(layer.state_dict())
    first, norm, behind = kinds[dimensions](2, 2, 1), norms[dimensions](2), kinds[dimensions](4, 3, 1)
    with torch.no_grad():
        for value, low in zip((norm.running_mean, norm.running_var, norm.weight, norm.bias), (-1, 0.5, -1, -1), strict=True):
            value.uniform_(low, 2)
    x = torch.randn(2, 2, *[7] * dimensions)
    found, expected = (
        lrpfx.attribute(lrpfx.transform(model.eval(), EpsilonPlusFlat(), x, capture=capture), x, torch.cos)
        for model in (
            nn.Sequential(first, nn.ReLU(), norm, Before(layer, pad), behind),
            nn.Sequential(first, nn.ReLU(), norm, nn.Sequential(same), behind),
        )
    )
    assert_close(found.output, expected.output, 1e-12)
    assert_close(found.relevance, expected.relevance, 1e-9)


def test_uneven_padding_follows_the_sizes_of_a_run():
    """Strided convolutions that pad to a multiple of their stride, as those of TensorFlow do."""
    layer = nn.Conv2d(2, 3, 2, stride=2)
    model = Before(layer, lambda x: F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))).eval()
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), images())
    assert merged_and_reasons(explain_model) == (1, [])
    for sizes in ((7, 7), (7, 6), (6, 6)):
        x = torch.randn(2, 2, *sizes)
        result = lrpfx.attribute(explain_model, x, torch.cos)
        assert_close(result.output, model(x), 1e-12)
        assert_close(result.relevance.sum(), result.output.cos().sum(), 1e-6)


NOT_PLACES = "it pads the channels or the batch of layer"

#: What is padded in another way than a layer pads, and why that stays. Padding with other numbers is not looked at.
KEPT = {
    "cut off": (lambda: nn.Conv2d(2, 3, 3), (-1, -1), {}, ["it cuts off entries before layer"]),
    "a channel": (lambda: nn.Conv2d(3, 3, 3), (1, 1, 1, 1, 0, 1), {}, [NOT_PLACES]),
    "a channel on each side": (lambda: nn.Conv2d(4, 3, 3), (1, 1, 1, 1, 1, 1), {}, [NOT_PLACES]),
    "a sample": (lambda: nn.Conv2d(2, 3, 3), (0, 0, 0, 0, 0, 0, 1, 1), {}, [NOT_PLACES]),
    "ones": (lambda: nn.Conv2d(2, 3, 3), (1, 1, 1, 1), {"value": 1.0}, []),
    "a mirror": (lambda: nn.Conv2d(2, 3, 3), (1, 1, 1, 1), {"mode": "reflect"}, []),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_padding_stays(name):
    make, pad, settings, reasons = KEPT[name]
    model, x = Padded(make(), pad, **settings).eval(), images()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert merged_and_reasons(explain_model) == (0, reasons)
    assert torch.equal(explain_model(x), model(x))


class Between(nn.Module):
    """Padded images, a function of them, and a convolution of its result."""

    def __init__(self, function, pad=(1, 1, 1, 1)):
        super().__init__()
        self.function, self.pad = function, pad
        self.layer = nn.Conv2d(2, 3, 3)

    def forward(self, x):
        return self.layer(self.function(F.pad(x, self.pad)))


@pytest.mark.parametrize(
    "function",
    [torch.relu, F.gelu, torch.tanh, lambda y: y.to(y.dtype), lambda y: y.transpose(2, 3), lambda y: y.movedim(-1, 2)],
)
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_padding_commutes_with_what_keeps_zeros(function, capture):
    model, x = Between(function, pad=(1, 1, 2, 2)).eval(), images()
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x, capture=capture)
    assert merged_and_reasons(explain_model) == (1, [])
    assert_close(explain_model(x), model(x), 1e-12)


@pytest.mark.parametrize(
    "function", [torch.sigmoid, torch.cos, lambda y: y - 1, lambda y: y[:, :, 1:], lambda y: y.softmax(-1)]
)
def test_padding_before_other_functions_stays(function):
    model, x = Between(function).eval(), images()
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert merged_and_reasons(explain_model)[0] == 0
    assert_close(explain_model(x), model(x), 1e-12)


def test_padding_that_becomes_channels_stays():
    model, x = Between(lambda y: y.transpose(1, 2), pad=(1, 1, 0, 1)).eval(), torch.randn(2, 3, 1, 7)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert merged_and_reasons(explain_model) == (0, [NOT_PLACES])
    assert_close(explain_model(x), model(x), 1e-12)


def test_what_another_call_reads_stays_padded():
    class Read(Between):
        def forward(self, x):
            padded = torch.relu(F.pad(x, (1, 1, 1, 1)))
            return self.layer(padded) + padded.mean((1, 2, 3), keepdim=True)

    class ReadPadded(Between):
        def forward(self, x):
            padded = F.pad(torch.relu(F.pad(x, (1, 1))), (0, 0, 1, 1))
            return self.layer(padded) + padded.mean((1, 2, 3), keepdim=True)

    x = images()
    for model, count in ((Read(None).eval(), 0), (ReadPadded(None).eval(), 1)):
        explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
        assert merged_and_reasons(explain_model)[0] == count
        assert_close(explain_model(x), model(x), 1e-12)


@pytest.mark.usefixtures("no_guessed_inputs")
def test_zeros_along_the_last_dimension_need_no_shapes():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(2, 3, 3)

        def forward(self, x):
            zeros = x.new_zeros(x.shape[0], x.shape[1], x.shape[2], 1)
            return self.layer(torch.cat([zeros, x, zeros], -1))

    model = Between().eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert merged_and_reasons(explain_model) == (1, [])
    x = images()
    assert_close(explain_model(x), model(x), 1e-12)


@pytest.mark.usefixtures("no_guessed_inputs")
@pytest.mark.parametrize(("dim", "count"), [(-1, 1), (2, 0)])
def test_zeros_by_cat_along_a_dimension_from_the_end_need_no_shapes(dim, count):
    class BetweenZeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(2, 3, 3)

        def forward(self, x):
            place = (1,)
            zeros = x.new_zeros(x.shape[:-1] + place)
            return self.layer(torch.cat([zeros, x, zeros], dim))

    model, x = BetweenZeros().eval(), torch.randn(2, 2, 7)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert merged_and_reasons(explain_model)[0] == count
    assert_close(explain_model(x), model(x), 1e-6)


class PaddedParts(nn.Module):
    """A convolution of halves of the channels, which a function pads and puts together."""

    def __init__(self, pad):
        super().__init__()
        self.layer, self.pad = nn.Conv2d(4, 3, 3), pad

    def forward(self, x):
        first, last = torch.split(x, [1, 3], 1)
        return self.layer(self.pad(first, last))


@pytest.mark.parametrize("dim", [1, -3])
@pytest.mark.parametrize("amounts", [(1, 1, 1, 1), (2, 1)])
def test_parts_that_are_padded_alike(dim, amounts):
    model, x = (
        PaddedParts(lambda first, last: torch.cat([F.pad(torch.relu(first), amounts), F.pad(last, amounts)], dim)),
        images(),
    )
    x = torch.cat([x, -x], 1)
    named = PaddedParts(lambda first, last: F.pad(torch.cat([torch.relu(first), last], dim), amounts)).eval()
    named.load_state_dict(model.state_dict())
    explain_model = lrpfx.transform(model.eval(), EpsilonGammaBox(-4.0, 4.0), example_inputs=x)
    assert not any("pad" in name for name in lrpfx.node_names(explain_model))
    expected = lrpfx.attribute(lrpfx.transform(named, EpsilonGammaBox(-4.0, 4.0), example_inputs=x), x, torch.cos)
    assert_close(lrpfx.attribute(explain_model, x, torch.cos).relevance, expected.relevance, 1e-12)


@pytest.mark.parametrize(
    "pad",
    [
        lambda first, last: torch.cat([F.pad(first, (1, 1)), F.pad(last, (0, 2))], 1),
        lambda first, last: torch.cat([F.pad(first, (1, 1), value=1.0), F.pad(last, (1, 1), value=1.0)], 1),
        lambda first, last: torch.cat([F.pad(first[:, :, :3], (0, 0, 1, 1)), F.pad(last[:, :1], (0, 0, 1, 1))], 2).repeat(
            1, 4, 1, 1
        ),
    ],
)
def test_parts_that_are_padded_otherwise_stay(pad):
    x = torch.cat([images(), images()], 1)
    explain_model = lrpfx.transform(PaddedParts(pad).eval(), EpsilonPlus(), example_inputs=x)
    assert [name for name in lrpfx.node_names(explain_model) if name.startswith("pad")] == ["pad", "pad_1"]
