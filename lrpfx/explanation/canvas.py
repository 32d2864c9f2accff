"""Relevance drawn on a photograph, in the size in which it is looked at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from lrpfx import pictures
from lrpfx.images.geometry import Array, Geometry
from lrpfx.pictures.colors import DEFAULT, colors_of

#: Pixels of the longer side of a map that is as fine as anyone sees.
_FINEST = 1000
#: Pixels of a map for each pixel of the model's input, at least.
_STEPS = 3


@dataclass(frozen=True)
class Canvas:
    """A photograph in some size, and where the pixels of the model's input lie in it.

    Maps are those of the part that the model saw, so that the rest influences neither their scale nor their smoothing. Their
    values are relevance for each pixel of the photograph as it was, so scales of pictures in several sizes are the same.
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

    def scale_of(self, maps: Sequence[Array], settings: dict[str, Any]) -> float:
        """The common scale of maps."""
        chosen: dict[str, Any] = {name: settings[name] for name in ("percentile", "sigma") if name in settings}
        return pictures.scale_of(maps, **self._in_map(maps[0], chosen))

    def heatmap(self, map: Array, **settings: Any) -> Image.Image:
        """A map in colours, in the size of the photograph."""
        left, top, right, bottom = self.geometry.pixel_box
        drawn = pictures.heatmap(map, size=(right - left, bottom - top), **self._in_map(map, settings))
        if drawn.size == self.photograph.size:
            return drawn
        zero = colors_of(settings.get("cmap", DEFAULT)).of_zero
        empty = Image.new("RGB", self.photograph.size, tuple((zero * 255).round().astype(int).tolist()))
        empty.paste(drawn, (left, top))
        return empty

    def overlay(self, map: Array, **settings: Any) -> Image.Image:
        """A map over the photograph."""
        left, top, right, bottom = box = self.geometry.pixel_box
        if (right - left, bottom - top) == self.photograph.size:
            return pictures.overlay(self.photograph, map, **{"stretch": True, **self._in_map(map, settings)})
        seen = self.photograph.crop(box)
        drawn = pictures.overlay(seen, map, **{"stretch": True, **self._in_map(map, settings)})
        whole = self.photograph.convert("L").convert("RGB") if settings.get("grey", True) else self.photograph.copy()
        whole.paste(drawn, (left, top))
        return whole

    def _in_map(self, map: Array, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings, with `sigma` in pixels of the map instead of the photograph as it was."""
        sigma = settings.get("sigma")
        if not isinstance(sigma, (int, float, np.number)) or isinstance(sigma, bool):
            return settings
        left, _, right, _ = self.geometry.pixel_box
        return {**settings, "sigma": float(sigma) * map.shape[1] / (right - left) / self.enlargement}
