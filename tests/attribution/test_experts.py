"""Relevance of experts, and conditions at experts."""

import contextlib
import dataclasses
import functools
import re
import sys

import pytest
import torch
from helpers import assert_close, relative_difference
from reference.transformer_models import in_double_precision
from torch import nn

import lrpfx
from lrpfx.attribution.experts import relevance_of_experts
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1, EpsilonPlus
from lrpfx.concepts import Channel, Expert, relevances
from lrpfx.errors import InputError, InputTypeError

small = pytest.importorskip("small_transformers")

pytestmark = pytest.mark.filterwarnings("ignore:conditions.*leaves no relevance")  # of experts to which no token is sent


def last_token(output):
    seed = torch.zeros_like(output)
    seed[0, -1, 3] = output[0, -1, 3]
    return seed


@functools.cache
def explained(name, implementation, dtype, gamma=None):
    one = small.architecture(name)
    if name != "MixtralForCausalLM" or dtype is not torch.float64:  # one layer, with experts
        first = {"first_k_dense_replace": 0} if name == "DeepseekV3ForCausalLM" else {}
        one = dataclasses.replace(one, options={**one.options, **first, "num_hidden_layers": 1})
    model = small.small_model(one, dtype)
    model.set_experts_implementation(implementation)
    inputs = small.inputs_for(one, model, 5, dtype) | one.said
    exact = in_double_precision(sys.modules[type(model).__module__]) if dtype is torch.float64 else contextlib.nullcontext()
    with exact:
        explain_model = lrpfx.transform(model, AttnLRP(gamma=gamma), example_inputs=inputs, capture="export")
    return model, inputs, explain_model


@pytest.mark.parametrize("implementation, dtype", [("grouped_mm", torch.float32), ("batched_mm", torch.float64)])
def test_relevance_of_the_weights_of_experts_is_theirs(implementation, dtype):
    _, inputs, explain_model = explained("MixtralForCausalLM", implementation, dtype)
    of_experts = relevance_of_experts(explain_model, inputs, last_token, output="logits")
    options = {"output": "logits", "parameters": "*.experts.*"}
    of_weights = lrpfx.relevance_of_weights(explain_model, inputs, last_token, **options)
    assert len(of_weights) == 2 * len(of_experts)
    for name, relevance in of_weights.items():
        expected = of_experts[name.rpartition(".")[0]].sum(0)
        assert relative_difference(relevance.flatten(1).sum(1), expected) < (1e-9 if dtype is torch.float64 else 1e-4)


@pytest.mark.parametrize("implementation, dtype", [("grouped_mm", torch.float32), ("batched_mm", torch.float64)])
@pytest.mark.thorough
def test_relevance_of_experts_is_that_of_their_mixture(implementation, dtype, name="MixtralForCausalLM"):
    """For each token, over the experts to which the router sends it, as the model's own router tells."""
    model, inputs, explain_model = explained(name, implementation, dtype)
    found = relevance_of_experts(explain_model, inputs, last_token, output="logits")
    assert list(found) == [f"model.layers.{layer}.mlp.experts" for layer in range(model.config.num_hidden_layers)]
    chosen, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.mlp.gate.register_forward_hook(lambda module, args, result: chosen.append(result[-1])))
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    names = [f"{path}.sum" for path in found]
    layers = lrpfx.attribute(explain_model, inputs, last_token, record=names, output="logits").layers
    for (path, relevance), indices in zip(found.items(), chosen, strict=True):
        assert relevance.shape == (10, 4) and relevance.abs().sum() > 0
        selected = torch.zeros(10, 4, dtype=torch.bool).scatter(1, indices, True)
        assert not relevance[~selected].any()
        of_tokens = layers[f"{path}.sum"].flatten(0, -2).sum(-1)
        assert (relevance.sum(1) - of_tokens).norm() <= (1e-5 if dtype is torch.float32 else 1e-12) * of_tokens.norm()


@pytest.mark.parametrize("gamma", [None, pytest.param(0.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.slow)])
@pytest.mark.sampled(2)
def test_both_implementations_give_equal_relevance(name, gamma):
    """In single precision: grouped products take no more."""
    maps = []
    for implementation in ("grouped_mm", "batched_mm"):
        _, inputs, explain_model = explained(name, implementation, torch.float32, gamma)
        maps.append(lrpfx.attribute(explain_model, inputs, last_token, output="logits").relevance["input_ids"])
        accounts = lrpfx.ledger(explain_model, inputs, last_token, output="logits")
        assert accounts.unexplained <= 1e-5
    assert (maps[0] - maps[1]).norm() <= 1e-4 * maps[1].norm()


