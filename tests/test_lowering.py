"""Lowered programs and artefacts: the results of `lrpfx.attribute`, without autograd and without the model's code."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import numpy as np
import pytest
import torch
from helpers import Unary, assert_close, needs_compiler, small_net, torchvision_model

import lrpfx
from lrpfx import artefacts
from lrpfx.composites import EpsilonAlpha2Beta1Flat, EpsilonGammaBox, EpsilonPlusFlat
from lrpfx.rules import Hook


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
    "name, composite", [("resnet18", EpsilonGammaBox(0.0, 1.0)), ("mobilenet_v3_small", EpsilonPlusFlat())]
)
def test_classifiers(name, composite):
    explain_model = lrpfx.transform(torchvision_model(name), composite, input_range=(0.0, 1.0))
    program = lrpfx.lower(explain_model, torch.rand(1, 3, 64, 64), target="max")
    x = torch.rand(5, 3, 64, 64)
    expected = lrpfx.attribute(explain_model, x)
    for value in (x, x.contiguous(memory_format=torch.channels_last)):
        assert_close(program.module()(value)["relevance"], expected.relevance, 1e-9)


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


@pytest.mark.parametrize("target", ["index", "weights", "max"])
@pytest.mark.parametrize("reduce", [None, "sum", "absolute", "bytes"])
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
        expected = {None: full, "sum": full.sum(1), "absolute": full.abs().sum(1)}[reduce]
        assert_close(result, expected, 1e-10)


def test_several_inputs_and_a_fixed_batch():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(5, 3)
            self.eval()

        def forward(self, a, b):
            return self.first(a) + self.second(b)

    explain_model = lrpfx.transform(Two(), EpsilonPlusFlat())
    a, b = torch.rand(2, 4), torch.rand(2, 5)
    for example, dynamic in (((a, b), True), ({"b": b, "a": a}, False)):
        program = lrpfx.lower(explain_model, example, target="weights", dynamic_batch=dynamic)
        seed = torch.randn(2, 3)
        result = program.module()(a, b, seed)
        expected = lrpfx.attribute(explain_model, (a, b), seed).relevance
        assert_close(result["relevance.a"], expected[0], 1e-10)
        assert_close(result["relevance.b"], expected[1], 1e-10)


@pytest.mark.parametrize(
    "inputs, settings, message",
    [
        (torch.rand(2, 3, 8, 8), {"target": "best"}, "target is one of"),
        (torch.rand(2, 3, 8, 8), {"reduce": "mean"}, "reduce is one of"),
        (torch.rand(2, 3, 8, 8), {"record": ["nowhere"]}, "no node named"),
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
    with pytest.raises(lrpfx.LoweringError, match="cannot be traced"):
        lrpfx.lower(explain_model, torch.rand(2, 3))


# --- artefacts ---------------------------------------------------------------------------------------------------------------


def test_save_and_load(explain_model, tmp_path):
    program = lrpfx.lower(explain_model, images(), record=["conv1"])
    path = lrpfx.save(program, tmp_path / "model.pt2")
    runner = lrpfx.load(path)
    assert runner.verify() <= 1e-12
    x, target = images(4), torch.tensor([0, 1, 2, 3])
    expected = lrpfx.attribute(explain_model, x, target, record=["conv1"])
    for value in (x, x.contiguous(memory_format=torch.channels_last)):
        result = runner(value, target)
        assert_close(result["relevance"], expected.relevance, 1e-10)
        assert_close(result["conv1"], expected.layers["conv1"], 1e-10)
    arrays = runner(x.numpy(), target=target.numpy())
    assert isinstance(arrays["relevance"], np.ndarray)
    assert_close(torch.from_numpy(arrays["relevance"]), expected.relevance, 1e-10)
    assert runner.manifest["rules"]["fc"].startswith("Epsilon(") and runner.manifest["dynamic_batch"]
    assert "exported program" in repr(runner) and os.listdir(tmp_path) == ["model.pt2"]


@needs_compiler
def test_package(tmp_path):
    explain_model = lrpfx.transform(small_net().float(), EpsilonPlusFlat())
    program = lrpfx.lower(explain_model, images().float())
    runner = lrpfx.load(lrpfx.package(program, tmp_path / "model.pt2"))
    assert runner.verify() <= 1e-5 and runner.manifest["kind"] == "compiled"
    for batch in (1, 2, 7):
        x = images(batch).float().contiguous(memory_format=torch.channels_last)
        target = torch.arange(batch) % 5
        expected = lrpfx.attribute(explain_model, x, target).relevance
        assert_close(runner(x, target)["relevance"], expected, 1e-5)


def test_a_fresh_process_needs_no_code_of_the_model(explain_model, tmp_path):
    path = lrpfx.save(lrpfx.lower(explain_model, images(), target="max"), tmp_path / "model.pt2")
    x = images(3)
    np.save(tmp_path / "x.npy", x.numpy())
    code = f"""
        import sys, numpy as np
        from lrpfx.artefacts import load
        result = load({str(path)!r})(np.load({str(tmp_path / "x.npy")!r}))
        assert "helpers" not in sys.modules
        np.save({str(tmp_path / "result.npy")!r}, result["relevance"])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)
    result = torch.from_numpy(np.load(tmp_path / "result.npy"))
    assert_close(result, lrpfx.attribute(explain_model, x).relevance, 1e-10)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat())
    path = lrpfx.save(lrpfx.lower(explain_model, images()), tmp_path_factory.mktemp("artefact") / "model.pt2")
    torch.set_default_dtype(before)
    return path


