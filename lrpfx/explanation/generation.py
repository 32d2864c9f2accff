"""Explanations of what a language model generates: each generated token, and what it came from, from one forward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from typing_extensions import Unpack

from lrpfx import pictures
from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.errors import InputError, InputTypeError, first_lines, printable
from lrpfx.explanation.answers import Array, Balance
from lrpfx.explanation.compiled import CompiledModel
from lrpfx.explanation.explanation import caption_of
from lrpfx.explanation.saving import save_picture, show
from lrpfx.explanation.texts import Encoding, ReadText, check_fits, index_of_token, positions_of, read, readable, texts_in
from lrpfx.images.entry_places import EntryPlaces
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.request.targets import Class, Contrast, Position, Target
from lrpfx.support.files import as_path
from lrpfx.support.identity.plain_data import PlainData
from lrpfx.support.numbers import counted, is_whole, whole_number
from lrpfx.support.prefix_caches import filled_cache, is_cache, plain_cache
from lrpfx.support.table import Table
from lrpfx.support.tensors import as_array, on_device_of
from lrpfx.text.generation import GenerationHeatmap
from lrpfx.text.scores import of_attribution

if TYPE_CHECKING:
    from pandas import DataFrame

#: Of the picture of the matrix, in pixels: the largest width, and the least of a sheet.
_WIDTH, _NARROWEST = 1200, 640
_TOPIC = "sentences"
#: The argument of models of transformers that a cache is, and what its layers hold.
_CACHE, _KEPT = "past_key_values", ("keys", "values")
#: The columns of the image and of all words, in tables, and how many pictures of it stand in a row of a sheet.
_IMAGE, _WORDS, _BESIDE = "image", "words", 4
#: What ends a sentence.
_ENDS = (".", "!", "?", "。", "！", "？")
#: As `against`: at each place, the token with the largest logit of all others.
RUNNER_UP = "runner-up"


@dataclass(frozen=True, eq=False, repr=False)
class GenerationExplanation(PlainData):
    """What each generated token came from: a matrix of relevance, with a row for each and a column for each token before it.

    It is plain data.

    `name`: the first 60 characters of the prompt. `text`: what was generated. `tokens`: the ids of the prompt and of what was
    generated. `start`: how many of them are the prompt's. `relevance`: (generated, tokens that were read): entry (i, j) is the
    relevance of token j for the logit of token `start` + i, which is zero for tokens that come later. `logits` and
    `probabilities`: of the generated tokens. `rules`: the composite, as text. `picture`: the matrix with its words. `against`:
    the ids of the tokens that the generated ones were explained against, or None; relevance and `logits` then are those of the
    differences of logits.
    """

    name: str
    text: str
    tokens: Array
    start: int
    relevance: Array
    logits: Array
    probabilities: Array
    rules: str
    picture: GenerationHeatmap
    against: Array | None = None

    def __repr__(self) -> str:
        return printable(f"<explanation of {len(self.logits)} tokens after {self.name}: {self.text}; {self.rules}>")

    def __str__(self) -> str:
        return str(self.table)

    @property
    def balances(self) -> list[Balance]:
        """For each generated token, its logit and the sum of its row: biases and constants have the rest."""
        return [Balance(float(logit), float(row.sum())) for logit, row in zip(self.logits, self.relevance, strict=True)]

    @property
    def table(self) -> Table:
        """A row for each generated token: its figures, and the tokens with the largest relevance for it."""
        columns = {"token": "str", **dict.fromkeys(("logit", "probability", "prompt", "generated"), "float64"), "most": "str"}
        rows = []
        for number, (logit, probability, row) in enumerate(zip(self.logits, self.probabilities, self.relevance, strict=True)):
            best = np.argsort(-row[: self.start + number], kind="stable")[:3]
            most = ", ".join(f"{self.picture.words[place]} {row[place]:+.3g}" for place in best if row[place] > 0)
            figures = map(float, (logit, probability, row[: self.start].sum(), row[self.start :].sum()))
            rows.append((self.picture.targets[number], *figures, most))
        return Table(columns, rows)

    def by_span(self, spans: Mapping[str, tuple[int, int]] | None = None) -> Table:
        """Relevance of parts of the prompt: a row for each generated token, whose columns add up to its row of the matrix.

        `spans`: the first token of each part, such as a document, and the one after its last. The sentences of the prompt by
        default. What is in no part, and what was generated before, have columns of their own. Raises `InputError` for parts
        that overlap or are not in the prompt, and `InputTypeError` for what are no names with two whole numbers each.
        """
        named = _sentences(self.picture.words[: self.start]) if spans is None else _checked_spans(spans)
        owner = np.full(self.relevance.shape[1], len(named))
        for number, (name, (first, end)) in enumerate(named.items()):
            if not 0 <= first < end <= self.start:
                raise InputError(f"{name!r} is not in the prompt, which has the tokens 0 to {self.start - 1}", topic=_TOPIC)
            if (owner[first:end] != len(named)).any():
                raise InputError(f"{name!r} has tokens of another span", topic=_TOPIC)
            owner[first:end] = number
        has_rest = bool((owner[: self.start] == len(named)).any())
        owner[self.start :] = len(named) + 1
        columns = [*named, *(["other tokens"] if has_rest else []), "generated"]
        if len({*columns, "token"}) <= len(columns):
            raise InputError('spans are not called "token", "other tokens" or "generated"', topic=_TOPIC)
        places = [*range(len(named)), *([len(named)] if has_rest else []), len(named) + 1]
        rows = [
            (target, *(float(row[owner == place].sum()) for place in places))
            for target, row in zip(self.picture.targets, self.relevance, strict=True)
        ]
        return Table({"token": "str", **dict.fromkeys(columns, "float64")}, rows)

    def to_pandas(self) -> "DataFrame":
        """The matrix as a DataFrame, a row for each generated token and each token before it.

        Raises `InputError` without pandas.
        """
        columns = {"place": "int64", "generated": "str", "from": "int64", "token": "str", "relevance": "float64"}
        rows = [
            (self.start + number, self.picture.targets[number], place, self.picture.words[place], float(row[place]))
            for number, row in enumerate(self.relevance)
            for place in range(self.start + number)
        ]
        return Table(columns, rows).to_pandas()

    def heatmap(self) -> GenerationHeatmap:
        """The matrix in colours."""
        return self.picture

    def sheet(self) -> Image.Image:
        """The matrix as a picture, with a legend and the share of the logits that it shows."""
        caption = f"rows: generated tokens; columns: what came before them\n{caption_of(self.rules, self.balances)}"
        legend = ("against the token", "for the token")
        matrix = self.picture.to_image(width=_WIDTH)
        canvas = Image.new("RGB", (max(matrix.width, _NARROWEST), matrix.height), "white")  # so that letters are not enlarged
        canvas.paste(matrix, ((canvas.width - matrix.width) // 2, 0))
        width, scale = canvas.width + canvas.width // 40, self.picture.largest
        return pictures.sheet([canvas], caption=caption, legend=legend, width=width, cmap=self.picture.cmap, scale=scale)

    def show(self) -> None:
        """Show the picture: in a notebook, or in the system's viewer."""
        show(self.sheet())

    def save(self, path: str | Path) -> Path:
        """Write the matrix.

        `path`: ends in .html (point at a token to see what it came from), .png or .txt. Returns the path.
        """
        return self.picture.save(path)

    def _repr_html_(self) -> str:
        return self.picture.to_html()


