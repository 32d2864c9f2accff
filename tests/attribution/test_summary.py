"""What notebooks show of an attribution."""

import math

import pytest
import torch
from helpers import small_net
from markup import Markup
from torch import nn

import lrpfx
from lrpfx.attribution import Attribution
from lrpfx.attribution.summary import MOST_IMAGES, MOST_SUMS
from lrpfx.composites import EpsilonPlusFlat

HEAD = ["relevance of", "name", "shape", "dtype", "total"]


@pytest.fixture
def explain_model():
    return lrpfx.transform(small_net(), EpsilonPlusFlat())


def test_shapes_and_sums(explain_model):
    found = lrpfx.attribute(explain_model, torch.rand(2, 3, 8, 8), 1, record="conv1", constants=True)
    assert found.targets is None
    shown = Markup(found._repr_html_())
    (head, of_input, of_layer, *_) = shown.tables[0]
    assert head == [*HEAD, "sums of samples"]
    sums = found.relevance.sum((1, 2, 3))
    assert of_input == ["input", "", "(2, 3, 8, 8)", "float64", f"{sums.sum():.6g}", f"{sums[0]:.6g}, {sums[1]:.6g}"]
    assert of_layer[:3] == ["layer", "conv1", "(2, 6, 8, 8)"]
    assert "(2, 5), float64" in "".join(shown.texts) and shown.count("img") == 2


def test_several_targets(explain_model):
    found = lrpfx.attribute(explain_model, torch.rand(1, 3, 8, 8), targets=[0, 1, 2])
    assert found.targets == 3
    shown = Markup(found._repr_html_())
    sums = found.relevance.flatten(1).sum(1)
    assert shown.tables[0][0] == [*HEAD, "sums of targets"]
    assert shown.tables[0][1][-1] == ", ".join(f"{value:.6g}" for value in sums)
    assert shown.count("img") == 3 and "3 targets" in "".join(shown.texts)


def test_long_batches_are_shortened():
    shown = Markup(Attribution(torch.rand(11, 2), torch.ones(11, 3, 4, 4))._repr_html_())
    assert shown.tables[0][1][-1] == ", ".join(["48"] * MOST_SUMS) + " and 3 more"
    assert shown.count("img") == MOST_IMAGES and f"and {11 - MOST_IMAGES} more" in "".join(shown.texts)


@pytest.mark.parametrize("side", [4, 600])
def test_pictures_are_neither_small_nor_large(side):
    shown = Markup(Attribution(torch.rand(1, 2), torch.rand(1, 3, side, side // 2))._repr_html_())
    (width,) = [int(one["width"]) for tag, one in shown.elements if tag == "img"]
    assert 64 <= width <= 256


@pytest.mark.parametrize(
    "relevance",
    [
        torch.rand(2, 3),
        torch.rand(2, 7, 4, 4),
        torch.rand(2, 3, 1, 9),
        torch.rand(0, 3, 4, 4),
        torch.rand(2, 5, 3, 4, 4),
        torch.tensor(1.0),
        torch.rand(3),
        None,
    ],
    ids=lambda value: "none" if value is None else str(tuple(value.shape)),
)
def test_other_tensors_have_no_picture(relevance):
    assert Markup(Attribution(torch.rand(2, 2), relevance)._repr_html_()).count("img") == 0


def test_one_image_for_each_target_and_sample():
    found = Attribution(torch.rand(2, 2), torch.rand(1, 2, 3, 4, 4), targets=1)
    assert Markup(found._repr_html_()).count("img") == 2
    assert Markup(Attribution(torch.rand(2, 2), torch.rand(3, 3, 4, 4), targets=3)._repr_html_()).count("img") == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_told(value):
    relevance = torch.zeros(1, 3, 4, 4)
    relevance[0, 0, 0, 0] = value
    shown = Markup(Attribution(torch.rand(1, 2), relevance)._repr_html_())
    assert shown.count("img") == 0 and "not finite" in "".join(shown.texts) and shown.tables[0][1][4] == str(value)


def test_names_of_nested_inputs_are_escaped():
    relevance = {"<b>&": (torch.ones(1, 2), None), "x": [torch.ones(1, 3, dtype=torch.bfloat16)]}
    rows = Markup(Attribution(torch.rand(1, 2), relevance)._repr_html_()).tables[0][1:]
    assert [row[1:4] for row in rows] == [["<b>&.0", "(1, 2)", "float64"], ["x.0", "(1, 3)", "bfloat16"]]


def test_zero_relevance_is_drawn():
    assert Markup(Attribution(torch.rand(1, 2), torch.zeros(1, 3, 4, 4))._repr_html_()).count("img") == 1


def test_relevance_that_can_be_differentiated():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)).eval()
    x = torch.rand(1, 3, 4, 4, requires_grad=True)
    found = lrpfx.attribute(lrpfx.transform(model, EpsilonPlusFlat(), fold=False), x)
    assert Markup(found._repr_html_()).count("img") == 1
    assert Markup(Attribution(x.sum(), x * 2)._repr_html_()).count("img") == 1
