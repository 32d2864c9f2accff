"""Segmentation networks as they come: a classifier as encoder, and decoders that bring maps to the sizes of its features."""

from functools import partial

import numpy as np
import pytest
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch
from helpers import assert_close
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.models import segmentation

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus

timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")


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


def segmenters():
    """Networks as they come, with random weights: what makes each, and how much smaller the output is."""

    def of_torchvision(name):
        return getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=3)

    def segformer():
        sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
        config = transformers.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=3, sr_ratios=[4, 2, 1, 1])
        return transformers.SegformerForSemanticSegmentation(config)

    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield pytest.param(partial(of_torchvision, name), 1, id=name, marks=pytest.mark.thorough)
    yield pytest.param(segformer, 4, id="segformer")


@pytest.mark.parametrize(("make", "share"), list(segmenters()))
def test_a_class_in_a_mask_of_the_photograph(make, share):
    """The whole photograph is squeezed to the model's input, and the mask with it."""
    model = make().float().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)

    def preprocess(image):
        return torch.from_numpy(np.asarray(image.resize((64, 64))).copy()).permute(2, 0, 1).float() / 255

    pixels = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    mask = np.zeros((96, 128), dtype=bool)
    mask[:48, 32:] = True
    explainer = lrpfx.Explainer(model, preprocess=preprocess, categories=["ground", "cat", "dog"])
    found = explainer(Image.fromarray(pixels), lrpfx.Region("dog", mask, positive=False))
    size = 64 // share
    region = torch.zeros(size, size, dtype=torch.bool)
    region[: size // 2, size // 4 :] = True
    assert torch.equal(torch.from_numpy(found.answers[0].region), region)
    direct = lrpfx.attribute(explainer.explain_model, found.input[None], lrpfx.Region(2, region, positive=False))
    assert_close(torch.from_numpy(found.input_relevance), direct.relevance[0], 1e-6)
    assert found.relevance.shape == (96, 128) and found.target.area == pytest.approx(3 / 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*functions of their own")  # its attention is written as products
def test_queries_of_mask2former():
    """Its output has a map for each query, and no classes at places."""
    backbone = transformers.SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    sizes = {
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 32,
        "dim_feedforward": 32,
    }
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        **sizes,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=4,
        num_labels=3,
    )
    model = transformers.Mask2FormerForUniversalSegmentation(config).float().eval()
    explainer = lrpfx.Explainer(model, output="masks_queries_logits")
    x = torch.rand(3, 64, 64, dtype=torch.float32)
    found = explainer(x, lrpfx.Region(1, mask=None))
    logits = model(x[None]).masks_queries_logits.detach()
    assert found.target.score == pytest.approx(float(logits[0, 1].clamp(min=0).sum()), rel=1e-4)
    assert found.relevance.shape == (64, 64) and abs(found.ledger.unexplained) < 1e-3 * found.ledger.seed
