"""Rescale: multipliers against the formulas of the paper, written out unit by unit."""

import math

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import DeepLIFT


def by_hand(model, x, reference, target):
    """The multipliers of what each layer reads, of one sample without its batch dimension, from the last layer backward.

    Of a function of single numbers Δy / Δx (Shrikumar et al. 2017, section 3.5.1), of a matrix its entries. Maxima go from y⁰
    to max(y, y⁰) by the entry that is the largest for x, and from there to y by that for r. A softmax is exp(z - L): the slope
    s of the exponential is Δp / Δ log p, and L changes by the mean of Δz with the weights s.
    """
    steps, value, other = [], x, reference
    for layer in model:
        steps.append((layer, value, other))
        value, other = (layer(one[None])[0].detach() for one in (value, other))
    m = torch.zeros_like(value)
    m[target] = 1.0
    found = []
    for layer, h, h0 in reversed(steps):
        if isinstance(layer, (nn.ReLU, nn.Tanh, nn.GELU)):
            m = m * (layer(h) - layer(h0)) / (h - h0)
        elif isinstance(layer, nn.MaxPool2d):
            m = of_maxima(h, h0, m)
        elif isinstance(layer, nn.Softmax):
            m = of_softmax(h.tolist(), h0.tolist(), m.tolist())
        else:
            jacobian = torch.autograd.functional.jacobian(lambda one, layer=layer: layer(one[None])[0], torch.zeros_like(h))
            m = (m.flatten() @ jacobian.reshape(m.numel(), -1)).reshape(h.shape)
        found.append(m)
    return found[::-1]


def of_maxima(h, h0, m):
    """Windows of two by two that do not overlap."""
    found = torch.zeros_like(h)
    for channel, row, column in torch.cartesian_prod(*map(torch.arange, m.shape)).tolist():
        window = [(channel, 2 * row + i, 2 * column + j) for i in (0, 1) for j in (0, 1)]
        ours, theirs = max(window, key=lambda at: float(h[at])), max(window, key=lambda at: float(h0[at]))
        y, y0 = float(h[ours]), float(h0[theirs])
        between, weight = max(y, y0), float(m[channel, row, column])
        found[ours] += weight * (between - y0) / float(h[ours] - h0[ours])
        found[theirs] += weight * (y - between) / float(h[theirs] - h0[theirs])
    return found


def of_softmax(z, z0, m):
    def probabilities(scores):
        total = sum(map(math.exp, scores))
        return [math.exp(one) / total for one in scores]

    slopes = [(p - p0) / math.log(p / p0) for p, p0 in zip(probabilities(z), probabilities(z0), strict=True)]
    mean = sum(one * weight for one, weight in zip(slopes, m, strict=True)) / sum(slopes)
    return torch.tensor([one * (weight - mean) for one, weight in zip(slopes, m, strict=True)], dtype=torch.float64)


NETWORKS = {
    "dense": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, stride=2), nn.GELU()),
            *(nn.Flatten(), nn.Linear(8, 3)),
        ),
        (2, 5, 5),
    ),
    "maxima": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(8, 3)),
        ),
        (2, 8, 8),
    ),
    "a softmax": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), (5,)),
}


@pytest.mark.parametrize("front_end", ["symbolic", "export"])
@pytest.mark.parametrize("name", NETWORKS)
def test_multipliers_are_those_of_the_paper(name, front_end):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().double().eval()
    x, reference = torch.randn(2, 3, *shape, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x, capture=front_end)
    layers = [str(number) for number in range(len(model) - 1)]
    found = lrpfx.attribute(explain_model, x, 1, reference=reference, record_multipliers=layers)
    for sample in range(3):
        expected = by_hand(model, x[sample], reference[sample], 1)
        of_input = expected[0] * (x[sample] - reference[sample])
        torch.testing.assert_close(found.relevance[sample], of_input, rtol=1e-10, atol=1e-12)
        for layer, multiplier in zip(layers, expected[1:], strict=True):
            torch.testing.assert_close(found.multipliers[layer][sample], multiplier, rtol=1e-10, atol=1e-12)
