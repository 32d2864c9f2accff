"""Image files that others made: only formats that Pillow decodes by itself are opened, and no larger ones than memory holds."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from lrpfx.deploy.preprocessing import MOST_PIXELS
from lrpfx.errors import InputError

#: Suffixes of the files that are read as images.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
#: The formats that Pillow may read; for some others it would start programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

#: Errors of a file system that all other files would meet too.
HOPELESS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)


@dataclass(frozen=True)
class ImageFile:
    """A file, and the name that its results have: its path in the folder that was given."""

    path: Path
    name: str

    @property
    def shown(self) -> str:
        """The name as text, with escapes for bytes that are not UTF-8."""
        return os.fsencode(self.name).decode("utf-8", "backslashreplace")

    @property
    def version(self) -> str:
        """A text that changes if the file is replaced."""
        found = self.path.stat()
        return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"


def in_folder(folder: Path) -> list[ImageFile]:
    """The images directly in a folder, in order of their names."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    found = [ImageFile(path, path.name) for path in sorted(folder.iterdir()) if _is_meant(path, folder)]
    if not found:
        raise _none_in(folder)
    return found


def named(paths: Iterable[Path], without: Path) -> list[ImageFile]:
    """The images that paths of files and folders stand for, those in folders at any depth, except those in `without`.

    Every name is there once: a number is added to the others.
    """
    excluded = without.resolve()
    found: dict[str, ImageFile] = {}
    for given in paths:
        if re.match("(https?|ftp|s3|gs|data):", str(given)):
            raise InputError(f"{given} is an address: download the photograph, and give the path of the file")
        for path in _files(given, excluded) if given.is_dir() else [given]:
            name = str(path.relative_to(given)) if given.is_dir() else path.name
            number, own = 1, name
            while own in found:
                number += 1
                own = str(Path(name).with_stem(f"{Path(name).stem}-{number}"))
            found[own] = ImageFile(path, own)
    return list(found.values())


def _is_meant(path: Path, folder: Path) -> bool:
    """Whether a path in a folder has the suffix of an image, and is not hidden there."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.suffix.lower() in SUFFIXES


def _files(folder: Path, excluded: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if _is_meant(path, folder) and not path.is_dir())
    mine = [path for path in paths if excluded not in path.resolve().parents]
    if not mine:
        raise _none_in(folder)
    return mine


def _none_in(folder: Path) -> InputError:
    return InputError(f"there are no images in {folder}; their suffixes are {', '.join(SUFFIXES)}")


def opened(path: Path) -> Image.Image:
    """The photograph in a file, upright, in RGB; in mode "F" with values in [0, 255] if it is grey with 16 bits.

    Transparency is laid over white. Raises `InputError`, or what a decoder raises for a damaged file.
    """
    if not path.is_file():
        raise InputError("it is not a file" if path.exists() else "there is no such file")
    with Image.open(path, formats=FORMATS) as file:
        if file.width * file.height > MOST_PIXELS:
            raise InputError(f"it has {file.width}×{file.height} pixels, more than {MOST_PIXELS}")
        if file.mode in ("F", "I"):
            raise InputError("its values have 32 bits, and their range is unknown: convert it to 8 or 16 bits")
        upright = ImageOps.exif_transpose(file)
        if upright.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
            return Image.fromarray(np.asarray(upright, dtype=np.float32) / 257.0)
        if upright.has_transparency_data:
            front = upright.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", front.size, "white"), front).convert("RGB")
        return upright.convert("RGB")


@contextmanager
def whole_picture(path: Path) -> Iterator[Path]:
    """The temporary path of a picture that appears at `path` whole or not at all.

    It is one for each folder: to look for leftovers of other writers would take long in a folder with many pictures.
    """
    temporary = path.with_name(".unfinished.png")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
