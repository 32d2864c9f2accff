"""Gradients of objectives that read relevance, against finite differences of what `lrpfx.attribute` returns."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonGammaBox, EpsilonPlus
from lrpfx.errors import InputError, InputTypeError
from lrpfx.rules import NormalizationEpsilon


def network(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    )
    for tensor in (model[1].weight, model[1].running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    return model.double().eval()


X, LABELS = torch.rand(2, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), [2, 0]
MASK = torch.zeros(5, 5, dtype=torch.bool)
MASK[:2, 1:4] = True


def objective(output, relevance):
    return functional.cross_entropy(output, torch.tensor(LABELS)) + relevance[..., MASK].square().sum()


@pytest.mark.parametrize("composite", [AttnLRP(), EpsilonPlus(), EpsilonGammaBox(-0.1, 1.1)], ids=repr)
def test_gradients_are_those_of_finite_differences(composite):
    live = lrpfx.transform(network(), composite, example_inputs=X, fold=False)
    value = lrpfx.backward_through_relevance(live, X, objective, LABELS)

    def measured():
        with torch.no_grad():
            attribution = lrpfx.attribute(live, X, LABELS)
            return float(objective(attribution.output, attribution.relevance))

    assert not value.requires_grad
    assert float(value) == pytest.approx(measured(), rel=1e-9)
    for name in ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "6.weight"):
        parameter = live.get_parameter(name)
        for place in (0, parameter.numel() // 2, parameter.numel() - 1):
            entry, step, found = parameter.detach().view(-1), 1e-6, []
            for sign in (1, -1):
                entry[place] += sign * step
                found.append(measured())
                entry[place] -= sign * step
            expected = (found[0] - found[1]) / (2 * step)
            assert float(parameter.grad.view(-1)[place]) == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, place)


class Normalized(nn.Module):
    """Two normalizations, which a composite may map as one module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(5), nn.GroupNorm(2, 4)
        nn.init.uniform_(self.second.bias)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm((4, 5)),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.InstanceNorm1d(4),
        lambda: nn.RMSNorm(5),
        Normalized,
        lambda: nn.TransformerEncoderLayer(5, 1, 7, batch_first=True, dropout=0.0),
    ],
)
@pytest.mark.parametrize("composite", [AttnLRP(), EpsilonPlus(layer_map=[(Normalized, NormalizationEpsilon())])], ids=repr)
def test_scales_of_normalizations_have_derivatives(make, composite):
    """A scale is held in relevance, but relevance depends on the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), make(), nn.Flatten(), nn.Linear(20, 2)).double().eval()
    x = torch.rand(2, 4, 3, dtype=torch.float64)
    with warnings.catch_warnings():  # an entry that matches no layer
        warnings.simplefilter("ignore")
        live = lrpfx.transform(model, composite, example_inputs=x, fold=False)
    lrpfx.backward_through_relevance(live, x, lambda output, relevance: relevance.square().sum(), 1)
    weight, found = live.get_parameter("0.weight"), []
    with torch.no_grad():
        for step in (1e-6, -1e-6):
            weight[1, 2] += step
            found.append(float(lrpfx.attribute(live, x, 1).relevance.square().sum()))
            weight[1, 2] -= step
    assert float(weight.grad[1, 2]) == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-4, abs=1e-7)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, left, right):
        return self.head(torch.relu(self.left(left) + self.right(right)))


def test_relevance_has_the_structure_of_the_inputs_and_gradients_add_up():
    model = TwoInputs().double().eval()
    inputs = {"left": torch.rand(2, 3, dtype=torch.float64), "right": torch.rand(2, 2, dtype=torch.float64)}
    live = lrpfx.transform(model, AttnLRP(), fold=False)
    seen = []

    def of_left(output, relevance):
        seen.append({name: one.detach() for name, one in relevance.items()})
        return relevance["left"].abs().sum()

    lrpfx.backward_through_relevance(live, inputs, of_left, 1)
    expected = lrpfx.attribute(live, inputs, 1).relevance
    assert set(seen[0]) == {"left", "right"}
    for name, relevance in expected.items():
        torch.testing.assert_close(seen[0][name], relevance)
    once = {name: one.grad.clone() for name, one in live.named_parameters() if one.grad is not None}
    lrpfx.backward_through_relevance(live, inputs, of_left, 1)
    for name, gradient in once.items():
        torch.testing.assert_close(live.get_parameter(name).grad, 2 * gradient)
    assert not any(value.requires_grad for value in inputs.values())


def test_training_reaches_the_model_that_shares_its_memory():
    model = network()
    live = lrpfx.transform(model, AttnLRP(), fold=False, share=True)
    optimizer = torch.optim.Adam(live.parameters(), lr=0.01)

    def inside():
        return float(lrpfx.attribute(lrpfx.transform(model, AttnLRP()), X, LABELS).relevance[..., MASK].square().sum())

    before = inside()
    for _ in range(20):
        optimizer.zero_grad()
        lrpfx.backward_through_relevance(live, X, lambda output, relevance: relevance[..., MASK].square().sum(), LABELS)
        optimizer.step()
    assert inside() < 0.5 * before


def test_wrong_contexts_are_errors():
    live = lrpfx.transform(network(), AttnLRP(), fold=False)
    before = [one.grad for one in live.parameters()]
    with pytest.raises(InputError, match="fold=False"):
        lrpfx.backward_through_relevance(lrpfx.transform(network(), AttnLRP()), X, objective, LABELS)
    with live.inactive(), pytest.raises(InputError, match="rules of Sequential are inactive"):
        lrpfx.backward_through_relevance(live, X, objective, LABELS)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, pytest.raises(InputError, match="gradients are disabled"):
            lrpfx.backward_through_relevance(live, X, objective, LABELS)
    with pytest.raises(InputTypeError, match="Sequential"):
        lrpfx.backward_through_relevance(network(), X, objective, LABELS)
    with pytest.raises(InputTypeError, match="not compiled"):
        lrpfx.backward_through_relevance(torch.compile(live), X, objective, LABELS)
    assert before == [one.grad for one in live.parameters()] == [None] * len(before)
    live.requires_grad_(False)
    with pytest.raises(InputError, match="requires_grad_"):
        lrpfx.backward_through_relevance(live, X, objective, LABELS)


@pytest.mark.parametrize(
    "without",
    [
        lambda output, relevance: functional.cross_entropy(output, torch.tensor(LABELS)),
        lambda output, relevance: output.sum() + relevance.detach().sum(),
        lambda output, relevance: torch.tensor(relevance.abs().sum().item()),
    ],
)
def test_objectives_without_a_graph_to_relevance_are_errors(without):
    live = lrpfx.transform(network(), AttnLRP(), fold=False)
    with pytest.raises(InputError, match="does not depend on the relevance"):
        lrpfx.backward_through_relevance(live, X, without, LABELS)
    assert all(one.grad is None for one in live.parameters())


@pytest.mark.parametrize(
    "value", [lambda output, relevance: relevance, lambda output, relevance: 1.0, lambda output, relevance: None]
)
def test_objectives_return_one_number(value):
    live = lrpfx.transform(network(), AttnLRP(), fold=False)
    with pytest.raises(InputTypeError, match="one number"):
        lrpfx.backward_through_relevance(live, X, value, LABELS)


class Masked(nn.Module):
    """Vectors of tokens, of which a mask of integers keeps some, and an embedding of positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.head = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, vectors, mask):
        x = vectors + self.positions(torch.arange(vectors.shape[1]))
        return self.head((torch.relu(x) * mask[..., None]).sum(1))


def test_integers_that_no_embedding_reads_are_inputs():
    model = Masked().double().eval()
    inputs = (torch.rand(1, 4, 3, dtype=torch.float64), torch.tensor([[1, 1, 0, 1]]))
    live = lrpfx.transform(model, AttnLRP(), example_inputs=inputs, fold=False)
    lrpfx.backward_through_relevance(live, inputs, lambda output, relevance: relevance[0].square().sum(), 1)
    assert live.get_parameter("head.weight").grad.any()


def test_differences_from_a_reference_have_no_derivatives():
    with pytest.raises(lrpfx.LrpfxError, match="derivative"):
        live = lrpfx.transform(network(), DeepLIFT(), example_inputs=X, fold=False)
        lrpfx.backward_through_relevance(live, X, objective, LABELS)


def test_integers_of_embeddings_are_an_error():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2)).eval()
    ids = torch.tensor([[1, 2, 3]])
    live = lrpfx.transform(model, AttnLRP(), example_inputs=ids, fold=False)
    with pytest.raises(InputError, match="inputs_embeds"):
        lrpfx.backward_through_relevance(live, ids, objective, 1)
