"""References: samples, crops and masks against what they are defined by, and sheets of them."""

import numpy as np
import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.utils.data import TensorDataset

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlusFlat
from lrpfx.concepts import Channel, Feature, collect, gallery, reference


class Spots(nn.Module):
    """Two convolutions, of which one unit sees 5×5 pixels, every second one in each dimension."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1, stride=2)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu().amax((2, 3)))


@pytest.fixture(scope="module")
def setting():
    torch.manual_seed(0)
    images = torch.rand(20, 3, 16, 16).double()
    dataset = TensorDataset(images, torch.arange(20) % 3)
    explain_model = lrpfx.transform(Spots().double().eval(), EpsilonPlusFlat(), example_inputs=images[:2])
    return explain_model, dataset, collect(explain_model, dataset, ["first", "second", "amax"])


@pytest.mark.parametrize(("layer", "stride", "reach"), [("first", 1, 1), ("second", 2, 2)])
def test_fields_are_those_of_the_largest_entry(setting, layer, stride, reach):
    explain_model, dataset, collection = setting
    found = reference(explain_model, dataset, collection, layer, 2, by="activation", reduction="max", count=5)
    assert [one.sample for one in found] == [
        row.sample for row in collection.top(layer, 2, by="activation", reduction="max", count=5)
    ]
    for one in found:
        image, label = dataset[one.sample]
        values = lrpfx.concepts.values_of(explain_model, image[None], layer)[layer][0, 2]
        y, x = divmod(int(values.argmax()), values.shape[1])
        assert one.position == (y, x) and one.label == label and torch.equal(one.input, image)
        expected = tuple(slice(max(0, stride * at - reach), min(16, stride * at + reach + 1)) for at in (y, x))
        assert one.field == (slice(0, 3), *expected)
        height, width = one.input[one.field].shape[1:]
        assert one.cropped.size == one.masked.size == (width, height)


@pytest.mark.parametrize("target", ["predicted", "true", 1])
def test_relevance_is_that_of_the_channel(setting, target):
    explain_model, dataset, _ = setting
    collection = collect(explain_model, dataset, ["second"], target=target)
    for one in reference(explain_model, dataset, collection, "second", 3, count=4):
        image, label = dataset[one.sample]
        chosen = {"predicted": None, "true": int(label)}.get(target, target)
        whole = lrpfx.attribute(explain_model, image[None], chosen, record="second").layers["second"][0].sum((1, 2))
        assert one.score == pytest.approx(float(whole[3] / whole.abs().sum()), rel=1e-9)
        alone = lrpfx.attribute(explain_model, image[None], chosen, conditions=[{"second": Channel(3)}]).relevance
        assert_close(one.relevance, alone[0, 0])
    for one in reference(explain_model, dataset, collection, "second", 3, by="activation", count=2):
        unit = lrpfx.attribute(explain_model, dataset[one.sample][0][None], Channel(3), start="second").relevance
        assert_close(one.relevance, unit[0])


def test_relevance_of_a_function_of_the_output(setting):
    explain_model, dataset, _ = setting

    def first_logit(output):
        return output * torch.tensor([1.0, 0.0, 0.0]).to(output)

    collection = collect(explain_model, dataset, ["second"], target=first_logit)
    with pytest.raises(lrpfx.InputError, match=r"first_logit [0-9a-f]+: pass it as target="):
        reference(explain_model, dataset, collection, "second", 3)
    assert len(reference(explain_model, dataset, collection, "second", 3, target=first_logit)) == 8


def test_masks_fade_what_has_little_relevance(setting):
    explain_model, dataset, collection = setting
    (one,) = reference(explain_model, dataset, collection, "first", 1, count=1)
    relevance = torch.zeros(3, 16, 16)
    relevance[:, 4:12, 4:12] = 1.0
    flat = type(one)(**{**vars(one), "relevance": relevance, "field": (slice(0, 3), slice(0, 16), slice(0, 16))})
    picture, masked = np.asarray(flat.picture).astype(int), np.asarray(flat.masked).astype(int)
    assert np.array_equal(masked[6:10, 6:10], picture[6:10, 6:10])
    assert abs(masked[:2] - 128).max() < 0.25 * 128
    assert "<img" in flat._repr_html_()
    empty = type(one)(**{**vars(flat), "relevance": torch.zeros(3, 16, 16)})
    assert abs(np.asarray(empty.masked).astype(int) - 128).max() < 0.25 * 128


def test_galleries(setting):
    explain_model, dataset, collection = setting
    plain = gallery(explain_model, dataset, collection, "second", [0, 1, 2], count=3, masked=False, cropped=False, title="T")
    whole = gallery(
        explain_model, dataset, collection, "second", [0, 1, 2], count=3, by="activation", reduction="max", width=600
    )
    assert plain.width == 1200 and whole.width == 600
    one = gallery(explain_model, dataset, collection, "second", [0], count=3)
    assert one.height < plain.height
    assert gallery(explain_model, dataset, collection, "amax", [4], count=2).width == 1200  # sees everything
    by_class = gallery(explain_model, dataset, collection, "second", [0], count=3, true=2)
    assert np.asarray(by_class).shape[1] == 1200


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(30, 6), nn.Conv1d(6, 5, 3, padding=1), nn.Linear(5, 2)

    def forward(self, ids):
        return self.head(self.mix(self.embedding(ids).transpose(1, 2)).relu().mean(2))


def test_compiled_modules(setting):
    explain_model, dataset, collection = setting
    compiled = torch.compile(explain_model, backend="aot_eager")
    found = collect(compiled, dataset, ["first", "second", "amax"])
    for by in ("activation", "relevance"):
        ours, theirs = (
            reference(module, dataset, one, "second", 3, by=by, count=3)
            for module, one in ((compiled, found), (explain_model, collection))
        )
        assert [one.sample for one in ours] == [one.sample for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one.relevance, other.relevance)


def test_references_of_texts():
    torch.manual_seed(0)
    sentences = [torch.randint(30, (length,)) for length in (4, 6, 9, 5)]
    example = {"ids": torch.stack([sentences[1]] * 2)}
    explain_model = lrpfx.transform(Words().double().eval(), AttnLRP(), example_inputs=example)
    dataset = [{"ids": sentence} for sentence in sentences]
    collection = collect(explain_model, dataset, {"embedding": Feature, "mix": Channel}, batch_size=1)
    for one in reference(explain_model, dataset, collection, "mix", 3, by="activation", reduction="max"):
        (place,) = one.position
        (field,) = one.field["ids"]
        length = len(sentences[one.sample])
        assert (field.start, field.stop) == (max(0, place - 1), min(length, place + 2))
        assert one.relevance["ids"].shape == (length, 6) and one.picture is None
        with pytest.raises(lrpfx.InputError, match="not images"):
            _ = one.masked
    with pytest.raises(lrpfx.InputError, match="not images"):
        gallery(explain_model, dataset, collection, "mix", [3])


def test_what_is_wrong(setting):
    explain_model, dataset, collection = setting
    images, labels = dataset.tensors
    other = lrpfx.transform(Spots().double().eval(), EpsilonPlusFlat(), example_inputs=images[:2])
    usual = {"explain_model": explain_model, "dataset": dataset, "collection": collection, "layer": "second", "channel": 3}
    for changed, message in (
        ({"explain_model": other}, "made of another model"),
        ({"dataset": TensorDataset(images.flip(0), labels)}, r"has .* but was ranked by .*: it is of another dataset"),
        ({"dataset": TensorDataset(images[:1], labels[:1])}, "the dataset has 1 samples, but the collection has sample"),
        ({"dataset": iter(images)}, "a dataset with indices"),
        ({"collection": {}}, "not of a dict"),
        ({"layer": "third"}, "'third' was not collected"),
        ({"channel": 9}, "channel 9 is out of range"),
        ({"target": lambda output: output * (output == output.amin(1, keepdim=True))}, "of another target"),
    ):
        with pytest.raises(lrpfx.InputError, match=message):
            reference(**{**usual, **changed})
    with pytest.raises(lrpfx.InputError, match="no references to draw"):
        gallery(explain_model, dataset, collection, "second", [])
