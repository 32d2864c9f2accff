"""CAPTURE and NORMALIZE: the graph that all later stages and all node names are based on."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from lrpfx.errors import CaptureError, InputError, LrpfxError, VerificationError
from lrpfx.frontends.dequantize import dequantized
from lrpfx.frontends.exported import capture_export, capture_program
from lrpfx.frontends.symbolic import capture_symbolic, private_copy
from lrpfx.ir.guards import FixedKind, FixedSizes, FixedValue, Guard, Place, SizeCondition, is_constant, place_of
from lrpfx.ir.node import Role, data_calls, node_info
from lrpfx.layers.layer import layer_of_node
from lrpfx.operators.table import module_classes
from lrpfx.passes.driver import NOT_VERIFIED, Verification, fresh, random_arguments, record, run_passes, verified_after_all
from lrpfx.passes.program import PassResult, Program
from lrpfx.passes.stages import Settings, passes_of
from lrpfx.rules.mapping import MappingContext, RuleMapping
from lrpfx.support.torch_internals import pytree

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any] | None
Model = nn.Module | ExportedProgram

_GATHERED, _GATHERED_BY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
AUTO = "auto"  # try the front ends in order
DEQUANTIZED = "dequantize"  # the stage that reports the replacement of quantized layers
NO_SETTINGS = Settings()
FROZEN = "freeze_buffers"  # the stage that reports buffers whose values the graph holds


def normal_form(
    model: Model,
    example_inputs: ExampleInputs = None,
    settings: Settings = NO_SETTINGS,
    capture: str = AUTO,
) -> tuple[Program, Verification | None]:
    """The normalized graph of `model`, and its output on the example inputs for the verification of later stages.

    `capture`: "symbolic" for a symbolic trace; "export" for torch.export, which needs example inputs; "auto" tries the trace,
    and falls back to torch.export if there are example inputs and the trace fails, is wrong, or calls unknown operators.
    """
    if capture not in (AUTO, *(one.name for one in FRONT_ENDS)):
        known = " or ".join(f'"{one.name}"' for one in FRONT_ENDS)
        raise InputError(f'capture is "auto", {known}, not {capture!r}')
    if isinstance(model, ExportedProgram):
        return _of_exported(model, example_inputs, settings)
    refuse_scripts(model)
    check_evaluation_mode(model)
    unquantized, replaced = dequantized(model)
    program, verification = _captured(unquantized, example_inputs, settings, capture)
    if replaced.matches:
        record(program, "normalize", DEQUANTIZED, replaced)
    return program, verification


@dataclass(frozen=True)
class Request:
    """What is to be captured."""

    model: nn.Module
    args: tuple[Any, ...] | None  # example inputs
    names: list[str]  # the arguments that they give
    opaque: set[str]  # paths of modules that the composite maps as a whole
    settings: Settings


class FrontEnd(ABC):
    """One way to make a graph of a module. `FRONT_ENDS` lists them in the order in which they are tried."""

    name: ClassVar[str]  # as `capture=` takes it
    title: ClassVar[str]
    needs_example_inputs: ClassVar[bool] = False
    takes_programs: ClassVar[bool] = False  # exported programs besides modules

    def obstacle(self, request: Request) -> LrpfxError | None:
        """Why this front end cannot be tried, or None."""
        return None

    def hint(self, request: Request) -> str:
        """What to tell a user whose model another front end cannot capture."""
        return f'{self.title} may follow this model: use capture="auto" or capture="{self.name}"'

    @abstractmethod
    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        """The normalized graph, and the model's answer on the example inputs. `CaptureError`, `VerificationError`."""


class SymbolicTrace(FrontEnd):
    """The trace of torch.fx, which keeps modules that are mapped as a whole and needs no example inputs."""

    name = "symbolic"
    title = "the symbolic trace"

    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        model, args, names = request.model, request.args, request.names
        given = {} if args is None else dict(zip(names, args, strict=True))
        program = capture_symbolic(model, request.opaque, given)
        program.guards += [FixedValue(Place(name), value) for name, value in given.items() if is_constant(value)]
        program.guards += _fixed_defaults(model, names)
        verification = None if args is None else Verification(args, _run_untouched(model, args, names))
        return _normalized(program, self.name, verification, request.settings), verification


class TorchExport(FrontEnd):
    """torch.export, which runs the model on example inputs and looks inside every module."""

    name = "export"
    title = "torch.export"
    needs_example_inputs = True
    takes_programs = True

    def obstacle(self, request: Request) -> LrpfxError | None:
        if request.args is None:
            return InputError('capture="export" runs the model on example inputs: pass example_inputs')
        if request.opaque:
            return CaptureError(
                f"the composite maps {', '.join(sorted(request.opaque))} as a whole, but torch.export looks inside modules; "
                'use capture="symbolic", or map the layers inside.'
            )
        return None

    def hint(self, request: Request) -> str:
        if request.opaque:
            paths = ", ".join(sorted(request.opaque))
            return f"torch.export was not tried, since it would look inside {paths}, mapped as a whole"
        if request.args is None:
            return "torch.export may follow this model: pass example_inputs to lrpfx.transform"
        return super().hint(request)

    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        model, names = request.model, request.names
        args = request.args or ()
        verification = Verification(args, _run_untouched(model, args, names))
        try:
            program = _normalized(capture_export(model, args, names), self.name, verification, request.settings)
        except VerificationError:  # a batch of one has a graph of its own
            program = _normalized(capture_export(model, args, names, dynamic=False), self.name, verification, request.settings)
        program.guards += _fixed_defaults(model, names)
        program.guards += _smallest_batch(program, model, args, names)
        return program, verification


