"""Which layer gets which rule, and why."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import Layered, assert_close, small_net, torchvision_model
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.canonizers import SequentialMergeBatchNorm
from lrpfx.composites import (
    COMPOSITES,
    Composite,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    GammaByDepth,
    LayerMapComposite,
    MixedComposite,
    NameLayerMapComposite,
    NameMapComposite,
    composite_named,
    register_composite,
)
from lrpfx.errors import InputError, InputTypeError
from lrpfx.frontends.execution_order import modules_in_order_of_execution
from lrpfx.ir.mapping import MappingContext
from lrpfx.types import Activation, AvgPool, BatchNorm, Convolution, Linear, MaxPool, Neutral, Sum


def rules_of(composite, model=None, **settings):
    table = lrpfx.assignment(lrpfx.transform(model or small_net(), composite, **settings))
    return {row.name: row.rule.partition("(")[0] for row in table}


def test_the_registry_has_zennits_names_and_a_few_of_its_own():
    own = [name for name, composite in COMPOSITES.items() if composite.__module__ == "lrpfx.composites.built_in"]
    assert sorted(own) == [
        "attn_lrp",
        "beta_smooth",
        "cp_lrp",
        "deconvnet",
        "deep_lift",
        "epsilon_alpha2_beta1",
        "epsilon_alpha2_beta1_flat",
        "epsilon_gamma_box",
        "epsilon_plus",
        "epsilon_plus_flat",
        "excitation_backprop",
        "gamma_by_depth",
        "guided_backprop",
        "relp",
    ]
    assert isinstance(composite_named("epsilon_gamma_box", low=0.0, high=1.0), EpsilonGammaBox)


def test_registering_a_composite():
    @register_composite("only_epsilon")
    class OnlyEpsilon(LayerMapComposite):
        def __init__(self):
            super().__init__([(Linear, rules.Epsilon())])

    try:
        assert rules_of(composite_named("only_epsilon"), nn.Sequential(nn.Linear(2, 2)).eval())["0"] == "Epsilon"
    finally:
        del COMPOSITES["only_epsilon"]


EXPECTED = {
    "attn_lrp": ("Epsilon", "Epsilon", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "cp_lrp": ("Epsilon", "Epsilon", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "relp": ("Epsilon", "Epsilon", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_plus": ("ZPlus", "ZPlus", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_plus_flat": ("Flat", "ZPlus", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_alpha2_beta1": ("AlphaBeta", "AlphaBeta", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_alpha2_beta1_flat": ("Flat", "AlphaBeta", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_gamma_box": ("ZBox", "Gamma", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "gamma_by_depth": ("Gamma", "Gamma", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "excitation_backprop": ("ZPlus", "ZPlus", "ZPlus", "gradient", "Norm", "Norm", "gradient"),
    "deep_lift": ("Difference",) * 7,
    "deconvnet": ("gradient", "gradient", "gradient", "ReLUDeconvNet", "gradient", "gradient", "gradient"),
    "guided_backprop": ("gradient", "gradient", "gradient", "ReLUGuidedBackprop", "gradient", "gradient", "gradient"),
    "beta_smooth": ("gradient", "gradient", "gradient", "ReLUBetaSmooth", "gradient", "gradient", "gradient"),
}


@pytest.mark.parametrize("key", sorted(COMPOSITES))
@pytest.mark.sampled(3)
def test_built_in_composites(key):
    composite = composite_named(key, **({"low": -1.0, "high": 1.0} if key == "epsilon_gamma_box" else {}))
    assigned = rules_of(composite)
    assert tuple(assigned[name] for name in ("conv1", "conv2", "fc", "relu", "add", "average", "norm")) == EXPECTED[key]
    assert assigned["cat"] == assigned["flatten"] == "neutral"
    assert assigned["pool"] == ("Difference" if key == "deep_lift" else "neutral")
    assert assigned["relu"] == assigned["relu_1"]


def test_user_entries_stand_before_the_built_in_ones():
    composite = EpsilonPlus(layer_map=[(Convolution, rules.WSquare()), (MaxPool, rules.Norm())])
    assigned = rules_of(composite)
    assert assigned["conv1"] == "WSquare" and assigned["pool"] == "Norm" and assigned["fc"] == "Epsilon"


def test_first_match_wins_in_a_layer_map():
    layer_map = [(nn.Conv2d, rules.Flat()), (Linear, rules.Epsilon()), ((Activation, Sum, AvgPool, BatchNorm), rules.Norm())]
    assigned = rules_of(LayerMapComposite(layer_map))
    assert assigned["branch"] == "Flat" and assigned["fc"] == "Epsilon" and assigned["norm"] == "Norm"


def test_settings_of_the_rules():
    model = small_net()
    composite = EpsilonGammaBox(0.0, 1.0, epsilon=0.1, gamma=0.5, stabilizer=1e-3, zero_params="bias")
    table = lrpfx.assignment(lrpfx.transform(model, composite))
    assert table.rule_of("conv1") == "ZBox(low=0, high=1, stabilizer=0.001, zero_params='bias')"
    assert table.rule_of("conv2") == "Gamma(gamma=0.5, stabilizer=0.001, zero_params='bias')"
    assert table.rule_of("fc") == "Epsilon(epsilon=0.1, zero_params='bias')"
    assert table.rule_of("add") == "Norm(stabilizer=0.001)"


def test_globs_over_qualified_names():
    model = torchvision_model("resnet18")
    name_map = [
        (["layer1.*.conv2"], rules.Flat()),
        (["layer[23].*.add", "layer4.1.add"], rules.Norm(0.5)),
        (["layer?.0.downsample.0"], rules.WSquare()),
    ]
    composite = MixedComposite([NameMapComposite(name_map), EpsilonPlus()])
    table = lrpfx.assignment(lrpfx.transform(model, composite))
    by_rule = {}
    for row in table:
        by_rule.setdefault(row.rule.partition("(")[0], []).append(row.name)
    assert by_rule["Flat"] == ["layer1.0.conv2", "layer1.1.conv2"]
    assert by_rule["WSquare"] == [f"layer{n}.0.downsample.0" for n in (2, 3, 4)]
    halves = [row.name for row in table if row.rule == "Norm(stabilizer=0.5)"]
    assert halves == ["layer2.0.add", "layer2.1.add", "layer3.0.add", "layer3.1.add", "layer4.1.add"]
    assert "NameMapComposite, name_map: 'layer1.*.conv2'" in [row.chosen_by for row in table]


def test_names_reach_functions_and_every_call_of_a_module():
    composite = NameLayerMapComposite(
        name_map=[(["add", "cat"], rules.Epsilon()), (["relu"], rules.ReLUDeconvNet())],
        layer_map=[(Linear, rules.ZPlus()), (AvgPool, rules.Norm()), (BatchNorm, rules.Pass())],
    )
    assigned = rules_of(composite)
    assert assigned["add"] == assigned["cat"] == "Epsilon"
    assert assigned["relu"] == assigned["relu_1"] == "ReLUDeconvNet"


def test_a_call_can_be_told_from_the_others_by_name():
    layer_map = [(Linear, rules.ZPlus()), ((AvgPool, Sum), rules.Norm()), (BatchNorm, rules.Pass())]
    composite = NameLayerMapComposite([(["relu"], rules.Pass()), (["relu_1"], rules.ReLUDeconvNet())], layer_map)
    assigned = rules_of(composite)
    assert assigned["relu"] == "Pass" and assigned["relu_1"] == "ReLUDeconvNet"


def test_mixed_composites_ask_all_and_take_the_first():
    """Also the composite that loses keeps counting: its first layer is gone after the first convolution."""
    flat_first = lrpfx.composites.EpsilonPlusFlat()
    composite = MixedComposite([NameMapComposite([(["conv1"], rules.WSquare())]), flat_first])
    assigned = rules_of(composite)
    assert assigned["conv1"] == "WSquare" and assigned["conv2"] == "ZPlus"


def test_a_function_as_a_composite():
    """Code written for modules works on layers: isinstance, names and a context."""

    def module_map(ctx, name, module):
        if isinstance(module, nn.Conv2d) and not ctx.get("seen"):
            ctx["seen"] = True
            return rules.Flat()
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            return rules.Epsilon()
        if isinstance(module, (Activation, BatchNorm)):
            return rules.Pass()
        if isinstance(module, (Sum, AvgPool)):
            return rules.Norm()
        return None

    assigned = rules_of(Composite(module_map))
    assert [assigned[name] for name in ("conv1", "conv2", "fc", "add")] == ["Flat", "Epsilon", "Epsilon", "Norm"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.tanh(self.norm(self.fc(x))) * 2.0


@pytest.mark.parametrize("rule", [rules.Epsilon(), rules.ZPlus(), rules.Flat()])
@pytest.mark.thorough
def test_a_module_as_a_whole(rule):
    """A block that a composite maps by class or by name is one opaque layer; its parameters stay where they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    by_class = EpsilonPlus(layer_map=[(Block, rule)])
    by_name = MixedComposite([NameMapComposite([(["1"], rule)]), EpsilonPlus()])
    results = []
    for composite in (by_class, by_name):
        explain_model = lrpfx.transform(model, composite)
        assert list(explain_model.state_dict()) == list(model.state_dict())
        assert lrpfx.node_names(explain_model) == ["input", "0", "1", "2"]
        assert torch.equal(explain_model(x), model(x))
        results.append(lrpfx.attribute(explain_model, x, 0).relevance)
        assert "1" in lrpfx.node_names(lrpfx.transform(model.double(), composite))
    assert torch.equal(*results)
    compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(lrpfx.attribute(compiled, x, 0).relevance, results[-1])
    if isinstance(rule, rules.Epsilon):
        hidden = model[0](x).detach().requires_grad_()
        output = model[1](hidden)
        above = output.detach() * 0 + lrpfx.attribute(explain_model, x, 0, record=["1"]).layers["1"]
        expected = hidden * torch.autograd.grad(output, hidden, above / (output + 1e-6 * output.sign()).detach())[0]
        at_hidden = lrpfx.attribute(explain_model, x, 0, record=["0"]).layers["0"]
        torch.testing.assert_close(at_hidden, expected.detach())


