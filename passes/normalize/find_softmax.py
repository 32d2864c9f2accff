"""NORMALIZE: turn exponentials that are divided by their sum into a softmax, however it is written."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.ir.kinds import Detach, Softmax
from lrpfx.ir.node import Role, is_call_of, is_data, node_info, parameter_value, row_of
from lrpfx.ir.operator import Fill, Operator, Probability, Repeats
from lrpfx.operators.attention import softmax_dimension
from lrpfx.operators.contractions import added_by_index, keeps_all
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import spelling_of
from lrpfx.passes.constants import mark_constants, number_filling
from lrpfx.passes.normalize.call_builder import CallBuilder, LeftAloneError, with_replaced_calls
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED

Dims = tuple[int, ...] | None  # the dimensions that a softmax normalizes over; None: all


class FindSoftmax(GraphPass):
    """Replace spelled-out softmaxes: exp / sum over any dimensions, in groups, with masks, shifts, temperatures and weights.

    A shift that is the same for all entries of a softmax cancels, so it is left out. What is not exactly a softmax of its
    scores, such as exponentials with a mask or a sum with a small number added, keeps its forward and gets the relevance of a
    softmax.
    """

    name = "find_softmax"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = with_replaced_calls(program, _spelled_out, lambda node, new: f"now {row_of(new)}: {node_info(new).name}")
        if result.matches:
            mark_constants(program.graph)
        return result


def _spelled_out(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The call that replaces a call, inserted before it; None if it is no part of a softmax."""
    row = row_of(node)
    new = node if row.kind is Softmax or row.values.probability is Probability.OF_ALL_LOGITS else _named(build, node, row)
    is_named = new is node or (new is not None and row_of(new).values.probability is Probability.OF_ALL_LOGITS)
    return _without_shift(build.program, new, row_of(new)) if new is not None and is_named else new


def _named(build: CallBuilder, node: fx.Node, row: Operator) -> fx.Node | None:
    if row.name == "exp":
        return _exponential_of_logarithm(build, node)
    if row.values.logarithm:
        return _logarithm_of_sum(build, node)
    if row.name in ("sub", "add"):
        return _logarithm(build, node)
    if row.name == "normalize":
        return _normalized(build, node)
    if row.name in ("div", "mul"):
        return _Quotient(build, node).replacement()
    return None


# --- logarithms and exponentials of each other ------------------------------------------------------------------------------


def _without_shift(program: Program, node: fx.Node, row: Operator) -> fx.Node:
    """A softmax, or its logarithm, of its scores without a shift that cancels. The node itself is changed."""
    dims = _dims(bound_arguments(node, row).get("dim"))
    scores = _arguments(node)[0]
    shape = node_info(node).shape
    if dims is None and shape is not None:
        dims = (softmax_dimension(len(shape)),)
    if dims is not None and is_data(scores):
        node.args = (_unshifted(program, scores, dims), *_arguments(node)[1:])
    return node


