"""Settings as plain data, by which a changed one is noticed."""

import functools
import hashlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lrpfx.support.tensors import content_of

_DEPTH = 6
_NAMED = (types.ModuleType, type)  # the name in the code says which


def described(value: Any, depth: int = 0) -> Any:
    """A value as data for JSON, which differs if the value does, as far as that can be told.

    Of functions, the code counts and what it closes over or takes from its module, of tensors the content.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (torch.Tensor, np.ndarray)):
        total = hashlib.sha256()
        for part in content_of(torch.as_tensor(value)):
            total.update(part)
        return {"tensor": list(value.shape), "sha256": total.hexdigest()}
    if depth > _DEPTH:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {"dict": [[described(key, depth + 1), described(one, depth + 1)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return [described(one, depth + 1) for one in value]
    if isinstance(value, functools.partial):
        return {"partial": described([value.func, value.args, value.keywords], depth + 1)}
    if isinstance(value, types.MethodType):
        return {"method": described([value.__func__, value.__self__], depth + 1)}
    if isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        used = [name for name in value.__code__.co_names if name in value.__globals__]
        others = {name: value.__globals__[name] for name in used if not isinstance(value.__globals__[name], _NAMED)}
        parts = [_code(value.__code__), described([value.__defaults__, value.__kwdefaults__, closed, others], depth + 1)]
        return {"function": value.__qualname__, "sha256": hashlib.sha256(repr(parts).encode()).hexdigest()}
    if callable(value) and not isinstance(value, type) and isinstance(getattr(value, "__dict__", None), dict):
        return {"type": type(value).__qualname__, "attributes": described(vars(value), depth + 1)}
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return {"type": type(value).__qualname__, "text": text}


def fingerprint_of_function(function: Callable[..., Any]) -> str:
    """The name of a function and a hash of what it computes, as far as that can be told."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {hashlib.sha256(repr(described(function)).encode()).hexdigest()[:16]}"


def _code(code: types.CodeType) -> list[Any]:
    """What a function computes: its instructions, and the names and constants that they use."""
    return [code.co_code.hex(), list(code.co_names), [_constant(one) for one in code.co_consts]]


def _constant(value: Any) -> Any:
    if isinstance(value, frozenset):  # in another order in each process
        return sorted(map(repr, value))
    return _code(value) if isinstance(value, types.CodeType) else repr(value)


def text_of(description: Any) -> str:
    """A short text for a value that was `described`: "predicted", "3", "first: [1, 2]", the name of a function."""
    if isinstance(description, list):
        return f"[{', '.join(map(text_of, description))}]"
    if not isinstance(description, Mapping):
        return str(description)
    kind = next(iter(description), "")
    content: Any = description.get(kind)
    if kind == "dict":
        return ", ".join(f"{text_of(key)}: {text_of(value)}" for key, value in content)
    if kind in ("partial", "method"):
        return text_of(content[0])
    return f"tensor of shape {content}" if kind == "tensor" else str(description.get("text", content))


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions with the same keys, in words."""
    found = []
    for name in sorted({*ours, *theirs}):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        shown = [text if len(text) < 60 else f"{text[:57]}..." for text in (repr(other), repr(one))]
        found.append(f"{name} (it was {shown[0]}, and is {shown[1]} now)" if shown[0] != shown[1] else name)
    return found
