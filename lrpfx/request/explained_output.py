"""The explained tensor among a model's outputs, and functions that compute it from them.

A function that is given as `output=` stands behind the model, where no rule acts. One that returns entries of the outputs needs
none. One that is linear in the outputs has the rule of a linear layer without a stabilizer: each output gets its value times
its derivative. Which of them a function is, its operations tell.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lrpfx.errors import InputError
from lrpfx.ir.node import floating_tensors, map_result
from lrpfx.operators.table import FACTORIES, lookup
from lrpfx.request.outputs import OutputSelector, expression_of, select_output
from lrpfx.request.targets import Target
from lrpfx.runtime.multipliers import carry_relevance
from lrpfx.support.tensors import is_floating
from lrpfx.support.torch_internals import OpOverload, TorchDispatchMode, pytree
from lrpfx.support.user_files import user_source


class Dependence(enum.IntEnum):
    """How the entries of a tensor depend on a model's outputs."""

    NONE = 0
    ENTRIES = 1  # each is an entry of an output, or a number
    LINEAR = 2  # each is a linear function of the outputs, plus a number
    OTHER = 3


@dataclass(frozen=True)
class ExplainedOutput:
    """The explained tensor, and where its relevance comes from.

    `value`: the tensor. `chosen`: how it is chosen among the outputs, for messages. `sources`: the outputs as a function read
    them, none without a function. `of_multipliers`: whether derivatives of `value` are multipliers, since the function computes
    or since the outputs carry them.
    """

    value: torch.Tensor
    chosen: str
    sources: tuple[torch.Tensor, ...] = ()
    of_multipliers: bool = False

    def start(self, seed: torch.Tensor, target: Target) -> torch.Tensor:
        """The gradient of `value` with which the backward pass starts, for the relevance that a target assigns to it."""
        return target.multiplier(self.value, seed) if self.of_multipliers else seed

    def behind_function(self, start: torch.Tensor) -> list[torch.Tensor]:
        """Relevance of the outputs that the function reads."""
        if not self.sources or not self.value.requires_grad:
            return []
        found = torch.autograd.grad(self.value, self.sources, start, retain_graph=True, allow_unused=True)
        return [relevance for relevance in found if relevance is not None]


class Passage(NamedTuple):
    """Relevance before and after a function: the sum and the sum of magnitudes of the outputs', and what constants keep."""

    magnitude: float
    constants: float
    is_large: bool  # whether the constants keep more than rounding does


def passage(seed: torch.Tensor, passed: Sequence[torch.Tensor]) -> Passage:
    """What a function passes on of the relevance of its result."""
    sums = [[float(one.detach().double().sum()), float(one.detach().double().abs().sum())] for one in (seed, *passed)]
    (before, scale), after = sums[0], sums[1:]
    magnitude = sum(one for _, one in after)
    constants = before - sum(one for one, _ in after)
    return Passage(magnitude, constants, not abs(constants) <= torch.finfo(seed.dtype).eps ** 0.5 * (scale + magnitude))


def explained_output(
    result: Any, selector: OutputSelector, is_linear: bool | None = None, of_multipliers: bool = False
) -> ExplainedOutput:
    """The tensor to explain. `is_linear`: what is known of a function; by default it is found out.

    `of_multipliers`: whether the outputs carry multipliers, as those of differences from a reference do.

    Raises `InputError` for a function that is not linear in the outputs.
    """
    if not callable(selector):
        value = select_output(result, selector)
        return ExplainedOutput(value, expression_of(result, selector), of_multipliers=of_multipliers)
    if is_linear is None:
        is_linear = computes(result, selector)
    tensors = {id(tensor): tensor for tensor in floating_tensors(result) if tensor.requires_grad}
    # What the function reads is not what the model goes on with: one output may be computed from another.
    sources = {key: one.view_as(one) for key, one in tensors.items()}
    read = {key: carry_relevance(one) if is_linear and not of_multipliers else one for key, one in sources.items()}
    value = select_output(map_result(result, lambda leaf: read.get(id(leaf), leaf)), selector)
    return ExplainedOutput(value, expression_of(result, selector), tuple(sources.values()), is_linear or of_multipliers)


