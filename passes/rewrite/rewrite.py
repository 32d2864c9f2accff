"""REWRITE: every node with a rule becomes a call of a rule module. Reads the metadata and knows no composite."""

import copy
from dataclasses import replace
from typing import Any

import torch
from lrpfx.passes.program import Pass, PassResult, Program, insert_call
from lrpfx.passes.properties import REWRITTEN, SUPPORTED, VALIDATED
from torch import fx, nn

from lrpfx.ir.node import Facts, NodeInfo, Role, attribute_of, data_calls, has_info, node_info, set_info, update_info
from lrpfx.ir.operator import Sign
from lrpfx.layers.layer import FunctionalModule, Layer, Operation, layer_of_node
from lrpfx.operators.functions import without_gradient
from lrpfx.operators.table import operator_named
from lrpfx.rules.formulas import Pass as PassRule
from lrpfx.rules.modifiers import ParamMod
from lrpfx.rules.shortcuts import PositiveAndNegativeTotals, ShareOfSum, TotalOfOwnSign, shortcut_for
from lrpfx.rules.template import Hook
from lrpfx.runtime.explain_module import TABLES, ParameterModifier, RuleModule, Scope, scope_at, scope_tree
from lrpfx.runtime.propagation import ABSENT, Gate, RuledOperation
from lrpfx.types import ConvolutionStandard


class Rewrite(Pass):
    """Put a rule module at the name of each node with a rule, and replace the model by a tree that only holds its tensors.

    The parameters of a rule's branches are arithmetic on the layer's parameters, in front of the call.
    """

    name = "rewrite"
    stage = "rewrite"
    requires = (
        VALIDATED,
        SUPPORTED,
    )
    ensures = (REWRITTEN,)

    def __init__(self, differentiable: bool = False, optimize: bool = True) -> None:
        """`differentiable`: rules that can be switched off together, for derivatives of relevance. It costs memory.

        `optimize`: put shortcuts in the place of rules where there are any.
        """
        self.optimize = optimize
        self.gate = Gate() if differentiable else None
        self.unfinished = not differentiable  # FOLD computes the branches' parameters, once

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        ruled = [node for node in data_calls(program.graph) if node_info(node).rule is not None]
        layers = [layer_of_node(node, program.root) for node in ruled]
        tree = _Tree(program.root)
        for node, layer in zip(ruled, layers, strict=True):
            if self.optimize:
                update_info(node, rule=shortcut_for(node_info(node).rule, layer, _facts(node, layer)))
            _RewrittenCall(program.graph, tree, node, layer, self.gate).rewrite()
            result.matches += 1
        for node in program.graph.nodes:
            if node.op == "call_module" and node_info(node).keeps_gradient:  # a module as a whole that keeps its gradient
                node.target = tree.place(node_info(node).name, program.root.get_submodule(str(node.target)))
        program.root = tree.root
        _cut_declared_constants(program.graph)
        if self.optimize and self.gate is None:
            for node in data_calls(program.graph):
                _save_less(node, program.root)
        for node in program.graph.nodes:
            node.meta.pop("nn_module_stack", None)  # holds the user's classes, which a pickle must not need
        return result


def _cut_declared_constants(graph: fx.Graph) -> None:
    """Let no gradient flow to inputs that were declared constant: operations that only move values have no rule to stop it."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        info = node_info(node)
        if info.role is Role.CONSTANT and node.users:
            made = replace(info, name=f"{info.name}.constant", description="declared constant")
            cut = insert_call(graph, first, without_gradient, (node,), made)
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


# --- what is saved for the way back -----------------------------------------------------------------------------------------


CHEAP = 128  # products for one entry, up to which it is computed again rather than saved


def _rule_module(node: Any, root: nn.Module) -> RuleModule | None:
    """The rule module that a node calls, if it calls one."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = root.get_submodule(str(node.target))
    return module if isinstance(module, RuleModule) else None


def _save_less(node: fx.Node, root: nn.Module) -> None:
    """Let the rules at `node` share what they save, or compute it again where that is cheap."""
    module = _rule_module(node, root)
    if module is None:
        return
    if isinstance(module.rule, ShareOfSum):
        for place in range(2):
            _recompute_input(node, place, module, root)
    elif isinstance(module.rule, PositiveAndNegativeTotals) and module.rule.saves_output and len(node.users) == 1:
        behind = _rule_module(next(iter(node.users)), root)
        operator = behind and behind.ruled.operation.operator
        if behind is not None and operator is not None and operator.positive_part and type(behind.rule) is PassRule:
            module.ruled = replace(module.ruled, hands_on_positive=True)
            behind.ruled = replace(behind.ruled, takes_positive=True)


