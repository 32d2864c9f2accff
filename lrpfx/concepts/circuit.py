"""Circuits: scores of the parts of a transformer, and of the edges between them, from one backward pass.

An edge leads from a writer, which adds to the residual stream, to a reader of the stream. Its score is the sum of what the
writer contributes times the multiplier that the reader sends back to it. The multipliers of one backward pass suffice: those of
queries, keys and values go through their dense layers head by head, and through the norm before them to the stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import fx, nn

from lrpfx.attribution.arguments import Arguments, Inputs, misfits
from lrpfx.attribution.recorders import Recording, recorder_of, with_factors
from lrpfx.concepts.circuit_wiring import OUTPUT, WiredBranch, Wiring, weight_of, wiring_of
from lrpfx.concepts.residual_stream import data_input
from lrpfx.errors import InputError, InputTypeError, VerificationError, nearest
from lrpfx.ir.node import node_info
from lrpfx.pictures.colors import DEFAULT
from lrpfx.pictures.graphs import graph_picture
from lrpfx.pictures.style import Style
from lrpfx.request.explained_output import explained_output
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import TargetLike, as_target
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.support.html import Html
from lrpfx.support.numbers import finite_number, whole_number
from lrpfx.support.table import Table

if TYPE_CHECKING:
    import networkx as nx


#: How many multipliers take a backward pass each, which is faster than one for several at once.
FEW = 3


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """Scores of the nodes and edges of a transformer, and which of the edges are kept.

    A *writer* adds to the residual stream: `embed`, `layers.3.attn.head.7`, `layers.3.mlp`. A *reader* reads it:
    `layers.3.attn.head.7.q` (`.k`, `.v`; `kv_head.1.k` where heads share keys and values), `layers.3.mlp`, `output`.
    `layers.3.resid_pre`, `layers.3.resid_mid` and the last `resid_post` are the stream itself, which has scores, but no edges.

    Attributes
    ----------
    writers
        Their names, in the order of the model.
    readers
        Their names, in the order of the model; "output" is the last.
    edges
        (batch, writers, readers), or (batch, writers, readers, positions); zero where there is no edge.
    exists
        Which edges there are, (writers, readers): those to readers behind the writer.
    kept
        Which of them the circuit has, (writers, readers); all, until it is pruned.
    nodes
        The scores of all nodes by name, (batch,) or (batch, positions).
    node_names
        The qualified name of the node of the graph behind each role, as in `lrpfx.node_names`.
    users
        For each reader, the writers that use what it reads: a head for its queries.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    edges: torch.Tensor
    exists: torch.Tensor
    kept: torch.Tensor
    nodes: Mapping[str, torch.Tensor]
    node_names: Mapping[str, str]
    users: Mapping[str, tuple[str, ...]]

    def edge(self, writer: str, reader: str) -> torch.Tensor:
        """The scores of the edge from `writer` to `reader`, (batch,) or (batch, positions).

        Raises `InputError` if there is none, and `InputTypeError` for what is not a name.
        """
        row, column = _place(writer, self.writers, "writers"), _place(reader, self.readers, "readers")
        if not self.exists[row, column]:
            raise InputError(
                f"there is no edge from {writer} to {reader}, which reads the stream before {writer}", topic="circuits"
            )
        return self.edges[:, row, column]

    def node(self, name: str) -> torch.Tensor:
        """The scores of the node `name`, (batch,) or (batch, positions). `InputError` if there is none."""
        _place(name, tuple(self.nodes), "nodes")
        return self.nodes[name]

    @property
    def edge_means(self) -> torch.Tensor:
        """The scores of edges, summed over positions: means over the batch, (writers, readers)."""
        return self.edges.flatten(3).sum(3).mean(0) if self.edges.ndim == 4 else self.edges.mean(0)

    @property
    def node_means(self) -> dict[str, float]:
        """The scores of nodes, summed over positions: means over the batch."""
        return {
            name: float(scores.flatten(1).sum(1).mean()) if scores.ndim > 1 else float(scores.mean())
            for name, scores in self.nodes.items()
        }

    def pruned(self, threshold: float | None = None, *, edges: int | None = None) -> "Circuit":
        """The circuit of the edges with the largest magnitudes that lead to the output.

        `threshold`: the least magnitude of the mean score of an edge. `edges`: or how many are kept at most. Edges into what no
        kept edge leads on from are dropped as well. Raises `InputError` unless one of both is given, and `InputError` and
        `InputTypeError` where it is no number, not finite, or of edges not a whole number.
        """
        if (threshold is None) == (edges is None):
            raise InputError("pass a threshold, or how many edges are kept", topic="circuits")
        threshold = None if threshold is None else finite_number("threshold", threshold)
        edges = None if edges is None else whole_number(edges, "edges= is a number", 0, "circuits")
        size = self.edge_means.abs().masked_fill(~self.kept, -1.0)
        if threshold is not None:
            kept = (size >= threshold) & self.kept
        else:
            kept = torch.zeros_like(self.kept)
            best = size.flatten().argsort(descending=True, stable=True)[:edges]
            kept.view(-1)[best] = True
            kept &= self.kept
        return replace(self, kept=self._leading_on(kept))

    def _leading_on(self, kept: torch.Tensor) -> torch.Tensor:
        """The edges that lead to the output, by way of others that are kept."""
        kept = kept.clone()
        live = {OUTPUT}
        for column in reversed(range(len(self.readers))):  # readers behind come first
            reader = self.readers[column]
            if reader != OUTPUT and not live.intersection(self.users[reader]):
                kept[:, column] = False
            live.update(self.writers[row] for row in kept[:, column].nonzero().flatten().tolist())
        return kept

    @property
    def node_table(self) -> Table:
        """A row for each node, the largest magnitude first."""
        means = self.node_means
        rows = [(name, self.node_names.get(name, ""), means[name]) for name in sorted(means, key=lambda one: -abs(means[one]))]
        return Table({"node": "str", "in the graph": "str", "score": "float64"}, rows)

    @property
    def edge_table(self) -> Table:
        """A row for each edge that is kept, the largest magnitude first."""
        means = self.edge_means
        places = sorted(self.kept.nonzero().tolist(), key=lambda one: -abs(float(means[one[0], one[1]])))
        rows = [(self.writers[row], self.readers[column], float(means[row, column])) for row, column in places]
        return Table({"from": "str", "to": "str", "score": "float64"}, rows)

    def to_networkx(self) -> "nx.DiGraph[str]":
        """The edges that are kept, and their nodes, as a graph from the embeddings to "output".

        Nodes and edges have the attribute `score`, the mean over the batch, and nodes `name`, that in the graph of the model.
        An edge from queries, keys or values to their head has no score: it says that they are parts of it.
        """
        import networkx as nx  # only where it is needed: it takes longer to import than most of lrpfx

        graph: nx.DiGraph[str] = nx.DiGraph()
        means, nodes = self.edge_means, self.node_means
        for row, column in self.kept.nonzero().tolist():
            graph.add_edge(self.writers[row], self.readers[column], score=float(means[row, column]))
        for reader in [one for one in self.readers if one in graph and one not in self.writers and one != OUTPUT]:
            for head in self.users[reader]:
                if head in graph:
                    graph.add_edge(reader, head)
        for name in graph:
            graph.nodes[name].update(score=nodes[name], name=self.node_names.get(name, ""))
        return graph

    def picture(self, *, width: int = 900, height: int = 700, cmap: Any = DEFAULT) -> Image.Image:
        """The edges that are kept as an image, from the embeddings at the bottom to the output at the top.

        `in` is the embedding, `3m` the MLP of layer 3, `3.7` its head 7, and `3.7q` the queries of this head. Colours are
        those of positive and negative scores.

        `width`, `height`: of the image, in pixels. `cmap`: the colours, as for `lrpfx.pictures.heatmap`. Raises `InputError` if
        no edge is kept.
        """
        if not self.kept.any():
            raise InputError("the circuit keeps no edge, so there is nothing to draw", topic="circuits")
        return _drawing(self, (width, height), Style(cmap=cmap))

    def __repr__(self) -> str:
        return f"<circuit of {len(self.writers)} writers and {len(self.readers)} readers: {int(self.kept.sum())} edges>"

    def __str__(self) -> str:
        return str(self.edge_table)

    def _repr_html_(self) -> Html:
        return self.edge_table.to_html()


