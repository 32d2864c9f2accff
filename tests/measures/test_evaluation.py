"""`lrpfx.evaluate`: means over groups, intervals, the table, and what it refuses."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.canonizers import AttributeCanonizer
from lrpfx.composites import EpsilonPlus
from lrpfx.measures import ImageData, Randomization, RandomMasks, RegionPerturbation, Score, Sensitivity, Sparseness
from lrpfx.measures.evaluation import Evaluation
from lrpfx.measures.shuffling import with_shuffled_weights

NAMES = ["epsilon_plus", "gradient_times_input", "random"]


def evaluation_of(samples, groups, better="higher"):
    return Evaluation(("a", "b"), {"x": better}, torch.tensor(samples), groups, {"a": 1.0, "b": 2.5}, {})


def test_every_image_is_measured_alone(data):
    """Numbers of an image depend neither on the size of a batch nor on the other images."""
    metrics = [RegionPerturbation("noise", 3, 4), RandomMasks("blur", 3, 5), "sparseness", "relevance_rank"]
    whole = lrpfx.evaluate(NAMES, data, metrics, batch_size=2)
    assert whole.samples.shape == (3, 6, 5) and whole.samples.dtype == torch.float64
    torch.testing.assert_close(lrpfx.evaluate(NAMES, data, metrics, batch_size=5).samples, whole.samples)
    some = dataclasses.replace(data, images=data.images[:3], groups=[0, 1, 2], masks=data.masks[:3])
    torch.testing.assert_close(lrpfx.evaluate(NAMES, some, metrics).samples, whole.samples[..., :3])


def test_a_map_of_what_the_model_reads_is_the_best():
    """A model that reads the brightness of one corner: a map of the corner is better than its negative and than chance."""

    class Corner(nn.Module):
        def forward(self, x):
            bright = x[:, :, :3, :4].mean((1, 2, 3))
            return torch.stack([10.0 * bright, torch.full_like(bright, 5.0)], 1)

    images = 0.1 * torch.rand(6, 3, 12, 16)
    images[:, :, :3, :4] += 0.9
    corner = torch.zeros(12, 16)
    corner[:3, :4] = 1.0
    maps = {"right": corner, "wrong": -corner}
    methods = {name: (lambda model, images, targets, map=map: map.expand(len(images), -1, -1)) for name, map in maps.items()}
    data = ImageData(Corner().eval(), images)
    found = lrpfx.evaluate({**methods, "random": "random"}, data, ["region_perturbation", "random_masks"])
    mean = {(one.method, one.metric): one.mean for one in found.scores}
    assert mean["right", "random_masks_mean"] > 0.9 and mean["wrong", "random_masks_mean"] < -0.9
    assert mean["right", "region_perturbation_mean"] > 0.3 > mean["random", "region_perturbation_mean"]
    assert mean["wrong", "region_perturbation_mean"] == pytest.approx(-mean["right", "region_perturbation_mean"])
    assert mean["right", "morf_mean"] < mean["random", "morf_mean"] < mean["wrong", "morf_mean"]


def test_forwards_are_shared_by_all_methods(data):
    """Random masks cost the same for one method and for three."""

    class Counting(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            if isinstance(x, torch.Tensor):  # not while it is traced
                seen.append(len(x))
            return self.model(x)

    seen, counts = [], []
    data = dataclasses.replace(data, model=Counting(data.model).eval())
    for names in (["random"], ["random", "epsilon_plus"]):
        seen.clear()
        lrpfx.evaluate(names, data, RandomMasks(count=7))
        counts.append(sum(seen))
    assert counts[1] - counts[0] <= 4, "to capture the model"
    assert counts[0] == 5 * 8 + 5 + 6, "masks, the outputs, and gradients with one in front of the first"


def test_models_that_return_probabilities_are_taken_as_they_are(data):
    metrics = [RandomMasks(count=5)]
    of_logits = lrpfx.evaluate(["random"], data, metrics).samples
    probabilities = dataclasses.replace(data, model=nn.Sequential(data.model, nn.Softmax(1)).eval())
    torch.testing.assert_close(lrpfx.evaluate(["random"], probabilities, metrics).samples, of_logits)


def test_targets(data):
    predicted = data.model(data.images).argmax(1)
    found = [lrpfx.evaluate("epsilon_plus", dataclasses.replace(data, targets=one), "sparseness").samples for one in (
        None, predicted, predicted.tolist(), 1, [1] * 5)]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
    torch.testing.assert_close(found[3], found[4], rtol=0, atol=0)


def test_means_are_of_groups():
    """The mean of the groups' means, and intervals that do not shrink if images of a group are repeated."""
    found = evaluation_of([[[1.0, 3.0, 8.0]], [[0.0, 0.0, 3.0]]], ("one", "one", "other"))
    assert [one.mean for one in found.scores] == [5.0, 1.5]
    assert (found.scores[0].low, found.scores[0].high) == (2.0, 8.0)
    again = evaluation_of([[[1.0, 3.0] * 5 + [8.0]], [[0.0] * 10 + [3.0]]], ("one",) * 10 + ("other",))
    assert again.scores == found.scores
    assert found.difference("a", "b", "x") == Score("a - b", "x", 3.5, 2.0, 5.0, "higher")
    with pytest.raises(lrpfx.InputError, match="there is no method 'c'"):
        found.difference("a", "c", "x")


