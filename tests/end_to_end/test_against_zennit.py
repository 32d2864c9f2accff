"""zennit 0.5.1 as an oracle, for all composites, on networks where it is right.

Zennit merges batch norm inexactly and, where a module is called twice, uses the input of the last call. It therefore gets the
network merged by torch.nn.utils.fusion, and a module of its own for every ReLU call.
"""

import copy

import pytest
import torch
import zennit.composites
import zennit.torchvision
from helpers import relative_difference, torchvision_model
from reference.for_zennit import for_zennit
from torch import nn
from zennit.attribution import Gradient

import lrpfx
import lrpfx.torchvision
from lrpfx.composites import COMPOSITES

OUR_CANONIZERS = {"resnet18": lrpfx.torchvision.ResNetCanonizer, "vgg11_bn": lrpfx.torchvision.VGGCanonizer}
CANONIZERS = {"resnet18": zennit.torchvision.ResNetCanonizer, "vgg11_bn": zennit.torchvision.VGGCanonizer}


NETWORKS = ["vgg11", "alexnet", "resnet18", "vgg11_bn"]
SHARED = sorted(set(COMPOSITES) & set(zennit.composites.COMPOSITES))
#: Each composite on a network without batch norm and on one with it, in turn; the rest are slow tests.
ALWAYS = {(NETWORKS[place], key) for number, key in enumerate(SHARED) for place in (number % 2, 2 + number // 2 % 2)}
CASES = [
    pytest.param(name, key, marks=[] if (name, key) in ALWAYS else [pytest.mark.slow]) for name in NETWORKS for key in SHARED
]


@pytest.fixture(scope="module")
def network(request):
    torch.set_default_dtype(torch.float64)
    model = torchvision_model(request.param)
    return request.param, model, for_zennit(model), torch.randn(2, 3, *([64, 64] if request.param == "alexnet" else [32, 32]))


@pytest.mark.parametrize("network, key", CASES, indirect=["network"])
@pytest.mark.sampled(4)
def test_input_relevance_equals_zennit(network, key):
    name, model, merged, input = network
    low, high = torch.full((1, 3, 1, 1), input.min()), torch.full((1, 3, 1, 1), input.max())
    bounds = (low, high) if key == "epsilon_gamma_box" else ()
    target = torch.tensor([3, 7])
    attribution = lrpfx.attribute(lrpfx.transform(model, COMPOSITES[key](*bounds)), input, target)
    canonizers = [CANONIZERS[name]()] if name in CANONIZERS else None
    oracle = copy.deepcopy(merged)
    with Gradient(oracle, zennit.composites.COMPOSITES[key](*bounds, canonizers=canonizers)) as attributor:
        seed = attribution.output * torch.eye(attribution.output.shape[1])[target]
        output, expected = attributor(input.clone().requires_grad_(), seed)
    assert relative_difference(attribution.output, output.detach()) <= 1e-12
    assert relative_difference(attribution.relevance, expected) <= 1e-8
    ours = [OUR_CANONIZERS[name]()] if name in OUR_CANONIZERS else None
    with COMPOSITES[key](*bounds, canonizers=ours).context(model):
        leaf = input.clone().requires_grad_()
        (in_module_mode,) = torch.autograd.grad(model(leaf), leaf, seed)
    assert relative_difference(in_module_mode, expected) <= 1e-8


@pytest.mark.parametrize("zero_params", [None, "bias"])
def test_settings_reach_the_rules(zero_params):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)
    ).eval()
    input = torch.randn(2, 3, 8, 8)
    settings = {"epsilon": 0.3, "gamma": 0.7, "stabilizer": 0.01, "zero_params": zero_params}
    explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonGammaBox(-4.0, 4.0, **settings))
    bounds = torch.full_like(input, -4.0), torch.full_like(input, 4.0)
    with Gradient(model, zennit.composites.EpsilonGammaBox(*bounds, **settings)) as attributor:
        _, expected = attributor(input.clone().requires_grad_(), lambda output: output.detach())
    relevance = lrpfx.attribute(explain_model, input, lambda output: output).relevance
    assert relative_difference(relevance, expected) <= 1e-12
