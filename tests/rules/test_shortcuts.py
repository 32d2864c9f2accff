"""Shortcuts give the relevance of the rules that they stand for, and run as few operations as they promise."""

import itertools

import pytest
import torch
from combinations import each_pair
from helpers import NETWORKS, Unary, assert_close, relative_difference, small_net, torchvision_model
from small_families import small_family
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lrpfx
from lrpfx import rules
from lrpfx.composites import (
    Composite,
    EpsilonAlpha2Beta1,
    EpsilonAlpha2Beta1Flat,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    LayerMapComposite,
    layer_map_base,
)
from lrpfx.rules.modifiers import Clamp
from lrpfx.rules.ratios import weights_by_sign
from lrpfx.rules.shortcuts import (
    BoundedInput,
    ConstantTotal,
    EvenSpread,
    PositiveAndNegativeTotals,
    PositiveTotal,
    ShareOfSum,
    Shortcut,
    TotalOfOwnSign,
)
from lrpfx.rules.stabilizer import Stabilizer
from lrpfx.rules.template import BasicHook
from lrpfx.runtime.explain_module import RuleModule

LAYERS = {
    "linear": (lambda bias: nn.Linear(6, 5, bias=bias), (3, 6)),
    "linear in three dimensions": (lambda bias: nn.Linear(6, 5, bias=bias), (2, 4, 6)),
    "conv1d": (lambda bias: nn.Conv1d(4, 6, 3, stride=2, padding=1, bias=bias), (2, 4, 9)),
    "conv2d": (lambda bias: nn.Conv2d(4, 6, 3, padding=1, bias=bias), (2, 4, 7, 6)),
    "conv2d, strided": (lambda bias: nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), bias=bias), (2, 4, 8, 9)),
    "conv2d, groups": (lambda bias: nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=bias), (2, 4, 8, 7)),
    "conv2d, depthwise": (lambda bias: nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=bias), (2, 4, 6, 6)),
    "conv2d, same": (lambda bias: nn.Conv2d(4, 6, 3, padding="same", dilation=2, bias=bias), (2, 4, 6, 6)),
    "conv2d, unevenly padded": (lambda bias: nn.Conv2d(4, 6, 4, padding="same", bias=bias), (2, 4, 6, 6)),
    "conv2d, valid": (lambda bias: nn.Conv2d(4, 6, 3, padding="valid", bias=bias), (2, 4, 6, 6)),
    "conv3d": (lambda bias: nn.Conv3d(2, 4, 2, padding=1, bias=bias), (2, 2, 4, 3, 5)),
    "conv_transpose1d": (lambda bias: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, bias=bias), (2, 4, 5)),
    "conv_transpose2d": (lambda bias: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, bias=bias), (2, 4, 4, 5)),
    "conv_transpose3d": (lambda bias: nn.ConvTranspose3d(2, 4, 2, dilation=2, bias=bias), (2, 2, 3, 4, 3)),
}
RULES = {
    "Epsilon": rules.Epsilon(),
    "ZPlus": rules.ZPlus(),
    "ZPlus without bias": rules.ZPlus(zero_params="bias"),
    "AlphaBeta": rules.AlphaBeta(),
    "AlphaBeta without bias": rules.AlphaBeta(3.0, 2.0, zero_params="bias"),
    "ZPlus that conserves": rules.ZPlus(conserve=True),
    "ZPlus without bias that conserves": rules.ZPlus(zero_params="bias", conserve=True),
    "AlphaBeta that conserves": rules.AlphaBeta(conserve=True),
    "Gamma": rules.Gamma(0.5),
    "Gamma without bias": rules.Gamma(0.5, zero_params="bias"),
    "Gamma, clipped": rules.Gamma(0.5, stabilizer=Stabilizer(1e-3, clip=True)),
    "ZPlus, scaled": rules.ZPlus(stabilizer=Stabilizer(1e-2, norm_scale=True)),
    "Gamma, scaled": rules.Gamma(stabilizer=Stabilizer(1e-2, norm_scale=True)),
    "ZPlus, own stabilizer": rules.ZPlus(stabilizer=lambda z: z + 0.1),
    "Flat": rules.Flat(),
    "Flat, scaled": rules.Flat(stabilizer=Stabilizer(1e-2, norm_scale=True)),
    "Flat, own stabilizer": rules.Flat(stabilizer=lambda z: z + z.shape[1]),
    "WSquare": rules.WSquare(),
    "WSquare, clipped": rules.WSquare(stabilizer=Stabilizer(0.5, clip=True)),
    "ZBox": rules.ZBox(-2.0, 2.0),
    "ZBox without bias": rules.ZBox(-2.0, 2.0, zero_params="bias"),
}
RANGES = {"any": (-2.0, 2.0), "positive": (0.0, 2.0), "negative": (-2.0, 0.0)}


