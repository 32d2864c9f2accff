"""Relevance of weights against a slow reference: the layer with one weight alone, the rules from their formulas."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, DeepLIFT, EpsilonPlus, EpsilonPlusFlat, GammaByDepth, SpecialFirstLayerMapComposite
from lrpfx.errors import InputError, InputTypeError, UnsupportedOperationError
from lrpfx.rules import AlphaBeta, Epsilon, Flat, Gamma, Pass, WSquare, ZBox, ZPlus
from lrpfx.types import Linear

EPSILON = 1e-6


def stabilized(z):
    return z + torch.where(z >= 0, EPSILON, -EPSILON)


def one_by_one(weight, contribution):
    """For each entry of a weight, the sum of what `contribution` makes of the layer with this entry alone."""
    found = torch.zeros_like(weight)
    for place in range(weight.numel()):
        alone = torch.zeros_like(weight)
        alone.view(-1)[place] = weight.reshape(-1)[place]
        found.view(-1)[place] = contribution(alone)
    return found


def parts(x, w):
    return x.clamp(min=0), x.clamp(max=0), w.clamp(min=0), w.clamp(max=0)


def reference(rule, function, x, w, b, relevance):
    """The relevance of each weight of z = function(x, w, b), with rules written out for one weight at a time."""
    zero = torch.zeros_like(b)

    def of_sign(x, w, b, positive):
        x_plus, x_minus, w_plus, w_minus = parts(x, w)
        first, second = (w_plus, w_minus) if positive else (w_minus, w_plus)
        kept = b.clamp(min=0) if positive else b.clamp(max=0)
        return function(x_plus, first, kept) + function(x_minus, second, zero)

    z = function(x, w, b)
    if isinstance(rule, Epsilon):
        return one_by_one(w, lambda one: (function(x, one, zero) * relevance / stabilized(z)).sum())
    if isinstance(rule, ZPlus):
        ratio = relevance / stabilized(of_sign(x, w, b, True))
        return one_by_one(w, lambda one: (of_sign(x, one, zero, True) * ratio).sum())
    if isinstance(rule, AlphaBeta):
        plus, minus = (relevance / stabilized(of_sign(x, w, b, positive)) for positive in (True, False))
        return one_by_one(
            w,
            lambda one: (2 * of_sign(x, one, zero, True) * plus - of_sign(x, one, zero, False) * minus).sum(),
        )
    if isinstance(rule, Gamma):

        def favoured(one, b, positive):
            return function(x, one, b) + rule.gamma * of_sign(x, one, b, positive)

        plus = torch.where(z > 0, relevance / stabilized(favoured(w, b, True)), 0.0)
        minus = torch.where(z < 0, relevance / stabilized(favoured(w, b, False)), 0.0)
        return one_by_one(w, lambda one: (favoured(one, zero, True) * plus + favoured(one, zero, False) * minus).sum())
    if isinstance(rule, ZBox):
        low, high = (torch.full_like(x, bound) for bound in (rule.low, rule.high))

        def bounded(one, b):
            plus, minus = one.clamp(min=0), one.clamp(max=0)
            return function(x, one, b) - function(low, plus, b.clamp(min=0)) - function(high, minus, b.clamp(max=0))

        ratio = relevance / stabilized(bounded(w, b))
        return one_by_one(w, lambda one: (bounded(one, zero) * ratio).sum())
    ones = torch.ones_like(x)
    if isinstance(rule, WSquare):
        ratio = relevance / stabilized(function(ones, w**2, b**2))
        return one_by_one(w, lambda one: (function(ones, one**2, zero) * ratio).sum())
    assert isinstance(rule, Flat)
    ratio = relevance / stabilized(function(ones, torch.ones_like(w), zero))
    return one_by_one(w, lambda one: (function(ones, (one != 0).to(one), zero) * ratio).sum())


def functional(layer):
    def run(x, w, b):
        return torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))

    return run


LAYERS = [
    (lambda: nn.Linear(6, 4), (3, 6)),
    (lambda: nn.Linear(6, 4), (2, 3, 6)),
    (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 7)),
    (lambda: nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=2), (2, 3, 7, 7)),
    (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 5)),
    (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 3, 3)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), (2, 4, 3, 3)),
]
RULES = [Epsilon(), ZPlus(), AlphaBeta(), Gamma(0.25), ZBox(-3.0, 3.0), WSquare(), Flat()]


def small(make, shape, seed=0):
    torch.manual_seed(seed)
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    features = layer(x).flatten(1).shape[1]
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(features, 3).double()).eval(), x.clamp(-2.9, 2.9)


def composite(rule):
    return SpecialFirstLayerMapComposite([(nn.ReLU, Pass()), (Linear, Epsilon())], [(Linear, rule)])


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("make, shape", LAYERS)
def test_weights_one_by_one(make, shape, rule):
    model, x = small(make, shape)
    explain_model = lrpfx.transform(model, composite(rule), example_inputs=x)
    found = lrpfx.relevance_of_weights(explain_model, x, 1)
    assert list(found) == ["0.weight", "3.weight"]
    attribution = lrpfx.attribute(explain_model, x, 1, record=["0"])
    layer = model[0]
    expected = reference(rule, functional(layer), x, layer.weight.detach(), layer.bias.detach(), attribution.layers["0"])
    torch.testing.assert_close(found["0.weight"], expected, rtol=1e-9, atol=1e-11)
    channels = x.ndim - 1 if isinstance(layer, nn.Linear) else 1
    of_channels = attribution.relevance.movedim(channels, 0).flatten(1).sum(1)
    torch.testing.assert_close(by_input_channel(found["0.weight"], layer), of_channels, rtol=1e-9, atol=1e-11)


def by_input_channel(relevance, layer):
    if isinstance(layer, nn.ConvTranspose2d):
        return relevance.flatten(1).sum(1)
    in_groups = relevance.unflatten(0, (getattr(layer, "groups", 1), -1))
    return in_groups.transpose(1, 2).flatten(2).sum(2).flatten()


@pytest.mark.parametrize("settings", [{"fold": False}, {"optimize": False}], ids=str)
@pytest.mark.parametrize("rule", [Epsilon(0), ZPlus(conserve=True), AlphaBeta(), Gamma(), ZBox(-3.0, 3.0), Flat()], ids=repr)
def test_settings_of_the_compiler_change_nothing(settings, rule):
    model, x = small(*LAYERS[2])
    expected, found = (
        lrpfx.relevance_of_weights(lrpfx.transform(model, composite(rule), example_inputs=x, **given), x, 2)
        for given in ({}, settings)
    )
    assert list(expected) == list(found) == ["0.weight", "3.weight"]
    for name, relevance in expected.items():
        torch.testing.assert_close(found[name], relevance, rtol=1e-8, atol=1e-10)


class Transformer(nn.Module):
    """Embeddings, attention with its weights in one parameter, a convolution with batch norm, and a head with tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 8, padding_idx=0)
        self.position = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 9)
        self.head.weight = self.embedding.weight
        for tensor in (self.batch_norm.weight, self.batch_norm.running_var):
            nn.init.uniform_(tensor, 0.5, 2.0)
        nn.init.normal_(self.batch_norm.running_mean)

    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = x + self.batch_norm(self.convolution(x.transpose(1, 2))).transpose(1, 2).relu()
        return self.head(x)[:, -1]