FRONT_ENDS: list[FrontEnd] = [SymbolicTrace(), TorchExport()]


def _captured(
    model: nn.Module, example_inputs: ExampleInputs, settings: Settings, capture: str
) -> tuple[Program, Verification | None]:
    """The normalized graph of a module: from the front end that was asked for, or from the first that knows every call."""
    args, names = positional(model, example_inputs)
    request = Request(model, args, names, _opaque_paths(model, settings.composite), settings)
    chosen = [one for one in FRONT_ENDS if capture in (AUTO, one.name)]
    others = [one for one in FRONT_ENDS if one not in chosen]
    captured: tuple[Program, Verification | None] | None = None
    failure: LrpfxError | None = None
    unknown: list[str] = []
    for front_end in chosen:
        obstacle = front_end.obstacle(request)
        if obstacle is not None:
            if captured is None and failure is None:
                raise obstacle
            others.append(front_end)
            continue
        try:
            found = front_end.capture(request)
        except (CaptureError, VerificationError) as error:
            if captured is not None:
                reason = (unknown[0], f"kept the graph of another front end: {error}")
                record(captured[0], "capture", front_end.name, PassResult(reasons=[reason]))
            elif failure is not None:
                failure.add_note(f"{front_end.title}, tried as well: {error}")
            else:
                failure = error
            continue
        unknown = _unknown_calls(found[0], settings.composite)
        if not unknown:
            return found
        captured = found
    if captured is not None:
        return captured
    failed = failure or CaptureError(f"no front end can capture {type(model).__name__}")
    for front_end in others:
        failed.add_note(front_end.hint(request))
    raise failed


def _fixed_defaults(model: nn.Module, names: Sequence[str]) -> list[Guard]:
    """Guards for arguments that keep their default."""
    parameters = inspect.signature(model.forward).parameters.values()
    optional = [one for one in parameters if one.default is not one.empty and one.name not in names]
    return [FixedValue(Place(one.name), one.default, default=True) for one in optional]


def _smallest_batch(program: Program, model: nn.Module, args: tuple[Any, ...], names: list[str]) -> list[Guard]:
    """A guard against a batch of one if the graph differs from the model there.

    torch.export assumes that a dynamic size is at least two, and follows branches accordingly without recording a condition.
    """
    varying = [
        guard.place for guard in program.guards if isinstance(guard, FixedSizes) and guard.sizes and guard.sizes[0] is None
    ]
    if not varying:
        return []
    named = dict(zip(names, args, strict=True))
    batches = {place.value_in(named).shape[0] for place in varying}
    if batches == {1}:
        return []  # the example itself
    first = {id(place.value_in(named)) for place in varying}
    single = pytree.tree_map(lambda value: value[:1] if id(value) in first else value, args)
    try:
        expected = _run_untouched(model, single, names)
        Verification(single, expected, records=False).check(program, "capture")
    except LrpfxError:
        return [SizeCondition("sizes[0] >= 2", ((place, 0),)) for place in varying]
    return []


def _fixed_kinds(program: Program) -> list[Guard]:
    """Guards that keep signals floating-point, and integers and truth values discrete."""
    guards: list[Guard] = []
    for node in program.graph.find_nodes(op="placeholder"):
        role = node_info(node).role
        is_read = any(user.op == "output" or node_info(user).role is Role.DATA for user in node.users)
        if role is Role.DISCRETE or (role is Role.DATA and is_read):
            guards.append(FixedKind(Place(str(node.target)), role is Role.DATA))
    return guards


