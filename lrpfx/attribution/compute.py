"""Attribution: run an explainable module, and propagate relevance back to its inputs and to recorded layers."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch import fx, nn

from lrpfx.attribution.arguments import NO_VALUES, Arguments, Inputs, embeddings_of, misfits
from lrpfx.attribution.conditions import (
    Condition,
    Masks,
    empty_condition,
    ends_of,
    multiplier_of_start,
    places_of,
    relevance_of_start,
    start_of,
)
from lrpfx.attribution.names import recorded_names
from lrpfx.attribution.plausibility import Watch, advice, advice_on_sign, is_inverted, objection_to, saturates
from lrpfx.attribution.recorders import PROBE, Recording, factors_of, recorded_by, recorder_of
from lrpfx.attribution.summary import summary_of
from lrpfx.attribution.targets import (
    OutputSelector,
    Target,
    Targets,
    final_probabilities_of,
    listed,
    relevance_of_output,
    select_output,
    without_arrays,
)
from lrpfx.errors import InputError, LrpfxWarning
from lrpfx.ir.node import is_floating, node_info
from lrpfx.ir.operator import Probability
from lrpfx.runtime.explain_module import ExplainModule, RuleModule, TreeGraphModule, executed, explainable
from lrpfx.runtime.multipliers import multiplier_from, relevance_from
from lrpfx.runtime.plain_calls import Called, with_plain_calls
from lrpfx.runtime.ruled_operation import Execution
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.torch_internals import compiler_of, has_hooks_for_all_modules, pytree

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
    conditions: int | None = None  # how many, if each relevance has a leading dimension for them, before that for targets
    multipliers: dict[str, torch.Tensor] = field(default_factory=dict)  # of layers by name: relevance / value

    def _repr_html_(self) -> str:
        """Shapes and sums, and heatmaps of images, for notebooks."""
        return summary_of(self.output, self.relevance, self.layers, self.constants, self.targets, self.conditions)


@overload
def attribute(
    explain_model: nn.Module,
    inputs: torch.Tensor,
    target: Target = None,
    *,
    targets: Targets | None = None,
    conditions: Sequence[Condition] | None = None,
    start: str | None = None,
    record: str | Sequence[str] = (),
    record_multipliers: str | Sequence[str] = (),
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
    conditions: Sequence[Condition] | None = None,
    start: str | None = None,
    record: str | Sequence[str] = (),
    record_multipliers: str | Sequence[str] = (),
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
    conditions: Sequence[Condition] | None = None,
    start: str | None = None,
    record: str | Sequence[str] = (),
    record_multipliers: str | Sequence[str] = (),
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
    conditions: Sequence[Condition] | None = None,
    start: str | None = None,
    record: str | Sequence[str] = (),
    record_multipliers: str | Sequence[str] = (),
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
    nodes, and the matching modules without such a node. `record_multipliers`: the same for `multipliers`, relevance divided by
    the value; where rules have the form without division, nothing is divided, and a value of 0 has a multiplier too. `output`:
    the output to explain if the model has several: its index, its key or attribute, or a function of all outputs; by default
    the one called "logits", or else "last_hidden_state". `constants`: also return the relevance that parameters and embeddings
    of positions or token types take where they are added to the signal, by name; tokens of models with and without them then
    compare. Constants that depend on integer inputs, such as a mask plus a bias, are in the ledger alone.

    `targets` instead of `target`: several for each sample, explained with one forward pass, as a list of such targets or a
    tensor with a dimension for them in front; all relevances then have a leading dimension for the targets. `chunk_size` limits
    how many are propagated together, which bounds the memory. The default is all of them; on a CPU it is one, which is faster
    there. `progress` shows a bar of the targets that are done (needs tqdm).

    `conditions`: a list of dicts from nodes to indices, for each of which relevance is propagated anew; it is kept on these
    entries of the nodes alone (Achtibat et al. 2023, https://www.nature.com/articles/s42256-023-00711-8). A key is the name of
    a node, the path of a module, or an edge: a pair of names, of the node whose value flows and of the one that reads it. An
    index is a channel, the feature of a dense layer, a head of attention weights or a token, by the kind of the node;
    `Channel`, `Feature`, `Head`, `Token` and `Neuron` of `lrpfx.concepts` say which is meant, an empty list keeps nothing, and
    a mask is a tensor of truth values or floating-point numbers that is broadcast to the value. Relevances have a leading
    dimension for the conditions, before that for targets. `start`: the node where relevance starts in place of the output; the
    network runs up to there. The target is then an index as in conditions, which starts with the activation as relevance, a
    tensor of relevance, a function of the value, or None for the whole value. Modules that torch.compile compiled start only
    where relevance is that of positive values.

    Errors: `InputError` (shape, non-finite values, target out of range, unknown name), `InputTypeError`. An `LrpfxWarning` is
    issued for implausible maps: relevance of more than a thousand times the seed, not finite, or exactly zero, and for a class
    that is explained after a final softmax.
    """
    attribution, objection = find_attribution(
        explain_model,
        inputs,
        target,
        targets=targets,
        conditions=conditions,
        start=start,
        record=record,
        record_multipliers=record_multipliers,
        output=output,
        chunk_size=chunk_size,
        constants=constants,
        progress=progress,
    )
    message = None if torch.compiler.is_compiling() else objection()
    if message is not None:
        warnings.warn(message, LrpfxWarning, stacklevel=2)
    return attribution


