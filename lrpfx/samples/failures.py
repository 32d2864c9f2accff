"""Samples that cannot be explained: a run goes on without them, and says so at its end."""

from collections.abc import Mapping

from lrpfx.errors import InputError, LrpfxWarning

#: How many samples may be loaded and not explained at the beginning before their errors count as one of the settings.
PATIENCE = 32


def none_loaded(number: int, problem: str | None) -> InputError:
    """The error if no sample can be loaded. `number`, `problem`: of the first."""
    return InputError(f"no sample of the data set can be loaded; sample {number}: {problem}", topic="samples")


def warning_of_failures(errors: Mapping[int, str], total: int, holder: str, key: str = "") -> LrpfxWarning:
    """The warning at the end of a run.

    `errors`: reasons by the numbers of samples, of which there are `total`. `holder`: what has the errors. `key`: the name of
    the first of these samples.
    """
    number, reason = next(iter(errors.items()))
    return LrpfxWarning(
        f"{len(errors)} of {total} samples could not be explained; the first is sample {number}{f' ({key})' if key else ''}: "
        f"{reason.rstrip('.')}. {holder}.errors has all, and retry_failed=True tries them again",
        topic="samples",
    )
