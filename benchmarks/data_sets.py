"""Rates of lrpfx.datasets.attribute: against a plain loop, with memory, and on one and two processes of Ray."""

import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset

import lrpfx
import lrpfx.datasets
from lrpfx.datasets import ray_cluster
from lrpfx.demo import (
    digits,
    torchvision_cpu,  # noqa: F401  # before torchvision
)

DIGITS, CROPS = 10_000, 500


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Scikit-learn's digits, repeated."""

    def __init__(self, count: int) -> None:
        training, _ = digits.load()
        self.images, self.labels, self.count = training.images, training.labels.tolist(), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        place = number % len(self.images)
        return self.images[place], self.labels[place]


class Crops(Dataset[tuple[torch.Tensor, int]]):
    """Crops of 224 by 224 pixels of scikit-learn's photographs."""

    def __init__(self, count: int) -> None:
        self.photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images]
        self.places = np.random.default_rng(0).random((count, 2))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image = self.photographs[number % len(self.photographs)]
        top, left = (int(share * (size - 224)) for share, size in zip(self.places[number], image.shape[1:], strict=True))
        return image[:, top : top + 224, left : left + 224].float() / 255 - 0.5, number % 10


def of_digits(count: int = DIGITS) -> tuple[Any, Digits]:
    """An explainable network for digits, and digits."""
    training, _ = digits.load()
    torch.manual_seed(0)
    model = digits.train(training, epochs=1)
    return lrpfx.transform(model, lrpfx.composites.EpsilonGammaBox(low=0.0, high=1.0)), Digits(count)


def of_crops(count: int = CROPS) -> tuple[Any, Crops]:
    """An explainable ResNet-18 and crops of photographs."""
    import torchvision

    torch.manual_seed(0)
    return lrpfx.transform(torchvision.models.resnet18().eval(), lrpfx.composites.EpsilonPlusFlat()), Crops(count)


def plain_loop(explain_model: Any, data: Any, batch_size: int) -> None:
    """What a user would write, without keeping anything."""
    for inputs, _ in DataLoader(data, batch_size=batch_size):
        lrpfx.attribute(explain_model, inputs)