def test_routers_get_no_relevance():
    """Their weights scale what experts return, like gates."""
    _, inputs, explain_model = explained("MixtralForCausalLM", "batched_mm", torch.float64)
    names = [f"model.layers.{layer}.mlp.gate.{node}" for layer in range(2) for node in ("linear", "softmax")]
    layers = lrpfx.attribute(explain_model, inputs, last_token, record=names, output="logits").layers
    assert len(layers) == 4 and not any(value.any() for value in layers.values())


def test_models_without_experts_are_refused():
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(3, 2)).eval(), AttnLRP())
    with pytest.raises(lrpfx.InputError, match="no mixture of experts"):
        relevance_of_experts(explain_model, torch.rand(1, 3))


# --- conditions --------------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Three experts of two layers; each word goes to one of them, or to several."""

    def __init__(self, several):
        super().__init__()
        self.several, self.router = several, nn.Linear(6, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6) / 2), nn.Parameter(torch.randn(3, 6, 8) / 2)

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).topk(max(1, self.several))
        if not self.several:
            hidden = torch.bmm(self.up[chosen[:, 0]], x.unsqueeze(-1)).relu()
            return torch.bmm(self.down[chosen[:, 0]], hidden).squeeze(-1) * share
        hidden = (self.up[chosen] @ x[:, None, :, None]).relu()
        return ((self.down[chosen] @ hidden).squeeze(-1) * share.unsqueeze(-1)).sum(1)


class Words(nn.Module):
    """A mixture beside a shared expert and a skip connection."""

    def __init__(self, several=0):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.mixture = nn.Embedding(50, 6), nn.Linear(6, 6), Mixture(several)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.first(self.words(tokens).flatten(0, 1))
        x = x + (self.mixture(x) + self.shared(x))
        return self.head(x.unflatten(0, tokens.shape).relu().mean(1))


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [7, 6, 9, 8, 5]])
LAST = "mixture.matmul_1"
#: The edges around the mixture.
AROUND = {("shared", "add"): [], ("first", "add_1"): []}
COMPOSITES = [EpsilonPlus(), EpsilonAlpha2Beta1(), AttnLRP()]
each_mixture = pytest.mark.parametrize("several", [0, 1, 2])


def words_model(several=0, composite=None):
    model = Words(several).eval()
    return model, lrpfx.transform(model, composite or EpsilonPlus(), example_inputs=TOKENS)


@each_mixture
@pytest.mark.parametrize("composite", COMPOSITES)
def test_experts_add_up_to_their_mixture(several, composite):
    """What flows around a mixture is in the map of each expert."""
    _, explain_model = words_model(several, composite)
    experts = [{"mixture": Expert(index)} for index in range(3)]
    whole = lrpfx.attribute(explain_model, TOKENS, 1).relevance
    *parts, around = lrpfx.attribute(explain_model, TOKENS, 1, conditions=[*experts, {"mixture": []}]).relevance
    through = whole - around
    assert through.norm() > 1e-3 * whole.norm() and around.norm() > 1e-3 * whole.norm()
    assert_close(torch.stack(parts).sum(0), through + 3 * around, 1e-10)
    conditions = [AROUND, *(one | AROUND for one in experts), AROUND | {"mixture": Expert(0, 1, 2)}]
    found = lrpfx.attribute(explain_model, TOKENS, 1, conditions=conditions).relevance
    assert_close(found[0], through, 1e-10)
    assert_close(found[1:4].sum(0), through, 1e-10)
    assert_close(found[4], through, 1e-10)


