"""Functions of the user, targets and outputs, whose failures are those of single samples."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from lrpfx.errors import InputError, LrpfxError, first_lines, is_out_of_memory
from lrpfx.request.targets import Target

_DEVICE_ERROR: type[Exception] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # newer releases have it


@dataclass(frozen=True, eq=False)
class ReportedTarget(Target):
    """A target whose exceptions are an `InputError`, see `reported`."""

    target: Target

    @property
    def is_of_classes(self) -> bool:
        return self.target.is_of_classes

    @property
    def is_of_positions(self) -> bool:
        return self.target.is_of_positions

    def seed(self, output: torch.Tensor, chosen: str = "output") -> torch.Tensor:
        return self._of(partial(self.target.seed, chosen=chosen), output)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return self._of(self.target.relevance, output)

    def multiplier(self, output: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return self._of(partial(self.target.multiplier, seed=seed), output)

    def _of(self, method: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = reported(method, "target", self.target.plain)(output)
        return found


def reported(function: Any, what: str, named: Any = None) -> Any:
    """A function of the user whose exceptions are an `InputError`, which is that of single samples; others as they are.

    Errors that memory ran out, or that a device failed, are not those of samples. `named`: what has the name for messages, if
    it is not the function.
    """
    if not callable(function) or isinstance(function, (torch.Tensor, type)):
        return function

    @wraps(function, updated=())
    def called(output: Any) -> Any:
        try:
            return function(output)
        except (LrpfxError, MemoryError, torch.OutOfMemoryError, _DEVICE_ERROR):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            given = function if named is None else named
            name = getattr(given, "__qualname__", type(given).__qualname__)
            raise InputError(f"the {what} function {name} failed: {first_lines(error, 1)}") from error

    return called
