"""Differences from a reference (DeepLIFT): multipliers that add up, for each operation and for whole networks."""

import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lrpfx
from lrpfx.attribution import arguments, computation
from lrpfx.composites import DeepLIFT

WIDTH = 8


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


def gemma_norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1) * (1 + w)


def softmax_by_hand(x, w):
    exponentials = (x - x.amax(-1, keepdim=True).detach()).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def masked_softmax_by_hand(x, w):
    exponentials = x.exp() * torch.tensor([1, 1, 0, 1, 1, 1, 1, 0], dtype=x.dtype)
    return exponentials / (exponentials.sum(-1, keepdim=True) + 1e-2)


def softmax_of_groups(x, w):
    index, exponentials = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1]), x.exp()
    return exponentials / torch.zeros(len(x), 3, dtype=x.dtype).index_add(1, index, exponentials)[:, index]


OPERATIONS = {
    "relu": lambda x, w: F.relu(x),
    "gelu": lambda x, w: F.gelu(x),
    "selu": lambda x, w: F.selu(x),
    "softplus": lambda x, w: F.softplus(x),
    "hardswish": lambda x, w: F.hardswish(x),
    "clamp": lambda x, w: x.clamp(-0.5, 0.5),
    "prelu": lambda x, w: F.prelu(x, w),
    "exp": lambda x, w: x.exp(),
    "log": lambda x, w: (x.square() + 1).log(),
    "cube": lambda x, w: x**3,
    "silu gate": lambda x, w: F.silu(x * w) * x,
    "glu": lambda x, w: F.glu(torch.cat([x, x * w], 1)),
    "square": lambda x, w: x * x,
    "quotient": lambda x, w: x / (x.abs() + 0.1),
    "reciprocal": lambda x, w: 1 / (x.square() + 1),
    "softmax": lambda x, w: (3 * x).softmax(-1),
    "log softmax": lambda x, w: F.log_softmax(x, -1),
    "softmax of scores": lambda x, w: ((x[:, :, None] @ x[:, None]).softmax(-1) @ x[:, :, None])[..., 0],
    "masked attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(-1, 1, 4, 2), x.view(-1, 1, 4, 2), x.view(-1, 1, 4, 2), torch.tensor([[True, False, True, True]]).expand(4, 4)
    ).flatten(1),
    "layer norm": lambda x, w: F.layer_norm(x, (WIDTH,), w, w, 0.1),
    "rms norm": lambda x, w: F.rms_norm(x, (WIDTH,), w, 0.1),
    "rms norm by hand": gemma_norm,
    "group norm": lambda x, w: F.group_norm(x[:, :, None], 2, w, w, 0.1)[..., 0],
    "instance norm": lambda x, w: F.instance_norm(x.view(-1, 2, 4), eps=0.1).flatten(1),
    "max pooling": lambda x, w: F.max_pool1d(x[:, None], 3, 2, 1).flatten(1) @ torch.ones(4, WIDTH, dtype=x.dtype) + x,
    "adaptive max pooling": lambda x, w: F.adaptive_max_pool1d(x[:, None], 2).repeat(1, 1, 4)[:, 0],
    "softmax by hand": softmax_by_hand,
    "masked softmax by hand": masked_softmax_by_hand,
    "softmax with one more": lambda x, w: x.exp() / (1 + x.exp().sum(-1, keepdim=True)),
    "softmax of groups": softmax_of_groups,
    "logarithm of a sum": lambda x, w: x.logsumexp(1, True) * x,
    "running logarithm of sums": lambda x, w: x.logcumsumexp(1),
    "logarithm of two": lambda x, w: torch.logaddexp(x, x * w),
    "product of all": lambda x, w: x.prod(1, keepdim=True) * x,
    "running product": lambda x, w: x.cumprod(1),
    "running sum": lambda x, w: x.cumsum(1) * x,
    "largest with places": lambda x, w: x.max(1, keepdim=True)[0] * x,
    "smallest with places": lambda x, w: x.min(1, keepdim=True).values * x,
    "running largest": lambda x, w: x.cummax(1)[0],
    "angle": lambda x, w: torch.atan2(x, x.square() + 1),
    "detached": lambda x, w: x * x.detach(),
    "linear norm": lambda x, w: x.norm(1, dim=1, keepdim=True) * x,
    "cubic norm": lambda x, w: torch.linalg.vector_norm(x, 3, dim=1, keepdim=True) * x,
    "largest magnitude": lambda x, w: x.norm(torch.inf, dim=1, keepdim=True) * x,
    "pooled norms": lambda x, w: F.lp_pool1d(x[:, None], 2, 2).repeat(1, 1, 2)[:, 0] * x,
    "local response norm": lambda x, w: F.local_response_norm(x[:, :, None], 3, 0.5, 0.7, 1.0)[..., 0],
    "largest": lambda x, w: x.amax(1, True) * x,
    "smallest": lambda x, w: x.amin(1, True) * x,
    "larger": lambda x, w: torch.maximum(x, x.flip(1) * w),
    "smaller": lambda x, w: torch.minimum(x, x.flip(1) * w),
    "norm": lambda x, w: x.norm(dim=1, keepdim=True) * x,
    "samples at places": lambda x, w: (
        F.grid_sample(x.view(-1, 1, 2, 4), x.view(-1, 2, 2, 2).tanh(), align_corners=False).flatten(1).repeat(1, 2)
    ),
    "samples of constants": lambda x, w: (
        F.grid_sample(w.view(1, 1, 2, 4).expand(len(x), -1, -1, -1), x.view(-1, 2, 2, 2).tanh(), align_corners=True)
        .flatten(1)
        .repeat(1, 2)
    ),
    "standard deviation": lambda x, w: x / (1 + x.std(1, keepdim=True)),
    "variance": lambda x, w: x.var(1, keepdim=True) * x,
    "normalized": lambda x, w: F.normalize(x + 1),
    "cosine similarity": lambda x, w: F.cosine_similarity(x + 1, x * w + 2, dim=1)[:, None] * x,
}


