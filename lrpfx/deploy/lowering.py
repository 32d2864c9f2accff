"""Lowering: turn the forward and relevance computation of an explainable module into one plain inference program.

The program is an `ExportedProgram` of ATen operators without autograd and without any class of lrpfx. torch.export cannot trace
rules that save values for the backward pass. `make_fx` can, and its graph becomes the program.
"""

import copy
import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpfx.attribution.arguments import Arguments, embeddings_of, misfits
from lrpfx.attribution.computation import Computation, relevances_of
from lrpfx.attribution.condition_module import names_of_masks, places_in
from lrpfx.attribution.infinite_masks import hiding, other_reader
from lrpfx.attribution.plausibility import advice, saturates
from lrpfx.attribution.recorders import Recording, factors_of, recorder_of
from lrpfx.deploy.program import checked
from lrpfx.errors import InputError, InputTypeError, LoweringError, LrpfxError, LrpfxWarning, first_lines
from lrpfx.identity.fingerprints import fingerprint_of_tensors, other_buffers
from lrpfx.ir.guards import SharedSize, SizeCondition, is_constant
from lrpfx.ir.node import has_info, is_floating, node_info
from lrpfx.ir.operator import Probability
from lrpfx.ir.size_proofs import is_proved
from lrpfx.passes.driver import record, run_passes, verified_after_all
from lrpfx.passes.lower.exported_program import exported_program
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS, WRITTEN_MEMORY
from lrpfx.passes.program import HISTORY, PassResult, Program
from lrpfx.passes.stages import Settings, Stage, passes_of
from lrpfx.reports.assignment import assignment
from lrpfx.request.conditions import Key, ends_of, mask_name, shown
from lrpfx.request.explained_output import ExplainedOutput, computes, explained_output
from lrpfx.request.names import recorded_names, resolve_names
from lrpfx.request.outputs import OutputSelector, final_probabilities_of
from lrpfx.request.question import Question
from lrpfx.request.reduction import ALL, checked_reduction, reduced
from lrpfx.request.targets import Classes, Largest, Position, Seed, Target, TargetLike, as_target
from lrpfx.runtime.explain_module import ExplainModule, executed, explainable
from lrpfx.runtime.propagation import origin
from lrpfx.runtime.ruled_operation import Execution
from lrpfx.support.interrupts import tracing, undisturbed
from lrpfx.support.tensors import distinct, not_dense
from lrpfx.support.torch_internals import (
    OLDEST_FOR_PROGRAMS,
    FakeTensorMode,
    constant_source,
    decomposition_of,
    limits_of_size,
    make_fx,
    python_of,
    pytree,
    require,
    uncached_fakes,
)

logger = logging.getLogger(__name__)

MANIFEST, _EXAMPLES, _OPEN = "lrpfx", "lrpfx_examples", "lrpfx_open_sizes"  # keys of a program's metadata

_VERIFIED_LATER = "it is verified when it is exported"

aten = torch.ops.aten

#: Operators that a program does not contain -> functions that express them in others. ONNX lacks some, which torch.export does
#: not decompose; torch cannot infer the shapes of one. Others read or write where an index or a size in a file says, unchecked,
#: or return memory that nobody has written.
DECOMPOSED = {
    **{
        operator: decomposition_of(operator)
        for operator in (
            *(aten.silu_backward.default, aten.mish_backward.default),
            *(aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default),
            aten._native_batch_norm_legit.no_stats,
        )
    },
    **{
        operator: FORWARD_FORMS[operator]
        for operator in (
            aten._upsample_bicubic2d_aa_backward.default,
            *(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default),
            *(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default),
            *(aten.rrelu_with_noise.default, aten.rrelu_with_noise_backward.default),
        )
    },
    **WRITTEN_MEMORY,
}

#: The kinds of target that a program can take.
TARGETS = ("index", "targets", "token", "weights", "max")
FIXED = "fixed"  # what a manifest says of a program that always explains a target of its own

ProgramInputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


@tracing()
@undisturbed()
@torch.inference_mode(False)
def lower(
    explain_model: nn.Module,
    example_inputs: ProgramInputs,
    *,
    target: str | TargetLike = "index",
    number_of_targets: int | None = None,
    record: str | Sequence[str] = (),
    dynamic_batch: bool = True,
    reduce: str | None = None,
    balance: bool = False,
    output: OutputSelector = None,
    conditions: Key | Sequence[Key] = (),
) -> ExportedProgram:
    """Forward and relevance as one exported program: a function of the inputs and a target that returns a dict of tensors.

    A single input is named "input"; several keep the model's names. Parameters keep their names in `explain_model`. Nodes
    record their origin in `meta["custom"]["lrpfx"]`. Each step is logged at level INFO when it begins.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform`.
    example_inputs
        Inputs of the sizes that the program is for.
    target
        With "index" the program takes class indices of shape (batch,) as `target`, with "targets" several for each sample, of
        shape (batch, number_of_targets), with "token" a position and a token for each sample, of shape (batch, 2), for outputs
        of shape (batch, positions, tokens), with "weights" the relevance of the output, in its shape, and with "max" no target:
        it explains the largest output. With a target of `lrpfx.attribute` in place of these words, such as a class or a
        contrast, the program takes none and always explains this one.
    number_of_targets
        How many targets of each sample the program takes with "targets". Its forward runs once. All relevances, and the
        balance, have the shape (batch, number_of_targets, ...).
    record
        Nodes, as for `lrpfx.attribute`, whose relevance is also a result.
    dynamic_batch
        With True the program takes any batch size, and keeps all other sizes open that `lrpfx.transform` found open by
        torch.export, such as lengths of sequences; with False, all sizes are those of the example.
    reduce
        Relevance of an input summed over its channels ("sum"), summed in magnitude ("absolute"), summed over all else
        ("channels"), or as uint8 ("bytes").
    balance
        Whether "balance" is a result: the relevance of the inputs minus that of the output, for each sample. With conditions it
        contains the relevance that the masks hold back.
    output
        The output to explain, as for `lrpfx.attribute`.
    conditions
        Places where the program masks relevance, as for `lrpfx.condition`. It takes a mask for each of them as a further
        argument after the target, under the same names, in the shape and dtype of the value; a runner fills masks that are left
        out with ones.

    Returns
    -------
    ExportedProgram
        Its results are "output", the explained output; "output.<key>" for each tensor if the model returns several;
        "relevance", or "relevance.<input>" for each of several inputs (for integer inputs, the relevance of the embeddings that
        they index); and the relevance of each layer in `record`, under its name.

    Raises
    ------
    LoweringError
        The module cannot become a plain program, or the program differs from it.
    InputError
        An argument has an invalid value. An argument of the wrong type is an `InputTypeError`.
    """
    require("lrpfx.lower", OLDEST_FOR_PROGRAMS, LoweringError)
    module = explainable(explain_model, "lower")
    devices = {"cpu", *(tensor.device.type for tensor in (*module.parameters(), *module.buffers()))}
    with torch.device("cpu"), ExitStack() as stack:  # the program does not depend on the caller's context
        for device in sorted(devices - {"meta"}):
            stack.enter_context(torch.autocast(device, enabled=False))
        return _lowered(
            module, example_inputs, target, number_of_targets, record, dynamic_batch, reduce, balance, output, conditions
        )


