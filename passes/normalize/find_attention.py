"""NORMALIZE: distinguish the product of attention weights and values from other matrix products."""

from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, nodes_in, update_info
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED
from lrpfx.types import Softmax


class FindAttention(GraphPass):
    """Mark a matrix product as weighted values if its first factor is a softmax, perhaps behind views, casts and constants."""

    name = "find_attention"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in calls(program.graph):
            row = node_info(node).operator
            if row is None or not row.weighted or node.kwargs:
                continue
            factors = [argument for argument in nodes_in(node.args) if is_data(argument)]
            if len(factors) != 2 or not _is_softmax(factors[0]) or any(isinstance(one, (tuple, list)) for one in node.args):
                continue
            weighted = operator_named(row.weighted)
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
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        if not (row.neutral or row.proportional_to) or len(data) != 1:
            return False
        value = data[0]
    return False
