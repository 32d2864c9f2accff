"""A function as `output=`: it may return entries of the outputs, or what is linear in them; all else is refused."""

import itertools

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import LayerMapComposite
from lrpfx.request.explained_output import computes, passage
from lrpfx.rules import Epsilon, Pass, Uniform
from lrpfx.types import Activation, Linear, Product

ONE_LAYER = LayerMapComposite([(Linear, Epsilon(1e-12))])
CONSERVING = LayerMapComposite([(Linear, Epsilon(1e-12)), (Activation, Pass())])
WITH_PRODUCTS = LayerMapComposite([(Product, Uniform()), *CONSERVING.layer_map])


class TwoHeads(nn.Module):
    """Two outputs without biases, so that relevance of the input sums to what is explained."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8, bias=False)
        self.first = nn.Linear(8, 4, bias=False)
        self.second = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        hidden = self.trunk(x).relu()
        return {"first": self.first(hidden), "second": self.second(hidden)}


@pytest.fixture
def model():
    torch.manual_seed(4)
    return TwoHeads().eval()


@pytest.fixture
def explain_model(model):
    return lrpfx.transform(model, CONSERVING)


@pytest.fixture
def x():
    return torch.randn(3, 6)


def written_into_zeros(outputs):
    result = torch.zeros_like(outputs["first"])
    result[:, 1:] = outputs["first"][:, 1:]
    return result.add_(outputs["second"], alpha=-2)


WEIGHT = torch.arange(8, dtype=torch.float64).sin().reshape(2, 4)
LINEAR = {
    "difference": lambda outputs: (outputs["first"][:, 1] - outputs["first"][:, 0])[:, None],
    "span": lambda outputs: outputs["first"] + outputs["second"][:, [2]],
    "mean": lambda outputs: torch.stack([outputs["first"].mean(1), outputs["second"].sum(1)], 1),
    "matrix": lambda outputs: outputs["first"] @ WEIGHT.T,
    "einsum": lambda outputs: torch.einsum("bi,oi->bo", outputs["first"] / 3, WEIGHT),
    "convolution": lambda outputs: functional.conv1d(outputs["first"][:, None], torch.ones(1, 1, 2)).flatten(1),
    "resampling": lambda outputs: functional.interpolate(outputs["first"][:, None], 7, mode="linear").flatten(1),
    "lerp": lambda outputs: torch.lerp(outputs["first"], outputs["second"], 0.3),
    "in place": written_into_zeros,
    "accumulated": lambda outputs: torch.zeros(3, 2).index_put(
        (torch.arange(3)[:, None], torch.tensor([[0, 1, 0, 1]])), outputs["first"], accumulate=True
    ),
    "batch norm": lambda outputs: functional.batch_norm(outputs["first"], torch.zeros(4), torch.ones(4), WEIGHT[1]),
    "weighed by what is chosen": lambda outputs: outputs["first"] * (outputs["first"] > 0).to(outputs["first"]),
}
ENTRIES = {
    "key": lambda outputs: outputs["first"],
    "index": lambda outputs: outputs["first"][:, [2, 1]],
    "several": lambda outputs: torch.cat([outputs["second"], outputs["first"].flip(1)], 1),
    "largest": lambda outputs: outputs["first"].sort(1).values,
    "by a prediction": lambda outputs: outputs["first"].gather(1, outputs["second"].argmax(1, keepdim=True)),
    "with numbers": lambda outputs: functional.pad(outputs["first"], (0, 1), value=3.0),
    "by a rounded prediction": lambda outputs: outputs["first"].gather(1, outputs["second"][:, :1].round().long() % 4),
    "branch": lambda outputs: outputs["first"] if outputs["first"][0, 0] > 0 else outputs["second"],
}
OTHERS = {
    "log_softmax": lambda outputs: outputs["first"].log_softmax(1),
    "logsumexp": lambda outputs: outputs["first"].logsumexp(1, keepdim=True),
    "relu": lambda outputs: outputs["first"].relu(),
    "clamp": lambda outputs: outputs["first"].clamp(-100, 100),  # equal to its argument here
    "mul": lambda outputs: outputs["first"] * outputs["second"],
    "div": lambda outputs: outputs["first"] / outputs["second"],
    "mm": lambda outputs: outputs["first"] @ outputs["second"].T,
    "pow": lambda outputs: torch.where(outputs["first"] > 1000, outputs["first"] ** 2, outputs["first"]),
    "lerp": lambda outputs: torch.lerp(outputs["first"], outputs["second"], outputs["first"]),
    "native_batch_norm": lambda outputs: functional.batch_norm(outputs["first"], None, None, training=True),
    "tanh": lambda outputs: 2 * outputs["first"].clone().tanh_(),
    "round": lambda outputs: 2 * outputs["first"].round(),
    "floor": lambda outputs: outputs["first"].clone().floor_().sum(1, keepdim=True),
    "floor_divide": lambda outputs: outputs["first"].floor_divide(0.1),
    "gt": lambda outputs: (outputs["first"] > 0).to(outputs["first"].dtype),
    "linalg_vector_norm": lambda outputs: torch.linalg.vector_norm(outputs["first"], dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_function_gives_each_output_its_value_times_its_derivative(model, explain_model, x, name):
    function = LINEAR[name]
    outputs = {key: value.detach().requires_grad_() for key, value in model(x).items()}
    value = function(outputs)[:, 0]
    expected = torch.zeros_like(x)
    for key, gradient in zip(outputs, torch.autograd.grad(value.sum(), list(outputs.values()), allow_unused=True), strict=True):
        if gradient is not None:
            expected += lrpfx.attribute(explain_model, x, gradient * outputs[key].detach(), output=key).relevance
    found = lrpfx.attribute(explain_model, x, 0, output=function)
    assert_close(found.relevance, expected, 1e-12)
    assert_close(found.relevance.sum(1), value.detach(), 1e-9)
    accounts = lrpfx.ledger(explain_model, x, 0, output=function)
    assert abs(accounts.balance) <= 1e-12 * accounts.seed_magnitude and accounts.unexplained <= 1e-12
    assert_close(torch.tensor(accounts.inputs["x"]), found.relevance.sum(), 1e-9)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_function_that_returns_entries_passes_their_relevance_on(model, explain_model, x, name):
    function = ENTRIES[name]
    outputs = {key: value.detach().requires_grad_() for key, value in model(x).items()}
    seed = torch.randn(function(outputs).shape)
    seed[:, 4:] = 0 if name == "with numbers" else seed[:, 4:]
    pulled = torch.autograd.grad(function(outputs), list(outputs.values()), seed, allow_unused=True)
    expected = sum(
        lrpfx.attribute(explain_model, x, one, output=key).relevance
        for key, one in zip(outputs, pulled, strict=True)
        if one is not None
    )
    assert_close(lrpfx.attribute(explain_model, x, seed, output=function).relevance, expected, 1e-12)
    assert not computes(outputs, function)


@pytest.mark.parametrize("name", OTHERS)
def test_a_function_that_is_not_linear_is_refused(explain_model, x, name):
    for explain in (lrpfx.attribute, lrpfx.ledger):
        with pytest.raises(lrpfx.InputError, match=rf"output= computes {name} \(.*_output.py:\d+\), which is not linear"):
            explain(explain_model, x, 0, output=OTHERS[name])


#: The last two operands of each are its factors.
BILINEAR = {
    torch.mul: [(2,), (2,)],
    torch.dot: [(2,), (2,)],
    torch.vdot: [(2,), (2,)],
    torch.mv: [(3, 2), (2,)],
    torch.mm: [(3, 2), (2, 4)],
    torch.bmm: [(5, 3, 2), (5, 2, 4)],
    torch.matmul: [(5, 3, 2), (2, 4)],
    functional.linear: [(3, 2), (4, 2)],
    functional.conv1d: [(1, 2, 5), (3, 2, 2)],
    torch.addr: [(3, 2), (3,), (2,)],
    torch.addmv: [(3,), (3, 2), (2,)],
    torch.addmm: [(3, 4), (3, 2), (2, 4)],
    torch.addbmm: [(3, 4), (5, 3, 2), (5, 2, 4)],
    torch.baddbmm: [(5, 3, 4), (5, 3, 2), (5, 2, 4)],
    torch.addcmul: [(2,), (2,), (2,)],
}


@pytest.mark.parametrize("function", BILINEAR, ids=lambda function: function.__name__)
def test_products_are_linear_in_one_factor(function):
    operands = [torch.randn(shape) for shape in BILINEAR[function]]
    for given in itertools.product([False, True], repeat=len(operands)):
        outputs = [operand for operand, is_output in zip(operands, given, strict=True) if is_output]

        def of_outputs(outputs, given=given):
            left = iter(outputs)
            return function(*(next(left) if is_output else one for one, is_output in zip(operands, given, strict=True)))

        if all(given[-2:]):
            with pytest.raises(lrpfx.InputError, match="which is not linear"):
                computes(outputs, of_outputs)
        else:
            assert computes(outputs, of_outputs) == any(given)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_constants_are_large_beside_the_relevance(scale):
    seed = torch.tensor([1.0, 1.0]) * scale
    assert passage(seed, [seed * (1 - 1e-5)]).is_large and not passage(seed, [seed * (1 - 1e-12)]).is_large


def test_the_remedies_of_the_refusal(model, explain_model, x):
    difference = lrpfx.attribute(explain_model, x, 0, output=LINEAR["difference"])
    assert_close(difference.relevance, lrpfx.attribute(explain_model, x, {1: 1.0, 0: -1.0}, output="first").relevance, 1e-12)

    class WithProduct(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return OTHERS["mul"](self.model(x))

    within = lrpfx.attribute(lrpfx.transform(WithProduct().eval(), WITH_PRODUCTS), x, 0)
    assert_close(within.relevance.sum(1), within.output[:, 0], 1e-8)


def test_constants_of_a_function_are_said_and_accounted_for(model, explain_model, x):
    def shifted(outputs):
        return 2 * outputs["first"] + 1

    with pytest.warns(lrpfx.LrpfxWarning, match="constants in the function given as output= take 3 of its relevance"):
        found = lrpfx.attribute(explain_model, x, 1, output=shifted)
    assert_close(found.relevance.sum(1), 2 * model(x)["first"][:, 1].detach(), 1e-9)
    accounts = lrpfx.ledger(explain_model, x, 1, output=shifted)
    assert_close(torch.tensor(accounts.total("constants")), torch.tensor(3.0), 1e-12)
    assert abs(accounts.balance) <= 1e-12 * accounts.seed_magnitude
    with pytest.warns(lrpfx.LrpfxWarning, match="constants in the function"):  # the entry that is a number
        lrpfx.attribute(explain_model, x, 4, output=ENTRIES["with numbers"])
    for function in (lambda outputs: torch.ones(3, 2), torch.no_grad()(lambda outputs: 2 * outputs["first"])):
        with pytest.raises(lrpfx.InputError, match=r"does not depend on the inputs .*, or output= is a function that detaches"):
            lrpfx.attribute(explain_model, x, 0, output=function)


def test_a_function_may_not_change_the_outputs(explain_model, x):
    with pytest.raises(lrpfx.InputError, match=r"output= writes into the model's output \(.*test_explained_output.py"):
        lrpfx.attribute(explain_model, x, 0, output=lambda outputs: outputs["first"].mul_(2))


MIXING = {
    "minus the mean": lambda outputs: outputs["first"] - outputs["first"].mean(),
    "minus the mean of a class": lambda outputs: outputs["first"][:, 0] - outputs["first"][:, 0].mean(),
    "reversed": lambda outputs: outputs["second"].flip(0),
    "minus the next": lambda outputs: outputs["first"] - outputs["first"].roll(1, 0),
    "one pair": lambda outputs: torch.stack([outputs["first"][0], outputs["first"][2], outputs["first"][2]]),
    "matrix": lambda outputs: torch.ones(3, 3) @ outputs["first"],
}


@pytest.mark.parametrize("name", MIXING)
def test_a_function_that_mixes_samples_is_refused(explain_model, x, name):
    with pytest.raises(lrpfx.InputError, match="from the outputs for another one"):
        lrpfx.attribute(explain_model, x, output=MIXING[name])
    assert lrpfx.attribute(explain_model, x[:1], output=lambda outputs: outputs["first"].flip(0)).relevance.any()


def test_numbers_of_other_samples_may_be_constants(explain_model, x):
    with pytest.warns(lrpfx.LrpfxWarning, match="constants in the function"):
        found = lrpfx.attribute(explain_model, x, 1, output=lambda outputs: outputs["first"] - outputs["first"].detach().mean())
    assert_close(found.relevance, lrpfx.attribute(explain_model, x, 1, output="first").relevance, 1e-9)


def test_samples_may_be_another_dimension_of_an_output():
    layer = nn.Linear(4, 4, bias=False)

    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x).transpose(0, 1)

    x = torch.randn(3, 3, 4)
    found = lrpfx.attribute(lrpfx.transform(SequenceFirst().eval(), ONE_LAYER), x, output=lambda y: y.transpose(0, 1).mean(1))
    named = lrpfx.attribute(lrpfx.transform(nn.Sequential(layer).eval(), ONE_LAYER), x, output=lambda y: y.mean(1))
    assert_close(found.relevance, named.relevance, 1e-12)


RANDOM = {
    "dropout": lambda outputs: functional.dropout(outputs["first"], 0.5, training=True),
    "rand": lambda outputs: (outputs["first"] * torch.rand(4)).sum(1, keepdim=True),
    "randperm": lambda outputs: outputs["first"][:, torch.randperm(4)],
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_function_that_draws_random_numbers_is_refused(explain_model, x, name):
    with pytest.raises(lrpfx.InputError, match=r"output= draws random numbers \(.*_output.py:\d+\)"):
        lrpfx.attribute(explain_model, x, 0, output=RANDOM[name])
    weights = torch.rand(4)  # the remedy
    assert lrpfx.attribute(explain_model, x, 0, output=lambda outputs: outputs["first"] * weights).relevance.any()


def test_a_difference_of_equal_outputs_has_relevance():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    explain_model, x = lrpfx.transform(layer.eval(), ONE_LAYER), torch.tensor([[1.0, 1.0]])
    expected = torch.tensor([[-1.0, 1.0]])
    for target in (None, 0, {0: 1.0}, lambda output: output):
        found = lrpfx.attribute(explain_model, x, target, output=lambda output: output[:, :1] - output[:, 1:])
        assert_close(found.relevance, expected, 1e-9)


def test_several_targets_compiled_patched_and_lowered(model, explain_model, x):
    function = LINEAR["matrix"]
    first, second = (lrpfx.attribute(explain_model, x, target, output=function).relevance for target in (0, 1))
    for module in (explain_model, torch.compile(explain_model, backend="eager")):
        both = lrpfx.attribute(module, x, targets=[0, 1], output=function, chunk_size=2).relevance
        assert_close(both, torch.stack([first, second]), 1e-12)
    others = 0.5 * x  # no ReLU switches
    effect = lrpfx.concepts.patching_effects(explain_model, x, others, 0, names="trunk", output=function)["trunk"]
    change = function(model(others))[:, 0] - function(model(x))[:, 0]
    assert_close(effect.sum(1), change.detach(), 1e-8)
    program = lrpfx.lower(explain_model, x, output=function).module()
    assert_close(program(x, torch.tensor([0, 0, 0]))["relevance"], first, 1e-12)


def test_what_no_signal_reaches_may_weigh_the_outputs(x):
    class WithMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4, bias=False)
            self.register_buffer("mask", torch.tensor([0.5, 2.0, 1.0, 0.0]))

        def forward(self, x):
            return self.layer(x), self.mask * 1.0

    explain_model = lrpfx.transform(WithMask().eval(), ONE_LAYER)
    found = lrpfx.attribute(explain_model, x, 1, output=lambda outputs: outputs[0] * outputs[1])
    assert_close(found.relevance, 2 * lrpfx.attribute(explain_model, x, 1, output=0).relevance, 1e-12)
    accounts = lrpfx.ledger(explain_model, x, 1, output=lambda outputs: outputs[0] * outputs[1])
    assert abs(accounts.balance) <= 1e-12 * accounts.seed_magnitude
