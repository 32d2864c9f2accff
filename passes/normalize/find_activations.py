"""NORMALIZE: replace element-wise functions that are written out, such as (1 + tanh(x / 2)) / 2, by activations.

As sums and products, their constants would take shares of the relevance, which an activation passes on whole.
"""

import itertools
import math
from collections.abc import Callable, Iterator
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
from lrpfx.passes.constants import number_filling
from lrpfx.passes.normalize.call_builder import CallBuilder
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.program import GraphPass, PassResult, Program, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE

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
        result = PassResult()
        for replacement in (_replacement, _masked_product, _gated_product, _replacement):
            places, before = {node: place for place, node in enumerate(program.graph.nodes)}, result.matches
            for node in reversed(list(calls(program.graph))):
                new = replacement(program, node, places) if node.users and is_data(node) and is_pointwise(node) else None
                if new is not None:
                    result.match(node_info(node).name, f"now {node_info(new).name}")
                    replace_call(node, new)
            if result.matches > before:
                remove_unread(program.graph)
        return result


def _masked_product(program: Program, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node | None:
    """where(mask of z, signal * z, 0) as signal * z * mask, also by masked_fill; signal * where(mask, z, 0) likewise."""
    chosen = _chosen_or_zero(node)
    if chosen is None:
        return None
    value, mask, is_inverse = chosen
    reader = only_reader(node)
    found = [
        *(_factors(value) if is_call_of(value, "mul") else [value]),
        *(_factors(reader) if is_call_of(reader, "mul") else []),
    ]
    factors = [one for one in found if isinstance(one, fx.Node) and is_data(one) and one is not node]
    if not any(_is_gate_of(mask, one, places) and _scales_signals(one, factors, places) for one in factors):
        return None
    build = CallBuilder(program, node, row_of(node))
    return build.call("mul", value, build.call("logical_not", mask, target=torch.logical_not) if is_inverse else mask)


def _scales_signals(value: fx.Node, factors: list[fx.Node], places: dict[fx.Node, int]) -> bool:
    """Whether factors beside a value and its gates are signals of their own, unlike log(z) in z * log(z), which has no end."""
    others = [one for one in factors if one is not value and not _is_gate_of(one, value, places)]
    return bool(others) and not any(value is source for one in others for source, _ in _sources(one, places))


def _chosen_or_zero(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """The signal that a call keeps in some places, with zeros in the others, the mask, and whether it marks the zeros."""
    row = row_of(node)
    if not row.entries.chooses:
        return None
    bound = bound_arguments(node, row)
    mask, where_true, where_false = (bound[name] for name in row.entries.chooses)
    is_inverse = number_filling(where_true) == 0
    value, other = (where_false, where_true) if is_inverse else (where_true, where_false)
    if not isinstance(value, fx.Node) or not isinstance(mask, fx.Node) or not is_data(value) or number_filling(other) != 0:
        return None
    return value, mask, is_inverse


def _gated_product(program: Program, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node | None:
    """(signal * z) * sigmoid(z) as signal * (z * sigmoid(z)), for any bounded function or mask of z, in any order."""
    inner = is_call_of(only_reader(node), "mul")
    factors = _factors(node) if is_call_of(node, "mul") and not inner else []
    tensors = [one for one in factors if isinstance(one, fx.Node)]
    for value in filter(is_data, tensors if len(factors) > 2 else []):
        gates = [one for one in tensors if one is not value and _is_gate_of(one, value, places)]
        others = [one for one in tensors if one is not value and one not in gates]
        if gates and any(map(is_data, others)):
            build = CallBuilder(program, node, row_of(node))
            numbers = [one for one in factors if not isinstance(one, fx.Node)]
            of_value = [[value, *(one for one in gates if not is_data(one))], [*filter(is_data, gates), *numbers]]
            parts = [reduce(lambda one, other: build.call("mul", one, other), some) for some in (others, *of_value) if some]
            return build.call("mul", parts[0], build.call("mul", *parts[1:]) if len(parts) > 2 else parts[1])
    return None


def _factors(node: fx.Node) -> list[Any]:
    """The factors of a product of products."""
    found: list[Any] = []
    for one in node.args[:2]:
        inner = is_call_of(one, "mul") and is_data(one) and only_reader(one) is not None
        found += _factors(one) if inner and isinstance(one, fx.Node) else [one]
    return found


def _is_gate_of(scale: fx.Node, value: fx.Node, places: dict[fx.Node, int]) -> bool:
    """Whether a factor is a bounded function of a value, perhaps scaled and shifted by constants, or one of its sign."""
    for source, inner in _sources(scale, places, _of_signals) if is_pointwise(scale) else ():
        if source is value:
            rows = [row_of(one) for one in (*inner, scale)]
            return any(row.values.steps or (row.kind is Activation and bool(row.values.scales)) for row in rows)
    return False


def _of_signals(node: fx.Node) -> list[fx.Node]:
    """What a call reads of signals, and of step functions of them."""
    return [one for one in node.all_input_nodes if node_info(one).role in (Role.DATA, Role.CONSTANT)]


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
    """The activation that a call computes with those before it: its row, its input, a factor of the input, its number."""
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
    return [one for one in node.all_input_nodes if not (_is_number(one, node) or _is_dtype(one))]


def _sources(
    node: fx.Node, places: dict[fx.Node, int], read: Callable[[fx.Node], list[fx.Node]] = _read
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The values of which a call is an element-wise function, nearest first, and the calls between them and it, in order.

    `read`: what a call reads, other than constants.
    """
    open_values, inner = set(read(node)), list[fx.Node]()
    while open_values and len(inner) < _LARGEST:
        latest = max(open_values, key=places.__getitem__)
        if len(open_values) == 1 and is_data(latest):
            yield latest, inner[::-1]
        if not is_pointwise(latest):
            return
        open_values.remove(latest)
        open_values |= set(read(latest))
        inner.append(latest)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is getattr and value.args[1] == "dtype"


def _is_number(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a value is a tensor of one number, and no larger than what it is combined with."""
    if is_data(value) or number_filling(value) is None:
        return False
    name = function_name(value)
    sizes = next(iter(value.args[name.startswith("new_") :]), None)
    alike = name.endswith("_like") and any(_has_shape_of(sizes, one) for one in reader.all_input_nodes if is_data(one))
    return alike or sizes in ((), [])


def _has_shape_of(origin: Any, value: fx.Node) -> bool:
    """Whether a value is computed entry by entry from another one alone."""
    while value is not origin:
        read = [one for one in value.all_input_nodes if is_data(one)]
        if len(value.all_input_nodes) != 1 or not read or not is_pointwise(value):
            return False
        (value,) = read
    return True


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


def _same_function(source: fx.Node, inner: list[fx.Node], node: fx.Node) -> tuple[str, float, tuple[float, ...]] | None:
    """The activation that computes the same, a factor of its input, and its number."""
    numbers: set[float] = set()
    map_arguments([(one.args, dict(one.kwargs)) for one in (*inner, node)], lambda leaf: _note(numbers, leaf))
    values = _values(source, inner, node)
    if values is None:
        return None
    for name, function in _PLAIN:
        if _agree(function(_POINTS), values):
            return name, 1, ()
    for factor in _FACTORS:
        for name, function in _OF_SCALED:
            if _agree(function(factor * _POINTS), values):
                return name, factor, ()
    for number in sorted(numbers | {1 / one for one in numbers if one}):
        for name, function in _WITH_NUMBER:
            if number > 0 and _agree(function(_POINTS, number), values):
                return name, 1, (number,)
    bounds = sorted({0.0, *numbers, *(-one for one in numbers)})
    for low, high in itertools.combinations(bounds, 2):
        if _agree(functional.hardtanh(_POINTS, low, high), values):
            return "hardtanh", 1, (low, high)
    return None


def _note(numbers: set[float], leaf: Any) -> None:
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and math.isfinite(leaf):
        numbers.add(abs(float(leaf)))


def _values(source: fx.Node, inner: list[fx.Node], node: fx.Node) -> torch.Tensor | None:
    """The values of a function at all points; None if they cannot be computed."""
    values: dict[fx.Node, torch.Tensor] = {source: _POINTS}

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if _is_dtype(leaf):
            return _POINTS.dtype
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
