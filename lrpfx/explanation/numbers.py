"""Explanations of tables, series, waves and volumes: from what `read` made of them to what a user looks at."""

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, LrpfxError
from lrpfx.explanation.answers import Answer, Array, Scores
from lrpfx.explanation.arrays import Form, Reading, Samples, each_tensor, leaves_of
from lrpfx.explanation.compiled import Compiled, CompiledModel, Origin, keep_origin
from lrpfx.explanation.series import SeriesExplanation, SeriesExplanations, WaveExplanation, WaveExplanations
from lrpfx.explanation.tables import TableExplanation, TableExplanations
from lrpfx.explanation.volumes import VolumeExplanation, VolumeExplanations
from lrpfx.request.regions import Region, RegionOfInput, with_regions
from lrpfx.request.targets import Target
from lrpfx.request.targets_of_samples import TargetsOfSamples
from lrpfx.support.optional_packages import progress_bar

OfNumbers = TableExplanation | SeriesExplanation | WaveExplanation | VolumeExplanation
#: What numbers stand for -> the class of an explanation.
KINDS: dict[Form, type[OfNumbers]] = {
    "table": TableExplanation,
    "series": SeriesExplanation,
    "wave": WaveExplanation,
    "volume": VolumeExplanation,
}
#: The collection of several, by the class of one.
_SEVERAL: dict[type[OfNumbers], Any] = {
    TableExplanation: TableExplanations,
    SeriesExplanation: SeriesExplanations,
    WaveExplanation: WaveExplanations,
    VolumeExplanation: VolumeExplanations,
}


def explain_samples(
    compiled_for: Callable[[Any], Compiled],
    samples: Samples,
    kind: type[OfNumbers],
    reading: Reading,
    wanted: TargetsOfSamples,
    batch_size: int,
    progress: bool = False,
) -> Any:
    """The explanation of one sample, or those of several. `compiled_for`: the compiled model for the model's inputs."""
    count = len(samples.titles)
    wanted.check_number(count)
    found: list[Any] = []
    firsts = range(0, count, batch_size)
    for first in progress_bar(firsts, progress, "explaining", "batch", len(firsts)):
        places = slice(first, min(first + batch_size, count))
        inputs = samples.part(places)
        compiled = compiled_for(inputs)
        if not first:
            _check_independent(compiled, samples)
        targets_of_batch = [_targets_of(samples, place, kind, wanted) for place in range(places.start, places.stop)]
        run = compiled.run(inputs, targets_of_batch)
        for place, output, answers, targets in zip(
            range(places.start, places.stop), run.outputs, run.answers, run.targets, strict=True
        ):
            is_of_classes = kind is VolumeExplanation or compiled.categories is not None
            scores = run.scores if is_of_classes else Scores.OTHER
            shown = tuple(_shaped(answer, samples, place, kind, scores) for answer in answers)
            facts = (samples.titles[place], output, compiled.categories, shown, run.rules, scores)
            one = kind(*facts, *_own(samples, place, kind, reading))
            if isinstance(one, WaveExplanation) and isinstance(compiled, CompiledModel) and compiled.reference is not None:
                one = replace(one, reference=_reference_of(compiled.reference, inputs, place - places.start, one.wave))
            keep_origin(one, Origin(compiled, samples.part(slice(place, place + 1)), targets, output))
            found.append(one)
    return _SEVERAL[kind](found) if samples.several else found[0]


def _reference_of(reference: Any, inputs: Any, place: int, wave: Array) -> Array:
    """The reference of one of the inputs in the form of its wave; NaN if there are several, or the input has another form."""
    if isinstance(reference, torch.Tensor) and isinstance(inputs, torch.Tensor):
        found = reference.detach().expand_as(inputs)[place]  # which `attribute` has checked
        if found.numel() == wave.size:
            return found.double().numpy(force=True).reshape(wave.shape)
    return np.full(wave.shape, np.nan)


def _targets_of(samples: Samples, place: int, kind: type[OfNumbers], wanted: TargetsOfSamples) -> tuple[Target, ...]:
    """The targets of a sample. A region with a mask of the voxels or steps of the input, or of its scan, is one of these."""
    shape = samples.values[place].shape
    own = shape[1:] if kind is VolumeExplanation else shape[:1] if kind is SeriesExplanation else shape[-1:]
    scan = samples.scans[place] if samples.scans else None

    def of_input(target: Region) -> Target:
        if not isinstance(target.mask, torch.Tensor):
            return target
        if scan is not None and target.mask.shape == scan.values.shape[1:]:
            return RegionOfInput(target.class_, scan.geometry.of_input(target.mask.numpy()), target.positive)
        return RegionOfInput(target.class_, target.mask, target.positive) if target.mask.shape == own else target

    return tuple(with_regions(target, of_input) for target in wanted.of_sample(place))


def _check_independent(compiled: Compiled, samples: Samples) -> None:
    """Raise `InputError` if the output of the first two samples depends on which of them is beside it."""
    if not isinstance(compiled, CompiledModel) or isinstance(samples.inputs, list) or len(samples.titles) < 2:
        return
    try:
        with torch.no_grad():
            both, first, second = (
                compiled.outputs_of(each_tensor(samples.inputs, itemgetter(list(places))))
                for places in ((0, 1), (0, 0), (1, 1))
            )
    except (LrpfxError, RuntimeError):  # the model takes batches of this size alone
        return
    if not both.is_floating_point() or both.shape != first.shape or both.shape != second.shape or len(both) != 2:
        return
    change = torch.stack([both[0] - first[0], both[1] - second[1]]).abs().max()
    if change > torch.finfo(both.dtype).eps ** 0.5 * both.abs().max():
        raise InputError(
            "the output of a sample depends on the others in the batch: the model reads the first dimension of its input, "
            f'{tuple(leaves_of(samples.inputs)[0].shape)}, as something else than samples, such as steps. form="series" reads '
            "an array (steps, features) as one series; recurrent layers and attention need batch_first=True for a batch",
            topic="tables-series-and-waves",
        )


def _shaped(answer: Answer, samples: Samples, place: int, kind: type[OfNumbers], scores: Scores) -> Answer:
    """An answer whose relevance has the shape of what the user gave."""
    category = replace(answer.category, probability=None) if scores is Scores.OTHER else answer.category
    relevance, shape = answer.input_relevance, samples.values[place].shape
    if kind is VolumeExplanation:  # programs may return it without channels
        relevance = relevance if relevance.ndim == 4 else relevance[None]
        relevance = relevance.swapaxes(0, 1) if samples.frames_first else relevance
        shape = relevance.shape
    if kind is SeriesExplanation and samples.channels_first:
        relevance = relevance.reshape(shape[::-1]).T
    return replace(answer, category=category, input_relevance=np.ascontiguousarray(relevance.reshape(shape)))


def _own(samples: Samples, place: int, kind: type[OfNumbers], reading: Reading) -> tuple[Any, ...]:
    """What an explanation of this kind has besides the facts that all have."""
    values = samples.values[place]
    if kind is VolumeExplanation:
        return values, samples.affines[place], samples.scans[place]
    if kind is WaveExplanation:
        return values, reading.rate
    if kind is TableExplanation:
        return samples.features, values
    return samples.features, samples.steps or tuple(range(len(values))), values
