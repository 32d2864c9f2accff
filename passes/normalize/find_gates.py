"""NORMALIZE: distinguish gates, in which one factor scales the other, and gated products from ordinary products."""

from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, update_info
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, GATED
from lrpfx.types import Activation, Gate, Product, Sum


class FindGates(GraphPass):
    """Mark a product as a gate if one factor is a divisor or comes from a bounded function. The other factor is the signal.

    The signal becomes the first argument. A product of a signal and an activation, which is not bounded, is a gated product.
    The pass looks through views, constant factors, constant terms and other gates: it recognizes 0.5 * (1 + erf(x)) as a
    scale, and probabilities that are divided by their sum.
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
                    if _is_activation(signal) == _is_activation(scale) or not operator.activated:
                        result.reasons.append((node_info(node).name, "no factor is known to scale the other"))
                        continue
                    if _is_activation(signal):
                        signal, scale = scale, signal
                    _change(node, operator.activated, signal, scale)
                    result.matches += 1
                    result.details.append((node_info(node).name, f"activated: {node_info(scale).name}"))
                    continue
                if _certainty(signal) > _certainty(scale):
                    signal, scale = scale, signal
            _change(node, operator.scaled, signal, scale)
            result.matches += 1
            result.details.append((node_info(node).name, f"scaled by {node_info(node.all_input_nodes[-1]).name}"))
        return result


def _change(node: fx.Node, name: str, signal: fx.Node, factor: fx.Node) -> None:
    """Make a product a call of the row called `name`."""
    row = operator_named(name)
    node.target, node.args = row.canonical, (signal, factor)
    update_info(node, operator=row)


def _is_activation(value: fx.Node) -> bool:
    """Whether a value is that of an activation, or of a gate such as a spelled-out GELU."""
    while value.op == "call_function":
        row = node_info(value).operator
        if row is None:
            return False
        if row.kind is Activation or row.kind is Gate:
            return True
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        if not row.neutral or len(data) != 1:
            return False
        value = data[0]
    return False


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
