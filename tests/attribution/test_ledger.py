"""The ledger: exact for every built-in rule, and honest about the rest."""

import dataclasses
import itertools
import json
import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from combinations import each_pair
from helpers import NETWORKS, Binary, Layered, Unary, assert_close, small_net, torchvision_model
from markup import Markup
from reference.dense import LAYERS
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.attribution.ledger import LARGEST, PARTS, Entry, Ledger
from lrpfx.composites import COMPOSITES, CPLRP, AttnLRP, EpsilonGammaBox, EpsilonPlus, GuidedBackprop, LayerMapComposite
from lrpfx.core import BasicHook, Hook
from lrpfx.rules.ratios import FirstGradient
from lrpfx.support.html import NEGATIVE, POSITIVE
from lrpfx.types import Activation, Linear, Softmax, Sum

RULES = {
    "epsilon": rules.Epsilon(0.1),
    "epsilon without bias": rules.Epsilon(0.1, zero_params="bias"),
    "norm": rules.Norm(0.1),
    "zplus": rules.ZPlus(0.1),
    "zplus without bias": rules.ZPlus(0.1, zero_params="bias"),
    "zplus that conserves": rules.ZPlus(0.1, conserve=True),
    "alphabeta": rules.AlphaBeta(2.5, 1.5, 0.1),
    "alphabeta that conserves": rules.AlphaBeta(2.0, 1.0, 0.1, conserve=True),
    "gamma": rules.Gamma(0.5, 0.1),
    "zbox": rules.ZBox(-3.0, 3.0, 0.1),
    "wsquare": rules.WSquare(0.1),
    "flat": rules.Flat(0.1),
    "template": BasicHook(stabilizer=0.1),
}


class OneRule(LayerMapComposite):
    def __init__(self, rule):
        super().__init__([(Linear, rule)])


def balanced(accounts):
    return accounts.unexplained <= 1e-12 and abs(accounts.balance) <= 1e-12 * accounts.seed_magnitude


@each_pair(rule_name=RULES, layer_name=LAYERS, signed=[True, False])
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


@pytest.mark.parametrize("rule", [rules.UniformEpsilon, rules.ValueOnly])
def test_rules_of_products_are_epsilon_where_there_is_one_factor(rule):
    model = nn.Linear(4, 3)
    x = torch.rand(2, 4)
    accounts = [
        lrpfx.ledger(lrpfx.transform(model, LayerMapComposite([(Linear, one(0.1))])), x, 1) for one in (rule, rules.Epsilon)
    ]
    found, expected = (account[0] for account in accounts)
    assert expected.bias and expected.stabilizer
    for part in PARTS:
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=1e-12)


def test_the_constant_term_of_a_softmax_is_no_bias():
    x, seed = torch.randn(2, 5), torch.rand(2, 5)
    s = x.softmax(1)
    by_hand = (seed * (1 - x + (s * x).sum(1, keepdim=True))).sum()
    for rule in (rules.SoftmaxTaylor(), rules.Epsilon(1e-12)):
        (entry,) = lrpfx.ledger(lrpfx.transform(Unary(lambda x: x.softmax(1)), LayerMapComposite([(Softmax, rule)])), x, seed)
        assert entry.bias == 0 and entry.expansion != 0 and abs(entry.unexplained) <= 1e-12
        if isinstance(rule, rules.SoftmaxTaylor):
            assert_close(torch.tensor(entry.expansion), by_hand, 1e-12)


@pytest.mark.filterwarnings("ignore:.*functions of their own")
@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.softplus, F.relu6, torch.exp, lambda x: F.gelu(x)])
def test_activations_have_an_expansion_and_no_bias(function):
    """Under a rule that takes them for linear: the constant term of their expansion at x is f(x) - x f'(x)."""
    x, seed = 4 * torch.rand(2, 30) + 3, torch.rand(2, 30)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(leaf).sum(), leaf)
    expected = (seed * (1 - x * slope / function(x))).sum()
    (entry,) = lrpfx.ledger(lrpfx.transform(Unary(function), LayerMapComposite([(Activation, rules.Epsilon(1e-14))])), x, seed)
    assert entry.bias == 0 and abs(entry.unexplained) <= 1e-11
    torch.testing.assert_close(entry.expansion, float(expected), rtol=1e-9, atol=1e-9)


