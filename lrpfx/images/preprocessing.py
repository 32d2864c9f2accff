"""Preprocessing as it is: a function from an image to a model's input, whose geometry and range of values are measured."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image

from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.images.agreement import shows
from lrpfx.images.geometry import Axis, Geometry
from lrpfx.images.stored_preprocessing import applied
from lrpfx.pictures.maps import COLORS

#: The share of each axis, in the middle, that its positions are fitted to: filters see less of an image at its edges.
_MIDDLE = 0.8
#: Ends that are nearer to those of the image than this share of its length are the same: a ramp has 256 levels.
_PRECISION = 400
#: Ramps for each axis: each is as long as what was seen of the one before, for one has 256 levels.
_RAMPS = 4
#: Images whose geometry is remembered.
_REMEMBERED = 64
#: Calls with the same small picture, which show whether a preprocessing is random.
_CALLS = 24
#: By which values may leave the range of black and white, as a share of it: interpolation does.
_SLACK = 0.1

Range = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Measured:
    """What is known of a preprocessing for images of one size.

    `low` and `high`: the lower and the higher of the values that a black and a white pixel get, by channel. `geometry`: None if
    the preprocessing does more than to crop, scale and mirror each axis, or does something else each time.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    geometry: Geometry | None


class Preprocessing:
    """A function from an image to the input of a model: torchvision's, timm's or Hugging Face's transforms, or your own.

    It is called as it is. Its geometry and the range of its values are not read from its settings but measured, with
    images of the same size that are black, white, or brighter from left to right or from top to bottom. What was measured
    is compared with the input for each image, since a preprocessing may depend on what it shows.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise InputTypeError(
                f"preprocess is a function from a photograph to a tensor, such as weights.transforms(), not "
                f"{type(function).__name__}",
                topic="preprocessing",
            )
        made = function.func if isinstance(function, partial) else function  # weights.transforms is a class with arguments
        if isinstance(made, type):
            raise InputTypeError(
                f"preprocess is a function, not the class {made.__name__}; did you mean to call it, weights.transforms()?",
                topic="preprocessing",
            )
        self.function = function
        self._measured: dict[tuple[int, int], Measured] = {}
        #: The values between those of a black and a white pixel, by channel. None before the first image, and if there is
        #: no such range: both get the same values, as where each image is standardized by itself, or none that are finite,
        #: or an image got values outside.
        self.range: Range | None = None
        self._is_random: bool | None = None

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """The model's input for an image, (channels, height, width). The image stays as it is."""
        result = self._applied(image)
        if not torch.isfinite(result).all():
            raise InputError(
                f"preprocess returned values that are not finite (NaN or infinite) for a photograph of {image.width}×"
                f"{image.height} pixels; does it divide by a deviation or a range that is 0?",
                topic="values-not-finite",
            )
        return result

    def prepared(self, image: Image.Image) -> tuple[torch.Tensor, Geometry | None]:
        """The model's input for an image, and where its pixels lie in it: None if that is not known."""
        measured = self.measured(image.size)
        input = self(image)
        values = input.double().cpu().numpy()
        if self.range is not None and not _within(values, *self.range):
            self.range = None
        geometry = measured.geometry
        known = geometry is not None and not self._random() and shows(image, values, geometry)
        return input, geometry if known else None

    def measured(self, size: tuple[int, int]) -> Measured:
        """What the preprocessing does to images of a size (width, height)."""
        if size not in self._measured:
            while len(self._measured) >= _REMEMBERED:
                del self._measured[next(iter(self._measured))]
            is_first = not self._measured
            found = self._measured[size] = self._measure(*size)
            low, high = np.array(found.low), np.array(found.high)
            fits = low.size and np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()
            if is_first and fits:
                self.range = (found.low, found.high)
        return self._measured[size]

    @property
    def is_measured(self) -> bool:
        """Whether the preprocessing was measured for images of any size."""
        return bool(self._measured)

    def _applied(self, image: Image.Image) -> torch.Tensor:
        """What the function returns for a copy of an image, in the form of a model's input."""
        try:
            result = applied(self.function, image.copy())
        except LrpfxError:
            raise
        except Exception as error:
            raise InputError(
                f"preprocess failed on a photograph of {image.width}×{image.height} pixels "
                f"({first_lines(error)}); it gets a PIL image in RGB",
                topic="preprocessing",
            ) from error
        if isinstance(result, Mapping) and "pixel_values" in result:  # of an image processor of transformers
            result = result["pixel_values"]
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if isinstance(result, np.ndarray):
            result = torch.from_numpy(np.ascontiguousarray(result))
        if not isinstance(result, torch.Tensor):
            raise InputTypeError(
                f"preprocess returned {type(result).__name__}, not a tensor; does it end in ToTensor and Normalize?",
                topic="preprocessing",
            )
        if result.ndim == 4 and len(result) == 1:
            result = result[0]
        if result.ndim != 3:
            raise InputError(
                f"preprocess returned a tensor of shape {tuple(result.shape)}, not (channels, height, width)",
                topic="preprocessing",
            )
        if result.shape[2] in COLORS and result.shape[0] not in COLORS:
            raise InputError(
                f"preprocess returned a tensor of shape {tuple(result.shape)}, with its channels last: models take (channels, "
                "height, width), so let it end in .permute(2, 0, 1), or .transpose(2, 0, 1) for an array",
                topic="preprocessing",
            )
        if not result.is_floating_point():
            raise InputTypeError(
                f"preprocess returned a tensor of {result.dtype}, not of floating-point numbers", topic="preprocessing"
            )
        return result.detach()

    def _measure(self, width: int, height: int) -> Measured:
        flat = np.zeros((height, width), dtype=np.uint8)
        black, white = self._seen(flat), self._seen(flat + 255)
        if black.shape != white.shape:
            return Measured((), (), None)
        low, high = np.minimum(black, white).min((1, 2)), np.maximum(black, white).max((1, 2))
        bounds = tuple(low.tolist()), tuple(high.tolist())
        with np.errstate(invalid="ignore"):  # not all values need be finite
            span = (white - black)[0]
        strong = _strong(np.abs(span))
        if not strong.any():  # each image is standardized by itself
            return Measured(*bounds, None)

        def brightness(pixels: Any) -> Any:
            """How bright an image is seen, from 0 to 1, (height, width); NaN is padding. None for another shape."""
            found = self._seen(pixels)
            if found.shape != black.shape:
                return None
            return np.where(strong, (found - black)[0] / np.where(strong, span, 1.0), np.nan)

        columns = _axis(lambda ramp: brightness(np.broadcast_to(ramp, (height, width))), width)

        def turned(ramp: Any) -> Any:
            found = brightness(np.broadcast_to(ramp[:, None], (height, width)))
            return None if found is None else found.T

        down = _axis(turned, height)
        return Measured(*bounds, None if columns is None or down is None else Geometry(down, columns))

    def _seen(self, pixels: Any) -> Any:
        """The input for an image in grey, as an array."""
        return self._applied(Image.fromarray(pixels).convert("RGB")).double().cpu().numpy()

    def _random(self) -> bool:
        """Whether the function returns different inputs for the same picture."""
        if self._is_random is None:
            noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            picture = Image.fromarray(noise).resize((96, 72), Image.Resampling.BICUBIC)
            try:
                first = self._applied(picture)
                others = (self._applied(picture) for _ in range(_CALLS - 1))
                self._is_random = not all(torch.equal(first.nan_to_num(), other.nan_to_num()) for other in others)
            except InputError:  # it may need larger images
                self._is_random = False
        return self._is_random


