"""The code in README and docs runs and prints what stands there; links and pictures exist."""

import re

import pytest
import torch
from helpers import ROOT
from tools.documentation import DOCUMENTS, run

from lrpfx.deploy.backends import BACKENDS


@pytest.fixture
def own_backends():
    """Backends that a document adds are gone after the test."""
    before = dict(BACKENDS)
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_what_their_code_prints(path, own_table, own_backends):
    torch.set_default_dtype(torch.float32)
    text = path.read_text()
    assert run(text) == text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_patents_are_spoken_of():
    assert "may be covered by patents" in (ROOT / "README.md").read_text()
