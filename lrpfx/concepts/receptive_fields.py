"""Receptive fields: the part of the input that an entry of a hidden value depends on, computed from the graph."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lrpfx.attribution.arguments import Arguments, Inputs, misfits
from lrpfx.concepts.reach import Call, Tracked, with_own_positions, without_reach
from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import Role, ancestors_of, attribute_of, map_arguments, node_info
from lrpfx.request.conditions import Index
from lrpfx.request.names import recorded_names, resolve_names
from lrpfx.runtime.explain_module import ExplainModule, explainable, rule_module_of
from lrpfx.support.torch_internals import pytree

#: Entries of a value, batch excluded: one coordinate for each dimension, the only one of a value (batch, features) as a number,
#: or what `Channel`, `Feature`, `Head`, `Token` or `Neuron` select.
Position = int | slice | Sequence[int | slice] | Index


class ReceptiveFields:
    """The receptive fields of all entries of a layer's value, for inputs of one shape.

    `fields[channel, y, x]` is the field of one entry: a slice for each dimension of the input after the batch, so that
    `image[fields[channel, y, x]]` is what that entry sees of an image (channels, height, width). A slice as a coordinate takes
    the union, as in `fields[:, y, x]`. For values (batch, channels, height, width), and with one more dimension, the channel
    may be left out for the union over channels: `fields[y, x]`. `fields[Token(3)]` and `fields[Channel(5)]` are unions, too.

    The field is the smallest box around all entries of the input that matter, whatever weights and inputs are. It is larger
    than that only after operators of which the table knows no more than which values they read. For several inputs, fields have
    the structure of the inputs, with None for what is not a tensor. Slices are empty where the entry does not depend on an
    input. Fields are those of all samples of the batch, united.

    `layer`: the name of the layer. `value`: its value, with the entries of the inputs that each entry depends on. `inputs`: the
    inputs.
    """

    def __init__(self, layer: str, value: Tracked, inputs: Any) -> None:
        """`inputs`: the structure of the inputs, with their shapes at the places of tensors."""
        self.layer = layer
        self.shape = tuple(value.value.shape[1:])
        self._reach = value.reach
        self._inputs = inputs

    def __getitem__(self, position: Position) -> Any:
        """The field of a position.

        `position`: as the class says. Errors: `InputError`: the position is out of range, or has another number of coordinates.
        """
        whole = (len(self._reach[0]), *self.shape)
        if isinstance(position, Index):
            mask = position.mask(torch.Size(whole), self.layer).broadcast_to(whole).bool()
            entries = [reach.cpu()[mask] for reach in self._reach]
        else:
            place = (slice(None), *self._checked(position))
            entries = [reach[place] for reach in self._reach]
        numbers = iter([int(one.max()) if one.numel() else 0 for one in entries])
        return map_arguments(self._inputs, lambda shape: _slices(shape, numbers))

    def __repr__(self) -> str:
        return f"<receptive fields of {self.layer}, of shape {self.shape}>"

    def _checked(self, position: Any) -> tuple[int | slice, ...]:
        given = tuple(position) if isinstance(position, (tuple, list)) else (position,)
        for one in given:
            if isinstance(one, bool) or not isinstance(one, (int, np.integer, slice)):
                raise InputTypeError(f"a position consists of whole numbers and slices, not {one!r}", topic="collections")
        if len(given) == len(self.shape) - 1 and len(self.shape) in (3, 4):
            given = (slice(None), *given)
        if len(given) != len(self.shape):
            channel = "; the first, that of the channel, may be left out" if len(self.shape) in (3, 4) else ""
            raise InputError(
                f"{position!r} has {len(given)} coordinates, but the value of {self.layer} has the shape {self.shape} after "
                f"the batch{channel}. A slice takes all: fields[3, :]",
                topic="collections",
            )
        for one, size in zip(given, self.shape, strict=True):
            if not isinstance(one, slice) and not -size <= one < size:
                raise InputError(
                    f"{position!r} is out of range: the value of {self.layer} has the shape {self.shape} after the batch",
                    topic="collections",
                )
        return given


def receptive_fields(explain_model: nn.Module, inputs: Inputs, layer: str, *, gates: bool = True) -> ReceptiveFields:
    """The receptive fields of all entries of a layer's value. The model runs once, up to the layer.

    `explain_model`: as for `lrpfx.attribute`. `inputs`: as for `lrpfx.attribute`; only their shapes matter, so one sample does.
    `layer`: the name of a node or module, as for `record=`. `gates`: whether what only scales a signal counts, such as the
    channel gates of squeeze-and-excitation, which see the whole image; relevance does not flow through it. Errors:
    `InputError`: the name is unknown, or the layer depends on no dimension of the input after the batch.
    """
    module = explainable(explain_model, "receptive_fields")
    names = recorded_names(module.unfused_graph, layer)
    if len(names) != 1:
        raise InputError(f"receptive fields are those of one layer, not of {', '.join(names) or 'none'}", topic="collections")
    (node,) = resolve_names(module.unfused_graph, names)
    name = node_info(node).name
    arguments = Arguments(inputs, module)
    arguments.admit(module)
    with torch.no_grad(), misfits(module, arguments):
        value = _value_of(module, node, with_own_positions(arguments.passed), gates)
    shapes = map_arguments(arguments.values, lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else None)
    structure = shapes if isinstance(inputs, Mapping) else tuple(shapes.values())
    if isinstance(inputs, torch.Tensor):
        (structure,) = structure
    if isinstance(value, Tracked) and value.value.ndim:
        fields = ReceptiveFields(name, value, structure)
        if any(one.stop for one in pytree.tree_leaves(fields[(slice(None),) * len(fields.shape)]) if one is not None):
            return fields
    raise InputError(f"{name} does not depend on positions of the input: dimensions after the batch", topic="collections")


def receptive_field(explain_model: nn.Module, inputs: Inputs, layer: str, position: Position, *, gates: bool = True) -> Any:
    """The part of the input that a position of a layer depends on, as slices of its dimensions after the batch.

    For several positions, `receptive_fields` is faster.

    `position`: the index that `ReceptiveFields` takes; the result is what it returns.
    Other arguments: as for `receptive_fields`.
    """
    return receptive_fields(explain_model, inputs, layer, gates=gates)[position]


def _slices(leaf: torch.Tensor | None, numbers: Iterator[int]) -> tuple[slice, ...] | None:
    """The field in an input of this shape, from the reach in each of its dimensions."""
    if leaf is None:
        return None
    found: list[slice] = []
    if leaf.ndim < 2:
        next(numbers)  # whether it matters
    for size in leaf.shape[1:]:
        end, counted_from_end = next(numbers), next(numbers)
        found.append(slice(size - counted_from_end, end) if end else slice(0, 0))
    return tuple(found)


def _value_of(module: ExplainModule, wanted: fx.Node, inputs: Mapping[Any, Any], gates: bool) -> Any:
    """The value of a node, and its reach if it depends on the inputs."""
    values: dict[fx.Node, Any] = {}
    graph = module.unfused_graph
    needed = ancestors_of(wanted)
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        default = node.args[0] if node.args else None
        values[node] = inputs.get(number, inputs.get(str(node.target), default))
    unread = {node: sum(user in needed for user in node.users) for node in needed}
    for node in graph.nodes:
        if node not in needed or node in values:
            continue
        args, options = map_arguments(
            (node.args, node.kwargs), lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf
        )
        if node_info(node).role is Role.METADATA:
            args, options = without_reach((args, options))
        if node.op == "get_attr":
            values[node] = attribute_of(node, module)
        else:
            call = _call_of(node, module, args, options)
            values[node] = (call if gates else call.without_gate()).run()
        for read in set(node.all_input_nodes):
            unread[read] -= 1
            if not unread[read]:
                del values[read]
    return values[wanted]


def _call_of(node: fx.Node, module: ExplainModule, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
    """The call of an operator that a node makes, without a rule."""
    layer = rule_module_of(node, module)
    if layer is not None:
        operation = layer.ruled.operation
        args, options = operation.filled(layer.ruled.arranged(args))
        return Call(operation.function, operation.row, args, options)
    if node.op == "call_module":
        return Call(module.get_submodule(str(node.target)), node_info(node).operator, args, options)
    if node.op == "call_method":
        return Call(getattr(torch.Tensor, str(node.target)), node_info(node).operator, args, options)
    assert callable(node.target)
    return Call(node.target, node_info(node).operator, args, options)
