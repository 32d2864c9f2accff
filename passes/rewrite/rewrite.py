"""Replace every node that has a rule by a call of a rule module. The pass reads metadata and never sees the composite."""

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from lrpfx.errors import RuleError
from lrpfx.ir.node import (
    NodeInfo,
    Role,
    ancestors_of,
    attribute_of,
    data_calls,
    has_info,
    is_data,
    map_arguments,
    node_info,
    nodes_by_name,
    nodes_in,
    set_info,
    update_info,
)
from lrpfx.operators.layer import FunctionalModule, Layer, Operation, Slot
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import REWRITTEN, SUPPORTED, VALIDATED
from lrpfx.passes.rewrite.pair_with_reference import takes_differences
from lrpfx.rules.modifiers import ParamMod
from lrpfx.rules.rule import Rule
from lrpfx.runtime.differences import BySigns
from lrpfx.runtime.explain_module import ParameterModifier, RuleModule
from lrpfx.runtime.live_derivatives import LiveParameter
from lrpfx.runtime.multipliers import MultiplierForm
from lrpfx.runtime.ruled_operation import Switch, ruled_operation
from lrpfx.support.module_tree import ModuleTree, free_name


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
        if self.switch is not None and takes_differences(program):
            raise RuleError(
                f"relevance of {program.title} is that of differences from a reference, of which derivatives are not known: "
                "transform(..., fold=False) is for other composites",
                topic="derivative-of-relevance",
            )
        ruled = [node for node in data_calls(program.graph) if node_info(node).rule is not None]
        layers = {node: program.layer(node) for node in ruled}
        tree = ModuleTree(program.root)
        by_name = nodes_by_name(program.graph)
        for node, layer in layers.items():
            if isinstance(node_info(node).form, BySigns):
                layer, form = _with_terms(layer, layers[layer.inputs[0]])
                update_info(node, form=form)
            _RewrittenCall(program.graph, tree, node, layer, by_name).rewrite(self.switch)
        if self.switch is not None:
            _hold_operands(program.graph, tree, self.switch)
        for node in program.graph.nodes:
            if node.op == "call_module" and node_info(node).keeps_gradient:  # an opaque module that keeps its gradient
                node.target = tree.place(node_info(node).name, program.root.get_submodule(str(node.target)))
            node.meta.pop("nn_module_stack", None)  # it holds the user's classes; unpickling must not require them
        program.root = tree.root
        return PassResult(len(ruled))


