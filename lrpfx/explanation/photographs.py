"""Photographs in all forms that users have: files, folders, PIL images, arrays and tensors."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from lrpfx.errors import InputError, InputTypeError
from lrpfx.support.tensors import not_dense


@dataclass(frozen=True)
class Photograph:
    """A photograph in RGB, and its name: that of its file, or else "image" and its number."""

    image: Image.Image
    name: str


def is_several(images: Any) -> bool:
    """Whether `images` stands for several photographs: a list, a folder, or an array or tensor with four axes."""
    if isinstance(images, (list, tuple)):
        return True
    if isinstance(images, (str, os.PathLike)):
        return not _is_address(images) and Path(images).is_dir()
    return isinstance(images, (np.ndarray, torch.Tensor)) and images.ndim == 4


def photographs(images: Any) -> Iterator[Photograph]:
    """The photographs that `images` stands for, opened one by one.

    `images`: the path of a file, or of a folder whose image files are meant, also those in folders in it; a PIL image; an array
    or tensor of shape (height, width), (height, width, channels) or (channels, height, width) with 1, 3 or 4 channels, of bytes
    or of floating-point numbers in [0, 1]; with one more axis in front for several; or a list of all these. Photographs are
    turned upright as their files say, and transparency is laid over white. Errors: `InputError`, `InputTypeError`.
    """
    for number, (image, name) in enumerate(_items(images)):
        yield Photograph(_opened(image), name or f"image {number + 1}")


def _items(images: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(images, (list, tuple)):
        if not images:
            raise InputError("the list of images is empty")
        for image in images:
            yield from _items(image)
    elif isinstance(images, (str, os.PathLike)):
        if _is_address(images):
            raise InputError(f"{images} is an address; download the photograph, and give the path of the file")
        path = Path(images)
        if path.is_dir():
            files = image_files(path)
            if not files:
                raise InputError(f"there is no image in the folder {path}")
            yield from ((file, str(file.relative_to(path))) for file in files)
        else:
            yield path, path.name
    elif isinstance(images, (np.ndarray, torch.Tensor)) and images.ndim == 4:
        if not len(images):
            raise InputError("the batch of images is empty")
        yield from ((image, "") for image in images)
    else:
        yield images, ""


def image_files(folder: Path) -> list[Path]:
    """The files in a folder, and in folders in it, that have the suffix of an image format, in order of their names."""
    known = Image.registered_extensions()
    readable = {suffix for suffix, form in known.items() if form in Image.OPEN}
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in readable and path.is_file())


def _is_address(path: Any) -> bool:
    return isinstance(path, str) and path.split("://", 1)[0].lower() in ("http", "https", "ftp", "s3", "gs", "file", "data")


def _opened(image: Any) -> Image.Image:
    """A photograph in RGB."""
    if isinstance(image, (str, os.PathLike)):
        try:
            with Image.open(image) as file:
                return in_rgb(ImageOps.exif_transpose(file))
        except FileNotFoundError as error:
            raise InputError(f"there is no file {image}") from error
        except UnidentifiedImageError as error:
            raise InputError(f"{image} is not an image that Pillow can read") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{image} cannot be opened: {error}") from error
    if isinstance(image, Image.Image):
        return in_rgb(ImageOps.exif_transpose(image))
    if isinstance(image, torch.Tensor):
        problem = not_dense(image)
        if problem is not None:
            raise InputTypeError(f"the image is {problem}")
        image = image.detach().cpu().float().numpy() if image.is_floating_point() else image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        return _of_array(image)
    raise InputTypeError(
        f"an image is a path, a PIL image, an array or a tensor, not {type(image).__name__}; lists and folders of them are "
        "several images"
    )


def in_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB. Transparency is laid over white, and 16 bits are scaled to 8."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode.startswith("I") and values.max(initial=0.0) > 255 else 255.0
        return Image.fromarray((values * (255 / top)).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        front = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", front.size, "white"), front).convert("RGB")
    return image.convert("RGB")


def _of_array(array: Any) -> Image.Image:
    """An array as an image in RGB."""
    shape = "×".join(map(str, array.shape))
    if array.ndim not in (2, 3) or not array.size:
        raise InputError(f"an array of shape {shape} is not an image: (height, width), with 1, 3 or 4 channels first or last")
    if array.ndim == 3:
        first, last = array.shape[0] in (1, 3, 4), array.shape[2] in (1, 3, 4)
        if not first and not last:
            raise InputError(f"an image has 1, 3 or 4 channels, first or last, but the array has shape {shape}")
        if first and last and array.shape[0] != array.shape[2]:
            raise InputError(f"the array of shape {shape} may have its channels first or last; give it as a PIL image")
        if first and not (last and array.shape[1] > 4):
            array = np.moveaxis(array, 0, 2)
        array = array[..., 0] if array.shape[2] == 1 else array
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise InputError("the image has values that are not finite")
        low, high = float(array.min()), float(array.max())
        if low < 0 or high > 1:
            raise InputError(
                f"an image of floating-point numbers has values in [0, 1], but they go from {low:g} to {high:g}; divide bytes by "
                "255, or pass what is preprocessed already without preprocess="
            )
        array = (array * 255).round().astype(np.uint8)
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if array.dtype != np.uint8:
        raise InputTypeError(f"an image has bytes (uint8) or floating-point numbers in [0, 1], not {array.dtype}")
    return in_rgb(Image.fromarray(np.ascontiguousarray(array)))


def as_photographs(inputs: torch.Tensor) -> list[Photograph]:
    """Pictures of a model's inputs (batch, channels, height, width), each scaled from its lowest to its highest value."""
    found = []
    for number, values in enumerate(inputs.detach().cpu().double()):
        low, high = values.min(), values.max()
        scaled = (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)
        shown = scaled if len(scaled) in (1, 3) else scaled.mean(0, keepdim=True)
        found.append(Photograph(_of_array(shown.movedim(0, -1).numpy()), f"image {number + 1}"))
    return found
