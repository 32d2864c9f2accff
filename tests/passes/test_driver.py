"""The driver of passes: history, dumps, verification."""

import itertools
import logging

import pytest
import torch
from helpers import NETWORKS, assert_close, small_encoder, small_net
from torch import nn

import lrpfx
from lrpfx import passes
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonPlus
from lrpfx.errors import LrpfxError
from lrpfx.frontends.symbolic import capture_symbolic
from lrpfx.ir.node import NodeInfo, map_arguments, set_info, update_info
from lrpfx.operators.layer import layer_of_node
from lrpfx.operators.table import operator_named
from lrpfx.passes.stages import STAGES, Settings, Stage, passes_of


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_verifying_counts_nothing_up(capture):
    model = Counting().eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 3), capture=capture)
    assert explain_model.state_dict()["calls"] == model.calls == 0


def test_dump_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("LRPFX_DUMP_DIR", str(tmp_path / "dump"))
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    stages = lrpfx.history(explain_model)
    assert files == [f"{n:03d}_{stage.stage}_{stage.name}.py" for n, stage in enumerate(stages, 1)]
    (place,) = (n for n, stage in enumerate(stages) if stage.name == "merge_batch_norm")
    text = (tmp_path / "dump" / f"{place + 1:03d}_canonize_merge_batch_norm.py").read_text()
    assert text == str(stages[place]) + "\n"
    compile(text, "dump", "exec")
    assert "# CANONIZE merge_batch_norm: 2 matched" in text and "left alone: norm: " in text


class Breaks(passes.GraphPass):
    """A pass with a defect."""

    name = "breaks"
    stage = "canonize"

    def __init__(self, defect):
        self.defect = defect

    def run(self, program):
        self.defect(program.graph)
        return passes.PassResult(1)


def test_the_driver_lints_every_pass():
    program = capture_symbolic(small_net())

    def use_before_definition(graph):
        first, *_, last = (node for node in graph.nodes if node.op == "call_function")
        first.args = (last, *first.args[1:])

    with pytest.raises(lrpfx.PassError, match="the pass breaks left a malformed graph of ResidualNet"):
        passes.run_pass(program, Breaks(use_before_definition))


def test_the_driver_verifies_passes_that_promise_to_preserve():
    model, x = small_net(), torch.randn(2, 3, 8, 8)
    program = capture_symbolic(model)
    verification = passes.driver.Verification((x,), model(x).detach())

    def skip_a_layer(graph):
        norm = next(node for node in graph.nodes if node.name == "bn1")
        norm.replace_all_uses_with(norm.args[0])

    with pytest.raises(lrpfx.VerificationError, match="after breaks the graph of ResidualNet does not compute the same"):
        passes.run_pass(program, Breaks(skip_a_layer), verification)


def test_too_little_memory_for_a_graph_that_is_not_fused_yet_has_a_remedy():
    model, x = small_net(), torch.randn(2, 3, 8, 8)
    program = capture_symbolic(model)

    def exhaust(*values):
        raise torch.OutOfMemoryError("Tried to allocate 64.00 GiB")

    def take_more(graph):
        next(node for node in graph.nodes if node.op == "call_function").target = exhaust

    with pytest.raises(lrpfx.VerificationError, match=r"too little memory.*ResidualNet.*pass smaller example inputs"):
        passes.run_pass(program, Breaks(take_more), passes.driver.Verification((x,), model(x).detach()))


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_networks_keep_their_output_with_example_inputs(name):
    model, x = NETWORKS[name]()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), model(x).detach(), 1e-12)


# --- verification ---------------------------------------------------------------------------------------------------------


class Sloppy(passes.GraphPass):
    """A pass that changes a graph and reports nothing."""

    name = "sloppy"
    stage = "canonize"

    def __init__(self, change):
        self.change = change

    def run(self, program):
        self.change(program)
        return passes.PassResult()


def without_relu(program):
    node = next(node for node in program.graph.nodes if node.target is torch.nn.functional.relu)
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)


def with_other_weights(program):
    with torch.no_grad():
        next(program.root.parameters()).mul_(2.0)


def with_another_constant(program):
    node = next(node for node in program.graph.nodes if node.target is torch.nn.functional.avg_pool2d)
    node.args, node.kwargs = (node.args[0],), {"kernel_size": 2, "divisor_override": 3}


@pytest.mark.parametrize("change", [without_relu, with_other_weights, with_another_constant])
@pytest.mark.parametrize("given", [True, False])
def test_a_change_that_a_pass_does_not_report_is_found(change, given, monkeypatch):
    assign = STAGES[Stage.ASSIGN]
    monkeypatch.setitem(STAGES, Stage.ASSIGN, lambda settings: (Sloppy(change), *assign(settings)))
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(lrpfx.VerificationError, match="after sloppy the graph of ResidualNet does not compute the same"):
        lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=x if given else None)


