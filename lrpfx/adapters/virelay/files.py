"""The files of a project for ViRelAy: HDF5 files that appear whole, and projects of which the old or the new one is there."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from lrpfx.adapters.virelay.arrays import DifferentSizesError, invalid
from lrpfx.errors import ArtefactError, os_errors
from lrpfx.support.files import as_path, whole_file
from lrpfx.support.optional_packages import optional_package
from lrpfx.support.runs import sole_writer

#: The file of a project, which names all others.
PROJECT = "project.yaml"
SUFFIX = ".h5"
_FILES = "lrpfx-files-"

#: Raises the error of a write before, if there was one.
Check = Callable[[], None]


@contextmanager
def files_of_project(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """The folder of a project, made if need be, and a new folder in it for the project's files but the one that names them.

    The caller writes these, and then the project file. As that appears in one step, there is a whole project at any moment: the
    old one or the new one. Files that the project file does not name are removed before and after.
    """
    target = as_path(folder).expanduser()
    for one in (target, *target.absolute().parents):
        if (one / "zarr.json").exists():
            raise invalid(f"{one} is a Zarr store, which would be damaged: give another folder for the project")
    with os_errors(ArtefactError, target, "written"):
        target.mkdir(parents=True, exist_ok=True)
    with sole_writer(target / PROJECT):
        _remove_unused(target)
        files = next(path for number in count(1) if not (path := target / f"{_FILES}{number}").exists())
        try:
            with os_errors(ArtefactError, files, "written"):
                files.mkdir()
            yield target, files
        finally:
            _remove_unused(target)


def _remove_unused(folder: Path) -> None:
    """Remove files of older projects, and of those that were not finished."""
    try:
        project = (folder / PROJECT).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        project = ""
    except OSError:  # which of them are used is not known
        return
    for path in folder.glob(f"{_FILES}*"):
        if f"{path.name}/" not in project:
            shutil.rmtree(path, ignore_errors=True)


def write_samples(path: Path, write: Callable[[Any, Check, bool], None]) -> None:
    """Write samples as arrays; if their sizes turn out to differ, anew, as an array for each."""
    try:
        write_hdf5(path, lambda file, check: write(file, check, True))
    except DifferentSizesError:
        write_hdf5(path, lambda file, check: write(file, check, False))


class _Unfailing(io.RawIOBase):
    """A file that passes over what follows a failed write, and remembers the error.

    HDF5 tries a failed write again when it closes the file, and then brings the process down.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the error of a write before, if there was one."""
        if self.error is not None:
            raise self.error

    def write(self, content: Any, /) -> int:
        rest = memoryview(content).cast("B")
        size = len(rest)
        try:
            while self.error is None and rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None, /) -> int:
        try:
            if self.error is None:
                return self._file.truncate(size)
        except OSError as error:
            self.error = error
        return size or 0

    def readinto(self, place: Any, /) -> int | None:
        return self._file.readinto(place)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def write_hdf5(path: Path, write: Callable[[Any, Check], None]) -> None:
    """Write an HDF5 file, which appears at `path` whole or not at all. Errors: `ArtefactError`, and those of `write`.

    `write` is called with the file, and a function that it calls now and then, which raises an error if a write failed.
    It runs in a thread of its own: there Python handles no signals while HDF5 writes, which would bring the process down too.
    """
    h5py = optional_package("h5py", "an HDF5 file", "datasets")

    def work(target: _Unfailing) -> None:
        with h5py.File(target, "w") as file:
            write(file, target.check)

    with (
        os_errors(ArtefactError, path, "written"),
        whole_file(path, SUFFIX) as temporary,
        io.FileIO(temporary, "r+") as opened,
        ThreadPoolExecutor(1, "lrpfx-hdf5") as thread,
    ):
        target = _Unfailing(opened)
        try:
            thread.submit(work, target).result()
        except BaseException as error:
            if isinstance(target.error, OSError):
                raise target.error from error
            target.error = error  # of a call that is interrupted: it ends the thread
            raise
        target.check()
