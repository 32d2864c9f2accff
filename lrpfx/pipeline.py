"""The compiler: turns a model and a composite into an explainable GraphModule."""

import os
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import ExportedProgram
from typing_extensions import Self

from lrpfx.canonizers import graph_passes, needed_in_graphs
from lrpfx.composites import Composite
from lrpfx.composites.names import as_composite
from lrpfx.errors import InputError, InputTypeError
from lrpfx.frontends.capture import (
    AUTO,
    CaptureSettings,
    ExampleInputs,
    Normalize,
    captured,
    fixed_dimensions,
    guessed_verification,
    opaque_paths,
    with_rules,
)
from lrpfx.frontends.open_sizes import DynamicShapes, hold_sizes
from lrpfx.frontends.prepare import Model, Prepared, prepare
from lrpfx.ir.node import named_nodes
from lrpfx.passes.analyze.infer_signs import InputRange
from lrpfx.passes.driver import Verification, forget_guesses, named, run_passes, verify
from lrpfx.passes.program import Program
from lrpfx.passes.rewrite.checkpoint_blocks import checked_patterns
from lrpfx.passes.stages import LOGITS, OUTPUT, Settings, Stage, asked_canonizers, passes_of
from lrpfx.runtime.compiled_graph import CompiledGraph
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.identity.weights import Weights
from lrpfx.support.interrupts import undisturbed, young_collections
from lrpfx.support.module_tree import alias_tensors, tree_with_same_tensors
from lrpfx.support.tensors import mark_of

