"""Canonizers: reversible in module mode, left out or applied to a copy in graph mode."""

import copy
import warnings

import pytest
import torch
import zennit.composites
import zennit.torchvision
from helpers import (
    Layered,
    assert_close,
    assert_untouched,
    randomize_batch_norm,
    relative_difference,
    small_net,
    snapshot,
    torchvision_model,
)
from reference.for_zennit import for_zennit
from torch import nn
from torch.nn.utils import prune
from torchvision.models import densenet121

import lrpfx
from lrpfx import rules
from lrpfx.canonizers import (
    AttributeCanonizer,
    Canonizer,
    CompositeCanonizer,
    MergeBatchNorm,
    NamedMergeBatchNorm,
    SequentialMergeBatchNorm,
)
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat, LayerMapComposite
from lrpfx.core import RemovableHandleList
from lrpfx.errors import InputError
from lrpfx.torchvision import ResNetCanonizer, VGGCanonizer
from lrpfx.types import BatchNorm, Sum


def pair(layer, norm):
    return randomize_batch_norm(nn.Sequential(layer, norm)).eval()


PAIRS = {
    "linear": lambda: (pair(nn.Linear(3, 4), nn.BatchNorm1d(4)), (3,)),
    "no-bias": lambda: (pair(nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4)), (3, 4, 4)),
    "no-affine": lambda: (pair(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, affine=False)), (3, 4, 4)),
    "transposed": lambda: (pair(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (4, 4, 4)),
    "padding-mode": lambda: (
        pair(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4, eps=0.5)),
        (3, 4, 4),
    ),
    "conv3d": lambda: (pair(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), (2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_merging_moves_the_batch_norm_into_the_layer(name):
    model, shape = PAIRS[name]()
    x = torch.randn(3, *shape)
    expected, before = model(x), snapshot(model)
    canonizer = MergeBatchNorm()
    canonizer.register((model[0],), model[1])
    assert_close(model[0](x), expected, 1e-12)
    assert_close(model(x), expected, 1e-12)
    assert torch.equal(model[1](model[0](x)), model[0](x)) and model[1].eps == 0.0
    assert list(model.state_dict()) == list(before[3])
    canonizer.remove()
    assert_untouched(model, before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rule", [rules.Epsilon(), rules.ZPlus(), rules.Gamma()])
def test_rules_see_the_merged_parameters(name, rule):
    model, shape = PAIRS[name]()
    x, composite = torch.randn(3, *shape), LayerMapComposite([(lrpfx.types.Linear, rule), (BatchNorm, rules.Pass())])
    composite.canonizers.append(SequentialMergeBatchNorm())
    before = snapshot(model)
    graph = lrpfx.transform(model, LayerMapComposite([(lrpfx.types.Linear, rule)]))
    expected = lrpfx.attribute(graph, x, lambda output: output).relevance
    with composite.context(model):
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        (relevance,) = torch.autograd.grad(output, leaf, output.detach())
    assert_close(relevance, expected, 1e-11)
    assert_untouched(model, before)


def test_gradients_reach_the_original_parameters():
    model, shape = PAIRS["no-bias"]()
    canonizer = MergeBatchNorm()
    canonizer.register((model[0],), model[1])
    x = torch.randn(3, *shape)
    model(x).square().sum().backward()
    actual = [parameter.grad for parameter in model.parameters()]
    canonizer.remove()
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    for gradient, parameter in zip(actual, model.parameters(), strict=True):
        assert_close(gradient, parameter.grad, 1e-10)


def test_a_batch_norm_that_trains_is_not_merged():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"training mode .* call model\.eval\(\)"):
        EpsilonPlus(canonizers=[SequentialMergeBatchNorm()]).register(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and model[1].eps == 1e-5


def test_pairs_are_found_by_use():
    """D18: on DenseNet the order of registration pairs layers that have nothing to do with each other."""
    model = densenet121().eval()
    before = snapshot(model)
    instances = RemovableHandleList(SequentialMergeBatchNorm().apply(model))
    assert len(instances) == 59
    x = torch.randn(1, 3, 64, 64)
    merged = model(x)
    instances.remove()
    assert_untouched(model, before)
    assert_close(merged, model(x), 1e-9)


def test_untraceable_models_merge_neighbours():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.other, self.no_statistics = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)
            self.wider, self.mismatch = nn.Conv2d(4, 5, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)) if x.sum() > 0 else self.norm(self.conv(-x))

    model, x = randomize_batch_norm(Branching()).eval(), torch.rand(2, 3, 2, 2)
    expected = model(x)
    (instance,) = SequentialMergeBatchNorm().apply(model)
    assert_close(model.conv(x), expected, 1e-12)
    instance.remove()
    assert torch.equal(model(x), expected)


def test_named_merges():
    model = small_net()
    x = torch.randn(2, 3, 8, 8)
    expected, before = model(x), snapshot(model)
    canonizer = NamedMergeBatchNorm([(["conv1"], "bn1"), (["conv2"], "bn2")])
    instances = RemovableHandleList(canonizer.copy().apply(model))
    assert len(instances) == 2 and model.bn1.eps == 0.0 and model.bn2.eps == 0.0
    assert_close(model(x), expected, 1e-12)
    instances.remove()
    assert_untouched(model, before)
    with pytest.raises(lrpfx.InputError, match="no module named 'bn9'"):
        NamedMergeBatchNorm([(["conv1"], "bn9")]).apply(model)
    with pytest.raises(lrpfx.InputError, match="no running statistics"):
        MergeBatchNorm().register((nn.Linear(2, 2),), nn.BatchNorm1d(2, track_running_stats=False))


@pytest.mark.parametrize("key", ["epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "excitation_backprop"])
@pytest.mark.parametrize("name, canonizer", [("resnet18", ResNetCanonizer), ("vgg11_bn", VGGCanonizer)])
@pytest.mark.sampled(3)
def test_torchvisions_networks_equal_zennit_and_graph_mode(name, canonizer, key):
    model, x = torchvision_model(name), torch.randn(1, 3, 32, 32)
    before = snapshot(model) if name == "resnet18" else None
    composite = lrpfx.composites.COMPOSITES[key](canonizers=[canonizer()])
    with composite.context(model):
        leaf = x.clone().requires_grad_()
        (relevance,) = torch.autograd.grad(model(leaf), leaf, torch.eye(1000)[[3]])
    if before is not None:
        assert_untouched(model, before)
    graph = lrpfx.attribute(lrpfx.transform(model, composite), x, torch.eye(1000)[[3]]).relevance
    assert relative_difference(relevance, graph) <= 1e-11
    oracle = for_zennit(model)
    theirs = zennit.torchvision.ResNetCanonizer if name == "resnet18" else zennit.torchvision.VGGCanonizer
    with zennit.composites.COMPOSITES[key](canonizers=[theirs()]).context(oracle):
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(oracle(leaf), leaf, torch.eye(1000)[[3]])
    assert relative_difference(relevance, expected) <= 1e-8


class SoftplusInsteadOfReLU(Canonizer):
    """A user's canonizer: replaces children for as long as it is applied."""

    def apply(self, root_module):
        instances = []
        for module in list(root_module.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.ReLU):
                    instance = self.copy()
                    instance.register(module, name)
                    instances.append(instance)
        return instances

    def register(self, parent, name):
        self.parent, self.name, self.child = parent, name, getattr(parent, name)
        setattr(parent, name, nn.Softplus(beta=5.0))

    def remove(self):
        setattr(self.parent, self.name, self.child)


def test_users_canonizers_in_both_modes():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x, before = torch.randn(2, 3), snapshot(model)
    composite = EpsilonPlusFlat(canonizers=[SoftplusInsteadOfReLU(), SequentialMergeBatchNorm()])
    explain_model = lrpfx.transform(model, composite)
    assert_untouched(model, before)
    assert "Softplus" in str(explain_model) and "ReLU" not in str(explain_model)
    with composite.context(model) as modified:
        leaf = x.clone().requires_grad_()
        output = modified(leaf)
        (relevance,) = torch.autograd.grad(output, leaf, output.detach())
    assert_untouched(model, before)
    attribution = lrpfx.attribute(explain_model, x, lambda output: output)
    assert_close(attribution.output, output, 1e-13)
    assert_close(attribution.relevance, relevance, 1e-12)


def test_superfluous_canonizers_change_nothing_in_graphs():
    model = torchvision_model("resnet18")
    with_canonizer = lrpfx.transform(model, EpsilonPlus(canonizers=[ResNetCanonizer()]))
    assert str(lrpfx.assignment(with_canonizer)) == str(lrpfx.assignment(lrpfx.transform(model, EpsilonPlus())))


def test_attributes_come_back():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
            self.inner = nn.Identity()

        def forward(self, x):
            return self.inner(x) * self.scale

    def attribute_map(name, module):
        if not isinstance(module, Block):
            return None
        return {"scale": 3.0, "inner": nn.ReLU(), "added": Sum, "sum": lrpfx.layer.Sum()}

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 3)
    before = snapshot(model)
    canonizer = AttributeCanonizer(attribute_map)
    instances = RemovableHandleList(canonizer.apply(model))
    assert len(instances) == 2 and torch.equal(model(x), 3.0 * (3.0 * x.relu())) and isinstance(model[0].sum, Sum)
    instances.remove()
    assert_untouched(model, before)
    assert torch.equal(model(x), 4.0 * x)
    assert canonizer.copy().attribute_map is attribute_map


def test_undone_in_reverse_order_also_after_an_exception():
    """D15: two canonizers on one attribute."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].mark = 0

    def marks(value):
        return AttributeCanonizer(lambda name, module: {"mark": value} if name == "0" else None)

    composite = EpsilonPlus(canonizers=[CompositeCanonizer([marks(1), marks(2)]), marks(3)])
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), composite.context(model):
        assert model[0].mark == 3
        raise ZeroDivisionError
    assert model[0].mark == 0
    assert_untouched(model, before)

    class Fails(Canonizer):
        def apply(self, root_module):
            raise ZeroDivisionError

        def register(self):
            pass

        def remove(self):
            pass

    for failing in ([marks(1), Fails()], [CompositeCanonizer([marks(1), Fails()])]):
        with pytest.raises(ZeroDivisionError):
            EpsilonPlus(canonizers=failing).register(model)
        assert model[0].mark == 0
    assert len(CompositeCanonizer([marks(1)]).copy().canonizers) == 1


def test_first_layer_in_module_mode_is_first_in_execution():
    """D10."""

    class Backwards(Layered):
        def forward(self, x):
            return self.head(self.body(x).relu())

    model, x = Backwards(head=nn.Linear(4, 2), body=nn.Linear(3, 4)), torch.randn(2, 3)
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlusFlat()), x, torch.ones(2, 2)).relevance
    with EpsilonPlusFlat().context(model):
        leaf = x.clone().requires_grad_()
        (relevance,) = torch.autograd.grad(model(leaf), leaf, torch.ones(2, 2))
    active = (model.body(x) > 0).sum(1, keepdim=True)
    assert active.any()
    assert_close(relevance, expected, 1e-9)


def test_frozen_batch_norm_is_a_batch_norm():
    from torchvision.ops import FrozenBatchNorm2d

    norm = FrozenBatchNorm2d(3)
    assert isinstance(norm, BatchNorm) and issubclass(FrozenBatchNorm2d, BatchNorm) and not isinstance(norm, Sum)
    explain_model = lrpfx.transform(nn.Sequential(nn.Conv2d(3, 3, 1), norm).eval(), EpsilonPlus())
    assert lrpfx.assignment(explain_model).rule_of("1") == "Pass()"


def test_merging_for_good():
    model, shape = PAIRS["linear"]()
    x = torch.randn(3, *shape)
    expected = model(x)
    MergeBatchNorm.merge_batch_norm((model[0],), model[1])
    assert_close(model[0](x), expected, 1e-12)


def weight_normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Conv2d(2, 3, 3))


def pruned():
    layer = nn.Conv2d(2, 3, 3)
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(2, 3, 3), weight_normed, pruned])
@pytest.mark.parametrize("canonizer", [SequentialMergeBatchNorm(), NamedMergeBatchNorm([(["0"], "1")])])
def test_merged_weights_follow_their_parameters(make, canonizer):
    """After load_state_dict, steps of an optimizer and changes through `.data`; and a second backward pass has its graph."""
    model, other, plain = (randomize_batch_norm(nn.Sequential(make(), nn.BatchNorm2d(3)).eval()) for _ in range(3))
    x = torch.randn(2, 2, 5, 5)
    plain.load_state_dict(model.state_dict())
    before = snapshot(model)
    with EpsilonPlus(canonizers=[canonizer]).context(model):
        assert_close(model[0](x), plain(x), 1e-12)
        for _ in range(2):
            model(x).sum().backward()
        for change in (
            lambda one: one.load_state_dict(other.state_dict()),
            lambda one: one.load_state_dict({key: 2.0 * value for key, value in plain.state_dict().items()}, assign=True),
            lambda one: torch.optim.SGD(one.parameters(), 0.1).step(),
            lambda one: one.get_submodule("1")._buffers["running_mean"].data.mul_(3.0),
            lambda one: one.double(),
        ):
            for one in (model, plain):
                one.zero_grad(set_to_none=True)
                one(x).square().sum().backward()
                change(one)
            assert_close(model[0](x), plain(x), 1e-12)
            assert_close(model(x), plain(x), 1e-12)
    assert_close(model(x), plain(x), 1e-12)
    assert list(model[0].state_dict()) == list(plain[0].state_dict()) and snapshot(model)[1] == before[1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_canonizers_are_removed_in_any_order(order):
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).eval(), torch.randn(2, 2, 5, 5)
    randomize_batch_norm(model)
    before, expected = snapshot(model), model(x)

    def marking(mark):
        def attributes(name, module):
            return {"mark": mark, "child": nn.Identity()} if name == "2" else None

        return CompositeCanonizer([SequentialMergeBatchNorm(), AttributeCanonizer(attributes)])

    applied = [RemovableHandleList(marking(mark).apply(model)) for mark in "ab"]
    assert model[2].mark == "b"
    for number, place in enumerate(order):
        assert_close(model[0](x).relu(), expected, 1e-12)
        applied[place].remove()
        assert_close(model(x), expected, 1e-12)
        assert number or model[2].mark == "ba"[place]
    assert torch.equal(model(x), expected)
    assert_untouched(model, before)


def test_merged_models_can_be_compiled():
    model, x = randomize_batch_norm(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval()), torch.randn(2, 2, 5, 5)
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), x, lambda output: output).relevance
    with EpsilonPlus(canonizers=[SequentialMergeBatchNorm()]).context(model):
        found = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), x, lambda output: output).relevance
    assert_close(found, expected, 1e-9)


def test_what_cannot_be_merged_leaves_nothing_merged():
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), computed, nn.BatchNorm1d(3)).eval()
    before = snapshot(model)
    for act in (SequentialMergeBatchNorm().apply, EpsilonPlus(canonizers=[SequentialMergeBatchNorm()]).register):
        with pytest.raises(InputError, match="parametrization"):
            act(model)
        assert_untouched(model, before)
