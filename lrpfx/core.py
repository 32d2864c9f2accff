"""The vocabulary of rules under Zennit's names, re-exported from the modules that define it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lrpfx.canonizers import collect_leaves
from lrpfx.composites import Composite, CompositeContext
from lrpfx.rules.hook import Hook
from lrpfx.rules.modifiers import ParamMod, expand
from lrpfx.rules.stabilizer import Stabilizer, stabilize
from lrpfx.rules.template import BasicHook
from lrpfx.runtime.module_mode.registration import RemovableHandle, RemovableHandleList

__all__ = [
    "BasicHook",
    "Composite",
    "CompositeContext",
    "Hook",
    "Identity",
    "ParamMod",
    "RemovableHandle",
    "RemovableHandleList",
    "Stabilizer",
    "collect_leaves",
    "expand",
    "stabilize",
    "uncompress",
    "zero_wrap",
]

Modifier = Callable[[torch.Tensor, str], torch.Tensor]


def zero_wrap(zero_params: str | Sequence[str] | None) -> Callable[[Modifier], Modifier]:
    """A decorator for parameter modifiers: those named in `zero_params` become zero, all others are modified."""

    def wrap(modifier: Modifier) -> Modifier:
        if not zero_params:
            return modifier

        def modify(parameter: torch.Tensor, name: str) -> torch.Tensor:
            return torch.zeros_like(parameter) if name in zero_params else modifier(parameter, name)

        return modify

    return wrap


def uncompress(data: Iterable[Any], selector: Iterable[Any], compressed: Iterable[Any]) -> Iterator[Any]:
    """Undo `itertools.compress(data, selector)`: the next item of `compressed` where selected, that of `data` elsewhere.

    `selector` says of each item of `data` whether it was selected. Ends with the shortest of the three.
    """
    replacements = iter(compressed)
    for item, selected in zip(data, selector, strict=False):
        if not selected:
            yield item
            continue
        try:
            yield next(replacements)
        except StopIteration:
            return


class Identity(torch.autograd.Function):
    """The identity of one or more tensors, as a node of the autograd graph. Returns a tuple."""

    @staticmethod
    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The `inputs`, as new tensors of the same memory."""
        return tuple(input.view_as(input) for input in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Mark in `ctx` the tensors of `output` whose `inputs` need no gradient."""
        ctx.mark_non_differentiable(*(out for out, wanted in zip(output, ctx.needs_input_grad, strict=True) if not wanted))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The `gradients` of the outputs as they are. `ctx` is not used."""
        return gradients
