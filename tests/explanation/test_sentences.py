"""Sentences through the same door: relevance of tokens, for classes and for the next token."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import DeepLIFT, EpsilonPlus
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.sentences import TextExplanations

WORDS = ["[PAD]", "[CLS]", "[SEP]", "the", "film", "was", "good", "bad"]


class Tokenizer:
    """The methods of a Hugging Face tokenizer that are used."""

    all_special_ids = (0, 1, 2)
    mask_token_id = None

    def __init__(self, ends=True):
        """`ends`: whether it ends a text with [SEP]."""
        self.ends = ends

    def __len__(self):
        return len(WORDS)

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = [WORDS.index(word) for word in text.split()]
        ids = [1, *ids, *([2] if self.ends else [])] if add_special_tokens else ids
        if return_tensors == "pt":
            return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        return {"input_ids": ids}

    def convert_ids_to_tokens(self, ids):
        return [WORDS[int(number)] for number in ids]

    def decode(self, ids):
        return " ".join(WORDS[int(number)] for number in ids)


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 8, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    labels = {"id2label": {0: "dull", 1: "great"}, "label2id": {"dull": 0, "great": 1}}
    return BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=16, **labels)).eval()


def generator():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)).eval()


def test_classes():
    model = classifier()
    explainer = lrpfx.Explainer(model, tokenizer=Tokenizer())
    found = explainer("the film was good", "great")
    inputs = Tokenizer()("the film was good", return_tensors="pt")
    explain_model = lrpfx.transform(model, lrpfx.composites.AttnLRP(), example_inputs=inputs)
    direct = lrpfx.attribute(explain_model, inputs, 1)
    expected = direct.relevance["input_ids"]
    np.testing.assert_allclose(found.relevance, expected[0].sum(-1).numpy(), rtol=1e-4, atol=1e-7)
    assert found.target.name == "great" and found.rules == "AttnLRP()"
    assert found.heatmap().words[1:5] == ("the", "film", "was", "good")
    assert {one.name for one in found.top()} == {"dull", "great"}
    both = explainer(["the film", "film was bad"], targets=["dull", "great"])
    assert [len(one.answers) for one in both] == [2, 2] and both[0].heatmap().scores.shape[0] == 2


def test_the_next_token(tmp_path):
    model = generator()
    explainer = lrpfx.Explainer(model, tokenizer=Tokenizer(ends=False))
    found = explainer("the film was")
    with torch.no_grad():
        logits = model(**Tokenizer(ends=False)("the film was", return_tensors="pt")).logits[0, -1]
    assert found.target.index == int(logits.argmax()) and found.target.name == WORDS[int(logits.argmax())]
    np.testing.assert_allclose(found.output, logits.numpy(), rtol=1e-4, atol=1e-6)
    assert explainer("the film was", "good").target.index == WORDS.index("good")
    assert found.save(tmp_path / "a.html").read_text().startswith("<!") and found.sheet().width > 100
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.top(9) == found.top(9) and again != explainer("the film")


@pytest.mark.parametrize("several", [False, True])
def test_a_text_is_compared_with_a_token(several):
    model, text = classifier().double(), "the film was good"
    reference = ["[PAD]", torch.tensor([[1, 7, 7, 7, 7, 2]])] if several else "[PAD]"
    explainer = lrpfx.Explainer(model, composite=DeepLIFT(), tokenizer=Tokenizer(), reference=reference)
    found, inputs = explainer(text, "great"), Tokenizer()(text, return_tensors="pt")
    ids = [[1, 0, 0, 0, 0, 2], [1, 7, 7, 7, 7, 2]][: 1 + several]
    with torch.no_grad():
        outputs = [model(**{**inputs, "input_ids": torch.tensor([one])}).logits[0, 1] for one in ids]
        difference = float(model(**inputs).logits[0, 1] - sum(outputs) / len(outputs))
    assert found.relevance.sum() == pytest.approx(difference, rel=1e-5)
    assert found.relevance[0] == found.relevance[-1] == 0  # the marks of the model stay
    assert found.balance.output == pytest.approx(difference, rel=1e-5) and found.balance.share == pytest.approx(1.0)
    assert "difference" in str(found.balance)
    if several:
        with pytest.raises(InputError, match="of one reference"):
            str(found.ledger)
    else:
        assert found.ledger.seed == pytest.approx(difference)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (0, r"a token that takes the place of its own, such as reference='\[PAD\]', a tensor .* \(1, 3\).*, not int"),
        ("the film", "'the film' is 2 tokens, not one"),
        (torch.tensor([[1, 0]]), "cannot be broadcast"),
    ],
)
def test_references_that_a_text_does_not_have(reference, message):
    tokenizer = Tokenizer()
    tokenizer.pad_token = "[PAD]"
    explainer = lrpfx.Explainer(classifier(), composite=DeepLIFT(), tokenizer=tokenizer, reference=reference)
    with pytest.raises(InputError, match=message) as error:
        explainer("film", "great")
    assert error.value.topic == "references"


def test_wrong_texts():
    explainer = lrpfx.Explainer(generator(), tokenizer=Tokenizer(ends=False))
    with pytest.raises(InputTypeError, match="a text is a string"):
        explainer(3)
    with pytest.raises(InputError, match="is empty"):
        explainer(" ")
    with pytest.raises(InputError, match="2 tokens, not one"):
        explainer("the film", "good bad")
    hidden = lrpfx.Explainer(classifier().bert, tokenizer=Tokenizer(), composite=EpsilonPlus())
    with pytest.raises(InputError, match="6 numbers for each token, not one for each of the 8 tokens"):
        hidden("the film")
    with pytest.raises(InputTypeError, match="returned list without input_ids"):
        lrpfx.explain(nn.Identity(), "the film", tokenizer=lambda text, return_tensors: [1])


def test_a_tuple_of_two_texts_is_no_pair():
    """Neither reading is silently taken: a pair is what the tokenizer returns, two texts are a list."""
    model = classifier()
    for given in (("the film", "good"), [("the film", "good")] * 2):
        with pytest.raises(InputError, match=r"tokenizer\(first, second"):
            lrpfx.explain(model, given, tokenizer=Tokenizer())
    assert len(lrpfx.explain(model, ["the film", "good"], tokenizer=Tokenizer())) == 2


def test_classes_of_each_token():
    """A model that classifies each token has a class at a token as its target, or a class where it is predicted."""
    from transformers import BertConfig, BertForTokenClassification

    sizes = {"vocab_size": 8, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    labels = {"id2label": {0: "other", 1: "person", 2: "place"}, "label2id": {"other": 0, "person": 1, "place": 2}}
    model = BertForTokenClassification(BertConfig(**sizes, max_position_embeddings=16, **labels)).eval()
    explainer = lrpfx.Explainer(model, tokenizer=Tokenizer())
    with pytest.raises(InputError, match=r"target=\(2, 1\)"):
        explainer("the film", "person")
    found = explainer("the film", (2, "person"))
    chosen = lrpfx.Explainer(model, tokenizer=Tokenizer(), output=lambda result: result.logits[:, 2])("the film", 1)
    np.testing.assert_allclose(found.relevance, chosen.relevance, rtol=1e-4, atol=1e-7)
    assert found.target.name == "person (position 2)" and {one.name for one in found.top()} == {"other", "person", "place"}
    with pytest.raises(InputError, match="position 9 is out of range"):
        explainer("the film", (9, "person"))
    region = explainer("the film", lrpfx.Region("person", mask=[0, 0, 1, 0], positive=False))
    np.testing.assert_allclose(region.relevance, chosen.relevance, rtol=1e-4, atol=1e-7)
    assert region.output.shape == (3, 4) and region.target.area == 0.25


def test_layers():
    """A row for each sum that all relevance flows through, with the relevance that `attribute` records."""
    model, tokenizer = classifier().double(), Tokenizer()
    found = lrpfx.explain(model, "the film was good", "great", tokenizer=tokenizer)
    inputs = tokenizer("the film was good", return_tensors="pt")
    explain_model = lrpfx.transform(model, "AttnLRP", example_inputs=inputs)
    last = "bert.encoder.layer.0.output.add"
    direct = lrpfx.attribute(explain_model, inputs, 1, record=[last]).layers[last][0].sum(-1)
    layers = found._layers(None, ("tokens", "features"))
    assert list(layers)[-1] == last and len(layers) == 4
    np.testing.assert_allclose(layers[last], direct.numpy(), atol=1e-9)
    picture = np.asarray(found.layers([last])).astype(int)
    assert (np.abs(picture[..., 0] - picture[..., 2]) > 200).any(), "the mark of the class, which has all relevance"
    recorded = lrpfx.explain(model, "the film was good", "great", tokenizer=tokenizer, record=[last])
    assert (np.asarray(recorded.layers()) == picture).all()
    with pytest.raises(InputError, match=r"not \(tokens, features\)"):
        found.layers(["classifier"])


def filler():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 8, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=16)).eval()


class Masking(Tokenizer):
    mask_token, mask_token_id = "[PAD]", 0


def test_the_masked_word():
    model, tokenizer = filler(), Masking()
    found = lrpfx.explain(model, "the film was [PAD]", "good", tokenizer=tokenizer)
    inputs = tokenizer("the film was [PAD]", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, 4]
    np.testing.assert_allclose(found.output, logits.numpy(), rtol=1e-4, atol=1e-6)
    for text, message in (("the film was good", "needs a \\[PAD\\] in the text"), ("[PAD] film [PAD]", "has 2 masks")):
        with pytest.raises(InputError, match=message):
            lrpfx.explain(model, text, tokenizer=tokenizer)


def test_layers_and_several_texts(tmp_path):
    explainer = lrpfx.Explainer(classifier(), tokenizer=Tokenizer(), record=["bert.encoder"])
    both = explainer(["the film was good", "the film"])
    assert isinstance(both, TextExplanations) and len(both[:1]) == 1 and "the film" in repr(both)
    assert [one.answers[0].layers["bert.encoder"].shape for one in both] == [(6, 6), (4, 6)]
    assert [path.name for path in both.save(tmp_path / "new")] == ["text_1.html", "text_2.html"]
    assert both.sheet().height > both[0].sheet().height and both._repr_html_() and str(both)
    with pytest.raises(InputError, match="no node or module named"):
        lrpfx.explain(classifier(), "the film", tokenizer=Tokenizer(), record=["nothing"])
    with pytest.raises(InputError, match="pass one of them"):
        lrpfx.explain(classifier(), "the film", tokenizer=Tokenizer(), preprocess=lambda image: image)


def test_progress_on_request(capsys):
    explainer = lrpfx.Explainer(classifier(), tokenizer=Tokenizer(), progress=True)
    explainer(["the film was good", "the film was bad"])
    shown = capsys.readouterr().err
    assert "explaining: 100%" in shown and " 2/2 " in shown


class ChatTokenizer(Tokenizer):
    def apply_chat_template(self, messages, return_tensors, return_dict, **end):
        assert end == (
            {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {"add_generation_prompt": True}
        )
        if len(messages) > 2:
            raise RuntimeError("the template takes two messages")
        return self(" ".join(message["content"] for message in messages), return_tensors="pt")


FILM = "the film was"
IDS = [1, 3, 4, 5]


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        np.array(IDS),
        np.array(FILM),
        ChatTokenizer(ends=False)(FILM, return_tensors="pt"),
        {"text": FILM, "label": 1, "input_ids": IDS, "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [IDS], "special_tokens_mask": [[1, 0, 0, 0]]},
        [{"role": "user", "content": FILM}],
        [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "was"}],
        {"messages": [{"role": "user", "content": FILM}]},
        {"role": "user", "content": FILM},
    ],
    ids=lambda given: type(given).__name__,
)
@pytest.mark.sampled(4)
def test_every_form_of_a_text(given):
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(generator(), tokenizer=ChatTokenizer(ends=False))
    of_string, found = explainer(FILM), explainer(given)
    assert type(found) is type(of_string) and found.heatmap().words == ("[CLS]", "the", "film", "was")
    np.testing.assert_allclose(found.relevance, of_string.relevance, rtol=1e-5, atol=1e-8)
    assert found.name in (FILM, "was")


class WordsAlone(nn.Module):
    """A model of text that takes no mask."""

    def __init__(self):
        super().__init__()
        self.words, self.classes = nn.Embedding(8, 6), nn.Linear(6, 2)

    def forward(self, input_ids):
        return self.classes(torch.tanh(self.words(input_ids)).mean(1))


def test_a_model_without_a_mask():
    """A mask that hides nothing is left out; one that hides something is the model's business."""
    explainer = lrpfx.Explainer(WordsAlone().eval(), tokenizer=Tokenizer())
    assert explainer(FILM).heatmap().words == ("[CLS]", "the", "film", "was", "[SEP]")
    with pytest.raises(InputError, match="unexpected keyword argument 'attention_mask'"):
        explainer({"input_ids": [IDS], "attention_mask": [[1, 1, 1, 0]]})


