"""Module mode: rules on a model as it stands, against zennit 0.5.1, against graph mode, and without a trace afterwards."""

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zennit.composites
import zennit.core
import zennit.rules
from combinations import each_pair
from helpers import (
    NETWORKS,
    Binary,
    Unary,
    assert_close,
    assert_untouched,
    in_module_mode,
    randomize_batch_norm,
    relative_difference,
    small_net,
    snapshot,
)
from reference.dense import LAYERS
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.attribution import Gradient
from lrpfx.canonizers import SequentialMergeBatchNorm
from lrpfx.composites import COMPOSITES, Composite, EpsilonPlus, EpsilonPlusFlat, LayerMapComposite, NameMapComposite
from lrpfx.errors import RuleError
from lrpfx.rules.hook import Hook
from lrpfx.rules.template import BasicHook
from lrpfx.types import Activation, Linear, Sum

RULES = {
    "Epsilon": (), "Norm": (), "ZPlus": (), "AlphaBeta": (3.0, 2.0), "Gamma": (0.5,), "WSquare": (), "Flat": (),
}  # fmt: skip


def registered(rule, layer, x, seed):
    handles = rule.register(layer)
    x = x.clone().requires_grad_()
    output = layer(x)
    (relevance,) = torch.autograd.grad(output, x, seed(output.detach()))
    handles.remove()
    return relevance


@each_pair(rule_name=RULES, layer_name=LAYERS, signed=[True, False])
def test_rules_equal_zennit(rule_name, layer_name, signed):
    make, shape = LAYERS[layer_name]
    layer = make(True)
    x = torch.randn(2, *shape) if signed else torch.rand(2, *shape)
    arguments = RULES[rule_name]
    actual = registered(getattr(rules, rule_name)(*arguments), layer, x, torch.cos)
    expected = registered(getattr(zennit.rules, rule_name)(*arguments), copy.deepcopy(layer), x, torch.cos)
    assert_close(actual, expected, 1e-12)


def test_zbox_equals_zennit():
    layer, x = nn.Conv2d(2, 3, 3), torch.rand(2, 2, 4, 4)
    low, high = torch.full_like(x, -1.0), torch.full_like(x, 2.0)
    actual = registered(rules.ZBox(low, high), layer, x, torch.cos)
    assert_close(actual, registered(zennit.rules.ZBox(low, high), copy.deepcopy(layer), x, torch.cos), 1e-12)


def bounds(key):
    return {"low": -5.0, "high": 5.0} if key == "epsilon_gamma_box" else {}


@pytest.mark.parametrize("key", sorted(set(COMPOSITES) & set(zennit.composites.COMPOSITES)))
def test_composites_equal_zennit_and_leave_no_trace(key):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4, 3),
    ).eval()  # fmt: skip
    x, seed = torch.randn(2, 3, 8, 8), torch.randn(2, 3)
    before = snapshot(model)
    relevances = []
    for composite in (COMPOSITES[key](**bounds(key)), None):
        if composite is None:
            limits = {name: torch.full_like(x, value) for name, value in bounds(key).items()}
            composite = zennit.composites.COMPOSITES[key](**limits)
        with composite.context(model) as modified:
            assert modified is model
            leaf = x.clone().requires_grad_()
            modified(leaf).backward(gradient=seed)
            relevances.append(leaf.grad)
        model.zero_grad(set_to_none=True)
        if len(relevances) == 1:
            assert_untouched(model, before)
    assert_close(relevances[0], relevances[1], 1e-12)


