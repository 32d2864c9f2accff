"""The compiler's knowledge about the nodes of a graph, stored in `node.meta`."""

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from lrpfx.errors import PassError
from lrpfx.ir import kinds
from lrpfx.ir.operator import Operator, Sign
from lrpfx.support.tensors import is_discrete, is_floating

_KEY = "lrpfx"


#: What follows the name of an input for references in that of the node that reads it.
GIVEN = ".given"
#: What follows the name of a value in that of the node where its multipliers are multiplied by it.
CARRIED = ".multiplier"

INPLACE = "lrpfx_inplace"  # node.meta: the node overwrites its first argument


class Role(enum.Enum):
    """What a node's value depends on."""

    DATA = "data"  # the values of the model's inputs: relevance flows through it
    DISCRETE = "discrete"  # inputs of integers or booleans: constant to relevance, but embeddings take them as indices
    CONSTANT = "constant"  # inputs that the user declared constant, and step functions of the data, such as x > 0
    PARAMETER = "parameter"  # only parameters, buffers and constants: it can be folded
    METADATA = "metadata"  # only shapes, dtypes and devices of the inputs: a Python value, or a tensor made from such values


@dataclass(frozen=True)
class Facts:
    """The compiler's knowledge about one call of a layer, from which its rule chooses a shortcut."""

    signs: tuple[Sign, ...] = ()  # of the inputs
    relevant_where_positive: bool = False  # the output's relevance is zero wherever the output is not positive


@dataclass(frozen=True)
class NodeInfo:
    """The compiler's knowledge about one node. It is immutable, so copies of a graph can share it."""

    name: str  # qualified name, unique among calls; of an input, the name of its argument
    module_path: str | None = None  # the module that the node calls, if it represents a module call
    source: str = ""  # file:line of the user's code that created the node
    operator: Operator | None = None  # row of the operator table
    unlisted: type[kinds.Kind] | None = None  # the kind of a call without a row
    role: Role = Role.DATA
    description: str = ""  # the layer as its author wrote it, e.g. Conv2d(3, 64, kernel_size=(7, 7))
    shape: tuple[int, ...] | None = None  # of the value, if example inputs were given
    dtype: torch.dtype | None = None  # of the value, if example inputs were given
    number: float | None = None  # of a constant tensor that is one number, such as torch.tensor(0.0)
    several: bool = False  # whether the call of a module returns several values, if example inputs were given
    sign: Sign = Sign.UNKNOWN
    relevant_where_positive: bool = False  # the value's relevance is zero wherever the value is not positive
    value_range: tuple[float, float] | None = None  # of an input, if the user gave it
    part: tuple[str, str] | None = None  # the decomposed call that it is part of, and what it does there
    merged: tuple[str, ...] = ()  # names of the layers that were merged into this one
    rule: Any = None  # the rule, a Hook
    chosen_by: str = ""  # which entry of the composite chose the rule
    keeps_gradient: bool = False  # it has no rule and may keep its plain gradient
    form: Any = None  # the form of its rule that carries multipliers (a MultiplierForm), if it has that form in this graph
    block: str = ""  # the call of a module that is computed again in the backward pass, if it is part of one
    reference: str = ""  # the name of the node with the value that this one has for the reference, of differences from one
    carries_multiplier: bool = False  # the gradient of the value is a multiplier m, with relevance value * m, not relevance

    @property
    def kind(self) -> type[kinds.Kind] | None:
        """The kind of a call; None for inputs, parameters, and values that depend only on shapes."""
        return self.unlisted if self.operator is None else self.operator.kind

    @property
    def kind_name(self) -> str:
        """The name of the kind, or "" if there is none."""
        return "" if self.kind is None else self.kind.__name__

    @property
    def located(self) -> str:
        """The name of a call and the line that made it, for messages."""
        return f"{self.name} ({self.source or 'source unknown'})"

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
    """The label "> 0" of a value whose relevance is zero wherever it is not positive; "" for other values."""
    return "> 0" if info.relevant_where_positive else ""


def has_info(node: fx.Node) -> bool:
    """Whether the compiler has recorded anything about `node` yet."""
    return _KEY in node.meta


def set_info(node: fx.Node, info: NodeInfo) -> None:
    node.meta[_KEY] = info


def update_info(node: fx.Node, **changes: Any) -> None:
    """Replace some facts about `node`."""
    set_info(node, replace(node_info(node), **changes))


def like(sequence: Any, items: list[Any]) -> Any:
    """`items` as a list, or as a tuple of the class of `sequence`, which may be a named tuple or a result type of torch."""
    if type(sequence) is tuple:
        return tuple(items)
    if not isinstance(sequence, tuple):
        return items
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    return type(sequence)(items) if hasattr(sequence, "n_sequence_fields") else tuple(items)


