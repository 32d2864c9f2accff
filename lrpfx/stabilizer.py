"""Stabilizers: keep denominators away from zero without changing their sign."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import InputTypeError

StabilizerFunction = Callable[[torch.Tensor], torch.Tensor]


def stabilize(
    input: torch.Tensor,
    epsilon: float = 1e-6,
    clip: bool = False,
    norm_scale: bool = False,
    dim: Sequence[int] | None = None,
) -> torch.Tensor:
    """Move `input` away from zero by `epsilon`; zero counts as positive.

    With `clip`, magnitudes below `epsilon` are raised to it and the others stay. With `norm_scale`, `epsilon` is a fraction
    of the root mean square of `input` over `dim` (default: all dimensions but the first).
    """
    scale: float | torch.Tensor = epsilon
    if norm_scale:
        dim = tuple(range(1, input.ndim)) if dim is None else tuple(dim)
        scale = epsilon * input.square().mean(dim=dim, keepdim=True).sqrt()
    sign = torch.where(input >= 0, 1.0, -1.0).to(input)
    if clip:
        return sign * torch.clamp(input.abs(), min=scale)
    return input + sign * scale


class Stabilizer:
    """`stabilize` with fixed settings."""

    def __init__(
        self, epsilon: float = 1e-6, clip: bool = False, norm_scale: bool = False, dim: Sequence[int] | None = None
    ) -> None:
        self.epsilon = epsilon
        self.clip = clip
        self.norm_scale = norm_scale
        self.dim = dim

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return stabilize(input, self.epsilon, self.clip, self.norm_scale, self.dim)

    @staticmethod
    def ensure(value: Any) -> StabilizerFunction:
        """A stabilizer from a number (its epsilon) or a callable (returned as it is); `InputTypeError` otherwise."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Stabilizer(epsilon=float(value))
        if callable(value):
            stabilizer: StabilizerFunction = value
            return stabilizer
        raise InputTypeError(f"a stabilizer is a number or a callable, not {value!r} of type {type(value).__name__}")

    def __repr__(self) -> str:
        settings = [f"{self.epsilon:g}"]
        settings += [name for name in ("clip", "norm_scale") if getattr(self, name)]
        settings += [] if self.dim is None else [f"dim={tuple(self.dim)}"]
        return settings[0] if len(settings) == 1 else f"Stabilizer({', '.join(settings)})"
