"""Attention and transformers are taken apart exactly."""

import pytest
import torch
from combinations import each_pair
from helpers import assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import EpsilonPlus, LayerMapComposite, NameMapComposite
from lrpfx.types import MatMul, Product, Softmax


def stabilized(z, epsilon=1e-6):
    return z + epsilon * torch.where(z >= 0, 1.0, -1.0)


def explain(model, inputs, target=None, composite=None, **settings):
    explain_model = lrpfx.transform(model.eval(), composite or EpsilonPlus(), **settings)
    return lrpfx.attribute(explain_model, inputs, target if target is not None else torch.cos)


class Fused(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask, **self.settings)


class Decomposed(Fused):
    """Scores, softmax and weighted values, written out."""

    def forward(self, query, key, value, mask=None):
        if self.settings.get("enable_gqa"):
            key, value = (tensor.repeat_interleave(2, -3) for tensor in (key, value))
        scale = self.settings.get("scale") or 1 / query.shape[-1] ** 0.5
        scores = (query * scale) @ key.transpose(-2, -1)
        if self.settings.get("is_causal"):
            scores = scores + torch.full((3, 5), -torch.inf, dtype=torch.float64).triu(1)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return torch.softmax(scores, -1) @ value


ATTENTION = {
    "plain": ({}, None),
    "causal": ({"is_causal": True}, None),
    "scale": ({"scale": 0.3}, None),
    "bool mask": ({}, torch.tensor([[True, False, True, True, False]] * 2 + [[True] * 5])),
    "float mask": ({}, torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)),
    "grouped": ({"enable_gqa": True}, None),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.sampled(3)
def test_fused_attention_equals_the_decomposed(name, capture):
    settings, mask = ATTENTION[name]
    heads = 2 if "enable_gqa" in settings else 4
    inputs = (torch.randn(2, 4, 3, 6), torch.randn(2, heads, 5, 6), torch.randn(2, heads, 5, 6))
    inputs += () if mask is None else (mask,)
    seed = torch.randn(2, 4, 3, 6)
    results = []
    for model, front_end in ((Fused(**settings), capture), (Decomposed(**settings), "export")):
        explain_model = lrpfx.transform(model.eval(), EpsilonPlus(), example_inputs=inputs, capture=front_end)
        result = lrpfx.attribute(explain_model, inputs, seed)
        assert_close(result.output, F.scaled_dot_product_attention(*inputs[:3], mask, **settings), 1e-12)
        accounts = lrpfx.ledger(explain_model, inputs, seed)
        assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
        results.append(result.relevance)
    for fused, decomposed in zip(results[0][:3], results[1][:3], strict=True):
        assert_close(fused, decomposed, 1e-9)


def test_rows_that_see_nothing():
    """Fused attention gives 0 where a mask leaves nothing to attend to."""
    mask = torch.tensor([[True, True], [False, False]])
    inputs = (torch.randn(1, 2, 4), torch.randn(1, 2, 4), torch.randn(1, 2, 4), mask)
    result = explain(Fused(), inputs, torch.ones(1, 2, 4), example_inputs=inputs)
    assert not result.output[0, 1].any() and all(torch.isfinite(value).all() for value in result.relevance[:3])


@pytest.mark.filterwarnings("ignore:the inputs .* get no relevance")  # queries and keys of their own
def test_value_only():
    """Relevance through the values alone: queries and keys get nothing."""
    inputs = (torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    names = lrpfx.node_names(Fused())
    weighted = names[-1]
    assert weighted == "scaled_dot_product_attention.matmul_1"
    composite = EpsilonPlus()
    mixed = lrpfx.composites.MixedComposite([NameMapComposite([([weighted], rules.ValueOnly())]), composite])
    query, key, value = explain(Fused(), inputs, torch.ones(2, 3, 4), mixed).relevance
    assert not query.any() and not key.any()
    weights = torch.softmax(inputs[0] @ inputs[1].mT / 2, -1)
    assert_close(value, inputs[2] * (weights.mT @ (1 / stabilized(weights @ inputs[2]))), 1e-10)


MULTIHEAD = {
    "self": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 10},
    "bias of keys": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
}


@each_pair(name=MULTIHEAD, masks=["none", "causal", "per head", "padding", "float"], need_weights=[True, False])
def test_multihead_attention_is_decomposed_exactly(name, masks, need_weights):
    settings = MULTIHEAD[name]
    module = nn.MultiheadAttention(8, 2, **settings).eval()
    if module.out_proj.bias is not None:
        nn.init.normal_(module.out_proj.bias)
    key_size, value_size = settings.get("kdim", 8), settings.get("vdim", 8)
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 5, key_size), torch.randn(3, 5, value_size)
    if not module.batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    options = {
        "none": {},
        "causal": {"attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(2)},
        "per head": {"attn_mask": torch.rand(6, 4, 5) > 0.8},
        "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])},
        "float": {
            "attn_mask": torch.randn(4, 5),
            "key_padding_mask": torch.zeros(3, 5).index_fill(1, torch.tensor([4]), -torch.inf),
        },
    }[masks]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, query, key, value, **unused):
            output, weights = self.attention(query, key, value, need_weights=need_weights, **options)
            return output if weights is None else (output, weights)

    inputs = (query, key, value)
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlus(), capture="symbolic")
    expected = module(query, key, value, need_weights=need_weights, **options)
    actual = explain_model(*inputs)
    if need_weights:
        assert_close(actual[1], expected[1].detach(), 1e-12)
        actual, expected = actual[0], expected[0]
    else:
        expected = expected[0]
    assert_close(actual, expected.detach(), 1e-12)
    accounts = lrpfx.ledger(explain_model, inputs, torch.cos, output=0 if need_weights else None)
    assert accounts.unexplained <= 1e-9