class Of(nn.Module):
    """A function between two dense layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.last(self.function(self.first(x), self.weight))


def gap(model, x, reference, target=1, **settings):
    """The largest difference of the sum of relevance from that of the outputs, relative to the larger output."""
    explain_model = lrpfx.transform(model, DeepLIFT(), x, **settings)
    relevance = lrpfx.attribute(explain_model, x, target, reference=reference).relevance
    with torch.no_grad():
        outputs = model(x)[:, target], model(reference.expand_as(x))[:, target]
    largest = torch.stack(outputs).abs().amax(0)
    return float(((relevance.flatten(1).sum(1) - (outputs[0] - outputs[1])).abs() / largest).max())


@pytest.mark.parametrize("name", OPERATIONS)
def test_relevance_adds_up_to_the_difference(name):
    torch.manual_seed(0)
    model = Of(OPERATIONS[name]).eval()
    x, references = torch.randn(4, WIDTH), [torch.zeros(1, WIDTH), torch.randn(4, WIDTH)]
    for reference in references:
        assert gap(model.float(), x.float(), reference.float()) < 1e-4
        assert gap(model.double(), x.double(), reference.double()) < 1e-9


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_a_network_of_convolutions(capture):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2), nn.GELU(), nn.Flatten(),
        nn.Linear(64, 5),
    ).double().eval()  # fmt: skip
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    assert gap(model, x, torch.randn(1, 3, 12, 12, dtype=torch.float64), capture=capture) < 1e-12


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()


def test_a_reference_that_is_the_input_gives_the_gradient():
    model, x = network(), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    attribution = lrpfx.attribute(explain_model, x, 2, reference=x, record_multipliers="0")
    assert attribution.relevance.abs().max() == 0
    hidden = model[0](x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model[1:](hidden)[:, 2].sum(), hidden)
    torch.testing.assert_close(attribution.multipliers["0"], gradient)


def test_recorded_layers_add_up_too():
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    layers = lrpfx.attribute(explain_model, x, 2, record=["0", "1", "3"], reference=reference).layers
    difference = (model(x) - model(reference))[:, 2].detach()
    for name, relevance in layers.items():
        torch.testing.assert_close(relevance.sum(1), difference, msg=name)


def test_the_ledger_accounts_for_the_difference():
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    accounts = lrpfx.ledger(lrpfx.transform(model, DeepLIFT(), x), x, 2, reference=reference)
    difference = float((model(x) - model(reference))[:, 2].sum())
    assert accounts.seed == pytest.approx(difference) and accounts.unexplained < 1e-12
    assert accounts.inputs == {"input": pytest.approx(difference)}
    assert all(entry.relevance_in == pytest.approx(difference) for entry in accounts)


def test_a_choice_that_differs_is_unexplained():
    torch.manual_seed(0)
    model = Of(lambda x, w: x.sort(1)[0]).double().eval()
    x, reference = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(4, WIDTH, dtype=torch.float64)
    with pytest.warns(lrpfx.LrpfxWarning, match="relevance adds up to .* chooses other entries for the reference"):
        lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=reference)
    accounts = lrpfx.ledger(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=reference)
    assert abs(accounts.entry("sort").unexplained) > 1e-3
    others = [entry.unexplained for entry in accounts if not entry.name.startswith(("sort", "getitem"))]
    assert max(map(abs, others)) < 1e-12


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(4, 4)

    def forward(self, x, mask):
        return F.scaled_dot_product_attention(x, x, self.value(x), mask).mean(1)


def test_masks_of_minus_infinity():
    model, mask = (
        Masked().double().eval(),
        torch.zeros(1, 3, 3, dtype=torch.float64).index_fill(2, torch.tensor([2]), -torch.inf),
    )
    x, reference = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), (x, mask))
    attribution = lrpfx.attribute(explain_model, (x, mask), 1, record="*", reference=(reference,))
    found = attribution.relevance
    assert all(torch.isfinite(one).all() for one in attribution.layers.values())
    difference = (model(x, mask) - model(reference, mask))[:, 1].detach()
    torch.testing.assert_close(found[0].sum((1, 2)), difference)
    assert found[1].abs().max() == 0
    given = lrpfx.attribute(explain_model, (x, mask), 1, reference=(reference, mask.clone())).relevance
    assert given[0].equal(found[0]) and given[1].equal(found[1])
    for other, message in ((0, "-inf at other places"), (mask.flip(2), "-inf at other places"), (mask * 0, "not finite")):
        with pytest.raises(lrpfx.InputError, match=message):
            lrpfx.attribute(explain_model, (x, mask), 1, reference=(reference, other))


class OfLogarithm(nn.Module):
    def forward(self, x):
        return x.log()


def test_an_output_for_the_reference_that_is_not_finite():
    x, reference = torch.rand(2, 3, dtype=torch.float64), torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    explain_model = lrpfx.transform(OfLogarithm(), DeepLIFT(), x)
    with pytest.warns(lrpfx.LrpfxWarning, match="the output for the reference is not finite"):
        lrpfx.attribute(explain_model, x, 1, reference=reference)


class Suppresses(nn.Module):
    """Logits of which one is always minus infinity."""

    def forward(self, x):
        return torch.tanh(x).masked_fill(torch.tensor([False, True, False]), -torch.inf)


def test_outputs_of_minus_infinity_that_are_not_explained():
    x, reference = torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    explain_model = lrpfx.transform(Suppresses(), DeepLIFT(), x)
    difference = (torch.tanh(x) - torch.tanh(reference))[:, 2]
    for target in (2, {2: 1.0}):
        relevance = lrpfx.attribute(explain_model, x, target, reference=reference).relevance
        torch.testing.assert_close(relevance.sum(1), difference)
    relevance = lrpfx.attribute(lrpfx.transform(Suppresses(), lrpfx.composites.AttnLRP(), x), x, 2).relevance
    torch.testing.assert_close(relevance.sum(1), torch.tanh(x)[:, 2])
    accounts = lrpfx.ledger(explain_model, x, 2, reference=reference)
    assert accounts.seed == pytest.approx(float(difference.sum())) and accounts.unexplained < 1e-12


class CountsPositions(nn.Module):
    """Positions are counted by the tokens that are not padding, and their vectors are constants, as in M2M100."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 5), nn.Linear(5, 3)
        self.register_buffer("positions", torch.randn(7, 5))

    def forward(self, ids):
        places = (ids != 0).long().cumsum(1)
        return self.last((self.embedding(ids) + self.positions[places]).sum(1))


