"""Random networks and composites, of which `make fuzz` examines any number; and the fuzzer itself, which must find defects."""

import itertools
from dataclasses import replace

import pytest
import torch
from fuzzing import checks
from fuzzing.checks import CHECKS, Case, FailedError, examined, report, shrunk
from fuzzing.composites import random_composite
from fuzzing.features import FEATURES, PENDING, generate
from fuzzing.network import CONSTANT, Input, Network, Step, Value

NETWORKS, ALWAYS, CHUNK = 200, 30, 10


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= ALWAYS)) for first in range(0, NETWORKS, CHUNK)]
)
@pytest.mark.thorough
def test_random_networks(first):
    for seed in range(first, first + CHUNK):
        network, composite = generate(seed), random_composite(seed)
        failure = examined(network, composite, shares=0.4)
        if failure is not None:
            pytest.fail(report(*shrunk(network, composite, failure)), pytrace=False)


def test_every_feature_is_drawn():
    """Those that are pending, too, build networks with the shapes that are tracked."""
    drawn = set()
    for seed in range(700):
        network = generate(seed, tuple(PENDING))
        drawn |= set(network.features)
        last = network.steps[-1].makes
        result = network.build(returns=last.name)(*network.examples())
        assert tuple(result.shape[1:]) == last.shape
    assert drawn == {*FEATURES, "head"}


def test_a_seed_is_one_network():
    assert generate(3) == generate(3) != generate(4)
    model, other = generate(3).build(), generate(3).build()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def network_of(*steps):
    """A network of (line, kind) on x of shape (3, 4)."""
    x = Value("x", (4,))
    made, previous = [], "x"
    for number, (expression, kind) in enumerate(steps):
        value = Value(f"v{number}", (4,), kind)
        made.append(Step("written", (f"{value.name} = {expression.format(previous)}",), ("x", previous), value, (), previous))
        previous = value.name
    return Network(0, (Input(x, "torch.randn(3, 4)"),), tuple(made), previous)


WRONG = {
    "samples_are_independent": ["{0} + {0}.flip(0)"],
    "constants_take_nothing": [("torch.sigmoid({0})", CONSTANT), "x + {0}"],
    "front_ends_agree": ["1 + F.relu({0}) if not torch.compiler.is_exporting() else torch.log1p(F.relu({0})).exp()"],
    "transform": ["torch.special.bessel_j0({0})"],
}


@pytest.mark.parametrize("check", WRONG)
@pytest.mark.thorough
def test_what_is_wrong_is_found_and_shrunk(check):
    wrong = [step if isinstance(step, tuple) else (step, "signal") for step in WRONG[check]]
    network = network_of(("torch.tanh({0})", "signal"), *wrong, ("2 * {0}", "signal"), ("{0} - 0.5 * x", "signal"))
    failure = examined(network, "EpsilonPlus()", shares=10.0)
    assert failure is not None and failure.check == check
    small, composite, found = shrunk(network, "EpsilonPlus()", failure)
    assert len(small.steps) == len(wrong)
    text = report(small, composite, found)
    assert small.source() in text and "composite = EpsilonPlus()" in text


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not checks.code_of_inductor_agrees])
def test_no_check_is_idle(check, monkeypatch):
    """Relevance that is another each time passes none of them."""
    with checks._in_double_precision():
        network = network_of(("torch.floor(x)", CONSTANT), ("torch.relu(x + 0.1 * {0})", "signal"))
        network = replace(
            network, steps=(Step("floor", ("v0 = (x > 0).double()",), ("x",), Value("v0", (4,), CONSTANT)), network.steps[1])
        )
        case = Case(network, "EpsilonPlus()")
        check(case)
        numbers = itertools.count(1)
        relevance, output = Case.relevance, Case.selected
        monkeypatch.setattr(
            Case, "relevance", lambda *args, **options: relevance(*args, **options) * (1 + 1e-6 * next(numbers))
        )
        monkeypatch.setattr(Case, "change_by_rounding", lambda self: 0.0)
        monkeypatch.setattr(Case, "selected", lambda *args: output(*args) * (1 + 1e-6 * next(numbers)))
        with pytest.raises(FailedError):
            check(case)


def test_what_rounding_decides_is_no_failure():
    """1 / x near zero amplifies the last digits; a difference beyond that fails."""
    with checks._in_double_precision():
        case = Case(network_of(("torch.relu({0})", "signal")), "EpsilonPlus()")
        expected = case.relevance(case.explain_model)
        with pytest.raises(FailedError):
            case.must_agree(expected * (1 + 1e-6), expected, "another one")
        case.change_by_rounding = lambda: 1e-6
        case.must_agree(expected * (1 + 1e-6), expected, "another one")
        assert case.undetermined == ["another one"]
