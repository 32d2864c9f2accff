"""NORMALIZE: write what has a plainer form in that form: pieces that are written into a tensor, sums and products of stacks.

Later passes then see one spelling: `cat` or padding, sums of two values, element-wise products.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import (
    Role,
    function_name,
    is_call_of,
    is_data,
    is_learned,
    node_info,
    nodes_in,
    only_reader,
    parameter_value,
    row_of,
)
from lrpfx.ir.operator import NotAContractionError
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.constants import known_size, number_filling
from lrpfx.passes.normalize.call_builder import CallBuilder, with_replaced_calls
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED
from lrpfx.support.tensors import is_floating


class Simplify(GraphPass):
    """Replace calls by plainer ones that compute the same: with neutral numbers, of stacks, and writes into new tensors."""

    name = "simplify"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        return with_replaced_calls(program, _plainer, lambda node, new: f"{row_of(node)}: now {node_info(new).name}")


def _plainer(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    form = _FORMS.get(row_of(node).name)
    return None if form is None else form(build, node)


Form = Callable[[CallBuilder, fx.Node], fx.Node | None]


# --- sums, means and products -----------------------------------------------------------------------------------------------


def _without_ones(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The operand of a product or quotient whose other one is made of ones, and changes neither shape nor dtype."""
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    for value, other in ((first, second), (second, first)) if is_call_of(node, "mul") else ((first, second),):
        if not isinstance(value, fx.Node) or not is_data(value) or is_data(other) or number_filling(other) != 1:
            continue
        if not isinstance(other, fx.Node) or keeps(value, other, node):
            return value
    return None


