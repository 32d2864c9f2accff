"""Explanations of an image with a text, as models read both: the image's pixels and the text's tokens, with their shares."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.ledger import Ledger
from lrpfx.errors import InputError, InputTypeError, first_lines
from lrpfx.explanation.answers import Array
from lrpfx.explanation.compiled import Compiled, CompiledModel, Origin, Run, keep_origin
from lrpfx.explanation.explanation import Explanation
from lrpfx.explanation.generation import PromptWithImage
from lrpfx.explanation.joint import AnswerOfInput, AnswerOfInputs, JointExplanation, placed_on
from lrpfx.explanation.sentences import OfText, TextExplanation, named_tokens
from lrpfx.explanation.texts import OF_TEXT, Encoding, ReadText
from lrpfx.images.entry_places import EntryPlaces, entry_places
from lrpfx.images.geometry import Geometry
from lrpfx.images.opening import OpenedImage, opened_images
from lrpfx.request.targets import Target
from lrpfx.support.tensors import as_array
from lrpfx.text.scores import chosen_embeddings

_TOPIC = "several-inputs"
_IDS, _IMAGES = OF_TEXT[0], "pixel_values"


def explain_image_text(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    model: nn.Module,
    processor: Any,
    given: Any,
    targets: Sequence[Target],
    join: bool,
) -> JointExplanation:
    """Explain what a model says about an image and a text. `given`: one of each, by any names.

    `processor`: makes the model's inputs of both, as those of transformers do. Raises `InputError` and `InputTypeError`.
    """
    names, photograph, text = _both(given)
    picture = photograph.image
    encoding, places = _read(processor, picture, text)
    inputs = placed_on(model, encoding)
    read = ReadText(text if isinstance(text, str) else "", Encoding({_IDS: encoding[_IDS]}), is_chat=True)
    tokenizer = getattr(processor, "tokenizer", processor)
    compiled = compiled_for(inputs)
    if compiled.reference is not None:
        raise InputError("reference= is for inputs of one kind: leave it out for an image with a text", topic=_TOPIC)
    asked = tuple(OfText(one, compiled.categories, tokenizer, read) for one in targets)
    both = _CompiledBoth(compiled, names, places)
    output, categories, answers = both.explained(inputs, asked)
    of_image, of_text = (both.answers_of(name, answers) for name in names)
    rules, scores = compiled.explain_model.composite, compiled.scores
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    whole = Geometry.of_whole(picture.height, picture.width)
    image = Explanation(photograph.name, output, categories, of_image, rules, scores, picture, whole, pixels)
    relevance, titles = np.stack([one.input_relevance.sum(-1) for one in of_text]), [str(one.category) for one in of_text]
    drawn = pictures_of_text.heatmap(relevance, read.encoding, tokenizer, targets=titles, join=join)
    title, ids = read.title(tokenizer), as_array(inputs[_IDS][0])
    of_words = TextExplanation(title, output, categories, of_text, rules, scores, ids, drawn)
    parts = dict(zip(names, (image, of_words), strict=True))
    found = JointExplanation(title, output, categories, answers, rules, scores, names, parts)
    keep_origin(found, Origin(both, inputs, asked, output))
    return found


def prompt_with_image(model: nn.Module, processor: Any, given: Any) -> PromptWithImage:
    """An image and a text as a processor reads them, for a model that goes on with them. `given`: as above."""
    _, photograph, text = _both(given)
    tensors, places = _read(processor, photograph.image, text)
    ids = tensors[_IDS]
    mark = _mark_of(processor, model)
    if mark not in ids[0].tolist():
        raise InputError(
            "which tokens stand for the image is not known: a processor of transformers names them, processor.image_token_id",
            topic=_TOPIC,
        )
    of_tokens = {name: one for name, one in tensors.items() if one.shape == ids.shape and not one.is_floating_point()}
    read = ReadText(text if isinstance(text, str) else "", Encoding(of_tokens), is_chat=True)
    further = placed_on(model, {name: one for name, one in tensors.items() if name not in of_tokens})
    return PromptWithImage(read, further, photograph.image, places, _IMAGES, mark)


def _read(processor: Any, picture: Image.Image, text: Any) -> tuple[dict[str, torch.Tensor], EntryPlaces]:
    """The model's inputs, and where those of the image lie on it. Labels are for training alone."""
    words = _prompt(processor, text)
    encoding = _processed(processor, picture, words)
    places = entry_places(lambda one: _processed(processor, one, words)[_IMAGES].double().numpy(), picture)
    return {name: one for name, one in encoding.items() if isinstance(one, torch.Tensor) and name != "labels"}, places