class Followed(nn.Module):
    """A layer, and behind it a ReLU or nothing, and a sum of everything for each sample."""

    def __init__(self, layer, relu):
        super().__init__()
        self.layer, self.relu = layer, relu
        self.eval()

    def forward(self, x):
        x = self.layer(x)
        return (F.relu(x) if self.relu else x).flatten(1)


class OneRule(Composite):
    """A rule for the layers that are called `name` (default: for all linear ones), the usual rules for the rest."""

    def __init__(self, rule, name=None):
        usual = LayerMapComposite([*layer_map_base(), (lrpfx.types.Linear, rules.Epsilon())])

        def choose(ctx, path, layer):
            has_it = isinstance(layer, lrpfx.types.Linear) if name is None else path == name
            return rule if has_it else usual.module_map({}, path, layer)

        super().__init__(choose)


def both(model, composite, **options):
    """The module with shortcuts, and the one that evaluates the rules as they are written."""
    return [lrpfx.transform(model, composite, optimize=optimize, **options) for optimize in (True, False)]


def shortcuts_of(explain_model):
    found = {name: module.rule for name, module in explain_model.named_modules() if isinstance(module, RuleModule)}
    return {name: type(rule) for name, rule in found.items() if isinstance(rule, Shortcut)}


#: Whether the layer has a bias, whether a ReLU follows it, and the range of its input.
SETTINGS = {
    f"{bias}, {follower}, {name}": (bias == "bias", follower == "ReLU", limits)
    for bias, follower, (name, limits) in itertools.product(("bias", "no bias"), ("ReLU", "nothing"), RANGES.items())
}


def compare_layer(layer, rule, bias, relu, limits):
    make, shape = LAYERS[layer]
    model = Followed(make(bias), relu)
    x = torch.rand(shape) * (limits[1] - limits[0]) + limits[0]
    x = x * (torch.rand_like(x) > 0.3)
    fast, direct = both(model, OneRule(RULES[rule]), example_inputs=x, input_range=limits)
    output = model(x)
    seed = output * torch.randn_like(output) if relu else torch.randn_like(output)
    expected = lrpfx.attribute(direct, x, seed)
    result = lrpfx.attribute(fast, x, seed)
    assert_close(result.relevance, expected.relevance, 1e-10)
    assert torch.equal(result.output, expected.output)


@each_pair(layer=LAYERS, rule=RULES, setting=SETTINGS, rest=False)
def test_layers(layer, rule, setting):
    """Each rule and each layer in each setting, and each rule on each layer in one of them."""
    compare_layer(layer, rule, *SETTINGS[setting])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_in_every_setting(layer, rule):
    for setting in SETTINGS.values():
        compare_layer(layer, rule, *setting)


class Behind(nn.Module):
    """A layer whose relevance is where its output is positive: behind the ReLU there is a dense layer."""

    def __init__(self, layer, x):
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(layer(x).flatten(1).shape[1], 3)
        self.eval()

    def forward(self, x):
        return self.last(F.relu(self.layer(x)).flatten(1))


