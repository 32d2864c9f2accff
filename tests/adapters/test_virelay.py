"""Projects for ViRelAy, read by its own loader and by CoRelAy."""

import json
import shutil
import signal
import threading
import time
import tracemalloc

import h5py
import numpy as np
import pytest
import torch
import zarr
from corelay.io.storage import HDF5Storage
from data_sets import file_sizes_up_to, tree, write_project_killed
from data_sets import write_project as write_project_of
from PIL import Image
from virelay.image_processing import render_heatmap, render_superimposed_heatmap
from virelay.model import Project, Workspace

from lrpfx.adapters.virelay import label_map, write_analysis, write_project
from lrpfx.datasets.spray_analysis import spray
from lrpfx.errors import ArtefactError, InputError, InputTypeError
from lrpfx.support.runs import sole_writer

COUNT, CLASSES = 24, ("ant", 'a "bee" \\ of\tÄsch\x7f', "🐈")
KEYS = ("n02219486", "n02206856", "n02121808")


def files_of(project):
    """The folder of the files of a project, of which there is one."""
    (found,) = (path for path in project.parent.iterdir() if path != project)
    return found


def data(shape=(3, 6, 8), count=COUNT, seed=0):
    random = np.random.default_rng(seed)
    images = random.random((count, *shape)).astype(np.float32)
    relevance = random.standard_normal((count, *shape)).astype(np.float32)
    outputs = random.standard_normal((count, len(CLASSES))).astype(np.float32)
    return {"images": images, "relevance": relevance, "outputs": outputs, "labels": random.integers(0, 3, count)}


def pixels_of(image):
    """What ViRelAy must show: (height, width, red, green and blue)."""
    image = np.asarray(image)
    first = np.rint(image * 255).astype(np.uint8) if image.dtype != np.uint8 else image
    return np.broadcast_to(np.moveaxis(first, 0, -1), (*image.shape[1:], 3))


@pytest.fixture(scope="module")
def analyzed():
    given = data(count=60)
    given["labels"] = np.arange(60) % 3
    found = spray(given["relevance"], given["labels"], neighbors=4, clusters=(2, 3), embeddings=("tsne",))
    return given, found


def test_every_item_of_a_project(analyzed, tmp_path):
    given, found = analyzed
    path = write_project(
        tmp_path / "new" / "folder",
        **given,
        classes=CLASSES,
        keys=KEYS,
        analyses=found,
        name='insects: "and" cats',
        model="Net #1",
        method="ε-plus",
        strategy="true_label",
    )
    project = Project(str(path))
    assert (project.name, project.model) == ('insects: "and" cats', "Net #1") and project.dataset.name == project.name
    assert (project.attribution_method, project.attribution_strategy) == ("ε-plus", "true_label")
    labels = project.label_map.labels
    assert [(one.index, one.word_net_id, one.name) for one in labels] == list(zip(range(3), KEYS, CLASSES, strict=True))
    assert len(project.dataset) == 60 and not project.dataset.is_multi_label and not project.attributions[0].is_multi_label
    for number in range(60):
        sample, attribution = project.get_sample(number), project.get_attribution(number)
        assert sample.index == attribution.index == number
        assert sample.data.dtype == np.uint8 and (sample.data == pixels_of(given["images"][number])).all()
        assert (attribution.data == np.moveaxis(given["relevance"][number], 0, -1)).all()
        assert (attribution.prediction == given["outputs"][number]).all()
        assert [one.index for one in sample.labels] == [one.index for one in attribution.labels] == [given["labels"][number]]
    with pytest.raises(LookupError):
        project.get_attribution(60)

    assert project.get_analysis_methods() == ["SpRAy"]
    assert [(one.name, one.human_readable_name) for one in project.get_analysis_categories("SpRAy")] == sorted(
        zip(KEYS, CLASSES, strict=True)
    )
    assert project.get_analysis_clustering_names("SpRAy") == ["kmeans-02", "kmeans-03"]
    assert project.get_analysis_embedding_names("SpRAy") == ["spectral", "tsne"]
    for analysis in found:
        for number in found.settings.clusters:
            clustering = analysis.clusterings[number]
            for name, embedding in analysis.embeddings.items():
                read = project.get_analysis("SpRAy", KEYS[analysis.label], f"kmeans-{number:02d}", name)
                assert read.human_readable_category_name == CLASSES[analysis.label]
                assert (read.clustering == clustering.assignment).all()
                assert read.attribution_indices.tolist() == analysis.samples.tolist()
                expected = embedding.astype(np.float32)
                if name == "spectral":
                    assert (read.embedding == expected[:, ::-1]).all()
                    assert (read.eigenvalues == analysis.eigenvalues[: embedding.shape[1]][::-1].astype(np.float32)).all()
                    assert (np.diff(read.eigenvalues) <= 0).all()
                else:
                    assert (read.embedding == expected).all() and read.eigenvalues is None
    project.close()


