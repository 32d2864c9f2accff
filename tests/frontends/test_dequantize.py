"""Quantized layers are explained by their dequantized weights."""

import copy
import warnings

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus


def quantized(model, layers, dtype=torch.qint8):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its successor
        return torch.ao.quantization.quantize_dynamic(model.float().eval(), layers, dtype=dtype)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_dynamically_quantized_layers_are_explained_by_their_dequantized_weights(capture, dtype):
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 3, bias=False)))
    model, x = quantized(plain, {nn.Linear}, dtype), torch.randn(5, 4, dtype=torch.float32)
    reference = copy.deepcopy(plain).float().eval()
    for layer, source in ((reference[0], model[0]), (reference[2][0], model[2][0])):
        weight = source.weight()
        layer.weight.data = weight.dequantize() if weight.is_quantized else weight
    keys = list(model.state_dict())
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    expected = lrpfx.transform(reference, EpsilonPlus(), example_inputs=x, capture=capture)
    assert lrpfx.node_names(explain_model) == lrpfx.node_names(expected)
    result, wanted = (lrpfx.attribute(module, x, 1) for module in (explain_model, expected))
    assert torch.equal(result.relevance, wanted.relevance) and torch.equal(result.output, wanted.output)
    assert_close(result.output.double(), model(x).double(), 0.05)
    (stage,) = [stage for stage in lrpfx.history(explain_model) if stage.name == "dequantize"]
    assert [name for name, _ in stage.details] == ["0", "2.0"] and "explained by its dequantized weight" in str(stage)
    report = lrpfx.check(model, EpsilonPlus(), x)
    assert report.ok and any(text.startswith("2.0: explained by its dequantized weight") for text in report.warnings)
    assert list(model.state_dict()) == keys and type(model[0]).__name__ == "Linear" and not isinstance(model[0], nn.Linear)


def test_other_quantized_modules_are_refused():
    model = quantized(nn.Sequential(nn.LSTM(3, 3)), {nn.LSTM})
    with pytest.raises(lrpfx.CaptureError, match="0 is a quantized LSTM"):
        lrpfx.transform(model, EpsilonPlus())
