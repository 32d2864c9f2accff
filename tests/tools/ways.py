"""What the rows of docs/modules.md share: a small network, its inputs, and the registry of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus

TARGET = 1  # the class that is explained


@dataclass(frozen=True)
class Way:
    """One row: code as the reader would write it, what runs, and a remark."""

    group: str
    title: str
    run: Callable[..., Any]
    remark: str
    result: str  # what the table says if relevance is as expected
    foreign: str  # the class of another library's error that is expected, or ""


def network(seed=0):
    """A small network in float64, with a batch norm that matters."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
        *(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 5)),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[-1] ** 0.5)
        model[1].running_mean.copy_(torch.randn(8, generator=generator))
        model[1].running_var.copy_(0.5 + torch.rand(8, generator=generator))
    return model.eval()


def images():
    """Shape (2, 3, 8, 8), in float64."""
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def explained(model, x=None, **settings):
    """Relevance by `lrpfx.attribute`."""
    explain_model = lrpfx.transform(model, EpsilonPlus(), **settings)
    return lrpfx.attribute(explain_model, images() if x is None else x, TARGET).relevance


def seed_of(output):
    """The relevance of the output: that of class `TARGET` is its value."""
    seed = torch.zeros_like(output)
    seed[:, TARGET] = output[:, TARGET].detach()
    return seed


def gradient(function, x=None, create_graph=False):
    """Relevance as the gradient of any function: what the rules make of it."""
    x = (images() if x is None else x).detach().clone().requires_grad_()
    output = function(x)
    return torch.autograd.grad(output, x, seed_of(output), create_graph=create_graph)[0]


def registry():
    """A list of ways, and a decorator that adds one."""
    ways = []

    def way(group, title, remark="", result="works", foreign=""):
        def add(function):
            ways.append(Way(group, title, function, remark, result, foreign))
            return function

        return add

    return ways, way
