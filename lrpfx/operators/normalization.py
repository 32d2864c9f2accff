"""Normalization with running statistics, or with the statistics of the sample itself."""

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Between, Bound, Builder, Operator, SavedScale
from lrpfx.operators import mixing, signs
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import IMAGE, MATRIX, call, weight

# --- with the scale held constant ---------------------------------------------------------------------------------------------


# The scale is that of `source`, by default of the input; it has a derivative only with respect to what `source` depends on.


def _detached_layer_norm(input: torch.Tensor, arguments: Bound, source: torch.Tensor | None = None) -> torch.Tensor:
    dimensions = tuple(range(-len(arguments["normalized_shape"]), 0))
    variance = _source(input, source).var(dimensions, unbiased=False, keepdim=True)
    result = (input - input.mean(dimensions, keepdim=True)) * torch.rsqrt(variance + arguments["eps"])
    return _affine(result, arguments["weight"], arguments["bias"])


def _layer_norm_and_scale(input: torch.Tensor, arguments: Bound) -> tuple[torch.Tensor, torch.Tensor]:
    shape, weight, bias, eps = (arguments[name] for name in ("normalized_shape", "weight", "bias", "eps"))
    output, _, scale = torch.native_layer_norm(input, list(shape), weight, bias, eps)
    return output, scale


def _layer_norm_pull(gradient: torch.Tensor, scale: torch.Tensor, arguments: Bound) -> torch.Tensor:
    dimensions = tuple(range(-len(arguments["normalized_shape"]), 0))
    weighted = gradient if arguments["weight"] is None else gradient * arguments["weight"]
    return (weighted - weighted.mean(dimensions, keepdim=True)) * scale.to(gradient.dtype)


def _detached_group_norm(input: torch.Tensor, arguments: Bound, source: torch.Tensor | None = None) -> torch.Tensor:
    grouped, held = (one.unflatten(1, (arguments["num_groups"], -1)).flatten(2) for one in (input, _source(input, source)))
    variance = held.var(2, unbiased=False, keepdim=True)
    result = (grouped - grouped.mean(2, keepdim=True)) * torch.rsqrt(variance + arguments["eps"])
    weight, bias = per_channel(arguments["weight"], input), per_channel(arguments["bias"], input)
    return _affine(result.reshape(input.shape), weight, bias)


def _detached_instance_norm(input: torch.Tensor, arguments: Bound, source: torch.Tensor | None = None) -> torch.Tensor:
    mean, variance = input.flatten(2).mean(2), _source(input, source).flatten(2).var(2, unbiased=False)
    shape = (*mean.shape, *[1] * (input.ndim - 2))
    result = (input - mean.reshape(shape)) * torch.rsqrt(variance.reshape(shape) + arguments["eps"])
    return _affine(result, per_channel(arguments["weight"], input), per_channel(arguments["bias"], input))


def _source(input: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    return input.detach() if source is None else source


def _affine(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    result = input if weight is None else input * weight
    return result if bias is None else result + bias


def per_channel(value: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor | None:
    """A value for each channel, (channels,), in a shape that is broadcast to an input."""
    return None if value is None else value.reshape(1, -1, *[1] * (input.ndim - 2))


def _with_running_statistics(build: Builder) -> fx.Node | None:
    """An instance norm with running statistics is a batch norm, whose statistics are constants."""
    if build["use_input_stats"]:
        return None
    tensors = (build[name] for name in ("input", "running_mean", "running_var", "weight", "bias"))
    return build.call("batch_norm", *tensors, label="", eps=build["eps"])


# --- rows ------------------------------------------------------------------------------------------------------------------


ROWS: tuple[Operator, ...] = (
    standard_row(
        "batch_norm",
        kinds.BatchNorm,
        "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05",
        functional.batch_norm,
        buffers="running_mean running_var",
        modules=[nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm],
        order="input weight bias running_mean running_var training momentum eps cudnn_enabled",
        rank_of={nn.BatchNorm2d: 4, nn.BatchNorm3d: 5},
        keeps_rank=True,
        broadcasts=False,
        mixes=mixing.batch,
        sample=call(
            input=IMAGE,
            running_mean=weight(4),
            running_var=weight(4, low=0.5, high=2.0),
            weight=weight(4),
            bias=weight(4),
            training=False,
            momentum=0.3,
            eps=0.1,
        ),
    ),
    standard_row(
        "layer_norm",
        kinds.LayerNorm,
        "input normalized_shape weight=None bias=None eps=1e-05",
        functional.layer_norm,
        between=Between.NORMALIZATION,
        order="input normalized_shape weight bias eps cudnn_enable",
        detached=_detached_layer_norm,
        saved_scale=SavedScale(_layer_norm_and_scale, _layer_norm_pull),
        scales_features=True,
        mixes=mixing.normalized,
        keeps_dimensions=True,
        sample=call(loses="bias", input=MATRIX, normalized_shape=(4,), weight=weight(4), bias=weight(4), eps=0.1),
    ),
    standard_row(
        "group_norm",
        kinds.LayerNorm,
        "input num_groups weight=None bias=None eps=1e-05",
        functional.group_norm,
        between=Between.NORMALIZATION,
        order="input num_groups weight bias eps cudnn_enabled",
        detached=_detached_group_norm,
        mixes=mixing.sample,
        channels_second=True,
        sample=call(loses="bias", input=IMAGE, num_groups=2, weight=weight(4), bias=weight(4), eps=0.1),
    ),
    standard_row(
        "instance_norm",
        kinds.LayerNorm,
        "input running_mean=None running_var=None weight=None bias=None use_input_stats=True momentum=0.1 eps=1e-05",
        functional.instance_norm,
        between=Between.NORMALIZATION,
        buffers="running_mean running_var",
        modules=[nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
        order="input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
        decomposition=_with_running_statistics,
        detached=_detached_instance_norm,
        mixes=mixing.positions,
        channels_second=True,
        sample=call(
            loses="bias",
            input=IMAGE,
            running_mean=None,
            running_var=None,
            weight=weight(4),
            bias=weight(4),
            use_input_stats=True,
            momentum=0.3,
            eps=0.1,
        ),
    ),
    standard_row(
        "rms_norm",
        kinds.RMSNorm,
        "input normalized_shape weight=None eps=None",
        functional.rms_norm,
        between=Between.NORMALIZATION,
        mixes=mixing.normalized,
        keeps_dimensions=True,
        sample=call(input=MATRIX, normalized_shape=(4,), weight=weight(4), eps=0.1),
    ),
    standard_row(
        "normalize",
        kinds.RMSNorm,
        "input p=2.0 dim=1 eps=1e-12 out=None",
        between=Between.NORMALIZED,
        whole={"(Tensor input, float p=2.0, int[1] dim=1, float eps=1e-12) -> Tensor": (functional.normalize,)},
        sign=signs.of_input,
        mixes=mixing.given(),
        keeps_dimensions=True,
        sample=call(input=MATRIX, p=3.0, dim=1, eps=0.1),
    ),
    standard_row(
        "local_response_norm",
        kinds.RMSNorm,
        "input size alpha=0.0001 beta=0.75 k=1.0",
        between=Between.CHANNEL_NORMALIZATION,
        whole={
            "(Tensor input, int size, float alpha=1e-4, float beta=0.75, float k=1.0) -> Tensor": (
                functional.local_response_norm,
            )
        },
        mixes=mixing.channels,
        keeps_dimensions=True,
        sample=call(input=IMAGE, size=3, alpha=0.3, beta=0.6, k=2.0),
    ),
)
