"""CANONIZE: explain the logits of a network that returns probabilities.

A softmax saturates: near p = 1, the probability of a class barely depends on its lead over the other classes.
"""

from torch import fx

from lrpfx.errors import InputError
from lrpfx.ir.node import Role, node_info, nodes_in, update_info
from lrpfx.ir.operator import Probability
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, LIVE


class ExplainLogits(GraphPass):
    """Let the network return the input of its final softmax or sigmoid. `InputError` if it ends in neither."""

    name = "explain_logits"
    stage = "canonize"
    requires = (
        CANONICAL,
        LIVE,
    )
    changes_outputs = True

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        (output,) = graph.find_nodes(op="output")
        replaced: dict[fx.Node, fx.Node] = {}
        left: set[fx.Node] = set()
        copies: dict[fx.Node, fx.Node] = {}  # of nodes that move entries of the probabilities
        for leaf in dict.fromkeys(nodes_in(output.args)):
            path = _path_to_probabilities(leaf)
            if not path or _is_read_inside(path):
                continue
            *behind, probabilities = path
            (value,) = _data_of(probabilities)
            for node in reversed(behind):
                if node_info(node).neutral:
                    with graph.inserting_before(output):
                        value = copies[node] = _copy_that_reads(value, node, path)
            replaced[leaf] = value
            left.update(path)
            result.match(node_info(probabilities).name, "removed: its input is the output")
        if not replaced:
            ends = [f"{node_info(leaf).name} ({node_info(leaf).operator})" for leaf in nodes_in(output.args)]
            raise InputError(
                f'explain="logits" needs a model that ends in a softmax or a sigmoid, but {program.title} ends in '
                + ", ".join(ends),
                topic="softmax-at-the-end",
            )
        output.args = fx.node.map_arg(output.args, lambda leaf: replaced.get(leaf, leaf))
        for node in reversed(graph.nodes):
            if node in left and not node.users:
                graph.erase_node(node)
        kept = set(graph.nodes)
        for node, copied in copies.items():
            if node in kept:
                update_info(copied, name=f"{node_info(node).name}_of_logits")
        return result


def final_softmax(leaf: fx.Node) -> fx.Node | None:
    """The softmax whose result, or its logarithm, is the output `leaf` of the network; None if there is none."""
    node = final_probabilities(leaf)
    operator = None if node is None else node_info(node).operator
    return node if operator is not None and operator.values.probability is Probability.OF_ALL_LOGITS else None


def final_probabilities(leaf: fx.Node) -> fx.Node | None:
    """The softmax or sigmoid whose result, or its logarithm, is the output `leaf` of the network; None if there is none."""
    path = _path_to_probabilities(leaf)
    return path[-1] if path and not _is_read_inside(path) else None


def _path_to_probabilities(leaf: fx.Node) -> list[fx.Node]:
    """The nodes from an output back to the softmax or sigmoid that computes it; empty if there is none."""
    path: list[fx.Node] = []
    node = leaf
    while node.op in ("call_function", "call_module"):
        path.append(node)
        row = node_info(node).operator
        if row is None:
            return []
        if row.values.probability is not None:
            return path
        sources = _data_of(node)
        if len(sources) != 1 or not (row.neutral or row.values.logarithm):
            return []
        (node,) = sources
    return []


def _data_of(node: fx.Node) -> list[fx.Node]:
    """The arguments of a node that depend on the input."""
    read = dict.fromkeys(nodes_in((node.args, node.kwargs)))
    return [source for source in read if node_info(source).role is Role.DATA]


def _copy_that_reads(value: fx.Node, node: fx.Node, path: list[fx.Node]) -> fx.Node:
    """A copy of a node of the path that reads `value` instead of its predecessor on the path."""
    return node.graph.node_copy(node, lambda source: value if source in path else source)


def _is_read_inside(path: list[fx.Node]) -> bool:
    """Whether the network computes with the probabilities, as attention does."""
    pending = [user for node in path for user in node.users if user not in path]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen or node.op == "output" or node_info(node).role is not Role.DATA:
            continue
        if not node_info(node).neutral:
            return True
        seen.add(node)
        pending += node.users
    return False
