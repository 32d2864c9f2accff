"""Preprocessing as it is: a function from a photograph to a model's input, whose geometry and range of values are measured."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image

from lrpfx.deploy.preprocessing import applied, preprocessing_in
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.explanation.geometry import Axis, Geometry

#: The share of each axis, in the middle, that its positions are fitted to: filters see less of a photograph at its edges.
_MIDDLE = 0.8
#: Ends that are nearer to those of the photograph than this share of its length are the same: a ramp has 256 levels.
_PRECISION = 400
#: Photographs whose geometry is remembered.
_REMEMBERED = 64


@dataclass(frozen=True)
class Measured:
    """What is known of a preprocessing for photographs of one size.

    `low` and `high`: the values that a black and a white pixel get, by channel. `geometry`: None if the preprocessing does more
    than to crop, scale and mirror each axis, or does something else each time.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    geometry: Geometry | None


class Preprocessing:
    """A function from a photograph to the input of a model: torchvision's, timm's or Hugging Face's transforms, or your own.

    It is called as it is. Its geometry and the range of its values are not read from its settings but measured, with
    photographs of the same size that are black, white, or brighter from left to right or from top to bottom.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise InputTypeError(
                f"preprocess is a function from a photograph to a tensor, such as weights.transforms(), not "
                f"{type(function).__name__}"
            )
        if isinstance(function, type):
            raise InputTypeError(f"preprocess is a function, not the class {function.__name__}; did you mean to call it?")
        self.function = function
        self._measured: dict[tuple[int, int], Measured] = {}

    def __call__(self, photograph: Image.Image) -> torch.Tensor:
        """The model's input for a photograph, (channels, height, width)."""
        try:
            result = applied(self.function, photograph)
        except LrpfxError:
            raise
        except Exception as error:
            raise InputError(
                f"preprocess failed on a photograph of {photograph.width}×{photograph.height} pixels "
                f"({type(error).__name__}: {first_lines(error)}); it gets a PIL image in RGB"
            ) from error
        if isinstance(result, np.ndarray):
            result = torch.from_numpy(np.ascontiguousarray(result))
        if not isinstance(result, torch.Tensor):
            raise InputTypeError(
                f"preprocess returned {type(result).__name__}, not a tensor; does it end in ToTensor and Normalize?"
            )
        if result.ndim == 4 and len(result) == 1:
            result = result[0]
        if result.ndim != 3:
            raise InputError(f"preprocess returned a tensor of shape {tuple(result.shape)}, not (channels, height, width)")
        if not result.is_floating_point():
            raise InputTypeError(f"preprocess returned a tensor of {result.dtype}, not of floating-point numbers")
        return result.detach()

    def measured(self, size: tuple[int, int]) -> Measured:
        """What the preprocessing does to photographs of a size (width, height)."""
        if size not in self._measured:
            while len(self._measured) >= _REMEMBERED:
                del self._measured[next(iter(self._measured))]
            self._measured[size] = self._measure(*size)
        return self._measured[size]

    @property
    def range(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The values that a black and a white pixel get, by channel; None before the first photograph."""
        first = next(iter(self._measured.values()), None)
        return None if first is None else (first.low, first.high)

    def _measure(self, width: int, height: int) -> Measured:
        flat = np.zeros((height, width), dtype=np.uint8)
        across = np.broadcast_to(np.linspace(0, 255, width).round().astype(np.uint8), (height, width))
        down = np.broadcast_to(np.linspace(0, 255, height).round().astype(np.uint8)[:, None], (height, width))
        black, white, columns, rows = (self._seen(pixels) for pixels in (flat, flat + 255, across, down))
        low, high = black.min((1, 2)), white.max((1, 2))
        bounds = tuple(np.minimum(low, high).tolist()), tuple(np.maximum(low, high).tolist())
        shapes = {one.shape for one in (black, white, columns, rows)}
        if len(shapes) > 1 or not np.array_equal(columns, self._seen(across)):
            return Measured(*bounds, None)
        seen = (white - black)[0] != 0  # the rest is padding
        if not seen.any():
            return Measured(*bounds, None)
        span = np.where(seen, (white - black)[0], 1.0)
        axes = [
            _axis(
                ((found - black)[0] / span).T if vertical else (found - black)[0] / span, seen.T if vertical else seen, length
            )
            for found, length, vertical in ((rows, height, True), (columns, width, False))
        ]
        return Measured(*bounds, None if axes[0] is None or axes[1] is None else Geometry(axes[0], axes[1]))

    def _seen(self, pixels: Any) -> Any:
        """The input for a photograph in grey, as an array."""
        return self(Image.fromarray(pixels).convert("RGB")).double().cpu().numpy()


def _axis(brightness: Any, seen: Any, length: int) -> Axis | None:
    """The axis along which a ramp from 0 to 1 is seen as `brightness`, (across, along). None if it is no scaled ramp."""
    lines, pixels = seen.any(1), np.flatnonzero(seen.any(0))
    if not seen[np.ix_(lines, pixels)].all() or len(pixels) < 4 or length < 4:
        return None
    positions = brightness[lines] * (length - 1)
    margin = int(len(pixels) * (1 - _MIDDLE) / 2)
    middle = pixels[margin : len(pixels) - margin]
    step, first = np.polyfit(middle, positions[:, middle].mean(0), 1)
    if step == 0:
        return None
    off = np.abs(positions[:, middle] - (first + step * middle)).max()
    allowed = length / 255 + abs(step)  # the ramp has 256 levels; a pixel of the input has the size of a step
    if off > allowed or abs(step) * len(pixels) > length + 2 * allowed:
        return None
    count = brightness.shape[1]
    axis = Axis(first + 0.5 - step / 2, step, count, length)
    ends = np.sort(axis.edges[[0, -1]])
    if np.abs(ends - (0, length)).max() < length / _PRECISION:
        return Axis(0.0, length / count, count, length) if step > 0 else Axis(length, -length / count, count, length)
    return axis


def preprocessing_of(model: Any) -> Preprocessing | None:
    """The preprocessing that the file of a program holds, or that a model of timm states; None if there is none."""
    if isinstance(model, Runner):
        stored = preprocessing_in(model.manifest)
        return None if stored is None else Preprocessing(stored)
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        return None
    try:
        data: Any = import_module("timm.data")
    except ImportError:
        return None
    return Preprocessing(data.create_transform(**data.resolve_data_config(model=model), is_training=False))
