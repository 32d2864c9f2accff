"""Results in a folder: pictures and a table that grow as the work goes on, so that a stopped run resumes."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from lrpfx.command_line.image_files import HOPELESS, ImageFile, reason, whole_picture
from lrpfx.command_line.terminal import in_options
from lrpfx.errors import InputError, os_errors, printable
from lrpfx.support.files import check_place, whole_file
from lrpfx.support.runs import check_same_run, sole_writer
from lrpfx.support.table import as_cell, from_cell


@dataclass(frozen=True)
class ResultFolder:
    """A folder for results, with the names of its files, and of the columns between "source" and "version"."""

    path: Path
    settings: str  # a file with the settings of the last run
    table: str
    columns: tuple[str, ...]
    pictures: tuple[str, ...]  # the endings that are added to an image's name
    others: tuple[str, ...] = ()  # the endings of pictures that only runs with other settings make

    @property
    def all_columns(self) -> list[str]:
        return ["file", "source", *self.columns, "version", "problem"]

    def pictures_of(self, image: ImageFile) -> list[Path]:
        """The paths of an image's pictures."""
        return [self.path / f"{image.name}{ending}" for ending in self.pictures]

    def remove(self, image: ImageFile, endings: Iterable[str]) -> None:
        """Remove pictures of an image that are no longer valid."""
        for ending in endings:
            with suppress(OSError):
                (self.path / f"{image.name}{ending}").unlink(missing_ok=True)

    def check(self, command: str) -> None:
        """Raise `InputError` before the work begins if nothing can be written there, or if there are other results."""
        check_place(self.path, is_folder=True)
        if (self.path / self.table).exists() and not (self.path / self.settings).exists():
            raise InputError(
                f"{self.path} has an {self.table} that is not from {command}: choose another folder",
                topic="results-of-commands",
            )

    def writing(self) -> AbstractContextManager[None]:
        """A context in which errors of the file system are said to be of the folder."""
        return os_errors(InputError, self.path, "written to")


@dataclass
class Results:
    """Rows are appended to the table as they come. The last row of an image is valid; `results_in` drops others in the end.

    `images`: those to explain, with names that differ.
    """

    folder: ResultFolder
    images: list[ImageFile]
    before: dict[str, list[str]]  # rows of earlier runs, by the image's name
    file: TextIO
    problems: list[list[Any]] = field(default_factory=list)

    def has(self, image: ImageFile, version: str) -> bool:
        """Whether the image was explained already, and this is the version of the image and the settings."""
        with suppress(OSError):
            row = self.before.get(image.shown)
            current = row is not None and row[1] == image.source and row[-2] == version
            return current and all(path.is_file() for path in self.folder.pictures_of(image))
        return False

    def add(self, image: ImageFile, version: str, values: Sequence[Any], pictures: Sequence[Callable[[Path], object]]) -> None:
        """Add the row of an image, after its pictures: functions that write to a path.

        What the file system refuses is a problem of the image, or an `InputError` if it would refuse other files too.
        """
        try:
            for path, write in zip(self.folder.pictures_of(image), pictures, strict=True):
                with whole_picture(path) as temporary:
                    write(temporary)
        except OSError as error:
            if error.errno in HOPELESS:
                with self.folder.writing():
                    raise
            self.add_problem(image, error)
        else:
            self.folder.remove(image, self.folder.others)
            self._append([image.shown, image.source, *values, version, ""])

    def add_problem(self, image: ImageFile, error: Exception) -> None:
        """Record why an image has no pictures, and remove those of a former version of the file."""
        self.folder.remove(image, (*self.folder.pictures, *self.folder.others))
        empty = [""] * (len(self.folder.columns) + 1)
        row = [image.shown, image.source, *empty, printable(in_options(reason(error)))]
        self.problems.append(row)
        self._append(row)

    def _append(self, row: Sequence[Any]) -> None:
        with self.folder.writing():
            csv.writer(self.file).writerow(map(as_cell, row))
            self.file.flush()

    def raise_problems(self, what: str) -> None:
        """Raise `InputError` with the problems, if there are any."""
        if self.problems:
            shown = [f"{row[0]}: {row[-1]}" for row in self.problems]
            rest = [f"and {len(shown) - 10} others, in {self.folder.table}"] if len(shown) > 10 else []
            raise InputError(f"{what}:\n  " + "\n  ".join(shown[:10] + rest), topic="results-of-commands")


@contextmanager
def results_in(
    folder: ResultFolder, settings: dict[str, Any], images: Sequence[ImageFile], command: str, one_program: bool
) -> Iterator[Results]:
    """The results in a folder, of earlier runs or new. In the end there is one row for each image.

    `one_program`: whether all results of the folder must have the same settings.
    """
    path, table = folder.path / folder.settings, folder.path / folder.table
    text = json.dumps(settings)
    with sole_writer(path), ExitStack() as opened:
        with folder.writing():
            folder.check(command)
            if path.exists() and one_program:
                check_same_run(folder.path, json.loads(text), _settings_in(path))
            rows = {name: row for name, row in _rows(table, folder).items() if not row[-1]}
            with whole_file(path, ".json") as temporary:
                temporary.write_text(text)
            write_rows(table, [folder.all_columns, *rows.values()])
            output = opened.enter_context(open(table, "a", newline="", encoding="utf-8"))
        results = Results(folder, _with_names(images, rows), rows, output)
        yield results
        with folder.writing():
            rows = _rows(table, folder)
            names = [image.shown for image in results.images if image.shown in rows]
            ordered = dict.fromkeys([*names, *rows])  # those of removed images last
            write_rows(table, [folder.all_columns, *(rows[name] for name in ordered)])


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} is not from lrpfx: choose another folder, or remove it", topic="results-of-commands"
        ) from error


def _with_names(images: Iterable[ImageFile], rows: dict[str, list[str]]) -> list[ImageFile]:
    """The images with names that differ: a number is added to a name that a file of another folder has.

    An image keeps the name that it has in `rows`. The name of a file that is gone is free.
    """
    sources = {name: row[1] for name, row in rows.items()}
    found = []
    for image in images:
        free: ImageFile | None = None
        for number in count(1):
            own = image if number == 1 else ImageFile(image.path, _numbered(image.name, number))
            source = sources.get(own.shown)
            if source == image.source:
                break
            if free is None and (source is None or not os.path.lexists(source)):
                free = own
            if source is None:
                own = free or own
                break
        sources[own.shown] = image.source
        found.append(own)
    return found


def _numbered(name: str, number: int) -> str:
    path = Path(name)
    return str(path.with_stem(f"{path.stem}-{number}"))


def _rows(table: Path, folder: ResultFolder) -> dict[str, list[str]]:
    """The last row of each image, by its name. The last row of a killed run may be truncated, and is dropped."""
    if not table.exists():
        return {}
    try:
        with open(table, newline="", encoding="utf-8") as file:
            rows = [list(map(from_cell, row)) for row in csv.reader(file) if len(row) == len(folder.all_columns)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{table} is damaged ({error}): choose another folder, or remove it to start over", topic="results-of-commands"
        ) from error
    return {row[0]: row for row in rows[1:]}


def write_rows(table: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, whole or not at all, without cells that a spreadsheet takes for formulas."""
    text = io.StringIO()
    csv.writer(text).writerows(map(as_cell, row) for row in rows)
    with whole_file(table, ".csv") as temporary:
        temporary.write_text(text.getvalue(), newline="", encoding="utf-8")
