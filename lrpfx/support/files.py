"""Checks of paths, and files that appear whole or not at all."""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from filelock import lock_descriptor

from lrpfx.errors import ArtefactError, InputError, InputTypeError, os_errors


def checked_path(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> tuple[Path, Path]:
    """The given path, and the file to write, with links resolved. The suffix must be one of `suffixes`."""
    path = as_path(path)
    if path.suffix not in suffixes:
        raise ArtefactError(
            f"the file's suffix must be {' or '.join(suffixes)}, not {path.suffix or 'none'!r} ({path})",
            topic="files-and-folders",
        )
    with os_errors(ArtefactError, path, "written"):
        target = behind_links(path)
        if target.exists() and not target.is_file():
            raise ArtefactError(f"{path} exists and is not a file, so it cannot be overwritten", topic="files-and-folders")
        if not target.parent.is_dir():
            raise ArtefactError(f"there is no folder {target.parent}", topic="files-and-folders")
    return path, target


def as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InputTypeError(f"a path is a str or a Path, not a {type(path).__name__}", topic="files-and-folders")
    if not os.fspath(path):
        raise InputError("the path is empty", topic="files-and-folders")
    if "\0" in os.fspath(path):
        raise ArtefactError(f"{os.fspath(path)!r} is not the name of a file", topic="files-and-folders")
    if "://" in os.fspath(path):
        raise InputError(f"{path} is not a path of this machine, which this needs", topic="files-and-folders")
    return Path(path)


def check_place(path: Path, is_folder: bool = False) -> None:
    """Raise `InputError` before the work begins if no file, or with `is_folder` no folder, can be written at a path."""
    path = as_path(path).expanduser()
    if is_folder and path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, and results need a folder: give another name", topic="files-and-folders")
    if not is_folder and path.is_dir():
        raise InputError(f"{path} is a folder: give the name of a file in it", topic="files-and-folders")
    above = next(one for one in (path, *path.absolute().parents) if one.is_dir() or (one != path and os.path.lexists(one)))
    if not above.is_dir():
        raise InputError(f"{path} cannot be written: {above} is a file", topic="files-and-folders")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: there is no permission to write into {above}", topic="files-and-folders")


def behind_links(path: Path) -> Path:
    """The file that a link points to; the path itself if it is not a link."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError as error:
        raise ArtefactError(f"{path} is a link to itself", topic="files-and-folders") from error


@contextmanager
def whole_file(path: Path, suffix: str) -> Iterator[Path]:
    """A temporary path beside `path`. Its file is moved to `path` in one step if the context ends without an error."""
    with temporary_file(path, suffix) as temporary:
        yield temporary
        put_in_place(temporary, path)


def written(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file, whole or not at all. Its folder is made if need be, "~" is the home folder. Errors: `InputError`."""
    try:
        target = as_path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path} cannot be written: {error}", topic="files-and-folders") from error
    with os_errors(InputError, target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target, target.suffix) as temporary:
            temporary.write_bytes(content)
    return target


@contextmanager
def temporary_file(path: Path, suffix: str) -> Iterator[Path]:
    """A temporary file beside `path`, deleted at the end. Leftovers of killed writers of the same file are deleted first."""
    own = f".lrpfx.{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}"  # of the same length for any file name
    for left in path.parent.glob(f"{own}.*"):
        with suppress(OSError), open(left, "rb") as file:
            if _is_locked_now(file.fileno()):  # its writer is gone
                left.unlink()
    temporary = path.parent / f"{own}.{secrets.token_hex(8)}{suffix}"
    try:
        with open(temporary, "xb") as file:
            _is_locked_now(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _is_locked_now(file: int) -> bool:
    """Lock an open file until it is closed, if its system has locks that let its writer write by another name of it."""
    with suppress(OSError):
        return os.name == "posix" and lock_descriptor(file, blocking=False)
    return False


def put_in_place(temporary: Path, target: Path, like: Path | None = None) -> None:
    """Move a written file to `target`, with the mode of the file `like`, by default of the file that it replaces."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    with suppress(FileNotFoundError):
        os.chmod(temporary, stat.S_IMODE((like or target).stat().st_mode))
    os.replace(temporary, target)


def hash_of_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        total = hashlib.sha256()
        for part in iter(partial(file.read, 1 << 20), b""):
            total.update(part)
    return total.hexdigest()
