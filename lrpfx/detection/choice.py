"""Which detector a model is: by its structure."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from lrpfx.detection import of_torchvision, of_transformers, of_ultralytics
from lrpfx.detection.detector_heads import DetectorHeads, checked_threshold
from lrpfx.errors import InputError

#: Families by the names of their classes, of which a model's is one or inherits.
_BY_NAME: dict[str, type[DetectorHeads]] = {
    "RetinaNet": of_torchvision.RetinaNetHeads,
    "FCOS": of_torchvision.FCOSHeads,
    "SSD": of_torchvision.SSDHeads,
    "FasterRCNN": of_torchvision.FasterRCNNHeads,
}


def _family(model: Any) -> Callable[..., DetectorHeads] | None:
    if of_transformers.is_of_queries(model):
        return of_transformers.QueryHeads
    if of_ultralytics.network_of(model) is not None:
        return of_ultralytics.YoloHeads
    names = (one.__name__ for one in type(model).__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def is_detector(model: Any) -> bool:
    """Whether a model is a detector of a known family, whose boxes can be explained.

    `model`: anything.
    """
    return isinstance(model, DetectorHeads) or _family(model) is not None


def detector_within(model: nn.Module) -> str | None:
    """The name of the first module in a model that is a detector; None if there is none."""
    return next((name for name, one in model.named_modules() if name and is_detector(one)), None)


def heads(model: nn.Module, threshold: float | None = None) -> DetectorHeads:
    """A detector up to its raw heads, as a module for `lrpfx.transform`, whose targets are `lrpfx.Box`.

    Parameters
    ----------
    model
        A detector of a known family (see docs/detection.md), or heads that get another threshold.
    threshold
        The confidence above which boxes count; by default that of the detector, or 0.5 if it has none.

    Raises
    ------
    InputError
        The model is no detector of a known family, or the threshold is out of range.
    CaptureError
        A detector that proposes regions is in training mode.

    Examples
    --------
    >>> lrpfx.detection.is_detector(torch.nn.Linear(2, 2))
    False
    """
    if isinstance(model, DetectorHeads):
        found = copy.copy(model)  # of the same detector
        found.given_threshold = model.given_threshold if threshold is None else checked_threshold(threshold)
        return found
    family = _family(model)
    if family is None:
        known = ", ".join([*_BY_NAME, "ForObjectDetection of transformers", "YOLO from version 8 on"])
        raise InputError(
            f"{type(model).__name__} is no detector of a known family ({known}): subclass lrpfx.detection.DetectorHeads, whose "
            "`raw` returns logits, boxes and confidences",
            topic="detectors",
        )
    return family(model, threshold)
