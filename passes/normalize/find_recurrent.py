"""NORMALIZE: find the steps of recurrent layers that are written out: LSTM, GRU and RNN."""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from lrpfx.ir.node import Role, ancestors_of, is_call_of, is_data, node_info, readers, row_of
from lrpfx.passes.constants import number_filling
from lrpfx.passes.normalize.call_builder import CallBuilder, with_replaced_calls
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call, replace_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED


class FindRecurrent(GraphPass):
    """Make the gates and activations of one step one call, of the kind of recurrent layers.

    An LSTM is known by h = sigmoid(o) tanh(c) with c = sigmoid(f) c' + sigmoid(i) tanh(g); a GRU by h = z h' + (1 - z) tanh(g),
    in any of its forms, with a sigmoid that scales a part of g; an RNN by a tanh whose dense layers read an earlier tanh of the
    same layers. Where the arguments of the gates come from, dense layers, convolutions or anything else, does not matter.
    """

    name = "find_recurrent"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        return with_replaced_calls(program, _step, lambda node, new: f"now {row_of(new)}")


def _step(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The call of a step that ends with a call."""
    return _long_short_term_memory(build, node) or _gated_unit(build, node) or _simple_step(build, node)


def _long_short_term_memory(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The hidden state of an LSTM. The state of its cell becomes a call, too, if another node reads it."""
    for out, activated in _scaled(node):
        if not is_call_of(activated, "tanh"):
            continue
        state = _argument(activated)
        for kept, entering in _terms(state):
            enter = next((one for one in _scaled(entering) if _activated(one[1], "tanh")), None)
            keep = None if kept is None else next(_scaled(kept), None)
            if enter is None or (keep is None and kept is not None):
                continue
            gates: list[fx.Node | None] = [*map(_argument, enter)]
            gates += (None, None) if keep is None else (_argument(keep[0]), keep[1])
            if readers(state) != [activated]:
                own = CallBuilder(build.program, state, row_of(state)).call("lstm_step", *gates, label="")
                replace_call(state, own)
            return build.call("lstm_step", *gates, _argument(out), label="")
    return None


def _gated_unit(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The state of a GRU, with the gates in its candidate."""
    for gate, candidate, hidden, enters in _blends(node):
        resets = _resets(candidate) if _activated(candidate, "tanh") else []
        if not resets:
            continue
        for product, reset, value in resets:
            scaled = CallBuilder(build.program, product, row_of(product)).call("gru_reset", value, _argument(reset), label="")
            replace_call(product, scaled)
        options: dict[str, Any] = {"enters": True} if enters else {}
        return build.call("gru_step", _argument(candidate), _argument(gate), hidden, label="", **options)
    return None


def _simple_step(build: CallBuilder, node: fx.Node) -> fx.Node | None:
    """The state of an RNN: it reads an earlier one, which becomes a step, too, and one dense layer computes both."""
    if not is_call_of(node, "tanh"):
        return None
    layers = _layers_before(node)
    own = [_parameters(layer) for layer in layers]
    for layer in layers:
        for earlier in _before(layer.args[0], ("cat",)):
            if not (is_call_of(earlier, "tanh") or is_call_of(earlier, "rnn_step")):
                continue
            if any(_parameters(one) in own for one in _layers_before(earlier)):
                if is_call_of(earlier, "tanh"):
                    first = CallBuilder(build.program, earlier, row_of(earlier)).call("rnn_step", earlier.args[0], label="")
                    replace_call(earlier, first)
                return build.call("rnn_step", node.args[0], label="")
    return None


# --- parts of the formulas ---------------------------------------------------------------------------------------------------


def _pairs(value: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The operands of a sum or product of two, in both orders."""
    if is_call_of(value, name) and not value.kwargs:
        first, second = value.args[:2]
        yield from ((first, second), (second, first))


def _scaled(value: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(gate, signal) of a product with a sigmoid."""
    for gate, signal in _pairs(value, "mul"):
        if _activated(gate, "sigmoid") and isinstance(signal, fx.Node):
            yield gate, signal


def _terms(state: fx.Node) -> Iterator[tuple[fx.Node | None, fx.Node]]:
    """(what is kept, what enters) of the state of a cell; of the first step, what is kept may be missing."""
    yield from _pairs(state, "add")
    yield None, state


def _blends(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, bool]]:
    """(gate, candidate, hidden state, whether the gate scales the candidate) of a sum of two with the weights z and 1 - z."""
    for first, second in _pairs(value, "add"):
        for weight, one in _pairs(first, "mul"):
            gate = _complement(weight) or weight
            if not _activated(gate, "sigmoid"):
                continue
            found = [
                (one, other)
                for factor, other in _pairs(second, "mul")
                if _complement(weight) is factor or _complement(factor) is weight
            ]
            if is_call_of(one, "sub") and not one.kwargs and one.args[1] is second:  # b + z (a - b)
                found.append((one.args[0], second))
            for scaled, other in found:
                if isinstance(scaled, fx.Node) and isinstance(other, fx.Node):
                    yield gate, scaled, other, weight is gate
                    yield gate, other, scaled, weight is not gate
    yield from _blends_by_value(value)


def _blends_by_value(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, bool]]:
    """The same for sums that are written in another way, such as n - z * n + z * h: their values say which they are."""
    leaves = list(dict.fromkeys(_leaves(value))) if any(map(partial(is_call_of, value), ("add", "sub", "rsub"))) else []
    complements = {one: other for one in leaves for other in leaves if _are_complements(one, other)}
    leaves = [one for one in leaves if one not in complements]
    if len(leaves) != 3:
        return
    points = dict(zip(leaves, _POINTS, strict=True))
    points |= {one: 1 - points[other] for one, other in complements.items()}
    total = _computed(value, points)
    for gate in (leaf for leaf in leaves if _activated(leaf, "sigmoid")):
        one, other = (leaf for leaf in leaves if leaf is not gate)
        for first, second in ((one, other), (other, one)):
            if math.isclose(total, points[gate] * points[first] + (1 - points[gate]) * points[second], rel_tol=1e-12):
                yield gate, first, second, True
                yield gate, second, first, False


def _are_complements(one: fx.Node, other: fx.Node) -> bool:
    """Whether a value is sigmoid(-a) = 1 - sigmoid(a), and another one sigmoid(a)."""
    negated = one.args[0] if is_call_of(one, "sigmoid") and is_call_of(other, "sigmoid") else None
    return is_call_of(negated, "neg") and negated.args[0] is other.args[0]


#: Rows of arithmetic, and numbers in place of three values: no other sum of their products agrees at these.
_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "rsub": lambda one, other: other - one, "neg": operator.neg,
}  # fmt: skip
_POINTS = (0.7390851, 1.3065630, -2.2360680)


def _is_arithmetic(value: Any) -> bool:
    return (
        isinstance(value, fx.Node) and not value.kwargs and is_data(value) and any(map(partial(is_call_of, value), _ARITHMETIC))
    )


def _leaves(value: Any, depth: int = 0) -> Iterator[fx.Node]:
    """The values from which sums, differences and products of numbers make another one."""
    if _is_arithmetic(value) and depth < 8:
        for one in value.args:
            yield from _leaves(one, depth + 1)
    elif isinstance(value, fx.Node) and number_filling(value) != 1:
        yield value


def _computed(value: Any, points: dict[fx.Node, float]) -> float:
    if value in points:
        return points[value]
    if _is_arithmetic(value):
        args = [_computed(one, points) for one in value.args]
        return _ARITHMETIC[row_of(value).name](*args, *([1.0] if len(args) == 1 and is_call_of(value, "rsub") else []))
    return 1.0 if isinstance(value, fx.Node) else float(value)


def _complement(value: Any) -> fx.Node | None:
    """X of 1 - x; None for other values."""
    if not (is_call_of(value, "rsub") or is_call_of(value, "sub")) or value.kwargs:
        return None
    one, other = (value.args[1] if len(value.args) > 1 else 1, value.args[0]) if is_call_of(value, "rsub") else value.args[:2]
    return other if isinstance(one, (int, float)) and one == 1 and isinstance(other, fx.Node) else None


def _resets(candidate: fx.Node) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(product, gate, signal) of the gates in a candidate: of a part of its sum, or of what its dense layer reads."""
    found = []
    for node in _before(_source(candidate).args[0], ("add", "cat", "linear", "conv1d", "conv2d", "conv3d")):
        found += [(node, *one) for one in _scaled(node)][:1]
    return found


def _layers_before(state: fx.Node) -> list[fx.Node]:
    """The dense layers of which the argument of a state's activation is the sum."""
    found = _before(state.args[0], ("add",))
    rows = ((one, node_info(one).operator) for one in found)
    return [one for one, row in rows if row is not None and row.weighs_channels]


def _parameters(layer: fx.Node) -> set[fx.Node]:
    """The parameters from which a layer's weight comes."""
    weight = layer.args[1]
    assert isinstance(weight, fx.Node)
    return {one for one in (weight, *ancestors_of(weight)) if one.op == "get_attr"}


def _before(value: Any, through: tuple[str, ...]) -> list[fx.Node]:
    """The nodes from which views and calls of the rows `through` make a value; what gives weights and biases is left out."""
    found: list[fx.Node] = []
    pending = [value]
    while pending:
        node = pending.pop()
        row = node_info(node).operator
        if row is not None and (row.name in through or _moves(node)):
            pending += [one for one in node.all_input_nodes if node_info(one).role is Role.DATA]
        else:
            found.append(node)
    return found


# --- activations of which a view is read ------------------------------------------------------------------------------------


def _moves(node: fx.Node) -> bool:
    """Whether a call is a view, or a part, of its first argument: it commutes with an activation."""
    row = node_info(node).operator
    return row is not None and row.neutral and (row.memory.view or row.outputs.parts or row.outputs.picks)


def _source(value: fx.Node) -> fx.Node:
    """The value of which views and parts make another one."""
    while _moves(value) and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


def _activated(value: Any, name: str) -> bool:
    """Whether a value is an activation, or a part of one."""
    return isinstance(value, fx.Node) and is_call_of(_source(value), name)


def _argument(value: fx.Node) -> fx.Node:
    """The argument of an activation, or the same part of it that `value` is of the activation."""
    if not _moves(value):
        argument = value.args[0]
        assert isinstance(argument, fx.Node)
        return argument
    assert isinstance(value.args[0], fx.Node)
    args = (_argument(value.args[0]), *value.args[1:])
    info = node_info(value)
    new = insert_call(value.graph, value, value.target, args, replace(info, name=f"{info.name}.argument"), dict(value.kwargs))
    return new
