"""Spectral embeddings: eigenvectors of the normalized Laplacian of a graph of nearest neighbours (von Luxburg 2007)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrpfx.pictures.maps import Floats
from lrpfx.support.optional_packages import optional_package

PURPOSE = "clustering of relevance"
EXTRA = "datasets"
_DENSE = 1000
_TIE = 1e-9  # between eigenvalues of which neither comes first


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The smallest eigenvalues of a graph's Laplacian, rising from 0, in [0, 2], and the coordinates of its nodes.

    `coordinates`: shape (nodes, eigenvalues), the eigenvectors of the symmetric normalized Laplacian divided by the root of
    each node's degree: eigenvectors of the random walk, as scikit-learn's `spectral_embedding(..., drop_first=False)` returns
    them. The entry of largest magnitude is positive. `parts`: the number of connected components, and of eigenvalues 0.
    """

    eigenvalues: Floats
    coordinates: Floats
    parts: int

    def first(self, count: int) -> Floats:
        """The first coordinates, with those whose eigenvalue is the last one's: within ties, no order is defined."""
        last = count
        while last < len(self.eigenvalues) and self.eigenvalues[last] - self.eigenvalues[count - 1] <= _TIE:
            last += 1
        return self.coordinates[:, :last]


def affinity_of(vectors: Floats, neighbors: int) -> Any:
    """The sparse matrix of neighbourship: 1 if each of two nodes is among the nearest of the other, 1/2 if only one is."""
    graph = optional_package("sklearn.neighbors", PURPOSE, EXTRA).kneighbors_graph(vectors, neighbors, mode="connectivity")
    return (graph + graph.T) / 2


def spectrum_of(affinity: Any, count: int, seed: int, dense: int = _DENSE) -> Spectrum:
    """The spectrum of a graph, with `count` eigenvalues or as many as it has parts, if these are more.

    The eigenvectors of each connected part are found by themselves: together, those of eigenvalue 0 could be any rotation.
    `dense`: the most nodes of a part whose matrix is decomposed as a whole; Lanczos iterations find the eigenvectors of others.
    """
    graphs = optional_package("scipy.sparse.csgraph", PURPOSE, EXTRA)
    parts, membership = graphs.connected_components(affinity, directed=False)
    laplacian, roots = graphs.laplacian(affinity, normed=True, return_diag=True)
    laplacian = laplacian.tocsr()
    sizes = np.bincount(membership)
    found: list[tuple[float, int, NDArray[np.intp], Floats]] = []
    for rank, part in enumerate(np.argsort(-sizes, kind="stable")):
        nodes = np.flatnonzero(membership == part)
        values, vectors = _eigenvectors(laplacian[nodes][:, nodes], min(count, len(nodes)), roots[nodes], seed, dense)
        found += [(float(value), rank, nodes, vector) for value, vector in zip(values, vectors.T, strict=True)]
    found.sort(key=lambda one: one[:2])
    found = found[: max(count, parts)]
    coordinates = np.zeros((affinity.shape[0], len(found)))
    for place, (_, _, nodes, vector) in enumerate(found):
        coordinates[nodes, place] = vector / roots[nodes]
    return Spectrum(np.array([value for value, *_ in found]), coordinates, int(parts))


def _eigenvectors(laplacian: Any, count: int, roots: Floats, seed: int, dense: int) -> tuple[Floats, Floats]:
    """The smallest eigenvalues and their eigenvectors, for a connected graph with these roots of degrees."""
    size = laplacian.shape[0]
    if size <= dense or count >= size // 2:
        values, vectors = optional_package("scipy.linalg", PURPOSE, EXTRA).eigh(
            laplacian.toarray(), subset_by_index=[0, count - 1]
        )
    else:
        identity = optional_package("scipy.sparse", PURPOSE, EXTRA).identity(size, format="csr")
        start = np.random.default_rng(seed).standard_normal(size)
        solve = optional_package("scipy.sparse.linalg", PURPOSE, EXTRA).eigsh
        largest, vectors = solve(identity - laplacian, k=count, which="LA", v0=start)
        values, vectors = 1.0 - largest[::-1], vectors[:, ::-1]
    values = values.clip(0.0, 2.0)
    values[0], vectors[:, 0] = 0.0, roots / np.linalg.norm(roots)  # known exactly
    places = np.abs(vectors / roots[:, None]).argmax(axis=0)
    return values, vectors * np.where(vectors[places, np.arange(count)] < 0, -1.0, 1.0)