def test_functions_without_a_forward_mode_derivative():
    """The linear part needs the ordinary derivative alone."""

    class Doubled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Own(Layered):
        def forward(self, x):
            return Doubled.apply(x) + self.bias

    model, x, seed = nn.Sequential(Own(bias=nn.Parameter(torch.rand(4)))), torch.rand(2, 4), torch.rand(2, 4)
    (entry,) = lrpfx.ledger(lrpfx.transform(model, LayerMapComposite([(Own, rules.Epsilon(0.1))])), x, seed)
    z = 2 * x + model[0].bias.detach()
    assert entry.bias == pytest.approx(float((seed / (z + 0.1) * model[0].bias.detach()).sum()), rel=1e-12)
    assert entry.relevance_out == pytest.approx(float((seed / (z + 0.1) * 2 * x).sum()), rel=1e-12)


def test_several_threads_get_the_same_accounts():
    """Forward-mode derivatives number their levels for all threads together."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Softmax(-1)).eval()
    x = torch.randn(3, 6)
    made = [lrpfx.transform(model, composite, example_inputs=x) for composite in (EpsilonPlus(), AttnLRP())]
    expected = [lrpfx.ledger(explain_model, x, 1).to_dict() for explain_model in made]

    def accounts(number):
        return lrpfx.ledger(made[number % 2], x, 1).to_dict() == expected[number % 2]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(accounts, range(120)))


def every_other(x):
    return x * (torch.arange(x.numel()).reshape(x.shape) % 2)


#: What has an infinite derivative at some of these inputs, or overflows on the way to a finite result.
SINGULAR = {
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2.0, 2),
    "lp_pool1d of another degree": lambda x: F.lp_pool1d(x, 3.0, 2),
    "root behind a ReLU": lambda x: x.relu().sqrt(),
    "power behind a ReLU": lambda x: x.relu() ** 0.3,
    "logarithm behind a ReLU": lambda x: (x.relu() + 1).log(),
    "arc sine behind a clamp": lambda x: x.clamp(-1, 1).asin(),
    "norm": lambda x: x.norm(dim=-1),
    "standard deviation": lambda x: x.std(-1),
    "distances": lambda x: torch.cdist(x, x.flip(0)),
    "masked scores": lambda x: x.masked_fill(x <= 0, -math.inf).logsumexp(-1).clamp(min=-9.0),
    "masked softmax": lambda x: x.masked_fill(torch.arange(6) > 3, -math.inf).softmax(-1),
}
SPECIAL = {
    "zeros": torch.zeros_like,
    "every other one zero": every_other,
    "ones": torch.ones_like,
    "signs": torch.sign,
    "equal rows": lambda x: x[:1].expand_as(x).clone(),
    "negative": lambda x: -x.abs(),
}


def figures_of(accounts):
    figures = [value for entry in accounts for value in vars(entry).values() if isinstance(value, float)]
    totals = (accounts.seed, accounts.balance, accounts.unexplained)
    return [*figures, *totals, *accounts.inputs.values(), *accounts.flows.values()]


@pytest.mark.filterwarnings("ignore:.*functions of their own")
@pytest.mark.filterwarnings("ignore:the map is")
@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.sampled(3)
def test_all_figures_of_a_finite_map_are_finite(name):
    model = Unary(SINGULAR[name])
    everything = LayerMapComposite([(lrpfx.types.Kind, rules.Epsilon(1e-9))])
    composites = [EpsilonPlus(), AttnLRP(), *([] if name == "distances" else [everything])]
    finite = 0
    for composite, (kind, change) in itertools.product(composites, SPECIAL.items()):
        x = change(torch.randn(4, 6))
        explain_model = lrpfx.transform(model, composite, example_inputs=x, unassigned="gradient")
        if not explain_model(x).isfinite().all():
            continue
        map_of_input = lrpfx.attribute(explain_model, x, lambda output: output).relevance
        if map_of_input.isfinite().all():
            finite += 1
            accounts = lrpfx.ledger(explain_model, x, lambda output: output)
            assert all(map(math.isfinite, figures_of(accounts))), f"{kind}, {composite}:\n{accounts}"
            assert abs(float(map_of_input.sum()) - sum(accounts.inputs.values())) <= 1e-9 * (1 + accounts.seed_magnitude)
            if name != "masked scores":  # nothing accounts for relevance of an infinite value
                unexplained = [entry.unexplained for entry in accounts if entry.rule != "gradient"]
                assert max(map(abs, unexplained)) <= 1e-6, f"{kind}:\n{accounts}"
    assert finite >= 6


def test_figures_show_where_a_map_is_not_finite():
    x = torch.zeros(1, 3)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Unary(torch.sqrt)).eval()
    explain_model = lrpfx.transform(model, LayerMapComposite([(lrpfx.types.Kind, rules.Epsilon(1e-9))]), example_inputs=x)
    with pytest.warns(lrpfx.LrpfxWarning, match="not determined"):
        accounts = lrpfx.ledger(explain_model, x, lambda output: 1 + output)
    assert math.isfinite(accounts[-1].relevance_in) and math.isnan(accounts[-1].relevance_out)


def test_modules_as_a_whole_have_biases_and_an_expansion():
    """A network of ReLUs is linear piece by piece: what is not linear comes from its biases. One of sigmoids has both."""

    class Block(nn.Sequential):
        pass

    x, seed = torch.randn(3, 4), torch.rand(3, 2)
    for activation, bias in ((nn.ReLU(), True), (nn.ReLU(), False), (nn.Sigmoid(), True), (nn.Sigmoid(), False)):
        model = nn.Sequential(Block(nn.Linear(4, 6, bias=bias), activation, nn.Linear(6, 2, bias=bias))).eval()
        (entry,) = lrpfx.ledger(lrpfx.transform(model, LayerMapComposite([(Block, rules.Epsilon())])), x, seed)
        assert abs(entry.unexplained) <= 1e-10
        assert (abs(entry.bias) > 1e-6) == bias
        assert (abs(entry.expansion) > 1e-10) == isinstance(activation, nn.Sigmoid)


def test_what_finds_no_contribution_is_absent():
    """By hand: an output with positive contributions alone, one with negative ones alone, one with both, and one with none."""
    layer = nn.Linear(2, 4, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0], [-1.0, -3.0], [1.0, -1.0], [0.0, 0.0]])
    x, seed = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0, 11.0]])
    expected = {
        "epsilon": (rules.Epsilon(), 11.0),
        "zplus": (rules.ZPlus(), 5.0 + 11.0),
        "alphabeta": (rules.AlphaBeta(), -3.0 + 2 * 5.0 + (2 - 1) * 11.0),
        "gamma": (rules.Gamma(), 11.0),
        "wsquare": (rules.WSquare(), 11.0),
        "flat": (rules.Flat(), 0.0),
        "zplus that conserves": (rules.ZPlus(conserve=True), 11.0),
        "alphabeta that conserves": (rules.AlphaBeta(conserve=True), 11.0),
    }
    for optimize in (True, False):
        for rule, absent in expected.values():
            model = nn.Sequential(layer).eval()
            accounts = lrpfx.ledger(lrpfx.transform(model, OneRule(rule), optimize=optimize), x, seed)
            assert abs(accounts[0].absent - absent) <= 1e-12, rule
            assert balanced(accounts) and abs(accounts[0].stabilizer) <= 1e-4


def test_sums_of_nothing_are_absent():
    a, seed = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 3.0]])
    for rule in (rules.Norm(), rules.AbsoluteRatio()):
        explain_model = lrpfx.transform(Binary(torch.add), LayerMapComposite([(Sum, rule)]))
        (entry,) = lrpfx.ledger(explain_model, (a, a), seed)
        assert entry.absent == 2.0 and abs(entry.stabilizer) < 1e-5


def test_columns_that_do_not_exist():
    class Mistaken(rules.Pass):
        def absorbed(self, call, relevance):
            return {"bais": 0.0}

    explain_model = lrpfx.transform(Unary(torch.relu), LayerMapComposite([(Activation, Mistaken())]))
    with pytest.raises(lrpfx.RuleError, match=r"relu: Mistaken\(\) accounts for 'bais', but a ledger has bias, expansion"):
        lrpfx.ledger(explain_model, torch.randn(2, 3), torch.rand(2, 3))


LARGE = sorted(set(NETWORKS) - {"small"})
#: The small network with every composite, and every composite with one of the large networks in turn.
PAIRS = [("small", composite) for composite in sorted(COMPOSITES)]
PAIRS += [(LARGE[number % len(LARGE)], composite) for number, composite in enumerate(sorted(COMPOSITES))]


@pytest.mark.filterwarnings("ignore:the map does not add up")  # norms keep their plain gradient
@pytest.mark.parametrize("name, composite_name", PAIRS)
@pytest.mark.sampled(3)
def test_networks_balance(name, composite_name):
    model, x = NETWORKS[name]()
    settings = {"low": -4.0, "high": 4.0} if composite_name == "epsilon_gamma_box" else {}
    composite = COMPOSITES[composite_name](**settings)
    reference = 0.0 if composite_name == "deep_lift" else None
    explain_model = lrpfx.transform(model, composite)
    accounts = lrpfx.ledger(explain_model, x, 1, reference=reference)
    relevance = lrpfx.attribute(explain_model, x, 1, reference=reference).relevance
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

    class Net(Layered):
        def forward(self, x):
            return x + self.position + 1.0

    x, seed = torch.randn(2, 3), torch.randn(2, 3)
    accounts = lrpfx.ledger(lrpfx.transform(Net(position=position), EpsilonPlus()), x, seed)
    assert accounts.unexplained <= 1e-9
    second = accounts.entry("add_1")
    assert_close(torch.tensor(second.constants), (seed / (x + position + 1.0)).sum().detach(), 1e-4)
    first = accounts.entry("add")
    assert first.constants != 0 and first.bias == 0


def test_shared_operands_and_reused_layers():
    class Net(Layered):
        def forward(self, x):
            y = self.linear(x)
            return self.linear(y + y) * self.linear(x)

    x = torch.randn(3, 4)
    explain_model = lrpfx.transform(Net(linear=nn.Linear(4, 4)), EpsilonPlus())
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
    assert accounts.unexplained == pytest.approx(abs(accounts[0].unexplained) / 6.0)
    assert f"{accounts[0].unexplained:.4g}" in str(accounts) and "nothing unexplained" not in str(accounts)
    assert str(accounts).endswith("is missing in the end") == (abs(accounts.balance) > 1e-6 * accounts.seed_magnitude)
    honest = lrpfx.ledger(lrpfx.transform(model, LayerMapComposite([(nn.Linear, rules.Epsilon())])), x, torch.ones(2, 3))
    assert "missing" not in str(honest) and "nothing unexplained at any node" in str(honest)
    nothing = lrpfx.ledger(lrpfx.transform(model, LayerMapComposite([(nn.Linear, Twice())])), x, torch.zeros(2, 3))
    assert nothing.seed_magnitude == 0.0 and nothing.unexplained == 0.0
    plain = lrpfx.ledger(
        lrpfx.transform(Binary(torch.add), LayerMapComposite([]), unassigned="gradient"), (x, x), torch.ones(2, 4)
    )
    assert abs(plain[0].unexplained + 8.0) <= 1e-12, "a sum without a rule doubles relevance"


def test_of_several_branches_the_first_alone_counts_where_its_gradient_is_the_relevance():
    assert FirstGradient().branch_weights(2) == (1.0, 0.0) and FirstGradient().branch_weights(1) == (1.0,)


def test_what_is_negligible_is_shown_as_nothing():
    entry = Entry("layer", "Linear", "Epsilon", 20.0, 19.0, bias=1.0, stabilizer=2e-9, unexplained=-1e-9)
    shown = str(Ledger([entry], 20.0, 20.0, {"input": 19.0}, {}))
    assert "e-09" not in shown and "nothing unexplained" in shown
    shown = str(Ledger([dataclasses.replace(entry, unexplained=-4e-8, stabilizer=3e-8)], 20.0, 20.0, {"input": 19.0}, {}))
    assert "3e-08" in shown and "-4e-08" in shown and "up to 2e-09 of the seed unexplained" in shown


def test_a_product_with_a_constant_is_linear():
    constant = torch.rand(4)
    for rule in (rules.ZPlus(), rules.Epsilon()):
        explain_model = lrpfx.transform(Unary(lambda x: x * constant), LayerMapComposite([(lrpfx.types.Product, rule)]))
        found = lrpfx.attribute(explain_model, torch.rand(2, 4), 1)
        assert_close(found.relevance.sum(1), found.output[:, 1], 1e-4)


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
        *["bias", "expansion", "stabilizer", "absent", "constants", "stopped", "unexplained"]
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
    assert "; in " in lrpfx.draw(explain_model, ledger=accounts).source
    flows = accounts.flows
    assert flows["fc", "output"] == pytest.approx(accounts.seed)
    into = sum(value for (_, target), value in flows.items() if target == "layer1.0.add")
    assert into == pytest.approx(accounts.entry("layer1.0.add").relevance_out)


def color_of(source, name):
    return re.search(rf'node_{name}"? \[.*?fillcolor="(#\w+)"', source, re.DOTALL)[1]


SHARES = [(0.0, "#ffffff"), (0.1, "#fcebec"), (0.5, "#f29ca2"), (1.0, "#e63946"), (3.0, "#e63946")]


@pytest.mark.parametrize("share, color", SHARES)
def test_leaks_are_coloured_relative_to_the_seed(share, color):
    """Not to the largest leak, which may be nothing."""

    class Leak(Hook):
        def propagate(self, call, relevance):
            return ((1 - share) * relevance,)

    explain_model = lrpfx.transform(Unary(torch.relu), LayerMapComposite([(Activation, Leak())]))
    accounts = lrpfx.ledger(explain_model, torch.rand(2, 3), torch.ones(2, 3))
    for depth in (None, 1):
        assert color_of(lrpfx.draw(explain_model, ledger=accounts, depth=depth).source, "relu") == color


class Cancelling(nn.Module):
    """Two branches whose difference is the output: x and -x, each times a large number."""

    def __init__(self, factor):
        super().__init__()
        self.plus, self.minus = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.plus.weight.data = factor * torch.eye(3)
        self.minus.weight.data = (1 - factor) * torch.eye(3)
        self.eval()

    def forward(self, x):
        return self.plus(x) + self.minus(x)


def test_a_ledger_whose_entries_cancel_warns():
    x = torch.rand(2, 3) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lrpfx.ledger(lrpfx.transform(Cancelling(200.0), EpsilonPlus(1e-12, 1e-12)), x, lambda output: output)
    explain_model = lrpfx.transform(Cancelling(5000.0), EpsilonPlus(1e-12, 1e-12))
    with pytest.warns(lrpfx.LrpfxWarning, match="not determined.*cancel to a seed.*at (add|plus)"):
        accounts = lrpfx.ledger(explain_model, x, lambda output: output)
    assert abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


def test_a_ledger_with_numbers_that_are_not_finite_warns():
    class Infinite(rules.Pass):
        def propagate(self, call, relevance):
            return (relevance / 0.0,)

    explain_model = lrpfx.transform(Unary(torch.relu), LayerMapComposite([(Activation, Infinite())]))
    with pytest.warns(lrpfx.LrpfxWarning, match="not determined.*relu"):
        lrpfx.ledger(explain_model, torch.rand(2, 3), torch.ones(2, 3))


def test_columns_of_entries_that_lose_nothing():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2, bias=False)).eval()
    accounts = lrpfx.ledger(lrpfx.transform(model, EpsilonPlus()), torch.randint(5, (2, 2)), 1)
    assert {part: accounts.entry("0").__getattribute__(part) for part in PARTS} == dict.fromkeys(PARTS, 0.0)
    assert accounts.total("stopped") == 0.0
    nothing = lrpfx.ledger(lrpfx.transform(Unary(lambda x: x), EpsilonPlus()), torch.ones(2, 3), torch.ones(2, 3))
    assert nothing.unexplained == 0.0 and len(nothing) == 0


def account(name="layer", leak=0.0, **parts):
    return Entry(name, "Linear", "ZPlus()", 1.0, 1.0 - leak, **parts)


def test_notebooks_show_totals_and_the_largest_leaks():
    hostile = "<script>&\"'"
    entries = [account(f"small{number}", 1e-3) for number in range(30)]
    entries += [account(hostile, 0.6, bias=0.5, stopped=0.1), account("half", 0.3), account("none")]
    accounts = Ledger(entries, 1.0, 1.0, {hostile: 0.1, "bias": 0.2}, {})
    shown = Markup(accounts._repr_html_())
    sums, first, others = shown.tables
    assert [cells[:2] for cells in sums[1:4]] == [["seed", "1"], [hostile, "0.1"], ["bias", "0.2"]], "an input called bias"
    assert sums[4][:2] == ["bias", "0.5"] and sums[-1][:2] == ["balance", "0.1"]
    assert [cells[0] for cells in first[1:3]] == [hostile, "half"] and len(first) == 1 + LARGEST
    assert len(first) + len(others) - 2 == len(entries) and others[-1][0] == "none" and others[-1][5] == "0"
    assert shown.count("details") == 1 and "bias 0.5, stopped 0.1" in shown.titles()
    bars = shown.bars()[len(sums) - 1 :]
    assert bars[0] == (POSITIVE, 8.0) and bars[1] == (POSITIVE, 4.0) and bars[-1] == (POSITIVE, 0.0)
    assert "0.1 is missing in the end" in "".join(shown.texts)


def test_negative_totals_have_another_color():
    shown = Markup(Ledger([account()], -2.0, 2.0, {"x": -2.0}, {})._repr_html_())
    assert shown.bars()[:2] == [(NEGATIVE, 8.0)] * 2
    assert "no account has a leak" in "".join(shown.texts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_amounts_that_are_not_finite_are_shown(value):
    shown = Markup(Ledger([account(leak=value)], value, value, {"x": value}, {})._repr_html_())
    assert shown.tables[0][1][1] == str(value)


def test_an_empty_ledger_is_shown():
    assert Markup(Ledger([], 0.0, 0.0, {}, {})._repr_html_()).tables[0][1][:2] == ["seed", "0"]


def test_the_data_frame():
    pandas = pytest.importorskip("pandas")
    entries = [account("a", 0.5, bias=0.25), account("b")]
    frame = Ledger(entries, 1.0, 1.0, {"x": 0.5}, {}).to_pandas()
    figures = ["relevance_in", "relevance_out", *PARTS, "unexplained", "leak"]
    assert list(frame.columns) == ["name", "kind", "rule", *figures]
    assert all(frame[name].dtype == "float64" for name in figures)
    assert all(pandas.api.types.is_string_dtype(frame[name]) for name in ("name", "kind", "rule"))
    assert list(frame["leak"]) == [0.5, 0.0] and list(frame["bias"]) == [0.25, 0.0]


def test_edges_of_the_drawing_point_to_where_relevance_goes():
    class Difference(Layered):
        def forward(self, x):
            return self.one(x).relu() - self.other(x).relu()

    model, x = Difference(one=nn.Linear(3, 1), other=nn.Linear(3, 1)), torch.rand(1, 3)
    with torch.no_grad():
        for weight, value in zip(model.parameters(), (2.0, 0.0, 1.0, 0.0), strict=True):
            weight.fill_(value)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    accounts = lrpfx.ledger(explain_model, x, 0)
    source = lrpfx.draw(explain_model, ledger=accounts).source
    for (node, reader), relevance in accounts.flows.items():
        (statement,) = re.findall(rf"node_{node} -> node_{reader} (\[.*?\])", source, re.DOTALL)
        assert "dir=back" in statement and f"R {relevance:.3g}\\l" in statement
        assert ("style=dashed" in statement) == (NEGATIVE in statement) == (relevance < 0)
    assert {relevance < 0 for relevance in accounts.flows.values()} == {True, False}
    assert "dir=back" not in lrpfx.draw(explain_model).source


def test_an_account_is_a_value():
    entry = Entry("a", "Linear", "Epsilon", 1.0, 2.0)
    assert entry in {Entry("a", "Linear", "Epsilon", 1.0, 2.0)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.bias = 1.0


class PaddedAttention(nn.Module):
    """Attention over padded sequences: whole rows of scores are masked, and their weights, which are not numbers, replaced."""

    def __init__(self, replaced):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head, self.replaced = nn.Linear(4, 3), replaced

    def forward(self, x, mask):
        allowed = mask[:, :, None] & mask[:, None, :]
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        weights = self.replaced(scores.masked_fill(~allowed, -torch.inf).softmax(-1), allowed)
        return self.head(((weights @ self.value(x)) * mask[:, :, None]).sum(1))


@pytest.mark.parametrize("composite", [EpsilonPlus, AttnLRP, CPLRP])
@pytest.mark.parametrize(
    "replaced",
    [
        lambda weights, allowed: weights.nan_to_num(0.0),
        lambda weights, allowed: torch.where(weights.isnan(), torch.zeros_like(weights), weights),
        lambda weights, allowed: weights.masked_fill(~allowed, 0.0),
    ],
)
def test_entries_that_are_not_numbers_and_have_no_relevance_have_no_account(replaced, composite):
    model = PaddedAttention(replaced).double().eval()
    inputs = torch.randn(2, 5, 4, dtype=torch.float64), torch.arange(5) < torch.tensor([[3], [5]])
    accounts = lrpfx.ledger(lrpfx.transform(model, composite(), example_inputs=inputs), inputs, 0)
    assert accounts.is_finite and accounts.unexplained <= 1e-9
    assert abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
