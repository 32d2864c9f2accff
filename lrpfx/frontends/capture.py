"""CAPTURE and NORMALIZE: build the graph on which all later stages and all node names are based."""

import copy
import enum
import functools
import inspect
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.utils.rnn import PackedSequence

from lrpfx.errors import (
    CaptureError,
    InputError,
    InputTypeError,
    LrpfxError,
    PassError,
    RuleError,
    UnsupportedOperationError,
    VerificationError,
    add_note,
    first_lines,
)
from lrpfx.frontends.exported import capture_export, capture_program, quiet
from lrpfx.frontends.guessed_inputs import guessed_inputs
from lrpfx.frontends.open_sizes import (
    Dimension,
    DynamicShapes,
    FinalCaptureError,
    Named,
    OpenSizes,
    Wish,
    attempts,
    enlarged,
    other_batch,
    resized,
    settle,
    tensors_in,
    wishes_of,
)
from lrpfx.frontends.prepare import Model, Prepared, with_plain_caches
from lrpfx.frontends.symbolic import RandomNumbers, capture_symbolic
from lrpfx.ir.guards import FixedKind, FixedSizes, FixedValue, Guard, Place, SharedSize, SizeCondition, is_constant, place_of
from lrpfx.ir.mapping import MappingContext, RuleMapping
from lrpfx.ir.node import Role, calls, data_calls, is_call_of, leaves_of, node_info
from lrpfx.operators.layer import Layer, layer_of_node
from lrpfx.operators.recurrent import PACKED
from lrpfx.operators.table import module_classes
from lrpfx.passes.choices import RecordChoices
from lrpfx.passes.driver import (
    UnnamedError,
    Verification,
    fresh,
    leave_to_later,
    log_begin,
    log_end,
    named,
    not_verified,
    record,
    record_shapes_of,
    verified_after_all,
)
from lrpfx.passes.program import PassResult, Program, random_error
from lrpfx.passes.stages import Settings, Stage
from lrpfx.support.checked_indices import checked_indices
from lrpfx.support.modules import private_copy, shared_copy
from lrpfx.support.prefix_caches import holds_caches, is_cache, plain_cache
from lrpfx.support.tensors import is_floating, no_tensors, not_dense
from lrpfx.support.torch_internals import Interpreter, pytree, size_symbol

logger = logging.getLogger(__name__)

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any] | None
Result = TypeVar("Result")

_GATHERED, _GATHERED_BY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
AUTO = "auto"  # try the front ends in order
DEQUANTIZED = "dequantize"  # the stage that reports replaced quantized layers
FROZEN = "freeze_buffers"  # the stage that reports buffers whose values are constants of the graph


#: NORMALIZE: runs its passes.
Normalize = Callable[[Program, Verification | None], None]


@dataclass(frozen=True)
class CaptureSettings:
    """What is to be captured, and how.

    `capture`: "symbolic" for a symbolic trace; "export" for torch.export, which needs example inputs; "auto" tries the trace,
    and falls back to torch.export if the trace fails, is wrong, or calls unknown operators. The fallback needs example inputs,
    and a composite that maps no module as a whole. `dynamic_shapes`: see `lrpfx.transform`.
    """

    source: Prepared
    example_inputs: ExampleInputs
    settings: Settings
    capture: str
    dynamic_shapes: DynamicShapes
    normalize: Normalize
    share: bool = False  # whether the graph is on the model's own parameters
    verify_each: bool = False  # whether each pass is verified


#: What follows a capture. It gets the normalized graph, what verifies it, and the settings, and verifies later changes.
Finish = Callable[[Program, Verification | None, CaptureSettings], Result]


def captured(asked: CaptureSettings, finish: Finish[Result]) -> Result:
    """What `finish` makes of the normalized graph and of what verifies later stages.

    If it fails on one front end's graph, the next one is tried.
    """
    return named(lambda each: _captured(replace(asked, verify_each=each), finish))


