"""The rule of recurrent layers."""

from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.errors import RuleError
from lrpfx.ir.kinds import Recurrent
from lrpfx.operators.layer import Layer
from lrpfx.operators.recurrent import CELL, in_time, out_of_time, run_of, state_of, terms_of_step
from lrpfx.rules.formulas import EpsilonRule
from lrpfx.rules.ratios import added
from lrpfx.rules.rule import Absorbed
from lrpfx.rules.stabilizer import StabilizerFunction
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.support.opaque_operator import opaque_operator


class SignalTakesAll(EpsilonRule):
    """For recurrent layers: gates get no relevance, the signals that they scale get all of it.

    Backward in time, with one stabilizer st for all denominators. LSTM, with c = f c' + i tanh(g), h = o tanh(c) and g = W x +
    U h' + b, where ' marks the step before: R_c gains R_h and is divided by s = R_c / st(c), R_c' = f c' s; then q = i tanh(g)
    s / st(g), R_x = x Wᵀ q, R_h' = h' Uᵀ q. A projection of h divides R_h as a dense layer does. GRU, with h = z h' + (1 - z)
    tanh(g), g = W x + b + r (U h' + d): h takes the place of c, and U that of r U. RNN, with h = f(g): q = R_h / st(g). Biases
    absorb their share of g. Steps that are written out have the same flow: of a step, each state is divided among its terms.

    Parameters
    ----------
    epsilon
        The stabilizer st, as for `Epsilon`.

    References
    ----------
    .. [1] Arras et al. 2017, https://aclanthology.org/W17-5221
    .. [2] "LRP-all" in Arras et al. 2019, https://doi.org/10.1007/978-3-030-28954-6_11
    """

    proportional = True

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if layer.kind is not Recurrent:
            raise RuleError(f"it is for recurrent layers, but this layer is of kind {layer.kind.__name__}")

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if call.operation.listed.entries.elementwise:
            state, terms = _step(call, self.epsilon)
            ratio = relevance * state.inverse
            return tuple(terms[name] * ratio if name in terms else None for name in call.operation.names_of_inputs)
        flow = call.once("flow", lambda: _Flow(call, self._stabilized))
        by_name = flow.to_inputs(flow.of_states(relevance))
        return tuple(by_name[name] for name in call.operation.names_of_inputs)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        if call.operation.listed.entries.elementwise:
            state, terms = _step(call, self.epsilon)
            ratio, inputs = relevance * state.inverse, call.operation.names_of_inputs
            constants = sum((term * ratio).sum() for name, term in terms.items() if name not in inputs)
            return added([state.withheld(relevance), {"constants": constants}])
        flow = _Flow(call, self._stabilized)
        totals = flow.of_states(relevance)
        others = {name: value for name, value in flow.to_inputs(totals).items() if name not in call.operation.names_of_inputs}
        constants = sum(value.sum() for value in others.values() if value is not None)
        return added([*flow.withheld(relevance, totals), {"bias": flow.taken_by_biases(totals), "constants": constants}])

    def _stabilized(self, total: torch.Tensor) -> torch.Tensor:
        """A stabilized denominator. Shape (steps, batch, units); a stabilizer sees the batch first."""
        return self.epsilon(total.transpose(0, 1)).transpose(0, 1)


@dataclass
class _Total:
    """A sum whose relevance is divided among its terms, and one over its stabilized value (0 where that is 0)."""

    value: torch.Tensor
    stabilized: torch.Tensor
    inverse: torch.Tensor

    def withheld(self, relevance: torch.Tensor) -> Absorbed:
        """The share of the stabilizer. A sum of zero has no term that could take a share."""
        kept = torch.where(self.value == 0, relevance, relevance * self.inverse * (self.stabilized - self.value))
        nothing = torch.zeros_like(kept)
        return {
            "stabilizer": torch.where(self.value == 0, nothing, kept).sum(),
            "absent": torch.where(self.value == 0, kept, nothing).sum(),
        }


def _total(value: torch.Tensor, stabilizer: StabilizerFunction) -> _Total:
    stabilized = stabilizer(value)
    zero = stabilized == 0
    inverse = torch.where(zero, torch.zeros_like(value), 1.0 / torch.where(zero, torch.ones_like(value), stabilized))
    return _Total(value, stabilized, inverse)


def _step(call: LayerCall, stabilizer: StabilizerFunction) -> tuple[_Total, dict[str, torch.Tensor]]:
    """The state that a step that is written out computes, and its terms by the name of their signal."""
    arguments = call.arguments()
    lets_through = "value" in arguments
    terms = {"value": call.own_output()} if lets_through else terms_of_step(arguments)
    return _total(state_of(terms), stabilizer), terms


