"""Forms of recurrent layers and scans that carry the multipliers of differences from a reference through their steps."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.operators.layer import Operation
from lrpfx.operators.recurrent import LSTM, RELU, Run, Slopes, lstm_step, pulled_through_steps, run_of
from lrpfx.operators.scans import (
    channel_matrices,
    decays_between,
    delayed,
    delta_matrices,
    linear_recurrence,
    recurrence_backwards,
    solved,
)
from lrpfx.runtime.differences import BySlopes, DifferenceForm, Tensors, slope, through_slopes


def _mean(value: Any, reference: Any) -> torch.Tensor:
    mean: torch.Tensor = (value + reference) / 2
    return mean


# --- recurrent layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfRecurrent(DifferenceForm):
    """The steps of a recurrent layer from the last one backward, as products and slopes."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        count = operation.inputs
        arguments = operation.arguments(values)
        runs = run_of(arguments), run_of(operation.arguments([*references, *values[count:]]))
        found = pulled_through_steps(multiplier, values[:count], arguments, _slopes(*runs, arguments))
        return [one for one in found if one is not None]


def _slopes(run: Run, other: Run, arguments: dict[str, Any]) -> Slopes:
    mode, gates, other_gates = arguments["mode"], run.gates, other.gates
    activation = torch.relu if mode == RELU else torch.tanh
    candidate, other_candidate = activation(gates.candidate), activation(other_gates.candidate)
    of_candidate = slope(activation, gates.candidate, other_gates.candidate)
    if gates.keep is None:
        return Slopes([of_candidate])

    def before_sigmoids(one: Run) -> list[torch.Tensor]:
        of_input = torch.nn.functional.linear(one.input, arguments["weight_ih"], arguments["bias_ih"])
        return list((of_input + one.hidden_part).chunk(4 if mode == LSTM else 3, -1))

    blocks, other_blocks = before_sigmoids(run), before_sigmoids(other)

    def of_gate(place: int) -> torch.Tensor:
        """The slope of a gate by what its sigmoid is taken of."""
        return slope(torch.sigmoid, blocks[place], other_blocks[place])

    keep, entered = _mean(gates.keep, other_gates.keep), _mean(gates.enter, other_gates.enter) * of_candidate
    if mode == LSTM:
        states, other_states = run.values, other.values
        of_arguments = [
            _mean(candidate, other_candidate) * of_gate(0),
            _mean(run.before, other.before) * of_gate(1),
            entered,
        ]
        opens = _mean(gates.out, other_gates.out) * slope(torch.tanh, states, other_states)
        of_out = _mean(states.tanh(), other_states.tanh()) * of_gate(3)
        return Slopes(of_arguments, keep, opens=opens, of_out=of_out)
    reset_part = _mean(run.hidden_part.chunk(3, -1)[2], other.hidden_part.chunk(3, -1)[2])
    kept = _mean(run.previous - candidate, other.previous - other_candidate)
    of_arguments = [entered * reset_part * of_gate(0), kept * of_gate(1), entered]
    return Slopes(of_arguments, keep, _mean(gates.reset, other_gates.reset))


