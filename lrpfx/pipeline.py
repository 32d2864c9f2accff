"""The compiler: turns a model and a composite into an explainable GraphModule."""

import warnings
from collections.abc import Collection

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from lrpfx.canonizers import graph_passes, needed_in_graphs
from lrpfx.composites import Composite
from lrpfx.errors import InputError, InputTypeError, LrpfxWarning
from lrpfx.frontends.capture import (
    AUTO,
    ExampleInputs,
    Model,
    fixed_dimensions,
    from_normal_form,
    guessed_verification,
    normal_form,
)
from lrpfx.frontends.offloaded import onloaded
from lrpfx.frontends.open_sizes import DynamicShapes, hold_sizes
from lrpfx.frontends.symbolic import private_copy
from lrpfx.frontends.traceable import COMPILED
from lrpfx.ir.node import named_nodes
from lrpfx.passes.analyze.infer_signs import InputRange
from lrpfx.passes.driver import Verification, run_passes
from lrpfx.passes.program import Program
from lrpfx.passes.stages import LOGITS, OUTPUT, STAGES, Settings, passes_of
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.interrupts import undisturbed


@undisturbed()
@torch.inference_mode(False)  # tensors made in inference mode cannot take part in a gradient
def transform(
    model: Model,
    composite: Composite,
    example_inputs: ExampleInputs = None,
    *,
    capture: str = AUTO,
    unassigned: str = "error",
    input_range: InputRange = None,
    fold: bool = True,
    optimize: bool = True,
    constants: Collection[str] = (),
    explain: str = "output",
    dynamic_shapes: DynamicShapes = None,
) -> ExplainModule:
    """Compile `model` and `composite` into a GraphModule whose gradient is relevance.

    The model is not changed; the result holds a copy of its parameters and buffers.

    Parameters
    ----------
    model
        A module in evaluation mode, or an `ExportedProgram`.
    composite
        What gives each layer its rule.
    example_inputs
        A tensor, a tuple of arguments, or a dict of keyword arguments. With them, shapes are known and every stage is verified
        against the model's output; without them, random inputs verify the stages if they fit the model.
    capture
        "symbolic", "export" (torch.export, which needs example inputs), or "auto": the symbolic trace, with torch.export as the
        fallback if there are example inputs.
    unassigned
        "error", or "gradient" to let operations without a rule keep their plain gradient.
    input_range
        The lowest and highest value of the inputs, for all or by name in a dict; it makes rules cheaper.
    fold
        False keeps merged and modified weights as live computations, so relevance can be differentiated with respect to inputs
        and parameters: take such derivatives, and the gradient of a loss with respect to parameters, inside
        `with explain_model.inactive()`. Outside of it, they are an `InputError`.
    optimize
        False evaluates every rule as written, without the shortcuts that give the same relevance with less work. Use it for
        comparison, and if relevance enters anywhere but at the output.
    constants
        Names of inputs that are not signals, such as a floating-point mask; they and values computed only from them get no
        relevance. Inputs of integers or truth values need no declaration, unless the vectors that an embedding looks up for
        them are not signals either.
    explain
        "output", or "logits" to return and explain the input of a final softmax or sigmoid: a softmax passes on next to nothing
        of a class that it is sure of.
    dynamic_shapes
        Which sizes may vary in the graph of torch.export. By default, all that the model leaves open, such as batches and
        lengths of sequences; heights and widths of images only on request. A dict such as `{"input_ids": {1: True}}` asks for
        dimension 1 of this argument: True, `(smallest, largest)` or a torch.export.Dim opens it, None fixes it at the example's
        size, and other dimensions keep the default. False fixes all sizes. Each open size is verified against the model at
        other sizes; a call with a size outside of what is allowed is an `InputError`.

    Raises
    ------
    CaptureError
        The model cannot be traced, is in training mode, or fixes a size that `dynamic_shapes` opens.
    UnsupportedOperationError
        An operation has no rule.
    RuleError
        A rule does not fit its layer.
    VerificationError
        A stage does not compute what the model computes.
    InputError
        An argument has an invalid value. An argument of the wrong type is an `InputTypeError`.
    """
    check_arguments(model, composite, unassigned, explain, "transform")
    model = prepared(model, composite)
    settings = settings_of(composite, unassigned, input_range, fold, optimize, constants, explain)
    later = [stage for stage in STAGES if stage != "normalize"]

    def finish(program: Program, verification: Verification | None) -> tuple[Program, list[LrpfxWarning]]:
        verification = verification or guessed_verification(program, model)
        messages = run_passes(program, passes_of(settings, *later), verification)
        if verification is not None:
            program.guards += fixed_dimensions(program, verification) if program.fixed_dimensions else []
            hold_sizes(program, verification, dynamic_shapes)
        return program, messages

    program, messages = from_normal_form(finish, model, example_inputs, settings, capture, dynamic_shapes)
    for message in messages:
        warnings.warn(message, stacklevel=4)
    return ExplainModule(
        program.root,
        program.graph,
        program.title,
        tuple(program.history),
        program.fold_graph,
        program.derived,
        repr(composite),
        tuple(program.guards),
        program.frozen,
        program.unfused,
        program.dtypes,
    )


