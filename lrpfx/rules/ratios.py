"""Gradient mappers and reducers: how rules divide relevance among branches, and combine what comes back."""

from collections.abc import Sequence

import torch

from lrpfx.errors import RuleError
from lrpfx.rules.rule import Absorbed
from lrpfx.rules.stabilizer import StabilizerFunction

Tensors = Sequence[torch.Tensor]


class OwnRatios:
    """Each branch: relevance over its own stabilized output."""

    def __init__(self, stabilizer: StabilizerFunction) -> None:
        self.stabilizer = stabilizer

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
        return [relevance / self.stabilizer(output) for output in outputs]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """What the denominators keep, and what branches hold back that do not weigh 1 together."""
        kept = [held_back(weight * relevance, output, self.stabilizer) for weight, output in zip(weights, outputs, strict=True)]
        return added([*kept, {"stopped": (1.0 - sum(weights)) * relevance.sum()}])


class SharedRatios:
    """Groups of branches, each divided by the stabilized signed sum of its outputs.

    `groups`: for each group the branches in it with the sign of their output.
    """

    def __init__(self, stabilizer: StabilizerFunction, groups: Sequence[dict[int, int]]) -> None:
        self.stabilizer = stabilizer
        self.groups = tuple(groups)

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        for group in self.groups:
            terms = [outputs[branch] if sign > 0 else -outputs[branch] for branch, sign in group.items()]
            ratio = relevance / self.stabilizer(sum_of(terms))
            for branch in group:
                gradients[branch] = ratio
        return gradients

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """What the denominators keep, and what groups hold back that do not weigh 1 together."""
        kept, total = [], 0.0
        for group in self.groups:
            weight = next(weights[branch] * sign for branch, sign in group.items())
            output = sum_of([sign * outputs[branch] for branch, sign in group.items()])
            kept.append(held_back(weight * relevance, output, self.stabilizer))
            total += weight
        return added([*kept, {"stopped": (1.0 - total) * relevance.sum()}])


class ConservingRatios:
    """Two groups of two branches, of positive and of negative contributions, weighted by alpha and by -beta.

    Where one of them is empty, the other one takes all relevance: see `weights_by_sign`.
    """

    def __init__(self, stabilizer: StabilizerFunction, alpha: float, beta: float) -> None:
        self.stabilizer = stabilizer
        self.alpha = alpha
        self.beta = beta

    def _groups(self, relevance: torch.Tensor, outputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group the relevance that it is given, and the sum of its outputs."""
        totals = (outputs[0] + outputs[1], outputs[2] + outputs[3])
        weights = weights_by_sign(*totals, self.alpha, self.beta)
        return [(weight * relevance, total) for weight, total in zip(weights, totals, strict=True)]

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
        ratios = [share / self.stabilizer(total) for share, total in self._groups(relevance, outputs)]
        return [ratio for ratio in ratios for _ in range(2)]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """What the denominators keep."""
        return added([held_back(share, total, self.stabilizer) for share, total in self._groups(relevance, outputs)])


#: How many units of rounding of the contributions of one sign those of the other may be and count as none: what convolutions
#: that transform their input leave behind where they should give zero.
NONE_TO_ROUNDING = 4.0


def weights_by_sign(
    positive: torch.Tensor, negative: torch.Tensor, alpha: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of positive and of negative contributions: alpha and -beta, or 1 and 0 where those of one sign are zero in sum."""
    rounding = NONE_TO_ROUNDING * torch.finfo(positive.dtype).eps
    no_negative = negative.abs() <= rounding * positive.abs()
    no_positive = (positive.abs() <= rounding * negative.abs()) & ~no_negative
    of_positive = torch.where(no_negative, 1.0, torch.where(no_positive, 0.0, torch.full_like(positive, alpha)))
    of_negative = torch.where(no_negative, 0.0, torch.where(no_positive, 1.0, torch.full_like(negative, -beta)))
    return of_positive, of_negative


def held_back(relevance: torch.Tensor, output: torch.Tensor, stabilizer: StabilizerFunction) -> Absorbed:
    """Relevance that a stabilized denominator keeps from the terms of its output.

    The stabilizer takes it, except where the terms are zero in sum: there nothing is that it could be shared out by.
    """
    stabilized = stabilizer(output)
    kept = where_finite(output, relevance / stabilized * (stabilized - output))
    nothing = torch.zeros_like(kept)
    return {
        "stabilizer": torch.where(output == 0, nothing, kept).sum(),
        "absent": torch.where(output == 0, kept, nothing).sum(),
    }


def added(accounts: Sequence[Absorbed]) -> Absorbed:
    """The accounts as one."""
    parts: Absorbed = {}
    for account in accounts:
        for part, amount in account.items():
            parts[part] = parts.get(part, 0.0) + amount
    return parts


def where_finite(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, and 0 where `output` is infinite, as masked scores are: they have no relevance to give."""
    return torch.where(torch.isinf(output), torch.zeros_like(value), value)


def sum_of(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of one or more tensors."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class WeightedProducts:
    """Sum over branches of weight * input * pulled-back gradient; branches without a gradient add nothing."""

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights

    def __call__(self, inputs: Tensors, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        weights = self.weights or (1.0,) * len(inputs)
        terms = [
            input * gradient if weight == 1.0 else weight * (input * gradient)
            for weight, input, gradient in zip(weights, inputs, gradients, strict=True)
            if gradient is not None
        ]
        return sum_of(terms)

    def branch_weights(self, count: int) -> Sequence[float]:
        """The weight of each of `count` branches."""
        return self.weights or (1.0,) * count


class FirstGradient:
    """The pulled-back gradient of the first branch alone, without the input as a factor."""

    def __call__(self, inputs: Tensors, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        if gradients[0] is None:
            raise RuleError("the gradient mapper gives the first branch nothing, which the reducer takes alone")
        return gradients[0]

    def branch_weights(self, count: int) -> Sequence[float]:
        """The weight of each of `count` branches; the input of the first one is taken as 1."""
        return (1.0, *(0.0,) * (count - 1))
