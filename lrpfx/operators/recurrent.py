"""Recurrent layers and cells: LSTM, GRU and RNN.

Torch runs all layers and directions of a module in one call. The compiler splits it into one call of `recurrent` for each layer
and direction, and a further one wherever the last state of an LSTM's cell is used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.errors import CaptureError, InputError
from lrpfx.ir import kinds
from lrpfx.ir.node import node_info
from lrpfx.ir.operator import Between, Bound, Builder, Operator
from lrpfx.operators.row import standard_row
from lrpfx.support.opaque_operator import opaque_operator
from lrpfx.support.torch_internals import FakeTensor, is_transformed

LSTM, GRU, TANH, RELU = "lstm", "gru", "rnn_tanh", "rnn_relu"  # values of the argument `mode`
STATES, CELL = "states", "cell"  # values of the argument `result`

#: The number of rows of a weight for each unit: one for its candidate, and one for each gate.
_BLOCKS = {LSTM: 4, GRU: 3, TANH: 1, RELU: 1}

Weights = Sequence[torch.Tensor | None]  # those of the input, of the hidden state, the two biases, and the projection

PACKED = (
    "packed sequences (torch.nn.utils.rnn) mix samples and steps, so their relevance cannot be told apart. Give the recurrent "
    "layer the padded tensor, and read each sample's output at its own last step, as in output[torch.arange(batch), "
    "lengths - 1]: in one direction, this computes the same. In two directions, explain samples of equal length together, "
    "without padding"
)

# --- one layer in one direction ----------------------------------------------------------------------------------------------


class Gates(NamedTuple):
    """The candidate and the gates of steps, each with one entry per unit. A layer lacks the gates that are None.

    The state of an LSTM's cell, and of a GRU, is keep * (the state before) + enter * activation(candidate).
    """

    candidate: torch.Tensor  # before its activation
    keep: torch.Tensor | None = None
    enter: torch.Tensor | None = None
    reset: torch.Tensor | None = None  # scales the hidden state's part of the candidate (GRU)
    out: torch.Tensor | None = None  # scales tanh(state), which gives the hidden state (LSTM)


def gates_of(mode: str, from_input: torch.Tensor, from_hidden: torch.Tensor) -> Gates:
    """Candidate and gates, from the affine functions of the input and of the hidden state before."""
    if mode == LSTM:
        enter, keep, candidate, out = (from_input + from_hidden).chunk(4, -1)
        return Gates(candidate, torch.sigmoid(keep), torch.sigmoid(enter), None, torch.sigmoid(out))
    if mode == GRU:
        reset_input, keep_input, candidate_input = from_input.chunk(3, -1)
        reset_hidden, keep_hidden, candidate_hidden = from_hidden.chunk(3, -1)
        reset, keep = torch.sigmoid(reset_input + reset_hidden), torch.sigmoid(keep_input + keep_hidden)
        return Gates(candidate_input + reset * candidate_hidden, keep, 1.0 - keep, reset)
    return Gates(from_input + from_hidden)


def entering(mode: str, gates: Gates) -> torch.Tensor:
    """The part of the state that comes from the candidate."""
    value = torch.relu(gates.candidate) if mode == RELU else torch.tanh(gates.candidate)
    return value if gates.enter is None else gates.enter * value


def in_time(value: torch.Tensor, reverse: bool, batch_first: bool) -> torch.Tensor:
    """A sequence with its steps as the first dimension, in the order in which they are run. A matrix is one step."""
    if value.ndim == 2:
        return value.unsqueeze(0)
    steps = value.transpose(0, 1) if batch_first else value
    return steps.flip(0) if reverse else steps


def out_of_time(steps: torch.Tensor, dimensions: int, reverse: bool, batch_first: bool) -> torch.Tensor:
    """The inverse of `in_time`, for a sequence of so many dimensions."""
    if dimensions == 2:
        return steps.squeeze(0)
    ordered = steps.flip(0) if reverse else steps
    return ordered.transpose(0, 1) if batch_first else ordered


def recurrent(
    input: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
    weight_hr: torch.Tensor | None = None,
    mode: str = LSTM,
    reverse: bool = False,
    batch_first: bool = False,
    result: str = STATES,
) -> torch.Tensor:
    """One layer in one direction: its hidden states at all steps or, with the result "cell", the last state of its cell.

    `input` has shape (steps, batch, features), (batch, steps, features) with `batch_first`, or (batch, features) for one step;
    the hidden states have the same layout. `hidden` and `cell`, the initial states, and the last state of the cell have shape
    (batch, units). The weights are those of torch.nn under the same names: `weight_hr` projects the hidden states.
    """
    weights = (weight_ih, weight_hh, bias_ih, bias_hh, weight_hr)
    _check_shapes(input, hidden, cell, weights, mode, batch_first)
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():  # inside a rule, which has no use for a gradient
        return _whole(input, hidden, cell, weights, mode, reverse, batch_first, result)  # type: ignore[no-any-return]
    # Torch would trace kernels that other runtimes lack, and its kernel for the LSTM on a CPU keeps nothing for a derivative
    # that is taken where gradients are disabled, as in a rule.
    run = _by_steps if isinstance(input, FakeTensor) or _differentiated(input, hidden, cell, *weights) else _by_torch
    return run(input, hidden, cell, weights, mode, reverse, batch_first, result)


def _differentiated(*values: torch.Tensor | None) -> bool:
    """Whether torch.func takes a derivative by any of these."""
    return not torch.compiler.is_compiling() and any(value is not None and is_transformed(value) for value in values)


def _check_shapes(
    input: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None, weights: Weights, mode: str, batch_first: bool
) -> None:
    """Raise `InputError` for shapes that do not fit together: torch's kernel would read beyond the tensors."""
    weight_ih, weight_hh, bias_ih, bias_hh, weight_hr = weights
    if weight_ih is None or weight_hh is None or input.ndim not in (2, 3):
        raise InputError(f"a recurrent layer takes an input of 2 or 3 dimensions, not {input.ndim}", topic="inputs-do-not-fit")
    batch = input.shape[0 if batch_first or input.ndim == 2 else 1]
    rows = weight_hh.shape[0]
    units = rows // _BLOCKS[mode]
    size = units if weight_hr is None else weight_hr.shape[0]
    expected = [
        ("the initial hidden state", hidden, (batch, size)),
        ("the initial state of the cell", cell, (batch, units)),
        ("the weight of the input", weight_ih, (rows, input.shape[-1])),
        ("the weight of the hidden state", weight_hh, (units * _BLOCKS[mode], size)),
        ("a bias", bias_ih, (rows,)),
        ("a bias", bias_hh, (rows,)),
        ("the projection", weight_hr, (size, units)),
    ]
    for what, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(
                f"{what} of a recurrent layer has the shape {tuple(tensor.shape)}, but with an input of shape "
                f"{tuple(input.shape)} it needs {shape}",
                topic="inputs-do-not-fit",
            )