def throughput(make: Callable[[], tuple[Any, Any]], batch_size: int, rounds: int, **settings: Any) -> dict[str, Any]:
    """Seconds of a plain loop and of a run with a store, interleaved, and the median of their ratio."""
    explain_model, data = make()
    loops, runs = [], []
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            plain_loop(explain_model, data, batch_size)
            middle = time.perf_counter()
            lrpfx.datasets.attribute(explain_model, data, f"{folder}/store", batch_size=batch_size, **settings)
            end = time.perf_counter()
            files = [file for file in Path(folder).rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            block = lrpfx.datasets.open(f"{folder}/store").manifest["block"]
            objects = len({file.relative_to(folder).parts[1] for file in files if "c" in file.parts})
        if turn:  # the first is to warm up
            loops.append(middle - begin)
            runs.append(end - middle)
    ratios = [one / other for one, other in zip(loops, runs, strict=True)]
    begin = time.perf_counter()
    for number in range(len(data)):
        data[number]
    load = (time.perf_counter() - begin) / len(data)
    return {
        "samples": len(data),
        "load": load,
        "block": block,
        "objects": objects,
        "loop": float(np.median(loops)),
        "run": float(np.median(runs)),
        "ratio": float(np.median(ratios)),
        "ratio_of_best": min(loops) / min(runs),
        "bytes": size / len(data),
    }


def peak_memory(count: int) -> float:
    """MiB that a process holds at most while it explains so many digits."""
    found = subprocess.run([sys.executable, __file__, "memory", str(count)], check=True, capture_output=True, text=True)
    return float(found.stdout.split()[-1])


def on_ray(make: Callable[[], tuple[Any, Any]], explainers: int, block_size: int, **settings: Any) -> dict[str, float]:
    """Samples per second of so many processes of Ray once they run, and the seconds before.

    `driver`: the share of a core that this process takes meanwhile. `blocks`: that are written in a second.
    """
    explain_model, data = make()
    seen: list[tuple[float, float, int]] = []
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lrpfx.datasets.attribute(
            explain_model,
            data,
            f"{folder}/store",
            batch_size=min(64, block_size),
            block_size=block_size,
            engine=lrpfx.datasets.RayEngine(explainers=explainers),
            **settings,
            progress=lambda done, total: seen.append((time.perf_counter(), time.process_time(), done)),
        )
    end = time.perf_counter()
    (first, used, before), (last, now, after) = seen[len(seen) // 5], seen[-1]  # without the first calls of kernels
    samples = after - before
    return {
        "rate": samples / (last - first),
        "driver": (now - used) / (last - first),
        "blocks": samples / block_size / (last - first),
        "start": seen[0][0] - begin,
        "seconds": end - begin,
    }


def handing_out(parts: int = 20_000) -> float:
    """Parts that the coordinator hands out in a second of its own processor time, if each is reported by itself."""
    seen: list[tuple[int, float]] = []
    numbers = ray_cluster.numbered(range(parts))
    for results in ray_cluster.results_of((2, 1, None), numbers, "hand out part", _reports_each):
        seen.append((len(results), _processor_time("ray::Coordinator")))
    return sum(count for count, _ in seen[1:]) / (seen[-1][1] - seen[0][1])


def _reports_each(worker: ray_cluster.Worker) -> None:
    for number, _ in worker.parts():
        worker.report(number, None)


def _processor_time(name: str) -> float:
    """Seconds that the process with a name has taken."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(name.encode()):
                user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # it has ended
    raise ProcessLookupError(name)


def decoding(rounds: int = 50) -> dict[str, float]:
    """Seconds to decode a photograph of 500 by 375 pixels, resize it to 256 and crop it to 224, and its bytes in JPEG."""
    content = io.BytesIO()
    Image.fromarray(load_sample_images().images[0]).resize((500, 375)).save(content, "JPEG", quality=90)
    begin = time.perf_counter()
    for _ in range(rounds):
        image = Image.open(io.BytesIO(content.getvalue())).resize((341, 256), Image.Resampling.BILINEAR)
        torch.from_numpy(np.array(image.crop((58, 16, 282, 240)))).permute(2, 0, 1).float().div_(255)
    return {"seconds": (time.perf_counter() - begin) / rounds, "bytes": float(len(content.getvalue()))}


def measure(rounds: int) -> dict[str, Any]:
    """All figures: seconds, bytes, MiB, samples and blocks per second."""
    return {
        "digits": throughput(of_digits, 64, 3 * rounds),
        "crops": throughput(of_crops, 16, max(1, rounds - 1), reduce="sum", dtype="float16"),
        "decoding": decoding(),
        "memory": {count: peak_memory(int(count)) for count in ("1000", "10000")},
        "one": on_ray(lambda: of_digits(4 * DIGITS), 1, 1024),
        "two": on_ray(lambda: of_digits(4 * DIGITS), 2, 1024),
        "one of crops": on_ray(of_crops, 1, 16, reduce="sum", dtype="float16"),
        "two of crops": on_ray(of_crops, 2, 16, reduce="sum", dtype="float16"),
        "small blocks": on_ray(lambda: of_digits(4_000), 2, 4),
        "handing out": handing_out(),
    }


def main() -> None:
    """Measure with one thread, and write benchmarks/data_sets.json."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["memory"]:
        explain_model, data = of_digits(int(sys.argv[2]))
        with tempfile.TemporaryDirectory() as folder:
            lrpfx.datasets.attribute(explain_model, data, f"{folder}/store", batch_size=64)
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(int(line.split()[1]) / 1024)
        return
    found = {**measure(3), "torch": torch.__version__, "processor": platform.processor() or platform.machine()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
