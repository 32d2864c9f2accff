"""Each argument of a DataLoader: honoured, without an effect on what is explained, or refused."""

import inspect
import multiprocessing

import numpy as np
import pytest
import torch
from data_sets import CLASSES, Noise, Stream, small_explain_model
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import lrpfx
import lrpfx.datasets

COUNT = 12


@pytest.fixture(scope="module")
def explain_model():
    return small_explain_model()


def batches_of(items):
    images, labels = zip(*items, strict=True)
    return 1 - torch.stack(images), (torch.tensor(labels) + 1) % CLASSES


def one_of(item):
    return 1 - item[0], (item[1] + 1) % CLASSES


class Numbered(Noise):
    """Samples by indices of any kind that torch hands over."""

    def __getitem__(self, number):
        return super().__getitem__(int(number))


class Named(Noise):
    """Labels are names until they are collated."""

    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return image, "abcd"[label]


def numbered(items):
    return torch.stack([image for image, _ in items]), torch.tensor(["abcd".index(label) for _, label in items])


class Opened(Noise):
    """Noise that a worker opens before it can be read."""

    factor = None

    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return image * self.factor, label


class Counting(multiprocessing.context.ForkContext):
    """A context that counts the processes that it makes."""

    made = 0

    def count(self, *given, **named):
        self.made += 1
        return super().Process(*given, **named)

    Process = count


class Backwards(Sampler):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))


class Shuffling(Backwards):
    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


class Endless(Backwards):
    def __iter__(self):
        while True:
            yield 0