@pytest.mark.parametrize(
    "kind, yes, no",
    [
        (Linear, (nn.Linear(1, 1), nn.Conv1d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1)), (nn.ReLU(), nn.BatchNorm1d(1))),
        (Convolution, (nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)), (nn.Linear(1, 1),)),
        (Activation, (nn.ReLU(), nn.ReLU6(), nn.GELU(), nn.Mish(), nn.PReLU()), (nn.Softmax(), nn.Dropout())),
        (AvgPool, (nn.AvgPool1d(1), nn.AdaptiveAvgPool3d(1)), (nn.MaxPool1d(1),)),
        (Sum, (lrpfx.layer.Sum(),), (nn.Identity(),)),
    ],
)
def test_kinds_hold_for_modules(kind, yes, no):
    assert all(isinstance(module, kind) and issubclass(type(module), kind) for module in yes)
    assert not any(isinstance(module, kind) or issubclass(type(module), kind) for module in no)
    assert not issubclass(kind, Neutral)


@pytest.mark.parametrize("name", ["epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "epsilon_alpha2_beta1_flat"])
def test_composites_hand_on_that_they_conserve(name):
    layer = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 1)).eval()
    for conserve in (True, False):
        composite = composite_named(name, conserve=conserve)
        context = {"first_layer_visited": True}
        assert composite.module_map(context, "1", layer[1]).conserve is conserve


