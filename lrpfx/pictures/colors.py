"""Colours of relevance: maps from shares of the scale to colours, by the names of lrpfx, ColorBrewer and matplotlib.

The tables below include color specifications and designs developed by Cynthia Brewer (http://colorbrewer.org/).
"""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrpfx.errors import InputError, InputTypeError, nearest
from lrpfx.pictures.color_maps import ColorMap
from lrpfx.pictures.images_of_arrays import CMAPS
from lrpfx.pictures.maps import Floats

DEFAULT = "vivid"

#: Evenly spaced colours, from minus to plus the scale, or from zero to it.
_SOURCES = {
    # White to two equally dark colours, full of colour from a quarter of the scale on.
    "vivid": "0030a0 0f48cc 2160f2 4a84fb 8db5ff ffffff ff9d86 fb5a41 ee2418 cf0f16 a00010",
    "BrBG": "543005 8c510a bf812d dfc27d f6e8c3 f5f5f5 c7eae5 80cdc1 35978f 01665e 003c30",
    "PiYG": "8e0152 c51b7d de77ae f1b6da fde0ef f7f7f7 e6f5d0 b8e186 7fbc41 4d9221 276419",
    "PRGn": "40004b 762a83 9970ab c2a5cf e7d4e8 f7f7f7 d9f0d3 a6dba0 5aae61 1b7837 00441b",
    "PuOr": "7f3b08 b35806 e08214 fdb863 fee0b6 f7f7f7 d8daeb b2abd2 8073ac 542788 2d004b",
    "RdBu": "67001f b2182b d6604d f4a582 fddbc7 f7f7f7 d1e5f0 92c5de 4393c3 2166ac 053061",
    "RdGy": "67001f b2182b d6604d f4a582 fddbc7 ffffff e0e0e0 bababa 878787 4d4d4d 1a1a1a",
    "RdYlBu": "a50026 d73027 f46d43 fdae61 fee090 ffffbf e0f3f8 abd9e9 74add1 4575b4 313695",
    "RdYlGn": "a50026 d73027 f46d43 fdae61 fee08b ffffbf d9ef8b a6d96a 66bd63 1a9850 006837",
    "Spectral": "9e0142 d53e4f f46d43 fdae61 fee08b ffffbf e6f598 abdda4 66c2a5 3288bd 5e4fa2",
    # K. Moreland, Diverging Color Maps for Scientific Visualization, 2009
    "coolwarm": "3b4cc0 445acc 4d68d7 5775e1 6282ea 6c8ef1 779af7 82a5fb 8db0fe 98b9ff a3c2fe "
    "aec9fc b8d0f9 c2d5f4 ccd9ee d5dbe6 dddddd e5d8d1 ecd3c5 f1ccb9 f4c4ad f7bba0 "
    "f7b194 f7a687 f49a7b f18d6f ec7f63 e57058 de604d d55042 cb3e38 c0282f b40426",
    "Blues": "f7fbff deebf7 c6dbef 9ecae1 6baed6 4292c6 2171b5 08519c 08306b",
    "BuGn": "f7fcfd e5f5f9 ccece6 99d8c9 66c2a4 41ae76 238b45 006d2c 00441b",
    "BuPu": "f7fcfd e0ecf4 bfd3e6 9ebcda 8c96c6 8c6bb1 88419d 810f7c 4d004b",
    "GnBu": "f7fcf0 e0f3db ccebc5 a8ddb5 7bccc4 4eb3d3 2b8cbe 0868ac 084081",
    "Greens": "f7fcf5 e5f5e0 c7e9c0 a1d99b 74c476 41ab5d 238b45 006d2c 00441b",
    "Greys": "ffffff f0f0f0 d9d9d9 bdbdbd 969696 737373 525252 252525 000000",
    "OrRd": "fff7ec fee8c8 fdd49e fdbb84 fc8d59 ef6548 d7301f b30000 7f0000",
    "Oranges": "fff5eb fee6ce fdd0a2 fdae6b fd8d3c f16913 d94801 a63603 7f2704",
    "PuBu": "fff7fb ece7f2 d0d1e6 a6bddb 74a9cf 3690c0 0570b0 045a8d 023858",
    "PuBuGn": "fff7fb ece2f0 d0d1e6 a6bddb 67a9cf 3690c0 02818a 016c59 014636",
    "PuRd": "f7f4f9 e7e1ef d4b9da c994c7 df65b0 e7298a ce1256 980043 67001f",
    "Purples": "fcfbfd efedf5 dadaeb bcbddc 9e9ac8 807dba 6a51a3 54278f 3f007d",
    "RdPu": "fff7f3 fde0dd fcc5c0 fa9fb5 f768a1 dd3497 ae017e 7a0177 49006a",
    "Reds": "fff5f0 fee0d2 fcbba1 fc9272 fb6a4a ef3b2c cb181d a50f15 67000d",
    "YlGn": "ffffe5 f7fcb9 d9f0a3 addd8e 78c679 41ab5d 238443 006837 004529",
    "YlGnBu": "ffffd9 edf8b1 c7e9b4 7fcdbb 41b6c4 1d91c0 225ea8 253494 081d58",
    "YlOrBr": "ffffe5 fff7bc fee391 fec44f fe9929 ec7014 cc4c02 993404 662506",
    "YlOrRd": "ffffcc ffeda0 fed976 feb24c fd8d3c fc4e2a e31a1c bd0026 800026",
}

_STEPS = 4096  # of a table: an even number, for its middle is zero, and so many that none is seen
_LIGHTNESS = 5.0  # by which the middle of a signed map differs from both ends
_CHROMA = 45.0  # that the middle of a signed map does not exceed: there is no green or red in its place


