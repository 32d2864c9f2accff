"""CANONIZE: merge batch norms, factors and terms of parts of a layer's channels into the layer, as arithmetic on parameters."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.ir.kinds import BatchNorm
from lrpfx.ir.node import Role, calls, is_data, node_info, only_reader, parameter_value, readers, row_of
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.canonize.affine_maps import Merger, constant_channels, value_and_constant
from lrpfx.passes.canonize.channel_places import dimension_of_channels, returns_parts
from lrpfx.passes.canonize.merge_batch_norm import batch_norm_scale, is_layer_of_parameters, merged_bias, move_up
from lrpfx.passes.canonize.merge_scales import merge_into_layer, only_scales, output_channels
from lrpfx.passes.constants import evaluated
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.program import GraphPass, PassResult, Program, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


def channels_of_parts(
    parts: Sequence[torch.Tensor], places: Sequence[Sequence[int]], channels: int, number: float
) -> torch.Tensor:
    """One value for each channel, from those of parts of the channels; the others are a number. Shape (channels,)."""
    whole = parts[0].new_full((channels,), number)
    for part, own in zip(parts, places, strict=True):
        whole = whole.index_copy(0, torch.tensor(own, device=whole.device), part)
    return whole


class MergeParts(GraphPass):
    """Merge what normalizes, scales or shifts parts of a layer's output channels, if each channel is read in one part.

    A layer may be split into halves that are normalized apart, of which one has another normalization or none.
    """

    name = "merge_parts"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(_parts(program, node) for node in calls(program.graph))

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            parts = _parts(program, node)
            if parts:
                _merge(program, node, parts)
                program.fixed_dimensions = True
                merged = [one for part in parts for one in part.chain]
                result.details += [(node_info(one).name, f"merged into {node_info(node).name}") for one in merged]
                result.matches += len(merged)
                for one in merged:
                    one.replace_all_uses_with(_operand(one))
                    program.graph.erase_node(one)
                _put_together(node, [part.view for part in parts])
        return result


@dataclass(frozen=True)
class _Part:
    """Channels of a layer's output, the view that holds them, and the affine operations on them, one after another."""

    view: fx.Node
    channels: list[int]
    chain: list[fx.Node]


def _parts(program: Program, layer: fx.Node) -> list[_Part]:
    """The parts in which the output of a linear layer is read; none if there is nothing to merge, or no place for it."""
    shape = node_info(layer).shape
    if not is_layer_of_parameters(layer) or shape is None:
        return []
    dim = len(shape) + dimension_of_channels(row_of(layer))
    numbers = _numbers(shape, dim)
    parts: list[_Part] = []
    for view in _views(layer, layer, numbers, dim):
        held = _held(view, layer, numbers, dim)
        if held is None or len(held[0]) == shape[dim]:
            return []
        parts.append(_Part(view, held[0], _chain(program, view, held[1])))
    read = [channel for part in parts for channel in part.channels]
    return parts if len(set(read)) == len(read) and any(part.chain for part in parts) else []


def _views(value: fx.Node, layer: fx.Node, numbers: torch.Tensor, dim: int) -> Iterator[fx.Node]:
    """What reads parts of a layer's output, or the whole: the results of calls such as `split`, perhaps behind views."""
    for user in readers(value):
        row = node_info(user).operator
        if returns_parts(user):
            yield from readers(user)
        elif row is not None and row.entries.moves and _held(user, layer, numbers, dim) is None:
            yield from _views(user, layer, numbers, dim)
        else:
            yield user


