"""`lrpfx explain`: photographs in, pictures and a table out."""

import csv
import importlib
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import commands
from command_line.commands import exported_before, refused, run, the_model
from PIL import Image

import lrpfx
from lrpfx.command_line import explain as explain_command
from lrpfx.command_line import options
from lrpfx.command_line.image_files import images_in
from lrpfx.command_line.number_files import NumberOptions
from lrpfx.errors import InputError
from lrpfx.images.opening import image_files
from lrpfx.images.stored_preprocessing import StoredPreprocessing
from lrpfx.request import Box
from lrpfx.support.identity import fingerprints

pytestmark = pytest.mark.programs

SIZE = ("--size", "8")
NAMES = ["ant", "bee", "cat", "dog", "eel"]


def rows_of(folder="out"):
    return commands.rows_of(folder, "explanations.csv")


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


def test_preprocessing_changes_the_result_and_is_never_assumed(folder):
    refused(r"there is no known preprocessing for small_model:make.*--mean.*--raw", explained, "images/0.png")
    refused("--std is missing", explained, "images/0.png", "--mean", "0.5")
    refused("leave it out", explained, "images/0.png", "--mean", "0.5", "--raw")
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
        (("--target", "9"), "target 9 is out of range"),
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
    refused(message, explained, "images", "--raw", *SIZE, *options)


def test_a_photograph_that_cannot_be_read_costs_its_own_row(folder):
    (folder / "images" / "broken.png").write_bytes(b"no image")
    (folder / "images" / "cut.png").write_bytes((folder / "images" / "0.png").read_bytes()[:100])
    os.mkfifo("images/pipe.png")
    with pytest.raises(
        lrpfx.InputError,
        match=r"(?s)broken\.png: it is not an image.*cut\.png: it cannot be decoded: .*pipe\.png: it is not a file.*no\.png",
    ):
        explained("images", "no.png", "--raw", *SIZE)
    rows = rows_of()
    assert {name for name, row in rows.items() if row["problem"]} == {"broken.png", "cut.png", "pipe.png", "no.png"}
    assert all(os.path.exists(f"out/{name}.sheet.png") != bool(row["problem"]) for name, row in rows.items())


def test_a_photograph_that_the_model_cannot_take_costs_its_own_row(folder):
    """Without a size, each photograph keeps its own, and the dense layer takes one of them."""
    refused(r"(?s)1\.png: .*2\.png: ", explained, "images", "--raw")
    assert [name for name, row in rows_of().items() if not row["problem"]] == ["0.png"]


