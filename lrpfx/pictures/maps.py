"""Maps of relevance: one number for each pixel, smoothed, resized and scaled."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lrpfx.errors import InputError, InputTypeError

#: Errors about what is drawn.
invalid, wrong_type = partial(InputError, topic="heatmaps"), partial(InputTypeError, topic="heatmaps")

Floats = NDArray[np.float64]
Channels = Literal["first", "last"] | None

COLORS = (1, 3, 4)  # channels that a picture has
PIXELS_PER_SIGMA = 112  # 2 pixels at 224: what strided layers leave is gone, and eyes and letters are still seen
_DUST = 1e-14  # of the largest magnitude: rounding of the Fourier transform


def relevance_map(relevance: Any, channels: Channels = None) -> Floats:
    """Relevance of each pixel, shape (height, width): the sum over channels.

    Parameters
    ----------
    relevance
        A tensor or array of floating-point numbers of shape (height, width), (channels, height, width) or (height, width,
        channels), or a batch of one of these.
    channels
        "first" or "last" says which axis is that of channels, for any number of them; by default, it is one of 1, 3 or 4
        entries.

    Raises
    ------
    InputTypeError
        There are integers or booleans, or the shape fits no reading or two.
    InputError
        A value is not finite.
    """
    values = floats_of(relevance, "relevance")
    shape = values.shape
    if values.ndim == 4:
        if shape[0] != 1:
            raise wrong_type(f"relevance of shape {shape} is a batch of {shape[0]}: draw one at a time, relevance[0]")
        values = values[0]
    if values.ndim == 3:
        values = values.sum(axis=channel_axis(values.shape, channels, "relevance", shape))
    if values.ndim != 2:
        raise wrong_type(
            f"relevance of shape {shape} is not that of an image, which is (height, width), (channels, height, width), "
            "(height, width, channels), or a batch of one of these"
        )
    if values.size == 0:
        raise wrong_type(f"relevance of shape {shape} has no pixels")
    return values


def scale_of(maps: Any, percentile: float = 99.5, *, sigma: float | None = None, channels: Channels = None) -> float:
    """The magnitude that is drawn in full colour: a percentile of |relevance| over the pixels of one map or of several.

    The maps are smoothed as they are when they are drawn, so `scale_of(relevance)` is the scale that `heatmap` takes by itself.
    It is 0.0 if no pixel has relevance; if so few have that the percentile is 0, it is that of those which have.

    Parameters
    ----------
    maps
        Relevance as `relevance_map` accepts it, or a list or mapping of such: their common scale, for pictures that are to be
        compared.
    percentile
        Above 0, 100 at most.
    sigma
        As for `smoothed`.
    channels
        As for `relevance_map`.

    Raises
    ------
    InputTypeError
        An array can be several maps or one with channels.
    """
    several = list(maps.values()) if isinstance(maps, Mapping) else maps
    if not (isinstance(several, (list, tuple)) and several and all(array_of(one, "relevance").ndim >= 2 for one in several)):
        several = [several]
        shape = array_of(maps, "relevance").shape
        if channels is None and len(shape) == 3 and shape[0] in COLORS[1:]:
            raise wrong_type(
                f"an array of shape {shape} can be {shape[0]} maps or one with {shape[0]} channels: pass list(maps) for their "
                "common scale, or channels='first' for one"
            )
    found = [relevance_map(one, channels) for one in several]
    return scale_of_smoothed(found, [smoothed(one, sigma) for one in found], percentile)


def scale_of_smoothed(maps: Sequence[Floats], smooth: Sequence[Floats], percentile: float) -> float:
    """The scale of maps that are smoothed already. `maps`: as they were."""
    percentile = checked_percentile(percentile)
    magnitudes, before = (np.abs(np.concatenate([one.ravel() for one in some])) for some in (smooth, maps))
    if np.percentile(before, percentile) == 0 and before.any():  # so few are not seen by the tails of the Gaussian
        magnitudes = magnitudes[before > 0]
    return float(np.percentile(magnitudes, percentile))


def smoothed(relevance: Any, sigma: float | None = None) -> Floats:
    """A map of relevance, blurred with a Gaussian, so that strided layers leave no checkerboard.

    What would fall outside is reflected at the border, so the total stays the same to rounding, a constant map stays constant,
    and a map without negative relevance gets none.

    `relevance`: as for `relevance_map`. `sigma`: the standard deviation in pixels, by default the shorter side / 112, which is
    2 at 224; 0 changes nothing.
    """
    values = relevance_map(relevance)
    if sigma is None:
        sigma = min(values.shape) / PIXELS_PER_SIGMA
    sigma = checked_sigma(sigma)
    largest = np.abs(values).max()
    if sigma == 0 or largest == 0:
        return values.copy()
    result: Floats = values / largest
    for axis in (0, 1):
        result = _blurred_along(result, sigma, axis)
    result[np.abs(result) < _DUST] = 0.0
    result *= largest
    return result


def _blurred_along(values: Floats, sigma: float, axis: int) -> Floats:
    """The circular convolution of an image and its mirror image with a Gaussian, along one axis."""
    size = values.shape[axis]
    mirrored = np.concatenate([values, np.flip(values, axis)], axis)
    sigma = min(sigma, 4.0 * size)  # a wider one is the mean, too
    reach = int(4 * sigma / size) + 1  # turns around the circle, of eight sigmas
    places = np.arange(2 * size) + 2 * size * np.arange(-reach, reach + 1)[:, None]
    kernel = np.exp(-0.5 * (places / sigma) ** 2).sum(axis=0)
    factors = np.fft.rfft(kernel / kernel.sum()).real
    spectrum = np.fft.rfft(mirrored, axis=axis) * (factors[:, None] if axis == 0 else factors)
    return np.take(np.fft.irfft(spectrum, 2 * size, axis=axis), range(size), axis)


def resized(values: Floats, size: tuple[int, int]) -> Floats:
    """A map with another (width, height): bilinear interpolation where it grows, means over areas where it shrinks.

    All weights are positive, so nothing changes its sign, and no value lies outside the range of those around it.
    """
    rows = _resized_lines(values, size[1])
    result: Floats = _resized_lines(rows.T, size[0]).T
    return result


def _resized_lines(values: Floats, after: int) -> Floats:
    """A map with another number of lines.

    Not by a product of matrices: after one, the threads of NumPy wait for more, and torch takes twice its time meanwhile.
    """
    before = len(values)
    if after < before:
        edges = np.linspace(0.0, before, after + 1)
        points = np.union1d(np.arange(before + 1), edges)  # between two of them lies a part of one line
        lines = ((points[1:] + points[:-1]) / 2).astype(int)
        parts = values[lines] * np.diff(points)[:, None]
        shrunk: Floats = np.add.reduceat(parts, np.searchsorted(points, edges[:-1]), axis=0) * (after / before)
        return shrunk
    centres = ((np.arange(after) + 0.5) * before / after - 0.5).clip(0, before - 1)
    low = centres.astype(int)
    share = (centres - low)[:, None]
    grown: Floats = values[low] * (1 - share) + values[np.minimum(low + 1, before - 1)] * share
    return grown


def floats_of(values: Any, what: str) -> Floats:
    """An array or tensor as finite float64."""
    array = array_of(values, what)
    if array.dtype == bool or np.issubdtype(array.dtype, np.integer):
        raise wrong_type(
            f"{what} has the dtype {array.dtype}, which is that of masks, labels or pixels: convert it to floating point if "
            "these numbers are meant"
        )
    if not np.issubdtype(array.dtype, np.floating):
        kind = type(values).__name__ if array.dtype == object or array.ndim == 0 else f"of {array.dtype}"
        raise wrong_type(f"{what} is an array or tensor of floating-point numbers, not {kind}")
    array = array.astype(np.float64)
    finite = np.isfinite(array)
    if not finite.all():
        first = tuple(int(place[0]) for place in np.nonzero(~finite))
        raise InputError(
            f"{what} has {(~finite).sum()} values that are not finite, the first at {first}", topic="values-not-finite"
        )
    return array


def array_of(values: Any, what: str) -> NDArray[Any]:
    """A numpy array of an array or tensor; a tensor of floating point in float64, since numpy lacks some types of torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return np.asarray(values.double() if values.is_floating_point() else values)
    if hasattr(values, "relevance"):
        raise wrong_type(f"{what} is an array or tensor, not {type(values).__name__}: pass its attribute .relevance")
    try:
        return np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise wrong_type(f"{what} is an array or tensor: {error}") from error