def _by_steps(
    input: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weights: Weights,
    mode: str,
    reverse: bool,
    batch_first: bool,
    result: str,
) -> torch.Tensor:
    """`recurrent` as plain operations, several for each step: for programs of a fixed length."""
    weight_ih, weight_hh, bias_ih, bias_hh, weight_hr = weights
    assert weight_ih is not None and weight_hh is not None
    state = hidden if cell is None else cell
    states = []
    for from_input in functional.linear(in_time(input, reverse, batch_first), weight_ih, bias_ih).unbind(0):
        gates = gates_of(mode, from_input, functional.linear(hidden, weight_hh, bias_hh))
        state = entering(mode, gates) if gates.keep is None else entering(mode, gates) + gates.keep * state
        hidden = state if gates.out is None else gates.out * torch.tanh(state)
        hidden = hidden if weight_hr is None else functional.linear(hidden, weight_hr)
        states.append(hidden)
    return state if result == CELL else out_of_time(torch.stack(states), input.ndim, reverse, batch_first)


def _by_torch(
    input: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weights: Weights,
    mode: str,
    reverse: bool,
    batch_first: bool,
    result: str,
) -> torch.Tensor:
    """`recurrent` by torch's own kernel."""
    weight_ih, weight_hh, bias_ih, bias_hh, weight_hr = weights
    biases = [] if bias_ih is None and bias_hh is None else [bias_ih, bias_hh]
    given = [weight for weight in biases if weight is not None][:1]
    biases = [torch.zeros_like(given[0]) if bias is None else bias for bias in biases]
    projection = [] if weight_hr is None else [weight_hr]
    options: Any = ([weight_ih, weight_hh, *biases, *projection], bool(biases), 1, 0.0, False, False, False)
    steps, initial = in_time(input, reverse, batch_first), hidden[None]
    if cell is None:
        states = getattr(torch, mode)(steps, initial, *options)[0]
    else:
        states, _, last = torch.lstm(steps, (initial, cell[None]), *options)
        if result == CELL:
            return last.squeeze(0)
    return out_of_time(states, input.ndim, reverse, batch_first)


