"""Pictures of text: words from tokens, shapes of relevance, and tokens that must not be interpreted."""

import html.parser
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.errors import InputError
from lrpfx.text import heatmap
from lrpfx.text.pictures import _columns, _letters, visible
from lrpfx.text.tokens import Scheme, scheme_of

pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the film was unbelievably good",
    "naïve café — déjà vu",
    "日本語のテキスト",
    "an unbelievable film, good and naïve",
] * 4
SENTENCE = "the unbelievably naïve café film"


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=80, special_tokens=marks, show_progress=False))
    ids = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ids)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def unigram(split=True):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    tokenizer.decoder = decoders.Metaspace()
    marks = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.UnigramTrainer(vocab_size=70, special_tokens=marks, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def relevance_of(count, *more):
    return torch.randn(count, *more)


# --- words -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [word_piece, byte_level, unigram, lambda: unigram(split=False)])
@pytest.mark.parametrize("form", ["encoding", "ids", "tensor", "tokens"])
def test_tokens_are_joined_to_words(make, form):
    tokenizer = make()
    encoded = tokenizer(SENTENCE)
    ids = encoded["input_ids"]
    tokens = {"encoding": encoded, "ids": ids, "tensor": torch.tensor([ids]), "tokens": tokenizer.convert_ids_to_tokens(ids)}[
        form
    ]
    relevance = relevance_of(len(ids))
    found = heatmap(relevance, tokens, tokenizer)
    words = [word for word, special in zip(found.words, found.special, strict=True) if not special]
    assert words == SENTENCE.split()
    assert found.scores.sum() == pytest.approx(float(relevance.sum()))
    for word, places, score in zip(found.words, found.places, found.scores[0], strict=True):
        assert score == pytest.approx(float(relevance[list(places)].sum())), word
    apart = heatmap(relevance, tokens, tokenizer, join=False)
    assert len(apart.words) == len(ids) > len(found.words)
    assert np.allclose(apart.scores[0], relevance)


def test_special_tokens_are_known():
    tokenizer = word_piece()
    encoded = tokenizer("good film [MASK] 語語", "the film")
    found = heatmap(relevance_of(len(encoded["input_ids"])), encoded, tokenizer)
    marks = [word for word, special in zip(found.words, found.special, strict=True) if special]
    assert marks == ["[CLS]", "[SEP]", "[SEP]"]
    assert "[MASK]" in found.words  # it stands for text
    without = heatmap([0.1, 0.2, 0.3], ["[CLS]", "good", "[SEP]"])
    assert without.special == (True, False, True)


def test_padding_is_left_out_on_both_sides():
    tokenizer = word_piece()
    short = tokenizer("good film")["input_ids"]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        encoded = tokenizer(["good film", SENTENCE], padding=True)
        assert len(encoded["input_ids"][0]) > len(short)
        kept = np.array(encoded["attention_mask"][0], dtype=bool)
        relevance = np.where(kept, 1.0, 0.0)
        for tokens in (encoded, encoded["input_ids"]):
            found = heatmap(np.stack([relevance, relevance]), tokens, tokenizer, sample=0)
            assert found.words == heatmap([1.0] * len(short), short, tokenizer).words and found.others == {}
            assert found.scores.sum() == len(short)
        lost = heatmap(np.stack([relevance + 1, relevance]), encoded, tokenizer, sample=0)
        assert lost.others["padding"] == (float((~kept).sum()),)


def test_a_padding_token_that_ends_texts_is_padding_by_the_mask_alone():
    tokenizer = byte_level()
    encoded = tokenizer(["good", SENTENCE], padding=True)
    ids = encoded["input_ids"][0]
    assert heatmap(np.ones(len(ids)), ids, tokenizer).special.count(True) == len(ids) - sum(encoded["attention_mask"][0])
    assert not any(heatmap(np.ones((2, len(ids))), encoded, tokenizer, sample=0).special)


def test_other_marks_of_words():
    assert heatmap([1, 2, 3], ["un", "believably</w>", "good</w>"]).words == ("unbelievably", "good")
    assert heatmap([1, 2, 3], ["un@@", "believably", "good"]).words == ("unbelievably", "good")
    assert heatmap([1, 2, 3], ["un", "believably", "good"]).words == ("un", "believably", "good")
    assert heatmap([1, 2, 3, 4], ["▁caf", "<0xC3>", "<0xA9>", "▁good"]).words == ("café", "good")
    assert heatmap([1, 2, 3], ["ĠcafÃ", "©", "Ġgood"]).words == ("café", "good")
    assert heatmap([1, 2, 3], ["ĠcafÃ", "©", "Ġgood"], join=False).words == ("caf\ufffd", "\ufffd", "good")
    assert scheme_of(["##", "Ġa", "Ġb", "##c"]) is Scheme.BYTE_LEVEL  # GPT-2 has ## as a token, too


def test_an_encoding_of_the_package_tokenizers():
    tokenizer = word_piece().backend_tokenizer
    encoding = tokenizer.encode("unbelievably good")
    assert heatmap(np.ones(len(encoding.ids)), encoding).words == ("[CLS]", "unbelievably", "good", "[SEP]")
    assert heatmap(np.ones(len(encoding.ids)), encoding.ids, tokenizer).words == ("[CLS]", "unbelievably", "good", "[SEP]")


# --- shapes ------------------------------------------------------------------------------------------------------------------

TOKENS = ["a", "b", "c"]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 5), (1, 3, 5)])
def test_shapes_of_one_target(shape):
    relevance = torch.randn(shape)
    expected = relevance.reshape(3, -1).sum(-1)
    assert np.allclose(heatmap(relevance, TOKENS).scores, expected[None])
    assert np.allclose(heatmap(relevance.numpy(), TOKENS, targets="good").scores, expected[None])
    assert np.allclose(heatmap(relevance.bfloat16(), TOKENS).scores, expected[None], atol=0.1)


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3), (2, 3, 5), (2, 1, 3, 5)])
def test_shapes_of_several_targets(shape):
    relevance = torch.randn(shape)
    found = heatmap(relevance, TOKENS, targets=["good", "bad"])
    assert np.allclose(found.scores, relevance.reshape(2, 3, -1).sum(-1)) and found.targets == ("good", "bad")


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, r"does not fit 3 tokens"),
        ((2, 3), {}, r"targets=\[...\]; of several texts, choose one: sample="),
        ((2, 3, 5), {}, r"targets=\[...\]; of several texts, choose one: sample="),
        ((3, 3), {}, r"two ways: sum it over the embedding"),
        ((3, 3), {"sample": 0}, r"two ways"),
        ((2, 3), {"targets": ["a", "b", "c"]}, r"3 targets are named, but relevance has the shape \(2, 3\)"),
        ((2, 2, 3, 5), {"targets": ["a", "b"]}, "choose one: sample="),
        ((1, 1, 1, 3, 5), {}, "does not fit"),
        ((), {}, "does not fit"),
    ],
)
def test_shapes_that_do_not_fit(shape, options, message):
    with pytest.raises(lrpfx.InputError, match=message):
        heatmap(torch.randn(shape), TOKENS, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1.0, 2.0, 3.0], "abc"), {}, lrpfx.InputTypeError, "not one text"),
        (([1.0, 2.0, 3.0], [1, 2, 3]), {}, lrpfx.InputError, "need their tokenizer"),
        (([1.0, 2.0, 3.0], [1, "b", "c"]), {}, lrpfx.InputTypeError, "all strings or all ids"),
        (([1.0, 2.0, 3.0], 7), {}, lrpfx.InputTypeError, "not int"),
        (([1.0, 2.0, 3.0], {"ids": [1]}), {}, lrpfx.InputError, "no 'input_ids'"),
        (([1.0, float("nan"), 3.0], TOKENS), {}, lrpfx.InputError, "1 entries that are not finite"),
        (("abc", TOKENS), {}, lrpfx.InputTypeError, "not str"),
        (([1.0, 2.0, 3.0], TOKENS), {"scale": 0}, lrpfx.InputError, "scale is"),
        (([1.0, 2.0, 3.0], TOKENS), {"scale": "each"}, lrpfx.InputError, "scale is"),
        (([1.0, 2.0, 3.0], TOKENS), {"targets": [1]}, lrpfx.InputTypeError, "targets are names"),
        (([1.0, 2.0, 3.0], TOKENS), {"targets": []}, lrpfx.InputTypeError, "targets are names"),
        (([1.0, 2.0, 3.0], TOKENS), {"mask": [1, 1]}, lrpfx.InputError, "the mask has 2 entries for 3 tokens"),
        (([1.0, 2.0, 3.0], TOKENS), {"embedding": "word"}, lrpfx.InputError, "for the result of lrpfx.attribute"),
        (([[1.0, 2.0, 3.0]] * 2, [TOKENS, TOKENS]), {}, lrpfx.InputError, "these are 2 texts: pass sample="),
        (([[1.0, 2.0, 3.0]] * 2, [TOKENS, TOKENS]), {"sample": 2}, lrpfx.InputError, "sample=2, but there are 2 texts"),
    ],
)
def test_what_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        heatmap(*arguments, **options)


