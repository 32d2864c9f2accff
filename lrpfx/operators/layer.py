"""Layers as rules and composites see them, made from nodes of a graph or from modules.

A `Layer` holds the description: kind, class, name, inputs and parameters. An `Operation` computes: it is a pure function of
tensors.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lrpfx.errors import RuleError
from lrpfx.ir import kinds
from lrpfx.ir.node import Role, is_data, map_arguments, node_info, nodes_in
from lrpfx.ir.operator import Operator
from lrpfx.operators.table import rows_of_class, spelling_of
from lrpfx.support.dotted_paths import dotted_path, resolve_path


@dataclass(frozen=True)
class Slot:
    """Placeholder for value number `index` in an operation's arguments."""

    index: int


class Operation:
    """A pure function of values: a callable with constant arguments, and slots for the values.

    The values are the data inputs, then the parameters, then all other values (buffers, sizes).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: int,
        parameters: tuple[str, ...],
        operator: Operator | None = None,
        row: Operator | None = None,
        kind: type[kinds.Kind] = kinds.Unknown,
    ) -> None:
        """`operator`: the row of the table, if the function and its arguments are in canonical form.

        `row`: the row whose facts hold, if `operator` is None. `kind`: the kind of an operation without a row.
        """
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.parameters = parameters
        self.operator = operator
        self.row = operator or row
        self.kind = kind if self.row is None else self.row.kind
        self.nested = any(isinstance(argument, (tuple, list, dict, slice)) for argument in (*args, *kwargs.values()))
        self.in_order = args == tuple(Slot(index) for index in range(len(args))) and not _slots_in(kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["function"] = dotted_path(self.function) or self.function
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        function = state["function"]
        self.__dict__.update(state)
        self.function = resolve_path(function) if isinstance(function, str) else function

    def filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the function for the values of a call."""

        def fill(argument: Any) -> Any:
            return values[argument.index] if isinstance(argument, Slot) else argument

        if not self.nested:  # without recursion
            return tuple(map(fill, self.args)), {name: fill(argument) for name, argument in self.kwargs.items()}
        args, kwargs = map_arguments((self.args, self.kwargs), fill)
        return args, kwargs

    def __call__(self, values: Sequence[Any]) -> Any:
        if self.in_order:  # a short cut: the cost of a call counts for small layers
            return self.function(*values[: len(self.args)], **self.kwargs)
        args, kwargs = self.filled(values)
        return self.function(*args, **kwargs)

    @property
    def has_adjoint(self) -> bool:
        """Whether the gradients of the data have a formula: mostly the transposed map of an operation that is linear."""
        return self.operator is not None and self.operator.linear.adjoint is not None

    def adjoint(self, gradient: torch.Tensor, values: Sequence[Any]) -> tuple[torch.Tensor | None, ...] | None:
        """The gradients of the data inputs, from that of the result; None where there is no formula."""
        operator = self.operator
        if operator is None or operator.linear.adjoint is None:
            return None
        return operator.linear.adjoint(gradient, values[: self.inputs], self.arguments(values))

    def arguments(self, values: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the operator by name, defaults included."""
        args, kwargs = self.filled(values)
        names = self.listed.arguments
        return {**names, **_named(names, args), **kwargs}

    @property
    def names_of_inputs(self) -> list[str]:
        """The names of the arguments that hold the inputs of a listed operation, in the order of the inputs."""
        given = {**_named(self.listed.arguments, self.args), **self.kwargs}
        found = {value.index: name for name, value in given.items() if isinstance(value, Slot) and value.index < self.inputs}
        return [found[place] for place in sorted(found)]

    @property
    def listed(self) -> Operator:
        """The row that the function and its arguments spell. `RuleError` where there is none."""
        if self.operator is None:
            raise RuleError("the operator table does not list the layer's operation")
        return self.operator


class Layer:
    """One call of an operation as rules and composites see it, or a module before any call.

    `isinstance(layer, X)` works with the kinds of `lrpfx.types` and with the torch.nn class that corresponds to the call. Maps
    written for modules therefore work on graphs: the call `F.relu(x)` is a `torch.nn.ReLU` and an `Activation`.
    """

    def __init__(
        self,
        name: str,
        operation: Operation,
        inputs: Sequence[Any] | None,
        parameters: dict[str, Any],
        extras: Sequence[Any] = (),
        module: nn.Module | None = None,
        module_path: str | None = None,
        description: str = "",
    ) -> None:
        """`inputs`: None for a module whose number of inputs is unknown before it is called."""
        self.name = name
        self.operation = operation
        self.inputs = tuple(inputs or ())
        self.input_count = None if inputs is None else len(inputs)
        self.parameters = parameters
        self.extras = tuple(extras)
        self.module = module
        self.module_path = module_path
        self.description = description

    @property
    def kind(self) -> type[kinds.Kind]:
        """The kind of the layer."""
        return self.operation.kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class for `isinstance`: the module class that corresponds to the layer, otherwise its kind."""
        operator = self.operation.operator
        if self.module is not None and (operator is None or isinstance(self.module, operator.spellings.modules)):
            return type(self.module)
        if operator is not None and len(operator.spellings.modules) == 1:
            return operator.spellings.modules[0]
        return self.kind if operator is None or operator.spellings.counts_as is None else operator.spellings.counts_as

    def __repr__(self) -> str:
        return f"<layer {self.name}: {self.description}>"


class FunctionalModule:
    """A module as a pure function of its inputs, parameters and buffers.

    A call gets the tensors by name and never reads the module's own. After the rewrite, these are on the meta device.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[str]) -> None:
        self.module = module
        self.tensors = tuple(tensors)

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any], values: tuple[Any, ...]) -> Any:
        state = dict(zip(self.tensors, values, strict=True))
        try:
            return torch.func.functional_call(self.module, state, inputs, keywords)
        except RuntimeError as error:
            if "functorch transform" in str(error) and "setup_context" not in str(error):  # `vjp` knows of the latter
                raise RuleError(
                    f"{type(self.module).__name__} differentiates by torch.autograd in its forward, which allows no derivative "
                    "of the module itself; use torch.func.grad there"
                ) from error
            raise


def _named(names: Mapping[str, Any], args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by name. Before torch 2.13, torch.compile does not know how to stop at the end of the shorter."""
    return dict(zip(list(names)[: len(args)], args[: len(names)], strict=True))


def _slots_in(arguments: Any) -> list[Slot]:
    """The slots in nested arguments."""
    found: list[Slot] = []
    map_arguments(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, Slot) else None)
    return found


