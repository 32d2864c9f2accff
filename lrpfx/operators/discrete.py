"""Operators with integer, boolean or piecewise constant results, which are constants to relevance."""

import builtins
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional

from lrpfx import types
from lrpfx.ir.operator import Function, Operator, Sample
from lrpfx.operators import mixing
from lrpfx.operators.functions import floor_divided, floor_divides, heaviside, histogram
from lrpfx.operators.row import neutral, row
from lrpfx.operators.samples import mask


def _all_overloads(packet: str) -> str:
    """The names of all overloads of an ATen operator that return their result."""
    known = getattr(torch.ops.aten, packet).overloads() if hasattr(torch.ops.aten, packet) else []
    return " ".join(f"{packet}.{name}" for name in known if "out" not in name and name not in ("int", "str", "dimname"))


def _constant(
    name: str,
    sample: Sample,
    functions: Iterable[Function] = (),
    methods: str = "",
    inplace_methods: str = "",
    aten: str = "",
    **facts: Any,
) -> Operator:
    """A row for a torch function, the tensor method of the same name, and further spellings."""
    own_inplace = f"{name}_" if hasattr(torch.Tensor, f"{name}_") else ""
    return neutral(
        name,
        [getattr(torch, name), *functions],
        methods=f"{name} {methods}",
        inplace_methods=f"{own_inplace} {inplace_methods}",
        aten=f"{_all_overloads(name)} {aten}",
        discrete=True,
        sample=sample,
        **facts,
    )


def _comparison(name: str) -> Operator:
    function = getattr(torch, name)
    sample = mask(lambda x: function(x, 0.1))
    return _constant(name, sample, [getattr(operator, name)], f"__{name}__", mixes=mixing.no_dimension)


def _of_bits(name: str, symbol: str, function: Function, inplace: Function, sample: Sample) -> Operator:
    """A row for a bitwise operator, which has a Python symbol."""
    return _constant(
        f"bitwise_{name}",
        sample,
        [function],
        f"__{symbol}__ __r{symbol}__",
        f"__i{symbol}__",
        _all_overloads(f"__{symbol}__"),
        inplace=[inplace],
        indices="0 1 input other",
        mixes=mixing.no_dimension,
    )


def _by_itself(name: str, functions: Iterable[Function] = (), methods: str = "", **facts: Any) -> Operator:
    function = getattr(torch, name)
    return _constant(name, mask(lambda x: function(x)), functions, methods, mixes=mixing.no_dimension, **facts)


def _of_truth_values(name: str) -> Operator:
    function = getattr(torch, name)
    return _constant(name, mask(lambda x: function(x > 0, x > 0.5)), mixes=mixing.no_dimension)


ROWS: tuple[Operator, ...] = (
    *map(_comparison, ("eq", "ne", "lt", "le", "gt", "ge")),
    _constant("isclose", mask(lambda x: torch.isclose(x, x.roll(1))), mixes=mixing.no_dimension),
    _constant("isin", mask(lambda x: torch.isin(x, torch.tensor([0.0, 1.0])))),
    *map(_by_itself, ("isnan", "isinf", "isfinite", "signbit", "logical_not")),
    *map(_of_truth_values, ("logical_and", "logical_or", "logical_xor")),
    _of_bits("and", "and", operator.and_, operator.iand, mask(lambda x: (x > 0) & (x < 0.5))),
    _of_bits("or", "or", operator.or_, operator.ior, mask(lambda x: (x < 0).__or__(x > 0.5))),
    _of_bits("xor", "xor", operator.xor, operator.ixor, mask(lambda x: (x > 0) ^ (x < 0.5))),
    _constant(
        "bitwise_not", mask(lambda x: ~(x > 0)), [operator.invert], "__invert__", indices="0 input", mixes=mixing.no_dimension
    ),
    _constant("all", mask(lambda x: (x > 0).all(1, keepdim=True)), mixes=mixing.given()),
    _constant("any", mask(lambda x: (x > 0).any(1, keepdim=True)), mixes=mixing.given()),
    _constant("count_nonzero", mask(lambda x: x.count_nonzero(1).unsqueeze(1)), mixes=mixing.given()),
    _constant("nonzero", mask(lambda x: x.nonzero().sum(), batch=False)),
    _constant("argmax", mask(lambda x: x.argmax(1, keepdim=True)), mixes=mixing.given()),
    _constant("argmin", mask(lambda x: x.argmin(dim=1, keepdim=True)), mixes=mixing.given()),
    _constant("argsort", mask(lambda x: x.argsort(1)), mixes=mixing.given(default=-1)),
    _constant("searchsorted", mask(lambda x: torch.searchsorted(torch.tensor([0.0, 0.5]), x))),
    _constant("bucketize", mask(lambda x: torch.bucketize(x, torch.tensor([0.0, 0.5])))),
    _constant("bincount", mask(lambda x: torch.bincount((x[:, 0] > 0).long(), minlength=4), (4, 4), batch=False)),
    _by_itself("sign"),
    _by_itself("sgn"),
    _by_itself("round", [builtins.round], "__round__"),
    _by_itself("floor", [math.floor], "__floor__"),
    _by_itself("ceil", [math.ceil], "__ceil__"),
    _by_itself("trunc", [torch.fix], "fix", inplace_methods="fix_"),
    row(
        "floor_divide",
        types.Neutral,
        floor_divided,
        "input other",
        functions=[torch.floor_divide, operator.floordiv],
        inplace=[operator.ifloordiv],
        methods="floor_divide __floordiv__",
        inplace_methods="floor_divide_ __ifloordiv__",
        aten=_all_overloads("floor_divide"),
        discrete=True,
        mixes=mixing.no_dimension,
        reflected="floor_divides",
        sample=mask(lambda x: x // 0.3),
    ),
    row(
        "floor_divides",
        types.Neutral,
        floor_divides,
        "input other",
        methods="__rfloordiv__",
        discrete=True,
        mixes=mixing.no_dimension,
        sample=mask(lambda x: 1.0 // (x + 3)),
    ),
    row(
        "heaviside",
        types.Neutral,
        heaviside,
        "input values",
        functions=[torch.heaviside],
        methods="heaviside",
        aten="heaviside.default",
        discrete=True,
        mixes=mixing.no_dimension,
        sample=mask(lambda x: torch.heaviside(x, torch.tensor(0.5))),
    ),
    row(
        "histc",
        types.Neutral,
        histogram,
        "input bins=100 min=0 max=0",
        functions=[torch.histc],
        methods="histc",
        aten="histc.default",
        discrete=True,
        sample=mask(lambda x: torch.histc(x, 4, -1, 1), batch=False),
    ),
    neutral(
        "to_integer",
        methods="bool long int short byte char",
        discrete=True,
        converts=True,
        sample=mask(lambda x: x.bool().long() + x.int() + x.short()),
    ),
    neutral(
        "one_hot",
        [functional.one_hot],
        methods="",
        aten="one_hot.default",
        discrete=True,
        indices="0 input self",
        sample=mask(lambda x: functional.one_hot(x.argmax(1), 4)),
    ),
)
