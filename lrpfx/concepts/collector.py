"""One pass over a dataset, which ranks its samples for each channel of some layers."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from lrpfx.request.channels import KINDS, Layers, by_channel, kind_of, named_layers
from lrpfx.request.conditions import Index
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.request.targets import TargetLike
from lrpfx.request.targets_of_samples import as_plain, as_target_of_samples
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.runtime.fingerprints import fingerprint_of_module
from lrpfx.samples.items import is_indexed
from lrpfx.samples.preparation import Preparation
from lrpfx.samples.selection import SampleSelection, SelectedBatch, numbers_of
from lrpfx.support.files import checked_path
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import progress_bar
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
    progress: bool = False,
) -> Collection:
    """The samples of a dataset with the largest activation and the largest relevance for each channel of some layers.

    Each sample is scored by the maximum and by the sum over the positions of a channel, of its activation and of its relevance
    (ActMax and RelMax [1]_), among all samples, among those of its predicted and among those of its true class.
    `lrpfx.concepts.gallery` shows what they have in common. What was collected until an error is in the file.

    Other arguments: as for `lrpfx.attribute`.

    Parameters
    ----------
    dataset
        A dataset of torch or any other sequence of samples, or something to iterate over, which gives the same samples in the
        same order each time. A sample is a tensor without a batch dimension, a pair of it and a label, or a dict of the model's
        arguments, with or without "label"; its number in the dataset names it.
    layers
        Names as for `record=`; a dict says what has the channels, such as `{"encoder.add": Feature}`.
    path
        A file (.npz). The collection is written there every `save_every` seconds and at the end, whole or not at all. If it
        exists already, what is in it is not computed again, and some of its samples are compared with those of the dataset. One
        process at a time writes to a file. Collections of different samples are merged by `merge`.
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
    progress
        Whether to show a bar (needs tqdm).

    Raises
    ------
    InputError
        The file is of another model, other settings or another dataset, a sample cannot be loaded, or a value is not finite.
        The errors of `lrpfx.attribute` are raised too.

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
    if path is None:
        return collector.collected(None, samples, chosen, progress)
    path, target_file = checked_path(path, (SUFFIX,))
    with sole_writer(target_file):
        return collector.collected(target_file, samples, chosen, progress)


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

    def collected(self, path: Path | None, samples: Iterable[int] | None, engine: Engine, progress: bool) -> Collection:
        """The collection in a file, with the samples that it does not have yet; it is saved now and then, and at the end."""
        found = before = Collection.load(path) if path is not None and path.exists() else None
        if before is not None:
            self._check_continued(before, path)
        parts: Iterable[Collection]
        if isinstance(engine, RayEngine):
            parts = self._shards(samples, before, engine, progress)
        else:
            parts = self.parts(samples, before, progress)
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
        if found is None or not found.count:
            raise InputError("there are no samples", topic="samples")
        return found

    def parts(self, samples: Iterable[int] | None, before: Collection | None, progress: bool) -> Iterator[Collection]:
        """Collections of some samples each, of those that are not in `before`. After an error, what precedes it comes first."""
        facts, probes = (None, {}) if before is None else (before.facts, before.probes)
        pending: list[_Scored] = []
        begun = time.monotonic()
        loaded = self._selection().batches(samples, lambda one: before is not None and before.has(one), self.batch_size, probes)
        try:
            for batch in progress_bar(loaded, progress, unit="batch"):
                computed = self._computed(batch)
                facts = facts or self._begun(computed, batch)
                pending.append(self._scored(facts, computed, batch))
                if sum(len(one.numbers) for one in pending) >= _TOGETHER or time.monotonic() - begun > self.save_every:
                    done, pending, begun = pending, [], time.monotonic()
                    yield _collection_of(facts, done)
        except (Exception, KeyboardInterrupt):
            if facts is not None and pending:
                yield _collection_of(facts, pending)
            raise
        if facts is not None and pending:
            yield _collection_of(facts, pending)

    def _shards(
        self, samples: Iterable[int] | None, before: Collection | None, engine: RayEngine, progress: bool
    ) -> Iterable[Collection]:
        """The same by the processes of Ray, each of which collects from some of the samples, in whole batches."""
        numbers = [one for one in numbers_of(self.dataset, samples) if before is None or not before.has(one)]
        size = -(-_TOGETHER // self.batch_size) * self.batch_size
        shards = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        done = engine.mapped(replace(self, workers=0).shard, shards)
        return progress_bar(done, progress, unit="shard", total=len(shards))

    def shard(self, numbers: Sequence[int]) -> Collection:
        """The collection of the samples with some numbers, made in another process."""
        return merge(self.parts(numbers, None, False))

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
        self._selection().check(found.probes)

    def _selection(self) -> SampleSelection:
        return SampleSelection(self.dataset, Preparation(self.module.argument_names), self.workers)

    def _facts(self, layers: dict[str, Layer], labels: bool = False) -> CollectionFacts:
        plain, chosen = as_plain(self.question.target), self.question.output
        target = plain if isinstance(plain, (str, int)) else fingerprint_of_value(plain)
        output = fingerprint_of_value(chosen) if callable(chosen) else repr(chosen)
        model = fingerprint_of_module(self.module)
        return CollectionFacts(
            model, target, output, self.top, self.top_by_class, tuple(sorted(self.normalized)), layers, labels
        )

    # --- scores --------------------------------------------------------------------------------------------------------------

    def _computed(self, batch: SelectedBatch) -> Computation:
        """Values and relevance of the layers for a batch."""
        target = self.question.target.of_labels([None] if batch.labels is None else batch.labels)
        inputs = on_device_of(self.module, batch.inputs)
        return Computation(self.explain_model, inputs, replace(self.question, target=target))

    def _begun(self, computed: Computation, batch: SelectedBatch) -> CollectionFacts:
        """The facts of a collection of layers whose values are like those of the batch."""
        layers = {}
        for name, kind in self.layers.items():
            value = computed.values[name]
            if len(value) != len(batch.numbers):
                raise InputError(
                    f"the values of {name} have the shape {tuple(value.shape)}, without a dimension for the "
                    f"{len(batch.numbers)} samples of the batch in front",
                    topic="collections",
                )
            found = kind_of(self.module, name, tuple(value.shape), kind)
            layers[name] = Layer(found.__name__, value.shape[found.dimension], value.ndim - 2)

        return self._facts(layers, batch.labels is not None)

    def _scored(self, facts: CollectionFacts, computed: Computation, batch: SelectedBatch) -> "_Scored":
        """The scores of a batch."""
        if facts.labels != (batch.labels is not None):
            raise InputError(f"sample {batch.numbers[0]}: some samples have labels and others have none", topic="samples")
        classes = {"all": np.full(len(batch.numbers), ALL)}
        if self.top_by_class and computed.output.ndim == 2:
            classes["predicted"] = computed.output.argmax(1).cpu().numpy()
        if self.top_by_class and batch.labels is not None:
            classes["true"] = np.array(batch.labels)
        scores, positions = {}, {}
        for name, layer in facts.layers.items():
            for quantity, values in (("activation", computed.values[name]), ("relevance", computed.layers[name])):
                _check_values(name, layer, quantity, values, batch)
                reduced, positions[name, quantity] = scores_of(layer, values, quantity in self.normalized)
                scores.update({(name, quantity, reduction): one for reduction, one in reduced.items()})
        return _Scored(np.array(batch.numbers, dtype=np.int64), batch.digest, classes, scores, positions)


@dataclass(frozen=True)
class _Scored:
    """The scores of some samples."""

    numbers: NDArray[np.int64]
    digest: int  # of the first sample
    classes: dict[str, NDArray[np.int64]]  # of each sample, by grouping
    scores: dict[tuple[str, str, str], NDArray[np.float64]]  # by layer, quantity and reduction: (samples, channels)
    positions: dict[tuple[str, str], NDArray[np.int32]]  # by layer and quantity: (samples, channels, dimensions)


def _collection_of(facts: CollectionFacts, parts: Sequence[_Scored]) -> Collection:
    """A collection of the samples of all parts."""
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
    return Collection(facts, rankings).with_samples(
        numbers.tolist(), rankings, {int(one.numbers[0]): one.digest for one in parts}
    )


def _check_values(name: str, layer: Layer, quantity: str, values: torch.Tensor, batch: SelectedBatch) -> None:
    """Raise `InputError` for values of another form than those before, and for values that are not finite."""
    if values.ndim != layer.dimensions + 2 or values.shape[KINDS[layer.kind].dimension] != layer.channels:
        raise InputError(
            f"the values of {name} have the shape {tuple(values.shape)} for sample {batch.numbers[0]}, but {layer.channels} "
            "channels for the samples before",
            topic="collections",
        )
    finite = torch.isfinite(values.flatten(1)).all(1)
    if not finite.all():
        number = batch.numbers[int((~finite).nonzero()[0])]
        raise InputError(f"the {quantity} of {name} is not finite for sample {number}", topic="values-not-finite")


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
