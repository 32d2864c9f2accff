"""Photographs of all modes, types and forms."""

import io
import pathlib

import numpy as np
import pytest
import torch
from PIL import Image

from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures import photograph_of
from lrpfx.pictures.pixels import grey_of

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (6, 9, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "RGBX", "YCbCr", "HSV", "CMYK", "P", "LA", "L", "1", "I"])
def test_modes(mode):
    image = Image.fromarray(PIXELS[..., 0].astype(np.int32) * 257) if mode == "I" else IMAGE.convert(mode)
    result = photograph_of(image)
    assert result.shape == (6, 9, 3) and result.dtype == np.float64
    if mode == "I":
        np.testing.assert_allclose(result[..., 0], np.asarray(image) / 65535)
    else:
        np.testing.assert_allclose(result, np.asarray(image.convert("RGB")) / 255)


def test_integers_that_came_from_bytes():
    for dtype in (np.int16, np.int32, np.int64, np.uint32):
        np.testing.assert_array_equal(photograph_of(PIXELS.astype(dtype)), PIXELS / 255)
    assert not photograph_of(np.zeros((4, 5), dtype=np.uint16)).any()


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (4, 3), (200, 10, 10, 0))
    np.testing.assert_array_equal(photograph_of(clear), np.ones((3, 4, 3)))
    half = photograph_of(Image.new("LA", (4, 3), (0, 128)))
    np.testing.assert_allclose(half, 127 / 255, atol=1 / 255)
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.info["transparency"] = 1
    np.testing.assert_array_equal(photograph_of(palette), np.ones((3, 4, 3)))
    array = np.zeros((3, 4, 4))
    np.testing.assert_array_equal(photograph_of(array, "last"), np.ones((3, 4, 3)))


def test_files_of_sixteen_bits():
    values = RANDOM.integers(0, 65536, (6, 9), dtype=np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "png")
    np.testing.assert_allclose(photograph_of(Image.open(file))[..., 1], values / 65535)
    np.testing.assert_allclose(photograph_of(values)[..., 2], values / 65535)
    other = Image.new("I;16B", (9, 6), 0x1234)
    np.testing.assert_allclose(photograph_of(other), 0x1234 / 65535)


@pytest.mark.parametrize(
    "array",
    [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        PIXELS[None],
        torch.tensor(PIXELS),
        PIXELS / 255,
        (PIXELS / 255).astype(np.float32),
        torch.tensor(PIXELS.transpose(2, 0, 1) / 255)[None],
        torch.tensor(PIXELS / 255, dtype=torch.float64, requires_grad=True),
    ],
)
def test_arrays(array):
    np.testing.assert_allclose(photograph_of(array), PIXELS / 255, atol=1e-7)


def test_arrays_of_one_channel():
    for array in (PIXELS[..., 0], PIXELS[..., :1], PIXELS[None, ..., 0]):
        np.testing.assert_array_equal(photograph_of(array), np.repeat(PIXELS[..., :1], 3, -1) / 255)


WRONG = [
    (PIXELS.astype(float), InputError, r"between 0 and \d+, not between 0 and 1: undo the normalization"),
    (PIXELS / 127.5 - 1, InputError, r"between -1 and \S+, not between 0 and 1"),
    (PIXELS.astype(int) - 128, InputTypeError, "not of int64"),
    (PIXELS.astype(int) * 2, InputTypeError, "not of int64"),
    ((PIXELS > 3).astype(int), InputTypeError, "not of int64"),
    (PIXELS.astype(np.uint16), InputError, r"16 bits .* none above \d+, so it would be nearly black.* array / 255.0"),
    (PIXELS.astype(np.uint16) * 16, InputError, "nearly black.* array / 4095.0"),
    (Image.fromarray(PIXELS[..., 0].astype(np.int32)), InputError, "nearly black"),
    (PIXELS > 3, InputTypeError, "not of bool"),
    (np.zeros((3, 8, 3)), InputTypeError, "pass channels='first' or channels='last'"),
    (np.zeros((8, 9, 5)), InputTypeError, "1, 3 or 4 channels"),
    (np.zeros((2, 3, 8, 9)), InputTypeError, r"the shape is \(2, 3, 8, 9\)"),
    (np.full((8, 9), np.nan), InputError, "not finite"),
    ("cat.jpg", InputTypeError, r"open the file, PIL.Image.open\('cat.jpg'\)"),
    (pathlib.Path("cat.jpg"), InputTypeError, "open the file"),
    (IMAGE.convert("F"), InputError, "not between 0 and 1"),
    (IMAGE.convert("LA").convert("La"), InputTypeError, "mode La cannot be converted to RGB"),
    (None, InputTypeError, "not of object"),
]


@pytest.mark.parametrize(("photograph", "error", "message"), WRONG)
def test_what_is_no_photograph_is_an_error(photograph, error, message):
    with pytest.raises(error, match=message):
        photograph_of(photograph)


def test_interpolation_may_leave_the_range_a_little():
    assert photograph_of(np.array([[-0.0005, 1.0005]])).ravel().tolist() == [0.0] * 3 + [1.0] * 3


def test_grey_is_that_of_pillow():
    expected = np.asarray(IMAGE.convert("L"))
    np.testing.assert_allclose(grey_of(photograph_of(IMAGE)) * 255, np.repeat(expected[..., None], 3, -1), atol=1)
