"""Relevance drawn on a photograph, in the size in which it is looked at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from lrpfx import pictures
from lrpfx.images.geometry import Array, Geometry
from lrpfx.pictures.style import Style

#: Pixels of the longer side of a map that is as fine as anyone sees.
_FINEST = 1000
#: Pixels of a map for each pixel of the model's input, at least.
_STEPS = 3
#: The frame around the part of a photograph that the model saw: a light line within a dark one is seen on any photograph.
_LIGHT, _DARK = (255, 255, 255), (90, 90, 90)
#: Pixels of the photograph's shorter side for each pixel of a line of the frame.
_LINE = 400
#: The outline of a region, which is between dark lines as well.
_OUTLINE = (255, 214, 10)
#: What is mixed into the colour of no relevance where the model did not look.
_UNSEEN, _SHARE = 128, 0.15


@dataclass(frozen=True)
class Canvas:
    """A photograph in some size, and where the pixels of the model's input lie in it.

    Maps are those of the part that the model saw, so that the rest influences neither their scale nor their smoothing. Their
    values are relevance for each pixel of the photograph as it was, so scales of pictures in several sizes are the same.
    Pictures have a thin frame around that part: the rest is not irrelevant, it was not seen.
    """

    photograph: Image.Image
    geometry: Geometry
    enlargement: float  # width of the photograph as it was, in units of its width here

    @classmethod
    def of(cls, photograph: Image.Image, geometry: Geometry, size: tuple[int, int] | None = None) -> "Canvas":
        """A canvas of a size (width, height), by default that of the photograph."""
        if size is None or size == photograph.size:
            return cls(photograph, geometry, 1.0)
        enlargement = math.sqrt(photograph.width * photograph.height / (size[0] * size[1]))
        smaller = photograph.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        return cls(smaller, geometry.resized(*size), enlargement)

    def map(self, relevance: Array) -> Array:
        """Relevance of the input's pixels (height, width) as a map of the part of the photograph that the model saw."""
        left, top, right, bottom = self.geometry.pixel_box
        width, height = right - left, bottom - top
        step = min(abs(self.geometry.columns.step), abs(self.geometry.rows.step))
        share = min(1.0, max(_FINEST / max(width, height), _STEPS / step))
        size = max(1, round(width * share)), max(1, round(height * share))
        values = self.geometry.cropped(left, top, right, bottom).resized(*size).undo(relevance)
        result: Array = values * (size[0] * size[1] / (width * height * self.enlargement**2))
        return result

    def scale_of(self, maps: Sequence[Array], style: Style) -> float:
        """The common scale of maps."""
        return pictures.scale_of(maps, style.percentile, sigma=self._in_map(maps[0], style).sigma)

    def heatmap(self, map: Array, style: Style) -> Image.Image:
        """A map in colours, in the size of the photograph."""
        left, top, right, bottom = self.geometry.pixel_box
        drawn = pictures.heatmap(map, size=(right - left, bottom - top), style=self._in_map(map, style))
        if drawn.size == self.photograph.size:
            return drawn
        unseen = (style.colors.of_zero * 255 * (1 - _SHARE) + _UNSEEN * _SHARE).round().astype(int)
        empty = Image.new("RGB", self.photograph.size, tuple(unseen.tolist()))
        return self._framed(empty, drawn)

    def overlay(self, map: Array, style: Style, region: NDArray[np.bool_] | None = None) -> Image.Image:
        """A map over the photograph, with the outline of a region (height, width) of the model's input, in any size."""
        drawn = self._map_over_photograph(map, style)
        return drawn if region is None or region.ndim != 2 else self._outlined(drawn, region)

    def _map_over_photograph(self, map: Array, style: Style) -> Image.Image:
        box = self.geometry.pixel_box
        seen = self.photograph if self.is_whole else self.photograph.crop(box)
        drawn = pictures.overlay(seen, map, stretch=True, style=self._in_map(map, style))
        if self.is_whole:
            return drawn
        whole = self.photograph.convert("L").convert("RGB") if style.grey else self.photograph.copy()
        return self._framed(whole, drawn)

    @property
    def is_whole(self) -> bool:
        """Whether the model saw the whole photograph."""
        return self.geometry.pixel_box == (0, 0, *self.photograph.size)

    def _framed(self, whole: Image.Image, seen: Image.Image) -> Image.Image:
        """A picture of the photograph with what the model saw in it, and a frame around that."""
        left, top, right, bottom = self.geometry.pixel_box
        line = max(1, min(whole.size) // _LINE)
        draw = ImageDraw.Draw(whole)
        for distance, color in ((2 * line, _DARK), (line, _LIGHT)):
            draw.rectangle((left - distance, top - distance, right - 1 + distance, bottom - 1 + distance), fill=color)
        whole.paste(seen, (left, top))
        return whole

    def _outlined(self, picture: Image.Image, region: NDArray[np.bool_]) -> Image.Image:
        """A picture of the photograph with a line around a region, of which it lies inside."""
        height, width = region.shape
        columns, rows = self.geometry.columns, self.geometry.rows
        across, down = width / (columns.pixels * columns.step), height / (rows.pixels * rows.step)
        places = (across, 0.0, -columns.start * across, 0.0, down, -rows.start * down)
        shares = Image.fromarray(region.astype(np.uint8) * 255)
        inside = shares.transform(picture.size, Image.Transform.AFFINE, places, Image.Resampling.BILINEAR)
        inside = inside.point([0] * 128 + [255] * 128)
        line = max(1, min(picture.size) // _LINE)
        edges = [inside]
        for _ in range(3):
            for _ in range(line):
                inside = inside.filter(ImageFilter.MinFilter(3))
            edges.append(inside)
        dark, light = (ImageChops.subtract(edges[outer], edges[inner]) for outer, inner in ((0, 3), (1, 2)))
        picture.paste(_DARK, mask=dark)
        picture.paste(_OUTLINE, mask=light)
        return picture

    def _in_map(self, map: Array, style: Style) -> Style:
        """The style, with `sigma` in pixels of the map instead of the photograph as it was."""
        if style.sigma is None:
            return style
        left, _, right, _ = self.geometry.pixel_box
        return replace(style, sigma=style.sigma * map.shape[1] / (right - left) / self.enlargement)
