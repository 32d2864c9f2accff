"""The ledger: exact for every built-in rule, and honest about the rest."""

import json

import pytest
import torch
from helpers import NETWORKS, Binary, Unary, assert_close, small_net, torchvision_model
from test_rules import LAYERS
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import (
    COMPOSITES,
    EpsilonGammaBox,
    EpsilonPlus,
    GuidedBackprop,
    LayerMapComposite,
)
from lrpfx.core import BasicHook, Hook
from lrpfx.types import Activation, Linear, Sum

RULES = {
    "epsilon": rules.Epsilon(0.1),
    "epsilon without bias": rules.Epsilon(0.1, zero_params="bias"),
    "norm": rules.Norm(0.1),
    "zplus": rules.ZPlus(0.1),
    "zplus without bias": rules.ZPlus(0.1, zero_params="bias"),
    "alphabeta": rules.AlphaBeta(2.0, 1.0, 0.1),
    "gamma": rules.Gamma(0.5, 0.1),
    "zbox": rules.ZBox(-3.0, 3.0, 0.1),
    "wsquare": rules.WSquare(0.1),
    "flat": rules.Flat(0.1),
    "template": BasicHook(stabilizer=0.1),
}


def balanced(accounts):
    return accounts.unexplained <= 1e-12 and abs(accounts.balance) <= 1e-12 * accounts.seed_magnitude


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("layer_name", LAYERS)
@pytest.mark.parametrize("rule_name", RULES)
def test_the_split_is_exact(rule_name, layer_name, signed):
    make, shape = LAYERS[layer_name]
    layer = make(True)
    x = torch.randn(2, *shape) if signed else torch.rand(2, *shape)
    rule = RULES[rule_name]
    composite = LayerMapComposite([((Linear, lrpfx.types.AvgPool, Sum, lrpfx.types.BatchNorm, Activation), rule)])
    model = nn.Sequential(layer).eval()
    seed = torch.randn_like(model(x))
    accounts = lrpfx.ledger(lrpfx.transform(model, composite, unassigned="gradient"), x, seed)
    (entry,) = accounts
    assert entry.rule not in ("gradient", "neutral")
    assert abs(entry.unexplained) <= 1e-10 * max(seed.abs().sum(), abs(entry.relevance_out))
    assert entry.stabilizer != 0 or rule_name == "norm"


def test_bias_by_hand():
    layer, x, seed = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    accounts = lrpfx.ledger(lrpfx.transform(nn.Sequential(layer).eval(), EpsilonPlus(epsilon=0.5)), x, seed)
    z = layer(x).detach()
    ratio = seed / (z + 0.5 * torch.where(z >= 0, 1.0, -1.0))
    (entry,) = accounts
    assert_close(torch.tensor(entry.bias), (ratio * layer.bias).sum().detach(), 1e-12)
    assert_close(torch.tensor(entry.stabilizer), (ratio * 0.5 * torch.where(z >= 0, 1.0, -1.0)).sum(), 1e-12)
    assert_close(torch.tensor(entry.relevance_in), seed.sum(), 1e-12)
    assert_close(torch.tensor(accounts.inputs["input"]), (x * (ratio @ layer.weight)).sum().detach(), 1e-12)


@pytest.mark.parametrize("composite_name", sorted(COMPOSITES))
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_networks_balance(name, composite_name):
    model, x = NETWORKS[name]()
    settings = {"low": -4.0, "high": 4.0} if composite_name == "epsilon_gamma_box" else {}
    composite = COMPOSITES[composite_name](**settings)
    explain_model = lrpfx.transform(model, composite)
    accounts = lrpfx.ledger(explain_model, x, 1)
    relevance = lrpfx.attribute(explain_model, x, 1).relevance
    assert_close(torch.tensor(sum(accounts.inputs.values())), relevance.sum(), 1e-9)
    if composite.unassigned == "gradient":  # a plain gradient is no relevance: its change is unexplained, and said to be
        explained = [entry for entry in accounts if entry.rule != "gradient"]
        limit = 1e-9 * max(abs(entry.relevance_in) for entry in accounts)
        assert explained and all(abs(entry.unexplained) <= limit for entry in explained)
    else:
        assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


@pytest.mark.parametrize("rule", [rules.ReLUDeconvNet(), rules.ReLUGuidedBackprop(), rules.ReLUBetaSmooth()])
def test_what_rules_of_activations_stop(rule):
    x, seed = torch.randn(4, 5), torch.randn(4, 5)
    accounts = lrpfx.ledger(lrpfx.transform(Unary(torch.relu), LayerMapComposite([(nn.ReLU, rule)])), x, seed)
    assert balanced(accounts) and accounts.total("stopped") != 0


@pytest.mark.parametrize(
    "function, constants",
    [
        (lambda x: F.pad(x, (1, 1), value=2.0), lambda seed: seed[:, 0] + seed[:, -1]),
        (lambda x: x.masked_fill(torch.tensor([True, False, False]), 1.0), lambda seed: seed[:, 0]),
        (lambda x: torch.cat([torch.ones(1, 1).expand(x.shape[0], 1), x], 1), lambda seed: seed[:, 0]),
        (lambda x: torch.where(x > 0, x, 1.0), None),
        (lambda x: torch.tril(x), None),
        (lambda x: x[:, 1:], lambda seed: torch.zeros(1)),
        (lambda x: x.repeat(1, 2), lambda seed: torch.zeros(1)),
        (lambda x: torch.roll(x, 1, 1), lambda seed: torch.zeros(1)),
        (lambda x: F.max_pool1d(x[:, None], 2, padding=1)[:, 0], lambda seed: torch.zeros(1)),
    ],
)
def test_constants_of_neutral_operations(function, constants):
    x = torch.randn(2, 3)
    explain_model = lrpfx.transform(Unary(function), EpsilonPlus(), example_inputs=x)
    seed = torch.randn_like(explain_model(x))
    accounts = lrpfx.ledger(explain_model, x, seed)
    assert balanced(accounts)
    if constants is not None:
        torch.testing.assert_close(accounts.total("constants"), float(constants(seed).sum()), rtol=1e-9, atol=1e-12)


