"""Images in all forms that users have: files, folders, PIL images, arrays and tensors."""

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from lrpfx.errors import InputError, InputTypeError, LrpfxError
from lrpfx.images.stored_preprocessing import MOST_PIXELS
from lrpfx.pictures import photograph_of
from lrpfx.pictures.maps import COLORS
from lrpfx.pictures.pixels import as_image, of_16_bits, on_white
from lrpfx.support.tensors import not_dense


@dataclass(frozen=True)
class OpenedImage:
    """An image in RGB, its name, that of its file or else "image" and its number, and whether it was found in a folder."""

    image: Image.Image
    name: str
    is_of_folder: bool = False


def is_several(images: Any) -> bool:
    """Whether `images` stands for several images: a list or another iterable, a folder, or an array with four axes."""
    if isinstance(images, (str, os.PathLike)):
        return _is_folder(images)
    if isinstance(images, Image.Image) or hasattr(images, "read"):
        return False
    if isinstance(images, (np.ndarray, torch.Tensor)):
        has_paths = isinstance(images, np.ndarray) and images.dtype.kind in "UO"
        return images.ndim == 4 or (images.ndim > 0 and has_paths)
    return isinstance(images, Iterable) and not isinstance(images, (bytes, Mapping, Set))


def count_of(images: Any) -> int | None:
    """The number of images that `images` stands for; none is opened. None for an iterator, which would be used up."""
    return None if isinstance(images, Iterator) else sum(1 for _ in _items(images))


@dataclass(frozen=True)
class Unreadable:
    """A file of a folder that could not be read, or in which no box was found: its name, and the error that says why."""

    name: str
    error: InputError


def opened_images(images: Any) -> Iterator[OpenedImage]:
    """The images that `images` stands for, opened one by one; `lrpfx.Explainer` says which forms it has.

    Errors: `InputError`, `InputTypeError`.
    """
    for one in images_or_reasons(images):
        if isinstance(one, Unreadable):
            raise one.error
        yield one


def images_or_reasons(images: Any) -> Iterator[OpenedImage | Unreadable]:
    """The images, and in place of those files of folders that cannot be read, why. Errors: as for `opened_images`."""
    for number, (image, name) in enumerate(_items(images)):
        try:
            is_found = isinstance(image, _Found)
            yield OpenedImage(_opened(image.path if is_found else image), name or f"image {number + 1}", is_found)
        except InputError as error:
            if not isinstance(image, _Found):
                raise
            yield Unreadable(name, error)


@dataclass(frozen=True)
class _Found:
    """A file that was found in a folder: nobody has named it."""

    path: Path