def _captured(asked: CaptureSettings, finish: Finish[Result]) -> Result:
    model = asked.source.model
    check_front_end(asked.capture)
    if isinstance(asked.dynamic_shapes, Mapping) and (asked.example_inputs is None or isinstance(model, ExportedProgram)):
        raise InputError("dynamic_shapes is for modules with example_inputs; an exported program has sizes of its own")
    if isinstance(model, ExportedProgram):
        return finish(*_of_exported(model, asked), asked)
    return _of_module(model, asked, finish)


@dataclass(frozen=True)
class Request:
    """A model to capture, and the settings for it."""

    model: nn.Module
    args: tuple[Any, ...] | None  # example inputs
    names: list[str]  # the arguments that they are for
    opaque: set[str]  # paths of modules that the composite maps as a whole
    wishes: dict[Dimension, Wish]  # which sizes may vary
    asked: CaptureSettings

    @property
    def named(self) -> Named:
        """The example inputs by name."""
        return dict(zip(self.names, self.args or (), strict=False))


class FrontEnd(ABC):
    """One way to turn a module into a graph. `FRONT_ENDS` lists the front ends in the order in which they are tried."""

    name: ClassVar[str]  # the value of `capture=`
    title: ClassVar[str]
    needs_example_inputs: ClassVar[bool] = False
    takes_programs: ClassVar[bool] = False  # exported programs as well as modules

    def obstacle(self, request: Request) -> LrpfxError | None:
        """The reason not to try this front end, or None."""
        return None

    def hint(self, request: Request) -> str:
        """Advice for a user whose model another front end cannot capture."""
        return f'{self.title} may follow this model: use capture="auto" or capture="{self.name}"'

    @abstractmethod
    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        """The normalized graph, and the model's output on the example inputs. Raises `CaptureError`, `VerificationError`."""


class SymbolicTrace(FrontEnd):
    """The trace of torch.fx. It keeps modules that are mapped as a whole, and needs no example inputs."""

    name = "symbolic"
    title = "the symbolic trace"

    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        model, args, names = request.model, request.args, request.names
        gathered = [name for name in names if name not in inspect.signature(model.forward).parameters]
        if gathered:
            raise CaptureError(f"forward does not name the argument {gathered[0]!r}, so the symbolic trace has no input for it")
        given = {} if args is None else dict(zip(names, args, strict=True))
        began = log_begin("capture", self.name)
        program = capture_symbolic(model, request.opaque, given, request.asked.share)
        log_end("capture", self.name, len(program.graph.nodes), began)
        program.guards += [FixedValue(Place(name), value) for name, value in given.items() if is_constant(value)]
        program.guards += _fixed_defaults(model, names)
        if args is None:
            return _without_examples(program, self.name, request.asked), None
        run = _runner(model, request.asked.share)
        verification = Verification(args, run(given), again=lambda: _runner(model, request.asked.share)(given))
        program = _normalized(program, self.name, verification, request.asked)
        if request.wishes:
            guards, verification.another = settle(program, _asked_sizes(request), given, run, request.wishes, given)
            program.guards = [*guards, *program.guards]
        return program, verification


