"""Results in a folder: pictures and a table that grow as the work goes on, so that a stopped run resumes."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lrpfx.command_line.image_files import ImageFile
from lrpfx.deploy.files import locked, whole_file
from lrpfx.errors import InputError, first_lines, printable


@dataclass(frozen=True)
class Place:
    """A folder for results, with the names of its files, and of the columns between "file", and "version" and "problem"."""

    folder: Path
    settings: str  # a file with the settings of the last run
    table: str
    columns: tuple[str, ...]
    pictures: tuple[str, ...]  # the endings that are added to an image's name

    @property
    def all_columns(self) -> list[str]:
        return ["file", *self.columns, "version", "problem"]

    def pictures_of(self, image: ImageFile) -> list[Path]:
        """The paths of an image's pictures."""
        return [self.folder / f"{image.name}{ending}" for ending in self.pictures]


@dataclass
class Results:
    """Rows are appended to the table as they come. The last row of an image is valid; `results_in` drops others in the end."""

    place: Place
    before: dict[str, list[str]]  # rows of earlier runs, by the image's name
    file: TextIO
    problems: list[list[Any]] = field(default_factory=list)

    def has(self, image: ImageFile, version: str) -> bool:
        """Whether the image was explained already, and this is the version of the image and the settings."""
        with suppress(OSError):
            row = self.before.get(image.shown)
            return row is not None and row[-2] == version and all(path.is_file() for path in self.place.pictures_of(image))
        return False

    def add(self, image: ImageFile, values: Sequence[Any], version: str, problem: str = "") -> None:
        """Add the row of an image."""
        row = [image.shown, *values, version, problem]
        if problem:
            self.problems.append(row)
        csv.writer(self.file).writerow(row)
        self.file.flush()

    def add_problem(self, image: ImageFile, error: Exception) -> None:
        """Record why an image has no pictures, and remove those of a former version of the file."""
        for path in self.place.pictures_of(image):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self.add(image, [""] * len(self.place.columns), "", printable(first_lines(error)))

    def raise_problems(self, what: str) -> None:
        """Raise `InputError` with the problems, if there are any."""
        if self.problems:
            shown = [f"{row[0]}: {row[-1]}" for row in self.problems]
            rest = [f"and {len(shown) - 10} others, in {self.place.table}"] if len(shown) > 10 else []
            raise InputError(f"{what}:\n  " + "\n  ".join(shown[:10] + rest))


@contextmanager
def results_in(
    place: Place, settings: dict[str, Any], images: Sequence[ImageFile], command: str, one_program: bool
) -> Iterator[Results]:
    """The results in a folder, of earlier runs or new. In the end there is one row for each image.

    `one_program`: whether all results of the folder must have the same settings.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    path, table = place.folder / place.settings, place.folder / place.table
    text = json.dumps(settings).encode()
    with open(path, "a+b") as file:
        if locked(file.fileno()) is False:
            raise InputError(f"another run writes to {place.folder}")
        file.seek(0)
        before = file.read()
        if not before and table.exists():
            raise InputError(f"{place.folder} has an {place.table} that is not from {command}: choose another folder")
        if before and before != text and one_program:
            raise InputError(f"{place.folder} has the results of another program, or of other settings: choose another folder")
        rows = {name: row for name, row in _rows(table, place).items() if not row[-1]}
        if before != text:
            file.truncate(0)
            file.write(text)
            file.flush()
        _write_rows(table, [place.all_columns, *rows.values()])
        with open(table, "a", newline="", encoding="utf-8") as output:
            yield Results(place, rows, output)
        rows = _rows(table, place)
        names = [image.shown for image in images if image.shown in rows]
        ordered = dict.fromkeys([*names, *rows])  # those of removed images last
        _write_rows(table, [place.all_columns, *(rows[name] for name in ordered)])


def _rows(table: Path, place: Place) -> dict[str, list[str]]:
    """The last row of each image, by its name. The last row of a killed run may be truncated, and is dropped."""
    if not table.exists():
        return {}
    try:
        with open(table, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if len(row) == len(place.all_columns)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{table} is damaged ({error}): choose another folder, or remove it to start over") from error
    return {row[0]: row for row in rows[1:]}


def _write_rows(table: Path, rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    with whole_file(table, ".csv") as temporary:
        temporary.write_text(text.getvalue(), newline="", encoding="utf-8")
