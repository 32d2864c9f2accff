"""Runs that can be stopped, even killed, and go on: one writer at a time, and the same question and data as before."""

import errno
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lrpfx.errors import ArtefactError, InputError, LrpfxWarning, os_errors

#: Errors of file systems without locks.
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}

_SHORT = 60  # characters of a value that an error shows


@contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """A context in which no other run writes to a file or folder, whose parents are made if need be.

    The lock is a file beside the target, which is removed afterwards. It ends with this process, whatever processes it has
    started. On a file system without locks there is an `LrpfxWarning` in its place. Errors: `InputError` if another run writes
    there, `ArtefactError` without access.
    """
    target = Path(os.path.realpath(target))  # a link to the target leads to the same lock
    path = target.with_name(f".{target.name}.lrpfx-lock")
    # a soft lock, the file alone, would outlive a run that is killed on another machine
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    with os_errors(ArtefactError, target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise InputError(
                f"another run writes to {target}: wait until it has ended, or give another path", topic="files-and-folders"
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            warnings.warn(
                LrpfxWarning(
                    f"{target} is on a file system without locks: make sure that no other run writes there",
                    topic="files-and-folders",
                ),
                stacklevel=4,
            )
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()


def check_same_run(
    target: Any, ours: Mapping[str, Any], theirs: Mapping[str, Any], remedy: str = "give another output, or remove it"
) -> None:
    """Raise `InputError`, which names what differs, unless a run has the facts with which its target was begun: plain data."""
    found = differences(ours, theirs)
    if found:
        raise InputError(f"{target} was begun with other {'; '.join(found)}: {remedy}", topic="changed-data")


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of the facts that differ, with both values where they are short."""
    found = []
    for name in dict.fromkeys((*ours, *theirs)):
        before, now = theirs.get(name), ours.get(name)
        if before != now:
            is_short = max(len(repr(before)), len(repr(now))) < _SHORT
            found.append(f"{name} (it was {before!r}, and is {now!r} now)" if is_short else name)
    return found