def _lowered(
    module: ExplainModule,
    example_inputs: ProgramInputs,
    target: str | TargetLike,
    number_of_targets: int | None,
    record: str | Sequence[str],
    dynamic_batch: bool,
    reduce: str | None,
    balance: bool,
    output: OutputSelector,
    conditions: Key | Sequence[Key],
) -> ExportedProgram:
    if module.mask_names:
        raise InputError(
            f"{module.title} has masks of conditions: lower the module that lrpfx.transform returned, with "
            "conditions= of lower",
            topic="lowering",
        )
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise InputError(f"{module.title} is on the meta device, which holds no values to explain", topic="kinds-of-inputs")
    fixed = None
    if target == "max" or not isinstance(target, str):
        fixed, target = (Largest(), "max") if target == "max" else (as_target(target), FIXED)
        if dynamic_batch and fixed.is_of_one_batch:
            raise InputError(
                f"the target has values for each sample of one batch ({fixed}), so its program takes no other: pass "
                'dynamic_batch=False, or target="index", "token" or "weights" for a program that takes targets',
                topic="lowering",
            )
    elif target not in TARGETS:
        raise InputError(
            f"target must be one of {', '.join(map(repr, TARGETS))}, or a target of lrpfx.attribute, not {target!r}",
            topic="lowering",
        )
    counts = type(number_of_targets) is int and number_of_targets > 0
    if counts != (target == "targets") or not (counts or number_of_targets is None):
        raise InputError(
            f'number_of_targets is a positive integer with target="targets", and left out otherwise, not {number_of_targets!r} '
            f"with target={target!r}",
            topic="lowering",
        )
    checked_reduction("reduce", reduce, ALL, "lowering")
    record = recorded_names(module.unfused_graph, record)
    resolve_names(module.unfused_graph, record)  # raises an error for unknown names
    reserved = [name for name in record if name.partition(".")[0] in ("output", "relevance", "balance")]
    if reserved:
        raise InputError(
            f"a layer named {reserved[0]!r} cannot be recorded: a result of the program has that name", topic="lowering"
        )
    without = isinstance(conditions, (list, tuple)) and not conditions
    places = () if without else places_in(module.unfused_graph, conditions)
    masks = dict(zip(places, names_of_masks(places, module.argument_names), strict=True))
    inputs, constants = _named_inputs(module, example_inputs)
    placed = embeddings_of(module, Arguments({**inputs, **constants}, module))
    embeddings = {str(place[0]): tuple(names) for place, names in placed.items()}
    is_linear = _computes_output(module, {**inputs, **constants}, output)
    job = _Job(
        *(module, tuple(inputs), constants, embeddings, target, fixed, number_of_targets),
        *(record, reduce, balance, output, is_linear, masks),
    )
    final = final_probabilities_of(module.graph, output)
    row = None if final is None else node_info(final).operator
    is_softmax = row is not None and row.values.probability is Probability.OF_ALL_LOGITS
    of_classes = target in ("index", "targets") if fixed is None else fixed.is_of_classes
    if final is not None and is_softmax and of_classes and saturates(final):
        warnings.warn(LrpfxWarning(advice(final), topic="softmax-at-the-end"), stacklevel=5)
    opened = _open_sizes(module, inputs) if dynamic_batch else []
    try:
        return _program(job, inputs, opened, dynamic_batch)
    except _SizeError as error:
        if len(opened) < 2:
            raise LoweringError(str(error)) from error.__cause__
    closed = [f"dimension {number} of {name} ({inputs[name].shape[number]})" for one in opened[1:] for name, number in one.of]
    warnings.warn(
        LrpfxWarning(
            f"{module.title} has other operations for other sizes, so its program is for the example's: {', '.join(closed)}",
            topic="lowering",
        ),
        stacklevel=5,
    )
    try:
        return _program(job, inputs, opened[:1], dynamic_batch)
    except _SizeError as error:
        raise LoweringError(str(error)) from error.__cause__


def _other_operations(module: ExplainModule, where: str) -> str:
    return f"{module.title} has other operations where {where}; lower it with dynamic_batch=False, for one batch size"


#: What models and programs raise for sizes that they do not take.
_OF_SIZES = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError)


class _SizeError(Exception):
    """A program cannot be made, or is not right, for all open sizes. Fewer of them may help."""


def _program(
    job: "_Job", inputs: Mapping[str, torch.Tensor], opened: Sequence["_OpenSize"], dynamic_batch: bool
) -> ExportedProgram:
    """The program for these open sizes, compared with `lrpfx.attribute`."""
    module = job.module
    variants = (
        [_with_sizes(inputs, opened, number) for number in range(_VARIANTS)] if dynamic_batch else [list(inputs.values())]
    )
    try:
        examples = [distinct(job.arguments(tensors)) for tensors in variants]
    except LrpfxError:
        raise
    except _OF_SIZES as error:
        raise InputError(f"{module.title} cannot run on the example inputs: {first_lines(error)}", topic="lowering") from error
    dimensions = _dimensions(opened, [dict(zip(job.names(), example, strict=True)) for example in examples])
    dimensions |= _dimensions_of_masks(job, inputs, opened, examples[0])
    traced = _trace(job, examples[0], dimensions)
    condition = traced.condition()
    if condition is not None:
        raise _SizeError(_other_operations(module, f"{condition} does not hold for its sizes"))
    program, lowered = _export(job, traced, examples[0])
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "call_function"]
    rounds = any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in values)
    tolerance = _tolerance(job, examples[0], rounds=rounds)
    function = program.module()
    results = []
    for example in examples:
        expected, tolerance = _verify(job, function, example, tolerance)
        results.append(expected)
    dimensions |= _dimensions(opened, results)
    opened = [_from_one(job, function, inputs, one, tolerance) for one in opened]
    opened = _from_ones(job, function, inputs, opened, tolerance)
    verified_after_all(lowered, len(module.compiled.history))
    return _with_facts(job, program, lowered, examples, opened, dimensions, tolerance)


