"""Explanations of texts: a sentence and a tokenizer in, relevance of its words out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lrpfx import pictures
from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.targets import Target, check_contrast, relevance_of_output, without_arrays
from lrpfx.errors import InputError, os_errors
from lrpfx.explanation.explanation import Answer, Array, Category, Explained, Several, category_of, index_of
from lrpfx.explanation.running import CompiledModel, Wanted, as_array, checked_output
from lrpfx.explanation.texts import ReadText, check_fits, read, readable
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
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    wanted: Wanted,
    join: bool = True,
    progress: bool = False,
) -> list[TextExplanation]:
    """Explain each text for which `read` has a form. `compiled_for`: the compiled model for the model's inputs."""
    found = []
    for number, given in enumerate(progress_bar(texts, progress, "explaining", "text")):
        text = read(tokenizer, given)
        check_fits(model, tokenizer, text)
        found.append(_explained(compiled_for, model, tokenizer, text, wanted.of_image(number), join))
    return found


def _explained(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: Any,
    tokenizer: Any,
    text: ReadText,
    classes: Sequence[Any],
    join: bool,
) -> TextExplanation:
    inputs: dict[str, Any] = readable(model, text.encoding)
    compiled, ids = compiled_for(inputs), inputs["input_ids"]
    seeds = [_Seed(one, compiled, tokenizer, text) for one in classes]
    answers: list[Answer] = []
    for seed in seeds:
        attribution = attribute(compiled.module, inputs, seed, record=compiled.record, output=compiled.output)
        tokens, _ = of_attribution(attribution, None, None)
        layers = {name: as_array(value[0]) for name, value in attribution.layers.items()}
        answers.append(Answer(seed.category(), as_array(tokens[0]), layers))
    scores = np.stack([answer.input_relevance.sum(-1) for answer in answers])
    titles = [str(answer.category) for answer in answers]
    drawn = pictures_of_text.heatmap(scores, text.encoding, tokenizer, targets=titles, join=join)
    rules, first = compiled.explain_model.composite, seeds[0]
    source = TextSource(compiled, inputs, tuple(seeds))
    facts = (first.output, first.names, tuple(answers), rules, first.scores, as_array(ids[0]), drawn, source)
    return TextExplanation(text.title(tokenizer), *facts)


class _Seed:
    """The relevance of the output for a class, a token, or a contrast of several.

    The token is that at the mask, or after the end of the text, unless the target is a position and a token.
    """

    def __init__(self, target: Any, compiled: CompiledModel, tokenizer: Any, text: ReadText) -> None:
        self.position, self.target = target if isinstance(target, tuple) else (None, target)
        self.names: Sequence[str] | None = compiled.categories
        self.scores = compiled.scores
        self.tokenizer = tokenizer
        self.text = text
        self.output: Array = np.zeros(0)
        self.weights: dict[int, float] = {}  # of classes or tokens, by their indices
        self.place: int | None = None  # of the token that is explained

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        if output.ndim != 3:
            checked_output(output)
            if self.position is not None:
                raise InputError(
                    "a position and a token are a target for models that return tokens; this one returns classes",
                    topic="sentences",
                )
            self.output = as_array(output[0])
            self.weights = self._chosen(output.shape[1])
            return relevance_of_output(output, self.weights)
        known, features = len(self.tokenizer), output.shape[2]
        if features < known:
            raise InputError(
                f"the model returns {features} features of each token, neither classes nor tokens, of which the tokenizer has "
                f"{known}. If they are classes of each token, choose a token: Explainer(..., output=lambda result: "
                "result.logits[:, 2]). Otherwise explain a model with a head, or a module that computes one number from them",
                topic="sentences",
            )
        self.names = _Vocabulary(self.tokenizer, output.shape[2])
        place = self._place(output.shape[1])
        self.output = as_array(output[0, place])
        self.weights = self._chosen(output.shape[2])
        return relevance_of_output(output, (place, self.weights))

    def category(self) -> Category:
        """What is explained: of a contrast, the class with the largest weight stands for all."""
        index = max(self.weights, key=lambda one: abs(self.weights[one]))
        found = category_of(self.output, index, self.names, self.scores)
        if isinstance(self.target, Mapping):
            named = {one: str(one) if self.names is None else self.names[one] for one in self.weights}
            terms = [_term(weight, named[one]) for one, weight in self.weights.items()]
            score = sum(weight * float(self.output[one]) for one, weight in self.weights.items())
            found = replace(found, name=" ".join(terms).removeprefix("+ "), score=score, probability=None)
        return found if self.position is None else replace(found, name=f"{found.name} (position {self.position})")

    def _place(self, length: int) -> int:
        """The position whose prediction is explained: the given one, that of the mask, or else the last."""
        if self.position is not None:
            if not -length <= self.position < length:
                raise InputError(f"position {self.position} is out of range: the text has {length} tokens", topic="sentences")
            return int(self.position)
        ids, last = self.text.ids, self.text.last
        mask = getattr(self.tokenizer, "mask_token_id", None)
        masked = [place for place, one in enumerate(ids) if one == mask and mask is not None]
        if len(masked) > 1:
            raise InputError(
                f"the text has {len(masked)} masks, and one prediction is explained at a time: target=(position, token) "
                "explains any of them",
                topic="sentences",
            )
        if not masked and not self.text.is_chat and ids[last] in getattr(self.tokenizer, "all_special_ids", ()):
            end = self.tokenizer.decode([ids[last]])
            hint = "" if mask is None else f"; a model that fills in words needs a {self.tokenizer.mask_token} in the text"
            raise InputError(
                f"the tokenizer ends the text with {end}, so that nothing continues it: a model that continues texts needs a "
                f"tokenizer that adds nothing at the end{hint}",
                topic="sentences",
            )
        return masked[0] if masked else last

    def _chosen(self, classes: int) -> dict[int, float]:
        """The weights of the explained classes or tokens."""
        if self.target is None:
            return {int(self.output.argmax()): 1.0}
        if not isinstance(self.target, Mapping):
            return {self._index(self.target, classes): 1.0}
        weights = without_arrays(self.target)
        check_contrast(weights)
        found: dict[int, float] = {}
        for one, weight in weights.items():
            index = self._index(one, classes)
            found[index] = found.get(index, 0.0) + float(weight)
        return found

    def _index(self, target: Any, classes: int) -> int:
        if isinstance(target, str) and isinstance(self.names, _Vocabulary):
            ids = self.tokenizer(target, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise InputError(
                    f"{target!r} is {len(ids)} tokens, not one; a token at the start of a word has its blank", topic="sentences"
                )
            if ids[0] == getattr(self.tokenizer, "unk_token_id", None):
                raise InputError(f"the tokenizer does not know {target!r}", topic="sentences")
            return int(ids[0])
        return index_of(target, self.names, classes)


def _term(weight: float, name: str) -> str:
    factor = "" if abs(weight) == 1 else f"{abs(weight):g} · "
    return f"{'−' if weight < 0 else '+'} {factor}{name}"


class _Vocabulary(Sequence[str]):
    """The tokens of a vocabulary as text, by their ids."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.tokenizer.decode([index])
