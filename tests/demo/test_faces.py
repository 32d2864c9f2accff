"""The face of the astronaut is found as facenet-pytorch finds it, and its relevance is that of the third network alone."""

import numpy as np
import pytest
import torch
from helpers import assert_close
from small_detectors import suppressed
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.demo import faces, photographs
from lrpfx.request import Box
from lrpfx.request.candidates import overlap_of

pytest.importorskip("facenet_pytorch")
pytest.importorskip("skimage")


@pytest.fixture(scope="module")
def photograph():
    return photographs.load("astronaut")


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def test_the_face_is_where_the_cascade_finds_it(photograph, monkeypatch):
    mtcnn = pytest.importorskip("facenet_pytorch.models.mtcnn")
    detect_face = pytest.importorskip("facenet_pytorch.models.utils.detect_face")

    def suppressed_by_group(boxes, scores, groups, overlap):
        return suppressed(boxes + 1e5 * groups[:, None].to(boxes), scores, overlap)

    monkeypatch.setattr(detect_face, "batched_nms", suppressed_by_group)
    boxes, probabilities = mtcnn.MTCNN(min_face_size=40).detect(photograph)
    (found,) = lrpfx.explain(faces.load_detector(), photograph, composite=EpsilonPlus()).boxes
    likely = [box for box, probability in zip(boxes, probabilities, strict=True) if probability > 0.9]
    (expected,) = likely
    assert float(overlap_of(torch.tensor(found.corners), torch.tensor(np.asarray(expected, dtype=np.float64)))) > 0.75
    assert found.confidence > 0.99


class OnWindow(nn.Module):
    """The third network on one window."""

    def __init__(self, network, window):
        super().__init__()
        self.network, self.window = network, window

    def forward(self, images):
        return self.network(faces.cut_out(images, self.window, 48))[-1]


def test_relevance_is_that_of_the_third_network_on_the_window(photograph):
    heads, composite = faces.load_detector(), EpsilonPlus()
    explainer = lrpfx.Explainer(heads, composite=composite, categories=faces.CATEGORIES)
    explanation = explainer(photograph, Box.near((170, 50, 280, 190), "face"))
    assert explanation.target.name == "face" and explanation.target.probability > 0.99
    x = explanation.input[None]
    (windows,) = heads.further(x)
    corners = heads.decided(heads.detector["third"], 48, x, windows).corners[0]
    place = int((corners - torch.tensor(explanation.boxes[0].corners)).abs().amax(1).argmin())
    alone = OnWindow(heads.detector["third"], windows[:, place : place + 1]).eval()
    expected = lrpfx.attribute(lrpfx.transform(alone, composite, x), x, 1)
    assert explanation.target.score == pytest.approx(float(expected.output[0, 1].detach()), rel=1e-4)
    assert_close(torch.tensor(explanation.input_relevance), expected.relevance[0], 1e-4)
    seen = np.abs(explanation.relevance)
    assert seen[40:200, 150:300].sum() > 0.99 * seen.sum()
