"""Affine maps merged into the layers behind them, against the same network written with merged weights by hand."""

import copy

import pytest
import torch
import zennit.composites
import zennit.rules
from helpers import assert_close, randomize_batch_norm, torchvision_model
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.canonizers import MergeInputNormalization, MergeLayerNorm
from lrpfx.composites import EpsilonPlus


def affine_of(norm):
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale.detach(), (norm.bias - norm.running_mean * scale).detach()


class Thresholded(nn.Module):
    """relu(a x + c) = a T(x) + c, written out."""

    def __init__(self, scale, shift):
        super().__init__()
        self.register_buffer("scale", scale.reshape(1, -1, 1, 1))
        self.register_buffer("shift", shift.reshape(1, -1, 1, 1))

    def forward(self, x):
        return torch.where(self.scale * x + self.shift > 0, x, -self.shift / self.scale)


def merged_right(conv, scale, shift):
    """A convolution without padding with an affine map of its input merged by hand."""
    merged = copy.deepcopy(conv)
    with torch.no_grad():
        merged.bias = nn.Parameter((conv.weight * shift[None, :, None, None]).sum((1, 2, 3)))
        if conv.bias is not None:
            merged.bias += conv.bias
        merged.weight *= scale[None, :, None, None]
    return merged


def merged_left(conv, norm):
    merged, (scale, shift) = copy.deepcopy(conv), affine_of(norm)
    with torch.no_grad():
        bias = 0.0 if conv.bias is None else conv.bias
        merged.weight *= scale[:, None, None, None]
        merged.bias = nn.Parameter(bias * scale + shift)
    return merged