def _with_slots(arguments: Any, slots: dict[fx.Node, int]) -> Any:
    """`arguments` with a slot for each node."""
    return map_arguments(arguments, lambda leaf: Slot(slots[leaf]) if isinstance(leaf, fx.Node) else leaf)


def bound_arguments(node: fx.Node, operator: Operator) -> dict[str, Any]:
    """The arguments of a normalized call by name, without omitted ones."""
    return {**_named(operator.arguments, node.args), **node.kwargs}


def carries_relevance(argument: Any) -> bool:
    """Whether an argument is a node that can receive relevance: data, or a parameter that takes a share.

    An embedding of positions is like a parameter, of which it is a part.
    """
    if not isinstance(argument, fx.Node):
        return False
    role = node_info(argument).role
    return role in (Role.DATA, Role.PARAMETER) or (role is Role.METADATA and _is_embedding(argument))


def _is_embedding(node: fx.Node) -> bool:
    """Whether a value is looked up by integers, also through views and casts."""
    while (spelling := spelling_of(node)) is not None:
        row = spelling.operator
        if issubclass(row.kind, kinds.Embedding):
            return True
        if not (row.entries.moves or row.entries.converts or row.memory.view) or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return False


def layer_of_node(node: fx.Node, root: nn.Module) -> Layer:
    """The layer of `node` in a normalized graph over the modules of `root`."""
    info = node_info(node)
    operator = info.operator
    if node.op == "call_module":
        return _opaque_layer(node, root)
    parameters: dict[str, Any] = {}
    by_name = operator is not None and bool(operator.arguments)
    if operator is not None and by_name:
        bound = bound_arguments(node, operator)
        takes_share = carries_relevance if operator.shares_with_constants else is_data
        inputs = [bound[name] for name in operator.data if takes_share(bound.get(name))]
        data = operator.data
        if info.rule is not None and info.rule.reads_controls:
            inputs += [bound[name] for name in operator.controls if is_data(bound.get(name))]
            data += operator.controls
        parameters = {name: bound.get(name) for name in operator.parameters}
    else:
        inputs = [argument for argument in nodes_in((node.args, node.kwargs)) if node_info(argument).role is Role.DATA]
    present = [value for value in parameters.values() if isinstance(value, fx.Node)]
    extras = [n for n in node.all_input_nodes if n not in inputs and n not in present]
    slots: dict[fx.Node, int] = {}
    for index, value in enumerate([*inputs, *present, *extras]):
        slots.setdefault(value, index)
    args, kwargs = _with_slots((node.args, node.kwargs), slots)
    if len(set(inputs)) < len(inputs):  # x + x: one node gives two data inputs
        numbers = itertools.count()

        def numbered(leaf: Any) -> Any:
            return Slot(next(numbers)) if isinstance(leaf, Slot) and leaf.index < len(inputs) else leaf

        if operator is not None and by_name:
            args = [numbered(value) if name in data else value for name, value in _named(operator.arguments, args).items()]
        else:
            args, kwargs = map_arguments((args, kwargs), numbered)
    assert callable(node.target)
    operation = Operation(
        node.target,
        tuple(args),
        dict(kwargs),
        len(inputs),
        tuple(name for name, value in parameters.items() if isinstance(value, fx.Node)),
        operator,
    )
    module = None if info.module_path is None else root.get_submodule(info.module_path)
    return Layer(info.name, operation, inputs, parameters, extras, module, info.module_path, info.description)