@each_mixture
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS.flip(0) + 11, TOKENS[:1, 1:]])
def test_conditions_at_experts_are_masks_of_the_rows_that_the_router_sent_to_them(several, tokens):
    model, explain_model = words_model(several)
    lrpfx.attribute(explain_model, TOKENS, 1, conditions=[{"mixture": Expert(1)}])  # which sends other rows there
    with torch.no_grad():
        choices = model.mixture.router(model.first(model.words(tokens).flatten(0, 1))).topk(max(1, several)).indices
    rows = lrpfx.attribute(explain_model, tokens, 2, record=LAST).layers[LAST]
    conditions = [{"mixture": Expert(index)} | AROUND for index in range(3)]
    found = lrpfx.attribute(explain_model, tokens, 2, conditions=conditions, record=LAST)
    assert len(set(choices.flatten().tolist())) > 1
    for index in set(choices.flatten().tolist()):
        masked = rows * (choices == index).reshape(*rows.shape[: 2 if several else 1], *[1, 1])
        assert torch.equal(found.layers[LAST][index], masked)
        assert_close(found.relevance[index], lrpfx.attribute(explain_model, tokens, masked, start=LAST).relevance, 1e-10)
    of_tokens = relevance_of_experts(explain_model, tokens, 2)["mixture"]
    assert_close(found.layers[LAST].flatten(1).sum(1), of_tokens.sum(0), 1e-10)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
def test_experts_beside_other_conditions_and_targets(chunk_size):
    _, explain_model = words_model(2)
    conditions = [
        {"mixture": Expert(1), "first": [2, 3]},
        {"first": [2]},
        {"mixture": [1]},  # a feature of what the mixture returns
        {"mixture": [Expert(0), Expert(2)]},
        {"mixture": Expert(0, -1)},
        {LAST: Expert(0, 2)},
    ]
    found = lrpfx.attribute(explain_model, TOKENS, targets=[0, 2], conditions=conditions, chunk_size=chunk_size).relevance
    for number, condition in enumerate(conditions):
        for place, target in enumerate([0, 2]):
            alone = lrpfx.attribute(explain_model, TOKENS, target, conditions=[condition]).relevance[0]
            assert_close(found[number, place], alone, 1e-12)
    assert_close(found[4], found[3], 1e-12)
    assert_close(found[5], found[3], 1e-12)
    assert relative_difference(found[2], found[0]) > 1e-3


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
@pytest.mark.thorough
def test_experts_of_transformers_add_up(name):
    _, inputs, explain_model = explained(name, "batched_mm", torch.float64)
    (path, *_), residual = relevance_of_experts(explain_model, inputs, last_token, output="logits"), "model.layers.0.add"
    edges = {(residual, "model.layers.0.add_1"): []}
    if name == "DeepseekV3ForCausalLM":
        edges["model.layers.0.mlp.shared_experts.down_proj", "model.layers.0.mlp.add"] = []
    count = explain_model.get_parameter(f"{path}.down_proj").shape[0]
    conditions = [edges, *({path: Expert(index)} | edges for index in range(count)), {path: Expert(*range(count))}]
    found = lrpfx.attribute(explain_model, inputs, last_token, output="logits", conditions=conditions).relevance["input_ids"]
    whole = lrpfx.attribute(explain_model, inputs, last_token, output="logits").relevance["input_ids"]
    assert_close(found[1 : count + 1].sum(0), found[0], 1e-10)
    assert_close(found[-1], whole, 1e-10)
    assert sum(bool(part.any()) for part in found[1 : count + 1]) > 1


def test_conditions_at_experts_of_both_implementations():
    """In single precision: grouped products take no more."""
    maps = []
    for implementation in ("grouped_mm", "batched_mm"):
        _, inputs, explain_model = explained("MixtralForCausalLM", implementation, torch.float32)
        conditions = [{"model.layers.0.mlp.experts": Expert(index)} for index in range(4)]
        found = lrpfx.attribute(explain_model, inputs, last_token, output="logits", conditions=conditions)
        maps.append(found.relevance["input_ids"])
    for grouped, batched in zip(*maps, strict=True):
        assert relative_difference(grouped, batched) <= 1e-4


class TwoResults(nn.Module):
    """A mixture in which two products of experts are added."""

    def __init__(self):
        super().__init__()
        self.router, self.first, self.second = (
            nn.Linear(6, 3),
            nn.Parameter(torch.randn(3, 6, 6)),
            nn.Parameter(torch.randn(3, 6, 6)),
        )

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        return (torch.bmm(self.first[chosen], x.unsqueeze(-1)) + torch.bmm(self.second[chosen], x.unsqueeze(-1))).squeeze(-1)


