"""Quantized layers are explained by their dequantized weights."""

import copy
import warnings

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.errors import CaptureError


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


class Packed(nn.Module):
    """A linear layer of another library: codes of four bits, two in a byte, with a scale for each output."""

    def __init__(self, layer, rounds=0.0, bias=True):
        super().__init__()
        self.in_features, self.out_features, self.rounds = layer.in_features, layer.out_features, rounds
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (layer.weight.detach() / scale).round().to(torch.int64) + 8
        self.register_buffer("packed", (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", layer.bias.detach().clone() if bias else None)

    def weight_in_full(self):
        codes = torch.stack([self.packed % 16, self.packed // 16], -1).flatten(1)
        return (codes.to(self.scale.dtype) - 8) * self.scale

    def forward(self, x):
        if self.rounds:
            step = (x.abs().amax(-1, keepdim=True) * self.rounds).clamp(min=1e-9)
            x = (x / step).round() * step
        return nn.functional.linear(x.to(self.scale.dtype), self.weight_in_full(), self.shift)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rounds", [0.0, 1 / 127])
def test_packed_layers_are_explained_by_what_they_multiply_with(bias, rounds):
    torch.manual_seed(0)
    packed = Packed(nn.Linear(8, 6).float(), rounds, bias)
    model = nn.Sequential(packed, nn.ReLU(), nn.Linear(6, 3).float()).eval()
    plain = nn.Linear(8, 6, bias).float()
    plain.weight.data = packed.weight_in_full()
    if bias:
        plain.bias.data = packed.shift.clone()
    expected = nn.Sequential(plain, *model[1:]).eval()
    x = torch.randn(4, 8).float()
    explain_model = lrpfx.transform(model, EpsilonPlus(), x)
    torch.testing.assert_close(explain_model(x), expected(x), rtol=1e-4, atol=1e-5)
    found = lrpfx.attribute(explain_model, x, 1).relevance
    wanted = lrpfx.attribute(lrpfx.transform(expected, EpsilonPlus(), x), x, 1).relevance
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    assert isinstance(model[0], Packed)
    details = [detail for record in lrpfx.history(explain_model) for detail in record.details]
    assert any("explained by its dequantized weight: Packed" in detail for _, detail in details)


def test_a_packed_layer_that_is_no_product_is_an_error():
    torch.manual_seed(0)

    class Bent(Packed):
        def forward(self, x):
            return super().forward(x).tanh()

    class Broken(Packed):
        def forward(self, x):
            raise RuntimeError("no kernel")

    for kind, match in ((Bent, r"differs by .*% from a product"), (Broken, r"fails on numbers: RuntimeError: no kernel")):
        with pytest.raises(CaptureError, match=match):
            lrpfx.transform(nn.Sequential(kind(nn.Linear(8, 6).float())).eval(), EpsilonPlus(), torch.randn(2, 8).float())


def test_a_packed_layer_of_halves():
    class Half(Packed):
        def forward(self, x):
            assert x.dtype == torch.bfloat16
            return super().forward(x).to(x.dtype)

    torch.manual_seed(0)
    packed, x = Half(nn.Linear(8, 6).float()), torch.randn(2, 8)
    explain_model = lrpfx.transform(nn.Sequential(packed).eval(), EpsilonPlus(), x.float())
    expected = nn.functional.linear(x.float(), packed.weight_in_full(), packed.shift)
    torch.testing.assert_close(explain_model(x.float()), expected, rtol=2e-2, atol=2e-2)


def test_layers_of_bitsandbytes():
    library = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = library.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4").float()
    layer.load_state_dict(nn.Linear(64, 32).float().state_dict())
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(32, 5).float()).to("cpu").eval()
    x = torch.randn(3, 64).float()
    explain_model = lrpfx.transform(model, EpsilonPlus(), x)
    assert (explain_model(x) - model(x)).norm() < 1e-2 * model(x).norm()  # its kernel computes in bfloat16
