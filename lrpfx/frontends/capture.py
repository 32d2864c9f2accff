"""CAPTURE and NORMALIZE: build the graph on which all later stages and all node names are based."""

import inspect
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm

from lrpfx.errors import CaptureError, InputError, LrpfxError, LrpfxWarning, VerificationError, first_lines
from lrpfx.frontends.dequantize import dequantized
from lrpfx.frontends.exported import capture_export, capture_program
from lrpfx.frontends.offloaded import onloaded
from lrpfx.frontends.open_sizes import (
    Dimension,
    DynamicShapes,
    FinalCaptureError,
    Named,
    OpenSizes,
    Wish,
    attempts,
    enlarged,
    settle,
    tensors_in,
    wishes_of,
)
from lrpfx.frontends.symbolic import capture_symbolic, private_copy
from lrpfx.ir.guards import FixedKind, FixedSizes, FixedValue, Guard, Place, is_constant, place_of
from lrpfx.ir.node import Role, calls, data_calls, is_floating, node_info
from lrpfx.layers.layer import layer_of_node
from lrpfx.operators.recurrent import PACKED
from lrpfx.operators.table import module_classes
from lrpfx.passes.driver import (
    NOT_VERIFIED,
    Verification,
    fresh,
    log_begin,
    log_end,
    random_arguments,
    record,
    run_passes,
    verified_after_all,
)
from lrpfx.passes.program import PassResult, Program
from lrpfx.passes.stages import Settings, passes_of
from lrpfx.rules.mapping import MappingContext, RuleMapping
from lrpfx.support.torch_internals import pytree, size_symbol

logger = logging.getLogger(__name__)

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
    dynamic_shapes: DynamicShapes = None,
) -> tuple[Program, Verification | None]:
    """The normalized graph of `model`, and its output on the example inputs, with which later stages are verified.

    `capture`: "symbolic" for a symbolic trace; "export" for torch.export, which needs example inputs; "auto" tries the trace,
    and falls back to torch.export if the trace fails, is wrong, or calls unknown operators. The fallback needs example inputs,
    and a composite that maps no module as a whole. `dynamic_shapes`: see `lrpfx.transform`.
    """
    if capture not in (AUTO, *(one.name for one in FRONT_ENDS)):
        known = " or ".join(f'"{one.name}"' for one in FRONT_ENDS)
        raise InputError(f'capture is "auto", {known}, not {capture!r}')
    if isinstance(dynamic_shapes, Mapping) and (example_inputs is None or isinstance(model, ExportedProgram)):
        raise InputError("dynamic_shapes is for modules with example_inputs; an exported program has sizes of its own")
    if isinstance(model, ExportedProgram):
        return _of_exported(model, example_inputs, settings)
    refuse_scripts(model)
    check_evaluation_mode(model)
    unquantized, replaced = dequantized(without_cache(onloaded(model)))
    program, verification = _captured(unquantized, example_inputs, settings, capture, dynamic_shapes)
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
    wishes: dict[Dimension, Wish]  # which sizes may vary

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
        program = capture_symbolic(model, request.opaque, given)
        log_end("capture", self.name, len(program.graph.nodes), began)
        program.guards += [FixedValue(Place(name), value) for name, value in given.items() if is_constant(value)]
        program.guards += _fixed_defaults(model, names)
        if args is None:
            return _normalized(program, self.name, None, request.settings), None
        run = _runner(model)
        verification = Verification(args, run(given))
        program = _normalized(program, self.name, verification, request.settings)
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
        model, named = request.model, request.named
        run = _runner(model)
        verification = Verification(tuple(named.values()), run(named))
        failure: LrpfxError | None = None
        for dimensions in attempts(named, request.wishes):
            example = enlarged(named, dimensions, lambda larger: _succeeds(run, larger))
            began = log_begin("capture", self.name)
            try:
                program, sizes = capture_export(model, example, dimensions)
                log_end("capture", self.name, len(program.graph.nodes), began)
                program = _normalized(program, self.name, verification, request.settings)
                guards, verification.another = settle(program, sizes, example, run, request.wishes, named)
            except FinalCaptureError:
                raise
            except (CaptureError, VerificationError) as error:  # a batch of one has its own graph, for example
                failure = error
                continue
            program.guards = [*guards, *program.guards, *_fixed_defaults(model, request.names)]
            if not any(guard.problem(named) for guard in program.guards):
                return program, verification
        raise failure or CaptureError(f"no graph of {type(model).__name__} is valid for the example inputs")


FRONT_ENDS: list[FrontEnd] = [SymbolicTrace(), TorchExport()]


