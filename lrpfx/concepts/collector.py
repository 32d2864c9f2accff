"""One pass over a dataset, which ranks its samples for each channel of some layers."""

import math
import os
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from lrpfx.attribution.computation import Computation
from lrpfx.concepts.collection import ALL, QUANTITIES, SUFFIX, Collection, CollectionFacts, Key, Layer, merge
from lrpfx.concepts.rankings import Ranking
from lrpfx.datasets.engines import Engine
from lrpfx.datasets.ray_engine import RayEngine, engine_named
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.graphs import inputs_of_graph, question_of_graph, tensors_of_graph
from lrpfx.request.channels import KINDS, Layers, by_channel, kind_of, named_layers
from lrpfx.request.conditions import Feature, Index
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.places import has_classes, largest_classes
from lrpfx.request.question import Question
from lrpfx.request.targets import Target, TargetLike
from lrpfx.request.targets_of_samples import as_plain, as_target_of_samples
from lrpfx.request.user_functions import ReportedTarget, reported
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.runtime.fingerprints import fingerprint_of_module
from lrpfx.samples.failures import PATIENCE, none_loaded, warning_of_failures
from lrpfx.samples.items import is_indexed
from lrpfx.samples.plan import KnownSample, KnownSamples
from lrpfx.samples.preparation import Preparation, Sample, SampleBatch, SampleGroup
from lrpfx.samples.selection import SampleSelection, numbers_of
from lrpfx.support.files import checked_path
from lrpfx.support.graph_data import are_of_graph
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import is_frame, progress_bar
from lrpfx.support.runs import check_same_run, sole_writer
from lrpfx.support.tensors import on_device_of

_TOGETHER = 256  # samples that are ranked together
_MOST = 1_000_000  # places of a ranking, samples of a batch


def collect(
    explain_model: nn.Module,
    dataset: Any,
    layers: Layers,
    path: str | os.PathLike[str] | None = None,
    *,
    target: TargetLike = "predicted",
    top: int = 40,
    top_by_class: int = 10,
    normalize: Sequence[str] = ("relevance",),
    samples: Iterable[int] | None = None,
    batch_size: int = 32,
    workers: int = 0,
    save_every: float = 60.0,
    output: OutputSelector = None,
    engine: str | Engine = "embedded",
    retry_failed: bool = False,
    progress: bool = False,
) -> Collection:
    """The samples of a dataset with the largest activation and the largest relevance for each channel of some layers.

    Each sample is scored by the maximum and by the sum over the positions of a channel, of its activation and of its relevance
    (ActMax and RelMax [1]_), among all samples, among those of its predicted and among those of its true class.
    `lrpfx.concepts.gallery` shows what they have in common. A sample that cannot be loaded, does not fit or has values that are
    not finite is in the `errors` of the collection, with the reason, and the run goes on. What was collected until an error is
    in the file.

    Other arguments: as for `lrpfx.attribute`.

    Parameters
    ----------
    dataset
        A dataset of torch or any other sequence of samples, or something to iterate over, which gives the same samples in the
        same order each time. A sample is a tensor without a batch dimension, a pair of it and a label, or a dict of the model's
        arguments, with or without "label"; its number in the dataset names it. All samples have labels, or none has. Graphs,
        for a module that takes `x` and `edge_index`, are as for `lrpfx.Explainer`; positions are their nodes, or the messages
        of a layer that has these, and a label is `y`.
    layers
        Names as for `record=`; a dict says what has the channels, such as `{"encoder.add": Feature}`.
    path
        A file (.npz). The collection is written there every `save_every` seconds and at the end, whole or not at all. If it
        exists already, what is in it is not computed again, and its samples are compared with those of the dataset: 256 at
        random, others in each call, or all that are iterated over. One process at a time writes to a file. Collections of
        different samples are merged by `merge`.
    target
        The relevance is that of the "predicted" class, of the "true" one, of one class index, or of a function from the output
        to its relevance.
    top
        How many samples are kept for each channel.
    top_by_class
        How many are kept for each channel and class; with 0, there are no rankings by class, which take a ranking for each
        class.
    normalize
        "relevance", "activation", both or none; these scores are divided by the sum of their magnitudes over the channels of
        the sample.
    samples
        The numbers of those to collect, such as a range; all by default.
    batch_size
        How many samples run together.
    workers
        Processes that load samples.
    save_every
        Seconds between two writes of the file.
    engine
        "embedded" for this process, "ray" or an `lrpfx.datasets.RayEngine` for those of Ray, each of which collects from other
        samples of a dataset with indices.
    retry_failed
        Whether to try samples again that failed in a former run.
    progress
        Whether to show a bar (needs tqdm).

    Raises
    ------
    InputError
        The file is of another model, other settings or another dataset. No sample can be loaded, or only some have labels.
        The errors of `lrpfx.attribute` are raised if none of the first 32 that are loaded can be explained.

    Warns
    -----
    LrpfxWarning
        Samples have failed: their number, and the first reason.

    References
    ----------
    .. [1] Achtibat et al. 2023, https://www.nature.com/articles/s42256-023-00711-8
    """
    module = explainable(explain_model, "collect")
    named = named_layers(module, layers)
    question = Question(as_target_of_samples(target, None), record=tuple(named), output=output)
    collector = _Collector(
        explain_model, module, dataset, named, question, top, top_by_class, normalize, batch_size, workers, save_every
    )
    collector.check()
    chosen = engine_named(engine)
    if isinstance(chosen, RayEngine):
        collector.check_numbered('engine="ray" needs')
        _ = chosen.wanted  # its errors come at once
    file = None if path is None else checked_path(path, (SUFFIX,))[1]
    with nullcontext() if file is None else sole_writer(file):
        found = collector.collected(file, samples, chosen, retry_failed, progress)
    if found.errors:
        warnings.warn(warning_of_failures(found.errors, found.count + len(found.errors), "collection"), stacklevel=2)
    return found


