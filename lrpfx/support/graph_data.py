"""What a graph of a graph network is: features of nodes, and the edges between them."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

_NAMES = {"x", "edge_index"}


@runtime_checkable
class GraphData(Protocol):
    """A graph as PyTorch Geometric has it: an object with at least these attributes.

    `x`: features of the nodes, (nodes, features), or their kinds as integers. `edge_index`: the source and the target of each
    edge, (2, edges), integers.
    """

    x: Any
    edge_index: Any


def are_of_graph(names: Iterable[str]) -> bool:
    """Whether the names of arguments, or of arrays, are those of a graph."""
    return set(names) >= _NAMES


def is_graph(value: Any) -> bool:
    """Whether a value is the data of a graph: an object, or a dict, with `x` and `edge_index`."""
    return are_of_graph(value) if isinstance(value, Mapping) else isinstance(value, GraphData)
