"""Lines at a level: against circles, by what they enclose, and how they are drawn."""

import numpy as np
import pytest
from PIL import Image

from lrpfx.pictures.contours import _dashes, draw_contours, enclosing_level, lines_at

RANDOM = np.random.default_rng(0)
RED, BLUE = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])


def distances(height, width, x, y):
    rows, columns = np.mgrid[:height, :width] + 0.5
    return np.hypot(columns - x, rows - y)


def area(line):
    x, y = line.T
    return abs(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1])) / 2


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
def test_the_level_encloses_the_share(share):
    values = RANDOM.normal(size=(40, 50))
    level = enclosing_level(values, share)
    total = values[values > 0].sum()
    assert values[values >= level].sum() >= share * total > values[values > level].sum()


def test_a_circle_is_one_closed_line():
    (line,) = lines_at(-distances(60, 80, 42.3, 28.9), -20.0)
    assert np.array_equal(line[0], line[-1])
    np.testing.assert_allclose(np.hypot(line[:, 0] - 42.3, line[:, 1] - 28.9), 20.0, atol=0.01)
    assert abs(area(line) - np.pi * 400) < 3


def test_a_line_that_leaves_the_picture_has_two_ends():
    (line,) = lines_at(-distances(60, 80, 0.0, 30.0), -20.0)
    ends = line[[0, -1]]
    np.testing.assert_allclose(ends[:, 0], 0.5, atol=1e-9)
    np.testing.assert_allclose(np.sort(ends[:, 1]), [10.0, 50.0], atol=0.1)


def test_each_spot_has_its_line():
    spots = [(15.2, 15.1), (50.7, 20.3), (30.2, 45.2)]
    values = sum(np.exp(-(distances(60, 70, x, y) ** 2) / 30) for x, y in spots)
    lines = lines_at(values, 0.5)
    centres = sorted(tuple(line[:-1].mean(0).round()) for line in lines)
    assert centres == sorted((round(x), round(y)) for x, y in spots)


@pytest.mark.parametrize(
    ("corners", "count"), [((1.0, 0.0, 1.0, 0.0), 2), ((1.0, 0.0, 0.2, 0.0), 2), ((0.0, 1.0, 0.0, 1.0), 2)]
)
def test_saddles_are_cut_in_two(corners, count):
    a, b, c, d = corners
    values = np.array([[a, b], [d, c]])
    for level in (0.15, 0.45, 0.55, 0.85):
        lines = lines_at(values, level)
        inside = (values >= level).sum()
        assert len(lines) == (count if inside == 2 else 1)
        if inside == 2:  # the mean says which corners a line cuts off
            joined = values.mean() >= level
            for line in lines:
                corner = line.mean(0) > 1.0  # (right, below)
                cut_off = values[int(corner[1]), int(corner[0])]
                assert (cut_off < level) == joined


def test_every_crossing_is_on_one_line():
    values = RANDOM.normal(size=(25, 31))
    lines = lines_at(values, 0.1)
    inside = values >= 0.1
    crossings = (inside[:, 1:] != inside[:, :-1]).sum() + (inside[1:] != inside[:-1]).sum()
    closed = sum(np.array_equal(line[0], line[-1]) for line in lines)
    assert sum(map(len, lines)) - closed == crossings


@pytest.mark.parametrize("values", [np.zeros((5, 5)), np.ones((5, 5)), np.ones((1, 1))])
def test_even_maps_have_no_lines(values):
    assert lines_at(values, 0.5) == []


def test_dashes():
    line = np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 10.0]])
    parts = _dashes(line, 6, 3)
    lengths = [np.hypot(*np.diff(part, axis=0).T).sum() for part in parts]
    np.testing.assert_allclose(lengths, [6, 6, 2])
    np.testing.assert_allclose(parts[1], [[9, 0], [10, 0], [10, 5]])


def drawn(values, enclosed=(0.5, 0.8)):
    background = Image.new("RGB", values.shape[::-1], (128, 128, 128))
    return np.asarray(draw_contours(background, values, enclosed, RED, BLUE)).astype(int)


def test_lines_lie_on_the_level_and_nowhere_else():
    away = distances(200, 200, 100, 100)
    pixels = drawn((50 - away).clip(0), (0.6,))
    level = enclosing_level((50 - away).clip(0), 0.6)
    red = (pixels[..., 0] - pixels[..., 2]) > 100
    assert np.abs(away[red] - (50 - level)).max() < 2
    assert red.sum() > 1.5 * np.pi * (50 - level)  # all around
    assert (pixels[np.abs(away - (50 - level)) > 4] == 128).all()
    assert len(np.unique(pixels[..., 1])) > 20  # smooth edges


def test_signs_differ_in_colour_and_form():
    values = (40 - distances(200, 300, 70, 100)).clip(0) - (40 - distances(200, 300, 220, 100)).clip(0)
    pixels = drawn(values, (0.8,))
    red, blue = (pixels[..., 0] - pixels[..., 2]) > 60, (pixels[..., 2] - pixels[..., 0]) > 60
    assert red[:, :150].any() and not red[:, 150:].any() and blue[:, 150:].any() and not blue[:, :150].any()
    assert blue.sum() < 0.8 * red.sum()  # gaps


def test_a_sign_with_hardly_any_relevance_has_no_lines():
    values = (40 - distances(200, 300, 70, 100)).clip(0)
    values -= 1e-3 * (20 - distances(200, 300, 250, 100)).clip(0)
    assert (drawn(values)[:, 150:] == 128).all()
    assert (drawn(np.zeros((20, 30))) == 128).all()


def test_thick_lines_have_no_gaps():
    away = distances(900, 900, 450, 450)
    pixels = drawn((400 - away).clip(0), (0.8,))
    off = np.abs(away - (400 - enclosing_level((400 - away).clip(0), 0.8)))
    assert (pixels[off < 2] == (255, 0, 0)).all()  # 5.4 pixels wide, and 1.8 pixels of white on both sides
    assert pixels[(off > 3.4) & (off < 3.8)].min() > 200


def test_the_smallest_share_has_the_thickest_line():
    away = distances(400, 400, 200, 200)
    values = np.exp(-(away**2) / 5000)
    red = (lambda pixels: pixels[..., 0] - pixels[..., 2] > 100)(drawn(values, (0.8, 0.3)))
    radius = {share: away[values >= enclosing_level(values, share)].max() for share in (0.3, 0.8)}
    widths = [red[np.abs(away - radius[share]) < 8].sum() / radius[share] for share in (0.3, 0.8)]
    assert widths[0] > 1.3 * widths[1] > 0