IN_FRONT = [layer for layer in LAYERS if layer != "linear in three dimensions"]
#: Whether the layer has a bias, and the range of its input.
SETTINGS_IN_FRONT = {
    f"{bias}, {name}": (bias == "bias", limits)
    for bias, (name, limits) in itertools.product(("bias", "no bias"), RANGES.items())
}


def compare_behind(layer, rule, bias, limits):
    make, shape = LAYERS[layer]
    x = torch.rand(shape) * (limits[1] - limits[0]) + limits[0]
    model = Behind(make(bias), x)
    fast, direct = both(model, OneRule(RULES[rule], "layer"), example_inputs=x, input_range=limits)
    for chosen in ({"target": 0}, {"targets": [1, 2]}):
        expected = lrpfx.attribute(direct, x, **chosen).relevance
        assert_close(lrpfx.attribute(fast, x, **chosen).relevance, expected, 1e-10)
    assert lrpfx.ledger(fast, x, 1).unexplained <= 1e-9


@each_pair(layer=IN_FRONT, rule=RULES, setting=SETTINGS_IN_FRONT, rest=False)
@pytest.mark.sampled(4)
def test_layers_behind_which_relevance_has_support(layer, rule, setting):
    compare_behind(layer, rule, *SETTINGS_IN_FRONT[setting])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", IN_FRONT)
def test_layers_behind_which_relevance_has_support_in_every_setting(layer, rule):
    for setting in SETTINGS_IN_FRONT.values():
        compare_behind(layer, rule, *setting)


BOUNDS = {
    "numbers": (-2.0, 2.0),
    "one tensor": (torch.tensor(-2.0), torch.tensor(2.0)),
    "channels": (-2.0 - torch.rand(1, 4, 1, 1), 2.0 + torch.rand(1, 4, 1, 1)),
    "batch and channels": (-2.0 - torch.rand(2, 4, 1, 1), 2.0),
    "pixels": (-2.0 - torch.rand(1, 4, 7, 6), 2.0 + torch.rand(1, 4, 7, 6)),
    "samples": (-2.0 - torch.rand(5, 4, 7, 6), 2.0 + torch.rand(1, 4, 7, 1)),
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_bounds_of_any_shape(bounds, groups):
    low, high = BOUNDS[bounds]
    model = Followed(nn.Conv2d(4, 6, 3, padding=1, groups=groups), False)
    x = torch.rand(2, 4, 7, 6) * 4 - 2
    fast, direct = both(model, OneRule(rules.ZBox(low, high)))
    assert shortcuts_of(fast) == {"layer": BoundedInput}
    seed = torch.randn_like(model(x))
    assert_close(lrpfx.attribute(fast, x, seed).relevance, lrpfx.attribute(direct, x, seed).relevance, 1e-10)
    assert lrpfx.ledger(fast, x, seed).unexplained <= 1e-9


def test_rules_that_give_nothing_where_the_input_is_zero():
    def clamped(low, high):
        return BasicHook(input_modifiers=[Clamp(low, high)])

    assert all(rule.is_proportional for rule in (rules.Epsilon(), rules.ZPlus(), clamped(None, 0.0), clamped(-1.0, None)))
    assert not any(rule.is_proportional for rule in (rules.ZBox(-1.0, 1.0), clamped(None, -1.0), clamped(1.0, None)))


def test_what_is_chosen():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()
    flat = shortcuts_of(lrpfx.transform(net, EpsilonPlusFlat()))
    assert flat == {"0": EvenSpread, "2": PositiveTotal}
    box = lrpfx.transform(net, EpsilonGammaBox(0.0, 1.0))
    assert shortcuts_of(box) == {"0": BoundedInput, "2": PositiveTotal}
    assert shortcuts_of(lrpfx.transform(net, EpsilonAlpha2Beta1Flat())) == {"0": EvenSpread, "2": PositiveAndNegativeTotals}
    assert shortcuts_of(lrpfx.transform(net, EpsilonAlpha2Beta1Flat(), optimize=False)) == {}
    assert "(2): Gamma" in str(box) and lrpfx.assignment(box).rule_of("2").startswith("Gamma(")
    assert set(shortcuts_of(lrpfx.transform(net, OneRule(rules.WSquare()))).values()) == {ConstantTotal}
    assert TotalOfOwnSign in shortcuts_of(lrpfx.transform(net, OneRule(rules.Gamma(0.0)))).values()

    class MyGamma(rules.Gamma):
        """A rule that derives from a built-in one may do anything."""

    assert shortcuts_of(lrpfx.transform(net, OneRule(MyGamma()))) == {}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.outer = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)
        self.eval()

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = F.relu(x + self.outer(F.relu(self.inner(x))))
        return self.head(x.mean((2, 3)))


