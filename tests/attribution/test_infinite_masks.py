"""Masks with -inf among the inputs: accepted where they only hide keys, refused where -inf would be a number."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, EpsilonPlus

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
LENGTH = 3  # without padding


def scores(query, key):
    return query @ key.transpose(-1, -2) / 3


def by_torch(query, key, value, mask):
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def spelled_out(query, key, value, mask):
    return (scores(query, key) + mask).softmax(-1) @ value


def by_heads(query, key, value, mask):
    query, key, value = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (query, key, value))
    bias = mask[:, None].to(query.dtype).expand(-1, 2, -1, -1) + torch.arange(2.0).to(query)[:, None, None]
    return by_torch(query, key, value, bias).transpose(1, 2).flatten(2)


def filled(query, key, value, mask):
    bias = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -torch.inf)
    return (scores(query, key) + bias).softmax(-1) @ value


def scaled(query, key, value, mask):
    return (scores(query, key) + 2 * mask).softmax(-1) @ value


def without_softmax(query, key, value, mask):
    return (scores(query, key) + mask).exp() @ value


class Attend(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.embedding, self.out = nn.Embedding(10, 8), nn.Linear(8, 5)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids, mask):
        x = self.embedding(ids)
        return self.out(self.attention(self.query(x), self.key(x), self.value(x), mask))


class InModule(Attend):
    def __init__(self):
        super().__init__(None)
        self.module = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids, mask):
        x = self.embedding(ids)
        return self.out(self.module(x, x, x, key_padding_mask=mask[:, 0], need_weights=False)[0])


def padding(hidden):
    mask = torch.zeros(2, 4, 4)
    mask[:, :, LENGTH:] = hidden
    return mask


def explained(model, composite, capture):
    torch.manual_seed(0)
    return lrpfx.transform(model.eval(), composite, example_inputs=(IDS, torch.zeros(2, 4, 4)), capture=capture)


MODELS = {one.__name__: lambda one=one: Attend(one) for one in (by_torch, spelled_out, by_heads, filled)}


@pytest.mark.parametrize(
    ("composite", "capture"),
    [(AttnLRP(), "symbolic"), (CPLRP(), "symbolic"), (EpsilonPlus(), "symbolic"), (AttnLRP(gamma=0.1), "export")],
)
@pytest.mark.parametrize("name", [*MODELS, "in a module"])
@pytest.mark.sampled(3)
def test_padding_hidden_by_infinity_changes_nothing(name, capture, composite):
    torch.manual_seed(0)
    model = InModule() if name == "in a module" else MODELS[name]()
    explain_model = explained(model, composite, capture)
    short = lrpfx.attribute(explain_model, (IDS[:, :LENGTH], torch.zeros(2, LENGTH, LENGTH)), (1, 2)).relevance[0]
    assert short.abs().sum() > 1e-3
    for hidden in (-torch.inf, torch.finfo(torch.float64).min):
        mask = padding(hidden)
        found = lrpfx.attribute(explain_model, (IDS, mask), (1, 2))
        assert torch.allclose(found.output, model(IDS, mask), atol=1e-12)
        ids, of_mask = found.relevance
        assert torch.allclose(ids[:, :LENGTH], short, atol=1e-12) and not ids[:, LENGTH:].any()
        assert torch.isfinite(of_mask).all() and not of_mask[:, :, LENGTH:].any()
        assert lrpfx.ledger(explain_model, (IDS, mask), (1, 2)).unexplained < 1e-12
    several = lrpfx.attribute(explain_model, (IDS, padding(-torch.inf)), targets=[(1, 2), (0, 0)]).relevance[0]
    assert torch.allclose(several[0], ids, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*functions of their own")
@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(("attention", "reader"), [(scaled, "mul"), (without_softmax, "exp")])
def test_infinity_that_would_be_a_number(attention, reader, capture):
    explain_model = explained(Attend(attention), AttnLRP(), capture)
    with pytest.raises(
        lrpfx.InputError, match=rf"-inf, but this one is read by {reader}\. Pass a boolean mask, or torch.finfo"
    ):
        lrpfx.attribute(explain_model, (IDS, padding(-torch.inf)), (1, 2))
    for other in (torch.inf, torch.nan):
        with pytest.raises(lrpfx.InputError, match="not finite"):
            lrpfx.attribute(explain_model, (IDS, padding(other)), (1, 2))


def test_infinity_in_a_signal_a_nested_mask_and_a_declared_constant():
    class Nested(Attend):
        def forward(self, ids, masks):
            return super().forward(ids, masks["one"])

    given = (IDS, {"one": padding(-torch.inf)})
    nested = lrpfx.transform(Nested(by_torch).eval(), AttnLRP(), example_inputs=(IDS, {"one": padding(0.0)}))
    assert torch.isfinite(lrpfx.attribute(nested, given, (1, 2)).relevance[0]).all()
    inputs = (IDS, torch.zeros(2, 4, 4))
    constant = lrpfx.transform(Attend(by_torch).eval(), AttnLRP(), example_inputs=inputs, constants=("mask",))
    assert torch.isfinite(lrpfx.attribute(constant, (IDS, padding(-torch.inf)), (1, 2)).relevance[0]).all()
    signal = lrpfx.transform(nn.Sequential(nn.Linear(3, 2)).eval(), EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="is read by 0"):
        lrpfx.attribute(signal, torch.tensor([[1.0, -torch.inf, 2.0]]), 1)


@pytest.mark.parametrize("composite", [AttnLRP(), pytest.param(EpsilonPlus(), marks=pytest.mark.slow)])
def test_programs_take_such_masks_and_no_other_infinity(tmp_path, composite):
    torch.manual_seed(0)
    explain_model = explained(Attend(spelled_out), composite, "symbolic")
    inputs = (IDS, padding(-torch.inf))
    expected = lrpfx.attribute(explain_model, inputs, (1, 2)).relevance
    program = lrpfx.lower(explain_model, inputs, target="token")
    runner = lrpfx.load(lrpfx.save(program, tmp_path / "attend.pt2"))
    target = torch.tensor([[1, 2], [1, 2]])
    results = runner(*inputs, target)
    assert torch.allclose(results["relevance.ids"], expected[0], atol=1e-9)
    assert torch.allclose(results["relevance.mask"], expected[1], atol=1e-9)
    with pytest.raises(lrpfx.InputError, match="not finite"):
        runner(IDS, padding(torch.nan), target)


def test_programs_without_such_masks_take_no_infinity(tmp_path):
    dense = lrpfx.lower(lrpfx.transform(nn.Linear(3, 2).eval(), EpsilonPlus()), torch.rand(2, 3))
    runner = lrpfx.load(lrpfx.save(dense, tmp_path / "dense.pt2"))
    with pytest.raises(lrpfx.InputError, match="not finite"):
        runner(torch.tensor([[1.0, -torch.inf, 2.0]]), torch.tensor([1]))
