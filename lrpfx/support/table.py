"""Tables: columns with the types of their values, and rows, in every form that they are shown or passed on in."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from lrpfx.support.format_table import format_table
from lrpfx.support.html import Html, html_table
from lrpfx.support.optional_packages import data_frame

if TYPE_CHECKING:
    from pandas import DataFrame

Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """Columns by name, each with the dtype of its values ("str", "int64", "float64" or "bool"), and rows of values.

    Columns of numbers stand on the right. A float is shown with four digits, and None as an empty cell; cells that are to look
    otherwise are given as text.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        return format_table(list(self.columns), self.cells(), self._numbers())

    def to_html(self) -> Html:
        """A table for notebooks. Cells that are `Html` are put in as they are."""
        return html_table(list(self.columns), self.cells(), self._numbers())

    def to_markdown(self) -> str:
        """A table for documents."""
        sides = ["---:" if name in self._numbers() else "---" for name in self.columns]
        return "".join(f"| {' | '.join(line)} |\n" for line in (self.columns, sides, *self.cells()))

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows by the names of the columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_pandas(self) -> "DataFrame":
        """A DataFrame with the dtypes of the columns. Raises `InputError` without pandas."""
        return data_frame(self.to_dicts(), self.columns)

    def cells(self) -> list[list[str]]:
        """The rows as they are shown."""
        return [list(map(_cell, row)) for row in self.rows]

    def _numbers(self) -> list[str]:
        return [name for name, dtype in self.columns.items() if dtype in ("int64", "float64")]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else "" if value is None else str(value)


class Rows(Sequence[Row], Generic[Row]):
    """A sequence of the rows of a report."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


#: How a cell begins that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def as_cell(value: Any) -> Any:
    """A value as a cell of CSV that no spreadsheet takes for a formula: behind an apostrophe, unless it holds numbers."""
    if not isinstance(value, str) or not value.lstrip("'").startswith(_FORMULA) or _holds_numbers(value):
        return value
    return f"'{value}"


def from_cell(cell: str) -> str:
    """The text of which `as_cell` made this cell."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_FORMULA) else cell


def _holds_numbers(cell: str) -> bool:
    try:
        return bool([float(one) for one in cell.split(";")])
    except ValueError:
        return False


def as_csv(frame: "DataFrame") -> str:
    """A DataFrame as CSV, with cells and headers that no spreadsheet takes for formulas."""
    text = io.StringIO()
    rows = csv.reader(io.StringIO(frame.to_csv(), newline=""))
    csv.writer(text, lineterminator="\n").writerows(map(as_cell, row) for row in rows)
    return text.getvalue()
