"""Rates of lrpfx.datasets.attribute: against a plain loop, with memory, and on one and two processes of Ray."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset

import lrpfx
import lrpfx.datasets
from lrpfx.demo import digits

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
        self.photographs = [torch.from_numpy(image).permute(2, 0, 1) for image in load_sample_images().images]
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
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        if turn:  # the first is to warm up
            loops.append(middle - begin)
            runs.append(end - middle)
    ratios = [one / other for one, other in zip(loops, runs, strict=True)]
    return {
        "samples": len(data),
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


def on_ray(explainers: int, count: int) -> dict[str, float]:
    """Samples per second of so many processes of Ray once they run, and the seconds before."""
    explain_model, data = of_digits(count)
    seen: list[tuple[float, int]] = []
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lrpfx.datasets.attribute(
            explain_model,
            data,
            f"{folder}/store",
            batch_size=64,
            block_size=256,
            engine=lrpfx.datasets.RayEngine(explainers=explainers),
            progress=lambda done, total: seen.append((time.perf_counter(), done)),
        )
    end = time.perf_counter()
    (first, before), (last, after) = seen[len(seen) // 5], seen[-1]  # without the compilation of kernels
    return {"rate": (after - before) / (last - first), "start": seen[0][0] - begin, "seconds": end - begin}


def main(command: str, *arguments: str) -> None:
    """The figures of one measurement, as JSON."""
    torch.set_num_threads(1)
    if command == "memory":
        explain_model, data = of_digits(int(arguments[0]))
        with tempfile.TemporaryDirectory() as folder:
            lrpfx.datasets.attribute(explain_model, data, f"{folder}/store", batch_size=64)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    elif command == "digits":
        print(json.dumps(throughput(of_digits, 64, int(arguments[0]))))
    elif command == "crops":
        print(json.dumps(throughput(of_crops, 16, int(arguments[0]), reduce="sum", dtype="float16")))
    elif command == "ray":
        print(json.dumps(on_ray(int(arguments[0]), int(arguments[1]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
