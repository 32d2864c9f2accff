"""Reductions by index, and quantiles: sums of chosen entries, or the choice of one."""

from typing import Any

import torch
from torch import fx

from lrpfx.ir import kinds
from lrpfx.ir.node import Role, update_info
from lrpfx.ir.operator import Between, Builder, Function, Operator
from lrpfx.operators import mixing
from lrpfx.operators.functions import (
    index_averaged,
    index_chosen,
    index_reduced,
    scatter_averaged,
    scatter_chosen,
    scatter_reduced,
)
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import MATRIX, Fixed, call, of, signal

_CHOICES = {"sum": "averaged", "mean": "averaged", "amax": "chosen", "amin": "chosen"}


def _by_kind(build: Builder) -> fx.Node | None:
    """The row for a sum or mean, or for the choice of an entry. A product has no rule."""
    kind, reduce = _CHOICES.get(build["reduce"]), build["reduce"]
    if kind is None:
        return None
    places = build["input"], build["source"], build["dim"], build["index"]
    if reduce == "sum" and build["include_self"]:
        return build.call("scatter_add", *places, label="")
    by = "scatter" if build.node.target is scatter_reduced else "index"
    return build.call(f"{by}_{kind}", *places, reduce, include_self=build["include_self"], label="")


def _without_missing(build: Builder) -> fx.Node:
    """Entries that are NaN are not entries: they are filled with 0, which takes no relevance."""
    missing = build.call("isnan", build["input"], target=torch.isnan)
    update_info(missing, role=Role.CONSTANT)
    filled = build.call("masked_fill", build["input"], missing, 0.0)
    options = {name: build[name] for name in ("dim", "keepdim", "interpolation")}
    return build.call("quantile_without", filled, missing, build["q"], label="", **options)


def _reductions(by: str, functions: tuple[Function, Function, Function], reduce: str) -> tuple[Operator, ...]:
    """The rows of `torch.scatter_reduce` or `torch.index_reduce`: as it is spelled, by sums and means, and by choices."""
    name = f"{by}_reduce"
    index = Fixed([[0, 0], [1, 3]] if by == "scatter" else [0, 0])
    places: dict[str, Any] = {"input": MATRIX, "dim": 1, "index": index, "source": signal(2, 2)}
    reduced, averaged, chosen = functions
    arguments = "input source dim index reduce include_self=True"
    return (
        standard_row(
            name,
            kinds.Unknown,
            arguments,
            reduced,
            data="input source",
            spelled=name,
            order="input dim index source reduce include_self",
            decomposition=_by_kind,
            sample=call(**places, reduce=reduce, include_self=False),
        ),
        standard_row(
            f"{by}_averaged",
            kinds.Sum,
            arguments,
            averaged,
            data="input source",
            sample=call(**places, reduce="mean", include_self=False),
        ),
        standard_row(
            f"{by}_chosen",
            kinds.Neutral,
            arguments,
            chosen,
            data="input source",
            between=Between.LARGEST,
            selects=True,
            sample=call(**places, reduce="amin", include_self=False),
        ),
    )


ROWS: tuple[Operator, ...] = (
    *_reductions("scatter", (scatter_reduced, scatter_averaged, scatter_chosen), "amax"),
    *_reductions("index", (index_reduced, index_averaged, index_chosen), "mean"),
    standard_row(
        "quantile",
        kinds.Sum,
        "input q dim=None keepdim=False interpolation='linear'",
        mixes=mixing.given(2),
        sample=call(input=MATRIX, q=0.3, dim=1, keepdim=True),
    ),
    standard_row(
        "nanquantile",
        kinds.Sum,
        "input q dim=None keepdim=False interpolation='linear'",
        decomposition=_without_missing,
        mixes=mixing.given(2),
        sample=of(lambda x: torch.nanquantile(torch.where(x > 0.9, torch.nan, x), 0.3, 1, keepdim=True)),
    ),
    standard_row(
        "quantile_without",
        kinds.Sum,
        "input missing q dim=None keepdim=False interpolation='linear'",
        indices="missing",
        without_sample="only the compiler inserts it",
    ),
)
