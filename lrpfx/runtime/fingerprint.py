"""Fingerprints of explainable modules: texts that change if a module may compute something else."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

from lrpfx.runtime.explain_module import ExplainModule, RuleModule
from lrpfx.support.tensors import content_of


def fingerprint_of_module(module: ExplainModule) -> str:
    """A hash of the graph, the rules with their settings, and the source model's parameters and buffers.

    It does not depend on the machine.
    """
    rules = [f"{name}: {one.rule!r}" for name, one in module.named_modules() if isinstance(one, RuleModule)]
    total = hashlib.sha256("\n".join([module.composite, str(module), module.code, *rules]).encode())
    for name, value in module.state_dict().items():
        total.update(name.encode())
        if isinstance(value, torch.Tensor):
            for part in content_of(value):
                total.update(part)
    return total.hexdigest()


def fingerprint_of_function(function: Callable[..., Any]) -> str:
    """The name of a function and a hash of its code, its defaults and the values that it closes over."""
    total = hashlib.sha256()
    for part in _content(function, 0):
        total.update(part)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {total.hexdigest()[:16]}"


#: How deep attributes of objects are followed.
_DEPTH = 4


def _content(value: Any, depth: int) -> Iterator[bytes]:
    """The content of a function, or of a value that it uses, as far as it can be told."""
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        yield from content_of(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield from (f"{value.dtype}{value.shape}".encode(), value.tobytes())
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        yield repr(value).encode()
    elif depth > _DEPTH:
        return
    elif isinstance(value, CodeType):
        yield from (value.co_code, " ".join(value.co_names).encode())
        yield from _content(value.co_consts, depth + 1)
    elif isinstance(value, FunctionType):
        closed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        for one in (value.__code__, value.__defaults__, closed):
            yield from _content(one, depth + 1)
    elif isinstance(value, functools.partial):
        yield from _content((value.func, value.args, value.keywords), depth + 1)
    elif isinstance(value, Mapping):
        yield from _content(list(value.items()), depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value if isinstance(value, (list, tuple)) else sorted(value, key=repr):
            yield from _content(one, depth + 1)
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from _content(vars(value), depth + 1)
