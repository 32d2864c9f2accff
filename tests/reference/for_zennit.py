"""Networks in the form that zennit 0.5.1 treats right."""

from types import MethodType

import torch
from helpers import merged_with_torch
from torch import nn
from zennit.layer import Sum

from lrpfx.demo.digits import ResidualBlock


class InTurn(nn.Module):
    """A ReLU that is called several times in each forward, as separate modules."""

    def __init__(self, calls):
        super().__init__()
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(calls))
        self.count = 0

    def forward(self, input):
        self.count += 1
        return self.relus[(self.count - 1) % len(self.relus)](input)


def _with_sum_module(self, x):
    """The forward of a residual block whose sum is a module, which zennit's rules need."""
    branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    return self.relu(self.sum(torch.stack([x, branch], dim=-1)))


def for_zennit(model):
    """A copy of the network that zennit 0.5.1 treats right. Those of torchvision need a canonizer for their sums besides."""
    model = merged_with_torch(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU):
                in_block = type(module).__name__ in ("BasicBlock", "Bottleneck", "ResidualBlock")
                setattr(module, name, InTurn(2) if in_block else nn.ReLU())  # it overwrites what an in-place ReLU reads
        if isinstance(module, ResidualBlock):
            module.sum = Sum()
            module.forward = MethodType(_with_sum_module, module)
    return model
