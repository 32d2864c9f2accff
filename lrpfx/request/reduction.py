"""How relevance is reduced: over channels, over places, or to bytes."""

from typing import Any

import torch

from lrpfx.errors import InputError

#: Sums over channels, of relevance or of its magnitude; sums over places for each channel; pictures.
SUM, ABSOLUTE, CHANNELS, BYTES = "sum", "absolute", "channels", "bytes"
Reduction = str | None  # None: relevance as it is
#: The reductions that keep numbers, so that what was reduced adds up.
OF_NUMBERS: tuple[Reduction, ...] = (None, SUM, ABSOLUTE, CHANNELS)
ALL: tuple[Reduction, ...] = (*OF_NUMBERS, BYTES)


def checked_reduction(name: str, reduction: Any, known: tuple[Reduction, ...], topic: str | None = None) -> Reduction:
    """A reduction that is among those that are known here. `InputError` for another."""
    if not isinstance(reduction, (str, type(None))) or reduction not in known:
        raise InputError(f"{name} must be one of {', '.join(map(repr, known))}, not {reduction!r}", topic=topic)
    return reduction


def reduced(relevance: torch.Tensor, reduction: Reduction, channels: int = 1, leading: int = 1) -> torch.Tensor:
    """Relevance after a reduction.

    `channels`: the dimension that has them. `leading`: how many dimensions in front are those of samples, targets and
    conditions, of which each has relevance of its own. Bytes are uint8: 128 is zero, and 1 and 255 are the largest magnitude of
    the sample.
    """
    if reduction is None:
        return relevance
    if reduction == CHANNELS:
        places = [one for one in range(leading, relevance.ndim) if one != channels]
        return relevance.sum(places) if places else relevance
    if reduction == ABSOLUTE:
        return relevance.abs().sum(channels)
    total = relevance.sum(channels)
    if reduction == SUM:
        return total
    largest = (
        total.abs().reshape(*total.shape[:leading], -1).amax(-1).reshape(*total.shape[:leading], *[1] * (total.ndim - leading))
    )
    scaled = total / torch.where(largest > 0, largest, torch.ones_like(largest))
    return (scaled * 127.0 + 128.0).round().to(torch.uint8)