ORDERS = {
    "part": lambda: SequentialSampler(range(5)),
    "list": lambda: [3, 1, 4, 1],
    "range": lambda: range(2, 9, 3),
    "array": lambda: np.array([7, 2]),
    "tensor": lambda: torch.tensor([7, 0]),
    "of one's own": lambda: Backwards(COUNT),
    "distributed": lambda: DistributedSampler(Noise(COUNT), 3, 1, shuffle=True, seed=3),
}
HONOURED = {
    **{f"sampler: {name}": lambda make=make: DataLoader(Numbered(COUNT), 4, sampler=make()) for name, make in ORDERS.items()},
    "sampler with workers": lambda: DataLoader(Noise(COUNT), 4, sampler=[5, 3], num_workers=1),
    "names": lambda: DataLoader(dict(zip("abc", Noise(3), strict=True)), sampler=["c", "a"]),
    "dict": lambda: DataLoader(dict(enumerate(Noise(3)))),
    "collate_fn": lambda: DataLoader(Noise(COUNT), 4, collate_fn=batches_of),
    "collate_fn that numbers labels": lambda: DataLoader(Named(COUNT), 4, collate_fn=numbered),
    "collate_fn without batches": lambda: DataLoader(Noise(COUNT), batch_size=None, collate_fn=one_of),
    "collate_fn without batches, workers": lambda: DataLoader(Noise(COUNT), batch_size=None, collate_fn=one_of, num_workers=1),
    "collate_fn of a stream": lambda: DataLoader(Stream(Noise(COUNT)), batch_size=None, collate_fn=one_of),
    "collate_fn of a stream, workers": lambda: DataLoader(
        Stream(Noise(COUNT)), batch_size=None, collate_fn=one_of, num_workers=1
    ),
    "timeout, prefetch_factor": lambda: DataLoader(Noise(COUNT), 4, num_workers=1, timeout=50, prefetch_factor=3),
    "persistent_workers": lambda: DataLoader(Noise(COUNT), 4, num_workers=1, persistent_workers=True),
    "in_order": lambda: DataLoader(Noise(COUNT), 4, num_workers=1, in_order=False),
    "generator": lambda: DataLoader(Noise(COUNT), 4, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", HONOURED)
def test_what_the_loader_gives_is_explained(name, explain_model, tmp_path):
    loader = HONOURED[name]()
    given = list(loader)
    one = loader.batch_size is None
    images = torch.stack([image for image, _ in given]) if one else torch.cat([image for image, _ in given])
    labels = torch.tensor([label for _, label in given]) if one else torch.cat([label for _, label in given])
    found = lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", dtype="float64")
    assert not found.errors and found.labels.tolist() == labels.tolist()
    np.testing.assert_allclose(found["output"][:], explain_model(images).detach(), rtol=1e-10)
    np.testing.assert_allclose(found.relevance[:], lrpfx.attribute(explain_model, images).relevance, rtol=1e-10, atol=1e-13)
    again = lrpfx.datasets.attribute(explain_model, HONOURED[name](), tmp_path / "store", dtype="float64")
    assert again.is_complete


@pytest.mark.parametrize("kind", [Noise, lambda count: Stream(Noise(count))])
def test_processes_are_those_of_the_context(kind, explain_model, tmp_path):
    context = Counting()
    loader = DataLoader(kind(COUNT), 4, num_workers=2, multiprocessing_context=context)
    lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store")
    assert context.made == 2


def test_workers_are_prepared(explain_model, tmp_path):
    """Also the first samples, and those that are compared when a run goes on, come from workers."""
    plain = [(image * 0.5, label) for image, label in Noise(COUNT)]
    expected = lrpfx.datasets.attribute(explain_model, plain, tmp_path / "plain", batch_size=4, block_size=4)
    loader = DataLoader(Opened(COUNT), 4, num_workers=1, worker_init_fn=prepared_for_both)
    path = tmp_path / "store"
    found = lrpfx.datasets.attribute(explain_model, loader, path, block_size=4)
    assert not found.errors and np.array_equal(found.relevance[:], expected.relevance[:])
    (path / "done" / "c" / "1").unlink()
    assert lrpfx.datasets.attribute(explain_model, loader, path).is_complete
    stream = DataLoader(Stream(Opened(COUNT)), 4, num_workers=1, worker_init_fn=prepared_for_both)
    streamed = lrpfx.datasets.attribute(explain_model, stream, tmp_path / "stream", block_size=4)
    assert not streamed.errors and np.array_equal(streamed.relevance[:], expected.relevance[:])


def prepared_for_both(worker):
    dataset = get_worker_info().dataset
    (dataset.dataset if isinstance(dataset, Stream) else dataset).factor = 0.5


def test_seeds_of_workers_are_those_of_the_generator(explain_model, tmp_path):
    """The generator itself stays as it is."""

    class Drawn(Noise):
        def __getitem__(self, number):
            return super().__getitem__(number)[0], int(torch.initial_seed() % 1000) if get_worker_info() else 0

    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    seeds = []
    for seed in (7, 8):
        generator = torch.Generator().manual_seed(seed)
        before = generator.get_state()
        loader = DataLoader(Drawn(4), 4, num_workers=1, generator=generator)
        seeds.append(lrpfx.datasets.attribute(explain_model, loader, tmp_path / f"{seed}").labels[0])
        assert torch.equal(generator.get_state(), before)
        assert seeds[-1] == next(iter(loader))[1][0]
    assert seeds[0] != seeds[1]


def test_another_order_is_another_data_set(explain_model, tmp_path):
    lrpfx.datasets.attribute(explain_model, DataLoader(Noise(COUNT), sampler=[0, 1, 2]), tmp_path / "store")
    with pytest.raises(lrpfx.InputError, match="begun with other order"):
        lrpfx.datasets.attribute(explain_model, DataLoader(Noise(COUNT), sampler=[0, 2, 1]), tmp_path / "store")


def _closure():
    return lambda items: batches_of(items)


MINE = _closure()


class Own(DataLoader):
    def __iter__(self):
        return map(lambda batch: (1 - batch[0], batch[1]), super().__iter__())


REFUSED = {
    "shuffle": (lambda: DataLoader(Noise(COUNT), shuffle=True), "the order of a RandomSampler"),
    "sampler: random": (lambda: DataLoader(Noise(COUNT), sampler=RandomSampler(Noise(9))), "the order of a RandomSampler"),
    "sampler: subset": (lambda: DataLoader(Noise(COUNT), sampler=SubsetRandomSampler([1, 2])), "of a SubsetRandomSampler"),
    "sampler: weighted": (lambda: DataLoader(Noise(COUNT), sampler=WeightedRandomSampler([1.0, 2], 2)), "of a Weighted"),
    "sampler: shuffling": (lambda: DataLoader(Noise(COUNT), sampler=Shuffling(COUNT)), "Shuffling .* another order each time"),
    "sampler: endless": (lambda: DataLoader(Noise(COUNT), sampler=Endless(COUNT)), "Endless .* other indices than so many"),
    "sampler: generator": (lambda: DataLoader(Noise(COUNT), sampler=(one for one in [1, 2])), "generator .* has no length"),
    "sampler: empty": (lambda: DataLoader(Noise(COUNT), sampler=[]), "the data set is empty"),
    "batch_sampler": (lambda: DataLoader(Noise(COUNT), batch_sampler=[[0, 1], [2]]), "has a batch_sampler="),
    "class": (lambda: Own(Noise(COUNT), 4), "a Own makes its batches in a way of its own"),
    "collate_fn": (
        lambda: DataLoader(Noise(COUNT), num_workers=1, multiprocessing_context="spawn", collate_fn=MINE),
        "cannot be pickled for that: .*lambda",
    ),
    "collate_fn of a stream": (
        lambda: DataLoader(Stream(Noise(9)), num_workers=1, multiprocessing_context="spawn", collate_fn=MINE),
        "cannot be pickled for that: .*lambda",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, explain_model, tmp_path):
    make, message = REFUSED[name]
    state = torch.get_rng_state()
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.datasets.attribute(explain_model, make(), tmp_path / "store")
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_that_would_not_be_prepared(explain_model, tmp_path):
    loader = DataLoader(Opened(COUNT), 4, num_workers=1, worker_init_fn=prepared_for_both)
    with pytest.raises(lrpfx.InputError, match="leave out workers=0"):
        lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", workers=0)


def test_all_arguments_are_known():
    """A new argument of torch needs a decision, and a row in docs/datasets.md."""
    known = {
        "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last",
        "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
        "pin_memory_device", "in_order",
    }  # fmt: skip
    assert set(inspect.signature(DataLoader).parameters) <= known


@pytest.mark.parametrize("kind", ["sequence", "stream", "prepared"])
@pytest.mark.parametrize("place", ["progress", "target"])
def test_workers_end_with_an_error_that_is_kept(kind, place, explain_model, tmp_path):
    def fails(*given):
        raise KeyboardInterrupt

    calls = []

    def fails_later(output):
        calls.append(1)
        return output if len(calls) < 3 else fails()

    before = set(multiprocessing.active_children())
    prepared = {"worker_init_fn": lambda worker: None} if kind == "prepared" else {}
    dataset = Stream(Noise(64)) if kind == "stream" else Noise(64)
    loader = DataLoader(dataset, 4, num_workers=1, **prepared)
    asked = {"progress": fails} if place == "progress" else {"target": fails_later}
    with pytest.raises(KeyboardInterrupt) as kept:
        lrpfx.datasets.attribute(explain_model, loader, tmp_path / "store", **asked)
    assert kept.value.__traceback__ is not None and set(multiprocessing.active_children()) == before
