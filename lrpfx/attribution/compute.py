"""Attribution: run an explainable module, and propagate relevance back to its inputs and to recorded layers."""

import dataclasses
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Generic, TypeVar, overload

import torch
from torch import fx, nn

from lrpfx.attribution.infinite_masks import hiding, input_node, other_reader
from lrpfx.attribution.out_of_vocabulary import OutOfVocabulary
from lrpfx.attribution.plausibility import Watch, advice, objection_to, saturates
from lrpfx.attribution.summary import summary_of
from lrpfx.attribution.targets import Index, Target, Targets, listed, relevance_of_output, without_arrays
from lrpfx.errors import InputError, InputTypeError, LrpfxError, LrpfxWarning, first_lines, is_out_of_memory
from lrpfx.ir.node import (
    NodeInfo,
    Role,
    attribute_of,
    data_calls,
    floating_tensors,
    is_floating,
    named_nodes,
    node_info,
    nodes_in,
    output_node,
    set_info,
)
from lrpfx.ir.operator import WeightLayout
from lrpfx.operators.table import spelling_of
from lrpfx.passes import final_softmax
from lrpfx.runtime.explain_module import (
    ExplainModule,
    RuleModule,
    TreeGraphModule,
    copy_graph,
    executed,
    explainable,
    rule_module_of,
)
from lrpfx.runtime.multipliers import relevance_from
from lrpfx.runtime.plain_calls import Called, with_plain_calls
from lrpfx.runtime.ruled_operation import Execution
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.tensors import not_dense
from lrpfx.support.torch_internals import compiler_of, has_hooks_for_all_modules, pytree
from lrpfx.types import Embedding, Neutral

Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]
OutputSelector = int | str | Callable[[Any], torch.Tensor] | None


Relevance = TypeVar("Relevance")


@dataclass(frozen=True)
class Attribution(Generic[Relevance]):
    """The explained output, relevance of the inputs (same structure and shapes), and relevance of recorded layers by name.

    `constants` holds the relevance of terms that do not depend on the inputs, such as embeddings of positions, if requested.

    An integer input is represented by the relevance of the output of its embedding, by a dict of these by name if several
    embeddings read it, or by None if none does.
    """

    output: torch.Tensor
    relevance: Relevance
    layers: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # in the shapes of the constants
    targets: int | None = None  # how many, if each relevance has a leading dimension for them

    def _repr_html_(self) -> str:
        """Shapes and sums, and heatmaps of images, for notebooks."""
        return summary_of(self.output, self.relevance, self.layers, self.constants, self.targets)


@overload
def attribute(
    explain_model: nn.Module,
    inputs: torch.Tensor,
    target: Target = None,
    *,
    targets: Targets | None = None,
    record: str | Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
) -> Attribution[torch.Tensor]: ...
@overload
def attribute(
    explain_model: nn.Module,
    inputs: Mapping[str, Any],
    target: Target = None,
    *,
    targets: Targets | None = None,
    record: str | Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
) -> Attribution[dict[str, Any]]: ...
@overload
def attribute(
    explain_model: nn.Module,
    inputs: Sequence[Any],
    target: Target = None,
    *,
    targets: Targets | None = None,
    record: str | Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
) -> Attribution[tuple[Any, ...]]: ...
def attribute(
    explain_model: nn.Module,
    inputs: Inputs,
    target: Target = None,
    *,
    targets: Targets | None = None,
    record: str | Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
) -> Attribution[Any]:
    """Relevance of the inputs for the model's output.

    `inputs`: a tensor, a tuple of the model's arguments, or a dict of its keyword arguments, such as a tokenizer returns, which
    may hold tensors in tuples, lists and dicts; relevance has the same structure. `target`: a class index, a list, array or
    tensor of indices, one for each sample, relevance of the output as a tensor of its shape, a function from the output to such
    a tensor, or None for the class of the largest output. A class index assigns the output of that class as its relevance, so
    relevance sums to the logit. A dict `{class: weight}` explains a weighted sum of classes, such as the difference of two. For
    outputs of shape (batch, positions, tokens), the target is `(position, token)`; both may be tensors of shape (batch,), a
    negative position counts from the end, and the token may be None or a dict as well. Numbers and arrays of NumPy are targets
    like Python's and tensors. `record`: names of nodes (see `lrpfx.node_names`) whose output relevance is returned in `layers`.
    The path of a module means what the module returns in its last call, and a pattern with `*`, `?` or `[...]` all matching
    nodes, and the matching modules without such a node. `output`: the output to explain if the model has several: its index,
    its key or attribute, or a function of all outputs; by default the one called "logits", or else "last_hidden_state".
    `constants`: also return the relevance that parameters and embeddings of positions or token types take where they are added
    to the signal, by name; tokens of models with and without them then compare. Constants that depend on integer inputs, such
    as a mask plus a bias, are in the ledger alone.

    `targets` instead of `target`: several for each sample, explained with one forward pass, as a list of such targets or a
    tensor with a dimension for them in front; all relevances then have a leading dimension for the targets. `chunk_size` limits
    how many are propagated together, which bounds the memory. The default is all of them; on a CPU it is one, which is faster
    there. `progress` shows a bar of the targets that are done (needs tqdm).

    Errors: `InputError` (shape, non-finite values, target out of range, unknown name), `InputTypeError`. An `LrpfxWarning` is
    issued for implausible maps: relevance of more than a thousand times the seed, not finite, or exactly zero, and for a class
    that is explained after a final softmax.
    """
    attribution, objection = find_attribution(
        explain_model, inputs, target, targets, record, output, chunk_size, constants, progress
    )
    message = None if torch.compiler.is_compiling() else objection()
    if message is not None:
        warnings.warn(message, LrpfxWarning, stacklevel=2)
    return attribution