def test_multihead_attention_under_a_composite():
    """D6: relevance of the output is that of inputs, biases and stabilizers, and the output projection has its rule."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    x = torch.randn(2, 5, 8)
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlus(), example_inputs=x)
    table = lrpfx.assignment(explain_model)
    assert table.rule_of("attention.out_proj").startswith("Epsilon")
    result, accounts = (
        lrpfx.attribute(explain_model, x, torch.ones(2, 5, 8)),
        lrpfx.ledger(explain_model, x, torch.ones(2, 5, 8)),
    )
    assert accounts.unexplained <= 1e-9
    assert accounts.total("bias") == 0, "the layer has none; the softmax has an expansion"
    assert_close(result.relevance.sum() + accounts.total("expansion") + accounts.total("stabilizer"), torch.tensor(80.0), 1e-9)


@each_pair(norm_first=[True, False], batch_first=[True, False], capture=["symbolic", "export"])
@pytest.mark.thorough
def test_transformer_encoder(norm_first, batch_first, capture):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, norm_first=norm_first, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False).eval()
    x, seed = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    assert_close(explain_model(x), model(x).detach(), 1e-12)
    accounts = lrpfx.ledger(explain_model, x, seed)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
    other = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="symbolic")
    assert_close(lrpfx.attribute(explain_model, x, seed).relevance, lrpfx.attribute(other, x, seed).relevance, 1e-9)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer(norm_first):
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, norm_first=norm_first).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(3).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = model

        def forward(self, source, target):
            return self.transformer(source, target, tgt_mask=mask)

    inputs = (torch.randn(2, 4, 8), torch.randn(2, 3, 8))
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlus(), example_inputs=inputs, capture="symbolic")
    assert_close(explain_model(*inputs), model(*inputs, tgt_mask=mask).detach(), 1e-12)
    result, accounts = (
        lrpfx.attribute(explain_model, inputs, torch.ones(2, 3, 8)),
        lrpfx.ledger(explain_model, inputs, torch.ones(2, 3, 8)),
    )
    assert all(relevance.abs().sum() > 0 for relevance in result.relevance) and accounts.unexplained <= 1e-9


class ViewsAttention(nn.Module):
    """Relies on the strides that the fused kernel gives its result, as most vision transformers do."""

    def __init__(self, view):
        super().__init__()
        self.heads = nn.Linear(4, 12)
        self.register_buffer("bias", torch.randn(1, 2, 5, 5))
        self.view = view

    def forward(self, x):
        query, key, value = self.heads(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias.view(torch.int64).view(x.dtype)  # views of another kind: the same bytes
        return self.view(F.scaled_dot_product_attention(query, key, value, bias).transpose(1, 2), x)


class AssignsBeforeEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x):
        x = x * 1.0
        x[:, 0] = 0.0
        return self.layer(x)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "view",
    [
        lambda result, x: result.view(x.shape),
        lambda result, x: result.view(x.size(0), -1, 4),
        lambda result, x: result.view(size=x.shape),
        lambda result, x: result.view_as(x),
    ],
    ids=["shape", "sizes", "by name", "as"],
)
def test_views_of_decomposed_attention(view, capture):
    model, x = ViewsAttention(view).eval(), torch.randn(2, 5, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    assert_close(explain_model(x), model(x).detach(), 1e-13)
    assert lrpfx.ledger(explain_model, x, torch.cos).unexplained <= 1e-9


def test_slice_assignment_before_an_encoder_layer():
    model, x = AssignsBeforeEncoder().eval(), torch.randn(2, 5, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), model(x).detach(), 1e-13)
    accounts = lrpfx.ledger(explain_model, x, torch.cos)
    assert accounts.unexplained <= 1e-9
    assert not lrpfx.attribute(explain_model, x, torch.cos).relevance[:, 0].any()


def test_maps_without_the_new_kinds_name_them():
    with pytest.raises(lrpfx.UnsupportedOperationError) as caught:
        lrpfx.transform(Fused().eval(), LayerMapComposite([]))
    for kind in (MatMul, Softmax, Product):
        assert f"(lrpfx.types.{kind.__name__}, lrpfx.rules." in str(caught.value)
