"""Tokens as text: which of them belong to one word, what they stand for, and which are special or padding."""

import enum
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError, InputTypeError


class Scheme(enum.Enum):
    """How the tokens of a vocabulary mark the limits of words."""

    NONE = ""  # every token is a word
    WORD_PIECE = "##"  # before a token that continues a word
    BYTE_LEVEL = "Ġ"  # before a token that starts a word; each character stands for a byte
    SENTENCE_PIECE = "▁"  # before a token that starts a word; <0x41> stands for a byte
    END_OF_WORD = "</w>"  # after a token that ends a word
    CONTINUED = "@@"  # after a token that does not end a word

    def marks(self, token: str) -> bool:
        """Whether a token has the mark, and something besides it."""
        if self is Scheme.NONE or len(token) <= len(self.value):
            return False
        at_end = self in (Scheme.END_OF_WORD, Scheme.CONTINUED)
        return token.endswith(self.value) if at_end else token.startswith(self.value)


def scheme_of(tokens: Iterable[str]) -> Scheme:
    """The scheme whose marks most of the tokens have; a vocabulary tells more than a text."""
    known = [scheme for scheme in Scheme if scheme is not Scheme.NONE]
    counts = dict.fromkeys(known, 0)
    for token in tokens:
        for scheme in known:
            counts[scheme] += scheme.marks(token)
    best = max(known, key=counts.__getitem__)
    return best if counts[best] else Scheme.NONE


@dataclass(frozen=True)
class Text:
    """The tokens of one text, padding included."""

    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # marks of the model, such as [CLS], which stand for no text
    padding: tuple[bool, ...]
    word_ids: tuple[int | None, ...] | None  # the word of each token, if the tokenizer tells it
    scheme: Scheme

    def groups(self, join: bool) -> list[tuple[int, ...]]:
        """The places of the tokens of each word, or of each token. Padding is left out."""
        groups: list[list[int]] = []
        for place, token in enumerate(self.tokens):
            if self.padding[place]:
                continue
            before = groups[-1][-1] if groups else None
            if join and before is not None and before == place - 1 and self._continues(place, token):
                groups[-1].append(place)
            else:
                groups.append([place])
        return [tuple(group) for group in groups]

    def _continues(self, place: int, token: str) -> bool:
        """Whether a token belongs to the word of the token before it."""
        if self.special[place] or self.special[place - 1]:
            return False
        before = self.tokens[place - 1]
        if _ends_word(self._piece(place - 1), self._piece(place), self.scheme in (Scheme.BYTE_LEVEL, Scheme.SENTENCE_PIECE)):
            return False
        if self.word_ids is not None:
            starts = self.scheme in (Scheme.BYTE_LEVEL, Scheme.SENTENCE_PIECE) and token.startswith(self.scheme.value)
            return self.word_ids[place] == self.word_ids[place - 1] and not starts
        if self.scheme is Scheme.WORD_PIECE:
            return self.scheme.marks(token)
        if self.scheme in (Scheme.BYTE_LEVEL, Scheme.SENTENCE_PIECE):
            return not token.startswith((self.scheme.value, "Ċ"))
        if self.scheme is Scheme.END_OF_WORD:
            return not before.endswith(self.scheme.value)
        return self.scheme is Scheme.CONTINUED and self.scheme.marks(before)

    def _piece(self, place: int) -> str:
        """What one token stands for, without its mark; a part of a letter is U+FFFD."""
        token = self.tokens[place]
        at_end = self.scheme in (Scheme.END_OF_WORD, Scheme.CONTINUED)
        if self.scheme is Scheme.WORD_PIECE or at_end:
            return token.removesuffix(self.scheme.value) if at_end else token.removeprefix(self.scheme.value)
        return self.text_of((place,))

    def text_of(self, group: Sequence[int]) -> str:
        """What the tokens at these places stand for."""
        tokens = [self.tokens[place] for place in group]
        if any(self.special[place] for place in group):
            return "".join(tokens)
        if self.scheme is Scheme.BYTE_LEVEL:
            return _without_space(_from_bytes_as_characters("".join(tokens)))
        if self.scheme is Scheme.SENTENCE_PIECE:
            return _without_space(_with_bytes("".join(tokens).replace(self.scheme.value, " ")))
        if self.scheme is Scheme.WORD_PIECE:
            pieces = [token.removeprefix(self.scheme.value) for token in tokens]
            without_mark = pieces[0] and _has_no_blanks(pieces[0][0])  # a word of its own here, whatever the mark says
            return "".join(pieces if without_mark else (tokens[0], *pieces[1:]))
        if self.scheme in (Scheme.END_OF_WORD, Scheme.CONTINUED):
            return "".join(token.removesuffix(self.scheme.value) for token in tokens)
        return "".join(tokens)