def rows_of(module: nn.Module) -> tuple[Operator, ...]:
    """The rows of the table that list a module's class."""
    return rows_of_class(type(module))  # type: ignore[arg-type]  # classes can be hashed


def spelled_rows(module: nn.Module, forward: Any) -> tuple[Operator, ...]:
    """The rows that describe `forward` of a module; none if a subclass or the instance overrides it."""
    return tuple(
        row for row in rows_of(module) if any(getattr(cls, "forward", None) is forward for cls in row.spellings.modules)
    )


def kind_of(module: nn.Module) -> type[kinds.Kind]:
    """The kind of a module by its class."""
    rows = rows_of(module)
    return rows[0].kind if rows else kinds.Opaque


def layer_of_module(module: nn.Module) -> Layer:
    """The layer of a module before it is called. At most the number of its inputs is known."""
    rows = () if "forward" in vars(module) else spelled_rows(module, type(module).forward)
    counts = {len(row.data) for row in rows}
    parameters = own_tensors(module)
    parameters.update((name, getattr(module, name, None)) for row in rows for name in row.parameters)
    operator = rows[0] if len(counts) == 1 else None
    operation = Operation(module, (), {}, 0, tuple(parameters), operator, kind=kind_of(module))
    inputs = [None] * counts.pop() if operator is not None else None
    return Layer(type(module).__name__, operation, inputs, parameters, module=module, description=repr(module))


def own_tensors(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, None for missing ones, and its tensors that are plain attributes."""
    attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {**module._parameters, **attributes}


def _opaque_layer(node: fx.Node, root: nn.Module) -> Layer:
    """The layer of a call of an opaque module. Its parameters and buffers are given by name."""
    info = node_info(node)
    assert isinstance(node.target, str)
    module = root.get_submodule(node.target)
    learned = [name for name, _ in module.named_parameters()]
    tensors = [*learned, *(name for name, _ in module.named_buffers())]
    inputs = [argument for argument in node.all_input_nodes if carries_relevance(argument)]
    others = [argument for argument in node.all_input_nodes if argument not in inputs]
    slots = {argument: index for index, argument in enumerate(inputs)}
    slots.update({argument: len(inputs) + len(tensors) + index for index, argument in enumerate(others)})
    values = tuple(Slot(len(inputs) + index) for index in range(len(tensors)))
    operation = Operation(
        FunctionalModule(module, tensors),
        (_with_slots(node.args, slots), _with_slots(node.kwargs, slots), values),
        {},
        len(inputs),
        tuple(learned),
        kind=kinds.Opaque,
    )
    paths = {name: f"{node.target}.{name}" for name in tensors}
    return Layer(
        info.name,
        operation,
        inputs,
        {name: paths[name] for name in learned},
        [*(paths[name] for name in tensors[len(learned) :]), *others],
        module,
        node.target,
        info.description,
    )
