"""What the front door takes as a text: strings, chats, token ids, and what a tokenizer returned; and what a model can read."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.support.optional_packages import is_frame
from lrpfx.text.tokens import is_native_encoding

#: Inputs of models of text. What else an encoding or a row of a data set holds is not for the model, such as labels.
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


class Encoding(dict[str, torch.Tensor]):
    """A model's inputs for one text, each of shape (1, tokens), with the word of each token if the tokenizer tells it."""

    def __init__(self, values: Mapping[str, torch.Tensor], words: Sequence[int | None] | None = None) -> None:
        super().__init__(values)
        self.words = words

    @property
    def is_fast(self) -> bool:
        """Whether the words are known, under the name that the tokenizers of Hugging Face have for it."""
        return self.words is not None

    def word_ids(self, batch_index: int = 0) -> Sequence[int | None] | None:
        """The word of each token."""
        return self.words


@dataclass(frozen=True)
class ReadText:
    """A text as the model reads it. `name`: "" if only its ids are known. `is_chat`: whether a template has decided its end."""

    name: str
    encoding: Encoding
    is_chat: bool = False

    @property
    def ids(self) -> list[int]:
        """The ids of its tokens."""
        return list(map(int, self.encoding["input_ids"][0].tolist()))

    def title(self, tokenizer: Any) -> str:
        """The first 60 characters of the text, without the marks of the model."""
        ids, marks = self.ids, set(getattr(tokenizer, "all_special_ids", ()))
        name = self.name or tokenizer.decode([one for one in ids if one not in marks] or ids)
        return name if len(name) <= 60 else f"{name[:59]}…"

    @property
    def last(self) -> int:
        """The place of the last token that is not padding."""
        mask = self.encoding.get("attention_mask")
        if mask is None or mask.ndim != 2 or bool(mask[0, -1]):
            return -1
        return int(mask[0].nonzero()[-1]) if bool(mask.any()) else -1


def texts_in(given: Any) -> tuple[list[Any], bool]:
    """The texts, and whether there are several: `read` reads each of them. Raises `InputError` and `InputTypeError`."""
    if is_frame(given):
        raise InputTypeError(
            "a DataFrame is not a text: pass the column that holds the texts, such as frame['text']", topic="sentences"
        )
    if _is_pair(given):
        raise InputError(
            "a tuple of two texts may be a pair that the model reads together, or two texts: pass the pair as tokenizer(first, "
            'second, return_tensors="pt"), and two texts as a list',
            topic="sentences",
        )
    if isinstance(given, Mapping):
        found, several = _texts_of_mapping(given)
    elif isinstance(given, str) or _is_chat(given) or _is_row_of_ids(given) or is_native_encoding(given):
        found, several = [given], False
    elif isinstance(given, np.ndarray) and given.ndim == 0 and (given.dtype == object or _holds_text(given)):
        return texts_in(given.item())
    elif isinstance(given, (torch.Tensor, np.ndarray)) and given.dtype != object and not _holds_text(given):
        if given.ndim not in (1, 2):
            raise InputError(
                f"token ids have the shape (tokens,) or (texts, tokens), not {tuple(given.shape)}", topic="sentences"
            )
        found, several = (list(given), len(given) != 1) if given.ndim == 2 else ([given], False)
    else:
        several = isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray))
        found = list(given) if several else [given]
    if not found:
        raise InputError("the list of texts is empty", topic="sentences")
    return found, several


def read(tokenizer: Any, text: Any) -> ReadText:
    """One text as the model reads it. Raises `InputError` and `InputTypeError`."""
    if isinstance(text, str):
        if not text.strip():
            raise InputError("the text is empty", topic="sentences")
        return _encoded(tokenizer, text)
    if isinstance(text, Mapping):
        found, several = _texts_of_mapping(text)
        if several:
            raise InputError(
                f"an encoding among several texts holds {len(found)} texts; pass them one by one", topic="sentences"
            )
        (text,) = found
    if _is_chat(text):
        return _chat(tokenizer, text)
    if is_native_encoding(text):
        text = Encoding({"input_ids": _row(text.ids), "attention_mask": _row(text.attention_mask)}, list(text.word_ids))
    elif not isinstance(text, Encoding):
        if _is_pair(text):
            raise InputTypeError(
                'a pair of texts is given as the tokenizer returns it: tokenizer(first, second, return_tensors="pt")',
                topic="sentences",
            )
        if not (_is_row_of_ids(text) or isinstance(text, (torch.Tensor, np.ndarray))):
            raise InputTypeError(
                f"a text is a string, a list of token ids, what the tokenizer returns, or a list of messages, each with a role "
                f"and its content, not {type(text).__name__}",
                topic="sentences",
            )
        text = Encoding({"input_ids": _row(text)})
    if not text["input_ids"].shape[1]:
        raise InputError("the text is empty", topic="sentences")
    return ReadText("", _completed(tokenizer, text))


