"""The reader of .pt2 files: the same programs as torch's own reader, and calls that it refuses."""

import json
import math

import pytest
import torch
from helpers import Unary, assert_close
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.deploy import archive
from lrpfx.deploy.backends.exported import _is_expression
from lrpfx.deploy.program_reader import CONFIGS, MODEL, read_program
from lrpfx.errors import LoweringError
from lrpfx.support.stored_arrays import RefusedError


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 5, batch_first=True)
        self.eval()

    def forward(self, x):
        return self.layer(x[:, None].expand(-1, 3, -1))[0][:, -1]


MODELS = {
    "several results": lambda: Unary(lambda x: torch.cat(x.split([2, 4], 1)[::-1], 1).sort(1).values),
    "list of results": lambda: Unary(lambda x: torch.stack(x.unbind(1)[::2], 1)),
    "arithmetic of sizes": lambda: Unary(lambda x: x.reshape(x.shape[0] // 1, -1) / (2 * x.shape[0] + 1)),
    "infinite number": lambda: Unary(lambda x: nn.functional.pad(x, (1, 1), value=-torch.inf).clamp(min=-3.0)),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_torch_reads_the_same_program(name, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[name](), nn.LazyLinear(4)).eval()
    model(torch.rand(2, 6))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.rand(2, 6))
    path = lrpfx.save(lrpfx.lower(explain_model, torch.rand(2, 6)), tmp_path / "model.pt2")
    x, target = torch.randn(5, 6), torch.arange(5) % 4
    found, expected = lrpfx.load(path)(x, target), torch.export.load(path).module()(x, target)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(found[key], value, 1e-12)


@pytest.mark.parametrize("power", [0.5, -0.5, 1.37])
def test_powers_of_a_length(power, tmp_path):
    model = nn.Sequential(Unary(lambda x: x.sum(1) * (0.3 * x.shape[1]) ** power), nn.Linear(4, 3)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.rand(2, 5, 4), capture="export")
    path = lrpfx.save(lrpfx.lower(explain_model, torch.rand(2, 5, 4)), tmp_path / "model.pt2")
    runner, x = lrpfx.load(path), torch.randn(3, 7, 4)
    assert_close(runner(x, torch.tensor([0, 1, 2]))["output"], model(x), 1e-12)


@pytest.mark.parametrize("rounded", [lambda n: math.ceil(n / 4), lambda n: math.floor(n / 4), lambda n: round(n * 0.3)])
def test_rounded_lengths(rounded, tmp_path):
    model = nn.Sequential(Unary(lambda x: x.sum(1) * rounded(x.shape[1]) / x.shape[1]), nn.Linear(4, 3)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.rand(2, 5, 4), capture="export")
    with pytest.raises(LoweringError, match="dynamic_batch=False"):
        lrpfx.save(lrpfx.lower(explain_model, torch.rand(2, 5, 4)), tmp_path / "model.pt2")
    lrpfx.save(lrpfx.lower(explain_model, torch.rand(2, 5, 4), dynamic_batch=False), tmp_path / "model.pt2")


@pytest.mark.parametrize("exponent", ["Float('9e99', precision=53)", "Symbol('s1')", "Integer(99)"])
def test_powers_that_grow_without_bound_are_refused(exponent):
    assert _is_expression("FloatPow(ToFloat(Symbol('s1')), Float('0.5', precision=53))")
    assert not _is_expression(f"FloatPow(ToFloat(Symbol('s1')), {exponent})")
    assert not _is_expression("FloatPow(FloatPow(Symbol('s1'), Integer(9)), Integer(9))")


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    torch.manual_seed(0)
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval(), EpsilonPlus())
    path = lrpfx.save(lrpfx.lower(explain_model, torch.rand(2, 6)), tmp_path_factory.mktemp("files") / "model.pt2")
    return archive.read_signed_archive(path.read_bytes())[2]


def changed(entries, entry, change):
    content = json.loads(entries[entry])
    change(content)
    return {**entries, entry: json.dumps(content).encode()}


def _call(content, name):
    return next(node for node in content["graph_module"]["graph"]["nodes"] if name in node["target"])


def _swap(content):
    inputs = _call(content, "aten.addmm")["inputs"]
    inputs[0], inputs[1] = inputs[1], inputs[0]


def _of_no_kind(content):
    _call(content, "aten.addmm")["inputs"][0]["kind"] = 3


def _other_argument(content):
    _call(content, "aten.addmm")["inputs"][0]["arg"] = {"as_graph": {"name": "x"}}


def _no_integer(content):
    _call(content, "aten.unsqueeze")["inputs"][1]["arg"] = {"as_int": "1"}


def _too_few_names(content):
    signature = content["graph_module"]["module_call_graph"][0]["signature"]
    version, structure = json.loads(signature["out_spec"])
    signature["out_spec"] = json.dumps([version, {**structure, "context": '["output"]'}])


@pytest.mark.parametrize("change", [_swap, _of_no_kind, _other_argument, _no_integer, _too_few_names])
def test_calls_that_are_refused(change, entries):
    read_program(entries)
    with pytest.raises(RefusedError):
        read_program(changed(entries, MODEL, change))


def test_tensors_lie_in_their_data(entries):
    def larger(content):
        meta = next(iter(content["config"].values()))["tensor_meta"]
        meta["sizes"], meta["strides"] = [{"as_int": 1000}, {"as_int": 1000}], [{"as_int": 0}, {"as_int": 0}]

    def outside(content):
        next(iter(content["config"].values()))["tensor_meta"]["storage_offset"] = {"as_int": 10**6}

    with pytest.raises(RefusedError, match="larger than its data"):
        read_program(changed(entries, CONFIGS[0], larger))
    with pytest.raises(RuntimeError, match="out of bounds"):
        read_program(changed(entries, CONFIGS[0], outside))
