"""ANALYZE: the sign of every value, by abstract interpretation over the operators.

Facts follow from the rows of operators, from numbers and from what the user says of the inputs, never from the values of
parameters, which may change. Where nothing is known a value is of unknown sign.
"""

from torch import fx

from lrpfx.ir.node import Role, Sign, calls, node_info, update_info
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import Pass, PassResult, Program


class AnalyzeSigns(Pass):
    """Write into the metadata which values are known not to be negative, or not to be positive.

    `ranges`: for inputs by name (or all, under None) the lowest and the highest value.
    """

    name = "analyze_signs"
    stage = "analyze"
    edits = False

    def __init__(self, ranges: dict[str | None, tuple[float, float]] | None = None) -> None:
        self.ranges = ranges or {}

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                value_range = self.ranges.get(str(node.target), self.ranges.get(None))
                if value_range is not None:
                    low, high = value_range
                    sign = Sign.NONNEGATIVE if low >= 0 else Sign.NONPOSITIVE if high <= 0 else Sign.UNKNOWN
                    update_info(node, sign=sign, value_range=(float(low), float(high)))
        for node in calls(program.graph):
            info = node_info(node)
            if info.role in (Role.PARAMETER, Role.METADATA) or node.op != "call_function":
                continue
            sign = _sign_of_call(node)
            if sign is not Sign.UNKNOWN:
                update_info(node, sign=sign)
                if info.role is Role.DATA:
                    result.matches += 1
                    result.details.append((info.name, sign.value))
        return result


def _sign_of_call(node: fx.Node) -> Sign:
    operator = operator_named(node_info(node).operator)
    if operator is None or operator.sign is None:
        return Sign.UNKNOWN
    if operator.arguments:
        bound = {**operator.arguments, **bound_arguments(node, operator)}
    else:
        bound = {"input": node.args[0] if node.args else None}
    return operator.sign(bound)
