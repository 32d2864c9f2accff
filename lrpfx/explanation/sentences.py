"""Explanations of texts: a sentence and a tokenizer in, relevance of its words out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lrpfx import pictures
from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.errors import InputError
from lrpfx.explanation.answers import Answer, Array, Category, Names, Scores, category_of_target, difference_of_target
from lrpfx.explanation.compiled import CompiledModel, Origin, Run, checked_output, keep_origin
from lrpfx.explanation.explanation import SHARES_OF_LAYERS, Explained, SeveralPictures, caption_of
from lrpfx.explanation.texts import ReadText, check_fits, index_of_token, read, readable
from lrpfx.ir.kinds import Sum
from lrpfx.ir.node import bottlenecks, node_info
from lrpfx.request.classes import index_of
from lrpfx.request.targets import Position, Target, as_target
from lrpfx.request.targets_of_samples import TargetsOfSamples, resolved
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.tensors import as_array
from lrpfx.text.pictures import TextHeatmap
from lrpfx.text.scores import of_attribution

#: How many tokens, those with the largest outputs, an explanation names.
_NAMED = 1000
#: The width of a picture of text, and of a sheet that shows it as it is.
_WIDTH, _WIDTH_OF_SHEET = 900, 922
#: Characters of the name of a layer beside its row.
_LONGEST = 30


@dataclass(frozen=True, eq=False, repr=False)
class TextExplanation(Explained):
    """Why a model gave a text its class, or why it continues a text with this token.

    It is plain data.

    `name`: the first 60 characters of the text. `output`: of all classes, or of all tokens that may come next. `categories`:
    the names of the classes, or of the thousand tokens with the largest outputs, by their ids. `answers`: for each explained
    class, relevance of the vectors of its tokens, (tokens, features). `rules`: the composite, as text. `scores`: what the
    numbers of the output are. `tokens`: the ids that the tokenizer gave. `picture`: the text in colours.
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
        """The heatmap as a picture, with a legend and the share of the output that it shows."""
        caption = caption_of(self.rules, [answer.balance for answer in self.answers])
        legend = self._legend if len(self.answers) == 1 else pictures.LEGEND
        cmap, image = self.picture.cmap, self.picture.to_image(width=_WIDTH)
        return pictures.sheet([image], caption=caption, legend=legend, width=_WIDTH_OF_SHEET, cmap=cmap)

    def layers(self, names: Sequence[str] | None = None) -> Image.Image:
        """Relevance through the network: the words of the input, and of each layer, each with a scale of its own.

        Beside a layer stands the share of the output in it. `names`: nodes with an output (tokens, features), by default the
        recorded ones, or else the sums that all relevance flows through, which a transformer has after attention and after each
        block; others need the compiled model. Raises `InputError` for relevance of another shape.
        """
        layers = {_end_of(name): one for name, one in self._layers(names, ("tokens", "features")).items()}
        maps = self._with_shares({"input": self.relevance, **layers})
        words = np.stack([[one[list(places)].sum() for places in self.picture.places] for one in maps.values()])
        marks = (False,) * len(self.picture.special)  # which may have all relevance of the last layers
        drawn = replace(self.picture, scores=words, targets=tuple(maps), special=marks, others={}, scale="own")
        image, legend = drawn.to_image(width=_WIDTH), self._legend
        return pictures.sheet([image], caption=SHARES_OF_LAYERS, legend=legend, width=_WIDTH_OF_SHEET, cmap=drawn.cmap)

    def save(self, path: str | Path) -> Path:
        """Write the heatmap.

        `path`: ends in .html, .png or .txt. Returns the path.
        """
        return self.picture.save(path)

    def _repr_html_(self) -> str:
        return self.picture.to_html()


def _end_of(name: str) -> str:
    """The end of a name that is too long for a row."""
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


class TextExplanations(SeveralPictures[TextExplanation]):
    """Explanations of several texts, in their order."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.items))

    def sheet(self) -> Image.Image:
        """The heatmaps of all texts, one above the other."""
        rows = [[(one.name, one.picture.to_image(width=_WIDTH))] for one in self._some()]
        caption, cmap = caption_of(self.items[0].rules, [one.balance for one in self.items]), self.items[0].picture.cmap
        return pictures.sheet(rows, caption=caption, legend=pictures.LEGEND, width=_WIDTH_OF_SHEET, cmap=cmap)

    def _names_of_files(self) -> Sequence[str]:
        return self._numbered("text_{}.html")


def explain_sentences(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    wanted: TargetsOfSamples,
    join: bool = True,
    progress: bool = False,
) -> list[TextExplanation]:
    """Explain each text for which `read` has a form. `compiled_for`: the compiled model for the model's inputs."""
    found = []
    for number, given in enumerate(progress_bar(texts, progress, "explaining", "text")):
        text = read(tokenizer, given)
        check_fits(model, tokenizer, text)
        found.append(_explained(compiled_for, model, tokenizer, text, wanted.of_sample(number), join))
    return found


