"""What an older torch lacks is said; private names of torch stand in one module."""

import ast

import pytest
import torch
from helpers import ROOT, small_net

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.support import torch_internals


@pytest.mark.parametrize("torch_version", ["2.4.1", "2.12.0+cpu"])
def test_older_releases_say_what_needs_a_newer_one(torch_version, monkeypatch, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    exported = torch.export.export(small_net(), (x,))
    monkeypatch.setattr(torch, "__version__", torch_version)
    needs = rf" needs torch 2.13 or newer; this is torch {torch_version.split('+')[0]}"
    with pytest.raises(lrpfx.LoweringError, match="lower" + needs):
        lrpfx.lower(explain_model, x)
    with pytest.raises(lrpfx.ArtefactError, match="load" + needs):
        lrpfx.load(tmp_path / "model.pt2")
    with pytest.raises(lrpfx.CaptureError, match="torch.export's graph of a model" + needs):
        lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=x, capture="export")
    with pytest.raises(lrpfx.CaptureError, match="an exported program as a model" + needs):
        lrpfx.transform(exported, EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="that torch.compile compiled" + needs):
        lrpfx.attribute(torch.compile(explain_model), x)
    assert lrpfx.attribute(explain_model, x).relevance.any()
    assert torch_internals.aten("not_there.default") is None


def test_operators_that_this_torch_should_have():
    assert torch_internals.aten("relu.default") is torch.ops.aten.relu.default
    if torch_internals.release() >= torch_internals.OLDEST_FOR_PROGRAMS:
        with pytest.raises(AttributeError, match=r"torch has no operator not_there\.default"):
            torch_internals.aten("not_there.default")


def test_private_modules_of_torch_are_used_in_one_place():
    for file in [*ROOT.glob("lrpfx/*.py"), *ROOT.glob("passes/*.py")]:
        if file.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in names if name.startswith("torch.") and "._" in name]
            assert not private, (file.name, private)
