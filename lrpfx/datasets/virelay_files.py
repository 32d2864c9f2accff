"""The files of a project for ViRelAy: HDF5 files that appear whole, and projects of which the old or the new one is there."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from lrpfx.datasets.virelay_arrays import DifferentSizesError
from lrpfx.deploy.files import as_path, sole_writer, whole_file
from lrpfx.errors import ArtefactError, InputError, first_lines, os_errors
from lrpfx.support.optional_packages import optional_package

#: The file of a project, which names all others.
PROJECT = "project.yaml"
SUFFIX = ".h5"
_FILES = "lrpfx-files-"


@contextmanager
def files_of_project(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """The folder of a project, made if need be, and a new folder in it for the project's files but the one that names them.

    The caller writes these, and then the project file. As that appears in one step, there is a whole project at any moment: the
    old one or the new one. Files that the project file does not name are removed before and after.
    """
    target = as_path(folder).expanduser()
    for one in (target, *target.absolute().parents):
        if (one / "zarr.json").exists():
            raise InputError(f"{one} is a Zarr store, which would be damaged: give another folder for the project")
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


def write_samples(path: Path, write: Callable[[Any, bool], None]) -> None:
    """Write samples as arrays; if their sizes turn out to differ, anew, as an array for each."""
    try:
        with whole_hdf5(path) as file:
            write(file, True)
    except DifferentSizesError:
        with whole_hdf5(path) as file:
            write(file, False)


@contextmanager
def whole_hdf5(path: Path) -> Iterator[Any]:
    """A new HDF5 file, which appears at `path` if the context ends without an error."""
    h5py = optional_package("h5py", "an HDF5 file", "datasets")
    with os_errors(ArtefactError, path, "written"), whole_file(path, SUFFIX) as temporary:
        file = h5py.File(temporary, "w", locking=False)  # `whole_file` has locked it
        try:
            yield file
        except BaseException:
            with suppress(OSError, RuntimeError):
                file.close()
            raise
        try:
            file.close()
        except RuntimeError as error:  # what h5py makes of a disk that is full
            raise ArtefactError(f"{path} cannot be written: {first_lines(error)}") from error
