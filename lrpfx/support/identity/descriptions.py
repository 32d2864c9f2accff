"""Settings as plain data, by which a changed one is noticed."""

import functools
import hashlib
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from lrpfx.support.dotted_paths import dotted_path
from lrpfx.support.identity.installed_modules import is_installed
from lrpfx.support.tensors import content_of

#: How deep objects are nested at most.
_DEPTH = 50
_NAMED = (types.ModuleType, type)  # the name in the code says which
#: Packages whose release says what their code is.
_RELEASED = {"torch", "lrpfx", "numpy", "builtins", "collections", "functools", "abc", "typing", "enum", "dataclasses"}


def described(value: Any) -> Any:
    """A value as data for JSON, which differs if the value does, as far as that can be told.

    Of functions and methods, the code counts and what it closes over, of tensors the content, of other objects the attributes.
    What a function takes from its module counts, too; if that is installed, its release counts instead.
    """
    return _Description().of(value)


class _Description:
    """Describes a value and all that it refers to. Each object is described once, or what is shared would be time and again."""

    def __init__(self) -> None:
        self._around: list[int] = []
        self._known: dict[int, tuple[Any, Any]] = {}  # the objects, which keep their addresses for that, and their descriptions

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._around or len(self._around) > _DEPTH:
            return type(value).__qualname__
        self._around.append(id(value))
        try:
            found = self._of_object(value)
        finally:
            self._around.pop()
        self._known[id(value)] = value, found
        return found

    def _of_object(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind not in "fciub":  # texts, times or objects
            return {"array": self.of(value.tolist())}
        if isinstance(value, (torch.Tensor, np.ndarray)):
            total = hashlib.sha256()
            for part in content_of(torch.as_tensor(value)):
                total.update(part)
            return {"tensor": list(value.shape), "sha256": total.hexdigest()}
        if isinstance(value, Mapping):
            return {"dict": [[self.of(key), self.of(one)] for key, one in value.items()]}
        if isinstance(value, (list, tuple)):
            return [self.of(one) for one in value]
        if isinstance(value, (set, frozenset)):  # in another order in each process
            return {"set": sorted((self.of(one) for one in value), key=repr)}
        if isinstance(value, functools.partial):
            return {"partial": self.of([value.func, value.args, value.keywords])}
        if isinstance(value, types.MethodType):
            return {"method": self.of([value.__func__, value.__self__])}
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, fx.Graph):
            return {"graph": [self.of([one.op, one.name, _target(one), one.args, one.kwargs]) for one in value.nodes]}
        if isinstance(value, fx.GraphModule):
            parts = [value.graph, value._parameters, value._buffers, value._modules]
            return {"type": type(value).__qualname__, "sha256": _hash(self.of(parts))}
        if not isinstance(value, _NAMED) and isinstance(getattr(value, "__dict__", None), dict):
            methods = [one for base in type(value).__mro__ if not is_released(base) for one in _functions_of(base)]
            found = {"type": type(value).__qualname__, "sha256": _hash(self.of([vars(value), methods]))}
            has_text = any("__repr__" in vars(base) for base in type(value).__mro__ if base is not object)
            return {**found, "text": _text(value)} if has_text else found
        return {"type": type(value).__qualname__, "text": _text(value)}

    def _of_function(self, value: types.FunctionType) -> Any:
        closed = [_content(cell) for cell in value.__closure__ or ()]
        parts: list[Any] = [self.of([value.__defaults__, value.__kwdefaults__, closed])]
        if not is_released(value):
            used = [name for name in value.__code__.co_names if name in value.__globals__]
            others = {name: value.__globals__[name] for name in used if not isinstance(value.__globals__[name], _NAMED)}
            release = _release(value.__module__)
            parts += [_code(value.__code__), self.of(others) if release is None else release]
        return {"function": value.__qualname__, "sha256": _hash(parts)}


def _hash(description: Any) -> str:
    return hashlib.sha256(repr(description).encode()).hexdigest()


def _release(module: str | None) -> str | None:
    """The release of the package of an installed module, as far as it says it; None for the user's own modules."""
    if module is None or not is_installed(module):
        return None
    package = sys.modules.get(module.partition(".")[0])
    return str(getattr(package, "__version__", ""))


def _text(value: Any) -> str:
    """The text of an object, without its address."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def is_released(value: Any) -> bool:
    """Whether a function or class is of a package whose release says what it is."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in _RELEASED


def _functions_of(kind: type) -> list[Any]:
    """The functions that a class defines. That of Python 3.14 for its annotations says nothing of what it computes."""
    own = [one for name, one in vars(kind).items() if name != "__annotate_func__"]
    unwrapped = [getattr(one, "__func__", getattr(one, "fget", one)) for one in own]
    return [one for one in unwrapped if isinstance(one, types.FunctionType)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _target(node: fx.Node) -> Any:
    return node.target if isinstance(node.target, str) else dotted_path(node.target) or node.target


def fingerprint_of_value(value: Any) -> str:
    """The name of a function, or of an object's class, and a hash of what it computes or holds, as far as that can be told."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {_hash(described(value))[:16]}"


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
