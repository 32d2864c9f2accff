"""Signs of values: never claimed wrongly, and rules that rely on them give the same relevance."""

import pytest
import torch
from helpers import Binary, Unary, small_net
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

import lrpfx
from lrpfx import passes
from lrpfx.composites import EpsilonPlus
from lrpfx.ir.node import floating_tensors, node_info
from lrpfx.ir.operator import Sign
from lrpfx.pipeline import normal_form

FUNCTIONS = [
    torch.relu, torch.sigmoid, torch.tanh, F.silu, F.gelu, F.mish, F.hardswish, F.elu, F.selu, F.celu, F.softsign,
    F.softplus, F.logsigmoid, F.tanhshrink, F.softshrink, F.hardshrink, F.relu6, F.hardsigmoid, torch.exp, torch.square,
    torch.abs, torch.erf,
    torch.expm1, torch.neg, torch.sin, torch.cos, torch.atan, lambda x: F.leaky_relu(x, 0.1), lambda x: F.leaky_relu(x, -0.1),
    lambda x: F.elu(x, -1.0), lambda x: x.clamp(min=0.1), lambda x: x.clamp(max=-0.1), lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.clamp(0.2, 0.4), lambda x: F.hardtanh(x, 0.0, 1.0), lambda x: F.hardtanh(x), lambda x: F.threshold(x, 0.1, 0.0),
    lambda x: F.threshold(x, -0.5, 0.1), lambda x: x**2, lambda x: x**3, lambda x: x * x, lambda x: x * 2.0, lambda x: x * -2.0,
    lambda x: -3.0 * x, lambda x: x + 1.0, lambda x: x - 1.0, lambda x: 1.0 - x, lambda x: torch.add(x, 1.0, alpha=-1),
    lambda x: x + x.flip(0), lambda x: x - x.flip(0), lambda x: torch.sub(x, x.flip(0), alpha=-2), lambda x: x / 2.0,
    lambda x: x / -2.0, lambda x: 1.0 / (x.square() + 1), lambda x: x.flip(0) / (x.abs() + 1), lambda x: F.softmax(x, -1),
    lambda x: F.log_softmax(x, -1), lambda x: x.mean(-1, keepdim=True), lambda x: x.sum(-1, keepdim=True),
    lambda x: F.pad(x, (1, 0)), lambda x: F.pad(x, (1, 0), value=-1.0), lambda x: F.pad(x, (1, 0), value=1.0),
    lambda x: torch.cat([x, x.abs()], -1), lambda x: torch.stack([x, -x]), lambda x: torch.where(x > 0, x, -x),
    lambda x: torch.where(x > 0, x, 0.0), lambda x: torch.maximum(x, -x), lambda x: torch.minimum(x, -x), lambda x: x.amax(-1),
    lambda x: x.max(-1)[0], lambda x: x.masked_fill(x > 0, -1.0), lambda x: x.masked_fill(x > 0, 0.0), lambda x: x @ x.T,
    lambda x: F.layer_norm(x, (4,)), lambda x: F.normalize(x), lambda x: x.chunk(2, -1)[1], lambda x: x.norm(dim=-1),
    lambda x: x.tril(), lambda x: x.cumsum(0), lambda x: x.roll(1), lambda x: F.avg_pool1d(x[None], 2),
    lambda x: x[:, 1:] * x[:, :1],
    lambda x: F.max_pool1d(x[None], 2, padding=1), lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
    lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"), lambda x: x * torch.sigmoid(x.flip(0)),
]  # fmt: skip


def claims_hold(model, x, ranges):
    """Run the normalized graph and hold every value against what is claimed of it; how many claims there are."""
    program, _ = normal_form(model)
    passes.run_pass(program, passes.AnalyzeSigns(ranges))
    count = 0

    class Checking(fx.Interpreter):
        def run_node(self, n):
            nonlocal count
            value = super().run_node(n)
            if n.op == "output":
                return value
            sign = node_info(n).sign
            for tensor in floating_tensors(value):
                if sign is Sign.NONNEGATIVE:
                    assert (tensor >= 0).all(), n
                if sign is Sign.NONPOSITIVE:
                    assert (tensor <= 0).all(), n
                count += sign is not Sign.UNKNOWN
            return value

    Checking(program.root, graph=program.graph).run(x)
    return count


@pytest.mark.parametrize("low, high", [(-2.0, 2.0), (0.0, 2.0), (-2.0, 0.0)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_claim_is_wrong(function, low, high):
    x = torch.rand(4, 4) * (high - low) + low
    x[0, 0] = 0.0
    claims_hold(Unary(function), x, {None: (low, high)})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    chain=st.lists(st.integers(0, len(FUNCTIONS) - 1), min_size=2, max_size=5),
    seed=st.integers(0, 10**6),
    side=st.integers(0, 2),
)
def test_no_claim_about_chains_is_wrong(chain, seed, side):
    torch.manual_seed(seed)
    low, high = [(-2.0, 2.0), (0.0, 2.0), (-2.0, 0.0)][side]
    x = torch.rand(4, 4) * (high - low) + low

    def run(value):
        for index in chain:
            value = FUNCTIONS[index](value)
        return value

    try:
        result = run(x)
    except Exception:  # shapes that do not fit one after the other
        return
    if torch.isfinite(result).all():
        claims_hold(Unary(run), x, {None: (low, high)})


def test_claims_are_made():
    """The analysis must find something, or it would be right for nothing."""
    known = [(torch.relu, 1), (lambda x: torch.relu(x) + torch.sigmoid(x), 3), (lambda x: F.max_pool1d(x.relu()[None], 2), 3)]
    for function, count in known:
        assert claims_hold(Unary(function), torch.randn(4, 4), {}) == count
    assert claims_hold(small_net(), torch.rand(2, 3, 8, 8), {"x": (0.0, 1.0)}) == 3


def test_the_facts_are_shown():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus(), input_range={"x": (-1.0, 0.0)})
    table = {row.name: row.sign for row in lrpfx.assignment(explain_model)}
    assert table["x"] == "≤ 0" and table["relu"] == "≥ 0" and table["conv1"] == ""
    assert "≥ 0" in str(lrpfx.assignment(explain_model)) and "≥ 0" in lrpfx.draw(explain_model).source
    stage = next(stage for stage in lrpfx.history(explain_model) if stage.name == "analyze_signs")
    assert stage.stage == "analyze" and ("relu", "≥ 0") in stage.details


def test_inputs_outside_their_range_are_an_error():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus(), input_range=(0.0, 1.0))
    lrpfx.attribute(explain_model, torch.rand(2, 3, 8, 8))
    for call in (lrpfx.attribute, lrpfx.ledger):
        with pytest.raises(lrpfx.InputError, match=r"go from -0\.\d+ to .*, but input_range=\(0.0, 1.0\) was given"):
            call(explain_model, torch.rand(2, 3, 8, 8) - torch.eye(8))


@pytest.mark.parametrize(
    "input_range, message",
    [
        ((1.0, 0.0), "pair of numbers"),
        (3.0, "pair of numbers"),
        ({"y": (0.0, 1.0)}, "the inputs are a, b"),
        ("01", "pair of numbers"),
    ],
)
def test_ranges_that_are_none(input_range, message):
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.transform(Binary(torch.add), EpsilonPlus(), input_range=input_range)