def find_attribution(
    explain_model: nn.Module,
    inputs: Inputs,
    target: Any = None,
    *,
    targets: Targets | None = None,
    conditions: Sequence[Condition] | None = None,
    start: str | None = None,
    record: str | Sequence[str] = (),
    record_multipliers: str | Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
) -> tuple[Attribution[Any], Callable[[], str | None]]:
    """The result of `attribute`, and a function that returns an objection if the result is implausible, or None."""
    module = explainable(explain_model, "attribute")
    if targets is not None and target is not None:
        raise InputError("target= is one target for each sample, targets= are several for each; pass one of them")
    if start is not None and output is not None:
        raise InputError("start= explains a node and output= an output; pass one of them")
    wanted_targets = [without_arrays(target)] if targets is None else listed(targets)
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)) or chunk_size < 1
    ):
        raise InputError(f"chunk_size is a positive number of targets, not {chunk_size!r}")
    with torch.inference_mode(False), torch.enable_grad():
        arguments = Arguments(inputs, module)
        arguments.admit(module)
        record = recorded_names(module.unfused_graph, record)
        first = None if start is None else start_of(module.unfused_graph, start)
        embeddings = embeddings_of(module, arguments)
        multiplied = recorded_names(module.unfused_graph, record_multipliers)
        names = tuple(dict.fromkeys([*record, *(name for found in embeddings.values() for name in found), *multiplied]))
        again = [names.index(name) for name in multiplied]  # recorded without conversion to relevance
        places = () if conditions is None else places_of(module.unfused_graph, conditions)
        recording = Recording(names, bool(embeddings), constants, places, start)
        is_compiled = explain_model is not module
        traced = recorder_of(module, recording, is_compiled) if recording else module
        masks = Masks(conditions or (), places, tuple(ends_of(module.unfused_graph, place)[0] for place in places))
        given: dict[str, Any] = {}
        if recording and is_compiled:
            with misfits(module, arguments):
                given = _probes(module, recording, arguments, masks)
        probes = [value for name, value in given.items() if name.startswith(PROBE)]

        def run(runner: Callable[..., Any], recorder: TreeGraphModule, further: Mapping[str, Any]) -> _Forward:
            with misfits(module, arguments):
                result = arguments.call(runner, further)
            chosen, recorded = (result[0], list(result[1:])) if recording else (result, [])
            factors = [*(None for _ in arguments.leaves), *factors_of(recorder, recorded), *(None for _ in again)]
            return _Forward(select_output(chosen, output), recorded, factors)

        several = targets is not None or len(masks.conditions) > 1
        runner = _runner(explain_model, module, traced, several)
        masking = masks.compiled(0, given) if is_compiled else masks.holders()
        forward = run(runner, traced, given | masking)
        explained = forward.output
        if explained.is_meta:
            raise InputError(NO_VALUES.format(module.title))
        if first is None:
            seeds = [relevance_of_output(explained, one) for one in wanted_targets]
        else:
            seeds = [relevance_of_start(explained, one, first) for one in wanted_targets]
            if node_info(first).relevant_where_positive and any(((explained <= 0) & (seed != 0)).any() for seed in seeds):
                if is_compiled:
                    raise InputError(f"relevance starts where {start} is not positive: pass the module that is not compiled")
                runner = executed(traced, Execution(several=several, as_written=True))
                forward = run(runner, traced, given | masking)
            if node_info(first).carries_multiplier:
                seeds = [multiplier_of_start(forward.output, seed, start) for seed in seeds]
        recorded_at = probes or forward.layers
        wanted = [*arguments.leaves, *recorded_at, *(recorded_at[place] for place in again)]
        if not forward.output.requires_grad or not any(tensor.requires_grad for tensor in wanted):
            what = "the output" if start is None else start
            raise InputError(f"{what} does not depend on the inputs through any operation that carries relevance")
        tasks = [(number, seed) for number in range(max(1, len(masks.conditions))) for seed in seeds]
        found: Sequence[torch.Tensor]
        if several and is_compiled:  # torch.compile overwrites what a graph has saved in its first backward pass
            parts = []
            for place, (number, seed) in enumerate(progress_bar(tasks, progress, unit="target")):
                forward = run(runner, traced, given | masks.compiled(number, given)) if place else forward
                parts.append(relevances_of(forward.output, wanted, seed, forward.factors))
            found = [torch.stack(of_tensor) for of_tensor in zip(*parts, strict=True)]
        elif several:
            alone = _has_code(module) or (chunk_size is None and explained.device.type == "cpu")
            size = 1 if alone else int(chunk_size or len(tasks))
            found = _relevances_in_chunks(forward, wanted, tasks, masks, size, progress)
        else:
            with masks.set_to(0):
                found = relevances_of(forward.output, wanted, seeds[0], forward.factors)
        if conditions is not None and targets is not None:
            found = [one.unflatten(0, (len(conditions), len(seeds))) for one in found]
        elif conditions is not None and not several:
            found = [one[None] for one in found]
    count = len(arguments.leaves) + len(names)
    recorded = dict(zip(names, found[len(arguments.leaves) : count], strict=True))
    of_constants: dict[str, torch.Tensor] = {}
    last = len(found) - len(again)
    for node, relevance in zip(recorded_by(traced)[len(names) :] if constants else [], found[count:last], strict=True):
        name = node_info(node).name
        of_constants[name] = of_constants[name] + relevance if name in of_constants else relevance

    def watch(number: int) -> Watch:
        recorder = recorder_of(module, recording) if recording else module
        watched = Watch(recorder)
        with torch.inference_mode(False), torch.enable_grad():
            second = run(watched.run_with, recorder, masks.holders())
            tensors = [*arguments.leaves, *second.layers, *(second.layers[place] for place in again)]
            relevances_of(second.output, tensors, seeds[number], second.factors)
        return watched

    def objection() -> str | None:
        of_inputs = [*found[: len(arguments.leaves)], *(recorded[name] for names in embeddings.values() for name in names)]
        if conditions is not None:
            return empty_condition(conditions, of_inputs)
        if start is not None:
            return None
        shares = of_inputs if several else [relevance[None] for relevance in of_inputs]
        return _objection(explained, wanted_targets, seeds, shares, final_probabilities_of(module.graph, output), watch)

    of_integers = {place: [(name, recorded[name]) for name in names] for place, names in embeddings.items()}
    of_inputs = arguments.in_form(found[: len(arguments.leaves)], of_integers)
    of_layers = {name: recorded[name] for name in record}
    multipliers: dict[str, torch.Tensor] = {}
    for name, place, gradient in zip(multiplied, again, found[last:], strict=True):
        carries = node_info(recorded_by(traced)[place]).carries_multiplier
        multipliers[name] = gradient if carries else multiplier_from(forward.layers[place].detach(), gradient)
    of_each = None if targets is None else len(seeds)
    of_conditions = None if conditions is None else len(conditions)
    found_all = Attribution(
        explained.detach(), of_inputs, of_layers, of_constants, of_each, of_conditions, multipliers=multipliers
    )
    return found_all, objection


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
    final: fx.Node | None,
    watch: Callable[[int], Watch],
) -> str | None:
    """Why the relevance of the inputs is implausible, or None. `final`: the softmax or sigmoid that computes the output."""
    explains_class = any(not (is_floating(target) or callable(target)) for target in targets)
    row = None if final is None else node_info(final).operator
    softmax = final if row is not None and row.probability is Probability.OF_ALL_LOGITS else None
    if softmax is not None and explains_class and saturates(softmax):
        return advice(softmax)
    if final is not None and softmax is None and explains_class and is_inverted(final, seeds):
        return advice_on_sign(final)

    def scale() -> float:
        return float(output.detach().abs().amax()) if explains_class and output.numel() else 0.0

    return objection_to(relevances, seeds, scale, softmax, watch)


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


