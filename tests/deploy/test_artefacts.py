"""Artefacts: every format gives the results of `lrpfx.attribute`, guards its inputs, and is never half written."""

import copy
import functools
import io
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
import torch
from helpers import ROOT, Layered, Unary, assert_agrees, assert_close, needs_compiler, small_net
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lrpfx
from lrpfx.composites import EpsilonAlpha2Beta1Flat, EpsilonPlus, EpsilonPlusFlat, GuidedBackprop
from lrpfx.deploy.artefact import write_with
from lrpfx.deploy.backends import BACKENDS
from lrpfx.deploy.backends import onnx as onnx_backend
from lrpfx.deploy.backends.exported import Exported
from lrpfx.rules import Gamma
from lrpfx.support import files

pytestmark = pytest.mark.programs


@pytest.fixture
def explain_model():
    return lrpfx.transform(small_net(), EpsilonAlpha2Beta1Flat())


@pytest.fixture(scope="module")
def program():
    """A program that tests share: none of them changes it."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return lrpfx.lower(lrpfx.transform(small_net(), EpsilonAlpha2Beta1Flat()), images())


def images(batch=2):
    return torch.rand(batch, 3, 8, 8)


def tiny_net(seed=0):
    """What a file needs to be one: a convolution and a dense layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


@functools.cache
def ranked_images():
    """Images and relevances of the output, those first whose maps the rounding of float32 changes least."""
    torch.manual_seed(0)
    pool, weights = images(96), torch.rand(96, 5)
    change = torch.zeros(len(pool))

    def relevance(model):
        explain_model = lrpfx.transform(model, EpsilonPlusFlat())
        return lrpfx.attribute(explain_model, pool, weights, record=["conv1"]).layers["conv1"].flatten(1)

    expected = relevance(small_net())
    for seed in range(8):
        model, generator = small_net(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 6e-8 * torch.randn(parameter.shape, generator=generator))
        change = torch.maximum(change, (relevance(model) - expected).abs().amax(1) / expected.abs().amax(1))
    order = change.argsort()
    return pool[order], weights[order]


def determined_images(batch):
    """Of many images of this network, rounding alone changes the map by more than 1e-5."""
    return tuple(tensor[:batch].float() for tensor in ranked_images())


WRITERS = {
    "exported": (lrpfx.save, "model.pt2"),
    "compiled": (lrpfx.package, "model.pt2"),
    "onnx": (lrpfx.save, "model.onnx"),
}
FORMS = [("index", None), ("weights", "sum"), ("max", "bytes")]
#: Each format in each form. An exported file is the program, whose forms test_lowering.py tests. A compilation takes long:
#: test_conditions_of_programs.py compiles a smaller network.
CASES = [pytest.param("exported", form, marks=[pytest.mark.slow] * (form != FORMS[0])) for form in FORMS]
CASES += [pytest.param("onnx", form) for form in FORMS]
CASES += [pytest.param("compiled", form, marks=[needs_compiler, pytest.mark.slow]) for form in FORMS]


@pytest.fixture(scope="module")
def program_in():
    """Programs by their form, each lowered once."""

    @functools.cache
    def program(target, reduce):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat()).float()
        settings = {"target": target, "reduce": reduce, "record": ["conv1", "relu"], "balance": reduce != "bytes"}
        return explain_model, lrpfx.lower(explain_model, images().float(), **settings)

    return program


