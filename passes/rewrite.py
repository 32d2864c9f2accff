"""REWRITE: every node with a rule becomes a call of a rule module. Reads the metadata and knows no composite."""

import copy
from typing import Any

import torch
from torch import fx, nn

from lrpfx.explain_module import ParameterModifier, RuleModule, Scope, scope_tree
from lrpfx.hooks import Hook
from lrpfx.layer_view import FunctionalModule, Layer, layer_of_node
from lrpfx.modifiers import ParamMod
from lrpfx.node import NodeInfo, Role, data_calls, has_info, node_info, set_info, update_info
from lrpfx.operators import REQUIRED
from lrpfx.propagation import RuledOperation

from .program import Pass, PassResult, Program, insert_call


class Rewrite(Pass):
    """Put a rule module at the name of each node with a rule, and replace the model by a tree that only holds its tensors.

    The parameters of a rule's branches are arithmetic on the layer's parameters, in front of the call.
    """

    name = "rewrite"
    stage = "rewrite"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        ruled = [node for node in data_calls(program.graph) if node_info(node).rule is not None]
        layers = [layer_of_node(node, program.root) for node in ruled]
        tree = _Tree(program.root)
        for node, layer in zip(ruled, layers, strict=True):
            self._rewrite(program.graph, tree, node, layer)
            result.matches += 1
        program.root = tree.root
        for node in program.graph.nodes:
            node.meta.pop("nn_module_stack", None)  # holds the user's classes, which a pickle must not need
        return result

    def _rewrite(self, graph: fx.Graph, tree: "_Tree", node: fx.Node, layer: Layer) -> None:
        info = node_info(node)
        rule: Hook = info.rule
        operation = layer.operation
        function = operation.function
        if isinstance(function, FunctionalModule):
            operation = copy.copy(operation)
            operation.function = _without_tensors(function)
        parameters = {name: _as_node(graph, node, value, info) for name, value in layer.parameters.items() if value is not None}
        inputs = _distinct(graph, node, layer.inputs, info)
        values: list[fx.Node] = [*inputs]
        index_of: dict[fx.Node, int] = {}

        def index(value: fx.Node) -> int:
            if value not in index_of:
                index_of[value] = len(values)
                values.append(value)
            return index_of[value]

        own = tuple(index(parameters[name]) for name in operation.parameters)
        branches = []
        modified: dict[Any, fx.Node] = {}
        for modifier in rule.parameter_modifiers:
            branch: list[int | None] = []
            for name in operation.parameters:
                value = self._modify(graph, tree, node, modifier, name, parameters[name], modified, layer)
                branch.append(None if value is None else index(value))
            branches.append(tuple(branch))
        first_extra = len(values)
        values += [_as_node(graph, node, extra, info) for extra in layer.extras]
        ruled = RuledOperation(rule, operation, own, tuple(branches), first_extra)
        target = tree.place(info.name, RuleModule(ruled, info.description, info.merged))
        node.op = "call_module"
        node.target = target
        node.args = tuple(values)
        node.kwargs = {}
        update_info(node, rule=repr(rule))

    def _modify(
        self,
        graph: fx.Graph,
        tree: "_Tree",
        node: fx.Node,
        modifier: ParamMod,
        name: str,
        parameter: fx.Node,
        modified: dict[Any, fx.Node],
        layer: Layer,
    ) -> fx.Node | None:
        """The node of a modified parameter; None for a zero that the operator lets one leave out."""
        if modifier.keeps(name):
            return parameter
        operator = layer.operation.operator
        zero = modifier.selects(name) and modifier.zeroes(name)
        if zero and operator is not None and operator.arguments.get(name, REQUIRED) is None:
            return None
        key = (modifier.key, name)
        if key not in modified:
            info = NodeInfo(
                free_name(tree.root, f"{layer.name}.{name}_{modifier.label}"),
                source=node_info(node).source,
                role=Role.PARAMETER,
            )
            if zero:
                modified[key] = insert_call(graph, node, torch.zeros_like, (parameter,), {}, info)
            elif modifier.arithmetic:
                modified[key] = _trace_arithmetic(graph, node, modifier, name, parameter, info)
            else:
                target = tree.place(f"{info.name}_modifier", ParameterModifier(modifier.modifier, name))
                with graph.inserting_before(node):
                    modified[key] = graph.create_node("call_module", target, (parameter,), {})
                set_info(modified[key], info)
        return modified[key]


def _trace_arithmetic(
    graph: fx.Graph, before: fx.Node, modifier: ParamMod, name: str, parameter: fx.Node, info: NodeInfo
) -> fx.Node:
    """The modifier's arithmetic as nodes in front of `before`; the last one is returned."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    with graph.inserting_before(before):
        result = modifier.apply(fx.Proxy(parameter, tracer), name)  # type: ignore[arg-type]
    assert isinstance(result, fx.Proxy)
    node: fx.Node = result.node
    made = before.prev
    while not has_info(made):
        set_info(made, NodeInfo(info.name if made is node else made.name, source=info.source, role=Role.PARAMETER))
        made = made.prev
    return node


def _distinct(graph: fx.Graph, node: fx.Node, inputs: tuple[Any, ...], info: NodeInfo) -> list[fx.Node]:
    """The inputs, with an alias for one that comes a second time: `x + x` has two operands."""
    result: list[fx.Node] = []
    for value in inputs:
        if value in result:
            alias = NodeInfo(f"{info.name}.alias", source=info.source, operator="view", kind="Neutral", description="view_as")
            value = insert_call(graph, node, torch.Tensor.view_as, (value, value), {}, alias)
        result.append(value)
    return result


def _as_node(graph: fx.Graph, before: fx.Node, value: Any, info: NodeInfo) -> fx.Node:
    """A node for a parameter that is given by its name."""
    if isinstance(value, fx.Node):
        return value
    with graph.inserting_before(before):
        node = graph.create_node("get_attr", value)
    set_info(node, NodeInfo(value, source=info.source, role=Role.PARAMETER))
    return node


def _without_tensors(function: FunctionalModule) -> FunctionalModule:
    """The function on a copy of its module that holds no memory."""
    return FunctionalModule(copy.deepcopy(function.module).to("meta"), function.tensors)


def free_name(tree: nn.Module, name: str) -> str:
    """`name`, or `name_` with as many underscores as make it free in the tree."""
    path, _, leaf = name.rpartition(".")
    try:
        parent = tree.get_submodule(path)
    except AttributeError:
        return name
    while hasattr(parent, leaf):
        leaf += "_"
    return f"{path}.{leaf}" if path else leaf


class _Tree:
    """The tree of scopes that takes the place of the model, with room for new modules in it."""

    def __init__(self, model: nn.Module) -> None:
        self.root = scope_tree(model)
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in self.root.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self.places.setdefault(child, []).append((parent, name))

    def place(self, name: str, module: nn.Module) -> str:
        """Put `module` at `name`, creating scopes on the way; the name under which it now stands.

        A scope that stands there hands its tensors and children over, in all its places: it was the layer itself.
        """
        *path, leaf = name.split(".")
        parent: nn.Module = self.root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, Scope("Scope"))
            child = parent._modules[part]
            assert child is not None
            parent = child
        standing = parent._modules.get(leaf)
        if type(standing) is Scope:
            for member in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                getattr(module, member).update(getattr(standing, member))
            for holder, key in self.places.get(standing, [(parent, leaf)]):
                holder._modules[key] = module
            return name
        if hasattr(parent, leaf):  # a method of nn.Module, or a tensor
            leaf = free_name(parent, leaf)
            name = ".".join([*path, leaf])
        parent.add_module(leaf, module)
        return name