def test_constants_that_differ_for_the_reference_have_an_account():
    torch.manual_seed(0)
    model, ids, reference = CountsPositions().double().eval(), torch.tensor([[3, 1, 4, 1]]), torch.tensor([[2, 0, 5, 0]])
    explain_model = lrpfx.transform(model, DeepLIFT(), ids)
    with pytest.warns(lrpfx.LrpfxWarning, match="positions that are counted by tokens differ"):
        lrpfx.attribute(explain_model, ids, 1, reference=reference)
    accounts = lrpfx.ledger(explain_model, ids, 1, reference=reference)
    difference = model.positions[[1, 2, 3, 4]] - model.positions[[1, 1, 2, 2]]
    assert accounts.total("constants") == pytest.approx(float(difference.sum(0) @ model.last.weight[1]))
    assert accounts.unexplained < 1e-12


class Doubles(nn.Module):
    def forward(self, x, twice=False):
        return torch.tanh(x) * (2 if twice else 1)


def test_masks_of_minus_infinity_that_differ_are_in_the_ledger():
    class Attention(nn.Module):
        def forward(self, x, mask):
            scores = (x @ x.mT).masked_fill(mask[:, None] == 0, -torch.inf)
            return (scores.softmax(-1) @ x).mean(1)

    x, mask = torch.randn(2, 4, 3, dtype=torch.float64), torch.ones(2, 4, dtype=torch.int64)
    explain_model = lrpfx.transform(Attention().eval(), DeepLIFT(), (x, mask))
    hides = mask.clone()
    hides[:, 2:] = 0
    with pytest.warns(lrpfx.LrpfxWarning, match="relevance adds up to"):
        attribution = lrpfx.attribute(explain_model, (x, mask), 1, reference=(0, hides))
    accounts = lrpfx.ledger(explain_model, (x, mask), 1, reference=(0, hides))
    gap = float((attribution.output - attribution.reference_output)[:, 1].sum() - attribution.relevance[0].sum())
    missing = [entry for entry in accounts if abs(entry.unexplained) > 1e-9]
    assert [entry.name for entry in missing] == ["softmax"]
    assert missing[0].unexplained == pytest.approx(gap)


def test_arguments_that_are_no_tensors_keep_their_values():
    x, model = torch.randn(2, 3, dtype=torch.float64), Doubles()
    given = {"x": x, "twice": True}
    found = lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), given), given, 1, reference={"x": torch.zeros_like(x)})
    torch.testing.assert_close(found.relevance["x"].sum(1), model(x, True)[:, 1])


class OfProducts(nn.Module):
    def forward(self, x):
        return (x @ torch.tanh(x).mT).flatten(1)


def test_a_matrix_product_runs_no_more_often_than_for_two_gradients():
    x, reference = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(OfProducts(), DeepLIFT(), x)
    with Calls() as calls:
        lrpfx.attribute(explain_model, x, 1, reference=reference)
    assert calls.counts[torch.ops.aten.bmm.default] == 4  # for the input, for the reference, and for each factor's multiplier


@pytest.mark.parametrize("optimize", [True, False])
def test_the_lowered_program_takes_the_reference(optimize):
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x, optimize=optimize)
    program = lrpfx.lower(explain_model, {"input": x, "input_reference": reference})
    found = program.module()(x, reference, torch.full((4,), 2))
    torch.testing.assert_close(found["output"], model(x))
    expected = lrpfx.attribute(explain_model, x, 2, reference=reference).relevance
    torch.testing.assert_close(found["relevance"], expected)


def test_the_lowered_program_takes_masks_of_conditions():
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)).double().eval()
    x, reference = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    program = lrpfx.lower(explain_model, {"input": x, "input_reference": reference}, conditions="0")
    mask = torch.zeros(4, 6, dtype=torch.float64)
    mask[:, 1] = 1
    found = program.module()(x, reference, torch.full((4,), 2), mask)
    expected = lrpfx.attribute(explain_model, x, 2, reference=reference, conditions=[{"0": [1]}]).relevance[0]
    torch.testing.assert_close(found["relevance"], expected)


@pytest.mark.parametrize("examples", [lambda x: x, lambda x: {"input": x}, lambda x: {"input": x, "input_reference": 0}])
def test_a_program_needs_an_example_of_the_reference(examples):
    x = torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    with pytest.raises(lrpfx.InputError, match="pass a tensor 'input_reference'"):
        lrpfx.lower(explain_model, examples(x))


