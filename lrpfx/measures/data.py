"""What all data for `lrpfx.evaluate` have: inputs in groups, and masks where the evidence is known."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from lrpfx.errors import InputError, InputTypeError
from lrpfx.measures.sample import Sample
from lrpfx.request.classes import out_of_range
from lrpfx.runtime.explain_module import has_rules
from lrpfx.support.numbers import counted

#: Errors about what is measured.
invalid = partial(InputError, topic="evaluation")
wrong_type = partial(InputTypeError, topic="evaluation")


class Data(ABC):
    """Inputs in `groups`, with `targets` and `masks`, or None. `sample_type`: what metrics get of each."""

    sample_type: ClassVar[type[Sample]]
    targets: Any
    groups: Sequence[Hashable] | None
    masks: Any

    @property
    @abstractmethod
    def noun(self) -> str:
        """What an input is."""

    @abstractmethod
    def __len__(self) -> int:
        """How many inputs there are."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What decides on the numbers of the inputs, as plain data."""

    @property
    def number_of_groups(self) -> int:
        """How many groups the inputs belong to."""
        return len(set(names_of_groups(self)))

    def _check_groups(self) -> None:
        count, groups = len(self), names_of_groups(self)
        if not count:
            raise invalid(f"there is no {self.noun}")
        if len(groups) != count:
            given = counted(count, self.noun)
            raise invalid(f"there are {given} and {counted(len(groups), 'group')}: pass one for each {self.noun}")
        if not all(isinstance(one, Hashable) for one in groups):
            raise wrong_type(f"groups are names or numbers, one for each {self.noun}")
        if self.number_of_groups < 2:
            raise invalid(
                "there is one group, and so no interval: intervals tell how much results vary between groups. Pass "
                f"{self.noun}s of two groups or more; without groups=, each {self.noun} is one"
            )


def check_model(model: Any) -> None:
    """Raise `InputError` or `InputTypeError` unless it is a module in evaluation mode without rules."""
    if not isinstance(model, nn.Module):
        raise wrong_type(f"the model is a torch.nn.Module, not {type(model).__name__}")
    if has_rules(model):
        raise invalid("the model has rules already: pass the model that was transformed")
    if model.training:
        raise InputError("the model is in training mode. Call model.eval() first", topic="training-mode")


def check_masks(masks: Iterable[torch.Tensor]) -> None:
    """Raise `InputError` for a mask that marks nothing, or everything."""
    for number, mask in enumerate(masks):
        if mask.all() or not mask.any():
            raise invalid(f"mask {number} is {'full' if mask.all() else 'empty'}, and so tells nothing about a map")


def names_of_groups(data: Data) -> tuple[Hashable, ...]:
    """What each input belongs to, as a plain value."""
    groups: Iterable[Hashable] = range(len(data)) if data.groups is None else data.groups
    return tuple(groups.tolist() if isinstance(groups, torch.Tensor) else groups)


def classes_of(data: Data, outputs: torch.Tensor) -> torch.Tensor:
    """The class to explain for each input, (N,), int64. `InputError` if `targets` are not such classes."""
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
        raise invalid(f"targets have the shape {tuple(given.shape)}, and there are {counted(count, data.noun)}")
    outside = given[(given < 0) | (given >= outputs.shape[1])].flatten()
    if len(outside):
        raise invalid(out_of_range(f"target {int(outside[0])}", outputs.shape[1]))
    return given.long().expand(count)
