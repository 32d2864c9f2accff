"""Token heatmaps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lrpfx.attribution import Attribution
from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures.color_maps import ColorMap
from lrpfx.pictures.images_of_arrays import get_cmap
from lrpfx.text.pictures import TextHeatmap
from lrpfx.text.scores import of_attribution, scores_of_tokens
from lrpfx.text.tokens import read_text

SCALES = ("common", "own")


def heatmap(
    relevance: Any,
    tokens: Any,
    tokenizer: Any = None,
    *,
    targets: str | Sequence[str] | None = None,
    join: bool = True,
    scale: str | float = "common",
    cmap: ColorMap | str = "bwr",
    mask: Any = None,
    sample: int | None = None,
    input: str | None = None,
    embedding: str | Sequence[str] | None = None,
) -> TextHeatmap:
    """A heatmap of the relevance of tokens.

    Parameters
    ----------
    relevance
        An array or tensor of shape (tokens,) or (tokens, embedding), which is summed over the embedding, with a batch of one
        before them if need be; or the result of `lrpfx.attribute`.
    tokens
        What the tokenizer returned for the text, its ids (with `tokenizer`), or a list of tokens.
    tokenizer
        Any object with the methods of a Hugging Face tokenizer; it tells which tokens are special.
    targets
        Names of several targets; relevance then has a first dimension for them.
    join
        Whether the tokens of a word are joined, their relevance added.
    scale
        "common" for all targets, "own" for each, or the largest magnitude as a number.
    cmap
        As for `lrpfx.image.get_cmap`.
    mask
        0 for padding, which is left out.
    sample
        Which text of a batch.
    input
        For the result of `attribute`, which input of the model holds the tokens.
    embedding
        For the same, which of the embeddings that read them.

    Raises
    ------
    InputError
        A shape does not fit, or can be read in two ways.
    InputTypeError
        An argument has the wrong type.

    Examples
    --------
    >>> picture = lrpfx.text.heatmap([-0.4, 0.9], ["not", "good"])
    >>> picture.save("text.html").name
    'text.html'
    """
    if isinstance(scale, bool) or not (scale in SCALES or (isinstance(scale, (int, float)) and 0 < scale < np.inf)):
        raise InputError(f"scale is {', '.join(map(repr, SCALES))} or a positive number, not {scale!r}", topic="text-heatmaps")
    get_cmap(cmap)
    names = (targets,) if isinstance(targets, str) else None if targets is None else tuple(targets)
    if names is not None and not (names and all(isinstance(name, str) for name in names)):
        raise InputTypeError(f"targets are names, one for each, not {targets!r}", topic="text-heatmaps")
    text = read_text(tokens, tokenizer, mask, sample)
    count = len(text.tokens)
    number = None if names is None else len(names)
    others: dict[str, torch.Tensor] = {}
    if isinstance(relevance, Attribution):
        relevance, others = of_attribution(relevance, embedding, input)
    elif embedding is not None or input is not None:
        raise InputError("input and embedding are for the result of lrpfx.attribute", topic="text-heatmaps")
    values = scores_of_tokens(relevance, count, number, sample)
    groups = text.groups(join)
    scores = np.stack([values[:, list(group)].sum(1) for group in groups], 1) if groups else np.zeros((len(values), 0))
    apart = {name: _totals(value, number, sample) for name, value in others.items()}
    padding = values[:, list(text.padding)].sum(1)
    if np.abs(padding).max(initial=0.0) > 1e-6 * np.abs(values).sum():
        apart["padding"] = tuple(map(float, padding))
    words = tuple(text.text_of(group) for group in groups)
    special = tuple(text.special[group[0]] for group in groups)
    return TextHeatmap(words, scores, names or ("",), special, tuple(groups), apart, scale, cmap)


def _totals(relevance: torch.Tensor, targets: int | None, sample: int | None) -> tuple[float, ...]:
    """The total relevance of something besides the tokens, one number for each target."""
    rows = relevance.detach().double()
    several = targets is not None and (targets > 1 or rows.shape[:1] == (1,))
    rows = rows if several else rows.unsqueeze(0)
    if sample is not None and rows.ndim > 1 and rows.shape[1] > 1:
        rows = rows[:, sample]
    return tuple(float(row.sum()) for row in rows)
