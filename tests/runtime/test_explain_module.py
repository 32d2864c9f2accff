"""The invariants of the rewritten graph, over every network that the tests use."""

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import ClassVar

import pytest
import torch
from helpers import NETWORKS, Unary, assert_close, needs_compiler, randomize_batch_norm, small_net
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat
from lrpfx.runtime.explain_module import RuleModule


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def network(request):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return NETWORKS[request.param]()


@pytest.fixture
def model(network):
    return network[0]


@pytest.fixture
def input(network):
    return network[1]


def relevance_of(explain_model, input):
    return lrpfx.attribute(explain_model, input, 1).relevance


def test_output_equals_the_source_model(model, input):
    for composite in (EpsilonPlusFlat(), EpsilonGammaBox(-5.0, 5.0)):
        assert_close(lrpfx.transform(model, composite)(input), model(input), 1e-12)


def test_source_model_is_untouched(model, input):
    def state():
        return {
            "parameters": {name: id(parameter) for name, parameter in model.named_parameters()},
            "buffers": {name: id(buffer) for name, buffer in model.named_buffers()},
            "modules": {name: (id(module), module.training, sorted(vars(module))) for name, module in model.named_modules()},
            "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
            "gradients": [parameter.grad is None for parameter in model.parameters()],
            "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        }

    before, values = state(), copy.deepcopy(model.state_dict())
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=input)
    lrpfx.attribute(explain_model, input)
    with torch.no_grad():
        for parameter in explain_model.parameters():
            parameter.zero_()
    assert state() == before
    assert list(values) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


@pytest.mark.sampled(3)
def test_state_dict_has_the_keys_and_loads_other_weights(model, input):
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    assert list(explain_model.state_dict()) == list(model.state_dict())
    other = randomize_batch_norm(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1).add_(0.001 * torch.randn_like(parameter))
    explain_model.load_state_dict(other.state_dict())
    expected = lrpfx.transform(other, EpsilonPlusFlat())
    assert torch.equal(explain_model(input), expected(input))
    assert torch.equal(relevance_of(explain_model, input), relevance_of(expected, input))


@pytest.mark.sampled(3)
def test_refold_follows_parameters_changed_unseen(model, input):
    """Changes through `.data` are not counted; those that are counted are followed without it."""
    explain_model = lrpfx.transform(model, EpsilonPlus())
    first = next(name for name, _ in explain_model.named_parameters())
    explain_model.get_parameter(first).data.mul_(2.0)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter(first).mul_(2.0)
    expected = relevance_of(lrpfx.transform(changed, EpsilonPlus()), input)
    assert torch.equal(relevance_of(explain_model, input), expected) != bool(explain_model.compiled.derived)
    explain_model.refold()
    assert torch.equal(relevance_of(explain_model, input), expected)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sampled(3)
def test_copies_and_pickles(model, input):
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    expected = relevance_of(explain_model, input)
    ways = [copy.deepcopy, lambda module: copy.deepcopy(copy.deepcopy(module)), pickled, saved_and_loaded]
    for way in ways:
        copied = way(explain_model)
        assert torch.equal(relevance_of(copied, input), expected)
        assert str(lrpfx.assignment(copied)) == str(lrpfx.assignment(explain_model))
        assert list(copied.state_dict()) == list(model.state_dict())
        assert str(copied) == str(explain_model)
        with torch.no_grad():
            next(copied.parameters()).zero_()
        copied.refold()
    assert torch.equal(relevance_of(explain_model, input), expected), "a copy shares memory"


@pytest.mark.sampled(3)
def test_moved_and_cast(model, input):
    explain_model = lrpfx.transform(model, EpsilonPlus())
    expected = relevance_of(explain_model, input)
    single = copy.deepcopy(explain_model).float()
    relevance = relevance_of(single, input.float())
    assert relevance.dtype == torch.float32
    assert_close(relevance.double(), expected, 1e-3)
    again = lrpfx.transform(copy.deepcopy(model).float(), EpsilonPlus())
    assert torch.equal(relevance, relevance_of(again, input.float())), "derived weights are not those of the cast parameters"
    on_meta = copy.deepcopy(explain_model).to("meta")
    assert on_meta(input.to("meta")).shape == model(input).shape
    assert {tensor.device.type for tensor in (*on_meta.parameters(), *on_meta.buffers())} == {"meta"}
    assert torch.equal(relevance_of(explain_model, input), expected), "the copy on the other device changed this one"


