"""Conditions: relevance that is kept on some entries of a node's value alone, or on some of what flows along an edge.

In the backward pass, relevance at a node of a condition is multiplied by a mask of zeros and ones (Achtibat et al. 2023,
https://www.nature.com/articles/s42256-023-00711-8).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import fx

from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.kinds import Activation, Linear, MatMul, Recurrent, Softmax
from lrpfx.ir.node import NodeInfo, Role, named_nodes, node_info, set_info
from lrpfx.operators.table import operator_named
from lrpfx.request.layouts import channel_dimension
from lrpfx.request.mixtures import experts_of_rows, product_of, routing_of
from lrpfx.request.names import resolve_names
from lrpfx.request.targets import Target, without_arrays
from lrpfx.runtime.differences import BySigns, carry_difference
from lrpfx.runtime.masked_relevance import KeepRelevanceBy, checked_mask
from lrpfx.runtime.multipliers import carry_multiplier, carry_relevance, multiplier_from
from lrpfx.support.numbers import is_whole
from lrpfx.support.torch_internals import apply


@dataclass(frozen=True)
class ExpertsOf:
    """Where conditions at the experts of a mixture hold."""

    path: str


#: A node by name, or an edge as the names of the node whose value flows and of the node that reads it.
Key = str | tuple[str, str]
Place = Key | ExpertsOf
SomePlace = TypeVar("SomePlace", bound=Place)


class Index:
    """Entries of a value: what a condition keeps. Several are united.

    `indices`: their positions; negative ones count from the end. Errors: `InputError`: an index is not an int.
    """

    #: The dimension that the indices count, from the front or, if negative, from the back.
    dimension: int

    def __init__(self, *indices: int) -> None:
        self.indices = tuple(_checked_index(type(self).__name__, one) for one in indices)
        if not self.indices:
            raise InputError(f"{type(self).__name__} takes at least one index", topic="conditions")

    def mask(self, shape: torch.Size, name: str) -> torch.Tensor:
        """Ones at the entries of a value that are kept, zeros elsewhere; it is broadcast to the shape.

        `shape`: of the value. `name`: of the node, for errors. Errors: `InputError`: the value has no such entries.
        """
        if not -len(shape) <= self.dimension < len(shape):
            raise InputError(
                f"{self!r}: the value of {name} has the shape {tuple(shape)}, without such a dimension", topic="conditions"
            )
        place = self.dimension % len(shape)
        mask = torch.zeros([shape[place] if at == place else 1 for at in range(len(shape))])
        for index in self.indices:
            _check_range(self, index, shape[place], name, shape)
            mask.select(place, index).fill_(1.0)
        return mask

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.indices))})"


class Channel(Index):
    """Channels of a convolution, and of what has the channels of one: dimension 1. `indices`: as for `Index`."""

    dimension = 1


class Feature(Index):
    """Features of a dense layer: the last dimension. `indices`: as for `Index`."""

    dimension = -1


class Head(Index):
    """Heads of attention weights (batch, head, query, key): the third dimension from the back. `indices`: as for `Index`."""

    dimension = -3


class Token(Index):
    """Tokens of a hidden state (batch, token, feature): the second dimension from the back. `indices`: as for `Index`."""

    dimension = -2


class Neuron(Index):
    """One channel at one position: `Neuron(channel, y, x)` for images. `indices`: the channel, and the coordinates."""

    dimension = 1

    def mask(self, shape: torch.Size, name: str) -> torch.Tensor:
        if len(shape) != len(self.indices) + 1:
            raise InputError(
                f"{self!r} has {len(self.indices)} indices, but the value of {name} has the shape {tuple(shape)}",
                topic="conditions",
            )
        for index, size in zip(self.indices, shape[1:], strict=True):
            _check_range(self, index, size, name, shape)
        mask = torch.zeros((1, *shape[1:]))
        mask[(0, *self.indices)] = 1.0
        return mask


class Expert(Index):
    """Experts of a mixture, at its path: what flows through them, for the tokens that the router sent to them.

    The mixtures are those of `lrpfx.attribution.relevance_of_experts`, in modules that are not compiled.

    `indices`: as for `Index`.
    """

    def mask(self, shape: torch.Size, name: str) -> torch.Tensor:
        raise InputError(f"{self!r} at {name}: experts are indices in conditions at the paths of mixtures", topic="conditions")

    def mask_of_rows(self, experts: torch.Tensor, count: int, shape: torch.Size, name: str) -> torch.Tensor:
        """Ones for the rows of these experts, zeros for the others.

        `experts`: the expert of each row. `count`: how many experts there are. `shape`: of the value. `name`: of the node, for
        errors. Errors: `InputError`: there is no such expert.
        """
        for index in self.indices:
            if not -count <= index < count:
                raise InputError(
                    f"{self!r}: index {index} is out of range, since the mixture {name} has {count} experts", topic="conditions"
                )
        wanted = torch.tensor([index % count for index in self.indices], device=experts.device)
        return torch.isin(experts, wanted).reshape(*experts.shape, *(1 for _ in shape[experts.ndim :])).cpu()


Condition = Mapping[Key, Any]


def _checked_index(what: str, index: Any) -> int:
    if not is_whole(index):
        raise InputTypeError(f"{what} takes indices, not {index!r}", topic="conditions")
    return int(index)


def _check_range(what: Index, index: int, size: int, name: str, shape: torch.Size) -> None:
    if not -size <= index < size:
        raise InputError(
            f"{what!r}: index {index} is out of range, since the value of {name} has the shape {tuple(shape)}",
            topic="conditions",
        )


class Mask:
    """The mask at one place, which changes from one condition to the next. None keeps everything."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.like: torch.Tensor | None = None  # the masked value, without memory
        self.experts: tuple[torch.Tensor, int] | None = None  # that of each row in the last forward, and how many there are


