"""Outputs with a number for each class at each place, such as maps of segmentation networks, and their predicted regions."""

import torch


def has_places(output: torch.Tensor) -> bool:
    """Whether an output has classes at places: (batch, classes, height, width), or with other places behind the classes."""
    return output.ndim >= 4


def has_classes(output: torch.Tensor) -> bool:
    """Whether an output has classes in its second dimension, with or without places. Sequences have them in their third."""
    return output.ndim == 2 or has_places(output)


def largest_classes(output: torch.Tensor) -> torch.Tensor:
    """The class with the largest score of each sample. Output (batch, classes, ...), result (batch,)."""
    return scores_of_classes(output).argmax(1)


def scores_of_classes(output: torch.Tensor) -> torch.Tensor:
    """The score of each class, (batch, classes): its output, or the sum of its positive outputs in its predicted region.

    `output`: (batch, classes, ...).
    """
    if output.ndim == 2:
        return output
    if output.shape[1] == 1:
        return output.clamp(min=0).flatten(1).sum(1, keepdim=True)
    values, classes = output.flatten(2).max(1)
    return torch.zeros_like(output.flatten(2)[..., 0]).scatter_add(1, classes, values.clamp(min=0))


def predicted_region(output: torch.Tensor, classes: torch.Tensor | int) -> torch.Tensor:
    """The places whose largest output is that of a class; for an output with one class, those where it is positive.

    `output`: (batch, classes, ...). `classes`: one for all samples, or (batch,). Returns bool of shape (batch, ...).
    """
    if output.shape[1] == 1:
        return output[:, 0] > 0
    if isinstance(classes, torch.Tensor) and classes.ndim:
        classes = classes.reshape(-1, *(1 for _ in output.shape[2:]))
    return output.argmax(1) == classes


def relevance_of_region(
    output: torch.Tensor, classes: torch.Tensor | int, region: torch.Tensor, is_positive: bool = True
) -> torch.Tensor:
    """The outputs of a class within a region, zero elsewhere.

    `output`: (batch, classes, ...). `classes`: one for all samples, or (batch,). `region`: bool, (batch, ...) or (...).
    `is_positive`: whether negative outputs count as zero.
    """
    of_class = torch.arange(output.shape[1], device=output.device) == torch.as_tensor(classes, device=output.device)[..., None]
    chosen = of_class.reshape(-1, output.shape[1], *(1 for _ in output.shape[2:])) & region.unsqueeze(-output.ndim + 1)
    return (output.clamp(min=0) if is_positive else output) * chosen.to(output)