def computes(result: Any, selector: OutputSelector) -> bool:
    """Whether a function computes what it returns; one that returns entries of the outputs does not.

    Raises `InputError` for a function that is not linear in the outputs.
    """
    if not callable(selector):
        return False
    operations = _Operations(result)
    with torch.no_grad(), operations:
        value = selector(operations.given)
    if not is_floating(value):
        return False  # `select_output` says what is wrong with it
    found = operations.of(value)
    if found.dependence is Dependence.OTHER or found.is_step:
        operation = f"{found.operation} ({found.source})" if found.source else found.operation
        message = f"output= computes {operation}, which is not linear in the model's outputs. {_remedy(found)}"
        raise InputError(message, topic="choice-of-output")
    if operations.writes:
        raise InputError(
            f"output= writes into the model's output ({operations.writes}); change a copy of it, such as logits.clone()",
            topic="choice-of-output",
        )
    if operations.draws:
        raise InputError(
            f"output= draws random numbers ({operations.draws}), so what it returns is not what is explained. Draw them "
            "before, and let the function read them",
            topic="choice-of-output",
        )
    if found.dependence is not Dependence.NONE and _mixes_samples(result, selector):
        raise InputError(
            "output= computes a value for one sample from the outputs for another one, as logits - logits.mean() or "
            "logits.flip(0) do. Let it act on each sample, such as logits.mean(1, keepdim=True), or give it numbers of other "
            "samples as constants, detached. If dimension 0 holds no samples, compute it in the model: a module whose forward "
            "returns it",
            topic="choice-of-output",
        )
    return found.dependence is Dependence.LINEAR


def _mixes_samples(result: Any, selector: OutputSelector) -> bool:
    """Whether an entry along the first dimension of a function's result depends on other ones along each of an output's."""
    with torch.enable_grad(), torch.inference_mode(False):
        outputs = {id(one): one.detach().clone().requires_grad_() for one in floating_tensors(result)}
        value = select_output(map_result(result, lambda leaf: outputs.get(id(leaf), leaf)), selector)
        samples = len(value) if value.ndim else 0
        own = [one for one in outputs.values() if one.ndim > 1 and len(one) == samples]
        if samples < 2 or not own or not value.requires_grad:
            return False
        weights = torch.arange(1, value.numel() + 1, device=value.device).cos().to(value.dtype).view(value.shape)
        apart = {(place, dim) for place, one in enumerate(own) for dim in range(one.ndim) if one.shape[dim] == samples}
        numbers = torch.arange(samples, device=value.device)
        for bit in range((samples - 1).bit_length()):  # any two samples differ in a bit of their numbers
            for side in (0, 1):
                chosen = (numbers >> bit) % 2 == side
                start = weights * chosen.view(-1, *[1] * (value.ndim - 1))
                found = torch.autograd.grad(value, own, start, retain_graph=True, materialize_grads=True)
                others = (~chosen).nonzero().flatten()
                apart = {
                    (place, dim)
                    for place, dim in apart
                    if not found[place].index_select(dim, others.to(found[place].device)).any()
                }
    return {place for place, _ in apart} != set(range(len(own)))


def _remedy(found: "_Found") -> str:
    if found.is_step:
        return "A step function has no relevance: choose what it is a function of"
    if "softmax" in found.operation or found.operation == "logsumexp":
        return "Choose the logits with output=, and their class with target="
    return (
        "Choose one of the outputs with output=, and classes with target=, such as {1: 1.0, 0: -1.0} for a difference; or "
        "compute it in the model: a module whose forward returns it gives its operations rules"
    )


class _Found(NamedTuple):
    """How a tensor depends on the outputs; if not linearly, the operation that is to blame and its line."""

    dependence: Dependence = Dependence.NONE
    operation: str = ""
    source: str = ""

    @property
    def is_step(self) -> bool:
        """Whether the tensor is a step function of the outputs: a mask or a choice is a constant, but explains nothing."""
        return self.dependence is Dependence.NONE and bool(self.operation)


