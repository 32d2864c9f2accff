"""What a preprocessing does to a photograph is measured, not read from its settings."""

from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms
from torchvision.transforms import v2

from lrpfx.errors import InputError, InputTypeError
from lrpfx.images.preprocessing import Preprocessing, preprocessing_of

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


@pytest.mark.parametrize("size", [(97, 640), (300, 200), (1500, 1100)])
def test_lines_that_are_mostly_padding(size):
    width, height = size
    padded = transforms.Compose([transforms.Pad((20, 10, 5, 40)), transforms.Resize((64, 64)), transforms.ToTensor()])
    geometry = Preprocessing(padded).measured(size).geometry
    across, down = (width + 25) / 64, (height + 50) / 64
    np.testing.assert_allclose([geometry.columns.step, geometry.rows.step], [across, down], rtol=0.003)
    np.testing.assert_allclose([geometry.columns.start, geometry.rows.start], [-20, -10], atol=0.5)


@pytest.mark.parametrize("side", [16, 64, 300])
@pytest.mark.parametrize("corner", [(0, 0), (1983, 1401), (37, 911)])
def test_small_crops_of_large_photographs(side, corner):
    box = (*corner, corner[0] + side, corner[1] + side)
    for size in (side, 2 * side):
        function = transforms.Compose([lambda one: one.crop(box), transforms.Resize(size), transforms.ToTensor()])
        np.testing.assert_allclose(Preprocessing(function).measured((2300, 1701)).geometry.box, box, atol=side / 200)


@pytest.mark.parametrize(
    "function",
    [
        transforms.RandomHorizontalFlip(0.5),
        transforms.RandomVerticalFlip(0.5),
        transforms.RandomRotation(10),
        transforms.ColorJitter(0.3),
    ],
    ids=["left and right", "up and down", "rotated", "colours"],
)
def test_random_preprocessing_is_not_undone(function):
    for seed in range(5):
        torch.manual_seed(seed)
        preprocessing = Preprocessing(transforms.Compose([transforms.Resize((32, 32)), function, transforms.ToTensor()]))
        assert preprocessing.prepared(gradient(60, 40))[1] is None


def test_a_rare_flip_is_not_undone_when_it_happens():
    preprocessing = Preprocessing(
        lambda one: transforms.functional.to_tensor(one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else one)
    )
    mirrored = False
    assert preprocessing.prepared(gradient(60, 40))[1] is not None
    mirrored = True
    assert preprocessing.prepared(gradient(60, 40))[1] is None


def trimmed(image):
    """Without its black borders."""
    return image.crop(image.convert("L").point(lambda value: 255 * (value > 10)).getbbox() or (0, 0, *image.size))


@pytest.mark.parametrize(
    ("function", "box"),
    [
        (lambda image: ImageOps.autocontrast(image.crop((20, 20, 52, 52))), None),
        (lambda image: trimmed(image).resize((32, 32)), None),
        (lambda image: ImageOps.autocontrast(image).resize((32, 32)), (0, 0, 100, 80)),
        (lambda image: ImageOps.invert(image.crop((20, 20, 52, 52))), (20, 20, 52, 52)),
        (lambda image: image.crop((20, 20, 52, 52)).convert("L"), (20, 20, 52, 52)),
        (lambda image: image.crop((20, 20, 52, 52)).filter(ImageFilter.GaussianBlur(1)), (20, 20, 52, 52)),
    ],
    ids=["stretched after a crop", "trimmed", "stretched", "inverted", "grey", "blurred"],
)
def test_what_depends_on_the_photograph_is_not_undone_wrongly(function, box):
    image = Image.new("RGB", (100, 80))
    image.paste(ImageOps.fit(gradient(12, 10), (80, 60), Image.Resampling.BICUBIC), (15, 10))
    _, geometry = Preprocessing(lambda one: transforms.functional.to_tensor(function(one))).prepared(image)
    assert (geometry is None) == (box is None)
    if box is not None:
        np.testing.assert_allclose(geometry.box, box, atol=0.2)