def _without_zero(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The operand of a sum or difference whose other one is the number 0."""
    if len(node.args) != 2:
        return None
    first, second = node.args
    is_sum = is_call_of(node, "add") and not node.kwargs
    for value, other in ((first, second), (second, first)) if is_sum else ((first, second),):
        is_zero = isinstance(other, (int, float)) and not isinstance(other, bool) and other == 0
        if is_zero and isinstance(value, fx.Node) and is_data(value) and node_info(value).dtype == node_info(node).dtype:
            return value
    return None


def keeps(value: Any, numbers: Any, result: fx.Node) -> bool:
    """Whether a result has the shape and the dtype of one operand, in every run: a size of 1 may be larger in another run."""
    info, shape = node_info(value), node_info(numbers).shape
    if info.shape is None or shape is None or (info.shape, info.dtype) != (node_info(result).shape, node_info(result).dtype):
        return False
    is_like = function_name(numbers).endswith("_like") and numbers.args[0] is value
    return 1 not in shape or is_like or any(_is_shape_of(value, one) for one in (*numbers.args, numbers.kwargs.get("size")))


def _is_shape_of(value: fx.Node, shape: Any) -> bool:
    read = (shape.target, shape.args) if isinstance(shape, fx.Node) else None
    return read in ((getattr, (value, "shape")), (torch.Tensor.size, (value,)))


def _product(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """A product without ones, or of a column with a row of parameters."""
    return _without_ones(build, node) or _column_times_row(build, node)


def _column_times_row(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The dense layer of one input that a product with a vector of parameters is: x[..., None] * weight."""
    first, second = node.args[:2]
    for column, row in ((first, second), (second, first)):
        if not isinstance(column, fx.Node) or not is_data(column) or not isinstance(row, fx.Node):
            continue
        if node_info(column).shape is None or node_info(row).role is not Role.PARAMETER:
            continue
        weight = parameter_value(row, build.program.root)
        plain = is_floating(weight) and weight.ndim == 1 and len(weight) > 1 and weight.dtype == node_info(column).dtype
        if plain and is_learned(row, build.program.root) and (known_size(column, -1) == 1 or adds_last(column)):
            return build.call("linear", column, build.call("unsqueeze", row, 1, target=torch.unsqueeze))
    return None


def adds_last(value: fx.Node) -> bool:
    """Whether a call adds the last dimension: x.unsqueeze(-1) or x[..., None]."""
    if is_call_of(value, "unsqueeze"):
        return value.args[1:] == (-1,) or value.args[1:] == (len(node_info(value).shape or ()) - 1,)
    index = value.args[1] if function_name(value) == "getitem" and isinstance(value.args[1], tuple) else ()
    rank = len(node_info(value.all_input_nodes[0]).shape or ()) if index else 0
    return bool(index) and index[-1] is None and (Ellipsis in index or len(index) - index.count(None) == rank)


def _of_stack(combined: str) -> Form:
    """The parts of a stack along whose new dimension a call takes sums or products, combined one after another."""

    def form(build: CallBuilder, node: fx.Node) -> fx.Node | None:
        bound = _bound(node, ("input", "dim", "keepdim", "dtype"))
        stack, dims, shape = bound["input"], bound.get("dim"), node_info(bound["input"]).shape
        if not is_call_of(stack, "stack") or shape is None or bound.get("keepdim") or bound.get("dtype") is not None:
            return None
        parts: Any = stack.args[0]
        along: Any = next(iter((*stack.args[1:], *stack.kwargs.values())), 0)
        dim: Any
        (dim,) = dims if isinstance(dims, (tuple, list)) and len(dims) == 1 else (dims,)
        plain = isinstance(parts, (tuple, list)) and isinstance(dim, int) and isinstance(along, int)
        if not plain or dim % len(shape) != along % len(shape) or len(set(map(_dtype, parts))) != 1:
            return None
        if combined == "add" and all(map(is_data, parts)):  # sums of signals are the same in either form
            return None
        total = reduce(lambda one, other: build.call(combined, one, other), parts)
        return build.call("div", total, len(parts)) if is_call_of(node, "mean") else total

    return form


def _bound(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults that its row has."""
    return {**row_of(node).arguments, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _dtype(value: Any) -> torch.dtype | None:
    return node_info(value).dtype


def _mean(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The mean of products with parameters is their sum, divided by their number."""
    product = build["input"]
    if is_call_of(product, "mul") and only_reader(product) is not None:
        factors = [one for one in product.args if isinstance(one, fx.Node)]
        learned = any(not is_data(one) and is_learned(one, build.program.root) for one in factors)
        made = sum_of_mean(build) if learned and any(map(is_data, factors)) else None
        if made is not None:
            return made[1]
    return _of_stack("add")(build, node)


def sum_of_mean(build: CallBuilder) -> tuple[fx.Node, fx.Node] | None:
    """The sum of the products that a mean averages, and that sum by their number; None if its dimensions are not known."""
    product, dims = build["input"], build["dim"]
    along = (dims,) if isinstance(dims, int) else dims
    if along is None or nodes_in(along) or build["dtype"] is not None:
        return None
    total = build.call("sum", product, dims, *([True] if build["keepdim"] else []), target=torch.sum)
    return total, build.call("div", total, _number_of_terms(build, product, tuple(along)))


def _number_of_terms(build: CallBuilder, product: fx.Node, dims: tuple[int, ...]) -> Any:
    """The size of some dimensions of a product: a number if those of a parameter show it."""
    parameters = [one for one in product.all_input_nodes if node_info(one).role is Role.PARAMETER]
    shape = parameter_value(parameters[0], build.program.root).shape if parameters else ()
    rank = len(node_info(product).shape or ())
    places = [dim if dim < 0 else dim - rank for dim in dims]
    if rank and all(-place <= len(shape) and shape[place] > 1 for place in places):
        return math.prod(shape[place] for place in places)
    first, second = product.args[:2]
    return build.number_of_products(first, second, dims)


def _softplus(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The logarithm of the sum of exp(x) and exp(0), in a stack, is softplus(x)."""
    bound = _bound(node, ("input", "dim", "keepdim"))
    stack, dims, shape = bound["input"], bound.get("dim"), node_info(bound["input"]).shape
    if not is_call_of(stack, "stack") or shape is None or bound.get("keepdim") or not isinstance(stack.args[0], (tuple, list)):
        return None
    along: Any = next(iter((*stack.args[1:], *stack.kwargs.values())), 0)
    signals = [part for part in stack.args[0] if number_filling(part) != 0]
    (dim,) = dims if isinstance(dims, (tuple, list)) and len(dims) == 1 else (dims,)
    plain = isinstance(dim, int) and isinstance(along, int) and (dim - along) % len(shape) == 0
    found = signals[0] if plain and len(signals) == 1 and len(stack.args[0]) == 2 else None
    return build.call("softplus", found) if isinstance(found, fx.Node) and is_data(found) else None


def _last_sum(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The last of cumulative sums is the sum."""
    sums: Any = node.args[0]
    shape = node_info(sums).shape if is_call_of(sums, "cumsum") and only_reader(sums) is node else None
    if shape is None:
        return None
    bound = _bound(sums, ("input", "dim", "dtype"))
    if is_call_of(node, "select"):
        place = node.args[1] if node.args[2:] == (-1,) else None
    else:
        index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        rest = all(part is Ellipsis or part == slice(None) for part in index[:-1])
        whole = Ellipsis in index[:-1]
        place = (-1 if whole else len(index) - 1) if rest and index and index[-1] == -1 else None
    if not isinstance(place, int) or not isinstance(bound["dim"], int) or (place - bound["dim"]) % len(shape):
        return None
    return build.call("sum", bound["input"], bound["dim"], target=torch.sum) if bound.get("dtype") is None else None


def _chosen_messages(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """What a mask chooses for each of several sums, of values that lack a dimension of it, is their product with the mask."""
    row, reader = row_of(node), only_reader(node)
    bound = bound_arguments(node, row)
    mask, *branches = (bound[name] for name in row.entries.chooses)
    zeros = [number_filling(one) == 0 for one in branches]
    if sum(zeros) != 1 or is_data(mask) or not is_call_of(reader, "sum"):
        return None
    value = branches[zeros.index(False)]
    if is_call_of(value, "expand"):
        value = value.args[0]
    shapes = [node_info(one).shape if isinstance(one, fx.Node) else None for one in (value, mask, node)]
    if None in shapes or not is_data(value) or shapes[0] == shapes[2] or torch.broadcast_shapes(*shapes[:2]) != shapes[2]:
        return None
    return build.call("mul", value, _negated(build, mask) if zeros[0] else mask)


def _negated(build: CallBuilder, mask: fx.Node) -> fx.Node:
    """The negation of a mask, before views that add dimensions to it."""
    name, target = function_name(mask), mask.target
    if name in ("bitwise_not", "logical_not", "invert"):
        return mask.all_input_nodes[0]
    if name in ("getitem", "unsqueeze") and callable(target):
        return build.call(name, _negated(build, mask.all_input_nodes[0]), *mask.args[1:], target=target)
    return build.call("logical_not", mask, target=torch.logical_not)


def _matrix_product(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The sum over the last dimension of one matrix of signals and the first of another is their matrix product."""
    ranks = {one: len(node_info(one).shape or ()) for one in node.all_input_nodes}
    if set(ranks.values()) != {2} or not all(map(is_data, ranks)):
        return None
    contraction = row_of(node).product.contraction
    assert contraction is not None
    try:
        found = contraction(node, lambda one: ranks.get(one))
    except NotAContractionError:
        return None
    one, other = map(list, found.labels)
    return build.call("matmul", *found.operands) if one[1] == other[0] and one[0] != other[1] else None


def _diagonal_product(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """A product with a diagonal matrix of signals scales rows or columns."""
    first, second = node.args[:2]
    matrix: Any
    for matrix, other, dim in ((first, second, -1), (second, first, -2)):
        if is_data(matrix) and function_name(matrix) == "diag_embed" and len(matrix.args) == 1 and not matrix.kwargs:
            shape = node_info(other).shape if isinstance(other, fx.Node) else None
            if shape is not None and len(shape) > 1:
                return build.call("mul", build.call("unsqueeze", matrix.args[0], dim, target=torch.unsqueeze), other)
    return None


def _folded(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """A fold of single places is a view."""
    bound = _bound(node, ("input", "output_size", "kernel_size", "dilation", "padding", "stride"))
    ones = all(bound[name] in (1, (1, 1), [1, 1]) for name in ("kernel_size", "dilation", "stride"))
    sizes = bound["output_size"]
    if not ones or bound["padding"] not in (0, (0, 0), [0, 0]) or not isinstance(sizes, (tuple, list)):
        return None
    return build.call("unflatten", node.args[0], -1, tuple(sizes), target=torch.unflatten)


# --- writes -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """What is written into a part of a dimension: from `first` to before `last`, which is None at the end."""

    value: Any
    first: int
    last: int | None
    selected: bool = False  # whether the value is without the dimension


def _written(node: fx.Node) -> tuple[fx.Node, int, _Piece] | None:
    """The tensor into which a call writes, the dimension, and the piece; None if the places are not known."""
    row = row_of(node) if node.op == "call_function" and node_info(node).operator is not None else None
    if row is None or row.name not in ("select_scatter", "slice_scatter"):
        return None
    selected = row.name == "select_scatter"
    names = ("input", "src", "dim", "index") if selected else ("input", "src", "dim", "start", "end", "step")
    bound: dict[str, Any] = {"dim": 0, "start": 0, "end": None, "step": 1} | _bound(node, names)
    base, dim, first, last = bound["input"], bound["dim"], bound["start"] or 0, bound["end"]
    if nodes_in((dim, first, last, bound.get("index"))) or bound["step"] != 1 or node_info(node).shape is None:
        return None
    if selected:
        first, last = bound["index"], None if bound["index"] == -1 else bound["index"] + 1
    dim %= len(node_info(node).shape or ())
    size = _size(base, dim)
    if size is not None:
        first, last, _ = slice(first, last).indices(size)
        last = None if last == size else last
    return (base, dim, _Piece(bound["src"], first, last, selected)) if first >= 0 else None


def _size(base: Any, dim: int) -> int | None:
    """The size of a tensor of one number into which pieces are written, if the graph shows it."""
    while isinstance(base, fx.Node) and function_name(base) in ("slice_scatter", "select_scatter"):
        base = base.args[0]
    return known_size(base, dim)


def _write(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The pieces of which a tensor consists, put together, or one that is written between zeros, as padding."""
    found = _written(node)
    if found is None or any((written := _written(user)) is not None and written[:2] == (node, found[1]) for user in node.users):
        return None  # or the last call of several decides
    base, dim, piece = found
    pieces = [piece]
    while (before := _written(base)) is not None and before[1] == dim:
        base = before[0]
        pieces.append(before[2])
    if {_dtype(one.value) for one in pieces} != {node_info(node).dtype}:
        return None
    pieces.sort(key=lambda one: one.first)
    starts = [one.first for one in pieces]
    if starts[0] == 0 and [one.last for one in pieces] == [*starts[1:], None]:
        return _joined(build, pieces, dim)
    if number_filling(base) != 0 or len(pieces) > 1 or piece.selected:
        return None
    after: int | None = 0 if piece.last is None else -piece.last
    if piece.last is not None and piece.last >= 0:
        size = _size(base, dim)
        after = None if size is None else size - piece.last
    behind = len(node_info(node).shape or ()) - 1 - dim
    return None if after is None else build.call("pad", piece.value, pad=(*(0, 0) * behind, piece.first, after))


def _joined(build: CallBuilder, pieces: Sequence[_Piece], dim: int) -> fx.Node:
    if all(piece.selected for piece in pieces):
        return build.call("stack", [piece.value for piece in pieces], dim, target=torch.stack)
    values = [
        build.call("unsqueeze", piece.value, dim, target=torch.unsqueeze) if piece.selected else piece.value for piece in pieces
    ]
    return values[0] if len(values) == 1 else build.call("cat", values, dim, target=torch.cat)


def _unpadded(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """What is padded by nothing on each side."""
    amounts, source = build["pad"], build["input"]
    nothing = isinstance(amounts, (tuple, list)) and all(isinstance(one, int) and one == 0 for one in amounts)
    return source if nothing and isinstance(source, fx.Node) else None


#: Forms by the name of the row.
_FORMS: dict[str, Form] = {
    "add": _without_zero,
    "sub": _without_zero,
    "mul": _product,
    "div": _without_ones,
    "sum": _of_stack("add"),
    "mean": _mean,
    "prod": _of_stack("mul"),
    "logsumexp": _softplus,
    "getitem": _last_sum,
    "select": _last_sum,
    "matmul": _diagonal_product,
    "tensordot": _matrix_product,
    "where": _chosen_messages,
    "masked_fill": _chosen_messages,
    "pad": _unpadded,
    "col2im": _folded,
    "fold": _folded,
    "slice_scatter": _write,
    "select_scatter": _write,
}