#: Scripts that put no blanks between words, as the names of their characters begin.
_WITHOUT_BLANKS = tuple(
    ["CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"]
)


def _ends_word(before: str, after: str, at_symbols: bool) -> bool:
    """Whether a word ends between two tokens where no blank is: in a script without them, or at a symbol, as in code.

    `at_symbols`: whether symbols are not told apart by the tokenizer's own marks.
    """
    if not before or not after or "\ufffd" in (before[-1], after[0]):
        return False  # parts of one letter
    if unicodedata.category(after[0]).startswith("M") or "\u200d" in (before[-1], after[0]):
        return False  # marks belong to the letter before them
    at_end = before[-1], after[0]
    if any(map(_has_no_blanks, at_end)):
        return True
    return at_symbols and _is_symbol(at_end[0]) != _is_symbol(at_end[1])


def _has_no_blanks(letter: str) -> bool:
    """Whether a character belongs to a script that puts no blanks between words."""
    return unicodedata.name(letter, "").startswith(_WITHOUT_BLANKS)


def _is_symbol(letter: str) -> bool:
    """Whether a character is no part of words, unlike an apostrophe."""
    return letter not in "_'’" and unicodedata.category(letter)[0] in "PS"


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _without_space(text: str) -> str:
    """The text without the space before a word."""
    return text[1:] if text.startswith(" ") and len(text) > 1 else text


def _with_bytes(text: str) -> str:
    """A text in which <0x41> stands for a byte."""
    parts = _BYTE.split(text)
    joined = b"".join(bytes([int(part, 16)]) if place % 2 else part.encode() for place, part in enumerate(parts))
    return joined.decode(errors="replace")


def _from_bytes_as_characters(text: str) -> str:
    """A text whose characters stand for bytes. Others, in tokens that were added to a vocabulary, stand for themselves."""
    known = _byte_of_character()
    joined = b"".join(bytes([known[one]]) if one in known else one.encode(errors="replace") for one in text)
    return joined.decode(errors="replace")


