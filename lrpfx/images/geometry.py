"""Where the pixels of a model's input lie in the image that they were made from."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_DUST = 1e-6  # pixels: rounding


@dataclass(frozen=True)
class Axis:
    """Positions along one axis: pixel number u of the input covers [start + step u, start + step (u + 1)] of the image.

    Positions in the image are counted in pixels from its edge. `step` is negative if the preprocessing mirrors the axis.
    """

    start: float
    step: float
    pixels: int  # of the input
    length: int  # pixels of the image

    @property
    def edges(self) -> Array:
        """The positions of the edges of the input's pixels in the image. Shape (pixels + 1,)."""
        return np.asarray(self.start + self.step * np.arange(self.pixels + 1), dtype=np.float64)

    @property
    def middles(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The pixel of the image, (pixels,), in which the middle of each pixel of the input lies, and if there is one."""
        places = np.floor(self.start + self.step * (np.arange(self.pixels) + 0.5)).astype(np.int64)
        return places.clip(0, self.length - 1), (places >= 0) & (places < self.length)

    def cropped(self, first: int, last: int) -> "Axis":
        """The axis for a part of the image, from pixel `first` to before pixel `last`."""
        return replace(self, start=self.start - first, length=last - first)

    def resized(self, length: int) -> "Axis":
        """The axis for the image with another length."""
        factor = length / self.length
        return Axis(self.start * factor, self.step * factor, self.pixels, length)

    def spread(self, values: Array) -> Array:
        """Values of input pixels, along the last axis, divided among the pixels of the image by the area they share.

        The total is kept, except for pixels whose centre is outside of the image, such as padding. Others that are partly
        outside are spread over the part inside.
        """
        edges = self.edges
        if self.step < 0:
            edges, values = edges[::-1], values[..., ::-1]
        low, high = edges[:-1].clip(0, self.length), edges[1:].clip(0, self.length)
        inside, centres = high - low, (edges[:-1] + edges[1:]) / 2
        shown = (centres >= 0) & (centres <= self.length)
        density = np.divide(values, inside, out=np.zeros_like(values), where=shown)
        bounds = np.append(low, high[-1])
        totals = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(density * inside, -1)], -1)
        pixels = np.arange(self.length + 1).clip(bounds[0], bounds[-1])
        at = np.searchsorted(bounds, pixels, side="right").clip(1, self.pixels) - 1
        return np.diff(totals[..., at] + density[..., at] * (pixels - bounds[at]), axis=-1)


@dataclass(frozen=True)
class Geometry:
    """The part of an image that became the input of a model, if each axis was cropped, scaled and mirrored by itself."""

    rows: Axis
    columns: Axis

    @classmethod
    def of_whole(cls, height: int, width: int) -> "Geometry":
        """That of an image which is the input itself."""
        return cls(Axis(0.0, 1.0, height, height), Axis(0.0, 1.0, width, width))

    def undo(self, relevance: Array) -> Array:
        """Relevance of input pixels (height, width) as relevance of the image's pixels.

        The total is that of the input's pixels that show the image: those that are padding have no place in it.
        """
        return self.rows.spread(self.columns.spread(relevance).T).T

    def of_input(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which pixels of the input, (height, width), have their middle within a mask of the image's pixels."""
        (rows, are_rows), (columns, are_columns) = self.rows.middles, self.columns.middles
        return mask[np.ix_(rows, columns)] & are_rows[:, None] & are_columns

    def resized(self, width: int, height: int) -> "Geometry":
        """The geometry for the image in another size."""
        return Geometry(self.rows.resized(height), self.columns.resized(width))

    def cropped(self, left: int, top: int, right: int, bottom: int) -> "Geometry":
        """The geometry for a part of the image."""
        return Geometry(self.rows.cropped(top, bottom), self.columns.cropped(left, right))

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The part of the image that the model saw: left, top, right and bottom, in pixels."""
        columns, rows = np.sort(self.columns.edges[[0, -1]]), np.sort(self.rows.edges[[0, -1]])
        left, right = columns.clip(0, self.columns.length).tolist()
        top, bottom = rows.clip(0, self.rows.length).tolist()
        return left, top, right, bottom

    @property
    def pixel_box(self) -> tuple[int, int, int, int]:
        """`box`, grown to whole pixels."""
        left, top, right, bottom = self.box
        return math.floor(left + _DUST), math.floor(top + _DUST), math.ceil(right - _DUST), math.ceil(bottom - _DUST)
