"""Recurrences over time that are linear in their signal: state space models and linear attention.

Their factors (decay, selection, keys) depend on the input, too, but scale the signal as gates do: the signal takes all
relevance, as in MambaLRP (Rezaei Jafari et al. 2024, https://arxiv.org/abs/2406.07592).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lrpfx.ir import kinds
from lrpfx.ir.operator import Between, Bound, Operator
from lrpfx.operators import mixing
from lrpfx.operators.functions import kept_in_traces
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import call, signal, weight
from lrpfx.support.torch_internals import is_traced

# --- functions --------------------------------------------------------------------------------------------------------------


@kept_in_traces
def linear_recurrence(input: torch.Tensor, factors: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """h_t = factors_t h_(t-1) + input_t along the dimension `dim`, from h = 0, as one tensor of all h. Shapes are equal."""
    steps: torch.Tensor
    decays: torch.Tensor
    steps, decays = torch.broadcast_tensors(input, factors)
    if not is_traced(input):
        states = []
        state = torch.zeros_like(steps.select(dim, 0))
        for step, decay in zip(steps.unbind(dim), decays.unbind(dim), strict=True):
            state = decay * state + step
            states.append(state)
        return torch.stack(states, dim)
    # A graph of log2(length) operations: a state after n steps, and the product of the last n factors, give those of 2 n steps.
    length, distance = input.shape[dim], 1
    while distance < length:
        before = delayed(steps, distance, dim)
        steps = steps + decays * before
        decays = decays * delayed(decays, distance, dim)
        distance *= 2
    return steps


def delayed(value: torch.Tensor, distance: int, dim: int) -> torch.Tensor:
    """The value a number of steps before, 0 before the first."""
    kept = value.narrow(dim, 0, value.shape[dim] - distance)
    return torch.cat([torch.zeros_like(value.narrow(dim, 0, distance)), kept], dim)


def recurrence_backwards(gradient: torch.Tensor, factors: torch.Tensor, dim: int) -> torch.Tensor:
    """The transposed map of `linear_recurrence`: g_t = gradient_t + factors_(t+1) g_(t+1)."""
    next_factors = delayed(factors.flip(dim), 1, dim)
    return linear_recurrence(gradient.flip(dim), next_factors, dim).flip(dim)


@kept_in_traces
def selective_scan(
    input: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, into_state: torch.Tensor, out_of_state: torch.Tensor
) -> torch.Tensor:
    """The recurrence of Mamba: h_t = exp(step_t decay) h_(t-1) + step_t into_state_t input_t; the result is out_of_state_t h_t.

    Input, step and result (batch, channels, time), decay (channels, state), the others (batch, state, time).
    """
    factors, entering, leaving = _selected(step, decay, into_state, out_of_state)
    states = linear_recurrence(entering * input.unsqueeze(2), factors, 3)
    return (states.to(leaving.dtype) * leaving).sum(2)


def _selected(
    step: torch.Tensor, decay: torch.Tensor, into_state: torch.Tensor, out_of_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What states, inputs and results are multiplied by. Shapes (batch, channels, state, time), or with one channel."""
    factors = torch.exp(decay[None, :, :, None] * step.unsqueeze(2))
    return factors, step.unsqueeze(2) * into_state.unsqueeze(1), out_of_state.unsqueeze(1)


def _selective_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    named = (arguments[name] for name in ("step", "decay", "into_state", "out_of_state"))
    factors, entering, leaving = _selected(*named)
    states = recurrence_backwards((leaving * gradient.unsqueeze(2)).to(factors.dtype), factors, 3)
    return ((states * entering).sum(2),)


