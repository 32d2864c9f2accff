"""Lowered programs in the operators of ONNX."""

import ast
import collections
import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers import Unary, assert_close
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat, LayerMapComposite
from lrpfx.core import Hook
from lrpfx.deploy import artefact
from lrpfx.deploy.artefact import legalized
from lrpfx.deploy.backends import BACKENDS
from lrpfx.deploy.backends.onnx import onnx_model, origin_of
from lrpfx.deploy.onnx_operators import check_sizes
from lrpfx.deploy.runner import Runner
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS
from lrpfx.passes.lower.legalize_for_onnx import expanded
from lrpfx.support.stored_arrays import RefusedError
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
    """torch gives the pooled value the strides of its input: no program has views by strides, since ONNX has none."""
    explain_model = lrpfx.transform(ChannelsLast().float(), EpsilonPlus())
    x, target = torch.rand(3, 3, 5, 5).float(), torch.arange(3)
    program = lrpfx.lower(explain_model, x)
    assert not [node for node in program.graph.nodes if "as_strided" in str(node.target) or "copy_" in str(node.target)]
    for suffix in ("pt2", "onnx"):
        runner = lrpfx.load(lrpfx.save(program, tmp_path / f"model.{suffix}"))
        assert_close(runner(x, target)["relevance"], lrpfx.attribute(explain_model, x, target).relevance, 1e-5)