class DenseNetByHand(nn.Module):
    """torchvision's DenseNet with every batch norm merged."""

    def __init__(self, model):
        super().__init__()
        source, self.blocks = model.features, nn.ModuleList()
        self.stem = nn.Sequential(merged_left(source.conv0, source.norm0), nn.ReLU(), source.pool0)
        for name, module in source.named_children():
            if name.startswith("denseblock"):
                self.blocks.append(nn.ModuleList(self.layer(layer) for layer in module.values()))
            elif name.startswith("transition"):
                affine = affine_of(module.norm)
                self.blocks.append(nn.Sequential(Thresholded(*affine), merged_right(module.conv, *affine), module.pool))
        scale, shift = affine_of(source.norm5)
        self.last, self.pool, self.classifier = Thresholded(scale, shift), nn.AdaptiveAvgPool2d(1), model.classifier
        with torch.no_grad():
            self.classifier = copy.deepcopy(model.classifier)
            self.classifier.bias += self.classifier.weight @ shift
            self.classifier.weight *= scale

    @staticmethod
    def layer(layer):
        affine = affine_of(layer.norm1)
        first = merged_left(merged_right(layer.conv1, *affine), layer.norm2)
        return nn.Sequential(Thresholded(*affine), first, nn.ReLU(), copy.deepcopy(layer.conv2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if isinstance(block, nn.Sequential):
                x = block(x)
                continue
            features = [x]
            for layer in block:
                features.append(layer(torch.cat(features, 1)))
            x = torch.cat(features, 1)
        return self.classifier(self.pool(self.last(x)).flatten(1))


def test_densenet_equals_the_network_with_merged_weights_by_hand():
    model = torchvision_model("densenet121").double()
    x = torch.randn(1, 3, 64, 64)
    by_hand = DenseNetByHand(model).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    seed = torch.randn(1, 1000)
    actual = lrpfx.attribute(explain_model, x, seed)
    composite = zennit.composites.EpsilonPlus(layer_map=[(Thresholded, zennit.rules.Pass())])
    with composite.context(by_hand):
        leaf = x.clone().requires_grad_()
        output = by_hand(leaf)
        (expected,) = torch.autograd.grad(output, leaf, seed)
    assert_close(output.detach(), model(x).detach(), 1e-11)
    assert_close(actual.output, model(x).detach(), 1e-11)
    assert_close(actual.relevance, expected, 1e-9)
    assert not [row for row in lrpfx.assignment(explain_model) if row.kind == "BatchNorm"]


class Net(nn.Module):
    """A batch norm that cannot be merged to the left, since what it reads is a sum."""

    def __init__(self, behind, norm=None, relu=True):
        super().__init__()
        self.norm, self.behind, self.relu = norm or nn.BatchNorm2d(4), behind, relu
        randomize_batch_norm(self)
        self.eval()

    def forward(self, x):
        x = self.norm(x + x.flip(0))
        return self.behind(F.relu(x) if self.relu else x)


BEHIND = {
    "conv": lambda: nn.Conv2d(4, 3, 3),
    "without bias": lambda: nn.Conv2d(4, 3, 3, bias=False),
    "padded": lambda: nn.Conv2d(4, 3, 3, padding=1),
    "same": lambda: nn.Conv2d(4, 3, 3, padding="same"),
    "reflected": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    "grouped": lambda: nn.Conv2d(4, 6, 3, padding=(2, 0), stride=2, dilation=2, groups=2),
    "pooled": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 3, 2)),
    "dense": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_forward_and_balance(name, relu):
    """Borders included, and channels that are scaled by a negative number or by zero."""
    torch.manual_seed(0)
    model = Net(BEHIND[name](), relu=relu)
    with torch.no_grad():
        model.norm.weight[:3] = torch.tensor([0.0, 0.0, -1.0])
        model.norm.bias[:2] = torch.tensor([0.7, -0.7])
    x = torch.randn(2, 4, 8, 8)
    for composite in (EpsilonPlus(), lrpfx.composites.EpsilonGammaBox(-3.0, 3.0)):
        explain_model = lrpfx.transform(model, composite, example_inputs=x)
        assert not [row for row in lrpfx.assignment(explain_model) if row.kind == "BatchNorm"]
        for batch in (x, torch.randn(3, 4, 8, 8)):
            assert_close(explain_model(batch), model(batch), 1e-13)
        accounts = lrpfx.ledger(explain_model, x, torch.randn_like(model(x)))
        assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


def test_relevance_at_padded_borders():
    """Epsilon in front of a padded convolution, against the dense matrix of the affine map as a whole."""
    model = Net(nn.Conv2d(4, 3, 3, padding=1), relu=False)
    x, seed = torch.randn(1, 4, 5, 5), torch.randn(1, 3, 5, 5)
    composite = EpsilonPlus(layer_map=[(nn.Conv2d, lrpfx.rules.Epsilon(0.1)), (lrpfx.types.Sum, lrpfx.rules.Only(0))])
    actual = lrpfx.attribute(lrpfx.transform(model, composite, example_inputs=x), x, seed).relevance
    affine = lambda z: model.behind(model.norm(z))  # noqa: E731
    z = (x + x.flip(0)).requires_grad_()
    output = affine(z)
    stabilized = output + 0.1 * torch.where(output >= 0, 1.0, -1.0)
    (pulled,) = torch.autograd.grad(output, z, seed / stabilized.detach())
    assert_close(actual, (z * pulled).detach(), 1e-12)


class Function(nn.Module):
    """A function in front of a layer."""

    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.layer(self.function(x))


#: What stands behind a batch norm of 4 channels -> whether it can be merged, what stands there, and the shape of a sample.
BETWEEN = {
    "AvgPool1d, dense over positions": (False, lambda: nn.Sequential(nn.AvgPool1d(2), nn.Linear(8, 3)), (4, 16)),
    "dense over positions": (False, lambda: nn.Linear(8, 3), (4, 8)),
    "mean over rows, dense over columns": (False, lambda: Function(lambda x: x.mean((2,)), nn.Linear(8, 3)), (4, 6, 8)),
    "mean that keeps dimensions": (False, lambda: Function(lambda x: x.mean(2, True), nn.Linear(8, 3)), (4, 6, 8)),
    "mean over channels": (False, lambda: Function(lambda x: x.mean(-3), nn.Linear(8, 3)), (4, 6, 8)),
    "mean over all": (False, lambda: Function(lambda x: x.mean() * torch.ones(2, 8), nn.Linear(8, 3)), (4, 6, 8)),
    "adaptive, dense over columns": (False, lambda: nn.Sequential(nn.AdaptiveAvgPool2d((1, 4)), nn.Linear(4, 3)), (4, 6, 8)),
    "divisor": (False, lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=3), nn.Conv2d(4, 3, 1)), (4, 6, 8)),
    "padded mean": (False, lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Conv2d(4, 3, 1)), (4, 6, 8)),
    "pooling over channels": (False, lambda: nn.Sequential(nn.AvgPool2d((1, 2)), nn.Conv1d(4, 3, 1)), (4, 8)),
    "padded channels": (False, lambda: Function(lambda x: F.pad(x, (1, 1, 0, 0), "reflect"), nn.Conv1d(4, 3, 1)), (4, 8)),
    "padded with zeros": (True, lambda: Function(lambda x: F.pad(x, (1, 1)), nn.Conv2d(4, 3, 1)), (4, 6, 8)),
    "padded with zeros on one side": (True, lambda: Function(lambda x: F.pad(x, (1, 0)), nn.Conv2d(4, 3, 1)), (4, 6, 8)),
    "maximum": (False, lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 3, 1)), (4, 6, 8)),
    "flattened rows": (False, lambda: Function(lambda x: x.flatten(2), nn.Linear(48, 3)), (4, 6, 8)),
    "pooling of features": (
        False, lambda: Function(lambda x: F.avg_pool1d(x.flatten(1), 2), nn.Linear(96, 3)), (4, 6, 8),
    ),
    "ceil mode": (True, lambda: nn.Sequential(nn.AvgPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 3, 1)), (4, 6, 6)),
    "padding that does not count": (
        True, lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1, True, count_include_pad=False), nn.Conv2d(4, 3, 1)), (4, 6, 6),
    ),
    "negative dimensions": (True, lambda: Function(lambda x: x.mean((-1, -2)), nn.Linear(4, 3)), (4, 6, 8)),
    "mean of 1": (True, lambda: Function(lambda x: x.mean(-1), nn.Linear(4, 3)), (4, 8)),
    "mean, flattened": (True, lambda: Function(lambda x: x.mean(2).flatten(1), nn.Linear(32, 3)), (4, 6, 8)),
    "kept, flattened": (True, lambda: Function(lambda x: x.mean((2,), keepdim=True).flatten(-3), nn.Linear(32, 3)), (4, 6, 8)),
    "AvgPool1d, flattened": (True, lambda: nn.Sequential(nn.AvgPool1d(2), nn.Flatten(), nn.Linear(32, 3)), (4, 16)),
    "flattened twice": (True, lambda: nn.Sequential(nn.Flatten(), nn.Flatten(), nn.Linear(32, 3)), (4, 8)),
    "matrix": (True, lambda: nn.Linear(4, 3), (4,)),
    "conv1d": (True, lambda: nn.Sequential(nn.AvgPool1d(2), nn.Conv1d(4, 3, 3, padding=1)), (4, 8)),
    "resized by a size": (
        True, lambda: Function(lambda x: F.interpolate(x, (x.shape[2] * 2, 8)), nn.Conv2d(4, 3, 2)), (4, 6, 8),
    ),
    "pooled to a size": (
        True, lambda: Function(lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, 4)), nn.Conv2d(4, 3, 2)), (4, 6, 8),
    ),
    "pooled by a size": (
        True, lambda: Function(lambda x: F.avg_pool2d(x, (x.shape[2] // 2, 2)), nn.Conv2d(4, 3, 2)), (4, 6, 8),
    ),
    "padded by a size": (
        True, lambda: Function(lambda x: F.pad(x, (0, x.shape[3] // 4, 0, 0), "reflect"), nn.Conv2d(4, 3, 2)), (4, 6, 8),
    ),
    "conv3d": (True, lambda: nn.Sequential(nn.AvgPool3d(2), nn.Conv3d(4, 3, 2)), (4, 4, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", BETWEEN)
def test_only_what_is_proven_is_merged(name, relu):
    """Without a verification too: `capture` gives no example, and the driver's own is not relied on."""
    merges, behind, shape = BETWEEN[name]
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1](4)
    model, x = Net(behind(), norm, relu), torch.randn(2, *shape)
    with torch.no_grad():
        model.norm.weight[:2] = torch.tensor([0.0, -1.0])
    for example in (x, None):
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=example)
        assert_close(explain_model(x), model(x).detach(), 1e-13)
        kept = [row for row in lrpfx.assignment(explain_model) if row.kind == "BatchNorm"]
        stage = {stage.name: stage for stage in lrpfx.history(explain_model)}["merge_batch_norm_right"]
        assert bool(kept) != bool(stage.matches) and bool(kept) == bool(stage.reasons)
        if example is not None:
            assert stage.matches == merges
        else:
            assert stage.matches <= merges
        accounts = lrpfx.ledger(explain_model, x, torch.randn_like(model(x)))
        assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


@pytest.mark.parametrize("name", [name for name in BETWEEN if BETWEEN[name][0] and not name.startswith(("padded", "resized"))])
def test_relevance_is_that_of_the_layers_with_the_affine_map_in_them(name):
    """Each layer is linear: the last reads what the affine map makes of pooled values, the others pool."""
    _, behind, shape = BETWEEN[name]
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1](4)
    model, x = Net(behind(), norm, relu=False), torch.randn(2, *shape)
    epsilon = 0.1
    layers = list(model.behind) if isinstance(model.behind, nn.Sequential) else [model.behind]
    pools, last = (layers[:-1], layers[-1]) if len(layers) > 1 else ([], layers[0])
    if isinstance(last, Function):
        pools, last = [last.function], last.layer
    pool = lambda z: z if not pools else pools[0](z)  # noqa: E731
    neutral = bool(pools) and isinstance(pools[0], nn.Flatten)
    mapped = [lrpfx.types.Linear, *([lrpfx.types.AvgPool] if pools and not neutral else [])]
    rules = [(kind, lrpfx.rules.Epsilon(epsilon)) for kind in mapped]
    composite = EpsilonPlus(layer_map=[*rules, (lrpfx.types.Sum, lrpfx.rules.Only(0))])
    seed = torch.randn_like(model(x))
    actual = lrpfx.attribute(lrpfx.transform(model, composite, example_inputs=x), x, seed).relevance

    def propagate(function, z, relevance):
        z = z.detach().requires_grad_()
        output = function(z)
        stabilized = output + epsilon * torch.where(output >= 0, 1.0, -1.0)
        (pulled,) = torch.autograd.grad(output, z, relevance.reshape(output.shape) / stabilized.detach())
        return (z * pulled).detach()

    z = x + x.flip(0)
    pooled = pool(z)
    tail = lambda value: last(value.flatten(1) if value.ndim > 2 and isinstance(last, nn.Linear) else value)  # noqa: E731
    scale, shift = affine_of(model.norm)
    if pooled.ndim == 2 and pooled.shape[1] != 4:  # features: each channel stands for several in a row
        scale, shift = (value.repeat_interleave(pooled.shape[1] // 4) for value in (scale, shift))
    place = (1, -1, *[1] * (pooled.ndim - 2))
    relevance = propagate(lambda value: tail(value * scale.reshape(place) + shift.reshape(place)), pooled, seed)
    expected = relevance.reshape(z.shape) if neutral or not pools else propagate(pool, z, relevance)
    assert_close(actual, expected, 1e-11)


@pytest.mark.parametrize(
    "shape, function, merges",
    [
        ((4,), lambda x: x.unsqueeze(0).transpose(0, -2).squeeze(-2), True),  # as in torch's attention
        ((4,), lambda x: x.unsqueeze(1).permute(0, 2, 1).unsqueeze(0).squeeze(dim=3).squeeze(0), True),
        ((4,), lambda x: x.unsqueeze(2).unsqueeze(1).transpose(dim0=1, dim1=2).squeeze(2).squeeze(2), True),
        ((4, 1), lambda x: x.squeeze(2), False),
        ((4, 1), lambda x: x.unsqueeze(1).squeeze(3).squeeze(1), False),
        ((4,), lambda x: x.unsqueeze(1).squeeze(), False),
    ],
)
def test_dimensions_that_squeeze_removes_for_any_size(shape, function, merges):
    model = nn.Sequential(Function(function, nn.Tanh()), nn.BatchNorm1d(4), nn.Linear(4, 3))
    randomize_batch_norm(model)
    x = torch.randn(2, *shape)
    stages = lrpfx.history(lrpfx.transform(model.eval(), EpsilonPlus(), example_inputs=x))
    assert {stage.name: stage for stage in stages}["merge_batch_norm_right"].matches == merges


def test_behind_a_dense_layer_that_is_known_to_take_matrices():
    """The batch norm at the end is merged under the condition that the input is a matrix, which the one in front needs too."""
    model = randomize_batch_norm(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert {stage.name: stage for stage in lrpfx.history(explain_model)}["merge_batch_norm_right"].matches == 1
    x = torch.randn(3, 4)
    assert_close(explain_model(x), model(x), 1e-12)


def test_several_readers_and_reasons():
    class Shared(nn.Module):
        def __init__(self, skip):
            super().__init__()
            self.norm, self.first, self.second = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.skip = skip
            randomize_batch_norm(self)
            self.eval()

        def forward(self, x):
            x = F.relu(self.norm(x))
            return self.first(x) + self.second(x) + (x if self.skip else 0.0)

    x = torch.randn(2, 4, 6, 6)
    merged = lrpfx.transform(Shared(False), EpsilonPlus(), example_inputs=x)
    stage = {stage.name: stage for stage in lrpfx.history(merged)}["merge_batch_norm_right"]
    assert stage.details == (("norm", "merged into first, second after the thresholded relu"),)
    kept = lrpfx.transform(Shared(True), EpsilonPlus(), example_inputs=x)
    stage = {stage.name: stage for stage in lrpfx.history(kept)}["merge_batch_norm_right"]
    assert stage.matches == 0 and "add_1 (add) reads it and does not commute with an affine map" in stage.reasons[0][1]
    assert lrpfx.assignment(kept).rule_of("norm") == "Pass()"
    assert lrpfx.ledger(kept, x, torch.randn(2, 4, 6, 6)).unexplained <= 1e-12


def test_wrong_merges_are_caught_without_example_inputs(monkeypatch):
    """The driver holds canonization against random inputs."""
    from lrpfx.passes.canonize import merge_batch_norm_right

    model = Net(nn.Conv2d(4, 3, 3, padding=1))
    lrpfx.transform(model, EpsilonPlus())
    monkeypatch.setattr(merge_batch_norm_right, "batch_norm_shift", lambda mean, scale, bias: -mean)
    with pytest.raises(lrpfx.VerificationError, match="merge_batch_norm_right"):
        lrpfx.transform(model, EpsilonPlus())


# --- options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "normalize",
    [
        lambda self, x: (x - self.mean) / self.deviation,
        lambda self, x: (x / 255.0 - self.mean) / self.deviation,
        lambda self, x: torch.add(x * 2.0, self.mean, alpha=3),
        lambda self, x: 1.0 - x,
        lambda self, x: self.mean - x,
        lambda self, x: torch.add(self.mean, x, alpha=3),
        lambda self, x: torch.sub(self.mean, x * 0.5, alpha=3) * self.deviation[None],
        lambda self, x: torch.rsub(x, self.mean, alpha=3),
        lambda self, x: torch.rsub(self.mean, x, alpha=3),
        lambda self, x: x.sub(0.5).div(0.25),
        lambda self, x: (x - torch.tensor(0.5)) / torch.tensor([0.25]),
    ],
)
def test_input_normalization(normalize):
    class Normalizing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6])[:, None, None])
            self.register_buffer("deviation", torch.tensor([0.2, 0.3, 0.4])[:, None, None])
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return self.conv(normalize(self, x))

    model, x = Normalizing().eval(), torch.rand(2, 3, 6, 6)
    box = lrpfx.composites.EpsilonGammaBox(0.0, 1.0, canonizers=[MergeInputNormalization()])
    explain_model = lrpfx.transform(model, box)
    assert [row.rule.partition("(")[0] for row in lrpfx.assignment(explain_model)][-1] == "ZBox"
    assert len([row for row in lrpfx.assignment(explain_model) if row.rule != "neutral"]) == 2
    assert_close(explain_model(x), model(x), 1e-13)
    plain = lrpfx.assignment(lrpfx.transform(model, lrpfx.composites.EpsilonGammaBox(0.0, 1.0)))
    assert len(plain) > 2


@pytest.mark.parametrize(
    "normalize",
    [
        lambda x: x - torch.tensor([0.4, 0.5, 0.6]),  # of the columns
        lambda x: x - torch.tensor([0.4, 0.5, 0.6])[:, None],  # of the rows
        lambda x: x - torch.arange(27.0, dtype=x.dtype).reshape(3, 3, 3),
        lambda x: torch.div(x, torch.tensor([0.4, 0.5, 0.6])[:, None, None], rounding_mode="floor"),
        lambda x: torch.tensor([0.4, 0.5, 0.6])[:, None, None] / (x + 0.1),
        lambda x: x[0] - torch.tensor([0.4, 0.5, 0.6])[None, :, None, None],
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_constants_that_are_not_one_value_for_each_channel(normalize, given):
    model, x = Function(normalize, nn.Conv2d(3, 4, 2)).eval(), torch.rand(2, 3, 3, 3)
    composite = EpsilonPlus(canonizers=[MergeInputNormalization()])
    explain_model = lrpfx.transform(model, composite, example_inputs=x if given else None, unassigned="gradient")
    assert_close(explain_model(x), model(x).detach(), 1e-13)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.Identity(), "it is an output of the model"),
        (lambda: nn.ReLU(), "layer (relu) reads it and does not commute with an affine map"),
        (lambda: nn.AvgPool2d(2), "layer (avg_pool2d) reads it and does not commute with an affine map"),
        (lambda: nn.Linear(3, 2), "a layer other than a convolution over 0 dimensions reads it"),
    ],
)
def test_normalization_that_no_convolution_reads(layer, reason):
    model = Function(lambda x: (x - 0.5) / 0.25, layer()).eval()
    composite = EpsilonPlus(canonizers=[MergeInputNormalization()])
    explain_model = lrpfx.transform(model, composite, example_inputs=torch.rand(2, 3, 4, 3))
    stage = {stage.name: stage for stage in lrpfx.history(explain_model)}["merge_input_normalization"]
    assert [text for _, text in stage.reasons] == [reason]


def test_layer_norm_into_dense_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.query, self.key = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

        def forward(self, x):
            x = self.norm(x)
            return self.query(x) + self.key(x)

    model, x, seed = Block().eval(), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    explain_model = lrpfx.transform(model, EpsilonPlus(canonizers=[MergeLayerNorm()]), example_inputs=x)
    assert_close(explain_model(x), model(x), 1e-13)
    accounts = lrpfx.ledger(explain_model, x, seed)
    assert abs(accounts.entry("norm").bias) <= 1e-12 < abs(accounts.entry("key").bias)
    assert abs(lrpfx.ledger(lrpfx.transform(model, EpsilonPlus()), x, seed).entry("norm").bias) > 1e-3
    assert accounts.unexplained <= 1e-12


KEEPS, MOVES = True, False
BETWEEN_NORM_AND_DENSE = {
    "transpose of others": (lambda x: x.transpose(0, 1), KEEPS),
    "transpose, named": (lambda x: x.transpose(dim0=0, dim1=1), None),
    "transpose of others from the end": (lambda x: x.transpose(-3, -2), KEEPS),
    "transpose of the last": (lambda x: x.transpose(1, 2), MOVES),
    "transpose of the last from the end": (lambda x: x.transpose(-1, -2), MOVES),
    "select": (lambda x: x.select(1, 2), KEEPS),
    "select of the first": (lambda x: x.select(0, 1), KEEPS),
    "select from the end": (lambda x: x.select(-2, 0), KEEPS),
    "select of the last": (lambda x: x.select(2, 0), MOVES),
    "select of the last from the end": (lambda x: x.select(-1, 3), MOVES),
    "slice": (lambda x: x[1:], KEEPS),
    "slice of the middle": (lambda x: torch.narrow(x, 1, 0, 2), None),
    "item": (lambda x: x[:, 0], KEEPS),
    "item of all dimensions": (lambda x: x[:, 0, 2:6].repeat(1, 2), MOVES),
    "slice of the last": (lambda x: x[:, :, 2:6], MOVES),
    "slice of the last from the end": (lambda x: torch.ops.aten.slice.Tensor(x, -1, 2, 6), MOVES),
    "slice of the last of four": (lambda x: x[:, None][..., 2:6], MOVES),
    "transpose of the last of four": (lambda x: x[:, None].transpose(2, 3), MOVES),
    "select of the last of four": (lambda x: x[:, None].select(3, 1), MOVES),
    "flip": (lambda x: x.flip(-1), MOVES),
    "roll": (lambda x: torch.roll(x, 1, -1), MOVES),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", BETWEEN_NORM_AND_DENSE)
@pytest.mark.sampled(4)
def test_what_may_stand_between_a_layer_norm_and_a_dense_layer(name, capture):
    between, merges = BETWEEN_NORM_AND_DENSE[name]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.dense = nn.LayerNorm(8), nn.Linear(between(torch.zeros(4, 8, 8)).shape[-1], 3)
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)
            self.eval()

        def forward(self, x):
            return self.dense(between(self.norm(x)))

    model, x = Block(), torch.randn(4, 8, 8)
    composite = EpsilonPlus(canonizers=[MergeLayerNorm()])
    explain_model = lrpfx.transform(model, composite, example_inputs=x, capture=capture)
    assert_close(explain_model(x), model(x).detach(), 1e-12)
    (stage,) = [stage for stage in lrpfx.history(explain_model) if stage.name == "merge_layer_norm"]
    if merges is not None:
        assert stage.matches == merges and len(stage.reasons) == 1 - merges


@pytest.mark.parametrize("groups", [1, 3])
def test_input_normalization_before_convolutions_in_groups(groups):
    convolution = nn.Conv2d(3, 6, 3, padding=1, groups=groups)
    model = Function(lambda x: (x - 0.5) / torch.tensor([0.2, 0.3, 0.4])[:, None, None], convolution).eval()
    x, composite = torch.rand(2, 3, 6, 6), EpsilonPlus(canonizers=[MergeInputNormalization()])
    for given in ({"example_inputs": x}, {}):
        explain_model = lrpfx.transform(model, composite, **given)
        assert_close(explain_model(x), model(x).detach(), 1e-13)
        assert len([row for row in lrpfx.assignment(explain_model) if row.rule not in ("neutral", "input")]) == 1


def test_differences_of_inputs_are_no_normalization():
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.eval()

        def forward(self, first, second):
            return self.conv((first - second) / 0.5)

    model, inputs = Difference(), (torch.rand(2, 3, 5, 5), torch.rand(2, 3, 5, 5))
    explain_model = lrpfx.transform(model, EpsilonPlus(canonizers=[MergeInputNormalization()]))
    assert_close(explain_model(*inputs), model(*inputs).detach(), 1e-13)
    kinds = [row.kind for row in lrpfx.assignment(explain_model)]
    assert "Difference" in kinds or "Sum" in kinds
    first, second = lrpfx.attribute(explain_model, inputs, torch.ones_like(model(*inputs))).relevance
    assert first.any() and second.any()


@pytest.mark.parametrize("canonizer", [MergeLayerNorm(), MergeInputNormalization()])
def test_options_of_the_compiler_are_refused_in_module_mode(canonizer):
    with pytest.raises(lrpfx.InputError, match=r"lrpfx\.transform"):
        EpsilonPlus(canonizers=[canonizer]).register(nn.Linear(2, 2))


class ReadsSizes(nn.Module):
    """Batch norms on both sides of convolutions, of whose values forward reads the sizes."""

    def __init__(self):
        super().__init__()
        self.before, self.first = nn.BatchNorm2d(2), nn.Conv2d(2, 3, 2)
        self.after, self.head = nn.BatchNorm2d(3), nn.Linear(12, 2)

    def forward(self, x):
        y = self.before(x)
        z = self.first(y)
        height, batch = y.shape[2], z.size(0)
        return self.head(self.after(z).relu().reshape(batch, 3 * (height - 1) ** 2))


def test_readers_of_sizes_are_in_nobodys_way():
    torch.manual_seed(0)
    model = randomize_batch_norm(ReadsSizes().eval())
    x = torch.randn(2, 2, 3, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    matches = {stage.name: stage.matches for stage in explain_model.compiled.history}
    assert matches["merge_batch_norm"] == matches["merge_batch_norm_right"] == 1
    assert_close(explain_model(x), model(x), 1e-12)
