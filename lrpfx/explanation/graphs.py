"""Explanations of graphs: a graph network and its data in, relevance of nodes, edges and walks out."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import nn
from typing_extensions import Unpack

from lrpfx import pictures
from lrpfx.attribution.arguments import Arguments, misfits
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.messages import MessageLayer, Walk, by_rows, message_layers, names_by_rows, walks
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.answers import Answer, Array, Balance, category_of_target
from lrpfx.explanation.compiled import CompiledModel, Origin, keep_origin, origin_of
from lrpfx.explanation.explanation import SHARES_OF_LAYERS, Explained, SeveralPictures, caption_of
from lrpfx.explanation.saving import save_figures_or_picture
from lrpfx.pictures.graphs import graph_picture
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.request.classes import as_list
from lrpfx.request.outputs import OutputSelector, select_output
from lrpfx.request.targets import Position, Target
from lrpfx.request.targets_of_samples import TargetsOfSamples, resolved
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.graph_data import are_of_graph, is_graph
from lrpfx.support.html import element, image_html
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.tensors import as_array, on_device_of

if TYPE_CHECKING:
    import networkx as nx

#: Arguments that say which nodes are of which of several graphs: there is one.
_OF_BATCHES = {"batch": None, "ptr": None, "batch_size": 1, "num_graphs": 1}

#: Attributes of the data that a model that takes the whole object does not read.
_LABELS = {"y", "train_mask", "val_mask", "test_mask"}


def with_names(given: Any, names: Sequence[str]) -> Any:
    """A graph that is a tuple of the model's arguments, or a list of such, as dicts; other values as they are.

    `names`: of the arguments, in order.
    """
    if isinstance(given, list):
        return [with_names(one, names) for one in given]
    is_one = isinstance(given, tuple) and not any(map(is_graph, given)) and are_of_graph(names[: len(given)])
    return dict(zip(names, given, strict=False)) if is_one and len(given) <= len(names) else given


def are_graphs(given: Any) -> TypeGuard[Any]:
    """Whether a value is the data of a graph or a list with such."""
    return is_graph(given) or (isinstance(given, (list, tuple)) and any(map(is_graph, given)))


@dataclass(frozen=True, eq=False)
class AnswerOfGraph(Answer):
    """The relevance of a graph for one class.

    `input_relevance`: of the features of the nodes, (nodes, features), those of several inputs side by side. `of_edges`: of the
    features of the edges, by the name of the input. `messages`: of the messages along each edge in each layer, (layers, edges).
    """

    of_edges: dict[str, Array] = field(default_factory=dict)
    messages: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def of_nodes(self) -> Array:
        """Relevance of each node, (nodes,): the sum over its features."""
        return np.asarray(self.input_relevance.astype(np.float64).sum(1))

    @property
    def of_messages(self) -> Array:
        """Relevance of the messages along each edge, (edges,): the sum over the layers."""
        return np.asarray(self.messages.sum(0))

    @property
    def balance(self) -> Balance:
        """How much of the output's relevance reached the features of nodes and edges."""
        of_edges = sum(float(one.sum(dtype=np.float64)) for one in self.of_edges.values())
        return Balance(self.category.score, super().balance.inputs + of_edges)


