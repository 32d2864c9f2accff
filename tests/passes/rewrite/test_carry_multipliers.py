"""Carrying multipliers changes no map: every network gives what the rules as written give, to rounding."""

import copy
import io
import pickle

import pytest
import torch
from helpers import Unary, assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import types
from lrpfx.composites import CPLRP, AttnLRP
from lrpfx.ir.node import Role, node_info
from lrpfx.rules import AbsoluteRatio, AlphaBeta, Epsilon, Flat, Only, Pass, ReLUDeconvNet, Uniform, ValueOnly, ZPlus


class Net(nn.Module):
    """A function of layers and one tensor as a network."""

    def __init__(self, function, layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, float(bool(parameter.any())), 0.3)
        self.eval()

    def forward(self, x):
        return self.function(self, x)


def dense(outputs=6, inputs=6):
    return nn.Linear(inputs, outputs)


def features():
    return {"a": dense(), "b": dense(), "c": dense(), "d": dense(3)}


def images():
    return {
        "a": nn.Conv2d(3, 6, 3, padding=1),
        "b": nn.Conv2d(6, 6, 3, padding=1, groups=2),
        "up": nn.ConvTranspose2d(6, 6, 2, 2),
        "batch": nn.BatchNorm2d(6),
        "group": nn.GroupNorm(2, 6),
        "instance": nn.InstanceNorm2d(6, affine=True),
        "d": dense(4),
    }


def tokens():
    names = ("q", "k", "v", "o", "gate", "up", "down")
    return {**{name: dense() for name in names}, "norm": nn.LayerNorm(6), "rms": nn.RMSNorm(6)}


def heads(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attended(net, x, **options):
    attention = F.scaled_dot_product_attention(heads(net.q(x)), heads(net.k(x)), heads(net.v(x)), **options)
    return net.o(attention.transpose(1, 2).flatten(2))


def block(net, x):
    x = x + attended(net, net.norm(x))
    normalized = net.rms(x)
    return x + net.down(F.silu(net.gate(normalized)) * net.up(normalized))


def weights(net, x):
    """Values and their weights, some of which a mask sets to zero."""
    scores = heads(net.q(x)) @ heads(net.k(x)).transpose(-1, -2)
    result = scores.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    return net.o((result @ heads(net.v(x))).transpose(1, 2).flatten(2)), result


def chunked(net, x):
    first, second = net.a(x).chunk(2, -1)
    return net.d(torch.cat([first, F.gelu(second)], -1))


def split(net, x):
    first, second, third = net.a(x).split([2, 2, 2], -1)
    return torch.cat([first * second, third], -1)


def dead_scale(net, x):
    """The path to a gate gets no relevance."""
    return net.d(F.gelu(net.a(x)) * torch.sigmoid(net.c(F.relu(net.b(x)))))


def squeezed(net, x):
    x = net.a(x)
    return net.d((x * torch.sigmoid(x.mean((2, 3), keepdim=True))).mean((2, 3)))


def used(function):
    """A network that reads the same dense layer's result twice."""
    return lambda net, x: net.d(function(net.a(x)))


FEATURES, IMAGES, TOKENS = (3, 6), (2, 3, 8, 8), (2, 4, 6)
#: name -> (function, layers, shape of the input)
NETWORKS = {
    "transformer block": (block, tokens, TOKENS),
    "causal": (lambda net, x: attended(net, x, is_causal=True, scale=0.3), tokens, TOKENS),
    "convolutions": (lambda net, x: net.d(F.relu(net.b(F.max_pool2d(F.relu(net.a(x)), 2))).mean((2, 3))), images, IMAGES),
    "group norm": (lambda net, x: net.d(F.gelu(net.group(net.a(x))).mean((2, 3))), images, IMAGES),
    "instance norm": (lambda net, x: net.d(F.silu(net.instance(net.a(x))).mean((2, 3))), images, IMAGES),
    "batch norm": (lambda net, x: net.d(net.b(net.batch(F.silu(net.a(x)))).mean((2, 3))), images, IMAGES),
    "padding and pooling": (
        lambda net, x: net.d(F.avg_pool2d(F.pad(net.up(F.relu(net.a(x))), (1, 1, 0, 2), value=0.5), 2).amax((2, 3))),
        images,
        IMAGES,
    ),
    "squeeze and excitation": (squeezed, images, IMAGES),
    "interpolation": (
        lambda net, x: net.d(F.interpolate(net.a(x), scale_factor=2, mode="bilinear").mean((2, 3))),
        images,
        IMAGES,
    ),
    "x + x": (used(lambda x: x + x), features, FEATURES),
    "x * x": (used(lambda x: x * x), features, FEATURES),
    "x @ x.T": (lambda net, x: (lambda a: a @ a.T)(net.a(x)), features, FEATURES),
    "three factors": (lambda net, x: net.d(net.a(x) * net.b(x) * net.c(x)), features, FEATURES),
    "einsum of three": (
        lambda net, x: torch.einsum("bi,bj,bk->bijk", net.a(x), net.b(x), net.c(x)),
        features,
        FEATURES,
    ),
    "a layer used twice": (lambda net, x: net.d(net.a(F.gelu(net.a(x)))), features, FEATURES),
    "chunk": (chunked, features, FEATURES),
    "split": (split, features, FEATURES),
    "a part is returned": (lambda net, x: net.a(x).chunk(2, -1)[1], features, FEATURES),
    "largest": (lambda net, x: net.a(x).topk(2, -1)[0], features, FEATURES),
    "SwiGLU": (lambda net, x: net.d(F.silu(net.a(x)) * net.b(x)), features, FEATURES),
    "GLU": (lambda net, x: F.glu(net.a(x)), features, FEATURES),
    "dead scale": (dead_scale, features, FEATURES),
    "divided by its norm": (used(lambda x: F.normalize(x, dim=-1)), features, FEATURES),
    "RMS norm in parts": (
        used(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        features,
        FEATURES,
    ),
    "layer norm in parts": (
        used(lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)),
        features,
        FEATURES,
    ),
    "constants": (used(lambda x: torch.where(x > 0, 1 - x, torch.zeros(())) * 3 + 2), features, FEATURES),
    "larger of two": (lambda net, x: net.d(torch.maximum(net.a(x), net.b(x))), features, FEATURES),
    "activation last": (lambda net, x: F.gelu(net.a(x)), features, FEATURES),
    "softmax last": (lambda net, x: net.a(x).softmax(-1), features, FEATURES),
    "gate last": (lambda net, x: net.a(x) * torch.sigmoid(net.b(x)), features, FEATURES),
    "activation first": (lambda net, x: net.a(F.gelu(x)), features, FEATURES),
    "skip of the input": (lambda net, x: x + net.a(x), features, FEATURES),
    "parameters": (lambda net, x: net.d(net.a(x) * net.b.bias + net.c.bias), features, FEATURES),
    "zeros": (lambda net, x: net.d(F.relu(net.a(F.relu(x)))), features, FEATURES),
    "attention module": (
        lambda net, x: net.m(x),
        lambda: {"m": nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=True, activation="gelu")},
        TOKENS,
    ),
}


