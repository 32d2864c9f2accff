"""Properties of random networks: same output, conserved relevance, a balanced ledger, independent samples, equal front ends."""

import pytest
import torch
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, LayerMapComposite
from lrpfx.rules import Epsilon, Norm, Pass
from lrpfx.types import Activation, Linear, Sum

WIDTH = 4


def for_examples(check, always, **drawn):
    """A test of so many examples, and of more, which is slow; the examples are the same each time."""

    @pytest.mark.parametrize("examples", [always, pytest.param(3 * always, marks=pytest.mark.slow)])
    def test(examples):
        settings(max_examples=examples, deadline=None, derandomize=True)(given(**drawn)(check))()

    return test


class RandomNet(nn.Module):
    """A network without biases that follows a list of (operation, operand, operand); operands are earlier values."""

    def __init__(self, plan, bias=False):
        super().__init__()
        self.plan = plan
        self.shared = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in plan)
        self.relu = nn.ReLU()
        self.norm = nn.LayerNorm(WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        values = [x]
        for (operation, first, second), linear in zip(self.plan, self.linears, strict=True):
            a, b = values[first % len(values)], values[second % len(values)]
            if operation == "linear":
                value = linear(a)
            elif operation == "shared":
                value = self.shared(a)
            elif operation == "relu":
                value = self.relu(a)
            elif operation == "relu_":
                value = linear(a).relu_()
            elif operation == "sum":
                value = a + b
            elif operation == "iadd":
                value = linear(a)
                value += b
            elif operation == "view":
                value = linear(a.reshape(-1, 2, WIDTH // 2).flatten(1))
            elif operation == "product":
                value = a * b
            elif operation == "gate":
                value = linear(a) * torch.sigmoid(b)
            elif operation == "softmax":
                value = torch.softmax(a, -1)
            elif operation == "norm":
                value = self.norm(a)
            elif operation == "attention":
                value = (torch.softmax(a[:, :, None] @ b[:, None, :], -1) @ linear(b)[:, :, None]).squeeze(-1)
            elif operation == "offset":
                value = a + self.offset - 0.5
            elif operation == "pad":
                value = nn.functional.pad(a[:, 1:], (0, 1), value=0.3)
            else:
                value = self.narrow(torch.cat([a, b], dim=1))
            values.append(value)
        return values[-1]


operations = st.sampled_from(["linear", "shared", "relu", "relu_", "sum", "iadd", "view", "cat"])
plans = st.lists(st.tuples(operations, st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=10)


def composite():
    made = LayerMapComposite([(Linear, Epsilon(1e-12)), (Activation, Pass()), (Sum, Norm(1e-12))])
    made._defaults = len(made.layer_map)  # a random network need not have all kinds
    return made


def relevance_is_conserved(plan, seed):
    torch.manual_seed(seed)
    model, x = RandomNet(plan).eval(), torch.randn(3, WIDTH)
    explain_model = lrpfx.transform(model, composite(), example_inputs=x)
    attribution = lrpfx.attribute(explain_model, x, lambda output: output)
    assert torch.equal(attribution.output, model(x))
    magnitude = sum(
        relevance.abs().sum()
        for relevance in lrpfx.attribute(
            explain_model, x, lambda output: output, record=lrpfx.node_names(explain_model)
        ).layers.values()
    )
    difference = (attribution.relevance.sum(1) - attribution.output.sum(1)).abs().max()
    assert difference <= 1e-7 * (magnitude + 1e-9)
    if attribution.relevance.abs().max() > 1e-6 * magnitude:
        alone = torch.cat([lrpfx.attribute(explain_model, sample[None], lambda output: output).relevance for sample in x])
        assert_close(alone, attribution.relevance, 1e-9)


test_random_networks = for_examples(relevance_is_conserved, 25, plan=plans, seed=st.integers(0, 10**6))


more = st.sampled_from(
    [
        *("linear", "shared", "relu", "relu_", "sum", "iadd", "view", "cat"),
        *("product", "gate", "softmax", "norm", "attention", "offset", "pad"),
    ]
)
larger_plans = st.lists(st.tuples(more, st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=8)


def front_ends_agree_and_relevance_is_accounted_for(plan, seed):
    """With biases, constants, products and attention: both front ends agree, and every unit of relevance is accounted for."""
    torch.manual_seed(seed)
    model, x, relevance_of_output = RandomNet(plan, bias=True).eval(), torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    results = []
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(model, EpsilonPlus(epsilon=1e-2, stabilizer=1e-2), example_inputs=x, capture=capture)
        assert torch.allclose(explain_model(x), model(x), rtol=1e-12, atol=1e-12)
        accounts = lrpfx.ledger(explain_model, x, relevance_of_output)
        magnitude = max(accounts.seed_magnitude, *(abs(entry.relevance_in) for entry in accounts), 1.0)
        assert accounts.unexplained * accounts.seed_magnitude <= 1e-9 * magnitude
        assert abs(accounts.balance) <= 1e-9 * magnitude
        relevance = lrpfx.attribute(explain_model, x, relevance_of_output).relevance
        assert abs(sum(accounts.inputs.values()) - relevance.sum()) <= 1e-9 * magnitude
        results.append(relevance)
    assert (results[0] - results[1]).abs().max() <= 1e-9 * max(1.0, float(results[0].abs().max()))


test_random_networks_with_all_kinds = for_examples(
    front_ends_agree_and_relevance_is_accounted_for, 10, plan=larger_plans, seed=st.integers(0, 10**6)
)
