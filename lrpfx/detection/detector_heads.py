"""What all families of detectors have in common: images in, candidates for boxes out."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lrpfx.errors import InputError
from lrpfx.request.candidates import Candidates


class RawHeads(NamedTuple):
    """What a detector says of each of its raw boxes.

    `logits`: (batch, boxes, classes). `corners`: the edges in pixels of the input, (batch, boxes, 4), or those for each class,
    (batch, boxes, classes, 4), of heads that say `has_boxes_of_classes`. `confidences`: in each class, (batch, boxes, classes),
    0 for classes that are not found, such as the background.
    """

    logits: torch.Tensor
    corners: torch.Tensor
    confidences: torch.Tensor


class DetectorHeads(nn.Module):
    """A detector up to its raw heads, before the suppression of doubles: what `lrpfx.detection.heads` returns.

    Its forward takes images as the detector's network gets them, (batch, channels, height, width), and returns candidates,
    (batch, candidates, classes + 7), the most confident first: the logits of all classes, x1, y1, x2 and y2 in pixels of the
    input, the confidence, the index of the class, and how much two detections of one class may overlap.

    `detector`: the detector. `threshold`: the confidence above which boxes count; by default that of the detector.

    A subclass for another family has a `raw`:

    >>> class Blobs(lrpfx.detection.DetectorHeads):
    ...     def raw(self, images):
    ...         logits, boxes = self.detector(images)  # (batch, boxes, classes) and (batch, boxes, 4)
    ...         return lrpfx.detection.RawHeads(logits, boxes, torch.sigmoid(logits))
    """

    detector: Any
    #: The names of arguments of `forward` that `further` finds.
    further_names: tuple[str, ...] = ()
    #: Whether each class has a box of its own.
    has_boxes_of_classes: bool = False
    #: Candidates that are kept.
    most: int = 1000

    def __init__(self, detector: nn.Module, threshold: float | None = None) -> None:
        super().__init__()
        self.detector = detector
        self.train(detector.training)
        self.given_threshold = checked_threshold(threshold)

    @property
    def overlap(self) -> float:
        """How much two detections of a class may overlap: 1 where there are no doubles to suppress."""
        return 1.0

    @property
    def limit(self) -> int:
        """How many detections an image has at most."""
        return self.most

    def own_threshold(self) -> float:
        """The confidence above which the detector counts boxes."""
        return 0.5

    def own_categories(self) -> Any:
        """The names of the classes, if the detector knows them: as `categories=` of `lrpfx.Explainer`, or None."""
        return None

    @property
    def threshold(self) -> float:
        """The confidence above which boxes count."""
        return self.own_threshold() if self.given_threshold is None else self.given_threshold

    @abstractmethod
    def raw(self, images: torch.Tensor) -> RawHeads:
        """The raw heads. `images`: (batch, channels, height, width)."""

    def further(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `forward` takes beside `images`, which is found outside of the graph.

        `images`: (batch, channels, height, width). For `lrpfx.transform`, the results are constants, of the names
        `further_names`.
        """
        return ()

    def input_of(self, given: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The function from a photograph to the input of `forward`; None if there is none. `given`: the user's."""
        return given

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The candidates. `images`: (batch, channels, height, width)."""
        return self.candidates(self.raw(images))

    def candidates(self, raw: RawHeads) -> torch.Tensor:
        """The rows for raw heads. `raw`: what `raw` returns."""
        logits, corners, confidences = raw
        classes = confidences.shape[2]
        best, index = self.best(confidences)
        boxes = index // classes
        of_boxes = logits.gather(1, boxes[..., None].expand(-1, -1, logits.shape[2]))
        corners, at = (corners.flatten(1, 2), index) if self.has_boxes_of_classes else (corners, boxes)
        edges = corners.gather(1, at[..., None].expand(-1, -1, 4))
        labels = (index % classes)[..., None].to(logits.dtype)
        facts = [best[..., None], labels, torch.full_like(labels, self.overlap)]
        return torch.cat([of_boxes, edges, *facts], -1)

    def _found(self, raw: RawHeads, count: int) -> tuple[Candidates, torch.Tensor, torch.Tensor]:
        """The candidates in raw heads, the places of the first detections, (batch, count), and whether there are so many."""
        candidates = Candidates(self.candidates(raw))
        return candidates, *candidates.found(count)

    def best(self, confidences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest confidences above the threshold, (batch, candidates), and their places in (boxes · classes).

        `confidences`: (batch, boxes, classes). What fills up has the confidence 0 and the place 0.
        """
        flat = (confidences * (confidences > self.threshold)).flatten(1)
        best, index = functional.pad(flat, (0, self.most)).topk(self.most)
        return best, index * (best > 0)


def checked_threshold(threshold: float | None) -> float | None:
    """A confidence above which boxes count, as it was given. `InputError` for one that is out of range."""
    if threshold is None:
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < 1:
        raise InputError(f"threshold is a confidence from 0 to below 1, not {threshold!r}", topic="detectors")
    return float(threshold)


def without_background(logits: torch.Tensor) -> torch.Tensor:
    """The probability of each class, (batch, boxes, classes), and 0 for the first, which is the background."""
    return functional.pad(torch.softmax(logits, -1)[..., 1:], (1, 0))


def sampled_regions(maps: torch.Tensor, x: torch.Tensor, y: torch.Tensor, padding_mode: str = "zeros") -> torch.Tensor:
    """The values of maps at the grid of each region, (batch, regions, channels, rows, columns).

    `maps`: (batch, channels, height, width). `x`: where the columns are, (batch, regions, columns), and `y`: the rows, from -1
    to 1 and `padding_mode` as for `torch.nn.functional.grid_sample`.
    """
    grid = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), -1).flatten(1, 2)
    sampled = functional.grid_sample(maps, grid, padding_mode=padding_mode, align_corners=False)
    regions: torch.Tensor = sampled.unflatten(2, (y.shape[1], y.shape[2])).transpose(1, 2)
    return regions


def columns(boxes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four numbers of each box, (..., 4), which a symbolic trace can follow."""
    return boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]


def clipped(corners: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Boxes within images. `corners`: (..., 4). `images`: (batch, channels, height, width)."""
    height, width = images.shape[2], images.shape[3]
    x1, y1, x2, y2 = columns(corners)
    return torch.stack([x1.clamp(0, width), y1.clamp(0, height), x2.clamp(0, width), y2.clamp(0, height)], -1)


def of_centers(boxes: torch.Tensor) -> torch.Tensor:
    """The edges of boxes given by their centres and sizes, (..., 4)."""
    x, y, width, height = columns(boxes)
    return torch.stack([x - 0.5 * width, y - 0.5 * height, x + 0.5 * width, y + 0.5 * height], -1)
