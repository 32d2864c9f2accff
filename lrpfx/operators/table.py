"""The operator table: find the row of a function, method, module class or operator name.

The rows are in the other files of this folder, one file per family.
"""

import copyreg
import dataclasses
import functools
import operator
from typing import Any

import torch
from torch import fx

from lrpfx.errors import InputError
from lrpfx.ir.operator import Function, Operator, Spelling
from lrpfx.operators import (
    activations,
    attention,
    complex_numbers,
    discrete,
    dropout,
    embedding,
    linear,
    linear_algebra,
    normalization,
    pooling,
    products,
    recurrent,
    reductions,
    resizing,
    scans,
    selection,
    statistics,
    sums,
    views,
)
from lrpfx.support.torch_internals import aten as aten_operator

FAMILIES = (
    *(
        linear,
        normalization,
        activations,
        pooling,
        sums,
        scans,
        reductions,
        statistics,
        products,
        linear_algebra,
        attention,
        recurrent,
        embedding,
    ),
    *(resizing, dropout, views, selection, discrete, complex_numbers),
)

#: Argument names of numpy and ATen -> canonical names, used if the row has such an argument.
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
#: Settings of kernels and of warnings, which do not change results.
WITHOUT_EFFECT = frozenset({"cudnn_enabled", "cudnn_enable", "_stacklevel"})

#: Calls whose results are Python values or depend only on shapes, never on the values of a tensor.
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
#: Functions that make a tensor in memory of its own, from sizes and numbers, and their operators.
FACTORY_NAMES = frozenset(
    {"arange", "linspace", "logspace", "zeros", "ones", "full", "empty", "eye", "scalar_tensor", "tril_indices", "triu_indices"}
    | {f"{kind}_window" for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser")}
)
FACTORIES: frozenset[Any] = METADATA_FUNCTIONS | frozenset(
    getattr(getattr(torch.ops.aten, packet), overload)
    for packet in FACTORY_NAMES
    for overload in getattr(torch.ops.aten, packet).overloads()
)
METADATA_ATTRIBUTES = frozenset(
    {"shape", "is_nested", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "itemsize"}
)

_operators: dict[str, Operator] = {}
_functions: dict[Function, Spelling] = {}
_methods: dict[str, Spelling] = {}
_foreign: dict[str, Spelling] = {}


def add(row: Operator) -> None:
    """Add a row to the table. Its spellings then refer to the operator, and its modules are of its kind."""
    if row.name in _operators:
        raise InputError(f"the operator table has a row named {row.name!r}", topic="own-rules")
    _operators[row.name] = row
    row.kind.include(row.spellings.modules)
    _functions.update({function: Spelling(row, *order) for function, order in row.spellings.functions.items()})
    _methods.update({method: Spelling(row, *order) for method, order in row.spellings.methods.items()})
    _foreign.update({path: Spelling(row, *order) for path, order in row.spellings.foreign.items()})
    rows_of_class.cache_clear()


def lookup(function: Function) -> Spelling | None:
    """The spelling of a callable, or None if the table does not list it."""
    try:
        spelling = _functions.get(function)
    except TypeError:  # the table lists no unhashable callables
        return None
    if isinstance(function, type) and (dataclasses.is_dataclass(function) or hasattr(function, "_fields")):
        return Spelling(operator_named("container"), ())
    name = getattr(function, "__name__", "")
    if spelling is None and name in _methods and getattr(torch.Tensor, name, None) is function:
        return _methods[name]
    return spelling or _foreign.get(f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}")


def lookup_method(name: str) -> Spelling | None:
    """The spelling of a tensor method, or None if the table does not list it."""
    return _methods.get(name)


def operator_named(name: str) -> Operator:
    """The row called `name`. `InputError` if there is none, as for a pickle that refers to a row of its user's."""
    if name not in _operators:
        raise InputError(f"the operator table has no row named {name!r}; lrpfx.operators.table.add adds one", topic="own-rules")
    return _operators[name]


def spelling_of(node: fx.Node) -> Spelling | None:
    """The spelling of a call, or None if the table does not list it."""
    if node.op == "call_method":
        return lookup_method(str(node.target))
    return lookup(node.target) if node.op == "call_function" and callable(node.target) else None


def is_discrete_result(value: Any, index: Any) -> bool:
    """Whether result number `index` of `value` holds integers, such as the indices that sorting returns."""
    spelling = spelling_of(value) if isinstance(value, fx.Node) else None
    if spelling is None or not isinstance(index, int):
        return False
    return index in spelling.operator.outputs.discrete_results or index + 2 in spelling.operator.outputs.discrete_results


def writes_in_place(node: fx.Node) -> bool:
    """Whether a call overwrites its first argument, according to the table or, for an unlisted call, to its name.

    In torch, a trailing underscore marks an in-place operation.
    """
    spelling = spelling_of(node)
    if spelling is not None:
        return spelling.inplace
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.target is operator.setitem or (name.endswith("_") and not name.endswith("__"))


#: Functions without a row that overwrite nothing.
_READS = (getattr, torch._assert)


def may_overwrite(node: fx.Node) -> bool:
    """Whether a call overwrites one of its arguments, or is not in the table."""
    if node.op not in ("call_function", "call_method") or node.target in _READS:
        return False
    return "out" in node.kwargs or spelling_of(node) is None or writes_in_place(node)


def all_operators() -> tuple[Operator, ...]:
    """Every row of the table."""
    return tuple(_operators.values())


def module_classes() -> tuple[type, ...]:
    """All module classes in the table."""
    return tuple({module for row in _operators.values() for module in row.spellings.modules})


@functools.lru_cache(maxsize=1024)
def rows_of_class(module_class: type) -> tuple[Operator, ...]:
    """The rows that list a module class or one of its base classes."""
    return tuple(row for row in _operators.values() if issubclass(module_class, row.spellings.modules))


for _family in FAMILIES:
    for _row in _family.ROWS:
        add(_row)

# Copying or unpickling a row returns the row in the table.
copyreg.pickle(Operator, lambda row: (operator_named, (row.name,)))