class TorchExport(FrontEnd):
    """torch.export. It runs the model on example inputs and looks inside every module."""

    name = "export"
    title = "torch.export"
    needs_example_inputs = True
    takes_programs = True

    def obstacle(self, request: Request) -> LrpfxError | None:
        if request.args is None:
            return InputError('capture="export" runs the model on example inputs: pass example_inputs', topic="example-inputs")
        if request.opaque:
            return CaptureError(
                f"the composite maps {', '.join(sorted(request.opaque))} as a whole, but torch.export looks inside modules; "
                'use capture="symbolic", or map the layers inside.'
            )
        return None

    def hint(self, request: Request) -> str:
        if request.opaque:
            paths = ", ".join(sorted(request.opaque))
            return f"torch.export was not tried: it looks inside modules, but the composite maps {paths} as a whole"
        if request.args is None:
            return "torch.export may follow this model: pass example_inputs to lrpfx.transform"
        return super().hint(request)

    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        model, named = request.model, request.named
        run = _runner(model, request.asked.share)
        output = run(named)
        if holds_caches(output) and named.get("use_cache") is not True:  # one of a prefix that was learned
            return self.capture(replace(request, model=with_plain_caches(model, {})))
        verification = Verification(tuple(named.values()), output, again=lambda: _runner(model, request.asked.share)(named))
        tries = attempts(named, request.wishes)

        def with_open(
            dimensions: set[Dimension], example: Named | None = None, tied: Collection[Dimension] = ()
        ) -> tuple[Program, Verification | None]:
            larger = enlarged(named, dimensions, lambda one: _succeeds(run, one)) if example is None else example
            return self._with_open(request, run, verification, dimensions, tied, larger)

        try:
            found = with_open(tries[0])
            is_open = _leaves_a_batch_open(found[0], tries[0])
            if is_open and not (_refuses_a_sample(found[0], named, tries[0]) and _succeeds(run, _one_sample(named, tries[0]))):
                return found
            # Torch.export takes the batches of two inputs for two sizes, and may fix them or doubt the smaller of both.
            better = self._with_tied_batches(with_open, named, tries[0])
            if is_open:
                return better or self._with_fewer_open(with_open, named, tries[1:-1]) or found
            if better is not None:
                return better
        except (CaptureError, VerificationError) as error:
            if len(tries) == 1 and not isinstance(error, FinalCaptureError):
                raise
            failure: LrpfxError | None = error
        else:
            failure = None
        if failure is None or isinstance(failure, FinalCaptureError):
            # A model that compares its batch with a number, such as that of an earlier call, may have another graph elsewhere.
            other = other_batch(named, tries[0])
            if other is not None and _succeeds(run, other):
                try:
                    return with_open(tries[0], other)
                except (CaptureError, VerificationError) as error:
                    logger.info("torch.export of another batch: %s", first_lines(error, 1))
            if failure is None:
                return found
            raise failure
        last = with_open(tries[-1])  # if it fails even so, the sizes are not to blame: no more is tried
        better = self._with_tied_batches(with_open, named, tries[0])
        if better is not None:
            return better
        for dimensions in tries[1:-1]:
            try:
                return with_open(dimensions)
            except (CaptureError, VerificationError) as error:
                logger.info("torch.export with other open sizes: %s", first_lines(error, 1))
        return last

    @classmethod
    def _with_tied_batches(
        cls, with_open: Callable[..., tuple[Program, Verification | None]], named: Named, dimensions: set[Dimension]
    ) -> tuple[Program, Verification | None] | None:
        """The graph in which the first sizes of all inputs are one size, if they may be and it takes a sample alone."""
        tied = {dimension for dimension in dimensions if dimension[1] == 0}
        tensors = dict(tensors_in(named))
        if len(tied) < 2 or len({tensors[place].shape[0] for place, _ in tied}) > 1:
            return None
        return cls._with_fewer_open(functools.partial(with_open, tied=tied), named, [dimensions])

    @staticmethod
    def _with_fewer_open(
        with_open: Callable[..., tuple[Program, Verification | None]], named: Named, tries: list[set[Dimension]]
    ) -> tuple[Program, Verification | None] | None:
        """The first graph of these open sizes that takes a sample alone, if there is one."""
        for dimensions in tries:
            try:
                found = with_open(dimensions)
            except (CaptureError, VerificationError) as error:
                logger.info("torch.export with other open sizes: %s", first_lines(error, 1))
                continue
            if _leaves_a_batch_open(found[0], dimensions) and not _refuses_a_sample(found[0], named, dimensions):
                return found
        return None

    def _with_open(
        self,
        request: Request,
        run: Callable[[Named], Any],
        verification: Verification,
        dimensions: set[Dimension],
        tied: Collection[Dimension],
        example: Named,
    ) -> tuple[Program, Verification | None]:
        """The graph of the model on `example` in which these dimensions may vary, as far as the model allows it."""
        model, named = request.model, request.named
        began = log_begin("capture", self.name)
        program, sizes = capture_export(model, example, dimensions, tied, request.asked.share, request.asked.settings.constants)
        log_end("capture", self.name, len(program.graph.nodes), began)
        program = _normalized(program, self.name, verification, request.asked)
        guards, another = settle(program, sizes, example, run, request.wishes, named)
        program.guards = [*guards, *program.guards, *_fixed_defaults(model, request.names)]
        # The graph is verified at the sizes of the example, where the model may take another way to the same result.
        program.guards = [one for one in program.guards if not (one.excludes_one_size and one.problem(named))]
        if any(guard.problem(named) for guard in program.guards):  # a batch of one has its own graph, for example
            raise CaptureError(f"no graph of {type(model).__name__} is valid for the example inputs")
        verification = copy.copy(verification)
        verification.another = another
        return program, verification