def test_corelay_reads_the_same(analyzed, tmp_path):
    given, found = analyzed
    project = write_project(tmp_path, **given, classes=CLASSES, keys=KEYS, analyses={"one": found, "two": found})
    folder = files_of(project)
    with HDF5Storage(folder / "attribution.h5", mode="r") as storage:
        assert set(storage.keys()) == {"attribution", "prediction", "label"}
        assert (storage["attribution"] == given["relevance"]).all()
        assert (storage["prediction"] == given["outputs"]).all() and (storage["label"] == given["labels"]).all()
    for file in ("analysis_0.h5", "analysis_1.h5"):
        with HDF5Storage(folder / file, mode="r") as storage:
            read = storage[KEYS[1]]
        assert read["index"].dtype == np.uint32 and (read["index"] == found[1].samples).all()
        assert (read["cluster"]["kmeans-03"] == found[1].clustering(3).assignment).all()
        assert (read["embedding"]["tsne"] == found[1].embeddings["tsne"].astype(np.float32)).all()
    workspace = Workspace()
    workspace.add_project(str(project))
    assert workspace.get_project("lrpfx").get_analysis_methods() == ["one", "two"]
    workspace.close()


def _float(images):
    return images


def _bytes(images):
    return np.rint(images * 255).astype(np.uint8)


@pytest.mark.parametrize("kind", [_float, _bytes, torch.as_tensor, lambda one: zarr.array(one, chunks=(5, *one.shape[1:]))])
@pytest.mark.parametrize("shape", [(3, 6, 8), (1, 6, 8), (1, 3, 3), (3, 3, 3)])
def test_arrays(kind, shape, tmp_path):
    given = data(shape)
    expected, relevance = given["images"], given["relevance"]
    given.update(images=kind(expected), relevance=torch.as_tensor(relevance))
    project = Project(str(write_project(tmp_path, **given, channels="first")))
    for number in range(0, COUNT, 5):
        sample, attribution = project.get_sample(number), project.get_attribution(number)
        assert (sample.data == pixels_of(expected[number])).all()
        assert (attribution.data.sum(-1) == np.moveaxis(relevance[number], 0, -1).sum(-1)).all()
        assert Image.fromarray(sample.data).size == shape[:0:-1]
        for picture in (
            attribution.render_heatmap("blue-white-red"),
            attribution.render_heatmap("gray-red"),
            render_superimposed_heatmap(attribution.data, sample.data, "jet"),
        ):
            assert picture.shape == (*shape[1:], 3)
    one = render_heatmap(relevance[0].sum(0), "seismic")
    assert (project.get_attribution(0).render_heatmap("seismic") == one).all()
    project.close()


def test_channels_last_grey_and_ranges(tmp_path):
    given = data((3, 6, 8))
    expected = given["images"]
    given["images"] = np.moveaxis(expected * 4 - 1, 1, -1).astype(np.float64)
    project = Project(str(write_project(tmp_path, **given, value_range=(-1, 3), channels="last", compression=0)))
    shown = project.get_sample(7).data.astype(int)
    assert np.abs(shown - pixels_of(expected[7])).max() <= 1
    project.close()
    low, high = np.array([-1.0, 0.5, 2.0]), [3.0, 4.5, 2.25]
    given["images"] = expected * (high - low)[:, None, None] + low[:, None, None]
    project = Project(str(write_project(tmp_path, **given, value_range=(low, high), channels="first")))
    np.testing.assert_array_equal(project.get_sample(7).data, pixels_of(expected[7]))
    project.close()
    given.update(images=expected[:, 0], relevance=given["relevance"][:, 0])
    project = Project(str(write_project(tmp_path, **given)))
    assert (project.get_sample(7).data == pixels_of(expected[7, :1])).all()
    assert (project.get_attribution(7).data.sum(-1) == given["relevance"][7]).all()
    project.close()