@dataclass(frozen=True, eq=False, repr=False)
class GraphExplanation(Explained):
    """Why a graph network gave a graph, or one of its nodes, its class.

    It is plain data, except for `walks`, which need the model as long as the explanation that the explainer returned is alive.

    `name`: of the graph. `output`: the model's output for the graph or the explained node. `edge_index`: the source and the
    target of each edge, (2, edges). `positions`: where the nodes are drawn, (nodes, 2). `node`: the explained one, or None.
    Other arguments: as for `Explanation`.

    Examples
    --------
    >>> explanation = lrpfx.explain(network, data, target=1)
    >>> explanation.nodes.shape, explanation.edges.shape
    ((5,), (10,))
    """

    answers: tuple[AnswerOfGraph, ...]
    edge_index: Array
    positions: Array
    node: int | None = None

    @property
    def nodes(self) -> Array:
        """Relevance of each node, (nodes,): the sum over its features."""
        return self.answers[0].of_nodes

    @property
    def relevance(self) -> Array:
        """The same as `nodes`."""
        return self.nodes

    @property
    def edges(self) -> Array:
        """Relevance of the messages along each edge, (edges,): the sum over the layers.

        What flows from a node to itself without an edge of the data is left out. Each layer passes on all relevance, so the
        total is not that of the nodes.
        """
        return self.answers[0].of_messages

    @property
    def layers_of_edges(self) -> Array:
        """Relevance of the messages along each edge in each layer, (layers, edges)."""
        return self.answers[0].messages

    @property
    def edge_features(self) -> dict[str, Array]:
        """Relevance of the features of each edge, (edges,), by the name of the input, such as "edge_attr"."""
        return {name: np.asarray(one.reshape(len(one), -1).sum(1)) for name, one in self.answers[0].of_edges.items()}

    def walks(self, count: int | None = 10, *, limit: int = 20_000) -> list[Walk]:
        """Walks through the layers of the network with their relevance, the largest magnitude first (GNN-LRP [1]_).

        A walk has one node for the input and one after each layer; each step is an edge or stays. The relevance of all walks
        from a node adds up to that of the node.

        `count`: how many to return; None for all. `limit`: how many walks without their first nodes are explained at most. The
        model runs again. Raises `InputError`: there are more, the network has no walks, or the explanation is a copy without
        the model.

        References
        ----------
        .. [1] Schnake et al. 2022, https://arxiv.org/abs/2006.03589
        """
        origin = origin_of(self)
        if origin is None:
            raise InputError(
                "walks are not part of this explanation, which is a copy without the model", topic="graph-networks"
            )
        compiled = origin.compiled
        assert isinstance(compiled, CompiledModel)
        layers = message_layers(compiled.explain_model, origin.inputs)
        found = walks(compiled.explain_model, origin.inputs, origin.targets[0], compiled.output, layers, limit)
        return found if count is None else found[: whole_number(count, "walks takes a number of walks", 1, "graph-networks")]

    def to_networkx(self) -> "nx.DiGraph[int]":
        """The graph with `relevance` and `position` as attributes of its nodes, and `relevance` as that of its edges."""
        import networkx as nx  # only where it is needed: it takes longer to import than most of lrpfx

        graph: nx.DiGraph[int] = nx.DiGraph()
        for node, (relevance, position) in enumerate(zip(self.nodes.tolist(), self.positions.tolist(), strict=True)):
            graph.add_node(node, relevance=relevance, position=tuple(position))
        for (source, target), relevance in zip(self.edge_index.T.tolist(), self.edges.tolist(), strict=True):
            before = graph.get_edge_data(source, target, {"relevance": 0.0})["relevance"]
            graph.add_edge(source, target, relevance=before + relevance)
        return graph

    def heatmap(
        self,
        size: tuple[int, int] = (900, 700),
        labels: Sequence[str] | None = None,
        style: Style | None = None,
        **settings: Unpack[StyleSettings],
    ) -> Image.Image:
        """The graph with nodes and edges in the colours of their relevance, each with a scale of its own.

        `size`: (width, height) in pixels. `labels`: what stands in the nodes, by default their numbers. `style`, `settings`: as
        for `lrpfx.Explanation.overlay`; there is no photograph.
        """
        return graph_picture(
            self.positions, self.edge_index, self.nodes, self.edges, size, labels, self.node, styled(style, settings)
        )

    def sheet(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The graph with a legend and the share of the output that its nodes and the features of its edges hold.

        `style`, `settings`: as for `Explanation.sheet`.
        """
        style = styled(style, settings)
        shown = self._shown(str(self.target))
        title = f"relevance for {shown}" + ("" if self.node is None else f" at node {self.node}")
        row = [(title, self.heatmap((style.width - 40, round(style.width * 0.66)), style=style))]
        return pictures.sheet(row, caption=caption_of(self.rules, [self.balance]), legend=self._legend, style=style)

    def layers(
        self, names: Sequence[str] | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """Relevance through the network: the graph with the nodes of the input, and after each sum of messages.

        The edges beside a sum have the relevance of its messages. Each picture has scales of its own, and its title the share
        of the output in its nodes. `names`: nodes of the network with an output (nodes, features), by default the recorded
        ones, or else the first after each sum of messages; the model runs again for others. `style`, `settings`: as for
        `heatmap`. Raises `InputError` for relevance of another shape, and for a copy without the model.
        """
        style = styled(style, settings)
        origin = self._origin("relevance of layers", "draw it before")
        assert isinstance(origin.compiled, CompiledModel)
        found = message_layers(origin.compiled.explain_model, origin.inputs)
        messages = {layer.states: edges for layer, edges in zip(found, self.layers_of_edges, strict=True)}
        chosen = [] if names is None else as_list("layers", names)
        chosen = chosen or list(self.recorded) or [layer.states for layer in found if layer.states is not None]
        missing = [name for name in chosen if name not in self.recorded]
        known = {**self.recorded, **origin.compiled.layers_of(origin.inputs, origin.targets[0], missing)}
        count = len(self.positions)
        for name in chosen:
            if known[name].ndim < 2 or len(known[name]) != count:
                raise InputError(
                    f"the relevance of {name} has shape {known[name].shape}, not ({count} nodes, features)",
                    topic="graph-networks",
                )
        of_nodes = {name: np.asarray(known[name].reshape(count, -1).sum(1, dtype=np.float64)) for name in chosen}
        titles = self._with_shares({"input": self.nodes, **of_nodes})
        width = (style.width - 40) // min(3, len(titles))
        edges = [np.zeros_like(self.edges), *(messages.get(name, np.zeros_like(self.edges)) for name in chosen)]
        drawn = [
            (title, graph_picture(self.positions, self.edge_index, nodes, flow, (width, width), None, self.node, style))
            for (title, nodes), flow in zip(titles.items(), edges, strict=True)
        ]
        rows = [drawn[place : place + 3] for place in range(0, len(drawn), 3)]
        return pictures.sheet(rows, caption=SHARES_OF_LAYERS, legend=self._legend, style=style)

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the figures as .npz.

        `path`: the file. Its ending names the form. In .npz, relevance for several targets is on a first axis, and `targets`
        has their names. Returns the path.
        """

        def figures() -> dict[str, Array]:
            arrays = self._figures(lambda answer: {"nodes": answer.of_nodes, "edges": answer.of_messages})
            return {**arrays, "edge_index": self.edge_index}

        return save_figures_or_picture(self, path, figures)

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self)) + element("p", str(self.balance))


