"""Fingerprints of explainable modules: equal for what computes the same, different for what may not."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import EpsilonGammaBox, EpsilonPlus, NameMapComposite
from lrpfx.rules import Epsilon
from lrpfx.runtime.fingerprints import fingerprint_of_module


class Constants(nn.Module):
    """Values that are not parameters: arguments, a plain tensor, a buffer that is not saved, the eps of a batch norm."""

    def __init__(self, factor=2.0, slope=0.1, stride=1, size=2, plain=1.0, buffer=1.0, eps=1e-5):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4, eps=eps)
        self.factor, self.slope, self.stride, self.size = factor, slope, stride, size
        self.plain = torch.tensor(plain)
        self.register_buffer("unsaved", torch.tensor(buffer), persistent=False)

    def forward(self, x):
        x = functional.leaky_relu(self.norm(self.first(x)) * self.plain, self.slope) * self.factor
        x = functional.conv2d(x + self.unsaved, self.first.weight.expand(4, 4, 3, 3), stride=self.stride)
        return functional.max_pool2d(x, self.size)[:, :, : self.size].mean((2, 3))


def compiled(composite=None, **settings):
    torch.manual_seed(0)
    return lrpfx.transform(Constants(**settings).eval(), composite or EpsilonPlus())


@pytest.mark.parametrize("same", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), lambda module: compiled()])
def test_what_computes_the_same(same):
    module = compiled()
    found = fingerprint_of_module(module)
    lrpfx.attribute(module, torch.rand(1, 1, 12, 12))
    assert fingerprint_of_module(module) == fingerprint_of_module(same(module)) == found


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 3.0},
        {"slope": 0.2},
        {"stride": 2},
        {"size": 3},
        {"plain": 2.0},
        {"buffer": 2.0},
        {"eps": 1e-3},
        {"composite": EpsilonGammaBox(low=0.0, high=1.0)},
        {"composite": NameMapComposite([(["*"], Epsilon(1e-5))])},
    ],
    ids=str,
)
def test_what_computes_something_else(settings):
    plain = NameMapComposite([(["*"], Epsilon(1e-6))]) if "NameMap" in str(settings) else None
    assert fingerprint_of_module(compiled(**settings)) != fingerprint_of_module(compiled(plain))


def test_changed_parameters():
    module = compiled()
    found = fingerprint_of_module(module)
    with torch.no_grad():
        module.get_parameter("first.bias")[0] += 1
    assert fingerprint_of_module(module) != found
