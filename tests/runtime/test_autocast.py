"""Rules under autocast."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx import types
from lrpfx.composites import LayerMapComposite
from lrpfx.rules import Epsilon, Pass


class Watched(Epsilon):
    """Notes whether autocast is on, and the dtypes that the rule gets."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def propagate(self, call, relevance):
        self.found.append((torch.is_autocast_enabled("cpu"), relevance.dtype, *{value.dtype for value in call.inputs}))
        return super().propagate(call, relevance)


@pytest.mark.parametrize("fold", [True, False])
def test_autocast_casts_nothing_in_a_rule_whose_values_have_one_dtype_already(fold):
    """On a GPU, autocast would compute sums in float32 and leave them beside weights in bfloat16."""
    found = []
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    explain_model = lrpfx.transform(
        model, LayerMapComposite([(nn.Linear, Watched(found)), (types.Activation, Pass())]), fold=fold
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        relevance = lrpfx.attribute(explain_model, torch.rand(2, 6), 1).relevance
    assert relevance.dtype == torch.float32
    assert found == [(False, torch.bfloat16, torch.bfloat16)] * 2
