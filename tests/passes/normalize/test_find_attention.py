"""Products of attention weights and values are found however they are written."""

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import types
from lrpfx.composites import CPLRP, AttnLRP, EpsilonPlus
from lrpfx.rules import ValueOnly


class Attention(nn.Module):
    """Attention with a function of weights and values."""

    def __init__(self, function):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.function = function
        self.eval()

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        return self.function(weights, self.v(x))


#: Ways to write the product.
FORMS = {
    "operator": lambda p, v: p @ v,
    "method": lambda p, v: p.matmul(v),
    "bmm": torch.bmm,
    "baddbmm": lambda p, v: torch.baddbmm(torch.zeros(1), p, v),
    "einsum": lambda p, v: torch.einsum("bqk,bkd->bqd", p, v),
    "einsum, values first": lambda p, v: torch.einsum("bkd,bqk->bqd", v, p),
    "transposed": lambda p, v: (v.transpose(1, 2) @ p.transpose(1, 2)).transpose(1, 2),
    "permuted": lambda p, v: torch.bmm(v.permute(0, 2, 1), p.permute(0, 2, 1)).permute(0, 2, 1),
    "heads": lambda p, v: (p[:, None] @ v[:, None])[:, 0],
    "cast": lambda p, v: p.to(torch.float64).contiguous() @ v,
    "scaled": lambda p, v: (p * 2 / 3) @ v,
    "renormalized": lambda p, v: (p / p.sum(-1, keepdim=True)) @ v,
    "cut": lambda p, v: p[..., :3] @ v[:, :3],
    "hidden": lambda p, v: torch.where(torch.ones(4, 4).tril() > 0, p, 0.0) @ v,
    "dropout": lambda p, v: F.dropout(p, 0.5, training=False) @ v,
    "largest": lambda p, v: p.topk(2, -1)[0] @ v[:, :2],
    "clamped": lambda p, v: p.clamp(min=1e-3) @ v,
    "squared": lambda p, v: p.square() @ v,
    "repaired": lambda p, v: p.nan_to_num() @ v,
    "the mean of two": lambda p, v: ((p + p.flip(0)) / 2) @ v,
    "with a constant": lambda p, v: (p + torch.eye(4)) @ v,
    "normalized": lambda p, v: F.normalize(p, p=1, dim=-1) @ v,
    "sum": lambda p, v: (p[..., None] * v[:, None]).sum(2),
    "sum, values first": lambda p, v: torch.sum(v.unsqueeze(1) * p.unsqueeze(-1), dim=-2),
    "sum, kept": lambda p, v: (p.unsqueeze(-1) * v[:, None]).sum((2,), keepdim=True).squeeze(2),
    "sum, hidden": lambda p, v: (p.masked_fill(~torch.ones(4, 4).tril().bool(), 0.0)[..., None] * v[:, None]).sum(2),
    "sum of columns": lambda p, v: (v.mT[:, None] * p[:, :, None]).sum(-1),
}


#: Forms that torch.export writes in another way.
EXPORTED = ["operator", "einsum", "einsum, values first", "permuted", "sum", "sum, values first", "sum, kept"]


@pytest.mark.parametrize("form, capture", [*((form, "symbolic") for form in FORMS), *((form, "export") for form in EXPORTED)])
@pytest.mark.sampled(3)
def test_forms(form, capture):
    """CP-LRP gives the weights, and what they are computed from, no relevance."""
    net, x = Attention(FORMS[form]), torch.randn(2, 4, 6)
    explain_model = lrpfx.transform(net, CPLRP(), example_inputs=x, capture=capture)
    (kind,) = {node.kind for node in lrpfx.assignment(explain_model) if node.rule.startswith("ValueOnly")}
    assert kind == "WeightedValues"
    (stage,) = (stage for stage in lrpfx.history(explain_model) if stage.name == "find_attention")
    assert stage.matches == 1
    result = lrpfx.attribute(explain_model, x, torch.cos, record=["q", "k", "v"])
    assert torch.equal(result.output, net(x).detach())
    assert not result.layers["q"].any() and not result.layers["k"].any() and result.layers["v"].any()
    weights = lrpfx.transform(net, AttnLRP(), example_inputs=x, capture=capture)
    assert lrpfx.attribute(weights, x, torch.cos, record=["q"]).layers["q"].any()
    assert lrpfx.ledger(explain_model, x, torch.cos).unexplained <= 1e-9


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("sum") and form != "sum, hidden"])
@pytest.mark.parametrize("composite", [EpsilonPlus, AttnLRP, CPLRP])
def test_sums_of_products_have_the_map_of_a_matrix_product(form, composite):
    torch.manual_seed(0)
    net, x = Attention(FORMS["operator"]), torch.randn(2, 4, 6)
    expected = lrpfx.attribute(lrpfx.transform(net, composite(), example_inputs=x), x, torch.cos).relevance
    net.function = FORMS[form]
    explain_model = lrpfx.transform(net, composite(), example_inputs=x)
    assert_close(lrpfx.attribute(explain_model, x, torch.cos).relevance, expected)