def prepared(model: Model, composite: Composite) -> Model:
    """The model to capture: with its weights in memory, and changed by the composite's canonizers, in a private copy."""
    model = model if isinstance(model, ExportedProgram) else onloaded(model)
    _check_module(model)
    canonizers = needed_in_graphs(composite.canonizers)
    if canonizers:
        if isinstance(model, ExportedProgram):
            raise InputError(
                f"{canonizers[0]} changes modules, which an exported program does not have; transform the model itself",
                topic="canonizers-of-modules",
            )
        model = private_copy(model)
        for canonizer in canonizers:
            canonizer.apply(model)
    return model


def settings_of(
    composite: Composite,
    unassigned: str,
    input_range: InputRange,
    fold: bool,
    optimize: bool,
    constants: Collection[str],
    explain: str,
) -> Settings:
    """The settings that the arguments of `transform` stand for."""
    keep_gradient = "gradient" in (unassigned, composite.unassigned)
    canonizers = graph_passes(composite.canonizers)
    return Settings(composite, canonizers, constants, input_range, keep_gradient, explain, fold, optimize)


def node_names(
    model: Model, example_inputs: ExampleInputs = None, *, capture: str = AUTO, dynamic_shapes: DynamicShapes = None
) -> list[str]:
    """Qualified names of all nodes that compute something, in the order of execution.

    These are the names for composites and `record=`. They follow torchvision's feature extraction.

    Parameters
    ----------
    model
        A module, or an `ExportedProgram`.
    example_inputs
        As for `transform`; models that only torch.export can capture need them.
    capture, dynamic_shapes
        As for `transform`.

    Raises
    ------
    InputTypeError
        The model is of another type.
    CaptureError
        The model cannot be traced.
    """
    if isinstance(model, ExplainModule):
        graph = model.unfused_graph
    elif isinstance(model, (nn.Module, ExportedProgram)):
        graph = normal_form(model, example_inputs, capture=capture, dynamic_shapes=dynamic_shapes)[0].graph
    else:
        raise InputTypeError(f"node_names takes a torch.nn.Module, not {type(model).__name__}", topic="explainable-module")
    return [name for name, _ in named_nodes(graph)]


def check_arguments(model: Model, composite: Composite, unassigned: str, explain: str, caller: str) -> None:
    """Raise `InputError` for arguments of `transform`, or of another function that takes them, that do not go together."""
    if isinstance(model, ExplainModule):
        raise InputTypeError(
            "the model is an explainable module already; transform the source model instead", topic="explainable-module"
        )
    if not isinstance(model, (nn.Module, ExportedProgram)):
        raise InputTypeError(f"{caller} takes a torch.nn.Module or an ExportedProgram, not {type(model).__name__}")
    if isinstance(composite, type) and issubclass(composite, Composite):
        raise InputTypeError(f"{caller} takes a composite, not its class; did you mean {composite.__name__}()?")
    if not isinstance(composite, Composite):
        raise InputTypeError(f"{caller} takes a composite, not {type(composite).__name__}")
    if unassigned not in ("error", "gradient"):
        raise InputError(f'unassigned is "error" or "gradient", not {unassigned!r}')
    if explain not in (OUTPUT, LOGITS):
        raise InputError(f'explain is "output" or "logits", not {explain!r}')


def _check_module(model: Model) -> None:
    """Raise an error for wrappers whose names would be in the way, for parts that are explained already, and without values."""
    if isinstance(model, ExportedProgram):
        return
    name = type(model).__name__
    if hasattr(model, COMPILED):
        raise InputTypeError("the model is wrapped by torch.compile; transform the model itself and compile the result")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InputTypeError(f"the model is wrapped by {name}; transform model.module and wrap the result")
    for path, module in model.named_modules():
        if isinstance(module, ExplainModule):
            raise InputTypeError(
                f"the submodule {path!r} is an explainable module already; put the source model in its place",
                topic="explainable-module",
            )
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise InputError(
                f"{path or 'the model'} is a {type(module).__name__} whose parameters have no shape yet; "
                "call the model once on an input first"
            )
    missing = [path for path, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if missing:
        raise InputError(
            f"{name} is on the meta device, where there are no values to explain: {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}. Load its weights first, as with "
            "load_state_dict(..., assign=True)",
            topic="kinds-of-inputs",
        )
