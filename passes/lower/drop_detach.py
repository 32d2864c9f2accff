"""Remove operations that return their argument unchanged, such as `detach` in a graph that needs no gradient."""

from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import NO_DETACH, identities


class DropDetach(GraphPass):
    """Replace the results of `detach` and `alias` by their arguments."""

    name = "drop_detach"
    stage = "lower"
    ensures = (NO_DETACH,)

    def run(self, program: Program) -> PassResult:
        found = identities(program.graph)
        for node in found:
            (argument,) = node.all_input_nodes
            node.replace_all_uses_with(argument)
            program.graph.erase_node(node)
        return PassResult(len(found))