def _without_examples(program: Program, front_end: str, asked: CaptureSettings) -> Program:
    """A traced program after NORMALIZE, with the shapes of guessed inputs if some fit, as passes need those of examples."""
    plain = program.copied()
    program = _normalized(program, front_end, None, asked)
    guess = guessed_inputs(program)
    if not guess.args:
        not_verified(program, guess.reason)
        return program
    try:
        with quiet():
            record_shapes_of(plain, guess.args)
    except Exception as error:  # whatever the operators of a graph raise for tensors without values
        logger.info("no shapes without example inputs: %s", first_lines(error, 1))
        program.guessed = guess.args
        return program
    return _normalized(plain, front_end, None, asked)


FRONT_ENDS: list[FrontEnd] = [SymbolicTrace(), TorchExport()]


def _of_module(model: nn.Module, asked: CaptureSettings, finish: Finish[Result]) -> Result:
    """What `finish` makes of a module's graph: of the first front end for which both work and all calls are known."""
    args, names = positional(model, asked.example_inputs)
    caches = {name: value for name, value in zip(names, args or (), strict=False) if is_cache(value)}
    if caches:
        model, asked = with_plain_caches(model, caches), _with_constants(asked, caches)
        args = tuple(plain_cache(value) if is_cache(value) else value for value in args or ())
    wishes = wishes_of(asked.dynamic_shapes, dict(zip(names, args or (), strict=True)))
    request = Request(model, args, names, opaque_paths(model, asked.settings.composite), wishes, asked)
    chosen = [one for one in FRONT_ENDS if asked.capture in (AUTO, one.name)]
    failures: list[_Failure] = []
    kept: tuple[FrontEnd, Program, Verification | None] | None = None  # a graph with unknown calls
    unknown: list[Layer] = []
    untried = [one for one in FRONT_ENDS if one not in chosen]

    def finished(front_end: FrontEnd, program: Program, verification: Verification | None) -> Result | None:
        for failure in failures:
            if failure.stage is _Stage.LATER:
                reason = (failure.front_end.title, f"left for {front_end.title}: {first_lines(failure.error, 1)}")
                record(program, "capture", failure.front_end.name, PassResult(reasons=[reason]), changed=False)
        try:
            return finish(program, verification, asked)
        except (CaptureError, VerificationError, UnsupportedOperationError, RuleError, PassError) as error:
            failures.append(_Failure(front_end, error, _Stage.LATER))
            return None

    for front_end in chosen:
        obstacle = front_end.obstacle(request)
        if obstacle is not None:
            if kept is None and not failures:
                raise obstacle
            untried.append(front_end)
            continue
        try:
            program, verification = front_end.capture(request)
        except (CaptureError, VerificationError) as error:
            logger.info("%s cannot capture %s: %s", front_end.title, type(model).__name__, first_lines(error, 1))
            if kept is not None:
                reason = (unknown[0].name, f"kept the graph of another front end: {error}")
                record(kept[1], "capture", front_end.name, PassResult(reasons=[reason]))
            stage = _Stage.VERIFICATION if isinstance(error, VerificationError) else _Stage.CAPTURE
            failures.append(_Failure(front_end, error, stage))
            continue
        program.opened, unknown = unknown, _unknown_calls(program, asked.settings.composite)
        if unknown:
            kept = front_end, program, verification
            continue
        result = finished(front_end, program, verification)
        if result is not None:
            return result
    if kept is not None:
        result = finished(*kept)
        if result is not None:
            return result
    if not failures:
        raise CaptureError(f"no front end can capture {type(model).__name__}")
    wrong = next((failure.error for failure in failures if isinstance(failure.error, UnnamedError)), None)
    if wrong is not None:
        raise wrong
    is_named = any(failure.error.topic == "training-mode" for failure in failures)
    if request.args is not None and not is_named and failures[0].stage is not _Stage.LATER:
        random = _random_output(model, request)
        if random is not None:
            raise random from _failed(failures)
    failed = _failed(failures)
    for front_end in untried:
        if failures[0].stage is not _Stage.LATER:
            add_note(failed, front_end.hint(request))
    raise failed


