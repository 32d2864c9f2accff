"""Random inputs for a model without example inputs, to verify its graph.

Which size fits is found out by shapes alone: the graph runs on tensors without memory, which also tells how much memory a real
run would take. An attention over all pixels, for example, takes gigabytes at usual sizes of images.
"""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.frontends.exported import quiet
from lrpfx.ir.node import Role, calls, data_calls, function_name, node_info, parameter_value
from lrpfx.ir.operator import WeightLayout
from lrpfx.operators.table import spelling_of
from lrpfx.passes.constants import MAKERS_OF_NUMBERS
from lrpfx.passes.program import NOT_VERIFIED, Program
from lrpfx.support.torch_internals import UNKNOWN_TO_FAKES, FakeTensorMode, Interpreter, TorchDispatchMode, pytree

#: Heights and widths of images, lengths of signals. The small ones are tried last: few values are left of them in deep layers.
_SIZES = (28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 256, 299, 384, 16, 12, 8, 6, 4)
_MOST_INPUTS = 4
#: The most numbers in sizes of the graph that are tried as the size of a batch, and how large they may be.
_MOST_BATCHES, _LARGEST_BATCH = 3, 256
#: What the values of a run may take together, in bytes.
_MOST_MEMORY = 1 << 28


_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Guess:
    """Random inputs that fit a graph; or none, and the reason."""

    args: tuple[torch.Tensor, ...] = ()
    reason: str = NOT_VERIFIED


def guessed_inputs(program: Program) -> Guess:
    """Random inputs in the first shapes that fit the graph of `program`, if a run takes little memory."""
    found = [_first_weight(program, one) for one in program.graph.find_nodes(op="placeholder")]
    weights = [weight for weight in found if weight is not None]
    if not weights or len(weights) < len(found) or len(weights) > _MOST_INPUTS:
        return Guess()
    least: int | None = None
    for shapes in _shapes(weights, [2, *_sizes_of_batches(program)]):
        try:
            memory = _memory_of_run(program, shapes, weights)
        except UNKNOWN_TO_FAKES:
            return Guess(reason="there are no example inputs, and shapes in the graph depend on values")
        except Exception:  # whatever the operators of a graph raise for a shape that does not fit
            continue
        if memory <= _MOST_MEMORY:
            return Guess(tuple(map(_random, shapes, weights, itertools.count())))
        least = min(memory, least or memory)
    if least is None:
        return Guess()
    needed = f"{least / 2**30:.1f} GiB"
    return Guess(reason=f"there are no example inputs, and random ones that fit the model would take {needed} of memory")


@dataclass(frozen=True)
class _Weight:
    """The weight of the first linear layer behind an input."""

    tensor: torch.Tensor
    channels: int  # that the layer takes
    dimensions: int  # over which it is a convolution

    def shapes(self, batch: int, size: int, alone: bool) -> list[_Shape]:
        """The shapes of an input before it: of features, a sequence of them, or images of which the features are patches."""
        if self.dimensions:
            return [(batch, self.channels, *[size] * self.dimensions)]
        images = [(batch, colors, size, size) for colors in (3, 1)] if alone else []
        return [(batch, self.channels), (batch, 5, self.channels), *images]


def _shapes(weights: Sequence[_Weight], batches: Sequence[int]) -> Iterator[tuple[_Shape, ...]]:
    """The shapes of all inputs that are tried: one batch and one size for all."""
    tried, alone = set(), len(weights) == 1
    for batch in batches:
        of_size = [list(itertools.product(*(one.shapes(batch, size, alone) for one in weights))) for size in _SIZES]
        for shapes in itertools.chain.from_iterable(zip(*of_size, strict=True)):  # one kind of inputs, in all sizes
            if shapes not in tried:
                tried.add(shapes)
                yield shapes


def _sizes_of_batches(program: Program) -> list[int]:
    """Numbers in sizes that forward names first, as in x.view(4, -1): the model may take batches of this size alone."""
    found: dict[int, None] = {}
    for node in calls(program.graph):
        spelling = spelling_of(node)
        entries = None if spelling is None else spelling.operator.entries
        is_view = entries is not None and (entries.keeps_order or entries.repeats is not None)
        sizes: Any = node.args[1:] if is_view else node.args if function_name(node) in MAKERS_OF_NUMBERS else ()
        sizes = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
        if len(sizes) > 1 and isinstance(sizes[0], int) and 0 < sizes[0] <= _LARGEST_BATCH and sizes[0] != 2:
            found.setdefault(sizes[0])
    return list(found)[:_MOST_BATCHES]


def _random(shape: _Shape, weight: _Weight, seed: int) -> torch.Tensor:
    tensor = weight.tensor
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=tensor.dtype, device=tensor.device)


def _first_weight(program: Program, placeholder: fx.Node) -> _Weight | None:
    """The weight of the first linear layer that an input, or what is computed of it, enters."""
    behind = {placeholder}
    for node in data_calls(program.graph):
        if behind.isdisjoint(node.all_input_nodes):
            continue
        behind.add(node)
        operator = node_info(node).operator
        if operator is None or operator.linear.weight_layout is None:
            continue
        weight, groups = node.args[1], node.kwargs.get("groups", 1)
        if not isinstance(weight, fx.Node) or node_info(weight).role is not Role.PARAMETER or not isinstance(groups, int):
            return None
        tensor = parameter_value(weight, program.root)
        transposed = operator.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION
        return _Weight(tensor, tensor.shape[0] if transposed else tensor.shape[1] * groups, tensor.ndim - 2)
    return None


def _memory_of_run(program: Program, shapes: Sequence[_Shape], weights: Sequence[_Weight]) -> int:
    """The most memory that values take at one time, in bytes, in a run on inputs of these shapes; weights are not counted."""
    memory = _Memory()
    with quiet(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), memory:
        likes = [weight.tensor for weight in weights]
        pairs = zip(shapes, likes, strict=True)
        inputs = [torch.empty(shape, dtype=like.dtype, device=like.device) for shape, like in pairs]
        Interpreter(program.root, graph=program.graph).run(*inputs)
    return memory.most


class _Memory(TorchDispatchMode):
    """Counts the memory of the tensors that operators return: `most` is the most at one time, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: int = 0
        self.held: int = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._hold(leaf.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return
        self.storages.add(key)
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.held -= size
