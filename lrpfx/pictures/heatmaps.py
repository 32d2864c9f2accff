"""Heatmaps, and relevance over images."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from typing_extensions import Unpack

from lrpfx.pictures.contours import draw_contours
from lrpfx.pictures.maps import Channels, Floats, invalid, relevance_map, resized, scale_of_smoothed, smoothed
from lrpfx.pictures.pixels import grey_of, pixels_of
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.support.numbers import whole_number

_AT_ONCE = 1 << 19  # pixels that are drawn together
_FAR = 1e6  # shares that are larger than the scale by so much are as large
_FINEST = 1000  # pixels of the longer side of a map in which lines are found


def heatmap(
    relevance: Any,
    *,
    size: tuple[int, int] | None = None,
    channels: Channels = None,
    style: Style | None = None,
    **settings: Unpack[StyleSettings],
) -> Image.Image:
    """Relevance in colours, with zero in the middle of a signed map; a map that is not signed shows magnitudes.

    `size`: (width, height) of the picture, by default a pixel for each of the map. `style`: how it is drawn; `settings` are
    fields of `Style` that replace those of `style`. Other arguments: as for `relevance_map`, which says what errors it raises.

    Examples
    --------
    >>> picture = lrpfx.pictures.heatmap(attribution.relevance[0], sigma=1.0)
    """
    style = styled(style, settings)
    values, scale = _map_and_scale(relevance, style, channels)
    width, height = values.shape[::-1] if size is None else _size(size)
    table = (style.colors.table * 255).round().astype(np.uint8)
    picture = np.empty((height, width, 3), dtype=np.uint8)
    for lines, shares in _lines_of(_shares(values, scale), width, height):
        picture[lines] = table[style.colors.places(shares)]
    return Image.fromarray(picture)


def overlay(
    photograph: Any,
    relevance: Any,
    *,
    stretch: bool = False,
    channels: Channels = None,
    style: Style | None = None,
    **settings: Unpack[StyleSettings],
) -> Image.Image:
    """Relevance over a photograph, which shows where there is little.

    The colour of zero is transparent, that of the scale nearly not. The picture has the size of the photograph.

    Parameters
    ----------
    photograph
        As for `photograph_of`.
    relevance
        As for `relevance_map`. A map of another shape than the photograph's belongs to a part of it, which must be cut out
        first, unless `stretch` is true.
    stretch
        Whether the whole photograph was squeezed to the shape of the map, which this undoes.
    channels
        As for `relevance_map`.
    style, **settings
        As for `heatmap`.

    Raises
    ------
    InputError
        The shapes do not fit, or a number is out of range.
    """
    style = styled(style, settings)
    behind = pixels_of(photograph)
    values, scale = _map_and_scale(relevance, style, channels)
    height, width = behind.shape[:2]
    if not stretch and not _same_form(values.shape, (height, width)):
        raise invalid(
            f"the image has {width}×{height} pixels, the relevance {values.shape[1]}×{values.shape[0]}: pass the part of "
            "the image that the model was given, or stretch=True if all of it was squeezed to that shape"
        )
    pigments, opacities = style.colors.pigments()
    opacities = style.opacity * opacities[:, None]
    ink, rest = (255 * pigments * opacities).astype(np.float32), (1 - opacities).astype(np.float32)
    full = 1.0 if behind.dtype == np.uint8 else 255.0
    drawn = np.empty((height, width, 3), dtype=np.uint8)
    for lines, shares in _lines_of(_shares(values, scale), width, height):
        light = behind[lines].astype(np.float32) * np.float32(full)
        places = style.colors.places(shares)
        drawn[lines] = ((grey_of(light) if style.grey else light) * rest[places] + ink[places]).round()
    picture = Image.fromarray(drawn)
    if not style.contours:
        return picture
    share = min(1.0, _FINEST / max(width, height))  # on larger pictures, lines are as smooth and take long
    coarse = max(1, round(width * share)), max(1, round(height * share))
    return draw_contours(picture, resized(values, coarse), style.contours, *style.colors(np.array([1.0, -1.0])))


def _map_and_scale(relevance: Any, style: Style, channels: Channels) -> tuple[Floats, float]:
    """The smoothed map, and the magnitude that is drawn in full colour."""
    before = relevance_map(relevance, channels)
    values = smoothed(before, style.sigma)
    if style.scale is None:
        return values, scale_of_smoothed([before], [values], style.percentile)
    if style.scale == 0 and values.any():
        raise invalid("scale is 0, but the map has relevance")
    return values, style.scale


def _lines_of(shares: Floats, width: int, height: int) -> Iterator[tuple[slice, NDArray[Any]]]:
    """A map in another size, some lines at a time: all would take much memory for large photographs."""
    if height < shares.shape[0] or width < shares.shape[1]:
        enlarged: NDArray[Any] = resized(shares, (width, height))
    elif (height, width) == shares.shape:
        enlarged = shares
    else:  # as `resized`, and many times as fast
        picture = Image.fromarray(shares.clip(-_FAR, _FAR).astype(np.float32))
        enlarged = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    count = max(1, _AT_ONCE // width)
    for first in range(0, height, count):
        lines = slice(first, first + count)
        yield lines, enlarged[lines]


def _shares(values: Floats, scale: float) -> Floats:
    """A map as shares of its scale, which is 0 only if the map is."""
    with np.errstate(over="ignore"):
        shares: Floats = values / (scale or 1.0)
    return shares


def _same_form(map_shape: tuple[int, ...], photograph_shape: tuple[int, int]) -> bool:
    """Whether one of two shapes (height, width) is the other enlarged, to a pixel of the smaller and a hundredth."""
    small, large = sorted((map_shape, photograph_shape))
    height, width = large[0] / small[0], large[1] / small[1]
    return abs(height - width) * min(small) <= max(height, width) * max(1.0, 0.01 * min(small))


def _size(size: Any) -> tuple[int, int]:
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise invalid(f"size is (width, height) in pixels, not {size!r}")
    width, height = (whole_number(side, "size is (width, height) in pixels", 1, "heatmaps") for side in size)
    return width, height
