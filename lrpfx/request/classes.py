"""Classes by index or by name, and lists of them."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError, nearest
from lrpfx.support.numbers import is_whole

#: Classes that an error suggests.
_SUGGESTED = 6


def index_of(target: Any, categories: Sequence[str] | None, classes: int | None = None) -> int:
    """The index of a class that is given by its index, also as text, or by its name, which wins.

    `target`: the class. `categories`: the names of the classes, if they are known. `classes`: how many there are, if that is
    known. Errors: `InputError`: there is no such class, or there are several; an `InputTypeError` if it is neither an index nor
    a name.
    """
    if isinstance(target, str) and target not in (() if categories is None else categories):
        target = target.strip()
        target = int(target) if is_index(target) else target
    if isinstance(target, str):
        if categories is None:
            raise InputError(
                f"the class {target!r} is a name, but the names are not known: pass categories=",
                topic="classes-and-their-names",
            )
        found = [index for index, name in enumerate(categories) if name == target]
        found = found or [index for index, name in enumerate(categories) if name.casefold() == target.casefold()]
        if not found:
            raise InputError(
                f"there is no class named {target!r}{_similar(target, categories)}", topic="classes-and-their-names"
            )
        if len(found) > 1:
            raise InputError(
                f"{len(found)} classes are named {target!r}: give an index, {' or '.join(map(str, found))}",
                topic="classes-and-their-names",
            )
        return found[0]
    if not is_whole(target):
        raise InputTypeError(
            f"a class is given by its index or its name, not by {type(target).__name__}", topic="classes-and-their-names"
        )
    if classes is not None and not 0 <= target < classes:
        raise InputError(out_of_range(f"class {target}", classes), topic="classes-and-their-names")
    return int(target)


def out_of_range(what: str, classes: int) -> str:
    """The message for a class that an output with so many does not have."""
    known = "one class, 0; what speaks against it is the target {0: -1.0}"
    return f"{what} is out of range: the output has {known if classes == 1 else f'{classes} classes, 0 to {classes - 1}'}"


def is_index(text: str) -> bool:
    """Whether a text is the index of a class."""
    return re.fullmatch("-?[0-9]+", text) is not None


def _similar(name: str, categories: Sequence[str]) -> str:
    """The end of a sentence with the classes whose names contain a text or are in it, or else the nearest one."""
    text, names = _plain(name), [_plain(one) for one in categories]
    word = text.removesuffix("s")
    inside = [index for index, one in enumerate(names) if one and re.search(rf"\b{re.escape(one)}\b", text)]
    for part in filter(None, (text, word)):
        found = [index for index, one in enumerate(names) if part in one]
        if found:
            found.sort(key=lambda index: re.search(rf"\b{re.escape(part)}\b", names[index]) is None)
            return f"; the classes that contain {'it' if part == text else repr(part)} are {_shown(found, categories)}"
    if inside:
        return f"; the classes that it contains are {_shown(inside, categories)}"
    return f".{nearest(name, categories)} An index, 0 to {len(categories) - 1}, names a class, too"


def _shown(indices: Sequence[int], categories: Sequence[str]) -> str:
    shown = [f"{categories[index]!r} ({index})" for index in indices[:_SUGGESTED]]
    rest = len(indices) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _plain(name: str) -> str:
    """A name in small letters, with one blank between words."""
    return " ".join(re.split(r"[\s_-]+", name.casefold().strip()))


def as_list(caller: str, values: Any) -> list[Any]:
    """Several classes or names as a list; `InputTypeError` for one, or for what has no order."""
    if hasattr(values, "to_numpy"):  # of pandas
        values = values.to_numpy()
    if isinstance(values, (np.ndarray, torch.Tensor)):
        values = values.tolist()
    if not isinstance(values, (list, tuple, range)):
        remedy = f": write [{values!r}]" if isinstance(values, (str, int)) else ""
        if isinstance(values, torch.nn.Module):
            raise InputTypeError(f"{caller} takes names of layers, not a {type(values).__name__}", topic="explainers")
        raise InputTypeError(f"{caller} takes a list, not {values!r}{remedy}", topic="explainers")
    return list(values)
