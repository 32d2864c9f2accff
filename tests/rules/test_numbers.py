"""Numbers that are no setting of a rule are refused where the rule is made; those of NumPy and all finite ones are accepted."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import CPLRP, AttnLRP, BetaSmooth, EpsilonGammaBox, EpsilonPlus

STABILIZED = [
    *(rules.Epsilon, rules.Norm, rules.ZPlus, rules.UniformEpsilon, rules.ValueOnly, rules.NormalizationEpsilon),
    rules.ProductTaylor,
    *(rules.WSquare, rules.Flat, rules.SignalTakesAll),
]
MADE = {
    "gamma": [
        rules.Gamma,
        lambda value: AttnLRP(gamma=value),
        lambda value: CPLRP(gamma=value),
        lambda value: EpsilonGammaBox(0.0, 1.0, gamma=value),
    ],
    "epsilon": [*STABILIZED, lambda value: AttnLRP(epsilon=value), lambda value: EpsilonPlus(stabilizer=value)],
    "alpha": [lambda value: rules.AlphaBeta(value, 1.0)],
    "beta": [lambda value: rules.AlphaBeta(1.0, value)],
    "beta_smooth": [rules.ReLUBetaSmooth, BetaSmooth],
}
CASES = [(name, make) for name, makes in MADE.items() for make in makes]


@pytest.mark.parametrize(("name", "make"), CASES)
@pytest.mark.parametrize("value", [-0.1, -1, math.nan, math.inf, -math.inf, np.float64(-0.1), np.float32("nan")])
def test_numbers_that_make_no_rule(name, make, value):
    with pytest.raises(lrpfx.InputError, match=rf"{name}.* must be a finite number >= 0, not"):
        make(value)


@pytest.mark.parametrize(("name", "make"), CASES)
@pytest.mark.parametrize("value", [True, "a", [0.1], 1j])
def test_values_that_are_no_numbers(name, make, value):
    with pytest.raises(lrpfx.InputTypeError, match="number"):
        make(value)


@pytest.mark.parametrize("value", [0, 0.0, np.float32(0), np.float64(0), np.int64(0)])
def test_zero_and_numbers_of_numpy(value):
    for name, make in CASES:
        if name != "alpha":  # alpha - beta is 1
            make(value)
    assert repr(rules.Gamma(value)) == repr(rules.Gamma(0.0)) and repr(rules.Epsilon(value)) == repr(rules.Epsilon(0.0))


@pytest.mark.parametrize("bound", [math.nan, math.inf, torch.tensor([0.0, math.nan])])
def test_bounds_that_are_not_finite(bound):
    for low, high in ((bound, 1.0), (0.0, bound)):
        with pytest.raises(lrpfx.InputError, match="finite"):
            rules.ZBox(low, high)
    with pytest.raises(lrpfx.InputError, match="low must be at most high"):
        rules.ZBox(np.float32(1), 0)


def test_a_gamma_of_zero_is_epsilon():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)

    def relevance(rule):
        return lrpfx.attribute(lrpfx.transform(model, EpsilonPlus(layer_map=[(nn.Linear, rule)])), x, 1).relevance

    assert torch.allclose(relevance(rules.Gamma(0.0)), relevance(rules.Epsilon(1e-6)), atol=1e-12)
