"""Pixel flipping: whether the model relies on the pixels that an explanation calls relevant.

Pixels are inverted one by one in the order of their relevance, while tracking the probability of the class first predicted
(Bach et al. 2015, https://doi.org/10.1371/journal.pone.0130140, section "Pixel-flipping"). Flipping the most relevant pixels
first should reduce it quickly, flipping the least relevant first slowly: the measure is the area between the two curves.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Flipping:
    """Mean probability of the first prediction after each number of flipped pixels, from none to all. Shape (pixels + 1,)."""

    most_relevant_first: torch.Tensor
    least_relevant_first: torch.Tensor

    @property
    def area(self) -> float:
        """Mean distance between the curves, in [-1, 1]: higher is better, 0 is chance."""
        return float((self.least_relevant_first - self.most_relevant_first).mean())


def pixel_flipping(model: nn.Module, images: torch.Tensor, relevance: torch.Tensor) -> Flipping:
    """Flip the pixels of `images` in both orders of `relevance`. Both of shape (n, 1, height, width), values in [0, 1]."""
    order = relevance.flatten(1).argsort(dim=1, descending=True, stable=True)
    return Flipping(_curve(model, images, order), _curve(model, images, order.flip(1)))


@torch.no_grad()
def _curve(model: nn.Module, images: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    predicted = model(images).argmax(1, keepdim=True)
    pixels = images.flatten(1).clone()
    probabilities = []
    for step in range(order.shape[1] + 1):
        if step:
            flipped = order[:, step - 1 : step]
            pixels.scatter_(1, flipped, 1.0 - pixels.gather(1, flipped))
        probability = torch.softmax(model(pixels.reshape(images.shape)), 1).gather(1, predicted)
        probabilities.append(probability.mean())
    return torch.stack(probabilities)