def map_arguments(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of nested call arguments (tuples, lists, dicts, slices)."""
    if isinstance(arguments, fx.Node):
        return change(arguments)
    if isinstance(arguments, (tuple, list)):
        items = [map_arguments(item, change) for item in arguments]
        return like(arguments, items)
    if isinstance(arguments, dict):
        return {name: map_arguments(value, change) for name, value in arguments.items()}
    if isinstance(arguments, slice):
        return slice(*(map_arguments(part, change) for part in (arguments.start, arguments.stop, arguments.step)))
    return change(arguments)


def nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes in nested arguments, in order and with repetitions."""
    found: list[fx.Node] = []
    map_arguments(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, fx.Node) else None)
    return found


def is_data(argument: Any) -> bool:
    """Whether an argument is a node that depends on the values of the model's inputs."""
    return isinstance(argument, fx.Node) and node_info(argument).role is Role.DATA


def readers(value: fx.Node) -> list[fx.Node]:
    """The nodes that read the entries of a value, not its shape, dtype or device alone."""
    return [user for user in value.users if user.op == "output" or node_info(user).role is not Role.METADATA]


def only_reader(value: fx.Node) -> fx.Node | None:
    """The only call that reads the entries of a value."""
    found = readers(value)
    return found[0] if len(found) == 1 and found[0].op == "call_function" else None


def role_from(arguments: Iterable[Any]) -> Role:
    """The role of a call, from the roles of its arguments."""
    arguments = list(arguments)
    roles = {node_info(argument).role for argument in arguments if isinstance(argument, fx.Node)}
    for role in (Role.DATA, Role.DISCRETE, Role.CONSTANT):
        if role in roles:
            return role
    if Role.PARAMETER in roles and all(is_of_parameters(node) for node in arguments if isinstance(node, fx.Node)):
        return Role.PARAMETER
    return Role.METADATA


def is_of_parameters(node: fx.Node) -> bool:
    """Whether a node is computed from parameters, as also `weight.dtype` is, or from numbers, as `torch.ones(3)` is."""
    if node_info(node).role is not Role.METADATA:
        return node_info(node).role is Role.PARAMETER
    return all(map(is_of_parameters, node.all_input_nodes))


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns a graph's results: its last one."""
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


def attribute_of(node: fx.Node, root: nn.Module) -> Any:
    """The parameter, buffer or constant of `root` that a `get_attr` node reads."""
    path, _, leaf = str(node.target).rpartition(".")
    return getattr(root.get_submodule(path), leaf)


def is_made_by_trace(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node reads a tensor that a trace has made, as torch.zeros(3): parameters and buffers may change."""
    if node.op != "get_attr" or not isinstance(attribute_of(node, root), torch.Tensor):
        return False
    path, _, name = str(node.target).rpartition(".")
    owner = root.get_submodule(path)
    return name not in owner._parameters and name not in owner._buffers


def may_be_loaded(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node reads what `load_state_dict` may change: a parameter, or a buffer that is stored with the model."""
    if node.op != "get_attr":
        return False
    path, _, name = str(node.target).rpartition(".")
    owner = root.get_submodule(path)
    return name in owner._parameters or (name in owner._buffers and name not in owner._non_persistent_buffers_set)


def parameter_value(node: fx.Node, root: nn.Module) -> Any:
    """The value of a node that depends only on parameters."""
    values: dict[fx.Node, Any] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        if current.op == "get_attr":
            values[current] = attribute_of(current, root)
        missing = [argument for argument in current.all_input_nodes if argument not in values]
        if missing:
            pending += missing
            continue
        pending.pop()
        if current not in values:
            with torch.no_grad():
                values[current] = result_of(current, values.__getitem__)
    return values[node]


def result_of(call: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """What a call of a function or a method returns, if `value_of` says what it reads."""
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), value_of)
    if call.op == "call_method":
        return getattr(args[0], str(call.target))(*args[1:], **kwargs)
    assert callable(call.target)
    return call.target(*args, **kwargs)


def is_learned(node: fx.Node, root: nn.Module) -> bool:
    """Whether a value depends on a parameter of the model: not on its dtype, a choice, or buffers and other constants alone."""
    ancestors = ancestors_of(node, lambda one: not is_discrete(node_info(one).dtype))  # which learns nothing
    read = {node, *(one for reader in ancestors if reader.target is not getattr for one in reader.all_input_nodes)}
    return any(one.op == "get_attr" and isinstance(attribute_of(one, root), nn.Parameter) for one in read)


