"""Charts of what belongs to no photograph: bars of features, points of many rows, curves over relevance, and intervals."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from lrpfx.errors import printable
from lrpfx.pictures.heatmaps import heatmap
from lrpfx.pictures.maps import Floats
from lrpfx.pictures.sheets import Text
from lrpfx.pictures.style import Style

_INK, _SOFT, _GRID, _UNKNOWN = (20, 20, 20), (95, 95, 95), (215, 215, 215), (150, 150, 150)
#: A width in which each name has one line.
_WIDE = 1_000_000
#: The opacity of what lies between the least and the largest of the values that share a column of pixels, of 255.
_BETWEEN = 70
#: The first and the last position, and what is counted.
Axis = tuple[str, str, str]


def waterfall(steps: Sequence[tuple[str, float]], total: str, style: Style) -> Image.Image:
    """Bars that add up, each from where the one above ended, and their sum in the last row.

    `steps`: a name and an amount for each bar. `total`: the name of the sum.
    """
    amounts = np.array([amount for _, amount in steps], dtype=np.float64)
    ends = np.cumsum(amounts)
    starts = ends - amounts
    chart = _Rows([*(name for name, _ in steps), total], [*starts, ends, 0.0], style, beside=True)
    for row, (start, end, amount) in enumerate(zip(starts, ends, amounts, strict=True)):
        chart.bar(row, start, end, chart.color(amount), f"{amount:+.3g}")
        chart.link(row, end)
    chart.bar(len(amounts), 0.0, float(ends[-1]), _SOFT, f"{ends[-1]:.3g}")
    return chart.picture


def swarm(names: Sequence[str], relevance: Floats, values: Floats, style: Style) -> Image.Image:
    """A row of points for each feature, a point for each sample at its relevance, in the colour of the feature's value.

    `relevance`: (samples, features). `values`: the same shape, as shares from -1 to 1 of the feature's own range; NaN is grey.
    """
    chart = _Rows(names, [*relevance.ravel(), 0.0], style, height=2.0)
    radius = max(2, style.width // 320)
    ends = style.colors(np.array([-0.6, 0.6])) * 255
    for row, (amounts, shares) in enumerate(zip(relevance.T, values.T, strict=True)):
        taken: dict[int, int] = {}
        layers = []
        for x in map(chart.across, amounts):  # one above, one below, and so on, where points would hide each other
            number = taken[x // (2 * radius)] = taken.get(x // (2 * radius), -1) + 1
            layers.append((number + 1) // 2 * (1 if number % 2 else -1))
        step = min(2.0 * radius, 0.45 * chart.row / max(1, *map(abs, layers), 1))
        for amount, layer, share in zip(amounts, layers, shares, strict=True):
            x, y = chart.across(float(amount)), chart.middle(row) + layer * step
            mixed = ends[0] + (ends[1] - ends[0]) * (share + 1) / 2  # white in the middle would not be seen
            color = tuple(mixed.round().astype(int).tolist()) if np.isfinite(share) else _UNKNOWN
            chart.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return chart.picture


def curves(
    names: Sequence[str],
    relevance: Floats,
    values: Floats | None,
    style: Style,
    axis: Axis,
    height: float | None = None,
) -> Image.Image:
    """A band for each feature, in the colours of its relevance at each step, with the curve of its values over it.

    `relevance`: (features, steps). `values`: the same shape; None for a map without curves. `axis`: that of the
    steps. `height`: of a band in lines of text. Relevance and values may have different numbers of steps.
    """
    text, line, margin, across = _layout(names, style)
    fitting = max(1.0, min(5.0, 40 / len(names))) if values is not None else 1.0
    band = round(line * (fitting if height is None else height))
    gap = line // 4 if values is not None else 0
    steps = relevance.shape[1]
    tall = len(names) * (band + gap)
    picture = Image.new("RGB", (style.width, tall + 2 * line), "white")
    draw = ImageDraw.Draw(picture)
    for row, (name, amounts) in enumerate(zip(names, relevance, strict=True)):
        top = row * (band + gap)
        colored = heatmap(amounts[None], style=style)  # a pixel for each step
        blend = Image.Resampling.NEAREST if steps <= across else Image.Resampling.BOX
        picture.paste(colored.resize((across, band), blend), (margin, top))
        draw.text((margin - line // 2, top + band / 2), _cut(name, text, margin - line), _INK, text.font, anchor="rm")
        if values is not None:
            lines = _curves(values[row], margin, across, top, band)
            if len(lines) > 1 and len(lines[0]) > 1:
                between = Image.new("L", picture.size)
                ImageDraw.Draw(between).polygon([*lines[0], *reversed(lines[1])], fill=_BETWEEN)
                picture.paste(_INK, mask=between)
            for curve in lines:
                draw.line(curve, fill=_INK, width=max(1, style.width // 800))
    _axis(draw, axis, margin, across, tall, text)
    return picture


def plane(map: Floats, style: Style, axis: Axis, upward: Axis) -> Image.Image:
    """A map (rows, steps) with axes, the first row at the bottom, as a spectrogram is drawn.

    `axis`, `upward`: those of the steps and of the rows.
    """
    text, line, margin, across = _layout(upward, style)
    tall = max(8 * line, across // 4)
    picture = Image.new("RGB", (style.width, tall + 2 * line), "white")
    blend = Image.Resampling.NEAREST if map.shape[0] < tall else Image.Resampling.BOX
    picture.paste(heatmap(map[::-1], style=style).resize((across, tall), blend), (margin, 0))
    draw = ImageDraw.Draw(picture)
    for share, shown, anchor in ((0.0, upward[1], "ra"), (0.5, upward[2], "rm"), (1.0, upward[0], "rs")):
        draw.text((margin - line // 2, share * tall), shown, _SOFT, text.font, anchor=anchor)
    _axis(draw, axis, margin, across, tall, text)
    return picture


def stacked(pictures: Sequence[tuple[str, Image.Image]], style: Style) -> Image.Image:
    """Pictures below each other, each under its title if it has one."""
    text = Text(max(11, style.width // 64), style.font)
    blocks = [(text.lines(printable(title), style.width - text.height), one) for title, one in pictures]
    tall = sum(len(lines) * text.height + one.height + text.height // 2 for lines, one in blocks)
    result = Image.new("RGB", (max(one.width for _, one in blocks), tall), "white")
    draw, top = ImageDraw.Draw(result), 0
    for lines, one in blocks:
        for line in lines:
            draw.text((0, top), line, fill=_INK, font=text.font)
            top += text.height
        result.paste(one, (0, top))
        top += one.height + text.height // 2
    return result


def ranges(rows: Sequence[tuple[str, float, float, float]], style: Style) -> Image.Image:
    """A row for each name: a point and its number at a mean, and a line from the lower to the upper bound of its interval.

    `rows`: name, lower bound, mean and upper bound.
    """
    chart = _Rows([name for name, *_ in rows], [*(ends for _, *ends in rows), 0.0], style, beside=True)
    radius = max(3, style.width // 240)
    for row, (_, low, mean, high) in enumerate(rows):
        x, y, right = chart.across(mean), chart.middle(row), chart.across(high)
        chart.draw.line((chart.across(low), y, right, y), fill=_SOFT, width=max(2, radius // 2))
        chart.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_INK)
        place = max(right, x + radius) + chart.line // 2
        chart.draw.text((place, y), f"{mean:.3f}", _SOFT, chart.text.font, anchor="lm")
    return chart.picture


class _Rows:
    """Rows with names on the left, and a scale of relevance across."""

    def __init__(
        self, names: Sequence[str], ends: Sequence[Any], style: Style, height: float = 1.6, beside: bool = False
    ) -> None:
        """`ends`: amounts that the scale must hold. `beside`: whether there is room for numbers beside the bars."""
        self.style = style
        self.text, self.line, self.margin, width = _layout(names, style)
        self.row = int(height * self.line)
        flat = np.concatenate([np.atleast_1d(np.asarray(one, dtype=np.float64)) for one in ends])
        self.low, self.high = float(flat.min()), float(flat.max())
        room = 5 * self.line if beside else self.line
        self.left, self.width = self.margin + room, width - 2 * room
        tall = self.row * len(names)
        self.picture = Image.new("RGB", (style.width, tall + (0 if beside else 2 * self.line)), "white")
        self.draw: Any = ImageDraw.Draw(self.picture)
        zero = self.across(0.0)
        self.draw.line((zero, 0, zero, tall), fill=_GRID, width=2)
        for row, name in enumerate(names):
            shown = _cut(name, self.text, self.margin - self.line)
            self.draw.text((self.margin - self.line // 2, self.middle(row)), shown, _INK, self.text.font, anchor="rm")
        if not beside:
            _axis(self.draw, (f"{self.low:.3g}", f"{self.high:.3g}", "relevance"), self.left, self.width, tall, self.text)

    def across(self, amount: float) -> int:
        """The column of pixels of an amount."""
        return self.left + round(self.width * (amount - self.low) / ((self.high - self.low) or 1.0))

    def middle(self, row: int) -> float:
        """The line of pixels in the middle of a row."""
        return (row + 0.5) * self.row

    def color(self, amount: float) -> tuple[int, int, int]:
        """That of positive or of negative relevance."""
        return _color(self.style, 0.6 if amount >= 0 else -0.6)

    def bar(self, row: int, start: float, end: float, color: tuple[int, int, int], number: str) -> None:
        """A bar from `start` to `end`, with a number on its outer side."""
        left, right = sorted((self.across(start), self.across(end)))
        middle, half = self.middle(row), self.row * 0.36
        self.draw.rectangle((left, middle - half, right + 1, middle + half), fill=color)
        place, anchor = (right + self.line // 2, "lm") if end >= start else (left - self.line // 2, "rm")
        self.draw.text((place, middle), number, _SOFT, self.text.font, anchor=anchor)

    def link(self, row: int, amount: float) -> None:
        """A thin line from the end of a row's bar to the start of the next."""
        x = self.across(amount)
        self.draw.line((x, self.middle(row) + self.row * 0.36, x, self.middle(row + 1) - self.row * 0.36), fill=_SOFT)


