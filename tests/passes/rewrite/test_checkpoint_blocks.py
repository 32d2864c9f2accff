"""Blocks that are computed again in the backward pass give the same maps, and keep only what they read."""

import copy
import pickle

import pytest
import torch
from helpers import assert_same, blocks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lrpfx
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonPlus
from lrpfx.passes.program import CallOfModule


class Layer(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 10), nn.Linear(10, width)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


class Network(nn.Module):
    """Two layers, of which the second runs twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.last = nn.Linear(6, 3)
        self.eval()

    def forward(self, x):
        x = self.layers[1](self.layers[0](self.first(x)))
        return self.last(self.layers[1](x).sin())


class Attention(nn.Module):
    """With a mask of numbers, for which its parts are recomputed on their own."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x, mask):
        query, key, value = self.inner(x).chunk(3, -1)
        return x + self.outer(nn.functional.scaled_dot_product_attention(query, key, value, mask))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.eval()

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network().double()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 4, dtype=torch.float64)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_calls_of_one_module_are_blocks_of_their_own(network, x, capture):
    again = lrpfx.transform(network, EpsilonPlus(), x, capture=capture, checkpoint="layers.*")
    assert blocks(again) == ["layers.0", "layers.1", "layers.1 (call 2)"]
    assert again.code.count("recomputed_layers") >= 3
    plain = lrpfx.transform(network, EpsilonPlus(), x, capture=capture)
    assert_same(lrpfx.attribute(again, x, 1), lrpfx.attribute(plain, x, 1))


def test_blocks_are_computed_again_and_hold_nothing(network, x):
    counts, held = [], []
    for checkpoint in ((), "layers.*"):
        explain_model = lrpfx.transform(network, AttnLRP(), x, checkpoint=checkpoint)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, kept=kept: kept.append(one.shape) or one, lambda one: one):
            output = explain_model(x.requires_grad_())
        with Counted() as counted:
            torch.autograd.grad(output.sum(), x)
        counts.append(counted.count)
        held.append(sum(shape == (5, 10) for shape in kept))
    assert counts == [8, 8 + 3]  # of the two products of a block, the second one makes nothing that the backward pass reads
    assert held[0] > 0 and held[1] == 0


def test_what_is_asked_inside_of_blocks(network, x):
    plain, again = (lrpfx.transform(network, AttnLRP(), x, checkpoint=one) for one in ((), "layers.*"))
    for options in (
        {"target": 1, "record": ["layers.1.inner", "layers.1.inner_1", "layers.0"], "record_multipliers": ["layers.1.inner"]},
        {"target": 1, "conditions": [{"layers.0.inner": [3]}, {"layers.1.inner_1": [2, 4]}]},
        {"targets": [0, 2], "conditions": [{"layers.0.inner": [3]}, {"layers.1.inner_1": [2, 4]}]},
        {"target": (0,), "start": "layers.1.inner"},
    ):
        assert_same(lrpfx.attribute(again, x, **options), lrpfx.attribute(plain, x, **options))
    assert str(lrpfx.ledger(again, x, target=1)) == str(lrpfx.ledger(plain, x, target=1))
    mask = {"x": x, "mask_layers_0_inner": torch.rand(5, 10, dtype=torch.float64)}
    pair = (lrpfx.attribute(lrpfx.condition(one, "layers.0.inner"), mask, 1) for one in (again, plain))
    assert_same(*pair)


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_blocks_in_blocks(x, chunk_size):
    torch.manual_seed(0)
    model, mask = Attentive().double(), torch.randn(2, 5, 5, dtype=torch.float64)
    inputs = {"x": torch.stack([x, 2 * x]), "mask": mask}
    plain, again = (lrpfx.transform(model, AttnLRP(), inputs, constants=("mask",), checkpoint=one) for one in ((), "layers.*"))
    assert any("recomputed" in detail for _, detail in next(one.details for one in lrpfx.history(again)[-2:]))
    options = {"targets": [(-1, 2), (0, 1)], "chunk_size": chunk_size}
    assert_same(lrpfx.attribute(again, inputs, **options), lrpfx.attribute(plain, inputs, **options))


