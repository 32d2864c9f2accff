"""Scikit-learn's handwritten digits, and a small residual network that classifies them."""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from tqdm import tqdm


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8) with values in [0, 1], and their labels of shape (n,)."""

    images: torch.Tensor
    labels: torch.Tensor


def load(held_out: float = 0.25, seed: int = 0) -> tuple[Digits, Digits]:
    """Training and held-out digits, with equal shares of the classes."""
    data = load_digits()
    parts = train_test_split(data.images, data.target, test_size=held_out, stratify=data.target, random_state=seed)
    train_images, test_images, train_labels, test_labels = parts
    return _digits(train_images, train_labels), _digits(test_images, test_labels)


def _digits(images: np.ndarray, labels: np.ndarray) -> Digits:
    pixels = torch.from_numpy(images / 16.0).float().unsqueeze(1)
    return Digits(pixels, torch.from_numpy(labels).long())


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        result: torch.Tensor = self.relu(out)
        return result


class DigitsNet(nn.Module):
    """A residual network for images of 8×8 pixels. Input (batch, 1, 8, 8), output (batch, 10)."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.block1 = ResidualBlock(channels)
        self.pool = nn.MaxPool2d(2)
        self.block2 = ResidualBlock(channels)
        self.average = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4 * channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block2(self.pool(self.block1(self.stem(x))))
        x = torch.flatten(self.average(x), 1)
        logits: torch.Tensor = self.head(self.dropout(x))
        return logits


def train(digits: Digits, epochs: int = 20, seed: int = 0) -> DigitsNet:
    """A network trained on `digits`, in evaluation mode."""
    torch.manual_seed(seed)
    model = DigitsNet()
    steps = epochs * -(-len(digits.labels) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    with tqdm(total=steps, desc="training", unit="step") as progress:
        for _ in range(epochs):
            for batch in torch.randperm(len(digits.labels)).split(64):
                loss = functional.cross_entropy(model(digits.images[batch]), digits.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.update()
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of digits that the model classifies correctly."""
    with torch.no_grad():
        return float((model(digits.images).argmax(1) == digits.labels).double().mean())
