"""Maps that cannot be right say so, and name the layer where it began; the others do not, and cost nothing more."""

import warnings

import pytest
import torch
from combinations import each_pair
from helpers import Unary, assert_close, small_net
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.attribution.plausibility import magnitudes
from lrpfx.composites import (
    AttnLRP,
    EpsilonGammaBox,
    EpsilonPlus,
    GuidedBackprop,
    LayerMapComposite,
    MixedComposite,
    NameMapComposite,
)
from lrpfx.core import Hook
from lrpfx.errors import LrpfxWarning
from lrpfx.types import Linear, Softmax


class Times(Hook):
    """Passes on relevance times a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def copy(self):
        return Times(self.factor)

    def propagate(self, call, relevance):
        return (relevance * self.factor,)


def dense(*tail, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)]
    return nn.Sequential(*layers, *tail).eval()


def objection(explain_model, *arguments, **settings):
    """The one warning of a call of `attribute`, or an empty text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lrpfx.attribute(explain_model, *arguments, **settings)
    found = [str(one.message) for one in caught if issubclass(one.category, lrpfx.LrpfxWarning)]
    assert len(found) <= 1 and all(one.filename == __file__ for one in caught if str(one.message) in found)
    return "".join(found)


# --- more than there was -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e4, 1e30, -1e4, float("inf"), float("nan")])
def test_the_layer_where_it_began_is_named(factor):
    """The second ReLU multiplies, and the first one passes on what it got."""
    model, x = dense(), torch.rand(2, 4)
    composite = NameMapComposite([(["3"], Times(factor)), (["1"], rules.Pass()), (["0", "2", "4"], rules.Epsilon())])
    for optimize in (True, False):
        text = objection(lrpfx.transform(model, composite, optimize=optimize), x, torch.rand(2, 3))
        assert "not determined" in text and "it began at 3 (Times())" in text and "docs/rules.md" in text
        assert ("not finite" in text) == (not abs(factor) < 1e300)


@pytest.mark.parametrize(
    "target",
    [
        *({"target": target} for target in (0, None, torch.tensor([1, 2]), [0, 2])),
        *({"targets": targets} for targets in ([0, 2, 1], [torch.ones(2, 3), 1], torch.ones(4, 2, 3))),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"record": ["2"]}, {"chunk_size": 2}])
def test_every_form_of_call_is_checked(target, settings):
    model, x = dense(), torch.rand(2, 4)
    composite = NameMapComposite([(["1"], Times(1e7)), (["3"], rules.Pass()), (["0", "2", "4"], rules.Epsilon())])
    assert "it began at 1 (Times())" in objection(lrpfx.transform(model, composite), x, **target, **settings)
    assert objection(lrpfx.transform(model, EpsilonPlus()), x, **target, **settings) == ""


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_every_form_of_input_is_checked(form):
    composite = LayerMapComposite([(nn.ReLU, Times(1e7)), (Linear, rules.Epsilon())])
    assert "it began at 3" in objection(lrpfx.transform(dense(), composite), form(torch.rand(2, 4)), 0)


def test_one_sample_of_many_is_enough():
    class OfOne(Hook):
        def propagate(self, call, relevance):
            factor = torch.ones(len(relevance), 1)
            factor[17] = 1e5
            return (relevance * factor,)

    composite = NameMapComposite([(["3"], OfOne()), (["1"], rules.Pass()), (["0", "2", "4"], rules.Epsilon())])
    assert "it began at 3" in objection(lrpfx.transform(dense(), composite), torch.rand(64, 4), torch.ones(64, 3))


