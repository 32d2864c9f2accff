"""Operators of the table under matching rules, in every format: does the file give the results of `lrpfx.attribute`?

Cases share programs because compilation is slow; if a program fails, its cases are tried one by one.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import LayerMapComposite, MixedComposite, NameMapComposite, layer_map_base
from lrpfx.operators.table import all_operators
from lrpfx.types import Convolution, Linear

FORMATS = ("pt2", "AOTInductor", "ONNX")

#: Shapes of the inputs without the batch: by letters, one for each input.
SHAPES = {"a": (4, 9), "b": (4, 8, 8), "c": (4, 4, 6, 8), "v": (12,), "s": (5, 12)}

LINEAR = (
    *(rules.Epsilon(), rules.ZPlus(), rules.AlphaBeta(2.0, 1.0), rules.Gamma()),
    *(rules.ZBox(0.0, 1.0), rules.WSquare(), rules.Flat()),
)
ACTIVATION = (rules.Pass(), rules.ReLUDeconvNet(), rules.ReLUGuidedBackprop(), rules.ReLUBetaSmooth())
AVERAGE = (rules.Norm(), rules.Epsilon())
PRODUCT = (rules.Uniform(), rules.Only(0), rules.UniformEpsilon())
MATMUL = (rules.UniformEpsilon(), rules.ValueOnly())
DEFAULT = (None,)  # what `layer_map_base` gives; neutral operators need nothing


@dataclass(frozen=True)
class Case:
    """An operator as a module or a function of inputs whose shapes the letters name, under one rule."""

    operator: str
    inputs: str
    make: Callable[[], Callable[..., torch.Tensor]]
    rule: rules.Hook | None


class _Step(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.layer = compute

    def forward(self, *inputs):
        return self.layer(*inputs)


def _named(functions):
    """Cases of operators that are functions of one input of `F` or torch, by name."""
    return {name: ("b", lambda name=name: getattr(F, name, None) or getattr(torch, name)) for name in functions.split()}


def _parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


class _With(nn.Module):
    """A function of an input and parameters."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.values = nn.ParameterList(_parameter(*shape) for shape in shapes)

    def forward(self, x):
        return self.function(x, *self.values)