def _mark_of(processor: Any, model: nn.Module) -> int:
    """The id of the tokens that stand for an image; -1 if nothing tells."""
    config = getattr(model, "config", None)
    found = [getattr(processor, "image_token_id", None)]
    found += [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    return next((one for one in found if isinstance(one, int)), -1)


class _CompiledBoth(Compiled):
    """A compiled model for an image and a text."""

    def __init__(self, compiled: CompiledModel, names: tuple[str, str], places: EntryPlaces) -> None:
        self.compiled, self.names, self.places = compiled, names, places
        self.categories, self.record = compiled.categories, compiled.record

    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        (asked,) = targets
        output, _, answers = self.explained(inputs, asked, record)
        return Run([output], [answers], [tuple(asked)], self.compiled.explain_model.composite, self.compiled.scores)

    def explained(
        self, inputs: Any, targets: Sequence[Any], record: Sequence[str] = ()
    ) -> tuple[Array, Any, tuple[AnswerOfInputs, ...]]:
        """The output that the first target chooses, the names of its classes, and the answers."""
        answers: list[AnswerOfInputs] = []
        shown: list[Any] = []
        for target in targets:
            options: dict[str, Any] = {"output": self.compiled.output, "record": (*self.record, *record)}
            found = attribute(self.compiled.module, inputs, target, **options)
            shown.append(target.of_output(found.output))
            tokens = found.relevance[_IDS]
            if isinstance(tokens, Mapping):
                tokens, _ = chosen_embeddings(dict(tokens), None)
            pixels = as_array(found.relevance[_IMAGES]).astype(np.float64)
            maps = {self.names[0]: self.places.undo(pixels), self.names[1]: as_array(tokens[0])}
            shares = np.array([pixels.sum(), maps[self.names[1]].sum(dtype=np.float64)])
            layers = {name: as_array(value) for name, value in found.layers.items()}
            answers.append(AnswerOfInputs(shown[-1].category(self.compiled.scores), shares, layers, maps=maps))
        output = as_array(shown[0].output).T
        return output, named_tokens(shown[0].names, output), tuple(answers)

    def answers_of(self, name: str, answers: Sequence[AnswerOfInputs]) -> tuple[AnswerOfInput, ...]:
        """The answers of one input: of the image, those of its pixels, in one channel."""
        return tuple(
            AnswerOfInput(
                one.category,
                one.maps[name][None] if name == self.names[0] else one.maps[name],
                one.layers,
                others=float(one.input_relevance.sum() - one.maps[name].sum(dtype=np.float64)),
            )
            for one in answers
        )

    def ledger(self, inputs: Any, target: Target) -> Ledger:
        return self.compiled.ledger(inputs, target)

    def spatial_layers(self, axes: int = 2) -> list[str]:
        return self.compiled.spatial_layers(axes)

    def axis_of_channels(self, name: str, dimensions: int) -> int:
        return self.compiled.axis_of_channels(name, dimensions)


def _both(given: Any) -> tuple[tuple[str, str], OpenedImage, Any]:
    """The names of the image and of the text, and both."""
    kinds = {} if not isinstance(given, Mapping) else {name: _is_image(one) for name, one in given.items()}
    if sorted(kinds.values()) != [False, True]:
        raise InputTypeError(
            'with a processor, what is explained is a dict of one image and one text: {"image": image, "text": text}',
            topic=_TOPIC,
        )
    image, text = sorted(kinds, key=lambda name: not kinds[name])
    if not isinstance(given[text], (str, list, tuple)):
        raise InputTypeError(f"the text is a string or a list of messages, not {type(given[text]).__name__}", topic=_TOPIC)
    (photograph,) = opened_images(given[image])
    return (str(image), str(text)), photograph, given[text]


def _is_image(value: Any) -> bool:
    is_array = isinstance(value, (np.ndarray, torch.Tensor))
    return is_array or isinstance(value, (Image.Image, os.PathLike)) or hasattr(value, "read")


def _prompt(processor: Any, text: Any) -> str:
    """The text with the mark of the image, from which the processor knows where the image is."""
    if not isinstance(text, str):
        try:
            text = processor.apply_chat_template(list(text), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever a template raises
            raise InputError(f"the processor cannot write these messages: {first_lines(error)}", topic=_TOPIC) from error
    mark = getattr(processor, "image_token", None)
    if isinstance(mark, str) and mark not in text:
        raise InputError(
            f"the text has no place for the image: this processor marks it by {mark!r}, such as {f'{mark} {text[:40]}'!r}",
            topic=_TOPIC,
        )
    prompt: str = text
    return prompt


def _processed(processor: Any, picture: Image.Image, text: str) -> Mapping[str, Any]:
    try:
        made: Mapping[str, Any] = processor(images=[picture], text=[text], return_tensors="pt")
    except Exception as error:  # whatever a processor raises
        raise InputError(f"the processor failed: {first_lines(error)}", topic=_TOPIC) from error
    missing = [name for name in (_IDS, _IMAGES) if not isinstance(made.get(name), torch.Tensor)]
    if missing:
        raise InputError(
            f"the processor returned {', '.join(map(str, made)) or 'nothing'}, and no {missing[0]!r}: one of transformers for "
            "models of images and texts returns both",
            topic=_TOPIC,
        )
    if len(made[_IDS]) != 1:
        raise InputError(f"the processor made {len(made[_IDS])} texts of one", topic=_TOPIC)
    return made
