"""The residual stream of a transformer, found by the structure of the graph: what writes into it, and what reads it.

The stream is a sum: embeddings, the heads of attentions through their output projections, and MLPs are its *addends*. Each
attention and MLP is a *branch* that reads one *point* of the stream: a partial sum, an addend, or where the stream passes a
normalization, its result (as between the blocks of BERT). No names of modules are read, so the roles hold for all families.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from lrpfx.errors import UnsupportedOperationError
from lrpfx.ir.kinds import Embedding, Linear, MatMul, Softmax, Sum, WeightedValues
from lrpfx.ir.node import (
    NodeInfo,
    ancestors_of,
    calls_before_output,
    function_name,
    is_data,
    node_info,
    nodes_in,
)


@dataclass(frozen=True)
class Projection:
    """A dense layer of an attention that makes queries, keys or values. `heads`: the operand of the attention that it makes."""

    role: str  # "q", "k" or "v"
    node: fx.Node
    heads: fx.Node

    @property
    def source(self) -> fx.Node:
        return data_input(self.node)


@dataclass(frozen=True)
class Branch:
    """What reads the stream at a point and adds to it.

    `point`: None for an embedding, which reads the inputs of the model. `entry`: the first node that all paths from the point
    into this branch pass and that no other branch reads. Of an attention, `core` is the product of weights and values, and
    `written` the output projection; otherwise it is the addend itself.
    """

    name: str
    layer: int | None
    addend: fx.Node
    point: fx.Node | None
    written: fx.Node
    entry: fx.Node | None = None
    core: fx.Node | None = None
    projections: tuple[Projection, ...] = ()


@dataclass(frozen=True)
class Content:
    """What a point of the stream adds up: addends in the order of the graph, and what the stream was before a normalization."""

    addends: tuple[fx.Node, ...]
    base: fx.Node | None = None


@dataclass(frozen=True)
class Stream:
    """A residual stream. `contents`: of its points. `sources`: of each base, the point that it normalizes."""

    last: fx.Node
    contents: Mapping[fx.Node, Content]
    sources: Mapping[fx.Node, fx.Node]
    branches: tuple[Branch, ...]
    roles: Mapping[str, fx.Node]  # `layers.0.resid_mid` -> its point

    @cached_property
    def shaped(self) -> fx.Node:
        """An addend of shape (batch, positions, features); others may be flattened to (batch · positions, features)."""
        for branch in self.branches:
            if len(node_info(branch.addend).shape or ()) == 3:
                return branch.addend
        raise UnsupportedOperationError(
            f"the stream that ends in {node_info(self.last).located} has not the shape (batch, positions, features)",
            topic="circuits",
        )

    def before(self, point: fx.Node) -> Iterator[tuple[fx.Node, Content]]:
        """The points of which a point is made, one for each normalization of the stream, with what each adds up."""
        while True:
            content = self.contents[point]
            yield point, content
            if content.base is None:
                return
            point = self.sources[content.base]


def data_input(node: fx.Node) -> fx.Node:
    """The first argument of a call that depends on the inputs."""
    return next(one for one in node.all_input_nodes if is_data(one))


def find_stream(graph: fx.Graph) -> Stream:
    """The residual stream of a graph.

    Raises `UnsupportedOperationError` where the structure is another one, with the operation and its line.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    explained = calls_before_output(graph)
    cores = [node for node in explained if is_of_kind(node, WeightedValues)]
    if not cores:
        raise UnsupportedOperationError(
            "the graph has no attention: circuits are those of transformers with attention weights from a softmax",
            topic="circuits",
        )
    problems: dict[str, None] = {}
    for node in reversed(explained):
        if _is_sum(node) and len(_addends(node)) > 1:
            found = _Search(node, order)
            missing = found.problem(cores)
            if missing is None:
                return found.stream()
            problems[missing] = None
    raise UnsupportedOperationError(
        "no residual stream was found to which every attention adds its result. " + next(iter(problems), ""), topic="circuits"
    )


