"""What runs over the blocks of a data set. The engine of this process: batch by batch, with a thread that writes."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from lrpfx.datasets.block_explainer import BlockExplainer
from lrpfx.datasets.sample_explainer import SampleExplainer
from lrpfx.datasets.store import BlockWriter
from lrpfx.samples.plan import BlockPlan
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
        explainer, pending = BlockExplainer(work.explainer, work.writer), deque[Future[None]]()
        # closed or left by an error, it waits for the blocks that are being written
        with closing(work.source.batches(work.plan)) as batches, ThreadPoolExecutor(1, "lrpfx-writer") as thread:
            for samples, rows in explainer.blocks(batches):
                while pending and (pending[0].done() or len(pending) > _WAITING):
                    pending.popleft().result()
                if rows is not None:
                    pending.append(thread.submit(work.writer.write, rows.block, rows.arrays))
                yield Step(samples, explainer.objection)
                explainer.objection = None
            for one in pending:
                one.result()
