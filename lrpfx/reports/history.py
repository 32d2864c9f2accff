"""The stages that an explainable module or a lowered program was compiled in."""

from typing import TYPE_CHECKING

from torch import nn
from torch.export import ExportedProgram

from lrpfx.errors import InputTypeError
from lrpfx.runtime.compiled_graph import HISTORY, PassRecord
from lrpfx.runtime.explain_module import explainable
from lrpfx.support.html import bullets, folded
from lrpfx.support.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame


class History(tuple[PassRecord, ...]):
    """The stages of a compilation, in order. Prints as a table; each stage prints as Python code."""

    __slots__ = ()
    columns = ("stage", "name", "matched", "left alone", "not verified")

    def to_pandas(self) -> "DataFrame":
        """The stages as a DataFrame with the attributes of `PassRecord` as columns. `InputError` without pandas.

        `matches` is a number; `details` and `reasons` have a line for each place.
        """
        names = ("stage", "name", "matches", "details", "reasons", "code", "unverified")
        columns = {name: "int64" if name == "matches" else "str" for name in names}
        rows = [[_text(getattr(one, name)) for name in names] for one in self]
        return Table(columns, rows).to_pandas()

    def __str__(self) -> str:
        rows = [(one.stage, one.name, one.matches, len(one.reasons), one.unverified) for one in self]
        numbers = dict.fromkeys(("matched", "left alone"), "int64")
        return str(Table(dict.fromkeys(self.columns, "str") | numbers, rows))

    def _repr_html_(self) -> str:
        """The table; what a stage changed, and what it left alone, is folded."""
        rows = [
            (one.stage, one.name, _places(one.matches, one.details), _places(len(one.reasons), one.reasons), one.unverified)
            for one in self
        ]
        return Table(dict.fromkeys(self.columns, "str"), rows).to_html()


def _text(value: str | int | tuple[tuple[str, str], ...]) -> str | int:
    return "\n".join(_lines(value)) if isinstance(value, tuple) else value


def _lines(places: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"{name}: {text}" for name, text in places]


def _places(count: int, places: tuple[tuple[str, str], ...]) -> str:
    """A number, and the places that it counts folded below it, if they are known."""
    return folded(str(count), bullets(_lines(places))) if places else str(count)


def history(compiled: nn.Module | ExportedProgram) -> History:
    """The stages that an explainable module or a lowered program was compiled in, in order.

    Each prints as Python code with the changes of its pass.

    `compiled`: the result of `lrpfx.transform` or `lrpfx.lower`. Raises `InputTypeError`: it is anything else.

    Examples
    --------
    >>> [record.name for record in lrpfx.history(explain_model)][:3]
    ['symbolic', 'normalize_operators', 'remove_inplace']
    """
    if not isinstance(compiled, ExportedProgram):
        return History(explainable(compiled, "history").compiled.history)
    if HISTORY not in compiled.graph_module.meta:
        raise InputTypeError("the program was not made by lrpfx.lower", topic="reports")
    return History(compiled.graph_module.meta[HISTORY])
