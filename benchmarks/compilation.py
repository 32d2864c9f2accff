"""The time of `lrpfx.transform` by number of nodes."""

import time
from typing import Any

import torch
from contenders import COMPOSITES, network
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus


class Chain(nn.Module):
    """Dense layers and ReLUs, `nodes` in all."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(nodes // 2))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _record(title: str, model: nn.Module, composite: Any) -> dict[str, Any]:
    nodes = len(lrpfx.node_names(model)) - 1
    started = time.perf_counter()
    lrpfx.transform(model, composite)
    seconds = time.perf_counter() - started
    record = {"network": title, "nodes": nodes, "seconds": seconds, "milliseconds_per_node": 1e3 * seconds / nodes}
    print(record, flush=True)
    return record


def measure() -> list[dict[str, Any]]:
    names = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "densenet201"]
    records = [_record(name, network(name), COMPOSITES["EpsilonPlusFlat"].lrpfx) for name in names]
    return records + [_record("chain", Chain(nodes), EpsilonPlus()) for nodes in (100, 1_000, 3_000, 10_000)]
