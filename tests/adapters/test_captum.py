"""The methods give what Captum's own LRP and `lrpfx.attribute` give, and run in Captum's tools."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import Layered, assert_close, randomize_batch_norm
from torch import nn

pytest.importorskip("captum")

import captum.attr
import captum.metrics

import lrpfx
from lrpfx.adapters.captum import LRP, DeepLift, DeepLiftShap, LayerLRP
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat, LayerMapComposite
from lrpfx.errors import CaptureError, InputError, InputTypeError
from lrpfx.rules import Epsilon, Pass
from lrpfx.types import Activation, Linear

EPSILON = LayerMapComposite([(Activation, Pass()), (Linear, Epsilon(1e-9))])


class Classifier(nn.Module):
    """What Captum's own LRP takes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(48, 5)
        self.tanh = nn.Tanh()
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.drop(self.tanh(self.hidden(self.relu(self.conv(x)).flatten(1)))))


class Block(Layered):
    def forward(self, x, y):
        return self.relu(self.bn(self.conv(x)) + y)


class Branches(nn.Module):
    """Two inputs, further arguments, a layer that is called twice, and one that reads two values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3), nn.Conv2d(1, 3, 3)
        self.relu = nn.ReLU()
        self.block = Block(conv=nn.Conv2d(3, 3, 1, bias=False), bn=nn.BatchNorm2d(3), relu=nn.ReLU())
        self.head = nn.Linear(3, 4)

    def forward(self, x, y, shift=None, factor=1, name="mean"):
        z = self.block(self.relu(self.first(x)), self.relu(self.second(y)))
        z = self.head(z.mean((2, 3)) if name == "mean" else z.amax((2, 3))) * factor
        return z if shift is None else z + shift


class Scores(nn.Module):
    """One number per sample, or several dimensions of them."""

    def __init__(self, shape):
        super().__init__()
        self.fc = nn.Linear(6, max(1, torch.Size(shape).numel()))
        self.shape = shape

    def forward(self, x):
        return self.fc(x).reshape(len(x), *self.shape)


class Words(Layered):
    def forward(self, tokens, mask=None):
        x = self.embedding(tokens)
        return self.head((x if mask is None else x * mask[..., None]).mean(1))


@pytest.fixture
def classifier():
    return Classifier().eval()


@pytest.fixture
def branches():
    model = Branches().eval()
    randomize_batch_norm(model)
    return model


def image(samples=3):
    return torch.randn(samples, 2, 6, 6)


def captums(method, *args, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it sets requires_grad on the inputs, and says so
        result = method.attribute(*args, **keywords)
    return tuple(one.detach() for one in result) if isinstance(result, tuple) else result.detach()


# --- against Captum's own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [1, (1,), [0, 3, 2], [(0,), (3,), (2,)], torch.tensor(3), torch.tensor([2, 1, 0])], ids=str)
def test_relevance_and_delta_are_those_of_captums_own(classifier, target):
    x = image()
    expected, delta = captums(captum.attr.LRP(classifier), x, target=target, return_convergence_delta=True)
    found, found_delta = LRP(classifier, EPSILON).attribute(x, target=target, return_convergence_delta=True)
    assert_close(found, expected, 1e-9)
    assert_close(found_delta, delta, 1e-9)
    assert not found.requires_grad


@pytest.mark.parametrize("reads", [False, True], ids=["returned", "read"])
def test_relevance_of_layers_is_that_of_captums_own(classifier, reads):
    x, layers = image(), [classifier.head, classifier.conv, classifier.hidden]
    asked = {"target": [0, 3, 2], "attribute_to_layer_input": reads, "return_convergence_delta": True}
    several, deltas = LayerLRP(classifier, layers, EPSILON).attribute(x, **asked)
    assert isinstance(several, list) and isinstance(deltas, list)
    for layer, found, delta in zip(layers, several, deltas, strict=True):
        expected, expected_delta = captums(captum.attr.LayerLRP(classifier, layer), x, **asked)
        assert_close(found, expected, 1e-9)
        torch.testing.assert_close(delta, expected_delta, rtol=1e-9, atol=1e-12)
        alone = LayerLRP(classifier, layer, EPSILON).attribute(x, target=[0, 3, 2], attribute_to_layer_input=reads)
        assert torch.equal(alone, found)


# --- against lrpfx.attribute ------------------------------------------------------------------------------------------------


def test_several_inputs_and_further_arguments(branches):
    x, y, shift = image(), torch.randn(3, 1, 6, 6), torch.randn(3, 4)
    explain_model = lrpfx.transform(branches, EpsilonPlus(), example_inputs=(x, y, shift, 2.0))
    expected = lrpfx.attribute(explain_model, (x, y, shift, 2.0), 1)
    lrp = LRP(branches, EpsilonPlus())
    found, delta = lrp.attribute((x, y), 1, (shift, 2.0), return_convergence_delta=True)
    assert isinstance(found, tuple)
    for one, other in zip(found, expected.relevance, strict=False):
        assert_close(one, other, 1e-12)
    total = sum(one.flatten(1).sum(1) for one in found)
    assert_close(delta, branches(x, y, shift, 2.0)[:, 1].detach() - total, 1e-9)
    assert_close(lrp.compute_convergence_delta(found, branches(x, y, shift, 2.0)[:, 1:2].detach()), delta, 1e-9)


@pytest.mark.parametrize("additional", [None, torch.ones(3, 4), (), (None, 3), (None, 1, "max")], ids=str)
def test_further_arguments_of_all_kinds(branches, additional):
    x, y = image(), torch.randn(3, 1, 6, 6)
    given = () if additional is None else additional if isinstance(additional, tuple) else (additional,)
    found, delta = LRP(branches, EpsilonPlus()).attribute((x, y), 2, additional, True)
    total = sum(one.flatten(1).sum(1) for one in found)
    assert_close(total + delta, branches(x, y, *given)[:, 2].detach(), 1e-9)


def test_a_tensor_gives_a_tensor_and_a_tuple_a_tuple(classifier):
    x, lrp = image(), LRP(classifier, EPSILON)
    alone, (in_tuple,) = lrp.attribute(x, 1), lrp.attribute((x,), 1)
    assert torch.equal(alone, in_tuple)


@pytest.mark.parametrize(
    ("shape", "target"),
    [((), None), ((1,), None), ((1,), 0), ((4, 2), (3, 1)), ((4, 2), [(0, 0), (3, 1), (2, 0)]), ((4, 1), 3)],
)
def test_outputs_of_other_dimensions(shape, target):
    model, x = Scores(shape).eval(), torch.randn(3, 6)
    composite = LayerMapComposite([(Linear, Epsilon(1e-9))])
    found, delta = LRP(model, composite).attribute(x, target, return_convergence_delta=True)
    with torch.no_grad():
        flat = model.fc(x)
        places = [0 if target is None else one for one in (target if isinstance(target, list) else [target] * 3)]
        sizes = [*shape, 1] if isinstance(target, int) else list(shape)
        columns = [
            sum(step * index for step, index in zip([sizes[-1], 1] if len(sizes) == 2 else [1], one, strict=True))
            if isinstance(one, tuple)
            else one
            for one in places
        ]
        chosen = flat[torch.arange(3), columns]
        expected = x * model.fc.weight[columns] * (chosen / (chosen + 1e-9 * chosen.sign()))[:, None]
    assert_close(found, expected, 1e-9)
    assert_close(delta, chosen - expected.sum(1), 1e-6)


def test_tokens_have_the_relevance_of_their_embeddings():
    model, tokens = Words(embedding=nn.Embedding(7, 5), head=nn.Linear(5, 3)), torch.randint(0, 7, (3, 4))
    mask = torch.tensor([[1.0, 1, 1, 0]]).expand(3, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=(tokens, mask))
    expected = lrpfx.attribute(explain_model, (tokens, mask), 1).relevance[0]
    found = LRP(model, EpsilonPlus()).attribute(tokens, 1, mask)
    assert found.shape == (3, 4, 5)
    assert_close(found, expected, 1e-12)
    layer = LayerLRP(model, model.embedding, EpsilonPlus()).attribute(tokens, 1, mask)
    assert torch.equal(layer, found)


def test_layers_that_are_blocks_or_read_several_values(branches):
    inputs = (image(), torch.randn(3, 1, 6, 6))
    explain_model = lrpfx.transform(branches, EpsilonPlus())
    layers = lrpfx.attribute(explain_model, inputs, 1, record=["block", "relu", "relu_1", "block.relu", "first"]).layers
    returned = LayerLRP(branches, [branches.block, branches.block.relu], EpsilonPlus()).attribute(inputs, 1)
    assert_close(returned[0], layers["block"], 1e-12)
    assert_close(returned[1], layers["block.relu"], 1e-12)
    read = LayerLRP(branches, branches.block, EpsilonPlus()).attribute(inputs, 1, attribute_to_layer_input=True)
    assert isinstance(read, tuple)
    for one, name in zip(read, ["relu", "relu_1"], strict=True):
        assert_close(one, layers[name], 1e-12)
    of_input = LayerLRP(branches, branches.first, EpsilonPlus()).attribute(inputs, 1, attribute_to_layer_input=True)
    assert_close(of_input, LRP(branches, EpsilonPlus()).attribute(inputs, 1)[0], 1e-12)


def test_the_composite_may_be_left_out(classifier):
    x = image()
    explainer = lrpfx.Explainer(classifier)
    explainer(x)
    expected = lrpfx.attribute(explainer.explain_model, x, 1).relevance
    assert_close(LRP(classifier).attribute(x, 1), expected, 1e-12)


@pytest.mark.parametrize("model", ["with rules", "compiled"])
def test_modules_with_rules_are_explained(classifier, model):
    x = image()
    explain_model = lrpfx.transform(classifier, EPSILON)
    expected = lrpfx.attribute(explain_model, x, 1).relevance
    given = explain_model if model == "with rules" else torch.compile(explain_model, backend="eager")
    assert_close(LRP(given).attribute(x, 1), expected, 1e-12)
    layer = LayerLRP(given, given.get_submodule("hidden")).attribute(x, 1)
    assert_close(layer, lrpfx.attribute(explain_model, x, 1, record="hidden").layers["hidden"], 1e-12)


# --- models that change -----------------------------------------------------------------------------------------------------


def test_changes_are_explained_and_one_graph_is_compiled_for_all_parameters(compiled, branches):
    inputs, lrp = (image(), torch.randn(3, 1, 6, 6)), LRP(branches, EpsilonPlusFlat())
    layer = LayerLRP(branches, branches.block, EpsilonPlusFlat())
    for change in (
        lambda: None,
        lambda: branches.first.reset_parameters(),
        lambda: branches.block.bn.running_var.data.mul_(2),
        lambda: branches.load_state_dict(Branches().state_dict()),
    ):
        change()
        explain_model = lrpfx.transform(branches, EpsilonPlusFlat())
        expected = lrpfx.attribute(explain_model, inputs, 3, record="block")
        for found, other in zip(lrp.attribute(inputs, 3), expected.relevance, strict=True):
            assert_close(found, other, 1e-12)
        assert_close(layer.attribute(inputs, 3), expected.layers["block"], 1e-12)
    assert len(compiled) == 2
    branches.first = nn.Conv2d(2, 3, 3, bias=False)
    expected = lrpfx.attribute(lrpfx.transform(branches, EpsilonPlusFlat()), inputs, 3).relevance
    assert_close(lrp.attribute(inputs, 3)[0], expected[0], 1e-12)
    assert len(compiled) == 3


def test_the_model_and_the_inputs_are_unchanged(classifier):
    x = image().requires_grad_()
    state = copy.deepcopy(classifier.state_dict())
    before = x.detach().clone()
    (x * 1).sum().backward()  # a gradient of the user's, which stays
    LRP(classifier, EPSILON).attribute(x * 1, 1)
    LayerLRP(classifier, classifier.conv, EPSILON).attribute(x, 1)
    assert torch.equal(x, before) and torch.equal(x.grad, torch.ones_like(x)) and x.requires_grad
    assert all(torch.equal(value, classifier.state_dict()[name]) for name, value in state.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in classifier.modules())
    assert all(parameter.grad is None for parameter in classifier.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(classifier, dtype):
    x = image()
    expected = LRP(classifier, EpsilonPlus()).attribute(x, 1)
    found, delta = LRP(classifier.to(dtype), EpsilonPlus()).attribute(x.to(dtype), 1, return_convergence_delta=True)
    assert found.dtype == delta.dtype == dtype
    assert_close(found.double(), expected, 1e-4 if dtype == torch.float32 else 0.1)


def test_inputs_of_all_layouts(classifier):
    x, lrp = image(4), LRP(classifier, EPSILON)
    expected = lrp.attribute(x, [0, 1, 2, 3])
    for other in (x.to(memory_format=torch.channels_last), x.mT.contiguous().mT, x.expand(1, 4, 2, 6, 6)[0]):
        assert_close(lrp.attribute(other, [0, 1, 2, 3]), expected, 1e-12)
    for sample in range(4):
        assert_close(lrp.attribute(x[sample : sample + 1], sample), expected[sample : sample + 1], 1e-12)
    with torch.no_grad():
        assert torch.equal(lrp.attribute(x, [0, 1, 2, 3]), expected)
    with torch.inference_mode():
        assert_close(lrp.attribute(x.clone(), [0, 1, 2, 3]), expected, 1e-12)


# --- Captum's tools ---------------------------------------------------------------------------------------------------------


def test_what_captum_asks_of_a_method(classifier):
    lrp, layer = LRP(classifier, EPSILON), LayerLRP(classifier, classifier.conv, EPSILON)
    assert isinstance(lrp, captum.attr.Attribution) and isinstance(layer, captum.attr.LayerAttribution)
    assert lrp.has_convergence_delta() and lrp.multiplies_by_inputs and layer.has_convergence_delta()
    assert lrp.get_name() == captum.attr.LRP.get_name()
    assert lrp.forward_func is classifier


@pytest.mark.parametrize("of_layer", [False, True])
@pytest.mark.parametrize("kind", ["smoothgrad", "smoothgrad_sq", "vargrad"])
def test_noise_tunnel(classifier, kind, of_layer):
    x, target = image(2), [3, 1]
    method = LayerLRP(classifier, classifier.conv, EPSILON) if of_layer else LRP(classifier, EPSILON)
    torch.manual_seed(1)
    asked = {"nt_type": kind, "nt_samples": 5, "nt_samples_batch_size": 2, "stdevs": 0.1}
    found, delta = captum.attr.NoiseTunnel(method).attribute(x, target=target, return_convergence_delta=True, **asked)
    torch.manual_seed(1)
    each = []
    for size in (2, 2, 1):
        noisy = x.repeat_interleave(size, 0) + torch.normal(0, torch.full((2 * size, 2, 6, 6), 0.1))
        each.append(method.attribute(noisy, [one for one in target for _ in range(size)]).unflatten(0, (2, size)))
    samples = torch.cat(each, 1)
    moments = {"smoothgrad": samples.mean(1), "smoothgrad_sq": (samples**2).mean(1), "vargrad": samples.var(1, correction=0)}
    assert_close(found, moments[kind], 1e-9)
    assert delta.shape == (10,)


def test_noise_tunnel_with_several_inputs_and_further_arguments(branches):
    inputs, shift = (image(2), torch.randn(2, 1, 6, 6)), torch.randn(2, 4)
    tunnel = captum.attr.NoiseTunnel(LRP(branches, EpsilonPlus()))
    found = tunnel.attribute(inputs, nt_samples=3, stdevs=(0.0, 0.0), target=1, additional_forward_args=(shift, 2.0))
    expected = LRP(branches, EpsilonPlus()).attribute(inputs, 1, (shift, 2.0))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-9)


def test_infidelity_and_sensitivity(classifier):
    x, target = image(2), torch.tensor([3, 1])
    lrp = LRP(classifier, EPSILON)

    def perturb(inputs):
        noise = torch.full_like(inputs, 0.5)
        return noise, inputs - noise

    relevance = lrp.attribute(x, target)
    found = captum.metrics.infidelity(classifier, perturb, x, relevance, target=target, n_perturb_samples=3)
    with torch.no_grad():
        fall = (classifier(x) - classifier(x - 0.5)).gather(1, target[:, None])[:, 0]
    assert_close(found.detach(), ((relevance * 0.5).flatten(1).sum(1) - fall) ** 2, 1e-9)

    sensitivity = captum.metrics.sensitivity_max(
        lrp.attribute, x, perturb_func=lambda inputs, radius: inputs + 0.1, target=target, n_perturb_samples=2
    )
    difference = (lrp.attribute(x + 0.1, target) - relevance).flatten(1)
    assert_close(sensitivity.detach(), difference.norm(dim=1) / relevance.flatten(1).norm(dim=1), 1e-9)


def test_pictures(classifier):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from captum.attr import visualization

    relevance = LRP(classifier, EPSILON).attribute(image(1), 0)[0].permute(1, 2, 0).numpy()
    figure, axis = visualization.visualize_image_attr(relevance, sign="all", use_pyplot=False)
    assert axis.images[0].get_array().shape == (6, 6)
    pyplot.close(figure)


def test_verbose_prints_the_rules(classifier, capsys):
    LRP(classifier, EPSILON).attribute(image(), 1, verbose=True)
    shown = capsys.readouterr().out
    LayerLRP(classifier, classifier.conv, EPSILON).attribute(image(), 1, verbose=True)
    assert shown == capsys.readouterr().out == f"{lrpfx.assignment(lrpfx.transform(classifier, EPSILON))}\n"


# --- errors -----------------------------------------------------------------------------------------------------------------


def test_a_model_in_training_mode_is_an_error(classifier):
    lrp = LRP(classifier, EPSILON)
    lrp.attribute(image(), 1)
    classifier.train()
    with pytest.raises(CaptureError, match=r"is in training mode: drop .*Call model\.eval\(\) first"):
        lrp.attribute(image(), 1)


@pytest.mark.parametrize("model", [torch.relu, None, Classifier])
def test_models_are_modules(model):
    with pytest.raises(InputTypeError, match=r"LRP takes a torch\.nn\.Module"):
        LRP(model, EPSILON)


def test_a_module_with_rules_takes_no_others(classifier):
    with pytest.raises(InputError, match="has its rules already"):
        LRP(lrpfx.transform(classifier, EPSILON), EPSILON)


@pytest.mark.parametrize("inputs", [(), [torch.ones(1, 2, 6, 6)], None, (torch.ones(1, 2, 6, 6), 1)], ids=str)
def test_inputs_are_tensors(classifier, inputs):
    with pytest.raises(InputError, match="inputs"):
        LRP(classifier, EPSILON).attribute(inputs, 1)


def test_a_target_is_needed_for_several_outputs(classifier):
    with pytest.raises(InputError, match="pass target="):
        LRP(classifier, EPSILON).attribute(image())


def test_tokens_that_no_embedding_reads_carry_no_relevance():
    class Counted(Layered):
        def forward(self, x, counts):
            return self.fc(x) * counts[:, None]

    model, x, counts = Counted(fc=nn.Linear(3, 2)), torch.randn(2, 3), torch.tensor([1, 2])
    lrp = LRP(model, EpsilonPlus())
    with pytest.raises(InputError, match="input 1 carries no relevance"):
        lrp.attribute((x, counts), 1)
    assert lrp.attribute(x, 1, counts).shape == x.shape


def test_layers_are_modules_of_the_model_that_are_called_once(branches):
    inputs = (image(), torch.randn(3, 1, 6, 6))
    for layer, error, message in (
        (nn.Linear(1, 1), InputError, "the layer, Linear, is not a module of Branches"),
        (branches, InputError, "the layer is the whole model"),
        ("block", InputTypeError, "a layer is a module of the model, not str"),
        (None, InputTypeError, "a layer is a module of the model, not NoneType"),
        ([], InputError, "the list of layers is empty"),
    ):
        with pytest.raises(error, match=message):
            LayerLRP(branches, layer, EpsilonPlus())
    with pytest.raises(InputError, match="'relu' is called more than once"):
        LayerLRP(branches, branches.relu, EpsilonPlus()).attribute(inputs, 1)
    with pytest.raises(InputError, match=r"merged into .*block\.conv"):
        LayerLRP(branches, branches.block.bn, EpsilonPlus()).attribute(inputs, 1)
    with_dropout = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 2)).eval()
    with pytest.raises(InputError, match="the layer '1' has no value of its own in the graph"):
        LayerLRP(with_dropout, with_dropout[1], EpsilonPlus()).attribute(torch.randn(1, 3), 1)
    replaced = LayerLRP(branches, branches.first, EpsilonPlus())
    branches.first = nn.Conv2d(2, 3, 3)
    with pytest.raises(InputError, match="is not a module of Branches"):
        replaced.attribute(inputs, 1)


@pytest.mark.programs
def test_captum_is_imported_with_the_adapter_alone():
    code = """
