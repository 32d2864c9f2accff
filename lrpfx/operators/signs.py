"""The sign of an operator's result, from the signs of its arguments.

Each function takes the arguments of a call by name, and returns the sign of all entries of the result, or `UNKNOWN`. The sign
is also unknown for a row of the operator table without such a function.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import fx

from lrpfx.ir.node import Role, node_info
from lrpfx.ir.operator import Bound, Sign

_POSITIVE, _NEGATIVE, _UNKNOWN = Sign.NONNEGATIVE, Sign.NONPOSITIVE, Sign.UNKNOWN


# --- signs of arguments --------------------------------------------------------------------------------------------------


def sign_of(argument: Any) -> Sign:
    """The sign of an argument: of a number, or the inferred sign of a node."""
    if isinstance(argument, fx.Node):
        info = node_info(argument)
        return info.sign if info.role in (Role.DATA, Role.DISCRETE, Role.CONSTANT) else _UNKNOWN
    if isinstance(argument, (int, float)):
        return _POSITIVE if argument >= 0 else _NEGATIVE if argument < 0 else _UNKNOWN
    return _UNKNOWN


def _is_zero(argument: Any) -> bool:
    return isinstance(argument, (int, float)) and argument == 0


def _joined(arguments: Sequence[Any]) -> Sign:
    """The common sign of all arguments; the number 0 fits both signs."""
    signs = {sign_of(argument) for argument in arguments if not _is_zero(argument)}
    return signs.pop() if len(signs) == 1 else _UNKNOWN


def _flipped(sign: Sign) -> Sign:
    return {_POSITIVE: _NEGATIVE, _NEGATIVE: _POSITIVE}.get(sign, _UNKNOWN)


def _product(first: Sign, second: Sign) -> Sign:
    if _UNKNOWN in (first, second):
        return _UNKNOWN
    return _POSITIVE if first is second else _NEGATIVE


# --- signs of results --------------------------------------------------------------------------------------------------------


def never_negative(bound: Bound) -> Sign:
    """For results that are never negative, for any arguments."""
    return _POSITIVE


def never_positive(bound: Bound) -> Sign:
    """For results that are never positive, for any arguments."""
    return _NEGATIVE


def of_input(bound: Bound) -> Sign:
    """For functions with f(x) >= 0 where x >= 0 and f(x) <= 0 where x <= 0, and sums of such values."""
    return sign_of(bound["input"])


def of_tensors(bound: Bound) -> Sign:
    """For operators that combine the tensors of a list."""
    tensors = bound["input"]
    return _joined(list(tensors)) if isinstance(tensors, (list, tuple)) else sign_of(tensors)


def of_both(bound: Bound) -> Sign:
    """For results whose entries are entries of `input` or of `other`."""
    return _joined([bound["input"], bound["other"]])


def flipped(bound: Bound) -> Sign:
    return _flipped(sign_of(bound["input"]))


def of_clamp(bound: Bound, low: str = "min", high: str = "max") -> Sign:
    minimum, maximum = bound.get(low), bound.get(high)
    if (_is_zero(minimum) or sign_of(minimum) is _POSITIVE) and (maximum is None or sign_of(maximum) is _POSITIVE):
        return _POSITIVE
    if _is_zero(maximum) or sign_of(maximum) is _NEGATIVE:  # torch uses the maximum if it is below the minimum
        return _NEGATIVE
    within = (minimum is None or _is_zero(minimum) or sign_of(minimum) is _NEGATIVE) and (
        maximum is None or _is_zero(maximum) or sign_of(maximum) is _POSITIVE
    )
    return sign_of(bound["input"]) if within else _UNKNOWN


def of_hardtanh(bound: Bound) -> Sign:
    return of_clamp(bound, "min_val", "max_val")


def of_leaky_relu(bound: Bound) -> Sign:
    slope = bound.get("negative_slope")
    return sign_of(bound["input"]) if isinstance(slope, (int, float)) and slope >= 0 else _UNKNOWN


def of_elu(bound: Bound) -> Sign:
    return sign_of(bound["input"]) if sign_of(bound["alpha"]) is _POSITIVE else _UNKNOWN


def of_prelu(bound: Bound) -> Sign:
    """For negative inputs, the slope is a parameter, so the sign is unknown."""
    return _POSITIVE if sign_of(bound["input"]) is _POSITIVE else _UNKNOWN


def of_softplus(bound: Bound) -> Sign:
    """The sign of log(1 + exp(beta x)) / beta. Above a negative threshold, the result is x itself and may be negative."""
    if sign_of(bound["threshold"]) is not _POSITIVE:
        return _UNKNOWN
    return sign_of(bound["beta"])


def of_threshold(bound: Bound) -> Sign:
    """Values above the threshold stay, all others become `value`."""
    above = sign_of(bound["threshold"]) is _POSITIVE or sign_of(bound["input"]) is _POSITIVE
    return _POSITIVE if above and sign_of(bound["value"]) is _POSITIVE else _UNKNOWN


def of_power(bound: Bound) -> Sign:
    exponent = bound["exponent"]
    even = isinstance(exponent, (int, float)) and exponent % 2 == 0
    return _POSITIVE if even or sign_of(bound["input"]) is _POSITIVE else _UNKNOWN


def of_exponential(bound: Bound) -> Sign:
    return _POSITIVE if sign_of(bound["other"]) is _POSITIVE else _UNKNOWN


def _of_sum(bound: Bound, negated: tuple[bool, bool]) -> Sign:
    """The sign of `input` + `alpha` * `other`, where `negated` tells which operands are negated."""
    alpha = bound.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return _UNKNOWN
    terms = []
    for value, negative in zip((bound["input"], bound["other"]), negated, strict=True):
        if not _is_zero(value):
            terms.append(_flipped(sign_of(value)) if negative else sign_of(value))
    scaled = 0 if negated == (True, False) else 1  # which operand alpha belongs to
    if len(terms) == 2 and alpha < 0:
        terms[scaled] = _flipped(terms[scaled])
    elif alpha < 0:
        return _UNKNOWN
    return terms[0] if len(set(terms)) == 1 else _UNKNOWN


of_sum = functools.partial(_of_sum, negated=(False, False))
of_difference = functools.partial(_of_sum, negated=(False, True))
of_reversed_difference = functools.partial(_of_sum, negated=(True, False))


def of_product(bound: Bound) -> Sign:
    if isinstance(bound["input"], fx.Node) and bound["input"] is bound["other"]:
        return _POSITIVE
    return _product(sign_of(bound["input"]), sign_of(bound["other"]))


def of_matrix_product(bound: Bound) -> Sign:
    return _product(sign_of(bound["input"]), sign_of(bound["other"]))


def of_quotient(bound: Bound) -> Sign:
    return _UNKNOWN if bound.get("rounding_mode") else of_product(bound)


def of_pooling(bound: Bound) -> Sign:
    """The sign of a mean over windows; unknown if the user overrides its divisor."""
    return sign_of(bound["input"]) if bound.get("divisor_override") is None else _UNKNOWN


def of_interpolation(bound: Bound) -> Sign:
    """The sign of the input, but unknown for bicubic weights, of which some are negative."""
    return _UNKNOWN if bound.get("mode") == "bicubic" else sign_of(bound["input"])


def of_padding(bound: Bound) -> Sign:
    return _joined([bound["input"], bound.get("value") or 0]) if bound.get("mode") == "constant" else sign_of(bound["input"])


def of_masked_fill(bound: Bound) -> Sign:
    return _joined([bound["input"], bound["value"]])
