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
    assert stage.details == (("norm", "merged into first, second behind the thresholded relu"),)
    kept = lrpfx.transform(Shared(True), EpsilonPlus(), example_inputs=x)
    stage = {stage.name: stage for stage in lrpfx.history(kept)}["merge_batch_norm_right"]
    assert stage.matches == 0 and "add_1 (add) reads it, which an affine map does not pass through" in stage.reasons[0][1]
    assert lrpfx.assignment(kept).rule_of("norm") == "Pass()"
    assert lrpfx.ledger(kept, x, torch.randn(2, 4, 6, 6)).unexplained <= 1e-12


def test_wrong_merges_are_caught_without_example_inputs(monkeypatch):
    """The driver holds canonization against random inputs."""
    from lrpfx.passes import merge_right

    model = Net(nn.Conv2d(4, 3, 3, padding=1))
    lrpfx.transform(model, EpsilonPlus())
    monkeypatch.setattr(merge_right, "batch_norm_shift", lambda mean, scale, bias: -mean)
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
        lambda self, x: x.sub(0.5).div(0.25),
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


@pytest.mark.parametrize("canonizer", [MergeLayerNorm(), MergeInputNormalization()])
def test_options_of_the_compiler_are_refused_in_module_mode(canonizer):
    with pytest.raises(lrpfx.InputError, match=r"lrpfx\.transform"):
        EpsilonPlus(canonizers=[canonizer]).register(nn.Linear(2, 2))
