"""Where the voxels of a model's input lie in the scan, or the video, that they were made from."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrpfx.images.geometry import Axis
from lrpfx.support.identity.plain_data import PlainData

Array = NDArray[Any]

#: How far the axes of the input may be from those of the scan, in voxels over the whole of an axis.
_STRAIGHT = 0.5
#: By how many voxels of the scan or of the input a voxel may lie elsewhere than a fitted axis says.
_OFF = 0.5
#: Ends that are nearer to those of the scan than this share of its length are the same.
_PRECISION = 400
#: Of the variance of the input, what the scan must explain; both are compared as means over so many cells along each axis.
_LEAST, _CELLS = 0.9, 8
#: Voxels of a cell along an axis, at least: a filter makes single ones of others than lie there.
_VOXELS = 2
#: Values of volumes of one value.
_LEVELS = 9
#: Edges along an axis between the two values of a volume, and voxels of an axis that has two periods of a sine.
_EDGES, _LONG = 5, 24
#: Voxels are within a half if they differ by less than this share from others there; filters mix those at its edges.
_OFF_PLATEAU = 0.05
#: How far edges, in voxels, and sines of height 1 are off, if they are sure.
_SURE = 0.02


@dataclass(frozen=True)
class VolumeGeometry:
    """The part of a scan that became the input of a model, if each axis was cropped, scaled and mirrored by itself.

    `axes`: where the voxels of each axis of the input lie in the scan. `order`: along which axis of the scan.
    """

    axes: tuple[Axis, ...]
    order: tuple[int, ...]

    @classmethod
    def of_affines(
        cls, input: Array, shape: Sequence[int], scan: Array, shape_of_scan: Sequence[int]
    ) -> "VolumeGeometry | None":
        """The geometry of an input and a scan with these affines and shapes; None if one is turned against the other."""
        between = np.linalg.solve(scan, input)
        steps, axes, order = between[:3, :3], [], []
        for place in range(3):
            along = int(np.abs(steps[:, place]).argmax())
            others = np.abs(np.delete(steps[:, place], along)) * shape[place]
            if others.max() > _STRAIGHT or along in order:
                return None
            step = float(steps[along, place])
            start = float(between[along, 3]) + 0.5 - step / 2  # affines are of the middles of voxels
            axes.append(Axis(start, step, shape[place], shape_of_scan[along]))
            order.append(along)
        return cls(tuple(axes), tuple(order))

    def undo(self, relevance: Array) -> Array:
        """Relevance of voxels of the input, (..., depth, height, width), as that of voxels of the scan.

        The total is that of the voxels that show the scan: those that are padding have no place in it.
        """
        found = relevance.astype(np.float64)
        for place, axis in zip((-3, -2, -1), self.axes, strict=True):
            found = np.moveaxis(axis.spread(np.moveaxis(found, place, -1)), -1, place)
        return self._as_scan(found)

    def shown(self, values: Array) -> Array:
        """Values (depth, height, width) over the input, in any resolution, at each voxel of the scan; 0 outside."""
        for place, axis in enumerate(self.axes):
            shares = (np.arange(axis.length) + 0.5 - axis.start) / (axis.step * axis.pixels)
            inside = (shares >= 0) & (shares < 1)
            found = np.take(values, (shares * values.shape[place]).astype(int).clip(0, values.shape[place] - 1), place)
            values = np.where(np.expand_dims(inside, [one for one in range(3) if one != place]), found, np.zeros_like(found))
        return self._as_scan(values)

    def of_input(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which voxels of the input, (depth, height, width), have their middle within a mask of the voxels of the scan."""
        found = self.at_middles(mask)
        for place, axis in enumerate(self.axes):
            found = found & np.expand_dims(axis.middles[1], [one for one in range(3) if one != place])
        return found

    def at_middles(self, values: Array) -> Array:
        """Values of the voxels of the scan at the middles of those of the input; of those outside, that of the nearest one."""
        found = values.transpose(self.order)
        for place, axis in enumerate(self.axes):
            found = np.take(found, axis.middles[0], place)
        return found

    def _as_scan(self, values: Array) -> Array:
        """Values whose last axes are those of the input, in the order of the scan."""
        leading = values.ndim - 3
        return np.ascontiguousarray(values.transpose(*range(leading), *(leading + one for one in np.argsort(self.order))))