import sys, lrpfx
from lrpfx.adapters import quantus
assert "captum" not in sys.modules and "quantus" not in sys.modules
sys.modules["captum"] = sys.modules["captum.attr"] = None
try:
    lrpfx.adapters.captum
except lrpfx.InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "lrpfx.adapters.captum needs captum.attr: pip install 'lrpfx[captum]'\n"


FACTORS = {"one": 1.0}


def of_hook(factors):
    return lambda module, inputs, output: output * factors["one"]


class Code(nn.Module):
    """A model whose class, or what its code reads, may change."""

    factor = 1.0

    def __init__(self, factors):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.layer.register_forward_hook(of_hook(factors))

    def forward(self, x):
        return self.layer(x * FACTORS["one"] * self.factor) + x[:, :3]


def flipped(self, x):
    return self.layer(x.flip(-1))


@pytest.mark.parametrize(
    "change", ["attribute of the class", "method of the class", "global", "closure of a hook", "all modules"]
)
def test_a_change_outside_of_the_model_is_seen(change, monkeypatch):
    factors = {"one": 1.0}
    model, x = Code(factors).double().eval(), torch.randn(2, 4, dtype=torch.float64)
    method = LRP(model, EpsilonPlus())
    before = method.attribute(x, target=1)
    handle = None
    if change == "attribute of the class":
        monkeypatch.setattr(Code, "factor", -2.0)
    elif change == "method of the class":
        monkeypatch.setattr(Code, "forward", flipped)
    elif change == "global":
        monkeypatch.setitem(FACTORS, "one", -2.0)
    elif change == "closure of a hook":
        factors["one"] = -2.0
    else:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: output * -2.0 if isinstance(module, nn.Linear) else None
        )
    try:
        found = method.attribute(x, target=1)
        assert_close(found, lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), x, 1).relevance, 1e-12)
    finally:
        if handle is not None:
            handle.remove()
    assert not torch.allclose(found, before)


