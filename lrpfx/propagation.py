"""The autograd Function that puts a rule in place of a layer's gradient."""

from dataclasses import dataclass
from typing import Any

import torch

from .errors import RuleError
from .hooks import Hook, LayerCall
from .layer_view import Operation

ABSENT = -1  # the place of a parameter that a branch leaves out, such as a bias taken as zero


@dataclass(frozen=True)
class RuledOperation:
    """An operation with the rule that replaces its gradient.

    The operation's data inputs come first among the tensors that a call passes, then every distinct parameter, modified or
    not. `parameters` says where the operation's own parameters stand among them, and `branches[k]` where those of the rule's
    k-th modified copy do, or `ABSENT`. From `first_extra` on stand the operation's other values.
    """

    rule: Hook
    operation: Operation
    parameters: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]
    first_extra: int

    def split(
        self, values: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[tuple[Any, ...], ...], tuple[Any, ...]]:
        """Inputs, own parameters, parameters of each branch, and extras."""
        branches = tuple(tuple(None if at == ABSENT else values[at] for at in branch) for branch in self.branches)
        parameters = tuple(values[at] for at in self.parameters)
        return values[: self.operation.inputs], parameters, branches, values[self.first_extra :]


class PropagateRelevance(torch.autograd.Function):
    """Forward: the layer. Backward: its rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ruled: RuledOperation, *values: Any) -> Any:
        inputs, parameters, _, extras = ruled.split(values)
        output = ruled.operation((*inputs, *parameters, *extras))
        if not isinstance(output, torch.Tensor):
            raise RuleError(f"{ruled.rule} takes a layer that returns one tensor, but this one returns {type(output).__name__}")
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ruled, *values = inputs
        ctx.ruled = ruled
        ctx.shapes = [value.shape for value in values[: ruled.operation.inputs]]
        if not ruled.rule.saves_inputs:
            values = [None] * len(values)
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
        tensors = [value if isinstance(value, torch.Tensor) else None for value in values]
        ctx.save_for_backward(*tensors, output if ruled.rule.saves_output else None)

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ruled: RuledOperation = ctx.ruled
        *tensors, output = ctx.saved_tensors
        values = tuple(other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True))
        inputs, parameters, branches, extras = ruled.split(values)
        call = LayerCall(ruled.operation, inputs, parameters, branches, extras, output)
        relevances = ruled.rule.propagate(call, relevance)
        if len(relevances) != len(ctx.shapes):
            raise RuleError(f"{ruled.rule} returned {len(relevances)} relevances for {len(ctx.shapes)} inputs")
        for result, shape in zip(relevances, ctx.shapes, strict=True):
            if result is not None and result.shape != shape:
                raise RuleError(
                    f"{ruled.rule} returned relevance of shape {tuple(result.shape)} for an input of shape {tuple(shape)}; "
                    "give this layer a rule that fits a layer which changes the shape"
                )
        return (None, *relevances, *[None] * (len(values) - len(relevances)))


def propagate_relevance(ruled: RuledOperation, *values: Any) -> Any:
    """Run the layer, and its rule in place of the gradient when relevance flows back."""
    return PropagateRelevance.apply(ruled, *values)  # type: ignore[no-untyped-call]
