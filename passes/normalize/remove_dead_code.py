"""NORMALIZE: remove unused nodes, and the assertions that tracing inserts."""

import torch
from torch import fx

from lrpfx.ir.node import Role, calls, node_info
from lrpfx.operators.table import writes_in_place
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import LIVE, OUT_OF_PLACE


class RemoveDeadCode(GraphPass):
    """Remove assertions and every call with an unused result."""

    name = "remove_dead_code"
    stage = "normalize"
    requires = (OUT_OF_PLACE,)
    ensures = (LIVE,)

    def run(self, program: Program) -> PassResult:
        before = len(program.graph.nodes)
        for node in list(calls(program.graph)):
            if node.target is torch._assert:
                program.graph.erase_node(node)
        remove_unread(program.graph)
        return PassResult(before - len(program.graph.nodes))


def remove_unread(graph: fx.Graph) -> None:
    """Remove the nodes that nothing reads, and those that only they read.

    It is like `Graph.eliminate_dead_code`, which takes no test for side effects in older versions of torch.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node has an effect besides its value. Tensors made from shapes may still be overwritten in place."""
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and node_info(node).role is Role.METADATA and bool(node.args) and writes_in_place(node)
