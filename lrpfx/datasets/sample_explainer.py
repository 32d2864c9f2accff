"""Explanations of batches, as arrays with a row for each sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lrpfx.attribution.computation import Computation, computations, mean_of
from lrpfx.datasets import layout
from lrpfx.datasets.layout import Array
from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.explanation.arrays import of_features
from lrpfx.request.channels import kind_of
from lrpfx.request.conditions import Channel, Feature, Head, Index
from lrpfx.request.names import recorded_names, resolve_names
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.places import has_classes, scores_of_classes
from lrpfx.request.question import Question
from lrpfx.request.reduction import CHANNELS, OF_NUMBERS, Reduction, checked_reduction, reduced
from lrpfx.request.targets import Target
from lrpfx.request.targets_of_samples import as_target_of_samples
from lrpfx.request.user_functions import ReportedTarget, reported
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.samples.plan import NO_LABEL
from lrpfx.samples.preparation import Sample, SampleGroup
from lrpfx.support.tensors import is_floating, on_device_of
from lrpfx.support.torch_internals import pytree

#: Names of dimensions after that of samples, by what counts the channels and how many there are.
_NAMES: dict[tuple[type[Index] | None, int], tuple[str, ...]] = {
    (Channel, 2): ("channel", "position"),
    (Channel, 3): ("channel", "height", "width"),
    (Channel, 4): ("channel", "depth", "height", "width"),
    (Feature, 1): ("feature",),
    (Feature, 2): ("token", "feature"),
    (Head, 3): ("head", "query", "key"),
}
_COUNTED = ("channel", "feature", "head")  # which reductions add up


@dataclass(frozen=True)
class ExplainedRows:
    """Rows of arrays for some samples of a batch, and the reasons of those that could not be explained."""

    places: list[int]
    rows: dict[str, Array]
    problems: dict[int, str]  # by place; their rows are missing


@dataclass(frozen=True)
class SampleExplainer:
    """Explains batches of samples.

    `question`: its targets are those of every sample. `reductions`: of each recorded layer, by its name. `reduce`: that of the
    inputs. `scores`: how many of the largest outputs are kept; None for all. `dtype`: of relevance. `is_cast`: whether inputs
    are brought to the dtype of the model. `arguments_of`: makes the model's arguments of inputs, as for detectors, which find
    some in the images. `is_of_features`: whether samples are rows of a table, whose features have relevance side by side.
    `adds_channel`: whether samples are waves, which the model takes with an axis for their channel.
    """

    explain_model: nn.Module
    module: ExplainModule
    question: Question
    reductions: Mapping[str, Reduction]
    reduce: Reduction
    scores: int | None
    dtype: torch.dtype
    is_cast: bool
    arguments_of: Callable[[Any], Any] | None = None
    is_of_features: bool = False
    adds_channel: bool = False

    @property
    def has_several(self) -> bool:
        """Whether there is a dimension for targets."""
        return self.question.targets is not None

    @property
    def leading(self) -> tuple[str, ...]:
        """The dimensions of relevance before those of the values."""
        return (
            *((layout.CONDITION,) if self.question.conditions is not None else ()),
            *((layout.TARGET,) if self.has_several else ()),
        )

    def explained(
        self, group: SampleGroup, samples: Sequence[Sample], observe: Callable[[Computation], object]
    ) -> Iterator[ExplainedRows]:
        """Explanations of a group of a batch's samples. What fails for several is tried again with half of them.

        `observe`: it is called with what is computed.
        """
        numbers = [samples[place].number for place in group.places]
        try:
            found = self.computed(group.inputs, [samples[place].label for place in group.places])
            observe(found)
            rows, problems = self.rows(found, len(numbers))
        except InputError as error:
            if len(numbers) == 1:
                yield ExplainedRows([], {}, {group.places[0]: str(error)})
                return
            for half in group.halves():
                yield from self.explained(half, samples, observe)
            return
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise MemoryError(
                f"there is not enough memory for samples {numbers[0]} to {numbers[-1]} at once: a smaller batch_size needs "
                f"less, and reduce= or record= fewer layers ({first_lines(error)})"
            ) from error
        except LrpfxError:
            raise
        except Exception as error:
            raise InputError(
                f"samples {numbers[0]} to {numbers[-1]} cannot be explained: {first_lines(error)}", topic="samples"
            ) from error
        kept = [at for at in range(len(numbers)) if at not in problems]
        rows = rows if not problems else {name: values[kept] for name, values in rows.items()}
        yield ExplainedRows(
            [group.places[at] for at in kept], rows, {group.places[at]: reason for at, reason in problems.items()}
        )

    def targets_of(self, labels: Sequence[int | None]) -> list[Target]:
        """The targets of samples with these labels."""
        known = [None if label == NO_LABEL else label for label in labels]
        given = self.question.targets if self.has_several else [self.question.target]
        return [one.of_labels(known) for one in given]

    def asked(self, targets: Sequence[Target], output: OutputSelector) -> Question:
        """The question with these targets of this output, whose failures are those of samples."""
        reporting = [ReportedTarget(one) for one in targets]
        given: dict[str, Any] = {"targets": reporting} if self.has_several else {"target": reporting[0]}
        return replace(self.question, **given, output=reported(output, "output"))

    def computed(self, inputs: Any, labels: Sequence[int | None]) -> Computation:
        """The outputs and relevance of a batch."""
        question = self.asked(self.targets_of(labels), self.question.output)
        inputs = pytree.tree_map(lambda one: one[:, None], inputs) if self.adds_channel else inputs
        given = on_device_of(self.module, inputs, self.is_cast)
        given = given if self.arguments_of is None else self.arguments_of(given)
        found = mean_of(computations(self.explain_model, given, question))
        if self.is_of_features:
            several = tuple(given) if isinstance(given, list) else given  # as batches have them
            found.of_inputs = of_features(found.of_inputs, several, self.module)
        return found

    def rows(self, found: Computation, count: int) -> tuple[dict[str, Array], dict[int, str]]:
        """Arrays with a row for each sample by name, and the reasons of samples whose values are not finite, by place."""
        values = {**self._relevance(found, count), **self._output(found.output, count), **self._sums(found, count)}
        arrays: dict[str, Array] = {name: value.cpu().numpy() for name, value in values.items()}
        problems: dict[int, str] = {}
        for name, array in arrays.items():
            with np.errstate(all="ignore"):  # it is the question whether there are such values
                is_finite = array.dtype.kind != "f" or np.isfinite(array.sum(dtype=np.float64))
            if not is_finite:
                for place in np.flatnonzero(~np.isfinite(array.reshape(count, -1)).all(axis=1)).tolist():
                    problems.setdefault(place, f"{name} is not finite")
        return arrays, problems

    def _relevance(self, found: Computation, count: int) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for name, relevance in _leaves(found.of_inputs, self.module):
            embedded = not found.arguments.leaves  # relevance is that of vectors of tokens
            dimensions = relevance.ndim - len(self.leading)
            known = 1 if self.adds_channel else None
            channels = None if self.reduce is None else known or _channels_of_input(name, dimensions, embedded)
            values[name] = self._row(name, relevance, count, self.reduce, channels)
        for name, relevance in found.layers.items():
            reduction, own = self.reductions[name], relevance.ndim - len(self.leading)
            channels = None
            if reduction is not None:
                shape = tuple(relevance.shape[len(self.leading) :])
                channels = kind_of(self.module, name, shape, None).dimension % own
            values[layout.LAYERS + name] = self._row(name, relevance, count, reduction, channels)
        return values

    def _row(self, name: str, relevance: torch.Tensor, count: int, reduction: Reduction, channels: int | None) -> torch.Tensor:
        """Relevance with the samples in its first dimension, reduced."""
        first = len(self.leading)
        if relevance.ndim <= first or relevance.shape[first] != count:
            raise InputError(
                f"the relevance of {name} has the shape {tuple(relevance.shape[first:])}, without a dimension for the "
                f"{count} samples of the batch in front"
            )
        moved = relevance.movedim(first, 0) if first else relevance
        if reduction is not None and channels is not None:
            moved = reduced(moved, reduction, channels + first, first + 1)
        return moved.to(self.dtype)

    def _output(self, output: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
        if not output.ndim or len(output) != count:
            raise InputError(
                f"the output has the shape {tuple(output.shape)}, without a dimension for {count} samples in front"
            )
        if not has_classes(output):
            if self.scores is not None:
                raise InputError(f"scores= are of outputs (samples, classes), but this one is {tuple(output.shape)}")
            return {layout.OUTPUT: output.to(self.dtype)}
        scores = scores_of_classes(output)
        prediction = {layout.PREDICTION: scores.argmax(1)}
        if self.scores is None:
            return {layout.OUTPUT: output.to(self.dtype), **prediction}
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.scores]  # as argmax, the first of equal ones
        return {layout.TOP_SCORES: scores.gather(1, best).to(self.dtype), layout.TOP_CLASSES: best, **prediction}

    def _sums(self, found: Computation, count: int) -> dict[str, torch.Tensor]:
        """The relevance that was explained of the output, and what of it reached the inputs."""
        seeds = torch.stack([seed.reshape(count, -1).sum(1, dtype=torch.float64) for seed in found.explained], 1)
        first = len(self.leading)
        parts = [signal.flatten(first + 1) if signal.ndim > first + 1 else signal[..., None] for signal in found.signals]
        reached = torch.stack([part.sum(-1, dtype=torch.float64) for part in parts]).sum(0)
        return {layout.SEED: seeds if self.has_several else seeds[:, 0], layout.REACHED: reached.movedim(first, 0)}

    def dimensions(self, values: Mapping[str, Array], embedded: bool) -> dict[str, tuple[str, ...]]:
        """The names of the dimensions of each array. `embedded`: whether inputs are tokens, whose vectors have relevance."""
        targets = (layout.TARGET,) if self.has_several else ()
        known = {
            layout.SEED: targets,
            layout.REACHED: self.leading,
            layout.PREDICTION: (),
            layout.TOP_CLASSES: ("rank",),
            layout.TOP_SCORES: ("rank",),
        }
        found = {}
        for name, value in values.items():
            own = known.get(name)
            if own is None and name == layout.OUTPUT:
                own = ("class",) if value.ndim == 2 else self._numbered(name, value.ndim - 1)
            if own is None:
                own = (*self.leading, *self._of_relevance(name, value.ndim - 1 - len(self.leading), embedded))
            found[name] = (layout.SAMPLE, *own)
        return found

    def _of_relevance(self, name: str, count: int, embedded: bool) -> tuple[str, ...]:
        """The names of the last `count` dimensions. Sizes belong to names, so those of the sole input alone are short."""
        prefix = "" if name == layout.RELEVANCE else f"{name}."
        layer = name.removeprefix(layout.LAYERS) if name.startswith(layout.LAYERS) else None
        reduction = self.reduce if layer is None else self.reductions[layer]
        if reduction == CHANNELS:
            return (f"{prefix}channel",)
        rank = count if reduction is None else count + 1
        kind: type[Index] | None = Feature if embedded or rank == 1 else Channel if rank > 2 else None
        if layer is not None:
            try:
                kind = kind_of(self.module, layer, (1,) * (rank + 1), None)
            except InputError:  # the graph does not show it
                kind = None
        names = _NAMES.get((kind, rank))
        if names is None:
            return self._numbered(name, count)
        return tuple(f"{prefix}{one}" for one in names if reduction is None or one not in _COUNTED)

    def _numbered(self, name: str, count: int) -> tuple[str, ...]:
        return tuple(f"{name}.{axis + 1}" for axis in range(count))


def _leaves(relevance: Any, module: ExplainModule) -> Iterator[tuple[str, torch.Tensor]]:
    """The relevance of each input, by the name of its array; None and inputs that were declared constant are left out."""
    constants = module.constants()
    if isinstance(relevance, tuple):
        by_name = dict(zip(module.argument_names, relevance, strict=False))
        relevance = {name: one for name, one in by_name.items() if name not in constants}
        relevance = next(iter(relevance.values())) if len(relevance) == 1 else relevance
    elif isinstance(relevance, Mapping):
        relevance = {name: one for name, one in relevance.items() if name not in constants}
    yield from _named(relevance, layout.RELEVANCE)


def _named(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if is_floating(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _named(one, f"{name}.{str(key).replace('/', '|')}")
    elif isinstance(value, (tuple, list)):
        for place, one in enumerate(value):
            yield from _named(one, f"{name}.{place}")


def _channels_of_input(name: str, dimensions: int, embedded: bool) -> int:
    """The dimension of the channels of an input (samples, ...), or of the features of its embedding."""
    if embedded and dimensions > 1:
        return dimensions - 1
    if dimensions in (2, 4, 5):
        return 1
    raise InputError(
        f"{name} has {dimensions} dimensions with that of samples, and which of them has the channels is not known: leave out "
        "reduce=, and record a layer instead"
    )


def as_copies(inputs: Any, count: int) -> Any:
    """A batch of copies of a batch of one."""

    def repeated(leaf: Any) -> Any:
        return leaf.repeat(count, *[1] * (leaf.ndim - 1)) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(repeated, inputs)


def question_of_samples(question: Question, categories: Sequence[str] | None) -> Question:
    """A question with targets that hold for every sample, in which indices stand for names of classes. Errors: `InputError`."""
    question.check()
    several = question.targets
    if several is None:
        return replace(question, target=as_target_of_samples(question.target, categories))
    if not isinstance(several, Sequence) or isinstance(several, str) or not several:
        raise InputTypeError(f"targets are several, such as ['predicted', 'true'], not {several!r}", topic="targets")
    return replace(question, targets=tuple(as_target_of_samples(one, categories) for one in several))


def reductions_of(
    record: str | Sequence[str] | Mapping[str, Reduction], module: ExplainModule, others: Sequence[str]
) -> dict[str, Reduction]:
    """The reduction of each recorded layer. `others`: further layers, whose relevance is not reduced."""
    given = record if isinstance(record, Mapping) else dict.fromkeys(recorded_names(module.unfused_graph, record))
    found: dict[str, Reduction] = {}
    for pattern, reduction in {**dict.fromkeys(others), **given}.items():
        names = recorded_names(module.unfused_graph, [pattern])
        resolve_names(module.unfused_graph, names)
        found |= dict.fromkeys(names, checked_reduction(f"record[{pattern!r}]", reduction, OF_NUMBERS))
    return found
