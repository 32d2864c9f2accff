"""Lowering: turn the forward and relevance computation of an explainable module into one plain inference program.

The program is an `ExportedProgram` of ATen operators without autograd and without any class of lrpfx. torch.export cannot trace
rules that save values for the backward pass. `make_fx` can, and its graph becomes the program.
"""

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpfx.attribution.arguments import Arguments, embeddings_of, misfits
from lrpfx.attribution.condition_module import names_of_masks, places_in
from lrpfx.attribution.plausibility import advice, saturates
from lrpfx.deploy.job import Job, invalid, wrong_type
from lrpfx.deploy.program_facts import with_facts
from lrpfx.deploy.program_sizes import (
    VARIANTS,
    OpenSize,
    SizeError,
    dimensions_of,
    limits,
    open_sizes,
    other_operations,
    resized,
    samples,
    with_sizes,
)
from lrpfx.deploy.verification import measured_tolerance, verify
from lrpfx.errors import InputError, LoweringError, LrpfxError, LrpfxWarning, first_lines
from lrpfx.ir.guards import FixedEntries, is_constant
from lrpfx.ir.node import node_info
from lrpfx.ir.operator import Probability
from lrpfx.ir.size_proofs import is_proved
from lrpfx.passes.driver import record, run_passes, verified_after_all
from lrpfx.passes.lower.exported_program import exported_program
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS, WRITTEN_MEMORY
from lrpfx.passes.program import PassResult, Program
from lrpfx.passes.stages import Settings, Stage, passes_of
from lrpfx.request.conditions import Key, shown
from lrpfx.request.explained_output import computes
from lrpfx.request.names import recorded_names, resolve_names
from lrpfx.request.outputs import OutputSelector, final_probabilities_of
from lrpfx.request.reduction import ALL, checked_reduction
from lrpfx.request.targets import Largest, TargetLike, as_target
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.support.interrupts import tracing, undisturbed
from lrpfx.support.tensors import distinct, is_floating, no_tensors, not_dense
from lrpfx.support.torch_internals import (
    FakeTensorMode,
    constant_source,
    decomposition_of,
    drop_guards,
    limits_of_size,
    make_fx,
    python_of,
    uncached_fakes,
)