@dataclass(frozen=True)
class OfRecurrentStep(DifferenceForm):
    """The hidden state of an LSTM after one step, as a product of the out gate and the tanh of a state with slopes."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        names, others = operation.names_of_inputs, values[operation.inputs :]
        ours, theirs = operation.arguments(values), operation.arguments([*references, *others])
        if ours["out"] is None:
            return BySlopes().multipliers(operation, values, references, multiplier)
        state, other_state = (lstm_step(**{**one, "out": None}) for one in (ours, theirs))
        of_state = multiplier * _mean(ours["out"].sigmoid(), theirs["out"].sigmoid()) * slope(torch.tanh, state, other_state)
        of_out = multiplier * _mean(state.tanh(), other_state.tanh()) * slope(torch.sigmoid, ours["out"], theirs["out"])

        def state_of(*inputs: torch.Tensor) -> torch.Tensor:
            return lstm_step(**{**operation.arguments([*inputs, *others]), "out": None})

        found = through_slopes(state_of, values[: operation.inputs], references, of_state)
        return [of_out if name == "out" else one for name, one in zip(names, found, strict=True)]


# --- scans -------------------------------------------------------------------------------------------------------------------


class _OfScan(DifferenceForm):
    """A scan, whose factors are inputs beside its signal."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        ours, theirs = operation.arguments(values), operation.arguments([*references, *values[operation.inputs :]])
        found = self.by_name(ours, theirs, multiplier)
        names, shapes = operation.names_of_inputs, [one.shape for one in values[: operation.inputs]]
        return [found[name].sum_to_size(shape) for name, shape in zip(names, shapes, strict=True)]

    @abstractmethod
    def by_name(self, ours: dict[str, Any], theirs: dict[str, Any], multiplier: torch.Tensor) -> dict[str, torch.Tensor]:
        """The multipliers of the arguments, from these and those for the reference; broadcast dimensions are not summed yet."""


def _through_recurrence(
    ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], multiplier: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The multipliers of the signal and of the factors of a linear recurrence, h_t = a_t h_(t-1) + x_t."""
    (states, factors), (other_states, other_factors) = ours, theirs
    of_signal = recurrence_backwards(multiplier, _mean(factors, other_factors).expand_as(multiplier), dim)
    return of_signal, of_signal * delayed(_mean(states, other_states), 1, dim)


@dataclass(frozen=True)
class OfRecurrence(_OfScan):
    """h_t = a_t h_(t-1) + x_t: products, whose factors are means."""

    def by_name(self, ours: dict[str, Any], theirs: dict[str, Any], multiplier: torch.Tensor) -> dict[str, torch.Tensor]:
        runs = [(linear_recurrence(**one), one["factors"]) for one in (ours, theirs)]
        of_signal, of_factors = _through_recurrence(runs[0], runs[1], multiplier, ours["dim"])
        return {"input": of_signal, "factors": of_factors}


@dataclass(frozen=True)
class OfSelectiveScan(_OfScan):
    """The recurrence of Mamba: products, and factors that an exponential gives."""

    def by_name(self, ours: dict[str, Any], theirs: dict[str, Any], multiplier: torch.Tensor) -> dict[str, torch.Tensor]:
        (x, step, decay, into, leaving), others = _spread(ours), _spread(theirs)
        exponents = [one[1] * one[2] for one in ((x, step, decay), others)]
        factors, other_factors = (one.exp() for one in exponents)
        entering, other_entering = step * into, others[1] * others[3]
        states = linear_recurrence(entering * x, factors, 3)
        other_states = linear_recurrence(other_entering * others[0], other_factors, 3)
        of_product = multiplier.unsqueeze(2)
        of_states = (of_product * _mean(leaving, others[4])).to(states.dtype).expand_as(states)
        of_signal, of_factors = _through_recurrence((states, factors), (other_states, other_factors), of_states, 3)
        of_entering, of_exponent = of_signal * _mean(x, others[0]), of_factors * slope(torch.exp, exponents[0], exponents[1])
        return {
            "input": (of_signal * _mean(entering, other_entering)).sum(2),
            "step": (of_entering * _mean(into, others[3]) + of_exponent * _mean(decay, others[2])).sum(2),
            "decay": (of_exponent * _mean(step, others[1])).sum((0, 3)),
            "into_state": (of_entering * _mean(step, others[1])).sum(1),
            "out_of_state": (of_product * _mean(states, other_states)).sum(1),
        }


def _spread(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The arguments of a selective scan in shapes that are broadcast to (batch, channels, state, time)."""
    x, step, decay, into, leaving = (arguments[name] for name in ("input", "step", "decay", "into_state", "out_of_state"))
    return x.unsqueeze(2), step.unsqueeze(2), decay[None, :, :, None], into.unsqueeze(1), leaving.unsqueeze(1)


