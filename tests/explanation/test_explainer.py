"""A model and photographs in, explanations out: the relevance is that of `attribute`, on the photograph's own pixels."""

import copy
import dataclasses
import gc
import io
import pickle
import warnings
import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from markup import Markup
from PIL import Image
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonGammaBox, EpsilonPlus
from lrpfx.errors import InputError, InputTypeError, LrpfxWarning
from lrpfx.explanation.answers import Balance, Scores, shares_in_words
from lrpfx.explanation.explanation import Explanation, Explanations, unique_names
from lrpfx.pictures import Style, sheets
from lrpfx.request import Target

from torchvision import transforms  # isort: skip

NAMES = ("cat", "dog", "fish", "snail")
PREPROCESS = transforms.Compose(
    [transforms.Resize(32), transforms.CenterCrop(28), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
)


class Net(nn.Module):
    def __init__(self, softmax=False):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, stride=2), nn.Conv2d(6, 8, 3, stride=2)
        self.classes = nn.Linear(8, 4)
        self.softmax = nn.Softmax(1) if softmax else nn.Identity()

    def forward(self, x):
        x = self.second(self.first(x).relu()).relu()
        return self.softmax(self.classes(x.mean((2, 3))))


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def explainer(model):
    return lrpfx.Explainer(model, preprocess=PREPROCESS, categories=NAMES)


@pytest.fixture
def photographs():
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (40, width, 3), dtype=np.uint8)) for width in (60, 60, 50)]


@pytest.fixture
def explanation(explainer, photographs):
    return explainer(photographs[0], "fish")


def test_relevance_is_that_of_attribute(model, explainer, photographs):
    explanation = explainer(photographs[0])
    input = PREPROCESS(photographs[0])[None]
    direct = lrpfx.attribute(explainer.explain_model, input)
    np.testing.assert_allclose(explanation.output, model(input)[0].detach(), rtol=1e-5)
    np.testing.assert_allclose(explanation.input_relevance, direct.relevance[0].numpy(), rtol=1e-5, atol=1e-8)
    assert explanation.relevance.shape == (40, 60) and explanation.to_numpy() is not None
    assert explanation.relevance.sum() == pytest.approx(float(direct.relevance.sum(dtype=torch.float64)), rel=1e-9)
    assert explanation.target == explanation.top(1)[0] and explanation.target.name in NAMES
    assert explanation.balance.output == pytest.approx(explanation.target.score)
    assert explanation.balance.inputs + explanation.balance.constants == pytest.approx(explanation.balance.output)
    assert sum(one.probability for one in explanation.top(9)) == pytest.approx(1.0)


def test_relevance_outside_of_the_crop_is_zero(explanation):
    left, top, right, bottom = explanation.geometry.box
    outside = explanation.relevance.copy()
    outside[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))] = 0.0
    assert not outside.any() and 0 < left < right < 60 and 0 < top < bottom < 40


def test_several_photographs(explainer, photographs, tmp_path):
    together = explainer(photographs, [0, "dog", None])
    assert isinstance(together, Explanations) and len(together) == 3
    assert [one.target.index for one in together[:2]] == [0, 1]
    for photograph, target, found in zip(photographs, [0, "dog", None], together, strict=True):
        np.testing.assert_allclose(found.input_relevance, explainer(photograph, target).input_relevance, rtol=1e-4, atol=1e-7)
    for name, photograph in zip(("b.png", "a.png", "c.png"), photographs, strict=True):
        photograph.save(tmp_path / name)
    assert [one.name for one in explainer(tmp_path)] == ["a.png", "b.png", "c.png"]
    assert together.sheet().width > 500 and [path.name for path in together.save(tmp_path / "sheets")] == [
        "image_1.png",
        "image_2.png",
        "image_3.png",
    ]


@pytest.mark.parametrize("targets", [[3, "cat"], np.array([3, 0]), torch.tensor([3, 0]), (3, None)])
def test_several_classes(explainer, photographs, targets):
    found = explainer(photographs[:2], targets=targets)
    for photograph, explanation in zip(photographs, found, strict=False):
        for answer, target in zip(explanation.answers, targets, strict=True):
            target = None if target is None else target if isinstance(target, str) else int(target)
            alone = explainer(photograph, target)
            assert answer.category.index == alone.target.index
            np.testing.assert_allclose(answer.input_relevance, alone.input_relevance, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (4, InputError, "out of range: the output has 4 classes"),
        (-1, InputError, "out of range"),
        ("fisch", InputError, "no class named 'fisch'. Did you mean 'fish'"),
        ("NAI", InputError, r"no class named 'NAI'; the classes that contain it are 'snail' \(3\)"),
        ("4", InputError, "out of range: the output has 4 classes"),
        (1.5, InputTypeError, "a target is an index.*, not float"),
        (True, InputTypeError, "bool"),
        ([0, 1], InputError, "2 classes, one for each, but 1 were given.* targets="),
        ([], InputError, "0 classes"),
    ],
)
def test_wrong_targets(explainer, photographs, target, error, message):
    with pytest.raises(error, match=message):
        explainer(photographs[0], target)


def test_classes_that_contain_a_word_come_before_those_that_contain_its_letters(model, photographs):
    explainer = lrpfx.Explainer(model, preprocess=PREPROCESS, categories=["catamaran", "tiger cat", "dog", "Egyptian cat"])
    with pytest.raises(InputError, match=r"'tiger cat' \(1\), 'Egyptian cat' \(3\), 'catamaran' \(0\)"):
        explainer(photographs[0], "cat")


def test_an_index_may_be_text_unless_a_class_has_that_name(model, photographs):
    assert lrpfx.explain(model, photographs[0], "2", preprocess=PREPROCESS, categories=NAMES).target.name == "fish"
    assert lrpfx.explain(model, photographs[0], "2", preprocess=PREPROCESS).target.index == 2
    named = lrpfx.explain(model, photographs[0], "2", preprocess=PREPROCESS, categories=["2", "1", "0", "3"])
    assert named.target.index == 0