def fixed_dimensions(program: Program, verification: Verification) -> list[Guard]:
    """Guards for the numbers of dimensions of the example inputs, for passes that relied on them."""
    guards: list[Guard] = []
    why = "batch norm was merged, or the weight of a layer norm, which relies on it"
    for node, value in zip(program.graph.find_nodes(op="placeholder"), verification.args, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                guards.append(FixedSizes(place_of(str(node.target), path), (None,) * leaf.ndim, why))
    return guards


def refuse_scripts(model: nn.Module) -> None:
    """Raise `CaptureError` for modules made by torch.jit, whose code is not Python."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the submodule {path!r} is" if path else "the model is"
            raise CaptureError(
                f"{what} a {type(module).__name__} of torch.jit, whose code the compiler cannot follow. Transform the Python "
                "model that it was made from; its state_dict() fits that model."
            )


def _of_exported(
    model: ExportedProgram, example_inputs: ExampleInputs, settings: Settings
) -> tuple[Program, Verification | None]:
    program = capture_program(model)
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
            raise InputError(f"example_inputs give {len(given)} arguments, but the exported program takes {len(names)}")
        return _normalized(program, TorchExport.name, None, settings), None
    with torch.no_grad():
        values = fx.Interpreter(program.root, graph=program.graph).run(*given)
    verification = Verification(tuple(given), values)
    return _normalized(program, TorchExport.name, verification, settings), verification


def _normalized(program: Program, front_end: str, verification: Verification | None, settings: Settings) -> Program:
    inputs = [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
    unknown = [name for name in settings.constants if name not in inputs]
    if isinstance(settings.constants, str) or unknown:
        raise InputError(f"constants are names of inputs, which are {', '.join(inputs)}, not {settings.constants!r}")
    unverified = NOT_VERIFIED if verification is None else ""
    record(program, "capture", front_end, PassResult(len(program.graph.nodes)), unverified)
    if program.frozen:
        values = [(name, f"read as a number: the graph holds {value.tolist()}") for name, value in program.frozen.items()]
        record(program, "capture", FROZEN, PassResult(len(values), values))
    if verification is not None:
        verification.check(program, "capture", overwrites=True)
    run_passes(program, passes_of(settings, "normalize"), verification)
    if not any(node_info(node).role is Role.DATA for node in program.graph.nodes if node.op != "output"):
        raise InputError(
            f"none of the inputs {', '.join(inputs)} is a signal: they are integers, truth values or declared constants, and "
            "no embedding looks them up. Pass floating-point example_inputs"
        )
    program.guards += _fixed_kinds(program)
    return program


def guessed_verification(program: Program, model: Model) -> Verification | None:
    """The model's output on random inputs, checked against the graph, for models without examples; None if none fit."""
    if isinstance(model, ExportedProgram):
        return None
    model, _ = dequantized(model)
    names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
    for args in random_arguments(program):
        try:
            verification = Verification(args, _run_untouched(model, args, names), records=False)
            verification.check(program, "normalize")
        except InputError:  # the wrong size for this model or its graph, not an error of the model
            continue
        verified_after_all(program)
        return verification
    return None


def _unknown_calls(program: Program, composite: RuleMapping | None) -> list[str]:
    """Names of calls that the operator table does not list and that have no rule in the composite."""
    unknown = []
    for node in data_calls(program.graph):
        info = node_info(node)
        if info.operator is None and node.op == "call_function":
            layer = layer_of_node(node, program.root)
            if composite is None or composite.module_map(MappingContext(), layer.name, layer) is None:
                unknown.append(info.name)
    return unknown


def check_evaluation_mode(model: nn.Module) -> None:
    """Raise `CaptureError` if a module of `model` would be random, depend on the batch or change its weight."""
    names = [name or "the model" for name, module in model.named_modules() if module.training and _differs_in_training(module)]
    if names:
        raise CaptureError(
            f"{type(model).__name__} is in training mode: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''} "
            "would be random, depend on the batch, or change their weights with every call. Call model.eval() first."
        )


def _differs_in_training(module: nn.Module) -> bool:
    random = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention)
    power_iteration = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return power_iteration or isinstance(module, (*random, parametrizations._SpectralNorm))


def _opaque_paths(model: nn.Module, composite: RuleMapping | None) -> set[str]:
    """Modules that the composite maps as a whole and that are not a single operation of the table."""
    if composite is None:
        return set()
    known = module_classes()
    return {
        path
        for path, module in model.named_modules()
        if path and not isinstance(module, known) and composite.maps_whole(path, module)
    }


def positional(model: nn.Module, example_inputs: ExampleInputs) -> tuple[tuple[Any, ...] | None, list[str]]:
    """Example inputs in the order of the graph's placeholders, and the names of their arguments."""
    if example_inputs is None:
        return None, []
    signature = inspect.signature(model.forward)
    try:
        if isinstance(example_inputs, torch.Tensor):
            bound = signature.bind(example_inputs)
        elif isinstance(example_inputs, Mapping):
            bound = signature.bind(**example_inputs)
        else:
            bound = signature.bind(*example_inputs)
    except TypeError as error:
        raise InputError(f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}") from error
    gathered = [name for name in bound.arguments if signature.parameters[name].kind in (_GATHERED, _GATHERED_BY_NAME)]
    if gathered:
        raise InputError(
            f"{type(model).__name__}.forward{signature} gathers arguments in {gathered[0]!r}, so the inputs of the graph have "
            "no names. Wrap the model in a module whose forward names them."
        )
    return tuple(bound.arguments.values()), list(bound.arguments)


def _run_untouched(model: nn.Module, args: tuple[Any, ...], names: list[str]) -> Any:
    """The output of a copy of the model, which leaves parameters, buffers, hooks and caches of the user's model unchanged."""
    copied = private_copy(model)
    try:
        with torch.no_grad():
            return copied(**dict(zip(names, fresh(args), strict=True)))
    except Exception as error:
        name = type(model).__name__
        raise InputError(f"{name} itself fails on the example inputs: {type(error).__name__}: {error}") from error
