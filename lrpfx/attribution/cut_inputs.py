"""Inputs of a model that reach its output, but get no relevance because a rule gives it to another factor."""

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from lrpfx.attribution.infinite_masks import other_reader
from lrpfx.ir.kinds import Embedding, Gate, GatedProduct, Softmax, WeightedValues
from lrpfx.ir.node import ancestors_of, is_data, node_info
from lrpfx.request.outputs import OutputSelector, explained_nodes
from lrpfx.rules.formulas import Only, ValueOnly

#: The kinds of products in which a rule of a composite gives all relevance to one factor, and the entry that shares it.
_SHARING = {
    Gate: "(types.Gate, Uniform())",
    GatedProduct: "(types.GatedProduct, Uniform())",
    WeightedValues: "(types.WeightedValues, UniformEpsilon())",
}


def advice_on_cut_inputs(graph: fx.Graph, rule_of: Callable[[fx.Node], Any], output: OutputSelector = None) -> str | None:
    """What to change where an input gets no relevance although it reaches the explained output, or None.

    `rule_of`: the rule of a node, if it has one.
    """
    starts = explained_nodes(graph, output)
    reaching = _inputs_behind(starts, lambda rule, place: False, rule_of)
    remaining = _inputs_behind(starts, _is_cut, rule_of)
    cut = [node for node in graph.find_nodes(op="placeholder") if node in reaching - remaining]
    cut = [node for node in cut if not _is_mask(graph, node)]
    if not cut:
        return None
    first = cut[0]
    nodes = (node for node in graph.nodes if first in ancestors_of(node) and _cuts(node, rule_of(node)))
    place = next(node for node in nodes if first not in _inputs_behind([node], _is_cut, rule_of))
    info = node_info(place)
    entry = next(entry for kind, entry in _SHARING.items() if info.kind is kind)
    names = " and ".join(repr(str(node.target)) for node in cut)
    return (
        f"the input{'s' if len(cut) > 1 else ''} {names} get{'' if len(cut) > 1 else 's'} no relevance, but the output depends "
        f"on {'them' if len(cut) > 1 else 'it'}: {info.name} ({info.kind_name}) gives all of it to its other factor. With "
        f"layer_map=[{entry}] in the composite, both factors get a share"
    )


def _inputs_behind(
    starts: Collection[fx.Node], is_cut: Callable[[Any, int], bool], rule_of: Callable[[fx.Node], Any]
) -> set[fx.Node]:
    """The inputs that relevance of some nodes reaches. `is_cut`: whether a rule stops it at an operand."""
    seen, pending = set(starts), list(starts)
    inputs: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        info = node_info(node)
        if node.op == "placeholder":
            inputs.add(node)
            continue
        if info.kind is Embedding:
            inputs.update(one for one in ancestors_of(node) if one.op == "placeholder")
            continue
        rule = rule_of(node) if info.kind in _SHARING else None
        operands = [one for one in node.args if is_data(one)]
        count = len(operands)
        given = [one for place, one in enumerate(operands) if count == 1 or not is_cut(rule, place - count)]
        read = [one for one in node.all_input_nodes if is_data(one) and (one in given or one not in operands)]
        read = [one for one in read if one not in seen]
        seen.update(read)
        pending += read
    return inputs


def _is_mask(graph: fx.Graph, placeholder: fx.Node) -> bool:
    """Whether an input is only added to the scores of an attention."""
    if other_reader(graph, (str(placeholder.target),)) is not None:
        return False
    pending = [placeholder]
    while pending:  # to the first reader that computes
        read = [user for user in pending.pop().users if is_data(user)]
        rows = [node_info(user).operator for user in read]
        if any(row is not None and not row.entries.moves and row.kind is not Softmax for row in rows):
            return True
        pending += [user for user, row in zip(read, rows, strict=True) if row is not None and row.entries.moves]
    return False


def _is_cut(rule: Any, place: int) -> bool:
    """Whether a rule gives nothing to one of two factors, which is at a place from the end."""
    return (isinstance(rule, Only) and place != rule.input - 2) or (isinstance(rule, ValueOnly) and place != -1)


def _cuts(node: fx.Node, rule: Any) -> bool:
    return node.op.startswith("call") and node_info(node).kind in _SHARING and isinstance(rule, (Only, ValueOnly))
