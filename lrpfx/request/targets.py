"""Targets: what to explain of a model's output, as relevance of that output. Each kind is one class, which all doors take."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.candidates import Candidates
from lrpfx.request.classes import is_index, out_of_range
from lrpfx.request.outputs import one_place
from lrpfx.request.places import has_places, largest_classes, predicted_region, relevance_of_region
from lrpfx.runtime.multipliers import multiplier_from
from lrpfx.support.tensors import not_dense, reads_values

#: What an error says of a target that is no box.
NO_BOX = "a detector's boxes are explained by lrpfx.Box"
#: What to write for a class at some places of an output, for messages.
AT_PLACES = "a class at places of an output, such as pixels, is lrpfx.Region(class, mask)"
_ALMOST_ZERO = 1e-30  # a normal number in float32

#: Finds the index of a class or token by its name or index, and raises `InputError` for one that there is not.
IndexOf = Callable[[Any], int]
#: The name of the class with an index.
NameOf = Callable[[int], str]


class Target(ABC):
    """What to explain of an output: it assigns the output its relevance. A class of your own needs `relevance` alone.

    Targets do not change. Those that are given as plain values, such as `3` or `{3: 1.0, 5: -1.0}`, are made by `as_target`.
    """

    @abstractmethod
    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        """Relevance of an output, with its shape and dtype.

        `output`: the output, of shape (batch, ...). What is computed of it is part of programs of `lrpfx.lower`, for which it
        must not depend on values by `if` or `.item()`.
        """

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:  # noqa: B027  most outputs will do
        """Raise `InputError` for an output that has nothing like the target.

        `output`: the output, of shape (batch, ...). `chosen`: how it is chosen among the outputs of the model, as code, for
        messages.
        """

    def seed(self, output: torch.Tensor, chosen: str = "output") -> torch.Tensor:
        """Relevance of an output that is checked, with its shape and dtype. `output`, `chosen`: as for `check`."""
        output = output.detach()
        self.check(output, chosen)
        return self.relevance(output)

    def multiplier(self, output: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """Relevance of the output divided by the output, with its shape and dtype.

        `output`: the output, (batch, ...). `seed`: its relevance.

        Where the output is 0, it is the weight of the entry, if the target weighs the output there, and 0 if it sets a number.
        """
        output = output.detach()
        if reads_values(output) and bool(output.all()):
            return seed / output
        zeros = output == 0
        found = multiplier_from(output, seed)
        almost = output.to(torch.promote_types(output.dtype, torch.float32)).masked_fill(zeros, _ALMOST_ZERO)
        weighed = self.relevance(almost)
        is_weighed = zeros & (weighed.abs() < _ALMOST_ZERO**0.5)  # no number that a function sets there
        return torch.where(is_weighed, (weighed / almost).to(output), found)

    def resolved(self, index_of: IndexOf) -> "Target":
        """The target with indices in place of the names of classes, which `index_of` finds."""
        return self

    def of_labels(self, labels: Sequence[int | None]) -> "Target":
        """The target of a batch whose samples have the classes `labels`. Raises `InputError` for one without that it needs."""
        return self

    def of_sample(self, number: int) -> "Target | None":
        """The target for one sample of a batch, `number`, by itself; None where samples may not be told apart."""
        return None

    @property
    def is_of_one_batch(self) -> bool:
        """Whether the target has values for each sample, so that it fits batches of one size."""
        return False

    def least_sizes(self) -> tuple[int, ...]:
        """The sizes that an output has at least, for which the target is there: () if any will do."""
        return ()

    def weights(self, output: torch.Tensor) -> dict[int, float] | None:
        """The weights of the classes in a sample's `output` (classes, ...); None for a target that is no sum of classes."""
        return None

    def region(self, output: torch.Tensor) -> torch.Tensor | None:
        """The places of an `output` (batch, classes, ...) that are explained, bool (batch, ...); None if it has none."""
        return None

    def title(self, name_of: NameOf) -> str:
        """The target in words, with the names of classes, which `name_of` gives."""
        return str(self)

    @property
    def is_of_classes(self) -> bool:
        """Whether the target is a class, or a sum of classes."""
        return False

    @property
    def is_of_positions(self) -> bool:
        """Whether the target takes an output of three dimensions as (batch, positions, classes)."""
        return False

    @property
    def plain(self) -> Any:
        """The plain value that `as_target` makes the target of, by which it is told from others; by default the target."""
        return self

    def __str__(self) -> str:
        return type(self).__name__ if type(self).__repr__ is object.__repr__ else repr(self)


