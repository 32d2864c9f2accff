"""Inputs are pictures of the part of a photograph that a geometry says, or not."""

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps
from skimage import data
from torchvision.transforms import functional

from lrpfx.images.agreement import shows
from lrpfx.images.geometry import Axis, Geometry

PHOTOGRAPHS = {
    "chelsea": Image.fromarray(data.chelsea()),
    "coffee": Image.fromarray(data.coffee()),
    "noise": Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)),
}
BOX = (20, 30, 180, 150)


def geometry(photograph, box, columns, rows):
    left, top, right, bottom = box
    return Geometry(
        Axis(top, (bottom - top) / rows, rows, photograph.height),
        Axis(left, (right - left) / columns, columns, photograph.width),
    )


def input_of(picture):
    return functional.to_tensor(picture).double().numpy()


@pytest.mark.parametrize("resampling", list(Image.Resampling))
@pytest.mark.parametrize("name", sorted(PHOTOGRAPHS))
@pytest.mark.parametrize("size", [(64, 48), (300, 200), (9, 7)])
def test_any_interpolation_agrees(name, size, resampling):
    photograph = PHOTOGRAPHS[name]
    input = input_of(photograph.crop(BOX).resize(size, resampling))
    if (name, size) != ("noise", (9, 7)):  # nothing is left of noise
        assert shows(photograph, input, geometry(photograph, BOX, *size))
    assert not shows(photograph, input[:, :, ::-1], geometry(photograph, BOX, *size))
    assert not shows(photograph, input[:, ::-1], geometry(photograph, BOX, *size))


@pytest.mark.parametrize(
    "change",
    [
        ImageOps.invert,
        ImageOps.grayscale,
        ImageOps.autocontrast,
        lambda one: one.convert("YCbCr"),
        lambda one: Image.merge("RGB", one.split()[::-1]),
        lambda one: one.filter(ImageFilter.GaussianBlur(4)),
        lambda one: one.filter(ImageFilter.GaussianBlur(9)),
        lambda one: functional.adjust_brightness(functional.adjust_contrast(one, 1.3), 1.1),
    ],
)
@pytest.mark.parametrize("name", ["chelsea", "coffee"])
def test_colours_and_blur_agree(name, change):
    photograph = PHOTOGRAPHS[name]
    input = input_of(change(photograph).crop(BOX).resize((64, 48)))
    for values in (input, -3 * input + 2, 1e-8 * input):
        assert shows(photograph, values, geometry(photograph, BOX, 64, 48))
        assert not shows(photograph, values[:, :, ::-1], geometry(photograph, BOX, 64, 48))


@pytest.mark.parametrize("box", [(0, 0, 300, 200), (40, 30, 200, 150), (20, 60, 180, 180), (40, 45, 160, 135)])
@pytest.mark.parametrize("name", sorted(PHOTOGRAPHS))
def test_other_parts_do_not(name, box):
    photograph = PHOTOGRAPHS[name]
    input = input_of(photograph.crop(BOX).resize((64, 48)))
    assert not shows(photograph, input, geometry(photograph, box, 64, 48))


def test_mirrored_geometries():
    photograph = PHOTOGRAPHS["coffee"]
    input = input_of(ImageOps.mirror(photograph).resize((60, 40)))
    rows, columns = Axis(0.0, photograph.height / 40, 40, photograph.height), photograph.width
    assert shows(photograph, input, Geometry(rows, Axis(columns, -columns / 60, 60, columns)))
    assert not shows(photograph, input, Geometry(rows, Axis(0.0, columns / 60, 60, columns)))


def test_padding_is_left_out():
    photograph = PHOTOGRAPHS["chelsea"]
    whole = geometry(photograph, (0, 0, *photograph.size), 60, 40)
    padded = np.pad(input_of(photograph.resize((60, 40))), ((0, 0), (10, 10), (0, 0)), constant_values=-5)
    rows = Axis(-10 * whole.rows.step, whole.rows.step, 60, photograph.height)
    assert shows(photograph, padded, Geometry(rows, whole.columns))


def test_pictures_of_one_colour():
    grey, photograph = Image.new("RGB", (50, 40), (9, 99, 200)), PHOTOGRAPHS["chelsea"]
    constant, noise = np.full((3, 20, 25), 0.3), np.random.default_rng(0).normal(size=(3, 20, 25))
    assert shows(grey, constant, geometry(grey, (0, 0, 50, 40), 25, 20))
    assert shows(grey, 0 * constant, geometry(grey, (0, 0, 50, 40), 25, 20))
    assert not shows(grey, noise, geometry(grey, (0, 0, 50, 40), 25, 20))
    assert not shows(photograph, constant, geometry(photograph, (0, 0, *photograph.size), 25, 20))
    assert not shows(photograph, constant * np.nan, geometry(photograph, (0, 0, *photograph.size), 25, 20))
    halves = np.full((40, 50, 3), (9, 99, 200), np.uint8)
    halves[:, 25:, 2] = 240  # one colour varies
    halves = Image.fromarray(halves)
    assert not shows(halves, constant, geometry(halves, (0, 0, 50, 40), 25, 20))
