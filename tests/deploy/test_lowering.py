"""Lowered programs: the results of `lrpfx.attribute`, without autograd."""

import collections
import copy
import itertools
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import Binary, Layered, Unary, assert_agrees, assert_close, small_net, torchvision_model
from small_families import small_family
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1Flat, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat
from lrpfx.deploy.job import Job
from lrpfx.deploy.program_facts import facts_of, open_dimensions
from lrpfx.deploy.program_sizes import OpenSize, samples
from lrpfx.deploy.tracer import EXPORTABLE
from lrpfx.deploy.verification import tolerance_of
from lrpfx.errors import LoweringError, LrpfxWarning
from lrpfx.operators.functions import affine_grid
from lrpfx.passes.lower.out_of_place import OutOfPlace, is_in_place
from lrpfx.passes.lower.plain_sizes import PlainSizes
from lrpfx.passes.program import Program
from lrpfx.rules import Hook, ZBox
from lrpfx.types import Linear

aten = torch.ops.aten


@pytest.fixture
def explain_model():
    return lrpfx.transform(small_net(), EpsilonAlpha2Beta1Flat())


def images(batch=2):
    return torch.rand(batch, 3, 8, 8)


def test_the_program_gives_what_attribute_gives(explain_model):
    program = lrpfx.lower(explain_model, images(), record=["conv1", "relu"], balance=True)
    run = program.module()
    for batch in (1, 2, 3, 8):
        x, target = images(batch), torch.arange(batch) % 5
        expected = lrpfx.attribute(explain_model, x, target, record=["conv1", "relu"])
        result = run(x, target)
        assert list(result) == ["output", "relevance", "conv1", "relu", "balance"]
        assert_close(result["output"], expected.output, 1e-12)
        assert_close(result["relevance"], expected.relevance, 1e-10)
        assert_close(result["conv1"], expected.layers["conv1"], 1e-10)
        gained = expected.relevance.flatten(1).sum(1) - expected.output[torch.arange(batch), target]
        assert_close(result["balance"], gained, 1e-9)


@pytest.mark.parametrize(
    "name, composite",
    [pytest.param("resnet", EpsilonGammaBox(0.0, 1.0), marks=pytest.mark.slow), ("mobilenet_v3", EpsilonPlusFlat())],
)
def test_families_of_classifiers(name, composite):
    compare_classifier(small_family(name)[0], composite, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, composite", [("resnet18", EpsilonGammaBox(0.0, 1.0)), ("mobilenet_v3_small", EpsilonPlusFlat())]
)
def test_classifiers(name, composite):
    compare_classifier(torchvision_model(name), composite, 64)


def compare_classifier(model, composite, size):
    explain_model = lrpfx.transform(model, composite, input_range=(0.0, 1.0))
    program = lrpfx.lower(explain_model, torch.rand(1, 3, size, size), target="max")
    x = torch.rand(5, 3, size, size)
    for value in (x, x.contiguous(memory_format=torch.channels_last)):
        assert_agrees(program.module(), explain_model, value)


def test_it_is_a_plain_inference_graph(explain_model):
    program = lrpfx.lower(explain_model, images())
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith("aten.") or "getitem" in name for name in names)
    assert not any("detach" in name or name.endswith("_.default") for name in names)
    assert [spec.arg.name for spec in program.graph_signature.input_specs][-2:] == ["input", "target"]
    parameters = set(program.state_dict)
    assert parameters <= {name for name, _ in (*explain_model.named_parameters(), *explain_model.named_buffers())}
    assert "conv1.weight_positive" in parameters or "conv1.merged_weight" in parameters
    noted = [node.meta.get("custom", {}).get("lrpfx", "") for node in program.graph.nodes]
    assert any(text.startswith("fc: Epsilon(") for text in noted)
    assert sum(map(bool, noted)) > len(noted) / 2


def test_its_facts_name_the_canonizers_that_changed_something():
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat())
    facts = facts_of(lrpfx.lower(explain_model, images(), target="max"))
    changed = {(stage.stage, stage.name) for stage in explain_model.compiled.history if stage.matches}
    assert facts["canonizers"] == ["merge_batch_norm"] and len({stage for stage, _ in changed}) > 1


@pytest.mark.parametrize("dtype, allowed", [(torch.float64, None), (torch.float32, 10 * 4 * 2**-23 * (2 + 2**-10) * 2**10)])
def test_results_may_differ_by_ten_times_what_rounding_changes(dtype, allowed):
    """A difference of two numbers that are nearly equal, each of which may change by four units in the last place."""
    model = torch.nn.Linear(4, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 0.0, 0.0]]))
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    x = torch.tensor([[1 + 2**-10, 1.0, 2.0, -2.0]], dtype=dtype)
    tolerance = facts_of(lrpfx.lower(explain_model, x, dynamic_batch=False))["tolerance"]
    assert tolerance == pytest.approx(allowed or tolerance_of(dtype), rel=1e-3)


@pytest.mark.parametrize("error, passes", [(1e-3, True), (1e-1, False)])
def test_what_rounding_changes_is_measured_for_each_batch_that_differs(monkeypatch, error, passes):
    """The third sample is a difference of numbers that are nearly equal; the first two, which are measured first, are not."""
    model = torch.nn.Linear(4, 1, bias=False).float()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 0.0, 0.0]]))
    x = torch.tensor([[2**-10, 0.0, 2.0, -2.0], [2**-10, 0.0, 2.0, -2.0], [1 + 2**-10, 1.0, 2.0, -2.0]], dtype=torch.float32)
    expected = Job.expected

    def with_an_error(job, arguments):
        results = expected(job, arguments)
        if len(arguments[0]) == 3:
            results["relevance"] = results["relevance"] * (1 + error)
        return results

    monkeypatch.setattr(Job, "expected", with_an_error)
    with nullcontext() if passes else pytest.raises(LoweringError, match="for a batch of 3 by 9"):
        lrpfx.lower(lrpfx.transform(model, EpsilonPlusFlat()), x)