class WithPlaces(nn.Module):
    """Adds the places of entries, which it makes on the device of its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return self.layer(nn.functional.gelu(x + places)).to(x.device, torch.float64)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_a_device_in_the_graph_of_torch_export_moves_with_the_module(capture):
    x = torch.randn(2, 4)
    explain_model = lrpfx.transform(WithPlaces(), EpsilonPlus(), example_inputs=x, capture=capture)
    moved = pickle.loads(pickle.dumps(copy.deepcopy(explain_model).to("meta")))
    leaf = x.to("meta").requires_grad_()
    output = moved(leaf)
    (relevance,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    assert output.device.type == relevance.device.type == "meta"
    for graph in (moved.graph, moved.unfused_graph):
        assert "device(type='cpu')" not in graph.python_code("self").src
    assert torch.isfinite(lrpfx.attribute(explain_model, x, 1).relevance).all()  # the source of the copy stays


class InFloat32(nn.Module):
    """Normalizes in float32 and returns to the input's dtype, as language models do."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(10, 8)
        self.dense = nn.Linear(8, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        if self.kind == "cast":
            x = (x.to(torch.float32) / x.to(torch.float32).norm(dim=-1, keepdim=True)).to(x.dtype)
        if self.kind == "cast, and a constant":  # torch.export leaves out casts without effect where it lifts constants
            x = x.to(torch.float32).to(x.dtype) * torch.tensor([2.0]).to(x)
        if self.kind == "limit":
            x = x.masked_fill((ids == 0)[..., None], torch.finfo(self.dense.weight.dtype).min).clamp(min=-1)
        if self.kind == "made":
            x = x + torch.arange(8, dtype=self.dense.weight.dtype)
        return self.dense(x).mean(1)


@pytest.mark.parametrize("kind", ["cast", "cast, and a constant", "limit", "made"])
def test_a_dtype_in_the_graph_of_torch_export_forbids_other_dtypes(kind):
    torch.manual_seed(0)
    ids = torch.randint(1, 10, (2, 4))
    source = InFloat32(kind).float().eval()
    explain_model = lrpfx.transform(source, EpsilonPlus(), example_inputs=ids, capture="export")
    relevance = relevance_of(explain_model, ids)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        cast = copy.deepcopy(explain_model).to(dtype)
        for changed in (cast, copy.deepcopy(cast), pickle.loads(pickle.dumps(cast))):
            with pytest.raises(lrpfx.InputError, match=rf"captured by torch.export for torch.float32.*to\({dtype}\)"):
                relevance_of(changed, ids)
            with pytest.raises(lrpfx.InputError, match=r"captured by torch.export"):
                changed(ids)
        assert torch.equal(relevance_of(cast.float(), ids), relevance_of(cast, ids))
        in_this_dtype = lrpfx.transform(copy.deepcopy(source).to(dtype), EpsilonPlus(), example_inputs=ids, capture="export")
        assert relevance_of(in_this_dtype, ids).dtype == dtype
    loaded = copy.deepcopy(explain_model)
    loaded.load_state_dict({name: value.double() for name, value in loaded.state_dict().items()}, assign=True)
    with pytest.raises(lrpfx.InputError, match=r"captured by torch.export"):
        loaded(ids)
    assert torch.equal(relevance_of(explain_model, ids), relevance)


@pytest.mark.parametrize("kind", ["cast", "made", ""])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_trace_follows_a_change_of_dtype(kind, dtype):
    torch.manual_seed(0)
    ids = torch.randint(1, 10, (2, 4))
    source = InFloat32(kind).float().eval()
    for capture in ("symbolic", "export") if kind == "" else ("symbolic",):  # without dtypes in the graph, both do
        cast = lrpfx.transform(source, EpsilonPlus(), example_inputs=ids, capture=capture).to(dtype)
        made = lrpfx.transform(copy.deepcopy(source).to(dtype), EpsilonPlus(), example_inputs=ids, capture=capture)
        assert torch.equal(relevance_of(cast, ids), relevance_of(made, ids))
        assert relevance_of(cast, ids).dtype == dtype


def test_deleting_it_frees_its_memory_at_once():
    model, input = NETWORKS["small"]()
    gc.disable()
    try:
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=input)
        lrpfx.attribute(explain_model, input, record=["conv1"])
        alive = [weakref.ref(tensor) for tensor in (*explain_model.parameters(), *explain_model.buffers())]
        del explain_model
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


