"""What runs over the blocks of a data set. The engine of this process: batch by batch, with a thread that writes."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from lrpfx.datasets.block_explainer import BlockExplainer, BlockRows
from lrpfx.datasets.sample_explainer import SampleExplainer
from lrpfx.datasets.store import BlockWriter
from lrpfx.samples.plan import BlockPlan
from lrpfx.samples.preparation import SampleBatch
from lrpfx.samples.sources import SampleSource

_WAITING = 2  # blocks in memory besides the one that is computed and the one that is written


@dataclass(frozen=True)
class Work:
    """What is to be done: the samples of a source whose blocks are not in a store yet."""

    source: SampleSource
    plan: BlockPlan
    explainer: SampleExplainer
    writer: BlockWriter


@dataclass(frozen=True)
class Step:
    """So many samples more are explained. `objection`: to the first maps of a process, if they are implausible."""

    samples: int
    objection: str | None = None


class Engine(ABC):
    """A way to run over the blocks of a data set."""

    @abstractmethod
    def check(self, source: SampleSource) -> None:
        """Raise `InputError` unless the engine can be had, and takes samples from such a source."""

    @abstractmethod
    def steps(self, work: Work) -> Generator[Step]:
        """Explain and write all blocks that are not done. What is done is in the store when the iterator is closed."""


class EmbeddedEngine(Engine):
    """The engine of this process."""

    def check(self, source: SampleSource) -> None:
        pass  # it takes all

    def steps(self, work: Work) -> Generator[Step]:
        yield from written(work.source.batches(work.plan), work.explainer, work.writer)


def written(
    batches: Generator[SampleBatch],
    explainer: SampleExplainer,
    writer: BlockWriter,
    note: Callable[[int, int], None] | None = None,
) -> Generator[Step]:
    """Explain batches in this process, and write their blocks. `note`: takes a block that is written, and its samples."""
    blocks, pending = BlockExplainer(explainer, writer), deque[Future[None]]()

    def write(rows: BlockRows) -> None:
        writer.write(rows.block, rows.arrays)
        if note is not None:
            note(rows.block, rows.count)

    # closed or left by an error, it waits for the blocks that are being written
    with closing(batches), ThreadPoolExecutor(1, "lrpfx-writer") as thread:
        for samples, rows in blocks.blocks(batches):
            while pending and (pending[0].done() or len(pending) > _WAITING):
                pending.popleft().result()
            if rows is not None:
                pending.append(thread.submit(write, rows))
            yield Step(samples, blocks.objection)
            blocks.objection = None
        for one in pending:
            one.result()