class KeepRelevance(torch.autograd.Function):
    """Forward: identity. Backward: relevance, or a multiplier, times the mask that is set then."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, mask: Mask) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mask = inputs[1]

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mask = ctx.mask.value
        return (relevance if mask is None else relevance * mask.to(relevance.device)), None


def keep_relevance(value: torch.Tensor, mask: Mask | torch.Tensor, name: str = "", *routing: torch.Tensor) -> torch.Tensor:
    """The value; its relevance is masked in the backward pass. `name` and `routing`: for a product, see `experts_of_rows`."""
    if isinstance(mask, Mask):
        mask.like = torch.empty_like(value, device="meta")
        mask.experts = experts_of_rows(name, value, *routing) if routing else None
    function: Any = KeepRelevance if isinstance(mask, Mask) else KeepRelevanceBy
    kept: torch.Tensor = apply(function, value, mask, *(() if isinstance(mask, Mask) else (None,)))
    return kept


def places_of(graph: fx.Graph, conditions: Sequence[Condition]) -> tuple[Place, ...]:
    """The places of all conditions, each once. Raises an error for unknown names and what is no condition."""
    if not isinstance(conditions, (list, tuple)) or not conditions:
        raise InputTypeError(
            f"conditions are a list of dicts from names of nodes to indices, not {conditions!r}", topic="conditions"
        )
    found: dict[Place, None] = {}
    for condition in conditions:
        if not isinstance(condition, Mapping) or not condition:
            raise InputTypeError(
                f"a condition is a dict from names of nodes, or edges, to indices, not {condition!r}", topic="conditions"
            )
        found |= dict.fromkeys(checked_place(graph, _place_of(key, wanted)) for key, wanted in condition.items())
    return tuple(found)


def _place_of(key: Any, wanted: Any) -> Any:
    """Where one entry of a condition holds."""
    several = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    experts = [one for one in several if isinstance(one, Expert)]
    if not experts or not isinstance(key, str):
        return key
    if len(experts) < len(several):
        raise InputTypeError(
            f"the condition at {key} has experts and other indices, which are those of different values", topic="conditions"
        )
    return ExpertsOf(key)


def checked_place(graph: fx.Graph, place: SomePlace) -> SomePlace:
    """The place. Raises an error unless it is a node or an edge of the graph that relevance flows through."""
    if not isinstance(place, (str, ExpertsOf)) and not is_edge(place):
        raise InputTypeError(
            f"a condition is at a node, or at an edge as a pair of names, not at {place!r}", topic="conditions"
        )
    source, reader = ends_of(graph, place)
    for one in (source, reader):
        by_signs = next((user for user in one.users if _reads_terms_of(user, one)), None) if one is not None else None
        if one is not None and by_signs is not None:
            raise InputError(
                f"positive and negative terms of {node_info(one).name} have multipliers of their own: set the condition on "
                f"{node_info(by_signs).name}, which reads it, at the same entries",
                topic="conditions",
            )
    dtype = node_info(source).dtype
    if node_info(source).role is not Role.DATA or (dtype is not None and not dtype.is_floating_point):
        raise InputError(f"{node_info(source).name} carries no relevance, which a condition could keep", topic="conditions")
    return place


def _reads_terms_of(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call passes relevance to the terms of a value, besides that to the value itself."""
    return user.op == "call_module" and isinstance(node_info(user).form, BySigns) and user.args[0] is node


