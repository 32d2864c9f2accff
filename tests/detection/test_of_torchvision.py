"""Detectors of torchvision: what the heads say is what the detector returns, and relevance is that of a seed by hand."""

import pytest
import torch
from helpers import assert_close
from small_detectors import TORCHVISION, made, suppressed
from torch import nn
from torchvision.ops import boxes as box_operations

import lrpfx
from lrpfx.composites import EpsilonPlus, GammaByDepth
from lrpfx.request import Box
from lrpfx.request.boxes import Candidates


@pytest.fixture(params=TORCHVISION)
def detector(request, monkeypatch):
    monkeypatch.setattr(box_operations, "nms", suppressed)
    return made(request.param)


@pytest.fixture
def image():
    return torch.rand(3, 50, 70, generator=torch.Generator().manual_seed(0))


def input_of(heads, image):
    return heads.input_of(lambda given: given)(image)[None]


def test_the_candidates_are_what_the_detector_finds(detector, image):
    heads = lrpfx.detection.heads(detector)
    x = input_of(heads, image)
    with torch.no_grad():
        (expected,) = detector([image])
        candidates = Candidates(heads(x))
    count = len(expected["scores"])
    assert count > 20 and len(expected["labels"].unique()) > 1
    places, are_there = candidates.found(count)
    assert are_there.all() and (count == heads.limit or not candidates.found(count + 1)[1].all())
    scale = torch.tensor([70 / x.shape[3], 50 / x.shape[2]] * 2)
    assert_close(candidates.corners[0, places[0]] * scale, expected["boxes"], 1e-6)
    assert_close(candidates.confidences[0, places[0]], expected["scores"], 1e-12)
    assert candidates.labels[0, places[0]].equal(expected["labels"])


class RawHeads(nn.Module):
    """The heads of a detector as they are side by side."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images):
        return torch.cat(list(self.detector.head(list(self.detector.backbone(images).values())).values()), -1)


def seeds_by_hand(detector, x, count):
    """For each of the first detections, the seeds of its score and of its left and lower edge, and the edges."""
    size = detector.transform.size_divisible
    padded = nn.functional.pad(x, (0, -x.shape[3] % size, 0, -x.shape[2] % size))
    features = list(detector.backbone(padded).values())
    outputs = detector.head(features)
    images = type("Images", (), {"tensors": padded, "image_sizes": [tuple(x.shape[2:])]})
    (anchors,) = detector.anchor_generator(images, features)
    found = Candidates(lrpfx.detection.heads(detector)(x))
    raw = torch.cat(list(outputs.values()), -1).detach()
    names = list(outputs)
    first = {name: sum(outputs[one].shape[2] for one in names[:place]) for place, name in enumerate(names)}
    of_classes, of_codes = first["cls_logits"], first["bbox_regression"]
    linear = "bbox_ctrness" in outputs
    if linear:
        sides = torch.stack([anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]], 1)
        boxes = detector.box_coder.decode(outputs["bbox_regression"][0], anchors)
    else:
        boxes = detector.box_coder.decode_single(outputs["bbox_regression"][0], anchors)
    result = []
    for number in found.found(count)[0][0].tolist():
        corners, label = found.corners[0, number], int(found.labels[0, number])
        clipped = boxes.clamp(min=0).minimum(torch.tensor([x.shape[3], x.shape[2]] * 2).to(boxes))
        likely = (clipped - corners).abs().amax(1) + (raw[0, :, of_classes + label] - found.output[0, number, label]).abs()
        anchor = int(likely.argmin())
        assert likely[anchor] < 1e-8
        seeds = [torch.zeros_like(raw) for _ in range(3)]
        seeds[0][0, anchor, of_classes + label] = raw[0, anchor, of_classes + label]
        codes = raw[0, anchor, of_codes : of_codes + 4]
        if linear:
            seeds[1][0, anchor, of_codes] = -codes[0] * sides[anchor, 0]
            seeds[2][0, anchor, of_codes + 3] = codes[3] * sides[anchor, 1]
        else:
            width, height = anchors[anchor, 2] - anchors[anchor, 0], anchors[anchor, 3] - anchors[anchor, 1]
            shares = codes / torch.tensor(detector.box_coder.weights)
            seeds[1][0, anchor, of_codes], seeds[1][0, anchor, of_codes + 2] = (
                shares[0] * width,
                -0.5 * width * torch.expm1(shares[2]),
            )
            seeds[2][0, anchor, of_codes + 1], seeds[2][0, anchor, of_codes + 3] = (
                shares[1] * height,
                0.5 * height * torch.expm1(shares[3]),
            )
        result.append((seeds, boxes[anchor].detach(), corners.detach()))
    return padded, result


@pytest.mark.parametrize("kind", [EpsilonPlus, GammaByDepth])
def test_relevance_is_that_of_the_raw_heads_with_a_seed_by_hand(detector, image, kind):
    composite = kind(epsilon=1e-12, stabilizer=1e-12)
    heads = lrpfx.detection.heads(detector)
    x = input_of(heads, image)
    explain_model = lrpfx.transform(heads, composite, x)
    padded, by_hand = seeds_by_hand(detector, x, 12)
    raw = lrpfx.transform(RawHeads(detector).eval(), composite, padded)
    compared = 0
    for number, (seeds, whole, corners) in enumerate(by_hand):
        for what, seed, edge in zip(("score", "x1", "y2"), seeds, (None, 0, 3), strict=True):
            if edge is not None and (whole[edge] != corners[edge] or not seed.any()):
                continue  # the image cuts it off, or the network leaves the anchor's edge
            expected = lrpfx.attribute(raw, padded, seed).relevance[..., : x.shape[2], : x.shape[3]]
            assert_close(lrpfx.attribute(explain_model, x, Box(number, what)).relevance, expected, 1e-5)
            compared += 1
    assert compared > 12


def test_sizes_of_photographs_are_open(detector):
    heads = lrpfx.detection.heads(detector)
    explain_model = lrpfx.transform(heads, EpsilonPlus(), torch.rand(1, 3, 64, 80))
    other = torch.rand(1, 3, 64, 96 if heads.detector.transform.fixed_size is None else 80)
    assert_close(explain_model(other), heads(other), 1e-9)
    assert lrpfx.ledger(explain_model, other, Box(0)).unexplained < 1e-12


def test_a_whole_detector_is_refused_with_the_way_to_go(detector, image):
    with pytest.raises(lrpfx.CaptureError, match="takes lrpfx") as caught:
        lrpfx.transform(detector, EpsilonPlus(), [image])
    assert caught.value.topic == "detectors"