@pytest.mark.parametrize("name", ["remove_dropout", "find_gates", "rewrite", "fold"])
@pytest.mark.parametrize("given", [True, False])
def test_every_stage_is_verified(name, given, monkeypatch):
    """A defect of a pass is found at the pass, or at the one that completes it."""
    step = next(cls for cls in vars(passes).values() if getattr(cls, "name", None) == name)
    run = step.run

    def defective(self, program):
        result = run(self, program)
        (output,) = program.graph.find_nodes(op="output")
        with program.graph.inserting_before(output):
            turned = program.graph.call_function(torch.flip, (output.args[0],), {"dims": (1,)})
        set_info(turned, NodeInfo("turned", operator=operator_named("flip")))
        output.args = (turned,)
        return result

    monkeypatch.setattr(step, "run", defective)
    where = "rewrite and save_less and fold" if name in ("rewrite", "fold") else "normalize" if not given else name
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(lrpfx.VerificationError, match=f"after {where} the graph"):
        lrpfx.transform(
            small_net(), EpsilonPlus(), example_inputs=x if given else None, unassigned="gradient", capture="symbolic"
        )


def test_verification_that_is_left_out_is_noticed(monkeypatch):
    checked = []
    check = passes.Verification.check

    def noted(self, program, name, **options):
        checked.append(name)
        check(self, program, name, **options)

    monkeypatch.setattr(passes.Verification, "check", noted)
    explain_model = lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=torch.randn(2, 3, 8, 8))
    changes = "capture and normalize_operators and remove_dropout and merge_batch_norm and rewrite and save_less and fold"
    assert checked == [changes]
    assert not any(stage.unverified for stage in lrpfx.history(explain_model))
    checked.clear()
    lrpfx.transform(small_net(), EpsilonPlus(), fold=False)
    assert checked == ["normalize", "merge_batch_norm and rewrite"]


def test_composites_of_a_captured_graph_are_verified_with_smaller_images(monkeypatch):
    """The smaller ones find what the example finds, and the error names the pass."""
    sizes = []
    check = passes.Verification.check

    def noted(self, program, name, **options):
        sizes.append((name, tuple(self.args[0].shape)))
        check(self, program, name, **options)

    monkeypatch.setattr(passes.Verification, "check", noted)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(4, 3)).eval()
    captured = lrpfx.capture(model, torch.randn(2, 3, 128, 132))
    sizes.clear()
    explain_model = lrpfx.transform(captured, EpsilonPlus())
    assert sizes == [("rewrite and fold", (2, 3, 32, 33))]
    assert not any(stage.unverified for stage in lrpfx.history(explain_model))
    assign = STAGES[Stage.ASSIGN]
    monkeypatch.setitem(STAGES, Stage.ASSIGN, lambda settings: (Sloppy(with_another_constant), *assign(settings)))
    with pytest.raises(lrpfx.VerificationError, match="after sloppy the graph of Sequential does not compute the same"):
        lrpfx.transform(captured, EpsilonPlus())
    assert sizes[-1] == ("sloppy", (2, 3, 128, 132))


@pytest.mark.parametrize("shape", [(2, 3, 128, 128), (2, 3, 64, 64)])
def test_graphs_that_take_no_smaller_images_are_verified_with_the_example(shape, monkeypatch):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 2, 1)
            self.linear = nn.Linear(2 * shape[2] * shape[3], 2)

        def forward(self, x):
            return self.linear(self.convolution(x).relu().flatten(1))

    sizes = []
    check = passes.Verification.check
    captured = lrpfx.capture(Fixed().eval(), torch.randn(shape))
    monkeypatch.setattr(
        passes.Verification,
        "check",
        lambda self, *given, **options: sizes.append(self.args[0].shape) or check(self, *given, **options),
    )
    lrpfx.transform(captured, EpsilonPlus())
    assert sizes == [shape]


def test_layers_that_passes_ask_for_are_those_of_the_graph(monkeypatch):
    """`Program.layer` keeps them; here each is compared with a new one."""
    kept = passes.Program.layer
    asked = []

    def compared(self, node):
        found, new = kept(self, node), layer_of_node(node, self.root)
        asked.append(node.name)
        for name in ("name", "inputs", "parameters", "extras", "module", "module_path", "description"):
            assert getattr(found, name) == getattr(new, name)
        assert vars(found.operation) == vars(new.operation)
        return found

    monkeypatch.setattr(passes.Program, "layer", compared)
    for composite in (AttnLRP(), EpsilonPlus(), DeepLIFT()):
        lrpfx.transform(small_encoder(), composite, torch.tensor([[1, 2, 3]]))
        lrpfx.transform(small_net(), composite, torch.randn(2, 3, 8, 8))
    assert len(asked) > 3 * len(set(asked))