@pytest.mark.parametrize("kind, form", CASES)
def test_every_format_gives_what_attribute_gives(kind, form, program_in, tmp_path):
    target, reduce = form
    explain_model, program = program_in(target, reduce)
    record = ["conv1", "relu"]
    write, name = WRITERS[kind]
    runner = lrpfx.load(write(program, tmp_path / name))
    assert os.listdir(tmp_path) == [name]
    assert runner.verify() <= 1e-5 and f"{kind} program of ResidualNet" in repr(runner)
    for batch in (1, 2, 5):
        x, weights = determined_images(batch)
        given = {"index": [torch.arange(batch) % 5], "weights": [weights], "max": []}[target]
        found = lrpfx.attribute(explain_model, x, *given, record=record)
        for layout in (torch.contiguous_format, torch.channels_last):
            results = runner(x.contiguous(memory_format=layout), *given)
            assert list(results) == ["output", "relevance", *record, *(["balance"] if reduce != "bytes" else [])]
            for name, expected in {"output": found.output, **found.layers}.items():
                assert_close(results[name], expected, 1e-5)
            total = found.relevance.sum(1)
            if reduce == "bytes":
                largest = total.abs().flatten(1).amax(1)[:, None, None]
                assert (results["relevance"] - (128 + 127 * total / largest)).abs().max() <= 0.51
            else:
                assert_close(results["relevance"], found.relevance if reduce is None else total, 1e-5)
        arrays = runner(x.numpy(), *(one.numpy() for one in given))
        assert all(isinstance(value, np.ndarray) for value in arrays.values())
        assert_close(torch.from_numpy(arrays["output"]), found.output, 1e-5)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_weights_of_compiled_programs_are_laid_out_for_the_machine(tmp_path):
    """inductor calls oneDNN's fused convolutions only where it could freeze the weights."""
    explain_model = lrpfx.transform(tiny_net().float(), EpsilonPlusFlat())
    program = lrpfx.lower(explain_model, images().float(), target="max", reduce="bytes")
    path = lrpfx.package(program, tmp_path / "model.pt2")
    with zipfile.ZipFile(path) as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".wrapper.cpp"))
    assert b"convolution_pointwise" in code


@pytest.mark.slow
@needs_compiler
def test_compiled_programs_in_double_precision(tmp_path):
    """oneDNN, whose convolutions frozen weights are for, has none in float64."""
    program = lrpfx.lower(lrpfx.transform(tiny_net(), EpsilonAlpha2Beta1Flat()), images(), target="max")
    runner = lrpfx.load(lrpfx.package(program, tmp_path / "model.pt2"))
    assert runner.verify() <= 1e-12


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_indices_that_an_embedding_does_not_have(name, tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2)).float()
    explain_model = lrpfx.transform(model.eval(), EpsilonPlusFlat())
    tokens = torch.randint(9, (2, 3))
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, tokens, target="max"), tmp_path / name))
    assert_agrees(runner, explain_model, tokens, tolerance=1e-5)
    with pytest.raises(lrpfx.InputError, match="cannot run on these inputs"):
        runner(tokens + 9)


def test_the_manifest_says_what_there_is_to_know(explain_model, tmp_path):
    program = lrpfx.lower(explain_model, images(), target="max")
    manifest = lrpfx.load(lrpfx.save(program, tmp_path / "model.pt2")).manifest
    assert manifest["lrpfx"] == lrpfx.__version__ and manifest["torch"] == torch.__version__
    assert manifest["composite"] == "EpsilonAlpha2Beta1Flat()" and manifest["canonizers"] == ["merge_batch_norm"]
    assert manifest["rules"]["fc"].startswith("Epsilon(") and manifest["merged"]["conv1"] == ["bn1"]
    assert manifest["arguments"] == {"input": {"shape": [None, 3, 8, 8], "dtype": "float64"}}
    assert manifest["results"]["relevance"] == {"shape": [None, 3, 8, 8], "dtype": "float64"}
    assert manifest["target"] == "max" and manifest["tolerance"] == 1e-9
    fixed = lrpfx.lower(explain_model, images(), target="max", dynamic_batch=False)
    runner = lrpfx.load(lrpfx.save(fixed, tmp_path / "model.pt2"))
    assert runner.manifest["arguments"]["input"]["shape"] == [2, 3, 8, 8]
    with pytest.raises(lrpfx.InputError, match="the program takes 2×3×8×8"):
        runner(images(3))


