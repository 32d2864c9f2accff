"""Functions of users that write into the tensors that they are given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lrpfx.errors import RuleError
from lrpfx.ir.node import map_arguments
from lrpfx.support.torch_internals import unwrapped

_REMEDY = "in place, which would change tensors of the model or of its caller. Return a new tensor, as x.clamp(min=0) does"


def on_copies(function: Callable[..., Any], *values: Any) -> Any:
    """A user's function of copies of tensors, or of lists of tensors; other values are passed as they are.

    `RuleError` if it writes into a copy. Where that is not known, as in a compiled program, no more than a copy is changed.
    """
    with torch.inference_mode(False):  # tensors of inference mode do not count what is written into them
        copies = map_arguments(values, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
        before = _versions(copies)
        result = function(*copies)
        if _versions(copies) != before:
            name = getattr(function, "__name__", type(function).__name__)
            raise RuleError(f"the function {name} of a rule writes into its argument {_REMEDY}", topic="own-rules")
    return result


def version_of(tensor: torch.Tensor) -> int | None:
    """How often something was written into a tensor; None where torch does not count it."""
    tensor = unwrapped(tensor)
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _versions(values: Any) -> list[int | None]:
    found: list[int | None] = []
    map_arguments(values, lambda leaf: found.append(version_of(leaf)) if isinstance(leaf, torch.Tensor) else None)
    return found


class Untouched:
    """Tensors that a rule may read, but not write into. `tensors`: by what they are; other values among them are left out."""

    def __init__(self, tensors: Mapping[str, Sequence[Any]]) -> None:
        pairs = [(what, value) for what, values in tensors.items() for value in values if isinstance(value, torch.Tensor)]
        self.versions = [(what, tensor, version_of(tensor)) for what, tensor in pairs]

    def check(self, rule: Any, name: str = "") -> None:
        """Raise `RuleError` if something was written into one of them."""
        for what, tensor, version in self.versions:
            if version_of(tensor) != version:
                raise RuleError(f"{name and f'{name}: '}{rule} writes into the {what} {_REMEDY}", topic="own-rules")
