"""Graphs without modules where multipliers flow: the plain operations, whose derivatives torch knows.

A module costs as much as a small operation. Nobody sees the difference unless the module has hooks or was replaced.
"""

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from lrpfx.ir.node import Role, node_info, set_info
from lrpfx.runtime.compiled_graph import copy_graph
from lrpfx.runtime.explain_module import RuleModule, TreeGraphModule, rule_module_of
from lrpfx.runtime.multipliers import with_shares
from lrpfx.runtime.propagation import constant


class Called:
    """The modules with rules that a graph calls, with their places in the tree."""

    def __init__(self, module: TreeGraphModule) -> None:
        self.modules: list[RuleModule] = []
        self.tables: list[dict[str, Any]] = []  # that hold the modules, under their names
        self.names: list[str] = []
        for node in module.graph.find_nodes(op="call_module"):
            layer = rule_module_of(node, module)
            if layer is not None:
                path, _, name = str(node.target).rpartition(".")
                self.modules.append(layer)
                self.tables.append(module.get_submodule(path)._modules)
                self.names.append(name)
        self.attributes = [vars(layer) for layer in self.modules]
        self.hooks = [
            hooks
            for layer in self.modules
            for hooks in (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        ]

    @property
    def are_observed(self) -> bool:
        """Whether any of them has hooks or another forward, or another module stands in its place. Asked before each run."""
        if any(self.hooks) or list(map(dict.get, self.tables, self.names)) != self.modules:
            return True
        return any("forward" in attributes for attributes in self.attributes)


def with_plain_calls(module: TreeGraphModule) -> TreeGraphModule:
    """A module on the same tensors that calls plain operations where it can; the same one if there are none."""
    graph = copy_graph(module.graph)
    constants: dict[fx.Node, fx.Node] = {}  # detached values
    layers = [(node, rule_module_of(node, module)) for node in graph.find_nodes(op="call_module")]
    replaced = False
    if any(layer is not None and layer.ruled.form is not None and layer.ruled.form.needs_reference for _, layer in layers):
        for node in graph.find_nodes(op="get_attr"):
            replaced |= _hold_for_reference(graph, node, constants)
    for node, layer in layers:
        replaced |= layer is not None and _replace(graph, node, layer, constants)
    return TreeGraphModule(module, graph, module.title) if replaced else module


def _replace(graph: fx.Graph, node: fx.Node, layer: RuleModule, constants: dict[fx.Node, fx.Node]) -> bool:
    """Replace a call of a module by its operation; False if the module does more than that."""
    ruled = layer.ruled
    count = ruled.operation.inputs
    shares = None if ruled.form is None else ruled.form.plain_shares(count)
    if shares is None or not all(_is_signal(value) for value in node.args[:count]):
        return False
    values = ruled.arranged(node.args)
    with graph.inserting_before(node):
        inputs = _shared(graph, shares, values[:count])
        others = [_constant(graph, value, constants) for value in values[count:]]
        args, kwargs = ruled.operation.filled([*inputs, *others])
        made = graph.call_function(ruled.operation.function, args, kwargs)
    set_info(made, node_info(node))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _hold_for_reference(graph: fx.Graph, parameter: fx.Node, constants: dict[fx.Node, fx.Node]) -> bool:
    """Let calls whose values are constant, as all for a reference are, read a detached parameter: autograd saves nothing."""
    readers = [user for user in parameter.users if user.op != "output" and node_info(user).role is Role.CONSTANT]
    if readers:
        with graph.inserting_after(parameter):
            held = _constant(graph, parameter, constants)
        for reader in readers:
            reader.replace_input_with(parameter, held)
    return bool(readers)


def _is_signal(value: Any) -> bool:
    """Whether a data input is known to be a signal, which modules check in each call."""
    dtype = node_info(value).dtype if isinstance(value, fx.Node) else None
    return dtype is not None and dtype.is_floating_point


def _shared(graph: fx.Graph, shares: Sequence[float], values: Sequence[Any]) -> Sequence[Any]:
    if all(share == 1.0 for share in shares):
        return values
    changed = graph.call_function(with_shares, (tuple(shares), *values))
    return [graph.call_function(operator.getitem, (changed, place)) for place in range(len(values))]


def _constant(graph: fx.Graph, value: Any, constants: dict[fx.Node, fx.Node]) -> Any:
    """A value that gets no gradient. Each parameter is detached once."""
    if not isinstance(value, fx.Node) or node_info(value).role is Role.METADATA:
        return value
    if value not in constants:
        constants[value] = graph.call_function(constant, (value,))
    return constants[value]
