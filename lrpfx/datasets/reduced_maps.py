"""What of a sample's relevance is compared or averaged: a map of its positions, or a vector."""

from typing import Any

import numpy as np

from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures.maps import Floats, resized
from lrpfx.support.numbers import whole_number

Size = int | tuple[int, int] | None


def checked_size(size: Any) -> Size:
    """The size of maps: the longer side at most, or (height, width)."""
    meaning = "size is the longest side of a map, or its (height, width), in pixels"
    if size is None:
        return None
    if not isinstance(size, (tuple, list)):
        return whole_number(size, meaning, 1, "statistics")
    if len(size) != 2:
        raise InputError(f"{meaning}, not {size!r}", topic="statistics")
    height, width = (whole_number(side, meaning, 1, "statistics") for side in size)
    return height, width


def without_channels(values: Floats, what: str) -> Floats:
    """Maps (samples, height, width), summed over channels, or vectors (samples, features)."""
    if values.ndim == 4:
        values = values.sum(axis=1)
    if values.ndim not in (2, 3) or values[0].size == 0:
        raise InputTypeError(
            f"{what} of a sample is (channels, height, width), (height, width) or a vector, not of shape {values.shape[1:]}",
            topic="statistics",
        )
    return values


def pooled(maps: Floats, size: Size) -> Floats:
    """Maps in another size, by means over areas; vectors as they are."""
    if size is None or maps.ndim == 2:
        return maps
    height, width = maps.shape[1:]
    if isinstance(size, tuple):
        after = size
    else:
        share = min(1.0, size / max(height, width))
        after = (max(1, round(height * share)), max(1, round(width * share)))
    if after == (height, width):
        return maps
    return np.stack([resized(one, after[::-1]) for one in maps])


def of_equal_weight(maps: Floats) -> Floats:
    """Each map divided by its sum of magnitudes. A map without relevance stays as it is."""
    totals = np.abs(maps).reshape(len(maps), -1).sum(axis=1)
    divided: Floats = maps / np.where(totals > 0, totals, 1.0).reshape(-1, *[1] * (maps.ndim - 1))
    return divided
