"""Deletion curves: whether the score of a model relies on the parts of an input that an explanation calls relevant.

Parts, such as the tokens of a text or the blocks of an image, are masked in the order of their relevance, while tracking
the score. Bach et al. 2015 (https://doi.org/10.1371/journal.pone.0130140) do this with pixels. Masking the most relevant parts
first should reduce the score quickly, masking the least relevant first slowly: the measure is the area between the two curves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

#: The scores, of shape (n,), of n copies of an input, for a truth value (n, parts) that says which parts are masked in each.
ScoreMasked = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Deletion:
    """The score after each number of masked parts, from none to all. Shape (steps + 1,)."""

    most_relevant_first: torch.Tensor
    least_relevant_first: torch.Tensor

    @property
    def area_most_relevant_first(self) -> float:
        """The area under the curve over the share of masked parts: lower is better."""
        return _area(self.most_relevant_first)

    @property
    def area_least_relevant_first(self) -> float:
        """The area under the curve over the share of masked parts: higher is better."""
        return _area(self.least_relevant_first)

    @property
    def area(self) -> float:
        """The area between the curves: higher is better, 0 is chance."""
        return self.area_least_relevant_first - self.area_most_relevant_first


def _area(curve: torch.Tensor) -> float:
    return float(torch.trapezoid(curve.double(), dx=1.0 / (len(curve) - 1)))


def deletions(score: ScoreMasked, relevances: Mapping[str, torch.Tensor], steps: int | None = None) -> dict[str, Deletion]:
    """Deletion curves for several relevances of the parts of one input, each of shape (parts,).

    `steps`: in how many steps, equal to rounding, the parts are masked; by default one by one. Where orders mask the same
    parts, these are scored once.
    """
    masks = torch.cat([_masks(order, steps) for relevance in relevances.values() for order in _orders(relevance)])
    distinct, places = masks.unique(dim=0, return_inverse=True)
    curves = score(distinct)[places].reshape(len(relevances), 2, -1)
    return {name: Deletion(most, least) for name, (most, least) in zip(relevances, curves, strict=True)}


def _orders(relevance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = relevance.argsort(descending=True, stable=True)
    return order, order.flip(0)


def _masks(order: torch.Tensor, steps: int | None) -> torch.Tensor:
    """Which parts are masked after each step, of shape (steps + 1, parts)."""
    rank = order.argsort()
    counts = torch.linspace(0, len(order), (steps or len(order)) + 1, dtype=torch.float64).round()
    return rank < counts[:, None]
