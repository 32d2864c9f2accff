"""ASSIGN: the composite chooses a rule for each layer. Only metadata changes."""

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from lrpfx.errors import InputTypeError, LrpfxWarning
from lrpfx.ir.kinds import ConvolutionStandard, ConvolutionTranspose, Linear, Product, Sum
from lrpfx.ir.mapping import MappingContext, RuleMapping
from lrpfx.ir.node import calls_before_output, data_calls, is_data, is_learned, node_info, row_of, update_info
from lrpfx.operators.layer import Layer
from lrpfx.operators.table import spelling_of
from lrpfx.passes.normalize.normalize_operators import data_from_constants
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import ASSIGNED, CANONICAL, DETERMINISTIC, OUT_OF_PLACE
from lrpfx.rules.differences import Difference
from lrpfx.rules.formulas import Epsilon, Norm
from lrpfx.rules.hook import Hook

#: Linear layers, for which a composite may have rules of their own.
_LINEAR = (Linear, ConvolutionStandard, ConvolutionTranspose)
_MOST = 5  # names in a warning


class Assign(GraphPass):
    """Ask the composite for a rule for every layer, in execution order. Warn about entries that match no layer.

    Layers that only make masks and indices come last, and are no layers of the context: none of them is the first one.
    """

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
        ordered = calls_before_output(program.graph)
        layers = {node: program.layer(node) for node in dict.fromkeys([*ordered, *data_calls(program.graph)])}
        inputs = _inputs_of(program.graph)
        context = MappingContext(
            ((layers[node].name, layers[node]) for node in ordered), {layers[node].name: inputs[node] for node in ordered}
        )
        self._ask(context, layers, result)
        if any(node_info(node).rule is not None and node_info(node).rule.reads_controls for node in layers):
            found = data_from_constants(program.graph)
            self._ask(context, {node: program.layer(node) for node in found}, result)
        unmatched = self.composite.unmatched(context)
        if unmatched:
            result.notes.append(_warning(program, self.composite, unmatched))
        sums = _sums_of_shifts(program) | _sums_of_pieces(program)
        if sums:  # would a convolution in their place, here without random weights, have a rule of its own?
            rule = self.composite.module_map(context, "", nn.Conv1d(1, 1, 1, device="meta"))
            sums = set() if rule is None or type(rule) in (Epsilon, Norm) else sums
        result.notes += _products_and_exponentials(program, sums)
        return result

    def _ask(self, context: MappingContext, layers: Mapping[fx.Node, Layer], result: PassResult) -> None:
        for node, layer in layers.items():
            context.reason = ""
            rule = self.composite.module_map(context, layer.name, layer)
            if rule is None:
                continue
            if not isinstance(rule, Hook):
                raise InputTypeError(f"{self.composite} maps {layer.name} to {rule!r}, which is not a rule", topic="composites")
            update_info(node, rule=rule.copy(), chosen_by=context.reason or repr(self.composite))
            result.match(layer.name, f"{rule}, by {node_info(node).chosen_by}")