def test_a_composite_by_its_name(model, photographs):
    for name in ("EpsilonPlus", "epsilon_plus"):
        by_name = lrpfx.explain(model, photographs[0], 1, preprocess=PREPROCESS, composite=name)
        assert by_name == lrpfx.explain(model, photographs[0], 1, preprocess=PREPROCESS, composite=EpsilonPlus())
    box = lrpfx.Explainer(model, preprocess=PREPROCESS, composite="EpsilonGammaBox")
    bounded = lrpfx.Explainer(model, preprocess=PREPROCESS, composite=EpsilonGammaBox(low=-2.0, high=2.0))
    expected = bounded(photographs[0], 1).relevance  # the range is that of the preprocessing
    np.testing.assert_allclose(box(photographs[0], 1).relevance, expected, rtol=1e-4, atol=1e-9)
    with pytest.raises(InputError, match="no composite named 'EpsilonPlos'"):
        lrpfx.Explainer(model, composite="EpsilonPlos")
    with pytest.raises(InputTypeError, match=r"did you mean EpsilonPlus\(\)"):
        lrpfx.Explainer(model, composite=EpsilonPlus)


class OneClass:
    """The target of libraries that work with gradients: the value of one class for each sample."""

    def __init__(self, category):
        self.category = category

    def __call__(self, output):
        return output[self.category] if output.ndim == 1 else output[:, self.category]


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        (OneClass(2), "write target=2"),
        (lambda output: output[:, 2].sum(), "write target=2"),
        (lambda output: output[:, 2:3], "write target=2"),
        (lambda output: output[:, 2] - output[:, 1], r"write output=lambda output: your_function\(output\).reshape\(-1, 1\)"),
    ],
)
def test_functions_that_return_a_value_for_each_sample_get_the_line_to_write(model, photographs, target, remedy):
    with pytest.raises(InputError, match=remedy):
        lrpfx.explain(model, photographs[:2], target, preprocess=PREPROCESS)
    inputs = torch.stack([PREPROCESS(one) for one in photographs[:2]])
    explain_model = lrpfx.transform(model, "epsilon_plus", example_inputs=inputs)
    with pytest.raises(InputError, match=remedy):
        lrpfx.attribute(explain_model, inputs, target)


def test_the_line_to_write_for_a_function_is_right(model, photographs):
    def difference(output):
        return output[:, 2] - output[:, 1]

    found = lrpfx.explain(model, photographs[0], preprocess=PREPROCESS, output=lambda output: difference(output).reshape(-1, 1))
    contrast = lrpfx.explain(model, photographs[0], {2: 1.0, 1: -1.0}, preprocess=PREPROCESS)
    np.testing.assert_allclose(found.relevance, contrast.relevance, rtol=1e-4, atol=1e-8)


def folder_with_a_broken_file(folder, photographs):
    for number, photograph in enumerate(photographs):
        photograph.save(folder / f"{number}.png")
    (folder / "1.png").write_bytes(b"no picture")
    return folder


def test_a_broken_file_in_a_folder_is_a_row_with_its_reason(explainer, photographs, tmp_path):
    folder = folder_with_a_broken_file(tmp_path, photographs)
    with pytest.warns(LrpfxWarning, match="1 of 3 files were left out; `problems` says why: 1.png"):
        found = explainer(folder, [3, 2, 1])
    assert [one.name for one in found] == ["0.png", "2.png"] and [one.target.index for one in found] == [3, 1]
    assert list(found.problems) == ["1.png"] and "not an image" in found.problems["1.png"] and "1.png" in repr(found)
    frame = found.to_pandas()
    assert frame["name"].tolist() == ["0.png", "2.png", "1.png"] and frame["explained"].tolist() == ["snail", "dog", ""]
    assert frame["problem"].tolist() == ["", "", found.problems["1.png"]]
    assert frame["share"][0] == pytest.approx(found[0].balance.share)
    assert found.problems["1.png"] in found._repr_html_()
    with pytest.raises(InputError, match="is not an image"):
        explainer([folder / "0.png", folder / "1.png"])  # which the user has named
    for number in (0, 2):
        (folder / f"{number}.png").unlink()
    with pytest.raises(InputError, match="is not an image"):
        explainer(folder)


def test_several_explanations_as_one_picture_and_as_a_table(explainer, photographs, tmp_path):
    found = explainer(photographs, targets=["cat", "dog"])
    (path,) = found.save(tmp_path / "all.png")
    assert path == tmp_path / "all.png" and Image.open(path).size == found.sheet().size
    (tmp_path / "folder.png").mkdir()
    assert len(found.save(tmp_path / "folder.png")) == len(found.save(tmp_path / "new.v2")) == 3
    with pytest.raises(InputError, match="saved as"):
        found.save(tmp_path / "all.npz")
    assert [one[0].name for one in found.top(2)] == [one.top(1)[0].name for one in found] and len(found.top(2)[0]) == 2
    assert len(found.to_pandas()) == 6 and found[0].to_pandas()["explained"].tolist() == ["cat", "dog"]
    assert found.to_pandas()["output"].tolist()[:2] == pytest.approx([one.category.score for one in found[0].answers])


def test_wrong_arguments(model, explainer, photographs):
    with pytest.raises(InputError, match="pass one of them"):
        explainer(photographs[0], 1, targets=[1, 2])
    with pytest.raises(InputTypeError, match="targets= takes a list"):
        explainer(photographs[0], targets=3)
    with pytest.raises(InputError, match="but 3 were given"):
        explainer(photographs, [0])
    with pytest.raises(InputError, match="pass preprocess="):
        lrpfx.explain(model, photographs[0])
    with pytest.raises(InputError, match="pass preprocess="):
        lrpfx.explain(model, "photo.png")
    with pytest.raises(InputError, match="names are not known"):
        lrpfx.explain(model, photographs[0], "cat", preprocess=PREPROCESS)
    with pytest.raises(InputTypeError, match="not str"):
        lrpfx.Explainer("resnet50")
    with pytest.raises(InputError, match="batch_size"):
        lrpfx.Explainer(model, batch_size=0)
    with pytest.raises(InputError, match="3 names of classes"):
        lrpfx.explain(model, photographs[0], preprocess=PREPROCESS, categories=["a", "b", "c"])


