"""Where the voxels of a model's input lie in the scan, or the video, that they were made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        found = mask.transpose(self.order)
        for place, axis in enumerate(self.axes):
            voxels, inside = axis.middles
            found = np.take(found, voxels, place) & np.expand_dims(inside, [one for one in range(3) if one != place])
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
    """What a function does to volumes: to their axes, in the order of the input, and to their values, (levels, 2)."""

    order: list[int]
    axes: tuple[Axis, ...]
    curve: Array


#: What functions do to volumes, by their shape and dtype; None where it is more than that.
Geometries = dict[Any, Measured | None]


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
        form = (type(given), values.shape, values.dtype.str, input.shape)
        if same and form not in known:
            known[form] = None  # as it stays if the user's function takes no ramps
            known[form] = _measured(seen, values, low, high, input.shape)
        measured = known[form] if same else None
    except Exception:
        return None
    if measured is None:
        return None
    order, axes = measured.order, measured.axes
    rest = [one for one in range(values.ndim) if one not in order]
    moved = values.transpose(*rest, *sorted(order)).reshape(-1, *(values.shape[one] for one in sorted(order)))
    found = Scan(moved.astype(np.float32), None, VolumeGeometry(axes, tuple(sorted(order).index(one) for one in order)))
    return found if _shows(found, input, measured.curve) else None


def _measured(seen: Callable[[Array], Array], values: Array, low: float, high: float, shape: Sequence[int]) -> Measured | None:
    """What a function does to volumes with such values."""

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
    if not step or np.nanmax(np.abs(lines - (first + step * middle))) > allowed:
        return None
    axis = Axis(float(first + 0.5 - step / 2), float(step), positions.shape[place], length)
    if np.abs(np.sort(axis.edges[[0, -1]]) - (0, length)).max() < max(length / _PRECISION, level):
        step = length / axis.pixels
        return Axis(0.0, step, axis.pixels, length) if axis.step > 0 else Axis(float(length), -step, axis.pixels, length)
    return axis


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