class GraphExplanations(SeveralPictures[GraphExplanation]):
    """Explanations of several graphs, in their order."""

    def sheet(self) -> Image.Image:
        """The graphs one above the other."""
        rows = [[(f"{one.name}: {one.target}", one.heatmap())] for one in self._some()]
        caption = caption_of(self.items[0].rules, [one.balance for one in self.items])
        return pictures.sheet(rows, caption=caption, legend=pictures.LEGEND)

    def _names_of_files(self) -> Sequence[str]:
        return self._numbered("graph_{}.png")


class OfData(nn.Module):
    """A model that takes the data of a graph as one object, as a model that takes its tensors by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, **tensors: torch.Tensor) -> Any:
        """The result of the model for an object with these attributes, without a batch: all nodes are of one graph."""
        return self.model(SimpleNamespace(**_OF_BATCHES, num_nodes=tensors["x"].shape[0], **tensors))

    def misfit(self, error: InputError) -> InputError:
        """The error of a model that fails on the object. `error`: what it raised."""
        return InputError(
            f"{type(self.model).__name__} was given the graph as one object, as networks of PyTorch Geometric may take it, and "
            f"fails on it: {str(error).partition(': ')[2] or error} A network for graphs has a forward that takes x and "
            "edge_index, or one object that has them; other models take arrays, photographs and texts",
            topic="graph-networks",
        )


def taking_tensors(model: nn.Module) -> nn.Module:
    """The model, or a module around it if it takes the data of a graph as one object. `InputError` if it takes no graph."""
    parameters = _parameters(model)
    if isinstance(model, (ExplainModule, OfData)) or are_of_graph(parameters):
        return model
    needed = [name for name, one in parameters.items() if one.default is one.empty]
    if len(needed) != 1 and {"x", "adj"} <= set(parameters):
        raise InputError(
            f"the forward of {type(model).__name__} takes a matrix of edges, not edge_index: explain it as a model of several "
            'inputs, {"x": (batch, nodes, features), "adj": (batch, nodes, nodes)}',
            topic="graph-networks",
        )
    if len(needed) != 1:
        raise InputError(
            f"the forward of {type(model).__name__} takes {', '.join(parameters)}, neither x and edge_index nor one "
            "object that has them",
            topic="graph-networks",
        )
    return OfData(model)


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


@dataclass(frozen=True)
class OfNodes:
    """Chooses the output of each node, (nodes, classes) or (nodes,), as (1, nodes, classes)."""

    output: OutputSelector

    def __call__(self, result: Any) -> torch.Tensor:
        chosen = select_output(result, self.output)
        return chosen.reshape(1, len(chosen), -1)


@dataclass(frozen=True)
class QuestionOfGraph:
    """What is asked of a graph.

    `targets`: with indices of classes. `node`: the explained one; None for the graph. `output`: chooses what they are of.
    `rows`: the model's output, one for the graph or one for each node. `layers`: whose messages flow along the edges.
    """

    targets: list[Target]
    node: int | None
    output: OutputSelector
    rows: torch.Tensor
    layers: list[MessageLayer]


def question_of_graph(
    module: nn.Module,
    explain_model: ExplainModule,
    inputs: Mapping[str, Any],
    given: Sequence[Target],
    output: OutputSelector,
    categories: Sequence[str] | None,
) -> QuestionOfGraph:
    """What targets mean for a graph. Raises `InputError` if they do not fit, and if no messages flow along its edges.

    `module`: the explainable module, perhaps compiled by torch.compile. `explain_model`: the same, which is not. `inputs`: by
    name, as the model takes them.
    """
    count = len(inputs["x"])
    arguments = Arguments(dict(inputs), explain_model)
    with torch.no_grad(), misfits(explain_model, arguments):
        result = arguments.call(module)
    rows = select_output(result, output)
    targets, node = _targets(given, rows, count, categories)
    layers = message_layers(explain_model, inputs)
    if not layers and bool((inputs["edge_index"][0] != inputs["edge_index"][1]).any()):
        raise InputError(
            "no messages flow along the edges of the data: the model adds up nothing by the targets in edge_index "
            "(scatter_add, index_add and their like); lrpfx.attribute gives the relevance of its inputs",
            topic="graph-networks",
        )
    return QuestionOfGraph(targets, node, output if node is None else OfNodes(output), rows, layers)


def explain_graphs(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: nn.Module,
    graphs: Sequence[Any],
    wanted: TargetsOfSamples,
    progress: bool = False,
) -> list[GraphExplanation]:
    """Explain each graph. `compiled_for`: the compiled model for the model's inputs. `model`: takes tensors by name."""
    read = [(str(getattr(one, "name", None) or f"graph {place + 1}"), _values_of(one)) for place, one in enumerate(graphs)]
    steps = enumerate(progress_bar(read, progress, "explaining", "graph", len(read)))
    return [_explained(compiled_for, model, name, values, wanted.of_sample(place)) for place, (name, values) in steps]


