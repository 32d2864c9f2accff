"""Samples that are chosen by their numbers, in batches."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError
from lrpfx.samples.items import is_indexed
from lrpfx.samples.loaders import Workers
from lrpfx.samples.plan import KnownSamples
from lrpfx.samples.preparation import Preparation, Sample, SampleBatch, batched, chunks_of
from lrpfx.samples.sources import IndexedSource, changed, check_unchanged, places_to_compare
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
    """Chooses samples of a dataset."""

    dataset: Any
    preparation: Preparation
    workers: int = 0

    def batches(
        self, samples: Iterable[int] | None, done: Callable[[int], bool], size: int, known: KnownSamples
    ) -> Iterator[SampleBatch]:
        """The wanted samples that are not done, in order. `samples`: their numbers, by default all.

        Errors: `InputError` if one of the `known` ones that are iterated over has changed.
        """
        numbers = itertools.filterfalse(done, numbers_of(self.dataset, samples))
        source = self.source
        loaded = self._iterated(numbers, samples is None, known) if source is None else source.chosen(list(numbers))
        return (batched(0, some) for some in chunks_of(loaded, size))

    @property
    def source(self) -> IndexedSource | None:
        """The dataset, if its samples are found by their numbers."""
        return IndexedSource(self.dataset, self.preparation, Workers(self.workers)) if is_indexed(self.dataset) else None

    def check(self, known: KnownSamples) -> None:
        """Raise `InputError` if a sample that is found by its number has changed. Of many, some are compared at random."""
        source = self.source
        if source is None or not len(known):
            return
        if known.numbers[-1] >= source.length:
            raise changed(int(known.numbers[-1]))
        places = places_to_compare(len(known))
        source.compare(known.numbers[places].tolist(), map(known.__getitem__, places))

    def _iterated(self, numbers: Iterator[int], is_all: bool, known: KnownSamples) -> Iterator[Sample]:
        """The samples with these numbers, which rise. `is_all`: or as many as there are."""
        wanted, number = next(numbers, None), -1
        for number, item in enumerate(self.dataset):
            if wanted is None:
                return
            before = known.at(number)
            if before is not None:
                check_unchanged(self._sample(number, item), before)
            if number == wanted:
                yield self._sample(number, item)
                wanted = next(numbers, None)
        if is_all and len(known) and known.numbers[-1] > number:
            raise changed(int(known.numbers[-1]))
        if wanted is not None and not is_all:
            raise InputError(f"sample {wanted} is out of range: the dataset has {number + 1}", topic="samples")

    def _sample(self, number: int, item: Any) -> Sample:
        return self.preparation.sample(number, lambda: item)
