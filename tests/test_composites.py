"""Which layer gets which rule, and why."""

import pytest
import torch
from helpers import small_net, torchvision_model
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import (
    COMPOSITES,
    Composite,
    EpsilonGammaBox,
    EpsilonPlus,
    LayerMapComposite,
    MixedComposite,
    NameLayerMapComposite,
    NameMapComposite,
    composite_named,
    register_composite,
)
from lrpfx.types import Activation, AvgPool, BatchNorm, Convolution, Linear, MaxPool, Neutral, Sum


def rules_of(composite, model=None, **settings):
    table = lrpfx.assignment(lrpfx.transform(model or small_net(), composite, **settings))
    return {row.name: row.rule.partition("(")[0] for row in table}


def test_the_registry_has_zennits_names_and_those_for_attention():
    own = [name for name, composite in COMPOSITES.items() if composite.__module__ == "lrpfx.composites"]
    assert sorted(own) == [
        "attn_lrp",
        "beta_smooth",
        "cp_lrp",
        "deconvnet",
        "epsilon_alpha2_beta1",
        "epsilon_alpha2_beta1_flat",
        "epsilon_gamma_box",
        "epsilon_plus",
        "epsilon_plus_flat",
        "excitation_backprop",
        "guided_backprop",
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
    "epsilon_plus": ("ZPlus", "ZPlus", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_plus_flat": ("Flat", "ZPlus", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_alpha2_beta1": ("AlphaBeta", "AlphaBeta", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_alpha2_beta1_flat": ("Flat", "AlphaBeta", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "epsilon_gamma_box": ("ZBox", "Gamma", "Epsilon", "Pass", "Norm", "Norm", "Pass"),
    "excitation_backprop": ("ZPlus", "ZPlus", "ZPlus", "gradient", "Norm", "Norm", "gradient"),
    "deconvnet": ("gradient", "gradient", "gradient", "ReLUDeconvNet", "gradient", "gradient", "gradient"),
    "guided_backprop": ("gradient", "gradient", "gradient", "ReLUGuidedBackprop", "gradient", "gradient", "gradient"),
    "beta_smooth": ("gradient", "gradient", "gradient", "ReLUBetaSmooth", "gradient", "gradient", "gradient"),
}


@pytest.mark.parametrize("key", sorted(COMPOSITES))
def test_built_in_composites(key):
    composite = composite_named(key, **({"low": -1.0, "high": 1.0} if key == "epsilon_gamma_box" else {}))
    assigned = rules_of(composite)
    assert tuple(assigned[name] for name in ("conv1", "conv2", "fc", "relu", "add", "average", "norm")) == EXPECTED[key]
    assert all(assigned[name] == "neutral" for name in ("cat", "pool", "flatten"))
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