class NormInSinglePrecision(Layered):
    def forward(self, x):
        y = self.first(x)
        return self.last(nn.functional.rms_norm(y.float(), (8,)).to(y.dtype).relu())


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_models_in_float64_that_compute_in_float32(name, tmp_path):
    """As the norms of Llama do: another runtime rounds differently there."""
    x = torch.rand(2, 6, dtype=torch.float64)
    model = NormInSinglePrecision(first=nn.Linear(6, 8), last=nn.Linear(8, 3)).double().eval()
    program = lrpfx.lower(lrpfx.transform(model, AttnLRP(), example_inputs=x), x)
    assert facts_of(program)["tolerance"] == pytest.approx(1e-5, rel=0.5)
    assert lrpfx.load(lrpfx.save(program, tmp_path / name)).verify() <= 1e-6


def test_results_that_are_zero_have_a_tolerance():
    model = torch.nn.Linear(4, 1, bias=False).float()
    torch.nn.init.zeros_(model.weight)
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlusFlat()), torch.rand(2, 4).float(), dynamic_batch=False)
    assert facts_of(program)["tolerance"] == tolerance_of(torch.float32)


class Frames(nn.Module):
    """Frames in groups, for lengths from 16 to 60: a convolution is the least length, and a table of positions the largest."""

    def __init__(self, groups=4):
        super().__init__()
        self.layer, self.head, self.groups = nn.Conv1d(4, 6, 16), nn.Linear(6, 4), groups
        self.positions = nn.Parameter(torch.randn(1, 6, 45))

    def forward(self, x):
        y = self.layer(x)
        y = torch.relu(y + self.positions[:, :, : y.shape[-1]])
        if y.shape[-1] % self.groups != 0:
            y = nn.functional.pad(y, (0, self.groups - y.shape[-1] % self.groups))
        return self.head(y.mean(2))


class Windows(Layered):
    def forward(self, x):
        y = torch.relu(x)
        return self.head(y.sum(1) if x.shape[1] % 7 == 0 else y.amax(1))


@pytest.mark.parametrize(
    ("model", "shape", "dimension", "others"),
    [(Frames, (2, 4, 41), 2, (43, 47, 59)), (lambda: Windows(head=nn.Linear(4, 3)), (2, 10, 4), 1, (7, 14, 700))],
)
def test_conditions_on_sizes_that_seldom_fail_fix_them(model, shape, dimension, others):
    x = torch.randn(shape)
    program = lrpfx.lower(lrpfx.transform(model().eval(), EpsilonPlusFlat(), example_inputs=x, capture="export"), x)
    run, target = program.module(), torch.tensor([0, 1])
    run(x, target)
    for size in others:
        with pytest.raises(lrpfx.InputError, match="was fixed at"):
            run(torch.randn(*shape[:dimension], size, *shape[dimension + 1 :]), target)


class OddBatches(nn.Module):
    def forward(self, x):
        return torch.relu(x) if x.shape[0] % 6 else x.sigmoid()


class Squeezed(Layered):
    def forward(self, x):
        return self.head(torch.relu(self.layer(x)).mean((2, 3), keepdim=True).squeeze())


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (OddBatches(), torch.randn(2, 3), r"has other operations where x\.shape\[0\] % 6 != 0 does not hold"),
        (
            Squeezed(layer=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3)),
            torch.randn(2, 3, 6, 6),
            "not right for a batch of one, where forward may do something else, such as squeeze",
        ),
    ],
)
def test_batches_for_which_forward_does_something_else(model, x, message):
    explain_model = lrpfx.transform(model.double().eval(), EpsilonPlus(), example_inputs=x.double(), capture="export")
    with pytest.raises(LoweringError, match=message):
        lrpfx.lower(explain_model, x.double())
    lrpfx.lower(explain_model, x.double(), dynamic_batch=False)


class LargerOfTwo(Layered):
    """The derivative of a maximum is written in place, in a tensor that shares its memory."""

    def forward(self, x):
        return torch.maximum(self.first(x), self.second(x))


def test_derivatives_that_are_written_in_place():
    x = torch.randn(3, 4)
    explain_model = lrpfx.transform(LargerOfTwo(first=nn.Linear(4, 3), second=nn.Linear(4, 3)), EpsilonPlus(), example_inputs=x)
    program = lrpfx.lower(explain_model, x)
    assert not [node for node in program.graph.nodes if is_in_place(node)]
    assert_agrees(program.module(), explain_model, x, torch.arange(3))