def _explained(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: nn.Module,
    name: str,
    values: Mapping[str, Any],
    given: Sequence[Target],
) -> GraphExplanation:
    inputs = _placed_inputs(model, values)
    compiled = compiled_for(with_edges(inputs))
    module, count = compiled.explain_model, len(inputs["x"])
    asked = question_of_graph(compiled.module, module, inputs, given, compiled.output, compiled.categories)
    targets, node, output, layers = asked.targets, asked.node, asked.output, asked.layers
    record = (*compiled.record, *(layer.messages for layer in layers))
    found = attribute(compiled.module, inputs, targets=targets, record=record, output=output)
    outputs = as_array(asked.rows.reshape(len(asked.rows), -1)[node or 0])
    names, of_edges = names_by_rows(inputs)
    none = np.zeros(inputs["edge_index"].shape[1], outputs.dtype)  # of no layer, if all edges are from nodes to themselves
    answers = []
    for number, one in enumerate(targets):
        relevance = {name: _of_target(value, number) for name, value in found.relevance.items()}
        arrays = {name: as_array(value[number]) for name, value in found.layers.items()}
        messages = [layer.relevance_of_edges(arrays[layer.messages], inputs["edge_index"].shape[1]) for layer in layers]
        inner = one.target if isinstance(one, Position) else one
        category = category_of_target(inner, outputs, compiled.categories, compiled.scores)
        of_nodes = torch.cat([by_rows(relevance[name]) for name in names if relevance[name] is not None], 1)
        further = {name: as_array(by_rows(relevance[name])) for name in of_edges if relevance[name] is not None}
        kept = {name: arrays[name] for name in compiled.record}
        of_layers = np.stack([none, *messages])[1:]
        answers.append(AnswerOfGraph(category, as_array(of_nodes), kept, of_edges=further, messages=of_layers))
    facts = (outputs, compiled.categories, tuple(answers), module.composite, compiled.scores)
    edge_index = as_array(inputs["edge_index"])
    explanation = GraphExplanation(name, *facts, edge_index, _positions(values, edge_index, count), node)
    keep_origin(explanation, Origin(compiled.with_output(output), inputs, tuple(targets), outputs))
    return explanation


