"""`python -m lrpfx`, which is the installed command too."""

import atexit
import os
import sys
from contextlib import suppress

#: The exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130

#: The commands that keep what an interrupted run has written, and go on from there.
_RESUMING = {"explain", "run"}


def main() -> None:
    """Runs the command line; an interrupt is a message from the first import on."""
    ended: list[int] = []
    # Python kills itself with the signal instead if the interrupt arrived while it executed code that it had made from a text.
    # What is registered first runs last.
    atexit.register(_end, ended)
    try:
        from lrpfx.command_line.application import main as run

        run()
    except KeyboardInterrupt:
        ended.append(INTERRUPTED)
        resumes = ". What was written stays; the same command goes on from there" if set(sys.argv[1:2]) & _RESUMING else ""
        with suppress(OSError):
            print(f"interrupted{resumes}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _end(status: list[int]) -> None:
    if status:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # it is closed
                stream.flush()
        os._exit(status[0])


if __name__ == "__main__":
    main()
