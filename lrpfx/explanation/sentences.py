"""Explanations of texts: a sentence and a tokenizer in, relevance of its words out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lrpfx import pictures
from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.targets import Target, relevance_of_output
from lrpfx.errors import InputError, InputTypeError, os_errors
from lrpfx.explanation.explanation import Answer, Array, Explained, Several, category_of, index_of
from lrpfx.explanation.running import Class, CompiledModel, Wanted, as_array, checked_output
from lrpfx.support.optional_packages import progress_bar
from lrpfx.text.pictures import TextHeatmap
from lrpfx.text.scores import of_attribution


@dataclass(frozen=True)
class TextSource:
    """The compiled model of a text, the inputs that the tokenizer made, and a target of `lrpfx.attribute` for each answer."""

    compiled: CompiledModel
    inputs: dict[str, Any]
    targets: tuple[Target, ...]


@dataclass(eq=False, repr=False)
class TextExplanation(Explained):
    """Why a model gave a text its class, or why it continues a text with this token.

    It is plain data, and can be pickled without the model.

    Attributes
    ----------
    name
        The first 60 characters of the text.
    output
        Of all classes, or of all tokens that may come next.
    categories
        The names of the classes, or of the tokens.
    answers
        For each explained class, relevance of the vectors of its tokens, (tokens, features).
    rules
        The composite, as text.
    scores
        What the numbers of the output are.
    tokens
        The ids that the tokenizer gave.
    picture
        The text in colours.
    source
        What computes more; a pickled explanation has lost it.
    """

    tokens: Array
    picture: TextHeatmap
    source: TextSource | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

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
        """Write the heatmap.

        Parameters
        ----------
        path
            Ends in .html, .png or .txt.

        Returns
        -------
        Path
            The path.
        """
        return self.picture.save(path)

    def _repr_html_(self) -> str:
        return self.picture.to_html()


class TextExplanations(Several[TextExplanation]):
    """Explanations of several texts, in their order."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.items))

    def sheet(self) -> Image.Image:
        """The heatmaps of all texts, one above the other."""
        return pictures.sheet([[(one.name, one.sheet())] for one in self._some()], caption=self.items[0].rules)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the heatmap of each text into a folder as .html; it is made if need be. Returns the paths."""
        directory = Path(folder)
        with os_errors(InputError, directory, "written"):
            directory.mkdir(parents=True, exist_ok=True)
        return [one.save(directory / f"text_{number}.html") for number, one in enumerate(self.items, 1)]


def explain_sentences(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    tokenizer: Any,
    texts: Sequence[str],
    wanted: Wanted,
    progress: bool = False,
) -> list[TextExplanation]:
    """Explain each text. `compiled_for`: the compiled model for the model's inputs."""
    return [
        _explained(compiled_for, tokenizer, text, wanted.of_image(number))
        for number, text in enumerate(progress_bar(texts, progress, "explaining", "text"))
    ]


def _explained(
    compiled_for: Callable[[dict[str, Any]], CompiledModel], tokenizer: Any, text: Any, classes: Sequence[Class]
) -> TextExplanation:
    if not isinstance(text, str):
        raise InputTypeError(f"a text is a string, not {type(text).__name__}")
    if not text.strip():
        raise InputError("the text is empty")
    encoded = tokenizer(text, return_tensors="pt")
    if not isinstance(encoded, Mapping) or "input_ids" not in encoded:
        raise InputTypeError(f"the tokenizer returned {type(encoded).__name__} without input_ids; pass one of Hugging Face")
    inputs = {str(name): value for name, value in encoded.items()}
    compiled, ids = compiled_for(inputs), inputs["input_ids"]
    seeds = [_Seed(one, compiled, tokenizer, ids[0].tolist()) for one in classes]
    answers: list[Answer] = []
    for seed in seeds:
        attribution = attribute(compiled.module, inputs, seed, record=compiled.record, output=compiled.output)
        tokens, _ = of_attribution(attribution, None, None)
        layers = {name: as_array(value[0]) for name, value in attribution.layers.items()}
        category = category_of(seed.output, seed.index, seed.names, seed.scores)
        answers.append(Answer(category, as_array(tokens[0]), layers))
    scores = np.stack([answer.input_relevance.sum(-1) for answer in answers])
    titles = [str(answer.category) for answer in answers]
    drawn = pictures_of_text.heatmap(scores, ids, tokenizer, targets=titles)
    shortened = text if len(text) <= 60 else f"{text[:59]}…"
    rules, first = compiled.explain_model.composite, seeds[0]
    source = TextSource(compiled, inputs, tuple(seeds))
    facts = (first.output, first.names, tuple(answers), rules, first.scores, as_array(ids[0]), drawn, source)
    return TextExplanation(shortened, *facts)


class _Seed:
    """The relevance of the output for one class, or for one token: the masked one, or the one after the end of the text."""

    def __init__(self, target: Class, compiled: CompiledModel, tokenizer: Any, ids: Sequence[int]) -> None:
        self.target = target
        self.names: Sequence[str] | None = compiled.categories
        self.scores = compiled.scores
        self.tokenizer = tokenizer
        self.ids = ids
        self.output: Array = np.zeros(0)
        self.index = 0

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        if output.ndim != 3:
            checked_output(output)
            self.output = as_array(output[0])
            self.index = self._chosen(output.shape[1])
            return relevance_of_output(output, self.index)
        if output.shape[2] < len(self.tokenizer):
            raise InputError(
                f"the model returns {output.shape[2]} features of each token, neither classes nor tokens: explain a model "
                "with a head, or a module that computes one number from the features"
            )
        self.names = _Vocabulary(self.tokenizer, output.shape[2])
        place = self._place()
        self.output = as_array(output[0, place])
        self.index = self._chosen(output.shape[2])
        return relevance_of_output(output, (place, self.index))

    def _place(self) -> int:
        """The position whose prediction is explained: that of the mask, or else the last."""
        mask = getattr(self.tokenizer, "mask_token_id", None)
        masked = [place for place, one in enumerate(self.ids) if one == mask and mask is not None]
        if len(masked) > 1:
            raise InputError(
                f"the text has {len(masked)} masks, and one prediction is explained at a time: lrpfx.attribute(..., "
                "target=(position, token)) explains any of them"
            )
        if not masked and self.ids[-1] in getattr(self.tokenizer, "all_special_ids", ()):
            last = self.tokenizer.decode([self.ids[-1]])
            hint = "" if mask is None else f"; a model that fills in words needs a {self.tokenizer.mask_token} in the text"
            raise InputError(
                f"the tokenizer ends the text with {last}, so that nothing continues it: a model that continues texts needs a "
                f"tokenizer that adds nothing at the end{hint}"
            )
        return masked[0] if masked else -1

    def _chosen(self, classes: int) -> int:
        if self.target is None:
            return int(self.output.argmax())
        if isinstance(self.target, str) and isinstance(self.names, _Vocabulary):
            ids = self.tokenizer(self.target, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise InputError(f"{self.target!r} is {len(ids)} tokens, not one; a token at the start of a word has its blank")
            if ids[0] == getattr(self.tokenizer, "unk_token_id", None):
                raise InputError(f"the tokenizer does not know {self.target!r}")
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