@dataclass(frozen=True, eq=False)
class Scan(PlainData):
    """What preprocessing got: its values (channels, depth, height, width), its affine if that is known, and the geometry."""

    values: Array
    affine: Array | None
    geometry: VolumeGeometry


@dataclass(frozen=True)
class Measured:
    """What a function does to volumes: to their axes, in the order of the input, and to their values, (levels, 2).

    The curve is None if it is another one for each volume.
    """

    order: list[int]
    axes: tuple[Axis, ...]
    curve: Array | None


#: What functions may do to volumes, by the shape and dtype of these: what was measured in the first way, and in the second.
Geometries = dict[Any, list[Measured | None]]


def measured_scan(function: Callable[[Any], Any], given: Any, input: Array, known: Geometries) -> Scan | None:
    """The scan that a function made an input of, (channels, depth, height, width), by what it does to ramps.

    `given`: an array or a tensor of three or four axes, of which one may have channels. None if the function does more than to
    crop, scale, mirror and reorder axes, depends on what the volume shows, or is random.
    `known`: what was measured before, which is added to.
    """
    values = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if not isinstance(values, np.ndarray) or values.ndim not in (3, 4) or values.dtype.kind not in "fiu":
        return None

    def seen(pixels: Array) -> Array:
        found = function(torch.from_numpy(pixels).to(given.dtype) if isinstance(given, torch.Tensor) else pixels)
        made = np.asarray(found.detach().cpu() if isinstance(found, torch.Tensor) else found, dtype=np.float64)
        return made[None] if made.ndim == 3 else made[0] if made.ndim == 5 else made

    low, high = float(values.min()), float(values.max())
    try:
        same = np.array_equal(seen(values.copy()), input) and low < high
    except Exception:
        return None
    measured = known.setdefault((type(given), values.shape, values.dtype.str, input.shape), []) if same else []
    for place, measure in enumerate((_by_levels, _by_edges) if same else ()):
        if place == len(measured):
            measured.append(None)  # as it stays if the user's function takes no other volumes
            with suppress(Exception), warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # a function may divide by the deviation of a volume of one value
                measured[place] = measure(seen, values, low, high, input.shape)
        way = measured[place]
        if way is None:
            continue
        order = sorted(way.order)
        rest = [one for one in range(values.ndim) if one not in order]
        moved = values.transpose(*rest, *order).reshape(-1, *(values.shape[one] for one in order))
        geometry = VolumeGeometry(way.axes, tuple(order.index(one) for one in way.order))
        found = Scan(moved.astype(np.float32), None, geometry)
        if _shows(found, input, _curve_of(found, input) if way.curve is None else way.curve):
            return found
    return None


def _by_levels(seen: Callable[[Array], Array], values: Array, low: float, high: float, shape: Sequence[int]) -> Measured | None:
    """What a function does to volumes with such values, by volumes of one value, and ones that get brighter along an axis."""

    def ramp(along: int | None, level: float = 0.0) -> Array:
        rising = np.linspace(low, high, values.shape[along]) if along is not None else np.array([level])
        others = [one for one in range(values.ndim) if one != along] if along is not None else list(range(1, values.ndim))
        pixels = np.broadcast_to(np.expand_dims(rising, others), values.shape)
        return (pixels.round() if values.dtype.kind in "iu" else pixels).astype(values.dtype)

    curve: dict[float, float] = {}
    for _ in range(2):  # the second time, within what changes
        levels = np.linspace(low, high, _LEVELS)
        levels = np.unique(levels.round()) if values.dtype.kind in "iu" else levels
        made = [seen(ramp(None, one)) for one in levels.tolist()]
        if not all(np.isfinite(one).any() for one in made):
            return None
        means = np.array([one[np.isfinite(one)].mean() for one in made])
        curve |= dict(zip(levels.tolist(), means.tolist(), strict=True))
        low, high = _linear_part(levels, means)
    black, white = seen(ramp(None, low)), seen(ramp(None, high))
    if black.shape != tuple(shape) or white.shape != tuple(shape):
        return None
    span = (white - black).mean(0)
    strong = np.abs(span) > 0.2 * np.abs(span).max()
    if not strong.any():
        return None
    found: dict[int, tuple[int, Axis]] = {}
    for along, length in enumerate(values.shape):
        level = (length - 1) / max(1.0, high - low) if values.dtype.kind in "iu" else 0.0  # by which rounding changes positions
        brightness = np.where(strong, (seen(ramp(along)) - black).mean(0) / np.where(strong, span, 1.0), np.nan)
        positions = brightness * (length - 1)
        varying = [place for place in range(3) if length > 1 and np.nanmax(np.abs(_profile(positions, place, True))) > _OFF]
        if len(varying) > 1 or any(place in found for place in varying):
            return None
        for place in varying:
            axis = _fitted(positions, place, length, level)
            if axis is None:
                return None
            found[place] = along, axis
    if len(found) < 3:
        return None
    order, axes = [found[place][0] for place in range(3)], tuple(found[place][1] for place in range(3))
    return Measured(order, axes, np.array(sorted(curve.items())))


