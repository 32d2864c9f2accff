"""Every rule on every sort of layer, in both modes: relevance is accounted for, or the rule is refused before any flows."""

import functools
from contextlib import nullcontext

import pytest
import torch
from helpers import Binary, Unary, assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import LayerMapComposite, NameMapComposite
from lrpfx.core import BasicHook, ParamMod, RemovableHandleList
from lrpfx.types import AvgPool, Gate, Linear, MatMul, Product, Sum

VECTOR, IMAGE = (3, 4), (2, 4, 6, 6)

#: sort -> name -> (a function or a module, shapes of its inputs)
LAYERS = {
    "element-wise": {
        "relu": (torch.relu, [VECTOR]),
        "sigmoid": (torch.sigmoid, [VECTOR]),
        "scaled": (lambda x: 2.0 * x, [VECTOR]),
        "shifted": (lambda x: 2.0 - x, [VECTOR]),
        "nn.ReLU": (nn.ReLU(), [VECTOR]),
        "nn.LogSoftmax": (nn.LogSoftmax(1), [VECTOR]),
    },
    "reduction": {
        "sum": (lambda x: x.sum(1), [VECTOR]),
        "sum over the batch": (lambda x: x.sum(0), [VECTOR]),
        "sum with keepdim": (lambda x: x.sum(1, keepdim=True), [VECTOR]),
        "sum of everything": (lambda x: x.sum(), [VECTOR]),
        "mean": (lambda x: x.mean((2, 3)), [IMAGE]),
        "overlapping": (lambda x: F.avg_pool2d(x, 3, 2, 1), [IMAGE]),
        "Sum": (lrpfx.layer.Sum(1), [VECTOR]),
        "nn.AvgPool2d": (nn.AvgPool2d(2), [IMAGE]),
        "nn.AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(4), [IMAGE]),
        "nn.Fold": (nn.Fold((4, 4), 2, stride=3), [(2, 16, 1)]),
    },
    "difference": {"diff": (lambda x: torch.diff(x), [VECTOR])},
    "product of entries": {
        "prod": (lambda x: x.prod(1), [VECTOR]),
        "prod with keepdim": (lambda x: x.prod(0, keepdim=True), [VECTOR]),
        "prod of everything": (lambda x: x.prod(), [VECTOR]),
    },
    "scattered": {
        "index_add": (lambda a, b: a.index_add(0, torch.tensor([2, 0, 1]), b), [VECTOR, VECTOR]),
        "scatter_add": (lambda a, b: a.scatter_add(1, torch.zeros(3, 4, dtype=torch.int64), b), [VECTOR, VECTOR]),
    },
    "reduction of the same shape": {
        "cumsum": (lambda x: x.cumsum(1), [VECTOR]),
        "average": (lambda x: F.avg_pool2d(x, 3, 1, 1), [IMAGE]),
    },
    "dense": {
        "nn.Linear": (nn.Linear(4, 3), [VECTOR]),
        "nn.Conv2d": (nn.Conv2d(4, 3, 3), [IMAGE]),
        "nn.ConvTranspose2d": (nn.ConvTranspose2d(4, 3, 2, 2), [IMAGE]),
        "nn.Upsample": (nn.Upsample(scale_factor=2, mode="bilinear"), [IMAGE]),
    },
    "sum": {
        "add": (lambda a, b: a + b, [VECTOR, VECTOR]),
        "broadcast": (lambda a, b: a + b, [VECTOR, (4,)]),
        "broadcast twice": (lambda a, b: a + b, [(3, 1), (1, 4)]),
        "sub": (lambda a, b: a - b, [VECTOR, VECTOR]),
        "weighted": (lambda a, b: torch.add(a, b, alpha=3), [VECTOR, VECTOR]),
    },
    "product": {
        "mul": (lambda a, b: a * b, [VECTOR, VECTOR]),
        "broadcast": (lambda a, b: a * b, [VECTOR, (3, 1)]),
    },
    "gate": {"quotient": (lambda a, b: a / b, [VECTOR, VECTOR])},
    "matrices": {
        "matmul": (lambda a, b: a @ b, [(3, 4), (4, 5)]),
        "square": (lambda a, b: a @ b, [(4, 4), (4, 4)]),
        "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 4), (4, 5)]),
    },
    "joined": {
        "cat": (lambda a, b: torch.cat([a, b]), [VECTOR, VECTOR]),
        "stack": (lambda a, b: torch.stack([a, b], 1), [VECTOR, VECTOR]),
    },
    "moved": {
        "flip": (lambda x: x.flip(1), [VECTOR]),
        "transpose": (lambda x: x.transpose(0, 1), [(4, 4)]),
        "nn.Flatten": (nn.Flatten(), [IMAGE]),
    },
    "statistic": {"std": (lambda x: x.std(1), [VECTOR]), "norm": (lambda x: x.norm(dim=1), [VECTOR])},
    "softmax": {"nn.Softmax": (nn.Softmax(1), [VECTOR])},
    "norm": {"nn.LayerNorm": (nn.LayerNorm(4), [VECTOR]), "nn.GroupNorm": (nn.GroupNorm(2, 4), [IMAGE])},
    "other norm": {"nn.RMSNorm": (nn.RMSNorm(4), [VECTOR]), "nn.LocalResponseNorm": (nn.LocalResponseNorm(2), [IMAGE])},
}
SAME_SHAPE = "element-wise, reduction of the same shape, softmax, norm, other norm"
LINEAR = "reduction, reduction of the same shape, difference, scattered, dense, joined, moved, element-wise"
ALONE = LINEAR.replace(" scattered,", "").replace(" joined,", "")
ONE_INPUT = ALONE + ", statistic, softmax, norm, other norm"
#: rule -> the sorts of layers that it takes
RULES = {
    rules.Epsilon(): ONE_INPUT + ", sum, scattered, joined",
    rules.Norm(): ONE_INPUT + ", sum, scattered, joined",
    rules.ZPlus(): ONE_INPUT + ", sum, scattered, joined",
    rules.AlphaBeta(): ONE_INPUT + ", sum, scattered, joined",
    rules.Gamma(): ONE_INPUT + ", sum, scattered, joined",
    rules.ZBox(-4.0, 4.0): LINEAR + ", sum",
    rules.WSquare(): ALONE.replace(" difference,", ""),
    rules.Flat(): ALONE.replace(" difference,", ""),
    rules.Uniform(): SAME_SHAPE + ", reduction, product of entries, sum, product, gate",
    rules.Only(0): SAME_SHAPE + ", sum, product, gate",
    rules.Only(1): "sum, product, gate",
    rules.Only(5): "",
    rules.AbsoluteRatio(): "reduction, reduction of the same shape, sum",
    rules.UniformEpsilon(): ONE_INPUT + ", product, matrices",
    rules.ValueOnly(): ONE_INPUT + ", product, matrices",
    rules.ProductTaylor(): "product of entries, product, matrices",
    rules.SoftmaxTaylor(): "softmax",
    rules.NormalizationEpsilon(): "norm",
    rules.Pass(): SAME_SHAPE,
    rules.ReLUDeconvNet(): SAME_SHAPE,
    rules.ReLUGuidedBackprop(): SAME_SHAPE,
    rules.ReLUBetaSmooth(): SAME_SHAPE,
}
#: AbsoluteRatio takes a sum of a tensor and a number, and ProductTaylor a product, but no other element-wise layer.
EXCEPTIONS = {(rules.AbsoluteRatio, "shifted"): True, (rules.ProductTaylor, "scaled"): True}
TESTS = [
    pytest.param(rule, kinds, sort, id=f"{rule.title}{getattr(rule, 'input', '')}-{sort}")
    for rule, kinds in RULES.items()
    for sort in LAYERS
]


