"""The result of a spectral relevance analysis: clusters of each class, as a table and as pictures."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lrpfx.datasets.images_of_samples import ImagesOfSamples
from lrpfx.datasets.reduced_maps import Size, without_channels
from lrpfx.datasets.rows import Numbers, without_label
from lrpfx.datasets.store_queries import column_of_relevance
from lrpfx.datasets.view import Attributions
from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures import LEGEND, heatmap, overlay, sheet
from lrpfx.pictures.maps import Floats
from lrpfx.support.html import Html
from lrpfx.support.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

_SEARCHED = 10  # numbers of clusters, also where fewer were asked for: one is not the answer because of that
_COLUMNS = {
    "class": "int64",
    "eigengap": "int64",
    "clusters": "int64",
    "gap": "float64",
    "cluster": "int64",
    "samples": "int64",
    "share": "float64",
    "typical": "str",
}


@dataclass(frozen=True)
class SpraySettings:
    """How the analysis was made: arguments of `lrpfx.datasets.spray`."""

    size: Size
    normalize: bool
    neighbors: int
    clusters: tuple[int, ...]
    dimensions: int
    embeddings: tuple[str, ...]
    typical: int
    seed: int


@dataclass(frozen=True, eq=False)
class Cluster:
    """Samples of a class with similar relevance.

    `share`: of the samples of the class. `typical`: numbers of samples, those whose maps are nearest to the mean first.
    `mean`: the mean of the maps as they were compared: summed over channels, pooled and normalized.
    """

    number: int
    size: int
    share: float
    typical: tuple[int, ...]
    mean: Floats


@dataclass(frozen=True, eq=False)
class Clustering:
    """Clusters of a class, the largest first. `assignment`: the cluster of each sample of the class.

    Fewer than were asked for if fewer points differ.
    """

    assignment: NDArray[np.int32]
    clusters: tuple[Cluster, ...]


@dataclass(frozen=True, eq=False)
class LabelAnalysis:
    """The samples of one class.

    `samples`: their numbers, rising; embeddings and assignments are in this order. `eigenvalues`: rising. `parts`: the number
    of connected components of the graph of neighbors. `embeddings`: "spectral" of shape (samples, dimensions), others of shape
    (samples, 2).
    `clusterings`: by the number of clusters, 1 and those that were asked for.
    """

    label: int
    samples: Numbers
    eigenvalues: Floats
    parts: int
    embeddings: Mapping[str, Floats]
    clusterings: Mapping[int, Clustering]

    @property
    def gaps(self) -> Floats:
        """The difference between each eigenvalue and the one before it: entry k - 1 speaks for k clusters."""
        return np.diff(self.eigenvalues)

    @property
    def eigengap(self) -> int:
        """The number of clusters behind which the gap is the largest, from 1 to 10 or the largest number that was asked for.

        It is 1 if the whole graph holds together better than any of its parts: there are no groups (von Luxburg 2007, section
        8.3). Clusters that overlap much may be fewer by this measure, and noise of three dimensions or less may be several.
        """
        return int(self.gaps[: max(_SEARCHED, *self.clusterings)].argmax()) + 1

    @property
    def best(self) -> int:
        """How many clusters there are: 1 if that is the eigengap, or else that of the largest gap among those asked for."""
        if self.eigengap == 1:
            return 1
        return max((one for one in self.clusterings if one > 1), key=lambda number: (self.gaps[number - 1], -number))

    def clustering(self, clusters: int | None = None) -> Clustering:
        """The clustering with this many clusters, by default `best`. `InputError` for a number that was not asked for."""
        number = self.best if clusters is None else clusters
        if number not in self.clusterings:
            raise InputError(
                f"there is no clustering with {number!r} clusters, only with {', '.join(map(str, self.clusterings))}",
                topic="statistics",
            )
        return self.clusterings[number]


@dataclass(frozen=True, eq=False)
class Spray:
    """The analyses of some classes, by label.

    `settings`: how the classes were analyzed. `analyses`: the analysis of each class. `skipped`: why other classes have none.
    """

    settings: SpraySettings
    analyses: Mapping[int, LabelAnalysis]
    skipped: Mapping[int, str]

    def __getitem__(self, label: int) -> LabelAnalysis:
        """The analysis of one class.

        `label`: of the class. Errors: `InputError`: there is none.
        """
        if label not in self.analyses:
            reason = f": {self.skipped[label]}" if label in self.skipped else f"; the classes are {list(self.analyses)}"
            raise InputError(f"class {label!r} was not analyzed{reason}", topic="statistics")
        return self.analyses[label]

    def __iter__(self) -> Iterator[LabelAnalysis]:
        return iter(self.analyses.values())

    def __len__(self) -> int:
        return len(self.analyses)

    def table(self, clusters: int | None = None) -> list[tuple[int, Cluster]]:
        """The clusters with the labels of their classes.

        `clusters`: how many each class has, by default its best number.
        """
        return [(label, one) for label, analysis in self.analyses.items() for one in analysis.clustering(clusters).clusters]

    def to_pandas(self, clusters: int | None = None) -> "DataFrame":
        """The table as a DataFrame: class, eigengap, clusters, the gap behind them, cluster, samples, share, typical samples.

        `clusters`: as for `table`. Errors: `InputError`: Pandas is not installed, or a class has no such number of clusters.
        """
        return Table(_COLUMNS, self._rows(clusters)).to_pandas()

    def to_dicts(self, clusters: int | None = None) -> list[dict[str, Any]]:
        """The rows of `to_pandas`. `clusters`: as for `table`."""
        return Table(_COLUMNS, self._rows(clusters)).to_dicts()

    def picture(
        self,
        label: int,
        relevance: Any,
        *,
        images: Any = None,
        preprocess: Callable[..., Any] | None = None,
        clusters: int | None = None,
        count: int = 6,
        **settings: Any,
    ) -> Image.Image:
        """A row for each cluster of a class: its mean map, and the relevance of its typical samples.

        `label`: of the class. `relevance`: what was analyzed. `images`: the inputs, as `lrpfx.pictures.photograph_of` accepts
        them; relevance is drawn over them. With the view of a store for the relevance, also the data set that was explained, or
        the folder that the names of its samples are paths in; what the model was given is shown. `preprocess`: from an image to
        the model's input, by default that of the store. `clusters`: as for `table`. `count`: how many samples a row has, at
        most. `settings`: those of `lrpfx.pictures.sheet`. Errors: `InputError`: the class was not analyzed or has no such
        number of clusters, its relevance is that of vectors, or the images are not those that were explained; `InputTypeError`:
        the images are in a folder, and the relevance is no view.
        """
        analysis = self[label]
        if isinstance(relevance, Attributions):
            if images is not None and not hasattr(images, "shape") and not isinstance(images, ImagesOfSamples):
                images = ImagesOfSamples(relevance, images, preprocess)
            relevance = relevance.relevance
        elif isinstance(images, (str, os.PathLike)):
            raise InputTypeError(
                "images in a folder are found by the names of the samples: pass the view of the store as the relevance",
                topic="statistics",
            )
        maps = column_of_relevance(relevance, "relevance")
        found = analysis.clustering(clusters).clusters
        if found[0].mean.ndim != 2:
            raise InputError("relevance of vectors has no picture: it was analyzed without positions", topic="statistics")
        rows = []
        for one in found:
            row = [(f"cluster {one.number}: {one.size} samples, {one.share:.0%}", heatmap(one.mean))]
            for sample in one.typical[:count]:
                (block,) = maps.floats(np.array([sample]))
                values = without_channels(block.values, maps.what)[0]
                row.append((f"sample {sample}", _drawn(values, images, sample)))
            rows.append(row)
        parts = f"{len(analysis.samples)} samples in {len(found)} cluster{'s' if len(found) > 1 else ''}"
        title = f"class {label}: {parts}; the largest gap of eigenvalues speaks for {analysis.eigengap}"
        return sheet(rows, **{"title": title, "legend": LEGEND, **settings})

    def _rows(self, clusters: int | None) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for label, analysis in self.analyses.items():
            number = analysis.best if clusters is None else clusters
            found = analysis.clustering(number).clusters
            of_class = label, analysis.eigengap, len(found), float(analysis.gaps[number - 1])
            rows += [(*of_class, one.number, one.size, one.share, " ".join(map(str, one.typical))) for one in found]
        return rows

    def _shown(self) -> Table:
        shown = [
            (*row[:3], f"{row[3]:.3f}", *row[4:6], f"{row[6]:.1%}", " ".join(row[7].split()[:5])) for row in self._rows(None)
        ]
        return Table(_COLUMNS, shown)

    def __str__(self) -> str:
        skipped = "".join(f"\nclass {label} was skipped: {reason}" for label, reason in self.skipped.items())
        return f"{self._shown()}{skipped}"

    def __repr__(self) -> str:
        return f"<SpRAy of {len(self)} classes, {sum(len(one.samples) for one in self)} samples>"

    def _repr_html_(self) -> Html:
        return self._shown().to_html()


def _drawn(values: Floats, images: Any, sample: int) -> Image.Image:
    """The map of a sample, over its image if there is one."""
    if images is None:
        return heatmap(values)
    return overlay(images.photograph(sample) if isinstance(images, ImagesOfSamples) else without_label(images[sample]), values)


def checked_spray(value: Any, what: str) -> Spray:
    """The value, if it is a `Spray`."""
    if not isinstance(value, Spray):
        raise InputTypeError(f"{what} is what lrpfx.datasets.spray returns, not a {type(value).__name__}", topic="statistics")
    return value