def _by_edges(seen: Callable[[Array], Array], values: Array, low: float, high: float, shape: Sequence[int]) -> Measured | None:
    """As `_by_levels`, for a function that standardizes each volume by itself, and makes nothing of one value.

    Volumes of two values show where the edges between them go, whatever a function makes of the values. Beside each is one with
    both exchanged: what is the same in both is padding. Where the lower value makes no difference to the background, such as a
    zero that is left out of the mean, a higher one does. Where padding comes first, and so has another value in both, they have
    the same values in the other halves of another axis, and the same mean.
    """
    for in_halves, lower in product((False, True), (low, low + (high - low) / 4)):

        def difference(shares: Array, lower: float = lower) -> Array:
            """What is made of values from 0 for the lower to 1, less what is made of them exchanged."""
            pair = [lower + (high - lower) * np.broadcast_to(one, values.shape) for one in (shares, 1 - shares)]
            made = [seen((one.round() if values.dtype.kind in "iu" else one).astype(values.dtype)) for one in pair]
            return np.asarray((made[0] - made[1]).mean(0))

        def change(along: int, shares: Array, in_halves: bool = in_halves, of: Callable[[Array], Array] = difference) -> Array:
            """The difference for values along an axis, in one half of another axis alone if they are in halves."""
            others = [one for one in range(values.ndim) if one != along]
            wide = np.expand_dims(shares, others)
            if not in_halves:
                return of(wide)
            longest = max(others, key=lambda one: values.shape[one])
            is_first = np.arange(values.shape[longest]) * 2 < values.shape[longest]
            halves = np.expand_dims(is_first, [one for one in range(values.ndim) if one != longest])
            apart = of(halves * 1.0)
            apart = apart * np.sign(apart.max() + apart.min() or 1.0)  # the half that shows more, where one is cropped away
            inside = np.abs(apart - np.median(apart[apart > apart.max() / 2])) < _OFF_PLATEAU * apart.max()
            return np.where(inside, of(np.where(halves, wide, 1 - wide)), 0.0)

        each = [_axis_by_edges(partial(change, along), length, shape) for along, length in enumerate(values.shape)]
        found = {one[0]: (along, one[1]) for along, one in enumerate(each) if one is not None}
        if len(found) == 3 == sum(one is not None for one in each):
            return Measured([found[place][0] for place in range(3)], tuple(found[place][1] for place in range(3)), None)
    return None


