"""Indices that are checked before they are used, on devices where one out of range ends all further work of the process.

On the CPU, a word that an embedding does not have raises an error. On a GPU, it stops a kernel, and after that every operation
of the process on any GPU fails. Where sizes and inputs are tried that a model may not take, its operations run in this context.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lrpfx.support.torch_internals import TorchDispatchMode

aten = torch.ops.aten

_WRITING = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce")
#: Operators of a tensor, a dimension and an index.
_ALONG_A_DIMENSION = {
    *(aten.gather, aten.index_select),
    *(getattr(aten, name + ending) for name in _WRITING for ending in ("", "_")),
}
#: Operators of a tensor and a list with an index for each dimension, or None.
_OF_ALL_DIMENSIONS = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_OF_ROWS = {aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only}
_OF_ENTRIES = {aten.take, aten.put, aten.put_}


class CheckedIndices(TorchDispatchMode):
    """A context in which an index out of range raises `IndexError` before the operation runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for index, size in _indices_of(func.overloadpacket, args):
            if index.numel() and index.device.type != "meta":
                lowest, highest = (int(value) for value in index.aminmax())
                if lowest < -size or highest >= size:
                    wrong = highest if highest >= size else lowest
                    raise IndexError(f"index {wrong} is out of range for a dimension of size {size} in {func}")
        return func(*args, **(kwargs or {}))


def _indices_of(operator: Any, args: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """The integer indices of a call, each with the size of the dimension that it indexes."""
    if operator in _ALONG_A_DIMENSION:
        tensor, dimension, index = args[:3]
        yield index, tensor.shape[dimension] if tensor.ndim else 1
    elif operator in _OF_ROWS:
        yield args[1], args[0].shape[0]
    elif operator in _OF_ENTRIES:
        yield args[1], args[0].numel()
    elif operator in _OF_ALL_DIMENSIONS:
        dimension = 0
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                if index is not None:
                    yield index, args[0].shape[dimension]
                dimension += 1
            else:
                dimension += index.ndim  # a mask, whose size is checked in any case


def checked_indices(module: nn.Module) -> AbstractContextManager[Any]:
    """A context for a run of a module; it costs something only if a tensor of the module is on another device than the CPU."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return nullcontext() if all(one.device.type == "cpu" for one in tensors) else CheckedIndices()