def inputs_of_graph(model: nn.Module, graph: Any) -> dict[str, Any]:
    """The arguments of a model for a graph, by name, on its device. `InputError` and `InputTypeError` if they do not fit."""
    return _placed_inputs(model, _values_of(graph))


def tensors_of_graph(graph: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of a graph that is a sample of a data set, by name: those of arguments, or all if the model takes the object.

    `names`: of the model's arguments; none if it takes the object. Raises as `inputs_of_graph` does.
    """
    values = _values_of(with_names(graph, names))
    unused = {*_OF_BATCHES, *(values.keys() - set(names) if names else _LABELS)}
    return {name: one for name, one in values.items() if isinstance(one, torch.Tensor) and name not in unused}


def _placed_inputs(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: on_device_of(model, value, True) for name, value in _inputs(model, values).items()}


def with_edges(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs like these, of a graph that has edges: what is captured with none has none in later calls, either."""
    nodes, edges = len(inputs["x"]), inputs["edge_index"]
    if edges.shape[1]:
        return inputs

    def with_rows(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.ndim:
            return one
        if not len(one):
            return one.new_ones(2, *one.shape[1:])
        return torch.cat([one, one]) if len(one) == nodes else one

    return {**{name: with_rows(one) for name, one in inputs.items()}, "edge_index": edges.new_tensor([[0, 1], [1, 0]])}


def _of_target(relevance: Any, number: int) -> Any:
    if isinstance(relevance, Mapping):
        return {name: one[number] for name, one in relevance.items()}
    return None if relevance is None else relevance[number]


def _values_of(graph: Any) -> dict[str, Any]:
    """The attributes of the data. Raises `InputError` and `InputTypeError` for data that are no graph."""
    if not is_graph(graph):
        raise InputTypeError(f"a {type(graph).__name__} among the graphs has no x and edge_index", topic="graph-networks")
    read = getattr(graph, "to_dict", None)
    values = dict(graph) if isinstance(graph, Mapping) else dict(read()) if callable(read) else dict(vars(graph))
    values |= {
        name: torch.from_numpy(one) for name, one in values.items() if isinstance(one, np.ndarray) and one.dtype.kind in "fiub"
    }
    for name in ("x", "edge_index"):
        if not isinstance(values.get(name), torch.Tensor):
            kind = type(values.get(name)).__name__
            sparse = name == "edge_index" and values.get("adj_t") is not None
            remedy = "; the edges are in adj_t: leave out the transform that moves them there" if sparse else ""
            raise InputTypeError(
                f"{name} of the graph is a tensor or an array of numbers, not {kind}{remedy}", topic="graph-networks"
            )
    x, edges = values["x"], values["edge_index"]
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"edge_index has the sources and targets of the edges as integers, shape (2, edges), not {edges.dtype} and "
            f"{tuple(edges.shape)}; torch.stack(adj.nonzero(as_tuple=True)) is that of a matrix",
            topic="graph-networks",
        )
    if not x.ndim or not len(x):
        raise InputError(f"the graph has no nodes: x has the shape {tuple(x.shape)}", topic="graph-networks")
    if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= len(x)):
        raise InputError(
            f"edge_index names nodes {int(edges.min())} to {int(edges.max())}, but x has {len(x)} rows", topic="graph-networks"
        )
    batch = values.get("batch")
    if isinstance(batch, torch.Tensor) and batch.numel() and bool((batch != batch.flatten()[0]).any()):
        raise InputError("batch= says that there are several graphs: pass a list of them", topic="graph-networks")
    return values


