"""Models and measures that several test files use."""

import copy
import functools
import shutil
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._pytree import tree_leaves

import lrpfx
from lrpfx.composites import EpsilonPlus

#: The repository.
ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")


def relative_difference(actual, expected):
    """Relative L2 difference."""
    return float((actual - expected).norm() / expected.norm())


def in_module_mode(composite, model, x, seed):
    """The relevance of an input, with the rules of a composite on the modules of a model."""
    with composite.context(model):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(model(leaf), leaf, seed)[0]


def assert_close(actual, expected, tolerance=1e-9):
    """Largest difference, relative to the largest entry of what is expected."""
    assert actual.shape == expected.shape
    assert torch.isfinite(expected).all()
    scale = expected.abs().max()
    assert scale > 0, "nothing to compare: everything that is expected is zero"
    difference = (actual - expected).abs().max() / scale
    assert difference <= tolerance, f"the largest difference is {difference:.1e}, allowed is {tolerance:.0e}"


def assert_agrees(run, explain_model, inputs, *target, tolerance=1e-9):
    """A program's module or its runner gives the output and the relevance of `lrpfx.attribute`."""
    found, expected = run(inputs, *target), lrpfx.attribute(explain_model, inputs, *target)
    assert_close(found["output"].double(), expected.output.double(), tolerance)
    assert_close(found["relevance"].double(), expected.relevance.double(), tolerance)


def box_around(matters):
    """The slices of the smallest box around the entries where a boolean tensor is true; empty ones if there are none."""
    box = []
    for dim in range(matters.ndim):
        others = [other for other in range(matters.ndim) if other != dim]
        places = (matters.any(others) if others else matters).nonzero().flatten().tolist()
        box.append(slice(places[0], places[-1] + 1) if places else slice(0, 0))
    return tuple(box)


def same_in_a_graph(function, *tensors):
    """The function's result, which a graph traced without values must give, too."""
    expected = function(*tensors)
    traced = make_fx(function, tracing_mode="symbolic")(*tensors)
    torch.testing.assert_close(traced(*tensors), expected, rtol=1e-12, atol=1e-12)
    return expected, traced


def randomize_batch_norm(model):
    """Batch norms whose statistics and affine parameters matter, negative scales included."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, -1.0, 1.5)
                nn.init.normal_(module.bias)
    return model


def merged_with_torch(model):
    """A copy of a sequential-order network with its batch norms merged by torch's own fusion."""
    model = copy.deepcopy(model)

    def visit(module):
        previous = None
        for name, child in list(module.named_children()):
            visit(child)
            if isinstance(child, nn.BatchNorm2d) and previous is not None:
                setattr(module, previous[0], fuse_conv_bn_eval(previous[1], child))
                setattr(module, name, nn.Identity())
                previous = None
            elif isinstance(child, nn.Conv2d):
                previous = (name, child)

    visit(model)
    return model


def torchvision_model(name):
    """An untrained torchvision network in evaluation mode, in the default dtype, as it is the first time: some are narrow."""
    model = copy.deepcopy(_torchvision_model(name, torch.get_default_dtype()))
    torch.manual_seed(0)  # what is drawn next is the same whether the network was made before
    return model


@functools.cache
def _torchvision_model(name, dtype):
    """A network to copy."""
    torch.manual_seed(0)
    make = getattr(torchvision.models, name)
    return randomize_batch_norm(narrow(make) if name.startswith(("alex", "vgg", "resnet")) else make()).eval()


def narrow(make):
    """VGG, ResNet or GoogLeNet with a quarter of the channels, or AlexNet with half, and 32 dense features for 4,096.

    The structure stays. The wide layers are never made; what stands in their place is drawn as torch does, and convolutions as
    torchvision does.
    """

    def fewer(count):
        if count == 4096:
            return 32
        return count if count in (3, 10, 1000) else count // (2 if isinstance(model, torchvision.models.AlexNet) else 4)

    with torch.device("meta"):
        model = make()
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                window = layer.kernel_size, layer.stride, layer.padding
                layer.__init__(fewer(layer.in_channels), fewer(layer.out_channels), *window, bias=layer.bias is not None)
            elif isinstance(layer, nn.BatchNorm2d):
                layer.__init__(fewer(layer.num_features), layer.eps)
            elif isinstance(layer, nn.Linear):
                layer.__init__(fewer(layer.in_features), fewer(layer.out_features))
    model.to_empty(device="cpu")
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
        if isinstance(layer, nn.Conv2d) and isinstance(model, (torchvision.models.VGG, torchvision.models.ResNet)):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def snapshot(model):
    """All that module mode could leave behind."""
    modules = dict(model.named_modules())
    return (
        {name: id(parameter) for name, parameter in model.named_parameters()},
        {name: (type(module), sorted(vars(module))) for name, module in modules.items()},
        {name: [len(vars(module)[key]) for key in vars(module) if key.endswith("_hooks")] for name, module in modules.items()},
        {name: value.clone() for name, value in model.state_dict().items()},
    )


