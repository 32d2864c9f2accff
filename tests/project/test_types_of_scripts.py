"""Type checkers find the mistakes in a user's script, and complain of nothing else."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.programs

SCRIPT = """
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lrpfx

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10)).eval()
explainer = lrpfx.Explainer(model, preprocess=lambda image: torch.zeros(3, 3, 3), categories=["cat", "dog"])
explanation = explainer("photo.jpg", "cat")
explanation.sheet(sigma=2.0).save("sheet.png")
explanation.shet()  # wrong
found = lrpfx.Explainer(lrpfx.detection.heads(model))("photo.jpg")
found.boxes[0].overlay().save("box.png")
found.boxes[0].nme  # wrong
heads = lrpfx.detection.heads(model)
lrpfx.explain(heads, "photo.jpg").boxes[0].overlay().save("box.png")
lrpfx.explain(heads, "photo.jpg").boxs  # wrong
lrpfx.explain(heads, ["photo.jpg"])[0].boxes[0].overlay()
one_photograph = lrpfx.Explainer(heads)(torch.zeros(3, 8, 8))
assert isinstance(one_photograph, lrpfx.DetectionExplanation)
one_photograph.boxes[0].nme  # wrong
lrpfx.explain(heads, torch.zeros(3, 8, 8)).boxs  # wrong
explanation.boxes  # wrong
explanation.heatmap(sigma="wide")  # wrong
explanation.top(3)[0].nme  # wrong
explanation.ledger.totl("bias")  # wrong
explanations = explainer([Path("photo.jpg"), "other.jpg"])
explanations.shet()  # wrong
for one in explanations:
    one.ovrlay()  # wrong
    one.overlay()
explainer([torch.zeros(3, 3, 3), np.zeros((3, 3, 3))])[1].overlay()
explainer(torch.zeros(2, 3, 3, 3)).sheet()
explainer(torch.zeros(2, 3, 3, 3)).overlay()  # wrong
for one in explainer(np.zeros((2, 3, 3, 3))):  # wrong
    pass
several = explainer(torch.zeros(2, 3, 3, 3))
assert isinstance(several, lrpfx.Explanations)
several[1].overlay()
lrpfx.explain(model, "photo.jpg", preprocess=lambda image: torch.zeros(3, 3, 3)).shet()  # wrong
lrpfx.explain(model, ["photo.jpg"], preprocess=lambda image: torch.zeros(3, 3, 3))[0].sheet()


def tokenizer(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(1, 2)}


text = lrpfx.explain(model, "A text", tokenizer=tokenizer)
text.heatmap().to_html()
text.heatmap().to_htm()  # wrong
texts = lrpfx.Explainer(model, tokenizer=tokenizer)
texts(["A text", "Another"])[0].picture.to_image()
texts("A text").photograph  # wrong
lrpfx.Explainer(model, preproces=None)  # wrong
lrpfx.transfrom(model, lrpfx.composites.EpsilonPlus())  # wrong
explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlus())
attribution = lrpfx.attribute(explain_model, torch.zeros(1, 3, 3, 3), target=1)
attribution.relevance.sum().item()
attribution.relevence  # wrong
lrpfx.ledger(explain_model, torch.zeros(1, 3, 3, 3)).totl("bias")  # wrong
lrpfx.assignment(explain_model).rule_off("0")  # wrong
lrpfx.check(model, lrpfx.composites.EpsilonPlus()).okay  # wrong
lrpfx.load("model.onnx").explian  # wrong
lrpfx.composites.EpsilonPlusFlatt()  # wrong


class Frame:  # as a DataFrame, which pandas has no types for
    columns = ["age", "size"]

    def to_numpy(self) -> Any:
        return None


lrpfx.explain(model, Frame()).beeswarm().save("swarm.png")
lrpfx.explain(model, Frame()).waterfall()  # wrong
lrpfx.explain(model, Frame(), form="series").relevance.sum()
lrpfx.explain(model, Frame(), form="series").beeswarm()  # wrong
lrpfx.Explainer(model, form="table")(Frame()).relevance.sum()
lrpfx.Explainer(model, form="series")(Frame()).steps
lrpfx.Explainer(model, form="series")(Frame()).waterfall()  # wrong
lrpfx.Explainer(model)(Frame()).waterfall()  # wrong


