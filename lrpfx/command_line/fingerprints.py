"""Fingerprints of models: texts that change if the model may compute something else."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lrpfx import __version__
from lrpfx.support.installed_modules import installed_folders
from lrpfx.support.tensors import content_of

#: How deep containers and attributes in attributes are followed.
_DEPTH = 4


def fingerprint_of(model: nn.Module) -> str:
    """A hash of what decides on the results of a model.

    It covers weights, buffers and attributes, the source of the model's classes and of all imported modules that are not
    installed packages (the model may call their functions), and the versions of lrpfx and torch. Objects without attributes
    that Python can see are left out.
    """
    total = hashlib.sha256(f"lrpfx {__version__}, torch {torch.__version__}\n{model!r}".encode())
    for path in sorted(_sources(model)):
        total.update(path.read_bytes())
    for part in _content(model.state_dict()):
        total.update(part)
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters")}
        for part in (name.encode(), *_content(own)):
            total.update(part)
    return total.hexdigest()


def _sources(model: nn.Module) -> set[Path]:
    """The source files of a model's classes, and of all imported modules but those of installed packages and of lrpfx."""
    folders = installed_folders()
    classes = {type(module).__module__ for module in model.modules()}
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            path = Path(file).resolve()
            own = name not in ("__main__", "lrpfx") and not name.startswith("lrpfx.") and folders.isdisjoint(path.parents)
            if (own or name in classes) and path.is_file():
                found.add(path)
    return found


def _content(value: Any, depth: int = 0) -> Iterator[bytes]:
    """The content of a value, as far as it can be told."""
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        yield from content_of(value)
    elif isinstance(value, (str, bytes, int, float, complex)):
        yield repr(value).encode()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield from (f"{value.dtype}{value.shape}".encode(), value.tobytes())
    elif isinstance(value, nn.Module) or depth > _DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield repr(key).encode()
            yield from _content(one, depth + 1)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _content(one, depth + 1)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(repr(one).encode() for one in value)
    elif isinstance(getattr(value, "__qualname__", None), str):  # a function or a class
        yield f"{value.__module__}.{value.__qualname__}".encode()
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from _content(vars(value), depth + 1)
