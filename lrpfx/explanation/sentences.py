"""Explanations of texts: a sentence and a tokenizer in, relevance of its words out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.targets import relevance_of_output
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.explanation import Answer, Array, Explained, category_of, index_of
from lrpfx.explanation.running import Class, Wanted, as_array, checked_output
from lrpfx.runtime.explain_module import explainable
from lrpfx.support.optional_packages import progress_bar
from lrpfx.text.pictures import TextHeatmap
from lrpfx.text.scores import of_attribution


@dataclass(eq=False, repr=False)
class TextExplanation(Explained):
    """Why a model gave a text its class, or why it continues a text with this token.

    `tokens`: the ids that the tokenizer gave. `output`: of all classes, or of all tokens that may come next. `answers`: for
    each explained class, relevance of the vectors of its tokens, (tokens, features). It is plain data, and can be pickled
    without the model.
    """

    tokens: Array
    picture: TextHeatmap

    def __str__(self) -> str:
        return str(self.picture)

    @property
    def relevance(self) -> Array:
        """Relevance of each token, (tokens,)."""
        summed: Array = self.answers[0].input_relevance.sum(-1)
        return summed

    def heatmap(self) -> TextHeatmap:
        """The words in the colours of their relevance, one row for each explained class."""
        return self.picture

    def sheet(self) -> Image.Image:
        """The heatmap as a picture."""
        return self.picture.to_image()

    def save(self, path: str | Path) -> Path:
        """Write the heatmap as .html, .png or .txt. Returns the path."""
        return self.picture.save(path)

    def _repr_html_(self) -> str:
        return self.picture.to_html()


def explain_sentences(
    module_for: Callable[[dict[str, Any]], nn.Module],
    tokenizer: Any,
    texts: Sequence[str],
    wanted: Wanted,
    categories: Sequence[str] | None,
    progress: bool = False,
) -> list[TextExplanation]:
    """Explain each text. `module_for`: the explainable module for the model's inputs."""
    found = [
        _explained(module_for, tokenizer, text, wanted.of_image(number), categories)
        for number, text in enumerate(progress_bar(texts, progress, "explaining", "text"))
    ]
    wanted.check_number(len(found))
    return found


def _explained(
    module_for: Callable[[dict[str, Any]], nn.Module],
    tokenizer: Any,
    text: Any,
    classes: Sequence[Class],
    categories: Sequence[str] | None,
) -> TextExplanation:
    if not isinstance(text, str):
        raise InputTypeError(f"a text is a string, not {type(text).__name__}")
    if not text.strip():
        raise InputError("the text is empty")
    encoded = tokenizer(text, return_tensors="pt")
    if not isinstance(encoded, Mapping) or "input_ids" not in encoded:
        raise InputTypeError(f"the tokenizer returned {type(encoded).__name__} without input_ids; pass one of Hugging Face")
    inputs = {str(name): value for name, value in encoded.items()}
    module, ids = module_for(inputs), inputs["input_ids"]
    answers: list[Answer] = []
    names: Sequence[str] | None = categories
    for one in classes:
        seed = _Seed(one, categories, tokenizer)
        attribution = attribute(module, inputs, seed)
        tokens, _ = of_attribution(attribution, None, None)
        names = seed.names
        answers.append(Answer(category_of(seed.output, seed.index, names), as_array(tokens[0]), {}))
    scores = np.stack([answer.input_relevance.sum(-1) for answer in answers])
    titles = [str(answer.category) for answer in answers]
    drawn = pictures_of_text.heatmap(scores, ids, tokenizer, targets=titles)
    shortened = text if len(text) <= 60 else f"{text[:59]}…"
    rules = explainable(module, "explain").composite
    return TextExplanation(shortened, seed.output, names, tuple(answers), rules, as_array(ids[0]), drawn)


class _Seed:
    """The relevance of the output for one class, or for one token after the end of the text."""

    def __init__(self, target: Class, categories: Sequence[str] | None, tokenizer: Any) -> None:
        self.target = target
        self.names: Sequence[str] | None = categories
        self.tokenizer = tokenizer
        self.output: Array = np.zeros(0)
        self.index = 0

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        if output.ndim == 3:
            if output.shape[2] < len(self.tokenizer):
                raise InputError(
                    f"the model returns {output.shape[2]} features of each token, neither classes nor tokens: explain a model "
                    "with a head, or a module that computes one number from the features"
                )
            self.names = _Vocabulary(self.tokenizer, output.shape[2])
        else:
            checked_output(output)
        row = output[0, -1] if output.ndim == 3 else output[0]
        self.output = as_array(row)
        self.index = self._chosen(len(row))
        return relevance_of_output(output, (-1, self.index) if output.ndim == 3 else self.index)

    def _chosen(self, classes: int) -> int:
        if self.target is None:
            return int(self.output.argmax())
        if isinstance(self.target, str) and isinstance(self.names, _Vocabulary):
            ids = self.tokenizer(self.target, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise InputError(f"{self.target!r} is {len(ids)} tokens, not one; a token at the start of a word has its blank")
            return int(ids[0])
        return index_of(self.target, self.names, classes)


class _Vocabulary(Sequence[str]):
    """The tokens of a vocabulary as text, by their ids."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.tokenizer.decode([index])
