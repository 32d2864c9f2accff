"""Fingerprints of models and tensors: texts that change if a model may compute something else."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from lrpfx.support.identity.descriptions import described
from lrpfx.support.identity.installed_modules import installed_folders
from lrpfx.support.tensors import content_of


def fingerprint_of_model(model: nn.Module) -> str:
    """A hash of what decides on the results of a model.

    It covers weights, buffers and attributes, the source of the model's classes and of all imported modules that are not
    installed packages (the model may call their functions), and the versions of lrpfx and torch.
    """
    of_modules = ("_modules", "_parameters", "_buffers")
    own = {
        name: {key: value for key, value in vars(module).items() if key not in of_modules}
        for name, module in model.named_modules()
    }
    facts = [version("lrpfx"), torch.__version__, repr(model), described(own), other_buffers(model)]
    sources = [path.read_bytes() for path in sorted(_sources(model))]
    return fingerprint_of_tensors(model.state_dict(), b"".join([json.dumps(facts).encode(), *sources]))


def fingerprint_of_tensors(tensors: Mapping[str, torch.Tensor], before: bytes = b"") -> str:
    """A hash of names, dtypes, shapes and values, such as those of `model.state_dict()`."""
    total = hashlib.sha256(before)
    for name, value in sorted(tensors.items()):
        total.update(name.encode())
        for part in content_of(value):
            total.update(part)
    return total.hexdigest()


def other_buffers(module: nn.Module) -> dict[str, str]:
    """A hash of each buffer that `module.state_dict()` lacks, by its name."""
    stored = module.state_dict().keys()
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: fingerprint_of_tensors({name: value}) for name, value in buffers if name not in stored}


def _sources(model: nn.Module) -> set[Path]:
    """The source files of a model's classes, and of all imported modules but those of installed packages and of lrpfx."""
    folders = installed_folders()
    classes = {type(module).__module__ for module in model.modules()}
    resolved = cache(lambda folder: Path(folder).resolve())  # thousands of files are in some hundred folders
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            folder, name_of_file = os.path.split(os.path.abspath(file))
            path = Path(file).resolve() if os.path.islink(file) else resolved(folder) / name_of_file
            own = name not in ("__main__", "lrpfx") and not name.startswith("lrpfx.") and folders.isdisjoint(path.parents)
            if (own or name in classes) and path.is_file():
                found.add(path)
    return found
