"""One thread that writes blocks while the next ones are computed."""

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lrpfx.datasets.layout import Array
from lrpfx.datasets.store import BlockWriter

_WAITING = 2  # blocks in memory besides the one that is computed and the one that is written


@dataclass(frozen=True)
class _Block:
    number: int
    rows: Mapping[str, Array]
    digest: int


class WriterThread:
    """Writes blocks in the order in which they come. An error of a write is raised by the next call, and nothing follows it."""

    def __init__(self, writer: BlockWriter) -> None:
        self.writer = writer
        self._queue: queue.Queue[_Block | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lrpfx-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Wait until all that was given is written."""
        self._queue.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def write(self, block: int, rows: Mapping[str, Array], digest: int) -> None:
        """Have a block written. It waits while others do."""
        self._raise()
        self._queue.put(_Block(block, rows, digest))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (block := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self.writer.write(block.number, block.rows, block.digest)
                except BaseException as error:
                    self._error = error