def _strong(span: Any) -> Any:
    """Which pixels show the image, by what lies between black and white there: not padding, nor lines that are mostly."""
    largest = span.max()
    rows, columns = span.max(1) > 0.5 * largest, span.max(0) > 0.5 * largest
    return rows[:, None] & columns & (span > 0.2 * largest)


def _within(values: Any, low: tuple[float, ...], high: tuple[float, ...]) -> bool:
    """Whether values (channels, height, width) lie in a range, but for what interpolation adds."""
    if len(values) != len(low):
        return False
    bottom, top = np.reshape(low, (-1, 1, 1)), np.reshape(high, (-1, 1, 1))
    slack = _SLACK * (top - bottom)
    return bool((values >= bottom - slack).all() and (values <= top + slack).all())


def _axis(seen: Callable[[Any], Any], length: int) -> Axis | None:
    """The axis along which a ramp, (length,) of bytes, is seen with some brightness, (across, along). None if it is no ramp."""
    if length < 4:
        return None
    first, last = 0, length - 1
    for turn in range(_RAMPS):
        ramp = (np.arange(length) - first) / (last - first)
        brightness = seen((255 * ramp.clip(0, 1)).round().astype(np.uint8))
        if brightness is None or not (turn or np.array_equal(brightness, seen((255 * ramp).round().astype(np.uint8)), True)):
            return None
        positions = first + brightness * (last - first)
        level = (last - first) / 255
        if np.isnan(positions).all():
            return None
        low, high = math.floor(np.nanmin(positions) - level - 1), math.ceil(np.nanmax(positions) + level + 1)
        low, high = max(low, 0), min(high, length - 1)
        if turn == _RAMPS - 1 or high - low > (last - first) / 2 or high - low < 4:
            return _fitted(positions, last - first + 1, length)
        first, last = low, high
    return None


def _fitted(positions: Any, extent: int, length: int) -> Axis | None:
    """The axis on which pixels, (across, along), have these positions, measured by a ramp of an extent."""
    seen = ~np.isnan(positions)
    lines, pixels = seen.any(1), np.flatnonzero(seen.any(0))
    if not seen[np.ix_(lines, pixels)].all() or len(pixels) < 4:
        return None
    positions = positions[lines]
    margin = int(len(pixels) * (1 - _MIDDLE) / 2)
    middle = pixels[margin : len(pixels) - margin]
    step, first = np.polyfit(middle, positions[:, middle].mean(0), 1)
    if step == 0:
        return None
    off = np.abs(positions[:, middle] - (first + step * middle)).max()
    allowed = extent / 255 + abs(step)  # the ramp has 256 levels; a pixel of the input has the size of a step
    if off > allowed or abs(step) * len(pixels) > length + 2 * allowed:
        return None
    count = positions.shape[1]
    axis = Axis(first + 0.5 - step / 2, step, count, length)
    ends = np.sort(axis.edges[[0, -1]])
    exact = max(length / _PRECISION, extent / 255)  # as exact as the ramp is
    if np.abs(ends - (0, length)).max() < exact:
        return Axis(0.0, length / count, count, length) if step > 0 else Axis(length, -length / count, count, length)
    return axis


def preprocessing_of(model: Any) -> Preprocessing | None:
    """The preprocessing that a model of timm states; None if there is none."""
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        return None
    try:
        data: Any = import_module("timm.data")
    except ImportError:
        return None
    first = dict(model.named_modules()).get(str(model.pretrained_cfg.get("first_conv")))
    if getattr(first, "in_channels", 3) not in (None, 3):  # timm states a preprocessing for colours only
        return None
    return Preprocessing(data.create_transform(**data.resolve_data_config(model=model), is_training=False))