def key_of(place: Place) -> Key:
    """The key of a condition at a place."""
    return place.path if isinstance(place, ExpertsOf) else place


def shown(place: Place) -> str:
    """A place as text."""
    key = key_of(place)
    return key if isinstance(key, str) else " -> ".join(key)


def is_edge(place: Any) -> TypeGuard[tuple[str, str]]:
    return isinstance(place, tuple) and len(place) == 2 and all(isinstance(name, str) for name in place)


def ends_of(graph: fx.Graph, place: Place) -> tuple[fx.Node, fx.Node | None]:
    """The node at a place; for an edge, the node whose value flows and the node that reads it."""
    if isinstance(place, ExpertsOf):
        return product_of(graph, place.path), None
    if isinstance(place, str):
        return resolve_names(graph, [place])[0], None
    source, reader = resolve_names(graph, place)
    if _read_by(source, reader) is None:
        readers = [name for name, node in named_nodes(graph) if not _passes_on(node) and _read_by(source, node) is not None]
        raise InputError(
            f"{place[1]} does not read {place[0]}; its readers are {', '.join(readers) or 'none'}", topic="conditions"
        )
    return source, reader


#: node.meta: the node has the value of its first argument, whose relevance it masks.
_MASKED = "lrpfx_masked"


def _read_by(source: fx.Node, reader: fx.Node) -> fx.Node | None:
    """What `reader` reads of the value of `source`: the node itself, or what passes it on; None if it reads neither."""
    if reader in source.users:
        return source
    others = (user for user in source.users if _passes_on(user))
    return next((found for one in others if (found := _read_by(one, reader)) is not None), None)


def _passes_on(node: fx.Node) -> bool:
    """Whether a node has the value of its first argument: it masks relevance, or converts it to multipliers or back."""
    return _MASKED in node.meta or node.target in (carry_multiplier, carry_relevance, carry_difference)


def insert_masks(graph: fx.Graph, places: Sequence[Place], names: Sequence[str], modules: Sequence[str] = ()) -> None:
    """Insert a mask at each place, as a further input of the graph with the given name, None by default.

    `modules`: the paths of the modules that apply the masks; by default, `keep_relevance` does.
    """
    ends = [ends_of(graph, place) for place in places]
    given = []
    for name in names:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            given.append(graph.placeholder(name, default_value=None))  # it may follow inputs that have defaults
        set_info(given[-1], NodeInfo(name, role=Role.CONSTANT))
    for number, (source, reader) in enumerate(ends):
        read = source if reader is None else _read_by(source, reader)
        assert read is not None
        with graph.inserting_after(read if read.op != "placeholder" else given[-1]):
            if modules:
                made = graph.call_module(modules[number], (read, given[number]))
            else:
                routing = (routing_of(source) or ()) if isinstance(places[number], ExpertsOf) else ()
                made = graph.call_function(keep_relevance, (read, given[number], node_info(source).name, *routing))
        made.meta[_MASKED] = True
        info = node_info(source)
        view = replace(NodeInfo(f"{info.name}.{names[number]}"), operator=operator_named("view"), description="mask")
        facts = {name: getattr(node_info(read), name) for name in _FACTS_OF_VALUES}
        set_info(made, replace(view, **facts))
        for user in [user for user in read.users if user is not made]:
            # what the reader reads a second time, as in x + x, has an alias
            is_alias = reader in user.users and node_info(user).name == f"{node_info(reader).name}.alias" if reader else False
            if reader is None or user is reader or is_alias:
                user.replace_input_with(read, made)


#: What the compiler knows about a value and not about the call that computes it.
_FACTS_OF_VALUES = ("source", "shape", "dtype", "sign", "relevant_where_positive", "carries_multiplier")


def mask_name(number: int) -> str:
    """The name of the input for the mask of the place with this number."""
    return f"condition_{number}"