def test_values_of_nodes_need_no_reference():
    dense = nn.Linear(5, 4).double()
    x = torch.randn(2, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(nn.Sequential(dense, nn.GELU(), nn.Linear(4, 1).double()).eval(), DeepLIFT(), x)
    found = lrpfx.concepts.values_of(explain_model, x, ["0", "1"])
    torch.testing.assert_close(found, {"0": dense(x), "1": nn.functional.gelu(dense(x))})


def test_compiled_modules():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3)).double().eval()
    x, reference = torch.randn(2, 2, 8, dtype=torch.float64), torch.randn(2, 2, 8, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    compiled = torch.compile(explain_model, fullgraph=True, backend="aot_eager")
    for question in ({"target": 1}, {"target": 1, "record": ["1", "3"]}, {"targets": [0, 2], "record_multipliers": "1"}):
        expected, found = (lrpfx.attribute(one, x, reference=reference, **question) for one in (explain_model, compiled))
        torch.testing.assert_close(found.relevance, expected.relevance)
        torch.testing.assert_close(found.reference_output, expected.reference_output)
        torch.testing.assert_close(found.layers | found.multipliers, expected.layers | expected.multipliers)


def test_conditions_and_targets():
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    whole = lrpfx.attribute(explain_model, x, 1, reference=reference).relevance
    each = lrpfx.attribute(explain_model, x, 1, reference=reference, conditions=[{"2": [one]} for one in range(6)]).relevance
    torch.testing.assert_close(each.sum(0), whole)
    both = lrpfx.attribute(explain_model, x, targets=[0, 1], reference=reference).relevance
    torch.testing.assert_close(both[1], whole)


@pytest.mark.parametrize("composite", [DeepLIFT(), lrpfx.composites.AttnLRP()], ids=["DeepLIFT", "AttnLRP"])
def test_conditions_on_edges_where_relevance_becomes_multipliers(composite):
    model, x = network(), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, composite, x)
    given = {"reference": torch.randn_like(x)} if explain_model.reference_names else {}
    whole = lrpfx.attribute(explain_model, x, 1, **given).relevance
    masks = [{("input", "0"): torch.eye(5, dtype=torch.bool)[place]} for place in range(5)]
    each = lrpfx.attribute(explain_model, x, 1, conditions=masks, **given).relevance
    torch.testing.assert_close(each, whole[None] * torch.eye(5, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("positive", [True, False])
def test_regions_of_an_output_with_places(positive):
    """The seed chooses places by the output for x: their difference is explained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1)).double().eval()
    x, reference = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    region, explain_model = lrpfx.Region(2, mask, positive), lrpfx.transform(model, DeepLIFT(), x)
    output = model(x).detach()
    kept = mask & (output[:, 2] > 0) if positive else mask.expand(2, 8, 8)
    assert 0 < kept.sum() < kept.numel()
    expected = ((output - model(reference).detach())[:, 2] * kept).sum((1, 2))
    found = lrpfx.attribute(explain_model, x, region, reference=reference).relevance
    torch.testing.assert_close(found.sum((1, 2, 3)), expected, rtol=1e-12, atol=1e-12)
    several = lrpfx.attribute(explain_model, x, targets=[lrpfx.Region(1, mask), region], reference=reference).relevance
    torch.testing.assert_close(several[1], found, rtol=1e-12, atol=1e-14)


class Detects(nn.Module):
    """Six candidates of two classes, with edges that depend on the input, in the form of `lrpfx.detection.heads`."""

    def __init__(self):
        super().__init__()
        self.logits, self.edges = nn.Linear(10, 12), nn.Linear(10, 24)

    def forward(self, x):
        logits = self.logits(x).tanh().unflatten(1, (6, 2))
        edges = self.edges(x).sigmoid().unflatten(1, (6, 4))
        label = logits.argmax(2, keepdim=True).double()
        return torch.cat([logits, edges, logits.sigmoid().amax(2, True), label, torch.full_like(label, 0.5)], 2)


@pytest.mark.parametrize(("what", "column"), [("score", None), ("x1", 2), ("y2", 5)])
def test_boxes(what, column):
    torch.manual_seed(0)
    model, (x, reference) = Detects().double().eval(), torch.randn(2, 3, 10, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    output, other = model(x).detach(), model(reference).detach()
    rows, best = torch.arange(3), output[..., -3].argmax(1)
    columns = output[rows, best, -2].long() if column is None else torch.full((3,), column)
    found = lrpfx.attribute(explain_model, x, lrpfx.Box(what=what), reference=reference).relevance
    expected = (output - other)[rows, best, columns]
    torch.testing.assert_close(found.sum(1), expected, rtol=1e-12, atol=1e-12)


def test_several_references_are_averaged():
    model, x = network(), torch.randn(4, 5, dtype=torch.float64)
    references = [torch.randn(1, 5, dtype=torch.float64) for _ in range(3)]
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    each = [lrpfx.attribute(explain_model, x, 1, reference=one).relevance for one in references]
    together = lrpfx.attribute(explain_model, x, 1, reference=references).relevance
    torch.testing.assert_close(together, sum(each) / 3)


def test_memory_does_not_grow_with_the_number_of_references(monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Counted(computation.Computation):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.add(self.output)
            most.append(len(alive))

    x = torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    monkeypatch.setattr(computation, "Computation", Counted)
    lrpfx.attribute(explain_model, x, 1, reference=list(torch.randn(12, 1, 5, dtype=torch.float64)))
    assert len(most) == 12 and max(most) <= 3


def test_zero_as_a_number_is_a_reference():
    model, x = network(), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    zeros = lrpfx.attribute(explain_model, x, 1, reference=torch.zeros_like(x)).relevance
    torch.testing.assert_close(lrpfx.attribute(explain_model, x, 1, reference=0).relevance, zeros)


def test_captums_deep_lift_where_it_is_right():
    captum = pytest.importorskip("captum.attr")
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    expected = captum.DeepLift(model).attribute(x, reference, target=2).detach()
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    torch.testing.assert_close(
        lrpfx.attribute(explain_model, x, 2, reference=reference).relevance, expected, rtol=1e-6, atol=1e-9
    )


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(20, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, ids):
        return self.last(self.norm(self.embedding(ids)).mean(1).tanh())


def test_integers_that_become_vectors_in_the_model_have_a_remedy():
    class Encodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, ids):
            return self.last(F.one_hot(ids, 4).double()).mean(1)

    with pytest.raises(lrpfx.InputError, match=r"one_hot \(.*\) makes vectors of them: move it out of forward"):
        lrpfx.transform(Encodes().double().eval(), DeepLIFT(), torch.zeros(2, 6, dtype=torch.long))


def test_tokens_have_references():
    torch.manual_seed(0)
    model, ids = Lookup().double().eval(), torch.randint(1, 20, (2, 4))
    explain_model = lrpfx.transform(model, DeepLIFT(), ids)
    relevance = lrpfx.attribute(explain_model, ids, 1, reference=torch.zeros_like(ids)).relevance
    difference = (model(ids) - model(torch.zeros_like(ids)))[:, 1].detach()
    torch.testing.assert_close(relevance.sum((1, 2)), difference)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, a, b):
        return self.left(a).sigmoid() * self.right(b)


def test_a_fraction_is_no_reference_of_tokens():
    model, ids = Lookup().double().eval(), torch.randint(1, 20, (2, 4))
    explain_model = lrpfx.transform(model, DeepLIFT(), ids)
    with pytest.raises(lrpfx.InputError, match=r"which has dtype torch.int64, is no 0\.5"):
        lrpfx.attribute(explain_model, ids, 1, reference=0.5)


@pytest.mark.parametrize("reference", [0, torch.zeros(2, 4).double(), [torch.zeros(2, 4).double(), torch.zeros(2, 5).double()]])
def test_several_inputs_need_a_reference_each(reference):
    """A list is several references, and no list of those of the inputs."""
    model, given = TwoInputs().double().eval(), (torch.randn(2, 4).double(), torch.randn(2, 5).double())
    explain_model = lrpfx.transform(model, DeepLIFT(), given)
    with pytest.raises(lrpfx.InputError, match="the inputs 'a', 'b' need a reference each: a dict by their names"):
        lrpfx.attribute(explain_model, given, 1, reference=reference)


class OfList(nn.Module):
    def forward(self, tensors):
        return tensors[0].sigmoid() * tensors[1]


def test_inputs_in_a_list_have_references_in_a_list():
    given = {"tensors": [torch.randn(2, 3).double(), torch.randn(2, 3).double()]}
    model = OfList().eval()
    explain_model = lrpfx.transform(model, DeepLIFT(), given)
    references = [torch.zeros(2, 3).double(), torch.ones(3).double()]
    found = lrpfx.attribute(explain_model, given, 1, reference={"tensors": references})
    difference = (model(**given) - model([references[0], references[1].expand(2, 3)]))[:, 1]
    torch.testing.assert_close(sum(one.sum(1) for one in found.relevance["tensors"]), difference)
    for wrong, message in ((references[:1], "is a tuple or list of 2 items"), ([0.5, "b"], r"\[1\] is a tensor, not str")):
        with pytest.raises(lrpfx.InputError, match=message):
            lrpfx.attribute(explain_model, given, 1, reference={"tensors": wrong})


@pytest.mark.parametrize("shape", [(), (6, 6), (1, 3, 1, 1), (2, 3, 6, 6)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_reference_of_any_shape_that_can_be_broadcast(shape, memory_format):
    """Views in forward depend on the strides of values."""
    torch.manual_seed(0)
    last = nn.Linear(108, 2).double()
    model = Of(lambda x, w: x).double().eval()
    model.forward = lambda x: last(torch.tanh(x).permute(0, 2, 3, 1).contiguous().view(len(x), -1))
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=memory_format)
    reference = torch.randn(shape, dtype=torch.float64)
    found = lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=reference)
    difference = (model(x) - model(reference.expand_as(x)))[:, 1].detach()
    torch.testing.assert_close(found.relevance.flatten(1).sum(1), difference)


def test_relevance_that_starts_at_a_value_of_zero():
    """A unit that is off for the input, and on for the reference, differs, too."""
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    hidden, other = model[:2](x).detach(), model[:2](reference).detach()
    assert ((hidden == 0) & (other != 0)).any()
    relevance = lrpfx.attribute(explain_model, x, start="1", reference=reference).relevance
    torch.testing.assert_close(relevance.sum(1), (hidden - other).sum(1))


def test_several_inputs_and_one_that_keeps_its_value():
    torch.manual_seed(0)
    model, a, b = TwoInputs().double().eval(), torch.randn(2, 4).double(), torch.randn(2, 5).double()
    explain_model = lrpfx.transform(model, DeepLIFT(), (a, b))
    both = lrpfx.attribute(explain_model, (a, b), 1, reference=(torch.zeros_like(a), torch.ones_like(b))).relevance
    difference = (model(a, b) - model(torch.zeros_like(a), torch.ones_like(b)))[:, 1].detach()
    torch.testing.assert_close(both[0].sum(1) + both[1].sum(1), difference)
    one = lrpfx.attribute(explain_model, {"a": a, "b": b}, 1, reference={"b": torch.ones_like(b)}).relevance
    torch.testing.assert_close(one["b"].sum(1), (model(a, b) - model(a, torch.ones_like(b)))[:, 1].detach())
    assert one["a"].abs().max() == 0
    torch.testing.assert_close(
        lrpfx.attribute(explain_model, (a, b), 1, reference=(None, torch.ones_like(b))).relevance[1], one["b"]
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (None, "explains differences: pass reference="),
        (torch.zeros(4, 6).double(), "cannot be broadcast to that of the input"),
        (torch.zeros(4, 5), "has dtype torch.float32, but the input torch.float64"),
        (torch.full((4, 5), torch.nan).double(), "has values that are not finite"),
        ({"y": torch.zeros(4, 5).double()}, "reference= names 'y', but the inputs are input"),
        ([], "reference= is an empty list"),
        ("zeros", "is a tensor, not str"),
        (np.zeros((4, 5)), "is a tensor, not ndarray: pass torch.from_numpy"),
        ({}, "reference= is an empty dict"),
        ((), "reference= has 0 items"),
        (float("nan"), "has values that are not finite"),
        (10**400, "is no 1000"),
        (torch.zeros(7, 5).double(), "several references are a list"),
        ((torch.zeros(4, 5).double(), 0), "reference= has 2 items, but the inputs are input"),
        (torch.zeros(4, 5).double().to_sparse(), "is of layout torch.sparse_coo"),
    ],
)
def test_references_that_do_not_fit(reference, message):
    x = torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    with pytest.raises(lrpfx.InputError, match=message) as error:
        lrpfx.attribute(explain_model, x, 1, reference=reference)
    assert error.value.topic == "references"


@pytest.mark.parametrize(("number", "dtype"), [(1e39, torch.float32), (1e5, torch.float16), (-(2**40), torch.int32)])
def test_numbers_that_a_dtype_does_not_hold_are_no_references(number, dtype):
    value = torch.ones(2, 3).to(dtype)
    with pytest.raises(lrpfx.InputError, match=r"which has dtype .*, is no ") as error:
        arguments._fitting(number, value, "x")
    assert error.value.topic == "references"


def test_numbers_of_numpy_are_references():
    x = torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    expected = lrpfx.attribute(explain_model, x, 1, reference=0.5).relevance
    for number in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert lrpfx.attribute(explain_model, x, 1, reference=number).relevance.equal(expected)
    assert lrpfx.attribute(explain_model, x, 1, reference=np.int64(0)).relevance.isfinite().all()


def test_other_composites_take_no_reference():
    x = torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(network(), lrpfx.composites.EpsilonPlus(), x)
    with pytest.raises(lrpfx.InputError, match=r"has no rule in .* that takes a reference") as error:
        lrpfx.attribute(explain_model, x, 1, reference=x)
    assert error.value.topic == "references"


def test_relevance_of_differences_has_no_derivatives():
    with pytest.raises(lrpfx.RuleError, match="differences from a reference, of which derivatives are not known") as error:
        lrpfx.transform(network(), DeepLIFT(), torch.randn(4, 5, dtype=torch.float64), fold=False)
    assert error.value.topic == "derivative-of-relevance"


def test_the_remedy_for_a_function_that_no_table_has_is_none_that_knows_no_reference():
    class Network(nn.Module):
        def forward(self, x):
            return torch.special.erfcx(F.relu(x))

    with pytest.raises(lrpfx.UnsupportedOperationError, match=r"No rule takes its difference.*write it with other"):
        lrpfx.transform(Network(), DeepLIFT(), example_inputs=torch.rand(2, 3))


def test_rules_without_a_reference_are_named():
    composite = lrpfx.composites.MixedComposite(
        [lrpfx.composites.NameMapComposite([(["0"], lrpfx.rules.Gamma(0.25))]), DeepLIFT()]
    )
    with pytest.raises(lrpfx.RuleError, match=r"rules that know no reference.*: 0 \(Gamma"):
        lrpfx.transform(network(), composite, torch.randn(4, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, w: torch.linalg.norm(x.view(-1, 2, 4), 2, (1, 2))[:, None] * x, r"norm.*order 2 has no formula"),
        (lambda x, w: x.norm(0, dim=1, keepdim=True) * x, "norm of the order 0 has no formula"),
    ],
)
def test_operations_without_a_formula_are_named(function, message):
    with pytest.raises(lrpfx.RuleError, match=message):
        lrpfx.transform(Of(function).eval(), DeepLIFT(), torch.randn(2, WIDTH))


class OfReLU(nn.Module):
    """The output is exactly 0 for the first sample, and not for the reference."""

    def forward(self, x):
        return torch.relu(x)


def test_an_output_of_zero_is_explained():
    x, reference = torch.tensor([[-1.0, 2.0], [3.0, -4.0]]), torch.tensor([[5.0, 1.0]])
    explain_model = lrpfx.transform(OfReLU(), DeepLIFT(), x)
    attribution = lrpfx.attribute(explain_model, x, 0, reference=reference)
    torch.testing.assert_close(attribution.relevance, torch.tensor([[-5.0, 0.0], [-2.0, 0.0]]))
    torch.testing.assert_close(attribution.reference_output, torch.relu(reference).expand(2, 2))
    accounts = lrpfx.ledger(explain_model, x, 0, reference=reference)
    assert accounts.seed == -7.0 and accounts.inputs == {"x": -7.0} and accounts.unexplained == 0.0
    program = lrpfx.lower(explain_model, {"x": x, "x_reference": reference.expand_as(x)})
    found = program.module()(x, reference.expand_as(x), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(found["relevance"], attribution.relevance)


def test_a_function_of_the_outputs_is_explained():
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    relevance = lrpfx.attribute(
        explain_model, x, 0, reference=reference, output=lambda logits: (logits[:, :1] - logits[:, 1:2]) + 3.0
    ).relevance
    difference = (model(x) - model(reference)).detach()
    torch.testing.assert_close(relevance.sum(1), difference[:, 0] - difference[:, 1])


RECURRENT = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "two layers": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, batch_first=True),
    "rnn with relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


class Series(nn.Module):
    """A recurrent layer, whose states and last states are read."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        states, last = self.layer(x)
        return states.mean(1)[:, :2] + sum(one.sum(0)[:, :2] for one in (last if isinstance(last, tuple) else (last,)))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name):
    torch.manual_seed(0)
    model = Series(RECURRENT[name]()).double().eval()
    x, reference = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    assert gap(model, x, reference) < 1e-12
    accounts = lrpfx.ledger(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=reference)
    assert accounts.unexplained < 1e-12


class Steps(nn.Module):
    """The hidden state of a recurrent layer after four steps, as torch computes it or written out."""

    def __init__(self, layer, written_out):
        super().__init__()
        self.layer, self.written_out = layer, written_out

    def forward(self, x):
        if not self.written_out:
            return self.layer(x)[0][:, -1]
        layer = self.layer
        hidden, state = torch.zeros(len(x), 4, dtype=x.dtype), torch.zeros(len(x), 4, dtype=x.dtype)
        for step in range(4):
            of_input = F.linear(x[:, step], layer.weight_ih_l0, layer.bias_ih_l0)
            of_hidden = F.linear(hidden, layer.weight_hh_l0, layer.bias_hh_l0)
            if isinstance(layer, nn.LSTM):
                enter, keep, candidate, out = (of_input + of_hidden).chunk(4, 1)
                state = torch.sigmoid(keep) * state + torch.sigmoid(enter) * torch.tanh(candidate)
                hidden = torch.sigmoid(out) * torch.tanh(state)
            else:
                (r, z, n), (hr, hz, hn) = of_input.chunk(3, 1), of_hidden.chunk(3, 1)
                gate = torch.sigmoid(z + hz)
                hidden = gate * hidden + (1 - gate) * torch.tanh(n + torch.sigmoid(r + hr) * hn)
        return hidden


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_steps_that_are_written_out_have_the_multipliers_of_the_layer(layer):
    torch.manual_seed(0)
    whole = layer(3, 4, batch_first=True).double().eval()
    x, reference = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    found = []
    for written_out in (False, True):
        explain_model = lrpfx.transform(Steps(whole, written_out), DeepLIFT(), x)
        found.append(lrpfx.attribute(explain_model, x, 1, reference=reference).relevance)
    torch.testing.assert_close(found[0], found[1])


def test_an_explainer_takes_a_reference():
    model, rows = network(), torch.randn(3, 5, dtype=torch.float64)
    explainer = lrpfx.Explainer(model, composite=DeepLIFT(), reference=0.5, form="table")
    expected = (model(rows) - model(torch.full_like(rows, 0.5)))[:, 2].detach()
    for explanation, difference in zip(explainer(rows.numpy(), 2), expected, strict=True):
        assert float(explanation.answers[0].input_relevance.sum()) == pytest.approx(float(difference))
    with pytest.raises(lrpfx.InputError, match="reference= is for models that are neither detectors nor programs"):
        lrpfx.Explainer(lrpfx.detection.DetectorHeads(model), reference=0.5)


def test_integrated_gradients_add_up_to_the_same_difference():
    model, x, reference = network(), torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    relevance = lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=reference).relevance
    with lrpfx.attribution.IntegratedGradients(model, baseline_fn=lambda _: reference, n_iter=512) as attributor:
        _, integrated = attributor(x, torch.eye(3, dtype=torch.float64)[[1] * 4])
    torch.testing.assert_close(integrated.sum(1), relevance.sum(1), rtol=2e-2, atol=1e-3)


