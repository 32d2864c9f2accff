"""NORMALIZE: distinguish the product of attention weights and values from other matrix products."""

from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, nodes_in, update_info
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED
from lrpfx.types import Gate, Softmax


class FindAttention(GraphPass):
    """Mark a matrix product of which one factor is a softmax as weighted values, with the softmax as the first argument.

    The pass looks through views, casts, constant factors and divisors.
    """

    name = "find_attention"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in calls(program.graph):
            row = node_info(node).operator
            if row is None or not row.weighted or node.kwargs:
                continue
            args = node.args
            if len(args) == 2 and isinstance(args[1], (tuple, list)):  # the operands of an exported einsum
                args = (args[0], *args[1])
            *others, first, last = args
            factors = [argument for argument in (first, last) if isinstance(argument, fx.Node) and is_data(argument)]
            if len(factors) != 2 or nodes_in(others):
                continue
            if _is_softmax(factors[0]):
                weighted = operator_named(row.weighted)
            elif _is_softmax(factors[1]):
                weighted = operator_named(row.weighted_last)
                factors.reverse()
            else:
                continue
            node.args = (*others, *factors)
            node.target = weighted.function or next(iter(weighted.functions))
            update_info(node, operator=weighted)
            result.matches += 1
            result.details.append((node_info(node).name, f"values, weighted by {node_info(factors[0]).name}"))
        return result


def _is_softmax(value: fx.Node) -> bool:
    while value.op == "call_function":
        row = node_info(value).operator
        if row is None:
            return False
        if issubclass(row.kind, Softmax):
            return True
        if row.kind is Gate:  # a signal and its scale
            value = value.args[0]  # type: ignore[assignment]
            continue
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        if not (row.neutral or row.proportional_to) or len(data) != 1:
            return False
        value = data[0]
    return False
