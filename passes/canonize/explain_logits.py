"""CANONIZE: explain the logits of a network that returns probabilities.

A softmax saturates: near p = 1, the probability of a class barely depends on its lead over the other classes.
"""

from torch import fx

from lrpfx.errors import InputError
from lrpfx.ir.final_probabilities import data_sources, is_read_inside, path_to_probabilities
from lrpfx.ir.node import node_info, nodes_in, update_info
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
            path = path_to_probabilities(leaf)
            if not path or is_read_inside(path):
                continue
            *behind, probabilities = path
            (value,) = data_sources(probabilities)
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


def _copy_that_reads(value: fx.Node, node: fx.Node, path: list[fx.Node]) -> fx.Node:
    """A copy of a node of the path that reads `value` instead of its predecessor on the path."""
    return node.graph.node_copy(node, lambda source: value if source in path else source)