def test_the_table_prints(data):
    found = lrpfx.evaluate(["grad_cam", "random"], data, [RegionPerturbation("blur", 4, 2), "sparseness"], batch_size=3)
    text = str(found)
    assert text.splitlines()[0].split() == ["method", *found.metrics, "gradients"]
    assert list(found.metrics) == ["region_perturbation_blur", "morf_blur", "lerf_blur", "sparseness"]
    assert "means over 3 groups of 5 images" in text and "lower is better: morf_blur" in text
    assert "grad_cam: of the last output of 4" in text and "describes maps, and does not rank them: sparseness" in text
    assert "sparseness" in found._repr_html_() and "<p>lower is better" in found._repr_html_()
    assert found.prices["random"] < found.prices["grad_cam"]
    picture = found.plot()
    assert picture.width == 1200 and picture.height > 200


def test_a_data_frame(data):
    pytest.importorskip("pandas")
    frame = lrpfx.evaluate(NAMES, data, ["sparseness", "pointing_game"]).to_pandas()
    assert list(frame.columns) == ["method", "metric", "better", "mean", "low", "high", "gradients"] and len(frame) == 6
    assert (frame["low"] <= frame["mean"]).all() and (frame["mean"] <= frame["high"]).all()


def test_the_best_method_is_drawn_first():
    high = evaluation_of([[[1.0, 1.0]], [[2.0, 2.0]]], (0, 1)).plot()
    low = evaluation_of([[[2.0, 2.0]], [[1.0, 1.0]]], (0, 1), "lower").plot()
    neither = evaluation_of([[[2.0, 2.0]], [[1.0, 1.0]]], (0, 1), "").plot()
    assert high.tobytes() != low.tobytes() and low.height == high.height == neither.height


def test_boxes_are_masks(data):
    """Left, top, right and bottom edges; a pixel is inside by its centre."""
    boxed = dataclasses.replace(data, masks=[[3.6, 2.5, 9.7, 8.6]] * 5)
    assert torch.equal(boxed.masks, data.masks)


def test_an_explainer_is_a_method(data):
    """The one that users have, with its own rules; alone, it is named explainer."""
    found = lrpfx.evaluate(lrpfx.Explainer(data.model, composite="epsilon_plus"), data, ["relevance_mass", "random_masks"])
    assert found.methods == ("explainer",)
    expected = lrpfx.evaluate("epsilon_plus", data, ["relevance_mass", "random_masks"])
    torch.testing.assert_close(found.samples, expected.samples)
    chosen = {"captured": lrpfx.Explainer(lrpfx.capture(data.model, data.images)), "model": lrpfx.Explainer(data.model)}
    both = lrpfx.evaluate(chosen, data, ["relevance_mass", Randomization(2)]).samples
    torch.testing.assert_close(both[0], both[1])
    other = lrpfx.Explainer(nn.Sequential(data.model).eval())
    with pytest.raises(lrpfx.InputError, match="the explainer 'mine' has another model than the data"):
        lrpfx.evaluate({"mine": other}, data)


