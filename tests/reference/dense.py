"""The rules as matrix formulas on the dense matrix of a linear layer, one sample at a time, as the papers write them."""

import copy

import torch


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
