"""The images of a data set that was explained, each loaded when it is asked for."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrpfx.adapters.virelay.arrays import ValueRange, invalid, wrong_type
from lrpfx.datasets.rows import Rows, column
from lrpfx.datasets.view import Attributions
from lrpfx.images.preprocessing import Preprocessing
from lrpfx.pictures.maps import Channels, Floats, checked_number
from lrpfx.samples.plan import BlockPlan
from lrpfx.samples.preparation import Preparation, Sample, as_tensor, is_data
from lrpfx.samples.sources import IndexedSource, source_of

PerChannel = float | Sequence[float]
_PREPROCESS = "images in files need preprocess=, with which they were explained, such as that of the lrpfx.Explainer"
_MEANING = "mean and std are numbers, or one for each channel, and std is positive"


@dataclass(frozen=True)
class Images:
    """Images with a row for each sample, and how they are read: arguments of `write_project`."""

    images: Rows | Sequence[Any]
    channels: Channels
    value_range: ValueRange


def images_of(
    view: Attributions,
    data: Any,
    preprocess: Callable[..., Any] | None,
    value_range: ValueRange | None,
    channels: Channels,
) -> Images:
    """The images of a data set. `preprocess`: from an image to the model's input, which is shown."""
    if hasattr(data, "shape") and hasattr(data, "dtype") and preprocess is None:
        _check_length(len(column(data, "data")), view)
        found = first = data
    else:
        function = preprocess.function if isinstance(preprocess, Preprocessing) else preprocess
        given = None if function is None else Preprocessing(function)  # which has measured nothing yet
        found = _ImagesOfData(view, data, given)
        first = found[int(view.explained[0])] if len(view.explained) else None
        if given is not None and value_range is None:
            value_range = given.range
            if value_range is None:
                raise invalid("the values of black and of white after preprocess= are not known: pass value_range=")
    if channels is None and isinstance(first, torch.Tensor):
        channels = "first"
    return Images(found, channels, (0.0, 1.0) if value_range is None else value_range)


def range_before(mean: PerChannel | None, std: PerChannel | None) -> ValueRange | None:
    """The values of black and of white after normalization: (x - mean) / std of x from 0 to 1. None without normalization."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise invalid("mean= and std= belong together: images were normalized by (x - mean) / std")
    means, deviations = _numbers(mean), _numbers(std)
    if len({len(means), len(deviations)} - {1}) > 1 or not (deviations > 0).all():
        raise invalid(f"{_MEANING}, not {mean!r} and {std!r}")
    low, high = (((bound - means) / deviations).tolist() for bound in (0.0, 1.0))
    return low, high


def _numbers(given: PerChannel) -> Floats:
    numbers = np.atleast_1d(np.asarray(given, dtype=object)).ravel()
    return np.array([checked_number(one, _MEANING, math.isfinite) for one in numbers])


class _ImagesOfData(Sequence[Any]):
    """The images of the samples of a data set, which is the one that was explained as far as that can be told."""

    def __init__(self, view: Attributions, data: Any, preprocess: Preprocessing | None) -> None:
        if isinstance(data, (str, os.PathLike)) and preprocess is None:
            raise invalid(_PREPROCESS)
        source = source_of(data, _ImagePreparation((), preprocess), 0)
        if not isinstance(source, IndexedSource):
            raise wrong_type(
                f"images are found by their numbers, which a {type(data).__name__} does not have: pass a data set with "
                "indices, or the images as an array or a sequence, in the order in which they were explained"
            )
        _check_length(source.length, view)
        then, now = view.manifest["data"], source.identity()
        if then.get("kind") == now["kind"] == "folder" and then.get("fingerprint") != now["fingerprint"]:
            raise invalid(f"the files in {data} are not those that were explained: their names or sizes differ")
        if preprocess is not None:  # then the images are what the model was given
            source.check_done(BlockPlan(view.manifest["block"], 1, view.blocks()))
        self.source = source
        self.labels = view.labels

    def __len__(self) -> int:
        return self.source.length

    def __getitem__(self, number: Any) -> Any:
        sample: Sample = self.source.sample(int(number))
        if sample.problem is not None:
            raise invalid(f"sample {number}: {sample.problem}")
        known = self.labels[number]
        if sample.label is not None and known >= 0 and sample.label != known:
            raise invalid(
                f"sample {number} has the label {sample.label} in the data and {known} in the store: pass the data set that "
                "was explained, in the same order"
            )
        return sample.inputs


class _ImagePreparation(Preparation):
    """Finds the image in a sample, whatever else it has."""

    def prepared(self, inputs: Any) -> Any:
        if self.preprocess is not None:
            return super().prepared(inputs)
        if isinstance(inputs, (str, bytes, os.PathLike)):
            raise invalid(_PREPROCESS)
        if isinstance(inputs, (Mapping, tuple)):
            entries = inputs.values() if isinstance(inputs, Mapping) else inputs
            found = [one for one in entries if is_data(one)]
            if len(found) != 1:
                raise invalid(f"it has {len(found)} inputs, which may be images: pass the images as a sequence of their own")
            (inputs,) = found
        return as_tensor(inputs)


def _check_length(count: int, view: Attributions) -> None:
    if count != len(view):
        raise invalid(f"the data set has {count} samples, and the store {len(view)}: pass the one that was explained")
