"""Items of datasets: the inputs in them, their labels and names."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputTypeError
from lrpfx.support.numbers import is_whole
from lrpfx.support.tensors import content_of
from lrpfx.support.torch_internals import pytree

# Entries of a sample that is a dict. "__key__" and "cls" are WebDataset's; other entries like "__url__" are not data either.
LABELS = ("label", "labels", "cls")
_LABELS = 1 << 62  # class indices have fewer bits
_PLAIN = (int, float, complex, str, bytes, type(None))
IDENTITIES = ("__key__", "key", "path", "id")


def is_indexed(dataset: Any) -> bool:
    """Whether the samples of a dataset have numbers, by which they are found."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, Mapping)


def parts_of(item: Any) -> tuple[Any, int | None]:
    """The inputs of a sample, and its label if it has one."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        inputs, label = item
        if type(label) is int and abs(label) < _LABELS:  # of most data sets: what follows would take longer than the rest
            return inputs, label
        if _may_be_label(label):
            return inputs, _label_of(label)
    if isinstance(item, Mapping):
        key = next((key for key in LABELS if key in item and _may_be_label(item[key])), None)
        inputs = {name: value for name, value in item.items() if name != key and not str(name).startswith("__")}
        return inputs, None if key is None else _label_of(item[key])
    return item, None


def identity_of(item: Any) -> str | None:
    """The name that a sample brings with it: an entry of a dict, or the path of a file."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        item = item[0]
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return None
    entries = [item.get(name) for name in IDENTITIES] if isinstance(item, Mapping) else [item]
    named = (one for one in entries if isinstance(one, (str, os.PathLike, int)) and not isinstance(one, bool))
    found = next(named, None)
    return None if found is None else os.fsencode(str(found)).decode("utf-8", "backslashreplace")


def _may_be_label(value: Any) -> bool:
    """Whether a value is a label, or what others may take for one, and not a tensor that is another input of a model."""
    return not isinstance(value, (torch.Tensor, np.ndarray, np.floating, Mapping, tuple, list)) or _is_single(value)


def _is_single(value: Any) -> bool:
    """Whether a value is a tensor or an array with one integer."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.dtype != torch.bool and not (value.is_floating_point() or value.is_complex())
    return isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"


def _label_of(value: Any) -> int:
    """A label as a class index. `InputTypeError` for others."""
    plain = value.item() if _is_single(value) or isinstance(value, np.generic) else value
    if not is_whole(plain):
        raise InputTypeError(
            f"labels are class indices, but one is {plain!r}, a {type(plain).__name__}: leave it out of the samples",
            topic="samples",
        )
    if abs(plain) >= _LABELS:
        raise InputTypeError(
            f"labels are class indices, which {plain} is too large for: leave it out of the samples", topic="samples"
        )
    return plain


def digest_of_sample(inputs: Any, label: int | None, key: str | None) -> int:
    """A number of 64 bits, never 0, that is another for another sample: the inputs for the model, its label and its name."""
    total = hashlib.blake2b(f"{label}\0{key}\0".encode("utf-8", "backslashreplace"), digest_size=8)
    for leaf in [inputs] if isinstance(inputs, torch.Tensor) else pytree.tree_leaves(inputs):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            for part in content_of(torch.as_tensor(leaf)):
                total.update(part)
        else:  # what other objects show of themselves may be their place in memory
            total.update((repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__).encode())
    return int.from_bytes(total.digest(), "little") or 1