@contextmanager
def misfits(module: ExplainModule, arguments: "Arguments") -> Iterator[None]:
    """Turn the errors that torch raises for misfitting inputs into `InputError`."""
    try:
        yield
    except (LrpfxError, torch.OutOfMemoryError, AssertionError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        problem = arguments.call(OutOfVocabulary(module)) if isinstance(error, IndexError) else None
        if problem is not None:
            raise InputError(problem) from error
        tensors = [*arguments.leaves, *(arguments.at(place) for place in arguments.integers)]
        parameters = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]
        if any(tensor.is_meta for tensor in parameters):
            raise InputError(_NO_VALUES.format(module.title)) from error
        dtypes = {str(tensor.dtype) for tensor in tensors if is_floating(tensor)}
        computed = {str(tensor.dtype) for tensor in parameters}
        if not dtypes - computed and re.search(r"dtype|scalar type", str(error)):
            raise InputError(
                f"{module.title} cannot run on these inputs: tensors of different dtypes meet in forward, and the parameters "
                f"are {' and '.join(sorted(computed))}; does the source model run in this dtype? ({first_lines(error)})"
            ) from error
        shapes = ", ".join("×".join(map(str, tensor.shape)) or "()" for tensor in tensors)
        hints = [f"the inputs are {' and '.join(dtypes)}, the parameters {' and '.join(computed)}"] if dtypes - computed else []
        hints += [f"the inputs have the shape {shapes}{_first_layer(module, tensors)}"]
        raise InputError(f"{module.title} cannot run on these inputs: {'; '.join(hints)} ({first_lines(error)})") from error


_NO_VALUES = "{} is on the meta device, where there are no values to explain"
_AXES = ("length", "height×width", "depth×height×width")


def _first_layer(module: ExplainModule, tensors: Sequence[torch.Tensor]) -> str:
    """A hint about the input shape of the first layer with a weight."""
    for node in data_calls(module.graph):
        info = node_info(node)
        row = info.operator
        if row is not None and row.weighs_channels and node.op == "call_module" and isinstance(node.args[1], fx.Node):
            layer = rule_module_of(node, module)
            groups = 1 if layer is None else layer.ruled.operation.kwargs.get("groups", 1)
            channels = attribute_of(node.args[1], module).shape[1] * groups
            dense = row.weight_layout is WeightLayout.DENSE
            takes = f"...×{channels}" if dense else f"batch×{channels}×{_AXES[row.spatial - 1]}"
            alone = not dense and any(one.ndim == takes.count("×") for one in tensors)
            remedy = ": pass input[None], a batch of one" if alone else ""
            return f", and the first layer, {info.name}, takes {takes}{remedy}"
    return ""


