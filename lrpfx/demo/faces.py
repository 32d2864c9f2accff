"""A face detector with trained weights: the three networks of MTCNN from the package facenet-pytorch. Nothing is downloaded.

Zhang et al. 2016, https://arxiv.org/abs/1604.02878: a small network proposes windows at several scales, a second one sorts them
out, and a third one decides. The third is what is explained; the windows that it looks at are found before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from lrpfx.demo import torchvision_cpu  # noqa: F401  # before torchvision, which facenet-pytorch imports
from lrpfx.detection import DetectorHeads, RawHeads
from lrpfx.detection.detector_heads import sampled_regions, without_background
from lrpfx.support.optional_packages import optional_package

CATEGORIES = ("no face", "face")
#: Pixels of a side of what each network looks at, and between the places where the first one does.
_FIRST, _SECOND, _THIRD, _STRIDE = 12, 24, 48, 2
#: By how much images of the first network become smaller, and the smallest face that it finds, in pixels.
_FACTOR, _SMALLEST = 0.709, 40


class FaceHeads(DetectorHeads):
    """MTCNN for one size of photographs after the other: `further` finds windows, and the third network decides about each."""

    further_names = ("windows",)
    most = 32

    @property
    def overlap(self) -> float:
        return 0.5

    def own_threshold(self) -> float:
        return 0.7

    def input_of(self, given: Callable[..., Any] | None) -> Callable[..., Any]:
        return scaled if given is None else given

    # The names of arguments are those of `further_names`.
    def forward(self, images: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The candidates. `images`: (batch, 3, height, width). `windows`: (batch, windows, 4)."""
        return self.candidates(self.decided(self.detector["third"], _THIRD, images, windows))

    def raw(self, images: torch.Tensor) -> RawHeads:
        return self.decided(self.detector["third"], _THIRD, images, *self.further(images))

    @torch.no_grad()
    def further(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        windows = self.chosen(self.proposed(images))
        return (self.chosen(self.decided(self.detector["second"], _SECOND, images, windows)),)

    def proposed(self, images: torch.Tensor) -> RawHeads:
        """What the first network says of all places of the images, made smaller step by step."""
        height, width = images.shape[2:]
        scale, found = _FIRST / _SMALLEST, []
        while min(height, width) * scale >= _FIRST:
            smaller = functional.interpolate(images, size=(int(height * scale + 1), int(width * scale + 1)), mode="area")
            moves, logits = self.detector["first"](smaller)
            rows, columns = (torch.arange(side, device=images.device) * _STRIDE for side in logits.shape[2:])
            y, x = torch.meshgrid(rows, columns, indexing="ij")
            windows = torch.stack([x, y, x + _FIRST, y + _FIRST], -1).flatten(0, 1).to(images) / scale
            found.append(_moved(logits.flatten(2).transpose(1, 2), moves.flatten(2).transpose(1, 2), windows))
            scale *= _FACTOR
        return RawHeads(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))

    def decided(self, network: nn.Module, size: int, images: torch.Tensor, windows: torch.Tensor) -> RawHeads:
        """What a network says of windows, (batch, windows, 4), each of which it gets with this size."""
        results = network(cut_out(images, windows, size))
        shape = (windows.shape[0], windows.shape[1], -1)
        return _moved(results[-1].reshape(shape), results[0].reshape(shape), windows)

    def chosen(self, raw: RawHeads) -> torch.Tensor:
        """The best boxes without doubles, as squares, (batch, windows, 4)."""
        candidates, places, _ = self._found(raw, self.most)
        boxes = candidates.corners.gather(1, places[..., None].expand(-1, -1, 4))
        middle, side = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]).amax(-1, keepdim=True)
        return torch.cat([middle - side / 2, middle + side / 2], -1)


def cut_out(images: torch.Tensor, windows: torch.Tensor, size: int) -> torch.Tensor:
    """The part of the images in each window, (batch · windows, channels, size, size): means of two by two samples."""
    shares = (torch.arange(2 * size, device=images.device, dtype=images.dtype) + 0.5) / (2 * size)
    x1, y1, x2, y2 = (windows[..., place, None] for place in range(4))
    x = (x1 + (x2 - x1) * shares) * 2 / images.shape[3] - 1
    y = (y1 + (y2 - y1) * shares) * 2 / images.shape[2] - 1
    return functional.avg_pool2d(sampled_regions(images, x, y).flatten(0, 1), 2)


def _moved(logits: torch.Tensor, moves: torch.Tensor, windows: torch.Tensor) -> RawHeads:
    """Windows moved by shares of their sides, with the confidence that they show a face."""
    sides = windows[..., 2:] - windows[..., :2]
    corners = windows + moves * torch.cat([sides, sides], -1)
    return RawHeads(logits, corners, without_background(logits))


def scaled(photograph: Image.Image) -> torch.Tensor:
    """A photograph as MTCNN takes it, with 0 in the middle between black and white: (3, height, width)."""
    return (torch.from_numpy(np.array(photograph.convert("RGB"))).permute(2, 0, 1).float() - 127.5) / 128


def load_detector(threshold: float | None = None) -> FaceHeads:
    """MTCNN with its trained weights, for `lrpfx.Explainer(load_detector(), categories=CATEGORIES)`.

    `threshold`: the confidence above which a window is a face; by default 0.7.
    """
    package = optional_package(
        "facenet_pytorch.models.mtcnn",
        "lrpfx.demo.faces",
        install="--no-deps facenet-pytorch",  # it would replace torch
    )
    stages = {"first": package.PNet(), "second": package.RNet(), "third": package.ONet()}
    detector = nn.ModuleDict(stages).eval()
    for network in detector.values():
        for name, module in list(network.named_children()):
            if isinstance(module, nn.Softmax):
                setattr(network, name, nn.Identity())  # logits are explained
    return FaceHeads(detector, threshold)
