"""Preprocessing that a file can hold: how an image becomes the input of a program, as numbers instead of code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lrpfx.errors import InputError, InputTypeError
from lrpfx.support.stored_arrays import RefusedError

#: Names of the interpolations, as torchvision and timm have them.
INTERPOLATIONS = {
    name: Image.Resampling[name.upper()] for name in ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
}

MOST_PIXELS = 1 << 27  # of an image that was resized, before its middle is cropped
_LONGEST = 1 << 14  # side of an input
_LARGEST = 1e6  # magnitude of a mean, and of a standard deviation or its reciprocal


@dataclass(frozen=True)
class StoredPreprocessing:
    """A function from an image to the input of a model: resize, crop the middle, subtract a mean, divide by a deviation.

    `mean` and `std` have one number for each of the 1 or 3 channels, for pixels in [0, 1]. `resize` is the length that the
    shorter side gets, or (height, width). `size` is the part in the middle that becomes the input, (height, width), with black
    around what is too small. Without `resize`, the image is scaled to just cover `size`; without both it keeps its size.
    Errors: `InputError`, also for an image that is too large.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise InputError(problem, topic="preprocessing")

    def _problem(self) -> str | None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            is_numbers = isinstance(values, tuple) and all(type(one) in (int, float) for one in values)
            if not is_numbers or len(values) not in (1, 3):
                return f"{name} has one number for each channel, of which there are 1 or 3, not {values!r}"
            if not all(-_LARGEST <= one <= _LARGEST for one in values):
                return f"{name} has finite numbers of ordinary size, not {values!r}"
        if len(self.mean) != len(self.std):
            return f"mean and std have one number for each channel, but {len(self.mean)} and {len(self.std)} are given"
        if not all(one >= 1 / _LARGEST for one in self.std):
            return f"std is positive, not {self.std!r}"
        if self.size is not None and not _is_size(self.size):
            return f"size is a height and a width in pixels, not {self.size!r}"
        if self.resize is not None and not _is_side(self.resize) and not _is_size(self.resize):
            return f"resize is the length of the shorter side in pixels, or a height and a width, not {self.resize!r}"
        if not isinstance(self.interpolation, str) or self.interpolation not in INTERPOLATIONS:
            return f"interpolation is one of {', '.join(INTERPOLATIONS)}, not {self.interpolation!r}"
        return None

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """The model's input, (channels, height, width), in float32."""
        return torch.from_numpy(np.ascontiguousarray(self.array(image), dtype=np.float32))

    def array(self, image: Image.Image) -> NDArray[np.float64]:
        """The model's input in float64. Images in mode "F" have values in [0, 255]."""
        channels = len(self.mean)
        image = image if image.mode == "F" else image.convert("L" if channels == 1 else "RGB")
        image = self._placed(image)
        pixels = np.asarray(image, dtype=np.float64).reshape(image.height, image.width, -1) / 255.0
        normalized = (np.broadcast_to(pixels, (*pixels.shape[:2], channels)) - self.mean) / self.std
        result: NDArray[np.float64] = normalized.transpose(2, 0, 1)
        return result

    def _placed(self, image: Image.Image) -> Image.Image:
        filter = INTERPOLATIONS[self.interpolation]
        if self.resize is None:
            return image if self.size is None else _covering(image, *self.size, filter)
        height, width = self._resized(image)
        if height * width > MOST_PIXELS:
            raise InputError(
                f"resized to {width}×{height} pixels, the photograph would have more than {MOST_PIXELS}", topic="preprocessing"
            )
        resized = image if (width, height) == image.size else image.resize((width, height), filter)
        return resized if self.size is None else _middle(resized, *self.size)

    def _resized(self, image: Image.Image) -> tuple[int, int]:
        """The height and width after the resize."""
        if isinstance(self.resize, tuple):
            return self.resize
        assert self.resize is not None
        short, long = sorted(image.size)
        longer = int(self.resize * long / short)
        return (self.resize, longer) if image.height <= image.width else (longer, self.resize)

    @property
    def output_size(self) -> tuple[int, int] | None:
        """The height and width of every input; None if it depends on the image."""
        return self.size or (self.resize if isinstance(self.resize, tuple) else None)

    @property
    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest value that an input can have, of shape (1, channels, 1, 1)."""
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((0 - mean) / std)[None, :, None, None], ((1 - mean) / std)[None, :, None, None]

    def for_inputs(self, shape: tuple[int, ...]) -> "StoredPreprocessing":
        """The preprocessing that makes inputs of this shape, (channels, height, width): its size is set if it has none.

        Raises `InputError` if it makes others.
        """
        wanted = "×".join(map(str, shape))
        if len(shape) != 3 or shape[0] != len(self.mean):
            raise InputError(
                f"the input has shape {wanted}, but the preprocessing makes {len(self.mean)} channels: {self}",
                topic="preprocessing",
            )
        size = self.output_size
        if size is not None and size != shape[1:]:
            raise InputError(
                f"the input has shape {wanted}, but the preprocessing makes {len(self.mean)}×{size[0]}×{size[1]}: {self}",
                topic="preprocessing",
            )
        return self if size is not None else replace(self, size=(shape[1], shape[2]))

    def to_dict(self) -> dict[str, Any]:
        """The preprocessing as the manifest of a file has it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        steps = []
        if self.resize is not None:
            steps.append(f"resize to {_shown(self.resize)} ({self.interpolation})")
        if self.size is not None:
            steps.append(f"crop {_shown(self.size)}" if steps else f"cover {_shown(self.size)} ({self.interpolation})")
        numbers = [", ".join(f"{one:g}" for one in values) for values in (self.mean, self.std)]
        return ", ".join([*steps, f"mean {numbers[0]}", f"std {numbers[1]}"])