def as_model(layer, inputs):
    """The layer as the only one of a network."""
    model = (Unary if len(inputs) == 1 else Binary)(layer)
    if isinstance(layer, nn.Module):
        for parameter in layer.double().parameters():
            nn.init.normal_(parameter)
    return model


@functools.cache
def name_in_a_graph(sort, name):
    """The node of a layer."""
    layer, shapes = LAYERS[sort][name]
    return lrpfx.node_names((Unary if len(shapes) == 1 else Binary)(layer))[-1]


def in_a_graph(rule, model, inputs, name):
    """The ledger and the relevance, or None where the compiler refuses the rule."""
    try:
        explain_model = lrpfx.transform(model, NameMapComposite([([name], rule)]), example_inputs=inputs)
    except lrpfx.RuleError:
        return None
    output = explain_model(*inputs)
    seed = torch.cos(torch.arange(output.numel()) + 1.0).reshape(output.shape)
    accounts = lrpfx.ledger(explain_model, inputs, seed)
    # Ones in the place of the entries of a difference cancel: such a map is accounted for, and said to be not determined.
    cancels = isinstance(rule, (rules.WSquare, rules.Flat)) and name == "diff"
    with pytest.warns(lrpfx.LrpfxWarning, match="not determined") if cancels else nullcontext():
        relevance = lrpfx.attribute(explain_model, inputs, seed).relevance
    return accounts, relevance if isinstance(relevance, tuple) else (relevance,), seed


