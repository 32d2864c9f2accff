"""Kinds: one source, the rows of the operator table, so that a module is the same layer in a graph and by itself."""

import pytest
import torch
import zennit.types
from helpers import Binary, assert_close
from torch import nn

import lrpfx
from lrpfx import rules, types
from lrpfx.canonizers import SequentialMergeBatchNorm
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonPlus, LayerMapComposite
from lrpfx.operators.table import all_operators

#: Kinds that Zennit has a class in, and lrpfx has not: attention is no element-wise function, and Zennit dropped it in 1.0.0.
DROPPED = {"Activation": {nn.MultiheadAttention}}


@pytest.mark.parametrize("row", [row for row in all_operators() if row.spellings.modules], ids=lambda row: row.name)
def test_modules_of_a_row_are_of_its_kind(row):
    kinds = [kind for kind in vars(types).values() if isinstance(kind, types.SubclassMeta) and kind is not types.Kind]
    for module in row.spellings.modules:
        for kind in kinds:
            assert issubclass(module, kind) == issubclass(row.kind, kind), (module, kind)


def test_kinds_list_what_zennit_lists():
    for name, theirs in vars(zennit.types).items():
        if isinstance(theirs, zennit.types.SubclassMeta):
            ours = {item.__name__ for item in getattr(types, name).__subclass__}
            assert {item.__name__ for item in set(theirs.__subclass__) - DROPPED.get(name, set())} <= ours


def test_gates_are_products_and_products_no_gates():
    assert issubclass(nn.GLU, types.Gate) and issubclass(nn.GLU, types.Product)
    assert issubclass(nn.CosineSimilarity, types.Product) and not issubclass(nn.CosineSimilarity, types.Gate)


# --- every module that a row lists, in both modes ----------------------------------------------------------------------------


def images(module_class):
    """The number of dimensions that a module acts on besides the channels, from its name: 2 for AvgPool2d."""
    name = module_class.__name__
    return int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 0


def make_batch_norm(module_class):
    layer = module_class(4)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


#: module -> (how to make it, shape of the features in front of it without the batch); other activations take no arguments.
FEATURES, CHANNELS = (8,), (4, 6, 6)
MODULES = {
    nn.GRUCell: (lambda: nn.GRUCell(8, 4), FEATURES),
    nn.RNNCell: (lambda: nn.RNNCell(8, 4), FEATURES),
    nn.Linear: (lambda: nn.Linear(8, 8), FEATURES),
    lrpfx.layer.Sum: (lambda: lrpfx.layer.Sum(-1), CHANNELS),
    nn.Threshold: (lambda: nn.Threshold(0.1, 0.2), FEATURES),
    nn.LayerNorm: (lambda: nn.LayerNorm(8), FEATURES),
    nn.RMSNorm: (lambda: nn.RMSNorm(8), FEATURES),
    nn.GroupNorm: (lambda: nn.GroupNorm(2, 4), CHANNELS),
    nn.LocalResponseNorm: (lambda: nn.LocalResponseNorm(2, alpha=0.5), CHANNELS),
    nn.Softmax: (lambda: nn.Softmax(-1), FEATURES),
    nn.LogSoftmax: (lambda: nn.LogSoftmax(-1), FEATURES),
    nn.Upsample: (lambda: nn.Upsample(scale_factor=2), CHANNELS),
    nn.UpsamplingNearest2d: (lambda: nn.UpsamplingNearest2d(scale_factor=2), CHANNELS),
    nn.UpsamplingBilinear2d: (lambda: nn.UpsamplingBilinear2d(scale_factor=2), CHANNELS),
    nn.Fold: (lambda: nn.Fold((3, 3), 2), (16, 4)),
    nn.Flatten: (nn.Flatten, CHANNELS),
    nn.Softmin: (lambda: nn.Softmin(-1), FEATURES),
    nn.LPPool1d: (lambda: nn.LPPool1d(2, 2), (4, 6)),
    nn.LPPool2d: (lambda: nn.LPPool2d(2, 2), CHANNELS),
    nn.LPPool3d: (lambda: nn.LPPool3d(2, 2), (4, 6, 6, 6)),
    nn.Unfold: (lambda: nn.Unfold(2), CHANNELS),
    nn.ChannelShuffle: (lambda: nn.ChannelShuffle(2), CHANNELS),
    nn.PixelShuffle: (lambda: nn.PixelShuffle(2), CHANNELS),
    nn.PixelUnshuffle: (lambda: nn.PixelUnshuffle(2), CHANNELS),
    nn.SyncBatchNorm: (lambda: make_batch_norm(nn.SyncBatchNorm), CHANNELS),
    nn.Unflatten: (lambda: nn.Unflatten(1, (2, 4)), FEATURES),
}
#: Layers of two inputs, which a graph takes apart, so that each step has a rule of its own; module mode has one for all of it.
#: Where that is the same rule, relevance differs by what stabilizers take; where it would be another, it is refused.
TAKEN_APART = {
    nn.CosineSimilarity: (nn.CosineSimilarity, None),
    nn.PairwiseDistance: (nn.PairwiseDistance, 1e-4),
    nn.Bilinear: (lambda: nn.Bilinear(4, 4, 3), 1e-4),
}
#: Layers without an input that relevance could go to, and layers that are called with indices, which have no rule.
NO_RULE = {nn.Embedding, nn.EmbeddingBag, nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d}
#: Layers with several results (tests/rules/test_recurrent.py).
NO_RULE |= {nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell}
LISTED = list(dict.fromkeys(module for row in all_operators() for module in row.spellings.modules))


