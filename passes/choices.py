"""Choices between values, such as the experts of a token, that rounding may decide one way or the other.

A graph and its model round differently. Where two experts of a mixture have nearly the same score, one may take the first and
the other the second, and then all later values differ, although nothing is wrong. For a comparison, the graph therefore makes
the model's choices, but only those that its own values allow up to rounding.
"""

from collections.abc import Callable
from typing import Any

import torch

from lrpfx.support.torch_internals import TorchDispatchMode

aten = torch.ops.aten

#: Operators that choose entries along a dimension -> the position of the indices among the results, -1 for the only result,
#: and the position and default of the argument that is the dimension; None for all entries.
_CHOOSING: dict[Any, tuple[int, int, int | None]] = {
    aten.topk.default: (1, 2, -1),
    aten.sort.default: (1, 1, -1),
    aten.sort.stable: (1, 2, -1),
    aten.max.dim: (1, 1, 0),
    aten.min.dim: (1, 1, 0),
    aten.kthvalue.default: (1, 2, -1),
    aten.median.dim: (1, 1, -1),
    aten.argmax.default: (-1, 1, None),
    aten.argmin.default: (-1, 1, None),
}
#: Comparisons: which entries are chosen.
_COMPARING = tuple(
    getattr(getattr(aten, name), overload) for name in ("gt", "ge", "lt", "le") for overload in ("Tensor", "Scalar")
)


class RecordChoices(TorchDispatchMode):
    """A context that records which entries operators choose, in `made`: for each operator, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[Any, list[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _chooses(func, args):
            self.made.setdefault(func, []).append(_chosen(func, result).clone())
        return result


class RepeatChoices(TorchDispatchMode):
    """A context in which operators choose the recorded entries instead of others that are as good up to rounding.

    `tolerance`: for a dtype, the largest difference of such entries, relative to the largest of all.
    """

    def __init__(self, made: dict[Any, list[torch.Tensor]], tolerance: Callable[[torch.dtype], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = {operator: iter(chosen) for operator, chosen in made.items()}
        self.tolerance = tolerance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _chooses(func, args):
            return result
        wanted = next(self.left.get(func, iter(())), None)
        own = _chosen(func, result)
        if wanted is None or wanted.shape != own.shape or torch.equal(wanted, own):
            return result
        scores = args[0]
        allowed = self.tolerance(scores.dtype) * largest_magnitude(scores)
        if func in _COMPARING:
            as_good = (wanted == own) | ((scores - args[1]).abs() <= allowed)
            return wanted.clone() if as_good.all() else result
        place, position, default = _CHOOSING[func]
        dimension = args[position] if len(args) > position else (kwargs or {}).get("dim", default)
        repeated, best = (_entries(scores, indices, dimension) for indices in (wanted, own))
        if not ((repeated == best) | ((repeated - best).abs() <= allowed)).all():
            return result
        return wanted.clone() if place < 0 else (repeated, wanted.clone())


def _chooses(func: Any, args: Any) -> bool:
    """Whether a call chooses among floating-point values. A sorted integer is no matter of rounding."""
    known = func in _CHOOSING or func in _COMPARING
    return known and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()


def _chosen(func: Any, result: Any) -> torch.Tensor:
    place = _CHOOSING[func][0] if func in _CHOOSING else -1
    chosen: torch.Tensor = result if place < 0 else result[place]
    return chosen


def _entries(scores: torch.Tensor, indices: torch.Tensor, dimension: int | None) -> torch.Tensor:
    """The entries of `scores` at `indices` along a dimension, or among all entries."""
    if dimension is None or scores.ndim == 0:
        return scores.flatten()[indices.flatten()]
    if indices.ndim == scores.ndim:
        return scores.gather(dimension, indices)
    return scores.gather(dimension, indices.unsqueeze(dimension)).squeeze(dimension)


def largest_magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor; 0 for integer and boolean tensors."""
    finite = tensor[torch.isfinite(tensor)].abs() if tensor.is_floating_point() or tensor.is_complex() else tensor.flatten()[:0]
    return float(finite.max()) if finite.numel() else 0.0
