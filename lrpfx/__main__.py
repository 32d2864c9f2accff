"""`python -m lrpfx`, which is the installed command too."""

import atexit
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

#: Threads of OpenMP sleep while they have no work, unless the user decides. By default they keep asking for some, which takes
#: the processor from others: explaining one photograph beside other processes then takes three times the time of the processor.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}

#: The exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130

#: The commands that keep what an interrupted run has written, and go on from there.
_RESUMING = {"dataset", "explain", "run"}


def main() -> None:
    """Runs the command line; an interrupt is a message from the first import on."""
    for variable, value in WAITING.items():  # which torch reads when it is imported
        os.environ.setdefault(variable, value)
    status: list[int] = []
    atexit.register(_end, status)  # it runs last, since it is registered first
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    ignored = sys.unraisablehook

    def again(unraisable: Any) -> None:
        """Interrupts once more after Python ignored an interrupt, as it does in finalizers, which cannot raise."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()
        else:
            ignored(unraisable)

    try:
        sys.unraisablehook = again
        signal.signal(signal.SIGINT, interrupt)
        gc.disable()  # imports make many objects and no garbage
        try:
            from lrpfx.command_line.application import main as run
        finally:
            gc.freeze()
            gc.enable()
            if interrupts:  # also if a module that was imported took the exception for an error of its own
                raise KeyboardInterrupt
        run()
    except SystemExit as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status.append(error.code if isinstance(error.code, int) else 2)
        raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status.append(INTERRUPTED)
        resumes = ". What was written stays; the same command goes on from there" if set(sys.argv[1:2]) & _RESUMING else ""
        with suppress(OSError):
            print(f"interrupted{resumes}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _end(status: list[int]) -> None:
    """End the process at once: Python takes seconds to free all modules, and would die of an interrupt meanwhile."""
    if status:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # it is closed
                stream.flush()
        os._exit(status[0])


if __name__ == "__main__":
    main()
