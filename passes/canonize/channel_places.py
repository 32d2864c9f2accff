"""The dimensions that hold the channels of a value, followed through views, selections of places and averages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import (
    Role,
    ancestors_of,
    function_name,
    may_be_loaded,
    node_info,
    parameter_value,
    row_of,
    sources_of_dimensions,
)
from lrpfx.ir.operator import Channels, Fill, NotAffineError, Operator, WeightLayout
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.constants import evaluated
from lrpfx.passes.program import Program

Order = tuple[int, ...] | None  # for each channel of a layer, the number of the entry that holds it; None: its own number


@dataclass(frozen=True)
class Place:
    """Where a value holds the output channels of a layer. One entry of these dimensions may hold several of them."""

    dims: tuple[int, ...]  # from the end
    order: Order = None

    def size(self, channels: int) -> int:
        """The number of entries that hold the channels."""
        return channels if self.order is None else max(self.order) + 1


def dimension_of_channels(operator: Operator) -> int:
    """The dimension of the output channels of a linear layer, from the end."""
    return -1 if operator.linear.weight_layout is WeightLayout.DENSE else -1 - operator.dimensions.spatial


def place_of_channels(operator: Operator) -> Place:
    """Where the result of a linear layer holds its output channels."""
    return Place((dimension_of_channels(operator),))


def in_order(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """One value for each channel of a layer, from one for each entry that holds some of them. Shape (channels,)."""
    return value.reshape(-1)[list(order)]


def keeps_channels(operator: Operator) -> bool:
    """Whether each channel may remain a channel behind an operation: a view, a selection of places, or an average of places."""
    return operator.entries.moves or operator.merging.channels is not None


def keeps_entries(node: fx.Node) -> bool:
    """Whether a call returns the entries of its first argument as they are, perhaps on another device or copied.

    So does a conversion to the dtype that the argument has with the example inputs. Without them, only one that names no dtype,
    or the argument's own, is known to change nothing.
    """
    row = node_info(node).operator if node.op == "call_function" else None
    source = node.args[0] if node.args else None
    if row is None or not row.entries.elementwise or not isinstance(source, fx.Node):
        return False
    if not row.entries.converts:
        return row.entries.keeps_order
    before, after = node_info(source).dtype, node_info(node).dtype
    if before is not None and after is not None:
        return before == after
    given = [*node.args[1:], *node.kwargs.values()]
    return function_name(node) in ("to", "cpu", "cuda") and all(_keeps_dtype(source, one) for one in given)


def _keeps_dtype(source: fx.Node, argument: Any) -> bool:
    """Whether an argument of a conversion names no dtype but that of `source`."""
    if not isinstance(argument, fx.Node):
        return not isinstance(argument, torch.dtype)
    if argument.target is not getattr:
        return False
    of, name = argument.args
    return name == "device" or (name == "dtype" and isinstance(of, fx.Node) and uncopied(of) is uncopied(source))


def uncopied(value: Any) -> Any:
    """The value whose entries a chain of copies and conversions returns as they are."""
    while isinstance(value, fx.Node) and keeps_entries(value):
        value = value.args[0]
    return value


def moved_channels(program: Program, value: fx.Node, view: fx.Node, place: Place) -> Place | None:
    """Where the channels are after a view, a selection of places, or an average of places.

    A view may also be one of several parts of the value, as `split` returns them. None if the channels are mixed with others,
    or that is unknown.
    """
    source = view.args[0]
    if isinstance(source, fx.Node) and source is not value and returns_parts(source):
        source = source.args[0]
    if source is not value:
        return None
    if keeps_entries(view):
        return place
    before, after = node_info(value).shape, node_info(view).shape
    if before is None or after is None or node_info(value).dtype != node_info(view).dtype:
        return None
    row, rank, own = row_of(view), len(after), [len(before) + number for number in place.dims]
    moved: list[int] | None = None
    order = place.order
    if not own:  # a single channel, whose dimension is gone
        moved = []
    elif not row.entries.moves:
        if own != [1] or row.merging.channels is None:
            return None
        try:
            channels = row.merging.channels(Channels(len(before)), bound_arguments(view, row))
        except NotAffineError:
            return None
        moved = None if channels.flat or channels.dimensions != rank else [1]
    elif row.entries.keeps_order:
        moved = _side_by_side(before, after, own) if own == list(range(own[0], own[-1] + 1)) else None
    elif row.dimensions.dimension_before is not None and rank == len(before):
        sources = sources_of_dimensions(view, rank) or []
        places = [number for number, source in enumerate(sources) if source in own]
        moved = places if [sources[number] for number in places] == own and own else None
    if moved is None and row.entries.moves:
        followed = _followed(program, value, view, own)
        if followed is None:
            return None
        moved, entries = followed
        order = entries if order is None or entries is None else tuple(entries[entry] for entry in order)
        order = place.order if entries is None else order
    if moved is None:
        return None
    program.fixed_dimensions = True
    return Place(tuple(number - rank for number in moved), order)


def returns_parts(node: fx.Node) -> bool:
    """Whether a call returns several parts of a value, such as `split`."""
    row = node_info(node).operator
    return row is not None and row.outputs.parts


def _followed(program: Program, value: fx.Node, view: fx.Node, own: Sequence[int]) -> tuple[list[int], Order] | None:
    """The dimensions of the channels after any call that moves entries, such as a slice, by moving the number of each channel.

    With them, where each channel is if their order changes, or if one entry holds several, as after a pixel shuffle. Zeros
    among the entries are no channel, so a call that fills with them does not keep the channels.
    """
    shape = node_info(value).shape or ()
    sizes = [size if dim in own else 1 for dim, size in enumerate(shape)]
    channels = math.prod(sizes)
    if not channels or (row_of(view).entries.fills is Fill.NUMBER and "mode" not in view.kwargs):
        return None
    numbers = torch.arange(1, channels + 1, dtype=torch.float32)
    indices = [one for one in view.all_input_nodes if node_info(one).role is Role.PARAMETER]
    known = {one: parameter_value(one, program.root) for one in indices} | {value: numbers.view(sizes).expand(shape)}
    try:
        found = evaluated(view, known)
    except (RuntimeError, TypeError, ValueError, IndexError):  # sizes or indices that only a run knows
        return None
    if not isinstance(found, torch.Tensor) or found.is_meta or 0 in found.shape:
        return None
    for dim in range(found.ndim):
        first = found.narrow(dim, 0, 1)
        found = first if torch.equal(found, first.expand_as(found)) else found
    if channels == 1:  # any dimension of size 1 is that of the channel
        is_one = torch.equal(found.flatten(), numbers)
        return ([1] if (node_info(view).shape or ())[1:2] == (1,) else [], None) if is_one else None
    dims = [dim for dim, size in enumerate(found.shape) if size > 1]
    if found.numel() != channels:  # another dimension holds parts of the channels
        dims = [1] if row_of(view).dimensions.channels_second else []
    held = [set[int]() for _ in range(channels + 1)]
    for entry, some in enumerate(found.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1) if dims else ()):
        for number in some.unique().tolist():
            held[int(number)].add(entry)
    if held[0] or any(len(entries) != 1 for entries in held[1:]):
        return None
    read = [one for index in indices for one in (index, *ancestors_of(index))]
    if any(may_be_loaded(one, program.root) for one in read):
        return None
    program.rely_on(read)
    order = tuple(entry for entries in held[1:] for entry in entries)
    return dims, None if order == tuple(range(channels)) else order


def _side_by_side(before: Sequence[int], after: Sequence[int], own: Sequence[int]) -> list[int] | None:
    """The dimensions that hold the entries of neighbouring ones after a view that keeps their order."""
    first = [start for start in range(len(after) + 1) if math.prod(after[:start]) == math.prod(before[: own[0]])]
    found = [range(start, stop) for start in first for stop in range(start + 1, len(after) + 1)]
    found += [range(start, start) for start in first]  # of a single channel, no dimension may be left
    channels = math.prod(before[number] for number in own)
    return next((list(one) for one in found if math.prod(after[number] for number in one) == channels), None)
