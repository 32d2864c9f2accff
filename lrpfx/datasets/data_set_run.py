"""Explanations of a whole data set, written to a store as they come."""

import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lrpfx.datasets.engines import Engine, Work
from lrpfx.datasets.graph_explainer import (
    GraphExplainer,
    GraphSizes,
    are_samples_graphs,
    check_settings_for_graphs,
    sizes_of,
)
from lrpfx.datasets.images_of_samples import stored_preprocessing
from lrpfx.datasets.layout import FEATURES, KEY, Array, default_block, layouts_of, names_of_relevance
from lrpfx.datasets.locations import Location, location_of, zarr_package
from lrpfx.datasets.ray_engine import engine_named
from lrpfx.datasets.sample_explainer import SampleExplainer, as_copies, question_of_samples, reductions_of
from lrpfx.datasets.store import (
    RUN,
    BlockWriter,
    Manifest,
    create,
    done_of,
    is_begun,
    opened_for_writing,
    read_manifest,
    without_failed,
)
from lrpfx.datasets.view import Attributions
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxWarning
from lrpfx.explanation.arrays import Reading, items_of_rows, sample_of_numbers, volume_of_sample
from lrpfx.explanation.compiled import CompiledModel
from lrpfx.explanation.detections import arguments_of
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.graphs import inputs_of_graph, tensors_of_graph, with_edges
from lrpfx.images import nifti
from lrpfx.images.preprocessing import Preprocessing
from lrpfx.request.boxes import as_box
from lrpfx.request.conditions import Condition, places_of
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.request.reduction import OF_NUMBERS, Reduction, checked_reduction
from lrpfx.request.targets import TargetLike
from lrpfx.request.targets_of_samples import as_plain
from lrpfx.runtime.explain_module import explainable
from lrpfx.runtime.fingerprints import fingerprint_of_module
from lrpfx.samples.failures import PATIENCE, none_loaded, warning_of_failures
from lrpfx.samples.plan import BlockPlan
from lrpfx.samples.preparation import Preparation, Sample, batched
from lrpfx.samples.sources import changed, source_of
from lrpfx.support.identity.descriptions import described
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import is_frame, progress_counter
from lrpfx.support.runs import check_same_run
from lrpfx.support.torch_internals import pytree

#: What is known of a data set that may differ if its samples do not: a folder was copied, or a broken file was mended.
_COMPARED_BY_SAMPLE = ("sizes", "times")
#: Samples among which a run that goes on looks for one that can be explained.
_TRIED = 4 * PATIENCE
_DTYPES = {"float32": torch.float32, "float16": torch.float32, "float64": torch.float64}
Progress = bool | Callable[[int, int | None], object]


