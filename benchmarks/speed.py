"""The time of one attribution relative to the plain gradient. Contenders take turns in one process."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import (
    COMPOSITES,
    FURTHER,
    PLAIN,
    RANGE,
    captum_of,
    files_of,
    gradient_of,
    lowered_of,
    lrpfx_of,
    merged,
    network,
    zennit_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import lrpfx

COMPILED, EAGER = "plain gradient, compiled", "eager"


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in times.items()}


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """The median over rounds of the ratio between two contenders."""
    return statistics.median(one / other for one, other in zip(times[of], times[to], strict=True))


class _Work(TorchDispatchMode):
    """Counts convolutions, forward and transposed, and the floating-point operations of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = 0
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.convolutions += 1
        elif func is torch.ops.aten.convolution_backward.default:
            self.convolutions += sum(args[-1][:2])
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def work(run: Callable[[], Any]) -> _Work:
    """Count the work of one call."""
    with _Work() as counted:
        run()
    return counted


def measure(name: str, rounds: int, batch: int = 4, size: int = 224) -> list[dict[str, Any]]:
    """One record for each composite and contender on the network called `name`."""
    images = torch.rand(batch, 3, size, size)
    plain = merged(network(name))
    compiled = torch.compile(plain, fullgraph=True)
    records = []
    for title, composite in COMPOSITES.items():
        explain_model = lrpfx.transform(network(name), composite.lrpfx, input_range=RANGE)
        runs = {
            PLAIN: gradient_of(plain),
            COMPILED: gradient_of(compiled),
            "Zennit": zennit_of(network(name), title),
            "lrpfx": lrpfx_of(explain_model),
            "lrpfx, compiled": lrpfx_of(torch.compile(explain_model, fullgraph=True)),
            "lrpfx, lowered and compiled": lowered_of(explain_model, images),
        }
        agreement = (runs["lrpfx"](images) - runs["Zennit"](images)).norm() / runs["Zennit"](images).norm()
        print(f"{name} {title}: lrpfx and Zennit differ by {agreement:.1e}", flush=True)
        if title == "EpsilonPlusFlat":
            captum = captum_of(network(name))
            try:
                captum(images)
                runs["Captum, Epsilon"] = captum
            except Exception as error:
                print(f"Captum cannot explain {name}: {type(error).__name__}: {error}", flush=True)
        contenders = {key: (lambda run=run: run(images)) for key, run in runs.items()}
        times = interleaved(contenders, rounds)
        plain_work = work(contenders[PLAIN])
        for key in runs:
            reference = COMPILED if "compiled" in key else PLAIN
            counted = None if "compiled" in key else work(contenders[key])
            records.append(
                {
                    "network": name,
                    "composite": title,
                    "contender": key,
                    "milliseconds": 1e3 * statistics.median(times[key]),
                    "to_gradient": ratio(times, key, reference),
                    "faster_than_zennit": ratio(times, "Zennit", key),
                    "convolutions": counted and counted.convolutions,
                    "floor": counted.flops / plain_work.flops if counted else None,
                }
            )
            print(records[-1], flush=True)
        records += further_targets(name, title, explain_model, contenders[PLAIN], images, max(1, rounds // 2))
    return records


def formats(name: str, rounds: int, batch: int = 4, size: int = 224) -> list[dict[str, Any]]:
    """One record for each composite and format of the lowered program, and for eager `lrpfx.attribute`."""
    images = torch.rand(batch, 3, size, size)
    records = []
    for title, composite in COMPOSITES.items():
        explain_model = lrpfx.transform(network(name), composite.lrpfx, input_range=RANGE)
        with tempfile.TemporaryDirectory() as folder:
            runs = {EAGER: lrpfx_of(explain_model), **files_of(explain_model, images, Path(folder))}
            times = interleaved({key: (lambda run=run: run(images)) for key, run in runs.items()}, rounds)
        for key in runs:
            milliseconds = 1e3 * statistics.median(times[key])
            record = {"network": name, "composite": title, "contender": key, "milliseconds": milliseconds}
            records.append({**record, "to_eager": ratio(times, key, EAGER)})
            print(records[-1], flush=True)
    return records


def further_targets(
    name: str, title: str, explain_model: Any, plain: Callable[[], Any], images: torch.Tensor, rounds: int
) -> list[dict[str, Any]]:
    """The cost of each of nine further targets, relative to a plain gradient."""
    times = interleaved(
        {
            "plain": plain,
            "one": lambda: lrpfx.attribute(explain_model, images, 0),
            "ten": lambda: lrpfx.attribute(explain_model, images, targets=range(10)),
        },
        rounds,
    )
    rows = zip(times["ten"], times["one"], times["plain"], strict=True)
    cost = statistics.median((ten - one) / 9 / plain for ten, one, plain in rows)
    record = {"network": name, "composite": title, "contender": FURTHER, "to_gradient": cost}
    print(record, flush=True)
    return [record]


#: Operators whose arithmetic the floor counts.
ARITHMETIC = ("aten::mkldnn_convolution", "aten::convolution_backward", "aten::addmm", "aten::mm", "aten::thnn_conv2d")


def profile(name: str, batch: int = 4, size: int = 224) -> list[dict[str, Any]]:
    """The share of each operator in the time of one attribution, for the plain gradient and each composite."""
    images = torch.rand(batch, 3, size, size)
    runs = {PLAIN: gradient_of(merged(network(name)))}
    for title, composite in COMPOSITES.items():
        runs[title] = lrpfx_of(lrpfx.transform(network(name), composite.lrpfx, input_range=RANGE))
    records = []
    for title, run in runs.items():
        run(images)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            run(images)
        times = {event.key: event.self_cpu_time_total / 1e3 for event in profiled.key_averages()}
        total = sum(times.values())
        arithmetic = sum(times.get(operator, 0.0) for operator in ARITHMETIC)
        others = sorted(((key, value) for key, value in times.items() if key not in ARITHMETIC), key=lambda item: -item[1])[:4]
        records.append(
            {
                "network": name,
                "what": title,
                "milliseconds": total,
                "arithmetic": arithmetic / total,
                "others": ", ".join(f"{key.removeprefix('aten::')} {100 * value / total:.0f}%" for key, value in others),
            }
        )
        print(records[-1], flush=True)
    return records
