"""Generated tokens: a matrix of what each came from, in one forward pass, beside explanations of single tokens."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
import transformers
from browsers import chromium, needs_chromium
from explanation.test_sentences import WORDS, ChatTokenizer, classifier, filler, generator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lrpfx
from lrpfx.composites import CPLRP
from lrpfx.errors import InputError, InputTypeError

PROMPT = "the film was"
IDS = [1, 3, 4, 5]


def language_model():
    torch.manual_seed(0)
    model = generator().double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that tokens matter, and several of them are generated
            parameter.add_(0.5 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model


def explained(model=None, prompt=PROMPT, **settings):
    settings = {"tokenizer": ChatTokenizer(ends=False), "max_new_tokens": 5, **settings}
    return lrpfx.explain_generation(model or language_model(), prompt, **settings)


def test_each_row_is_the_explanation_of_its_token():
    model, tokenizer = language_model(), ChatTokenizer(ends=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = explained(model)
    assert found.start == 4 and found.tokens.tolist()[:4] == IDS and len(found.tokens) == 9
    assert found.relevance.shape == (5, 8) and len(set(found.tokens.tolist()[4:])) > 1
    explainer = lrpfx.Explainer(model, tokenizer=tokenizer)
    for number in range(5):
        before = found.tokens[: 4 + number].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([before])).logits[0, -1]
        token = int(logits.argmax())
        assert found.tokens[4 + number] == token, "the token with the largest logit"
        alone = explainer(before, (-1, token))
        np.testing.assert_allclose(found.relevance[number, : 4 + number], alone.relevance, rtol=1e-9, atol=1e-12)
        assert (found.relevance[number, 4 + number :] == 0).all()
        assert found.logits[number] == pytest.approx(float(logits[token]), rel=1e-12)
        assert found.probabilities[number] == pytest.approx(float(logits.softmax(0)[token]), rel=1e-12)
        assert str(found.balances[number]) == str(alone.balance)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class LearnedPrompt(nn.Module):
    """As prompt tuning of PEFT, which the tests do not install: embeddings of words that stand before the text."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config
        self.prompt = nn.Parameter(model.get_input_embeddings().weight[:3].detach().clone())

    def forward(self, input_ids, attention_mask=None):
        words = self.model.get_input_embeddings()(input_ids)
        prompt = self.prompt.expand(len(words), -1, -1)
        return self.model(inputs_embeds=torch.cat([prompt, words], 1))


def test_positions_after_a_prompt_that_was_learned():
    """It has no words, and its positions are in the output."""
    model, words = language_model(), [0, 1, 2]
    tuned = LearnedPrompt(model).eval()
    found = explained(tuned, IDS, max_new_tokens=None, continuation=[6, 7, 3])
    of_words = explained(model, [*words, *IDS], max_new_tokens=None, continuation=[6, 7, 3])
    np.testing.assert_allclose(found.relevance, of_words.relevance[:, 3:], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.logits, of_words.logits, rtol=1e-9)


