"""Where each number that a processor makes of an image lies on it, in whatever order: rows of patches, tiles, an image."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lrpfx.errors import InputError

Array = NDArray[np.float64]
#: A ramp is this many pixels long, or this part of a side: one has 256 levels, and filters see some pixels around.
_RAMP, _PART = 32, 8
#: How near to the middle of a ramp, as brightness, a place is read from it.
_NEAR = 0.3
#: The least difference between black and white, as a share of the largest, of entries that show an image.
_SHOWN = 0.05
#: The largest share of an image that may be in no entry: rounding at its edges.
_DROPPED = 0.02
#: Places of entries that are nearer than this, in pixels, are the same.
_STILL = 0.01
#: Cells along each side in which an image and its entries are compared, and the share of its variance that these must show.
_CELLS, _LEAST = 16, 0.9
_TOPIC = "preprocessing"


@dataclass(frozen=True, eq=False)
class EntryPlaces:
    """The part of an image, in pixels from its upper left corner, that each entry of a processor's output shows.

    `left`, `right`, `top`, `bottom`: of shape (entries,); NaN for entries that show no part of it, such as padding.
    """

    width: int
    height: int
    left: Array
    right: Array
    top: Array
    bottom: Array

    def undo(self, relevance: Array) -> Array:
        """Relevance of entries, in any shape, as that of pixels, (height, width), divided by the area that they share.

        The total is that of the entries that show the image.
        """
        shown = ~np.isnan(self.left + self.top)
        left, right, top, bottom = (one[shown] for one in (self.left, self.right, self.top, self.bottom))
        density = relevance.reshape(-1)[shown] / ((right - left) * (bottom - top))
        found = np.zeros(self.height * self.width)
        for rows, tall in _overlaps(top, bottom, self.height):
            for columns, wide in _overlaps(left, right, self.width):
                found += np.bincount(rows * self.width + columns, density * tall * wide, len(found))
        return found.reshape(self.height, self.width)

    @property
    def covered(self) -> NDArray[np.bool_]:
        """Which pixels of the image are in an entry, (height, width)."""
        return np.asarray(self.undo(np.ones(len(self.left))) > 0)


def _overlaps(first: Array, last: Array, length: int) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """The pixels that intervals share, one after the other, and how much of each they share."""
    start = np.floor(first).astype(np.int64)
    for offset in range(int(np.ceil((last - first).max(initial=0.0))) + 1):
        pixel = start + offset
        yield pixel.clip(0, length - 1), (np.minimum(last, pixel + 1) - np.maximum(first, pixel)).clip(0)


def entry_places(process: Callable[[Image.Image], Any], image: Image.Image) -> EntryPlaces:
    """Measure a processor with pictures of the size of an image: black, white, and ramps from left to right and downwards.

    `process`: from a picture in RGB to an array of any shape. Raises `InputError` if it is random, makes another number of
    entries of each picture, standardizes each by itself, drops a part of the image, or moves what it shows.
    """
    width, height = image.size

    def seen(grey: Array) -> Array:
        picture = np.broadcast_to(np.rint(255 * grey).astype(np.uint8), (height, width))
        return _entries(process(Image.fromarray(np.ascontiguousarray(picture)).convert("RGB")))

    black, white = seen(np.zeros((1, 1))), seen(np.ones((1, 1)))
    given, again = _entries(process(image)), _entries(process(image))
    if not black.shape == white.shape == given.shape == again.shape:
        raise InputError("the processor makes other entries of other pictures of the same size", topic=_TOPIC)
    if not np.array_equal(given, again):
        raise InputError("the processor is random: it makes other entries of the same picture", topic=_TOPIC)
    shape, black, white, given = black.shape, black.reshape(-1), white.reshape(-1), given.reshape(-1)
    span = white - black
    shown = np.abs(span) > _SHOWN * np.abs(span).max(initial=0.0)
    if not shown.any():
        raise InputError(
            "the processor makes the same of black and of white: it standardizes each picture by itself, and what its entries "
            "show cannot be measured",
            topic=_TOPIC,
        )
    scale = np.where(shown, span, np.nan)
    across = _places(lambda ramp: (seen(ramp[None]).reshape(-1) - black) / scale, width)
    down = _places(lambda ramp: (seen(ramp[:, None]).reshape(-1) - black) / scale, height)
    left, right = _intervals(across, shape, width)
    top, bottom = _intervals(down, shape, height)
    found = EntryPlaces(width, height, left, right, top, bottom)
    _check_covered(found)
    _check_shows(found, image, (given - black) / scale)
    return found


def _entries(made: Any) -> Array:
    return np.asarray(made, dtype=np.float64)


def _places(brightness: Callable[[Array], Array], length: int) -> Array:
    """The middle of each entry along one side; NaN where no ramp tells."""
    ramp = max(_RAMP, length / _PART)
    middles = np.arange(length) + 0.5
    best, places = np.array(np.inf), np.array(np.nan)
    for start in np.arange(-ramp / 2, length, ramp / 2):
        seen = brightness(((middles - start) / ramp).clip(0, 1))
        off = np.where(np.isnan(seen), np.inf, np.abs(seen - 0.5))
        nearer = (off < best) & (off <= _NEAR)
        best, places = np.where(nearer, off, best), np.where(nearer, start + ramp * seen, places)
    return places


def _intervals(places: Array, shape: tuple[int, ...], length: int) -> tuple[Array, Array]:
    """What each entry covers along one side: as much as lies between it and its neighbours in memory.

    The entries of a tile or patch, which the first axis with more than one counts, have one size.
    """
    sizes = [one for one in shape if one > 1] or [1]
    rows = places.reshape(sizes[0], -1)
    steps = np.abs(np.diff(rows, axis=1)) if rows.shape[1] > 1 else np.abs(np.diff(rows, axis=0)).T
    moving = np.where(steps > _STILL, steps, np.nan)
    known = moving[~np.isnan(moving).all(1)]
    if not len(known):  # a single row or column
        return np.where(np.isnan(places), np.nan, 0.0), np.where(np.isnan(places), np.nan, float(length))
    usual = float(np.nanmedian(known))
    step = np.array([usual if np.isnan(row).all() else float(np.nanmedian(row)) for row in moving])
    half = np.broadcast_to(step[:, None] / 2, rows.shape).reshape(-1) if len(step) == len(rows) else usual / 2
    return (places - half).clip(0, length), (places + half).clip(0, length)


def _check_covered(found: EntryPlaces) -> None:
    covered = found.covered
    if 1 - covered.mean() <= _DROPPED:
        return
    rows, columns = (np.flatnonzero(covered.any(axis)) for axis in (1, 0))
    box = tuple(map(int, (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))) if len(rows) else None
    whole = box is not None and covered[box[1] : box[3], box[0] : box[2]].mean() > 1 - _DROPPED
    raise InputError(
        f"the processor drops {1 - covered.mean():.0%} of the photograph of {found.width}×{found.height} pixels: the model "
        "does not see it. " + (f"Pass the part that it sees: image.crop({box})" if whole else "Pass it in another size"),
        topic=_TOPIC,
    )


def _check_shows(found: EntryPlaces, image: Image.Image, brightness: Array) -> None:
    """Raise `InputError` if the entries for the image itself lie elsewhere than those for ramps."""
    entries = np.where(np.isnan(brightness), 0.0, brightness)
    count = found.undo(np.where(np.isnan(brightness), 0.0, 1.0))
    seen = np.divide(found.undo(entries), count, out=np.zeros_like(count), where=count > 0)
    grey = np.asarray(image, dtype=np.float64).mean(2) / 255
    ours, theirs = (_cells(np.where(count > 0, one, 0.0)) for one in (grey, seen))
    residual, variance = float(((ours - theirs) ** 2).sum()), float(((ours - ours.mean()) ** 2).sum())
    if residual > (1 - _LEAST) * variance + 1e-4 * ours.size:
        raise InputError(
            "what the processor makes of this photograph does not lie where it puts ramps of the same size: it crops or moves "
            "by what a picture shows, which cannot be undone",
            topic=_TOPIC,
        )


def _cells(picture: Array) -> Array:
    """Means over cells of a picture."""
    rows, columns = (np.array_split(np.arange(length), min(_CELLS, length)) for length in picture.shape)
    return np.array([[picture[np.ix_(row, column)].mean() for column in columns] for row in rows])