def test_hidden_layers(tmp_path):
    given = data((3, 14, 14))
    random = np.random.default_rng(1)
    given["relevance"] = random.standard_normal((COUNT, 5, 7, 7))
    project = Project(str(write_project(tmp_path, **given)))
    expected = given["relevance"].astype(np.float32)
    assert (project.get_attribution(3).data == np.moveaxis(expected[3], 0, -1)).all()
    assert project.get_attribution(3).render_heatmap("jet", project.get_sample(3).data).shape == (14, 14, 3)
    project.close()
    given["relevance"] = random.standard_normal((COUNT, 9, 7, 7))
    with pytest.raises(InputError, match="sum_channels=True"):
        write_project(tmp_path, **given)
    project = Project(str(write_project(tmp_path, **given, sum_channels=True)))
    read = project.get_attribution(3).data.sum(-1)
    np.testing.assert_array_equal(read, given["relevance"][3].sum(0).astype(np.float32))
    project.close()


@pytest.mark.parametrize("as_pictures", [False, True])
def test_different_sizes(as_pictures, tmp_path):
    random = np.random.default_rng(0)
    given = data()
    sizes = [(6 + number % 3, 7 + number % 5) for number in range(COUNT)]
    images = [random.integers(0, 256, (3, *size), dtype=np.uint8) for size in sizes]
    given["relevance"] = [random.standard_normal((3, *size)) for size in sizes]
    given["images"] = [(Image.fromarray(np.moveaxis(one, 0, -1)), 0) for one in images] if as_pictures else images
    project = Project(str(write_project(tmp_path, **given)))
    assert len(project.dataset) == COUNT
    for number in range(COUNT):
        sample, attribution = project.get_sample(number), project.get_attribution(number)
        assert (sample.data == np.moveaxis(images[number], 0, -1)).all()
        assert (attribution.data == np.moveaxis(given["relevance"][number], 0, -1).astype(np.float32)).all()
        assert [one.index for one in attribution.labels] == [one.index for one in sample.labels] == [given["labels"][number]]
    project.close()


def test_sequences_of_one_size_are_arrays(tmp_path):
    given = data()
    given |= {name: list(given[name]) for name in ("images", "relevance")}
    folder = files_of(write_project(tmp_path, **given))
    with h5py.File(folder / "dataset.h5") as images, h5py.File(folder / "attribution.h5") as maps:
        assert images["data"].shape == maps["attribution"].shape == (COUNT, 3, 6, 8)


def test_several_labels(tmp_path):
    given = data()
    given["labels"] = np.random.default_rng(3).random((COUNT, 3)) < 0.4
    project = Project(str(write_project(tmp_path, **given, classes=CLASSES)))
    assert project.dataset.is_multi_label and project.attributions[0].is_multi_label
    for number in range(COUNT):
        expected = [CLASSES[one] for one in np.flatnonzero(given["labels"][number])]
        assert [one.name for one in project.get_sample(number).labels] == expected
        assert [one.name for one in project.get_attribution(number).labels] == expected
    project.close()


@pytest.mark.parametrize("form", ["array", "different sizes"])
@pytest.mark.parametrize("several", [False, True])
def test_samples_without_relevance(form, several, tmp_path):
    """As those that could not be read: all else keeps its number."""
    given, samples = data(), [19, 2, 3, 11]
    for name in ("images", "relevance", "outputs"):
        given[name][[one for one in range(COUNT) if one not in samples]] = np.nan
    if several:
        given["labels"] = np.eye(3, dtype=bool)[given["labels"]]
    else:
        given["labels"][[one for one in range(COUNT) if one not in samples]] = -1
    if form != "array":
        given["images"] = [one[:, : 5 + number % 2] for number, one in enumerate(given["images"])]
        given["relevance"] = [one[:, : 5 + number % 2] for number, one in enumerate(given["relevance"])]
    project = Project(str(write_project(tmp_path, **given, samples=samples)))
    assert len(project.dataset) == COUNT
    for number in range(COUNT):
        if number not in samples:
            assert not project.attributions[0].has_attribution(number)
            if several:
                assert project.get_sample(number).labels == []
            else:
                with pytest.raises(LookupError):
                    project.get_sample(number)
            continue
        attribution, sample = project.get_attribution(number), project.get_sample(number)
        assert attribution.index == number and (sample.data == pixels_of(given["images"][number])).all()
        assert (attribution.data == np.moveaxis(given["relevance"][number], 0, -1)).all()
        assert (attribution.prediction == given["outputs"][number]).all()
        assert attribution.labels == sample.labels and len(sample.labels) == 1
    project.close()


