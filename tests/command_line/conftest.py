"""A folder to work in."""

import sys

import numpy as np
import pytest
import torch
from command_line.commands import MODEL
from PIL import Image


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
