"""Find the regions of a graph through which the backward pass can carry multipliers R / t instead of relevance R.

Inside of such a region, torch's own derivatives propagate the multipliers, without denominators. Relevance is divided by a
value where a region begins, which is only where the rule in relevance form would divide as well, and multiplied by a value
where it ends.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from lrpfx.ir.kinds import Embedding
from lrpfx.ir.node import CARRIED, NodeInfo, Role, data_calls, node_info, nodes_by_name, output_node, update_info
from lrpfx.operators.functions import without_gradient
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import VALIDATED
from lrpfx.passes.rewrite.pair_with_reference import takes_differences
from lrpfx.runtime.differences import carry_difference
from lrpfx.runtime.multipliers import MultiplierForm, WithoutRelevance, carry_multiplier, carry_relevance


class CarryMultipliers(GraphPass):
    """Choose the form of each rule, and convert between relevance and multipliers where two regions meet.

    A layer whose rule divides by its output has the form with multipliers. A layer whose rule does not divide, and a neutral
    operation that moves values, have the form of their readers, and carry relevance if these differ or return it. Layers that
    get no relevance read detached values. Where rules take differences from a reference, all nodes and the outputs carry
    multipliers.
    """

    name = "carry_multipliers"
    stage = "rewrite"
    requires = (VALIDATED,)

    def __init__(self, only_differences: bool = False) -> None:
        """`only_differences`: leave graphs alone whose rules have a form without multipliers."""
        self.only_differences = only_differences

    def applies(self, program: Program) -> bool:
        return not self.only_differences or takes_differences(program)

    def run(self, program: Program) -> PassResult:
        layers = _layers_with_form(program)
        if not any(form.divides for form, _ in layers.values()):
            return PassResult()
        regions = _Regions(program.graph, layers, everywhere=takes_differences(program))
        result = PassResult()
        for node in data_calls(program.graph):
            if node in regions.members:
                update_info(node, carries_multiplier=True)
                if node in layers:
                    update_info(node, form=layers[node][0])
                    result.match(node_info(node).name, "carries multipliers")
            elif node in regions.irrelevant and node_info(node).rule is not None and not node_info(node).rule.has_code:
                update_info(node, form=WithoutRelevance())
                result.details.append((node_info(node).name, "gets no relevance"))
        result.details += regions.convert()
        return result


def _layers_with_form(program: Program) -> dict[fx.Node, tuple[MultiplierForm, tuple[Any, ...]]]:
    """Layers whose rule has a form that carries multipliers, with this form and the layer's inputs."""
    found = {}
    for node in data_calls(program.graph):
        rule = node_info(node).rule
        if rule is not None:
            layer = program.layer(node)
            form = rule.multiplier_form(layer)
            if form is not None:
                found[node] = form, layer.inputs
    return found


class _Regions:
    """The nodes whose values carry multipliers."""

    def __init__(
        self, graph: fx.Graph, layers: dict[fx.Node, tuple[MultiplierForm, tuple[Any, ...]]], everywhere: bool
    ) -> None:
        """`everywhere`: whether all nodes carry multipliers, also the outputs."""
        self.everywhere = everywhere
        self.graph = graph
        self.layers = layers
        self.members: set[fx.Node] = set()
        self.irrelevant: set[fx.Node] = set()  # calls that get no relevance from any reader
        self.output = output_node(graph)
        self.members.update([self.output] if everywhere else [])
        self.by_name = nodes_by_name(graph)
        for node in reversed(graph.nodes):
            if node.op.startswith("call") and node_info(node).role is Role.DATA:
                self._decide(node)

    def _decide(self, node: fx.Node) -> None:
        readers = [user for user in node.users if self._passes_to(user, node)]
        if not readers:
            self.irrelevant.add(node)
            return
        if self.everywhere:
            self.members.add(node)
            return
        form = self.layers[node][0] if node in self.layers else None
        inside = [user for user in readers if user in self.members]
        outside = [user for user in readers if user not in self.members]  # the output too: its relevance may be anything
        if (form is not None and form.divides) or ((form is not None or _moves_values(node)) and inside and not outside):
            self.members.add(node)
        else:
            self.members.difference_update(user for user in readers if _picks(user))  # a tuple of tensors has no conversion

    def _passes_to(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether `user` may pass relevance to `node`."""
        if user is self.output:
            return True
        if node_info(user).role is not Role.DATA or user in self.irrelevant:
            return False
        if user not in self.members or user not in self.layers:
            return True
        form, inputs = self.layers[user]
        return any(argument is node and not form.keeps_from(place) for place, argument in enumerate(inputs))

    def convert(self) -> list[tuple[str, str]]:
        """Insert conversions, and detach what layers without relevance read. Returns what was done where."""
        done = []
        for node in list(self.graph.nodes):
            if node.op == "output" or node_info(node).role is not Role.DATA or node in self.irrelevant:
                continue
            name, member = node_info(node).name, node in self.members
            readers = [user for user in node.users if user is self.output or node_info(user).role is Role.DATA]
            unread = [user for user in readers if user in self.irrelevant]
            others = [user for user in readers if user not in self.irrelevant and (user in self.members) != member]
            if unread:
                self._insert(node, unread, without_gradient, f"{name}.detached", False)
            if others and member:
                self._insert(node, others, carry_multiplier, f"{name}.relevance", False)
                done.append((name, "relevance is divided by its value"))
            elif others:
                self._insert(node, others, carry_relevance, f"{name}{CARRIED}", True)
                done.append((name, "multipliers are multiplied by its value"))
        return done

    def _insert(self, node: fx.Node, readers: list[fx.Node], function: Callable[..., Any], name: str, carries: bool) -> None:
        of = node_info(node)
        several = of.operator is not None and of.operator.returns_several
        row = of.operator if several else operator_named("view")
        info = replace(
            NodeInfo(name, source=of.source, operator=row, description=function.__name__),
            shape=of.shape,
            dtype=of.dtype,
            sign=of.sign,
            reference=of.reference,
            carries_multiplier=carries,
        )
        after = node.next
        while after.op == "placeholder":
            after = after.next
        arguments: tuple[fx.Node, ...] = (node,)
        if function is carry_relevance and of.reference:
            function, arguments = carry_difference, (node, self.by_name[of.reference])
            after = after if node.op != "placeholder" else arguments[1].next
        made = insert_call(self.graph, after, function, arguments, info)
        for reader in readers:
            reader.replace_input_with(node, made)


def _moves_values(node: fx.Node) -> bool:
    """Whether a call without a rule only moves values, or looks them up."""
    info = node_info(node)
    row = info.operator
    if row is None or info.rule is not None or not info.neutral or info.keeps_gradient:
        return False
    return (
        row.entries.moves
        or row.entries.selects
        or row.entries.converts
        or row.memory.view
        or row.memory.always_view
        or issubclass(row.kind, Embedding)
    )


def _picks(node: fx.Node) -> bool:
    row = node_info(node).operator if node.op.startswith("call") else None
    return row is not None and row.outputs.picks
