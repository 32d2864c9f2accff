"""Rules of softmax, normalization and products against formulas written out here."""

import pytest
import torch
from helpers import Binary, Unary, assert_close, in_module_mode
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import EpsilonPlus, LayerMapComposite
from lrpfx.types import Gate, Sum


def stabilized(z, epsilon=1e-6):
    return z + epsilon * torch.where(z >= 0, 1.0, -1.0)


def explain(model, inputs, target=None, composite=None, **settings):
    explain_model = lrpfx.transform(model.eval(), composite or EpsilonPlus(), **settings)
    return lrpfx.attribute(explain_model, inputs, target if target is not None else torch.cos)


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_softmax(dim):
    x = torch.randn(2, 3, 4)
    x[0, 0, 0] = -20.0
    result = explain(nn.Softmax(dim) if dim == -1 else Unary(lambda x: F.softmax(x, dim=dim)), x)
    s, seed = torch.softmax(x, dim), torch.cos(torch.softmax(x, dim))
    assert_close(result.relevance, x * (seed - s * seed.sum(dim, keepdim=True)), 1e-12)


def test_softmax_with_masked_entries():
    mask = torch.tensor([True, False, True, False])
    model = Unary(lambda x: torch.softmax(x.masked_fill(mask, -torch.inf), -1))
    x = torch.randn(3, 4)
    seed = torch.where(mask, 0.0, torch.cos(model(x)))
    result = explain(model, x, seed)
    assert torch.isfinite(result.relevance).all() and not result.relevance[:, mask].any()
    alone = explain(nn.Softmax(-1), x[:, ~mask], seed[:, ~mask])
    assert_close(result.relevance[:, ~mask], alone.relevance, 1e-12)


MATRIX_PRODUCTS = [
    lambda a, b: a @ b,
    torch.matmul,
    torch.bmm,
    lambda a, b: a.matmul(b),
    lambda a, b: a.bmm(b),
    lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    lambda a, b: torch.einsum("...ij,...jk->...ik", a, b),
    lambda a, b: torch.stack([F.linear(a[i], b[i].T) for i in range(2)]),
    lambda a, b: torch.baddbmm(torch.zeros(2, 3, 5, dtype=a.dtype), a, b, beta=0),
]


@pytest.mark.parametrize("function", MATRIX_PRODUCTS)
def test_matrix_products(function):
    a, b, seed = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    result = explain(Binary(function), (a, b), seed).relevance
    ratio = seed / stabilized(2 * a @ b)
    assert_close(result[0], a * (ratio @ b.mT), 1e-12)
    assert_close(result[1], b * (a.mT @ ratio), 1e-12)


@pytest.mark.parametrize("function", [lambda x: x @ x.mT, lambda x: torch.einsum("bij,bkj->bik", x, x)])
def test_the_same_matrix_twice(function):
    x, seed = torch.randn(2, 3, 4), torch.randn(2, 3, 3)
    ratio = seed / stabilized(2 * x @ x.mT)
    result = explain(Unary(function), x, seed).relevance
    assert_close(result, x * (ratio @ x) + x * (ratio.mT @ x), 1e-11)


class TimesParameter(nn.Module):
    def __init__(self, function, shape=(4, 5)):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    "function",
    [torch.matmul, lambda x, w: x @ w, lambda x, w: F.linear(x, w.T), torch.mm, lambda x, w: x.matmul(w.mT.mT)],
)
def test_a_product_with_a_parameter_is_a_dense_layer(function):
    model, x, seed = TimesParameter(function), torch.randn(3, 4), torch.randn(3, 5)
    result = explain(model, x, seed).relevance
    weight = model.weight.detach()
    assert_close(result, x * ((seed / stabilized(x @ weight)) @ weight.T), 1e-12)
    table = lrpfx.assignment(lrpfx.transform(model, EpsilonPlus(layer_map=[(nn.Linear, rules.ZPlus())])))
    assert table[-1].kind == "Linear" and table[-1].rule.startswith("ZPlus")


def test_addmm_with_parameters_is_a_dense_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x):
            return torch.addmm(self.linear.bias, x, self.linear.weight.T)

    model, x, seed = Net(), torch.randn(3, 4), torch.randn(3, 5)
    assert_close(explain(model, x, seed).relevance, explain(model.linear, x, seed).relevance, 1e-13)