def _named_inputs(module: ExplainModule, inputs: ProgramInputs) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors among the example inputs, and the flags and numbers that the graph has fixed, by name."""
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        unknown = [name for name in inputs if name not in names]
        if unknown:
            raise InputError(f"there is no input {unknown[0]!r}; the inputs are {', '.join(names)}", topic="inputs-do-not-fit")
        named = {name: inputs[name] for name in names if name in inputs}
    elif not isinstance(inputs, Sequence):
        raise InputTypeError(
            f"example inputs must be a tensor, several, or a dict of tensors, not {type(inputs).__name__}", topic="lowering"
        )
    else:
        if len(inputs) > len(names):
            raise InputError(f"the model takes {len(names)} inputs, not {len(inputs)}", topic="lowering")
        named = dict(zip(names, inputs, strict=False))
    constants = {name: value for name, value in named.items() if is_constant(value)}
    named = {name: value for name, value in named.items() if name not in constants}
    if constants and not named:
        raise InputTypeError(
            f"a program takes tensors, but the examples are {', '.join(map(repr, constants.values()))}", topic="lowering"
        )
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise InputTypeError(
                f"a program takes tensors, but the example of {name!r} is a {type(value).__name__}", topic="lowering"
            )
        problem = not_dense(value)
        if problem is not None:
            raise InputTypeError(f"the example of {name!r} is {problem}", topic="lowering")
        if value.ndim == 0 or not len(value):
            raise InputError(
                f"the example of {name!r} has no {'samples' if value.ndim else 'batch dimension'}", topic="lowering"
            )
    if not named:
        raise InputError("there are no example inputs", topic="lowering")
    return named, constants


_VARIANTS = 3  # sizes with which a program is compared with `attribute`; it is traced with the first
_SMALL = 4096  # a condition on one size alone is tested at all sizes up to here, and one on several sizes at fewer
_LARGE = (5000, 65_535, 65_536, 65_537)


@dataclass(frozen=True)
class _OpenSize:
    """Dimensions of inputs, as (input, dimension), that have one size, which may vary in the program."""

    of: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]  # in each variant of the example
    lower: int = 1
    upper: int | None = None

    def admits(self, size: int) -> bool:
        return size >= self.lower and (self.upper is None or size <= self.upper)


def _open_sizes(module: ExplainModule, inputs: Mapping[str, torch.Tensor]) -> list[_OpenSize]:
    """The open sizes of a program: the batch, then other sizes that the module leaves open.

    The sizes of the variants are greater than 1 and differ from all other sizes: tracing would treat equal sizes as the same.
    """
    if len({len(tensor) for tensor in inputs.values()}) > 1:
        raise InputError(
            f"the inputs have different batch sizes: {', '.join(str(len(tensor)) for tensor in inputs.values())}",
            topic="lowering",
        )
    opened = [_OpenSize(tuple((name, 0) for name in inputs), ())]
    for guard in module.guards:
        if isinstance(guard, SharedSize) and all(number for _, number in guard.of):
            of = tuple((place.argument, number) for place, number in guard.of if place.argument in inputs and not place.keys)
            opened += [_OpenSize(of, (), max(guard.lower, 1), guard.upper)] if of else []
    conditions = [guard for guard in module.guards if isinstance(guard, SizeCondition)]
    for guard in conditions:
        if len(guard.of) == 1 and not _always_holds(guard, opened[0], opened, inputs, least=2):
            raise LoweringError(_other_operations(module, f"{guard.readable} does not hold"))
    opened[1:] = [_narrowed(one, conditions, inputs) for one in opened[1:]]
    opened[1:] = [one for one in opened[1:] if all(_always_holds(guard, one, opened, inputs) for guard in conditions)]
    for guard in conditions:  # now that the other sizes in it are fixed
        if not _always_holds(guard, opened[0], opened, inputs):
            raise LoweringError(_other_operations(module, f"{guard.readable} does not hold"))
    varying = {dimension for one in opened for dimension in one.of}
    taken = {
        size for name, tensor in inputs.items() for number, size in enumerate(tensor.shape) if (name, number) not in varying
    }
    found: list[_OpenSize] = []
    for one in opened:
        name, number = one.of[0]
        example = inputs[name].shape[number] if number else 2
        near = itertools.chain.from_iterable((example + step, example - step) for step in itertools.count(1))
        candidates = itertools.islice(itertools.chain([example], near), 100 + 2 * example)
        free = [size for size in candidates if size > 1 and size not in taken and one.admits(size)][:_VARIANTS]
        if len(free) == _VARIANTS:
            found.append(replace(one, sizes=tuple(free)))
            taken |= set(free)
    return found


def _always_holds(
    guard: SizeCondition, size: _OpenSize, opened: Sequence[_OpenSize], inputs: Mapping[str, torch.Tensor], least: int = 1
) -> bool:
    """Whether a condition of the module is of other sizes, or holds for all that this one and others take.

    Of one size, samples decide. Of several, samples could miss a pair, so it must also follow from their limits.
    """
    places = [(place.argument, number) for place, number in guard.of]
    if not any(dimension in size.of for dimension in places):
        return True
    if not all(name in inputs for name, _ in places):
        return False  # the module itself reports the missing input
    involved = [one for one in opened if any(dimension in one.of for dimension in places)]
    for sample in _samples(guard.expression, involved, least):
        sizes = {name_and_number: size for one, size in zip(involved, sample, strict=True) for name_and_number in one.of}
        if not _holds(guard, [sizes.get(place, inputs[place[0]].shape[place[1]]) for place in places]):
            return False
    if len(involved) < 2:
        return True
    symbols = {f"size_{number}": one for number, one in enumerate(involved)}
    names = {dimension: name for name, one in symbols.items() for dimension in one.of}
    written = [names.get(place, str(inputs[place[0]].shape[place[1]])) for place in places]
    condition = re.sub(r"sizes\[(\d+)\]", lambda found: written[int(found[1])], guard.expression)
    return is_proved(condition, _limits(symbols, least))


def _limits(sizes: Mapping[str, _OpenSize], least: int) -> dict[str, tuple[int, int | None]]:
    return {name: (max(one.lower, least), one.upper) for name, one in sizes.items()}


def _narrowed(size: _OpenSize, conditions: Sequence[SizeCondition], inputs: Mapping[str, torch.Tensor]) -> _OpenSize:
    """The open size without its smallest values, and its largest within narrow limits, if conditions exclude all of them."""
    narrow = size.upper is not None and size.upper - size.lower < _SMALL
    name, number = size.of[0]
    own = [guard for guard in conditions if {(place.argument, dimension) for place, dimension in guard.of} <= set(size.of)]
    values = range(size.lower, size.upper + 1 if narrow and size.upper is not None else inputs[name].shape[number])
    failing = [value for value in values if not all(_holds(guard, [value] * len(guard.of)) for guard in own)]
    below = [value for value in failing if value < inputs[name].shape[number]]
    above = [value for value in failing if value > inputs[name].shape[number]]
    lower = size.lower + len(below) if below and len(below) == below[-1] - size.lower + 1 else size.lower
    upper = size.upper
    if size.upper is not None and above and len(above) == size.upper - above[0] + 1:
        upper = size.upper - len(above)
    return replace(size, lower=lower, upper=upper)


def _holds(guard: SizeCondition, sizes: Sequence[int]) -> bool:
    try:
        return bool(guard.holds(sizes))
    except ArithmeticError:  # it divides by a term that is zero for these sizes, or has a number that is too large
        return False


def _samples(condition: str, involved: Sequence[_OpenSize], least: int = 1) -> Iterator[tuple[int, ...]]:
    """Sizes at which a condition must hold if the program, which has no conditions, leaves them open.

    Of one size, all up to `_SMALL`, and as many from its lower limit on; of several, fewer, with the numbers in the condition,
    their neighbours and their multiples.
    """
    numbers = {number for number in map(int, re.findall(r"\b\d+\b", condition)) if number <= _LARGE[-1]}
    near = {number * times + step for number in numbers for times in range(1, 9) for step in (-1, 0, 1)}
    small = _SMALL if len(involved) == 1 else 24 if len(involved) == 2 else 6
    candidates = {*range(least, small + 1), *near, *_LARGE}
    sizes = [
        sorted(size for size in candidates | {*range(one.lower, one.lower + small)} if size >= least and one.admits(size))
        for one in involved
    ]
    return itertools.product(*sizes)


def _with_sizes(inputs: Mapping[str, torch.Tensor], opened: Sequence[_OpenSize], variant: int) -> list[torch.Tensor]:
    """The inputs in the sizes of one variant: entries are repeated as often as needed."""
    return list(_resized(inputs, {dimension: one.sizes[variant] for one in opened for dimension in one.of}).values())


def _resized(inputs: Mapping[str, torch.Tensor], sizes: Mapping[tuple[str, int], int]) -> dict[str, torch.Tensor]:
    changed = dict(inputs)
    for (name, number), size in sizes.items():
        tensor = changed[name]
        changed[name] = tensor.index_select(number, torch.arange(size, device=tensor.device) % tensor.shape[number])
    return changed


def _dimensions(
    opened: Sequence[_OpenSize], variants: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, dict[int, _OpenSize | None]]:
    """The dimensions that vary, by name: dimension -> the open size that it has, or None for a size computed from one."""
    of_sizes = {one.sizes: one for one in opened}
    found: dict[str, dict[int, _OpenSize | None]] = {}
    for name, first in variants[0].items():
        shapes = [variant[name].shape for variant in variants]
        found[name] = {}
        for number in range(first.ndim):
            sizes = tuple(shape[number] for shape in shapes)
            if len(set(sizes)) > 1:
                found[name][number] = of_sizes.get(sizes)
    return found


def _dimensions_of_masks(
    job: "_Job", inputs: Mapping[str, torch.Tensor], opened: Sequence[_OpenSize], arguments: Sequence[torch.Tensor]
) -> dict[str, dict[int, _OpenSize | None]]:
    """The dimensions of masks that vary: those of their values. `arguments`: those of the first variant.

    Each open size is changed alone, to tell it from a size computed from others. Raises `InputError` for values that are not
    batches, and for sizes that no input has.
    """
    masks = dict(zip(job.names(), arguments, strict=True))
    found: dict[str, dict[int, _OpenSize | None]] = {name: {} for name in job.conditions.values()}
    first = {dimension: one.sizes[0] for one in opened for dimension in one.of}
    for one in opened if found else ():
        changed = _resized(inputs, first | dict.fromkeys(one.of, one.sizes[1]))
        for (place, name), value in zip(job.conditions.items(), job.masked_values(list(changed.values())), strict=True):
            for number, (before, after) in enumerate(zip(masks[name].shape, value.shape, strict=True)):
                if before != after and ((before, after) != one.sizes[:2] or number in found[name]):
                    raise InputError(
                        f"the value of {shown(place)}, of shape {tuple(masks[name].shape)}, has a size in dimension {number} "
                        "that is computed from those of the inputs, so no program takes a mask for it; lower with "
                        "dynamic_batch=False",
                        topic="lowering",
                    )
                if before != after:
                    found[name][number] = one
    batch = next((one for one in opened if not one.of[0][1]), None)
    for place, name in job.conditions.items():
        shape = masks[name].shape
        if found[name].get(0) is not batch or shape[:1] != arguments[0].shape[:1]:
            raise InputError(
                f"the first dimension of the value of {shown(place)}, of shape {tuple(shape)}, is not the batch, so no program "
                "takes a mask for it",
                topic="lowering",
            )
    return found


def _from_one(
    job: "_Job", function: nn.Module, inputs: Mapping[str, torch.Tensor], size: _OpenSize, tolerance: float
) -> _OpenSize:
    """The open size without 1 if the program is wrong there: tracing assumes that open sizes are at least two.

    A batch of one must be right: that of the self-test is one.
    """
    if size.lower > 1:
        return size
    try:
        _verify(job, function, job.arguments(list(_resized(inputs, dict.fromkeys(size.of, 1)).values())), tolerance)
    except (LrpfxError, _SizeError, *_OF_SIZES) as error:
        if not size.of[0][1]:
            raise _SizeError(
                f"the program of {job.module.title} is not right for a batch of one, where forward may do something else, such "
                f"as squeeze(); lower it with dynamic_batch=False, or name the dimension in forward: {first_lines(error)}"
            ) from error
        return replace(size, lower=2)
    return size


def _from_ones(
    job: "_Job", function: nn.Module, inputs: Mapping[str, torch.Tensor], opened: Sequence[_OpenSize], tolerance: float
) -> list[_OpenSize]:
    """The open sizes, of which several may be one at once, or one beside small ones.

    Raises `_SizeError` if the program is wrong where one size is one and others are two or three.
    """
    ones = [one for one in opened if one.lower == 1]
    if len(ones) > 1:
        of = tuple(itertools.chain(*(one.of for one in reversed(ones))))
        together = _from_one(job, function, inputs, replace(ones[-1], of=of), tolerance)
        opened = [replace(one, lower=together.lower) if one in ones and one.of[0][1] else one for one in opened]
    for alone, small in itertools.product([one for one in opened if one.lower == 1 and len(opened) > 1], (2, 3)):
        sizes = {one: 1 if one is alone else max(small, one.lower) for one in opened}
        resized = _resized(inputs, {dimension: size for one, size in sizes.items() for dimension in one.of})
        try:
            arguments = job.arguments(list(resized.values()))
        except (LrpfxError, *_OF_SIZES):  # the model does not take these sizes
            continue
        try:
            _verify(job, function, arguments, tolerance)
        except (LrpfxError, *_OF_SIZES) as error:
            where = " and ".join(f"{one.of[0][0]}.shape[{one.of[0][1]}] = {size}" for one, size in sizes.items())
            raise _SizeError(f"{_other_operations(job.module, where)}: {first_lines(error)}") from error
    return list(opened)


def _computes_output(module: ExplainModule, values: Mapping[str, Any], output: OutputSelector) -> bool:
    """Whether a function computes the explained output."""
    if not callable(output):
        return False
    with torch.enable_grad():
        arguments = Arguments(values, module)
        with misfits(module, arguments):
            return computes(arguments.call(module), output)


@dataclass(frozen=True)
class _Job:
    """The computation of a program."""

    module: ExplainModule
    inputs: tuple[str, ...]
    constants: dict[str, Any]  # arguments that the graph has fixed
    embeddings: dict[str, tuple[str, ...]]  # integer input -> the embeddings that it indexes
    target: str  # one of `TARGETS`, or `FIXED`
    fixed: Target | None  # what the program always explains, if it takes no target
    number_of_targets: int | None  # of each sample, if the program takes several
    record: tuple[str, ...]
    reduce: str | None
    balance: bool
    output: OutputSelector
    is_linear: bool  # whether a function computes the explained output
    conditions: dict[Key, str]  # place -> the argument that is its mask

    @property
    def masks(self) -> list[str]:
        """The inputs that may hold -inf, if they are floating-point tensors."""
        return [name for name in self.inputs if other_reader(self.module.unfused_graph, (name,)) is None]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Arguments of the program: the inputs, a target if the program takes one, and masks."""
        with torch.no_grad():
            result = self.explained(self.module(**self.values(tensors))).value
        target = self._example_target(result)
        masks = map(_example_mask, self.masked_values(tensors))
        return [*tensors, *([] if target is None else [target]), *masks]

    def explained(self, result: Any) -> ExplainedOutput:
        """The explained output among those of the module."""
        return explained_output(result, self.output, self.is_linear)

    def masked_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values at the places of conditions."""
        if not self.conditions:
            return []
        sources = [ends_of(self.module.unfused_graph, place)[0] for place in self.conditions]
        names = [node_info(source).name for source in sources]
        with torch.no_grad():
            _, *values = recorder_of(self.module, Recording(tuple(names)))(**self.values(tensors))
        return list(values)

    def _example_target(self, result: torch.Tensor) -> torch.Tensor | None:
        """A target for an output; None if the program takes none."""
        if self.target == "max" and result.ndim != 2:
            raise InputError(f'"max" is for outputs of shape (batch, classes), not {tuple(result.shape)}', topic="lowering")
        if self.fixed is not None:
            self.fixed.check(result)
            return None
        if self.target == "weights":  # not proportional to the output: that would give 0 under a softmax
            entries = torch.arange(result[0].numel(), device=result.device, dtype=torch.float64)
            return result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])
        if self.target == "token":
            if result.ndim != 3:
                raise InputError(
                    f'"token" is for outputs of shape (batch, positions, tokens), not {tuple(result.shape)}', topic="lowering"
                )
            samples = torch.arange(len(result), device=result.device)
            return torch.stack([-1 - samples % result.shape[1], samples % result.shape[2]], 1)
        if result.ndim != 2:
            other = '"token" or "weights"' if result.ndim == 3 else '"weights"'
            raise InputError(
                f"class indices need an output of shape (batch, classes), not {tuple(result.shape)}: use {other}",
                topic="lowering",
            )
        samples = torch.arange(len(result), device=result.device)
        if self.number_of_targets is not None:
            samples = samples[:, None] + torch.arange(self.number_of_targets, device=result.device)
        return samples % result.shape[1]

    def values(self, arguments: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The model's arguments by name."""
        return {**dict(zip(self.inputs, arguments, strict=False)), **self.constants}

    def names(self) -> list[str]:
        """Names of the program's arguments."""
        inputs = ["input"] if len(self.inputs) == 1 else list(self.inputs)
        return [*inputs, *([] if self.fixed is not None else ["target"]), *self.conditions.values()]

    def target_in(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target among the program's arguments."""
        return arguments[len(self.inputs)]

    def masks_in(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The masks of conditions among the program's arguments."""
        return arguments[len(arguments) - len(self.conditions) :]

    def targets_in(self, arguments: Sequence[torch.Tensor]) -> list[Target]:
        """The targets for `lrpfx.attribute`, of which there is one unless the program takes several."""
        if self.fixed is not None:
            return [self.fixed]
        given = self.target_in(arguments)
        if self.number_of_targets is not None:
            return [Classes(one) for one in given.unbind(1)]
        if self.target == "token":
            positions, tokens = given.unbind(1)
            return [Position(positions, Classes(tokens))]
        return [Seed(given) if self.target == "weights" else Classes(given)]

    def results(self, result: Any, explanations: Sequence["_OfTarget"]) -> dict[str, torch.Tensor]:
        """The program's results, from the module's output and what was found for each target."""
        found = {"output": self.explained(result).value.detach()}
        if not isinstance(result, torch.Tensor):
            found.update({f"output.{key}": value.detach() for key, value in _tensors_of(result)})
        named = [self._results_of(one) for one in explanations]
        several = self.number_of_targets is not None
        return found | {name: torch.stack([one[name] for one in named], 1) if several else named[0][name] for name in named[0]}

    def _results_of(self, found: "_OfTarget") -> dict[str, torch.Tensor]:
        """The results that depend on the target."""
        relevances = found.relevances
        reduced = {name: self._reduced(name, relevance) for name, relevance in relevances.items()}
        named = {"relevance" if len(reduced) == 1 else f"relevance.{name}": value for name, value in reduced.items()}
        named.update(found.layers)
        if self.balance:
            totals = [relevance.flatten(1).sum(1) for relevance in relevances.values()]
            named["balance"] = torch.stack(totals).sum(0) - found.seed.flatten(1).sum(1)
        return named

    def _reduced(self, name: str, relevance: torch.Tensor) -> torch.Tensor:
        """Relevance of an input, reduced over its channels. Embeddings have their channels last."""
        of_embedding = name.partition(".")[0] in self.embeddings and self.reduce is not None
        return reduced(relevance, self.reduce, relevance.ndim - 1 if of_embedding else 1)

    def run(self, *arguments: torch.Tensor) -> dict[str, torch.Tensor]:
        """The traced function: forward, and relevance by autograd."""
        values = dict(zip(self.inputs, arguments, strict=False))
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in values.items() if value.is_floating_point()}
            names = tuple(dict.fromkeys([*self.record, *itertools.chain(*self.embeddings.values())]))
            recording = Recording(names, bool(self.embeddings), places=tuple(self.conditions))
            runner = recorder_of(self.module, recording) if recording else self.module
            read = {name: hiding(leaf) if name in self.masks else leaf for name, leaf in leaves.items()}
            masks = {mask_name(number): mask for number, mask in enumerate(self.masks_in(arguments))}
            result = _Tracer(runner, self.number_of_targets is not None)(**{**values, **read, **masks})
            result, recorded = (result[0], result[1:]) if recording else (result, ())
            explained = self.explained(result)
            factors = [*(None for _ in leaves), *factors_of(runner, recorded)]
            wanted, targets = [*leaves.values(), *recorded], self.targets_in(arguments)
            explanations = []
            for left, target in zip(reversed(range(len(targets))), targets, strict=True):
                seed = self._seed(target, explained.value.detach())
                start = explained.start(seed, target)
                found = relevances_of(explained.value, wanted, start, factors, retain_graph=left > 0)
                layers = dict(zip(names, found[len(leaves) :], strict=True))
                explanations.append(self._of_target(seed, dict(zip(leaves, found, strict=False)), layers))
        return self.results(result, explanations)

    def _seed(self, target: Target, output: torch.Tensor) -> torch.Tensor:
        """The relevance of the output, traced. An exception of the user's function or class is a `LoweringError`."""
        try:
            return target.relevance(output)
        except LrpfxError:
            raise
        except Exception as error:
            raise LoweringError(
                f"the target cannot be part of a program ({target}): {first_lines(error)}. What it computes of the output may "
                "not depend on values by `if`, `.item()` or `len(output)`"
            ) from error

    def _of_target(
        self, seed: torch.Tensor, relevances: dict[str, torch.Tensor], layers: Mapping[str, torch.Tensor]
    ) -> "_OfTarget":
        """What was found for one target: the relevance of floating-point inputs, and of layers and embeddings."""
        for name, embeddings in self.embeddings.items():
            of_input = {embedding: layers[embedding] for embedding in embeddings}
            relevances.update(_by_name(name, of_input if len(of_input) > 1 else layers[embeddings[0]]))
        return _OfTarget(seed, relevances, {name: layers[name] for name in self.record})

    def expected(self, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's results according to `lrpfx.attribute`."""
        values = self.values(arguments)
        targets, several = self.targets_in(arguments), self.number_of_targets is not None
        named = zip(self.conditions, self.masks_in(arguments), strict=True)
        conditions = [dict(named)] if self.conditions else None
        asked = {"targets": targets} if several else {"target": targets[0]}
        question = Question(**asked, conditions=conditions, record=self.record, output=self.output)
        found = Computation(self.module, values, question)
        names = [*(name for name, value in values.items() if is_floating(value)), *self.embeddings]

        def of_target(number: int) -> _OfTarget:
            """Relevances have a dimension for conditions, and one for targets, if there are any."""
            place = (*(() if conditions is None else (0,)), *((number,) if several else ()))
            of_inputs, layers = pytree.tree_map_only(torch.Tensor, lambda value: value[place], (found.of_inputs, found.layers))
            relevances: dict[str, torch.Tensor] = {}
            for name in names:
                relevances.update(_by_name(name, of_inputs[name]))
            return _OfTarget(found.seeds[number], relevances, layers)

        return self.results(found.result, list(map(of_target, range(len(targets)))))


@dataclass(frozen=True)
class _OfTarget:
    """The relevance of the output for one target, and that of inputs and layers by name."""

    seed: torch.Tensor
    relevances: dict[str, torch.Tensor]
    layers: dict[str, torch.Tensor]


def _example_mask(value: torch.Tensor) -> torch.Tensor:
    """A mask for a value, neither all ones nor all zeros, with other entries for each sample."""
    entries = torch.arange(value.numel(), device=value.device, dtype=torch.float64)
    mask = torch.where(entries % 3 == 2, 0.0, 0.75 + (entries + 1).cos() / 4)
    return mask.to(value.dtype).reshape(value.shape)


def _by_name(name: str, relevance: torch.Tensor | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Relevance of one input by name, or of each embedding if the input indexes several."""
    if isinstance(relevance, torch.Tensor):
        return {name: relevance}
    return {f"{name}.{embedding}": value for embedding, value in relevance.items()}


def _tensors_of(result: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model's output with their paths in it, such as "0" or "boxes.1"."""
    leaves, _ = pytree.tree_flatten_with_path(result)
    return [
        (".".join(str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", "")))) for key in path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def _take_along(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """`torch.take_along_dim` for any batch size: torch's own fixes the size when it is traced."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim = dim % input.ndim
    wide = list(torch.broadcast_shapes(*([*one.shape[:dim], 1, *one.shape[dim + 1 :]] for one in (input, indices))))
    wide[dim] = -1
    return input.expand(wide).gather(dim, indices.expand(wide))


#: Functions that torch decomposes in C++ into operators that cannot be exported -> their replacements.
EXPORTABLE: dict[Any, Callable[..., Any]] = {
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
    torch.ops.aten.take_along_dim.default: _take_along,
}


class _Tracer(fx.Interpreter):
    """Runs a module's graph, and notes the node that each operation comes from."""

    def __init__(self, module: fx.GraphModule, several: bool) -> None:
        """`several`: whether several relevances will be propagated."""
        super().__init__(executed(module, Execution(traced=True, several=several)), graph=module.graph)

    def __call__(self, **inputs: Any) -> Any:
        """The results for inputs given by name."""
        placeholders = self.graph.find_nodes(op="placeholder")
        defaults = {str(node.target): node.args[0] for node in placeholders if node.args}
        return self.run(*({**defaults, **inputs}.get(str(node.target)) for node in placeholders))

    def run_node(self, n: fx.Node) -> Any:
        self.text = ""
        if n.op.startswith("call") and has_info(n):
            info = node_info(n)
            self.text = info.name if info.rule is None else f"{info.name}: {info.rule}"
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        with origin(self.text):
            return super().call_function(EXPORTABLE.get(target, target), args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        with origin(self.text):
            return super().call_module(target, args, kwargs)


@dataclass(frozen=True)
class _Traced:
    """The program as one graph of ATen operators. Open sizes are symbols, all others are numbers."""

    root: fx.GraphModule
    mode: FakeTensorMode
    symbols: dict[_OpenSize, Any]

    @property
    def guards(self) -> list[Any]:
        """The conditions on sizes by which tracing chose operations."""
        assert self.mode.shape_env is not None
        return self.mode.shape_env.guards

    def condition(self) -> str | None:
        """A condition on sizes that does not hold for all of them; None if all hold.

        Of one size, samples decide. One of several must also follow from their limits.
        """
        for expression in dict.fromkeys(guard.expr for guard in self.guards):
            involved = {str(symbol): one for one, symbol in self.symbols.items() if symbol in expression.free_symbols}
            text = python_of(expression)
            if len(involved) < len(expression.free_symbols):  # a size that the data decide
                return str(expression)
            holds = eval(f"lambda {', '.join(involved)}: {text}", {"math": math})
            try:
                proved = all(holds(*sizes) for sizes in _samples(text, list(involved.values()), least=2))
            except ArithmeticError:  # it divides by zero, or has a number that is too large
                proved = False
            if not proved or (len(involved) > 1 and not is_proved(text, _limits(involved, 2))):
                return str(expression)
        return None


def _trace(job: _Job, arguments: Sequence[torch.Tensor], dimensions: Mapping[str, Mapping[int, _OpenSize | None]]) -> _Traced:
    """Trace the program. The graph is right for all open sizes if no `condition` on them was met."""
    logger.info("tracing a batch of %d", len(arguments[0]))
    mode = uncached_fakes(ShapeEnv())
    symbols: dict[_OpenSize, Any] = {}
    try:
        fakes = []
        for name, value in zip(job.names(), arguments, strict=True):
            varying = [number in dimensions[name] for number in range(value.ndim)]
            kinds = [DimDynamic.DUCK if varies else DimDynamic.STATIC for varies in varying]
            sizes: Any = StatelessSymbolicContext(kinds)
            fakes.append(mode.from_tensor(value, source=constant_source(f"argument_{name}"), symbolic_context=sizes))
            shape: Sequence[Any] = fakes[-1].shape
            symbols |= {one: shape[number].node.expr for number, one in dimensions[name].items() if one is not None}
        with (
            fx_traceback.preserve_node_meta(),
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
            torch.backends.nnpack.flags(enabled=False),  # it is chosen by the size of the batch
        ):
            traced = make_fx(job.run, DECOMPOSED, tracing_mode="symbolic")(*fakes)
    except Exception as error:
        raise LoweringError(f"{job.module.title} cannot be traced: {type(error).__name__}: {error}") from error
    return _Traced(traced, mode, symbols)


def _export(job: _Job, traced: _Traced, arguments: Sequence[torch.Tensor]) -> tuple[ExportedProgram, Program]:
    """The exported program, and the record of its stages."""
    traced.root.graph.owning_module = None  # passes replace this module
    lowered = Program(
        traced.root, traced.root.graph, job.module.title, history=list(job.module.compiled.history), properties=[]
    )
    record(lowered, "lower", "trace", PassResult(len(lowered.graph.nodes)), _VERIFIED_LATER)
    run_passes(lowered, passes_of(Settings(module=job.module), Stage.LOWER))
    logger.info("exporting %d operations", len(lowered.graph.nodes))
    limits = {symbol: limits_of_size(one.lower, one.upper) for one, symbol in traced.symbols.items()}
    traced.guards.clear()  # they hold for all of these sizes, so the program need not check them
    try:
        named = dict(zip(job.names(), arguments, strict=True))
        exported = exported_program(lowered.graph, lowered.root, named, traced.mode, limits)
    except Exception as error:
        raise _SizeError(f"{job.module.title} cannot be exported: {type(error).__name__}: {error}") from error
    lowered.root, lowered.graph, lowered.exported = exported.graph_module, exported.graph, exported
    record(lowered, "lower", "export", PassResult(len(exported.graph.nodes)), _VERIFIED_LATER)
    return exported, lowered


def _verify(
    job: _Job, function: nn.Module, arguments: Sequence[torch.Tensor], tolerance: float
) -> tuple[dict[str, torch.Tensor], float]:
    """The results of `lrpfx.attribute`, and the tolerance within which those of the program agree.

    A jump of relevance is rare: other samples, or the few changes that `tolerance` was measured with, may have missed it. So a
    larger difference is measured against more changes of these samples before it counts. Raises `LoweringError` if it does.
    """
    logger.info("comparing a batch of %d with attribute", len(arguments[0]))
    expected = job.expected(arguments)
    try:
        actual = function(*arguments)
    except AssertionError as error:  # a guard of torch.export
        raise _SizeError(
            f"the program of {job.module.title} does not take a batch of {len(arguments[0])}; lower it with "
            f"dynamic_batch=False: {error}"
        ) from error
    tiny = {name: torch.finfo(value.dtype).tiny for name, value in expected.items() if value.is_floating_point()}
    scales = {name: _norm(expected["output" if name == "balance" else name]) for name in tiny}
    differences = {name: _norm(actual[name] - expected[name]) for name in tiny}

    def agrees(name: str, tolerance: float) -> bool:
        allowed = max(tolerance_of(expected[name].dtype), tolerance) * scales[name] + tiny[name]
        return differences[name] <= allowed < torch.inf  # false for results that are not finite

    if not all(agrees(name, tolerance) for name in tiny):
        tolerance = max(tolerance, _tolerance(job, arguments, changes=30))
    for name, difference in differences.items():
        if not agrees(name, tolerance):
            scale = scales[name]
            raise LoweringError(
                f"{name} of the program differs from the module's own for a batch of {len(arguments[0])} by "
                f"{difference / scale if scale else difference:.1e}{' of its norm' if scale else ''}"
            )
    return expected, tolerance


def _with_facts(
    job: _Job,
    program: ExportedProgram,
    lowered: Program,
    examples: Sequence[Sequence[torch.Tensor]],
    opened: Sequence[_OpenSize],
    dimensions: Mapping[str, Mapping[int, _OpenSize | None]],
    tolerance: float,
) -> ExportedProgram:
    """Attach the facts for a manifest, the arguments with which the program was compared, and the history."""
    names, shared = job.names(), []
    admitted = [one for one in examples[1:] if _fit(job.inputs, one, opened)]
    for one in opened[1:]:
        of = [[name, number] for name in names for number, size in dimensions[name].items() if size and size.of == one.of]
        shared.append({"of": of, "lower": one.lower, "upper": one.upper})
    rows = assignment(job.module)
    stages = job.module.compiled.history
    program.graph_module.meta[MANIFEST] = {
        "lrpfx": version("lrpfx"),
        "title": job.module.title,
        "weights": fingerprint_of_tensors(job.module.state_dict()),
        "buffers": {name: one for name, one in other_buffers(job.module).items() if name not in job.module.compiled.derived},
        "composite": job.module.composite,
        "canonizers": [stage.name for stage in stages if stage.stage == "canonize" and stage.matches],
        "target": job.target,
        "explained": None if job.fixed is None else {"target": str(job.fixed), "sizes": list(job.fixed.least_sizes())},
        "reduce": job.reduce,
        "dynamic_batch": bool(opened),
        "sizes": shared,
        "conditions": {name: place if isinstance(place, str) else list(place) for place, name in job.conditions.items()},
        "masks": [name for name, of in zip(names, job.inputs, strict=False) if of in job.masks],
        "tolerance": tolerance,
        "rules": {row.name: row.rule for row in rows},
        "merged": {row.name: list(row.merged) for row in rows if row.merged},
    }
    program.graph_module.meta[_EXAMPLES] = [dict(zip(names, one, strict=True)) for one in (examples[0], *admitted)]
    program.graph_module.meta[_OPEN] = {name: sorted(numbers) for name, numbers in dimensions.items()}
    program.graph_module.meta[HISTORY] = tuple(lowered.history)
    sizes = {
        name: [None if number in dimensions[name] else size for number, size in enumerate(example.shape)]
        for name, example in zip(names, examples[0], strict=True)
    }
    return checked(program, sizes, shared)


def _tolerance(job: _Job, arguments: Sequence[torch.Tensor], changes: int = 6, rounds: bool = False) -> float:
    """The allowed error of a result, relative to its norm: that of the dtype or, in float32, ten times the effect of rounding.

    `rounds`: whether it computes in float32, which models in float64 may do, such as those whose norms cast.

    Relevance can jump where a value crosses zero, so kernels with different rounding may give visibly different results. This
    effect is measured with a float64 run, and with inputs changed by a few units of rounding. The larger tolerance applies.
    """
    logger.info("measuring what rounding changes")
    plain = replace(job, reduce=None, balance=False)
    reference = plain.expected(arguments)
    dtype = reference["output"].dtype
    if dtype == torch.float64 and rounds:
        dtype = torch.float32
    if dtype != torch.float32:
        return tolerance_of(dtype)
    found = _in_double_precision(plain, arguments)
    generator = torch.Generator().manual_seed(0)
    can_change = any(value.is_floating_point() for value in arguments[: len(job.inputs)])
    for _ in range(changes if can_change else 0):
        shaken = list(arguments)
        for place, value in enumerate(arguments[: len(job.inputs)]):
            if value.is_floating_point():
                signs = torch.randint(2, value.shape, generator=generator).to(value) * 2 - 1
                changed = value * (1 + 4 * torch.finfo(dtype).eps * signs)
                shaken[place] = changed.clamp(value.min(), value.max())  # within the range of the example
        found.append(plain.expected(shaken))
    names = [name for name, value in reference.items() if value.is_floating_point() and value.any()]
    effects = [_norm(other[name] - reference[name]) / _norm(reference[name]) for other in found for name in names]
    return max(tolerance_of(dtype), 10 * max(effects, default=0.0))


def _norm(value: torch.Tensor) -> float:
    """The norm of a tensor, in double precision: the squares of small numbers would be 0 in less."""
    return float(value.double().norm())


def _in_double_precision(job: _Job, arguments: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The results of a module in float64, or none if another dtype is written in its forward."""
    module = copy.deepcopy(job.module)
    module.compiled = replace(module.compiled, dtypes={})  # casts to float32 inside the graph do no harm here, where they run
    try:
        doubled = [value.double() if value.is_floating_point() else value for value in arguments]
        return [replace(job, module=module.double()).expected(doubled)]
    except (InputError, RuntimeError):  # the arguments fit, so dtypes meet that do not, also in a target of the user's
        return []


def facts_of(program: ExportedProgram) -> dict[str, Any] | None:
    """The facts that `lower` attached to a program, as plain data; None for other programs."""
    facts: dict[str, Any] | None = program.graph_module.meta.get(MANIFEST)
    return facts


def _fit(names: Sequence[str], arguments: Sequence[torch.Tensor], opened: Sequence[_OpenSize]) -> bool:
    """Whether arguments have sizes within the limits that the open sizes have in the end."""
    values = dict(zip(names, arguments, strict=False))
    known = [(one, values[name].shape[number]) for one in opened for name, number in one.of if name in values]
    return all(one.admits(size) for one, size in known)


def argument_examples(program: ExportedProgram) -> list[dict[str, torch.Tensor]]:
    """Arguments, by name, with which `lower` verified the program: of the example's sizes, and of others that it takes."""
    examples: list[dict[str, torch.Tensor]] = program.graph_module.meta[_EXAMPLES]
    return examples


def open_dimensions(program: ExportedProgram) -> dict[str, list[int]]:
    """The dimensions that may vary of each argument and result of a program, by name."""
    found: dict[str, list[int]] = program.graph_module.meta[_OPEN]
    return found


def tolerance_of(dtype: torch.dtype) -> float:
    """The allowed error of a result of this dtype, relative to its norm."""
    return {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 5e-2)
