"""Stores as projects for ViRelAy, read by its own loader and by CoRelAy."""

import numpy as np
import pytest
import torch
from corelay.io.storage import HDF5Storage
from data_sets import Noise, Stream, tree
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from virelay.model import Project

import lrpfx
import lrpfx.datasets
from lrpfx.adapters.virelay import export
from lrpfx.errors import InputError, InputTypeError

pytestmark = pytest.mark.filterwarnings("ignore:.*could not be explained:lrpfx.errors.LrpfxWarning")

COUNT, BROKEN = 40, (3, 11)
MEAN, STD = [0.5, 0.4, 0.3], [0.25, 0.2, 0.5]
COLORS = torch.rand(12, 3, 8, 9, generator=torch.Generator().manual_seed(0)).double()
NORMALIZED = (COLORS - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
LABELS = [number % 3 for number in range(12)]


def color_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double().eval()


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    samples = list(zip(NORMALIZED, LABELS, strict=True))
    model = lrpfx.transform(color_model(), lrpfx.composites.EpsilonPlus())
    return lrpfx.datasets.attribute(model, samples, tmp_path_factory.mktemp("colors") / "store", dtype="float64")


def pixels_of(image):
    values = np.rint(np.asarray(image) * 255).astype(int)
    return np.broadcast_to(np.moveaxis(values, 0, -1), (*values.shape[1:], 3))


def check_images(path, expected, tolerance=0):
    project = Project(str(path))
    for number, image in enumerate(expected):
        assert np.abs(project.get_sample(number).data.astype(int) - pixels_of(image)).max() <= tolerance
    project.close()


@pytest.mark.parametrize("target", ["predicted", "true"])
@pytest.mark.parametrize("reduce", [None, "sum"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_everything_in_a_store(target, reduce, dtype, explain_model, tmp_path):
    noise = Noise(COUNT, broken=BROKEN)
    view = lrpfx.datasets.attribute(explain_model, noise, tmp_path / "noises", target=target, reduce=reduce, dtype=dtype)
    found = lrpfx.datasets.spray(view, neighbors=3, clusters=(2,), size=None, embeddings=())
    path = export(view, tmp_path / "project", noise, analyses=found, keys=["k0", "k1", "k2", "k3"])
    project = Project(str(path))
    assert (project.name, project.model, project.attribution_method) == ("noises", "model", view.manifest["composite"])
    assert project.attribution_strategy == {"predicted": "predicted_label", "true": "true_label"}[target]
    assert [one.name for one in project.label_map.labels] == ["0", "1", "2", "3"] and len(project.dataset) == COUNT
    relevance, outputs = view.relevance[:], view["output"][:]
    for number in range(COUNT):
        if number in BROKEN:
            assert not project.attributions[0].has_attribution(number)
            continue
        sample, attribution = project.get_sample(number), project.get_attribution(number)
        assert (sample.data == pixels_of(Noise(COUNT)[number][0])).all()
        assert (attribution.data[..., 0] == relevance[number].reshape(6, 6)).all() and not attribution.data[..., 1:].any()
        assert (attribution.prediction == outputs[number]).all()
        assert [one.index for one in sample.labels] == [one.index for one in attribution.labels] == [number % 4]
    categories = {int(one.name[1:]) for one in project.get_analysis_categories("SpRAy")}
    assert categories == set(found.analyses) and categories
    for label, analysis in found.analyses.items():
        read = project.get_analysis("SpRAy", f"k{label}", "kmeans-02", "spectral")
        assert read.attribution_indices.tolist() == analysis.samples.tolist()
        assert (read.clustering == analysis.clustering(2).assignment).all()
    project.close()
    (files,) = (one for one in path.parent.iterdir() if one.is_dir())
    with HDF5Storage(files / "attribution.h5", mode="r") as storage:
        assert (storage["index"] == view.explained).all() and (storage["prediction"] == outputs[view.explained]).all()


def test_layers_and_names(colors, tmp_path):
    samples = list(zip(NORMALIZED, LABELS, strict=True))
    model = lrpfx.transform(color_model(), lrpfx.composites.EpsilonPlus())
    view = lrpfx.datasets.attribute(model, samples, tmp_path / "a", record={"0": "sum", "1": None}, target=2)
    given = {"std": STD, "mean": MEAN, "classes": ["cat", "dog", "fox"], "strategy": "true_label"}
    path = export(view, tmp_path / "b", samples, array="layers.0", **given, name="n", model="m", method="o", labels=[1] * 12)
    project = Project(str(path))
    assert (project.name, project.model, project.attribution_method) == ("n", "m", "o")
    assert [one.name for one in project.get_sample(5).labels] == ["dog"]
    np.testing.assert_array_equal(project.get_attribution(5).data.sum(-1), view["layers.0"][5])
    project.close()
    path = export(view, tmp_path / "b", samples, array="layers.1", **given)
    project = Project(str(path))
    np.testing.assert_array_equal(project.get_attribution(5).data, np.moveaxis(view["layers.1"][5], 0, -1))
    project.close()


FORMS = {
    "pairs": lambda images: list(zip(images, LABELS, strict=True)),
    "tensors": lambda images: TensorDataset(images, torch.tensor(LABELS)),
    "images alone": list,
    "tensor": lambda images: images,
    "array": lambda images: images.numpy(),
    "arrays": lambda images: list(images.numpy()),
    "subset": lambda images: Subset(TensorDataset(images, torch.tensor(LABELS)), range(12)),
    "loader": lambda images: DataLoader(TensorDataset(images, torch.tensor(LABELS)), batch_size=5),
    "collated": lambda images: DataLoader(
        list(zip(images, LABELS, strict=True)),
        collate_fn=lambda items: {
            "x": torch.stack([one for one, _ in items]),
            "label": torch.tensor([one for _, one in items]),
        },
    ),
    "dicts": lambda images: [
        {"pixel_values": image, "label": label, "sentence": "a cat"} for image, label in zip(images, LABELS, strict=True)
    ],
    "lists": lambda images: [
        {"image": image.tolist(), "label": label, "id": 7} for image, label in zip(images, LABELS, strict=True)
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data(form, colors, tmp_path):
    check_images(export(colors, tmp_path / "a", FORMS[form](NORMALIZED), mean=MEAN, std=STD), COLORS)


def as_pillow(images):
    return [Image.fromarray(pixels_of(image).astype(np.uint8)) for image in images]


IMAGES = {
    "before normalization": (lambda: COLORS, {}),
    "bytes": (lambda: (COLORS * 255).round().to(torch.uint8), {}),
    "bytes with channels last": (lambda: np.stack([pixels_of(one) for one in COLORS]).astype(np.uint8), {"channels": "last"}),
    "pillow": (lambda: as_pillow(COLORS), {}),
    "pillow with labels": (lambda: list(zip(as_pillow(COLORS), LABELS, strict=True)), {}),
    "pillow in dicts": (lambda: [{"image": one, "path": "a.png"} for one in as_pillow(COLORS)], {}),
    "one range": (lambda: COLORS * 2 - 1, {"value_range": (-1, 1)}),
    "range of each channel": (lambda: NORMALIZED, {"value_range": ([-2, -2, -0.6], [2, 3, 1.4])}),
    "one mean": (lambda: (COLORS - 0.5) / 0.2, {"mean": 0.5, "std": 0.2}),
    "one deviation": (lambda: (COLORS - torch.tensor(MEAN)[:, None, None]) / 0.2, {"mean": torch.tensor(MEAN), "std": [0.2]}),
    "interpolated": (lambda: (COLORS * 1.1 - 0.05), {}),
}  # fmt: skip


@pytest.mark.parametrize("form", IMAGES)
def test_images_beside_the_data(form, colors, tmp_path):
    make, settings = IMAGES[form]
    expected = COLORS if form != "interpolated" else (COLORS * 1.1 - 0.05).clip(0, 1)
    check_images(export(colors, tmp_path / "a", make(), **settings), expected)


# --- photographs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def photographs(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "2.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def seen(photograph):
    """What the model sees: the middle, scaled."""
    return photograph.crop((2, 3, 14, 15)).resize((8, 8))


def preprocess(photograph):
    pixels = torch.from_numpy(np.asarray(seen(photograph), dtype=np.float64) / 255).permute(2, 0, 1)
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@pytest.mark.parametrize("form", ["folder", "paths", "images"])
@pytest.mark.parametrize("of_explainer", [False, True])
def test_photographs(form, of_explainer, photographs, tmp_path):
    explainer = lrpfx.Explainer(color_model(), preprocess=preprocess, categories=["cat", "dog", "fox"])
    paths = sorted(photographs.iterdir())
    opened = [Image.open(path) if path.name != "2.png" else b"" for path in paths]
    data = {"folder": photographs, "paths": paths, "images": opened}[form]
    view = lrpfx.datasets.attribute(explainer, data, tmp_path / "store")
    given = explainer.preprocess if of_explainer else preprocess
    project = Project(str(export(view, tmp_path / "a", data, preprocess=given)))
    assert project.get_sample(0).labels == project.get_attribution(0).labels == []
    project.close()
    path = export(view, tmp_path / "a", data, preprocess=given, labels=view["prediction"][:].clip(0))
    project = Project(str(path))
    assert [one.name for one in project.label_map.labels] == ["cat", "dog", "fox"]
    for number in (0, 1, 3, 4):
        assert (project.get_sample(number).data == np.asarray(seen(Image.open(paths[number])))).all()
    assert not project.attributions[0].has_attribution(2)
    project.close()


def test_other_photographs(photographs, tmp_path):
    explainer = lrpfx.Explainer(color_model(), preprocess=preprocess)
    view = lrpfx.datasets.attribute(explainer, photographs, tmp_path / "store")
    given = {"labels": [0] * 5, "preprocess": preprocess}
    for data in (photographs, sorted(photographs.iterdir())):
        with pytest.raises(InputError, match="images in files need preprocess="):
            export(view, tmp_path / "a", data, labels=[0] * 5)
    with pytest.raises(InputError, match=r"sample 0 is not what it was when this was begun, or its preprocessing is"):
        export(view, tmp_path / "a", photographs, labels=[0] * 5, preprocess=lambda image: preprocess(image.rotate(90)))
    Image.new("RGB", (9, 9)).save(photographs / "1.png")
    with pytest.raises(InputError, match="are not those that were explained: their names or sizes differ"):
        export(view, tmp_path / "a", photographs, **given)
    (photographs / "1.png").unlink()
    with pytest.raises(InputError, match="the data set has 4 samples, and the store 5"):
        export(view, tmp_path / "a", photographs, **given)
    assert not (tmp_path / "a").exists()


def test_photographs_that_are_standardized(photographs, tmp_path):
    """Black and white are the same, and so no range is known."""

    def standardized(photograph):
        pixels = torch.from_numpy(np.asarray(seen(photograph), dtype=np.float64)).permute(2, 0, 1)
        return (pixels - pixels.mean()) / (pixels.std() + 1e-3)

    explainer = lrpfx.Explainer(color_model(), preprocess=standardized)
    view = lrpfx.datasets.attribute(explainer, photographs, tmp_path / "store")
    given = {"labels": [0] * 5, "preprocess": standardized}
    with pytest.raises(InputError, match=r"black and of white after preprocess= are not known: pass value_range="):
        export(view, tmp_path / "a", photographs, **given)
    path = export(view, tmp_path / "a", photographs, **given, value_range=(-4, 4))
    project, expected = Project(str(path)), standardized(Image.open(photographs / "0.png"))
    assert (project.get_sample(0).data == pixels_of((expected + 4) / 8)).all()
    project.close()


# --- errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"targets": ["true", 1]}, r"ViRelAy takes relevance of one target, but the store has targets \(true, 1\)"),
        ({"conditions": [{"first": [1]}]}, r"the store has conditions \(first: \[1\]\)"),
        ({"scores": 2}, "which are not in the store: explain without scores="),
        ({"reduce": "channels"}, "explain without reducing positions"),
        ({"target": 2}, "has that of '2': pass strategy='true_label' or"),
    ],
)
def test_stores_that_virelay_cannot_show(asked, message, explain_model, tmp_path):
    view = lrpfx.datasets.attribute(explain_model, Noise(20), tmp_path / "a", **asked)
    with pytest.raises(InputError, match=message):
        export(view, tmp_path / "b", Noise(20))


def test_outputs_that_are_no_classes(tmp_path):
    model = lrpfx.transform(nn.Conv2d(3, 2, 3).double().eval(), lrpfx.composites.EpsilonPlus())
    view = lrpfx.datasets.attribute(model, COLORS, tmp_path / "a", target=lambda output: output)
    with pytest.raises(InputError, match=r"outputs \(samples, classes\), which are not in the store$"):
        export(view, tmp_path / "b", COLORS, labels=LABELS, strategy="true_label")


def test_a_store_that_is_not_complete(explain_model, tmp_path):
    view = lrpfx.datasets.attribute(explain_model, Noise(20), tmp_path / "a", block_size=8)
    (view.path / "done" / "c" / "1").unlink()
    with pytest.raises(InputError, match=r"12 samples are in the store, which is not complete: run lrpfx\.datasets\.attribute"):
        export(view, tmp_path / "b", Noise(20))


class Broken(Noise):
    def __getitem__(self, number):
        return super().__getitem__(number) if number != 7 else 1 / 0


@pytest.mark.parametrize(
    ("data", "settings", "error", "message"),
    [
        (lambda: Noise(19), {}, InputError, "the data set has 19 samples, and the store 20: pass the one"),
        (lambda: torch.zeros(19, 1, 6, 6), {}, InputError, "the data set has 19 samples"),
        (
            lambda: [Noise(20)[19 - number] for number in range(20)],
            {},
            InputError,
            "sample 0 has the label 3 in the data and 0",
        ),
        (lambda: Broken(20), {}, InputError, "sample 7: it cannot be loaded: ZeroDivisionError"),
        (lambda: Stream(Noise(20)), {}, InputTypeError, "images are found by their numbers, which a Stream does not have"),
        (lambda: iter([1]), {}, InputTypeError, "pass a data set with indices, or the images as an array"),
        (lambda: 3, {}, InputTypeError, "data is a folder, a dataset"),
        (lambda: [(Noise(20)[0][0], Noise(20)[0][0])] * 20, {}, InputError, "sample 0: it has 2 inputs, which may be images"),
        (lambda: [{"a": 1}] * 20, {}, InputError, "sample 0: it has 0 inputs"),
        (lambda: torch.zeros(20, 1, 6, 9), {}, InputError, "the part of the image that the model was given"),
        (lambda: Noise(20), {"mean": 0.5}, InputError, "mean= and std= belong together"),
        (lambda: Noise(20), {"mean": 0.5, "std": 0}, InputError, "std is positive, not 0.5 and 0"),
        (lambda: Noise(20), {"mean": [0, 0], "std": [1, 1, 1]}, InputError, "for each channel, and std is positive"),
        (lambda: Noise(20), {"mean": "a", "std": 1}, InputError, "mean and std are numbers"),
        (lambda: Noise(20), {"mean": 0, "std": 1, "value_range": (0, 1)}, InputError, "pass one"),
        (lambda: Noise(20), {"mean": 0, "std": 1, "preprocess": preprocess}, InputError, "pass one"),
        (lambda: Noise(20), {"mean": [0, 0], "std": 1}, InputError, "value_range is that of 2 channels"),
        (lambda: Noise(20), {"mean": 3, "std": 1}, InputError, r"but value_range is \(-3, -2\)"),
        (lambda: Noise(20), {"strategy": "true_label"}, InputError, "strategy is 'predicted_label', since the store"),
        (lambda: Noise(20), {"array": "relevence"}, InputError, "no array 'relevence'. Did you mean 'relevance'"),
        (lambda: Noise(20), {"array": "label"}, InputError, "ViRelAy shows maps"),
        (lambda: Noise(20), {"labels": [0] * 3}, InputError, "labels has 3 samples"),
        (lambda: Noise(20), {"labels": [9] * 20}, InputError, "the label 9, which is not one of"),
    ],
)
def test_mistakes(data, settings, error, message, explain_model, tmp_path):
    view = lrpfx.datasets.attribute(explain_model, Noise(20), tmp_path / "a")
    export(view, tmp_path / "b", Noise(20))
    before = tree(tmp_path / "b")
    with pytest.raises(error, match=message):
        export(view, tmp_path / "b", data(), **settings)
    assert tree(tmp_path / "b") == before
    with pytest.raises(InputError, match="is a Zarr store, which would be damaged"):
        export(view, view.path / "project", Noise(20))
    with pytest.raises(InputTypeError, match="view is what"):
        export(view.path, tmp_path / "b", Noise(20))
