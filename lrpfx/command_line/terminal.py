"""What the commands print: tables, messages, and the stages of their work."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lrpfx.errors import printable

#: Seconds after which a stage leaves a line.
_LONG = 1.0


def output() -> Console:
    """The terminal for results."""
    return Console(highlight=False)


def messages() -> Console:
    """The terminal for progress and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line of results."""
    output().print(printable(text), markup=False, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], header: bool = True) -> Table:
    """A table without lines. Cells are plain text."""
    drawn = Table(*columns, show_header=header, box=None, pad_edge=False)
    for row in rows:
        drawn.add_row(*(escape(printable(text)) for text in row))
    return drawn


class Stages(logging.Handler):
    """Shows the current stage of the work, and leaves a line for each stage that took a second or more.

    As a handler of logs it begins a stage with each message.
    """

    def __init__(self, progress: Progress, first: str, total: int | None) -> None:
        super().__init__(logging.INFO)
        self.progress = progress
        self.task = progress.add_task(escape(first), total=total)
        self.name_of_stage, self.began = first, time.monotonic()

    def begin(self, stage: str) -> None:
        """End the current stage, and begin another."""
        self.end()
        self.name_of_stage, self.began = printable(stage), time.monotonic()
        self.progress.update(self.task, description=escape(self.name_of_stage))

    def end(self) -> None:
        """End the current stage."""
        seconds = time.monotonic() - self.began
        if seconds >= _LONG and self.name_of_stage:
            self.progress.console.print(f"{self.name_of_stage}: {seconds:.1f} s", markup=False)
        self.name_of_stage = ""

    def advance(self, count: int = 1) -> None:
        """Count items that are done."""
        self.progress.advance(self.task, count)

    def emit(self, record: logging.LogRecord) -> None:
        self.begin(record.getMessage())


@contextmanager
def stages(first: str, total: int | None = None) -> Iterator[Stages]:
    """A context in which the terminal shows the stages that lrpfx logs. `total`: the number of items, if they are counted."""
    bar: list[ProgressColumn] = [] if total is None else [BarColumn(), MofNCompleteColumn()]
    columns = [SpinnerColumn(), TextColumn("{task.description}"), *bar, TimeElapsedColumn()]
    logger = logging.getLogger("lrpfx")
    level = logger.level
    console = messages()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        shown = Stages(progress, first, total)
        logger.addHandler(shown)
        logger.setLevel(logging.INFO)
        try:
            yield shown
            shown.end()
        finally:
            logger.removeHandler(shown)
            logger.setLevel(level)
