"""What `lrpfx.transform` and `lrpfx.capture` take, relative to a gradient and to torch.export."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from contenders import network
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, Composite, EpsilonPlusFlat

NETWORKS: dict[str, Composite] = {"resnet50": EpsilonPlusFlat(), "vit_b_16": AttnLRP()}


def _seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _gradient(model: nn.Module, x: torch.Tensor) -> None:
    model(x.clone().requires_grad_())[0, 0].backward()


def measure(rounds: int) -> list[dict[str, Any]]:
    """Median process times of contenders in turns, as ratios to one gradient (batch 1, 224 × 224 pixels, one thread)."""
    records = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # process time counts threads that wait
    for name, composite in NETWORKS.items():
        model, x = network(name), torch.rand(1, 3, 224, 224)
        captured = lrpfx.capture(model, x)
        contenders: dict[str, Callable[[], Any]] = {
            "gradient": lambda model=model, x=x: _gradient(model, x),
            "torch.export": lambda model=model, x=x: torch.export.export(model, (x,)),
            "transform(model, composite, x)": lambda model=model, x=x, rules=composite: lrpfx.transform(model, rules, x),
            "capture(model, x)": lambda model=model, x=x: lrpfx.capture(model, x),
            "transform(captured, composite)": lambda captured=captured, rules=composite: lrpfx.transform(captured, rules),
        }
        times: dict[str, list[float]] = {title: [] for title in contenders}
        for round_number in range(rounds + 1):
            for title, run in contenders.items():
                seconds = _seconds(run)
                if round_number:  # the first round warms up
                    times[title].append(seconds)
        medians = {title: statistics.median(found) for title, found in times.items()}
        for title, seconds in medians.items():
            record = {
                "network": name,
                "contender": title,
                "seconds": seconds,
                "to_gradient": seconds / medians["gradient"],
                "to_export": seconds / medians["torch.export"],
            }
            print(record, flush=True)
            records.append(record)
    torch.set_num_threads(threads)
    return records