# --- errors ------------------------------------------------------------------------------------------------------------------


def changed(**changes):
    return {**data(), **changes}


NAN = np.full((COUNT, 3, 6, 8), 0.5, np.float32)
NAN[17, 1, 2, 3] = np.nan


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (changed(images=np.zeros((COUNT, 3, 6, 8)) - 2.1), InputError, "value_range is \\(0, 1\\): pass images before"),
        (changed(images=NAN), InputError, "value_range"),
        (changed(images=np.zeros((COUNT, 4, 6, 8))), InputError, "4 channels, and ViRelAy shows images with 1 or 3"),
        (changed(images=np.zeros((COUNT, 3, 2, 8)), relevance=np.ones((COUNT, 3, 2, 8))), InputError, "3 on a side"),
        (changed(images=np.zeros((COUNT, 3, 6, 8), int)), InputTypeError, "uint8 or floating point"),
        (changed(images=np.zeros((COUNT, 6))), InputTypeError, "images are"),
        (changed(images=np.zeros((COUNT, 3, 8, 6))), InputError, "the part of the image that the model was given"),
        (changed(relevance=NAN), InputError, "relevance of sample 17 is not finite"),
        (changed(relevance=np.full((COUNT, 3, 6, 8), 1e39)), InputError, "sample 0 is too large for float32"),
        (changed(relevance=np.zeros((COUNT, 5))), InputTypeError, "relevance is"),
        (changed(relevance=np.zeros((COUNT, 3, 6, 8), int)), InputTypeError, "floating-point numbers, not int64"),
        (changed(relevance={"input": 1}), InputTypeError, "not a mapping"),
        (changed(outputs=np.full((COUNT, 3), np.inf)), InputError, "outputs of sample 0 is not finite"),
        (changed(outputs=np.zeros(COUNT)), InputTypeError, "outputs are an array of shape"),
        (changed(labels=np.zeros((COUNT, 3), int)), InputTypeError, "booleans of shape"),
        (changed(labels=np.full(COUNT, 3)), InputError, "sample 0 has the label 3, which is not one of the 3 classes"),
        (changed(labels=np.full(COUNT, -1)), InputError, "sample 0 has the label -1"),
        (changed(labels=np.ones((COUNT, 4), bool)), InputError, "labels have 4 classes"),
        (changed(classes=["a", "b"]), InputError, "3 classes, but there are names for 2"),
        (changed(keys=["a", "a", "b"]), InputError, "'a' cannot be the key"),
        (changed(keys=["a/b", "a", "b"]), InputError, "without a slash"),
        (changed(keys=["a"]), InputError, "keys are a str for each of the 3 classes"),
        (changed(classes="abc"), InputTypeError, "names of the classes"),
        (changed(samples=[0, 24]), InputError, "sample 24 is out of range"),
        (changed(strategy="true"), InputError, "'true_label' or 'predicted_label'"),
        (changed(value_range=3), InputError, "value_range is"),
        (changed(value_range=((0, 0), (1, 1))), InputError, "value_range is that of 2 channels, and image 0 has 3"),
        (changed(value_range=((0, 0), (1, 1, 1))), InputError, "one for each channel"),
        (changed(keys=["a", "b", "\ud800"]), InputError, "cannot be the key"),
        (changed(compression=10), InputError, "level from 0 to 9"),
        (changed(analyses={"a": 3}), InputTypeError, "the analysis 'a' is what lrpfx.datasets.spray returns"),
        (changed(name=3), InputTypeError, "a name is a str"),
    ],
)
def test_what_the_layout_cannot_hold(arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        write_project(tmp_path, **arguments)
    assert not (tmp_path / "project.yaml").exists() and not list(tmp_path.glob(".lrpfx*"))


def test_analyses_that_do_not_fit(analyzed, tmp_path):
    given, found = analyzed
    with pytest.raises(InputError, match="was analyzed, but its relevance is not in the project"):
        write_project(tmp_path, **given, samples=range(30), analyses=found)
    with pytest.raises(InputError, match="class 2 was analyzed, but there are 2 classes"):
        write_analysis(tmp_path / "a.h5", found, label_map(2))
    with pytest.raises(ArtefactError, match=r"suffix must be \.h5"):
        write_analysis(tmp_path / "a.hdf5", found, label_map(3))
    assert write_analysis(tmp_path / "a.h5", found, label_map(3)) == tmp_path / "a.h5"
    assert not [path for path in tmp_path.iterdir() if path.name != "a.h5"]


def test_a_project_that_fails_leaves_the_one_before(tmp_path):
    path = write_project(tmp_path, **data())
    before = tree(tmp_path)
    with pytest.raises(InputError, match="sample 17"):
        write_project(tmp_path, **changed(relevance=NAN))
    assert tree(tmp_path) == before
    files = files_of(path)
    assert {one.name for one in files.iterdir()} == {"attribution.h5", "dataset.h5", "label_map.json"}
    assert json.loads((files / "label_map.json").read_text())[1] == {"index": 1, "word_net_id": "01", "name": "1"}
    path = write_project(tmp_path, **data(seed=1))
    assert files_of(path) != files
    project = Project(str(path))
    assert (project.get_attribution(3).data == np.moveaxis(data(seed=1)["relevance"][3], 0, -1)).all()
    project.close()


@pytest.mark.thorough
def test_a_kill_leaves_the_old_or_the_new_project(context, tmp_path):
    """Before each operation on the name of a file; the next call removes what was left."""
    write_project_of(tmp_path / "before", 1)
    seeds, step, status = [], 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(step))
        process = context.Process(target=write_project_killed, args=(folder, 2, step))
        process.start()
        process.join()
        status, step = process.exitcode, step + 1
        project = Project(str(folder / "project.yaml"))
        seed = int(project.name.removeprefix("project "))
        for number in range(6):
            attribution, sample = project.get_attribution(number), project.get_sample(number)
            assert (attribution.data == seed).all() and attribution.data.shape == sample.data.shape == (4 + seed, 5, 3)
            assert (sample.data == round(25.5 * seed)).all() and (attribution.prediction == seed).all()
        project.close()
        seeds.append(seed)
        write_project_of(folder, 3)
        assert {path.name for path in folder.iterdir()} == {"project.yaml", files_of(folder / "project.yaml").name}
    assert status == 0 and seeds == sorted(seeds) and seeds.count(1) > 10 and seeds.count(2) > 3


