"""Detectors of torchvision: RetinaNet, FCOS, SSD, Faster R-CNN."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from lrpfx.detection.detector_heads import (
    DetectorHeads,
    RawHeads,
    clipped,
    columns,
    of_centers,
    sampled_regions,
    without_background,
)
from lrpfx.errors import CaptureError, InputError

#: The side of an image that shows how much smaller maps are.
_PROBE = 256
#: Pixels that each side of a box in a region has at least.
_SMALLEST = 1e-2


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
        return list(self.maps(padded).values())

    def maps(self, padded: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The maps of the backbone by name."""
        found = self.detector.backbone(padded)
        return found if isinstance(found, Mapping) else {"0": found}


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


class FasterRCNNHeads(TorchvisionHeads):
    """Faster R-CNN and its relatives with masks or keypoints: the head of boxes, on proposals that are found before.

    `further` finds the proposals that become boxes, as many as the detector returns; the first is repeated for those that are
    missing.
    """

    further_names = ("proposals",)
    has_boxes_of_classes = True

    def __init__(self, detector: Any, threshold: float | None = None) -> None:
        if detector.training:
            raise CaptureError(
                f"{type(detector).__name__} is in training mode, in which it proposes no regions: call detector.eval() first",
                topic="training-mode",
            )
        super().__init__(detector, threshold)
        #: Pixels of each map for one of the input, by the name of the map.
        weight = next(detector.parameters())
        with torch.no_grad():
            maps = self.maps(weight.new_zeros(1, len(detector.transform.image_mean), _PROBE, _PROBE))
        self.scales = {name: 2.0 ** round(math.log2(one.shape[2] / _PROBE)) for name, one in maps.items()}

    @property
    def settings(self) -> Any:
        return self.detector.roi_heads

    # The names of arguments are those of `further_names`.
    def forward(self, images: torch.Tensor, proposals: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The candidates. `images`: (batch, channels, height, width). `proposals`: (batch, proposals, 4)."""
        return self.candidates(self._of_proposals(self.maps(self.padded(images)), images, proposals))

    def raw(self, images: torch.Tensor) -> RawHeads:
        return self._of_proposals(self.maps(self.padded(images)), images, *self.further(images))

    def _of_proposals(self, maps: Mapping[str, torch.Tensor], images: torch.Tensor, proposals: torch.Tensor) -> RawHeads:
        heads = self.detector.roi_heads
        pool = heads.box_roi_pool
        features = {self.scales[name]: maps[name] for name in pool.featmap_names if name in maps}
        pooled = heads.box_head(pooled_regions(features, proposals, pool))
        logits, codes = heads.box_predictor(pooled)
        count, classes = proposals.shape[1], logits.shape[1]
        codes = codes.reshape(-1, count, classes, 4)
        logits = logits.reshape(-1, count, classes)
        corners = clipped(moved(codes, proposals[:, :, None], heads.box_coder), images)
        x1, y1, x2, y2 = columns(corners)
        is_box = (x2 - x1 >= _SMALLEST) & (y2 - y1 >= _SMALLEST)
        return RawHeads(logits, corners, without_background(logits) * is_box)

    @torch.no_grad()
    def further(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = [self._proposals(one) for one in images.split(1)]
        return (torch.stack(chosen),)

    def _proposals(self, image: torch.Tensor) -> torch.Tensor:
        """The proposals for one image that become boxes, (limit, 4)."""
        padded = self.padded(image)
        maps = self.maps(padded)
        sizes = _ImageList(padded, [tuple(image.shape[2:])])
        try:
            (proposals,), _ = self.detector.rpn(sizes, maps)
        except RuntimeError as error:
            if "C++ ops" not in str(error) and "torchvision::" not in str(error):
                raise
            raise InputError(
                f"{type(self.detector).__name__} proposes regions by compiled operators of torchvision, which do not load "
                f"beside torch {torch.__version__}: install the build of torchvision that belongs to this torch",
                topic="detectors",
            ) from error
        if not len(proposals):
            proposals = proposals.new_zeros(1, 4)  # a region without an area is no box
        raw = self._of_proposals(maps, image, proposals[None])
        _, index = self.best(raw.confidences)
        _, places, are_there = self._found(raw, self.limit)
        found = (index // raw.confidences.shape[2])[0, places[0][are_there[0]]]
        filled = torch.cat([found, found.new_zeros(self.limit)])[: self.limit]
        filled[len(found) :] = filled[0]
        chosen: torch.Tensor = proposals[filled]
        return chosen


class _ImageList(NamedTuple):
    """Padded images and their sizes before, as a region proposal network takes them."""

    tensors: torch.Tensor
    image_sizes: list[tuple[int, ...]]


def pooled_regions(features: Mapping[float, torch.Tensor], proposals: torch.Tensor, pool: Any) -> torch.Tensor:
    """The features in regions, (batch · regions, channels, *size), each of the map that fits its size: RoIAlign.

    `features`: (batch, channels, height, width) by their scale, the largest first. `proposals`: (batch, regions, 4) in
    pixels of the input. `pool`: a `MultiScaleRoIAlign`. Raises `InputError` for a number of samples that depends on the region.
    """
    samples = pool.sampling_ratio
    if samples <= 0:
        raise InputError(
            "pooling of regions needs a sampling_ratio above 0, which this detector does not have", topic="detectors"
        )
    scales = list(features)
    high, wide = pool.output_size
    area = (proposals[..., 2] - proposals[..., 0]) * (proposals[..., 3] - proposals[..., 1])
    first, last = (round(-math.log2(scale)) for scale in (scales[0], scales[-1]))
    steps = torch.floor(pool.canonical_level + torch.log2(torch.sqrt(area) / pool.canonical_scale) + 1e-6)
    levels = steps.clamp(first, last) - first
    found = []
    for level, (scale, feature) in enumerate(features.items()):
        x1, y1, x2, y2 = columns(proposals * scale)
        across = _places(x1, (x2 - x1).clamp(min=1), wide * samples)
        down = _places(y1, (y2 - y1).clamp(min=1), high * samples)
        rows, places = feature.shape[2], feature.shape[3]
        inside = ((down >= -1) & (down <= rows))[..., :, None] & ((across >= -1) & (across <= places))[..., None, :]
        inside = inside & (levels == level)[..., None, None]
        x = (across.clamp(0, places - 1) * 2 + 1) / places - 1
        y = (down.clamp(0, rows - 1) * 2 + 1) / rows - 1
        sampled = sampled_regions(feature, x, y, padding_mode="border")
        found.append(functional.avg_pool2d((sampled * inside[:, :, None].to(sampled.dtype)).flatten(0, 1), samples))
    return torch.stack(found).sum(0)


def _places(start: torch.Tensor, length: torch.Tensor, count: int) -> torch.Tensor:
    """The middles of `count` equal parts of each region, (batch, regions, count), less half a pixel as RoIAlign has them."""
    shares = (torch.arange(count, device=start.device, dtype=start.dtype) + 0.5) / count
    return start[..., None] + length[..., None] * shares


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
