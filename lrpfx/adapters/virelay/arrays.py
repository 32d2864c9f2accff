"""Samples in the arrays that ViRelAy reads: pictures, labels and relevance."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lrpfx.datasets.reduced_maps import without_channels
from lrpfx.datasets.rows import Block, Column, Numbers, without_label
from lrpfx.errors import InputError, InputTypeError
from lrpfx.images.opening import opened_images
from lrpfx.pictures.maps import Channels, Floats, array_of, channel_axis, checked_number
from lrpfx.support.optional_packages import progress_bar

#: Errors about what ViRelAy can show.
invalid, wrong_type = partial(InputError, topic="virelay"), partial(InputTypeError, topic="virelay")

_RGB = 3
_OUTSIDE = 0.1  # of the range of values, by which interpolation may exceed it
_NO_LABEL = -1  # a number that is in no label map
_SHORTEST = 3  # side of an image: of a shorter one, ViRelAy takes the side for the channels

#: The values of black and of white, for all channels or for each.
ValueRange = tuple[float | Sequence[float], float | Sequence[float]]


class DifferentSizesError(InputError):
    """Samples have different sizes, and each needs an array of its own."""

    topic = "virelay"


class Pictures:
    """Images as RGB with eight bits. `sizes`: (height, width) of those that were read, by sample, if they differ."""

    def __init__(self, source: Column, channels: Channels, value_range: ValueRange) -> None:
        self.source = source
        self.channels = channels
        self.low, self.high = checked_range(value_range)
        self.sizes = Sizes()

    def blocks(self, samples: Numbers) -> Iterator[tuple[Numbers, NDArray[np.uint8]]]:
        """Numbers of samples and their pictures, of shape (samples, 3, height, width)."""
        if self.source.shape is None:
            for number in samples:
                item = without_label(self.source.item(int(number)))
                if isinstance(item, (str, os.PathLike)):
                    item = next(opened_images(item)).image
                is_image = isinstance(item, Image.Image)
                values = np.asarray(item.convert("RGB")) if is_image else array_of(item, f"image {number}")
                yield self._checked(
                    np.array([number]), self._pixels(values[None], number, "last" if is_image else self.channels)
                )
        else:
            for block in self.source.blocks(samples):
                yield self._checked(block.numbers, self._pixels(block.values, int(block.numbers[0]), self.channels))

    def _pixels(self, values: NDArray[Any], number: int, channels: Channels) -> NDArray[np.uint8]:
        shape = values.shape[1:]
        if len(shape) == 2:
            values, channels = values[:, None], "first"
        if values.ndim != 4:
            raise wrong_type(f"image {number} has the shape {shape}; images are (height, width) with or without channels")
        axis = channel_axis(values.shape[1:], channels, f"image {number}", shape)
        values = np.moveaxis(values, axis + 1, 1)
        if values.shape[1] not in (1, _RGB):
            raise invalid(f"image {number} has {values.shape[1]} channels, and ViRelAy shows images with 1 or 3")
        if min(values.shape[2:]) < _SHORTEST:
            raise invalid(f"image {number} has {values.shape[3]}×{values.shape[2]} pixels: ViRelAy needs {_SHORTEST} on a side")
        return np.broadcast_to(self._bytes(values, number), (len(values), _RGB, *values.shape[2:]))

    def _bytes(self, values: NDArray[Any], number: int) -> NDArray[np.uint8]:
        if values.dtype == np.uint8:
            return values
        if not np.issubdtype(values.dtype, np.floating):
            raise wrong_type(f"images are of uint8 or floating point, not {values.dtype}")
        if len(self.low) not in (1, values.shape[1]):
            raise invalid(f"value_range is that of {len(self.low)} channels, and image {number} has {values.shape[1]}")
        low, high = self.low.reshape(-1, 1, 1), self.high.reshape(-1, 1, 1)
        parts = (values.astype(np.float64) - low) / (high - low)
        if not (parts.min() >= -_OUTSIDE and parts.max() <= 1 + _OUTSIDE):  # also if they are not numbers
            meant = " and ".join(f"({low:g}, {high:g})" for low, high in zip(self.low, self.high, strict=True))
            raise invalid(
                f"images have values from {values.min():.4g} to {values.max():.4g} (image {number} and those after it), but "
                f"value_range is {meant}: pass images before normalization, or their range"
            )
        pixels: NDArray[np.uint8] = np.rint(parts.clip(0, 1) * 255).astype(np.uint8)
        return pixels

    def _checked(self, numbers: Numbers, pixels: NDArray[np.uint8]) -> tuple[Numbers, NDArray[np.uint8]]:
        self.sizes.add(numbers, pixels.shape[2:])
        return numbers, pixels


def checked_range(value_range: Any) -> tuple[Floats, Floats]:
    """The values of black and of white: arrays with one for all channels, or one for each."""
    meaning = "value_range is (lowest, highest), each a number, or one for each channel"
    if not isinstance(value_range, (tuple, list)) or len(value_range) != 2:
        raise invalid(f"{meaning}, not {value_range!r}")
    bounds = [one if isinstance(one, (tuple, list, np.ndarray)) else [one] for one in value_range]
    low, high = (np.array([checked_number(one, meaning, math.isfinite) for one in bound]) for bound in bounds)
    if len(low) != len(high) or not len(low) or not (low < high).all():
        raise invalid(f"{meaning}, not {value_range!r}")
    return low, high


class Sizes:
    """The sizes of pictures: one of all, or of each."""

    def __init__(self) -> None:
        self.of_all: tuple[int, int] | None = None
        self._others: dict[int, tuple[int, int]] = {}

    def add(self, numbers: Numbers, size: tuple[int, ...]) -> None:
        found = (size[0], size[1])
        if self.of_all is None:
            self.of_all = found
        if found != self.of_all:
            self._others.update(dict.fromkeys(numbers.tolist(), found))

    def __getitem__(self, number: int) -> tuple[int, int]:
        return self._others.get(number, self.of_all or (0, 0))


def write_pictures(
    file: Any,
    check: Callable[[], None],
    reader: Pictures,
    samples: Numbers,
    is_array: bool,
    packed: dict[str, Any],
    progress: bool,
) -> None:
    """The dataset "data": an array, or a group with an array for each sample. `DifferentSizesError` if there is no array.

    `check`: it is called for each block.
    """
    count = len(reader.source)
    data, keys = None, _keys(count)
    for numbers, pixels in progress_bar(reader.blocks(samples), progress, "images", "block"):
        check()
        if not is_array:
            file.create_dataset(f"data/{keys(int(numbers[0]))}", data=pixels[0], chunks=pixels.shape[1:], **packed)
            continue
        if data is None:
            data = file.create_dataset("data", (count, *pixels.shape[1:]), "uint8", chunks=(1, *pixels.shape[1:]), **packed)
        _check_size(data, pixels)
        _put(data, numbers, pixels, 0)
    if not is_array:
        empty = np.zeros((_RGB, _SHORTEST, _SHORTEST), dtype=np.uint8)
        for number in np.setdiff1d(np.arange(count), samples, assume_unique=True).tolist():
            file[f"data/{keys(number)}"] = empty


def write_labels(file: Any, truth: Column, samples: Numbers, classes: int, is_every: bool) -> None:
    """The labels of `samples` in their order; or, if `is_every`, of all, where those that are not among them get none."""
    assert truth.shape is not None  # `labels_of` accepts arrays alone
    dtype, missing = (bool, False) if truth.shape else (np.int64, _NO_LABEL)
    if truth.shape and truth.shape[0] > classes:
        raise invalid(f"labels have {truth.shape[0]} classes, but there are names for {classes}")
    data = file.create_dataset("label", (len(truth) if is_every else len(samples), *truth.shape), dtype, fillvalue=missing)
    for block in truth.blocks(samples):
        wrong = np.zeros(1, dtype=bool) if truth.shape else (block.values < 0) | (block.values >= classes)
        if wrong.any():
            label, number = block.values[wrong][0], block.numbers[wrong][0]
            raise invalid(f"sample {number} has the label {label}, which is not one of the {classes} classes")
        if is_every:
            _put(data, block.numbers, block.values, missing)
        else:
            data[block.places] = block.values


def write_relevance(
    file: Any,
    check: Callable[[], None],
    maps: Column,
    sizes: Sizes,
    samples: Numbers,
    is_array: bool,
    sum_channels: bool,
    packed: dict[str, Any],
    progress: bool,
) -> None:
    """The dataset "attribution", in the form of `write_pictures`, with the rows of `samples` alone."""
    data, keys = None, _keys(len(samples))
    for block in progress_bar(maps.floats(samples), progress, "relevance", "block"):
        check()
        values = float32_of(Block(block.first, block.numbers, _drawable(block.values, maps.what, sum_channels)), maps.what)
        for number in block.numbers.tolist():
            _check_form(number, sizes[number], (values.shape[2], values.shape[3]))
        if not is_array:
            file.create_dataset(f"attribution/{keys(block.first)}", data=values[0], chunks=values.shape[1:], **packed)
            continue
        if data is None:
            shape = (len(samples), *values.shape[1:])
            data = file.create_dataset("attribution", shape, "float32", chunks=(1, *shape[1:]), **packed)
        _check_size(data, values)
        data[block.places] = values


def _check_size(data: Any, values: NDArray[Any]) -> None:
    if values.shape[1:] != data.shape[1:]:
        raise DifferentSizesError(f"samples have the shapes {data.shape[1:]} and {values.shape[1:]}")


def _drawable(values: Floats, what: str, sum_channels: bool) -> Floats:
    """Relevance (samples, channels, height, width) with two channels or more, and not more than rows or columns."""
    if values.ndim not in (3, 4):
        raise wrong_type(f"{what} is (channels, height, width) or (height, width) for ViRelAy, not {values.shape[1:]}")
    if values.ndim == 4 and sum_channels:
        values = without_channels(values, what)
    if values.ndim == 3:
        values = values[:, None]
    channels, height, width = values.shape[1:]
    if min(height, width) < _SHORTEST:
        raise invalid(f"{what} has {width}×{height} positions: ViRelAy needs {_SHORTEST} on a side")
    if channels > min(height, width):
        raise invalid(
            f"{what} has {channels} channels of {width}×{height} positions, and ViRelAy takes the shortest side for the "
            "channels: pass sum_channels=True"
        )
    if channels == 1:
        values = np.pad(values, ((0, 0), (0, _RGB - 1), (0, 0), (0, 0)))
    return values


def _check_form(number: int, picture: tuple[int, int], relevance: tuple[int, int]) -> None:
    """Relevance is drawn over the picture, to the size of which it is stretched: to a pixel, it must have its form."""
    apart = abs(picture[0] * relevance[1] - picture[1] * relevance[0])
    if apart > max(*picture, *relevance):
        raise invalid(
            f"image {number} has {picture[1]}×{picture[0]} pixels, its relevance {relevance[1]}×{relevance[0]}: pass the part "
            "of the image that the model was given"
        )


def _put(data: Any, numbers: Numbers, values: NDArray[Any], missing: Any) -> None:
    """Write rows, with `missing` in those between them."""
    first, last = int(numbers[0]), int(numbers[-1]) + 1
    if last - first > len(numbers):
        spread = np.full((last - first, *values.shape[1:]), missing, dtype=values.dtype)
        spread[numbers - first] = values
        values = spread
    data[first:last] = values


def float32_of(block: Block, what: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        values: NDArray[np.float32] = block.values.astype(np.float32)
    wrong = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if wrong.any():
        raise invalid(f"{what} of sample {block.numbers[wrong][0]} is too large for float32")
    return values


def _keys(count: int) -> Callable[[int], str]:
    """The keys of samples in a group, which sort like their numbers."""
    digits = len(str(count - 1))
    return lambda number: f"{number:0{digits}d}"