def test_one_process_at_a_time(tmp_path):
    with sole_writer(tmp_path / "project.yaml"), pytest.raises(InputError, match="another run writes to"):
        write_project(tmp_path, **data())


@pytest.mark.parametrize("limit", [0, 100, 3_000, 20_000, 50_000, 300_000, 1_000_000])
@pytest.mark.parametrize("compression", [0, 1])
@pytest.mark.parametrize("form", ["array", "sequence"])
def test_a_full_disk(form, compression, limit, tmp_path):
    """Wherever the space ends, an error follows and nothing is left: HDF5 by itself ends the process."""
    given = data((3, 64, 64))
    if form == "sequence":
        for name in ("images", "relevance"):
            given[name] = [one[..., : 64 - place % 2] for place, one in enumerate(given[name])]
    with file_sizes_up_to(limit), pytest.raises(ArtefactError, match="cannot be written: File too large"):
        write_project(tmp_path, **given, compression=compression)
    assert not list(tmp_path.iterdir())
    write_project(tmp_path, **given, compression=compression)


def test_a_call_that_is_interrupted(tmp_path, heard_interrupts):
    """The interrupt comes while HDF5 writes; nothing is written after the block that is."""
    given, reads = data((3, 64, 64)), []

    class Interrupting(list):
        def __getitem__(self, number):
            reads.append(number)
            if len(reads) == 5:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.2)
            return super().__getitem__(number)

    with pytest.raises(KeyboardInterrupt):
        write_project(tmp_path, **{**given, "images": Interrupting(given["images"])})
    assert not list(tmp_path.iterdir()) and 5 <= len(reads) <= 6


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="cannot be written"):
        write_project(tmp_path / "file", **data())


class Counted:
    """An array that knows how much was read of it at once."""

    def __init__(self, shape):
        self.shape = shape
        self.dtype = np.dtype("float32")
        self.most = 0

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        self.most = max(self.most, rows.stop - rows.start)
        return np.full((rows.stop - rows.start, *self.shape[1:]), 0.25, np.float32)


def test_memory_does_not_grow_with_samples(tmp_path):
    peaks = []
    for count in (80, 320):
        images, maps = Counted((count, 3, 128, 128)), Counted((count, 3, 128, 128))
        tracemalloc.start()
        write_project(
            tmp_path, images=images, relevance=maps, outputs=np.zeros((count, 2)), labels=np.zeros(count, int), compression=0
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert images.most == maps.most < 128
    assert peaks[1] < peaks[0] * 1.2
