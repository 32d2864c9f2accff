"""Tables of what a store holds, in Parquet: a row for each sample, with its scores and where its relevance went."""

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrpfx.datasets import layout
from lrpfx.datasets.rows import Block, Column, Numbers, column
from lrpfx.datasets.statistics import sums_of
from lrpfx.datasets.store import MANIFEST
from lrpfx.datasets.store_queries import checked_view, conditions_of, targets_of
from lrpfx.datasets.view import Attributions
from lrpfx.errors import ArtefactError, os_errors
from lrpfx.pictures.maps import Floats
from lrpfx.support.files import checked_path, whole_file
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import optional_package, progress_bar

SUFFIX = ".parquet"
PURPOSE, EXTRA = "a table in Parquet's format", "datasets"
_ENTRIES = 1 << 19  # of the rows that are in memory together
_NO_CLASS = -1


def write_table(view: Attributions, path: str | os.PathLike[str], *, top: int = 5, progress: bool = False) -> Path:
    """Write a table (.parquet) of the samples that are there at this moment, explained or failed.

    A sample has a row; if the store has several targets or conditions, one for each condition and target. Rows are read and
    written in groups, so memory does not grow with their number, and the file appears whole or not at all. Needs pyarrow.

    Parameters
    ----------
    view
        From `lrpfx.datasets.attribute` or `open`.
    path
        The file.
    top
        How many of the largest outputs a row has.
    progress
        Whether to show a bar (needs tqdm).

    Returns
    -------
    Path
        The path.

    Raises
    ------
    ArtefactError
        The file cannot be written, or the store is damaged.

    Notes
    -----
    The columns are:

    - "sample", the number, "key", "label" and "prediction"; "status", which is "explained" or "failed", and "error".
    - "target", and "condition" if there are any, as the manifest calls them.
    - Of outputs (samples, classes): "score_of_prediction", "score_of_label", and lists "top_classes" and "top_scores" of the
      `top` largest, in falling order; fewer if the store has fewer.
    - "seed", the relevance that the output was given; "reached", what of it reached the inputs; and "share_reached".
    - For each array of relevance, of the inputs ("relevance", or "relevance.NAME" of each of several) and of recorded layers
      ("layers.NAME"): "share.ARRAY", the sum of its entries / seed, and "absolute_share.ARRAY", the sum of their magnitudes /
      |seed|, which is larger where entries cancel. Entries are those of the store: of relevance that was reduced, magnitudes
      are those of sums. Shares of layers beside each other, as on both branches of a skip, are to be added.

    What a sample has not is null: a label or key, anything computed of a failed one, the score of a label that is not among the
    outputs that were stored, and shares of a seed of 0. The metadata of the schema has the manifest as JSON under "lrpfx".
    """
    view = checked_view(view, "view")
    given, target = checked_table_path(path)
    table = _Table(view, whole_number(top, "top is a number of classes", 0, "statistics"))
    parquet = optional_package("pyarrow.parquet", PURPOSE, EXTRA)
    with (
        os_errors(ArtefactError, given, "written"),
        whole_file(target, SUFFIX) as temporary,
        parquet.ParquetWriter(temporary, table.schema, compression="zstd") as writer,
    ):
        for group in progress_bar(table.groups(), progress, given.name, "group"):
            writer.write_table(group)
    return given