def test_constants_of_sums():
    position = nn.Parameter(torch.randn(3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = position

        def forward(self, x):
            return x + self.position + 1.0

    x, seed = torch.randn(2, 3), torch.randn(2, 3)
    accounts = lrpfx.ledger(lrpfx.transform(Net().eval(), EpsilonPlus()), x, seed)
    assert accounts.unexplained <= 1e-9
    second = accounts.entry("add_1")
    assert_close(torch.tensor(second.constants), (seed / (x + position + 1.0)).sum().detach(), 1e-4)
    first = accounts.entry("add")
    assert first.constants != 0 and first.bias == 0


def test_shared_operands_and_reused_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return self.linear(y + y) * self.linear(x)

    x = torch.randn(3, 4)
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlus())
    accounts = lrpfx.ledger(explain_model, x, torch.cos)
    assert balanced(accounts)
    relevance = lrpfx.attribute(explain_model, x, torch.cos).relevance
    assert_close(torch.tensor(accounts.inputs["x"]), relevance.sum(), 1e-11)


class Half(Hook):
    def propagate(self, call, relevance):
        return (0.5 * relevance,)


class HonestHalf(Half):
    def absorbed(self, call, relevance):
        return {"stopped": 0.5 * relevance.sum()}


def test_rules_of_ones_own():
    x, seed = torch.randn(2, 3), torch.rand(2, 3)
    silent, honest = (
        lrpfx.ledger(lrpfx.transform(Unary(torch.relu), LayerMapComposite([(Activation, rule)])), x, seed)[0]
        for rule in (Half(), HonestHalf())
    )
    half = float(0.5 * seed.sum())
    assert abs(silent.unexplained - half) <= 1e-12 and silent.stopped == 0
    assert abs(honest.unexplained) <= 1e-12 and abs(honest.stopped - half) <= 1e-12


def test_defects_are_unexplained():
    """A rule that loses relevance, or passes it on twice, does not balance."""

    class Twice(rules.Epsilon):
        def propagate(self, call, relevance):
            return tuple(2 * value for value in super().propagate(call, relevance))

    model, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    accounts = lrpfx.ledger(lrpfx.transform(model, LayerMapComposite([(nn.Linear, Twice())])), x, torch.ones(2, 3))
    assert accounts.unexplained > 1e-3
    plain = lrpfx.ledger(
        lrpfx.transform(Binary(torch.add), LayerMapComposite([]), unassigned="gradient"), (x, x), torch.ones(2, 4)
    )
    assert abs(plain[0].unexplained + 8.0) <= 1e-12, "a sum without a rule doubles relevance"


def test_the_table():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    x = torch.randn(2, 3, 8, 8)
    accounts = lrpfx.ledger(explain_model, x, 1)
    assert [entry.name for entry in accounts] == lrpfx.node_names(explain_model)[1:]
    assert accounts.by_leak()[0].leak == max(entry.leak for entry in accounts)
    lines = str(accounts).splitlines()
    assert lines[0].split()[:3] == ["name", "kind", "rule"] and len(lines) == len(accounts) + 3
    assert lines[-1].startswith("seed ") and lines[-1].endswith("; nothing unexplained at any node")
    data = json.loads(json.dumps(accounts.to_dict()))
    assert data["entries"][0]["name"] == "conv1" and set(data["totals"]) == {
        *["bias", "stabilizer", "constants", "stopped", "unexplained"]
    }
    assert accounts[:2] == tuple(accounts)[:2] and accounts.entry("fc").rule.startswith("Epsilon")


def test_the_gradient_composites_say_what_they_do_not_explain():
    accounts = lrpfx.ledger(lrpfx.transform(small_net(), GuidedBackprop()), torch.randn(2, 3, 8, 8), 1)
    assert accounts.unexplained > 1e-3 and {entry.rule for entry in accounts if abs(entry.unexplained) > 1e-6} == {"gradient"}


def test_live_modules_and_single_precision():
    model = small_net().float()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float32)
    for fold in (True, False):
        accounts = lrpfx.ledger(lrpfx.transform(model, EpsilonGammaBox(-4.0, 4.0), fold=fold), x, 1)
        assert accounts.unexplained <= 1e-4


def test_pictures_of_a_ledger():
    explain_model = lrpfx.transform(torchvision_model("resnet18"), EpsilonPlus())
    x = torch.randn(1, 3, 32, 32)
    accounts = lrpfx.ledger(explain_model, x, 1)
    for depth in (None, 1):
        source = lrpfx.draw(explain_model, ledger=accounts, depth=depth).source
        widths = [
            float(part.split('"')[0] if part[0] == '"' else part.split()[0].rstrip("]"))
            for part in source.split("penwidth=")[1:]
        ]
        assert max(widths) == pytest.approx(7.3) and min(widths) < 7.0
        assert "#e63946" in source, "the node that leaks most"
    assert "; in " in lrpfx.draw(explain_model, ledger=accounts).source
    flows = accounts.flows
    assert flows["fc", "output"] == pytest.approx(accounts.seed)
    into = sum(value for (_, target), value in flows.items() if target == "layer1.0.add")
    assert into == pytest.approx(accounts.entry("layer1.0.add").relevance_out)
