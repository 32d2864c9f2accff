"""The code in README and docs runs and prints what stands there; links and pictures exist."""

import re
import shlex
from importlib import metadata

import pytest
import tomllib
import torch
import typer
from helpers import ROOT
from tools.documentation import DOCUMENTS, shown

from lrpfx.command_line.application import app_of
from lrpfx.deploy.backends import BACKENDS

pytestmark = pytest.mark.programs


@pytest.fixture
def own_backends():
    """Backends that a document adds are gone after the test."""
    before = dict(BACKENDS)
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


#: what the guides compare with
OTHERS = {
    "detection.md": "facenet-pytorch",
    "graphs.md": "torch_geometric",
    "series_and_tables.md": "torchcrepe",
    "from_pytorch_grad_cam.md": "grad-cam",
    "from_captum.md": "captum",
    "from_shap.md": "shap",
    "from_lxt.md": "lxt",
    "from_zennit_crp.md": "zennit-crp",
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_what_their_code_prints(path, own_table, own_backends):
    other = OTHERS.get(path.name)
    if other is not None and not list(metadata.distributions(name=other)):
        pytest.skip(f"needs {other}")
    torch.set_default_dtype(torch.float32)
    words, numbers = words_and_numbers(shown(path))
    words_before, numbers_before = words_and_numbers(path.read_text())
    assert words == words_before
    assert numbers == pytest.approx(numbers_before, rel=0.01)


def words_and_numbers(text):
    """The text without its decimal fractions, and these: their last digits differ between processors."""
    fraction = r"\d+\.\d+(?:e[+-]?\d+)?"
    return re.sub(fraction, "0.0", text), [float(found) for found in re.findall(fraction, text)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(path):
    prose = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_extras_exist():
    """Those that a page or a tutorial tells to install, and the page on installation has all of them."""
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    tutorials = (ROOT / "docs" / "tutorials").glob("*.*")
    for path in (*DOCUMENTS, *tutorials):
        told = re.findall(r"pip install [^`\n]*?(?:lrpfx|\.)\[([\w,]+)\]", path.read_text().replace("\\", ""))
        assert {extra for found in told for extra in found.split(",")} <= known, path
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "installation.md").read_text()))
    assert known - {"test", "docs", "lint", "mutants"} <= listed


def test_patents_are_spoken_of():
    assert "may be covered by patents" in (ROOT / "README.md").read_text()


def commands():
    """The commands in the documents: lines after a "$", and what stands between backquotes."""
    for path in DOCUMENTS:
        for found in re.findall(r"^\$ (lrpfx .+)|`(lrpfx [a-z]+ [^`]+)`", path.read_text(), re.MULTILINE):
            yield pytest.param("".join(found), id=f"{path.name}: {''.join(found)}")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_have_these_arguments(command):
    _, name, *arguments = shlex.split(command, comments=True)
    typer.main.get_command(app_of()).commands[name].make_context(name, arguments)