def test_operations_whose_form_out_of_place_has_another_layout_in_memory():
    """`masked_fill` gives a contiguous tensor for one with other strides, which `masked_fill_` in the backward of max keeps."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.dense(x).transpose(1, 2)
            return torch.max(y, y)

    x = torch.randn(3, 5, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(Network().double(), EpsilonPlus(), example_inputs=x)
    weights = torch.randn(3, 2, 5, dtype=torch.float64)
    program = lrpfx.lower(explain_model, (x,), target="weights").module()
    expected = lrpfx.attribute(explain_model, x, target=weights).relevance
    assert_close(program(x, weights)["relevance"], expected)


def test_operations_in_place_stay_where_others_see_them():
    def seen_by_a_view(x):
        changed = x + 1
        view = changed.view(-1)
        changed.mul_(2)
        return view

    def seen_by_nothing(x):
        return (x + 1).mul_(2) + 3

    x = torch.rand(2, 3)
    for function, in_place in ((seen_by_a_view, True), (seen_by_nothing, False)):
        traced = make_fx(function)(x)
        result = OutOfPlace().run(Program(traced, traced.graph, "function", properties=[]))
        traced.recompile()
        assert torch.equal(traced(x), function(x))
        assert any(map(is_in_place, traced.graph.nodes)) == in_place
        assert (result.matches, len(result.reasons)) == ((0, 1) if in_place else (1, 0))


def test_history_and_dumps_reach_the_program(explain_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LRPFX_DUMP_DIR", str(tmp_path))
    program = lrpfx.lower(explain_model, images())
    stages = lrpfx.history(program)
    compiled = lrpfx.history(explain_model)
    assert stages[: len(compiled)] == compiled
    names = [stage.name for stage in stages[len(compiled) :]]
    assert " ".join(names) == "trace drop_detach out_of_place plain_views plain_sizes name_tensors derive_weights export"
    by_name = {stage.name: stage for stage in stages}
    assert by_name["drop_detach"].matches and "detach" not in by_name["drop_detach"].code
    assert "self.conv1.merged_weight" in by_name["name_tensors"].code
    assert not any(stage.unverified for stage in stages[len(compiled) :])
    dumped = sorted(path.name for path in tmp_path.iterdir())
    assert dumped == [f"{number:03d}_lower_{name}.py" for number, name in enumerate(names, len(compiled) + 1)]
    with pytest.raises(lrpfx.InputTypeError, match=r"not made by lrpfx.lower"):
        lrpfx.history(torch.export.export(torch.nn.Linear(2, 2), (torch.rand(1, 2),)))


TARGETS, REDUCTIONS = ("index", "weights", "max"), (None, "sum", "absolute", "channels", "bytes")
#: What is reduced does not depend on the target: each of both always, all pairs among the slow tests.
ALWAYS = {("index", None), ("weights", "sum"), ("max", "absolute"), ("index", "bytes")}


@pytest.mark.parametrize(
    "target, reduce",
    [
        pytest.param(target, reduce, marks=[] if (target, reduce) in ALWAYS else [pytest.mark.slow])
        for target, reduce in itertools.product(TARGETS, REDUCTIONS)
    ],
)
@pytest.mark.sampled(3)
def test_targets_and_reductions(explain_model, target, reduce):
    program = lrpfx.lower(explain_model, images(), target=target, reduce=reduce)
    x = images(4)
    given = {"index": torch.tensor([0, 1, 2, 1]), "weights": torch.randn(4, 5), "max": None}[target]
    full = lrpfx.attribute(explain_model, x, given).relevance
    result = program.module()(x, *([] if given is None else [given]))["relevance"]
    if reduce == "bytes":
        assert result.dtype == torch.uint8 and result.shape == (4, 8, 8)
        total = full.sum(1)
        expected = 128 + 127 * total / total.abs().flatten(1).amax(1)[:, None, None]
        assert (result.double() - expected).abs().max() <= 0.51
    else:
        expected = {None: full, "sum": full.sum(1), "absolute": full.abs().sum(1), "channels": full.sum((2, 3))}[reduce]
        assert_close(result, expected, 1e-10)


@pytest.mark.parametrize("file", ["model.pt2", "model.onnx", pytest.param("package", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_several_targets_of_each_sample(file, tmp_path):
    explain_model = lrpfx.transform(small_net().float(), EpsilonAlpha2Beta1Flat())
    settings = {"target": "targets", "record": ["relu"], "balance": True, "conditions": "conv1"}
    program = lrpfx.lower(explain_model, images().float(), number_of_targets=3, **settings)
    path = lrpfx.package(program, tmp_path / "model.pt2") if file == "package" else lrpfx.save(program, tmp_path / file)
    runner = lrpfx.load(path)
    assert runner.verify() <= 1e-5 and runner.manifest["arguments"]["target"]["shape"] == [None, 3]
    targets, x = torch.tensor([[0, 1, 4], [2, 2, 3], [4, 0, 1], [3, 3, 3], [1, 2, 0]]), images(5).float()
    mask = torch.rand(5, *runner.manifest["arguments"]["mask_conv1"]["shape"][1:], dtype=torch.float32).round()
    found = runner(x, targets, mask_conv1=mask)
    expected = lrpfx.attribute(explain_model, x, targets=list(targets.T), record=["relu"], conditions=[{"conv1": mask}])
    assert_close(found["relevance"], expected.relevance[0].movedim(0, 1), 1e-5)
    assert_close(found["relu"], expected.layers["relu"][0].movedim(0, 1), 1e-5)
    gained = found["relevance"].flatten(2).sum(2) - expected.output.gather(1, targets)
    assert_close(found["balance"], gained, 1e-4)
    with pytest.raises(lrpfx.InputError, match="target 5 is out of range"):
        runner(x, torch.full((5, 3), 5))


def test_the_forward_runs_once_for_several_targets(explain_model):
    counts = []
    for number in (1, 4):
        program = lrpfx.lower(explain_model, images(), target="targets", number_of_targets=number)
        counts.append(sum(node.target == torch.ops.aten.relu.default for node in program.graph.nodes))
    assert counts[0] == counts[1] > 0


def test_the_number_of_targets(explain_model):
    for settings in ({"target": "targets"}, {"number_of_targets": 2}, {"target": "targets", "number_of_targets": 0}):
        with pytest.raises(lrpfx.InputError, match="number_of_targets is a positive integer"):
            lrpfx.lower(explain_model, images(), **settings)


def test_several_inputs_and_a_fixed_batch():
    class Two(Layered):
        def forward(self, a, b):
            return self.first(a) + self.second(b)

    explain_model = lrpfx.transform(Two(first=torch.nn.Linear(4, 3), second=torch.nn.Linear(5, 3)), EpsilonPlusFlat())
    a, b = torch.rand(2, 4), torch.rand(2, 5)
    for example, dynamic in (((a, b), True), ({"b": b, "a": a}, False)):
        program = lrpfx.lower(explain_model, example, target="weights", dynamic_batch=dynamic)
        seed = torch.randn(2, 3)
        result = program.module()(a, b, seed)
        expected = lrpfx.attribute(explain_model, (a, b), seed).relevance
        assert_close(result["relevance.a"], expected[0], 1e-10)
        assert_close(result["relevance.b"], expected[1], 1e-10)


def test_tokens():
    """Integers have the relevance of the embeddings that they look up."""

    class Tokens(Layered):
        def forward(self, tokens, places):
            return self.head(torch.relu(self.mix(self.token(tokens) + self.place(places))).mean(1))

    layers = {"token": nn.Embedding(9, 6), "place": nn.Embedding(5, 6), "mix": nn.Linear(6, 8), "head": nn.Linear(8, 3)}
    explain_model = lrpfx.transform(Tokens(**layers), EpsilonPlusFlat())
    tokens, places = torch.randint(9, (3, 4)), torch.randint(5, (3, 4))
    program = lrpfx.lower(explain_model, (tokens, places), target="max", balance=True, record=["relu"])
    result = program.module()(tokens, places)
    found = lrpfx.attribute(explain_model, (tokens, places), record=["relu"])
    assert list(result) == ["output", "relevance.tokens", "relevance.places", "relu", "balance"]
    assert_close(result["relevance.tokens"], found.relevance[0], 1e-10)
    assert_close(result["relevance.places"], found.relevance[1], 1e-10)
    assert_close(result["relu"], found.layers["relu"], 1e-10)
    summed = lrpfx.lower(explain_model, (tokens, places), target="max", reduce="sum").module()(tokens, places)
    assert_close(summed["relevance.tokens"], found.relevance[0].sum(-1), 1e-10)


def test_several_outputs():
    class Several(Layered):
        def forward(self, x):
            x = torch.relu(self.body(x))
            return {"classes": self.first(x), "others": (self.second(x), x.argmax(1))}

    model = Several(body=torch.nn.Linear(4, 5), first=torch.nn.Linear(5, 3), second=torch.nn.Linear(5, 2))
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    program = lrpfx.lower(explain_model, torch.rand(2, 4), target="max", output="classes")
    x = torch.rand(3, 4)
    result, outputs = program.module()(x), model(x)
    assert list(result) == ["output", "output.classes", "output.others.0", "output.others.1", "relevance"]
    assert_close(result["output"], outputs["classes"].detach(), 1e-12)
    assert_close(result["output.others.0"], outputs["others"][0].detach(), 1e-12)
    assert torch.equal(result["output.others.1"], outputs["others"][1])
    assert_close(result["relevance"], lrpfx.attribute(explain_model, x, output="classes").relevance, 1e-10)


def test_names_of_results_are_reserved():
    class Named(Layered):
        def forward(self, x):
            return self.output(x)

    explain_model = lrpfx.transform(Named(output=torch.nn.Linear(3, 2)), EpsilonPlusFlat())
    with pytest.raises(lrpfx.InputError, match="'output' cannot be recorded"):
        lrpfx.lower(explain_model, torch.rand(2, 3), record=["output"])


@pytest.mark.parametrize(
    "inputs, settings, message",
    [
        (torch.rand(2, 3, 8, 8), {"target": "best"}, "target must be one of"),
        (torch.rand(2, 3, 8, 8), {"reduce": "mean"}, "reduce must be one of"),
        (torch.rand(2, 3, 8, 8), {"record": ["nowhere"]}, "no node or module named"),
        ((torch.rand(2, 3, 8, 8),) * 2, {}, "takes 1 inputs"),
        ({"y": torch.rand(2, 3, 8, 8)}, {}, "no input 'y'"),
        (torch.ones(2, 3, 8, 8, dtype=torch.long), {}, "floating-point"),
        ((3,), {}, "takes tensors"),
        (torch.tensor(1.0), {}, "no batch dimension"),
    ],
)
def test_bad_arguments(explain_model, inputs, settings, message):
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    with pytest.raises((lrpfx.InputError, lrpfx.LoweringError), match=message):
        lrpfx.lower(explain_model, inputs, **settings)


def test_what_cannot_be_traced():
    class Impatient(Hook):
        def propagate(self, call, relevance):
            return (relevance * float(relevance.sum()),)

    model = Unary(lambda x: torch.relu(x).flatten(1))
    explain_model = lrpfx.transform(model, lrpfx.composites.LayerMapComposite([(torch.nn.ReLU, Impatient())]))
    with pytest.raises(lrpfx.LoweringError, match=r"cannot be traced at relu: Impatient"):
        lrpfx.lower(explain_model, torch.rand(2, 3))


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_functions_that_are_replaced_for_export(dim):
    form = EXPORTABLE[torch.take_along_dim]
    x = torch.rand(3, 4, 5)
    fitting = {0: [(2, 4, 5), (7, 1, 5), (1, 4, 1)], 1: [(3, 2, 5), (1, 6, 1)], -1: [(3, 4, 2), (3, 1, 9)], None: [(2, 3)]}
    for shape in fitting[dim]:
        indices = torch.randint(3, shape)
        assert torch.equal(form(x, indices, dim), torch.take_along_dim(x, indices, dim))


class Transformed(Layered):
    """Images moved by affine maps that a layer computes from them."""

    def forward(self, x):
        maps = self.maps(x.mean((2, 3))).view(-1, 2, 3)
        grid = functional.affine_grid(maps, [x.shape[0], 3, 4, 5], align_corners=False)
        return self.head(functional.grid_sample(x, grid, align_corners=False).flatten(1))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_grids_of_any_batch(capture):
    example = torch.rand(2, 3, 4, 5)
    model = Transformed(maps=nn.Linear(3, 6), head=nn.Linear(60, 5))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=example, capture=capture)
    function = lrpfx.lower(explain_model, example).module()
    for batch in (1, 2, 3):
        assert_agrees(function, explain_model, torch.rand(batch, 3, 4, 5), torch.arange(batch))


@pytest.mark.parametrize("corners", [True, False, None])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 1, 4), (2, 3, 3, 1, 5)])
@pytest.mark.filterwarnings("ignore:Default grid_sample and affine_grid behavior")
def test_grids_are_those_of_torch(size, corners):
    maps = torch.randn(2, len(size) - 2, len(size) - 1)
    expected = functional.affine_grid(maps, list(size), align_corners=corners)
    assert_close(affine_grid(maps, size, corners), expected, 1e-15)


@pytest.mark.parametrize(
    "result, wrong", [("output", float("nan")), ("relevance", float("inf")), ("balance", 1.0), ("conv1", 1.0)]
)
def test_programs_are_held_against_attribute(result, wrong, monkeypatch):
    """Every result of every batch size, and what is not finite differs."""
    layers = collections.OrderedDict(conv1=nn.Conv2d(3, 4, 3), relu=nn.ReLU(), flat=nn.Flatten(), fc=nn.Linear(144, 5))
    explain_model = lrpfx.transform(nn.Sequential(layers).eval(), EpsilonPlus())
    expected = Job.expected
    sizes = []

    def with_a_wrong_entry(self, arguments):
        found = expected(self, arguments)
        sizes.append(len(arguments[0]))
        if len(set(sizes)) == 3 and result in found:
            found[result] = found[result].clone()
            found[result].view(-1)[-1] += wrong
        return found

    monkeypatch.setattr(Job, "expected", with_a_wrong_entry)
    with pytest.raises(lrpfx.LoweringError, match=f"{result} of the program differs from the module's own for a batch of"):
        lrpfx.lower(explain_model, images(), record=["conv1"], balance=True)
    assert len(set(sizes)) == 3


# --- open sizes ---------------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Words and positions, attention with a mask, and a head for the mean of the words or for each of them."""

    def __init__(self, pooled):
        super().__init__()
        self.words, self.positions = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.query, self.head, self.pooled = nn.Linear(8, 8), nn.Linear(8, 3), pooled
        self.eval()

    def forward(self, ids, mask, scale=1.0):
        length = ids.shape[1]
        hidden = self.words(ids) + self.positions(torch.arange(length))
        scores = (self.query(hidden) @ hidden.mT).masked_fill(mask[:, None] == 0, -1e9)
        hidden = hidden + scale * scores.softmax(-1) @ hidden if length < 1000 else hidden  # only torch.export can follow it
        return self.head((hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True) if self.pooled else hidden)


