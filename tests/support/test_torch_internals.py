"""What an older torch lacks is said; private names of torch stand in one module."""

import ast

import pytest
import torch
from helpers import ROOT, small_net

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.support import torch_internals


@pytest.mark.parametrize("torch_version", ["2.6.0", "2.8.0+cpu"])
def test_older_releases_say_what_needs_a_newer_one(torch_version, monkeypatch, tmp_path):
    x, plain = torch.randn(2, 3, 8, 8), torch_version.split("+")[0]
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    program = lrpfx.lower(explain_model, x)
    monkeypatch.setattr(torch, "__version__", torch_version)
    for part, error, call in (
        ("a .pt2 file", lrpfx.ArtefactError, lambda: lrpfx.save(program, tmp_path / "model.pt2")),
        ("a .pt2 file", lrpfx.ArtefactError, lambda: lrpfx.load(tmp_path / "model.pt2")),
        ("that torch.compile compiled", lrpfx.InputError, lambda: lrpfx.attribute(torch.compile(explain_model), x)),
    ):
        with pytest.raises(error, match=rf"{part} needs torch 2\.9 or newer; this is torch {plain}"):
            call()
    assert lrpfx.attribute(explain_model, x).relevance.any()
    assert torch_internals.aten("not_there.default") is None


def test_operators_that_this_torch_should_have():
    assert torch_internals.aten("relu.default") is torch.ops.aten.relu.default
    if torch_internals.release() >= torch_internals.NEWEST_KNOWN:
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