IDS = torch.tensor([[3, 1, 4, 1, 0], [2, 7, 1, 8, 2]])


@pytest.fixture(scope="module")
def transformer():
    return Transformer().double().eval()


@pytest.mark.parametrize("settings", [{}, {"fold": False}], ids=str)
@pytest.mark.parametrize("made", [AttnLRP(), CPLRP(), EpsilonPlus(stabilizer=1e-9), GammaByDepth()], ids=repr)
def test_sums_are_those_of_the_ledger(transformer, made, settings):
    explain_model = lrpfx.transform(transformer, made, example_inputs=IDS, **settings)
    found = lrpfx.relevance_of_weights(explain_model, IDS, 4)
    ledger = lrpfx.ledger(explain_model, IDS, 4)
    names = {
        "embedding.weight": ("embedding", "head"),
        "attention.in_proj_weight": ("attention.linear",),
        "attention.out_proj.weight": ("attention.out_proj",),
        "convolution.weight": ("convolution",),
    }
    assert list(found) == list(names)
    for name, nodes in names.items():
        expected = sum(ledger.entry(node).relevance_out for node in nodes)
        assert found[name].shape == transformer.get_parameter(name).shape
        assert float(found[name].sum()) == pytest.approx(expected, rel=1e-6, abs=1e-9), name