def sentences(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, (length + 1) // 2 :] = 0
    return {"ids": torch.randint(0, 20, (batch, length)), "mask": mask}


@pytest.mark.parametrize(
    ("file", "pooled"),
    [
        pytest.param("reader.pt2", True, marks=pytest.mark.slow),
        pytest.param("reader.pt2", False, marks=pytest.mark.slow),
        ("reader.onnx", True),
        pytest.param("reader.onnx", False, marks=pytest.mark.slow),
        pytest.param("package", True, marks=pytest.mark.slow),
        pytest.param("package", False, marks=pytest.mark.slow),
    ],
)
def test_batch_and_length_of_a_program(tmp_path, file, pooled):
    model = Reader(pooled)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs={**sentences(2, 5), "scale": 2.0})
    example = collections.UserDict({**sentences(2, 5), "scale": 2.0})
    program = lrpfx.lower(explain_model, example, target="index" if pooled else "weights")
    write, path = (lrpfx.package, "reader.pt2") if file == "package" else (lrpfx.save, file)
    runner = lrpfx.load(write(program, tmp_path / path))
    arguments, (shared,) = runner.manifest["arguments"], runner.manifest["sizes"]
    assert arguments["ids"]["shape"] == arguments["mask"]["shape"] == [None, None]
    assert shared["of"] == [["ids", 1], ["mask", 1], *([] if pooled else [["target", 1]])]
    assert (shared["lower"], shared["upper"]) == (1, 16)
    assert runner.manifest["results"]["relevance"]["shape"] == [None, None, 8]
    for batch, length in ((1, 1), (1, 9), (4, 16), (3, 2)):
        inputs = sentences(batch, length)
        target = torch.arange(batch) % 3 if pooled else torch.randn(batch, length, 3)
        expected = lrpfx.attribute(explain_model, {**inputs, "scale": 2.0}, target)
        result = runner(**inputs, target=target)
        assert_close(result["output"], expected.output)
        assert_close(result["relevance"], expected.relevance["ids"])
    target = torch.zeros(2, dtype=torch.long) if pooled else torch.zeros(2, 5, 3)
    for changed, message in (
        ({"mask": torch.ones(1, 5, dtype=torch.long)}, "the batch sizes differ: ids 2, mask 1"),
        ({"mask": torch.ones(2, 4, dtype=torch.long)}, "dimension 1 of the input 'ids' has size 5, but .* 'mask' has size 4"),
        (
            {"ids": torch.zeros(2, 17, dtype=torch.long)},
            "dimension 1 of the input 'ids' has size 17, .* 1 <= size <= 16|size <= 16",
        ),
        ({"ids": torch.zeros(2, dtype=torch.long)}, "ids has shape 2, but the program takes batch×any"),
    ):
        with pytest.raises(lrpfx.InputError, match=message):
            runner(**{**sentences(2, 5), **changed}, target=target)


