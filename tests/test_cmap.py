"""Colour maps against colours worked out by hand."""

import numpy as np
import pytest

import lrpfx
from lrpfx.cmap import ColorMap, LazyColorMapCache


def test_linear_interpolation():
    cmap = ColorMap("000,fff")
    assert cmap([0.0, 0.25, 1.0]).tolist() == [[0.0] * 3, [0.25] * 3, [1.0] * 3]
    assert cmap(np.zeros((2, 3))).shape == (2, 3, 3)
    assert cmap([-1.0, 2.0]).tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    "source", ["f00,80:fff,00f", "ff0000,80:ffffff,0000ff", " f00 , 80 : fff,\n00f ", "0:F00,80:FFF,f:00F"]
)
def test_spellings(source):
    x = np.linspace(0, 1, 256)
    index = np.arange(256)
    falling = np.where(index < 128, 1.0, 1 - (index - 128) / 127)
    rising = np.where(index < 128, index / 128, 1.0)
    green = np.where(index < 128, index / 128, 1 - (index - 128) / 127)
    np.testing.assert_allclose(ColorMap(source)(x), np.stack([falling, green, rising], 1), atol=1e-12)


def test_unplaced_nodes_are_spread_evenly():
    cmap = ColorMap("000,f00,0f0,00f")
    for place, color in ((0, [0, 0, 0]), (85, [1, 0, 0]), (170, [0, 1, 0]), (255, [0, 0, 1])):
        np.testing.assert_allclose(cmap(place / 255), color, atol=1e-12)


def test_two_nodes_at_one_place_make_an_edge():
    cmap = ColorMap("000,80:f00,80:00f,fff")
    np.testing.assert_allclose(cmap(127.999 / 255), [0.99999, 0, 0], atol=1e-4)
    np.testing.assert_allclose(cmap(128 / 255), [0, 0, 1], atol=1e-12)


def test_the_ends_are_filled():
    cmap = ColorMap("40:f00,c0:00f")
    assert cmap([0.0, 0x40 / 255]).tolist() == [[1, 0, 0], [1, 0, 0]] and cmap(1.0).tolist() == [0, 0, 1]


def test_palette_and_level():
    cmap = ColorMap("000,fff")
    assert cmap.palette().dtype == np.uint8
    assert (cmap.palette() == np.arange(256)[:, None]).all()
    steep = cmap.palette(2.0)[:, 0]
    assert (steep[:64] == 0).all() and (steep[192:] == 255).all() and (np.diff(steep[64:192].astype(int)) > 0).all()


@pytest.mark.parametrize(
    "source, message",
    [
        ("", "is not a colour"),
        ("fff", "fewer than two colours"),
        ("fff,", "is not a colour"),
        ("fff;000", "unexpected ';' at position 3"),
        ("xyz,000", "unexpected 'x' at position 0"),
        ("ffff,000", "is not a colour"),
        ("80:,000", "is not a colour"),
        (":fff,000", "is not a colour"),
        ("80,000", "is not a colour"),
        ("fff,80:000,40:fff,000", "goes back from position 80 to 40"),
        (None, "is text, not NoneType"),
    ],
)
def test_errors(source, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        ColorMap(source)
    assert isinstance(caught.value, lrpfx.LrpfxError)


def test_a_wrong_source_leaves_the_map_as_it_was():
    cmap = ColorMap("000,fff")
    with pytest.raises(RuntimeError):
        cmap.source = "000"
    assert cmap.source == "000,fff" and cmap(1.0).tolist() == [1, 1, 1]
    cmap.source = "fff,000"
    assert cmap(1.0).tolist() == [0, 0, 0]


def test_cache():
    cache = LazyColorMapCache({"a": "000,fff", "wrong": "000"})
    assert list(cache) == ["a", "wrong"] and len(cache) == 2 and "b" not in cache
    compiled = cache["a"]
    assert cache["a"] is compiled
    cache["a"] = "fff,000"
    assert cache["a"] is compiled and compiled.source == "fff,000"
    cache["b"] = "f00,00f"
    del cache["a"]
    assert list(cache) == ["wrong", "b"]
    for name in ("a", "c"):
        with pytest.raises(KeyError):
            cache[name]
    with pytest.raises(RuntimeError):
        cache["wrong"]
