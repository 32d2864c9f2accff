"""Stop gradients to inputs that the user declared constant."""

from dataclasses import replace

from lrpfx.ir.node import Role, node_info
from lrpfx.operators.functions import without_gradient
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import REWRITTEN


class CutConstants(GraphPass):
    """Detach declared constants at the input: operations that only move values have no rule that could stop relevance."""

    name = "cut_constants"
    stage = "rewrite"
    requires = (REWRITTEN,)
    unfinished = True

    def applies(self, program: Program) -> bool:
        return any(node_info(node).role is Role.CONSTANT for node in program.graph.find_nodes(op="placeholder"))

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for node in graph.find_nodes(op="placeholder"):
            info = node_info(node)
            if info.role is Role.CONSTANT and node.users:
                made = replace(info, name=f"{info.name}.constant", description="declared constant")
                cut = insert_call(graph, first, without_gradient, (node,), made)
                node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
                result.matches += 1
        return result
