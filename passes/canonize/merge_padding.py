"""CANONIZE: make padding with zeros before a convolution the padding of the convolution."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from lrpfx.ir.node import (
    Role,
    calls,
    is_call_of,
    node_info,
    only_reader,
    parameter_value,
    row_of,
    sources_of_dimensions,
    update_info,
)
from lrpfx.ir.operator import Operator
from lrpfx.operators.contractions import added_by_index, keeps_all
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.channel_places import keeps_entries
from lrpfx.passes.constants import known_size, number_filling, one_among_constants
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


class MergePadding(GraphPass):
    """Merge zero padding into each convolution that reads it. `cat` with zeros is padding, too.

    Calls that keep zeros, such as a ReLU, and ones that move dimensions may lie between the two. The padding becomes that of
    the layer where both sides are alike, and otherwise a part of the layer that pads each side. Parts that are padded alike
    and put together are padded as one.
    """

    name = "merge_padding"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(_padding_of_parts(node) is not None for node in calls(program.graph)) or any(
            next(_paddings(program, node, operator), None) is not None
            for node in calls(program.graph)
            if (operator := _convolution(node)) is not None and node.args
        )

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            padding = _padding_of_parts(node)
            if padding is not None:
                padding.pad_together(program)
                result.match(node_info(node).name, "parts that are padded alike, as one value that is padded")
        for node in list(calls(program.graph)):
            operator = _convolution(node)
            if operator is None or not node.args:
                continue
            paddings = list(_paddings(program, node, operator))
            reason = ""
            for count in range(len(paddings), 0, -1):  # as many together as the layer can have
                changed = _with_padding(program, node, operator, [one.amounts for one in paddings[:count]])
                if isinstance(changed, str):
                    reason = changed
                    continue
                _merge(program, node, paddings[:count], changed)
                result.matches += count
                result.details += [(name, f"merged into {node_info(node).name}") for name in node_info(node).merged[-count:]]
                paddings = paddings[count:]
                break
            if paddings:
                result.reasons.append((node_info(paddings[0].call).name, reason))
        return result


#: Zeros before and after the entries of a dimension, for dimensions counted from the end. A node is a size of the run.
_Amounts = dict[int, tuple[int | fx.Node, int | fx.Node]]


@dataclass(frozen=True)
class _PaddingOfParts:
    """Calls that pad the parts of a `cat` with zeros, alike and in other dimensions than the one they are put together in."""

    whole: fx.Node  # the `cat`
    parts: list[fx.Node]  # the calls that pad
    amounts: _Amounts

    def pad_together(self, program: Program) -> None:
        whole, first = self.whole, self.parts[0]
        info, of_padding = node_info(whole), node_info(first)
        sources = [bound_arguments(part, row_of(part))["input"] for part in self.parts]
        before = replace(info, shape=_unpadded(info.shape, self.amounts))
        together = insert_call(program.graph, whole, whole.target, (sources, *whole.args[1:]), before, dict(whole.kwargs))
        merged = replace(of_padding, shape=info.shape, dtype=info.dtype)
        given = {name: value for name, value in bound_arguments(first, row_of(first)).items() if name != "input"}
        replace_call(whole, insert_call(program.graph, whole, row_of(first).canonical, (together,), merged, given))
        for part in self.parts:
            program.graph.erase_node(part)


def _padding_of_parts(node: fx.Node) -> _PaddingOfParts | None:
    parts = node.args[0] if is_call_of(node, "cat") else ()
    if not isinstance(parts, (tuple, list)) or not 1 < len(parts) == len(set(parts)):
        return None
    if not all(is_call_of(part, "pad") and only_reader(part) is node for part in parts):
        return None
    found = [_padded(part) for part in parts]
    amounts = next((one[1] for one in found if one is not None), {})
    shape, dim = node_info(node).shape, next(iter((*node.args[1:], *node.kwargs.values())), 0)
    if any(one is None or one[1] != amounts for one in found) or not isinstance(dim, int) or (dim >= 0 and shape is None):
        return None
    dim -= len(shape or ()) if dim >= 0 else 0
    return None if amounts.get(dim, (0, 0)) != (0, 0) else _PaddingOfParts(node, list(parts), amounts)


def _convolution(node: fx.Node) -> Operator | None:
    operator = node_info(node).operator
    return operator if operator is not None and operator.linear.with_amounts and node_info(node).role is Role.DATA else None


@dataclass(frozen=True)
class _Padding:
    """A call that pads with zeros before a convolution."""

    call: fx.Node
    source: Any  # what it pads
    reader: fx.Node  # the call that reads it
    between: list[tuple[fx.Node, _Amounts]]  # the calls before the convolution, and how much their results are padded
    amounts: _Amounts  # how much the input of the convolution is padded


def _paddings(program: Program, node: fx.Node, operator: Operator) -> Iterator[_Padding]:
    """The calls that pad with zeros before a convolution, from the last one on."""
    reader, value, between = node, node.args[0], list[fx.Node]()
    alone = True  # whether only the convolution reads the calls so far, so that they may lose their padding
    while isinstance(value, fx.Node):
        rank = len(node_info(value).shape or ()) if between else operator.rank_of_batch
        found = _padded(value) if is_call_of(value, "pad") else _between_zeros(value, rank)
        if found is not None:
            source, amounts = found
            padded = []
            for call in reversed(between):
                moved = _amounts_behind(program, call, amounts)
                if moved is None:
                    return
                amounts = moved
                padded.append((call, amounts))
            yield _Padding(value, source, reader, padded, amounts)
            alone = alone and len(value.users) == 1
            value = source
        elif alone and len(value.users) == 1 and node_info(value).operator is not None and value.args:
            between.append(value)
            reader, value = value, value.args[0]
        else:
            return


def _amounts_behind(program: Program, call: fx.Node, amounts: _Amounts) -> _Amounts | None:
    """How much the result of a call is padded if its input is; None if it does not commute with padding, or that is unknown."""
    row = row_of(call)
    if row.values.ratio is not None or row.entries.converts or keeps_entries(call) or keeps_all(call):
        return amounts  # all of them keep zeros
    after, before = node_info(call).shape, node_info(call.all_input_nodes[0]).shape
    if after is None or before is None or len(call.all_input_nodes) > 1:
        return None
    sources = _added_by_index(call, len(after)) if row.outputs.picks else sources_of_dimensions(call, len(after))
    if sources is None:
        return None
    places = {source - len(before): dim - len(after) for dim, source in enumerate(sources) if source is not None}
    if any(pair != (0, 0) and dim not in places for dim, pair in amounts.items()):
        return None
    program.fixed_dimensions = True
    return {places[dim]: pair for dim, pair in amounts.items() if dim in places}


def _added_by_index(call: fx.Node, rank: int) -> list[int | None] | None:
    """For each dimension of the result, that of the argument, for an index that only adds dimensions."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    added = added_by_index(index)
    if added is None:
        return None
    new = {place % rank for place in added}
    return [None if dim in new else dim - sum(place < dim for place in new) for dim in range(rank)]


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


def _merge(program: Program, node: fx.Node, paddings: list[_Padding], changed: dict[str, Any]) -> None:
    for padding in paddings:
        padding.reader.replace_input_with(padding.call, padding.source)
        for call, amounts in padding.between:
            update_info(call, shape=_unpadded(node_info(call).shape, amounts))
    node.kwargs = {**node.kwargs, **changed}
    if "amounts" in changed:
        row = operator_named(row_of(node).linear.with_amounts)
        node.target = row.canonical
        update_info(node, operator=row)
    update_info(node, merged=(*node_info(node).merged, *(node_info(one.call).name for one in paddings)))
    for padding in paddings:
        if not padding.call.users:
            program.graph.erase_node(padding.call)


def _unpadded(shape: tuple[int, ...] | None, amounts: _Amounts) -> tuple[int, ...] | None:
    """The shape without padding; None if it depends on sizes of the run."""
    sizes = {dim: one + other for dim, (one, other) in amounts.items() if isinstance(one, int) and isinstance(other, int)}
    if shape is None or len(sizes) < len(amounts):
        return None
    return tuple(size - sizes.get(dim - len(shape), 0) for dim, size in enumerate(shape))
