"""Mistakes of a first hour, through public doors only: each message says what to do instead."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, NameMapComposite
from lrpfx.rules import Epsilon

from torchvision import transforms  # isort: skip

PREPROCESS = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(28), transforms.ToTensor()])
PHOTOGRAPH = Image.new("RGB", (40, 40), "red")
NAMES = ["cat", "tiger cat", "dog", "bird"]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


@pytest.fixture(scope="module")
def model():
    layers = nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    return nn.Sequential(*layers).float().eval()


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, 28, 28, dtype=torch.float32)


@pytest.fixture(scope="module")
def module(model, images):
    return lrpfx.transform(model, EpsilonPlus(), example_inputs=images)


@pytest.fixture(scope="module")
def explainer(model):
    return lrpfx.Explainer(model, preprocess=PREPROCESS, categories=NAMES)


def explains(**arguments):
    """Explain the photograph with other arguments than these."""
    return lambda own: lrpfx.explain(own.model, PHOTOGRAPH, **{"preprocess": PREPROCESS, **arguments})


def attributes(*arguments, **options):
    return lambda own: lrpfx.attribute(own.module, own.images, *arguments, **options)


def compiles(composite):
    return lambda own: lrpfx.transform(own.model, composite)


#: What is called, and what its message says: the remedy, or what is there in place of what was asked for.
MISTAKES = {
    "a model in training mode": (
        lambda own: lrpfx.transform(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), EpsilonPlus()),
        "Call model.eval() first",
    ),
    "the name of a model": (lambda own: lrpfx.Explainer("resnet50"), "torchvision.models.resnet50(weights='DEFAULT').eval()"),
    "weights as a model": (
        lambda own: lrpfx.transform(own.model.state_dict(), "epsilon_plus"),
        "model.load_state_dict(weights)",
    ),
    "the class of a model": (lambda own: lrpfx.transform(Branching, "epsilon_plus"), "did you mean Branching()?"),
    "a branch on values": (
        lambda own: lrpfx.transform(Branching().eval(), EpsilonPlus(), example_inputs=torch.ones(1, 4)),
        "torch.where",
    ),
    "a result of transform as a model": (lambda own: lrpfx.transform(own.module, EpsilonPlus()), "transform the source model"),
    "a model where its compilation belongs": (
        lambda own: lrpfx.attribute(own.model, own.images, 1),
        "the module that lrpfx.transform(model, composite) returns",
    ),
    "the class of a composite": (compiles(EpsilonPlus), "did you mean EpsilonPlus()?"),
    "a rule as a composite": (compiles(Epsilon()), "LayerMapComposite([(lrpfx.types.Linear, rule)])"),
    "a file as a model": (lambda own: lrpfx.Explainer(Path("model.pth")), "torch.load(path) if it is a model"),
    "a preprocessing that is not called": (
        explains(preprocess=partial(transforms.Resize, 32)),
        "did you mean to call it, weights.transforms()?",
    ),
    "a pattern of files": (lambda own: own.explainer("*.jpg"), "sorted(glob.glob(pattern))"),
    "a layer itself": (explains(record=nn.Linear(2, 2)), "takes names of layers, not a Linear"),
    "an input in double precision": (
        lambda own: lrpfx.attribute(own.module, own.images.double(), 1),
        "pass input.to(torch.float32)",
    ),
    "a composite with a typing error": (compiles("epsilon_plu"), "Did you mean 'epsilon_plus'?"),
    "a composite without its range": (compiles("EpsilonGammaBox"), "needs the settings low, high"),
    "rules for layers that are not there": (
        compiles(NameMapComposite([(["layer1"], Epsilon())])),
        "Give it a rule by kind, (lrpfx.types.ConvolutionStandard, lrpfx.rules.Epsilon())",
    ),
    "a photograph without preprocessing": (explains(preprocess=None), "pass preprocess="),
    "a file that is not there": (lambda own: own.explainer("missing.jpg"), "there is no file missing.jpg"),
    "an address": (lambda own: own.explainer("https://example.org/cat.jpg"), "download the photograph"),
    "the content of a file": (lambda own: own.explainer(b"\x89PNG"), "io.BytesIO(content)"),
    "no photographs": (lambda own: own.explainer([]), "the list of images is empty"),
    "a text without a tokenizer": (
        lambda own: lrpfx.explain(own.model, "a nice film"),
        "for texts, pass tokenizer=",
    ),
    "a part of the name of a class": (lambda own: own.explainer(PHOTOGRAPH, "tiger"), "'tiger cat' (1)"),
    "a class with a typing error": (lambda own: own.explainer(PHOTOGRAPH, "dgo"), "Did you mean 'dog'?"),
    "classes in another list's words": (
        lambda own: own.explainer(PHOTOGRAPH, "dog, domestic dog"),
        "it contains are 'dog' (2)",
    ),
    "the plural of a class": (lambda own: own.explainer(PHOTOGRAPH, "cats"), "'cat' (0), 'tiger cat' (1)"),
    "a class of another data set": (lambda own: own.explainer(PHOTOGRAPH, "n02123045"), "An index, 0 to 3, names a class"),
    "an index with a point": (lambda own: own.explainer(PHOTOGRAPH, 2.0), "the class with this index is 2"),
    "weights in an explainer": (lambda own: own.explainer(PHOTOGRAPH, torch.eye(4)[2]), "write {class: weight, ...}"),
    "weights in whole numbers": (attributes(torch.eye(4, dtype=torch.long)[:2]), "floating-point numbers: .float()"),
    "an index from the end": (attributes(-1), "the output has 4 classes, 0 to 3"),
    "the negative class of one logit": (
        lambda own: lrpfx.attribute(lrpfx.transform(nn.Linear(4, 1), EpsilonPlus()), torch.ones(1, 4), 1),
        "what speaks against it is the target {0: -1.0}",
    ),
    "a class that is not there": (lambda own: own.explainer(PHOTOGRAPH, 7), "the output has 4 classes"),
    "several classes as one": (lambda own: own.explainer(PHOTOGRAPH, [0, 1]), "several classes for each are targets="),
    "one class where several belong": (lambda own: own.explainer(PHOTOGRAPH).compare("dog"), "write ['dog']"),
    "one class as several": (attributes(targets=3), "for one, pass target="),
    "one class and several": (attributes(1, targets=[1, 2]), "pass one of them"),
    "a name where names are not known": (explains(target="cat"), "pass categories="),
    "a name for attribute": (attributes("cat"), "lrpfx.Explainer(categories=)"),
    "an index in quotes": (attributes("2"), "write target=2, without quotes"),
    "a function as gradients need it": (attributes(lambda output: output[:, 2]), "write target=2"),
    "a function of several classes": (
        attributes(lambda output: output[:, 2] - output[:, 1]),
        "write output=lambda output: your_function(output).reshape(-1, 1)",
    ),
    "an output that is not there": (attributes(1, output="logits"), "it is a Tensor"),
    "a layer that is not there": (attributes(1, record=["layer4"]), "lrpfx.node_names(explain_model) lists all names"),
    "an input without a batch": (lambda own: lrpfx.attribute(own.module, own.images[0], 1), "pass input[None]"),
    "an array as input": (
        lambda own: lrpfx.attribute(own.module, own.images.numpy(), 1),
        "pass torch.from_numpy(array)",
    ),
    "bytes as input": (
        lambda own: lrpfx.attribute(own.module, (own.images * 255).byte(), 1),
        "Pass a floating-point tensor",
    ),
    "an input with other channels": (
        lambda own: lrpfx.attribute(own.module, own.images[:, :1], 1),
        "have the shape 2×1×28×28",
    ),
    "values that are not finite": (lambda own: lrpfx.attribute(own.module, own.images * np.nan, 1), "not finite"),
    "too few names of classes": (explains(categories=["cat", "dog", "bird"]), "3 names of classes, but the output has 4"),
    "the name of a data set for its classes": (explains(categories="imagenet"), "a list of names"),
    "a setting of another library": (lambda own: own.explainer(PHOTOGRAPH).overlay(alpha=0.5), "opacity"),
    "a colour map with a typing error": (lambda own: own.explainer(PHOTOGRAPH).overlay(cmap="vivd"), "Did you mean 'vivid'?"),
    "a picture as a text": (lambda own: own.explainer(PHOTOGRAPH).save("explanation.txt"), "saved as .png"),
    "a page as a picture": (lambda own: own.explainer(PHOTOGRAPH).save("explanation.html"), "lrpfx.report(explanation, path)"),
    "a table as a picture": (lambda own: own.explainer([PHOTOGRAPH]).save("all.csv"), "to_pandas() is a table"),
    "figures of several": (lambda own: own.explainer([PHOTOGRAPH]).save("all.npz"), "saved by each explanation"),
    "a batch as one picture": (
        lambda own: lrpfx.pictures.heatmap(lrpfx.attribute(own.module, own.images, 1).relevance),
        "draw one at a time, relevance[0]",
    ),
    "an attribution as a picture": (
        lambda own: lrpfx.pictures.heatmap(lrpfx.attribute(own.module, own.images[:1], 1)),
        "pass its attribute .relevance",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_do(mistake, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, remedy = MISTAKES[mistake]

    class Own:
        def __getattr__(self, name):
            return request.getfixturevalue(name)

    with pytest.raises(lrpfx.LrpfxError, match=re.escape(remedy)) as caught:
        call(Own())
    assert caught.value.help.endswith(f"#{caught.value.topic}")


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (SimpleNamespace(x=torch.ones(2, 3), edge_index=torch.zeros(2, 1).long()), '"edge_index": graph.edge_index'),
        ("cat.jpg", r"lrpfx\.Explainer\(model\)"),
        (np.ones((1, 3)), "from_numpy"),
    ],
)
def test_what_is_no_tensor_names_its_door(given, remedy):
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(3, 2)), EpsilonPlus())
    doors = (
        lambda: lrpfx.attribute(explain_model, given),
        lambda: lrpfx.ledger(explain_model, given),
        lambda: lrpfx.lower(explain_model, given),
        lambda: lrpfx.transform(nn.Sequential(nn.Linear(3, 2)), EpsilonPlus(), given),
    )
    for door in doors:
        with pytest.raises(lrpfx.InputTypeError, match=remedy):
            door()