def test_composites_by_content(explainer, photographs, model):
    explainer(photographs[0])
    assert explainer(photographs[0]).rules.startswith("GammaByDepth")
    named = lrpfx.explain(model, photographs[0], preprocess=PREPROCESS, composite=EpsilonPlus())
    assert named.rules == "EpsilonPlus()"
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 4)).eval()
    assert lrpfx.explain(flat, photographs[0], preprocess=PREPROCESS).rules == "EpsilonPlus()"
    attention = nn.Sequential(
        nn.Flatten(2), nn.TransformerEncoderLayer(784, 4, 16, batch_first=True), nn.Flatten(), nn.Linear(2352, 4)
    )
    assert lrpfx.explain(attention.eval(), photographs[0], preprocess=PREPROCESS).rules.startswith("AttnLRP")


def test_logits_of_a_model_that_ends_in_a_softmax(photographs):
    model = Net(softmax=True).eval()
    explanation = lrpfx.explain(model, photographs[0], 2, preprocess=PREPROCESS)
    probabilities = model(PREPROCESS(photographs[0])[None])[0].detach().numpy()
    assert explanation.target.probability == pytest.approx(float(probabilities[2]), rel=1e-5)
    assert explanation.target.score != pytest.approx(float(probabilities[2]))


def test_explainable_modules_and_programs(model, photographs, tmp_path):
    input = PREPROCESS(photographs[0])[None]
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=input)
    expected = lrpfx.explain(explain_model, photographs, targets=[1, 2], preprocess=PREPROCESS, categories=NAMES)
    assert expected[0].rules == "EpsilonPlus()"
    path = lrpfx.save(lrpfx.lower(explain_model, input, record=["second"]), tmp_path / "net.pt2")
    runner = lrpfx.load(path)
    found = lrpfx.explain(runner, photographs, targets=["dog", None], preprocess=PREPROCESS, categories=NAMES, record="second")
    np.testing.assert_allclose(found[0].input_relevance, expected[0].input_relevance, rtol=1e-4, atol=1e-7)
    assert found[1].answers[1].category == found[1].top(1)[0] and found[0].recorded["second"].shape == (8, 6, 6)
    settings = {"target": "targets", "number_of_targets": 2, "record": ["second"]}
    several = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, input, **settings), tmp_path / "several.pt2"))
    for targets in ([1], ["dog", None], [2, 1, None]):
        one, other = (
            lrpfx.explain(made, photographs, targets=targets, preprocess=PREPROCESS, categories=NAMES, record="second")
            for made in (runner, several)
        )
        for answer, expected_answer in zip(other[1].answers, one[1].answers, strict=True):
            assert answer.category == expected_answer.category
            np.testing.assert_allclose(answer.input_relevance, expected_answer.input_relevance, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(answer.layers["second"], expected_answer.layers["second"], rtol=1e-4, atol=1e-7)
    with pytest.raises(InputError, match="does not record 'first'"):
        lrpfx.explain(runner, photographs[0], preprocess=PREPROCESS, record="first")
    with pytest.raises(InputError, match="no ledger"):
        _ = found[0].ledger
    for made in (runner, explain_model):
        with pytest.raises(InputError, match="has its rules already"):
            lrpfx.Explainer(made, composite=EpsilonPlus())


def test_inputs_without_preprocessing(model):
    input = torch.randn(2, 3, 28, 28)
    found = lrpfx.explain(model, input, [1, 2])
    direct = lrpfx.attribute(lrpfx.transform(model, lrpfx.composites.GammaByDepth(), example_inputs=input), input, [1, 2])
    for place, one in enumerate(found):
        np.testing.assert_allclose(one.input_relevance, direct.relevance[place].numpy(), rtol=1e-4, atol=1e-6)
        assert one.photograph.size == (28, 28) and one.relevance.shape == (28, 28)
    assert isinstance(lrpfx.explain(model, input[0]), Explanation)
    with pytest.raises(InputError, match="different shapes"):
        lrpfx.explain(model, [input[0], input[0, :, :20]])
    with pytest.raises(InputError, match="int64"):
        lrpfx.explain(model, torch.zeros(1, 3, 4, 4, dtype=torch.long))


def test_preprocessing_that_cannot_be_undone(model, photographs):
    turned = transforms.Compose([lambda image: image.rotate(20), PREPROCESS])
    explanation = lrpfx.explain(model, photographs[0], preprocess=turned)
    assert explanation.geometry is None and explanation.photograph.size == (28, 28) and explanation.sheet().width > 500


def test_relevance_on_padding(model, photographs):
    padded = transforms.Compose([transforms.Resize((20, 28)), transforms.Pad((0, 4)), transforms.ToTensor()])
    explanation = lrpfx.explain(model, photographs[0], preprocess=padded)
    expected = explanation.input_relevance[:, [*range(4), *range(24, 28)]].sum(dtype=np.float64)
    assert explanation.geometry.box == (0, 0, 60, 40) and explanation.padding_relevance == pytest.approx(expected, rel=1e-6)
    assert explanation.relevance.sum() + expected == pytest.approx(explanation.balance.inputs, rel=1e-6)
    whole = lrpfx.explain(model, photographs[0], preprocess=PREPROCESS)
    assert whole.padding_relevance == pytest.approx(0, abs=1e-9)


def test_random_preprocessing_shows_what_the_model_saw(model, photographs):
    flipped = transforms.Compose([transforms.RandomHorizontalFlip(0.5), PREPROCESS])
    explanation = lrpfx.explain(model, photographs[0], preprocess=flipped)
    assert explanation.geometry is None and explanation.photograph.size == (28, 28)


def test_each_photograph_standardized_by_itself(model, photographs):
    def standardized(image):
        values = PREPROCESS(image)
        return (values - values.mean()) / values.std()

    assert lrpfx.explain(model, photographs[0], preprocess=standardized).rules == "GammaByDepth()"


def test_half_precision(model, photographs):
    exact = lrpfx.explain(model, photographs[0], 1, preprocess=PREPROCESS, composite=EpsilonPlus())
    half = lrpfx.explain(Net().eval().bfloat16(), photographs[0], 1, preprocess=PREPROCESS, composite=EpsilonPlus())
    assert half.input_relevance.dtype == np.float32 and exact.input_relevance.shape == half.input_relevance.shape


def test_it_is_plain_data(explanation, explainer, photographs):
    explanation.compare(["dog", "cat"])
    assert [answer.category.name for answer in explanation.answers] == ["fish"]  # drawing does not change it
    content = pickle.dumps(explanation)
    assert b"Conv2d" not in content
    for again in (pickle.loads(content), copy.deepcopy(explanation), copy.copy(explanation)):
        assert again == explanation and hash(again) == hash(explanation)
        assert again.sheet().tobytes() == explanation.sheet().tobytes() and again.compare(["fish"])
        for action in (partial(again.compare, ["snail"]), again.layers, partial(getattr, again, "ledger")):
            with pytest.raises(InputError) as caught:
                action()
            assert caught.value.topic == "explainers"
    assert explanation != explainer(photographs[0], "dog") and explanation != explanation.renamed("other")
    assert explanation.renamed("other").compare(["snail"])
    both = explainer(photographs[:2])
    assert pickle.loads(pickle.dumps(both)) == both == Explanations(list(both)) != both[:1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.name = "other"


def test_the_model_goes_when_its_explanations_go(photographs):
    model = Net().eval()
    kept = weakref.ref(model)
    explanation = lrpfx.explain(model, photographs[0], preprocess=PREPROCESS)
    copied = copy.copy(explanation)
    del model, explanation
    gc.collect()
    assert kept() is None and copied.overlay()


def test_a_style_is_stated_once(explanation):
    style = Style(cmap="bwr", opacity=0.5, percentile=90, contours=True)
    by_keywords = {"cmap": "bwr", "opacity": 0.5, "percentile": 90, "contours": True}
    for draw in (explanation.heatmap, explanation.overlay, explanation.sheet, explanation.compare, explanation.layers):
        assert draw(style=style).tobytes() == draw(**by_keywords).tobytes() != draw(style=style, cmap="hot").tobytes()
    with pytest.raises(InputTypeError, match="opacity") as caught:
        explanation.overlay(opacitty=0.5)
    assert caught.value.topic == "heatmaps"


def texts_drawn(monkeypatch):
    """A list of the texts that sheets are drawn with, as they are drawn."""
    found = []
    monkeypatch.setattr(sheets.Text, "lines", lambda self, text, *rest: found.append(text) or [text])
    return found


def test_pictures_say_what_colours_mean_and_how_much_they_hold(explanation, explainer, photographs, monkeypatch):
    words = texts_drawn(monkeypatch)
    for draw in (explanation.sheet, explanation.layers):
        words.clear()
        draw()
        assert {"against fish", "for fish"} <= set(words)
    words.clear()
    lrpfx.explain(explainer.model, photographs[0], 2, preprocess=PREPROCESS).sheet()
    assert {"against class 2", "for class 2"} <= set(words)
    share = explanation.balance.inputs / explanation.balance.output
    explanation.sheet()
    assert any(f"the map holds {share:.1%}" in one or f"the map holds {share:.0%} of the output" in one for one in words)
    assert any("the frame is what the model saw" in one for one in words)
    for draw in (partial(explanation.compare, [0, 1, 2]), explainer(photographs).sheet):
        words.clear()
        draw()
        assert {"against the class", "for the class"} <= set(words) and any("the maps hold" in one for one in words)


@pytest.mark.parametrize(
    ("balances", "words"),
    [
        ([Balance(9.247, 0.09898)], "the map holds 1.1% of the output; "),
        ([Balance(4.0, 3.0)], "the map holds 75% of the output; the rest is in biases and other constants"),
        ([Balance(2.0, 3.2)], "the map holds 160% of the output; biases and other constants take away 60%"),
        (
            [Balance(2.0, 3.2), Balance(2.0, 2.2)],
            "the maps hold 110% to 160% of the outputs; biases and other constants take away 10% to 60%",
        ),
        ([Balance(-2.0, -1.0)], "the map holds 50% of the output, which is -2: the model speaks against it; "),
        ([Balance(4.0, 3.0), Balance(1.0, 0.01)], "the maps hold 1.0% to 75% of the outputs; "),
        ([Balance(4.0, 3.0), Balance(8.0, 6.0)], "the maps hold 75% of the outputs; "),
    ],
)
def test_shares_in_words(balances, words):
    assert shares_in_words(balances).startswith(words)
    assert shares_in_words([Balance(0.0, 0.0)]) == "" and Balance(0.0, 0.0).share is None


@pytest.mark.parametrize("end", [nn.Identity(), nn.Sigmoid(), nn.Flatten(0)], ids=["logit", "sigmoid", "no classes"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_logit_is_a_class_and_its_opposite(sign, end, photographs):
    model = Net().eval()
    model.classes = nn.Linear(8, 1)
    nn.init.constant_(model.classes.bias, 3.0 * sign)
    model.softmax = end
    logit = float(
        model.classes(model.second(model.first(PREPROCESS(photographs[0])[None]).relu()).relu().mean((2, 3))).detach()
    )
    assert logit * sign > 0
    explainer = lrpfx.Explainer(model, preprocess=PREPROCESS, categories=["no bird", "bird"])
    found = explainer(photographs[0])
    assert found.target.name == ("bird" if sign > 0 else "no bird")
    assert found.target.score == pytest.approx(abs(logit), rel=1e-5)
    assert found.target.probability == pytest.approx(1 / (1 + np.exp(-abs(logit))), rel=1e-5)
    assert [one.name for one in found.top()] == (["bird", "no bird"] if sign > 0 else ["no bird", "bird"])
    bird, none = explainer(photographs[0], targets=["bird", 0]).answers
    assert (none.category.name, none.category.score) == ("no bird", pytest.approx(-logit, rel=1e-5))
    np.testing.assert_allclose(bird.input_relevance, -none.input_relevance, rtol=1e-4, atol=1e-9)
    assert found.compare(2).width and found.ledger.seed == pytest.approx(abs(logit), rel=1e-5)


def test_one_probability_is_no_logit(photographs):
    explain_model = lrpfx.transform(ending(torch.sigmoid, 1), EpsilonPlus())
    with pytest.raises(InputError, match="explain='logits'"):
        lrpfx.explain(explain_model, photographs[0], preprocess=PREPROCESS, categories=["no", "yes"])


def test_layers_and_the_ledger(explainer, photographs):
    recorded = lrpfx.Explainer(explainer.model, preprocess=PREPROCESS, record=["second"])(photographs[0], 1)
    assert recorded.recorded["second"].shape == (8, 6, 6)
    explanation = explainer(photographs[0], 1)
    assert explainer.spatial_layers() == ["relu", "relu_1"]
    assert explanation.layers().size == explanation.layers(["relu", "relu_1"]).size
    nothing = replace(recorded.answers[0], category=replace(recorded.target, score=0.0))
    without_shares = replace(recorded, answers=(nothing,)).layers(["second"])
    assert without_shares.height < recorded.layers(["second"]).height  # which has a line that says what the shares are
    assert explanation.ledger.seed == pytest.approx(explanation.target.score, rel=1e-5)
    assert sum(explanation.ledger.inputs.values()) == pytest.approx(explanation.balance.inputs, rel=1e-3)
    with pytest.raises(InputError, match="no node or module named"):
        explanation.layers(["third"])
    with pytest.raises(InputError, match="not \\(channels, height, width\\)"):
        explanation.layers(["classes"])


def test_pictures_and_files(explanation, explainer, photographs, tmp_path):
    assert explanation.overlay().size == explanation.photograph.size == explanation.heatmap().size
    for name in ("a.png", "b.jpg", "deep/c.webp"):
        assert Image.open(explanation.save(tmp_path / name)).width > 500
    with np.load(explanation.save(tmp_path / "a.npz")) as figures:
        np.testing.assert_array_equal(figures["relevance"], explanation.relevance)
        assert "targets" not in figures
    both = explainer(photographs[0], targets=["fish", "snail"])
    with np.load(both.save(tmp_path / "both.npz")) as figures:
        np.testing.assert_array_equal(figures["relevance"][0], explanation.relevance)
        np.testing.assert_array_equal(figures["input_relevance"], [one.input_relevance for one in both.answers])
        assert list(figures["targets"]) == ["fish", "snail"]
    with pytest.raises(InputError, match="saved as"):
        explanation.save(tmp_path / "a.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        explanation.save(tmp_path / "file" / "a.png")
    assert "data:image/jpeg;base64," in explanation._repr_html_() and "fish" in explanation._repr_html_()
    assert not list(Path(tmp_path).glob(".lrpfx*"))


@pytest.mark.parametrize("suffix", [".xbm", ".h5", ".grib", ".bufr", ".wmf", ".msp", ".mpg"])
def test_formats_that_pillow_cannot_write(explanation, tmp_path, suffix):
    with pytest.raises(InputError, match="a picture is saved as"):
        explanation.save(tmp_path / f"a{suffix}")
    assert not list(tmp_path.iterdir())


def test_paths_of_pictures(explanation, tmp_path, monkeypatch):
    for path in (None, 3, io.BytesIO()):
        with pytest.raises(InputTypeError, match="a path is a str or a Path"):
            explanation.save(path)
    with pytest.raises(lrpfx.LrpfxError, match="not the name of a file"):
        explanation.save(f"{tmp_path}/a\0b.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert explanation.save("~/a.png") == tmp_path / "a.png" and (tmp_path / "a.png").is_file()
    assert Explanations([explanation]).save("~/sheets") == [tmp_path / "sheets" / "image_1.png"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.jpg", "a.png", "a_2.png"], ["a", "a_3", "a_2"]),
        (["a_2.png", "a.jpg", "a.png", "a.gif"], ["a_2", "a", "a_3", "a_4"]),
        (["a.png", "A.png", "sub/a.png", "sub_a.png"], ["a", "A_2", "sub_a", "sub_a_2"]),
        (["a", "a_2", "a", "a_2", "a_2_2"], ["a", "a_2", "a_3", "a_2_3", "a_2_2"]),
    ],
)
def test_names_of_files_are_unique(names, expected):
    assert list(unique_names([Path(name).with_suffix("") for name in names])) == expected


def test_a_generator_of_photographs(explainer, photographs, capsys):
    found = explainer((one for one in photographs), [1, 2, 3])
    assert isinstance(found, Explanations) and [one.target.index for one in found] == [1, 2, 3]
    shown = lrpfx.Explainer(explainer.model, preprocess=PREPROCESS, progress=True)
    assert len(shown(one for one in photographs)) == 3 and "explaining" in capsys.readouterr().err


def test_the_model_is_unchanged(model, explainer, photographs):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explainer(photographs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(lrpfx.CaptureError, match="training"):
        lrpfx.explain(nn.Sequential(Net(), nn.Dropout()).train(), photographs[0], preprocess=PREPROCESS)


def test_models_of_transformers_and_timm_as_they_are(photographs):
    timm = pytest.importorskip("timm")
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 32}
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    model = ViTForImageClassification(ViTConfig(**sizes, patch_size=8, **labels)).eval()
    found = lrpfx.explain(model, photographs[0], "dog", preprocess=ViTImageProcessor(size={"height": 32, "width": 32}))
    assert found.target.name == "dog" and found.relevance.shape == (40, 60) and found.rules.startswith("AttnLRP")
    small = timm.create_model("resnet10t", pretrained=False, num_classes=4).eval()
    found = lrpfx.explain(small, photographs[0])
    assert found.geometry is not None and found.input_relevance.shape[1:] == (176, 176)


def test_notebooks_show_the_explanation(explanation):
    explanation = dataclasses.replace(explanation, categories=("<cat>", "a&b", "fish", "snail"))
    shown = Markup(explanation._repr_html_())
    head, *rows = shown.tables[0]
    assert head == ["class", "output", "probability"] and {cells[0] for cells in rows} == set(explanation.categories)
    assert shown.count("img") == 1 and str(explanation.balance) in "".join(shown.texts)


def test_progress_on_request(model, photographs, tmp_path, capsys):
    for number, one in enumerate(photographs):
        one.save(tmp_path / f"{number}.png")
    lrpfx.explain(model, tmp_path, preprocess=PREPROCESS)
    assert capsys.readouterr().err == ""
    explainer = lrpfx.Explainer(model, preprocess=PREPROCESS, progress=True)
    for images, count in ((tmp_path, 3), (photographs[:2], 2), (photographs[0], 1)):
        explainer(images)
        shown = capsys.readouterr().err
        assert "explaining: 100%" in shown and f"{count}/{count}" in shown and "image/s" in shown
    lrpfx.explain(model, torch.rand(2, 3, 28, 28), progress=True)
    assert "2/2" in capsys.readouterr().err


class Ending(nn.Module):
    """A small convolutional network with something at its end."""

    def __init__(self, end, classes=4):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.classes, self.end = nn.Conv2d(3, 6, 3), nn.Linear(6, classes), end

    def forward(self, x):
        return self.end(self.classes(self.first(x).relu().mean((2, 3))))


def ending(end, classes=4):
    model = Ending(end, classes).eval()
    with torch.no_grad():
        model.classes.bias.copy_(torch.linspace(-1.5, -0.5, classes))
    return model


@pytest.mark.parametrize(
    ("end", "probabilities"),
    [
        (lambda z: z.softmax(1), lambda z: z.softmax(1)),
        (lambda z: z.softmax(-1), lambda z: z.softmax(1)),
        (lambda z: z.log_softmax(1), lambda z: z.softmax(1)),
        (torch.sigmoid, torch.sigmoid),
        (lambda z: z.softmax(1) * 1.0, lambda z: z.softmax(1)),
        (lambda z: torch.cat([z.softmax(1), z.softmax(1)], 1), lambda z: None),
    ],
    ids=["softmax", "from the end", "log-softmax", "sigmoid", "not at the end", "two"],
)
def test_probabilities_are_those_of_the_model(end, probabilities, photographs):
    """Models that end in a softmax or sigmoid are explained before it, whatever the sign of the logit."""
    explained = lrpfx.explain(ending(end), photographs[0], 1, preprocess=PREPROCESS)
    logits = ending(nn.Identity())(PREPROCESS(photographs[0])[None])
    expected = probabilities(logits)
    assert explained.target.probability == (None if expected is None else pytest.approx(float(expected[0, 1]), rel=1e-5))
    assert explained.rules.startswith("GammaByDepth(low="), "a softmax is not attention"
    if explained.scores in (Scores.LOGITS, Scores.BINARY):
        plain = lrpfx.explain(ending(nn.Identity()), photographs[0], 1, preprocess=PREPROCESS)
        np.testing.assert_allclose(explained.relevance, plain.relevance, rtol=1e-4, atol=1e-9)
        assert explained.balance.output == pytest.approx(float(logits[0, 1]), rel=1e-5) and logits[0, 1] < 0


def test_probabilities_of_own_explainable_modules(photographs):
    input = PREPROCESS(photographs[0])[None]
    logits = ending(nn.Identity())(input)
    for end, expected in (
        (lambda z: z.softmax(1), logits.softmax(1)),
        (lambda z: z.softmax(-1), logits.softmax(1)),
        (lambda z: z.log_softmax(1), logits.softmax(1)),
        (torch.sigmoid, logits.sigmoid()),
        (nn.functional.logsigmoid, None),
    ):
        explain_model = lrpfx.transform(ending(end), EpsilonPlus(), example_inputs=input)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LrpfxWarning)
            explained = lrpfx.explain(explain_model, photographs[0], 0, preprocess=PREPROCESS)
        probability = explained.target.probability
        assert probability == (None if expected is None else pytest.approx(float(expected[0, 0]), rel=1e-5))


def test_a_changed_model_is_compiled_again(photographs):
    model = ending(nn.Identity())
    explainer = lrpfx.Explainer(model, preprocess=PREPROCESS, categories=NAMES)
    before = explainer(photographs[0], 0)
    compiled = explainer.explain_model
    assert explainer(photographs[1]) is not None and explainer.explain_model is compiled

    def changed():
        after = explainer(photographs[0], 0)
        input = PREPROCESS(photographs[0])[None].to(model.classes.weight)
        np.testing.assert_allclose(after.output, model(input)[0].detach(), rtol=1e-5)
        assert explainer.explain_model is not compiled
        return explainer.explain_model

    with torch.no_grad():
        model.classes.weight.mul_(2.0)
    compiled = changed()
    model.classes = nn.Linear(6, 4).eval()
    compiled = changed()
    model.load_state_dict(ending(nn.Identity()).state_dict())
    compiled = changed()
    model.float()
    changed()
    assert before.compare(["cat", "dog"]).size  # by the model that made the explanation


def test_layers_are_not_known_before_the_first_explanation(explainer, photographs):
    with pytest.raises(InputError, match="before the first explanation"):
        explainer.spatial_layers()
    assert explainer(photographs[0]).rules.startswith("GammaByDepth(low=") and explainer.spatial_layers()


def test_several_outputs(photographs):
    model = ending(lambda z: (z.flatten(), {"logits": z[:, :, None, None]}))
    with pytest.raises(InputTypeError, match="output="):
        lrpfx.explain(model, photographs[0], preprocess=PREPROCESS)
    explained = lrpfx.explain(
        model, photographs[0], 2, preprocess=PREPROCESS, output=lambda given: given[1]["logits"].flatten(1)
    )
    plain = lrpfx.explain(ending(nn.Identity()), photographs[0], 2, preprocess=PREPROCESS)
    np.testing.assert_allclose(explained.relevance, plain.relevance, rtol=1e-5, atol=1e-9)
    assert explained.ledger.seed == pytest.approx(explained.target.score, rel=1e-5)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda one: one.top(-1), "number of classes, 1 or more, not -1"),
        (lambda one: one.top(1.5), "number of classes, 1 or more"),
        (lambda one: one.compare(0), "number of classes, 1 or more"),
        (lambda one: one.compare(True), "number of classes, 1 or more"),
        (lambda one: one.compare("dog"), "compare takes a list, not 'dog'"),
        (lambda one: one.compare(None), "compare takes a list"),
        (lambda one: one.layers("first"), "layers takes a list, not 'first'"),
    ],
)
def test_wrong_questions(explanation, action, message):
    with pytest.raises((InputError, InputTypeError), match=message):
        action(explanation)


def test_forms_of_questions(model, explainer, explanation, photographs):
    import pandas

    assert explanation.compare(np.int64(2)).tobytes() == explanation.compare(2).tobytes()
    assert explanation.layers(np.array(["relu"])).size == explanation.layers(["relu"]).size
    for target in (torch.tensor(2), np.array(2), np.int64(2), [2, 2, 2], pandas.Series([2, 2, 2])):
        assert [one.target.index for one in explainer(photographs, target)] == [2, 2, 2]
    assert [one.target.index for one in explainer(photographs, range(3))] == [0, 1, 2]
    with pytest.raises(InputTypeError, match="targets= takes a list"):
        explainer(photographs[0], targets=np.array(3).item())
    by_name = lrpfx.Explainer(model, preprocess=PREPROCESS, categories={name: at for at, name in enumerate(NAMES)})
    assert by_name.categories == tuple(NAMES)
    assert lrpfx.Explainer(model, categories=np.array(NAMES), batch_size=np.int64(2)).categories == tuple(NAMES)
    with pytest.raises(InputTypeError, match="from indices to names, or from names to indices"):
        lrpfx.Explainer(model, categories={"a": "b"})
    with pytest.raises(InputError, match="the classes 0 to 1, each once"):
        lrpfx.Explainer(model, categories={0: "a", 2: "b"})
    for record in (None, 5):
        with pytest.raises(InputTypeError, match="record= takes a list"):
            lrpfx.Explainer(model, record=record)
    with pytest.raises(InputError, match="batch of images is empty"):
        lrpfx.explain(model, torch.zeros(0, 3, 28, 28))


def test_an_exact_name_wins(photographs):
    explainer = lrpfx.Explainer(ending(nn.Identity()), preprocess=PREPROCESS, categories=["a", "A", "b", "B"])
    assert [explainer(photographs[0], name).target.index for name in "aAbB"] == [0, 1, 2, 3]


def test_a_function_of_the_output_gets_the_output(photographs):
    def both(q):
        return torch.cat([1 - q, q], 1)

    settings = {"preprocess": PREPROCESS, "categories": ["no", "yes"], "output": both}
    with pytest.warns(lrpfx.LrpfxWarning, match="constants in the function given as output= take 1 of"):
        explained = lrpfx.explain(ending(torch.sigmoid, 1), photographs[0], **settings)
    yes = float(ending(nn.Identity(), 1)(PREPROCESS(photographs[0])[None]).sigmoid())
    np.testing.assert_allclose(explained.output, [1 - yes, yes], rtol=1e-6)
    assert explained.target.name == ("yes" if yes > 0.5 else "no")
    assert explained.target.probability == pytest.approx(max(yes, 1 - yes))


def test_probabilities_are_not_guessed(photographs):
    grouped = lrpfx.explain(ending(lambda z: z.view(-1, 2, 2).softmax(-1).flatten(1)), photographs[0], preprocess=PREPROCESS)
    assert grouped.scores is Scores.OTHER and grouped.target.probability is None
    small = Ending(nn.Identity()).eval()  # all logits between 0 and 1 are logits nevertheless
    with torch.no_grad():
        small.classes.weight.mul_(1e-3)
        small.classes.bias.copy_(torch.tensor([0.2, 0.3, 0.4, 0.1]))
    explained = lrpfx.explain(small, photographs[0], preprocess=PREPROCESS, composite=EpsilonPlus())
    assert explained.output.min() > 0.0 and explained.output.max() < 1.0
    assert explained.target.probability == pytest.approx(float(torch.tensor(explained.output).softmax(0)[2]))
    labels = ending(nn.Identity())
    labels.config = type("Config", (), {"problem_type": "multi_label_classification"})()
    explained = lrpfx.explain(labels, photographs[0], 1, preprocess=PREPROCESS)
    assert explained.target.probability == pytest.approx(float(torch.tensor(explained.output[1]).sigmoid()))


def test_changes_that_have_no_version_are_noticed(photographs):
    model = ending(lambda z: z * 1.0)
    explainer = lrpfx.Explainer(model, preprocess=PREPROCESS)
    explainer(photographs[0])

    def assert_follows():
        expected = model(PREPROCESS(photographs[0])[None].to(model.classes.weight))[0].detach()
        np.testing.assert_allclose(explainer(photographs[0]).output, expected, rtol=1e-5)

    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 1.5, model.parameters())
    assert_follows()
    model.first.stride = (2, 2)
    assert_follows()
    model.end = torch.tanh
    assert_follows()


