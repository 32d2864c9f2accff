"""What a model answers for an explained class: relevance, and what the model says about the class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrpfx.errors import printable
from lrpfx.request.outputs import are_probabilities
from lrpfx.request.places import scores_of_classes
from lrpfx.request.regions import Region
from lrpfx.request.targets import Class, Position, Target
from lrpfx.runtime.multipliers import multiplier_from
from lrpfx.support.identity.plain_data import PlainData

Array = NDArray[Any]
#: The names of classes or tokens by their indices.
Names = Sequence[str] | Mapping[int, str] | None


@dataclass(frozen=True)
class Category:
    """What is explained, a class of the model or another target, with what the model says about it."""

    index: int | None  # None for a target that is not one class
    name: str
    score: float  # the model's output, or the relevance that the target gives it
    probability: float | None  # None if the outputs are no classes
    area: float | None = None  # the share of the places that are explained; None if the output has no places

    def __str__(self) -> str:
        name = printable(self.name)
        if self.area is not None:
            return f"{name} ({percent(self.area)} of the places)" if self.area else f"{name} (nowhere)"
        return name if self.probability is None else f"{name} ({self.probability:.0%})"


@dataclass(frozen=True)
class Balance:
    """Where the relevance of an explained output went."""

    output: float  # what is explained: of a difference from a reference, the difference
    inputs: float
    others: float | None = None  # of the inputs beside the one that is shown, if there are others
    of_difference: bool = False

    @property
    def constants(self) -> float:
        """What biases, stabilizers and other constants took: all that did not reach the inputs."""
        return self.output - self.inputs - (self.others or 0.0)

    @property
    def share(self) -> float | None:
        """The share of the output that reached the inputs, and so is in a map of them; None if the output is 0."""
        return self.inputs / self.output if self.output else None

    def __str__(self) -> str:
        inputs = f"inputs {self.inputs:.4g}"
        if self.others is not None:
            inputs = f"this input {self.inputs:.4g} + other inputs {self.others:.4g}"
        what = "difference" if self.of_difference else "output"
        return f"{what} {self.output:.4g} = {inputs} + constants {self.constants:.4g}"


def shares_in_words(balances: Sequence[Balance]) -> str:
    """How much of the outputs maps hold, as the line below a picture; "" if that is not known."""
    shares = sorted(one.share for one in balances if one.share is not None)
    if not shares:
        return ""
    of_all = _range(shares)
    if any(one.of_difference for one in balances):
        return f"the {'map holds' if len(balances) == 1 else 'maps hold'} {of_all} of the difference from the reference"
    held = f"the map holds {of_all} of the output" if len(balances) == 1 else f"the maps hold {of_all} of the outputs"
    negative = len(balances) == 1 and balances[0].output < 0
    against = f", which is {balances[0].output:.3g}: the model speaks against it" if negative else ""
    others = "other inputs, " if any(one.others is not None for one in balances) else ""
    rest = f"{others}biases and other constants"
    if round(shares[0], 2) > 1:  # they are negative
        return f"{held}{against}; {rest} take away {_range([share - 1 for share in shares])}"
    return f"{held}{against}; the rest is in {rest}"


def _range(shares: Sequence[float]) -> str:
    """The least and the largest of sorted shares."""
    return " to ".join(dict.fromkeys(map(percent, (shares[0], shares[-1]))))


def percent(share: float) -> str:
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


@dataclass(frozen=True, eq=False)
class Answer(PlainData):
    """The relevance for one class."""

    category: Category
    input_relevance: Array  # of the model's input, (channels, height, width), or (tokens, embedding)
    layers: dict[str, Array]  # of recorded layers, without the batch
    region: Array | None = None  # the places that are explained, as the output has them, bool; None if it has no places
    difference: float | None = None  # of the score from that for the reference; None without a reference

    @property
    def summed(self) -> Array:
        """The relevance of each pixel of the input, (height, width)."""
        return np.asarray(self.input_relevance.astype(np.float64).sum(0))

    @property
    def balance(self) -> Balance:
        """How much of the output's relevance reached the input."""
        explained = self.category.score if self.difference is None else self.difference
        of_input = float(self.input_relevance.sum(dtype=np.float64))
        return Balance(explained, of_input, of_difference=self.difference is not None)


