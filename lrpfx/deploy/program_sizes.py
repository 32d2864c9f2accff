"""The sizes that a lowered program leaves open."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lrpfx.deploy.job import invalid
from lrpfx.errors import LoweringError
from lrpfx.ir.guards import FixedSizes, SharedSize, SizeCondition
from lrpfx.ir.size_proofs import is_proved
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.graph_data import is_graph


class SizeError(Exception):
    """A program cannot be made, or is not right, for all open sizes. Fewer of them may help."""


VARIANTS = 3  # sizes with which a program is compared with `attribute`; it is traced with the first
_SMALL = 4096  # a condition on one size alone is tested at all sizes up to here, and one on several sizes at fewer
_LARGE = (5000, 65_535, 65_536, 65_537)


@dataclass(frozen=True)
class OpenSize:
    """Dimensions of inputs, as (input, dimension), that have one size, which may vary in the program.

    `is_batch`: whether it is the number of samples, which the first dimensions of all inputs have.
    """

    of: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]  # in each variant of the example
    lower: int = 1
    upper: int | None = None
    is_batch: bool = False

    def admits(self, size: int) -> bool:
        return size >= self.lower and (self.upper is None or size <= self.upper)


def open_sizes(module: ExplainModule, inputs: Mapping[str, torch.Tensor]) -> list[OpenSize]:
    """The open sizes of a program: the batch, then other sizes that the module leaves open; of a graph, its nodes and edges.

    The sizes of the variants are greater than 1 and differ from all other sizes: tracing would treat equal sizes as the same.
    """
    if _is_graph(inputs):
        return _with_variants(_of_graph(module, inputs), inputs)
    if len({len(tensor) for tensor in inputs.values()}) > 1:
        sizes = ", ".join(f"{name} {len(tensor)}" for name, tensor in inputs.items())
        raise invalid(
            f"the inputs have different batch sizes, {sizes}: they may be of one size alone, with dynamic_batch=False"
        )
    opened = [OpenSize(tuple((name, 0) for name in inputs), (), is_batch=True)]
    for guard in module.guards:
        if isinstance(guard, SharedSize) and all(number for _, number in guard.of):
            of = tuple((place.argument, number) for place, number in guard.of if place.argument in inputs and not place.keys)
            opened += [OpenSize(of, (), max(guard.lower, 1), guard.upper)] if of else []
    conditions = [guard for guard in module.guards if isinstance(guard, SizeCondition)]
    for guard in conditions:
        if len(guard.of) == 1 and not _always_holds(guard, opened[0], opened, inputs, least=2):
            raise LoweringError(other_operations(module, f"{guard.readable} does not hold"))
    opened[1:] = [_narrowed(one, conditions, inputs) for one in opened[1:]]
    opened[1:] = [one for one in opened[1:] if all(_always_holds(guard, one, opened, inputs) for guard in conditions)]
    for guard in conditions:  # now that the other sizes in it are fixed
        if not _always_holds(guard, opened[0], opened, inputs):
            raise LoweringError(other_operations(module, f"{guard.readable} does not hold"))
    return _with_variants(opened, inputs)


def _is_graph(inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether inputs are those of a graph network: features of nodes, and the sources and targets of edges."""
    return is_graph(inputs) and inputs["edge_index"].ndim == 2


def _of_graph(module: ExplainModule, inputs: Mapping[str, torch.Tensor]) -> list[OpenSize]:
    """The numbers of nodes and of edges, as far as the module leaves them open."""
    fixed = {
        (guard.place.argument, number)
        for guard in module.guards
        if isinstance(guard, FixedSizes)
        for number, size in enumerate(guard.sizes)
        if size is not None
    }
    nodes, edges = len(inputs["x"]), inputs["edge_index"].shape[1]
    of_edges = {name for name, one in inputs.items() if name.startswith("edge_") and len(one) == edges} - {"edge_index"}
    of_nodes = {name for name, one in inputs.items() if len(one) == nodes} - of_edges - {"edge_index"}
    found = [
        tuple((name, 0) for name in inputs if name in of_nodes),
        (("edge_index", 1), *((name, 0) for name in inputs if name in of_edges)),
    ]
    return [OpenSize(of, ()) for of in found if fixed.isdisjoint(of)]


def _with_variants(opened: Sequence[OpenSize], inputs: Mapping[str, torch.Tensor]) -> list[OpenSize]:
    """The open sizes with those of each variant, without those for which there are none."""
    varying = {dimension for one in opened for dimension in one.of}
    shapes = {name: enumerate(tensor.shape) for name, tensor in inputs.items()}
    taken = {size for name, shape in shapes.items() for number, size in shape if (name, number) not in varying}
    found: list[OpenSize] = []
    for one in opened:
        name, number = one.of[0]
        example = 2 if one.is_batch else inputs[name].shape[number]
        near = itertools.chain.from_iterable((example + step, example - step) for step in itertools.count(1))
        candidates = itertools.islice(itertools.chain([example], near), 100 + 2 * example)
        free = [size for size in candidates if size > 1 and size not in taken and one.admits(size)][:VARIANTS]
        if len(free) == VARIANTS:
            found.append(replace(one, sizes=tuple(free)))
            taken |= set(free)
    return found