def layer_and_shape(module_class):
    if module_class in MODULES:
        make, shape = MODULES[module_class]
        return make(), shape
    dimensions, name = images(module_class), module_class.__name__
    shape = (4, *(6,) * dimensions) if dimensions else FEATURES
    if name.startswith("BatchNorm"):
        return make_batch_norm(module_class), shape
    if name.startswith("Conv"):
        return module_class(4, 4, 3), shape
    if name.startswith("InstanceNorm"):
        return module_class(4, affine=True), shape
    return module_class(2) if "Pool" in name else module_class(), shape


class Sandwich(nn.Module):
    """A dense layer or a convolution, the layer, and a dense layer."""

    def __init__(self, layer, shape):
        super().__init__()
        spatial = len(shape) - 1 if len(shape) > 2 or images(type(layer)) else 0
        convolutions = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        self.front = convolutions[spatial](3, shape[0], 1) if spatial else nn.Linear(5, torch.Size(shape).numel())
        self.front_to_shape = nn.Identity() if spatial or len(shape) == 1 else nn.Unflatten(1, shape)
        self.layer = layer
        self.input = torch.randn(3, 3, *shape[1:]) if spatial else torch.randn(3, 5)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        self.back = nn.Linear(self.features(self.input).shape[1], 2)
        self.eval()

    def features(self, x):
        return self.layer(self.front_to_shape(self.front(x))).flatten(1)

    def forward(self, x):
        return self.back(self.features(x))


@pytest.mark.parametrize("composite_class", [EpsilonPlus, EpsilonAlpha2Beta1])
@pytest.mark.parametrize("module_class", [item for item in LISTED if item not in NO_RULE | TAKEN_APART.keys()])
def test_module_mode_equals_graph_mode(module_class, composite_class):
    """Module mode merges a batch norm where a canonizer does; a graph is merged by itself."""
    torch.manual_seed(0)
    model = Sandwich(*layer_and_shape(module_class))
    x, seed = model.input, torch.randn(3, 2)
    expected = lrpfx.attribute(lrpfx.transform(model, composite_class(), example_inputs=x), x, seed).relevance
    with composite_class(canonizers=[SequentialMergeBatchNorm()]).context(model):
        leaf = x.clone().requires_grad_()
        (relevance,) = torch.autograd.grad(model(leaf), leaf, seed)
    torch.testing.assert_close(relevance, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("module_class", TAKEN_APART)
def test_what_a_graph_takes_apart(module_class):
    make, tolerance = TAKEN_APART[module_class]
    layer = make()
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    seed = torch.randn(layer(a, b).shape)
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    with EpsilonPlus().context(layer):
        if tolerance is None:
            with pytest.raises(lrpfx.RuleError, match=f"{module_class.__name__}: .* gives each step of a module its own rule"):
                layer(*leaves)
            return
        relevances = torch.autograd.grad(layer(*leaves), leaves, seed)
    expected = lrpfx.attribute(lrpfx.transform(Binary(layer), EpsilonPlus()), (a, b), seed).relevance
    for actual, of_graph in zip(relevances, expected, strict=True):
        assert_close(actual, of_graph, tolerance)


@pytest.mark.parametrize("rule", [rules.Only(0), rules.Only(1), rules.Uniform()])
def test_halves_of_a_gated_linear_unit(rule):
    """They are the signal and what scales it, as in the product that a graph makes of them."""
    model = Sandwich(nn.GLU(), FEATURES)
    composite = EpsilonPlus(layer_map=[(types.Gate, rule)])
    x, seed = model.input, torch.randn(3, 2)
    expected = lrpfx.attribute(lrpfx.transform(model, composite), x, seed).relevance
    with composite.context(model):
        leaf = x.clone().requires_grad_()
        (relevance,) = torch.autograd.grad(model(leaf), leaf, seed)
    torch.testing.assert_close(relevance, expected, rtol=1e-10, atol=1e-12)


def test_one_kind_by_itself_in_both_modes():
    """The rows of a kind are what a layer map of it finds, whether as modules or in a graph."""
    model, x = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LogSoftmax(1)).eval(), torch.randn(2, 4)
    composite = LayerMapComposite([(types.Activation, rules.Pass()), (types.Linear, rules.Epsilon())])
    expected = lrpfx.attribute(lrpfx.transform(model, composite), x, lambda output: output).relevance
    with composite.context(model):
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        (relevance,) = torch.autograd.grad(output, leaf, output.detach())
    torch.testing.assert_close(relevance, expected, rtol=1e-12, atol=1e-12)
