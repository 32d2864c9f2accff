"""Tables as text."""

from collections.abc import Sequence


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Rows under their columns, each as wide as its widest cell; the columns in `numbers` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(columns, cells, widths, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), "  ".join("-" * width for width in widths), *map(line, rows)])