def _place(name: Any, names: Sequence[str], what: str) -> int:
    if not isinstance(name, str):
        raise InputTypeError(f"the parts of a circuit have names, such as {names[0]!r}, not {name!r}", topic="circuits")
    if name not in names:
        raise InputError(f"there is no {name!r} among the {what} of the circuit.{nearest(name, names)}", topic="circuits")
    return names.index(name)


def circuits(
    explain_model: nn.Module,
    inputs: Inputs,
    target: TargetLike = None,
    *,
    others: Inputs | None = None,
    output: OutputSelector = None,
    positions: bool = False,
) -> Circuit:
    """Scores of attention heads (queries, keys and values apart), MLPs and embeddings, and of the edges between them.

    The composite of `explain_model` is one without division: `RelP()` for effects of patching (edge attribution patching with
    its multipliers), `AttnLRP()` or `CPLRP()` for shares of the output. One forward and one backward pass give all scores, and
    a further forward pass those against `others`. Edges are exact where all that follows is linear. What all readers send back
    to a writer adds up to its multiplier, which is verified in every call.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform` for a transformer with one residual stream of shape (batch, positions, features).
    inputs
        As for `lrpfx.attribute`, as are `target` and `output`.
    others
        Other inputs of the same shapes. A score then is the estimated change of the explained output if a value is replaced by
        that for the other inputs. Without them, a score is the part that a value has in the output: the negative of the
        estimated change if it is replaced by 0.
    positions
        Whether scores have a dimension for positions: those at which the stream is read and written.

    Raises
    ------
    InputError
        The composite divides, or the values have other shapes. Errors of `lrpfx.attribute` are raised too.
    UnsupportedOperationError
        The model has no residual stream with attention, or another structure than transformers have.
    VerificationError
        Scores of edges do not add up to that of a writer: something else reads the stream.
    """
    module = explainable(explain_model, "circuits")
    with torch.inference_mode(False), torch.enable_grad(), module.with_rules():
        run = Run(module, wiring_of(module, inputs), inputs, output)
        run.propagate(target)
        return Scores(run, others, output, positions).circuit()


