"""Sheets and strips: where pictures stand, how titles are broken, and colour bars."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures import colors_of, sheet, strip
from lrpfx.pictures.sheets import Text

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(color, size=(100, 100)):
    return Image.new("RGB", size, color)


def box(picture, color):
    """Left, top, right, bottom of the pixels of this colour."""
    rows, columns = np.nonzero((np.asarray(picture) == color).all(-1))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_pictures_stand_side_by_side_with_equal_heights():
    result = sheet([plain(RED), plain(GREEN, (400, 200)), plain(BLUE, (30, 60))], width=1000)
    assert result.width == 1000
    left, middle, right = (box(result, color) for color in (RED, GREEN, BLUE))
    assert left[1] == middle[1] == right[1] and left[3] == middle[3] == right[3]
    for (x0, y0, x1, y1), aspect in ((left, 1), (middle, 2), (right, 0.5)):
        assert abs((x1 - x0) / (y1 - y0) - aspect) < 0.02
    assert 0 < left[0] < left[2] < middle[0] < middle[2] < right[0] < right[2] <= 1000
    assert right[2] > 960  # the width is used


def test_rows_are_aligned():
    result = sheet([[plain(RED), plain(GREEN)], [plain(BLUE), plain((9, 9, 9))]])
    red, green, blue, other = (box(result, color) for color in (RED, GREEN, BLUE, (9, 9, 9)))
    assert red[0] == blue[0] and green[0] == other[0] and red[1] == green[1] < blue[1] == other[1]


def text_above(result, color):
    x0, y0, x1, _ = box(result, color)
    return (np.asarray(result)[:y0, x0:x1] < 128).any()


FORMS = [
    {"one": plain(RED), "two": plain(GREEN)},
    [("one", plain(RED)), ("two", plain(GREEN))],
    [{"one": plain(RED), "two": plain(GREEN)}],
    [[("one", plain(RED)), ("two", plain(GREEN))]],
    (("one", plain(RED)), ("two", plain(GREEN))),
]


@pytest.mark.parametrize("pictures", FORMS)
def test_forms_of_rows(pictures):
    assert np.array_equal(np.asarray(sheet(pictures)), np.asarray(sheet(FORMS[0])))
    assert text_above(sheet(pictures), RED) and text_above(sheet(pictures), GREEN)


def test_no_titles_take_no_place():
    bare, titled = sheet([plain(RED)], width=300), sheet({"a title": plain(RED)}, width=300)
    assert not text_above(bare, RED) and text_above(titled, RED) and titled.height > bare.height


@pytest.mark.parametrize("words", ["a " * 200, "word " * 100, "x" * 500, "two\nlines", "猫 \x00 \t"])
def test_long_titles_stay_above_their_picture(words):
    result = sheet([(words, plain(RED)), ("b", plain(GREEN))], width=400)
    array = np.asarray(result)
    _, top, right, _ = box(result, RED)
    left = box(result, GREEN)[0]
    assert (array[:, right:left] == 255).all()
    assert top < 100 and (array[:top, :right] < 128).any()


def test_lines_of_a_title_are_in_their_order_above_the_picture():
    result = sheet({"MMMMMMMM\ni": plain(RED)}, width=300)
    above = np.asarray(result)[: box(result, RED)[1]].sum(-1) < 300
    first, second = (half.sum() for half in np.array_split(above[np.flatnonzero(above.any(1))], 2))
    assert first > 3 * second > 0


def test_accents_that_the_font_lacks_are_left_out():
    for words, shown in (("Café Größe", "Cafe Grosse"), ("2 × 3", "2 x 3")):
        assert np.array_equal(np.asarray(sheet({words: plain(RED)})), np.asarray(sheet({shown: plain(RED)})))


def test_lines_are_as_wide_as_they_may_be():
    text = Text(14, None)
    lines = text.lines("the quick brown fox jumps over the lazy dog " * 3, 150)
    assert " ".join(lines) == ("the quick brown fox jumps over the lazy dog " * 3).strip()
    assert all(text.font.getlength(line) <= 150 for line in lines)
    for line, following in itertools.pairwise(lines):
        assert text.font.getlength(f"{line} {following.split()[0]}") > 150
    short = text.lines("the quick brown fox jumps over the lazy dog " * 3, 150, most=2)
    assert len(short) == 2 and short[0] == lines[0] and short[1].endswith("…") and text.font.getlength(short[1]) <= 150
    assert text.lines("", 150) == [] and text.lines("one\ntwo", 150) == ["one", "two"]
    assert text.lines("layer4.downsample.conv", 90) == ["layer4.", "downsample.", "conv"]
    pieces = text.lines("y" * 100, 50)
    assert "".join(pieces) == "y" * 100 and all(text.font.getlength(piece) <= 50 for piece in pieces)


def test_title_and_caption():
    bare = sheet([plain(RED)], width=400)
    both = sheet([plain(RED)], width=400, title="Title", caption="some caption " * 20)
    _, top, _, bottom = box(both, RED)
    array = np.asarray(both)
    assert both.height > bare.height
    assert (array[:top] < 100).any() and (array[bottom:] < 150).any()


def test_the_colour_bar_has_the_colours_of_the_map():
    result = sheet([plain((1, 2, 3))], width=600, scale=0.025, cmap="RdBu_r")
    below = np.asarray(result)[box(result, (1, 2, 3))[3] :]
    ends = (colors_of("RdBu_r")(np.array([-0.98, 0.98])) * 255).round().astype(int)
    for color in ends:
        assert (np.abs(below.astype(int) - color).max(-1) <= 3).any()
    rows, columns = np.nonzero(np.abs(below.astype(int) - ends[0]).max(-1) <= 3)
    numbers = below[rows.max() + 3 :, columns.min() - 5 : columns.min() + 60].sum(-1) < 600
    assert numbers.any(0).sum() > 15  # "-0.025" is wider than "0"
    magnitudes = sheet([plain((1, 2, 3))], width=600, scale=0.025, cmap="Reds")
    assert magnitudes.size == result.size and not np.array_equal(np.asarray(magnitudes), np.asarray(result))
    for scale in (-1, float("nan"), "a"):
        with pytest.raises(InputError, match="scale is a positive number"):
            sheet([plain(RED)], scale=scale)


def test_a_legend_says_what_the_ends_of_the_colour_bar_mean():
    bare, both = (sheet([plain((1, 2, 3))], width=600, legend=legend) for legend in (None, ("against cat", "for cat")))
    assert both.height > bare.height
    below = np.asarray(both).astype(int)[box(both, (1, 2, 3))[3] :]
    ends = (colors_of("vivid")(np.array([-0.95, 0.95])) * 255).round().astype(int)
    (_, left), (_, right) = (np.nonzero(np.abs(below - color).max(-1) <= 6) for color in ends)
    dark = np.nonzero(below.sum(-1) < 450)[1]
    assert dark.min() < left.min() - 60 and dark.max() > right.max() + 40, "words on both sides of the bar"
    numbers = sheet([plain((1, 2, 3))], width=600, legend=("against cat", "for cat"), scale=0.25)
    assert not np.array_equal(np.asarray(numbers), np.asarray(both)), "numbers in place of a note about scales"
    long = sheet([plain((1, 2, 3))], width=600, legend=("against a class with a rather long name " * 3, "for it"))
    assert long.height > both.height, "words that are too long are broken into lines"
    magnitudes = sheet([plain((1, 2, 3))], width=600, legend=("against cat", "for cat"), cmap="hot")
    assert not np.array_equal(np.asarray(magnitudes), np.asarray(both))


def test_small_pictures_are_enlarged_pixel_by_pixel():
    board = Image.fromarray(np.kron([[255, 0], [0, 255]], np.ones((2, 2))).astype(np.uint8))
    assert set(np.unique(np.asarray(sheet([board], width=300)))) == {0, 255}


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "1", "CMYK"])
def test_pictures_of_other_modes(mode):
    assert sheet([plain(RED).convert(mode)], width=200).mode == "RGB"


def test_what_is_transparent_is_white():
    assert (np.asarray(sheet([Image.new("RGBA", (50, 50), (255, 0, 0, 0))], width=200)) == 255).all()


@pytest.mark.parametrize("pictures", [None, 3, "photo.png", [3], [[3]], [("a", 3)], [plain(RED), 3], {"a": np.zeros((3, 3))}])
def test_what_is_no_picture_is_an_error(pictures):
    with pytest.raises(InputTypeError, match=r"a sheet is made of|a row of a sheet has"):
        sheet(pictures)


def test_narrow_pictures_are_not_too_high():
    assert sheet([plain(RED, (10, 1000))], width=200).height < 500


def test_other_errors():
    for nothing in ([], {}, [[]]):
        with pytest.raises(InputError, match="at least one picture"):
            sheet(nothing)
    for width in (99, 300.0, "300", True):
        with pytest.raises(InputError, match="width is a number of pixels, 100 or more"):
            sheet([plain(RED)], width=width)


def test_names_are_not_changed_and_pictures_neither():
    picture = plain(RED)
    before = picture.tobytes()
    row = {"a": picture}
    sheet(row)
    assert picture.tobytes() == before and row == {"a": picture}


# --- strips ------------------------------------------------------------------------------------------------------------------


def layers():
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(16 * 64, 4))
    explain_model = lrpfx.transform(model.eval(), EpsilonPlusFlat())
    return lrpfx.attribute(explain_model, torch.rand(1, 3, 32, 32), 0, record=["0", "2"]).layers


def test_recorded_layers_are_drawn_pixel_by_pixel():
    found = layers()
    result = np.asarray(strip(found, width=700)).astype(int)
    assert result.shape[1] == 700
    first = found["0"][0].sum(0).double().numpy()
    first = first / np.percentile(np.abs(first), 99.5)
    expected = (colors_of("vivid")(first) * 255).round()
    picture = Image.fromarray(expected.astype(np.uint8))
    # A square of one colour for each pixel: look for the colours of the first row, in order.
    rows = [row for row in result if all((np.abs(row - color).max(-1) <= 1).any() for color in expected[0])]
    assert rows and picture.size == (16, 16)


def test_layers_have_their_own_scales_or_a_common_one():
    maps = {"a": np.array([[1.0, 0.0], [0.0, -1.0]]), "b": np.array([[10.0, 0.0], [0.0, -10.0]])}
    own, common = (np.asarray(strip(maps, **of)) for of in ({"percentile": 100}, {"scale": 10.0}))
    dark = [(picture == (0xA0, 0x00, 0x10)).all(-1) for picture in (own, common)]
    assert dark[0][:, :600].sum() == dark[0][:, 600:].sum() > 10_000  # the largest of each
    assert not dark[1][:, :600].any() and dark[1][:, 600:].sum() > 10_000


def test_a_strip_has_a_legend_unless_it_is_declined():
    maps = {"a": np.ones((4, 4))}
    assert strip(maps).height == strip(maps, legend=("against cat", "for cat")).height > strip(maps, legend=None).height


def test_rows_of_a_strip():
    maps = {str(place): np.ones((4, 4)) for place in range(7)}
    one, three = strip(maps, columns=7), strip(maps, columns=3)
    assert one.width == three.width == 1200 and three.height > 3 * one.height
    with pytest.raises(InputError, match="columns is a number, 1 or more"):
        strip(maps, columns=0)


def test_tokens_are_not_images():
    for relevance in (torch.rand(1, 197, 768), torch.rand(5), torch.rand(2, 1, 3, 4, 5)):
        with pytest.raises(InputTypeError, match=r"relevance of blocks\.3 has the shape .* reshaped to their grid"):
            strip({"blocks.3": relevance})
    for wrong in ([torch.rand(4, 4)], {}, None):
        with pytest.raises(InputTypeError, match="layers are a mapping"):
            strip(wrong)