def test_products_and_gates():
    a, b, seed = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    half = explain(Binary(torch.mul), (a, b), seed).relevance
    assert torch.equal(half[0], seed / 2) and torch.equal(half[1], seed / 2)
    for function in (
        lambda a, b: a * torch.sigmoid(b),
        lambda a, b: torch.sigmoid(b) * a,
        lambda a, b: a * F.hardsigmoid(b).view(2, 3),
        lambda a, b: a * (1 + torch.erf(b / 2**0.5)) * 0.5,
        lambda a, b: a / (b.abs() + 1),
        lambda a, b: a * torch.rsqrt(b.square() + 1),
    ):
        with pytest.warns(lrpfx.LrpfxWarning, match="the input 'b' gets no relevance"):
            gated = explain(Binary(function), (a, b), seed).relevance
        assert_close(gated[0], seed, 1e-14)
        assert not gated[1].any()
    gated = explain(Binary(lambda a, b: F.glu(torch.cat([a, b], -1), -1)), (a, b), seed).relevance
    assert torch.equal(gated[0], seed) and not gated[1].any()
    other = explain(Binary(lambda a, b: a * torch.sigmoid(b)), (a, b), seed, EpsilonPlus(layer_map=[(Gate, rules.Uniform())]))
    assert torch.equal(other.relevance[1], seed / 2)


def test_broadcast_products():
    """A squeeze-and-excitation gate has one value for each channel. Equal sizes above 256 are different objects in CPython."""
    a, b, seed = torch.randn(2, 300, 4, 4), torch.randn(2, 300, 1, 1), torch.randn(2, 300, 4, 4)
    half = explain(Binary(torch.mul), (a, b), seed).relevance
    assert_close(half[0], seed / 2, 1e-14)
    assert_close(half[1], seed.sum((2, 3), keepdim=True) / 2, 1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 3.0,
        lambda x: 3.0 * x,
        lambda x: x / 3.0,
        lambda x: -x,
        lambda x: x * torch.ones(3),
        lambda x: torch.div(x, 3),
    ],
)
def test_constant_factors_take_nothing(function):
    x, seed = torch.randn(2, 3), torch.randn(2, 3)
    assert_close(explain(Unary(function), x, seed).relevance, seed, 1e-14)


def layer_norm_formula(x, weight, bias, dims, seed, eps=1e-5):
    deviation = torch.sqrt(x.var(dims, unbiased=False, keepdim=True) + eps)
    y = (x - x.mean(dims, keepdim=True)) / deviation * weight + bias
    g = seed / stabilized(y) * weight / deviation
    return x * (g - g.mean(dims, keepdim=True))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_layer_norm(shape):
    """D5: over one, two and three dimensions."""
    layer, x = nn.LayerNorm(shape), torch.randn(2, 2, 3, 4)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    seed = torch.randn_like(x)
    expected = layer_norm_formula(x, layer.weight, layer.bias, tuple(range(-len(shape), 0)), seed).detach()
    assert_close(explain(layer, x, seed).relevance, expected, 1e-10)
    rule = rules.NormalizationEpsilon()
    handles = rule.register(layer)
    leaf = x.clone().requires_grad_()
    (relevance,) = torch.autograd.grad(layer(leaf), leaf, seed)
    handles.remove()
    assert_close(relevance, expected, 1e-10)


def test_modules_that_normalize_inside():
    """torchvision's LayerNorm2d derives from LayerNorm and permutes; its rule in module mode is that of the graph."""
    from torchvision.models.convnext import LayerNorm2d

    layer, x, seed = LayerNorm2d(4), torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    expected = explain(layer, x, seed).relevance
    relevance = in_module_mode(EpsilonPlus(), layer, x, seed)
    assert_close(relevance, expected, 1e-10)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_softmax_without_a_dimension():
    x, seed = torch.randn(2, 3), torch.randn(2, 3)
    expected = explain(nn.Softmax(1), x, seed).relevance
    assert torch.equal(explain(nn.Softmax(), x, seed).relevance, expected)
    handles = rules.SoftmaxTaylor().register(layer := nn.Softmax())
    leaf = x.clone().requires_grad_()
    (relevance,) = torch.autograd.grad(layer(leaf), leaf, seed)
    handles.remove()
    assert_close(relevance, expected, 1e-12)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("shape, dim", [((4,), 0), ((2, 3), 1), ((2, 3, 4), 0), ((2, 3, 4, 2), 1), ((2, 3, 2, 2, 2), 1)])
def test_the_dimension_that_a_softmax_takes_where_it_is_not_told(shape, dim):
    x, seed = torch.randn(shape), torch.randn(shape)
    expected = explain(nn.Softmax(dim), x, seed)
    implicit = explain(nn.Softmax(), x, seed)
    assert_close(implicit.output, torch.softmax(x, dim), 1e-14)
    assert_close(implicit.relevance, expected.relevance, 1e-14)
    accounts = lrpfx.ledger(lrpfx.transform(nn.Sequential(nn.Softmax()).eval(), EpsilonPlus()), x, seed)
    assert accounts.unexplained <= 1e-12


def test_layer_norm_conserves_up_to_its_bias():
    layer, x = nn.LayerNorm(8, elementwise_affine=False), torch.randn(3, 8)
    seed = torch.randn(3, 8)
    assert_close(explain(layer, x, seed).relevance.sum(), seed.sum(), 1e-4)


