"""`lrpfx explain`: photographs in, pictures and a table out."""

import csv
import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line.commands import run
from PIL import Image

import lrpfx
from lrpfx.command_line import explain as explain_command
from lrpfx.deploy.preprocessing import StoredPreprocessing

SIZE = ("--size", "8")
NAMES = ["ant", "bee", "cat", "dog", "eel"]


def rows_of(folder="out"):
    with open(f"{folder}/explanations.csv", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def explained(*arguments, model="small_model:make"):
    return run("explain", model, *arguments, "--output", "out")


def test_pictures_and_a_table(folder):
    (folder / "categories.txt").write_text("ant\nbee\ncat\ndog\neel\n")
    (folder / "images" / "deeper").mkdir()
    shutil.copy("images/0.png", "images/deeper/0.png")
    (folder / "images" / ".checkpoints").mkdir()
    shutil.copy("images/0.png", "images/.checkpoints/0.png")
    (folder / "images" / "._1.png").write_bytes(b"not an image, but what a system notes about one")
    status, printed = explained("images", "--raw", *SIZE, "--categories", "categories.txt", "--top", "2")
    assert status == 0 and "4 of 4 explained: out/" in printed and "rules: GammaByDepth(" in printed
    pictures = {str(path.relative_to("out")) for path in Path("out").rglob("*.png")}
    assert pictures == {f"{name}.png.{kind}.png" for name in ("0", "1", "2", "deeper/0") for kind in ("overlay", "sheet")}
    assert Image.open("out/1.png.overlay.png").size == (10, 20)
    row = rows_of()["1.png"]
    explanation = lrpfx.explain(
        the_model(),
        "images/1.png",
        preprocess=StoredPreprocessing((0,) * 3, (1,) * 3, (8, 8)),
        categories=["ant", "bee", "cat", "dog", "eel"],
    )
    assert row["predicted"] == "; ".join(f"{one.name} {one.probability:.1%}" for one in explanation.top(2))
    assert row["explained"].startswith(explanation.target.name) and row["explained"] in printed
    assert float(row["relevance"]) == pytest.approx(explanation.balance.inputs, rel=1e-4)
    assert np.array_equal(np.asarray(Image.open("out/1.png.overlay.png")), np.asarray(explanation.overlay()))


def the_model():
    spec = importlib.util.spec_from_file_location("small_model_again", "small_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make().eval()


def test_preprocessing_changes_the_result_and_is_never_assumed(folder):
    with pytest.raises(lrpfx.InputError, match=r"there is no known preprocessing for small_model:make.*--mean.*--raw"):
        explained("images/0.png")
    with pytest.raises(lrpfx.InputError, match="--std is missing"):
        explained("images/0.png", "--mean", "0.5")
    with pytest.raises(lrpfx.InputError, match="leave it out"):
        explained("images/0.png", "--mean", "0.5", "--raw")
    assert not os.path.exists("out")
    explained("images/0.png", "--raw", *SIZE)
    raw = rows_of()["0.png"]["relevance"]
    explained("images/0.png", "--mean", "0.5,0.4,0.3", "--std", "0.2", *SIZE)
    assert float(rows_of()["0.png"]["relevance"]) != pytest.approx(float(raw))


def test_several_classes_are_compared(folder):
    explained("images/0.png", "--raw", *SIZE, "--target", "1", "--target", "3")
    row = rows_of()["0.png"]
    assert [one.split()[0] for one in row["explained"].split("; ")] == ["1", "3"] and "; " in row["relevance"]
    assert os.path.exists("out/0.png.compare.png")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--target", "9"), "class 9 is out of range"),
        (("--target", "cat"), "the names are not known"),
        (("--set", "gamma=1"), "--set is for the settings of a --composite"),
        (("--composite", "epsilon_plas"), "Did you mean 'epsilon_plus'"),
        (("--categories", "weights.pt"), "is not a text"),
        (("--categories", "two.txt"), "2 names of classes, but the output has 5"),
        (("--metadata", "DEFAULT"), "--metadata is for models of torchvision"),
    ],
)
def test_mistakes_end_the_command(options, message, folder):
    (folder / "two.txt").write_text("cat\ndog\n")
    with pytest.raises(lrpfx.InputError, match=message):
        explained("images", "--raw", *SIZE, *options)


def test_a_photograph_that_cannot_be_read_costs_its_own_row(folder):
    (folder / "images" / "broken.png").write_bytes(b"no image")
    (folder / "images" / "cut.png").write_bytes((folder / "images" / "0.png").read_bytes()[:100])
    os.mkfifo("images/pipe.png")
    with pytest.raises(
        lrpfx.InputError, match=r"(?s)broken\.png: Unid.*cut\.png: .*pipe\.png: InputError: it is not a file.*no\.png"
    ):
        explained("images", "no.png", "--raw", *SIZE)
    rows = rows_of()
    assert {name for name, row in rows.items() if row["problem"]} == {"broken.png", "cut.png", "pipe.png", "no.png"}
    assert all(os.path.exists(f"out/{name}.sheet.png") != bool(row["problem"]) for name, row in rows.items())


def test_a_photograph_that_the_model_cannot_take_costs_its_own_row(folder):
    """Without a size, each photograph keeps its own, and the dense layer takes one of them."""
    with pytest.raises(lrpfx.InputError, match=r"(?s)1\.png: .*2\.png: "):
        explained("images", "--raw")
    assert [name for name, row in rows_of().items() if not row["problem"]] == ["0.png"]


