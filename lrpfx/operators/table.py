"""The operator table: what every callable that a front end can emit means.

The rows stand in the other files of this folder, a file for each family; here they are found by their spellings.
"""

import copyreg
import dataclasses
import functools
import operator
from typing import Any

import torch
from torch import fx

from lrpfx.ir.operator import Function, Operator, Spelling
from lrpfx.operators import (
    activations,
    attention,
    discrete,
    dropout,
    embedding,
    linear,
    normalization,
    pooling,
    products,
    resizing,
    selection,
    statistics,
    sums,
    views,
)
from lrpfx.support.torch_internals import OpOverload
from lrpfx.support.torch_internals import aten as aten_operator

FAMILIES = (
    *(linear, normalization, activations, pooling, sums, statistics, products, attention, embedding, resizing, dropout),
    *(views, selection, discrete),
)

#: Names that numpy and ATen use for arguments: each stands for what follows, where the row has such an argument.
ALIASES = {
    "self": ("input",),
    "x": ("input",),
    "a": ("input",),
    "x1": ("input",),
    "x2": ("other",),
    "mat2": ("other",),
    "vec": ("other",),
    "vec2": ("other",),
    "axis": ("dim",),
    "keepdims": ("keepdim",),
    "src": ("source",),
    "train": ("training",),
}
#: Settings of kernels and of warnings, which change no result.
WITHOUT_EFFECT = frozenset({"cudnn_enabled", "cudnn_enable", "_stacklevel"})

#: Results that are host values or depend on shapes alone, never on the values of a tensor.
METADATA_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_contiguous", "get_device"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)
METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    {torch._assert, torch.numel, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}
    | {torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch._check, isinstance}
    | {
        *map(aten_operator, ["sym_size.int", "sym_numel.default", "sym_stride.int", "zeros_like.default", "ones_like.default"]),
        *map(aten_operator, ["empty_like.default", "full_like.default", "new_zeros.default", "new_ones.default"]),
        *map(aten_operator, ["new_full.default", "new_empty.default", "_assert_tensor_metadata.default"]),
    }
)
METADATA_ATTRIBUTES = frozenset(
    {"shape", "is_nested", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "itemsize"}
)

_operators: dict[str, Operator] = {}
_functions: dict[Function, Spelling] = {}
_methods: dict[str, Spelling] = {}
_foreign: dict[str, Spelling] = {}


def add(row: Operator) -> None:
    """Let a row join the table: from now on its spellings mean the operator, and its modules are of its kind."""
    _operators[row.name] = row
    row.kind.include(row.modules)
    _functions.update({function: Spelling(row, *order) for function, order in row.functions.items()})
    _methods.update({method: Spelling(row, *order) for method, order in row.methods.items()})
    _foreign.update({path: Spelling(row, *order) for path, order in row.foreign.items()})
    rows_of_class.cache_clear()
    aten_names.cache_clear()


def lookup(function: Function) -> Spelling | None:
    """The spelling behind a callable, or None if the table does not list it."""
    try:
        spelling = _functions.get(function)
    except TypeError:  # unhashable callables are nobody's spelling
        return None
    if isinstance(function, type) and (dataclasses.is_dataclass(function) or hasattr(function, "_fields")):
        return Spelling(operator_named("container"), ())
    name = getattr(function, "__name__", "")
    if spelling is None and name in _methods and getattr(torch.Tensor, name, None) is function:
        return _methods[name]
    return spelling or _foreign.get(f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}")


def lookup_method(name: str) -> Spelling | None:
    """The spelling behind a tensor method, or None if the table does not list it."""
    return _methods.get(name)


def operator_named(name: str) -> Operator:
    """The row called `name`, which must exist."""
    return _operators[name]


def spelling_of(node: fx.Node) -> Spelling | None:
    """The spelling that a call is, or None if the table does not list it."""
    if node.op == "call_method":
        return lookup_method(str(node.target))
    return lookup(node.target) if node.op == "call_function" and callable(node.target) else None


def writes_in_place(node: fx.Node) -> bool:
    """Whether a call overwrites its first argument: what the table says of its spelling, and otherwise its name.

    Underscores at the end mark in-place operations throughout torch, listed in the table or not.
    """
    spelling = spelling_of(node)
    if spelling is not None:
        return spelling.inplace
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.target is operator.setitem or (name.endswith("_") and not name.endswith("__"))


def all_operators() -> tuple[Operator, ...]:
    """Every row of the table."""
    return tuple(_operators.values())


@functools.cache
def aten_names() -> frozenset[str]:
    """Names of ATen's operators that rows list, without their overloads."""
    return frozenset(function.overloadpacket.__name__ for function in _functions if isinstance(function, OpOverload))


def module_classes() -> tuple[type, ...]:
    """All torch.nn classes that are spellings of some operator."""
    return tuple({module for row in _operators.values() for module in row.modules})


@functools.lru_cache(maxsize=1024)
def rows_of_class(module_class: type) -> tuple[Operator, ...]:
    """The rows that a class of modules spells."""
    return tuple(row for row in _operators.values() if issubclass(module_class, row.modules))


for _family in FAMILIES:
    for _row in _family.ROWS:
        add(_row)

# Copies of a row are the row itself, also those that a pickle holds.
copyreg.pickle(Operator, lambda row: (operator_named, (row.name,)))