@dataclass(frozen=True, eq=False)
class Colors:
    """The colours of shares of the scale.

    `table`: red, green and blue in [0, 1], shape (4097, 3). With `signed`, it reaches from -1 to 1, with zero in its middle;
    otherwise from 0 to 1, and the colour of a share is that of its magnitude.
    """

    table: Floats
    signed: bool

    def __call__(self, shares: Floats) -> Floats:
        """Colours of shares in [-1, 1], which are clipped: an axis of red, green, blue is appended."""
        result: Floats = self.table[self.places(shares)]
        return result

    @property
    def of_zero(self) -> Floats:
        """The colour of no relevance."""
        color: Floats = self.table[_STEPS // 2 if self.signed else 0]
        return color

    def pigments(self) -> tuple[Floats, Floats]:
        """Colours and opacities, in the order of `table`, that over the colour of zero give the colours of the map.

        Opacities are as small as they can be, so pigments are as full of colour as the map allows; no relevance is transparent.
        """
        zero = self.of_zero
        room = np.where(self.table > zero, 1 - zero, zero)  # how far a channel can go in its direction
        opacities = (np.abs(self.table - zero) / np.where(room > 0, room, 1.0)).max(axis=-1)
        pigments = zero + (self.table - zero) / np.where(opacities > 0, opacities, 1.0)[..., None]
        return pigments.clip(0, 1), opacities

    def places(self, shares: NDArray[np.floating[Any]]) -> NDArray[np.intp]:
        """The rows of `table` for shares in [-1, 1], which are clipped."""
        parts = (shares.clip(-1, 1) + 1) / 2 if self.signed else np.abs(shares).clip(0, 1)
        return np.rint(parts * _STEPS).astype(np.intp)


def colors_of(cmap: Any) -> Colors:
    """The colours of a map.

    lrpfx's names come first. A map is signed if its source names the colour in the middle, at position 80, or if its middle is
    lighter, or darker, than both ends and has little colour; all others, such as "hot" and "viridis", are for magnitudes.

    `cmap`: a name of lrpfx ("vivid", `lrpfx.image.CMAPS`), ColorBrewer or matplotlib, also reversed by "_r"; a source in the
    language of `lrpfx.cmap`; a `ColorMap`; or matplotlib's Colormap. Raises `InputTypeError`: it is anything else. An unknown
    name is an `InputError`.
    """
    if isinstance(cmap, str):
        return _named(cmap)
    if isinstance(cmap, ColorMap):
        return _of_color_map(cmap)
    if callable(cmap) and isinstance(getattr(cmap, "N", None), int):
        return _of_matplotlib(cmap)
    kind = type(cmap).__name__
    raise InputTypeError(
        f"a colour map is a name, a source, a ColorMap or matplotlib's Colormap, not {kind}", topic="colour-maps"
    )


def _named(name: str) -> Colors:
    if "," in name:  # a source has at least two colours
        return _of_color_map(ColorMap(name))
    for known in (name, name.removesuffix("_r")):
        if known in CMAPS:
            colors = _of_color_map(CMAPS[known])
        elif known in _SOURCES:
            colors = _spread(np.array([list(bytes.fromhex(color)) for color in _SOURCES[known].split()]) / 255)
        else:
            continue
        return colors if known == name else Colors(colors.table[::-1], colors.signed)
    try:
        maps: Any = importlib.import_module("matplotlib").colormaps
    except ImportError:
        raise InputError(
            _unknown(name, [*CMAPS, *_SOURCES], "; matplotlib's maps need matplotlib: install it, or"), topic="colour-maps"
        ) from None
    if name not in maps:
        raise InputError(_unknown(name, [*CMAPS, *_SOURCES, *maps], ":"), topic="colour-maps")
    return _of_matplotlib(maps[name])


def _unknown(name: str, known: list[str], remedy: str) -> str:
    return f"there is no colour map {name!r}{remedy} give its colours, such as '00f,80:fff,f00'.{nearest(name, known)}"


def _spread(colors: Floats) -> Colors:
    """Evenly spaced colours, with others between them."""
    places = np.linspace(0, len(colors) - 1, _STEPS + 1)
    table = np.stack([np.interp(places, np.arange(len(colors)), channel) for channel in colors.T], axis=1)
    return Colors(table, _is_signed(table))


def _of_color_map(cmap: ColorMap) -> Colors:
    """The middle of lrpfx's maps is their position 80, which is a little more than a half of ff."""
    table = np.asarray(cmap(np.linspace(0, 256 / 255, _STEPS + 1)), dtype=np.float64)
    return Colors(table, "80:" in "".join(cmap.source.split()) or _is_signed(table))


def _of_matplotlib(cmap: Any) -> Colors:
    return _spread(np.asarray(cmap(np.arange(cmap.N)), dtype=np.float64)[:, :3])


def _is_signed(table: Floats) -> bool:
    """Whether a map has two arms of which the eye sees that they start in the middle."""
    (low, *_), (middle, a, b), (high, *_) = _lab(table[[0, _STEPS // 2, _STEPS]])
    arms = (low - middle, high - middle)
    apart = min(arms) >= _LIGHTNESS or max(arms) <= -_LIGHTNESS
    return bool(apart and np.hypot(a, b) <= _CHROMA)


def _lab(colors: Floats) -> Floats:
    """CIE L*a*b* of sRGB colours, white being that of the standard illuminant D65."""
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    shares = linear @ (to_xyz / to_xyz.sum(axis=1, keepdims=True)).T
    roots = np.where(shares > (6 / 29) ** 3, np.cbrt(shares), shares * (29 / 6) ** 2 / 3 + 4 / 29)
    x, y, z = roots[..., 0], roots[..., 1], roots[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)
