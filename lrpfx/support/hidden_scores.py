"""Scores that a mask hides from a softmax."""

import torch


def is_hidden(score: torch.Tensor) -> torch.Tensor:
    """Where a score is so low that a softmax excludes it, whatever is added: -inf, or what stands for it."""
    return score <= torch.finfo(score.dtype).min / 2 if score.is_floating_point() else torch.zeros_like(score, dtype=torch.bool)
