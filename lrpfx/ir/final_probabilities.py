"""The softmax or sigmoid at the end of a network."""

from torch import fx

from lrpfx.ir.node import Role, node_info, nodes_in
from lrpfx.ir.operator import Probability


def final_softmax(leaf: fx.Node) -> fx.Node | None:
    """The softmax whose result, or its logarithm, is the output `leaf` of the network; None if there is none."""
    node = final_probabilities(leaf)
    operator = None if node is None else node_info(node).operator
    return node if operator is not None and operator.values.probability is Probability.OF_ALL_LOGITS else None


def final_probabilities(leaf: fx.Node) -> fx.Node | None:
    """The softmax or sigmoid whose result, or its logarithm, is the output `leaf` of the network; None if there is none."""
    path = path_to_probabilities(leaf)
    return path[-1] if path and not is_read_inside(path) else None


def path_to_probabilities(leaf: fx.Node) -> list[fx.Node]:
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
        sources = data_sources(node)
        if len(sources) != 1 or not (row.neutral or row.values.logarithm):
            return []
        (node,) = sources
    return []


def data_sources(node: fx.Node) -> list[fx.Node]:
    """The arguments of a node that depend on the input."""
    read = dict.fromkeys(nodes_in((node.args, node.kwargs)))
    return [source for source in read if node_info(source).role is Role.DATA]


def is_read_inside(path: list[fx.Node]) -> bool:
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