logger = logging.getLogger(__name__)

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
            *(aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default),
            aten.native_batch_norm_backward.default,
        )
    },
    **{
        operator: FORWARD_FORMS[operator]
        for operator in (
            aten._upsample_bicubic2d_aa_backward.default,
            *(aten._embedding_bag.default, aten._embedding_bag_forward_only.default),
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
        torch.export, such as lengths of sequences. Of a graph, with inputs `x` and `edge_index`, it takes any number of nodes
        and edges. With False, all sizes are those of the example.
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

    Examples
    --------
    >>> program = lrpfx.lower(explain_model, x)
    >>> sorted(program.module()(x, torch.tensor([1, 0])))
    ['output', 'relevance']
    """
    module = explainable(explain_model, "lower")
    module = copy.deepcopy(module) if module.shares_memory else module  # a program is what the module is now
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
        raise invalid(
            f"{module.title} has masks of conditions: lower the module that lrpfx.transform returned, with conditions= of lower"
        )
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise InputError(f"{module.title} is on the meta device, which holds no values to explain", topic="kinds-of-inputs")
    fixed = None
    if target == "max" or not isinstance(target, str):
        fixed, target = (Largest(), "max") if target == "max" else (as_target(target), FIXED)
        if dynamic_batch and fixed.is_of_one_batch:
            raise invalid(
                f"the target has values for each sample of one batch ({fixed}), so its program takes no other: pass "
                'dynamic_batch=False, or target="index", "token" or "weights" for a program that takes targets'
            )
    elif target not in TARGETS:
        raise invalid(f"target must be one of {', '.join(map(repr, TARGETS))}, or a target of lrpfx.attribute, not {target!r}")
    counts = type(number_of_targets) is int and number_of_targets > 0
    if counts != (target == "targets") or not (counts or number_of_targets is None):
        raise invalid(
            f'number_of_targets is a positive integer with target="targets", and left out otherwise, not {number_of_targets!r} '
            f"with target={target!r}"
        )
    checked_reduction("reduce", reduce, ALL, "lowering")
    record = recorded_names(module.unfused_graph, record)
    resolve_names(module.unfused_graph, record)  # raises an error for unknown names
    reserved = [name for name in record if name.partition(".")[0] in ("output", "relevance", "balance")]
    if reserved:
        raise invalid(f"a layer named {reserved[0]!r} cannot be recorded: a result of the program has that name")
    without = isinstance(conditions, (list, tuple)) and not conditions
    places = () if without else places_in(module.unfused_graph, conditions)
    masks = dict(zip(places, names_of_masks(places, module.argument_names), strict=True))
    inputs, constants = _named_inputs(module, example_inputs)
    placed = embeddings_of(module, Arguments({**inputs, **constants}, module))
    embeddings = {str(place[0]): tuple(names) for place, names in placed.items()}
    read = next((one for one in module.guards if isinstance(one, FixedEntries)), None)
    if read is not None:
        raise LoweringError(
            f"forward reads {str(read.place)!r} as numbers, which are constants of the graph, and a program cannot check that "
            "it gets the same: wrap the model in a module that holds this input, and transform that"
        )
    is_linear = _computes_output(module, {**inputs, **constants}, output)
    job = Job(
        *(module, tuple(inputs), constants, embeddings, target, fixed, number_of_targets),
        *(record, reduce, balance, output, is_linear, masks),
    )
    final = final_probabilities_of(module.graph, output)
    row = None if final is None else node_info(final).operator
    is_softmax = row is not None and row.values.probability is Probability.OF_ALL_LOGITS
    of_classes = target in ("index", "targets") if fixed is None else fixed.is_of_classes
    if final is not None and is_softmax and of_classes and saturates(final):
        warnings.warn(LrpfxWarning(advice(final), topic="softmax-at-the-end"), stacklevel=5)
    opened = open_sizes(module, inputs) if dynamic_batch else []
    try:
        return _program(job, inputs, opened, dynamic_batch)
    except SizeError as error:
        if len(opened) < 2 and (not opened or opened[0].is_batch):
            raise LoweringError(str(error)) from error.__cause__
    kept = [one for one in opened if one.is_batch]
    closed = [one for one in opened if not one.is_batch]
    sizes = [f"dimension {number} of {name} ({inputs[name].shape[number]})" for one in closed for name, number in one.of]
    warnings.warn(
        LrpfxWarning(
            f"{module.title} has other operations for other sizes, so its program is for the example's: {', '.join(sizes)}",
            topic="lowering",
        ),
        stacklevel=5,
    )
    try:
        return _program(job, inputs, kept, bool(kept))
    except SizeError as error:
        raise LoweringError(str(error)) from error.__cause__


#: What models and programs raise for sizes that they do not take.
_OF_SIZES = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError)


def _program(job: Job, inputs: Mapping[str, torch.Tensor], opened: Sequence[OpenSize], dynamic_batch: bool) -> ExportedProgram:
    """The program for these open sizes, compared with `lrpfx.attribute`."""
    module = job.module
    variants = [with_sizes(inputs, opened, number) for number in range(VARIANTS)] if dynamic_batch else [list(inputs.values())]
    try:
        examples = [distinct(job.arguments(tensors)) for tensors in variants]
    except LrpfxError:
        raise
    except _OF_SIZES as error:
        raise invalid(f"{module.title} cannot run on the example inputs: {first_lines(error)}") from error
    dimensions = dimensions_of(opened, [dict(zip(job.names(), example, strict=True)) for example in examples])
    dimensions |= _dimensions_of_masks(job, inputs, opened, examples[0])
    traced = _trace(job, examples[0], dimensions)
    condition = traced.condition()
    if condition is not None:
        raise SizeError(other_operations(module, f"{condition} does not hold for its sizes"))
    program, lowered = _export(job, traced, examples[0])
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "call_function"]
    rounds = any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in values)
    tolerance = measured_tolerance(job, examples[0], rounds=rounds)
    function = program.module()
    results = []
    for example in examples:
        expected, tolerance = verify(job, function, example, tolerance)
        results.append(expected)
    dimensions |= dimensions_of(opened, results)
    opened = [_from_one(job, function, inputs, one, tolerance) for one in opened]
    opened = _from_ones(job, function, inputs, opened, tolerance)
    verified_after_all(lowered, len(module.compiled.history))
    return with_facts(job, program, lowered, examples, opened, dimensions, tolerance)


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
    elif not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        raise wrong_type(f"example inputs must be a tensor, several, or a dict of tensors, not {no_tensors(inputs)}")
    else:
        if len(inputs) > len(names):
            raise invalid(f"the model takes {len(names)} inputs, not {len(inputs)}")
        named = dict(zip(names, inputs, strict=False))
    for name, of in module.reference_names.items():
        if is_floating(named.get(name)) and not isinstance(named.get(of), torch.Tensor):
            raise InputError(
                f"the program explains differences from a reference, which is an input of its own: pass a tensor {of!r} of the "
                f"shape of {name!r} among the example inputs, as in {{{name!r}: ..., {of!r}: ...}}",
                topic="references",
            )
    constants = {name: value for name, value in named.items() if is_constant(value)}
    named = {name: value for name, value in named.items() if name not in constants}
    if constants and not named:
        raise wrong_type(f"a program takes tensors, but the examples are {', '.join(map(repr, constants.values()))}")
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise wrong_type(f"a program takes tensors, but the example of {name!r} is a {type(value).__name__}")
        problem = not_dense(value)
        if problem is not None:
            raise wrong_type(f"the example of {name!r} is {problem}")
        if value.ndim == 0 or not len(value):
            raise invalid(f"the example of {name!r} has no {'samples' if value.ndim else 'batch dimension'}")
    if not named:
        raise invalid("there are no example inputs")
    return named, constants


def _dimensions_of_masks(
    job: Job, inputs: Mapping[str, torch.Tensor], opened: Sequence[OpenSize], arguments: Sequence[torch.Tensor]
) -> dict[str, dict[int, OpenSize | None]]:
    """The dimensions of masks that vary: those of their values. `arguments`: those of the first variant.

    Each open size is changed alone, to tell it from a size computed from others. Raises `InputError` for values that are not
    batches, and for sizes that no input has.
    """
    masks = dict(zip(job.names(), arguments, strict=True))
    found: dict[str, dict[int, OpenSize | None]] = {name: {} for name in job.conditions.values()}
    first = {dimension: one.sizes[0] for one in opened for dimension in one.of}
    for one in opened if found else ():
        changed = resized(inputs, first | dict.fromkeys(one.of, one.sizes[1]))
        for (place, name), value in zip(job.conditions.items(), job.masked_values(list(changed.values())), strict=True):
            for number, (before, after) in enumerate(zip(masks[name].shape, value.shape, strict=True)):
                if before != after and ((before, after) != one.sizes[:2] or number in found[name]):
                    raise invalid(
                        f"the value of {shown(place)}, of shape {tuple(masks[name].shape)}, has a size in dimension {number} "
                        "that is computed from those of the inputs, so no program takes a mask for it; lower with "
                        "dynamic_batch=False"
                    )
                if before != after:
                    found[name][number] = one
    batch = next((one for one in opened if one.is_batch), None)
    for place, name in job.conditions.items():
        shape = masks[name].shape
        if found[name].get(0) is not batch or shape[:1] != arguments[0].shape[:1]:
            raise invalid(
                f"the first dimension of the value of {shown(place)}, of shape {tuple(shape)}, is not the batch, so no program "
                "takes a mask for it"
            )
    return found


def _from_one(job: Job, function: nn.Module, inputs: Mapping[str, torch.Tensor], size: OpenSize, tolerance: float) -> OpenSize:
    """The open size without 1 if the program is wrong there: tracing assumes that open sizes are at least two.

    A batch of one must be right: that of the self-test is one.
    """
    if size.lower > 1:
        return size
    try:
        verify(job, function, job.arguments(list(resized(inputs, dict.fromkeys(size.of, 1)).values())), tolerance)
    except (LrpfxError, SizeError, *_OF_SIZES) as error:
        if size.is_batch:
            raise SizeError(
                f"the program of {job.module.title} is not right for a batch of one, where forward may do something else, such "
                f"as squeeze(); lower it with dynamic_batch=False, or name the dimension in forward: {first_lines(error)}"
            ) from error
        return replace(size, lower=2)
    return size


def _from_ones(
    job: Job, function: nn.Module, inputs: Mapping[str, torch.Tensor], opened: Sequence[OpenSize], tolerance: float
) -> list[OpenSize]:
    """The open sizes, of which several may be one at once, or one beside small ones.

    Raises `SizeError` if the program is wrong where one size is one and others are two or three.
    """
    ones = [one for one in opened if one.lower == 1]
    if len(ones) > 1:
        of = tuple(itertools.chain(*(one.of for one in reversed(ones))))
        together = _from_one(job, function, inputs, replace(ones[-1], of=of), tolerance)
        opened = [replace(one, lower=together.lower) if one in ones and not one.is_batch else one for one in opened]
    for alone, small in itertools.product([one for one in opened if one.lower == 1 and len(opened) > 1], (2, 3)):
        sizes = {one: 1 if one is alone else max(small, one.lower) for one in opened}
        changed = resized(inputs, {dimension: size for one, size in sizes.items() for dimension in one.of})
        try:
            arguments = job.arguments(list(changed.values()))
        except (LrpfxError, *_OF_SIZES):  # the model does not take these sizes
            continue
        try:
            verify(job, function, arguments, tolerance)
        except (LrpfxError, *_OF_SIZES) as error:
            where = " and ".join(f"{one.of[0][0]}.shape[{one.of[0][1]}] = {size}" for one, size in sizes.items())
            raise SizeError(f"{other_operations(job.module, where)}: {first_lines(error)}") from error
    return list(opened)


@dataclass(frozen=True)
class _Traced:
    """The program as one graph of ATen operators. Open sizes are symbols, all others are numbers."""

    root: fx.GraphModule
    mode: FakeTensorMode
    symbols: dict[OpenSize, Any]

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
                proved = all(holds(*sizes) for sizes in samples(text, list(involved.values()), least=2))
            except ArithmeticError:  # it divides by zero, or has a number that is too large
                proved = False
            if not proved or (len(involved) > 1 and not is_proved(text, limits(involved, 2))):
                return str(expression)
        return None


def _trace(job: Job, arguments: Sequence[torch.Tensor], dimensions: Mapping[str, Mapping[int, OpenSize | None]]) -> _Traced:
    """Trace the program. The graph is right for all open sizes if no `condition` on them was met."""
    logger.info("tracing a batch of %d", len(arguments[0]))
    mode = uncached_fakes(ShapeEnv())
    symbols: dict[OpenSize, Any] = {}
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
        place = next((f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("at ")), "")
        raise LoweringError(f"{job.module.title} cannot be traced{place}: {type(error).__name__}: {error}") from error
    return _Traced(traced, mode, symbols)


def _export(job: Job, traced: _Traced, arguments: Sequence[torch.Tensor]) -> tuple[ExportedProgram, Program]:
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
        raise SizeError(f"{job.module.title} cannot be exported: {type(error).__name__}: {error}") from error
    condition = traced.condition()  # met when operations in place were replaced
    if condition is not None:
        raise SizeError(f"{job.module.title} cannot be exported for all of its open sizes: only where {condition}")
    drop_guards(exported)
    lowered.root, lowered.graph, lowered.exported = exported.graph_module, exported.graph, exported
    record(lowered, "lower", "export", PassResult(len(exported.graph.nodes)), _VERIFIED_LATER)
    return exported, lowered


def _computes_output(module: ExplainModule, values: Mapping[str, Any], output: OutputSelector) -> bool:
    """Whether a function computes the explained output."""
    if not callable(output):
        return False
    with torch.enable_grad():
        arguments = Arguments(values, module)
        with misfits(module, arguments):
            return computes(arguments.call(module), output)
