"""Guards: facts about a model's arguments that a graph relies on, checked at every call.

A guard is plain data and can be pickled. Its check is cheap, and torch.compile can trace it.
"""

import ast
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from lrpfx.errors import CaptureError

_ABSENT = object()


@dataclass(frozen=True)
class Place:
    """The place of a value in the arguments of a call: the name of the argument, and the keys that lead to the value in it."""

    argument: str
    keys: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.argument + "".join(f"[{key!r}]" for key in self.keys)

    def value_in(self, arguments: Mapping[str, Any]) -> Any:
        """The value at this place, or `_ABSENT`."""
        value = arguments.get(self.argument, _ABSENT)
        for key in self.keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return _ABSENT
        return value


def place_of(argument: str, path: Sequence[Any]) -> Place:
    """The place that a key path of torch's pytrees leads to."""
    return Place(argument, tuple(getattr(key, "idx", getattr(key, "key", None)) for key in path))


def is_constant(value: Any) -> bool:
    """Whether an argument with this example value is a constant of the graph and not an input."""
    return value is None or isinstance(value, (bool, int, float, str))


class Guard(ABC):
    """A fact about the arguments that the graph relies on."""

    #: Whether it rules out a single value of one size, and no other.
    excludes_one_size = False

    @abstractmethod
    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """The error message for arguments, given by name, that violate the guard; None if they satisfy it."""


@dataclass(frozen=True)
class FixedValue(Guard):
    """An argument that is a constant of the graph: a flag, a number, a string or None."""

    place: Place
    value: Any
    default: bool = False  # whether it is forward's default, because the example inputs lack it

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        given = self.place.value_in(arguments)
        if given is _ABSENT or _same(given, self.value):
            return None
        why = "its default, because example_inputs do not include it" if self.default else "the value in example_inputs"
        shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
        return (
            f"the argument {str(self.place)!r} is {shown}, but the graph was made with {self.value!r}, {why}; for another "
            "value, transform the model with this value in example_inputs"
        )