def test_a_pass_that_is_not_to_edit():
    class Edits(Sloppy):
        edits = False

    with pytest.raises(lrpfx.PassError, match="sloppy must not edit anything, but it changed the graph of ResidualNet"):
        passes.run_pass(capture_symbolic(small_net()), Edits(with_other_weights))


class Pair(nn.Module):
    def forward(self, a, b):
        return torch.relu(a) + b


def test_what_nothing_verifies_says_so():
    model, a = Pair().eval(), torch.randn(2, 3)
    reason = "there are no example inputs, and random ones do not fit the model"
    stages = {stage.name: stage for stage in lrpfx.history(lrpfx.transform(model, EpsilonPlus()))}
    for name in ("symbolic", "normalize_operators", "rewrite"):
        assert stages[name].unverified == reason and f"not verified: {reason}" in str(stages[name])
    assert not stages["assign"].unverified, "it changes nothing"
    assert f"the graph is not verified: {reason}" in lrpfx.check(model, EpsilonPlus()).warnings
    for stage in lrpfx.history(lrpfx.transform(model, EpsilonPlus(), example_inputs=(a, a))):
        assert not stage.unverified and "not verified" not in str(stage)
    assert not lrpfx.check(model, EpsilonPlus(), a, a).warnings


def checked(expected, actual):
    """Hold a graph that returns `actual` against `expected`."""
    holder = nn.Module()
    graph = torch.fx.Graph()
    graph.placeholder("x")

    def node_of(value):
        if not isinstance(value, torch.Tensor):
            return value
        name = f"value{len(dict(holder.named_buffers()))}"
        holder.register_buffer(name, value)
        return graph.get_attr(name)

    graph.output(map_arguments(actual, node_of))
    passes.Verification((torch.zeros(1),), expected, records=False).check(passes.Program(holder, graph, "Net"), "a test")