@pytest.fixture(scope="module")
def fresh_process(artefact, tmp_path_factory):
    """Images, and their relevance in a fresh process, as torch.export reads the file and as lrpfx does."""
    folder = tmp_path_factory.mktemp("fresh")
    x = torch.rand(3, 3, 8, 8, dtype=torch.float64)
    np.save(folder / "x.npy", x.numpy())
    code = f"""
        import sys, numpy as np, torch
        x, target = torch.from_numpy(np.load("x.npy")), torch.tensor([0, 1, 2])
        np.save("by_torch.npy", torch.export.load({str(artefact)!r}).module()(x, target)["relevance"])
        assert "lrpfx" not in sys.modules
        from lrpfx.deploy.artefact import load
        np.save("by_lrpfx.npy", load({str(artefact)!r})(x.numpy(), target.numpy())["relevance"])
        assert "helpers" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=folder)
    return x, *(torch.from_numpy(np.load(folder / name)) for name in ("by_torch.npy", "by_lrpfx.npy"))


def test_a_fresh_process_needs_no_code_of_the_model(fresh_process):
    x, _, found = fresh_process
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat())
    assert_close(found, lrpfx.attribute(explain_model, x, torch.arange(3)).relevance, 1e-10)


def test_files_are_those_of_torch(fresh_process):
    """A .pt2 file is one that torch.export reads, where lrpfx is not imported."""
    _, by_torch, by_lrpfx = fresh_process
    assert_close(by_torch, by_lrpfx, 1e-12)


WITHOUT_TORCH = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "lrpfx"):
                raise ImportError(name)

    sys.meta_path.insert(0, Absent())
    import numpy as np
    folder, images = {folder!r}, np.load({folder!r} + "/x.npy")
"""


def test_onnx_needs_neither_torch_nor_lrpfx(tmp_path):
    """The lines of the guide that run an ONNX file, in a process in which torch cannot be imported."""
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat()).float()
    lrpfx.save(lrpfx.lower(explain_model, images().float()), tmp_path / "model.onnx")
    x = images(3).float()
    np.save(tmp_path / "x.npy", x.numpy())
    guide = (ROOT / "docs" / "deploying.md").read_text()
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "onnxruntime" in block]
    code = textwrap.dedent(WITHOUT_TORCH.format(folder=str(tmp_path))) + lines
    code += "\nassert 'torch' not in sys.modules\nnp.save(f'{folder}/relevance.npy', results['relevance'])"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    expected = lrpfx.attribute(explain_model, x, 1).relevance
    assert_close(torch.from_numpy(np.load(tmp_path / "relevance.npy")), expected, 1e-5)


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
        ((images(),), "missing: target, unknown: none, given twice: none"),
        ((images(), index, index), "not 3 arguments"),
        ((images().float(), index), "dtype float32, but the program takes float64"),
        ((images()[:, :2], index), "batch×3×8×8"),
        ((images(3), index), "batch sizes differ"),
        ((images(0), index[:0]), "empty"),
        ((images() / 0.0, index), "not finite"),
        ((images().tolist(), index), "is a list"),
        ((images(), index + 4), "target 5 is out of range: the output has 5 classes"),
        ((images(), -index), "target -1 is out of range"),
        ((images(2), torch.tensor([7, 9])), "target 7 is out of range"),
    ]:
        with pytest.raises(lrpfx.InputError, match=message):
            runner(*arguments)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[one.inner if isinstance(one, Wrapped) else one for one in args], **(kwargs or {}))


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not for runners")


