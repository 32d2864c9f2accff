"""ANALYZE: the sign of every value, by abstract interpretation over the operators.

Facts follow from operators, numbers and what the user says of the inputs, never from the values of parameters, which may
change. Where nothing is known a value is of unknown sign.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from lrpfx.layer_view import bound_arguments
from lrpfx.node import Role, Sign, calls, node_info, update_info
from lrpfx.operators import operator_named
from lrpfx.types import AvgPool, MaxPool, Neutral

from .program import Pass, PassResult, Program

_POSITIVE, _NEGATIVE, _UNKNOWN = Sign.NONNEGATIVE, Sign.NONPOSITIVE, Sign.UNKNOWN


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
                    sign = _POSITIVE if low >= 0 else _NEGATIVE if high <= 0 else _UNKNOWN
                    update_info(node, sign=sign, value_range=(float(low), float(high)))
        for node in calls(program.graph):
            info = node_info(node)
            if info.role is not Role.DATA or node.op != "call_function":
                continue
            sign = _sign_of_call(node)
            if sign is not _UNKNOWN:
                update_info(node, sign=sign)
                result.matches += 1
                result.details.append((info.name, sign.value))
        return result


# --- what is known of arguments ------------------------------------------------------------------------------------------


def _sign_of(argument: Any) -> Sign:
    if isinstance(argument, fx.Node):
        info = node_info(argument)
        return info.sign if info.role is Role.DATA else _UNKNOWN
    if isinstance(argument, (int, float)):
        return _POSITIVE if argument >= 0 else _NEGATIVE
    return _UNKNOWN


def _is_zero(argument: Any) -> bool:
    return isinstance(argument, (int, float)) and argument == 0


def _joined(arguments: Sequence[Any]) -> Sign:
    """What holds of all arguments; the number 0 has either sign."""
    signs = {_sign_of(argument) for argument in arguments if not _is_zero(argument)}
    return signs.pop() if len(signs) == 1 else _UNKNOWN


def _flipped(sign: Sign) -> Sign:
    return {_POSITIVE: _NEGATIVE, _NEGATIVE: _POSITIVE}.get(sign, _UNKNOWN)


def _product(first: Sign, second: Sign) -> Sign:
    if _UNKNOWN in (first, second):
        return _UNKNOWN
    return _POSITIVE if first is second else _NEGATIVE


# --- what operators do to signs ----------------------------------------------------------------------------------------------

# fmt: off
#: Results that are never negative.
_NEVER_NEGATIVE = frozenset({
    "relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "masked_softmax", "softplus", "exp", "square", "abs", "sqrt", "rsqrt",
    "norm", "std", "var",
})
#: Functions f with f(x) >= 0 for x >= 0 and f(x) <= 0 for x <= 0.
KEEPS_SIGN = frozenset({
    "silu", "gelu", "mish", "hardswish", "tanh", "tanhshrink", "softsign", "softshrink", "hardshrink", "erf", "atan", "selu",
    "reciprocal", "expm1", "log1p", "normalize", "sum", "cumsum", "fold", "col2im",
})
#: Neutral operators that put several tensors together.
_COMBINING = frozenset({"cat", "stack", "hstack", "vstack", "dstack", "where", "maximum", "minimum"})
#: Neutral operators whose results are not all values of their first argument.
_MIXED = frozenset({
    "max", "min", "topk", "sort", "slice_scatter", "select_scatter", "index_put", "scatter", "copy", "fill", "attention_bias",
    "padding_bias", "head_bias", "container", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "argsort", "logical_not",
    "isnan", "isinf", "bitwise_not", "logical_and", "logical_or", "all", "any", "bitwise_and", "bitwise_or", "invert",
})
# fmt: on


def _sign_of_call(node: fx.Node) -> Sign:
    operator = operator_named(node_info(node).operator)
    if operator is None:
        return _UNKNOWN
    if operator.name in _NEVER_NEGATIVE:
        return _POSITIVE
    if operator.name in ("logsigmoid", "log_softmax"):
        return _NEGATIVE
    bound = {**operator.arguments, **bound_arguments(node, operator)} if operator.arguments else {}
    special = _SPECIAL.get(operator.name)
    if special is not None:
        return special(bound)
    first = bound.get("input", node.args[0] if node.args else None)
    if operator.name in KEEPS_SIGN:
        return _sign_of(first)
    if operator.name in _COMBINING:
        return _of_combination(operator.name, node)
    if operator.name in _MIXED:
        return _UNKNOWN
    if issubclass(operator.kind, AvgPool):
        return _sign_of(first) if bound.get("divisor_override") is None else _UNKNOWN
    return _sign_of(first) if issubclass(operator.kind, (MaxPool, Neutral)) else _UNKNOWN


def _of_combination(name: str, node: fx.Node) -> Sign:
    if name in ("cat", "stack", "hstack", "vstack", "dstack"):
        tensors = node.args[0] if node.args else node.kwargs.get("tensors")
        return _joined(list(tensors)) if isinstance(tensors, (list, tuple)) else _UNKNOWN
    if len(node.args) < (3 if name == "where" else 2):
        return _UNKNOWN
    return _joined(node.args[1:3] if name == "where" else node.args[:2])


def _of_clamp(bound: dict[str, Any], low: str = "min", high: str = "max") -> Sign:
    minimum, maximum = bound.get(low), bound.get(high)
    if isinstance(minimum, (int, float)) and minimum >= 0 and (maximum is None or _sign_of(maximum) is _POSITIVE):
        return _POSITIVE
    if isinstance(maximum, (int, float)) and maximum <= 0 and (minimum is None or minimum <= maximum):
        return _NEGATIVE
    within = (minimum is None or _is_zero(minimum) or _sign_of(minimum) is _NEGATIVE) and (
        maximum is None or _is_zero(maximum) or _sign_of(maximum) is _POSITIVE
    )
    return _sign_of(bound["input"]) if within else _UNKNOWN


def _of_leaky(bound: dict[str, Any]) -> Sign:
    slope = bound.get("negative_slope")
    return _sign_of(bound["input"]) if isinstance(slope, (int, float)) and slope >= 0 else _UNKNOWN


def _of_threshold(bound: dict[str, Any]) -> Sign:
    """Values above the threshold stay, all others become `value`."""
    above = _sign_of(bound["threshold"]) is _POSITIVE or _sign_of(bound["input"]) is _POSITIVE
    return _POSITIVE if above and _sign_of(bound["value"]) is _POSITIVE else _UNKNOWN


def _of_power(bound: dict[str, Any]) -> Sign:
    exponent = bound["exponent"]
    even = isinstance(exponent, (int, float)) and exponent % 2 == 0
    return _POSITIVE if even or _sign_of(bound["input"]) is _POSITIVE else _UNKNOWN


def _of_sum(bound: dict[str, Any], negated: tuple[bool, bool] = (False, False)) -> Sign:
    """Input + alpha * other, with either negated."""
    alpha = bound.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return _UNKNOWN
    terms = []
    for value, negative in zip((bound["input"], bound["other"]), negated, strict=True):
        if not _is_zero(value):
            terms.append(_flipped(_sign_of(value)) if negative else _sign_of(value))
    scaled = 0 if negated == (True, False) else 1  # which operand alpha belongs to
    if len(terms) == 2 and alpha < 0:
        terms[scaled] = _flipped(terms[scaled])
    elif alpha < 0:
        return _UNKNOWN
    return terms[0] if len(set(terms)) == 1 else _UNKNOWN


def _of_product(bound: dict[str, Any]) -> Sign:
    if isinstance(bound["input"], fx.Node) and bound["input"] is bound["other"]:
        return _POSITIVE
    return _product(_sign_of(bound["input"]), _sign_of(bound["other"]))


def _of_quotient(bound: dict[str, Any]) -> Sign:
    return _UNKNOWN if bound.get("rounding_mode") else _of_product(bound)


def _of_interpolation(bound: dict[str, Any]) -> Sign:
    """Bicubic weights are negative in places."""
    return _UNKNOWN if bound.get("mode") == "bicubic" else _sign_of(bound["input"])


def _of_padding(bound: dict[str, Any]) -> Sign:
    return _joined([bound["input"], bound.get("value") or 0]) if bound.get("mode") == "constant" else _sign_of(bound["input"])


_SPECIAL: dict[str, Callable[[dict[str, Any]], Sign]] = {
    "clamp": _of_clamp,
    "clamp_min": _of_clamp,
    "hardtanh": lambda bound: _of_clamp(bound, "min_val", "max_val"),
    "leaky_relu": _of_leaky,
    "elu": lambda bound: _sign_of(bound["input"]) if _sign_of(bound["alpha"]) is _POSITIVE else _UNKNOWN,
    "celu": lambda bound: _sign_of(bound["input"]) if _sign_of(bound["alpha"]) is _POSITIVE else _UNKNOWN,
    "prelu": lambda bound: _POSITIVE if _sign_of(bound["input"]) is _POSITIVE else _UNKNOWN,
    "threshold": _of_threshold,
    "pow": _of_power,
    "add": _of_sum,
    "sub": lambda bound: _of_sum(bound, (False, True)),
    "rsub": lambda bound: _of_sum(bound, (True, False)),
    "mul": _of_product,
    "gate": _of_product,
    "matmul": lambda bound: _product(_sign_of(bound["input"]), _sign_of(bound["other"])),
    "div": _of_quotient,
    "quotient": _of_quotient,
    "divided_by": _of_product,
    "neg": lambda bound: _flipped(_sign_of(bound["input"])),
    "interpolate": _of_interpolation,
    "pad": _of_padding,
    "masked_fill": lambda bound: _joined([bound["input"], bound["value"]]),
}
