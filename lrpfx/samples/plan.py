"""What of a data set is done, and what remains to be done."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DoneBlocks:
    """What is done of a store.

    `counts`: the samples of each block that is done, or 0, up to the last that is. `digests`: of the samples of such a block, 0
    where one could not be loaded.
    """

    counts: list[int]
    digests: Callable[[int], NDArray[np.uint64]]

    @property
    def blocks(self) -> list[int]:
        """The blocks that are done."""
        return [block for block, count in enumerate(self.counts) if count]


@dataclass(frozen=True)
class BlockPlan:
    """What remains to be done of a store.

    `block`: how many samples each of its blocks has. `samples`: those of a stream that was read to its end before.
    """

    block: int
    batch_size: int
    done: DoneBlocks
    samples: int | None = None

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