@dataclass(frozen=True)
class _Collector:
    """What is collected, of which dataset: arguments of `collect`."""

    explain_model: nn.Module
    module: ExplainModule
    dataset: Any
    layers: dict[str, type[Index] | None]
    question: Question
    top: int
    top_by_class: int
    normalized: Sequence[str]
    batch_size: int
    workers: int
    save_every: float

    @property
    def are_graphs(self) -> bool:
        """Whether the samples are graphs, which run one by one."""
        return are_of_graph(self.module.argument_names)

    def collected(
        self, path: Path | None, samples: Iterable[int] | None, engine: Engine, retry_failed: bool, progress: bool
    ) -> Collection:
        """The collection in a file, with the samples that it does not have yet; it is saved now and then, and at the end."""
        found = before = Collection.load(path) if path is not None and path.exists() else None
        if before is not None:
            self._check_continued(before, path)
        known = replace(before, errors={}) if before is not None and retry_failed else before
        if isinstance(engine, RayEngine):
            parts = self._shards(samples, known, engine, progress)
        else:
            parts = self.parts(samples, known, progress)
        saved = time.monotonic()
        try:
            for part in parts:
                found = part if found is None else merge([found, part])
                if path is not None and time.monotonic() - saved > self.save_every:
                    found.save(path)
                    saved = time.monotonic()
        finally:
            if path is not None and found is not None and found is not before:
                found.save(path)
        if found is None:
            raise InputError("there are no samples", topic="samples")
        return found

    def parts(self, samples: Iterable[int] | None, before: Collection | None, progress: bool = False) -> Generator[Collection]:
        """Collections of some samples each, of those that are not in `before`. After an error, what precedes it comes first."""
        pending = _Pending(self, None if before is None else before.facts)
        known = KnownSamples.of((), ()) if before is None else before.known
        begun = -math.inf  # the first comes as soon as there is one: it has the facts, which shards need
        loaded = self._selection().batches(samples, partial(_is_done, before), self.batch_size, known)
        try:
            for batch in progress_bar(loaded, progress, unit="batch"):
                pending.add(batch)
                is_time = pending.count >= _TOGETHER or time.monotonic() - begun > self.save_every
                if is_time and pending.facts is not None:
                    yield from pending.taken()
                    begun = time.monotonic()
        except (Exception, KeyboardInterrupt):
            yield from pending.taken()
            raise
        yield from pending.taken()
        pending.check()

    def _shards(
        self, samples: Iterable[int] | None, before: Collection | None, engine: RayEngine, progress: bool
    ) -> Iterator[Collection]:
        """The same by the processes of Ray, each of which collects from some of the samples, in whole batches.

        The first samples are those of this process, so that errors of settings are raised here.
        """
        here, wanted = replace(self, workers=0), list(numbers_of(self.dataset, samples))
        if before is None:
            with closing(here.parts(wanted, None)) as parts:
                before = next(parts, None)
            if before is None:
                return
            yield before
        numbers = [one for one in wanted if not _is_done(before, one)]
        size = -(-_TOGETHER // self.batch_size) * self.batch_size
        shards = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        done = engine.mapped(partial(here.shard, before.facts), shards)
        yield from progress_bar(done, progress, unit="shard", total=len(shards))

    def shard(self, facts: CollectionFacts, numbers: Sequence[int]) -> Collection:
        """The collection of the samples with some numbers, made in another process."""
        return merge(self.parts(numbers, Collection(facts, {})))

    def check(self) -> None:
        """Raise `InputError` for settings that are wrong."""
        for name, low in {"top": 1, "top_by_class": 0, "batch_size": 1, "workers": 0}.items():
            whole_number(getattr(self, name), f"{name} is a whole number", low, "collections", _MOST)
        if isinstance(self.save_every, bool) or not isinstance(self.save_every, (int, float)) or not self.save_every >= 0:
            raise InputError(f"save_every is a number of seconds, not {self.save_every!r}", topic="collections")
        given = [self.normalized] if isinstance(self.normalized, str) else self.normalized
        wrong = given if not isinstance(given, Sequence) else [one for one in given if one not in QUANTITIES]
        if wrong or not isinstance(given, Sequence) or isinstance(self.normalized, str):
            raise InputError(
                f"normalize is a list of {' and '.join(map(repr, QUANTITIES))}, or of one or none, not {self.normalized!r}",
                topic="collections",
            )
        if isinstance(self.dataset, DataLoader):
            raise InputTypeError(
                "collect loads its own batches: pass loader.dataset, batch_size= and workers=", topic="collections"
            )
        if is_frame(self.dataset):
            raise InputTypeError(
                "collect takes samples as the module does, not a DataFrame: give it its rows, such as "
                "torch.tensor(frame.to_numpy())",
                topic="collections",
            )
        if isinstance(self.dataset, (str, Mapping)) or not (is_indexed(self.dataset) or isinstance(self.dataset, Iterable)):
            raise InputTypeError(
                f"a dataset is a sequence or an iterable of samples, not {type(self.dataset).__name__}", topic="collections"
            )
        if self.workers:
            self.check_numbered("workers= need")

    def check_numbered(self, what: str) -> None:
        """Raise `InputTypeError` unless samples are found by their numbers. `what`: needs it."""
        if not is_indexed(self.dataset):
            raise InputTypeError(
                f"{what} a dataset with a length and indices, which {type(self.dataset).__name__} does not have",
                topic="collections",
            )

    def _check_continued(self, found: Collection, path: Any) -> None:
        """Raise `InputError` unless a collection has the same facts, and the dataset the samples that it was made of."""
        kinds = {name: layer.kind for name, layer in found.facts.layers.items()}
        wanted = {name: kinds.get(name) if kind is None else kind.__name__ for name, kind in self.layers.items()}
        ours = {**asdict(self._facts({}, found.facts.labels)), "layers": list(wanted.items())}
        check_same_run(path, ours, {**asdict(found.facts), "layers": list(kinds.items())})
        self._selection().check(found.known)

    def _selection(self) -> SampleSelection:
        names = self.module.argument_names
        make = partial(tensors_of_graph, names=names) if self.are_graphs else None
        return SampleSelection(self.dataset, Preparation(names, make=make), self.workers)

    def _facts(self, layers: dict[str, Layer], labels: bool = False) -> CollectionFacts:
        plain, chosen = as_plain(self.question.target), self.question.output
        target = plain if isinstance(plain, (str, int)) else fingerprint_of_value(plain)
        output = fingerprint_of_value(chosen) if callable(chosen) else repr(chosen)
        model = fingerprint_of_module(self.module)
        return CollectionFacts(
            model, target, output, self.top, self.top_by_class, tuple(sorted(self.normalized)), layers, labels
        )

    # --- scores --------------------------------------------------------------------------------------------------------------

    def computed(self, inputs: Any, labels: Sequence[int | None]) -> Computation:
        """Values and relevance of the layers for a batch."""
        target, output = self.question.target.of_labels(labels), reported(self.question.output, "output")
        if self.are_graphs:
            return self._of_graph({name: one[0] for name, one in inputs.items()}, target, output)
        question = replace(self.question, target=ReportedTarget(target), output=output)
        return Computation(self.explain_model, on_device_of(self.module, inputs), question)

    def _of_graph(self, tensors: dict[str, torch.Tensor], target: Target, output: OutputSelector) -> Computation:
        """The same for one graph, whose nodes or edges are the positions of its values."""
        inputs = inputs_of_graph(self.module, tensors)
        asked = question_of_graph(self.explain_model, self.module, inputs, [target], output, None)
        question = replace(self.question, target=ReportedTarget(asked.targets[0]), output=asked.output)
        found = Computation(self.explain_model, inputs, question)
        found.values = {name: value[None] for name, value in found.values.items()}
        found.layers = {name: relevance[None] for name, relevance in found.layers.items()}
        if asked.node is not None:
            found.output = found.output[:, asked.node]
        return found

    def facts_of(self, computed: Computation, labels: bool) -> CollectionFacts:
        """The facts of a collection of layers whose values are like these. `labels`: whether the samples have some."""
        layers = {}
        for name, kind in self.layers.items():
            value = computed.values[name]
            of_graphs = Feature if self.are_graphs else None  # rows of nodes or edges, with features behind
            found = kind_of(self.module, name, tuple(value.shape), kind or of_graphs)
            layers[name] = Layer(found.__name__, value.shape[found.dimension], value.ndim - 2)
        return self._facts(layers, labels)

    def scored(
        self, facts: CollectionFacts, computed: Computation, samples: Sequence[Sample]
    ) -> tuple["_Scored | None", dict[int, str]]:
        """The scores of the samples of a batch whose values are finite, if any, and the reasons of the others, by number.

        Errors: `InputError` if the values have another form than those before.
        """
        values: dict[tuple[str, str], torch.Tensor] = {}
        reasons: dict[int, str] = {}
        for name, layer in facts.layers.items():
            _check_form(name, layer, computed.values[name], len(samples))
            for quantity, value in (("activation", computed.values[name]), ("relevance", computed.layers[name])):
                values[name, quantity] = value
                for place in (~torch.isfinite(value.flatten(1)).all(1)).nonzero()[:, 0].tolist():
                    reasons.setdefault(samples[place].number, f"the {quantity} of {name} is not finite")
        kept = [place for place, sample in enumerate(samples) if sample.number not in reasons]
        if not kept:
            return None, reasons
        numbers, labels = ([getattr(samples[place], name) for place in kept] for name in ("number", "label"))
        classes = {"all": np.full(len(kept), ALL)}
        if self.top_by_class and has_classes(computed.output):
            classes["predicted"] = largest_classes(computed.output).cpu().numpy()[kept]
        if self.top_by_class and facts.labels:
            classes["true"] = np.array(labels)
        scores, positions = {}, {}
        for (name, quantity), value in values.items():
            finite = value[kept] if reasons else value
            reduced, positions[name, quantity] = scores_of(facts.layers[name], finite, quantity in self.normalized)
            scores.update({(name, quantity, reduction): one for reduction, one in reduced.items()})
        known = [samples[place].known for place in kept]
        return _Scored(np.array(numbers, dtype=np.int64), known, classes, scores, positions), reasons


@dataclass
class _Pending:
    """Samples that have scores, or have failed, and are in no collection yet.

    `facts`: None until a sample can be explained. `refused`: how many samples were loaded until then, and could not be.
    `refusal`: the error of the first of them.
    """

    collector: _Collector
    facts: CollectionFacts | None
    scored: list["_Scored"] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    refused: int = 0
    refusal: InputError | None = None

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.errors) + sum(len(one.numbers) for one in self.scored)

    def taken(self) -> Iterator[Collection]:
        """A collection of the samples, which are no longer pending; none without samples or before one can be explained."""
        if self.facts is None or not self.count:
            return
        found = _collection_of(self.facts, self.scored, dict(sorted(self.errors.items())))
        self.scored, self.errors = [], {}
        yield found

    def add(self, batch: SampleBatch) -> None:
        """Compute the scores of a batch's samples.

        Errors: `InputError` if it is one of the settings: none of the first samples can be explained.
        """
        self.errors |= {one.number: one.problem for one in batch.samples if one.problem is not None}
        for group in batch.groups:
            self._add(group, batch)

    def check(self) -> None:
        """Raise the first `InputError` if there were samples, and none could be explained."""
        if self.facts is None and self.errors:
            raise self.refusal or none_loaded(*next(iter(self.errors.items())))

    def _add(self, group: SampleGroup, batch: SampleBatch) -> None:
        """Compute the scores of a group of a batch's samples. What fails for several is tried again with half of them."""
        if self.collector.are_graphs and len(group.places) > 1:
            for half in group.halves():
                self._add(half, batch)
            return
        samples = [batch.samples[place] for place in group.places]
        labels = [sample.label for sample in samples]
        are_labelled = labels[0] is not None if self.facts is None else self.facts.labels
        for sample in samples:
            if (sample.label is not None) != are_labelled:
                raise InputError(f"sample {sample.number}: some samples have labels and others have none", topic="samples")
        try:
            computed = self.collector.computed(group.inputs, labels)
        except InputError as error:
            if len(samples) == 1:
                self._fail({samples[0].number: error})
            for half in group.halves() if len(samples) > 1 else ():
                self._add(half, batch)
            return
        try:
            facts = self.facts or self.collector.facts_of(computed, are_labelled)
            scored, reasons = self.collector.scored(facts, computed, samples)
        except InputError as error:
            self._fail({sample.number: error for sample in samples})
            return
        if scored is not None:
            self.facts = facts
            self.scored.append(scored)
        self._fail({number: InputError(reason, topic="values-not-finite") for number, reason in reasons.items()})

    def _fail(self, errors: Mapping[int, InputError]) -> None:
        self.errors |= {number: str(error) for number, error in errors.items()}
        if self.facts is None:
            self.refused += len(errors)
            self.refusal = self.refusal or next(iter(errors.values()), None)
            if self.refusal is not None and self.refused >= PATIENCE:
                raise self.refusal