@cache
def _byte_of_character() -> dict[str, int]:
    """Printable characters of Latin-1 stand for their own byte, the characters from U+0100 on for the other bytes, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


#: Special tokens as models usually write them, for tokens without a tokenizer. [UNK] and [MASK] stand for text.
_SPECIAL = re.compile(
    r"\[(CLS|SEP|PAD|BOS|EOS)\]|<(s|/s|pad|bos|eos|cls|sep)>|<\|(endoftext|im_start|im_end|begin_of_text|eot_id)\|>"
)
_PADDING = ("[PAD]", "<pad>")


def read_text(tokens: Any, tokenizer: Any, mask: Any, sample: int | None) -> Text:
    """The text that a tokenizer has returned, or a list of its tokens or ids. Raises `InputError` and `InputTypeError`."""
    encoding = tokens if isinstance(tokens, Mapping) or is_native_encoding(tokens) else None
    word_ids: Any = None
    if isinstance(encoding, Mapping):
        if "input_ids" not in encoding:
            raise InputError(f"the encoding has no 'input_ids', only {', '.join(map(str, encoding))}", topic="text-heatmaps")
        place = _sample(encoding["input_ids"], sample)
        mask = encoding.get("attention_mask") if mask is None else mask
        words = getattr(encoding, "word_ids", None)
        word_ids = words(place or 0) if getattr(encoding, "is_fast", False) and callable(words) else None
        tokens = encoding["input_ids"]
    elif encoding is not None:
        mask = encoding.attention_mask if mask is None else mask
        word_ids, tokens = encoding.word_ids, encoding.tokens
        place = None
    else:
        place = _sample(tokens, sample)
    row = _row(tokens, place, "tokens")
    if any(isinstance(token, str) for token in row):
        if not all(isinstance(token, str) for token in row):
            raise InputTypeError("tokens are all strings or all ids", topic="text-heatmaps")
        names, ids = row, None
    else:
        ids = [int(token) for token in row]
        names = _names(ids, tokenizer)
    special = _special(names, ids, tokenizer)
    kept = None if mask is None else [bool(value) for value in _row(mask, place, "mask")]
    if kept is not None and len(kept) != len(names):
        raise InputError(f"the mask has {len(kept)} entries for {len(names)} tokens", topic="text-heatmaps")
    padding = _padding(names, tokenizer) if kept is None else [not value for value in kept]
    if word_ids is not None:
        word_ids = tuple(word_ids)
    vocabulary = getattr(tokenizer, "get_vocab", None)
    scheme = scheme_of(vocabulary() if callable(vocabulary) else names)
    return Text(tuple(names), tuple(special), tuple(padding), word_ids, scheme)


def is_native_encoding(tokens: Any) -> bool:
    """Whether `tokens` is an encoding of the package tokenizers."""
    has_all = all(hasattr(tokens, name) for name in ("ids", "tokens", "word_ids", "attention_mask"))
    return has_all and not callable(tokens.tokens)


def _sample(tokens: Any, sample: int | None) -> int | None:
    """Which row of a batch to take; None for the tokens of a single text."""
    rows = _rows(tokens)
    if rows is None:
        return None
    if sample is None and rows != 1:
        raise InputError(f"these are {rows} texts: pass sample=, the number of the one to show", topic="text-heatmaps")
    if sample is not None and not -rows <= sample < rows:
        raise InputError(f"sample={sample}, but there are {rows} texts", topic="text-heatmaps")
    return (sample or 0) % rows


def _rows(values: Any) -> int | None:
    """The number of rows of a batch; None for a single row."""
    shape = getattr(values, "shape", None)
    if shape is not None:
        return len(values) if len(shape) == 2 else None
    nested = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    return len(values) if nested and isinstance(values[0], (list, tuple)) else None


def _row(values: Any, place: int | None, what: str) -> list[Any]:
    """One row of values as a list."""
    if isinstance(values, str):
        raise InputTypeError(
            "tokens are a list of tokens or ids, not one text: pass what the tokenizer returns for it", topic="text-heatmaps"
        )
    row = values if place is None or _rows(values) is None else values[place]
    listed = row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else row
    if not isinstance(listed, Iterable) or isinstance(listed, (str, Mapping)):
        raise InputTypeError(
            f"{what} are a list of one entry for each token, not {type(values).__name__}", topic="text-heatmaps"
        )
    listed = list(listed)
    if any(isinstance(item, (list, tuple)) for item in listed):
        raise InputError(f"{what} have more than two dimensions", topic="text-heatmaps")
    return listed


def _names(ids: list[int], tokenizer: Any) -> list[str]:
    """The tokens with these ids."""
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    if callable(convert):
        names = list(convert(ids))
    elif callable(getattr(tokenizer, "id_to_token", None)):
        names = [tokenizer.id_to_token(number) for number in ids]
    elif not ids:
        names = []
    else:
        raise InputError("token ids need their tokenizer: pass heatmap(relevance, ids, tokenizer)", topic="text-heatmaps")
    unknown = [number for number, name in zip(ids, names, strict=True) if name is None]
    if unknown:
        raise InputError(f"the tokenizer has no token with the id {unknown[0]}", topic="text-heatmaps")
    return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names]


def _special(names: list[str], ids: list[int] | None, tokenizer: Any) -> list[bool]:
    text = {getattr(tokenizer, "unk_token", None), getattr(tokenizer, "mask_token", None)}  # they stand for text
    listed = getattr(tokenizer, "all_special_tokens", None)
    if listed is None:
        return [_SPECIAL.fullmatch(name) is not None for name in names]
    known, numbers = set(map(str, listed)), set(getattr(tokenizer, "all_special_ids", ()))
    of_ids = [False] * len(names) if ids is None else [number in numbers for number in ids]
    return [(name in known or by_id) and name not in text for name, by_id in zip(names, of_ids, strict=True)]


def _padding(names: list[str], tokenizer: Any) -> list[bool]:
    """Which tokens at the ends are padding. A token that also ends a text, as in many language models, is not known to be."""
    token = getattr(tokenizer, "pad_token", None)
    if token is not None and token == getattr(tokenizer, "eos_token", None):
        return [False] * len(names)
    known = (token,) if token is not None else _PADDING
    inside = [place for place, name in enumerate(names) if name not in known]
    first, last = (inside[0], inside[-1]) if inside else (len(names), -1)
    return [not first <= place <= last for place in range(len(names))]
