"""Detectors with the structure of Ultralytics': boxes are those of their output, and relevance is that of a seed by hand."""

import numpy as np
import pytest
import torch
from helpers import assert_close
from PIL import Image
from small_detectors import suppressed, yolo
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.request import Box
from lrpfx.request.candidates import Candidates


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


def test_export_follows_the_heads(x):
    heads = lrpfx.detection.heads(yolo())
    explain_model = lrpfx.transform(heads, EpsilonPlus(), x, capture="export")
    assert_close(explain_model(x), heads(x), 1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*functions of their own")
@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo11n.yaml", "yolov10n.yaml", "yolo26n.yaml"])
def test_the_package_itself(name, x, tmp_path, monkeypatch):
    """Its networks with random weights, where it is installed: boxes are theirs, and relevance is that of a seed by hand."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    detector = spread(tasks.DetectionModel(name, ch=3, nc=3, verbose=False), name in ("yolov10n.yaml", "yolo26n.yaml"))
    heads = lrpfx.detection.heads(detector)
    with torch.no_grad():
        output, candidates = detector(x)[0][0], Candidates(heads(x))
    if heads.has_no_doubles:  # corners, confidence, class
        expected = sorted([(float(row[4]), int(row[5]), row[:4]) for row in output if row[4] > 0.25], key=lambda one: -one[0])
    else:
        middle, sides = output.T[:, :2], output.T[:, 2:4]
        corners, expected = torch.cat([middle - sides / 2, middle + sides / 2], 1), []
        for label in range(3):
            likely = (output[4 + label] > 0.25).nonzero()[:, 0]
            scores = output[4 + label, likely]
            kept = suppressed(corners[likely], scores, 0.7)
            expected += [(float(scores[one]), label, corners[likely[one]]) for one in kept]
        expected = sorted(expected, key=lambda one: -one[0])[:300]
    assert len(expected) > 10 and (heads.has_no_doubles or name in ("yolov8n.yaml", "yolo11n.yaml"))
    places = candidates.found(len(expected))[0][0]
    assert_close(candidates.confidences[0, places], torch.tensor([one[0] for one in expected]), 1e-9)
    assert_close(candidates.corners[0, places], torch.stack([one[2] for one in expected]), 1e-6)
    assert candidates.labels[0, places].tolist() == [one[1] for one in expected]
    composite = EpsilonPlus(epsilon=1e-12, stabilizer=1e-12)
    explain_model = lrpfx.transform(heads, composite, x)
    raw = OfPackage(detector).eval()
    itself, logits = lrpfx.transform(raw, composite, x), raw(x).detach()
    for number in range(3):
        confidence, label = expected[number][:2]
        place = (logits[0, label].sigmoid() - confidence).abs().argmin()
        seed = torch.zeros_like(logits)
        seed[0, label, place] = logits[0, label, place]
        wanted = lrpfx.attribute(itself, x, seed).relevance
        assert_close(lrpfx.attribute(explain_model, x, Box(number)).relevance, wanted, 1e-6)


def spread(detector, end2end):
    """A detector of the package whose confidences are spread out, without doubles if it has heads for that."""
    torch.manual_seed(0)
    detector = detector.double().eval()
    head = detector.model[-1]
    head.end2end = end2end
    with torch.no_grad():
        for module in detector.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.05, 0.2)  # values grow from layer to layer
        logits = OfPackage(detector)(torch.rand(1, 3, 64, 96))
        for last in (one[-1] for one in (head.one2one_cv3 if end2end else head.cv3)):
            last.weight.mul_(2 / logits.std(2).mean())
            last.bias.zero_()
    return detector


class OfPackage(nn.Module):
    """The logits of the classes at all places, as the package's network holds them beside its output."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, x):
        found = self.detector(x)[1]
        found = found["one2one" if self.detector.model[-1].end2end else "one2many"] if "one2one" in found else found
        return found["scores"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits(dtype):
    """Photographs that are large enough for a smaller example to compile with."""
    noise = np.random.default_rng(0).integers(0, 256, (10, 15, 3), dtype=np.uint8)
    photograph = Image.fromarray(noise).resize((300, 200), Image.Resampling.BICUBIC)
    best = lrpfx.Explainer(yolo().to(dtype), composite=EpsilonPlus())(photograph)
    box = lrpfx.Box.near(best.boxes[0].corners, best.boxes[0].name, iou=0.9)
    expected = lrpfx.Explainer(yolo().float(), composite=EpsilonPlus())(photograph, box)
    assert best.target.score == pytest.approx(expected.target.score, rel=0.02)
    assert np.corrcoef(best.relevance.ravel(), expected.relevance.ravel())[0, 1] > 0.999


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
