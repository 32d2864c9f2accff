"""Every rule on every linear layer against the dense-matrix formulas, and what rules do elsewhere."""

import pytest
import torch
from combinations import each_pair
from helpers import Binary, Unary, assert_close
from reference import dense
from reference.dense import LAYERS
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import LayerMapComposite, NameMapComposite
from lrpfx.rules.modifiers import ParamMod
from lrpfx.rules.ratios import weights_by_sign
from lrpfx.rules.template import BasicHook
from lrpfx.types import Activation, AvgPool, Linear, Sum

RULES = {
    "epsilon": (rules.Epsilon(), dense.epsilon),
    "epsilon-large": (rules.Epsilon(0.5), lambda *args: dense.epsilon(*args, epsilon=0.5)),
    "epsilon-no-bias": (rules.Epsilon(zero_params="bias"), dense.without_bias(dense.epsilon)),
    "norm": (rules.Norm(), dense.epsilon),
    "zplus": (rules.ZPlus(), dense.zplus),
    "zplus-no-bias": (rules.ZPlus(zero_params="bias"), dense.without_bias(dense.zplus)),
    "alpha2-beta1": (rules.AlphaBeta(), dense.alpha_beta),
    "alpha1-beta0": (rules.AlphaBeta(1.0, 0.0), dense.zplus),
    "gamma": (rules.Gamma(), dense.gamma),
    "gamma-large": (rules.Gamma(2.0), lambda *args: dense.gamma(*args, gamma=2.0)),
    "zbox": (rules.ZBox(-3.0, 4.0), dense.zbox),
    "wsquare": (rules.WSquare(), dense.wsquare),
    "flat": (rules.Flat(), dense.flat),
}


def explain(layer, rule, input, output_relevance):
    explain_model = lrpfx.transform(nn.Sequential(layer).eval(), LayerMapComposite([(Linear, rule)]))
    return lrpfx.attribute(explain_model, input, output_relevance).relevance


#: What an input may be, and whether the layer has a bias.
SETTINGS = {
    "signed, with bias": (torch.randn, True),
    "signed, without bias": (torch.randn, False),
    "non-negative, with bias": (torch.rand, True),
    "non-negative, without bias": (torch.rand, False),
}


@each_pair(rule_name=RULES, layer_name=LAYERS, setting=SETTINGS)
def test_rule_equals_the_dense_formula(rule_name, layer_name, setting):
    draw, bias = SETTINGS[setting]
    rule, formula = RULES[rule_name]
    make, shape = LAYERS[layer_name]
    layer = make(bias)
    input = draw(2, *shape)
    output_relevance = torch.randn(layer(input).shape)
    expected = dense.relevance(formula, layer, input, output_relevance)
    assert_close(explain(layer, rule, input, output_relevance), expected, 1e-9)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("rule_name", ["epsilon", "zbox"])
def test_padding_modes(rule_name, mode):
    """Relevance of padded pixels returns to the pixels that they are copies of: the same as padding in a layer of its own."""
    rule, formula = RULES[rule_name]
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    plain = nn.Conv2d(2, 3, 3)
    plain.load_state_dict(layer.state_dict())
    input = torch.randn(2, 2, 4, 4, requires_grad=True)
    padded = F.pad(input, (1, 1, 1, 1), mode=mode)
    output_relevance = torch.randn(2, 3, 4, 4)
    at_padded = dense.relevance(formula, plain, padded.detach(), output_relevance)
    (expected,) = torch.autograd.grad(padded, input, at_padded)
    assert_close(explain(layer, rule, input.detach(), output_relevance), expected)


@pytest.mark.parametrize("rule_name", RULES)
def test_unbatched_and_extra_dimensions(rule_name):
    """A dense layer acts on the last dimension whatever stands before it; a convolution also takes a single sample."""
    rule, formula = RULES[rule_name]
    layer = nn.Linear(6, 4)
    input, output_relevance = torch.randn(2, 3, 6), torch.randn(2, 3, 4)
    expected = dense.relevance(formula, layer, input.flatten(0, 1), output_relevance.flatten(0, 1)).reshape(2, 3, 6)
    assert_close(explain(layer, rule, input, output_relevance), expected)
    layer = nn.Conv2d(2, 3, 3)
    input, output_relevance = torch.randn(2, 5, 5), torch.randn(3, 3, 3)
    expected = dense.relevance(formula, layer, input[None], output_relevance[None])[0]
    assert_close(explain(layer, rule, input, output_relevance), expected)


