"""The example that checks an .onnx file by its self-test, with a runtime and numpy alone."""

import base64
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers import ROOT
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus

#: Runs a script with site-packages but without torch and lrpfx, which it must not need.
PLAIN = f"""
import runpy, sys
sys.path.append({str(Path(onnx.__path__[0]).parent)!r})
sys.modules.update(torch=None, lrpfx=None, onnx=None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)).eval()
    path = tmp_path_factory.mktemp("check") / "model.onnx"
    lrpfx.save(lrpfx.lower(lrpfx.transform(model, EpsilonPlus()), torch.rand(2, 3, 8, 8), balance=True), path)
    return path


def check(path):
    return subprocess.run(
        [sys.executable, "-S", "-c", PLAIN, ROOT / "examples" / "check.py", path], capture_output=True, text=True, timeout=120
    )


@pytest.mark.programs
def test_a_right_file(file):
    run = check(file)
    assert run.returncode == 0, run.stderr
    found = dict(line.split(": ") for line in run.stdout.splitlines())
    assert list(found) == ["output", "relevance", "balance"] and all(float(value) < 1e-5 for value in found.values())


@pytest.mark.programs
def test_a_file_with_other_results(file, tmp_path):
    model = onnx.load(file)
    note = next(entry for entry in model.metadata_props if entry.key == "lrpfx_self_test")
    arrays = dict(np.load(io.BytesIO(base64.b64decode(note.value))))
    arrays["out.relevance"][0, 0, 0, 0] += 0.1
    content = io.BytesIO()
    np.savez(content, **arrays)
    note.value = base64.b64encode(content.getvalue()).decode()
    onnx.save(model, tmp_path / "other.onnx")
    run = check(tmp_path / "other.onnx")
    assert run.returncode == 1 and not run.stderr, run.stderr