def _explained(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: Any,
    tokenizer: Any,
    text: ReadText,
    given: Sequence[Target],
    join: bool,
) -> TextExplanation:
    inputs: dict[str, Any] = readable(model, text.encoding)
    compiled, ids = compiled_for(inputs), inputs["input_ids"]
    if compiled.reference is not None:
        compiled = compiled.compared_with(_references_of(compiled.reference, tokenizer, ids))
    targets = tuple(OfText(one, compiled.categories, tokenizer, text) for one in given)
    compiled = CompiledText(
        compiled.module, compiled.categories, compiled.record, compiled.output, compiled.scores, compiled.reference
    )
    answers, found = compiled.explained(inputs, targets)
    scores = np.stack([answer.input_relevance.sum(-1) for answer in answers])
    titles = [str(answer.category) for answer in answers]
    drawn = pictures_of_text.heatmap(scores, text.encoding, tokenizer, targets=titles, join=join)
    output, names = as_array(found[0].output).T, found[0].names  # of a region (classes, positions)
    names = named_tokens(names, output)
    facts = (output, names, answers, compiled.explain_model.composite, compiled.scores, as_array(ids[0]), drawn)
    explanation = TextExplanation(text.title(tokenizer), *facts)
    keep_origin(explanation, Origin(compiled, inputs, targets, output))
    return explanation


def named_tokens(names: Names, output: Array) -> Names:
    """The names of classes, or of the tokens with the largest logits of a vocabulary."""
    if not isinstance(names, _Vocabulary):
        return names
    return {int(index): names[index] for index in np.argsort(-output, kind="stable")[:_NAMED]}


class CompiledText(CompiledModel):
    """An explainable module for one text."""

    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        (asked,) = targets
        answers, (first, *_) = self.explained(inputs, asked, record)
        return Run([as_array(first.output).T], [answers], [tuple(asked)], self.explain_model.composite, self.scores)

    def explained(
        self, inputs: Any, targets: Sequence[Any], record: Sequence[str] = ()
    ) -> tuple[tuple[Answer, ...], list["_Shown"]]:
        """The answers for targets of the text, and what they explain of the output."""
        answers: list[Answer] = []
        found: list[_Shown] = []
        for target in targets:
            options: dict[str, Any] = {"output": self.output, "reference": self.reference}
            attribution = attribute(self.module, inputs, target, record=(*self.record, *record), **options)
            shown, other, difference = target.of_output(attribution.output), attribution.reference_output, None
            tokens, _ = of_attribution(attribution, None, None)
            layers = {name: as_array(value[0]) for name, value in attribution.layers.items()}
            if other is not None:
                difference = difference_of_target(shown.target, as_array(attribution.output[0]), as_array(other[0]))
            answers.append(Answer(shown.category(self.scores), as_array(tokens[0]), layers, None, difference))
            found.append(shown)
        return tuple(answers), found

    def spatial_layers(self, axes: int = 2) -> list[str]:
        """The sums that all relevance flows through, such as those after each block, or else the last layer."""
        if axes != 1:
            return super().spatial_layers(axes)
        infos = [node_info(node) for node in bottlenecks(self.explain_model.unfused_graph)]
        sums = [one.name for one in infos if one.kind is not None and issubclass(one.kind, Sum) and len(one.shape or ()) == 3]
        return sums or super().spatial_layers(axes)


