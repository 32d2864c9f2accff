"""What the commands print: tables, messages, and the stages of their work."""

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from lrpfx.errors import InputError, os_errors, printable
from lrpfx.explanation.doors import OTHERS

#: Seconds after which a stage leaves a line.
_LONG = 1.0

#: The width of tables in a file or a pipe: nothing in them is cut.
_WIDE = 100_000

#: The compiler's stages in plain words.
STAGES = {
    "capture": "tracing the model",
    "normalize": "bringing operations into standard form",
    "canonize": "merging layers",
    "assign": "choosing rules",
    "validate": "checking rules",
    "analyze": "finding signs and zeros",
    "rewrite": "writing rules into the graph",
    "fold": "computing what is constant",
    "fuse": "joining the operations of attention",
    "lower": "writing the backward pass",
    "legalize": "choosing operators of the file's format",
}

#: Arguments of Python that are options of the command line, where their names differ by more than dashes.
_OPTIONS = {"targets": "--target", "preprocess": "--mean and --std", "example_inputs": "--shape"}
_ARGUMENTS = (
    "categories|composite|target|targets|record|reduce|batch_size|preprocess|example_inputs|input_range|form|names|channels"
)
#: What stands there in place of `OTHERS`.
_OTHERS = (
    "--form table, series or volume says what an array is; sounds are .wav, volumes .nii, and several inputs .npz with the "
    "names of the model's arguments"
)


def in_options(message: str) -> str:
    """The message of an error with options of the command line in place of the arguments of Python that it speaks of."""
    message = re.sub(r"lrpfx\.lower\(\.\.\., (\w+=[^)]*)\)", r"lrpfx export \1", message)
    message = message.replace("allow_native=False refuses such files", "such files are loaded with --allow-native alone")
    message = re.sub(
        r"target is \((position|node), class\)",
        lambda found: f"target is --target {found[1].upper()},CLASS; in Python ({found[1]}, class)",
        message,
    )
    message = message.replace(OTHERS, _OTHERS).replace(", or let preprocess= do it", "").replace(", or pass preprocess=", "")
    message = message.replace("pass preprocess=, a function", "in Python, lrpfx.explain(..., preprocess=) takes a function")
    message = re.sub("pass example_inputs=?( to lrpfx.transform)?", "pass example_inputs=", message)
    parts = re.split(r"(lrpfx\.\w+\([^)]*\)|targets=\[\([^)]*\)\])", message)  # calls stay as they are
    parts[::2] = [re.sub(rf"(?<![\w-])({_ARGUMENTS})=(['\"]\w+['\"]|\[[^]]*\])?", _option, part) for part in parts[::2]]
    return "".join(parts)


def _option(found: re.Match[str]) -> str:
    name, value = found[1], re.sub(r"[][',\"]", "", found[2] or "")
    return f"{_OPTIONS.get(name) or '--' + name.replace('_', '-')} {value}".strip()


def output() -> Console:
    """The terminal for results."""
    console = Console(file=_RESULTS.get(), highlight=False, emoji=False)
    return console if console.is_terminal else Console(file=console.file, highlight=False, emoji=False, width=_WIDE)


def messages() -> Console:
    """The terminal for progress and errors."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


#: Whether results are printed as JSON, by `say_data`, and not as text.
_AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)

#: Where results are printed; None for the standard output.
_RESULTS: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextmanager
def results_alone(as_json: bool = False) -> Iterator[None]:
    """A context in which the standard output has results only, if wanted as JSON.

    What models and libraries print meanwhile, compiled ones too, goes to the standard error.
    """
    with _stream_of_results() as stream, redirect_stdout(sys.stderr):
        forms, streams = _AS_JSON.set(as_json), _RESULTS.set(stream)
        try:
            yield
        finally:
            _AS_JSON.reset(forms)
            _RESULTS.reset(streams)


@contextmanager
def _stream_of_results() -> Iterator[TextIO]:
    """The standard output. If it is that of the process, the process prints to the standard error meanwhile."""
    try:
        descriptors = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # it is closed, or of a caller in this process
        descriptors = -1, -1
    if descriptors != (1, 2):
        yield sys.stdout
        return
    sys.stdout.flush()
    copy = os.dup(1)
    try:
        with open(os.dup(copy), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as stream:
            os.dup2(2, 1)
            yield stream
    finally:
        os.dup2(copy, 1)
        os.close(copy)


def end_results() -> None:
    """Nothing that is printed from now on is a result: what a model's code prints while the process ends."""
    sys.stdout = sys.stderr


def say_data(results: Any) -> None:
    """Print the results of a command as JSON, if that is wanted. Numbers that are not finite are null."""
    if _AS_JSON.get():
        text = json.dumps(_plain(results), indent=2, allow_nan=False)
        with _on_stdout():
            print(text, file=_RESULTS.get(), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):  # of NumPy and torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def say(text: str, markup: bool = False) -> None:
    """Print a line of results. `markup`: whether the text has styles of rich, and no foreign parts."""
    if _AS_JSON.get():
        return
    with _on_stdout():
        output().print(text if markup else printable(text), markup=markup, soft_wrap=True)


def say_table(columns: Sequence[str], rows: Iterable[Sequence[str]], header: bool = True) -> None:
    """Print a table of results without lines. Cells are plain text; words that are too long for the terminal are folded."""
    if _AS_JSON.get():
        return
    drawn = Table(show_header=header, box=None, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(printable(text)) for text in row))
    with _on_stdout():
        output().print(drawn)


def _on_stdout() -> AbstractContextManager[None]:
    return os_errors(InputError, Path("the standard output"), "written to")


class Stages(logging.Handler):
    """Shows the current stage of the work, and leaves a line for each stage that took a second or more.

    As a handler of logs it begins a stage with each message, except with those that report something else.
    """

    def __init__(self, progress: Progress, first: str, total: int | None) -> None:
        super().__init__(logging.INFO)
        self.progress = progress
        self.task = progress.add_task(escape(first), total=total)
        self.name_of_stage, self.began = first, time.monotonic()

    def begin(self, stage: str) -> None:
        """End the current stage, and begin another, unless it is the same."""
        if stage == self.name_of_stage:
            return
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

    def report(self, done: int, total: int | None) -> None:
        """Say how many items are done, of how many if that is known."""
        self.progress.update(self.task, completed=done, total=total)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "lrpfx.passes.driver":  # a pass, of which a stage has several
            stage = record.getMessage().partition(" ")[0].lower()
            self.begin(STAGES.get(stage, stage))
        elif record.name != "lrpfx.frontends.capture":  # why a front end failed
            self.begin(record.getMessage())


@contextmanager
def stages(first: str, total: int | None = None) -> Iterator[Stages]:
    """A context in which the terminal shows the stages that lrpfx logs. `total`: the number of items, if they are counted."""
    bar: list[ProgressColumn] = [] if total is None else [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
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
