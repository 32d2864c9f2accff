"""What normalizes, scales or shifts parts of a layer's channels is part of the layer, if each channel is read once."""

import pytest
import torch
from helpers import assert_close, randomize_batch_norm
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus


class Parts(nn.Module):
    """A convolution whose channels a function reads in parts, with two batch norms for them."""

    def __init__(self, read, layer=None):
        super().__init__()
        self.layer = nn.Conv2d(3, 6, 3, groups=3, bias=False) if layer is None else layer
        self.first, self.last, self.read = nn.BatchNorm2d(2), nn.BatchNorm2d(4), read

    def forward(self, x):
        return self.read(self, self.layer(x))


def merged(read, fold=True, layer=None):
    model, x = randomize_batch_norm(Parts(read, layer)).eval(), torch.randn(2, 3, 6, 6)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, fold=fold)
    assert_close(explain_model(x), model(x), 1e-12)
    return dict(next((stage.details for stage in lrpfx.history(explain_model) if stage.name == "merge_parts"), ()))


def _apart(m, y):
    first, _, last = y[:, :2], y[:, 2:2], y[:, 2:]
    return m.first(first).mean((2, 3)) @ torch.ones(2, 4) + torch.relu(m.last(last) * 2 - 1).mean((2, 3))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_each_part_is_merged(fold, make):
    assert merged(_apart, fold, make(3, 6, 3, groups=3)) == dict.fromkeys(("first", "last", "mul", "sub"), "merged into layer")


@pytest.mark.parametrize(
    "read",
    [
        lambda m, y: m.first(y[:, :2]).sum() + m.last(y[:, 1:5]).sum(),  # channel 1 is read twice
        lambda m, y: m.first(y[:, :2]).sum() + y.sum(),
        lambda m, y: m.first(F.pad(y[:, :1], (0, 0, 0, 0, 0, 1))),  # zeros are no channel
    ],
)
def test_other_readers_leave_the_layer_as_it_is(read):
    assert not merged(read)


def test_a_part_with_a_constant_for_each_place_is_left():
    assert merged(lambda m, y: m.first(y[:, :2]) + y[:, 2:4] * torch.arange(4.0)) == {"first": "merged into layer"}


def test_a_cat_of_all_parts_is_the_layers_output():
    def read(m, y):
        first, last = torch.split(y, [2, 4], 1)
        return torch.cat([m.first(first), m.last(last)], 1) * 3 - torch.arange(6.0)[:, None, None]

    model, x = randomize_batch_norm(Parts(read)).eval(), torch.randn(2, 3, 6, 6)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert lrpfx.node_names(explain_model) == ["x", "layer"]
    assert_close(explain_model(x), model(x), 1e-12)


@pytest.mark.parametrize("dim", [1, -3])
def test_single_channels_of_an_unbound_output(dim):
    def read(m, y):
        a, b, c, d, e, f = torch.unbind(y, dim)
        return torch.stack([a + 1, b - m.first.bias[0], c * -2, d, e / -3 + m.first.bias[1], f - 1], dim)

    model, x = randomize_batch_norm(Parts(read)).eval(), torch.randn(2, 3, 6, 6)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert lrpfx.node_names(explain_model) == ["x", "layer"]
    assert_close(explain_model(x), model(x), 1e-12)


def test_a_constant_for_each_place_of_a_single_channel_is_left():
    assert not merged(lambda m, y: (y[:, 0] + torch.arange(4.0)).sum() + (y[:, 1:] * 1).sum())


def test_parts_in_another_order_are_no_output_of_the_layer():
    def read(m, y):
        first, last = y.view(len(y), 2, 3, *y.shape[2:]).unbind(1)
        return torch.cat([last + 1, first - m.first.bias[0]], 1)

    model, x = randomize_batch_norm(Parts(read)).eval(), torch.randn(2, 3, 6, 6)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert [name for name in lrpfx.node_names(explain_model) if name.startswith(("add", "sub"))] == []
    assert "cat" in lrpfx.node_names(explain_model)
    assert_close(explain_model(x), model(x), 1e-12)