def standardized(image):
    values = transforms.functional.to_tensor(image.resize((16, 16)))
    return (values - values.mean()) / values.std()


def doubled(image):
    """With values that black and white do not show."""
    values = transforms.functional.to_tensor(image)
    return values if values.std() == 0 else 2 * values


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (standardized, None),
        (lambda image: standardized(image).nan_to_num(), None),
        (lambda image: torch.zeros(3, 8, 8), None),
        (doubled, None),
        (lambda image: 1 - transforms.functional.to_tensor(image), ((0.0,) * 3, (1.0,) * 3)),
    ],
    ids=["standardized", "finite", "constant", "outside", "inverted"],
)
def test_ranges_are_those_of_black_and_white_or_none(function, expected):
    preprocessing = Preprocessing(function)
    assert preprocessing.range is None
    preprocessing.prepared(gradient(60, 40))
    assert preprocessing.range == expected


def test_the_photograph_stays_as_it_is():
    def shrunk(image):
        image.thumbnail((20, 20))
        return transforms.functional.to_tensor(image)

    image = gradient(60, 40)
    before = image.copy()
    assert Preprocessing(shrunk)(image).shape == (3, 13, 20)
    assert image == before


def test_image_processors_of_transformers():
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    preprocessing = Preprocessing(processor)
    assert preprocessing(gradient(60, 40)).shape == (3, 32, 32)
    assert preprocessing.measured((60, 40)).geometry.box == (0, 0, 60, 40) and preprocessing.range == ((-1,) * 3, (1,) * 3)


def test_what_image_processors_of_transformers_return():
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    expected = Preprocessing(processor)(gradient(60, 40))
    for tensors in ("pt", "np", None):
        found = Preprocessing(partial(processor, return_tensors=tensors))(gradient(60, 40))
        assert torch.equal(found, expected)


def test_arrays_and_batches_of_one():
    assert Preprocessing(lambda image: np.zeros((3, 4, 4), dtype=np.float32))(gradient(8, 8)).shape == (3, 4, 4)
    assert Preprocessing(lambda image: torch.zeros(1, 3, 4, 4))(gradient(8, 8)).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda image: image, InputTypeError, "returned Image, not a tensor"),
        (lambda image: torch.zeros(4, 4), InputError, "shape"),
        (lambda image: np.zeros((8, 6, 3), dtype=np.float32), InputError, "its channels last: .*transpose"),
        (lambda image: torch.full((3, 4, 4), float("nan")), InputError, "not finite .*60×40"),
        (lambda image: torch.full((3, 4, 4), float("inf")), InputError, "not finite"),
        (lambda image: {"pixels": image}, InputTypeError, "returned dict"),
        (lambda image: torch.zeros(3, 4, 4, dtype=torch.uint8), InputTypeError, "uint8"),
        (lambda image: 1 / 0, InputError, "preprocess failed .*ZeroDivisionError"),
    ],
)
def test_wrong_results(function, error, message):
    with pytest.raises(error, match=message):
        Preprocessing(function)(gradient(60, 40))


def test_wrong_functions():
    with pytest.raises(InputTypeError, match="not str"):
        Preprocessing("imagenet")
    with pytest.raises(InputTypeError, match="did you mean to call it"):
        Preprocessing(transforms.ToTensor)


def test_networks_of_timm_for_other_than_three_channels_state_no_preprocessing():
    timm = pytest.importorskip("timm")
    assert preprocessing_of(timm.create_model("resnet10t", num_classes=2)) is not None
    assert preprocessing_of(timm.create_model("resnet10t", num_classes=2, in_chans=1)) is None


@pytest.mark.parametrize("size", [(640, 427), (300, 200), (451, 300), (97, 640)])
def test_a_whole_photograph_reaches_its_borders(size):
    resized = Preprocessing(transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()]))
    assert resized.measured(size).geometry.box == (0.0, 0.0, *size)
