"""Where a store lies: a folder of this machine, or a path of an object store that fsspec knows."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lrpfx.deploy.files import as_path
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxError, first_lines, os_errors
from lrpfx.support.optional_packages import optional_package
from lrpfx.support.runs import sole_writer

_LOCAL = ("file://", "local://")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")  # what Zarr writes before it moves it to its place


class Location(ABC):
    """A folder or a prefix of objects. Names in it have "/" between their parts."""

    path: Path | str

    def __str__(self) -> str:
        return str(self.path)

    @abstractmethod
    def zarr_store(self, read_only: bool = False) -> Any:
        """The store of Zarr for this place."""

    @abstractmethod
    def content(self, name: str, most: int) -> bytes:
        """The content of a file. `ArtefactError` if there is none, or if it has more bytes than `most`."""

    @abstractmethod
    def sizes(self, folder: str = "") -> dict[str, int]:
        """What is in a folder, with sizes of files in bytes; nothing if there is none. Without what a killed writer left."""

    @abstractmethod
    def sizes_of_all(self, folder: str) -> dict[str, int]:
        """The files in a folder and in the folders in it, with their sizes in bytes. Without what a killed writer left."""

    @abstractmethod
    def prepared_for_writing(self) -> AbstractContextManager[None]:
        """A context in which this process writes to the place alone, as far as that can be made sure. Errors: `InputError`."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Remove what a killed writer left half written."""

    @abstractmethod
    def errors(self, what: str) -> AbstractContextManager[None]:
        """Turn errors of the place into `ArtefactError`: it cannot be `what`, such as "read"."""


class Folder(Location):
    """A folder. Other machines see it too if it is shared among them."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def zarr_store(self, read_only: bool = False) -> Any:
        return zarr_package().storage.LocalStore(self.path, read_only=read_only)

    def content(self, name: str, most: int) -> bytes:
        file = self.path / name
        with os_errors(ArtefactError, file, "read"):
            if file.stat().st_size > most:
                raise ArtefactError(f"{file} is too large", topic="places-of-stores")
            return file.read_bytes()

    def sizes(self, folder: str = "") -> dict[str, int]:
        with self.errors("read"):
            try:
                entries = os.scandir(self.path / folder)
            except FileNotFoundError:
                return {}
            except NotADirectoryError as error:
                raise ArtefactError(f"{self.path / folder} is a file, not a folder", topic="places-of-stores") from error
            with entries:
                return {one.name: _size(one) for one in entries if not _PARTIAL.search(one.name)}

    def sizes_of_all(self, folder: str) -> dict[str, int]:
        with self.errors("read"):
            files = (Path(path, name) for path, _, names in os.walk(self.path / folder) for name in names)
            return {one.relative_to(self.path).as_posix(): _size(one) for one in files if not _PARTIAL.search(one.name)}

    def prepared_for_writing(self) -> AbstractContextManager[None]:
        return sole_writer(self.path)

    def remove_leftovers(self) -> None:
        with self.errors("read"):
            for left in self.path.rglob("*.partial"):
                if _PARTIAL.search(left.name):
                    left.unlink()

    def errors(self, what: str) -> AbstractContextManager[None]:
        return os_errors(ArtefactError, self.path, what)


class Remote(Location):
    """A path of an object store or another file system of fsspec, such as "s3://bucket/store".

    `options`: of the file system. Objects appear whole or not at all there, and nothing is locked.
    """

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self.path: str = path
        self.options = dict(options)
        self._opened()

    def _opened(self) -> tuple[Any, str]:
        fsspec = optional_package("fsspec", f"the path {self.path}")
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
        system, root = self._opened()
        kind = zarr_package().storage.FsspecStore
        with self.errors("opened"):
            with suppress(ValueError):  # of a file system around one that is not asynchronous
                return kind.from_url(self.path, storage_options=self.options, read_only=read_only)
            wrapper = import_module("fsspec.implementations.asyn_wrapper").AsyncFileSystemWrapper
            return kind(wrapper(system, asynchronous=True), path=root, read_only=read_only)

    def content(self, name: str, most: int) -> bytes:
        system, root = self._opened()
        with self.errors("read"):
            found: bytes = system.cat_file(f"{root}/{name}", start=0, end=most + 1)
        if len(found) > most:
            raise ArtefactError(f"{self.path}/{name} is too large", topic="places-of-stores")
        return found

    def sizes(self, folder: str = "") -> dict[str, int]:
        system, root = self._opened()
        place = f"{root}/{folder}".rstrip("/")
        with self.errors("read"):
            system.invalidate_cache()
            try:
                found = system.ls(place, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        sizes = {}
        for one in found:
            name = str(one["name"])
            if name.strip("/") != place.strip("/"):
                sizes[name.rstrip("/").rpartition("/")[2]] = one["size"] or 0
            elif one.get("type") == "file" and not name.endswith("/"):
                raise ArtefactError(f"{place} is a file, not a folder", topic="places-of-stores")
        return sizes

    def sizes_of_all(self, folder: str) -> dict[str, int]:
        system, root = self._opened()
        with self.errors("read"):
            system.invalidate_cache()
            found = system.find(f"{root}/{folder}", detail=True)
        start = root.strip("/") + "/"
        return {str(name).strip("/").removeprefix(start): one["size"] or 0 for name, one in found.items()}

    def prepared_for_writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def remove_leftovers(self) -> None:
        pass

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (LrpfxError, MemoryError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError):
                raise ArtefactError(f"{self.path} cannot be {what}: there is no {error}", topic="files-and-folders") from error
            raise
        except Exception as error:  # file systems of fsspec have errors of their own
            raise ArtefactError(f"{self.path} cannot be {what}: {first_lines(error)}", topic="files-and-folders") from error


def _size(entry: "os.DirEntry[str] | Path") -> int:
    """The size of a file in bytes; 0 for a link that leads nowhere, and for what was removed in between."""
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def location_of(path: Any, options: Mapping[str, Any] | None = None) -> Location:
    """The place that a path means: "~" is the home folder, and a path with a scheme, such as "s3://", one for fsspec.

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
        return Remote(text if text.endswith("://") else text.rstrip("/"), options or {})
    if options:
        raise InputError(
            f"storage_options are for paths such as s3://bucket/store, and {path} is one of this machine",
            topic="places-of-stores",
        )
    try:
        return Folder(as_path(path).expanduser().absolute())
    except FileNotFoundError as error:
        raise InputError(f"{path} is in the current folder, which is not there any more", topic="places-of-stores") from error
    except RuntimeError as error:
        raise InputError(f"{path}: {error}", topic="places-of-stores") from error


def zarr_package() -> Any:
    """The package zarr. `InputError` if it is not installed."""
    return optional_package("zarr", "a store of explanations", "datasets")
