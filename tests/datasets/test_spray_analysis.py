"""Clusters of relevance, against scikit-learn, a plain re-implementation and planted strategies."""

import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import zarr
from data_sets import Noise, small_explain_model
from sklearn.cluster import SpectralClustering
from sklearn.datasets import load_digits
from sklearn.manifold import spectral_embedding
from sklearn.metrics import adjusted_rand_score
from torch import nn

import lrpfx
from lrpfx.datasets.reduced_maps import pooled
from lrpfx.datasets.spectral import Spectrum, affinity_of, spectrum_of
from lrpfx.datasets.spray_analysis import spray
from lrpfx.errors import InputError, InputTypeError

QUICK = {"embeddings": (), "size": None, "neighbors": 5}


def blobs(counts, features=6, spread=1.0, apart=3.0, seed=0):
    """Points around centres, and the centre of each. `apart`: the scale of random centres, or the centres."""
    random = np.random.default_rng(seed)
    truth = random.permutation(np.repeat(np.arange(len(counts)), counts))
    centres = apart * random.standard_normal((len(counts), features)) if np.isscalar(apart) else apart
    return centres[truth] + spread * random.standard_normal((len(truth), features)), truth


def slow_spectrum(points, neighbors):
    """Eigenvalues and coordinates from the definitions, all dense."""
    count = len(points)
    affinity = np.zeros((count, count))
    for one in range(count):
        distances = [np.sqrt(((points[one] - points[other]) ** 2).sum()) for other in range(count)]
        distances[one] = np.inf
        for other in sorted(range(count), key=distances.__getitem__)[:neighbors]:
            affinity[one, other] += 0.5
            affinity[other, one] += 0.5
    degrees = affinity.sum(1)
    laplacian = np.eye(count) - affinity / np.sqrt(degrees[:, None] * degrees[None])
    values, vectors = np.linalg.eigh(laplacian)
    return affinity, values, vectors / np.sqrt(degrees)[:, None]


def signed_like(values, others):
    return values * np.sign((values * others).sum(0))


