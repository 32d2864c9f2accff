"""Known properties of values during a trace, for Python code that reads them.

Known are shapes of values computed only from parameters and buffers, values computed only from buffers and, with example
inputs, the number of dimensions of everything. Everything else would be valid for one input only, and is unknown.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from lrpfx.ir.node import ancestors_of, attribute_of, function_name, result_of
from lrpfx.operators.table import lookup_method, spelling_of, writes_in_place
from lrpfx.support.tensors import is_floating
from lrpfx.support.torch_internals import FakeTensorMode

_UNKNOWN = object()


class _Evaluation:
    """The values of the nodes of a growing graph, if those of its leaves are known; each node runs once, in order."""

    def __init__(self, graph: fx.Graph, leaf: Callable[[fx.Node], Any], mode: AbstractContextManager[Any]) -> None:
        self.graph = graph
        self.leaf = leaf
        self.mode = mode
        self.values: dict[fx.Node, Any] = {}
        self.spoiled = False  # an unknown value was written into a known one

    def __call__(self, node: fx.Node) -> Any:
        """The value of `node`, or `_UNKNOWN`."""
        last = next(reversed(self.values), None)
        pending = next(iter(self.graph.nodes)) if last is None else last.next
        while node not in self.values:
            self.values[pending] = self._run(pending)
            pending = pending.next
        return _UNKNOWN if self.spoiled else self.values[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op in ("get_attr", "placeholder"):
            return self.leaf(node)
        arguments = [self.values[argument] for argument in node.all_input_nodes]
        if not arguments or node.op not in ("call_function", "call_method"):
            return _UNKNOWN
        if any(value is _UNKNOWN for value in arguments):
            self.spoiled |= _writes(node) and self.values.get(node.all_input_nodes[0]) is not _UNKNOWN
            return _UNKNOWN
        try:
            with self.mode, torch.no_grad():
                return result_of(node, self.values.__getitem__)
        except Exception:  # not computable without the input, not an error of the model
            return _UNKNOWN


def _writes(node: fx.Node) -> bool:
    """Whether a call may overwrite one of its arguments."""
    return "out" in node.kwargs or writes_in_place(node)


#: Names of the argument that says how many pieces there are.
_PIECES = ("chunks", "split_size_or_sections", "split_size", "indices_or_sections", "sections")


class KnownValues:
    """Known properties of the nodes of `graph` during the trace of `root`, given example inputs by name."""

    def __init__(self, graph: fx.Graph, root: nn.Module, examples: Mapping[str, Any]) -> None:
        self.root = root
        self.tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}  # getattr gives proxies during the trace
        self.examples = examples
        self.frozen: dict[str, torch.Tensor] = {}  # buffers that were read as numbers, by name
        self.dimensions: dict[fx.Node, int] = {}  # inputs whose number of dimensions was read
        self._fake_mode = FakeTensorMode()
        self._structures = _Evaluation(graph, self._structure_of_leaf, self._fake_mode)
        self._values = _Evaluation(graph, self._value_of_leaf, nullcontext())

    def _structure_of_leaf(self, node: fx.Node) -> Any:
        given = self.examples.get(str(node.target), _UNKNOWN) if node.op == "placeholder" else self._attribute(node)
        return fx.node.map_aggregate(given, self._fake)

    def _attribute(self, node: fx.Node) -> Any:
        name = str(node.target)
        return self.tensors[name] if name in self.tensors else attribute_of(node, self.root)

    def _fake(self, leaf: Any) -> Any:
        return self._fake_mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _value_of_leaf(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return _UNKNOWN
        value = self._attribute(node)
        return value.detach().clone() if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) else _UNKNOWN

    def value(self, node: fx.Node) -> Any:
        """The value of a node that depends only on buffers, or None. The graph is then valid only for these buffers."""
        value = self._values(node)
        ancestors = ancestors_of(node)
        leaves = [leaf for leaf in node.graph.find_nodes(op="get_attr") if leaf in ancestors]
        counted = any(_writes(user) and user.all_input_nodes[0] is leaf for leaf in leaves for user in leaf.users)
        if value is _UNKNOWN or counted:  # a value that changes with every call
            return None
        for leaf in leaves:
            name = str(leaf.target)
            if name in self.tensors:  # not a constant made in forward
                self.frozen[name] = self.tensors[name].detach().clone()
        return value

    def constant(self, node: fx.Node) -> torch.Tensor | None:
        """A tensor with the shape of a node that depends only on parameters and buffers, or None."""
        if any(leaf.op == "placeholder" for leaf in ancestors_of(node)):
            return None
        value = self._structures(node)
        return value if isinstance(value, torch.Tensor) else None

    def example(self, node: fx.Node) -> torch.Tensor | None:
        """A tensor with the number of dimensions of `node`, or None. The graph is then valid only for such inputs."""
        value = self._structures(node)
        return value if isinstance(value, torch.Tensor) and self._hold_dimensions(node) else None

    def count_of_sizes(self, node: fx.Node) -> int | None:
        """The number of sizes in a shape, or None. The graph is then valid only for inputs with that many dimensions."""
        value = self._structures(node)
        return len(value) if isinstance(value, torch.Size) and self._hold_dimensions(node) else None

    def count_of_pieces(self, node: fx.Node) -> int | None:
        """The number of pieces into which a call divides a tensor, or None.

        It is one that a size does not change unnoticed: a tensor of another size has as many pieces, or too few for the graph.
        """
        if function_name(node) not in ("chunk", "split", "tensor_split") or len(node.all_input_nodes) != 1:
            return None
        given = dict(enumerate(node.args)) | node.kwargs
        wanted = next((given[one] for one in (1, *_PIECES) if one in given), None)
        if isinstance(wanted, int):
            count = None if function_name(node) == "split" else wanted
        else:
            count = len(wanted) if function_name(node) == "split" and isinstance(wanted, (list, tuple)) else None
        pieces = self._structures(node)
        return count if isinstance(pieces, (list, tuple)) and len(pieces) == count else None

    def _hold_dimensions(self, node: fx.Node) -> bool:
        """Fix the numbers of dimensions of all inputs of `node`, if they determine that of `node`."""
        ancestors = ancestors_of(node)
        inputs = {one: value for one in node.graph.nodes if one in ancestors and is_floating(value := self._input(one))}
        known = all(_reads_tensors(ancestor, inputs, ancestors) for ancestor in ancestors if ancestor.op == "placeholder")
        if not known or any(map(_squeezes, ancestors)):
            return False
        self.dimensions.update({ancestor: value.ndim for ancestor, value in inputs.items()})
        return True

    def _input(self, node: fx.Node) -> Any:
        """The example of an input, or of an item of one; None for other nodes."""
        source = node
        while source.target is operator.getitem and isinstance(source.args[0], fx.Node):
            source = source.args[0]
            if isinstance(self._structures(source), torch.Tensor):
                return None  # a part of a tensor
        return self._structures(node) if source.op == "placeholder" else None


def _reads_tensors(node: fx.Node, inputs: Collection[fx.Node], ancestors: Collection[fx.Node]) -> bool:
    """Whether an input is one of the tensors `inputs`, or only such items of it are read."""
    users = [user for user in node.users if user in ancestors]
    entries = all(user.target is operator.getitem and _reads_tensors(user, inputs, ancestors) for user in users)
    return node in inputs or (bool(users) and entries)


def _squeezes(node: fx.Node) -> bool:
    """Whether it depends on sizes which dimensions a call, or its form in place, leaves."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    spelling = spelling_of(node) or lookup_method(name.removesuffix("_"))
    return spelling is not None and spelling.operator.dimensions.squeezes