def test_gamma_by_hand():
    """One weight of each sign, computed with pencil and paper: W = (2, -1), b = 1, gamma = 0.5, x = (3, 1), so z = 6 > 0."""
    layer = nn.Linear(2, 1)
    layer.load_state_dict({"weight": torch.tensor([[2.0, -1.0]]), "bias": torch.tensor([1.0])})
    relevance = explain(layer, rules.Gamma(0.5, stabilizer=0.0), torch.tensor([[3.0, 1.0]]), torch.tensor([[6.0]]))
    # P = (3, -1), p = 1.5: P x + p = 9 - 1 + 1.5 = 9.5
    assert_close(relevance, torch.tensor([[9.0, -1.0]]) * 6 / 9.5, 1e-14)


def test_zero_outputs_get_nothing_from_gamma():
    layer = nn.Linear(2, 1, bias=False)
    layer.load_state_dict({"weight": torch.tensor([[1.0, -1.0]])})
    with pytest.warns(lrpfx.LrpfxWarning, match="the map is empty"):
        relevance = explain(layer, rules.Gamma(), torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0]]))
    assert torch.equal(relevance, torch.zeros(1, 2))


@pytest.mark.parametrize("bound", [torch.tensor(-2.0), torch.full((1, 2, 1, 1), -2.0), torch.full((5, 2, 4, 4), -2.0)])
def test_zbox_bounds_may_be_tensors(bound):
    """A scalar, one value per channel, and a tensor prepared for a larger batch."""
    layer, input, output_relevance = nn.Conv2d(2, 3, 3), torch.rand(3, 2, 4, 4), torch.randn(3, 3, 2, 2)
    expected = explain(layer, rules.ZBox(-2.0, 3.0), input, output_relevance)
    assert_close(explain(layer, rules.ZBox(bound, 3.0), input, output_relevance), expected, 1e-14)


def test_zbox_bounds_have_the_shape_of_the_layers_input():
    with pytest.raises(lrpfx.InputError, match=r"bound of shape \(2, 4, 4\) does not fit .* \(3, 32\)"):
        explain(nn.Linear(32, 3), rules.ZBox(torch.zeros(2, 4, 4), 3.0), torch.rand(3, 32), torch.randn(3, 3))


@pytest.mark.parametrize("alpha, beta", [(-1.0, -2.0), (2.0, 2.0), (2.3, 1.3)])
def test_alpha_beta_checks_its_arguments(alpha, beta):
    with pytest.raises(ValueError, match="alpha") as caught:
        rules.AlphaBeta(alpha, beta)
    assert isinstance(caught.value, lrpfx.LrpfxError)


@pytest.mark.parametrize("rule", [rules.Norm(), rules.Epsilon()])
@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3,)])
def test_sum_splits_relevance_among_its_operands(rule, shape):
    explain_model = lrpfx.transform(Binary(lambda a, b: a + b), LayerMapComposite([(Sum, rule)]))
    a, b, output_relevance = torch.randn(2, 3), torch.randn(shape), torch.randn(2, 3)
    relevance_a, relevance_b = lrpfx.attribute(explain_model, (a, b), output_relevance).relevance
    ratio = output_relevance / dense.stabilized(a + b)
    assert_close(relevance_a, a * ratio)
    assert_close(relevance_b, (b * ratio).sum_to_size(shape))


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda a, b: a - b, lambda a, b: (a, -b)),
        (lambda a, b: torch.add(a, b, alpha=3), lambda a, b: (a, 3 * b)),
        (lambda a, b: a.sub(b, alpha=2), lambda a, b: (a, -2 * b)),
    ],
)
def test_signed_and_scaled_sums(function, expected):
    explain_model = lrpfx.transform(Binary(function), LayerMapComposite([(Sum, rules.Norm())]))
    a, b, output_relevance = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    relevances = lrpfx.attribute(explain_model, (a, b), output_relevance).relevance
    terms = expected(a, b)
    for relevance, term in zip(relevances, terms, strict=True):
        assert_close(relevance, term * output_relevance / dense.stabilized(sum(terms)))