def test_a_run_that_was_stopped_goes_on(folder, monkeypatch):
    for number in range(3, 7):
        Image.new("RGB", (9, 9), (40 * number, 0, 0)).save(f"images/{number}.png")
    opened, calls = explain_command.opened_in_depth, []

    def stopped(path):
        calls.append(path.name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return opened(path)

    monkeypatch.setattr(explain_command, "opened_in_depth", stopped)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        groups = {
            "rules": options.CompositeOptions(),
            "options": options.ModelOptions(raw=True, size="8"),
            "numbers": NumberOptions(),
        }
        explain_command.explain("small_model:make", [Path("images")], output_folder=Path("out"), batch_size=2, **groups)
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
    rows = rows_of()
    assert set(rows) == {f"{number}{twice}.png" for number in range(3) for twice in ("", "-2")}
    assert rows["0.png"]["source"] == str(folder / "images" / "0.png")
    assert rows["0-2.png"]["source"] == str(folder / "others" / "0.png")


def test_a_photograph_keeps_its_name_and_takes_no_other(folder):
    """Runs with photographs of the same name in different folders overwrite nothing."""
    os.mkdir("others")
    shutil.copy("images/1.png", "others/0.png")
    explained("images/0.png", "--raw", *SIZE)
    first = Path("out/0.png.overlay.png").read_bytes()
    for _ in range(2):
        status, printed = explained("others/0.png", "--raw", *SIZE)
        assert status == 0 and "0-2.png" in printed and Path("out/0.png.overlay.png").read_bytes() == first
        assert {name: Path(row["source"]).parent.name for name, row in rows_of().items()} == {
            "0.png": "images",
            "0-2.png": "others",
        }
    explained("others", "images", "--raw", *SIZE)
    assert [row["source"].split("/")[-2:] for row in rows_of().values()] == [
        ["others", "0.png"],
        ["images", "0.png"],
        ["images", "1.png"],
        ["images", "2.png"],
    ]
    shutil.move("images/0.png", "0.png")
    explained("0.png", "--raw", *SIZE)
    assert rows_of()["0.png"]["source"] == str(folder / "0.png"), "the name of a file that is gone is free"


def test_own_pictures_are_not_explained(folder):
    for _ in range(2):
        run("explain", "small_model:make", "images", "--raw", *SIZE, "--output", "images/out")
        assert set(rows_of("images/out")) == {"0.png", "1.png", "2.png"}


def test_photographs_in_the_folder_of_results_are_explained(folder):
    """Pictures of results are not, in whatever folder above or below they are."""
    for name in ("x.overlay.png", "deeper.jpg"):
        Image.open("images/0.png").convert("RGB").save(f"images/{name}")
    photographs = {"0.png", "1.png", "2.png", "x.overlay.png", "deeper.jpg"}
    for _ in range(2):
        for output in ("images", "images/own"):
            status, printed = run("explain", "small_model:make", "images", "--raw", *SIZE, "--output", output)
            assert status == 0 and "5 of 5 explained" in printed and set(rows_of(output)) == photographs
    refused("no images in images/own but those that lrpfx made", explained, "images/own", "--raw", *SIZE)
    exported_before()
    for _ in range(2):
        assert run("run", "model.pt2", "images", "images/heat")[0] == 0
        assert set(commands.rows_of("images/heat")) == photographs


def test_pictures_of_other_settings_do_not_stay(folder):
    explained("images/0.png", "--raw", *SIZE, "--target", "1", "--target", "3")
    explained("images/0.png", "--raw", *SIZE)
    assert not os.path.exists("out/0.png.compare.png") and os.path.exists("out/0.png.overlay.png")
    explained("images/0.png", "--raw", *SIZE, "--target", "1", "--target", "3")
    (folder / "images" / "0.png").write_bytes(b"no image")
    with pytest.raises(lrpfx.InputError):
        explained("images/0.png", "--raw", *SIZE)
    assert not list(Path("out").glob("*.png"))


def test_the_suffixes_are_those_of_python(folder):
    os.mkdir("all")
    for suffix in Image.registered_extensions():
        (folder / "all" / f"image{suffix}").touch()
    Image.open("images/0.png").convert("RGB").save("all/photo.jfif")
    found = {image.path for image in images_in([Path("all")])}
    assert found == set(image_files(Path("all"))) and {Path("all/photo.jfif"), Path("all/image.avif")} <= found
    assert explained("all/photo.jfif", "--raw", *SIZE)[0] == 0


def test_a_name_of_a_class_wins_over_an_index(folder):
    (folder / "numbers.txt").write_text("1\n2\n3\n4\n7\n")
    named = ("--categories", "numbers.txt")
    for target, expected in (("2", "2"), ("0", "1"), ("7", "7")):
        explained("images/0.png", "--raw", *SIZE, *named, "--target", target)
        assert rows_of()["0.png"]["explained"].split()[0] == expected
    exported_before()
    for target, expected in (("2", "1"), ("0", "0"), ("7", "4")):
        run("run", "model.pt2", "images", f"heat{target}", *named, "--target", target)
        assert {row["explained"] for row in commands.rows_of(f"heat{target}").values()} == {expected}
    (folder / "letters.txt").write_text("cat\nCat\n2\n2\nbee\n")
    assert [options.class_of(text, ["cat", "Cat", "2", "2"]) for text in ("cat", "Cat", "3")] == [0, 1, 3]
    for text in ("CAT", "2"):
        with pytest.raises(lrpfx.InputError, match="give an index"):
            options.class_of(text, ["cat", "Cat", "2", "2"])
    for command in (("explain", "small_model:make", "images"), ("run", "model.pt2", "images", "other")):
        refused("class -1 is out of range", run, *command, "--raw", *named, "--target", "-1")


def test_positions_and_boxes():
    names = ["cat", "dog", "a, b", "2,cat"]
    texts = ["dog", "7, dog", "7,a, b", "2,cat", "0,1"]
    assert options.classes_of(texts, names) == [1, (7, 1), (7, 2), 3, (0, 1)]
    found = options.boxes_of(["1", "0:x1", " 2:dog", "1,2,3.5,4:0"], [1])
    assert found == [Box(1, class_=1), Box(0, "x1", 1), Box(2, "dog", 1), Box.near((1, 2, 3.5, 4), 1, 0)]
    for text, message in (("1.5", "number of a box"), ("cat", "list of numbers"), ("1,2", "x1 < x2"), ("-1", "at least 0")):
        refused(message, options.boxes_of, [text], [])
    refused("of one class, or of any", options.boxes_of, ["0"], [1, 2])
    refused("--mask is for segmentation", run, "explain", "m:n", "a.png", "--box", "0", "--mask", "b.png", "--target", "1")


def test_entries_of_a_cell_can_be_told_apart(folder):
    names = ["crane; the bird", 'so-called "crane"', "dog", "eel", "a, b"]
    (folder / "categories.txt").write_text("\n".join(names))
    _, printed = explained("images/0.png", "--raw", *SIZE, "--categories", "categories.txt", "--top", "5")
    (cells,) = csv.reader([rows_of()["0.png"]["predicted"]], delimiter=";", skipinitialspace=True)
    assert {cell.rpartition(" ")[0] for cell in cells} == set(names)
    assert all(any(line.strip().startswith(cell) or f" {cell}" in line for line in printed.splitlines()) for cell in cells)


CHANGING = """
import torch
from torch import nn
from helper import activation

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)
        self.settings = {"bias": [0.0]}

    def forward(self, x):
        return self.layers[2](self.layers[1](activation(self.layers[0](x)))) * self.factor + self.settings["bias"][0]

make = Model
"""


def test_a_changed_model_is_explained_anew(folder, monkeypatch):
    """Its own code, code that it calls, buffers that its state_dict lacks, and attributes."""

    def calls():
        for name in ("changing", "helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        count.clear()
        explained("images/0.png", "--raw", *SIZE, model="changing:make")
        return len(count)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    opened, count = explain_command.opened_in_depth, []
    monkeypatch.setattr(explain_command, "opened_in_depth", lambda path: count.append(path) or opened(path))
    (folder / "helper.py").write_text("import torch\nactivation = torch.relu\n")
    (folder / "changing.py").write_text(CHANGING)
    assert calls() == 1 and calls() == 0
    for before, after in (
        ("Flatten(), nn", "Flatten(),  nn"),
        ("torch.tensor(1.0)", "torch.tensor(float(open('value').read()))"),
        ("[0.0]", "[float(open('value').read())]"),
    ):
        (folder / "value").write_text("2.0")
        (folder / "changing.py").write_text(CHANGING.replace(before, after))
        assert calls() == 1 and calls() == 0
        (folder / "value").write_text("3.0")
        assert calls() == (1 if "value" in after else 0)
    (folder / "helper.py").write_text("import torch\nactivation = torch.tanh\n")
    assert calls() == 1 and calls() == 0
    monkeypatch.setattr(fingerprints, "version", lambda package: "0.0.0")
    assert calls() == 1


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
    with pytest.warns(lrpfx.errors.LrpfxWarning, match="replace the preprocessing that model.pt2 holds"):
        run("run", "model.pt2", "images", "raw", "--raw")
    assert (folder / "raw" / "outputs.csv").read_text() != (folder / "heat" / "outputs.csv").read_text()
    explanation = lrpfx.explain(lrpfx.load("model.pt2"), "images/0.png")
    assert f"{explanation.target.name} {explanation.target.probability:.1%}" == from_file["0.png"]["explained"]
    with pytest.raises(lrpfx.InputError, match="composite= is for a model that has none yet"):
        explained("images", "--composite", "epsilon_plus", model="model.pt2")


def test_a_program_without_preprocessing_asks_for_it(folder):
    run("export", "small_model:make", "plain.pt2", "--shape", "1,3,8,8")
    for command in (("explain", "plain.pt2", "images"), ("run", "plain.pt2", "images", "heat")):
        refused(r"the file holds no preprocessing for plain\.pt2.*--mean.*--raw", run, *command)
    assert not os.path.exists("heat")
    assert explained("images", "--raw", model="plain.pt2")[0] == 0
    with pytest.raises(lrpfx.InputError, match="has shape 3×8×8, but the preprocessing makes 3×9×9: cover 9×9"):
        explained("images", "--raw", "--size", "9", model="plain.pt2")


def test_no_program_is_started_for_a_photograph(folder, monkeypatch):
    commands.write_postscript(folder, folder / "page.png", monkeypatch)
    refused(r"page\.png", explained, "page.png", "--raw", *SIZE)
    assert not (folder / "started").exists()


def test_addresses_are_refused(folder):
    refused("is an address", explained, "https://example.org/cat.jpg", "--raw", *SIZE)


def test_grey_models(folder):
    (folder / "grey.py").write_text(
        "from torch import nn\nmake = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))\n"
    )
    assert explained("images", "--mean", "0.5", "--std", "0.5", *SIZE, model="grey:make")[0] == 0
    assert len(rows_of()) == 3


def test_dark_photographs_of_16_bits_are_refused(folder):
    """As in Python: 12 bits in 16 would be nearly black."""
    Image.fromarray(np.full((9, 9), 4000, dtype=np.uint16)).save("images/dark.png")
    with pytest.raises(InputError, match="none above 4000"):
        explained("images/dark.png", "--raw", *SIZE)


def test_photographs_are_compared_with_a_reference(folder):
    command = ("images/0.png", "--raw", *SIZE, "--composite", "deep_lift")
    status, printed = explained(*command, "--reference", "0.5")
    assert status == 0 and "DeepLIFT" in printed
    explanation = lrpfx.explain(
        the_model(),
        "images/0.png",
        preprocess=StoredPreprocessing((0,) * 3, (1,) * 3, (8, 8)),
        composite="deep_lift",
        reference=0.5,
    )
    assert float(rows_of()["0.png"]["relevance"]) == pytest.approx(explanation.balance.inputs, rel=1e-4)
    refused("pass --reference", run, "explain", "small_model:make", *command, "--output", "other")


def test_references_are_checked_before_a_model_is_loaded(folder):
    difference = ("--composite", "deep_lift")
    for command in ("explain", "dataset"):
        begin = (command, "no_module:make", "images", "--output", "other")
        refused("pass --reference", run, *begin, *difference)
        refused("--reference is for --composite deep_lift", run, *begin, "--reference", "0")
        refused(
            "--reference must be a finite number, not nan", run, *begin, *difference, "--reference", "0", "--reference", "nan"
        )
    refused("take --reference", run, "compare", "no_module:make", "images/0.png", *difference, *difference)
    refused("take --reference", run, "report", "no_module:make", "images/0.png", *difference, "--output", "a.html")


SEGMENTER = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 4, 3, stride=2, padding=1).float().eval()
"""


def test_a_mask_says_where_a_class_is_explained(folder, monkeypatch):
    (folder / "small_segmenter.py").write_text(SEGMENTER)
    monkeypatch.delitem(sys.modules, "small_segmenter", raising=False)
    sizes = {name: Image.open(f"images/{name}.png").size for name in ("0", "1")}
    masks = {name: np.zeros(size[::-1], dtype=np.uint8) for name, size in sizes.items()}
    (folder / "masks").mkdir()
    for name, mask in masks.items():
        mask[: len(mask) // 2] = 255
        Image.fromarray(mask).save(f"masks/{name}.png")
    explained = partial(run, "explain", "small_segmenter:make", "--raw", "--output", "out", "--target", "2")
    assert explained("images/0.png", "images/1.png", "--mask", "masks")[0] == 0
    model = importlib.import_module("small_segmenter").make()
    for name in masks:
        explanation = lrpfx.explain(
            model,
            f"images/{name}.png",
            lrpfx.Region(2, masks[name] > 0),
            preprocess=StoredPreprocessing((0,) * 3, (1,) * 3),
        )
        assert explanation.answers[0].region.any() and not explanation.answers[0].region.all()
        assert float(rows_of()[f"{name}.png"]["relevance"]) == pytest.approx(explanation.balance.inputs, rel=1e-4)
    before = rows_of()["0.png"]["relevance"]
    reported = "report", "small_segmenter:make", "images/0.png", "images/1.png", "--raw", "--target", "2", "--mask", "masks"
    assert run(*reported)[0] == 0
    (text,) = re.findall(r'id="document">(.*?)</script>', Path("report.html").read_text(), re.DOTALL)
    for view in json.loads(text)["views"]:
        assert "in a mask" in view["target"]["name"]

    Image.fromarray(255 - masks["0"]).save("masks/0.png")
    assert explained("images/0.png", "images/1.png", "--mask", "masks")[0] == 0
    assert rows_of()["0.png"]["relevance"] != before, "another mask is another region"

    refused("no masks", explained, "images", "--mask", "masks")  # of the third photograph
    command = "dataset", "small_segmenter:make", "images", "--raw", "--output", "store", "--target", "2"
    refused("lrpfx explain and lrpfx report take --mask", run, *command, "--mask", "masks")
    refused("--target once", explained, "images/0.png", "--mask", "masks", "--target", "1")
    refused("no file or folder", explained, "images/0.png", "--mask", "nowhere")
    Image.fromarray(masks["1"]).save("masks/0.png")
    refused("pixels", explained, "images/0.png", "--mask", "masks/0.png")
    Image.fromarray(np.full(masks["0"].shape, 100, dtype=np.uint8)).save("masks/0.png")
    refused("no mask", explained, "images/0.png", "--mask", "masks/0.png")