def mask_of(wanted: Any, node: fx.Node, name: str, value: torch.Tensor) -> torch.Tensor:
    """The mask that a condition gives for the value of a node: it is broadcast to the value."""
    if isinstance(wanted, np.ndarray) and wanted.ndim and wanted.dtype.kind in "biuf":
        wanted = torch.as_tensor(wanted)
    if isinstance(wanted, torch.Tensor) and (wanted.dtype == torch.bool or wanted.is_floating_point()):
        return checked_mask(wanted, name, value).detach()
    several = wanted.tolist() if isinstance(wanted, torch.Tensor) else wanted
    several = list(several) if isinstance(several, (list, tuple, range)) else [several]
    may_be_indices = not isinstance(wanted, np.ndarray) or not wanted.ndim
    if isinstance(wanted, torch.Tensor):
        may_be_indices = wanted.ndim < 2 and not wanted.is_complex() and wanted.dtype != torch.uint8
        may_be_indices = may_be_indices and len(set(several)) == len(several)
    if not may_be_indices:
        kinds = "masks are boolean or floating point"
        raise InputTypeError(f"the condition at {name} is an array of {wanted.dtype}: {kinds}", topic="conditions")
    if not several:
        return value.new_zeros((1,) * value.ndim, device="cpu")
    indices = [one if isinstance(one, Index) else meaning_of(node, value.ndim)(_checked_index(name, one)) for one in several]
    return reduce(torch.maximum, [one.mask(value.shape, name) for one in indices])


def meaning_of(node: fx.Node, dimensions: int) -> type[Index]:
    """What a plain index means at a node: a channel, the feature of a dense layer, a head, or a token of hidden states.

    `InputError` where the graph does not show which dimension is meant.
    """
    found = channels_of(node, dimensions)
    kind = node_info(node).kind
    if found is not Feature or dimensions != 3 or kind is None or issubclass(kind, Softmax) or _is_dense(node):
        return found
    if issubclass(kind, Recurrent):
        remedy = "say Feature(...), or Token(...) for the step of values (batch, step, feature)"
        raise InputError(f"{node_info(node).name} may have its samples or its steps first: {remedy}", topic="conditions")
    return Token


def channels_of(node: fx.Node, dimensions: int) -> type[Index]:
    """What counts the channels of a node's value, each with entries at all positions: `Channel`, `Feature` or `Head`.

    `InputError` where the graph does not show it.
    """
    kind = node_info(node).kind
    if kind is not None and issubclass(kind, (Softmax, MatMul)) and dimensions == 4:
        return Head
    if dimensions == 2 or (kind is not None and issubclass(kind, Softmax)):
        return Feature
    channels = channel_dimension(node, dimensions)
    if channels not in (1, dimensions - 1):
        unknown = f"the graph does not show which of the {dimensions} dimensions of {node_info(node).name} has its channels"
        raise InputError(f"{unknown}: say Channel for dimension 1, or Feature for the last", topic="conditions")
    return Channel if channels == 1 else Feature


def _is_dense(node: fx.Node) -> bool:
    """Whether a value is the result of a dense layer, perhaps after an activation."""
    while True:
        kind = node_info(node).kind
        if kind is None or not issubclass(kind, Activation) or not node.all_input_nodes:
            return kind is not None and issubclass(kind, Linear)
        node = node.all_input_nodes[0]