def _with_constants(asked: CaptureSettings, names: Collection[str]) -> CaptureSettings:
    """The same settings, with these inputs as further constants."""
    constants = asked.settings.constants
    if isinstance(constants, str):
        return asked
    further = [name for name in names if name not in constants]
    return replace(asked, settings=replace(asked.settings, constants=(*constants, *further)))


class _Stage(enum.IntEnum):
    """How far a front end came before it failed."""

    CAPTURE = 0  # there is no graph
    VERIFICATION = 1  # there is one, which does not compute the same
    LATER = 2  # it does, but a later stage fails


@dataclass(frozen=True)
class _Failure:
    """A front end that failed, and why."""

    front_end: FrontEnd
    error: LrpfxError
    stage: _Stage


def _random_output(model: nn.Module, request: Request) -> CaptureError | None:
    """The error for a model whose output differs between two runs, since it draws random numbers; None for others."""
    random = RandomNumbers()
    try:
        with random:
            first, second = (leaves_of(_runner(model, request.asked.share)(request.named)) for _ in range(2))
    except CaptureError as error:  # a number that is drawn decides a branch
        return error
    pairs = [pair for pair in zip(first, second, strict=False) if all(isinstance(one, torch.Tensor) for one in pair)]
    if not random.drawn or all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return None
    _, name, source = next(iter(random.drawn.values()))
    return random_error(name, source)


def _failed(failures: list[_Failure]) -> LrpfxError:
    """One error for all front ends. The cause to mend comes first: that of the front end that came furthest.

    Of two that came equally far, it is the last one, which follows more than those before it, unless its graph fails for the
    reason that the first one explains better.
    """
    if len(failures) == 1:
        return failures[0].error

    def order(failure: _Failure) -> tuple[bool, int, int]:
        place = failures.index(failure)
        follows_more = failure.stage is _Stage.CAPTURE and not _same_branch(failures)
        return isinstance(failure.error, FinalCaptureError), failure.stage, place if follows_more else -place

    first, *others = sorted(failures, key=order, reverse=True)
    texts = [str(first.error).rstrip()]
    for other in others:
        text = str(other.error).split("\n\n")[0].strip()
        if _without_places(text) != _without_places(texts[0].split("\n\n")[0]):
            texts.append(f"{other.front_end.title[0].upper()}{other.front_end.title[1:]} fails, too: {text}")
    first.error.args = ("\n\n".join(texts), *first.error.args[1:])
    return first.error


def _without_places(text: str) -> str:
    """A message without the lines of source that it names, which only a trace knows."""
    return re.sub(r", at (an unknown place|\S+:\d+)| \((source unknown|\S+:\d+)\)", "", text)


def _same_branch(failures: Sequence[_Failure]) -> bool:
    """Whether both front ends stop at a branch on values, which the trace shows in the user's words."""
    texts = [str(failure.error) for failure in failures]
    return "branches on a value" in texts[0] and all(re.search("[Dd]ata-?[Dd]ependent", text) for text in texts[1:])


def _leaves_a_batch_open(program: Program, dimensions: set[Dimension]) -> bool:
    """Whether a first dimension may vary, or none was to be left open."""
    batches = {dimension for dimension in dimensions if dimension[1] == 0}
    shared = [dimension for guard in program.guards if isinstance(guard, SharedSize) for dimension in guard.of]
    return not batches or bool(batches & set(shared))


def _one_sample(named: Named, dimensions: set[Dimension]) -> Named:
    return resized(named, {dimension: 1 for dimension in dimensions if dimension[1] == 0})


