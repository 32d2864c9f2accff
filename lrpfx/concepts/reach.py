"""Which part of the inputs the entries of values depend on, followed through calls of operators.

For each dimension of each input, the *reach* of an entry is two numbers: its last position there that the entry depends on,
counted from 1, and its first, counted from the end. Both are 0 for an entry that depends on no position. So the reach of an
entry that depends on several others is the largest of theirs, and padding with zeros has no reach.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from lrpfx.concepts import windows
from lrpfx.ir import kinds
from lrpfx.ir.node import map_arguments
from lrpfx.ir.operator import Fill, Form, Operator
from lrpfx.support.hidden_scores import is_hidden
from lrpfx.support.torch_internals import pytree

#: The dtype of the reach. All functions take it, and it counts to 2^24.
_COUNT = torch.float32


@dataclass(frozen=True)
class Tracked:
    """A tensor that depends on the inputs, and the reach of its entries: tensors of its shape, most often expanded ones."""

    value: torch.Tensor
    reach: tuple[torch.Tensor, ...]

    @functools.cached_property
    def constant(self) -> torch.Tensor:
        """Whether an entry depends on no input: padding, or a score that a causal mask hides."""
        reached = [_compact(one) > 0 for one in self.reach]
        found: torch.Tensor = ~reduce(torch.logical_or, reached) if reached else torch.ones((), dtype=torch.bool)
        return found.broadcast_to(self.value.shape)


def with_own_positions(arguments: Any, first: int = 1) -> Any:
    """Nested arguments with `Tracked` for tensors, each with its own positions in all dimensions from the `first` on.

    The reach has two components for each of these dimensions, and one for a tensor without such a dimension.
    """
    tensors: list[torch.Tensor] = []
    map_arguments(arguments, lambda leaf: tensors.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    places: list[tuple[int, int | None]] = []
    for number, tensor in enumerate(tensors):
        places += [(number, dim) for dim in range(first, tensor.ndim)] or [(number, None)]
    numbers = itertools.count()

    def tracked(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        own = next(numbers)
        reach: list[torch.Tensor] = []
        for number, dim in places:
            if dim is None or number != own:
                everywhere = torch.tensor(float(number == own), dtype=_COUNT, device=leaf.device).expand(leaf.shape)
                reach += [everywhere] * (1 if dim is None else 2)
                continue
            counted = torch.arange(1, leaf.shape[dim] + 1, dtype=_COUNT, device=leaf.device)
            alone = [-1 if at == dim else 1 for at in range(leaf.ndim)]
            reach += [counted.reshape(alone).expand(leaf.shape), counted.flip(0).reshape(alone).expand(leaf.shape)]
        return Tracked(leaf, tuple(reach))

    return map_arguments(arguments, tracked)


def without_reach(arguments: Any) -> Any:
    """Nested arguments with plain tensors."""
    return map_arguments(arguments, _value)


@dataclass(frozen=True)
class Call:
    """A call of an operator. Tensors that depend on the inputs are `Tracked`."""

    function: Callable[..., Any]
    row: Operator | None
    args: tuple[Any, ...]
    options: dict[str, Any]

    def without_gate(self) -> "Call":
        """The same call, in which a factor that scales the signal, the first argument, has no reach."""
        if self.row is None or not issubclass(self.row.kind, kinds.Gate):
            return self
        return replace(self, args=(*self.args[:1], *without_reach(self.args[1:])), options=without_reach(self.options))

    def run(self) -> Any:
        """The result; its tensors are `Tracked` if an argument is."""
        if self.row is not None and self.row.outputs.picks and isinstance(self.args[0], (tuple, list, dict)):
            return self.function(*self.args, **self.options)  # an item of a container
        args, options = without_reach((self.args, self.options))
        result = self.function(*args, **options)
        tracked = _tracked((self.args, self.options))
        leaves, structure = pytree.tree_flatten(result)
        values = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tracked or not values:
            return result
        reaches = [self._reach_of_results(number, values) for number in range(len(tracked[0].reach))]
        of_values = iter([Tracked(value, tuple(one[place] for one in reaches)) for place, value in enumerate(values)])
        return pytree.tree_unflatten(
            [next(of_values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        )

    def _reach_of_results(self, number: int, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """One component of the reach of each result."""
        follow = _transfer_of(self.row)
        try:
            found = None if follow is None else follow(self, number, values)
            if found is not None:
                return [one.broadcast_to(value.shape) for one, value in zip(found, values, strict=True)]
        except (RuntimeError, TypeError, ValueError, LookupError):
            pass  # arguments that the transfer does not know
        return [_largest(self, number).broadcast_to(value.shape) for value in values]

    @property
    def bound(self) -> dict[Any, Any]:
        """The arguments by name, defaults included; by place, where the row does not name them."""
        defaults = {} if self.row is None else self.row.arguments
        names: Iterable[Any] = defaults or itertools.count()
        return {**defaults, **dict(zip(names, self.args, strict=False)), **self.options}

    @property
    def first(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else next(iter(self.options.values()))


Transfer = Callable[[Call, int, list[torch.Tensor]], Sequence[torch.Tensor] | None]


def _transfer_of(row: Operator | None) -> Transfer | None:
    """What gives the reach of a row's results; None if any entry may depend on all entries of all arguments."""
    if row is None:
        return None
    facts: dict[Transfer, Any] = {
        _pooled: row.kind is kinds.MaxPool,
        _united: row.entries.elementwise or row.entries.converts,
        _mixed: row.entries.mixes,
        _accumulated: row.entries.accumulates,
        _moved: row.entries.moves or row.outputs.result_per_argument or row.entries.overwrites,
        _windowed: row.dimensions.spatial or row.kind is kinds.Interpolation,
        _looked_up: row.kind is kinds.Embedding,
        _multiplied: row.product.form is Form.MATRICES,
        _contracted: row.product.form is Form.EINSUM,
        _weighted_and_summed: row.product.form is Form.SUM,
    }
    return next((transfer for transfer, holds in facts.items() if holds), None)