NO_SETTINGS = Settings()
_LATER = (Stage.ASSIGN, Stage.VALIDATE, Stage.ANALYZE, Stage.REWRITE, Stage.FOLD, Stage.FUSE)


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as a normalized, canonized and verified graph, for as many composites as one likes: see `lrpfx.capture`.

    It does not change when the model does, unless it shares its memory: then it is at an end when the model has other
    tensors. The results of `transform` share the memory of its
    parameters and buffers: `load_state_dict` of a whole result, and a change of dtype or device, are those of one alone; other
    assignments in place reach all, and end the use of the graph. A composite may decide on the front end, which it cannot do
    later: `capture="symbolic"` keeps functions that the operator table lacks, for rules by name.
    """

    _program: Program
    _verification: Verification | None
    _given: Model
    _weights: Weights  # of the given model
    _shares: bool  # whether the graph is on their memory
    _dynamic_shapes: DynamicShapes
    _canonizers: tuple[Any, ...]  # that have changed modules
    _marks: Mapping[str, Any]  # of parameters and buffers, by name

    def __reduce__(self) -> NoReturn:
        raise InputTypeError("a captured model cannot be pickled: pickle results of transform", topic="captured-models")

    def __copy__(self) -> Self:
        return self  # it does not change

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def model(self) -> Model:
        """The model that was captured."""
        return self._given

    @property
    def changed_tensor(self) -> str | None:
        """The name of a tensor that the model has with other values than at the capture, or None.

        Of a capture with `share=True`, a tensor in other memory counts, too.
        """
        return self._weights.first_changed(self._given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._program.title}: {len(list(named_nodes(self._program.graph)))} nodes)"

    @property
    def front_end(self) -> str:
        """The front end that captured it: "symbolic" or "export"."""
        return next(record.name for record in self._program.history if record.stage == "capture")


@undisturbed()
@young_collections()
@torch.inference_mode(False)
def capture(
    model: Model,
    example_inputs: ExampleInputs = None,
    *,
    capture: str = AUTO,
    constants: Collection[str] = (),
    dynamic_shapes: DynamicShapes = None,
    share: bool = False,
    canonizers: Sequence[Any] = (),
) -> Captured:
    """Capture and canonize a model once: `transform(captured, composite)` goes on from there, in a fraction of the time.

    Its results are those of `transform(model, composite)`, and share the parameters of the captured graph.

    Parameters
    ----------
    model, example_inputs, capture, constants, dynamic_shapes, share
        As for `transform`.
    canonizers
        Those that change modules, of all composites to come. Others need not be given.

    Returns
    -------
    Captured
        For `transform`, in place of the model.

    Raises
    ------
    CaptureError, VerificationError, InputError
        As for `transform`.

    Examples
    --------
    >>> captured = lrpfx.capture(model, example_inputs=x)
    >>> of_zplus = lrpfx.transform(captured, lrpfx.composites.EpsilonPlus())
    >>> of_gamma = lrpfx.transform(captured, lrpfx.composites.GammaByDepth())
    """
    _check_model(model, "capture")
    canonizers = Composite(canonizers=canonizers).canonizers  # which checks them
    source = prepared(model, canonizers, share)
    settings = Settings(constants=constants)
    asked = CaptureSettings(source, example_inputs, settings, capture, dynamic_shapes, _normalize(settings), share)

    def finish(program: Program, verification: Verification | None, asked: CaptureSettings) -> Captured:
        verification = _canonized(program, verification, asked)
        verify(program, verification)
        if verification is not None:
            verification.reduced = verification.with_smaller_images(program)
        program.shared = weakref.WeakValueDictionary()
        return Captured(
            program,
            verification,
            model,
            weights,
            share,
            dynamic_shapes,
            tuple(needed_in_graphs(canonizers)),
            _marks_of(program.root),
        )

    weights = Weights(model, share)
    found = captured(asked, finish)
    _warn(found._program)
    return found


@undisturbed()
@young_collections()
@torch.inference_mode(False)  # tensors made in inference mode cannot take part in a gradient
def transform(
    model: Model | Captured,
    composite: Composite | str,
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
    share: bool = False,
    checkpoint: str | Sequence[str] = (),
) -> ExplainModule:
    """Compile `model` and `composite` into a GraphModule whose gradient is relevance.

    The model is not changed; the result holds a copy of its parameters and buffers.

    Parameters
    ----------
    model
        A module in evaluation mode, an `ExportedProgram`, or what `capture` returns for one of them; then `example_inputs`,
        `capture`, `constants` and `dynamic_shapes` were given to `capture`.
    composite
        What gives each layer its rule; or its name, as for `lrpfx.composites.composite_named`, for one with its defaults.
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
        them are not signals either, or forward reads them as numbers, such as the grid of an image's patches: the graph is then
        valid for these numbers alone, and a call with others is an `InputError`.
    explain
        "output", or "logits" to return and explain the input of a final softmax or sigmoid: a softmax passes on next to nothing
        of a class that it is sure of.
    dynamic_shapes
        Which sizes may vary in the graph of torch.export. By default, all that the model leaves open, such as batches and
        lengths of sequences; heights and widths of images only on request. A dict such as `{"input_ids": {1: True}}` asks for
        dimension 1 of this argument: True, `(smallest, largest)` or a torch.export.Dim opens it, None fixes it at the example's
        size, and other dimensions keep the default. False fixes all sizes. Each open size is verified against the model at
        other sizes; a call with a size outside of what is allowed is an `InputError`.
    share
        Whether the result uses the memory of the model's parameters and buffers, instead of copies. Then assignments in place
        to those of either, such as a step of an optimizer or `model.load_state_dict`, reach both. What gives one other memory
        does not: changes of dtype or device, `load_state_dict` of the result, `load_state_dict(..., assign=True)`, a new
        `nn.Parameter`. A forward that writes into them is a `CaptureError`; canonizers that change modules, and quantized or
        offloaded weights, are an `InputError`.
    checkpoint
        Patterns of the paths of modules, such as "model.layers.*", which are computed again in the backward pass: until then,
        only what they read is kept, which takes less memory and more time. A pattern means the outermost modules that match
        it, and each of their calls is computed again on its own; maps are the same. A module with hooks on the layers in it is
        not computed again, and torch.compile and `lrpfx.lower` decide on their own what to keep.

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

    Examples
    --------
    >>> explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat())
    >>> bool((explain_model(x) == model(x)).all())
    True
    """
    composite = checked_arguments(model, composite, unassigned, explain, "transform")
    settings = settings_of(composite, unassigned, input_range, fold, optimize, constants, explain, checked_patterns(checkpoint))
    if isinstance(model, Captured):
        refuse_settings_of_capture(example_inputs is not None or share, capture, constants, dynamic_shapes)
        program = named(lambda each: _settled(*program_for(model, composite, each), settings, model._dynamic_shapes))
        alias_tensors(program.root, program.derived)
    else:
        source = prepared(model, composite.canonizers, share)
        asked = CaptureSettings(source, example_inputs, settings, capture, dynamic_shapes, _normalize(settings), share)

        def finish(program: Program, verification: Verification | None, asked: CaptureSettings) -> Program:
            return _settled(program, _canonized(program, verification, asked), settings, dynamic_shapes)

        program = captured(asked, finish)
    _warn(program)
    return ExplainModule(
        program.root,
        CompiledGraph(
            graph=program.graph,
            title=program.title,
            composite=repr(composite),
            unfused=program.unfused or program.graph,
            history=tuple(program.history),
            fold_graph=program.fold_graph,
            derived=program.derived,
            guards=tuple(program.guards),
            frozen=program.frozen,
            dtypes=program.dtypes,
        ),
        shares=share or isinstance(model, Captured),
        sums=program.sums,
    )


def prepared(model: Model, canonizers: Sequence[Any], share: bool = False) -> Prepared:
    """The model as captures take it: loaded, without quantized layers, and changed by those canonizers that change modules."""
    return prepare(model, needed_in_graphs(canonizers), share=share)


def _canonized(program: Program, verification: Verification | None, asked: CaptureSettings) -> Verification | None:
    """Run those passes of CANONIZE that all composites have in common. Returns what verifies later ones."""
    if verification is None:
        verification = guessed_verification(program, asked.source, asked.share)
        if verification is not None:
            verification.each = asked.verify_each
    run_passes(program, passes_of(NO_SETTINGS, Stage.CANONIZE), verification)
    return verification


def _settled(program: Program, verification: Verification | None, settings: Settings, dynamic_shapes: DynamicShapes) -> Program:
    """The final program of a composite. The canonized one is consumed."""
    run_passes(program, [*asked_canonizers(settings), *passes_of(settings, *_LATER)], verification)
    verify(program, verification)
    if program.fixed_dimensions:
        program.guards += fixed_dimensions(program, program.guessed if verification is None else verification.args)
    if verification is not None:
        hold_sizes(program, verification, dynamic_shapes)
    forget_guesses(program)
    return program


def _marks_of(root: nn.Module, sums: dict[Any, int] | None = None) -> dict[str, Any]:
    return {name: mark_of(tensor, sums) for name, tensor in (*root.named_parameters(), *root.named_buffers())}


def _warn(program: Program) -> None:
    for note in program.notes:
        warnings.warn(note, stacklevel=6)


def _normalize(settings: Settings) -> Normalize:
    """NORMALIZE, which captures run: it shows whether a graph is right and whether another front end may follow more."""
    return lambda program, verification: run_passes(program, passes_of(settings, Stage.NORMALIZE), verification)


def normal_form(
    model: Model | Prepared,
    example_inputs: ExampleInputs = None,
    settings: Settings = NO_SETTINGS,
    capture: str = AUTO,
    dynamic_shapes: DynamicShapes = None,
) -> tuple[Program, Verification | None]:
    """The normalized graph of a model, and its output on the example inputs, with which later stages are verified."""
    source = model if isinstance(model, Prepared) else prepare(model, needs_values=False)
    asked = CaptureSettings(source, example_inputs, settings, capture, dynamic_shapes, _normalize(settings))

    def finish(
        program: Program, verification: Verification | None, asked: CaptureSettings
    ) -> tuple[Program, Verification | None]:
        verify(program, verification)
        return program, verification

    return captured(asked, finish)


def settings_of(
    composite: Composite,
    unassigned: str,
    input_range: InputRange,
    fold: bool,
    optimize: bool,
    constants: Collection[str],
    explain: str,
    checkpoint: Sequence[str] = (),
) -> Settings:
    """The settings that the arguments of `transform` stand for."""
    keep_gradient = "gradient" in (unassigned, composite.unassigned)
    canonizers = graph_passes(composite.canonizers)
    return Settings(composite, canonizers, constants, input_range, keep_gradient, explain, fold, optimize, checkpoint)


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

    Examples
    --------
    >>> lrpfx.node_names(model)
    ['input', '0', '1', '2', '3']
    """
    if isinstance(model, ExplainModule):
        graph = model.unfused_graph
    else:
        _check_model(model, "node_names")
        graph = normal_form(model, example_inputs, capture=capture, dynamic_shapes=dynamic_shapes)[0].graph
    return [name for name, _ in named_nodes(graph)]


