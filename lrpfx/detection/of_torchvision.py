"""Detectors of torchvision: RetinaNet, FCOS, SSD."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from lrpfx.detection.detector_heads import DetectorHeads, RawHeads, clipped, columns, of_centers


class TorchvisionHeads(DetectorHeads):
    """What the detectors of torchvision have in common: they normalize, scale and pad images themselves."""

    @property
    def settings(self) -> Any:
        """The module that says which candidates are detections."""
        return self.detector

    @property
    def overlap(self) -> float:
        return float(self.settings.nms_thresh)

    @property
    def limit(self) -> int:
        return int(self.settings.detections_per_img)

    def own_threshold(self) -> float:
        return float(self.settings.score_thresh)

    def input_of(self, given: Callable[..., Any] | None) -> Callable[..., Any]:
        return Scaled(self.detector.transform, given)

    def padded(self, images: torch.Tensor) -> torch.Tensor:
        """Images filled up with zeros to the sizes that the backbone takes."""
        size = self.detector.transform.size_divisible
        return images if size == 1 else functional.pad(images, (0, -images.shape[3] % size, 0, -images.shape[2] % size))

    def features(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """The maps that the heads read."""
        found = self.detector.backbone(padded)
        return [found] if isinstance(found, torch.Tensor) else list(found.values())


class RetinaNetHeads(TorchvisionHeads):
    """RetinaNet."""

    def raw(self, images: torch.Tensor) -> RawHeads:
        padded = self.padded(images)
        features = self.features(padded)
        outputs = self.detector.head(features)
        anchors = grid_anchors(self.detector.anchor_generator.cell_anchors, features, padded)
        corners = moved(outputs["bbox_regression"], anchors, self.detector.box_coder)
        logits = outputs["cls_logits"]
        return RawHeads(logits, clipped(corners, images), torch.sigmoid(logits))


class FCOSHeads(TorchvisionHeads):
    """FCOS, whose confidence is the geometric mean of the class's probability and of how central the place is in its box."""

    def raw(self, images: torch.Tensor) -> RawHeads:
        padded = self.padded(images)
        features = self.features(padded)
        outputs = self.detector.head(features)
        x1, y1, x2, y2 = columns(grid_anchors(self.detector.anchor_generator.cell_anchors, features, padded))
        x, y = 0.5 * (x1 + x2), 0.5 * (y1 + y2)
        codes = outputs["bbox_regression"]
        if self.detector.box_coder.normalize_by_size:
            codes = codes * torch.stack([x2 - x1, y2 - y1, x2 - x1, y2 - y1], -1)
        left, above, right, below = columns(codes)
        corners = torch.stack([x - left, y - above, x + right, y + below], -1)
        logits = outputs["cls_logits"]
        confidences = torch.sqrt(torch.sigmoid(logits) * torch.sigmoid(outputs["bbox_ctrness"]))
        return RawHeads(logits, clipped(corners, images), confidences)


class SSDHeads(TorchvisionHeads):
    """SSD and SSDlite, whose first class is the background."""

    def raw(self, images: torch.Tensor) -> RawHeads:
        padded = self.padded(images)
        features = self.features(padded)
        outputs = self.detector.head(features)
        sizes = [[one.shape[2], one.shape[3]] for one in features]
        height, width = padded.shape[2], padded.shape[3]
        shares = self.detector.anchor_generator._grid_default_boxes(sizes, [height, width], dtype=features[0].dtype)
        x1, y1, x2, y2 = columns(of_centers(shares.to(padded.device)))
        anchors = torch.stack([x1 * width, y1 * height, x2 * width, y2 * height], -1)
        logits = outputs["cls_logits"]
        corners = moved(outputs["bbox_regression"], anchors, self.detector.box_coder)
        return RawHeads(logits, clipped(corners, images), without_background(logits))


def without_background(logits: torch.Tensor) -> torch.Tensor:
    """The probability of each class, (batch, boxes, classes), and 0 for the first, which is the background."""
    return functional.pad(torch.softmax(logits, -1)[..., 1:], (1, 0))


class Scaled:
    """From a photograph to the input of a network, as a detector of torchvision does it, up to the padding.

    `transform`: of the detector. `given`: from a photograph to what the detector takes; by default values from 0 to 1.
    """

    def __init__(self, transform: Any, given: Callable[..., Any] | None) -> None:
        self.transform, self.given = transform, given

    def __call__(self, photograph: Image.Image) -> torch.Tensor:
        """The input, (channels, height, width)."""
        if self.given is None:
            values = torch.from_numpy(np.array(photograph.convert("RGB"))).permute(2, 0, 1).float() / 255
        else:
            values = self.given(photograph)
        scaled, _ = self.transform.resize(self.transform.normalize(values))
        result: torch.Tensor = scaled
        return result


def grid_anchors(cells: Sequence[torch.Tensor], features: Sequence[torch.Tensor], padded: torch.Tensor) -> torch.Tensor:
    """The edges of all anchors, (anchors, 4): those of one place (anchors, 4) for each map, at each place of it."""
    found = []
    for cell, feature in zip(cells, features, strict=True):
        rows, places_in_row = feature.shape[2], feature.shape[3]
        down = torch.arange(rows, device=feature.device) * (padded.shape[2] // rows)
        across = torch.arange(places_in_row, device=feature.device) * (padded.shape[3] // places_in_row)
        y, x = torch.meshgrid(down, across, indexing="ij")
        places = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4)
        found.append((places + cell.to(feature)).reshape(-1, 4))
    return torch.cat(found)


def moved(codes: torch.Tensor, anchors: torch.Tensor, coder: Any) -> torch.Tensor:
    """Boxes from anchors, (..., boxes, 4), and how they are moved and scaled, (batch, boxes, 4).

    Each edge is that of the anchor, a constant, and what the network adds to it: scales are written as 1 + expm1, which has no
    constant of its own.
    """
    x1, y1, x2, y2 = columns(anchors)
    shift_x, shift_y, scale_x, scale_y = (code / weight for code, weight in zip(columns(codes), coder.weights, strict=True))
    grown = [
        0.5 * torch.expm1(scale.clamp(max=coder.bbox_xform_clip)) * side
        for scale, side in ((scale_x, x2 - x1), (scale_y, y2 - y1))
    ]
    x, y = shift_x * (x2 - x1), shift_y * (y2 - y1)
    return torch.stack([x1 + (x - grown[0]), y1 + (y - grown[1]), x2 + (x + grown[0]), y2 + (y + grown[1])], -1)