@pytest.mark.parametrize("key", ["epsilon_plus", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"])
def test_equals_graph_mode(key):
    """Where there is nothing but modules, and no batch norm that the compiler would merge."""
    model, x = NETWORKS["vgg11"]() if key == "epsilon_plus" else NETWORKS["alexnet"]()
    composite = COMPOSITES[key](**bounds(key))
    expected = lrpfx.attribute(lrpfx.transform(model, composite), x, lambda output: output).relevance
    with composite.context(model):
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        (relevance,) = torch.autograd.grad(output, leaf, output.detach())
    assert relative_difference(relevance, expected) <= 1e-12


def test_an_exception_inside_leaves_no_trace():
    model = small_net()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), EpsilonPlus().context(model):
        model(torch.randn(1, 3, 8, 8, requires_grad=True))
        raise ZeroDivisionError
    assert_untouched(model, before)

    def fails_at_the_last(ctx, name, module):
        if name == "fc":
            raise KeyError(name)
        return rules.Pass() if isinstance(module, nn.ReLU) else None

    with pytest.raises(KeyError):
        Composite(fails_at_the_last).register(model)
    assert_untouched(model, before)


def test_an_optimizer_made_before_still_trains():
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with EpsilonPlus().context(model):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    optimizer.zero_grad()
    weight = model[0].weight.detach().clone()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, weight)


def test_parameters_keep_their_ordinary_gradient():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer(x).square().sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    handles = rules.ZPlus().register(layer)
    layer(x.requires_grad_()).square().sum().backward()
    handles.remove()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient, 1e-12)


def test_nothing_happens_without_a_gradient():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    handles = rules.ZPlus().register(layer)
    assert layer(x).grad_fn is not None and "Propagate" not in type(layer(x).grad_fn).__name__
    with torch.no_grad():
        assert layer(x.clone().requires_grad_()).grad_fn is None
    handles.remove()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(input=self.linear(x))


@pytest.mark.parametrize("rule", [rules.Epsilon(), rules.ZPlus(), rules.Gamma()])
def test_module_called_twice_and_by_keyword(rule):
    """D1 and D4: each call by itself, whether its input comes by position or by name."""
    model, x, seed = Twice().eval(), torch.randn(2, 4), torch.randn(2, 4)
    expected = lrpfx.attribute(lrpfx.transform(model, LayerMapComposite([(Linear, rule)])), x, seed).relevance
    relevance = in_module_mode(LayerMapComposite([(Linear, rule)]), model, x, seed)
    assert_close(relevance, expected, 1e-13)


def test_several_inputs_share_relevance():
    """D2."""
    model, a, b, seed = Binary(torch.add), torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    expected = lrpfx.attribute(lrpfx.transform(model, LayerMapComposite([(Sum, rules.Norm())])), (a, b), seed).relevance
    handles = rules.Norm().register(model)
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    for actual, want in zip(torch.autograd.grad(model(leaves[0], b=leaves[1]), leaves, seed), expected, strict=True):
        assert_close(actual, want, 1e-13)
    x = a.clone().requires_grad_()
    (twice,) = torch.autograd.grad(model(x, x), x, seed)
    assert_close(twice, 2 * a * seed / (2 * a + 1e-6 * a.sign()), 1e-12)
    handles.remove()