def find_attribution(
    explain_model: nn.Module,
    inputs: Inputs,
    target: Target = None,
    targets: Targets | None = None,
    record: Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
) -> tuple[Attribution[Any], Callable[[], str | None]]:
    """The result of `attribute`, and a function that returns an objection if the result is implausible, or None."""
    module = explainable(explain_model, "attribute")
    several = targets is not None
    if several and target is not None:
        raise InputError("target= is one target for each sample, targets= are several for each; pass one of them")
    wanted_targets = listed(targets) if several else [without_arrays(target)]
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, Index) or chunk_size < 1):
        raise InputError(f"chunk_size is a positive number of targets, not {chunk_size!r}")
    with torch.inference_mode(False), torch.enable_grad():
        arguments = Arguments(inputs)
        arguments.admit(module)
        record = recorded_names(module.unfused_graph, record)
        embeddings = embeddings_of(module, arguments)
        names = tuple(dict.fromkeys([*record, *(name for found in embeddings.values() for name in found)]))
        is_compiled = explain_model is not module
        records = bool(names) or constants
        recording = (names, bool(embeddings), constants)
        traced = recorder_of(module, *recording, is_compiled) if records else module
        probes = {}
        if records and is_compiled:
            with misfits(module, arguments):
                probes = _probes(module, recording, arguments)

        def run(runner: Callable[..., Any], recorder: TreeGraphModule, probes: Mapping[str, torch.Tensor]) -> _Forward:
            with misfits(module, arguments):
                result = arguments.call(runner, probes)
            chosen, recorded = (result[0], list(result[1:])) if records else (result, [])
            factors = [*(None for _ in arguments.leaves), *factors_of(recorder, recorded)]
            return _Forward(select_output(chosen, output), recorded, factors)

        runner = _runner(explain_model, module, traced, several)
        forward = run(runner, traced, probes)
        explained = forward.output
        if explained.is_meta:
            raise InputError(_NO_VALUES.format(module.title))
        seeds = [relevance_of_output(explained, one) for one in wanted_targets]
        wanted = [*arguments.leaves, *(probes.values() if probes else forward.layers)]
        if not explained.requires_grad or not any(tensor.requires_grad for tensor in wanted):
            raise InputError("the output does not depend on the inputs through any operation that carries relevance")
        found: Sequence[torch.Tensor]
        if several and is_compiled:  # torch.compile overwrites what a graph has saved in its first backward pass
            parts = []
            for number, seed in enumerate(progress_bar(seeds, progress, unit="target")):
                forward = run(runner, traced, probes) if number else forward
                parts.append(relevances_of(forward.output, wanted, seed, forward.factors))
            found = [torch.stack(of_tensor) for of_tensor in zip(*parts, strict=True)]
        elif several:
            alone = _has_code(module) or (chunk_size is None and explained.device.type == "cpu")
            size = 1 if alone else chunk_size or len(seeds)
            found = _relevances_in_chunks(explained, wanted, torch.stack(seeds), forward.factors, size, progress)
        else:
            found = relevances_of(explained, wanted, seeds[0], forward.factors)
    first = len(arguments.leaves) + len(names)
    recorded = dict(zip(names, found[len(arguments.leaves) : first], strict=True))
    of_constants: dict[str, torch.Tensor] = {}
    for node, relevance in zip(_recorded_by(traced)[len(names) :] if constants else [], found[first:], strict=True):
        name = node_info(node).name
        of_constants[name] = of_constants[name] + relevance if name in of_constants else relevance

    def watch(number: int) -> Watch:
        recorder = recorder_of(module, *recording) if records else module
        watched = Watch(recorder)
        with torch.inference_mode(False), torch.enable_grad():
            again = run(watched.run_with, recorder, {})
            relevances_of(again.output, [*arguments.leaves, *again.layers], seeds[number], again.factors)
        return watched

    def objection() -> str | None:
        of_inputs = [*found[: len(arguments.leaves)], *(recorded[name] for names in embeddings.values() for name in names)]
        shares = of_inputs if several else [relevance[None] for relevance in of_inputs]
        return _objection(explained, wanted_targets, seeds, shares, _final_softmax(module.graph, output), watch)

    of_integers = {place: [(name, recorded[name]) for name in names] for place, names in embeddings.items()}
    of_inputs = arguments.in_form(found[: len(arguments.leaves)], of_integers)
    of_layers = {name: recorded[name] for name in record}
    of_each = len(seeds) if several else None
    return Attribution(explained.detach(), of_inputs, of_layers, of_constants, of_each), objection


@dataclass
class _Forward:
    """The result of a forward pass: the explained output, the recorded layers, and the factors of all relevances."""

    output: torch.Tensor
    layers: list[torch.Tensor]
    factors: list[torch.Tensor | None]  # of the inputs and the layers: see `factors_of`


def _objection(
    output: torch.Tensor,
    targets: Sequence[Target],
    seeds: Sequence[torch.Tensor],
    relevances: Sequence[torch.Tensor],
    softmax: fx.Node | None,
    watch: Callable[[int], Watch],
) -> str | None:
    """Why the relevance of the inputs is implausible, or None. `softmax` computes the output, if any."""
    explains_class = any(not (is_floating(target) or callable(target)) for target in targets)
    if softmax is not None and explains_class and saturates(softmax):
        return advice(softmax)

    def scale() -> float:
        return float(output.detach().abs().amax()) if explains_class and output.numel() else 0.0

    return objection_to(relevances, seeds, scale, softmax, watch)


