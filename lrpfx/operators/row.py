"""A short form for writing rows of the operator table."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import FACETS, REQUIRED, Bound, Function, Operator, Order
from lrpfx.support.torch_internals import OpOverload
from lrpfx.support.torch_internals import aten as aten_operator


def row(
    name: str,
    kind: type[kinds.Kind],
    function: Function | None = None,
    arguments: str = "",
    *,
    data: str = "input",
    parameters: str = "",
    buffers: str = "",
    spelled: str | None = None,
    order: str = "",
    functions: Iterable[Function] = (),
    inplace: Iterable[Function] = (),
    methods: str = "",
    inplace_methods: str = "",
    aten: str = "",
    inplace_aten: str = "",
    reordered: Sequence[tuple[Function | str | None, str]] = (),
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

    `spelled`: names of operations, by default that of the row. All their forms are spellings: functions of torch, torch.special
    and torch.nn.functional, tensor methods and ATen operators, in place or not. They take positional arguments in `order`, by
    default that of the row. The other arguments list further spellings, each in its form, and `reordered` ones, which take
    positional arguments in an order of their own; None among these is an operator that the installed torch lacks. `facts` are
    fields of `Operator` and of its facets.
    """
    parsed = _parse_arguments(arguments)
    renamed = {"self": "input", "src": "source", **dict(pair.split("=") for pair in aliases.split())}
    places = tuple(order.split()) or tuple(parsed)
    own, in_place = Order(tuple(parsed)), Order(tuple(parsed), inplace=True)
    called: dict[Function | str, Order] = {
        form: Order(places, inplace)
        for form, inplace in _all_forms(name if spelled is None else spelled, parsed, places, renamed, bool(facts.get("view")))
    }
    called.update(dict.fromkeys([*([function] if function else []), *functions, *_overloads(aten), *methods.split()], own))
    called.update(dict.fromkeys([*inplace, *_overloads(inplace_aten), *inplace_methods.split()], in_place))
    called.update({one: Order(tuple(text.split())) for one, text in reordered if one is not None})
    facts |= {
        "modules": tuple(modules),
        "functions": {form: one for form, one in called.items() if not isinstance(form, str)},
        "methods": {form: one for form, one in called.items() if isinstance(form, str)},
        "foreign": dict.fromkeys(foreign.split(), own),
        "aliases": dict(pair.split("=") for pair in aliases.split()),
        "results": tuple(results.split()),
        "affine_in": tuple(affine_in.split()),
        "proportional_to": tuple(proportional_to.split()),
        "discrete_results": tuple(discrete_results),
    }
    names = {"data": data, "parameters": parameters, "buffers": buffers, "indices": indices, "controls": controls}
    facts |= {role: tuple(text.split()) for role, text in names.items()}
    return with_facts(Operator(name, kind, function, parsed), **facts)


def with_facts(operator: Operator, **facts: Any) -> Operator:
    """The row with further facts, each in its facet."""
    stated: dict[str, dict[str, Any]] = {}
    for fact, value in facts.items():
        stated.setdefault(FACETS.get(fact, ""), {})[fact] = value
    others = stated.pop("", {})
    return replace(operator, **others, **{facet: replace(getattr(operator, facet), **some) for facet, some in stated.items()})


def neutral(name: str, **facts: Any) -> Operator:
    """A row for an operator that needs no rule."""
    return row(name, kinds.Neutral, **facts)


_ROOMS = (torch, torch.special, functional)
#: What ATen calls the first argument of operators whose row does not name it.
_FIRST = ("self", "input", "tensors", "condition", "y")


def _all_forms(
    names: str, arguments: Bound, places: Sequence[str], renamed: dict[str, str], is_view: bool
) -> Iterator[tuple[Function | str, bool]]:
    """The functions, operators and methods of these names, the latter as strings, and whether each works in place.

    Views have no form in place: it would change the shape of a tensor, not its entries.
    """

    def fits(overload: OpOverload) -> bool:
        """Whether an ATen operator returns its result, and takes tensors and the row's arguments in their order."""
        given, required = overload._schema.arguments, {name for name in arguments if arguments[name] is REQUIRED}
        if not given or "Tensor" not in str(given[0].type) or not (arguments or given[0].name in _FIRST):
            return False
        if not overload._schema.returns or any(one.is_out for one in given):
            return False
        taken = {renamed.get(one.name, one.name): one.kwarg_only for one in given}
        positional = [name for name, keyword_only in taken.items() if not keyword_only]
        in_order = positional == list(places[: len(positional)])
        return not arguments or (in_order and required <= taken.keys() <= {*arguments, *places})

    for name in names.split():
        for inplace in (False,) if is_view else (False, True):
            form = f"{name}_" if inplace else name
            yield from ((getattr(room, form), inplace) for room in _ROOMS if callable(getattr(room, form, None)))
            packets = [getattr(torch.ops.aten, one) for one in (form, f"special_{form}") if hasattr(torch.ops.aten, one)]
            overloads = [getattr(packet, one) for packet in packets for one in packet.overloads()]
            yield from ((overload, inplace) for overload in overloads if fits(overload))
            if callable(getattr(torch.Tensor, form, None)):
                yield form, inplace


def _overloads(names: str) -> list[Function]:
    return [operator for operator in map(aten_operator, names.split()) if operator is not None]


def _parse_arguments(text: str) -> Bound:
    arguments: Bound = {}
    for word in text.split():
        name, _, default = word.partition("=")
        arguments[name] = ast.literal_eval(default) if default else REQUIRED
    return arguments
