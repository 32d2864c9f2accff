"""Models with several inputs: photographs, texts and numbers in, each in its own form out, with its share."""

import pickle

import numpy as np
import pytest
import torch
from explanation.test_sentences import Tokenizer
from helpers import assert_close
from PIL import Image
from torch import nn

import lrpfx
from lrpfx.attribution.ledger import PARTS
from lrpfx.composites import EpsilonPlus


class Questions(nn.Module):
    """Answers a question about a photograph: features of both are multiplied, and added to those of numbers."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, 2)
        self.words = nn.Embedding(8, 6)
        self.numbers = nn.Linear(2, 6)
        self.head = nn.Linear(12, 3)

    def forward(self, image, input_ids, facts):
        seen = self.convolution(image).relu().mean((2, 3))
        asked = self.words(input_ids).relu().mean(1)
        return self.head(torch.cat([seen * asked, self.numbers(facts).relu()], 1))


class Pair(nn.Module):
    """Compares two photographs by one network."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))

    def forward(self, first, second):
        return nn.functional.cosine_similarity(self.network(first), self.network(second))


def preprocess(photograph):
    return torch.from_numpy(np.array(photograph)).permute(2, 0, 1).float() / 255


@pytest.fixture(scope="module")
def photograph():
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((32, 24), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def questions():
    torch.manual_seed(0)
    return Questions().float().eval()


SETTINGS = {"composite": EpsilonPlus(), "preprocess": preprocess, "tokenizer": Tokenizer(), "categories": ["yes", "no", "two"]}


def test_each_input_in_its_own_form(questions, photograph):
    explainer = lrpfx.Explainer(questions, names=["age", "height"], **SETTINGS)
    facts = torch.tensor([[0.5, 2.0]])
    found = explainer({"image": photograph, "input_ids": "the film was good", "facts": facts}, targets=["no", "yes"])
    ids = torch.tensor([[1, 3, 4, 5, 6, 2]])
    inputs = {"image": preprocess(photograph)[None], "input_ids": ids, "facts": facts.float()}
    expected = lrpfx.attribute(explainer.explain_model, inputs, targets=[1, 0]).relevance
    for place, answer in enumerate(found.answers):
        sums = [float(one[place].double().sum()) for one in expected.values()]
        assert answer.input_relevance == pytest.approx(sums, rel=1e-5)
    assert found.names == ("image", "input_ids", "facts") and found.target.name == "no"
    assert sum(found.shares.values()) + found.balance.constants == pytest.approx(found.target.score, rel=1e-6)
    image, text, row = (found[name] for name in found.names)
    assert isinstance(image, lrpfx.Explanation) and image.photograph.size == (32, 24)
    assert_close(torch.tensor(image.relevance), expected["image"][0, 0].double().sum(0), 1e-6)
    assert isinstance(text, lrpfx.TextExplanation) and len(text.picture.targets) == 2
    assert_close(torch.tensor(text.relevance), expected["input_ids"][0, 0].sum(-1), 1e-6)
    assert isinstance(row, lrpfx.TableExplanation) and row.features == ("age", "height")
    assert_close(torch.tensor(row.relevance), expected["facts"][0, 0], 1e-6)
    for one in (image, text, row):
        assert one.balance.constants == pytest.approx(found.balance.constants, rel=1e-4)
        assert one.balance.inputs + one.balance.others == pytest.approx(found.balance.inputs, rel=1e-5)
    assert "this input" in str(image.balance) and image.sheet() and text.sheet() and row.sheet()


def test_constants_are_those_of_the_ledger(questions, photograph):
    found = lrpfx.explain(questions, (photograph, "the film", torch.ones(1, 2)), "two", **SETTINGS)
    ledger = found.ledger
    assert ledger.seed == pytest.approx(found.target.score, rel=1e-6) and ledger.unexplained < 1e-6
    totals = sum(map(ledger.total, PARTS))
    assert found.balance.constants == pytest.approx(totals, rel=1e-4, abs=1e-6)


def test_pairs_of_photographs(photograph):
    """A tuple holds the inputs of a model that needs several; a list has several of them."""
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(Pair().float().eval(), composite=EpsilonPlus(), preprocess=preprocess)
    other = photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    one, swapped = explainer([(photograph, other), (other, photograph)])
    expected = lrpfx.attribute(explainer.explain_model, (preprocess(photograph)[None], preprocess(other)[None])).relevance
    for name, relevance in zip(("first", "second"), expected, strict=True):
        assert_close(torch.tensor(one[name].relevance), relevance[0].double().sum(0), 1e-5)
        assert one.shares[name] == pytest.approx(float(relevance.double().sum()), rel=1e-5)
    assert swapped.target.score == pytest.approx(one.target.score, rel=1e-5)
    batch = explainer({"first": torch.rand(2, 3, 24, 32), "second": torch.rand(2, 3, 24, 32)})
    assert len(batch) == 2 and batch.sheet() and one.sheet().width > 500
    assert [list(found.shares) for found in explainer([(photograph, other)])] == [["first", "second"]]


def test_parts_have_questions_of_their_own(questions, photograph):
    found = lrpfx.explain(questions, (photograph, "the film", torch.ones(1, 2)), "two", record="convolution", **SETTINGS)
    image = found["image"]
    other = lrpfx.explain(questions, (photograph, "the film", torch.ones(1, 2)), "no", **SETTINGS)["image"]
    (answer,) = image._answers_for(["no"])
    assert_close(torch.tensor(answer.input_relevance), torch.tensor(other.input_relevance), 1e-6)
    assert image.compare(["no", "two"]) and image.layers(["convolution"])
    assert found.recorded["convolution"].shape == (6, 11, 15)
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found and copy["input_ids"].sheet() and copy._repr_html_()


def test_reports(questions, photograph, tmp_path):
    found = lrpfx.explain(questions, (photograph, "the film", torch.ones(1, 2)), "two", **SETTINGS)
    page = lrpfx.report(found, tmp_path / "joint.html").read_text()
    assert all(f'"{name}"' in page for name in (*found.names, "two"))
    with pytest.raises(lrpfx.InputError, match="copy without the model"):
        lrpfx.report(pickle.loads(pickle.dumps(found)), tmp_path / "copy.html")


@pytest.mark.parametrize("columns", [1, 2])
def test_reports_with_categories(columns, tmp_path):
    """An embedding that reads a column of an input has relevance in a shape of its own."""

    class OfKinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.kinds, self.head = nn.Embedding(5, 4), nn.Linear(2, 4)

        def forward(self, kind, dose):
            return self.kinds(kind[:, 0]) + self.head(dose)

    inputs = {"kind": torch.tensor([[2, 1]])[:, :columns], "dose": torch.rand(1, 2)}
    found = lrpfx.explain(OfKinds().float().eval(), inputs, 1, composite=EpsilonPlus())
    assert lrpfx.report(found, tmp_path / "report.html").stat().st_size > 10_000


def test_similarity_of_image_and_text():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 8, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 8}, projection_dim=12
    )
    model = transformers.CLIPModel(config).double().eval()
    explainer = lrpfx.Explainer(model, tokenizer=Tokenizer(), output="logits_per_image", categories=["similarity"])
    pixels = torch.rand(1, 3, 32, 32)
    found = explainer({"pixel_values": pixels, "input_ids": "the good film"})
    inputs = {"pixel_values": pixels, "input_ids": torch.tensor([[1, 3, 6, 4, 2]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    expected = lrpfx.attribute(explainer.explain_model, inputs, output="logits_per_image").relevance
    assert found.names == ("pixel_values", "input_ids") and found.target.score == pytest.approx(float(found.output[0]))
    assert_close(torch.tensor(found["pixel_values"].relevance), expected["pixel_values"][0].sum(0), 1e-10)
    assert_close(torch.tensor(found["input_ids"].relevance), expected["input_ids"][0].sum(-1), 1e-10)
    assert found.ledger.unexplained < 1e-10 and found.sheet()
    batch = explainer(
        {
            **inputs,
            "pixel_values": torch.cat([pixels, pixels]),
            "input_ids": torch.tensor([[1, 3, 2]] * 2),
            "attention_mask": torch.ones(2, 3, dtype=torch.long),
        }
    )
    assert [list(one.shares) for one in batch] == [["pixel_values", "input_ids"]] * 2


def test_inputs_of_hugging_face_have_the_names_that_users_give_them(tmp_path):
    """A photograph and a text are the arguments for them, under any name; what this does not settle is an error."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 8, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)).eval()
    photograph = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    pixels = preprocess(photograph)[None]
    explainer = lrpfx.Explainer(model, tokenizer=Tokenizer(), preprocess=preprocess, output="logits_per_image")
    expected = explainer({"pixel_values": photograph, "input_ids": "the good film"})
    for image in (photograph, pixels, pixels.numpy()):
        found = explainer({"text": "the good film", "image": image})
        assert found.names == ("text", "image") and list(found.maps) == list(found.parts) == ["text", "image"]
        assert found.shares["image"] == pytest.approx(expected.shares["pixel_values"], rel=1e-4)
        assert found["text"].balance.inputs == pytest.approx(expected.shares["input_ids"], rel=1e-4)
    assert found["image"].name == "image" and len(found["image"].layers(["vision_model.embeddings.patch_embedding"]).size) == 2
    assert lrpfx.report(found, tmp_path / "report.html").stat().st_size > 10_000
    with np.load(found.save(tmp_path / "found.npz")) as arrays:
        assert sorted(arrays) == ["output", "relevance.image", "relevance.text"]
    with pytest.raises(lrpfx.InputError, match="'one' and 'other' would both be the argument pixel_values"):
        explainer({"one": photograph, "other": photograph, "text": "the good film"})


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"picture": torch.rand(1, 3, 8, 8)}, lrpfx.InputError, "takes image, input_ids, facts, not"),
        ((torch.rand(1, 3, 8, 8), "the film"), lrpfx.InputError, "2 inputs were given"),
        ((torch.rand(2, 3, 8, 8), "the film", torch.ones(1, 2)), lrpfx.InputError, "batches of other sizes: image 2"),
        ((torch.rand(1, 3, 8, 8), "the film", torch.ones(2)), lrpfx.InputError, "first dimension for samples"),
        ((Image.new("RGB", (8, 8)), "the film", torch.ones(1, 2)), lrpfx.InputTypeError, "pass preprocess="),
        (("cat.jpg", "the film", torch.ones(1, 2)), lrpfx.InputTypeError, "'cat.jpg', and with a tokenizer strings are texts"),
        ((torch.rand(1, 3, 8, 8), "the film", "facts.csv"), lrpfx.InputTypeError, "numbers as tensors"),
        ((torch.rand(1, 3, 8, 8), "the film", [0.5, 1.0]), lrpfx.InputTypeError, "'facts' is a list of numbers"),
        ((torch.rand(1, 3, 8, 8), "the film", ((0.5, 1.0),)), lrpfx.InputTypeError, "'facts' is a tuple of numbers"),
        ((torch.rand(1, 3, 8, 8), [3, 4], torch.ones(1, 2)), lrpfx.InputTypeError, "'input_ids' is a list of numbers"),
    ],
)
def test_wrong_inputs(questions, given, kind, message):
    with pytest.raises(kind, match=message) as caught:
        lrpfx.explain(questions, given, tokenizer=Tokenizer())
    assert caught.value.topic == "several-inputs"


def test_an_input_without_a_form(questions, photograph):
    found = lrpfx.explain(Pair().float().eval(), (torch.rand(1, 3, 9, 9), torch.rand(1, 3, 9, 9)), composite=EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="no explanation of an input 'third': there are first, second"):
        found["third"]


@pytest.mark.parametrize("channels_first", [False, True])
def test_series_and_rows_among_the_inputs(channels_first, monkeypatch):
    """A series has steps and features as the model reads them, and the bars of a row add up with those of the others."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(2, 4, 3) if channels_first else nn.LSTM(2, 4, batch_first=True)
            self.dense = nn.Linear(3, 4)

        def forward(self, series, facts):
            states = self.layer(series).relu().mean(2) if channels_first else self.layer(series)[0][:, -1]
            return states + self.dense(facts)

    model, facts = Both().double().eval(), torch.randn(1, 3, dtype=torch.float64)
    series = torch.randn(1, 9, 2, dtype=torch.float64)
    given = series.movedim(1, 2) if channels_first else series
    explainer = lrpfx.Explainer(model, composite=EpsilonPlus())
    found = explainer({"series": given, "facts": facts}, 1)
    relevance = lrpfx.attribute(explainer.explain_model, (given, facts), 1).relevance[0][0]
    part = found["series"]
    assert isinstance(part, lrpfx.SeriesExplanation) and part.values.shape == (9, 2) and part.sheet() and found.sheet()
    assert_close(torch.tensor(part.relevance), relevance.T if channels_first else relevance, 1e-12)
    steps = []
    monkeypatch.setattr("lrpfx.explanation.tables.charts.waterfall", lambda bars, *rest: steps.extend(bars))
    found["facts"].waterfall()
    assert dict(steps)["other inputs"] == pytest.approx(found.shares["series"])
    assert sum(amount for _, amount in steps) == pytest.approx(found.balance.output)


def test_a_table_beside_an_image():
    """A DataFrame is rows of numbers, and its columns name their bars."""
    pandas = pytest.importorskip("pandas")

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.filters, self.dense = nn.Conv2d(3, 2, 3), nn.Linear(3, 2)

        def forward(self, image, facts):
            return self.filters(image).relu().mean((2, 3)) + self.dense(facts)

    model, images = Both().eval(), torch.rand(2, 3, 8, 8)
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32), columns=["age", "size", "mass"])
    found = lrpfx.explain(model, {"image": images, "facts": frame}, 1, composite=EpsilonPlus())
    same = lrpfx.explain(model, {"image": images, "facts": torch.from_numpy(frame.to_numpy())}, 1, composite=EpsilonPlus())
    for one, other in zip(found, same, strict=True):
        assert one.shares == other.shares and one["facts"].features == ("age", "size", "mass")


def test_the_rules_are_those_of_the_inputs():
    """Convolutions over series beside rows have the rules of signals; beside an image, those of photographs."""

    class OfSeries(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen, self.dense = nn.Conv1d(2, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(3, 4)

        def forward(self, series, facts, image=None):
            states = self.layer(series).relu().mean(2) + self.dense(facts)
            return states if image is None else states + self.seen(image).relu().mean((2, 3))

    inputs = {"series": torch.randn(1, 2, 9), "facts": torch.randn(1, 3)}
    model = OfSeries().eval()
    rules = lrpfx.composites.EpsilonPlus(layer_map=[(lrpfx.types.Convolution, lrpfx.rules.Gamma(0.25))])
    found = lrpfx.explain(model, inputs, 1)
    expected = lrpfx.attribute(lrpfx.transform(model, rules, inputs), inputs, 1).relevance["series"][0]
    assert "Gamma 0.25" in found.rules
    assert_close(torch.from_numpy(found.maps["series"]), expected, 1e-6)
    assert lrpfx.explain(model, {**inputs, "image": torch.rand(1, 3, 8, 8)}, 1).rules.startswith("GammaByDepth")


def test_tokens_have_the_rules_of_texts_without_a_tokenizer():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layer = nn.Embedding(8, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, input_ids, facts):
            return self.layer(self.words(input_ids)).mean(1) + facts

    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "facts": torch.randn(1, 4)}
    assert lrpfx.explain(Attention().eval(), inputs, 1).rules == "AttnLRP()"


@pytest.mark.parametrize("words", [["the film"], ("the film", "good")])
def test_a_list_is_no_input(questions, words):
    given = {"image": torch.rand(1, 3, 8, 8), "input_ids": words, "facts": torch.ones(1, 2)}
    with pytest.raises(lrpfx.InputTypeError, match="a list with a dict for each"):
        lrpfx.explain(questions, given, tokenizer=Tokenizer())


def test_figures_of_several_targets_are_saved_with_an_axis_for_targets(tmp_path):
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 2).double(), nn.Linear(4, 2).double()

        def forward(self, first, second):
            return self.first(first) + self.second(second).relu()

    model, inputs = Both().eval(), {"first": torch.randn(1, 3).double(), "second": torch.randn(1, 4).double()}
    explainer = lrpfx.Explainer(model, categories=["no", "yes"])
    with np.load(explainer(inputs, targets=["yes", 0]).save(tmp_path / "both.npz")) as arrays:
        assert list(arrays["targets"]) == ["yes", "no"]
        for place, one in enumerate((1, 0)):
            alone = explainer(inputs, one).maps
            assert not np.array_equal(arrays["relevance.first"][place], arrays["relevance.first"][1 - place])
            for name in inputs:
                np.testing.assert_array_equal(arrays[f"relevance.{name}"][place], alone[name])


@pytest.mark.parametrize("is_shared", [True, False])
def test_both_images_of_a_pair_have_the_same_rules(is_shared):
    """Shares do not depend on which image the forward reads first."""
    torch.manual_seed(0)

    def tower():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).double()

    class Comparison(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = tower()
            self.second = self.first if is_shared else tower()
            self.both = nn.Conv2d(4, 1, 1).double()
            self.second.load_state_dict(self.first.state_dict())

        def forward(self, left, right):
            return self.both(self.first(left) * self.second(right)).mean((2, 3))

    left, right = torch.rand(2, 1, 3, 12, 12).double()
    explainer = lrpfx.Explainer(Comparison().eval())
    found, swapped = explainer((left, right)), explainer((right, left))
    assert "GammaByDepth" in found.rules and found.shares["left"] != pytest.approx(found.shares["right"], rel=1e-3)
    np.testing.assert_allclose(swapped.maps["right"], found.maps["left"], rtol=1e-9, atol=1e-12)
    reasons = [row.chosen_by for row in lrpfx.assignment(explainer.explain_model) if "convolution" in row.chosen_by]
    assert [one.split(":")[0][-6:] for one in reasons] == [*["1 of 4", "2 of 4", "3 of 4"] * 2, "4 of 4"]
