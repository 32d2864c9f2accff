"""Whether a model's input shows the part of an image that a geometry says."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from lrpfx.images.geometry import Array, Axis, Geometry
from lrpfx.pictures.maps import resized

#: The share of the variance of the input that the image must explain. Measured on images: 0.93 or more for what keeps
#: the geometry (colours, contrast, blur, any interpolation), 0.85 or less for parts that are off by a tenth of a side.
_LEAST = 0.9
#: Both are compared as means over at most so many cells along each side.
_CELLS = 24
_FINE = 96  # pixels along each side on which the image is blurred
_BLURS = (1 / 64, 1 / 32, 1 / 16)  # of the shorter side
_FILTERS = tuple(Image.Resampling[name] for name in ("BICUBIC", "BILINEAR", "NEAREST", "BOX"))
_FLAT = 2.0  # levels of 255: the deviation of an image that shows nothing


def shows(image: Image.Image, input: Array, geometry: Geometry) -> bool:
    """Whether an input (channels, height, width) is a picture of the part of an image that a geometry says.

    Each channel of the input may be any linear combination of red, green and blue, of an image that was resized in any way
    or blurred. Padding is left out. An image of one colour agrees with inputs of one colour.
    """
    columns, rows = _inside(geometry.columns), _inside(geometry.rows)
    if min(columns.count, rows.count) < 2:
        return True
    cells = min(_CELLS, columns.count), min(_CELLS, rows.count)
    part = input[:, rows.first : rows.first + rows.count, columns.first : columns.first + columns.count]
    if not np.isfinite(part).all():
        return False
    seen = _means(part, cells)
    seen = seen - seen.mean(0)
    energy = (seen**2).sum(0)
    varied = energy > 1e-12 * float(np.abs(part).max()) ** 2
    for picture in _pictures(image, columns, rows):
        colors = np.asarray(picture, dtype=np.float64)[:: -1 if rows.mirrored else 1, :: -1 if columns.mirrored else 1]
        colors = _means(np.moveaxis(colors, -1, 0), cells)
        if not varied.any():
            return bool(colors.std(0).max() <= _FLAT)
        if _explained(colors, seen[:, varied], energy[varied]) >= _LEAST:
            return True
    return False


@dataclass(frozen=True)
class _Inside:
    """The pixels of an input, along an axis, that lie within the image, and the part of the image they cover."""

    first: int
    count: int
    start: float
    end: float
    mirrored: bool


def _inside(axis: Axis) -> _Inside:
    low, high = np.sort([axis.edges[:-1], axis.edges[1:]], axis=0)
    slack = 1e-6 * abs(axis.step)
    found = np.flatnonzero((low >= -slack) & (high <= axis.length + slack))
    if not len(found):
        return _Inside(0, 0, 0.0, 0.0, False)
    start, end = max(float(low[found].min()), 0.0), min(float(high[found].max()), float(axis.length))
    return _Inside(int(found[0]), len(found), start, end, axis.step < 0)


def _pictures(image: Image.Image, columns: _Inside, rows: _Inside) -> Iterator[Image.Image]:
    """The part as the input may show it: resized by one filter or another, or blurred."""
    size, box = (columns.count, rows.count), (columns.start, rows.start, columns.end, rows.end)
    for filter in _FILTERS:
        yield image.resize(size, filter, box=box, reducing_gap=4.0)
    fine = min(_FINE, columns.count), min(_FINE, rows.count)
    sharp = image.resize(fine, Image.Resampling.BILINEAR, box=box, reducing_gap=4.0)
    width, height = columns.end - columns.start, rows.end - rows.start
    for share in _BLURS:
        radius = share * min(width, height)
        yield sharp.filter(ImageFilter.GaussianBlur((radius * fine[0] / width, radius * fine[1] / height)))


def _means(channels: Array, cells: tuple[int, int]) -> Array:
    """The mean of each channel, (channels, height, width), in each cell, (cells, channels)."""
    return np.stack([resized(channel, cells).ravel() for channel in channels], axis=1)


def _explained(colors: Array, seen: Array, energy: Array) -> float:
    """The share of the variance of each channel, in the mean, that a linear combination of colours explains."""
    causes = np.concatenate([colors, np.ones((len(colors), 1))], axis=1)
    rest = seen - causes @ np.linalg.lstsq(causes, seen, rcond=None)[0]
    return float((1 - (rest**2).sum(0) / energy).mean())
