"""FOLD and the driver: derived buffers, history, dumps, verification."""

import pytest
import torch
from helpers import NETWORKS, assert_close, small_net
from torch import nn

import lrpfx
from lrpfx import passes
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonPlus, LayerMapComposite
from lrpfx.hooks import BasicHook
from lrpfx.types import Linear


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_folding_changes_no_number(name):
    model, x = NETWORKS[name]()
    folded = lrpfx.attribute(lrpfx.transform(model, EpsilonAlpha2Beta1()), x, 1)
    live_model = lrpfx.transform(model, EpsilonAlpha2Beta1(), fold=False)
    live = lrpfx.attribute(live_model, x, 1)
    assert torch.equal(live.output, folded.output) and torch.equal(live.relevance, folded.relevance)
    assert list(live_model.state_dict()) == list(model.state_dict())
    assert "clamp" in live_model.code
    live_model.refold()  # has nothing to do


def test_derived_buffers_are_named_after_their_layer_and_not_saved():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    derived = set(dict(explain_model.named_buffers())) - set(explain_model.state_dict())
    assert {"conv1.merged_weight", "conv1.merged_bias"} <= derived
    assert derived == set(explain_model.derived)
    assert all(not buffer.requires_grad for buffer in explain_model.buffers())


def test_users_modifiers_are_folded_and_kept():
    calls = []

    def modifier(parameter, name):
        calls.append(name)
        return parameter.clamp(min=0)

    model = nn.Sequential(nn.Linear(3, 2)).eval()
    explain_model = lrpfx.transform(model, LayerMapComposite([(Linear, BasicHook(param_modifiers=[modifier]))]))
    assert calls == ["weight", "bias"]
    explain_model(torch.randn(2, 3))
    assert calls == ["weight", "bias"]
    explain_model.refold()
    assert calls == ["weight", "bias"] * 2


def test_results_that_are_no_tensors_stay_in_the_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            first, second = torch.split(self.weight, [2, 2])[0:2][0], self.weight[2:]
            return torch.nn.functional.linear(x, first) + torch.nn.functional.linear(x, second)

    model, x = Net().eval(), torch.randn(2, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert torch.equal(explain_model(x), model(x))


def test_dump_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("LRPFX_DUMP_DIR", str(tmp_path / "dump"))
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    stages = lrpfx.history(explain_model)
    assert files == [f"{n:03d}_{stage.stage}_{stage.name}.py" for n, stage in enumerate(stages, 1)]
    assert "008_canonize_merge_batch_norm.py" in files
    text = (tmp_path / "dump" / "008_canonize_merge_batch_norm.py").read_text()
    assert text == str(stages[7]) + "\n"
    compile(text, "dump", "exec")
    assert "# CANONIZE merge_batch_norm: 2 matched" in text and "left alone: norm: " in text


class Breaks(passes.Pass):
    """A pass with a defect."""

    name = "breaks"
    stage = "canonize"

    def __init__(self, defect):
        self.defect = defect

    def run(self, program):
        self.defect(program.graph)
        return passes.PassResult(1)


def test_the_driver_lints_every_pass():
    program = passes.capture_symbolic(small_net())

    def use_before_definition(graph):
        first, *_, last = (node for node in graph.nodes if node.op == "call_function")
        first.args = (last, *first.args[1:])

    with pytest.raises(lrpfx.PassError, match="the pass breaks left a graph of ResidualNet that is not well formed"):
        passes.run_pass(program, Breaks(use_before_definition))


def test_the_driver_verifies_passes_that_promise_to_preserve():
    model, x = small_net(), torch.randn(2, 3, 8, 8)
    program = passes.capture_symbolic(model)
    verification = passes.driver.Verification((x,), model(x).detach())

    def skip_a_layer(graph):
        norm = next(node for node in graph.nodes if node.name == "bn1")
        norm.replace_all_uses_with(norm.args[0])

    with pytest.raises(lrpfx.VerificationError, match="after breaks the graph of ResidualNet computes something else"):
        passes.run_pass(program, Breaks(skip_a_layer), verification)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_networks_keep_their_output_with_example_inputs(name):
    model, x = NETWORKS[name]()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), model(x).detach(), 1e-12)
