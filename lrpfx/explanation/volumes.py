"""Explanations of volumes and of videos: relevance of voxels, drawn on slices or frames with one scale."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from typing_extensions import Unpack

from lrpfx import pictures
from lrpfx.errors import InputError, printable
from lrpfx.explanation.answers import Array
from lrpfx.explanation.canvas import Canvas
from lrpfx.explanation.compiled import keep_origin, origin_of
from lrpfx.explanation.explanation import Explained, SeveralPictures, caption_of, unique_names
from lrpfx.explanation.saving import save_figures_or_picture
from lrpfx.explanation.tables import WITHIN
from lrpfx.images import nifti
from lrpfx.images.geometry import Geometry
from lrpfx.images.scans import Scan
from lrpfx.pictures import charts
from lrpfx.pictures.pixels import as_image
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.support.files import as_path, written
from lrpfx.support.html import element, image_html
from lrpfx.support.numbers import whole_number

#: What slices across the patient's axes are called: from left to right, from back to front, from below to above.
_PLANES = ("sagittal", "coronal", "axial")
#: Percentiles of the values of a volume that are black and white.
_CONTRAST = (0.5, 99.5)
#: Voxels at equal distances that are enough for these percentiles.
_ENOUGH = 1_000_000
#: Slices in a row of a sheet.
_IN_ROW = 6
#: Pixels of the height of a slice by itself, at least.
_LEAST = 320


@dataclass(frozen=True, eq=False, repr=False)
class VolumeExplanation(Explained):
    """Why a model gave a volume, or a video, its class.

    It is plain data. `Explanation` describes `name`, `output`, `categories`, `answers`, `rules` and `scores`.

    `volume`: what the model was given, (channels, depth, height, width); of a video, depth counts its frames. `affine`: from
    the indices of voxels to millimetres, (4, 4), towards the patient's right, front and top, as NIfTI has it; None if it is not
    known. `scan`: what preprocessing made it of, if that is known.

    Slices of a volume with an affine are drawn with the front or the top above, and the patient's right, or front, on the
    right. Others are drawn as arrays: rows downwards. All pictures of an explanation have one scale.

    Examples
    --------
    >>> layers = torch.nn.Conv3d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(864, 2)
    >>> explanation = lrpfx.explain(torch.nn.Sequential(*layers).eval(), torch.rand(1, 8, 8, 8))
    >>> explanation.relevance.shape
    (8, 8, 8)
    >>> picture = explanation.planes()
    """

    volume: Array
    affine: Array | None = None
    scan: Scan | None = None

    # --- figures -------------------------------------------------------------------------------------------------------------

    @property
    def input_relevance(self) -> Array:
        """Relevance of the model's input, (channels, depth, height, width)."""
        return self.answers[0].input_relevance

    @property
    def relevance(self) -> Array:
        """Relevance of each voxel, (depth, height, width): the sum over channels."""
        return self.answers[0].summed

    @property
    def spacing(self) -> tuple[float, float, float]:
        """The distances of neighbouring voxels along the axes, in millimetres; 1 if there is no affine."""
        if self.affine is None:
            return 1.0, 1.0, 1.0
        depth, height, width = np.sqrt((self.affine[:3, :3] ** 2).sum(0)).tolist()
        return depth, height, width

    @property
    def most_relevant(self) -> tuple[int, int, int]:
        """The index of the voxel with the largest magnitude of relevance."""
        relevance = self.relevance
        depth, height, width = np.unravel_index(int(np.abs(relevance).argmax()), relevance.shape)
        return int(depth), int(height), int(width)

    def on_scan(self) -> "VolumeExplanation":
        """The explanation on the voxels of the scan, or the video, that `preprocess` got: what it did to the axes is undone.

        Relevance keeps its total, less what fell on padding. Raises `InputError` where the scan is not known: without
        `preprocess`, the volume is the scan itself; a function that does more than to crop, scale, mirror and reorder axes
        cannot be undone.
        """
        if self.scan is None:
            raise InputError(
                "the scan behind the volume is not known: without preprocess= it is the volume itself, and preprocess= can be "
                "undone if it crops, scales, mirrors and reorders axes of an array, or makes a tensor with an affine of a file",
                topic="volumes",
            )
        geometry = self.scan.geometry
        answers = tuple(
            replace(
                one,
                input_relevance=geometry.undo(one.input_relevance),
                region=None if one.region is None or one.region.ndim != 3 else geometry.shown(one.region),
            )
            for one in self.answers
        )
        found = replace(self, answers=answers, volume=self.scan.values, affine=self.scan.affine, scan=None)
        origin = origin_of(self)
        if origin is not None:
            keep_origin(found, origin)
        return found

    # --- pictures ------------------------------------------------------------------------------------------------------------

    def overlay(
        self, place: int | None = None, axis: int | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """The relevance over one slice, with the outline of the region that is explained, if the output has places.

        `place`: the index of the slice, by default that of the voxel with the most relevance. `axis`: the axis that the slice
        lies across, 0, 1 or 2; by default the first, which a video's frames are on, or that from below to above of a volume
        with an affine. `style`: how it is drawn. `settings`: fields of `lrpfx.pictures.Style`, which replace those of `style`.
        Raises `InputError` for a slice that there is not.
        """
        axis = self._axis(axis)
        shown = self._slice(axis, self._place(place, axis))
        return shown.of_height(max(shown.map.shape[0], _LEAST)).overlay(self._scaled(styled(style, settings)))

    def montage(
        self,
        count: int = 12,
        axis: int | None = None,
        columns: int = _IN_ROW,
        style: Style | None = None,
        **settings: Unpack[StyleSettings],
    ) -> Image.Image:
        """Overlays of slices at equal distances, among them that of the voxel with the most relevance.

        `count`: how many slices. `columns`: how many stand in a row. `axis`, `style`, `settings`: as for `overlay`. Raises
        `InputError` for an axis that there is not, or numbers that are not positive.
        """
        style, axis = self._scaled(styled(style, settings)), self._axis(axis)
        columns = whole_number(columns, "columns is a number", 1, "heatmaps")
        places = self._places(count, axis)
        rows = [
            self._row(places[first : first + columns], axis, columns, style, True) for first in range(0, len(places), columns)
        ]
        return self._sheet_of(rows, style)

    def planes(
        self, place: Sequence[int] | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """The three slices through one voxel, without relevance and with it.

        `place`: the index of the voxel, by default the one with the most relevance. `style`, `settings`: as for `overlay`.
        Raises `InputError` for a voxel that there is not.
        """
        style = self._scaled(styled(style, settings))
        voxel = self.most_relevant if place is None else tuple(place)
        if len(voxel) != 3:
            raise InputError(f"the index of a voxel has three numbers, not {len(voxel)}", topic="volumes")
        order = (2, 1, 0) if self.affine is None else tuple(self._world_axes.index(one) for one in (2, 1, 0))
        slices = [self._slice(axis, self._place(voxel[axis], axis)) for axis in order]
        height = pictures.height_of_row([one.aspect for one in slices], style.width)
        shown = [one.of_height(height) for one in slices]
        rows = [
            [(one.title, one.canvas.photograph) for one in shown],
            [("", one.overlay(style)) for one in shown],
        ]
        return self._sheet_of(rows, style)

    def sheet(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """Six slices or frames at equal distances, without relevance and with it.

        `style`, `settings`: as for `overlay`.
        """
        style, axis = self._scaled(styled(style, settings)), self._axis(None)
        places = self._places(_IN_ROW, axis)
        return self._sheet_of([self._row(places, axis, len(places), style, drawn) for drawn in (False, True)], style)

    def layers(
        self,
        names: Sequence[str] | None = None,
        *,
        columns: int = 6,
        title: str | None = None,
        caption: str | None = None,
        style: Style | None = None,
        **settings: Unpack[StyleSettings],
    ) -> Image.Image:
        """Relevance through the network, as `Explanation.layers`: of each layer the slice with the most relevance.

        `names`: nodes with an output (channels, depth, height, width), by default the recorded ones, or else the last of each
        resolution. Slices lie across the axis of `sheet`. Other arguments: as for `Explanation.layers`, with
        `settings`.
        """
        form, axis = ("channels", "depth", "height", "width"), self._axis(None)
        maps = self._with_shares({"input": self.answers[0].summed, **self._layers(names, form)})
        drawn = {}
        for name, one in maps.items():
            place = np.unravel_index(int(np.abs(one).argmax()), one.shape)[axis]
            drawn[f"{name}; slice {place} of {one.shape[axis]}"] = _cut(one, axis, int(place), *self._turned(axis))
        return self._strip(drawn, columns, title, caption, styled(style, settings))

    def slices(self, count: int = 12, axis: int | None = None, target: int = 0) -> list[tuple[int, Image.Image, Array]]:
        """Slices as `montage` chooses and turns them: their indices, pictures without relevance, and relevance of their pixels.

        `count`, `axis`: as for `montage`. `target`: the number of the explained class, from 0.
        """
        axis, summed = self._axis(axis), self.answers[target].summed
        places = self._places(count, axis)
        drawn = [self._slice(axis, place).canvas.photograph for place in places]
        maps = [_cut(summed, axis, place, *self._turned(axis)) for place in places]
        return list(zip(places, drawn, maps, strict=True))

    def _row(self, places: Sequence[int], axis: int, columns: int, style: Style, drawn: bool) -> list[tuple[str, Image.Image]]:
        """Slices side by side, with relevance over them if `drawn`."""
        slices = [self._slice(axis, place) for place in places]
        shown = [one.of_height(pictures.height_of_row([one.aspect] * columns, style.width)) for one in slices]
        return [(one.title, one.overlay(style) if drawn else one.canvas.photograph) for one in shown]

    def _sheet_of(self, rows: list[list[tuple[str, Image.Image]]], style: Style) -> Image.Image:
        region = self.answers[0].region
        caption = caption_of(self.rules, [self.balance], True, region is not None and region.ndim == 3)
        title = f"{printable(self.name)}: relevance for {self._shown(str(self.target))}"
        return pictures.sheet(rows, title=title, caption=caption, legend=self._legend, style=style)

    def _scaled(self, style: Style) -> Style:
        """The style with the scale of all slices, if it has none."""
        if style.scale is not None:
            return style
        maps = list(np.moveaxis(self.relevance, self._axis(None), 0))
        return replace(style, scale=pictures.scale_of(maps, style.percentile, sigma=style.sigma))

    def _axis(self, axis: int | None) -> int:
        if axis is None:
            return 0 if self.affine is None else self._world_axes.index(2)
        return whole_number(axis, "axis is a number", 0, "volumes", 2)

    def _place(self, place: int | None, axis: int) -> int:
        if place is None:
            return self.most_relevant[axis]
        last = self.volume.shape[1 + axis] - 1
        return whole_number(place, f"slices across axis {axis} have numbers", 0, "volumes", last)

    def _places(self, count: int, axis: int) -> list[int]:
        """The indices of slices at equal distances, one of which has the voxel with the most relevance."""
        slices, shown = self.volume.shape[1 + axis], self.most_relevant[axis]
        count = min(whole_number(count, "count is a number of slices", 1, "volumes"), slices)
        step = slices / count
        before = int(shown / step)
        return [int(shown + step * (number - before)) for number in range(count)]

    @property
    def _world_axes(self) -> tuple[int, ...]:
        """For each axis of voxels, which of the patient's axes it runs along most nearly: 0, 1 or 2, each once."""
        assert self.affine is not None
        directions = np.abs(self.affine[:3, :3] / np.array(self.spacing))
        found = [-1, -1, -1]
        for _ in range(3):
            world, voxel = np.unravel_index(int(directions.argmax()), (3, 3))
            found[voxel] = int(world)
            directions[world], directions[:, voxel] = -1, -1
        return tuple(found)

    def _slice(self, axis: int, place: int) -> "_Slice":
        """A slice in the size of its voxels, turned as it is drawn."""
        across, down = self._turned(axis)
        values = self.volume.ravel()
        low, high = np.percentile(values[:: 1 + len(values) // _ENOUGH], _CONTRAST)
        shown = np.stack([_cut(one, axis, place, across, down) for one in self.volume])
        image = as_image(torch.from_numpy(shown).double(), (float(low), float(high)))
        region, shape = self.answers[0].region, self.volume.shape[1:]
        if region is not None and region.ndim == 3:
            region = _cut(region, axis, int((place + 0.5) * region.shape[axis] / shape[axis]), across, down)
        kind = "frame" if len(self.volume) == 3 else "slice" if self.affine is None else _PLANES[self._world_axes[axis]]
        of_channels = [_cut(one, axis, place, across, down) for one in self.input_relevance]
        map = np.stack(of_channels).astype(np.float64).sum(0)
        sides = self.spacing[abs(across) - 1], self.spacing[abs(down) - 1]
        title = f"{kind} {place}" if axis == self._axis(None) or kind in _PLANES else f"slice {place} of axis {axis}"
        return _Slice(title, Canvas.of(image, Geometry.of_whole(*map.shape)), map, region, sides)

    def _turned(self, axis: int) -> tuple[int, int]:
        """The axes that run to the right and downwards, counted from 1, and negative if they run the other way."""
        first, second = (one for one in range(3) if one != axis)
        if self.affine is None:
            return second + 1, first + 1
        world = self._world_axes
        right, upward = sorted((first, second), key=lambda one: world[one])
        to_right, to_top = (self.affine[world[one], one] >= 0 for one in (right, upward))
        return right + 1 if to_right else -right - 1, -upward - 1 if to_top else upward + 1

    # --- saving --------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, affine: Array | None = None) -> Path:
        """Write the sheet as a picture, the relevance as a volume (.nii, .nii.gz), or all figures as .npz.

        `path`: the file. Its ending names the form. `affine`: that of a volume whose own is not known, (4, 4). Relevance for
        several targets is on a fourth axis of the volume, and on a first axis in .npz, where `targets` has their names. Returns
        the path. Raises `InputError` for a volume without an affine, or without nibabel.
        """
        target = as_path(path)
        arrays = self._figures(lambda answer: {"relevance": answer.summed, "input_relevance": answer.input_relevance})
        if nifti.is_file_name(target):
            known = self.affine if affine is None else np.asarray(affine, dtype=np.float64)
            if known is None:
                raise InputError(
                    f"{target}: where the voxels lie is not known, since the volume came without an affine: pass affine=, such "
                    "as that of the image, or save .npz",
                    topic="volumes",
                )
            return written(target, nifti.encoded(arrays["relevance"], known, target.name.lower().endswith(".gz")))
        known_affine = {} if self.affine is None else {"affine": self.affine}
        return save_figures_or_picture(self, target, lambda: {**arrays, **known_affine})

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self)) + element("p", str(self.balance))


class VolumeExplanations(SeveralPictures[VolumeExplanation]):
    """Explanations of several volumes, in their order.

    `items`: the explanations. `problems`: none.
    """

    def sheet(self) -> Image.Image:
        """The sheets of all volumes, one above the other, each with its own scale."""
        return charts.stacked([("", one.sheet(width=WITHIN.width)) for one in self._some()], WITHIN)

    def _names_of_files(self) -> Sequence[str]:
        return [f"{name}.png" for name in unique_names([Path(one.name.partition(".")[0]) for one in self.items])]


@dataclass(frozen=True)
class _Slice:
    """A slice on its canvas, with its relevance and region, and the width and height of a voxel in millimetres."""

    title: str
    canvas: Canvas
    map: Array
    region: Array | None
    sides: tuple[float, float]

    @property
    def aspect(self) -> float:
        height, width = self.map.shape
        return float(width * self.sides[0] / (height * self.sides[1]))

    def of_height(self, height: int) -> "_Slice":
        """The slice in another size, with voxels in their form."""
        size = max(1, round(height * self.aspect)), height
        return replace(self, canvas=Canvas.of(self.canvas.photograph, Geometry.of_whole(*self.map.shape), size))

    def overlay(self, style: Style) -> Image.Image:
        """The relevance over the slice."""
        return self.canvas.overlay(self.canvas.map(self.map), style, self.region)


def _cut(values: Array, axis: int, place: int, across: int, down: int) -> Array:
    """A slice of values (depth, height, width) with axes as `_turned` names them."""
    found = np.take(values, place, axis)
    if abs(across) < abs(down):
        found = found.T
    return np.ascontiguousarray(found[:: 1 if down > 0 else -1, :: 1 if across > 0 else -1])
