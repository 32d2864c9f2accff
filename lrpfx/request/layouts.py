"""The dimension of a value that has its channels, as far as the graph shows it."""

import operator
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx

from lrpfx.errors import InputError
from lrpfx.ir.kinds import Activation, BatchNorm, Convolution, Embedding, Linear, Recurrent
from lrpfx.ir.node import Role, node_info, sources_of_dimensions
from lrpfx.ir.operator import Operator
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.mixing import keeps_places
from lrpfx.request.outputs import OutputSelector, explained_nodes
from lrpfx.request.targets import Class, Contrast, Largest, Target
from lrpfx.runtime.multipliers import carry_multiplier, carry_relevance

Known = dict[tuple[fx.Node, int], int | None]
#: In place of a dimension: the value has none of channels any more, since an index, a mean or the like has removed it.
_REMOVED = -1


def channel_dimension(node: fx.Node, rank: int) -> int | None:
    """The dimension of the channels of a node's value, which has `rank` dimensions; None if the graph does not show it.

    Convolutions and poolings have them in dimension 1, dense and recurrent layers and embeddings in the last. From there they
    are followed through permutations and through what leaves dimensions where they are: first from the layers that the value
    comes from, then from those that read it.
    """
    made = _made(node, rank, {})
    return made if made not in (None, _REMOVED) else _read(node, rank, {})


def check_positions(graph: fx.Graph, selector: OutputSelector, output: torch.Tensor, targets: Iterable[Target]) -> None:
    """Raise `InputError` if targets are of positions, but the graph shows that an output has its classes elsewhere.

    `selector`: which of the outputs is explained. `output`: its value.
    """
    of_region = (Class, Contrast, Largest) if output.ndim > 3 else ()  # without a mask, a class means its predicted region
    if output.ndim < 3 or callable(selector) or not any(one.is_of_positions or isinstance(one, of_region) for one in targets):
        return
    leaves, own = explained_nodes(graph, selector), 2 if output.ndim == 3 else 1
    found = _made(leaves[0], output.ndim, {}) if len(leaves) == 1 else None
    if found == _REMOVED and output.ndim == 3:
        raise InputError(
            f"the output, of shape {tuple(output.shape)}, has no dimension of channels, as what computes it shows: if it is "
            "(batch, height, width) with one class at each place, pass output=lambda output: output[:, None], and a region; if "
            "it is (batch, positions, classes), output=lambda output: output",
            topic="targets",
        )
    if found in (None, _REMOVED) and len(leaves) == 1:
        found = _read(leaves[0], output.ndim, {})
    if found not in (None, own) and (output.ndim > 3 or found == 1):
        wanted = "(batch, positions, classes)" if own == 2 else "(batch, classes, height, width)"
        raise InputError(
            f"positions and regions are targets for outputs {wanted}, but this one, of shape {tuple(output.shape)}, has its "
            f"channels in dimension {found}, as what computes it shows: if they are the classes, pass output=lambda output: "
            f"output.movedim({found}, {own}); if they are positions, output=lambda output: output",
            topic="targets",
        )


def _made(node: fx.Node, rank: int, known: Known) -> int | None:
    """The dimension of the channels by what computes the value."""
    if (node, rank) not in known:
        known[node, rank] = None  # until it is found, for graphs are without cycles
        known[node, rank] = _found_above(node, rank, known)
    return known[node, rank]


def _found_above(node: fx.Node, rank: int, known: Known) -> int | None:
    info = node_info(node)
    row, sources = info.operator, [one for one in node.all_input_nodes if node_info(one).role is Role.DATA]
    if row is None:
        return None
    own = _of_layer(row, rank)
    if own is not None or not sources:
        return own
    if _is_part(node, sources[0]):
        return _made(sources[0], rank, known)
    if row.dimensions.dimension_before is not None:
        places = sources_of_dimensions(node, rank)
        if places is None:
            return _behind_channels(node, sources[0], row, rank, known)
        before = _made(sources[0], rank - row.dimensions.added, known)
        return None if before is None else _place_of(before, places)
    if not _keeps(row):
        return _behind_channels(node, sources[0], row, rank, known) if len(sources) == 1 else None
    found = {_made(source, rank, known) for source in sources if _rank_of(source, rank) == rank} - {None}
    return found.pop() if len(found) == 1 else None


def _place_of(channels: int, places: Sequence[int | None]) -> int | None:
    """Where the channels are, in dimensions that come from `places`; a new dimension may hold anything."""
    if channels in places:
        return places.index(channels)
    return _REMOVED if None not in places else None


def _behind_channels(node: fx.Node, source: fx.Node, row: Operator, rank: int, known: Known) -> int | None:
    """The dimension of the channels where an operator changes the number of dimensions, or their sizes.

    These are reshapes, which leave what is before them in its place, indices, and what sums or chooses over dimensions.
    """
    if node.target in (carry_multiplier, carry_relevance):
        return _made(source, rank, known)
    indexed = _places_of_index(node, row, rank)
    if indexed is not None:
        places, rank_before = indexed
        channels = _made(source, rank_before, known)
        return None if channels is None else _place_of(channels, places)
    before, after = node_info(source).shape, node_info(node).shape
    origins = None if before is None or node.op == "call_module" else _places_of_mixing(node, row, len(before), rank)
    if before is not None and origins is not None:
        channels = _made(source, len(before), known)
        return None if channels is None else _place_of(channels, origins)
    channels = None if before is None else _made(source, len(before), known)
    if before is None or after is None or channels is None:
        return None
    if row.entries.keeps_order and channels != _REMOVED and tuple(before[: channels + 1]) == tuple(after[: channels + 1]):
        return channels
    if row.entries.keeps_order and tuple(one for one in before if one != 1) != tuple(after):  # no squeeze()
        return None
    if not row.entries.keeps_order and (row.entries.mixes is None or rank >= len(before)):
        return None
    found = {
        _place_of(channels, places)
        for places in combinations(range(len(before)), rank)
        if tuple(before[place] for place in places) == tuple(after)
    }
    return found.pop() if len(found) == 1 else None


