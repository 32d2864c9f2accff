"""What the graph shows about constants: tensors of one number, such as torch.ones, and values that are held constant."""

import operator
from collections import deque
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import Role, calls, function_name, is_call_of, is_data, node_info, result_of, update_info
from lrpfx.ir.operator import Fill
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import spelling_of

#: Names of functions that make tensors of one number: the number, or the place of the argument that says it.
_NUMBERS = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
}
_PLACES_OF_NUMBERS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "tensor": 0, "new_tensor": 1}
#: Those whose first argument is a size.
MAKERS_OF_NUMBERS = ("zeros", "ones", "full", "empty")


def number_filling(value: Any) -> float | None:
    """The number that all entries of a value are, as the graph shows: that of torch.ones, a view or sum of it, or a number."""
    terms: dict[fx.Node, list[float | fx.Node | None]] = {}  # of each sum of numbers, the nearest to the value first
    waiting = deque([_number_or_sum(value)])
    while waiting:
        one = waiting.popleft()
        if one is None:
            return None
        if isinstance(one, float):
            found = one
        elif one not in terms:
            terms[one] = [_number_or_sum(term) for term in one.args]
            waiting.extend(terms[one])
    numbers: dict[Any, float] = {}
    for node in next(iter(terms)).graph.nodes if terms else ():
        if node in terms:
            given = (torch.tensor(numbers.get(term, term), dtype=torch.float64) for term in terms[node])
            found = numbers[node] = float(node.target(*given))
    return found


def _number_or_sum(value: Any) -> float | fx.Node | None:
    """What a view, a conversion or a choice of entries is made of: a number, or a call that adds up or scales others."""
    filled = False
    while isinstance(value, fx.Node):
        if value.op == "get_attr":
            value = node_info(value).number
            break
        name = function_name(value)
        given: dict[Any, Any] = dict(enumerate(value.args)) | value.kwargs
        if name in _NUMBERS:
            return _NUMBERS[name] if not filled or _NUMBERS[name] == 0 else None
        if name in _PLACES_OF_NUMBERS:
            value = given.get("fill_value", given.get(_PLACES_OF_NUMBERS[name]))
            continue
        spelling = spelling_of(value)
        row = None if spelling is None else spelling.operator
        if row is not None and row.merging.affine_in and not filled and not value.kwargs and callable(value.target):
            return value
        moves = row is not None and (row.entries.moves or row.entries.converts) and len(value.all_input_nodes) == 1
        if row is None or not moves or row.entries.fills is Fill.NUMBER:
            return None
        filled = filled or row.entries.fills is Fill.ZERO
        value = value.args[0]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and (not filled or value == 0)
    return float(value) if is_number else None


def known_size(value: Any, dim: int) -> int | None:
    """The size of a tensor of one number along a dimension, if the graph shows it as a number."""
    if not isinstance(value, fx.Node):
        return None
    info = node_info(value)
    if value.op == "get_attr" and info.number is not None and info.shape is not None:
        return info.shape[dim] if -len(info.shape) <= dim < len(info.shape) else None
    name = function_name(value)
    if name.endswith("_like"):
        return 1 if _keeps_one(value.args[0], dim) else None
    if name not in _NUMBERS and name not in _PLACES_OF_NUMBERS:
        return None
    sizes: Any = value.kwargs.get("size", value.args[1:] if name.startswith("new_") else value.args)
    if isinstance(sizes, (tuple, list)) and len(sizes) and not isinstance(sizes[0], int):
        first = sizes[0]
        is_tuple = isinstance(first, (tuple, list)) or (isinstance(first, fx.Node) and first.target is operator.add)
        sizes = first if is_tuple else sizes
    if isinstance(sizes, fx.Node) and sizes.target is operator.add and dim < 0:  # x.shape[:-1] + (2,)
        sizes = sizes.args[1]
    if not isinstance(sizes, (tuple, list)) or not -len(sizes) <= dim < len(sizes):
        return None
    size = sizes[dim]
    return size if isinstance(size, int) else None


def _keeps_one(value: Any, dim: int) -> bool:
    """Whether a slice keeps one entry of a dimension: x[..., :1] or x[..., -1:]."""
    shape = node_info(value).shape if isinstance(value, fx.Node) else None
    if not isinstance(value, fx.Node) or shape is None:
        return False
    if function_name(value) == "getitem":
        index: tuple[Any, ...] = value.args[1] if isinstance(value.args[1], tuple) else (value.args[1],)
        if any(not isinstance(part, slice) and part is not Ellipsis for part in index):
            return False
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (*index[:place], *[slice(None)] * (len(shape) - len(index) + 1), *index[place + 1 :])
        part = dict(enumerate(index)).get(dim % len(shape))
        bounds: tuple[Any, Any] | None = (part.start, part.stop) if isinstance(part, slice) else None
    elif function_name(value) == "slice":
        along, first, last = (*value.args[1:], None, None, None)[:3]
        bounds = (first, last) if isinstance(along, int) and (along - dim) % len(shape) == 0 else None
    else:
        return False
    return bounds in ((None, 1), (0, 1), (-1, None), (-1, 2**63 - 1))


def evaluated(node: fx.Node, known: dict[Any, Any]) -> Any:
    """What views and calls on sizes return for the values that are known; other values are known by their shapes alone.

    `TypeError` if one has no shape.
    """
    if node in known:
        return known[node]
    info, number = node_info(node), number_filling(node)
    if number is not None and info.shape is not None:
        return torch.full(info.shape, number, dtype=info.dtype)
    is_view = info.operator is not None and (info.operator.entries.moves or info.operator.outputs.picks)
    if node.op != "call_function" or not (is_view or info.role in (Role.METADATA, Role.PARAMETER)):
        if info.shape is None:
            raise TypeError
        return torch.empty(info.shape, device="meta")
    read = {one: evaluated(one, known) for one in node.all_input_nodes}
    if any(isinstance(one, torch.Tensor) and one.is_meta for one in read.values()):
        # A known tensor may not meet one without values: index_select by such an index returns memory that nobody has written.
        read = {one: value.to("meta") if isinstance(value, torch.Tensor) else value for one, value in read.items()}
    return result_of(node, read.__getitem__)


def one_among_constants(value: Any) -> tuple[fx.Node, list[Any], list[Any], int] | None:
    """The only operand of a `cat` that depends on the input, those before it and after it, and the dimension."""
    if not is_call_of(value, "cat") or not isinstance(value.args[0], (tuple, list)):
        return None
    parts = list(value.args[0])
    dim = next(iter((*value.args[1:], *value.kwargs.values())), 0)
    places = [place for place, part in enumerate(parts) if is_data(part)]
    if len(places) != 1 or not isinstance(dim, int) or len(parts) < 2:
        return None
    return parts[places[0]], parts[: places[0]], parts[places[0] + 1 :], dim


def mark_constants(graph: fx.Graph) -> None:
    """Give the role of constants to values that only take part in what is held constant."""
    for node in reversed(list(calls(graph))):
        if node_info(node).role is Role.DATA and node.users and all(_holds_constant(node, user) for user in node.users):
            update_info(node, role=Role.CONSTANT)


def _holds_constant(node: fx.Node, user: fx.Node) -> bool:
    if user.op == "output":
        return False
    info = node_info(user)
    if info.role is not Role.DATA:
        return True
    row = info.operator
    if row is None or not row.controls or not row.arguments:
        return False
    bound = bound_arguments(user, row)
    return all(name in row.controls for name, value in bound.items() if value is node)
