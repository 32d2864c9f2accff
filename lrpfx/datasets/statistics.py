"""Statistics of stored relevance, in one pass: the mean map of each class, and how much relevance each layer carries."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lrpfx.datasets.reduced_maps import of_equal_weight, without_channels
from lrpfx.datasets.rows import Column, Numbers, Rows, chosen, column, labels_of
from lrpfx.datasets.store_queries import column_of_relevance
from lrpfx.errors import InputError, InputTypeError, nearest
from lrpfx.pictures import LEGEND, heatmap, scale_of, sheet
from lrpfx.pictures.maps import Floats
from lrpfx.support.html import Html
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

_SHOWN = 40  # rows of the table as text
_COLUMNS = {"array": "str", "class": "object", "samples": "int64"}
_COLUMNS |= dict.fromkeys(("total", "magnitude", "share"), "float64")


@dataclass(frozen=True)
class Statistic:
    """The relevance that one array has for one class, or for all samples, if `label` is None.

    `total`: the mean over samples of the sum over entries. `magnitude`: the same of absolute values. `share`: the part of the
    output's relevance that arrives here, Σ sign(seed) · total / Σ |seed|, or None without seeds. The rest is that of biases and
    other constants in the layers above, or flows around this layer.
    """

    array: str
    label: int | None
    samples: int
    total: float
    magnitude: float
    share: float | None


@dataclass(eq=False)
class _Sums:
    """Sums over the samples of one class in one array."""

    samples: int = 0
    total: float = 0.0
    magnitude: float = 0.0
    signed: float = 0.0
    seeds: float = 0.0
    maps: Any = field(default=0.0)

    def add(self, totals: Floats, magnitudes: Floats, maps: Floats, seeds: Floats | None) -> None:
        self.samples += len(totals)
        self.total += float(totals.sum())
        self.magnitude += float(magnitudes.sum())
        self.maps = self.maps + maps.sum(axis=0)
        if seeds is not None:
            self.signed += float((np.sign(seeds) * totals).sum())
            self.seeds += float(np.abs(seeds).sum())


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics by array: first of all samples, then of each class.

    `rows`: the statistics. `maps`: what `mean_map` returns, by array and class.
    """

    rows: tuple[Statistic, ...]
    maps: Mapping[str, Mapping[int | None, Floats]]

    def __iter__(self) -> Iterator[Statistic]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, array: str, label: int | None = None) -> Statistic:
        """The statistic of one array and class.

        `array`: its name. `label`: of the class, by default all samples. Errors: `InputError`: there is none.
        """
        self._check(array, label)
        return next(row for row in self.rows if (row.array, row.label) == (array, label))

    def mean_map(self, array: str, label: int | None = None) -> Floats:
        """The mean over samples of maps summed over channels, shape (height, width), or of vectors, shape (features,).

        `array`: its name. `label`: of the class, by default all samples. Errors: `InputError`: there is none.
        """
        self._check(array, label)
        return self.maps[array][label]

    def picture(self, array: str, *, columns: int = 5, names: Sequence[str] | None = None, **settings: Any) -> Image.Image:
        """The mean maps of all classes, in colours of one scale.

        `array`: its name. `columns`: how many maps stand in a row. `names`: of classes. `settings`: of `lrpfx.pictures.sheet`.
        Errors: `InputError`: the means are vectors, or there is no such array.
        """
        self._check(array, None)
        maps = {label: one for label, one in self.maps[array].items() if label is not None} or self.maps[array]
        if any(one.ndim != 2 for one in maps.values()):
            raise InputError(f"{array} has vectors, of which there is no picture", topic="statistics")
        scale = settings.pop("scale", None) or scale_of(list(maps.values()))
        drawn = [(self._title(array, label, names), heatmap(one, scale=scale)) for label, one in maps.items()]
        rows = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
        return sheet(rows, scale=scale, **{"title": f"mean of {array}", "legend": LEGEND, **settings})

    def to_pandas(self) -> "DataFrame":
        """The rows as a DataFrame with the columns array, class (None: all), samples, total, magnitude and share.

        Errors: `InputError`: Pandas is not installed.
        """
        rows = [(row.array, row.label, row.samples, row.total, row.magnitude, row.share) for row in self.rows]
        return Table(_COLUMNS, rows).to_pandas()

    def __str__(self) -> str:
        more = "" if len(self) <= _SHOWN else f"\n... and {len(self) - _SHOWN} more"
        return f"{self._shown()}{more}"

    def _repr_html_(self) -> Html:
        return self._shown().to_html()

    def _shown(self) -> Table:
        rows = []
        for row in self.rows[:_SHOWN]:
            share = None if row.share is None else f"{row.share:.1%}"
            rows.append((row.array, "all" if row.label is None else row.label, row.samples, row.total, row.magnitude, share))
        return Table(_COLUMNS, rows)

    def _title(self, array: str, label: int | None, names: Sequence[str] | None) -> str:
        of_class = "all" if label is None else names[label] if names is not None else f"class {label}"
        return f"{of_class} ({self.of(array, label).samples})"

    def _check(self, array: str, label: int | None) -> None:
        if array not in self.maps:
            raise InputError(
                f"there is no array {array!r}.{nearest(str(array), self.maps)} There are {list(self.maps)}", topic="statistics"
            )
        if label not in self.maps[array]:
            raise InputError(
                f"no sample has the class {label!r}; the classes are {[one for one in self.maps[array] if one is not None]}",
                topic="statistics",
            )