class _RewrittenCall:
    """A call that becomes a call of a rule module."""

    def __init__(self, graph: fx.Graph, tree: ModuleTree, node: fx.Node, layer: Layer, by_name: Mapping[str, fx.Node]) -> None:
        self.graph = graph
        self.by_name = by_name
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
        layer.extras = (*map(self._as_node, layer.extras), *self._references())
        modifiers = rule.parameter_modifiers
        branches = None
        if switch is not None or not all(one.arithmetic for one in modifiers) or not self._changes(modifiers):
            branches = [[self._modify(one, name, node) for name, node in layer.parameters.items()] for one in modifiers]
        ruled, values = ruled_operation(
            layer, rule, self._alias, branches, switch=switch, name=self.info.name, form=self.info.form
        )
        if switch is not None:
            ruled = replace(ruled, live=tuple(range(ruled.operation.inputs, ruled.first_extra)))
        self.node.target = self.tree.place(self.info.name, RuleModule(ruled, self.info.description, self.info.merged))
        self.node.op = "call_module"
        self.node.args = tuple(values)
        self.node.kwargs = {}
        update_info(self.node, rule=rule)

    def _references(self) -> list[Any]:
        """The values of the inputs for the reference, if the rule takes differences from one, and that of the output."""
        form = self.info.form
        if form is None or not form.needs_reference:
            return []
        found = [self._reference(value) for value in self.layer.inputs]
        for place, value in enumerate(found):
            if isinstance(value, fx.Node) and value in found[:place]:  # torch.compile refuses duplicates
                row, name = operator_named("view"), f"{self.info.name}.reference_{place}"
                info = replace(node_info(value), name=name, operator=row, description="view_as")
                found[place] = insert_call(self.graph, self.node, torch.Tensor.view_as, (value, value), info)
        return [*found, *self._results_for_reference(form)] if form.reference_results else found

    def _results_for_reference(self, form: MultiplierForm) -> list[fx.Node]:
        """The output for the reference, and the further results that the form reads."""
        output = self._reference(self.node)
        if form.reference_results == 1:
            return [output]
        info = node_info(output)
        function: Any = output.target
        function, options = form.for_reference(function, output.kwargs)
        of_results = replace(info, name=f"{info.name}.results")
        results = insert_call(self.graph, output, function, output.args, of_results, dict(options))
        output.target, output.args, output.kwargs = operator.getitem, (results, 0), {}
        info = replace(info, operator=operator_named("getitem"), description="getitem")
        set_info(output, info)
        further = [
            insert_call(self.graph, self.node, output.target, (results, place), replace(info, name=f"{info.name}.{place}"))
            for place in range(1, form.reference_results)
        ]
        return [output, *further]

    def _reference(self, value: Any) -> Any:
        name = node_info(value).reference if isinstance(value, fx.Node) else ""
        return self.by_name[name] if name else value  # a constant is its own

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
        alias = replace(alias, carries_multiplier=self.info.carries_multiplier, reference=node_info(value).reference)
        return insert_call(self.graph, self.node, torch.Tensor.view_as, (value, value), alias)

    def _as_node(self, value: fx.Node | str) -> fx.Node:
        """The node of a parameter, which may be given by name."""
        if isinstance(value, fx.Node):
            return value
        with self.graph.inserting_before(self.node):
            node = self.graph.create_node("get_attr", value)
        set_info(node, NodeInfo(value, source=self.info.source, role=Role.PARAMETER))
        return node


def _with_terms(layer: Layer, before: Layer) -> tuple[Layer, BySigns]:
    """A function of the output of the layer before it, which reads the terms of that output, too, and its form."""
    operation, linear = layer.operation, before.operation

    def moved(leaf: Any) -> Any:
        return Slot(leaf.index + 1) if isinstance(leaf, Slot) and leaf.index else leaf

    args, kwargs = map_arguments((operation.args, operation.kwargs), moved)
    found = copy.copy(layer)
    found.operation = Operation(operation.function, args, kwargs, 2, operation.parameters, operation.operator)
    found.inputs = (*layer.inputs, *before.inputs)
    found.extras = (*layer.extras, *(before.parameters[name] for name in linear.parameters), *before.extras)
    return found, BySigns(linear, 2 + len(operation.parameters) + len(layer.extras))


def _hold_operands(graph: fx.Graph, tree: ModuleTree, switch: Switch) -> None:
    """Refuse gradients of parameters that are operands, of a sum for example, while the rules are on.

    A call with a rule refuses those of its own parameters, such as a weight.
    """
    operands: set[fx.Node] = set()
    for node in data_calls(graph):
        module = tree.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        count = module.ruled.operation.inputs if isinstance(module, RuleModule) else None
        operands.update(one for one in nodes_in((node.args[:count], node.kwargs)) if not is_data(one))
    # Also parameters that a size of the input expands, but not those of layers before that size.
    sources = set().union(*(ancestors_of(one, along=lambda read: not is_data(read)) for one in operands))
    for node in graph.find_nodes(op="get_attr"):
        if node in sources and isinstance(attribute_of(node, tree.root), nn.Parameter):
            place = tree.place(free_name(tree.root, f"{node_info(node).name}_live"), LiveParameter(switch))
            with graph.inserting_after(node):
                held = graph.create_node("call_module", place, (node,), {})
            set_info(held, node_info(node))
            node.replace_all_uses_with(held, delete_user_cb=lambda user, held=held: user is not held)


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
