"""Preprocessing that files hold: equal to the transforms it stands for, and refused where it is not valid."""

import json

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms
from transformers import CLIPImageProcessor, ConvNextImageProcessor, ViTImageProcessor

import lrpfx
from lrpfx.deploy import archive
from lrpfx.deploy.manifest import FORMAT, manifest_of
from lrpfx.errors import ArtefactError, InputError
from lrpfx.images.stored_preprocessing import StoredPreprocessing, stored_form
from lrpfx.support.stored_arrays import RefusedError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TIMMS = {"crop_pct": 0.9, "input_size": (3, 96, 96), "interpolation": "bicubic"}
EXACT = {
    "a preset": torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms(),
    "a preset of Inception": torchvision.models.Inception_V3_Weights.DEFAULT.transforms(),
    "a composition": transforms.Compose(
        [transforms.Resize(40), transforms.CenterCrop((32, 30)), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    ),
    "black around it": transforms.Compose([transforms.Resize(32), transforms.CenterCrop((50, 51)), transforms.ToTensor()]),
    "both sides": transforms.Compose([transforms.Resize((20, 31)), transforms.ToTensor()]),
    "grey": transforms.Compose([transforms.Grayscale(), transforms.Resize((28, 28)), transforms.ToTensor()]),
    "one number": transforms.Compose([transforms.Resize(20), transforms.ToTensor(), transforms.Normalize(0.5, 0.25)]),
    "timm's": timm.data.create_transform(**TIMMS, mean=MEAN, std=STD),
}


def photograph(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(301, 200), (123, 321), (224, 224), (17, 40)])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_stored_and_given_are_the_same(name, size):
    stored = stored_form(EXACT[name])
    expected = EXACT[name](photograph(*size))
    torch.testing.assert_close(stored(photograph(*size)), expected, rtol=0, atol=1e-5, check_dtype=False)
    low, high = stored.range
    torch.testing.assert_close(stored(Image.new("RGB", size, "white")).amax((1, 2)), high.flatten(), check_dtype=False)
    assert stored(Image.new("RGB", size)).amin((1, 2)) == pytest.approx(low.flatten().numpy(), abs=1e-6)


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessor(size={"height": 40, "width": 48}),
        CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}),
        ConvNextImageProcessor(size={"shortest_edge": 56}),
        ViTImageProcessor(do_resize=False, do_normalize=False),
    ],
)
def test_processors_of_transformers_to_their_rounding(processor):
    stored = stored_form(processor)
    expected = processor(images=photograph(300, 300), return_tensors="pt")["pixel_values"][0]
    levels = (stored(photograph(300, 300)) - expected).abs() * torch.tensor(stored.std)[:, None, None] * 255
    assert levels.mean() < 0.5 and levels.max() <= 5


@pytest.mark.parametrize(
    "preprocess, message",
    [
        (
            transforms.Compose([transforms.Resize(40), transforms.RandomHorizontalFlip(), transforms.ToTensor()]),
            "else each time",
        ),
        (
            transforms.Compose(
                [transforms.Resize(40), transforms.ColorJitter(), transforms.RandomInvert(1.0), transforms.ToTensor()]
            ),
            "more than",
        ),
        (transforms.Compose([transforms.ToTensor(), transforms.Lambda(lambda x: x * 255)]), "more than"),
        (transforms.Compose([transforms.Resize(40), transforms.ToTensor(), transforms.Pad(2)]), "shape"),
        (lambda image: image, "the settings of function are not known"),
        (timm.data.create_transform(**TIMMS, crop_mode="border"), "more than|shape"),
        ("resize", "not str"),
        (transforms.Compose, "not type"),
    ],
)
def test_what_cannot_be_stored(preprocess, message):
    with pytest.raises(InputError, match=message):
        stored_form(preprocess)


INVALID = [
    {"mean": (0.5, 0.5)},
    {"mean": (float("nan"),) * 3},
    {"mean": (float("inf"),) * 3},
    {"mean": (10**400,) * 3},
    {"mean": (True,) * 3},
    {"mean": ("0",) * 3},
    {"mean": 0.5},
    {"mean": (0.5,)},
    {"std": (0.0,) * 3},
    {"std": (-1.0,) * 3},
    {"std": (1e-300,) * 3},
    {"size": (224,)},
    {"size": (0, 224)},
    {"size": (224.0, 224)},
    {"size": (1 << 15, 224)},
    {"resize": 0},
    {"resize": True},
    {"resize": 1 << 40},
    {"resize": (1, 2, 3)},
    {"interpolation": "cubic"},
    {"interpolation": 3},
    {"interpolation": None},
]


@pytest.mark.parametrize("change", INVALID, ids=str)
def test_invalid_values(change):
    with pytest.raises(InputError):
        StoredPreprocessing(**{"mean": MEAN, "std": STD, **change})