def test_inputs_that_are_no_plain_tensors(artefact, explain_model):
    runner, x, index = lrpfx.load(artefact), images(), torch.tensor([0, 1])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for value, message in [
        (Wrapped(x), "a Wrapped that stands for other tensors"),
        (fake, "that stands for other tensors|on the meta device"),
        (x.to("meta"), "on the meta device"),
        (x.to_sparse(), "of layout torch.sparse_coo"),
        (torch.nested.nested_tensor([x[0], x[1]]), "nested"),
    ]:
        with pytest.raises(lrpfx.InputTypeError, match=message):
            runner(value, index)
        with pytest.raises(lrpfx.InputTypeError, match=message):
            lrpfx.attribute(explain_model, value, 1)
        with pytest.raises(lrpfx.InputTypeError, match=message):
            lrpfx.lower(explain_model, value)
    with pytest.raises(lrpfx.InputTypeError, match="stands for other tensors"):
        torch.func.grad(lambda one: runner(one, index)["output"].sum())(x)
    with pytest.raises(lrpfx.InputTypeError, match="masked array"):
        runner(np.ma.masked_array(x.numpy(), mask=x.numpy() > 0.5), index.numpy())
    expected = runner(x, index)["relevance"]
    assert torch.equal(runner(x.as_subclass(Own), index)["relevance"], expected)
    assert torch.equal(copy.deepcopy(runner)(x, index)["relevance"], expected)
    with pytest.raises(lrpfx.InputTypeError, match="a runner cannot be pickled"):
        pickle.dumps(runner)


def test_files_are_loaded_in_any_surroundings(artefact, onnx_artefact):
    x, index = images(), torch.tensor([0, 1])
    expected = lrpfx.load(artefact)(x, index)["relevance"]
    with torch.device("meta"):
        inside = lrpfx.load(artefact)
    assert torch.equal(inside(x, index)["relevance"], expected)
    for path in (artefact, onnx_artefact):
        with ThreadPoolExecutor(6) as pool:
            for runner in pool.map(lrpfx.load, [path] * 6):
                assert runner.verify() <= 1e-5


def test_programs_are_lowered_in_any_surroundings():
    explain_model, x = lrpfx.transform(tiny_net().float(), EpsilonAlpha2Beta1Flat()), images().float()
    index = torch.tensor([0, 1])
    expected = lrpfx.lower(explain_model, x).module()(x, index)["relevance"]
    for surroundings in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"), torch.no_grad()):
        with surroundings:
            program = lrpfx.lower(explain_model, x)
        assert torch.equal(program.module()(x, index)["relevance"], expected)


@pytest.mark.parametrize("path", [b"model.pt2", None, 3, io.BytesIO()])
def test_paths_of_other_types(path, program):
    for function in (lambda: lrpfx.save(program, path), lambda: lrpfx.load(path)):
        with pytest.raises(lrpfx.InputTypeError, match="a path is a str or a Path"):
            function()


def test_names_that_are_odd(program, explain_model, tmp_path):
    (tmp_path / "loop.pt2").symlink_to("loop.pt2")
    for name, message in (("loop.pt2", "link to itself|symbolic links"), ("a\0.pt2", "not the name of a file")):
        with pytest.raises(lrpfx.ArtefactError, match=message):
            lrpfx.save(program, f"{tmp_path}/{name}")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt2")
    assert lrpfx.load(lrpfx.save(program, odd)).verify() <= 1e-9
    for other in (explain_model, None, "program"):
        with pytest.raises(lrpfx.InputTypeError, match=r"a program is what lrpfx\.lower returns"):
            lrpfx.save(other, tmp_path / "model.pt2")


@pytest.fixture(scope="module")
def onnx_artefact(tmp_path_factory):
    torch.manual_seed(0)
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat()).float()
    return lrpfx.save(lrpfx.lower(explain_model, images().float()), tmp_path_factory.mktemp("artefact") / "model.onnx")


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_flipped_bytes_are_found(kind, artefact, onnx_artefact, tmp_path):
    """Wherever a byte is changed, the file is refused, or it holds the same program."""
    original = artefact if kind == "pt2" else onnx_artefact
    content = original.read_bytes()
    x, target = images(), torch.tensor([0, 1])
    x = x.float() if kind == "onnx" else x
    expected = lrpfx.load(original)(x, target)
    generator = random.Random(0)
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path = tmp_path / f"changed.{kind}"
        path.write_bytes(changed)
        try:
            runner = lrpfx.load(path)
        except lrpfx.ArtefactError:
            refused += 1
            continue
        assert torch.equal(runner(x, target)["relevance"], expected["relevance"])
    assert refused > 30 if kind == "pt2" else refused == 60


