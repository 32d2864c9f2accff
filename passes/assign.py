"""ASSIGN: the composite chooses a rule for each layer. Only metadata changes."""

from lrpfx.errors import InputTypeError
from lrpfx.ir.node import data_calls, node_info, update_info
from lrpfx.layers.layer import layer_of_node
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import ASSIGNED, CANONICAL, DETERMINISTIC, OUT_OF_PLACE
from lrpfx.rules.hook import Hook
from lrpfx.rules.mapping import MappingContext, RuleMapping


class Assign(GraphPass):
    """Ask the composite for a rule for every layer, in execution order. Warn about entries that match no layer."""

    name = "assign"
    stage = "assign"
    requires = (
        CANONICAL,
        OUT_OF_PLACE,
        DETERMINISTIC,
    )
    ensures = (ASSIGNED,)
    edits = False

    def __init__(self, composite: RuleMapping) -> None:
        self.composite = composite

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        layers = {node: layer_of_node(node, program.root) for node in data_calls(program.graph)}
        context = MappingContext((layer.name, layer) for layer in layers.values())
        for node, layer in layers.items():
            context.reason = ""
            rule = self.composite.module_map(context, layer.name, layer)
            if rule is None:
                continue
            if not isinstance(rule, Hook):
                raise InputTypeError(f"{self.composite} maps {layer.name} to {rule!r}, which is not a rule")
            update_info(node, rule=rule.copy(), chosen_by=context.reason or repr(self.composite))
            result.matches += 1
            result.details.append((layer.name, f"{rule}, by {node_info(node).chosen_by}"))
        unmatched = self.composite.unmatched(context)
        if unmatched:
            result.warnings.append(_warning(program, self.composite, unmatched))
        return result


def _warning(program: Program, composite: RuleMapping, unmatched: list[str]) -> str:
    merged = {name: node_info(node).name for node in data_calls(program.graph) for name in node_info(node).merged}
    hints = [f"{name} was merged into {into}" for name, into in merged.items() if any(name in entry for entry in unmatched)]
    return (
        f"entries of {type(composite).__name__}() that match no layer of {program.title}: {'; '.join(unmatched + hints)}. "
        "lrpfx.node_names(model) lists the names."
    )
