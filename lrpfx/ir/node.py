"""What the compiler knows about a node of a graph, kept in `node.meta`."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from lrpfx import types
from lrpfx.errors import PassError
from lrpfx.ir.operator import Operator, Sign

_KEY = "lrpfx"


INPLACE = "lrpfx_inplace"  # node.meta: the node overwrites its first argument


class Role(enum.Enum):
    """What a node's value depends on."""

    DATA = "data"  # the values of the model's inputs: relevance flows through it
    DISCRETE = "discrete"  # inputs of integers or truth values: constant to relevance, but embeddings look them up
    CONSTANT = "constant"  # inputs that the user declared constant, and steps of the data, such as x > 0
    PARAMETER = "parameter"  # parameters, buffers and constants alone: it can be folded
    METADATA = "metadata"  # shapes, dtypes and devices of the inputs: a host value, or a tensor made from such


@dataclass(frozen=True)
class Facts:
    """What the compiler knows of one call of a layer."""

    signs: tuple[Sign, ...] = ()  # of the inputs
    relevant_where_positive: bool = False  # the output's relevance is zero wherever the output is not positive


@dataclass(frozen=True)
class NodeInfo:
    """The compiler's knowledge of one node. Immutable, so that copies of a graph can share it."""

    name: str  # qualified name, unique in the graph
    module_path: str | None = None  # the module whose call this node is, if it stands for one
    source: str = ""  # file:line of the user's code that made the node
    operator: Operator | None = None  # row of the operator table
    unlisted: type[types.Kind] | None = None  # the kind of a call that no row lists
    role: Role = Role.DATA
    description: str = ""  # the layer as its author wrote it, e.g. Conv2d(3, 64, kernel_size=(7, 7))
    shape: tuple[int, ...] | None = None  # of the value, where example inputs were given
    dtype: torch.dtype | None = None  # of the value, likewise
    sign: Sign = Sign.UNKNOWN
    relevant_where_positive: bool = False  # the value's relevance is zero wherever the value is not positive
    value_range: tuple[float, float] | None = None  # of an input, where the user gave it
    merged: tuple[str, ...] = ()  # names of the layers that were merged into this one
    rule: Any = None  # the rule (a Hook), until the rewrite; afterwards its text
    chosen_by: str = ""  # which entry of the composite chose the rule
    keeps_gradient: bool = False  # without a rule, and allowed to be

    @property
    def kind(self) -> type[types.Kind] | None:
        """What a call computes; None for inputs, parameters, and what depends on shapes alone."""
        return self.unlisted if self.operator is None else self.operator.kind

    @property
    def kind_name(self) -> str:
        """The name of the kind, "" where there is none."""
        return "" if self.kind is None else self.kind.__name__

    @property
    def neutral(self) -> bool:
        """Whether the call is known to need no rule."""
        return self.operator is not None and self.operator.neutral


def row_of(node: fx.Node) -> Operator:
    """The row that a node's operator has in the table. `PassError` where there is none."""
    row = node_info(node).operator
    if row is None:
        raise PassError(f"{node_info(node).name} is not an operation of the table")
    return row


def node_info(node: fx.Node) -> NodeInfo:
    """The knowledge attached to `node`; every node of a captured graph has it."""
    info = node.meta[_KEY]
    assert isinstance(info, NodeInfo)
    return info


def support_label(info: NodeInfo) -> str:
    """Where a value has relevance: "> 0" for only where it is positive, or nothing."""
    return "> 0" if info.relevant_where_positive else ""


def has_info(node: fx.Node) -> bool:
    """Whether the compiler has recorded anything about `node` yet."""
    return _KEY in node.meta


def set_info(node: fx.Node, info: NodeInfo) -> None:
    node.meta[_KEY] = info


def update_info(node: fx.Node, **changes: Any) -> None:
    """Replace single facts about `node`."""
    set_info(node, replace(node_info(node), **changes))


def like(sequence: Any, items: list[Any]) -> Any:
    """`items` as a list, or as a tuple of the class of `sequence`: a named one keeps its names."""
    if not isinstance(sequence, tuple):
        return items
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    return type(sequence)(items) if hasattr(sequence, "n_sequence_fields") else tuple(items)


def map_arguments(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of call arguments (tuples, lists, dicts, slices) with every leaf changed by a function."""
    if isinstance(arguments, (tuple, list)):
        items = [map_arguments(item, change) for item in arguments]
        return like(arguments, items)
    if isinstance(arguments, dict):
        return {name: map_arguments(value, change) for name, value in arguments.items()}
    if isinstance(arguments, slice):
        return slice(*(map_arguments(part, change) for part in (arguments.start, arguments.stop, arguments.step)))
    return change(arguments)


def nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes in a structure of arguments, in order and as often as they occur."""
    found: list[fx.Node] = []
    map_arguments(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, fx.Node) else None)
    return found


def is_data(argument: Any) -> bool:
    """Whether an argument is a node that depends on the values of the model's inputs."""
    return isinstance(argument, fx.Node) and node_info(argument).role is Role.DATA


def role_from(arguments: Iterable[Any]) -> Role:
    """What the value of a call depends on, from what its arguments depend on."""
    roles = {node_info(argument).role for argument in arguments if isinstance(argument, fx.Node)}
    for role in (Role.DATA, Role.DISCRETE, Role.CONSTANT):
        if role in roles:
            return role
    return Role.PARAMETER if roles == {Role.PARAMETER} else Role.METADATA


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns a graph's results: its last one."""
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


def attribute_of(node: fx.Node, root: nn.Module) -> Any:
    """The parameter, buffer or constant of `root` that a `get_attr` node reads."""
    path, _, leaf = str(node.target).rpartition(".")
    return getattr(root.get_submodule(path), leaf)


def is_floating(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a floating-point tensor, which a gradient or relevance can belong to."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def floating_tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a result, in order: in tuples, lists, dicts and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, item.name) for item in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in floating_tensors(item)]
    return [value] if is_floating(value) else []


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` that compute something, in execution order."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            yield node


def data_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` that relevance flows through, in execution order."""
    return (node for node in calls(graph) if node_info(node).role is Role.DATA)


def named_nodes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """Inputs and data-carrying calls with their qualified names."""
    for node in graph.nodes:
        if node.op == "placeholder" or node.op.startswith("call"):
            info = node_info(node)
            if info.role is Role.DATA or node.op == "placeholder":
                yield info.name, node
