"""Pooling, and means over dimensions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Between, Bound, Channels, Function, NotAffineError, Operator
from lrpfx.operators import mixing, signs
from lrpfx.operators.channels import UNKNOWN_RANK, not_flat, pads
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import IMAGE, call, of, signal


def _averaged(channels: Channels, bound: Bound) -> Channels:
    """The channels after a mean over dimensions."""
    not_flat(channels)
    dims = bound.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (tuple, list)) or not dims or not all(isinstance(dim, int) for dim in dims):
        raise NotAffineError("it takes the mean over all dimensions")
    if bound.get("dtype") is not None:
        raise NotAffineError("it changes the dtype")
    if channels.dimensions is None:
        raise NotAffineError(UNKNOWN_RANK)
    over = {dim % channels.dimensions for dim in dims}
    if over & {0, 1}:
        raise NotAffineError("it takes the mean over the channels or the batch")
    return channels if bound.get("keepdim") else replace(channels, dimensions=channels.dimensions - len(over))


def _pooled(spatial: int) -> Callable[[Channels, Bound], Channels]:
    """The channels after average pooling over `spatial` dimensions."""

    def behind(channels: Channels, bound: Bound) -> Channels:
        not_flat(channels)
        if channels.dimensions is None:
            raise NotAffineError(UNKNOWN_RANK)
        if channels.dimensions != spatial + 2:
            raise NotAffineError(f"it pools over the channels of a value with {channels.dimensions} dimensions")
        if bound.get("divisor_override") is not None:
            raise NotAffineError("with divisor_override it is not a mean and scales the shift")
        if pads(bound.get("padding", 0)) and bound.get("count_include_pad", True) is not False:
            raise NotAffineError("it averages over zeros of its padding, which have no shift")
        return channels

    return behind


def _average_pool(dimensions: int) -> Operator:
    name = f"avg_pool{dimensions}d"
    divisor: dict[str, Any] = {"divisor_override": None} if dimensions > 1 else {}
    return standard_row(
        name,
        kinds.AvgPool,
        "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True"
        + "".join(f" {name}=None" for name in divisor),
        getattr(functional, name),
        sign=signs.of_pooling,
        adds_up=True,
        spatial=dimensions,
        channels=_pooled(dimensions),
        keeps_rank=True,
        broadcasts=False,
        sample=call(
            input=signal(2, 3, *[7] * dimensions),
            kernel_size=3,
            stride=2,
            padding=1,
            ceil_mode=True,
            count_include_pad=False,
            **divisor,
        ),
    )


def _adaptive_average_pool(dimensions: int) -> Operator:
    name = f"adaptive_avg_pool{dimensions}d"
    return standard_row(
        name,
        kinds.AvgPool,
        "input output_size",
        getattr(functional, name),
        spelled=f"{name} _{name}",
        sign=signs.of_input,
        adds_up=True,
        spatial=dimensions,
        channels=_pooled(dimensions),
        keeps_rank=True,
        broadcasts=False,
        sample=call(input=signal(2, 3, *[7] * dimensions), output_size=3),
    )


def _maximum_pool(name: str, function: Function | None = None, arguments: str = "", **facts: Any) -> Operator:
    return standard_row(
        name,
        kinds.MaxPool,
        arguments,
        function,
        between=Between.LARGEST,
        sign=signs.of_input,
        selects=True,
        discrete_results=(1,),
        **facts,
    )


def _maximum_pools(dimensions: int) -> tuple[Operator, ...]:
    """Both forms, each with and without the indices of the maxima."""
    name, adaptive = f"max_pool{dimensions}d", f"adaptive_max_pool{dimensions}d"
    function, adaptive_function = getattr(functional, name), getattr(functional, adaptive)
    x = signal(2, 3, *[7] * dimensions)
    return (
        _maximum_pool(
            name,
            function,
            "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False",
            spatial=dimensions,
            keeps_rank=True,
            broadcasts=False,
            sample=call(input=x, kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=True, return_indices=False),
        ),
        _maximum_pool(
            f"{name}_with_indices",
            results="values indices",
            spatial=dimensions,
            keeps_rank=True,
            broadcasts=False,
            sample=of(lambda x: function(x, 2, return_indices=True)[0], (2, 3, *[4] * dimensions)),
        ),
        _maximum_pool(
            adaptive,
            adaptive_function,
            "input output_size return_indices=False",
            spelled="",
            sample=call(input=x, output_size=3, return_indices=False),
        ),
        _maximum_pool(
            f"{adaptive}_with_indices",
            results="values indices",
            aten=f"{adaptive}.default",
            sample=of(lambda x: adaptive_function(x, 2, return_indices=True)[0], (2, 3, *[4] * dimensions)),
        ),
    )


ROWS: tuple[Operator, ...] = (
    *map(_average_pool, (1, 2, 3)),
    *map(_adaptive_average_pool, (1, 2, 3)),
    standard_row(
        "mean",
        kinds.AvgPool,
        "input dim=None keepdim=False dtype=None",
        sign=signs.of_input,
        adds_up=True,
        channels=_averaged,
        mixes=mixing.given(),
        sample=call(input=IMAGE, dim=(2, 3), keepdim=True, dtype=torch.float64),
    ),
    *(row for dimensions in (1, 2, 3) for row in _maximum_pools(dimensions)),
)