class Embeddings(TorchDispatchMode):
    """Counts look-ups of embeddings, of which a forward pass has a fixed number."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.embedding.default
        return function(*args, **(kwargs or {}))


def test_one_forward_pass_explains_all():
    explainer = lrpfx.Explainer(language_model(), tokenizer=ChatTokenizer(ends=False))
    explainer.generation(IDS, continuation=[6, 7])  # compiles
    runs = []
    for continuation in ([7], [7, 6, 3]):
        with Embeddings() as embeddings:
            assert explainer.generation(IDS, continuation=continuation).relevance.shape[0] == len(continuation)
        runs.append(embeddings.count)
    assert runs[0] == runs[1] > 0


@pytest.mark.parametrize(
    "prompt", [IDS, [{"role": "user", "content": PROMPT}], {"messages": [{"role": "user", "content": PROMPT}]}]
)
def test_forms_of_a_prompt(prompt):
    of_text, found = explained(max_new_tokens=2), explained(prompt=prompt, max_new_tokens=2)
    np.testing.assert_allclose(found.relevance, of_text.relevance, rtol=1e-9, atol=1e-12)
    assert found.text == of_text.text and found.name == PROMPT


def test_a_continuation_that_is_given():
    generated = explained(composite=CPLRP())
    given = generated.tokens[4:].tolist()
    for continuation in (given, torch.tensor(given), " ".join(WORDS[one] for one in given)):
        found = explained(composite="cp_lrp", max_new_tokens=None, continuation=continuation)
        assert found == generated
    assert found.rules == "CPLRP()" and found != explained()


def test_tokens_against_others():
    """A row is the difference of the explanations of two tokens."""
    model, tokenizer = language_model(), ChatTokenizer(ends=False)
    plain, explainer = explained(model), lrpfx.Explainer(model, tokenizer=tokenizer)
    assert plain.against is None
    given = {"max_new_tokens": None, "continuation": plain.tokens[4:]}
    unused = next(one for one in range(len(WORDS)) if one not in plain.tokens[4:])
    for against in ("runner-up", unused, WORDS[unused]):
        found = explained(model, against=against, **given)
        assert found.text == plain.text and (found.probabilities == plain.probabilities).all()
        for number, other in enumerate(found.against.tolist()):
            before = plain.tokens[: 4 + number].tolist()
            with torch.no_grad():
                logits = model(torch.tensor([before])).logits[0, -1]
            token = int(plain.tokens[4 + number])
            assert other == (unused if against != "runner-up" else int(logits.topk(2).indices[1]))
            one, another = (explainer(before, (-1, place)).relevance for place in (token, other))
            np.testing.assert_allclose(found.relevance[number, : 4 + number], one - another, rtol=1e-9, atol=1e-12)
            assert found.logits[number] == pytest.approx(float(logits[token] - logits[other]), rel=1e-9)
            assert found.picture.targets[number] == f"{WORDS[token]}, not {WORDS[other]}"
    assert (
        explained(model, against="runner-up").against.tolist()
        == explained(model, against="runner-up", **given).against.tolist()
    )


def test_a_runner_up_of_a_token_that_is_not_the_likeliest_is_the_likeliest():
    model = language_model()
    best = explained(model, max_new_tokens=1).tokens[4]
    found = explained(model, max_new_tokens=None, continuation=[(int(best) + 1) % len(WORDS)], against="runner-up")
    assert found.against.tolist() == [best] and found.logits[0] < 0


def test_spans_of_the_prompt():
    found = explained(prompt="the film was good bad bad film was the")
    words = ("the", "film", "was", "good", "bad", ".", "film", "was", "the", ".", *found.picture.words[found.start :])
    with_ends = dataclasses.replace(found, picture=dataclasses.replace(found.picture, words=words))
    parts = with_ends.by_span().to_dicts()
    names = list(parts[0])
    assert names == ["token", "the film was good …", "film was the .", "generated"]
    assert parts[1][names[1]] == pytest.approx(found.relevance[1, :6].sum())
    for row, number in zip(parts, range(5), strict=True):
        assert sum(row[name] for name in names[1:]) == pytest.approx(found.relevance[number].sum())
    of_two = found.by_span({"first": (0, 2), "second": (4, 5)}).to_dicts()
    assert list(of_two[0]) == ["token", "first", "second", "other tokens", "generated"]
    assert of_two[2]["first"] == pytest.approx(found.relevance[2, :2].sum())
    assert of_two[2]["second"] == pytest.approx(found.relevance[2, 4])
    assert of_two[2]["generated"] == pytest.approx(found.relevance[2, found.start :].sum())
    for spans, message in (
        ({"a": (0, 3), "b": (2, 4)}, "'b' has tokens of another span"),
        ({"a": (0, 90)}, "'a' is not in the prompt, which has the tokens 0 to"),
        ({"a": (3, 3)}, "'a' is not in the prompt"),
        ({"generated": (0, 1)}, "spans are not called"),
    ):
        with pytest.raises(InputError, match=message):
            found.by_span(spans)
    for spans in (
        {"a": (0.0, 5.0)},
        {"a": "ab"},
        {"a": None},
        {"a": (0, 1, 2)},
        [(0, 3)],
        {3: (0, 3)},
        {"a": (False, True)},
        "ab",
    ):
        with pytest.raises(InputTypeError, match="spans are names with the first token"):
            found.by_span(spans)
    assert found.by_span({"a": [np.int64(0), 2]}) == found.by_span({"a": (0, 2)})
    for number in (5, -6, "a", None, True, 1.0):
        with pytest.raises(InputError, match="a generated token has a number from -5 to 4, not"):
            found.heatmap().row(number)
    assert found.heatmap().row(-1).words == found.heatmap().row(4).words


def test_pictures_and_tables(tmp_path):
    found = explained()
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.picture.words[:4] == ("[CLS]", "the", "film", "was") and found.picture.targets[0] == WORDS[found.tokens[4]]
    page = found.save(tmp_path / "a.html").read_text()
    assert page.startswith("<!") and "<script" not in page
    assert page.count('type="radio"') == 5 == page.count('class="map m')
    largest = int(np.abs(found.relevance[4]).argmax())
    assert f'title="{found.relevance[4, largest]:+.3g}"' in page.partition('class="map m4"')[2]
    row = found.picture.row(2)
    assert row.words == found.picture.words[:6] and (row.shares() == found.picture.shares()[[2], :6]).all()
    rows = found.table.to_dicts()
    assert [one["token"] for one in rows] == [WORDS[one] for one in found.tokens[4:]]
    assert rows[3]["prompt"] + rows[3]["generated"] == pytest.approx(found.relevance[3].sum())
    assert rows[3]["most"].split()[0] == found.picture.words[int(found.relevance[3].argmax())]
    frame = found.to_pandas()
    assert len(frame) == 4 + 5 + 6 + 7 + 8 and frame.relevance.sum() == pytest.approx(found.relevance.sum())
    assert found.save(tmp_path / "a.png").exists() and found.sheet().width >= 640 and found.text in repr(found)


@pytest.mark.parametrize("width", [900, 150])
def test_the_matrix_has_a_cell_for_each_entry(width):
    """Also in bands, where the columns do not fit."""
    found, size = explained(), 14
    picture = np.asarray(found.picture.to_image(size=size, width=width))
    squares_of_cell = (int(size * 1.5) - 2) ** 2

    def squares(color):
        """Places of two by two pixels of a colour: letters have none."""
        has = (picture == color).all(2)
        return (has[1:, 1:] & has[:-1, 1:] & has[1:, :-1] & has[:-1, :-1]).sum()

    shares = found.picture.shares()[:, ~np.array(found.picture.special)]  # special tokens are pale
    later = 4 + 3 + 2 + 1
    assert picture.shape[1] <= width and (shares == 1.0).any()
    assert squares((236, 236, 236)) == later * squares_of_cell
    assert squares((255, 0, 0)) == (shares == 1.0).sum() * squares_of_cell


@needs_chromium
@pytest.mark.programs
def test_tokens_are_pointed_at_and_chosen(tmp_path):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    path = explained().save(tmp_path / "page.html")
    with chromium() as driver:
        driver.get(path.as_uri())

        def shown():
            return [number for number, one in enumerate(driver.find_elements(By.CLASS_NAME, "map")) if one.is_displayed()]

        assert shown() == [0]
        tokens = driver.find_elements(By.CLASS_NAME, "token")
        ActionChains(driver).move_to_element(tokens[1]).perform()
        assert shown() == [1]
        tokens[3].click()
        ActionChains(driver).move_by_offset(0, 300).perform()
        assert shown() == [3]


class Both(nn.Module):
    """A model that reads texts in both directions."""

    def __init__(self):
        super().__init__()
        self.words, self.tokens = nn.Embedding(8, 6), nn.Linear(6, 8)

    def forward(self, input_ids):
        words = self.words(input_ids)
        return self.tokens(words + words.mean(1, keepdim=True))


class Causal(Both):
    def forward(self, input_ids):
        return self.tokens(self.words(input_ids).cumsum(1))


class WithSegments(Causal):
    def __init__(self):
        super().__init__()
        self.segments = nn.Embedding(2, 6)

    def forward(self, input_ids, token_type_ids):
        return self.tokens((self.words(input_ids) + self.segments(token_type_ids)).cumsum(1))


def test_what_is_generated_is_of_the_last_segment():
    model, ids = WithSegments().double(), torch.tensor([[*IDS, 6, 7]])
    for last in (0, 1):
        segments = [0, 0, last, last]
        prompt = {"input_ids": IDS, "token_type_ids": segments}
        found = explained(model, prompt, max_new_tokens=None, continuation=[6, 7, 6])
        with torch.no_grad():
            logits = model(ids, torch.tensor([[*segments, last, last]]))[0]
        np.testing.assert_allclose(found.logits, logits[[3, 4, 5], [6, 7, 6]], rtol=1e-9)


def test_models_without_generate():
    with pytest.raises(InputError, match="Causal has no method `generate`: pass what it generated as continuation="):
        explained(Causal())
    found = explained(Causal().double(), max_new_tokens=None, continuation="good bad")
    assert found.relevance.shape == (2, 5) and not found.relevance[0, 4]
    with pytest.raises(InputError, match="reads texts in both directions"):
        explained(Both(), max_new_tokens=None, continuation="good bad")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (generator, {"prompt": " "}, "the text is empty"),
        (generator, {"prompt": []}, "empty"),
        (generator, {"prompt": ["the film", "film"]}, "one prompt is explained at a time, not 2"),
        (generator, {"prompt": {"input_ids": IDS, "attention_mask": [0, 1, 1, 1]}}, "the prompt has padding"),
        (generator, {"max_new_tokens": 0}, "max_new_tokens is a number, 1 or more, not 0"),
        (generator, {"continuation": "good"}, "not for a continuation= that is given"),
        (generator, {"max_new_tokens": None, "continuation": []}, "the continuation is empty"),
        (generator, {"max_new_tokens": None, "continuation": [9]}, "the text has the token id 9"),
        (generator, {"max_new_tokens": 1100}, r"4 tokens and the model 1024 positions.*max_new_tokens=1020"),
        (generator, {"max_new_tokens": None, "continuation": [6] * 1100}, "has 1104 tokens, but the model has 1024 positions"),
        (generator, {"against": "good bad"}, "'good bad' is 2 tokens, not one"),
        (generator, {"against": 99}, "against= is a token of the tokenizer, 0 to .*, not 99"),
        (generator, {"max_new_tokens": None, "continuation": "good", "against": "good"}, "'good' was generated itself"),
        (generator, {"tokenizer": ChatTokenizer(ends=True)}, r"the tokenizer ends the text with \[SEP\]"),
        (filler, {}, "BertForMaskedLM does not generate text"),
        (classifier, {}, "BertForSequenceClassification does not generate text"),
        (generator, {"tokenizer": None}, "pass tokenizer="),
    ],
)
def test_what_is_refused(model, settings, message):
    with pytest.raises(InputError, match=message):
        explained(model(), **settings)


def test_encoder_decoders_and_wrong_types():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(InputError, match="with an encoder and writes with a decoder"):
        explained(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval())
    with pytest.raises(InputTypeError, match="a continuation is a text or its token ids, not int"):
        explained(max_new_tokens=None, continuation=3)


def test_a_prefix_of_which_there_is_a_cache_is_a_constant():
    """The same tokens and logits as for the whole text; the rows are those of a module that holds the cache as buffers."""
    model = language_model()
    with torch.no_grad():
        cache = model(torch.tensor([IDS[:2]]), use_cache=True).past_key_values
    held = [layer.values.clone() for layer in cache.layers]
    whole = explained(model, IDS)
    explainer = lrpfx.Explainer(model, tokenizer=ChatTokenizer(ends=False), composite=CPLRP())
    found = explainer.generation(IDS[2:], 5, past_key_values=cache)
    assert found.tokens.tolist() == whole.tokens.tolist()[2:] and found.start == 2
    np.testing.assert_allclose(found.logits, whole.logits, rtol=1e-9)
    assert all(torch.equal(layer.values, value) for layer, value in zip(cache.layers, held, strict=True))
    wrapped = WithCache(model, cache)
    explain_model = lrpfx.transform(wrapped, CPLRP(), found_inputs := torch.from_numpy(found.tokens)[None, :-1])
    targets = [(1 + number, int(token)) for number, token in enumerate(found.tokens[2:])]
    expected = lrpfx.attribute(explain_model, found_inputs, targets=targets).relevance.sum(-1)[:, 0]
    np.testing.assert_allclose(found.relevance, expected.numpy(), rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        longer = model(torch.tensor([IDS[:3]]), use_cache=True).past_key_values
    found = explainer.generation(IDS[3:], 4, past_key_values=longer)
    np.testing.assert_allclose(found.logits, explained(model, IDS, max_new_tokens=4).logits, rtol=1e-9)
    with pytest.raises(InputTypeError, match="cache of transformers"):
        explainer.generation(IDS[2:], 5, past_key_values=held)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 2}, {"max_new_tokens": None, "continuation": "good"}])
def test_prefixes_of_other_models_or_of_several_texts(settings):
    def cache_of(model, rows=1):
        with torch.no_grad():
            return model(torch.tensor([IDS[:2]] * rows), use_cache=True).past_key_values

    model = language_model()
    assert explained(model, IDS[2:3], past_key_values=cache_of(model), **settings)
    sizes = {name: getattr(model.config, name) for name in ("vocab_size", "n_embd", "n_layer", "n_head")}
    others = [{"n_layer": 2}, {"n_head": 1}]
    models = [transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **one})).double() for one in others]
    for cache in (cache_of(model, 2), cache_of(generator().float()), *map(cache_of, models)):
        with pytest.raises(InputError, match=r"pass what this model returns for the prefix"):
            explained(model, IDS[2:3], past_key_values=cache, **settings)


class WithCache(nn.Module):
    def __init__(self, model, cache):
        super().__init__()
        self.model, self.count = model, len(cache.layers)
        for place, layer in enumerate(cache.layers):
            self.register_buffer(f"keys_{place}", layer.keys.clone())
            self.register_buffer(f"values_{place}", layer.values.clone())

    def forward(self, input_ids):
        layers = [(getattr(self, f"keys_{place}"), getattr(self, f"values_{place}")) for place in range(self.count)]
        cache = transformers.DynamicCache(layers)
        return self.model(input_ids=input_ids, past_key_values=cache, use_cache=False).logits
