"""Canonizers for torchvision's networks. In graph mode none of them is needed."""

from types import MethodType
from typing import Any

import torch
from torch import nn

from .canonizers import AttributeCanonizer, CompositeCanonizer, SequentialMergeBatchNorm
from .layer import Sum


class VGGCanonizer(SequentialMergeBatchNorm):
    """For VGG: merges batch norm."""


def _is_block(module: nn.Module, name: str) -> bool:
    """Whether a module is a residual block of torchvision's ResNet, which need not be imported to tell."""
    return any(cls.__module__ == "torchvision.models.resnet" and cls.__name__ == name for cls in type(module).__mro__)


def _residual_sum(self: Any, x: torch.Tensor, branch: torch.Tensor) -> Any:
    skip = x if self.downsample is None else self.downsample(x)
    return self.relu(self.canonizer_sum(torch.stack([skip, branch], dim=-1)))


def _forward_basic_block(self: Any, x: torch.Tensor) -> Any:
    branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    return _residual_sum(self, x, branch)


def _forward_bottleneck(self: Any, x: torch.Tensor) -> Any:
    branch = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
    return _residual_sum(self, x, self.bn3(self.conv3(branch)))


class ResNetBasicBlockCanonizer(AttributeCanonizer):
    """The sum at the end of a basic block as a module `canonizer_sum`, which a rule can be mapped to."""

    superfluous_in_graphs = True

    def __init__(self) -> None:
        super().__init__(self._attribute_map)

    @classmethod
    def _attribute_map(cls, name: str, module: nn.Module) -> dict[str, Any] | None:
        if not _is_block(module, "BasicBlock"):
            return None
        return {"forward": MethodType(_forward_basic_block, module), "canonizer_sum": Sum()}


class ResNetBottleneckCanonizer(AttributeCanonizer):
    """The sum at the end of a bottleneck block as a module `canonizer_sum`, which a rule can be mapped to."""

    superfluous_in_graphs = True

    def __init__(self) -> None:
        super().__init__(self._attribute_map)

    @classmethod
    def _attribute_map(cls, name: str, module: nn.Module) -> dict[str, Any] | None:
        if not _is_block(module, "Bottleneck"):
            return None
        return {"forward": MethodType(_forward_bottleneck, module), "canonizer_sum": Sum()}


class ResNetCanonizer(CompositeCanonizer):
    """For ResNet: merges batch norm, and makes the residual sums modules."""

    def __init__(self) -> None:
        super().__init__([SequentialMergeBatchNorm(), ResNetBottleneckCanonizer(), ResNetBasicBlockCanonizer()])