def _shown(size: int | tuple[int, int]) -> str:
    return str(size) if isinstance(size, int) else f"{size[0]}×{size[1]}"


def _is_side(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LONGEST


def _is_size(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_side, value))


def _covering(image: Image.Image, height: int, width: int, filter: Image.Resampling) -> Image.Image:
    """The largest part in the middle with this ratio of height to width, scaled to them."""
    factor = max(height / image.height, width / image.width)
    left, top = (image.width - width / factor) / 2, (image.height - height / factor) / 2
    box = (max(left, 0.0), max(top, 0.0), min(left + width / factor, image.width), min(top + height / factor, image.height))
    return image.resize((width, height), filter, box=box)


def _middle(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of an image, at the pixel that torchvision chooses, with black around what is too small."""
    top, left = (
        round((found - wanted) / 2) if found >= wanted else -((wanted - found) // 2)
        for found, wanted in ((image.height, height), (image.width, width))
    )
    return image.crop((left, top, left + width, top + height))


#: The largest mean difference and the largest difference of a pixel, in levels of 255, between a stored form and the function
#: that it stands for. Libraries round at other places when they resize: those of transformers by up to 7 levels (bicubic).
_LEVELS = (1.0, 10.0)


def stored_form(preprocess: Any) -> StoredPreprocessing:
    """The transforms of torchvision, timm or Hugging Face in the form that a file can hold.

    Their settings are read, and both forms are compared on two pictures of noise. Raises `InputError` if they differ.
    """
    if isinstance(preprocess, StoredPreprocessing):
        return preprocess
    if not callable(preprocess) or isinstance(preprocess, type):
        raise InputTypeError(
            f"preprocess is a function from a photograph to a tensor, not {type(preprocess).__name__}", topic="preprocessing"
        )
    remedy = (
        "a file holds a resize, a crop of the middle, a mean and a deviation: pass these as lrpfx.images.stored_preprocessing."
        "StoredPreprocessing(mean, std, size, resize)"
    )
    try:
        found = _read(preprocess)
        differences = [_difference(preprocess, found, size) for size in _probes(found)]
    except Exception as error:
        raise InputError(f"the preprocessing cannot be stored: {error}; {remedy}", topic="preprocessing") from error
    if not all(mean <= _LEVELS[0] and largest <= _LEVELS[1] for mean, largest in differences):
        largest = max(largest for _, largest in differences)
        raise InputError(
            f"the preprocessing cannot be stored: it does more than {found}, from which it differs by up to {largest:.0f} of "
            f"255 levels; {remedy}",
            topic="preprocessing",
        )
    return found


def applied(function: Callable[..., Any], image: Image.Image) -> Any:
    """What a preprocessing returns for an image."""
    if _is_image_processor(function):
        return function(images=image, return_tensors="pt")["pixel_values"]
    return function(image)


def _is_image_processor(function: Any) -> bool:
    """Whether a function is an image processor of transformers, or a processor that holds one."""
    names = [cls.__name__ for cls in type(function).__mro__]
    return any("ImageProc" in name or name in ("ProcessorMixin", "FeatureExtractionMixin") for name in names)


def _probes(stored: StoredPreprocessing) -> list[tuple[int, int]]:
    """A wide and a high image, as (width, height), whose margins are even: libraries do not agree on half a pixel."""

    def is_even(width: int, height: int) -> bool:
        if stored.size is None or not isinstance(stored.resize, int):
            return True
        short, long = sorted((width, height))
        return (int(stored.resize * long / short) - max(stored.size)) % 2 == 0

    long = next((long for long in range(420, 440) if is_even(long, 310)), 420)
    return [(long, 310), (310, long)]


def _difference(function: Callable[..., Any], stored: StoredPreprocessing, size: tuple[int, int]) -> tuple[float, float]:
    """The mean and the largest difference between both forms, in levels of 255, for noise of several scales."""
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (17, 23, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = generator.integers(-40, 41, (size[1], size[0], 3))
    noise = Image.fromarray((np.asarray(coarse, dtype=np.int64) + fine).clip(0, 255).astype(np.uint8))
    expected, *others = (torch.as_tensor(applied(function, noise)).detach().cpu().double().numpy() for _ in range(4))
    if not all(np.array_equal(expected, other) for other in others):
        raise InputError("it does something else each time", topic="preprocessing")
    expected = expected[0] if expected.ndim == 4 else expected
    found = stored.array(noise)
    if expected.shape != found.shape:
        raise InputError(
            f"it returns inputs of shape {expected.shape}, but {stored} gives {found.shape}", topic="preprocessing"
        )
    levels = np.abs((expected - found) * np.reshape(stored.std, (-1, 1, 1))) * 255
    return float(levels.mean()), float(levels.max())


def _read(function: Any) -> StoredPreprocessing:
    """The settings of a function of a kind that is known."""
    if _is_image_processor(function):
        return _of_processor(getattr(function, "image_processor", function))
    if all(hasattr(function, name) for name in ("crop_size", "resize_size", "mean", "std", "interpolation")):
        resize, size = _side(function.resize_size), _pair(function.crop_size)
        return StoredPreprocessing(
            _numbers(function.mean), _numbers(function.std), size, resize, _name_of(function.interpolation)
        )
    steps = getattr(function, "transforms", None)
    if steps is None:
        raise InputError(f"the settings of {type(function).__name__} are not known", topic="preprocessing")
    return _of_steps(list(steps))


def _of_steps(steps: Sequence[Any]) -> StoredPreprocessing:
    """The settings of a composition of transforms. Steps without any are left to the comparison."""
    settings: dict[str, Any] = {}
    channels = 3
    for step in steps:
        kinds = {cls.__name__ for cls in type(step).__mro__}
        if "Resize" in kinds:
            settings |= {"resize": _side(step.size), "interpolation": _name_of(step.interpolation)}
        elif "CenterCrop" in kinds:
            settings["size"] = _pair(step.size)
        elif "Grayscale" in kinds:
            channels = step.num_output_channels
        elif "Normalize" in kinds:
            settings |= {"mean": _numbers(step.mean), "std": _numbers(step.std)}
    for name, neutral in (("mean", (0.0,)), ("std", (1.0,))):
        values = settings.get(name, neutral)
        settings[name] = values * channels if len(values) == 1 else values
    return StoredPreprocessing(**settings)


def _of_processor(processor: Any) -> StoredPreprocessing:
    """The settings of an image processor of transformers."""
    size: Mapping[str, Any] = dict(processor.size) if processor.do_resize else {}
    crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", None) else {}
    wanted = (crop["height"], crop["width"]) if crop else None
    shortest = size.get("shortest_edge")
    resize = shortest or ((size["height"], size["width"]) if size else None)
    share = getattr(processor, "crop_pct", None)
    if share is not None and shortest is not None:  # ConvNeXT's
        wanted = (shortest, shortest)
        resize = int(shortest / share) if shortest < 384 else wanted
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,) * 3, (1.0,) * 3)
    interpolation = Image.Resampling(int(getattr(processor.resample, "value", processor.resample))).name.lower()
    return StoredPreprocessing(_numbers(mean), _numbers(std), wanted, resize, interpolation)


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(round(one, 9) for one in torch.as_tensor(values, dtype=torch.float64).reshape(-1).tolist())


def _side(size: Any) -> Any:
    """A size as a resize has it: one number for the shorter side, or a height and a width."""
    if isinstance(size, int):
        return size
    return int(size[0]) if len(size) == 1 else _pair(size)


def _pair(size: Any) -> tuple[int, int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return int(sizes[0]), int(sizes[-1])


def _name_of(interpolation: Any) -> str:
    return str(getattr(interpolation, "value", interpolation))


def preprocessing_in(manifest: Mapping[str, Any]) -> StoredPreprocessing | None:
    """The preprocessing that a manifest holds, if any. Raises `RefusedError` for an invalid one."""
    found = manifest.get("preprocessing")
    if found is None:
        return None
    keys = ("mean", "std", "size", "resize", "interpolation")
    if not isinstance(found, dict) or sorted(found) != sorted(keys):
        raise RefusedError(f"its preprocessing does not have exactly the entries {', '.join(keys)}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    try:
        return StoredPreprocessing(**values)
    except InputError as error:
        raise RefusedError(f"its preprocessing is invalid: {error}") from error