def test_a_program_for_one_size():
    explain_model = lrpfx.transform(Reader(True), EpsilonPlus(), example_inputs=sentences(2, 5))
    program = lrpfx.lower(explain_model, sentences(3, 6), dynamic_batch=False)
    facts = facts_of(program)
    assert facts["dynamic_batch"] is False and facts["sizes"] == []
    assert not any(open_dimensions(program).values())


def test_a_length_of_one_that_has_a_graph_of_its_own():
    model = Unary(lambda x: x.relu().sum(1) if x.shape[1] == 1 else x.sum(1))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 3, 4))
    length, features = facts_of(lrpfx.lower(explain_model, torch.randn(2, 3, 4), target="weights"))["sizes"]
    assert length == {"of": [["input", 1]], "lower": 2, "upper": None}
    assert features == {"of": [["input", 2], ["target", 1]], "lower": 1, "upper": None}


def test_lengths_with_a_condition_that_a_program_cannot_check():
    """The program takes the example's length only."""
    model = Unary(lambda x: x.sum(1) if x.shape[1] % 2 == 0 else x[:, 0])
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 4, 3))
    explain_model(torch.randn(2, 6, 3))
    program = lrpfx.lower(explain_model, torch.randn(2, 6, 3))
    assert open_dimensions(program)["input"] == [0, 2]