@dataclass(frozen=True)
class _Scored:
    """The scores of some samples."""

    numbers: NDArray[np.int64]
    known: list[KnownSample]  # of each sample
    classes: dict[str, NDArray[np.int64]]  # of each sample, by grouping
    scores: dict[tuple[str, str, str], NDArray[np.float64]]  # by layer, quantity and reduction: (samples, channels)
    positions: dict[tuple[str, str], NDArray[np.int32]]  # by layer and quantity: (samples, channels, dimensions)


def _is_done(before: Collection | None, number: int) -> bool:
    """Whether a sample was explained before, or has failed."""
    return before is not None and (before.has(number) or number in before.errors)


def _collection_of(facts: CollectionFacts, parts: Sequence[_Scored], errors: dict[int, str]) -> Collection:
    """A collection of the samples of all parts, and of those that have failed."""
    if not parts:
        return Collection(facts, {}, errors=errors)
    numbers = np.concatenate([one.numbers for one in parts])
    classes = {grouping: np.concatenate([one.classes[grouping] for one in parts]) for grouping in parts[0].classes}
    positions = {key: np.concatenate([one.positions[key] for one in parts]) for key in parts[0].positions}
    rankings: dict[Key, dict[int, Ranking]] = {}
    for name, quantity, reduction in parts[0].scores:
        scores = np.concatenate([one.scores[name, quantity, reduction] for one in parts])
        layer = facts.layers[name]
        for grouping, of_samples in classes.items():
            places = facts.top if grouping == "all" else facts.top_by_class
            empty = Ranking.empty(places, layer.channels, layer.dimensions)
            groups = rankings[name, quantity, reduction, grouping] = {}
            for group in np.unique(of_samples).tolist():
                chosen = of_samples == group
                groups[group] = empty.with_samples(scores[chosen], numbers[chosen], positions[name, quantity][chosen])
    known = KnownSamples.of(numbers.tolist(), [one for part in parts for one in part.known])
    return Collection(facts, rankings, known, errors)


