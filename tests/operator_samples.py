"""A call of every row of the operator table, for tests that hold for all of them.

Options have values other than their defaults, so that an option that gets lost changes the result.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Signal:
    """A tensor that carries relevance."""

    shape: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0

    def make(self):
        return torch.rand(self.shape) * (self.high - self.low) + self.low


@dataclass(frozen=True)
class Weight(Signal):
    """A parameter or buffer of the network."""


@dataclass(frozen=True)
class Fixed:
    """A tensor of integers or truth values that is an input of the network."""

    values: Any

    def make(self):
        return torch.tensor(self.values)


@dataclass(frozen=True)
class Call:
    """A call of an operator: its arguments by canonical name; or `function`, of all signals, for rows without such names."""

    arguments: dict[str, Any] = field(default_factory=dict)
    function: Any = None
    #: Where relevance goes that the inputs do not get: the column of the ledger.
    loses: str = ""
    #: Whether the first dimension of inputs and output is a batch.
    batch: bool = True


def signal(*shape, **limits):
    return Signal(shape, **limits)


def weight(*shape, **limits):
    return Weight(shape, **limits)


def call(loses="", batch=True, **arguments):
    return Call(arguments, loses=loses, batch=batch)


def of(function, *shapes, **facts):
    return Call({f"x{place}": signal(*shape) for place, shape in enumerate(shapes or [(2, 4)])}, function, **facts)


def mask(function, *shapes):
    """A function whose result is no signal."""
    return of(lambda x, *others: x * function(x, *others).to(x.dtype), *shapes)


_image, _matrix = signal(2, 4, 5, 6), signal(2, 4)
_positive = signal(2, 4, low=0.5, high=2.0)

_names = """relu relu6 selu sigmoid hardsigmoid silu hardswish mish tanh tanhshrink softsign logsigmoid exp exp2 expm1 abs
    square erf sin cos tan sinh cosh atan asinh neg frac sinc deg2rad rad2deg nan_to_num"""
_elementwise = {
    **dict.fromkeys(_names.split(), call(input=_matrix)),
    **dict.fromkeys(("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal"), call(input=_positive)),
}


def _convolution(dimensions, transposed):
    shape = (4, 3, *[3] * dimensions) if transposed else (6, 2, *[3] * dimensions)
    extra = {"output_padding": 1} if transposed else {}
    return call(
        loses="bias absent",
        input=signal(2, 4, *[7] * dimensions),
        weight=weight(*shape),
        bias=weight(6),
        stride=2,
        padding=1,
        **extra,
        **({"groups": 2, "dilation": 2} if transposed else {"dilation": 2, "groups": 2}),
    )


def _pool(dimensions, maximum):
    x = signal(2, 3, *[7] * dimensions)
    if maximum:
        return Call(
            dict(input=x, kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=True, return_indices=False),
        )
    divisor = {"divisor_override": None} if dimensions > 1 else {}
    return call(input=x, kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False, **divisor)


_norm = dict(weight=weight(4), bias=weight(4))

CALLS: dict[str, Call] = {
    **_elementwise,
    "linear": call(loses="bias", input=_matrix, weight=weight(3, 4), bias=weight(3)),
    **{f"conv{n}d": _convolution(n, False) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution(n, True) for n in (1, 2, 3)},
    **{
        f"conv{n}d_with_bias_map": call(
            loses="constants",
            input=signal(2, 4, *[5] * n),
            weight=weight(6, 2, *[3] * n),
            bias=weight(1, 6, *[3] * n),
            stride=1,
            padding=0,
            dilation=1,
            groups=2,
        )
        for n in (1, 2, 3)
    },
    "batch_norm": call(
        input=_image,
        running_mean=weight(4),
        running_var=weight(4, low=0.5, high=2.0),
        **_norm,
        training=False,
        momentum=0.3,
        eps=0.1,
    ),
    "logit": call(input=signal(2, 4, low=0.1, high=0.9)),
    "hardtanh": call(input=_matrix, min_val=-0.3, max_val=0.4),
    "clamp": call(input=_matrix, min=-0.3, max=0.4),
    "clamp_min": call(input=_matrix, min=-0.3),
    "clamp_max": call(input=_matrix, max=0.3),
    "elu": call(input=_matrix, alpha=0.7),
    "celu": call(input=_matrix, alpha=0.7),
    "gelu": call(input=_matrix, approximate="tanh"),
    "softplus": call(input=_matrix, beta=2.0, threshold=0.5),
    "softshrink": call(input=_matrix, lambd=0.2),
    "hardshrink": call(input=_matrix, lambd=0.2),
    "leaky_relu": call(input=_matrix, negative_slope=0.3),
    "rrelu": call(input=_matrix, lower=0.2, upper=0.3, training=False),
    "threshold": call(input=_matrix, threshold=0.1, value=0.3),
    "prelu": call(input=_matrix, weight=weight(4)),
    "pow": call(input=_positive, exponent=3.0),
    "exponential": call(input=_matrix, other=2.0),
    "remainder": call(input=_positive, other=0.7),
    "fmod": call(input=_positive, other=0.7),
    "divided_by": call(input=_positive, other=2.0),
    "log_softmax": Call(dict(input=_matrix, dim=1, dtype=torch.float64)),
    **{f"avg_pool{n}d": _pool(n, False) for n in (1, 2, 3)},
    **{f"max_pool{n}d": _pool(n, True) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": call(input=signal(2, 3, *[7] * n), output_size=3) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": call(input=signal(2, 3, *[7] * n), output_size=3, return_indices=False) for n in (1, 2, 3)},
    **{
        f"max_pool{n}d_with_indices": of(
            lambda x, n=n: getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)[0], (2, 3, *[4] * n)
        )
        for n in (1, 2, 3)
    },
    **{
        f"adaptive_max_pool{n}d_with_indices": of(
            lambda x, n=n: getattr(F, f"adaptive_max_pool{n}d")(x, 2, return_indices=True)[0], (2, 3, *[4] * n)
        )
        for n in (1, 2, 3)
    },
    "mean": call(input=_image, dim=(2, 3), keepdim=True, dtype=torch.float64),
    "sum": call(input=_image, dim=(2, 3), keepdim=True, dtype=torch.float64),
    "cumsum": call(input=_matrix, dim=1, dtype=torch.float64),
    "add": call(input=_matrix, other=signal(2, 4), alpha=2),
    "sub": call(input=_matrix, other=signal(2, 4), alpha=2),
    "rsub": call(input=_matrix, other=signal(2, 4), alpha=2),
    "mul": call(input=_matrix, other=signal(2, 4)),
    "div": call(input=_matrix, other=_positive, rounding_mode=None),
    "gate": call(input=_matrix, other=signal(2, 4)),
    "quotient": call(input=_matrix, other=_positive),
    "matmul": call(input=signal(2, 3, 4), other=signal(2, 4, 5)),
    "layer_norm": call(loses="bias", input=_matrix, normalized_shape=(4,), **_norm, eps=0.1),
    "group_norm": call(loses="bias", input=_image, num_groups=2, **_norm, eps=0.1),
    "instance_norm": call(
        loses="bias",
        input=_image,
        running_mean=None,
        running_var=None,
        **_norm,
        use_input_stats=True,
        momentum=0.3,
        eps=0.1,
    ),
    "rms_norm": call(input=_matrix, normalized_shape=(4,), weight=weight(4), eps=0.1),
    "normalize": call(input=_matrix, p=3.0, dim=1, eps=0.1),
    "local_response_norm": call(input=_image, size=3, alpha=0.3, beta=0.6, k=2.0),
    "softmax": Call(dict(input=_matrix, dim=1, dtype=torch.float64), loses="expansion"),
    "softmin": Call(dict(input=_matrix, dim=1, dtype=torch.float64), loses="expansion"),
    "masked_softmax": call(loses="expansion", input=_matrix, dim=1),
    "scaled_dot_product_attention": call(
        loses="expansion constants",
        query=signal(2, 4, 3, 4),
        key=signal(2, 2, 3, 4),
        value=signal(2, 2, 3, 4),
        attn_mask=weight(3, 3),
        dropout_p=0.0,
        is_causal=False,
        scale=0.3,
        enable_gqa=True,
    ),
    "addmm": call(batch=False, input=signal(2, 5), mat1=_matrix, mat2=signal(4, 5), beta=2, alpha=3),
    "baddbmm": call(input=signal(2, 3, 5), batch1=signal(2, 3, 4), batch2=signal(2, 4, 5), beta=2, alpha=3),
    "addcmul": call(input=_matrix, tensor1=signal(2, 4), tensor2=signal(2, 4), value=3),
    "addcdiv": call(input=_matrix, tensor1=signal(2, 4), tensor2=_positive, value=3),
    "lerp": call(input=_matrix, end=signal(2, 4), weight=0.3),
    "cosine_similarity": call(x1=_image, x2=signal(2, 4, 5, 6), dim=2, eps=0.1),
    "pairwise_distance": call(loses="constants", x1=_matrix, x2=signal(2, 4), p=3.0, eps=0.1, keepdim=True),
    "cdist": call(x1=signal(2, 3, 4), x2=signal(2, 5, 4), p=3.0),
    "glu": call(input=_matrix, dim=1),
    "embedding": call(
        input=Fixed([[1, 2], [3, 0]]),
        weight=weight(5, 4),
        padding_idx=0,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    ),
    "embedding_bag": Call(
        {"input": Fixed([[1, 2], [3, 0]]), "weight": weight(5, 4)},
        None,
    ),
    "interpolate": Call(
        dict(
            input=_image,
            size=None,
            scale_factor=(2.0, 1.5),
            mode="bilinear",
            align_corners=True,
            recompute_scale_factor=True,
            antialias=False,
        ),
    ),
    "fold": call(input=signal(2, 8, 9), output_size=(4, 4), kernel_size=(2, 2), dilation=1, padding=0, stride=1),
    **{
        name: call(input=signal(2, 4, *shape), p=0.3, training=False)
        for name, shape in [
            ("dropout", ()),
            ("dropout1d", (3,)),
            ("dropout2d", (3, 3)),
            ("dropout3d", (3, 3, 3)),
            ("alpha_dropout", ()),
            ("feature_alpha_dropout", (3, 3)),
        ]
    },
    "stochastic_depth": call(input=_image, p=0.3, mode="row", training=False),
    "flatten": call(input=signal(2, 3, 4, 5), start_dim=1, end_dim=2),
    "pad": call(loses="constants", input=_image, pad=(1, 2), mode="constant", value=0.5),
    "where": call(condition=Fixed([[True, False, True, True], [False, False, True, True]]), input=_matrix, other=signal(2, 4)),
    "masked_fill": call(
        loses="constants", input=_matrix, mask=Fixed([[True, False, True, True], [False, False, True, True]]), value=0.5
    ),
    "index_put": call(input=_matrix, indices=(Fixed([0, 1]), Fixed([2, 3])), values=signal(2), accumulate=False),
    "scatter": call(input=_matrix, dim=1, index=Fixed([[0, 2], [1, 3]]), source=signal(2, 2)),
    "scatter_add": call(input=_matrix, dim=1, index=Fixed([[0, 0], [1, 3]]), source=signal(2, 2)),
    "index_add": call(input=_matrix, dim=1, index=Fixed([0, 0, 2]), source=signal(2, 3), alpha=2),
    "copy": call(batch=False, input=_matrix, source=signal(4), non_blocking=False),
    "fill": call(loses="constants", input=_matrix, value=0.5),
    "zero": of(lambda x: x + x.clone().zero_()),
    "maximum": call(input=_matrix, other=signal(2, 4)),
    "minimum": call(input=_matrix, other=signal(2, 4)),
    "grid_sample": call(
        input=_image,
        grid=signal(2, 3, 3, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=True,
    ),
    "prod": call(input=_positive, dim=1, keepdim=True, dtype=torch.float64),
    "cumprod": call(input=_positive, dim=1, dtype=torch.float64),
    "bilinear": call(loses="constants", input1=_matrix, input2=signal(2, 3), weight=weight(5, 4, 3), bias=weight(5)),
    "outer": call(batch=False, input=signal(3), other=signal(4)),
    "inner": call(batch=False, input=_matrix, other=signal(3, 4)),
    "std": of(lambda x: x.std(1, correction=0, keepdim=True)),
    "var": of(lambda x: torch.var(x, 1, unbiased=False, keepdim=True)),
    "var_mean": of(lambda x: torch.cat(torch.var_mean(x, 1, keepdim=True), 1)),
    "std_mean": of(lambda x: torch.cat(torch.std_mean(x, dim=1, correction=0, keepdim=True), 1)),
    "norm": of(lambda x: x.norm(3, 1)),
    "einsum": of(lambda x, y: torch.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5)),
    "dot": of(lambda x, y: torch.dot(x, y), (4,), (4,), batch=False),
    "tensordot": of(lambda x, y: torch.tensordot(x, y, dims=([1, 2], [1, 0])), (2, 3, 4), (4, 3, 2), batch=False),
    "diff": of(lambda x: torch.diff(x, dim=1)),
    "lp_pool": of(lambda x: F.lp_pool2d(x, 2.0, 2), (2, 3, 4, 4)),
    "affine_grid": of(lambda theta: F.affine_grid(theta, (2, 3, 4, 4), align_corners=False), (2, 2, 3), batch=False),
    "upsample": of(lambda x: torch.ops.aten.upsample_nearest2d.vec(x, [6, 6], None), (2, 3, 4, 4)),
    "col2im": of(lambda x: torch.ops.aten.col2im.default(x, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), (2, 8, 9)),
    "unflatten": of(lambda x: x.unflatten(1, (2, 2))),
    "view": of(lambda x: x.view(-1, 2, 2)),
    "reshape": of(lambda x: x.reshape(-1, 2, 2)),
    "ravel": of(lambda x: x.ravel(), batch=False),
    "permute": of(lambda x: x.permute(0, 2, 1), (2, 3, 4)),
    "transpose": of(lambda x: torch.transpose(x, dim0=1, dim1=2), (2, 3, 4)),
    "movedim": of(lambda x: x.movedim(1, 2), (2, 3, 4)),
    "squeeze": of(lambda x: x.squeeze(1), (2, 1, 4)),
    "unsqueeze": of(lambda x: x.unsqueeze(1)),
    "expand": of(lambda x: x.expand(-1, 3, -1), (2, 1, 4)),
    "getitem": of(lambda x: x[:, 1:, None]),
    "select": of(lambda x: x.select(1, 2)),
    "narrow": of(lambda x: x.narrow(1, 1, 2)),
    "slice": of(lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3)),
    "chunk": of(lambda x: x.chunk(2, dim=1)[1]),
    "split": of(lambda x: torch.split(x, [1, 3], dim=1)[1]),
    "tensor_split": of(lambda x: x.tensor_split(3, dim=1)[1]),
    "unbind": of(lambda x: x.unbind(1)[1]),
    "diagonal": of(lambda x: x.diagonal(dim1=1, dim2=2), (2, 3, 4)),
    "diag_embed": of(lambda x: torch.diag_embed(x), loses="constants"),
    "contiguous": of(lambda x: x.contiguous()),
    "to": of(lambda x: x.to(torch.float64)),
    "_to_copy": of(lambda x: torch.ops.aten._to_copy.default(x)),
    "alias": of(lambda x: torch.ops.aten.alias.default(x)),
    "broadcast_to": of(lambda x: x.broadcast_to((x.shape[0], 3, 4)), (2, 1, 4)),
    "broadcast_tensors": of(
        lambda x, y: torch.broadcast_tensors(x, y)[0] + torch.broadcast_tensors(x, y)[1], (2, 3, 1), (2, 1, 4)
    ),
    "meshgrid": of(lambda x, y: torch.cat(torch.meshgrid(x, y, indexing="ij")), (3,), (4,), batch=False),
    "unfold": of(lambda x: F.unfold(x, 2), (2, 3, 4, 4)),
    "clone": of(lambda x: x.clone()),
    "repeat": of(lambda x: x.repeat(1, 3)),
    "tile": of(lambda x: x.tile(2)),
    "repeat_interleave": of(lambda x: x.repeat_interleave(2, dim=1)),
    "flip": of(lambda x: x.flip(1)),
    "roll": of(lambda x: x.roll(1, dims=1)),
    "rot90": of(lambda x: torch.rot90(x, 1, (1, 2)), (2, 3, 4)),
    "gather": of(lambda x: x.gather(1, (x > 0).long())),
    "take_along_dim": of(lambda x: torch.take_along_dim(x, x.argsort(1), dim=1)),
    "index_select": of(lambda x: x.index_select(1, torch.tensor([0, 2]))),
    "index": of(lambda x: x[:, torch.tensor([0, 2])]),
    "masked_select": of(lambda x: x.masked_select(torch.tensor([True, False, True, True])).view(-1, 3)),
    "tril": of(lambda x: x.tril(), (2, 3, 4), loses="constants"),
    "triu": of(lambda x: x.triu(1), (2, 3, 4), loses="constants"),
    "channel_shuffle": of(lambda x: F.channel_shuffle(x, 2), (2, 4, 3, 3)),
    "pixel_shuffle": of(lambda x: F.pixel_shuffle(x, 2), (2, 4, 3, 3)),
    "pixel_unshuffle": of(lambda x: F.pixel_unshuffle(x, 2), (2, 3, 4, 4)),
    "cat": of(lambda x, y: torch.cat([x, y], axis=1), (2, 3), (2, 4)),
    "stack": of(lambda x, y: torch.stack([x, y], 1), (2, 4), (2, 4)),
    "hstack": of(lambda x, y: torch.hstack([x, y]), (2, 3), (2, 4)),
    "vstack": of(lambda x, y: torch.vstack([x, y]), (1, 4), (2, 4), batch=False),
    "dstack": of(lambda x, y: torch.dstack([x, y]), (2, 4), (2, 4)),
    "column_stack": of(lambda x, y: torch.column_stack([x, y]), (2, 3), (2, 4)),
    "slice_scatter": of(lambda x, y: x.slice_scatter(y, 1, 1, 3), (2, 4), (2, 2)),
    "select_scatter": of(lambda x, y: x.select_scatter(y, 1, 1), (2, 4), (2,)),
    "diagonal_scatter": of(lambda x, y: x.diagonal_scatter(y), (4, 4), (4,), batch=False),
    "index_put_accumulated": of(
        lambda x, y: x.index_put((torch.tensor([0, 0]),), y, accumulate=True), (2, 4), (2, 4), batch=False
    ),
    "max_unpool": of(
        lambda x: F.max_unpool2d(F.max_pool2d(x, 2), F.max_pool2d(x, 2, return_indices=True)[1], 2),
        (2, 3, 4, 4),
        loses="constants",
    ),
    "amax": of(lambda x: x.amax(1)),
    "amin": of(lambda x: x.amin(axis=1, keepdims=True)),
    "max": of(lambda x: x.max(dim=1).values),
    "min": of(lambda x: torch.min(x, 1)[0]),
    "median": of(lambda x: x.median(1).values),
    "nanmedian": of(lambda x: x.nanmedian(1).values),
    "mode": of(lambda x: x.mode(1).values),
    "kthvalue": of(lambda x: torch.kthvalue(x, 2, dim=1).values),
    "topk": of(lambda x: x.topk(2, 1).values),
    "sort": of(lambda x: x.sort(1)[0]),
    "cummax": of(lambda x: x.cummax(1)[0]),
    "cummin": of(lambda x: x.cummin(1)[0]),
    "logsumexp": of(lambda x: x.logsumexp(1)),
    # Results that are no signal.
    **{name: mask(lambda x, name=name: getattr(torch, name)(x, 0.1)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{
        name: mask(lambda x, name=name: getattr(torch, name)(x))
        for name in ("isnan", "isinf", "isfinite", "signbit", "logical_not", "sign", "sgn", "round", "floor", "ceil", "trunc")
    },
    "isclose": mask(lambda x: torch.isclose(x, x.roll(1))),
    "isin": mask(lambda x: torch.isin(x, torch.tensor([0.0, 1.0]))),
    **{
        name: mask(lambda x, name=name: getattr(torch, name)(x > 0, x > 0.5))
        for name in ("logical_and", "logical_or", "logical_xor")
    },
    "bitwise_and": mask(lambda x: (x > 0) & (x < 0.5)),
    "bitwise_or": mask(lambda x: (x < 0).__or__(x > 0.5)),
    "bitwise_xor": mask(lambda x: (x > 0) ^ (x < 0.5)),
    "bitwise_not": mask(lambda x: ~(x > 0)),
    "all": mask(lambda x: (x > 0).all(1, keepdim=True)),
    "any": mask(lambda x: (x > 0).any(1, keepdim=True)),
    "count_nonzero": mask(lambda x: x.count_nonzero(1).unsqueeze(1)),
    "nonzero": Call({"x0": signal(2, 4)}, lambda x: x * x.nonzero().sum().to(x.dtype), batch=False),
    "argmax": mask(lambda x: x.argmax(1, keepdim=True)),
    "argmin": mask(lambda x: x.argmin(dim=1, keepdim=True)),
    "argsort": mask(lambda x: x.argsort(1)),
    "searchsorted": mask(lambda x: torch.searchsorted(torch.tensor([0.0, 0.5]), x)),
    "bucketize": mask(lambda x: torch.bucketize(x, torch.tensor([0.0, 0.5]))),
    "bincount": Call(
        {"x0": signal(4, 4)},
        lambda x: x * torch.bincount((x[:, 0] > 0).long(), minlength=4).to(x.dtype),
        batch=False,
    ),
    "floor_divide": mask(lambda x: x // 0.3),
    "floor_divides": mask(lambda x: 1.0 // (x + 3)),
    "heaviside": mask(lambda x: torch.heaviside(x, torch.tensor(0.5))),
    "histc": Call({"x0": signal(2, 4)}, lambda x: x * torch.histc(x, 4, -1, 1), batch=False),
    "to_integer": mask(lambda x: x.bool().long() + x.int() + x.short()),
    "one_hot": mask(lambda x: F.one_hot(x.argmax(1), 4)),
}


class CallNet(nn.Module):
    """A network around one call: signals are its inputs, weights its parameters."""

    def __init__(self, sample, spelled=None):
        super().__init__()
        self.sample, self.spelled = sample, spelled
        for name, value in sample.arguments.items():
            if isinstance(value, Weight):
                buffer = name.startswith("running") or name in ("scale", "shift")
                made = value.make()
                self.register_buffer(name, made) if buffer else self.register_parameter(name, nn.Parameter(made))
        self.eval()

    def arguments(self, inputs):
        given = iter(inputs)

        def fill(name, value):
            if isinstance(value, Weight):
                return getattr(self, name)
            if isinstance(value, (Signal, Fixed)):
                return next(given)
            return tuple(fill(name, item) for item in value) if isinstance(value, tuple) else value

        return {name: fill(name, value) for name, value in self.sample.arguments.items()}

    def call(self, *inputs):
        return self.spelled(self.arguments(inputs)) if self.sample.function is None else self.sample.function(*inputs)


class OneInput(CallNet):
    def forward(self, x):
        return self.call(x)


class TwoInputs(CallNet):
    def forward(self, x, y):
        return self.call(x, y)


class ThreeInputs(CallNet):
    def forward(self, x, y, z):
        return self.call(x, y, z)


class FourInputs(CallNet):
    def forward(self, x, y, z, w):
        return self.call(x, y, z, w)


def inputs_of(sample):
    flat = []
    for value in sample.arguments.values():
        flat += value if isinstance(value, tuple) else [value]
    return tuple(value.make() for value in flat if isinstance(value, (Signal, Fixed)) and not isinstance(value, Weight))


def network_of(sample, spelled):
    """A network that makes the call by `spelled`, a function of a dict of arguments, and inputs for it."""
    inputs = inputs_of(sample)
    return (OneInput, TwoInputs, ThreeInputs, FourInputs)[len(inputs) - 1](sample, spelled), inputs
