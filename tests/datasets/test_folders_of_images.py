"""Labels, names and preprocessing of photographs in folders, and their pictures."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset
from virelay.model import Project

import lrpfx
import lrpfx.datasets
from lrpfx.adapters.virelay import export, write_project
from lrpfx.errors import ArtefactError, InputError, InputTypeError
from lrpfx.images.stored_preprocessing import StoredPreprocessing
from lrpfx.samples.items import labels_of_folders

PREPROCESS = StoredPreprocessing((0.5, 0.4, 0.3), (0.25, 0.2, 0.5), size=(8, 8), resize=10)
NAMES = ["zebra", "ant", "bee"]
QUICK = {"clusters": (2,), "neighbors": 3, "embeddings": (), "size": None}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()


def explainer(**given):
    torch.set_default_dtype(torch.float32)
    return lrpfx.Explainer(model(), **{"preprocess": PREPROCESS, "categories": NAMES, **given})


@pytest.fixture
def photographs(tmp_path):
    """Six photographs of each class, in folders that are sorted otherwise than the classes are."""
    random = np.random.default_rng(0)
    for name in NAMES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = random.integers(0, 256, (20 + number, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


KEYS = [f"{name}/{number}.png" for name in sorted(NAMES) for number in range(6)]


# --- labels ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "categories", "expected"),
    [
        (["b", "a"], ["b", "a"], {"b": 0, "a": 1}),
        (["tiger_cat", "Tabby"], ["tabby", "fox", "tiger cat"], {"tiger_cat": 2, "Tabby": 0}),
        (["train", "test"], ["cat", "dog"], {}),  # as many as categories
        (["10", "2"], ["2", "10"], {"2": 0, "10": 1}),
        (["cat", "dogs"], ["dog", "cat"], {}),
        (["a", "b"], ["x", "y", "z"], {}),
        (["crane", "fox"], ["crane", "fox", "crane"], {}),
        (["cat", "Cat"], ["cat", "dog"], {}),
    ],
)
def test_labels_of_folders(folders, categories, expected):
    assert labels_of_folders(folders, categories) == expected


def test_folders_of_classes_give_labels(photographs, tmp_path):
    view = lrpfx.datasets.attribute(explainer(), photographs, tmp_path / "store", target="true")
    assert view.keys == KEYS and view.labels.tolist() == [1] * 6 + [2] * 6 + [0] * 6 and not view.errors
    np.testing.assert_allclose(view["seed"][:], view["output"][:][range(18), view.labels], rtol=1e-6)
    assert set(lrpfx.datasets.spray(view, **QUICK).analyses) == {0, 1, 2}


@pytest.mark.parametrize("categories", [None, ["ant", "bees", "zebra"], ["x", "y", "z"], NAMES])
def test_folders_that_are_no_classes(categories, photographs, tmp_path):
    if categories == NAMES:
        (photographs / "ant" / "0.png").rename(photographs / "0.png")
    view = lrpfx.datasets.attribute(explainer(categories=categories), photographs, tmp_path / "store")
    assert (view.labels == -1).all()
    with pytest.raises(InputError, match="the sample has no label"):
        lrpfx.datasets.attribute(explainer(categories=categories), photographs, tmp_path / "true", target="true")


# --- names -------------------------------------------------------------------------------------------------------------------


def test_names_of_torchvision(photographs, tmp_path):
    folder = torchvision.datasets.ImageFolder(photographs)
    view = lrpfx.datasets.attribute(explainer(), folder, tmp_path / "a")
    assert view.keys == KEYS and view.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    chain = ConcatDataset([Subset(folder, [-1, 2]), folder])
    assert lrpfx.datasets.attribute(explainer(), chain, tmp_path / "d").keys == [KEYS[17], KEYS[2], *KEYS]
    ends = Subset(ConcatDataset([Subset(folder, range(6)), folder]), [-1, 0])
    assert lrpfx.datasets.attribute(explainer(), ends, tmp_path / "e").keys == [KEYS[17], KEYS[0]]
    part = Subset(Subset(folder, list(range(17, 0, -1))), torch.tensor([0, 3]))
    assert lrpfx.datasets.attribute(explainer(), part, tmp_path / "b").keys == [KEYS[17], KEYS[14]]
    tensors = torchvision.datasets.ImageFolder(str(photographs), transform=PREPROCESS)
    loader = DataLoader(tensors, batch_size=4, sampler=[3, 1, 2], num_workers=1)
    module = lrpfx.transform(model().float(), lrpfx.composites.EpsilonPlus())
    assert lrpfx.datasets.attribute(module, loader, tmp_path / "c").keys == [KEYS[3], KEYS[1], KEYS[2]]


IMAGES = {
    "not decoded": lambda paths: [{"image": {"bytes": None, "path": str(one)}, "label": 1} for one in paths],
    "in the file": lambda paths: [{"image": {"bytes": one.read_bytes(), "path": one.name}, "label": 1} for one in paths],
    "decoded": lambda paths: [{"image": Image.open(one), "label": 1} for one in paths],
    "pairs": lambda paths: [(Image.open(one), 1) for one in paths],
    "alone": lambda paths: [Image.open(one) for one in paths],
}


@pytest.mark.parametrize("form", IMAGES)
def test_names_of_images(form, photographs, tmp_path):
    paths = sorted(photographs.glob("ant/*.png"))
    view = lrpfx.datasets.attribute(explainer(), IMAGES[form](paths), tmp_path / "store")
    assert view.keys == ([one.name for one in paths] if form == "in the file" else list(map(str, paths)))


def test_images_without_a_file_have_no_name(tmp_path):
    images = [{"image": Image.new("RGB", (9, 9)), "label": 0}, {"image": {"bytes": b"", "path": None}}]
    assert lrpfx.datasets.attribute(explainer(), images, tmp_path / "store").keys == ["", ""]


# --- preprocessing -----------------------------------------------------------------------------------------------------------


def test_a_store_has_the_preprocessing(photographs, tmp_path):
    transforms = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize(10),
            torchvision.transforms.CenterCrop(8),
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize(PREPROCESS.mean, PREPROCESS.std),
        ]
    )
    view = lrpfx.datasets.attribute(explainer(preprocess=transforms), photographs, tmp_path / "store")
    assert view.manifest["preprocessing"] == PREPROCESS.to_dict()
    lrpfx.datasets.attribute(explainer(preprocess=transforms), photographs, tmp_path / "store")
    other = StoredPreprocessing(PREPROCESS.mean, PREPROCESS.std, size=(8, 8))
    with pytest.raises(InputError, match="begun with other preprocessing: give another output"):
        lrpfx.datasets.attribute(explainer(preprocess=other), photographs, tmp_path / "store")
    path = export(view, tmp_path / "project", photographs)
    project = Project(str(path))
    for number, key in enumerate(KEYS):
        seen = PREPROCESS.array(Image.open(photographs / key)) * np.reshape(PREPROCESS.std, (3, 1, 1))
        expected = ((seen + np.reshape(PREPROCESS.mean, (3, 1, 1))) * 255).transpose(1, 2, 0)
        assert np.abs(project.get_sample(number).data - expected).max() < 1.5
        assert [one.name for one in project.get_sample(number).labels] == [key.partition("/")[0]]
    project.close()


def test_a_preprocessing_that_is_no_numbers(photographs, tmp_path):
    view = lrpfx.datasets.attribute(explainer(preprocess=lambda image: PREPROCESS(image)), photographs, tmp_path / "store")
    assert view.manifest["preprocessing"] is None
    with pytest.raises(InputError, match="images in files need preprocess="):
        export(view, tmp_path / "project", photographs)


def test_a_damaged_preprocessing(photographs, tmp_path):
    view = lrpfx.datasets.attribute(explainer(), photographs, tmp_path / "store")
    file = view.path / "zarr.json"
    file.write_text(file.read_text().replace('"bilinear"', '"magic"'))
    with pytest.raises(ArtefactError, match="its preprocessing is invalid: interpolation is one of"):
        export(lrpfx.datasets.open(view.path), tmp_path / "project", photographs)


# --- pictures ----------------------------------------------------------------------------------------------------------------


def test_pictures_of_a_folder(photographs, tmp_path):
    """The same, whether the images are a folder, paths or what the model was given."""
    view = lrpfx.datasets.attribute(explainer(), photographs, tmp_path / "store", target="true")
    found = lrpfx.datasets.spray(view, **QUICK)
    inputs = [(PREPROCESS(Image.open(photographs / key)), 0) for key in KEYS]
    low, high = (bound[0] for bound in PREPROCESS.range)
    seen = [((one - low) / (high - low)).clamp(0, 1) for one, _ in inputs]
    expected = np.asarray(found.picture(0, view, images=np.stack(seen), count=2)).astype(int)
    plain = np.asarray(found.picture(0, view, count=2)).astype(int)
    assert (expected == np.asarray(found.picture(0, view.relevance, images=seen, count=2))).all()
    for images in (photographs, [photographs / key for key in KEYS]):
        drawn = np.asarray(found.picture(0, view, images=images, count=2)).astype(int)
        assert np.abs(drawn - expected).max() <= 2 < np.abs(drawn - plain).max()
    with pytest.raises(InputError, match="label 2 in the data and 0 in the store"):  # torchvision has numbers of its own
        found.picture(0, view, images=torchvision.datasets.ImageFolder(photographs))
    with pytest.raises(InputTypeError, match="pass the view of the store as the relevance"):
        found.picture(0, view.relevance, images=photographs)


def test_images_in_another_order(photographs, tmp_path):
    folder = torchvision.datasets.ImageFolder(photographs)
    view = lrpfx.datasets.attribute(explainer(), folder, tmp_path / "store")
    found = lrpfx.datasets.spray(view, labels=view.labels, **QUICK)
    within_classes = Subset(folder, [*range(5, -1, -1), *range(6, 18)])
    for images in (within_classes, [photographs / key for key in reversed(KEYS)]):
        with pytest.raises(InputError, match=r"sample .* is .* in the data and .* in the store"):
            found.picture(0, view, images=images)


def test_images_of_samples_with_numbers(photographs, tmp_path):
    """Numbers are names of another kind than those of files."""
    data = [{"image": Image.open(photographs / key), "id": number, "label": number // 6} for number, key in enumerate(KEYS)]
    view = lrpfx.datasets.attribute(explainer(), data, tmp_path / "store")
    found = lrpfx.datasets.spray(view, labels=view.labels, **QUICK)
    assert view.keys[7] == "7" and found.picture(1, view, images=[photographs / key for key in KEYS])


def test_a_folder_by_the_names_of_samples(photographs, tmp_path):
    """What was explained was a data set of torchvision; its folder is found again elsewhere, with more in it."""
    view = lrpfx.datasets.attribute(explainer(), torchvision.datasets.ImageFolder(photographs), tmp_path / "store")
    found = lrpfx.datasets.spray(view, labels=view.labels, **QUICK)
    expected = found.picture(1, view, images=photographs)
    moved = photographs.rename(tmp_path / "moved")
    (moved / "aardvark").mkdir()
    Image.new("RGB", (30, 30)).save(moved / "aardvark" / "0.png")
    assert found.picture(1, view, images=moved).tobytes() == expected.tobytes()
    assert found.picture(1, view, images=str(moved), preprocess=PREPROCESS).tobytes() == expected.tobytes()
    (moved / KEYS[8]).unlink()
    with pytest.raises(InputError, match=f"sample 8: there is no file .*{KEYS[8]}"):
        found.picture(1, view, images=moved)
    nameless = lrpfx.datasets.attribute(explainer(), [Image.new("RGB", (9, 9))] * 5, tmp_path / "nameless")
    with pytest.raises(InputError, match="sample 0 has no name in the store"):
        export(nameless, tmp_path / "project", moved)


def test_a_project_of_paths(photographs, tmp_path):
    paths = [photographs / key for key in KEYS[::6]]
    arrays = [np.asarray(Image.open(one)).transpose(2, 0, 1) for one in paths]
    relevance = np.random.default_rng(0).standard_normal((3, 20, 16)).astype(np.float32)
    for name, images in (("a", arrays), ("b", paths), ("c", [str(one) for one in paths])):
        path = write_project(tmp_path / name, images=images, relevance=relevance, outputs=np.eye(3), labels=[0, 1, 2])
        project = Project(str(path))
        for number, array in enumerate(arrays):
            assert (project.get_sample(number).data == array.transpose(1, 2, 0)).all()
        project.close()