SHIFT = 0.0


class Settings:
    def __init__(self):
        self.values = {"scale": [1.0]}


class Configured(nn.Module):
    """Its forward reads attributes of many kinds."""

    order = (0, 1, 2)

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(6, 3)
        self.list, self.dict = [1.0, [2.0]], {"power": {"of": 1.0}}
        self.settings, self.array = Settings(), np.ones(3)
        self.names, self.plain = {"ones"}, torch.ones(3)
        self.cell = cell = [0.0]
        self.end = lambda z: z + cell[0]

    def shift(self):
        return SHIFT

    def forward(self, x):
        z = self.classes(x.mean((2, 3)).repeat(1, 2))[:, list(self.order)]
        scale = self.list[0] * self.list[1][0] * self.settings.values["scale"][0] * float(self.array[0])
        return self.end(z * scale * self.plain + self.dict["power"]["of"] + float("more" in self.names) + self.shift())


def write(values, place, value):
    values[place] = value


CHANGES = {
    "a list": lambda model: write(model.list, 0, 2.0),
    "a list in a list": lambda model: model.list[1].insert(0, 5.0),
    "a dict in a dict": lambda model: model.dict["power"].update(of=3.0),
    "a list in a dict of an object": lambda model: write(model.settings.values["scale"], 0, 4.0),
    "an array": lambda model: write(model.array, 0, 3.0),
    "a set": lambda model: model.names.add("more"),
    "what a function closes over": lambda model: write(model.cell, 0, 1.0),
    "an attribute of the class": lambda model: setattr(type(model), "order", (2, 1, 0)),
    "a tensor that is an attribute": lambda model: model.plain.data.mul_(3.0),
    "weights through data": lambda model: model.classes.weight.data.mul_(2.0),
    "weights through an array": lambda model: write(model.classes.weight.detach().numpy(), 0, 1.0),
    "weights by another view": lambda model: model.classes.bias.detach().view(-1).add_(1.0),
    "a hook": lambda model: model.classes.register_forward_hook(lambda module, args, output: 2.0 * output),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_noticed(name, photographs, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(Configured, "order", Configured.order)
    model = Configured().eval().float()
    explainer = lrpfx.Explainer(model, composite=EpsilonPlus(), preprocess=PREPROCESS)
    input = PREPROCESS(photographs[0])[None].float()
    before = explainer(photographs[0]).output
    compiled = explainer.explain_model
    assert np.array_equal(explainer(photographs[0]).output, before) and explainer.explain_model is compiled
    CHANGES[name](model)
    np.testing.assert_allclose(explainer(photographs[0]).output, model(input)[0].detach(), rtol=1e-5)
    assert not np.allclose(explainer(photographs[0]).output, before)
    assert explainer.explain_model is not compiled


def test_changes_that_cannot_be_noticed_need_a_call(photographs, monkeypatch):
    """A global value that another function than `forward` reads."""
    explainer = lrpfx.Explainer(Configured().eval().float(), composite=EpsilonPlus(), preprocess=PREPROCESS)
    before = explainer(photographs[0]).output
    monkeypatch.setitem(globals(), "SHIFT", 5.0)
    assert np.array_equal(explainer(photographs[0]).output, before)
    explainer.recompile()
    np.testing.assert_allclose(explainer(photographs[0]).output, before + 5.0, rtol=1e-5)


def test_explanations_of_a_module_that_changed_say_so(photographs):
    input = PREPROCESS(photographs[0])[None]
    explain_model = lrpfx.transform(ending(nn.Identity()), EpsilonPlus(), example_inputs=input)
    explained = lrpfx.Explainer(explain_model, preprocess=PREPROCESS)(photographs[0], 1)
    assert explained.compare([0, 1]) and explained.ledger
    with torch.no_grad():
        next(explain_model.parameters()).mul_(3.0)
    for question in (lambda: explained.compare([2]), lambda: explained.ledger):
        with pytest.raises(InputError, match="the model has changed since"):
            question()


def test_one_target_for_each_photograph_of_folders(explainer, photographs, tmp_path):
    for number, photograph in enumerate(photographs):
        photograph.save(tmp_path / f"{number}.png")
    found = explainer([tmp_path, photographs[0]], [0, 1, 2, 3])
    assert [one.target.index for one in found] == [0, 1, 2, 3]


@dataclass(frozen=True)
class Second(Target):
    """The class of the second largest output: a target that lrpfx does not have."""

    def relevance(self, output):
        second = output.argsort(1, descending=True)[:, 1]
        return output * F.one_hot(second, output.shape[1])


TARGETS = [{0: 1.0, 2: -0.5}, lambda output: output * torch.tensor([1.0, 0.0, -0.5, 0.0]), Second()]


@pytest.mark.parametrize("target", TARGETS, ids=["contrast", "function", "own"])
def test_targets_of_attribute_explain_photographs(explainer, photographs, target):
    first, second = explainer(photographs[:2], target)
    for one in (first, second):
        found = lrpfx.attribute(explainer.explain_model, one.input[None], target)
        torch.testing.assert_close(torch.tensor(one.input_relevance), found.relevance[0])
        assert one.target.index is None and one.target.score == pytest.approx(one.ledger.seed)
        (layer,) = explainer.spatial_layers()[:1]
        assert one.layers([layer])
    if isinstance(target, dict):
        assert first.target.name == f"{explainer.categories[0]} − 0.5 · {explainer.categories[2]}"
    kept = pickle.loads(pickle.dumps(first))
    assert kept == first and kept.overlay()
    assert [one.category.index for one in first._answers_for([1])] == [1]


def test_contrasts_have_names_of_classes_and_are_one_of_several_targets(explainer, photographs):
    named = {explainer.categories[0]: 1.0, explainer.categories[2]: -0.5}
    found = explainer(photographs[0], targets=[1, named])
    by_index = explainer(photographs[0], {0: 1.0, 2: -0.5})
    assert (found.answers[1].input_relevance == by_index.input_relevance).all()
    with pytest.raises(InputError, match="no class named"):
        explainer(photographs[0], {"unknown": 1.0})


def test_graphs_with_fixed_sizes_are_made_again():
    """A model that is captured for one number of images is captured again for another, in evaluations, too."""

    class Rows(nn.Module):
        """Joins what it computed for each of the images of a batch: their number is fixed in the graph."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * 8 * 8, 4)

        def forward(self, x):
            count = 0
            for _ in x:
                count += 1
            return self.head(x.reshape(count, -1))

    model = Rows().eval()
    explainer = lrpfx.Explainer(model)
    images = torch.rand(5, 3, 8, 8)
    plain = lrpfx.Explainer(nn.Sequential(nn.Flatten(), model.head).eval())
    for count in (2, 5, 1, 2):
        found, expected = explainer(images[:count]), plain(images[:count])
        pairs = zip([found] if count == 1 else found, [expected] if count == 1 else expected, strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one.relevance, other.relevance, rtol=1e-6, atol=1e-9)
    data = lrpfx.measures.ImageData(model, images)
    assert lrpfx.evaluate({"explainer": explainer, "epsilon_plus": "epsilon_plus"}, data).samples.isfinite().all()


def test_graphs_for_a_range_of_sizes_are_made_again():
    """A forward that branches on a size has a graph for each side, and is captured once for both sizes of one side."""

    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(2, 3)

        def forward(self, x):
            return self.dense(x * 2 if x.shape[1] > 6 else x).relu().mean(1)

    model = Doubles().eval()
    explainer = lrpfx.Explainer(model, composite="epsilon_plus", form="series")
    made = []
    for length in (5, 6, 7, 9, 4, 8):
        x = torch.randn(1, length, 2)
        expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus(), x), x, 1).relevance
        np.testing.assert_allclose(explainer(x, 1).relevance.reshape(length, 2), expected[0], rtol=1e-5, atol=1e-8)
        made.append(explainer.explain_model)
    assert made[0] is made[1] is made[4] is not made[2] is made[3] is made[5]
    model.dense.weight.data.mul_(2)
    explainer(x, 1)
    torch.testing.assert_close(explainer.explain_model(x), model(x))
    assert explainer.explain_model not in made