def test_embeddings_and_tied_weights_one_by_one(transformer):
    explain_model = lrpfx.transform(transformer, AttnLRP(), example_inputs=IDS)
    attribution = lrpfx.attribute(explain_model, IDS, 4, record=["embedding", "head"], record_multipliers=["head"])
    expected = torch.zeros(9, 8, dtype=torch.float64)
    for tokens, relevance in zip(IDS, attribution.layers["embedding"], strict=True):
        for token, row in zip(tokens, relevance, strict=True):
            expected[token] += row
    untied = Transformer().double().eval()
    untied.load_state_dict(transformer.state_dict())
    untied.head.weight = nn.Parameter(transformer.head.weight.detach().clone())
    apart = lrpfx.relevance_of_weights(lrpfx.transform(untied, AttnLRP(), example_inputs=IDS), IDS, 4)
    torch.testing.assert_close(apart["embedding.weight"], expected, rtol=1e-10, atol=1e-12)
    assert (apart["head.weight"] != 0).any(1).tolist() == [place == 4 for place in range(9)]
    found = lrpfx.relevance_of_weights(explain_model, IDS, 4)
    assert "head.weight" not in found
    torch.testing.assert_close(found["embedding.weight"], expected + apart["head.weight"], rtol=1e-10, atol=1e-12)


def test_merged_batch_norm_scales_the_weights_under_their_names():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)).double().eval()
    for tensor in (*model[1].parameters(), model[1].running_mean, model[1].running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    merged = nn.utils.fuse_conv_bn_eval(model[0], model[1])
    plain = nn.Sequential(merged, *model[2:]).eval()
    expected = lrpfx.relevance_of_weights(lrpfx.transform(plain, EpsilonPlus()), x, 1)
    for fold in (True, False):
        found = lrpfx.relevance_of_weights(lrpfx.transform(model, EpsilonPlus(), fold=fold), x, 1)
        assert list(found) == ["0.weight", "4.weight"]
        torch.testing.assert_close(found["0.weight"], expected["0.weight"], rtol=1e-8, atol=1e-10)


class Reused(nn.Module):
    """A layer that is called twice, the second time with its weight the other way round."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.relu(self.layer(x)) @ self.layer.weight


def test_reused_weights_add_up():
    torch.manual_seed(0)
    model, x = Reused().double().eval(), torch.randn(3, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x)
    found = lrpfx.relevance_of_weights(explain_model, x, 1)["layer.weight"]
    weight = model.layer.weight.detach()
    expected = torch.zeros_like(weight)
    for sample in x:
        hidden = torch.relu(weight @ sample)
        for out in range(4):
            for into in range(4):
                if hidden[out] > 0:  # ReLU passes multipliers: those of unit 1 are its weights
                    expected[out, into] += weight[out, 1] * weight[out, into] * sample[into]
            expected[out, 1] += weight[out, 1] * hidden[out]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class LookedUp(nn.Module):
    """Each sample has one of three matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrices, self.head = nn.Parameter(torch.randn(3, 5, 4)), nn.Linear(5, 2)

    def forward(self, x, numbers):
        return self.head(torch.bmm(self.matrices[numbers], x.unsqueeze(2)).squeeze(2))


@pytest.mark.parametrize("settings", [{}, {"fold": False}], ids=str)
def test_matrices_that_are_looked_up_by_sample(settings):
    model, x, numbers = LookedUp().double().eval(), torch.rand(4, 4, dtype=torch.float64), torch.tensor([2, 0, 2, 2])
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=(x, numbers), **settings)
    found = lrpfx.relevance_of_weights(explain_model, (x, numbers), 1)["matrices"]
    expected = torch.zeros_like(found)
    for sample, number in zip(x, numbers, strict=True):
        expected[number] += model.matrices.detach()[number] * torch.outer(model.head.weight.detach()[1], sample)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert not found[1].any()


