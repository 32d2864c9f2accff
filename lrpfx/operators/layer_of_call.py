"""The layer of one call of a module, for module mode."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lrpfx.ir import kinds
from lrpfx.ir.node import map_arguments
from lrpfx.ir.operator import Operator
from lrpfx.operators.layer import Layer, Operation, Slot, kind_of, spelled_rows
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.tensors import is_floating

Forward = Callable[..., Any]


def layer_of_call(module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layer:
    """The layer of a call of `module` that computes `forward`. Its inputs, parameters and extras are tensors, not nodes."""
    inputs = tensors_in((args, kwargs))
    operator = _operator_of(module, forward)
    if operator is not None and len(inputs) == 1 and len(args) + len(kwargs) == 1:
        parameters = {name: value for name in operator.parameters if (value := getattr(module, name)) is not None}
        operation = _operator_call(operator, module, list(parameters))
        return Layer(type(module).__name__, operation, inputs, parameters, module=module)
    shadowed = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    parameters = {**dict(module.named_parameters()), **{n: v for n, v in shadowed.items() if n not in module._buffers}}
    buffers = {name: value for name, value in module.named_buffers() if name not in shadowed}
    operation = _module_call(module, forward, args, kwargs, list(parameters), list(buffers), set(shadowed))
    return Layer(type(module).__name__, operation, inputs, parameters, list(buffers.values()), module)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The floating-point tensors in nested values, such as the (args, kwargs) of a call."""
    found: list[torch.Tensor] = []
    map_arguments(values, lambda leaf: found.append(leaf) if is_floating(leaf) else None)
    return found


def _spelled_rows(module: nn.Module, forward: Forward) -> tuple[Operator, ...]:
    return spelled_rows(module, forward.func) if isinstance(forward, functools.partial) else ()


def _operator_of(module: nn.Module, forward: Forward) -> Operator | None:
    """The row of a torch.nn layer, if rules need more facts than its forward."""
    if getattr(module, "padding_mode", "zeros") != "zeros" or getattr(module, "track_running_stats", False):
        return None
    return next((row for row in _spelled_rows(module, forward) if _is_needed(row)), None)


def _is_needed(row: Operator) -> bool:
    linear = row.linear.adjoint is not None and bool(row.parameters)
    return linear or row.normalization.detached is not None or issubclass(row.kind, (kinds.Softmax, kinds.Gate))


def _operator_call(operator: Operator, module: nn.Module, names: Sequence[str]) -> Operation:
    """The operator with the settings of `module`, whose attributes have the names of the operator's arguments."""
    options = {
        name: getattr(module, name) for name in operator.arguments if name not in operator.tensors and hasattr(module, name)
    }
    tensors = {name: Slot(place) for place, name in enumerate(names, start=1)}
    return Operation(operator.canonical, (Slot(0),), {**tensors, **options}, 1, tuple(names), operator)


def _module_call(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Sequence[str],
    buffers: Sequence[str],
    shadowed: set[str],
) -> Operation:
    """The module's forward as a function of its tensors; `shadowed`: names of those that are plain attributes."""
    count = 0

    def slot(leaf: Any) -> Any:
        nonlocal count
        if not is_floating(leaf):
            return leaf
        count += 1
        return Slot(count - 1)

    slotted_args, slotted_kwargs = map_arguments((args, kwargs), slot)
    names = [*parameters, *buffers]
    body = _Body(module, forward)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], values: tuple[Any, ...]) -> Any:
        # Copies: the module may overwrite its inputs, but its rule reads them later.
        args, kwargs = map_arguments((args, kwargs), lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
        given = dict(zip(names, values, strict=True))
        before = {name: vars(module)[name] for name in shadowed}
        with undisturbed():  # torch does not give back what an interrupt finds half replaced
            try:
                vars(module).update({name: given[name] for name in shadowed if name in given})
                state = {f"module.{name}": value for name, value in given.items() if name not in shadowed}
                return torch.func.functional_call(body, state, args, kwargs)
            finally:
                vars(module).update(before)

    # A call gets one set of parameters, either the module's own or modified ones, and then the buffers.
    values = tuple(Slot(count + place) for place in range(len(names)))
    row = next((row for row in _spelled_rows(module, forward) if len(row.data) == count), None)
    arguments = (slotted_args, slotted_kwargs, values)
    return Operation(run, arguments, {}, count, tuple(parameters), row=row, kind=kind_of(module))


class _Body(nn.Module):
    """The forward of a module. The module is a child, so `functional_call` can replace its tensors."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
