"""Sentences through the same door: relevance of tokens, for classes and for the next token."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
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
    assert np.array_equal(pickle.loads(pickle.dumps(found)).relevance, found.relevance)


def test_wrong_texts():
    explainer = lrpfx.Explainer(generator(), tokenizer=Tokenizer(ends=False))
    with pytest.raises(InputTypeError, match="a text is a string"):
        explainer(3)
    with pytest.raises(InputError, match="is empty"):
        explainer(" ")
    with pytest.raises(InputError, match="2 tokens, not one"):
        explainer("the film", "good bad")
    hidden = lrpfx.Explainer(classifier().bert, tokenizer=Tokenizer(), composite=EpsilonPlus())
    with pytest.raises(InputError, match="6 features of each token, neither classes nor tokens"):
        hidden("the film")
    with pytest.raises(InputTypeError, match="returned list without input_ids"):
        lrpfx.explain(nn.Identity(), "the film", tokenizer=lambda text, return_tensors: [1])


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
        lrpfx.Explainer(classifier(), tokenizer=Tokenizer(), preprocess=lambda image: image)


def test_progress_on_request(capsys):
    explainer = lrpfx.Explainer(classifier(), tokenizer=Tokenizer(), progress=True)
    explainer(["the film was good", "the film was bad"])
    shown = capsys.readouterr().err
    assert "explaining: 100%" in shown and " 2/2 " in shown
