"""Module mode: rules on the modules of a model as it stands, without a graph.

A rule registered on a module takes over the module's calls by an attribute `forward` of that one instance, and gives it back
when it is removed. Nothing else of the module changes: not its class, parameters, buffers or hooks.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lrpfx import types
from lrpfx.ir.node import is_floating, map_arguments
from lrpfx.ir.operator import Operator
from lrpfx.layers.layer import Operation, Slot, kind_of, spelled_rows
from lrpfx.operators.functions import detached
from lrpfx.runtime.propagation import Gate, Rule, RuledOperation, propagate_relevance

Forward = Callable[..., Any]


class Caller(Protocol):
    """What takes over the calls of a module."""

    def call(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any: ...


class Removable(Protocol):
    """What can be removed."""

    def remove(self) -> None: ...


class RemovableHandle:
    """A weak handle: removes an instance if it is still alive."""

    def __init__(self, instance: Removable) -> None:
        self.instance = weakref.ref(instance)

    def remove(self) -> None:
        instance = self.instance()
        if instance is not None:
            instance.remove()


class RemovableHandleList(list[Any]):
    """A list of handles that can be removed together: the last first, so that each finds what it left."""

    def remove(self) -> None:  # type: ignore[override]
        while self:
            self.pop().remove()


class RegisteredForward:
    """The `forward` of one module while rules are registered on it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous: Forward | None = vars(module).get("forward")
        self.callers: list[Caller] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = inner_forward(self.module)
        for caller in self.callers:
            forward = functools.partial(caller.call, self.module, forward)
        return forward(*args, **kwargs)


class Registration:
    """A rule on a module; `remove` takes it off."""

    def __init__(self, module: nn.Module, caller: Caller) -> None:
        self.module = module
        self.caller = caller
        forward = vars(module).get("forward")
        if not isinstance(forward, RegisteredForward):
            forward = vars(module)["forward"] = RegisteredForward(module)
        forward.callers.append(caller)

    def remove(self) -> None:
        forward = vars(self.module).get("forward")
        if not isinstance(forward, RegisteredForward) or self.caller not in forward.callers:
            return
        forward.callers.remove(self.caller)
        if forward.callers:
            return
        if forward.previous is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = forward.previous


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a structure, such as the (args, kwargs) of a call, also within lists and dicts."""
    found: list[torch.Tensor] = []
    map_arguments(values, lambda leaf: found.append(leaf) if is_floating(leaf) else None)
    return found


def carries_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors takes part in a gradient at all."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def stored_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a rule of propagation stores of a call: its arguments, without their history, which would outlive the call."""
    stored = map_arguments((args, kwargs), detached)
    return dict(zip(("input", "kwargs"), stored, strict=True))


# --- rules that say how relevance propagates ------------------------------------------------------------------------------