# --- transfers -------------------------------------------------------------------------------------------------------------
# Each gives a component of the reach of each result, in a shape that can be broadcast to that of the result; None if it cannot
# tell. Then any entry may depend on all entries of all arguments.


def _united(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Entries depend on those at their place."""
    assert call.row is not None
    if call.row.entries.chooses:
        return [_chosen(call, number)]
    read = _tracked(call.first if call.row.spellings.like else (call.args, call.options))
    if not read:
        return [_nothing(value) for value in values]
    united = _union([_compact(one.reach[number]) for one in read])
    for decided in _decided(call):
        united = torch.where(decided, 0.0, united)
    return [united] * len(values)


def _mixed(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Entries depend on all those along some dimensions of the first argument, which reductions remove."""
    assert call.row is not None and call.row.entries.mixes is not None
    rank = getattr(_value(call.first), "ndim", 0)
    dims = [dim % rank for dim in call.row.entries.mixes(call.bound, rank)] if rank else []
    if not dims:
        return _united(call, number, values)
    if not isinstance(call.first, Tracked) or len(_tracked((call.args, call.options))) > 1:
        return None
    kept = _compact(call.first.reach[number]).amax(dims, keepdim=True)
    if issubclass(call.row.kind, kinds.Softmax) and len(dims) == 1 and not call.row.values.negates:
        hidden = call.first.constant & is_hidden(call.first.value)
        if hidden.any():
            return [torch.where(hidden & ~hidden.all(dims[0], keepdim=True), 0.0, kept)]
    removed = kept.squeeze(dims)
    return [kept if one.ndim == rank else removed for one in values]


def _accumulated(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Entries depend on those up to their place along a dimension."""
    assert call.row is not None and call.row.entries.accumulates is not None
    united = _union([one.reach[number] for one in _tracked((call.args, call.options))]).broadcast_to(values[0].shape)
    for dim in call.row.entries.accumulates(call.bound, united.ndim):
        united = united.cummax(dim).values
    return [united] * len(values)


def _moved(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Entries are entries of the first argument: the function moves their reach as well."""
    row = call.row
    assert row is not None
    sources = len(call.args) if row.outputs.result_per_argument else 2 if row.entries.overwrites else 1
    options = dict(call.options)
    moved, others = list(call.args[:sources]), list(call.args[sources:])
    if not moved:
        name = next(iter(options))
        moved = [options.pop(name)]
    if _tracked((others, options)) and not row.spellings.like:
        return None  # which entry moves depends on the inputs
    if row.entries.fills is Fill.NUMBER:
        options, others = {"pad": call.bound["pad"], "mode": call.bound["mode"]}, []
    moved, others, options = (
        map_arguments(moved, lambda leaf: _reach(leaf, number)),
        without_reach(others),
        without_reach(options),
    )
    function = row.memory.copying.get(call.function, call.function)  # strides of the reach differ from those of the value
    found = pytree.tree_leaves(function(*moved, *others, **options))
    pairs = list(zip(found, values, strict=True))
    return found if all(one.shape == value.shape and one.dtype == _COUNT for one, value in pairs) else None


def _pooled(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """The largest reach in a window. That of a place in it is the same."""
    (source,) = _tracked((call.args, call.options))
    reach = source.reach[number]
    assert call.row is not None
    if call.row.dimensions.spatial and reach.ndim == call.row.rank_of_batch:
        reach = _compact(reach, dims=(0, 1))  # channels that have the same reach
    args, options = map_arguments((call.args, call.options), lambda leaf: reach if leaf is source else _value(leaf))
    return [pytree.tree_leaves(call.function(*args, **options))[0]] * len(values)


def _windowed(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Entries depend on those in windows of the last dimensions, and, for convolutions, on all channels of their group."""
    row, bound = call.row, call.bound
    assert row is not None
    source, result = call.first, values[0]
    if not isinstance(source, Tracked) or len(_tracked((call.args, call.options))) > 1:
        return None
    spatial = row.dimensions.spatial or source.value.ndim - 2
    found = _compact(source.reach[number])
    before, after = source.value.shape[-spatial:], result.shape[-spatial:]
    if "weight" in bound:
        weight = bound["weight"]
        channels = source.value.ndim - spatial - 1
        found = _of_groups(found, channels, bound["groups"], source.value.shape[channels], result.shape[channels])
        transposed = issubclass(row.kind, kinds.ConvolutionTranspose)
        places_of = windows.of_transposed_convolution if transposed else windows.of_convolution
        places = places_of(bound, weight.shape[2:], before, after)
    elif "kernel_size" in bound:
        kernel = windows.each(bound["kernel_size"], spatial)
        stride = kernel if bound["stride"] in (None, [], ()) else bound["stride"]
        places = windows.of_convolution({**bound, "stride": stride}, kernel, before, after)
    elif row.kind is kinds.AvgPool:
        places = windows.of_adaptive_pooling(before, after)
    else:
        given = (call.args[1:], call.options) if call.args else ((), dict(list(call.options.items())[1:]))
        try:
            places = windows.of_resizing(call.function, *given, before, after)
        except (TypeError, ValueError, RuntimeError):
            return None
    for dim, (size, window) in enumerate(zip(before, places, strict=True), -spatial):
        found = _in_windows(found, dim, size, window)
    return [found] * len(values)


def _looked_up(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """A vector depends on the integer that selects it; a bag of vectors on all that do."""
    if not isinstance(call.first, Tracked) or len(_tracked((call.args, call.options))) > 1:
        return None
    reach = call.first.reach[number]
    if values[0].ndim == reach.ndim + 1:
        return [reach.unsqueeze(-1)]
    return [reach.amax(-1, keepdim=True)] if reach.ndim == 2 else None


def _multiplied(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """An entry of a matrix product depends on a row of the first factor and a column of the second."""
    assert call.row is not None
    first, second = (call.bound[name] for name in call.row.data)
    if isinstance(first, Tracked) and isinstance(second, Tracked) and issubclass(call.row.kind, kinds.WeightedValues):
        without = first.constant & (first.value == 0)  # weights of values that a mask hides
        if without.any():
            return [_weighted(first.reach[number], second.reach[number], without, call.row.product.reversed)]
    if call.row.product.reversed:
        first, second = second, first
    parts = []
    if isinstance(first, Tracked):
        reach = _compact(first.reach[number]).amax(-1, keepdim=True)
        parts.append(reach if _value(second).ndim > 1 else reach.squeeze(-1))
    if isinstance(second, Tracked):
        reach = _compact(second.reach[number])
        vector = reach.ndim == 1
        reach = reach.amax(-1 if vector else -2, keepdim=True)
        parts.append(reach if _value(first).ndim > 1 and not vector else reach.squeeze(-1 if vector else -2))
    return [_union(parts)]


def _weighted(weights: torch.Tensor, values: torch.Tensor, without: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The reach of weighted values, of which some have no weight: the same for all features of a result."""
    if transposed:
        weights, values, without = weights.mT, values.mT, without.mT
    of_values = values.amax(-1).unsqueeze(-2)
    of_results = torch.maximum(weights.amax(-1), torch.where(without, 0.0, of_values).amax(-1)).unsqueeze(-1)
    return of_results.mT if transposed else of_results


def _contracted(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """An entry of a sum of products depends on the entries with the same indices, for all indices that are summed over."""
    assert call.row is not None
    equation, *factors = call.args
    if len(factors) == 1 and isinstance(factors[0], (tuple, list)):
        factors = list(factors[0])
    if not isinstance(equation, str) or "->" not in equation or "..." in equation:
        return None
    given, kept = equation.replace(" ", "").split("->")
    terms = given.split(",")
    if call.row.product.reversed:
        factors = factors[::-1]
    parts = []
    for term, factor in zip(terms, factors, strict=True):
        if isinstance(factor, Tracked):
            if len(set(term)) < len(term):
                return None  # a diagonal
            reach = _compact(factor.reach[number])
            summed = [place for place, letter in enumerate(term) if letter not in kept]
            reach = reach.amax(summed) if summed else reach
            left = [letter for letter in term if letter in kept]
            reach = reach.permute([left.index(letter) for letter in kept if letter in left])
            for place, letter in enumerate(kept):
                reach = reach if letter in left else reach.unsqueeze(place)
            parts.append(reach)
    return [_union(parts)]


def _weighted_and_summed(call: Call, number: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """An entry depends on the weights and values that it is the sum of; not on values whose weight a mask makes 0."""
    weights, given, dim, keepdim = (call.bound[name] for name in ("input", "other", "dim", "keepdim"))
    parts = [_compact(one.reach[number]) for one in (weights, given) if isinstance(one, Tracked)]
    if isinstance(weights, Tracked) and isinstance(given, Tracked):
        parts[1] = torch.where(weights.constant & (weights.value == 0), 0.0, parts[1])
    shapes = [getattr(_value(one), "shape", ()) for one in (weights, given)]  # a number has none
    places = _union(parts).broadcast_to(torch.broadcast_shapes(*shapes))
    return [places.amax(dim, keepdim=keepdim)]


def _largest(call: Call, number: int) -> torch.Tensor:
    """The reach of an entry that depends on all entries of all arguments."""
    reaches = [_compact(one.reach[number]) for one in _tracked((call.args, call.options))]
    return _union([one.amax() if one.numel() else one.new_zeros(()) for one in reaches])


# --- entries that do not depend on the inputs -------------------------------------------------------------------------------


def _decided(call: Call) -> list[torch.Tensor]:
    """Where a constant among the operands decides about the result."""
    assert call.row is not None
    decides = call.row.values.absorbs
    if decides is None:
        return []
    found = []
    for operand in (*call.args, *call.options.values()):
        if isinstance(operand, Tracked):
            found.append(operand.constant & decides(operand.value))
        elif isinstance(operand, torch.Tensor):
            found.append(decides(operand))
    return found


def _chosen(call: Call, number: int) -> torch.Tensor:
    """An entry depends on the chosen operand where the condition is constant, on all operands elsewhere."""
    assert call.row is not None
    condition, first, second = (call.bound[name] for name in call.row.entries.chooses)
    zero = torch.zeros((), dtype=_COUNT, device=_value(condition).device)
    taken, left = (_reach(way, number) if isinstance(way, (Tracked, torch.Tensor)) else zero for way in (first, second))
    chosen = torch.where(_value(condition).bool(), taken, left)
    if not isinstance(condition, Tracked):
        return chosen
    return torch.where(condition.constant, chosen, _union([condition.reach[number], taken, left]))


# --- parts of transfers ----------------------------------------------------------------------------------------------------


def _tracked(arguments: Any) -> list[Tracked]:
    found: list[Tracked] = []
    map_arguments(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, Tracked) else None)
    return found


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Tracked) else leaf


def _reach(leaf: Any, number: int) -> Any:
    """A component of the reach of what is moved: 0 for constants."""
    if isinstance(leaf, Tracked):
        return leaf.reach[number]
    return _nothing(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _nothing(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=_COUNT, device=value.device).expand(value.shape)


def _compact(reach: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """The tensor with the size 1 in dimensions along which it was expanded."""
    for dim in range(reach.ndim) if dims is None else dims:
        if reach.shape[dim] > 1 and reach.stride(dim) == 0:
            reach = reach.narrow(dim, 0, 1)
    return reach


def _union(reaches: Sequence[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = reduce(torch.maximum, reaches)
    return result


def _of_groups(reach: torch.Tensor, dim: int, groups: int, before: int, after: int) -> torch.Tensor:
    """The largest reach of the channels of each group, for each of the channels after a convolution."""
    if groups == 1 or reach.shape[dim] == 1:
        return reach.amax(dim, keepdim=True)
    of_groups: torch.Tensor = reach.unflatten(dim, (groups, before // groups)).amax(dim + 1)
    return of_groups.repeat_interleave(after // groups, dim)


def _in_windows(reach: torch.Tensor, dim: int, size: int, window: torch.Tensor) -> torch.Tensor:
    """The largest reach in each window along a dimension of this size."""
    window = window.to(reach.device)
    if reach.shape[dim] == 1 and bool((window >= 0).any(1).all()):
        return reach  # the same everywhere
    shape = list(reach.shape)
    shape[dim] = size
    outside = torch.cat([reach.expand(shape), reach.new_zeros(()).expand(*shape[:dim], 1, *shape[dim:][1:])], dim)
    places = torch.where(window < 0, size, window)
    return _union([outside.index_select(dim, one) for one in places.unbind(1)])
