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


def packed_integers(codes, bits, dim, order=None):
    """Codes along `dim` in integers of 32 bits: a stream of bits, the lowest of each integer first."""
    codes = codes.movedim(dim, 1)
    if order is not None:
        codes = codes.unflatten(1, (-1, len(order)))[..., order].flatten(1)
    rows = []
    for row in codes.tolist():
        stream = sum(code << (bits * place) for place, code in enumerate(row))
        words = [(stream >> shift) & 0xFFFFFFFF for shift in range(0, bits * len(row), 32)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32).movedim(1, dim)


def layer_of_codes(kind, bits, less_one=True, by_order=False, runs=False, has_bias=True, inputs=64, outputs=32, group=16):
    """A layer with the name and attributes that a library gives it, and the weight that it stands for."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 2**bits, (inputs, outputs))
    zeros = torch.randint(1, 2**bits, (inputs // group, outputs))
    scales = torch.rand(inputs // group, outputs).double() + 0.1
    groups = torch.arange(inputs) // group
    groups = groups[torch.randperm(inputs)] if by_order else groups
    weight = ((codes - zeros[groups]) * scales[groups]).T
    bias = torch.randn(outputs).double() if has_bias else None

    def forward(self, x):
        if not runs:
            raise RuntimeError("no kernel")
        return nn.functional.linear(x.double(), weight, bias).to(x)

    layer = type(kind, (nn.Module,), {"forward": forward})()
    layer.in_features, layer.out_features, layer.group_size = inputs, outputs, group
    if kind.startswith("WQ"):
        layer.w_bit = bits
    else:
        layer.bits = bits
    if kind == "WQLinear_GEMV":
        tensors = packed_integers(codes.T, bits, 1), packed_integers(pad(zeros.T), bits, 1), pad(scales.T)
    elif "awq" in kind.lower() or kind.startswith("WQ"):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = packed_integers(codes, bits, 1, order), packed_integers(zeros, bits, 1, order), scales
    else:
        tensors = packed_integers(codes, bits, 0), packed_integers(zeros - int(less_one), bits, 1), scales
        layer.register_buffer("g_idx", groups.int())
        if less_one is False:
            layer.qzero_format = lambda: 2
    for name, value in zip(("qweight", "qzeros", "scales"), tensors, strict=True):
        layer.register_buffer(name, value)
    layer.register_buffer("bias", bias)
    return layer, weight, bias


def pad(groups):
    """Groups in the last dimension up to a multiple of eight, as WQLinear_GEMV holds them."""
    return nn.functional.pad(groups, (0, -groups.shape[1] % 8))


PACKED_FORMATS = [
    *(("TorchQuantLinear", bits, {"less_one": False, "by_order": bits == 4}) for bits in (2, 3, 4, 8)),
    *(("TorchQuantLinear", bits, {"runs": True, "has_bias": bits == 4}) for bits in (3, 4, 8)),
    *((kind, 4, {}) for kind in ("WQLinear_GEMM", "AwqTorchQuantLinear", "WQLinear_GEMV")),
    ("WQLinear_GEMM", 4, {"runs": True, "has_bias": False}),
]


@pytest.mark.parametrize(("kind", "bits", "options"), PACKED_FORMATS)
def test_layers_of_gptq_and_awq_are_unpacked(kind, bits, options):
    packed, weight, bias = layer_of_codes(kind, bits, **options)
    last = nn.Linear(32, 3).double()
    plain = nn.Linear(64, 32, bias is not None).double()
    plain.weight.data = weight
    if bias is not None:
        plain.bias.data = bias
    x = torch.randn(5, 64).double()
    model = nn.Sequential(packed, nn.ReLU(), last).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), x)
    expected = lrpfx.transform(nn.Sequential(plain, nn.ReLU(), last).eval(), EpsilonPlus(), x)
    found, wanted = (lrpfx.attribute(one, x, 1) for one in (explain_model, expected))
    assert_close(found.output, wanted.output, 1e-12)
    assert_close(found.relevance, wanted.relevance, 1e-12)


def test_zero_points_that_nothing_tells_are_an_error():
    packed, _, _ = layer_of_codes("TorchQuantLinear", 4)
    with pytest.raises(CaptureError, match="0 is a TorchQuantLinear with packed weights, which fails on numbers"):
        lrpfx.transform(nn.Sequential(packed).eval(), EpsilonPlus(), torch.randn(2, 64).double())


def test_a_packed_layer_that_does_not_compute_what_it_holds_is_an_error():
    packed, _, _ = layer_of_codes("WQLinear_GEMM", 4, runs=True)
    packed.scales *= 1.1
    with pytest.raises(CaptureError, match=r"differs by .*% from a product"):
        lrpfx.transform(nn.Sequential(packed).eval(), EpsilonPlus(), torch.randn(2, 64).double())


def test_weights_have_the_dtype_of_the_model():
    packed, weight, _ = layer_of_codes("WQLinear_GEMM", 4)
    packed.scales = packed.scales.half()
    model = nn.Sequential(nn.Linear(8, 64), packed).to(torch.bfloat16).eval()
    packed.scales = packed.scales.half()
    x = torch.randn(2, 8).bfloat16()
    explain_model = lrpfx.transform(model, EpsilonPlus(), x)
    assert explain_model(x).dtype == torch.bfloat16
    assert_close(explain_model(x).float(), nn.functional.linear(model[0](x).float(), weight.float(), packed.bias.float()), 0.02)