def test_inputs_are_guarded(artefact):
    runner = lrpfx.load(artefact)
    index = torch.tensor([0, 1])
    for arguments, message in [
        ((images(),), "missing: .'target'."),
        ((images(), index, index), "not 3 arguments"),
        ((images().float(), index), "dtype float32, but the program takes float64"),
        ((images()[:, :2], index), "batch×3×8×8"),
        ((images(3), index), "batch sizes differ"),
        ((images(0), index[:0]), "empty"),
        ((images() / 0.0, index), "not finite"),
        ((images().tolist(), index), "is a list"),
    ]:
        with pytest.raises(lrpfx.InputError, match=message):
            runner(*arguments)


def test_flipped_bytes_are_found(artefact, tmp_path):
    """Wherever a byte is changed, the file is refused, or it holds the same program."""
    content = artefact.read_bytes()
    torch.manual_seed(0)
    x = images()
    expected = lrpfx.load(artefact)(x, torch.tensor([0, 1]))
    generator = random.Random(0)
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (tmp_path / "changed.pt2").write_bytes(changed)
        try:
            runner = lrpfx.load(tmp_path / "changed.pt2")
        except lrpfx.ArtefactError:
            refused += 1
            continue
        assert torch.equal(runner(x, torch.tensor([0, 1]))["relevance"], expected["relevance"])
    assert refused > 30


def test_files_that_are_no_artefacts(artefact, tmp_path):
    content = artefact.read_bytes()
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as file:
        file.writestr("some/file", "text")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.rand(1, 2),)), tmp_path / "foreign.pt2")
    (tmp_path / "truncated.pt2").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.pt2").write_text("not an archive")
    for name, message in [
        ("other", "not written by lrpfx"),
        ("foreign", "not written by lrpfx"),
        ("truncated", "damaged"),
        ("text", "damaged"),
        ("absent", "cannot be read"),
    ]:
        with pytest.raises(lrpfx.ArtefactError, match=message):
            lrpfx.load(tmp_path / f"{name}.pt2")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.rand(1, 2),))
    for path, message in [("model.zip", "suffix"), ("no/folder.pt2", "no folder"), ("own.pt2", "not made by lrpfx.lower")]:
        with pytest.raises(lrpfx.ArtefactError, match=message):
            lrpfx.save(program, tmp_path / path)


def test_an_interrupted_write_leaves_the_old_file(explain_model, tmp_path, monkeypatch):
    program = lrpfx.lower(explain_model, images())
    path = lrpfx.save(program, tmp_path / "model.pt2")
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(artefacts.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        lrpfx.save(program, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.pt2"]


def test_a_killed_writer_leaves_no_half_file(artefact, tmp_path):
    """Killed at random moments, the writer has left the old file or a new one, and each can be loaded."""
    path = tmp_path / "model.pt2"
    shutil.copy(artefact, path)
    code = f"""
        from pathlib import Path
        from lrpfx.artefacts import _replace
        content = Path({str(artefact)!r}).read_bytes()
        print("ready", flush=True)
        while True:
            _replace(Path({str(path)!r}), content)
    """
    generator = random.Random(0)
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(generator.uniform(0.0, 0.05))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert path.read_bytes() == artefact.read_bytes()
    lrpfx.load(path)
