"""Samples that are chosen by their numbers, in batches."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError
from lrpfx.samples.items import is_indexed
from lrpfx.samples.loaders import Workers
from lrpfx.samples.plan import KnownSample
from lrpfx.samples.preparation import Preparation, Sample, SampleBatch, batched, chunks_of
from lrpfx.samples.sources import IndexedSource, changed, check_unchanged
from lrpfx.support.numbers import is_whole


def numbers_of(dataset: Any, samples: Iterable[int] | None) -> Iterable[int]:
    """The numbers of the wanted samples of a dataset, which rise."""
    count = len(dataset) if is_indexed(dataset) else None
    if samples is None:
        return itertools.count() if count is None else range(count)
    return checked_numbers(samples, count)


def checked_numbers(samples: Any, count: int | None) -> list[int]:
    """The numbers of some of `count` samples, in rising order. `InputError` for others and for repetitions."""
    if not isinstance(samples, Iterable):
        raise InputTypeError(
            f"samples are the numbers of several samples, such as range(100), not {samples!r}", topic="samples"
        )
    found = samples.tolist() if isinstance(samples, (torch.Tensor, np.ndarray)) else list(samples)
    if not all(is_whole(one) and one >= 0 for one in found):
        raise InputTypeError("samples are the numbers of samples, from 0", topic="samples")
    if count is not None and found and max(found) >= count:
        raise InputError(f"sample {max(found)} is out of range: there are {count}", topic="samples")
    if len(set(found)) < len(found):
        raise InputError("a sample would count twice: its number is given twice", topic="samples")
    return sorted(map(int, found))


@dataclass(frozen=True)
class SampleSelection:
    """Chooses samples of a dataset. `probes`: what is known of some that are iterated over, by number."""

    dataset: Any
    preparation: Preparation
    workers: int = 0

    def batches(
        self, samples: Iterable[int] | None, done: Callable[[int], bool], size: int, probes: Mapping[int, KnownSample]
    ) -> Iterator[SampleBatch]:
        """The wanted samples that are not done, in order. `samples`: their numbers, by default all."""
        numbers = itertools.filterfalse(done, numbers_of(self.dataset, samples))
        if is_indexed(self.dataset):
            loaded: Iterator[Sample] = IndexedSource(self.dataset, self.preparation, Workers(self.workers)).chosen(
                list(numbers)
            )
        else:
            loaded = self._iterated(numbers, samples is None, probes)
        return (batched(0, some) for some in chunks_of(loaded, size))

    def check(self, probes: Mapping[int, KnownSample]) -> None:
        """Raise `InputError` unless samples that are found by their numbers are what they were before."""
        for number in probes if is_indexed(self.dataset) else ():
            if number >= len(self.dataset):
                raise changed(number)
            sample = self.preparation.sample(number, partial(self.dataset.__getitem__, number))
            check_unchanged(sample, probes[number])

    def _iterated(self, numbers: Iterator[int], is_all: bool, probes: Mapping[int, KnownSample]) -> Iterator[Sample]:
        """The samples with these numbers, which rise. `is_all`: or as many as there are."""
        wanted, number = next(numbers, None), -1
        for number, item in enumerate(self.dataset):
            if wanted is None:
                return
            if number in probes:
                check_unchanged(self._sample(number, item), probes[number])
            if number == wanted:
                yield self._sample(number, item)
                wanted = next(numbers, None)
        if wanted is not None and not is_all:
            raise InputError(f"sample {wanted} is out of range: the dataset has {number + 1}", topic="samples")

    def _sample(self, number: int, item: Any) -> Sample:
        return self.preparation.sample(number, lambda: item)
