"""Messages of graph networks: sums over edges in a graph of functions, and the nodes of the data that they connect."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from lrpfx.attribution.computation import Computation
from lrpfx.attribution.infinite_masks import bound_inputs
from lrpfx.errors import InputError
from lrpfx.ir.node import Role, ancestors_of, bottlenecks, data_calls, node_info
from lrpfx.operators.layer import bound_arguments
from lrpfx.request.conditions import Condition
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.request.targets import Target
from lrpfx.runtime.explain_module import ExplainModule, RuleModule

Array = NDArray[Any]

#: Rows of the operators that add up, average or choose messages by the node that gets them.
_AGGREGATIONS = {f"{by}_{how}" for by in ("scatter", "index") for how in ("add", "averaged", "chosen")}
#: Inputs that scale messages, and are no signal.
CONSTANTS = ("edge_weight",)
#: How many conditions run together.
_TOGETHER = 64


@dataclass(frozen=True, eq=False)
class MessageLayer:
    """A sum, mean or maximum over the messages that each node gets.

    `messages`: the name of the node whose value has a message at each place of a `dimension`. `edges`: the edge of each
    message, -1 for a message from a node to itself that is no edge of the data. `states`: the name of the first node behind it
    that all relevance flows through, which has a row for each node of the data; None if there is none before the next layer.
    `dimensions`: of its value.
    """

    messages: str
    dimension: int
    edges: Array
    states: str | None
    dimensions: int

    def relevance_of_edges(self, of_messages: Array, count: int) -> Array:
        """Relevance of edges from that of the messages.

        `of_messages`: with the shape of their node. `count`: how many edges there are. Returns relevance of shape (count,).
        """
        rows = np.moveaxis(of_messages, self.dimension, 0)
        summed = rows.reshape(len(rows), -1).astype(np.float64).sum(1)
        is_edge = self.edges >= 0
        return np.bincount(self.edges[is_edge], summed[is_edge], count)


class _Values(fx.Interpreter):
    """Runs a graph, and keeps the values of some of its nodes."""

    def __init__(self, module: ExplainModule, wanted: set[fx.Node]) -> None:
        super().__init__(module, graph=module.unfused_graph)
        self.wanted = wanted
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted:
            self.found[n] = value
        return value

    def indices(self, node: fx.Node) -> list[Array]:
        """The indices among the arguments of a call, one for each place of the dimension along which they vary."""
        values = (self.found[one] for one in node.all_input_nodes)
        tensors = (
            one for one in values if isinstance(one, torch.Tensor) and one.dtype in (torch.int32, torch.int64) and one.ndim
        )
        return [line.numpy(force=True) for one in tensors for line in _lines(one)[:1]]

    def dimension(self, node: fx.Node) -> int:
        """The dimension along which a call adds up, or chooses, messages."""
        called = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, RuleModule):
            operation, values = called.ruled.operation, [self.found[one] for one in node.all_input_nodes]
            return int(operation.arguments(values).get("dim", 0))
        row = node_info(node).operator
        return 0 if row is None else int(bound_arguments(node, row).get("dim", 0))


def _lines(index: torch.Tensor) -> list[torch.Tensor]:
    """An index along each dimension, if those along all others are the same."""
    rows = (index.movedim(dimension, 0).flatten(1) for dimension in range(index.ndim))
    return [one[:, 0] for one in rows if one.shape[1] and bool((one == one[:, :1]).all())] if index.ndim > 1 else [index]


def message_layers(module: ExplainModule, inputs: Mapping[str, Any]) -> list[MessageLayer]:
    """The layers whose messages flow along the edges of the data, in the order of execution.

    `inputs`: the model's arguments by name, with `edge_index` of shape (2, edges).
    """
    graph = module.unfused_graph
    aggregations = [node for node in data_calls(graph) if getattr(node_info(node).operator, "name", "") in _AGGREGATIONS]
    behind = {node: ancestors_of(node, lambda one: node_info(one).role is Role.DATA) for node in aggregations}
    readers = {node: [one for one in reversed(list(data_calls(graph))) if one in some] for node, some in behind.items()}
    values = _Values(module, {read for some in readers.values() for one in some for read in one.all_input_nodes})
    with torch.no_grad():
        values.run(*bound_inputs(graph, (), inputs))
    numbers = _numbers(inputs["edge_index"].numpy(force=True))
    found: dict[fx.Node, tuple[fx.Node, int, Array]] = {}
    for node, (first, *before) in readers.items():
        for targets in values.indices(first)[:1]:
            sources = [one for reader in before for one in values.indices(reader) if len(one) == len(targets)]
            edges = next((one for one in (_edges(source, targets, numbers) for source in sources) if one is not None), None)
            dimension = values.dimension(node)
            arguments = [
                one
                for one in node.all_input_nodes
                if one in before and values.found[one].shape[dimension : dimension + 1 or None] == (len(targets),)
            ]
            if edges is not None and arguments:
                found[node] = (max(arguments, key=before[::-1].index), dimension, edges)
    states = _states(graph, list(found), names_by_rows(inputs)[0]) if found else {}
    return [
        MessageLayer(node_info(one).name, dimension, edges, *states[node]) for node, (one, dimension, edges) in found.items()
    ]


def _numbers(edge_index: Array) -> dict[tuple[int, int], list[int]]:
    """The numbers of the edges from one node to another."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (source, target) in enumerate(edge_index.T.tolist()):
        found[source, target].append(number)
    return found