@dataclass(frozen=True)
class FixedEntries(Guard):
    """A tensor that the forward reads as numbers, so that the graph is valid for these alone."""

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype  # a mask of 0 and 1 chooses other rows than one of False and True
    entries: bytes = field(repr=False)

    @classmethod
    def of(cls, place: Place, tensor: torch.Tensor) -> "FixedEntries":
        """The guard for the entries of a tensor."""
        return cls(place, tuple(tensor.shape), tensor.dtype, _bytes_of(tensor))

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        given = self.place.value_in(arguments)
        if not isinstance(given, torch.Tensor):
            return None  # another guard says what is wrong
        if given.dtype != self.dtype:
            return (
                f"the argument {str(self.place)!r} has dtype {given.dtype}, but the graph was made for {self.dtype}, and "
                "forward reads its entries as numbers; for others, transform the model with them in example_inputs"
            )
        if tuple(given.shape) == self.shape and _bytes_of(given) == self.entries:
            return None
        return (
            f"the entries of the argument {str(self.place)!r} differ from those in example_inputs, and forward reads them as "
            "numbers, so the graph is valid for these alone; for others, transform the model with them in example_inputs"
        )


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The entries as bytes, which are equal for NaN, too, and soon compared."""
    entries = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return bytes((torch.view_as_real(entries) if entries.is_complex() else entries).view(torch.uint8).numpy())


def _same(given: Any, value: Any) -> bool:
    if given is None or value is None or isinstance(given, torch.Tensor):
        return given is value
    return bool(given == value) or (isinstance(value, float) and math.isnan(value) and given != given)


def _not_a_tensor(place: Place, given: Any) -> str:
    return (
        f"the argument {str(place)!r} is {given!r}, but the graph was made with a tensor. Pass one; for calls without it, "
        "transform the model with example_inputs that leave it out"
    )


@dataclass(frozen=True)
class FixedKind(Guard):
    """A tensor that is a signal (floating-point or complex numbers) or is not a signal (integers or booleans)."""

    place: Place
    signal: bool

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        given = self.place.value_in(arguments)
        if given is None:
            return _not_a_tensor(self.place, given)
        if not isinstance(given, torch.Tensor) or (given.is_floating_point() or given.is_complex()) is self.signal:
            return None
        if self.signal:
            return (
                f"the input {str(self.place)!r} has dtype {given.dtype}, which carries no relevance, but the compiler "
                "assumed a signal. Pass a floating-point tensor, or transform the model with such example_inputs, or with "
                f"constants=({self.place.argument!r},)"
            )
        return (
            f"the input {str(self.place)!r} has dtype {given.dtype}, but the compiler assumed integers or booleans, "
            "which carry no relevance. Transform the model with example_inputs of this dtype"
        )


@dataclass(frozen=True)
class FixedSizes(Guard):
    """A tensor with a fixed number of dimensions and these sizes; None for a size that may vary."""

    place: Place
    sizes: tuple[int | None, ...]
    why: str

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        given = self.place.value_in(arguments)
        if given is _ABSENT:
            return None
        if not isinstance(given, torch.Tensor):
            return _not_a_tensor(self.place, given)
        if given.ndim != len(self.sizes):
            return (
                f"the input {str(self.place)!r} has {given.ndim} dimensions, but the graph was made for {len(self.sizes)}: "
                f"{self.why}. Transform the model with such example_inputs"
            )
        for dimension, size in enumerate(self.sizes):
            if size is not None and given.shape[dimension] != size:
                return (
                    f"the input {str(self.place)!r} has size {given.shape[dimension]} in dimension {dimension}, but the graph "
                    f"was made for {size}: {self.why}. Transform the model with such example_inputs"
                )
        return None


@dataclass(frozen=True)
class SharedSize(Guard):
    """Dimensions of one size that may vary between limits: a batch, or the length of a sequence.

    `of`: the dimensions, as (place, dimension). `upper`: None if there is no upper limit.
    """

    of: tuple[tuple[Place, int], ...]
    lower: int = 0
    upper: int | None = None

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        first = ""
        common = -1
        for place, dimension in self.of:
            value = place.value_in(arguments)
            if not isinstance(value, torch.Tensor) or value.ndim <= dimension:
                continue  # another guard reports this
            size = value.shape[dimension]
            found = f"dimension {dimension} of the input {str(place)!r} has size {size}"
            if size < self.lower or (self.upper is not None and size > self.upper):
                return f"{found}, but the graph is valid only for {self.range}"
            if first and size != common:
                return f"{first}, but {found}: the graph needs the same size for both"
            first, common = first or found, size
        return None

    @property
    def range(self) -> str:
        """The allowed sizes, in words."""
        lower = f"size >= {self.lower}" if self.upper is None else f"{self.lower} <= size <= {self.upper}"
        return f"size <= {self.upper}" if self.upper is not None and self.lower <= 1 else lower

    def __str__(self) -> str:
        named = " = ".join(f"{place}.shape[{dimension}]" for place, dimension in self.of)
        return named if self.lower <= 1 and self.upper is None else f"{named}, {self.range}"


@dataclass(frozen=True)
class FloatingPoint(Guard):
    """A floating-point tensor, because forward checks for one."""

    place: Place

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        given = self.place.value_in(arguments)
        if not isinstance(given, torch.Tensor) or given.is_floating_point():
            return None
        return f"the input {str(self.place)!r} has dtype {given.dtype}, but the graph was made for floating-point numbers"


#: Names that an expression may use besides `sizes`: the functions in the conditions of torch.export.
_NAMES = {**SYMPY_INTERP, "math": math, "inf": math.inf, "max": max, "min": min}
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.BinOp, ast.operator),
    *(ast.UnaryOp, ast.unaryop, ast.IfExp, ast.Call, ast.Subscript, ast.Load),
)


def _is_arithmetic(node: ast.AST) -> bool:
    """Whether a part of an expression is plain arithmetic. The expression may come from an untrusted file."""
    if isinstance(node, ast.Name):
        return node.id == "sizes" or (node.id in _NAMES and not node.id.startswith("_"))
    if isinstance(node, ast.Attribute):
        library = node.value.id if isinstance(node.value, ast.Name) else ""
        return (library == "math" and not node.attr.startswith("_")) or (library == "torch" and node.attr.startswith("sym_"))
    return isinstance(node, _ARITHMETIC)


@dataclass(frozen=True)
class SizeCondition(Guard):
    """A condition on sizes that the graph relies on. For other sizes, the model may not compute the same as the graph.

    `expression` is a Python expression in which `sizes[0]`, `sizes[1]`, ... are the sizes in `of`, as (place, dimension).
    """

    expression: str
    of: tuple[tuple[Place, int], ...]
    holds: Callable[[Sequence[int]], Any] = field(init=False, repr=False, compare=False)
    readable: str = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)  # names of the sizes in messages

    def __post_init__(self) -> None:
        tree = ast.parse(self.expression, mode="eval")
        if not all(_is_arithmetic(node) for node in ast.walk(tree)):
            raise CaptureError(f"torch.export found a condition on sizes that is not arithmetic: {self.expression}")
        object.__setattr__(self, "holds", eval(f"lambda sizes: {self.expression}", dict(_NAMES)))
        readable = ast.unparse(tree)
        for number, (place, dimension) in enumerate(self.of):
            readable = readable.replace(f"sizes[{number}]", f"{place}.shape[{dimension}]")
        object.__setattr__(self, "readable", readable)
        names_of_sizes = tuple(f"dimension {dimension} of the input {str(place)!r}" for place, dimension in self.of)
        object.__setattr__(self, "names", names_of_sizes)

    @property
    def excludes_one_size(self) -> bool:  # type: ignore[override]
        text = self.expression.replace(" ", "")
        return re.fullmatch(r"sizes\[0\]!=\d+|\d+!=sizes\[0\]|Ne\(sizes\[0\],\d+\)|Ne\(\d+,sizes\[0\]\)", text) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeCondition, (self.expression, self.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SizeCondition":
        return self

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        sizes = []
        for place, dimension in self.of:
            value = place.value_in(arguments)
            if not isinstance(value, torch.Tensor) or value.ndim <= dimension:
                return None  # another guard reports this
            sizes.append(value.shape[dimension])
        try:
            if self.holds(sizes):
                return None
        except ZeroDivisionError:
            pass  # it divides by a size, or by a term that is zero for these sizes: it does not hold
        found = "; ".join([f"{name} has size {size}" for name, size in zip(self.names, sizes, strict=True)])
        return (
            f"{found}, but the graph is valid only for {self.readable}: forward branches on this condition or needs it. "
            "Transform the model with example_inputs of these sizes"
        )