def _always_holds(
    guard: SizeCondition, size: OpenSize, opened: Sequence[OpenSize], inputs: Mapping[str, torch.Tensor], least: int = 1
) -> bool:
    """Whether a condition of the module is of other sizes, or holds for all that this one and others take.

    Of one size, samples decide. Of several, samples could miss a pair, so it must also follow from their limits.
    """
    places = [(place.argument, number) for place, number in guard.of]
    if not any(dimension in size.of for dimension in places):
        return True
    if not all(name in inputs for name, _ in places):
        return False  # the module itself reports the missing input
    involved = [one for one in opened if any(dimension in one.of for dimension in places)]
    for sample in samples(guard.expression, involved, least):
        sizes = {name_and_number: size for one, size in zip(involved, sample, strict=True) for name_and_number in one.of}
        if not _holds(guard, [sizes.get(place, inputs[place[0]].shape[place[1]]) for place in places]):
            return False
    if len(involved) < 2:
        return True
    symbols = {f"size_{number}": one for number, one in enumerate(involved)}
    names = {dimension: name for name, one in symbols.items() for dimension in one.of}
    written = [names.get(place, str(inputs[place[0]].shape[place[1]])) for place in places]
    condition = re.sub(r"sizes\[(\d+)\]", lambda found: written[int(found[1])], guard.expression)
    return is_proved(condition, limits(symbols, least))


def limits(sizes: Mapping[str, OpenSize], least: int) -> dict[str, tuple[int, int | None]]:
    return {name: (max(one.lower, least), one.upper) for name, one in sizes.items()}


def _narrowed(size: OpenSize, conditions: Sequence[SizeCondition], inputs: Mapping[str, torch.Tensor]) -> OpenSize:
    """The open size without its smallest values, and its largest within narrow limits, if conditions exclude all of them."""
    narrow = size.upper is not None and size.upper - size.lower < _SMALL
    name, number = size.of[0]
    own = [guard for guard in conditions if {(place.argument, dimension) for place, dimension in guard.of} <= set(size.of)]
    values = range(size.lower, size.upper + 1 if narrow and size.upper is not None else inputs[name].shape[number])
    failing = [value for value in values if not all(_holds(guard, [value] * len(guard.of)) for guard in own)]
    below = [value for value in failing if value < inputs[name].shape[number]]
    above = [value for value in failing if value > inputs[name].shape[number]]
    lower = size.lower + len(below) if below and len(below) == below[-1] - size.lower + 1 else size.lower
    upper = size.upper
    if size.upper is not None and above and len(above) == size.upper - above[0] + 1:
        upper = size.upper - len(above)
    return replace(size, lower=lower, upper=upper)


def _holds(guard: SizeCondition, sizes: Sequence[int]) -> bool:
    try:
        return bool(guard.holds(sizes))
    except ArithmeticError:  # it divides by a term that is zero for these sizes, or has a number that is too large
        return False


def samples(condition: str, involved: Sequence[OpenSize], least: int = 1) -> Iterator[tuple[int, ...]]:
    """Sizes at which a condition must hold if the program, which has no conditions, leaves them open.

    Of one size, all up to `_SMALL`, and as many from its lower limit on; of several, fewer, with the numbers in the condition,
    their neighbours and their multiples.
    """
    numbers = {number for number in map(int, re.findall(r"\b\d+\b", condition)) if number <= _LARGE[-1]}
    near = {number * times + step for number in numbers for times in range(1, 9) for step in (-1, 0, 1)}
    small = _SMALL if len(involved) == 1 else 24 if len(involved) == 2 else 6
    candidates = {*range(least, small + 1), *near, *_LARGE}
    sizes = [
        sorted(size for size in candidates | {*range(one.lower, one.lower + small)} if size >= least and one.admits(size))
        for one in involved
    ]
    return itertools.product(*sizes)


def with_sizes(inputs: Mapping[str, torch.Tensor], opened: Sequence[OpenSize], variant: int) -> list[torch.Tensor]:
    """The inputs in the sizes of one variant: entries are repeated as often as needed."""
    return list(resized(inputs, {dimension: one.sizes[variant] for one in opened for dimension in one.of}).values())


def resized(inputs: Mapping[str, torch.Tensor], sizes: Mapping[tuple[str, int], int]) -> dict[str, torch.Tensor]:
    changed = dict(inputs)
    for (name, number), size in sizes.items():
        tensor = changed[name]
        changed[name] = tensor.index_select(number, torch.arange(size, device=tensor.device) % tensor.shape[number])
    if _is_graph(changed):
        changed["edge_index"] = changed["edge_index"] % len(changed["x"])  # the nodes that there are
    return changed


def dimensions_of(
    opened: Sequence[OpenSize], variants: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, dict[int, OpenSize | None]]:
    """The dimensions that vary, by name: dimension -> the open size that it has, or None for a size computed from one."""
    of_sizes = {one.sizes: one for one in opened}
    found: dict[str, dict[int, OpenSize | None]] = {}
    for name in variants[0]:
        of_dimensions = zip(*(variant[name].shape for variant in variants), strict=True)
        found[name] = {number: of_sizes.get(sizes) for number, sizes in enumerate(of_dimensions) if len(set(sizes)) > 1}
    return found


def other_operations(module: ExplainModule, where: str) -> str:
    return f"{module.title} has other operations where {where}; lower it with dynamic_batch=False, for one batch size"
