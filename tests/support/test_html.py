"""HTML for notebooks."""

import base64
import io
import math

import numpy as np
import pytest
from markup import Markup
from PIL import Image

from lrpfx.support.html import NEGATIVE, POSITIVE, Html, bar, bullets, element, folded, html_table, image_html

HOSTILE = "</td><script>alert('1')</script>&amp;\"'<"


def test_text_is_escaped_and_html_is_not():
    made = element("p", HOSTILE, Html("<b>bold</b>"), title=HOSTILE)
    assert "".join(Markup(made).texts) == f"{HOSTILE}bold" and Markup(made).titles() == [HOSTILE]
    assert Markup(made).count("b") == 1


def test_a_table_has_its_cells():
    made = Markup(html_table(("name", HOSTILE), [(HOSTILE, 1), (element("code", "a"), "2")], (HOSTILE,)))
    assert made.tables == [[["name", HOSTILE], [HOSTILE, "1"], ["a", "2"]]]
    sides = ["right" if "text-align:right" in one["style"] else "left" for tag, one in made.elements if tag in ("td", "th")]
    assert sides == ["left", "right"] * 3


def test_rows_fit_the_columns():
    with pytest.raises(ValueError, match="longer"):
        html_table(("a", "b"), [("1",)])


def test_letters_have_the_color_of_the_page():
    made = Markup(folded("title", Html(html_table(("a",), [("1",)]) + bullets(["x"]))))
    styles = [one.get("style", "") for _, one in made.elements]
    assert any(styles) and not any("#" in style for style in styles)
    assert all(style.count("color:") == style.count("color:inherit") for style in styles)


@pytest.mark.parametrize(
    ("amount", "longest", "expected"),
    [
        (2.0, 2.0, (POSITIVE, 8.0)),
        (-1.0, 2.0, (NEGATIVE, 4.0)),
        (0.0, 0.0, (POSITIVE, 0.0)),
        (3.0, 2.0, (POSITIVE, 8.0)),
        (math.nan, 1.0, (POSITIVE, 0.0)),
        (1.0, math.nan, (POSITIVE, 0.0)),
        (math.inf, 1.0, (POSITIVE, 0.0)),
    ],
)
def test_bars_are_shares_of_the_longest(amount, longest, expected):
    assert Markup(bar(amount, longest)).bars() == [expected]


def contrast(one, other):
    def luminance(color):
        channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_bars_can_be_told_from_the_page(page):
    assert all(contrast(color, page) >= 3 for color in (POSITIVE, NEGATIVE)), "WCAG 2, 1.4.11"


def test_pictures_are_in_the_html():
    pixels = np.random.default_rng(0).integers(0, 255, (3, 4, 3), dtype=np.uint8)
    ((tag, attributes),) = Markup(image_html(Image.fromarray(pixels), HOSTILE, 40)).elements
    assert tag == "img" and attributes["alt"] == HOSTILE and attributes["width"] == "40"
    content = base64.b64decode(attributes["src"].partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)
