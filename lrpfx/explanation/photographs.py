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
from lrpfx.pictures import photograph_of
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


def count_of(images: Any) -> int:
    """The number of photographs that `images` stands for; none is opened."""
    return sum(1 for _ in _items(images))


def photographs(images: Any) -> Iterator[Photograph]:
    """The photographs that `images` stands for, opened one by one.

    `images`: the path of a file, or of a folder whose image files are meant, also those in folders in it; a PIL image, an array
    or a tensor, as for `lrpfx.pictures.photograph_of`; an array or tensor of several; or a list of all these. Photographs are
    turned upright as their files say. Errors: `InputError`, `InputTypeError`.
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
    known, formats = Image.registered_extensions(), _formats()
    readable = {suffix for suffix, form in known.items() if form in formats}
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in readable and path.is_file())


def _is_address(path: Any) -> bool:
    return isinstance(path, str) and path.split("://", 1)[0].lower() in ("http", "https", "ftp", "s3", "gs", "file", "data")


def _opened(image: Any) -> Image.Image:
    """A photograph in RGB."""
    if isinstance(image, (str, os.PathLike)):
        try:
            with Image.open(image, formats=_formats()) as file:
                return _in_rgb(ImageOps.exif_transpose(file))
        except FileNotFoundError as error:
            raise InputError(f"there is no file {image}") from error
        except UnidentifiedImageError as error:
            raise InputError(f"{image} is not an image that Pillow can read") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{image} cannot be opened: {error}") from error
    if isinstance(image, torch.Tensor) and (problem := not_dense(image)) is not None:
        raise InputTypeError(f"the image is {problem}")
    return _in_rgb(ImageOps.exif_transpose(image) if isinstance(image, Image.Image) else image)


def _formats() -> list[str]:
    """The formats that Pillow decodes by itself: for EPS it would start Ghostscript, whatever the name of the file."""
    Image.init()
    return [name for name in Image.OPEN if name != "EPS"]


def _in_rgb(image: Any) -> Image.Image:
    """An image or array in RGB, 8 bits for each colour."""
    if isinstance(image, Image.Image) and image.mode == "RGB" and not image.has_transparency_data:
        return image.copy()
    return Image.fromarray((photograph_of(image) * 255).round().astype(np.uint8))


def as_photographs(inputs: torch.Tensor) -> list[Photograph]:
    """Pictures of a model's inputs (batch, channels, height, width), each scaled from its lowest to its highest value."""
    found = []
    for number, values in enumerate(inputs.detach().cpu().double()):
        low, high = values.min(), values.max()
        scaled = (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)
        channels = scaled if len(scaled) in (1, 3) else scaled.mean(0, keepdim=True)
        pixels = channels.expand(3, -1, -1).movedim(0, -1)
        found.append(Photograph(Image.fromarray((pixels.numpy() * 255).round().astype(np.uint8)), f"image {number + 1}"))
    return found