class _OfClasses(Target):
    """What is explained of an output of shape (batch, classes); of one with places behind the classes, a predicted region."""

    @property
    def is_of_classes(self) -> bool:
        return True

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        whole = "a tensor of the output's shape, or a function of the output"
        if Candidates(output).are_there:
            box = f"lrpfx.Box(0, class_={self.index!r})" if isinstance(self, Class) else "lrpfx.Box(0)"
            raise InputTypeError(f"{NO_BOX}: target={box}, not {self}", topic="detectors")
        if output.ndim == 3:
            raise InputError(
                f"the output has shape {tuple(output.shape)}: the target is (position, class), lrpfx.Region(class) for all "
                f"positions at which it is the largest, {whole}; for a class, {one_place(3, chosen)}, or give one for each "
                f"place (batch, height, width) as output=lambda output: {chosen}[:, None]",
                topic="targets",
            )
        if output.ndim < 2:
            remedy = (
                f"{one_place(output.ndim, chosen)}, or give lrpfx.attribute the relevance of the output as the target: {whole}"
            )
            message = f"a class index needs an output of shape (batch, classes), but it is {tuple(output.shape)}; {remedy}"
            raise InputError(message, topic="targets")

    def of_sample(self, number: int) -> Target | None:
        return self


@dataclass(frozen=True)
class Largest(_OfClasses):
    """The class of the largest output of each sample, or the one value of each sample of an output of shape (batch,).

    If the output has places, it is the class with the largest sum of positive outputs in its predicted region.
    """

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        if output.ndim >= 2:
            super().check(output, chosen)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return output if output.ndim < 2 else _of_class(output, largest_classes(output))

    def weights(self, output: torch.Tensor) -> dict[int, float] | None:
        return {int(largest_classes(output[None])): 1.0}

    def region(self, output: torch.Tensor) -> torch.Tensor | None:
        return predicted_region(output, largest_classes(output)) if has_places(output) else None

    def __str__(self) -> str:
        return "the largest output"


@dataclass(frozen=True)
class Class(_OfClasses):
    """One class of all samples, by its `index`, or by its name until it is `resolved`."""

    index: int | str

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        super().check(output, chosen)
        if isinstance(self.index, str):
            remedy = (
                f"write target={self.index}, without quotes"
                if is_index(self.index)
                else "lrpfx.Explainer(categories=) knows classes by name"
            )
            message = f"a target is an index, not the name {self.index!r}; {remedy}"
            raise InputTypeError(message, topic="targets")
        if not 0 <= self.index < output.shape[1]:
            raise InputError(out_of_range(f"target {self.index}", output.shape[1]), topic="targets")

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return _of_class(output, int(self.index))

    def region(self, output: torch.Tensor) -> torch.Tensor | None:
        return predicted_region(output, int(self.index)) if has_places(output) else None

    def resolved(self, index_of: IndexOf) -> Target:
        return Class(index_of(self.index))

    def least_sizes(self) -> tuple[int, ...]:
        return 1, int(self.index) + 1

    def weights(self, output: torch.Tensor) -> dict[int, float] | None:
        return {int(self.index): 1.0}

    @property
    def plain(self) -> Any:
        return self.index

    def __str__(self) -> str:
        return f"class {self.index}"


@dataclass(frozen=True)
class Label(_OfClasses):
    """The class that each sample has, as the data say."""

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        raise InputError('the sample has no label, which target="true" needs', topic="samples")

    def of_labels(self, labels: Sequence[int | None]) -> Target:
        if any(label is None or label < 0 for label in labels):
            raise InputError(
                'the sample has no label, which target="true" needs: pairs of an input and a label have one, and images in '
                "folders that are called like the categories of the explainer",
                topic="samples",
            )
        return Classes(torch.tensor(labels))

    def __str__(self) -> str:
        return "the true class"


