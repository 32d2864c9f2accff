"""Detectors as Ultralytics builds them from YOLOv8 on, known by their structure: the package is not needed."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lrpfx.detection.detector_heads import DetectorHeads, RawHeads, columns

#: What the last module of such a detector has.
_OF_HEAD = ("nc", "nl", "reg_max", "stride", "cv2", "cv3")
#: The longer side of a photograph, and the grey around it.
_SIDE, _GREY = 640, 114


class YoloHeads(DetectorHeads):
    """A detector without anchors: distances of edges from places as means over bins, and a probability of each class."""

    most = 1000

    def __init__(self, detector: nn.Module, threshold: float | None = None) -> None:
        super().__init__(detector, threshold)
        #: Pixels of the input between places of each map: numbers, which a graph can be made with.
        self.strides = [float(one) for one in self.network.model[-1].stride]

    @property
    def network(self) -> Any:
        """The modules that run one after the other, and what is kept for later ones."""
        return network_of(self.detector)

    @property
    def has_no_doubles(self) -> bool:
        """Whether the detector has heads that were trained to give each thing one box."""
        return bool(getattr(self.network.model[-1], "end2end", False))

    @property
    def overlap(self) -> float:
        return 1.0 if self.has_no_doubles else 0.7

    @property
    def limit(self) -> int:
        return 300

    def own_threshold(self) -> float:
        return 0.25

    def own_categories(self) -> Mapping[int, str] | None:
        names = getattr(self.network, "names", None)
        return names if isinstance(names, Mapping) else None

    def input_of(self, given: Callable[..., Any] | None) -> Callable[..., Any]:
        step = int(max(self.strides))
        return (lambda photograph: in_grey(photograph, step)) if given is None else given

    def raw(self, images: torch.Tensor) -> RawHeads:
        *modules, head = self.network.model
        kept: list[Any] = []
        value: Any = images
        for module in modules:
            value = module(_read(module.f, value, kept))
            kept.append(value if module.i in self.network.save else None)
        features = _read(head.f, value, kept)
        prefix = "one2one_" if self.has_no_doubles else ""
        logits, corners = [], []
        for level, feature in enumerate(features):
            stride = self.strides[level]
            logits.append(getattr(head, f"{prefix}cv3")[level](feature).flatten(2).transpose(1, 2))
            codes = getattr(head, f"{prefix}cv2")[level](feature).flatten(2).transpose(1, 2)
            left, above, right, below = columns(_distances(codes, head.reg_max) * stride)
            rows, places = feature.shape[2], feature.shape[3]
            down = (torch.arange(rows, device=feature.device, dtype=feature.dtype) + 0.5) * stride
            across = (torch.arange(places, device=feature.device, dtype=feature.dtype) + 0.5) * stride
            y, x = torch.meshgrid(down, across, indexing="ij")
            x, y = x.reshape(-1), y.reshape(-1)
            corners.append(torch.stack([x - left, y - above, x + right, y + below], -1))
        of_all = torch.cat(logits, 1)
        return RawHeads(of_all, torch.cat(corners, 1), torch.sigmoid(of_all))


def network_of(model: Any) -> Any:
    """The module whose `model` ends in a head of this kind; None if there is none."""
    for one in (model, getattr(model, "model", None)):
        modules = getattr(one, "model", None)
        if isinstance(modules, nn.Sequential) and len(modules) and all(hasattr(modules[-1], name) for name in _OF_HEAD):
            return one
    return None


def _read(source: int | list[int], before: Any, kept: list[Any]) -> Any:
    """What a module reads: the result before it, of another one, or of several."""
    if isinstance(source, int):
        return before if source == -1 else kept[source]
    return [before if one == -1 else kept[one] for one in source]


def _distances(codes: torch.Tensor, bins: int) -> torch.Tensor:
    """Distances of the four edges in steps of the map, (batch, boxes, 4): means of distributions over bins, if there are any.

    `codes`: (batch, boxes, 4 · bins).
    """
    if bins == 1:
        return codes
    shares = torch.softmax(codes.unflatten(2, (4, bins)), -1)
    return (shares * torch.arange(bins, device=codes.device, dtype=codes.dtype)).sum(-1)


def in_grey(photograph: Image.Image, step: int) -> torch.Tensor:
    """A photograph with 640 pixels on its longer side, on grey whose sides are multiples of a step: (3, height, width)."""
    scale = _SIDE / max(photograph.size)
    width, height = (max(1, round(side * scale)) for side in photograph.size)
    wide, high = (math.ceil(side / step) * step for side in (width, height))
    drawn = Image.new("RGB", (wide, high), (_GREY,) * 3)
    smaller = photograph.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    drawn.paste(smaller, ((wide - width) // 2, (high - height) // 2))
    return torch.from_numpy(np.array(drawn)).permute(2, 0, 1).float() / 255
