"""Functions by import path, for pickling graphs and operations with functions of torch that cannot be pickled."""

import importlib
import types as python_types
from collections.abc import Callable
from typing import Any

from lrpfx.support.torch_internals import OpOverload


def dotted_path(function: Callable[..., Any]) -> str | None:
    """The import path of `function`, or None if it cannot be imported from there."""
    if isinstance(function, OpOverload):
        path = "torch.ops." + str(function)
    elif isinstance(function, (python_types.MethodDescriptorType, python_types.WrapperDescriptorType)):
        path = f"torch.Tensor.{function.__name__}"
    else:
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
        if "<locals>" in (name or ""):
            name = getattr(function, "__name__", None)  # functional.max_pool2d is such a closure
        if module == "_operator":
            module = "operator"
        name = name.split(".")[-1] if name and name.startswith("_VariableFunctionsClass.") else name
        path = f"{module}.{name}"
    try:
        return path if resolve_path(path) is function else None
    except (ImportError, AttributeError):
        return None


def resolve_path(path: str) -> Any:
    """The object at the import path `path`."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise ImportError(f"no module on the path {path!r}")
