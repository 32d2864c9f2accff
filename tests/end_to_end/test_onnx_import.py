"""Models that come from ONNX: PP-OCR's detector of text and its classifier of angles, explained, and back in ONNX."""

import importlib.util

import pytest
import torch
from helpers import assert_close

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.demo import text_lines

pytestmark = pytest.mark.slow

for package in ("onnx", "onnx2torch", "rapidocr_onnxruntime"):
    if importlib.util.find_spec(package) is None:  # not imported: the last one needs OpenCV
        pytest.skip(f"{package} is not installed", allow_module_level=True)


def picture(width: int, height: int) -> torch.Tensor:
    """A word, in the range that the models expect."""
    return text_lines.drawn("Relevance", width, height)[None]


def round_trip(model, x, target, path):
    """Eager relevance with a balanced ledger, and that of the ONNX file in ONNX Runtime."""
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    result = lrpfx.attribute(explain_model, x, target)
    accounts = lrpfx.ledger(explain_model, x, target)
    assert accounts.unexplained <= 1e-5 and abs(accounts.balance) <= 1e-4 * accounts.seed_magnitude
    program = lrpfx.lower(explain_model, x, target="weights", dynamic_batch=False)
    runner = lrpfx.load(lrpfx.save(program, path))
    assert_close(runner(x, target(result.output))["relevance"], result.relevance, 1e-3)
    return explain_model, result


def test_detector_of_text(tmp_path):
    model, x = text_lines.load(text_lines.DETECTOR), picture(96, 32)
    found = model(x) > 0
    assert 0.1 < found.float().mean() < 0.9
    explain_model, result = round_trip(model, x, lambda output: output * found, tmp_path / "detector.onnx")
    assert lrpfx.history(explain_model)[0].name == "symbolic"
    (stage,) = [stage for stage in lrpfx.history(explain_model) if stage.name == "freeze_buffers"]
    assert any("[1.0, 1.0, 2.0, 2.0]" in detail for _, detail in stage.details)
    assert_close(explain_model(picture(128, 64)), model(picture(128, 64)).detach(), 1e-3)
    text = (x < 0).any(1, keepdim=True)
    assert result.relevance.abs()[text.expand_as(x)].mean() > result.relevance.abs()[~text.expand_as(x)].mean()


def test_classifier_of_angles(tmp_path):
    model, upright = text_lines.load(), picture(192, 48)
    x = torch.cat([upright, upright.flip(2, 3)])
    assert model(x).argmax(1).tolist() == [0, 1]
    seed = torch.eye(2, dtype=torch.float32)
    explain_model, result = round_trip(model, x, lambda output: output * seed, tmp_path / "classifier.onnx")
    assert lrpfx.history(explain_model)[0].name == "export"
    assert result.relevance.flatten(1).abs().sum(1).all()
