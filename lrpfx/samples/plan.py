"""What of a data set is done, and what remains to be done."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The label of a sample without one.
NO_LABEL = -1


class KnownSample(NamedTuple):
    """What is known of a sample that is done: its digest, 0 if it may have changed, and its label, None if that may have."""

    digest: int
    label: int | None


@dataclass(frozen=True, eq=False)
class KnownSamples:
    """What is known of some samples: their numbers, which rise, and the digest and the label of each."""

    numbers: NDArray[np.int64]
    digests: NDArray[np.uint64]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: Sequence[int], known: Sequence[KnownSample]) -> "KnownSamples":
        """What is known of samples in any order."""
        digests, labels = ([one[place] for one in known] for place in range(2))
        return cls(np.array(numbers, np.int64), np.array(digests, np.uint64), np.array(labels, np.int64))._in_order()

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, number: int) -> bool:
        return self.at(number) is not None

    def at(self, number: int) -> KnownSample | None:
        """What is known of the sample with a number, or None."""
        place = bisect_left(self.numbers, number)
        if place == len(self) or self.numbers[place] != number:
            return None
        return self[place]

    def __getitem__(self, place: int) -> KnownSample:
        return KnownSample(int(self.digests[place]), int(self.labels[place]))

    def united(self, other: "KnownSamples") -> "KnownSamples":
        """Both together."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("numbers", "digests", "labels"))
        both = KnownSamples(*map(np.concatenate, pairs))
        is_behind = not len(self) or not len(other) or self.numbers[-1] < other.numbers[0]
        return both if is_behind else both._in_order()

    def _in_order(self) -> "KnownSamples":
        order = self.numbers.argsort(kind="stable")
        return KnownSamples(self.numbers[order], self.digests[order], self.labels[order])


@dataclass(frozen=True)
class DoneBlocks:
    """What is done of a store.

    `counts`: the samples of each block that is done, or 0, up to the last that is. `digests`: of the samples of such a block, 0
    where one was not explained, which may have changed. `labels`: theirs, -1 without one; None if labels are not compared.
    """

    counts: list[int]
    digests: Callable[[int], NDArray[np.uint64]]
    labels: Callable[[int], NDArray[np.int64]] | None = None

    def known(self, block: int) -> list[KnownSample]:
        """What is known of the samples of a block that is done."""
        digests = self.digests(block).tolist()
        labels = [None] * len(digests) if self.labels is None else self.labels(block).tolist()
        return list(map(KnownSample, digests, labels))

    @property
    def blocks(self) -> list[int]:
        """The blocks that are done."""
        return [block for block, count in enumerate(self.counts) if count]


@dataclass(frozen=True)
class BlockPlan:
    """What remains to be done of a store.

    `block`: how many samples each of its blocks has. `samples`: those of a stream that was read to its end before.
    `compares_all`: whether all samples that are done are compared with those of the data set, and not some.
    """

    block: int
    batch_size: int
    done: DoneBlocks
    samples: int | None = None
    compares_all: bool = False

    def size_of(self, block: int) -> int:
        """The samples that a block has, at most as far as is known."""
        return samples_in(block, self.block, self.samples)

    def pending(self, length: int) -> list[int]:
        """The blocks that are not done."""
        done = self.done.counts
        return [block for block in range(-(-length // self.block)) if block >= len(done) or not done[block]]


def samples_in(block: int, size: int, samples: int | None) -> int:
    """How many of all `samples` a block has: `size` if it is full, and also if the number of all is not known."""
    return size if samples is None else max(0, min(size, samples - block * size))
