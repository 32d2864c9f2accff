"""Pictures of boxes that a detector found."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

_LINE, _DARK, _INK = (255, 214, 10), (60, 60, 60), (20, 20, 20)


def with_boxes(image: Image.Image, corners: Sequence[Sequence[float]], names: Sequence[str]) -> Image.Image:
    """An image with boxes and their names; the first ones are drawn last, over the others.

    `corners`: left, top, right and bottom edge of each, in pixels. `names`: as many.
    """
    drawn = image.convert("RGB")
    draw = ImageDraw.Draw(drawn)
    line = max(1, min(drawn.size) // 300)
    font = ImageFont.load_default(max(9, min(drawn.size) // 28))
    for edges, name in reversed(list(zip(corners, names, strict=True))):
        left, top, right, bottom = map(round, edges)
        for distance, color in ((line, _DARK), (0, _LINE)):
            draw.rectangle((left - distance, top - distance, right + distance, bottom + distance), outline=color, width=line)
        tall = font.getbbox(name)[3] + 2
        across = min(max(left, 0), max(0, drawn.width - round(font.getlength(name)) - 4))
        above = top - tall if top >= tall else max(top, 0)
        draw.rectangle((across, above, across + font.getlength(name) + 4, above + tall), fill=_LINE)
        draw.text((across + 2, above), name, fill=_INK, font=font)
    return drawn
