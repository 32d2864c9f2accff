"""Proofs that a condition holds for all sizes between limits, where samples could miss a pair of sizes."""

import ast
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy

Limits = Mapping[str, tuple[int, int | None]]  # the name of a size -> its smallest and largest value, None without a largest

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], list[Any]]] = {  # -> the differences of which one must be positive
    ast.Gt: lambda left, right: [left - right],
    ast.Lt: lambda left, right: [right - left],
    ast.GtE: lambda left, right: [left - right + 1],
    ast.LtE: lambda left, right: [right - left + 1],
    ast.NotEq: lambda left, right: [left - right, right - left],
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: sympy.floor(left / right),
    ast.Mod: sympy.Mod,
}


class _UnknownError(Exception):
    """The condition contains what this module knows nothing about."""


def is_proved(condition: str, limits: Limits) -> bool:
    """Whether a condition, a Python expression of integers, follows from the limits of its sizes.

    False says nothing about it: the proof knows sums, products, quotients, remainders, and a largest or smallest term that is
    always the same one.
    """
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in limits}
    try:
        return _follows(ast.parse(condition, mode="eval").body, symbols, limits)
    except (_UnknownError, ZeroDivisionError):
        return False


def _follows(node: ast.expr, symbols: Mapping[str, sympy.Symbol], limits: Limits) -> bool:
    if isinstance(node, ast.BoolOp):
        some = all if isinstance(node.op, ast.And) else any
        return some(_follows(value, symbols, limits) for value in node.values)
    if not isinstance(node, ast.Compare):
        raise _UnknownError
    terms = [_term(term, symbols, limits) for term in (node.left, *node.comparators)]
    for comparison, left, right in zip(node.ops, terms, terms[1:], strict=False):
        if isinstance(comparison, ast.Eq):
            if sympy.expand(left - right) != 0:
                return False
        elif type(comparison) not in _COMPARISONS:
            raise _UnknownError
        elif not any(_least(one, symbols, limits) > 0 for one in _COMPARISONS[type(comparison)](left, right)):
            return False
    return True


def _term(node: ast.expr, symbols: Mapping[str, sympy.Symbol], limits: Limits) -> Any:
    """A term, all of whose divisors are positive within the limits."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name) and node.id in symbols:
        return symbols[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_term(node.operand, symbols, limits)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        sign = 1 if node.func.id == "max" else -1
        terms = [_term(term, symbols, limits) for term in node.args]
        ends = [one for one in terms if all(_least(sign * (one - other), symbols, limits) > -1 for other in terms)]
        if not ends:
            raise _UnknownError
        return ends[0]
    if not isinstance(node, ast.BinOp):
        raise _UnknownError
    left, right = _term(node.left, symbols, limits), _term(node.right, symbols, limits)
    if isinstance(node.op, ast.Pow) and right.is_Integer and 0 <= right <= 8:
        return left**right
    if type(node.op) not in _ARITHMETIC:
        raise _UnknownError
    if isinstance(node.op, (ast.FloorDiv, ast.Mod)) and not _least(right, symbols, limits) > 0:
        raise _UnknownError
    if isinstance(node.op, ast.Mod) and _least(left, symbols, limits) > -1 and _least(right - left, symbols, limits) > 0:
        return left
    return _ARITHMETIC[type(node.op)](left, right)


def _least(term: Any, symbols: Mapping[str, sympy.Symbol], limits: Limits) -> Any:
    """A number that the term is never below, -oo if none is found."""
    term = sympy.expand(term)
    for part in sorted(term.atoms(sympy.floor, sympy.Mod), key=sympy.count_ops, reverse=True):  # a part may contain others
        name = sympy.Dummy()
        inner = term.subs(part, name)
        factor = sympy.expand(inner.coeff(name))
        positive = _least(factor, symbols, limits) >= 0
        if sympy.expand(inner - factor * name).has(name) or not (positive or _least(-factor, symbols, limits) >= 0):
            return -sympy.oo
        if isinstance(part, sympy.Mod):
            bound = 0 if positive else part.args[1] - 1
        else:  # the quotient, less what is lost at most when it is rounded down
            quotient = part.args[0]
            bound = quotient - 1 + 1 / sympy.denom(sympy.together(quotient)) if positive else quotient
        term = sympy.expand(inner.subs(name, bound))
    if term.atoms(sympy.floor, sympy.Mod):
        return _least(term, symbols, limits)
    if not term.is_polynomial(*symbols.values()):
        return -sympy.oo
    ends = [((1, lower), *([] if upper is None else [(-1, upper)])) for lower, upper in limits.values()]
    return max(_least_from(term, symbols, limits, chosen) for chosen in itertools.product(*ends))


def _least_from(polynomial: Any, symbols: Mapping[str, sympy.Symbol], limits: Limits, ends: tuple[tuple[int, int], ...]) -> Any:
    """The same, where each size is written as its distance from one of its limits: all distances are at least zero."""
    shifted = {symbol: end + sign * symbol for symbol, (sign, end) in zip(symbols.values(), ends, strict=True)}
    widths = [sympy.oo if upper is None else upper - lower for lower, upper in limits.values()]
    total = sympy.Integer(0)
    for powers, factor in sympy.Poly(polynomial.subs(shifted, simultaneous=True), *symbols.values()).terms():
        if not any(powers):
            total += factor
        elif factor < 0:
            largest = [width**power for width, power in zip(widths, powers, strict=True) if power]
            total += 0 if 0 in largest else factor * sympy.prod(largest)
    return total
