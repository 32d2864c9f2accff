"""Means with bootstrap confidence intervals (Efron 1979, https://doi.org/10.1214/aos/1176344552)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mean:
    """A mean, and the bounds of its 95 % bootstrap confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def means(values: torch.Tensor) -> list[Mean]:
    """The means of the rows of `values`, of shape (rows, samples); all rows are resampled alike."""
    low, high = interval(resampled_means(values))
    columns = (values.mean(1).tolist(), low.tolist(), high.tolist())
    return [Mean(*row) for row in zip(*columns, strict=True)]


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
