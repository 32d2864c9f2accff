"""Attention that carries multipliers runs as one kernel, with the relevance of its parts."""

import copy
import pickle

import pytest
import torch
from helpers import relative_difference
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import types
from lrpfx.composites import CPLRP, AttnLRP, EpsilonPlus
from lrpfx.errors import LrpfxWarning
from lrpfx.rules import UniformEpsilon

QUERIES, KEYS = 5, 5
BATCH, HEADS, WIDTH = 2, 2, 4


class Attention(nn.Module):
    """Queries, keys and values of one input, or keys and values of another."""

    def __init__(self, key_heads=HEADS, **options):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, size * WIDTH) for size in (HEADS, key_heads, key_heads))
        self.o = nn.Linear(HEADS * WIDTH, 4)
        self.key_heads = key_heads
        self.options = options
        self.eval()

    def split(self, x, heads):
        return x.unflatten(-1, (heads, WIDTH)).transpose(1, 2)

    def attend(self, x, context, **options):
        query = self.split(self.q(x), HEADS)
        key, value = (self.split(layer(context), self.key_heads) for layer in (self.k, self.v))
        attended = F.scaled_dot_product_attention(query, key, value, **self.options, **options)
        return self.o(attended.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x, x)


class Cross(Attention):
    def forward(self, x, context):
        return self.attend(x, context)


class Masked(Attention):
    def forward(self, x, mask):
        return self.attend(x, x, attn_mask=mask)


class MaskedByLargest(Attention):
    """With a mask of the lowest finite number, as many models have."""

    def forward(self, x, mask):
        return self.attend(x, x, attn_mask=torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float64).min))


class MaskedByTenThousand(Attention):
    """With a mask that is computed from integers."""

    def forward(self, x, mask):
        return self.attend(x, x, attn_mask=(1.0 - mask.to(x.dtype)) * -10000.0)


class MaskedByInfinity(Attention):
    def forward(self, x, mask):
        return self.attend(x, x, attn_mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf))


class Biased(Attention):
    """With a bias for each pair of positions, which is a parameter."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, QUERIES, KEYS))

    def forward(self, x):
        return self.attend(x, x, attn_mask=self.bias)


class MaskedByBuffer(Attention):
    """With a mask that is a part of the state, and negated ahead of time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("allowed", torch.ones(QUERIES, KEYS, dtype=torch.bool).tril())

    def forward(self, x):
        return self.attend(x, x, attn_mask=self.allowed)


class BiasedByData(Attention):
    def forward(self, x):
        return self.attend(x, x, attn_mask=(x @ x.transpose(-1, -2))[:, None])


class Reused(Attention):
    """Queries, keys and values are one tensor."""

    def forward(self, x):
        heads = self.split(self.q(x), HEADS)
        return self.o(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))


class WithoutHeads(Attention):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, self.o(self.q(x)))


def inputs(length=KEYS):
    return torch.randn(BATCH, QUERIES, 6), torch.randn(BATCH, length, 6)


def mask(full=False):
    """Which keys each query may see; with `full`, one query sees none."""
    allowed = torch.rand(BATCH, 1, QUERIES, KEYS) > 0.4
    allowed[..., 0] = True
    if full:
        allowed[0, 0, 2] = False
    return allowed


#: name -> (model, inputs, whether it is fused)
CASES = {
    "plain": (lambda: Attention(), lambda: inputs()[:1], True),
    "causal": (lambda: Attention(is_causal=True), lambda: inputs()[:1], True),
    "scale": (lambda: Attention(scale=0.7), lambda: inputs()[:1], True),
    "grouped queries": (lambda: Attention(key_heads=1, enable_gqa=True), lambda: inputs()[:1], True),
    "causal and grouped": (lambda: Attention(key_heads=1, enable_gqa=True, is_causal=True), lambda: inputs()[:1], True),
    "cross": (lambda: Cross(), lambda: inputs(3), True),
    "causal cross": (lambda: Cross(is_causal=True), lambda: inputs(3), True),
    "mask": (lambda: Masked(), lambda: (inputs()[0], mask()), True),
    "a query that sees nothing": (lambda: Masked(), lambda: (inputs()[0], mask(True)), True),
    "infinity": (lambda: MaskedByInfinity(), lambda: (inputs()[0], mask(True)), True),
    "lowest number": (lambda: MaskedByLargest(), lambda: (inputs()[0], mask()), False),
    "ten thousand": (lambda: MaskedByTenThousand(), lambda: (inputs()[0], mask(True)), False),
    "bias": (lambda: Biased(), lambda: inputs()[:1], True),
    "buffer": (lambda: MaskedByBuffer(), lambda: inputs()[:1], True),
    "bias of data": (lambda: BiasedByData(), lambda: inputs()[:1], False),
    "one tensor": (lambda: Reused(), lambda: inputs()[:1], True),
    "without heads": (lambda: WithoutHeads(), lambda: inputs()[:1], True),
}


