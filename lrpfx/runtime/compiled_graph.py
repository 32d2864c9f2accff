"""What the compiler makes of a model, beside its modules and tensors; and graphs as copies and plain data."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from lrpfx.ir.guards import Guard
from lrpfx.ir.node import map_arguments
from lrpfx.support.dotted_paths import dotted_path, resolve_path
from lrpfx.support.html import element

#: Key in an exported program's metadata for its compilation history.
HISTORY = "lrpfx_history"


class Listing:
    """What a graph computes at one time, as Python code that is written when it is first read.

    It keeps neither the graph nor its modules, whose tensors may be large.
    """

    def __init__(self, graph: fx.Graph) -> None:
        #: The graph as data; after that, as code. One attribute, for threads that read it together.
        self._held: list[tuple[Any, ...]] | str = [
            (node.op, node.name, node.target, *_by_name(node), {}) for node in graph.nodes
        ]

    def __str__(self) -> str:
        held = self._held
        if not isinstance(held, str):
            lines = restore_graph(held).python_code("self").src.strip("\n ").splitlines()
            # Without the statements that free values.
            self._held = held = "\n".join(re.sub(r";  (\w+ = )+None$", "", line) for line in lines)
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


@dataclass(frozen=True)
class PassRecord:
    """One step of the compilation: the result of a pass, and the graph after it."""

    stage: str
    name: str
    matches: int
    details: tuple[tuple[str, str], ...]  # (qualified name, change at this place)
    reasons: tuple[tuple[str, str], ...]  # (qualified name, why this candidate was left alone)
    listing: Listing | str
    unverified: str = ""  # why a change was not verified, if it was not

    @property
    def code(self) -> str:
        """The graph after the pass as Python code."""
        return str(self.listing)

    def __str__(self) -> str:
        lines = [f"# {self.stage.upper()} {self.name}: {self.matches} matched"]
        lines += [f"#   {name}: {detail}" for name, detail in self.details]
        lines += [f"#   left alone: {name}: {reason}" for name, reason in self.reasons]
        lines += [f"#   not verified: {self.unverified}"] if self.unverified else []
        return "\n".join([*lines, self.code])

    def _repr_html_(self) -> str:
        return element("pre", str(self), style="white-space:pre;overflow-x:auto;text-align:left")


@dataclass(frozen=True)
class CompiledGraph:
    """The graph of an explainable module, and what it relies on."""

    graph: fx.Graph
    title: str
    composite: str  # as text
    unfused: fx.Graph  # with one node for each operation that has a rule; `graph` may run several as one, or be the same
    history: tuple[PassRecord, ...] = ()
    fold_graph: fx.Graph | None = None  # parameters -> derived buffers
    derived: tuple[str, ...] = ()  # names of the derived buffers, in the order of the fold graph's outputs
    guards: tuple[Guard, ...] = ()  # facts about the arguments
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name: buffers whose values the graph relies on
    #: Of parameters and buffers, by name, for which alone the graph is valid; empty if it follows their dtype.
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    mask_names: Mapping[Any, str] = field(default_factory=dict)  # the inputs that mask relevance, by the places that they mask

    def copied(self) -> "CompiledGraph":
        """The same with graphs of its own."""
        return self._with_graphs(copy_graph)

    def moved(self, is_moved: Callable[[torch.device], bool], now: torch.device) -> "CompiledGraph":
        """The same where graphs name the device `now` in place of some."""
        return self._with_graphs(lambda graph: restore_graph(moved_state(graph_state(graph), is_moved, now)))

    def __reduce__(self) -> tuple[Any, ...]:
        made = self._with_graphs(graph_state)
        return _restored, tuple(getattr(made, one.name) for one in fields(made))

    def _with_graphs(self, of_graph: Callable[[fx.Graph], Any]) -> "CompiledGraph":
        graph = of_graph(self.graph)
        unfused = graph if self.unfused is self.graph else of_graph(self.unfused)
        fold_graph = None if self.fold_graph is None else of_graph(self.fold_graph)
        return replace(self, graph=graph, unfused=unfused, fold_graph=fold_graph)


def _restored(*state: Any) -> CompiledGraph:
    """What was pickled, with graphs as lists: one list for one graph."""
    graphs = {id(one): restore_graph(one) for one in state if isinstance(one, list)}
    return CompiledGraph(*(graphs.get(id(one), one) for one in state))


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph` with the same names and metadata."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = map_arguments((node.args, node.kwargs), lambda leaf: nodes[leaf] if isinstance(leaf, fx.Node) else leaf)
        nodes[node] = copied.create_node(node.op, node.target, args, kwargs, name=node.name)
        nodes[node].meta.update(node.meta)
    return copied


class _Reference:
    """A node by name, in the picklable form of a graph."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def _by_name(node: fx.Node) -> Any:
    """The arguments of a node, with names in place of nodes."""
    return map_arguments((node.args, node.kwargs), lambda leaf: _Reference(leaf.name) if isinstance(leaf, fx.Node) else leaf)


def graph_state(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """A graph as plain, picklable data."""
    records = []
    for node in graph.nodes:
        args, kwargs = _by_name(node)
        target = node.target
        if not isinstance(target, str):
            target = (dotted_path(target) or target,)
        records.append((node.op, node.name, target, args, kwargs, dict(node.meta)))
    return records


def moved_state(
    records: list[tuple[Any, ...]], is_moved: Callable[[torch.device], bool], now: torch.device
) -> list[tuple[Any, ...]]:
    """A graph as data, with `now` in place of some devices among the arguments of its calls."""

    def moved(leaf: Any) -> Any:
        return now if isinstance(leaf, torch.device) and is_moved(leaf) else leaf

    return [(op, name, target, *map_arguments((args, kwargs), moved), meta) for op, name, target, args, kwargs, meta in records]


def restore_graph(records: list[tuple[Any, ...]]) -> fx.Graph:
    """The graph that `graph_state` turned into data."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, meta in records:
        if isinstance(target, tuple):
            target = resolve_path(target[0]) if isinstance(target[0], str) else target[0]
        args, kwargs = map_arguments((args, kwargs), lambda leaf: nodes[leaf.name] if isinstance(leaf, _Reference) else leaf)
        node = graph.create_node(op, target, args, kwargs, name=name)
        node.meta.update(meta)
        nodes[name] = node
    return graph
