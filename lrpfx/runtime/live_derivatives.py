"""Derivatives that relevance must not be taken for: those of parameters and of relevance, while rules are on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lrpfx.errors import InputError
from lrpfx.runtime.ruled_operation import Switch
from lrpfx.support.torch_internals import apply


def with_derivatives_only_off(switch: Switch, values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """`values`, of which those at `places` have a derivative only while the switch is off; while it is on, it is an error."""
    changed = list(values)
    wanted = [at for at in places if isinstance(values[at], torch.Tensor) and values[at].requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return changed
    if torch.compiler.is_compiling():  # a compiled backward computes all gradients, wanted or not
        made = [values[at].detach() if switch.on else values[at] for at in wanted]
    else:
        made = apply(_OnlyOff, switch, *(values[at] for at in wanted))
    for at, value in zip(wanted, made, strict=True):
        changed[at] = value
    return changed


class _OnlyOff(torch.autograd.Function):
    """Identity. The derivative is an error while the switch is on: what flows back is then relevance, not a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(switch: Switch, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.switch = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.switch.on:
            raise InputError(
                "outside of `with explain_model.inactive()`, a backward pass carries relevance, which is no gradient of "
                "parameters and no derivative of relevance. Call backward() or torch.autograd.grad inside that context; for "
                "the relevance of inputs alone, use lrpfx.attribute, or torch.autograd.grad(output, inputs, seed)",
                topic="derivative-of-relevance",
            )
        return None, *gradients


class LiveParameter(nn.Module):
    """A parameter at an operation without a rule: it has a derivative only while the rules are off."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.switch = switch
        self.eval()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        (live,) = with_derivatives_only_off(self.switch, [value], (0,))
        return live  # type: ignore[no-any-return]
