"""Targets as Captum writes them: which entry of the output is explained for each sample."""

from typing import Any

import torch

from lrpfx.adapters.compilations import invalid, wrong_type
from lrpfx.errors import InputError
from lrpfx.request.targets import without_arrays
from lrpfx.support.numbers import is_whole


def chosen_entries(output: torch.Tensor, target: Any) -> torch.Tensor:
    """For each sample, the place of its entry in the flattened output. Output (samples, ...), result (samples,).

    `target`: an int, a tuple of ints for outputs of more than two dimensions, a list of either with one for each sample, a
    tensor of ints of shape () or (samples,), or None if the output has one number per sample. A target that leaves out the last
    dimensions is valid if they have one entry. Negative ints count from the end.
    """
    if not output.ndim or not len(output):
        what = "no samples" if output.ndim else "one number for all samples"
        raise invalid(f"the output has {what}, but Captum's conventions need one output for each sample")
    places = torch.arange(output.numel()).reshape(output.shape)
    target = without_arrays(target)
    if isinstance(target, torch.Tensor):
        target = _without_tensor(target)
    if target is None:
        chosen = places
    elif isinstance(target, list):
        if len(target) != len(output):
            raise invalid(f"the target has {len(target)} entries, but there are {len(output)} samples")
        chosen = torch.stack([places[sample][_index(one, output)] for sample, one in enumerate(target)])
    else:
        of_all: tuple[slice | int, ...] = (slice(None), *_index(target, output))
        chosen = places[of_all]
    if chosen.numel() != len(output):
        what = "without a target, it has" if target is None else f"the target {target!r} chooses"
        raise invalid(
            f"the output has shape {tuple(output.shape)}; {what} more than one number per sample: pass target=, an index for "
            "each dimension behind the samples, such as output.argmax(1) for the class of the largest output"
        )
    return chosen.flatten().to(output.device)


def _without_tensor(target: torch.Tensor) -> Any:
    """The numbers of a tensor."""
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise wrong_type(f"a tensor as the target holds ints, not {target.dtype}")
    if target.numel() == 1:
        return target.item()
    if target.ndim != 1:
        raise invalid(f"a tensor as the target has one int for each sample, not the shape {tuple(target.shape)}")
    return target.tolist()


def _index(target: Any, output: torch.Tensor) -> tuple[int, ...]:
    """The target of one sample as an index for each of the first dimensions behind the samples."""
    index = tuple(
        _without_tensor(one) if isinstance(one, torch.Tensor) else one
        for one in (target if isinstance(target, tuple) else (target,))
    )
    for one in index:
        if not is_whole(one):
            raise wrong_type(f"the target of a sample is an int or a tuple of ints, not {target!r}")
    if len(index) >= output.ndim or any(not -size <= one < size for one, size in zip(index, output.shape[1:], strict=False)):
        raise InputError(f"the target {target!r} is out of range: the output has shape {tuple(output.shape)}", topic="targets")
    return index
