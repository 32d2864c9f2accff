"""An attribution as HTML: shapes, sums, and heatmaps of images."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lrpfx.pictures import heatmap, scale_of
from lrpfx.support.html import Html, element, image_html
from lrpfx.support.table import Table
from lrpfx.support.torch_internals import pytree

MOST_SUMS = 8  # sums of a tensor that are listed
MOST_IMAGES = 4
_SMALL, _LARGE = 128, 256  # sides of a picture in pixels of the page
_COLORS = (1, 3, 4)


def summary_of(
    output: torch.Tensor,
    relevance: Any,
    layers: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    targets: int | None,
    conditions: int | None = None,
) -> str:
    """The table of all tensors of an attribution and, if relevance is that of images, heatmaps with one scale.

    `targets`, `conditions`: their numbers, if each relevance has leading dimensions for them.
    """
    several = "" if conditions is None else f", {conditions} conditions"
    several += "" if targets is None else f", {targets} targets"
    if conditions is not None and targets is not None:  # one dimension for both
        targets = conditions * targets
        relevance = pytree.tree_map(lambda tensor: tensor.flatten(0, 1), relevance)
        layers = {name: tensor.flatten(0, 1) for name, tensor in layers.items()}
        constants = {name: tensor.flatten(0, 1) for name, tensor in constants.items()}
    elif conditions is not None:
        targets = conditions
    found = [(name, tensor, "input") for name, tensor in _named_tensors(relevance, "")]
    found += [(name, tensor, "layer") for name, tensor in layers.items()]
    found += [(name, tensor, "constant") for name, tensor in constants.items()]
    of_each = "sums of samples" if targets is None else "sums of targets"
    columns = dict.fromkeys(("relevance of", "name", "shape", "dtype", "total", of_each), "str") | {"total": "float64"}
    rows = [
        (kind, element("code", name), _shape(tensor), _dtype(tensor), _number(tensor), _sums(tensor, kind == "constant"))
        for name, tensor, kind in found
    ]
    head = element("p", element("b", "attribution"), f" of an output of shape {_shape(output)}, {_dtype(output)}{several}")
    pictures = [_heatmaps(tensor, targets is not None) for _, tensor, kind in found if kind == "input"]
    return "".join([head, Table(columns, rows).to_html(), *pictures])


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in relevance, which has the structure of the inputs."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, tuple, list)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _named_tensors(item, f"{name}.{key}" if name else str(key))


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _number(tensor: torch.Tensor) -> str:
    return f"{float(tensor.detach().cpu().double().sum()):.6g}"


def _sums(tensor: torch.Tensor, alone: bool) -> str:
    """The sums along the first dimension, as many as are listed; none for constants, which belong to all samples."""
    if alone or tensor.ndim < 2:
        return ""
    listed = ", ".join(map(_number, tensor[:MOST_SUMS]))
    return f"{listed} and {len(tensor) - MOST_SUMS} more" if len(tensor) > MOST_SUMS else listed


def _heatmaps(relevance: torch.Tensor, several: bool) -> Html:
    """Pictures of the first images; nothing for other tensors. `several`: whether there is a dimension of targets."""
    if several and relevance.ndim == 5:
        relevance = relevance.flatten(0, 1)
    elif several:
        return Html("")
    is_image = relevance.ndim == 4 and relevance.shape[1] in _COLORS and min(relevance.shape) > 0
    if not is_image or min(relevance.shape[2:]) < 2:
        return Html("")
    maps = [one.detach().cpu().double().sum(0) for one in relevance[:MOST_IMAGES]]
    if not all(bool(one.isfinite().all()) for one in maps):
        return element("p", "no heatmap: some values are not finite")
    height, width = maps[0].shape
    shrink = min(1.0, _LARGE / max(height, width))
    size = max(round(width * shrink), 1), max(round(height * shrink), 1)
    enlarge = max(_SMALL // max(size), 1)
    scale = scale_of(maps)
    drawn = [
        image_html(heatmap(one, scale=scale, size=size), f"heatmap {number}", size[0] * enlarge)
        for number, one in enumerate(maps)
    ]
    left = len(relevance) - len(maps)
    return element("p", Html(" ".join(drawn)), f" and {left} more" if left else "")
