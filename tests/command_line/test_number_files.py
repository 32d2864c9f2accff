"""Commands for tables, series, sounds, volumes, graphs and several inputs: the relevance in files is that of the front door."""

import importlib
import json
import re
import sys
import wave
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_line.commands import refused, run

import lrpfx
import lrpfx.datasets
from lrpfx.command_line.number_files import sound_in
from lrpfx.command_line.terminal import in_options
from lrpfx.errors import InputError

pytestmark = pytest.mark.programs

MODELS = """
import torch
from torch import nn

def made(*layers):
    return nn.Sequential(*layers).float().eval()

def table():
    torch.manual_seed(0)
    return made(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def series():
    torch.manual_seed(0)
    return made(nn.Flatten(), nn.Linear(60, 8), nn.ReLU(), nn.Linear(8, 2))

def voxels():
    torch.manual_seed(0)
    return made(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))

def images():
    torch.manual_seed(0)
    return made(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def sound():
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 4, 9), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
    return made(nn.Unflatten(1, (1, -1)), *layers)

def mono():
    torch.manual_seed(0)
    return made(nn.Conv1d(1, 4, 9), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))

def volume():
    torch.manual_seed(0)
    return made(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))

class Graph(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.sent, self.head, self.mean = nn.Linear(3, 8), nn.Linear(8, 2), mean

    def forward(self, x, edge_index):
        states = self.sent(x).relu()
        states = torch.zeros_like(states).index_add(0, edge_index[1], states[edge_index[0]])
        return self.head(states.mean(0, keepdim=True) if self.mean else states)

class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])

def steps():
    torch.manual_seed(0)
    return Steps().float().eval()

def graph():
    torch.manual_seed(0)
    return Graph(True).float().eval()

def nodes():
    torch.manual_seed(0)
    return Graph(False).float().eval()

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters, self.dense = nn.Conv2d(3, 2, 3), nn.Linear(2, 2)

    def forward(self, image, facts):
        return self.filters(image).relu().mean((2, 3)) + self.dense(facts)

def both():
    torch.manual_seed(0)
    return Both().float().eval()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "number_models", raising=False)
    (tmp_path / "number_models.py").write_text(MODELS)
    return tmp_path


explained = partial(run, "explain")


def model(name):
    return getattr(importlib.import_module("number_models"), name)()


def test_a_table():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(7, 3)), columns=["age", "size", "rooms"])
    frame.to_csv("houses.csv", index=False)
    status, printed = explained("number_models:table", "houses.csv", "--target", "1", "--output", "out")
    assert status == 0 and "houses.csv" in printed and "EpsilonPlus" in printed
    expected = lrpfx.explain(model("table"), frame, 1).to_pandas()
    found = pd.read_csv("out/houses.csv", index_col=0)
    assert list(found) == ["age", "size", "rooms"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert Path("out/houses.sheet.png").stat().st_size > 1000


def test_series_and_names():
    values = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    np.save("week.npy", values)
    status, _ = explained("number_models:series", "week.npy", "--form", "series", "--names", "a, b,c", "--output", "out")
    assert status == 0
    expected = lrpfx.explain(model("series"), values, form="series", names=["a", "b", "c"])
    found = pd.read_csv("out/week.csv", index_col=0)
    np.testing.assert_allclose(found[["a", "b", "c"]], expected.relevance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("width", "dtype"), [(1, np.uint8), (2, "<i2"), (3, None), (4, "<i4")])
@pytest.mark.parametrize("channels", [1, 2])
def test_sounds(width, dtype, channels):
    values = np.random.default_rng(0).integers(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1), (400, channels))
    if width == 3:
        content = b"".join(int(one).to_bytes(3, "little", signed=True) for one in values.ravel())
    else:
        content = (values + (128 if width == 1 else 0)).astype(dtype).tobytes()
    with wave.open("bird.wav", "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(content)
    read, rate = sound_in(Path("bird.wav"))
    heard = (values / 2.0 ** (8 * width - 1)).astype(np.float32).T
    np.testing.assert_allclose(read, heard[0] if channels == 1 else heard[None], atol=1e-7)
    assert rate == 8000
    if channels == 1:
        assert explained("number_models:sound", "bird.wav", "--output", "out")[0] == 0
        expected = lrpfx.explain(model("sound"), heard[0], rate=8000)
        found = pd.read_csv("out/bird.csv", index_col=0)
        np.testing.assert_allclose(found["relevance"], expected.relevance, rtol=1e-3, atol=1e-6)
        assert found.index[-1] == pytest.approx(399 / 8000)


def test_volumes():
    nibabel = pytest.importorskip("nibabel")
    values = np.random.default_rng(0).random((5, 6, 7), dtype=np.float32)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 2, 1])), "head.nii.gz")
    np.save("other.npy", values[None])
    status, _ = explained("number_models:volume", "head.nii.gz", "other.npy", "--output", "out")
    assert status == 0
    expected = lrpfx.explain(model("volume"), values).relevance
    np.testing.assert_allclose(nibabel.load("out/head.nii.gz").get_fdata(), expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(np.load("out/other.npz")["relevance"], expected, rtol=1e-4, atol=1e-7)


def head(name, values, shift=0.0):
    """A volume in a file, with voxels of two millimetres."""
    nibabel = pytest.importorskip("nibabel")
    affine = np.diag([2.0, 2, 2, 1])
    affine[0, 3] = shift
    nibabel.save(nibabel.Nifti1Image(values, affine), name)
    return name


def test_masks_of_volumes(folder):
    nibabel = pytest.importorskip("nibabel")
    generator = np.random.default_rng(0)
    volumes = [generator.random((5, 6, 7), dtype=np.float32) for _ in range(2)]
    masks = [generator.random((5, 6, 7)) > 0.5 for _ in range(2)]
    expected = [
        lrpfx.explain(model("voxels"), one, lrpfx.Region(2, mask)).relevance for one, mask in zip(volumes, masks, strict=True)
    ]
    files = [head(f"{name}.nii.gz", one) for name, one in zip("ab", volumes, strict=True)]
    np.save("array.npy", volumes[1])
    (folder / "masks").mkdir()
    for name, mask in zip("ab", masks, strict=True):
        head(f"masks/{name}.nii", mask.astype(np.uint8))
    np.save("mask.npy", masks[1][None])
    command = "explain", "number_models:voxels"
    assert run(*command, *files, "--target", "2", "--mask", "masks", "--output", "out")[0] == 0
    for name, one in zip("ab", expected, strict=True):
        np.testing.assert_allclose(nibabel.load(f"out/{name}.nii.gz").get_fdata(), one, rtol=1e-4, atol=1e-7)
    assert run(*command, "array.npy", "--target", "2", "--mask", "mask.npy", "--output", "out")[0] == 0
    np.testing.assert_allclose(np.load("out/array.npz")["relevance"], expected[1], rtol=1e-4, atol=1e-7)
    report = ("number_models:voxels", "a.nii.gz", "--target", "2", "--output", "mask.html")
    assert run("report", *report, "--mask", "masks/a.nii")[0] == 0 and "in a mask" in Path("mask.html").read_text()
    refused("c.nii.gz has no masks", run, *command, head("c.nii.gz", volumes[0]), "--target", "2", "--mask", "masks")
    refused("lies up to 4 mm away", run, *command, head("d.nii", volumes[0], 4.0), "--target", "2", "--mask", "masks/a.nii")
    np.save("mask.npy", masks[1][:2])
    refused(r"mask has shape \(2, 6, 7\)", run, *command, "array.npy", "--target", "2", "--mask", "mask.npy")
    np.save("mask.npy", generator.random((5, 6, 7)))
    refused("values other than 0 and 1", run, *command, "array.npy", "--target", "2", "--mask", "mask.npy")


def test_a_mask_of_steps():
    values = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    np.save("series.npy", values)
    np.save("mask.npy", np.arange(20) < 5)
    options = ("series.npy", "--form", "series", "--target", "1", "--mask", "mask.npy", "--output", "out")
    assert explained("number_models:steps", *options)[0] == 0
    expected = lrpfx.explain(model("steps"), values, lrpfx.Region(1, np.arange(20) < 5), form="series").relevance
    np.testing.assert_allclose(pd.read_csv("out/series.csv", index_col=0), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["table", "series", "volume", "graph", "both"])
def test_each_of_several_targets(name):
    arrays = {"graph": GRAPH, "both": PAIR}
    file, options = written(name) if name not in arrays else (f"{name}.npz", ())
    if name in arrays:
        np.savez(file, **arrays[name])
    status, printed = explained(f"number_models:{name}", file, *options, "--target", "1", "--target", "0", "--json")
    assert status == 0
    (found,) = json.loads(printed)["files"]
    assert [one["explained"][0] for one in found["targets"]] == ["1", "0"] and found["explained"] == found["targets"][0][
        "explained"
    ]
    for one, target in zip(found["targets"], "10", strict=True):
        assert Path(one["sheet"]).stat().st_size > 1000
        alone = json.loads(
            explained(f"number_models:{name}", file, *options, "--target", target, "--output", "one", "--json")[1]
        )
        (again,) = alone["files"]
        assert Path(again["relevance"]).read_bytes() == Path(one["relevance"]).read_bytes()
    first, second = (Path(one["relevance"]).read_bytes() for one in found["targets"])
    assert first != second
    refused(
        "out of range", explained, f"number_models:{name}", file, *options, "--target", "1", "--target", "7", "--output", "no"
    )
    assert not Path("no").exists()
    _, table = explained(f"number_models:{name}", file, *options, "--target", "1", "--target", "0")
    assert len([line for line in table.splitlines() if re.search(r"[10] \(\d+%\)|[10] -?\d", line)]) == 2


def test_several_samples_of_a_file_and_images_as_the_model_takes_them():
    images = np.random.default_rng(0).random((2, 3, 8, 8))
    np.save("images.npy", images)
    status, printed = explained("number_models:images", "images.npy", "--target", "1", "--output", "out", "--json")
    (found,) = json.loads(printed)["files"]
    assert status == 0 and found["samples"] == 2
    expected = lrpfx.explain(model("images"), torch.from_numpy(images).float(), 1)
    for one, path in zip(expected, found["relevance"], strict=True):
        np.testing.assert_allclose(np.load(path)["relevance"], one.relevance, rtol=1e-4, atol=1e-7)
    np.savez("pairs.npz", image=images, facts=np.zeros((2, 2)))
    assert explained("number_models:both", "pairs.npz", "--output", "out")[0] == 0
    assert Path("out/pairs_1.npz").exists() and Path("out/pairs_2.sheet.png").exists()


def test_errors_of_arrays_speak_of_options():
    arrays = {
        "text": (np.array(["a"]), "holds <U1"),
        "one": (np.array(1.0), "a single value"),
        "bytes": (np.zeros((8, 8, 3), np.uint8), "--form table, series or volume says"),
        "wide": (np.zeros((4, 5), np.float32), "--form table, series or volume says"),
        "gaps": (np.full((4, 3), np.nan), "fill what is missing$"),
        "shape": (np.zeros((2, 8, 4), np.float32), "--form table, series or volume says"),
    }
    for name, (array, message) in arrays.items():
        np.save(f"{name}.npy", array)
        with pytest.raises(InputError) as caught:
            explained("number_models:table", f"{name}.npy", *(("--form", "series") if name == "shape" else ()))
        text = in_options(str(caught.value))
        assert re.search(message, text) and not re.search(r"\w=|allow_pickle", text), text
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    Path("damaged.npy").write_bytes(b"no array")
    for name in ("objects.npy", "damaged.npy"):
        refused("it is damaged, or it holds objects of Python in place of numbers$", explained, "number_models:table", name)


def test_a_folder_of_volumes(folder):
    (folder / "scans").mkdir()
    for name in "ab":
        head(f"scans/{name}.nii.gz", np.random.default_rng(0).random((5, 6, 7), dtype=np.float32))
    assert explained("number_models:volume", "scans", "--output", "out")[0] == 0
    assert sorted(one.name for one in Path("out").glob("*.nii.gz")) == ["a.nii.gz", "b.nii.gz"]
    status, printed = run("report", "number_models:volume", "scans", "--output", "scans.html")
    assert status == 0 and "2 samples" in printed


GRAPH = {"x": np.random.default_rng(0).normal(size=(4, 3)), "edge_index": np.array([[0, 1, 2, 3], [1, 2, 3, 0]])}
PAIR = {"image": np.random.default_rng(0).random((1, 3, 5, 5)), "facts": np.array([[0.5, -1.0]])}


def test_graphs_and_several_inputs():
    np.savez("molecule.npz", **GRAPH)
    np.savez("pair.npz", **PAIR)
    assert explained("number_models:graph", "molecule.npz", "--target", "1", "--output", "out")[0] == 0
    expected = lrpfx.explain(model("graph"), GRAPH, 1)
    with np.load("out/molecule.npz") as found:
        np.testing.assert_allclose(found["edges"], expected.edges, rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(found["edge_index"], GRAPH["edge_index"])
    assert explained("number_models:both", "pair.npz", "--target", "1", "--output", "out")[0] == 0
    joint = lrpfx.explain(model("both"), PAIR, 1)
    with np.load("out/pair.npz") as found:
        assert sorted(found) == ["output", "relevance.facts", "relevance.image"]
        np.testing.assert_allclose(found["relevance.image"], joint.maps["image"], rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(found["output"], joint.output, rtol=1e-4)


def test_a_class_of_a_node():
    np.savez("molecule.npz", **GRAPH)
    assert explained("number_models:nodes", "molecule.npz", "--target", "2,1", "--output", "out")[0] == 0
    with np.load("out/molecule.npz") as found:
        np.testing.assert_allclose(found["edges"], lrpfx.explain(model("nodes"), GRAPH, (2, 1)).edges, rtol=1e-4, atol=1e-7)


def test_a_class_of_a_step():
    values = np.random.default_rng(0).normal(size=(2, 20, 3)).astype(np.float32)
    np.save("series.npy", values)
    Path("names.txt").write_text("up\ndown")
    common = ("series.npy", "--form", "series", "--target", "2,down", "--categories", "names.txt")
    expected = lrpfx.explain(model("steps"), values, (2, {1: 1.0}), form="series")
    assert explained("number_models:steps", *common, "--output", "out")[0] == 0
    saved = pd.read_csv("out/series.csv", index_col=[0, 1]).to_numpy().reshape(2, 20, 3)
    np.testing.assert_allclose(saved, [one.relevance for one in expected], rtol=1e-4, atol=1e-7)
    assert run("report", "number_models:steps", *common, "--output", "steps.html")[0] == 0
    assert run("dataset", "number_models:steps", *common, "--output", "steps.zarr")[0] == 0
    with pytest.raises(InputError) as caught:
        run("explain", "number_models:steps", *common[:3], "--target", "1", "--output", "no")
    assert "the target is --target POSITION,CLASS" in in_options(str(caught.value))
    np.save("one.npy", values[0])
    command = "dataset", "number_models:steps", "one.npy", "--form", "series", "--target", "2,1", "--output", "no.zarr"
    refused("one.npy is one sample", run, *command)
    view = lrpfx.datasets.open("steps.zarr")
    np.testing.assert_allclose(view["relevance"], [one.relevance for one in expected], rtol=1e-3, atol=1e-6)


def written(name):
    """A file of each kind with an array of it, and how an explainer takes it."""
    values = np.random.default_rng(0).normal(
        size={"table": (4, 3), "series": (20, 3), "sound": (400,), "volume": (1, 4, 5, 6)}[name]
    )
    if name == "table":
        pd.DataFrame(values, columns=["age", "size", "rooms"]).to_csv("table.csv", index=False)
        return "table.csv", ()
    np.save(f"{name}.npy", values.astype(np.float32))
    return f"{name}.npy", ("--form", name)


@pytest.mark.parametrize(("name", "count"), [("table", 4), ("series", 1), ("volume", 1)])
def test_reports(name, count):
    file, options = written(name)
    status, printed = run("report", f"number_models:{name}", file, *options, "--target", "1", "--composite", "epsilon_plus")
    assert status == 0 and f"{count} sample" in printed
    (text,) = re.findall(r'id="document">(.*?)</script>', Path("report.html").read_text(), re.DOTALL)
    found = json.loads(text)
    assert len(found["samples"]) == len(found["views"]) == count and found["samples"][0]["name"].startswith(file)
    assert found["views"][0]["ledger"]["rows"]


def test_a_report_on_a_graph_two_inputs_and_a_sound():
    np.savez("molecule.npz", **GRAPH)
    np.savez("pair.npz", **PAIR)
    write_sound("bird.wav", np.random.default_rng(0).integers(-9999, 9999, (400, 1)))
    for name, file in (("graph", "molecule.npz"), ("both", "pair.npz"), ("sound", "bird.wav")):
        status, printed = run("report", f"number_models:{name}", file, "--output", f"{name}.html")
        assert status == 0 and "1 sample" in printed and Path(f"{name}.html").stat().st_size > 10_000


def write_sound(path, values, rate=8000):
    """Values (samples, channels) in 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(values.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.astype("<i2").tobytes())


