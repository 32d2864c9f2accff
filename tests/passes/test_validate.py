"""Rules for modules as a whole that do not return one tensor."""

import re

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import AttnLRP, EpsilonPlus, NameLayerMapComposite


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, query, key, value):
        return self.dense(query), value


class Attend(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.out = attention, nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0].mean(1))


BY_NAME = NameLayerMapComposite([(["attention"], rules.Epsilon())], EpsilonPlus().layer_map)
BY_KIND = EpsilonPlus(layer_map=[((nn.MultiheadAttention, Pair), rules.Epsilon())])


@pytest.mark.filterwarnings("ignore:entries of:lrpfx.LrpfxWarning")
@pytest.mark.parametrize("composite", [BY_NAME, BY_KIND])
@pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(8, 2, batch_first=True), Pair])
def test_a_module_that_returns_several_tensors(make, composite):
    model, x = Attend(make()).eval(), torch.rand(2, 4, 8)
    name = type(model.attention).__name__
    message = (
        rf"attention \({re.escape(__file__)}:\d+\): Epsilon\(epsilon=1e-06\) is for layers that return one tensor, but {name} "
        rf"returns several\. .* by kind .* or by name \(attention\.\*"
    )
    with pytest.raises(lrpfx.RuleError, match=message) as caught:
        lrpfx.transform(model, composite, example_inputs=x)
    assert "While executing" not in str(caught.value) and "call_module" not in str(caught.value)
    assert re.search(message, str(lrpfx.check(model, composite, x)))
    with pytest.raises(lrpfx.RuleError, match=r"returns? (several|a tuple)") as caught:
        lrpfx.attribute(lrpfx.transform(model, composite), x, 1)
    assert "While executing" not in str(caught.value) and "attention" in str(caught.value)
    with composite.context(model) as modified, pytest.raises(lrpfx.RuleError, match=rf"{name} returns a tuple; give rules"):
        modified(x.requires_grad_())
    assert lrpfx.attribute(lrpfx.transform(model, AttnLRP(), example_inputs=x), x, 1).relevance.any(), "without a rule for it"


class SparseAttention(nn.Module):
    """Weights of edges that depend on the input, as a sparse matrix or as a sum along the edges."""

    def __init__(self, product):
        super().__init__()
        self.dense, self.score, self.product = nn.Linear(8, 8), nn.Linear(8, 1), product
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x):
        weights = torch.sigmoid(self.score(x))[self.edges[0], 0]
        return self.product(self.edges, weights, self.dense(x))


@pytest.mark.parametrize(
    "product",
    [
        lambda edges, weights, x: torch.sparse.mm(torch.sparse_coo_tensor(edges, weights, (4, 4)), x),
        lambda edges, weights, x: torch.sparse_coo_tensor(edges, weights, (4, 4)).coalesce().to_dense() @ x,
    ],
)
def test_a_sparse_matrix_of_signals_is_refused_with_its_remedy(product):
    model, x = SparseAttention(product).eval(), torch.randn(4, 8)
    with pytest.raises(lrpfx.errors.UnsupportedOperationError, match=r"sparse_coo_tensor.*index_add") as caught:
        lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert "by name" not in str(caught.value).partition("The symbolic trace")[0]
    remedied = SparseAttention(
        lambda edges, weights, x: torch.zeros(4, 8).index_add(0, edges[0], weights[:, None] * x[edges[1]])
    ).eval()
    remedied.load_state_dict(model.state_dict())
    explain_model = lrpfx.transform(remedied, EpsilonPlus(), example_inputs=x)
    result = lrpfx.attribute(explain_model, x, 1)
    assert torch.allclose(result.output, model(x)) and result.relevance.abs().sum() > 0
