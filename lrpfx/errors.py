"""The errors and warnings of lrpfx, and helpers for their messages."""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: The address of the documentation, without a slash at the end.
DOCUMENTATION = "https://lrpfx.readthedocs.io/en/stable"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, which Python shows below its message from 3.11 on."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def address(topic: str) -> str:
    """The address of the section of Troubleshooting about a topic."""
    return f"{DOCUMENTATION}/troubleshooting.html#{topic}"


class _Explained(BaseException):
    """Has a topic, which is a section of Troubleshooting. Names that a message quotes are shown without control codes."""

    topic: str

    def __init__(self, *args: object, topic: str | None = None) -> None:
        super().__init__(*args)
        if topic is not None:
            self.topic = topic

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def help(self) -> str:
        """The address of the section of Troubleshooting about this: what it means, and what to do."""
        return address(self.topic)


class LrpfxError(_Explained, Exception):
    """Base of all errors that lrpfx raises deliberately."""

    topic = "defects"


class InputError(LrpfxError, ValueError):
    """A value given to lrpfx has the wrong shape, range, dtype or name."""

    topic = "arguments"


class InputTypeError(InputError, TypeError):
    """A value given to lrpfx has the wrong type."""


class CaptureError(LrpfxError):
    """A model could not be turned into an equivalent graph."""

    topic = "untraceable-forward"


class UnsupportedOperationError(LrpfxError):
    """Operations of the graph have no rule, are not neutral, and were not allowed to keep their gradient."""

    topic = "operation-without-a-rule"


class RuleError(LrpfxError, RuntimeError):
    """A rule does not fit its layer."""

    topic = "rule-does-not-fit"


class PassError(LrpfxError):
    """A pass left a malformed graph, which is a defect of the pass."""


class LoweringError(LrpfxError):
    """The module cannot be turned into a plain inference program, or the program differs from it."""

    topic = "lowering"


class ArtefactError(LrpfxError):
    """A program file cannot be written, is damaged, or was not written by lrpfx."""

    topic = "refused-files"


class VerificationError(LrpfxError):
    """A captured or rewritten graph does not compute the same as the source model."""

    topic = "graph-differs"


class LrpfxWarning(_Explained, UserWarning):
    """Something is valid but probably unintended."""

    topic = "implausible-relevance"


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that suggests the known name closest to an unknown one, or an empty string."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


@contextmanager
def os_errors(kind: type[LrpfxError], path: Path, what: str) -> Iterator[None]:
    """Turn an `OSError` into an error of class `kind`: the path cannot be `what`, such as "read"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} cannot be {what}: {error.strerror or error}", topic="files-and-folders") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or another runtime, of any class, reports that memory ran out."""
    return re.search(r"(not enough|allocate) memory|[Ff]ailed to allocate|bad_alloc", str(error)) is not None


#: Characters without a shape that join others, as in emoji and in the scripts of India.
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """The text with escapes for control characters and characters that a terminal cannot show or that change its direction."""
    return "".join(one if one.isprintable() or one in f"\n{_JOINERS}" else f"\\x{ord(one):02x}" for one in text)


def first_lines(error: BaseException, lines: int = 2) -> str:
    """The class of a foreign error and the first lines of its message: those of torch can fill pages."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:lines])
    return f"{type(error).__name__}: {text if len(text) <= 400 else text[:400] + ' ...'}"
