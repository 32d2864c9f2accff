"""Requests that wait, and the one thread that computes them in batches."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import anyio
import torch

from lrpfx.serve.metrics import Metrics
from lrpfx.serve.programs import Outcome, ServedProgram, Tensors, rows_of
from lrpfx.serve.refusals import RequestError, refusal_of
from lrpfx.serve.settings import Settings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its results since a time of the event loop."""

    program: ServedProgram
    arguments: Tensors
    results: "asyncio.Future[dict[str, torch.Tensor]]"
    since: float

    @property
    def rows(self) -> int:
        return rows_of(self.arguments)

    def fits(self, other: "_Waiting") -> bool:
        """Whether the two can be computed together: arrays have the same sizes except for their rows."""
        return self.program is other.program and all(
            value.shape[1:] == other.arguments[name].shape[1:] for name, value in self.arguments.items()
        )


class Batches:
    """The queue of a server, and the thread that runs its programs. All methods belong to one event loop.

    The request that waits longest decides the program and the sizes of the next batch. It waits at most `max_delay` seconds for
    others; requests that arrive while another batch is computed are computed together anyway.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "lrpfx-programs")

    async def results(self, program: ServedProgram, arguments: Tensors) -> dict[str, torch.Tensor]:
        """The results for arguments that were checked. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        request = _Waiting(program, arguments, loop.create_future(), loop.time())
        self.waiting.append(request)
        self._arrived.set()
        return await request.results

    async def in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        """What a function returns in the thread that runs the programs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def compute(self) -> None:
        """Compute batches until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            program, started = batch[0].program, loop.time()
            outcomes: list[Outcome]
            try:
                outcomes = await self.in_thread(program.computed, [request.arguments for request in batch])
            except Exception as error:  # a defect costs the batch, not the server
                logger.exception("a batch of %s failed", program.name)
                outcomes = [refusal_of(error) for _ in batch]
            self.metrics.batch(program.name, sum(request.rows for request in batch), loop.time() - started)
            for request, outcome in zip(batch, outcomes, strict=True):
                if request.results.done():  # its client has been told that it took too long
                    continue
                if isinstance(outcome, RequestError):
                    request.results.set_exception(outcome)
                else:
                    request.results.set_result(outcome)
            del batch, outcomes, request, outcome  # the next batch may be long in coming

    async def _next_batch(self) -> list[_Waiting]:
        loop = asyncio.get_running_loop()
        while True:
            self._arrived.clear()
            self.waiting = deque(request for request in self.waiting if not request.results.done())
            batch = self._batch()
            if batch:
                left = batch[0].since + self.settings.max_delay - loop.time()
                full = sum(request.rows for request in batch) >= batch[0].program.max_batch
                if full or left <= 0 or not batch[0].program.joins:
                    chosen = set(batch)
                    self.waiting = deque(request for request in self.waiting if request not in chosen)
                    return batch
            with anyio.move_on_after(left if batch else None):
                await self._arrived.wait()

    def _batch(self) -> list[_Waiting]:
        """The request that waits longest, and those after it that fit, in order, as long as there are rows left."""
        batch: list[_Waiting] = list(self.waiting)[:1]
        if not batch or not batch[0].program.joins:
            return batch
        left = batch[0].program.max_batch - batch[0].rows
        for request in list(self.waiting)[1:]:
            if request.fits(batch[0]):
                if request.rows > left:
                    break
                batch.append(request)
                left -= request.rows
        return batch

    def close(self) -> None:
        """End the thread after the batch that it computes."""
        self._thread.shutdown(wait=True, cancel_futures=True)
