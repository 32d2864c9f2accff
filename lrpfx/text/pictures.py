"""The forms of a text heatmap: terminal, HTML and PNG. Whatever stands in a token is shown as text and never interpreted."""

import html
import io
import os
import shutil
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from typing_extensions import Self

from lrpfx.errors import InputError
from lrpfx.pictures.color_maps import ColorMap
from lrpfx.pictures.images_of_arrays import get_cmap
from lrpfx.support.files import as_path, written
from lrpfx.support.identity.plain_data import PlainData
from lrpfx.text.scores import Scores

Color = tuple[int, int, int]

LONGEST = 40  # characters of a word that are shown
GREY: Color = (80, 80, 80)  # of the letters of special tokens
_PALE = 0.2  # how much of its colour a special token has: the contrast of its letters is then 4.5 or more
_NAMED = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u200c": "\u200c", "\u200d": "\u200d"}  # joiners shape letters and emoji


@dataclass(frozen=True, eq=False)
class TextHeatmap(PlainData):
    """The relevance of the words of a text, for one or several targets.

    Colours are those of a signed colour map with zero in the middle.

    `words`: the words. `scores`: their relevance, (targets, words). `targets`: a name for each row, "" for a single row without
    one. `special`: whether a word is a mark of the model, such as [CLS]. `places`: the tokens of each word. `others`: the
    relevance that belongs to no word, by name, one number for each target: that of position embeddings, of other inputs, and of
    padding. `scale`: as for `heatmap`. `cmap`: as for `heatmap`.
    """

    words: tuple[str, ...]
    scores: Scores
    targets: tuple[str, ...]
    special: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]
    others: dict[str, tuple[float, ...]] = field(default_factory=dict)
    scale: str | float = "common"
    cmap: ColorMap | str = "bwr"

    def shares(self) -> Scores:
        """The scores as fractions of the largest magnitude among the words of the text, between -1 and 1.

        With the scale "own", each target has its largest magnitude; a number is the largest magnitude of all. Special tokens do
        not count: they often take more relevance than the text, which would then be pale.
        """
        counted = np.array([not special for special in self.special], dtype=bool)
        magnitudes = np.abs(self.scores[:, counted] if counted.any() else self.scores)
        if self.scale == "own":
            largest = magnitudes.max(axis=1, keepdims=True, initial=0.0)
        else:
            common = magnitudes.max(initial=0.0) if self.scale == "common" else float(self.scale)
            largest = np.full((len(self.scores), 1), common)
        shares: Scores = (self.scores / np.where(largest > 0, largest, 1.0)).clip(-1.0, 1.0)
        return shares

    def apart(self, *places: int) -> Self:
        """The same with some words drawn as marks of the model are: pale, and without a say in the scale.

        The first word of a text takes most relevance of many language models, whose attention rests there where nothing is to
        be read (Xiao et al. 2023, https://arxiv.org/abs/2309.17453). All numbers stay as they are. `places`: of the words, by
        default the first one. Raises `InputError` for places without a word.
        """
        chosen = set(places or (0,))
        outside = sorted(place for place in chosen if not -len(self.words) <= place < len(self.words))
        if outside:
            raise InputError(f"the text has {len(self.words)} words, and none at {outside[0]}", topic="text-heatmaps")
        chosen = {place % len(self.words) for place in chosen}
        return replace(self, special=tuple(mark or place in chosen for place, mark in enumerate(self.special)))

    def to_terminal(self, *, color: bool | None = None, width: int | None = None) -> str:
        """The heatmap for a terminal.

        `color`: whether words are on 24-bit colours, rather than each with its number; by default, unless the environment
        variable NO_COLOR is set. `width`: in characters, by default that of the terminal.
        """
        color = "NO_COLOR" not in os.environ if color is None else color
        width = max(shutil.get_terminal_size().columns if width is None else width, 20)
        labels = [visible(name) if name else "" for name in self.targets]
        margin = max(map(_columns, labels), default=0)
        margin = min(margin, width // 3) + 2 if margin else 0
        lines = []
        for row, (label, colors) in enumerate(zip(labels, colors_of(self), strict=True)):
            start = label[: margin - 2] + " " * (margin - _columns(label[: margin - 2]))
            line, used = start, margin
            for place, word in enumerate(map(visible, self.words)):
                shown = word if color else f"{word}{{{number_of(self.scores[row, place])}}}"
                if used > margin and used + _columns(shown) + 1 > width:
                    lines.append(line)
                    line, used = " " * margin, margin
                painted = _painted(shown, *colors[place], self.special[place]) if color else shown
                line += painted if used == margin else f" {painted}"
                used += _columns(shown) + (used != margin)
            lines.append(line)
            if self.others:
                lines.append(" " * margin + f"[{_notes(self, row)}]")
        return "\n".join(lines)

    def to_html(self) -> str:
        """The heatmap as a part of an HTML page, without scripts or further files.

        A word that is pointed at shows its number.
        """
        rows = []
        for row, (name, colors) in enumerate(zip(self.targets, colors_of(self), strict=True)):
            words = " ".join(spans_of(self, row, colors))
            label = (
                f'<th scope="row" style="text-align:left;vertical-align:top;padding:.3em 1em .3em 0">{escaped(name)}</th>'
                if any(self.targets)
                else ""
            )
            notes = f'<div style="font-size:80%;opacity:.75">{html.escape(_notes(self, row))}</div>' if self.others else ""
            rows.append(
                f'<tr style="background:none">{label}<td style="text-align:left;padding:.3em 0">{words}{notes}</td></tr>'
            )
        return (
            '<table class="lrpfx-text" style="border-collapse:collapse;border:none;font-family:sans-serif;line-height:1.7">'
            f"<tbody>{''.join(rows)}</tbody></table>"
        )

    def to_image(self, *, size: int = 18, width: int = 900, font: str | None = None) -> Image.Image:
        """The heatmap as a Pillow image.

        `size`: of the letters, in pixels. `width`: of the image, in pixels. `font`: a file; the default font has Latin letters
        only.
        """
        letters: Any = ImageFont.load_default(size) if font is None else ImageFont.truetype(font, size)
        gap, height = size // 3, int(size * 1.9)
        labels = [visible(name) if name else "" for name in self.targets]
        margin = gap + int(max((letters.getlength(label) for label in labels), default=0)) + (2 * gap if any(labels) else 0)
        marks: list[
            tuple[int, int, str, Color | None, Color]
        ] = []  # x, y, text, the colour behind it, the colour of its letters
        y = gap
        for row, colors in enumerate(colors_of(self)):
            marks.append((gap, y, labels[row], None, (0, 0, 0)))
            x = margin
            for place, word in enumerate(map(visible, self.words)):
                length = int(letters.getlength(word)) + 2 * gap
                if x > margin and x + length + gap > width:
                    x, y = margin, y + height
                behind, color = colors[place]
                marks.append((x, y, word, behind, GREY if self.special[place] else color))
                x += length + gap // 2
            y += height
            if self.others:
                marks.append((margin, y, _notes(self, row), None, GREY))
                y += height
        image = Image.new("RGB", (width, y + gap), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for x, top, text, box_color, color in marks:
            if box_color is not None:
                box = (x, top, x + int(letters.getlength(text)) + 2 * gap, top + height - gap // 2)
                draw.rounded_rectangle(box, radius=gap, fill=box_color)
            draw.text(
                (x + (gap if box_color else 0), top + (height - gap // 2) / 2), text, fill=color, font=letters, anchor="lm"
            )
        return image

    def save(self, path: str | Path) -> Path:
        """Write the heatmap to a file.

        `path`: ends in .html (a whole page), .png or .txt. Returns the path. Raises `InputError`: it has another ending.
        """
        target = as_path(path)
        suffix = target.suffix.lower()
        if suffix == ".html":
            head = '<!DOCTYPE html>\n<html lang="">\n<head>\n<meta charset="utf-8">\n<title>Relevance</title>\n</head>\n'
            content = f'{head}<body style="background:#fff;color:#000">\n{self.to_html()}\n</body>\n</html>\n'.encode()
        elif suffix == ".txt":
            content = f"{self.to_terminal(color=False, width=100)}\n".encode()
        elif suffix == ".png":
            picture = io.BytesIO()
            self.to_image().save(picture, format="png")
            content = picture.getvalue()
        else:
            raise InputError(f"a text heatmap is a .html, .png or .txt, not a {suffix!r}", topic="text-heatmaps")
        return written(target, content)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return self.to_terminal()


def visible(text: str) -> str:
    """The text on one line: control characters, line breaks and marks of direction as symbols or numbers, and not too long."""
    shown = "".join(_visible(character) for character in text[: LONGEST + 1])
    shown = shown[:LONGEST] + "…" if len(shown) > LONGEST else shown
    return shown if shown.strip() else shown.replace(" ", "␣") or "∅"


def _visible(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"‹{ord(character):x}›"
    return character


def number_of(score: float) -> str:
    return f"{score:+.3g}"


def colors_of(heatmap: TextHeatmap) -> list[list[tuple[Color, Color]]]:
    """For each target and word, the colour behind it and that of its letters."""
    backgrounds = get_cmap(heatmap.cmap)((heatmap.shares() + 1.0) / 2.0) * 255
    white = np.full(3, 255.0)
    rows = []
    for row in backgrounds:
        colors = []
        for special, color in zip(heatmap.special, row, strict=True):
            red, green, blue = map(round, (white * (1 - _PALE) + color * _PALE if special else color).tolist())
            colors.append(((red, green, blue), _letters((red, green, blue))))
        rows.append(colors)
    return rows


def _letters(behind: Color) -> Color:
    """Black or white, whichever is easier to read: by the contrast ratio of WCAG 2, which is then above 4.5."""
    channels = [value / 255 for value in behind]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else (255, 255, 255)


def _notes(heatmap: TextHeatmap, row: int) -> str:
    """The relevance of everything but the words, as text."""
    return ", ".join(f"{visible(name)} {number_of(values[row])}" for name, values in heatmap.others.items())


def _painted(text: str, behind: Color, letters: Color, special: bool) -> str:
    codes = ["48", "2", *map(str, behind), "38", "2", *map(str, GREY if special else letters)]
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


def _columns(text: str) -> int:
    """The columns that a text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)


_WORD = "padding:.1em .2em;border-radius:.2em;white-space:pre;display:inline-block;margin:.08em 0"


def spans_of(heatmap: TextHeatmap, row: int, colors: list[tuple[Color, Color]]) -> Iterator[str]:
    for place, word in enumerate(heatmap.words):
        behind, letters = colors[place]
        letters, style = (GREY, ";font-style:italic") if heatmap.special[place] else (letters, "")
        painted = f"background:{_hexadecimal(behind)};color:{_hexadecimal(letters)}{style}"
        yield f'<bdi title="{number_of(heatmap.scores[row, place])}" style="{_WORD};{painted}">{escaped(word)}</bdi>'


def escaped(text: str) -> str:
    return html.escape(visible(text), quote=True) if text else ""


def _hexadecimal(color: Color) -> str:
    return "#" + "".join(f"{value:02x}" for value in color)