class Column:  # as a Series
    def to_frame(self) -> Frame:
        return Frame()

    def to_numpy(self) -> Any:
        return None


class Scan:  # as an image of nibabel
    affine = np.eye(4)

    def get_fdata(self) -> Any:
        return None


def of_arrays(values: np.ndarray, waves: list[np.ndarray]) -> None:  # arrays of any values are no Any
    lrpfx.explain(model, values).shet()  # wrong
    lrpfx.explain(model, values, form="table").beeswrm()  # wrong
    lrpfx.explain(model, waves, rate=16000)[0].spectrm()  # wrong
    lrpfx.Explainer(model)(values).shet()  # wrong
    lrpfx.Explainer(model, form="series")(values).shet()  # wrong


lrpfx.explain(model, Column(), form="table").relevance.sum()
lrpfx.explain(model, Column()).shet()  # wrong
lrpfx.explain(model, Column(), tokenizer=tokenizer)[0].picture.to_image()
lrpfx.explain(model, Scan()).planes()
lrpfx.explain(model, [Scan()])[0].afine  # wrong
lrpfx.Explainer(model, form="volume")(Scan()).afine  # wrong
lrpfx.explain(model, 3)  # wrong
lrpfx.explain(model, "head.nii.gz", form="volume").planes().save("planes.png")
lrpfx.explain(model, "head.nii.gz", form="volume").heatmap()  # wrong
lrpfx.explain(model, [torch.zeros(1, 2, 2, 2)], form="volume")[0].montage(6)
lrpfx.Explainer(model, form="volume")(["a.nii", "b.nii"])[1].affine
lrpfx.Explainer(model, form="volume")("a.nii").afine  # wrong
lrpfx.Explainer(model, rate=16000)([torch.zeros(800)])[0].spectrum()
lrpfx.explain(model, [np.zeros(800)], rate=16000)[0].spectrm()  # wrong
rows = lrpfx.explain(model, np.zeros((5, 3)), form="table", names=["a", "b", "c"])
rows.save("table.csv")
rows.waterfall()  # wrong
assert isinstance(rows, lrpfx.TableExplanations)
rows.beeswarm()
lrpfx.Explainer(model, form="series")([np.zeros((9, 2))])[0].steps
one_scan = lrpfx.explain(model, torch.zeros(1, 2, 2, 2), form="volume")
assert isinstance(one_scan, lrpfx.VolumeExplanation)
one_scan.planes()
both = lrpfx.explain(model, {"image": torch.zeros(1, 3, 3, 3), "facts": torch.zeros(1, 2)})
assert isinstance(both, lrpfx.JointExplanation)
both.shares["image"]
both.shars  # wrong
lrpfx.Explainer(model, form="tables")  # wrong
explainer("photo.jpg", lrpfx.Region("cat", mask=torch.ones(8, 8))).overlay()


def sheet_of(explainer: lrpfx.Explainer, path: str) -> bytes:
    return explainer(path).sheet().tobytes()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script beside the package as it is installed, with passes/ in it."""
    folder = tmp_path_factory.mktemp("script")
    shutil.copytree(ROOT / "lrpfx", folder / "lrpfx")
    shutil.copytree(ROOT / "passes", folder / "lrpfx" / "passes", dirs_exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def wrong_lines():
    return {number for number, line in enumerate(SCRIPT.split("\n"), 1) if line.endswith("# wrong")}


def run(script, *command):
    return subprocess.run([sys.executable, "-m", *command], cwd=script.parent, capture_output=True, text=True).stdout


def test_mypy(script):
    settings = [
        "--strict",
        "--allow-any-generics",
        "--no-warn-unused-ignores",
        "--follow-imports",
        "silent",
        "--cache-dir",
        str(script.parent / "cache"),
    ]
    printed = run(script, "mypy", *settings, "script.py")
    found = re.findall(r"^script\.py:(\d+): error: (.*)", printed, re.MULTILINE)
    assert {int(number) for number, _ in found} == wrong_lines(), printed
    assert any('no attribute "shet"; maybe "sheet"?' in message for _, message in found)


@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="needs pyright, and for its first run npm's registry")
def test_pyright(script):
    printed = run(script, "pyright", "--outputjson", "--pythonpath", sys.executable, "script.py")
    found = [one for one in json.loads(printed)["generalDiagnostics"] if one["severity"] == "error"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == wrong_lines(), found
