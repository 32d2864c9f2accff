"""The command line: export, run, inspect and verify, on a small model and images of digits."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import lrpfx
from lrpfx import cli
from lrpfx.composites import EpsilonGammaBox

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))

number = 3
ready = make()
"""


def run(*arguments):
    """The command's exit status and what it printed; errors of lrpfx are raised."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module `small_model`, its weights, and images of several sizes."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "small_model", raising=False)
    (tmp_path / "small_model.py").write_text(MODEL)
    shapes = {"0.weight": (4, 3, 3, 3), "0.bias": (4,), "3.weight": (5, 144), "3.bias": (5,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    torch.save(weights, tmp_path / "weights.pt")
    (tmp_path / "images").mkdir()
    generator = np.random.default_rng(0)
    for number, size in enumerate([(8, 8), (20, 10), (9, 30)]):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    return tmp_path


def exported(name, *options):
    return run("export", "small_model:make", name, "--shape", "1,3,8,8", "--weights", "weights.pt", *options)


def test_export_and_run(folder):
    box = ("--composite", "epsilon_gamma_box", "--setting", "low=0.0", "--setting", "high=1.0", "--input-range", "0", "1")
    status, printed = exported("model.onnx", *box)
    assert status == 0 and "model.onnx" in printed and "self-test passed" in printed
    status, printed = run("run", "model.onnx", "images", "results", "--batch-size", "2")
    assert status == 0 and "3 heatmaps and outputs.csv in results/" in printed
    assert sorted(os.listdir("results")) == ["0.png.png", "1.png.png", "2.png.png", "outputs.csv"]
    with open("results/outputs.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png"]
    sys.path.insert(0, str(folder))
    import small_model

    sys.path.remove(str(folder))
    model = small_model.make()
    model.load_state_dict(torch.load("weights.pt", weights_only=True))
    explain_model = lrpfx.transform(model.eval(), EpsilonGammaBox(low=0.0, high=1.0))
    image = torch.from_numpy(np.array(Image.open("images/0.png"))).permute(2, 0, 1)[None] / 255.0
    expected = lrpfx.attribute(explain_model, image)
    outputs = torch.tensor([float(rows[0][f"output_{number}"]) for number in range(5)])
    assert (outputs - expected.output[0]).norm() <= 1e-5 * expected.output.norm()
    assert int(rows[0]["largest"]) == int(rows[0]["explained"]) == int(expected.output.argmax())
    assert float(rows[0]["relevance"]) == pytest.approx(float(expected.relevance.sum()), rel=1e-4)
    heatmap = Image.open("results/0.png.png")
    assert heatmap.size == (8, 8) and len(set(heatmap.convert("RGB").tobytes())) > 10


def test_a_chosen_class_and_normalization(folder):
    exported("model.pt2")
    scale = ("--mean", "0.5,0.4,0.3", "--std", "0.2")
    assert run("run", "model.pt2", "images", "results", "--target", "2", *scale)[0] == 0
    with open("results/outputs.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["explained"] for row in rows} == {"2"}
    image = np.array(Image.open("images/0.png"), dtype=np.float64).transpose(2, 0, 1) / 255.0
    image = (image - np.array([0.5, 0.4, 0.3])[:, None, None]) / 0.2
    found = lrpfx.load("model.pt2")(image[None].astype(np.float32), np.array([2]))
    assert float(rows[0]["relevance"]) == pytest.approx(found["relevance"].sum(), rel=1e-5)


@pytest.mark.parametrize("options", [("--target", "max", "--fixed-batch"), ("--target", "max", "--reduce", "bytes")])
def test_other_programs(folder, options):
    exported("model.pt2", "--record", "0", *options)
    assert run("run", "model.pt2", "images", "results")[0] == 0
    with open("results/outputs.csv") as file:
        assert len(list(csv.DictReader(file))) == 3


def test_inspect_and_verify(folder):
    exported("model.pt2", "--balance", "--record", "0")
    _, printed = run("inspect", "model.pt2")
    for expected in ("EpsilonPlusFlat()", "batch×3×8×8", "Flat(stabilizer=1e-06)", "Epsilon(epsilon=1e-06)", "balance"):
        assert expected in printed
    assert run("verify", "model.pt2")[0] == 0
    (folder / "broken.pt2").write_bytes((folder / "model.pt2").read_bytes()[:-1])
    status, printed = run("verify", "model.pt2", "broken.pt2")
    assert status == 1 and "passed" in printed and "FAILED" in printed


def test_images_that_cannot_be_read(folder):
    exported("model.pt2")
    (folder / "images" / "broken.png").write_bytes(b"no image")
    with pytest.raises(lrpfx.InputError, match=r"broken\.png"):
        run("run", "model.pt2", "images", "results")
    assert len(os.listdir("results")) == 4  # the others are there


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["export", "small_model", "m.pt2", "--shape", "1,3,8,8"], "module:callable"),
        (["export", "small_model:absent", "m.pt2", "--shape", "1,3,8,8"], "cannot be imported"),
        (["export", "absent:make", "m.pt2", "--shape", "1,3,8,8"], "cannot be imported"),
        (["export", "small_model:number", "m.pt2", "--shape", "1,3,8,8"], "is or makes a int"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,x"], "no list of numbers"),
        (["export", "small_model:ready", "m.pt2", "--shape", "0,3,8,8"], "positive sizes"),
        (["export", "small_model:ready", "m.zip", "--shape", "1,3,8,8"], "suffix"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--composite", "best"], "no composite named"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--setting", "low"], "name=value"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--setting", "low=x y"], "the value of low"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--weights", "absent.pt"], "cannot be read"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--weights", "small_model.py"], "holds no weights"),
        (["export", "small_model:ready", "m.pt2", "--shape", "1,3,8,8", "--weights", "pickled.pt"], "holds no weights"),
        (["run", "absent.pt2", "images", "results"], "cannot be read"),
        (["run", "model.pt2", "absent", "results"], "no folder"),
        (["run", "model.pt2", "results", "results"], "no images"),
        (["run", "model.pt2", "images", "results", "--std", "0"], "std is not 0"),
        (["run", "model.pt2", "images", "results", "--mean", "1,2"], "one for each of 3 channels"),
        (["run", "model.pt2", "images", "results", "--target", "9"], "out of range"),
        (["run", "weights.pt2", "images", "results"], "relevance of the output as its target"),
        (["inspect", "small_model.py"], "damaged"),
    ],
)
def test_mistakes(folder, arguments, message):
    torch.save({"0.weight": Mistake()}, "pickled.pt")
    os.mkdir("results")
    if arguments[:2] == ["run", "model.pt2"]:
        exported("model.pt2")
    if arguments[1] == "weights.pt2":
        exported("weights.pt2", "--target", "weights")
    with pytest.raises(lrpfx.LrpfxError, match=message):
        run(*arguments)
    assert not os.listdir("results") and not os.path.exists("m.pt2")


class Mistake:
    """What a pickle could run."""


def test_as_a_program(folder):
    """Errors are messages without a traceback."""
    command = [sys.executable, "-m", "lrpfx.cli", "inspect", "absent.pt2"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2 and "ArtefactError: absent.pt2 cannot be read" in process.stderr
    assert "Traceback" not in process.stderr
