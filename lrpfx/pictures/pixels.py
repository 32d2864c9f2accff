"""The pixels of images in any of their forms."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lrpfx.pictures.maps import COLORS, Channels, Floats, array_of, channel_axis, floats_of, invalid, wrong_type

_LUMINANCE = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as Pillow's mode L
_TWELVE_BITS = 4095
_SLACK = 1e-3  # by which interpolation may leave [0, 1]


def photograph_of(photograph: Any, channels: Channels = None) -> Floats:
    """Red, green and blue in [0, 1], shape (height, width, 3).

    What is transparent is white. The orientation that a camera noted is not applied, since models do not read it either.

    Parameters
    ----------
    photograph
        A Pillow image of any mode; or an array or tensor of shape (height, width), (channels, height, width) or (height, width,
        channels) with 1, 3 or 4 channels, or a batch of one: uint8, uint16, floating point in [0, 1], or other integers up to
        255.
    channels
        As for `relevance_map`.

    Raises
    ------
    InputTypeError
        It has another form.
    InputError
        A floating-point number is outside [0, 1], or of 16 bits 12 at most are used, which would be nearly black.
    """
    if isinstance(photograph, Image.Image):
        return _of_image(photograph)
    if isinstance(photograph, (str, bytes)) or hasattr(photograph, "__fspath__"):
        raise wrong_type(f"an image is a Pillow image or an array: open the file, PIL.Image.open({str(photograph)!r})")
    array = array_of(photograph, "an image")
    if array.dtype == np.uint8:
        return _of_array(array / 255.0, channels)
    if array.dtype == np.uint16:
        return _of_array(of_16_bits(array), channels)
    if np.issubdtype(array.dtype, np.integer) and array.size and array.min() >= 0 and 1 < array.max() <= 255:
        return _of_array(array / 255.0, channels)  # arithmetic on bytes made wider integers of them
    if not np.issubdtype(array.dtype, np.floating):
        raise wrong_type(
            "an image is a Pillow image, or an array of uint8, uint16 or floating point, or of other integers up to 255, not "
            f"of {array.dtype}"
        )
    return _of_array(floats_of(array, "the image"), channels)


def as_image(values: Any, limits: tuple[float, float] | None = None) -> Image.Image:
    """An array or tensor (channels, height, width) as an image, scaled from `limits`, or from its lowest and highest value."""
    array = np.asarray(values, dtype=np.float64)
    low, high = limits or (float(array.min()), float(array.max()))
    scaled = ((array - low) / (high - low) if high > low else np.full_like(array, 0.5)).clip(0, 1)
    channels = scaled if len(scaled) in (1, 3) else scaled.mean(0, keepdims=True)
    pixels = np.moveaxis(np.broadcast_to(channels, (3, *channels.shape[1:])), 0, -1)
    return Image.fromarray((pixels * 255).round().astype(np.uint8))


def pixels_of(image: Any) -> NDArray[Any]:
    """As `photograph_of`, but bytes stay bytes in [0, 255]: large images take an eighth of the memory."""
    if isinstance(image, Image.Image) and not _is_deep(image):
        return np.asarray(on_white(image))
    return photograph_of(image)


def grey_of(image: NDArray[Any]) -> NDArray[Any]:
    """The image without colours, with three equal channels."""
    return np.repeat(np.einsum("yxc,c->yx", image, _LUMINANCE.astype(image.dtype))[..., None], 3, axis=-1)


def _is_deep(image: Image.Image) -> bool:
    """Whether an image has more than 8 bits for each value."""
    return image.mode.startswith("I") or image.mode == "F"


def _of_image(image: Image.Image) -> Floats:
    if _is_deep(image):
        values = np.asarray(image).astype(np.float64)
        if image.mode != "F":
            values = of_16_bits(values)  # Pillow opens files of 16 bits as I;16, or as I
        return _of_array(values, None)
    return np.asarray(on_white(image)) / 255.0


def of_16_bits(values: NDArray[Any]) -> Floats:
    """Numbers of 16 bits as shares of the largest. `InputError` if they seem to have fewer bits."""
    largest = int(values.max(initial=0))
    if 0 < largest <= _TWELVE_BITS:
        raise invalid(
            f"the image has 16 bits for each value, but none above {largest}, so it would be nearly black: scale it to "
            f"[0, 1] in floating point by the range that is meant, such as array / {255.0 if largest <= 255 else 4095.0}"
        )
    result: Floats = values / 65535.0
    return result


def on_white(image: Image.Image) -> Image.Image:
    """An image of any mode in red, green and blue, white where it is transparent."""
    try:
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except ValueError as error:  # Pillow lacks some conversions
        raise wrong_type(f"a picture of mode {image.mode} cannot be converted to RGB: {error}") from error


def _of_array(values: Floats, channels: Channels) -> Floats:
    shape = values.shape
    if values.ndim == 4 and shape[0] == 1:
        values = values[0]
    if values.ndim == 3 and channel_axis(values.shape, channels, "an image", shape) == 0:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[-1] not in COLORS or values.size == 0:
        raise wrong_type(f"an image has 1, 3 or 4 channels of (height, width) pixels; the shape is {shape}")
    low, high = float(values.min()), float(values.max())
    if low < -_SLACK or high > 1 + _SLACK:
        raise invalid(
            f"the image's values are between {low:.3g} and {high:.3g}, not between 0 and 1: undo the normalization that "
            "the model's input has, divide by 255, or convert to uint8"
        )
    values = values.clip(0, 1)
    if values.shape[-1] == 4:
        return values[..., :3] * values[..., 3:] + (1 - values[..., 3:])
    return np.repeat(values, 3, axis=-1) if values.shape[-1] == 1 else values
