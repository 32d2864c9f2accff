"""Sheets of pictures with titles, and relevance through the layers of a network."""

import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from typing_extensions import Unpack

from lrpfx.pictures.heatmaps import heatmap
from lrpfx.pictures.maps import Floats, array_of, invalid, relevance_map, wrong_type
from lrpfx.pictures.pixels import on_white
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.support.numbers import whole_number

Row = Mapping[str, Image.Image] | Sequence[Image.Image | tuple[str, Image.Image]]

_SMALL = 64  # pixels: a picture with fewer is enlarged without blending its pixels
_LINES = 3  # of a title; what does not fit is cut
_PLAIN = str.maketrans({"×": "x", "–": "-", "−": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "ß": "ss", "ø": "o", "æ": "ae"})
_INK, _SOFT = (20, 20, 20), (95, 95, 95)

Legend = tuple[str, str]
LEGEND: Legend = ("against the class", "for the class")
"""What negative and positive relevance mean, at the ends of a colour bar."""


def sheet(
    pictures: Row | Sequence[Row],
    *,
    title: str | None = None,
    caption: str | None = None,
    legend: Legend | None = None,
    style: Style | None = None,
    **settings: Unpack[StyleSettings],
) -> Image.Image:
    """Pictures side by side on white, all of one height, with their titles above them.

    Long text is broken into lines, titles of more than three are cut.

    Parameters
    ----------
    pictures
        A row, or a list of rows: a mapping from titles to pictures, or a list of pictures or of pairs (title, picture).
    title, caption
        Text above and below.
    legend
        What negative and positive relevance mean, such as ("against cat", "for cat"), at the ends of a colour bar of the
        `cmap`. Without a `scale`, the bar says that each map has its own.
    style, **settings
        As for `heatmap`: the `width` and `font`, and with a `scale` the colour bar has numbers.
    """
    style = styled(style, settings)
    width, font = style.width, style.font
    rows = _rows(pictures)
    gap, size = _gap(width), max(11, width // 64)
    text = Text(size, font)
    columns = max(map(len, rows))
    aspects = [max(one.width / one.height for row in rows for _, one in row[place : place + 1]) for place in range(columns)]
    height = height_of_row(aspects, width)
    widths = [max(1, round(height * aspect)) for aspect in aspects]
    lefts = [gap + place * gap + sum(widths[:place]) for place in range(columns)]

    blocks: list[Image.Image] = []
    if title:
        blocks.append(_text_block(title, Text(round(size * 1.4), font), width, gap, _INK))
    for row in rows:
        lines = [text.lines(name, widths[place], _LINES) for place, (name, _) in enumerate(row)]
        above = max(map(len, lines)) * text.height
        block = Image.new("RGB", (width, above + height + gap // 2), "white")
        draw = ImageDraw.Draw(block)
        for place, (_, one) in enumerate(row):
            for number, line in enumerate(reversed(lines[place]), 1):  # titles stand on their pictures
                draw.text((lefts[place], above - number * text.height), line, fill=_INK, font=text.font)
            block.paste(_enlarged(one, height), (lefts[place], above))
        blocks.append(block)
    if style.scale is not None or legend is not None:
        blocks.append(_color_bar(style, legend, text, gap))
    if caption:
        blocks.append(_text_block(caption, text, width, gap, _SOFT))

    result = Image.new("RGB", (width, sum(block.height for block in blocks) + gap * (len(blocks) + 1)), "white")
    top = gap
    for block in blocks:
        result.paste(block, (0, top))
        top += block.height + gap
    return result


def height_of_row(aspects: Sequence[float], width: int = Style.width) -> int:
    """The height of pictures in a row of a sheet.

    `aspects`: the ratio of width to height of each. `width`: of the sheet in pixels.
    """
    return min(max(1, int((width - _gap(width) * (len(aspects) + 1)) / sum(aspects))), 2 * width)


def _gap(width: int) -> int:
    return max(6, width // 80)


def strip(
    layers: Mapping[str, Any],
    *,
    columns: int = 6,
    title: str | None = None,
    caption: str | None = None,
    legend: Legend | None = LEGEND,
    style: Style | None = None,
    **settings: Unpack[StyleSettings],
) -> Image.Image:
    """Relevance through the layers of a network: maps of any resolution, each pixel a square, with names and resolutions.

    Layers have scales of their own unless the style has one: few large pixels have more relevance each than many small ones.
    The colour bar says so.

    `layers`: relevance by name, of shape (height, width), (channels, height, width), or a batch of one (1, channels, height,
    width), as `attribute(..., record=[...])` returns it; anything else is an `InputTypeError`. `columns`: how many stand in a
    row. Maps are not smoothed. Other arguments: as for `sheet`, with the same `settings`.
    """
    if not isinstance(layers, Mapping) or not layers:
        raise wrong_type("layers are a mapping from names to relevance, with at least one")
    columns, style = whole_number(columns, "columns is a number", 1, "heatmaps"), replace(styled(style, settings), sigma=0)
    found = []
    for name, relevance in layers.items():
        values = _map_of_layer(str(name), relevance)
        height, across = values.shape
        picture = heatmap(values, style=style)
        enlarged = max(1, -(-style.width // (min(columns, len(layers)) * max(height, across))))
        found.append(
            (f"{name}\n{height} x {across}", picture.resize((across * enlarged, height * enlarged), Image.Resampling.NEAREST))
        )
    rows = [found[start : start + columns] for start in range(0, len(found), columns)]
    return sheet(rows, title=title, caption=caption, legend=legend, style=style)


def _map_of_layer(name: str, relevance: Any) -> Floats:
    shape = array_of(relevance, f"relevance of {name}").shape
    if len(shape) not in (2, 3, 4) or (len(shape) == 3 and shape[0] == 1):
        raise wrong_type(
            f"relevance of {name} has the shape {shape}, which is not that of images: give it as (height, width) or (1, "
            "channels, height, width); tokens of patches must be reshaped to their grid"
        )
    return relevance_map(relevance, channels="first")


def _rows(pictures: Any) -> list[list[tuple[str, Image.Image]]]:
    """Rows of titles and pictures."""
    if isinstance(pictures, Mapping) or (isinstance(pictures, Sequence) and any(_is_entry(one) for one in pictures)):
        pictures = [pictures]
    if not isinstance(pictures, Sequence) or isinstance(pictures, str):
        raise wrong_type(f"a sheet is made of pictures by title, or of rows of them, not of {type(pictures).__name__}")
    rows = []
    for row in pictures:
        entries = list(row.items()) if isinstance(row, Mapping) else list(row) if isinstance(row, Sequence) else [row]
        named = [("", one) if isinstance(one, Image.Image) else one for one in entries]
        wrong = [one for one in named if not _is_entry(one)]
        if wrong:
            raise wrong_type(f"a row of a sheet has Pillow images, or pairs (title, image), not {type(wrong[0]).__name__}")
        if named:
            rows.append([(str(name), on_white(one)) for name, one in named])
    if not rows:
        raise invalid("a sheet has at least one picture")
    return rows


def _is_entry(one: Any) -> bool:
    return isinstance(one, Image.Image) or (isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Image.Image))


def _enlarged(picture: Image.Image, height: int) -> Image.Image:
    """The picture with this height."""
    width = max(1, round(picture.width * height / picture.height))
    blend = Image.Resampling.NEAREST if max(picture.size) < min(_SMALL, height) else Image.Resampling.LANCZOS
    return picture.resize((width, height), blend)


def _color_bar(style: Style, legend: Legend | None, text: "Text", gap: int) -> Image.Image:
    """The colours from minus to plus the scale, or from zero for a map of magnitudes, with numbers below and words beside."""
    width, scale, signed = style.width, style.scale, style.colors.signed
    against, favour = legend or ("", "")
    ends = (against, favour) if signed or legend is None else ("neither", f"{against} or {favour}")
    across, high = min(width - 2 * gap, max(width // 4, 160)), max(8, text.height // 2)
    left = (width - across) // 2
    left_words, right_words = (text.lines(words, max(1, left - 2 * gap)) for words in ends)
    numbers = _numbers_of_bar(scale, signed)
    block = Image.new("RGB", (width, max(high + text.height, len(left_words) * text.height, len(right_words) * text.height)))
    block.paste("white", (0, 0, *block.size))
    line = (style.colors(np.linspace(-1.0 if signed else 0.0, 1.0, across)) * 255).round().astype(np.uint8)
    block.paste(Image.fromarray(np.repeat(line[None], high, axis=0)), (left, 0))
    draw = ImageDraw.Draw(block)
    draw.rectangle((left, 0, left + across - 1, high - 1), outline=(150, 150, 150))
    for words, place, anchor in ((left_words, left - gap, "ra"), (right_words, left + across + gap, "la")):
        for number, one in enumerate(words):
            draw.text((place, number * text.height - text.height // 5), one, fill=_SOFT, font=text.font, anchor=anchor)
    for share, anchor, shown in numbers:
        draw.text((left + round(share * across), high + 2), shown, fill=_SOFT, font=text.font, anchor=anchor)
    return block


def _numbers_of_bar(scale: float | None, signed: bool) -> list[tuple[float, str, str]]:
    """What stands below a colour bar: shares of its width, anchors and texts."""
    if scale is None:
        return [(0.5, "ma", "each map has its own scale")]
    if not signed:
        return [(0.0, "la", "0"), (1.0, "ra", f"±{scale:.2g}" if scale else "0")]
    ends = [(0.0, "la", f"{-scale:+.2g}"), (1.0, "ra", f"{scale:+.2g}")] if scale else []
    return [*ends, (0.5, "ma", "0")]


def _text_block(words: str, text: "Text", width: int, gap: int, ink: tuple[int, int, int]) -> Image.Image:
    lines = text.lines(words, width - 2 * gap)
    block = Image.new("RGB", (width, len(lines) * text.height), "white")
    draw = ImageDraw.Draw(block)
    for number, line in enumerate(lines):
        draw.text((gap, number * text.height), line, fill=ink, font=text.font)
    return block


class Text:
    """A font, and how text is broken into lines with it. Pillow's own has hardly more than ASCII: accents are left out."""

    def __init__(self, size: int, path: str | None) -> None:
        self.font: Any = ImageFont.load_default(size) if path is None else ImageFont.truetype(path, size)
        self.height = round(size * 1.35)
        self._plain = path is None

    def lines(self, text: str, width: int, most: int | None = None) -> list[str]:
        """Lines no wider than `width`, and no more than `most`, the last of which then ends with dots."""
        if self._plain:
            letters = unicodedata.normalize("NFKD", text.translate(_PLAIN))
            text = "".join(letter for letter in letters if not unicodedata.combining(letter))
        lines: list[str] = []
        for paragraph in text.splitlines():
            line = ""
            for word in paragraph.split():
                joined = f"{line} {word}".strip()
                if self._fits(joined, width):
                    line = joined
                    continue
                lines += [line] if line else []
                while not self._fits(word, width) and len(word) > 1:
                    count = self._fitting(word, width)
                    lines.append(word[:count])
                    word = word[count:]
                line = word
            lines += [line] if line else []
        if most is None or len(lines) <= most:
            return lines
        last = lines[most - 1]
        while last and not self._fits(f"{last}…", width):
            last = last[:-1]
        return [*lines[: most - 1], f"{last.rstrip()}…"]

    def _fits(self, text: str, width: int) -> bool:
        return bool(self.font.getlength(text) <= width)

    def _fitting(self, word: str, width: int) -> int:
        """How many letters of a word stand on a line: up to a mark between parts of a name, or all that fit, one at least."""
        count = max(1, bisect_right(range(len(word)), width, key=lambda length: self.font.getlength(word[:length])) - 1)
        return max((word.rfind(mark, 1, count) + 1 for mark in "._-/"), default=0) or count