def test_differences_from_a_reference(network, x):
    plain, again = (lrpfx.transform(network, DeepLIFT(), x, checkpoint=one) for one in ((), "layers.*"))
    reference = torch.zeros_like(x)
    assert_same(lrpfx.attribute(again, x, 1, reference=reference), lrpfx.attribute(plain, x, 1, reference=reference))


def test_derivatives_of_relevance(network, x):
    found = []
    for checkpoint in ((), "layers.*"):
        explain_model = lrpfx.transform(network, EpsilonPlus(), x, fold=False, checkpoint=checkpoint)
        leaf = x.clone().requires_grad_()
        output = explain_model(leaf)
        (relevance,) = torch.autograd.grad(output, leaf, output.detach(), create_graph=True)
        weight = explain_model.get_parameter("layers.1.inner.weight")
        with explain_model.inactive():
            found.append(torch.autograd.grad(relevance.square().sum(), [leaf, weight]))
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_copies_and_new_weights(network, x):
    again = lrpfx.transform(network, EpsilonPlus(), x, checkpoint="layers.*")
    expected = lrpfx.attribute(again, x, 1)
    for copied in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert copied.code == again.code
        assert_same(lrpfx.attribute(copied, x, 1), expected)
    other = Network().double()
    copied.load_state_dict(other.state_dict())
    assert_same(lrpfx.attribute(copied, x, 1), lrpfx.attribute(lrpfx.transform(other, EpsilonPlus(), x), x, 1))
    assert_same(lrpfx.attribute(again, x, 1), expected)


def test_hooks_run_once(network, x):
    again = lrpfx.transform(network, EpsilonPlus(), x, checkpoint="layers.*")
    expected, calls = lrpfx.attribute(again, x, 1), []
    again.get_submodule("layers.0.inner").register_forward_hook(lambda *arguments: calls.append(arguments))
    assert_same(lrpfx.attribute(again, x, 1), expected)
    assert len(calls) == 1


def test_transforms_of_torch_and_programs(network, x):
    plain, again = (lrpfx.transform(network, EpsilonPlus(), x, checkpoint=one) for one in ((), "layers.*"))
    gradients = [torch.func.grad(lambda leaf, one=one: one(leaf)[:, 1].sum())(x) for one in (plain, again)]
    assert torch.equal(*gradients)
    programs = [lrpfx.lower(one, x, target=1).module()(x) for one in (plain, again)]
    for one, other in zip(*map(tree_leaves, programs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "checkpoint, message",
    [
        ("layer.*", "matches no module that forward calls; did you mean 'layers"),
        (("layers.*", "layers.0.inner"), "is inside layers.0, which 'layers.*' matches: name either"),
        (3, "not 3"),
        (["layers.*", None], "or several of them"),
    ],
)
def test_patterns_that_cannot_be_followed(network, x, checkpoint, message):
    with pytest.raises(lrpfx.InputError, match=message.replace("*", r"\*")) as error:
        lrpfx.transform(network, EpsilonPlus(), x, checkpoint=checkpoint)
    assert error.value.topic == "recomputed-blocks"


def test_modules_without_relevance(x):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = nn.Linear(1, 1), nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) * self.scale(torch.ones(1, dtype=torch.float64))

    with pytest.raises(lrpfx.InputError, match="nothing to compute again"):
        lrpfx.transform(Scaled().double().eval(), EpsilonPlus(), x, checkpoint="scale")


def test_what_lies_between_the_parts_of_a_block(x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus(), x), x, 1)
    captured = lrpfx.capture(model, x)
    first, second = CallOfModule("one", 1), CallOfModule("two", 1)
    captured._program.calls = {"0": (first,), "2": (first,), "3": (second,), "4": (second,)}
    assert_same(lrpfx.attribute(lrpfx.transform(captured, EpsilonPlus(), checkpoint="one"), x, 1), expected)
    captured._program.calls = {"0": (first,), "1": (second,), "2": (first,), "3": (second,)}
    for checkpoint in ("one", ("one", "two")):
        with pytest.raises(lrpfx.InputError, match=r"one cannot be computed again on its own: it reads what (1|two) computes"):
            lrpfx.transform(captured, EpsilonPlus(), checkpoint=checkpoint)
