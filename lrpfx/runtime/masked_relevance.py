"""Masks on relevance, which are inputs of a graph."""

from typing import Any

import torch
from torch import nn

from lrpfx.errors import InputError, InputTypeError
from lrpfx.runtime.ruled_operation import Switch
from lrpfx.support.tensors import not_dense
from lrpfx.support.torch_internals import apply


class KeepRelevanceBy(torch.autograd.Function):
    """Forward: identity. Backward: relevance, or a multiplier, times the mask; the plain gradient while the switch is off.

    The mask itself has no gradient: it is not data.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, mask: torch.Tensor, switch: Switch | None) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, mask, ctx.switch = inputs
        ctx.save_for_backward(mask)

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        is_off = ctx.switch is not None and not ctx.switch.on
        return relevance if is_off else relevance * ctx.saved_tensors[0], None, None


class MaskedRelevance(nn.Module):
    """One place of a condition: the value, whose relevance is multiplied by a mask that broadcasts to it."""

    def __init__(self, place: str, switch: Switch | None) -> None:
        """`switch`: that of the rules, if they can be switched off."""
        super().__init__()
        self.place = place
        self.switch = switch
        self.eval()

    def forward(self, value: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return value
        if not torch.compiler.is_compiling():
            mask = checked_mask(mask, self.place, value)
        kept: torch.Tensor = apply(KeepRelevanceBy, value, mask.to(value), self.switch)
        return kept

    def extra_repr(self) -> str:
        return self.place


def checked_mask(mask: Any, place: str, value: torch.Tensor) -> torch.Tensor:
    """The mask. Raises `InputError` and `InputTypeError` unless it is finite and broadcasts to the value."""
    if not isinstance(mask, torch.Tensor):
        raise InputTypeError(f"the mask for {place} is a {type(mask).__name__}, not a tensor", topic="conditions")
    if not_dense(mask) is not None:
        raise InputTypeError(f"the mask for {place} is {not_dense(mask)}", topic="conditions")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputTypeError(
            f"the mask for {place} has dtype {mask.dtype}: masks are boolean or floating point", topic="conditions"
        )
    fits = mask.ndim <= value.ndim and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(value.shape), strict=False)
    )
    if not fits:
        raise InputError(
            f"the mask for {place} has the shape {tuple(mask.shape)}, but its value has {tuple(value.shape)}",
            topic="conditions",
        )
    if not torch.isfinite(mask).all():
        raise InputError(f"the mask for {place} has values that are not finite", topic="values-not-finite")
    return mask.clone() if mask.is_inference() else mask
