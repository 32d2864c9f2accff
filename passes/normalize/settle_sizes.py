"""Write sizes that layers of the model fix as numbers, such as those of channels: a symbolic trace does not know them."""

import functools
import itertools
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import (
    NodeInfo,
    Role,
    attribute_of,
    calls,
    function_name,
    is_made_by_trace,
    map_arguments,
    node_info,
    result_of,
    set_info,
)
from lrpfx.ir.operator import Operator, WeightLayout
from lrpfx.operators.mixing import keeps_places
from lrpfx.operators.table import FACTORIES, FACTORY_NAMES, spelling_of, writes_in_place
from lrpfx.passes.program import GraphPass, PassResult, Program, draws_random_numbers
from lrpfx.passes.properties import NAMED

#: Calls that make a tensor of a given size, by name.
_MAKERS = FACTORY_NAMES | {"new_ones", "new_zeros", "new_full", "new_empty", "one_hot"}

Sizes = dict[fx.Node, dict[int, int]]  # of values: those known, by dimension, counted from the last


class SettleSizes(GraphPass):
    """Before `nn.Linear(4, 3)`, `torch.eye(x.shape[-1])` is `torch.eye(4)`, a constant, as it is where torch.export traces.

    Sizes change where a tensor is made of one, or scaled by one. A layer refuses inputs of other sizes. Dimensions that are
    counted from the first are known if the number of dimensions is.
    """

    name = "settle_sizes"
    stage = "normalize"
    requires = (NAMED,)

    def applies(self, program: Program) -> bool:
        return any(map(_read, calls(program.graph)))

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        known, settled = _sizes(program), dict[fx.Node, int]()
        counts_from_first = False
        for node in calls(program.graph):
            read = _read(node)
            if read is None:
                continue
            value, dim = read
            rank = len(node_info(value).shape or ())
            size = known.get(value, {}).get(dim if dim < 0 else dim - rank)
            if size is not None and not any(map(writes_in_place, value.users)):
                settled[node] = size
                counts_from_first |= dim >= 0
        if settled and _is_in_values(program.graph, settled):
            program.fixed_dimensions |= counts_from_first
            for node, size in settled.items():
                result.match(node_info(node).name, f"{size}, as the layers of the model have it")
            _Evaluation(program, settled)
        return result


def _makes_tensor(node: fx.Node) -> bool:
    return node.target in FACTORIES or function_name(node) in _MAKERS