def attribute(
    explainer: nn.Module | Explainer[Any],
    data: Any,
    output: str | os.PathLike[str],
    *,
    target: TargetLike = None,
    targets: Sequence[TargetLike] | None = None,
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
    engine: str | Engine = "embedded",
    storage_options: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    progress: Progress = False,
) -> Attributions:
    """Explain all samples of a data set, and write what is found to a store, which can be read meanwhile.

    Called again after it was stopped, even killed, it goes on where it was: no sample is missing then, and none is there twice.
    The samples that are there already are compared with those of the data set: all that are read anyway, which are all of a
    stream, and 256 others at random, or all of a folder if its files have other sizes or times. A sample that cannot be loaded,
    does not fit or has values that are not finite is in the store with the reason, and the run goes on. What was written before
    an error is kept, and on a local disk also after a power failure. Needs zarr.

    Other arguments: as for `lrpfx.attribute`.

    Parameters
    ----------
    explainer
        An explainable module, from `lrpfx.transform` and perhaps compiled by torch.compile, or an `lrpfx.Explainer` of a
        module, which also preprocesses images.
    data
        A dataset or a DataLoader of torch, a sequence or another iterable of samples, or, for an `Explainer`, a DataFrame of a
        table or, with a preprocessing, a folder of images. A sample is a tensor without a dimension for batches, a pair of it
        and a label, or a dict of the model's arguments, with or without a label ("label", "labels" or "cls") and a name
        ("__key__", "key", "path" or "id"); in place of the tensor an `Explainer` takes a PIL image, an array or a path. An
        iterable gives the same samples in the same order each time. A DataLoader lends its dataset, workers, batch size and
        `collate_fn`, which is applied to each sample alone, so that results do not depend on batches; it does not shuffle. All
        samples have relevance of one shape: pad texts to one length, or reduce what differs. Graphs, as an `Explainer` takes
        them, are filled with 0 to the nodes and edges of the largest; they are a list or a dataset with a length, which is read
        once before. Without another label, theirs is `y`, if that is one integer.
    output
        The path of the store, a Zarr 3 group; `lrpfx.datasets.open` reads it. A path with a scheme, such as
        "s3://bucket/store", is for fsspec. One that is complete may lie where nothing can be written.
    target
        What relevance is of: "predicted" for the class of the largest output (the default), "true" for the label, or a target
        of `lrpfx.attribute` that holds for every sample. With an `Explainer` that knows categories, classes may have names. For
        graphs whose model returns an output for each node it is (node, class).
    targets
        Several of them for each sample.
    record
        Layers whose relevance is stored, as for `lrpfx.attribute`; a dict has the reduction of each.
    reduce
        The reduction of the relevance of inputs. A reduction is None, "sum" over channels, "absolute", the sum of
        magnitudes over channels, or "channels", the sum over positions for each channel.
    dtype
        Of relevance in the store, "float32", "float64", or "float16" for float32 that is rounded to the precision of float16,
        which halves the size at an error of 0.02 %.
    scores
        How many of the largest outputs are stored with their classes; by default the whole output.
    select_output
        As `output` of `lrpfx.attribute`.
    batch_size
        How many samples run together, 32 by default.
    block_size
        How many samples are written together, and lost at most if the run is killed; by default some 16 MiB of the store or 64
        MiB of inputs, at most 4096.
    workers
        Processes that load samples.
    engine
        "embedded" for this process, "ray" for the processes and machines of Ray, or a `RayEngine` that says how many; the store
        is the same.
    storage_options
        For the file system of a path with a scheme.
    retry_failed
        Whether to try samples again that failed in a former run. Their blocks are explained anew.
    progress
        Whether to show a bar (needs tqdm), or a function of the number of samples that are done and that of all, or None.

    Raises
    ------
    InputError
        The store was begun with another model, other settings or other data, which the error says, or another run writes to it.
        No sample can be loaded. The errors of `lrpfx.attribute` are raised if none of the first 32 that are loaded can be
        explained.
    ArtefactError
        The store cannot be written or is damaged.

    Warns
    -----
    LrpfxWarning
        The maps of the first batch are implausible, or samples in the store have failed: their number, and the first reason.
    """
    zarr_package()
    question = Question(target, targets, conditions, output=select_output, chunk_size=chunk_size)
    if isinstance(data, (str, bytes)) and not data:
        raise InputError("the path of the data is empty")
    location = location_of(output, storage_options)
    batch = whole_number(_batch_size_of(explainer, data) if batch_size is None else batch_size, "batch_size is a number", 1)
    block = None if block_size is None else whole_number(block_size, "block_size is a number", 1)
    for name, number, least in (("workers", workers, 0), ("scores", scores, 1)):
        if number is not None:
            whole_number(number, f"{name} is a number", least)
    chosen = engine_named(engine)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise InputError(f"dtype is {', '.join(map(repr, _DTYPES))}, not {dtype!r}")
    stored = _Stored(record, checked_reduction("reduce", reduce, OF_NUMBERS), dtype, scores)
    with location.sole_writer():
        run = _Run(explainer, data, location, question, stored, batch, block, workers, chosen)
        run.all_blocks(progress, retry_failed)
    found = Attributions(location)
    if errors := found.errors:
        key = found[KEY][next(iter(errors))]
        warnings.warn(warning_of_failures(errors, len(found), "view", key), stacklevel=2)
    return found


def _batch_size_of(explainer: Any, data: Any) -> Any:
    if isinstance(data, DataLoader) and data.batch_size is not None:
        return data.batch_size
    return explainer.batch_size if isinstance(explainer, Explainer) else 32


@dataclass(frozen=True)
class _Stored:
    """What of the answers is stored: arguments of `attribute`."""

    record: str | Sequence[str] | Mapping[str, Reduction]
    reduce: Reduction
    dtype: str
    scores: int | None