PRECISION = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", PRECISION)
def test_precision_is_that_of_the_dtype(dtype):
    expected = torch.tensor([100.0, 1.0, -50.0], dtype=torch.float64)
    near = expected * (1 + 0.4 * PRECISION[dtype])
    far = expected * (1 + 4 * PRECISION[dtype])
    checked(expected.to(dtype), near.to(dtype))
    with pytest.raises(lrpfx.VerificationError, match="not close"):
        checked(expected.to(dtype), far.to(dtype))
    with pytest.raises(lrpfx.VerificationError, match="not close"):  # however small outputs are
        checked((1e-4 * expected).to(dtype), (0.5e-4 * expected).to(dtype))


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, torch.nan])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float16)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([1.0]), (torch.tensor([1.0]), torch.tensor([1.0]))),
        (torch.tensor([1000]), torch.tensor([1001])),
        (torch.tensor([True]), torch.tensor([False])),
        ((torch.tensor([1.0]), 3), (torch.tensor([1.0]), 4)),
        ((torch.tensor([1.0]), "a"), (torch.tensor([1.0]), "b")),
        ((torch.tensor([1.0]), 1), (torch.tensor([1.0]), True)),
        ({"a": torch.tensor([1.0]), "b": torch.tensor([1e6])}, {"a": torch.tensor([1.01]), "b": torch.tensor([1e6])}),
    ],
)
def test_outputs_that_differ(expected, actual):
    checked(expected, expected)
    with pytest.raises(lrpfx.VerificationError, match="after a test the graph of Net does not compute the same"):
        checked(expected, actual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_models_of_low_precision_are_verified(dtype, capture):
    model, x = small_net().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    result = lrpfx.attribute(explain_model, x, 1)
    assert result.relevance.dtype == dtype and torch.isfinite(result.relevance).all()


class OutputOfMoreDigits(nn.Module):
    """A model of half precision that converts its output; its graph computes the same in another order."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(64, 64)

    def forward(self, x):
        return self.dense(x).float()


def test_an_output_of_more_digits_is_as_precise_as_the_weights():
    model, x = OutputOfMoreDigits().bfloat16(), torch.randn(2, 64, dtype=torch.bfloat16)
    program = capture_symbolic(model)
    verification = passes.Verification((x,), model(x) * (1 + 1e-3))
    verification.check(program, "capture")
    program.root.float()
    with pytest.raises(lrpfx.VerificationError):
        passes.Verification((x.float(),), model.float()(x.float()) * (1 + 1e-2)).check(program, "capture")


def test_a_stage_that_changed_nothing_has_the_text_of_the_one_before():
    stages = lrpfx.history(lrpfx.transform(small_net(), EpsilonPlus()))
    unchanged = [(before, after) for before, after in itertools.pairwise(stages) if after.name.startswith("analyze")]
    assert len(unchanged) == 2 and all(after.code is before.code for before, after in unchanged)


def test_outputs_of_integers_make_others_no_less_precise():
    """A result that should be zero is measured by the other floating-point results, not by integers."""
    tiny, zero, integers = torch.full((3,), 1e-6, dtype=torch.float32), torch.zeros(3, dtype=torch.float32), torch.arange(3)
    verification = passes.Verification((), (tiny, zero, integers))
    verification._compare([tiny, zero, integers])
    with pytest.raises(AssertionError):
        verification._compare([tiny, zero + 1e-7, integers])


def test_passes_that_need_others_are_refused_without_them():
    program = capture_symbolic(small_net())
    with pytest.raises(lrpfx.PassError, match="analyze_signs needs a graph that is canonical, but no pass ensures this"):
        passes.run_pass(program, passes.AnalyzeSigns())
    for step in passes_of(Settings(), Stage.NORMALIZE):
        passes.run_pass(program, step)
    with pytest.raises(lrpfx.PassError, match="rewrite needs a graph that is validated, supported"):
        passes.run_pass(program, passes.Rewrite())


class Undoing(passes.GraphPass):
    name, stage = "undoing", "canonize"

    def __init__(self, undo):
        self.undo = undo

    def run(self, program):
        self.undo(program)
        return passes.PassResult()


def with_dropout(program):
    (relu, *_) = program.graph.find_nodes(op="call_function", target=torch.nn.functional.relu)
    update_info(relu, operator=operator_named("dropout"))


def with_a_method(program):
    (output,) = program.graph.find_nodes(op="output")
    with program.graph.inserting_before(output):
        output.args = (program.graph.call_method("contiguous", (output.args[0],)),)
    set_info(output.args[0], NodeInfo("contiguous", operator=operator_named("contiguous")))


def without_info(program):
    (output,) = program.graph.find_nodes(op="output")
    with program.graph.inserting_before(output):
        output.args = (program.graph.call_function(torch.flip, (output.args[0],), {"dims": (1,)}),)


@pytest.mark.parametrize(
    "undo, property", [(with_dropout, "deterministic"), (with_a_method, "canonical"), (without_info, "named")]
)
def test_what_a_pass_made_true_stays_true(undo, property, monkeypatch):
    canonize = STAGES[Stage.CANONIZE]
    monkeypatch.setitem(STAGES, Stage.CANONIZE, lambda settings: (*canonize(settings), Undoing(undo)))
    with pytest.raises(lrpfx.PassError, match=f"after the pass undoing the graph of ResidualNet should be {property}"):
        lrpfx.transform(small_net(), EpsilonPlus())


def messages(caplog, level):
    return [one.getMessage() for one in caplog.records if one.levelno == level]


def test_stages_are_logged_as_the_history_calls_them(caplog):
    with caplog.at_level(logging.DEBUG, "lrpfx"):
        stages = lrpfx.history(lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=torch.randn(1, 3, 8, 8)))
    assert messages(caplog, logging.INFO) == [f"{one.stage.upper()} {one.name}" for one in stages]
    ended = [text.rpartition(", ") for text in messages(caplog, logging.DEBUG) if "matched" in text]
    assert [text for text, _, _ in ended] == [f"{one.stage.upper()} {one.name}: {one.matches} matched" for one in stages]
    assert all(seconds.endswith(" s") and 0 <= float(seconds[:-2]) < 60 for _, _, seconds in ended)
    assert any(text.startswith("verified capture and normalize_operators and ") for text in messages(caplog, logging.DEBUG))
    assert all(one.name.startswith("lrpfx.") for one in caplog.records)


def test_a_front_end_that_fails_is_logged(caplog):
    class Branch(nn.Module):
        def forward(self, x):
            return x.relu() if x.sum() > -100 else x

    with caplog.at_level(logging.INFO, "lrpfx"), pytest.raises(LrpfxError):
        lrpfx.transform(Branch().eval(), EpsilonPlus(), example_inputs=torch.randn(1, 3))
    found = messages(caplog, logging.INFO)
    assert found[0] == "CAPTURE symbolic" and "CAPTURE export" in found
    assert any(text.startswith("the symbolic trace cannot capture Branch: CaptureError: ") for text in found)


def test_nothing_handles_the_log_by_itself(capsys):
    lrpfx.transform(small_net(), EpsilonPlus())
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "lrpfx"]
    assert loggers and not any(one.handlers or one.level or not one.propagate for one in loggers)
    assert capsys.readouterr() == ("", "")
