"""Detectors of torchvision: what the heads say is what the detector returns, and relevance is that of a seed by hand."""

import numpy as np
import pytest
import torch
from helpers import assert_close
from PIL import Image
from small_detectors import OF_REGIONS, TORCHVISION, made, replace_kernels
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.ops import MultiScaleRoIAlign

import lrpfx
from lrpfx.composites import EpsilonPlus, GammaByDepth
from lrpfx.detection.of_torchvision import pooled_regions
from lrpfx.request import Box
from lrpfx.request.candidates import Candidates

#: Of random weights that find several classes, where 0 does not.
SEEDS = {"KeypointRCNN": 1}


@pytest.fixture(params=TORCHVISION)
def detector(request, monkeypatch):
    replace_kernels(monkeypatch)
    return made(request.param, seed=SEEDS.get(request.param, 0))


@pytest.fixture
def image():
    return torch.rand(3, 50, 70, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def dense_detector(detector):
    """One whose heads see the whole map."""
    if isinstance(detector, FasterRCNN):
        pytest.skip("it has heads for regions")
    return detector


def input_of(heads, image):
    return heads.input_of(lambda given: given)(image)[None]


def compiled(heads, composite, arguments):
    return lrpfx.transform(heads, composite, arguments, constants=heads.further_names)


def test_the_candidates_are_what_the_detector_finds(detector, image):
    heads = lrpfx.detection.heads(detector)
    x = input_of(heads, image)
    with torch.no_grad():
        (expected,) = detector([image])
        candidates = Candidates(heads(x, *heads.further(x)))
    count = len(expected["scores"])
    assert count >= 20 and len(expected["labels"].unique()) > 1
    places, are_there = candidates.found(count)
    assert are_there.all() and (count == heads.limit or not candidates.found(count + 1)[1].all())
    scale = torch.tensor([70 / x.shape[3], 50 / x.shape[2]] * 2)
    assert_close(candidates.corners[0, places[0]] * scale, expected["boxes"], 1e-6)
    assert_close(candidates.confidences[0, places[0]], expected["scores"], 1e-12)
    assert candidates.labels[0, places[0]].equal(expected["labels"])


@pytest.mark.filterwarnings("ignore:the map is empty")
def test_a_whole_detector_is_explained_as_its_heads(detector, image):
    """A found box through the front door has the relevance that a transform of the heads gives it."""
    photograph = Image.fromarray((image * 255).permute(1, 2, 0).byte().numpy())
    composite = EpsilonPlus()
    explainer = lrpfx.Explainer(
        detector, composite=composite, preprocess=lambda one: torch.tensor(np.array(one)).movedim(2, 0) / 255
    )
    found = explainer(photograph, targets=[lrpfx.Box(0), lrpfx.Box(3, "x1")])
    heads = lrpfx.detection.heads(detector)
    x = found.input[None]
    arguments = (x, *heads.further(x))
    module = compiled(heads, composite, arguments)
    compared = 0
    for answer, target in zip(found.answers, (Box(0), Box(3, "x1")), strict=True):
        expected = lrpfx.attribute(module, arguments if len(arguments) > 1 else x, target).relevance
        expected = expected[0] if len(arguments) > 1 else expected
        if expected.any():
            assert_close(torch.tensor(answer.input_relevance), expected[0], 1e-9)
            compared += 1
        else:
            assert not answer.input_relevance.any()
    assert compared


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


@pytest.mark.filterwarnings("ignore:the map is empty")  # of a code to which no positive weight leads
@pytest.mark.parametrize("kind", [EpsilonPlus, GammaByDepth])
def test_relevance_is_that_of_the_raw_heads_with_a_seed_by_hand(dense_detector, image, kind):
    detector = dense_detector
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
            found = lrpfx.attribute(explain_model, x, Box(number, what)).relevance
            if expected.any():
                assert_close(found, expected, 1e-5)
                compared += 1
            else:
                assert not found.any()
    assert compared > 12


@pytest.mark.parametrize("kind", [EpsilonPlus, GammaByDepth])
@pytest.mark.parametrize("name", OF_REGIONS)
def test_relevance_of_regions_is_that_of_their_head_with_a_seed_by_hand(image, name, kind, monkeypatch):
    replace_kernels(monkeypatch)
    detector, composite = made(name), kind(epsilon=1e-12, stabilizer=1e-12)
    heads = lrpfx.detection.heads(detector)
    x = input_of(heads, image)
    (proposals,) = heads.further(x)
    explain_model = compiled(heads, composite, (x, proposals))
    whole = OfRegions(detector, heads.scales, proposals).eval()
    itself, output = lrpfx.transform(whole, composite, x), whole(x).detach()
    candidates = Candidates(explain_model(x, proposals).detach())
    found = candidates.found(8)[0][0]
    for number in range(8):
        label, row = candidates.labels[0, found[number]], candidates.output[0, found[number]]
        region = (output[0, :, :4].softmax(-1)[:, label] - row[-3]).abs().argmin()
        seed, edge = torch.zeros_like(output), torch.zeros_like(output)
        seed[0, region, label] = row[label]
        x1, _, x2, _ = proposals[0, region].tolist()
        first = 4 + 4 * label
        shift, grow = output[0, region, first] / 10, output[0, region, first + 2] / 5
        edge[0, region, first], edge[0, region, first + 2] = shift * (x2 - x1), 0.5 * torch.expm1(grow) * (x2 - x1)
        expected = lrpfx.attribute(itself, x, seed).relevance
        assert_close(lrpfx.attribute(explain_model, (x, proposals), Box(number)).relevance[0], expected, 1e-5)
        if 0 < row[-5] < x.shape[3]:
            assert float(row[-5]) == pytest.approx(x2 + float(edge.sum()))
            expected = lrpfx.attribute(itself, x, edge).relevance
            found_edge = lrpfx.attribute(explain_model, (x, proposals), Box(number, "x2")).relevance[0]
            assert_close(found_edge, expected, 1e-5)


class OfRegions(nn.Module):
    """Logits and codes of boxes for each of some regions."""

    def __init__(self, detector, scales, proposals):
        super().__init__()
        self.detector, self.scales, self.proposals = detector, scales, proposals

    def forward(self, images):
        maps = self.detector.backbone(nn.functional.pad(images, (0, -images.shape[3] % 16, 0, -images.shape[2] % 16)))
        heads = self.detector.roi_heads
        features = {self.scales[name]: one for name, one in maps.items()}
        pooled = heads.box_head(pooled_regions(features, self.proposals, heads.box_roi_pool))
        return torch.cat(heads.box_predictor(pooled), 1)[None]


@pytest.mark.parametrize("size", [3, (2, 5)])
def test_regions_are_pooled_as_torchvision_does_it(size, monkeypatch):
    replace_kernels(monkeypatch)
    pool = MultiScaleRoIAlign(["0", "1"], size, 2, canonical_scale=40)
    maps = {"0": torch.rand(2, 3, 16, 24), "1": torch.rand(2, 3, 8, 12)}
    corners = torch.rand(2, 30, 4) * torch.tensor([192.0, 128, 192, 128])
    low, high = corners[..., :2].minimum(corners[..., 2:]), corners[..., :2].maximum(corners[..., 2:])
    regions = torch.cat([low - 12, high + 12], -1)  # some reach over the edges
    regions[:, 1:8] = torch.cat([low, low + 0.5], -1)[:, 1:8]  # and some are smaller than a place of the map
    regions[:, 0] = torch.tensor([0.0, 0.0, 192.0, 128.0])
    expected = pool(maps, list(regions), [(128, 192)] * 2)
    found = pooled_regions({1 / 8: maps["0"], 1 / 16: maps["1"]}, regions, pool)
    assert_close(found, expected, 1e-12)


def test_a_number_of_samples_that_varies_is_refused():
    pool = MultiScaleRoIAlign(["0"], 3, -1)
    with pytest.raises(lrpfx.InputError, match="sampling_ratio"):
        pooled_regions({1.0: torch.rand(1, 3, 8, 8)}, torch.rand(1, 2, 4), pool)


def test_sizes_of_photographs_are_open(detector):
    heads = lrpfx.detection.heads(detector)
    x, other = torch.rand(1, 3, 64, 80), torch.rand(1, 3, 64, 96 if detector.transform.fixed_size is None else 80)
    explain_model = compiled(heads, EpsilonPlus(), (x, *heads.further(x)))
    arguments = (other, *heads.further(other))
    assert_close(explain_model(*arguments), heads(*arguments), 1e-9)
    assert lrpfx.ledger(explain_model, arguments, Box(0)).unexplained < 1e-12


def test_a_whole_detector_is_refused_with_the_way_to_go(detector, image):
    with pytest.raises(lrpfx.CaptureError, match="takes lrpfx") as caught:
        lrpfx.transform(detector, EpsilonPlus(), [image])
    assert caught.value.topic == "detectors"


def test_without_the_operators_of_torchvision(image, monkeypatch):
    """Their absence, as beside a torch of another build, is an error that says what to install."""
    replace_kernels(monkeypatch)
    detector = made("MaskRCNN")

    def missing(*arguments):
        raise RuntimeError("Couldn't load custom C++ ops.")

    monkeypatch.setattr(detector.rpn, "filter_proposals", missing)
    with pytest.raises(lrpfx.InputError, match="compiled operators of torchvision") as caught:
        lrpfx.Explainer(detector, preprocess=lambda one: image)(Image.new("RGB", (70, 50)))
    assert caught.value.topic == "detectors"


def test_a_mapping_is_no_photograph(image):
    with pytest.raises(lrpfx.InputTypeError, match="preprocess=, such as the image processor"):
        lrpfx.Explainer(made("RetinaNet"))({"pixel_values": image[None]})
