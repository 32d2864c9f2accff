"""The family of errors and warnings that lrpfx raises, and what their messages have in common."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class LrpfxError(Exception):
    """Base of every error that lrpfx raises on purpose."""


class InputError(LrpfxError, ValueError):
    """A value given to lrpfx has the wrong shape, range, dtype or name."""


class InputTypeError(InputError, TypeError):
    """A value given to lrpfx has the wrong type."""


class CaptureError(LrpfxError):
    """A model could not be turned into a graph that means the same."""


class UnsupportedOperationError(LrpfxError):
    """Operations of the graph have no rule, are not neutral, and were not allowed to keep their gradient."""


class RuleError(LrpfxError, RuntimeError):
    """A rule does not fit the layer that it was given to."""


class PassError(LrpfxError):
    """A pass left a graph that is not well formed, which is a defect of the pass."""


class LoweringError(LrpfxError):
    """The module cannot be turned into a plain inference program, or the program computes something else."""


class ArtefactError(LrpfxError):
    """A file with a program cannot be written, or is damaged, or was not written by lrpfx."""


class VerificationError(LrpfxError):
    """A captured or rewritten graph does not compute what the source model computes."""


class LrpfxWarning(UserWarning):
    """Something is legal but probably not what the user meant."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that asks for the known name which is most like one that is not known, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


@contextmanager
def os_errors(kind: type[LrpfxError], path: Path, what: str) -> Iterator[None]:
    """What the operating system refuses, as an error of a kind of ours: the path cannot be `what`, such as "read"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} cannot be {what}: {error.strerror or error}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch's or of a runtime's says that there is no memory, of whatever kind it is."""
    return re.search(r"(not enough|allocate) memory|[Ff]ailed to allocate|bad_alloc", str(error)) is not None


def printable(text: str) -> str:
    """The text with escapes for what a terminal would act on, or cannot show."""
    return "".join(one if one.isprintable() or one == "\n" else f"\\x{ord(one):02x}" for one in text)


def first_lines(error: BaseException, lines: int = 2) -> str:
    """The kind of an error of others and what it says first: torch's own go on for pages."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:lines])
    return f"{type(error).__name__}: {text if len(text) <= 400 else text[:400] + ' ...'}"
