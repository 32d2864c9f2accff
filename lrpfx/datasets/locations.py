"""Where a store lies: a folder of this machine, or a path of an object store that fsspec knows."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec

from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.support.files import as_path
from lrpfx.support.optional_packages import optional_package
from lrpfx.support.runs import sole_writer

_LOCAL = ("file://", "local://")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")  # what Zarr writes before it moves it to its place


class Location:
    """A folder, perhaps shared among machines, or a prefix of objects, such as "s3://bucket/store".

    `path`: a str if it has a scheme. `options`: of its file system. Names in it have "/" between their parts.
    """

    def __init__(self, path: Path | str, options: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.options = dict(options or {})
        self._opened()

    def __str__(self) -> str:
        return str(self.path)

    def _opened(self) -> tuple[Any, str]:
        """The file system, and where the store is in it."""
        if isinstance(self.path, Path):
            return fsspec.filesystem("file"), str(self.path)
        try:
            system, root = fsspec.core.url_to_fs(self.path, **self.options)
        except (ImportError, ValueError, TypeError, OSError) as error:
            raise InputError(
                f"{self.path} is not a path that fsspec opens here: {first_lines(error)}", topic="places-of-stores"
            ) from error
        if not str(root).strip("/"):
            raise InputError(f"{self.path} is a whole file system: give the path of a store in it", topic="places-of-stores")
        return system, str(root).rstrip("/")

    def zarr_store(self, read_only: bool = False) -> Any:
        """The store of Zarr."""
        stores = zarr_package().storage
        if isinstance(self.path, Path):
            return stores.LocalStore(self.path, read_only=read_only)
        system, root = self._opened()
        with self.errors("opened"):
            with suppress(ValueError):  # of a file system around one that is not asynchronous
                return stores.FsspecStore.from_url(self.path, storage_options=self.options, read_only=read_only)
            wrapper = import_module("fsspec.implementations.asyn_wrapper").AsyncFileSystemWrapper
            return stores.FsspecStore(wrapper(system, asynchronous=True), path=root, read_only=read_only)

    def content(self, name: str) -> bytes:
        """The content of a file."""
        system, root = self._opened()
        with self.errors("read"):
            found: bytes = system.cat_file(f"{root}/{name}")
        return found

    def sizes(self, folder: str = "") -> dict[str, int]:
        """What is in a folder, with sizes of files in bytes; nothing if there is none. Without what a killed writer left."""
        system, root = self._opened()
        path = f"{root}/{folder}".rstrip("/")
        with self.errors("read"):
            system.invalidate_cache()
            try:
                found = system.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        sizes = {}
        for one in found:
            name = str(one["name"])
            if name.strip("/") != path.strip("/"):
                sizes[name.rstrip("/").rpartition("/")[2]] = one["size"] or 0
            elif one.get("type") == "file" and not name.endswith("/"):
                raise ArtefactError(f"{path} is a file, not a folder", topic="places-of-stores")
        return {name: size for name, size in sizes.items() if not _PARTIAL.search(name)}

    def sizes_of_all(self, folder: str) -> dict[str, int]:
        """The files in a folder and in the folders in it, likewise."""
        system, root = self._opened()
        with self.errors("read"):
            system.invalidate_cache()
            found = system.find(f"{root}/{folder}".rstrip("/"), detail=True)
        start = root.strip("/") + "/"
        sizes = {str(name).strip("/").removeprefix(start): one["size"] or 0 for name, one in found.items()}
        return {name: size for name, size in sizes.items() if not _PARTIAL.search(name)}

    def is_read_only(self) -> bool:
        """Whether a folder that is there cannot be written to. Of an object store, that is not known before."""
        if not isinstance(self.path, Path) or not self.path.is_dir():
            return False
        path = self.path.resolve()
        return not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))  # the lock lies beside it

    def sole_writer(self) -> AbstractContextManager[None]:
        """A context in which no other run writes there, see `lrpfx.support.runs`. Object stores have no locks.

        Nor has a folder that cannot be written to.
        """
        return sole_writer(self.path) if isinstance(self.path, Path) and not self.is_read_only() else nullcontext()

    def make_lasting(self, names: Iterable[str]) -> None:
        """Return when files are where a power failure does not lose them, with the folders that they are in.

        Zarr leaves that to the system. Objects are there once they are written. A file that is not there is left out.
        """
        if isinstance(self.path, Path):
            files = [self.path / name for name in names]
            folders = {folder for file in files for folder in file.parents if folder.is_relative_to(self.path)}
            for path in [*files, *folders]:
                with suppress(FileNotFoundError):
                    _synchronize(path)

    def leftovers(self) -> list[str]:
        """The files that a killed writer left half written. Objects appear whole or not at all."""
        if not isinstance(self.path, Path):
            return []
        with self.errors("read"):
            found = self.path.rglob("*.partial")
            return sorted(left.relative_to(self.path).as_posix() for left in found if _PARTIAL.search(left.name))

    def remove(self, names: Iterable[str]) -> list[str]:
        """Remove files, as far as they are there. Returns the names of those that were, or may have been."""
        system, root = self._opened()
        removed = []
        with self.errors("written"):
            for name in dict.fromkeys(names):
                with suppress(FileNotFoundError):
                    system.rm_file(f"{root}/{name}")
                    removed.append(name)
        return removed

    def remove_leftovers(self) -> None:
        """Remove `leftovers`, unless nothing can be written."""
        if not self.is_read_only():
            self.remove(self.leftovers())

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn errors of the file system, which may have kinds of its own, into `ArtefactError`: it cannot be `what`."""
        try:
            yield
        except (LrpfxError, MemoryError):
            raise
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else first_lines(error)
            raise ArtefactError(f"{self.path} cannot be {what}: {reason}", topic="files-and-folders") from error


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def location_of(path: Any, options: Mapping[str, Any] | None = None) -> Location:
    """The location that a path means: "~" is the home folder, and a path with a scheme, such as "s3://", one for fsspec.

    `options`: for the file system of fsspec. Errors: `InputError`.
    """
    if options is not None and not isinstance(options, Mapping):
        raise InputTypeError(
            f"storage_options are a dict for the file system of fsspec, not {type(options).__name__}", topic="places-of-stores"
        )
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if isinstance(text, str) and text.startswith(_LOCAL):
        text = path = text.partition("://")[2]
    if isinstance(text, str) and ("://" in text or "::" in text):
        return Location(text if text.endswith("://") else text.rstrip("/"), options)
    if options:
        raise InputError(
            f"storage_options are for paths such as s3://bucket/store, and {path} is one of this machine",
            topic="places-of-stores",
        )
    try:
        return Location(as_path(path).expanduser().absolute())
    except FileNotFoundError as error:
        raise InputError(f"{path} is in the current folder, which is not there any more", topic="places-of-stores") from error
    except RuntimeError as error:
        raise InputError(f"{path}: {error}", topic="places-of-stores") from error


def zarr_package() -> Any:
    """The package zarr. `InputError` if it is not installed."""
    return optional_package("zarr", "a store of explanations", "datasets")
