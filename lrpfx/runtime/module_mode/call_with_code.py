"""Module calls with a rule's own code in place of the gradient: Zennit's hook protocol."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lrpfx.ir.node import map_arguments
from lrpfx.operators.layer_of_call import Forward, tensors_in
from lrpfx.runtime.module_mode.call_with_rule import carries_gradient
from lrpfx.runtime.overwriting import Untouched
from lrpfx.runtime.ruled_operation import Switch, relevances_from
from lrpfx.support.tensors import is_floating


class GeneralRule(Protocol):
    """The interface of a hook with its own code; see `lrpfx.rules.hook.Hook`."""

    stored_tensors: dict[str, Any]
    switch: Switch

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any: ...

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any: ...

    def pre_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None: ...

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any: ...


class CallRecord:
    """The state that one call of a hooked module keeps for its backward pass. A layer called twice has two records."""

    def __init__(self, rule: GeneralRule, module: nn.Module) -> None:
        self.rule = rule
        self.switch = rule.switch  # kept here, since a later registration replaces the rule's switch
        self.module = module
        self.stored_tensors: dict[str, Any] = {}

    def invoke(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the rule with this call's stored tensors in place."""
        self.rule.stored_tensors = self.stored_tensors
        return function(*args)


class _Boundary(torch.autograd.Function):
    """Base class of identities that hold the record of a call."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.record = inputs[0]


class _Entry(_Boundary):
    """Identity on the inputs. In the backward pass, the rule replaces their gradient."""

    @staticmethod
    def forward(record: CallRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        record: CallRecord = ctx.record
        if not record.switch.on:
            return (None, *gradients)
        grad_output = record.stored_tensors.get("grad_output")
        untouched = Untouched({"relevance": grad_output or ()})
        result = record.invoke(record.rule.backward, record.module, list(gradients), grad_output)
        untouched.check(record.rule, type(record.module).__name__)
        if result is None:
            return (None, *gradients)
        replaced = relevances_from(record.rule, result, [gradient.shape for gradient in gradients])
        return (None, *replaced)


class _Exit(_Boundary):
    """Identity on the outputs. The backward pass records their gradient."""

    @staticmethod
    def forward(record: CallRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        record: CallRecord = ctx.record
        if record.switch.on:
            record.stored_tensors["grad_output"] = gradients
            untouched = Untouched({"relevance": gradients})
            record.invoke(record.rule.pre_backward, record.module, [], gradients)
            untouched.check(record.rule, type(record.module).__name__)
        return (None, *gradients)


def call_with_code(
    rule: GeneralRule, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` of `module` between two identities that run the rule's code in the backward pass.

    The code around the forward pass runs even if no backward pass follows.
    """
    record, name = CallRecord(rule, module), type(module).__name__
    untouched = Untouched({"input": tensors_in((args, kwargs))})
    changed = record.invoke(rule.pre_forward, module, *_fitting(rule.pre_forward, args, kwargs))
    untouched.check(rule, name)
    if changed is not None:
        args, kwargs = changed if _is_arguments(changed) else (changed, kwargs)
    args, kwargs = _through(_Entry, record, (args, kwargs))
    output = forward(*args, **kwargs)
    untouched = Untouched({"input": tensors_in((args, kwargs))})  # a module such as ReLU(inplace=True) may write into it
    replaced = record.invoke(rule.forward, module, *_fitting(rule.forward, args, kwargs), output)
    output = output if replaced is None else replaced
    replaced = record.invoke(rule.post_forward, module, *_fitting(rule.post_forward, args, kwargs), output)
    untouched.check(rule, name)
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
    """The arguments of a call in the form that a method of a rule takes.

    The shorter form gets all inputs in one tuple, aligned with the gradients passed to `backward`.
    """
    return (args, kwargs) if takes_kwargs(getattr(method, "__func__", method)) else ((*args, *kwargs.values()),)


def _through(function: type[_Boundary], record: CallRecord, values: Any) -> Any:
    """`values` with every floating-point tensor in them passed through an identity, if any of them requires a gradient."""
    tensors = tensors_in(values)
    if not carries_gradient(tensors):
        return values
    passed = iter(function.apply(record, *tensors))  # type: ignore[no-untyped-call]
    return map_arguments(values, lambda leaf: next(passed) if is_floating(leaf) else leaf)
