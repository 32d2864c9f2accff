"""The dimensions over which operators mix entries, for the column `mixes` of the table.

Each function takes the arguments of a call by name, positional arguments without a name by their place, and the rank of the
first argument.
"""

from collections.abc import Sequence
from typing import Any

from lrpfx.ir.operator import Mixes, Operator

Arguments = dict[Any, Any]


def no_dimension(bound: Arguments, rank: int) -> Sequence[int]:
    return ()


def keeps_places(row: Operator) -> bool:
    """Whether an entry of the result depends only on entries at its place."""
    return row.entries.elementwise or row.entries.mixes is no_dimension


def _always(dimension: int) -> Mixes:
    return lambda bound, rank: (dimension,)


first_dimension, channels, last_dimension, second_last_dimension = map(_always, (0, 1, -1, -2))


def sample(bound: Arguments, rank: int) -> Sequence[int]:
    return range(1, rank)


def positions(bound: Arguments, rank: int) -> Sequence[int]:
    """All dimensions after the channels, where the statistics are those of the sample."""
    return range(2, rank) if bound.get("use_input_stats", True) else ()


def batch(bound: Arguments, rank: int) -> Sequence[int]:
    """All dimensions but the channels, where the statistics are those of the batch."""
    return [dim for dim in range(rank) if dim != 1] if bound.get("training") or bound.get("running_mean") is None else ()


def normalized(bound: Arguments, rank: int) -> Sequence[int]:
    return range(-len(bound["normalized_shape"]), 0)


def given(place: int = 1, default: int | None = None) -> Mixes:
    """The dimensions in the argument `dim`, or at a place; by default all, or one."""

    def dimensions(bound: Arguments, rank: int) -> Sequence[int]:
        dims = bound.get("dim", bound.get("axis", bound.get(place, default)))
        if isinstance(dims, bool) or dims is None or (isinstance(dims, (tuple, list)) and not dims):
            return range(rank)  # a boolean is another argument: std(input, unbiased)
        if isinstance(dims, int):
            return (dims,)
        return dims if isinstance(dims, (tuple, list)) else ()  # max(input, other) compares entries

    return dimensions