def checked_table_path(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The given path, and the file to write. `InputError` without pyarrow, `ArtefactError` where no table can be written."""
    optional_package("pyarrow", PURPOSE, EXTRA)
    return checked_path(path, (SUFFIX,))


class _Table:
    """The table of a store, in groups of rows."""

    def __init__(self, view: Attributions, top: int) -> None:
        self.view = view
        self.top = top
        self.arrow = optional_package("pyarrow", PURPOSE, EXTRA)
        self.conditions, self.targets = conditions_of(view), targets_of(view)
        self.of_sample = max(1, len(self.conditions)) * len(self.targets)  # rows
        self.has_scores = layout.PREDICTION in view
        self.arrays = layout.names_of_relevance(view.names)
        self.schema = self._schema()

    def _schema(self) -> Any:
        arrow = self.arrow
        whole, number, text = arrow.int64(), arrow.float64(), arrow.string()
        types = {"sample": whole, layout.KEY: text, layout.LABEL: whole}
        types |= {layout.PREDICTION: whole} if self.has_scores else {}
        types |= {layout.STATUS: text, layout.ERROR: text}
        types |= {layout.CONDITION: text} if self.conditions else {}
        types |= {layout.TARGET: text}
        if self.has_scores:
            types |= {"score_of_prediction": number, "score_of_label": number}
            types |= {layout.TOP_CLASSES: arrow.list_(whole), layout.TOP_SCORES: arrow.list_(number)} if self.top else {}
        types |= dict.fromkeys((layout.SEED, layout.REACHED, "share_reached"), number)
        types |= {name: number for array in self.arrays for name in _columns_of(array)}
        always = {"sample", layout.STATUS, layout.CONDITION, layout.TARGET}
        fields = [arrow.field(name, kind, nullable=name not in always) for name, kind in types.items()]
        return arrow.schema(fields, metadata={MANIFEST: json.dumps(self.view.manifest)})

    def groups(self) -> Iterator[Any]:
        """The rows of the samples that are there, in tables of Arrow."""
        numbers = np.flatnonzero(self.view.done)
        step = max(1, _ENTRIES // (len(self.schema) + 2 * self.top) // self.of_sample)
        for first in range(0, len(numbers), step):
            found = self._group(numbers[first : first + step])
            yield self.arrow.table([found[name] for name in self.schema.names], schema=self.schema)

    def _group(self, numbers: Numbers) -> dict[str, Any]:
        """The columns of some samples."""
        status = self._values(layout.STATUS, numbers)
        places = np.flatnonzero(status == layout.EXPLAINED)
        found = {
            "sample": self.arrow.array(numbers),
            layout.KEY: self._texts(self._values(layout.KEY, numbers)),
            layout.LABEL: self._classes(self._values(layout.LABEL, numbers)),
            layout.STATUS: self._texts(np.where(status == layout.EXPLAINED, "explained", "failed")),
            layout.ERROR: self._texts(self._values(layout.ERROR, numbers)),
        }
        if self.has_scores:
            found |= self._scores(numbers, places)
        if self.of_sample > 1:
            rows = self.arrow.array(np.arange(len(numbers)).repeat(self.of_sample))
            found = {name: values.take(rows) for name, values in found.items()}
        return {**found, **self._asked(len(numbers)), **self._shares(numbers, places)}

    def _values(self, name: str, numbers: Numbers) -> NDArray[Any]:
        return column(self.view[name], name).values(numbers)

    def _scores(self, numbers: Numbers, places: Numbers) -> dict[str, Any]:
        """The outputs of samples. `places`: those that are explained."""
        prediction, label = self._values(layout.PREDICTION, numbers), self._values(layout.LABEL, numbers)
        scores = {name: np.full(len(numbers), np.nan) for name in ("score_of_prediction", "score_of_label")}
        top: list[tuple[NDArray[Any], Floats]] = []
        for block in self._outputs().floats(numbers[places]):
            classes = self._classes_of_outputs(block)
            mine = places[block.places]
            scores["score_of_prediction"][mine] = _score_of(prediction[mine], classes, block.values)
            scores["score_of_label"][mine] = _score_of(label[mine], classes, block.values)
            order = np.argsort(-block.values, axis=1, kind="stable")[:, : self.top]
            top.append((np.take_along_axis(classes, order, 1), np.take_along_axis(block.values, order, 1)))
        found = {name: self._numbers(values) for name, values in scores.items()}
        if self.top:
            found |= {
                layout.TOP_CLASSES: self._lists([classes for classes, _ in top], len(numbers), places, self.arrow.int64()),
                layout.TOP_SCORES: self._lists([largest for _, largest in top], len(numbers), places, self.arrow.float64()),
            }
        return {layout.PREDICTION: self._classes(prediction), **found}

    def _outputs(self) -> Column:
        name = layout.OUTPUT if layout.OUTPUT in self.view else layout.TOP_SCORES
        if self.view[name].ndim != 2:
            raise ArtefactError(
                f"the array {name!r} of {self.view.path} does not have the dimensions of outputs", topic="damaged-stores"
            )
        return column(self.view[name], name)

    def _classes_of_outputs(self, block: Block) -> NDArray[Any]:
        """The class of each output."""
        if layout.OUTPUT in self.view:
            return np.broadcast_to(np.arange(block.values.shape[1]), block.values.shape)
        return self._values(layout.TOP_CLASSES, block.numbers)

    def _asked(self, count: int) -> dict[str, Any]:
        """The names of conditions and targets in each row of `count` samples."""
        pairs = list(product(self.conditions or [""], self.targets)) * count
        return {
            layout.CONDITION: self.arrow.array([one for one, _ in pairs]),
            layout.TARGET: self.arrow.array([one for _, one in pairs]),
        }

    def _shares(self, numbers: Numbers, places: Numbers) -> dict[str, Any]:
        """Where relevance went. `places`: those of the samples that are explained."""
        targets = self._sums(layout.SEED, numbers, places, len(self.targets))[0]
        seeds = np.tile(targets, (1, self.of_sample // len(self.targets)))  # the same for each condition
        reached = self._sums(layout.REACHED, numbers, places, self.of_sample)[0]
        found = {layout.SEED: seeds, layout.REACHED: reached, "share_reached": _share(reached, seeds)}
        for array in self.arrays:
            totals, magnitudes = self._sums(array, numbers, places, self.of_sample)
            values = (_share(totals, seeds), _share(magnitudes, np.abs(seeds)))
            found |= dict(zip(_columns_of(array), values, strict=True))
        return {name: self._numbers(values.ravel()) for name, values in found.items()}

    def _sums(self, name: str, numbers: Numbers, places: Numbers, rows: int) -> tuple[Floats, Floats]:
        """Sums of an array's entries and of their magnitudes, shape (samples, rows); NaN of those that failed."""
        found = np.full((len(numbers), rows), np.nan), np.full((len(numbers), rows), np.nan)
        for block in column(self.view[name], name).floats(numbers[places]):
            sums = sums_of(block.values.reshape(len(block.values), rows, -1), 2)
            for values, some in zip(found, sums, strict=True):
                values[places[block.places]] = some
        return found

    def _numbers(self, values: Floats) -> Any:
        return self.arrow.array(values, mask=~np.isfinite(values))

    def _classes(self, values: NDArray[Any]) -> Any:
        return self.arrow.array(values, mask=values == _NO_CLASS)

    def _texts(self, values: Any) -> Any:
        return self.arrow.array([str(one) or None for one in values], self.arrow.string())

    def _lists(self, blocks: list[NDArray[Any]], count: int, places: Numbers, kind: Any) -> Any:
        """A list of as many entries for each of some samples; of the others null."""
        lengths = np.zeros(count, dtype=np.int64)
        lengths[places] = blocks[0].shape[1] if blocks else 0
        missing = np.ones(count, dtype=bool)
        missing[places] = False
        flat = self.arrow.array(np.concatenate([one.ravel() for one in blocks]) if blocks else [], kind)
        offsets = self.arrow.array(np.concatenate([[0], lengths.cumsum()]), self.arrow.int32())
        return self.arrow.ListArray.from_arrays(offsets, flat, mask=self.arrow.array(missing))


def _columns_of(array: str) -> tuple[str, str]:
    """The names of the columns for an array of relevance."""
    return f"share.{array}", f"absolute_share.{array}"


def _score_of(wanted: NDArray[Any], classes: NDArray[Any], scores: Floats) -> Floats:
    """The score of one class of each sample, NaN where it is not among `classes`, (samples, classes)."""
    found = classes == wanted[:, None]
    return np.where(found.any(axis=1), scores[np.arange(len(scores)), found.argmax(axis=1)], np.nan)


def _share(values: Floats, seeds: Floats) -> Floats:
    """NaN where there is no share."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found: Floats = values / seeds
    return found
