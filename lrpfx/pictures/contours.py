"""Lines around the pixels that hold a share of the relevance."""

import numpy as np
from PIL import Image, ImageDraw

from lrpfx.pictures.maps import Floats
from lrpfx.support.optional_packages import optional_package

Line = Floats  # points (x, y), shape (points, 2); the first is the last again if the line is closed

_LEAST = 0.01  # of |relevance|: a sign with less has no lines
_LARGEST = 8192  # pixels of the finer picture on which lines are drawn


def enclosing_level(values: Floats, share: float) -> float:
    """The largest level such that the pixels at or above it hold `share` of the positive total."""
    falling = np.sort(values[values > 0])[::-1]
    totals = falling.cumsum()
    place = int(np.searchsorted(totals, share * totals[-1]))
    return float(falling[min(place, len(falling) - 1)])


def lines_at(values: Floats, level: float) -> list[Line]:
    """The lines around the pixels at or above `level`, linear between pixels. The centre of the first pixel is (0.5, 0.5)."""
    contourpy = optional_package("contourpy", "drawing contours", "contours")
    if min(values.shape) < 2:
        return []
    rows, columns = (np.arange(length) + 0.5 for length in values.shape)
    generator = contourpy.contour_generator(columns, rows, values, name="serial", line_type="Separate")
    found: list[Line] = generator.lines(np.nextafter(level, -np.inf))  # it counts pixels at the level as below it
    return found


def draw_contours(
    picture: Image.Image, values: Floats, enclosed: tuple[float, ...], plus: Floats, minus: Floats
) -> Image.Image:
    """The picture with lines around the relevance of each sign.

    `enclosed` are the shares of its total inside, the smallest with the thickest line. Lines are of the colours `plus` and
    `minus`, with white on both sides, and around negative relevance they are dashed. The map is enlarged to the picture.
    """
    unit = max(picture.size) / 300
    enlarged = picture.width / values.shape[1], picture.height / values.shape[0]
    everything = np.abs(values).sum()
    for signed, color, dashed in ((-values, minus, True), (values, plus, False)):
        if signed.clip(0).sum() <= _LEAST * everything:
            continue
        levels = [enclosing_level(signed, share) for share in sorted(enclosed)]
        lines = [[line * enlarged for line in lines_at(signed, level)] for level in levels]
        widths = [max(1.0, unit * (1.8 if not place else 1.0)) for place in range(len(lines))]
        cut = [
            [part for line in some for part in (_dashes(line, 6 * unit, 4.5 * unit) if dashed else [line])] for some in lines
        ]
        for extra, ink in ((1.2 * unit, (255, 255, 255)), (0.0, tuple(round(255 * float(value)) for value in color))):
            mask = _mask(picture.size, cut, [width + extra for width in widths])
            picture = Image.composite(Image.new("RGB", picture.size, ink), picture, mask)
    return picture


def _dashes(line: Line, length: float, gap: float) -> list[Line]:
    """The parts of a line that a dashed one has."""
    along = np.concatenate([[0.0], np.hypot(*np.diff(line, axis=0).T).cumsum()])
    parts = []
    for start in np.arange(0.0, along[-1], length + gap):
        end = min(start + length, along[-1])
        places = np.array([start, *along[(along > start) & (along < end)], end])
        parts.append(np.stack([np.interp(places, along, line[:, axis]) for axis in (0, 1)], axis=1))
    return parts


def _mask(size: tuple[int, int], lines: list[list[Line]], widths: list[float]) -> Image.Image:
    """How much of each pixel lines of these widths cover, from a picture several times as fine."""
    fine = max(1, min(4, _LARGEST // max(size)))
    mask = Image.new("L", (size[0] * fine, size[1] * fine), 0)
    draw = ImageDraw.Draw(mask)
    for some, width in zip(lines, widths, strict=True):
        for line in some:
            places = [(float(x), float(y)) for x, y in line * fine - 0.5]
            draw.line(places, fill=255, width=max(1, round(width * fine)))
            radius = width * fine / 2
            for x, y in places:  # joints: Pillow's leave hairs between segments with small angles
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return mask.reduce(fine) if fine > 1 else mask