def test_files_that_are_no_artefacts(artefact, onnx_artefact, tmp_path):
    content = artefact.read_bytes()
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as file:
        file.writestr("some/file", "text")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.rand(1, 2),)), tmp_path / "foreign.pt2")
    (tmp_path / "truncated.pt2").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.pt2").write_text("not an archive")
    (tmp_path / "truncated.onnx").write_bytes(onnx_artefact.read_bytes()[:-1])
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name, message in [
        ("other.pt2", "not written by lrpfx"),
        ("foreign.pt2", "not written by lrpfx"),
        ("truncated.pt2", "damaged"),
        ("text.pt2", "damaged"),
        ("absent.pt2", "cannot be read"),
        ("truncated.onnx", "damaged"),
        ("text.onnx", "not written by lrpfx"),
        ("empty.onnx", "not written by lrpfx"),
    ]:
        with pytest.raises(lrpfx.ArtefactError, match=message):
            lrpfx.load(tmp_path / name)
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.rand(1, 2),))
    for path, message in [("model.zip", "suffix"), ("no/folder.pt2", "no folder"), ("own.pt2", "not made by lrpfx.lower")]:
        with pytest.raises(lrpfx.ArtefactError, match=message):
            lrpfx.save(program, tmp_path / path)


def test_an_interrupted_write_leaves_the_old_file(program, tmp_path, monkeypatch):
    path = lrpfx.save(program, tmp_path / "model.pt2")
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(lrpfx.ArtefactError, match=r"model\.pt2 cannot be written: disk full"):
        lrpfx.save(program, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.pt2"]


def test_a_killed_writer_leaves_no_half_file(artefact, tmp_path):
    """Killed at random moments, the writer has left the old file or a new one, and each can be loaded."""
    path = tmp_path / "model.pt2"
    shutil.copy(artefact, path)
    code = f"""
        import os
        from pathlib import Path
        from lrpfx.deploy.artefact import _replace
        content = Path({str(artefact)!r}).read_bytes()
        while input():
            if writer := os.fork():  # a copy of this process has torch loaded already
                print(writer, flush=True)
                os.waitpid(writer, 0)
                print("ended", flush=True)
            else:
                while True:
                    _replace(Path({str(path)!r}), content, ".pt2")
    """
    generator = random.Random(0)
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    for _ in range(5):
        program.stdin.write("write\n")
        writer = int(program.stdout.readline())
        time.sleep(generator.uniform(0.0, 0.3))
        os.kill(writer, signal.SIGKILL)
        assert program.stdout.readline() == "ended\n"
        assert path.read_bytes() == artefact.read_bytes()
    program.communicate("\n", timeout=60)
    lrpfx.load(path)


def test_large_models_keep_their_parameters_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    path = tmp_path / "model.onnx"
    programs = []
    for seed in (0, 1):
        explain_model = lrpfx.transform(tiny_net(seed), EpsilonPlusFlat()).float()
        programs.append(lrpfx.lower(explain_model, images().float()))
        assert lrpfx.save(programs[-1], path) == path
        (data,) = tmp_path.glob("model.onnx.*.data")  # that of the replaced file is gone
        x, target = images(3).float(), torch.tensor([0, 1, 2])
        assert_agrees(lrpfx.load(path), explain_model, x, target, tolerance=1e-5)
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", lambda descriptor: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lrpfx.save(programs[0], path)
    assert sorted(tmp_path.iterdir()) == [path, data]  # nothing of the attempt is left
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(lrpfx.ArtefactError, match="has another hash"):
        lrpfx.load(path)
    data.unlink()
    with pytest.raises(lrpfx.ArtefactError, match=r"the file of its parameters, .*, is missing"):
        lrpfx.load(path)


@pytest.mark.slow
def test_parameters_beside_belong_to_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_backend, "EXTERNAL_DATA_FROM", 0)
    monkeypatch.chdir(tmp_path)  # where the converter of onnx looks for files of the same name

    def program(seed):
        return lrpfx.lower(lrpfx.transform(tiny_net(seed), EpsilonPlusFlat()).float(), images().float(), target="max")

    lrpfx.save(program(0), "a.onnx")
    shutil.copy("a.onnx", "b.onnx")
    lrpfx.save(program(1), "b.onnx")
    assert lrpfx.load("a.onnx").verify() <= 1e-4 and lrpfx.load("b.onnx").verify() <= 1e-4
    os.rename("a.onnx", "old.onnx")
    lrpfx.save(program(2), "a.onnx")
    lrpfx.save(program(3), "old.onnx")
    shutil.copy("a.onnx", "c.onnx")
    lrpfx.save(program(4), "a.onnx")
    for name in ("a", "b", "c", "old"):
        assert lrpfx.load(f"{name}.onnx").verify() <= 1e-4
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.onnx").symlink_to(tmp_path / "a.onnx")
    assert lrpfx.load(lrpfx.save(program(5), "links/model.onnx")).verify() <= 1e-4
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").touch()
    (tmp_path / "links" / "blob.onnx").symlink_to(tmp_path / "blobs" / "abc")
    assert lrpfx.load(lrpfx.save(program(6), "links/blob.onnx")).manifest["kind"] == "onnx"