class Cancels(nn.Module):
    """What the first entry of a sample changes by rounding is constant."""

    def forward(self, x):
        return torch.tanh(x) + x.round()


def test_a_gap_of_samples_that_cancels_in_the_batch_is_said():
    x = torch.tensor([[0.4, 1.0], [0.6, 1.0]], dtype=torch.float64)
    reference = torch.tensor([[0.6, 1.0], [0.4, 1.0]], dtype=torch.float64)
    explain_model = lrpfx.transform(Cancels(), DeepLIFT(), x)
    with pytest.warns(lrpfx.LrpfxWarning, match="of sample [01], relevance adds up to"):
        lrpfx.attribute(explain_model, x, 0, reference=reference)


class Propagates(nn.Module):
    """A graph whose nodes are the rows, with edges between them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.tensor([[0.1, 0.9], [0.5, 0.5]], dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(self.edges @ x)


def test_rows_that_are_no_samples_add_up_together(recwarn):
    x, reference = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    explain_model = lrpfx.transform(Propagates(), DeepLIFT(), x)
    for target in (1, {0: 1.0, 2: -1.0}):
        lrpfx.attribute(explain_model, x, target, reference=reference)
    assert not [one for one in recwarn if issubclass(one.category, lrpfx.LrpfxWarning)]


CHOICES = {
    "Huber": lambda h: torch.where(h.abs() < 0.5, h * h / 2, h.abs() / 2 - 0.125),
    "a jump": lambda h: torch.where(h > 0.2, h, -h),
    "of two values": lambda h: torch.where(h >= h.flip(1), h.exp(), h),
    "constant branches": lambda h: h + torch.where(h < 0.3, h, 2.0),
    "and": lambda h: torch.where((h > -0.3) & (h < 0.3), h * h, 0.09),
    "or": lambda h: torch.where(torch.logical_or(h < -0.3, h > 0.3), 0.09, h * h),
    "xor": lambda h: torch.where((h > -0.3) ^ (h > 0.3), h.exp(), h),
    "not": lambda h: torch.where(~(h > 0.1), 0.1 * h, h.square() + 1),
    "masked_fill": lambda h: h.masked_fill(h < 0.1, -1.0),
    "a fixed condition, too": lambda h: torch.where((h > 0.1) & (torch.arange(h.shape[1]) < 5), h, h.exp()),
    "a product with truth values": lambda h: (h + 1) * (h.flip(1) > 0) + h * (h.flip(1) <= 0),
    "truth values as numbers": lambda h: (h > 0.1).to(h.dtype) * h.exp(),
    "a view": lambda h: torch.where((h.mean(1) > 0.01).unsqueeze(1), h.exp(), h),
    "a view in another shape": lambda h: torch.where((h.mean(1, keepdim=True) > 0.01).expand_as(h), h.exp(), h),
    "equality": lambda h: torch.where(h == h.amax(1, keepdim=True), h.exp(), h),
}


@pytest.mark.parametrize("front_end", ["symbolic", "export"])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_by_comparisons_add_up(name, front_end, recwarn):
    torch.manual_seed(0)
    model = Of(lambda h, w: CHOICES[name](h)).double().eval()
    x, reference = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(4, WIDTH, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x, capture=front_end)
    torch.testing.assert_close(explain_model(x), model(x))
    found = lrpfx.attribute(explain_model, x, 1, reference=reference)
    torch.testing.assert_close(found.relevance.sum(1), (model(x) - model(reference))[:, 1].detach())
    accounts = lrpfx.ledger(explain_model, x, 1, reference=reference)
    assert accounts.unexplained < 1e-12 and max(abs(entry.constants) for entry in accounts) < 1e-12
    assert not [one for one in recwarn if issubclass(one.category, lrpfx.LrpfxWarning)]


def test_what_is_compared_takes_a_jump():
    """By hand: the step at 0.5 is explained by what is compared, and by nothing that is chosen."""

    class Jump(nn.Module):
        def forward(self, x):
            return torch.where(x[:, :1] > 0.5, 2 * x[:, 1:2], 0.0)

    x, reference = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 3.0]])
    explain_model = lrpfx.transform(Jump(), DeepLIFT(), x)
    assert lrpfx.attribute(explain_model, x, 0, reference=reference).relevance.tolist() == [[6.0, 0.0]]
    assert lrpfx.attribute(explain_model, torch.tensor([[1.0, 5.0]]), 0, reference=reference).relevance.tolist() == [[8.0, 2.0]]


class Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        hidden = self.first(x).clone()
        hidden[hidden < 0] = 0.1
        return self.last(torch.where(hidden > 0.5, hidden.square(), hidden))


def test_choices_by_comparisons_in_programs():
    torch.manual_seed(0)
    model = Overwrites().double().eval()
    x, reference = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(4, WIDTH, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    relevance = lrpfx.attribute(explain_model, x, 1, reference=reference).relevance
    torch.testing.assert_close(relevance.sum(1), (model(x) - model(reference))[:, 1].detach())
    compiled = torch.compile(explain_model, fullgraph=True)
    torch.testing.assert_close(lrpfx.attribute(compiled, x, 1, reference=reference).relevance, relevance)
    program = lrpfx.lower(explain_model, {"x": x, "x_reference": reference})
    found = program.module()(x, reference, torch.ones(4, dtype=torch.long))["relevance"]
    torch.testing.assert_close(found, relevance)


LAYERS = [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.GELU(), nn.Softmax(-1)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda one: type(one).__name__)
def test_a_batch_may_be_empty(layer):
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3)).double().eval()
    explain_model = lrpfx.transform(model, DeepLIFT(), torch.randn(2, 5, dtype=torch.float64))
    empty = torch.empty(0, 5, dtype=torch.float64)
    for reference in (0, empty):
        assert lrpfx.attribute(explain_model, empty, 1, reference=reference).relevance.shape == (0, 5)


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x, other):
        return self.last(x * other.tanh())


def test_inputs_and_references_may_come_from_inference_mode():
    torch.manual_seed(0)
    model = OfTwo().double().eval()
    x, other, reference = torch.randn(3, 2, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), (x, other))
    expected = lrpfx.attribute(explain_model, (x, other), 1, reference=(reference, None)).relevance
    with torch.inference_mode():
        x, other, reference = (one.clone() for one in (x, other, reference))
    found = lrpfx.attribute(explain_model, (x, other), 1, reference=(reference, None)).relevance
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("by", ["scatter_reduce", "index_reduce"])
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_choices_by_index_leave_out_entries_that_are_as_large(by, reduce):
    """Zeros that are not among the entries have no share of a result that is 0."""
    index = torch.arange(12) % 3

    class Choice(nn.Module):
        def forward(self, x):
            start = x.new_zeros(len(x), 3)
            places = index.expand(len(x), -1) if by == "scatter_reduce" else index
            return getattr(start, by)(1, places, x, reduce, include_self=False)

    torch.manual_seed(0)
    x = torch.randn(20, 12, dtype=torch.float64).sub(1 if reduce == "amax" else -1)
    found = lrpfx.attribute(lrpfx.transform(Choice().eval(), DeepLIFT(), x), x, 0, reference=0)
    torch.testing.assert_close(found.relevance.sum(1), Choice()(x)[:, 0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_running_sums_of_exponentials_of_any_size(size):
    class Running(nn.Module):
        def forward(self, x):
            return x.logcumsumexp(1)

    torch.manual_seed(0)
    x, reference = (torch.randn(2, 9, dtype=torch.float64) * size for _ in range(2))
    explain_model = lrpfx.transform(Running().eval(), DeepLIFT(), x)
    weights = torch.randn(2, 9, dtype=torch.float64)
    found = lrpfx.attribute(explain_model, x, lambda output: weights * output, reference=reference).relevance
    expected = (weights * (Running()(x) - Running()(reference))).sum()
    torch.testing.assert_close(found.sum(), expected, rtol=1e-9, atol=0)
    if size == 1.0:
        (entries, sums), (other_entries, other_sums) = ((one.exp(), one.exp().cumsum(1)) for one in (x, reference))
        of_sums = weights * (sums / other_sums).log() / (sums - other_sums)
        expected = of_sums.flip(1).cumsum(1).flip(1) * (entries - other_entries)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("equation", ["bij,bkj,bj->bk", "bj,bj,bj,bk->bk", "bk,bj,bj,bj->bk"])
def test_products_of_more_than_two_factors(equation, capture):
    ranks = [len(one) for one in equation.partition("->")[0].split(",")]

    class Contraction(nn.Module):
        def forward(self, x):
            operands = [x if rank == 3 else x[:, place] for place, rank in enumerate(ranks)]
            return torch.einsum(equation, *operands)

    torch.manual_seed(0)
    x, reference = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    model = Contraction().eval()
    found = lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x, capture=capture), x, 1, reference=reference)
    torch.testing.assert_close(found.relevance.sum((1, 2)), (model(x) - model(reference))[:, 1], rtol=1e-12, atol=1e-12)
