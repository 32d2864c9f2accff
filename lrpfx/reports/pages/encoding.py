"""Numbers and arrays as plain data for a page: few bytes, and nothing that JSON cannot hold."""

import base64
import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lrpfx.pictures.maps import resized

Array = NDArray[Any]
Figure = float | str
Packed = dict[str, Any]

_DIGITS = 7  # of figures: as many as float32 has
_LONGER_SIDE = 900  # pixels of the longer side of an image on the page


def figure(value: float) -> Figure:
    """A number with seven digits; a text such as "NaN" for one that JSON does not have, which JavaScript reads as that."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{_DIGITS}g}")


def packed(values: Array, scale: float | None = None, bits: int = 16) -> Packed:
    """An array as integers of `bits` bits in base64: value = integer * scale / largest integer.

    `scale`: the magnitude of the largest integer; beyond it, values are clipped. By default it is that of the largest value.
    The smallest integer stands for values that are not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    held = np.where(finite, values, 0.0)
    largest = float(np.abs(held).max(initial=0.0)) if scale is None else float(scale)
    top = 2 ** (bits - 1) - 1
    parts = np.divide(held, largest, out=np.zeros_like(held), where=largest > 0).clip(-1.0, 1.0)
    integers = np.where(finite, np.rint(parts * top), -top - 1).astype(f"<i{bits // 8}")
    return {
        "shape": list(values.shape),
        "scale": figure(largest),
        "bits": bits,
        "data": base64.b64encode(integers.tobytes()).decode("ascii"),
    }


def reduced(values: Array, most: int) -> Array:
    """A map (height, width) with at most `most` pixels along each side, which are means over areas of equal size.

    The values are finite.
    """
    height, width = (min(length, most) for length in values.shape)
    return resized(np.asarray(values, dtype=np.float64), (width, height))


def image_address(image: Image.Image) -> str:
    """An image as a data address, small enough for a page."""
    shown = image.convert("RGB")
    shown.thumbnail((_LONGER_SIDE, _LONGER_SIDE), Image.Resampling.LANCZOS, reducing_gap=3.0)
    content = io.BytesIO()
    shown.save(content, format="jpeg", quality=86, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"