def _check_form(name: str, layer: Layer, value: torch.Tensor, count: int) -> None:
    """Raise `InputError` for values without a dimension for samples in front, or of another form than those before."""
    if value.shape[:1] != (count,):
        raise InputError(
            f"the values of {name} have the shape {tuple(value.shape)}, without a dimension for the {count} samples of the "
            "batch in front",
            topic="collections",
        )
    if value.ndim != layer.dimensions + 2 or value.shape[KINDS[layer.kind].dimension] != layer.channels:
        raise InputError(
            f"the values of {name} have the shape {tuple(value.shape)}, but {layer.channels} channels for the samples before",
            topic="collections",
        )


def scores_of(layer: Layer, values: torch.Tensor, normalized: bool) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.int32]]:
    """The scores by reduction, (samples, channels), and the positions of the largest entries, (.., .., dimensions)."""
    flat = by_channel(values, KINDS[layer.kind])
    places = flat.argmax(2)
    reduced = {"max": flat.gather(2, places[:, :, None])[:, :, 0], "sum": flat.sum(2)}
    if normalized:
        totals = {one: scores.abs().sum(1, keepdim=True) for one, scores in reduced.items()}
        reduced = {one: scores / totals[one].where(totals[one] > 0, 1.0) for one, scores in reduced.items()}
    positions = np.zeros((*places.shape, layer.dimensions), dtype=np.int32)
    if layer.dimensions:
        shape = values.movedim(KINDS[layer.kind].dimension, 1).shape[2:]
        positions[:] = np.stack(np.unravel_index(places.cpu().numpy(), shape), -1)
    return {one: scores.cpu().numpy() for one, scores in reduced.items()}, positions
