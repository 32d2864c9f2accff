"""The tutorials run from their first cell on, which installs lrpfx, in a new environment."""

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import ROOT

nbformat = pytest.importorskip("nbformat")
notebooks = pytest.importorskip("tools.notebooks")

pytestmark = pytest.mark.examples

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_the_first_cell_installs():
    for path in TUTORIALS:
        first = next(cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
        assert "%pip install --quiet" in first.source and '"lrpfx[' in first.source, path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def fresh(wheels, tmp_path, monkeypatch):
    """A kernel in a new environment without lrpfx, where pip finds its wheel. All other packages are lent from here."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    lent = tmp_path / "lent"
    lent.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "lrpfx" not in entry.name.lower() and not entry.name.startswith("pip"):
            (lent / entry.name).symlink_to(entry)
    (packages,) = environment.glob("lib/python*/site-packages")
    for old in [*packages.glob("setuptools*"), *packages.glob("pkg_resources")]:  # older than what torch wants
        shutil.rmtree(old)
    (packages / "lent.pth").write_text(f"{lent}\n")
    kernel = tmp_path / "jupyter" / "kernels" / "fresh"
    kernel.mkdir(parents=True)
    python = str(environment / "bin" / "python")
    command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "fresh", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return functools.partial(subprocess.run, capture_output=True, text=True), python


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_in_a_new_environment(fresh, path):
    run, python = fresh
    before = run([python, "-c", "import lrpfx"], cwd=os.sep)
    assert "No module named 'lrpfx'" in before.stderr
    notebook = notebooks.executed(path, kernel="fresh")
    assert sum(bool(cell.get("outputs")) for cell in notebook.cells) >= 3
    found = run([python, "-c", "import lrpfx; print(lrpfx.__file__)"], cwd=os.sep).stdout
    assert found.startswith(str(Path(python).parent.parent))
