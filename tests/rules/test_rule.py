"""The base class of rules."""

import inspect

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import EpsilonPlus
from lrpfx.rules.rule import _FACTS, Rule

BUILT_IN = [rule for _, rule in inspect.getmembers(rules, inspect.isclass) if issubclass(rule, Rule)]


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.__name__)
def test_a_subclass_states_its_own_facts(rule):
    derived = type("Derived", (rule,), {})
    assert all(getattr(derived, fact) == getattr(Rule, fact) for fact in _FACTS)
    assert derived.shortcut is Rule.shortcut


def all_derived(rule):
    return {one for derived in rule.__subclasses__() for one in (derived, *all_derived(derived))}


@pytest.mark.parametrize("fact", _FACTS)
def test_some_rule_states_each_fact(fact):
    assert any(getattr(rule, fact) != getattr(Rule, fact) for rule in all_derived(Rule))


class Stopping(rules.Pass):
    """Its code stops the relevance of the first feature, which a `Pass` would pass on."""

    def backward(self, module, grad_input, grad_output):
        stopped = grad_output[0].clone()
        stopped[:, 0] = 1.0
        return stopped


class Reversed(rules.Pass):
    def propagate(self, call, relevance):
        return (relevance.flip(1) * call.inputs[0],)


class Ones:
    def propagate(self, call, relevance):
        return (torch.ones_like(relevance),)


class MixedIn(Ones, rules.Pass):
    pass


@pytest.mark.parametrize("rule", [Stopping(), Reversed(), MixedIn()], ids=repr)
def test_relevance_of_derived_rules_needs_no_support(rule):
    """Relevance behind a ReLU with such a rule is not zero where the ReLU is: no rule before it may rely on that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).eval()
    composite = EpsilonPlus(layer_map=[(nn.Conv2d, rules.Gamma(0.5)), (nn.ReLU, rule)])
    x = torch.randn(2, 2, 5, 5)
    found, expected = (
        lrpfx.attribute(lrpfx.transform(model, composite, optimize=optimize), x, 1).relevance for optimize in (True, False)
    )
    assert_close(found, expected, 1e-12)
