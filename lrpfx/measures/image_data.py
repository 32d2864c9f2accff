"""What methods are measured on: a model, images, and what is known about them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lrpfx.measures.data import Data, check_masks, check_model, invalid, wrong_type
from lrpfx.measures.perturbation import ImageSample
from lrpfx.measures.sample import Sample
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.identity.fingerprints import fingerprint_of_model


@dataclass(frozen=True, eq=False)
class ImageData(Data):
    """A classifier with images, for `lrpfx.evaluate`.

    Attributes
    ----------
    model
        A module in evaluation mode, which returns logits or probabilities, (N, classes), of two classes or more.
    images
        The inputs of the model, (N, C, H, W), of its dtype and on its device.
    targets
        The index of the class to explain for each image, or one for all; by default the class that the model predicts.
    groups
        What each image belongs to, such as the photograph that it was cut from: intervals are of groups. By default, each
        image is a group of its own.
    masks
        Where the evidence is known to be, for metrics of localization: truth values, (N, H, W), or a box for each image as
        numbers, (N, 4): its left, top, right and bottom edge in pixels. Pixels whose centres are in the box count.

    Raises
    ------
    InputError
        The shapes or numbers do not fit, values are not finite, a mask is empty or full, or there is only one group.
    InputTypeError
        Something has the wrong type.
    """

    sample_type: ClassVar[type[Sample]] = ImageSample
    model: nn.Module
    images: torch.Tensor
    targets: Any = None
    groups: Sequence[Hashable] | None = None
    masks: Any = None

    def __post_init__(self) -> None:
        check_model(self.model)
        if not isinstance(self.images, torch.Tensor) or not self.images.is_floating_point():
            kind = self.images.dtype if isinstance(self.images, torch.Tensor) else type(self.images).__name__
            raise wrong_type(f"images are a tensor of floating-point numbers, not {kind}")
        if self.images.ndim != 4 or not self.images.numel():
            raise invalid(f"images have the shape (N, C, H, W), not {tuple(self.images.shape)}")
        not_finite = (~self.images.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        if not_finite:
            raise invalid(f"image {not_finite[0]} has values that are not finite")
        self._check_groups()
        if self.masks is not None:
            if not (isinstance(self.masks, torch.Tensor) and self.masks.dtype is torch.bool):
                object.__setattr__(self, "masks", _masks_of_boxes(self.masks, self.images.shape[2:]))
            self._check_masks(self.masks)

    @property
    def noun(self) -> str:
        """What an input is: "image"."""
        return "image"

    def __len__(self) -> int:
        return len(self.images)

    def facts(self) -> dict[str, Any]:
        """What decides on the numbers of the images, as plain data."""
        known = fingerprint_of_value([self.images, self.targets, self.masks])
        return {"model": fingerprint_of_model(self.model), "images, targets and masks": known}

    def _check_masks(self, masks: torch.Tensor) -> None:
        expected = (len(self.images), *self.images.shape[2:])
        if masks.shape != expected:
            raise invalid(f"masks have the shape (N, H, W), which is {expected}, not {tuple(masks.shape)}")
        check_masks(masks)


def _masks_of_boxes(boxes: Any, size: Sequence[int]) -> torch.Tensor:
    """The pixels, (N, H, W), whose centres are in boxes, (N, 4). `InputTypeError` for what is not such boxes."""
    try:
        edges = torch.as_tensor(boxes, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong_type(f"masks are truth values, or boxes as numbers, not {type(boxes).__name__}") from error
    if edges.ndim != 2 or edges.shape[1] != 4:
        shape = tuple(edges.shape)
        raise wrong_type(f"masks are truth values, (N, H, W), or boxes as numbers, (N, 4), not numbers of shape {shape}")
    rows, columns = (torch.arange(count) + 0.5 for count in size)
    left, top, right, bottom = edges[:, :, None].unbind(1)
    inside_rows, inside_columns = (rows > top) & (rows < bottom), (columns > left) & (columns < right)
    return inside_rows[:, :, None] & inside_columns[:, None, :]


def outputs_of(data: ImageData, batch_size: int) -> torch.Tensor:
    """What the model returns for the images, (N, classes). `InputError` unless it is finite, and of two classes or more."""
    with torch.no_grad():
        found = [data.model(batch) for batch in data.images.split(batch_size)]
    if not all(isinstance(one, torch.Tensor) and one.ndim == 2 and one.shape[1] > 1 for one in found):
        kind = tuple(found[0].shape) if isinstance(found[0], torch.Tensor) else type(found[0]).__name__
        raise invalid(f"the model returns {kind}; evaluate takes a classifier, which returns (N, classes) of 2 classes or more")
    outputs = torch.cat(found)
    if not outputs.isfinite().all():
        raise invalid("the model returns values that are not finite")
    return outputs