@dataclass(frozen=True)
class OfDeltaRule(_OfScan):
    """The gated delta rule as products, one of whose factors solves equations, and factors that an exponential gives."""

    def by_name(self, ours: dict[str, Any], theirs: dict[str, Any], multiplier: torch.Tensor) -> dict[str, torch.Tensor]:
        read, corrected, written = (_mean(*pair) for pair in zip(*map(_delta_run, (ours, theirs)), strict=True))
        value, beta = (_mean(ours[name], theirs[name]) for name in ("input", "beta"))
        entering = solved(corrected.mT, read.mT @ multiplier, upper=True)
        of_matrices = multiplier @ written.mT, -(entering @ written.mT).tril(-1)
        groups = zip(_groups_of_channels(ours), _groups_of_channels(theirs), strict=True)
        found = [_of_group(*pair, of_matrices, (ours["beta"], theirs["beta"])) for pair in groups]
        queries, keys, decays, betas = (list(parts) for parts in zip(*found, strict=True))
        return {
            "input": entering * beta.unsqueeze(-1),
            "query": torch.cat(queries, -1),
            "key": torch.cat(keys, -1),
            "decay": torch.stack(decays, -1) if _has_channels(ours) else decays[0],
            "beta": (entering * value).sum(-1) + torch.stack(betas).sum(0),
        }


_Group = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _has_channels(arguments: dict[str, Any]) -> bool:
    """Whether each channel of the keys has a decay of its own."""
    return bool(arguments["decay"].ndim == arguments["key"].ndim)


def _groups_of_channels(arguments: dict[str, Any]) -> list[_Group]:
    """The query, the key and the decay of each group of channels that have one decay."""
    query, key, decay = (arguments[name] for name in ("query", "key", "decay"))
    if not _has_channels(arguments):
        return [(query, key, decay)]
    return [(query[..., [one]], key[..., [one]], decay[..., one]) for one in range(key.shape[-1])]


