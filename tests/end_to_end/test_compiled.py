"""torch.compile, memory formats and 16-bit precision: the same relevance, and nothing compiled twice."""

import copy

import pytest
import torch
from helpers import assert_close, needs_compiler, relative_difference
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import (
    CPLRP,
    AttnLRP,
    EpsilonAlpha2Beta1Flat,
    EpsilonGammaBox,
    EpsilonPlusFlat,
    GuidedBackprop,
    NameMapComposite,
)
from lrpfx.rules.stabilizer import Stabilizer, stabilize

pytestmark = pytest.mark.programs


class Net(nn.Module):
    """Convolutions behind ReLUs and behind nothing, a sum, pooling and dense layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.outer = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.hidden = nn.Linear(8 * 16, 12)
        self.head = nn.Linear(12, 5)
        self.eval().requires_grad_(False)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = F.relu(x + self.outer(F.relu(self.norm(self.inner(x)))))
        x = F.adaptive_avg_pool2d(x, (4, 4)).flatten(1)
        return self.head(F.relu(self.hidden(x)))


COMPOSITES = {
    "plus_flat": EpsilonPlusFlat(),
    "alpha_beta_flat": EpsilonAlpha2Beta1Flat(),
    "alpha_beta_conserving": EpsilonAlpha2Beta1Flat(conserve=True),
    "gamma_box": EpsilonGammaBox(0.0, 1.0),
    "squares": NameMapComposite(
        [
            (["stem", "inner", "outer"], rules.WSquare()),
            (["hidden", "head"], rules.Gamma()),
            (["relu*"], rules.Pass()),
            (["add", "adaptive_avg_pool2d"], rules.Norm()),
        ]
    ),
    "guided": GuidedBackprop(),
}
REST = [name for name in COMPOSITES if name not in ("gamma_box", "squares")]


@pytest.fixture(autouse=True)
def _single():
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()


def transformed(composite, **options):
    return lrpfx.transform(Net().float(), COMPOSITES[composite], input_range=(0.0, 1.0), **options)


@pytest.mark.parametrize(
    "composite", ["gamma_box", *(pytest.param(name, marks=pytest.mark.slow) for name in ("squares", *REST))]
)
def test_nothing_is_compiled_twice(composite):
    """Other values, other targets and, with a dynamic batch, other batch sizes run what was compiled first."""
    explain_model = transformed(composite)
    compiled = torch.compile(explain_model, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.rand(2, 3, 16, 16)
    lrpfx.attribute(compiled, x, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for target in (1, 2, None, torch.randn(2, 5)):
            x = torch.rand(2, 3, 16, 16)
            result = lrpfx.attribute(compiled, x, target)
            assert_close(result.relevance, lrpfx.attribute(explain_model, x, target).relevance, 1e-4)
    torch._dynamo.reset()
    compiled = torch.compile(explain_model, fullgraph=True, backend="aot_eager")
    for batch in (3, 4):  # torch.compile takes a size for a constant until it changes
        lrpfx.attribute(compiled, torch.rand(batch, 3, 16, 16), 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (2, 5, 7):
            x = torch.rand(batch, 3, 16, 16)
            result = lrpfx.attribute(compiled, x, 1)
            assert_close(result.relevance, lrpfx.attribute(explain_model, x, 1).relevance, 1e-4)


@needs_compiler
def test_inductor():
    explain_model = transformed("gamma_box").double()
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    compiled = torch.compile(explain_model, fullgraph=True)
    assert_close(lrpfx.attribute(compiled, x, 1).relevance, lrpfx.attribute(explain_model, x, 1).relevance, 1e-9)
    several = lrpfx.attribute(compiled, x, targets=[0, 1]).relevance
    assert_close(several, lrpfx.attribute(explain_model, x, targets=[0, 1]).relevance, 1e-9)


@needs_compiler
@pytest.mark.parametrize(
    "rule",
    [
        rules.AlphaBeta(1.5, 0.5),
        rules.Gamma(),
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in (rules.AlphaBeta(2.0, 1.0), rules.ZPlus())),
    ],
    ids=str,
)
def test_inductor_keeps_the_weights_of_products(rule):
    """Inductor fuses a weighted sum of matrix products, and forgets weights that are arguments of the addition."""
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(6, 4)), NameMapComposite([(["0"], rule)]))
    x = torch.randn(3, 6)
    compiled = torch.compile(explain_model, fullgraph=True)
    seed = torch.rand(3, 4)
    assert_close(lrpfx.attribute(compiled, x, seed).relevance, lrpfx.attribute(explain_model, x, seed).relevance, 1e-4)


@pytest.mark.parametrize("composite", COMPOSITES)
def test_channels_last(composite):
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    explain_model = transformed(composite).double()
    expected = lrpfx.attribute(explain_model, x, 1, record=["outer"])
    other = copy.deepcopy(explain_model).to(memory_format=torch.channels_last)
    last = x.contiguous(memory_format=torch.channels_last)
    for module, input in ((explain_model, last), (other, last), (other, x)):
        result = lrpfx.attribute(module, input, 1, record=["outer"])
        assert_close(result.relevance, expected.relevance, 1e-10)
        assert result.relevance.stride() == input.stride()
    result = lrpfx.attribute(other, last, 1, record=["inner"])
    assert result.layers["inner"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.15), (torch.float16, 0.1)])
@pytest.mark.parametrize("composite", COMPOSITES)
def test_sixteen_bits(composite, dtype, tolerance):
    explain_model = transformed(composite)
    x = torch.rand(4, 3, 16, 16)
    seed = torch.tensor([1.0, -1.0, 2.0, 0.5, -0.5]).expand(4, 5)
    for batch_seed in (seed, seed * 8):
        expected = lrpfx.attribute(explain_model, x, batch_seed)
        result = lrpfx.attribute(copy.deepcopy(explain_model).to(dtype), x.to(dtype), batch_seed.to(dtype))
        assert result.relevance.dtype == result.output.dtype == dtype
        assert torch.isfinite(result.relevance).all()
        assert relative_difference(result.relevance.float(), expected.relevance) < tolerance
        with torch.autocast("cpu", dtype=dtype):
            mixed = lrpfx.attribute(explain_model, x, batch_seed)
        assert mixed.output.dtype == dtype and mixed.relevance.dtype == torch.float32
        assert relative_difference(mixed.relevance, expected.relevance) < tolerance


def test_stabilizers_fit_the_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        z = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 2.0], dtype=dtype)
        stabilized = stabilize(z)
        assert stabilized.dtype == dtype and torch.isfinite(60.0 / stabilized).all()
        assert torch.equal(stabilized >= 0, z >= 0)
        assert torch.equal(Stabilizer().of_sign(z.clamp(min=0), positive=True), stabilize(z.clamp(min=0)))
        assert torch.equal(Stabilizer().of_sign(z.clamp(max=0) - 1e-7, positive=False), stabilize(z.clamp(max=0) - 1e-7))
    assert stabilize(torch.zeros(1, dtype=torch.float64)).item() == 1e-6


class Tokens(nn.Module):
    """A causal transformer block on embedded tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o, self.gate, self.up = (nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 20)
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        query, key, value = (layer(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return self.head(x + F.silu(self.gate(x)) * self.up(x))


def count_graphs(run, *args, **options):
    """The result of a call, and how many graphs torch.compile made for it."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    result = run(*args, **options)
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize(
    "composite", [AttnLRP(), *(pytest.param(one, marks=pytest.mark.slow) for one in (CPLRP(), AttnLRP(1e-6)))], ids=str
)
def test_tokens_records_and_targets_are_compiled(composite):
    """What the compiled module is asked for runs compiled: token ids, records, parts of fused attention, several targets."""
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(20, (2, 5))
    explain_model = lrpfx.transform(Tokens(), composite, example_inputs=tokens)
    compiled = torch.compile(explain_model, fullgraph=True, backend="aot_eager")
    part = next(name for name in lrpfx.node_names(explain_model) if name.endswith("softmax"))
    for target in ((-1, 3), [(-1, 3), (2, 7)]):
        for record in ((), ("gate", part)):
            found, graphs = count_graphs(lrpfx.attribute, compiled, tokens, target, record=record)
            expected = lrpfx.attribute(explain_model, tokens, target, record=record)
            assert graphs == (target == (-1, 3)), "one graph for each set of records, whatever the target"
            assert_close(found.relevance, expected.relevance, 1e-12)
            assert list(found.layers) == list(record)
            for name in record:
                torch.testing.assert_close(found.layers[name], expected.layers[name], rtol=1e-10, atol=1e-13)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for target in ((-1, 5), (0, 3), torch.randn(2, 5, 20)):
            other = torch.randint(20, (2, 5))
            found = lrpfx.attribute(compiled, other, target).relevance
            assert_close(found, lrpfx.attribute(explain_model, other, target).relevance, 1e-12)
