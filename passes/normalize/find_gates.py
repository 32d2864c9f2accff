"""NORMALIZE: distinguish gating products, in which one factor scales the other, from ordinary ones."""

from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, update_info
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, GATED
from lrpfx.types import Gate, Product, Sum


class FindGates(GraphPass):
    """Mark a product as a gate if one factor is a divisor or comes from a bounded function. The other factor is the signal.

    The signal becomes the first argument. The pass looks through views, constant factors, constant terms and other gates: it
    recognizes 0.5 * (1 + erf(x)) as a scale, and probabilities that are divided by their sum.
    """

    name = "find_gates"
    stage = "normalize"
    requires = (
        CANONICAL,
        DECOMPOSED,
    )
    ensures = (GATED,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in calls(program.graph):
            operator = node_info(node).operator
            if operator is None or not operator.scaled or not all(is_data(argument) for argument in node.args[:2]):
                continue
            if operator.discrete_with in node.kwargs:
                continue
            signal, scale = node.args[:2]
            assert isinstance(signal, fx.Node) and isinstance(scale, fx.Node)
            if operator.affine_in == operator.data:  # either may be the signal
                if _certainty(signal) == _certainty(scale):
                    result.reasons.append((node_info(node).name, "no factor is known to scale the other"))
                    continue
                if _certainty(signal) > _certainty(scale):
                    signal, scale = scale, signal
            row = operator_named(operator.scaled)
            node.target, node.args = row.canonical, (signal, scale)
            update_info(node, operator=row)
            result.matches += 1
            result.details.append((node_info(node).name, f"scaled by {node_info(node.all_input_nodes[-1]).name}"))
        return result


def _certainty(value: fx.Node) -> int:
    """How certain it is that `value` scales the other factor of a product."""
    while value.op == "call_function":
        operator = node_info(value).operator
        if operator is None:
            return 0
        if callable(operator.scales):
            return operator.scales(bound_arguments(value, operator))
        if operator.scales:
            return operator.scales
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        if issubclass(operator.kind, Gate):  # a scale that is scaled itself, such as a share of a sum
            data = data[:1]
        affine = issubclass(operator.kind, (Product, Sum)) or operator.neutral
        if not affine or len(data) != 1:
            return 0
        value = data[0]
    return 0
