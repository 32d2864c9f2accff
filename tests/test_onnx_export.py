"""Lowered programs in the operators of ONNX."""

import pytest
import torch

import lrpfx
from lrpfx.composites import EpsilonPlus, LayerMapComposite
from lrpfx.core import Hook
from lrpfx.onnx_export import legalized, onnx_model, origin_of


def test_legal_programs_keep_their_origins():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.Flatten())
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus()), torch.rand(2, 2, 6, 6), target="weights")
    legal = legalized(program)
    origins = {str(node.target): origin_of(node) for node in legal.graph.nodes if node.op == "call_function"}
    assert not [target for target in origins if "_backward" in target]
    assert "0: ZPlus(stabilizer=1e-06)" in origins.values() and "2: Norm(stabilizer=1e-06)" in origins.values()


def test_what_onnx_does_not_have_is_named():
    class Bounded(Hook):
        def propagate(self, call, relevance):
            return (relevance.clamp(max=relevance.median(1, keepdim=True).values),)

    explain_model = lrpfx.transform(torch.nn.Sequential(torch.nn.ReLU()), LayerMapComposite([(torch.nn.ReLU, Bounded())]))
    program = lrpfx.lower(explain_model, torch.rand(2, 8).float(), target="weights")
    with pytest.raises(lrpfx.LoweringError, match=r"no form of these operators:\n  aten.median.dim, from 0: Bounded"):
        onnx_model(program, ["input", "target"], ["output", "relevance"])
