"""Derivatives by torch.func, which an interrupt such as Ctrl-C leaves whole.

torch.func keeps a stack for the process. An interrupt as it enters or leaves a derivative would leave an entry on it, and
tensors that nothing can read.
"""

from collections.abc import Callable
from typing import Any

import torch

from lrpfx.support.interrupts import undisturbed


def vjp(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """The output of a function, and what maps its gradient to those of the inputs: `torch.func.vjp`."""
    found: tuple[Any, Callable[..., tuple[Any, ...]]] = _whole(torch.func.vjp, function, *inputs)
    return found


def jvp(function: Callable[..., Any], inputs: Any, directions: Any) -> tuple[Any, Any]:
    """The output of a function, and its derivative along the directions: `torch.func.jvp`."""
    found: tuple[Any, Any] = _whole(torch.func.jvp, function, inputs, directions)
    return found


def _whole(derivative: Callable[..., Any], *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        return derivative(*arguments)
    with undisturbed():
        return derivative(*arguments)