def _recompute_input(node: fx.Node, place: int, module: RuleModule, root: nn.Module) -> None:
    """Do not save the term of a sum that a convolution made for it alone, if few products make one entry of the term."""
    term = node.args[place]
    maker = _rule_module(term, root)
    if maker is None or not isinstance(term, fx.Node) or len(term.users) != 1:
        return
    ruled = maker.ruled
    is_convolution = ruled.operation.operator is not None and issubclass(ruled.operation.operator.kind, ConvolutionStandard)
    if not is_convolution or ruled.operation.inputs != 1 or ruled.first_extra < len(term.args):
        return
    weight: Any = term.args[ruled.parameters[ruled.operation.parameters.index("weight")]]
    while isinstance(weight, fx.Node) and weight.op != "get_attr":  # merged or modified: of the same shape
        weight = weight.args[0]
    if not isinstance(weight, fx.Node) or attribute_of(weight, root).shape[1:].numel() > CHEAP:
        return
    made_from = [term.args[0], *(term.args[at] for at in ruled.parameters)]
    args = list(node.args)
    for value in made_from:
        if value not in args:
            args.append(value)
    node.args = tuple(args)
    recomputed = (place, ruled.operation, tuple(args.index(value) for value in made_from))
    module.ruled = replace(module.ruled, recomputed=(*module.ruled.recomputed, recomputed))
    if isinstance(maker.rule, TotalOfOwnSign):
        maker.rule.recomputes_output = True


def _facts(node: fx.Node, layer: Layer) -> Facts:
    signs = tuple(node_info(value).sign if isinstance(value, fx.Node) else Sign.UNKNOWN for value in layer.inputs)
    return Facts(signs, node_info(node).relevant_where_positive)


class _RewrittenCall:
    """One call on its way to a rule module, with the values that it will be given."""

    def __init__(self, graph: fx.Graph, tree: "_Tree", node: fx.Node, layer: Layer, gate: Gate | None) -> None:
        self.gate = gate
        self.graph = graph
        self.tree = tree
        self.node = node
        self.layer = layer
        self.info = node_info(node)
        self.values: list[fx.Node] = []
        self.modified: dict[Any, fx.Node] = {}  # (modifier, parameter's name) -> the modified parameter

    def rewrite(self) -> None:
        rule: Hook = self.info.rule
        operation, layer = self.layer.operation, self.layer
        parameters = {name: self._as_node(layer.parameters[name]) for name in operation.parameters}
        self.values = self._distinct(layer.inputs)
        own = tuple(self._index(parameter) for parameter in parameters.values())
        branches = tuple(
            tuple(self._index(self._modify(modifier, name, parameter)) for name, parameter in parameters.items())
            for modifier in rule.parameter_modifiers
        )
        first_extra = len(self.values)
        self.values += [self._as_node(extra) for extra in layer.extras]
        ruled = RuledOperation(rule, _without_tensors(operation), own, branches, first_extra, self.gate, name=self.info.name)
        self.node.target = self.tree.place(self.info.name, RuleModule(ruled, self.info.description, self.info.merged))
        self.node.op = "call_module"
        self.node.args = tuple(self.values)
        self.node.kwargs = {}
        update_info(self.node, rule=repr(rule))

    def _index(self, value: fx.Node | None) -> int:
        """The place of a parameter among the values; -1 for one that is left out."""
        if value is None:
            return ABSENT
        first = len(self.layer.inputs)
        if value not in self.values[first:]:
            self.values.append(value)
        return self.values.index(value, first)

    def _modify(self, modifier: ParamMod, name: str, parameter: fx.Node) -> fx.Node | None:
        """The node of a modified parameter; None for a zero that the operator lets one leave out."""
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

    def _distinct(self, inputs: tuple[fx.Node, ...]) -> list[fx.Node]:
        """The inputs, with an alias for one that comes a second time: `x + x` has two operands."""
        result: list[fx.Node] = []
        for value in inputs:
            if value in result:
                name = f"{self.info.name}.alias"
                alias = NodeInfo(name, source=self.info.source, operator=operator_named("view"), description="view_as")
                value = insert_call(self.graph, self.node, torch.Tensor.view_as, (value, value), alias)
            result.append(value)
        return result

    def _as_node(self, value: fx.Node | str) -> fx.Node:
        """A node for a parameter that is given by its name."""
        if isinstance(value, fx.Node):
            return value
        with self.graph.inserting_before(self.node):
            node = self.graph.create_node("get_attr", value)
        set_info(node, NodeInfo(value, source=self.info.source, role=Role.PARAMETER))
        return node


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
        set_info(made, NodeInfo(info.name if made is node else made.name, source=info.source, role=info.role))
        made = made.prev
    return node


def _without_tensors(operation: Operation) -> Operation:
    """The operation; one that calls a module as a whole on a copy of the module that holds no memory."""
    function = operation.function
    if not isinstance(function, FunctionalModule):
        return operation
    operation = copy.copy(operation)
    operation.function = FunctionalModule(copy.deepcopy(function.module).to("meta"), function.tensors)
    return operation


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
        parent = scope_at(self.root, path)
        standing = parent._modules.get(leaf)
        if type(standing) is Scope:
            for table in TABLES:
                getattr(module, table).update(getattr(standing, table))
            for holder, key in self.places.get(standing) or [(parent, leaf)]:
                holder._modules[key] = module
            for child in module.children():  # what stood in the scope now stands in the layer
                held = self.places.get(child, [])
                self.places[child] = [(module if holder is standing else holder, key) for holder, key in held]
            return name
        if hasattr(parent, leaf):  # a method of nn.Module, or a tensor
            leaf = free_name(parent, leaf)
            name = ".".join([*path, leaf])
        parent.add_module(leaf, module)
        return name
