"""Open sizes: the dimensions of the inputs that may vary in a graph.

torch.export finds out which sizes a model fixes, but it misses relations between inputs that the model needs: a mask with fewer
rows than the batch fails only when the graph runs, and sizes of one are assumed not to occur. So every open size is tried at
other sizes, against the model itself.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import Dim
from torch.nn import functional

from lrpfx.errors import CaptureError, InputError, InputTypeError, LrpfxError
from lrpfx.ir.guards import FixedSizes, Guard, Place, SharedSize, SizeCondition, place_of
from lrpfx.ir.node import ancestors_of
from lrpfx.passes.driver import Verification, record
from lrpfx.passes.program import PassResult, Program
from lrpfx.support.checked_indices import checked_indices
from lrpfx.support.torch_internals import Interpreter, pytree

DynamicShapes = Mapping[str, Any] | bool | None
Dimension = tuple[Place, int]  # a tensor, and the number of one of its dimensions
Named = dict[str, Any]  # arguments by name
Symbol = Any  # a size that torch.export left open, a symbol of sympy


class FinalCaptureError(CaptureError):
    """A failure that the user can mend, whatever another front end says."""


SIZES = "open_sizes"  # the name of the entry in the history
#: Requested limits are tried if the inputs then have at most this many entries.
_MOST_ENTRIES = 1 << 20
#: The largest batch, and the largest other size, of runs that find relations between sizes.
_BASE = ((2, 12), (2, 1 << 62))
_SMALL = 8  # a condition that holds from two to here excludes one alone
_CANDIDATES = 64  # sizes tried in each direction, until one satisfies all conditions


# --- what the user asks for ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """What `dynamic_shapes` says of a dimension: fixed, or open between limits."""

    is_open: bool
    lower: int = 0
    upper: int | None = None
    name: str = ""  # of a torch.export.Dim; dimensions with one name have one size


def wishes_of(dynamic_shapes: DynamicShapes, named: Mapping[str, Any]) -> dict[Dimension, Wish]:
    """The user's wishes for single dimensions of the arguments `named`. Raises `InputError`, `InputTypeError`."""
    if dynamic_shapes is None or dynamic_shapes is True:
        return {}
    if dynamic_shapes is False:
        return {(place, number): Wish(False) for place, tensor in tensors_in(named) for number in range(tensor.ndim)}
    if not isinstance(dynamic_shapes, Mapping):
        raise InputTypeError(f"dynamic_shapes is {_FORM}, not a {type(dynamic_shapes).__name__}", topic="dynamic-shapes")
    unknown = [name for name in dynamic_shapes if name not in named]
    if unknown:
        raise InputError(
            f"dynamic_shapes names {unknown[0]!r}, but example_inputs give {', '.join(named)}", topic="dynamic-shapes"
        )
    wishes: dict[Dimension, Wish] = {}
    for name, asked in dynamic_shapes.items():
        _collect(wishes, Place(name), asked, named[name])
    return wishes


_FORM = "a dict such as {'input_ids': {1: True}} (True, (smallest, largest), a torch.export.Dim, or None for a fixed size)"
#: The class of named sizes, which torch 2.6 does not name.
_DIM: Any = Dim if isinstance(Dim, type) else type(Dim("size"))


def _collect(wishes: dict[Dimension, Wish], place: Place, asked: Any, value: Any) -> None:
    if asked is None:
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(asked, Mapping):
            raise InputTypeError(f"dynamic_shapes is {_FORM}, but {str(place)!r} has {asked!r}", topic="dynamic-shapes")
        for number, one in asked.items():
            if not isinstance(number, int) or not -value.ndim <= number < value.ndim:
                raise InputError(
                    f"dynamic_shapes asks for dimension {number!r} of {str(place)!r}, which has {value.ndim}",
                    topic="dynamic-shapes",
                )
            wishes[place, number % value.ndim] = _wish(one, place)
    elif isinstance(value, (Mapping, tuple, list)):
        items = asked.items() if isinstance(asked, Mapping) else enumerate(asked)
        for key, one in items:
            inner = Place(place.argument, (*place.keys, key))
            try:
                _collect(wishes, inner, one, value[key])
            except (KeyError, IndexError, TypeError):
                raise InputError(
                    f"dynamic_shapes names {inner}, which example_inputs do not have", topic="dynamic-shapes"
                ) from None
    else:
        raise InputError(f"dynamic_shapes names {str(place)!r}, which is {value!r} and not a tensor", topic="dynamic-shapes")


