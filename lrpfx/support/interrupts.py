"""Delay interrupts such as Ctrl-C during process-wide changes, and leave nothing registered after them."""

import gc
import io
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = tuple(map(int, signal.valid_signals()))
_NEVER = 2**31 - 1  # rounds of middle-aged objects before one of all


_TRACING = threading.RLock()


@contextmanager
def tracing() -> Iterator[None]:
    """Let one thread at a time trace a model, whichever of torch's tracers it uses: they patch, and mark, the whole process."""
    with _TRACING:
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals with a Python handler until the context ends. A second signal of the same kind is handled at once.

    torch patches `nn.Module.__call__` and more while it traces, and its interpreter takes a lock of tqdm. An exception at the
    wrong moment would leave the patches in place and the lock taken.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles no signals there
        yield
        return
    former: dict[int, Callable[[int, Any], Any]] = {}
    waiting: dict[int, Any] = {}

    def wait(number: int, frame: Any) -> None:
        if number in waiting:
            former[number](number, frame)
        waiting[number] = frame

    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                former[number] = handler
                signal.signal(number, wait)
        yield
    finally:
        try:
            _install(former)
        finally:  # a handler may raise before the others are restored
            _install(former)
        for number, frame in waiting.items():
            former[number](number, frame)


def _install(handlers: dict[int, Callable[[int, Any], Any]]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def young_collections() -> Iterator[None]:
    """Let Python's cyclic garbage collector visit young objects alone until the context ends.

    A compilation makes so many objects that all objects of the process are visited again and again: a sixth of its time. Where
    another thread is in this context, it ends it.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        if before[2] != _NEVER:
            gc.set_threshold(*before)


class NativeContext(io.IOBase):
    """A context manager whose exit runs wherever an interrupt occurs.

    An `__exit__` in Python can be interrupted before its first line and then does nothing; a Ctrl-C in the last backward of a
    block arrives exactly there. `io.IOBase.__exit__` is native and calls `close`, here that of a generator, which resumes
    within its `try`.
    """

    @abstractmethod
    def entered(self) -> Generator[Any, None, None]:
        """Yields the value of the context, within `try: ... finally: ...` that ends it."""

    def __enter__(self) -> Any:
        generator = self.entered()
        self.close = generator.close  # type: ignore[method-assign]  # for this instance: what __exit__ calls
        try:
            return next(generator)
        except BaseException:
            generator.close()
            raise