class Deep(nn.Module):
    """Convolutions registered in another order than they are called in: one twice, one never, one transposed."""

    def __init__(self):
        super().__init__()
        self.last = nn.Conv2d(4, 4, 2)
        self.unused = nn.Conv2d(4, 4, 1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.stem = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = self.twice(x).relu()
        x = self.twice(self.up(x)).relu()
        return self.fc(self.last(x).relu().mean((2, 3)))


class DeepModules(Deep):
    """The same with modules for all operations, for module mode."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.average = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        x = self.relu(self.twice(x))
        x = self.relu(self.twice(self.up(x)))
        return self.fc(self.average(self.relu(self.last(x))).flatten(1))


def deep(kind):
    torch.manual_seed(0)
    model = kind().double().eval()
    nn.init.uniform_(model.norm.running_mean, -0.5, 0.5)
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    return model


def by_hand(gammas, first=None):
    names = [([name], rules.Gamma(gamma)) for name, gamma in gammas.items()]
    if first is not None:
        names.insert(0, ([next(iter(gammas))], first))
    return MixedComposite([NameMapComposite(names), EpsilonPlus()])


BOUNDS = {"low": -1.0, "high": 2.0}


@pytest.mark.parametrize("bounds", [{}, BOUNDS])
def test_gamma_falls_with_depth_in_a_graph(bounds):
    """Each call has its position, in the order of execution; the values are those of the same rules given by name."""
    model, x = deep(Deep), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    explain_model = lrpfx.transform(model, GammaByDepth(early=2.0, late=0.02, **bounds))
    gammas = {name: 2.0 ** (1 - depth) * 0.02**depth for name, depth in _depths("stem", "twice", "up", "twice_1", "last")}
    reference = lrpfx.transform(model, by_hand(gammas, rules.ZBox(**bounds) if bounds else None))
    table, expected = lrpfx.assignment(explain_model), lrpfx.assignment(reference)
    assert [row.rule for row in table] == [row.rule for row in expected]
    found, wanted = lrpfx.attribute(explain_model, x, [0, 2]), lrpfx.attribute(reference, x, [0, 2])
    assert torch.equal(found.relevance, wanted.relevance) and float(found.relevance.abs().sum()) > 0.0
    assert table.rule_of("stem").startswith("ZBox" if bounds else "Gamma(gamma=2,")
    assert table.rule_of("last").startswith("Gamma(gamma=0.02,")


def _depths(*names):
    return [(name, position / (len(names) - 1)) for position, name in enumerate(names)]


@pytest.mark.parametrize("bounds", [{}, BOUNDS])
def test_gamma_falls_with_depth_in_module_mode(bounds):
    """A module has the position of its first call; one that is not called takes none; batch norm is merged first."""
    model, x = deep(DeepModules), torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    gammas = {name: 2.0 ** (1 - depth) * 0.02**depth for name, depth in _depths("stem", "twice", "up", "last")}
    gammas["unused"] = 0.02
    composite = GammaByDepth(early=2.0, late=0.02, canonizers=[SequentialMergeBatchNorm()], **bounds)
    reference = by_hand(gammas, rules.ZBox(**bounds) if bounds else None)
    reference.canonizers = [SequentialMergeBatchNorm()]
    results = []
    for one in (composite, reference):
        with one.context(model) as modified:
            output = modified(x)
            results.append(torch.autograd.grad(output, x, torch.eye(3, dtype=output.dtype)[:2] * output.detach())[0])
    assert torch.equal(*results) and float(results[0].abs().sum()) > 0.0


class Masked(nn.Module):
    """A convolution that makes a mask, and runs first; two others; and one that is not called."""

    def __init__(self):
        super().__init__()
        self.mask, self.stem, self.last, self.unused = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))
        self.double().eval()

    def forward(self, x):
        visible = (self.mask(x) > 0).to(x.dtype)
        return self.last(torch.relu(self.stem(x * visible))).mean((2, 3))


def test_a_layer_that_makes_a_mask_is_not_the_first():
    model = Masked()
    table = lrpfx.assignment(lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat()))
    assert [table.rule_of(name).partition("(")[0] for name in ("mask", "stem", "last")] == ["ZPlus", "Flat", "ZPlus"]
    table = lrpfx.assignment(lrpfx.transform(model, GammaByDepth(2.0, 0.5)))
    assert [table.rule_of(name).partition(",")[0] for name in ("stem", "last")] == ["Gamma(gamma=2", "Gamma(gamma=0.5"]
    assert {row.name: row.chosen_by for row in table}["mask"] == "a convolution that gets no relevance: late"
    run, others = modules_in_order_of_execution(model)
    assert [name for name, _ in run] == ["stem", "last"] and {"mask", "unused"} <= {name for name, _ in others}


class Measured(Masked):
    """The same, where only the size of what the first convolution gives is read."""

    def forward(self, x):
        return self.last(torch.relu(self.stem(x[..., : self.mask(x).shape[-1] - 1]))).mean((2, 3))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("network", [Masked, Measured])
def test_both_front_ends_have_one_first_layer(network, capture):
    model, x = network(), torch.randn(2, 2, 5, 5, dtype=torch.float64)
    table = lrpfx.assignment(lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat(), example_inputs=x, capture=capture))
    assert [row.name for row in table if row.rule.startswith("Flat")] == ["stem"]


def test_both_modes_agree_where_each_module_is_called_once():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten()
    )
    model, x = model.double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    in_graph = lrpfx.attribute(lrpfx.transform(model, GammaByDepth(low=-3.0, high=3.0)), x, 1).relevance
    with GammaByDepth(low=-3.0, high=3.0, canonizers=[SequentialMergeBatchNorm()]).context(model) as modified:
        output = modified(x)
        seed = torch.zeros_like(output)
        seed[:, 1] = output[:, 1].detach()
        torch.testing.assert_close(torch.autograd.grad(output, x, seed)[0], in_graph, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bounds", [{}, BOUNDS])
def test_gamma_by_depth_conserves_relevance(bounds):
    """Without biases, nothing is absorbed: the relevance of the input is the logit."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(4, 3, 5, bias=False), nn.Flatten(), nn.Linear(3, 2, bias=False)).double().eval()
    explain_model = lrpfx.transform(model, GammaByDepth(stabilizer=1e-12, epsilon=1e-12, **bounds))
    accounts = lrpfx.ledger(explain_model, torch.rand(2, 3, 6, 6, dtype=torch.float64), 0)
    assert accounts.inputs["input"] == pytest.approx(accounts.seed, rel=1e-9)


def test_reasons_give_position_and_gamma():
    reasons = {row.name: row.chosen_by for row in lrpfx.assignment(lrpfx.transform(deep(Deep), GammaByDepth(1.0, 0.01)))}
    assert reasons["stem"] == "convolution 1 of 5: gamma 1"
    assert reasons["up"] == "convolution 3 of 5: gamma 0.1"
    assert reasons["last"] == "convolution 5 of 5: gamma 0.01"
    assert reasons["fc"].startswith("layer_map")
    mixed = MixedComposite([NameMapComposite([(["twice"], rules.WSquare())]), GammaByDepth(1.0, 0.01, **BOUNDS)])
    table = lrpfx.assignment(lrpfx.transform(deep(Deep), mixed))
    reasons = {row.name: row.chosen_by for row in table}
    assert reasons["up"] == "GammaByDepth, convolution 3 of 5: gamma 0.1"
    assert reasons["stem"] == "GammaByDepth, first_map[0]: Linear"
    assert table.rule_of("twice").startswith("WSquare") and table.rule_of("twice_1").startswith("WSquare")


def test_one_convolution_alone_is_early():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)).eval()
    assert lrpfx.assignment(lrpfx.transform(model, GammaByDepth(0.7, 0.1))).rule_of("0").startswith("Gamma(gamma=0.7,")
    assert rules_of(GammaByDepth(), nn.Sequential(nn.Linear(2, 2)).eval())["0"] == "Epsilon"


