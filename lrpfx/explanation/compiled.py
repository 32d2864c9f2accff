"""A model that was compiled for explanations, or a program that was exported, and what it answers."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lrpfx.attribution.compute import attribute
from lrpfx.attribution.ledger import Ledger, ledger
from lrpfx.deploy.program import number_of_targets
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.answers import Answer, Array, Scores, category_of_target, difference_of_target
from lrpfx.explanation.arrays import of_features, warn_of_categories
from lrpfx.explanation.captures import takes
from lrpfx.ir.kinds import Linear
from lrpfx.ir.node import Role, bottlenecks, node_info, output_node
from lrpfx.ir.operator import Probability
from lrpfx.request.channels import kind_of
from lrpfx.request.classes import index_of
from lrpfx.request.outputs import OutputSelector, final_probabilities_of, index_of_place, select_output
from lrpfx.request.places import has_classes, largest_classes
from lrpfx.request.reduction import CHANNELS
from lrpfx.request.targets import Class, ForEach, Largest, Position, Target
from lrpfx.request.targets_of_samples import resolved
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.support.tensors import as_array, is_floating, on_device_of


@dataclass(frozen=True)
class Run:
    """The results for a batch: the outputs, the answers for each image and what was asked for them, and the rules."""

    outputs: list[Array]
    answers: list[tuple[Answer, ...]]
    targets: list[tuple[Target, ...]]
    rules: str
    scores: Scores


class Compiled(ABC):
    """A model that is ready to explain."""

    categories: Sequence[str] | None
    record: tuple[str, ...]

    @abstractmethod
    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        """Explain each input for its targets, of which all have the same number, with the layers in `record` as well.

        Several inputs, and categories, have the relevance of features, (features,) for each sample.
        """

    @abstractmethod
    def ledger(self, inputs: Any, target: Target) -> Ledger:
        """The account of every layer."""

    @abstractmethod
    def spatial_layers(self, axes: int = 2) -> list[str]:
        """The last layer of each resolution that all relevance flows through, in the order of execution.

        `axes`: how many axes its places have.
        """

    @abstractmethod
    def axis_of_channels(self, name: str, dimensions: int) -> int:
        """Which axis of the value of a layer, without the batch, has its channels. `dimensions`: of that value."""


@dataclass(frozen=True)
class Origin:
    """What an explanation was computed from, which computes what it does not hold."""

    compiled: Compiled
    inputs: Any  # of a batch of one
    targets: tuple[Target, ...]  # one for each answer
    output: Array

    def answers(self, targets: Sequence[Target], record: Sequence[str] = ()) -> tuple[Answer, ...]:
        """The relevance for further targets of a photograph, or of further layers."""
        run = self.compiled.run(self.inputs, [targets], record)
        check_same(run.outputs[0], self.output)
        return run.answers[0]

    def ledger(self, score: float) -> Ledger:
        """The account of every layer, for the class that is explained. `score`: what the explanation accounts for."""
        found = self.compiled.ledger(self.inputs, self.targets[0])
        check_same(np.array(found.seed), np.array(score))
        return found


#: By the address of an explanation, as long as it is alive: explanations hold data only.
_ORIGINS: dict[int, Origin] = {}


def keep_origin(explanation: Any, origin: Origin) -> None:
    """Let `origin_of` find what an explanation was computed from."""
    _ORIGINS[id(explanation)] = origin
    weakref.finalize(explanation, _ORIGINS.pop, id(explanation), None)


def origin_of(explanation: Any) -> Origin | None:
    """What an explanation was computed from; None for a copy."""
    return _ORIGINS.get(id(explanation))


@dataclass(frozen=True)
class BothSides:
    """Chooses the one logit of a classifier of two classes as a logit of each: that of the first is its negative."""

    output: OutputSelector

    def __call__(self, result: Any) -> torch.Tensor:
        logit = select_output(result, self.output)
        logit = logit.reshape(len(logit), 1)
        return torch.cat([-logit, logit], 1)


class CompiledModel(Compiled):
    """An explainable module."""

    def __init__(
        self,
        module: nn.Module,
        categories: Sequence[str] | None,
        record: tuple[str, ...] = (),
        output: OutputSelector = None,
        scores: Scores | None = None,
        reference: Any = None,
    ) -> None:
        """`scores`: what the numbers in the output are; by default what the graph says. `reference`: as for `attribute`."""
        self.module = module
        self.explain_model: ExplainModule = explainable(module, "explain")
        self.categories = categories
        self.record = record
        self.output = output
        self.reference = reference
        self.scores = _scores_of(self.explain_model, output) if scores is None else scores

    def with_output(self, output: OutputSelector) -> "CompiledModel":
        """The same that explains another output."""
        return self._with(output=output)

    def compared_with(self, reference: Any) -> "CompiledModel":
        """The same with another reference."""
        return self._with(reference=reference)

    def _with(self, **changed: Any) -> "CompiledModel":
        made = copy.copy(self)
        vars(made).update(changed)
        return made

    def with_names_of(self, inputs: Any) -> "CompiledModel":
        """The same with a logit for each of two names, if the model has one logit for these inputs."""
        if self.categories is None or len(self.categories) != 2:
            return self
        chosen = self.outputs_of(self.placed(inputs))
        if chosen.shape[1:].numel() != 1:
            return self
        if self.scores is Scores.PROBABILITIES:
            raise InputError(
                "two names need a logit, but the module returns one probability: lrpfx.transform(..., explain='logits')",
                topic="classes-and-their-names",
            )
        return self._with(output=BothSides(self.output), scores=Scores.BINARY)

    def takes(self, inputs: Any) -> bool:
        """Whether the graph is for inputs like these."""
        return takes(self.explain_model, inputs)

    def outputs_of(self, inputs: Any) -> torch.Tensor:
        """The explained output for inputs on the device of the model."""
        given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        with torch.no_grad():
            return select_output(self.module(**given) if isinstance(given, Mapping) else self.module(*given), self.output)

    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        columns = [[resolved(one, self.categories) for one in column] for column in zip(*targets, strict=True)]
        seeds = [column[0] if all(one == column[0] for one in column) else ForEach(tuple(column)) for column in columns]
        placed = on_device_of(self.module, inputs, True)
        several = len(seeds) > 1
        chosen = {"targets": seeds} if several else {"target": seeds[0]}
        options: dict[str, Any] = {"output": self.output, "reference": self.reference}
        found = attribute(self.module, placed, **chosen, record=(*self.record, *record), **options)
        relevance = found.relevance
        warn_of_categories(relevance, placed, self.explain_model)
        if not isinstance(relevance, torch.Tensor) or not is_floating(placed):
            relevance = of_features(relevance, placed, self.explain_model)
        results = {"output": found.output, "relevance": relevance, **found.layers}
        arrays = {name: as_array(value) for name, value in results.items()}
        output = arrays.pop("output")
        outputs = checked_output(output[:, None] if output.ndim == 1 else output, columns)
        if len(outputs) != len(targets):
            raise InputError(
                f"the explained output has shape {output.shape} for {len(targets)} samples, not a row for each of them. "
                "Recurrent layers and convolutions over steps read an input of two axes as one sample, (steps, features): it "
                'is form="series" then, or a wave, with rate=',
                topic="explainers",
            )
        rows = [{name: value[place] if several else value for name, value in arrays.items()} for place in range(len(seeds))]
        other = found.reference_output
        references = None if other is None else as_array(other).reshape(outputs.shape)
        answers, again = answers_of(outputs, columns, rows, self.categories, self.scores, references)
        if output.ndim == 1:  # there are no classes to ask for
            again = [tuple(column) for column in zip(*columns, strict=True)]
        return Run(shown_outputs(outputs, columns), answers, again, self.explain_model.composite, self.scores)

    def layers_of(self, inputs: Any, target: Target, names: Sequence[str]) -> dict[str, Array]:
        """Relevance of layers by name, with the batch, if they have one."""
        found = attribute(self.module, inputs, target, record=names, output=self.output, reference=self.reference)
        return {name: as_array(value) for name, value in found.layers.items()}

    def ledger(self, inputs: Any, target: Target) -> Ledger:
        return ledger(self.explain_model, self.placed(inputs), target, output=self.output, reference=self.reference)

    def placed(self, inputs: Any) -> Any:
        """Images in the dtype and on the device of the model; what a tokenizer returned as it is."""
        return on_device_of(self.module, inputs, True) if isinstance(inputs, torch.Tensor) else inputs

    def spatial_layers(self, axes: int = 2) -> list[str]:
        last: dict[tuple[int, ...], str] = {}
        for node in bottlenecks(self.explain_model.unfused_graph):
            shape = node_info(node).shape
            if shape is None or len(shape) != axes + 2 or node_info(node).neutral:
                continue
            try:
                channels = 0 if axes > 1 else self.axis_of_channels(node_info(node).name, 2)
            except InputError:  # the graph does not show it
                continue
            places = tuple(size for axis, size in enumerate(shape[1:]) if axis != channels)
            if min(places) > 1:
                last[places] = node_info(node).name
        return list(last.values())

    def axis_of_channels(self, name: str, dimensions: int) -> int:
        shape = (1,) * (1 + dimensions)
        return kind_of(self.explain_model, name, shape, None).dimension % len(shape) - 1


def check_same(output: Array, before: Array) -> None:
    """Raise `InputError` unless a model still has the output that was explained."""
    if not np.allclose(output, before, rtol=1e-2, atol=1e-3 * float(np.abs(before).max())):
        raise InputError(
            "the model has changed since this explanation was made; explain the photograph again", topic="changed-weights"
        )


def _scores_of(module: ExplainModule, output: OutputSelector) -> Scores:
    """What the graph says of the numbers in the output."""
    if callable(output):  # it may make anything of them
        return Scores.UNKNOWN
    final = final_probabilities_of(module.graph, output)
    row = None if final is None else node_info(final).operator
    if row is not None and row.values.probability is Probability.OF_ONE_LOGIT:
        return Scores.PROBABILITIES
    if row is None and _ends_in_layer(module):
        return Scores.LOGITS
    return Scores.UNKNOWN  # a softmax of logarithms gives the probabilities, too


def _ends_in_layer(module: ExplainModule) -> bool:
    """Whether the one output is that of a dense layer or convolution."""
    outputs = output_node(module.graph).all_input_nodes
    node = outputs[0] if len(outputs) == 1 else None
    while node is not None and node_info(node).neutral:
        read = [value for value in node.all_input_nodes if node_info(value).role is Role.DATA]
        node = read[0] if len(read) == 1 else None
    kind = None if node is None else node_info(node).kind
    return kind is not None and issubclass(kind, Linear)


def scores_of_logits(final: fx.Node, module: ExplainModule) -> Scores:
    """What the inputs of the softmax or sigmoid are that computed the output of a module."""
    row = node_info(final).operator
    if row is not None and row.values.probability is Probability.OF_ONE_LOGIT:
        return Scores.BINARY
    dimension = final.kwargs.get("dim", final.args[1] if len(final.args) > 1 else None)
    of_classes = node_info(final).shape is not None and len(node_info(final).shape or ()) == 2 and dimension in (1, -1, None)
    is_output = final in output_node(module.graph).all_input_nodes or dimension is None
    return Scores.LOGITS if of_classes and is_output else Scores.OTHER


class CompiledProgram(Compiled):
    """A program that was exported.

    A batch that is smaller than the program's, if that is fixed, is filled up with copies.
    """

    def __init__(self, runner: Runner, categories: Sequence[str] | None, record: tuple[str, ...] = ()) -> None:
        self.runner = runner
        self.categories = categories
        self.record = record

    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        if not isinstance(inputs, torch.Tensor):
            raise InputError("an explainer gives a program one input; call the runner itself for several", topic="explainers")
        wanted = (*self.record, *record)
        manifest = self.runner.manifest
        self._check(wanted)
        columns = [[self._checked(one) for one in column] for column in zip(*targets, strict=True)]
        only_largest = manifest["target"] == "max"
        if only_largest and any(not isinstance(one, Largest) for column in columns for one in column):
            raise InputError(
                "the program explains the largest output only; export it with lrpfx.lower(..., target='index')",
                topic="explainers",
            )
        described = next(iter(manifest["arguments"].values()))
        count, size = len(inputs), described["shape"][0] or len(inputs)
        places = [place % count for place in range(size)]
        inputs = inputs.to(getattr(torch, described["dtype"]))[places]
        rows, outputs = [], np.zeros((0, 0))
        several = number_of_targets(manifest)
        for first in range(0, len(columns), several or 1):
            together = [[column[place] for place in places] for column in columns[first : first + (several or 1)]]
            found = self.runner(inputs) if only_largest else self._run_indices(inputs, together)
            arrays = {name: as_array(value)[:count] for name, value in found.items()}
            output = arrays.pop("output")
            outputs = checked_output(output[:, None] if output.ndim == 1 else output)
            kept = {name: value for name, value in arrays.items() if name == "relevance" or name in wanted}
            for number in range(len(together)):
                rows.append({name: value[:, number] if several else value for name, value in kept.items()})
        answers, resolved_targets = answers_of(outputs, columns, rows, self.categories, Scores.UNKNOWN)
        return Run(list(outputs), answers, resolved_targets, str(manifest.get("composite", "")), Scores.UNKNOWN)

    def _check(self, record: Sequence[str]) -> None:
        """Raise `InputError` unless the program returns relevance of images for classes, and that of the layers in `record`."""
        manifest = self.runner.manifest
        results = manifest["results"]
        if manifest["target"] not in ("index", "targets", "max") or "relevance" not in results:
            raise InputError(
                "the program was not exported for classes of images: lrpfx.lower(..., target='index') explains one of each",
                topic="classes-and-their-names",
            )
        if results["relevance"]["dtype"] == "uint8":
            raise InputError(
                "the program returns pictures of relevance in bytes; export it without reduce='bytes'", topic="explainers"
            )
        if manifest["reduce"] == CHANNELS:
            raise InputError(
                'the program returns relevance of channels, not of pixels; export it without reduce="channels"',
                topic="explainers",
            )
        missing = [name for name in record if name not in results]
        if missing:
            raise InputError(
                f"the program does not record {missing[0]!r}; export it with lrpfx.lower(..., record={missing!r})",
                topic="explainers",
            )

    def _checked(self, target: Target) -> Target:
        """A target, if it is one class."""
        found = resolved(target, self.categories)
        if not isinstance(found, (Class, Largest)):
            raise InputTypeError(f"an exported program explains classes, not {found}", topic="explainers")
        return found

    def _run_indices(self, inputs: torch.Tensor, columns: Sequence[Sequence[Target]]) -> Any:
        """The results for columns of classes: one, or up to as many as the program takes at once; the last fills the rest."""
        classes = self.runner.manifest["results"]["output"]["shape"][1]
        several = number_of_targets(self.runner.manifest)

        def run(indices: torch.Tensor) -> Any:
            filled = indices[:, torch.arange(several or 1).clamp(max=len(columns) - 1)]
            return self.runner(inputs, filled if several else filled[:, 0])

        indices = [[index_of(getattr(one, "index", 0), self.categories, classes) for one in column] for column in columns]
        chosen = torch.tensor(indices).T
        found = run(chosen)
        is_largest = torch.tensor([[isinstance(one, Largest) for one in column] for column in columns]).T
        resolved = torch.where(is_largest, largest_classes(found["output"])[:, None].cpu(), chosen)
        return found if torch.equal(resolved, chosen) else run(resolved)

    def ledger(self, inputs: Any, target: Target) -> Ledger:
        raise InputError("an exported program has no ledger", topic="explainers")

    def spatial_layers(self, axes: int = 2) -> list[str]:
        raise InputError("an exported program has only the layers of its lower(..., record=)", topic="explainers")

    def axis_of_channels(self, name: str, dimensions: int) -> int:
        raise InputError(f"an exported program does not say which axis of {name} has channels", topic="explainers")


def answers_of(
    outputs: Array,
    columns: Sequence[Sequence[Target]],
    rows: list[dict[str, Array]],
    categories: Sequence[str] | None,
    scores: Scores,
    references: Array | None = None,
) -> tuple[list[tuple[Answer, ...]], list[tuple[Target, ...]]]:
    """The answers for each image, one for each column of classes, and what to ask for each of them again.

    `references`: the outputs for a reference, if what is explained are differences from them.
    """
    classes = outputs.shape[2 if outputs.ndim == 3 else 1]
    if categories is not None and len(categories) != classes:
        axes, there = range(outputs.ndim), 2 if outputs.ndim == 3 else 1
        others = [axis for axis in axes[1:] if axis != there and outputs.shape[axis] == len(categories)]
        remedy = "".join(
            f": output=lambda output: output.movedim({axis}, {there}) takes them from dimension {axis}" for axis in others[:1]
        )
        raise InputError(
            f"categories= has {len(categories)} names of classes, but the output has {classes} classes in dimension {there} of "
            f"its shape {outputs.shape}{remedy}",
            topic="classes-and-their-names",
        )

    def answer(place: int, one: Target, arrays: dict[str, Array]) -> tuple[Answer, Target]:
        layers = {name: value[place] for name, value in arrays.items()}
        relevance = layers.pop("relevance")
        category = category_of_target(one, outputs[place], categories, scores)
        region = one.region(torch.as_tensor(outputs[place : place + 1])) if outputs.ndim > 3 else None
        of_input = relevance if relevance.ndim > 2 else relevance[None]
        difference = None if references is None else difference_of_target(one, outputs[place], references[place])
        found = Answer(category, of_input, layers, None if region is None else np.asarray(region[0]), difference)
        return found, one if category.index is None or outputs.ndim == 3 else Class(category.index)

    pairs = [
        [answer(place, column[place], arrays) for column, arrays in zip(columns, rows, strict=True)]
        for place in range(len(outputs))
    ]
    return [tuple(found for found, _ in some) for some in pairs], [tuple(one for _, one in some) for some in pairs]


def shown_outputs(outputs: Array, columns: Sequence[Sequence[Target]]) -> list[Array]:
    """The output of each sample that an explanation holds, (classes, ...).

    Of a sequence, (positions, classes), that is the position of the first target, or (classes, positions) if it has none.
    """
    if outputs.ndim != 3:
        return list(outputs)
    pairs = zip(outputs, columns[0], strict=True)
    return [one[int(target.position)] if isinstance(target, Position) else one.T for one, target in pairs]


def checked_output(output: Any, columns: Sequence[Sequence[Target]] = ()) -> Any:
    """An output, if it has the form (batch, classes), or (batch, classes, height, width) with other places, too.

    A sequence, (batch, positions, classes), is allowed if all targets in `columns` are of positions or regions.
    """
    targets = [one for column in columns for one in column]
    is_sequence = output.ndim == 3 and targets and all(one.is_of_positions for one in targets)
    if not has_classes(output) and not is_sequence:
        place = index_of_place(output.ndim) if output.ndim > 2 else ".reshape(-1, 1)"
        raise InputError(
            f"the explained output has shape {tuple(output.shape)}, not (batch, classes); choose what has by a function that "
            f"ends in {place}, such as output=lambda output: output{place} if the model returns one tensor",
            topic="classes-and-their-names",
        )
    return output
