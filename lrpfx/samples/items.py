"""Samples of datasets: their numbers, labels and batches."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lrpfx.errors import InputError, InputTypeError, first_lines
from lrpfx.support.tensors import content_of
from lrpfx.support.torch_internals import pytree

# Entries of a sample that is a dict. "__key__" and "cls" are WebDataset's; other entries like "__url__" are not data either.
LABELS = ("label", "labels", "cls")
_LABELS = 1 << 62  # class indices have fewer bits
IDENTITIES = ("__key__", "key", "path", "id")


@dataclass(frozen=True)
class Batch:
    """Samples with their numbers, and their labels if they have any."""

    numbers: list[int]
    inputs: Any
    labels: list[int] | None
    first: str  # hash of the first sample


@dataclass(frozen=True)
class _Failed:
    """A sample that could not be loaded."""

    number: int
    reason: str


def numbers_of(dataset: Any, samples: Iterable[int] | None) -> Iterable[int]:
    """The numbers of the wanted samples."""
    if samples is None:
        return range(len(dataset)) if is_indexed(dataset) else itertools.count()
    if not isinstance(samples, Iterable):
        raise InputTypeError(
            f"samples are the numbers of several samples, such as range(100), not {samples!r}", topic="samples"
        )
    found = list(samples)
    if not all(isinstance(one, (int, np.integer)) and not isinstance(one, bool) and one >= 0 for one in found):
        raise InputTypeError("samples are the numbers of samples, from 0", topic="samples")
    if is_indexed(dataset) and found and max(found) >= len(dataset):
        raise InputError(f"sample {max(found)} is out of range: the dataset has {len(dataset)}", topic="samples")
    if len(set(found)) < len(found):
        raise InputError("a sample would count twice: its number is given twice", topic="samples")
    return sorted(map(int, found))


def batches(
    dataset: Any,
    samples: Iterable[int] | None,
    done: Callable[[int], bool],
    size: int,
    workers: int,
    probes: Mapping[int, str],
) -> Iterator[Batch]:
    """The wanted samples that are not done, in order. `samples`: their numbers, by default all.

    `probes`: hashes of samples by number, with which samples that are iterated over are compared.
    """
    loaded: Iterable[list[Any]]
    numbers = itertools.filterfalse(done, numbers_of(dataset, samples))
    if is_indexed(dataset):
        loaded = DataLoader(_Samples(dataset, list(numbers)), batch_size=size, num_workers=workers, collate_fn=list)
    else:
        loaded = _grouped(_iterated(dataset, numbers, samples is None, probes), size)
    for items in loaded:
        failed = next((one for one in items if isinstance(one, _Failed)), None)
        whole = list(itertools.takewhile(lambda one: not isinstance(one, _Failed), items))
        if whole:
            yield _batch_of(whole)
        if failed is not None:
            raise InputError(f"sample {failed.number} cannot be loaded: {failed.reason}", topic="samples")


def is_indexed(dataset: Any) -> bool:
    """Whether the samples of a dataset have numbers, by which they are found."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, Mapping)


class _Samples(Dataset[Any]):
    """Samples of a dataset with their numbers; what cannot be loaded is reported in its place."""

    def __init__(self, dataset: Any, numbers: Sequence[int]) -> None:
        self.dataset = dataset
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Any:
        number = self.numbers[place]
        try:
            return number, *parts_of(self.dataset[number])
        except Exception as error:
            return _Failed(number, first_lines(error))


def _iterated(dataset: Iterable[Any], numbers: Iterator[int], is_all: bool, probes: Mapping[int, str]) -> Iterator[Any]:
    """The samples with these numbers, which rise, of a dataset without indices. `is_all`: or as many as it has."""
    wanted, number = next(numbers, None), -1
    for number, item in enumerate(dataset):
        if wanted is None:
            return
        if number in probes:
            check_probe(number, item, probes)
        if number == wanted:
            yield number, *parts_of(item)
            wanted = next(numbers, None)
    if wanted is not None and not is_all:
        raise InputError(f"sample {wanted} is out of range: the dataset has {number + 1}", topic="samples")


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(itertools.islice(items, size)):
        yield group


def check_probe(number: int, item: Any, probes: Mapping[int, str]) -> None:
    """Raise `InputError` unless a sample has the hash that it had before. `item`: None if there is none any more."""
    if item is None or hash_of_sample(parts_of(item)[0]) != probes[number]:
        raise InputError(
            f"sample {number} of the dataset is not what it was when the file was begun: has the dataset changed, or is its "
            "preprocessing random?",
            topic="changed-data",
        )


def parts_of(item: Any) -> tuple[Any, int | None]:
    """The inputs of a sample, and its label if it has one."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        if (
            type(item[1]) is int and abs(item[1]) < _LABELS
        ):  # of most data sets, for which the questions below would take longer than the rest
            return item[0], item[1]
        if _may_be_label(item[1]):
            return item[0], _label_of(item[1])
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
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise InputTypeError(
            f"labels are class indices, but one is {plain!r}, a {type(plain).__name__}: leave it out of the samples",
            topic="samples",
        )
    if abs(plain) >= _LABELS:
        raise InputTypeError(
            f"labels are class indices, which {plain} is too large for: leave it out of the samples", topic="samples"
        )
    return plain


def _batch_of(items: Sequence[tuple[int, Any, int | None]]) -> Batch:
    numbers, inputs, labels = zip(*items, strict=True)
    if any(label is None for label in labels) and any(label is not None for label in labels):
        raise InputError(f"sample {numbers[0]}: some samples have labels and others have none", topic="samples")
    try:
        together = default_collate(list(inputs))
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise InputError(
            f"the samples {numbers[0]} to {numbers[-1]} do not make a batch, perhaps because their shapes differ: "
            f"{first_lines(error)}; batch_size=1 takes each by itself",
            topic="samples",
        ) from error
    return Batch(list(numbers), together, None if labels[0] is None else list(labels), hash_of_sample(inputs[0]))


def hash_of_sample(inputs: Any) -> str:
    """A hash of the tensors of a sample."""
    total = hashlib.sha256()
    for leaf in pytree.tree_leaves(inputs):
        parts = content_of(torch.as_tensor(leaf)) if isinstance(leaf, (torch.Tensor, np.ndarray)) else [repr(leaf).encode()]
        for part in parts:
            total.update(part)
    return total.hexdigest()