LAYERS = {
    "linear": ("v", lambda: nn.Linear(12, 5)),
    "conv1d": ("a", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1)),
    "conv2d": ("b", lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2)),
    "conv3d": ("c", lambda: nn.Conv3d(4, 6, 3, stride=2, dilation=1)),
    "conv_transpose1d": ("a", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2)),
    "conv_transpose2d": ("b", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)),
    "conv_transpose3d": ("c", lambda: nn.ConvTranspose3d(4, 6, 3)),
}
ACTIVATIONS = {
    **_named(
        "relu relu6 hardtanh elu selu celu gelu sigmoid hardsigmoid silu hardswish mish tanh tanhshrink softsign softplus "
        "softshrink hardshrink logsigmoid leaky_relu rrelu exp expm1 log log1p log2 sqrt rsqrt abs square erf sin cos atan "
        "reciprocal"
    ),
    "clamp": ("b", lambda: lambda x: x.clamp(0.2, 0.8)),
    "clamp_min": ("b", lambda: lambda x: x.clamp_min(0.2)),
    "threshold": ("b", lambda: lambda x: F.threshold(x, 0.3, 0.1)),
    "prelu": ("b", lambda: nn.PReLU(4)),
    "pow": ("b", lambda: lambda x: x**3),
    "log_softmax": ("v", lambda: lambda x: F.log_softmax(x, -1)),
    "divided_by": ("b", lambda: lambda x: 2.0 / x),
}
AVERAGES = {
    "avg_pool1d": ("a", lambda: nn.AvgPool1d(3, 2, 1)),
    "avg_pool2d": ("b", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
    "avg_pool3d": ("c", lambda: nn.AvgPool3d(2)),
    "adaptive_avg_pool1d": ("a", lambda: nn.AdaptiveAvgPool1d(4)),
    "adaptive_avg_pool2d": ("b", lambda: nn.AdaptiveAvgPool2d((3, 5))),
    "adaptive_avg_pool3d": ("c", lambda: nn.AdaptiveAvgPool3d(3)),
    "mean": ("b", lambda: lambda x: x.mean((2, 3))),
}
PRODUCTS = {
    "mul": ("bb", lambda: lambda x, y: x * y),
}
GATES = {
    "div": ("bb", lambda: lambda x, y: x / y),
    "gate": ("bb", lambda: lambda x, y: torch.sigmoid(x) * y),
}
PRODUCTS_OF_MATRICES = {
    "matmul": ("ss", lambda: lambda x, y: x @ y.transpose(1, 2)),
    "einsum": ("ss", lambda: lambda x, y: torch.einsum("bij,bkj->bik", x, y)),
}
OTHERS = {
    "baddbmm": ("ss", lambda: lambda x, y: torch.baddbmm(x @ y.mT, x, y.mT)),
    "batch_norm": ("b", lambda: nn.BatchNorm2d(4).eval()),
    "add": ("bb", lambda: lambda x, y: x + y),
    "sub": ("bb", lambda: lambda x, y: x - y),
    "rsub": ("b", lambda: lambda x: 1 - x),
    "sum": ("b", lambda: lambda x: x.sum(1)),
    "cumsum": ("b", lambda: lambda x: x.cumsum(1)),
    "lerp": ("bb", lambda: lambda x, y: torch.lerp(x, y, 0.3)),
    "fold": ("b", lambda: lambda x: F.fold(x.flatten(2)[:, :, :16], (5, 5), 2)),
    "std": ("b", lambda: lambda x: x.std((2, 3))),
    "var": ("b", lambda: lambda x: x.var((2, 3))),
    "norm": ("b", lambda: lambda x: x.norm(dim=1)),
    "neg": ("b", lambda: torch.neg),
    "addcmul": ("bbb", lambda: lambda x, y, z: torch.addcmul(x, y, z)),
    "addcdiv": ("bbb", lambda: lambda x, y, z: torch.addcdiv(x, y, z)),
    "cosine_similarity": ("bb", lambda: lambda x, y: F.cosine_similarity(x, y)),
    "quotient": ("b", lambda: lambda x: x / x.sum(1, keepdim=True)),
    "glu": ("b", lambda: lambda x: F.glu(x, 1)),
    "scaled_dot_product_attention": ("sss", lambda: F.scaled_dot_product_attention),
    "addmm": ("v", lambda: _With(lambda x, b, w: torch.addmm(b, x, w), (5,), (12, 5))),
    "layer_norm": ("s", lambda: nn.LayerNorm(12)),
    "group_norm": ("b", lambda: nn.GroupNorm(2, 4)),
    "instance_norm": ("b", lambda: nn.InstanceNorm2d(4, affine=True)),
    "rms_norm": ("s", lambda: nn.RMSNorm(12)),
    "normalize": ("s", lambda: lambda x: F.normalize(x, dim=-1)),
    "local_response_norm": ("b", lambda: nn.LocalResponseNorm(2)),
    "softmax": ("s", lambda: lambda x: x.softmax(-1)),
    "interpolate": ("b", lambda: lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    "interpolate, nearest": ("b", lambda: lambda x: F.interpolate(x, size=(12, 15))),
    "interpolate, bicubic": ("b", lambda: lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")),
    "interpolate, bilinear, antialias": ("b", lambda: lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True)),
    "interpolate, bicubic, antialias": ("b", lambda: lambda x: F.interpolate(x, size=(4, 9), mode="bicubic", antialias=True)),
    "upsample": ("b", lambda: nn.Upsample(scale_factor=2)),
    "masked_softmax": ("s", lambda: lambda x: x.masked_fill(x < 0.5, float("-inf")).softmax(-1)),
    "max_pool1d": ("a", lambda: nn.MaxPool1d(3, 2, 1)),
    "max_pool2d": ("b", lambda: nn.MaxPool2d(3, 2, 1)),
    "max_pool3d": ("c", lambda: nn.MaxPool3d(2)),
    "adaptive_max_pool1d": ("a", lambda: nn.AdaptiveMaxPool1d(3)),
    "adaptive_max_pool2d": ("b", lambda: nn.AdaptiveMaxPool2d(2)),
    "adaptive_max_pool2d, uneven": ("b", lambda: nn.AdaptiveMaxPool2d(3)),
    "adaptive_max_pool3d": ("c", lambda: nn.AdaptiveMaxPool3d(2)),
}
NEUTRAL = {
    "flatten": ("b", lambda: lambda x: x.flatten(1)),
    "unflatten": ("b", lambda: lambda x: x.unflatten(1, (2, 2))),
    "view": ("b", lambda: lambda x: x.view(x.shape[0], 16, 16)),
    "reshape": ("b", lambda: lambda x: x.reshape(x.shape[0], -1)),
    "permute": ("b", lambda: lambda x: x.permute(0, 2, 3, 1)),
    "transpose": ("b", lambda: lambda x: x.transpose(1, 2)),
    "movedim": ("b", lambda: lambda x: x.movedim(1, 3)),
    "squeeze": ("b", lambda: lambda x: x[:, :1].squeeze(1)),
    "unsqueeze": ("b", lambda: lambda x: x.unsqueeze(1)),
    "expand": ("b", lambda: lambda x: x[:, :1].expand(-1, 3, -1, -1)),
    "getitem": ("b", lambda: lambda x: x[:, 1:3, ::2]),
    "select": ("b", lambda: lambda x: x.select(1, 2)),
    "narrow": ("b", lambda: lambda x: x.narrow(1, 1, 2)),
    "chunk": ("b", lambda: lambda x: x.chunk(2, 1)[1]),
    "split": ("b", lambda: lambda x: x.split((1, 3), 1)[1]),
    "unbind": ("b", lambda: lambda x: x.unbind(1)[1]),
    "diagonal": ("b", lambda: lambda x: x.diagonal(0, 2, 3)),
    "contiguous": ("b", lambda: lambda x: x.contiguous()),
    "broadcast_to": ("b", lambda: lambda x: x[:1, :1].broadcast_to(x.shape)),
    "unfold": ("b", lambda: lambda x: F.unfold(x, 3)),
    "clone": ("b", lambda: lambda x: x.clone()),
    "repeat": ("b", lambda: lambda x: x.repeat(1, 2, 1, 1)),
    "tile": ("b", lambda: lambda x: x.tile(1, 2, 1, 1)),
    "repeat_interleave": ("b", lambda: lambda x: x.repeat_interleave(2, 1)),
    "cat": ("bb", lambda: lambda x, y: torch.cat([x, y], 1)),
    "stack": ("bb", lambda: lambda x, y: torch.stack([x, y], 1)),
    "hstack": ("bb", lambda: lambda x, y: torch.hstack([x, y])),
    "vstack": ("bb", lambda: lambda x, y: torch.vstack([x[:, 0], y[:, 0]]).unflatten(0, (2, -1)).transpose(0, 1)),
    "dstack": ("bb", lambda: lambda x, y: torch.dstack([x, y])),
    "tensor_split": ("b", lambda: lambda x: x.tensor_split(2, 1)[1]),
    "gather": ("b", lambda: lambda x: x.gather(1, (x > 0.5).long())),
    "take_along_dim": ("b", lambda: lambda x: x.take_along_dim((x > 0.5).long(), 1)),
    "slice_scatter": ("bb", lambda: lambda x, y: x.slice_scatter(y[:, :2], 1, 1, 3)),
    "select_scatter": ("bb", lambda: lambda x, y: x.select_scatter(y[:, 0], 1, 1)),
    "max_unpool": ("b", lambda: lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "flip": ("b", lambda: lambda x: x.flip(2)),
    "roll": ("b", lambda: lambda x: x.roll(1, 2)),
    "rot90": ("b", lambda: lambda x: x.rot90(1, (2, 3))),
    "index_select": ("b", lambda: lambda x: x.index_select(1, torch.tensor([2, 0]))),
    "index": ("b", lambda: lambda x: x[:, [2, 0, 2]]),
    "where": ("bb", lambda: lambda x, y: torch.where(x > y, x, y)),
    "masked_fill": ("b", lambda: lambda x: x.masked_fill(x < 0.5, 0.0)),
    "tril": ("b", lambda: torch.tril),
    "triu": ("b", lambda: torch.triu),
    "channel_shuffle": ("b", lambda: nn.ChannelShuffle(2)),
    "maximum": ("bb", lambda: torch.maximum),
    "minimum": ("bb", lambda: torch.minimum),
    "amax": ("b", lambda: lambda x: x.amax(1)),
    "amin": ("b", lambda: lambda x: x.amin(1)),
    "max": ("b", lambda: lambda x: x.max(1).values),
    "min": ("b", lambda: lambda x: x.min(1).values),
    "topk": ("b", lambda: lambda x: x.topk(2, 1).values),
    "sort": ("b", lambda: lambda x: x.sort(1).values),
    "pad": ("b", lambda: lambda x: F.pad(x, (1, 2, 0, 1))),
    "pad, reflect": ("b", lambda: lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect")),
    "pad, replicate": ("b", lambda: lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate")),
    "pad, circular": ("b", lambda: lambda x: F.pad(x, (1, 2, 0, 1), mode="circular")),
    "pixel_shuffle": ("b", lambda: nn.PixelShuffle(2)),
    "pixel_unshuffle": ("b", lambda: nn.PixelUnshuffle(2)),
}
FITTING = (
    *((LAYERS, LINEAR), (ACTIVATIONS, ACTIVATION), (AVERAGES, AVERAGE), (PRODUCTS, PRODUCT), (GATES, PRODUCT[:2])),
    *((PRODUCTS_OF_MATRICES, MATMUL), (OTHERS, DEFAULT), (NEUTRAL, DEFAULT)),
)
CASES = [
    Case(operator, inputs, make, rule)
    for operators, fitting in FITTING
    for operator, (inputs, make) in operators.items()
    for rule in fitting
]


class Together(nn.Module):
    """Cases beside each other, each on a part of the one input; their outputs in a row."""

    def __init__(self, cases):
        super().__init__()
        self.places = []
        self.width = 0
        for number, case in enumerate(cases):
            self.add_module(f"case{number}", _Step(case.make()))
            self.places.append([])
            for letter in case.inputs:
                shape = SHAPES[letter]
                self.places[-1].append((self.width, shape))
                self.width += torch.Size(shape).numel()
        self.eval().requires_grad_(False)

    def forward(self, x):
        results = []
        for number, places in enumerate(self.places):
            given = [x[:, first : first + torch.Size(shape).numel()].unflatten(1, shape) for first, shape in places]
            results.append(getattr(self, f"case{number}")(*given).flatten(1))
        return torch.cat(results, 1)

    def differences(self, actual, expected):
        """The relative difference of each case's relevance."""
        found = []
        for places in self.places:
            first, (start, shape) = places[0][0], places[-1]
            part = slice(first, start + torch.Size(shape).numel())
            scale = expected[:, part].norm()
            found.append(float((actual[:, part] - expected[:, part]).norm() / (scale if scale else 1.0)))
        return found


def explained(cases):
    """The cases' module and its explainable form."""
    torch.manual_seed(0)
    module = Together(cases)
    named = [([f"case{number}.*"], case.rule) for number, case in enumerate(cases) if case.rule is not None]
    others = [*layer_map_base(), (Convolution, rules.ZPlus()), (Linear, rules.Epsilon())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lrpfx.errors.LrpfxWarning)
        composite = MixedComposite([NameMapComposite(named), LayerMapComposite(others)])
        return module, lrpfx.transform(module, composite, example_inputs=_example(module, 2))


def _example(module, batch):
    return 0.1 + 0.9 * torch.rand(batch, module.width, generator=torch.Generator().manual_seed(batch))


def _seed(output):
    """Relevance in proportion to the output, none where that is small: so no denominator is small beside relevance."""
    random = torch.rand(output.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(output.abs() > 0.1 * output.abs().mean(), output * random, 0.0)


def examine(cases, kind):
    """For each case the largest difference of its relevance in a format, or why there is none."""
    try:
        module, explain_model = explained(cases)
        program = lrpfx.lower(explain_model, _example(module, 2), target="weights")
        with tempfile.TemporaryDirectory() as folder:
            write = lrpfx.package if kind == "AOTInductor" else lrpfx.save
            runner = lrpfx.load(write(program, Path(folder) / ("it.onnx" if kind == "ONNX" else "it.pt2")))
            largest = [0.0] * len(cases)
            for batch in (1, 2, 5):
                x = _example(module, batch)
                seed = _seed(explain_model(x).detach())
                expected = lrpfx.attribute(explain_model, x, seed).relevance
                found = module.differences(runner(x, seed)["relevance"], expected)
                largest = list(map(max, largest, found))
    except lrpfx.LrpfxError as error:
        if len(cases) == 1:
            return [str(error)]
        middle = len(cases) // 2
        return examine(cases[:middle], kind) + examine(cases[middle:], kind)
    return largest


def measure(cases=CASES, formats=FORMATS, together=24):
    """Rows of operator, rule and what each format gives."""
    rows = [{"operator": case.operator, "rule": "" if case.rule is None else str(case.rule)} for case in cases]
    for kind in formats:
        for first in range(0, len(cases), together):
            found = examine(cases[first : first + together], kind)
            for row, value in zip(rows[first:], found, strict=False):
                row[kind] = value
            print(
                kind, first, [value for value in found if isinstance(value, str) or value > 1e-5], file=sys.stderr, flush=True
            )
    return rows


def missing():
    """Operators of the table that carry relevance and have no case."""
    have = {case.operator.partition(",")[0] for case in CASES}
    return [operator.name for operator in all_operators() if operator.name not in have]