def _places_of_index(node: fx.Node, row: Operator, rank: int) -> tuple[list[int | None], int] | None:
    """For each of the `rank` dimensions of what is indexed, the same one of what it is taken from, and how many that has.

    None if the node does not take it by numbers and slices.
    """
    if row.name == "select":
        dim = bound_arguments(node, row).get("dim", node.args[1] if len(node.args) > 1 else None)
        return ([place for place in range(rank + 1) if place != dim % (rank + 1)], rank + 1) if isinstance(dim, int) else None
    if not row.entries.indexes or len(node.args) != 2:
        return None
    given = node.args[1]
    index: list[Any] = list(given) if isinstance(given, tuple) else [given]
    if not all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in index):
        return None
    rank_before = rank + sum(isinstance(one, int) for one in index) - index.count(None)
    where = index.index(Ellipsis) if Ellipsis in index else len(index)
    taken = sum(one is not None and one is not Ellipsis for one in index)
    index[where : where + 1] = [slice(None)] * (rank_before - taken)
    found: list[int | None] = []
    place = 0
    for one in index:
        if not isinstance(one, int):
            found.append(None if one is None else place)
        place += one is not None
    return found, rank_before


def _places_of_mixing(node: fx.Node, row: Operator, rank_before: int, rank: int) -> list[int | None] | None:
    """For each of the `rank` dimensions of what sums, chooses or sorts over some, the same one of its input.

    Dimensions over which it does so come from None, if they stay. None for what does something else.
    """
    if row.entries.mixes is None or row.entries.keeps_order:
        return None
    bound: dict[Any, Any] = dict(enumerate(node.args))  # arguments without names have their places
    bound |= bound_arguments(node, row)
    mixed = {dimension % rank_before for dimension in row.entries.mixes(bound, rank_before)}
    if rank == rank_before - len(mixed):
        return [place for place in range(rank_before) if place not in mixed]
    return [None if place in mixed else place for place in range(rank)] if rank == rank_before else None


def _is_part(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is one of several results of an operator, such as the values of a maximum, which has places, too."""
    row = node_info(source).operator
    return node.target in (operator.getitem, getattr) and row is not None and row.returns_several


def _read(node: fx.Node, rank: int, known: Known) -> int | None:
    """The dimension of the channels by what reads the value."""
    if (node, rank) not in known:
        known[node, rank] = None
        found = {_found_below(node, user, rank, known) for user in node.users} - {None}
        known[node, rank] = found.pop() if len(found) == 1 else None
    return known[node, rank]


def _found_below(node: fx.Node, user: fx.Node, rank: int, known: Known) -> int | None:
    row = node_info(user).operator
    if row is None or node_info(node).role is not Role.DATA:
        return None
    own = _of_layer(row, rank)
    if own is not None:
        return own if user.args and user.args[0] is node else None
    if row.dimensions.dimension_before is not None:
        after = rank + row.dimensions.added
        below, places = _read(user, after, known), sources_of_dimensions(user, after)
        return None if below is None or places is None else places[below]
    if not _keeps(row) and row.entries.mixes is not None and user.all_input_nodes == [node]:
        parts = [part for part in user.users if _is_part(part, user) and node_info(part).role is Role.DATA]
        values = parts[0] if len(parts) == 1 else user
        whole, left = node_info(node).shape, node_info(values).shape
        if whole is None or left is None:
            return None
        below = _read(values, len(left), known)
        if user.op != "call_module":
            origins = _places_of_mixing(user, row, rank, len(left))
            return None if below is None or origins is None else origins[below]
        fitting = [one for one in combinations(range(rank), len(left)) if [whole[place] for place in one] == [*left]]
        return fitting[0][below] if below is not None and len(fitting) == 1 else None  # its arguments are those of its rule
    if not _keeps(row) or _rank_of(user, rank) != rank:
        return None
    made = _made(user, rank, {})
    return made if made not in (None, _REMOVED) else _read(user, rank, known)


def _of_layer(row: Operator, rank: int) -> int | None:
    """The dimension of the channels of a layer's data and result; None for what is not a layer with channels."""
    if row.dimensions.spatial:
        return 1 if rank == row.rank_of_batch else None
    if issubclass(row.kind, (BatchNorm, Convolution)) or row.dimensions.channels_second:
        return 1 if rank > 1 else None
    return rank - 1 if issubclass(row.kind, (Linear, Embedding, Recurrent)) and not row.entries.elementwise else None


def _keeps(row: Operator) -> bool:
    """Whether every dimension stays where it is."""
    return keeps_places(row) or row.dimensions.keeps_dimensions or issubclass(row.kind, Activation)


def _rank_of(node: fx.Node, rank: int) -> int:
    """The number of dimensions of a node's value, by default that of what it is computed with."""
    shape = node_info(node).shape
    return rank if shape is None else len(shape)
