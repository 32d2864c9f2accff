"""Scans over time equal their definitions, also inside of graphs."""

import itertools

import pytest
import torch
from helpers import same_in_a_graph

from lrpfx.operators.scans import channel_delta_rule, gated_delta_rule, linear_recurrence, selective_scan, weighted_key_value


@pytest.mark.parametrize("length", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_linear_recurrence(length, dim):
    shape = [3, 2, 2]
    shape[dim] = length
    x, factors = torch.randn(shape), torch.rand(shape) * 2 - 1
    factors.select(dim, length // 2).zero_()  # a reset forgets all that was before
    found, traced = same_in_a_graph(lambda x, factors: linear_recurrence(x, factors, dim), x, factors)
    state = torch.zeros_like(x.select(dim, 0))
    for t in range(length):
        state = factors.select(dim, t) * state + x.select(dim, t)
        torch.testing.assert_close(found.select(dim, t), state)
    assert len(traced.graph.nodes) < 200


def test_a_selective_scan():
    x, step, decay = torch.randn(2, 3, 6), torch.rand(2, 3, 6), -torch.rand(3, 4)
    into, out = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    found, _ = same_in_a_graph(selective_scan, x, step, decay, into, out)
    for batch in range(2):
        for channel in range(3):
            state = torch.zeros(4)
            for t in range(6):
                dt = step[batch, channel, t]
                state = (dt * decay[channel]).exp() * state + dt * into[batch, :, t] * x[batch, channel, t]
                torch.testing.assert_close(found[batch, channel, t], (out[batch, :, t] * state).sum())


@pytest.mark.parametrize("scale", [1.0, 300.0])  # exponents beyond those of the dtype
def test_weighted_key_values(scale):
    x, key, decay, first = torch.randn(2, 6, 3), scale * torch.randn(2, 6, 3), -torch.rand(3), torch.randn(3)
    found, _ = same_in_a_graph(weighted_key_value, x, key, decay, first)
    for t in range(6):
        ages = torch.arange(t - 1, -1, -1)[:, None]
        exponents = torch.cat([key[:, :t] + decay * ages, key[:, t : t + 1] + first], 1)
        torch.testing.assert_close(found[:, t], (exponents.softmax(1) * x[:, : t + 1]).sum(1))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_gated_delta_rule(length):
    x, query, key = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 5), torch.randn(2, 3, length, 5)
    decay, beta = -5 * torch.rand(2, 3, length), torch.rand(2, 3, length)
    found, traced = same_in_a_graph(gated_delta_rule, x, query, key, decay, beta)
    for batch, head in itertools.product(range(2), range(3)):
        memory = torch.zeros(5, 4)
        for t in range(length):
            one, rate = key[batch, head, t], beta[batch, head, t]
            memory = decay[batch, head, t].exp() * (memory - rate * torch.outer(one, one @ memory))
            memory = memory + rate * torch.outer(one, x[batch, head, t])
            torch.testing.assert_close(found[batch, head, t], query[batch, head, t] @ memory)
    assert len(traced.graph.nodes) < 200


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_delta_rule_of_channels(length):
    x, query, key = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 5), torch.randn(2, 3, length, 5)
    decay, beta = -5 * torch.rand(2, 3, length, 5), torch.rand(2, 3, length)
    found, _ = same_in_a_graph(channel_delta_rule, x, query, key, decay, beta)
    for batch, head in itertools.product(range(2), range(3)):
        memory = torch.zeros(5, 4)
        for t in range(length):
            one, rate = key[batch, head, t], beta[batch, head, t]
            memory = decay[batch, head, t].exp()[:, None] * memory
            memory = memory + rate * torch.outer(one, x[batch, head, t] - one @ memory)
            torch.testing.assert_close(found[batch, head, t], query[batch, head, t] @ memory)
