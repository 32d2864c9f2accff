"""Random inputs for a model without example inputs, to verify its graph.

Which size fits is found out by shapes alone: the graph runs on tensors without memory, which also tells how much memory a real
run would take. An attention over all pixels, for example, takes gigabytes at usual sizes of images.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lrpfx.frontends.exported import quiet
from lrpfx.ir.node import Role, data_calls, node_info, parameter_value
from lrpfx.ir.operator import WeightLayout
from lrpfx.passes.program import NOT_VERIFIED, Program
from lrpfx.support.torch_internals import UNKNOWN_TO_FAKES, FakeTensorMode, Interpreter, TorchDispatchMode, pytree

#: Heights and widths of images, lengths of signals. The small ones are tried last: few values are left of them in deep layers.
_SIZES = (28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 256, 299, 384, 16, 12, 8, 6, 4)
#: What the values of a run may take together, in bytes.
_MOST_MEMORY = 1 << 28


@dataclass(frozen=True)
class Guess:
    """Random inputs that fit a graph; or none, and the reason."""

    args: tuple[torch.Tensor, ...] = ()
    reason: str = NOT_VERIFIED


def guessed_inputs(program: Program) -> Guess:
    """Random inputs in the first shape that fits the graph of `program`, if a run takes little memory."""
    placeholders = program.graph.find_nodes(op="placeholder")
    weight = _first_weight(program.graph, program.root)
    if len(placeholders) != 1 or weight is None:
        return Guess()
    tensor, channels, dimensions = weight
    least: int | None = None
    if dimensions:
        shapes = [(2, channels, *[size] * dimensions) for size in _SIZES]
    else:  # features, a sequence of them, or images of which the features are patches
        shapes = [(2, channels), (2, 5, channels), *((2, colors, size, size) for colors in (3, 1) for size in _SIZES)]
    for shape in shapes:
        try:
            memory = _memory_of_run(program, shape, tensor)
        except UNKNOWN_TO_FAKES:
            return Guess(reason="there are no example inputs, and shapes in the graph depend on values")
        except Exception:  # whatever the operators of a graph raise for a shape that does not fit
            continue
        if memory <= _MOST_MEMORY:
            generator = torch.Generator(tensor.device).manual_seed(0)
            return Guess((torch.rand(shape, generator=generator, dtype=tensor.dtype, device=tensor.device),))
        least = min(memory, least or memory)
    if least is None:
        return Guess()
    needed = f"{least / 2**30:.1f} GiB"
    return Guess(reason=f"there are no example inputs, and random ones that fit the model would take {needed} of memory")


def _first_weight(graph: fx.Graph, root: nn.Module) -> tuple[torch.Tensor, int, int] | None:
    """The weight of the first linear layer, its number of input channels and its number of spatial dimensions."""
    for node in data_calls(graph):
        operator = node_info(node).operator
        if operator is None or operator.linear.weight_layout is None:
            continue
        weight, groups = node.args[1], node.kwargs.get("groups", 1)
        if not isinstance(weight, fx.Node) or node_info(weight).role is not Role.PARAMETER or not isinstance(groups, int):
            return None
        tensor = parameter_value(weight, root)
        transposed = operator.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION
        return tensor, tensor.shape[0] if transposed else tensor.shape[1] * groups, tensor.ndim - 2
    return None


def _memory_of_run(program: Program, shape: tuple[int, ...], like: torch.Tensor) -> int:
    """The most memory that values take at one time, in bytes, in a run on an input of this shape; weights are not counted."""
    memory = _Memory()
    with quiet(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), memory:
        input = torch.empty(shape, dtype=like.dtype, device=like.device)
        interpreter = Interpreter(program.root, graph=program.graph)
        interpreter.run(input)
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