@kept_in_traces
def weighted_key_value(input: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The linear attention of RWKV: means of the values `input` up to each time, weighted by exp(key + decay * age).

    The weight of the current value is exp(key + first). `decay` is not positive. Input, key and result (batch, time, channels),
    the others (channels,).
    """
    factors, entering, held, own = _weights(key, decay, first)
    states = linear_recurrence(entering * input, factors, 1)
    return (held * delayed(states, 1, 1) + own * input).to(input.dtype)


def _weights(key: torch.Tensor, decay: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factors of the sum of values, the weight with which a value enters it, and two shares in the result.

    The shares are those of the sum and of the current value. The sum is relative to the exponential of its largest exponent.
    """
    ages = decay * torch.arange(key.shape[1], device=key.device)[:, None].to(key.dtype)
    largest = torch.cummax(key - ages, 1).values + ages  # of the exponents up to each time
    before = torch.cat([torch.full_like(largest[:, :1], -torch.inf), largest[:, :-1]], 1)  # one step before, without its decay
    factors, entering = torch.exp(before + decay - largest), torch.exp(key - largest)
    total = linear_recurrence(entering, factors, 1)
    most = torch.maximum(before, key + first)
    held, own = torch.exp(before - most), torch.exp(key + first - most)
    denominator = held * delayed(total, 1, 1) + own
    return factors, entering, held / denominator, own / denominator


def _weighted_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    factors, entering, held, own = _weights(arguments["key"], arguments["decay"], arguments["first"])
    of_states = delayed((held * gradient).flip(1), 1, 1).flip(1)
    return ((entering * recurrence_backwards(of_states, factors, 1) + own * gradient).to(gradient.dtype),)


@kept_in_traces
def gated_delta_rule(
    input: torch.Tensor, query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The memory of gated DeltaNet (Yang et al. 2025, https://arxiv.org/abs/2412.06464), which values are written into.

    S_t = exp(decay_t) (I - beta_t key_t key_t') S_(t-1) + beta_t key_t input_t'; the result is S_t' query_t. Input and result
    (batch, heads, time, values), query and key (batch, heads, time, keys), the others (batch, heads, time).
    """
    read, corrected = delta_matrices(query, key, decay, beta)
    return read @ solved(corrected, beta.unsqueeze(-1) * input)


def delta_matrices(
    query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each time reads of what the times up to it have written, and takes away of what those before it had written.

    Shapes (batch, heads, time, time).
    """
    kept = decays_between(decay)
    return query @ key.mT * kept, ((beta.unsqueeze(-1) * key) @ key.mT * kept).tril(-1)


@kept_in_traces
def channel_delta_rule(
    input: torch.Tensor, query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """As `gated_delta_rule`, with a decay for each channel of the keys (Kimi Linear, https://arxiv.org/abs/2510.26692).

    S_t = (I - beta_t key_t key_t') diag(exp(decay_t)) S_(t-1) + beta_t key_t input_t'. Decay has the shape of the keys.
    """
    read, corrected = channel_matrices(query, key, decay, beta)
    return read @ solved(corrected, beta.unsqueeze(-1) * input)


def channel_matrices(
    query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `delta_matrices`. One channel follows the other: all at once would take as many times the memory."""
    read, corrected = torch.zeros_like(query @ key.mT), torch.zeros_like(key @ key.mT)
    for place in range(key.shape[-1]):
        kept = decays_between(decay[..., place]) * key[..., place].unsqueeze(-2)
        read = read + query[..., place].unsqueeze(-1) * kept
        corrected = corrected + key[..., place].unsqueeze(-1) * kept
    return read, (beta.unsqueeze(-1) * corrected).tril(-1)


def decays_between(decay: torch.Tensor) -> torch.Tensor:
    """The product of the factors exp(decay) after each time up to another, later one; 0 for an earlier one."""
    total = decay.cumsum(-1)
    exponents = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(exponents.shape[-2:], dtype=torch.bool, device=decay.device).triu(1)
    return exponents.masked_fill(later, -torch.inf).exp()


def solved(matrix: torch.Tensor, result: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """X in (1 + matrix) X = result, for a matrix whose entries above its diagonal and on it are 0, or, if `upper`, below it."""
    if not is_traced(result):
        found: torch.Tensor = torch.linalg.solve_triangular(matrix, result, upper=upper, unitriangular=True)
        return found
    # ONNX has no such operation. The inverse of 1 - P is the product of 1 + P, 1 + P², 1 + P⁴, …, as a power of P is 0.
    power, distance = -matrix, 1
    while distance < matrix.shape[-1]:
        result = result + power @ result
        power, distance = power @ power, 2 * distance
    return result


def _delta_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    beta, decay, key = arguments["beta"], arguments["decay"], arguments["key"]
    matrices = channel_matrices if decay.ndim == key.ndim else delta_matrices
    read, corrected = matrices(arguments["query"], key, decay, beta)
    return (beta.unsqueeze(-1) * solved(corrected.mT, read.mT @ gradient, upper=True),)


def _recurrence_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    return (recurrence_backwards(gradient, arguments["factors"].expand_as(gradient), arguments["dim"]),)


# --- rows ------------------------------------------------------------------------------------------------------------------


def _delta_row(name: str, function: Callable[..., torch.Tensor], decay: Any) -> Operator:
    """The row of a delta rule. `decay`: its sample, for each step or for each channel of the keys, too."""
    return standard_row(
        name,
        kinds.Scan,
        "input query key decay beta",
        function,
        between=Between.DELTA_RULE,
        whole={"(Tensor input, Tensor query, Tensor key, Tensor decay, Tensor beta) -> Tensor": (function,)},
        empty_result=lambda input, query, key, decay, beta: torch.empty_like(input),
        controls="query key decay beta",
        adjoint=_delta_adjoint,
        sample=call(
            input=signal(2, 2, 5, 3),
            query=signal(2, 2, 5, 4),
            key=signal(2, 2, 5, 4),
            decay=decay,
            beta=weight(1, 2, 5, low=0.1, high=0.9),
        ),
    )


ROWS: tuple[Operator, ...] = (
    standard_row(
        "linear_recurrence",
        kinds.Scan,
        "input factors dim=1",
        linear_recurrence,
        between=Between.RECURRENCE,
        whole={"(Tensor input, Tensor factors, int dim=1) -> Tensor": (linear_recurrence,)},
        empty_result=lambda input, factors, dim=1: torch.empty_like(input),
        controls="factors",
        adjoint=_recurrence_adjoint,
        accumulates=mixing.given(2, 1),
        sample=call(input=signal(2, 5, 3), factors=signal(2, 5, 3, low=0.2, high=0.9), dim=1),
    ),
    standard_row(
        "selective_scan",
        kinds.Scan,
        "input step decay into_state out_of_state",
        selective_scan,
        between=Between.SELECTIVE_SCAN,
        whole={
            "(Tensor input, Tensor step, Tensor decay, Tensor into_state, Tensor out_of_state) -> Tensor": (selective_scan,),
        },
        empty_result=lambda input, step, decay, into_state, out_of_state: out_of_state.new_empty(input.shape),
        controls="step decay into_state out_of_state",
        adjoint=_selective_adjoint,
        sample=call(
            input=signal(2, 3, 5),
            step=signal(2, 3, 5, low=0.1, high=1.0),
            decay=weight(3, 4, low=-2.0, high=-0.1),
            into_state=signal(2, 4, 5),
            out_of_state=weight(1, 4, 5),
        ),
    ),
    standard_row(
        "weighted_key_value",
        kinds.Scan,
        "input key decay first",
        weighted_key_value,
        between=Between.WEIGHTED_MEAN,
        whole={"(Tensor input, Tensor key, Tensor decay, Tensor first) -> Tensor": (weighted_key_value,)},
        empty_result=lambda input, key, decay, first: torch.empty_like(input),
        controls="key decay first",
        adjoint=_weighted_adjoint,
        accumulates=mixing.given(default=1),
        sample=call(input=signal(2, 5, 3), key=signal(2, 5, 3), decay=weight(3, low=-2.0, high=-0.1), first=weight(3)),
    ),
    _delta_row("gated_delta_rule", gated_delta_rule, signal(2, 2, 5, low=-2.0, high=-0.1)),
    _delta_row("channel_delta_rule", channel_delta_rule, signal(2, 2, 5, 4, low=-2.0, high=-0.1)),
)
