"""Let a model read numbers from buffers and inputs that are constants, and from values of these, during torch.export.

torch.export treats such values as unknown, as if they were computed from signals. The graph is then valid for the values of
these buffers and inputs alone.
"""

import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from lrpfx.ir.guards import Place
from lrpfx.ir.node import ancestors_of, function_name, map_arguments
from lrpfx.operators.table import writes_in_place
from lrpfx.passes.program import is_random
from lrpfx.support.torch_internals import DisableTorchFunction, disable_current_modes, unknown_in
from lrpfx.support.user_files import is_report, user_source

_MAKES_TEXT = frozenset({"__format__", "__repr__"})
_MAKES_CONSTANTS = frozenset({"tensor", "as_tensor", "arange", "full", "ones", "zeros"})
#: Names of functions and methods that make Python's numbers and text of tensors.
READS_NUMBERS = frozenset(
    {
        *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"),
        *("__contains__", "__complex__", "equal", "allclose", "is_nonzero", "_local_scalar_dense"),
        *_MAKES_TEXT,
    }
)
#: Makes constants with the sizes of a tensor, whatever is in it.
_CONSTANTS_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
#: Takes sizes, for which tensors with one entry may stand.
_FROM_SIZES = frozenset({"zeros", "ones", "full", "empty", "arange"})
#: The same, after a tensor.
_TAKES_SIZES = frozenset(
    {*("new_zeros", "new_ones", "new_full", "new_empty"), *("view", "reshape", "expand", "repeat", "narrow", "split")}
)
_SIZED_BY_VALUES = frozenset({"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"})
_SIZES = frozenset({"size", "numel", "nelement", "__len__"})
_WRITES_NOTHING = frozenset({"requires_grad_", "detach_", "share_memory_", "retain_grad_"})
_FROM_NUMBERS = frozenset({"tensor", "as_tensor"})
#: Names of operations that write. Others are told by the versions of tensors, which some of these leave as they are.
_WRITES = re.compile(r".*[^_]_|__set\w*__|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """A tensor of the export whose value is known, and the names of the buffers and inputs that it depends on.

    Values of views share memory as their tensors do, so what is written into one is in the others. `version`: the tensor's
    count of writes for which the value holds, whatever operation wrote.
    """

    tensor: torch.Tensor
    value: torch.Tensor
    names: frozenset[Any]
    version: int


@dataclasses.dataclass(frozen=True)
class _Read:
    """A number, or size, that the forward read: what stands for it in the graph; nothing, if it became text or could not be."""

    symbols: tuple[Any, ...]
    operation: str
    source: str


class WatchReads(TorchFunctionMode):
    """A context for an export that notes where the forward reads numbers that the graph cannot hold.

    torch.export puts a symbol in place of each number. It refuses a branch on a symbol, but not its text, in which the name of
    the symbol stands for the number, and it loses a number that nothing in the graph uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[_Read] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name not in READS_NUMBERS and not _has_sizes_of_values(name, args, kwargs):
            return func(*args, **kwargs)
        source = user_source()
        try:
            result = func(*args, **kwargs)
        except Exception:  # which the forward may handle, as if its condition did not hold
            self.reads.append(_Read((), name, source))
            raise
        numbers = [size for leaf in _leaves(result) for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
        symbols = tuple(one for one in numbers if isinstance(one, _SYMBOLS) and unknown_in(one))
        if (symbols or name in _MAKES_TEXT) and not is_report():
            self.reads.append(_Read(symbols, name, source))
        return result

    def lost(self, exported: fx.GraphModule) -> _Read | None:
        """A number that was read and on which no value of the exported graph depends; None if there is none."""
        kept = set[Any]()
        for graph in (part.graph for part in exported.modules() if isinstance(part, fx.GraphModule)):
            for node in _effective(graph):
                values = [one for one in _leaves(node.meta.get("val")) if isinstance(one, (torch.Tensor, *_SYMBOLS))]
                kept.update(*map(unknown_in, values))
        return next(
            (read for read in self.reads if not read.symbols or any(unknown_in(one) - kept for one in read.symbols)), None
        )


def lost_calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of a symbolic trace that read numbers, or make sizes of values, and on which nothing in the graph depends."""
    effective = _effective(graph)
    return [node for node in graph.nodes if node.op.startswith("call") and node not in effective and _reads_a_number(node)]


def _reads_a_number(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # by a mask, perhaps, or by positions, whose sizes tell no values
        index = node.args[1]
        by_values = any(isinstance(one, fx.Node) for one in (index if isinstance(index, tuple) else (index,)))
        return by_values and _sizes_are_read(node)
    if (
        function_name(node) in (*READS_NUMBERS, "storage", "untyped_storage")
        or getattr(node.target, "__module__", "") == "math"
    ):
        return True
    return _has_sizes_of_values(function_name(node), node.args, node.kwargs)


def _sizes_are_read(node: fx.Node) -> bool:
    """Whether sizes of a value, or of what is computed from it, are read."""
    found, reached = [node], {node}
    for one in found:
        if function_name(one) in _SIZES or (one.target is getattr and one.args[1] == "shape"):
            return True
        found.extend(user for user in one.users if user not in reached)
        reached.update(one.users)
    return False


def _effective(graph: fx.Graph) -> set[fx.Node]:
    """The nodes on which the output depends, or what is written; assertions are none of them."""
    last = [node for node in graph.nodes if node.op == "output" or _writes(node)]
    return set(last).union(*map(ancestors_of, last))


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return "out" in node.kwargs or writes_in_place(node) or (schema is not None and schema.is_mutable)


class ReadNumbers(WatchReads):
    """A context for the export of `root`. `frozen`: the buffers that were read, by name, and inputs, by place."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        """`inputs`: the arguments that may be read, by name."""
        super().__init__()
        self.root = root
        self.values: dict[str | Place, torch.Tensor] = {name: one.detach().clone() for name, one in root.named_buffers()}
        self.values |= {Place(name): value for name, value in inputs.items()}
        self.given: dict[Place, torch.Tensor] = {}
        self.frozen: dict[str | Place, torch.Tensor] = {}
        self.known: dict[int, _Known] = {}
        places = ((one, name) for one in root.modules() for name, buffer in one._buffers.items() if buffer is not None)
        self.first_place = next(places, None)  # each call looks there, and a search would take longer than the export
        self.first: torch.Tensor | None = None

    @property
    def frozen_buffers(self) -> dict[str, torch.Tensor]:
        """Those that were read."""
        return {name: value for name, value in self.frozen.items() if isinstance(name, str)}

    @property
    def frozen_inputs(self) -> dict[Place, torch.Tensor]:
        """Those that were read."""
        return {place: value for place, value in self.frozen.items() if isinstance(place, Place)}

    def admit(self, arguments: Mapping[str, Any]) -> None:
        """Note the tensors that stand for inputs in a run of the model."""
        self.given = {Place(name): value for name, value in arguments.items() if Place(name) in self.values}
        for name, value in self.given.items():
            self._know(name, value)

    def _know(self, name: str | Place, tensor: torch.Tensor) -> None:
        with DisableTorchFunction(), disable_current_modes():
            value = self.values[name].clone()
        self.known[id(tensor)] = _Known(tensor, value, frozenset([name]), _version(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._find_buffers()
        name = _name_of(func)
        if name == "__iter__":
            return iter(self.__torch_function__(torch.unbind, types, args, kwargs))
        if name == "__getitem__":
            args = (args[0], map_arguments(args[1], self._number), *args[2:])
            if self._of(args[0]) is None:
                args = (args[0], map_arguments(args[1], self._positions), *args[2:])
        if name in _FROM_SIZES or name in _TAKES_SIZES:
            own = 0 if name in _FROM_SIZES else 1
            args = (*args[:own], *map_arguments(tuple(args[own:]), self._number))
            kwargs = map_arguments(kwargs, self._number)
        leaves = _leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = {id(entry.tensor): entry for tensor in tensors if (entry := self._of(tensor)) is not None}
        if name in _CONSTANTS_LIKE and tensors and id(tensors[0]) not in known and not has_open_sizes(tensors[0]):
            known[id(tensors[0])] = _like(tensors[0])
        is_known = all(id(tensor) in known for tensor in tensors) and not is_random(name)
        writes = _WRITES.fullmatch(name) is not None and name not in _WRITES_NOTHING
        if "out" in kwargs or name == "__set__" or (writes and not is_known):
            self._forget(kwargs.get("out", args[:1]))
            return super().__torch_function__(func, types, args, kwargs)
        constant = name in _MAKES_CONSTANTS and not any(isinstance(leaf, _SYMBOLS) for leaf in leaves)
        if not is_known or not (known or constant):
            result = super().__torch_function__(func, types, args, kwargs)
            self._forget([entry.tensor for entry in known.values() if entry.version != _version(entry.tensor)])
            return result
        names = frozenset[Any]().union(*(entry.names for entry in known.values()))
        values = map_arguments((args, kwargs), lambda leaf: known[id(leaf)].value if id(leaf) in known else leaf)
        sized_by_values = _has_sizes_of_values(name, args, kwargs)
        with torch.no_grad(), DisableTorchFunction(), disable_current_modes():
            computed = func(*values[0], **values[1])
            constants = map_arguments(computed, _clone) if sized_by_values else None
        if name in READS_NUMBERS:
            if name not in _MAKES_TEXT or not is_report():
                self._freeze(names)
            return computed
        if sized_by_values:  # torch.export could not tell the sizes: the graph has copies of constants, to write into
            self._freeze(names)
            result = map_arguments(constants, lambda leaf: _COPY(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        else:
            result = func(*args, **kwargs)
            self._follow_writes(known.values(), names, writes)
        for leaf, value in zip(_leaves(result), _leaves(computed), strict=True):
            if isinstance(leaf, torch.Tensor) and self._of(leaf) is None and not leaf.is_inference():
                self.known[id(leaf)] = _Known(leaf, value, names, _version(leaf))
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
                self._know(name, buffer)
            for place, value in self.given.items():
                self._know(place, value)

    def _of(self, value: Any) -> _Known | None:
        known = self.known.get(id(value))
        return known if known is not None and known.tensor is value and known.version == _version(value) else None

    def _sharing_memory(self, written: Any) -> list[_Known]:
        memory = {_memory(leaf) for leaf in _leaves(written) if isinstance(leaf, torch.Tensor)}
        return [entry for entry in self.known.values() if _memory(entry.tensor) in memory]

    def _follow_writes(self, read: Iterable[_Known], names: frozenset[Any], named_so: bool) -> None:
        """Let tensors that a known operation has written into, as their values have seen, depend on `names`, too."""
        for written in [entry for entry in read if named_so or entry.version != _version(entry.tensor)]:
            for entry in self._sharing_memory(written.tensor):
                version = _version(entry.tensor)  # a tensor and its .data have counts of their own
                if entry.version in (written.version, version):
                    self.known[id(entry.tensor)] = dataclasses.replace(entry, names=entry.names | names, version=version)

    def _forget(self, written: Any) -> None:
        """Tensors that share memory with those written to are unknown from now on."""
        for entry in self._sharing_memory(written):
            del self.known[id(entry.tensor)]

    def _freeze(self, names: frozenset[Any]) -> None:
        self.frozen.update({name: self.values[name] for name in names})

    def _positions(self, leaf: Any) -> Any:
        """The positions where a known mask holds."""
        known = self._of(leaf)
        if known is None or leaf.dtype != torch.bool or leaf.ndim != 1:
            return leaf
        self._freeze(known.names)
        with DisableTorchFunction(), disable_current_modes():
            return known.value.nonzero()[:, 0]

    def _number(self, leaf: Any) -> Any:
        """An index, a bound of a slice or a size as a number, if it is a known scalar tensor."""
        known = self._of(leaf)
        if known is None or leaf.ndim or leaf.dtype == torch.bool:
            return leaf
        self._freeze(known.names)
        with DisableTorchFunction(), disable_current_modes():
            return known.value.item()


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0]  # that of an overload is add_.Tensor


def _has_sizes_of_values(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether the sizes of a result are values of the arguments."""
    if name in _SIZED_BY_VALUES or (name == "where" and len(args) + len(keywords) == 1):
        return True
    if name in _FROM_NUMBERS:
        return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(args))
    if name == "repeat_interleave":
        return any(isinstance(one, torch.Tensor) for one in (*args[1:], *keywords.values()))
    if name == "__getitem__":
        return any(isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in _leaves(args[1]))
    return False


def has_open_sizes(tensor: torch.Tensor) -> bool:
    """Whether an export leaves sizes of a tensor open."""
    return any(isinstance(size, _SYMBOLS) for size in tensor.shape)


def _like(tensor: torch.Tensor) -> _Known:
    """An entry for the sizes of a tensor, with any values."""
    with DisableTorchFunction(), disable_current_modes():
        value = torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return _Known(tensor, value, frozenset(), _version(tensor))


def _memory(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common, be they with or without values."""
    with DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to, or memory that it shares. Tensors without values count this, too."""
    with DisableTorchFunction():
        return int(tensor._version)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_COPY = torch.ops.aten.lift_fresh_copy.default


def _leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    map_arguments(structure, found.append)
    return found