# --- the result of attribute -------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Tokens with positions that depend on them, as in RoBERTa, and types."""

    def __init__(self, vocabulary):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, 6)
        self.position_embeddings = nn.Embedding(40, 6)
        self.token_type_embeddings = nn.Embedding(2, 6)
        self.dense = nn.Linear(6, 3)

    def forward(self, input_ids, token_type_ids):
        positions = torch.cumsum((input_ids != 0).long(), 1)
        hidden = (
            self.word_embeddings(input_ids) + self.position_embeddings(positions) + self.token_type_embeddings(token_type_ids)
        )
        return self.dense(torch.relu(hidden).mean(1))


def test_the_result_of_attribute():
    tokenizer = word_piece()
    encoded = tokenizer([SENTENCE, "good film"], padding=True, return_tensors="pt")
    model = Classifier(len(tokenizer)).eval()
    inputs = {"input_ids": encoded["input_ids"], "token_type_ids": torch.zeros_like(encoded["input_ids"])}
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=inputs)
    found = lrpfx.attribute(explain_model, inputs, 1)
    shown = heatmap(found, encoded, tokenizer, sample=0)
    words = found.relevance["input_ids"]["word_embeddings"][0].sum(-1)
    assert np.allclose(shown.scores.sum(), words.sum())
    assert set(shown.others) == {"position_embeddings", "token_type_ids"}
    position = found.relevance["input_ids"]["position_embeddings"][0].sum()
    assert shown.others["position_embeddings"] == pytest.approx((float(position),))
    assert "position_embeddings" in shown.to_html() and "position_embeddings" in shown.to_terminal()
    several = heatmap(lrpfx.attribute(explain_model, inputs, targets=[0, 1]), encoded, tokenizer, targets=["a", "b"], sample=0)
    assert np.allclose(several.scores[1], shown.scores[0]) and several.others["position_embeddings"][1] == pytest.approx(
        position
    )
    both = heatmap(found, encoded, tokenizer, sample=0, embedding=["word_embeddings", "position_embeddings"])
    assert np.allclose(both.scores.sum(), float(words.sum() + position))
    with pytest.raises(lrpfx.InputError, match="pass sample="):
        heatmap(found, encoded, tokenizer)
    with pytest.raises(lrpfx.InputError, match="there is no embedding 'words'; there are word_embeddings"):
        heatmap(found, encoded, tokenizer, sample=0, embedding="words")
    with pytest.raises(lrpfx.InputError, match="pass input="):
        heatmap(found, encoded, tokenizer, sample=0, input="ids")


