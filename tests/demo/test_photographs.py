"""Photographs and classifiers from installed packages."""

import sys

import pytest
import torch

pytest.importorskip("skimage")
pytest.importorskip("efficientnet_lite_pytorch")

import torchvision_cpu  # noqa: F401  # before torchvision
from torchvision.transforms.functional import hflip

import lrpfx
from lrpfx.composites import GammaByDepth
from lrpfx.demo import photographs
from lrpfx.demo.photographs import HIGH, LOW, PHOTOGRAPHS
from lrpfx.errors import InputError


@pytest.fixture(autouse=True)
def float32(_double_precision):
    """As the networks have it, in place of the tests' float64."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def classifier():
    return photographs.load_classifier()


#: What can be seen, under ImageNet's names. There is no class for astronauts, and none for dahlias.
SEEN = {
    "china": {"palace", "monastery", "bell cote"},
    "flower": {"daisy"},
    "astronaut": {"football helmet", "crash helmet", "bobsled"},
    "chelsea": {"tiger cat", "tabby", "Egyptian cat"},
    "coffee": {"espresso", "cup"},
    "motorcycle": {"moped", "motor scooter"},
    "rocket": {"missile", "projectile", "space shuttle"},
}


def test_the_classifier_recognizes_the_photographs(classifier):
    assert set(SEEN) == set(PHOTOGRAPHS)
    images = torch.stack([classifier.preprocess(photographs.load(name)) for name in PHOTOGRAPHS])
    assert images.shape == (7, 3, 224, 224)
    with torch.no_grad():
        predicted = [classifier.categories[index] for index in classifier.model(images).argmax(1)]
    assert all(name in SEEN[photograph] for photograph, name in zip(PHOTOGRAPHS, predicted, strict=True)), predicted


def test_files_are_there_without_a_download():
    for name in PHOTOGRAPHS:
        assert photographs.path(name).is_file()
        image = photographs.load(name)
        assert image.mode == "RGB" and min(image.size) >= 300


def test_black_and_white_are_the_bounds(classifier):
    from PIL import Image

    for colour, bound in (("black", LOW), ("white", HIGH)):
        for preprocess in (classifier.preprocess, classifier.preprocess_whole):
            found = preprocess(Image.new("RGB", (320, 300), colour))
            torch.testing.assert_close(found, torch.full((3, 224, 224), bound), rtol=0.0, atol=1e-6)


def test_the_centre_is_cut_out_and_the_whole_is_not(classifier):
    """On a picture with a white frame, which only the whole shows."""
    from PIL import Image

    framed = Image.new("RGB", (256, 256), "white")
    framed.paste(Image.new("RGB", (236, 236), "black"), (10, 10))
    centre, whole = classifier.preprocess(framed), classifier.preprocess_whole(framed)
    assert float(centre.max()) < 0.0 < float(whole.max())
    assert torch.equal(centre, hflip(centre))


def test_gamma_falls_with_the_depth_of_the_classifier(classifier):
    """Of the stem, sixteen blocks (one without an expansion), and the head; padding and batch norm do not count."""
    table = lrpfx.assignment(lrpfx.transform(classifier.model, GammaByDepth(low=LOW, high=HIGH)))
    convolutions = [row for row in table if row.kind.startswith("Convolution")]
    assert len(convolutions) == 1 + 3 * 16 - 1 + 1
    assert convolutions[0].rule.startswith("ZBox") and convolutions[-1].rule.startswith("Gamma(gamma=0.05,")
    assert convolutions[24].chosen_by == f"convolution 25 of 49: gamma {0.05**0.5:.3g}"


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(InputError, match="needs efficientnet_lite_pytorch: pip install 'lrpfx\\[photographs\\]'"):
        photographs.load_classifier()
