"""Derivatives by torch.func, which an interrupt such as Ctrl-C leaves whole.

torch.func keeps a stack. An interrupt as it enters or leaves a derivative would leave an entry on it, and tensors that nothing
can read. The stack is that of a thread for `vjp`, but forward-mode derivatives (`jvp`, `jacfwd`) number their levels for all
threads together, and give wrong results where two threads use them at once: nothing here needs them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lrpfx.support.interrupts import undisturbed
from lrpfx.support.torch_internals import is_traced, is_transformed


def vjp(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """The output of a function, and what maps its gradient to those of the inputs: `torch.func.vjp`."""
    with nullcontext() if torch.compiler.is_compiling() else undisturbed():
        try:
            output, pull = torch.func.vjp(function, *inputs)[:2]
        except RuntimeError as error:
            if "setup_context" not in str(error):
                raise
            return _by_autograd(function, inputs)
    return output, pull


def derivative_of(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """The derivative of an element-wise function.

    torch.func refuses hooks for saved tensors, which recomputed parts of a network run under: without a transform, torch's own
    derivatives do it, and the hooks see nothing of it.
    """
    if is_traced(value) or is_transformed(value):
        output, pull = vjp(function, value)
        found: torch.Tensor = pull(torch.ones_like(output))[0]
        return found
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        given = value.detach().requires_grad_()
        output = function(given)
        if not output.requires_grad:
            return torch.zeros_like(value)
        (found,) = torch.autograd.grad(output, given, torch.ones_like(output), materialize_grads=True)
    return found


def _same(value: Any) -> Any:
    return value


def _by_autograd(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """The same for what torch.func refuses: custom operators, and autograd functions without a `setup_context`."""
    live = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [input if input.requires_grad else input.detach().requires_grad_() for input in inputs]
        output = function(*given)

    def pull(gradient: torch.Tensor) -> tuple[Any, ...]:
        return torch.autograd.grad(
            output, given, gradient, retain_graph=True, create_graph=torch.is_grad_enabled(), materialize_grads=True
        )

    return (output if live else output.detach()), pull
