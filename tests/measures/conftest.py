"""A small classifier of images of 12 x 16 pixels, with groups and masks."""

import pytest
import torch
from torch import nn

from lrpfx.measures import ImageData


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    ).eval()  # fmt: skip


@pytest.fixture
def data(model):
    masks = torch.zeros(5, 12, 16, dtype=torch.bool)
    masks[:, 3:9, 4:10] = True
    return ImageData(model, torch.rand(5, 3, 12, 16), groups=["a", "a", "b", "b", "c"], masks=masks)
