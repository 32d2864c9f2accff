"""Grouped products, the dense layers of mixtures of experts."""

import pytest
import torch
from helpers import assert_close, same_in_a_graph
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import CPLRP, AttnLRP, EpsilonPlus
from lrpfx.errors import InputError
from lrpfx.operators.functions import grouped_linear


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 5, 5], [1, 2, 3]])
def test_grouped_products(ends):
    """Also of groups without rows, and of rows without a group, which are 0 as torch leaves their memory as it is."""
    x, weight, offsets = torch.randn(5, 3), torch.randn(3, 3, 4), torch.tensor(ends, dtype=torch.int32)
    found, _ = same_in_a_graph(grouped_linear, x, weight, offsets)
    start = 0
    for group, end in enumerate(ends):
        torch.testing.assert_close(found[start:end], x[start:end] @ weight[group])
        start = end
    assert not found[start:].any()


def test_products_that_are_not_of_groups_of_rows_are_refused():
    with pytest.raises(InputError, match="a grouped product of shapes"):
        grouped_linear(torch.randn(2, 5, 3), torch.randn(2, 3, 4), None)


class Grouped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(3, 8, 8, dtype=torch.float32))

    def forward(self, x, offsets):
        return self.function(x, self.weight, offsets)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch has no grouped product")
@pytest.mark.parametrize("capture, dtype, tolerance", [("symbolic", torch.float32, 1e-4), ("export", torch.bfloat16, 3e-2)])
def test_torchs_grouped_product_is_a_dense_layer(capture, dtype, tolerance):
    """Rules for `nn.Linear` apply to it. It takes no float64, and torch.export takes only bfloat16."""
    model = Grouped(lambda x, weight, offsets: nn.functional.grouped_mm(x, weight, offs=offsets)).eval().to(dtype)
    x, offsets = torch.randn(5, 8, dtype=dtype), torch.tensor([2, 3, 5], dtype=torch.int32)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=(x, offsets), capture=capture)
    (row,) = [row for row in lrpfx.assignment(explain_model) if row.kind == "Linear"]
    assert row.rule.startswith("Epsilon")
    relevance = lrpfx.attribute(explain_model, (x, offsets), lambda output: output).relevance[0]
    expected = x * model.weight[[0, 0, 1, 2, 2]].sum(2)
    torch.testing.assert_close(relevance, expected, rtol=tolerance, atol=tolerance)


# --- matrices looked up among parameters -------------------------------------------------------------------------------------


class Selected(nn.Module):
    """Dense layers of which integers, or the input itself, choose one for each sample."""

    def __init__(self, form, routed):
        super().__init__()
        self.form, self.routed = form, routed
        self.weight = nn.Parameter(torch.randn(3, 5, 4))
        self.out = nn.Linear(5, 2)

    def choice(self, x):
        return (x * 7).sum(-1).floor().long() % 3 if self.routed else torch.arange(x.shape[0]) % 3

    def forward(self, x):
        chosen = self.weight[self.choice(x)]
        if self.form == "columns":
            value = torch.bmm(chosen, x[:, :, None])[:, :, 0]
        elif self.form == "rows":
            value = (x[:, None] @ chosen.transpose(1, 2)).squeeze(1)
        else:
            value = torch.matmul(x[:, None], torch.index_select(self.weight, 0, self.choice(x)).mT).squeeze(1)
        return self.out(value.relu())


class One(nn.Module):
    """The same for one sample: plain dense layers."""

    def __init__(self, selected, x):
        super().__init__()
        self.dense, self.out = nn.Linear(4, 5, bias=False), selected.out
        self.dense.weight = nn.Parameter(selected.weight[selected.choice(x)][0].detach())

    def forward(self, x):
        return self.out(self.dense(x).relu())


@pytest.mark.parametrize("composite", [AttnLRP(gamma=0.3), CPLRP(), EpsilonPlus(layer_map=[(nn.Linear, rules.ZPlus())])])
@pytest.mark.parametrize("form", ["columns", "rows", "index_select"])
@pytest.mark.parametrize(("capture", "routed"), [("symbolic", True), ("export", False)])
@pytest.mark.sampled(3)
def test_products_with_matrices_that_were_looked_up_are_dense_layers(composite, capture, form, routed):
    torch.manual_seed(0)
    model, x = Selected(form, routed).eval(), torch.randn(1, 4)
    one = lrpfx.transform(One(model, x).eval(), composite, example_inputs=x)
    many = lrpfx.transform(model, composite, example_inputs=x.repeat(2, 1), capture=capture)
    kinds = {row.name: row.kind for row in lrpfx.assignment(many)}
    assert "Linear" in [kind for name, kind in kinds.items() if name != "out"] and "MatMul" not in kinds.values()
    assert_close(lrpfx.attribute(many, x, 1).relevance, lrpfx.attribute(one, x, 1).relevance, 1e-12)
    assert lrpfx.ledger(many, x, 1).unexplained < 1e-12
    other = torch.randn(3, 5, 4)
    many.load_state_dict({**many.state_dict(), "weight": other})
    changed = Selected(form, routed).eval()
    changed.load_state_dict({**model.state_dict(), "weight": other})
    again = lrpfx.transform(changed, composite, example_inputs=x.repeat(2, 1), capture=capture)
    assert_close(lrpfx.attribute(many, x, 1).relevance, lrpfx.attribute(again, x, 1).relevance, 1e-12)


def test_products_of_a_signal_and_entries_of_a_signal_are_no_dense_layers():
    class Attends(nn.Module):
        def forward(self, x):
            return (x @ x[:, torch.tensor([1, 0])].transpose(1, 2)).sum(2)

    explain_model = lrpfx.transform(Attends(), AttnLRP(), example_inputs=torch.rand(2, 3, 4))
    assert "Linear" not in [row.kind for row in lrpfx.assignment(explain_model)]