def test_support_stops_at_a_sum():
    """The last convolution of a residual block feeds a sum: its relevance is anywhere."""
    explain_model = lrpfx.transform(Residual(), EpsilonGammaBox(-3.0, 3.0))
    assert shortcuts_of(explain_model) == {
        "stem": BoundedInput,
        "inner": PositiveTotal,
        "outer": TotalOfOwnSign,
        "add": ShareOfSum,
    }
    stage = next(stage for stage in lrpfx.history(explain_model) if stage.name == "analyze_support")
    names = [name for name, _ in stage.details]
    assert "inner" in names and "add" in names and "stem" in names and "outer" not in names
    table = {row.name: row.support for row in lrpfx.assignment(explain_model)}
    assert table["inner"] == "> 0" and table["outer"] == ""


def claims_of_support_hold(explain_model, x):
    """Every node of which it is claimed has no relevance where its value is not positive."""
    claimed = [
        row.name for row in lrpfx.assignment(explain_model) if row.support and row.name in dict(_values(explain_model, x))
    ]
    layers = lrpfx.attribute(explain_model, x, 1, record=claimed).layers
    values = dict(_values(explain_model, x))
    for name in claimed:
        assert (layers[name][values[name] <= 0] == 0).all(), name
    return len(claimed)


def _values(explain_model, x):
    class Keeping(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if n.op != "output" and isinstance(value, torch.Tensor):
                found.append((lrpfx.ir.node.node_info(n).name, value.detach()))
            return value

    found = []
    Keeping(explain_model, graph=explain_model.graph).run(x)
    return found


COMPOSITES = {
    "plus_flat": EpsilonPlusFlat(),
    "plus": EpsilonPlus(),
    "alpha_beta_flat": EpsilonAlpha2Beta1Flat(),
    "gamma_box": EpsilonGammaBox(-3.0, 3.0),
}


@pytest.mark.parametrize("composite", ["alpha_beta_flat", "gamma_box"])
@pytest.mark.parametrize("name", ["small", "alexnet", "vgg11_bn"])
@pytest.mark.sampled(3)
def test_networks(name, composite):
    model, x = NETWORKS[name]()
    x = x.double().clamp(-3.0, 3.0)
    fast, direct = both(model.double(), COMPOSITES[composite], input_range=(-3.0, 3.0))
    expected = lrpfx.attribute(direct, x, 1)
    assert_close(lrpfx.attribute(fast, x, 1).relevance, expected.relevance, 1e-10)
    claims_of_support_hold(direct, x)


#: A small network of a family, a classifier of it, their composite, and whether something is claimed of their support.
CLASSIFIERS = [
    ("resnet", "resnet18", "alpha_beta_flat", True),
    ("densenet", "densenet121", "gamma_box", False),
    ("shufflenet", "googlenet", "plus_flat", True),
    ("mobilenet_v3", "mobilenet_v3_small", "gamma_box", False),
    ("efficientnet", "efficientnet_b0", "alpha_beta_flat", False),
    ("regnet_y", "regnet_y_400mf", "gamma_box", True),
]


@pytest.mark.parametrize(("family", "name", "composite", "claims"), CLASSIFIERS)
@pytest.mark.sampled(3)
def test_families_of_classifiers(family, name, composite, claims):
    assert compare_classifier(*small_family(family), composite) > 0 or not claims


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "composite", "claims"), CLASSIFIERS)
def test_classifiers(family, name, composite, claims):
    assert compare_classifier(torchvision_model(name), torch.rand(2, 3, 64, 64), composite) > 10 or not claims


