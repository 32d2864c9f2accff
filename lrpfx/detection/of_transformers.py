"""Detectors of transformers: DETR and its relatives, whose boxes are those of queries."""

from typing import Any

import torch
from torch.nn import functional

from lrpfx.detection.detector_heads import DetectorHeads, RawHeads, columns, of_centers


class QueryHeads(DetectorHeads):
    """DETR, Conditional DETR, RT-DETR, YOLOS and others that return `logits` and `pred_boxes` for each query.

    With one logit more than the configuration has labels, the last is that of no object, and a query has one class, as the
    image processors of these models have it. Otherwise each class has a probability of its own.
    """

    most = 300  # as many as image processors return

    def raw(self, images: torch.Tensor) -> RawHeads:
        result = self.detector(pixel_values=images)
        logits: torch.Tensor = result.logits
        height, width = images.shape[2], images.shape[3]
        x1, y1, x2, y2 = columns(of_centers(result.pred_boxes))
        corners = torch.stack([x1 * width, y1 * height, x2 * width, y2 * height], -1)
        if logits.shape[2] == self.detector.config.num_labels:
            return RawHeads(logits, corners, torch.sigmoid(logits))
        shares = torch.softmax(logits, -1)[..., :-1]
        is_largest = shares == shares.amax(-1, keepdim=True)
        return RawHeads(logits, corners, functional.pad(shares * is_largest, (0, 1)))


def is_of_queries(model: Any) -> bool:
    """Whether a model is a detector of transformers."""
    names = {one.__name__ for one in type(model).__mro__}
    return "PreTrainedModel" in names and any(name.endswith("ForObjectDetection") for name in names)