@pytest.mark.parametrize("dense", [1000, 10])
@pytest.mark.parametrize("seed", range(3))
def test_the_spectrum_is_that_of_its_definition(dense, seed):
    points, _ = blobs([30, 20, 14], spread=2.5, seed=seed)
    affinity, values, coordinates = slow_spectrum(points, 6)
    found = spectrum_of(affinity_of(points, 6), 8, seed, dense)
    assert found.parts == 1 and values[1] > 1e-3
    np.testing.assert_array_equal(affinity_of(points, 6).toarray(), affinity)
    np.testing.assert_allclose(found.eigenvalues, values[:8], atol=1e-12)
    np.testing.assert_allclose(found.coordinates, signed_like(coordinates[:, :8], found.coordinates), atol=1e-9)
    largest = found.coordinates[np.abs(found.coordinates).argmax(0), range(8)]
    assert (largest > 0).all()
    theirs = spectral_embedding(affinity, n_components=8, drop_first=False, random_state=0, eigen_tol=1e-12)
    np.testing.assert_allclose(found.coordinates, signed_like(theirs, found.coordinates), atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_those_of_scikit_learn(seed):
    points, truth = blobs([30, 25, 20], apart=np.eye(3, 6) * 4.0, seed=seed)
    affinity = affinity_of(points, 10)
    found = spray(points, np.zeros(75, int), clusters=(2, 3, 4), **{**QUICK, "neighbors": 10}, normalize=False)[0]
    assert found.parts == 1
    for number in (2, 3):
        theirs = SpectralClustering(number, affinity="precomputed", random_state=0, eigen_tol=1e-12).fit_predict(affinity)
        assert adjusted_rand_score(found.clustering(number).assignment, theirs) == 1
    assert adjusted_rand_score(found.clustering(3).assignment, truth) == 1
    assert found.eigengap == found.best == 3


@pytest.mark.parametrize("dense", [1000, 10])
def test_parts_of_the_graph(dense):
    """Their indicators span the eigenvalue 0, of which all are used: no order is defined among them."""
    points, truth = blobs([20, 30, 25, 15], apart=50.0)
    found = spectrum_of(affinity_of(points, 5), 3, 0, dense)
    assert found.parts == 4 and len(found.eigenvalues) == 4 and (found.eigenvalues == 0).all()
    assert found.first(1).shape == found.first(3).shape == (90, 4)
    for part in range(4):
        assert (np.ptp(found.coordinates[truth == part], axis=0) < 1e-12).all()
    _, values, coordinates = slow_spectrum(points, 5)
    ours = spectrum_of(affinity_of(points, 5), 7, 0, dense)
    np.testing.assert_allclose(ours.eigenvalues, values[:7], atol=1e-12)
    roots = np.sqrt(np.asarray(affinity_of(points, 5).sum(0)).ravel())[:, None]
    a, b = ours.coordinates * roots, coordinates[:, :7] * roots
    np.testing.assert_allclose(a @ a.T, b @ b.T, atol=1e-9)
    analysis = spray(points, np.zeros(90, int), clusters=(2, 3, 4), **QUICK, normalize=False)[0]
    assert analysis.parts == analysis.eigengap == analysis.best == 4
    assert adjusted_rand_score(analysis.clustering().assignment, truth) == 1


@pytest.fixture(scope="module")
def clever_hans():
    """Digits of which many threes have a mark in a corner, and the relevance of a network that learned it."""
    source = load_digits()
    images, labels = torch.tensor(source.images / 16).float()[:, None], torch.tensor(source.target)
    marked = (labels == 3) & (torch.arange(len(labels)) % 5 < 2)
    images[marked, :, :2, :2] = 1.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(120):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    explain_model = lrpfx.transform(model.eval(), lrpfx.composites.EpsilonPlus(), example_inputs=images[:2])
    attribution = lrpfx.attribute(explain_model, images, labels)
    assert (attribution.output.argmax(1) == labels).float().mean() > 0.97
    return attribution.relevance.numpy(), labels.numpy(), marked.numpy(), images.numpy()


def test_a_clever_hans_is_found(clever_hans):
    relevance, labels, marked, _ = clever_hans
    found = spray(relevance, labels, classes=[3, 7], clusters=(2, 3, 4), embeddings=())
    assert list(found.analyses) == [3, 7] and not found.skipped
    three = found[3]
    assert (three.samples == np.flatnonzero(labels == 3)).all()
    clustering = three.clustering(2)
    assert adjusted_rand_score(clustering.assignment, marked[three.samples]) > 0.95
    honest, hans = clustering.clusters
    assert honest.size + hans.size == len(three.samples) and honest.size > hans.size
    assert marked[list(hans.typical)].all() and not marked[list(honest.typical)].any()
    corner = [np.abs(one.mean[:2, :2]).sum() / np.abs(one.mean).sum() for one in (honest, hans)]
    assert corner[1] > 5 * corner[0]
    # The gap behind two clusters is far larger where there are two strategies.
    assert three.gaps[1] > 2 * found[7].gaps[1] and three.best == three.eigengap == 2


def unequal(count, samples, random):
    """Samples around `count` maps, of which the last has three times as many as the first."""
    shares = np.linspace(1, 3, count)
    truth = random.choice(count, samples, p=shares / shares.sum())
    return random.standard_normal((count, 256))[truth] + random.standard_normal((samples, 256)), truth


@pytest.mark.parametrize("samples", [50, 300, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("features", [5, 64, 1024])
@pytest.mark.parametrize("strength", [0.0, 1.0, 5.0])
def test_noise_is_one_cluster(samples, features, strength):
    """Alone, and around one map."""
    random = np.random.default_rng(0)
    points = strength * random.standard_normal(features) + random.standard_normal((samples, features))
    found = spray(points, np.zeros(samples, int), embeddings=(), size=None)
    assert found[0].best == found[0].eigengap == 1
    ((_, whole),) = found.table()
    assert whole.size == samples and whole.share == 1 and len(whole.typical) == 8
    assert found.to_pandas()[["eigengap", "clusters", "cluster"]].to_numpy().tolist() == [[1, 1, 0]]
    assert len(found.table(2)) == 2


@pytest.mark.parametrize("count", range(2, 7))
@pytest.mark.parametrize("samples", [250, pytest.param(1000, marks=pytest.mark.thorough)])
def test_planted_clusters_of_unequal_size_are_counted(count, samples):
    points, truth = unequal(count, samples, np.random.default_rng(count))
    found = spray(points, np.zeros(samples, int), embeddings=(), size=None)[0]
    assert found.best == found.eigengap == count
    assert adjusted_rand_score(found.clustering().assignment, truth) == 1


def test_a_number_that_was_not_asked_for():
    """Three groups, of which two and five are asked for: not one."""
    points, _ = unequal(3, 250, np.random.default_rng(0))
    found = spray(points, np.zeros(250, int), clusters=(2, 5), embeddings=(), size=None)[0]
    assert found.eigengap == 3 and found.best in (2, 5) and list(found.clusterings) == [1, 2, 5]
    assert spray(points, np.zeros(250, int), clusters=(2,), embeddings=(), size=None)[0].eigengap == 3


@pytest.mark.thorough
def test_the_result(clever_hans):
    relevance, labels, _, images = clever_hans
    settings = {"classes": [3], "clusters": (2, 5), "typical": 7}
    found = spray(relevance, labels, **settings)
    analysis = found[3]
    assert set(analysis.embeddings) == {"spectral", "tsne"} and analysis.embeddings["tsne"].shape == (len(analysis.samples), 2)
    assert analysis.embeddings["spectral"].shape == (len(analysis.samples), 32)
    maps = relevance[analysis.samples].sum(1).astype(np.float64)
    maps /= np.abs(maps).sum((1, 2), keepdims=True)
    for number, clustering in analysis.clusterings.items():
        assert [one.number for one in clustering.clusters] == list(range(number))
        sizes = [one.size for one in clustering.clusters]
        assert sizes == sorted(sizes, reverse=True) == np.bincount(clustering.assignment).tolist()
        for one in clustering.clusters:
            members = clustering.assignment == one.number
            np.testing.assert_allclose(one.mean, maps[members].mean(0), atol=1e-12)
            assert one.share == one.size / len(analysis.samples) and len(one.typical) == min(7, one.size)
            assert set(one.typical) <= set(analysis.samples[members].tolist())
            distances = np.linalg.norm((maps - one.mean).reshape(len(maps), -1), axis=1)
            assert list(one.typical) == analysis.samples[members][np.argsort(distances[members])][:7].tolist()
    frame = found.to_pandas(5)
    assert frame["samples"].sum() == len(analysis.samples) and frame["cluster"].tolist() == list(range(5))
    assert found.table(2)[1] == (3, analysis.clustering(2).clusters[1])
    assert str(found).splitlines()[0].split()[:4] == ["class", "eigengap", "clusters", "gap"]
    assert found._repr_html_().startswith("<table") and repr(found) == "<SpRAy of 1 classes, 183 samples>" and len(found) == 1
    pairs = list(zip(images, labels, strict=True))
    plain = found.picture(3, relevance, clusters=2, count=4)
    over = found.picture(3, relevance, images=pairs, clusters=2, count=4)
    assert plain.width == over.width == 1200 and plain.tobytes() != over.tobytes()

    again = spray(zarr.array(relevance, chunks=(64, 1, 8, 8)), torch.as_tensor(labels), **settings)[3]
    for name, embedding in analysis.embeddings.items():
        np.testing.assert_array_equal(again.embeddings[name], embedding)
    assert (again.clustering(5).assignment == analysis.clustering(5).assignment).all()
    with pytest.raises(InputError, match="only with 1, 2, 5"):
        analysis.clustering(3)
    with pytest.raises(InputError, match="class 4 was not analyzed"):
        found[4]


def test_groups_and_samples():
    points, _ = blobs([60, 60], apart=5.0)
    labels = np.arange(120) % 3 - 1
    samples = np.flatnonzero(np.arange(120) % 4)
    found = spray(points, labels, samples=samples[::-1], clusters=(2,), **QUICK)
    assert list(found.analyses) == [0, 1]
    for analysis in found:
        assert analysis.samples.tolist() == [one for one in samples if labels[one] == analysis.label]
    several = np.stack([labels >= 0, labels == 1, np.zeros(120, bool)], axis=1)
    both = spray(points, several, clusters=(2,), **QUICK)
    assert {one.label: len(one.samples) for one in both} == {0: 80, 1: 40}
    alone = spray(points[samples][labels[samples] == 1], np.ones(len(found[1].samples), int), clusters=(2,), **QUICK)
    assert (alone[1].clustering().assignment == found[1].clustering().assignment).all()


def test_scale_does_not_count_if_normalized():
    points, truth = blobs([40, 40], apart=5.0)
    scales = np.random.default_rng(0).uniform(0.01, 100, (80, 1))
    kept = spray(points, np.zeros(80, int), clusters=(2,), **QUICK)
    scaled = spray(points * scales, np.zeros(80, int), clusters=(2,), **QUICK)
    assert (kept[0].clustering().assignment == scaled[0].clustering().assignment).all()
    np.testing.assert_allclose(kept[0].eigenvalues, scaled[0].eigenvalues, atol=1e-12)
    assert adjusted_rand_score(kept[0].clustering().assignment, truth) == 1


def test_pooling():
    maps = np.random.default_rng(0).standard_normal((3, 12, 8))
    np.testing.assert_allclose(pooled(maps, 6), maps.reshape(3, 6, 2, 4, 2).mean((2, 4)), atol=1e-14)
    np.testing.assert_allclose(pooled(maps, (4, 2)), maps.reshape(3, 4, 3, 2, 4).mean((2, 4)), atol=1e-14)
    assert pooled(maps, 12) is maps and pooled(maps, None) is maps and pooled(maps[:, 0], 2).shape == (3, 8)
    relevance = np.random.default_rng(0).standard_normal((30, 2, 12, 8))
    found = spray(relevance, np.zeros(30, int), clusters=(2,), **{**QUICK, "size": 6}, normalize=False)[0]
    by_hand = relevance.sum(1).reshape(30, 6, 2, 4, 2).mean((2, 4))
    same = spray(by_hand, np.zeros(30, int), clusters=(2,), **QUICK, normalize=False)[0]
    np.testing.assert_allclose(found.eigenvalues, same.eigenvalues, atol=1e-12)


def test_maps_of_different_sizes():
    random = np.random.default_rng(0)
    maps = [np.zeros((1, 8 + number % 3, 9)) for number in range(40)]
    for number, one in enumerate(maps):
        one[0, :, slice(0, 4) if number % 2 else slice(-4, None)] = 1.0
        one += 0.1 * random.standard_normal(one.shape)
    found = spray(maps, np.zeros(40, int), clusters=(2,), **{**QUICK, "size": (4, 4), "neighbors": 10})[0]
    assert adjusted_rand_score(found.clustering().assignment, np.arange(40) % 2) == 1
    with pytest.raises(InputTypeError, match=r"size=\(height, width\)"):
        spray(maps, np.zeros(40, int), clusters=(2,), **QUICK)


def test_classes_that_cannot_be_analyzed():
    points, _ = blobs([80])
    labels = np.repeat([0, 1, 2, 4], [40, 20, 5, 15])
    points[40:60] = points[40]
    found = spray(points, labels, clusters=(2, 9), **QUICK)
    assert list(found.analyses) == [0, 4] and list(found.skipped) == [1, 2]
    assert found.skipped[2] == "it has 5 samples, and 10 are needed for 5 neighbors and 9 clusters"
    assert "the same" in found.skipped[1] and "class 2 was skipped" in str(found)
    for label, message in (
        (1, "class 1 cannot be clustered: the relevance of all its samples is the same"),
        (3, "no sample has"),
    ):
        with pytest.raises(InputError, match=message):
            spray(points, labels, classes=[label], clusters=(2,), **QUICK)
    with pytest.raises(InputError, match="no class can be clustered: class 0: it has 40"):
        spray(points, labels, clusters=(2,), **{**QUICK, "neighbors": 60})
    with pytest.raises(InputError, match="no sample has a label"):
        spray(points, np.full(80, -1), clusters=(2,), **QUICK)
    with pytest.raises(InputError, match="class 1 was not analyzed: the relevance"):
        found[1]
    with pytest.raises(InputError, match="vectors has no picture"):
        found.picture(0, points)


def test_maps_without_relevance_are_a_cluster():
    points, truth = blobs([30, 30])
    points[truth == 0] = 0.0
    found = spray(points, np.zeros(60, int), clusters=(2,), **QUICK)[0]
    assert adjusted_rand_score(found.clustering().assignment, truth) == 1


NAN = np.ones((20, 4))
NAN[7, 2] = np.nan


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"relevance": NAN}, InputError, "relevance of sample 7 is not finite"),
        ({"relevance": np.ones((20, 4), int)}, InputTypeError, "floating-point numbers"),
        ({"relevance": np.ones((20, 1, 1, 4, 4))}, InputTypeError, "relevance of a sample is"),
        ({"relevance": 3}, InputTypeError, "a sequence of arrays, not int"),
        ({"labels": np.zeros(19, int)}, InputError, "labels has 19 samples"),
        ({"clusters": ()}, InputError, "clusters are the numbers"),
        ({"clusters": 0}, InputTypeError, "clusters are the numbers"),
        ({"clusters": (1,)}, InputError, "2 or more, not 1"),
        ({"neighbors": 0}, InputError, "neighbors is a number of samples, 1 or more"),
        ({"dimensions": 1}, InputError, "2 or more"),
        ({"size": 0}, InputError, "size is the longest side"),
        ({"embeddings": "pca"}, InputError, "'tsne' and 'umap'"),
        ({"embeddings": None}, InputTypeError, "embeddings are some of"),
        ({"classes": ["cat"]}, InputError, "classes are the indices"),
        ({"classes": [-1]}, InputError, "classes are the indices"),
        ({"classes": 7}, InputError, "no sample has the class 7"),
        ({"seed": -1}, InputError, "seed is"),
        ({"seed": 2**40}, InputError, "seed is a whole number from 0"),
        ({"samples": [20]}, InputError, "sample 20 is out of range"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    given = {"relevance": blobs([20])[0], "labels": np.zeros(20, int), "clusters": (2,), **QUICK, **arguments}
    with pytest.raises(error, match=message):
        spray(given.pop("relevance"), given.pop("labels"), **given)


def test_umap(monkeypatch):
    """With a stand-in: the package brings a compiler of its own."""
    asked = []

    class Umap:
        def __init__(self, **settings):
            asked.append(settings)

        def fit_transform(self, values):
            return values[:, 1:3].astype(np.float32)

    points, _ = blobs([20, 20])
    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Umap))
    found = spray(points, np.zeros(40, int), clusters=(2,), **{**QUICK, "embeddings": ("umap",)}, seed=3)[0]
    assert asked == [{"n_components": 2, "n_neighbors": 15, "random_state": 3, "n_jobs": 1}]
    np.testing.assert_array_equal(found.embeddings["umap"], found.embeddings["spectral"][:, 1:3].astype(np.float32))
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(InputError, match=r"pip install 'lrpfx\[umap\]'"):
        spray(points, np.zeros(40, int), clusters=(2,), **{**QUICK, "embeddings": ("umap",)})