class _Search:
    """The stream that ends in a sum."""

    def __init__(self, last: fx.Node, order: Mapping[fx.Node, int]) -> None:
        self.last = last
        self.order = order
        self.contents: dict[fx.Node, Content] = {}
        self.sources: dict[fx.Node, fx.Node] = {}
        self._expand(last)
        self.addends = sorted({one for found in self.contents.values() for one in found.addends}, key=order.__getitem__)
        self.insides = {addend: self._inside(addend) for addend in self.addends}

    def _expand(self, last: fx.Node) -> None:
        """Find what each point adds up, the points that others are made of first."""
        pending = [last]
        while pending:
            node = pending[-1]
            parts = [_same(one) for one in _addends(node)] if _is_sum(node) else []
            source = None if parts else _normalized(node)
            missing = [one for one in (*parts, *(() if source is None else (source,))) if one not in self.contents]
            if missing:
                pending += missing
                continue
            pending.pop()
            if source is not None:
                self.sources[node] = source
                self.contents[node] = Content((), node)
            elif parts:
                found = [self.contents[one] for one in parts]
                bases = {one.base for one in found if one.base is not None}
                addends = [addend for one in found for addend in one.addends]
                if len(bases) > 1 or len(set(addends)) < len(addends):
                    raise UnsupportedOperationError(
                        f"{node_info(node).located} adds up values that have addends in common, which is not a residual stream",
                        topic="circuits",
                    )
                self.contents[node] = Content(tuple(sorted(addends, key=self.order.__getitem__)), next(iter(bases), None))
            else:
                self.contents[node] = Content((node,))

    def _inside(self, addend: fx.Node) -> set[fx.Node]:
        """The nodes of the branch that ends in an addend."""
        found = {addend}
        pending = [addend]
        while pending:
            for read in pending.pop().all_input_nodes:
                if read not in found and is_data(read) and read.op != "placeholder" and read not in self.contents:
                    found.add(read)
                    pending.append(read)
        return found

    def _points(self, addend: fx.Node) -> list[fx.Node]:
        """The points of the stream that a branch reads."""
        inside = self.insides[addend]
        read = {one for node in inside for one in node.all_input_nodes if one in self.contents and one not in inside}
        return sorted(read, key=self.order.__getitem__)

    def problem(self, cores: Sequence[fx.Node]) -> str | None:
        """Why this is not the residual stream, or None."""
        owners = {core: [addend for addend in self.addends if core in self.insides[addend]] for core in cores}
        for core, found in owners.items():
            if len(found) != 1:
                return (
                    f"{node_info(core).located} does not add its result to the stream that ends in "
                    f"{node_info(self.last).located}: encoders with decoders have two streams"
                )
        for addend in self.addends:
            inside = [core for core in cores if core in self.insides[addend]]
            if len(inside) > 1:
                names = ", ".join(node_info(one).name for one in inside)
                return f"{node_info(addend).located} is made by several attentions, as in encoders with decoders: {names}"
            if len(self._points(addend)) > 1:
                names = ", ".join(node_info(one).name for one in self._points(addend))
                return f"{node_info(addend).located} reads several values of the stream: {names}"
        if all(self._points(addend) for addend in self.addends):
            return f"the stream that ends in {node_info(self.last).located} has no embedding"
        return None

    def stream(self) -> Stream:
        branches: list[Branch] = []
        starts: list[int] = []  # of the attentions so far: where their points stand in the graph
        names: dict[str, int] = {}
        embeddings = [addend for addend in self.addends if not self._points(addend)]
        for addend in self.addends:
            point = next(iter(self._points(addend)), None)
            core = next((one for one in self.insides[addend] if is_of_kind(one, WeightedValues)), None)
            if point is None:
                if core is not None:
                    names_of_addends = (node_info(one).name.partition(".dictionary.") for one in self.addends)
                    at = next((module for module, found, _ in names_of_addends if found), None)
                    raise UnsupportedOperationError(
                        f"{node_info(core).located} reads no residual stream"
                        + (
                            ""
                            if at is None
                            else f": the dictionary of {at!r} stands for the stream itself. Circuits take those "
                            "of MLPs and attentions; lrpfx.concepts.latent_graph shows latents of blocks"
                        ),
                        topic="circuits",
                    )
                module = node_info(addend).name.rpartition(".")[2]
                branches.append(
                    Branch(_numbered("embed" if len(embeddings) == 1 else f"embed.{module}", names), None, addend, None, addend)
                )
            elif core is not None:
                starts.append(self.order[point])
                layer = len(starts) - 1
                branches.append(self._attention(f"layers.{layer}.attn", layer, addend, point, core))
            else:
                layer = max(sum(start <= self.order[point] for start in starts) - 1, 0)
                name = _numbered(f"layers.{layer}.mlp", names)
                branches.append(Branch(name, layer, addend, point, addend, entry=self._entry(addend, point)))
        return Stream(self.last, self.contents, self.sources, tuple(branches), self._roles(branches))

    def _attention(self, name: str, layer: int, addend: fx.Node, point: fx.Node, core: fx.Node) -> Branch:
        inside = self.insides[addend]
        after = {node for node in inside if core in ancestors_of(node, lambda one: one in inside)}
        outputs = [node for node in after if is_of_kind(node, Linear)]
        if len(outputs) != 1:
            found = ", ".join(node_info(one).located for one in outputs) or "none"
            raise UnsupportedOperationError(
                f"the attention {node_info(core).located} has one dense layer behind it in known models, here: {found}",
                topic="circuits",
            )
        weights, values = (one for one in core.all_input_nodes if is_data(one))
        if _softmax(weights) is None:
            weights, values = values, weights
        scores = _back_to(_softmax(weights), MatMul, core)
        queries, keys = (one for one in scores.all_input_nodes if is_data(one))
        operands = {"q": queries, "k": keys, "v": values}
        projections = tuple(Projection(role, self._projection(one, core), one) for role, one in operands.items())
        return Branch(name, layer, addend, point, outputs[0], core=core, projections=projections)

    def _projection(self, operand: fx.Node, core: fx.Node) -> fx.Node:
        """The dense layer that makes an operand of an attention."""
        found, seen, pending = set(), {operand}, [operand]
        while pending:
            node = pending.pop()
            if is_of_kind(node, Linear) or node in self.contents:
                found.add(node)
                continue
            reads = [one for one in node.all_input_nodes if is_data(one) and one not in seen]
            seen.update(reads)
            pending += reads
        if len(found) != 1 or not is_of_kind(next(iter(found)), Linear):
            names = ", ".join(sorted(node_info(one).located for one in found))
            raise UnsupportedOperationError(
                f"{node_info(operand).located}, of the attention {node_info(core).name}, is not made by one dense layer: "
                f"{names}",
                topic="circuits",
            )
        return found.pop()

    def _entry(self, addend: fx.Node, point: fx.Node) -> fx.Node:
        inside = self.insides[addend]
        for node in sorted(inside, key=self.order.__getitem__):
            if all(user in inside for user in node.users if not _is_dead(user)) or node is addend:
                around = ancestors_of(addend, _along({*inside, point} - {node}))
                if node is addend or point not in around:
                    return node
        return addend

    def _roles(self, branches: Sequence[Branch]) -> dict[str, fx.Node]:
        """The points by role: before each attention, before an MLP that reads another point, and after the last addend."""
        roles: dict[str, fx.Node] = {}
        for branch in branches:
            if branch.core is not None and branch.point is not None:
                roles[f"layers.{branch.layer}.resid_pre"] = branch.point
            elif branch.point is not None and branch.point not in roles.values():
                roles[_unused(f"layers.{branch.layer}.resid_mid", roles)] = branch.point
        last = max(branch.layer for branch in branches if branch.layer is not None)
        roles[f"layers.{last}.resid_post"] = self.last
        return roles