def _probes(module: ExplainModule, recording: Recording, arguments: Arguments, masks: Masks) -> dict[str, torch.Tensor]:
    """For each recorded node a tensor of zeros, which is added to its value: its gradient is that of the value.

    A compiled graph has no gradients of one output with respect to another, only with respect to inputs. The masks get to know
    the shapes of the masked values.
    """
    sizes = tuple(
        (str(value.dtype), tuple(value.shape)) for value in pytree.tree_leaves(arguments.passed) if hasattr(value, "shape")
    )
    key = (recording, sizes)
    if key not in module.lrpfx_cache.layouts:
        with torch.no_grad():
            _, *layers = arguments.call(recorder_of(module, recording), masks.holders())
        values = [torch.empty_like(layer, device="meta") for layer in layers]
        module.lrpfx_cache.layouts[key] = values, masks.layouts()
    device = next((leaf.device for leaf in pytree.tree_leaves(arguments.passed) if isinstance(leaf, torch.Tensor)), None)
    values, masked = module.lrpfx_cache.layouts[key]
    masks.know(masked, device)
    return {f"{PROBE}{number}": torch.zeros_like(value, device=device).requires_grad_() for number, value in enumerate(values)}


def _relevances_in_chunks(
    forward: "_Forward",
    wanted: Sequence[torch.Tensor],
    tasks: Sequence[tuple[int, torch.Tensor]],
    masks: Masks,
    chunk_size: int,
    progress: bool = False,
) -> list[torch.Tensor]:
    """Relevance of the wanted tensors for each task, a condition and a seed, with a leading dimension for the tasks."""
    parts: list[Sequence[torch.Tensor]] = []
    steps = progress_bar(range(0, len(tasks), chunk_size), progress, unit="target" if chunk_size == 1 else "chunk")
    for first in steps:
        chunk = tasks[first : first + chunk_size]
        retain = first + chunk_size < len(tasks)
        if len(chunk) == 1:
            ((number, seed),) = chunk
            with masks.set_to(number):
                found = relevances_of(forward.output, wanted, seed, forward.factors, retain)
            parts.append([relevance[None] for relevance in found])
            continue

        def propagate(seed: torch.Tensor, *values: torch.Tensor, retain: bool = retain) -> tuple[torch.Tensor, ...]:
            with masks.set_to_values(values):
                return relevances_of(forward.output, wanted, seed, forward.factors, retain)

        together = torch.func.vmap(propagate)
        parts.append(together(torch.stack([seed for _, seed in chunk]), *masks.stacked([number for number, _ in chunk])))
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
