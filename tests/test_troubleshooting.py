"""Errors lead to their section of Troubleshooting."""

import pickle
import tomllib

import pytest
import torch
from helpers import ROOT, Binary, Unary, small_net
from tools.messages import GAP
from tools.troubleshooting import SOURCE
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, composite_named
from lrpfx.rules import Epsilon
from lrpfx.troubleshooting import address, sections_of
from lrpfx.version import DOCUMENTATION


@pytest.mark.parametrize("filled", ["7", "'a name'", "first, second and 3 others"])
def test_what_a_message_names_does_not_change_its_section(filled):
    moved = {
        message.text
        for message in SOURCE.messages()
        if sections_of(message.text.replace(GAP, filled), message.module) != sections_of(message.text, message.module)
    }
    assert moved == set()


@pytest.mark.parametrize(
    "section, function, args",
    [
        ("arguments-of-transform", lrpfx.transform, (nn.ReLU(), {})),
        ("training-mode", lrpfx.transform, (nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train(), EpsilonPlus())),
        ("operation-without-a-rule", lrpfx.transform, (Unary(torch.lgamma), EpsilonPlus())),
        ("rule-does-not-fit", lrpfx.transform, (Binary(lambda a, b: nn.functional.conv2d(a, b)), EpsilonPlus())),
        ("settings-of-rules", Epsilon, (float("nan"),)),
        ("named-composites", composite_named, ("nothing",)),
        ("explainable-module", lrpfx.attribute, (nn.ReLU(), torch.rand(1))),
        ("files-and-folders", lrpfx.load, ("missing.pt2",)),
    ],
)
def test_errors_know_their_section(section, function, args):
    with pytest.raises(lrpfx.LrpfxError) as caught:
        function(*args)
    assert caught.value.help == f"{DOCUMENTATION}/troubleshooting/#{section}"


@pytest.mark.parametrize(
    "section, arguments",
    [
        ("targets", {"target": 5}),
        ("targets", {"targets": []}),
        ("names-of-nodes", {"record": "quux"}),
        ("conditions", {"conditions": [{"conv1": [99]}]}),
        ("choice-of-output", {"output": "logits"}),
    ],
)
def test_errors_of_attribution_know_their_section(section, arguments):
    torch.set_default_dtype(torch.float64)
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    with pytest.raises(lrpfx.LrpfxError) as caught:
        lrpfx.attribute(explain_model, torch.randn(2, 3, 8, 8), **arguments)
    assert caught.value.help == address(section)


def test_an_error_that_was_not_raised_by_lrpfx_leads_to_the_page():
    assert lrpfx.InputError("quux").help == address() == f"{DOCUMENTATION}/troubleshooting/"


def test_an_error_from_another_process_is_found_by_its_phrases():
    with pytest.raises(lrpfx.LrpfxError) as caught:
        lrpfx.transform(nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train(), EpsilonPlus())
    assert pickle.loads(pickle.dumps(caught.value)).help == address("training-mode")


def test_the_address_is_that_of_the_package():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert urls.get("Documentation", DOCUMENTATION).rstrip("/") == DOCUMENTATION
