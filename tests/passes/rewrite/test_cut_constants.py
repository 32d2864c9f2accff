"""Declared constants are cut off where they enter."""

import pytest
import torch
from helpers import Binary
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.ir.node import node_info
from lrpfx.operators.functions import without_gradient
from lrpfx.passes.program import insert_call
from lrpfx.passes.rewrite.cut_constants import CutConstants


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)

    def forward(self, x, scale):
        return self.dense(x) * scale


def compiled(fold):
    torch.manual_seed(0)
    example = torch.randn(2, 4), torch.rand(2, 3)
    return lrpfx.transform(Scaled().eval(), EpsilonPlus(), example_inputs=example, constants=("scale",), fold=fold)


@pytest.mark.parametrize("fold", [True, False])
def test_its_own_step_is_verified(fold, monkeypatch):
    run = CutConstants.run

    def doubling(self, program):
        result = run(self, program)
        (cut,) = [node for node in program.graph.nodes if node.target is without_gradient]
        info = node_info(cut)
        double = insert_call(program.graph, cut.next, torch.mul, (cut, 2.0), info)
        cut.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)
        return result

    assert [stage.unverified for stage in compiled(fold).compiled.history if stage.name == "cut_constants"] == [""]
    monkeypatch.setattr(CutConstants, "run", doubling)
    with pytest.raises(lrpfx.VerificationError, match="cut_constants"):
        compiled(fold)


def test_no_constants_no_step():
    explain_model = lrpfx.transform(Binary(lambda x, y: torch.cat([x, y])), EpsilonPlus())
    assert "cut_constants" not in [stage.name for stage in explain_model.compiled.history]
