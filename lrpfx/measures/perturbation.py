"""Perturbed copies of an image, in which blocks of pixels are filled with something else."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

#: Blocks along the shorter side of an image, where no size is stated.
BLOCKS = 14


@dataclass(frozen=True, eq=False)
class Sample:
    """One image, (C, H, W), with the class that is explained, and its mask, (H, W), if there is one.

    `number`: its place among the images, which seeds what is random. `probabilities`: the probability of the class, (n,), in
    copies of the image, (n, C, H, W), of which `batch_size` run together.
    """

    number: int
    image: torch.Tensor
    mask: torch.Tensor | None
    probabilities: Callable[[torch.Tensor], torch.Tensor]
    batch_size: int

    def generator(self) -> torch.Generator:
        """Random numbers of this image: the same at each call, and whatever other images there are."""
        return torch.Generator().manual_seed(self.number)

    def scores(self, masks: torch.Tensor, fill: str, side: int) -> torch.Tensor:
        """The probability of the class, (n,), float64, where masks, (n, blocks), fill blocks of `side` pixels."""
        filled = FILLS[fill](self, side)
        scores = []
        for some in masks.to(self.image.device).split(self.batch_size):
            pixels = pixels_of_blocks(some, side, *self.image.shape[1:])
            scores.append(self.probabilities(torch.where(pixels, filled, self.image)))
        return torch.cat(scores).double().cpu()


def default_side(image: torch.Tensor) -> int:
    """The side of blocks in pixels where none is stated: a fourteenth of the shorter side of an image, (..., H, W)."""
    return max(1, min(image.shape[-2:]) // BLOCKS)


def sums_over_blocks(maps: torch.Tensor, side: int) -> torch.Tensor:
    """The sums of maps, (n, H, W), over blocks, (n, blocks), row by row; the last of a row or column may be incomplete."""
    return functional.avg_pool2d(maps[:, None], side, ceil_mode=True, divisor_override=1).flatten(1)


def pixels_of_blocks(masks: torch.Tensor, side: int, height: int, width: int) -> torch.Tensor:
    """The pixels in the blocks of masks, (n, blocks), as truth values, (n, 1, H, W)."""
    grid = masks.reshape(len(masks), 1, -(-height // side), -(-width // side))
    return grid.repeat_interleave(side, 2).repeat_interleave(side, 3)[..., :height, :width]


def mean_colors(images: torch.Tensor) -> torch.Tensor:
    """The mean of each channel of each image, (..., C, 1, 1)."""
    return images.mean((-2, -1), keepdim=True)


def _mean(sample: Sample, side: int) -> torch.Tensor:
    return mean_colors(sample.image)


def _blurred(sample: Sample, side: int) -> torch.Tensor:
    """With a Gaussian whose standard deviation is the side of a block; pixels at the border go on beyond it."""
    image = sample.image
    radius = 3 * side
    distances = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (distances / side) ** 2)
    kernel = (weights / weights.sum()).to(image)
    channels = image[:, None]
    for shape, padding in (((1, 1, -1, 1), (0, 0, radius, radius)), ((1, 1, 1, -1), (radius, radius, 0, 0))):
        channels = functional.conv2d(functional.pad(channels, padding, "replicate"), kernel.reshape(shape))
    return channels[:, 0]


def _noise(sample: Sample, side: int) -> torch.Tensor:
    """Uniform between the lowest and the highest value of each channel."""
    image = sample.image
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    random = torch.rand(image.shape, generator=sample.generator(), dtype=torch.float64)
    return low + (high - low) * random.to(image)


#: What blocks are filled with, by name.
FILLS: dict[str, Callable[[Sample, int], torch.Tensor]] = {"mean": _mean, "blur": _blurred, "noise": _noise}


def random_masks(sample: Sample, count: int, blocks: int) -> torch.Tensor:
    """Masks, (count, blocks), each with half of the blocks."""
    order = torch.rand(count, blocks, generator=sample.generator(), dtype=torch.float64).argsort(1)
    return order < math.ceil(blocks / 2)