def test_group_and_instance_norm():
    x, seed = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    group, instance = nn.GroupNorm(4, 4), nn.InstanceNorm2d(4, affine=True)
    for layer in (group, instance):
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias)
        weight, bias = (value.detach()[:, None, None] for value in (layer.weight, layer.bias))
        assert_close(explain(layer, x, seed).relevance, layer_norm_formula(x, weight, bias, (2, 3), seed), 1e-10)
    grouped = nn.GroupNorm(2, 4, affine=False)
    flat = nn.LayerNorm(18, elementwise_affine=False)
    expected = explain(flat, x.reshape(2, 2, 18), seed.reshape(2, 2, 18)).relevance.reshape(x.shape)
    assert_close(explain(grouped, x, seed).relevance, expected, 1e-10)


def test_an_instance_norm_with_running_statistics_is_a_batch_norm():
    tracked, named = nn.InstanceNorm2d(4, eps=0.1, affine=True, track_running_stats=True), nn.BatchNorm2d(4, eps=0.1)
    tracked.load_state_dict({key: torch.rand(value.shape) + 0.5 for key, value in tracked.state_dict().items()})
    named.load_state_dict(tracked.state_dict())
    x, seed = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    convolution = nn.Conv2d(4, 4, 1)
    for make in (lambda norm: norm, lambda norm: nn.Sequential(convolution, norm, nn.ReLU())):
        found, expected = (explain(make(norm), x, seed, example_inputs=x) for norm in (tracked, named))
        assert_close(found.output, expected.output, 1e-12)
        assert_close(found.relevance, expected.relevance, 1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.RMSNorm(4),
        nn.LocalResponseNorm(2),
        Unary(lambda x: F.normalize(x, dim=1)),
        Unary(lambda x: x / x.norm(dim=1, keepdim=True)),
    ],
)
def test_norms_without_a_mean_pass_relevance_on(layer):
    x = torch.randn(2, 4, 4)
    seed = torch.randn(2, 4, 4)
    assert_close(explain(layer, x, seed).relevance, seed, 1e-14)


@pytest.mark.parametrize("settings", [{}, {"capture": "symbolic"}, {"capture": "export"}])
def test_integer_constants_take_their_share_of_a_sum(settings):
    class Shifted(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
            self.register_buffer("position", torch.arange(3).to(dtype))

        def forward(self, x):
            return torch.relu(self.layer(x)) - self.position

    x, seed = torch.randn(2, 3), torch.randn(2, 3)
    options = {"example_inputs": x, **settings} if settings else {}
    integers, floats = (lrpfx.transform(Shifted(dtype).eval(), EpsilonPlus(), **options) for dtype in (torch.long, x.dtype))
    found, expected = (lrpfx.attribute(one, x, seed).relevance for one in (integers, floats))
    assert_close(found, expected, 1e-12)
    single = integers.float()(x.float())
    assert single.dtype == torch.float32 and torch.allclose(single.double(), floats(x), atol=1e-5)


def test_choices_for_sums():
    a, b, seed = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    for rule, expected in (
        (rules.Norm(), a * seed / stabilized(a + b)),
        (rules.AbsoluteRatio(), a.abs() * seed / (a.abs() + b.abs() + 1e-6)),
        (rules.Uniform(), seed / 2),
        (rules.Only(0), seed),
        (rules.Only(1), torch.zeros(2, 3)),
    ):
        result = explain(Binary(torch.add), (a, b), seed, EpsilonPlus(layer_map=[(Sum, rule)])).relevance[0]
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    with pytest.raises(lrpfx.RuleError, match="input 2, but the layer has 2"):
        explain(Binary(torch.add), (a, b), seed, EpsilonPlus(layer_map=[(Sum, rules.Only(2))]))


@pytest.mark.parametrize("rule", [rules.SoftmaxTaylor(), rules.NormalizationEpsilon()])
def test_rules_for_one_kind_refuse_others(rule):
    with pytest.raises(lrpfx.RuleError, match="it is only for"):
        lrpfx.transform(nn.Sequential(nn.Linear(3, 3)).eval(), LayerMapComposite([(nn.Linear, rule)]))


@pytest.mark.parametrize("gamma", [0.1, 0.25, 1.0])
def test_generalized_gamma_is_bounded_for_signed_activations(gamma):
    """Its denominators keep the sign of the output: no layer amplifies by more than (2 + gamma) / gamma, however small z is."""
    layer = nn.Linear(16, 2000, bias=False)
    for _ in range(20):
        x = torch.randn(1, 16)
        with torch.no_grad():  # outputs at and around zero
            layer.weight -= torch.rand(2000, 1) * (layer.weight @ x[0] / x.square().sum())[:, None] * x
        z = layer(x).detach()
        explain_model = lrpfx.transform(layer.eval(), LayerMapComposite([(nn.Linear, rules.Gamma(gamma))]))
        for index in z[0].abs().argsort()[:5].tolist():
            seed = torch.zeros_like(z)
            seed[0, index] = 1.0
            relevance = lrpfx.attribute(explain_model, x, seed).relevance
            assert relevance.abs().sum() <= (2 + gamma) / gamma
