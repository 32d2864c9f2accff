"""Windows of convolutions, pooling and resizing: the positions of the input that each position of the result reads.

The windows along one dimension are a tensor of shape (positions of the result, largest window), with -1 for missing entries.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lrpfx.ir.operator import Bound

#: The size of the dimensions that are not resized. torch resizes images of width 1 wrongly with `antialias`.
_OTHER = 2


def of_convolution(bound: Bound, kernel: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[torch.Tensor]:
    """The windows along each dimension of a convolution, or of pooling with the same arguments.

    `before`, `after`: the sizes of the input and of the result.
    """
    count = len(kernel)
    stride, dilation = (each(bound.get(name, 1), count) for name in ("stride", "dilation"))
    added = bound.get("amounts") or (0,) * 2 * count  # the last dimension comes first
    padding = [own + more for own, more in zip(_padding(bound["padding"], kernel, dilation), added[-2::-2], strict=True)]
    found = []
    for size, sizes_after, taps, step, spread, pad in zip(before, after, kernel, stride, dilation, padding, strict=True):
        places = torch.arange(sizes_after)[:, None] * step - pad + torch.arange(taps) * spread
        found.append(_inside(places, size))
    return found


def of_transposed_convolution(
    bound: Bound, kernel: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> list[torch.Tensor]:
    """The same for a transposed convolution: position i of the input reaches i * stride - padding + tap * dilation."""
    count = len(kernel)
    stride, padding, dilation = (each(bound[name], count) for name in ("stride", "padding", "dilation"))
    found = []
    for size, sizes_after, taps, step, spread, pad in zip(before, after, kernel, stride, dilation, padding, strict=True):
        places = torch.arange(sizes_after)[:, None] + pad - torch.arange(taps) * spread
        reached = torch.div(places, step, rounding_mode="floor")
        found.append(_inside(torch.where(places % step == 0, reached, -1), size))
    return found


def of_adaptive_pooling(before: Sequence[int], after: Sequence[int]) -> list[torch.Tensor]:
    """The same for adaptive pooling: from floor(o n / m) to ceil((o + 1) n / m) for n positions and m results."""
    found = []
    for size, count in zip(before, after, strict=True):
        places = torch.arange(count)
        first = torch.div(places * size, count, rounding_mode="floor")
        end = -torch.div(-(places + 1) * size, count, rounding_mode="floor")
        window = first[:, None] + torch.arange(int((end - first).max()))
        found.append(torch.where(window < end[:, None], window, -1))
    return found


def of_resizing(
    function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any], before: Sequence[int], after: Sequence[int]
) -> list[torch.Tensor]:
    """The same for a linear function that resizes each dimension by itself: what it makes of single positions.

    `args`: without the input. Its other arguments are one number for all dimensions, or one for each of them.
    """
    found = []
    for place, (size, count) in enumerate(zip(before, after, strict=True)):
        own = [_along(value, place, len(before)) for value in args]
        named = {name: _along(value, place, len(before)) for name, value in options.items()}
        alone = [size if at == place else 1 for at in range(len(before))]
        shape = [size if at == place else _OTHER for at in range(len(before))]
        single = torch.eye(size, dtype=torch.float64).reshape(size, 1, *alone).expand(size, 1, *shape)
        response = function(single.contiguous(), *own, **named).movedim(place + 2, 1)
        reads = (response != 0).flatten(2).any(2).T
        if len(reads) != count:
            raise ValueError("the function does not resize each dimension by itself")
        places = torch.where(reads, torch.arange(size), -1).sort(1, descending=True).values
        found.append(places[:, : int(reads.sum(1).max())])
    return found


def _along(value: Any, place: int, count: int) -> Any:
    """An argument of a resizing for values that have the size 2 in all dimensions but one, which it keeps."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    values = value if isinstance(value, (tuple, list)) else [value] * count
    kept = {int: _OTHER, float: 1.0}  # a size, or a factor
    return [item if at == place else kept[type(item)] for at, item in enumerate(values)]


def each(value: Any, count: int) -> list[int]:
    """One number for each dimension."""
    if isinstance(value, int):
        return [value] * count
    return list(value) * (count // len(value))


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """What is added in front of each dimension."""
    if padding == "same":
        return [spread * (taps - 1) // 2 for taps, spread in zip(kernel, dilation, strict=True)]
    return each(0 if padding == "valid" else padding, len(kernel))


def _inside(places: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where((places >= 0) & (places < size), places, -1)