class FramesOfTable(nn.Module):
    """A convolution that needs 16 entries, and a table of 45 positions. `change`: of the frames, by their number."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.head = nn.Conv1d(4, 6, 16), nn.Linear(6, 3)
        self.positions, self.change = nn.Parameter(torch.randn(1, 6, 45)), change
        self.eval()

    def forward(self, x):
        frames = self.layer(x)
        return self.head(self.change(frames + self.positions[:, :, : frames.shape[-1]]).mean(2))


def opened_at(model, example):
    """The open dimensions of the program of a model with one input, and their limits."""
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus(), example_inputs=example, capture="export"), example)
    limits = [(one["lower"], one["upper"]) for one in facts_of(program)["sizes"]]
    return next(iter(open_dimensions(program).values())), limits


def test_lengths_at_the_limits_that_conditions_exclude():
    opened, ((lower, upper),) = opened_at(FramesOfTable(lambda y: y.relu()), torch.randn(2, 4, 41))
    assert opened == [0, 2] and lower in (16, 17) and upper in (59, 60)  # torch.export excludes the ends


def test_conditions_that_divide_by_zero_do_not_hold():
    model = Unary(lambda x: x[:, 0] if 8 % (x.shape[1] - 7) == 1 else x.sum(1))
    assert 1 not in opened_at(nn.Sequential(model, nn.Linear(3, 4)).eval(), torch.randn(2, 10, 3))[0]


def test_conditions_on_several_sizes_are_tested_within_narrow_limits():
    first, second = (OpenSize((("x", number),), (), lower=421, upper=465) for number in (1, 2))
    assert len(list(samples("s0 != s1", [first, second]))) > 100


@pytest.mark.parametrize("target", [{"target": "index"}, {"target": "targets", "number_of_targets": 2}])
def test_a_number_of_classes_that_a_program_leaves_open(tmp_path, target):
    """Each position is a class."""
    model, x = nn.Sequential(nn.Linear(4, 1), nn.Flatten(1)).eval(), torch.rand(2, 5, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x, **target), tmp_path / "model.pt2"))
    assert runner.manifest["results"]["output"]["shape"] == [None, None] and runner.verify() <= 1e-9
    index = torch.tensor([0, 6]) if target["target"] == "index" else torch.tensor([[0, 6], [1, 2]])
    assert runner(torch.rand(2, 7, 4), index)["output"].shape == (2, 7)
    with pytest.raises(lrpfx.InputError, match="target 6 is out of range: the output has 5 classes"):
        runner(x, index)
    with pytest.raises(lrpfx.InputError, match="target -1 is out of range"):
        runner(x, -torch.ones_like(index))


class OtherWhere(nn.Module):
    """Other operations for images of other sizes."""

    def __init__(self, condition):
        super().__init__()
        self.layer, self.head, self.condition = nn.Conv2d(3, 4, 1), nn.Linear(4, 3), condition

    def forward(self, x):
        y = self.layer(x)
        return self.head((y.relu() if self.condition(*y.shape) else y.sigmoid()).mean((2, 3)))


class Pooled(Layered):
    def forward(self, x):
        return self.pool(self.layer(x).relu()).mean((2, 3))


OPEN_IMAGES = {"x": {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}}


def program_of_images(model, x):
    settings = {"example_inputs": x, "capture": "export", "dynamic_shapes": OPEN_IMAGES}
    return lrpfx.lower(lrpfx.transform(model.eval(), EpsilonPlus(), **settings), x)


@pytest.mark.parametrize(
    "condition",
    [
        lambda batch, channels, height, width: height > width,
        lambda batch, channels, height, width: height * width < 10_000,
        lambda batch, channels, height, width: (height - width) ** 2 != 301**2,
    ],
)
def test_conditions_on_several_sizes_fix_them_unless_they_are_proved(condition):
    x = torch.rand(2, 3, 24, 20)
    assert open_dimensions(program_of_images(OtherWhere(condition), x))["input"] == [0]


def test_a_batch_in_a_condition_on_several_sizes():
    x = torch.rand(9, 3, 6, 7)
    with pytest.raises(LoweringError, match=r"other operations where x.shape\[0\] > x.shape\[2\] does not hold"):
        program_of_images(OtherWhere(lambda batch, channels, height, width: batch > height), x)


def test_images_of_any_size_are_pooled():
    """The graph is for images from 4×4: smaller ones are pooled to a single value."""
    model = Pooled(layer=nn.Conv2d(3, 4, 3, padding=1), pool=nn.MaxPool2d(2))
    program = program_of_images(model, torch.rand(2, 3, 10, 12))
    assert [(one["lower"], one["upper"]) for one in facts_of(program)["sizes"]] == [(4, None), (4, None)]
    for shape in ((1, 3, 4, 4), (3, 3, 31, 7)):
        x = torch.rand(shape)
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
        assert_agrees(program.module(), explain_model, x, torch.arange(shape[0]), tolerance=1e-10)
    with pytest.raises(lrpfx.InputError, match="valid only for size >= 4"):
        program.module()(torch.rand(2, 3, 3, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("file", ["reader.pt2", pytest.param("reader.onnx", marks=pytest.mark.slow)])
def test_a_token_at_a_position(tmp_path, file):
    torch.manual_seed(0)
    explain_model = lrpfx.transform(Reader(False), EpsilonPlus(), example_inputs=sentences(2, 5))
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, sentences(2, 5), target="token"), tmp_path / file))
    inputs = sentences(3, 7)
    target = torch.tensor([[-1, 2], [0, 1], [6, 0]])
    found = runner(**inputs, target=target)["relevance"]
    expected = lrpfx.attribute(explain_model, inputs, (target[:, 0], target[:, 1])).relevance["ids"]
    assert_close(found, expected, 1e-9)
    for wrong, message in (
        ([-8, 0], "position -8 is out of range"),
        ([7, 0], "position 7"),
        ([0, 3], "target 3 is out of range"),
    ):
        with pytest.raises(lrpfx.InputError, match=message):
            runner(**inputs, target=torch.tensor([wrong] * 3))


def test_tokens_need_positions(explain_model):
    with pytest.raises(lrpfx.InputError, match='"token" is for outputs of shape'):
        lrpfx.lower(explain_model, images(), target="token")
    sequences = lrpfx.transform(Reader(False), EpsilonPlus(), example_inputs=sentences(2, 5))
    for target, message in (("max", '"max" is for outputs of shape'), ("index", 'use "token" or "weights"')):
        with pytest.raises(lrpfx.InputError, match=message):
            lrpfx.lower(sequences, sentences(2, 5), target=target)


def test_sizes_that_a_program_was_not_lowered_for():
    class Last(Layered):
        def forward(self, x):
            return self.out(self.layer(x)[0][:, -1])

    index = torch.tensor([0, 1])
    explain_model = lrpfx.transform(
        Last(layer=nn.GRU(4, 5, batch_first=True), out=nn.Linear(5, 3)), EpsilonPlus(), example_inputs=torch.rand(2, 3, 4)
    )
    program = lrpfx.lower(explain_model, torch.rand(2, 3, 4))
    one_batch = lrpfx.lower(explain_model, torch.rand(2, 3, 4), dynamic_batch=False)
    cases = [
        ((torch.rand(2, 7, 4), index), r"input has shape 2×7×4, .* takes batch×3×4: dimension 1 was fixed at 3 when"),
        ((torch.rand(2, 3, 6), index), r"dimension 2 was fixed at 4 when it was lowered"),
        ((torch.rand(2, 2, 2), index), r"dimension 1 was fixed at 3 .*; dimension 2 was fixed at 4"),
        ((torch.rand(2, 3), index), r"input has shape 2×3, but the program takes batch×3×4"),
        ((torch.rand(()), index), r"input has shape \(\), but the program takes batch×3×4"),
        ((torch.rand(2, 3, 4), torch.tensor([0, 1, 2])), r"the batch sizes differ: input 2, target 3"),
        ((torch.rand(0, 3, 4), index[:0]), r"input is an empty batch"),
    ]
    for module in (program.module(), copy.deepcopy(program).module(), program.module(check_guards=False)):
        for arguments, message in cases:
            with pytest.raises(lrpfx.InputError, match=message):
                module(*arguments)
            with pytest.raises(lrpfx.InputError, match=message):
                module(**dict(zip(("input", "target"), arguments, strict=True)))
        assert module(torch.rand(5, 3, 4), torch.zeros(5, dtype=torch.int64))["relevance"].shape == (5, 3, 4)
    with pytest.raises(lrpfx.InputError, match="dimension 0 was fixed at 2"):
        one_batch.module()(torch.rand(3, 3, 4), torch.tensor([0, 1, 2]))


def test_a_softmax_at_the_end_is_said():
    example = torch.randn(2, 4)
    for end, warns in ((nn.Softmax(1), True), (nn.Sigmoid(), False), (nn.Identity(), False)):
        explain_model = lrpfx.transform(nn.Sequential(nn.Linear(4, 3), end).eval(), EpsilonPlus())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LrpfxWarning)
            lrpfx.lower(explain_model, example)
        said = [str(one.message) for one in caught if issubclass(one.category, LrpfxWarning)]
        assert bool(said) == warns and all("explain the logits" in text for text in said)


@pytest.mark.parametrize("size", [1e-16, 1e-25])
def test_small_outputs_are_compared_by_their_own_size(size):
    """The squares of such numbers are zero in float32."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).float().eval(), torch.randn(2, 4).float()
    with torch.no_grad():
        model[2].weight.mul_(size)
        model[2].bias.mul_(size)
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus(), example_inputs=x), x)
    assert torch.allclose(program.module()(x, torch.tensor([0, 1]))["output"] / size, model(x) / size)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "cast", [lambda x: x.float(), lambda x: x.softmax(-1, dtype=torch.float32), lambda x: x.to(torch.float32) / 255 - 0.5]
)
@pytest.mark.sampled(3)
def test_a_dtype_may_be_written_in_forward(cast, capture):
    """Rounding is measured in float64, where such a model may not run."""

    class Casting(Layered):
        def forward(self, x):
            return self.layer(cast(x))

    x = torch.randn(2, 4, dtype=torch.float32)
    model = Casting(layer=nn.Linear(4, 3)).float().eval()
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture), x)
    assert program.module()(x, torch.tensor([0, 1]))["relevance"].shape == x.shape