def _inputs_of(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """The names of the inputs that each node depends on."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        found[node] = frozenset[str]().union(*(found[one] for one in node.all_input_nodes))
        if node.op == "placeholder":
            found[node] = frozenset([node.name])
    return found


def _products_and_exponentials(program: Program, sums: set[fx.Node]) -> list[LrpfxWarning]:
    """A warning that names what is most often a part of a layer that is written out, and was not recognized as such."""
    found = []
    rules = {type(node_info(node).rule) for node in data_calls(program.graph) if node_info(node).kind in _LINEAR}
    if any(isinstance(node_info(node).rule, Difference) for node in data_calls(program.graph)):
        return []  # they are the same however a function is cut into layers
    for node in data_calls(program.graph):
        info = node_info(node)
        row = info.operator
        if row is None or info.rule is None or "name_map" in info.chosen_by:
            continue
        factors = _factors(node)
        is_product = sum(map(is_data, factors)) == 1
        is_product = is_product and any(is_learned(one, program.root) for one in factors if not is_data(one))
        is_product = is_product or _is_behind_layer(program, node)
        if row.values.of_softmax or node in sums or (is_product and rules - {Epsilon, Norm}):
            found.append(f"{info.name} ({row}, {info.source or 'source unknown'})")
    if not found:
        return []
    more = f" and {len(found) - _MOST} others" if len(found) > _MOST else ""
    return [
        LrpfxWarning(
            f"{program.title}: {', '.join(found[:_MOST])}{more} carry relevance as functions of their own. If they are parts "
            "of a softmax, a dense layer or a convolution, the map is not that of the layer: pass example_inputs, whose shapes "
            "tell, or write torch.softmax, torch.nn.functional.linear or conv1d. Otherwise give them rules by name, in a name "
            "map.",
            topic="parts-of-layers",
        )
    ]


def _factors(node: fx.Node) -> list[fx.Node]:
    """The operands of a product that sums over a dimension, or may do so: a sum of products without known shapes."""
    row = row_of(node)
    if row.product.contraction is None:
        return []
    if not row.entries.adds_up:
        return node.all_input_nodes
    summed = node.all_input_nodes[0]
    return summed.all_input_nodes if node_info(summed).kind is Product and node_info(summed).shape is None else []


def _is_behind_layer(program: Program, node: fx.Node) -> bool:
    """Whether a sum or product with parameters comes behind a layer, and may be a part of it: no shapes tell."""
    info, data = node_info(node), [one for one in node.all_input_nodes if is_data(one)]
    if info.shape is not None or info.kind not in (Sum, Product) or len(data) != 1:
        return False
    if not any(is_learned(one, program.root) for one in node.all_input_nodes if one not in data):
        return False
    (source,) = data
    while source.op == "call_function" and (row := node_info(source).operator) is not None and row.entries.moves:
        source = source.all_input_nodes[0]
    return node_info(source).kind in _LINEAR


def _sums_of_shifts(program: Program) -> set[fx.Node]:
    """Sums of one value, shifted or not, some of which are multiplied with parameters, as a convolution of each channel is."""
    found = set()
    # What a value is made of by shifts and such products, and whether by products.
    origins: dict[fx.Node, tuple[fx.Node, bool]] = {}
    for node in data_calls(program.graph):
        info, data = node_info(node), [one for one in node.all_input_nodes if is_data(one)]
        sources = [origins.get(one, (one, False)) for one in data]
        others = [one for one in node.all_input_nodes if one not in data]
        scales = info.kind is Product and any(is_learned(one, program.root) for one in others)
        is_sum = info.kind is Sum and info.operator is not None and info.operator.entries.elementwise
        moves = info.operator is not None and info.operator.entries.moves
        if not (scales or is_sum or moves) or len({source for source, _ in sources}) != 1:
            continue
        scaled = scales or any(one for _, one in sources)
        if is_sum and len(data) > 1 and scaled:
            found.add(node)
        else:
            origins[node] = sources[0][0], scaled
    return found


def _sums_of_pieces(program: Program) -> set[fx.Node]:
    """Sums of linear layers, as functions, of parts of one value with parts of one parameter: a convolution by hand."""
    found: set[fx.Node] = set()
    origins: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # the value and the parameter
    parts: dict[fx.Node, set[Any]] = {}  # of the value
    for node in data_calls(program.graph):
        info, data = node_info(node), [one for one in node.all_input_nodes if is_data(one)]
        row = info.operator
        if row is None:
            continue
        if row.weighs_channels and info.module_path is None:
            value, weight = node.args[:2]
            parameter = _whole(weight) if isinstance(weight, fx.Node) else None
            if parameter is not None and parameter is not weight and parameter.op == "get_attr":
                origins[node] = _whole(value) if isinstance(value, fx.Node) else node, parameter
                parts[node] = {value}
        elif row.entries.moves and len(data) == 1 and data[0] in origins:
            origins[node], parts[node] = origins[data[0]], parts[data[0]]
        elif info.kind is Sum and row.entries.elementwise and len(data) > 1:
            own = {origins.get(one) for one in data}
            if None not in own and len(own) == 1:
                origins[node], parts[node] = origins[data[0]], set().union(*(parts[one] for one in data))
                found.difference_update(data)
                found |= {node} if len(parts[node]) > 1 else set()
    return found


def _whole(value: fx.Node) -> fx.Node:
    """The value of which calls that move entries have taken a part."""
    while value.op == "call_function" and (spelling := spelling_of(value)) is not None and spelling.operator.entries.moves:
        source = value.args[0]
        if not isinstance(source, fx.Node):
            break
        value = source
    return value


def _warning(program: Program, composite: RuleMapping, unmatched: list[str]) -> LrpfxWarning:
    merged = {name: node_info(node).name for node in data_calls(program.graph) for name in node_info(node).merged}
    hints = [f"{name} was merged into {into}" for name, into in merged.items() if any(name in entry for entry in unmatched)]
    return LrpfxWarning(
        f"entries of {type(composite).__name__}() that match no layer of {program.title}: {'; '.join(unmatched + hints)}. "
        "lrpfx.node_names(model) lists the names.",
        topic="entries-that-match-nothing",
    )