@dataclass(frozen=True, eq=False, repr=False)
class ImageGenerationExplanation(GenerationExplanation):
    """What each token came from that a model generated after an image and a text: words, and regions of the image.

    The image has one column of the matrix, in place of its marks in the prompt, so that rows sum as those of texts do.

    `image`: as it was given. `maps`: (generated, height, width), what each pixel of it has of that column. `place`: of the
    column. Other arguments: as for `GenerationExplanation`.
    """

    image: Image.Image = field(kw_only=True)
    maps: Array = field(kw_only=True)
    place: int = field(kw_only=True)

    @property
    def shares(self) -> Table:
        """A row for each generated token: its logit, and what the image, all words before it, and constants have of it."""
        columns = {"token": "str", **dict.fromkeys(("logit", _IMAGE, _WORDS, "constants"), "float64")}
        rows = [
            (target, balance.output, float(row[self.place]), balance.inputs - float(row[self.place]), balance.constants)
            for target, balance, row in zip(self.picture.targets, self.balances, self.relevance, strict=True)
        ]
        return Table(columns, rows)

    def by_region(self, rows: int = 3, columns: int = 3) -> Table:
        """Relevance of parts of the image, and of all words: a row for each generated token, whose columns add up to its row.

        `rows`, `columns`: how many parts the image is divided into, downwards and across. What stands in no pixel, such as
        padding, has a column of its own if there is any. Raises `InputError` for more parts than pixels.
        """
        down, across = (whole_number(one, "rows= and columns= are numbers", 1, _TOPIC) for one in (rows, columns))
        high, wide = self.maps.shape[1:]
        if down > high or across > wide:
            raise InputError(f"the image has {high} rows and {wide} columns of pixels, not {down} and {across}", topic=_TOPIC)
        parts = {
            f"row {row} column {column}": self.maps[:, lines[0] : lines[-1] + 1, places[0] : places[-1] + 1].sum((1, 2))
            for row, lines in enumerate(np.array_split(np.arange(high), down), 1)
            for column, places in enumerate(np.array_split(np.arange(wide), across), 1)
        }
        of_image = self.relevance[:, self.place]
        outside = of_image - self.maps.sum((1, 2))
        if (np.abs(outside) > 1e-9 * np.abs(self.relevance).max(initial=0.0)).any():
            parts["outside the image"] = outside
        parts[_WORDS] = self.relevance.sum(1) - of_image
        figures = np.stack(list(parts.values()), 1).tolist()
        return Table(
            {"token": "str", **dict.fromkeys(parts, "float64")},
            [(target, *row) for target, row in zip(self.picture.targets, figures, strict=True)],
        )

    def overlay(self, number: int, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The image under its relevance for one generated token.

        `number`: of the token, from 0, or from -1 backwards. `style`, `settings`: as for `lrpfx.pictures.overlay`; all tokens
        have one scale by default. Raises `InputError` for a token that there is not.
        """
        count = len(self.maps)
        number = whole_number(number, "a generated token has a number", -count, _TOPIC, count - 1)
        style = styled(style, settings)
        style = style if style.scale is not None else replace(style, scale=pictures.scale_of(list(self.maps)) or 1.0)
        return pictures.overlay(self.image, self.maps[number], style=style)

    def sheet(self) -> Image.Image:
        """The matrix as a picture, and below it the image for each generated token, with both shares."""
        above = super().sheet()
        shown = [
            (f"{token}: {_IMAGE} {of_image:+.3g}, {_WORDS} {of_words:+.3g}", self.overlay(number))
            for number, (token, _, of_image, of_words, _) in enumerate(self.shares.rows)
        ]
        empty = ("", Image.new("RGB", self.image.size, "white"))
        shown += [empty] * (-len(shown) % _BESIDE)
        rows = [shown[first : first + _BESIDE] for first in range(0, len(shown), _BESIDE)]
        below = pictures.sheet(rows, width=above.width)
        whole = Image.new("RGB", (above.width, above.height + below.height), "white")
        whole.paste(above, (0, 0))
        whole.paste(below, (0, above.height))
        return whole

    def save(self, path: str | Path) -> Path:
        """Write the matrix.

        `path`: ends in .png (the sheet), .html (point at a token to see what it came from) or .txt. Returns the path.
        """
        return save_picture(self.sheet(), as_path(path)) if as_path(path).suffix.lower() == ".png" else super().save(path)


@dataclass(frozen=True)
class PromptWithImage:
    """A prompt with an image, as a processor has read both.

    `text`: whose encoding holds all inputs with an entry for each token. `further`: the other inputs. `places`: where the
    entries of `pixels`, one of these, lie on the image. `mark`: the id of the tokens that stand for the image.
    """

    text: ReadText
    further: Mapping[str, torch.Tensor]
    image: Image.Image
    places: EntryPlaces
    pixels: str
    mark: int


def explain_generated(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_new_tokens: int | None,
    continuation: Any,
    against: str | int | None,
    past_key_values: Any = None,
) -> GenerationExplanation:
    """Generate, unless the continuation is given, and explain each token. `compiled_for`: as for `explain_sentences`.

    `prompt`: a text in any form, or a `PromptWithImage`.
    """
    _check_decodes(model)
    seen = prompt if isinstance(prompt, PromptWithImage) else None
    before = {} if past_key_values is None else {_CACHE: past_key_values}
    known = int(plain_cache(past_key_values)[0]["keys"].shape[-2]) if is_cache(past_key_values) else 0
    if before and not known:
        raise InputTypeError(
            f"past_key_values is a cache of transformers, as model(ids, use_cache=True) returns it, not "
            f"{type(past_key_values).__name__}",
            topic=_TOPIC,
        )
    text = _one_text(tokenizer, prompt) if seen is None else seen.text
    if before:
        _check_prefix(model, text.ids, past_key_values)
    mask = text.encoding.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise InputError("the prompt has padding, which a single text does not need: pass it without", topic=_TOPIC)
    if text.name and not text.is_chat and not text.name.endswith(tokenizer.decode(text.ids[-1:])):
        _check_end(tokenizer, text.ids[-1])
    if continuation is not None and max_new_tokens is not None:
        raise InputError("max_new_tokens= is for what the model generates, not for a continuation= that is given", topic=_TOPIC)
    start, positions = len(text.ids), positions_of(model) if seen is None else None  # those of its patches are others
    if seen is None:
        check_fits(model, tokenizer, text)
    further = {} if seen is None else seen.further
    if continuation is not None:
        added = _ids_of(tokenizer, continuation)
    else:
        count = whole_number(20 if max_new_tokens is None else max_new_tokens, "max_new_tokens is a number", 1, _TOPIC)
        if positions is not None and known + start + count > positions:
            raise InputError(
                f"the prompt has {known + start} tokens and the model {positions} positions, so that it has no room for "
                f"{count} more: pass a shorter prompt or max_new_tokens={max(1, positions - known - start)}",
                topic=_TOPIC,
            )
        added = _generated_after(model, text, count, past_key_values) if before else _generated(model, text, further, count)
    if seen is None:
        check_fits(model, tokenizer, ReadText("", _extended(text.encoding, added)))
    elif seen.mark in added:
        raise InputError(
            f"{_name_of(tokenizer, seen.mark)!r} stands for an image, of which there is none among the generated tokens: pass "
            "a continuation= without it",
            topic=_TOPIC,
        )
    segment = None if before else _segment_of_added(model, tokenizer, text.encoding, further, added[:-1])
    read_by_model = _extended(text.encoding, added[:-1], segment)  # nothing reads the last token
    inputs: dict[str, Any] = {**readable(model, read_by_model), **further}
    if before:
        inputs = _without_mask(inputs) | before
    compiled = compiled_for(inputs)
    if compiled.reference is not None:
        raise InputError("reference= has no meaning for generated tokens: explain them one by one", topic=_TOPIC)
    others = None if against is None else _others(compiled, inputs, tokenizer, added, against)
    of_tokens: list[Target] = [Class(one) for one in added]
    if others is not None:
        of_tokens = [Contrast({one: 1.0, other: -1.0}) for one, other in zip(added, others, strict=True)]
    # Counted from the end: a prompt that was learned stands before the tokens that are read.
    targets = [Position(number - len(added), one) for number, one in enumerate(of_tokens)]
    attribution = attribute(compiled.module, inputs, targets=targets, output=compiled.output)
    output = attribution.output
    _check_scores(output, tokenizer)
    relevance, _ = of_attribution(attribution, None, None)
    matrix = as_array(relevance[:, 0].double().sum(-1))
    _check_causal(matrix, start)
    scores = output[0, -len(added) :].double()
    logits, probabilities = (_chosen(one, added) for one in (scores, scores.softmax(-1)))
    names = [_name_of(tokenizer, token) for token in added]
    if others is not None:
        logits = logits - _chosen(scores, others)
        names = [f"{name}, not {_name_of(tokenizer, other)}" for name, other in zip(names, others, strict=True)]
    drawn = pictures_of_text.heatmap(matrix, read_by_model, tokenizer, targets=names, join=False)
    found = GenerationExplanation(
        text.title(tokenizer),
        tokenizer.decode(added),
        np.array([*text.ids, *added]),
        start,
        matrix,
        as_array(logits),
        as_array(probabilities),
        compiled.explain_model.composite,
        GenerationHeatmap.of(drawn, start),
        None if others is None else np.array(others),
    )
    return found if seen is None else _with_image(found, seen, as_array(attribution.relevance[seen.pixels]))


def _with_image(found: GenerationExplanation, seen: PromptWithImage, pixels: Array) -> ImageGenerationExplanation:
    """The explanation with one column for the image in place of its marks. `pixels`: relevance, a row for each token."""
    marks = np.flatnonzero(found.tokens[: found.start] == seen.mark)
    place, others = int(marks[0]), marks[1:]
    rows = pixels.reshape(len(pixels), -1).astype(np.float64)
    matrix = found.relevance.copy()
    matrix[:, place] = matrix[:, marks].sum(1) + rows.sum(1)
    matrix = np.delete(matrix, others, 1)
    kept = [one for one in range(found.relevance.shape[1]) if one not in others]
    drawn, start = found.picture, found.start - len(others)
    picture = replace(
        drawn,
        words=tuple(_IMAGE if one == place else drawn.words[one] for one in kept),
        special=tuple(one != place and drawn.special[one] for one in kept),
        places=tuple((one,) for one in range(len(kept))),
        scores=matrix,
        start=start,
    )
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    values |= {"tokens": np.delete(found.tokens, others), "start": start, "relevance": matrix, "picture": picture}
    maps = np.stack([seen.places.undo(row) for row in rows])
    return ImageGenerationExplanation(**values, image=seen.image, maps=maps, place=place)


def _one_text(tokenizer: Any, prompt: Any) -> ReadText:
    prompts, several = texts_in(prompt)
    if several:
        raise InputError(f"one prompt is explained at a time, not {len(prompts)}: call it for each of them", topic=_TOPIC)
    return read(tokenizer, prompts[0])


def _check_scores(output: torch.Tensor, tokenizer: Any) -> None:
    if output.ndim != 3 or output.shape[2] < len(tokenizer):
        raise InputError(
            f"the explained output has the shape {tuple(output.shape)}, not (batch, positions, tokens), which a model that "
            "generates text has",
            topic=_TOPIC,
        )


def _chosen(values: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Of each row, the value of a token."""
    return values.gather(1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]


def _others(
    compiled: CompiledModel, inputs: dict[str, Any], tokenizer: Any, added: Sequence[int], against: str | int
) -> list[int]:
    """The token that each generated one is explained against."""
    if against == RUNNER_UP:
        output = compiled.outputs_of(on_device_of(compiled.module, inputs))
        _check_scores(output, tokenizer)
        best = output[0, -len(added) :].topk(2, -1).indices.tolist()
        return [first if first != one else second for one, (first, second) in zip(added, best, strict=True)]
    ids = [index_of_token(tokenizer, against)] if isinstance(against, str) else _ids_of(tokenizer, [against])
    if not 0 <= ids[0] < len(tokenizer):
        raise InputError(f"against= is a token of the tokenizer, 0 to {len(tokenizer) - 1}, not {ids[0]}", topic=_TOPIC)
    if ids[0] in added:
        raise InputError(
            f"{_name_of(tokenizer, ids[0])!r} was generated itself, and nothing is explained against itself: pass another, "
            f"or against={RUNNER_UP!r}",
            topic=_TOPIC,
        )
    return ids * len(added)


def _checked_spans(spans: Any) -> dict[str, tuple[int, int]]:
    """Names of parts and where they begin and end. `InputTypeError` for anything else."""
    found: dict[Any, Any] = dict(spans) if isinstance(spans, Mapping) else {None: spans}
    for name, ends in found.items():
        if not isinstance(name, str) or not (isinstance(ends, (tuple, list)) and len(ends) == 2 and all(map(is_whole, ends))):
            raise InputTypeError(
                "spans are names with the first token and the one after the last, such as {'document': (0, 12)}, not "
                f"{spans!r}",
                topic=_TOPIC,
            )
    return {name: (int(first), int(end)) for name, (first, end) in found.items()}


def _sentences(words: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The sentences of a text by their first words: the first token of each, and the one after its last."""
    found: dict[str, tuple[int, int]] = {}
    first = 0
    for place, word in enumerate(words):
        if word.strip() in _ENDS or place == len(words) - 1:
            name = " ".join(word.strip() for word in words[first : min(place, first + 3) + 1])
            name += " …" if place > first + 3 else ""
            found[name if name not in found else f"{name} ({first})"] = first, place + 1
            first = place + 1
    return found


def _check_decodes(model: Any) -> None:
    """Raise `InputError` for a model of transformers that does not continue texts."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} reads the prompt with an encoder and writes with a decoder; only models that continue a "
            "text are explained here: lrpfx.attribute explains the others, with decoder_input_ids as an input",
            topic=_TOPIC,
        )
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and not can_generate():
        raise InputError(
            f"{type(model).__name__} does not generate text: pass a model that does, such as one of AutoModelForCausalLM, or "
            "explain its own output with lrpfx.explain",
            topic=_TOPIC,
        )


def _check_end(tokenizer: Any, last: int) -> None:
    """Raise `InputError` if the tokenizer puts a mark at the end of a prompt."""
    if last in getattr(tokenizer, "all_special_ids", ()):
        raise InputError(
            f"the tokenizer ends the text with {tokenizer.decode([last])}, so that nothing continues it: a model that "
            "continues texts needs a tokenizer that adds nothing at the end",
            topic=_TOPIC,
        )


def _generated(model: nn.Module, text: ReadText, further: Mapping[str, torch.Tensor], count: int) -> list[int]:
    """The tokens that the model goes on with, those with the largest logits. `further`: its inputs beside the text."""
    generate = getattr(model, "generate", None)
    if not callable(generate):
        raise InputError(
            f"{type(model).__name__} has no method `generate`: pass what it generated as continuation=, a text or its token "
            "ids",
            topic=_TOPIC,
        )
    given = on_device_of(model, {**readable(model, text.encoding), **further})
    try:
        with torch.no_grad():
            found = generate(**given, max_new_tokens=count, do_sample=False)
    except Exception as error:  # of the model's own code
        raise InputError(
            f"{type(model).__name__}.generate failed for the prompt ({first_lines(error)}): pass what it generates as "
            "continuation=, a text or its token ids",
            topic=_TOPIC,
        ) from error
    found = getattr(found, "sequences", found)
    added: list[int] = found[0, len(text.ids) :].tolist()
    if not added:
        raise InputError("the model generated nothing", topic=_TOPIC)
    return added


def _generated_after(model: nn.Module, text: ReadText, count: int, cache: Any) -> list[int]:
    """The same after a prefix, of which the model has a cache. Its own `generate` would want the tokens of the prefix."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    added: list[int] = []
    for _ in range(count):
        inputs = on_device_of(model, _without_mask(readable(model, _extended(text.encoding, added))))
        with torch.no_grad():
            output = model(**inputs, past_key_values=filled_cache(cache, cache))
        added.append(int(output.logits[0, -1].argmax()))
        if added[-1] in ends:
            break
    return added


def _check_prefix(model: nn.Module, ids: Sequence[int], cache: Any) -> None:
    """Raise `InputError` for a cache that is not of this model, or not of one text: what it makes of a token tells."""
    try:
        with torch.no_grad():
            made = model(**on_device_of(model, {"input_ids": torch.tensor([ids[:1]])}), use_cache=True)
    except Exception:  # of the model's own code, which may have no such argument: running it with the cache tells more
        return
    own = getattr(made, _CACHE, None)
    if not is_cache(own):
        return

    def form(one: Any) -> list[list[tuple[Any, ...]]]:
        """Of each layer, the sizes of its keys and values but for the number of tokens, and their dtype."""
        return [[(*one[key].shape[:-2], *one[key].shape[-1:], one[key].dtype) for key in _KEPT] for one in plain_cache(one)]

    if form(cache) != form(own):
        forms = [(counted(len(one), "layer"), *one[0][0]) for one in (form(own), form(cache))]
        ours, theirs = (f"{layers} of {tuple(sizes)} in {dtype}" for layers, *sizes, dtype in forms)
        raise InputError(
            f"past_key_values has {theirs} (texts, heads, features), and {type(model).__name__} makes {ours} of one text: pass "
            "what this model returns for the prefix, as model(ids, use_cache=True).past_key_values",
            topic=_TOPIC,
        )


def _without_mask(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs without their mask, which hides nothing and lacks the tokens of a prefix."""
    return {name: value for name, value in inputs.items() if name != "attention_mask"}


def _ids_of(tokenizer: Any, continuation: Any) -> list[int]:
    """The tokens of a continuation: a text, or ids."""
    if isinstance(continuation, str):
        ids = list(map(int, tokenizer(continuation, add_special_tokens=False)["input_ids"]))
    elif isinstance(continuation, (Sequence, torch.Tensor, np.ndarray)):
        ids = read(tokenizer, continuation).ids if len(continuation) else []
    else:
        raise InputTypeError(f"a continuation is a text or its token ids, not {type(continuation).__name__}", topic=_TOPIC)
    if not ids:
        raise InputError("the continuation is empty", topic=_TOPIC)
    return ids


def _segment_of_added(
    model: nn.Module, tokenizer: Any, encoding: Encoding, further: Mapping[str, torch.Tensor], added: Sequence[int]
) -> int | None:
    """The segment (`token_type_ids`) of what is generated, None for that of the prompt's last token.

    Some models read one segment in both directions, such as PaliGemma its prompt, and write another one. So another is taken
    where what the model says at the end of the prompt depends on tokens behind it, and does not in the other segment.
    """
    if not added or "token_type_ids" not in readable(model, encoding):
        return None
    last = int(encoding["token_type_ids"][0, -1])
    marks = {added[0], *getattr(tokenizer, "all_special_ids", ())}
    other = next((one for one in range(len(tokenizer)) if one not in marks), added[0])

    def spread(segment: int) -> float:
        """How far the scores at the end of the prompt move with the tokens behind it, in calls of one shape."""
        found = []
        for tokens in (added, [other] * len(added)):
            given = {**readable(model, _extended(encoding, tokens, segment)), **further}
            with torch.no_grad():
                output = model(**on_device_of(model, given))
            scores = getattr(output, "logits", output)
            if not isinstance(scores, torch.Tensor) or scores.ndim != 3:
                return 0.0  # what is explained is checked later
            found.append(scores[0, -len(added) - 1].double())
        return float((found[0] - found[1]).abs().max())

    as_before = spread(last)
    changed = int(last == 0)
    return changed if as_before > 0 and spread(changed) < as_before else None


def _extended(encoding: Encoding, added: Sequence[int], segment: int | None = None) -> Encoding:
    """An encoding with further tokens: no padding, of a segment or the last one, at the next positions."""
    count = len(added)
    more = {
        "input_ids": torch.tensor([list(added)], dtype=torch.long),
        "attention_mask": torch.ones(1, count, dtype=torch.long),
        "mm_token_type_ids": torch.zeros(1, count, dtype=torch.long),  # text
    }
    if segment is not None:
        more["token_type_ids"] = torch.full((1, count), segment, dtype=torch.long)

    def rest(name: str, value: torch.Tensor) -> torch.Tensor:
        if name in more:
            return more[name]
        last = value[:, -1:].expand(1, count)
        return last + torch.arange(1, count + 1) if name == "position_ids" else last

    return Encoding({name: torch.cat([value, rest(name, value)], 1) for name, value in encoding.items()})


def _check_causal(matrix: Array, start: int) -> None:
    """Raise `InputError` if a token has relevance for one that comes before it."""
    places = np.arange(matrix.shape[1])[None] >= start + np.arange(len(matrix))[:, None]
    if (np.abs(matrix[places]) > 1e-9 * np.abs(matrix).max(initial=0.0)).any():
        raise InputError(
            "tokens have relevance for others that stand before them: the model reads texts in both directions, as encoders "
            "do, and does not generate them token by token",
            topic=_TOPIC,
        )


def _name_of(tokenizer: Any, token: int) -> str:
    """A token as text, its blank left out."""
    text = str(tokenizer.decode([token]))
    return text.strip() or text or f"token {token}"