def case(name):
    torch.manual_seed(0)
    make, arguments, fused = CASES[name]
    return make(), arguments(), fused


def what_was_done(explain_model):
    """What the pass did with the only attention, or why it did nothing."""
    stage = next(stage for stage in lrpfx.history(explain_model) if stage.name == "fuse_attention")
    ((_, what),) = (*stage.details, *stage.reasons)
    return what


def is_one_kernel(explain_model):
    return what_was_done(explain_model) == "one kernel"


@pytest.mark.filterwarnings("ignore:the input .* gets no relevance, but the output depends on it")
@pytest.mark.parametrize("composite", [AttnLRP, CPLRP])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_one_kernel_or_its_parts(name, composite):
    """The map, the relevance of each part and the ledger are those of the rules as written."""
    model, given, fused = case(name)
    explain_model = lrpfx.transform(model, composite(), example_inputs=given)
    assert is_one_kernel(explain_model) == fused
    direct = lrpfx.transform(model, composite(), example_inputs=given, optimize=False)
    parts = [one for one in lrpfx.node_names(direct) if one.startswith("scaled_dot") and "logical" not in one]
    assert len(parts) >= 5
    expected = lrpfx.attribute(direct, given, torch.cos, record=parts)
    for record in ((), parts[-1:], parts):
        found = lrpfx.attribute(explain_model, given, torch.cos, record=record)
        assert relative_difference(found.output, expected.output) <= 1e-14
        for one, other in zip(found.relevance, expected.relevance, strict=True):
            assert other is None or (one - other).norm() <= 1e-11 * max(float(other.norm()), 1e-3)
        for part in record:
            difference = (found.layers[part] - expected.layers[part]).norm()
            assert difference <= 1e-10 * max(float(expected.layers[part].norm()), 1.0), part
    assert lrpfx.ledger(explain_model, given, torch.cos).unexplained <= 1e-9


def test_queries_that_see_nothing_by_a_large_number():
    """Torch's fused kernel has wrong derivatives for them: attention is not fused."""
    torch.manual_seed(0)
    model, given = MaskedByLargest(), (inputs()[0], mask(True))
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=given)
    assert "large number" in what_was_done(explain_model)
    direct = lrpfx.transform(model, AttnLRP(), example_inputs=given, optimize=False)
    found, expected = (lrpfx.attribute(one, given, torch.cos).relevance[0] for one in (explain_model, direct))
    assert relative_difference(found, expected) <= 1e-12
    with pytest.warns(LrpfxWarning, match="amounts of up to .* cancel"):
        lrpfx.ledger(explain_model, given, torch.cos)


def test_several_targets_in_one_kernel():
    for name in ("plain", "causal and grouped", "a query that sees nothing", "one tensor"):
        model, given, _ = case(name)
        explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=given)
        with torch.no_grad():
            seeds = torch.randn(3, *model(*given).shape)
        several = lrpfx.attribute(explain_model, given, targets=seeds, chunk_size=3).relevance[0]
        for number, seed in enumerate(seeds):
            single = lrpfx.attribute(explain_model, given, seed).relevance[0]
            assert relative_difference(several[number], single) <= 1e-12


def test_lengths_that_the_graph_leaves_open():
    """Without example inputs, attention over any length."""
    model, _, _ = case("causal")
    explain_model = lrpfx.transform(model, AttnLRP())
    assert is_one_kernel(explain_model)
    direct = lrpfx.transform(model, AttnLRP(), optimize=False)
    for length in (1, 3, 8):
        x = torch.randn(2, length, 6)
        found, expected = (lrpfx.attribute(one, x, torch.cos).relevance for one in (explain_model, direct))
        assert relative_difference(found, expected) <= 1e-12


@pytest.mark.parametrize("examples", [True, False])
def test_masks_that_are_loaded(examples):
    """A mask that was negated ahead of time follows the state."""
    model, (x,), _ = case("buffer")
    other = copy.deepcopy(model)
    other.allowed.copy_(torch.ones(QUERIES, KEYS).triu().bool())
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x if examples else None)
    expected = lrpfx.attribute(lrpfx.transform(other, AttnLRP(), optimize=False), x, torch.cos)
    for one in (pickle.loads(pickle.dumps(explain_model)), copy.deepcopy(explain_model), explain_model):
        assert relative_difference(one(x), model(x)) <= 1e-14
        one.load_state_dict(other.state_dict())
        found = lrpfx.attribute(one, x, torch.cos)
        assert relative_difference(found.output, expected.output) <= 1e-14
        assert relative_difference(found.relevance, expected.relevance) <= 1e-11


