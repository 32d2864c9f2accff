"""HTML for notebooks: tables, bars and pictures, without scripts and without anything to be fetched.

Letters have the colour of the page around them, so they can be read on a bright page and on a dark one.
"""

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

POSITIVE, NEGATIVE = "#d6604d", "#4393c3"  # of bars; both can be told from black and from white
_LINE = "1px solid rgba(128,128,128,.5)"
_CELL = "padding:.15em .8em .15em 0;vertical-align:top;text-align:"  # notebooks align to the right what does not say otherwise
_LONGEST_BAR = 8.0  # in the width of a letter


class Html(str):
    """Text that is HTML. All other text is escaped where it is put into HTML."""


def as_html(value: Any) -> Html:
    """A value as HTML: its text, escaped, or itself if it is HTML already."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """An element with its contents and attributes, both escaped."""
    given = "".join(f' {name}="{html.escape(str(value))}"' for name, value in attributes.items())
    return Html(f"<{tag}{given}>{''.join(map(as_html, content))}</{tag}>")


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[str] = ()) -> Html:
    """A table of text or HTML; the columns in `numbers` are right-aligned. `format_table` is the same as text."""
    sides = ["right;font-variant-numeric:tabular-nums" if name in numbers else "left" for name in columns]

    def line(tag: str, cells: Sequence[Any], style: str = "") -> Html:
        made = [element(tag, cell, style=_CELL + side + style) for cell, side in zip(cells, sides, strict=True)]
        return element("tr", *made, style="background:none")

    head = element("thead", line("th", columns, f";border-bottom:{_LINE}"))
    body = element("tbody", *(line("td", row) for row in rows))
    return element("table", head, body, style="border-collapse:collapse;border:none;color:inherit")


def bar(amount: float, longest: float) -> Html:
    """A bar for an amount beside others of which `longest` is the largest magnitude. Negative amounts have another colour."""
    share = abs(amount) / longest if longest else 0.0
    length = min(share, 1.0) * _LONGEST_BAR if math.isfinite(share) else 0.0
    color = NEGATIVE if amount < 0 else POSITIVE
    return element("span", style=f"display:inline-block;height:.7em;width:{length:.2f}em;background:{color}")


def folded(title: Any, content: Any) -> Html:
    """Content that a click on its title shows."""
    inside = element("div", content, style="margin-left:1.2em")
    return element("details", element("summary", title, style="cursor:pointer"), inside)


def bullets(texts: Sequence[Any]) -> Html:
    """A list of texts, which keep their line breaks."""
    return element("ul", *(element("li", text, style="white-space:pre-wrap") for text in texts), style="margin:.2em 0")


def image_html(image: "Image.Image", description: str, width: int | None = None) -> Html:
    """An image, which the HTML holds. `width`: in pixels of the page, by default that of the image."""
    content = io.BytesIO()
    form = "jpeg" if width is None else "png"  # photographs would be large, and enlarged pixels would blur
    image.save(content, format=form, **({"quality": 90} if form == "jpeg" else {}))
    address = f"data:image/{form};base64,{base64.b64encode(content.getvalue()).decode()}"
    size = "" if width is None else f' width="{width}" style="image-rendering:pixelated"'
    return Html(f'<img alt="{html.escape(description)}" src="{address}"{size}>')
