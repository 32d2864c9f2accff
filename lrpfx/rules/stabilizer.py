"""Stabilizers: keep denominators away from zero without changing their sign."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from lrpfx.errors import InputTypeError
from lrpfx.support.numbers import finite_number

StabilizerFunction = Callable[[torch.Tensor], torch.Tensor]


def stabilize(
    input: torch.Tensor,
    epsilon: float = 1e-6,
    clip: bool = False,
    norm_scale: bool = False,
    dim: int | Sequence[int] | None = None,
) -> torch.Tensor:
    """Move values away from zero; zero counts as positive.

    Parameters
    ----------
    input
        The values.
    epsilon
        By how much. With 0, zero becomes infinity: an output without contributions passes no relevance on. In float16 it is at
        least 9.8e-4.
    clip
        Whether only magnitudes below `epsilon` change: they are raised to it.
    norm_scale
        Whether `epsilon` is a fraction of the root mean square of `input` over `dim`.
    dim
        One dimension or several (default: all but the first).
    """
    if epsilon == 0:
        return _infinite_where_zero(input)
    epsilon = effective_epsilon(epsilon, input.dtype)
    if norm_scale:
        dims = range(1, input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
        scale = epsilon * input.square().mean(dim=tuple(dims), keepdim=True).sqrt()
    else:
        scale = torch.full((), epsilon, dtype=input.dtype, device=input.device)
    if clip:
        sign = torch.where(input >= 0, 1.0, -1.0).to(input)
        return sign * torch.clamp(input.abs(), min=scale)
    return input + torch.where(input >= 0, scale, -scale)


def _infinite_where_zero(input: torch.Tensor) -> torch.Tensor:
    return torch.where(input == 0, torch.full_like(input, torch.inf), input)


def effective_epsilon(epsilon: float, dtype: torch.dtype) -> float:
    """`epsilon`, but at least 9.8e-4 in float16: the smallest divisor at which a relevance of 64 does not overflow."""
    return max(epsilon, 64.0 / torch.finfo(dtype).max) if dtype == torch.float16 else epsilon


class Stabilizer:
    """`stabilize` with fixed settings, of which `epsilon` is not negative. Other arguments: as for `lrpfx.core.stabilize`."""

    def __init__(
        self, epsilon: float = 1e-6, clip: bool = False, norm_scale: bool = False, dim: int | Sequence[int] | None = None
    ) -> None:
        self.epsilon = finite_number("the epsilon of a stabilizer", epsilon, least=0.0)
        self.clip = clip
        self.norm_scale = norm_scale
        self.dim = dim

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The stabilized values of `input`."""
        return stabilize(input, self.epsilon, self.clip, self.norm_scale, self.dim)

    def of_sign(self, input: torch.Tensor, positive: bool) -> torch.Tensor:
        """Stabilize values of a known sign: >= 0 if `positive`, <= 0 otherwise. Without gradients, `input` may be overwritten.

        Values of the other sign are rounding errors and count as zero.
        """
        if self.clip or self.norm_scale or self.epsilon == 0:
            return self(input.clamp(min=0.0) if positive else -(-input).clamp(min=0.0))
        epsilon = effective_epsilon(self.epsilon, input.dtype)
        if torch.is_grad_enabled():
            return input.clamp(min=0.0) + epsilon if positive else input.clamp(max=0.0) - epsilon
        return input.clamp_(min=0.0).add_(epsilon) if positive else input.clamp_(max=0.0).sub_(epsilon)

    @staticmethod
    def ensure(value: Any) -> StabilizerFunction:
        """A stabilizer with the epsilon `value`; a callable is returned as it is. `InputTypeError` for anything else."""
        if isinstance(value, Real) and not isinstance(value, bool):
            return Stabilizer(epsilon=float(value))
        if callable(value):
            stabilizer: StabilizerFunction = value
            return stabilizer
        raise InputTypeError(f"a stabilizer is a number or a callable, not {value!r} of type {type(value).__name__}")

    def __repr__(self) -> str:
        settings = [f"{self.epsilon:g}"]
        settings += [name for name in ("clip", "norm_scale") if getattr(self, name)]
        settings += [] if self.dim is None else [f"dim={self.dim if isinstance(self.dim, int) else tuple(self.dim)}"]
        return settings[0] if len(settings) == 1 else f"Stabilizer({', '.join(settings)})"
