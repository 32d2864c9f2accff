"""Dense layers and convolutions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.node import Role, node_info
from lrpfx.ir.operator import Adjoint, Bound, Builder, ConstantResponse, ExampleCall, Function, Matrices, Operator, WeightLayout
from lrpfx.operators import mixing
from lrpfx.operators.functions import (
    grouped_linear,
)
from lrpfx.operators.row import function_named, standard_row
from lrpfx.operators.samples import MATRIX, Fixed, call, signal, weight
from lrpfx.support.torch_internals import aten as aten_operator

# --- adjoints: the transposed maps ------------------------------------------------------------------------------------------


def _linear_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    return (torch.matmul(gradient, arguments["weight"]),)


def _per_dimension(value: Any, dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else list(value) * (dimensions // len(value))


def _convolution_adjoint(dimensions: int, transposed: bool) -> Adjoint:
    def adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...] | None:
        (input,) = inputs
        padding = arguments["padding"]
        if padding == "valid":
            padding = 0
        elif padding == "same":
            kernel, dilation = arguments["weight"].shape[2:], _per_dimension(arguments["dilation"], dimensions)
            total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
            if any(amount % 2 for amount in total):
                return None  # uneven padding: the caller differentiates the forward instead
            padding = [amount // 2 for amount in total]
        batched = input.ndim == dimensions + 2
        result = torch.ops.aten.convolution_backward(
            gradient if batched else gradient.unsqueeze(0),
            input if batched else input.unsqueeze(0),
            arguments["weight"],
            None,
            _per_dimension(arguments["stride"], dimensions),
            _per_dimension(padding, dimensions),
            _per_dimension(arguments["dilation"], dimensions),
            transposed,
            _per_dimension(arguments.get("output_padding", 0), dimensions),
            arguments["groups"],
            [True, False, False],
        )[0]
        return (result if batched else result.squeeze(0),)

    return adjoint


def _padded_adjoint(dimensions: int) -> Adjoint:
    of_convolution = _convolution_adjoint(dimensions, transposed=False)

    def adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...] | None:
        amounts = tuple(arguments["amounts"])
        found = of_convolution(gradient, (functional.pad(inputs[0], amounts),), arguments)
        if found is None or found[0] is None:
            return None
        return (functional.pad(found[0], tuple(-amount for amount in amounts)),)

    return adjoint


def _grouped_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    return (grouped_linear(gradient, arguments["weight"].transpose(1, 2), arguments["offsets"]),)


def _selected_adjoint(
    gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound
) -> tuple[torch.Tensor | None, ...] | None:
    (input,), weight = inputs, arguments["weight"]
    return ((gradient @ weight.mT).sum_to_size(input.shape),) if min(input.ndim, weight.ndim) > 1 else None


def _selected_adjoint_of_columns(
    gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound
) -> tuple[torch.Tensor | None, ...] | None:
    (input,), weight = inputs, arguments["weight"]
    return ((weight.mT @ gradient).sum_to_size(input.shape),) if min(input.ndim, weight.ndim) > 1 else None


# --- outputs for an input that is constant per channel ----------------------------------------------------------------------


def _linear_response(shape: Sequence[int], values: torch.Tensor | None, arguments: Bound) -> torch.Tensor:
    weight, bias = arguments["weight"], arguments["bias"]
    result: torch.Tensor = (weight if values is None else weight * values).sum(1)
    return result if bias is None else result + bias


def _convolution_response(dimensions: int, transposed: bool, function: Function) -> ConstantResponse:
    """All entries of a channel are equal, so the kernels of a group are added and applied to one channel of ones."""

    def response(shape: Sequence[int], values: torch.Tensor | None, arguments: Bound) -> torch.Tensor:
        weight, groups = arguments["weight"], arguments["groups"]
        spatial = [1] * dimensions
        if transposed:  # weight: (inputs, outputs of a group, ...)
            weight = weight if values is None else weight * values.reshape(-1, 1, *spatial)
            kernel = weight.unflatten(0, (groups, -1)).sum(1).flatten(0, 1).unsqueeze(0)
        else:  # weight: (outputs, inputs of a group, ...)
            if values is not None:
                of_groups = values.reshape(groups, 1, -1, *spatial)
                weight = (weight.unflatten(0, (groups, -1)) * of_groups).flatten(0, 1)
            kernel = weight.sum(1, keepdim=True)
        ones = weight.new_ones((1, 1, *shape[-dimensions:]))
        result: torch.Tensor = function(**{**arguments, "input": ones, "weight": kernel, "groups": 1})
        return result if len(shape) == dimensions + 2 else result.squeeze(0)

    return response


# --- rows ------------------------------------------------------------------------------------------------------------------


def _without_parameters(build: Builder) -> fx.Node | None:
    """A matrix product that replaces a dense layer whose weight depends on the input."""
    weight, bias = build["weight"], build["bias"]
    if node_info(weight).role is not Role.DATA:
        return None
    transposed = build.call("transpose", weight, -2, -1, target=torch.transpose)
    product = build.call("matmul", build["input"], transposed)
    return product if bias is None else build.call("add", product, bias)


def _sample(dimensions: int, transposed: bool, **further: Any) -> ExampleCall:
    return call(
        loses="bias absent",
        input=signal(2, 4, *[7] * dimensions),
        weight=weight(*((4, 3) if transposed else (6, 2)), *[3] * dimensions),
        bias=weight(6),
        stride=2,
        padding=1,
        dilation=2,
        groups=2,
        **further,
    )


def _of_convolution(name: str, dimensions: int, adjoint: Adjoint, arguments: str = "", **facts: Any) -> Operator:
    """A row for one form of a convolution, with further `arguments` after the bias."""
    return standard_row(
        name,
        kinds.ConvolutionStandard,
        f"input weight bias=None {arguments} stride=1 padding=0 dilation=1 groups=1",
        modules=[getattr(nn, f"Conv{dimensions}d")],
        adjoint=adjoint,
        constant_response=_convolution_response(dimensions, transposed=False, function=function_named(name)),
        spatial=dimensions,
        keeps_rank=True,
        broadcasts=False,
        **facts,
    )


def _convolution(dimensions: int) -> Operator:
    return _of_convolution(
        f"conv{dimensions}d",
        dimensions,
        _convolution_adjoint(dimensions, transposed=False),
        aten=f"conv{dimensions}d.default conv{dimensions}d.padding",
        weight_layout=WeightLayout.CONVOLUTION,
        with_bias_map=f"conv{dimensions}d_with_bias_map",
        with_amounts=f"padded_conv{dimensions}d",
        sample=_sample(dimensions, transposed=False),
    )


def _transposed_convolution(dimensions: int) -> Operator:
    name = f"conv_transpose{dimensions}d"
    return standard_row(
        name,
        kinds.ConvolutionTranspose,
        "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
        aten=f"conv_transpose{dimensions}d.{'default' if dimensions == 1 else 'input'}",
        adjoint=_convolution_adjoint(dimensions, transposed=True),
        constant_response=_convolution_response(dimensions, transposed=True, function=function_named(name)),
        weight_layout=WeightLayout.TRANSPOSED_CONVOLUTION,
        spatial=dimensions,
        keeps_rank=True,
        broadcasts=False,
        sample=_sample(dimensions, transposed=True, output_padding=1),
    )


def _padded_convolution(dimensions: int) -> Operator:
    return _of_convolution(
        f"padded_conv{dimensions}d",
        dimensions,
        _padded_adjoint(dimensions),
        arguments="amounts=()",
        weight_layout=WeightLayout.CONVOLUTION,
        with_bias_map=f"padded_conv{dimensions}d_with_bias_map",
        sample=_sample(dimensions, transposed=False, amounts=_AMOUNTS[: 2 * dimensions]),
    )


def _with_bias_map(dimensions: int, padded: bool) -> Operator:
    amounts: dict[str, Any] = {"amounts": _AMOUNTS[: 2 * dimensions]} if padded else {}
    return _of_convolution(
        f"{'padded_' if padded else ''}conv{dimensions}d_with_bias_map",
        dimensions,
        _padded_adjoint(dimensions) if padded else _convolution_adjoint(dimensions, transposed=False),
        arguments="amounts=()" if padded else "",
        sample=call(
            loses="constants absent" if padded else "constants",
            input=signal(2, 4, *[5] * dimensions),
            weight=weight(6, 2, *[3] * dimensions),
            bias=weight(1, 6, *((5, 4, 6)[3 - dimensions :] if padded else [3] * dimensions)),
            stride=1,
            padding=0,
            dilation=1,
            groups=2,
            **amounts,
        ),
    )


#: Zeros on both sides of the last dimension, then of those before.
_AMOUNTS = (1, 2, 0, 1, 2, 0)


ROWS: tuple[Operator, ...] = (
    standard_row(
        "linear",
        kinds.Linear,
        "input weight bias=None",
        adjoint=_linear_adjoint,
        constant_response=_linear_response,
        weight_layout=WeightLayout.DENSE,
        decomposition=_without_parameters,
        mixes=mixing.last_dimension,
        keeps_rank=True,
        broadcasts=False,
        sample=call(loses="bias", input=MATRIX, weight=weight(3, 4), bias=weight(3)),
    ),
    standard_row(
        "grouped_linear",
        kinds.Linear,
        "input weight offsets",
        counts_as=nn.Linear,
        foreign="torch._ops.transformers.transformers::grouped_mm_fallback",
        reordered=[
            (spelled, "input weight offsets bias out_dtype")
            for spelled in (
                getattr(functional, "grouped_mm", None),
                getattr(torch, "_grouped_mm", None),
                aten_operator("_grouped_mm.default"),
            )
        ],
        indices="offsets",
        aliases="mat_a=input mat_b=weight mat2=weight offs=offsets",
        adjoint=_grouped_adjoint,
        keeps_rank=True,
        broadcasts=False,
        matrices=Matrices.OF_GROUPS,
        sample=call(batch=False, input=signal(4, 3), weight=weight(3, 3, 2), offsets=Fixed([1, 1, 4])),
    ),
    standard_row(
        "selected_linear",
        kinds.Linear,
        "input weight",
        counts_as=nn.Linear,
        adjoint=_selected_adjoint,
        mixes=mixing.last_dimension,
        matrices=Matrices.OF_ENTRIES,
        sample=call(batch=False, input=signal(2, 3, 4), weight=weight(2, 4, 5)),
    ),
    standard_row(
        "selected_linear_of_columns",
        kinds.Linear,
        "input weight",
        counts_as=nn.Linear,
        adjoint=_selected_adjoint_of_columns,
        mixes=mixing.second_last_dimension,
        matrices=Matrices.OF_ENTRIES,
        sample=call(batch=False, input=signal(2, 4, 3), weight=weight(2, 5, 4)),
    ),
    *map(_convolution, (1, 2, 3)),
    *map(_transposed_convolution, (1, 2, 3)),
    *map(_padded_convolution, (1, 2, 3)),
    *(_with_bias_map(dimensions, padded) for padded in (False, True) for dimensions in (1, 2, 3)),
)