def test_onnx_says_where_operations_come_from(onnx_artefact):
    model = onnx.load(onnx_artefact)
    origins = {entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == "lrpfx"}
    assert "conv2: ZPlus(stabilizer=1e-06)" in origins and "fc: Epsilon(epsilon=1e-06)" in origins
    assert all(value.type.tensor_type.shape.dim[0].dim_param == "batch" for value in model.graph.input)
    names = {tensor.name for tensor in model.graph.initializer}
    assert {"conv1.merged_weight", "fc.weight"} <= names
    onnx.checker.check_model(model)


def test_a_program_that_fails_its_self_test_is_not_written(program, tmp_path, monkeypatch):
    path = lrpfx.save(program, tmp_path / "model.pt2")
    before = path.read_bytes()
    load = Exported.load

    def wrong(self, path, stored):
        function = load(self, path, stored)
        return lambda *tensors: {name: value * 1.001 for name, value in function(*tensors).items()}

    monkeypatch.setattr(Exported, "load", wrong)
    with pytest.raises(lrpfx.ArtefactError, match="differs from the program's result"):
        lrpfx.save(program, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.pt2"]


def test_what_is_done_is_logged(explain_model, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="lrpfx"):
        lrpfx.save(lrpfx.lower(explain_model, images()), tmp_path / "model.pt2")
    steps = [record.getMessage() for record in caplog.records if record.name.startswith("lrpfx")]
    assert "LOWER drop_detach" in steps
    found = [next(word for word in LOGGED if text.startswith(word)) for text in steps if not text.startswith("LOWER ")]
    assert list(dict.fromkeys(found)) == LOGGED


def test_history_reaches_the_file(artefact, onnx_artefact):
    stages = lrpfx.load(artefact).manifest["stages"]
    assert "canonize merge_batch_norm: 2" in stages
    assert stages[-1].startswith("lower export: ")
    assert lrpfx.load(onnx_artefact).manifest["stages"][-1].startswith("legalize legalize_for_onnx: ")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] if one == "compiled" else []) for one in BACKENDS])
def test_every_backend_writes_what_it_reads(kind, tmp_path):
    """What holds for a form of file holds for each in the list, with no word about any of them here."""
    if kind == "compiled" and shutil.which("g++") is None:
        pytest.skip("no compiler")
    backend = BACKENDS[kind]
    explain_model = lrpfx.transform(tiny_net().float(), EpsilonAlpha2Beta1Flat())
    program = lrpfx.lower(explain_model, images(3).float(), dynamic_batch=backend.suffix != ".pte")
    path = tmp_path / f"model{backend.suffix}"
    assert write_with(program, path, path, backend) == path
    runner = lrpfx.load(path)
    x, target = images(3).float(), torch.tensor([0, 1, 2])
    assert runner.manifest["kind"] == kind and runner.verify() <= 1e-4
    assert_close(runner(x, target)["output"], explain_model(x), 1e-5)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(lrpfx.ArtefactError, match=r"damaged|not loaded"):
        lrpfx.load(path)


