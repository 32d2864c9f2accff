"""How relevance is drawn: one frozen style, which is checked where it is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np

from lrpfx.errors import nearest
from lrpfx.pictures.colors import DEFAULT, Colors, colors_of
from lrpfx.pictures.maps import checked_number, checked_percentile, checked_sigma, invalid, wrong_type
from lrpfx.support.numbers import whole_number

ENCLOSED = (0.5, 0.8)
"""The shares of relevance that `contours=True` encloses."""


class StyleSettings(TypedDict, total=False):
    """The fields of `Style` as keyword arguments."""

    cmap: Any
    percentile: float
    scale: float | None
    sigma: float | None
    opacity: float
    grey: bool
    contours: bool | Sequence[float]
    width: int
    font: str | None


@dataclass(frozen=True)
class Style:
    """How relevance is drawn. What a picture does not have, such as the photograph of a heatmap, does not matter for it.

    Attributes
    ----------
    cmap
        As for `colors_of`.
    percentile
        That of |relevance| that the default `scale` is.
    scale
        The magnitude in full colour, by default that of the map itself (see `scale_of`).
    sigma
        As for `smoothed`; 0 draws the pixels as they are.
    opacity
        That of `scale` over a photograph, from 0 to 1.
    grey
        Whether a photograph is drawn without its colours.
    contours
        Whether lines enclose 50 % and 80 % of the positive relevance (solid) and of the negative (dashed); or the shares to
        enclose. Less than a hundredth of the relevance gets no lines. Needs contourpy.
    width
        Of a sheet in pixels; pictures are no higher than twice that.
    font
        The file of a sheet's font; the default font has Latin letters only, without accents.
    colors
        Those of `cmap`.

    Raises
    ------
    InputError
        A number is out of range.
    InputTypeError
        A setting has the wrong type.
    """

    cmap: Any = DEFAULT
    percentile: float = 99.5
    scale: float | None = None
    sigma: float | None = None
    opacity: float = 0.9
    grey: bool = True
    contours: Any = ()
    width: int = 1200
    font: str | None = None
    colors: Colors = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        meaning = "scale is a positive number, or None for a percentile of the map"
        checked = {
            "percentile": checked_percentile(self.percentile),
            "scale": None if self.scale is None else checked_number(self.scale, meaning, lambda value: 0 <= value < np.inf),
            "sigma": None if self.sigma is None else checked_sigma(self.sigma),
            "opacity": checked_number(self.opacity, "opacity is a number from 0 to 1", lambda value: 0 <= value <= 1),
            "contours": _enclosed(self.contours),
            "width": whole_number(self.width, "width is a number of pixels", 100, "heatmaps"),
            "colors": colors_of(self.cmap),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def styled(style: Style | None, settings: Mapping[str, Any]) -> Style:
    """A style, by default the plain one, with other settings. `InputTypeError` for a setting that it does not have."""
    unknown = next((name for name in settings if name not in StyleSettings.__annotations__), None)
    if unknown is not None:
        known = ", ".join(StyleSettings.__annotations__)
        raise wrong_type(f"a style has no {unknown!r}, but {known}.{nearest(unknown, StyleSettings.__annotations__)}")
    if style is not None and not isinstance(style, Style):
        raise wrong_type(f"style is a lrpfx.pictures.Style, not {type(style).__name__}")
    return replace(style or Style(), **settings)


def _enclosed(contours: Any) -> tuple[float, ...]:
    if isinstance(contours, bool):
        return ENCLOSED if contours else ()
    if isinstance(contours, np.ndarray) and contours.ndim == 1:
        contours = contours.tolist()
    if not isinstance(contours, Sequence) or isinstance(contours, str):
        raise wrong_type(f"contours is True, False, or a list of shares such as [0.5, 0.8], not {contours!r}")
    if not all(isinstance(share, (float, np.floating)) and 0 < share < 1 for share in contours):
        raise invalid(f"contours enclose shares between 0 and 1, not {contours!r}")
    return tuple(float(share) for share in contours)