def test_branches_are_told_apart():
    """One branch of a sum passes on what it got, and the other one multiplies it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.ReLU(), nn.ReLU()

        def forward(self, x):
            return self.a(x) + self.b(x)

    composite = NameMapComposite([(["b"], Times(1e9)), (["a"], rules.Pass()), (["add"], rules.Norm())])
    assert "it began at b (" in objection(lrpfx.transform(Net().eval(), composite), torch.rand(2, 3), torch.ones(2, 3))


def test_embeddings_are_watched():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 3, bias=False)

        def forward(self, tokens):
            return self.head(self.embedding(tokens).relu().mean(1))

    composite = EpsilonPlus(layer_map=[(nn.ReLU, Times(1e7))])
    tokens = torch.tensor([[1, 2, 3], [4, 0, 1]])
    assert "it began at relu" in objection(lrpfx.transform(Net().eval(), composite), tokens, 0)


def test_gamma_without_the_biases_that_decide_its_sign():
    """The bias alone makes z positive: the contributions that share its relevance cancel."""
    layer = nn.Conv2d(2, 1, 1)
    layer.weight.data, layer.bias.data = torch.tensor([1.0, -1.25]).reshape(1, 2, 1, 1), torch.tensor([0.5])
    model = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), layer, nn.ReLU(), nn.Flatten()).eval()
    model[0].weight.data = torch.eye(2)[:, :, None, None]
    x = torch.ones(1, 2, 1, 1)
    gamma = "Gamma(gamma=0.25, stabilizer=1e-06, zero_params='bias')"
    text = objection(lrpfx.transform(model, EpsilonGammaBox(-4.0, 4.0, zero_params="bias")), x)
    assert "not determined" in text and f"it began at 1 ({gamma})" in text
    assert objection(lrpfx.transform(model, EpsilonGammaBox(-4.0, 4.0)), x) == ""


def test_a_small_logit_among_large_ones_is_no_alarm():
    """Relevance of a class whose contributions cancel is larger than its logit: it is measured by the largest."""
    model, x = nn.Sequential(nn.Linear(4, 2, bias=False)).eval(), torch.ones(1, 4)
    model[0].weight.data = torch.tensor([[5.0, -5.0, 3.0, -3.0 + 1e-4], [5.0, 5.0, 3.0, 3.0]])
    explain_model = lrpfx.transform(model, EpsilonPlus(1e-12))
    assert lrpfx.attribute(explain_model, x, 0).relevance.abs().sum() > 1e4 * 1e-4
    assert "not determined" in objection(explain_model, x, torch.tensor([[1e-4, 0.0]]))


def test_a_plain_gradient_is_no_share_of_the_output():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    model[0].weight.data *= 1e6
    assert objection(lrpfx.transform(model, GuidedBackprop()), torch.rand(2, 4), torch.ones(2, 2)) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_magnitudes(dtype):
    """The sum of a sample's magnitudes does not overflow in 16 bits."""
    relevance = torch.full((3, 2, 5, 30000), -2.0, dtype=dtype)
    relevance[1, 0] = 0
    assert magnitudes([relevance, relevance[..., :1]], 3) == [300010.0] * 3
    assert magnitudes([torch.zeros(2, 0, 3)], 2) == [0.0, 0.0] and magnitudes([torch.tensor([2.0, -3.0])], 2) == [2.0, 3.0]


def test_ordinary_maps_are_not_run_twice():
    runs = []
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    explain_model.conv1.register_forward_hook(lambda module, args, output: runs.append(1))
    lrpfx.attribute(explain_model, torch.randn(2, 3, 8, 8), [0, 1])
    assert len(runs) == 1


# --- nothing at all ----------------------------------------------------------------------------------------------------------


def test_relevance_of_exactly_zero():
    class Nothing(Hook):
        def propagate(self, call, relevance):
            return (torch.zeros_like(relevance),)

    composite = NameMapComposite([(["3"], Nothing()), (["1"], rules.Pass()), (["0", "2", "4"], rules.Epsilon())])
    explain_model, x = lrpfx.transform(dense(), composite), torch.rand(2, 4)
    text = objection(explain_model, x, 0)
    assert "exactly zero" in text and "nothing goes on from 3 (Nothing())" in text
    assert objection(explain_model, x, torch.zeros(2, 3)) == "", "a seed of zero has no relevance"
    assert "exactly zero" in objection(explain_model, x, targets=[torch.zeros(2, 3), torch.ones(2, 3)])


def test_an_input_without_signal_says_so():
    assert "exactly zero" in objection(lrpfx.transform(small_net(), EpsilonPlus()), torch.zeros(1, 3, 8, 8), 0)


def test_lowering_does_not_judge_its_examples():
    """They are for shapes; the suite turns warnings into errors."""
    explain_model = lrpfx.transform(dense(), EpsilonPlus())
    assert "exactly zero" in objection(explain_model, torch.zeros(2, 4), torch.ones(2, 3))
    lrpfx.lower(explain_model, torch.zeros(2, 4), target="weights")


# --- a final softmax ---------------------------------------------------------------------------------------------------------