class Quotients(torch.nn.Module):
    """Divides whole numbers: sizes by sizes, and entries by entries, some of which are -1."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        length = x.shape[1]
        numbers = torch.arange(length)
        places = ((7 * numbers) // (2 * (numbers % 2) - 1)).clamp(-length, length - 1)
        return self.head(torch.relu(self.layer(x))[:, places].sum(1) / (length // x.shape[0] + 1))


def test_whole_numbers_are_divided_by_what_is_computed(tmp_path):
    model = Quotients().float().eval()
    x = torch.rand(2, 10, 8).float()
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export"), x)
    runner = lrpfx.load(lrpfx.save(program, tmp_path / "model.onnx"))
    for shape in ((2, 10, 8), (3, 13, 8)):
        other = torch.rand(shape).float()
        assert_close(runner(other, torch.arange(shape[0]))["output"], model(other), 1e-5)
    operators = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert operators.count("Max") >= 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.diagonal(0, 2, 3),
        lambda x: x.diagonal(-2, 1, 3),
        lambda x: x.unfold(2, 3, 2),
        lambda x: x.unfold(-1, 2, 1).sum(1),
        lambda x: functional.pad(x, (1, 2, 0, 1), mode="reflect"),
        lambda x: functional.pad(x.flatten(2), (4, 3), mode="reflect"),
    ],
)
@pytest.mark.thorough
def test_operators_that_torch_expands_for_onnx_in_others_that_it_lacks(tmp_path, function):
    """Alone in a program: nothing else makes it be expanded."""
    explain_model = lrpfx.transform(Unary(function).float(), EpsilonPlus(), example_inputs=torch.rand(2, 3, 5, 6).float())
    runner = lrpfx.load(
        lrpfx.save(lrpfx.lower(explain_model, torch.rand(2, 3, 5, 6).float(), target="weights"), tmp_path / "x.onnx")
    )
    x = torch.rand(4, 3, 5, 6).float()
    seed = torch.rand_like(function(x))
    assert_close(runner(x, seed)["relevance"], lrpfx.attribute(explain_model, x, seed).relevance, 1e-5)


def pooled_net(dtype):
    layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(36, 5))
    return torch.nn.Sequential(*layers).to(dtype).eval()


def test_layer_norm_in_float16(tmp_path):
    """ONNX's layer norm gives statistics in float32, whatever its input is."""
    torch.manual_seed(0)
    model = (
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval().half()
    )
    explain_model = lrpfx.transform(model, AttnLRP())
    x, target = torch.randn(3, 6).half(), torch.arange(3)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    assert_close(runner(x, target)["relevance"].float(), lrpfx.attribute(explain_model, x, target).relevance.float(), 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_that_onnx_runtime_does_not_compute_are_refused_first(tmp_path, dtype, monkeypatch):
    program = lrpfx.lower(lrpfx.transform(pooled_net(dtype), EpsilonPlus()), torch.rand(2, 3, 8, 8).to(dtype))
    monkeypatch.setattr("lrpfx.deploy.backends.onnx.translated_for_onnx", None)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(lrpfx.LoweringError, match=rf"does not compute aten.convolution.default in {name}, from 0.*\.float\(\)"):
        lrpfx.save(program, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_float16(tmp_path):
    """ONNX Runtime adds up no scattered float16: that is max pooling's backward."""
    explain_model = lrpfx.transform(pooled_net(torch.float16), EpsilonPlus())
    x, target = torch.rand(3, 3, 8, 8).half(), torch.arange(3)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    assert_close(runner(x, target)["relevance"].float(), lrpfx.attribute(explain_model, x, target).relevance.float(), 1e-2)


def test_layer_norm_in_float64(tmp_path):
    """ONNX has the mean and the deviation of a layer norm in float32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4)).double().eval()
    x, target = torch.rand(3, 6, dtype=torch.float64), torch.arange(3)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    assert_close(runner(x, target)["relevance"], lrpfx.attribute(explain_model, x, target).relevance, 1e-9)


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


def strided_file(folder):
    """Convolutions with a stride, whose backward is a transposed convolution with the same weight."""
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, stride=2, padding=1))
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(128, 10)).float()
    explain_model = lrpfx.transform(model, EpsilonGammaBox(0.0, 1.0))
    program = lrpfx.lower(explain_model, torch.rand(2, 3, 16, 16).float(), balance=True)
    return lrpfx.save(program, folder / "model.onnx")


def test_transposed_convolutions_share_no_weight(tmp_path):
    """OpenVINO computes wrong values where a convolution reads it, too: off by the largest entry."""
    model = onnx.load(strided_file(tmp_path))
    weights = {one.name for one in model.graph.initializer}
    readers = collections.Counter(name for node in model.graph.node for name in node.input)
    transposed = [node.input[1] for node in model.graph.node if node.op_type == "ConvTranspose"]
    assert transposed and all(name in weights and readers[name] == 1 for name in transposed)
    assert weights <= set(readers)  # nothing is stored that nobody reads


CHECK = Path(__file__).parent.parent.parent / "examples" / "check.py"


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.thorough
def test_other_runtimes_check_a_file_without_lrpfx(tmp_path, runtime, capsys):
    check = runpy.run_path(str(CHECK))
    path = strided_file(tmp_path)
    assert check["main"](path, runtime) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["output", "relevance", "balance"]
    assert all(float(line.partition(":")[2]) <= 1e-5 for line in lines)
    model = onnx.load(path)
    weight = next(one for one in model.graph.initializer if list(one.dims) == [10, 128])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 1.01, weight.name))
    onnx.save(model, path)
    assert check["main"](path, runtime) == 1


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_check_finds_results_that_have_further_names(tmp_path, runtime):
    """OpenVINO gives a result the names of all values that are the same, such as one that is expanded to its own shape."""
    check = runpy.run_path(str(CHECK))
    layers = [
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ]
    explain_model = lrpfx.transform(torch.nn.Sequential(*layers).float(), EpsilonPlusFlat())
    program = lrpfx.lower(explain_model, torch.rand(2, 3, 8, 8).float(), target="targets", number_of_targets=1)
    assert check["main"](lrpfx.save(program, tmp_path / "model.onnx"), runtime) == 0


def test_the_check_imports_neither_lrpfx_nor_torch():
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(CHECK.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([one.name for one in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert imported == {"base64", "io", "json", "sys", "pathlib", "numpy", "onnxruntime", "openvino"}


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x).relu().mean((2, 3)))


def test_strided_convolutions_of_images_of_any_size(tmp_path):
    """The size that the derivative must have depends on the remainder of the image's."""
    torch.manual_seed(0)
    x, size = torch.rand(2, 3, 21, 26, dtype=torch.float32), torch.export.Dim.AUTO
    settings = {"capture": "export", "dynamic_shapes": {"x": {0: size, 2: size, 3: size}}}
    explain_model = lrpfx.transform(Strided().to(x.dtype).eval(), EpsilonPlus(), example_inputs=x, **settings)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    assert runner.manifest["arguments"]["input"]["shape"] == [None, 3, None, None]
    for shape in ((1, 3, 20, 27), (3, 3, 6, 5)):
        x, target = torch.rand(shape, dtype=torch.float32), torch.arange(shape[0])
        assert_close(runner(x, target)["relevance"], lrpfx.attribute(explain_model, x, target).relevance, 1e-5)


class Largest(nn.Module):
    """A network for sequences of any length, which pools them to some places."""

    def __init__(self, places):
        super().__init__()
        self.first, self.pool, self.last = nn.Conv1d(4, 8, 3, padding=1), nn.AdaptiveMaxPool1d(places), nn.Linear(8 * places, 5)

    def forward(self, x):
        return self.last(self.pool(self.first(x).relu()).flatten(1))


@pytest.mark.parametrize("places", [1, 2, 3])
def test_adaptive_max_pooling_of_any_length(places, tmp_path):
    torch.manual_seed(0)
    model, x = Largest(places).eval().float(), torch.randn(2, 4, 12).float()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    classes = torch.tensor([0, 4, 2])
    for length in (3, 12, 13, 17, 31):
        longer = torch.randn(3, 4, length).float()
        expected = lrpfx.attribute(explain_model, longer, classes).relevance
        torch.testing.assert_close(runner(longer, classes)["relevance"], expected, rtol=1e-4, atol=1e-6)


def test_a_file_that_holds_one_size_fast_does_not_appear(tmp_path, monkeypatch):
    """As a translation would that counts windows for the example's size alone."""
    model, x = Largest(1).eval().float(), torch.randn(2, 4, 12).float()
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export"), x)

    class Fixed(Runner):
        def _run(self, tensors):
            results = super()._run(tensors)
            return results if tensors["input"].shape[2] == 12 else {name: value * 0.9 for name, value in results.items()}

    monkeypatch.setattr(artefact, "Runner", Fixed)
    with pytest.raises(lrpfx.ArtefactError, match=r"computes another output for input \(.*dynamic_batch=False"):
        lrpfx.save(program, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_tokens_out_of_range_are_refused(tmp_path):
    """ONNX takes negative ones for places from the end."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 6), torch.nn.Linear(6, 4), torch.nn.Flatten(), torch.nn.Linear(28, 3)
    ).float()
    x = torch.randint(9, (2, 7))
    explain_model = lrpfx.transform(model.eval(), EpsilonPlus(), example_inputs=x)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.onnx"))
    target = torch.tensor([0, 2])
    assert_close(runner(x, target)["relevance"], lrpfx.attribute(explain_model, x, target).relevance, 1e-5)
    for token in (-1, -9, 9):
        wrong = x.clone()
        wrong[1, 3] = token
        with pytest.raises(lrpfx.InputError, match="index is out of range"):
            runner(wrong, target)


class Chaotic(torch.nn.Module):
    """The last bits of the input decide about the result."""

    def forward(self, x):
        return (x * (1e5 * x).sin()).flatten(1).sum(1, keepdim=True)


def test_other_results_that_rounding_explains_are_a_warning(tmp_path, monkeypatch):
    x = torch.randn(2, 4, 12).float()

    explain_model = lrpfx.transform(Chaotic().eval(), EpsilonPlus(), example_inputs=x, unassigned="gradient")
    program = lrpfx.lower(explain_model, x)

    class Rounded(Runner):
        def _run(self, tensors):
            results = super()._run(tensors)
            return results if len(tensors["input"]) == 1 else {name: value * 1.05 for name, value in results.items()}

    monkeypatch.setattr(artefact, "Runner", Rounded)
    with pytest.warns(lrpfx.LrpfxWarning, match="numerically undetermined"):
        lrpfx.save(program, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").exists()


def _constants(entries, *nodes):
    """A model whose result is the sum of its input and of what nodes compute of constants of ones."""
    fill = helper.make_tensor("value", TensorProto.FLOAT, [1], [1.0])
    made = [helper.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=fill) for name in entries]
    shapes = [numpy_helper.from_array(np.array(shape, np.int64), f"{name}_shape") for name, shape in entries.items()]
    last = [helper.make_node("ReduceSum", ["found"], ["total"], keepdims=0), helper.make_node("Add", ["x", "total"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([*made, *nodes, *last], "constants", [x], [y], shapes)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_files_with_many_weights_may_compute_more_of_them():
    """As networks do that standardize their weights."""
    model = _constants({"a": [1, 1, 10**6], "w": [1, 1, 500]}, helper.make_node("Conv", list("aw"), ["found"]))
    check_sizes(model, {"x": [2]}, 10**7)
    with pytest.raises(RefusedError, match="products to load it"):
        check_sizes(model, {"x": [2]}, 10**5)


@pytest.mark.parametrize(
    ("entries", "node"),
    [
        ({"a": [30000], "c": [30000, 1]}, helper.make_node("Einsum", list("aacc"), ["found"], equation="a,b,ac,bc->")),
        (
            {"a": [1, 1, 180, 180], "w": [1, 1, 180, 180]},
            helper.make_node("ConvTranspose", list("aw"), ["found"], pads=[170] * 4),
        ),
        ({"a": [1, 1, 10**7], "w": [1, 1, 10**6]}, helper.make_node("Conv", list("aw"), ["found"])),
        ({"a": [1, 1, 10**7]}, helper.make_node("AveragePool", ["a"], ["found"], kernel_shape=[10**6])),
        ({"a": [1, 9_999_991, 1]}, helper.make_node("DFT", ["a"], ["found"])),
    ],
    ids=["einsum", "transposed", "conv", "pool", "dft"],
)
def test_constants_that_take_long_are_refused(entries, node):
    with pytest.raises(RefusedError, match="products to load it"):
        check_sizes(_constants(entries, node), {"x": [2]}, 6000)
    small = {name: [max(1, size // 10**4) for size in shape] for name, shape in entries.items()}
    attributes = {"kernel_shape": [10]} if node.op_type == "AveragePool" else {}
    if node.op_type in ("Einsum", "Conv", "AveragePool"):
        again = onnx.NodeProto()
        again.CopyFrom(node)
        if attributes:
            again.attribute[0].ints[:] = attributes["kernel_shape"]
        check_sizes(_constants(small, again), {"x": [2]}, 6000)