def test_one_tensor_as_the_input():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).eval()
    found = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), torch.tensor([[1, 2, 3]]), 0)
    assert np.allclose(heatmap(found, TOKENS).scores, found.relevance.sum(-1))


# --- colours -----------------------------------------------------------------------------------------------------------------


def test_scales():
    relevance = np.array([[1.0, -2.0, 0.0, 8.0], [0.5, 0.0, -0.25, -8.0]])
    tokens, targets = ["a", "b", "c", "[SEP]"], ["one", "two"]
    common = heatmap(relevance, tokens, targets=targets).shares()
    assert np.allclose(common, [[0.5, -1, 0, 1], [0.25, 0, -0.125, -1]])  # a special token does not make the text pale
    assert np.allclose(heatmap(relevance, tokens, targets=targets, scale="own").shares(), [[0.5, -1, 0, 1], [1, 0, -0.5, -1]])
    assert np.allclose(
        heatmap(relevance, tokens, targets=targets, scale=4).shares(), [[0.25, -0.5, 0, 1], [0.125, 0, -0.0625, -1]]
    )
    assert not heatmap([0.0, 0.0], ["a", "b"]).shares().any()
    assert heatmap([2.0], ["[SEP]"]).shares() == 1.0


def test_signs_have_opposite_colors_and_zero_is_white():
    text = heatmap([1.0, -1.0, 0.0], TOKENS).to_terminal(color=True, width=80)
    assert re.findall(r"48;2;(\d+;\d+;\d+);38;2;(\d+;\d+;\d+)m(.)", text) == [
        ("255;0;0", "0;0;0", "a"), ("0;0;255", "255;255;255", "b"), ("254;254;255", "0;0;0", "c"),
    ]  # fmt: skip