def _axis_by_edges(change: Callable[[Array], Array], length: int, shape: Sequence[int]) -> tuple[int, Axis] | None:
    """The axis of the input that an axis of the scan became, by edges across it, and where they are unsure by a sine along it.

    `change`: from shares along the axis, as `_by_edges` says. None where these show no such axis.
    """
    edges = sorted({round(length * one / (_EDGES + 1)) for one in range(1, _EDGES + 1)} - {0, length})
    points = [point for edge in edges for point in _place_of_edge(change((np.arange(length) >= edge) * 1.0), edge)]
    if len(points) < 2 or len({place for place, *_ in points}) > 1:
        return None
    place, pixels = points[0][0], shape[1 + points[0][0]]
    _, at, across = np.array(points).T
    step, start = np.polyfit(at, across, 1)
    off = np.abs(start + step * at - across).max()
    if off > max(_OFF, abs(step)) or not step:
        return None
    axis = Axis(float(start), float(step), pixels, length)
    pace = 2 * np.pi * (1 + (length >= _LONG)) / length
    refined, distance = _by_sine(axis, change(0.5 + 0.5 * np.sin(pace * (np.arange(length) + 0.5))), place, pace)
    if len(points) > 2 and off < _SURE < distance:
        return place, _snapped(axis, 0.0)
    is_sine = distance < 0.35 + 0.3 * pace * abs(step)  # a flat one, of voxels that are taken from the nearest place
    is_near = np.abs(refined.edges - axis.edges)[[0, -1]].max() < max(1.5, abs(step))
    return (place, _snapped(refined, 0.0)) if is_sine and is_near else None


def _place_of_edge(difference: Array, edge: int) -> list[tuple[int, float, int]]:
    """The axis of an input across which an edge of the scan lies, where, and the edge; none if it is not within the input.

    `difference`: (depth, height, width), of two inputs of the same edge with both values exchanged.
    """
    shown = np.argwhere(np.abs(difference) > 1e-6 * np.abs(difference).max())
    if not len(shown) or not np.isfinite(difference).all():
        return []
    first, last = shown.min(0), shown.max(0) + 1
    box = difference[tuple(map(slice, first, last))]
    for place in range(3):
        profile = box.mean(tuple(one for one in range(3) if one != place))
        rise = profile[-1] - profile[0]
        lines = np.moveaxis(box, place, -1)
        if abs(rise) > 0.5 * np.ptp(box) and np.abs(lines - profile).max() < 0.1 * abs(rise):
            at = float((profile[-1] - profile).sum() / rise)  # the voxels before the edge, of which a filter makes parts
            return [(place, first[place] + at, edge)] if 1 <= at <= len(profile) - 1 else []
    return []