def on_a_module(rule, module, inputs, seed):
    """The relevance, or None where the rule is refused before the way back."""
    leaves = [input.clone().requires_grad_() for input in inputs]
    handles = RemovableHandleList()
    try:
        handles += rule.register(module)
        output = module(*leaves)
    except lrpfx.RuleError:
        handles.remove()
        return None
    gradients = torch.autograd.grad(output, leaves, seed, allow_unused=True)
    handles.remove()
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.zeros_like(input) if gradient is None else gradient for gradient, input in pairs)


@pytest.mark.filterwarnings("ignore:the input .* gets no relevance")  # `Only` gives all to the other
@pytest.mark.parametrize("rule, kinds, sort", TESTS)
@pytest.mark.sampled(6)
def test_relevance_is_accounted_for_or_refused(rule, kinds, sort):
    for name, (layer, shapes) in LAYERS[sort].items():
        inputs = tuple(torch.randn(shape) for shape in shapes)
        model = as_model(layer, inputs)
        found = in_a_graph(rule, model, inputs, name_in_a_graph(sort, name))
        assert (found is not None) == EXCEPTIONS.get((type(rule), name), sort in kinds.split(", ")), name
        if found is not None:
            accounts, relevances, seed = found
            amount = max(accounts.seed_magnitude, *(float(relevance.abs().sum()) for relevance in relevances))
            assert all(torch.isfinite(relevance).all() for relevance in relevances), name
            assert abs(accounts.entries[0].unexplained) <= 1e-11 * amount, name
            assert abs(accounts.balance) <= 1e-11 * amount, name
        else:
            seed = torch.ones(layer(*inputs).shape)
        if isinstance(layer, nn.Module):
            in_module_mode = on_a_module(rule.copy(), layer, inputs, seed)
            assert (in_module_mode is None) == (found is None), name
            if found is not None:
                for actual, expected in zip(in_module_mode, relevances, strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12 * amount)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.title}{getattr(rule, 'input', '')}")
def test_modules_of_ones_own(rule):
    """What they compute is not known, only how many inputs they have and of which shapes: relevance is kept, or refused."""
    for sort in LAYERS:
        for name, (layer, shapes) in LAYERS[sort].items():
            if isinstance(layer, nn.Module):
                continue
            inputs = tuple(torch.randn(shape) for shape in shapes)
            seed = torch.randn(layer(*inputs).shape)
            relevances = on_a_module(rule.copy(), as_model(layer, inputs), inputs, seed)
            if relevances is not None and isinstance(rule, (rules.Uniform, rules.Only, rules.AbsoluteRatio, rules.Pass)):
                total = sum(relevance.sum() for relevance in relevances)
                torch.testing.assert_close(total, seed.sum(), rtol=1e-4, atol=1e-4, msg=name)  # up to the stabilizer


# --- equal shares and shares by magnitude on reductions --------------------------------------------------------------------

REDUCTIONS = {**LAYERS["reduction"], **LAYERS["reduction of the same shape"]}


def rule_on(layer, rule, x, seed):
    model = as_model(layer, (x,))
    name = lrpfx.node_names(model)[-1]
    return lrpfx.attribute(lrpfx.transform(model, NameMapComposite([([name], rule)])), x, seed).relevance