def _numbers(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """The number of its channel, from 1 on, for each entry of a layer's output."""
    return (
        torch.arange(1.0, shape[dim] + 1).view([size if place == dim else 1 for place, size in enumerate(shape)]).expand(shape)
    )


def _held(view: fx.Node, layer: fx.Node, numbers: torch.Tensor, dim: int) -> tuple[list[int], int | None] | None:
    """The channels that a view of a layer's output holds, and the dimension they are in, the same as in the output.

    None for the dimension if the view holds one channel in a shape without it. None for both if it is no such view.
    """
    found = _moved(view, layer, numbers)
    if found is None or not found.all():
        return None
    if found.ndim != numbers.ndim:
        one = int(found.flatten()[0])
        return ([one - 1], None) if bool((found == one).all()) else None
    rows = found.movedim(dim, 0).flatten(1)
    channels = [int(number) - 1 for number in rows[:, 0]]
    return (channels, dim) if torch.equal(rows, rows[:, :1].expand_as(rows)) else None


def _moved(view: fx.Node, layer: fx.Node, numbers: torch.Tensor) -> torch.Tensor | None:
    """Where the entries of a layer's output are in a view of it; None if it has others, or none, or only a run knows."""
    try:
        found = evaluated(view, {layer: numbers}) if view.op == "call_function" else None
    except (RuntimeError, TypeError, ValueError, IndexError):  # sizes or indices that only a run knows, parts of other values
        return None
    return (
        found
        if isinstance(found, torch.Tensor) and found.dtype == numbers.dtype and found.numel() and not found.is_meta
        else None
    )


def _chain(program: Program, view: fx.Node, dim: int | None) -> list[fx.Node]:
    found: list[fx.Node] = []
    value = view
    while (user := only_reader(value)) is not None and _acts_on_channels(program, user, value, dim):
        found.append(user)
        value = user
    while found and not _is_batch_norm(found[-1]) and only_scales(found[-1]):
        found.pop()
    return found


def _is_batch_norm(node: fx.Node) -> bool:
    row = node_info(node).operator
    return row is not None and issubclass(row.kind, BatchNorm)


def _operand(node: fx.Node) -> Any:
    return node.args[0] if _is_batch_norm(node) else value_and_constant(node)[0]


def _acts_on_channels(program: Program, node: fx.Node, value: fx.Node, dim: int | None) -> bool:
    """Whether a call scales or shifts each channel of a value, whose channels are in a dimension, or that holds one alone."""
    shape, dtype = node_info(value).shape, node_info(value).dtype
    if shape is None or (node_info(node).shape, node_info(node).dtype) != (shape, dtype):
        return False
    if _is_batch_norm(node):
        statistics = [one for one in node.all_input_nodes if one is not value]
        return node.args[0] is value and dim == 1 and not any(map(is_data, statistics))
    operand, constant = value_and_constant(node)
    if operand is not value or not isinstance(constant, fx.Node):
        return operand is value and not isinstance(constant, bool)
    tensor = parameter_value(constant, program.root)
    if not isinstance(tensor, torch.Tensor):
        return isinstance(tensor, (int, float))
    sizes = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    of_channels = [shape[place] if place == dim else 1 for place in range(len(shape))]
    return tensor.dtype == dtype and (tensor.numel() == 1 or list(sizes) == of_channels)


def _put_together(layer: fx.Node, views: Sequence[fx.Node]) -> None:
    """Read the output of a layer where `cat` or `stack` makes it of its parts again, perhaps with views between."""
    shape = node_info(layer).shape or ()
    numbers = torch.arange(float(math.prod(shape))).view(shape)
    value: Any = views[0]
    while (value := only_reader(value)) is not None and node_info(value).operator is not None:
        row = row_of(value)
        if not row.entries.moves or row.outputs.picks:
            return
        moved = _moved(value, layer, numbers)
        if moved is not None and torch.equal(moved, numbers):
            replace_call(value, layer)
            remove_unread(layer.graph)
            return


def _merge(program: Program, layer: fx.Node, parts: Sequence[_Part]) -> None:
    info, bound = node_info(layer), bound_arguments(layer, row_of(layer))
    channels = output_channels(parameter_value(bound["weight"], program.root), row_of(layer), bound.get("groups", 1))
    parts = [part for part in parts if part.chain]
    merger = Merger(program, [], (), node_info(parts[0].chain[0]).source)
    scales, shifts = [], []
    for part in parts:
        name, count = node_info(part.chain[0]).name, len(part.channels)
        scale = merger.derive(layer, f"{name}.scale", constant_channels, bound["weight"], count, 1.0)
        shift = merger.derive(layer, f"{name}.shift", constant_channels, bound["weight"], count, 0.0)
        for node in part.chain:
            if _is_batch_norm(node):
                scale, shift = _after_batch_norm(merger, layer, node, scale, shift)
            else:
                scale, shift = merger.composed(node, scale, shift, count, before=layer)
        scales.append(scale)
        shifts.append(shift)
    places = [part.channels for part in parts]
    scale = merger.derive(layer, f"{info.name}.scale", channels_of_parts, scales, places, channels, 1.0)
    shift = merger.derive(layer, f"{info.name}.shift", channels_of_parts, shifts, places, channels, 0.0)
    merge_into_layer(merger, layer, scale, shift, [node for part in parts for node in part.chain])


def _after_batch_norm(merger: Merger, layer: fx.Node, node: fx.Node, scale: Any, shift: Any) -> tuple[fx.Node, fx.Node]:
    name, row = node_info(node).name, row_of(node)
    given = bound_arguments(node, row)
    eps = given.get("eps", row.arguments["eps"])
    for value in node.all_input_nodes:
        if node_info(value).role is Role.PARAMETER:
            move_up(value, layer)
    factor = merger.derive(layer, f"{name}.factor", batch_norm_scale, given["running_var"], given.get("weight"), eps)
    moved = merger.derive(layer, f"{name}.moved", merged_bias, shift, given["running_mean"], factor, given.get("bias"))
    return merger.derive(layer, f"{name}.scaled", torch.mul, scale, factor), moved