def stored(name, place, *options):
    status, printed = run("dataset", f"number_models:{name}", place, "--output", f"{name}.zarr", "--target", "1", *options)
    assert status == 0 and "samples explained" in printed
    return lrpfx.datasets.open(f"{name}.zarr")


def test_data_sets_of_a_table_and_of_an_array(folder):
    rows = np.random.default_rng(0).normal(size=(7, 3))
    pd.DataFrame(rows, columns=["age", "size", "rooms"]).to_csv("houses.csv", index=False)
    expected = lrpfx.explain(model("table"), torch.from_numpy(rows), 1)
    found = stored("table", "houses.csv")
    np.testing.assert_allclose(found["relevance"][:], expected.relevance, rtol=1e-4, atol=1e-6)
    weeks = np.random.default_rng(1).normal(size=(5, 20, 3))
    (folder / "weeks").mkdir()
    (folder / "weeks" / "README.txt").touch()
    np.save("weeks/all.npy", weeks)
    expected = lrpfx.explain(model("series"), weeks, 1, form="series")
    found = stored("series", "weeks", "--form", "series")
    np.testing.assert_allclose(found["relevance"][:], [one.relevance for one in expected], rtol=1e-4, atol=1e-6)


def test_data_sets_of_sounds_and_of_volumes(folder):
    nibabel = pytest.importorskip("nibabel")
    for kind in ("sounds", "scans"):
        (folder / kind).mkdir()
    generator = np.random.default_rng(0)
    for number in range(3):
        write_sound(f"sounds/{number}.wav", generator.integers(-9999, 9999, (400, 1)))
        nibabel.save(nibabel.Nifti1Image(generator.random((4, 5, 6), dtype=np.float32), np.eye(4)), f"scans/{number}.nii.gz")
    heard = lrpfx.explain(model("sound"), sound_in(Path("sounds/2.wav"))[0], 1, rate=8000)
    for name in ("sound", "mono"):  # which needs an axis for its channel
        found = stored(name, "sounds")
        np.testing.assert_allclose(found["relevance"][2].ravel(), heard.relevance, rtol=1e-3, atol=1e-6)
        assert found.keys[2] == "2.wav" and found.manifest["composite"] == heard.rules
    found = stored("volume", "scans")
    expected = lrpfx.explain(model("volume"), folder / "scans/1.nii.gz", 1)
    np.testing.assert_allclose(found["relevance"][1, 0], expected.relevance, rtol=1e-4, atol=1e-7)
    write_sound("sounds/3.wav", generator.integers(-9999, 9999, (400, 1)), rate=4000)
    with pytest.raises(InputError, match=r"3\.wav: 4000 samples a second"):
        run("dataset", "number_models:sound", "sounds", "--output", "other.zarr")


