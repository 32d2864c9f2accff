"""Operations that combine entries of several tensors, overwrite entries, or choose among them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.node import is_data, node_info
from lrpfx.ir.operator import Between, Bound, Builder, Channels, ExampleCall, Fill, NotAffineError, Operator
from lrpfx.operators import mixing, signs
from lrpfx.operators.channels import UNKNOWN_RANK, not_flat
from lrpfx.operators.functions import copied, index_copied, index_filled, mask_scattered, overwritten_at, scattered
from lrpfx.operators.row import neutral, standard_row
from lrpfx.operators.samples import IMAGE, MATRIX, Fixed, call, joined, of, signal


def _padded(channels: Channels, bound: Bound) -> Channels:
    """The channels after padding with entries of the value itself. Constant padding does not commute with a map."""
    not_flat(channels)
    if bound.get("mode", "constant") == "constant":
        raise NotAffineError("")
    if channels.dimensions is None:
        raise NotAffineError(UNKNOWN_RANK)
    amounts = bound["pad"]
    if not isinstance(amounts, (tuple, list)) or len(amounts) // 2 > channels.dimensions - 2:
        raise NotAffineError("it pads the channels")
    return channels


def _accumulated(build: Builder) -> fx.Node | None:
    """With accumulate=True, the call is a sum, which has its own row."""
    if not build["accumulate"]:
        return None
    return build.call("index_put_accumulated", build["input"], build["values"], build["indices"])


def _logarithm_of_sum(base: float | None) -> Callable[[Builder], fx.Node]:
    """The logarithm of a sum of two powers, as a logsumexp over them."""

    def decompose(build: Builder) -> fx.Node:
        both = build.call("broadcast_tensors", build["input"], build["other"], target=torch.broadcast_tensors)
        pairs = build.call("stack", both, -1, target=torch.stack)
        if base is None:
            return build.call("logsumexp", pairs, -1, target=torch.logsumexp)
        exponents = build.call("mul", pairs, math.log(base))
        return build.call("div", build.call("logsumexp", exponents, -1, target=torch.logsumexp), math.log(base))

    return decompose


def _combining(name: str, **facts: Any) -> Operator:
    """A row for an operator that combines the tensors of a list."""
    return neutral(name, sign=signs.of_tensors, moves=True, **facts)


def _joined_along(dim: int, least: int, stacks: bool = True) -> Callable[[Builder], fx.Node | None]:
    """`cat` along a dimension of parts of `least` dimensions or more, or `stack` of parts with one less; None for others."""

    def decompose(build: Builder) -> fx.Node | None:
        parts = build.node.args[0] if build.node.args else None
        if not isinstance(parts, (tuple, list)) or not all(isinstance(part, fx.Node) for part in parts):
            return None
        ranks = {None if (shape := node_info(part).shape) is None else len(shape) for part in parts}
        rank = ranks.pop() if len(ranks) == 1 else None
        if rank is None or rank < (least - 1 if stacks else least):
            return None
        name, function = ("cat", torch.cat) if rank >= least else ("stack", torch.stack)
        return build.call(name, list(parts), dim, target=function)

    return decompose


def _of_two(name: str, other_name: str) -> Operator:
    """A row for the larger or smaller of two operands. It takes all relevance, as it takes all of the gradient.

    A constant is a bound: the call is that of a clamp.
    """

    def bounded(build: Builder) -> fx.Node | None:
        operands = build["input"], build["other"]
        if sum(map(is_data, operands)) != 1:
            return None
        value, bound = operands if is_data(operands[0]) else reversed(operands)
        return build.call({"maximum": "clamp_min", "minimum": "clamp_max"}[name], value, bound)

    return standard_row(
        name,
        kinds.Neutral,
        "input other",
        getattr(torch, name),
        between=Between.LARGER if name == "maximum" else Between.SMALLER,
        spelled=f"{name} {other_name}",
        sign=signs.of_both,
        selects=True,
        mixes=mixing.no_dimension,
        decomposition=bounded,
        sample=call(input=MATRIX, other=signal(2, 4)),
    )


def _with_places(name: str, sample: ExampleCall, **facts: Any) -> Operator:
    """A row for an operator that returns values and their indices."""
    return neutral(name, results="values indices", discrete_results=(1,), selects=True, sample=sample, **facts)


_MASK = Fixed([[True, False, True, True], [False, False, True, True]])


ROWS: tuple[Operator, ...] = (
    standard_row(
        "pad",
        kinds.Neutral,
        "input pad mode='constant' value=None",
        reordered=[(torch.ops.aten.constant_pad_nd.default, "input pad value"), (torch.constant_pad_nd, "input pad value")],
        sign=signs.of_padding,
        moves=True,
        channels=_padded,
        keeps_dimensions=True,
        fills=Fill.NUMBER,
        sample=call(loses="constants", input=IMAGE, pad=(1, 2), mode="constant", value=0.5),
    ),
    _combining(
        "cat",
        spelled="cat concat concatenate",
        keeps_dimensions=True,
        sample=of(lambda x, y: torch.cat([x, y], axis=1), (2, 3), (2, 4)),  # type: ignore[call-arg]  # numpy's name
    ),
    _combining("stack", sample=of(lambda x, y: torch.stack([x, y], 1), (2, 4), (2, 4))),
    _combining(
        "hstack", decomposition=_joined_along(1, 2, stacks=False), sample=of(lambda x, y: torch.hstack([x, y]), (2, 3), (2, 4))
    ),
    _combining(
        "vstack",
        spelled="vstack row_stack",
        decomposition=_joined_along(0, 2),
        sample=of(lambda x, y: torch.vstack([x, y]), (1, 4), (2, 4), batch=False),
    ),
    _combining("dstack", decomposition=_joined_along(2, 3), sample=of(lambda x, y: torch.dstack([x, y]), (2, 4), (2, 4))),
    _combining(
        "column_stack", decomposition=_joined_along(1, 2), sample=of(lambda x, y: torch.column_stack([x, y]), (2, 3), (2, 4))
    ),
    neutral(
        "broadcast_tensors",
        view=True,
        result_per_argument=True,
        sample=of(lambda x, y: torch.broadcast_tensors(x, y)[0] + torch.broadcast_tensors(x, y)[1], (2, 3, 1), (2, 1, 4)),
    ),
    neutral(
        "meshgrid",
        view=True,
        result_per_argument=True,
        sample=of(lambda x, y: joined(torch.meshgrid(x, y, indexing="ij")), (3,), (4,), batch=False),
    ),
    standard_row(
        "where",
        kinds.Neutral,
        "condition input other",
        data="condition input other",
        reordered=[("where", "input condition other")],
        aten="where.self where.ScalarOther where.ScalarSelf where.Scalar",
        indices="condition",
        sign=signs.of_both,
        selects=True,
        mixes=mixing.no_dimension,
        chooses=("condition", "input", "other"),
        sample=call(condition=_MASK, input=MATRIX, other=signal(2, 4)),
    ),
    standard_row(
        "chosen_by_comparison",
        kinds.Product,  # with truth values
        "input other first last comparison",
        data="input other first last",
        between=Between.CHOICE,
        without_sample="only the compiler inserts it",
    ),
    standard_row(
        "masked_fill",
        kinds.Neutral,
        "input mask value",
        sign=signs.of_masked_fill,
        selects=True,
        mixes=mixing.no_dimension,
        chooses=("mask", "value", "input"),
        sample=call(loses="constants", input=MATRIX, mask=_MASK, value=0.5),
    ),
    neutral(
        "slice_scatter", selects=True, overwrites=True, sample=of(lambda x, y: x.slice_scatter(y, 1, 1, 3), (2, 4), (2, 2))
    ),
    neutral("select_scatter", selects=True, overwrites=True, sample=of(lambda x, y: x.select_scatter(y, 1, 1), (2, 4), (2,))),
    neutral(
        "diagonal_scatter",
        selects=True,
        overwrites=True,
        sample=of(lambda x, y: x.diagonal_scatter(y), (4, 4), (4,), batch=False),
    ),
    standard_row(
        "index_put",
        kinds.Neutral,
        "input indices values accumulate=False",
        overwritten_at,
        decomposition=_accumulated,
        selects=True,
        sample=call(input=MATRIX, indices=(Fixed([0, 1]), Fixed([2, 3])), values=signal(2), accumulate=False),
    ),
    standard_row(
        "scatter",
        kinds.Neutral,
        "input dim index source",
        scattered,
        aliases="value=source",
        selects=True,
        sample=call(input=MATRIX, dim=1, index=Fixed([[0, 2], [1, 3]]), source=signal(2, 2)),
    ),
    standard_row(
        "index_copy",
        kinds.Neutral,
        "input source dim index",
        index_copied,
        data="input source",
        order="input dim index source",
        selects=True,
        sample=call(input=MATRIX, dim=1, index=Fixed([0, 2]), source=signal(2, 2)),
    ),
    standard_row(
        "index_fill",
        kinds.Neutral,
        "input value dim index",
        index_filled,
        data="input value",
        order="input dim index value",
        selects=True,
        sample=call(loses="constants", input=MATRIX, dim=1, index=Fixed([0, 2]), value=0.5),
    ),
    standard_row(
        "masked_scatter",
        kinds.Neutral,
        "input source mask",
        mask_scattered,
        data="input source",
        order="input mask source",
        sample=call(batch=False, input=MATRIX, source=signal(5), mask=_MASK),
    ),
    standard_row(
        "copy",
        kinds.Neutral,
        "input source non_blocking=False",
        copied,
        aten="copy.default",
        inplace_aten="copy_.default",
        selects=True,
        sample=call(batch=False, input=MATRIX, source=signal(4), non_blocking=False),
    ),
    standard_row("fill", kinds.Neutral, "input value", sample=call(loses="constants", input=MATRIX, value=0.5)),
    standard_row("zero", kinds.Neutral, "input", torch.zeros_like, discrete=True, sample=of(lambda x: x + x.clone().zero_())),
    neutral(
        "max_unpool",
        spelled="max_unpool1d max_unpool2d max_unpool3d",
        modules=[nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d],
        sign=signs.of_input,
        selects=True,
        sample=of(
            lambda x: functional.max_unpool2d(
                functional.max_pool2d(x, 2), functional.max_pool2d(x, 2, return_indices=True)[1], (2, 2)
            ),
            (2, 3, 4, 4),
            loses="constants",
        ),
    ),
    _of_two("maximum", "fmax"),
    _of_two("minimum", "fmin"),
    neutral(
        "amax", between=Between.LARGEST, sign=signs.of_input, selects=True, mixes=mixing.given(), sample=of(lambda x: x.amax(1))
    ),
    neutral(
        "amin",
        between=Between.SMALLEST,
        sign=signs.of_input,
        selects=True,
        mixes=mixing.given(),
        sample=of(lambda x: x.amin(axis=1, keepdims=True)),
    ),
    _with_places("max", of(lambda x: x.max(dim=1).values), between=Between.LARGEST, mixes=mixing.given()),
    _with_places("min", of(lambda x: torch.min(x, 1)[0]), between=Between.SMALLEST, mixes=mixing.given()),
    _with_places("median", of(lambda x: x.median(1).values), mixes=mixing.given()),
    _with_places("nanmedian", of(lambda x: x.nanmedian(1).values), mixes=mixing.given()),
    _with_places("mode", of(lambda x: x.mode(1).values), mixes=mixing.given(default=-1)),
    _with_places("kthvalue", of(lambda x: torch.kthvalue(x, 2, dim=1).values), mixes=mixing.given(2, -1)),
    _with_places("topk", of(lambda x: x.topk(2, 1).values), mixes=mixing.given(2, -1)),
    _with_places("sort", of(lambda x: x.sort(1)[0]), mixes=mixing.given(default=-1)),
    _with_places("cummax", of(lambda x: x.cummax(1)[0]), between=Between.LARGEST, accumulates=mixing.given()),
    _with_places("cummin", of(lambda x: x.cummin(1)[0]), between=Between.SMALLEST, accumulates=mixing.given()),
    # A soft maximum: its gradient consists of shares that add up to 1.
    neutral(
        "logsumexp",
        between=Between.LOG_SUM,
        spelled="logsumexp special_logsumexp",
        functions=[torch.special.logsumexp],
        mixes=mixing.given(),
        sample=of(lambda x: x.logsumexp(1)),
    ),
    neutral(
        "logcumsumexp", between=Between.RUNNING_LOG_SUM, accumulates=mixing.given(), sample=of(lambda x: x.logcumsumexp(1))
    ),
    neutral("msort", selects=True, mixes=mixing.first_dimension, sample=of(lambda x: torch.msort(x), (4, 2), batch=False)),
    neutral(
        "put",
        indices="1",
        selects=True,
        sample=of(lambda x, y: x.put(torch.tensor([1, 5]), y), (2, 4), (2,), batch=False, loses="replaced"),
    ),
    standard_row(
        "logaddexp",
        kinds.Neutral,
        "input other",
        decomposition=_logarithm_of_sum(None),
        mixes=mixing.no_dimension,
        sample=call(input=MATRIX, other=signal(2, 4)),
    ),
    standard_row(
        "logaddexp2",
        kinds.Neutral,
        "input other",
        decomposition=_logarithm_of_sum(2.0),
        mixes=mixing.no_dimension,
        sample=call(input=MATRIX, other=signal(2, 4)),
    ),
)