def test_relu_networks_have_weight_times_gradient_under_attnlrp():
    model, x = small(*LAYERS[3])
    found = lrpfx.relevance_of_weights(lrpfx.transform(model, AttnLRP()), x, 1)
    gradients = torch.autograd.grad(model(x)[:, 1].sum(), [model.get_parameter(name) for name in found])
    for (name, relevance), gradient in zip(found.items(), gradients, strict=True):
        torch.testing.assert_close(relevance, model.get_parameter(name) * gradient, rtol=1e-9, atol=1e-11)


def test_targets_have_a_dimension_and_batches_add_up():
    model, x = small(*LAYERS[3])
    explain_model = lrpfx.transform(model, composite(Gamma()), example_inputs=x)
    both = lrpfx.relevance_of_weights(explain_model, x, targets=[0, 2])
    for number, target in enumerate((0, 2)):
        alone = lrpfx.relevance_of_weights(explain_model, x, target)
        apart = [lrpfx.relevance_of_weights(explain_model, one[None], target) for one in x]
        for name, relevance in both.items():
            torch.testing.assert_close(relevance[number], alone[name], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(apart[0][name] + apart[1][name], alone[name], rtol=1e-9, atol=1e-11)


def test_parameters_by_patterns():
    model, x = small(*LAYERS[0])
    explain_model = lrpfx.transform(model, composite(Epsilon()))
    everything = lrpfx.relevance_of_weights(explain_model, x, 1)
    found = lrpfx.relevance_of_weights(explain_model, x, 1, parameters=["3.*"])
    assert list(found) == ["3.weight"] and torch.equal(found["3.weight"], everything["3.weight"])
    for wrong in ([], 3, None):
        with pytest.raises(InputTypeError, match="names, or patterns of names, not"):
            lrpfx.relevance_of_weights(explain_model, x, 1, parameters=wrong)
    with pytest.raises(InputError, match=r"no parameter has the name '3\.wieght'. Did you mean '3\.weight'"):
        lrpfx.relevance_of_weights(explain_model, x, 1, parameters="3.wieght")
    with pytest.raises(InputError, match="no weight of a dense layer"):
        lrpfx.relevance_of_weights(explain_model, x, 1, parameters="3.bias")
    with pytest.raises(InputError, match=r"no weight of a dense layer.* 0\.bias"):
        lrpfx.relevance_of_weights(explain_model, x, 1, parameters=["0.weight", "0.bias"])
    with pytest.raises(InputTypeError, match="parameters are names"):
        lrpfx.relevance_of_weights(explain_model, x, 1, parameters=[3])


def test_nothing_of_the_model_or_the_inputs_changes():
    model, x = small(*LAYERS[1])
    before = [one.clone() for one in (*model.state_dict().values(), x)]
    explain_model = lrpfx.transform(model, composite(Gamma()), share=True, example_inputs=x)
    lrpfx.relevance_of_weights(explain_model, x, 1)
    assert all(map(torch.equal, before, (*model.state_dict().values(), x)))
    assert not x.requires_grad and all(one.grad is None for one in model.parameters())


class OwnPropagate(Epsilon):
    def propagate(self, call, relevance):
        return tuple(2 * one for one in super().propagate(call, relevance))


def test_rules_with_unknown_messages_are_errors():
    model, x = small(*LAYERS[0])
    explain_model = lrpfx.transform(model, composite(OwnPropagate()))
    with pytest.raises(UnsupportedOperationError, match=r"(?s)^0 .*OwnPropagate.*parameters="):
        lrpfx.relevance_of_weights(explain_model, x, 1)
    assert list(lrpfx.relevance_of_weights(explain_model, x, 1, parameters="3.*")) == ["3.weight"]


class OwnAccount(OwnPropagate):
    """Twice what `Epsilon` passes on."""

    def relevance_of_parameter(self, call, relevance, place):
        ratio = relevance / self.epsilon(call.own_output())
        return 2 * call.parameters[place] * call.parameter_gradient(ratio, place, call.inputs, call.parameters)


def test_own_rules_may_know_their_messages():
    model, x = small(*LAYERS[0])
    doubled = lrpfx.relevance_of_weights(lrpfx.transform(model, composite(OwnAccount())), x, 1)["0.weight"]
    expected = lrpfx.relevance_of_weights(lrpfx.transform(model, composite(Epsilon())), x, 1)["0.weight"]
    torch.testing.assert_close(doubled, 2 * expected, rtol=1e-9, atol=1e-11)


def test_layers_without_a_rule_are_errors():
    model, x = small(*LAYERS[0])
    explain_model = lrpfx.transform(model, lrpfx.composites.LayerMapComposite([(nn.ReLU, Pass())]), unassigned="gradient")
    with pytest.raises(UnsupportedOperationError, match="no rule, but its gradient"):
        lrpfx.relevance_of_weights(explain_model, x, 1)


def test_differences_from_a_reference_are_errors():
    model, x = small(*LAYERS[0])
    explain_model = lrpfx.transform(model, DeepLIFT(), example_inputs=x)
    with pytest.raises(InputError, match="differences from a reference"):
        lrpfx.relevance_of_weights(explain_model, x, 1)


class OfPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.pairs, self.head = nn.Bilinear(6, 6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.pairs(x, x))


def test_products_that_sum_are_errors():
    x = torch.rand(3, 6)
    explain_model = lrpfx.transform(OfPairs().eval(), AttnLRP(), example_inputs=x)
    with pytest.raises(UnsupportedOperationError, match="pairs"):
        lrpfx.relevance_of_weights(explain_model, x, 1)


def test_recurrent_layers_are_errors():
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    x = torch.randn(2, 5, 3)
    explain_model = lrpfx.transform(Reader().eval(), AttnLRP(), example_inputs=x)
    with pytest.raises(UnsupportedOperationError, match="lstm"):
        lrpfx.relevance_of_weights(explain_model, x, 1)
    assert list(lrpfx.relevance_of_weights(explain_model, x, 1, parameters="head.*")) == ["head.weight"]


def test_weights_that_are_not_linear_in_parameters_are_errors():
    model, x = small(*LAYERS[0])
    nn.utils.parametrizations.weight_norm(model[0])
    explain_model = lrpfx.transform(model, composite(Epsilon()))
    with pytest.raises(UnsupportedOperationError, match=r"(?s)not a linear function of .*original.*remove_parametrizations"):
        lrpfx.relevance_of_weights(explain_model, x, 1)


def test_weights_of_zero_under_a_merged_layer_take_nothing():
    """`Flat` gives relevance to weights of 0 as well, which a scaled weight has no share of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)).eval()
    with torch.no_grad():
        model[0].weight[0, 0] = 0.0
    x = torch.randn(2, 2, 5, 5)
    with pytest.raises(UnsupportedOperationError, match="weights that are 0"):
        lrpfx.relevance_of_weights(lrpfx.transform(model, EpsilonPlusFlat()), x, 1)
    found = lrpfx.relevance_of_weights(lrpfx.transform(model, EpsilonPlus()), x, 1)["0.weight"]
    assert (found[0, 0] == 0).all() and found[0, 1].any()
