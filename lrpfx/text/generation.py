"""What a language model generated, and which tokens each of the generated ones came from."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from typing_extensions import Self

from lrpfx.support.numbers import whole_number
from lrpfx.text.pictures import TextHeatmap, colors_of, escaped, spans_of, visible

_INK, _SOFT, _UNREAD = (20, 20, 20), (95, 95, 95), (236, 236, 236)


@dataclass(frozen=True, eq=False)
class GenerationHeatmap(TextHeatmap):
    """A matrix of relevance: a row for each generated token, a column for each token that was read before it.

    In HTML, a generated token that is pointed at shows what it came from.

    `words`: single tokens, those of the prompt before the generated ones. `targets`: the generated tokens. `start`: how many
    tokens the prompt has. Other arguments: as for `TextHeatmap`.
    """

    start: int = 0

    @classmethod
    def of(cls, heatmap: TextHeatmap, start: int) -> Self:
        """The matrix that a heatmap of tokens is.

        `heatmap`: with a row for each generated token. `start`: how many tokens the prompt has.
        """
        return cls(**vars(heatmap), start=start)

    def row(self, number: int) -> TextHeatmap:
        """What one generated token came from: the words before it in the colours of their relevance.

        `number`: of the generated token, from 0. Raises `InputError` for a token that there is not.
        """
        count = len(self.targets)
        number = whole_number(number, "a generated token has a number", -count, "text-heatmaps", count - 1)
        end = self.start + number % count
        others: dict[str, tuple[float, ...]] = {name: (values[number],) for name, values in self.others.items()}
        scale = self.largest if self.scale == "common" else self.scale
        cut = (self.words[:end], self.scores[[number], :end], (self.targets[number],), self.special[:end], self.places[:end])
        return TextHeatmap(*cut, others, scale, self.cmap)

    @property
    def largest(self) -> float:
        """The largest magnitude of any word that is no mark of the model, as `shares` takes it; 1 if all are zero."""
        counted = ~np.array(self.special, dtype=bool)
        return float(np.abs(self.scores[:, counted] if counted.any() else self.scores).max(initial=0.0)) or 1.0

    def to_html(self) -> str:
        """The prompt and what was generated as a part of an HTML page, without scripts or further files.

        A generated token that is pointed at, clicked, or chosen with the keys shows the text before it in the colours of its
        relevance.
        """
        name = "g" + hashlib.sha256(repr((self.words, self.targets)).encode() + self.scores.tobytes()).hexdigest()[:10]
        buttons, labels, maps, chosen, hovered = [], [], [], [], []
        for number, token in enumerate(self.targets):
            one = self.row(number)
            checked = " checked" if number == 0 else ""
            buttons.append(f'<input type="radio" class="choice" name="{name}" id="{name}-{number}"{checked}>')
            labels.append(f'<label for="{name}-{number}" class="token t{number}">{escaped(token)}</label>')
            words = " ".join(spans_of(one, 0, colors_of(one)[0]))
            maps.append(f'<div class="map m{number}">{words} <b>{escaped(token)}</b></div>')
            chosen.append(f"#{name}-{number}:checked~.m{number}{{display:block}}")
            chosen.append(f"#{name}-{number}:checked~.t{number}{{outline:2px solid}}")
            hovered.append(f".{name} .t{number}:hover~.m{number}{{display:block!important}}")  # rather than the chosen one
        style = (
            f".{name}{{font-family:sans-serif;line-height:1.7;position:relative}}.{name} .map{{display:none;padding:.6em 0}}"
            f".{name} .choice{{position:absolute;opacity:0}}"
            f".{name} .token{{cursor:pointer;padding:.1em .2em;margin:.08em;border-radius:.2em;white-space:pre;"
            f"display:inline-block;border:1px solid rgba(128,128,128,.5)}}"
        )
        hides = f".{name}:has(.token:hover) .map{{display:none!important}}"
        prompt = " ".join(f'<span style="white-space:pre">{escaped(word)}</span>' for word in self.words[: self.start])
        return (
            f'<div class="lrpfx-generation {name}"><style>{style}{"".join([*chosen, hides, *hovered])}</style>'
            f"{''.join(buttons)}{prompt} {' '.join(labels)}{''.join(maps)}</div>"
        )

    def to_image(self, *, size: int = 14, width: int = 900, font: str | None = None) -> Image.Image:
        """The matrix as a Pillow image: columns are the tokens that were read, with a line before the first generated one.

        Columns that do not fit stand in a further band below. Tokens that come after the generated one of a row are grey.

        `size`: of the letters, in pixels. `width`: of the image, in pixels, at most. `font`: as for `TextHeatmap.to_image`.
        """
        letters: Any = ImageFont.load_default(size) if font is None else ImageFont.truetype(font, size)
        gap, cell = size // 2, int(size * 1.5)
        rows, columns = [visible(one) for one in self.targets], [visible(one) for one in self.words]
        left = 2 * gap + int(max(map(letters.getlength, rows)))
        above = 2 * gap + int(max(map(letters.getlength, columns)))
        fitting = max(1, (width - left - gap) // cell)
        bands = [range(first, min(first + fitting, len(columns))) for first in range(0, len(columns), fitting)]
        tall = above + cell * len(rows) + gap
        picture = Image.new("RGB", (left + cell * len(bands[0]) + gap, tall * len(bands)), (255, 255, 255))
        draw = ImageDraw.Draw(picture)
        colors = colors_of(self)
        for number, band in enumerate(bands):
            top = number * tall + above
            for row, name in enumerate(rows):
                y = top + row * cell
                draw.text((left - gap, y + cell / 2), name, fill=_INK, font=letters, anchor="rm")
                for place in band:
                    x = left + (place - band.start) * cell
                    color = colors[row][place][0] if place < self.start + row else _UNREAD
                    draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=color)
            for place in band:
                label = Image.new("RGB", (above - gap, cell), (255, 255, 255))
                color = _SOFT if self.special[place] else _INK
                ImageDraw.Draw(label).text((0, cell / 2), columns[place], fill=color, font=letters, anchor="lm")
                picture.paste(label.rotate(90, expand=True), (left + (place - band.start) * cell, top - above + gap // 2))
            if self.start in band and self.start:
                x = left + (self.start - band.start) * cell - 1
                draw.line((x, top - above + gap, x, top + cell * len(rows) - 1), fill=_INK)
        return picture