def test_an_explainer_of_a_captured_model_is_of_its_present_weights(data):
    canonizers = [AttributeCanonizer(lambda name, module: None)]
    captured = lrpfx.capture(data.model, data.images, canonizers=canonizers)
    prepared = lrpfx.Explainer(captured, composite=EpsilonPlus(canonizers=canonizers))
    found = lrpfx.evaluate({"prepared": prepared, "epsilon_plus": "epsilon_plus"}, data, "random_masks")
    torch.testing.assert_close(found.samples[0], found.samples[1])
    changed = dataclasses.replace(data, model=copy.deepcopy(data.model))
    own = lrpfx.Explainer(lrpfx.capture(changed.model, data.images), composite="epsilon_plus")
    with torch.no_grad():
        next(changed.model.parameters()).mul_(0.5)
    with pytest.raises(lrpfx.InputError, match="'own' is of a captured model that had other values"):
        lrpfx.evaluate({"own": own}, changed, "random_masks")


def test_sensitivity_explains_changed_copies(data):
    """Gradient times input of a linear model changes as its input does."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 16, 3)).eval()
    data = dataclasses.replace(data, model=linear, targets=1)
    (found,) = lrpfx.evaluate("gradient_times_input", data, Sensitivity(0.1, 3), batch_size=2).samples[:, 0]
    weight = linear[1].weight[1].detach().reshape(3, 12, 16)
    for number, image in enumerate(data.images):
        size = 0.1 * (image.amax((1, 2)) - image.amin((1, 2)))
        random = torch.rand(3, 3, 12, 16, generator=torch.Generator().manual_seed(number))
        norms = [float((weight * (2 * one - 1) * size[:, None, None]).sum(0).norm()) for one in random]
        assert float(found[number]) == pytest.approx(max(norms) / float((weight * image).sum(0).norm()))


def test_randomization_tells_what_ignores_the_model(data):
    def brightness(model, images, targets):
        return images.mean(1)

    state = {name: value.clone() for name, value in data.model.state_dict().items()}
    methods = {"brightness": brightness, "random": "random", "gradient_times_input": "gradient_times_input"}
    found = lrpfx.evaluate(methods, data, Randomization(3)).samples
    torch.testing.assert_close(found[:2, 0], torch.ones(2, 5))
    assert float(found[2, 0].max()) < 0.99 and bool((found[:, 1] == 0).all())
    assert all(torch.equal(value, state[name]) for name, value in data.model.state_dict().items())
    with pytest.raises(lrpfx.InputError, match=r"the model has 3 layers with weights: choose Randomization\(steps=3\)"):
        lrpfx.evaluate(methods, data, "randomization")


def test_layers_lose_their_weights_from_the_output():
    """In the order of their calls, not of their names; what a module does not call itself goes with the module around it."""

    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.offset = nn.Parameter(torch.rand(6))
            self.last = nn.Linear(6, 3)
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.first = nn.Conv2d(3, 6, 4, 4)

        def forward(self, x):
            tokens = self.first(x).flatten(2).mT + self.offset
            return self.last(self.attention(tokens, tokens, tokens)[0].mean(1))

    model = Reversed().eval()
    for parameter in model.parameters():
        parameter.data.uniform_()
    expected = [{"last"}, {"last", "attention"}, {"last", "attention", "first"}, {"last", "attention", "first", "offset"}]
    for shuffled, layers in zip(with_shuffled_weights(model, torch.rand(1, 3, 8, 8), 4), expected, strict=True):
        before = dict(model.named_parameters())
        changed = {name.split(".")[0] for name, value in shuffled.named_parameters() if not torch.equal(value, before[name])}
        assert changed == layers
        for name, value in shuffled.named_parameters():
            assert torch.equal(value.flatten().sort().values, before[name].flatten().sort().values)


class Regression(nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))[:, None]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": lambda x: x}, lrpfx.InputTypeError, "the model is a torch.nn.Module, not function"),
        ({"model": nn.Linear(2, 2).train()}, lrpfx.InputError, r"Call model\.eval\(\) first"),
        ({"model": lrpfx.transform(nn.Linear(2, 2).eval(), "epsilon_plus")}, lrpfx.InputError, "the model has rules already"),
        ({"model": Regression().eval()}, lrpfx.InputError, r"the model returns \(5, 1\)"),
        ({"images": torch.ones(5, 3, 12, 16, dtype=torch.uint8)}, lrpfx.InputTypeError, "not torch.uint8"),
        ({"images": [1]}, lrpfx.InputTypeError, "not list"),
        ({"images": torch.rand(5, 12, 16)}, lrpfx.InputError, r"\(N, C, H, W\), not \(5, 12, 16\)"),
        ({"images": torch.full((5, 3, 12, 16), torch.nan)}, lrpfx.InputError, "image 0 has values that are not finite"),
        ({"groups": [0, 1]}, lrpfx.InputError, "there are 5 images and 2 groups"),
        ({"groups": torch.zeros(5, 2)}, lrpfx.InputTypeError, "groups are names or numbers"),
        ({"groups": ["a"] * 5}, lrpfx.InputError, "there is one group, and so no interval"),
        ({"masks": torch.ones(5, 12, 16)}, lrpfx.InputTypeError, r"boxes as numbers, \(N, 4\), not numbers of shape \(5, 12"),
        ({"masks": ["here"] * 5}, lrpfx.InputTypeError, "or boxes as numbers, not list"),
        ({"masks": [[4, 3, 9, 9]] * 4}, lrpfx.InputError, r"\(5, 12, 16\), not \(4, 12, 16\)"),
        ({"masks": [[9, 3, 4, 9]] * 5}, lrpfx.InputError, "mask 0 is empty"),
        ({"masks": torch.ones(5, 12, 12, dtype=torch.bool)}, lrpfx.InputError, r"\(5, 12, 16\), not \(5, 12, 12\)"),
        ({"masks": torch.ones(5, 12, 16, dtype=torch.bool)}, lrpfx.InputError, "mask 0 is full"),
        ({"masks": torch.zeros(5, 12, 16, dtype=torch.bool)}, lrpfx.InputError, "mask 0 is empty"),
        ({"targets": [0, 1]}, lrpfx.InputError, r"targets have the shape \(2,\), and there are 5 images"),
        ({"targets": 3}, lrpfx.InputError, "target 3 is out of range: the output has 3 classes"),
        ({"targets": [0.5] * 5}, lrpfx.InputTypeError, "indices of classes, not torch.float"),
        ({"targets": "cat"}, lrpfx.InputTypeError, "indices of classes, not str"),
    ],
)
def test_data_that_cannot_be_measured_is_an_error(data, change, error, message):
    with pytest.raises(error, match=message) as caught:
        lrpfx.evaluate("random", dataclasses.replace(data, **change), "sparseness")
    assert caught.value.topic in ("evaluation", "training-mode")


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ("sparsenes", lrpfx.InputError, "no metric named 'sparsenes'.*Did you mean 'sparseness'"),
        ([], lrpfx.InputError, "there is no metric"),
        (["sparseness", Sparseness()], lrpfx.InputError, "two metrics have the column sparseness"),
        ([Sparseness], lrpfx.InputTypeError, r"not a class: Sparseness\(\)"),
        ([3], lrpfx.InputTypeError, "a metric is a name or an object"),
        ("pointing_game", lrpfx.InputError, "pointing_game needs masks"),
        (RandomMasks(block=16), lrpfx.InputError, "blocks of 16 pixels cover the whole image"),
    ],
)
def test_metrics_that_do_not_fit_are_errors(data, metrics, error, message):
    with pytest.raises(error, match=message) as caught:
        lrpfx.evaluate("random", dataclasses.replace(data, masks=None), metrics)
    assert caught.value.topic == "evaluation"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RegionPerturbation("blurr"), "filled with mean, blur, noise, road, not 'blurr'. Did you mean 'blur'"),
        (lambda: RegionPerturbation(block=0), "block is the side of blocks in pixels, 1 or more, not 0"),
        (lambda: RegionPerturbation(steps=0), "steps is a number of steps"),
        (lambda: RandomMasks(count=2), "count is a number of masks, 3 or more, not 2"),
        (lambda: Sensitivity(radius=0.0), "radius must be a positive number, not 0"),
        (lambda: Sensitivity(count=0), "count is a number of changed copies, 1 or more, not 0"),
        (lambda: Randomization(steps=0), "steps is a number of steps"),
    ],
)
def test_settings_out_of_range_are_errors(make, message):
    with pytest.raises(lrpfx.InputError, match=message):
        make()


def test_data_are_no_tensor(data):
    with pytest.raises(lrpfx.InputTypeError, match=r"data is a lrpfx\.measures\.ImageData\(model, images\).*, not Tensor"):
        lrpfx.evaluate("random", data.images)
