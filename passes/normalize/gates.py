"""NORMALIZE: products in which one factor scales the other are told from products of equals."""

from lrpfx.passes.program import Pass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, GATED
from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, update_info
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.functions import gate, quotient
from lrpfx.operators.table import is_neutral, operator_named
from lrpfx.types import Product, Sum


class FindGates(Pass):
    """Mark a product as a gate where one factor comes from a bounded function or a divisor: its first argument is the signal.

    A factor is followed back through views, constant factors and constant terms: 0.5 * (1 + erf(x)) scales what it is
    multiplied with.
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
            if operator not in ("mul", "div") or not all(is_data(argument) for argument in node.args[:2]):
                continue
            first, second = node.args[:2]
            assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
            if operator == "div":
                if "rounding_mode" in node.kwargs:
                    continue
                node.target = quotient
                update_info(node, operator="quotient", kind="Gate")
            else:
                if _certainty(first) == _certainty(second):
                    result.reasons.append((node_info(node).name, "no factor is known to scale the other"))
                    continue
                signal, scale = (first, second) if _certainty(first) < _certainty(second) else (second, first)
                node.target, node.args = gate, (signal, scale)
                update_info(node, operator="gate", kind="Gate")
            result.matches += 1
            result.details.append((node_info(node).name, f"scaled by {node_info(node.all_input_nodes[-1]).name}"))
        return result


def _certainty(value: fx.Node) -> int:
    """How surely `value` scales what it is multiplied with."""
    while value.op == "call_function":
        name = node_info(value).operator
        operator = operator_named(name)
        if operator is None:
            return 0
        if operator.scales:
            return operator.scales
        if operator.name == "clamp":
            bound = bound_arguments(value, operator)
            return int(bound.get("min") is not None and bound.get("max") is not None)
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        affine = issubclass(operator.kind, (Product, Sum)) or is_neutral(name)
        if not affine or len(data) != 1:
            return 0
        value = data[0]
    return 0