def assert_untouched(model, before):
    after = snapshot(model)
    assert after[:3] == before[:3] and list(after[3]) == list(before[3])
    assert all(torch.equal(after[3][name], value) for name, value in before[3].items())


def both_front_ends(model, x, composite=None):
    """The relevance from both front ends, which must agree with each other, and their graphs with the model."""
    expected = model(x)
    results = []
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(model, composite or EpsilonPlus(), example_inputs=x, capture=capture)
        result = lrpfx.attribute(explain_model, x, torch.cos)
        assert_close(result.output, expected.detach(), 1e-12)
        accounts = lrpfx.ledger(explain_model, x, torch.cos)
        assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
        results.append(result.relevance)
    assert_close(*results, 1e-11)
    return explain_model


class Unary(nn.Module):
    """A function of one tensor as a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x):
        return self.function(x)


class Binary(Unary):
    """A function of two tensors as a network."""

    def forward(self, a, b):
        return self.function(a, b)


class Layered(nn.Module):
    """The base of networks that get their layers by name, in evaluation mode."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.eval()


class ResidualNet(nn.Module):
    """Small network with most of what the compiler must handle: merged and unmerged batch norm, a residual sum written as
    `+=`, an in-place ReLU that is called twice, concatenation, pooling of both kinds, dropout and a functional flatten."""

    def __init__(self, classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.branch = nn.Conv2d(6, 4, 1)
        self.pool = nn.MaxPool2d(2)
        self.average = nn.AvgPool2d(2)
        self.norm = nn.BatchNorm2d(10)
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(10 * 4, classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += x
        y = self.relu(y)
        y = torch.cat([y, self.branch(y)], dim=1)
        y = self.pool(self.norm(self.average(y)))
        return self.fc(self.dropout(torch.flatten(y, 1)))


def small_net():
    """A `ResidualNet` for inputs of shape (batch, 3, 8, 8), in evaluation mode."""
    torch.manual_seed(0)
    return randomize_batch_norm(ResidualNet()).eval()


class SmallEncoder(nn.Module):
    """One layer of a transformer for tokens of shape (batch, length), indices below 7."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.classes = nn.Linear(8, 3)

    def forward(self, ids):
        return self.classes(self.layer(self.embedding(ids)).mean(1))


def small_encoder():
    """A `SmallEncoder` in evaluation mode."""
    torch.manual_seed(0)
    return SmallEncoder().eval()


#: name -> (model, input): networks that every invariant is tested on.
NETWORKS = {
    "small": lambda: (small_net(), torch.randn(2, 3, 8, 8)),
    "resnet18": lambda: (torchvision_model("resnet18"), torch.randn(2, 3, 32, 32)),
    "vgg11": lambda: (torchvision_model("vgg11"), torch.randn(2, 3, 32, 32)),
    "vgg11_bn": lambda: (torchvision_model("vgg11_bn"), torch.randn(2, 3, 40, 40)),
    "alexnet": lambda: (torchvision_model("alexnet"), torch.randn(2, 3, 64, 64)),
}


def blocks(explain_model):
    """The names of the blocks that are computed again."""
    record = lrpfx.history(explain_model)[-1]
    assert record.name == "checkpoint_blocks"
    return [name for name, _ in record.details]


def assert_same(found, expected):
    """Two attributions are equal to the bit."""
    for one, other in zip(*map(tree_leaves, (found.relevance, expected.relevance)), strict=True):
        assert one is other is None or torch.equal(one, other)
    assert found.layers.keys() == expected.layers.keys()
    for name, value in found.layers.items():
        assert torch.equal(value, expected.layers[name])
