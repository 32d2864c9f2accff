"""Grouped products, the dense layers of mixtures of experts."""

import pytest
import torch
from helpers import same_in_a_graph
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP
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
