"""A short form for writing rows of the operator table."""

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from lrpfx import types
from lrpfx.ir.operator import REQUIRED, Bound, Function, Operator, Order
from lrpfx.support.torch_internals import aten as aten_operator


def row(
    name: str,
    kind: type[types.Kind],
    function: Function | None = None,
    arguments: str = "",
    *,
    data: str = "input",
    parameters: str = "",
    buffers: str = "",
    functions: Iterable[Function] = (),
    inplace: Iterable[Function] = (),
    methods: str = "",
    inplace_methods: str = "",
    aten: str = "",
    inplace_aten: str = "",
    reordered: Sequence[tuple[Function | None, str]] = (),
    reordered_inplace: Sequence[tuple[Function | None, str]] = (),
    reordered_methods: Sequence[tuple[str, str]] = (),
    reordered_inplace_methods: Sequence[tuple[str, str]] = (),
    foreign: str = "",
    results: str = "",
    indices: str = "",
    aliases: str = "",
    controls: str = "",
    affine_in: str = "",
    proportional_to: str = "",
    modules: Sequence[type] = (),
    discrete_results: Sequence[int] = (),
    **facts: Any,
) -> Operator:
    """A row, with names as strings: "input bias=None" declares two arguments, the second with a default.

    `reordered` spellings take positional arguments in another order. None among them stands for an operator that the installed
    torch lacks. `facts` are further fields of `Operator`.
    """
    parsed = _parse_arguments(arguments)
    order = Order(tuple(parsed))
    in_place = Order(order.arguments, inplace=True)
    spelled: dict[Function, Order] = {}
    spelled.update(dict.fromkeys([*([function] if function else []), *functions, *_overloads(aten)], order))
    spelled.update(dict.fromkeys([*inplace, *_overloads(inplace_aten)], in_place))
    spelled.update({one: Order(tuple(text.split())) for one, text in reordered if one is not None})
    spelled.update({one: Order(tuple(text.split()), inplace=True) for one, text in reordered_inplace if one is not None})
    named = dict.fromkeys(methods.split(), order)
    named.update(dict.fromkeys(inplace_methods.split(), in_place))
    named.update({one: Order(tuple(text.split())) for one, text in reordered_methods})
    named.update({one: Order(tuple(text.split()), inplace=True) for one, text in reordered_inplace_methods})
    return Operator(
        name,
        kind,
        function,
        parsed,
        tuple(data.split()),
        tuple(parameters.split()),
        tuple(buffers.split()),
        tuple(modules),
        spelled,
        named,
        dict.fromkeys(foreign.split(), order),
        dict(pair.split("=") for pair in aliases.split()),
        results=tuple(results.split()),
        indices=tuple(indices.split()),
        controls=tuple(controls.split()),
        affine_in=tuple(affine_in.split()),
        proportional_to=tuple(proportional_to.split()),
        discrete_results=tuple(discrete_results),
        **facts,
    )


def neutral(name: str, functions: Iterable[Function] = (), *, methods: str | None = None, **facts: Any) -> Operator:
    """A row for an operator that needs no rule. By default, the tensor method of the same name is a spelling."""
    return row(name, types.Neutral, functions=functions, methods=name if methods is None else methods, **facts)


def _overloads(names: str) -> list[Function]:
    return [operator for operator in map(aten_operator, names.split()) if operator is not None]


def _parse_arguments(text: str) -> Bound:
    arguments: Bound = {}
    for word in text.split():
        name, _, default = word.partition("=")
        arguments[name] = ast.literal_eval(default) if default else REQUIRED
    return arguments
