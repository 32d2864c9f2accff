"""Explanations of rows of a table: relevance of features as bars, and of many rows as a swarm."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from PIL import Image
from typing_extensions import Unpack

from lrpfx import pictures
from lrpfx.errors import InputError
from lrpfx.explanation.answers import Answer, Array
from lrpfx.explanation.explanation import Explained, Several, caption_of
from lrpfx.explanation.saving import save_table_or_picture
from lrpfx.pictures import charts
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.support.html import image_html
from lrpfx.support.numbers import counted, whole_number
from lrpfx.support.optional_packages import optional_package

if TYPE_CHECKING:
    from pandas import DataFrame

_WIDTH = 1000
#: The style of charts that a sheet shows in their own size.
WITHIN = Style(width=_WIDTH - 24)
#: The part of an output that is not relevance of features.
CONSTANTS = "biases and constants"


@dataclass(frozen=True, eq=False, repr=False)
class TableExplanation(Explained):
    """Why a model gave a row of a table its output.

    It is plain data. `Explanation` describes `name`, `output`, `categories`, `answers`, `rules` and `scores`.

    `features`: their names. `values`: what the row holds, (features,); None where preprocessing made other features.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).eval()
    >>> explanation = lrpfx.explain(model, torch.tensor([1.5, -2.0]), names=["age", "income"])
    >>> explanation.features, explanation.relevance.shape
    (('age', 'income'), (2,))
    """

    features: tuple[str, ...]
    values: Array

    @property
    def relevance(self) -> Array:
        """Relevance of each feature, (features,)."""
        return self.answers[0].input_relevance

    def to_pandas(self) -> "DataFrame":
        """A row for each feature as a DataFrame: its value and its relevance, for several targets one column of each.

        Raises `InputError` without pandas.
        """
        pandas = optional_package("pandas", "a DataFrame")
        relevance = (answer.input_relevance for answer in self.answers)
        columns = {"value": list(self.values), **dict(zip(columns_of(self.answers), relevance, strict=True))}
        found: DataFrame = pandas.DataFrame(columns, index=pandas.Index(self.features, name="feature"))
        return found

    def waterfall(self, count: int = 12, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """Bars from zero to the output: those of the features, the largest first, and one of biases and other constants.

        A row that is one of several inputs has a bar for the others.

        `count`: how many features have bars of their own. `style`: how it is drawn. `settings`: fields of
        `lrpfx.pictures.Style`, which replace those of `style`.
        """
        count = whole_number(count, "count is a number of features", 1, "tables-series-and-waves")
        order = np.argsort(-np.abs(self.relevance), kind="stable")
        steps = [(self._titled(int(place)), float(self.relevance[place])) for place in order[:count]]
        if len(order) > count:
            rest = float(self.relevance[order[count:]].sum(dtype=np.float64))
            steps.append((f"{len(order) - count} other features", rest))
        if self.balance.others is not None:
            steps.append(("other inputs", self.balance.others))
        steps.append((CONSTANTS, self.balance.constants))
        output = (
            "output" if self.target.index is None or len(self.output) == 1 else f"output for {self._shown(self.target.name)}"
        )
        return charts.waterfall(steps, output, styled(style, settings))

    def sheet(self) -> Image.Image:
        """The waterfall with the name of the row and the rules."""
        return sheet_of_charts([(self.name, self.waterfall(style=WITHIN))], caption=caption_for(self))

    def layers(self, names: Sequence[str] | None = None) -> NoReturn:
        """Layers of tables have no places that could be drawn. Raises `InputError`. `names`: of nodes."""
        raise InputError(
            "layers are drawn over places of the input, which the features of a table are not: record= keeps the relevance of "
            "layers in `recorded`",
            topic="tables-series-and-waves",
        )

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the features as .csv.

        `path`: the file. Its ending names the form. Returns the path.
        """
        return save_table_or_picture(self, path)

    def _titled(self, place: int) -> str:
        name, value = self.features[place], self.values[place]
        if value is None:
            return name
        return f"{name} = {value:.4g}" if isinstance(value, (float, np.floating)) else f"{name} = {value}"

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self))