def test_a_data_set_of_graphs(folder):
    (folder / "molecules").mkdir()
    larger = {"x": np.ones((6, 3)), "edge_index": np.array([[0, 5], [5, 2]]), "y": np.array([1])}
    np.savez("molecules/a.npz", **GRAPH)
    np.savez("molecules/b.npz", **larger)
    found = stored("graph", "molecules")
    expected = lrpfx.explain(model("graph"), [GRAPH, larger], targets=[1])
    assert found.relevance.shape == (2, 6) and found.keys == ["a.npz", "b.npz"] and list(found.labels) == [-1, 1]
    np.testing.assert_allclose(found.relevance[0, :4], expected[0].nodes, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found["messages"][1, :2], expected[1].edges, rtol=1e-4, atol=1e-7)


def test_errors_name_the_door(folder):
    np.save("week.npy", np.zeros((20, 3), np.float32))
    (folder / "photo.png").touch()
    others = {"graph.pt": ".npz", "text.txt": "tokenizer=", "clip.mp4": ".npy", "scan.dcm": ".nii", "rows.tsv": ".csv"}
    for name, message in others.items():
        (folder / name).touch()
        refused(message, explained, "number_models:table", name)
    refused("apart", explained, "number_models:table", "week.npy", "photo.png")
    refused("no file", explained, "number_models:table", "missing.csv")
    (folder / "damaged.wav").write_bytes(b"RIFF")
    refused("damaged.wav cannot be read", explained, "number_models:sound", "damaged.wav")
    refused(
        "--mask of a file of numbers", explained, "number_models:series", "week.npy", "--mask", "photo.png", "--target", "1"
    )
    refused("region of one class", explained, "number_models:series", "week.npy", "--mask", "week.npy")
    refused("--raw", explained, "number_models:series", "week.npy", "--raw")
    write_sound("bird.wav", np.zeros((400, 1), int))
    refused("--form series is for .csv and .npy", explained, "number_models:sound", "bird.wav", "--form", "series")
    refused("names= is for tables or series", explained, "number_models:sound", "bird.wav", "--names", "a,b")
    refused("--form", explained, "number_models:series", "photo.png", "--form", "series", "--raw")
    refused("--raw", run, "report", "number_models:series", "week.npy", "--raw")
    (folder / "data").mkdir()
    np.savez("data/graph.npz", **GRAPH)
    store = ("--output", "store")
    np.savez("uneven.npz", image=np.zeros((2, 3, 5, 5)), facts=np.zeros((1, 2)))
    refused("a first axis for samples", run, "dataset", "number_models:both", "uneven.npz", *store)
    np.save("data/week.npy", np.zeros((20, 3), np.float32))
    refused("several kinds", run, "dataset", "number_models:series", "data", *store)
    refused("one sample", run, "dataset", "number_models:table", save("row.npy", np.zeros(3)), *store)
    refused(
        "complex128, not numbers", run, "dataset", "number_models:table", save("waves.npy", np.ones((2, 3), complex)), *store
    )
    refused("not finite", run, "dataset", "number_models:table", save("gaps.npy", np.full((2, 3), np.nan)), *store)
    refused("week.npy is one sample", run, "dataset", "number_models:series", "week.npy", "--form", "series", *store)
    refused("lrpfx.datasets.spray", run, "dataset", "number_models:table", "week.npy", *store, "--spray", "groups")
    refused("apart", run, "report", "number_models:series", "week.npy", "photo.png")