def _refuses_a_sample(program: Program, named: Named, dimensions: set[Dimension]) -> bool:
    """Whether a condition on several sizes excludes a batch of one: torch.export assumes that no tensor has a single entry."""
    one = _one_sample(named, dimensions)
    return any(isinstance(guard, SizeCondition) and len(guard.of) > 1 and guard.problem(one) for guard in program.guards)


def _asked_sizes(request: Request) -> OpenSizes:
    """The sizes of a trace: those that the user wants to vary, each as a symbol, and the others as numbers."""
    sizes = OpenSizes({})
    for place, tensor in tensors_in(request.named):
        shape: list[Any] = list(tensor.shape)
        for number in range(tensor.ndim):
            if request.wishes.get((place, number), Wish(False)).is_open:
                shape[number] = size_symbol(len(sizes.limits))
                sizes.limits[shape[number]] = (0, None)
        sizes.tensors[place] = tuple(shape)
    return sizes


def _fixed_defaults(model: nn.Module, names: Sequence[str]) -> list[Guard]:
    """Guards for arguments that keep their default."""
    parameters = inspect.signature(model.forward).parameters.values()
    optional = [one for one in parameters if one.default is not one.empty and one.name not in names]
    return [FixedValue(Place(one.name), one.default, default=True) for one in optional]


def _fixed_kinds(program: Program) -> list[Guard]:
    """Guards that require floating-point signals, and integers or truth values for discrete inputs."""
    guards: list[Guard] = []
    for node in program.graph.find_nodes(op="placeholder"):
        role = node_info(node).role
        is_read = any(user.op == "output" or node_info(user).role is Role.DATA for user in node.users)
        if role is Role.DISCRETE or (role is Role.DATA and is_read):
            guards.append(FixedKind(Place(str(node.target)), role is Role.DATA))
    return guards


def fixed_dimensions(program: Program, args: tuple[Any, ...]) -> list[Guard]:
    """Guards for the numbers of dimensions of inputs, given or guessed, if passes relied on them."""
    guards: list[Guard] = []
    why = "batch norm, a bias or the weight of a layer norm was merged, which relies on this number"
    # References, which come last, have no example.
    for node, value in zip(program.graph.find_nodes(op="placeholder"), args, strict=False):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                guards.append(FixedSizes(place_of(str(node.target), path), (None,) * leaf.ndim, why))
    return guards


def _of_exported(model: ExportedProgram, asked: CaptureSettings) -> tuple[Program, Verification | None]:
    example_inputs = asked.example_inputs
    began = log_begin("capture", TorchExport.name)
    program = capture_program(model, asked.share)
    log_end("capture", TorchExport.name, len(program.graph.nodes), began)
    names = [node.target for node in program.graph.nodes if node.op == "placeholder"]
    if example_inputs is None:
        args, keywords = model.example_inputs or ((), {})
        given = [*args, *keywords.values()]
    elif isinstance(example_inputs, Mapping):
        given = [example_inputs[name] for name in names if name in example_inputs]
    else:
        given = [example_inputs] if isinstance(example_inputs, torch.Tensor) else list(example_inputs)
    if len(given) != len(names):
        if example_inputs is not None:
            raise InputError(
                f"example_inputs give {len(given)} arguments, but the exported program takes {len(names)}",
                topic="example-inputs",
            )
        return _normalized(program, TorchExport.name, None, asked), None
    with torch.no_grad(), RecordChoices() as record_of_choices:
        values = Interpreter(program.root, graph=program.graph).run(*given)
    verification = Verification(tuple(given), values)
    verification.choices = record_of_choices.made
    return _normalized(program, TorchExport.name, verification, asked), verification


