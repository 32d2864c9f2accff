"""Attention masks that depend on sizes alone become `is_causal`, or none, only where they show that pattern at every size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import AttnLRP

LENGTH = 6


def causal(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def positions(x):
    """Positions of queries as a column, and of keys as a row."""
    at = torch.arange(x.shape[1])
    return at[:, None], at[None, :]


def compared(condition):
    return lambda net, x: condition(*positions(x))


def bias_of(mask, x, hidden):
    return torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, hidden)


#: name -> (the mask of a network and an input, the pattern it is folded to)
MASKS = {
    "triangle": (lambda net, x: causal(x), "causal"),
    "comparison": (compared(lambda query, key: key <= query), "causal"),
    "for each sample": (lambda net, x: causal(x).expand(x.shape[0], 1, -1, -1), "causal"),
    "infinity": (lambda net, x: bias_of(causal(x), x, -torch.inf), "causal"),
    "lowest number": (lambda net, x: bias_of(causal(x), x, torch.finfo(x.dtype).min), "causal"),
    "of transformers": (
        lambda net, x: torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)[None, None],
        "causal",
    ),
    "all keys": (lambda net, x: torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool), "nothing"),
    "no bias": (lambda net, x: torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype), "nothing"),
    "window": (compared(lambda query, key: (key <= query) & (query - key < 4)), None),
    "wide window": (compared(lambda query, key: (key <= query) & (query - key < 100)), None),
    "window of blocks": (compared(lambda query, key: (key <= query) & (query // 4 - key // 4 < 5)), None),
    "window of a tenth": (compared(lambda query, key: (key <= query) & ((query - key) * 0.05 < 1)), None),
    "window of a buffer": (compared(lambda query, key: (key <= query) & (query - key < 50)), None),
    "later keys": (compared(lambda query, key: key >= query), None),
    "strictly earlier": (compared(lambda query, key: (key < query) | (key == 0)), None),
    "a tenth less": (lambda net, x: bias_of(causal(x), x, -0.1), None),
    "ten thousand": (lambda net, x: bias_of(causal(x), x, -10000.0), None),
    "distance": (compared(lambda query, key: -(query - key).abs().to(torch.float64)), None),
    "buffer": (lambda net, x: net.table[: x.shape[1], : x.shape[1]], "causal"),
    "buffer with a window": (lambda net, x: net.window[: x.shape[1], : x.shape[1]], None),
    "buffer of the state": (lambda net, x: net.saved[: x.shape[1], : x.shape[1]], None),
    "parameter": (lambda net, x: net.bias[: x.shape[1], : x.shape[1]], None),
    "values": (lambda net, x: (x[:, None, :, :1] > 0) | causal(x), None),
}


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.dense = nn.Linear(8, 8)
        everything = torch.ones(64, 64, dtype=torch.bool).tril()
        self.register_buffer("table", everything, persistent=False)
        self.register_buffer("window", everything & ~everything.tril(-20), persistent=False)
        self.register_buffer("saved", everything.clone())
        self.bias = nn.Parameter(torch.zeros(64, 64))
        self.eval()

    def forward(self, x):
        heads = self.dense(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.mask(self, x)).transpose(1, 2).flatten(2)


class PositionsFirst(nn.Module):
    """Inputs of shape (positions, batch, features), with a causal window."""

    def __init__(self, window):
        super().__init__()
        self.window = window
        self.eval()

    def forward(self, x):
        at = torch.arange(x.shape[0])
        mask = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < self.window)
        heads = x.transpose(0, 1)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(0, 1)


class TwoLengths(nn.Module):
    """Later queries than keys, aligned at the end."""

    def forward(self, x, context):
        shift = context.shape[1] - x.shape[1]
        mask = torch.ones(x.shape[1], context.shape[1], dtype=torch.bool).tril(shift)
        return F.scaled_dot_product_attention(x, context, context, attn_mask=mask)


def folded(explain_model):
    """The pattern of the masks, and reasons why they were not folded."""
    stage = next(stage for stage in lrpfx.history(explain_model) if stage.name == "fold_masks")
    pattern = {"its mask is causal": "causal", "its mask hides nothing": "nothing"}
    return [pattern[what] for _, what in stage.details], [reason for _, reason in stage.reasons]


def exported(model, *inputs, dimensions=(0, 1)):
    """The program of a model with open dimensions."""
    shapes = tuple(dict.fromkeys(dimensions, torch.export.Dim.AUTO) for _ in inputs) if dimensions else None
    return torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)


def assert_same_map(explain_model, model, *inputs):
    """The output of the model, and the map of the direct form, which knows the sizes."""
    program = exported(model, *inputs, dimensions=())
    direct = lrpfx.transform(program, AttnLRP(), example_inputs=inputs, optimize=False)
    found, expected = (lrpfx.attribute(one, inputs, torch.cos) for one in (explain_model, direct))
    torch.testing.assert_close(found.output, model(*inputs).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.sampled(3)
def test_one_size(name):
    """At a fixed size, what the mask hides at this size counts."""
    mask, pattern = MASKS[name]
    torch.manual_seed(0)
    model, x = Masked(mask), torch.randn(2, LENGTH, 8)
    explain_model = lrpfx.transform(exported(model, x, dimensions=()), AttnLRP(), example_inputs=x)
    patterns, reasons = folded(explain_model)
    looks_causal = name.startswith(("wide window", "window of", "buffer with"))
    assert patterns == (["causal"] if looks_causal else [pattern] if pattern else [])
    assert len(patterns) + len(reasons) == (0 if name == "values" else 1)
    if looks_causal:
        assert_same_map(explain_model, model, x)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.sampled(3)
def test_every_size(name):
    """At an open size, what it hides at every size counts: a window shows beyond it."""
    mask, pattern = MASKS[name]
    torch.manual_seed(0)
    model, x = Masked(mask), torch.randn(2, LENGTH, 8)
    explain_model = lrpfx.transform(exported(model, x), AttnLRP(), example_inputs=x)
    patterns, reasons = folded(explain_model)
    assert patterns == ([pattern] if pattern else [])
    assert len(patterns) + len(reasons) == (0 if name == "values" else 1)
    assert_same_map(explain_model, model, x)


@pytest.mark.parametrize("window, pattern", [(4, []), (100, []), (2**40, ["causal"])])
def test_positions_in_the_first_dimension(window, pattern):
    model, x = PositionsFirst(window), torch.randn(LENGTH, 2, 4)
    explain_model = lrpfx.transform(exported(model, x), AttnLRP(), example_inputs=x)
    assert folded(explain_model)[0] == pattern
    assert_same_map(explain_model, model, x)


def test_different_lengths_of_queries_and_keys():
    """A mask that is causal only for as many keys as queries."""
    model, same = TwoLengths().eval(), (torch.randn(2, 4, 3), torch.randn(2, 4, 3))
    explain_model = lrpfx.transform(exported(model, *same, dimensions=()), AttnLRP(), example_inputs=same)
    assert folded(explain_model)[0] == ["causal"]
    other = (torch.randn(2, 4, 3), torch.randn(2, 7, 3))
    explain_model = lrpfx.transform(exported(model, *other), AttnLRP(), example_inputs=other)
    assert folded(explain_model)[0] == []
    assert_same_map(explain_model, model, *other)