def test_a_layer_that_returns_several_values_is_refused():
    class Pair(Layered):
        def forward(self, x):
            return {"one": self.one(x).relu(), "other": self.other(x).relu()}

    class Both(Layered):
        def forward(self, x):
            found = self.pair(x)
            return self.head(found["one"] - found["other"])

    model, x = (
        Both(pair=Pair(one=nn.Linear(4, 3), other=nn.Linear(4, 3)), head=nn.Linear(3, 2)).double().eval(),
        torch.randn(2, 4, dtype=torch.float64),
    )
    with pytest.raises(InputError, match=r"the layer 'pair' returns several values \(pair.relu, pair.relu_1\)"):
        LayerLRP(model, model.pair, EpsilonPlus()).attribute(x, target=1)
    assert LayerLRP(model, model.pair.one, EpsilonPlus()).attribute(x, target=1).shape == (2, 3)


def chain():
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4)
    return nn.Sequential(*layers).eval()


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("target", [1, [3, 0, 2]])
def test_deep_lift_is_that_of_captum(target):
    model, x, baseline = chain(), torch.randn(3, 2, 6), torch.randn(1, 2, 6)
    expected, delta = captum.attr.DeepLift(model).attribute(x, baseline, target=target, return_convergence_delta=True)
    found, own_delta = DeepLift(model).attribute(x, baseline, target=target, return_convergence_delta=True)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-9)
    assert own_delta.shape == delta.shape and own_delta.abs().max() < 1e-12
    assert_close(DeepLift(model).attribute(x, target=target), DeepLift(model).attribute(x, 0.0 * x, target=target))