@pytest.mark.parametrize("as_files", [False, True])
def test_a_data_set_of_several_inputs(as_files):
    """One file with all samples, or a folder with one in each."""
    generator = np.random.default_rng(0)
    arrays = {"image": generator.random((3, 3, 5, 5)), "facts": generator.normal(size=(3, 2))}
    Path("pairs").mkdir()
    for place in range(3):
        np.savez(f"pairs/{place}.npz", **{name: one[[place]] for name, one in arrays.items()})
    np.savez("pairs.npz", **arrays)
    expected = lrpfx.explain(model("both"), arrays, 1)
    command = "dataset", "number_models:both", "pairs" if as_files else "pairs.npz", "--target", "1", "--output", "store"
    status, printed = run(*command)
    assert status == 0 and "3 of 3 samples explained" in printed and expected[0].rules in printed
    view = lrpfx.datasets.open("store")
    for name in arrays:
        found = [one.maps[name] for one in expected]
        np.testing.assert_allclose(view[f"relevance.{name}"], found, rtol=1e-3, atol=1e-6)
    if as_files:
        np.savez("pairs/3.npz", **arrays)
        with pytest.raises(InputError, match="holds 3 samples"):
            run(*command[:-1], "other")


def save(name, values):
    np.save(name, values)
    return name
