"""Models that come from ONNX: PP-OCR's detector of text and its classifier of angles, explained, and back in ONNX."""

import importlib.util
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from PIL import Image, ImageDraw, ImageFont
from torch import fx, nn

import lrpfx
from lrpfx.composites import EpsilonPlus

pytestmark = pytest.mark.slow

FINAL = ("Sigmoid", "OnnxSoftmaxV1V11", "OnnxCopyIdentity")


def imported(name: str) -> nn.Module:
    """A model of `rapidocr-onnxruntime` as a GraphModule, without the sigmoid or softmax at its end."""
    onnx = pytest.importorskip("onnx")
    onnx2torch = pytest.importorskip("onnx2torch", reason="onnx2torch is not installed")
    found = importlib.util.find_spec("rapidocr_onnxruntime")  # not imported: it needs OpenCV
    if found is None or not found.submodule_search_locations:
        pytest.skip("rapidocr-onnxruntime, which carries the models, is not installed")
    model = onnx.load(Path(found.submodule_search_locations[0]) / "models" / f"{name}.onnx")
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    for node in constants:  # weights stand in nodes; onnx2torch looks for them among the initializers
        node.attribute[0].t.name = node.output[0]
        model.graph.initializer.append(node.attribute[0].t)
        model.graph.node.remove(node)
    module = onnx2torch.convert(model).eval()
    assert isinstance(module, fx.GraphModule)
    output = module.graph.output_node()
    while type(module.get_submodule(output.args[0].target)).__name__ in FINAL:
        output.args = output.args[0].args
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def picture(width: int, height: int) -> torch.Tensor:
    """Black text on white, in the range that the models expect."""
    image = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(0.6 * height)
    ImageDraw.Draw(image).text((4, height // 5), "Relevance", fill="black", font=font)
    values = torch.tensor(list(image.tobytes()), dtype=torch.float32)
    return values.reshape(1, height, width, 3).movedim(3, 1) / 127.5 - 1


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
    model, x = imported("ch_PP-OCRv4_det_infer"), picture(96, 32)
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
    model, upright = imported("ch_ppocr_mobile_v2.0_cls_infer"), picture(192, 48)
    x = torch.cat([upright, upright.flip(2, 3)])
    assert model(x).argmax(1).tolist() == [0, 1]
    seed = torch.eye(2, dtype=torch.float32)
    explain_model, result = round_trip(model, x, lambda output: output * seed, tmp_path / "classifier.onnx")
    assert lrpfx.history(explain_model)[0].name == "export"
    assert result.relevance.flatten(1).abs().sum(1).all()
