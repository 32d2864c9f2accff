"""Perturbed copies of an image, in which blocks of pixels are filled with something else."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from lrpfx.measures.sample import KnownScores, Sample, remembered

#: Blocks along the shorter side of an image, where no size is stated.
BLOCKS = 14


@dataclass(frozen=True, eq=False)
class ImageSample(Sample):
    """One image, (C, H, W), with the class that is explained, and its mask, (H, W), if there is one.

    `probabilities`: the probability of the class, (n,), in copies of the image, (n, C, H, W), of which `batch_size` run
    together. `explain`: the maps of such copies by all methods, (methods, n, H, W). `with_other_weights`: those of the image by
    all methods, (methods, H, W), for models of which more and more layers, in so many steps, have shuffled weights. `known`:
    takes scores of masks.
    """

    image: torch.Tensor
    probabilities: Callable[[torch.Tensor], torch.Tensor]
    batch_size: int
    explain: Callable[[torch.Tensor], torch.Tensor]
    with_other_weights: Callable[[int], list[torch.Tensor]]
    known: KnownScores = field(default_factory=dict)

    def scores(self, masks: torch.Tensor, fill: str, side: int) -> torch.Tensor:
        """The probability of the class, (n,), float64, where masks, (n, blocks), fill blocks of `side` pixels."""
        return remembered(self.known, masks, (fill, side), lambda: self._scores(masks, fill, side))

    def _scores(self, masks: torch.Tensor, fill: str, side: int) -> torch.Tensor:
        filled = FILLS[fill](self, side)
        scores = []
        for some in masks.to(self.image.device).split(self.batch_size):
            scores.append(self.probabilities(filled(pixels_of_blocks(some, side, *self.image.shape[1:]))))
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


#: Copies of an image, (n, C, H, W), in which pixels, (n, 1, H, W), are filled.
Filled = Callable[[torch.Tensor], torch.Tensor]


def _mean(sample: ImageSample, side: int) -> Filled:
    return lambda pixels: torch.where(pixels, mean_colors(sample.image), sample.image)


def _blurred(sample: ImageSample, side: int) -> Filled:
    """With a Gaussian whose standard deviation is the side of a block; pixels at the border go on beyond it."""
    image = sample.image
    radius = 3 * side
    distances = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (distances / side) ** 2)
    kernel = (weights / weights.sum()).to(image)
    channels = image[:, None]
    for shape, padding in (((1, 1, -1, 1), (0, 0, radius, radius)), ((1, 1, 1, -1), (radius, radius, 0, 0))):
        channels = functional.conv2d(functional.pad(channels, padding, "replicate"), kernel.reshape(shape))
    return lambda pixels: torch.where(pixels, channels[:, 0], image)


def _noise(sample: ImageSample, side: int) -> Filled:
    """Uniform between the lowest and the highest value of each channel."""
    image = sample.image
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    random = torch.rand(image.shape, generator=sample.generator(), dtype=torch.float64)
    filled = low + (high - low) * random.to(image)
    return lambda pixels: torch.where(pixels, filled, image)


def _road(sample: ImageSample, side: int) -> Filled:
    """Imputed from the neighbours, with noise of a hundredth of the standard deviation of each channel."""
    image = sample.image
    random = torch.randn(image.shape, generator=sample.generator(), dtype=torch.float64).to(image)
    noise = 0.01 * image.std((1, 2), keepdim=True) * random
    return lambda pixels: torch.where(pixels, imputed(image.expand(len(pixels), -1, -1, -1), pixels) + noise, image)


def imputed(images: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Images, (n, C, H, W), in which each of `pixels`, (n, 1, H, W), is the mean of its neighbours, weighted.

    Neighbours that share an edge count twice as much as those that share a corner (Rong et al. 2022,
    https://proceedings.mlr.press/v162/rong22a.html). The linear system is solved by conjugate gradients, for float32 to a
    thousandth of the standard deviation of the image. Where all pixels are filled, they get the mean of each channel.
    """

    def sums(values: torch.Tensor) -> torch.Tensor:
        """Of all neighbours, by rows and columns: (1, 2, 1) in both directions without the pixel itself."""
        padded = functional.pad(values, (1, 1, 1, 1))
        rows = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
        return rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:] - 4 * values

    def product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first * second).sum((2, 3), keepdim=True)

    weights = sums(torch.ones_like(images[:1, :1]))
    values = torch.where(pixels, mean_colors(images), images)
    residual = pixels * (sums(values) - weights * values)
    enough = 100 * torch.finfo(images.dtype).eps * (images.amax() - images.amin())
    direction, square = residual, product(residual, residual)
    for _ in range(int(pixels.sum((1, 2, 3)).amax())):  # in exact numbers, it is solved after so many steps
        if residual.abs().amax() <= enough:
            break
        change = pixels * (weights * direction - sums(direction))
        length = product(direction, change)
        step = torch.where(length > 0, square / length, 0.0)
        values = values + step * direction
        residual = residual - step * change
        before, square = square, product(residual, residual)
        direction = residual + torch.where(before > 0, square / before, 0.0) * direction
    return values


#: What blocks are filled with, by name.
FILLS: dict[str, Callable[[ImageSample, int], Filled]] = {"mean": _mean, "blur": _blurred, "noise": _noise, "road": _road}