def summarize(
    relevance: Mapping[str, Rows | Sequence[Any]],
    labels: Any = None,
    *,
    seeds: Rows | None = None,
    samples: Any = None,
    normalize: bool = False,
    progress: bool = False,
) -> Summary:
    """The mean map of each class and the share of relevance that each layer has, in one pass over each array.

    Memory holds one map for each class and array.

    `relevance`: arrays with a row for each sample by name, such as the input's and those of layers: (channels, height, width),
    (height, width) or (features,). `labels`: integers of shape (samples,), negative for none; or booleans of shape (samples,
    classes), where a sample counts for each of its classes. `seeds`: the relevance that the output of each sample was given,
    shape (samples,), of which the shares are. `samples`: the numbers of the samples to use, by default all. `normalize`:
    whether each sample's map is divided by its sum of magnitudes before the mean is taken; totals and shares are as they were.
    `progress`: whether to show a bar (needs tqdm). Errors: `InputError`: a value is not finite, or a shape does not fit;
    `InputTypeError`: an argument has the wrong type.
    """
    if not isinstance(relevance, Mapping) or not relevance:
        raise InputTypeError("relevance is a mapping from names to arrays, with at least one", topic="statistics")
    arrays = {str(name): column_of_relevance(source, str(name)) for name, source in relevance.items()}
    count = len(next(iter(arrays.values())))
    for name, one in arrays.items():
        if len(one) != count:
            raise InputError(f"{name} has {len(one)} samples, the other arrays have {count}", topic="statistics")
    truth = None if labels is None else labels_of(labels, count)
    starts = None if seeds is None else column(seeds, "seeds", count)
    if starts is not None and starts.shape != ():
        raise InputError(
            "seeds are one number for each sample, of shape (samples,): the relevance that its output was given",
            topic="statistics",
        )
    wanted = chosen(samples, count)
    rows, maps = [], {}
    for name, one in arrays.items():
        sums = _sums(one, truth, starts, wanted, normalize, progress)
        rows += [_statistic(name, label, found) for label, found in sums.items()]
        maps[name] = {label: found.maps / found.samples for label, found in sums.items()}
    return Summary(tuple(rows), maps)


def _sums(
    array: Column, truth: Column | None, starts: Column | None, samples: Numbers, normalize: bool, progress: bool
) -> dict[int | None, _Sums]:
    """Sums of all samples, then of each class in order."""
    found: dict[int | None, _Sums] = {None: _Sums()}
    shape = None
    for block in progress_bar(array.floats(samples), progress, array.what, "block"):
        totals, magnitudes = sums_of(block.values)
        maps = without_channels(block.values, array.what)
        shape = maps.shape[1:] if shape is None else shape
        if maps.shape[1:] != shape:
            raise InputError(
                f"{array.what} of sample {block.numbers[0]} has another shape, so there is no mean map", topic="statistics"
            )
        maps = of_equal_weight(maps) if normalize else maps
        seeds = None if starts is None else np.concatenate([one.values for one in starts.floats(block.numbers)])
        labels = None if truth is None else truth.values(block.numbers)
        for label, mine in _members(labels):
            of_class = found.setdefault(label, _Sums())
            of_class.add(totals[mine], magnitudes[mine], maps[mine], None if seeds is None else seeds[mine])
    return dict(sorted(found.items(), key=lambda one: (one[0] is not None, one[0] or 0)))


def _members(labels: NDArray[Any] | None) -> Iterator[tuple[int | None, Any]]:
    """All rows, then those of each class."""
    yield None, slice(None)
    if labels is not None and labels.ndim == 2:
        yield from ((int(label), labels[:, label]) for label in np.flatnonzero(labels.any(axis=0)))
    elif labels is not None:
        yield from ((int(label), labels == label) for label in np.unique(labels) if label >= 0)


def sums_of(values: Floats, kept: int = 1) -> tuple[Floats, Floats]:
    """The sums of entries and of their magnitudes, over all dimensions but the first `kept`."""
    entries = values.reshape(*values.shape[:kept], -1)
    return entries.sum(axis=-1), np.abs(entries).sum(axis=-1)


def _statistic(array: str, label: int | None, sums: _Sums) -> Statistic:
    share = sums.signed / sums.seeds if sums.seeds else None
    return Statistic(array, label, sums.samples, sums.total / sums.samples, sums.magnitude / sums.samples, share)