def _normalized(program: Program, front_end: str, verification: Verification | None, asked: CaptureSettings) -> Program:
    """A captured program after NORMALIZE, if it computes what the model computes, with all that was found out on the way."""
    inputs = [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
    constants = asked.settings.constants
    if isinstance(constants, str) or any(name not in inputs for name in constants):
        raise InputError(f"constants must be names of inputs ({', '.join(inputs)}), not {constants!r}", topic="example-inputs")
    if front_end == TorchExport.name:
        program.dtypes = _fixed_dtypes(program)
    unverified = program.no_verification if verification is None else ""
    record(program, "capture", front_end, PassResult(len(program.graph.nodes)), unverified)
    if program.frozen:
        values = [(name, f"read as a number: the graph holds {value.tolist()}") for name, value in program.frozen.items()]
        record(program, "capture", FROZEN, PassResult(len(values), values))
    if verification is not None:
        verification.each = asked.verify_each
        if not leave_to_later(program, "capture", verification):
            verification.check(program, "capture", overwrites=True)
    asked.normalize(program, verification)
    if front_end == TorchExport.name and program.title != ExportedProgram.__name__:
        program.notes.clear()  # of parts of layers: if anything decomposed them, it was lrpfx
    if asked.source.dequantized.matches:
        record(program, Stage.NORMALIZE.value, DEQUANTIZED, asked.source.dequantized)
    if not any(node_info(node).role is Role.DATA for node in program.graph.nodes if node.op != "output"):
        encoded = next((node_info(node).located for node in program.graph.nodes if is_call_of(node, "one_hot")), None)
        raise InputError(
            f"none of the inputs {', '.join(inputs)} is a signal: they are integers, truth values or declared constants, and "
            "no embedding reads them. "
            + (
                "Pass floating-point example_inputs"
                if encoded is None
                else f"{encoded} makes vectors of them: move it out of forward, and pass F.one_hot(ids, classes).float()"
            ),
            topic="example-inputs",
        )
    program.guards += _fixed_kinds(program)
    return program


def _fixed_dtypes(program: Program) -> dict[str, torch.dtype]:
    """The dtypes of parameters and buffers, by name, if the graph of torch.export has numbers or dtypes that follow from them.

    `x.to(weight.dtype)` and `torch.finfo(x.dtype).min` are plain values there, as are dtypes that the author wrote: a cast of
    the graph's tensors would change some of them in the model, and none in the graph. A cast without effect may be gone, but
    not the assertion of its operand's dtype.
    """
    tensors = {name: value.dtype for name, value in program.root.state_dict().items() if is_floating(value)}
    limits = {getattr(torch.finfo(dtype), one) for dtype in tensors.values() for one in ("min", "max", "tiny", "eps")}
    for node in calls(program.graph):
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            is_dtype = isinstance(leaf, torch.dtype) and leaf.is_floating_point
            if is_dtype or (isinstance(leaf, float) and leaf in limits):
                return tensors
    return {}


def guessed_verification(program: Program, source: Prepared, share: bool = False) -> Verification | None:
    """The model's output on random inputs, checked against the graph, for models without examples; None if no input fits."""
    model = source.model
    if isinstance(model, ExportedProgram):
        return None
    if not program.guessed:
        return None
    names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
    given = dict(zip(names, program.guessed, strict=True))
    try:
        expected = _runner(model, share)(given)
    except InputError:  # the model checks more than the graph
        return None
    verification = Verification(program.guessed, expected, again=lambda: _runner(model, share)(given))
    verification.check(program, "normalize")
    verified_after_all(program)
    return verification


def _unknown_calls(program: Program, composite: RuleMapping | None) -> list[Layer]:
    """Calls that are not in the operator table and have no rule in the composite."""
    calls = [one for one in data_calls(program.graph) if node_info(one).operator is None and one.op == "call_function"]
    layers = [layer_of_node(one, program.root) for one in calls]
    ruled = with_rules(layers, composite)
    return [one for one in layers if one not in ruled]


def with_rules(layers: Sequence[Layer], composite: RuleMapping | None) -> list[Layer]:
    """Those of some layers that the composite has a rule for."""
    if composite is None:
        return []
    return [one for one in layers if composite.module_map(MappingContext(), one.name, one) is not None]


def opaque_paths(model: nn.Module, composite: RuleMapping | None) -> set[str]:
    """Paths of modules that the composite maps as a whole, except single operations of the operator table."""
    if composite is None:
        return set()
    known = module_classes()
    return {
        path
        for path, module in model.named_modules()
        if path and not isinstance(module, known) and composite.maps_whole(path, module)
    }


def check_front_end(capture: str) -> None:
    """Raise `InputError` for an unknown value of `capture`."""
    if capture not in (AUTO, *(one.name for one in FRONT_ENDS)):
        known = " or ".join(f'"{one.name}"' for one in FRONT_ENDS)
        raise InputError(f'capture is "auto", {known}, not {capture!r}')


def examples_of(model: Model, inputs: tuple[Any, ...]) -> ExampleInputs:
    """The example inputs that positional arguments stand for: the model's arguments, or one value that holds all of them.

    A dict or a sequence holds all of them if it fits the model's forward, as in `example_inputs=`; otherwise it is an argument.
    """
    if len(inputs) > 1 or isinstance(model, ExportedProgram):
        return inputs
    value: ExampleInputs = inputs[0]
    signature = inspect.signature(model.forward)
    if isinstance(value, Mapping):
        return value if value and next(iter(value)) in signature.parameters else inputs
    if not isinstance(value, (tuple, list)) or hasattr(value, "_fields"):  # a packed sequence is one argument, too
        return inputs
    try:
        signature.bind(*value)
    except TypeError:
        return inputs
    return value


def positional(model: nn.Module, example_inputs: ExampleInputs) -> tuple[tuple[Any, ...] | None, list[str]]:
    """The example inputs in the order of `forward`'s parameters, and the names of those parameters."""
    if example_inputs is None:
        return None, []
    signature = inspect.signature(model.forward)
    if not isinstance(example_inputs, (torch.Tensor, Mapping, tuple, list)):
        raise InputTypeError(
            "example_inputs are a tensor, a tuple of arguments or a dict of keyword arguments, not "
            + no_tensors(example_inputs),
            topic="example-inputs",
        )
    try:
        if isinstance(example_inputs, torch.Tensor):
            bound = signature.bind(example_inputs)
        elif isinstance(example_inputs, Mapping):
            bound = signature.bind(**example_inputs)
        else:
            bound = signature.bind(*example_inputs)
    except TypeError as error:
        raise InputError(
            f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}", topic="example-inputs"
        ) from error
    named: Named = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is _GATHERED:
            raise InputError(
                f"{type(model).__name__}.forward{signature} gathers arguments in {name!r}, so the inputs of the graph have no "
                "names. Wrap the model in a module whose forward names them.",
                topic="example-inputs",
            )
        named |= value if kind is _GATHERED_BY_NAME else {name: value}
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(named)):
        raise InputError(
            "example_inputs hold no tensors; torch.as_tensor makes them of arrays, and a tokenizer returns them with "
            "return_tensors='pt'",
            topic="example-inputs",
        )
    for name, value in named.items():
        for leaf in pytree.tree_leaves(value):
            problem = not_dense(leaf) if isinstance(leaf, torch.Tensor) else None
            if problem is not None:
                raise InputTypeError(
                    f"the example input {name!r} is {problem}; relevance is that of dense tensors: give the model a dense one "
                    "(for nested tensors a padded one and a mask)",
                    topic="example-inputs",
                )
    packed = [name for name, value in named.items() if isinstance(value, PackedSequence)]
    if packed:
        raise InputError(f"the example input {packed[0]!r} is packed: {PACKED}.", topic="untraceable-forward")
    return tuple(named.values()), list(named)


def _runner(model: nn.Module, share: bool) -> Callable[[Named], Any]:
    """A function that returns the output of a copy of the model, which leaves the user's model unchanged."""
    copied, protection = shared_copy(model) if share else (private_copy(model), nullcontext())

    def run(named: Named) -> Any:
        try:
            with torch.no_grad(), protection, checked_indices(copied):
                return copied(**fresh(named))
        except CaptureError:
            raise
        except Exception as error:
            name = type(model).__name__
            remedy = ""
            if len(model._forward_pre_hooks) > len(model._forward_pre_hooks_with_kwargs):
                remedy = " Its forward pre-hooks get no arguments, since these are passed by name: register with_kwargs=True."
            raise InputError(
                f"{name} itself fails on the example inputs: {first_lines(error)}.{remedy}", topic="example-inputs"
            ) from error

    return run


def _succeeds(run: Callable[[Named], Any], named: Named) -> bool:
    try:
        run(named)
    except InputError:
        return False
    return True