@pytest.mark.parametrize("function", [lambda x: x + 2.0, lambda x: 2.0 + x, lambda x: x.add(2.0), lambda x: 2.0 - (0.0 - x)])
def test_a_constant_operand_takes_its_share(function):
    explain_model = lrpfx.transform(Unary(function), LayerMapComposite([(Sum, rules.Norm())]))
    x, output_relevance = torch.rand(2, 3), torch.randn(2, 3)
    relevance = lrpfx.attribute(explain_model, x, output_relevance).relevance
    assert_close(relevance, x * output_relevance / dense.stabilized(x + 2.0), 1e-5)  # two stabilizers in the last case


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool1d(2),
        nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool3d(2),
        nn.AdaptiveAvgPool1d(2),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.AdaptiveAvgPool3d(1),
    ],
    ids=lambda pool: type(pool).__name__,
)
def test_average_pooling_by_norm(pool):
    dimensions = int(type(pool).__name__[-2])
    shape = (2, *[4] * dimensions)
    explain_model = lrpfx.transform(nn.Sequential(pool).eval(), LayerMapComposite([(AvgPool, rules.Norm())]))
    x = torch.randn(2, *shape)
    output_relevance = torch.randn(pool(x).shape)
    W, b = dense.dense_form(pool, shape)
    expected = torch.stack(
        [dense.epsilon(v.flatten(), W, b, R.flatten(), None).reshape(shape) for v, R in zip(x, output_relevance, strict=True)]
    )
    assert_close(lrpfx.attribute(explain_model, x, output_relevance).relevance, expected)


ACTIVATIONS = [cls for cls in Activation.__subclass__ if cls not in (nn.Threshold, nn.LogSoftmax)]


@pytest.mark.parametrize("make", [*ACTIVATIONS, lambda: nn.Threshold(0.1, 0.0), lambda: nn.LogSoftmax(1)])
def test_pass_on_every_activation(make):
    module = make().eval()
    explain_model = lrpfx.transform(nn.Sequential(module), LayerMapComposite([(Activation, rules.Pass())]))
    x, output_relevance = torch.randn(4, 3), torch.randn(4, 3)
    attribution = lrpfx.attribute(explain_model, x, output_relevance)
    assert torch.equal(attribution.output, module(x))
    assert torch.equal(attribution.relevance, output_relevance)


def test_relu_gradient_rules():
    x, output_relevance = torch.randn(4, 9), torch.randn(4, 9)
    expected = {
        rules.ReLUDeconvNet(): output_relevance.clamp(min=0),
        rules.ReLUGuidedBackprop(): output_relevance.clamp(min=0) * (x > 0),
        rules.ReLUBetaSmooth(3.0): output_relevance * torch.sigmoid(3.0 * x),
    }
    for rule, relevance in expected.items():
        for module in (
            nn.Sequential(nn.ReLU()),
            nn.Sequential(nn.ReLU(inplace=True)),
            Unary(F.relu),
            Unary(lambda x: x.relu_()),
        ):
            explain_model = lrpfx.transform(module.eval(), LayerMapComposite([(nn.ReLU, rule)]))
            assert_close(lrpfx.attribute(explain_model, x, output_relevance).relevance, relevance, 1e-14)


def test_pass_refuses_what_it_does_not_fit():
    with pytest.raises(lrpfx.RuleError, match=r"add .*Pass\(\): Pass takes a layer with one input, but this one has 2"):
        lrpfx.transform(Binary(lambda a, b: a + b), LayerMapComposite([(Sum, rules.Pass())]))
    model, composite, x = nn.Sequential(nn.Linear(3, 2)).eval(), LayerMapComposite([(Linear, rules.Pass())]), torch.randn(1, 3)
    message = (
        r"Pass\(\): it acts entry by entry, but this layer returns an output of shape \(1, 2\) for an input of shape \(1, 3\)"
    )
    with pytest.raises(lrpfx.RuleError, match=message):
        lrpfx.transform(model, composite, example_inputs=x)
    with pytest.raises(lrpfx.RuleError, match=message.replace("1, ", r"\d, ")):  # where shapes can be guessed, in transform
        lrpfx.transform(model, composite)(x)


# --- rules of one's own ----------------------------------------------------------------------------------------------------


