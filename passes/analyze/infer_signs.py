"""ANALYZE: infer the sign of every value by abstract interpretation over the operators.

Signs follow from the rows of operators, from numbers and from the input ranges that the user gives. They never depend on the
values of parameters, which may change. All other signs are unknown.
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from lrpfx.errors import InputError
from lrpfx.ir.node import Role, calls, node_info, update_info
from lrpfx.ir.operator import Sign
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, SIGNED

InputRange = tuple[float, float] | Mapping[str, tuple[float, float]] | None


class AnalyzeSigns(GraphPass):
    """Record in the metadata which values are known to be nonnegative or nonpositive.

    `input_range`: the pair (lowest, highest) of all inputs, or a dict of pairs by input name. `InputError` if it is invalid.
    """

    name = "analyze_signs"
    stage = "analyze"
    requires = (CANONICAL,)
    ensures = (SIGNED,)
    edits = False

    def __init__(self, input_range: InputRange = None) -> None:
        self.input_range = input_range

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        ranges = _ranges(program, self.input_range)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                value_range = ranges.get(str(node.target), ranges.get(None))
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
                    result.match(info.name, sign.value)
        return result


def _ranges(program: Program, input_range: InputRange) -> dict[str | None, tuple[float, float]]:
    """Ranges of inputs by name; the key None stands for all inputs. `InputError` if a name or range is invalid."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
    ranges: dict[str | None, Any] = {}
    if isinstance(input_range, Mapping):
        ranges.update(input_range)
    elif input_range is not None:
        ranges[None] = input_range
    for name, pair in ranges.items():
        if name is not None and name not in names:
            raise InputError(f"input_range is for {name!r}, but the inputs are {', '.join(names)}", topic="range-of-the-input")
        numbers = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(bound, (int, float)) for bound in pair)
        if not numbers or pair[0] > pair[1]:
            raise InputError(f"an input range is a pair of numbers (low, high), not {pair!r}", topic="range-of-the-input")
    return ranges


def _sign_of_call(node: fx.Node) -> Sign:
    operator = node_info(node).operator
    if operator is None or operator.values.sign is None:
        return Sign.UNKNOWN
    if operator.arguments:
        bound = {**operator.arguments, **bound_arguments(node, operator)}
    else:
        bound = {"input": node.args[0] if node.args else None}
    return operator.values.sign(bound)
