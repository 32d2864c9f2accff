"""Colours by name, source and object, and which maps are signed."""

import sys

import numpy as np
import pytest

from lrpfx.cmap import ColorMap
from lrpfx.errors import InputError, InputTypeError
from lrpfx.image import CMAPS
from lrpfx.pictures import colors_of
from lrpfx.pictures.colors import _SOURCES, _lab

ENDS_AND_MIDDLE = np.array([-1.0, 0.0, 1.0])
BREWER = [name for name in _SOURCES if name != "vivid"]
MAGNITUDES_OF_LRPFX = ["gray", "wred", "wblue", "hot", "cold"]


def hexadecimal(colors):
    return [bytes(color).hex() for color in (colors * 255).round().astype(np.uint8)]


def test_no_relevance_has_the_colour_in_the_middle():
    assert hexadecimal(colors_of("vivid")(ENDS_AND_MIDDLE)) == ["0030a0", "ffffff", "a00010"]
    assert hexadecimal(colors_of("bwr")(ENDS_AND_MIDDLE)) == ["0000ff", "ffffff", "ff0000"]
    assert hexadecimal(colors_of("coldnhot")(ENDS_AND_MIDDLE)) == ["00ffff", "000000", "ffffff"]
    assert hexadecimal(colors_of("00f,80:0f0,f00")(np.zeros(1))) == ["00ff00"]
    assert hexadecimal(colors_of(ColorMap("00f,80:fff,f00"))(ENDS_AND_MIDDLE)) == ["0000ff", "ffffff", "ff0000"]


def test_shares_beyond_the_scale_have_the_colours_of_the_ends():
    colors = colors_of("vivid")
    assert np.array_equal(colors(np.array([-np.inf, -7.0, 7.0, np.inf])), colors(np.array([-1.0, -1.0, 1.0, 1.0])))


@pytest.mark.parametrize("name", CMAPS)
def test_maps_of_lrpfx_have_their_meaning(name):
    colors = colors_of(name)
    assert colors.signed == (name not in MAGNITUDES_OF_LRPFX)
    expected = CMAPS[name](np.arange(256) / 255)
    shares = (np.arange(256) - 128) / 128 if colors.signed else np.arange(256) / 256
    np.testing.assert_allclose(colors(shares), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["hot", "Reds", "gray"])
def test_maps_that_are_not_signed_show_magnitudes(name):
    colors, shares = colors_of(name), np.linspace(-1, 1, 21)
    assert not colors.signed and not colors_of("888,888").signed
    np.testing.assert_array_equal(colors(shares), colors(-shares))
    assert np.array_equal(colors.of_zero, colors(np.zeros(1))[0])


@pytest.mark.parametrize("name", ["vivid", "RdBu", "coolwarm", "hot"])
def test_reversed_maps(name):
    plain, other = colors_of(name), colors_of(f"{name}_r")
    assert np.array_equal(other.table, plain.table[::-1]) and plain.signed == other.signed


def test_the_default_map_has_arms_of_equal_lightness_and_much_colour():
    shares = np.linspace(0, 1, 101)
    plus, minus = _lab(colors_of("vivid")(shares)), _lab(colors_of("vivid")(-shares))
    assert np.abs(plus[:, 0] - minus[:, 0]).max() < 10
    assert (np.diff(plus[:, 0]) < 0).all() and (np.diff(minus[:, 0]) < 0).all()
    for arm in (plus, minus):
        assert np.hypot(arm[:, 1], arm[:, 2])[30:].min() > 50


#: What eyes without one kind of cones see, for linear colours: Machado, Oliveira and Fernandes, 2009.
COLOUR_BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("kind", COLOUR_BLIND)
def test_signs_of_the_default_map_differ_for_all_eyes(kind):
    def seen(colors):
        linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
        linear = (linear @ np.array(COLOUR_BLIND[kind]).T).clip(0, 1)
        return _lab(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))

    colors, shares = colors_of("vivid"), np.linspace(0.3, 1, 50)
    assert np.linalg.norm(seen(colors(shares)) - seen(colors(-shares)), axis=-1).min() > 40