def _completed(tokenizer: Any, encoding: Encoding) -> Encoding:
    """An encoding with all that the tokenizer would return: a mask without padding, and one segment."""
    names, ids = getattr(tokenizer, "model_input_names", ()), encoding["input_ids"]
    defaults = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    missing = {name: value for name, value in defaults.items() if name in names and name not in encoding}
    return Encoding({**encoding, **missing}, encoding.words)


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(one, str) for one in given)


def _is_chat(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, Mapping) and "role" in one for one in given)


def _is_row_of_ids(given: Any) -> bool:
    integers = (int, np.integer)
    return (
        isinstance(given, (list, tuple))
        and all(isinstance(one, integers) and not isinstance(one, bool) for one in given)
        and bool(given)
    )


def _holds_text(given: Any) -> bool:
    return isinstance(given, np.ndarray) and given.dtype.kind in "US"


def _texts_of_mapping(given: Mapping[Any, Any]) -> tuple[list[Any], bool]:
    """The chat or the encodings that a mapping holds, and whether it is a batch of several."""
    if isinstance(given, Encoding):
        return [given], False
    if "role" in given and "content" in given:
        return [[given]], False
    if "input_ids" not in given:
        if _is_chat(given.get("messages")):
            return [given["messages"]], False
        raise InputTypeError(
            f"a mapping with the keys {', '.join(map(repr, given)) or '(none)'} is not a text: pass the text in it, or what "
            "the tokenizer returns, which has 'input_ids'",
            topic="sentences",
        )
    strange = [
        name
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in OF_TEXT
    ]
    if strange:
        raise InputError(
            f"the encoding holds {strange[0]!r}, which is not text: lrpfx.attribute explains inputs of several kinds",
            topic="sentences",
        )
    values = {name: given[name] for name in OF_TEXT if given.get(name) is not None}
    ids = values["input_ids"]
    nested = (
        ids.ndim == 2
        if isinstance(ids, (torch.Tensor, np.ndarray))
        else bool(ids) and not isinstance(ids[0], (int, np.integer))
    )
    rows = len(ids) if nested else 1
    words = getattr(given, "word_ids", None) if getattr(given, "is_fast", False) else None
    found: list[Any] = []
    for place in range(rows):
        row = {name: _row(value[place] if nested else value) for name, value in values.items()}
        if len({one.shape for one in row.values()}) > 1:
            shapes = ", ".join(f"{name} {one.shape[1]}" for name, one in row.items())
            raise InputError(f"the parts of the encoding have different lengths: {shapes}", topic="sentences")
        found.append(Encoding(row, list(words(place)) if callable(words) else None))
    return found, rows != 1


