"""The dimension of a value that has its channels, as far as the graph shows it."""

import operator

from torch import fx

from lrpfx.ir.kinds import Activation, BatchNorm, Convolution, Embedding, Linear, Recurrent
from lrpfx.ir.node import Role, node_info, sources_of_dimensions
from lrpfx.ir.operator import Operator
from lrpfx.operators.mixing import keeps_places

Known = dict[tuple[fx.Node, int], int | None]


def channel_dimension(node: fx.Node, rank: int) -> int | None:
    """The dimension of the channels of a node's value, which has `rank` dimensions; None if the graph does not show it.

    Convolutions and poolings have them in dimension 1, dense and recurrent layers and embeddings in the last. From there they
    are followed through permutations and through what leaves dimensions where they are: first from the layers that the value
    comes from, then from those that read it.
    """
    made = _made(node, rank, {})
    return made if made is not None else _read(node, rank, {})


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
    if node.target is operator.getitem and node_info(sources[0]).operator is not None:
        parts = node_info(sources[0]).operator
        assert parts is not None
        return _made(sources[0], rank, known) if parts.returns_several else None
    if row.dimensions.dimension_before is not None:
        before = _made(sources[0], rank - row.dimensions.added, known)
        places = sources_of_dimensions(node, rank) or []
        return None if before is None or before not in places else places.index(before)
    if not _keeps(row):
        return None
    found = {_made(source, rank, known) for source in sources if _rank_of(source, rank) == rank} - {None}
    return found.pop() if len(found) == 1 else None


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