def leaves_of(value: Any) -> list[Any]:
    """The tensors, numbers and strings in a result, in order; a result may nest tuples, lists, dicts and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, item.name) for item in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [] if value is None else [value]


def floating_tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a result, in order."""
    return [leaf for leaf in leaves_of(value) if is_floating(leaf)]


def map_result(value: Any, change: Any) -> Any:
    """A model's result with changed tensors; a dataclass keeps its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(
            **{field.name: map_result(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        )
    return map_arguments(value, change)


def function_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls, without the overload of an ATen operator."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0]


def is_call_of(value: Any, row: str) -> TypeGuard[fx.Node]:
    """Whether a value is the result of a call of the operator that has the name `row` in the table."""
    operator = node_info(value).operator if isinstance(value, fx.Node) and value.op == "call_function" else None
    return operator is not None and operator.name == row


def sources_of_dimensions(view: fx.Node, rank: int) -> list[int | None] | None:
    """For each of the `rank` dimensions of a view, the same dimension of its argument, None if it is new; None if unknown."""
    row = node_info(view).operator
    given: list[Any] = [*view.args[1:], *view.kwargs.values()]
    dims = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if row is None or row.dimensions.dimension_before is None or (row.dimensions.squeezes and not dims):
        return None
    before = row.dimensions.dimension_before
    return [before(place, dims, rank) for place in range(rank)] if _are_numbers(dims) else None


def _are_numbers(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, (tuple, list)) and all(map(_are_numbers, value)))


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` that compute something, in execution order."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            yield node


def data_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` that relevance flows through, in execution order."""
    return (node for node in calls(graph) if node_info(node).role is Role.DATA)


def calls_before_output(graph: fx.Graph) -> list[fx.Node]:
    """The data calls that the output reads directly or through others of them, and not as masks or indices only."""
    found: dict[fx.Node, None] = {}
    for node in reversed(list(data_calls(graph))):
        if any(user.op == "output" or user in found for user in node.users):
            found[node] = None
    return list(reversed(found))


def bottlenecks(graph: fx.Graph, inputs: Collection[str] | None = None) -> Iterator[fx.Node]:
    """The nodes of `graph` that all relevance flows through, in execution order: none is read both before and after.

    `inputs`: the names of those whose relevance is meant, which count as values that are read; by default no input counts.
    """
    reached: set[fx.Node] = set()
    unread: dict[fx.Node, int] = {}  # values so far -> how many calls have yet to read them
    for node in graph.nodes:
        is_input, role = node.op == "placeholder", node_info(node).role
        if role not in (Role.DATA, Role.DISCRETE) or node.op in ("get_attr", "output") or (is_input and inputs is None):
            continue
        if inputs is not None and not (str(node.target) in inputs if is_input else reached.intersection(node.all_input_nodes)):
            continue
        reached.add(node)
        if role is Role.DISCRETE:  # an index that an embedding may read
            continue
        for read in node.all_input_nodes:
            if read in unread:
                unread[read] -= 1
                if not unread[read]:
                    del unread[read]
        users = sum(user.op == "output" or node_info(user).role is Role.DATA for user in node.users)
        if users or not is_input:
            unread[node] = users
        if len(unread) == 1 and not is_input:
            yield node


def ancestors_of(node: fx.Node, along: Callable[[fx.Node], bool] = lambda one: True) -> set[fx.Node]:
    """The node and all nodes that it depends on, by way of nodes for which `along` holds."""
    found, pending = {node}, [node]
    while pending:
        for read in pending.pop().all_input_nodes:
            if read not in found and along(read):
                found.add(read)
                pending.append(read)
    return found


def identities(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for each input, the output, and each call that relevance flows through: none is that of another, or of a module.

    A call has its qualified name, and an end that of its argument, or "output". Where a call or a module has this name as well,
    the end is told apart by its kind: "features (input)".
    """
    found = {node: node_info(node).name for node in data_calls(graph)}
    paths = [name.split(".") for name in found.values()]
    taken = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            kind = "output" if node.op == "output" else "input"
            name = kind if node.op == "output" else node_info(node).name
            while name in taken:
                name = f"{name} ({kind})"
            taken.add(name)
            found[node] = name
    return found


def nodes_by_name(graph: fx.Graph) -> dict[str, fx.Node]:
    """All nodes but the output by their qualified names: also parameters, and values for a reference."""
    return {node_info(node).name: node for node in graph.nodes if node.op != "output"}


def named_nodes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """Inputs and data-carrying calls with their qualified names."""
    for node in graph.nodes:
        if node.op == "placeholder" or node.op.startswith("call"):
            info = node_info(node)
            builds = isinstance(node.target, type)  # the model's output from its parts
            if (info.role is Role.DATA and not builds) or node.op == "placeholder":
                yield info.name, node
