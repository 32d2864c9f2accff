"""The writers and readers of a residual stream with their heads, and runs of a graph in which parts are evaluated again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.attribution.arguments import Arguments, Inputs, misfits
from lrpfx.attribution.cache import cache_of
from lrpfx.attribution.infinite_masks import bound_inputs
from lrpfx.concepts.residual_stream import Branch, Projection, Stream, data_input, find_stream, is_of_kind
from lrpfx.errors import UnsupportedOperationError
from lrpfx.ir.kinds import Linear, Neutral
from lrpfx.ir.node import ancestors_of, is_data, node_info, parameter_value
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.runtime.multipliers import carry_multiplier

#: The reader behind the stream: the explained output.
OUTPUT = "output"


@dataclass(frozen=True)
class Readers:
    """The readers that one dense layer makes: queries, keys or values of the heads of an attention.

    `names`: of the readers. `features`: of the layer's output, those that each reader has, (readers, features). `heads`: for
    each reader, the heads that use it.
    """

    names: tuple[str, ...]
    node: fx.Node
    features: torch.Tensor
    heads: tuple[tuple[str, ...], ...]

    @property
    def source(self) -> fx.Node:
        return data_input(self.node)


@dataclass(frozen=True)
class WiredBranch:
    """A branch with the names of what it writes and reads; of an attention, head by head.

    `features`: of the output projection's input, those that each head has, (heads, features).
    """

    branch: Branch
    writers: tuple[str, ...]
    attention: tuple[Readers, ...] = ()
    features: torch.Tensor | None = None

    @property
    def readers(self) -> tuple[str, ...]:
        if self.branch.point is None:
            return ()
        return tuple(name for part in self.attention for name in part.names) or self.writers

    @property
    def heads(self) -> fx.Node:
        """The results of all heads side by side, which the output projection reads."""
        return data_input(self.branch.written)


class Wiring:
    """The stream of a module, its branches, and the names of all writers and readers, in the order of the graph."""

    def __init__(self, stream: Stream, branches: Sequence[WiredBranch]) -> None:
        self.stream = stream
        self.branches = tuple(branches)
        self.writers = tuple(name for one in branches for name in one.writers)
        self.readers = (*(name for one in branches for name in one.readers), OUTPUT)
        self.branch_of = {one.branch.addend: one for one in branches}
        self.users = {name: one.writers for one in branches for name in one.readers}  # reader -> the writers that use it
        self.users |= {
            name: heads
            for one in branches
            for part in one.attention
            for name, heads in zip(part.names, part.heads, strict=True)
        }
        self.nodes: dict[str, fx.Node] = {}  # role -> the node of the graph
        for one in branches:
            self.nodes |= dict.fromkeys(one.writers, one.branch.written)
            for part in one.attention:
                self.nodes |= dict.fromkeys(part.names, part.node)
        self.nodes |= stream.roles
        made = [node for node in stream.last.graph.nodes if is_of_kind(node, Linear)]
        #: The dense layer whose result is an output of the model, if the last one is such a layer.
        self.unembedding = made[-1] if made and all(one.target is carry_multiplier for one in made[-1].users) else None

    def rows(self, one: WiredBranch) -> range:
        """Where the writers of a branch stand among all."""
        first = self.writers.index(one.writers[0])
        return range(first, first + len(one.writers))

    def before(self, point: fx.Node) -> list[WiredBranch]:
        """The branches that have added to the stream at a point."""
        return [self.branch_of[addend] for _, content in self.stream.before(point) for addend in content.addends]

    def recorded(self) -> tuple[str, ...]:
        """The nodes whose values the scores are computed from."""
        found = [self.stream.last, self.stream.shaped, *self.stream.roles.values()]
        found += [node for pair in self.stream.sources.items() for node in pair]
        for one in self.branches:
            branch = one.branch
            found += [branch.addend, branch.written, *([] if one.features is None else [one.heads])]
            found += [node for node in (branch.point, branch.entry) if node is not None]
            found += [node for part in one.attention for node in (part.node, part.source)]
        if self.unembedding is not None:
            found += [self.unembedding, data_input(self.unembedding)]
        return tuple(dict.fromkeys(node_info(node).name for node in found))


def weight_of(node: fx.Node, module: ExplainModule) -> torch.Tensor:
    """The weight of a dense layer, (out, in)."""
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    value: torch.Tensor = parameter_value(weight, module)
    return value.detach()


def wiring_of(module: ExplainModule, inputs: Inputs) -> Wiring:
    """The wiring of a module, found once. `inputs`: those that it is found with."""
    cache = cache_of(module)
    if cache.wiring is None:
        stream = find_stream(module.unfused_graph)
        cache.wiring = Wiring(stream, _Probe(module, stream, inputs).branches())
    found: Wiring = cache.wiring
    return found


class Evaluation(fx.Interpreter):
    """The graph of a module, node by node, whose values are kept, so that parts of it are evaluated again for other values."""

    def __init__(self, module: ExplainModule, inputs: Inputs) -> None:
        super().__init__(module, garbage_collect_values=False, graph=module.unfused_graph)
        arguments = Arguments(inputs, module)
        arguments.admit(module)
        with torch.no_grad(), misfits(module, arguments):
            self.result = arguments.call(self._start)

    def _start(self, *args: Any, **named: Any) -> Any:
        return self.run(*bound_inputs(self.graph, args, named), enable_io_processing=False)

    def again(self, node: fx.Node, changed: Mapping[fx.Node, torch.Tensor]) -> Any:
        """The value of a node if other nodes, on which it depends through no further ones of `changed`, had other values."""
        inside = _between(changed, node)
        values = dict(changed)
        for one in self.graph.nodes:
            if one in inside and one not in values:
                args, named = fx.node.map_arg((one.args, one.kwargs), lambda read: values.get(read, self.env.get(read)))
                values[one] = getattr(self, one.op)(one.target, args, named)
        return values[node]

    def labels(self, node: fx.Node, start: fx.Node, given: torch.Tensor) -> torch.Tensor:
        """Where the entries of one node are in another one, which is computed from it: labels, moved as views move values.

        Other operations are entry by entry, or mix the features of one head: their first operand says which they are.
        """
        inside = _between([start], node)
        values: dict[fx.Node, Any] = {start: given}
        for one in self.graph.nodes:
            if one not in inside or one is start:
                continue
            found = [values[read] for read in one.all_input_nodes if read in values]
            if not is_of_kind(one, Neutral):
                shape = self.env[one].shape
                values[one] = next((labels for labels in found if labels is not None and labels.shape == shape), None)
            elif any(labels is None for labels in found):
                values[one] = None
            else:
                args, named = fx.node.map_arg((one.args, one.kwargs), lambda read: values.get(read, self.env.get(read)))
                values[one] = getattr(self, one.op)(one.target, args, named)
        if values[node] is None:
            raise UnsupportedOperationError(
                f"{node_info(node).located} does not hold the features of {node_info(start).name} head by head",
                topic="circuits",
            )
        moved: torch.Tensor = values[node].long()
        return moved


def _between(starts: Iterable[fx.Node], node: fx.Node) -> set[fx.Node]:
    """The nodes by which a node depends on others, both included."""
    found = set(starts)
    reached = ancestors_of(node, lambda one: one not in found)
    for one in node.graph.nodes:
        if one in reached and is_data(one) and any(read in found for read in one.all_input_nodes):
            found.add(one)
    return found & reached


class _Probe:
    """Which features of the dense layers of an attention belong to which head, found by following labels in one run."""

    def __init__(self, module: ExplainModule, stream: Stream, inputs: Inputs) -> None:
        self.stream = stream
        self.evaluation = Evaluation(module, inputs)

    def branches(self) -> list[WiredBranch]:
        with torch.no_grad():
            return [self._wired(branch) for branch in self.stream.branches]

    def _wired(self, branch: Branch) -> WiredBranch:
        values = self.evaluation.env
        if branch.core is None:
            self._check_positions(branch)
            return WiredBranch(branch, (branch.name,))
        core, before = values[branch.core], data_input(branch.written)
        if core.ndim != 4:
            raise UnsupportedOperationError(
                f"{node_info(branch.core).located} has the shape {tuple(core.shape)}, not (batch, heads, positions, features)",
                topic="circuits",
            )
        count = core.shape[1]
        of_heads = torch.arange(count, device=core.device).view(count, 1, 1).expand(core.shape)
        labels = self.evaluation.labels(before, branch.core, of_heads).reshape(-1, values[before].shape[-1])[0]
        features = self._rows(torch.stack([labels == one for one in range(count)]), before, branch.written)
        readers = tuple(self._reader(branch, part, count) for part in branch.projections)
        return WiredBranch(branch, tuple(f"{branch.name}.head.{one}" for one in range(count)), readers, features)

    def _reader(self, branch: Branch, part: Projection, heads: int) -> Readers:
        made, operand = self.evaluation.env[part.node], self.evaluation.env[part.heads]
        of_features = torch.arange(made.shape[-1], device=made.device).expand(made.shape)
        labels = self.evaluation.labels(part.heads, part.node, of_features)[0].reshape(operand.shape[1], -1)
        rows = torch.zeros(len(labels), made.shape[-1], dtype=torch.bool, device=made.device).scatter(1, labels, True)
        of_head: dict[tuple[bool, ...], list[str]] = {}  # heads that share keys and values have the same features
        writers = [f"{branch.name}.head.{one}" for one in range(heads)]
        for row, head in zip(rows.expand(heads, -1).tolist() if len(rows) == 1 else rows.tolist(), writers, strict=True):
            of_head.setdefault(tuple(row), []).append(head)
        features = self._rows(torch.tensor(list(of_head), device=made.device), part.heads, part.node)
        kind = "head" if len(features) == heads else "kv_head"
        names = tuple(f"{branch.name}.{kind}.{one}.{part.role}" for one in range(len(features)))
        return Readers(names, part.node, features, tuple(map(tuple, of_head.values())))

    def _rows(self, rows: torch.Tensor, operand: fx.Node, layer: fx.Node) -> torch.Tensor:
        """The features of each row of truth values, which has as many as the others and shares none with them."""
        sizes = rows.sum(1)
        if (rows.sum(0) > 1).any() or not (sizes == sizes[0]).all() or not sizes[0]:
            raise UnsupportedOperationError(
                f"the heads of {node_info(operand).located} share features of {node_info(layer).name}", topic="circuits"
            )
        return rows.nonzero()[:, 1].view(len(rows), -1)

    def _check_positions(self, branch: Branch) -> None:
        """Raise an error for a branch that is not an attention, but moves information between positions."""
        if branch.point is None:
            return
        value, point = self.evaluation.env[branch.addend], self.evaluation.env[branch.point]
        shape = self.evaluation.env[self.stream.shaped].shape
        if value.shape != point.shape or value.numel() != shape.numel():
            raise UnsupportedOperationError(
                f"{node_info(branch.addend).located} has the shape {tuple(value.shape)}, and the stream that it reads "
                f"{tuple(point.shape)}, not (batch, positions, features)",
                topic="circuits",
            )
        changed = point.reshape(shape).clone()
        changed[:, 0] = changed[:, 0].flip(-1) + 1.0
        found = self.evaluation.again(branch.addend, {branch.point: changed.reshape(point.shape)})
        if (found != value).reshape(shape)[:, 1:].any():
            raise UnsupportedOperationError(
                f"{node_info(branch.addend).located} reads other positions of the stream, but is not an attention",
                topic="circuits",
            )