def _wish(asked: Any, place: Place) -> Wish:
    if asked is True or asked is Dim.AUTO or asked is Dim.DYNAMIC:
        return Wish(True)
    if asked is None or asked is False or asked is Dim.STATIC:
        return Wish(False)
    if isinstance(asked, _DIM):
        lower, upper = int(asked.min), asked.max
        return Wish(True, lower, upper if isinstance(upper, int) else None, asked.__name__)
    if isinstance(asked, tuple) and len(asked) == 2 and all(type(limit) is int for limit in asked) and asked[0] <= asked[1]:
        return Wish(True, *asked)
    raise InputTypeError(f"dynamic_shapes is {_FORM}, but {str(place)!r} has {asked!r}", topic="dynamic-shapes")


# --- what is tried ------------------------------------------------------------------------------------------------------------


def tensors_in(named: Mapping[str, Any]) -> list[tuple[Place, torch.Tensor]]:
    """The tensors in arguments, with their places."""
    return [
        (place_of(name, path), leaf)
        for name, value in named.items()
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor)
    ]


def attempts(named: Mapping[str, Any], wishes: Mapping[Dimension, Wish]) -> list[set[Dimension]]:
    """Sets of dimensions to leave open in an export, each smaller than the one before.

    Height and width of images, floating-point inputs of four or more dimensions, are open only on request: reasoning about
    the sizes of their windows can take torch.export minutes.
    """
    tensors = tensors_in(named)
    batch = next((tensor.shape[0] for _, tensor in tensors if tensor.ndim), None)
    asked = {dimension for dimension, wish in wishes.items() if wish.is_open}
    fixed = set(wishes) - asked
    everything = {
        (place, number)
        for place, tensor in tensors
        for number in range(tensor.ndim)
        if number == 0 or tensor.ndim < 4 or not tensor.is_floating_point()
    }
    batch_and_length = {dimension for dimension in everything if dimension[1] < 2}
    batches = {(place, 0) for place, tensor in tensors if tensor.ndim and tensor.shape[0] == batch}
    tried: list[set[Dimension]] = []
    for dimensions in (everything, batch_and_length, batches, set()):
        chosen = dimensions - fixed | asked
        if chosen not in tried:
            tried.append(chosen)
    return tried


def enlarged(named: Named, dimensions: set[Dimension], runs: Callable[[Named], bool]) -> Named:
    """The arguments with open sizes of one made larger, as far as the model allows: torch.export fixes sizes of one."""
    tensors = dict(tensors_in(named))
    ones = [(place, number) for place, number in dimensions if tensors[place].shape[number] == 1]
    batch = [dimension for dimension in ones if dimension[1] == 0]
    discrete = [dimension for dimension in ones if not tensors[dimension[0]].is_floating_point()]
    tried: list[set[Dimension]] = [set()]
    for chosen in (set(ones), {*batch, *discrete}, set(batch)):
        if chosen not in tried:
            tried.append(chosen)
            larger = resized(named, {(place, number): 3 if number else 2 for place, number in chosen})
            if runs(larger):
                return larger
    return named


def other_batch(named: Named, dimensions: set[Dimension]) -> Named | None:
    """The arguments with a larger batch, of a size that no other of their dimensions has; None if no batch is to be open."""
    tensors = dict(tensors_in(named))
    batches = [(place, number) for place, number in dimensions if number == 0]
    taken = {size for tensor in tensors.values() for size in tensor.shape}
    sizes = {tensors[place].shape[0] for place, _ in batches}
    if len(sizes) != 1:
        return None
    larger = next(size for size in itertools.count(max(*sizes, 1) + 1) if size not in taken)
    return resized(named, dict.fromkeys(batches, larger))


