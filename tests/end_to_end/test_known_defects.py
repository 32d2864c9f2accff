"""Defects of other libraries in this field, each as a test of the right result."""

import pytest
import torch
from helpers import Binary, Layered, Unary, assert_close, randomize_batch_norm, small_net
from reference import dense
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat, LayerMapComposite, SpecialFirstLayerMapComposite
from lrpfx.rules import AlphaBeta, Epsilon, Flat, Gamma, Norm, Pass, WSquare, ZBox, ZPlus
from lrpfx.types import Activation, BatchNorm, Linear, Sum

LRP = [(Activation, Pass()), (Linear, Epsilon()), (Sum, Norm())]


def relevance_of(model, input, composite=None, target=0):
    return lrpfx.attribute(lrpfx.transform(model, composite or LayerMapComposite(LRP)), input, target).relevance


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.linear(self.relu(self.linear(x))))


class CalledApart(nn.Module):
    """The same network with a layer for each call."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for linear in (self.first, self.second):
            linear.load_state_dict(shared.linear.state_dict())

    def forward(self, x):
        return self.second(self.first(x).relu()).relu()


def without_warning(composite):
    composite._defaults = len(composite.layer_map)
    return composite


@pytest.mark.parametrize("rule", [Epsilon(), ZPlus(), AlphaBeta(), Gamma(), ZBox(-5.0, 5.0), WSquare(), Flat()])
def test_layer_called_twice(rule):
    """Each call is attributed with its own input."""
    model, x = CalledTwice().eval(), torch.randn(3, 4)
    composite = LayerMapComposite([(Activation, Pass()), (Linear, rule)])
    explain_model = lrpfx.transform(model, composite)
    assert lrpfx.node_names(explain_model) == ["x", "linear", "relu", "linear_1", "relu_1"]
    actual = lrpfx.attribute(explain_model, x, torch.ones(3, 4)).relevance
    expected = relevance_of(CalledApart(model).eval(), x, composite, torch.ones(3, 4))
    assert_close(actual, expected, 1e-13)


def test_two_calls_of_one_module_can_have_two_rules():
    model, x = CalledTwice().eval(), torch.randn(3, 4)
    composite = lrpfx.composites.NameLayerMapComposite([(["linear_1"], ZPlus()), (["linear"], Flat())], LRP[:1])
    explain_model = lrpfx.transform(model, composite)
    table = lrpfx.assignment(explain_model)
    assert table.rule_of("linear").startswith("Flat") and table.rule_of("linear_1").startswith("ZPlus")
    apart = lrpfx.composites.NameLayerMapComposite([(["second"], ZPlus()), (["first"], Flat())], LRP[:1])
    expected = relevance_of(CalledApart(model).eval(), x, apart, torch.ones(3, 4))
    assert_close(lrpfx.attribute(explain_model, x, torch.ones(3, 4)).relevance, expected, 1e-13)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x).relu())


def test_weight_tying():
    model, x = Tied().eval(), torch.randn(3, 4)
    composite = EpsilonPlusFlat(layer_map=[(Linear, ZPlus())])
    explain_model = lrpfx.transform(model, composite)
    assert explain_model.get_parameter("encode.weight") is explain_model.get_parameter("decode.weight")
    assert list(explain_model.state_dict()) == ["encode.weight", "decode.weight"]
    untied = Tied().eval()
    untied.encode.weight = nn.Parameter(model.encode.weight.detach().clone())
    untied.decode.weight = nn.Parameter(model.encode.weight.detach().clone())
    assert_close(lrpfx.attribute(explain_model, x, 0).relevance, relevance_of(untied, x, composite), 1e-13)


def test_two_operands_each_get_their_share():
    """D2, and plain `+` that doubles relevance."""
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    relevances = lrpfx.attribute(lrpfx.transform(Binary(lambda a, b: a + b), EpsilonPlus()), (a, b), 0).relevance
    total = relevances[0].sum(1) + relevances[1].sum(1)
    assert_close(total, (a + b)[:, 0], 1e-5)


def test_value_added_to_itself():
    x = torch.randn(2, 3)
    for function in (lambda x: x + x, lambda x: torch.add(x, x), lambda x: torch.add(x, other=x)):
        explain_model = lrpfx.transform(Unary(function), EpsilonPlus())
        attribution = lrpfx.attribute(explain_model, x, 1)
        assert_close(attribution.output, 2 * x, 1e-15)
        expected = 2 * x * F.one_hot(torch.tensor([1, 1]), 3) * (2 * x) / dense.stabilized(2 * x)
        assert_close(attribution.relevance, expected, 1e-12)
        compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
        assert_close(lrpfx.attribute(compiled, x, 1).relevance, expected, 1e-12)


class Residual(Layered):
    def forward(self, x):
        y = self.second(self.first(x).relu())
        return self.head(x + y)


def test_residual_sum_conserves_relevance_without_a_canonizer():
    model, x = (
        Residual(first=nn.Linear(4, 4, False), second=nn.Linear(4, 4, False), head=nn.Linear(4, 2, False)),
        torch.randn(3, 4),
    )
    assert_close(relevance_of(model, x, target=1).sum(1), model(x)[:, 1].detach(), 1e-4)


class Keywords(Layered):
    def forward(self, image):
        return self.fc(input=torch.flatten(input=self.conv(input=image), start_dim=1))


def test_keyword_tensors():
    model, image = Keywords(conv=nn.Conv2d(2, 3, 3), fc=nn.Linear(12, 2)), torch.randn(2, 2, 4, 4)
    positional = nn.Sequential(model.conv, nn.Flatten(), model.fc).eval()
    composite = without_warning(EpsilonPlusFlat())
    expected = relevance_of(positional, image, composite)
    explain_model = lrpfx.transform(model, composite)
    assert_close(lrpfx.attribute(explain_model, image, 0).relevance, expected, 1e-13)
    by_name = lrpfx.attribute(explain_model, {"image": image}, 0).relevance
    assert list(by_name) == ["image"]
    assert_close(by_name["image"], expected, 1e-13)


@pytest.mark.parametrize("rule", [ZPlus(), Gamma(), AlphaBeta(), WSquare(), Epsilon()])
@pytest.mark.parametrize("normalize", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_computed_weights(normalize, rule):
    """Weights that are computed from parameters are modified like any others, and follow them."""
    layer = normalize(nn.Conv2d(2, 3, 3))
    plain = nn.Conv2d(2, 3, 3)
    plain.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    x, output_relevance = torch.randn(2, 2, 5, 5), torch.randn(2, 3, 3, 3)
    composite = LayerMapComposite([(Linear, rule)])
    model = nn.Sequential(layer).eval()
    keys = list(model.state_dict())
    explain_model = lrpfx.transform(model, composite)
    assert list(explain_model.state_dict()) == keys
    expected = lrpfx.transform(nn.Sequential(plain).eval(), composite)
    assert_close(
        lrpfx.attribute(explain_model, x, output_relevance).relevance,
        lrpfx.attribute(expected, x, output_relevance).relevance,
        1e-12,
    )
    names = [name for name, _ in explain_model.named_parameters() if name.endswith(("weight_g", "original0"))]
    with torch.no_grad():
        explain_model.get_parameter(names[0]).mul_(3.0)
        plain.weight.mul_(3.0)
    explain_model.refold()
    assert_close(explain_model(x), plain(x), 1e-12)


def test_functional_relu_gets_the_rule_of_relu():
    """D8: what is no module is seen all the same."""

    class Net(nn.Module):
        def __init__(self, relu):
            super().__init__()
            self.conv, self.fc, self.relu = nn.Conv2d(1, 2, 3), nn.Linear(18, 2), relu

        def forward(self, x):
            return self.fc(self.relu(self.conv(x)).flatten(1))

    x, net = torch.randn(2, 1, 5, 5), Net(nn.ReLU()).eval()
    for composite in (lrpfx.composites.DeconvNet(), lrpfx.composites.GuidedBackprop(), lrpfx.composites.BetaSmooth()):
        expected = relevance_of(net, x, composite)
        for relu in (F.relu, torch.relu, lambda x: x.relu_()):
            functional = Net(nn.ReLU()).eval()
            functional.load_state_dict(net.state_dict())
            functional.relu = None
            del functional.relu
            functional.relu = relu
            assert_close(relevance_of(functional, x, composite), expected, 1e-13)


def test_first_layer_is_the_first_in_execution():
    """D10: here the last layer is registered first."""

    class Backwards(Layered):
        def forward(self, x):
            return self.head(self.body(x).relu())

    table = lrpfx.assignment(lrpfx.transform(Backwards(head=nn.Linear(4, 2), body=nn.Linear(3, 4)), EpsilonPlusFlat()))
    assert table.rule_of("body").startswith("Flat") and table.rule_of("head").startswith("Epsilon")


def test_user_entries_come_first_for_the_first_layer():
    composite = SpecialFirstLayerMapComposite(layer_map=LRP[:2], first_map=[(nn.Linear, ZPlus())])
    table = lrpfx.assignment(lrpfx.transform(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval(), composite))
    assert [row.rule.partition("(")[0] for row in table] == ["input", "ZPlus", "Pass", "Epsilon"]
    assert [row.chosen_by for row in table][1:] == ["first_map[0]: Linear", "layer_map[0]: Activation", "layer_map[1]: Linear"]


@pytest.mark.parametrize("rule", [Epsilon(), ZPlus(), Gamma(), AlphaBeta()])
def test_inplace_relu_after_a_rule_that_saves_its_output(rule):
    layers = [nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 2), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers).eval()
    out_of_place = nn.Sequential(layers[0], nn.ReLU(), layers[2], layers[3], nn.ReLU()).eval()
    composite = LayerMapComposite([(Activation, Pass()), (Linear, rule)])
    x = torch.randn(2, 1, 5, 5)
    assert_close(relevance_of(model, x, composite), relevance_of(out_of_place, x, composite), 1e-14)


def test_inplace_operations_reach_later_readers():
    """In eager code the skip connection sees the overwritten value."""

    class Overwrites(nn.Module):
        def forward(self, x):
            y = x + 1.0
            z = y
            y += x
            torch.relu_(y)
            return z + y

    model, x = Overwrites().eval(), torch.randn(3, 4)
    explain_model = lrpfx.transform(model, LayerMapComposite(LRP[:1] + LRP[2:]), example_inputs=x)
    assert torch.equal(explain_model(x), model(x))


@pytest.mark.parametrize("rule", [Epsilon(), ZPlus(), AlphaBeta(), Gamma()])
def test_conservation_without_bias(rule):
    """What leaves a layer without bias is what came in, up to the stabilizer."""
    model, x = nn.Sequential(nn.Linear(6, 4, bias=False)).eval(), torch.randn(3, 6)
    output_relevance = torch.rand(3, 4)
    relevance = relevance_of(model, x, LayerMapComposite([(Linear, rule)]), output_relevance)
    if isinstance(rule, AlphaBeta):  # conserves only where there are contributions of both signs
        W = model[0].weight
        both = ((dense.positive(W) @ dense.positive(x).T + dense.negative(W) @ dense.negative(x).T) > 0).T
        assert both.all()
    assert_close(relevance.sum(1), output_relevance.sum(1), 1e-4)


def test_bias_absorbs_its_share():
    model, x = nn.Sequential(nn.Linear(6, 4)).eval(), torch.randn(3, 6)
    output_relevance = torch.rand(3, 4)
    relevance = relevance_of(model, x, LayerMapComposite([(Linear, Epsilon(1e-12))]), output_relevance)
    absorbed = (model[0].bias * output_relevance / model(x)).sum(1).detach()
    assert_close(relevance.sum(1), output_relevance.sum(1) - absorbed, 1e-8)


def test_gamma_never_amplifies_on_signed_input():
    """The denominators keep the sign of z, however close to zero z is."""
    layer = nn.Linear(50, 200)
    x = torch.randn(20, 50)
    relevance = relevance_of(nn.Sequential(layer).eval(), x, LayerMapComposite([(Linear, Gamma(0.25))]), layer(x).detach())
    assert relevance.abs().sum() <= 10 * layer(x).abs().sum()


def test_stabilizer_is_odd_around_zero():
    z = torch.linspace(0.0, 1e-5, 10001)
    stabilizer = Epsilon(1e-6).epsilon
    assert stabilizer(z).min() == stabilizer(-z[:1]) == 1e-6  # zero counts as positive, whatever its sign bit
    assert torch.equal(stabilizer(-z[1:]), -stabilizer(z[1:]))


@pytest.mark.filterwarnings("ignore:the map does not add up")  # norms keep their plain gradient
@pytest.mark.parametrize("key", sorted(lrpfx.composites.COMPOSITES))
@pytest.mark.sampled(3)
def test_samples_do_not_depend_on_their_batch(key):
    bounds = (-4.0, 4.0) if key == "epsilon_gamma_box" else ()
    explain_model = lrpfx.transform(small_net(), lrpfx.composites.COMPOSITES[key](*bounds))
    x, reference = torch.randn(4, 3, 8, 8), 0.0 if key == "deep_lift" else None
    together = lrpfx.attribute(explain_model, x, 1, reference=reference).relevance
    alone = torch.cat([lrpfx.attribute(explain_model, sample[None], 1, reference=reference).relevance for sample in x])
    assert_close(together, alone, 1e-12)


@pytest.mark.parametrize("rule", [Epsilon(), Norm(), ZPlus(), AlphaBeta(), Gamma(), ZBox(-1.0, 1.0), WSquare(), Flat()])
def test_every_rule_runs_on_every_kind_of_layer(rule):
    """Rules are not tied to linear layers: pooling, sums, batch norm and activations take them too."""
    layers = [nn.AvgPool2d(2), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Softplus(), nn.PReLU(), nn.Flatten(), lrpfx.layer.Sum(2)]
    for layer in layers:
        model, x = nn.Sequential(layer).eval(), torch.randn(2, 3, 4, 4)
        composite = lrpfx.composites.NameMapComposite([(["0", "sum"], rule)])
        with pytest.warns(lrpfx.LrpfxWarning, match="match no layer"):
            explain_model = lrpfx.transform(model, composite)
        relevance = lrpfx.attribute(explain_model, x, lambda output: output).relevance
        assert relevance.shape == x.shape and torch.isfinite(relevance).all()


@pytest.mark.parametrize("layer", [lambda: nn.LayerNorm(4), lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)])
def test_relevance_through_normalization_and_attention_is_accounted_for(layer):
    """D5 and D6: a plain gradient through these loses or invents relevance."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), layer()).eval(), torch.randn(2, 3, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    seed = torch.rand(2, 3, 4)
    accounts, result = lrpfx.ledger(explain_model, x, seed), lrpfx.attribute(explain_model, x, seed)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
    absorbed = sum(accounts.total(part) for part in lrpfx.attribution.ledger.PARTS)
    assert_close(result.relevance.sum() + absorbed, seed.sum(), 1e-9)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf), leaf, seed)
    assert abs((gradient * x).sum() - seed.sum()) > 1e-2, "the plain gradient does not sum to it"