def _references_of(given: Any, tokenizer: Any, ids: torch.Tensor) -> Any:
    """What a text is compared with: token ids, with a token in the place of each that is not a mark of the model.

    `given`: the token, as text; a tensor of ids that fits the text; or a list of these.
    """
    if isinstance(given, list) and given:
        return [_references_of(one, tokenizer, ids) for one in given]
    if isinstance(given, torch.Tensor):
        return {"input_ids": given}
    token = index_of_token(tokenizer, given, topic="references") if isinstance(given, str) else None
    if token is None:
        special = [getattr(tokenizer, f"{name}_token", None) for name in ("mask", "pad", "unk", "eos")]
        known = next((one for one in special if one is not None), "the")
        raise InputError(
            f"the reference of a text is a token that takes the place of its own, such as reference={known!r}, a tensor of "
            f"token ids of the shape {tuple(ids.shape)}, or a list of these, not {type(given).__name__}",
            topic="references",
        )
    marks = torch.tensor(list(getattr(tokenizer, "all_special_ids", ())), dtype=ids.dtype, device=ids.device)
    return {"input_ids": torch.where(torch.isin(ids, marks), ids, torch.full_like(ids, token))}


@dataclass(frozen=True)
class _Shown:
    """What a target explains of the output of a text: the target with indices, and the classes or tokens that they count."""

    target: Target  # with indices
    output: torch.Tensor  # (classes,), or (positions, classes) of a region
    names: Names
    position: int | None  # that was asked for

    def category(self, scores: Scores) -> Category:
        inner = self.target.target if isinstance(self.target, Position) else self.target
        found = category_of_target(inner, as_array(self.output), self.names, scores)
        return found if self.position is None else replace(found, name=f"{found.name} (position {self.position})")


@dataclass(frozen=True, eq=False)
class OfText(Target):
    """A target of a text, whose classes or tokens may be given by name.

    A token is that at the mask, or after the end of the text, unless the target is a position and a token.
    """

    given: Target
    categories: Sequence[str] | None
    tokenizer: Any
    text: ReadText

    @property
    def is_of_classes(self) -> bool:
        return self.given.is_of_classes

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        self.of_output(output).target.check(output, chosen)

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        return self.of_output(output).target.relevance(output)

    def of_output(self, output: torch.Tensor) -> _Shown:
        """The target for an output of a batch of one."""
        place, inner = None, self.given
        if isinstance(inner, Position):
            place, inner = int(inner.position), inner.target
        if output.ndim != 3:
            checked_output(output)
            if place is not None:
                raise InputError(
                    "a position and a token are a target for models that return tokens; this one returns classes",
                    topic="sentences",
                )
            return _Shown(resolved(inner, self.categories), output[0], self.categories, None)
        known, features = len(self.tokenizer), output.shape[2]
        if features < known:
            return self._of_classes(place, inner, output)
        there = self._place() if place is None else self._checked_place(place, output.shape[1])
        target = inner.resolved(lambda token: self._index(token, features))
        return _Shown(Position(there, target), output[0, there], _Vocabulary(self.tokenizer, features), place)

    def _of_classes(self, place: int | None, inner: Target, output: torch.Tensor) -> _Shown:
        """The target for an output with classes of each token, (1, positions, classes)."""
        classes, names = output.shape[2], self.categories
        if place is None and not inner.is_of_positions:
            raise InputError(
                f"the model returns {classes} numbers for each token, not one for each of the {len(self.tokenizer)} tokens of "
                "the tokenizer. If they are classes, choose a token and its class, target=(2, 1), or lrpfx.Region(class) for "
                "all tokens that are of it. Otherwise explain a model with a head, or a module that computes one number from "
                "them",
                topic="sentences",
            )
        if names is not None and len(names) != classes:
            raise InputError(
                f"categories= has {len(names)} names of classes, but the model returns {classes} for each token",
                topic="classes-and-their-names",
            )
        if place is None:
            return _Shown(resolved(inner, names), output[0], names, None)
        there = self._checked_place(place, output.shape[1])
        return _Shown(Position(there, resolved(inner, names)), output[0, there], names, place)

    def _checked_place(self, place: int, length: int) -> int:
        if not -length <= place < length:
            raise InputError(f"position {place} is out of range: the text has {length} tokens", topic="sentences")
        return place

    def _place(self) -> int:
        """The position whose prediction is explained: that of the mask, or else the last."""
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

    def _index(self, token: Any, tokens: int) -> int:
        if not isinstance(token, str):
            return index_of(token, None, tokens)
        return index_of_token(self.tokenizer, token)


def position_of_prediction(tokenizer: Any, text: ReadText, output: torch.Tensor) -> int:
    """The position that is explained if a target names none, of an output (batch, positions, tokens). Raises `InputError`."""
    target = OfText(as_target(0), None, tokenizer, text).of_output(output).target
    assert isinstance(target, Position)
    return int(target.position)


class _Vocabulary(Sequence[str]):
    """The tokens of a vocabulary as text, by their ids."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.tokenizer.decode([index])