def call_with_rule(
    rule: Rule, gate: Gate, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` of `module` with `rule` in place of its gradient."""
    if not carries_gradient(tensors_in((args, kwargs))):
        return forward(*args, **kwargs)
    ruled, values = ruled_call(rule, gate, module, forward, args, kwargs)
    return propagate_relevance(ruled, *values)


def ruled_call(
    rule: Rule, gate: Gate, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[RuledOperation, list[Any]]:
    """A call of `forward` of `module` as an operation with a rule, and the values that it is called with."""
    inputs = tensors_in((args, kwargs))
    operator = _operator_of(module, forward)
    buffers: list[Any] = []
    if operator is not None and len(inputs) == 1 and len(args) + len(kwargs) == 1:
        names = [name for name in operator.parameters if getattr(module, name) is not None]
        values = [getattr(module, name) for name in names]
        operation = _operator_call(operator, module, names)
    else:
        shadowed = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        learned = {**dict(module.named_parameters()), **{n: v for n, v in shadowed.items() if n not in module._buffers}}
        names, values = list(learned), list(learned.values())
        buffer_names = [name for name, _ in module.named_buffers() if name not in shadowed]
        buffers = [module.get_buffer(name) for name in buffer_names]
        operation = _module_call(module, forward, args, kwargs, names, buffer_names, set(shadowed))
    distinct: list[torch.Tensor] = []
    for tensor in inputs:
        distinct.append(tensor.view_as(tensor) if any(tensor is other for other in distinct) else tensor)
    first_extra = len(distinct) + len(values)
    places = tuple(range(len(distinct), first_extra))
    ruled = RuledOperation(
        rule, operation, places, None, first_extra, gate, name=type(module).__name__, stored_tensors=rule.stored_tensors
    )
    return ruled, [*distinct, *values, *buffers]


def inner_forward(module: nn.Module) -> Forward:
    """What a module computes without the rules that are registered on it."""
    forward = vars(module).get("forward")
    if isinstance(forward, RegisteredForward):
        forward = forward.previous
    return forward or functools.partial(type(module).forward, module)


def _spelled_rows(module: nn.Module, forward: Forward) -> tuple[Operator, ...]:
    return spelled_rows(module, forward.func) if isinstance(forward, functools.partial) else ()


def _operator_of(module: nn.Module, forward: Forward) -> Operator | None:
    """The row that a layer of torch.nn spells, where rules need to know more of it than its forward."""
    if getattr(module, "padding_mode", "zeros") != "zeros" or getattr(module, "track_running_stats", False):
        return None
    return next((row for row in _spelled_rows(module, forward) if _is_needed(row)), None)


def _is_needed(row: Operator) -> bool:
    linear = row.adjoint is not None and bool(row.parameters)
    return linear or row.detached is not None or issubclass(row.kind, (types.Softmax, types.Gate))


def _operator_call(operator: Operator, module: nn.Module, names: Sequence[str]) -> Operation:
    """The operator with the settings of `module`: its attributes go by the names of the operator's arguments."""
    assert operator.function is not None
    options = {
        name: getattr(module, name) for name in operator.arguments if name not in operator.tensors and hasattr(module, name)
    }
    tensors = {name: Slot(place) for place, name in enumerate(names, start=1)}
    return Operation(operator.function, (Slot(0),), {**tensors, **options}, 1, tuple(names), operator)


def _module_call(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Sequence[str],
    buffers: Sequence[str],
    shadowed: set[str],
) -> Operation:
    """The module's forward as a function of its tensors; `shadowed` are those that stand in the instance's own attributes."""
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
        # Copies, since the module may overwrite its inputs, which its rule reads later.
        args, kwargs = map_arguments((args, kwargs), lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
        given = dict(zip(names, values, strict=True))
        before = {name: vars(module)[name] for name in shadowed}
        try:
            vars(module).update({name: given[name] for name in shadowed if name in given})
            state = {f"module.{name}": value for name, value in given.items() if name not in shadowed}
            return torch.func.functional_call(body, state, args, kwargs)
        finally:
            vars(module).update(before)

    # Modified parameters stand between the module's own and the buffers; the operation is only ever given one set of them.
    values = tuple(Slot(count + place) for place in range(len(names)))
    row = next((row for row in _spelled_rows(module, forward) if len(row.data) == count), None)
    arguments = (slotted_args, slotted_kwargs, values)
    return Operation(run, arguments, {}, count, tuple(parameters), row=row, kind=kind_of(module))


class _Body(nn.Module):
    """The forward of a module, with the module as a child whose tensors can be replaced for a call."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# --- rules that replace a gradient by any code -----------------------------------------------------------------------------


class GeneralRule(Protocol):
    """What a hook with code of its own offers; see `lrpfx.rules.template.Hook`."""

    stored_tensors: dict[str, Any]

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any: ...

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any: ...

    def pre_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None: ...

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any: ...


class CallRecord:
    """What one call of a hooked module keeps for its way back: a layer called twice has two of them."""

    def __init__(self, rule: GeneralRule, gate: Gate, module: nn.Module) -> None:
        self.rule = rule
        self.gate = gate
        self.module = module
        self.stored_tensors: dict[str, Any] = {}

    def invoke(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the rule with this call's stored tensors in place."""
        self.rule.stored_tensors = self.stored_tensors
        return function(*args)


class _Boundary(torch.autograd.Function):
    """An identity at which a call is recorded."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.record = inputs[0]


class _Entry(_Boundary):
    """Identity on the inputs; on the way back the rule replaces their gradient."""

    @staticmethod
    def forward(record: CallRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        record: CallRecord = ctx.record
        if not record.gate.open:
            return (None, *gradients)
        grad_output = record.stored_tensors.get("grad_output")
        result = record.invoke(record.rule.backward, record.module, list(gradients), grad_output)
        if result is None:
            return (None, *gradients)
        replaced = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        return (None, *replaced[: len(gradients)], *[None] * (len(gradients) - len(replaced)))


class _Exit(_Boundary):
    """Identity on the outputs; on the way back their gradient is recorded."""

    @staticmethod
    def forward(record: CallRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        record: CallRecord = ctx.record
        if record.gate.open:
            record.stored_tensors["grad_output"] = gradients
            record.invoke(record.rule.pre_backward, record.module, [], gradients)
        return (None, *gradients)


def call_with_code(
    rule: GeneralRule, gate: Gate, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` of `module` between two identities at which the rule's code takes part in the backward pass.

    The code around the forward pass runs whether or not there will be a backward pass.
    """
    record = CallRecord(rule, gate, module)
    changed = record.invoke(rule.pre_forward, module, *_fitting(rule.pre_forward, args, kwargs))
    if changed is not None:
        args, kwargs = changed if _is_arguments(changed) else (changed, kwargs)
    args, kwargs = _through(_Entry, record, (args, kwargs))
    output = forward(*args, **kwargs)
    replaced = record.invoke(rule.forward, module, *_fitting(rule.forward, args, kwargs), output)
    output = output if replaced is None else replaced
    replaced = record.invoke(rule.post_forward, module, *_fitting(rule.post_forward, args, kwargs), output)
    return _through(_Exit, record, output if replaced is None else replaced)


def _is_arguments(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)


@functools.cache
def takes_kwargs(function: Callable[..., Any]) -> bool:
    """Whether a method of a rule takes (module, args, kwargs, ...) rather than the shorter (module, input, ...)."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    return takes_all or "kwargs" in parameters or len(parameters) > 4


def _fitting(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a call for a method of a rule.

    The shorter form gets all inputs in one tuple, aligned with the gradients that `backward` gets.
    """
    return (args, kwargs) if takes_kwargs(getattr(method, "__func__", method)) else ((*args, *kwargs.values()),)


def _through(function: type[_Boundary], record: CallRecord, values: Any) -> Any:
    """`values` with every floating-point tensor in them passed through an identity, if any of them has a gradient."""
    tensors = tensors_in(values)
    if not carries_gradient(tensors):
        return values
    passed = iter(function.apply(record, *tensors))  # type: ignore[no-untyped-call]
    return map_arguments(values, lambda leaf: next(passed) if is_floating(leaf) else leaf)
