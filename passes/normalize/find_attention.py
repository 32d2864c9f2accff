"""NORMALIZE: distinguish the product of attention weights and values from other matrix products."""

import itertools
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import Argument

from lrpfx.ir.kinds import Activation, AvgPool, Gate, RMSNorm, Softmax, Sum
from lrpfx.ir.node import (
    Role,
    ancestors_of,
    calls,
    is_call_of,
    is_data,
    node_info,
    nodes_in,
    only_reader,
    readers,
    row_of,
    sources_of_dimensions,
    update_info,
)
from lrpfx.ir.operator import Contraction, NotAContractionError, Probability
from lrpfx.operators.contractions import added_by_index
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import is_discrete_result, operator_named
from lrpfx.passes.constants import mark_constants
from lrpfx.passes.normalize.call_builder import CallBuilder
from lrpfx.passes.normalize.find_softmax import are_same, grouped_sum
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.normalize.simplify import sum_of_mean
from lrpfx.passes.program import GraphPass, PassResult, Program, replace_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED


class FindAttention(GraphPass):
    """Mark a matrix product of which one factor is a softmax as weighted values, with the softmax as the first argument.

    So is the sum or mean of an element-wise product with a softmax, unless its weights are those of chosen places, which route
    tokens to experts: they are a gate, so that relevance of the experts adds up to that of their sum. Weights are chosen if a
    selection among their own scores, such as their largest, says which ones are read, and which ones a mask keeps. The sum may
    be one by `index_add` and the like, as along the edges of a graph, or one of the products with the parts of a softmax.

    The pass looks through element-wise functions, sums and means of softmaxes, views, constant factors and divisors. It does
    not look through dense layers.
    """

    name = "find_attention"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            gated = _gated_experts(program, node)
            if gated is not None:
                total, weights = gated
                result.match(node_info(node).name, f"experts, gated by {node_info(weights).name}")
                replace_call(node, total)
                continue
            node = _as_sum(program, node)
            found = _weighted_sum(node) or _weighted_product(node) or _added_product(node)
            if found is None:
                continue
            name, arguments, weights = found
            weighted = operator_named(name)
            node.target, node.args, node.kwargs = weighted.function or next(iter(weighted.spellings.functions)), arguments, {}
            update_info(node, operator=weighted)
            result.match(node_info(node).name, f"values, weighted by {node_info(weights).name}")
        if result.matches:
            remove_unread(program.graph)
            mark_constants(program.graph)
        return result


#: The row of weighted values, its arguments, and the weights among them.
_Found = tuple[str, tuple[Argument, ...], fx.Node]


def _weighted_product(node: fx.Node) -> _Found | None:
    """A matrix product with attention weights, which become its first factor."""
    row = node_info(node).operator
    if row is None or not row.product.weighted or node.kwargs:
        return None
    args = node.args
    if len(args) == 2 and isinstance(args[1], (tuple, list)):  # the operands of an exported einsum
        args = (args[0], *args[1])
    *others, first, last = args
    factors = [argument for argument in (first, last) if isinstance(argument, fx.Node) and is_data(argument)]
    if len(factors) != 2 or nodes_in(others):
        return None
    for name, (weights, values) in ((row.product.weighted, factors), (row.product.weighted_last, factors[::-1])):
        if _is_softmax(weights):
            return name, (*others, weights, values), weights
    return None


