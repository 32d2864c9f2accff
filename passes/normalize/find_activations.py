"""NORMALIZE: replace element-wise functions that are written out, such as (1 + tanh(x / 2)) / 2, by activations.

As sums and products, their constants would take shares of the relevance, which an activation passes on whole.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lrpfx.ir.kinds import Activation, Neutral
from lrpfx.ir.node import (
    Role,
    calls,
    function_name,
    is_call_of,
    is_data,
    map_arguments,
    node_info,
    only_reader,
    readers,
    row_of,
)
from lrpfx.operators import mixing
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import spelling_of
from lrpfx.passes.constants import number_filling
from lrpfx.passes.normalize.call_builder import CallBuilder
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.program import GraphPass, PassResult, Program, replace_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, OUT_OF_PLACE

#: Where functions are compared: all bends of the activations lie between two of the points.
_POINTS = torch.cat(
    [torch.linspace(-7.3, 7.1, 41, dtype=torch.float64), torch.tensor([-1e-3, 0.0, 1e-3, 2.9, 3.1, -2.9, -3.1])]
)
_TOLERANCE = 1e-9  # relative: a small number that is added to a value is not rounding
_LARGEST = 12  # calls of an activation that is written out

#: Rows of which one takes part; products, quotients and scaled arguments alone are no activation of their own.
_JOINING = frozenset(
    {"add", "sub", "rsub", "expm1", "log", "log1p", "logsigmoid", "where", "maximum", "minimum", "masked_fill", "logaddexp"}
)

_Replacement = Callable[[Program, fx.Node, dict[fx.Node, int]], fx.Node | None]
_Candidate = tuple[str, Callable[..., torch.Tensor]]
#: Activations of a scaled value, and those with one number as their argument.
_OF_SCALED: tuple[_Candidate, ...] = (
    ("sigmoid", torch.sigmoid),
    ("tanh", torch.tanh),
    ("softplus", functional.softplus),
    ("logsigmoid", functional.logsigmoid),
    ("exp", torch.exp),
)
_PLAIN: tuple[_Candidate, ...] = (
    ("relu", torch.relu),
    ("relu6", functional.relu6),
    ("hardsigmoid", functional.hardsigmoid),
    ("softsign", functional.softsign),
    ("selu", functional.selu),
    ("elu", functional.elu),
)
_WITH_NUMBER: tuple[_Candidate, ...] = (
    ("elu", functional.elu),
    ("leaky_relu", functional.leaky_relu),
    ("celu", functional.celu),
    ("softplus", functional.softplus),
    ("softshrink", functional.softshrink),
    ("hardshrink", functional.hardshrink),
)
_FACTORS = (1, -1, 2, 0.5, -2, -0.5)


class FindActivations(GraphPass):
    """Replace calls that together are an activation of one value, with numbers as their only constants.

    They are known by their values: a function that agrees with an activation at all points to rounding is the activation.
    """

    name = "find_activations"
    stage = "normalize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def run(self, program: Program) -> PassResult:
        return _replace_all(program, (_replacement,))


class FindGatedProducts(GraphPass):
    """Replace products of signals and activations, in whatever order and parts they are written, by signal * activation(z)."""

    name = "find_gated_products"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        return _replace_all(program, (_common_product, _product, _gated_product, _replacement))


def _replace_all(program: Program, replacements: Sequence[_Replacement]) -> PassResult:
    """Replace the element-wise calls for which there is another one, from the last to the first, by each function in turn."""
    result = PassResult()
    for replacement in replacements:
        places, before = {node: place for place, node in enumerate(program.graph.nodes)}, result.matches
        for node in reversed(list(calls(program.graph))):
            new = replacement(program, node, places) if node.users and is_data(node) and is_pointwise(node) else None
            if new is not None:
                result.match(node_info(node).name, f"now {node_info(new).name}")
                replace_call(node, new)
        if result.matches > before:
            remove_unread(program.graph)
    return result


def _common_product(program: Program, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node | None:
    """Factor z + z * gate(z) as z * (1 + gate(z)), also with constants and other factors in common: it hides an activation."""
    if not (is_call_of(node, "add") or is_call_of(node, "sub")) or node.kwargs or not all(map(is_data, node.args)):
        return None
    (first, one), (last, other) = map(_number_and_factors, node.args)
    last = -last if is_call_of(node, "sub") else last
    shared = list((one & other).elements())
    terms = [(number, list((factors - Counter(shared)).elements())) for number, factors in ((first, one), (last, other))]
    (number, constants), (scale, gates) = sorted(terms, key=lambda term: any(map(is_data, term[1])))
    signals, scales = list(filter(is_data, shared)), list(filter(is_data, gates))
    gated = all(any(_is_gate_of(one, value, places) for value in signals) for one in scales)
    if any(map(is_data, constants)) or not scales or not gated:
        return None
    build = CallBuilder(program, node, row_of(node))
    added = _multiplied(build, [*constants, number] if number != 1 or not constants else constants)
    total = build.call("add", _multiplied(build, [*gates, scale] if scale != 1 else gates), added)
    product: fx.Node | None = _multiplied(build, [*shared, total])
    return product


def _number_and_factors(value: Any) -> tuple[float, Counter[fx.Node]]:
    """The number and the other factors of a product, whoever reads the products in it."""
    if not isinstance(value, fx.Node):
        return value, Counter()
    if is_call_of(value, "neg"):
        number, factors = _number_and_factors(value.args[0])
        return -number, factors
    if is_call_of(value, "div") and isinstance(value.args[1], (int, float)) and len(value.args) == 2 and not value.kwargs:
        number, factors = _number_and_factors(value.args[0])
        return number / value.args[1], factors
    if is_call_of(value, "mul"):
        (number, factors), (other, others) = map(_number_and_factors, value.args[:2])
        return number * other, factors + others
    return 1, Counter([value])


def _multiplied(build: CallBuilder, factors: Sequence[Any]) -> Any:
    return reduce(lambda one, other: build.call("mul", one, other), factors)


def _product(program: Program, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node | None:
    """Signals * activation(z), written otherwise: where(z > 0, signal * z, slope * signal * z), signal * (z + |z|) / 2."""
    found = None
    for sources, inner in _cuts(node, places, _read, 3):
        rows = [row_of(one) for one in (*inner, node)]
        names = {row.name for row in rows}
        if len(sources) == 1 or "mul" not in names or not (names & _JOINING or any(row.values.steps for row in rows)):
            continue
        for value in sources:
            signals = [one for one in sources if one is not value]
            if _scales_signals(value, signals, places) and all(_degree(node, one, [*inner, node]) == 1 for one in signals):
                same = _same_function(value, inner, node, signals)
                found = found if same is None or same[:2] == ("sigmoid", -1) else (same, value, signals)  # 1 - z stays
    if found is None:
        return None
    (name, factor, arguments), value, signals = found
    build = CallBuilder(program, node, row_of(node))
    return build.call("mul", _multiplied(build, signals), build.call(name, _scaled(build, value, factor), *arguments))


def _degree(node: Any, signal: fx.Node, calls_between: Sequence[fx.Node]) -> int | None:
    """1 for a value in proportion to a signal, 0 for one without it, None where that is unknown.

    `calls_between`: the call and those between them.
    """
    if node is signal:
        return 1
    if not isinstance(node, fx.Node) or node not in calls_between:
        return 0
    row, given = row_of(node), [_degree(one, signal, calls_between) for one in node.args]
    if all(degree == 0 for degree in (*given, *(_degree(one, signal, calls_between) for one in node.kwargs.values()))):
        return 0
    if row.name in ("mul", "div"):
        return 1 if given == [1, 0] or (given == [0, 1] and row.name == "mul") else None
    if row.name in ("add", "sub", "rsub", "neg"):
        return 1 if given and set(given) == {1} else None
    if row.entries.chooses:
        bound = bound_arguments(node, row)
        mask, *branches = (bound[name] for name in row.entries.chooses)
        given = [_degree(one, signal, calls_between) for one in branches if number_filling(one) != 0]
        return 1 if set(given) == {1} and _degree(mask, signal, calls_between) == 0 else None
    return None


def _scales_signals(value: fx.Node, factors: list[fx.Node], places: dict[fx.Node, int]) -> bool:
    """Whether factors beside a value and its gates are signals of their own, unlike log(z) in z * log(z), which has no end."""
    others = [one for one in factors if one is not value and not _is_gate_of(one, value, places)]
    return bool(others) and not any(value is source for one in others for source, _ in _sources(one, places))


def _gated_product(program: Program, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node | None:
    """(signal * z) * sigmoid(z) as signal * (z * sigmoid(z)), for any bounded function or mask of z, in any order."""
    factors = _factors(node) if _multiplies(node) and not _multiplies(only_reader(node)) else []
    tensors = [one for one in factors if isinstance(one, fx.Node)]
    for value in filter(is_data, tensors if len(factors) > 2 else []):
        rest = list(tensors)
        rest.remove(value)  # once: value * value * gate has another signal, the value itself
        gates = [one for one in rest if one is not value and _is_gate_of(one, value, places)]
        others = [one for one in rest if one not in gates]
        if gates and any(map(is_data, others)):
            build = CallBuilder(program, node, row_of(node))
            numbers = [one for one in factors if not isinstance(one, fx.Node)]
            of_value = [[value, *(one for one in gates if not is_data(one))], [*filter(is_data, gates), *numbers]]
            parts = [_multiplied(build, some) for some in (others, *of_value) if some]
            return build.call("mul", parts[0], build.call("mul", *parts[1:]) if len(parts) > 2 else parts[1])
    return None


def _factors(node: fx.Node) -> list[Any]:
    """The factors of a product of products."""
    found: list[Any] = []
    for one in node.args[:2]:
        inner = _multiplies(one) and is_data(one) and isinstance(one, fx.Node) and only_reader(one) is not None
        found += _factors(one) if inner and isinstance(one, fx.Node) else [one]
    return found


def _multiplies(value: Any) -> bool:
    """Whether a value is a product of entries, or that of a gated linear unit."""
    return is_call_of(value, "mul") or is_call_of(value, "gate")


def _is_gate_of(scale: fx.Node, value: fx.Node, places: dict[fx.Node, int]) -> bool:
    """Whether a factor is a bounded function of a value, perhaps scaled and shifted by constants, or one of its sign."""
    while _is_same_view(scale, value):
        scale, value = scale.all_input_nodes[0], value.all_input_nodes[0]
    for source, inner in _sources(scale, places, _of_signals) if is_pointwise(scale) else ():
        if source is value:
            rows = [row_of(one) for one in (*inner, scale)]
            return any(row.values.steps or (row.kind is Activation and bool(row.values.scales)) for row in rows)
    return False


def _is_same_view(one: fx.Node, other: fx.Node) -> bool:
    """Whether two values are the same view of their only operands."""
    row = node_info(one).operator
    moves = row is not None and row.entries.moves and len(one.all_input_nodes) == len(other.all_input_nodes) == 1
    return moves and (one.target, one.args[1:], one.kwargs) == (other.target, other.args[1:], other.kwargs)


def _of_signals(node: fx.Node) -> list[fx.Node]:
    """What a call reads of signals, and of step functions of them."""
    read = node.all_input_nodes[:1] if _converts(node) else node.all_input_nodes
    return [one for one in read if node_info(one).role in (Role.DATA, Role.CONSTANT)]


def _replacement(program: Program, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node | None:
    """The activation that a call computes, or its product with the sigmoid by whose inverse it divides; None for others."""
    found = _activation(node, places)
    if found is not None:
        name, value, factor, arguments = found
        build = CallBuilder(program, node, row_of(node))
        return build.call(name, _scaled(build, value, factor), *arguments)
    if is_call_of(node, "div") and is_data(node.args[0]) and is_call_of(node.args[1], "add"):
        scale = _inverse_sigmoid(node.args[1], places)
        if scale is not None:
            build = CallBuilder(program, node, row_of(node))
            return build.call("mul", node.args[0], build.call("sigmoid", _scaled(build, *scale)))
    return None


def _activation(node: fx.Node, places: dict[fx.Node, int]) -> tuple[str, fx.Node, float, tuple[float, ...]] | None:
    """The activation that a call computes with those before it: its row, its input, a factor of the input, its number.

    A copy computes nothing, and stays behind it: a view of the copy may need the order of its entries in memory.
    """
    if is_call_of(node, "clone"):
        return None
    found = None
    for source, inner in _sources(node, places):
        rows = [row_of(one) for one in (*inner, node)]
        several = inner or is_call_of(node, "logaddexp")
        joins = any(row.name in _JOINING for row in rows) and any(row.kind in (Activation, Neutral) for row in rows)
        joins = joins or (is_call_of(node, "mul") and any(row.values.steps for row in rows))
        if several and joins:
            same = _same_function(source, inner, node)
            gate = same is not None and same[:2] == ("sigmoid", -1) and any(len(readers(one)) > 1 for one in inner)
            found = found if same is None or gate else (same[0], source, *same[1:])  # 1 - z of a gate z stays
    return found


def _inverse_sigmoid(divisor: Any, places: dict[fx.Node, int]) -> tuple[fx.Node, float] | None:
    """The value and its factor of which a divisor is the inverse of a sigmoid: x / (1 + exp(-y)) is x * sigmoid(y)."""
    found = None
    for source, inner in _sources(divisor, places):
        values = _values(source, inner, divisor) if any(is_call_of(one, "exp") for one in inner) else None
        for factor in _FACTORS:
            if values is not None and _agree(torch.sigmoid(factor * _POINTS), 1 / values):
                found = source, factor
    return found


def _scaled(build: CallBuilder, value: fx.Node, factor: float) -> fx.Node:
    if factor == 1:
        return value
    return build.call("neg", value) if factor == -1 else build.call("mul", value, factor)


def _read(node: fx.Node) -> list[fx.Node]:
    """What a call reads, other than dtypes and tensors of one number that broadcasting does not need."""
    read = node.all_input_nodes[:1] if _converts(node) else node.all_input_nodes
    return [one for one in read if not (_is_number(one, node) or _is_dtype(one))]


def _sources(
    node: fx.Node, places: dict[fx.Node, int], read: Callable[[fx.Node], list[fx.Node]] = _read
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The values of which alone a call is an element-wise function, nearest first, and the calls between, in order."""
    for (source,), inner in _cuts(node, places, read, 1):
        yield source, inner


