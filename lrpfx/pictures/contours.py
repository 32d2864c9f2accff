"""Lines around the pixels that hold a share of the relevance."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from lrpfx.pictures.maps import Floats

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
    """The lines on which `values`, linear between pixels, are `level`. The centre of the first pixel is (0.5, 0.5).

    Marching squares: in each square of four pixels, the crossed sides are connected; where all four sides are crossed, the mean
    of the four pixels says which corners belong together.
    """
    inside = values >= level
    width = values.shape[1]
    points: dict[int, tuple[float, float]] = {}
    # Sides have numbers: that to the right of a pixel is 2 · its place, that below it one more.
    for below, first, second in ((0, np.s_[:, :-1], np.s_[:, 1:]), (1, np.s_[:-1], np.s_[1:])):
        rows, columns = np.nonzero(inside[first] != inside[second])
        start, end = values[first][rows, columns], values[second][rows, columns]
        along = (level - start) / (end - start)
        sides = 2 * (rows * width + columns) + below
        x, y = columns + 0.5 + along * (not below), rows + 0.5 + along * below
        points.update(zip(sides.tolist(), zip(x.tolist(), y.tolist(), strict=True), strict=True))
    neighbours: dict[int, list[int]] = {side: [] for side in points}
    for one, other in _segments(values, inside, level):
        neighbours[one].append(other)
        neighbours[other].append(one)
    return [np.array([points[side] for side in chain]) for chain in _chains(neighbours)]


def _segments(values: Floats, inside: NDArray[np.bool_], level: float) -> Iterator[tuple[int, int]]:
    """Pairs of sides that a line connects."""
    width = values.shape[1]
    corners = (inside[:-1, :-1], inside[:-1, 1:], inside[1:, 1:], inside[1:, :-1])  # clockwise
    means = (values[:-1, :-1] + values[:-1, 1:] + values[1:, 1:] + values[1:, :-1]) / 4
    count = np.sum(corners, axis=0)
    for row, column in np.argwhere((count > 0) & (count < 4)).tolist():
        a, b, c, d = (bool(corner[row, column]) for corner in corners)
        place = row * width + column
        top, right, bottom, left = 2 * place, 2 * (place + 1) + 1, 2 * (place + width), 2 * place + 1
        if a == c and b == d:
            apart = a == bool(means[row, column] >= level)  # whether b and d are apart, or a and c
            yield from ((top, right), (bottom, left)) if apart else ((top, left), (right, bottom))
        else:
            crossed = [side for side, cut in ((top, a != b), (right, b != c), (bottom, c != d), (left, d != a)) if cut]
            yield crossed[0], crossed[1]


def _chains(neighbours: dict[int, list[int]]) -> Iterator[list[int]]:
    """The sides in the order of each line; those at the border of the picture have one neighbour, where lines begin."""
    ends = [side for side, others in neighbours.items() if len(others) == 1]
    used: set[int] = set()
    for start in [*ends, *neighbours]:
        if start in used:
            continue
        chain = [start]
        used.add(start)
        while step := [side for side in neighbours[chain[-1]] if side not in used]:
            chain.append(step[0])
            used.add(step[0])
        closed = len(chain) > 2 and start in neighbours[chain[-1]]
        yield [*chain, start] if closed else chain


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