class Run:
    """A forward pass with the values of what writes and reads the stream, and the multipliers of one backward pass."""

    def __init__(self, module: ExplainModule, wiring: Wiring, inputs: Inputs, output: OutputSelector) -> None:
        self.module, self.wiring = module, wiring
        arguments = Arguments(inputs, module)
        arguments.admit(module)
        names = wiring.recorded()
        recorder = recorder_of(module, Recording(names, leaves=True))
        with misfits(module, arguments):
            result, *returned = arguments.call(recorder)
        layers, self.factors = with_factors(recorder, returned)
        self.explained = explained_output(result, output)
        self.values = dict(zip(names, layers, strict=True))
        self.multipliers: dict[str, torch.Tensor] = {}
        self.scales: dict[tuple[fx.Node, fx.Node], HeldScale | None] = {}

    def propagate(self, target: TargetLike) -> None:
        """Find the multipliers of all values. `InputError` where the composite divides."""
        chosen, value = as_target(target), self.explained.value
        seed = chosen.seed(value, self.explained.chosen)
        self.weights = chosen.multiplier(value, seed)  # of the entries of the output
        live = [tensor for tensor in self.values.values() if tensor.requires_grad]
        started = self._before_unembedding() or (value, self.explained.start(seed, chosen))
        gradients = iter(torch.autograd.grad(started[0], live, started[1], retain_graph=True, allow_unused=True))
        for (name, tensor), factor in zip(self.values.items(), self.factors, strict=True):
            found = next(gradients) if tensor.requires_grad else None
            if found is not None and factor is None and found.any():
                raise InputError(
                    f"{name} carries relevance under {self.module.composite}, not multipliers: circuits need a composite "
                    "without division, such as RelP(), AttnLRP() or CPLRP()",
                    topic="circuits",
                )
            self.multipliers[name] = torch.zeros_like(tensor) if found is None else found.detach()

    def _before_unembedding(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the dense layer that makes the explained output reads, and its multiplier, from the explained rows alone."""
        layer = self.wiring.unembedding
        if layer is None:
            return None
        made, read = (node_info(node).name for node in (layer, data_input(layer)))
        value, state = self.values[made], self.values[read]
        factors = dict(zip(self.values, self.factors, strict=True))
        is_made = value.data_ptr() == self.explained.value.data_ptr() and value.shape == self.explained.value.shape
        if not is_made or factors[made] is None or factors[read] is None or not state.requires_grad:
            return None
        weights = self.weights.flatten(0, -2)
        rows = weights.any(1).nonzero().flatten()
        found = torch.zeros_like(state, requires_grad=False)
        found.view(-1, state.shape[-1])[rows] = weights[rows] @ weight_of(layer, self.module).to(weights)
        return state, found

    def is_view(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a node has the values of another one in the same order."""
        value, origin = (self.values[node_info(one).name] for one in (node, source))
        same = value.data_ptr() == origin.data_ptr() and value.numel() == origin.numel() and value.dtype == origin.dtype
        return same and value.is_contiguous() and origin.is_contiguous()

    def pull(self, node: fx.Node, source: fx.Node, multipliers: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        """What several multipliers of a node, (several, ...), are at the value that it is computed from.

        `in_place`: whether the result may take the memory of the multipliers.
        """
        value, origin = self.values[node_info(node).name], self.values[node_info(source).name]
        if self.is_view(node, source):
            return multipliers.reshape(len(multipliers), *origin.shape)
        if not value.requires_grad:  # nothing flows back there
            return multipliers.new_zeros(len(multipliers), *origin.shape)
        given = multipliers.reshape(len(multipliers), *value.shape).to(value)
        if len(given) <= FEW:
            return _pulled(value, origin, given)
        if (node, source) not in self.scales:
            self.scales[node, source] = HeldScale.found(value, origin)
        scale = self.scales[node, source]
        if scale is None:
            return _pulled(value, origin, given)
        given = given.reshape(len(given), *origin.shape)
        return scale.pull(given, given if in_place else torch.empty_like(given))


def _pulled(value: torch.Tensor, origin: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    if len(multipliers) <= FEW:
        each = (torch.autograd.grad(value, origin, one, retain_graph=True)[0] for one in multipliers)
        return torch.stack(list(each)).detach()
    (found,) = torch.autograd.grad(value, origin, multipliers, is_grads_batched=True, retain_graph=True)
    return found.detach()


@dataclass(frozen=True)
class HeldScale:
    """A norm with its scale held, between two values with as many entries: the same product for many multipliers at once.

    `scale`: of each entry. `centered`: whether the norm subtracts the mean over the last dimension.
    """

    scale: torch.Tensor
    centered: bool

    @classmethod
    def found(cls, value: torch.Tensor, origin: torch.Tensor) -> "HeldScale | None":
        """What is between two values, measured with two multipliers; None if it is neither a product nor a norm."""
        if value.numel() != origin.numel() or value.shape[-1] != origin.shape[-1]:
            return None
        probe = torch.arange(value.numel(), device=value.device).float().cos().to(value.dtype).view(value.shape)
        of_ones, of_probe = _pulled(value, origin, torch.stack([torch.ones_like(probe), probe])).unbind()
        probe = probe.reshape(origin.shape)
        direction = centered(probe)
        missing = of_probe - centered(of_ones * probe)
        mean = (missing * direction).sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True)
        bound = 1e3 * torch.finfo(value.dtype).eps * of_probe.abs().amax(-1, keepdim=True)
        for one in (cls(of_ones, False), cls(of_ones + mean, True)):
            if ((one.pull(probe, torch.empty_like(of_probe)) - of_probe).abs() <= bound).all():
                return one
        return None

    def pull(self, multipliers: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """What multipliers of the norm are at its input, entered into `result`."""
        torch.mul(multipliers, self.scale, out=result)
        return result.sub_(result.mean(-1, keepdim=True)) if self.centered else result


def centered(value: torch.Tensor) -> torch.Tensor:
    return value - value.mean(-1, keepdim=True)


class Scores:
    """The scores of a run: of the values themselves, or of their differences from those for other inputs."""

    def __init__(self, run: Run, others: Inputs | None, output: OutputSelector, positions: bool) -> None:
        self.run, self.wiring, self.positions = run, run.wiring, positions
        shaped = run.values[node_info(self.wiring.stream.shaped).name]
        self.shape, self.features, self.dtype = shaped.shape[:2], shaped.shape[2], shaped.dtype  # batch, positions
        self.changes = {name: tensor.detach() for name, tensor in run.values.items()}
        explained = run.explained.value.detach()
        if others is not None:
            with torch.no_grad():
                other = Run(run.module, self.wiring, others, output)
            for name, tensor in other.values.items():
                if tensor.shape != self.changes[name].shape:
                    raise InputError(
                        f"{name} has the shapes {tuple(self.changes[name].shape)} and {tuple(tensor.shape)} for the two "
                        "inputs, which cannot take each other's place",
                        topic="circuits",
                    )
                self.changes[name] = tensor.detach() - self.changes[name]
            explained = other.explained.value.detach() - explained
        self.nodes = {OUTPUT: (run.weights * explained).flatten(1).sum(1)}
        sizes = (self.shape[0], len(self.wiring.writers), len(self.wiring.readers), *(self.shape[1:] if positions else ()))
        self.edges = shaped.new_zeros(sizes, requires_grad=False)
        self.exists = torch.zeros(sizes[1:3], dtype=torch.bool)

    def circuit(self) -> Circuit:
        wiring = self.wiring
        self.contributions = self.edges.new_empty(len(wiring.writers), *self.shape, self.features)
        self.sent = self.edges.new_empty(max(len(one.readers) for one in wiring.branches), *self.shape, self.features)
        for one in wiring.branches:
            self._contribute(one, self.contributions[wiring.rows(one).start : wiring.rows(one).stop])
            self._score_nodes(one)
        for role, point in wiring.stream.roles.items():
            self.nodes[role] = self._sum(self._change(point) * self._multiplier(point))
        first = 0
        for one in wiring.branches:
            if one.branch.point is not None:
                self._score_edges(one.branch.point, self._sent(one, one.branch.point), first)
                first += len(one.readers)
        self._score_edges(wiring.stream.last, self._multiplier(wiring.stream.last)[None].clone(), first)
        self._verify()
        names = {role: node_info(node).name for role, node in wiring.nodes.items()}
        return Circuit(wiring.writers, wiring.readers, self.edges, self.exists, self.exists, self.nodes, names, wiring.users)

    def _change(self, node: fx.Node) -> torch.Tensor:
        return self._shaped(self.changes[node_info(node).name])

    def _multiplier(self, node: fx.Node) -> torch.Tensor:
        return self._shaped(self.run.multipliers[node_info(node).name])

    def _shaped(self, value: torch.Tensor) -> torch.Tensor:
        """(batch, positions, features), also of a value of shape (batch · positions, features)."""
        return value.reshape(*self.shape, value.shape[-1]).to(self.dtype)

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """(batch, ..., positions, features) -> (batch, ...), or (batch, ..., positions)."""
        return value.sum(-1) if self.positions else value.sum((-2, -1))

    def _contribute(self, one: WiredBranch, entries: torch.Tensor) -> None:
        """Enter what the writers of a branch add to the stream, (writers, batch, positions, features)."""
        if one.features is None:
            entries[0] = self._change(one.branch.addend)
        else:
            weight = weight_of(one.branch.written, self.run.module).to(self.dtype)
            heads = _split(self._change(one.heads), one.features, -1)
            torch.bmm(heads.flatten(0, 1).transpose(0, 1), _split(weight.T, one.features, 0), out=entries.flatten(1, 2))

    def _score_nodes(self, one: WiredBranch) -> None:
        if one.features is None:
            self.nodes[one.writers[0]] = self._sum(self._change(one.branch.addend) * self._multiplier(one.branch.written))
        else:
            self._score_parts(one.writers, one.heads, one.features)
        for part in one.attention:
            self._score_parts(part.names, part.node, part.features)

    def _score_parts(self, names: Sequence[str], node: fx.Node, features: torch.Tensor) -> None:
        """Scores of several nodes, each of which has some of the features of a node of the graph, (nodes, features)."""
        product = _split(self._change(node) * self._multiplier(node), features, -1)
        self.nodes.update(zip(names, self._sum(product.transpose(1, 2)).unbind(1), strict=True))

    def _sent(self, one: WiredBranch, point: fx.Node) -> torch.Tensor:
        """What the readers of a branch send back to its point, (readers, ...)."""
        if one.branch.entry is not None:
            return self.run.pull(one.branch.entry, point, self.run.multipliers[node_info(one.branch.entry).name][None].clone())
        found = []
        first = 0
        for source in dict.fromkeys(part.source for part in one.attention):
            start = first
            for part in one.attention:
                if part.source is not source:
                    continue
                entries = self.sent[first : first + len(part.features)]
                multipliers = _split(self._multiplier(part.node), part.features, -1)  # (batch, positions, readers, features)
                weight = _split(weight_of(part.node, self.run.module).to(self.dtype), part.features, 0)
                torch.bmm(multipliers.flatten(0, 1).transpose(0, 1), weight, out=entries.flatten(1, 2))
                first += len(part.features)
            found.append(self.run.pull(source, point, self.sent[start:first], in_place=True))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _score_edges(self, point: fx.Node, sent: torch.Tensor, first: int) -> None:
        """Enter the edges to the readers of one point. `first`: where these readers stand among all. `sent` is overwritten."""
        base = None
        for place, content in self.wiring.stream.before(point):
            sent = sent if base is None else self.run.pull(base, place, sent, in_place=True)
            branches = [self.wiring.branch_of[addend] for addend in content.addends]
            added = [one for one in branches if self.run.is_view(one.branch.addend, one.branch.written)]
            self._multiply([row for one in added for row in self.wiring.rows(one)], sent, first)
            for one in branches:
                if one not in added:  # a norm, or a factor, follows the output projection
                    here = self.run.pull(one.branch.addend, one.branch.written, sent)
                    self._multiply(list(self.wiring.rows(one)), here, first)
            base = content.base

    def _multiply(self, rows: list[int], sent: torch.Tensor, first: int) -> None:
        """Enter the products of what writers contribute and of what readers send back."""
        if not rows:
            return
        is_range = rows[-1] - rows[0] + 1 == len(rows)
        places: Any = slice(rows[0], rows[-1] + 1) if is_range else rows
        written, read = self.contributions[places], sent.reshape(len(sent), *self.shape, -1).to(self.dtype)
        if self.positions:
            of_positions = written.flatten(1, 2).transpose(0, 1) @ read.flatten(1, 2).permute(1, 2, 0)
            found = of_positions.unflatten(0, self.shape).permute(0, 2, 3, 1)
        else:
            found = written.flatten(2).transpose(0, 1) @ read.flatten(2).permute(1, 2, 0)
        columns = slice(first, first + len(sent))
        self.edges[:, places, columns] = found
        self.exists[places, columns] = True

    def _verify(self) -> None:
        """All that readers send back to a writer is its multiplier. `VerificationError` if something else reads the stream."""
        sums = self.edges.sum(2)
        errors = sums - torch.stack([self.nodes[name] for name in self.wiring.writers], 1)
        wrong = errors.abs().transpose(0, 1).flatten(1).amax(1)
        tolerance = max(torch.finfo(dtype).eps for dtype in (self.dtype, torch.float32)) ** 0.5
        if (wrong > tolerance * self.edges.abs().sum(2).amax()).any():
            raise VerificationError(
                f"the edges of {self.wiring.writers[int(wrong.argmax())]} do not add up to its score: "
                "something else reads the stream",
                topic="circuits",
            )


def _split(value: torch.Tensor, features: torch.Tensor, dimension: int) -> torch.Tensor:
    """A dimension of features as two, (heads, features): without a copy, if the heads stand side by side."""
    first, flat = int(features[0, 0]), features.flatten()
    is_range = torch.equal(flat, torch.arange(first, first + len(flat), device=flat.device))
    found = value.narrow(dimension, first, len(flat)) if is_range else value.index_select(dimension, flat)
    return torch.unflatten(found, dimension, features.shape)


def _drawing(circuit: Circuit, size: tuple[int, int], style: Style) -> Image.Image:
    """Writers and readers in rows from the embeddings at the bottom to the output at the top, edges in proportion to scores."""
    graph = circuit.to_networkx()
    names = [name for name in dict.fromkeys((*circuit.writers, *circuit.readers)) if name in graph]
    places: dict[tuple[int, int], list[str]] = {}
    for name in names:
        places.setdefault(_row(name), []).append(name)
    rows = sorted(places)
    positions = np.zeros((len(names), 2))
    for number, row in enumerate(rows):  # moved to the side by turns, so that edges do not run behind other nodes
        for place, name in enumerate(places[row]):
            across = (place + 1) / (len(places[row]) + 1) + 0.08 * (number % 2 * 2 - 1)
            positions[names.index(name)] = across, len(rows) - number
    edges = [
        (names.index(writer), names.index(reader), facts.get("score", 0.0)) for writer, reader, facts in graph.edges(data=True)
    ]
    nodes = np.array([circuit.node_means[name] for name in names])
    index = np.array([edge[:2] for edge in edges], dtype=int).reshape(-1, 2).T
    labels = [_short(name) for name in names]
    return graph_picture(positions, index, nodes, np.array([edge[2] for edge in edges]), size, labels, style=style)


def _row(name: str) -> tuple[int, int]:
    """Which row of a picture a writer or reader stands in."""
    if not name.startswith("layers."):
        return (-1, 0) if name != OUTPUT else (1 << 30, 0)
    parts = name.split(".")
    return int(parts[1]), 2 if "attn" not in parts else int(parts[-1].isdigit())


def _short(name: str) -> str:
    """`layers.3.attn.head.7.q` -> `3.7q`."""
    parts = name.split(".")
    if parts[0] != "layers":
        return "out" if name == OUTPUT else "in"
    return f"{parts[1]}.{parts[4]}{''.join(parts[5:])}" if "attn" in parts else f"{parts[1]}m"