class Scores(Enum):
    """What the numbers of an output are, and so how probable the classes are."""

    LOGITS = "logits of classes of which one is right"
    BINARY = "a logit for each class"
    PROBABILITIES = "probabilities, or their logarithms"
    OTHER = "numbers of another kind"
    UNKNOWN = "not known: probabilities if they look like it, and logits unless all of them lie between 0 and 1"

    def probabilities(self, output: Array) -> Array | None:
        """The probability of each class, or None."""
        scores = output.astype(np.float64)
        between = bool(scores.min() >= 0.0 and scores.max() <= 1.0)
        if self is Scores.PROBABILITIES:
            return scores if between else None
        if self is Scores.BINARY:
            sigmoid: Array = 0.5 * (1.0 + np.tanh(0.5 * scores))
            return sigmoid
        if self is Scores.OTHER or len(scores) < 2:
            return None
        if self is Scores.UNKNOWN and are_probabilities(torch.as_tensor(scores)[None]):
            return scores
        if self is Scores.UNKNOWN and between:
            return None
        shifted = np.exp(scores - scores.max())
        shares: Array = shifted / shifted.sum()
        return shares


def scores_in(output: Array) -> Array:
    """The score of each class, (classes,), in an output of one sample, (classes, ...)."""
    return np.asarray(scores_of_classes(torch.as_tensor(output)[None])[0])


def category_of(output: Array, index: int, categories: Names, scores: Scores) -> Category:
    """The class with this index. `output`: of one sample, (classes, ...)."""
    if output.ndim == 2:  # at the positions of a sequence
        found = category_of_target(Region(index), output.T, categories, scores)
        return replace(found, index=index, name=str(index) if categories is None else categories[index])
    if output.ndim > 1:
        return category_of_target(Class(index), output, categories, scores)
    name = str(index) if categories is None else categories[index]
    probabilities = scores.probabilities(output)
    return Category(index, name, float(output[index]), None if probabilities is None else float(probabilities[index]))


def difference_of_target(target: Target, output: Array, reference: Array) -> float:
    """The difference of what a target explains from that for a reference, of the same shape (classes, ...)."""
    values = torch.as_tensor(output).double()
    weights = multiplier_from(values[None], target.relevance(values[None]))[0]
    return float((weights * (values - torch.as_tensor(reference))).sum())


def category_of_target(target: Target, output: Array, categories: Names, scores: Scores) -> Category:
    """What a target explains of an output (classes, ...): a class, a sum of classes, or what the target says it is.

    Of a sequence, (positions, classes), it is that at a position, or a region.
    """
    if isinstance(target, Position):
        position = int(target.position)
        found = category_of_target(target.target, output[position], categories, scores)
        return replace(found, name=f"{found.name} (position {position})")
    values = torch.as_tensor(output)
    weights = target.weights(values)

    def name_of(index: int) -> str:
        return str(index) if categories is None else categories[index]

    if output.ndim > 1:
        index = None if weights is None else next(iter(weights))
        region, score = target.region(values[None]), float(target.relevance(values[None]).sum())
        area = None if region is None else float(region.double().mean())
        return Category(index, target.title(name_of) if index is None else name_of(index), score, None, area)
    if weights is None:
        return Category(None, str(target), float(target.relevance(values[None]).sum()), None)
    if len(weights) == 1 and 1.0 in weights.values():
        return category_of(output, next(iter(weights)), categories, scores)
    score = sum(weight * float(output[one]) for one, weight in weights.items())
    return Category(None, target.title(name_of), score, None)
