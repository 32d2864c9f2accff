"""Canonizers for torchvision's networks. Graph mode needs none of them."""

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from lrpfx.canonizers import AttributeCanonizer, CompositeCanonizer, SequentialMergeBatchNorm
from lrpfx.layer import Sum

__all__ = [
    "ResNetBasicBlockCanonizer",
    "ResNetBottleneckCanonizer",
    "ResNetCanonizer",
    "VGGCanonizer",
]


class VGGCanonizer(SequentialMergeBatchNorm):
    """For VGG: merges batch norm."""


def _residual_sum(self: Any, x: torch.Tensor, branch: torch.Tensor) -> Any:
    skip = x if self.downsample is None else self.downsample(x)
    return self.relu(self.canonizer_sum(torch.stack([skip, branch], dim=-1)))


def _forward_basic_block(self: Any, x: torch.Tensor) -> Any:
    branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    return _residual_sum(self, x, branch)


def _forward_bottleneck(self: Any, x: torch.Tensor) -> Any:
    branch = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
    return _residual_sum(self, x, self.bn3(self.conv3(branch)))


class _BlockCanonizer(AttributeCanonizer):
    """Base class of canonizers for one class of residual block, recognized by name, so torchvision is not imported."""

    superfluous_in_graphs = True
    block: ClassVar[str]
    block_forward: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__(self._attribute_map)

    @classmethod
    def _attribute_map(cls, name: str, module: nn.Module) -> dict[str, Any] | None:
        names = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
        if f"torchvision.models.resnet.{cls.block}" not in names:
            return None
        return {"forward": MethodType(cls.block_forward, module), "canonizer_sum": Sum()}


class ResNetBasicBlockCanonizer(_BlockCanonizer):
    """Turns the sum at the end of a basic block into a module `canonizer_sum`, to which a rule can be mapped."""

    block = "BasicBlock"
    block_forward = staticmethod(_forward_basic_block)


class ResNetBottleneckCanonizer(_BlockCanonizer):
    """Turns the sum at the end of a bottleneck block into a module `canonizer_sum`, to which a rule can be mapped."""

    block = "Bottleneck"
    block_forward = staticmethod(_forward_bottleneck)


class ResNetCanonizer(CompositeCanonizer):
    """For ResNet: merges batch norm and turns the residual sums into modules."""

    def __init__(self) -> None:
        super().__init__([SequentialMergeBatchNorm(), ResNetBottleneckCanonizer(), ResNetBasicBlockCanonizer()])