LOGGED = ["tracing", "exporting", "measuring", "comparing", "recording", "loading"]


@pytest.mark.parametrize("name", ["model.onnx", pytest.param("model.pt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "composite",
    [
        EpsilonAlpha2Beta1Flat(),
        pytest.param(EpsilonPlusFlat(), marks=pytest.mark.slow),
        pytest.param(EpsilonPlusFlat(layer_map=[(nn.Conv2d, Gamma(0.25))]), marks=pytest.mark.slow),
    ],
    ids=["alpha_beta", "plus", "gamma"],
)
def test_nothing_is_stored_twice(composite, name, tmp_path):
    """Neither weights, which programs derive from each other, nor images and results of the self-test.

    Transposed convolutions of .onnx files, here those behind the second convolution, have weights of their own.
    """
    convolutions = [nn.Conv2d(3, 64, 3, 4), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 256, 3, 2), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)).float().eval()
    x = torch.rand(1, 3, 64, 64, dtype=torch.float32)
    plain = sum(value.nbytes for value in model.parameters()) + name.endswith(".onnx") * convolutions[3].weight.nbytes
    program = lrpfx.lower(lrpfx.transform(model, composite), x, target="max", reduce="bytes")
    path = lrpfx.save(program, tmp_path / name)
    assert path.stat().st_size <= plain + 1.4 * x.nbytes + 100_000
    assert lrpfx.load(path).verify() <= 1e-4


def test_a_batch_of_one_is_part_of_the_self_test(program, explain_model, tmp_path, monkeypatch):
    load = Exported.load

    def wrong_for_one(self, path, stored):
        function = load(self, path, stored)
        return lambda *tensors: {
            name: value * 1.001 if len(value) == 1 else value for name, value in function(*tensors).items()
        }

    monkeypatch.setattr(Exported, "load", wrong_for_one)
    with pytest.raises(lrpfx.ArtefactError, match="in a batch of 1"):
        lrpfx.save(program, tmp_path / "model.pt2")
    lrpfx.save(lrpfx.lower(explain_model, images(), dynamic_batch=False), tmp_path / "fixed.pt2")


class RowsElsewhere(Layered):
    """A model of (batch, 7, 6) whose layer `sequence` gives (7, batch, 8) and `windows` gives (batch * 7, 4)."""

    def forward(self, x):
        sequence = self.sequence(x.transpose(0, 1)).relu()
        return self.head(self.windows(sequence.transpose(0, 1).reshape(-1, 8)).relu().reshape(-1, 28))


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_results_whose_first_dimension_is_not_the_batch(dynamic_batch, name, tmp_path):
    explain_model = lrpfx.transform(
        RowsElsewhere(sequence=nn.Linear(6, 8), windows=nn.Linear(8, 4), head=nn.Linear(28, 5)).float().eval(),
        EpsilonPlusFlat(),
    )
    layers = ["sequence", "windows"]
    program = lrpfx.lower(explain_model, torch.rand(2, 7, 6).float(), record=layers, dynamic_batch=dynamic_batch)
    runner = lrpfx.load(lrpfx.save(program, tmp_path / name))
    assert runner.verify() < 1e-5
    for batch in (1, 2, 3) if dynamic_batch else (2,):
        x, target = torch.rand(batch, 7, 6).float(), torch.arange(batch)
        expected = lrpfx.attribute(explain_model, x, target, record=layers).layers
        found = runner(x, target)
        assert found["sequence"].shape == (7, batch, 8) and found["windows"].shape == (7 * batch, 4)
        for layer in layers:
            assert_close(found[layer], expected[layer], 1e-5)
    runner.self_test.arrays["2.out.windows"][-1] += 1
    with pytest.raises(lrpfx.ArtefactError, match="windows differs"):
        runner.verify()