@pytest.mark.parametrize("name", ["vivid", "bwr", "coldnhot", "RdBu_r", "coolwarm", "Spectral", "hot", "Reds", "wred"])
def test_pigments_over_the_colour_of_zero_give_the_map(name):
    colors, shares = colors_of(name), np.linspace(-1, 1, 201)
    pigments, opacities = (table[colors.places(shares)] for table in colors.pigments())
    over = colors.of_zero * (1 - opacities[:, None]) + pigments * opacities[:, None]
    np.testing.assert_allclose(over, colors(shares), atol=1e-12)
    assert opacities[100] == 0 and opacities.min() >= 0 and opacities.max() <= 1
    assert pigments.min() >= 0 and pigments.max() <= 1


def test_opacity_grows_with_relevance():
    colors = colors_of("vivid")
    opacities = colors.pigments()[1][colors.places(np.linspace(0, 1, 101))]
    assert (np.diff(opacities) >= 0).all() and opacities[20] > 0.4 and opacities[1] < 0.05


# --- matplotlib --------------------------------------------------------------------------------------------------------------

SIGNED = [
    *("PiYG", "PRGn", "BrBG", "PuOr", "RdGy", "RdBu", "RdYlBu", "RdYlGn", "Spectral", "coolwarm", "bwr", "seismic"),
    *("PiYG_r", "RdBu_r", "Spectral_r", "berlin", "managua", "vanimo"),
]
UNSIGNED = [
    *(
        "viridis",
        "plasma",
        "inferno",
        "magma",
        "cividis",
        "Greys",
        "Purples",
        "Blues",
        "YlOrRd",
        "YlGn",
        "binary",
        "gray",
        "bone",
    ),
    *("pink", "spring", "summer", "autumn", "winter", "cool", "hot", "afmhot", "copper", "hsv", "jet", "turbo", "rainbow"),
    *("cubehelix", "gnuplot", "viridis_r"),
]


@pytest.mark.parametrize("name", BREWER)
def test_maps_that_need_no_matplotlib_equal_its_maps(name):
    matplotlib = pytest.importorskip("matplotlib")
    shares = np.linspace(0, 1, 4097)
    cmap = matplotlib.colormaps[name]
    expected = cmap(np.arange(cmap.N))[:, :3]
    expected = np.stack([np.interp(shares, np.linspace(0, 1, cmap.N), channel) for channel in expected.T], 1)
    assert np.abs(colors_of(name).table - expected).max() <= 1.1 / 255


@pytest.mark.parametrize("name", SIGNED + UNSIGNED)
def test_which_maps_of_matplotlib_are_signed(name):
    matplotlib = pytest.importorskip("matplotlib")
    if name not in matplotlib.colormaps:
        pytest.skip("of a newer matplotlib")
    colors = colors_of(matplotlib.colormaps[name])
    assert colors.signed == (name in SIGNED)
    ends = [colors(np.full(1, share))[0] for share in ((-1.0, 1.0) if colors.signed else (0.0, 1.0))]
    np.testing.assert_allclose(ends, matplotlib.colormaps[name]([0.0, 1.0])[:, :3], atol=1e-12)


def test_names_of_matplotlib():
    matplotlib = pytest.importorskip("matplotlib")
    for name in ("viridis", "inferno_r", "cividis"):
        assert np.array_equal(colors_of(name).table, colors_of(matplotlib.colormaps[name]).table)


def test_the_names_of_lrpfx_come_first():
    assert hexadecimal(colors_of("seismic")(ENDS_AND_MIDDLE)) == ["0000d0", "d0d0d0", "d00000"]
    assert hexadecimal(colors_of("seismic_r")(ENDS_AND_MIDDLE)) == ["d00000", "d0d0d0", "0000d0"]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("RdBu_r", "coolwarm", "Spectral", "Blues_r"):
        colors_of(name)
    with pytest.raises(InputError, match=r"no colour map 'viridis'; .*matplotlib: install it, or give its colours"):
        colors_of("viridis")


def test_unknown_names():
    with pytest.raises(InputError, match=r"no colour map 'RdBlu': give its colours.*Did you mean 'RdBu'"):
        colors_of("RdBlu")
    with pytest.raises(RuntimeError, match="unexpected 'r'"):
        colors_of("red,blue,0")
    for wrong in (None, 3, ["fff", "000"], lambda share: share):
        with pytest.raises(InputTypeError, match="a colour map is a name, a source"):
            colors_of(wrong)
