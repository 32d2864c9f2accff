"""Targets as they are given for several samples: one for all, one for each, or several for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.classes import as_list, index_of, is_index
from lrpfx.request.targets import AT_PLACES, Label, Largest, Target, TargetLike, as_target, check_one_of

#: Words for the class of the largest output, and for the class that a sample has.
PREDICTED, TRUE = "predicted", "true"


def as_target_of_samples(value: TargetLike, categories: Sequence[str] | None) -> Target:
    """A target that holds for every sample of a data set: as for `as_target`, "predicted", or "true" for the label.

    `categories`: the names of the classes, if they are known. Raises `InputError` for targets of whole batches, which have
    values for each sample.
    """
    if isinstance(value, str) and value in (PREDICTED, TRUE):
        return Largest() if value == PREDICTED else Label()
    if isinstance(value, (torch.Tensor, np.ndarray, list)):
        raise InputTypeError(
            f'the target of samples is "{PREDICTED}", "{TRUE}", a class, a contrast or a function from the output to its '
            f"relevance, not {type(value).__name__}: the class of each sample comes with the data set, for "
            f'target="{TRUE}", and several targets of each are targets=',
            topic="targets",
        )
    if isinstance(value, str) and categories is None and not is_index(value):
        raise InputError(
            f'target is "{PREDICTED}", "{TRUE}", the index of a class or a function of the output, not {value!r}; names of '
            "classes need an lrpfx.Explainer with categories=",
            topic="targets",
        )
    return resolved(as_target(value), categories)


def as_plain(target: Target) -> Any:
    """The value by which manifests name a target of samples: a word, an index, a function, or the target itself."""
    if isinstance(target, (Largest, Label)):
        return PREDICTED if isinstance(target, Largest) else TRUE
    return target.plain


def resolved(target: Target, categories: Sequence[str] | None) -> Target:
    """The target with indices in place of names of classes. Raises `InputError` for classes that there are not."""
    return target.resolved(lambda one: index_of(one, categories, None if categories is None else len(categories)))


class TargetsOfSamples:
    """The targets of each of several samples: one for all, one for each, or several for all."""

    def __init__(self, target: Any, targets: Any, count: int | None) -> None:
        """`count`: how many samples there are, which tells a position and a class from a class for each of two; None if not."""
        check_one_of(target, targets)
        several = None if targets is None else _listed("targets=", targets)
        if several == []:
            raise InputError("targets= is an empty list", topic="explainers")
        self.several = None if several is None else tuple(map(as_target, several))
        if isinstance(target, (np.ndarray, torch.Tensor)) and target.ndim == 0:
            target = target.item()
        elif isinstance(target, (np.ndarray, torch.Tensor)) and torch.as_tensor(target).is_floating_point():
            raise InputTypeError(
                "target= is a tensor of weights, which belong to a batch: write {class: weight, ...} for all samples, or a "
                "function that returns weights of the shape of the output",
                topic="targets",
            )
        is_one = not hasattr(target, "__iter__") or isinstance(target, (str, Mapping, Target))
        if _is_place(target) and not _is_for_each(target, count):
            is_one = True
        self.each = None if is_one else tuple(map(as_target, _listed("target=", target)))
        self.target = as_target(target) if is_one else None

    def of_sample(self, number: int) -> tuple[Target, ...]:
        """The targets of one sample."""
        if self.several is not None:
            return self.several
        if self.target is not None:
            return (self.target,)
        assert self.each is not None
        if number >= len(self.each):
            raise InputError(
                f"target= has {len(self.each)} classes, one for each, but more were given", topic="classes-and-their-names"
            )
        return (self.each[number],)

    def check_number(self, count: int) -> None:
        """Raise `InputError` unless there are as many targets as samples."""
        if self.each is not None and len(self.each) != count:
            raise InputError(
                f"target= has {len(self.each)} classes, one for each, but {count} were given; several classes for each are "
                f"targets=; {AT_PLACES}",
                topic="classes-and-their-names",
            )


def _is_place(target: Any) -> bool:
    """Whether a target is a position and a class or token, which may be a contrast."""
    return (
        isinstance(target, tuple)
        and len(target) == 2
        and isinstance(target[0], (int, np.integer))
        and not isinstance(target[0], bool)
        and (target[1] is None or isinstance(target[1], (str, int, np.integer, Mapping)))
    )


def _is_for_each(target: tuple[Any, Any], count: int | None) -> bool:
    """Whether a tuple has two classes, one for each of two samples."""
    return count in (2, None) and isinstance(target[1], (int, np.integer))


def _listed(name: str, targets: Any) -> list[Any]:
    found = as_list(name, targets)
    if any(isinstance(one, (list, tuple)) and not _is_place(one) for one in found):
        raise InputError(f"{name} is a list of classes, not of lists; {AT_PLACES}", topic="classes-and-their-names")
    return found