def test_default_template_is_epsilon():
    layer, x, output_relevance = nn.Linear(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    expected = explain(layer, rules.Epsilon(), x, output_relevance)
    assert_close(explain(layer, BasicHook(), x, output_relevance), expected, 1e-14)


def test_template_honours_its_stabilizer():
    layer, x, output_relevance = nn.Linear(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    expected = explain(layer, rules.Epsilon(0.5), x, output_relevance)
    assert_close(explain(layer, BasicHook(stabilizer=0.5), x, output_relevance), expected, 1e-14)


@pytest.mark.parametrize("param_modifier", [lambda p, name: p.clip(min=0.0), ParamMod(lambda p, name: p.clip(min=0.0))])
def test_template_from_functions(param_modifier):
    """A user's lambdas, as in ZPlus for non-negative inputs."""
    rule = BasicHook(
        input_modifiers=[lambda x: x],
        param_modifiers=[param_modifier],
        output_modifiers=[lambda z: z],
        gradient_mapper=lambda R, outputs: [R / (outputs[0] + 1e-6)],
        reducer=lambda inputs, gradients: inputs[0] * gradients[0],
    )
    layer, x, output_relevance = nn.Conv2d(2, 3, 3), torch.rand(2, 2, 5, 5), torch.randn(2, 3, 3, 3)
    assert_close(explain(layer, rule, x, output_relevance), explain(layer, rules.ZPlus(), x, output_relevance))


def test_branches_without_input_modifiers_do_not_add_up():
    """Two identical branches with the relevance halved are one branch with all of it."""
    rule = BasicHook(
        param_modifiers=[lambda p, _: p, lambda p, _: p],
        gradient_mapper=lambda R, outputs: [0.5 * R / dense.stabilized(z) for z in outputs],
    )
    layer, x, output_relevance = nn.Linear(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    assert_close(explain(layer, rule, x, output_relevance), explain(layer, rules.Epsilon(), x, output_relevance))


def test_rule_on_an_operation_that_the_table_does_not_list():
    """Any rule goes to any node by name: the general route differentiates the operation."""
    model = Unary(lambda x: torch.cumsum(x, dim=1)).eval()
    explain_model = lrpfx.transform(model, NameMapComposite([(["cumsum"], rules.Epsilon())]))
    x, output_relevance = torch.randn(2, 4), torch.randn(2, 4)
    W = torch.ones(4, 4).tril()
    expected = torch.stack([dense.epsilon(v, W, torch.zeros(4), R, None) for v, R in zip(x, output_relevance, strict=True)])
    assert_close(lrpfx.attribute(explain_model, x, output_relevance).relevance, expected)


def test_missing_required_parameter():
    rule = BasicHook(param_modifiers=[ParamMod(lambda p, _: p, param_keys=["scale"])])
    with pytest.raises(lrpfx.RuleError, match="modifies the parameter 'scale', but the layer has"):
        explain(nn.Linear(2, 2), rule, torch.randn(1, 2), torch.randn(1, 2))


@pytest.mark.parametrize("dim", [1, -1])
def test_uniform_on_a_gated_unit(dim):
    """As a module; a graph has its parts."""
    x, seed = torch.randn(3, 4, 6, requires_grad=True), torch.randn(3, 4, 3) if dim == -1 else torch.randn(3, 2, 6)
    with LayerMapComposite([(nn.GLU, rules.Uniform())]).context(nn.GLU(dim).eval()) as layer:
        (relevance,) = torch.autograd.grad(layer(x), x, seed)
    assert torch.equal(relevance, torch.cat([seed / 2, seed / 2], dim))


def test_what_a_rule_shows():
    assert repr(rules.Epsilon(1e-3)) == "Epsilon(epsilon=0.001)"
    assert repr(rules.ZPlus(zero_params="bias")) == "ZPlus(stabilizer=1e-06, zero_params='bias')"
    assert repr(rules.AlphaBeta(conserve=True)) == "AlphaBeta(alpha=2, beta=1, stabilizer=1e-06, conserve=True)"
    assert repr(rules.Pass()) == "Pass()"


def test_shares_by_sign():
    """Contributions of one sign that are no more than rounding count as none."""
    positive = torch.tensor([1.0, 1.0, 0.0, 1.0, 1e-16, 0.0])
    negative = torch.tensor([-1.0, 0.0, -1.0, -1e-16, -1.0, 0.0])
    of_positive, of_negative = weights_by_sign(positive, negative, 2.0, 1.0)
    assert of_positive.tolist() == [2, 1, 0, 1, 0, 1] and of_negative.tolist() == [-1, 0, 1, 0, 1, 0]
    nearly = torch.tensor([-1e-14])
    assert weights_by_sign(torch.ones(1), nearly, 2.0, 1.0)[1].item() == -1
