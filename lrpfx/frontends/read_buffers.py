"""Let a model read numbers from buffers, and from values computed only from buffers and numbers, during torch.export.

torch.export treats such values as unknown, as if they were computed from the input. The graph is then valid only for these
buffer values.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lrpfx.ir.node import map_arguments
from lrpfx.support.torch_internals import DisableTorchFunction, disable_current_modes

_MAKES_CONSTANTS = frozenset({"tensor", "as_tensor", "arange", "full", "ones", "zeros"})
_READS_NUMBERS = frozenset({"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"})
_WRITES = re.compile(r".*[^_]_|__set\w*__|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """A tensor of the export with a known value: how to compute it, and the names of the buffers it depends on."""

    tensor: torch.Tensor
    compute: Callable[[], Any]
    names: frozenset[str]


class ReadBuffers(TorchFunctionMode):
    """A context for the export of `root`. `frozen`: the buffers that were read, by name."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.values = {name: buffer.detach().clone() for name, buffer in root.named_buffers()}
        self.frozen: dict[str, torch.Tensor] = {}
        self.known: dict[int, _Known] = {}
        places = ((one, name) for one in root.modules() for name, buffer in one._buffers.items() if buffer is not None)
        self.first_place = next(places, None)  # each call looks there, and a search would take longer than the export
        self.first: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._find_buffers()
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            args = map_arguments(args, self._number_in_slice)
        leaves = _leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = {id(entry.tensor): entry for tensor in tensors if (entry := self._of(tensor)) is not None}
        if "out" in kwargs or (_WRITES.fullmatch(name) and args and id(args[0]) in known):
            self.known.clear()  # the written tensor, and all that share its memory, are unknown now
            return func(*args, **kwargs)
        constant = name in _MAKES_CONSTANTS and not any(isinstance(leaf, _SYMBOLS) for leaf in leaves)
        if any(id(tensor) not in known for tensor in tensors) or not (known or constant):
            return func(*args, **kwargs)

        def compute() -> Any:
            values = map_arguments((args, kwargs), lambda leaf: known[id(leaf)].compute() if id(leaf) in known else leaf)
            with torch.no_grad(), DisableTorchFunction(), disable_current_modes():
                return func(*values[0], **values[1])

        names = frozenset[str]().union(*(entry.names for entry in known.values()))
        if name in _READS_NUMBERS:
            self._freeze(names)
            return compute()
        result = func(*args, **kwargs)
        once = functools.cache(compute)
        for number, leaf in enumerate(_leaves(result)):
            if isinstance(leaf, torch.Tensor) and self._of(leaf) is None:
                self.known[id(leaf)] = _Known(leaf, lambda number=number: _leaves(once())[number], names)  # type: ignore[misc]
        return result

    def _find_buffers(self) -> None:
        """Look up the buffers again if torch.export has replaced them at the start or end of a run."""
        if self.first_place is None:
            return
        holder, leaf = self.first_place
        first = holder._buffers.get(leaf)
        if first is not self.first:
            self.first = first
            self.known.clear()
            for name, buffer in self.root.named_buffers():
                compute = functools.partial(self.values.__getitem__, name)
                self.known[id(buffer)] = _Known(buffer, compute, frozenset([name]))

    def _of(self, value: Any) -> _Known | None:
        known = self.known.get(id(value))
        return known if known is not None and known.tensor is value else None

    def _freeze(self, names: frozenset[str]) -> None:
        self.frozen.update({name: self.values[name] for name in names})

    def _number_in_slice(self, leaf: Any) -> Any:
        """An index or slice bound as a number, if it is a known scalar tensor."""
        known = self._of(leaf)
        if known is None or leaf.ndim or leaf.dtype == torch.bool:
            return leaf
        self._freeze(known.names)
        return known.compute().item()


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    map_arguments(structure, found.append)
    return found