def _empty_result(
    input: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None, weights: Weights, *settings: Any
) -> torch.Tensor:
    of_cell = cell is not None and settings[-1] == CELL
    return input.new_empty(cell.shape if of_cell and cell is not None else (*input.shape[:-1], hidden.shape[-1]))


_whole = opaque_operator(
    "recurrent(Tensor input, Tensor hidden, Tensor? cell, Tensor?[] weights, str mode, bool reverse, bool batch_first, "
    "str result) -> Tensor",
    _by_torch,
    _empty_result,
    by_parts=_by_steps,
)

# --- derivatives -------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one call of `recurrent` computes at each step: tensors of shape (steps, batch, ...) in the order of the steps."""

    input: torch.Tensor
    states: torch.Tensor  # hidden states
    previous: torch.Tensor  # the hidden state before each step
    gates: Gates
    hidden_part: torch.Tensor  # the affine function of the hidden state before
    entering: torch.Tensor
    values: torch.Tensor  # the states of an LSTM's cell; otherwise the hidden states
    before: torch.Tensor  # the value before each step


def run_of(arguments: Bound, states: torch.Tensor | None = None) -> Run:
    """The run of a call. `states`: its hidden states as it returns them, computed if missing."""
    if states is None:
        states = recurrent(**{**arguments, "result": STATES})
    mode, layout = arguments["mode"], (arguments["reverse"], arguments["batch_first"])
    input, states = in_time(arguments["input"], *layout), in_time(states, *layout)
    previous = torch.cat([arguments["hidden"].unsqueeze(0), states[:-1]])
    hidden_part = functional.linear(previous, arguments["weight_hh"], arguments["bias_hh"])
    gates = gates_of(mode, functional.linear(input, arguments["weight_ih"], arguments["bias_ih"]), hidden_part)
    values, before, entered = states, previous, entering(mode, gates)
    if arguments["cell"] is not None and gates.keep is not None:
        values = _cells(gates.keep, entered, arguments["cell"])
        before = torch.cat([arguments["cell"].unsqueeze(0), values[:-1]])
    return Run(input, states, previous, gates, hidden_part, entered, values, before)