@pytest.mark.parametrize("dynamic_batch", [True, False])
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_one_tensor_as_the_example_of_two_inputs(capture, dynamic_batch):
    x, first, second = torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4)
    model = Binary(lambda a, b: a * 2 - b.cumsum(1))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=(x, x), capture=capture)
    assert_close(explain_model(first, second), model(first, second), 1e-12)
    result = lrpfx.lower(explain_model, (x, x), dynamic_batch=dynamic_batch).module()(first, second, torch.tensor([0, 1, 2]))
    expected = lrpfx.attribute(explain_model, (first, second), torch.tensor([0, 1, 2]))
    assert_close(result["output"], expected.output, 1e-12)
    for name, relevance in zip("ab", expected.relevance, strict=True):
        assert_close(result[f"relevance.{name}"], relevance, 1e-12)


def test_a_condition_on_an_open_size_that_torch_cannot_prove():
    """The entry in the middle: n // 2 < n holds for all lengths."""
    model = Binary(lambda a, b: a[:, a.shape[1] // 2] + (a + b).mean(1))
    examples = torch.rand(3, 4, 5), torch.rand(3, 4, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=examples, capture="export")
    program = lrpfx.lower(explain_model, examples)
    for length in (1, 2, 7):
        a, b = torch.rand(2, length, 5), torch.rand(2, length, 5)
        assert_close(program.module()(a, b, torch.tensor([0, 4]))["output"], model(a, b), 1e-12)


def halved_where(condition):
    class HalvedWhere(Hook):
        def propagate(self, call, relevance):
            return (relevance / 2 if condition(*relevance.shape[:2]) else relevance,)

    return HalvedWhere()


@pytest.mark.parametrize(
    ("condition", "opened"),
    [
        (lambda batch, length: batch * length == 1, [0, 1]),  # it begins at 2
        (lambda batch, length: batch * length == 2, [0]),
        (lambda batch, length: batch + length == 3, [0]),
        (lambda batch, length: length in (9, 31), [0]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has other operations for other sizes")
def test_rules_that_do_something_else_for_small_sizes(condition, opened):
    torch.manual_seed(0)
    x = torch.rand(2, 7, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Unary(lambda x: x.sum(1)), nn.Linear(6, 3)).eval()
    composite = EpsilonPlus(layer_map=[(nn.ReLU, halved_where(condition))])
    explain_model = lrpfx.transform(model, composite, example_inputs=x, capture="export")
    program = lrpfx.lower(explain_model, x)
    assert open_dimensions(program)["input"] == opened
    for batch, length in ((1, 1), (1, 2), (2, 1), (3, 7), (4, 9)):
        x, target = torch.rand(batch, length, 4), torch.arange(batch) % 3
        try:
            program.module()(x, target)
        except lrpfx.InputError:
            continue
        assert_agrees(program.module(), explain_model, x, target, tolerance=1e-10)


class OtherForLargeBatches(Hook):
    """Halves relevance in batches of more than four samples."""

    def propagate(self, call, relevance):
        return (relevance / 2 if len(relevance) > 4 else relevance,)


def test_a_rule_that_does_something_else_for_other_sizes():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus(layer_map=[(nn.ReLU, OtherForLargeBatches())]))
    with pytest.raises(LoweringError, match=r"other operations where .* does not hold"):
        lrpfx.lower(explain_model, images())
    lrpfx.lower(explain_model, images(), dynamic_batch=False)


def test_numbers_of_entries_and_strides_become_products_of_sizes():
    traced = make_fx(lambda x: x.new_ones(x.numel(), x.stride(0)), tracing_mode="symbolic")(torch.rand(3, 4, 6))
    names = [str(node.target) for node in traced.graph.nodes]
    assert "aten.sym_numel.default" in names and "aten.sym_stride.int" in names
    program = Program(traced, traced.graph, "model")
    assert PlainSizes().run(program).matches == 2
    assert not [node for node in program.graph.nodes if node.target in (aten.sym_numel.default, aten.sym_stride.int)]
    assert fx.GraphModule(program.root, program.graph)(torch.rand(2, 5, 7)).shape == (70, 35)


def test_names_that_python_does_not_take():
    model = nn.Sequential(collections.OrderedDict({"layer-0": nn.Linear(6, 5), "layer_0": nn.Linear(5, 5)})).eval()
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus()), torch.rand(2, 6))
    assert {"layer-0.weight", "layer_0.weight"} <= set(program.state_dict)
    x = torch.rand(3, 6)
    assert_close(program.module()(x, torch.tensor([0, 1, 2]))["output"], model(x), 1e-12)


class _Recurrent(nn.Module):
    """Reads four places of a series of any length, and normalizes its states."""

    def __init__(self):
        super().__init__()
        self.input = nn.Linear(4, 4)
        self.state = nn.Linear(4, 4, bias=False)

    def forward(self, y):
        series, state, states = torch.cat([y, y], 1)[:, :4], torch.zeros(len(y), 4, dtype=y.dtype), []
        for place in range(4):
            state = torch.tanh(self.input(series[:, place]) + self.state(state))
            states.append(state)
        values = torch.stack(states, dim=1)
        return (values - values.mean(-1, keepdim=True)) / (values.std(-1, keepdim=True) + 0.1)


def test_a_condition_met_when_operations_in_place_are_replaced_is_not_checked_by_the_program():
    model, y = _Recurrent().double().eval(), torch.randn(3, 4, 4, dtype=torch.float64)
    box = EpsilonPlusFlat(layer_map=[(Linear, ZBox(-3.0, 3.0))])
    explain_model = lrpfx.transform(model, box, y)
    program = lrpfx.lower(explain_model, y, target="weights").module()
    for length in (4, 7):
        y = torch.randn(3, length, 4, dtype=torch.float64)
        weights = torch.randn(3, 4, 4, dtype=torch.float64)
        expected = lrpfx.attribute(explain_model, y, target=weights).relevance
        assert_close(program(y, weights)["relevance"], expected, 1e-9)
