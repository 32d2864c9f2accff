"""The dimension of a value that has its channels, as far as the graph shows it."""

import operator
from collections.abc import Iterable

import torch
from torch import fx

from lrpfx.errors import InputError
from lrpfx.ir.kinds import Activation, BatchNorm, Convolution, Embedding, Linear, Recurrent
from lrpfx.ir.node import Role, node_info, sources_of_dimensions
from lrpfx.ir.operator import Operator
from lrpfx.operators.mixing import keeps_places
from lrpfx.request.outputs import OutputSelector, explained_nodes
from lrpfx.request.targets import Class, Largest, Target

Known = dict[tuple[fx.Node, int], int | None]


def channel_dimension(node: fx.Node, rank: int) -> int | None:
    """The dimension of the channels of a node's value, which has `rank` dimensions; None if the graph does not show it.

    Convolutions and poolings have them in dimension 1, dense and recurrent layers and embeddings in the last. From there they
    are followed through permutations and through what leaves dimensions where they are: first from the layers that the value
    comes from, then from those that read it.
    """
    made = _made(node, rank, {})
    return made if made is not None else _read(node, rank, {})


def check_positions(graph: fx.Graph, selector: OutputSelector, output: torch.Tensor, targets: Iterable[Target]) -> None:
    """Raise `InputError` if targets are of positions, but the graph shows that an output has its classes elsewhere.

    `selector`: which of the outputs is explained. `output`: its value.
    """
    of_region = (Class, Largest) if output.ndim > 3 else ()  # without a mask: the places where the class is the largest
    if output.ndim < 3 or callable(selector) or not any(one.is_of_positions or isinstance(one, of_region) for one in targets):
        return
    leaves, own = explained_nodes(graph, selector), 2 if output.ndim == 3 else 1
    found = channel_dimension(leaves[0], output.ndim) if len(leaves) == 1 else None
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
    parts = node_info(sources[0]).operator
    if node.target is operator.getitem and parts is not None and parts.returns_several:
        return _made(sources[0], rank, known)
    if row.dimensions.dimension_before is not None:
        before = _made(sources[0], rank - row.dimensions.added, known)
        places = sources_of_dimensions(node, rank) or []
        return None if before is None or before not in places else places.index(before)
    if not _keeps(row):
        return _behind_channels(node, sources[0], row, rank, known) if len(sources) == 1 else None
    found = {_made(source, rank, known) for source in sources if _rank_of(source, rank) == rank} - {None}
    return found.pop() if len(found) == 1 else None


def _behind_channels(node: fx.Node, source: fx.Node, row: Operator, rank: int, known: Known) -> int | None:
    """The dimension of the channels of what is read, if the operator changes only dimensions behind it; None if it does not.

    These are reshapes and indices.
    """
    before, after = node_info(source).shape, node_info(node).shape
    channels = None if before is None else _made(source, len(before), known)
    if before is None or after is None or channels is None or channels >= rank:
        return None
    stays = False
    if row.entries.keeps_order:
        stays = tuple(before[: channels + 1]) == tuple(after[: channels + 1])
    elif row.entries.indexes:
        index = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], tuple) else ()
        stays = index[: channels + 1] == (slice(None),) * (channels + 1)
    return channels if stays else None


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
    if not _keeps(row) or _rank_of(user, rank) != rank:
        return None
    made = _made(user, rank, {})
    return made if made is not None else _read(user, rank, known)


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
