"""What methods are measured on: a model, images, and what is known about them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.classes import out_of_range
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.numbers import counted

#: Errors about what is measured.
invalid = partial(InputError, topic="evaluation")
wrong_type = partial(InputTypeError, topic="evaluation")


@dataclass(frozen=True, eq=False)
class ImageData:
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

    model: nn.Module
    images: torch.Tensor
    targets: Any = None
    groups: Sequence[Hashable] | None = None
    masks: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise wrong_type(f"the model is a torch.nn.Module, not {type(self.model).__name__}")
        if isinstance(self.model, ExplainModule):
            raise invalid("the model has rules already: pass the model that was transformed")
        if self.model.training:
            raise InputError("the model is in training mode. Call model.eval() first", topic="training-mode")
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
    def number_of_groups(self) -> int:
        """How many groups the images belong to."""
        return len(set(names_of_groups(self)))

    def _check_groups(self) -> None:
        count = len(self.images)
        groups = names_of_groups(self)
        if len(groups) != count:
            raise invalid(f"there are {counted(count, 'image')} and {counted(len(groups), 'group')}: pass one for each image")
        if not all(isinstance(one, Hashable) for one in groups):
            raise wrong_type("groups are names or numbers, one for each image")
        if self.number_of_groups < 2:
            raise invalid(
                "there is one group, and so no interval: intervals tell how much results vary between groups. Pass images of "
                "two groups or more; without groups=, each image is one"
            )

    def _check_masks(self, masks: torch.Tensor) -> None:
        expected = (len(self.images), *self.images.shape[2:])
        if masks.shape != expected:
            raise invalid(f"masks have the shape (N, H, W), which is {expected}, not {tuple(masks.shape)}")
        for number, mask in enumerate(masks):
            if mask.all() or not mask.any():
                raise invalid(f"mask {number} is {'full' if mask.all() else 'empty'}, and so tells nothing about a map")


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


def names_of_groups(data: ImageData) -> tuple[Hashable, ...]:
    """What each image belongs to, as a plain value."""
    groups: Iterable[Hashable] = range(len(data.images)) if data.groups is None else data.groups
    return tuple(groups.tolist() if isinstance(groups, torch.Tensor) else groups)


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


def classes_of(data: ImageData, outputs: torch.Tensor) -> torch.Tensor:
    """The class to explain for each image, (N,), int64. `InputError` if `targets` are not such classes."""
    if data.targets is None:
        return outputs.argmax(1)
    try:
        given = torch.as_tensor(data.targets, device=outputs.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong_type(f"targets are indices of classes, not {type(data.targets).__name__}") from error
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        raise wrong_type(f"targets are indices of classes, not {given.dtype}")
    count = len(outputs)
    if given.ndim and given.shape != (count,):
        raise invalid(f"targets have the shape {tuple(given.shape)}, and there are {counted(count, 'image')}")
    outside = given[(given < 0) | (given >= outputs.shape[1])].flatten()
    if len(outside):
        raise invalid(out_of_range(f"target {int(outside[0])}", outputs.shape[1]))
    return given.long().expand(count)
