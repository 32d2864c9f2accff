"""Files that appear whole or not at all, and what a path may be."""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lrpfx.errors import ArtefactError, InputTypeError, os_errors


def checked_path(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> tuple[Path, Path]:
    """The path as it was given, whose suffix says what the file is, and where it is written: behind links."""
    path = as_path(path)
    if path.suffix not in suffixes:
        raise ArtefactError(
            f"the file's suffix says what it is: {' or '.join(suffixes)}, not {path.suffix or 'none'!r} ({path})"
        )
    with os_errors(ArtefactError, path, "written"):
        target = behind_links(path)
        if target.exists() and not target.is_file():
            raise ArtefactError(f"{path} is not a file, so that it cannot be replaced by one")
        if not target.parent.is_dir():
            raise ArtefactError(f"there is no folder {target.parent}")
    return path, target


def as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InputTypeError(f"a path is a str or a Path, not a {type(path).__name__}")
    if "\0" in os.fspath(path):
        raise ArtefactError(f"{os.fspath(path)!r} is not the name of a file")
    return Path(path)


def behind_links(path: Path) -> Path:
    """The file that a link is for; the path itself where it is not a link."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError as error:
        raise ArtefactError(f"{path} is a link to itself") from error


@contextmanager
def whole_file(path: Path, suffix: str) -> Iterator[Path]:
    """A name beside `path` for a file that is moved to `path` in one step when the context ends without an error."""
    with temporary_file(path, suffix) as temporary:
        yield temporary
        put_in_place(temporary, path)


@contextmanager
def temporary_file(path: Path, suffix: str) -> Iterator[Path]:
    """A file beside `path` while it is written. What killed writers of the same file left goes first."""
    own = f".lrpfx.{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}"  # as long for any name of a file
    for left in path.parent.glob(f"{own}.*"):
        with suppress(OSError), open(left, "rb") as file:
            if locked(file.fileno()):  # nobody writes it any more
                left.unlink()
    temporary = path.parent / f"{own}.{secrets.token_hex(8)}{suffix}"
    try:
        with open(temporary, "xb") as file:
            locked(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def put_in_place(temporary: Path, target: Path, like: Path | None = None) -> None:
    """Move a file that was written to its place, with the mode of the file `like`, by default of the one that it replaces."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    with suppress(FileNotFoundError):
        os.chmod(temporary, stat.S_IMODE((like or target).stat().st_mode))
    os.replace(temporary, target)


def locked(file: int) -> bool | None:
    """Whether an open file could be locked, which it is until it is closed; None on a system without such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def hash_of_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