@pytest.mark.parametrize("normalize", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_computed_weights(normalize):
    """D7."""
    layer = normalize(nn.Conv2d(2, 3, 3))
    plain = nn.Conv2d(2, 3, 3)
    plain.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    x = torch.randn(2, 2, 5, 5)
    for rule in (rules.ZPlus(), rules.Gamma(), rules.Flat()):
        assert_close(registered(rule, layer, x, torch.cos), registered(rule.copy(), plain, x, torch.cos), 1e-12)


def test_training_mode_updates_statistics_once():
    """D12."""
    layer, x = nn.BatchNorm1d(3), torch.randn(8, 3)
    twin = copy.deepcopy(layer)
    twin(x)
    registered(rules.Epsilon(), layer, x, torch.cos)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_arguments_that_are_no_tensors():
    """D17."""

    class Scaled(nn.Module):
        def forward(self, x, factor, shift=0.0):
            return x * factor + shift

    layer, x = Scaled(), torch.randn(2, 3)
    handles = rules.Epsilon(1e-12).register(layer)
    leaf = x.clone().requires_grad_()
    (relevance,) = torch.autograd.grad(layer(leaf, 2.0, shift=0.0), leaf, torch.ones(2, 3))
    handles.remove()
    assert_close(relevance, torch.ones(2, 3), 1e-6)


def test_a_module_has_one_rule_at_a_time():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 3)
    before = snapshot(model)
    first, other = rules.Epsilon().register(model[0]), rules.ZPlus().register(model[2])
    for rule in (rules.ZPlus(), Watching()):
        with pytest.raises(RuleError, match=r"Linear has a rule already: Epsilon\("):
            rule.register(model[0])
    leaf = x.clone().requires_grad_()
    (relevance,) = torch.autograd.grad(model[0](leaf), leaf, torch.ones(2, 3))
    assert_close(relevance, registered(rules.Epsilon(), twin_of(model[0]), x, torch.ones_like))
    first.remove()
    second = rules.ZPlus().register(model[0])
    first.remove()
    leaf = x.clone().requires_grad_()
    (relevance,) = torch.autograd.grad(model[0](leaf), leaf, torch.ones(2, 3))
    assert_close(relevance, registered(rules.ZPlus(), twin_of(model[0]), x, torch.ones_like))
    other.remove()
    second.remove()
    second.remove()
    assert_untouched(model, before)


class Watching(Hook):
    def forward(self, module, args, kwargs, output):
        self.stored_tensors["output"] = output


def with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)).eval()
    randomize_batch_norm(model)
    return model


def merging(composite=EpsilonPlus):
    return composite(canonizers=[SequentialMergeBatchNorm()])


