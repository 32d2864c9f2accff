"""Segmenters of transformers whose queries have a class and a mask each: Mask2Former, MaskFormer, OneFormer, EoMT."""

from typing import Any

import torch
from torch import nn

from lrpfx.errors import InputError

#: What such a segmenter returns, and the names of their classes.
_LOGITS, _MASKS = "class_queries_logits", "masks_queries_logits"
_KNOWN = ("Mask2Former", "MaskFormer", "OneFormer", "Eomt", "EomtDinov3")
_ENDINGS = ("ForUniversalSegmentation", "ForInstanceSegmentation")
#: Arguments without which one of them does not run.
_NEEDED = {"OneFormerForUniversalSegmentation": "task_inputs"}


class SemanticMap(nn.Module):
    """A segmenter of queries as one map of classes: what `lrpfx.detection.semantic_map` returns.

    Its forward takes images as the segmenter gets them, (batch, channels, height, width), and returns (batch, classes, rows,
    columns). Each place belongs to the query for which the product of two probabilities is largest: that of its most likely
    class, and that of its mask there (Cheng et al. 2021, MaskFormer, section 3.4). A class has the sum of two logits there:
    its own for this query, and that of the mask.

    `segmenter`: the segmenter. `further`: its other arguments, the same for all images, (1, ...).
    """

    def __init__(self, segmenter: nn.Module, **further: torch.Tensor) -> None:
        super().__init__()
        self.segmenter = segmenter
        self.train(segmenter.training)
        self.further_names = tuple(further)
        for name, value in further.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def config(self) -> Any:
        """The configuration of the segmenter, which has the names of the classes."""
        return self.segmenter.config

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The map, (batch, classes, rows, columns). `images`: (batch, channels, height, width)."""
        further = {name: getattr(self, name) for name in self.further_names}
        same = {name: one.expand(images.shape[0], *one.shape[1:]) for name, one in further.items()}
        result = self.segmenter(pixel_values=images, **same)
        return logits_at_places(getattr(result, _LOGITS), getattr(result, _MASKS))


def logits_at_places(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The logits of classes at places, (batch, classes, rows, columns), as `SemanticMap` says.

    `logits`: of the classes and of no object, (batch, queries, classes + 1). `masks`: (batch, queries, rows, columns).
    """
    likely = torch.softmax(logits, -1)[..., :-1].amax(-1)
    query = (likely[..., None, None] * torch.sigmoid(masks)).argmax(1, keepdim=True)
    by_class = logits[..., :-1].transpose(1, 2)
    of_classes = by_class.gather(2, query.flatten(2).expand(-1, by_class.shape[1], -1))
    found: torch.Tensor = of_classes.unflatten(2, (masks.shape[2], masks.shape[3])) + masks.gather(1, query)
    return found


def is_of_masks(model: Any) -> bool:
    """Whether a model is a segmenter of transformers whose queries have a class and a mask each."""
    names = {one.__name__ for one in type(model).__mro__}
    return "PreTrainedModel" in names and any(one + ending in names for one in _KNOWN for ending in _ENDINGS)


def semantic_map(model: nn.Module, **further: torch.Tensor) -> SemanticMap:
    """A segmenter of queries as one map of classes, for `lrpfx.transform` and `lrpfx.Region`.

    `lrpfx.Explainer` makes it of such a segmenter by itself, unless `output=` chooses one of its outputs.

    Parameters
    ----------
    model
        Mask2Former, MaskFormer, OneFormer or EoMT of transformers.
    **further
        Arguments of the model that are the same for all images, (1, ...), such as `task_inputs` of OneFormer.

    Raises
    ------
    InputError
        The model is another one, an argument is missing, or the model draws random numbers in evaluation mode, too.
    """
    if not is_of_masks(model):
        raise InputError(
            f"{type(model).__name__} is none of {', '.join(_KNOWN)}, whose queries have a class and a mask each: give "
            "lrpfx.transform a segmenter with a map of classes as it is",
            topic="detectors",
        )
    shares = getattr(model, "attn_mask_probs", None)
    if isinstance(shares, torch.Tensor) and bool(((shares > 0) & (shares < 1)).any()):
        raise InputError(
            f"{type(model).__name__} draws at random which queries attend within masks, in evaluation mode, too, since its "
            "attn_mask_probs lie between 0 and 1: model.attn_mask_probs.fill_(0) lets none, as after its training, and "
            "fill_(1) lets all",
            topic="training-mode",
        )
    missing = _NEEDED.get(type(model).__name__)
    if missing is not None and missing not in further:
        raise InputError(
            f"{type(model).__name__} needs {missing}, the same for all images: lrpfx.detection.semantic_map(model, "
            f"{missing}=...), with what its processor returns",
            topic="detectors",
        )
    return SemanticMap(model, **further)