def _of_group(
    ours: _Group, theirs: _Group, of_matrices: tuple[torch.Tensor, torch.Tensor], betas: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The multipliers of a group's query, key and decay, and its part of that of beta, from those of both matrices."""
    of_read, of_corrected = of_matrices
    query, key = (_mean(one, other) for one, other in zip(ours[:2], theirs[:2], strict=True))
    own_keys, other_keys = (one[1] @ one[1].mT for one in (ours, theirs))
    queries = _mean(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT)
    scaled = _mean(betas[0].unsqueeze(-1) * own_keys, betas[1].unsqueeze(-1) * other_keys)
    kept = _mean(decays_between(ours[2]), decays_between(theirs[2]))
    of_product = of_corrected * kept
    of_kept = (of_read * queries + of_corrected * scaled).tril()
    of_keys, of_queries = of_product * _mean(*betas).unsqueeze(-1), of_read * kept
    totals = [one[2].cumsum(-1) for one in (ours, theirs)]
    exponents = [(one.unsqueeze(-1) - one.unsqueeze(-2)).tril() for one in totals]
    of_exponents = of_kept * slope(torch.exp, exponents[0], exponents[1])
    of_total = of_exponents.sum(-1) - of_exponents.sum(-2)
    return (
        of_queries @ key,
        of_queries.mT @ query + of_keys @ key + of_keys.mT @ key,
        of_total.flip(-1).cumsum(-1).flip(-1),
        (of_product * _mean(own_keys, other_keys)).sum(-1),
    )


def _delta_run(arguments: dict[str, Any]) -> _Group:
    query, key, decay, beta = (arguments[name] for name in ("query", "key", "decay", "beta"))
    read, corrected = (channel_matrices if _has_channels(arguments) else delta_matrices)(query, key, decay, beta)
    return read, corrected, solved(corrected, beta.unsqueeze(-1) * arguments["input"])


@dataclass(frozen=True)
class OfWeightedMean(_OfScan):
    """The linear attention of RWKV by its steps: a running mean with a gate for each new value, and the total's logarithm.

    With the total S and the mean a of values so far, and D for the decay, a_t = a_(t-1) + g_t (x_t - a_(t-1)) with the gate
    g_t = sigmoid(d_t), d_t = key_t - D - log S_(t-1), and log S_t = D + log S_(t-1) + softplus(d_t). The result has another
    gate. Nothing overflows, whatever the keys are.
    """

    def by_name(self, ours: dict[str, Any], theirs: dict[str, Any], multiplier: torch.Tensor) -> dict[str, torch.Tensor]:
        (enters, leaves, signal, mean), others = _gates(ours), _gates(theirs)
        multiplier = multiplier.double()
        keeps, keeps_in_result = (
            _mean((-enters).sigmoid(), (-others[0]).sigmoid()),
            _mean((-leaves).sigmoid(), (-others[1]).sigmoid()),
        )
        gain = _mean(signal - mean, others[2] - others[3])

        def before(later: torch.Tensor) -> torch.Tensor:
            """What the step before gets of each step."""
            return delayed(later.flip(1), 1, 1).flip(1)

        of_mean = recurrence_backwards(before(keeps_in_result * multiplier), keeps, 1)
        of_gates = of_mean * gain * slope(torch.sigmoid, enters, others[0])
        of_gates = of_gates + multiplier * gain * slope(torch.sigmoid, leaves, others[1])
        share = slope(_softplus, enters, others[0])
        of_total = recurrence_backwards(before(-of_gates), 1 - share, 1)
        return {
            "input": ((1 - keeps) * of_mean + (1 - keeps_in_result) * multiplier).to(ours["input"].dtype),
            "key": (of_gates + share * of_total).to(ours["key"].dtype),
        }


def _softplus(value: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.logsigmoid(-value)  # torch's softplus rounds beyond 20


def _gates(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What the sigmoids of both gates are taken of, the values, and their weighted means before each."""
    signal, key, decay, first = (arguments[name].double() for name in ("input", "key", "decay", "first"))
    passed = decay * torch.arange(key.shape[1], device=key.device, dtype=key.dtype).unsqueeze(-1)
    total = torch.cat([torch.full_like(key[:, :1], -torch.inf), ((key - passed).logcumsumexp(1) + passed)[:, :-1]], 1)
    enters, leaves = key - decay - total, key + first - total
    means = linear_recurrence(enters.sigmoid() * signal, (-enters).sigmoid(), 1)
    return enters, leaves, signal, delayed(means, 1, 1)


# --- products of entries -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfProduct(DifferenceForm):
    """Products of several entries, one of which after another takes its value: the mean over their order and the reverse one.

    `running`: of all entries so far. For two entries, each has the mean of the other.
    """

    running: bool = False

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        value, reference = values[0], references[0]
        arguments = operation.arguments(values)
        shape, dim = value.shape, arguments["dim"]
        if dim is None:  # of all entries
            value, reference, dim = value.flatten(), reference.flatten(), 0
        of_products = multiplier
        if not self.running:
            whole = multiplier if arguments["keepdim"] and multiplier.ndim == value.ndim else multiplier.unsqueeze(dim)
            others = value.narrow(dim, 1, value.shape[dim] - 1)
            of_products = torch.cat([torch.zeros_like(others), whole.expand_as(value.narrow(dim, 0, 1))], dim)
        found = _one_after_another(value, reference, of_products, dim) + _one_after_another(reference, value, of_products, dim)
        return [found.reshape(shape) / 2]


def _one_after_another(first: torch.Tensor, later: torch.Tensor, multiplier: torch.Tensor, dim: int) -> torch.Tensor:
    """The product of the entries of `first` before each, times that of the entries of `later` between it and each product."""
    before = torch.cat([torch.ones_like(first.narrow(dim, 0, 1)), first.narrow(dim, 0, first.shape[dim] - 1)], dim).cumprod(dim)
    return before * recurrence_backwards(multiplier, later, dim)