def _gated_experts(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum of gated results of experts, and their weights, for a product that weighs each result with a chosen weight."""
    row = node_info(node).operator
    if row is None or row.product.contraction is None or row.entries.adds_up:
        return None
    if len([one for one in node.all_input_nodes if is_data(one)]) != 2:
        return None
    try:
        found = row.product.contraction(node, _rank)
    except NotAContractionError:
        return None
    named = _without_ellipsis(found)
    for (weights, values), (own, letters) in zip(
        itertools.permutations(found.operands), itertools.permutations(named.labels), strict=True
    ):
        if weights is values or not isinstance(weights, fx.Node) or not is_data(weights):
            continue
        added = [own[place] for place in _added_dimensions(weights, len(own)) if own[place] not in letters]
        kept, result = ("".join(one for one in some if one not in added) for some in (own, named.result))
        plain = set(kept) | set(result) <= set(letters) and all(len(set(one)) == len(one) for one in (own, letters))
        if plain and "." not in own + letters and _is_softmax(weights) and _are_chosen(weights):
            build = CallBuilder(program, node, row)
            scale = weights
            for letter in reversed(added):
                scale = build.call("select", scale, own.index(letter), 0, target=torch.select)
            order = sorted(range(len(kept)), key=lambda place: letters.index(kept[place]))
            scale = build.call("permute", scale, tuple(order), target=torch.permute)
            for place, letter in enumerate(letters):
                if letter not in kept:
                    scale = build.call("unsqueeze", scale, place, target=torch.unsqueeze)
            total = build.call("gate", values, scale)
            summed = tuple(place for place, letter in enumerate(letters) if letter not in result)
            if summed:
                total = build.call("sum", total, summed, target=torch.sum)
            left = [letter for letter in letters if letter in result]
            total = build.call("permute", total, tuple(map(left.index, result)), target=torch.permute)
            for place, letter in enumerate(named.result):
                if letter in added:
                    total = build.call("unsqueeze", total, place, target=torch.unsqueeze)
            return total, weights
    return None


def _added_dimensions(view: fx.Node, rank: int) -> list[int]:
    """The dimensions of size 1 that a call adds, such as weights[:, None]."""
    row = node_info(view).operator
    if row is None or view.op != "call_function":
        return []
    if row.outputs.picks:
        index = view.args[1]
        return sorted(place % rank for place in added_by_index(index if isinstance(index, tuple) else (index,)) or ())
    return [place for place, source in enumerate(sources_of_dimensions(view, rank) or ()) if source is None]


def _rank(value: Argument) -> int | None:
    shape = node_info(value).shape if isinstance(value, fx.Node) else None
    return None if shape is None else len(shape)


def _without_ellipsis(found: Contraction) -> Contraction:
    """The same with a letter for each dimension that "." stands for; the same as it is if their number is not known."""
    ranks = [_rank(operand) for operand in found.operands]
    if "." not in found.result or None in ranks:
        return found
    counts = [
        rank + 1 - len(own) if "." in own else 0 for rank, own in zip(ranks, found.labels, strict=True) if rank is not None
    ]
    free = "".join(letter for letter in _FURTHER if letter not in "".join(found.labels))[: max(counts)]
    first, last = (own.replace(".", free[len(free) - count :]) for own, count in zip(found.labels, counts, strict=True))
    return replace(found, labels=(first, last), result=found.result.replace(".", free))


#: Letters for dimensions without a name.
_FURTHER = "αβγδεζηθικλμνξοπρστυφχψω"


def _weighted_sum(node: fx.Node) -> _Found | None:
    """A sum of values times attention weights."""
    row = node_info(node).operator
    if row is None or row.name != "sum":
        return None
    bound = bound_arguments(node, row)
    product, dimensions = bound["input"], (bound.get("dim"), bound.get("keepdim", False))
    if not isinstance(product, fx.Node) or dimensions[0] is None or bound.get("dtype") is not None or nodes_in(dimensions):
        return None
    factors = _factors(product)
    return None if factors is None else ("weighted_sum", (*factors, *dimensions), factors[0])


def _as_sum(program: Program, node: fx.Node) -> fx.Node:
    """A sum of weighted values, divided by their number, in place of their mean; other calls as they are."""
    product = node.args[0] if is_call_of(node, "mean") else None
    if not isinstance(product, fx.Node) or node_info(product).shape is None or _factors(product) is None:
        return node
    made = sum_of_mean(CallBuilder(program, node, row_of(node)))
    if made is None:
        return node
    total, quotient = made
    replace_call(node, quotient)
    return total


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The weights and the values of an element-wise product with a softmax that one call reads; None for others."""
    multiplied = node_info(product).operator
    if multiplied is None or not issubclass(multiplied.kind, Gate) or multiplied.product.proportional_to != multiplied.data:
        return None
    if only_reader(product) is None or product.kwargs:
        return None
    factors = [argument for argument in product.args[:2] if isinstance(argument, fx.Node) and is_data(argument)]
    if len(factors) != 2:
        return None
    for values, weights in (factors, factors[::-1]):
        if _is_softmax(weights):
            return None if _are_chosen(weights) else (weights, values)
    return None


def _added_product(node: fx.Node) -> _Found | None:
    """An element-wise product with a softmax, the results of which are added in groups, after views, or one after another."""
    factors = _factors(node)
    if factors is None:
        return None
    reader, of_one = only_reader(node), True
    while reader is not None and (row := node_info(reader).operator) is not None and row.entries.moves:
        of_one = of_one and len({_softmax_in(one) for one in reader.all_input_nodes if is_data(one)}) == 1
        reader = _sum_of_parts(reader) if is_call_of(reader, "unbind") else only_reader(reader)
    row = None if reader is None else node_info(reader).operator
    if reader is None or row is None:
        return None
    weights = factors[0]
    in_groups = grouped_sum(reader, row, bound_arguments(reader, row)) is not None
    by_matrix = row.name in ("matmul", "einsum") and sum(map(is_data, reader.all_input_nodes)) == 1
    is_viewed = node not in reader.all_input_nodes  # otherwise the sum is the call of weighted values
    sums = is_viewed and row.name in ("sum", "mean") and bound_arguments(reader, row).get("dim") is not None
    others = _others_added(reader, node) if is_call_of(reader, "add") else set()
    in_parts = any(are_same(_softmax_of(weights), other) for other in others if other is not None)
    if in_groups or by_matrix or in_parts or (sums and of_one):
        return "weighted_product", factors, weights
    return None


def _softmax_in(value: fx.Node) -> fx.Node | None:
    """The softmax that weighs a value, or what it is a view of; None if there is none."""
    while (row := node_info(value).operator) is not None and row.entries.moves and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    weights = value.args[0] if is_call_of(value, "weighted_product") else (_factors(value) or (None,))[0]
    return _softmax_of(weights) if isinstance(weights, fx.Node) else None


def _sum_of_parts(parts: fx.Node) -> fx.Node | None:
    """The sum of all parts that a call returns, one after another; None if they are read in another way."""
    found = set(readers(parts))
    total: fx.Node | None = next(iter(found), None)
    while total is not None and is_call_of(reader := only_reader(total), "add"):
        total = reader
    return total if total is not None and found <= _terms(total) else None


def _terms(total: fx.Node) -> set[fx.Node]:
    """The values of which a sum consists, one after another."""
    found, pending = set[fx.Node](), [total]
    while pending:
        node = pending.pop()
        if is_call_of(node, "add"):
            pending += [one for one in node.args if isinstance(one, fx.Node)]
        else:
            found.add(node)
    return found


def _others_added(total: fx.Node, product: fx.Node) -> set[fx.Node | None]:
    """The softmaxes whose parts weigh the other values of the sum that a call is a part of."""
    while is_call_of(reader := only_reader(total), "add"):
        total = reader
    return {_softmax_in(term) for term in _terms(total) if term is not product}


def _softmax_of(weights: fx.Node) -> fx.Node:
    """The value of which weights are a part."""
    while node_info(weights).operator is not None and row_of(weights).entries.moves and len(weights.all_input_nodes) == 1:
        weights = weights.all_input_nodes[0]
    return weights


#: Arguments that say where entries are read; others, such as a mask, hide entries at their place. A router makes them from
#: signals, and the edges of a graph are given.
_PLACES = {"index", "indices"}


def _are_chosen(weights: fx.Node) -> bool:
    """Whether weights belong to chosen places, as those of a router: they are read there, are the largest, or masked for it."""
    seen, pending = {weights}, [weights]
    masks = set[fx.Node]()
    while pending:
        node = pending.pop()
        row = node_info(node).operator
        if node.op != "call_function" or row is None:
            continue
        given = {str(place): value for place, value in enumerate(node.args)} | bound_arguments(node, row)
        places = [given.get(name) for name in row.indices] if _PLACES.intersection(row.indices) else []
        if row.outputs.discrete_results or any(node_info(one).role is Role.CONSTANT for one in nodes_in(places)):
            return True
        read = {one for one in node.all_input_nodes if is_data(one)}
        constants = set(node.all_input_nodes) - read
        masked = bool(row.product.proportional_to) and len(read) == 1
        if not (masked or row.neutral or issubclass(row.kind, (Softmax, Gate, Sum))) and not _dispatches(node):
            continue
        masks |= constants
        pending += read - seen
        seen |= read
    return any(_is_selection(mask, seen) for mask in masks)


def _is_selection(mask: fx.Node, scores: set[fx.Node]) -> bool:
    """Whether a constant says where scores were selected: by places, by their order, or by a comparison with one of them.

    The largest score itself, by which a softmax shifts all of them, says nothing of places.
    """
    if node_info(mask).role is not Role.CONSTANT:
        return False
    selecting = set[fx.Node]()
    for node in ancestors_of(mask):
        row = node_info(node).operator if node.op == "call_function" else None
        selects = row is not None and row.entries.mixes is not None and (row.entries.selects or row.values.discrete)
        if selects and scores & ancestors_of(node):
            selecting.add(node)
    return any(_is_discrete(node) and selecting & ancestors_of(node) for node in ancestors_of(mask))


def _is_discrete(node: fx.Node) -> bool:
    """Whether a value consists of places, truth values or steps."""
    if is_call_of(node, "getitem") and is_discrete_result(node.args[0], node.args[1]):
        return True
    row = node_info(node).operator if node.op == "call_function" else None
    return row is not None and row.values.discrete


def _dispatches(node: fx.Node) -> bool:
    """Whether a product with a matrix puts weights at the places of their experts, which a selection among them says."""
    row = node_info(node).operator
    data = {one for one in node.all_input_nodes if is_data(one)}
    others = set(node.all_input_nodes) - data
    is_product = row is not None and bool(row.product.weighted) and len(data) == len(others) == 1
    return is_product and _is_selection(others.pop(), ancestors_of(data.pop()))


def _is_softmax(value: fx.Node) -> bool:
    """Whether a value consists of attention weights: a softmax, perhaps masked, normalized again, or mixed with others."""
    row = node_info(value).operator
    if value.op != "call_function" or row is None:
        return False
    if issubclass(row.kind, Softmax):
        return True
    if row.values.probability is Probability.OF_ALL_LOGITS:  # its logarithm, from which an exponential makes weights
        return any(node_info(user).operator is not None and _is_exponential(user) for user in value.users)
    data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
    if not data:
        return False
    if row.kind is Gate:  # a signal and its scale
        return _is_softmax(data[0]) or _sums_up(data[-1], data[0])
    mixes = issubclass(row.kind, (Sum, AvgPool, Activation, RMSNorm)) or row.neutral or bool(row.product.proportional_to)
    return (mixes or _dispatches(value)) and all(map(_is_softmax, data))


def _is_exponential(node: fx.Node) -> bool:
    return node_info(node).operator is operator_named("exp")


def _sums_up(scale: fx.Node, signal: fx.Node) -> bool:
    """Whether a value is the sum of a signal over some dimension, as the divisor of a softmax that is spelled out."""
    row = node_info(scale).operator
    while row is not None and row.neutral and isinstance(scale.args[0], fx.Node):
        scale = scale.args[0]
        row = node_info(scale).operator
    if row is None or not row.entries.adds_up or not isinstance(scale.args[0], fx.Node):
        return False
    summed = scale.args[0]
    return summed is signal or (summed.target is signal.target and (summed.args, summed.kwargs) == (signal.args, signal.kwargs))
