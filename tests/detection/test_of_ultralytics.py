"""Detectors with the structure of Ultralytics': boxes are those of their output, and relevance is that of a seed by hand."""

import pytest
import torch
from helpers import assert_close
from PIL import Image
from small_detectors import suppressed, yolo
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.request import Box
from lrpfx.request.boxes import Candidates


@pytest.fixture(params=[False, True], ids=["with doubles", "without doubles"])
def detector(request):
    return yolo(request.param)


@pytest.fixture
def x():
    return torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))


def expected_boxes(detector, x):
    """Corners, probabilities and classes of what the output holds above the threshold, without doubles, by class."""
    output = detector(x)[0][0].T.detach()
    middle, sides = output[:, :2], output[:, 2:4]
    corners, found = torch.cat([middle - sides / 2, middle + sides / 2], 1), []
    for label in range(3):
        likely = (output[:, 4 + label] > 0.25).nonzero()[:, 0]
        scores = output[likely, 4 + label]
        kept = torch.arange(len(likely)) if detector.model[-1].end2end else suppressed(corners[likely], scores, 0.7)
        found += [(float(scores[one]), label, corners[likely[one]], int(likely[one])) for one in kept]
    return sorted(found, key=lambda one: -one[0])[:300]


def test_the_candidates_are_what_the_output_holds(detector, x):
    heads = lrpfx.detection.heads(detector)
    candidates, expected = Candidates(heads(x).detach()), expected_boxes(detector, x)
    candidates.check()
    assert len(expected) > 20
    places = candidates.found(len(expected))[0][0]
    assert_close(candidates.confidences[0, places], torch.tensor([one[0] for one in expected]), 1e-9)
    assert_close(candidates.corners[0, places], torch.stack([one[2] for one in expected]), 1e-9)
    assert candidates.labels[0, places].tolist() == [one[1] for one in expected]


class Logits(nn.Module):
    """The logits of the classes at all places."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, x):
        _, maps = self.detector(x)
        head = self.detector.model[-1]
        heads = head.one2one_cv3 if head.end2end else head.cv3
        return torch.cat([one(map).flatten(2) for one, map in zip(heads, maps, strict=True)], 2)


def test_relevance_is_that_of_the_logits_with_a_seed_by_hand(detector, x):
    composite = EpsilonPlus(epsilon=1e-12, stabilizer=1e-12)
    heads = lrpfx.detection.heads(detector)
    explain_model = lrpfx.transform(heads, composite, x)
    itself = Logits(detector).eval()
    raw, output = lrpfx.transform(itself, composite, x), itself(x).detach()
    for number, (_, label, corners, place) in enumerate(expected_boxes(detector, x)[:5]):
        seed = torch.zeros_like(output)
        seed[0, label, place] = output[0, label, place]
        expected = lrpfx.attribute(raw, x, seed).relevance
        assert_close(lrpfx.attribute(explain_model, x, Box(number)).relevance, expected, 1e-6)
        accounts = lrpfx.ledger(explain_model, x, Box(number, "y2"))
        assert accounts.seed == pytest.approx(float(corners[3])) and accounts.unexplained < 1e-9
    other = torch.rand(1, 3, 96, 64)
    assert_close(explain_model(other), heads(other), 1e-9)


class Wrapper(nn.Module):
    """As the class YOLO holds its model."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def test_through_the_front_door():
    detector = yolo().float()
    photograph = Image.effect_noise((300, 200), 60).convert("RGB")
    explainer = lrpfx.Explainer(Wrapper(detector).eval(), composite=EpsilonPlus())
    explanation = explainer(photograph)
    assert explanation.input.shape == (3, 432, 640) and {one.name for one in explanation.boxes} <= {"cat", "dog", "hen"}
    assert explanation.relevance.shape == (200, 300) and explanation.relevance.any()
    scale, above = 300 / 640, (432 - 427) // 2
    x1, y1, x2, y2 = explanation.output[0, -7:-3]
    expected = x1 * scale, (y1 - above) * scale, x2 * scale, (y2 - above) * scale
    assert explanation.boxes[0].corners == pytest.approx(expected, abs=1.0)