OTHERS = {
    "scores": lambda p, v: v @ v.transpose(1, 2),
    "mixed by a dense layer": lambda p, v: (p @ torch.ones(4, 4)) @ v,
    "a sum": lambda p, v: (p + v @ v.transpose(1, 2)) @ v,
    "the largest weights": lambda p, v: (p.topk(2, -1)[0][..., None] * v[:, None, :2]).sum(2),
    "the weights of the largest scores": lambda p, v: (p.log().topk(2, -1)[0].softmax(-1)[..., None] * v[:, None, :2]).sum(2),
    "weights of chosen places": lambda p, v: (p.gather(-1, p.argsort(-1)[..., :2])[..., None] * v[:, None, :2]).sum(2),
    "a sum that others read, too": lambda p, v: (lambda product: product.sum(2) + product[:, :, 0])(p[..., None] * v[:, None]),
    "a sum of all": lambda p, v: (p[..., None] * v[:, None]).sum().expand(2, 4, 6),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_products(form):
    net, x = Attention(OTHERS[form]), torch.randn(2, 4, 6)
    explain_model = lrpfx.transform(net, CPLRP(), example_inputs=x)
    assert all(node.kind != "WeightedValues" for node in lrpfx.assignment(explain_model))


def hidden_where_small(x):
    return x.masked_fill(x < x.topk(2, -1).values[..., -1:], 0.0)


#: Products that are those of attention, although their weights are masked: by what is no selection among them, or for values
#: that all queries share.
MASKED = {
    "a mask from values": lambda p, v: (p[:, 0] * (v.amax(-1) > 0))[..., None] * v,
    "a mask from the largest value": lambda p, v: (
        (p[:, 0] * (v[..., 0] >= v.amax((1, 2), keepdim=True)[..., 0]))[..., None] * v
    ),
    "a mask from places": lambda p, v: p[:, 0].masked_fill(torch.arange(4) > 2, 0.0)[..., None] * v,
}


@pytest.mark.parametrize("form", MASKED)
def test_weights_with_other_masks_stay_those_of_attention(form):
    net, x = Attention(lambda p, v: MASKED[form](p, v).sum(1)), torch.randn(2, 4, 6)
    assert "WeightedValues" in {node.kind for node in lrpfx.assignment(lrpfx.transform(net, CPLRP(), example_inputs=x))}


def test_attention_to_the_largest_scores_stays_attention():
    net, x = Attention(lambda p, v: hidden_where_small(p) @ v), torch.randn(2, 4, 6)
    assert "WeightedValues" in {node.kind for node in lrpfx.assignment(lrpfx.transform(net, CPLRP(), example_inputs=x))}
    net.function = lambda p, v: torch.einsum("bqk,bkd->bqd", hidden_where_small(p), v)
    assert "WeightedValues" in {node.kind for node in lrpfx.assignment(lrpfx.transform(net, CPLRP(), example_inputs=x))}


class Mixture(nn.Module):
    """Three experts, of which a router chooses two for each row. `combined`: from their results and the weights of all."""

    def __init__(self, combined):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.combined = nn.Linear(6, 3), combined
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        scores = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        return self.combined(torch.stack([expert(x) for expert in self.experts], 1), scores)


MIXED = {
    "einsum": lambda results, scores: torch.einsum("be,bed->bd", scores, results),
    "results first": lambda results, scores: torch.einsum("bed,be->bd", results, scores),
    "other order": lambda results, scores: torch.einsum("eb,bed->db", scores.T, results).T,
    "not summed": lambda results, scores: torch.einsum("be,bed->edb", scores, results).sum(0).T,
}


@pytest.mark.parametrize("form", MIXED)
def test_einsums_of_chosen_experts_are_gates(form):
    x = torch.randn(4, 6)
    nets = Mixture(lambda results, scores: (results * scores[..., None]).sum(1)), Mixture(MIXED[form])
    expected, found = (lrpfx.transform(net.eval(), AttnLRP(), example_inputs=x) for net in nets)
    assert_close(found(x), expected(x), 1e-12)
    results = [lrpfx.attribute(one, x, torch.cos).relevance for one in (found, expected)]
    assert_close(*results, 1e-9)
    assert "Gate" in {node.kind for node in lrpfx.assignment(found)}


SPELLED_OUT = {
    "log": lambda a: a.log_softmax(-1).exp(),
    "ratio": lambda a: a.exp() / a.exp().sum(-1, keepdim=True),
    "positive numbers, divided by their sum": lambda a: a.square() / a.square().sum(-1, keepdim=True),
    "one exponential": lambda a: (lambda e: e / e.sum(-1, keepdim=True))((a - a.amax(-1, keepdim=True)).exp()),
}


@pytest.mark.parametrize("form", SPELLED_OUT)
def test_a_softmax_that_is_spelled_out(form):
    class Net(Attention):
        def forward(self, x):
            return self.function(self.q(x) @ self.k(x).transpose(-1, -2)) @ self.v(x)

    net, x = Net(SPELLED_OUT[form]), torch.randn(2, 4, 6)
    result = lrpfx.attribute(lrpfx.transform(net, CPLRP(), example_inputs=x), x, torch.cos, record=["q", "k", "v"])
    assert not result.layers["q"].any() and not result.layers["k"].any() and result.layers["v"].any()


def test_a_rule_by_kind():
    """The kind is a part of MatMul, and can have a rule of its own beside it."""
    composite = AttnLRP(layer_map=[(types.WeightedValues, ValueOnly(0.0))])
    net, x = Attention(FORMS["operator"]), torch.randn(2, 4, 6)
    rules = {node.name: node.rule for node in lrpfx.assignment(lrpfx.transform(net, composite, example_inputs=x))}
    assert rules["matmul"].startswith("UniformEpsilon") and rules["matmul_1"].startswith("ValueOnly")
    assert issubclass(types.WeightedValues, types.MatMul) and not issubclass(types.MatMul, types.WeightedValues)