def _inputs(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments by name. Those that it needs and the data do not have are an `InputError`."""
    if isinstance(model, ExplainModule):
        return {name: values[name] for name in model.argument_names if values.get(name) is not None}
    tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor) and name not in _OF_BATCHES}
    if isinstance(model, OfData):
        return {name: one for name, one in tensors.items() if name not in _LABELS}
    parameters = _parameters(model)
    found: dict[str, Any] = {name: one for name, one in tensors.items() if name in parameters}
    for name, parameter in parameters.items():
        is_given = name in found or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not is_given and parameter.default is parameter.empty:
            if name not in _OF_BATCHES:
                raise InputError(
                    f"the forward of {type(model).__name__} needs {name}, which the graph does not have: it has "
                    f"{', '.join(tensors)}",
                    topic="graph-networks",
                )
            found[name] = _OF_BATCHES[name]
    return found


def _targets(
    given: Sequence[Target], output: torch.Tensor, count: int, categories: Sequence[str] | None
) -> tuple[list[Target], int | None]:
    """The targets with indices, and the node that is explained; None for the graph."""
    places = [one for one in given if isinstance(one, Position)]
    if output.ndim not in (1, 2) or len(output) not in (1, count):
        raise InputError(
            f"the model returns an output of shape {tuple(output.shape)} for {count} nodes, which is neither (1, classes) nor "
            "(nodes, classes); choose with output=",
            topic="graph-networks",
        )
    if len(output) == 1 and not places:
        return [resolved(one, categories) for one in given], None
    if len(output) == 1 < count:
        raise InputError(
            "the model returns one output for the whole graph: a target is a class, not a node and a class",
            topic="graph-networks",
        )
    if len(places) != len(given):
        raise InputError(
            "the model returns an output for each node: the target is (node, class), and for two graphs, for which that is a "
            "class each, targets=[(node, class)]",
            topic="graph-networks",
        )
    nodes = {int(one.position) for one in places}
    if len(nodes) > 1:
        raise InputError("an explanation is of one node: targets= has several", topic="graph-networks")
    node = nodes.pop()
    if not -count <= node < count:
        raise InputError(f"node {node} is out of range: the graph has {count} nodes", topic="graph-networks")
    return [Position(node % count, resolved(one.target, categories)) for one in places], node % count


def _positions(values: Mapping[str, Any], edge_index: Array, count: int) -> Array:
    """Where nodes are drawn: the first two coordinates of `pos`, or a layout of networkx, which is always the same."""
    known = values.get("pos")
    if isinstance(known, torch.Tensor) and known.ndim == 2 and known.shape[1] >= 2:
        return as_array(known[:, :2].double())
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edge_index.T.tolist())
    places = nx.spring_layout(graph, seed=0, k=2.0)  # long edges: nodes do not overlap
    return np.array([places[node] for node in range(count)])