def test_weights_that_something_else_reads():
    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = nn.MultiheadAttention(6, 2, batch_first=True)
            self.eval()

        def forward(self, x):
            return self.m(x, x, x)

    x = torch.randn(2, 4, 6)
    explain_model = lrpfx.transform(Returned(), AttnLRP(), example_inputs=x)
    assert not any(stage.matches for stage in lrpfx.history(explain_model) if stage.name == "fuse_attention")
    direct = lrpfx.transform(Returned(), AttnLRP(), example_inputs=x, optimize=False)
    direct.load_state_dict(explain_model.state_dict())
    for output in (0, 1):
        found, expected = (lrpfx.attribute(one, x, torch.cos, output=output).relevance for one in (explain_model, direct))
        assert relative_difference(found, expected) <= 1e-11


def test_only_where_every_part_carries_multipliers():
    """A rule of its own for one part keeps the parts."""
    model, given, _ = case("plain")
    for composite in (AttnLRP(1e-6), AttnLRP(layer_map=[(types.MatMul, UniformEpsilon(1e-6))])):
        explain_model = lrpfx.transform(model, composite, example_inputs=given)
        assert not is_one_kernel(explain_model)


def saved_bytes(explain_model, given):
    """The memory that one forward pass keeps for the backward pass, without the inputs and the parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*given, *explain_model.parameters(), *explain_model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = explain_model(*(value.clone().requires_grad_() for value in given))
    assert output.requires_grad
    return sum(kept.values())


def test_attention_in_relevance_form_is_recomputed():
    """Nothing keeps the square matrix; maps, also of parts, copies and compiled modules, are those of the direct form."""
    model, given, _ = case("plain")
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=given)
    assert what_was_done(explain_model).startswith("recomputed in the backward pass")
    direct = lrpfx.transform(model, EpsilonPlus(), example_inputs=given, optimize=False)
    parts = [name for name in lrpfx.node_names(direct) if name.endswith(".softmax")]
    expected = lrpfx.attribute(direct, given, torch.cos, record=parts)
    restored = pickle.loads(pickle.dumps(explain_model))
    for one in (explain_model, copy.deepcopy(explain_model), restored, torch.compile(explain_model, backend="aot_eager")):
        assert relative_difference(lrpfx.attribute(one, given, torch.cos).relevance[0], expected.relevance[0]) <= 1e-12
    found = lrpfx.attribute(explain_model, given, targets=[torch.cos, torch.sin], record=parts, chunk_size=2)
    assert relative_difference(found.relevance[0][0], expected.relevance[0]) <= 1e-12
    assert relative_difference(found.layers[parts[0]][0], expected.layers[parts[0]]) <= 1e-12
    square = expected.layers[parts[0]].nbytes
    assert saved_bytes(direct, given) - saved_bytes(explain_model, given) >= 2 * square


def test_hooks_on_recomputed_parts_run_once():
    model, given, _ = case("plain")
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=given)
    calls = []
    (softmax,) = [module for name, module in explain_model.named_modules() if name.endswith(".softmax")]
    softmax.register_forward_hook(lambda *_: calls.append(1))
    lrpfx.attribute(explain_model, given, torch.cos)
    assert calls == [1]


class Memory(nn.Module):
    """Attention whose keys or values are parameters."""

    def __init__(self, keys, values):
        super().__init__()
        self.query, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.keys = nn.Parameter(torch.randn(5, 6)) if keys else None
        self.values = nn.Parameter(torch.randn(5, 6)) if values else None

    def forward(self, x):
        query = self.query(x)
        keys, values = (query if one is None else one for one in (self.keys, self.values))
        return self.head(F.scaled_dot_product_attention(query, keys, values)).mean(1)


@pytest.mark.parametrize("composite", [EpsilonPlus(), AttnLRP(), CPLRP()], ids=lambda composite: type(composite).__name__)
@pytest.mark.parametrize(("keys", "values"), [(True, True), (True, False), (False, True)])
def test_keys_and_values_that_are_parameters(keys, values, composite):
    model, x = Memory(keys, values).eval(), torch.randn(2, 5, 6)
    maps = [
        lrpfx.attribute(lrpfx.transform(model, composite, example_inputs=x, optimize=optimize), x, 1).relevance
        for optimize in (True, False)
    ]
    assert torch.allclose(*maps, rtol=1e-9)