def test_products_that_do_not_end_in_one_are_named():
    model = nn.Sequential(nn.Linear(6, 6), TwoResults()).eval()
    x = torch.rand(2, 6)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    with pytest.raises(InputError, match=re.escape("do not all end in one; name one of them: 1.matmul, 1.matmul_1")):
        lrpfx.attribute(explain_model, x, 0, conditions=[{"1": Expert(0)}])
    conditions = [{"1.matmul": Expert(index), "1.matmul_1": Expert(index)} for index in range(3)]
    found = lrpfx.attribute(explain_model, x, 0, conditions=[*conditions, {"1.matmul": Expert(0, 1, 2)}]).relevance
    assert_close(found[:3].sum(0), found[3], 1e-10)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"conditions": [{"first": Expert(0)}]},
            InputError,
            "'first' is not a mixture of experts with grouped or batched products",
        ),
        ({"conditions": [{"mixtur": Expert(0)}]}, InputError, "Did you mean 'mixture'?"),
        (
            {"conditions": [{"mixture": Expert(3)}]},
            InputError,
            "Expert(3): index 3 is out of range, since the mixture mixture has 3",
        ),
        ({"conditions": [{"mixture": [Expert(1), Channel(2)]}]}, InputTypeError, "experts and other indices"),
        (
            {"conditions": [{("first", "shared"): Expert(1)}]},
            InputError,
            "at first -> shared: experts are indices in conditions",
        ),
        ({"start": "mixture", "target": Expert(1)}, InputError, "experts are indices in conditions at the paths of mixtures"),
    ],
)
def test_what_is_no_condition_at_experts(settings, error, message):
    _, explain_model = words_model()
    with pytest.raises(error, match=re.escape(message)):
        lrpfx.attribute(explain_model, TOKENS, **settings)


class Shifted(nn.Module):
    """Experts of positions, in the second dimension of what they return."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        chosen = x.sum((0, 2)).long() % 3
        return (self.first(x)[:, :, None, :] @ self.weight[chosen])[:, :, 0].mean(1)


@pytest.mark.parametrize("batch", [2, 3])
def test_rows_in_another_dimension_are_refused(batch):
    """Also where the sizes of both dimensions are equal."""
    x = torch.rand(batch, 3, 4)
    explain_model = lrpfx.transform(nn.Sequential(Shifted()).eval(), EpsilonPlus(), example_inputs=x)
    message = "0.matmul does not tell which expert has which token"
    with pytest.raises(InputError, match=re.escape(message)):
        lrpfx.attribute(explain_model, x, 1, conditions=[{"0": Expert(0)}])
    with pytest.raises(InputError, match=re.escape(message)):
        relevance_of_experts(explain_model, x, 1)


def test_compiled_modules_do_not_tell_experts():
    _, explain_model = words_model()
    compiled = torch.compile(explain_model, backend="eager")
    with pytest.raises(InputError, match="pass the module that is not compiled"):
        lrpfx.attribute(compiled, TOKENS, 1, conditions=[{"mixture": Expert(0)}])


def test_tables_of_experts():
    _, explain_model = words_model(2)
    found = relevance_of_experts(explain_model, TOKENS, 1)
    table = relevances(found, "mixture", of=Expert)
    assert sorted(table.indices) == [0, 1, 2] and str(table).splitlines()[1].split() == ["expert", "relevance", "share"]
    totals = found["mixture"].sum(0)
    for row in table:
        assert row.relevance == pytest.approx(float(totals[row.index]), rel=1e-12)
        assert row.share == pytest.approx(float(totals[row.index] / totals.abs().sum()), rel=1e-12)
    attribution = lrpfx.attribute(explain_model, TOKENS, 1, record="mixture")
    with pytest.raises(InputTypeError, match="of=Expert takes what"):
        relevances(attribution, "mixture", of=Expert)
    for of in (None, Channel):
        with pytest.raises(InputTypeError, match="relevances takes what"):
            relevances(found, "mixture", of=of)
    with pytest.raises(InputError, match="the tokens of all samples"):
        relevances(found, "mixture", of=Expert, sample=0)
    with pytest.raises(InputError, match="Did you mean 'mixture'"):
        relevances(found, "mixtur", of=Expert)
    with pytest.raises(InputError, match=re.escape("(tokens, experts), not (3,)")):
        relevances({"mixture": totals}, "mixture", of=Expert)
