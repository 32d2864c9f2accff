"""`lrpfx explain` for tables, series, sounds and volumes: the relevance in the files is that of the front door."""

import importlib
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
from lrpfx.command_line.number_files import sound_in

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

def sound():
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 4, 9), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
    return made(nn.Unflatten(1, (1, -1)), *layers)

def volume():
    torch.manual_seed(0)
    return made(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))
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


def test_errors_name_the_door(folder):
    np.save("week.npy", np.zeros((20, 3), np.float32))
    (folder / "photo.png").touch()
    others = {"graph.pt": "lrpfx.explain", "text.txt": "tokenizer=", "clip.mp4": "volumes.md", "scan.dcm": ".nii"}
    for name, message in others.items():
        (folder / name).touch()
        refused(message, explained, "number_models:table", name)
    refused("apart", explained, "number_models:table", "week.npy", "photo.png")
    refused("no file", explained, "number_models:table", "missing.csv")
    (folder / "damaged.wav").write_bytes(b"RIFF")
    refused("damaged.wav cannot be read", explained, "number_models:sound", "damaged.wav")
    refused("--mask", explained, "number_models:series", "week.npy", "--mask", "photo.png", "--target", "1")
    refused("--raw", explained, "number_models:series", "week.npy", "--raw")
    refused("--form", explained, "number_models:series", "photo.png", "--form", "series", "--raw")
    refused("lrpfx.report", run, "report", "number_models:series", "week.npy")
    (folder / "data").mkdir()
    np.save("data/week.npy", np.zeros((20, 3), np.float32))
    refused("lrpfx.datasets.attribute", run, "dataset", "number_models:series", "data", "--output", "store")