def test_functional_gelu_has_the_rule_of_its_kind():
    """D8."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 2, bias=False)).eval()

    class Functional(Layered):
        def forward(self, x):
            return self.layers[2](nn.functional.gelu(self.layers[0](x)))

    x, seed = torch.randn(3, 4), torch.randn(3, 2)
    results = [
        lrpfx.attribute(lrpfx.transform(net.eval(), EpsilonPlus()), x, seed).relevance
        for net in (model, Functional(layers=model))
    ]
    assert torch.equal(*results)
    assert_close(results[0].sum(), seed.sum(), 1e-4)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dims", [(1,), (1, 2), (-1, 0), None])
def test_means_over_several_dimensions(dims, keepdim):
    x = torch.randn(2, 3, 4)
    mean = (lambda x: x.mean()) if dims is None else (lambda x: x.mean(dims, keepdim=keepdim))
    explain_model = lrpfx.transform(Unary(mean), EpsilonPlus(stabilizer=1e-12), example_inputs=x)
    result = lrpfx.attribute(explain_model, x, torch.cos)
    spread = mean(x) if dims is None or keepdim else x.mean(dims, keepdim=True)
    expected = x / x.numel() * spread.numel() * (torch.cos(spread) / spread)
    assert_close(result.relevance, expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Tanh(), nn.ReLU(), nn.Hardswish()])
def test_activations_at_zero(activation, dtype):
    """No division by the input: nothing becomes infinite."""
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0]], dtype=dtype)
    relevance = lrpfx.attribute(lrpfx.transform(activation.eval(), EpsilonPlus()), x, torch.ones(1, 4, dtype=dtype)).relevance
    assert torch.equal(relevance, torch.ones(1, 4, dtype=dtype))


def test_batch_norm_alone_and_merged_differ_only_by_where_the_shift_goes():
    """The shift of a batch norm takes its share by Norm; merged, it is the bias of the layer."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3)
    randomize_batch_norm(nn.Sequential(norm))
    model, x = nn.Sequential(conv, norm).eval(), torch.randn(2, 2, 4, 4)
    composite = EpsilonPlus(layer_map=[(nn.Conv2d, Epsilon())])
    merged = lrpfx.ledger(lrpfx.transform(model, composite), x, torch.cos)
    assert merged.entry("0").bias != 0 and merged.unexplained <= 1e-9

    class Kept(Layered):
        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + 0.0 * y

    kept_composite = EpsilonPlus(layer_map=[(nn.Conv2d, Epsilon()), (BatchNorm, Norm())])
    kept = lrpfx.ledger(lrpfx.transform(Kept(conv=conv, norm=norm), kept_composite), x, torch.cos)
    assert kept.unexplained <= 1e-9
    assert kept.entry("norm").bias == pytest.approx(merged.entry("0").bias, rel=1e-3)
