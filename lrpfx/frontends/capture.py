"""CAPTURE and NORMALIZE: build the graph on which all later stages and all node names are based."""

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
DEQUANTIZED = "dequantize"  # the stage that reports replaced quantized layers
NO_SETTINGS = Settings()
FROZEN = "freeze_buffers"  # the stage that reports buffers whose values are constants of the graph


def normal_form(
    model: Model,
    example_inputs: ExampleInputs = None,
    settings: Settings = NO_SETTINGS,
    capture: str = AUTO,
) -> tuple[Program, Verification | None]:
    """The normalized graph of `model`, and its output on the example inputs, with which later stages are verified.

    `capture`: "symbolic" for a symbolic trace; "export" for torch.export, which needs example inputs; "auto" tries the trace,
    and falls back to torch.export if the trace fails, is wrong, or calls unknown operators. The fallback needs example inputs,
    and a composite that maps no module as a whole.
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
    """A model to capture, and the settings for it."""

    model: nn.Module
    args: tuple[Any, ...] | None  # example inputs
    names: list[str]  # the arguments that they are for
    opaque: set[str]  # paths of modules that the composite maps as a whole
    settings: Settings


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
        given = {} if args is None else dict(zip(names, args, strict=True))
        program = capture_symbolic(model, request.opaque, given)
        program.guards += [FixedValue(Place(name), value) for name, value in given.items() if is_constant(value)]
        program.guards += _fixed_defaults(model, names)
        verification = None if args is None else Verification(args, _run_untouched(model, args, names))
        return _normalized(program, self.name, verification, request.settings), verification


class TorchExport(FrontEnd):
    """torch.export. It runs the model on example inputs and looks inside every module."""

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
            return f"torch.export was not tried: it looks inside modules, but the composite maps {paths} as a whole"
        if request.args is None:
            return "torch.export may follow this model: pass example_inputs to lrpfx.transform"
        return super().hint(request)

    def capture(self, request: Request) -> tuple[Program, Verification | None]:
        model, names = request.model, request.names
        args = request.args or ()
        verification = Verification(args, _run_untouched(model, args, names))
        try:
            program = _normalized(capture_export(model, args, names), self.name, verification, request.settings)
        except VerificationError:  # a batch of one has its own graph
            program = _normalized(capture_export(model, args, names, dynamic=False), self.name, verification, request.settings)
        program.guards += _fixed_defaults(model, names)
        program.guards += _smallest_batch(program, model, args, names)
        return program, verification


FRONT_ENDS: list[FrontEnd] = [SymbolicTrace(), TorchExport()]


def _captured(
    model: nn.Module, example_inputs: ExampleInputs, settings: Settings, capture: str
) -> tuple[Program, Verification | None]:
    """The normalized graph of a module, from the requested front end or from the first one whose graph has no unknown calls."""
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
    """A guard against a batch of one, if the graph and the model differ for it.

    torch.export assumes that dynamic sizes are at least two. It chooses branches accordingly and records no condition.
    """
    varying = [
        guard.place for guard in program.guards if isinstance(guard, FixedSizes) and guard.sizes and guard.sizes[0] is None
    ]
    if not varying:
        return []
    named = dict(zip(names, args, strict=True))
    batches = {place.value_in(named).shape[0] for place in varying}
    if batches == {1}:
        return []  # the example is a batch of one
    first = {id(place.value_in(named)) for place in varying}
    single = pytree.tree_map(lambda value: value[:1] if id(value) in first else value, args)
    try:
        expected = _run_untouched(model, single, names)
        Verification(single, expected, records=False).check(program, "capture")
    except LrpfxError:
        return [SizeCondition("sizes[0] >= 2", ((place, 0),)) for place in varying]
    return []


def _fixed_kinds(program: Program) -> list[Guard]:
    """Guards that require floating-point signals, and integers or truth values for discrete inputs."""
    guards: list[Guard] = []
    for node in program.graph.find_nodes(op="placeholder"):
        role = node_info(node).role
        is_read = any(user.op == "output" or node_info(user).role is Role.DATA for user in node.users)
        if role is Role.DISCRETE or (role is Role.DATA and is_read):
            guards.append(FixedKind(Place(str(node.target)), role is Role.DATA))
    return guards


def fixed_dimensions(program: Program, verification: Verification) -> list[Guard]:
    """Guards for the numbers of dimensions of the example inputs, if passes relied on them."""
    guards: list[Guard] = []
    why = "batch norm or the weight of a layer norm was merged, which relies on this number"
    for node, value in zip(program.graph.find_nodes(op="placeholder"), verification.args, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                guards.append(FixedSizes(place_of(str(node.target), path), (None,) * leaf.ndim, why))
    return guards


def refuse_scripts(model: nn.Module) -> None:
    """Raise `CaptureError` for torch.jit modules: their code is not Python."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the submodule {path!r} is" if path else "the model is"
            raise CaptureError(
                f"{what} a {type(module).__name__} of torch.jit, whose code the compiler cannot follow. Transform the Python "
                "model that it was made from, which can load its state_dict()."
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
        raise InputError(f"constants must be names of inputs ({', '.join(inputs)}), not {settings.constants!r}")
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
            "no embedding reads them. Pass floating-point example_inputs"
        )
    program.guards += _fixed_kinds(program)
    return program


def guessed_verification(program: Program, model: Model) -> Verification | None:
    """The model's output on random inputs, checked against the graph, for models without examples; None if no input fits."""
    if isinstance(model, ExportedProgram):
        return None
    model, _ = dequantized(model)
    names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
    for args in random_arguments(program):
        try:
            verification = Verification(args, _run_untouched(model, args, names), records=False)
            verification.check(program, "normalize")
        except InputError:  # the inputs have the wrong size for this model or its graph
            continue
        verified_after_all(program)
        return verification
    return None


def _unknown_calls(program: Program, composite: RuleMapping | None) -> list[str]:
    """Names of calls that are not in the operator table and have no rule in the composite."""
    unknown = []
    for node in data_calls(program.graph):
        info = node_info(node)
        if info.operator is None and node.op == "call_function":
            layer = layer_of_node(node, program.root)
            if composite is None or composite.module_map(MappingContext(), layer.name, layer) is None:
                unknown.append(info.name)
    return unknown


def check_evaluation_mode(model: nn.Module) -> None:
    """Raise `CaptureError` if a module of `model` would be random, depend on the batch, or change its weights."""
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
    """Paths of modules that the composite maps as a whole, except single operations of the operator table."""
    if composite is None:
        return set()
    known = module_classes()
    return {
        path
        for path, module in model.named_modules()
        if path and not isinstance(module, known) and composite.maps_whole(path, module)
    }


def positional(model: nn.Module, example_inputs: ExampleInputs) -> tuple[tuple[Any, ...] | None, list[str]]:
    """The example inputs in the order of `forward`'s parameters, and the names of those parameters."""
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
    """The output of a copy of the model. Parameters, buffers, hooks and caches of the user's model stay unchanged."""
    copied = private_copy(model)
    try:
        with torch.no_grad():
            return copied(**dict(zip(names, fresh(args), strict=True)))
    except Exception as error:
        name = type(model).__name__
        raise InputError(f"{name} itself fails on the example inputs: {type(error).__name__}: {error}") from error
