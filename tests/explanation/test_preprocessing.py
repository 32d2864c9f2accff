"""What a preprocessing does to a photograph is measured, not read from its settings."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.preprocessing import Preprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FORMS = {
    "torchvision's presets": torchvision.models.ResNet50_Weights.DEFAULT.transforms(),
    "a composition": transforms.Compose(
        [transforms.Resize(232), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    ),
    "version 2": v2.Compose(
        [
            v2.ToImage(),
            v2.Resize(232, antialias=True),
            v2.CenterCrop(224),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    ),
}


def gradient(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(640, 480), (300, 451)])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_geometry_and_range(name, size):
    measured = Preprocessing(FORMS[name]).measured(size)
    width, height = size
    scale = min(size) / 232
    resized = int(232 * width / min(size)), int(232 * height / min(size))
    left, top = (round((side - 224) / 2) for side in resized)
    expected = np.array([left, top, left + 224, top + 224]) * scale
    np.testing.assert_allclose(
        measured.geometry.box, expected, atol=1.2
    )  # to a pixel of the photograph, or half of the input's
    np.testing.assert_allclose(measured.low, -np.array(MEAN) / STD, atol=1e-5)
    np.testing.assert_allclose(measured.high, (1 - np.array(MEAN)) / STD, atol=1e-5)


def test_a_bright_spot_goes_back_to_its_place():
    pixels = np.zeros((480, 640, 3), dtype=np.uint8)
    pixels[300:310, 400:420] = 255
    preprocessing = Preprocessing(FORMS["a composition"])
    photograph = Image.fromarray(pixels)
    seen = preprocessing(photograph).double().sum(0)
    back = preprocessing.measured(photograph.size).geometry.undo((seen - seen.min()).numpy())
    rows, columns = np.indices(back.shape)
    centre = (back * rows).sum() / back.sum(), (back * columns).sum() / back.sum()
    np.testing.assert_allclose(centre, (304.5, 409.5), atol=0.6)


@pytest.mark.parametrize(
    ("function", "box"),
    [
        (transforms.Resize((64, 96)), (0, 0, 200, 100)),
        (lambda image: transforms.functional.hflip(transforms.functional.resize(image, (50, 50))), (0, 0, 200, 100)),
        (lambda image: transforms.functional.crop(image, 20, 30, 40, 60), (30, 20, 90, 60)),
        (transforms.Compose([transforms.Grayscale(), transforms.Resize((50, 100))]), (0, 0, 200, 100)),
        (transforms.Compose([transforms.Resize((50, 100)), transforms.Pad((10, 5))]), (0, 0, 200, 100)),
    ],
    ids=["squeezed", "mirrored", "cropped", "grey", "padded"],
)
def test_other_geometries(function, box):
    preprocessing = Preprocessing(lambda image: transforms.functional.to_tensor(function(image)))
    found = preprocessing.measured((200, 100)).geometry
    np.testing.assert_allclose(found.box, box, atol=1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda image: image.rotate(30),
        lambda image: image.transpose(Image.Transpose.ROTATE_90),
        transforms.RandomCrop(40),
        lambda image: image.transform(image.size, Image.Transform.PERSPECTIVE, (1, 0.2, 0, 0, 1, 0, 0.002, 0)),
    ],
    ids=["rotated", "turned", "random", "perspective"],
)
def test_unknown_geometries(function):
    preprocessing = Preprocessing(lambda image: transforms.functional.to_tensor(function(image)))
    assert preprocessing.measured((200, 100)).geometry is None


def test_image_processors_of_transformers():
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    preprocessing = Preprocessing(processor)
    assert preprocessing(gradient(60, 40)).shape == (3, 32, 32)
    assert preprocessing.measured((60, 40)).geometry.box == (0, 0, 60, 40) and preprocessing.range == ((-1,) * 3, (1,) * 3)


def test_arrays_and_batches_of_one():
    assert Preprocessing(lambda image: np.zeros((3, 4, 4), dtype=np.float32))(gradient(8, 8)).shape == (3, 4, 4)
    assert Preprocessing(lambda image: torch.zeros(1, 3, 4, 4))(gradient(8, 8)).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda image: image, InputTypeError, "returned Image, not a tensor"),
        (lambda image: torch.zeros(4, 4), InputError, "shape"),
        (lambda image: torch.zeros(3, 4, 4, dtype=torch.uint8), InputTypeError, "uint8"),
        (lambda image: 1 / 0, InputError, "preprocess failed .*ZeroDivisionError"),
    ],
)
def test_wrong_results(function, error, message):
    with pytest.raises(error, match=message):
        Preprocessing(function)(gradient(8, 8))


def test_wrong_functions():
    with pytest.raises(InputTypeError, match="not str"):
        Preprocessing("imagenet")
    with pytest.raises(InputTypeError, match="did you mean to call it"):
        Preprocessing(transforms.ToTensor)
