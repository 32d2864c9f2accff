"""One computation of `lrpfx.attribute`: a forward pass, and relevance for each condition and target."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from lrpfx.attribution import plausibility
from lrpfx.attribution.arguments import NO_VALUES, Arguments, Inputs, embeddings_of, misfits, references_of
from lrpfx.attribution.cache import cache_of
from lrpfx.attribution.cut_inputs import advice_on_cut_inputs
from lrpfx.attribution.plausibility import Watch
from lrpfx.attribution.recorders import PROBE, Recording, recorded_by, recorder_of, with_factors
from lrpfx.attribution.seeds import Seeds, entries_of, magnitude_of, whole
from lrpfx.errors import InputError
from lrpfx.ir.kinds import Kind, Linear
from lrpfx.ir.node import CARRIED, data_calls, node_info, nodes_by_name
from lrpfx.ir.operator import Probability
from lrpfx.request.conditions import (
    Index,
    Masks,
    Start,
    empty_condition,
    ends_of,
    meaning_of,
    multiplier_of_start,
    places_of,
    start_of,
)
from lrpfx.request.explained_output import ExplainedOutput, Passage, explained_output, passage
from lrpfx.request.layouts import check_positions
from lrpfx.request.names import recorded_names, resolved_names
from lrpfx.request.outputs import final_probabilities_of
from lrpfx.request.question import Question
from lrpfx.request.targets import Target, as_target, as_targets, listed
from lrpfx.runtime.explain_module import ExplainModule, RuleModule, TreeGraphModule, executed, explainable, rule_module_of
from lrpfx.runtime.multipliers import multiplier_from
from lrpfx.runtime.plain_calls import Called, with_plain_calls
from lrpfx.runtime.ruled_operation import Execution
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.tensors import relevance_from
from lrpfx.support.torch_internals import compiler_of, has_hooks_for_all_modules, pytree


@dataclass
class _Forward:
    """What the module returned in a forward pass, the explained output, recorded layers, and the factors of all relevances."""

    result: Any
    explained: ExplainedOutput
    layers: list[torch.Tensor]
    factors: list[torch.Tensor | None]  # of the inputs and the layers: see `with_factors`

    @property
    def output(self) -> torch.Tensor:
        return self.explained.value


class Computation:
    """A forward pass, and the relevance of inputs and layers for each condition and target, which are *tasks*.

    `result`: what the module returned. `output`: the explained output. `of_inputs`: relevance in the structure of the inputs.
    `layers`, `constants`, `multipliers`, `values`: by the names of nodes; the values are those of the layers. `seeds`: the
    relevance that each target assigns to the output, or to the node where it starts. `signals`: relevance of the inputs, or of
    the embeddings that read them, as a list. `reference_output`: the explained output for the reference, if there is one.
    """

    def __init__(self, explain_model: nn.Module, inputs: Inputs, question: Question) -> None:
        self.module = module = explainable(explain_model, "attribute")
        question.check()
        self.question = question
        self.reference_output: torch.Tensor | None = None
        self._is_compiled = explain_model is not module
        self._explain_model = explain_model
        with torch.inference_mode(False), torch.enable_grad():
            self.arguments = Arguments(inputs, module)
            self.arguments.admit(module)
            self._references = references_of(module, self.arguments, question.reference)
            self._plan()
            with module.with_rules():
                self._compute()

    def _plan(self) -> None:
        """Find the nodes that the arguments name."""
        module, question = self.module, self.question
        graph = module.unfused_graph
        self.record = recorded_names(graph, question.record)
        self._first = None if question.start is None else start_of(graph, question.start)
        if self._first is not None:
            given = [question.target] if question.targets is None else listed(question.targets)
            self.targets: tuple[Target, ...] = tuple(Start(one, self._first) for one in given)
        else:
            self.targets = (as_target(question.target),) if question.targets is None else as_targets(question.targets)
        self._embeddings = embeddings_of(module, self.arguments)
        of_embeddings = [name for found in self._embeddings.values() for name in found]
        multiplied = recorded_names(graph, question.record_multipliers)
        carriers = {name: self._carrier(name) for name in multiplied}
        self._names = tuple(dict.fromkeys([*self.record, *of_embeddings, *carriers.values()]))
        self._again = {name: self._names.index(one) for name, one in carriers.items()}  # recorded without conversion
        conditions = question.conditions
        places = () if conditions is None else places_of(graph, conditions)
        masked = tuple(ends_of(graph, place)[0] for place in places)
        leaves, constants, of_reference = bool(self._embeddings), question.constants, bool(self._references)
        start = question.start
        self._recording = Recording(self._names, leaves, constants, places, start, of_reference and start is None)
        self._traced = recorder_of(module, self._recording, self._is_compiled) if self._recording else module
        self._masks = Masks(conditions or (), places, masked)
        self._several = question.targets is not None or len(self._masks.conditions) > 1

    def _carrier(self, name: str) -> str:
        """The node whose gradient is the multiplier of differences of a node: of an input, the one where multipliers end."""
        carrier = f"{name}{CARRIED}"
        return carrier if self._references and carrier in nodes_by_name(self.module.unfused_graph) else name

    def _compute(self) -> None:
        given: dict[str, Any] = {}
        if self._recording and self._is_compiled:
            with misfits(self.module, self.arguments, self._references):
                given = _probes(self.module, self._recording, self.arguments, self._masks, self._references)
        probes = [value for name, value in given.items() if name.startswith(PROBE)]
        runner = _runner(self._explain_model, self.module, self._traced, self._several)
        masking = self._masks.compiled(0, given) if self._is_compiled else self._masks.holders()
        forward = self._run(runner, self._traced, given | masking)
        if forward.output.is_meta:
            raise InputError(NO_VALUES.format(self.module.title), topic="kinds-of-inputs")
        self.result = forward.result
        self.output = forward.output.detach()
        check_positions(self.module.unfused_graph, self.question.output, forward.output, self.targets)
        self.seeds = Seeds(one.seed(forward.output, forward.explained.chosen) for one in self.targets)
        starts = (forward.explained.start(seed, one) for seed, one in zip(self.seeds, self.targets, strict=True))
        self._starts = Seeds(starts) if forward.explained.of_multipliers else self.seeds
        self._passages: list[Passage] = []
        if callable(self.question.output) and not self._references and not torch.compiler.is_compiling():
            passed = map(forward.explained.behind_function, self._starts)
            self._passages = [passage(seed, found) for seed, found in zip(self.seeds, passed, strict=True)]
        if self._first is not None:
            runner, forward = self._from_start(self._first, runner, forward, given | masking)

        recorded_at = probes or forward.layers
        wanted = [*self.arguments.leaves, *recorded_at, *(recorded_at[place] for place in self._again.values())]
        if not forward.output.requires_grad or not any(tensor.requires_grad for tensor in wanted):
            what = "the output" if self.question.start is None else self.question.start
            function = callable(self.question.output)
            raise InputError(
                f"{what} does not depend on the inputs through any operation that carries relevance"
                + (", or output= is a function that detaches its result or computes it without gradients" if function else ""),
                topic="no-path-to-the-input",
            )
        self._name_all(forward, self._relevances(runner, forward, wanted, given))

    def _run(self, runner: Callable[..., Any], recorder: TreeGraphModule, further: Mapping[str, Any]) -> _Forward:
        with misfits(self.module, self.arguments, self._references):
            result = self.arguments.call(runner, {**self._references, **further})
        chosen, returned = (result[0], list(result[1:])) if self._recording else (result, [])
        if self._recording.reference:
            self.reference_output = explained_output(returned.pop(), self.question.output).value
        recorded, of_layers = with_factors(recorder, returned)
        plain = [None for _ in self.arguments.leaves]
        factors = [*plain, *of_layers, *(None for _ in self._again)]
        explained = explained_output(chosen, self.question.output, of_multipliers=bool(self._references))
        return _Forward(chosen, explained, recorded, factors)

    def _from_start(
        self, start: fx.Node, runner: Callable[..., Any], forward: _Forward, further: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], _Forward]:
        """What runs the module and what it returned, without shortcuts where relevance starts at values that are not positive.

        It starts with multipliers if the node carries them.
        """
        name, info = self.question.start, node_info(start)
        explained = forward.output
        if info.relevant_where_positive and any(((explained <= 0) & (seed != 0)).any() for seed in self.seeds):
            if self._is_compiled:
                raise InputError(
                    f"relevance starts where {name} is not positive: pass the module that is not compiled",
                    topic="start-of-relevance",
                )
            runner = executed(self._traced, Execution(several=self._several, as_written=True))
            forward = self._run(runner, self._traced, further)
        if info.carries_multiplier:
            self._starts = Seeds(multiplier_of_start(forward.output, seed, name) for seed in self.seeds)
            if self._references:  # a value of 0 differs from the reference, too
                pairs = zip(self.targets, self.seeds, strict=True)
                self._starts = Seeds(one.multiplier(forward.output, seed) for one, seed in pairs)
        return runner, forward

    def _relevances(
        self, runner: Callable[..., Any], forward: _Forward, wanted: Sequence[torch.Tensor], given: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        """Relevance of the wanted tensors, with leading dimensions for conditions and targets if there are several."""
        question, masks = self.question, self._masks
        tasks = [(number, start) for number in range(max(1, len(masks.conditions))) for start in self._starts.held]
        found: Sequence[torch.Tensor]
        if self._several and self._is_compiled:  # torch.compile overwrites what a graph has saved in its first backward pass
            parts = []
            for place, (number, seed) in enumerate(progress_bar(tasks, question.progress, unit="target")):
                if place:
                    forward = self._run(runner, self._traced, {**given, **masks.compiled(number, given)})
                parts.append(relevances_of(forward.output, wanted, seed, forward.factors))
            found = [torch.stack(of_tensor) for of_tensor in zip(*parts, strict=True)]
        elif self._several:
            # rules with code of a user take one relevance at a time
            has_code = any(isinstance(one, RuleModule) and one.ruled.rule.has_code for one in self.module.modules())
            alone = has_code or (question.chunk_size is None and forward.output.device.type == "cpu")
            size = 1 if alone else int(question.chunk_size or len(tasks))
            found = _relevances_in_chunks(forward, wanted, tasks, masks, size, question.progress)
        else:
            with masks.set_to(0):
                found = relevances_of(forward.output, wanted, self._starts.held[0], forward.factors)
        if question.conditions is not None and question.targets is not None:
            return [one.unflatten(0, (len(question.conditions), len(self._starts))) for one in found]
        if question.conditions is not None and not self._several:
            return [one[None] for one in found]
        return found

    def _name_all(self, forward: _Forward, found: Sequence[torch.Tensor]) -> None:
        """Give the relevances of inputs, layers, constants and multiplied layers, in this order, their names."""
        first, last = len(self.arguments.leaves), len(found) - len(self._again)
        count = first + len(self._names)
        recorded = dict(zip(self._names, found[first:count], strict=True))
        self.layers = {name: recorded[name] for name in self.record}
        self.meanings = self._meanings(forward.layers)
        self.values = {name: value.detach() for name, value in zip(self._names, forward.layers, strict=False)}

        nodes = recorded_by(self._traced) if self._recording else []
        self.constants: dict[str, torch.Tensor] = {}
        for node, relevance in zip(nodes[len(self._names) :], found[count:last], strict=True):
            name = node_info(node).name
            self.constants[name] = self.constants[name] + relevance if name in self.constants else relevance

        of_integers = {place: [(name, recorded[name]) for name in names] for place, names in self._embeddings.items()}
        self.of_inputs = self.arguments.in_form(found[:first], of_integers)
        self.signals = [*found[:first], *(recorded[name] for names in self._embeddings.values() for name in names)]

        self.multipliers: dict[str, torch.Tensor] = {}
        for (name, place), gradient in zip(self._again.items(), found[last:], strict=True):
            carries = node_info(nodes[place]).carries_multiplier
            self.multipliers[name] = gradient if carries else multiplier_from(self.values[self._names[place]], gradient)

    def _meanings(self, values: Sequence[torch.Tensor]) -> dict[str, type[Index]]:
        """What plain indices of the recorded layers mean, where the graph shows it."""
        known = cache_of(self.module).meanings
        dimensions = {name: value.ndim for name, value in zip(self._names, values, strict=False)}
        new = [name for name, number in dimensions.items() if (name, number) not in known]
        nodes = resolved_names(self.module.unfused_graph, new) if new else {}
        for name in new:
            known[name, dimensions[name]] = None
            if name in nodes:
                with suppress(InputError):  # the graph does not show it
                    known[name, dimensions[name]] = meaning_of(nodes[name], dimensions[name])
        asked = set(self.record)
        meanings = {name: known[name, number] for name, number in dimensions.items() if name in asked}
        return {name: meaning for name, meaning in meanings.items() if meaning is not None}

    @property
    def explained(self) -> Sequence[torch.Tensor]:
        """For each target, what relevance adds up to: the seed, or what it explains of the difference from the reference."""
        if self.reference_output is None:
            return self.seeds
        difference = self.output - self.reference_output
        return [torch.where(start == 0, torch.zeros_like(difference), start * difference) for start in self._starts]

    def objection(self) -> str | None:
        """Why the relevance of the inputs is implausible, or None."""
        question = self.question
        if question.conditions is not None:
            return empty_condition(question.conditions, self.signals)
        if question.start is not None:
            return None
        final = final_probabilities_of(self.module.graph, question.output)
        explains_class = any(target.is_of_classes for target in self.targets)
        row = None if final is None else node_info(final).operator
        softmax = final if row is not None and row.values.probability is Probability.OF_ALL_LOGITS else None
        if softmax is not None and explains_class and plausibility.saturates(softmax):
            return plausibility.advice(softmax)
        if final is not None and softmax is None and explains_class and plausibility.is_inverted(final, self.seeds):
            return plausibility.advice_on_sign(final)
        for passed, seed in zip(self._passages, self.seeds, strict=False):
            if passed.is_large:
                return plausibility.constants_of_function(float(seed.double().sum()), passed.constants)
        shares = self.signals if self._several else [relevance[None] for relevance in self.signals]
        seeds: Sequence[torch.Tensor] = self.seeds
        if self.reference_output is not None:
            seeds, outputs = self.explained, (self.output, self.reference_output)
            found = plausibility.sums_of_samples(shares, seeds, self._starts, outputs)
            missing = plausibility.missing_difference(found, self._starts, outputs)
            missing = missing or self._missing_of_row(found, seeds, outputs)
            if missing is not None:
                return missing
        amounts = [passed.magnitude for passed in self._passages] or [
            magnitude_of(seed) for seed in (self.seeds.held if self.reference_output is None else seeds)
        ]

        def scale() -> float:
            return float(self.output.abs().amax()) if explains_class and self.output.numel() else 0.0

        return plausibility.objection_to(shares, amounts, scale, softmax, self._watch) or self._balance() or self._cut_inputs()

    def _balance(self) -> str | None:
        """Where an operation without a rule, whose gradient the user keeps, makes or loses relevance: looked at once."""
        cache = cache_of(self.module)
        if cache.checked_balance:
            return None
        cache.checked_balance = True
        kept = [node_info(node) for node in data_calls(self.module.graph) if node_info(node).keeps_gradient]
        if not kept or any(issubclass(info.kind or Kind, Linear) for info in kept):
            return None  # the map of a composite that leaves dense layers their gradient is a gradient
        return plausibility.out_of_balance(self._watch(0))

    def _cut_inputs(self) -> str | None:
        """What to change where a rule takes all relevance from an input: said once for each module."""
        cache, module, output = cache_of(self.module), self.module, self.question.output
        asked = None if callable(output) else output
        if any(cache.cut_inputs.values()) or asked in cache.cut_inputs:
            return None

        def rule_of(node: fx.Node) -> Any:
            return getattr(rule_module_of(node, module), "rule", None)

        cache.cut_inputs[asked] = advice_on_cut_inputs(module.unfused_graph, rule_of, output)
        return cache.cut_inputs[asked]

    def _missing_of_row(
        self,
        sums: Sequence[plausibility.SumsOfSamples],
        seeds: Sequence[torch.Tensor],
        outputs: tuple[torch.Tensor, torch.Tensor],
    ) -> str | None:
        """Where relevance of one sample misses the difference of its outputs, although that of the batch adds up."""
        cache = cache_of(self.module)
        found = None if cache.rows_mix else plausibility.row_that_misses(sums)
        if found is None:
            return None
        number, row = found
        start = torch.zeros_like(self._starts[number])
        start[row] = self._starts[number][row]
        recorder = recorder_of(self.module, self._recording) if self._recording else self.module
        relevances = self._again_for(partial(nn.Module.__call__, recorder), recorder, start)
        of_embeddings = {name for names in self._embeddings.values() for name in names}
        counts = [*(True for _ in self.arguments.leaves), *(name in of_embeddings for name in self._names)]
        of_inputs = [one[None] for one, is_input in zip(relevances, counts, strict=False) if is_input]
        seed = torch.zeros_like(seeds[number])
        seed[row] = seeds[number][row]
        again = plausibility.sums_of_samples(of_inputs, [seed], [start], outputs)
        missing = plausibility.missing_difference(again, [start], outputs)
        cache.rows_mix = missing is None  # rows are not samples then, but those of the nodes of a graph, for example
        return missing and f"of sample {row}, {missing}"

    def _watch(self, number: int) -> Watch:
        """What happened at each node in another run, for the target with this number."""
        recorder = recorder_of(self.module, self._recording) if self._recording else self.module
        watched = Watch(recorder)
        self._again_for(watched.run_with, recorder, self._starts[number])
        return watched

    def _again_for(self, runner: Callable[..., Any], recorder: TreeGraphModule, start: torch.Tensor) -> Sequence[torch.Tensor]:
        """What relevance is in another run, for the relevance or the multiplier of the output: of the inputs and the layers."""
        with torch.inference_mode(False), torch.enable_grad():
            second = self._run(runner, recorder, self._masks.holders())
            tensors = [*self.arguments.leaves, *second.layers, *(second.layers[place] for place in self._again.values())]
            return relevances_of(second.output, tensors, start, second.factors)


def computations(explain_model: nn.Module, inputs: Inputs, question: Question) -> Iterator[Computation]:
    """The computation of a question, or of each of the references that it lists, one after another."""
    references = question.reference if isinstance(question.reference, list) else [question.reference]
    if not references:
        raise InputError("reference= is an empty list", topic="references")
    for one in references:
        yield Computation(explain_model, inputs, replace(question, reference=one))


def mean_of(found: Iterable[Computation]) -> Computation:
    """Computations of several references as one, with the means of their relevances and of their outputs for the references.

    It holds sums, so that memory does not grow with the number of references.
    """
    total: Computation | None = None
    count = 0
    for one in found:
        total, count = one if total is None else _with(one, lambda mine, theirs: theirs + mine, total), count + 1
    assert total is not None
    return total if count == 1 else _with(total, lambda mine: mine / count)


def _with(one: Computation, function: Callable[..., Any], *others: Computation) -> Computation:
    """A computation with the results of a function of its tensors and those of others, which differ in their reference."""
    changed = copy.copy(one)
    for name in ("of_inputs", "layers", "constants", "multipliers", "signals", "reference_output"):
        values = [getattr(each, name) for each in (one, *others)]
        found = pytree.tree_map(lambda *leaves: None if leaves[0] is None else function(*leaves), *values)
        setattr(changed, name, found)
    return changed


def _runner(explain_model: nn.Module, module: ExplainModule, traced: TreeGraphModule, several: bool) -> Callable[..., Any]:
    """What runs `traced`, which is `module` or a recorder of it: compiled, if `explain_model` is.

    `several`: whether several relevances will be propagated.
    """
    cache = cache_of(module)
    compiler = None if explain_model is module else compiler_of(explain_model)
    several = several and compiler is None
    if traced is module and compiler is not None:
        return explain_model
    key = (None if traced is module else traced, several)
    if key not in cache.runners:
        plain = with_plain_calls(_for(traced, several))
        cache.runners[key] = Called(traced), None if plain is module else plain
    called, found = cache.runners[key]
    runner = module if found is None else found
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
    module: ExplainModule, recording: Recording, arguments: Arguments, masks: Masks, references: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """For each recorded node a tensor of zeros, which is added to its value: its gradient is that of the value.

    A compiled graph has no gradients of one output with respect to another, only with respect to inputs. The masks get to know
    the shapes of the masked values.
    """
    sizes = tuple(
        (str(value.dtype), tuple(value.shape)) for value in pytree.tree_leaves(arguments.passed) if hasattr(value, "shape")
    )
    key = (recording, sizes)
    layouts = cache_of(module).layouts
    if key not in layouts:
        recorder = recorder_of(module, recording)
        with torch.no_grad():
            _, *layers = arguments.call(recorder, {**references, **masks.holders()})
        values = [torch.empty_like(layer, device="meta") for layer in layers[: len(recorded_by(recorder))]]
        layouts[key] = values, masks.layouts()
    device = next((leaf.device for leaf in pytree.tree_leaves(arguments.passed) if isinstance(leaf, torch.Tensor)), None)
    values, masked = layouts[key]
    masks.know(masked, device)
    return {f"{PROBE}{number}": torch.zeros_like(value, device=device).requires_grad_() for number, value in enumerate(values)}


def _relevances_in_chunks(
    forward: _Forward,
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
                return relevances_of(forward.output, wanted, seed, forward.factors, retain, in_format=False)

        together = torch.func.vmap(propagate)
        parts.append(together(torch.stack([whole(seed) for _, seed in chunk]), *masks.stacked([number for number, _ in chunk])))
    return [torch.cat(of_tensor) for of_tensor in zip(*parts, strict=True)]


def relevances_of(
    output: torch.Tensor,
    wanted: Sequence[torch.Tensor],
    seed: torch.Tensor,
    factors: Sequence[torch.Tensor | None],
    retain_graph: bool = False,
    in_format: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Relevance of the wanted tensors, zeros for tensors without relevance. `factors`: see `with_factors`.

    `seed`: as `Seeds` hold it. `in_format`: whether in the memory format of the tensors, of which vmap knows one only.
    """
    tensors = [tensor for tensor in wanted if tensor.requires_grad]
    output, seed = entries_of(output, seed)
    gradients = iter(torch.autograd.grad(output, tensors, seed, allow_unused=True, retain_graph=retain_graph))
    found = []
    for tensor, factor in zip(wanted, factors, strict=True):
        gradient = next(gradients) if tensor.requires_grad else None
        gradient = None if gradient is None else whole(gradient)  # that of the output itself may be as the seed is held
        if gradient is not None and factor is not None:
            gradient = relevance_from(factor.detach(), gradient)
        if gradient is None:
            found.append(torch.zeros_like(tensor))
        else:
            found.append(_in_format_of(tensor, gradient) if in_format else gradient)
    return tuple(found)


def _in_format_of(tensor: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """Relevance in the memory format of its tensor."""
    if tensor.is_contiguous():
        return relevance.contiguous()
    for memory_format, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.ndim == relevance.ndim == dimensions and tensor.is_contiguous(memory_format=memory_format):
            return relevance.contiguous(memory_format=memory_format)
    return relevance
