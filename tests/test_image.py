"""Images of relevance: pixels and bounds computed independently."""

import io

import numpy as np
import pytest
from PIL import Image

import lrpfx
from lrpfx import image
from lrpfx.errors import InputError
from lrpfx.image import CMAPS, get_cmap, gridify, imgify, imsave, interval_norm_bounds, palette

RANDOM = np.random.default_rng(0)


def indices(picture):
    return np.frombuffer(picture.tobytes(), np.uint8).reshape(picture.height, picture.width)


def test_built_in_maps():
    assert list(CMAPS) == ["gray", "wred", "wblue", "hot", "cold", "coldnhot", "bwr", "france", "seismic", "coolio", "coleus"]
    ends = {
        "gray": ("000000", "ffffff"), "wred": ("ffffff", "ff0000"), "wblue": ("ffffff", "0000ff"), "hot": ("000000", "ffffff"),
        "cold": ("000000", "00ffff"), "coldnhot": ("00ffff", "ffffff"), "bwr": ("0000ff", "ff0000"),
        "france": ("0055a4", "ef4135"),
        "seismic": ("0000d0", "d00000"), "coolio": ("00d0d0", "d000d0"), "coleus": ("00d000", "d000d0"),
    }  # fmt: skip
    middle = {
        "coldnhot": "000000",
        "bwr": "ffffff",
        "france": "ffffff",
        "seismic": "d0d0d0",
        "coolio": "d0d0d0",
        "coleus": "d0d0d0",
    }
    for name, (first, last) in ends.items():
        colors = palette(name)
        assert bytes(colors[0]).hex() == first and bytes(colors[255]).hex() == last
        assert name not in middle or bytes(colors[128]).hex() == middle[name]


def test_maps_by_name_and_source():
    assert get_cmap("bwr") is CMAPS["bwr"]
    assert get_cmap(get_cmap("f00,00f")).source == "f00,00f"
    with pytest.raises(RuntimeError):
        get_cmap("no such map")


@pytest.mark.parametrize("dim", [None, (1, 2), 0, (0, 2)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bounds(symmetric, dim):
    array = RANDOM.normal(size=(3, 4, 5))
    axes = (1, 2) if dim is None else dim
    low, high = interval_norm_bounds(array, symmetric, dim)
    expected = np.abs(array).max(axes, keepdims=True) if symmetric else array.max(axes, keepdims=True)
    assert np.array_equal(high, expected)
    assert np.array_equal(low, -expected if symmetric else array.min(axes, keepdims=True))


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (4, 5, 1)])
def test_one_channel_is_indexed(shape):
    array = RANDOM.normal(size=shape)
    plain = array.reshape(4, 5)
    picture = imgify(array, cmap="hot", symmetric=True)
    limit = np.abs(plain).max()
    assert picture.mode == "P" and picture.size == (5, 4)
    assert np.array_equal(indices(picture), ((plain + limit) / (2 * limit) * 255).clip(0, 255).astype(np.uint8))
    assert np.array_equal(np.asarray(picture.convert("RGB")), palette("hot")[indices(picture)])


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5, 3)])
def test_three_channels_are_colours(shape):
    array = RANDOM.uniform(size=shape)
    picture = imgify(array, vmin=0.0, vmax=1.0)
    expected = (array.transpose(1, 2, 0) if shape[0] == 3 else array) * 255
    assert picture.mode == "RGB" and np.array_equal(np.asarray(picture), expected.astype(np.uint8))


def test_bounds_override_one_by_one():
    array = np.array([[-2.0, 0.0, 2.0]])
    assert indices(imgify(array, vmin=0.0)).tolist() == [[0, 0, 255]]
    assert indices(imgify(array, vmax=0.0)).tolist() == [[0, 255, 255]]
    assert indices(imgify(array, vmin=-4.0, vmax=4.0)).tolist() == [[63, 127, 191]]
    assert indices(imgify(np.array([[0, 7, 255]], np.uint8))).tolist() == [[0, 7, 255]]
    assert indices(imgify([[0, 1]])).tolist() == [[0, 255]]


