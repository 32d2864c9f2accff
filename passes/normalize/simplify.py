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
    update_info,
)
from lrpfx.ir.operator import NotAContractionError
from lrpfx.operators.contractions import added_by_index
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.constants import known_size, number_filling
from lrpfx.passes.normalize.call_builder import CallBuilder, with_replaced_calls
from lrpfx.passes.normalize.decompose import views_to_reshapes
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED
from lrpfx.support.tensors import is_floating


class Simplify(GraphPass):
    """Replace calls by plainer ones that compute the same: with neutral numbers, of stacks, and writes into new tensors."""

    name = "simplify"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = with_replaced_calls(program, _plainer, lambda node, new: f"{row_of(node)}: now {node_info(new).name}")
        if result.matches:  # what is written into a view has its strides, and what is put together has not
            views_to_reshapes(program.graph)
        return result


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
    """A product without ones, of zeros, or of a column with a row of parameters."""
    return _without_ones(build, node) or _zeros(build, node) or _column_times_row(build, node)


def _zeros(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The zeros that a product with 0 is, if they shape a constant, as in 0 * y + bias, which depends on no signal any more."""
    if any(user.op == "output" or [one for one in user.all_input_nodes if is_data(one)] != [node] for user in node.users):
        return None
    for value, other in (node.args[:2], node.args[1::-1]):
        if not isinstance(value, fx.Node) or not is_data(value) or is_data(other) or number_filling(other) != 0:
            continue
        plain = isinstance(other, (int, float)) and node_info(value).dtype == node_info(node).dtype is not None
        if plain or (isinstance(other, fx.Node) and keeps(value, other, node)):
            _end_signal(node)
            return build.filled_like(value, 0.0)
    return None


def _end_signal(node: fx.Node) -> None:
    """Give a call, and what is computed of it and constants alone, the role that it has without a signal."""
    update_info(node, role=Role.METADATA)
    for user in node.users:
        if user.op != "output" and is_data(user) and not any(map(is_data, user.all_input_nodes)):
            _end_signal(user)


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
        found = _combined_parts(node, "stack")
        if found is None:
            return None
        parts, _ = found
        if combined == "add" and all(map(is_data, parts)):  # sums of signals are the same in either form
            return None
        total = reduce(lambda one, other: build.call(combined, one, other), parts)
        return build.call("div", total, len(parts)) if is_call_of(node, "mean") else total

    return form


def _combined_parts(node: fx.Node, joined: str) -> tuple[Sequence[fx.Node], int] | None:
    """The parts that `stack` or `cat` puts together along the one dimension over which a call combines them; and that one."""
    bound = _bound(node, ("input", "dim", "keepdim", "dtype"))
    whole, dims, shape = bound["input"], bound.get("dim"), node_info(bound["input"]).shape
    if not is_call_of(whole, joined) or shape is None or bound.get("keepdim") or bound.get("dtype") is not None:
        return None
    parts: Any = whole.args[0]
    along: Any = next(iter((*whole.args[1:], *whole.kwargs.values())), 0)
    dim: Any
    (dim,) = dims if isinstance(dims, (tuple, list)) and len(dims) == 1 else (dims,)
    plain = isinstance(parts, (tuple, list)) and isinstance(dim, int) and isinstance(along, int)
    if not plain or (dim - along) % len(shape) or len(set(map(_dtype, parts))) != 1:
        return None
    return parts, dim % len(shape)


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


def _sum(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """Sums of the parts of a stack, or of values to which `cat` has given a dimension: cat([y[None], b[None]]).sum(0)."""
    return _of_stack("add")(build, node) or _of_layers(build, node)


def _of_layers(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    found = _combined_parts(node, "cat")
    if found is None:
        return None
    parts, dim = found
    terms = [_without_dimension(part, dim) for part in parts]
    if None in terms or all(map(is_data, parts)):  # sums of signals are the same in either form
        return None
    return reduce(lambda one, other: build.call("add", one, other), terms)


def _without_dimension(value: Any, dim: int) -> fx.Node | None:
    """The value to which a call adds this dimension of its result, and no other."""
    source = value.args[0] if isinstance(value, fx.Node) and value.op == "call_function" and value.args else None
    rank = len(node_info(value).shape or ())
    if not rank or not isinstance(source, fx.Node):
        return None
    if function_name(value) == "unsqueeze":
        added: Any = value.args[1:] if isinstance(value.args[1], int) else ()
    elif function_name(value) == "getitem":
        added = added_by_index(value.args[1] if isinstance(value.args[1], tuple) else (value.args[1],))
    else:
        return None
    return source if added is not None and [place % rank for place in added] == [dim] else None


def _of_broadcast(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The signal that `broadcast_tensors` returns as it is, since the others are parameters that it has the shape for."""
    broadcast, place = node.args[:2]
    if not is_call_of(broadcast, "broadcast_tensors") or not isinstance(place, int):
        return None
    values: Any = broadcast.args[0] if isinstance(broadcast.args[0], (tuple, list)) else broadcast.args
    signals = [value for value in values if is_data(value)]
    others = [value for value in values if value not in signals]
    if len(signals) != 1 or any(node_info(value).role is not Role.PARAMETER for value in others):
        return None  # the sizes of another signal may differ in another run
    (signal,) = signals
    if node_info(signal).shape is None or node_info(signal).shape != node_info(node).shape:
        return None
    return signal if values[place] is signal else None


def _picked(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    return _of_broadcast(build, node) or _last_sum(build, node)


def _with_statistics(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """A batch norm whose statistics, such as torch.zeros_like(buffer), are numbers: they become parameters like the others."""
    names = [name for name in row_of(node).arguments if name in row_of(node).tensors and name != "input"]
    given = {name: build[name] for name in names}
    numbers: dict[str, Any] = {name: number_filling(value) for name, value in given.items() if _is_made(value)}
    like = next((value for value in given.values() if isinstance(value, fx.Node) and not _is_made(value)), None)
    if not numbers or None in numbers.values() or like is None or node_info(like).role is not Role.PARAMETER:
        return None
    dtype, shape = parameter_value(like, build.program.root).dtype, parameter_value(like, build.program.root).shape
    if any((node_info(given[name]).shape, node_info(given[name]).dtype) != (shape, dtype) for name in numbers):
        return None
    for name, number in numbers.items():
        node.replace_input_with(given[name], build.filled_like(like, number))
    return None


def _is_made(value: Any) -> bool:
    """Whether a tensor is not a parameter, but made by the graph."""
    return isinstance(value, fx.Node) and node_info(value).role is Role.METADATA


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


def _flattened_stack(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """A stack whose new dimension a view merges with the next one puts its parts together along that one, as `cat` does."""
    stack: Any = node.args[0]
    shape, after = (node_info(one).shape if isinstance(one, fx.Node) else None for one in (stack, node))
    if shape is None or after is None or not is_call_of(stack, "stack") or only_reader(stack) is None:
        return None
    parts: Any = stack.args[0]
    dim: Any = next(iter((*stack.args[1:], *stack.kwargs.values())), 0)
    if not isinstance(parts, (tuple, list)) or not isinstance(dim, int) or dim % len(shape) == len(shape) - 1:
        return None
    dim %= len(shape)
    if tuple(after) != (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]):
        return None
    build.program.fixed_dimensions = True
    return build.call("cat", list(parts), dim, target=torch.cat)


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
    found, written = _written(node), node
    if found is not None and (before := _written(found[0])) is not None and before[1:] == found[1:]:
        found, written = before, found[0]  # the same piece once more, as y[:2] += 1 writes it
    new = None if found is None else _put_together(build, node, written, *found)
    return new if new is not None or written is node else written


def _put_together(
    build: CallBuilder, node: fx.Node, written: fx.Node, base: fx.Node, dim: int, piece: _Piece
) -> fx.Node | None:
    others = [_written(user) for user in (*written.users, *node.users) if user is not node]
    if any(other is not None and other[0] in (written, node) and other[1] == dim for other in others):
        return None  # the last call of several decides
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
    ends = [one.last for one in pieces[:-1]]
    if is_data(base) and all(last is not None and 0 <= last <= first for last, first in zip(ends, starts[1:], strict=True)):
        return _joined(build, _with_rest(build, pieces, base, dim), dim)
    if number_filling(base) != 0 or len(pieces) > 1 or piece.selected:
        return None
    after: int | None = 0 if piece.last is None else -piece.last
    if piece.last is not None and piece.last >= 0:
        size = _size(base, dim)
        after = None if size is None else size - piece.last
    behind = len(node_info(node).shape or ()) - 1 - dim
    return None if after is None else build.call("pad", piece.value, pad=(*(0, 0) * behind, piece.first, after))


def _with_rest(build: CallBuilder, pieces: Sequence[_Piece], base: fx.Node, dim: int) -> list[_Piece]:
    """Pieces in order, and slices of the value that they are written into, for the places between them."""
    whole: list[_Piece] = []
    place: int | None = 0
    for piece in (*pieces, None):
        until = None if piece is None else piece.first
        if place is not None and place != until:
            rest = build.call("slice", base, dim, place, until, target=torch.ops.aten.slice.Tensor)
            whole.append(_Piece(rest, place, until))
        if piece is not None:
            whole.append(piece)
            place = piece.last
    return whole


def _unwritten(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """A slice of what is written into: a piece, or, of places that no piece is written to, a slice of what was there before."""
    base: Any
    dim: Any
    first: Any
    last: Any
    base, dim, first, last, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])[:5]
    found = _written(base) if isinstance(base, fx.Node) and not node.kwargs else None
    if found is None or not all(isinstance(one, int) or one is None for one in (dim, first, last)) or step != 1:
        return None
    shape = node_info(base).shape or ()
    before, along, piece = found
    first = first or 0
    bounds = [first, piece.last or 0, last or 0]
    if piece.selected or dim % len(shape) != along or min(bounds) < 0 or not is_data(before):
        return None
    if (first, last) == (piece.first, piece.last):
        return piece.value if isinstance(piece.value, fx.Node) and is_data(piece.value) else None
    if (piece.last is not None and first >= piece.last) or (last is not None and last <= piece.first):
        return build.call("slice", before, *node.args[1:], target=torch.ops.aten.slice.Tensor)
    return None


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
    "sum": _sum,
    "mean": _mean,
    "prod": _of_stack("mul"),
    "batch_norm": _with_statistics,
    "logsumexp": _softplus,
    "getitem": _picked,
    "select": _last_sum,
    "matmul": _diagonal_product,
    "tensordot": _matrix_product,
    "where": _chosen_messages,
    "masked_fill": _chosen_messages,
    "pad": _unpadded,
    "col2im": _folded,
    "fold": _folded,
    "flatten": _flattened_stack,
    "view": _flattened_stack,
    "reshape": _flattened_stack,
    "slice": _unwritten,
    "slice_scatter": _write,
    "select_scatter": _write,
}