def test_a_run_that_was_stopped_goes_on(folder, monkeypatch):
    for number in range(3, 7):
        Image.new("RGB", (9, 9), (40 * number, 0, 0)).save(f"images/{number}.png")
    opened, calls = explain_command.opened, []

    def stopped(path):
        calls.append(path.name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return opened(path)

    monkeypatch.setattr(explain_command, "opened", stopped)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        explain_command.explain("small_model:make", [Path("images")], Path("out"), raw=True, size="8", top=3, batch_size=2)
    assert list(rows_of()) == ["0.png", "1.png"]
    status, printed = explained("images", "--raw", *SIZE)
    assert status == 0 and "7 of 7 explained, 2 of them from before: out/" in printed and len(calls) == 5 + 5
    explained("images", "--raw", *SIZE)
    assert len(calls) == 10, "nothing was left to do"
    Image.new("RGB", (9, 9), (0, 99, 0)).save("images/5.png")
    os.unlink("out/6.png.overlay.png")
    explained("images", "--raw", *SIZE)
    assert calls[10:] == ["5.png", "6.png"]
    explained("images", "--raw", *SIZE, "--composite", "EpsilonPlus", "--set", "epsilon=0.1")
    assert len(calls) == 12 + 7 and {row["composite"] for row in rows_of().values()} == {"EpsilonPlus(epsilon=0.1)"}


def test_names_of_files_in_several_folders_stay_apart(folder):
    shutil.copytree("images", "others")
    explained("images", "others", "images/0.png", "--raw", *SIZE)
    assert set(rows_of()) == {f"{number}{twice}.png" for number in range(3) for twice in ("", "-2")} | {"0-3.png"}


def test_own_pictures_are_not_explained(folder):
    for _ in range(2):
        run("explain", "small_model:make", "images", "--raw", *SIZE, "--output", "images/out")
        assert set(rows_of("images/out")) == {"0.png", "1.png", "2.png"}


def test_a_program_needs_no_options(folder):
    """What the file of a program holds is applied by explain and run, and options change it."""
    (folder / "categories.txt").write_text("ant\nbee\ncat\ndog\neel\n")
    stored = ("--mean", "0.5,0.4,0.3", "--std", "0.2", "--resize", "9", "--size", "8")
    run(
        "export",
        "small_model:make",
        "model.pt2",
        *stored,
        "--categories",
        "categories.txt",
        "--composite",
        "epsilon_plus",
        "--fixed-batch",
    )
    manifest = lrpfx.load("model.pt2").manifest
    assert manifest["preprocessing"] == {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2] * 3,
        "size": [8, 8],
        "resize": 9,
        "interpolation": "bilinear",
    }
    assert manifest["categories"] == NAMES
    explained("images", model="model.pt2")
    from_file = rows_of()
    explained("images", *stored, "--categories", "categories.txt", "--composite", "EpsilonPlus")
    for name, row in rows_of().items():
        assert {key: row[key] for key in ("predicted", "explained")} == {
            key: from_file[name][key] for key in ("predicted", "explained")
        }
        assert float(row["relevance"]) == pytest.approx(float(from_file[name]["relevance"]), rel=1e-4)
    assert run("run", "model.pt2", "images", "heat", "--target", "cat")[0] == 0
    with open("heat/outputs.csv") as file:
        assert {row["explained"] for row in csv.DictReader(file)} == {"2"}
    run("run", "model.pt2", "images", "raw", "--raw")
    assert (folder / "raw" / "outputs.csv").read_text() != (folder / "heat" / "outputs.csv").read_text()
    explanation = lrpfx.explain(lrpfx.load("model.pt2"), "images/0.png")
    assert f"{explanation.target.name} {explanation.target.probability:.1%}" == from_file["0.png"]["explained"]
    with pytest.raises(lrpfx.InputError, match="composite= is for a model that has none yet"):
        explained("images", "--composite", "epsilon_plus", model="model.pt2")


def test_a_program_without_preprocessing_asks_for_it(folder):
    run("export", "small_model:make", "plain.pt2", "--shape", "1,3,8,8")
    for command in (("explain", "plain.pt2", "images"), ("run", "plain.pt2", "images", "heat")):
        with pytest.raises(lrpfx.InputError, match=r"the file holds no preprocessing for plain\.pt2.*--mean.*--raw"):
            run(*command)
    assert not os.path.exists("heat")
    assert explained("images", "--raw", model="plain.pt2")[0] == 0
    with pytest.raises(lrpfx.InputError, match="the preprocessing makes 3 channels: cover 9×9"):
        explained("images", "--raw", "--size", "9", model="plain.pt2")


def test_no_program_is_started_for_a_photograph(folder, monkeypatch):
    (folder / "bin").mkdir()
    (folder / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {folder}/started\nexit 1\n")
    (folder / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    (folder / "page.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(lrpfx.InputError, match=r"page\.png"):
        explained("page.png", "--raw", *SIZE)
    assert not (folder / "started").exists()


def test_addresses_are_refused(folder):
    with pytest.raises(lrpfx.InputError, match="is an address"):
        explained("https://example.org/cat.jpg", "--raw", *SIZE)


def test_grey_models(folder):
    (folder / "grey.py").write_text(
        "from torch import nn\nmake = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))\n"
    )
    assert explained("images", "--mean", "0.5", "--std", "0.5", *SIZE, model="grey:make")[0] == 0
    assert len(rows_of()) == 3
