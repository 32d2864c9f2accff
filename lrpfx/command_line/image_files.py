"""Image files that others made: only formats that Pillow decodes by itself are opened, and no larger ones than memory holds."""

import errno
import functools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from lrpfx.errors import InputError, LrpfxError, first_lines
from lrpfx.images.opening import image_files, image_suffixes, opened_in_depth
from lrpfx.images.stored_preprocessing import MOST_PIXELS

#: Errors of a file system that all other files would meet too.
HOPELESS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)

#: An address; `Path` makes one slash of the two.
_ADDRESS = re.compile("(https?|ftp|s3|gs|file|data):/*")

#: Folders with results: two files that each of them has, and the endings that are added to the names of its photographs.
_RESULTS = (
    (("explain.json", "explanations.csv"), (".overlay.png", ".sheet.png", ".compare.png")),
    (("run.json", "outputs.csv"), (".png",)),
)
_UNFINISHED = ".unfinished.png"


@dataclass(frozen=True)
class ImageFile:
    """A file, and the name that its results have: its path in the folder that was given."""

    path: Path
    name: str

    @property
    def shown(self) -> str:
        """The name as text."""
        return _as_text(self.name)

    @property
    def source(self) -> str:
        """The absolute path, as text."""
        return _as_text(os.path.abspath(self.path))

    @property
    def version(self) -> str:
        """A text that changes if the file is replaced; empty for a file that cannot be read, as is found when it is opened."""
        with suppress(OSError):
            found = self.path.stat()
            return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
        return ""


def _as_text(path: str) -> str:
    """A path with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def images_in(paths: Iterable[Path]) -> list[ImageFile]:
    """The images that paths of files and folders stand for, those in folders at any depth. Each file is there once.

    Pictures that lrpfx made are left out of folders. Files from several folders may have the same name. A file that is not
    there has its reason as a problem later, unless none of them is.
    """
    found: dict[str, ImageFile] = {}
    for given in paths:
        if _ADDRESS.match(str(given)):
            address = _ADDRESS.sub(lambda scheme: f"{scheme[1]}://", str(given), count=1)
            raise InputError(
                f"{address} is an address: download the photograph, and give the path of the file", topic="image-files"
            )
        for path in _files(given) if given.is_dir() else [given]:
            image = ImageFile(path, str(path.relative_to(given)) if given.is_dir() else path.name)
            found.setdefault(image.source, image)
    if not any(os.path.lexists(image.path) for image in found.values()):
        missing = next(iter(found.values())).path
        order = ". The model comes before the photographs" if ":" in missing.name else ""
        raise InputError(
            f"there is no {'file' if missing.suffix else 'file or folder'} {missing}{order}", topic="files-and-folders"
        )
    return list(found.values())


def _files(folder: Path) -> list[Path]:
    paths = image_files(folder)
    if not paths:
        raise InputError(
            f"there are no images in {folder}; their suffixes are {', '.join(sorted(image_suffixes()))}", topic="image-files"
        )
    endings = functools.cache(_endings_of_results)
    mine = [path for path in paths if not any(_is_result(path.name, endings(above)) for above in path.absolute().parents)]
    if not mine:
        raise InputError(f"there are no images in {folder} but those that lrpfx made", topic="image-files")
    return mine


def _endings_of_results(folder: Path) -> tuple[str, ...]:
    """The endings of pictures that lrpfx wrote into a folder."""
    return tuple(ending for files, endings in _RESULTS if all((folder / one).exists() for one in files) for ending in endings)


def _is_result(name: str, endings: Iterable[str]) -> bool:
    """Whether a file has the name of an image with one of the endings, and a number before it if there are several."""
    names = (re.sub(r"\.\d+$", "", name.removesuffix(ending)) for ending in endings if name.endswith(ending))  # of an image
    named = any(Path(one).suffix.lower() in image_suffixes() for one in names)
    return named or name == _UNFINISHED


def reason(error: Exception) -> str:
    """Why an image has no results, in a sentence."""
    if isinstance(error, LrpfxError):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return "it is not an image, or it is damaged"
    if isinstance(error, Image.DecompressionBombError):
        return f"it has more than {MOST_PIXELS} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it cannot be decoded: {first_lines(error).partition(': ')[2]}"


def opened_in_rgb(path: Path) -> Image.Image:
    """The image in a file, upright. `InputError` if it cannot be opened, which says why."""
    try:
        return opened_in_depth(path).convert("RGB")
    except Exception as error:  # decoders raise errors of all kinds
        raise InputError(f"{path}: {reason(error)}", topic="image-files") from error


@dataclass(frozen=True)
class Masks:
    """Masks of photographs: one image for all, or a folder with one of the same name, but for its ending, for each."""

    place: Path

    def check(self, images: Iterable[ImageFile]) -> None:
        """Raise `InputError` if a photograph has no mask."""
        if not self.place.exists():
            raise InputError(f"there is no file or folder {self.place}", topic="files-and-folders")
        for image in images:
            self.file_for(image)

    def file_for(self, image: ImageFile) -> Path:
        """The file of the mask. Raises `InputError` if the folder has none, or several."""
        if not self.place.is_dir():
            return self.place
        above = (self.place / image.name).parent
        found = [path for path in image_files(self.place) if path.parent == above and path.stem == Path(image.name).stem]
        if len(found) != 1:
            raise InputError(
                f"{image.shown} has {len(found) or 'no'} masks in {self.place}: give it one with its name and any ending",
                topic="image-files",
            )
        return found[0]

    def version_for(self, image: ImageFile) -> str:
        """A text that changes if the mask is replaced."""
        return ImageFile(self.file_for(image), "").version

    def for_photograph(self, image: ImageFile, size: tuple[int, int]) -> NDArray[np.bool_]:
        """Which pixels of a photograph of this (width, height) are in the region, (height, width)."""
        file = self.file_for(image)
        mask = opened_in_rgb(file).convert("L")
        if mask.size != size:
            raise InputError(
                f"the mask {file} has {mask.width}×{mask.height} pixels, and the photograph {size[0]}×{size[1]}",
                topic="image-files",
            )
        values = np.asarray(mask)
        if not set(np.unique(values)) < {0, 1, 255} or {1, 255} <= set(np.unique(values)):
            raise InputError(
                f"{file} is no mask: its values are other ones than black and white, or 0 and 1", topic="image-files"
            )
        return values > 0


def masks_of(place: Path | None, images: Iterable[ImageFile]) -> Masks | None:
    """The masks at a place, if one is given. Raises `InputError` if a photograph has none."""
    if place is None:
        return None
    masks = Masks(place)
    masks.check(images)
    return masks


@contextmanager
def whole_picture(path: Path) -> Iterator[Path]:
    """The temporary path of a picture that appears at `path` whole or not at all.

    It is one for each folder: to look for leftovers of other writers would take long in a folder with many pictures.
    """
    temporary = path.with_name(_UNFINISHED)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
