"""Replace every node that has a rule by a call of a rule module. The pass reads metadata and never sees the composite."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import NodeInfo, Role, data_calls, has_info, node_info, set_info, update_info
from lrpfx.layers.layer import FunctionalModule, Layer, Operation, layer_of_node
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import REWRITTEN, SUPPORTED, VALIDATED
from lrpfx.rules.modifiers import ParamMod
from lrpfx.rules.rule import Rule
from lrpfx.runtime.explain_module import ParameterModifier, RuleModule
from lrpfx.runtime.module_tree import ModuleTree, free_name
from lrpfx.runtime.ruled_operation import Switch, ruled_operation


class Rewrite(GraphPass):
    """Place a rule module under the name of each node that has a rule.

    A tree that holds only rule modules and the model's tensors replaces the model. The arithmetic of lrpfx's own modifiers of
    parameters runs in the backward pass, since it is cheap beside the layer and would hold a second set of weights. A user's
    function, and all modifiers if relevance must be differentiable, become nodes before the call.
    """

    name = "rewrite"
    stage = "rewrite"
    requires = (VALIDATED, SUPPORTED)
    ensures = (REWRITTEN,)

    def __init__(self, differentiable: bool = False) -> None:
        """`differentiable`: make rules that can be switched off together, for derivatives of relevance. This costs memory."""
        self.switch = Switch() if differentiable else None
        self.unfinished = not differentiable  # FOLD computes the parameters of branches

    def run(self, program: Program) -> PassResult:
        ruled = [node for node in data_calls(program.graph) if node_info(node).rule is not None]
        layers = [layer_of_node(node, program.root) for node in ruled]
        tree = ModuleTree(program.root)
        for node, layer in zip(ruled, layers, strict=True):
            _RewrittenCall(program.graph, tree, node, layer).rewrite(self.switch)
        for node in program.graph.nodes:
            if node.op == "call_module" and node_info(node).keeps_gradient:  # an opaque module that keeps its gradient
                node.target = tree.place(node_info(node).name, program.root.get_submodule(str(node.target)))
            node.meta.pop("nn_module_stack", None)  # it holds the user's classes; unpickling must not require them
        program.root = tree.root
        return PassResult(len(ruled))


class _RewrittenCall:
    """A call that becomes a call of a rule module."""

    def __init__(self, graph: fx.Graph, tree: ModuleTree, node: fx.Node, layer: Layer) -> None:
        self.graph = graph
        self.tree = tree
        self.node = node
        self.layer = layer
        self.info = node_info(node)
        self.modified: dict[Any, fx.Node] = {}  # (modifier, parameter's name) -> the modified parameter

    def rewrite(self, switch: Switch | None) -> None:
        rule: Rule = self.info.rule
        layer = copy.copy(self.layer)
        layer.operation = _without_tensors(layer.operation)
        layer.parameters = {name: self._as_node(layer.parameters[name]) for name in layer.operation.parameters}
        layer.extras = tuple(map(self._as_node, layer.extras))
        modifiers = rule.parameter_modifiers
        branches = None
        if switch is not None or not all(one.arithmetic for one in modifiers) or not self._changes(modifiers):
            branches = [[self._modify(one, name, node) for name, node in layer.parameters.items()] for one in modifiers]
        ruled, values = ruled_operation(
            layer, rule, self._alias, branches, switch=switch, name=self.info.name, form=self.info.form
        )
        self.node.target = self.tree.place(self.info.name, RuleModule(ruled, self.info.description, self.info.merged))
        self.node.op = "call_module"
        self.node.args = tuple(values)
        self.node.kwargs = {}
        update_info(self.node, rule=repr(rule))

    def _changes(self, modifiers: Sequence[ParamMod]) -> bool:
        """Whether a modified copy has other parameters than the layer's own and zeros.

        Such arithmetic is cheap beside the layer: the backward pass does it, which halves the memory for weights.
        """
        names = self.layer.parameters
        return any(not (one.keeps(name) or one.zeroes(name)) for one in modifiers for name in names)

    def _modify(self, modifier: ParamMod, name: str, parameter: fx.Node) -> fx.Node | None:
        """The node of a modified parameter; None for a zero parameter that the operator allows to omit."""
        if modifier.keeps(name):
            return parameter
        operator = self.layer.operation.operator
        zero = modifier.zeroes(name)
        if zero and operator is not None and operator.arguments[name] is None:
            return None
        key = (modifier.key, name)
        if key not in self.modified:
            place = free_name(self.tree.root, f"{self.info.name}.{name}_{modifier.label}")
            info = NodeInfo(place, source=self.info.source, role=node_info(parameter).role)
            if zero:
                node = insert_call(self.graph, self.node, torch.zeros_like, (parameter,), info)
            elif modifier.arithmetic:
                node = _trace_arithmetic(self.graph, self.node, modifier, name, parameter, info)
            else:
                target = self.tree.place(f"{place}_by", ParameterModifier(modifier.modifier, name))
                with self.graph.inserting_before(self.node):
                    node = self.graph.create_node("call_module", target, (parameter,), {})
                set_info(node, info)
            self.modified[key] = node
        return self.modified[key]

    def _alias(self, value: fx.Node) -> fx.Node:
        """A second node for an operand that occurs twice."""
        name = f"{self.info.name}.alias"
        alias = NodeInfo(name, source=self.info.source, operator=operator_named("view"), description="view_as")
        alias = replace(alias, carries_multiplier=self.info.carries_multiplier)
        return insert_call(self.graph, self.node, torch.Tensor.view_as, (value, value), alias)

    def _as_node(self, value: fx.Node | str) -> fx.Node:
        """The node of a parameter, which may be given by name."""
        if isinstance(value, fx.Node):
            return value
        with self.graph.inserting_before(self.node):
            node = self.graph.create_node("get_attr", value)
        set_info(node, NodeInfo(value, source=self.info.source, role=Role.PARAMETER))
        return node


def _trace_arithmetic(
    graph: fx.Graph, before: fx.Node, modifier: ParamMod, name: str, parameter: fx.Node, info: NodeInfo
) -> fx.Node:
    """Insert the modifier's arithmetic as nodes before the node `before`. Return the last one."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    with graph.inserting_before(before):
        result = modifier.apply(fx.Proxy(parameter, tracer), name)  # type: ignore[arg-type]
    assert isinstance(result, fx.Proxy)
    node: fx.Node = result.node
    made = before.prev
    while not has_info(made):
        set_info(made, NodeInfo(info.name if made is node else made.name, source=info.source, role=info.role))
        made = made.prev
    return node


def _without_tensors(operation: Operation) -> Operation:
    """The operation. If it calls a module as a whole, the module is replaced by a copy that holds no memory."""
    function = operation.function
    if not isinstance(function, FunctionalModule):
        return operation
    operation = copy.copy(operation)
    operation.function = FunctionalModule(copy.deepcopy(function.module).to("meta"), function.tensors)
    return operation