class TableExplanations(Several[TableExplanation]):
    """Explanations of several rows of a table, in their order.

    `items`: the explanations. `problems`: none.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).eval()
    >>> explanations = lrpfx.explain(model, torch.randn(50, 2), names=["age", "income"])
    >>> explanations.relevance.shape
    (50, 2)
    >>> picture = explanations.beeswarm()
    """

    def to_pandas(self) -> "DataFrame":
        """A row of relevance for each row of the table, and a column for each feature, as a DataFrame.

        For several targets, columns are pairs of a target and a feature. Raises `InputError` without pandas.
        """
        pandas = optional_package("pandas", "a DataFrame")
        first = self._some()[0]
        index = [one.name for one in self.items]
        frames = {
            title: pandas.DataFrame([one.answers[place].input_relevance for one in self.items], index, first.features)
            for place, title in enumerate(columns_of(first.answers))
        }
        found: DataFrame = pandas.concat(frames, axis=1) if len(frames) > 1 else next(iter(frames.values()))
        return found

    def beeswarm(self, count: int = 12, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """A row for each feature, those with the largest mean magnitude first, and in it a point for each row of the table.

        A point lies at the relevance, in the colour of the feature's value: from the lowest of all to the highest. Values that
        are not numbers are grey.

        `count`: how many features have rows. `style`, `settings`: as for `TableExplanation.waterfall`.
        """
        count = whole_number(count, "count is a number of features", 1, "tables-series-and-waves")
        order = np.argsort(-np.abs(self.relevance).mean(0), kind="stable")[:count]
        values = np.stack([_places(np.array([one.values[place] for one in self.items], dtype=object)) for place in order], 1)
        names = [self._some()[0].features[place] for place in order]
        return charts.swarm(names, self.relevance[:, order].astype(np.float64), values, styled(style, settings))

    def sheet(self) -> Image.Image:
        """The swarm with the rules."""
        first = self._some()[0]
        targets = {one._shown(one.target.name) for one in self.items}
        target = "" if len(first.output) == 1 else f" for {targets.pop()}" if len(targets) == 1 else " for the class of each"
        rows = counted(len(self), "row")
        title = f"relevance{target} of {rows}: from blue for the lowest value of a feature to red for the highest"
        return sheet_of_charts([(title, self.beeswarm(style=WITHIN))], caption=first.rules)

    def save(self, path: str | Path) -> Path:
        """Write the swarm as a picture, or the relevance of all rows as .csv.

        `path`: the file. Its ending names the form. Returns the path.
        """
        return save_table_or_picture(self, path)

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self))


def sheet_of_charts(charts_of: Sequence[tuple[str, Image.Image]], **settings: Any) -> Image.Image:
    """Charts below each other, under their titles. `settings`: as for `lrpfx.pictures.sheet`."""
    return pictures.sheet([charts.stacked(charts_of, WITHIN)], width=_WIDTH, **settings)


def caption_for(explained: Explained) -> str:
    """The rules, and how much of the output the map holds; for a single number, which is no class, the balance."""
    if explained.categories is None and len(explained.output) == 1:
        return f"{explained.rules}\n{explained.balance}"
    return caption_of(explained.rules, [explained.balance])


def columns_of(answers: Sequence[Answer]) -> list[str]:
    """A name of a column of relevance for each target."""
    return ["relevance"] if len(answers) == 1 else [answer.category.name for answer in answers]


def _places(values: Array) -> Array:
    """Values of a feature as shares from -1, for the lowest, to 1, for the highest; NaN where there are no numbers."""
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError):
        return np.full(len(values), np.nan)
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    shares: Array = 2 * (numbers - low) / (high - low) - 1 if high > low else np.zeros(len(values))
    return shares
