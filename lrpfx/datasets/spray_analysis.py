"""Spectral relevance analysis: groups of samples that a model classifies for the same reason (Lapuschkin et al. 2019)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lrpfx.datasets.clusters import Cluster, Clustering, LabelAnalysis, Spray, SpraySettings
from lrpfx.datasets.layout import NODES
from lrpfx.datasets.reduced_maps import Size, checked_size, of_equal_weight, pooled, without_channels
from lrpfx.datasets.rows import Column, Numbers, Rows, chosen, labels_of, samples_by_label
from lrpfx.datasets.spectral import EXTRA, PURPOSE, Spectrum, affinity_of, spectrum_of
from lrpfx.datasets.store_queries import classes_of_relevance, column_of_relevance, sole_target
from lrpfx.datasets.view import Attributions
from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures.maps import Floats
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import optional_package, progress_bar

CLUSTERS = (2, 3, 4, 5, 6, 8, 10)
EMBEDDINGS = ("tsne", "umap")
_STARTS = 10  # of k-means, of which the best counts
_PERPLEXITY = 30.0
_SEEDS = 2**32  # that NumPy's generator takes


def spray(
    relevance: Attributions | Rows | Sequence[Any],
    labels: Any = None,
    *,
    classes: Iterable[int] | None = None,
    samples: Any = None,
    size: Size = 32,
    normalize: bool = True,
    neighbors: int = 10,
    clusters: Iterable[int] = CLUSTERS,
    dimensions: int = 32,
    embeddings: Iterable[str] = ("tsne",),
    typical: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> Spray:
    """Cluster the relevance of the samples of each class: a cluster that looks at something else is a strategy of its own.

    Maps are summed over channels, pooled, and compared by their Euclidean distances. Each class gets a graph of nearest
    neighbors, the eigenvectors of its normalized Laplacian, and for each number k in `clusters`, k-means of the first k
    eigenvectors. A large gap behind the k-th eigenvalue speaks for k clusters, one behind the first for a class without
    groups. Memory holds the pooled maps of one class. It
    needs scikit-learn: `pip install 'lrpfx[datasets]'`.

    Parameters
    ----------
    relevance
        Of the input or of a layer: a row for each sample, of shape (channels, height, width), (height, width) or (features,),
        or a sequence of such if shapes differ. Or a view of a store, for the relevance of its input and the samples that are
        explained.
    labels
        The class of each sample, such as the predicted one: integers, negative for none, or booleans of shape (samples,
        classes); of a store by default the class that relevance is of.
    classes
        Those to analyze; by default all, and those that have too few samples or identical maps are listed in the result as
        skipped.
    samples
        The numbers of the samples to use, by default all.
    size
        Of pooled maps, the longer side at most, or (height, width); None does not pool.
    normalize
        Whether each map is divided by its sum of magnitudes.
    neighbors
        How many neighbors a sample has in the graph.
    clusters
        The numbers of clusters to try, besides 1.
    dimensions
        Of the spectral embedding, at most.
    embeddings
        Of that in two dimensions, "tsne" and "umap" (package umap-learn).
    typical
        How many samples represent a cluster.
    seed
        Of k-means and the embeddings; the same seed gives the same result.
    progress
        Whether to show a bar (needs tqdm).

    Raises
    ------
    InputError
        A value is not finite, an argument has an invalid value, a class that was asked for cannot be analyzed, or none can.
    InputTypeError
        An argument has the wrong type.
    """
    if isinstance(relevance, Attributions):
        sole_target(relevance, "SpRAy")
        labels = classes_of_relevance(relevance, "SpRAy") if labels is None else labels
        samples = relevance.explained if samples is None else samples
        _check_nodes(relevance)
        relevance = relevance.relevance
    if labels is None:
        raise InputTypeError("labels are the class of each sample, such as the predicted one", topic="statistics")
    maps = column_of_relevance(relevance, "relevance")
    wanted = chosen(samples, len(maps))
    if not isinstance(clusters, Iterable):
        raise InputTypeError(
            f"clusters are the numbers of clusters to make, such as [2, 3, 4], not {clusters!r}", topic="statistics"
        )
    numbers = sorted({whole_number(one, "a number of clusters is a whole number", 2, "statistics") for one in clusters})
    if not numbers:
        raise InputError("clusters are the numbers of clusters to make, such as [2, 3, 4]", topic="statistics")
    if not isinstance(embeddings, Iterable):
        raise InputTypeError(
            f"embeddings are some of {' and '.join(map(repr, EMBEDDINGS))}, or none: (), not {embeddings!r}", topic="statistics"
        )
    drawn = tuple(embeddings) if not isinstance(embeddings, str) else (embeddings,)
    if not all(one in EMBEDDINGS for one in drawn):
        raise InputError(f"embeddings are {' and '.join(map(repr, EMBEDDINGS))}, not {drawn!r}", topic="statistics")
    settings = SpraySettings(
        size=checked_size(size),
        normalize=bool(normalize),
        neighbors=whole_number(neighbors, "neighbors is a number of samples", 1, "statistics"),
        clusters=tuple(numbers),
        dimensions=whole_number(dimensions, "dimensions is a number", 2, "statistics"),
        embeddings=tuple(name for name in EMBEDDINGS if name in drawn),
        typical=whole_number(typical, "typical is a number of samples", 1, "statistics"),
        seed=whole_number(seed, "seed is a whole number", 0, "statistics", _SEEDS - 1),
    )
    for name in settings.embeddings:
        _embedding_class(name)
    groups = samples_by_label(labels_of(labels, len(maps)), wanted)
    asked = None if classes is None else _asked(classes, groups)
    analyses, skipped = {}, {}
    for label in progress_bar(groups if asked is None else asked, progress, "SpRAy", "class"):
        try:
            analyses[label] = _analysis(label, maps, groups[label], settings)
        except _NothingToClusterError as error:
            if asked is not None:
                raise InputError(f"class {label} cannot be clustered: {error}", topic="statistics") from error
            skipped[label] = str(error)
    if not analyses:
        reasons = "; ".join(f"class {label}: {reason}" for label, reason in list(skipped.items())[:3])
        raise InputError(f"no class can be clustered: {reasons or 'no sample has a label'}", topic="statistics")
    return Spray(settings, analyses, skipped)


def _check_nodes(view: Attributions) -> None:
    """Raise `InputError` for graphs of several sizes, whose nodes of one number have nothing in common."""
    if NODES in view and len(sizes := np.unique(view[NODES][:][view.explained])) > 1:
        raise InputError(
            f"the graphs have {sizes[0]} to {sizes[-1]} nodes, so that a node of one is not that of another: SpRAy compares "
            "graphs with the same nodes; pass relevance by what nodes have in common, such as their kinds, and labels=",
            topic="statistics",
        )


class _NothingToClusterError(Exception):
    """Why a class cannot be clustered."""


def _asked(classes: Iterable[int], groups: dict[int, Numbers]) -> list[int]:
    several = classes if isinstance(classes, Iterable) and not isinstance(classes, (str, bytes)) else [classes]
    meaning = "classes are the indices of classes, such as [0, 3]"
    found = sorted({whole_number(one, meaning, 0, "statistics") for one in several})
    missing = [label for label in found if label not in groups]
    if missing:
        raise InputError(f"no sample has the class {missing[0]}; the classes are {list(groups)}", topic="statistics")
    return found


def _analysis(label: int, maps: Column, samples: Numbers, settings: SpraySettings) -> LabelAnalysis:
    least = max(settings.neighbors, max(settings.clusters)) + 1
    if len(samples) < least:
        raise _NothingToClusterError(
            f"it has {len(samples)} samples, and {least} are needed for {settings.neighbors} neighbors and "
            f"{max(settings.clusters)} clusters"
        )
    reduced = _reduced(maps, samples, settings)
    vectors = reduced.reshape(len(reduced), -1)
    if (vectors == vectors[0]).all():
        raise _NothingToClusterError("the relevance of all its samples is the same")
    affinity = affinity_of(vectors, settings.neighbors)
    count = min(len(samples), max(settings.dimensions, max(settings.clusters) + 1))
    spectrum = spectrum_of(affinity, count, settings.seed)
    spectral = spectrum.coordinates[:, : settings.dimensions]
    embedded = {"spectral": spectral}
    for name in settings.embeddings:
        embedded[name] = _embedding(name, spectral, settings.seed)
    clusterings = {number: _clustering(number, spectrum, reduced, samples, settings) for number in (1, *settings.clusters)}
    return LabelAnalysis(label, samples, spectrum.eigenvalues, spectrum.parts, embedded, clusterings)


def _reduced(maps: Column, samples: Numbers, settings: SpraySettings) -> Floats:
    """The maps of samples as they are compared."""
    found: Floats | None = None
    for block in maps.floats(samples):
        reduced = pooled(without_channels(block.values, maps.what), settings.size)
        if found is None:
            found = np.empty((len(samples), *reduced.shape[1:]))
        if reduced.shape[1:] != found.shape[1:]:
            raise InputTypeError(
                f"the relevance of sample {block.numbers[0]} has another shape than that of sample {samples[0]}: pass "
                "size=(height, width), to which all maps are pooled",
                topic="statistics",
            )
        found[block.places] = of_equal_weight(reduced) if settings.normalize else reduced
    assert found is not None  # there are samples
    return found


def _clustering(number: int, spectrum: Spectrum, maps: Floats, samples: Numbers, settings: SpraySettings) -> Clustering:
    """The clusters by k-means, the largest first."""
    found = np.zeros(len(samples), dtype=np.int32)
    if number > 1:
        machine = optional_package("sklearn.cluster", PURPOSE, EXTRA).KMeans(number, n_init=_STARTS, random_state=settings.seed)
        found = machine.fit_predict(spectrum.first(number))
    present = np.unique(found)
    sizes = [int((found == one).sum()) for one in present]
    firsts = [int(np.argmax(found == one)) for one in present]
    order = sorted(range(len(present)), key=lambda one: (-sizes[one], firsts[one]))
    assignment = np.empty(len(samples), dtype=np.int32)
    described = []
    for place, one in enumerate(order):
        members = np.flatnonzero(found == present[one])
        assignment[members] = place
        mean = maps[members].mean(axis=0)
        distances = [float(np.linalg.norm(maps[member] - mean)) for member in members]
        nearest = members[np.argsort(distances, kind="stable")][: settings.typical]
        described.append(Cluster(place, len(members), len(members) / len(samples), tuple(samples[nearest].tolist()), mean))
    return Clustering(assignment, tuple(described))


def _embedding_class(name: str) -> Any:
    if name == "tsne":
        return optional_package("sklearn.manifold", "t-SNE", EXTRA).TSNE
    return optional_package("umap", "the embedding 'umap'", "umap").UMAP


def _embedding(name: str, coordinates: Floats, seed: int) -> Floats:
    """Two dimensions for each sample."""
    if name == "tsne":
        perplexity = min(_PERPLEXITY, (len(coordinates) - 1) / 3)
        machine = _embedding_class(name)(2, perplexity=perplexity, init="pca", random_state=seed)
    else:
        machine = _embedding_class(name)(n_components=2, n_neighbors=min(15, len(coordinates) - 1), random_state=seed, n_jobs=1)
    found: Floats = np.asarray(machine.fit_transform(coordinates), dtype=np.float64)
    return found
