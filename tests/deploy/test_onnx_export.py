"""Lowered programs in the operators of ONNX."""

import pytest
import torch
from helpers import assert_close

import lrpfx
from lrpfx.composites import EpsilonPlus, LayerMapComposite
from lrpfx.core import Hook
from lrpfx.deploy.artefact import legalized
from lrpfx.deploy.backends import BACKENDS
from lrpfx.deploy.backends.onnx import onnx_model, origin_of
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS
from lrpfx.passes.lower.legalize_for_onnx import expanded
from lrpfx.support.torch_internals import decompositions_for_onnx, onnx_registry


def test_legal_programs_keep_their_origins():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.Flatten())
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus()), torch.rand(2, 2, 6, 6), target="weights")
    legal, stages = legalized(program, BACKENDS["onnx"])
    assert stages[-1].name == "legalize_for_onnx" and stages[-1].matches and "_backward" not in stages[-1].code
    origins = {str(node.target): origin_of(node) for node in legal.graph.nodes if node.op == "call_function"}
    assert not [target for target in origins if "_backward" in target]
    assert "0: ZPlus(stabilizer=1e-06)" in origins.values() and "2: Norm(stabilizer=1e-06)" in origins.values()


class ChannelsLast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(3, 6)
        self.pool = torch.nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        return self.pool(self.mix(x.movedim(1, -1)).movedim(-1, 1)).flatten(1)


def test_pooling_of_images_whose_channels_come_last(tmp_path):
    """torch gives the pooled value the strides of its input, by an operator that ONNX does not have."""
    explain_model = lrpfx.transform(ChannelsLast().float(), EpsilonPlus())
    x, target = torch.rand(3, 3, 5, 5).float(), torch.arange(3)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    assert_close(runner(x, target)["relevance"], lrpfx.attribute(explain_model, x, target).relevance, 1e-5)


def test_what_onnx_does_not_have_is_named():
    class Bounded(Hook):
        def propagate(self, call, relevance):
            return (relevance.clamp(max=relevance.median(1, keepdim=True).values),)

    explain_model = lrpfx.transform(torch.nn.Sequential(torch.nn.ReLU()), LayerMapComposite([(torch.nn.ReLU, Bounded())]))
    program = lrpfx.lower(explain_model, torch.rand(2, 8).float(), target="weights")
    with pytest.raises(lrpfx.LoweringError, match=r"no equivalent of these operators:\n  aten.median.dim, from 0: Bounded"):
        onnx_model(legalized(program, BACKENDS["onnx"])[0], ["input", "target"], ["output", "relevance"])


class Backwards(torch.nn.Module):
    """Backward operators whose results are results of the program: one result, several of which some are None, and none."""

    def forward(self, input, weight):
        gradient = torch.ops.aten.convolution(input, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        mask = [True, False, False]
        of_input, _, _ = torch.ops.aten.convolution_backward(
            gradient, input, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
        )
        place = torch.ops.aten.slice_backward(input, [input.shape[0], 5, 6, 6], 1, 1, 3, 1)
        return of_input, place, torch.ops.aten._softmax_backward_data(gradient, gradient.softmax(1), 1, input.dtype)


def test_forms_replace_operators_wherever_they_are():
    """As results, with several results, at open sizes; other operations keep their names, and the program is not changed."""
    input, weight = torch.rand(3, 2, 6, 6), torch.rand(4, 2, 3, 3)
    sizes = ({0: torch.export.Dim("batch", min=2)}, None)
    program = torch.export.export(Backwards(), (input, weight), dynamic_shapes=sizes)
    before = [(node.name, node.target, node.args) for node in program.graph.nodes]
    table = {**decompositions_for_onnx(onnx_registry(20)), **FORWARD_FORMS}
    found = expanded(program, table)
    assert [(node.name, node.target, node.args) for node in program.graph.nodes] == before
    assert not [node for node in found.graph.nodes if node.target in table]
    kept = [name for name, target, _ in before if target not in table and "getitem" not in str(target)]
    assert [node.name for node in found.graph.nodes if node.name in kept] == kept
    for batch in (2, 5):
        x = torch.rand(batch, 2, 6, 6)
        for result, expected in zip(found.module()(x, weight), Backwards()(x, weight), strict=True):
            assert_close(result, expected, 1e-12)


def test_only_operators_that_onnx_lacks_are_traced_again(monkeypatch):
    """To trace a whole program takes longer than everything else."""

    def refuse(self, *args):
        raise AssertionError("it is decomposed as a whole")

    program = lrpfx.lower(lrpfx.transform(ChannelsLast().float(), EpsilonPlus()), torch.rand(3, 3, 5, 5).float())
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
    model = onnx_model(legalized(program, BACKENDS["onnx"])[0], ["input", "target"], ["output", "relevance"])
    assert [value.name for value in model.graph.input] == ["input", "target"]
    assert [value.name for value in model.graph.output] == ["output", "relevance"] and not model.functions