@pytest.mark.sampled(3)
def test_two_transforms_live_side_by_side(model, input):
    one, two = lrpfx.transform(model, EpsilonPlus()), lrpfx.transform(model, EpsilonAlpha2Beta1())
    first, second = relevance_of(one, input), relevance_of(two, input)
    assert not torch.equal(first, second)
    assert torch.equal(relevance_of(one, input), first)
    assert torch.equal(relevance_of(two, input), second)


@pytest.mark.parametrize(
    "name", ["small", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(NETWORKS) - {"small"}))]
)
def test_compiles_without_a_graph_break(name):
    model, input = NETWORKS[name]()
    composite = EpsilonGammaBox(torch.full((1, 3, 1, 1), -5.0), 5.0)
    explain_model = lrpfx.transform(model, composite)
    compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
    expected, actual = lrpfx.attribute(explain_model, input, 1), lrpfx.attribute(compiled, input, 1)
    assert_close(actual.output, expected.output, 1e-12)
    assert_close(actual.relevance, expected.relevance, 1e-12)
    torch._dynamo.reset()


@pytest.mark.slow
@needs_compiler
def test_compiles_with_inductor():
    model, input = small_net(), torch.randn(2, 3, 8, 8)
    explain_model = lrpfx.transform(model, EpsilonAlpha2Beta1())
    compiled = torch.compile(explain_model, fullgraph=True)
    expected, actual = lrpfx.attribute(explain_model, input, 1), lrpfx.attribute(compiled, input, 1)
    assert_close(actual.relevance, expected.relevance, 1e-10)
    torch._dynamo.reset()


@pytest.mark.sampled(3)
def test_reads_like_the_original(model):
    explain_model = lrpfx.transform(model, EpsilonPlus())
    names, original = dict(explain_model.named_modules()), dict(model.named_modules())
    assert set(original) <= set(names)
    for name, module in original.items():
        shown = names[name]._get_name()
        assert shown == module._get_name() or isinstance(names[name], RuleModule)
    text = str(explain_model)
    assert text.startswith(type(model).__name__ + "(")
    assert "ZPlus(Conv2d(" in text and "Epsilon(Linear(" in text and "Pass(ReLU(" in text


def test_forward_hooks_see_rule_modules(model, input):
    explain_model = lrpfx.transform(model, EpsilonPlus())
    seen = {}
    ruled = [name for name, module in explain_model.named_modules() if isinstance(module, RuleModule)]
    for name in ruled:
        explain_model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.shape})
        )
    explain_model(input)
    assert set(seen) == set(ruled)


def test_batches_of_seeds_run_over_one_forward(model, input):
    """vmap over the backward, which many targets need."""
    explain_model = lrpfx.transform(model, EpsilonPlus())
    leaf = input.clone().requires_grad_()
    output = explain_model(leaf)
    seeds = torch.stack([torch.zeros_like(output).index_fill_(1, torch.tensor([index]), 1.0) for index in range(3)])
    (batched,) = torch.autograd.grad(output, leaf, seeds, is_grads_batched=True, retain_graph=True)
    single = torch.stack([torch.autograd.grad(output, leaf, seed, retain_graph=True)[0] for seed in seeds])
    assert_close(batched, single, 1e-12)


