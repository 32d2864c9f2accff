"""CANONIZE: make padding with zeros before a convolution the padding of the convolution."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from lrpfx.ir.node import Role, calls, is_call_of, node_info, parameter_value, row_of, update_info
from lrpfx.ir.operator import Operator
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.constants import known_size, number_filling, one_among_constants
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


class MergePadding(GraphPass):
    """Merge zero padding into each convolution that reads it. `cat` with zeros is padding, too.

    It becomes the padding of the layer where both sides are alike, and otherwise a part of the layer that pads each side.
    """

    name = "merge_padding"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(
            next(_paddings(value, operator), None) is not None
            for node in calls(program.graph)
            if (operator := _convolution(node)) is not None
            for value in node.args[:1]
        )

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            operator = _convolution(node)
            if operator is None or not node.args:
                continue
            paddings = list(_paddings(node.args[0], operator))
            reason = ""
            for count in range(len(paddings), 0, -1):  # as many together as the layer can have
                changed = _with_padding(program, node, operator, [amounts for _, _, amounts in paddings[:count]])
                if isinstance(changed, str):
                    reason = changed
                    continue
                _merge(program, node, [padded for padded, _, _ in paddings[:count]], paddings[count - 1][1], changed)
                result.matches += count
                result.details += [(name, f"merged into {node_info(node).name}") for name in node_info(node).merged[-count:]]
                paddings = paddings[count:]
                break
            if paddings:
                result.reasons.append((node_info(paddings[0][0]).name, reason))
        return result


#: Zeros before and after the entries of a dimension, for dimensions counted from the end. A node is a size of the run.
_Amounts = dict[int, tuple[int | fx.Node, int | fx.Node]]


def _convolution(node: fx.Node) -> Operator | None:
    operator = node_info(node).operator
    return operator if operator is not None and operator.linear.with_amounts and node_info(node).role is Role.DATA else None


def _paddings(value: Any, operator: Operator) -> Iterator[tuple[fx.Node, Any, _Amounts]]:
    """The calls that pad with zeros before a convolution, from the last one on: each call, what it pads, and how much."""
    while isinstance(value, fx.Node):
        found = _padded(value) if is_call_of(value, "pad") else _between_zeros(value, operator.rank_of_batch)
        if found is None:
            return
        yield value, *found
        value = found[0]


def _padded(value: fx.Node) -> tuple[Any, _Amounts] | None:
    bound = bound_arguments(value, operator_named("pad"))
    amounts = bound["pad"]
    sizes = isinstance(amounts, (tuple, list)) and all(isinstance(one, (int, fx.Node)) for one in amounts)
    if not sizes or bound.get("mode", "constant") != "constant" or bound.get("value"):
        return None
    pairs = zip(amounts[::2], amounts[1::2], strict=True)
    return bound["input"], {-1 - place: pair for place, pair in enumerate(pairs)}


def _between_zeros(value: fx.Node, rank: int) -> tuple[Any, _Amounts] | None:
    """What `cat` puts between zeros along one dimension."""
    found = one_among_constants(value)
    if found is None:
        return None
    signal, before, after, dim = found
    shape = node_info(value).shape
    if dim >= 0 and (shape is None or len(shape) != rank):
        return None
    if any(number_filling(one) != 0 for one in (*before, *after)):
        return None
    sizes = [[known_size(one, dim) for one in some] for some in (before, after)]
    if None in (*sizes[0], *sizes[1]):
        return None
    first, last = (sum(size for size in some if size is not None) for some in sizes)
    return signal, {dim - rank if dim >= 0 else dim: (first, last)}


def _with_padding(program: Program, node: fx.Node, operator: Operator, added: list[_Amounts]) -> dict[str, Any] | str:
    """The arguments of a convolution on an unpadded value, or the reason why it has none."""
    spatial, name = operator.dimensions.spatial, node_info(node).name
    if any(dim < -spatial and pair != (0, 0) for amounts in added for dim, pair in amounts.items()):
        return f"it pads the channels or the batch of {name}"
    if any(isinstance(size, int) and size < 0 for amounts in added for pair in amounts.values() for size in pair):
        return f"it cuts off entries before {name}"
    own = _own_padding(program, node, bound_arguments(node, operator), spatial)
    if isinstance(own, str):
        return own
    sides: list[list[Any]] = []
    for dim in range(-spatial, 0):
        pairs = [amounts.get(dim, (0, 0)) for amounts in added]
        sides.append([_sum([pair[side] for pair in pairs]) for side in (0, 1)])
    if any(size is None for side in sides for size in side):
        return f"it pads one side of {name} several times by sizes that only a run knows"
    padding = []
    for (before, after), added_here in zip(own, sides, strict=True):
        if not all(isinstance(size, int) for size in added_here) or before + added_here[0] != after + added_here[1]:
            return {"amounts": tuple(size for side in reversed(sides) for size in side)}
        padding.append(before + added_here[0])
    return {"padding": tuple(padding)}


def _sum(sizes: list[Any]) -> Any:
    """The sum of sizes; None if no number or node is it."""
    nodes = [one for one in sizes if isinstance(one, fx.Node)]
    numbers = sum(one for one in sizes if isinstance(one, int))
    if not nodes:
        return numbers
    return nodes[0] if len(nodes) == 1 and numbers == 0 else None


def _own_padding(program: Program, node: fx.Node, bound: dict[str, Any], spatial: int) -> list[tuple[int, int]] | str:
    own, name = bound.get("padding", 0), node_info(node).name
    if own == "same":
        weight, dilation = bound["weight"], _each(bound.get("dilation", 1), spatial)
        if not isinstance(weight, fx.Node) or node_info(weight).role is not Role.PARAMETER:
            return f"the weight of {name} depends on the model's input"
        sizes = parameter_value(weight, program.root).shape[2:]
        totals = [step * (size - 1) for size, step in zip(sizes, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    alike = _each(0 if own == "valid" else own, spatial)
    if not all(isinstance(one, int) for one in alike):
        return f"the padding of {name} depends on sizes"
    return [(one, one) for one in alike]


def _each(value: Any, dimensions: int) -> list[Any]:
    return [value] * dimensions if not isinstance(value, (tuple, list)) else list(value) * (dimensions // len(value))


def _merge(program: Program, node: fx.Node, padded: list[fx.Node], source: Any, changed: dict[str, Any]) -> None:
    node.args = (source, *node.args[1:])
    node.kwargs = {**node.kwargs, **changed}
    if "amounts" in changed:
        row = operator_named(row_of(node).linear.with_amounts)
        node.target = row.canonical
        update_info(node, operator=row)
    update_info(node, merged=(*node_info(node).merged, *(node_info(one).name for one in padded)))
    for one in padded:
        if not one.users:
            program.graph.erase_node(one)
