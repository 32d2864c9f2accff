"""Choose the cheapest form of each layer's rule."""

from torch import fx

from lrpfx.ir.node import Facts, data_calls, node_info, update_info
from lrpfx.ir.operator import Sign
from lrpfx.operators.layer import Layer
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import SUPPORTED, VALIDATED


class ChooseShortcuts(GraphPass):
    """Ask each rule for a shortcut, given the signs of the inputs and the support of the output's relevance."""

    name = "choose_shortcuts"
    stage = "rewrite"
    requires = (VALIDATED, SUPPORTED)
    edits = False

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in data_calls(program.graph):
            rule = node_info(node).rule
            if rule is None or node_info(node).form is not None:
                continue
            layer = program.layer(node)
            chosen = rule.shortcut(layer, _facts(node, layer))
            if chosen is not rule:
                update_info(node, rule=chosen)
                result.match(node_info(node).name, type(chosen).__name__)
        return result


def _facts(node: fx.Node, layer: Layer) -> Facts:
    signs = tuple(node_info(value).sign if isinstance(value, fx.Node) else Sign.UNKNOWN for value in layer.inputs)
    return Facts(signs, node_info(node).relevant_where_positive)