def _final_softmax(graph: fx.Graph, selector: OutputSelector) -> fx.Node | None:
    """The softmax that computes the explained output, if the graph shows it."""
    chosen: Any = output_node(graph).args[0]
    if selector is not None and not callable(selector):
        try:
            is_attribute = isinstance(selector, str) and not isinstance(chosen, Mapping)
            chosen = getattr(chosen, str(selector)) if is_attribute else chosen[selector]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    leaves = nodes_in(chosen)
    return final_softmax(leaves[0]) if len(leaves) == 1 else None


def _runner(explain_model: nn.Module, module: ExplainModule, traced: TreeGraphModule, several: bool) -> Callable[..., Any]:
    """What runs `traced`, which is `module` or a recorder of it: compiled, if `explain_model` is.

    `several`: whether several relevances will be propagated.
    """
    cache = module.lrpfx_cache
    compiler = None if explain_model is module else compiler_of(explain_model)
    several = several and compiler is None
    if traced is module and compiler is not None:
        return explain_model
    if (traced, several) not in cache.runners:
        cache.runners[traced, several] = Called(traced), with_plain_calls(_for(traced, several))
    called, runner = cache.runners[traced, several]
    if has_hooks_for_all_modules() or called.are_observed or (traced is module and module.is_observed):
        runner = _for(traced, several)  # made afresh: an earlier copy knows neither new modules nor new hooks
    if compiler is None:  # not by the call of fx, which prints the place of each error
        return partial(nn.Module.__call__, runner)
    if (runner, compiler) not in cache.compiled:
        cache.compiled[runner, compiler] = compiler(runner)
    return cache.compiled[runner, compiler]


def _for(traced: TreeGraphModule, several: bool) -> TreeGraphModule:
    """`traced`, to propagate one relevance or several."""
    return executed(traced, Execution(several=True)) if several else traced


def _probes(
    module: ExplainModule, recording: tuple[tuple[str, ...], bool, bool], arguments: "Arguments"
) -> dict[str, torch.Tensor]:
    """For each recorded node a tensor of zeros, which is added to its value: its gradient is that of the value.

    A compiled graph has no gradients of one output with respect to another, only with respect to inputs.
    """
    sizes = tuple(
        (str(value.dtype), tuple(value.shape)) for value in pytree.tree_leaves(arguments.passed) if hasattr(value, "shape")
    )
    key = (recording, sizes)
    if key not in module.lrpfx_cache.layouts:
        with torch.no_grad():
            _, *layers = arguments.call(recorder_of(module, *recording))
        module.lrpfx_cache.layouts[key] = [torch.empty_like(layer, device="meta") for layer in layers]
    device = next((leaf.device for leaf in pytree.tree_leaves(arguments.passed) if isinstance(leaf, torch.Tensor)), None)
    layouts = module.lrpfx_cache.layouts[key]
    return {
        f"probe_{number}": torch.zeros_like(layout, device=device).requires_grad_() for number, layout in enumerate(layouts)
    }


def _relevances_in_chunks(
    output: torch.Tensor,
    wanted: Sequence[torch.Tensor],
    seeds: torch.Tensor,
    factors: Sequence[torch.Tensor | None],
    chunk_size: int,
    progress: bool = False,
) -> list[torch.Tensor]:
    """Relevance of the wanted tensors for each seed, with a leading dimension for the seeds."""
    parts: list[Sequence[torch.Tensor]] = []
    steps = progress_bar(range(0, len(seeds), chunk_size), progress, unit="target" if chunk_size == 1 else "chunk")
    for first in steps:
        chunk = seeds[first : first + chunk_size]
        is_last = first + chunk_size >= len(seeds)
        if len(chunk) == 1:
            parts.append([relevance[None] for relevance in relevances_of(output, wanted, chunk[0], factors, not is_last)])
        else:
            together = torch.func.vmap(lambda seed, last=is_last: relevances_of(output, wanted, seed, factors, not last))
            parts.append(together(chunk))
    return [torch.cat(of_tensor) for of_tensor in zip(*parts, strict=True)]