def _row(values: Any) -> torch.Tensor:
    """Whole numbers for each token, of shape (1, tokens)."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(f"token ids are whole numbers: {first_lines(error)}", topic="sentences") from error
    if found.ndim != 1:
        raise InputError(f"the token ids of one text have the shape (tokens,), not {tuple(found.shape)}", topic="sentences")
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise InputTypeError(f"token ids are whole numbers, not {found.dtype}", topic="sentences")
    return found.long()[None]


def _encoded(tokenizer: Any, text: str) -> ReadText:
    given = tokenizer(text, return_tensors="pt")
    if not isinstance(given, Mapping) or "input_ids" not in given:
        raise InputTypeError(
            f"the tokenizer returned {type(given).__name__} without input_ids; pass one of Hugging Face", topic="sentences"
        )
    words = getattr(given, "word_ids", None) if getattr(given, "is_fast", False) else None
    values = {str(name): value for name, value in given.items()}
    return ReadText(text, Encoding(values, list(words(0)) if callable(words) else None))


def _chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> ReadText:
    """Messages in the template of the tokenizer: the model answers them, or goes on with its own last message."""
    template = getattr(tokenizer, "apply_chat_template", None)
    if not callable(template):
        raise InputError(
            "the tokenizer has no template for chats (apply_chat_template): pass the text itself", topic="sentences"
        )
    own = messages[-1]["role"] == "assistant"
    further = {"continue_final_message": True} if own else {"add_generation_prompt": True}
    try:
        given = template(list(messages), return_tensors="pt", return_dict=True, **further)
    except LrpfxError:
        raise
    except Exception as error:  # templates are programs, and raise anything
        raise InputError(
            f"the tokenizer cannot write these messages as one text: {first_lines(error)}", topic="sentences"
        ) from error
    (encoding,), _ = _texts_of_mapping(given)
    encoding = _completed(tokenizer, encoding)
    content = messages[-1].get("content")
    return ReadText(content if isinstance(content, str) and content.strip() else "a chat", encoding, is_chat=True)


def readable(model: Any, encoding: Encoding) -> dict[str, torch.Tensor]:
    """The parts of an encoding that the model's forward takes. Those that it lacks are left out if they say nothing."""
    parameters = inspect.signature(model.forward).parameters.values() if isinstance(model, nn.Module) else ()
    if not parameters or any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters):
        return dict(encoding)
    taken = {one.name for one in parameters}
    plain = {"attention_mask": 1, "token_type_ids": 0}  # no padding, and one segment
    silent = {name for name, number in plain.items() if name in encoding and bool((encoding[name] == number).all())}
    return {name: value for name, value in encoding.items() if name in taken or name not in silent}


def check_fits(model: nn.Module, tokenizer: Any, text: ReadText) -> None:
    """Raise `InputError` for a text or a tokenizer that is too large for the tables of a model."""
    words = _words_of(model)
    known = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    if words is not None and known > words:
        raise InputError(
            f"the tokenizer has {known} tokens, but the model's embedding has {words}: it belongs to another model, or tokens "
            "were added to it after model.resize_token_embeddings(len(tokenizer))",
            topic="sentences",
        )
    limit = min((one for one in (words, known) if one), default=None)
    outside = [one for one in text.ids if one < 0 or (limit is not None and one >= limit)]
    if outside:
        owner = "tokenizer" if limit == known else "model's embedding"
        raise InputError(f"the text has the token id {outside[0]}, but the {owner} has {limit} tokens", topic="sentences")
    positions = positions_of(model)
    if positions is not None and len(text.ids) > positions:
        raise InputError(
            f"the text has {len(text.ids)} tokens, but the model has {positions} positions: cut it, for example with "
            f"tokenizer(text, truncation=True, max_length={positions}, return_tensors='pt')",
            topic="sentences",
        )


def index_of_token(tokenizer: Any, token: str, topic: str = "sentences") -> int:
    """The id of a text that is one token. `InputError` for others."""
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise InputError(f"{token!r} is {len(ids)} tokens, not one; a token at the start of a word has its blank", topic=topic)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if ids[0] == unknown and token != getattr(tokenizer, "unk_token", None):
        raise InputError(f"the tokenizer does not know {token!r}", topic=topic)
    return int(ids[0])


def _words_of(model: nn.Module) -> int | None:
    """The number of tokens that a model of Hugging Face embeds."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):  # how models of transformers say that they have none
        return None
    return found.num_embeddings if isinstance(found, nn.Embedding) else None


def positions_of(model: nn.Module) -> int | None:
    """The number of positions that a model has learned embeddings for; rotary and relative positions have no limit."""
    found = []
    for path, module in model.named_modules():
        name = path.rpartition(".")[2].lower()
        if isinstance(module, nn.Embedding) and ("pos" in name or name == "wpe") and "rel" not in name:
            first = getattr(module, "offset", None)  # OPT's and BART's tables begin with entries for padding, as RoBERTa's do
            if first is None:
                first = 0 if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - int(first))
    return min(found, default=None)