def test_a_long_photograph_does_not_fill_the_memory():
    with pytest.raises(InputError, match="more than"):
        StoredPreprocessing(MEAN, STD, (224, 224), 224)(Image.new("RGB", (1, 100_000)))
    assert StoredPreprocessing(MEAN, STD, (224, 224))(Image.new("RGB", (1, 100_000))).shape == (3, 224, 224)


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    return lrpfx.lower(lrpfx.transform(model, lrpfx.composites.EpsilonPlus()), torch.rand(1, 3, 8, 8))


STORED = StoredPreprocessing(MEAN, STD, (8, 8), 9)
NAMES = ["cat", "dog", "owl"]


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_files_hold_them(suffix, program, tmp_path):
    lrpfx.save(program, tmp_path / f"model{suffix}", preprocess=STORED, categories=NAMES)
    runner = lrpfx.load(tmp_path / f"model{suffix}")
    assert runner.manifest["format"] == FORMAT and runner.manifest["categories"] == NAMES
    assert runner.manifest["preprocessing"] == STORED.to_dict()
    found = lrpfx.explain(runner, photograph(30, 20))
    expected = lrpfx.explain(runner, photograph(30, 20), preprocess=STORED, categories=NAMES)
    assert np.array_equal(found.relevance, expected.relevance) and found.relevance.shape == (20, 30)
    assert found.target.name in NAMES


@pytest.mark.parametrize(
    "preprocess, categories, message",
    [
        (StoredPreprocessing(MEAN, STD, (9, 9)), None, "another size than 8×8"),
        (StoredPreprocessing(MEAN, STD), None, "another size than 8×8"),
        (StoredPreprocessing((0.5,), (0.5,), (8, 8)), None, "has 1 channels, but the program takes 3"),
        (None, ["cat", "dog"], "2 categories"),
        (None, "cat", "list of names"),
        (None, ["cat", "dog", ""], "empty"),
        (None, ["cat", "dog", "\x1b[2J"], "printable"),
        (None, ["cat", "dog", "x" * 1001], "longer than 1000"),
    ],
)
def test_what_does_not_fit_the_program(preprocess, categories, message, program, tmp_path):
    with pytest.raises(InputError, match=message):
        lrpfx.save(program, tmp_path / "model.pt2", preprocess=preprocess, categories=categories)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def manifest(program, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "model.pt2"
    lrpfx.save(program, path, preprocess=STORED, categories=NAMES)
    return json.loads(archive.read_signed_archive(path.read_bytes())[0])


def test_files_of_earlier_formats_are_read(manifest):
    keys_since = {
        8: ("preprocessing", "categories"),
        9: ("conditions",),
        10: ("weights", "runtimes"),
        11: ("buffers",),
        12: ("explained",),
    }
    later = {old: [key for new, keys in keys_since.items() if new > old for key in keys] for old in range(7, 12)}
    for format, keys in later.items():
        older = {key: value for key, value in manifest.items() if key not in keys} | {"format": format}
        read = manifest_of(json.dumps(older))
        assert read["format"] == format and read["conditions"] == {} and read["explained"] is None
        assert (read["weights"] is None) == (format < 10)
        for key in keys:
            with pytest.raises(RefusedError, match="its format does not have"):
                manifest_of(json.dumps({**older, key: manifest[key]}))
    for format in (6, 13, 12.0, True, "12", None):
        with pytest.raises(RefusedError, match="reads the formats 7 to 12"):
            manifest_of(json.dumps({**manifest, "format": format}))


@pytest.mark.parametrize(
    "change",
    [
        *({"preprocessing": {**STORED.to_dict(), **change}} for change in INVALID),
        {"preprocessing": []},
        {"preprocessing": "pickle"},
        {"preprocessing": {**STORED.to_dict(), "code": "import os"}},
        {"preprocessing": {key: value for key, value in STORED.to_dict().items() if key != "resize"}},
        {"preprocessing": {**STORED.to_dict(), "size": [9, 9]}},
        {"preprocessing": {**STORED.to_dict(), "mean": [0.5], "std": [0.5]}},
        {"preprocessing": {**STORED.to_dict(), "mean": [[0.5]] * 3}},
        {"preprocessing": {**STORED.to_dict(), "size": {"height": 8}}},
        {"categories": {}},
        {"categories": "cat"},
        {"categories": ["cat", "dog"]},
        {"categories": ["cat", "dog", 3]},
        {"categories": ["cat", "dog", "x" * 1001]},
        {"categories": ["cat", "dog", "a\nb"]},
    ],
    ids=str,
)
def test_crafted_manifests_are_refused(change, manifest):
    with pytest.raises(RefusedError):
        manifest_of(json.dumps({**manifest, **change}))


def test_a_crafted_file_is_an_artefact_error(manifest, program, tmp_path):
    path = tmp_path / "model.pt2"
    lrpfx.save(program, path, preprocess=STORED)
    text, test, entries = archive.read_signed_archive(path.read_bytes())
    changed = {**json.loads(text), "preprocessing": {**STORED.to_dict(), "std": [0, 0, 0]}}
    changed.pop("hash")
    path.write_bytes(archive.signed_archive(entries, changed, test))
    with pytest.raises(ArtefactError, match="its preprocessing is invalid: std is positive"):
        lrpfx.load(path)
