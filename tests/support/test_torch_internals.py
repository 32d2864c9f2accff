"""What an older torch lacks is said; private names of torch stand in one module."""

import ast

import pytest
import torch
from helpers import ROOT, small_net

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.support import torch_internals


@pytest.mark.parametrize("torch_version", ["2.4.1", "2.8.0+cpu"])
def test_older_releases_say_what_needs_a_newer_one(torch_version, monkeypatch, tmp_path):
    x, plain = torch.randn(2, 3, 8, 8), torch_version.split("+")[0]
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    exported = torch.export.export(small_net(), (x,))
    program = lrpfx.lower(explain_model, x)
    monkeypatch.setattr(torch, "__version__", torch_version)
    for part, oldest, error, call in (
        ("lrpfx.lower", (2, 6), lrpfx.LoweringError, lambda: lrpfx.lower(explain_model, x)),
        ("a .onnx file", (2, 6), lrpfx.ArtefactError, lambda: lrpfx.save(program, tmp_path / "model.onnx")),
        ("a .pt2 file", (2, 9), lrpfx.ArtefactError, lambda: lrpfx.save(program, tmp_path / "model.pt2")),
        ("a .pt2 file", (2, 9), lrpfx.ArtefactError, lambda: lrpfx.load(tmp_path / "model.pt2")),
        (
            "torch.export's graph of a model",
            (2, 6),
            lrpfx.CaptureError,
            lambda: lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=x, capture="export"),
        ),
        ("an exported program as a model", (2, 6), lrpfx.CaptureError, lambda: lrpfx.transform(exported, EpsilonPlus())),
        ("that torch.compile compiled", (2, 9), lrpfx.InputError, lambda: lrpfx.attribute(torch.compile(explain_model), x)),
    ):
        needs = rf"{part} needs torch {oldest[0]}\.{oldest[1]} or newer; this is torch {plain}"
        if torch_internals.release() < oldest:
            with pytest.raises(error, match=needs):
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
