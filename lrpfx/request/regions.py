"""Regions of outputs with classes at places: what a segmentation network says about a class there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.candidates import Candidates
from lrpfx.request.places import has_places, predicted_region, relevance_of_region
from lrpfx.request.targets import NO_BOX, Class, Contrast, IndexOf, NameOf, Target
from lrpfx.support.numbers import is_whole

#: The mask that is the places where a class is predicted.
PREDICTED = "predicted"
#: The number of axes -> the means of a mask over the parts that belong to places.
_POOLING: dict[int, Callable[..., torch.Tensor]] = {
    1: torch.nn.functional.adaptive_avg_pool1d,
    2: torch.nn.functional.adaptive_avg_pool2d,
    3: torch.nn.functional.adaptive_avg_pool3d,
}


@dataclass(frozen=True, eq=False)
class Region(Target):
    """A class within a region, for outputs with classes at places.

    The output has the shape (batch, classes, height, width), or other places behind the classes; or it is a sequence of labels,
    (batch, positions, classes). The relevance of the output is the positive part of the class's outputs in the region, and 0
    elsewhere (Dreyer et al. 2023, L-CRP). A class index as the target of an output with at least two dimensions of places means
    its predicted region.

    Parameters
    ----------
    class_
        The index of the class; in an `lrpfx.Explainer` with `categories`, also its name.
    mask
        "predicted" for the places whose largest output is that of the class (for an output with one class, those where it is
        positive), None for all places, or an array or tensor with the shape of the places, of bool or of zeros and ones. An
        `lrpfx.Explainer` also takes one in the size of the photograph, (height, width), of the scan or the model's volume,
        (depth, height, width), or of the steps of a series.
    positive
        Whether negative outputs count as zero. If not, relevance is that of all outputs in the region.

    Raises
    ------
    InputError
        The mask has other values; an `InputTypeError` if it is of another type, or the class is.

    Examples
    --------
    >>> segmenter = lrpfx.transform(torch.nn.Conv2d(3, 4, 1).eval(), lrpfx.composites.EpsilonPlus())
    >>> found = lrpfx.attribute(segmenter, torch.rand(1, 3, 8, 8), lrpfx.Region(2, mask=torch.ones(8, 8)))
    >>> found.relevance.shape
    torch.Size([1, 3, 8, 8])
    """

    class_: int | str
    mask: Any = PREDICTED
    positive: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.class_, str) or is_whole(self.class_)):
            raise InputTypeError(f"a region is of one class, not of {self.class_!r}", topic="targets")
        if not isinstance(self.class_, str):
            object.__setattr__(self, "class_", int(self.class_))
        if self.mask is not None and not (isinstance(self.mask, str) and self.mask == PREDICTED):
            object.__setattr__(self, "mask", _as_mask(self.mask))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Region):
            return False
        if (self.class_, self.positive) != (other.class_, other.positive):
            return False
        if isinstance(self.mask, torch.Tensor) and isinstance(other.mask, torch.Tensor):
            return torch.equal(self.mask, other.mask)
        return type(self.mask) is type(other.mask)

    def __hash__(self) -> int:
        return hash((self.class_, self.positive))

    @property
    def is_of_classes(self) -> bool:
        return True

    @property
    def is_of_positions(self) -> bool:
        return True

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        if output.ndim < 3:
            raise InputError(
                "a region is a target for outputs of shape (batch, classes, height, width) or (batch, positions, classes), and "
                f"this one is {tuple(output.shape)}: its class alone is the target",
                topic="targets",
            )
        if Candidates(output).are_there:
            raise InputTypeError(f"{NO_BOX}, not {self}", topic="detectors")
        by_class = _classes_first(output)
        Class(self.class_).check(by_class.flatten(2)[..., 0], chosen)
        if isinstance(self.mask, torch.Tensor) and not self._fits(by_class.shape[2:]):
            raise InputError(
                f"the mask has shape {tuple(self.mask.shape)}, but the places of the output {tuple(by_class.shape[2:])}; "
                "lrpfx.Explainer also takes one in the size of the photograph, of the steps, or of the scan where what "
                "preprocess= did to its axes is known",
                topic="targets",
            )

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        found = relevance_of_region(_classes_first(output), int(self.class_), self._region(output), self.positive)
        return found if has_places(output) else found.movedim(1, 2)

    def region(self, output: torch.Tensor) -> torch.Tensor | None:
        region = self._region(output)
        return region & (_classes_first(output)[:, int(self.class_)] > 0) if self.mask is None and self.positive else region

    def _region(self, output: torch.Tensor) -> torch.Tensor:
        """The places that count, (batch, ...)."""
        by_class = _classes_first(output)
        if isinstance(self.mask, str):
            return predicted_region(by_class, int(self.class_))
        shape = by_class.shape[2:]
        places = torch.ones_like(by_class[0, 0], dtype=torch.bool) if self.mask is None else self._mask_of(shape)
        return places.to(output.device).expand(output.shape[0], *shape)

    def _fits(self, shape: torch.Size) -> bool:
        return bool(self.mask.shape == shape)

    def _mask_of(self, shape: torch.Size) -> torch.Tensor:
        """The mask for places of this shape, bool."""
        found: torch.Tensor = self.mask
        return found

    def resolved(self, index_of: IndexOf) -> Target:
        return replace(self, class_=index_of(self.class_))

    def of_sample(self, number: int) -> Target | None:
        return self

    def least_sizes(self) -> tuple[int, ...]:
        places = self.mask.shape if isinstance(self.mask, torch.Tensor) else ()
        return (1, int(self.class_) + 1, *places) if len(places) > 1 else (1,)

    def title(self, name_of: NameOf) -> str:
        where = " in a mask" if isinstance(self.mask, torch.Tensor) else " in its region" if self.mask else " at all places"
        named = name_of(self.class_) if isinstance(self.class_, int) else self.class_
        return f"{named}{where}{'' if self.positive else ', with negative outputs'}"

    def __str__(self) -> str:
        return self.title(lambda index: f"class {index}")


def with_regions(target: Target, change: Callable[[Region], Target]) -> Target:
    """A target with other regions, alone or in a contrast."""
    if isinstance(target, Region):
        return change(target)
    if not isinstance(target, Contrast):
        return target
    return Contrast(
        {with_regions(one, change) if isinstance(one, Target) else one: weight for one, weight in target.terms.items()}
    )


class RegionOfInput(Region):
    """A region whose mask is one of the input's pixels, voxels or steps: places are in it by their larger part."""

    def _fits(self, shape: torch.Size) -> bool:
        return len(shape) == self.mask.ndim and len(shape) in _POOLING

    def _mask_of(self, shape: torch.Size) -> torch.Tensor:
        share: torch.Tensor = _POOLING[len(shape)](self.mask[None].float(), tuple(shape))[0]
        return share >= 0.5

    def least_sizes(self) -> tuple[int, ...]:
        return (1, int(self.class_) + 1)


def _classes_first(output: torch.Tensor) -> torch.Tensor:
    """An output as (batch, classes, ...): sequences of labels have their classes last."""
    return output if has_places(output) else output.movedim(2, 1)


def _as_mask(mask: Any) -> torch.Tensor:
    """A mask as a tensor of bool."""
    if not isinstance(mask, (np.ndarray, torch.Tensor, list)):
        raise InputTypeError(
            f'the mask of a region is "{PREDICTED}", None for all places, or an array of bool, such as '
            f"numpy.asarray(picture) > 0, not {mask!r}",
            topic="targets",
        )
    values = torch.as_tensor(mask).detach().cpu()
    found = values != 0
    if not torch.equal(found.to(values), values):
        raise InputError(
            "the mask of a region has values other than 0 and 1: compare it with the value where the region begins, as in "
            "mask > 0",
            topic="targets",
        )
    return found