def _exponential_of_logarithm(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """exp(log_softmax(x)) is softmax(x)."""
    source = _arguments(node)[0]
    row = node_info(source).operator if isinstance(source, fx.Node) else None
    if row is None or row.name != "log_softmax" or not isinstance(source, fx.Node):
        return None
    bound = bound_arguments(source, row)
    if bound.get("dtype") is not None:
        return None
    return build.call("softmax", bound["input"], bound["dim"], target=torch.softmax)


def _logarithm_of_sum(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """log(exp(x).sum()) is logsumexp(x), and log(softmax(x)) is log_softmax(x)."""
    source = _arguments(node)[0]
    row = node_info(source).operator if isinstance(source, fx.Node) else None
    if row is None or not isinstance(source, fx.Node):
        return None
    bound = bound_arguments(source, row)
    if bound.get("dtype") is not None or bound.get("dim") is None:
        return None
    if row.name == "softmax":
        return build.call("log_softmax", bound["input"], bound["dim"])
    if row.name == "sum" and is_call_of(bound["input"], "exp"):
        return build.call(
            "logsumexp", bound["input"].args[0], bound["dim"], bool(bound.get("keepdim", False)), target=torch.logsumexp
        )
    return None


def _logarithm(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """X - logsumexp(x) is log_softmax(x), and logsumexp(x - c) + c is logsumexp(x)."""
    first, second = _arguments(node)[:2]
    if node.kwargs or not is_data(first) or not is_data(second):
        return None
    if row_of(node).name == "add":
        for total, shift in ((first, second), (second, first)):
            if is_call_of(total, "logsumexp") and is_call_of(_arguments(total)[0], "sub"):
                inner = _arguments(total)[0]
                dims, keepdim = _of_logsumexp(total)
                if not inner.kwargs and are_same(_arguments(inner)[1], shift) and keepdim and _fixed(shift, dims, inner):
                    return build.call("logsumexp", _arguments(inner)[0], list(dims), True, target=torch.logsumexp)
        return None
    base, added = _without_views(second)
    if not is_call_of(base, "logsumexp"):
        return None
    dims, keepdim = _of_logsumexp(base)
    scores = _arguments(base)[0]
    if len(dims) != 1 or not _aligned(second, base, scores, dims, keepdim, added):
        return None
    if are_same(first, scores):
        return build.call("log_softmax", first, dims[0])
    return None


def _of_logsumexp(node: fx.Node) -> tuple[tuple[int, ...], bool]:
    given = [*_arguments(node)[1:], *node.kwargs.values()]
    dims = _dims(node.kwargs.get("dim", _arguments(node)[1] if len(_arguments(node)) > 1 else None))
    keepdim = node.kwargs.get("keepdim", _arguments(node)[2] if len(_arguments(node)) > 2 else False)
    return (dims or (), bool(keepdim)) if given else ((), False)


def _normalized(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """Exponentials divided by their sum by torch.nn.functional.normalize."""
    bound = {**row_of(node).arguments, **bound_arguments(node, row_of(node))}
    weights = bound["input"]
    exponentials = _Exponentials.of(weights)
    if bound["p"] != 1 or not isinstance(bound["dim"], int):
        return None
    if exponentials is None:
        return build.call("div", weights, _sum_of(build, weights, bound)) if _is_of_softmax(weights) else None
    shape = node_info(weights).shape
    if not exponentials.over((bound["dim"],), None if shape is None else len(shape)):
        return None
    total = _sum_of(build, weights, bound)
    scores = _unshifted(build.program, exponentials.scores(build), (bound["dim"],), exact=False)
    return build.call("exponential_shares", scores, weights, total, (bound["dim"],))


def _sum_of(build: CallBuilder, weights: fx.Node, bound: dict[str, Any]) -> fx.Node:
    return build.call("clamp_min", build.call("sum", weights, bound["dim"], keepdim=True), bound["eps"])


def _is_of_softmax(value: Any) -> bool:
    """Whether a value consists of entries of a softmax, such as the largest ones."""
    while isinstance(value, fx.Node) and (row := node_info(value).operator) is not None and value.args:
        if row.kind is Softmax:
            return True
        if not (row.entries.moves or row.entries.selects or row.outputs.picks):
            return False
        value = value.args[0]
    return False


# --- quotients --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exponentials:
    """Exponentials of scores, perhaps masked: multiplied by constants, or filled with zeros."""

    power: fx.Node  # the scores, in the base
    base: float
    plain: bool  # whether no mask changes them
    shared: int | None = None  # the dimension along which they are divided already, as a softmax is, by their sum
    exponent: float = 1.0  # of the exponentials; it multiplies the scores

    def over(self, dims: Dims, rank: int | None) -> bool:
        """Whether they are exponentials, up to a factor that a division by their sum over these dimensions cancels."""
        return self.shared is None or (dims is not None and _alike((self.shared,), dims, rank))

    @classmethod
    def of(cls, value: Any) -> "_Exponentials | None":
        plain, exponent = True, 1.0
        while isinstance(value, fx.Node) and is_data(value) and (row := node_info(value).operator) is not None:
            bound = bound_arguments(value, row)
            if row.name == "exp":
                return cls(_arguments(value)[0], math.e, plain, exponent=exponent)
            if row.name == "exp2":
                return cls(_arguments(value)[0], 2.0, plain, exponent=exponent)
            if row.name == "exponential":
                base = bound["other"]
                positive = isinstance(base, (int, float)) and base > 0
                return cls(_arguments(value)[0], base, plain, exponent=exponent) if positive else None
            if row.name == "softmax" and isinstance(bound.get("dim"), int):  # torch derives a dimension that is left out
                return cls(bound["input"], math.e, plain, bound["dim"], exponent) if bound.get("dtype") is None else None
            if row.name == "mul" and sum(map(is_data, _arguments(value))) == 1:
                value, plain = next(filter(is_data, _arguments(value))), False
            elif row.entries.chooses:
                left = [bound[name] for name in row.entries.chooses[1:] if not _is_zero(bound[name])]
                if len(left) != 1:
                    return None
                value, plain = left[0], False
            elif row.entries.fills is Fill.ZERO and row.dimensions.keeps_dimensions:
                value, plain = _arguments(value)[0], False
            elif row.entries.keeps_order and row.entries.elementwise:
                value = _arguments(value)[0]
            elif (power := _power(value, row, bound)) is not None:
                value, exponent = _arguments(value)[0], exponent * power
            else:
                return None
        return None

    def scores(self, build: CallBuilder) -> fx.Node:
        """The scores of which these are exponentials to the base e."""
        factor = math.log(self.base) * self.exponent
        return self.power if factor == 1 else build.call("mul", self.power, factor)


def _power(value: fx.Node, row: Operator, bound: dict[str, Any]) -> float | None:
    """The exponent of a power of one value; None for other calls."""
    exponent = row.exponent(bound)
    if row.name == "mul" and _arguments(value)[0] is _arguments(value)[1]:
        exponent = 2
    return float(exponent) if isinstance(exponent, (int, float)) and exponent > 0 else None


@dataclass(frozen=True)
class _Divisor:
    """The divisor of a softmax: a sum of exponentials, perhaps with a small number added, or at least so large."""

    total: fx.Node  # the sum
    summed: fx.Node  # the exponentials
    dims: Dims  # the dimensions of the sum; for groups, the dimension along which the index counts
    keepdim: bool
    exact: bool  # whether it is the sum alone
    added: bool  # whether views lie between it and the sum
    base: fx.Node  # the divisor before these views
    index: fx.Node | None = None  # of groups, for each exponential
    gathered: bool = False  # whether the sums are those of each exponential, not of each group


def _divisor(value: Any) -> _Divisor | None:
    exact, added, gathered = True, False, None
    base = value
    while isinstance(value, fx.Node) and is_data(value) and (row := node_info(value).operator) is not None:
        bound = bound_arguments(value, row)
        if row.name in ("sum", "norm"):
            if gathered is not None or (found := _sum(value, row)) is None:
                return None
            summed, dims, keepdim = found
            return _Divisor(value, summed, dims, keepdim, exact, added, base)
        grouped = grouped_sum(value, row, bound)
        if grouped is not None:
            summed, dim, index = grouped
            if gathered is not None and (gathered[0] != dim or not _same_index(gathered[1], index)):
                return None
            return _Divisor(value, summed, (dim,), False, exact, added, base, index, gathered is not None)
        picked = _gather(value, row, bound)
        if picked is not None and gathered is None:
            gathered, value, base = picked[1:], picked[0], value
        elif row.name in ("add", "clamp_min", "maximum") and sum(map(is_data, value.all_input_nodes)) == 1:
            value, exact = next(filter(is_data, _arguments(value))), False
        elif row.name == "clamp" and bound.get("max") is None and not is_data(bound.get("min")):
            value, exact = _arguments(value)[0], False
        elif _is_view(value, row):
            value, added = _arguments(value)[0], added or not row.entries.elementwise
            base = value if exact or base is value else base
        else:
            return None
    return None


def _sum(node: fx.Node, row: Operator) -> tuple[fx.Node, Dims, bool] | None:
    """The terms of a sum, its dimensions, and whether it keeps them. The norm of order 1 is the sum of exponentials."""
    given = dict(zip(("input", "dim", "keepdim", "dtype"), _arguments(node), strict=False)) | node.kwargs
    if row.name == "norm":
        given = dict(zip(("input", "ord", "dim", "keepdim", "dtype"), _arguments(node), strict=False)) | node.kwargs
        if given.get("ord", given.get("p")) != 1:
            return None
    summed = given.get("input", _arguments(node)[0])
    if given.get("dtype") is not None or not is_data(summed):
        return None
    return summed, _dims(given.get("dim")), bool(given.get("keepdim", False))


def grouped_sum(node: fx.Node, row: Operator, bound: dict[str, Any]) -> tuple[Any, int, Any] | None:
    """The terms, the dimension and the index of a sum in groups."""
    adds = row.name in ("scatter_add", "index_add") and bound.get("alpha", 1) == 1
    if adds or (row.name == "scatter_averaged" and bound["reduce"] == "sum"):
        summed, dim, index = bound["source"], bound["dim"], bound["index"]
    elif row.name == "index_put_accumulated":
        indices = bound.get("indices", _arguments(node)[2] if len(_arguments(node)) > 2 else None)
        if not isinstance(indices, (tuple, list)) or len(indices) != 1:
            return None
        summed, dim, index = _arguments(node)[1], 0, indices[0]
    else:
        return None
    if not isinstance(dim, int) or not is_data(summed) or is_data(bound.get("input", _arguments(node)[0])):
        return None
    return summed, dim, index


def _gather(node: fx.Node, row: Operator, bound: dict[str, Any]) -> tuple[Any, int, Any] | None:
    """The source, the dimension and the index of a call that picks entries along a dimension."""
    if row.entries.gathers and len(_arguments(node)) + len(node.kwargs) == 3:
        given = [*_arguments(node), *node.kwargs.values()]
        dim, index = (given[1], given[2]) if isinstance(given[1], int) else (given[2], given[1])
        return (given[0], dim, index) if isinstance(dim, int) else None
    if node.target in (operator.getitem, torch.ops.aten.index.Tensor):
        index = _arguments(node)[1]
        parts = list(index) if isinstance(index, (tuple, list)) else [index]
        while len(parts) > 1 and parts[-1] in (slice(None), None, Ellipsis) and node.target is operator.getitem:
            if parts.pop() is None:
                return None
        if len(parts) == 1 and isinstance(parts[0], fx.Node) and not is_data(parts[0]):
            return _arguments(node)[0], 0, parts[0]
    return None


class _Quotient:
    """A quotient that may be a softmax, or a sum that a softmax weighs."""

    def __init__(self, build: CallBuilder, node: fx.Node) -> None:
        self.build, self.node = build, node
        self.operands = list(_dividends(node))

    def replacement(self) -> fx.Node | None:
        for dividend, value in self.operands:
            divisor = _divisor(value)
            exponentials = None if divisor is None else _Exponentials.of(divisor.summed)
            if divisor is None or exponentials is None or not isinstance(value, fx.Node):
                continue
            dims = divisor.dims if divisor.index is None else None
            if not exponentials.over(dims, self._rank(divisor.summed)):
                continue
            if are_same(dividend, divisor.summed):
                return self._shares(dividend, divisor, exponentials, value)
            found = self._weighted(dividend, divisor, exponentials, value)
            if found is not None:
                return found
        return None

    def _shares(self, weights: fx.Node, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node) -> fx.Node:
        """The softmax of the scores of exponentials, divided by sums for each of them."""
        if divisor.index is not None:
            if not divisor.gathered:
                raise LeftAloneError("exponentials are divided by the sums of groups without an index")
            return self._of_groups(weights, divisor, exponentials, sums)
        if not _aligned(sums, divisor.total, divisor.summed, divisor.dims, divisor.keepdim, divisor.added):
            raise LeftAloneError("it is not known along which dimensions the sum of exponentials divides; pass example_inputs")
        return self._softmax(weights, divisor, exponentials, sums)

    def _softmax(self, weights: fx.Node, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node | None) -> fx.Node:
        exact = divisor.exact and exponentials.plain and exponentials.shared is None
        scores = exponentials.scores(self.build)
        if divisor.dims is not None:
            scores = _unshifted(self.build.program, scores, divisor.dims, exact)
        if exact and divisor.dims is not None and len(divisor.dims) == 1:
            return self.build.call("softmax", scores, divisor.dims[0], target=torch.softmax)
        if sums is None:
            raise LeftAloneError("its sum of exponentials has another number of dimensions than they have")
        return self.build.call("exponential_shares", scores, weights, sums, divisor.dims)

    def _of_groups(self, weights: fx.Node, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node) -> fx.Node:
        assert divisor.dims is not None and divisor.index is not None
        dim = divisor.dims[0]
        scores = _unshifted_in_groups(exponentials.scores(self.build), dim, divisor.index)
        return self.build.call("shares_of_groups", scores, weights, sums, divisor.total, divisor.index, dim)

    # --- sums that a softmax weighs -----------------------------------------------------------------------------------------

    def _weighted(self, dividend: Any, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node) -> fx.Node | None:
        """A product of exponentials and values that is divided by the sum of the exponentials, after the product."""
        row = node_info(dividend).operator if is_data(dividend) else None
        if row is None or divisor.dims is None:
            return None
        if divisor.index is not None:
            return None if divisor.gathered else self._weighted_in_groups(dividend, row, divisor, exponentials)
        if len(divisor.dims) != 1:
            return None
        if row.name == "matmul":
            return self._matrix_product(dividend, divisor, exponentials, sums)
        if row.name == "einsum":
            return self._einsum(dividend, divisor, exponentials, sums)
        if row.name == "sum":
            return self._sum_of_products(dividend, divisor, exponentials, sums)
        return None

    def _rank(self, value: fx.Node) -> int | None:
        shape = node_info(value).shape
        return None if shape is None else len(shape)

    def _matrix_product(
        self, product: fx.Node, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node
    ) -> fx.Node | None:
        first, second = _arguments(product)[:2]
        assert divisor.dims is not None
        dim, rank = divisor.dims[0], self._rank(divisor.summed)
        if dim >= 0:
            dim -= rank if rank is not None else 0
        if are_same(first, divisor.summed) and dim == -1:
            weights, place = first, 0
        elif are_same(second, divisor.summed) and dim == -2:
            weights, place = second, 1
        else:
            return None
        if not _aligned(sums, divisor.total, divisor.summed, divisor.dims, divisor.keepdim, divisor.added):
            return None
        softmax = self._softmax(weights, divisor, exponentials, sums)
        return self.build.call("matmul", *((softmax, second) if place == 0 else (first, softmax)))

    def _einsum(self, product: fx.Node, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node) -> fx.Node | None:
        equation, *operands = _arguments(product)
        spread = len(operands) == 2
        if not spread:
            operands = list(operands[0]) if isinstance(operands[0], (tuple, list)) else []
        place = next((at for at, one in enumerate(operands) if are_same(one, divisor.summed)), None)
        inputs, arrow, result = str(equation).replace(" ", "").partition("->")
        if place is None or len(operands) != 2 or not arrow or "." in str(equation):
            return None
        assert divisor.dims is not None
        labels = inputs.split(",")[place]
        dim = divisor.dims[0]
        kept = "".join(label for label in labels if label != labels[dim])
        of_result = "".join(label for label in result if label in kept)
        shape, given = node_info(divisor.summed).shape, node_info(sums).shape
        if labels[dim] in result or kept != of_result or shape is None or given is None or len(set(labels)) != len(labels):
            return None
        sizes = dict(zip(labels, shape, strict=True))
        expected = tuple(sizes[label] if label in kept else 1 for label in result)
        if (1,) * (len(expected) - len(given)) + tuple(given) != expected:
            return None
        aligned = _aligned(sums, divisor.total, divisor.summed, divisor.dims, divisor.keepdim, divisor.added)
        softmax = self._softmax(operands[place], divisor, exponentials, sums if aligned else None)
        operands[place] = softmax
        args = (equation, *operands) if spread else (equation, operands)
        return self.build.call("einsum", *args, target=_function(product))

    def _sum_of_products(self, total: fx.Node, divisor: _Divisor, exponentials: _Exponentials, sums: fx.Node) -> fx.Node | None:
        bound = bound_arguments(total, row_of(total))
        dims, product = _dims(bound.get("dim")), bound["input"]
        if dims is None or len(dims) != 1 or bound.get("dtype") is not None or not is_call_of(product, "mul"):
            return None
        place = next(
            (at for at, one in enumerate(_arguments(product)) if are_same(_without_views(one)[0], divisor.summed)), None
        )
        shapes = [node_info(one).shape for one in (divisor.summed, product, sums, total)]
        if place is None or any(shape is None for shape in shapes):
            return None
        factor = _arguments(product)[place]
        own, of_product, of_sums, of_total = (tuple(shape or ()) for shape in shapes)
        views, of_factor = _views(factor), tuple(node_info(factor).shape or ())
        at = _dimension_after(own, of_factor, divisor.dims[0] % len(own)) if divisor.dims else None
        if at is None or at - len(of_factor) != dims[0] % len(of_product) - len(of_product):
            return None
        expected = list((1,) * (len(of_product) - len(of_factor)) + of_factor)
        if bound.get("keepdim"):
            expected[dims[0]] = 1
        else:
            del expected[dims[0] % len(of_product)]
        if (1,) * (len(of_total) - len(of_sums)) + of_sums != tuple(expected):
            return None
        aligned = _aligned(sums, divisor.total, divisor.summed, divisor.dims, divisor.keepdim, divisor.added)
        if not aligned and not (divisor.exact and exponentials.plain):
            if not divisor.exact or divisor.dims is None:
                return None
            sums = self.build.call("sum", divisor.summed, divisor.dims[0], keepdim=True)
        softmax = self._softmax(divisor.summed, divisor, exponentials, sums)
        weighted = self.build.call("mul", *_replaced(_arguments(product)[:2], place, _viewed(self.build, softmax, views)))
        return self.build.call("sum", weighted, dims[0], keepdim=bool(bound.get("keepdim")))

    def _weighted_in_groups(
        self, total: fx.Node, row: Operator, divisor: _Divisor, exponentials: _Exponentials
    ) -> fx.Node | None:
        grouped = grouped_sum(total, row, bound_arguments(total, row))
        if grouped is None or divisor.dims is None or not isinstance(divisor.index, fx.Node):
            return None
        product, dim, index = grouped
        if dim != divisor.dims[0] or not _same_index(index, divisor.index) or not is_call_of(product, "mul"):
            return None
        place = next(
            (at for at, one in enumerate(_arguments(product)) if are_same(_without_views(one)[0], divisor.summed)), None
        )
        source = divisor.index
        if place is None or row.name != "index_add" or row_of(divisor.total).name != "index_add":
            return None
        sums = self.build.call("index_select", divisor.base, dim, source, target=torch.index_select)
        softmax = self._of_groups(divisor.summed, divisor, exponentials, sums)
        weighted = _viewed(self.build, softmax, _views(_arguments(product)[place]))
        product = self.build.call("mul", *_replaced(_arguments(product)[:2], place, weighted))
        bound = bound_arguments(total, row)
        return self.build.call("index_add", bound["input"], product, dim, index)


def _dividends(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The dividend and the divisor that a quotient, or a product with a reciprocal, may have."""
    first, second = _arguments(node)[:2]
    if node.kwargs:
        return
    if row_of(node).name == "div":
        yield first, second
        return
    for dividend, factor in ((first, second), (second, first)):
        row = node_info(factor).operator if is_data(factor) else None
        if row is not None and row.name == "mul" and _arguments(factor)[1] == 1:
            factor = _arguments(factor)[0]
            row = node_info(factor).operator
        if row is None:
            continue
        bound = bound_arguments(factor, row)
        if row.exponent(bound) == -1 or (row.name == "divided_by" and bound["other"] == 1):
            yield dividend, _arguments(factor)[0]


# --- shifts -----------------------------------------------------------------------------------------------------------------


def _unshifted(program: Program, scores: fx.Node, dims: tuple[int, ...], exact: bool = True) -> fx.Node:
    """The scores without terms that are the same along `dims`, which a softmax cancels.

    Without `exact`, only terms that have no relevance of their own are left out: a stabilized softmax does not cancel others.
    """
    while (kept := _without_a_shift(program, scores, dims, exact)) is not None:
        scores = kept
    return _scaled_without_shift(program, scores, dims) if exact else scores


def _scaled_without_shift(program: Program, scores: fx.Node, dims: tuple[int, ...]) -> fx.Node:
    """Scores that are divided by, or multiplied with, one number, such as a temperature, without terms that cancel before."""
    row = node_info(scores).operator
    if row is None or row.name not in ("div", "mul") or scores.kwargs:
        return scores
    first, second = _arguments(scores)[:2]
    pairs = [(first, second)] if row.name == "div" else [(first, second), (second, first)]
    for value, factor in pairs:
        shape = node_info(value).shape if is_data(value) else None
        if not is_data(value) or is_data(factor) or shape != node_info(scores).shape:
            continue
        kept = _unshifted(program, value, dims) if _is_one_number(program, factor, shape is not None) else value
        if kept is not value:
            build = CallBuilder(program, scores, row)
            return build.call(row.name, *(kept if one is value else one for one in (first, second)), label="unshifted")
    return scores


def _is_one_number(program: Program, value: Any, adds_no_dimension: bool) -> bool:
    """Whether a factor is the same for all entries, and leaves the number of dimensions as it is."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float))
    if node_info(value).role is Role.PARAMETER:
        tensor = parameter_value(value, program.root)
        return not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or (tensor.numel() == 1 and adds_no_dimension)
    return node_info(value).shape == ()


def _without_a_shift(program: Program, scores: fx.Node, dims: tuple[int, ...], exact: bool) -> fx.Node | None:
    """The scores without the last term that cancels; None if there is none."""
    row = node_info(scores).operator
    if row is not None and row.name == "log_softmax" and exact:  # minus the logarithm of a sum
        bound = bound_arguments(scores, row)
        cancels = bound.get("dtype") is None and _dims(bound["dim"]) == dims and is_data(bound["input"])
        return bound["input"] if cancels else None
    if row is None or row.name not in ("sub", "add") or scores.kwargs:
        return None
    first, second = _arguments(scores)[:2]
    pairs = [(first, second)] if row.name == "sub" else [(first, second), (second, first)]
    return next((one for one, shift in pairs if is_data(one) and _cancels(program, shift, one, dims, scores, exact)), None)


def _cancels(program: Program, shift: Any, kept: fx.Node, dims: tuple[int, ...], scores: fx.Node, exact: bool) -> bool:
    if isinstance(shift, (int, float)):
        return True
    if not isinstance(shift, fx.Node):
        return False
    if node_info(shift).role is Role.PARAMETER:
        tensor = parameter_value(shift, program.root)
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            return True
        return all(dim < 0 and (-dim > tensor.ndim or tensor.shape[dim] == 1) for dim in dims)
    of_kept, of_scores = node_info(kept).shape, node_info(scores).shape
    if of_kept != of_scores:
        return False  # the shift also adds dimensions
    return _fixed(shift, dims, scores) and (exact or _is_reduction_of(shift, kept))


def _fixed(value: Any, dims: Sequence[int], like: fx.Node) -> bool:
    """Whether a value is the same along these dimensions of a value that it is broadcast with."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float))
    row = node_info(value).operator
    if row is None or value.op != "call_function":
        return False
    bound = bound_arguments(value, row) if row.arguments else {}
    shape = node_info(like).shape
    rank = None if shape is None else len(shape)
    given: dict[Any, Any] = {**dict(enumerate(_arguments(value))), **value.kwargs, **bound}
    reduced = given.get("dim", given.get("axis", given.get(1)))
    if given.get("keepdim", given.get("keepdims", given.get(2))) is True:
        return _dims(reduced) is not None and _alike(dims, _dims(reduced) or (), rank)
    if (row.entries.adds_up or row.entries.selects) and _reduces_all(value, row):
        return True
    source, index = _arguments(value)[0], _arguments(value)[1] if row.outputs.picks else None
    if index == 0 and isinstance(source, fx.Node) and node_info(source).operator is not None:
        return row_of(source).returns_several and _fixed(source, dims, like)
    if isinstance(index, tuple) and None in index:
        added = added_by_index(index)
        return added is not None and _alike(dims, added, rank)
    if row.name == "unsqueeze":
        return isinstance(_arguments(value)[1], int) and _alike(dims, (_arguments(value)[1],), rank)
    repeats = row.kind is Detach or row.entries.repeats is Repeats.BROADCAST
    if repeats or (row.entries.elementwise and len(value.all_input_nodes) == 1):
        inner = next((one for one in _arguments(value) if isinstance(one, fx.Node)), None)
        return inner is not None and _fixed(inner, dims, like)
    return False


def _alike(dims: Sequence[int], others: Sequence[int], rank: int | None) -> bool:
    """Whether all dimensions are among others, for a number of dimensions that may be unknown."""
    if rank is None:
        return set(dims) <= set(others)
    return {dim % rank for dim in dims} <= {dim % rank for dim in others}


def _is_reduction_of(shift: fx.Node, scores: fx.Node) -> bool:
    """Whether a shift is computed from scores alone by choosing entries, such as their maximum."""
    while shift.op == "call_function":
        row = node_info(shift).operator
        if row is None or not (row.entries.selects or row.entries.moves or row.outputs.picks or row.kind is Detach):
            return False
        source = _arguments(shift)[0]
        if source is scores:
            return True
        if not isinstance(source, fx.Node):
            return False
        shift = source
    return False


def _unshifted_in_groups(scores: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """The scores without a term that is the same for all entries of a group: what is picked by the same index."""
    while (row := node_info(scores).operator) is not None and row.name == "sub" and not scores.kwargs:
        first, shift = _arguments(scores)[:2]
        if not is_data(first):
            break
        of_all = isinstance(shift, (int, float)) or (isinstance(shift, fx.Node) and _of_all_entries(shift))
        picked = None
        if isinstance(shift, fx.Node) and not of_all and node_info(shift).operator is not None:
            source, _ = _without_views(shift)
            row = node_info(source).operator
            picked = None if row is None else _gather(source, row, bound_arguments(source, row) if row.arguments else {})
        if not of_all and (picked is None or picked[1] != dim or not _same_index(picked[2], index)):
            break
        scores = first
    return scores


def _of_all_entries(value: fx.Node) -> bool:
    """Whether a value is one number: a reduction over all dimensions."""
    row = node_info(value).operator
    if row is not None and (row.kind is Detach or row.entries.elementwise) and isinstance(_arguments(value)[0], fx.Node):
        return _of_all_entries(_arguments(value)[0])
    return row is not None and row.entries.selects and _reduces_all(value, row)


def _reduces_all(value: fx.Node, row: Operator) -> bool:
    """Whether a call reduces all entries to one."""
    return row.entries.mixes is not None and len(_arguments(value)) == 1 and not value.kwargs


# --- the same values, and their alignment -----------------------------------------------------------------------------------


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call; those of listed calls are as their rows say."""
    return node.args


def _function(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _is_zero(value: Any) -> bool:
    return number_filling(value) == 0


def _dims(given: Any) -> Dims:
    if isinstance(given, int) and not isinstance(given, bool):
        return (given,)
    if isinstance(given, (tuple, list)) and given and all(isinstance(dim, int) for dim in given):
        return tuple(given)
    return None


def are_same(one: Any, other: Any, depth: int = 8) -> bool:
    """Whether two values are one, or are computed by the same calls."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and not isinstance(one, (tuple, list)) and bool(one == other)
    if one is other:
        return True
    if not depth or one.op != other.op or one.target is not other.target or one.op == "placeholder":
        return False
    if one.op == "get_attr":
        return one.target == other.target
    if (
        len(_arguments(one)) != len(_arguments(other))
        or one.kwargs.keys() != other.kwargs.keys()
        or node_info(one).operator is None
    ):
        return False
    pairs = [
        *zip(_arguments(one), _arguments(other), strict=True),
        *((one.kwargs[name], other.kwargs[name]) for name in one.kwargs),
    ]
    return all(
        first == second if isinstance(first, (tuple, list)) else are_same(first, second, depth - 1) for first, second in pairs
    )


def _is_view(value: fx.Node, row: Operator) -> bool:
    """Whether a call keeps the entries in their order, and repeats them at most."""
    adds = row.outputs.picks and isinstance(_arguments(value)[1], tuple) and added_by_index(_arguments(value)[1]) is not None
    return row.entries.keeps_order or adds or keeps_all(value) or row.entries.repeats is Repeats.BROADCAST


def _views(value: Any) -> list[fx.Node]:
    """The views between a value and what it is a view of, from the first on."""
    found: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.op == "call_function" and (spelling := spelling_of(value)) is not None:
        if not _is_view(value, spelling.operator):  # also of what depends on sizes, which has no row of its own
            break
        found.insert(0, value)
        value = _arguments(value)[0]
    return found


def _without_views(value: Any) -> tuple[Any, bool]:
    """What a value is a view of with the entries in their order, and whether a view lies between."""
    views = _views(value)
    return (views[0].args[0], True) if views else (value, False)


def _viewed(build: CallBuilder, value: fx.Node, views: list[fx.Node]) -> fx.Node:
    """The same views of another value."""
    for view in views:
        options: dict[str, Any] = dict(view.kwargs)
        value = build.call(row_of(view).name, value, *_arguments(view)[1:], target=_function(view), **options)
    return value


def _replaced(args: Sequence[Any], place: int, value: fx.Node) -> list[Any]:
    return [value if at == place else one for at, one in enumerate(args)]


def _same_index(one: Any, other: Any) -> bool:
    """Whether two indices choose the same places: one may be expanded to the shape of the values."""
    return are_same(_without_views(one)[0], _without_views(other)[0])


def _dimension_after(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """The place of a dimension after views that only add or remove dimensions of size 1."""
    if [size for size in before if size != 1] != [size for size in after if size != 1] or before[dim] == 1:
        return None
    count = sum(size != 1 for size in before[:dim])
    return [place for place, size in enumerate(after) if size != 1][count]


def _aligned(sums: fx.Node, total: fx.Node, summed: fx.Node, dims: Dims, keepdim: bool, viewed: bool) -> bool:
    """Whether sums over dimensions, after views, are broadcast along these dimensions of what was summed."""
    shape, given = node_info(summed).shape, node_info(sums).shape
    if dims is None:
        return not viewed
    if shape is not None and given is not None:
        kept = {dim % len(shape) for dim in dims}
        expected = tuple(1 if place in kept else size for place, size in enumerate(shape))
        padded = (1,) * (len(shape) - len(given)) + tuple(given)
        return padded in (expected, tuple(shape)) and (keepdim or viewed or padded == (1,) * len(shape))
    if not viewed:
        return keepdim
    views = _views(sums)
    if keepdim or len(views) != 1 or len(dims) != 1:
        return False
    (view,) = views
    if row_of(view).name == "unsqueeze":
        return bool(_arguments(view)[1] == dims[0])
    return row_of(view).outputs.picks and added_by_index(_arguments(view)[1]) == dims
