"""Pixel flipping: whether the model relies on the pixels that an explanation calls relevant.

Pixels are inverted one by one in the order of their relevance, while tracking the probability of the class first predicted
(Bach et al. 2015, https://doi.org/10.1371/journal.pone.0130140, section "Pixel-flipping").
"""

from collections.abc import Mapping

import torch
from torch import nn
from tqdm import tqdm

from lrpfx.measures.deletion import Deletion, deletions


@torch.no_grad()
def pixel_flipping(model: nn.Module, images: torch.Tensor, relevances: Mapping[str, torch.Tensor]) -> dict[str, Deletion]:
    """The means over the images of their deletion curves, (pixels + 1,), for several relevances.

    `images` and each relevance have the shape (n, 1, height, width), and images values in [0, 1].
    """
    predicted = model(images).argmax(1)
    found = []
    for number, image in enumerate(tqdm(images, desc="pixel flipping", unit="image")):

        def score(masks: torch.Tensor, image: torch.Tensor = image, target: torch.Tensor = predicted[number]) -> torch.Tensor:
            flipped = torch.where(masks.reshape(-1, *image.shape), 1.0 - image, image)
            return torch.softmax(model(flipped), 1)[:, target]

        found.append(deletions(score, {name: relevance[number].flatten() for name, relevance in relevances.items()}))
    return {
        name: Deletion(
            torch.stack([one[name].most_relevant_first for one in found]).mean(0),
            torch.stack([one[name].least_relevant_first for one in found]).mean(0),
        )
        for name in relevances
    }
