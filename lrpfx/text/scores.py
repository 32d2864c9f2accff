"""One number for each token, from relevance in any of its shapes."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrpfx.attribution import Attribution
from lrpfx.errors import InputError, InputTypeError

Scores = NDArray[np.float64]

#: Parts of the names of embeddings that tell where a token is, not which.
_OF_PLACES = ("position", "wpe", "token_type", "segment", "pos_emb")


def scores_of_tokens(relevance: Any, tokens: int, targets: int | None, sample: int | None) -> Scores:
    """The scores of shape (targets, tokens). `targets`: their number, if relevance may have a dimension for them."""
    values = _array(relevance)
    if targets is None and tokens > 1 and values.shape == (tokens, tokens):
        raise InputError(
            f"relevance of shape {values.shape} for {tokens} tokens can be read in two ways: sum it over the embedding, "
            "relevance.sum(-1), or name its targets, targets=[...]",
            topic="text-heatmaps",
        )
    leading = targets is not None and (targets > 1 or (values.ndim > 1 and values.shape[0] == 1))
    if leading and (values.ndim == 0 or values.shape[0] != targets):
        raise InputError(
            f"{targets} targets are named, but relevance has the shape {values.shape}: its first dimension is theirs",
            topic="text-heatmaps",
        )
    rows = values if leading else values[None]
    return np.stack([_of_one(row, tokens, sample, values.shape, targets is not None) for row in rows])


def _of_one(values: Scores, tokens: int, sample: int | None, shape: tuple[int, ...], named: bool) -> Scores:
    """The scores of one target, for values of shape ([batch,] tokens[, embedding])."""
    readings = [
        (batch, embedding)
        for batch, embedding in product((False, True), repeat=2)
        if values.ndim == 1 + batch + embedding and values.shape[int(batch)] == tokens
        if not batch or values.shape[0] == 1 or sample is not None
    ]
    if not readings:
        raise InputError(_misfit(shape, tokens, sample, named), topic="text-heatmaps")
    found = []
    for batch, embedding in readings:
        if batch and sample is not None and not -values.shape[0] <= sample < values.shape[0]:
            raise InputError(f"sample={sample}, but relevance is that of {values.shape[0]} texts", topic="text-heatmaps")
        own = values[sample or 0] if batch else values
        found.append(own.sum(-1) if embedding else own)
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        raise InputError(
            f"relevance of shape {shape} for {tokens} token(s) can be read in two ways: pass it as (tokens,), summed over the "
            "embedding, or as (1, tokens, embedding)",
            topic="text-heatmaps",
        )
    return found[0]


def _misfit(shape: tuple[int, ...], tokens: int, sample: int | None, named: bool) -> str:
    message = (
        f"relevance of shape {shape} does not fit {tokens} tokens: it has the shape (tokens,), (tokens, embedding), "
        "(1, tokens) or (1, tokens, embedding)"
    )
    if len(shape) > 1 and tokens in shape[1:] and not named:
        message += ". For several targets, name them: targets=[...]; of several texts, choose one: sample="
    elif sample is None and len(shape) > 1:
        message += ", after a first dimension for the targets. Of several texts, choose one: sample="
    return message


def _array(relevance: Any) -> Scores:
    if isinstance(relevance, torch.Tensor):
        relevance = relevance.detach().cpu().double().numpy()
    try:
        values = np.asarray(relevance, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputTypeError(
            f"relevance is a tensor, an array, or the result of lrpfx.attribute, not {type(relevance).__name__}",
            topic="text-heatmaps",
        ) from None
    if not np.isfinite(values).all():
        raise InputError(
            f"relevance has {int((~np.isfinite(values)).sum())} entries that are not finite", topic="values-not-finite"
        )
    return values


def of_attribution(
    attribution: Attribution[Any], embedding: str | Sequence[str] | None, input: str | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The relevance of the tokens, summed over embeddings, and that of everything else by name."""
    relevance: Any = attribution.relevance
    if isinstance(relevance, tuple):
        relevance = {str(place): value for place, value in enumerate(relevance)}
    others: dict[str, Any] = {}
    if isinstance(relevance, Mapping):
        known = {str(name): value for name, value in relevance.items() if value is not None}
        relevance, others = _chosen_input(known, input)
    if isinstance(relevance, Mapping):
        relevance, apart = chosen_embeddings({str(name): value for name, value in relevance.items()}, embedding)
        others = {**apart, **others}
    elif embedding is not None:
        raise InputError("the tokens are read by one embedding, so there is none to choose", topic="text-heatmaps")
    if not isinstance(relevance, torch.Tensor):
        raise InputError("the attribution has no relevance of tokens", topic="text-heatmaps")
    flat: dict[str, torch.Tensor] = {}
    for name, value in others.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        flat.update({f"{name}.{part}".rstrip("."): one for part, one in parts if isinstance(one, torch.Tensor)})
    return relevance, flat


def _chosen_input(relevance: dict[str, Any], input: str | None) -> tuple[Any, dict[str, Any]]:
    name = input or ("input_ids" if "input_ids" in relevance else next(iter(relevance), "") if len(relevance) == 1 else "")
    if name not in relevance:
        known = ", ".join(relevance) or "(none)"
        raise InputError(
            f"relevance is that of the inputs {known}: pass input=, the one with the tokens", topic="text-heatmaps"
        )
    return relevance[name], {other: value for other, value in relevance.items() if other != name}


def chosen_embeddings(
    relevance: dict[str, torch.Tensor], embedding: str | Sequence[str] | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over the embeddings that tell which token it is, and the relevance of the others."""
    if embedding is None:
        chosen = [name for name in relevance if not any(part in name.lower() for part in _OF_PLACES)]
        if len(chosen) != 1:
            known = ", ".join(relevance)
            raise InputError(
                f"the tokens are read by the embeddings {known}: pass embedding=, one or several of them, to "
                "lrpfx.text.heatmap, with what lrpfx.attribute returns",
                topic="text-heatmaps",
            )
    else:
        chosen = [embedding] if isinstance(embedding, str) else list(embedding)
        unknown = [name for name in chosen if name not in relevance]
        if unknown or not chosen:
            raise InputError(
                f"there is no embedding {(unknown or [''])[0]!r}; there are {', '.join(relevance)}", topic="text-heatmaps"
            )
    shown = torch.stack([relevance[name] for name in chosen]).sum(0)
    return shown, {name: value for name, value in relevance.items() if name not in chosen}
