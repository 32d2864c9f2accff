"""Interrupts, such as Ctrl-C, that wait while something process-wide is changed, and that leave nothing registered."""

import io
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = tuple(map(int, signal.valid_signals()))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that Python code handles are handled when the context ends. A second one of a kind is handled at once.

    torch patches `nn.Module.__call__` and more while it traces, and an exception at the wrong moment would leave that behind;
    its interpreter takes a lock of tqdm's, which would stay taken.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python handles no signals
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
        finally:  # a handler may raise while others are not back in place
            _install(former)
        for number, frame in waiting.items():
            former[number](number, frame)


def _install(handlers: dict[int, Callable[[int, Any], Any]]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class NativeContext(io.IOBase):
    """A context manager that is left wherever an interrupt comes.

    An `__exit__` in Python can be interrupted before its first line, and then does nothing: that is where a Ctrl-C in the last
    backward of a block arrives. The one of `io.IOBase` is native and calls `close`, here the one of a generator, which is
    resumed within its `try`.
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
