"""A network with ImageNet's weights, and photographs: the relevance lies where the thing is that the network names."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import lrpfx
from lrpfx.demo import photographs

pytest.importorskip("efficientnet_lite_pytorch")
MASK = Path(__file__).parent / "flower.png"  # the dahlias, white


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def network():
    torch.set_default_dtype(torch.float32)
    return photographs.load_classifier()


@pytest.fixture
def explainer(network):
    return lrpfx.Explainer(network.model, preprocess=network.preprocess, categories=network.categories)


def test_relevance_of_the_flower_is_on_the_flower(explainer):
    explanation = explainer(photographs.path("flower"))
    assert explanation.target.name == "daisy" and explanation.rules.startswith("GammaByDepth(low=-0.99")
    positive, mask = explanation.relevance.clip(0), np.asarray(Image.open(MASK).convert("1"))
    assert positive[mask].sum() > 0.8 * positive.sum()
    overlay = np.asarray(explanation.overlay()).astype(float)
    colourful = np.ptp(overlay, axis=-1) > 60  # red over grey
    assert colourful.any() and mask[colourful].mean() > 0.8


def test_other_classes_have_other_relevance(explainer):
    astronaut = explainer(photographs.path("astronaut"), targets=["football helmet", "barbell"])
    helmet, barbell = (answer.input_relevance.sum(0).ravel() for answer in astronaut.answers)
    assert np.corrcoef(helmet, barbell)[0, 1] < 0.9


@pytest.mark.thorough
def test_an_explanation_costs_little_more_than_attribute(explainer):
    path = photographs.path("chelsea")
    input = explainer.preprocess(photographs.load("chelsea"))[None]
    explainer(path)
    ratios = []
    for _ in range(15):
        start = time.process_time()  # other processes take time from both, at random
        lrpfx.attribute(explainer.explain_model, input)
        middle = time.process_time()
        explainer(path)
        ratios.append((time.process_time() - middle) / (middle - start))
    assert sorted(ratios)[7] < 1.3