def network(name):
    """A network of the table, and an input."""
    torch.manual_seed(0)
    function, layers, shape = NETWORKS[name]
    return Net(function, layers()), torch.randn(shape)


def names_of(*explain_models):
    """Names of the nodes of all modules that return one floating-point tensor."""
    found = [
        [node_info(node).name for node in module.unfused_graph.nodes if node.op.startswith("call") and _is_recorded(node)]
        for module in explain_models
    ]
    return [name for name in found[0] if all(name in others for others in found)]


def _is_recorded(node):
    row = node_info(node).operator
    several = row is not None and (row.outputs.parts or row.outputs.discrete_results)
    return node_info(node).role is Role.DATA and not several


def assert_same(carrying, direct, x, target=torch.cos, tolerance=1e-11, **options):
    """The same map, relevance of each node, and a ledger without gaps."""
    names = names_of(carrying, direct)
    expected = lrpfx.attribute(direct, x, target, record=names, **options)
    for recorded in ((), names):
        found = lrpfx.attribute(carrying, x, target, record=recorded, **options)
        assert torch.equal(found.output, expected.output) or relative(found.output, expected.output) <= 1e-14
        assert relative(found.relevance, expected.relevance) <= tolerance
    for name in names:
        assert relative(found.layers[name], expected.layers[name]) <= tolerance, name
    accounts = lrpfx.ledger(carrying, x, target, **options)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


def relative(actual, expected):
    """The largest difference relative to the largest entry; the difference itself if all entries are zero."""
    if not expected.numel():
        return 0.0
    return float((actual - expected).abs().max() / (expected.abs().max() or 1.0))


def carried(explain_model):
    """How many layers carry multipliers."""
    return next(stage.matches for stage in lrpfx.history(explain_model) if stage.name == "carry_multipliers")


def both(net, x, composite, **options):
    """The network with multipliers, and as its rules are written."""
    carrying = lrpfx.transform(net, composite, example_inputs=x, **options)
    assert carried(carrying)
    return carrying, lrpfx.transform(net, composite, example_inputs=x, optimize=False, **options)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(3)
def test_equal_to_the_rules_as_written(name):
    net, x = network(name)
    composite = CPLRP() if name in ("causal", "SwiGLU", "attention module") else AttnLRP()
    assert_same(*both(net, x, composite), x)