@needs_compiler
def test_compiled_convolutions_in_three_dimensions(tmp_path):
    """Where inductor chooses layouts by itself, the relevance of a batch of one is wrong."""
    model = torch.nn.Sequential(torch.nn.Conv3d(2, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(192, 4))
    explain_model = lrpfx.transform(model.float().eval(), EpsilonPlusFlat())
    program = lrpfx.lower(explain_model, torch.rand(2, 2, 5, 5, 5).float())
    runner = lrpfx.load(lrpfx.package(program, tmp_path / "model.pt2"))
    for batch in (1, 2, 3):
        assert_agrees(runner, explain_model, torch.rand(batch, 2, 5, 5, 5).float(), torch.arange(batch), tolerance=1e-5)


def test_onnx_runtime_has_no_convolutions_in_float64(program, tmp_path):
    with pytest.raises(lrpfx.LoweringError, match=r"does not compute aten\.convolution\.default in float64, from conv1"):
        lrpfx.save(program, tmp_path / "model.onnx")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("wrong, size", [(float("nan"), "first"), (float("inf"), "last"), (1.0, "last")])
def test_no_wrong_result_passes_the_self_test(wrong, size, artefact, monkeypatch):
    """Results that are not finite differ, too."""
    runner = lrpfx.load(artefact)
    assert runner.verify() <= 1e-12
    call, batches = type(runner).__call__, []

    def with_a_wrong_entry(self, **arguments):
        results = call(self, **arguments)
        batches.append(len(results["output"]))
        if (len(batches) == 1) == (size == "first"):
            results["relevance"].view(-1)[-1] = wrong
        return results

    monkeypatch.setattr(type(runner), "__call__", with_a_wrong_entry)
    with pytest.raises(lrpfx.ArtefactError, match="relevance differs"):
        runner.verify()
    assert len(batches) == (1 if size == "first" else 2)


@pytest.mark.filterwarnings("ignore:the model ends in a softmax", "ignore:the map is empty")
@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_self_tests_of_softmax_classifiers_compare_something(name, tmp_path):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5), torch.nn.Softmax(-1)).float().eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    program = lrpfx.lower(explain_model, images().float(), target="weights")
    runner = lrpfx.load(lrpfx.save(program, tmp_path / name))
    assert runner.verify() <= 1e-5
    scale = np.abs(runner.self_test.expected("output", 2)).max()
    assert np.abs(runner.self_test.expected("relevance", 2)).max() > 1e-4 * scale


@pytest.mark.parametrize("composite", [GuidedBackprop, EpsilonPlusFlat])
@pytest.mark.parametrize(
    "layers, shape",
    [
        ([nn.Linear(6, 8), nn.LayerNorm(8)], (2, 7, 6)),
        ([nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)], (2, 3, 8, 8)),
        ([nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)], (2, 3, 8, 8)),
        ([nn.EmbeddingBag(9, 6), nn.Linear(6, 4)], None),
    ],
    ids=["layer norm", "group norm", "instance norm", "bag"],
)
def test_files_of_layers_whose_backward_torch_does_not_check(layers, shape, composite, tmp_path):
    x = torch.randint(9, (2, 7)) if shape is None else torch.rand(shape).float()
    model = nn.Sequential(*layers, nn.Flatten()).float()
    model = nn.Sequential(model, nn.Linear(model(x).shape[1], 3).float()).eval()
    explain_model = lrpfx.transform(model, composite(), example_inputs=x)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, x), tmp_path / "model.pt2"))
    assert_agrees(runner, explain_model, x, torch.tensor([0, 2]), tolerance=1e-5)


def test_operators_that_files_do_not_contain_are_named_before_the_work(tmp_path):
    model = Unary(lambda x: torch.linalg.inv(x + 3 * torch.eye(3).to(x))).float()
    x = torch.rand(2, 3, 3).float()
    program = lrpfx.lower(lrpfx.transform(model, GuidedBackprop(), example_inputs=x), x, target="weights")
    with pytest.raises(lrpfx.LoweringError, match=r"(?s)\.pt2 files do not contain.*aten\._linalg_check_errors"):
        lrpfx.save(program, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