@dataclass(frozen=True, eq=False)
class Classes(_OfClasses):
    """A class of each sample.

    `indices`: integers of shape (batch,), or () for one of all samples. Raises `InputTypeError` for others.
    """

    indices: torch.Tensor

    def __post_init__(self) -> None:
        if self.indices.dtype == torch.bool:
            raise InputTypeError("the target is a tensor of bool; class indices are integers", topic="targets")

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        super().check(output, chosen)
        batch, classes = output.shape[:2]
        if self.indices.ndim and self.indices.shape != (batch,):
            weights = "; weights of the classes are floating-point numbers: .float()" if self.indices.ndim > 1 else ""
            raise InputError(
                f"target indices have shape {tuple(self.indices.shape)}, but the batch is {batch}{weights}", topic="targets"
            )
        indices = self.indices.long()  # small integers do not hold all classes, and some cannot be compared
        outside = indices[(indices < 0) | (indices >= classes)]
        if outside.numel():
            raise InputError(out_of_range(f"target {int(outside[0])}", classes), topic="targets")

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return _of_class(output, self.indices.to(output.device).long())

    def of_sample(self, number: int) -> Target | None:
        return Classes(self.indices[number : number + 1]) if self.is_of_one_batch else self

    @property
    def is_of_one_batch(self) -> bool:
        return self.indices.ndim > 0

    def __str__(self) -> str:
        return f"class {int(self.indices)}" if self.indices.numel() == 1 else "a class for each sample"


@dataclass(frozen=True)
class Contrast(_OfClasses):
    """The sum of several classes, or of regions, each with a weight, such as the difference of two.

    `terms`: the weights by index, by name, or by `lrpfx.Region`. Of an output with places, an index means its predicted region.
    Raises `InputError` if there are none, and `InputTypeError` for weights that are no finite numbers.
    """

    terms: Mapping[Any, float]

    def __post_init__(self) -> None:
        if not self.terms:
            raise InputError("a contrast has at least one class: {class: weight, ...}", topic="targets")
        for one, weight in self.terms.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise InputTypeError(f"the weight of class {one} is a finite number, not {weight!r}", topic="targets")
            if isinstance(one, Target) and not one.is_of_classes:
                raise InputTypeError(f"a contrast weighs classes and regions, not {one}", topic="targets")

    @property
    def _parts(self) -> list[tuple[Target, float]]:
        return [(as_target(one), weight) for one, weight in self.terms.items()]

    @property
    def is_of_positions(self) -> bool:
        return any(part.is_of_positions for part, _ in self._parts)

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        for one, (part, _) in zip(self.terms, self._parts, strict=True):
            if one is None:
                raise InputTypeError("a contrast names its classes by index", topic="targets")
            part.check(output, chosen)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(output)
        for part, weight in self._parts:
            total = total + weight * part.relevance(output)
        return total

    def resolved(self, index_of: IndexOf) -> Target:
        found: dict[Any, float] = {}
        for one, weight in self.terms.items():
            key = one.resolved(index_of) if isinstance(one, Target) else index_of(one)
            found[key] = found.get(key, 0.0) + float(weight)
        return Contrast(found)

    def weights(self, output: torch.Tensor) -> dict[int, float] | None:
        if output.ndim > 1 or any(isinstance(one, Target) for one in self.terms):
            return None
        return {int(index): float(weight) for index, weight in self.terms.items()}

    def region(self, output: torch.Tensor) -> torch.Tensor | None:
        found = [one for one in (part.region(output) for part, _ in self._parts) if one is not None]
        return torch.stack(found).any(0) if found else None

    @property
    def plain(self) -> Any:
        return dict(self.terms)

    def least_sizes(self) -> tuple[int, ...]:
        return tuple(map(max, zip_longest(*(part.least_sizes() for part, _ in self._parts), fillvalue=1)))

    def title(self, name_of: NameOf) -> str:
        named = [(one.title(name_of) if isinstance(one, Target) else name_of(one), each) for one, each in self.terms.items()]
        factors = ["" if abs(weight) == 1 else f"{abs(weight):g} · " for _, weight in named]
        signs = ["−" if weight < 0 else "+" for _, weight in named]
        terms = [f"{sign} {factor}{name}" for sign, factor, (name, _) in zip(signs, factors, named, strict=True)]
        return " ".join(terms).removeprefix("+ ")

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __str__(self) -> str:
        return str({str(one) if isinstance(one, Target) else one: weight for one, weight in self.terms.items()})


