"""Errors and warnings lead to their section of Troubleshooting."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers import ROOT, Binary, Unary, small_net
from torch import nn

import lrpfx
from lrpfx.cmap import ColorMap
from lrpfx.composites import EpsilonPlus, composite_named
from lrpfx.concepts import merge
from lrpfx.errors import DOCUMENTATION, address, os_errors
from lrpfx.rules import Epsilon


def raised(function, *args, **settings):
    with pytest.raises(lrpfx.LrpfxError) as caught:
        function(*args, **settings)
    return caught.value


def dropout():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train()


@pytest.mark.parametrize(
    "topic, function, args",
    [
        ("composites", lrpfx.transform, (nn.ReLU(), {})),
        ("arguments", Epsilon, (float("nan"),)),
        ("training-mode", lrpfx.transform, (dropout(), EpsilonPlus())),
        ("operation-without-a-rule", lrpfx.transform, (Unary(torch.lgamma), EpsilonPlus())),
        ("rule-does-not-fit", lrpfx.transform, (Binary(lambda a, b: nn.functional.conv2d(a, b)), EpsilonPlus())),
        ("untraceable-forward", lrpfx.transform, (Unary(lambda x: x if x.sum() > 0 else -x), EpsilonPlus())),
        ("composites", composite_named, ("nothing",)),
        ("explainable-module", lrpfx.attribute, (nn.ReLU(), torch.rand(1))),
        ("explainers", lrpfx.Explainer, (3,)),
        ("collections", merge, ([],)),
        ("heatmaps", lrpfx.pictures.heatmap, (torch.rand(2, 2, 2, 2, 2),)),
        ("text-heatmaps", lrpfx.text.heatmap, (torch.rand(3), ["one", "two"])),
        ("colour-maps", ColorMap, ("0",)),
        ("damaged-stores", lrpfx.datasets.open, (ROOT / "docs",)),
        ("lowering", lrpfx.save, (nn.ReLU(), "m.pt2")),
        ("files-and-folders", lrpfx.load, ("missing.pt2",)),
        ("serving-programs", lrpfx.serve.run, ({},)),
        ("reports", lrpfx.report, (3, "r.html")),
    ],
)
def test_errors_know_their_topic(topic, function, args):
    error = raised(function, *args)
    assert error.topic == topic, error
    assert error.help == address(topic) == f"{DOCUMENTATION}/troubleshooting.html#{topic}"


@pytest.mark.parametrize(
    "topic, arguments",
    [
        ("targets", {"target": 5}),
        ("targets", {"targets": []}),
        ("names-of-nodes", {"record": "quux"}),
        ("conditions", {"conditions": [{"conv1": [99]}]}),
        ("choice-of-output", {"output": "logits"}),
    ],
)
def test_errors_of_attribution_know_their_topic(topic, arguments):
    torch.set_default_dtype(torch.float64)
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    assert raised(lrpfx.attribute, explain_model, torch.randn(2, 3, 8, 8), **arguments).topic == topic


def test_warnings_know_their_topic():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lrpfx.transform(small_net(), lrpfx.composites.NameMapComposite([(["quux"], Epsilon())]), unassigned="gradient")
    (warning,) = [one.message for one in caught if one.category is lrpfx.LrpfxWarning]
    assert warning.help == address("entries-that-match-nothing")


@pytest.mark.parametrize("kind", [lrpfx.InputError, lrpfx.InputTypeError, lrpfx.CaptureError, lrpfx.LrpfxWarning])
def test_a_raise_may_name_another_topic_than_its_class(kind):
    assert kind("quux").help == address(kind.topic) != kind("quux", topic="targets").help == address("targets")
    assert kind("quux").topic == kind.topic  # of which no instance changes


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_copies_keep_their_topic(copied):
    error = raised(lrpfx.transform, dropout(), EpsilonPlus())
    again = copied(error)
    assert (type(again), str(again), again.topic, again.args) == (type(error), str(error), "training-mode", error.args)


def test_errors_of_a_file_keep_their_topic_with_their_cause():
    def read():
        with os_errors(lrpfx.ArtefactError, ROOT, "read"):
            ROOT.read_bytes()

    error = raised(read)
    assert isinstance(error.__cause__, OSError) and error.topic == "files-and-folders" != type(error).topic


def test_the_address_is_that_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert urls.get("Documentation", DOCUMENTATION).rstrip("/") == DOCUMENTATION
