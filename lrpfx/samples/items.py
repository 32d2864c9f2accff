"""Items of datasets: the inputs in them, their labels and names."""

import hashlib
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from lrpfx.errors import InputTypeError
from lrpfx.support.graph_data import is_graph
from lrpfx.support.numbers import is_whole
from lrpfx.support.tensors import content_of
from lrpfx.support.torch_internals import pytree

# Entries of a sample that is a dict. "__key__" and "cls" are WebDataset's; other entries like "__url__" are not data either.
LABELS = ("label", "labels", "cls")
_LABELS = 1 << 62  # class indices have fewer bits
_PLACE_IN_MEMORY = re.compile(r" at 0x[0-9a-f]+")
#: The entries of an image of a dataset of Hugging Face that is not decoded.
ENCODED = {"bytes", "path"}
IDENTITIES = ("__key__", "key", "path", "id")


def is_indexed(dataset: Any) -> bool:
    """Whether the samples of a dataset have numbers, by which they are found."""
    is_one = isinstance(dataset, Mapping) or (isinstance(dataset, (torch.Tensor, np.ndarray)) and not dataset.ndim)
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_one


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
        return inputs, _label_of_graph(inputs) if key is None else _label_of(item[key])
    return item, _label_of_graph(item)


def _label_of_graph(item: Any) -> int | None:
    """The label of a graph that has one integer as its `y`, which nodes or numbers that are predicted may be in place of."""
    if isinstance(item, (torch.Tensor, np.ndarray, tuple, list)) or not is_graph(item):
        return None
    given = item.get("y") if isinstance(item, Mapping) else getattr(item, "y", None)
    value = given.reshape(()) if isinstance(given, (torch.Tensor, np.ndarray)) and math.prod(given.shape) == 1 else given
    return _label_of(value) if is_whole(value) or _is_single(value) else None


def identity_of(item: Any) -> str | None:
    """The name that a sample brings with it: an entry of a dict, the path of a file, or that of its image."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        item = item[0]
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return None
    entries = [item]
    if isinstance(item, Mapping):
        entries = [*(item.get(name) for name in IDENTITIES), *map(_path_of_image, item.values())]
    elif isinstance(item, Image.Image):
        entries = [_path_of_image(item)]
    named = (one for one in entries if isinstance(one, (str, os.PathLike, int)) and not isinstance(one, bool))
    found = next(named, None)
    return None if found is None else as_text(found)


def _path_of_image(value: Any) -> str | None:
    """The path of an image of a dataset of Hugging Face, decoded or not, or of one that Pillow has opened."""
    path = getattr(value, "filename", None) if isinstance(value, Image.Image) else None
    if isinstance(value, Mapping) and set(value) == ENCODED:
        path = value["path"]
    return os.fsdecode(path) if path and isinstance(path, (str, bytes, os.PathLike)) else None


def as_text(name: Any) -> str:
    """The name of a sample or another text, with escapes for what UTF-8 cannot store, such as bytes of other encodings."""
    try:
        content = os.fsencode(str(name))
    except UnicodeEncodeError:  # of half a character that no file has in its name
        content = str(name).encode("utf-8", "surrogatepass")
    return content.decode("utf-8", "backslashreplace")


def labels_of_folders(folders: Iterable[str], categories: Sequence[str]) -> dict[str, int]:
    """The class index of each folder; empty where it would be a guess.

    All folders must have names of categories, of which there may be more, but for case, "_" and "-".
    """
    names = sorted(set(folders))
    plain = [_plain(one) for one in categories]
    places = [[place for place, one in enumerate(plain) if one == _plain(name)] for name in names]
    if any(len(found) != 1 for found in places) or len({found[0] for found in places}) < len(names):
        return {}
    return {name: found[0] for name, found in zip(names, places, strict=True)}


def _plain(name: str) -> str:
    return name.casefold().replace("_", " ").replace("-", " ")


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


def digest_of_inputs(inputs: Any) -> int:
    """A number of 64 bits, never 0, that is another one for other inputs of the model, in whatever order a dict has them."""
    total = hashlib.blake2b(digest_size=8)
    leaves = [("", inputs)] if isinstance(inputs, torch.Tensor) else _named_leaves(inputs)
    for name, leaf in leaves:
        total.update(name.encode("utf-8", "backslashreplace"))
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and getattr(leaf.dtype, "kind", "f") in "biufc":
            for part in content_of(torch.as_tensor(leaf)):
                total.update(part)
        else:
            total.update(_shown(leaf).encode("utf-8", "backslashreplace"))
    return int.from_bytes(total.digest(), "little") or 1


def _shown(value: Any) -> str:
    """What tells a value from others of its class, as far as it shows that: not its place in memory."""
    if isinstance(value, (set, frozenset)):  # whose order is another one in each process
        return f"{type(value).__qualname__} {sorted(map(_shown, value))}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {[_shown(one) for one in value.reshape(-1).tolist()]}"
    if isinstance(value, np.generic):  # whose own form is another one in each release of NumPy
        return f"{value.dtype} {value.item()!r}"
    shown = repr(value)
    return type(value).__qualname__ if _PLACE_IN_MEMORY.search(shown) else f"{type(value).__qualname__} {shown}"


def _named_leaves(inputs: Any) -> list[tuple[str, Any]]:
    found, _ = pytree.tree_flatten_with_path(inputs)
    return sorted(((pytree.keystr(path), leaf) for path, leaf in found), key=operator.itemgetter(0))
