"""Explanations of a whole data set, written to a store as they come."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from lrpfx.attribution.computation import Computation
from lrpfx.attribution.conditions import Condition, places_of
from lrpfx.attribution.names import recorded_names, resolve_names
from lrpfx.attribution.targets import OutputSelector
from lrpfx.datasets.descriptions import described, difference
from lrpfx.datasets.explaining import (
    PREDICTED,
    TRUE,
    Explained,
    Explaining,
    Reduction,
    TargetOfSamples,
    as_copies,
    checked_reduction,
)
from lrpfx.datasets.layout import (
    ERROR,
    EXPLAINED,
    FAILED,
    KEY,
    LABEL,
    STATUS,
    TEXT_BYTES,
    Array,
    default_block,
    layouts_of,
    text_rows,
)
from lrpfx.datasets.preparing import UNKNOWN, Batch, Preparing, Sample, batched
from lrpfx.datasets.sources import Plan, source_of
from lrpfx.datasets.store import (
    BlockWriter,
    Manifest,
    create,
    opened_for_writing,
    progress_of,
    read_manifest,
    store_path,
    zarr_package,
)
from lrpfx.datasets.view import Attributions, open_store
from lrpfx.datasets.writing import WriterThread
from lrpfx.deploy.files import sole_writer
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxWarning, os_errors
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.explanation import index_of
from lrpfx.explanation.preprocessing import Preprocessing
from lrpfx.explanation.running import CompiledModel
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.runtime.fingerprint import fingerprint_of_module
from lrpfx.support.optional_packages import progress_counter
from lrpfx.version import __version__

#: How many samples may fail at the beginning before their errors count as one of the settings.
_PATIENCE = 32
_DTYPES = {"float32": torch.float32, "float16": torch.float32, "float64": torch.float64}
Progress = bool | Callable[[int, int | None], object]


def attribute(
    explainer: nn.Module | Explainer,
    data: Any,
    output: str | os.PathLike[str],
    *,
    target: TargetOfSamples | None = None,
    targets: Sequence[TargetOfSamples] | None = None,
    record: str | Sequence[str] | Mapping[str, Reduction] = (),
    conditions: Sequence[Condition] | None = None,
    reduce: Reduction = None,
    dtype: str = "float32",
    scores: int | None = None,
    select_output: OutputSelector = None,
    batch_size: int | None = None,
    block_size: int | None = None,
    workers: int | None = None,
    chunk_size: int | None = None,
    progress: Progress = False,
) -> Attributions:
    """Explain all samples of a data set, and write what is found to a store, which can be read meanwhile.

    Called again after it was stopped, even killed, it goes on where it was: no sample is missing then, and none is there twice.

    `explainer`: an explainable module, from `lrpfx.transform` and perhaps compiled by torch.compile, or an `lrpfx.Explainer` of
    a module, which also preprocesses photographs. `data`: a dataset or a DataLoader of torch, a sequence or another iterable of
    samples, or, for an `Explainer` with a preprocessing, a folder of photographs. A sample is a tensor without a dimension for
    batches, a pair of it and a label, or a dict of the model's arguments, with or without a label ("label", "labels" or "cls")
    and a name ("__key__", "key", "path" or "id"); in place of the tensor an `Explainer` takes a PIL image, an array or a path.
    An iterable gives the same samples in the same order each time. A DataLoader lends its dataset, workers, batch size and
    `collate_fn`, which is applied to each sample alone, so that results do not depend on batches; it does not shuffle. All
    samples have relevance of one shape: pad texts to one length, or reduce what differs.

    `output`: the path of the store, a Zarr 3 group; `lrpfx.datasets.open` reads it. `target`: what relevance is of, "predicted"
    for the class of the largest output (the default), "true" for the label, the index of a class (with an `Explainer` that
    knows categories also its name), or a function from the output to its relevance. `targets`: several of them for each sample.
    `record`: layers whose relevance is stored, as for `lrpfx.attribute`; a dict has the reduction of each. `conditions`: as for
    `lrpfx.attribute`. `reduce`: the reduction of the relevance of inputs. A reduction is None, "sum" over channels, or
    "channels", the sum over positions for each channel. `dtype`: of relevance in the store, "float32", "float64", or "float16"
    with a scale for each sample, which halves the size at an error of 0.02 %. `scores`: how many of the largest outputs are
    stored with their classes; by default the whole output. `select_output`: `output=` of `lrpfx.attribute`. `batch_size`: 32 by
    default. `block_size`: how many samples are written together, and lost at most if the run is killed; by default some 16 MiB,
    at most 2048. `workers`: processes that load samples. `chunk_size`: as for `lrpfx.attribute`. `progress`: whether to show a
    bar (needs tqdm), or a function of the number of samples that are done and that of all, or None.

    A sample that cannot be loaded, does not fit or has values that are not finite is in the store with the reason, and the run
    goes on. Errors: those of `lrpfx.attribute` if none of the first 32 samples can be explained; `InputError` if the store was
    begun with another model, other settings or other data, which says what differs, and if another run writes to it;
    `ArtefactError` if the store cannot be written or is damaged. What was written before an error is kept. An `LrpfxWarning` is
    issued if the maps of the first batch are implausible. Needs zarr.
    """
    zarr_package()
    asked = _Asked(target, targets, record, conditions, reduce, dtype, scores, select_output, chunk_size)
    path = store_path(output)
    batch = _count("batch_size", batch_size or _batch_size_of(explainer, data))
    block = None if block_size is None else _count("block_size", block_size)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise InputError(f"workers is a number of processes, not {workers!r}")
    with os_errors(ArtefactError, path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with sole_writer(path):
        run = _Run(explainer, data, path, asked, batch, block, workers)
        run.all_blocks(progress)
    return open_store(path)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InputError(f"{name} is a positive number of samples, not {value!r}")
    return int(value)


def _batch_size_of(explainer: Any, data: Any) -> Any:
    if isinstance(data, DataLoader) and data.batch_size is not None:
        return data.batch_size
    return explainer.batch_size if isinstance(explainer, Explainer) else 32


@dataclass(frozen=True)
class _Asked:
    """The settings as they were given."""

    target: TargetOfSamples | None
    targets: Sequence[TargetOfSamples] | None
    record: str | Sequence[str] | Mapping[str, Reduction]
    conditions: Sequence[Condition] | None
    reduce: Reduction
    dtype: str
    scores: int | None
    output: OutputSelector
    chunk_size: int | None

    def of_samples(self, categories: Sequence[str] | None) -> tuple[TargetOfSamples, ...]:
        """The targets of each sample, names of classes replaced by indices."""
        if self.target is not None and self.targets is not None:
            raise InputError("target= is one target for each sample, targets= are several for each; pass one of them")
        several = self.targets
        if several is not None and (not isinstance(several, Sequence) or isinstance(several, str) or not several):
            raise InputTypeError(f"targets are several, such as ['predicted', 'true'], not {several!r}")
        found = [PREDICTED if self.target is None else self.target] if several is None else list(several)
        return tuple(_checked_target(one, categories) for one in found)

    def recorded(self, module: ExplainModule, others: Sequence[str]) -> dict[str, Reduction]:
        """The reduction of each recorded layer. `others`: further layers, whose relevance is not reduced."""
        given = self.record
        wanted: dict[str, Reduction] = dict.fromkeys(others)
        if isinstance(given, Mapping):
            wanted |= given
        else:
            wanted |= dict.fromkeys(recorded_names(module.unfused_graph, given))
        found: dict[str, Reduction] = {}
        for pattern, reduction in wanted.items():
            names = recorded_names(module.unfused_graph, [pattern])
            resolve_names(module.unfused_graph, names)
            found |= dict.fromkeys(names, checked_reduction(f"record[{pattern!r}]", reduction))
        return found


def _checked_target(target: Any, categories: Sequence[str] | None) -> TargetOfSamples:
    if isinstance(target, str) and target in (PREDICTED, TRUE):
        return target
    if isinstance(target, str):
        if categories is None:
            raise InputError(
                f'target is "{PREDICTED}", "{TRUE}", the index of a class or a function of the output, not {target!r}; names '
                "of classes need an lrpfx.Explainer with categories="
            )
        return index_of(target, categories, len(categories))
    if callable(target) and not isinstance(target, torch.Tensor):
        found: TargetOfSamples = target
        return found
    if isinstance(target, bool) or not isinstance(target, (int, np.integer)):
        raise InputTypeError(
            f'the target of samples is "{PREDICTED}", "{TRUE}", the index of a class or a function from the output to its '
            f"relevance, not {type(target).__name__}"
        )
    return int(target)


class _Run:
    """One run over a data set."""

    def __init__(
        self,
        explainer: Any,
        data: Any,
        path: Path,
        asked: _Asked,
        batch_size: int,
        block_size: int | None,
        workers: int | None,
    ) -> None:
        self.path = path
        self.batch_size = batch_size
        self.block_size = block_size
        if asked.dtype not in _DTYPES:
            raise InputError(f"dtype is {', '.join(map(repr, _DTYPES))}, not {asked.dtype!r}")
        if asked.scores is not None:
            _count("scores", asked.scores)
        checked_reduction("reduce", asked.reduce)
        self.asked = asked
        self._has_objected = False
        self.explainer = explainer
        self.preprocess = _preprocessing(explainer)
        self.categories = explainer.categories if isinstance(explainer, Explainer) else None
        if isinstance(explainer, Explainer):
            self.source = source_of(data, Preparing((), self.preprocess), workers)
            self._compile(explainer)
        else:
            module = explainable(explainer, "lrpfx.datasets.attribute")
            self.source = source_of(data, Preparing(module.argument_names), workers)
            self.explaining = self._explaining(explainer, False, asked.output, ())

    # --- what is asked -------------------------------------------------------------------------------------------------------

    def _compile(self, explainer: Explainer) -> None:
        """Have the explainer compile its model, for the first sample that can be loaded."""
        sample = next((one for one in self.source.first(_PATIENCE) if one.problem is None), None)
        if sample is None:
            raise self._none_could_be_explained()
        (group,) = batched(0, [sample]).groups
        compiled = explainer.compiled_for(group.inputs)
        if not isinstance(compiled, CompiledModel):
            raise InputTypeError("an exported program is run by its runner: pass an explainer of the model that it was made of")
        output = explainer.output if self.asked.output is None else self.asked.output
        self.explaining = self._explaining(compiled.module, True, output, explainer.record)

    def _explaining(self, module: nn.Module, is_cast: bool, output: OutputSelector, record: Sequence[str]) -> Explaining:
        asked = self.asked
        inner = explainable(module, "lrpfx.datasets.attribute")
        if asked.conditions is not None:
            places_of(inner.unfused_graph, asked.conditions)
        return Explaining(
            module,
            inner,
            asked.of_samples(self.categories),
            asked.targets is not None,
            asked.conditions,
            asked.recorded(inner, record),
            asked.reduce,
            output,
            asked.scores,
            _DTYPES[asked.dtype],
            is_cast,
            asked.chunk_size,
        )

    def _facts(self) -> dict[str, Any]:
        """What another run must have in common with this one to go on with its store, as plain data."""
        explaining, asked = self.explaining, self.asked
        targets = described(explaining.targets)
        return {
            "versions": {"lrpfx": __version__, "torch": torch.__version__, "zarr": zarr_package().__version__},
            "model": fingerprint_of_module(explaining.module),
            "composite": explaining.module.composite,
            "settings": {
                "targets": targets if explaining.has_several else targets[0],
                "conditions": described(asked.conditions),
                "record": dict(explaining.record),
                "reduce": asked.reduce,
                "dtype": asked.dtype,
                "scores": asked.scores,
                "output": described(explaining.output),
            },
            "categories": None if self.categories is None else list(self.categories),
            "data": self.source.identity(),
        }

    # --- the store -----------------------------------------------------------------------------------------------------------

    def _opened(self) -> BlockWriter:
        """The store, as a former run left it or new."""
        facts = self._facts()
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            manifest = self._begun(facts)
            create(self.path, manifest)
            return BlockWriter(self.path, manifest, is_resumed=False)
        if not self.path.is_dir():
            raise ArtefactError(f"{self.path} is a file; the output is a folder")
        manifest = read_manifest(self.path)
        self._compare(facts, manifest)
        return opened_for_writing(self.path, manifest)

    def _compare(self, facts: Mapping[str, Any], manifest: Manifest) -> None:
        """Raise `InputError` unless the store was begun with the same model, settings and data."""
        found = []
        if facts["model"] != manifest.facts["model"]:
            same = facts["composite"] == manifest.facts["composite"]
            found.append("the model, its weights or its rules" if same else f"the composite ({manifest.facts['composite']})")
        for name in ("versions", "settings", "data"):
            ours, theirs = dict(facts[name]), dict(manifest.facts[name])
            for one in (ours, theirs):  # another release of zarr writes the same
                one.pop("zarr", None)
            found += difference(ours, theirs)
        if facts["categories"] != manifest.facts.get("categories"):
            found.append("the categories")
        if self.block_size is not None and self.block_size != manifest.block:
            found.append(f"block_size (it was {manifest.block}, and is {self.block_size} now)")
        if found:
            raise InputError(f"{self.path} was begun with other {'; '.join(found)}: give another output, or remove it")

    def _begun(self, facts: Mapping[str, Any]) -> Manifest:
        """The manifest of a new store, whose arrays are as the first sample that can be explained needs them."""
        rows = self._first_rows()
        narrow = self.explaining.of_relevance(rows) if self.asked.dtype == "float16" else []
        layouts = layouts_of(rows, self.explaining.dimensions(rows), narrow)
        block = self.block_size or default_block(layouts, self.batch_size)
        return Manifest(dict(facts), layouts, block, self.source.length)

    def _first_rows(self) -> dict[str, Array]:
        compiled = self.explaining.explain_model is not self.explaining.module
        error: InputError | None = None
        for sample in self.source.first(_PATIENCE):
            for group in batched(0, [sample]).groups:
                copies = self.batch_size if compiled else 1  # not to compile for a batch of one
                try:
                    found = self.explaining.computed(as_copies(group.inputs, copies), [sample.label] * copies)
                    rows, problems = self.explaining.rows(found, copies)
                except InputError as one:
                    error = error or one
                    continue
                if not problems:
                    return rows
                error = error or InputError(f"sample {sample.number}: {problems[0]}")
        raise error or self._none_could_be_explained()

    def _none_could_be_explained(self) -> InputError:
        samples = [batched(0, [one]).samples[0] for one in self.source.first(_PATIENCE)]
        if not samples:
            return InputError("the data set is empty")
        return InputError(
            f"none of the first {len(samples)} samples can be loaded; sample {samples[0].number}: {samples[0].problem}"
        )

    # --- the work ------------------------------------------------------------------------------------------------------------

    def all_blocks(self, progress: Progress) -> None:
        """Explain and write all blocks that are not done."""
        writer = self._opened()
        counts, digests = progress_of(self.path, writer.manifest, writer.arrays)
        plan = Plan(writer.manifest.block, self.batch_size, counts, digests)
        total, before = writer.manifest.samples, sum(counts)
        if total is not None and before == total and self.source.length is None:
            return  # a stream that was read to its end
        shown = progress is True
        with progress_counter(shown, "explaining", "sample", total, before) as advance, WriterThread(writer) as thread:
            done, rows = before, None
            for batch in self.source.batches(plan):
                if rows is not None and rows.block != batch.block:
                    thread.write(rows.block, rows.arrays, rows.digest)
                    rows = None
                rows = rows or _Rows(batch.block, writer.empty(batch.block))
                rows.add(batch, self._explained(batch))
                done += len(batch.samples)
                advance(len(batch.samples))
                if callable(progress):
                    progress(done, total)
                if rows.is_full:  # at once: what comes next may be an error
                    thread.write(rows.block, rows.arrays, rows.digest)
                    rows = None
            if rows is not None:
                thread.write(rows.block, rows.arrays, rows.digest)
        if writer.manifest.samples is None:
            writer.finish(done)

    def _explained(self, batch: Batch) -> Iterator[Explained]:
        for group in batch.groups:
            yield from self.explaining.explained(group, batch.samples, self._object)

    def _object(self, found: Computation) -> None:
        """Warn if the first maps of the run are implausible."""
        if not self._has_objected:
            self._has_objected = True
            message = found.objection()
            if message is not None:
                warnings.warn(message, LrpfxWarning, stacklevel=7)


def _preprocessing(explainer: Any) -> Preprocessing | None:
    """The preprocessing of an explainer. `InputTypeError` for what is no explainer."""
    if not isinstance(explainer, Explainer):
        if not isinstance(explainer, nn.Module):
            raise InputTypeError(
                f"lrpfx.datasets.attribute takes an explainable module or an lrpfx.Explainer, not {type(explainer).__name__}"
            )
        return None
    if explainer.tokenizer is not None:
        raise InputTypeError(
            "data sets of texts are explained by the explainable module, with tokens that are padded to one length: "
            "tokenizer(text, padding='max_length')"
        )
    return explainer.preprocess


class _Rows:
    """The rows of a block, which fill up."""

    def __init__(self, block: int, arrays: dict[str, Array]) -> None:
        self.block = block
        self.arrays = arrays
        self.count = 0
        self.digest = UNKNOWN

    def add(self, batch: Batch, explained: Iterator[Explained]) -> None:
        """Add a batch, whose samples follow those before."""
        first = self.count
        problems = {place: sample.problem for place, sample in enumerate(batch.samples) if sample.problem is not None}
        for found in explained:
            problems |= found.problems
            if not found.places:
                continue
            wrong = self._misfit(found.rows)
            if wrong is not None:
                problems |= dict.fromkeys(found.places, wrong)
                continue
            whole = found.places == list(range(len(batch.samples)))
            places = slice(first, first + len(batch.samples)) if whole else first + np.array(found.places)
            for name, values in found.rows.items():
                self.arrays[name][places] = values
        self._describe(batch.samples, problems)
        self.digest = batch.digest if self.digest == UNKNOWN else self.digest

    @property
    def is_full(self) -> bool:
        """Whether all samples of the block are there."""
        return self.count == len(self.arrays[STATUS])

    def _misfit(self, rows: Mapping[str, Array]) -> str | None:
        """Why rows do not fit into the store, or None."""
        for name, array in self.arrays.items():
            if name in rows and rows[name].shape[1:] != array.shape[1:]:
                return (
                    f"{name} has the shape {rows[name].shape[1:]}, and {array.shape[1:]} in the store: all samples have one "
                    "shape, so pad texts to one length, and bring images to one size or reduce their relevance"
                )
        new = next((name for name in rows if name not in self.arrays), None)
        return None if new is None else f"the sample has {new}, and the first one had none"

    def _describe(self, samples: Sequence[Sample], problems: Mapping[int, str]) -> None:
        part = slice(self.count, self.count + len(samples))
        self.count += len(samples)
        self.arrays[STATUS][part] = EXPLAINED
        self.arrays[STATUS][[part.start + place for place in problems]] = FAILED
        self.arrays[LABEL][part] = [-1 if sample.label is None else sample.label for sample in samples]
        if problems:
            texts = [problems.get(place, "") for place in range(len(samples))]
            self._texts(ERROR)[part] = text_rows(texts, TEXT_BYTES[ERROR])
        if any(sample.key for sample in samples):
            self._texts(KEY)[part] = text_rows([_shortened(sample.key or "") for sample in samples], TEXT_BYTES[KEY])

    def _texts(self, name: str) -> Array:
        """The rows of an array of texts, which are made for the first text: most blocks have none."""
        if name not in self.arrays:
            self.arrays[name] = np.zeros((len(self.arrays[STATUS]), TEXT_BYTES[name]), dtype=np.uint8)
        return self.arrays[name]


def _shortened(key: str) -> str:
    """A key that has a place in the store; a long one ends in a hash of the whole."""
    content = key.encode("utf-8", "backslashreplace")
    if len(content) <= TEXT_BYTES[KEY]:
        return key
    ending = "..." + hashlib.sha256(content).hexdigest()[:32]
    return content[: TEXT_BYTES[KEY] - len(ending)].decode("utf-8", "ignore") + ending
