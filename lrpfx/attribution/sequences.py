"""Contributions of letters to the output for one-hot sequences, such as DNA: also of letters that a sequence does not have."""

from typing import Any

import torch
from torch import nn

from lrpfx.attribution.compute import attribute
from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.targets import TargetLike
from lrpfx.runtime.explain_module import explainable


def hypothetical_contributions(
    explain_model: nn.Module, sequences: torch.Tensor, target: TargetLike = None, *, reference: Any
) -> torch.Tensor:
    """What each letter would contribute to the difference from a reference if the sequence had it, at each position.

    With the multipliers m of a sequence and the letters r of the reference, letter a has m_a minus the sum of m_k r_k over all
    letters k. Times the sequence, these are the contributions of its own letters, which add up to the relevance at a position.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform` with `lrpfx.composites.DeepLIFT()`, for a model of one input.
    sequences
        One-hot sequences of shape (batch, letters, positions).
    target, reference
        As for `lrpfx.attribute`. Of several references, which are a list, the result is the mean.

    Returns
    -------
    torch.Tensor
        Contributions, in the shape and dtype of the sequences.

    Raises
    ------
    InputError
        The sequences are not one-hot; and as for `lrpfx.attribute`.
    InputTypeError
        The reference is neither a tensor nor a number nor a list of them.

    References
    ----------
    .. [1] Shrikumar et al. 2018, https://arxiv.org/abs/1811.00416

    Examples
    --------
    >>> letters = nn.functional.one_hot(torch.randint(4, (2, 10)), 4).float().mT
    >>> network = nn.Sequential(nn.Conv1d(4, 3, 5), nn.ReLU(), nn.Flatten(), nn.Linear(18, 1)).eval()
    >>> differences = lrpfx.transform(network, lrpfx.composites.DeepLIFT())
    >>> found = lrpfx.attribution.hypothetical_contributions(differences, letters, 0, reference=torch.full((1, 4, 10), 0.25))
    >>> found.shape
    torch.Size([2, 4, 10])
    """
    is_one_hot = sequences.ndim == 3 and bool(((sequences == 0) | (sequences == 1)).all() and (sequences.sum(1) == 1).all())
    if not is_one_hot:
        raise InputError(
            "sequences are one-hot: of shape (batch, letters, positions), with one 1 at each position and 0 for other letters",
            topic="references",
        )
    names = list(explainable(explain_model, "hypothetical_contributions").reference_names)
    if len(names) != 1:
        raise InputError(
            f"hypothetical contributions are differences from a reference (lrpfx.composites.DeepLIFT()) for one input, but "
            f"{len(names)} inputs have one here",
            topic="references",
        )
    found = []
    references = reference if isinstance(reference, list) else [reference]
    if not references or not all(isinstance(one, (int, float, torch.Tensor)) for one in references):
        raise InputTypeError("the reference of sequences is a tensor, a number or a list of these", topic="references")
    for one in references:
        attribution = attribute(explain_model, sequences, target, reference=one, record_multipliers=names)
        multipliers = attribution.multipliers[names[0]]
        letters = torch.as_tensor(one, dtype=sequences.dtype, device=sequences.device).expand_as(sequences)
        found.append(multipliers - (multipliers * letters).sum(1, keepdim=True))
    return torch.stack(found).mean(0)