@pytest.mark.parametrize("name", REDUCTIONS)
def test_shares_of_what_is_added_up(name):
    """By the matrix of the reduction: equal shares of the entries that an output adds up, or shares by their magnitude."""
    layer, (shape,) = REDUCTIONS[name]
    x = torch.randn(shape)
    seed = torch.randn(layer(x).shape)
    matrix = torch.autograd.functional.jacobian(layer, x).reshape(seed.numel(), x.numel())
    weights = matrix.sum(1)
    ratio = torch.where(weights == 0, 0.0, seed.flatten() / weights)
    assert_close(rule_on(layer, rules.Uniform(), x, seed), (ratio @ matrix).reshape(shape), 1e-12)
    sizes = matrix * x.flatten().abs()
    expected = sizes.T @ (seed.flatten() / (sizes.sum(1) + 0.1))
    assert_close(rule_on(layer, rules.AbsoluteRatio(0.1), x, seed), expected.reshape(shape), 1e-12)


def test_what_a_fold_does_not_cover_is_stopped():
    fold = nn.Fold((4, 4), 2, stride=3)  # one patch in the corner
    x, seed = torch.randn(1, 16, 1), torch.rand(1, 4, 4, 4)
    explain_model = lrpfx.transform(nn.Sequential(fold).eval(), LayerMapComposite([(Sum, rules.Uniform())]))
    entry = lrpfx.ledger(explain_model, x, seed).entries[0]
    covered = F.fold(torch.ones_like(x), (4, 4), 2, stride=3) > 0
    assert_close(torch.tensor(entry.stopped), seed[~covered].sum(), 1e-12)
    assert abs(entry.unexplained) <= 1e-12


@pytest.mark.parametrize("sign, alpha", [(torch.add, 1), (torch.add, -3), (torch.sub, 2)])
def test_shares_by_magnitude_of_weighted_terms(sign, alpha):
    a, b, seed = torch.randn(2, 3), torch.randn(3), torch.randn(2, 3)
    explain_model = lrpfx.transform(
        Binary(lambda a, b: sign(a, b, alpha=alpha)), LayerMapComposite([(Sum, rules.AbsoluteRatio(0.1))])
    )
    of_a, of_b = lrpfx.attribute(explain_model, (a, b), seed).relevance
    total = a.abs() + abs(alpha) * b.abs() + 0.1
    assert_close(of_a, a.abs() * seed / total, 1e-12)
    assert_close(of_b, (abs(alpha) * b.abs() * seed / total).sum(0), 1e-12)


@pytest.mark.parametrize("rule", [pytest.param(rules.Uniform(), marks=pytest.mark.slow), rules.AbsoluteRatio()])
def test_shares_in_compiled_and_lowered_programs(rule):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 2)).eval()
    composite = LayerMapComposite([(AvgPool, rule), (Linear, rules.Epsilon())])
    x, explain_model = torch.randn(2, 1, 6, 6), lrpfx.transform(model, composite)
    expected = lrpfx.attribute(explain_model, x, 1).relevance
    compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
    assert_close(lrpfx.attribute(compiled, x, 1).relevance, expected, 1e-12)
    program = lrpfx.lower(explain_model, x)
    assert_close(program.module()(x, torch.tensor([1, 1]))["relevance"], expected, 1e-12)