@pytest.mark.thorough
def test_scikit_learn_is_imported_when_it_is_needed():
    code = (
        "import sys, lrpfx.datasets.spray_analysis, lrpfx.adapters.virelay, lrpfx.datasets.statistics;"
        "assert not {'sklearn', 'scipy', 'h5py', 'zarr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("target", ["predicted", "true"])
def test_a_store(target, tmp_path):
    """The samples that are explained, and the classes that their relevance is of."""
    view = lrpfx.datasets.attribute(small_explain_model(), Noise(60, broken=[3, 40]), tmp_path / "a", target=target)
    settings = {**QUICK, "neighbors": 4, "clusters": (2,)}
    labels = view.labels if target == "true" else view["prediction"][:]
    expected = spray(view.relevance, labels, samples=view.explained, **settings)
    found = spray(view, **settings)
    assert found.settings == expected.settings and list(found.analyses) == list(expected.analyses)
    for one in found:
        assert np.array_equal(one.samples, np.flatnonzero((labels == one.label) & ~np.isin(np.arange(60), [3, 40])))
        assert np.array_equal(one.clustering(2).assignment, expected[one.label].clustering(2).assignment)
    mine = spray(view, np.arange(60) % 2, samples=range(10, 30), **settings)
    assert [one.samples.tolist() for one in mine] == [list(range(10, 30, 2)), list(range(11, 30, 2))]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"targets": ["true", 1]}, r"SpRAy takes relevance of one target, but the store has targets \(true, 1\)"),
        ({"conditions": [{"first": [1]}]}, r"the store has conditions \(first: \[1\]\): explain with target= alone"),
        ({"target": 2}, "does not say which one relevance of '2' is of: pass labels="),
    ],
)
def test_stores_without_a_class_for_each_sample(asked, message, tmp_path):
    view = lrpfx.datasets.attribute(small_explain_model(), Noise(20), tmp_path / "a", **asked)
    with pytest.raises(InputError, match=message):
        spray(view, **QUICK)
    if "target" in asked:
        assert len(spray(view, np.zeros(20, int), **QUICK, clusters=(2,))) == 1
    with pytest.raises(InputTypeError, match="labels are the class of each sample"):
        spray(view.relevance, **QUICK)


@pytest.mark.parametrize(("count", "taken"), [(1, 3), (2, 3), (3, 3), (4, 5), (5, 5), (6, 6)])
def test_coordinates_of_equal_eigenvalues_come_together(count, taken):
    found = Spectrum(np.array([0.0, 0.0, 0.0, 0.5, 0.5, 1.0]), np.arange(12.0).reshape(2, 6), 3)
    assert np.array_equal(found.first(count), found.coordinates[:, :taken])
