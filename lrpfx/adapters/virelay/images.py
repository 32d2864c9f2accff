"""The images of a data set that was explained, and which of their values are black and white."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrpfx.adapters.virelay.arrays import ValueRange, invalid
from lrpfx.datasets.images_of_samples import ImagesOfSamples, check_number_of_images
from lrpfx.datasets.rows import Rows, column
from lrpfx.datasets.view import Attributions
from lrpfx.pictures.maps import Channels, Floats, checked_number

PerChannel = float | Sequence[float]
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
    """The images of a data set. `preprocess`: from an image to the model's input, which is shown, by default that of the store.

    With a range of values, the images are as they come, if no preprocessing is given.
    """
    found: Rows | Sequence[Any]
    if hasattr(data, "shape") and hasattr(data, "dtype") and preprocess is None:
        check_number_of_images(len(column(data, "data")), view)
        found = first = data
    else:
        found = ImagesOfSamples(view, data, preprocess, uses_stored=value_range is None)
        first = found[int(view.explained[0])] if len(view.explained) else None
        if found.preprocess is not None and value_range is None:
            value_range = found.preprocess.range
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