def relevance_in_context(model, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(model(leaf).sum(), leaf)[0]


def entered(context):
    """The context, which the garbage collector leaves if nothing refers to it."""
    context.__enter__()
    return context


OVERLAPPING = {
    "a context": lambda model: entered(merging().context(model)),
    "another composite, on other layers": lambda model: NameMapComposite([(["4"], rules.Epsilon())]).register(model),
    "a rule": lambda model: rules.Epsilon().register(model[4]),
    "a rule with code": lambda model: Watching().register(model[2]),
    "a canonizer and a rule": lambda model: (SequentialMergeBatchNorm().apply(model), rules.ZPlus().register(model[0])),
}


@pytest.mark.parametrize("composite", [merging, EpsilonPlusFlat, lambda: NameMapComposite([(["0"], rules.Pass())])])
@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.sampled(3)
def test_contexts_do_not_overlap(name, composite):
    """The error says so, before anything of the model changes, and what was there goes on."""
    model, x = with_batch_norm(), torch.rand(2, 1, 5, 5)
    kept = OVERLAPPING[name](model)
    gc.collect()
    before, expected = snapshot(model), relevance_in_context(model, x)
    for enter in (lambda: composite().context(model).__enter__(), lambda: composite().register(model)):
        with pytest.raises(RuleError, match=r"the model has rules already: .* MixedComposite"):
            enter()
    if "context" not in name:
        assert_untouched(model, before)
    assert torch.equal(relevance_in_context(model, x), expected)
    del kept


def test_a_composite_is_in_one_context_at_a_time():
    models, composite = [with_batch_norm(), with_batch_norm()], merging()
    before, x = [snapshot(model) for model in models], torch.rand(2, 1, 5, 5)
    with composite.context(models[0]):
        expected = relevance_in_context(models[0], x)
        for model in models:
            with pytest.raises(RuleError, match="is registered on a model already"), composite.context(model):
                pass
        assert_close(relevance_in_context(models[0], x), expected, 1e-12)
    composite.register(models[0])
    composite.register(models[1])  # moves it, as it does in Zennit
    assert_untouched(models[0], before[0])
    composite.remove()
    assert_untouched(models[1], before[1])
    with composite.context(models[0]):
        assert_close(relevance_in_context(models[0], x), expected, 1e-12)


@pytest.mark.parametrize("shared", ["model", "model and composite", "attributor"])
def test_threads_get_right_maps_or_an_error(shared):
    model, x = with_batch_norm(), torch.rand(2, 1, 5, 5)
    before = snapshot(model)
    with merging().context(model):
        expected = relevance_in_context(model, x)
    one, attributor = merging(), Gradient(model, merging(), torch.ones_like)
    attributor(x)
    start = threading.Barrier(4)

    def explain(number):
        start.wait()
        found = []
        for _ in range(20):
            try:
                if shared == "attributor":
                    found.append(attributor(x)[1])
                else:
                    with (merging() if shared == "model" else one).context(model):
                        found.append(relevance_in_context(model, x))
            except RuleError:
                found.append(None)
        return found

    with ThreadPoolExecutor(4) as threads:
        maps = [one for found in threads.map(explain, range(4)) for one in found]
    right = [one for one in maps if one is not None]
    assert right
    for one in right:
        assert_close(one, expected, 1e-12)
    assert_untouched(model, before)


def twin_of(layer):
    twin = nn.Linear(layer.in_features, layer.out_features)
    twin.load_state_dict(layer.state_dict())
    return twin


def test_a_forward_of_the_instance_comes_back():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    own = layer.forward = lambda input: nn.Linear.forward(layer, input) * 2.0
    relevance = registered(rules.Epsilon(1e-12), layer, x, lambda output: output)
    assert layer.forward is own
    twin = twin_of(layer)
    assert_close(relevance, 2.0 * registered(rules.Epsilon(1e-12), twin, x, lambda output: output), 1e-9)


def test_users_hooks_go_on_firing():
    model, x, seen = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    with EpsilonPlus().context(model):
        model(x.clone().requires_grad_()).sum().backward()
    assert seen == ["0", "1", ""]


def test_removed_while_a_graph_is_alive():
    """What was computed inside goes back by ordinary gradients outside."""
    layer, x = nn.Linear(3, 2), torch.randn(2, 3, requires_grad=True)
    handles = rules.ZPlus().register(layer)
    output = layer(x)
    handles.remove()
    (gradient,) = torch.autograd.grad(output, x, torch.ones(2, 2))
    assert_close(gradient, torch.ones(2, 2) @ layer.weight.detach(), 1e-13)


def test_derivatives_of_relevance():
    """With the rules inactive, the derivative of relevance is the one that finite differences show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3)).eval()
    composite = LayerMapComposite([(Activation, rules.Pass()), (Linear, rules.Epsilon(0.3))])
    x, seed, weights = torch.randn(1, 4), torch.randn(1, 3), torch.randn(1, 4)

    def measure(x, create_graph):
        (relevance,) = torch.autograd.grad(model(x), x, seed, create_graph=create_graph)
        return (relevance * weights).sum()

    composite.register(model)
    leaf = x.clone().requires_grad_()
    measured = measure(leaf, True)
    with composite.inactive() as same:
        assert same is composite
        (derivative,) = torch.autograd.grad(measured, leaf, retain_graph=True)
    numeric = torch.zeros_like(x)
    for index in range(4):
        step = torch.zeros_like(x)
        step[0, index] = 1e-6
        above, below = (measure((x + sign * step).requires_grad_(), False) for sign in (1, -1))
        numeric[0, index] = (above - below) / 2e-6
    assert_close(derivative, numeric, 1e-6)
    composite.remove()
    assert_close(torch.autograd.grad(measured, leaf)[0], numeric, 1e-6)


@pytest.mark.parametrize("mode", ["module", "graph"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
def test_autocast(inside, mode):
    """D22: forward under autocast, backward under it or not."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    x, composite = torch.rand(2, 1, 6, 6, dtype=torch.float32), EpsilonPlusFlat()
    explain_model = lrpfx.transform(model, composite)
    expected = lrpfx.attribute(explain_model, x, torch.ones(2, 3)).relevance
    leaf = x.clone().requires_grad_()
    if mode == "module":
        composite.register(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = (model if mode == "module" else explain_model)(leaf)
        assert output.dtype == torch.bfloat16
        if inside:
            (relevance,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    if not inside:
        (relevance,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    composite.remove()
    assert relevance.dtype == torch.float32
    assert_close(relevance, expected, 0.05)


def test_function_transforms():
    """D21."""
    model, x, seed = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3), torch.randn(2, 2)
    with EpsilonPlus().context(model):
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model(leaf), leaf, seed)
        _, pull = torch.func.vjp(model, leaf)
        assert_close(pull(seed)[0], expected, 1e-14)


@pytest.mark.parametrize(
    "layer, rule, message",
    [
        (lambda: nn.Linear(3, 2), rules.Pass(), r"Linear: Pass\(\): it acts entry by entry, .* \(1, 2\) .* \(1, 3\)"),
        (lambda: Unary(lambda x: {"a": x}), rules.Epsilon(), "returns one tensor, but Unary returns a dict"),
        (lambda: Unary(lambda x: [x, x]), rules.Epsilon(), "returns one tensor, but Unary returns a list"),
    ],
)
def test_rules_that_do_not_fit(layer, rule, message):
    """D20."""
    layer = layer()
    x = torch.randn(1, 3, requires_grad=True)
    handles = rule.register(layer)
    with pytest.raises(lrpfx.RuleError, match=message):
        layer(x)
    handles.remove()


def test_code_around_structured_outputs():
    """D20b: rules with code take modules that return dicts and lists."""

    class Doubled(Hook):
        def backward(self, module, grad_input, grad_output):
            return (2 * grad_input[0],)

    layer, x = Unary(lambda x: {"a": x, "b": [3 * x, "text"]}), torch.randn(2, 3, requires_grad=True)
    handles = Doubled().register(layer)
    output = layer(x)
    assert output["b"][1] == "text"
    (gradient,) = torch.autograd.grad(output["a"].sum() + output["b"][0].sum(), x)
    handles.remove()
    assert torch.equal(gradient, torch.full((2, 3), 8.0))


def test_contexts_do_not_grow():
    """D16: a long-lived context keeps nothing of its calls."""
    model, composite = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), EpsilonPlus()
    composite.register(model)
    sizes = []
    for _ in range(3):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
        sizes.append((len(composite.handles), [len(vars(module)) for module in model.modules()]))
    composite.remove()
    assert sizes[0] == sizes[1] == sizes[2]


# --- rules with code of their own ------------------------------------------------------------------------------------------


def make_rules(core):
    """The same custom rules on either library's base class."""

    class Ignore(core.Hook):
        def backward(self, module, grad_input, grad_output):
            return grad_output

    class GradTimesInput(core.Hook):
        def forward(self, module, input, output):
            self.stored_tensors["input"] = input

        def backward(self, module, grad_input, grad_output):
            return (self.stored_tensors["input"][0] * grad_input[0],)

    class ScaledNegative(core.Hook):
        def __init__(self, scale=0.2):
            super().__init__()
            self.scale = scale

        def forward(self, module, input, output):
            self.stored_tensors["input"] = input

        def backward(self, module, grad_input, grad_output):
            input = self.stored_tensors["input"][0]
            return (grad_input[0] * (input.clip(min=0.0) + input.clip(max=0.0) * self.scale),)

        def copy(self):
            return self.__class__(scale=self.scale)

    return {
        "Ignore": Ignore(),
        "GradTimesInput": GradTimesInput(),
        "ScaledNegative": ScaledNegative(0.23),
        "Hook": core.Hook(),
    }


@pytest.mark.parametrize("name", ["Ignore", "GradTimesInput", "ScaledNegative", "Hook"])
def test_code_of_ones_own_equals_zennit(name):
    layer, x = nn.ReLU() if name == "Ignore" else nn.Linear(4, 4), torch.randn(3, 4)
    rule = make_rules(lrpfx.core)[name]
    actual = registered(rule, layer, x, torch.cos)
    assert_close(actual, registered(make_rules(zennit.core)[name], copy.deepcopy(layer), x, torch.cos), 1e-13)
    assert rule.stored_tensors == {}
    assert rule.copy() is not rule and getattr(rule.copy(), "scale", None) == getattr(rule, "scale", None)


@pytest.mark.parametrize("name", ["GradTimesInput", "ScaledNegative"])
def test_code_of_ones_own_in_a_graph(name):
    """The same rule object serves graphs, each call with its own stored tensors."""
    model, x, seed = Twice().eval(), torch.randn(2, 4), torch.randn(2, 4)
    rule = make_rules(lrpfx.core)[name]
    explain_model = lrpfx.transform(model, LayerMapComposite([(nn.Linear, rule)]))
    actual = lrpfx.attribute(explain_model, x, seed).relevance
    relevance = in_module_mode(LayerMapComposite([(nn.Linear, rule)]), model, x, seed)
    assert_close(actual, relevance, 1e-13)
    hidden = (x @ model.linear.weight.T + model.linear.bias).detach()
    compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
    assert_close(lrpfx.attribute(compiled, x, seed).relevance, actual, 1e-13)
    scale = (lambda a: a) if name == "GradTimesInput" else lambda a: a.clip(min=0) + 0.23 * a.clip(max=0)
    expected = scale(x) * ((scale(hidden) * (seed @ model.linear.weight)) @ model.linear.weight)
    assert_close(actual, expected.detach(), 1e-12)


@pytest.mark.parametrize("with_code", [True, False])
@pytest.mark.parametrize("mode", ["gradient", "no gradient of the input", "no_grad"])
def test_rules_store_the_inputs_of_the_last_call(mode, with_code):
    """Whether or not there is a way back; the relevance of the output is stored on it."""

    class Coded(rules.Epsilon):
        def backward(self, module, grad_input, grad_output):
            return super().backward(module, grad_input, grad_output)

    class Affine(nn.Module):
        def forward(self, x, factor, shift=None):
            return x * factor + shift

    rule, layer = Coded() if with_code else rules.Epsilon(), Affine()
    rule.register(layer)
    for _ in range(2):
        x, shift, seed = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
        x.requires_grad_(mode != "no gradient of the input")
        with torch.set_grad_enabled(mode != "no_grad"):
            output = layer(x, 2.0, shift=shift)
        input, factor = rule.stored_tensors["input"]
        assert (mode != "gradient" or input is not x) and torch.equal(input, x) and factor == 2.0
        assert torch.equal(rule.stored_tensors["kwargs"]["shift"], shift) and "grad_output" not in rule.stored_tensors
        if mode == "gradient":
            torch.autograd.grad(output, x, seed)
            assert rule.stored_tensors["grad_output"][0] is seed
    rule.remove()
    assert rule.stored_tensors == {}


def test_code_around_a_call_runs_without_a_gradient():
    seen = []

    class Watch(Hook):
        def forward(self, module, input, output):
            seen.append(len(input))

    layer, x = nn.Linear(2, 2), torch.randn(1, 2)
    handles = Watch().register(layer)
    layer(x)
    with torch.no_grad():
        layer(x.requires_grad_())
    handles.remove()
    assert seen == [1, 1]


def test_parameters_are_modified_when_relevance_flows_back():
    modified = []
    rule = BasicHook(param_modifiers=[lambda parameter, name: (modified.append(name), parameter)[1]])
    layer, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    handles = rule.register(layer)
    output = layer(x)
    assert modified == []
    torch.autograd.grad(output, x, torch.ones(1, 2))
    handles.remove()
    assert modified == ["weight", "bias"]


def test_stages_of_a_hook_without_code_change_nothing():
    """What they return can be called with and returned in their place."""
    hook, args, output = Hook(), (torch.ones(2, requires_grad=True),), torch.ones(3)
    assert hook.pre_forward(None, args, {}) == (args, {})
    assert hook.post_forward(None, args, {}, output) is output


def make_templates(core):
    """The same rules from parts on either library's template."""

    class PositiveWeights(core.BasicHook):
        def __init__(self, names=None):
            super().__init__(param_modifiers=[self._modify])
            self.names = [] if names is None else names

        def _modify(self, parameter, name):
            return parameter.clip(min=0.0) if name in self.names else torch.zeros_like(parameter)

    zero = core.BasicHook(
        input_modifiers=[lambda input: input],
        param_modifiers=[lambda parameter, _: parameter],
        output_modifiers=[lambda output: output],
        gradient_mapper=lambda out_grad, outputs: [out_grad / outputs[0]],
        reducer=lambda inputs, gradients: inputs[0] * gradients[0],
    )
    modified = core.BasicHook(param_modifiers=[core.ParamMod(lambda p, _: p.clip(min=0.0), zero_params="bias")])
    return {"default": core.BasicHook(), "zero": zero, "class": PositiveWeights(["weight"]), "ParamMod": modified}


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("name", ["default", "zero", "class", "ParamMod"])
def test_templates_of_ones_own_equal_zennit(name, copied):
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    rule = make_templates(lrpfx.core)[name]
    expected = registered(make_templates(zennit.core)[name], copy.deepcopy(layer), x, torch.cos)
    assert_close(registered(rule.copy() if copied else rule, layer, x, torch.cos), expected, 1e-11)
    graph = lrpfx.transform(nn.Sequential(layer).eval(), LayerMapComposite([(nn.Linear, rule)]))
    seed = torch.cos(layer(x)).detach()
    assert_close(lrpfx.attribute(graph, x, seed).relevance, expected, 1e-11)


def make_extended_rules(library):
    """Rules of the library with code around them."""

    class Halved(library.rules.Epsilon):
        def backward(self, module, grad_input, grad_output):
            relevance = super().backward(module, grad_input, grad_output)
            return tuple(0.5 * value for value in relevance)

    class OrdinaryGradient(library.rules.ZPlus):
        def backward(self, module, grad_input, grad_output):
            return (grad_input[0] * self.stored_tensors["input"][0],)

    class Doubled(library.rules.Pass):
        def backward(self, module, grad_input, grad_output):
            return tuple(2.0 * value for value in super().backward(module, grad_input, grad_output))

    class Seen(library.rules.AlphaBeta):
        def forward(self, module, *arguments):
            super().forward(module, *arguments)
            self.stored_tensors["factor"] = torch.tensor(3.0, dtype=torch.float64)

        def backward(self, module, grad_input, grad_output):
            (relevance,) = super().backward(module, grad_input, grad_output)
            return (self.stored_tensors["factor"] * relevance,)

    return {"Epsilon": Halved(), "ZPlus": OrdinaryGradient(), "Pass": Doubled(), "AlphaBeta": Seen()}


@pytest.mark.parametrize("name", ["Epsilon", "ZPlus", "Pass", "AlphaBeta"])
def test_rules_of_the_library_with_code_around_them(name):
    """In both modes; a rule of propagation answers `super().backward` with its relevance."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    rule = make_extended_rules(lrpfx)[name]
    expected = registered(make_extended_rules(zennit)[name], copy.deepcopy(layer), x, torch.cos)
    assert_close(registered(rule, layer, x, torch.cos), expected, 1e-11)
    explain_model = lrpfx.transform(nn.Sequential(layer).eval(), LayerMapComposite([(nn.Linear, rule)]))
    seed = torch.cos(layer(x)).detach()
    assert_close(lrpfx.attribute(explain_model, x, seed).relevance, expected, 1e-11)
    compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
    assert_close(lrpfx.attribute(compiled, x, seed).relevance, expected, 1e-11)


def test_rules_of_the_library_with_code_that_has_no_place_in_a_graph():
    class Scaled(lrpfx.rules.Epsilon):
        def pre_forward(self, module, args, kwargs):
            return (2 * args[0],), kwargs

    layer, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    once = registered(lrpfx.rules.Epsilon(1e-12), layer, x, torch.ones_like)
    assert_close(registered(Scaled(1e-12), layer, x, torch.ones_like), 2 * once, 1e-9)
    with pytest.raises(lrpfx.RuleError, match="pre_forward"):
        lrpfx.transform(nn.Sequential(layer).eval(), LayerMapComposite([(nn.Linear, Scaled())]))


def test_extended_signatures_and_all_stages():
    calls = []

    class Watch(Hook):
        def pre_forward(self, module, args, kwargs):
            calls.append(("pre_forward", len(args), sorted(kwargs)))

        def forward(self, module, args, kwargs, output):
            calls.append(("forward", output.shape))

        def post_forward(self, module, args, kwargs, output):
            calls.append(("post_forward", output.shape))

        def pre_backward(self, module, grad_input, grad_output):
            calls.append(("pre_backward", len(grad_output)))

        def backward(self, module, grad_input, grad_output):
            calls.append(("backward", len(grad_input)))

    model = Binary(torch.mul)
    handles = Watch().register(model)
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    gradients = torch.autograd.grad(model(a, b=b).sum(), (a, b))
    handles.remove()
    assert [name for name, *_ in calls] == ["pre_forward", "forward", "post_forward", "pre_backward", "backward"]
    assert calls[0] == ("pre_forward", 1, ["b"]) and calls[-1] == ("backward", 2)
    assert torch.equal(gradients[0], b) and torch.equal(gradients[1], a)


def test_code_that_has_no_place_in_a_graph():
    class Replaces(Hook):
        def forward(self, module, input, output):
            return 2 * output

    class Prepares(Hook):
        def pre_forward(self, module, args, kwargs):
            return None

    model, x = nn.Sequential(nn.Linear(3, 2)).eval(), torch.randn(1, 3)
    handles = Replaces().register(model[0])
    assert torch.equal(model(x.requires_grad_()), 2 * twin_of(model[0])(x))
    handles.remove()
    with pytest.raises(lrpfx.RuleError, match="returns another output, which a rule in a graph must not"):
        lrpfx.transform(model, LayerMapComposite([(nn.Linear, Replaces())]), example_inputs=x.detach())
    with pytest.raises(lrpfx.RuleError, match="overrides pre_forward, which does not run in a graph"):
        lrpfx.transform(model, LayerMapComposite([(nn.Linear, Prepares())]))


def test_inactive_rules_with_code():
    class Zero(Hook):
        def backward(self, module, grad_input, grad_output):
            return (torch.zeros_like(grad_input[0]),)

    layer, x, rule = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True), Zero()
    rule.register(layer)
    assert not torch.autograd.grad(layer(x).sum(), x)[0].any()
    rule.active = False
    assert torch.autograd.grad(layer(x).sum(), x)[0].any()


def test_modules_that_tracing_cannot_follow():
    """Rule by rule, without a graph."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) if x.sum() > 0 else self.linear(-x)

    model, x = Branching().eval(), torch.rand(2, 3)
    relevance = in_module_mode(EpsilonPlus(), model, x, torch.ones(2, 3))
    assert_close(relevance, registered(rules.Epsilon(), model.linear, x, torch.ones_like), 1e-13)


def test_rules_register_on_modules_only():
    with pytest.raises(lrpfx.InputTypeError, match=r"registered on a torch\.nn\.Module, not on str"):
        rules.Epsilon().register("linear")
    with pytest.raises(lrpfx.RuleError, match="'scale'"):
        registered(
            BasicHook(param_modifiers=[rules.ClampMod(param_keys=["scale"])]), nn.Linear(2, 2), torch.randn(1, 2), torch.cos
        )


def test_buffers_in_autocast():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()  # no denominator is small, which 16 bits would not resolve
    x = torch.rand(1, 3, 8, 8, dtype=torch.float32, requires_grad=True)
    found = []
    for enabled in (True, False):
        with EpsilonPlus().context(model) as modified:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = modified(x)
            found += torch.autograd.grad(output.sum(), x)
    assert_close(*found, 0.02)
