"""The compiler: a model and a composite in, an explainable GraphModule out."""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .canonizers import needed_in_graphs
from .composites import Composite
from .errors import CaptureError, InputError, InputTypeError, LrpfxWarning
from .explain_module import ExplainModule
from .node import Role, node_info, update_info
from .operators import module_classes
from .passes import (
    Assign,
    Fold,
    MergeBatchNorm,
    NormalizeOperators,
    Pass,
    PassResult,
    Program,
    RemoveDeadCode,
    RemoveDropout,
    RemoveInplace,
    Rewrite,
    Validate,
    capture_symbolic,
    private_copy,
    run_pass,
)
from .passes.driver import Verification, record

ExampleInputs = torch.Tensor | Sequence[Any] | Mapping[str, Any] | None


def transform(
    model: nn.Module,
    composite: Composite,
    *,
    example_inputs: ExampleInputs = None,
    unassigned: str = "error",
    fold: bool = True,
) -> ExplainModule:
    """Compile `model` and `composite` into a GraphModule whose gradient is relevance.

    The model is not changed; the result holds a copy of its parameters and buffers. `example_inputs` (a tensor, a tuple of
    arguments, or a dict of keyword arguments) makes every stage be verified against the model's own output, and shapes known.
    `unassigned`: "error", or "gradient" to let operations without a rule keep their plain gradient. `fold=False` leaves merged
    and modified weights as live computations, and makes relevance differentiable with respect to inputs and parameters: take
    such derivatives inside `with explain_model.inactive()`.

    Errors: `CaptureError` for models that cannot be traced or are in training mode, `UnsupportedOperationError` for
    operations without a rule, `RuleError` for rules that do not fit their layer, `VerificationError`.
    """
    _check_arguments(model, composite, unassigned)
    canonizers = needed_in_graphs(composite.canonizers)
    if canonizers:
        model = private_copy(model)
        for canonizer in canonizers:
            canonizer.apply(model)
    keep_gradient = "gradient" in (unassigned, composite.unassigned)
    program, verification = _normal_form(model, example_inputs, composite)
    for step in _steps(composite, keep_gradient, fold):
        for message in run_pass(program, step, verification).warnings:
            warnings.warn(message, LrpfxWarning, stacklevel=2)
    return ExplainModule(
        program.root, program.graph, program.title, tuple(program.history), program.fold_graph, program.derived
    )


def _steps(composite: Composite, keep_gradient: bool, fold: bool) -> Iterator[Pass]:
    """The stages after NORMALIZE, in order."""
    yield MergeBatchNorm()
    yield Assign(composite)
    yield Validate(keep_gradient)
    yield Rewrite(differentiable=not fold)
    if fold:
        yield Fold()


def _normal_form(
    model: nn.Module, example_inputs: ExampleInputs, composite: Composite | None
) -> tuple[Program, Verification | None]:
    """CAPTURE and NORMALIZE: the graph that all later stages, and the names of all nodes, are based on."""
    _check_evaluation_mode(model)
    args, names = _positional(model, example_inputs)
    program = capture_symbolic(model, _opaque_paths(model, composite), names)
    record(program, "capture", "symbolic", PassResult(len(program.graph.nodes)))
    verification = None
    if args is not None:
        expected = _run_untouched(model, args, names)
        verification = Verification(args, expected)
        verification.check(program, "capture")
    for step in (
        NormalizeOperators(),
        RemoveInplace(),
        RemoveDropout(),
        RemoveDeadCode(),
    ):
        run_pass(program, step, verification)
    if args is not None:
        _record_shapes(program, args)
    return program, verification


def node_names(model: nn.Module) -> list[str]:
    """Qualified names of all nodes that compute something, in the order of execution.

    For a model: those that a composite and `record=` can name. They follow torchvision's feature extraction.
    """
    if isinstance(model, ExplainModule):
        graph = model.graph
    elif isinstance(model, nn.Module):
        graph = _normal_form(model, None, None)[0].graph
    else:
        raise InputTypeError(f"node_names takes a torch.nn.Module, not {type(model).__name__}")
    return [name for name, _ in named_nodes(graph)]


def named_nodes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """Inputs and data-carrying calls with their qualified names."""
    for node in graph.nodes:
        if node.op == "placeholder" or node.op.startswith("call"):
            info = node_info(node)
            if info.role is Role.DATA:
                yield info.name, node


def _check_arguments(model: nn.Module, composite: Composite, unassigned: str) -> None:
    if isinstance(model, ExplainModule):
        raise InputTypeError("the model is an explainable module already; transform the source model instead")
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"transform takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(composite, type) and issubclass(composite, Composite):
        raise InputTypeError(f"transform takes a composite, not its class; did you mean {composite.__name__}()?")
    if not isinstance(composite, Composite):
        raise InputTypeError(f"transform takes a composite, not {type(composite).__name__}")
    if hasattr(model, "_orig_mod"):
        raise InputTypeError("the model is wrapped by torch.compile; transform the model itself and compile the result")
    if unassigned not in ("error", "gradient"):
        raise InputError(f'unassigned is "error" or "gradient", not {unassigned!r}')


def _check_evaluation_mode(model: nn.Module) -> None:
    random = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention)
    names = [name or "the model" for name, module in model.named_modules() if isinstance(module, random) and module.training]
    if names:
        raise CaptureError(
            f"{type(model).__name__} is in training mode: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''} "
            "would be random or depend on the batch. Call model.eval() first."
        )


def _opaque_paths(model: nn.Module, composite: Composite | None) -> set[str]:
    """Modules that the composite maps as a whole: those that are not a single operation of the table anyway."""
    if composite is None:
        return set()
    known = module_classes()
    return {
        path
        for path, module in model.named_modules()
        if path and not isinstance(module, known) and composite.maps_whole(path, module)
    }


def _positional(model: nn.Module, example_inputs: ExampleInputs) -> tuple[tuple[Any, ...] | None, list[str]]:
    """Example inputs in the order of the graph's placeholders, and the names of the arguments that they give."""
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
    return tuple(bound.arguments.values()), list(bound.arguments)


def _run_untouched(model: nn.Module, args: tuple[Any, ...], names: list[str]) -> Any:
    """The model's output, from a copy: hooks and caches of the user's model stay as they are."""
    copied = private_copy(model)
    with torch.no_grad():
        return copied(**dict(zip(names, args, strict=True)))


class _ShapeRecorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op != "output":
            update_info(n, shape=tuple(value.shape))
        return value


def _record_shapes(program: Program, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        _ShapeRecorder(program.root, graph=program.graph).run(*args)