def _read(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The tensor and the dimension of a size: x.shape[1], x.size(1) or x.size()[1]."""
    sizes: Any = node.args[0] if function_name(node) == "getitem" else None
    is_shape = isinstance(sizes, fx.Node) and (
        (sizes.target is getattr and sizes.args[1] == "shape") or (_is_size(sizes) and len(sizes.args) == 1)
    )
    value: Any = sizes.args[0] if is_shape else (node.args[0] if _is_size(node) and len(node.args) == 2 else None)
    dim = node.args[1] if value is not None else None
    return (value, dim) if isinstance(value, fx.Node) and isinstance(dim, int) and not node.kwargs else None


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "size"


def _is_in_values(graph: fx.Graph, settled: Collection[fx.Node]) -> bool:
    """Whether a settled size, or a number computed from it, is in what a tensor holds, and not in its shape alone."""
    numbers = set(settled)
    for node in calls(graph):
        if _read(node) is not None:
            numbers.add(node)
        elif numbers.isdisjoint(node.all_input_nodes):
            continue
        elif numbers.issuperset(node.all_input_nodes) and not _makes_tensor(node):
            numbers.add(node)
        elif _makes_tensor(node) or ((spelling := spelling_of(node)) is not None and spelling.operator.merging.affine_in):
            return True
    return False


class _Evaluation:
    """Computes what follows from settled sizes and the trace's own constants alone, as the trace does for numbers."""

    def __init__(self, program: Program, settled: Mapping[fx.Node, int]) -> None:
        self.program, self.values = program, dict[fx.Node, Any](settled)
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self.known = ChainMap[fx.Node, Any](self.values, self.constants)
        self.held: dict[tuple[int, int], fx.Node] = {}  # by tensor and its version, since a call may write into it
        for node in list(program.graph.nodes):
            if node.op == "get_attr" and is_made_by_trace(node, program.root):
                self.constants[node] = attribute_of(node, program.root)
                continue
            reads = node not in settled and any(one in self.values for one in node.all_input_nodes)
            if reads and not self._evaluate(node):
                given = (node.args, dict(node.kwargs))
                node.args, node.kwargs = map_arguments(given, functools.partial(self._given, node))
        for node in reversed(self.values):
            program.graph.erase_node(node)

    def _evaluate(self, node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method") and not draws_random_numbers(node)
        overwrites = writes_in_place(node) and node.args[0] in self.constants
        if not is_call or overwrites or any(one not in self.known for one in node.all_input_nodes):
            return False
        try:
            self.values[node] = result_of(node, self.known.__getitem__)
        except Exception:  # the run raises it
            return False
        return True

    def _given(self, reader: fx.Node, leaf: Any) -> Any:
        """What a reader is given for a value: a number, or a node for a tensor."""
        value = self.values.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf
        if leaf is value:
            return leaf
        return map_arguments(value, lambda one: self._hold(reader, one) if isinstance(one, torch.Tensor) else one)

    def _hold(self, reader: fx.Node, tensor: torch.Tensor) -> fx.Node:
        key = id(tensor), tensor._version
        if key not in self.held:
            root = self.program.root
            name = next(name for number in itertools.count() if not hasattr(root, name := f"_settled_constant{number}"))
            setattr(root, name, tensor.clone())
            with self.program.graph.inserting_before(reader):
                self.held[key] = self.program.graph.get_attr(name)
            info = NodeInfo(
                name, source=node_info(reader).source, role=Role.PARAMETER, shape=tuple(tensor.shape), dtype=tensor.dtype
            )
            set_info(self.held[key], info)
        return self.held[key]


# --- what layers fix --------------------------------------------------------------------------------------------------------


def _sizes(program: Program) -> Sizes:
    """The sizes of values that weights fix, and those of values that have the same entries' places."""
    known: Sizes = {}
    shapes = _shapes_of_parameters(program)
    for node in calls(program.graph):
        for value, dim, size in _fixed_by_weight(node, shapes):
            known.setdefault(value, {})[dim] = size
    pairs = [(node, source) for node in calls(program.graph) for source in _same_places(node)]
    for first, second in (*((source, node) for node, source in pairs), *reversed(pairs)):
        known.setdefault(second, {}).update(known.get(first, {}))
    return known


def _shapes_of_parameters(program: Program) -> dict[Any, tuple[int, ...]]:
    """The shapes, as far as they are known, of values that depend on no input; () if they are not."""
    found: dict[Any, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            tensor = attribute_of(node, program.root)
            found[node] = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()
        elif node.op not in ("placeholder", "output") and all(one in found for one in node.all_input_nodes):
            found[node] = node_info(node).shape or ()
    return found


def _fixed_by_weight(node: fx.Node, shapes: Mapping[Any, tuple[int, ...]]) -> Iterator[tuple[fx.Node, int, int]]:
    """Value, dimension and size, for the input and the result of a layer."""
    spelling = spelling_of(node)
    if spelling is None:
        return
    row = spelling.operator
    bound: dict[str, Any] = dict(zip(spelling.arguments, node.args, strict=False)) | node.kwargs
    value = bound.get("input")
    if not isinstance(value, fx.Node):
        return
    weight, second, mean = (_shape(bound.get(name), shapes) for name in ("weight", "other", "running_mean"))
    if row.linear.weight_layout is not None and weight:
        groups = bound.get("groups", 1)
        if isinstance(groups, int) and len(weight) > 1 + row.dimensions.spatial:
            ends = (weight[0], weight[1] * groups)
            if row.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION:
                ends = (weight[1] * groups, weight[0])
            for one, size in zip((node, value), ends, strict=True):
                yield one, -1 - row.dimensions.spatial, size
    elif row.name == "matmul" and len(second) > 1:
        yield node, -1, second[-1]
        yield value, -1, second[-2]
    elif row.name == "embedding" and weight:
        yield node, -1, weight[-1]
    else:
        sizes = _normalized(row, bound, mean, len(node_info(value).shape or ()))
        yield from ((one, dim, size) for one in (node, value) for dim, size in sizes.items())


def _normalized(row: Operator, bound: Mapping[str, Any], mean: tuple[int, ...], rank: int) -> dict[int, int]:
    """The sizes that a norm keeps, by dimension."""
    if row.name == "batch_norm" and mean and rank:
        return {1 - rank: mean[0]}
    shape = bound.get("normalized_shape") if row.name in ("layer_norm", "rms_norm") else None
    if not isinstance(shape, (tuple, list)):
        return {}
    return {-1 - place: size for place, size in enumerate(reversed(shape)) if isinstance(size, int)}


def _shape(value: Any, shapes: Mapping[Any, tuple[int, ...]]) -> tuple[int, ...]:
    return shapes.get(value, ()) if isinstance(value, fx.Node) else ()


def _same_places(node: fx.Node) -> list[fx.Node]:
    """The one signal that a call changes entry by entry."""
    spelling = spelling_of(node)
    values = node.all_input_nodes
    is_alone = spelling is not None and keeps_places(spelling.operator) and len(values) == 1
    return values if is_alone and values[0].op != "get_attr" else []