@pytest.mark.parametrize("value", [0.0, -3.0, 5])
@pytest.mark.parametrize("symmetric", [True, False])
def test_constant_images(value, symmetric, recwarn):
    picture = imgify(np.full((2, 2), value), symmetric=symmetric)
    expected = {True: 0 if value < 0 else 255 if value > 0 else 127, False: 127}[symmetric]
    assert (indices(picture) == expected).all() and not recwarn.list


@pytest.mark.parametrize("grid", [False, None, 0, np.False_])
def test_no_grid(grid):
    assert imgify(np.eye(3), grid=grid).size == (3, 3)


def test_truth_values_are_zeros_and_ones():
    assert indices(imgify(np.array([[False, True]]))).tolist() == [[0, 255]]


def test_grids():
    images = np.arange(5 * 2 * 4, dtype=float).reshape(5, 2, 4)
    grid = gridify(images)
    assert grid.shape == (3 * 2, 2 * 4, 1)
    assert np.array_equal(grid[2:4, 4:, 0], images[3]) and (grid[4:, 4:] == images.min()).all()
    wide = gridify(images[..., None].repeat(3, -1), shape=(1, 6), fill_value=-1)
    assert wide.shape == (2, 24, 3) and (wide[:, 20:] == -1).all()
    assert np.array_equal(gridify(images[:, None].repeat(3, 1)), gridify(images[..., None].repeat(3, -1)))
    each = indices(imgify(images, grid=(5, 1)))
    assert [block.min() for block in np.split(each, 5)] == [0] * 5 and [block.max() for block in np.split(each, 5)] == [255] * 5
    common = indices(imgify(images, grid=[5, 1], vmin=0.0, vmax=39.0))
    assert common[0, 0] == 0 and common[-1, -1] == 255 and common[2, 0] == int(8 / 39 * 255)


@pytest.mark.parametrize(
    "call",
    [
        lambda: imgify(np.zeros(3)),
        lambda: imgify(np.zeros((2, 3, 4, 5))),
        lambda: imgify(np.zeros((2, 4, 5))),
        lambda: imgify(np.zeros((4, 5)), grid=True),
        lambda: imgify(np.zeros((2, 4, 5)), grid=(1, 2, 3)),
        lambda: imgify(np.zeros((2, 7, 4, 5)), grid=True),
        *[
            lambda grid=grid: imgify(np.zeros((2, 4, 5)), grid=grid)
            for grid in (1, 2, [1], (1,), [1, 1, 1], (), "ab", (2.0, 3.0), (0, 2), (-1, 2), np.array([1, 2]))
        ],
        lambda: gridify(np.zeros((4, 5))),
        lambda: gridify(np.zeros((2, 4, 5)), shape=3),
    ],
)
def test_shapes_that_are_no_images(call):
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, lrpfx.LrpfxError)


@pytest.mark.parametrize("format", ["png", "gif", "bmp"])
def test_saving(format, tmp_path):
    array = RANDOM.normal(size=(6, 7))
    expected = np.asarray(imgify(array, cmap="seismic", symmetric=True).convert("RGB"))
    path, memory = tmp_path / f"map.{format}", io.BytesIO()
    imsave(path, array, cmap="seismic", symmetric=True)
    imsave(memory, array, cmap="seismic", symmetric=True, format=format)
    for source in (path, memory):
        assert np.array_equal(np.asarray(Image.open(source).convert("RGB")), expected)
    imsave(tmp_path / "big.png", array, writer_params={"compress_level": 0})
    assert (tmp_path / "big.png").stat().st_size > 0
    assert image.imgify is imgify


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("settings", [{}, {"symmetric": True}, {"vmin": 0, "vmax": 1}])
def test_values_that_are_not_finite(value, settings):
    array = np.random.default_rng(0).normal(size=(6, 7))
    array[2, 3] = value
    if np.isinf(value) and "vmin" in settings:
        assert np.asarray(imgify(array, **settings))[2, 3] == 255
        return
    with pytest.raises(InputError, match="1 values that are NaN" if np.isnan(value) else "not finite"):
        imgify(array, **settings)
