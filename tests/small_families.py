"""torchvision's families of classifiers with few and narrow layers: each kind of block, and how blocks are joined."""

import torch
from helpers import narrow, randomize_batch_norm, torchvision_model
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock, Bottleneck


def inverted(before, inner, after, kernel, squeeze, activation, stride):
    """Settings of a block of MobileNetV3."""
    return InvertedResidualConfig(before, kernel, inner, after, squeeze, activation, stride, 1, 1.0)


def regnet(squeeze):
    return models.RegNet(BlockParams([1, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], squeeze), 10)


#: name -> (a function that makes the network, the size of its images)
FAMILIES = {
    "alexnet": (lambda: torchvision_model("alexnet"), 64),
    "vgg": (lambda: torchvision_model("vgg11_bn"), 32),
    "resnet": (lambda: narrow(lambda: models.ResNet(BasicBlock, [1, 2, 1, 1], 10)), 32),
    "resnext": (lambda: models.ResNet(Bottleneck, [1, 2, 1, 1], 10, groups=8, width_per_group=2), 32),
    "densenet": (lambda: models.DenseNet(4, (2, 3), 8, num_classes=10), 32),
    "googlenet": (lambda: narrow(lambda: models.GoogLeNet(10, aux_logits=False, transform_input=True, init_weights=False)), 32),
    "squeezenet": (lambda: models.SqueezeNet("1_1", 10), 32),
    "mobilenet_v2": (lambda: models.MobileNetV2(10, 0.5, [[1, 16, 1, 1], [6, 24, 2, 2]]), 32),
    "mobilenet_v3": (
        lambda: models.MobileNetV3(
            [
                inverted(16, 16, 16, 3, True, "RE", 2),
                inverted(16, 24, 24, 3, False, "RE", 1),
                inverted(24, 48, 24, 5, True, "HS", 1),
            ],
            64,
            10,
        ),
        32,
    ),
    "shufflenet": (lambda: models.ShuffleNetV2([1, 2, 1], [8, 16, 32, 32, 64], 10), 32),
    "efficientnet": (
        lambda: models.EfficientNet(
            [FusedMBConvConfig(1, 3, 1, 8, 8, 1), FusedMBConvConfig(4, 3, 2, 8, 16, 1), MBConvConfig(4, 5, 1, 16, 16, 2)],
            0.2,
            num_classes=10,
            last_channel=32,
        ),
        32,
    ),
    "regnet_x": (lambda: regnet(None), 32),
    "regnet_y": (lambda: regnet(0.25), 32),
    "convnext": (lambda: models.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], num_classes=10), 32),
    "vit": (lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=10), 32),
    "swin": (lambda: models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10), 32),
    "maxvit": (lambda: models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.1, num_classes=10), 64),
}  # fmt: skip


def small_family(name):
    """A network with random weights and statistics, and two images."""
    make, size = FAMILIES[name]
    torch.manual_seed(0)
    model = randomize_batch_norm(make()).eval().double()
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():  # the head of a vision transformer starts at zero
            nn.init.normal_(module.weight, std=0.05)
    return model, torch.randn(2, 3, size, size, dtype=torch.float64).clamp(-3, 3)