def program_for(captured: Captured, composite: Composite, verify_each: bool = False) -> tuple[Program, Verification | None]:
    """A copy of a captured program, and what verifies it. `InputError` for a composite that needs another graph."""
    needed = needed_in_graphs(composite.canonizers)
    if needed != list(captured._canonizers):  # in this order, as each changes what the one before has left
        raise InputError(
            f"the graph was captured with the canonizers of modules {list(captured._canonizers)}, and the composite has "
            f"{needed}: pass canonizers=composite.canonizers to lrpfx.capture",
            topic="canonizers-of-modules",
        )
    whole = opaque_paths(captured.model, composite) if isinstance(captured.model, nn.Module) else set()
    if whole:
        raise InputError(
            f"the composite maps {', '.join(sorted(whole))} as a whole, but a captured graph holds what is inside: "
            "transform the model itself, or map the layers inside",
            topic="captured-models",
        )
    opened = [one.name for one in with_rules(captured._program.opened, composite)]
    if opened:
        raise InputError(
            f"the composite has a rule for {', '.join(opened)}, which lrpfx does not know: the captured graph holds what is "
            'inside, by torch.export. Capture it with capture="symbolic", or transform the model itself',
            topic="captured-models",
        )
    sums: dict[Any, int] = {}
    present = _marks_of(captured._program.root, sums)
    changed = [name for name, mark in captured._marks.items() if present[name] != mark]
    if changed:
        raise InputError(
            f"{changed[0]} was assigned in place since the capture, in a result or a model that shares it: capture the model "
            "again, and change copies (copy.deepcopy)",
            topic="changed-weights",
        )
    replaced = captured._weights.first_changed(captured.model, sums) if captured._shares else None
    if replaced is not None:
        raise InputError(
            f"the model has another tensor {replaced} than at the capture, which shares its memory: capture the model again",
            topic="changed-weights",
        )
    program = captured._program.copied()
    program.sums = sums
    program.root = tree_with_same_tensors(program.root)  # canonizers may put tensors into it
    program.notes.clear()  # they were given when the model was captured
    verification = None if captured._verification is None else captured._verification.copied()
    if verification is not None:
        verification.each = verify_each
    return program, verification


