"""What a DataLoader of torch lends: the order of its samples, and the settings of the processes that load them."""

import hashlib
import pickle
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lrpfx.errors import InputError, InputTypeError, first_lines

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_A_LIST = "pass shuffle=False, a list of indices as sampler=, or a torch.utils.data.Subset for a part of the dataset"


@dataclass(frozen=True)
class Workers:
    """Processes that load samples. `settings`: arguments of a DataLoader that are about them."""

    count: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def are_prepared(self) -> bool:
        """Whether they differ from this process, so that they alone load samples."""
        return self.settings.get("worker_init_fn") is not None

    def loading(self, dataset: Any, lent: Any, most: int | None = None, **arguments: Any) -> Iterator[Any]:
        """What these processes load, at most `most` of them. `arguments`: others of the DataLoader.

        `lent`: the user's dataset, which functions of the user find by `torch.utils.data.get_worker_info`.

        Errors: `InputError` if they cannot be started.
        """
        generator = torch.Generator()  # for the seeds of the workers: else torch's own would go on
        given = self.settings.get("generator")
        if given is not None:
            generator = torch.Generator(given.device)
            generator.set_state(given.get_state())
        beginning = partial(_begin, lent, self.settings.get("worker_init_fn"))
        settings = {**self.settings, "generator": generator, "worker_init_fn": beginning}
        count = self.count if most is None else min(self.count, most)
        loader: DataLoader[Any] = DataLoader(dataset, num_workers=count, **settings, **arguments)
        try:
            return iter(loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise InputError(
                f"the data set goes to the processes that load samples, and cannot be pickled for that: {first_lines(error)}; "
                "define its functions in a module instead of by lambda, or load in this process with workers=0",
                topic="samples",
            ) from error


def _begin(dataset: Any, function: Callable[[int], Any] | None, worker: int) -> None:
    """What a process does before it loads samples."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # torch knows what wraps it, and lets no one change it
    if function is not None:
        function(worker)


def workers_of(loader: DataLoader[Any], count: int | None) -> Workers:
    """The processes of a DataLoader. `count`: their number instead of its own.

    Errors: `InputError` if what its own are prepared by would not be called.
    """
    number = loader.num_workers if count is None else count
    if not number:
        if loader.num_workers and loader.worker_init_fn is not None:
            raise InputError(
                "the DataLoader has a worker_init_fn=, which is not called where samples are loaded without worker processes: "
                "leave out workers=0, or pass a dataset that needs none",
                topic="samples",
            )
        return Workers()
    names = ("worker_init_fn", "multiprocessing_context", "generator", "timeout", "prefetch_factor")
    return Workers(number, {name: getattr(loader, name) for name in names})


def check_loader(loader: DataLoader[Any]) -> None:
    """Raise `InputError` for what decides which samples there are, and cannot be honoured."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise InputError(
            f"a {type(loader).__name__} makes its batches in a way of its own, which cannot be made anew: pass its dataset, or "
            "a DataLoader of torch",
            topic="samples",
        )
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise InputError(
            "the DataLoader has a batch_sampler=, which chooses samples and their order: pass batch_size= instead, and a list "
            "of indices as sampler=, or a torch.utils.data.Subset, for a part of the dataset",
            topic="samples",
        )


class Ordered(Sequence[Any]):
    """Samples of a dataset in an order. `indices`: what the dataset finds them by."""

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        self.dataset = dataset
        self.indices = indices
        self._fingerprint = getattr(dataset, "_fingerprint", None)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Any) -> Any:
        return self.dataset[self.indices[place]]

    @property
    def order(self) -> str:
        """A hash of the indices."""
        return hashlib.sha256("\n".join(repr(index) for index in self.indices).encode()).hexdigest()


def samples_of(loader: DataLoader[Any]) -> Any:
    """The dataset of a DataLoader, which finds samples by indices, or those samples of it that the sampler chooses.

    Errors: `InputError` if another run would not have the same samples in the same order.
    """
    dataset, sampler = loader.dataset, loader.sampler
    if not hasattr(dataset, "__getitem__"):
        raise InputTypeError(f"the dataset of the DataLoader, {type(dataset).__name__}, has no indices", topic="samples")
    indices = _indices_of(sampler)
    is_whole = isinstance(indices, range) and hasattr(dataset, "__len__") and indices == range(len(dataset))
    return dataset if is_whole and not isinstance(dataset, Mapping) else Ordered(dataset, indices)


def _indices_of(sampler: Any) -> Sequence[Any]:
    """The indices that a sampler gives, in their order."""
    name = type(sampler).__name__
    if isinstance(sampler, _RANDOM):
        raise InputError(
            f"the DataLoader takes samples in the order of a {name}, which another run would not repeat: {_A_LIST}",
            topic="samples",
        )
    try:
        if type(sampler) is SequentialSampler:
            return range(len(sampler.data_source))
        length = len(sampler)
    except TypeError as error:
        what = sampler.data_source if type(sampler) is SequentialSampler else sampler
        raise InputTypeError(
            f"the {type(what).__name__} of the DataLoader has no length, and so no known order: {_A_LIST}", topic="samples"
        ) from error
    if isinstance(sampler, range):
        return sampler
    with torch.random.fork_rng(devices=[]):  # samplers may draw numbers
        found, again = (list(islice(iter(sampler), length + 1)) for _ in range(2))
    found, again = ([_plain(index) for index in one] for one in (found, again))
    if found != again:
        raise InputError(f"the {name} of the DataLoader gives another order each time: {_A_LIST}", topic="samples")
    if len(found) != length:
        raise InputError(
            f"the {name} of the DataLoader has a length of {length}, and gives other indices than so many: {_A_LIST}",
            topic="samples",
        )
    if all(type(index) is int and abs(index) < 1 << 62 for index in found):
        return range(length) if found == list(range(length)) else array("q", found)
    return found


def _plain(index: Any) -> Any:
    """An index of a tensor or array as a number of Python."""
    return index.item() if isinstance(index, (torch.Tensor, np.generic)) and index.ndim == 0 else index