def checked_number(value: Any, meaning: str, fits: Callable[[float], bool]) -> float:
    """A number that fits, from Python, numpy or torch; otherwise `InputError`, which says what is meant."""
    try:
        found = float("nan") if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if not fits(found):
        raise invalid(f"{meaning}, not {value!r}")
    return found


def checked_percentile(value: Any) -> float:
    return checked_number(value, "percentile is a number above 0, and 100 at most", lambda found: 0 < found <= 100)


def checked_sigma(value: Any) -> float:
    meaning = "sigma is a number of pixels, 0 or more, or None for the default"
    return checked_number(value, meaning, lambda found: 0 <= found < np.inf)


def channel_axis(shape: tuple[int, ...], channels: Channels, what: str, given: tuple[int, ...]) -> int:
    """Which of three axes is that of channels. `given`: the shape as the user knows it."""
    if channels is not None:
        if channels not in ("first", "last"):
            raise invalid(f"channels is 'first', 'last' or None, not {channels!r}")
        return 0 if channels == "first" else 2
    first, last = shape[0] in COLORS, shape[2] in COLORS
    if first and last:
        readings = f"{shape[0]} channels of {shape[1]}×{shape[2]} pixels or {shape[0]}×{shape[1]} pixels of {shape[2]} channels"
        raise wrong_type(f"{what} of shape {given} can be {readings}: pass channels='first' or channels='last'")
    if not (first or last):
        raise wrong_type(
            f"{what} of shape {given} has 1, 3 or 4 channels neither first nor last: pass channels='first' if it is (channels, "
            "height, width), channels='last' if it is (height, width, channels)"
        )
    return 0 if first else 2
