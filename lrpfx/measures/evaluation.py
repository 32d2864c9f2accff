"""`lrpfx.evaluate`: methods beside each other, by metrics with confidence intervals."""

import os
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from lrpfx.datasets.engines import Engine
from lrpfx.errors import nearest
from lrpfx.measures.data import Data, invalid, names_of_groups
from lrpfx.measures.intervals import Mean, means
from lrpfx.measures.methods import BuiltMethods
from lrpfx.measures.metrics import Metric, as_metrics
from lrpfx.measures.run import check_data, methods_for, rows_of
from lrpfx.pictures import Style
from lrpfx.pictures.charts import ranges, stacked
from lrpfx.support.html import element
from lrpfx.support.numbers import whole_number
from lrpfx.support.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

_DTYPES = {
    **dict.fromkeys(("method", "metric", "better"), "str"),
    **dict.fromkeys(("mean", "low", "high"), "float64"),
}


@dataclass(frozen=True)
class Score:
    """The mean of one method by one metric, with its 95 % confidence interval.

    `method` and `metric`: their names. `mean`: of the groups' means. `low` and `high`: the bounds of the interval. `better`:
    "higher", "lower", or "" for a metric that only describes maps.
    """

    method: str
    metric: str
    mean: float
    low: float
    high: float
    better: str


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Methods measured by metrics: a table with confidence intervals, which prints.

    Attributes
    ----------
    methods
        The names of the methods.
    metrics
        The names of the columns, with what is better: "higher", "lower", or "" for neither.
    samples
        The number of each input, (methods, metrics, inputs), float64.
    groups
        What each input belongs to.
    prices
        The time of a map by each method, in the `unit`: the median over the batches of its time divided by that of a gradient,
        or for `PartData` over the inputs, by that of a forward.
    notes
        What was chosen for a method, by its name, such as the layer of Grad-CAM.
    unit
        "gradients" or "forwards".
    noun
        What an input is, such as "image".
    scores
        The means, methods first.
    """

    methods: tuple[str, ...]
    metrics: Mapping[str, str]
    samples: torch.Tensor
    groups: tuple[Hashable, ...]
    prices: Mapping[str, float]
    notes: Mapping[str, str]
    unit: str = "gradients"
    noun: str = "image"
    scores: tuple[Score, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = [(method, metric) for method in self.methods for metric in self.metrics]
        found = means(self.of_groups().flatten(0, 1))
        scores = [
            Score(method, metric, one.mean, one.low, one.high, self.metrics[metric])
            for (method, metric), one in zip(names, found, strict=True)
        ]
        object.__setattr__(self, "scores", tuple(scores))

    def of_groups(self) -> torch.Tensor:
        """The means of the groups, (methods, metrics, groups)."""
        places: dict[Hashable, list[int]] = {}
        for number, group in enumerate(self.groups):
            places.setdefault(group, []).append(number)
        return torch.stack([self.samples[..., numbers].mean(-1) for numbers in places.values()], -1)

    def difference(self, method: str, other: str, metric: str) -> Score:
        """How much a method has more than another, group by group: an interval without 0 tells them apart.

        Intervals of two methods may overlap although one is better for almost every group.

        Parameters
        ----------
        method, other
            The names of the methods.
        metric
            The name of a column.

        Raises
        ------
        InputError
            A name is unknown.
        """
        column = _place("metric", metric, list(self.metrics))
        rows = [_place("method", one, self.methods) for one in (method, other)]
        first, second = self.of_groups()[rows, column]
        (found,) = means((first - second)[None])
        return Score(f"{method} - {other}", metric, found.mean, found.low, found.high, self.metrics[metric])

    def to_pandas(self) -> "DataFrame":
        """One row for each method and metric. `InputError` without pandas."""
        rows = [
            (one.method, one.metric, one.better, one.mean, one.low, one.high, self.prices[one.method]) for one in self.scores
        ]
        return Table({**_DTYPES, self.unit: "float64"}, rows).to_pandas()

    def plot(self, style: Style | None = None) -> Image.Image:
        """A chart for each metric: the mean of each method and its interval, the best above.

        Parameters
        ----------
        style
            Its `width` and `font` are used.
        """
        style = style or Style()
        charts = []
        for metric, better in self.metrics.items():
            scores = [one for one in self.scores if one.metric == metric]
            if better:
                scores.sort(key=lambda one: one.mean, reverse=better == "higher")
            title = f"{metric} ({better} is better)" if better else metric
            charts.append((title, ranges([(one.method, one.low, one.mean, one.high) for one in scores], style)))
        return stacked(charts, style)

    def __str__(self) -> str:
        return "\n".join([str(self._table()), "", *self._remarks()])

    def _repr_html_(self) -> str:
        return self._table().to_html() + "".join(element("p", one) for one in self._remarks())

    def _table(self) -> Table:
        """A row for each method and a column for each metric."""
        cells: dict[str, list[str]] = {method: [] for method in self.methods}
        for one in self.scores:
            cells[one.method].append(str(Mean(one.mean, one.low, one.high)))
        columns = {"method": "str", **dict.fromkeys(self.metrics, "float64"), self.unit: "float64"}
        return Table(columns, [(name, *row, f"{self.prices[name]:.1f}") for name, row in cells.items()])

    def _remarks(self) -> list[str]:
        """What the table does not say: its counts, which direction is better, what was chosen."""
        count = len(set(self.groups))
        remarks = [
            f"means over {count} groups of {len(self.groups)} {self.noun}s, with 95 % bootstrap intervals over the groups"
        ]
        lower = [name for name, better in self.metrics.items() if better == "lower"]
        neither = [name for name, better in self.metrics.items() if not better]
        if lower:
            remarks.append(f"lower is better: {', '.join(lower)}")
        if neither:
            remarks.append(f"describes maps, and does not rank them: {', '.join(neither)}")
        return [*remarks, *(f"{name}: {note}" for name, note in self.notes.items())]


def _place(what: str, name: str, known: Sequence[str]) -> int:
    if name not in known:
        raise invalid(f"there is no {what} {name!r}; there are {', '.join(known)}.{nearest(str(name), known)}")
    return known.index(name)


def evaluate(
    methods: Any,
    data: Data,
    metrics: Any = None,
    *,
    batch_size: int = 16,
    output: str | os.PathLike[str] | None = None,
    engine: str | Engine = "embedded",
    progress: bool = False,
) -> Evaluation:
    """Measure how good the maps of several methods are, beside each other on the same images.

    A map of an image is the sum of relevance over the channels. Everything random has a fixed seed. What is filled with the
    "mean", the baseline of integrated gradients and the reference of DeepLIFT are the mean of each channel of the image.

    Parameters
    ----------
    methods
        Names of `lrpfx.measures.METHODS`: composites, "gradient_times_input", "integrated_gradients" and "smooth_grad" (each
        with 20 gradients; the last one by its magnitude), "occlusion" (of blocks, a fourteenth of the shorter side), "grad_cam"
        (of the last module whose output has places, which the result states) and "random", which anything should beat. Or a
        dict from names to these names, to composites, or to functions of (model, images, targets) that return relevance,
        (n, C, H, W) or (n, H, W), for images, (n, C, H, W), and classes, (n,), or to explainers of the model. A composite by
        name that needs the range of the input gets that of each channel of all images. An `lrpfx.Explainer` alone is a method
        named "explainer". For `lrpfx.measures.PartData`, functions take (input, target) and return relevance of its parts,
        (parts,), and the methods by name are composites, "occlusion" (of one part after the other), "random", and for arrays
        those with gradients.
    data
        The model, its images, and what is known about them; or `lrpfx.measures.PartData` for texts, arrays and graphs.
    metrics
        Names of `lrpfx.measures.METRICS`, or objects with settings such as `lrpfx.measures.RegionPerturbation(fill="blur")`; by
        default all that the data allow, except for those that explain again: "sensitivity" and "randomization".
    batch_size
        How many images, or copies of one input, run together.
    output
        The path of a file, ".json", that keeps the numbers. A run that was stopped, even killed, goes on from it, and one that
        is complete is read; another model, other inputs, methods or metrics are an error.
    engine
        "embedded" for this process, "ray", or an `lrpfx.datasets.RayEngine`, whose processes share the inputs.
    progress
        Whether to show a bar of the inputs that are done (needs tqdm).

    Returns
    -------
    Evaluation
        Means with intervals, which print, and the price of each method.

    Raises
    ------
    InputError
        A name is unknown, metrics or data do not fit, a map has another shape or values that are not finite, or `output` was
        begun with something else.
    ArtefactError
        `output` cannot be read or written, or is another file.
    InputTypeError
        Something has the wrong type.

    Examples
    --------
    >>> data = lrpfx.measures.ImageData(model, x, groups=["cat", "dog"])
    >>> evaluation = lrpfx.evaluate(["epsilon_plus", "random"], data, "random_masks")
    >>> [(score.method, score.metric) for score in evaluation.scores]
    [('epsilon_plus', 'random_masks_mean'), ('random', 'random_masks_mean')]
    """
    size = whole_number(batch_size, "batch_size is a number of inputs", 1, "evaluation")
    check_data(data)
    return measured(methods_for(methods, data, size), as_metrics(metrics, data), output, engine, progress)


def measured(
    built: BuiltMethods,
    metrics: Sequence[Metric],
    output: Any = None,
    engine: str | Engine = "embedded",
    progress: bool = False,
    numbers: Sequence[int] | None = None,
) -> Evaluation:
    """The methods by the metrics. `numbers`: of which inputs, by default all. Other arguments: as for `evaluate`."""
    rows = rows_of(built, metrics, output, engine, progress, numbers)
    order = sorted(range(len(rows.numbers)), key=lambda place: rows.numbers[place])
    return Evaluation(
        tuple(built.explain),
        {name: better for metric in metrics for name, better in metric.columns.items()},
        torch.tensor([rows.values[place] for place in order], dtype=torch.float64).movedim(0, 2),
        tuple(names_of_groups(built.data)[rows.numbers[place]] for place in order),
        {name: statistics.median(ratios) for name, ratios in rows.ratios.items()},
        built.notes,
        built.unit,
        built.data.noun,
    )
