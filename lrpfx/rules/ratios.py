"""Gradient mappers and reducers: they divide relevance among the branches of a rule and combine the results."""

from collections.abc import Sequence

import torch

from lrpfx.errors import RuleError
from lrpfx.rules.rule import Absorbed
from lrpfx.rules.stabilizer import StabilizerFunction
from lrpfx.support.tensors import where_finite

Tensors = Sequence[torch.Tensor]


class OwnRatios:
    """For each branch, the relevance divided by the branch's own stabilized output."""

    def __init__(self, stabilizer: StabilizerFunction) -> None:
        self.stabilizer = stabilizer

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
        return [relevance / self.stabilizer(output) for output in outputs]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """The share of the stabilizers, and relevance held back if the branch weights do not add up to 1."""
        kept = [held_back(weight * relevance, output, self.stabilizer) for weight, output in zip(weights, outputs, strict=True)]
        return added([*kept, {"stopped": (1.0 - sum(weights)) * relevance.sum()}])


class SharedRatios:
    """For each group of branches, the relevance divided by the stabilized signed sum of the group's outputs.

    `groups`: for each group, a dict from its branches to the sign of their output.
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
        """The share of the stabilizers, and relevance held back if the group weights do not add up to 1."""
        kept, total = [], 0.0
        for group in self.groups:
            weight = next(weights[branch] * sign for branch, sign in group.items())
            output = sum_of([sign * outputs[branch] for branch, sign in group.items()])
            kept.append(held_back(weight * relevance, output, self.stabilizer))
            total += weight
        return added([*kept, {"stopped": (1.0 - total) * relevance.sum()}])


class ConservingRatios:
    """Two groups of two branches: positive contributions, weighted by alpha, and negative ones, weighted by -beta.

    Where one group sums to zero, the other takes all relevance (see `weights_by_sign`).
    """

    def __init__(self, stabilizer: StabilizerFunction, alpha: float, beta: float) -> None:
        self.stabilizer = stabilizer
        self.alpha = alpha
        self.beta = beta

    def _groups(self, relevance: torch.Tensor, outputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group, its share of the relevance and the sum of its outputs."""
        totals = (outputs[0] + outputs[1], outputs[2] + outputs[3])
        weights = weights_by_sign(*totals, self.alpha, self.beta)
        return [(weight * relevance, total) for weight, total in zip(weights, totals, strict=True)]

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
        ratios = [share / self.stabilizer(total) for share, total in self._groups(relevance, outputs)]
        return [ratio for ratio in ratios for _ in range(2)]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """The share of the stabilizers."""
        return added([held_back(share, total, self.stabilizer) for share, total in self._groups(relevance, outputs)])


#: Contributions of one sign count as zero up to this many rounding units of the contributions of the other sign. Convolutions
#: that transform their input leave such residues where the exact result is zero.
NONE_TO_ROUNDING = 4.0


def weights_by_sign(
    positive: torch.Tensor, negative: torch.Tensor, alpha: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of positive and negative contributions: alpha and -beta, or 0 and 1 where one sign sums to zero.

    The 0 is for that sign, and the 1 for the other.
    """
    rounding = NONE_TO_ROUNDING * torch.finfo(positive.dtype).eps
    no_negative = negative.abs() <= rounding * positive.abs()
    no_positive = (positive.abs() <= rounding * negative.abs()) & ~no_negative
    of_positive = torch.where(no_negative, 1.0, torch.where(no_positive, 0.0, torch.full_like(positive, alpha)))
    of_negative = torch.where(no_negative, 0.0, torch.where(no_positive, 1.0, torch.full_like(negative, -beta)))
    return of_positive, of_negative


def held_back(relevance: torch.Tensor, output: torch.Tensor, stabilizer: StabilizerFunction) -> Absorbed:
    """The relevance that a stabilized denominator withholds from the terms of its output.

    It counts for the stabilizer, except where the terms sum to zero: there it is "absent", as no term can take a share.
    """
    stabilized = stabilizer(output)
    kept = where_finite(output, relevance / stabilized * (stabilized - output))
    kept = torch.where(output == 0, relevance, kept)
    nothing = torch.zeros_like(kept)
    return {
        "stabilizer": torch.where(output == 0, nothing, kept).sum(),
        "absent": torch.where(output == 0, kept, nothing).sum(),
    }


def added(accounts: Sequence[Absorbed]) -> Absorbed:
    """The sum of several accounts."""
    parts: Absorbed = {}
    for account in accounts:
        for part, amount in account.items():
            parts[part] = parts.get(part, 0.0) + amount
    return parts


def sum_of(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of one or more tensors."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class WeightedProducts:
    """The sum over branches of weight * input * pulled-back gradient, without branches that have no gradient."""

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
        """The weights of `count` branches."""
        return self.weights or (1.0,) * count


class FirstGradient:
    """The pulled-back gradient of the first branch, not multiplied by the input."""

    def __call__(self, inputs: Tensors, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        if gradients[0] is None:
            raise RuleError(
                "the reducer uses only the first branch, but the gradient mapper returned None for it", topic="own-rules"
            )
        return gradients[0]

    def branch_weights(self, count: int) -> Sequence[float]:
        """The weights of `count` branches. The input of the first one counts as 1."""
        return (1.0, *(0.0,) * (count - 1))
