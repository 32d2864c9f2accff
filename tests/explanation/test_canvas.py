"""Pictures in the size that is shown, of the part of a photograph that the model saw."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from lrpfx import pictures
from lrpfx.explanation.canvas import Canvas
from lrpfx.images.geometry import Axis, Geometry
from lrpfx.pictures import Style

RANDOM = np.random.default_rng(0)


def photograph(width, height):
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


def cropped(width, height, left, top, pixels, step=1.0):
    return Geometry(Axis(top, step, pixels, height), Axis(left, step, pixels, width))


def pixels_of(picture):
    return np.asarray(picture).astype(int)


def test_small_photographs_are_drawn_as_by_lrpfx_pictures():
    image, relevance = photograph(60, 40), RANDOM.normal(size=(20, 30))
    geometry = Geometry(Axis(0.0, 2.0, 20, 40), Axis(0.0, 2.0, 30, 60))
    canvas, whole = Canvas.of(image, geometry), geometry.undo(relevance)
    np.testing.assert_allclose(canvas.map(relevance), whole, atol=1e-12)
    assert np.array_equal(pixels_of(canvas.heatmap(canvas.map(relevance), Style())), pixels_of(pictures.heatmap(whole)))
    for settings in ({}, {"sigma": 3.0}, {"cmap": "RdBu_r", "grey": False}, {"contours": True}):
        expected = pictures.overlay(image, whole, **settings)
        assert np.array_equal(pixels_of(canvas.overlay(canvas.map(relevance), Style(**settings))), pixels_of(expected))


@pytest.mark.parametrize("size", [None, (400, 300), (200, 150), (80, 60)])
def test_totals_and_scales_do_not_depend_on_the_size(size):
    image, relevance = Image.new("RGB", (1600, 1200)), np.abs(RANDOM.normal(size=(24, 32)))
    geometry = Geometry(Axis(0.0, 50.0, 24, 1200), Axis(0.0, 50.0, 32, 1600))
    canvas = Canvas.of(image, geometry, size)
    found = canvas.map(relevance)
    assert found.sum() * 1600 * 1200 / found.size == pytest.approx(relevance.sum(), rel=1e-9)
    whole = geometry.undo(relevance)
    assert canvas.scale_of([found], Style(sigma=0)) == pytest.approx(pictures.scale_of(whole, sigma=0), rel=0.05)
    assert canvas.scale_of([found], Style(sigma=40.0)) == pytest.approx(pictures.scale_of(whole, sigma=40.0), rel=0.05)


def test_a_crop_has_its_own_scale_and_smoothing():
    image, relevance = photograph(2000, 1500), RANDOM.normal(size=(150, 150))
    canvas = Canvas.of(image, cropped(2000, 1500, 925, 675, 150))
    found = canvas.map(relevance)
    np.testing.assert_allclose(found, relevance, atol=1e-9)
    part = pixels_of(canvas.heatmap(found, Style()))[675:825, 925:1075]
    assert np.array_equal(part, pixels_of(pictures.heatmap(relevance)))
    full = pixels_of(pictures.heatmap(np.array([[1.0, -1.0]]), scale=1.0, sigma=0))
    assert 0.001 < (part[..., None, :] == full).all(-1).any(-1).mean() < 0.02


def test_the_rest_of_the_photograph_is_as_it_is():
    image, relevance = photograph(200, 150), np.ones((10, 10))
    canvas = Canvas.of(image, cropped(200, 150, 30, 40, 10, 5.0))
    overlay, heatmap = (
        pixels_of(canvas.overlay(canvas.map(relevance), Style(grey=False))),
        pixels_of(canvas.heatmap(canvas.map(relevance), Style())),
    )
    outside, seen = np.ones((150, 200), dtype=bool), np.zeros((150, 200), dtype=bool)
    outside[38:92, 28:82] = False  # around a frame of two lines
    seen[40:90, 30:80] = True
    assert np.array_equal(overlay[outside], pixels_of(image)[outside]) and len(np.unique(heatmap[outside])) == 1
    assert (heatmap[outside] < 250).all(), "what was not seen has another colour than what is not relevant"
    assert (overlay[seen] != pixels_of(image)[seen]).any(-1).mean() > 0.9 and (heatmap[seen] != 255).any(-1).all()
    for drawn in (overlay, heatmap):
        for margin, color in ((1, 255), (2, 90)):
            line = drawn[40 - margin, 30 - margin : 80 + margin], drawn[40 - margin : 90 + margin, 79 + margin]
            assert all((one == color).all() for one in line)
    grey = pixels_of(canvas.overlay(canvas.map(relevance), Style()))[outside]
    assert np.array_equal(grey, pixels_of(image.convert("L").convert("RGB"))[outside])


def test_a_photograph_that_was_seen_as_a_whole_has_no_frame():
    image = photograph(60, 40)
    canvas = Canvas.of(image, cropped(60, 40, 0, 0, 20, 2.0))
    assert not canvas.is_whole
    whole = Canvas.of(image, Geometry(Axis(0.0, 2.0, 20, 40), Axis(0.0, 2.0, 30, 60)))
    nothing = np.zeros((20, 30))
    assert whole.is_whole and (pixels_of(whole.heatmap(whole.map(nothing), Style())) == 255).all()


def test_a_spot_is_drawn_in_its_place():
    image, relevance = Image.new("RGB", (4000, 3000)), np.zeros((224, 224))
    relevance[50, 150] = 1.0
    geometry = Geometry(Axis(60.0, 12.9, 224, 3000), Axis(550.0, 12.9, 224, 4000))
    expected = 550 + 12.9 * 150.5, 60 + 12.9 * 50.5
    for size in (None, (400, 300), (1234, 926)):
        canvas = Canvas.of(image, geometry, size)
        drawn, empty = (pixels_of(canvas.overlay(canvas.map(one), Style())) for one in (relevance, 0 * relevance))
        picture = (drawn - empty)[..., 0].astype(float)
        rows, columns = np.indices(picture.shape)
        centre = np.array([(picture * columns).sum(), (picture * rows).sum()]) / picture.sum() + 0.5
        np.testing.assert_allclose(centre * 4000 / picture.shape[1], expected, atol=4)


def test_large_photographs_take_little_memory():
    image, relevance = Image.new("RGB", (4000, 3000), "grey"), RANDOM.normal(size=(224, 224))
    geometry = Geometry(Axis(0.0, 3000 / 224, 224, 3000), Axis(0.0, 4000 / 224, 224, 4000))
    tracemalloc.start()
    for size, most in (((400, 300), 40e6), (None, 200e6)):
        canvas = Canvas.of(image, geometry, size)
        tracemalloc.reset_peak()
        assert canvas.overlay(canvas.map(relevance), Style()).size == (size or (4000, 3000))
        assert tracemalloc.get_traced_memory()[1] < most
    tracemalloc.stop()
