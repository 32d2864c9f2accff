"""ANALYZE: find values whose relevance is provably zero wherever they are not positive.

The pass visits nodes in reverse order. If a rule's relevance is the input's value times a factor, it is zero where the value is
0. After a ReLU, the value is 0 wherever the ReLU's input is not positive. The result holds for relevance that enters at the
model's output.
"""

from torch import fx

from lrpfx.ir.kinds import Activation
from lrpfx.ir.node import Role, node_info, update_info
from lrpfx.ir.operator import Sign
from lrpfx.operators.signs import of_input
from lrpfx.passes.program import GraphPass as GraphPass
from lrpfx.passes.program import PassResult, Program
from lrpfx.passes.properties import ASSIGNED, SIGNED, SUPPORTED


class AnalyzeSupport(GraphPass):
    """Mark values whose relevance is zero wherever they are not positive. Needs rules and signs."""

    name = "analyze_support"
    stage = "analyze"
    requires = (
        ASSIGNED,
        SIGNED,
    )
    ensures = (SUPPORTED,)
    edits = False

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in reversed(program.graph.nodes):
            if node.op == "output" or node_info(node).role is not Role.DATA:
                continue
            if all(_gives_nothing_where_not_positive(user, node) for user in node.users):
                update_info(node, relevant_where_positive=True)
                result.match(node_info(node).name, "relevance only where the value is > 0")
        result.details.reverse()
        return result


def _gives_nothing_where_not_positive(user: fx.Node, node: fx.Node) -> bool:
    """Whether the relevance that `node` gets from `user` is zero wherever the value of `node` is not positive."""
    if user.op == "output":
        return False
    info = node_info(user)
    if info.role is not Role.DATA:  # it passes no relevance on
        return True
    operator = info.operator
    if info.rule is not None and not info.rule.passes_all:
        return info.rule.is_proportional and node_info(node).sign is Sign.NONNEGATIVE
    if operator is None or info.keeps_gradient or not info.relevant_where_positive:
        return False
    if info.rule is None:
        return operator.entries.moves or operator.entries.selects
    return operator.kind is Activation and (operator.values.sign is of_input or operator.values.keeps_nonpositive)