def _cuts(
    node: fx.Node, places: dict[fx.Node, int], read: Callable[[fx.Node], list[fx.Node]], most: int
) -> Iterator[tuple[list[fx.Node], list[fx.Node]]]:
    """At most so many values of which a call is an element-wise function, nearest first, and the calls between, in order.

    `read`: what a call reads, other than constants.
    """
    open_values, last, inner = set(read(node)), set[fx.Node](), list[fx.Node]()
    while open_values and len(inner) < _LARGEST and len(last) < most:
        found = open_values | last
        if len(found) <= most and all(map(is_data, found)):
            yield sorted(found, key=places.__getitem__), inner[::-1]
        latest = max(open_values, key=lambda one: (not is_data(one), places[one]))  # masks first
        open_values.remove(latest)
        if is_pointwise(latest):
            open_values |= set(read(latest))
            inner.append(latest)
        elif is_data(latest):
            last.add(latest)
        else:
            return


def _converts(node: fx.Node) -> bool:
    row = node_info(node).operator
    return row is not None and row.entries.converts


def _is_dtype(value: Any) -> bool:
    """Whether a value is the dtype of another one, or its device."""
    return isinstance(value, fx.Node) and value.target is getattr and value.args[1] in ("dtype", "device")


def _is_number(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a value is a tensor of one number, and no larger than what it is combined with."""
    if is_data(value) or number_filling(value) is None:
        return False
    if value.op == "get_attr" or node_info(value).shape == ():
        return True
    spelling = spelling_of(value)
    if spelling is not None and spelling.operator.merging.affine_in:
        return all(_is_number(one, reader) for one in value.all_input_nodes)
    name, operands = function_name(value), _of_signals(reader)
    sizes, *more = value.args[name.startswith("new_") :] or ((0,),)
    sizes = [sizes, *more] if isinstance(sizes, int) else sizes
    if name.endswith("_like"):
        return any(_has_shape_of(sizes, one) for one in operands)
    ranks = [len(node_info(one).shape or ()) for one in operands]
    return isinstance(sizes, (tuple, list)) and set(sizes) <= {1} and len(sizes) <= max(ranks, default=0)


def _has_shape_of(origin: Any, value: fx.Node) -> bool:
    """Whether a value is computed from another one entry by entry, and so is not smaller."""
    seen, pending = {value}, [value]
    while pending and origin not in seen:
        node = pending.pop()
        read = set(_of_signals(node)) - seen if is_pointwise(node) else set()
        seen |= read
        pending += read
    return origin in seen


def is_pointwise(node: fx.Node) -> bool:
    """Whether an entry of a call's result is a function of that entry of its operands, and of numbers."""
    row = node_info(node).operator
    if node.op != "call_function" or row is None or row.parameters or row.outputs.results:
        return False
    if row.entries.converts:
        of = node_info(node.args[0]).operator if isinstance(node.args[0], fx.Node) else None
        return not is_data(node) and of is not None and of.values.steps
    if row.memory.view:
        return False
    return mixing.keeps_places(row)


def _same_function(
    source: fx.Node, inner: list[fx.Node], node: fx.Node, signals: Sequence[fx.Node] = ()
) -> tuple[str, float, tuple[float, ...]] | None:
    """The activation that computes the same where all signals are 1, a factor of its input, and its number."""
    numbers: set[float] = set()
    map_arguments([(one.args, dict(one.kwargs)) for one in (*inner, node)], lambda leaf: _note(numbers, leaf))
    values = _values(source, inner, node, signals)
    if values is None:
        return None
    names, table = _without_numbers()
    agree = torch.isclose(table, values, rtol=_TOLERANCE, atol=0.0).all(1).nonzero()
    if len(agree):
        return (*names[int(agree[0])], ())
    for number in sorted(numbers | {1 / one for one in numbers if one}):
        for name, function in _WITH_NUMBER:
            if number > 0 and _agree(function(_POINTS, number), values):
                return name, 1, (number,)
    bounds = sorted({0.0, *numbers, *(-one for one in numbers)})
    for low, high in itertools.combinations(bounds, 2):
        if _agree(functional.hardtanh(_POINTS, low, high), values):
            return "hardtanh", 1, (low, high)
    return None


@functools.cache
def _without_numbers() -> tuple[list[tuple[str, float]], torch.Tensor]:
    """Activations without a number, with factors of their inputs, and their values at all points, (functions, points)."""
    found: list[tuple[tuple[str, float], torch.Tensor]] = [((name, 1), function(_POINTS)) for name, function in _PLAIN]
    found += [((name, factor), function(factor * _POINTS)) for factor in _FACTORS for name, function in _OF_SCALED]
    names, values = zip(*found, strict=True)
    return list(names), torch.stack(values)


def _note(numbers: set[float], leaf: Any) -> None:
    number = number_filling(leaf)
    if number is not None and math.isfinite(number):
        numbers |= {abs(number), abs(torch.tensor(number).item())}  # where(mask, 1.0, 0.1) has the default dtype


def _values(source: fx.Node, inner: list[fx.Node], node: fx.Node, signals: Sequence[fx.Node] = ()) -> torch.Tensor | None:
    """The values of a function at all points, where all signals are 1; None if they cannot be computed."""
    values: dict[fx.Node, torch.Tensor] = {source: _POINTS, **dict.fromkeys(signals, torch.ones_like(_POINTS))}

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if _is_dtype(leaf):
            return getattr(_POINTS, str(leaf.args[1]))
        return values[leaf] if leaf in values else torch.full_like(_POINTS, number_filling(leaf) or 0.0)

    try:
        with torch.no_grad():
            for one in (*inner, node):
                assert callable(one.target)
                values[one] = one.target(*map_arguments(one.args, put), **map_arguments(dict(one.kwargs), put))
    except (RuntimeError, TypeError, ValueError):  # it is no function of floating-point numbers alone
        return None
    found = values[node]
    alike = isinstance(found, torch.Tensor) and found.shape == _POINTS.shape and found.dtype == _POINTS.dtype
    return found if alike else None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=_TOLERANCE, atol=0.0))
