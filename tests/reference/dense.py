"""The rules as matrix formulas on the dense matrix of a linear layer, one sample at a time, as the papers write them."""

import copy

import torch
from torch import nn

#: name -> (a linear layer with or without a bias, the shape of its input without the batch)
LAYERS = {
    "linear": (lambda bias: nn.Linear(6, 4, bias=bias), (6,)),
    "conv1d": (lambda bias: nn.Conv1d(2, 3, 3, bias=bias), (2, 7)),
    "conv1d-all": (lambda bias: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2, bias=bias), (4, 7)),
    "conv2d": (lambda bias: nn.Conv2d(2, 3, (2, 3), bias=bias), (2, 4, 5)),
    "conv2d-all": (
        lambda bias: nn.Conv2d(4, 2, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=bias),
        (4, 5, 5),
    ),
    "conv2d-same": (lambda bias: nn.Conv2d(2, 2, (2, 3), padding="same", bias=bias), (2, 4, 4)),
    "conv2d-valid": (lambda bias: nn.Conv2d(2, 2, 2, padding="valid", bias=bias), (2, 4, 4)),
    "conv2d-depthwise": (lambda bias: nn.Conv2d(3, 6, 3, padding=1, groups=3, bias=bias), (3, 4, 4)),
    "conv3d": (lambda bias: nn.Conv3d(2, 2, 2, bias=bias), (2, 3, 3, 3)),
    "conv3d-all": (lambda bias: nn.Conv3d(2, 4, 2, stride=2, padding=1, dilation=(1, 2, 1), groups=2, bias=bias), (2, 3, 4, 3)),
    "conv_transpose1d": (lambda bias: nn.ConvTranspose1d(3, 2, 3, bias=bias), (3, 5)),
    "conv_transpose1d-all": (
        lambda bias: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2, bias=bias),
        (4, 5),
    ),
    "conv_transpose2d": (lambda bias: nn.ConvTranspose2d(3, 2, 2, bias=bias), (3, 3, 3)),
    "conv_transpose2d-all": (
        lambda bias: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2, bias=bias),
        (4, 3, 3),
    ),
    "conv_transpose3d": (lambda bias: nn.ConvTranspose3d(2, 2, 2, bias=bias), (2, 2, 2, 2)),
    "conv_transpose3d-all": (
        lambda bias: nn.ConvTranspose3d(2, 4, 2, stride=2, padding=1, output_padding=1, dilation=2, groups=2, bias=bias),
        (2, 3, 2, 2),
    ),
}


def dense_form(layer, shape):
    """Matrix and bias with layer(x) = matrix x + bias, for inputs of `shape` (without the batch)."""
    count = torch.Size(shape).numel()
    with torch.no_grad():
        bias = layer(torch.zeros(1, *shape)).flatten()
        columns = [layer(unit.reshape(1, *shape)).flatten() - bias for unit in torch.eye(count)]
    return torch.stack(columns, dim=1), bias


def connections(layer, shape):
    """1 where an output sees an input, as the layer with all weights 1 and no bias does."""
    ones = copy.deepcopy(layer)
    with torch.no_grad():
        for name, parameter in ones.named_parameters():
            parameter.fill_(0.0 if name == "bias" else 1.0)
    return dense_form(ones, shape)[0]


def stabilized(z, epsilon=1e-6):
    return z + epsilon * torch.where(z >= 0, 1.0, -1.0)


def positive(a):
    return a.clamp(min=0)


def negative(a):
    return a.clamp(max=0)


def epsilon(x, W, b, R, _, epsilon=1e-6):
    return x * (W.T @ (R / stabilized(W @ x + b, epsilon)))


def zplus(x, W, b, R, _):
    s = R / stabilized(positive(W) @ positive(x) + negative(W) @ negative(x) + positive(b))
    return positive(x) * (positive(W).T @ s) + negative(x) * (negative(W).T @ s)


def alpha_beta(x, W, b, R, _, alpha=2.0, beta=1.0):
    Wp, Wn, xp, xn = positive(W), negative(W), positive(x), negative(x)
    sp = R / stabilized(Wp @ xp + Wn @ xn + positive(b))
    sn = R / stabilized(Wn @ xp + Wp @ xn + negative(b))
    return alpha * (xp * (Wp.T @ sp) + xn * (Wn.T @ sp)) - beta * (xp * (Wn.T @ sn) + xn * (Wp.T @ sn))


def gamma(x, W, b, R, _, gamma=0.25):
    P, N, p, n = W + gamma * positive(W), W + gamma * negative(W), b + gamma * positive(b), b + gamma * negative(b)
    xp, xn, z = positive(x), negative(x), W @ x + b
    sp = (z > 0) * R / stabilized(P @ xp + N @ xn + p)
    sn = (z < 0) * R / stabilized(N @ xp + P @ xn + n)
    return xp * (P.T @ sp + N.T @ sn) + xn * (N.T @ sp + P.T @ sn)


def zbox(x, W, b, R, _, low=-3.0, high=4.0):
    low, high = torch.full_like(x, low), torch.full_like(x, high)
    s = R / stabilized(W @ x - positive(W) @ low - negative(W) @ high)
    return x * (W.T @ s) - low * (positive(W).T @ s) - high * (negative(W).T @ s)


def wsquare(x, W, b, R, _):
    return W.square().T @ (R / stabilized(W.square().sum(1) + b.square()))


def flat(x, W, b, R, seen):
    return seen.T @ (R / stabilized(seen.sum(1)))


def without_bias(rule):
    """The rule with the bias left out of it."""
    return lambda x, W, b, R, seen: rule(x, W, torch.zeros_like(b), R, seen)


def relevance(rule, layer, input, output_relevance):
    """Relevance of a batch of inputs by the matrix formula `rule`."""
    shape = input.shape[1:]
    W, b = dense_form(layer, shape)
    seen = connections(layer, shape)
    rows = [rule(x.flatten(), W, b, R.flatten(), seen).reshape(shape) for x, R in zip(input, output_relevance, strict=True)]
    return torch.stack(rows)