class _Flow:
    """The factors of relevance in one call, all of shape (steps, batch, ...) in the order in which the steps are run."""

    def __init__(self, call: LayerCall, stabilized: StabilizerFunction) -> None:
        arguments = call.arguments()
        self.arguments = arguments
        self.mode: str = arguments["mode"]
        self.layout: tuple[bool, bool] = (arguments["reverse"], arguments["batch_first"])
        self.of_cell = arguments["result"] == CELL
        run = run_of(arguments, None if self.of_cell else call.own_output())
        gates = run.gates
        self.input, self.previous, self.entering, self.reset = run.input, run.previous, run.entering, gates.reset
        self.candidate = _total(gates.candidate, stabilized)
        self.state: _Total | None = None  # of the cell of an LSTM, of a GRU
        self.projected: _Total | None = None
        self.take, self.keep = self.candidate.inverse, None  # relevance of the state -> q, and the state before
        if gates.keep is not None:
            self.state = _total(run.values, stabilized)
            self.take = self.take * run.entering * self.state.inverse
            self.keep = gates.keep * run.before * self.state.inverse
            if arguments["weight_hr"] is not None and gates.out is not None:
                self.projected = _total(run.states, stabilized)
                self.unprojected = gates.out * torch.tanh(run.values)
        self.weight_x, self.weight_h = (self._of_candidate(arguments[name]) for name in ("weight_ih", "weight_hh"))

    def _of_candidate(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of a weight or bias that compute the candidate: the third block of an LSTM and a GRU."""
        units = self.candidate.value.shape[-1]
        return parameter if self.state is None else parameter[2 * units : 3 * units]

    def of_states(self, relevance: torch.Tensor) -> torch.Tensor:
        """The relevance of the state at each step, from that of the layer's result. Shape (steps, batch, units)."""
        own = None if self.of_cell else in_time(relevance, *self.layout)
        last = relevance if self.of_cell else None
        projection: list[Any] = [None] * 3
        if self.projected is not None:
            projection = [self.arguments["weight_hr"], self.unprojected, self.projected.inverse]
        values: Any = (own, last, self.previous, self.take, self.keep, self.reset, self.weight_h, *projection)
        # Compilers would make several operations of each step.
        result: torch.Tensor = (_relevance_loop if torch.compiler.is_compiling() else _relevance_of_states)(*values)
        return result

    def _to_hidden(self, totals: torch.Tensor) -> torch.Tensor:
        """The relevance of the hidden state before each step."""
        ratios = self.take * totals
        return self.previous * ((ratios if self.reset is None else ratios * self.reset) @ self.weight_h)

    def to_inputs(self, totals: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The relevance of the layer's data arguments, from that of its states."""
        input = self.input * ((self.take * totals) @ self.weight_x)
        hidden, of_state = self._to_hidden(totals)[0], None if self.keep is None else self.keep[0] * totals[0]
        if self.mode == "gru" and of_state is not None:
            hidden, of_state = hidden + of_state, None
        return {
            "input": out_of_time(input, self.arguments["input"].ndim, *self.layout),
            "hidden": hidden,
            "cell": of_state,
        }

    def withheld(self, relevance: torch.Tensor, totals: torch.Tensor) -> list[Absorbed]:
        """The shares of the stabilizers, given the relevance of the layer's result and that of its states."""
        of_candidate = totals
        accounts = []
        if self.state is not None:
            accounts.append(self.state.withheld(totals))
            of_candidate = self.entering * self.state.inverse * totals
        if self.projected is not None:
            later = self._to_hidden(totals)[1:]
            of_hidden = torch.cat([later, torch.zeros_like(self.previous[:1])])
            of_hidden = of_hidden if self.of_cell else of_hidden + in_time(relevance, *self.layout)
            accounts.append(self.projected.withheld(of_hidden))
        return [*accounts, self.candidate.withheld(of_candidate)]

    def taken_by_biases(self, totals: torch.Tensor) -> torch.Tensor:
        """The share of the biases in the candidates."""
        ratios = self.take * totals
        taken = torch.zeros_like(ratios[0, 0, 0])
        for name, scale in (("bias_ih", None), ("bias_hh", self.reset)):
            bias = self.arguments[name]
            if bias is not None:
                taken = taken + ((ratios if scale is None else ratios * scale) * self._of_candidate(bias)).sum()
        return taken


# --- the loop over time -------------------------------------------------------------------------------------------------------


def _relevance_of_states(
    relevance: torch.Tensor | None,
    last: torch.Tensor | None,
    previous: torch.Tensor,
    take: torch.Tensor,
    keep: torch.Tensor | None,
    reset: torch.Tensor | None,
    weight: torch.Tensor,
    projection: torch.Tensor | None,
    unprojected: torch.Tensor | None,
    inverse: torch.Tensor | None,
) -> torch.Tensor:
    """The relevance of the state at each step, from the last one backward. See `SignalTakesAll`.

    `relevance`: of the hidden states that the layer returns. `last`: of the last state of the cell. `projection`, `unprojected`
    and `inverse`: the weight that projects hidden states, its input, and one over its stabilized output.
    """
    totals: list[torch.Tensor] = []
    of_hidden, of_state = None, last
    for step in reversed(range(len(take))):
        if relevance is not None:
            of_hidden = relevance[step] if of_hidden is None else of_hidden + relevance[step]
        if of_hidden is not None:
            passed = of_hidden
            if projection is not None and unprojected is not None and inverse is not None:
                passed = unprojected[step] * ((of_hidden * inverse[step]) @ projection)
            of_state = passed if of_state is None else of_state + passed
        assert of_state is not None
        totals.append(of_state)
        ratio = take[step] * of_state
        of_hidden = previous[step] * ((ratio if reset is None else ratio * reset[step]) @ weight)
        of_state = None if keep is None else keep[step] * of_state
    return torch.stack(totals[::-1])


def _like_states(*values: Any) -> torch.Tensor:
    return torch.empty_like(values[3])


_relevance_loop = opaque_operator(
    "relevance_of_states(Tensor? relevance, Tensor? last, Tensor previous, Tensor take, Tensor? keep, Tensor? reset, "
    "Tensor weight, Tensor? projection, Tensor? unprojected, Tensor? inverse) -> Tensor",
    _relevance_of_states,
    _like_states,
)
