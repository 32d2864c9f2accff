"""The boxes that a detector proposes, as its heads return them."""

from dataclasses import dataclass

import torch

from lrpfx.errors import InputError

Corners = tuple[float, float, float, float]


@dataclass(frozen=True)
class Candidates:
    """The output of `lrpfx.detection.heads`: boxes before the suppression of doubles, the most confident first.

    `output`: (batch, candidates, classes + 7). A row has the logits of all classes, the edges of the box in pixels of the
    input, the confidence with which the detector gives it its class, the index of the class, and how much two detections of one
    class may overlap. Rows that the detector drops have the confidence 0.
    """

    output: torch.Tensor

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.output.shape[2] - 7

    @property
    def corners(self) -> torch.Tensor:
        """The edges of each box, (batch, candidates, 4)."""
        return self.output[..., -7:-3]

    @property
    def confidences(self) -> torch.Tensor:
        """How sure the detector is of the class, (batch, candidates)."""
        return self.output[..., -3]

    @property
    def labels(self) -> torch.Tensor:
        """The classes, (batch, candidates), integers."""
        return self.output[..., -2].round().long()

    def check(self) -> None:
        """Raise `InputError` for an output of another kind."""
        if not self.are_there:
            raise InputError(
                f"a box is a target for what lrpfx.detection.heads(detector) returns, not for an output of shape "
                f"{tuple(self.output.shape)}: give lrpfx.transform that module, or lrpfx.Explainer the detector itself",
                topic="detectors",
            )

    @property
    def are_there(self) -> bool:
        """Whether the output is of this kind, as far as its values tell."""
        if self.output.ndim != 3 or self.classes < 1:
            return False
        labels, overlaps = self.output[..., -2], self.output[..., -1]
        are_labels = ((labels - labels.round()).abs() < 0.01) & (labels > -0.5) & (labels < self.classes - 0.5)
        are_shares = (self.confidences >= 0) & (self.confidences <= 1.001) & (overlaps > 0) & (overlaps <= 1.001)
        return bool((are_labels & are_shares).all())

    def of_class(self, index: int | None) -> torch.Tensor:
        """The confidences of one class, or of all, (batch, candidates); 0 for others."""
        return self.confidences if index is None else self.confidences * (self.labels == index)

    def without_doubles(self, left: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """The confidences that are left, (batch, candidates), after one was found: neither it nor others of it.

        `best`: the place of the one that was found, (batch,).
        """
        there = best[:, None]
        corners = self.corners.gather(1, there[..., None].expand(-1, 1, 4))
        is_double = (overlap_of(self.corners, corners) > self.output[..., -1]) & (self.labels == self.labels.gather(1, there))
        is_found = torch.arange(left.shape[1], device=left.device) == there
        return left.masked_fill(is_double | is_found, 0.0)

    def found(self, count: int, index: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the first detections, (batch, count), and whether there are so many, (batch, count)."""
        left, places, are_there = self.of_class(index), [], []
        for _ in range(count):
            best = left.argmax(1)
            places.append(best)
            are_there.append(left.gather(1, best[:, None])[:, 0] > 0)
            left = self.without_doubles(left, best)
        return torch.stack(places, 1), torch.stack(are_there, 1)

    def near(self, corners: Corners, index: int | None, overlap: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The place of the most confident box that overlaps one so much, (batch, 1), and whether there is one."""
        given = torch.tensor(corners, dtype=self.output.dtype, device=self.output.device)
        left = self.of_class(index) * (overlap_of(self.corners, given) >= overlap)
        best = left.argmax(1, keepdim=True)
        return best, left.gather(1, best) > 0


def overlap_of(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The intersection of boxes over their union, (...), for edges (..., 4); 0 for boxes without an area."""
    inside = (torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])).clamp(min=0)
    both = inside[..., 0] * inside[..., 1]
    union = area_of(boxes) + area_of(others) - both
    return torch.where(union > 0, both / torch.where(union > 0, union, torch.ones_like(union)), torch.zeros_like(union))


def area_of(boxes: torch.Tensor) -> torch.Tensor:
    """The areas of boxes, (...), for edges (..., 4)."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return sides[..., 0] * sides[..., 1]
