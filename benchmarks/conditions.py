"""The time of fifty conditional maps of one image, relative to as many attributions and to those of zennit-crp."""

from typing import Any

import torch
from contenders import merged, network
from crp.attribution import CondAttribution
from speed import interleaved, ratio
from zennit.composites import EpsilonPlusFlat as OfZennit
from zennit.torchvision import ResNetCanonizer

import lrpfx
from lrpfx.composites import EpsilonPlusFlat

LAYER, TARGET, COUNT = "layer3.5.conv2", 7, 50
_TOGETHER = 10  # conditions in one batch of zennit-crp
WHOLE, ALONE, BATCHES = "attributions, one at a time", "zennit-crp, one at a time", f"zennit-crp, batches of {_TOGETHER}"


def measure(rounds: int) -> list[dict[str, Any]]:
    """Records with the seconds of all conditions, by contender; a fifth of those that run one at a time is measured."""
    model, image = network("resnet50"), torch.randn(1, 3, 224, 224)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    oracle = CondAttribution(merged(model))
    conditions = [{LAYER: [channel]} for channel in range(COUNT)]
    few = range(COUNT // 5)

    def by_crp(channels: Any) -> None:
        given = [{"y": [TARGET], LAYER: [channel]} for channel in channels]
        oracle(image.repeat(len(given), 1, 1, 1).requires_grad_(), given, OfZennit(canonizers=[ResNetCanonizer()]))

    contenders = {
        "lrpfx": lambda: lrpfx.attribute(explain_model, image, TARGET, conditions=conditions),
        WHOLE: lambda: [lrpfx.attribute(explain_model, image, TARGET) for _ in few],
        ALONE: lambda: [by_crp([channel]) for channel in few],
        BATCHES: lambda: by_crp(few),
    }
    times = interleaved(contenders, rounds)
    times = {name: [one * (1 if name == "lrpfx" else COUNT / len(few)) for one in values] for name, values in times.items()}
    return [
        {"contender": name, "seconds": sorted(values)[len(values) // 2], "lrpfx_to": ratio(times, "lrpfx", name)}
        for name, values in times.items()
    ]