def _items(images: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(images, (str, os.PathLike)):
        yield from _files_of(images)
    elif isinstance(images, Image.Image):
        yield images, ""
    elif hasattr(images, "read"):
        name = getattr(images, "name", "")
        yield images, Path(name).name if isinstance(name, str) else ""
    elif isinstance(images, (np.ndarray, torch.Tensor)):
        if images.ndim == 4 and not len(images):
            raise InputError("the batch of images is empty", topic="image-files")
        if images.ndim == 3 and images.shape[0] == 4 and images.shape[2] not in COLORS:
            raise InputTypeError(
                f"an array of shape {tuple(images.shape)} can be four photographs in grey, or one with red, green, blue and "
                "transparency: pass list(array) for four, or one with its channels last",
                topic="image-files",
            )
        yield from _each(images, "batch") if is_several(images) else iter([(images, "")])
    elif isinstance(images, Mapping) and set(images) == {"bytes", "path"}:
        yield _encoded(images["bytes"], images["path"])
    elif isinstance(images, (Mapping, Set)):
        raise InputTypeError(
            f"images are in an order, which a {type(images).__name__} does not give them: pass a list"
            + (", such as list(images.values())" if isinstance(images, Mapping) else ""),
            topic="image-files",
        )
    elif images is None or isinstance(images, bytes) or not isinstance(images, Iterable):
        raise InputTypeError(
            f"images are paths, PIL images, arrays or tensors of uint8, uint16 or floating point, or lists of these, not "
            f"{'None' if images is None else type(images).__name__}"
            + ("; for the content of a file, pass io.BytesIO(content)" if isinstance(images, bytes) else "")
            + ("; numbers are an array, np.array(...)" if isinstance(images, (int, float)) else ""),
            topic="image-files",
        )
    else:
        yield from _each(images, "list" if isinstance(images, (list, tuple)) else type(images).__name__)


def _each(images: Any, what: str) -> Iterator[tuple[Any, str]]:
    found = False
    for image in images:
        found = True
        yield from _items(image)
    if not found:
        raise InputError(f"the {what} of images is empty", topic="image-files")


def _encoded(content: Any, path: Any) -> tuple[Any, str]:
    """The file of an image that a dataset of Hugging Face did not decode: its content, or else its path."""
    if content is None and isinstance(path, str) and path:
        return _expanded(path), _expanded(path).name
    if not isinstance(content, bytes):
        raise InputTypeError(
            "an image of a dataset of Hugging Face has neither its content as bytes nor a path", topic="image-files"
        )
    file = io.BytesIO(content)
    file.name = path if isinstance(path, str) else "the image"
    return file, Path(path).name if isinstance(path, str) else ""


def _files_of(path: Any) -> Iterator[tuple[Any, str]]:
    """The file at a path, or the image files in a folder, with their names."""
    if not os.fspath(path):
        raise InputError("the path of the image is empty; for the current folder, pass '.'", topic="image-files")
    if _is_address(path):
        raise InputError(f"{path} is an address: download the photograph, and give the path of the file", topic="image-files")
    if not _is_folder(path):
        yield _expanded(path), _expanded(path).name
        return
    folder = _expanded(path)
    files = image_files(folder)
    if not files:
        raise InputError(f"there is no image in the folder {folder}", topic="image-files")
    yield from ((_Found(file), str(file.relative_to(folder))) for file in files)


def image_files(folder: Path) -> list[Path]:
    """The files in a folder, and in folders in it, that have the suffix of an image format, in order of their names.

    Hidden files and folders, whose names start with a dot, are left out. Links to folders are followed, except to one that they
    are in themselves, which would have no end.

    Errors: `InputError` if a folder cannot be read.
    """
    return files_ending_in(folder, tuple(image_suffixes()))


def files_ending_in(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files in a folder, as for `image_files`, whose names end in one of some ways."""
    return sorted(path for path in _files_in(folder, ()) if path.name.lower().endswith(endings))


def _files_in(folder: Path, around: tuple[Path, ...]) -> Iterator[Path]:
    """The files in a folder that are not hidden. `around`: the real folders that it is in, as its path goes."""
    try:
        real = folder.resolve()
        entries = [] if real in around else list(folder.iterdir())
    except (OSError, RuntimeError) as error:  # of links that have no end
        raise InputError(f"the folder {folder} cannot be read: {error}", topic="image-files") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files_in(entry, (*around, real))
        else:
            yield entry


def _is_address(path: Any) -> bool:
    start = os.fspath(path)
    return isinstance(start, str) and re.match("(https?|ftp|s3|gs|file):/|data:", start, re.IGNORECASE) is not None


def _is_folder(path: Any) -> bool:
    try:
        return bool(os.fspath(path)) and not _is_address(path) and _expanded(path).is_dir()
    except OSError:  # no name of a file, such as a text that is too long
        return False


def _expanded(path: Any) -> Path:
    """A path, with "~" as the home folder."""
    try:
        return Path(os.fsdecode(path)).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: {error}", topic="image-files") from error


def _opened(image: Any) -> Image.Image:
    """An image in RGB."""
    if isinstance(image, Path) or hasattr(image, "read"):
        shown = image if isinstance(image, Path) else getattr(image, "name", None) or f"the {type(image).__name__}"
        try:
            if isinstance(image, Path) and image.exists() and not image.is_file():  # a pipe would wait for its writer
                raise InputError("it is not a file", topic="image-files")
            with Image.open(image, formats=readable_formats()) as file:
                return _in_rgb(ImageOps.exif_transpose(file))
        except FileNotFoundError as error:
            remedy = ": for a pattern, pass sorted(glob.glob(pattern)), or the folder" if re.search(r"[*?]", str(shown)) else ""
            raise InputError(f"there is no file {shown}{remedy}", topic="image-files") from error
        except UnidentifiedImageError as error:
            raise InputError(f"{shown} is not an image that Pillow can read", topic="image-files") from error
        except LrpfxError as error:
            raise type(error)(f"{shown}: {error}", topic=error.topic) from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{shown} cannot be opened: {error}", topic="image-files") from error
    if isinstance(image, torch.Tensor) and (problem := not_dense(image)) is not None:
        raise InputTypeError(f"the image is {problem}", topic="image-files")
    return _in_rgb(ImageOps.exif_transpose(image) if isinstance(image, Image.Image) else image)


def opened_in_depth(path: Path) -> Image.Image:
    """The image in a file, upright, in RGB; in mode "F" with values in [0, 255] if it is grey with 16 bits.

    Transparency is laid over white. Raises `InputError`, or what a decoder raises for a damaged file.
    """
    if not path.is_file():
        raise InputError("it is not a file" if path.exists() else "there is no such file", topic="image-files")
    with Image.open(path, formats=readable_formats()) as file:
        if file.width * file.height > MOST_PIXELS:
            raise InputError(f"it has {file.width}×{file.height} pixels, more than {MOST_PIXELS}", topic="image-files")
        if file.mode in ("F", "I"):
            raise InputError(
                "its values have 32 bits, and their range is unknown: convert it to 8 or 16 bits", topic="image-files"
            )
        upright = ImageOps.exif_transpose(file)
        if upright.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
            return Image.fromarray((of_16_bits(np.asarray(upright)) * 255.0).astype(np.float32))
        return on_white(upright)


def readable_formats() -> list[str]:
    """The formats that Pillow decodes by itself.

    For EPS it would start Ghostscript, whatever the name of the file. Some others, such as HDF5, it only recognizes.
    """
    Image.init()
    decoders = {name: opening[0] for name, opening in Image.OPEN.items() if name not in ("EPS", "MPEG")}
    return [name for name, one in decoders.items() if not (isinstance(one, type) and issubclass(one, ImageFile.StubImageFile))]


def image_suffixes() -> frozenset[str]:
    """The suffixes of the formats that can be read."""
    formats = readable_formats()
    return frozenset(suffix for suffix, form in Image.registered_extensions().items() if form in formats)


def _in_rgb(image: Any) -> Image.Image:
    """An image or array in RGB, 8 bits for each colour."""
    if isinstance(image, Image.Image) and image.mode == "RGB" and not image.has_transparency_data:
        return image.copy()
    return Image.fromarray((photograph_of(image) * 255).round().astype(np.uint8))


def images_of_inputs(inputs: torch.Tensor) -> list[OpenedImage]:
    """Pictures of a model's inputs (batch, channels, height, width), each scaled from its lowest to its highest value."""
    return [OpenedImage(as_image(one), f"image {number}") for number, one in enumerate(inputs.detach().cpu().double(), 1)]


def as_seen(image: OpenedImage, input: torch.Tensor) -> OpenedImage:
    """The picture of a model's input (channels, height, width), under the name of the image that it was made of."""
    (seen,) = images_of_inputs(input[None])
    return replace(image, image=seen.image)
