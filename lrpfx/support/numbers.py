"""Checks of numbers."""

import math
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from lrpfx.errors import InputError, InputTypeError


def finite_number(name: str, value: Any, least: float = -math.inf) -> float:
    """A finite number, at least `least`, as a float; numbers of NumPy included. Raises `InputTypeError`, `InputError`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputTypeError(f"{name} must be a finite number, not {value!r} of type {type(value).__name__}")
    number = float(value)
    if not (math.isfinite(number) and number >= least):
        bound = "" if least == -math.inf else f" >= {least:g}"
        raise InputError(f"{name} must be a finite number{bound}, not {number:g}")
    return number


def positive_number(name: str, value: Any) -> float:
    """A finite number above 0, as a float. Raises `InputTypeError`, `InputError`."""
    number = finite_number(name, value)
    if number <= 0.0:
        raise InputError(f"{name} must be a positive number, not {number:g}")
    return number


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, from Python or NumPy, and no truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def whole_number(value: Any, meaning: str, least: int, topic: str | None = None, most: float = math.inf) -> int:
    """A whole number that is not too small or too large; otherwise `InputError`, which says what is meant."""
    if not is_whole(value) or not least <= value <= most:
        limits = f", {least} or more" if most == math.inf else f" from {least} to {most}"
        raise InputError(f"{meaning}{limits}, not {value!r}", topic=topic)
    return int(value)


def counted(number: int, thing: str) -> str:
    """A number of things, in the singular for one."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