def refuse_settings_of_capture(
    has_examples: bool, capture: str, constants: Collection[str], dynamic_shapes: DynamicShapes
) -> None:
    """Raise `InputTypeError` for settings of the capture beside a captured model."""
    if has_examples or capture != AUTO or constants or dynamic_shapes is not None:
        raise InputTypeError(
            "the model is captured already: give example_inputs, capture, constants, dynamic_shapes and share to lrpfx.capture",
            topic="captured-models",
        )


def no_module(model: Any) -> str:
    """What to pass in place of something that is often passed as the model: its class, its weights or its name."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"; did you mean {model.__name__}()?"
    if isinstance(model, Mapping):
        return ": load weights into a model first, model.load_state_dict(weights), and pass the model"
    if isinstance(model, (str, os.PathLike)) and Path(model).suffix:
        return ": pass what is in the file, torch.load(path) if it is a model, lrpfx.load(path) if lrpfx wrote it"
    if isinstance(model, str):
        return ": pass the model itself, such as torchvision.models.resnet50(weights='DEFAULT').eval()"
    if isinstance(getattr(model, "_module", None), nn.Module) and _is_of("nnsight", model):
        return " of nnsight: pass the model that it wraps, model._module"
    return _OF_BRIDGES if _is_of(_BRIDGES, model) else ""


#: Where TransformerLens has the modules that stand in place of those of a model.
_BRIDGES = "transformer_lens.model_bridge"
_OF_BRIDGES = (
    ", a bridge of TransformerLens, which computes with modules of its own, also in bridge.original_model: pass the model as "
    "transformers loads it, AutoModelForCausalLM.from_pretrained(bridge.cfg.model_name).eval()"
)


def _is_of(package: str, model: Any) -> bool:
    """Whether the class of an object, or one that it inherits from, is of a package, which need not be installed."""
    return any(f"{one.__module__}.".startswith(f"{package}.") for one in type(model).__mro__)


def _check_model(model: Model, caller: str) -> None:
    if isinstance(model, ExplainModule):
        raise InputTypeError(
            "the model is an explainable module already; transform the source model instead", topic="explainable-module"
        )
    if not isinstance(model, (nn.Module, ExportedProgram)):
        remedy = no_module(model)
        raise InputTypeError(f"{caller} takes a torch.nn.Module or an ExportedProgram, not {type(model).__name__}{remedy}")
    if isinstance(model, nn.Module) and any(_is_of(_BRIDGES, one) for one in model.modules()):
        raise InputTypeError(f"{caller} does not take {type(model).__name__}{_OF_BRIDGES}")
    if isinstance(model, nn.Module):
        path = next((path for path, module in model.named_modules() if isinstance(module, ExplainModule)), None)
        if path is not None:
            raise InputTypeError(
                f"the submodule {path!r} is an explainable module already; put the source model in its place",
                topic="explainable-module",
            )


def checked_arguments(
    model: Model | Captured, composite: Composite | str, unassigned: str, explain: str, caller: str
) -> Composite:
    """The composite. `InputError` for arguments of `transform`, or of another function, that do not go together."""
    if not isinstance(model, Captured):
        _check_model(model, caller)
    found = as_composite(composite, caller)
    if unassigned not in ("error", "gradient"):
        raise InputError(f'unassigned is "error" or "gradient", not {unassigned!r}')
    if explain not in (OUTPUT, LOGITS):
        raise InputError(f'explain is "output" or "logits", not {explain!r}')
    return found
