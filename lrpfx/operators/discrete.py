"""Operators with integer, boolean or piecewise constant results, which are constants to relevance."""

import builtins
import math
import operator
from typing import Any

import torch
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import ExampleCall, Function, Operator
from lrpfx.operators import mixing
from lrpfx.operators.functions import floor_divided, held, histogram
from lrpfx.operators.row import neutral, standard_row
from lrpfx.operators.samples import mask


def _constant(name: str, sample: ExampleCall, also: str = "", **facts: Any) -> Operator:
    return neutral(name, spelled=f"{name} {also}", discrete=True, sample=sample, **facts)


def _comparison(name: str, steps: bool = False) -> Operator:
    function, spelled = getattr(torch, name), [getattr(operator, name)]
    return _constant(
        name, mask(lambda x: function(x, 0.1)), functions=spelled, methods=f"__{name}__", mixes=mixing.no_dimension, steps=steps
    )


def _of_bits(name: str, function: Function, inplace: Function, sample: ExampleCall, **facts: Any) -> Operator:
    """A row for a bitwise operator, which has a Python symbol."""
    return _constant(
        f"bitwise_{name}",
        sample,
        f"__{name}__",
        functions=[function],
        inplace=[inplace],
        methods=f"__r{name}__",
        inplace_methods=f"__i{name}__",
        aten=f"bitwise_{name}.Scalar_Tensor",
        indices="0 1 input other",
        mixes=mixing.no_dimension,
        **facts,
    )


def _by_itself(name: str, also: str = "", **facts: Any) -> Operator:
    function = getattr(torch, name)
    return _constant(name, mask(lambda x: function(x)), also, mixes=mixing.no_dimension, **facts)


def _of_truth_values(name: str, **facts: Any) -> Operator:
    function = getattr(torch, name)
    return _constant(name, mask(lambda x: function(x > 0, x > 0.5)), mixes=mixing.no_dimension, **facts)


def _is_true(value: torch.Tensor) -> torch.Tensor:
    """Where a boolean is true; nowhere for integers, whose bits decide one by one."""
    return value if value.dtype == torch.bool else torch.zeros_like(value, dtype=torch.bool)


ROWS: tuple[Operator, ...] = (
    *map(_comparison, ("eq", "ne")),
    *(_comparison(name, steps=True) for name in ("lt", "le", "gt", "ge")),
    _constant("isclose", mask(lambda x: torch.isclose(x, x.roll(1))), mixes=mixing.no_dimension),
    _constant(
        "isin",
        mask(lambda x: torch.isin(x, torch.tensor([0.0, 1.0]))),
        aten="isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor",
    ),
    _constant(
        "held",
        mask(lambda x: held(x)),
        functions=[held],
        whole={"(Tensor input) -> Tensor": (held,)},
        empty_result=torch.empty_like,
        mixes=mixing.no_dimension,
    ),
    *map(_by_itself, ("isnan", "isinf", "isfinite", "signbit", "logical_not")),
    _of_truth_values("logical_and", absorbs=torch.logical_not),
    _of_truth_values("logical_or", absorbs=lambda value: value != 0),
    _of_truth_values("logical_xor"),
    _of_bits("and", operator.and_, operator.iand, mask(lambda x: (x > 0) & (x < 0.5)), absorbs=torch.logical_not),
    _of_bits("or", operator.or_, operator.ior, mask(lambda x: (x < 0).__or__(x > 0.5)), absorbs=_is_true),
    _of_bits("xor", operator.xor, operator.ixor, mask(lambda x: (x > 0) ^ (x < 0.5))),
    _constant(
        "bitwise_not",
        mask(lambda x: ~(x > 0)),
        functions=[operator.invert],
        methods="__invert__",
        indices="0 input",
        mixes=mixing.no_dimension,
    ),
    _constant("all", mask(lambda x: (x > 0).all(1, keepdim=True)), mixes=mixing.given()),
    _constant("any", mask(lambda x: (x > 0).any(1, keepdim=True)), mixes=mixing.given()),
    _constant("count_nonzero", mask(lambda x: x.count_nonzero(1).unsqueeze(1)), mixes=mixing.given()),
    _constant("nonzero", mask(lambda x: x.nonzero().sum(), batch=False)),
    _constant("argmax", mask(lambda x: x.argmax(1, keepdim=True)), mixes=mixing.given()),
    _constant("argmin", mask(lambda x: x.argmin(dim=1, keepdim=True)), mixes=mixing.given()),
    _constant("argsort", mask(lambda x: x.argsort(1)), mixes=mixing.given(default=-1)),
    _constant(
        "searchsorted",
        mask(lambda x: torch.searchsorted(torch.tensor([0.0, 0.5]), x)),
        aten="searchsorted.Tensor searchsorted.Scalar",
    ),
    _constant("bucketize", mask(lambda x: torch.bucketize(x, torch.tensor([0.0, 0.5]))), aten="bucketize.Scalar"),
    _constant("bincount", mask(lambda x: torch.bincount((x[:, 0] > 0).long(), minlength=4), (4, 4), batch=False)),
    _by_itself("sign"),
    _by_itself("sgn"),
    _by_itself("round", functions=[builtins.round], methods="__round__"),
    _by_itself("floor", functions=[math.floor], methods="__floor__"),
    _by_itself("ceil", functions=[math.ceil], methods="__ceil__"),
    _by_itself("trunc", "fix"),
    standard_row(
        "floor_divide",
        kinds.Neutral,
        "input other",
        floor_divided,
        functions=[operator.floordiv],
        inplace=[operator.ifloordiv],
        methods="__floordiv__",
        inplace_methods="__ifloordiv__",
        discrete=True,
        mixes=mixing.no_dimension,
        reflected="floor_divides",
        sample=mask(lambda x: x // 0.3),
    ),
    standard_row(
        "floor_divides",
        kinds.Neutral,
        "input other",
        methods="__rfloordiv__",
        discrete=True,
        mixes=mixing.no_dimension,
        sample=mask(lambda x: 1.0 // (x + 3)),
    ),
    standard_row(
        "heaviside",
        kinds.Neutral,
        "input values",
        discrete=True,
        mixes=mixing.no_dimension,
        steps=True,
        sample=mask(lambda x: torch.heaviside(x, torch.tensor(0.5))),
    ),
    standard_row(
        "histc",
        kinds.Neutral,
        "input bins=100 min=0 max=0",
        histogram,
        discrete=True,
        sample=mask(lambda x: torch.histc(x, 4, -1, 1), batch=False),
    ),
    neutral(
        "to_integer",
        spelled="bool long int short byte char",
        discrete=True,
        converts=True,
        sample=mask(lambda x: x.bool().long() + x.int() + x.short()),
    ),
    neutral("one_hot", discrete=True, indices="0 input self", sample=mask(lambda x: functional.one_hot(x.argmax(1), 4))),
)