def test_live_parameters_give_gradients_of_the_output_chain():
    """Without folding, relevance is a function of the parameters: its derivative by a finite difference."""
    layer = nn.Linear(4, 3)
    x, output_relevance = torch.randn(2, 4), torch.randn(2, 3)
    explain_model = lrpfx.transform(nn.Sequential(layer).eval(), lrpfx.composites.ExcitationBackprop(), fold=False)

    def weighted_relevance():
        leaf = x.clone().requires_grad_()
        (relevance,) = torch.autograd.grad(explain_model(leaf), leaf, output_relevance, create_graph=True)
        return (relevance * torch.arange(4.0)).sum()

    weight = explain_model.get_parameter("0.weight")
    relevance = weighted_relevance()
    with explain_model.inactive():
        (gradient,) = torch.autograd.grad(relevance, weight)
    numeric = torch.zeros_like(weight)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        values = []
        for step in (1e-6, -2e-6, 1e-6):  # above, below, and back
            with torch.no_grad():
                weight[tuple(index)] += step
            values.append(weighted_relevance().detach())
        numeric[tuple(index)] = (values[0] - values[1]) / 2e-6
    assert_close(gradient, numeric, 1e-5)
    assert "clamp" in explain_model.code


@pytest.mark.parametrize("copied", [False, True])
def test_derivatives_of_relevance(copied):
    """With respect to inputs and to parameters of every layer, as by finite differences."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3)).eval()
    composite = EpsilonPlus(layer_map=[(nn.Linear, lrpfx.rules.Gamma(0.5, stabilizer=0.3))])
    explain_model = lrpfx.transform(model, composite, fold=False)
    explain_model = copy.deepcopy(explain_model) if copied else explain_model
    leaf, seed, weights = torch.rand(2, 4).requires_grad_(), torch.rand(2, 3), torch.randn(2, 4)
    wanted = [leaf, *explain_model.parameters()]

    def measure(create_graph):
        (relevance,) = torch.autograd.grad(explain_model(leaf), leaf, seed, create_graph=create_graph)
        return (relevance * weights).sum()

    measured = measure(True)
    with explain_model.inactive() as same:
        assert same is explain_model
        derivatives = torch.autograd.grad(measured, wanted)
    assert explain_model.get_submodule("0").ruled.switch.on
    for tensor, derivative in zip(wanted, derivatives, strict=True):
        numeric = torch.zeros_like(tensor)
        for index in torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(-1, tensor.ndim).tolist():
            values = []
            for step in (1e-6, -2e-6, 1e-6):  # above, below, and back
                with torch.no_grad():
                    tensor[tuple(index)] += step
                values.append(measure(False))
            numeric[tuple(index)] = (values[0] - values[1]) / 2e-6
        assert_close(derivative, numeric, 1e-5)


class WithTokens(nn.Module):
    """Parameters at a layer, at a sum, and at an operation without a rule."""

    def __init__(self):
        super().__init__()
        self.token, self.places = nn.Parameter(torch.rand(1, 1, 4)), nn.Parameter(torch.rand(3, 4))
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, 4), x], 1) + self.places
        return self.fc(self.norm(x.mean(1)))


def test_relevance_is_not_asked_for_while_rules_are_inactive():
    """In this thread or another one; contexts of several threads may end in any order."""
    x = torch.rand(2, 2, 4)
    live = lrpfx.transform(WithTokens().eval(), EpsilonPlus(), example_inputs=x, fold=False)
    expected = lrpfx.attribute(live, x, 1).relevance
    inside, done = threading.Event(), threading.Event()

    def train():
        with live.inactive():
            inside.set()
            done.wait()

    thread = threading.Thread(target=train)
    with live.inactive():
        thread.start()
        inside.wait()
    for ask in (lrpfx.attribute, lrpfx.ledger):
        with pytest.raises(lrpfx.InputError, match="rules of WithTokens are inactive"):
            ask(live, x, 1)
    done.set()
    thread.join()
    assert torch.equal(lrpfx.attribute(live, x, 1).relevance, expected)
    assert lrpfx.ledger(live, x, 1).unexplained <= 1e-6


ACTIVE = "outside of `with explain_model.inactive"


@pytest.mark.parametrize("copied", [False, True])
def test_gradients_of_parameters_need_inactive_rules(copied):
    """Those of a loss, and of a penalty on relevance; the relevance of the inputs alone needs neither."""
    model, x = WithTokens().eval(), torch.rand(2, 2, 4, requires_grad=True)
    live = lrpfx.transform(model, EpsilonPlus(), example_inputs=x.detach(), fold=False)
    live = copy.deepcopy(live) if copied else live
    folded = lrpfx.transform(model, EpsilonPlus(), example_inputs=x.detach())
    names = [name for name, _ in live.named_parameters()]
    for parameter in live.parameters():
        with pytest.raises(lrpfx.InputError, match=ACTIVE):
            torch.autograd.grad(live(x).square().sum(), parameter)
    with pytest.raises(lrpfx.InputError, match=ACTIVE):
        live(x).square().sum().backward()
    assert all(parameter.grad is None for parameter in live.parameters())
    with live.inactive():
        found = torch.autograd.grad(live(x).square().sum(), [*live.parameters(), x])
    own = [model.get_parameter(name) for name in names]
    for gradient, expected in zip(found, torch.autograd.grad(model(x).square().sum(), [*own, x]), strict=True):
        assert_close(gradient, expected, 1e-12)
    relevances = [torch.autograd.grad(one(x), x, torch.ones(2, 2), create_graph=one is live)[0] for one in (live, folded)]
    assert_close(*relevances, 1e-12)
    for wanted in ([x], [*live.parameters()], [live.get_parameter("fc.bias")]):
        with pytest.raises(lrpfx.InputError, match=ACTIVE):
            torch.autograd.grad(relevances[0].square().sum(), wanted, retain_graph=True)
    with live.inactive():
        relevances[0].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in (live.token, live.places, live.fc.weight))
    for target in (0, None):
        found = [lrpfx.attribute(one, x.detach(), target, record="add", constants=True) for one in (live, folded)]
        assert_close(found[0].relevance, found[1].relevance, 1e-12)
        assert_close(found[0].layers["add"], found[1].layers["add"], 1e-12)
        assert_close(found[0].constants["places"], found[1].constants["places"], 1e-12)


def test_frozen_parameters_of_live_modules_allow_backward():
    live = lrpfx.transform(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), EpsilonPlus(), fold=False).requires_grad_(False)
    x = torch.rand(2, 3, requires_grad=True)
    live(x).backward(torch.ones(2, 2))
    assert_close(x.grad, torch.func.vjp(live, x.detach())[1](torch.ones(2, 2))[0], 1e-12)


def test_compiled_live_modules_have_no_gradients_of_parameters():
    live = lrpfx.transform(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), EpsilonPlus(), fold=False)
    x, seed = torch.rand(2, 3, requires_grad=True), torch.ones(2, 2)
    compiled = torch.compile(live, backend="aot_eager", fullgraph=True)
    compiled(x).backward(seed)
    assert_close(x.grad, torch.autograd.grad(live(x), x, seed)[0], 1e-12)
    assert all(parameter.grad is None for parameter in live.parameters())


def test_derivatives_of_relevance_need_a_live_module():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="fold=False"), explain_model.inactive():
        pass
    leaf = torch.rand(2, 3, 8, 8, requires_grad=True)
    output = explain_model(leaf)
    (relevance,) = torch.autograd.grad(output, leaf, torch.ones_like(output), create_graph=True)
    with pytest.raises(lrpfx.InputError, match="fold=False"):
        torch.autograd.grad(relevance.square().sum(), leaf)


def test_pickle_needs_no_class_of_the_user():
    class Recording(pickle.Unpickler):
        modules: ClassVar = set()

        def find_class(self, module, name):
            self.modules.add(module.split(".")[0])
            return super().find_class(module, name)

    Recording(io.BytesIO(pickle.dumps(lrpfx.transform(small_net(), EpsilonPlus())))).load()
    assert Recording.modules <= {"lrpfx", "torch", "collections", "builtins", "copyreg"}


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation as a child, as in several libraries."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


def test_layers_inside_a_layer():
    """The rule of the child finds its place in the layer that took its parent's."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = NormAct(3), nn.Conv2d(3, 2, 1)

        def forward(self, x):
            return self.conv(self.norm(x))

    torch.manual_seed(0)
    model, x = randomize_batch_norm(Net()).eval(), torch.randn(2, 3, 4, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert_close(explain_model(x), model(x), 1e-14)
    assert {"norm", "norm.act", "conv"} <= {row.name for row in lrpfx.assignment(explain_model)}
    assert_close(copy.deepcopy(explain_model)(x), model(x), 1e-14)
    assert list(explain_model.state_dict()) == list(model.state_dict())


def test_weight_standardization():
    """Weights normalized by a batch norm of their own statistics depend on no sample."""

    class Standardized(nn.Conv2d):
        def forward(self, x):
            weight = nn.functional.batch_norm(
                self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0
            ).reshape_as(self.weight)
            return nn.functional.conv2d(x, weight, self.bias)

    model, x = nn.Sequential(Standardized(3, 4, 2), nn.ReLU()).eval(), torch.randn(2, 3, 5, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert_close(explain_model(x), model(x), 1e-14)
    assert lrpfx.ledger(explain_model, x, torch.cos).unexplained <= 1e-9


def test_rule_modules_are_called_and_hooked_by_themselves():
    """Where a layer hands the output of the ReLU after it on, the ReLU still takes one tensor."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    explain_model = lrpfx.transform(nn.Sequential(*layers), lrpfx.composites.EpsilonAlpha2Beta1())
    relus = [module for module in explain_model.modules() if isinstance(module, RuleModule) and module.ruled.takes_over]
    x, value = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 4, 4)
    assert relus and all(torch.equal(relu(value), value.relu()) for relu in relus)
    before = lrpfx.attribute(explain_model, x, 1)
    handle = relus[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    hooked = lrpfx.attribute(explain_model, x, 1)
    handle.remove()
    assert not torch.equal(hooked.output, before.output)
    assert torch.equal(lrpfx.attribute(explain_model, x, 1).relevance, before.relevance)


def test_its_layers_cannot_be_randomized():
    """What looks for modules with `reset_parameters` finds it, and an error."""
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(3, 2)).eval(), EpsilonPlus())
    for owner in (explain_model, copy.deepcopy(explain_model), nn.Sequential(explain_model)):
        found = [module for module in owner.modules() if hasattr(module, "reset_parameters")]
        assert len(found) == 1
        with pytest.raises(
            lrpfx.InputError, match=r"the layers of Sequential cannot be randomized .* randomize the source model"
        ):
            found[0].reset_parameters()


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.flatten(1).view([x.shape[0], x.shape[2], x.numel() // (x.shape[0] * x.shape[2])]), (3, 3, 3)),
        (lambda x: x.transpose(0, 2) * x.stride(0), (3, 4, 4)),
        (lambda x: (torch.softmax(x @ x.mT, -1)[..., None] * x[:, None]).mean(2), (3, 4, 5)),
        (lambda x: (torch.softmax(x @ x.mT, -1)[..., None] * x[:, None]).mean(-2), (3, 1, 5)),
    ],
    ids=["number of entries", "strides", "mean of products", "mean of one product"],
)
def test_torch_compiles_what_reads_sizes(function, shape):
    model, x = Unary(function).double().eval(), torch.randn(shape, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    expected = lrpfx.attribute(explain_model, x, target=torch.ones_like(model(x))).relevance
    compiled = torch.compile(explain_model, fullgraph=True, backend="aot_eager")
    assert_close(lrpfx.attribute(compiled, x, target=torch.ones_like(model(x))).relevance, expected, 1e-12)
