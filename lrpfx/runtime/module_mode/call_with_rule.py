"""Module calls with a propagation rule in place of the gradient."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lrpfx.ir.node import map_arguments
from lrpfx.operators.layer_of_call import Forward, layer_of_call, tensors_in
from lrpfx.runtime.propagation import propagate_relevance
from lrpfx.runtime.ruled_operation import Rule, RuledOperation, Switch, ruled_operation
from lrpfx.support.tensors import detached


def carries_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether gradients are enabled and any of the tensors requires one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def stored_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call for a propagation rule to store. They are detached, as their history would outlive the call."""
    stored = map_arguments((args, kwargs), detached)
    return dict(zip(("input", "kwargs"), stored, strict=True))


class RegisteredRule(Rule, Protocol):
    """A rule with the state that it has while it is registered on a module."""

    switch: Switch
    stored_tensors: dict[str, Any]


def call_with_rule(
    rule: RegisteredRule, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` of `module` with `rule` in place of its gradient."""
    if not carries_gradient(tensors_in((args, kwargs))):
        return forward(*args, **kwargs)
    ruled, values = ruled_call(rule, module, forward, args, kwargs)
    return propagate_relevance(ruled, *values)


def ruled_call(
    rule: RegisteredRule, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[RuledOperation, list[Any]]:
    """A call of `forward` of `module` as an operation with a rule, and the values to call it with."""
    layer = layer_of_call(module, forward, args, kwargs)
    return ruled_operation(
        layer,
        rule,
        lambda tensor: tensor.view_as(tensor),
        switch=rule.switch,
        name=layer.name,
        stored_tensors=rule.stored_tensors,
    )
