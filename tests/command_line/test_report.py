"""`lrpfx report`: photographs in, one page out; and `lrpfx compare`."""

import json
import os
import re
from pathlib import Path

import pytest
from command_line.commands import refused, run
from PIL import Image

MODEL = ("small_model:make", "--raw", "--size", "8")


def written(path="report.html"):
    (text,) = re.findall(r'id="document">(.*?)</script>', Path(path).read_text(), re.DOTALL)
    return json.loads(text)


def test_classes_and_composites(folder):
    (folder / "categories.txt").write_text("ant\nbee\ncat\ndog\neel\n")
    status, printed = run(
        *("report", *MODEL, "images", "--categories", "categories.txt", "--target", "bee", "--target", "3"),
        *("--composite", "epsilon_plus", "--composite", "EpsilonPlusFlat", "--title", "Small", "--output", "out/page.html"),
    )
    assert status == 0 and re.search(r"out/page\.html: 3 photographs, \d\.\d MB", printed)
    found = written("out/page.html")
    assert found["title"] == "Small" and sorted(sample["name"] for sample in found["samples"]) == ["0.png", "1.png", "2.png"]
    assert {(view["composite"], view["target"]["name"]) for view in found["views"]} == {
        (composite, name) for composite in ("epsilon_plus", "EpsilonPlusFlat") for name in ("bee", "dog")
    }


def test_composites_of_a_model_whose_graph_is_for_one_size(folder):
    """That of the first photograph: others need one of their own."""
    (folder / "sized.py").write_text(
        "from torch import nn\n\n\n"
        "class Sized(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(2 * x if x.shape[2] > 9 else x)\n\n\n"
        "def make():\n"
        "    return Sized(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))\n"
    )
    for name, size in {"0": (8, 8), "1": (12, 10), "2": (8, 8)}.items():
        Image.new("RGB", size, (200, 100, 50)).save(folder / "images" / f"{name}.png")
    composites = ("--composite", "epsilon_plus", "--composite", "EpsilonPlusFlat")
    status, printed = run("report", "sized:make", "--raw", "images", "--target", "1", *composites)
    assert status == 0, printed
    assert sorted(view["composite"] for view in written()["views"]) == ["EpsilonPlusFlat"] * 3 + ["epsilon_plus"] * 3
    status, printed = run("compare", "sized:make", "images/1.png", "--raw", *composites)
    assert status == 0, printed


def test_the_defaults(folder):
    status, _ = run("report", *MODEL, "images/1.png")
    (view,) = written()["views"]
    assert status == 0 and view["composite"] == "" and "GammaByDepth" in view["rules"] and view["ledger"]["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images/1.png", "--output", "a.png"), "written as .html"),
        (("images/1.png", "--set", "epsilon=1"), "--set is for the settings of one --composite"),
        (("images/1.png", "--composite", "epsilon_plus", "--composite", "epsilon_plus"), "names one twice"),
        (("images/1.png", "--target", "1", "--target", "1"), "--target names a class twice"),
        (("none.png",), "there is no file none.png"),
    ],
)
def test_mistakes(folder, arguments, message):
    before = sorted(os.listdir())
    refused(re.escape(message), run, "report", *MODEL, *arguments)
    assert sorted(os.listdir()) == before


def test_two_composites_are_compared(folder):
    status, printed = run(
        *("compare", *MODEL, "images/1.png", "--target", "2", "--composite", "epsilon_plus", "--composite", "EpsilonPlusFlat"),
        *("--output", "maps.png"),
    )
    with Image.open("maps.png") as picture:
        assert picture.width > 2 * picture.height and len(set(picture.convert("L").getdata())) > 50
    Path("maps.png").unlink()
    assert (
        status == 0
        and "relevance for 2" in printed
        and "nodes have other rules" in printed
        and "similarity of the maps" in printed
    )
    assert "ZPlus" in printed and "Flat" in printed


def test_two_models_are_compared(folder):
    """The class is that of the first one; with its weights, the other is the same model."""
    arguments = ("compare", *MODEL, "images/1.png", "--weights", "weights.pt", "--composite", "epsilon_plus")
    other = ("--other", "small_model:make")
    assert "similarity of the maps: 1.000" in run(*arguments, *other, "--other-weights", "weights.pt")[1]
    printed = run(*arguments, *other, "--target", "1")[1]
    assert "0 of " in printed and "relevance for 1" in printed and "similarity of the maps: 1.000" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images/1.png",), "--composite is given 0 times"),
        (("images/1.png", "--other-weights", "weights.pt", "--composite", "epsilon_plus"), "--composite is given 1 times"),
        (
            ("images/1.png", *("--composite", "epsilon_plus") * 2, "--other-weights", "w.pt"),
            "--other-weights are those of --other",
        ),
        (("none.png", *("--composite", "epsilon_plus") * 2), "none.png: there is no such file"),
        (("images/1.png", *("--composite", "epsilon_plus") * 2, "-o", "maps.txt"), "maps.txt: a picture is saved as"),
    ],
)
def test_what_cannot_be_compared(folder, arguments, message):
    refused(re.escape(message), run, "compare", *MODEL, *arguments)
