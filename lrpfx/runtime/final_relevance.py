"""Relevance without a derivative."""

from typing import Any

import torch

from lrpfx.errors import InputError


def final(relevance: torch.Tensor) -> torch.Tensor:
    """The relevance, made non-differentiable if gradients are enabled."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return relevance
    return _Final.apply(relevance)  # type: ignore[no-any-return, no-untyped-call]


class _Final(torch.autograd.Function):
    """Identity without a derivative.

    Derivatives of relevance would be wrong: modified weights do not follow the parameters, and the rules of other
    layers would act on the derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(relevance: torch.Tensor) -> torch.Tensor:
        return relevance.view_as(relevance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise InputError(
            "relevance is not differentiable in this module; transform the model with fold=False, and take the derivative "
            "inside `with explain_model.inactive()`",
            topic="derivative-of-relevance",
        )
