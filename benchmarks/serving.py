"""Load `lrpfx serve` on this machine, and write the table of docs/serving.md: `make load`.

A small network is exported as .pt2 and as .onnx, and served by a process of its own. Clients in another process send
single images, each over one connection and one after the other. Every answer is compared with the result of the program for
this image alone.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from documents import write_between
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlusFlat

DOCUMENT = Path(__file__).parent.parent / "docs" / "serving.md"
SHAPE, CLASSES, IMAGES = (3, 32, 32), 10, 64
#: Requests of each client before memory is first read.
_BEFORE = 50


@dataclass(frozen=True)
class Load:
    """What a load did."""

    seconds: np.ndarray  # of each request
    wrong: int  # answers
    elapsed: float
    before: int  # bytes of the server
    after: int
    rows: float  # in a batch, on average


def exported(folder: Path) -> list[Path]:
    """The files of the network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )
    program = lrpfx.lower(lrpfx.transform(model.float().eval(), EpsilonPlusFlat()), torch.rand(2, *SHAPE, dtype=torch.float32))
    return [lrpfx.save(program, folder / name) for name in ("model.pt2", "model.onnx")]


@contextlib.contextmanager
def served(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process of a server that is ready, and its port. It ends without an error."""
    command = [sys.executable, "-m", "lrpfx", "serve", str(path), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition(";")[0].rpartition(":")[2])
        until_ready(port)
        yield process, port
        process.terminate()
        if process.wait(60) != 0:
            raise RuntimeError(f"the server ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def until_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the server is not ready after a minute")


def samples(path: Path) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Arguments of requests, and the results for each of them alone."""
    runner = lrpfx.load(path)
    generator = np.random.default_rng(0)
    arguments = [
        {"input": generator.random((1, *SHAPE), dtype=np.float32), "target": np.array([number % CLASSES])}
        for number in range(IMAGES)
    ]
    return arguments, [runner(**one) for one in arguments]


def body_of(arguments: dict[str, np.ndarray], binary: bool) -> tuple[bytes, dict[str, str]]:
    """A request, and its headers."""
    inputs: list[dict[str, Any]] = []
    for name, value in arguments.items():
        one = {"name": name, "shape": list(value.shape), "datatype": "INT64" if name == "target" else "FP32"}
        inputs.append(
            one | ({"parameters": {"binary_data_size": value.nbytes}} if binary else {"data": value.ravel().tolist()})
        )
    text = json.dumps({"inputs": inputs, **({"parameters": {"binary_data_output": True}} if binary else {})}).encode()
    if not binary:
        return text, {}
    return b"".join([text, *(value.tobytes() for value in arguments.values())]), {
        "Inference-Header-Content-Length": str(len(text))
    }


def results_of(content: bytes, length: str | None) -> dict[str, np.ndarray]:
    """The results in the body of an answer."""
    start = len(content) if length is None else int(length)
    found = {}
    for one in json.loads(content[:start])["outputs"]:
        if "data" in one:
            value = np.array(one["data"], dtype=np.float32)
        else:
            size = one["parameters"]["binary_data_size"]
            value, start = np.frombuffer(content[start : start + size], "<f4"), start + size
        found[one["name"]] = value.reshape(one["shape"])
    return found


def is_right(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Whether results differ from others by rounding alone: kernels depend on the number of rows."""
    return found.keys() == expected.keys() and all(
        found[name].shape == value.shape and np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value)
        for name, value in expected.items()
    )


def clients(port: int, path: Path, binary: bool, count: int, requests: int, results: Any) -> None:
    """The clients, as threads of one process: puts the seconds of all requests and the number of wrong answers."""
    torch.set_num_threads(1)
    arguments, expected = samples(path)
    bodies = [body_of(one, binary) for one in arguments]
    seconds, wrong = np.zeros((count, requests)), [0] * count

    def client(number: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            for request in range(requests):
                chosen = (number * 31 + request) % IMAGES
                started = time.perf_counter()
                connection.request("POST", f"/v2/models/{path.stem}/infer", *bodies[chosen])
                answer = connection.getresponse()
                content = answer.read()
                seconds[number, request] = time.perf_counter() - started
                right = answer.status == 200 and is_right(
                    results_of(content, answer.getheader("Inference-Header-Content-Length")), expected[chosen]
                )
                wrong[number] += not right

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((seconds.ravel(), sum(wrong), time.perf_counter() - started))


def loaded(path: Path, *, binary: bool, count: int, requests: int) -> Load:
    """Load a server of a file with `count` clients that send `requests` each."""
    with served(path) as (process, port):
        memory = psutil.Process(process.pid).memory_info
        _in_process(port, path, binary, count, _BEFORE)
        before = memory().rss
        seconds, wrong, elapsed = _in_process(port, path, binary, count, requests)
        after = memory().rss
        rows = metric(port, "lrpfx_batch_rows_sum") / metric(port, "lrpfx_batch_rows_count")
    return Load(seconds, wrong, elapsed, before, after, rows)


def _in_process(*arguments: Any) -> tuple[np.ndarray, int, float]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=clients, args=(*arguments, results))
    process.start()
    found: tuple[np.ndarray, int, float] = results.get(timeout=500)
    process.join()
    return found


def metric(port: int, name: str) -> float:
    """The sum of a metric over its labels."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def table(rows: Sequence[tuple[str, str, Load]], count: int, requests: int) -> str:
    """The table of the document."""
    lines = [
        f"{count} clients sent {requests} requests each, one image of {'×'.join(map(str, SHAPE))} at a time, on "
        f"{os.cpu_count()} cores that server and clients share. Memory is that of the server, after {count * _BEFORE} requests "
        f"and after {count * requests} more.",
        "",
        "| file | tensors | requests | wrong answers | p50 | p99 | requests a second | rows a batch | memory before | after |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for file, tensors, load in rows:
        p50, p99 = 1000 * np.percentile(load.seconds, (50, 99))
        lines.append(
            f"| {file} | {tensors} | {len(load.seconds)} | {load.wrong} | {p50:.0f} ms | {p99:.0f} ms | "
            f"{len(load.seconds) / load.elapsed:.0f} | {load.rows:.1f} | "
            f"{load.before / 2**20:.0f} MB | {load.after / 2**20:.0f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            (path.suffix, tensors, loaded(path, binary=tensors == "bytes", count=options.clients, requests=options.requests))
            for path in exported(Path(folder))
            for tensors in ("JSON", "bytes")
        ]
    text = table(rows, options.clients, options.requests)
    print(text)
    if DOCUMENT.exists():
        write_between(DOCUMENT, "load", text)
    if any(load.wrong for _, _, load in rows):
        raise SystemExit("some answers are wrong")


if __name__ == "__main__":
    main()