def _edges(sources: Array, targets: Array, numbers: Mapping[tuple[int, int], list[int]]) -> Array | None:
    """The edge of each message; None if some are between other nodes, or all are from a node to itself.

    Messages may flow against the edges.
    """
    is_other = sources != targets
    for starts, ends in ((sources, targets), (targets, sources)):
        pairs = list(zip(starts.tolist(), ends.tolist(), strict=True))
        if is_other.any() and all(pair in numbers for pair, other in zip(pairs, is_other, strict=True) if other):
            remaining = {pair: iter([*some, *some[-1:] * len(pairs)]) for pair, some in numbers.items()}
            return np.array([next(remaining[pair]) if pair in remaining else -1 for pair in pairs])
    return None


def _states(graph: fx.Graph, layers: Sequence[fx.Node], inputs: Sequence[str]) -> dict[fx.Node, tuple[str | None, int]]:
    """The first node from each layer on that all relevance of the inputs flows through, and the dimensions of its value.

    None if it is not before the next layer, or has no row for each node of the data.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    narrow = sorted(bottlenecks(graph, inputs), key=order.__getitem__)
    rows = {(node_info(node).shape or (None,))[0] for node in graph.find_nodes(op="placeholder") if str(node.target) == "x"}
    limits = [*(order[node] for node in layers[1:]), len(order)]
    found: dict[fx.Node, tuple[str | None, int]] = {}
    for node, limit in zip(layers, limits, strict=True):
        infos = (node_info(one) for one in narrow if order[node] <= order[one] < limit)
        info = next(infos, None)
        shape = () if info is None or info.shape is None else info.shape
        found[node] = (info.name, len(shape)) if info is not None and shape and shape[0] in rows else (None, 0)
    return found


def by_rows(relevance: Any, leading: int = 0) -> torch.Tensor:
    """Relevance of an input that has a row for each node or edge.

    `relevance`: as `attribute` returns it for one input: of shape (..., rows, ...), or by name for several embeddings.
    `leading`: how many dimensions are before the rows. Returns relevance of shape (..., rows, features).
    """
    parts = list(relevance.values()) if isinstance(relevance, Mapping) else [relevance]
    return torch.cat([one.flatten(leading + 1) if one.ndim > leading + 1 else one.unsqueeze(-1) for one in parts], -1)


def names_by_rows(inputs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names of the inputs with a row for each node, and of those with a row for each edge, that may take relevance."""
    sizes = {name: len(value) for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
    signals = [name for name in sizes if name not in ("edge_index", *CONSTANTS)]
    of_edges = [name for name in signals if name.startswith("edge_") and sizes[name] == inputs["edge_index"].shape[1]]
    return [name for name in signals if name not in of_edges and sizes[name] == sizes["x"]], of_edges


@dataclass(frozen=True)
class Walk:
    """Relevance that flows through these nodes of the data, from the input to the last layer (Schnake et al. 2022)."""

    nodes: tuple[int, ...]
    relevance: float

    def __str__(self) -> str:
        return f"{' → '.join(map(str, self.nodes))}: {self.relevance:.3g}"


def walks(
    module: ExplainModule,
    inputs: Mapping[str, Any],
    target: Target,
    output: OutputSelector,
    layers: Sequence[MessageLayer],
    limit: int,
) -> list[Walk]:
    """The relevance of all walks through the layers, the largest magnitude first.

    A step is an edge, or stays at a node. A walk is explained by conditions on the states of its nodes: one for each walk
    without its first node, at most `limit`.
    """
    if not layers or any(layer.states is None for layer in layers):
        raise InputError(
            "the model has no walks: relevance does not flow through the states of the nodes after each of its layers alone, "
            "as where later layers or the output read several states",
            topic="graph-networks",
        )
    count = len(inputs["x"])
    before: dict[int, set[int]] = {node: {node} for node in range(count)}
    for source, target_node in inputs["edge_index"].T.tolist():
        before[target_node].add(source)
    tails: list[tuple[int, ...]] = [(node,) for node in range(count)]
    for _ in layers[1:]:
        tails = [(node, *tail) for tail in tails for node in sorted(before[tail[0]])]
        if len(tails) > limit:
            raise InputError(
                f"there are more than {limit} walks through {len(layers)} layers, without their first nodes: raise limit=",
                topic="graph-networks",
            )
    found: list[Walk] = []
    for first in range(0, len(tails), _TOGETHER):
        some = tails[first : first + _TOGETHER]
        masks = [torch.arange(count) == node for node in range(count)]
        conditions: list[Condition] = [
            {
                str(layer.states): masks[node].reshape(-1, *[1] * (layer.dimensions - 1))
                for layer, node in zip(layers, tail, strict=True)
            }
            for tail in some
        ]
        of_inputs = Computation(module, inputs, Question(target, conditions=conditions, output=output)).of_inputs
        found_here = [of_inputs[name] for name in names_by_rows(inputs)[0] if of_inputs[name] is not None]
        relevance = torch.stack([by_rows(one, 1).sum(-1) for one in found_here]).sum(0)
        for tail, of_nodes in zip(some, relevance.tolist(), strict=True):
            found += [Walk((node, *tail), value) for node, value in enumerate(of_nodes) if node in before[tail[0]]]
    return sorted(found, key=lambda one: -abs(one.relevance))