class _Run:
    """One run over a data set."""

    def __init__(
        self,
        explainer: Any,
        data: Any,
        location: Location,
        question: Question,
        stored: _Stored,
        batch_size: int,
        block_size: int | None,
        workers: int | None,
        engine: Engine,
    ) -> None:
        self.location = location
        self.engine = engine
        self.batch_size = batch_size
        self.block_size = block_size
        self.stored = stored
        preprocess, is_own = _preprocessing(explainer), isinstance(explainer, Explainer)
        self.features: tuple[str, ...] | None = None  # of a DataFrame
        if is_frame(data):
            if not is_own:
                raise InputTypeError("a DataFrame is for an lrpfx.Explainer: an explainable module takes tensors of its rows")
            rows = explainer.rows_of(data)
            data, preprocess, self.features = items_of_rows(rows), None, rows.features
        make: Callable[[Any], Any] | None = None
        names = explainer.argument_names if is_own else explainable(explainer, "lrpfx.datasets.attribute").argument_names
        are_graphs = are_samples_graphs(data, names, is_compiled=not is_own)
        if are_graphs:
            check_settings_for_graphs(stored.record, explainer.record if is_own else (), stored.reduce)
            if is_own:
                explainer.take_graphs()
                names = explainer.argument_names  # none if the model takes the object
            make = partial(tensors_of_graph, names=names)
        elif is_own and explainer.reading.form == "volume":
            data = nifti.files_in(data) or data
            make, preprocess = partial(volume_of_sample, preprocess=None if preprocess is None else preprocess.function), None
        elif preprocess is not None and explainer.reading != Reading():
            make = partial(sample_of_numbers, reading=explainer.reading, preprocess=preprocess.function)
            preprocess = None
        self.preprocess = preprocess
        self.categories = explainer.categories if is_own else None
        self.source = source_of(data, Preparation(names, preprocess, make=make), workers, self.categories)
        engine.check(self.source)
        sizes = self._sizes() if are_graphs else None
        fixed: dict[str, Any] = {}
        module, adds_channel, others = explainer, False, explainer.record if is_own else ()
        if is_own and sizes is not None:
            module, fixed = self._compiled_for_graphs(explainer, sizes)
        elif is_own:
            module, adds_channel = self._compiled(explainer)
        if is_own and question.output is None:
            question = replace(question, output=explainer.output)
        if is_own:
            question = replace(question, reference=explainer.reference)
        kind = SampleExplainer if sizes is None else partial(GraphExplainer, sizes=sizes, fixed=fixed)
        self.explainer = self._sample_explainer(kind, module, question, is_own, others)
        if is_own and explainer.heads is not None:
            asked = _of_boxes(self.explainer.question, preprocess is not None)
            self.explainer = replace(self.explainer, question=asked, arguments_of=partial(arguments_of, explainer.heads))
        self.explainer = replace(self.explainer, is_of_features=self.features is not None, adds_channel=adds_channel)

    def _sizes(self) -> GraphSizes:
        """The sizes of the largest graphs, for which all samples are read once."""
        found = sizes_of(self.source.in_order())
        if found is None:
            raise self._none_could_be_loaded()
        return found

    def _compiled_for_graphs(self, explainer: Explainer[Any], sizes: GraphSizes) -> tuple[nn.Module, dict[str, Any]]:
        """The model as the explainer compiles it for a large graph, and its arguments that are no tensors."""
        inputs = inputs_of_graph(explainer.take_graphs(), sizes.example)
        compiled = explainer.compiled_for(with_edges(inputs))
        assert isinstance(compiled, CompiledModel)
        return compiled.module, {name: one for name, one in inputs.items() if not isinstance(one, torch.Tensor)}

    def _compiled(self, explainer: Explainer[Any]) -> tuple[nn.Module, bool]:
        """The model as the explainer compiles it for the first sample that can be loaded; whether waves need a channel."""
        group = next((group for one in self.source.in_order() for group in batched(0, [one]).groups), None)
        if group is None:
            raise self._none_could_be_loaded()
        inputs = explainer.with_channel(group.inputs)
        compiled = explainer.compiled_for(inputs)
        if not isinstance(compiled, CompiledModel):
            raise InputTypeError("an exported program is run by its runner: pass an explainer of the model that it was made of")
        (wave, *_), (given, *_) = (pytree.tree_leaves(one) for one in (inputs, group.inputs))
        return compiled.module, isinstance(wave, torch.Tensor) and wave.ndim > given.ndim

    def _sample_explainer(
        self,
        kind: Callable[..., SampleExplainer],
        module: nn.Module,
        question: Question,
        is_cast: bool,
        others: Sequence[str],
    ) -> SampleExplainer:
        inner = explainable(module, "lrpfx.datasets.attribute")
        if question.conditions is not None:
            places_of(inner.unfused_graph, question.conditions)
        reductions = reductions_of(self.stored.record, inner, others)
        question = replace(question_of_samples(question, self.categories), record=tuple(reductions))
        dtype = _DTYPES[self.stored.dtype]
        return kind(module, inner, question, reductions, self.stored.reduce, self.stored.scores, dtype, is_cast)

    def _facts(self) -> dict[str, Any]:
        """What another run must have in common with this one to go on with its store, as plain data."""
        question, module = self.explainer.question, self.explainer.module
        several = None if question.targets is None else described([as_plain(one) for one in question.targets])
        return {
            "versions": {"lrpfx": version("lrpfx"), "torch": torch.__version__, "zarr": zarr_package().__version__},
            "model": fingerprint_of_module(module),
            "composite": module.composite,
            "settings": {
                "targets": described(as_plain(question.target)) if several is None else several,
                "conditions": described(question.conditions),
                "record": dict(self.explainer.reductions),
                "reduce": self.stored.reduce,
                "dtype": self.stored.dtype,
                "scores": self.stored.scores,
                "output": described(question.output),
                **({} if question.reference is None else {"reference": described(question.reference)}),
            },
            "categories": None if self.categories is None else list(self.categories),
            "preprocessing": stored_preprocessing(self.preprocess),
            **({} if self.features is None else {FEATURES: list(self.features)}),
            "data": self.source.identity(),
        }

    def _opened(self, facts: Mapping[str, Any]) -> BlockWriter:
        """The store, as a former run left it or new. `facts`: of this run."""
        if not is_begun(self.location):
            self._check_is_writable(0, self.source.length)
            return create(self.location, self._begun(facts))
        manifest = read_manifest(self.location)
        before, block = manifest.facts, self.block_size or manifest.block
        ours, theirs = {**_flat(facts), "block_size": block}, {**_flat(before), "block_size": manifest.block}
        check_same_run(self.location, ours, theirs)
        return opened_for_writing(self.location, manifest)

    def _check_is_writable(self, done: int, total: int | None) -> None:
        if self.location.is_read_only():
            raise ArtefactError(
                f"{self.location} or the folder that it is in cannot be written to, and samples are still to be explained "
                f"there: {done} of {'?' if total is None else total} are done",
                topic="files-and-folders",
            )

    def _begun(self, facts: Mapping[str, Any]) -> Manifest:
        """The manifest of a new store, whose arrays are as the first sample that can be explained needs them."""
        first = self._first_of(self.source.in_order())
        if first is None:
            raise self._none_could_be_loaded()
        rows, dimensions, input_bytes = first
        narrow = names_of_relevance(rows) if self.stored.dtype == "float16" else []
        layouts = layouts_of(rows, dimensions, narrow)
        block = self.block_size or default_block(layouts, self.batch_size, input_bytes)
        return Manifest({**facts, RUN: secrets.token_hex(8)}, layouts, block, self.source.length)

    def _first_of(self, samples: Iterable[Sample]) -> tuple[dict[str, Array], dict[str, tuple[str, ...]], int] | None:
        """The rows of the first sample that can be explained, their dimensions, and the size of its inputs in bytes.

        None if none can be loaded. Raises the first `InputError` if some can be, and none can be explained.
        """
        compiled = self.explainer.explain_model is not self.explainer.module
        errors: list[InputError] = []
        for sample in samples:
            if len(errors) == PATIENCE:
                break
            for group in batched(0, [sample]).groups:
                runs_alone = not compiled or isinstance(self.explainer, GraphExplainer)
                copies = 1 if runs_alone else self.batch_size  # not to compile for a batch of one
                try:
                    found = self.explainer.computed(as_copies(group.inputs, copies), [sample.label] * copies)
                    rows, problems = self.explainer.rows(found, copies)
                except InputError as error:
                    errors.append(error)
                    continue
                if not problems:
                    leaves = pytree.tree_leaves(group.inputs)
                    dimensions = self.explainer.dimensions(rows, embedded=not found.arguments.leaves)
                    return rows, dimensions, sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
                errors.append(InputError(f"sample {sample.number}: {problems[0]}", topic="values-not-finite"))
        if errors:
            raise errors[0]
        return None

    def _none_could_be_loaded(self) -> InputError:
        first = next(self.source.in_order(), None)
        if first is None:
            return InputError("the data set is empty", topic="samples")
        return none_loaded(first.number, batched(0, [first]).samples[0].problem)

    def all_blocks(self, progress: Progress, retry_failed: bool) -> None:
        """Explain and write all blocks that are not done, and with `retry_failed` those with samples that failed."""
        facts = self._facts()
        writer = self._opened(facts)
        before = done_of(self.location, writer.manifest, writer.arrays, looks_for_chunks=True)
        if retry_failed:
            before = without_failed(before, self.location, writer)
        total, done = writer.manifest.samples, sum(before.counts)
        is_unfinished = total is None or done < total
        if is_unfinished:
            self._check_is_writable(done, total)
        known = writer.manifest.facts["data"]
        differ = any(known.get(name) != facts["data"].get(name) for name in _COMPARED_BY_SAMPLE)
        length = total if self.source.length is None else None
        plan = BlockPlan(writer.manifest.block, self.batch_size, before, length, compares_all=differ)
        if total is not None and done == total and self.source.length is None:
            for batch in self.source.batches(plan):  # it was read to its end, and is compared
                raise changed(batch.samples[0].number)
            return
        if done and is_unfinished:  # if the settings or the data let no sample be explained, no further one fails
            self._first_of(islice(self.source.in_order(), _TRIED))
        work = Work(self.source, plan, self.explainer, writer)
        has_warned = False
        with (
            progress_counter(progress is True, "explaining", "sample", total, done) as advance,
            closing(self.engine.steps(work)) as steps,
        ):
            for step in steps:
                if step.objection is not None and not has_warned:
                    has_warned = True
                    warnings.warn(step.objection, LrpfxWarning, stacklevel=3)
                done += step.samples
                advance(step.samples)
                if callable(progress):
                    progress(done, total)
        self.location.remove_leftovers()  # of processes of the engine that were killed, whose blocks others wrote
        counts = done_of(self.location, writer.manifest, BlockWriter(self.location, writer.manifest).arrays).counts
        if sum(counts) != done or 0 in counts:
            raise ArtefactError(
                f"{self.location} does not have all blocks that were explained: run again to go on", topic="damaged-stores"
            )
        if writer.manifest.samples is None:
            writer.finish(done)
        if differ and not self.location.is_read_only():  # all samples were compared, and need not be again
            writer.state(replace(writer.manifest, facts={**writer.manifest.facts, "data": facts["data"]}))


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that runs must have in common, by names for messages. Another release of zarr writes the same.

    If the files of a folder have other sizes or times, their samples decide.
    """
    parts = {name: value for group in ("versions", "settings", "data") for name, value in facts[group].items()}
    for name in ("zarr", *_COMPARED_BY_SAMPLE):
        parts.pop(name, None)
    if facts["data"].get("kind") == "folder":
        parts["names of files"] = parts.pop("fingerprint")
    own = {**{name: facts.get(name) for name in ("categories", "preprocessing", FEATURES)}, "composite": facts["composite"]}
    return {"model, weights or rules": facts["model"], **own, **parts}


def _of_boxes(question: Question, is_of_photographs: bool) -> Question:
    """A question to a detector, whose targets are boxes. `InputError` for corners on photographs, each of which has its own."""
    given = [question.target] if question.targets is None else question.targets
    boxes = tuple(as_box(one) for one in given)
    if is_of_photographs and any(one.corners is not None for one in boxes):
        raise InputError(
            "corners are in pixels of one photograph: explain it with the explainer itself, or give the data set a box by its "
            "number, such as lrpfx.Box(0)",
            topic="detectors",
        )
    return replace(question, target=boxes[0]) if question.targets is None else replace(question, targets=boxes)


def _preprocessing(explainer: Any) -> Preprocessing | None:
    """The preprocessing of an explainer. `InputTypeError` for anything else."""
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