@pytest.mark.parametrize("name", ["transformer block", "convolutions", "group norm", "x * x", "SwiGLU", "constants"])
@pytest.mark.parametrize("composite", [AttnLRP, CPLRP])
def test_the_limit_of_small_stabilizers(name, composite):
    net, x = network(name)
    carrying = lrpfx.transform(net, composite(), example_inputs=x)
    stabilized = lrpfx.transform(net, composite(1e-12), example_inputs=x)
    assert carried(carrying) and not carried(stabilized)
    found, expected = (lrpfx.attribute(module, x, torch.cos).relevance for module in (carrying, stabilized))
    assert_close(found, expected, 1e-8)


ACTIVATIONS = [
    *("relu", "leaky_relu", "relu6", "gelu", "silu", "hardswish", "mish", "tanh", "elu", "selu", "celu", "softsign"),
    *("tanhshrink", "hardshrink", "softshrink", "hardtanh", "softplus", "sigmoid", "logsigmoid"),
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Also near 0, and where the result is returned and entries of 0 have relevance."""
    function = getattr(F, name)

    def run(net, x):
        inner = function(3 * net.a(x))
        return inner, net.d(inner + function(1e-3 * net.b(x))), net.d(torch.tanh(inner))

    torch.manual_seed(0)
    net, x = Net(run, features()), torch.randn(3, 6)
    carrying, direct = both(net, x, AttnLRP())
    for output in range(3):
        assert_same(carrying, direct, x, output=output)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("composite", [AttnLRP, CPLRP])
def test_returned_attention_weights(composite, output):
    """Weights of 0 have relevance if the target says so: no division by them may lose it."""
    torch.manual_seed(0)
    net, x = Net(weights, tokens()), torch.randn(TOKENS)
    assert_same(*both(net, x, composite()), x, output=output)


def mixed(*entries, **options):
    return AttnLRP(layer_map=entries, **options)


#: Composites of which only some rules can carry multipliers.
MIXTURES = {
    "gamma": AttnLRP(gamma=0.25),
    "gamma of CP-LRP": CPLRP(gamma=0.25),
    "detached gates": AttnLRP(gates="signal"),
    "no biases": AttnLRP(zero_params="bias"),
    "convolutions": mixed((types.Convolution, ZPlus(stabilizer=0.0))),
    "activations": mixed((types.Activation, ReLUDeconvNet())),
    "softmax": mixed((types.Softmax, Epsilon(0.0))),
    "sums": mixed((types.Sum, AbsoluteRatio(0.0))),
    "products": mixed((types.Product, Only(0))),
    "gates": mixed((types.Gate, Uniform())),
    "matrix products": mixed((types.MatMul, ValueOnly(0.0))),
    "norms": mixed((types.LayerNorm, Pass())),
    "linear": mixed((types.Linear, AlphaBeta(2.0, 1.0, stabilizer=0.0))),
    "first": mixed((types.Linear, Flat(0.0))),
}


@pytest.mark.filterwarnings("ignore:entries of .* match no layer:lrpfx.errors.LrpfxWarning")
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.sampled(4)
def test_regions_of_both_kinds(mixture):
    for name in ("transformer block", "squeeze and excitation", "dead scale"):
        net, x = network(name)
        carrying = lrpfx.transform(net, MIXTURES[mixture], example_inputs=x)
        direct = lrpfx.transform(net, MIXTURES[mixture], example_inputs=x, optimize=False)
        assert_same(carrying, direct, x, tolerance=1e-10)


def test_layers_without_relevance():
    net, x = network("dead scale")
    carrying = lrpfx.transform(net, AttnLRP(), example_inputs=x)
    stage = next(stage for stage in lrpfx.history(carrying) if stage.name == "carry_multipliers")
    dead = {name for name, what in stage.details if what == "gets no relevance"}
    assert dead == {"b", "relu", "c", "sigmoid"}
    recorded = lrpfx.attribute(carrying, x, 1, record=sorted(dead)).layers
    assert all(not value.any() for value in recorded.values())


@pytest.mark.parametrize("name", ["transformer block", "group norm", "chunk", "dead scale", "x * x"])
def test_several_targets(name):
    net, x = network(name)
    explain_model = lrpfx.transform(net, AttnLRP(), example_inputs=x)
    record = names_of(explain_model)
    with torch.no_grad():
        seeds = torch.randn(3, *net(x).shape)
    single = [lrpfx.attribute(explain_model, x, seed, record=record) for seed in seeds]
    for chunk_size in (None, 2, 3):
        several = lrpfx.attribute(explain_model, x, targets=seeds, record=record, chunk_size=chunk_size)
        for number, one in enumerate(single):
            assert relative(several.relevance[number], one.relevance) <= 1e-12
            assert all(relative(several.layers[node][number], one.layers[node]) <= 1e-12 for node in record)


@pytest.mark.parametrize("name", ["transformer block", "batch norm", "split"])
def test_copies_and_other_weights(name):
    net, x = network(name)
    explain_model = lrpfx.transform(net, AttnLRP(), example_inputs=x)
    expected = lrpfx.attribute(explain_model, x, torch.cos).relevance
    file = io.BytesIO()
    torch.save(explain_model, file)
    file.seek(0)
    copies = [copy.deepcopy(explain_model), pickle.loads(pickle.dumps(explain_model)), torch.load(file, weights_only=False)]
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    changed = lrpfx.attribute(lrpfx.transform(other, AttnLRP(), example_inputs=x), x, torch.cos).relevance
    assert relative(changed, expected) > 1e-3
    for one in copies:
        assert torch.equal(lrpfx.attribute(one, x, torch.cos).relevance, expected)
        assert lrpfx.ledger(one, x, torch.cos).unexplained <= 1e-9
        one.load_state_dict(other.state_dict())
        assert relative(lrpfx.attribute(one, x, torch.cos).relevance, changed) <= 1e-14


def test_both_front_ends():
    for name in ("transformer block", "group norm", "chunk"):
        net, x = network(name)
        traced, exported = (
            lrpfx.attribute(lrpfx.transform(net, AttnLRP(), example_inputs=x, capture=capture), x, torch.cos).relevance
            for capture in ("symbolic", "export")
        )
        assert relative(exported, traced) <= 1e-13


class OfList(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = dense()

    def forward(self, tensors):
        return self.dense(tensors[0].softmax(-1)) * tensors[1]["factor"]


def test_inputs_that_hold_tensors():
    torch.manual_seed(0)
    model, given = OfList().double().eval(), {"tensors": [torch.rand(2, 6).double(), {"factor": torch.rand(2, 6).double()}]}
    found = [
        lrpfx.attribute(lrpfx.transform(model, AttnLRP(), given, optimize=optimize), given, 1).relevance["tensors"]
        for optimize in (True, False)
    ]
    assert_close(found[0][0], found[1][0], 1e-12)
    assert_close(found[0][1]["factor"], found[1][1]["factor"], 1e-12)
    assert found[0][0].abs().max() > 0


class OfPieces(nn.Module):
    """Attention on pieces of one projection, of which rules for values alone detach the queries and keys."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(4, 12)

    def forward(self, x):
        query, key, value = self.projection(x).split(4, -1)
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value


def test_records_of_conversions_of_several_tensors():
    explain_model = lrpfx.transform(OfPieces().double().eval(), CPLRP(), torch.randn(2, 3, 4, dtype=torch.float64))
    assert "split.detached" in lrpfx.node_names(explain_model)
    inputs = torch.randn(2, 3, 4, dtype=torch.float64)
    layers = lrpfx.attribute(explain_model, inputs, (-1, 1), record=["*"]).layers
    assert {"getitem", "getitem_1", "getitem_2"} <= set(layers) and not {"split", "split.detached"} & set(layers)
    with pytest.raises(lrpfx.InputError, match=r"'split.detached' returns several tensors.*'getitem', 'getitem_1'"):
        lrpfx.attribute(explain_model, inputs, (-1, 1), record=["split.detached"])


def test_not_for_live_weights():
    """Relevance that can be differentiated keeps the rules as written."""
    net, x = network("SwiGLU")
    live = lrpfx.transform(net, AttnLRP(), example_inputs=x, fold=False)
    carrying = lrpfx.transform(net, AttnLRP(), example_inputs=x)
    assert all(stage.name != "carry_multipliers" for stage in lrpfx.history(live))
    assert relative(lrpfx.attribute(live, x, 1).relevance, lrpfx.attribute(carrying, x, 1).relevance) <= 1e-13


def test_relevance_of_zeros_is_accounted_for():
    """A sum of 0 has no shares: what a target assigns to it is absent, and the ledger says so."""
    explain_model = lrpfx.transform(Unary(lambda x: x[:, :2] + x[:, 2:]), AttnLRP())
    x = torch.tensor([[1.0, 2.0, -1.0, 3.0]])
    accounts = lrpfx.ledger(explain_model, x, torch.tensor([[1.0, 5.0]]))
    assert accounts.total("absent") == 1.0 and accounts.unexplained == 0.0
    assert torch.equal(
        lrpfx.attribute(explain_model, x, torch.tensor([[1.0, 5.0]])).relevance, torch.tensor([[0.0, 2.0, 0.0, 3.0]])
    )