def compare_classifier(model, x, composite):
    """How many claims of where relevance is zero were made, and hold."""
    fast, direct = both(model, COMPOSITES[composite], input_range=(-3.0, 3.0))
    expected = lrpfx.attribute(direct, x, targets=[1, 2]).relevance
    assert_close(lrpfx.attribute(fast, x, targets=[1, 2]).relevance, expected, 1e-10)
    return claims_of_support_hold(direct, x)


# --- precision ---------------------------------------------------------------------------------------------------------------


def _errors(model, composite, x):
    """Relative error in float32 of both forms, against float64."""
    exact = lrpfx.attribute(lrpfx.transform(model.double(), composite, optimize=False), x.double(), 1).relevance
    single = both(model.float(), composite, input_range=(0.0, 1.0))
    return [relative_difference(lrpfx.attribute(one, x.float(), 1).relevance.double(), exact) for one in single]


def _lopsided(model):
    """Weights among which those of one sign are tiny: what a difference of totals would lose."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.data
            negative = torch.rand_like(weight) < 0.5
            module.weight.data = torch.where(negative, -1e-5 * weight.abs(), weight.abs())
    return model


@each_pair(name=["residual", "resnet"], composite=COMPOSITES, change=[lambda model: model, _lopsided])
@pytest.mark.sampled(3)
def test_single_precision_loses_nothing(name, composite, change):
    compare_precision(change(Residual() if name == "residual" else small_family(name)[0]), composite)


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda model: model, _lopsided])
@pytest.mark.parametrize("composite", COMPOSITES)
def test_single_precision_loses_nothing_in_resnet18(composite, change):
    compare_precision(change(torchvision_model("resnet18")), composite)


def compare_precision(model, composite):
    errors = [_errors(model, COMPOSITES[composite], torch.rand(2, 3, 48, 48)) for _ in range(3)]
    fast, direct = (sum(error) / len(errors) for error in zip(*errors, strict=True))
    assert fast <= 1.5 * direct + 1e-7


# --- what runs ---------------------------------------------------------------------------------------------------------------


class Convolutions(TorchDispatchMode):
    """Counts convolutions, forward and transposed, of whole layers: those of one channel do not count."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.count += args[1].shape[0] > 1 and args[1].shape[1] > 1
        if func is torch.ops.aten.convolution_backward.default:
            self.count += args[2].shape[0] > 1 and args[2].shape[1] > 1
        return func(*args, **(kwargs or {}))


def convolutions(run):
    with Convolutions() as counted:
        run()
    return counted.count


def chain(depth):
    blocks = [nn.Sequential(nn.Conv2d(3 if not i else 4, 4, 3, padding=1), nn.ReLU()) for i in range(depth)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 36, 3)).eval().requires_grad_(False)


@pytest.mark.parametrize(
    "composite, expected, further",
    [(EpsilonPlusFlat(), 5 + 4 + 4, 4), (EpsilonGammaBox(0.0, 1.0), 5 + 4 + 6, 6), (EpsilonAlpha2Beta1Flat(), 5 + 4 + 8, 8)],
)
def test_no_convolution_more_than_needed(composite, expected, further):
    """Five layers: the forward has five convolutions. Flat needs none in the backward pass, ZBox two transposed ones."""
    x = torch.rand(2, 3, 6, 6)
    explain_model = lrpfx.transform(chain(5), composite, input_range=(0.0, 1.0))
    assert convolutions(lambda: lrpfx.attribute(explain_model, x, 1)) == expected
    several = convolutions(lambda: lrpfx.attribute(explain_model, x, targets=[0, 1, 2, 1]))
    assert several == expected + 3 * further
    assert convolutions(lambda: lrpfx.attribute(explain_model, x, targets=[0, 1, 2, 1], chunk_size=2)) == expected + further


