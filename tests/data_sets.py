"""A small network, a data set of noise, and work on both that other processes can start."""

import itertools
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import lrpfx
import lrpfx.datasets

CLASSES = 4
LAYERS = {"first": None, "add": "channels", "mean": "sum"}


class Small(nn.Module):
    """A convolutional network with a skip."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.head((self.second(hidden) + hidden).relu().mean((2, 3)))


def small_model(seed=0):
    model, generator = Small().double().eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def small_explain_model(seed=0, composite=None):
    return lrpfx.transform(small_model(seed), composite or lrpfx.composites.EpsilonPlusFlat())


class Noise(Dataset):
    """Images of noise, each made from its number, with labels. Some numbers cannot be loaded or hold what is no number."""

    def __init__(self, count, broken=(), infinite=()):
        self.count, self.broken, self.infinite = count, broken, infinite

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if not 0 <= number < self.count:
            raise IndexError(number)
        if number in self.broken:
            raise OSError(f"file {number} is broken")
        image = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        if number in self.infinite:
            image[0, 2, 3] = torch.inf
        return image, number % CLASSES


class Stream(IterableDataset):
    """The same without numbers, shared among workers."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.dataset[number] for number in range(first, len(self.dataset), step))


class Crashing(Noise):
    """Noise whose sample 20 ends the process that loads it."""

    def __getitem__(self, number):
        if number == 20:
            os._exit(9)
        return super().__getitem__(number)


class Cut(Stream):
    """A stream that ends with an error."""

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 59)
        raise OSError("the archive is cut")


class Slow(Stream):
    """A stream that takes its time."""

    def __iter__(self):
        for sample in super().__iter__():
            time.sleep(0.02)
            yield sample


def outputs_as_they_are(output):
    """A target whose module processes of Ray import, with the file system `Objects`."""
    return output


def contrast(output):
    """A target: the first class against the second."""
    relevance = torch.zeros_like(output)
    relevance[:, 0], relevance[:, 1] = output[:, 0], -output[:, 1]
    return relevance


@contextmanager
def file_sizes_up_to(limit):
    """A context in which this process writes no larger files, as on a full disk."""
    (soft, hard), handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def tree(folder):
    """The content of each file in a folder and those in it, see `without_run`."""
    return without_run({path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()})


def without_run(files):
    """The content of files without the number that each store has for itself."""
    return {name: re.sub(rb'"run": "[0-9a-f]{16}"', b"", content) for name, content in files.items()}


def run(path, count, kind="sequence", batch_size=8, **settings):
    """One run; processes that are killed start here."""
    torch.set_num_threads(1)
    noise = Noise(count, broken=(5, 40), infinite=(17,))
    readable = [noise[number] for number in range(count) if number not in noise.broken] if kind == "stream" else None
    data = noise if readable is None else iter(readable)
    given = {"record": LAYERS, "block_size": 16, "dtype": "float16", **settings}
    return lrpfx.datasets.attribute(small_explain_model(), data, path, batch_size=batch_size, **given)


class Objects(DirFileSystem):
    """An object store: a folder whose objects appear whole, reached by objects://PATH, with the requests that it was sent."""

    protocol = "objects"
    requests: ClassVar = Counter()

    def __init__(self, path="/", **options):
        super().__init__(path or "/", LocalFileSystem(auto_mkdir=True), **options)

    def cat_file(self, path, start=None, end=None, **options):
        Objects.requests["get"] += 1
        return super().cat_file(path, start, end, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        Objects.requests["put"] += 1
        place = Path(self.path, path.lstrip("/"))
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
        partial.write_bytes(value)
        partial.replace(place)

    def ls(self, path, detail=True, **options):
        Objects.requests["list"] += 1
        return super().ls(path, detail, **options)


fsspec.register_implementation("objects", Objects, clobber=True)


def write_project(folder, seed):
    """A project for ViRelAy whose numbers are all the seed."""
    shape = (6, 3, 4 + seed, 5)
    lrpfx.adapters.virelay.write_project(
        folder,
        images=np.full(shape, 0.1 * seed),
        relevance=np.full(shape, float(seed)),
        outputs=np.full((6, 2), float(seed)),
        labels=np.zeros(6, dtype=int),
        name=f"project {seed}",
    )


def write_project_killed(folder, seed, step):
    """The same in a process that ends before its operation number `step` on the names of files."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        is_open = event == "open" and str(arguments[0]).startswith(str(folder))
        if is_open or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            count += 1
            if count > step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write_project(folder, seed)