# --- when a rule is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, module, message",
    [
        (
            rules.Only(5),
            nn.Linear(3, 2),
            r"Only\(input=5\) does not fit Linear: it sends relevance to input 5, but the layer has 1",
        ),
        (rules.SoftmaxTaylor(), nn.ReLU(), "only for softmax"),
        (rules.SoftmaxTaylor(), Unary(lambda x: x.softmax(1)), "only for softmax"),
        (rules.NormalizationEpsilon(), nn.Linear(3, 3), "only for layer, group and instance norm"),
        (rules.AbsoluteRatio(), nn.Linear(3, 3), "for sums and means, but this layer is of kind Linear"),
        (rules.Pass(), nn.CosineSimilarity(), "takes a layer with one input, but this one has 2"),
        (rules.Pass(), nn.Flatten(), "only moves values and needs no rule"),
        (rules.Epsilon(), nn.GLU(), "each factor would get all relevance"),
        (rules.Only(2), nn.GLU(), "it sends relevance to input 2"),
        (rules.Only(0), type("OwnGLU", (nn.GLU,), {"forward": lambda self, x: x})(), "a subclass of such a layer"),
        (rules.SoftmaxTaylor(), type("OwnSoftmax", (nn.Softmax,), {"forward": lambda self, x: x})(), "only for softmax"),
        (rules.Flat(), nn.LayerNorm(3), "linear in their input, but this one is of kind LayerNorm"),
        (BasicHook(param_modifiers=[ParamMod(torch.abs, param_keys=["scale"])]), nn.Linear(3, 2), "the parameter 'scale'"),
    ],
)
def test_known_when_a_rule_is_registered(rule, module, message):
    with pytest.raises(lrpfx.RuleError, match=message):
        rule.register(module)
    assert "forward" not in vars(module)
    with (
        pytest.raises(lrpfx.RuleError, match=f"layer: .*{message}"),
        NameMapComposite([(["layer"], rule)]).context(nn.ModuleDict({"layer": module})),
    ):
        raise AssertionError("registered")
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    "rule, module, shapes, message",
    [
        (rules.Only(1), Unary(torch.relu), [VECTOR], "it sends relevance to input 1, but the layer has 1"),
        (rules.Only(4), Binary(torch.add), [VECTOR, VECTOR], "it sends relevance to input 4, but the layer has 2"),
        (rules.Uniform(), Unary(lambda x: x.sum(1)), [VECTOR], r"an output of shape \(3,\) for an input of shape \(3, 4\)"),
        (rules.Uniform(), nn.CosineSimilarity(), [VECTOR, VECTOR], "CosineSimilarity: Uniform.* gives each step of a module"),
        (rules.AbsoluteRatio(), Unary(lambda x: x.sum(1, keepdim=True)), [VECTOR], r"an output of shape \(3, 1\)"),
        (rules.Pass(), Binary(torch.add), [VECTOR, VECTOR], "takes a layer with one input, but this one has 2"),
        (rules.UniformEpsilon(), Binary(torch.add), [VECTOR, VECTOR], "for matrix products, but this layer has 2"),
        (rules.Flat(), Binary(torch.sub), [VECTOR, VECTOR], "takes a layer with one input, but this one has 2"),
    ],
)
def test_known_when_a_module_is_called(rule, module, shapes, message):
    handles = rule.register(module)
    with pytest.raises(lrpfx.RuleError, match=message):
        module(*(torch.randn(shape, requires_grad=True) for shape in shapes))
    handles.remove()


def test_equal_shares_of_a_product_over_a_dimension():
    x, seed = torch.randn(2, 3, 4), torch.randn(2, 4)
    relevance = rule_on(lambda x: x.prod(1), rules.Uniform(), x, seed)
    assert_close(relevance, (seed / 3)[:, None].expand(2, 3, 4), 1e-14)


def test_shapes_are_checked_in_graphs_that_do_not_know_them():
    """Without example inputs when the module is called, before any relevance flows."""
    explain_model = lrpfx.transform(Unary(lambda x: x.sum(1)), LayerMapComposite([(Sum, rules.Only(0))]))
    with pytest.raises(lrpfx.RuleError, match=r"sum: Only\(input=0\): it is for sums and element-wise products"):
        explain_model(torch.randn(3, 4))


def test_parameters_that_a_layer_leaves_out_may_be_named():
    """A missing bias is not a missing parameter, in either mode."""
    rule = BasicHook(param_modifiers=[ParamMod(lambda parameter, name: parameter, param_keys=["weight", "bias"])])
    layer, x, seed = nn.Linear(3, 2, bias=False), torch.randn(2, 3), torch.randn(2, 2)
    explain_model = lrpfx.transform(nn.Sequential(layer).eval(), LayerMapComposite([(Linear, rule)]))
    expected = lrpfx.attribute(explain_model, x, seed).relevance
    assert_close(on_a_module(rule, layer, (x,), seed)[0], expected, 1e-12)


@pytest.mark.parametrize("kind", [Product, MatMul, Gate])
def test_epsilon_is_not_for_products(kind):
    """Each factor would get all relevance."""
    function = {Product: torch.mul, MatMul: torch.matmul, Gate: lambda a, b: a * torch.sigmoid(b)}[kind]
    with pytest.raises(lrpfx.RuleError, match="each factor would get all relevance"):
        lrpfx.transform(Binary(function), LayerMapComposite([(kind, rules.Epsilon())]), unassigned="gradient")