class Masks:
    """The masks of all conditions, at the places of all of them."""

    def __init__(self, conditions: Sequence[Condition], places: tuple[Place, ...], nodes: tuple[fx.Node, ...]) -> None:
        """`nodes`: those whose values are masked at the `places`."""
        self.conditions = conditions
        self.places = places
        self.nodes = nodes
        self.masks = [Mask() for _ in places]
        self.device: torch.device | None = None

    def holders(self) -> dict[str, Mask]:
        """The inputs for a module that is not compiled: its masks may change between backward passes."""
        return {mask_name(number): mask for number, mask in enumerate(self.masks)}

    def layouts(self) -> list[torch.Tensor | None]:
        """The masked values, without memory."""
        return [mask.like for mask in self.masks]

    def know(self, layouts: Sequence[torch.Tensor | None], device: torch.device | None) -> None:
        """Set what `layouts` returned, for a module that has not run with these masks."""
        self.device = device
        for mask, like in zip(self.masks, layouts, strict=True):
            mask.like = like

    def compiled(self, number: int, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs of a compiled module for one condition: tensors that always have the shapes of the values."""
        for mixture in self.places:
            if isinstance(mixture, ExpertsOf):
                reason = f"which tokens an expert of {mixture.path} had is known only while the model runs"
                raise InputError(f"{reason}: pass the module that is not compiled", topic="conditions")
        found = {}
        for place, (value, like) in enumerate(zip(self.values_of(number), self.layouts(), strict=True)):
            assert like is not None
            ones = torch.ones_like(like, device=self.device or "cpu")
            found[mask_name(place)] = ones if value is None else ones * value.to(ones.device)
        return found

    def values_of(self, number: int) -> list[torch.Tensor | None]:
        """The mask at each place for one condition; None where it has none."""

        def value_of(place: Place, node: fx.Node, mask: Mask) -> torch.Tensor | None:
            condition, key = self.conditions[number], key_of(place)
            if key not in condition or mask.like is None or _place_of(key, condition[key]) != place:
                return None
            wanted = condition[key]
            if not isinstance(place, ExpertsOf):
                return mask_of(wanted, node, shown(place), mask.like).to(dtype=mask.like.dtype)
            assert mask.experts is not None
            united = Expert(*(index for one in ([wanted] if isinstance(wanted, Expert) else wanted) for index in one.indices))
            return united.mask_of_rows(*mask.experts, mask.like.shape, shown(place)).to(dtype=mask.like.dtype)

        return list(map(value_of, self.places, self.nodes, self.masks))

    def stacked(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """The masks of several conditions together, one tensor for each place."""
        rows = [self.values_of(number) for number in numbers]
        found = []
        for column, mask in zip(zip(*rows, strict=True), self.masks, strict=True):
            assert mask.like is not None
            ones = torch.ones((1,) * mask.like.ndim, dtype=mask.like.dtype)
            found.append(torch.stack(torch.broadcast_tensors(*(ones if one is None else one for one in column))))
        return found

    def set_to(self, number: int) -> AbstractContextManager[None]:
        """A context in which one condition holds."""
        return self.set_to_values(self.values_of(number) if self.masks else [])

    @contextmanager
    def set_to_values(self, values: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """A context in which the masks have these values."""
        try:
            for mask, value in zip(self.masks, values, strict=True):
                mask.value = value
            yield
        finally:
            for mask in self.masks:
                mask.value = None


def empty_condition(conditions: Sequence[Condition], relevances: Sequence[torch.Tensor]) -> str | None:
    """Which condition leaves no relevance, or None. `relevances` have a leading dimension for the conditions."""
    for number, condition in enumerate(conditions):
        if not any(bool(relevance[number].any()) for relevance in relevances):
            return f"conditions[{number}], {_described(condition)}, leaves no relevance of the inputs"
    return None


def _described(condition: Condition) -> str:
    """A condition as text, with masks as their shapes."""
    entries = []
    for place, wanted in condition.items():
        is_mask = isinstance(wanted, (torch.Tensor, np.ndarray))
        entries.append(f"{place!r}: " + (f"mask of shape {tuple(wanted.shape)}" if is_mask else repr(wanted)))
    return f"{{{', '.join(entries)}}}"


# --- start -------------------------------------------------------------------------------------------------------------------


def start_of(graph: fx.Graph, name: Any) -> fx.Node:
    """The node where relevance starts."""
    if not isinstance(name, str):
        raise InputTypeError(f"start is the name of a node, not {name!r}", topic="start-of-relevance")
    return resolve_names(graph, [name])[0]


@dataclass(frozen=True, eq=False)
class Start(Target):
    """Relevance of the value of a hidden node: its entries at an index, a tensor, a function of it, or all of it."""

    wanted: Any
    node: fx.Node

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        wanted = without_arrays(self.wanted)
        if isinstance(wanted, Target):
            relevance: Any = wanted.seed(output)
        elif isinstance(wanted, torch.Tensor) and wanted.is_floating_point():
            relevance = wanted
        elif callable(wanted) and not isinstance(wanted, torch.Tensor):
            relevance = wanted(output)
        elif wanted is None:
            relevance = output
        else:
            relevance = output * mask_of(wanted, self.node, node_info(self.node).name, output).to(output)
        if not isinstance(relevance, torch.Tensor) or relevance.shape != output.shape:
            shape = tuple(relevance.shape) if isinstance(relevance, torch.Tensor) else type(relevance).__name__
            place = f"{node_info(self.node).name} has {tuple(output.shape)}"
            raise InputError(f"relevance where it starts has shape {shape}, but {place}", topic="start-of-relevance")
        if not torch.isfinite(relevance).all():
            raise InputError("relevance where it starts has values that are not finite", topic="values-not-finite")
        return relevance.to(output)


def multiplier_of_start(value: torch.Tensor, relevance: torch.Tensor, name: str | None) -> torch.Tensor:
    """The multiplier of a value with this relevance. `InputError` where there is none."""
    value = value.detach()
    if bool(((value == 0) & (relevance != 0)).any()):
        remedy = "which rules without division cannot carry: lrpfx.transform(..., optimize=False)"
        raise InputError(f"relevance starts where {name} is 0, {remedy}", topic="start-of-relevance")
    return multiplier_from(value, relevance)
