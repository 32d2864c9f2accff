"""Explanations of graphs, each by itself, as rows of the size of the largest one."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lrpfx.attribution.computation import Computation, computations, mean_of
from lrpfx.attribution.messages import MessageLayer, by_rows, names_by_rows
from lrpfx.datasets import layout
from lrpfx.datasets.layout import Array
from lrpfx.datasets.sample_explainer import ExplainedRows, SampleExplainer
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.graphs import inputs_of_graph, question_of_graph, with_names
from lrpfx.request.user_functions import reported
from lrpfx.samples.items import is_indexed, parts_of
from lrpfx.samples.preparation import Sample, SampleGroup
from lrpfx.support.graph_data import are_of_graph, is_graph
from lrpfx.support.optional_packages import is_frame
from lrpfx.support.tensors import as_array


def are_samples_graphs(data: Any, names: Sequence[str], is_compiled: bool) -> bool:
    """Whether the samples of a data set are graphs, as the model's arguments say, or the first sample.

    `names`: of the arguments. `is_compiled`: whether the model is, so that it takes no graph as one object.
    `InputTypeError` for graphs that come as a stream, of which the largest is not known.
    """
    is_for_graphs = are_of_graph(names)
    items: Any = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(items, (str, bytes, torch.Tensor, np.ndarray)) or is_frame(items):
        return False
    if isinstance(items, IterableDataset) or not is_indexed(items):
        if is_for_graphs:
            raise InputTypeError(
                "graphs are a list, or a dataset with a length and indices: the store has room for the largest of them, which "
                f"{type(items).__name__} does not tell before its end",
                topic="graph-networks",
            )
        return False
    if is_for_graphs or is_compiled or not len(items):
        return is_for_graphs
    try:
        inputs, _ = parts_of(items[0])
    except Exception:  # of the user's code: that it cannot be loaded is said of each sample later
        return False
    return is_graph(with_names(inputs, names))


def check_settings_for_graphs(record: Any, others: Any, reduce: Any) -> None:
    """Raise `InputError` for settings that graphs do not have. `record`, `others`: layers whose relevance is asked for."""
    if record or others:
        raise InputError(
            "record= is not for data sets of graphs: values of layers have another size for each, and "
            "lrpfx.Explainer(model, record=...)(graphs) gives their relevance",
            topic="graph-networks",
        )
    if reduce is not None:
        raise InputError(
            "reduce= is not for graphs: their relevance is that of nodes, summed over features: leave it out",
            topic="graph-networks",
        )


@dataclass(frozen=True)
class GraphSizes:
    """How many nodes and edges the largest graphs of a data set have. `example`: the tensors of one with the most edges."""

    nodes: int
    edges: int
    example: Mapping[str, torch.Tensor]


def sizes_of(samples: Iterable[Sample]) -> GraphSizes | None:
    """The largest sizes of graphs; None if none can be loaded."""
    nodes = edges = 0
    example: Mapping[str, torch.Tensor] | None = None
    for sample in samples:
        if sample.problem is None:
            count = sample.inputs["edge_index"].shape[1]
            if example is None or count > edges:
                example = sample.inputs
            nodes, edges = max(nodes, len(sample.inputs["x"])), max(edges, count)
    return None if example is None else GraphSizes(nodes, edges, example)


@dataclass(frozen=True)
class GraphExplainer(SampleExplainer):
    """Explains graphs one by one.

    `sizes`: the largest, which rows have. `fixed`: arguments of the model that are no tensors. `categories`: names of classes.
    """

    sizes: GraphSizes = field(kw_only=True)
    fixed: Mapping[str, Any] = field(kw_only=True)

    def explained(
        self, group: SampleGroup, samples: Sequence[Sample], observe: Callable[[Computation], object]
    ) -> Iterator[ExplainedRows]:
        """Explanations of a group of graphs, each by itself."""
        parts = [group]
        while parts:
            first = parts.pop(0)
            if len(first.places) > 1:
                parts[:0] = first.halves()
            else:
                yield from super().explained(first, samples, observe)

    def computed(self, inputs: Any, labels: Sequence[int | None]) -> Computation:
        """The output and relevance of one graph. `inputs`: its tensors, with a dimension for it alone in front."""
        given = {**self.fixed, **inputs_of_graph(self.module, {name: one[0] for name, one in inputs.items()})}
        output, targets = reported(self.question.output, "output"), self.targets_of(labels)
        asked = question_of_graph(self.explain_model, self.module, given, targets, output, None)
        record = tuple(layer.messages for layer in asked.layers)
        question = replace(self.asked(asked.targets, asked.output), record=record)
        found = mean_of(computations(self.explain_model, given, question))
        found.of_inputs = self._rows_of_inputs(found, given) | self._rows_of_messages(found, given, asked.layers)
        if asked.node is not None:
            found.output = found.output[:, asked.node]
        return found

    def _rows_of_inputs(self, found: Computation, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The relevance of nodes and of the features of edges, and the number of both, by the names of their arrays."""
        names, of_edges = names_by_rows(given)
        first = len(self.leading)
        sums = {
            name: by_rows(one, first).sum(-1, dtype=torch.float64) for name, one in found.of_inputs.items() if one is not None
        }
        nodes = torch.stack([sums[name] for name in names if name in sums]).sum(0)
        rows = {f"{layout.RELEVANCE}.{name}": self._padded(sums[name], self.sizes.edges) for name in of_edges if name in sums}
        counts = {layout.NODES: len(given["x"]), layout.EDGES: given["edge_index"].shape[1]}
        return {
            layout.RELEVANCE: self._padded(nodes, self.sizes.nodes),
            **rows,
            **{name: torch.tensor(count) for name, count in counts.items()},
        }

    def _rows_of_messages(
        self, found: Computation, given: Mapping[str, Any], layers: Sequence[MessageLayer]
    ) -> dict[str, torch.Tensor]:
        """The relevance of the messages along edges, the sum over layers, by the name of its array."""
        first, count = len(self.leading), given["edge_index"].shape[1]
        leading = found.signals[0].shape[:first]
        total = np.zeros((math.prod(leading), count))
        for layer in layers:
            relevance = as_array(found.layers[layer.messages])
            flat = relevance.reshape(-1, *relevance.shape[first:])
            total += np.stack([layer.relevance_of_edges(one, count) for one in flat])
        return {layout.MESSAGES: self._padded(torch.from_numpy(total.reshape(*leading, count)), self.sizes.edges)}

    def _padded(self, relevance: torch.Tensor, size: int) -> torch.Tensor:
        """Relevance of the nodes or edges of a graph, filled with 0 to those of the largest."""
        count = relevance.shape[-1]
        if count > size:
            raise InputError(
                f"the graph has {count} nodes or edges, and the largest had {size} when the run began: graphs do not change",
                topic="changed-data",
            )
        return nn.functional.pad(relevance, (0, size - count))

    def _relevance(self, found: Computation, count: int) -> dict[str, torch.Tensor]:
        rows = {name: one[None] for name, one in found.of_inputs.items()}
        return {name: one.to(self.dtype) if one.is_floating_point() else one for name, one in rows.items()}

    def _sums(self, found: Computation, count: int) -> dict[str, torch.Tensor]:
        first = len(self.leading)
        found.signals = [one.reshape(*one.shape[:first], 1, -1) for one in found.signals]
        return super()._sums(found, count)

    def dimensions(self, values: Mapping[str, Array], embedded: bool) -> dict[str, tuple[str, ...]]:
        """The names of the dimensions of each array."""
        own: dict[str, tuple[str, ...]] = {layout.NODES: (layout.SAMPLE,), layout.EDGES: (layout.SAMPLE,)}
        of_relevance = {name: (layout.SAMPLE, *self.leading, "edge") for name in layout.names_of_relevance(values)}
        own |= {**of_relevance, layout.RELEVANCE: (layout.SAMPLE, *self.leading, "node")}
        return {**super().dimensions({name: one for name, one in values.items() if name not in own}, embedded), **own}
