"""Segmentation networks as they come: a classifier as encoder, and decoders that bring maps to the sizes of its features."""

import pytest
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch
from helpers import assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus

timm = pytest.importorskip("timm")


def convolution(inputs, outputs):
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def by_size(x, skip):
    return F.interpolate(x, size=(skip.shape[2], skip.shape[3]), mode="nearest")


def by_factor(x, skip):
    factors = (skip.shape[2] / x.shape[2], skip.shape[3] / x.shape[3])
    return F.interpolate(x, scale_factor=factors, mode="bilinear", align_corners=False)


def by_padding(x, skip):
    x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)[:, :, 1:, 1:]
    dy, dx = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
    return F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])


class Block(nn.Module):
    """One step of the decoder: the size of the skip connection, both joined, and two convolutions."""

    def __init__(self, inputs, skip, outputs, resize):
        super().__init__()
        self.resize = resize
        self.first, self.second = convolution(inputs + skip, outputs), convolution(outputs, outputs)

    def forward(self, x, skip=None):
        x = F.interpolate(x, scale_factor=2.0) if skip is None else torch.cat([self.resize(x, skip), skip], dim=1)
        return self.second(self.first(x))


class UNet(nn.Module):
    def __init__(self, resize):
        super().__init__()
        self.encoder = timm.create_model("test_resnet", features_only=True, out_indices=(0, 1, 2), pretrained=False)
        inputs, *skips = self.encoder.feature_info.channels()[::-1]
        widths = (12, 8, 4)
        blocks = zip((inputs, *widths), (*skips, 0), widths, strict=False)
        self.blocks = nn.ModuleList(Block(*sizes, resize) for sizes in blocks)
        self.head = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x):
        *skips, x = self.encoder(x)
        for block, skip in zip(self.blocks, [*skips[::-1], None], strict=True):
            x = block(x, skip)
        return self.head(x)


def made(resize):
    model = UNet(resize).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


#: How a decoder finds a size, and a second size of the input; torch.export keeps the ratio of two sizes as a number.
SIZES = {by_size: (50, 36), by_factor: (48, 40), by_padding: (50, 36)}
COMPOSITES = {"EpsilonPlus": EpsilonPlus(), "AttnLRP": AttnLRP()}
CASES = [(resize, name) for resize in SIZES for name in COMPOSITES]


def maps_of_two_sizes(resize, name, capture, **settings):
    """The maps, for which one transform serves."""
    model, example = made(resize), torch.randn(1, 3, 32, 32)
    explain_model = lrpfx.transform(model, COMPOSITES[name], example_inputs=example, capture=capture, **settings)
    maps = []
    for x in (example, torch.randn(2, 3, *SIZES[resize])):
        target = torch.zeros(len(x), 3, *x.shape[2:])
        target[:, 1, 10:30, 20:30] = 1.0
        found = lrpfx.attribute(explain_model, x, target)
        assert_close(found.output, model(x), 1e-12)
        assert lrpfx.ledger(explain_model, x, target).unexplained <= 1e-12
        maps.append(found.relevance)
    return maps


@pytest.mark.parametrize("resize, name", CASES)
@pytest.mark.sampled(3)
def test_one_transform_serves_two_sizes(resize, name):
    assert all(one.any() for one in maps_of_two_sizes(resize, name, "symbolic"))


@pytest.mark.slow
@pytest.mark.parametrize("resize, name", CASES)
def test_one_export_serves_two_sizes(resize, name):
    torch.manual_seed(0)
    traced = maps_of_two_sizes(resize, name, "symbolic")
    torch.manual_seed(0)
    exported = maps_of_two_sizes(resize, name, "export", dynamic_shapes={"x": {2: True, 3: True}})
    for actual, expected in zip(exported, traced, strict=True):
        assert_close(actual, expected, 1e-12)
