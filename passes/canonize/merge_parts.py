"""CANONIZE: merge batch norms, factors and terms of parts of a layer's channels into the layer, as arithmetic on parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.ir.kinds import BatchNorm
from lrpfx.ir.node import Role, calls, is_call_of, is_data, node_info, only_reader, parameter_value, readers, row_of
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
    users = readers(layer)
    views = [view for user in users for view in (readers(user) if returns_parts(user) else [user])]
    if not all(view.op == "call_function" for view in views):
        return []
    dim = len(shape) + dimension_of_channels(row_of(layer))
    parts: list[_Part] = []
    for view in views:
        channels = _channels(view, layer, shape, dim)
        if channels is None or len(channels) == shape[dim]:
            return []
        parts.append(_Part(view, channels, _chain(program, view, dim)))
    read = [channel for part in parts for channel in part.channels]
    return parts if len(set(read)) == len(read) and any(part.chain for part in parts) else []


def _channels(view: fx.Node, layer: fx.Node, shape: tuple[int, ...], dim: int) -> list[int] | None:
    """The numbers of the channels that a view of a layer's output holds in the same dimension; None if it is none."""
    sizes = [size if place == dim else 1 for place, size in enumerate(shape)]
    try:
        found = evaluated(view, {layer: torch.arange(1.0, shape[dim] + 1).view(sizes).expand(shape)})
    except (RuntimeError, TypeError, ValueError, IndexError):  # sizes or indices that only a run knows
        return None
    if not isinstance(found, torch.Tensor) or found.is_meta or found.ndim != len(shape) or 0 in found.shape:
        return None
    rows = found.movedim(dim, 0).flatten(1)
    numbers = rows[:, 0]
    if not torch.equal(rows, numbers[:, None].expand_as(rows)) or not numbers.all():
        return None
    return [int(number) - 1 for number in numbers]


def _chain(program: Program, view: fx.Node, dim: int) -> list[fx.Node]:
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


def _acts_on_channels(program: Program, node: fx.Node, value: fx.Node, dim: int) -> bool:
    """Whether a call scales or shifts each channel of a value, whose channels are in a dimension."""
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
    of_channels = [shape[dim] if place == dim else 1 for place in range(len(shape))]
    return tensor.dtype == dtype and (tensor.numel() == 1 or list(sizes) == of_channels)


def _put_together(layer: fx.Node, views: Sequence[fx.Node]) -> None:
    """Read the output of a layer where `cat` makes it of its parts again."""
    shape, dim = node_info(layer).shape or (), dimension_of_channels(row_of(layer))
    whole = only_reader(views[0])
    if whole is None or not is_call_of(whole, "cat") or node_info(whole).shape != shape:
        return
    parts: Any = whole.args[0]
    along: Any = next(iter((*whole.args[1:], *whole.kwargs.values())), 0)
    if not isinstance(parts, (tuple, list)) or set(parts) != set(views) or (along - dim) % len(shape):
        return
    numbers = torch.arange(float(shape[dim])).view(-1, *[1] * (-1 - dim)).expand(shape)
    if torch.equal(torch.cat([evaluated(part, {layer: numbers}) for part in parts], dim), numbers):
        replace_call(whole, layer)
        remove_unread(layer.graph)


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