def _unused(name: str, known: Mapping[str, fx.Node]) -> str:
    number = 1
    found = name
    while found in known:
        found, number = f"{name}_{number}", number + 1
    return found


def _numbered(name: str, names: dict[str, int]) -> str:
    """A name, with a number if it was used before."""
    names[name] = names.get(name, -1) + 1
    return f"{name}_{names[name]}" if names[name] else name


def is_of_kind(node: fx.Node, kind: type) -> bool:
    """Whether a node depends on the inputs and has a kind."""
    info: NodeInfo = node_info(node)
    return is_data(node) and info.kind is not None and issubclass(info.kind, kind)


def _along(nodes: Collection[fx.Node]) -> Callable[[fx.Node], bool]:
    return lambda node: node in nodes


def _is_dead(node: fx.Node) -> bool:
    """Whether nothing reads the entries of a node's value."""
    return node.op != "output" and not node.users


def _is_sum(node: fx.Node) -> bool:
    """Whether a node is a plain sum of tensors, each of the shape of the result where it depends on the inputs."""
    if not is_of_kind(node, Sum) or (function_name(node) != "add" and "add" not in str(node.target)) or node.kwargs:
        return False
    shape = node_info(node).shape
    return shape is not None and all(node_info(one).shape == shape for one in _addends(node))


def _addends(node: fx.Node) -> list[fx.Node]:
    return [one for one in nodes_in(node.args) if is_data(one)]


def _same(node: fx.Node) -> fx.Node:
    """The node whose value a node hands on, or converts to another type."""
    while True:
        row, source = node_info(node).operator, node.args[0] if node.args else None
        hands_on = row is not None and row.entries.elementwise and (row.entries.converts or row.entries.keeps_order)
        if not is_data(node) or not hands_on or not isinstance(source, fx.Node) or not is_data(source):
            return node
        node = source


def _normalized(node: fx.Node) -> fx.Node | None:
    """The sum that a value is a function of, without a dense layer, an attention or an embedding between, or None."""
    found, pending, seen = set(), [node], {node}
    while pending:
        one = pending.pop()
        if one.op == "placeholder" or is_of_kind(one, Linear) or is_of_kind(one, MatMul) or is_of_kind(one, Embedding):
            return None
        if one is not node and _is_sum(one) and len(_addends(one)) > 1:
            found.add(one)
            continue
        reads = [_same(read) for read in one.all_input_nodes if is_data(read)]
        pending += [read for read in reads if read not in seen]
        seen.update(reads)
    return found.pop() if len(found) == 1 else None


def _softmax(node: fx.Node | None) -> fx.Node | None:
    """The softmax that attention weights come from."""
    while node is not None and not is_of_kind(node, Softmax):
        reads = [one for one in node.all_input_nodes if is_data(one)]
        if len(reads) != 1 or is_of_kind(node, MatMul) or is_of_kind(node, Linear):
            return None
        node = reads[0]
    return node


def _back_to(node: fx.Node | None, kind: type, core: fx.Node) -> fx.Node:
    """The nearest node of a kind from which a node is computed alone."""
    start = node
    while node is not None and not is_of_kind(node, kind):
        reads = [one for one in node.all_input_nodes if is_data(one)]
        node = reads[0] if len(reads) == 1 else None
    if node is None or len([one for one in node.all_input_nodes if is_data(one)]) != 2:
        place = node_info(core if start is None else start).located
        raise UnsupportedOperationError(
            f"the scores of the attention {place} are not a product of queries and keys", topic="circuits"
        )
    return node
