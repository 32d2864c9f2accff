"""The examples of photographs: a script, and a notebook with its results."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.examples


def test_the_script(tmp_path):
    run = subprocess.run([sys.executable, EXAMPLES / "photo.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert re.search(r"39\.\d%  tiger cat", run.stdout) and Image.open(tmp_path / "explanation.png").width > 1000


def test_the_notebook(tmp_path):
    """It runs, and prints and shows what it was stored with."""
    stored = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    fresh = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": os.fspath(tmp_path)}}).execute()
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            assert list(map(shown, before.outputs)) == list(map(shown, after.outputs))


def shown(output):
    """What an output is, with numbers as they are printed to three digits."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    numbers = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.3g}", re.sub(r" at 0x\w+", "", text))
    return output.output_type, numbers, "text/html" in output.get("data", {}), "image/jpeg" in output.get("data", {})