def resized(named: Mapping[str, Any], sizes: Mapping[Dimension, int]) -> Named:
    """The arguments with other sizes: entries are repeated from the start, or left out at the end.

    Integers may count entries that are left out, as the edges of a graph count its nodes: they count others then.
    """
    tensors = dict(tensors_in(named))
    fewer = {tensors[place].shape[number]: size for (place, number), size in sizes.items()}
    fewer = {old: new for old, new in fewer.items() if new < old}

    def change(name: str, path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = place_of(name, path)
        for number, old in enumerate(leaf.shape):
            new = sizes.get((place, number), old)
            if new != old and old:  # entries of an empty tensor cannot be repeated
                leaf = leaf.index_select(number, torch.arange(new, device=leaf.device) % old)
        if fewer and leaf.dtype in (torch.int32, torch.int64) and leaf.numel() and int(leaf.min()) >= 0:
            counted = [new for old, new in fewer.items() if int(leaf.max()) < old]
            leaf = leaf % min(counted) if counted else leaf
        return leaf

    return {
        name: pytree.tree_map_with_path(lambda path, leaf, name=name: change(name, path, leaf), value)
        for name, value in named.items()
    }


# --- what holds ---------------------------------------------------------------------------------------------------------------


@dataclass
class OpenSizes:
    """The sizes that torch.export left open: an expression for each dimension of the inputs, and limits of the symbols."""

    tensors: dict[Place, tuple[Any, ...]]  # each tensor's sizes: numbers, or expressions of symbols
    limits: dict[Symbol, tuple[int, int | None]] = field(default_factory=dict)

    def of_symbols(self) -> dict[Symbol, list[Dimension]]:
        """The dimensions whose size is a symbol itself, in the order of the inputs."""
        found: dict[Symbol, list[Dimension]] = {}
        for place, sizes in self.tensors.items():
            for number, size in enumerate(sizes):
                if not isinstance(size, int) and size.is_Symbol:
                    found.setdefault(size, []).append((place, number))
        return found

    def dimensions(self, values: Mapping[Symbol, int]) -> dict[Dimension, int]:
        """The size of each open dimension for these values of the symbols."""
        return {
            (place, number): int(size.subs(values))
            for place, sizes in self.tensors.items()
            for number, size in enumerate(sizes)
            if not isinstance(size, int)
        }

    def guards(self) -> list[Guard]:
        """Guards for these sizes as they are."""
        fixed = [
            FixedSizes(place, tuple(size if isinstance(size, int) else None for size in sizes), _FIXED)
            for place, sizes in self.tensors.items()
        ]
        return [*fixed, *(SharedSize(tuple(of), *self.limits[symbol]) for symbol, of in self.of_symbols().items())]


_FIXED = "torch.export fixes this size"
_ON_REQUEST = "it may vary only if dynamic_shapes asks for it"


@dataclass
class _Group:
    """Symbols that have one size, and the sizes that are allowed."""

    symbols: tuple[Symbol, ...]
    size: int  # in the example
    lower: int = 0
    upper: int | None = None


class _Probe:
    """Compares a graph with its model at other sizes."""

    def __init__(
        self, program: Program, sizes: OpenSizes, named: Named, run: Callable[[Named], Any], conditions: Sequence[Guard]
    ) -> None:
        self.program, self.sizes, self.named, self.run, self.conditions = program, sizes, named, run, conditions
        shapes = {place: tensor.shape for place, tensor in tensors_in(named)}
        self.places = sizes.of_symbols()
        self.example = {symbol: shapes[of[0][0]][of[0][1]] for symbol, of in self.places.items()}
        self.found: dict[tuple[int, ...], Verification | None] = {}
        self.base = self._smaller()

    def _smaller(self) -> dict[Symbol, int]:
        """Smaller sizes than those of the example, at which runs are faster, if the graph is right there."""
        for most in _BASE:
            base = {symbol: min(size, most[self.places[symbol][0][1] > 0]) for symbol, size in self.example.items()}
            if base == self.example or (self.admits(base) and self.works(base)):
                return base
        return self.example

    def values(self, symbols: Sequence[Symbol], size: int) -> dict[Symbol, int]:
        return {**self.base, **dict.fromkeys(symbols, size)}

    def admits(self, values: Mapping[Symbol, int]) -> bool:
        """Whether torch.export's own conditions allow these sizes."""
        for symbol, value in values.items():
            lower, upper = self.sizes.limits[symbol]
            if value < lower or (upper is not None and value > upper):
                return False
        sizes = self.sizes.dimensions(values)
        return min(sizes.values()) > 0 and not any(guard.problem(self.arguments(values)) for guard in self.conditions)

    def arguments(self, values: Mapping[Symbol, int]) -> Named:
        return resized(self.named, self.sizes.dimensions(values))

    def works(self, values: Mapping[Symbol, int]) -> bool:
        """Whether the graph computes what the model computes for these sizes."""
        return self.verification(values) is not None

    def verification(self, values: Mapping[Symbol, int]) -> Verification | None:
        """The model's output for these sizes if the graph gives the same; else None."""
        key = tuple(values.values())
        if key not in self.found:
            self.found[key] = self._compared(values)
        return self.found[key]

    def _compared(self, values: Mapping[Symbol, int]) -> Verification | None:
        arguments = self.arguments(values)
        try:
            again = functools.partial(self.run, arguments)
            verification = Verification(tuple(arguments.values()), again(), records=False, again=again)
            with checked_indices(self.program.root):
                verification.check(self.program, "capture")
        except LrpfxError:
            return None
        return verification

    def beside(self, symbols: Sequence[Symbol], base: Mapping[Symbol, int]) -> list[int]:
        """The nearest size above and below `base` that the conditions admit."""
        found = []
        for step in (1, -1):
            candidates = (base[symbols[0]] + step * distance for distance in range(1, _CANDIDATES))
            admitted = (one for one in candidates if one > 0 and self.admits({**base, **dict.fromkeys(symbols, one)}))
            found += [one for one in [next(admitted, None)] if one is not None]
        return found

    def _fails_alone(self, symbols: Sequence[Symbol]) -> bool:
        """Whether the graph is wrong for a size of one, which no condition forbids."""
        values = self.values(symbols, 1)
        return self.admits(values) and not self.works(values)

    def group(self, symbols: Sequence[Symbol], partly: bool = False) -> _Group | None:
        """The sizes that these symbols may have together, or None; `partly`: also if only larger or smaller ones work."""
        size = self.base[symbols[0]]
        beside = self.beside(symbols, self.base)
        working = []
        for one in beside:
            if self.works(self.values(symbols, one)):
                working.append(one)
            elif not partly:
                return None
        if not working:
            return None
        lower = max(self.sizes.limits[symbol][0] for symbol in symbols)
        uppers = [limit for symbol in symbols if (limit := self.sizes.limits[symbol][1]) is not None]
        if any(one > size for one in beside) and max(working) < size:
            uppers.append(self.example[symbols[0]])
        if any(one < size for one in beside) and min(working) > size:
            lower = max(lower, size)
        elif lower < 2 and size > 1 and self._fails_alone(symbols):
            lower = 2  # torch.export assumes that open sizes are at least two
        return _Group(tuple(symbols), self.example[symbols[0]], lower, min(uppers, default=None))

    def confirmed(self, groups: list[_Group]) -> tuple[list[_Group], Verification | None]:
        """The groups that may vary from the example's sizes, and a verification with all of them at another size."""
        sizes = [self._allowed(group) for group in groups]
        groups = [group for group, allowed in zip(groups, sizes, strict=True) if allowed]
        values = {
            symbol: allowed[0] for group, allowed in zip(groups, filter(None, sizes), strict=True) for symbol in group.symbols
        }
        found = self._verified(values)
        if found is not None or not groups:
            return groups, found
        kept, values = [], {}
        for group in groups:  # one at a time
            working = [
                size for size in self._allowed(group) if self.works({**self.example, **dict.fromkeys(group.symbols, size)})
            ]
            if working:
                kept.append(group)
                values |= dict.fromkeys(group.symbols, working[0])
                group.upper = group.size if working[0] < group.size else group.upper
        while kept:
            found = self._verified(values)
            if found is not None:
                break
            values = {symbol: size for symbol, size in values.items() if symbol not in kept[-1].symbols}
            kept.pop()
        return kept, found

    def _allowed(self, group: _Group) -> list[int]:
        near = self.beside(group.symbols, self.example)
        return [size for size in near if size >= group.lower and (group.upper is None or size <= group.upper)]

    def _verified(self, changed: Mapping[Symbol, int]) -> Verification | None:
        values = {**self.example, **changed}
        return self.verification(values) if changed and self.admits(values) else None


def settle(
    program: Program,
    sizes: OpenSizes,
    named: Named,
    run: Callable[[Named], Any],
    wishes: Mapping[Dimension, Wish],
    example: Named,
) -> tuple[list[Guard], Verification | None]:
    """Guards for the sizes that the inputs of `program` may have, and a verification at other sizes.

    `named`: the inputs of the export; `run`: the model; `example`: the user's inputs, whose sizes are fixed where they must be.
    Raises `CaptureError` if a wish cannot be met.
    """
    conditions = [guard for guard in program.guards if isinstance(guard, SizeCondition)]
    probe = _Probe(program, sizes, named, run, conditions)
    groups = [_limited(program, probe, group, wishes) for group in _groups(probe, wishes)]
    groups, another = probe.confirmed(groups)
    shared = [
        SharedSize(tuple(dimension for symbol in group.symbols for dimension in probe.places[symbol]), group.lower, group.upper)
        for group in groups
    ]
    _check_wishes(shared, wishes, sizes, example)
    opened = {dimension for one in shared for dimension in one.of}
    free = {symbol for group in groups for symbol in group.symbols}
    fixed: list[FixedSizes] = []
    for place, tensor in tensors_in(example):
        kept: list[int | None] = []
        for number, size in enumerate(tensor.shape):
            expression = sizes.tensors[place][number]
            derived = not isinstance(expression, int) and expression.free_symbols <= free
            kept.append(None if (place, number) in opened or derived else int(size))
        on_request = tensor.ndim > 3 and tensor.is_floating_point() and None not in kept[2:]
        fixed.append(FixedSizes(place, tuple(kept), _ON_REQUEST if on_request else _FIXED))
    if shared:
        record(program, "capture", SIZES, PassResult(len(shared), [(str(one), "may vary") for one in shared]), changed=False)
    needless = [
        guard for group, one in zip(groups, shared, strict=True) for guard in _exclude_one(probe, group, one, conditions)
    ]
    program.guards = [
        guard for guard in program.guards if guard not in needless and not _follows(guard, fixed, shared, example)
    ]
    return [*fixed, *shared], another


def _exclude_one(probe: _Probe, group: _Group, shared: SharedSize, conditions: Sequence[SizeCondition]) -> list[SizeCondition]:
    """Conditions on one size of several inputs that forbid it to be one alone, where the graph is right nevertheless.

    Torch.export assumes that no size is one, and writes 1 % min(x.shape[0], y.shape[0]) != 0, for example.
    """
    within = [guard for guard in conditions if len(guard.of) > 1 and set(guard.of) <= set(shared.of)]
    each = [probe.values(group.symbols, size) for size in range(1, _SMALL)]
    possible = [values for values in each if min(probe.sizes.dimensions(values).values()) > 0]
    if not within or group.lower > 1 or each[0] not in possible:
        return []
    at_one, *larger = map(probe.arguments, possible)
    found = [guard for guard in within if guard.problem(at_one) and not any(map(guard.problem, larger))]
    return found if found and probe.works(each[0]) else []


def _groups(probe: _Probe, wishes: Mapping[Dimension, Wish]) -> list[_Group]:
    """The symbols that vary alone, and those that only vary together with others of the same size in the example."""
    groups: list[_Group] = []
    left: list[Symbol] = []
    named: dict[str, list[Symbol]] = {}
    for symbol, of in probe.places.items():
        for name in dict.fromkeys(wishes[dimension].name for dimension in of if dimension in wishes):
            if name:
                named.setdefault(name, []).append(symbol)
    together = [symbols for symbols in named.values() if len(symbols) > 1]
    for symbol in probe.places:
        alone = None if any(symbol in symbols for symbols in together) else probe.group([symbol])
        groups += [] if alone is None else [alone]
        left += [symbol] if alone is None else []
    for symbols in together:
        found = probe.group(symbols) if len({probe.example[symbol] for symbol in symbols}) == 1 else None
        groups += [] if found is None else [found]
        left = left if found is None else [symbol for symbol in left if symbol not in symbols]
    for key, partly in ((_size_and_dimension, False), (_size_only, False), (_size_and_dimension, True)):
        classes: dict[Any, list[Symbol]] = {}
        for symbol in left:
            classes.setdefault(key(probe, symbol), []).append(symbol)
        for symbols in classes.values():
            found = probe.group(symbols, partly) if len(symbols) > 1 else None
            groups += [] if found is None else [found]
            left = left if found is None else [symbol for symbol in left if symbol not in symbols]
    single = [probe.group([symbol], partly=True) for symbol in left]
    order = list(probe.places)
    groups += [group for group in single if group is not None]
    return sorted(groups, key=lambda group: min(map(order.index, group.symbols)))


def _size_and_dimension(probe: _Probe, symbol: Symbol) -> Any:
    return probe.example[symbol], probe.places[symbol][0][1]


def _size_only(probe: _Probe, symbol: Symbol) -> Any:
    return probe.example[symbol]


def _limited(program: Program, probe: _Probe, group: _Group, wishes: Mapping[Dimension, Wish]) -> _Group:
    """The group within the limits that tables of positions and the user set."""
    limits = [group.upper, _rows(program, probe, group)]
    lower, upper = group.lower, min((limit for limit in limits if limit is not None), default=None)
    group.upper = upper
    for symbol in group.symbols:
        for dimension in probe.places[symbol]:
            wish = wishes.get(dimension, Wish(True))
            for asked in (wish.lower, wish.upper):
                within = asked is not None and asked > 1 and (upper is None or asked <= upper)
                values = probe.values(group.symbols, asked) if within and asked is not None else None
                if values is not None and _entries(probe.sizes, values) <= _MOST_ENTRIES and not probe.works(values):
                    raise FinalCaptureError(
                        f"dynamic_shapes asks for size {asked} in dimension {dimension[1]} of {str(dimension[0])!r}, but there "
                        "the model fails, or gives another result than the graph",
                        topic="dynamic-shapes",
                    )
            if wish.upper is not None and upper is not None and wish.upper > upper:
                raise FinalCaptureError(_beyond(dimension, wish.upper, f"at most {upper}"), topic="dynamic-shapes")
            if wish.lower and wish.lower < lower:
                raise FinalCaptureError(_beyond(dimension, wish.lower, f"at least {lower}"), topic="dynamic-shapes")
            group.lower = max(group.lower, wish.lower)
            group.upper = min((limit for limit in (group.upper, wish.upper) if limit is not None), default=None)
    return group


def _beyond(dimension: Dimension, asked: int, allowed: str) -> str:
    place, number = dimension
    return f"dynamic_shapes asks for size {asked} in dimension {number} of {str(place)!r}, but the model takes {allowed}"


def _entries(sizes: OpenSizes, values: Mapping[Symbol, int]) -> int:
    counts = [
        torch.Size([one if isinstance(one, int) else int(one.subs(values)) for one in shape]).numel()
        for shape in sizes.tensors.values()
    ]
    return sum(counts)


def _rows(program: Program, probe: _Probe, group: _Group) -> int | None:
    """The largest size for which the embeddings have rows for all positions that the graph counts, or None."""
    upper: int | None = None
    for node in program.graph.nodes:
        operands = node.all_input_nodes[:2]
        if node.target is functional.embedding:
            operands.reverse()
        elif node.target is not torch.ops.aten.embedding.default:
            continue
        table, indices = operands
        rows = len(_evaluated(program, table, probe.named))
        values = probe.values(group.symbols, rows + 1)
        if _entries(probe.sizes, values) > _MOST_ENTRIES:
            continue
        try:
            counted = int(_evaluated(program, indices, probe.arguments(values)).max())
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue  # another limit is lower
        if counted >= rows:
            limit = rows + 1 - (counted - rows + 1)
            upper = limit if upper is None else min(upper, limit)
    return upper if upper is None or upper >= group.size else None


def _evaluated(program: Program, wanted: fx.Node, named: Named) -> Any:
    """The value of one node; only what it depends on is computed."""
    needed = ancestors_of(wanted)
    interpreter = Interpreter(program.root, garbage_collect_values=False, graph=program.graph)
    interpreter.args_iter = iter(named.values())
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder" or node in needed:
                interpreter.env[node] = interpreter.run_node(node)
    return interpreter.env[wanted]


def _check_wishes(
    shared: Sequence[SharedSize], wishes: Mapping[Dimension, Wish], sizes: OpenSizes, example: Mapping[str, Any]
) -> None:
    """Raise `CaptureError` if a dimension that was to be open is not."""
    tensors = dict(tensors_in(example))
    for (place, number), wish in wishes.items():
        if not wish.is_open or any((place, number) in one.of for one in shared):
            continue
        fixed = isinstance(sizes.tensors[place][number], int)
        why = (
            "the model insists on this size"
            if fixed
            else "for other sizes the model fails, or gives another result than the graph"
        )
        raise FinalCaptureError(
            f"dynamic_shapes asks for dimension {number} of {str(place)!r} to vary, but it is fixed at "
            f"{tensors[place].shape[number]}: {why}",
            topic="dynamic-shapes",
        )


def _follows(guard: Guard, fixed: Sequence[FixedSizes], shared: Sequence[SharedSize], example: Named) -> bool:
    """Whether a condition says no more than the fixed and shared sizes."""
    if not isinstance(guard, SizeCondition):
        return False
    sizes = {one.place: one.sizes for one in fixed}
    if all(sizes[place][number] is not None for place, number in guard.of) and guard.problem(example) is None:
        return True
    if guard.expression.replace(" ", "") in ("sizes[0]==sizes[1]", "sizes[1]==sizes[0]"):
        return any(set(guard.of) <= set(one.of) for one in shared)
    limit = guard.expression.removeprefix("sizes[0] <= ")
    return limit.isdigit() and any(
        guard.of[0] in one.of and one.upper is not None and one.upper <= int(limit) for one in shared
    )


def hold_sizes(program: Program, verification: Verification, dynamic_shapes: DynamicShapes = None) -> None:
    """Fix all open sizes if the final graph of a program is not right at other sizes; `CaptureError` if the user wants them."""
    shared = [guard for guard in program.guards if isinstance(guard, SharedSize)]
    if verification.another is None or not shared:
        return
    try:
        verification.another.check(program, "transform")
    except LrpfxError as error:
        if dynamic_shapes:
            raise CaptureError(
                "dynamic_shapes cannot be met: the final graph is not right at other sizes", topic="dynamic-shapes"
            ) from error
        names = [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
        example = dict(zip(names, verification.args, strict=True))
        program.guards = [
            *(FixedSizes(place, tuple(tensor.shape), f"at other sizes, {error}") for place, tensor in tensors_in(example)),
            *(guard for guard in program.guards if guard not in shared),
        ]
