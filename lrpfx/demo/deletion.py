"""Deletion curves: does the score of a model rely on the tokens that an explanation calls relevant?

Tokens are masked one by one in the order of their relevance, while tracking the score: pixel flipping (Bach et al. 2015,
https://doi.org/10.1371/journal.pone.0130140) for text. Masking the most relevant tokens first should reduce the score quickly,
masking the least relevant first slowly: the measure is the area between the two curves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

#: The scores, of shape (n,), of n copies of a text, for a truth value (n, tokens) that says which tokens are masked in each.
ScoreMasked = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Deletion:
    """The score after each number of masked tokens, from none to all. Shape (tokens + 1,)."""

    most_relevant_first: torch.Tensor
    least_relevant_first: torch.Tensor

    @property
    def area_most_relevant_first(self) -> float:
        """The area under the curve over the share of masked tokens: lower is better."""
        return _area(self.most_relevant_first)

    @property
    def area_least_relevant_first(self) -> float:
        """The area under the curve over the share of masked tokens: higher is better."""
        return _area(self.least_relevant_first)

    @property
    def area(self) -> float:
        """The area between the curves: higher is better, 0 is chance."""
        return self.area_least_relevant_first - self.area_most_relevant_first


def _area(curve: torch.Tensor) -> float:
    return float(torch.trapezoid(curve.double(), dx=1.0 / (len(curve) - 1)))


def deletions(score: ScoreMasked, relevances: Mapping[str, torch.Tensor]) -> dict[str, Deletion]:
    """Deletion curves for several relevances of the tokens of one text, each of shape (tokens,).

    Where orders mask the same tokens, these are scored once.
    """
    masks = torch.cat([_masks(order) for relevance in relevances.values() for order in _orders(relevance)])
    distinct, places = masks.unique(dim=0, return_inverse=True)
    curves = score(distinct)[places].reshape(len(relevances), 2, -1)
    return {name: Deletion(most, least) for name, (most, least) in zip(relevances, curves, strict=True)}


def _orders(relevance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = relevance.argsort(descending=True, stable=True)
    return order, order.flip(0)


def _masks(order: torch.Tensor) -> torch.Tensor:
    """Which tokens are masked after each step, of shape (tokens + 1, tokens)."""
    rank = order.argsort()
    return rank < torch.arange(len(order) + 1)[:, None]


def resampled_means(values: torch.Tensor, resamples: int = 10_000, seed: int = 0) -> torch.Tensor:
    """Means over bootstrap samples of the last dimension, of shape (..., resamples).

    All rows are resampled alike, so that their differences may be taken.
    """
    count = values.shape[-1]
    picks = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(resamples, count, dtype=values.dtype)
    weights.scatter_add_(1, picks, torch.full_like(picks, 1.0 / count, dtype=values.dtype))
    return values @ weights.T


def interval(means: torch.Tensor, level: float = 0.95) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of the confidence interval: percentiles of resampled means, of shape (..., resamples)."""
    tail = (1.0 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1.0 - tail], dtype=means.dtype), dim=-1)
    return low, high