#: Sums of entries of all arguments. The table says so of operations with one argument.
_SUMS = ("diff", "scatter_add", "index_add")
_RESAMPLINGS = ("upsample_", "_upsample_")
#: The places of two arguments in which an operation is bilinear. It is linear in all others.
_FACTORS = {
    **dict.fromkeys(("mul", "multiply", "mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul"), (1, 2)),
}
#: The place of an argument in which an operation is not linear, while it is in all others.
_NOT_IN = {"div": 1, "divide": 1, "true_divide": 1, "addcdiv": 2, "lerp": 2}
#: Operations that return entries, beside those of which the table says so: torch's own steps below its public functions.
_ENTRIES = frozenset(
    {"as_strided", "_reshape_alias", "_unsafe_view", "lift_fresh", "lift", "detach", "positive", "take", "embedding"}
    | {"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "masked_scatter", "fill", "narrow_copy"}
    | {f"{way}_pad{dimensions}d" for way in ("reflection", "replication") for dimensions in (1, 2, 3)}
)


class _Operations(TorchDispatchMode):
    """Follows the values of a model's outputs through a function.

    What it knows of a tensor belongs to its memory, since views share it.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, _Found] = {}
        self._kept: list[Any] = []  # memory that was freed could be used again
        self.writes = self.draws = ""
        tensors = floating_tensors(result)
        depends = [tensor for tensor in tensors if tensor.requires_grad] or tensors
        copies = {id(tensor): tensor.detach() for tensor in tensors}
        self.given = map_result(result, lambda leaf: copies.get(id(leaf), leaf))
        self._outputs = {_memory(copies[id(tensor)]) for tensor in depends}
        for tensor in depends:
            self._note(copies[id(tensor)], _Found(Dependence.ENTRIES))

    def of(self, tensor: torch.Tensor) -> _Found:
        """What is known of a tensor."""
        return self._known.get(_memory(tensor), _Found())

    def _note(self, tensor: torch.Tensor, found: _Found) -> None:
        before = self.of(tensor)
        if before.dependence < found.dependence or (found.is_step and before == _Found()):
            self._known[_memory(tensor)] = found
            self._kept.append(tensor)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        written = [value for argument, value in _bound(func, args, kwargs) if argument.is_write]
        if not self.writes and any(_memory(tensor) in self._outputs for tensor in _tensors(written)):
            self.writes = user_source() or str(func)
        if not self.draws and torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = user_source() or str(func)
        read = [max((self.of(tensor) for tensor in _tensors(value)), default=_Found()) for value in given]
        result = func(*args, **(kwargs or {}))
        found = self._result_of(func, args, kwargs or {}, read)
        if found.is_step and any(self.of(tensor).dependence for tensor in _tensors(written)):
            found = found._replace(dependence=Dependence.OTHER)  # what else shares the memory is not known to be a step
        if found != _Found():
            for tensor in _tensors([result, written]):
                if found.is_step or tensor.is_floating_point() or tensor.is_complex():
                    self._note(tensor, found)
        return result

    def _result_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], read: Sequence[_Found]) -> _Found:
        most = max(read, default=_Found())
        if most.dependence in (Dependence.NONE, Dependence.OTHER) or func in FACTORIES:
            return most if func not in FACTORIES else _Found()
        name = func.overloadpacket.__name__
        name = name.removesuffix("_") if not name.endswith("__") else name
        spelling = lookup(func)
        row = None if spelling is None else spelling.operator
        depends = [bool(one.dependence) for one in read]
        linear = _Found(Dependence.LINEAR)
        step = _Found(Dependence.NONE, name, user_source())
        if row is not None and row.values.discrete:
            return step
        if name in _NOT_IN:
            if kwargs.get("rounding_mode") is not None:
                return step
            if not any(depends[_NOT_IN[name] : _NOT_IN[name] + 1]):
                return linear
        elif name in _FACTORS:
            if not all(depends[place] for place in _FACTORS[name]):
                return linear
        elif (
            name in _SUMS
            or name.startswith(_RESAMPLINGS)
            or (row is not None and (row.entries.adds_up or row.merging.coefficients is not None))
            or (name.endswith("batch_norm") and not any(depends[1:]) and _argument(func, args, kwargs, "training") is False)
            or (name.startswith("index_put") and _argument(func, args, kwargs, "accumulate"))
        ):
            return linear
        elif name in _ENTRIES or (row is not None and (row.entries.moves or row.entries.selects)):
            return most
        return _Found(Dependence.OTHER, name.removeprefix("_"), user_source())


def _argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The argument of a call with this name, or None."""
    return next((value for argument, value in _bound(func, args, kwargs) if argument.name == name), None)


def _bound(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[Any, Any]]:
    """The arguments of a call as pairs of what the schema says and the value."""
    by_name = {argument.name: argument for argument in func._schema.arguments}
    return [*zip(func._schema.arguments, args, strict=False), *((by_name[name], one) for name, one in (kwargs or {}).items())]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