@dataclass(frozen=True, eq=False)
class Position(Target):
    """A target at one position of each sequence, for outputs of shape (batch, positions, tokens).

    `position`: an index, or a tensor of indices of shape (batch,); negative ones count from the end. `target`: of the output
    (batch, tokens) there. Raises `InputTypeError` for other positions.
    """

    position: int | torch.Tensor
    target: Target

    def __post_init__(self) -> None:
        if isinstance(self.position, bool) or not isinstance(self.position, (int, torch.Tensor)):
            raise InputTypeError(
                f"a position is an index or a tensor of indices, not {type(self.position).__name__}", topic="targets"
            )
        if isinstance(self.position, torch.Tensor) and (self.position.is_floating_point() or self.position.dtype == torch.bool):
            raise InputTypeError(f"positions are integers, not a tensor of {self.position.dtype}", topic="targets")

    @property
    def is_of_classes(self) -> bool:
        return self.target.is_of_classes

    @property
    def is_of_positions(self) -> bool:
        return True

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        if output.ndim != 3:
            of_node = " For (nodes, classes), choose a node, output=lambda output: output[node : node + 1], and pass the class"
            raise InputError(
                f"a position and a token are a target for outputs of shape (batch, positions, tokens), and this one is "
                f"{tuple(output.shape)}; several targets of each sample are passed as targets=."
                f"{of_node if output.ndim == 2 else ''}",
                topic="targets",
            )
        batch, length, _ = output.shape
        places = torch.as_tensor(self.position).long()  # small integers do not hold all positions
        if places.ndim and places.shape != (batch,):
            raise InputError(f"the positions have shape {tuple(places.shape)}, but the batch is {batch}", topic="targets")
        outside = places[(places < -length) | (places >= length)]
        if outside.numel():
            raise InputError(f"position {int(outside[0])} is out of range: the output has {length} positions", topic="targets")
        self.target.check(self._there(output, self._places(output)), chosen)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        places = self._places(output)
        there = self.target.relevance(self._there(output, places))
        is_here = torch.arange(output.shape[1], device=output.device) == places[:, None]
        return torch.where(is_here[:, :, None], there[:, None, :], output.new_zeros(()))

    def _places(self, output: torch.Tensor) -> torch.Tensor:
        """The position in each sample, counted from the start. Shape (batch,)."""
        places = torch.as_tensor(self.position, device=output.device).long()
        places = torch.where(places < 0, places + output.shape[1], places)
        return places if places.ndim else places.expand(output.shape[0])

    @staticmethod
    def _there(output: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The output at these positions, (batch, tokens), and any where there is no such position, which has no relevance."""
        places = places.clamp(0, output.shape[1] - 1)
        return output.gather(1, places[:, None, None].expand(-1, 1, output.shape[2])).squeeze(1)

    @property
    def plain(self) -> Any:
        return self.position, self.target.plain

    @property
    def is_of_one_batch(self) -> bool:
        return self.target.is_of_one_batch or (isinstance(self.position, torch.Tensor) and self.position.ndim > 0)

    def least_sizes(self) -> tuple[int, ...]:
        first, last = torch.as_tensor(self.position).aminmax()
        return 1, max(int(last) + 1, -int(first)), *self.target.least_sizes()[1:]

    def resolved(self, index_of: IndexOf) -> Target:
        return Position(self.position, self.target.resolved(index_of))

    def of_labels(self, labels: Sequence[int | None]) -> Target:
        return Position(self.position, self.target.of_labels(labels))

    def __str__(self) -> str:
        return f"{self.target} at {self.position if isinstance(self.position, int) else 'a position for each sample'}"


@dataclass(frozen=True, eq=False)
class ForEach(Target):
    """A target of its own for each sample of a batch.

    `targets`: as many as samples. Raises `InputTypeError` for targets of whole batches.
    """

    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        classes = (one for one in self.targets if isinstance(one, Classes) and one.is_of_one_batch)
        whole = [*classes, *(one for one in self.targets if isinstance(one, (ForEach, Seed, Function)))]
        if whole:
            raise InputTypeError(
                "the target of one sample is an index, a position and a token, a dict of weights or None, not "
                f"{whole[0]}; tensors and functions are targets of the whole batch",
                topic="targets",
            )

    @property
    def is_of_classes(self) -> bool:
        return all(one.is_of_classes for one in self.targets)

    @property
    def is_of_positions(self) -> bool:
        return any(one.is_of_positions for one in self.targets)

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        if len(self.targets) != len(output):
            raise InputError(
                f"a list as the target has one entry for each sample, but it has {len(self.targets)} and the batch is "
                f"{len(output)}; to explain several targets of each sample, pass them as targets=",
                topic="targets",
            )
        for number, one in enumerate(self.targets):
            one.check(output[number : number + 1], chosen)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        indices = [one.index for one in self.targets if isinstance(one, Class)]
        if output.ndim == 2 and len(indices) == len(self.targets):
            return Classes(torch.tensor(indices)).relevance(output)
        return torch.cat([one.relevance(output[number : number + 1]) for number, one in enumerate(self.targets)])

    def resolved(self, index_of: IndexOf) -> Target:
        return ForEach(tuple(one.resolved(index_of) for one in self.targets))

    def of_sample(self, number: int) -> Target | None:
        return self.targets[number]

    @property
    def is_of_one_batch(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.targets))}]"


@dataclass(frozen=True, eq=False)
class Seed(Target):
    """Relevance of the output that is given, as `values` in its shape."""

    values: torch.Tensor

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        if self.values.shape != output.shape:
            several = "; several targets are passed as targets=" if self.values.shape[1:] == output.shape else ""
            raise InputError(
                f"the target has shape {tuple(self.values.shape)}, but the output has {tuple(output.shape)}{several}",
                topic="targets",
            )
        if not torch.isfinite(self.values).all():
            raise InputError("the target has values that are not finite", topic="values-not-finite")

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return self.values.to(output)

    def multiplier(self, output: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return multiplier_from(output.detach(), seed)  # it weighs nothing: it is a number itself

    def of_sample(self, number: int) -> Target | None:
        return Seed(self.values[number : number + 1])

    @property
    def is_of_one_batch(self) -> bool:
        return True

    def __str__(self) -> str:
        return "relevance given as a tensor"


@dataclass(frozen=True, eq=False)
class Function(Target):
    """Relevance of the output, computed from it by a `function` of the user, which may return any plain target's tensor."""

    function: Callable[[torch.Tensor], Any]

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        as_target(self._values(output)).check(output, chosen)

    def seed(self, output: torch.Tensor, chosen: str = "output") -> torch.Tensor:
        output = output.detach()
        found = as_target(self._values(output))  # of one call
        found.check(output, chosen)
        return found.relevance(output)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return self._values(output).to(output)

    @property
    def plain(self) -> Any:
        return self.function

    def _values(self, output: torch.Tensor) -> torch.Tensor:
        found = without_arrays(self.function(output))
        if not isinstance(found, torch.Tensor) or found.shape != output.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise InputError(
                f"the target function returned {shape} for an output of shape {tuple(output.shape)}, in which it gives each "
                f"value its relevance{self._as_output(found, output)}",
                topic="targets",
            )
        return found

    def _as_output(self, found: Any, output: torch.Tensor) -> str:
        """What to write for a function that returns the value to explain of each sample, as gradients need it."""
        if isinstance(found, float):
            found = torch.tensor(found)
        if not isinstance(found, torch.Tensor) or found.numel() not in (1, len(output)):
            return ""
        if output.ndim == 2:  # the value of one class, or its sum over the batch
            values = found.detach().to(output).reshape(-1)
            matches = (output == values[:, None]).all(0) if len(values) == len(output) else output.sum(0) == values
            if int(matches.sum()) == 1:
                return f"; to explain this class, write target={int(matches.nonzero())}"
        name = getattr(self.function, "__name__", type(self.function).__name__)
        called = "your_function" if name == "<lambda>" else name
        return f"; to explain the value that it computes, write output=lambda output: {called}(output).reshape(-1, 1)"

    def __str__(self) -> str:
        return "relevance given as a function"


Index = int | np.integer[Any]
Array = torch.Tensor | np.ndarray[Any, Any]
_PlainClass = Index | str | Array | Mapping[Any, float] | None
_OneTarget = _PlainClass | tuple[Index | Array, _PlainClass] | Callable[[torch.Tensor], torch.Tensor]
#: What `as_target` reads.
TargetLike = Target | _OneTarget | Sequence[Target | _OneTarget]
#: Several for each sample.
TargetsLike = Sequence[TargetLike] | Array


def as_target(value: Any) -> Target:
    """The target that a value stands for.

    `value`: a `Target`; None for the largest output; a class by index or name; a tensor or an array of class indices, or of
    relevance if it has floating-point numbers; a dict of weights of classes; a position and a token; a list of these with one
    for each sample; or a function from the output to its relevance. Errors: `InputError`: the value is none of them; if its
    type is wrong, an `InputTypeError`.
    """
    if isinstance(value, Target):
        return value
    value = without_arrays(value)
    if value is None:
        return Largest()
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return Class(value)
    if isinstance(value, torch.Tensor):
        if not_dense(value) is not None:
            raise InputTypeError(f"the target is {not_dense(value)}", topic="targets")
        return Seed(value) if value.is_floating_point() else Classes(value)
    if isinstance(value, Mapping):
        return Contrast(value)
    if isinstance(value, tuple) and len(value) == 2:
        return Position(value[0], as_target(value[1]))
    if isinstance(value, list):
        return ForEach(tuple(map(as_target, value)))
    if callable(value) and not isinstance(value, type):
        try:
            inspect.signature(value).bind(None)
        except TypeError as error:
            raise InputTypeError(f"a target function takes the output alone: {error}", topic="targets") from None
        except ValueError:  # functions of C have no signature
            pass
        return Function(value)
    remedy = f"several targets of each sample are passed as targets=; {AT_PLACES}"
    if isinstance(value, (bool, float)) and float(value).is_integer() and value >= 0:
        remedy = f"the class with this index is {int(value)}"
    raise InputTypeError(
        "a target is an index, a list or tensor with one for each sample, a dict of weights, a position and a token, a "
        f"function or None, not {type(value).__name__}; {remedy}",
        topic="targets",
    )


def as_targets(values: Any) -> tuple[Target, ...]:
    """Several targets of each sample. `values`: a list of targets, or a tensor with a dimension for them in front."""
    return tuple(map(as_target, listed(values)))


def listed(values: Any) -> list[Any]:
    """Several targets as a list; a tensor has a dimension for them in front."""
    found = without_arrays(values)
    if isinstance(found, torch.Tensor) and found.ndim:
        found = list(found)
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise InputTypeError(
            f"targets are several, such as [0, 1], not {type(values).__name__}; for one, pass target=", topic="targets"
        )
    if not found:
        raise InputError("the list of targets is empty", topic="targets")
    return list(found)


def check_one_of(target: Any, targets: Any) -> None:
    """Raise `InputError` if both one target and several were given."""
    if targets is not None and target is not None:
        raise InputError(
            "target= is one target for each sample, targets= are several for each; pass one of them", topic="targets"
        )


def without_arrays(target: Any) -> Any:
    """A target with plain numbers and tensors in place of NumPy's, also in tuples, lists and dicts."""
    if isinstance(target, np.generic):
        return target.item()
    if isinstance(target, np.ndarray):
        try:
            return torch.as_tensor(target)
        except TypeError as error:
            raise InputTypeError(
                f"a target is an array of dtype {target.dtype}, which torch does not have", topic="targets"
            ) from error
    if isinstance(target, (tuple, list)):
        items = [without_arrays(item) for item in target]
        return tuple(items) if isinstance(target, tuple) else items
    if isinstance(target, Mapping):
        return {without_arrays(key): without_arrays(value) for key, value in target.items()}
    return target


def _of_class(output: torch.Tensor, classes: torch.Tensor | int) -> torch.Tensor:
    """The output of one class per sample, at the places where it is predicted if there are places, and zero elsewhere.

    Output (batch, classes, ...); classes (batch,), () or one for all.
    """
    if has_places(output):
        return relevance_of_region(output, classes, predicted_region(output, classes))
    if isinstance(classes, torch.Tensor) and classes.ndim:
        classes = classes[:, None]
    is_class = torch.arange(output.shape[1], device=output.device) == classes
    return torch.where(is_class, output, torch.zeros_like(output))  # others may be minus infinity