def _layout(names: Sequence[str], style: Style) -> tuple[Text, int, int, int]:
    """The font, the height of its lines, the width of a margin for names, and the width beside it."""
    text = Text(max(11, style.width // 64), style.font)
    longest = max((text.font.getlength(_cut(name, text, style.width // 3)) for name in names), default=0)
    margin = max(round(longest), style.width // 14) + text.height
    return text, text.height, margin, style.width - margin - text.height


def _cut(name: str, text: Text, width: int) -> str:
    """A name on one line, no wider than `width`: dots in the middle stand for what does not fit. The end may be a value."""
    name = next(iter(text.lines(printable(name), _WIDE, 1)), "")
    if text.font.getlength(name) <= width:
        return name
    for kept in range(len(name) - 1, 0, -1):
        cut = f"{name[: (kept + 1) // 2]}...{name[len(name) - kept // 2 :]}"
        if text.font.getlength(cut) <= width:
            return cut
    return ""


def _color(style: Style, share: float) -> tuple[int, int, int]:
    red, green, blue = (style.colors(np.array([share]))[0] * 255).round().astype(int).tolist()
    return red, green, blue


def _curves(values: Floats, left: int, across: int, top: int, band: int) -> list[list[tuple[float, float]]]:
    """The points of a curve in a band; of two, around all values, if several steps share a column of pixels."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    pad = 0.12 * band
    heights = top + band - pad - (band - 2 * pad) * ((values - low) / (high - low) if high > low else np.full(len(values), 0.5))
    if len(values) > 2 * across:
        edges = np.linspace(0, len(values), across + 1).astype(int)
        parts = [heights[start:end] for start, end in pairwise(edges)]
        lines = [np.array([part.min() for part in parts]), np.array([part.max() for part in parts])]
    else:
        lines = [heights]
    places = left + across * (np.arange(len(lines[0])) + 0.5) / len(lines[0])
    return [[(float(x), float(y)) for x, y in zip(places, line, strict=True) if np.isfinite(y)] for line in lines]


def _axis(draw: Any, axis: Axis, left: int, across: int, top: int, text: Text) -> None:
    first, last, name = axis
    for share, shown, anchor in ((0.0, first, "la"), (0.5, name, "ma"), (1.0, last, "ra")):
        draw.text((left + share * across, top + text.height // 3), _cut(shown, text, across), _SOFT, text.font, anchor=anchor)
