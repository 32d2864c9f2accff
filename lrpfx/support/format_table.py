"""Tables as text."""

from collections.abc import Sequence

from lrpfx.errors import printable


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A text table. Columns are as wide as their widest cell; the columns in `numbers` are right-aligned."""
    columns, rows = list(map(printable, columns)), [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(columns, cells, widths, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), "  ".join("-" * width for width in widths), *map(line, rows)])
