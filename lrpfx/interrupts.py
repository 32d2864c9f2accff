"""Interrupts, such as Ctrl-C, that wait while something process-wide is changed."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that Python code handles are handled when the context ends. A second one of a kind is handled at once.

    torch patches `nn.Module.__call__` and more while it traces, and an exception at the wrong moment would leave that behind.
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
        for number in signal.valid_signals():
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