def _states_of_cell(keep: torch.Tensor, entering: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """The state at each step: keep * (the state before) + entering. Shape (steps, batch, units)."""
    states = []
    for kept, new in zip(keep.unbind(0), entering.unbind(0), strict=True):
        cell = torch.addcmul(new, kept, cell)
        states.append(cell)
    return torch.stack(states)


class Slopes(NamedTuple):
    """The slopes of one step at each step: tensors of shape (steps, batch, units) in the order of the steps.

    The value is the state of an LSTM's cell, and the hidden state of others.
    """

    of_arguments: list[torch.Tensor]  # of the value by what gates and candidate are functions of, in the order of the weights
    keep: torch.Tensor | None = None  # of the value by the value before
    reset: torch.Tensor | None = None  # of the candidate by the hidden state's part of it (GRU)
    opens: torch.Tensor | None = None  # of the hidden state by the value (LSTM)
    of_out: torch.Tensor | None = None  # of the hidden state by what the out gate is a function of (LSTM)


def _adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the data arguments among `inputs`."""
    return pulled_through_steps(gradient, inputs, arguments, _derivatives(run_of(arguments), arguments["mode"]))


def _derivatives(run: Run, mode: str) -> Slopes:
    gates = run.gates
    candidate = torch.relu(gates.candidate) if mode == RELU else torch.tanh(gates.candidate)
    of_candidate = (candidate > 0).to(candidate.dtype) if mode == RELU else 1.0 - candidate * candidate
    if mode == LSTM:
        assert gates.enter is not None and gates.keep is not None and gates.out is not None
        activated = torch.tanh(run.values)
        slopes = [candidate * _slope(gates.enter), run.before * _slope(gates.keep), gates.enter * of_candidate]
        opens, of_out = gates.out * (1.0 - activated * activated), activated * _slope(gates.out)
        return Slopes(slopes, gates.keep, opens=opens, of_out=of_out)
    if mode == GRU:
        assert gates.reset is not None and gates.keep is not None and gates.enter is not None
        entered = gates.enter * of_candidate
        reset_part = run.hidden_part.chunk(3, -1)[2]
        slopes = [entered * reset_part * _slope(gates.reset), (run.previous - candidate) * _slope(gates.keep), entered]
        return Slopes(slopes, gates.keep, gates.reset)
    return Slopes([of_candidate])


def pulled_through_steps(
    gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound, slopes: Slopes
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the data arguments among `inputs`, by the slopes of each step from the last one backward."""
    of_arguments, keep, reset, opens, of_out = slopes
    layout = arguments["reverse"], arguments["batch_first"]
    of_input = torch.stack(of_arguments, -2)
    of_hidden = of_input if reset is None else torch.stack([*of_arguments[:2], of_arguments[2] * reset], -2)
    of_states, last = (None, gradient) if arguments["result"] == CELL else (in_time(gradient, *layout), None)
    values: Any = (of_states, last, of_hidden, keep, opens, of_out, arguments["weight_hh"], arguments["weight_hr"])
    pulled = (_gradient_loop if torch.compiler.is_compiling() else _gradients_of_states)(*values)  # of values, of what opens
    of_value, of_opened = pulled.unbind(-2)
    rows, hidden_rows = of_value.unsqueeze(-2) * of_input, of_value[0].unsqueeze(-2) * of_hidden[0]
    if of_out is not None:
        rows = torch.cat([rows, (of_opened * of_out).unsqueeze(-2)], -2)
        hidden_rows = rows[0]
    kept = None if keep is None else of_value[0] * keep[0]
    hidden = hidden_rows.flatten(-2) @ arguments["weight_hh"]
    found = {
        "input": out_of_time(rows.flatten(-2) @ arguments["weight_ih"], arguments["input"].ndim, *layout),
        "hidden": hidden + kept if arguments["mode"] == GRU and kept is not None else hidden,
        "cell": kept,
    }
    return tuple(found[name] for name in _names_of(inputs, arguments))


def _names_of(inputs: Sequence[Any], arguments: Bound) -> Iterator[str]:
    """The names of the data arguments that are inputs, which have the same order."""
    left = list(inputs)
    for name in ("input", "hidden", "cell"):
        if left and arguments[name] is left[0]:
            left.pop(0)
            yield name


def _slope(gate: torch.Tensor) -> torch.Tensor:
    """The derivative of a sigmoid, from its value."""
    return gate * (1.0 - gate)


def _gradients_of_states(
    gradient: torch.Tensor | None,
    last: torch.Tensor | None,
    slopes: torch.Tensor,
    keep: torch.Tensor | None,
    opens: torch.Tensor | None,
    of_out: torch.Tensor | None,
    weight: torch.Tensor,
    projection: torch.Tensor | None,
) -> torch.Tensor:
    """The gradients of the value and of the hidden state before its projection, at each step. Shape (steps, batch, 2, units).

    `gradient`: of the hidden states that the layer returns. `last`: of the last state of the cell. `slopes`: those of the value
    by the arguments of gates and candidate. `opens`, `of_out`: of the hidden state by the value and the out gate's argument.
    """
    found: list[torch.Tensor] = []
    of_hidden, of_value = None, last
    for step in reversed(range(len(slopes))):
        if gradient is not None:
            of_hidden = gradient[step] if of_hidden is None else of_hidden + gradient[step]
        opened = of_hidden if of_hidden is None or projection is None else of_hidden @ projection
        if opens is None:
            of_value = opened
        elif opened is not None:
            of_value = opened * opens[step] if of_value is None else torch.addcmul(of_value, opened, opens[step])
        assert of_value is not None
        opened = torch.zeros_like(of_value) if opened is None else opened
        found.append(torch.stack([of_value, opened], -2))
        rows = of_value.unsqueeze(-2) * slopes[step]
        if of_out is not None:
            rows = torch.cat([rows, (opened * of_out[step]).unsqueeze(-2)], -2)
        of_hidden = rows.flatten(-2) @ weight
        kept = None if keep is None else of_value * keep[step]
        if opens is None:  # the value is the hidden state
            of_hidden, of_value = of_hidden if kept is None else of_hidden + kept, None
        else:
            of_value = kept
    return torch.stack(found[::-1])


_cells_loop = opaque_operator(
    "states_of_cell(Tensor keep, Tensor entering, Tensor cell) -> Tensor",
    _states_of_cell,
    lambda keep, entering, cell: torch.empty_like(entering),
)
# Compilers would make several operations of each step.
_gradient_loop = opaque_operator(
    "gradients_of_states(Tensor? gradient, Tensor? last, Tensor slopes, Tensor? keep, Tensor? opens, Tensor? of_out, "
    "Tensor weight, Tensor? projection) -> Tensor",
    _gradients_of_states,
    lambda *values: torch.empty_like(values[2][..., :1, :]).expand(*values[2].shape[:-2], 2, values[2].shape[-1]).contiguous(),
)


def _cells(keep: torch.Tensor, entering: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (_cells_loop if torch.compiler.is_compiling() else _states_of_cell)(keep, entering, cell)
    return result


# --- steps that are written out ----------------------------------------------------------------------------------------------


def lstm_step(
    enter: torch.Tensor,
    candidate: torch.Tensor,
    keep: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The hidden state of an LSTM after one step or, without `out`, the state of its cell.

    The gates and the candidate are given before their activations, all of one shape. Without `keep`, the cell was empty.
    """
    state = state_of(terms_of_step({"enter": enter, "candidate": candidate, "keep": keep, "cell": cell}))
    return state if out is None else torch.sigmoid(out) * torch.tanh(state)


def gru_step(candidate: torch.Tensor, gate: torch.Tensor, hidden: torch.Tensor, enters: bool = False) -> torch.Tensor:
    """The state of a GRU after one step. The gate scales the candidate if it `enters`, the state before otherwise."""
    return state_of(terms_of_step({"candidate": candidate, "gate": gate, "hidden": hidden, "enters": enters}))


def gru_reset(value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The part of a GRU's candidate, or of the state that it reads, that its gate lets through."""
    return value * torch.sigmoid(gate)


def rnn_step(candidate: torch.Tensor) -> torch.Tensor:
    """The state of an RNN after one step."""
    return torch.tanh(candidate)


def terms_of_step(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The terms of the state that a step computes, by the name of the argument that is their signal."""
    candidate = torch.tanh(arguments["candidate"])
    if "enter" in arguments:
        terms = {"candidate": torch.sigmoid(arguments["enter"]) * candidate}
        return terms if arguments["keep"] is None else {"cell": torch.sigmoid(arguments["keep"]) * arguments["cell"], **terms}
    if "hidden" not in arguments:
        return {"candidate": candidate}
    gate = torch.sigmoid(arguments["gate"])
    kept, entering = (1.0 - gate, gate) if arguments["enters"] else (gate, 1.0 - gate)
    return {"hidden": kept * arguments["hidden"], "candidate": entering * candidate}


def state_of(terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The state that has these terms."""
    first, *others = terms.values()
    return sum(others, start=first)


# --- modules and cells -------------------------------------------------------------------------------------------------------


def _options(**options: Any) -> dict[str, Any]:
    """Options of `recurrent` without those that have their default."""
    return {name: value for name, value in options.items() if value is not False and value not in (LSTM, STATES)}


def _tensors(*tensors: Any) -> list[Any]:
    """The tensors among the arguments of `recurrent`, without missing ones at the end."""
    while tensors[-1] is None:
        tensors = tensors[:-1]
    return list(tensors)


def _layers(mode: str) -> Callable[[Builder], tuple[fx.Node, ...]]:
    """All layers and directions of a module: its output, and the last hidden states and states of cells, stacked."""

    def decompose(build: Builder) -> tuple[fx.Node, ...]:
        if build["train"] and build["dropout"]:
            info = node_info(build.node)
            raise CaptureError(
                f"{info.located} is a recurrent layer with dropout in training mode. Call model.eval() before lrpfx.transform.",
                topic="training-mode",
            )
        initial = build["hx"] if mode == LSTM else (build["hx"], None)
        directions = 2 if build["bidirectional"] else 1
        count, batch_first = build["num_layers"] * directions, build["batch_first"]
        weights = build["params"]
        each = len(weights) // count
        value, hidden, cells = build["input"], list[fx.Node](), list[fx.Node]()
        for layer in range(build["num_layers"]):
            outputs = []
            for reverse in (False, True)[:directions]:
                number = layer * directions + reverse
                start = [None if one is None else build.call("select", one, 0, number, target=torch.select) for one in initial]
                own = weights[number * each : (number + 1) * each]
                biased = own if build["has_biases"] else [*own[:2], None, None, *own[2:]]
                tensors = _tensors(value, *start, *biased)
                label = "" if count == 1 else f"l{layer}_reverse" if reverse else f"l{layer}"
                options = _options(mode=mode, reverse=reverse, batch_first=batch_first)
                outputs.append(build.call("recurrent", *tensors, label=label, **options))
                last = 0 if reverse else -1
                hidden.append(build.call("select", outputs[-1], int(batch_first), last, target=torch.select))
                if mode == LSTM:
                    cells.append(build.call("recurrent", *tensors, label=f"{label}_cell".strip("_"), **options, result=CELL))
            value = outputs[0] if directions == 1 else build.call("cat", outputs, -1, target=torch.cat)
        ends = [hidden, cells] if mode == LSTM else [hidden]
        return value, *(build.call("stack", end, target=torch.stack) for end in ends)

    return decompose


def _step(mode: str) -> Callable[[Builder], fx.Node]:
    """A cell: one step of a layer."""

    def decompose(build: Builder) -> fx.Node:
        return build.call("recurrent", *_of_cell(build, build["hx"], None), label="", **_options(mode=mode))

    return decompose


def _lstm_step(build: Builder) -> tuple[fx.Node, fx.Node]:
    """An LSTM cell: the hidden state and the state of the cell after one step."""
    tensors = _of_cell(build, *build["hx"])
    return build.call("recurrent", *tensors, label=""), build.call("recurrent", *tensors, label="cell", result=CELL)


def _of_cell(build: Builder, hidden: Any, cell: Any) -> list[Any]:
    return _tensors(build["input"], hidden, cell, *(build[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")))


def _refuse_packed(build: Builder) -> None:
    info = node_info(build.node)
    raise CaptureError(f"{info.located}: {PACKED}.")


_MODULE = "input hx params has_biases num_layers dropout train bidirectional batch_first"
_CELL = "input hx w_ih w_hh b_ih=None b_hh=None"
_SPLIT = "it is split into calls of `recurrent` before any rule sees it"


def _module_row(name: str, **facts: Any) -> Operator:
    return standard_row(
        name,
        kinds.Recurrent,
        _MODULE,
        getattr(torch, name),
        data="input hx",
        aten=f"{name}.input",
        decomposition=_layers(name),
        results="output hidden cell" if name == LSTM else "output hidden",
        without_sample=_SPLIT,
        **facts,
    )


def _cell_row(name: str, **facts: Any) -> Operator:
    mode = name.removesuffix("_cell")
    return standard_row(
        name,
        kinds.Recurrent,
        _CELL,
        getattr(torch, name),
        data="input hx",
        aten=f"{name}.default",
        decomposition=_lstm_step if mode == LSTM else _step(mode),
        results="hidden cell" if mode == LSTM else "",
        without_sample=_SPLIT,
        **facts,
    )


def _step_row(name: str, function: Callable[..., Any], arguments: str, data: str, **facts: Any) -> Operator:
    return standard_row(
        name,
        kinds.Recurrent,
        arguments,
        function,
        data=data,
        elementwise=True,
        keeps_rank=True,
        without_sample="only the compiler inserts it",
        **facts,
    )


ROWS: tuple[Operator, ...] = (
    _step_row(
        "lstm_step",
        lstm_step,
        "enter candidate keep=None cell=None out=None",
        "enter candidate keep cell out",
        between=Between.RECURRENT_STEP,
    ),
    _step_row("gru_step", gru_step, "candidate gate hidden enters=False", "candidate gate hidden"),
    _step_row("gru_reset", gru_reset, "value gate", "value gate"),
    _step_row("rnn_step", rnn_step, "candidate", "candidate"),
    standard_row(
        "recurrent",
        kinds.Recurrent,
        "input hidden cell weight_ih weight_hh bias_ih=None bias_hh=None weight_hr=None mode='lstm' reverse=False "
        "batch_first=False result='states'",
        recurrent,
        data="input hidden cell",
        parameters="weight_ih weight_hh bias_ih bias_hh weight_hr",
        between=Between.RECURRENT,
        modules=[nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell],
        adjoint=_adjoint,
        keeps_rank=True,
        broadcasts=False,
        without_sample="only the compiler inserts it",
    ),
    *map(_module_row, (LSTM, GRU)),
    *(_module_row(mode, modules=[nn.RNN]) for mode in (TANH, RELU)),
    *map(_cell_row, ("lstm_cell", "gru_cell")),
    *(_cell_row(name, modules=[nn.RNNCell]) for name in ("rnn_tanh_cell", "rnn_relu_cell")),
    standard_row(
        "pack_padded_sequence",
        kinds.Recurrent,
        "input lengths batch_first",
        torch._C._VariableFunctions._pack_padded_sequence,
        indices="lengths",
        spelled="_pack_padded_sequence",
        decomposition=_refuse_packed,
        without_sample="it is refused",
    ),
)
