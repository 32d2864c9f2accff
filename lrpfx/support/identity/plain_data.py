"""Plain data: frozen dataclasses of arrays, images, names and figures."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from lrpfx.support.identity.structure import are_equal


class PlainData:
    """A frozen dataclass without its own equality: it equals another one of its class whose fields hold the same."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and same_data(_values(self), _values(other))

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(value for value in _values(self) if isinstance(value, (str, float)))))


def _values(data: Any) -> list[Any]:
    return [getattr(data, one.name) for one in fields(data) if one.compare]


def same_data(one: Any, other: Any) -> bool:
    """Whether two values hold the same, arrays and tensors by their shape, dtype and entries; NaN is the same as NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return are_equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and same_data(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_data, one, other))
    return bool(one == other)