def relevances_of(
    output: torch.Tensor,
    wanted: Sequence[torch.Tensor],
    seed: torch.Tensor,
    factors: Sequence[torch.Tensor | None],
    retain_graph: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Relevance of the wanted tensors, zeros for tensors without relevance. `factors`: see `factors_of`."""
    tensors = [tensor for tensor in wanted if tensor.requires_grad]
    gradients = iter(torch.autograd.grad(output, tensors, seed, allow_unused=True, retain_graph=retain_graph))
    found = []
    for tensor, factor in zip(wanted, factors, strict=True):
        gradient = next(gradients) if tensor.requires_grad else None
        if gradient is not None and factor is not None:
            gradient = relevance_from(factor.detach(), gradient)
        found.append(torch.zeros_like(tensor) if gradient is None else _in_format_of(tensor, gradient))
    return tuple(found)


def factors_of(recorder: fx.GraphModule, layers: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """For each layer that a recorder returns, itself if its gradient is a multiplier, and None if it is relevance."""
    if not layers:
        return []
    pairs = zip(layers, _recorded_by(recorder), strict=True)
    return [layer if node_info(node).carries_multiplier else None for layer, node in pairs]


def _in_format_of(tensor: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """Relevance in the memory format of its tensor."""
    if tensor.is_contiguous():
        return relevance.contiguous()
    for memory_format, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.ndim == relevance.ndim == dimensions and tensor.is_contiguous(memory_format=memory_format):
            return relevance.contiguous(memory_format=memory_format)
    return relevance


def _has_code(module: nn.Module) -> bool:
    """Whether any rule has custom code, which takes one relevance at a time."""
    return any(isinstance(one, RuleModule) and one.ruled.rule.has_code for one in module.modules())


class Arguments:
    """The inputs of one call: floating-point tensors become detached leaves that require a gradient; all else is unchanged."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.leaves: list[torch.Tensor] = []
        self.integers: list[tuple[Any, ...]] = []  # places of integer tensors: argument, then keys
        self.infinite: list[tuple[Any, ...]] = []  # places of tensors with entries of -inf
        if isinstance(inputs, torch.Tensor):
            named: dict[Any, Any] = {0: inputs}
        elif isinstance(inputs, Mapping):
            named = {str(name): value for name, value in inputs.items()}
        elif isinstance(inputs, (tuple, list)):
            named = dict(enumerate(inputs))
        else:
            raise InputTypeError(f"inputs are a tensor, a tuple of tensors or a dict of tensors, not {type(inputs).__name__}")
        if not named:
            raise InputError("there are no inputs")
        single = len(named) == 1 and not isinstance(inputs, Mapping)
        self.values = {key: self._leaf(value, (key,), single) for key, value in named.items()}
        self.passed = self.values  # without arguments that the graph has fixed
        if not self.leaves and not self.integers:
            raise InputTypeError(
                "none of the inputs is a tensor that could carry relevance; a tokenizer returns tensors with "
                "return_tensors='pt'"
            )

    def _leaf(self, value: Any, place: tuple[Any, ...], single: bool) -> Any:
        if isinstance(value, Mapping):
            return {key: self._leaf(item, (*place, key), False) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            items = [self._leaf(item, (*place, index), False) for index, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        what = "the input" if single else "input " + ".".join(repr(str(key)) for key in place)
        if not isinstance(value, torch.Tensor):
            if value is None or isinstance(value, (bool, int, float, str)):
                return value
            raise InputTypeError(f"{what} is a {type(value).__name__}, not a tensor")
        problem = not_dense(value)
        if problem is not None:
            raise InputTypeError(f"{what} is {problem}")
        if value.is_complex():
            raise InputTypeError(
                f"{what} has dtype {value.dtype}, which carries no relevance; give its real and imaginary parts"
            )
        if value.is_inference():
            value = value.clone()
        if not value.is_floating_point():
            self.integers.append(place)
            return value
        if not torch.isfinite(value).all():
            if torch.isnan(value).any() or torch.isposinf(value).any():
                raise InputError(f"{what} has values that are not finite")
            self.infinite.append(place)
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1]

    def admit(self, module: ExplainModule) -> None:
        """Raise `InputError` for inputs outside `input_range`, or that violate a condition of the graph."""
        if isinstance(self.inputs, Mapping):
            self.passed = module.admit((), self.values)
        else:
            module.admit(tuple(self.values.values()), {})
        for place in self.infinite:
            reader = other_reader(module.unfused_graph, place)
            if reader is not None:
                by = "is returned" if reader.op == "output" else f"is read by {node_info(reader).name}"
                raise InputError(
                    f"input {'.'.join(repr(str(key)) for key in place)} has values that are not finite: only masks that are "
                    f"added to the scores of an attention may hold -inf, but this one {by}. Pass a boolean mask, or "
                    "torch.finfo(dtype).min in place of -inf, if the model takes them"
                )
        for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
            limits = node_info(node).value_range
            for tensor in floating_tensors(self.values.get(str(node.target), self.values.get(number))):
                if limits is not None and tensor.numel() and not (limits[0] <= tensor.min() and tensor.max() <= limits[1]):
                    raise InputError(
                        f"the values of input {str(node.target)!r} go from {tensor.min():g} to {tensor.max():g}, but "
                        f"input_range={limits} was given to lrpfx.transform"
                    )

    def call(self, module: Callable[..., Any], further: Mapping[str, Any] | None = None) -> Any:
        """The result of `module` for these inputs, and further keyword arguments."""
        named, passed = further or {}, self.passed
        if self.infinite:
            masks = [self.at(place) for place in self.infinite]
            passed = pytree.tree_map(lambda value: hiding(value) if any(value is mask for mask in masks) else value, passed)
        return module(**passed, **named) if isinstance(self.inputs, Mapping) else module(*passed.values(), **named)

    def at(self, place: tuple[Any, ...]) -> Any:
        """The input at a place."""
        value: Any = self.values
        for key in place:
            value = value[key]
        return value

    def in_form(self, relevances: Sequence[torch.Tensor], of_integers: Mapping[tuple[Any, ...], Any]) -> Any:
        """Relevances in the structure of the inputs."""
        remaining = iter(relevances)

        def place_of(value: Any, place: tuple[Any, ...]) -> Any:
            if isinstance(value, dict):
                return {key: place_of(item, (*place, key)) for key, item in value.items()}
            if isinstance(value, (tuple, list)):
                items = [place_of(item, (*place, index)) for index, item in enumerate(value)]
                return tuple(items) if isinstance(value, tuple) else items
            if is_floating(value):
                return next(remaining)
            found = of_integers.get(place, ())
            return found[0][1] if len(found) == 1 else dict(found) or None

        results = {key: place_of(value, (key,)) for key, value in self.values.items()}
        if isinstance(self.inputs, torch.Tensor):
            return results[0]
        return results if isinstance(self.inputs, Mapping) else tuple(results.values())


def embeddings_of(module: ExplainModule, arguments: Arguments) -> dict[tuple[Any, ...], list[str]]:
    """For each integer input, the names of its embeddings; `InputTypeError` if no input can carry relevance."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for place in arguments.integers:
        if place not in module.lrpfx_cache.embeddings:
            module.lrpfx_cache.embeddings[place] = _embeddings_at(module.graph, place)
        if module.lrpfx_cache.embeddings[place]:
            found[place] = module.lrpfx_cache.embeddings[place]
    if not arguments.leaves and not found:
        dtypes = ", ".join(str(dtype) for dtype in {arguments.at(place).dtype for place in arguments.integers})
        raise InputTypeError(
            f"the inputs have dtype {dtypes}, which carries no relevance, and no embedding reads them; convert them to a "
            "floating-point dtype"
        )
    return found


def _embeddings_at(graph: fx.Graph, place: tuple[Any, ...]) -> list[str]:
    """The names of the embeddings that look up the input at a place, and whose vectors reach the output."""
    node = input_node(graph, place)
    if node is None:
        return []
    reached = _reached_by_relevance(graph)
    return [node_info(one).name for one in _embeddings_behind(node, place[1:]) if one in reached]


def _reached_by_relevance(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values, not only shapes or steps, reach the output."""
    reached: set[fx.Node] = set()
    pending = list(graph.find_nodes(op="output"))
    while pending:
        for read in pending.pop().all_input_nodes:
            if read not in reached and node_info(read).role is Role.DATA:
                reached.add(read)
                pending.append(read)
    return reached


def _embeddings_behind(node: fx.Node, keys: Sequence[Any]) -> list[fx.Node]:
    """The embeddings that look up an integer input, or one of its items."""
    found: list[fx.Node] = []
    pending: list[tuple[fx.Node, Sequence[Any]]] = [(node, keys)]
    seen: set[fx.Node] = set()
    while pending:
        node, keys = pending.pop()
        for user in node.users:
            if keys:
                if user.target is operator.getitem and user.args[1] == keys[0]:
                    pending.append((user, keys[1:]))
            elif node_info(user).kind is Embedding and user.args[0] is node:
                found.append(user)
            elif user.op == "call_function" and node_info(user).role is not Role.METADATA and user not in seen:
                seen.add(user)
                pending.append((user, ()))
    return found


def select_output(result: Any, selector: OutputSelector) -> torch.Tensor:
    """The tensor to explain among the outputs of a model."""
    chosen = result
    if callable(selector):
        chosen = selector(result)
    elif selector is not None:
        try:
            is_attribute = isinstance(selector, str) and not isinstance(result, Mapping)
            chosen = getattr(result, str(selector)) if is_attribute else result[selector]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise InputError(f"the model's output has no {selector!r}; it is {_describe_output(result)}") from error
    if isinstance(chosen, torch.Tensor):
        if not chosen.is_floating_point():
            raise InputTypeError(f"the output has dtype {chosen.dtype}, which carries no relevance")
        return chosen
    tensors = floating_tensors(chosen)
    if selector is None:
        named = [_item(chosen, name) for name in _EXPLAINED]
        tensors = [one for one in named if is_floating(one)][:1] or tensors
        if len(tensors) == 1:
            return tensors[0]
    raise InputTypeError(
        f"attribute explains one tensor, but the model returns {_describe_output(chosen)}; choose one with output=, by its "
        "index, its key or attribute, or a function"
    )


#: The output to explain among several, if it has one of these names.
_EXPLAINED = ("logits", "last_hidden_state")


def _item(result: Any, name: str) -> Any:
    """An output by key or attribute, or None."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _describe_output(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} with the keys {', '.join(map(repr, result))}"
    if dataclasses.is_dataclass(result):
        return f"a {type(result).__name__} with {', '.join(item.name for item in dataclasses.fields(result))}"
    return f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")


def as_leaf(value: torch.Tensor) -> torch.Tensor:
    """The tensor as a leaf that requires a gradient."""
    return value.detach().requires_grad_()


def recorder_of(
    module: ExplainModule,
    names: tuple[str, ...],
    leaves: bool = False,
    constants: bool = False,
    probed: bool = False,
) -> TreeGraphModule:
    """A module on the same tensors that also returns the named nodes, and with `constants` the constants that take relevance.

    With `leaves`, gradients begin at embeddings. With `probed`, it takes a probe for each of these values: see `_probes`.
    """
    key = (names, leaves, constants, probed)
    if key not in module.lrpfx_cache.recorders:
        fused = {name for name, _ in named_nodes(module.graph)}
        found = resolve_names(module.unfused_graph, names)
        graph = copy_graph(module.graph if all(node_info(node).name in fused for node in found) else module.unfused_graph)
        by_name = dict(named_nodes(graph))
        nodes = [by_name[node_info(node).name] for node in found]
        (output,) = graph.find_nodes(op="output")
        embeddings = [node for node in data_calls(graph) if node_info(node).kind is Embedding and leaves]
        edges = _constant_terms(graph, module) if constants else []
        if probed:
            for number, node in enumerate(nodes):
                _replaced(graph, node, add_to_detached if node in embeddings else operator.add, _probe(graph, number))
            terms = [
                _as_term(graph, node, user, add_to_detached, _probe(graph, number))
                for number, (node, user) in enumerate(edges, len(nodes))
            ]
        else:
            for embedding in embeddings:
                leaf = _replaced(graph, embedding, as_leaf)
                nodes = [leaf if node is embedding else node for node in nodes]
            terms = [_as_term(graph, node, user, as_leaf) for node, user in edges]
        output.args = ((output.args[0], *nodes, *terms),)
        module.lrpfx_cache.recorders[key] = TreeGraphModule(module, graph, module.title)
    return module.lrpfx_cache.recorders[key]


def _recorded_by(recorder: fx.GraphModule) -> list[fx.Node]:
    """The nodes whose values a recorder returns beside the model's result."""
    results: Any = output_node(recorder.graph).args[0]
    return list(results[1:])


def _constant_terms(graph: fx.Graph, module: ExplainModule) -> list[tuple[fx.Node, fx.Node]]:
    """Constants that take relevance, each with the operation that gives it some."""
    found = []
    for user in data_calls(graph):
        layer = rule_module_of(user, module)
        if layer is not None:
            read = nodes_in(user.args[: layer.ruled.operation.inputs])
        else:
            read = nodes_in(user.args) if node_info(user).neutral and node_info(user).kind is not Embedding else []
        found += [(node, user) for node in dict.fromkeys(read) if _is_constant_tensor(node)]
    return found


def _is_constant_tensor(node: fx.Node) -> bool:
    info = node_info(node)
    floating = node.op == "get_attr" or (info.dtype is not None and info.dtype.is_floating_point)
    return info.role in (Role.PARAMETER, Role.METADATA) and floating


def _as_term(graph: fx.Graph, node: fx.Node, user: fx.Node, function: Callable[..., Any], *further: fx.Node) -> fx.Node:
    """A call of `function` on a constant, which replaces it for one reader, and carries what the reader gives it."""
    with graph.inserting_before(user):
        made = graph.call_function(function, (node, *further))
    user.replace_input_with(node, made)
    name = node_info(_source_of(node)).name
    set_info(made, replace(node_info(node), name=name, carries_multiplier=node_info(user).carries_multiplier))
    return made


def _source_of(constant: fx.Node) -> fx.Node:
    """The embedding or parameter that a constant is a view, a cast or an expansion of."""
    while (spelling := spelling_of(constant)) is not None and spelling.operator.kind is Neutral:
        source = constant.args[0]
        if not isinstance(source, fx.Node):
            break
        constant = source
    return constant


def _probe(graph: fx.Graph, number: int) -> fx.Node:
    """A placeholder for a probe."""
    name = f"probe_{number}"
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        probe = graph.placeholder(name)
    set_info(probe, NodeInfo(name, role=Role.CONSTANT))
    return probe


def _replaced(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], *further: fx.Node) -> fx.Node:
    """A call of `function` on a node, which replaces the node for all its readers."""
    with graph.inserting_after(node):
        made = graph.call_function(function, (node, *further))
    set_info(made, node_info(node))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def add_to_detached(value: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """Value + probe, with a gradient for the probe alone."""
    return value.detach() + probe


def recorded_names(graph: fx.Graph, record: str | Sequence[str]) -> tuple[str, ...]:
    """The names in `record`, with patterns replaced by what they match.

    That is nodes, and modules without a node of their own name or a matching node inside.
    """
    if not isinstance(record, (str, Iterable)) or not all(isinstance(name, str) for name in record):
        raise InputTypeError(f"record is a name of a node, or several of them, not {record!r}")
    if not record:
        return ()
    nodes = dict(named_nodes(graph))
    names: list[str] = []
    for name in (record,) if isinstance(record, str) else record:
        names += [name] if name in nodes or not set(name) & set("*?[") else _matching(name, nodes) or [name]
    return tuple(dict.fromkeys(names))


def _matching(pattern: str, known: Mapping[str, fx.Node]) -> list[str]:
    """The nodes that match a pattern, and the modules that match it and have no matching node inside, in order.

    Nodes that return several tensors are left out; their items may match.
    """
    nodes = [name for name, node in known.items() if fnmatchcase(name, pattern) and _items(node, known) is None]
    covered = {path for name in nodes for path in _modules_around(name)}
    last = {path: number for number, name in enumerate(known) for path in (name, *_modules_around(name))}
    modules = [path for path in last if path not in covered and path not in known and fnmatchcase(path, pattern)]
    return sorted([*nodes, *modules], key=last.__getitem__)


def _modules_around(name: str) -> list[str]:
    """The paths of the modules that a node is in, by its name."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def resolve_names(graph: fx.Graph, names: Sequence[str]) -> list[fx.Node]:
    """The nodes with the given qualified names; a module's path means the node that computes what it returns.

    This is the last node in the module, by its name, that is read outside of it. `InputError` for nodes that return several
    tensors: their items have names of their own.
    """
    nodes = dict(named_nodes(graph))
    found = []
    for name in names:
        node = nodes[name] if name in nodes else _returned_by(name, nodes)
        if node is None:
            raise InputError(_unknown_name(name, graph, list(nodes)))
        items = _items(node, nodes)
        if items is not None:
            instead = f"record its items instead: {', '.join(map(repr, items))}" if items else "it has no items that are read"
            raise InputError(f"{node_info(node).name!r} returns several tensors, which have no common relevance; {instead}")
        found.append(node)
    return found


def _returned_by(path: str, nodes: Mapping[str, fx.Node]) -> fx.Node | None:
    """The last node in a module that is read outside of it. Conversions, which are named after a node, count as readers."""
    below = {name: node for name, node in nodes.items() if name.startswith(f"{path}.")}
    inside = {node: name for name, node in below.items() if name.rpartition(".")[0] not in nodes}
    leaving = [node for node in inside if any(user not in inside for user in node.users)]
    return next(reversed(leaving or list(inside)), None)


def _items(node: fx.Node, nodes: Mapping[str, fx.Node]) -> list[str] | None:
    """The names of the items of a node that returns several tensors; None if it returns one."""
    row = node_info(node).operator
    if row is None or not (row.parts or row.results):
        return None
    return [name for name, other in nodes.items() if other in node.users and other.target is operator.getitem]


def _unknown_name(name: str, graph: fx.Graph, known: list[str]) -> str:
    for node in graph.nodes:
        if node.op.startswith("call") and name in node_info(node).merged:
            return f"{name!r} was merged into {node_info(node).name!r}: record that instead"
    known += [path for path in dict.fromkeys(path for one in known for path in _modules_around(one)) if path not in known]
    close = get_close_matches(name, known, n=3)
    if set(name) & set("*?["):  # the last parts of names that are like that of the pattern
        last = {one.rpartition(".")[2] for one in known}
        close = [f"*.{one}" for one in last if name.rpartition(".")[2].strip("*") in one][:3]
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    return f"there is no node or module named {name!r}{hint} lrpfx.node_names(explain_model) lists all names"
