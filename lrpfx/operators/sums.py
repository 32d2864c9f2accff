"""Additions, subtractions, and sums over dimensions and places."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx import layer as layers
from lrpfx.ir import kinds
from lrpfx.ir.node import is_data, node_info
from lrpfx.ir.operator import Bound, Builder, Function, Operator
from lrpfx.operators import contractions, mixing, signs
from lrpfx.operators.functions import affine_grid, index_added, index_put_accumulated, scatter_added, slope
from lrpfx.operators.row import row
from lrpfx.operators.samples import IMAGE, MATRIX, Fixed, call, of, signal
from lrpfx.support.hidden_scores import is_hidden


def _addition_adjoint(
    gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound
) -> tuple[torch.Tensor | None, ...] | None:
    if arguments["alpha"] != 1:
        return None
    return tuple(gradient.sum_to_size(value.shape) for value in inputs)


def _interpolated(build: Builder) -> fx.Node:
    """`input` + weight * (end - input), or with a constant end, the sum of both with their shares."""
    ends, weight = (build["input"], build["end"]), build["weight"]
    if isinstance(weight, (int, float)) and not all(map(is_data, ends)):
        return build.call("add", build.call("mul", ends[0], 1 - weight), build.call("mul", ends[1], weight))
    difference = build.call("sub", build["end"], build["input"])
    return build.call("add", build["input"], build.call("mul", difference, build["weight"]))


def _slopes(build: Builder) -> tuple[fx.Node, ...] | None:
    """Finite differences along each dimension."""
    dims, spacing = build["dim"], build["spacing"]
    if dims is None:
        shape = node_info(build["input"]).shape
        dims = None if shape is None else range(len(shape))
    if dims is None:
        return None
    dims = (dims,) if isinstance(dims, (int, fx.Node)) else tuple(dims)
    spacings = list(spacing) if isinstance(spacing, (tuple, list)) else [spacing] * len(dims)
    pairs = zip(dims, spacings, strict=True)
    return tuple(build.call("slope", build["input"], *pair, edge_order=build["edge_order"]) for pair in pairs)


def _integral(name: str, function: Function, also: str = "") -> Operator:
    """A row for an integral by the trapezoidal rule, along one dimension."""
    sample = of(lambda y: function(y, dx=0.5, dim=1))
    return row(name, kinds.Sum, spelled=f"{name} {also}", mixes=mixing.given(default=-1), sample=sample)


ROWS: tuple[Operator, ...] = (
    row(
        "add",
        kinds.Sum,
        torch.add,
        "input other alpha=1",
        data="input other",
        modules=[layers.Sum],
        functions=[operator.add],
        inplace=[operator.iadd],
        methods="__add__ __radd__",
        inplace_methods="__iadd__",
        adjoint=_addition_adjoint,
        reflected="add",
        sign=signs.of_sum,
        elementwise=True,
        affine_in="input other",
        coefficients=lambda alpha: (1, alpha),
        absorbs=is_hidden,
        keeps_infinity=True,
        sample=call(input=MATRIX, other=signal(2, 4), alpha=2),
    ),
    row(
        "sub",
        kinds.Sum,
        torch.sub,
        "input other alpha=1",
        data="input other",
        spelled="sub subtract",
        functions=[operator.sub],
        inplace=[operator.isub],
        methods="__sub__",
        inplace_methods="__isub__",
        reflected="rsub",
        sign=signs.of_difference,
        elementwise=True,
        affine_in="input other",
        coefficients=lambda alpha: (1, -alpha),
        sample=call(input=MATRIX, other=signal(2, 4), alpha=2),
    ),
    row(
        "rsub",
        kinds.Sum,
        torch.rsub,
        "input other alpha=1",
        data="input other",
        methods="__rsub__",
        sign=signs.of_reversed_difference,
        elementwise=True,
        affine_in="input other",
        coefficients=lambda alpha: (-alpha, 1),
        sample=call(input=MATRIX, other=signal(2, 4), alpha=2),
    ),
    row(
        "sum",
        kinds.Sum,
        torch.sum,
        "input dim=None keepdim=False dtype=None",
        modules=[layers.Sum],
        contraction=contractions.of_sum,
        sign=signs.of_input,
        adds_up=True,
        mixes=mixing.given(),
        sample=call(input=IMAGE, dim=(2, 3), keepdim=True, dtype=torch.float64),
    ),
    row(
        "cumsum",
        kinds.Sum,
        torch.cumsum,
        "input dim dtype=None",
        sign=signs.of_input,
        adds_up=True,
        accumulates=mixing.given(),
        sample=call(input=MATRIX, dim=1, dtype=torch.float64),
    ),
    row("diff", kinds.Sum, mixes=mixing.given(2, -1), sample=of(lambda x: torch.diff(x, dim=1))),
    _integral("trapezoid", torch.trapezoid, "trapz"),
    _integral("cumulative_trapezoid", torch.cumulative_trapezoid),
    row(
        "gradient",
        kinds.Sum,
        torch.gradient,
        "input spacing=1 dim=None edge_order=1",
        aten="gradient.scalarint gradient.scalararray gradient.scalarrayint gradient.scalarrayarray",
        reordered=[
            (torch.ops.aten.gradient.array, "input dim"),
            (torch.ops.aten.gradient.tensorarrayint, "input spacing"),
            (torch.ops.aten.gradient.tensorarray, "input spacing dim"),
        ],
        decomposition=_slopes,
        sample=of(lambda x: torch.gradient(x, spacing=2.0, dim=1, edge_order=2)[0]),
    ),
    row(
        "slope",
        kinds.Sum,
        slope,
        "input dim spacing=1 edge_order=1",
        mixes=mixing.given(),
        sample=call(input=MATRIX, dim=1, spacing=0.5, edge_order=2),
    ),
    row("nansum", kinds.Sum, mixes=mixing.given(), sample=of(lambda x: torch.nansum(x, 1))),
    row("trace", kinds.Sum, adds_up=True, sample=of(lambda x: torch.trace(x), (4, 4), batch=False)),
    row(
        "scatter_add",
        kinds.Sum,
        scatter_added,
        "input source dim index",
        data="input source",
        order="input dim index source",
        indices="index",
        sample=call(input=MATRIX, dim=1, index=Fixed([[0, 0], [1, 3]]), source=signal(2, 2)),
    ),
    row(
        "index_add",
        kinds.Sum,
        index_added,
        "input source dim index alpha=1",
        data="input source",
        order="input dim index source alpha",
        indices="index",
        sample=call(input=MATRIX, dim=1, index=Fixed([0, 0, 2]), source=signal(2, 3), alpha=2),
    ),
    row(
        "index_put_accumulated",
        kinds.Sum,
        index_put_accumulated,
        "input values indices",
        data="input values",
        sample=of(lambda x, y: x.index_put((torch.tensor([0, 0]),), y, accumulate=True), (2, 4), (2, 4), batch=False),
    ),
    row(
        "affine_grid",
        kinds.Sum,
        affine_grid,
        "theta size align_corners=None",
        data="theta",
        functions=[functional.affine_grid],
        aten="affine_grid_generator.default",
        sample=of(lambda theta: functional.affine_grid(theta, [2, 3, 4, 4], align_corners=False), (2, 2, 3), batch=False),
    ),
    row(
        "lerp",
        kinds.Sum,
        torch.lerp,
        "input end weight",
        data="input end weight",
        decomposition=_interpolated,
        keeps_dimensions=True,
        sample=call(input=MATRIX, end=signal(2, 4), weight=0.3),
    ),
    row(
        "fold",
        kinds.Sum,
        functional.fold,
        "input output_size kernel_size dilation=1 padding=0 stride=1",
        modules=[nn.Fold],
        sign=signs.of_input,
        adds_up=True,
        sample=call(input=signal(2, 8, 9), output_size=(4, 4), kernel_size=(2, 2), dilation=1, padding=0, stride=1),
    ),
    row(
        "col2im",
        kinds.Sum,
        sign=signs.of_input,
        adds_up=True,
        sample=of(lambda x: torch.ops.aten.col2im.default(x, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), (2, 8, 9)),
    ),
)