def _captured(
    model: nn.Module, example_inputs: ExampleInputs, settings: Settings, capture: str, dynamic_shapes: DynamicShapes
) -> tuple[Program, Verification | None]:
    """The normalized graph of a module, from the requested front end or from the first one whose graph has no unknown calls."""
    args, names = positional(model, example_inputs)
    wishes = wishes_of(dynamic_shapes, dict(zip(names, args or (), strict=True)))
    request = Request(model, args, names, _opaque_paths(model, settings.composite), settings, wishes)
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
            logger.info("%s cannot capture %s: %s", front_end.title, type(model).__name__, first_lines(error, 1))
            if captured is not None:
                reason = (unknown[0], f"kept the graph of another front end: {error}")
                record(captured[0], "capture", front_end.name, PassResult(reasons=[reason]))
            elif isinstance(error, FinalCaptureError) and failure is not None:
                error.add_note(str(failure))
                failure = error
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
    began = log_begin("capture", TorchExport.name)
    program = capture_program(model)
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
    if front_end == TorchExport.name:
        program.dtypes = _fixed_dtypes(program)
    unverified = NOT_VERIFIED if verification is None else ""
    record(program, "capture", front_end, PassResult(len(program.graph.nodes)), unverified)
    if program.frozen:
        values = [(name, f"read as a number: the graph holds {value.tolist()}") for name, value in program.frozen.items()]
        record(program, "capture", FROZEN, PassResult(len(values), values))
    if verification is not None:
        verification.check(program, "capture", overwrites=True)
    messages = run_passes(program, passes_of(settings, "normalize"), verification)
    own = front_end == TorchExport.name and program.title != ExportedProgram.__name__  # decomposed by lrpfx, if at all
    for message in [] if own else messages:
        warnings.warn(message, LrpfxWarning, stacklevel=6)
    if not any(node_info(node).role is Role.DATA for node in program.graph.nodes if node.op != "output"):
        raise InputError(
            f"none of the inputs {', '.join(inputs)} is a signal: they are integers, truth values or declared constants, and "
            "no embedding reads them. Pass floating-point example_inputs"
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


def guessed_verification(program: Program, model: Model) -> Verification | None:
    """The model's output on random inputs, checked against the graph, for models without examples; None if no input fits."""
    if isinstance(model, ExportedProgram):
        return None
    model, _ = dequantized(without_cache(onloaded(model)))
    names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
    for args in random_arguments(program):
        try:
            verification = Verification(args, _runner(model)(dict(zip(names, args, strict=True))), records=False)
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


def names_arguments(model: nn.Module, value: Any) -> bool:
    """Whether a value is a dict of the model's arguments by name, not an argument itself."""
    return isinstance(value, Mapping) and bool(value) and next(iter(value)) in inspect.signature(model.forward).parameters


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
    named: Named = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is _GATHERED:
            raise InputError(
                f"{type(model).__name__}.forward{signature} gathers arguments in {name!r}, so the inputs of the graph have no "
                "names. Wrap the model in a module whose forward names them."
            )
        named |= value if kind is _GATHERED_BY_NAME else {name: value}
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(named)):
        raise InputError("example_inputs hold no tensors; a tokenizer returns them with return_tensors='pt'")
    packed = [name for name, value in named.items() if isinstance(value, PackedSequence)]
    if packed:
        raise InputError(f"the example input {packed[0]!r} is packed: {PACKED}.")
    return tuple(named.values()), list(named)


def _runner(model: nn.Module) -> Callable[[Named], Any]:
    """A function that returns the output of a copy of the model, which leaves the user's model unchanged."""
    copied = private_copy(model)

    def run(named: Named) -> Any:
        try:
            with torch.no_grad():
                return copied(**fresh(named))
        except Exception as error:
            name = type(model).__name__
            remedy = ""
            if len(model._forward_pre_hooks) > len(model._forward_pre_hooks_with_kwargs):
                remedy = " Its forward pre-hooks get no arguments, since these are passed by name: register with_kwargs=True."
            raise InputError(f"{name} itself fails on the example inputs: {first_lines(error)}.{remedy}") from error

    return run


def _succeeds(run: Callable[[Named], Any], named: Named) -> bool:
    try:
        run(named)
    except InputError:
        return False
    return True


def without_cache(model: nn.Module) -> nn.Module:
    """A copy whose configurations say `use_cache=False`, or the model itself if none of them asks for a cache.

    Language models of transformers return the keys and values of all layers by default: state of a generation, not an output
    to explain. Each submodule may hold a configuration of its own.
    """
    if not any(_keeps_cache(module) for module in model.modules()):
        return model
    copied = private_copy(model, share_parameters=True)  # front ends copy it again
    for module in copied.modules():
        if _keeps_cache(module):
            module.config.use_cache = False  # type: ignore[union-attr]
    return copied


def _keeps_cache(module: nn.Module) -> bool:
    return getattr(vars(module).get("config"), "use_cache", None) is True
