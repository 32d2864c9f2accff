"""The dimensions that hold the channels of a value, followed through views."""

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from lrpfx.ir.node import node_info, row_of, sources_of_dimensions
from lrpfx.ir.operator import Operator, WeightLayout
from lrpfx.passes.program import Program

Place = tuple[int, ...]  # the dimensions of the channels of a value, from the end


def place_of_channels(operator: Operator) -> Place:
    """The dimension of the output channels of a linear layer."""
    return (-1,) if operator.linear.weight_layout is WeightLayout.DENSE else (-1 - operator.dimensions.spatial,)


def moved_channels(program: Program, value: fx.Node, view: fx.Node, place: Place) -> Place | None:
    """The dimensions of the channels after a view, from the end; None if they are mixed with others, or that is unknown."""
    before, after = node_info(value).shape, node_info(view).shape
    if before is None or after is None or view.args[0] is not value or node_info(value).dtype != node_info(view).dtype:
        return None
    row, rank, own = row_of(view), len(after), [len(before) + number for number in place]
    moved: list[int] | None = None
    if not own:  # a single channel, whose dimension is gone
        moved = []
    elif row.entries.keeps_order or _drops_ones(view, row, before, after):
        moved = _side_by_side(before, after, own) if own == list(range(own[0], own[-1] + 1)) else None
    elif row.dimensions.dimension_before is not None and rank == len(before):
        sources = sources_of_dimensions(view, rank) or []
        places = [number for number, source in enumerate(sources) if source in own]
        moved = places if [sources[number] for number in places] == own and own else None
    if moved is None:
        return None
    program.fixed_dimensions = True
    return tuple(number - rank for number in moved)


def _side_by_side(before: Sequence[int], after: Sequence[int], own: Sequence[int]) -> list[int] | None:
    """The dimensions that hold the entries of neighbouring ones after a view that keeps their order."""
    first = [start for start in range(len(after) + 1) if math.prod(after[:start]) == math.prod(before[: own[0]])]
    found = [range(start, stop) for start in first for stop in range(start + 1, len(after) + 1)]
    found += [range(start, start) for start in first]  # of a single channel, no dimension may be left
    channels = math.prod(before[number] for number in own)
    return next((list(one) for one in found if math.prod(after[number] for number in one) == channels), None)


def _drops_ones(view: fx.Node, row: Operator, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether an index only takes the one entry of dimensions of size 1, or adds such dimensions."""
    index = view.args[1:]
    plain = row.name == "select" or (
        row.outputs.picks and all(map(_is_plain, index[0] if isinstance(index[0], tuple) else index))
    )
    return plain and math.prod(before) == math.prod(after)


def _is_plain(part: Any) -> bool:
    """Whether a part of an index is a number, a slice or a new dimension."""
    return part is None or part is Ellipsis or isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool))