def contrast(one, other):
    def luminance(color):
        linear = [value / 3294.6 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted([luminance(one), luminance(other)], reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("cmap", ["bwr", "coldnhot", "seismic", "coleus", "000,fff"])
def test_letters_can_be_read(cmap):
    values = np.linspace(-1, 1, 41)
    for tokens in (["a"] * 41, ["[SEP]"] * 41):
        text = heatmap(values, tokens, cmap=cmap).to_terminal(color=True, width=200)
        for codes in re.findall(r"48;2;(\d+);(\d+);(\d+);38;2;(\d+);(\d+);(\d+)m", text):
            color = list(map(int, codes))
            assert contrast(color[:3], color[3:]) >= 4.5, (cmap, color)
    assert _letters((119, 119, 119)) == (0, 0, 0)


# --- hostile tokens ----------------------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "\x1b[31mred\x1b[0m",
    "line\nbreak\r\ttab",
    "\u202etxt.exe\u202c",
    "a\x00b\x7f\x9b",
    "x" * 5000,
    "&lt;b&gt;",
    "שלום",
    "👩\u200d👩\u200d👧",
    "\ud800",
    "",
    " ",
    "\u2028",
]  # fmt: skip


class Elements(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def test_hostile_tokens_are_shown_as_text(tmp_path):
    shown = heatmap(np.linspace(-1, 1, len(HOSTILE)), HOSTILE, targets=["<b>&\x1b[2J"])
    found = Elements()
    found.feed(shown.to_html())
    assert found.tags == {"table", "tbody", "tr", "th", "td", "bdi"}
    assert found.attributes == {"class", "style", "scope", "title"}
    assert "<script>alert(1)</script>" in found.text and "<b>&␛[2J" in found.text
    for color in (True, False):
        text = shown.to_terminal(color=color, width=60)
        plain = re.sub(r"\x1b\[[0-9;]+m", "", text) if color else text
        assert not any((ord(one) < 32 and one != "\n") or one in "\x7f\x9b\u202e\u202c\u2028" for one in plain)
        assert all(_columns(line) <= 62 for line in plain.splitlines())
    for suffix in ("html", "png", "txt"):
        assert shown.save(tmp_path / f"picture.{suffix}").stat().st_size > 0
    assert "\x1b" not in (tmp_path / "picture.txt").read_text(encoding="utf-8")


def test_what_a_token_looks_like():
    assert visible("a\nb\tc") == "a↵b⇥c" and visible("\u202e") == "‹202e›" and visible("\x1b") == "␛"
    assert (
        visible("") == "∅" and visible("  ") == "␣␣" and visible("x" * 41) == "x" * 40 + "…" and visible("x" * 40) == "x" * 40
    )
    assert visible("👩\u200d👧") == "👩\u200d👧"
    assert _columns("日本") == 4 and _columns("e\u0301") == 1


# --- forms -------------------------------------------------------------------------------------------------------------------


def test_lines_are_wrapped_and_labels_stay_in_their_column(monkeypatch):
    shown = heatmap(np.ones((2, 30)), ["word"] * 30, targets=["good", "bad"])
    lines = shown.to_terminal(color=False, width=40).splitlines()
    assert (
        all(len(line) <= 40 for line in lines) and lines[0].startswith("good  word{+1}") and lines[1].startswith("      word")
    )
    assert sum(line.count("word") for line in lines) == 60
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in str(shown)
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[48;2;" in str(shown)


def test_numbers_are_titles():
    text = heatmap([0.12345, -2.0, 0.0], TOKENS)._repr_html_()
    assert re.findall(r'title="([^"]+)"', text) == ["+0.123", "-2", "+0"]


def test_files(tmp_path):
    shown = heatmap([0.1, -2.0, 0.0], ["good", "bad", "日本"], targets="one")
    page = shown.save(tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and '<meta charset="utf-8">' in page and "日本" in page and "http" not in page
    image = Image.open(shown.save(tmp_path / "a.png"))
    colors = {color for _, color in image.convert("RGB").getcolors(100000)}
    assert image.width == 900 and (0, 0, 255) in colors
    assert shown.save(tmp_path / "a.txt").read_text(encoding="utf-8") == "one  good{+0.1} bad{-2} 日本{+0}\n"
    assert shown.to_image(width=150).height > shown.to_image(width=900).height
    with pytest.raises(lrpfx.InputError, match=r"not a '\.svg'"):
        shown.save(tmp_path / "a.svg")
    (tmp_path / "file").write_text("")
    for suffix in ("html", "png", "txt"):
        assert shown.save(tmp_path / "deep" / f"a.{suffix}").is_file()
        with pytest.raises(lrpfx.InputError, match="cannot be written"):
            shown.save(tmp_path / "file" / f"a.{suffix}")


def test_nothing_to_show():
    assert heatmap([], []).words == () and heatmap([0.0], ["[PAD]"]).words == ()
    for empty in (heatmap([], []), heatmap([0.0], ["[PAD]"])):
        assert empty.to_html() and empty.to_image() and empty.to_terminal(color=False, width=80) == ""


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["東", "##京", "##の", "film", "##s"], ("東", "京", "の", "films")),
        (["▁今日", "は", "良い", "▁film"], ("今日", "は", "良い", "film")),
        (["▁ภา", "พ", "ยน", "ตร์", "ดี"], ("ภา", "พ", "ยน", "ตร์", "ดี")),
        (["▁ด", "ี"], ("ดี",)),  # a mark belongs to its letter
        (["▁good", "电影", "s"], ("good", "电影", "s")),
        (["Ġä»", "Ĭæ", "Ĺ¥", "Ġgood"], ("今日", "good")),  # tokens that end within a letter
        (
            ["Ġprint", "(", "x", "_", "1", "))", "Ġdon", "'t", "Ġun", "believably"],
            ("print", "(", "x_1", "))", "don't", "unbelievably"),
        ),
    ],
)
def test_words_where_no_blank_is(tokens, words):
    assert heatmap([1.0] * len(tokens), tokens).words == words


def test_words_that_are_drawn_apart():
    """The first word, which takes most relevance of many language models, is pale and has no say in the scale."""
    shown = heatmap([9.0, -1.0, 2.0], ["the", "not", "good"])
    apart = shown.apart()
    assert apart.special == (True, False, False) and shown.special == (False, False, False)
    assert apart.shares().tolist() == [[1.0, -0.5, 1.0]] and (apart.scores == shown.scores).all()
    assert shown.apart(-1, 0).shares().tolist() == [[1.0, -1.0, 1.0]]
    with pytest.raises(InputError, match="the text has 3 words, and none at 3"):
        shown.apart(3)