def _by_sine(axis: Axis, wave: Array, place: int, pace: float) -> tuple[Axis, float]:
    """An axis by what is made of a sine along it, which filters make lower, and how far that is from a sine of height 1.

    `axis`: as far as it is known. `wave`: (depth, height, width). `pace`: the phase of each voxel of the scan.
    """
    lines = np.moveaxis(wave, place, -1)
    shown = np.flatnonzero(np.abs(lines).max((0, 1)) > 1e-6 * np.abs(lines).max())
    inside = shown[len(shown) // 10 : len(shown) - len(shown) // 10]  # filters see less of a scan at its edges
    if len(inside) < 5:
        return axis, np.inf
    start, step, profile = axis.start, axis.step, lines.mean((0, 1))[inside]
    for _ in range(10):
        phase = pace * (start + step * (inside + 0.5))
        columns = np.stack([np.sin(phase), np.ones(len(inside)), np.cos(phase), (inside + 0.5) * np.cos(phase)], 1)
        (height, middle, shift, stretch), *_ = np.linalg.lstsq(columns, profile, rcond=None)
        start, step = start + shift / (height * pace), step + stretch / (height * pace)
    found = Axis(float(start), float(step), axis.pixels, axis.length)
    off = np.sqrt(np.mean((height * np.sin(pace * (start + step * (inside + 0.5))) + middle - profile) ** 2)) / abs(height)
    return found, float(off)


def _linear_part(levels: Array, means: Array) -> tuple[float, float]:
    """The range of values that a function maps linearly, by what it makes of volumes of one value, as windows of scans have it.

    `levels`: these values. `means`: of what is made of them. Where no part is linear, it is all between the levels where it
    begins and ends to change.
    """
    slopes = np.diff(means) / np.diff(levels)
    steep = np.abs(slopes - slopes[np.abs(slopes).argmax()]) <= 0.01 * np.abs(slopes).max()
    places = np.flatnonzero(steep)
    if not len(places) or (len(places) < 3 and np.abs(slopes).max() > 0):  # what is linear lies within some steps
        places = np.flatnonzero(np.abs(slopes) > 0.01 * np.abs(slopes).max())
        return float(levels[max(0, places[0])]), float(levels[places[-1] + 1])
    run = places[: int(np.argmax(np.append(np.diff(places), 2) > 1)) + 1]
    return float(levels[run[0]]), float(levels[run[-1] + 1])


def _profile(positions: Array, place: int, centred: bool = False) -> Array:
    """Means along one axis of positions (depth, height, width) with NaN for padding, (voxels,)."""
    with np.errstate(invalid="ignore"):
        counts = (~np.isnan(positions)).sum(tuple(one for one in range(3) if one != place))
        sums = np.nansum(positions, tuple(one for one in range(3) if one != place))
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.asarray(means - np.nanmean(means) if centred else means)


def _fitted(positions: Array, place: int, length: int, level: float) -> Axis | None:
    """The axis along which voxels have these positions, counted from the middle of the first voxel of the scan."""
    profile = _profile(positions, place)
    voxels = np.flatnonzero(~np.isnan(profile))
    margin = len(voxels) // 10  # filters see less of a scan at its edges
    middle = voxels[margin : len(voxels) - margin]
    if len(middle) < 2:
        return None
    step, first = np.polyfit(middle, profile[middle], 1)
    lines = np.moveaxis(positions, place, -1)[..., middle]
    allowed = _OFF * max(1.0, abs(step)) + level
    if not 0 < abs(step) <= length or np.nanmax(np.abs(lines - (first + step * middle))) > allowed:
        return None
    return _snapped(Axis(float(first + 0.5 - step / 2), float(step), positions.shape[place], length), level)


def _snapped(axis: Axis, level: float) -> Axis:
    """The axis, along the whole of that of the scan if its ends are nearly there. `level`: by which positions are unsure."""
    length = axis.length
    if np.abs(np.sort(axis.edges[[0, -1]]) - (0, length)).max() < max(length / _PRECISION, level):
        step = length / axis.pixels
        return Axis(0.0, step, axis.pixels, length) if axis.step > 0 else Axis(float(length), -step, axis.pixels, length)
    return axis


def _curve_of(scan: Scan, input: Array) -> Array:
    """What values of a scan became in an input, as far as their places tell: means, (levels, 2)."""
    inside = scan.geometry.of_input(np.ones(scan.values.shape[1:], dtype=bool))
    given, made = scan.geometry.at_middles(scan.values.mean(0))[inside], input.mean(0)[inside]
    levels = np.unique(np.quantile(given, np.linspace(0, 1, 2 * _LEVELS)))
    bins = np.searchsorted(levels, given)  # the lowest value, which may be the background, by itself
    counts = np.bincount(bins, minlength=len(levels))
    means = [np.bincount(bins, one, len(levels))[counts > 0] / counts[counts > 0] for one in (given, made)]
    return np.stack(means, 1)


def _shows(scan: Scan, input: Array, curve: Array) -> bool:
    """Whether an input is a picture of the part of a scan that the geometry says: both have the same means over cells.

    `curve`: what the function makes of values.
    """
    inside = scan.geometry.shown(np.ones(input.shape[1:]))
    box = tuple(slice(int(some.min()), int(some.max()) + 1) for some in np.nonzero(inside))
    pairs: list[Array] = []
    voxels = [1.0, 1.0, 1.0]  # of the input, along the axes of the scan
    for axis, along in zip(scan.geometry.axes, scan.geometry.order, strict=True):
        voxels[along] = max(1.0, abs(axis.step))
    cells = [int(size / (_VOXELS * step)) for size, step in zip(inside[box].shape, voxels, strict=True)]
    for values in (np.interp(scan.values.mean(0), *curve.T), scan.geometry.shown(input.mean(0))):
        for place in range(3):
            parts = np.array_split(values[box] if not place else values, min(_CELLS, max(2, cells[place])), place)
            values = np.concatenate([one.mean(place, keepdims=True) for one in parts], place)
        pairs.append(values.ravel().astype(np.float64))
    if min(one.std() for one in pairs) < 1e-9 * max(np.abs(one).max() for one in pairs):
        return True  # of one colour
    return bool(np.corrcoef(np.stack(pairs))[0, 1] ** 2 >= _LEAST)