def test_what_is_not_read_is_not_saved():
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    explain_model = lrpfx.transform(chain(2), EpsilonPlusFlat())
    x = torch.rand(2, 3, 6, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        explain_model(x)
    activation = 2 * 4 * 36
    assert sizes.count(activation) == 2  # the input of the second convolution, and that of the dense layer


# --- several targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 10])
@pytest.mark.thorough
def test_several_targets(chunk_size):
    model = small_net().double()
    explain_model = lrpfx.transform(model, EpsilonAlpha2Beta1Flat())
    x = torch.rand(2, 3, 8, 8)
    classes = model(x).shape[1]
    targets = [0, torch.tensor([1, 0]), None, torch.randn(2, classes), lambda output: output.abs()]
    result = lrpfx.attribute(explain_model, x, targets=targets, record=["conv1"], chunk_size=chunk_size)
    assert result.relevance.shape == (5, *x.shape) and result.output.shape == (2, classes)
    for number, target in enumerate(targets):
        alone = lrpfx.attribute(explain_model, x, target, record=["conv1"])
        assert_close(result.relevance[number], alone.relevance, 1e-12)
        assert_close(result.layers["conv1"][number], alone.layers["conv1"], 1e-12)
    seeds = torch.randn(3, 2, classes)
    of_seeds = lrpfx.attribute(explain_model, x, targets=seeds, chunk_size=chunk_size).relevance
    assert_close(of_seeds[2], lrpfx.attribute(explain_model, x, seeds[2]).relevance, 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_rules_take_several_relevances(rule):
    model = Followed(nn.Conv2d(4, 6, 3, padding=1), True)
    x = torch.rand(2, 4, 7, 6) - 0.5
    seeds = torch.randn(3, *model(x).shape)
    for optimize in (True, False):
        explain_model = lrpfx.transform(model, OneRule(RULES[rule]), optimize=optimize)
        together = lrpfx.attribute(explain_model, x, targets=seeds, chunk_size=3).relevance
        assert_close(together, torch.stack([lrpfx.attribute(explain_model, x, seed).relevance for seed in seeds]), 1e-12)


def test_several_targets_with_code_of_ones_own():
    class Halved(rules.Hook):
        def backward(self, module, grad_input, grad_output):
            return [gradient / 2 for gradient in grad_input]

    composite = LayerMapComposite([(nn.ReLU, Halved())])
    explain_model = lrpfx.transform(chain(2), composite, unassigned="gradient")
    x = torch.rand(2, 3, 6, 6)
    result = lrpfx.attribute(explain_model, x, targets=[0, 2], chunk_size=2).relevance
    assert_close(result[1], lrpfx.attribute(explain_model, x, 2).relevance, 1e-12)


@pytest.mark.parametrize(
    "targets, chunk_size, message", [([], None, "empty"), ([0], 0, "1 or more"), ([0, 99], None, "out of range")]
)
def test_several_targets_that_are_none(targets, chunk_size, message):
    explain_model = lrpfx.transform(chain(2), EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.attribute(explain_model, torch.rand(2, 3, 6, 6), targets=targets, chunk_size=chunk_size)


def test_sums_that_broadcast():
    model = Unary(lambda x: torch.relu(x + x.mean(1, keepdim=True)).flatten(1))
    x = torch.randn(2, 3, 4)
    fast, direct = both(model, OneRule(rules.Norm()))
    seed = torch.randn(2, 12)
    assert ShareOfSum in shortcuts_of(fast).values()
    assert_close(lrpfx.attribute(fast, x, seed).relevance, lrpfx.attribute(direct, x, seed).relevance, 1e-10)


class Bottleneck(nn.Module):
    """A residual block that ends in a convolution over single positions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 4, 3, padding=1)
        self.outer = nn.Conv2d(4, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.eval()

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.norm(self.outer(F.relu(self.inner(x)))) + x)
        return self.head(x.mean((2, 3)))


def saved_sizes(run):
    """Storages that a forward pass keeps, with how many numbers each holds."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    return sorted(found.values())


@pytest.mark.parametrize("composite", ["plus_flat", "alpha_beta_flat", "gamma_box"])
def test_what_the_rules_share(composite):
    """Activations are kept once: the input of each layer, for ZBox its output too, and none for the term of a sum."""
    model = Bottleneck().requires_grad_(False)
    fast, direct = both(model, COMPOSITES[composite], input_range=(-3.0, 3.0))
    x = torch.rand(7, 3, 6, 6, requires_grad=True)
    wide, narrow = 7 * 8 * 36, 7 * 4 * 36
    sizes = saved_sizes(lambda: fast(x))
    assert sizes.count(narrow) == 1
    # the block's input and output; for ZBox the output of the first layer
    assert sizes.count(wide) == (3 if composite == "gamma_box" else 2)
    expected = lrpfx.attribute(direct, x, targets=[0, 1]).relevance
    assert_close(lrpfx.attribute(fast, x, targets=[0, 1]).relevance, expected, 1e-10)
    assert_close(lrpfx.attribute(fast, x, targets=[0, 1], chunk_size=2).relevance, expected, 1e-10)
    assert lrpfx.ledger(fast, x, 1).unexplained <= 1e-9
    edges = lrpfx.to_networkx(fast).in_edges("add")
    assert sorted(source for source, _ in edges) == ["outer", "relu"]
    recorded = lrpfx.attribute(fast, x, 1, record=["outer", "inner"]).layers
    for name, relevance in lrpfx.attribute(direct, x, 1, record=["outer", "inner"]).layers.items():
        assert_close(recorded[name], relevance, 1e-10)


def test_shared_tensors_and_hooks():
    """A hook that replaces or overwrites what a layer returns is heard by the ReLU behind it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()
    explain_model = lrpfx.transform(model, EpsilonAlpha2Beta1Flat())
    x = torch.rand(2, 3, 6, 6)
    seen = []
    handle = explain_model.get_submodule("2").register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    lrpfx.attribute(explain_model, x, 1)
    handle.remove()
    assert (seen[0] < 0).any()  # the hook sees the layer's own output
    explain_model.get_submodule("2").register_forward_hook(lambda module, args, output: 2 * output)
    expected = model[5](model[4](F.relu(2 * model[2](model[1](model[0](x))))))
    torch.testing.assert_close(explain_model(x.requires_grad_()), expected)


def test_several_targets_behind_an_assigned_slice():
    """torch.export writes the end of a slice as the largest integer, for which torch.vmap has no derivative."""

    class Net(nn.Module):
        def forward(self, x):
            result = x.clone()
            result[:, 1:] = 2.0 * x[:, :-1]
            return result

    x, seeds = torch.randn(3, 4), torch.randn(2, 3, 4)
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlusFlat(), example_inputs=x, capture="export")
    together = lrpfx.attribute(explain_model, x, targets=seeds, chunk_size=2).relevance
    for relevance, seed in zip(together, seeds, strict=True):
        assert_close(relevance, lrpfx.attribute(explain_model, x, seed).relevance, 1e-14)


# --- rules that conserve -----------------------------------------------------------------------------------------------------


def depthwise():
    """Blocks as in MNASNet-0.5, with random weights and no biases: many of the depthwise kernels, of 2 x 2, have one sign."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(8, 16, 1, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 2, groups=16, bias=False), nn.ReLU()]
        layers += [nn.Conv2d(16, 8, 1, bias=False)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4
    return model.eval()


CONSERVING = {
    "plus": lambda conserve: EpsilonPlus(1e-12, 1e-12, conserve=conserve),
    "plus_flat": lambda conserve: EpsilonPlusFlat(1e-12, 1e-12, conserve=conserve),
    "alpha_beta": lambda conserve: EpsilonAlpha2Beta1(1e-12, 1e-12, conserve=conserve),
    "alpha_beta_flat": lambda conserve: EpsilonAlpha2Beta1Flat(1e-12, 1e-12, conserve=conserve),
}


@pytest.mark.parametrize("name", CONSERVING)
def test_the_whole_share_goes_to_the_other_sign(name):
    model, x = depthwise(), torch.rand(2, 3, 12, 12) - 0.3
    for optimize in (True, False):
        conserving = lrpfx.transform(model, CONSERVING[name](True), optimize=optimize)
        accounts = lrpfx.ledger(conserving, x, 0)
        assert abs(accounts.total("absent")) <= 1e-9 * accounts.seed_magnitude and accounts.unexplained <= 1e-9
        found = lrpfx.attribute(conserving, x, 0)
        assert_close(found.relevance.sum((1, 2, 3)), found.output[:, 0], 1e-7)
    accounts = lrpfx.ledger(lrpfx.transform(model, CONSERVING[name](False)), x, 0)
    assert abs(accounts.total("absent")) > 1e-2 * accounts.seed_magnitude and accounts.unexplained <= 1e-9


@pytest.mark.parametrize(
    "name", ["alpha_beta", *(pytest.param(one, marks=pytest.mark.slow) for one in CONSERVING if one != "alpha_beta")]
)
@pytest.mark.thorough
def test_all_ways_to_run_conserve_alike(name):
    model, x = depthwise(), torch.rand(2, 3, 12, 12)
    fast, direct = both(model, CONSERVING[name](True), input_range=(0.0, 1.0))
    expected = lrpfx.attribute(direct, x, targets=[0, 1, 2]).relevance
    for chunk_size in (None, 2):
        assert_close(lrpfx.attribute(fast, x, targets=[0, 1, 2], chunk_size=chunk_size).relevance, expected, 1e-10)
    program = lrpfx.lower(fast, x)
    assert_close(program.module()(x, torch.tensor([1, 1]))["relevance"], expected[1], 1e-10)
    with CONSERVING[name](True).context(model) as modified:
        leaf = x.clone().requires_grad_()
        output = modified(leaf)
        (relevance,) = torch.autograd.grad(output, leaf, output.detach() * torch.eye(3)[1])
    assert_close(relevance, expected[1], 1e-10)


@pytest.mark.parametrize("rule", [rules.AlphaBeta(3.0, 2.0), rules.Gamma(0.5)])
@pytest.mark.thorough
def test_lowered_shortcuts_weigh_their_branches_alike(rule):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), torch.randn(2, 3, 6, 6)
    fast, direct = both(model.eval(), OneRule(rule))
    expected = lrpfx.attribute(direct, x, 1).relevance
    assert_close(lrpfx.lower(fast, x).module()(x, torch.tensor([1, 1]))["relevance"], expected, 1e-10)


def test_conserving_is_off_by_default_and_shown_where_it_is_on():
    assert repr(rules.ZPlus()) == "ZPlus(stabilizer=1e-06)"
    assert repr(rules.AlphaBeta(conserve=True)) == "AlphaBeta(alpha=2, beta=1, stabilizer=1e-06, conserve=True)"
    assert rules.ZPlus(conserve=True).copy().conserve


def test_a_branch_of_rounding_errors_is_empty():
    """Convolutions that transform their input leave some units of rounding where they should give zero."""
    positive, negative = torch.tensor([1.0, 1.0, 1e-17, 0.0]), torch.tensor([-1e-17, -1e-3, -1.0, 0.0])
    of_positive, of_negative = weights_by_sign(positive, negative, 2.0, 1.0)
    assert of_positive.tolist() == [1.0, 2.0, 0.0, 1.0] and of_negative.tolist() == [0.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize("rule", ["ZPlus", "AlphaBeta", "Gamma", "Flat"])
def test_relevance_that_enters_at_a_rectified_output_is_not_only_where_it_is_positive(rule):
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU()).eval(), torch.rand(4, 6)
    fast, direct = both(model, OneRule(RULES[rule]), example_inputs=x, input_range=(0.0, 1.0))
    assert (model(x) == 0).any()
    expected = lrpfx.attribute(direct, x, torch.ones(4, 5)).relevance
    assert_close(lrpfx.attribute(fast, x, torch.ones(4, 5)).relevance, expected, 1e-10)