@pytest.mark.filterwarnings("ignore:.*")
def test_deep_lift_shap_is_that_of_captum():
    model, x, baselines = chain(), torch.randn(3, 2, 6), torch.randn(4, 2, 6)
    expected, deltas = captum.attr.DeepLiftShap(model).attribute(x, baselines, target=1, return_convergence_delta=True)
    found, own_deltas = DeepLiftShap(model).attribute(x, baselines, target=1, return_convergence_delta=True)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-9)
    assert own_deltas.shape == deltas.shape == (12,) and own_deltas.abs().max() < 1e-12
    for drawn in (lambda _: baselines, lambda: baselines):
        assert_close(DeepLiftShap(model).attribute(x, drawn, target=1), found)


@pytest.mark.filterwarnings("ignore:.*")
def test_multipliers_of_deep_lift_are_those_of_captum():
    model, x, baselines = chain(), torch.randn(3, 2, 6), torch.randn(4, 2, 6)
    expected = captum.attr.DeepLift(model, multiply_by_inputs=False).attribute(x, baselines[:1], target=1).detach()
    method = DeepLift(model, multiply_by_inputs=False)
    found, delta = method.attribute(x, baselines[:1], target=1, return_convergence_delta=True)
    assert not method.multiplies_by_inputs and DeepLift(model).multiplies_by_inputs
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert delta.abs().max() < 1e-12
    expected = captum.attr.DeepLiftShap(model, multiply_by_inputs=False).attribute(x, baselines, target=1).detach()
    found = DeepLiftShap(model, multiply_by_inputs=False).attribute(x, baselines, target=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(InputError, match="multipliers are of floating-point inputs"):
        method.attribute(torch.ones(3, 2, dtype=torch.long), target=1)


def test_deep_lift_adds_up_with_several_inputs_and_further_arguments():
    model = Branches().eval()
    x, y, shift = torch.randn(2, 2, 6, 6), torch.randn(2, 1, 6, 6), torch.randn(2, 4)
    randomize_batch_norm(model)
    found, delta = DeepLift(model).attribute((x, y), target=2, additional_forward_args=shift, return_convergence_delta=True)
    difference = (model(x, y, shift) - model(0 * x, 0 * y, shift))[:, 2].detach()
    assert_close(sum(one.flatten(1).sum(1) for one in found), difference)
    assert delta.abs().max() < 1e-12


def test_baselines_that_do_not_fit():
    x = torch.randn(3, 2, 6)
    with pytest.raises(InputError, match="2 baselines for 1 inputs"):
        DeepLift(chain()).attribute(x, (x, x), target=1)
    with pytest.raises(InputError, match="with samples in dimension 0"):
        DeepLiftShap(chain()).attribute(x, 0.0, target=1)


def test_functions_of_multipliers_are_refused():
    with pytest.raises(InputError, match="multiply_by_inputs=False"):
        DeepLift(chain()).attribute(torch.randn(3, 2, 6), target=1, custom_attribution_func=lambda found, x, r: found)
