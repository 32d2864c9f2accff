"""An output with several values for each class: what each message proposes is taken, and leads to a map."""

import re
import warnings

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import EpsilonPlus
from lrpfx.types import Convolution

COMPOSITE = EpsilonPlus(layer_map=[(Convolution, rules.Epsilon())])


class Segmentation(nn.Module):
    """Scores of five classes at each place, in one row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))
        self.eval()

    def forward(self, x):
        return self.layers(x).flatten(2)


@pytest.mark.parametrize("target", [None, 1])
@pytest.mark.parametrize("ask", ["attribute", "explain", "ledger"])
def test_the_messages_about_places_lead_to_a_map(ask, target):
    model, x = Segmentation(), torch.rand(1, 3, 6, 6)
    explain_model = lrpfx.transform(model, COMPOSITE)
    asked = {
        "attribute": lambda **options: lrpfx.attribute(explain_model, x, target, **options).relevance,
        "ledger": lambda **options: lrpfx.ledger(explain_model, x, target, **options).inputs["x"],
        "explain": lambda **options: lrpfx.explain(model, x, target, composite=COMPOSITE, **options)[0].relevance,
    }[ask]
    with pytest.raises(lrpfx.InputError) as caught:
        asked()
    proposed = re.search(r"output=(lambda output: output\[.*?\])", str(caught.value))
    found = torch.as_tensor(asked(output=eval(proposed[1])))
    index = int(model(x)[0, :, 0].argmax()) if target is None else target
    seed = torch.zeros_like(model(x))
    seed[0, index, 0] = model(x)[0, index, 0]
    expected = lrpfx.attribute(explain_model, x, seed).relevance
    expected = {"ledger": expected.sum(), "explain": expected.sum(1)}.get(ask, expected)
    assert_close(found.reshape(expected.shape).double(), expected, 1e-5)


def test_the_target_that_the_message_proposes():
    model, x = Segmentation(), torch.rand(2, 3, 6, 6)
    explain_model = lrpfx.transform(model, COMPOSITE)
    with pytest.raises(lrpfx.InputError, match="a tensor of the output's shape, or a function of the output"):
        lrpfx.attribute(explain_model, x, 1)
    chosen = (torch.arange(5) == 1)[:, None]
    found = lrpfx.attribute(explain_model, x, lambda output: output * chosen)
    assert_close(found.relevance, lrpfx.attribute(explain_model, x, model(x) * chosen).relevance, 1e-12)


def test_an_output_without_classes():
    """One value for each sample, as regressions and functions of the outputs return it, is explained as it is."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).eval()
    explain_model, x = lrpfx.transform(model, EpsilonPlus()), torch.randn(4, 3)
    expected = lrpfx.attribute(explain_model, x, lambda output: output).relevance
    assert_close(lrpfx.attribute(explain_model, x).relevance, expected, 1e-12)
    assert_close(lrpfx.attribute(explain_model, x, 0, output=lambda output: output.reshape(-1, 1)).relevance, expected, 1e-12)
    with pytest.raises(lrpfx.InputError, match="target=None explains"):
        lrpfx.attribute(explain_model, x, 0)


class MapsInADict(nn.Module):
    """Classes at places in a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        return {"out": self.layer(x).flatten(2)}


@pytest.mark.parametrize("output", [None, "out", lambda output: output["out"]])
def test_the_remedy_for_an_output_with_places_runs_on_that_model(output):
    explain_model, x = lrpfx.transform(MapsInADict().eval(), EpsilonPlus()), torch.randn(2, 2, 4, 4)
    with pytest.raises(lrpfx.InputError, match="choose a place: output=") as caught:
        lrpfx.attribute(explain_model, x, 1, output=output)
    remedy = str(caught.value).partition("output=")[2].partition(", with")[0].partition(", or give")[0]
    chosen = eval(remedy, {"f": output})  # the message's own code
    found = lrpfx.attribute(explain_model, x, 1, output=chosen)
    assert found.output.shape == (2, 3)


def test_the_remedy_of_the_front_door_runs_on_that_model():
    x = torch.randn(2, 2, 4, 4)
    with pytest.raises(lrpfx.InputError, match=r"output=lambda output: output\[.out.\]\[:, :, 0\]"):
        lrpfx.explain(MapsInADict().eval(), x, 1, composite=EpsilonPlus())
    assert lrpfx.explain(MapsInADict().eval(), x, 1, composite=EpsilonPlus(), output=lambda output: output["out"][:, :, 0])


def test_outputs_that_others_are_computed_from_are_no_constants_of_a_function():
    """A hidden state among the outputs has relevance only as far as the function reads it."""

    class WithStates(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)

        def forward(self, x):
            hidden = self.first(x).relu()
            return {"logits": self.last(hidden), "hidden": hidden}

    explain_model, x = lrpfx.transform(WithStates().eval(), EpsilonPlus()), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lrpfx.attribute(explain_model, x, 0, output=lambda result: result["logits"])
        difference = lrpfx.attribute(explain_model, x, output=lambda result: result["logits"][:, 0] - result["logits"][:, 1])
    assert_close(found.relevance, lrpfx.attribute(explain_model, x, 0, output="logits").relevance, 1e-12)
    expected = lrpfx.attribute(explain_model, x, {0: 1.0, 1: -1.0}, output="logits").relevance
    assert_close(difference.relevance, expected, 1e-6)