@pytest.mark.thorough
def test_several_texts_in_one_encoding():
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(generator(), tokenizer=ChatTokenizer(ends=False))
    short = explainer("the film")
    padded = {"input_ids": torch.tensor([IDS, [1, 3, 4, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    for given in (padded, [IDS, [1, 3, 4]], [{"input_ids": IDS}, {"input_ids": [1, 3, 4]}], [FILM, "the film"]):
        both = explainer(given)
        assert isinstance(both, TextExplanations) and len(both) == 2
        np.testing.assert_allclose(both[1].output, short.output, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(both[1].relevance[:3], short.relevance, rtol=1e-4, atol=1e-7)


def test_contrasts_and_positions():
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(generator(), tokenizer=ChatTokenizer(ends=False))
    good, bad = explainer(FILM, "good"), explainer(FILM, "bad")
    contrast = explainer(FILM, {"good": 1, "bad": -0.5})
    np.testing.assert_allclose(contrast.relevance, good.relevance - 0.5 * bad.relevance, rtol=1e-4, atol=1e-7)
    assert contrast.target.name == "good − 0.5 · bad"
    np.testing.assert_allclose(contrast.target.score, good.target.score - 0.5 * bad.target.score, rtol=1e-5)
    before = explainer(FILM, (1, "good"))
    inputs = Tokenizer(ends=False)(FILM, return_tensors="pt")
    direct = lrpfx.attribute(explainer.explain_model, inputs, (1, WORDS.index("good"))).relevance["input_ids"]
    np.testing.assert_allclose(before.relevance, direct[0].sum(-1).numpy(), rtol=1e-5, atol=1e-8)
    assert before.target.name == "good (position 1)" and not before.relevance[2:].any()
    assert explainer(FILM, (-1, {"good": 1, "bad": -0.5})).target.score == contrast.target.score
    both = explainer([FILM, FILM], [(1, "good"), {"good": 1, "bad": -0.5}])
    assert [one.target.name for one in both] == ["good (position 1)", "good − 0.5 · bad"]
    assert len(explainer(FILM, targets=[(1, "good"), "bad", {"bad": 1}]).answers) == 3
    classes = lrpfx.Explainer(classifier(), tokenizer=Tokenizer())
    assert classes("the film", {"great": 1, "dull": -1}).target.name == "great − dull"
    assert [one.target.name for one in classes(["the film", "film"], (1, 0))] == ["great", "dull"]  # one for each
    for target, message in (
        ((9, "good"), "position 9 is out of range"),
        ({}, "at least one class"),
        ({"good": "1"}, "finite number"),
    ):
        with pytest.raises(InputError, match=message):
            explainer(FILM, target)
    with pytest.raises(InputError, match="this one returns classes"):
        classes("the film", (1, "great"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pd.DataFrame({"text": ["the film"]}), r"a DataFrame is not a text: .*frame\['text'\]"),
        ({"words": [1]}, "a mapping with the keys 'words' is not a text"),
        ({"input_ids": [3], "pixel_values": torch.rand(2)}, "holds 'pixel_values', which is not text"),
        ({"input_ids": [3, 4], "attention_mask": [1]}, "different lengths: input_ids 2, attention_mask 1"),
        (torch.rand(3), "whole numbers, not torch.float32"),
        (torch.zeros(2, 2, 2, dtype=torch.long), r"not \(2, 2, 2\)"),
        ([1, 99], "token id 99, but the tokenizer has 8"),
        ([1, -1], "token id -1"),
        (b"the film", "a text is a string, .* not bytes"),
        (torch.tensor([], dtype=torch.long), "the text is empty"),
        ([{"role": "user", "content": "the"}] * 3, "cannot write these messages as one text: .*two messages"),
    ],
)
def test_what_is_no_text(given, message):
    explainer = lrpfx.Explainer(generator(), tokenizer=ChatTokenizer(ends=False))
    with pytest.raises(InputError, match=message):
        explainer(given)


def test_limits_of_the_model_are_named():
    with pytest.raises(InputError, match="the text has 18 tokens, but the model has 16 positions: cut it"):
        lrpfx.explain(classifier(), "the " * 16, tokenizer=Tokenizer())
    with pytest.raises(InputError, match="the tokenizer has no template for chats"):
        lrpfx.explain(classifier(), [{"role": "user", "content": "the"}], tokenizer=Tokenizer())

    class Larger(Tokenizer):
        def __len__(self):
            return 9

    with pytest.raises(InputError, match="the tokenizer has 9 tokens, but the model's embedding has 8"):
        lrpfx.explain(classifier(), "the film", tokenizer=Larger())


class Bytes(Tokenizer):
    """Tokens with the marks of a vocabulary of bytes."""

    TOKENS = ("<|endoftext|>", "Ġå¥½", "çļĦ", "çĶµå½±", "Ġdef", "(", "x", "Ġun")
    all_special_ids = (0,)

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        return {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6]])}

    def convert_ids_to_tokens(self, ids):
        return [self.TOKENS[int(number)] for number in ids]

    def decode(self, ids):
        return "".join(self.convert_ids_to_tokens(ids))


@pytest.mark.thorough
def test_words_without_blanks_and_code_are_cut_and_join_is_passed_on():
    cut = ("好", "的", "电影", "def", "(", "x")
    for join in (True, False):
        found = lrpfx.explain(generator(), "好的电影 def(x", tokenizer=Bytes(), join=join)
        assert found.heatmap().words == cut
        assert lrpfx.text.heatmap(found.relevance, found.tokens, Bytes(), join=join).words == cut
    words = lrpfx.explain(classifier(), "good bad", tokenizer=Continuing(), join=True).heatmap().words
    tokens = lrpfx.explain(classifier(), "good bad", tokenizer=Continuing(), join=False).heatmap().words
    assert words == ("[CLS]", "goodbad", "[SEP]") and tokens == ("[CLS]", "good", "##bad", "[SEP]")


class Continuing(Tokenizer):
    def convert_ids_to_tokens(self, ids):
        return [WORDS[int(number)].replace("bad", "##bad") for number in ids]