class Ends(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = dense(), function
        self.eval()

    def forward(self, x):
        return self.function(self.inner(x))


SOFTMAXES = {
    "softmax": lambda x: x.softmax(1),
    "function": lambda x: F.softmax(3 * x, dim=-1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "log": lambda x: torch.log(torch.softmax(x, -1)),
    "views": lambda x: x.unsqueeze(2).softmax(1).squeeze(2).contiguous(),
    "single precision": lambda x: F.softmax(x, 1, dtype=torch.float32).double(),
}
OTHERS = {
    "sigmoid": lambda x: x.sigmoid(),
    "attention": lambda x: x.softmax(1) * x,
    "read": lambda x: (x.softmax(1)[:, :, None] @ x[:, None, :]).sum(2),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.sampled(3)
def test_a_class_behind_a_softmax(name, capture):
    model, x = Ends(SOFTMAXES[name]), torch.rand(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    for target in (0, None, torch.tensor([1, 2]), [0, 1]):
        text = objection(explain_model, x, target)
        assert "softmax" in text and 'explain="logits"' in text
    assert any('explain="logits"' in text for text in lrpfx.check(model, EpsilonPlus(), x).warnings)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_final_softmax(name):
    model, x = Ends(OTHERS[name]), torch.rand(2, 4)
    assert objection(lrpfx.transform(model, EpsilonPlus(), example_inputs=x), x, 0) == ""
    assert lrpfx.check(model, EpsilonPlus(), x).warnings == ()


def test_a_softmax_whose_rule_keeps_its_relevance():
    model, x = Ends(SOFTMAXES["softmax"]), torch.rand(2, 4)
    composite = EpsilonPlus(layer_map=[(Softmax, rules.Pass())])
    assert objection(lrpfx.transform(model, composite), x, 0) == ""


def test_a_seed_of_all_outputs_of_a_softmax():
    """p - p Σp is nothing, or what rounding leaves of it."""
    explain_model, x = lrpfx.transform(Ends(SOFTMAXES["softmax"]), EpsilonPlus()), torch.rand(2, 4)
    text = objection(explain_model, x, lambda output: output)
    assert "the map is empty" in text and 'explain="logits"' in text
    seed = torch.zeros(2, 3)
    seed[:, 0] = 1
    assert objection(explain_model, x, seed) == "", (
        "relevance of one class by hand, of which a softmax not sure of it passes some on"
    )
    exact = lrpfx.transform(Unary(lambda x: x.softmax(1)), EpsilonPlus())
    assert "exactly zero" in objection(exact, torch.zeros(1, 2), lambda output: output)


def test_the_output_that_is_chosen():
    model, x = Ends(lambda x: {"logits": x, "scores": x.softmax(1)}), torch.rand(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert objection(explain_model, x, 0, output="logits") == ""
    assert "softmax" in objection(explain_model, x, 0, output="scores")


# --- explain="logits" --------------------------------------------------------------------------------------------------------


@each_pair(name=[*SOFTMAXES, "sigmoid"], capture=["symbolic", "export"], optimize=[True, False])
@pytest.mark.sampled(3)
def test_logits(name, capture, optimize):
    model, x = Ends({**SOFTMAXES, **OTHERS}[name]), torch.rand(2, 4) - 0.5
    factor = 3 if name == "function" else 1
    settings = {"example_inputs": x, "capture": capture, "optimize": optimize, "input_range": (-1.0, 1.0)}
    explain_model = lrpfx.transform(model, EpsilonPlus(), explain="logits", **settings)
    found, expected = (
        lrpfx.attribute(one, x, 1) for one in (explain_model, lrpfx.transform(model.inner, EpsilonPlus(), **settings))
    )
    assert_close(found.output, factor * expected.output, 1e-12)
    assert_close(found.relevance, factor * expected.relevance, 1e-12)
    assert_close(found.relevance.sum(1), found.output[:, 1], 1e-4)
    accounts = lrpfx.ledger(explain_model, x, 1)
    assert accounts.unexplained <= 1e-9 and accounts.total("expansion") == 0
    assert model(x).sum() != found.output.sum(), "the model itself still returns probabilities"
    program = lrpfx.lower(explain_model, x)
    assert_close(program.module()(x, torch.tensor([1, 1]))["relevance"], found.relevance, 1e-12)


def test_logits_that_are_never_negative():
    """Relevance begins at the logits: no shortcut may take it for zero where they are not positive."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Softmax(1)).eval(), torch.randn(5, 4)
    seed = torch.randn(5, 6)
    composite = EpsilonPlus(layer_map=[(Linear, rules.AlphaBeta())])
    fast, direct = (lrpfx.transform(model, composite, explain="logits", optimize=optimize) for optimize in (True, False))
    assert_close(lrpfx.attribute(fast, x, seed).relevance, lrpfx.attribute(direct, x, seed).relevance, 1e-12)


def test_outputs_beside_the_probabilities():
    def function(x):
        scores = x.softmax(1)
        return {"scores": scores, "class": scores.argmax(1), "top": scores.max(1)[0], "logits": x}

    model, x = Ends(function), torch.rand(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, explain="logits")
    found, expected = explain_model(x), model(x)
    assert torch.equal(found["scores"], expected["logits"]) and torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found["class"], expected["class"])
    names = lrpfx.node_names(explain_model)
    assert len(set(names)) == len(names)


def test_where_there_are_no_probabilities():
    with pytest.raises(lrpfx.InputError, match=r"ends in a softmax or a sigmoid, but .* ends in 4 \(linear\)"):
        lrpfx.transform(dense(), EpsilonPlus(), explain="logits")
    with pytest.raises(lrpfx.InputError, match=r"explain is .* not 'probabilities'"):
        lrpfx.transform(dense(), EpsilonPlus(), explain="probabilities")
    with pytest.raises(lrpfx.InputError, match="ends in a softmax"):
        lrpfx.transform(Ends(OTHERS["attention"]), EpsilonPlus(), explain="logits")


def test_a_softmax_in_front_of_the_last_layer():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 2)).eval(), torch.rand(2, 4)
    assert objection(lrpfx.transform(model, EpsilonPlus()), x, 0) == ""


def test_branches_that_are_computed_again_may_get_no_relevance_at_all():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
            self.eval()

        def forward(self, x):
            return torch.relu(self.second(torch.relu(self.first(x))) + x - 100).abs() + 0.1

    x = torch.rand(2, 1, 4, 4)
    text = objection(lrpfx.transform(Block(), EpsilonPlus(zero_params="bias")), x, torch.rand(2, 1, 4, 4))
    assert "the map is empty" in text and "nothing goes on from add" in text


def _doubled(x):
    return x * 2.0


def _reversed_twice(x):
    return x.flip(0).flip(0).clone()


def custom_operator(function, factor):
    """An operator that the table does not list, whose gradient is `factor` times that of its result."""
    operator = torch.library.custom_op(f"tests::{function.__name__}", function, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_fake(lambda x: torch.empty_like(x))
    operator.register_autograd(lambda ctx, gradient: gradient * factor)
    return operator


OPERATORS = {"doubled": custom_operator(_doubled, 2.0), "moved": custom_operator(_reversed_twice, 1.0)}


class WithOperator(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.last, self.name = nn.Linear(4, 4), nn.Linear(4, 3), name

    def forward(self, x):
        return self.last(torch.relu(OPERATORS[self.name](self.first(x))))


@pytest.mark.parametrize("composite", [EpsilonPlus, AttnLRP])
def test_a_plain_gradient_that_makes_relevance_is_named_once(composite):
    x = torch.randn(2, 4)
    explain_model = lrpfx.transform(WithOperator("doubled").eval(), composite(), example_inputs=x, unassigned="gradient")
    with pytest.warns(LrpfxWarning, match=r"does not add up: \w*doubled .*makes .* of the .* that it receives; give it a rule"):
        lrpfx.attribute(explain_model, x, 0)
    lrpfx.attribute(explain_model, x, 1)  # an LrpfxWarning would be an error
    by_name = MixedComposite([NameMapComposite([(["*doubled"], rules.Epsilon())]), composite()])
    lrpfx.attribute(lrpfx.transform(WithOperator("doubled").eval(), by_name, example_inputs=x), x, 0)


@pytest.mark.parametrize("composite, name", [(EpsilonPlus, "moved"), (GuidedBackprop, "doubled")])
def test_a_plain_gradient_that_moves_relevance_or_is_meant_needs_no_word(composite, name):
    x = torch.randn(2, 4)
    explain_model = lrpfx.transform(WithOperator(name).eval(), composite(), example_inputs=x, unassigned="gradient")
    lrpfx.attribute(explain_model, x, 0)