def test_bounds_of_the_input_are_for_the_layer_that_reads_it():
    """Behind a dense layer, a convolution does not see pixels; its gamma is the early one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Conv1d(2, 2, 2)).eval()
    table = lrpfx.assignment(lrpfx.transform(model, GammaByDepth(**BOUNDS), example_inputs=torch.rand(2, 4)))
    assert [table.rule_of(name).partition(",")[0] for name in "034"] == ["ZBox(low=-1", "Gamma(gamma=1", "Gamma(gamma=0.05"]


def test_users_entries_do_not_move_the_positions():
    composite = GammaByDepth(layer_map=[(nn.ConvTranspose2d, rules.ZPlus())], first_map=[(Convolution, rules.Flat())])
    table = lrpfx.assignment(lrpfx.transform(deep(Deep), composite))
    assert table.rule_of("stem").startswith("Flat") and table.rule_of("up").startswith("ZPlus")
    assert table.rule_of("twice_1").startswith(f"Gamma(gamma={0.05**0.75:g},")


def test_settings_of_gamma_by_depth():
    model = deep(Deep)
    composite = GammaByDepth(early=np.float32(0.5), late=3, epsilon=0.1, stabilizer=1e-3, zero_params="bias", **BOUNDS)
    table = lrpfx.assignment(lrpfx.transform(model, composite))
    assert table.rule_of("stem") == "ZBox(low=-1, high=2, stabilizer=0.001, zero_params='bias')"
    assert table.rule_of("last") == "Gamma(gamma=3, stabilizer=0.001, zero_params='bias')"
    assert table.rule_of("fc") == "Epsilon(epsilon=0.1, zero_params='bias')"


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"early": 0.0}, InputError, "early must be a positive number, not 0"),
        ({"late": -0.1}, InputError, "late must be a positive number, not -0.1"),
        ({"late": math.inf}, InputError, "late must be a finite number, not inf"),
        ({"early": math.nan}, InputError, "early must be a finite number, not nan"),
        ({"early": "1"}, InputTypeError, "early must be a finite number, not '1'"),
        ({"early": True}, InputTypeError, "early must be a finite number, not True"),
        ({"low": 0.0}, InputError, "low and high bound the input together: high is missing"),
        ({"high": 1.0}, InputError, "low and high bound the input together: low is missing"),
        ({"low": 1.0, "high": 0.0}, InputError, "low must be at most high"),
    ],
)
def test_gamma_by_depth_refuses_what_it_cannot_mean(settings, error, message):
    with pytest.raises(error, match=message):
        GammaByDepth(**settings)


def test_gamma_by_depth_needs_to_know_all_layers():
    layer = nn.Conv2d(1, 1, 1)
    for context in ({}, MappingContext()):
        with pytest.raises(InputError, match=r"give module_map a MappingContext\(layers\)"):
            GammaByDepth().module_map(context, "0", layer)
    context = MappingContext([("0", layer)])
    assert GammaByDepth().module_map(context, "0", layer).gamma == 1.0


def test_a_composite_sees_all_layers_in_the_order_of_execution():
    """In a graph, all calls that relevance flows through; of modules, those that run; all in a model that cannot be traced."""

    class Seen(EpsilonPlus):
        depends_on_order = True

        def mapping(self, ctx, name, module):
            assert (name, module) in ctx.layers or name in ("", "unused")
            self.names = [layer for layer, _ in ctx.layers]
            return super().mapping(ctx, name, module)

    composite = Seen()
    explain_model = lrpfx.transform(deep(Deep), composite)
    assert composite.names == lrpfx.node_names(explain_model)[1:]
    model = deep(DeepModules)
    with composite.context(model):
        assert composite.names == ["stem", "norm", "relu", "twice", "up", "last", "average", "fc"]

    class Branching(DeepModules):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    model = deep(Branching)
    with composite.context(model):
        assert composite.names == [name for name, _ in model.named_modules()]


@pytest.mark.parametrize(
    ("composite", "text"),
    [
        (EpsilonPlus(), "EpsilonPlus()"),
        (EpsilonPlus(1e-6), "EpsilonPlus()"),
        (GammaByDepth(2, late=0.1, low=-1.0, high=1.0), "GammaByDepth(early=2, late=0.1, low=-1, high=1)"),
        (
            GammaByDepth(low=torch.tensor([-2.0, -1.5, 0.0]), high=torch.ones(3)),
            "GammaByDepth(low=(-2, -1.5, 0), high=1)",
        ),
        (lrpfx.composites.MixedComposite([EpsilonPlus(0.5)]), "MixedComposite(composites=[EpsilonPlus(epsilon=0.5)])"),
        (LayerMapComposite([(nn.Linear, rules.Epsilon())]), "LayerMapComposite(layer_map=[1 entry])"),
    ],
)
def test_what_a_composite_says_of_itself(composite, text):
    assert repr(composite) == text and repr(copy.deepcopy(composite)) == text


def test_all_calls_of_the_first_layer_have_the_rule_of_the_first():
    class Twice(Layered):
        def forward(self, one, other):
            return self.last(torch.relu(self.first(one)) + torch.relu(self.first(other)))

    model, inputs = Twice(first=nn.Linear(3, 4), last=nn.Linear(4, 2)), (torch.randn(2, 3), torch.randn(2, 3))
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=inputs)
    rules = [lrpfx.assignment(explain_model).rule_of(name) for name in ("first", "first_1", "last")]
    assert [rule.partition("(")[0] for rule in rules] == ["Flat", "Flat", "Epsilon"]
    found = lrpfx.attribute(explain_model, inputs, 1).relevance
    exchanged = lrpfx.attribute(explain_model, inputs[::-1], 1).relevance
    assert_close(found[0], exchanged[1], 1e-12)
