"""Calls of modules that torch runs as one operation, with a rule on each of its parts: recurrent layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from lrpfx.errors import RuleError
from lrpfx.ir.kinds import Recurrent
from lrpfx.ir.operator import Operator
from lrpfx.operators.layer import Layer, Operation, Slot
from lrpfx.operators.layer_of_call import Forward, tensors_in
from lrpfx.operators.recurrent import PACKED
from lrpfx.operators.table import lookup, operator_named
from lrpfx.runtime.module_mode.call_with_rule import RegisteredRule, carries_gradient
from lrpfx.runtime.propagation import propagate_relevance
from lrpfx.runtime.ruled_operation import ruled_operation
from lrpfx.support.tensors import is_floating


def call_by_parts(
    rule: RegisteredRule, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` of a recurrent module with `rule` in place of the gradient of each layer and direction."""
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise RuleError(f"{type(module).__name__}: {PACKED}.", topic="untraceable-forward")
    if not carries_gradient(tensors_in((args, kwargs))):
        return forward(*args, **kwargs)
    with _ByParts(rule, type(module).__name__):
        return forward(*args, **kwargs)


class _ByParts(TorchFunctionMode):
    """A context in which calls of recurrent layers run as their parts."""

    def __init__(self, rule: RegisteredRule, name: str) -> None:
        super().__init__()
        self.rule = rule
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spelling = lookup(func)
        row = None if spelling is None else spelling.operator
        if spelling is None or row is None or row.kind is not Recurrent or row.decomposition is None:
            return func(*args, **(kwargs or {}))
        arguments = {**row.arguments, **dict(zip(spelling.arguments, args, strict=False)), **(kwargs or {})}
        if isinstance(arguments["hx"], torch.Tensor) and not is_floating(arguments["hx"]):
            raise RuleError(f"{self.name}: {PACKED}.", topic="untraceable-forward")
        if arguments.get("train") and arguments["dropout"]:
            raise RuleError(f"{self.name}: dropout between its layers is on. Call model.eval() first.", topic="training-mode")
        parts: Any = _Parts(self.rule, self.name, arguments)
        return row.decomposition(parts)


class _Parts:
    """Runs the calls of a decomposition at once: takes the place of a builder of nodes."""

    def __init__(self, rule: RegisteredRule, name: str, arguments: dict[str, Any]) -> None:
        self.rule = rule
        self.name = name
        self.arguments = arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def call(
        self,
        operator_name: str,
        *args: Any,
        target: Callable[..., Any] | None = None,
        label: str | None = None,
        **options: Any,
    ) -> Any:
        row = operator_named(operator_name)
        if label is None:
            return (target or row.canonical)(*args, **options)
        layer = _layer(row, {**dict(zip(row.arguments, args, strict=False)), **options}, self.name)
        ruled, values = ruled_operation(
            layer, self.rule, lambda tensor: tensor.view_as(tensor), switch=self.rule.switch, name=self.name
        )
        return propagate_relevance(ruled, *values)


def _layer(row: Operator, bound: dict[str, Any], name: str) -> Layer:
    """The layer of a call with these arguments."""
    tensors = {key: value for key, value in bound.items() if key in (*row.data, *row.parameters) and value is not None}
    slots = {key: Slot(place) for place, key in enumerate(tensors)}
    filled = {key: slots.get(key, value) for key, value in bound.items()}
    parameters = {key: value for key, value in tensors.items() if key in row.parameters}
    inputs = [value for key, value in tensors.items() if key in row.data]
    positional = [filled.pop(key) for key in row.data if key in filled]
    operation = Operation(row.canonical, tuple(positional), filled, len(inputs), tuple(parameters), row)
    return Layer(name, operation, inputs, parameters)
