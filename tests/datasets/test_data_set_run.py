"""Explanations of data sets against `lrpfx.attribute`, in all forms that data have, with samples that fail."""

import copy
import itertools
import os
import shutil
import subprocess
import sys
import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch
import zarr
from data_sets import CLASSES, LAYERS, Noise, Small, Stream, contrast, small_explain_model, small_model, tree
from helpers import ROOT
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lrpfx
import lrpfx.datasets
from lrpfx.concepts import Channel
from lrpfx.datasets.sample_explainer import SampleExplainer
from lrpfx.request.channels import kind_of
from lrpfx.request.question import Question
from lrpfx.samples.items import digest_of_inputs

COUNT = 23


def together(count=COUNT):
    """All samples as one batch."""
    images, labels = zip(*(Noise(count)[number] for number in range(count)), strict=True)
    return torch.stack(images), torch.tensor(labels)


# --- what is stored ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"target": "true"},
        {"target": 2},
        {"target": contrast},
        {"targets": ["predicted", "true", 3]},
        {"conditions": [{"first": [1, 2]}, {"first": [0]}]},
        {"conditions": [{"first": Channel(1, 3)}], "targets": [0, "true"]},
    ],
    ids=lambda asked: "-".join(asked) or "default",
)
@pytest.mark.parametrize("reduce", [None, "sum", "channels"])
def test_against_attribute(asked, reduce, explain_model, tmp_path):
    images, labels = together()
    meaning = {"predicted": None, "true": labels}

    def plain(target):
        return meaning[target] if isinstance(target, str) else target

    named = {name: plain(value) for name, value in asked.items() if name == "target"}
    named |= {name: [plain(one) for one in value] for name, value in asked.items() if name == "targets"}
    expected = lrpfx.attribute(explain_model, images, **named, conditions=asked.get("conditions"), record=list(LAYERS))
    found = lrpfx.datasets.attribute(
        explain_model, Noise(COUNT), tmp_path / "store", **asked, record=LAYERS, reduce=reduce, dtype="float64", batch_size=5,
        block_size=10,
    )  # fmt: skip
    leading = ("conditions" in asked) + ("targets" in asked)

    def reduced(relevance, how, channel):
        """By the definition, one sample at a time."""
        relevance = relevance.movedim(leading, 0)
        positions = [axis for axis in range(1 + leading, relevance.ndim) if axis != channel + leading]
        if how == "sum":
            return relevance.sum(channel + leading)
        return relevance.sum(positions) if how == "channels" and positions else relevance

    def same(values, expected):
        np.testing.assert_allclose(values, expected.detach().numpy(), rtol=1e-10, atol=1e-13)

    same(found.relevance[:], reduced(expected.relevance, reduce, 1))
    for name, relevance in expected.layers.items():
        channel = kind_of(explain_model, name, tuple(relevance.shape[leading:]), None).dimension % (relevance.ndim - leading)
        same(found.layers[name][:], reduced(relevance, LAYERS[name], channel))
    same(found["output"][:], expected.output)
    assert np.array_equal(found["prediction"][:], expected.output.argmax(1).numpy())
    assert np.array_equal(found.labels, labels.numpy())
    same(found["reached"][:], expected.relevance.movedim(leading, 0).flatten(1 + leading).sum(-1))
    assert found.done.all() and found.done.all() and not found.errors and len(found) == COUNT
    assert np.array_equal(found.explained, np.arange(COUNT))


def test_the_seed_is_what_the_output_was_given(explain_model, tmp_path):
    images, labels = together()
    output = explain_model(images).detach()
    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "a", targets=["predicted", "true", contrast])
    expected = torch.stack([output.amax(1), output[range(COUNT), labels], output[:, 0] - output[:, 1]], 1)
    np.testing.assert_allclose(found["seed"][:], expected, rtol=1e-12)
    for number in (0, 7):  # what did not reach the input is what the ledger says that constants took
        accounts = lrpfx.ledger(explain_model, images[number : number + 1], int(labels[number]))
        assert accounts.seed == pytest.approx(found["seed"][number, 1], rel=1e-10)
        assert accounts.inputs["x"] == pytest.approx(found["reached"][number, 1], rel=1e-10)


@pytest.mark.parametrize("scores", [2, 10])
def test_largest_outputs(scores, explain_model, tmp_path):
    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "a", scores=scores, dtype="float64")
    output = explain_model(together()[0]).detach()
    kept = min(scores, CLASSES)
    order = output.argsort(1, descending=True)[:, :kept]
    assert np.array_equal(found["top_classes"][:], order)
    np.testing.assert_allclose(found["top_scores"][:], output.gather(1, order))
    assert "output" not in found and found["top_classes"].shape == (COUNT, kept)


class Repeated(nn.Module):
    """Outputs of two values, each that of several classes."""

    def __init__(self, classes):
        super().__init__()
        self.linear, self.times = nn.Linear(36, 2).double(), classes // 2

    def forward(self, x):
        return torch.cat([self.linear(x.flatten(1))] * self.times, 1)


@pytest.mark.parametrize("classes", [4, 30, 300])
@pytest.mark.parametrize("scores", [1, 3, 1000])
def test_the_first_of_equal_outputs_is_the_prediction(scores, classes, tmp_path):
    explain_model = lrpfx.transform(Repeated(classes).eval(), lrpfx.composites.EpsilonPlus())
    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT, infinite=[2]), tmp_path / "a", scores=scores, dtype="float64")
    expected = [np.lexsort((np.arange(classes), -row))[:scores] for row in explain_model(together()[0]).detach().numpy()]
    kept = found.explained
    assert len(kept) == COUNT - 1 and 2 not in kept
    assert np.array_equal(found["top_classes"][kept], np.array(expected)[kept])
    assert np.array_equal(found["prediction"][kept], found["top_classes"][kept, 0])


def test_an_output_that_is_no_number_comes_first():
    """It is the largest for argmax too, so that the sample is found to have failed however few outputs are kept."""
    output = torch.tensor([[1.0, torch.nan, 5.0, torch.nan], [2.0, 1.0, torch.inf, torch.nan], [3.0, 3.0, 2.0, 3.0]])
    explaining = SampleExplainer(None, None, Question(), {}, None, 2, torch.float64, False)
    found = explaining._output(output, 3)
    assert found["top_classes"].tolist() == [[1, 3], [3, 2], [0, 1]]
    assert found["prediction"].tolist() == [1, 3, 0]


@pytest.mark.thorough
def test_compiled_modules(explain_model, tmp_path):
    compiled = torch.compile(explain_model, backend="eager", fullgraph=True)
    plain = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "a", record="first")
    found = lrpfx.datasets.attribute(compiled, Noise(COUNT), tmp_path / "b", record="first", batch_size=7)
    for name in ("relevance", "layers.first", "output"):
        np.testing.assert_allclose(found[name][:], plain[name][:], rtol=1e-4, atol=1e-7)


# --- forms of data -----------------------------------------------------------------------------------------------------------


def hugging_face(noise):
    return [{"image": image.tolist(), "label": label, "sentence": "left out"} for image, label in noise]


def web_dataset(noise):
    for number, (image, label) in enumerate(noise):
        yield {"__key__": f"{number:04}", "__url__": "shard.tar", "image.npy": image.numpy(), "cls": label}


def collated(items):
    return {"x": torch.stack([image for image, _ in items]), "labels": torch.tensor([label for _, label in items])}


FORMS = {
    "dataset": lambda noise: noise,
    "tensors": lambda noise: TensorDataset(*together(len(noise))),
    "list": list,
    "iterator": iter,
    "generator": lambda noise: (one for one in noise),
    "subset": lambda noise: Subset(noise, range(len(noise))),
    "loader": lambda noise: DataLoader(noise, batch_size=4),
    "loader_with_workers": lambda noise: DataLoader(noise, batch_size=4, num_workers=2),
    "loader_with_collate": lambda noise: DataLoader(noise, batch_size=4, collate_fn=collated),
    "loader_of_samples": lambda noise: DataLoader(noise, batch_size=None),
    "stream": lambda noise: Stream(noise),
    "loader_of_stream": lambda noise: DataLoader(Stream(noise), batch_size=4),
    "loader_of_stream_with_a_worker": lambda noise: DataLoader(Stream(noise), batch_size=4, num_workers=1),
    "hugging_face": hugging_face,
    "web_dataset": web_dataset,
    "arrays": lambda noise: [(image.numpy(), np.int64(label)) for image, label in noise],
    "keywords": lambda noise: [{"x": image, "label": torch.tensor(label)} for image, label in noise],
}


@pytest.fixture(scope="module")
def plain(explain_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "store"
    return lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, batch_size=4, block_size=8, dtype="float64")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data(form, explain_model, plain, tmp_path):
    noise = [Noise(COUNT)[number] for number in range(COUNT)] if form in ("list", "iterator", "generator") else Noise(COUNT)
    data = FORMS[form](noise)
    asked = {} if "loader_" in form or form == "loader" else {"batch_size": 4}
    found = lrpfx.datasets.attribute(explain_model, data, tmp_path / "store", block_size=8, dtype="float64", **asked)
    assert found.done.all() and len(found) == COUNT and not found.errors
    for name in ("label", "output", "prediction"):
        np.testing.assert_allclose(found[name][:], plain[name][:])
    (name,) = (one for one in found.names if one.startswith("relevance"))
    np.testing.assert_allclose(found[name][:], plain.relevance[:])
    if form == "web_dataset":
        assert found.keys == [f"{number:04}" for number in range(COUNT)]


def test_several_arguments(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

        def forward(self, ids, scale):
            return self.head((self.table(ids) * scale[:, None, None]).relu().mean(1))

    generator = torch.Generator().manual_seed(0)
    samples = [
        {"ids": torch.randint(20, (7,), generator=generator), "scale": torch.rand((), generator=generator), "id": number}
        for number in range(9)
    ]
    model = lrpfx.transform(Two().eval(), lrpfx.composites.AttnLRP())
    inputs = {name: torch.stack([sample[name] for sample in samples]) for name in ("ids", "scale")}
    expected = lrpfx.attribute(model, inputs)
    found = lrpfx.datasets.attribute(model, samples, tmp_path / "a", dtype="float64", batch_size=4)
    for name in ("ids", "scale"):
        np.testing.assert_allclose(found[f"relevance.{name}"][:], expected.relevance[name], rtol=1e-10)
    total = expected.relevance["ids"].flatten(1).sum(1) + expected.relevance["scale"]
    np.testing.assert_allclose(found["reached"][:], total, rtol=1e-10)
    assert found.keys == [str(number) for number in range(9)] and (found.labels == -1).all()
    pairs = [(sample["ids"], sample["scale"]) for sample in samples]
    other = lrpfx.datasets.attribute(model, pairs, tmp_path / "b", dtype="float64", batch_size=4)
    np.testing.assert_allclose(other["relevance.ids"][:], found["relevance.ids"][:])


def test_tokens(tmp_path):
    """The features of an embedding are its channels."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

        def forward(self, ids):
            return self.head(self.table(ids).relu().mean(1))

    model = lrpfx.transform(Tokens().eval(), lrpfx.composites.AttnLRP())
    ids = torch.randint(20, (9, 7), generator=torch.Generator().manual_seed(0))
    expected = lrpfx.attribute(model, ids).relevance.sum(2)
    found = lrpfx.datasets.attribute(model, ids, tmp_path / "a", dtype="float64", reduce="sum")
    np.testing.assert_allclose(found.relevance[:], expected, rtol=1e-10)
    texts = [ids[0], ids[1, :5], ids[2]]
    short = lrpfx.datasets.attribute(model, texts, tmp_path / "b", reduce="sum")
    assert short.explained.tolist() == [0, 2] and "pad texts to one length" in short.errors[1]


# --- photographs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (12 + number, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / ("sub" if number % 2 else "") / f"{number}.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n no picture")
    return tmp_path / "photos"


def preprocess(photograph):
    pixels = np.asarray(photograph.resize((8, 8)), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.fixture
def explainer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).float().eval()
    return lrpfx.Explainer(model, preprocess=preprocess, categories=["cat", "dog", "fox"], record="0")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["folder", "paths", "images", "dicts", "contents", "undecoded", "undecoded_paths"])
@pytest.mark.sampled(3)
def test_photographs(form, workers, folder, explainer, tmp_path):
    paths = sorted(path for path in folder.rglob("*.png"))
    data = {
        "folder": str(folder),
        "paths": paths,
        "images": [Image.open(path).convert("RGB") if path.name != "broken.png" else b"" for path in paths],
        "dicts": [{"image": path, "label": 1} for path in paths],
        "contents": [{"image": {"bytes": path.read_bytes(), "path": None}, "label": 1, "text": "beside it"} for path in paths],
        "undecoded": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
        "undecoded_paths": [{"image": {"bytes": None, "path": str(path)}, "other": 2} for path in paths],
    }[form]
    found = lrpfx.datasets.attribute(
        explainer, data, tmp_path / "store", target="dog", batch_size=2, workers=workers, block_size=4
    )
    broken = next(number for number, path in enumerate(paths) if path.name == "broken.png")
    assert list(found.errors) == [broken] and len(found) == 6
    if form == "folder":
        assert found.keys == [path.relative_to(folder).as_posix() for path in paths]
        assert "broken.png" in found.errors[broken]
    for number in found.explained.tolist():
        explanation = explainer(paths[number], "dog")
        (answer,) = explanation.answers
        np.testing.assert_allclose(found.relevance[number], answer.input_relevance, 1e-4, 1e-6)
        np.testing.assert_allclose(found.layers["0"][number], answer.layers["0"], 1e-4, 1e-6)
    assert found.manifest["categories"] == ["cat", "dog", "fox"] and found.manifest["settings"]["targets"] == 1
    again = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", target="dog", workers=workers)
    assert again.done.all()


def test_a_changed_folder_is_refused(folder, explainer, tmp_path, monkeypatch):
    """Also if files have the same size, and whether or not a sample is one of those that are compared by chance."""
    monkeypatch.setattr("lrpfx.samples.sources.COMPARED", 0)
    lrpfx.datasets.attribute(explainer, folder, tmp_path / "store")
    first, second = folder / "0.bmp", folder / "1.bmp"
    for number, file in enumerate((first, second)):
        Image.new("RGB", (9, 9), (80 * number, 0, 0)).save(file)
    with pytest.raises(lrpfx.InputError, match="begun with other samples"):
        lrpfx.datasets.attribute(explainer, folder, tmp_path / "store")
    lrpfx.datasets.attribute(explainer, folder, tmp_path / "other")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(lrpfx.InputError, match=r"sample \d is not what it was"):
        lrpfx.datasets.attribute(explainer, folder, tmp_path / "other")
    first.rename(folder / "9.bmp")
    with pytest.raises(lrpfx.InputError, match="begun with other names of files"):
        lrpfx.datasets.attribute(explainer, folder, tmp_path / "other")


def test_a_folder_is_the_same_as_its_copy_and_with_a_mended_file(folder, explainer, tmp_path):
    path = tmp_path / "store"
    with pytest.warns(lrpfx.LrpfxWarning, match=r"1 of \d+ samples could not be explained.*broken.png"):
        lrpfx.datasets.attribute(explainer, folder, path)
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    Image.new("RGB", (9, 9)).save(copy / "broken.png")
    assert not lrpfx.datasets.attribute(explainer, copy, path).is_complete
    assert lrpfx.datasets.attribute(explainer, copy, path, retry_failed=True).is_complete
    lrpfx.datasets.attribute(explainer, copy, tmp_path / "whole")
    assert lrpfx.datasets.open(path).manifest["data"] == lrpfx.datasets.open(tmp_path / "whole").manifest["data"]


# --- samples that fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_fail_are_recorded(workers, explain_model, plain, tmp_path):
    class Strange(Noise):
        def __getitem__(self, number):
            image, label = super().__getitem__(number)
            if number == 9:
                return torch.cat([image, image]), label
            return (image[:, :3] if number == 20 else image), (label if number != 12 else None)

    noise = Strange(COUNT, broken=(0, 5, 6), infinite=(17,))
    found = lrpfx.datasets.attribute(
        explain_model, noise, tmp_path / "a", target="true", batch_size=4, block_size=8, dtype="float64", workers=workers
    )
    assert list(found.errors) == [0, 5, 6, 9, 12, 17, 20] and found.done.all()
    assert "file 5 is broken" in found.errors[5] and "not finite" in found.errors[17]
    assert "(1, 3, 6), and (1, 6, 6)" in found.errors[20]
    assert np.isnan(found.relevance[5]).all() and found["prediction"][5] == -1 and found.labels[17] == 1
    expected = lrpfx.attribute(explain_model, *together()).relevance.numpy()
    np.testing.assert_allclose(found.relevance[found.explained], expected[found.explained], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("factor", "reason"), [(torch.nan, "the target has values"), (1e200, "is not finite")])
def test_relevance_that_is_not_finite(factor, reason, tmp_path):
    """A target function that fails for some samples, or gives them more relevance than float32 holds."""

    model = small_explain_model()
    scores = model(together()[0]).detach()[:, :1]
    middle = scores.median()

    def target(output):
        return torch.where(output[:, :1] > middle, output, factor * output)

    positive = (scores[:, 0] > middle).tolist()
    found = lrpfx.datasets.attribute(model, Noise(COUNT), tmp_path / "a", target=target)
    assert found.explained.tolist() == [number for number in range(COUNT) if positive[number]]
    assert all(reason in one for one in found.errors.values())


@pytest.mark.parametrize(
    ("data", "asked", "message"),
    [
        (Noise(0), {}, "the data set is empty"),
        (iter(()), {}, "the data set is empty"),
        (Noise(40, broken=range(40)), {}, "no sample of the data set can be loaded; sample 0: .*file 0 is broken"),
        (Noise(40), {"target": 7}, "target 7 is out of range"),
        (Noise(40), {"target": "cat"}, 'target is "predicted"'),
        (Noise(40), {"target": 1, "targets": [2]}, "pass one of them"),
        (Noise(40), {"targets": []}, "targets are several"),
        (Noise(40), {"record": "third"}, "third"),
        (Noise(40), {"record": {"first": "mean"}}, "must be one of"),
        (Noise(40), {"reduce": "max"}, "must be one of"),
        (Noise(40), {"conditions": [{"third": [0]}]}, "third"),
        (Noise(40), {"dtype": "int8"}, "dtype is"),
        (Noise(40), {"scores": 0}, "scores is a number, 1 or more"),
        (Noise(40), {"batch_size": -1}, "batch_size is a number, 1 or more"),
        (Noise(40), {"block_size": 0}, "block_size is a number, 1 or more"),
        (Noise(40), {"workers": -1}, "workers is a number"),
        ([torch.rand(6)] * 40, {}, "."),
        ([torch.rand(1, 6, 6)] * 3, {"target": "true"}, "has no label"),
        ("photographs", {}, "needs an lrpfx.Explainer"),
        ({"a": torch.rand(1, 6, 6)}, {}, "data is a folder"),
        (iter([torch.rand(1, 6, 6)]), {"workers": 2}, "workers= need a dataset with a length"),
        ([Image.new("RGB", (6, 6))], {}, "lrpfx.Explainer"),
        ([{"a": torch.rand(1, 6, 6), "b": torch.rand(2)}], {}, "the arguments of the model are 'x'"),
    ],
)
def test_errors_of_a_run(data, asked, message, explain_model, tmp_path):
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.datasets.attribute(explain_model, data, tmp_path / "store", **asked)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_what_explains(tmp_path):
    with pytest.raises(lrpfx.InputError, match="the module that lrpfx"):
        lrpfx.datasets.attribute(Small().eval(), Noise(4), tmp_path / "a")
    with pytest.raises(lrpfx.InputError, match=r"an explainable module or an lrpfx\.Explainer"):
        lrpfx.datasets.attribute("model", Noise(4), tmp_path / "a")
    with pytest.raises(lrpfx.InputError, match="tokens that are padded"):
        lrpfx.datasets.attribute(lrpfx.Explainer(Small(), tokenizer=str), ["text"], tmp_path / "a")


def test_a_data_set_that_ends_with_an_error(explain_model, tmp_path):
    def samples(last):
        for number, sample in zip(range(COUNT), Noise(COUNT), strict=False):
            if number == last:
                raise OSError("the connection is lost")
            yield sample

    with pytest.raises(lrpfx.InputError, match="the connection is lost"):
        lrpfx.datasets.attribute(explain_model, samples(12), tmp_path / "store", batch_size=2, block_size=4)
    begun = lrpfx.datasets.open(tmp_path / "store")
    assert len(begun) == 12 and begun.done.all() and not begun.is_complete
    found = lrpfx.datasets.attribute(explain_model, samples(-1), tmp_path / "store", batch_size=2)
    assert len(found) == COUNT and found.done.all()
    whole = lrpfx.datasets.attribute(explain_model, samples(-1), tmp_path / "whole", batch_size=2, block_size=4)
    assert tree(whole.path) == tree(found.path)


# --- going on ----------------------------------------------------------------------------------------------------------------


def interrupted_after(count):
    """A function for `progress=` that ends a run when so many samples are done."""

    def stop(done, total):
        if done >= count:
            raise KeyboardInterrupt

    return stop


def begun(explain_model, path, data=None, **asked):
    """A run that stops in the middle, by an interrupt."""

    def stop(done, total):
        if done > 12:
            raise KeyboardInterrupt

    data = Noise(COUNT) if data is None else data
    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explain_model, data, path, batch_size=2, block_size=4, progress=stop, **asked)
    found = lrpfx.datasets.open(path)
    assert 4 <= found.done.sum() <= 12 and not found.is_complete
    return found


def test_only_what_remains_is_loaded(explain_model, tmp_path, monkeypatch):
    monkeypatch.setattr("lrpfx.samples.sources.COMPARED", 3)
    loaded = []

    class Counting(Noise):
        def __getitem__(self, number):
            loaded.append(number)
            return super().__getitem__(number)

    done = begun(explain_model, tmp_path / "store", Counting(COUNT)).done
    loaded.clear()
    lrpfx.datasets.attribute(explain_model, Counting(COUNT), tmp_path / "store", batch_size=2)
    remaining = set(range(COUNT)) - set(done.nonzero()[0].tolist())
    assert remaining <= set(loaded) and len(loaded) == len(remaining) + 3 + 1  # and the first, which shows that any can be
    loaded.clear()
    lrpfx.datasets.attribute(explain_model, Counting(COUNT), tmp_path / "store", batch_size=2)
    assert len(loaded) == 3


def _exchanged(samples):
    return [*samples[:5], samples[7], samples[6], samples[5], *samples[8:]]


def _shifted(samples):
    return [*samples[:2], *samples[3:], (torch.rand(1, 6, 6, dtype=torch.float64), 0)]


def _relabelled(samples):
    return [(image, (label + 1) % CLASSES if number == 6 else label) for number, (image, label) in enumerate(samples)]


@pytest.mark.parametrize("kind", [list, iter], ids=["sequence", "stream"])
@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("change", [_exchanged, _shifted, _relabelled])
def test_every_sample_is_compared(change, is_complete, kind, explain_model, tmp_path):
    """Samples exchanged, one removed and another added, one label: none of them the first of a block."""
    path, samples = tmp_path / "store", list(Noise(COUNT))
    if is_complete:
        lrpfx.datasets.attribute(explain_model, kind(samples), path, block_size=4)
    else:
        begun(explain_model, path, kind(samples))
    before = tree(path)
    with pytest.raises(lrpfx.InputError, match=r"changed: sample [0-7] (is not what it was|had the label 2 when)"):
        lrpfx.datasets.attribute(explain_model, kind(change(samples)), path)
    assert tree(path) == before
    assert lrpfx.datasets.attribute(explain_model, kind(samples), path).is_complete


def test_a_sample_that_can_no_longer_be_loaded_is_a_change(explain_model, tmp_path):
    begun(explain_model, tmp_path / "store", Noise(COUNT))
    with pytest.raises(lrpfx.InputError, match=r"sample 2 could be loaded when this was begun, and cannot now: .*broken"):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT, broken=[2]), tmp_path / "store")


def test_digests_tell_samples_apart(explain_model, tmp_path):
    samples = [*Noise(6), *Noise(3)]
    found = lrpfx.datasets.attribute(explain_model, samples, tmp_path / "store", batch_size=4)["digest"][:]
    assert len(np.unique(found)) == 6 and (found[:3] == found[6:]).all() and (found > 0).all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(1), np.float32(2)),
        (np.bool_(True), np.bool_(False)),
        (np.datetime64("2020"), np.datetime64("2021")),
        (np.array(["a"]), np.array(["b"])),
        (Decimal(1), Decimal(2)),
        (range(2), range(3)),
        ({"a", "b"}, {"a", "c"}),
        (np.array([Decimal(1)], dtype=object), np.array([Decimal(2)], dtype=object)),
        (torch.float32, torch.float64),
        (bytearray(b"a"), bytearray(b"b")),
        (1, True),
        ("1", 1),
    ],
    ids=["float32", "bool", "datetime", "texts", "decimal", "range", "set", "objects", "dtype", "bytearray", "truth", "text"],
)
def test_digests_of_other_values(one, other):
    x = torch.ones(2)
    assert digest_of_inputs({"x": x, "age": one}) != digest_of_inputs({"x": x, "age": other})
    assert digest_of_inputs({"x": x, "age": one}) == digest_of_inputs({"x": x, "age": copy.deepcopy(one)})


def test_digests_of_objects_that_show_their_place_in_memory():
    assert digest_of_inputs({"x": object()}) == digest_of_inputs({"x": object()}) != digest_of_inputs({"x": None})


class WithAge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, age):
        return self.layer(x * age[:, None])


def test_scalars_of_numpy_tell_samples_apart(tmp_path):
    explain_model = lrpfx.transform(WithAge().eval(), lrpfx.composites.EpsilonPlus())
    samples = [{"x": torch.full((3,), 0.1), "age": np.float64(age)} for age in range(12)]
    stop = interrupted_after(4)
    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explain_model, Stream(samples), tmp_path / "store", block_size=4, batch_size=4, progress=stop)
    with pytest.raises(lrpfx.InputError, match="sample 0 is not what it was"):
        lrpfx.datasets.attribute(explain_model, Stream(samples[::-1]), tmp_path / "store")


# --- samples that fail -------------------------------------------------------------------------------------------------------


def test_failures_are_told_and_tried_again(explain_model, tmp_path):
    path, settings = tmp_path / "store", {"block_size": 4, "batch_size": 2, "record": LAYERS}
    broken = [*range(3), 9, 17]
    told = r"5 of 23 samples could not be explained; the first is sample 0: .*file 0 is broken.*retry_failed=True"
    for _ in range(2):  # also when nothing is left to do
        with pytest.warns(lrpfx.LrpfxWarning, match=told):
            found = lrpfx.datasets.attribute(explain_model, Noise(COUNT, broken), path, **settings)
        assert not found.is_complete and found.done.all() and "of which 5 failed" in repr(found)
    loaded = []

    class Counting(Noise):
        def __getitem__(self, number):
            loaded.append(number)
            return super().__getitem__(number)

    assert list(lrpfx.datasets.attribute(explain_model, Counting(COUNT), path, **settings).errors) == broken
    found = lrpfx.datasets.attribute(explain_model, Counting(COUNT, [17]), path, retry_failed=True, **settings)
    assert list(found.errors) == [17]
    loaded.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lrpfx.datasets.attribute(explain_model, Counting(COUNT), path, retry_failed=True, **settings)
    assert found.is_complete and not found.errors
    lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "whole", **settings)
    assert tree(path) == tree(tmp_path / "whole")


def test_a_stream_tries_failures_again(explain_model, tmp_path):
    path = tmp_path / "store"
    lrpfx.datasets.attribute(explain_model, Stream(Noise(COUNT, infinite=[5, 22])), path, block_size=4)
    found = lrpfx.datasets.attribute(explain_model, Stream(Noise(COUNT, infinite=[5, 22])), path, retry_failed=True)
    assert list(found.errors) == [5, 22]
    assert list(lrpfx.datasets.attribute(explain_model, Stream(Noise(COUNT)), path).errors) == [5, 22]
    assert lrpfx.datasets.attribute(explain_model, Stream(Noise(COUNT)), path, retry_failed=True).is_complete  # mended
    lrpfx.datasets.attribute(explain_model, Stream(Noise(COUNT)), tmp_path / "whole", block_size=4)
    assert tree(path) == tree(tmp_path / "whole")


def test_half_of_a_block_that_is_tried_again_does_not_count(explain_model, tmp_path, monkeypatch):
    """A run that is killed between the files of such a block, at each of them."""
    settings = {"block_size": 8, "batch_size": 8}
    lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "whole", **settings)
    expected = tree(tmp_path / "whole")
    write = zarr.Array.__setitem__
    for kept in range(9):
        path, written = tmp_path / str(kept), []

        def stopped(array, key, value, written=written, kept=kept):
            if len(written) == kept:
                raise KeyboardInterrupt
            written.append(array.name)
            write(array, key, value)

        lrpfx.datasets.attribute(explain_model, Noise(COUNT, broken=[3]), path, **settings)
        with monkeypatch.context() as patched:
            patched.setattr(zarr.Array, "__setitem__", stopped)
            with pytest.raises(KeyboardInterrupt):
                lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, retry_failed=True, **settings)
        assert not lrpfx.datasets.open(path).done[:8].any()
        assert lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **settings).is_complete
        assert tree(path) == expected


def test_inputs_that_are_exchanged_are_another_data_set(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, a, b):
            return self.layer(a - b)

    pairs = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    explain_model = lrpfx.transform(Two().eval(), lrpfx.composites.EpsilonPlus())
    lrpfx.datasets.attribute(explain_model, [{"a": a, "b": b} for a, b in pairs], tmp_path / "store")
    lrpfx.datasets.attribute(explain_model, [{"b": b, "a": a} for a, b in pairs], tmp_path / "store")  # the same
    with pytest.raises(lrpfx.InputError, match="sample 0 is not what it was"):
        lrpfx.datasets.attribute(explain_model, [{"a": b, "b": a} for a, b in pairs], tmp_path / "store")


def test_tried_again_they_are_compared(explain_model, tmp_path):
    """A block with a failure is explained anew only from the samples that it had."""
    path, samples = tmp_path / "store", list(Noise(40))
    lrpfx.datasets.attribute(explain_model, Noise(40, [3]), path, block_size=8)
    before = tree(path)
    with pytest.raises(lrpfx.InputError, match="sample 5 is not what it was"):
        lrpfx.datasets.attribute(explain_model, _exchanged(samples), path, retry_failed=True)
    assert tree(path) == before


def failing_if_asked(output):
    """A target that begins to fail."""
    if "FAILING" in os.environ:
        raise ValueError("no")
    return output


def failing_for(explain_model, number):
    """A target that begins to fail for one sample of noise."""
    unusual = explain_model(Noise(number + 1)[number][0][None]).detach()

    def target(output):
        return failing_if_asked(output) if output.isclose(unusual).all(1).any() else output

    return target


@pytest.mark.parametrize("data", [Noise, lambda *arguments: Stream(Noise(*arguments))], ids=["sequence", "stream"])
def test_tried_again_what_was_explained_stays(data, explain_model, tmp_path, monkeypatch):
    path = tmp_path / "store"
    settings = {"block_size": 8, "batch_size": 8, "target": failing_if_asked}
    lrpfx.datasets.attribute(explain_model, data(24, [], [10]), path, **settings)
    before = tree(path)
    monkeypatch.setenv("FAILING", "1")
    with pytest.raises(lrpfx.InputError, match=r"function .* failed: ValueError"):
        lrpfx.datasets.attribute(explain_model, data(24), path, retry_failed=True, **settings)
    assert tree(path) == before


def test_a_failure_does_not_replace_what_was_explained(explain_model, tmp_path, monkeypatch):
    """A function that fails for one sample now: what a former run found stays, in a block that is explained anew."""
    path = tmp_path / "store"
    settings = {"block_size": 8, "batch_size": 8, "target": failing_for(explain_model, 12), "record": LAYERS}
    before = lrpfx.datasets.attribute(explain_model, Noise(24, [], [10]), path, **settings)
    expected = {name: before[name][:] for name in before.names}
    monkeypatch.setenv("FAILING", "1")
    found = lrpfx.datasets.attribute(explain_model, Noise(24, [], []), path, retry_failed=True, **settings)
    assert found.is_complete and not found.errors
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name][12], values[12], err_msg=name)
        now, then = np.delete(found[name][:], 10, 0), np.delete(values, 10, 0)
        if np.issubdtype(then.dtype, np.floating):  # in other batches, which may round otherwise
            np.testing.assert_allclose(now, then, rtol=1e-12, atol=1e-15, err_msg=name)
        else:
            np.testing.assert_array_equal(now, then, err_msg=name)


def test_half_a_block_is_not_what_was_explained(explain_model, tmp_path, monkeypatch):
    """A block of which a retry was killed in the middle may be of two runs: its failures do not get rows of before."""
    path = tmp_path / "store"
    settings = {"block_size": 8, "batch_size": 8, "target": failing_for(explain_model, 12)}
    lrpfx.datasets.attribute(explain_model, Noise(24), path, **settings)
    (path / "done" / "c" / "1").unlink()
    monkeypatch.setenv("FAILING", "1")
    found = lrpfx.datasets.attribute(explain_model, Noise(24), path, **settings)
    assert list(found.errors) == [12] and np.isnan(found["relevance"][12]).all()


def test_a_resumed_run_ends_if_no_sample_can_be_explained(explain_model, tmp_path, monkeypatch):
    path = tmp_path / "store"
    settings = {"block_size": 4, "batch_size": 4, "target": failing_if_asked}
    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explain_model, Noise(24), path, progress=interrupted_after(8), **settings)
    before = tree(path)
    monkeypatch.setenv("FAILING", "1")
    with pytest.raises(lrpfx.InputError, match=r"function .* failed: ValueError"):
        lrpfx.datasets.attribute(explain_model, Noise(24), path, **settings)
    assert tree(path) == before


@pytest.mark.parametrize("count", [35, 200])
def test_broken_files_that_come_first_do_not_end_a_run(count, explain_model, tmp_path):
    found = lrpfx.datasets.attribute(explain_model, Noise(count + 20, range(count)), tmp_path / "store")
    assert len(found.errors) == count and len(found.explained) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": lambda: small_explain_model(1)}, "other model, weights or rules"),
        ({"model": lambda: small_explain_model(0, lrpfx.composites.EpsilonPlus())}, r"composite \(it was 'EpsilonPlusFlat"),
        ({"target": 1}, r"other targets \(it was 'predicted', and is 1 now\)"),
        ({"target": contrast}, "other targets"),
        ({"record": "first"}, "other record"),
        ({"reduce": "sum"}, "other reduce"),
        ({"dtype": "float16"}, "other dtype"),
        ({"scores": 2}, "other scores"),
        ({"conditions": [{"first": [0]}]}, "other conditions"),
        ({"select_output": lambda output: output}, "other output"),
        ({"block_size": 5}, r"other block_size \(it was 4, and is 5 now\)"),
        ({"data": Noise(COUNT + 1)}, r"other samples \(it was 23, and is 24 now\)"),
        ({"data": iter(Noise(COUNT))}, "other kind"),
        ({"data": Noise(COUNT, infinite=[0])}, "the data set has changed"),
        ({"data": [(image + 1, label) for image, label in Noise(COUNT)]}, "the data set has changed: sample 0"),
    ],
)
def test_what_has_changed_is_refused(change, message, explain_model, tmp_path):
    begun(explain_model, tmp_path / "store")
    before = tree(tmp_path / "store")
    change = dict(change)
    model, data = change.pop("model", lambda: explain_model)(), change.pop("data", Noise(COUNT))
    with pytest.raises(lrpfx.InputError, match=message) as refused:
        lrpfx.datasets.attribute(model, data, tmp_path / "store", **change)
    assert refused.value.topic == "changed-data" and tree(tmp_path / "store") == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: iter(list(Noise(COUNT))[1:]), "sample 0 is not what it was"),
        (lambda: iter(list(Noise(COUNT))[:3]), "has changed"),
        (lambda: itertools.chain(itertools.islice(Noise(COUNT), 4), [(torch.rand(1, 6, 6), 0)] * 20), "sample 4 is not what"),
    ],
)
def test_a_changed_stream_is_refused(other, message, explain_model, tmp_path):
    begun(explain_model, tmp_path / "store", iter(Noise(COUNT)))
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.datasets.attribute(explain_model, other(), tmp_path / "store", batch_size=2)


@pytest.mark.parametrize("lost", ["relevance/c/2/0/0/0", "done/c/2"])
@pytest.mark.parametrize(("length", "batch_size"), [(32, 8), (36, 8), (48, 8), (60, 16)])
def test_a_lost_end_of_a_stream_is_explained_from_the_same_stream_alone(length, batch_size, lost, explain_model, tmp_path):
    path, settings = tmp_path / "store", {"block_size": 16, "dtype": "float16"}
    lrpfx.datasets.attribute(explain_model, Stream(Noise(40)), path, batch_size=8, **settings)
    before = tree(path)
    (path / lost).unlink()
    with pytest.raises(lrpfx.InputError, match="the data set has changed: it had 40 samples"):
        lrpfx.datasets.attribute(explain_model, Stream(Noise(length)), path, batch_size=batch_size, **settings)
    lrpfx.datasets.attribute(explain_model, Stream(Noise(40)), path, batch_size=8, **settings)
    assert tree(path) == before


@pytest.mark.parametrize(
    "label", [torch.tensor([1]), np.eye(4)[1], torch.tensor(1.0)], ids=["one in a row", "one-hot", "float"]
)
def test_what_is_not_a_label(label, explain_model, tmp_path):
    with pytest.raises(lrpfx.InputError, match="is not a label: that is one integer"):
        lrpfx.datasets.attribute(explain_model, [(torch.rand(1, 6, 6), label)] * 4, tmp_path / "store")


CHOSEN = 0


def of_chosen(output):
    return output * torch.eye(CLASSES, dtype=output.dtype)[CHOSEN]


def test_functions_are_told_apart(explain_model, tmp_path, monkeypatch):
    """By their code, and by what they close over or read in their module."""

    def target_of(weight):
        return lambda output: weight * output

    def run(target):
        return lrpfx.datasets.attribute(explain_model, Noise(4), tmp_path / target.__name__, target=target)

    for function in (target_of(2.0), target_of(2.0), of_chosen, of_chosen):
        run(function)
    monkeypatch.setitem(of_chosen.__globals__, "CHOSEN", 1)
    for other in (target_of(3.0), lambda output: 2.0 * output + 0.0, of_chosen):
        with pytest.raises(lrpfx.InputError, match="begun with other targets"):
            run(other)


# --- the disk ----------------------------------------------------------------------------------------------------------------

FULL = """
import pathlib, resource, signal, sys
import data_sets, lrpfx
path, limit = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def reached(done, total):
    if (pathlib.Path(path) / "done" / "c" / "1").exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    data_sets.run(path, 400, block_size=8, progress=reached)
except lrpfx.ArtefactError as error:
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of files are those of Linux")
@pytest.mark.thorough
def test_a_full_disk(tmp_path):
    """Files can no longer be written after some blocks: the run ends with an error, and nothing is lost."""
    from data_sets import run

    path = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(path), "100"], capture_output=True, text=True, env=environment, check=True
    )
    assert "store cannot be written: File too large" in process.stdout
    found = lrpfx.datasets.open(path)
    assert 8 <= found.done.sum() < 400
    assert run(path, 400, block_size=8).done.all()
    run(tmp_path / "whole", 400, block_size=8)
    assert tree(path) == tree(tmp_path / "whole")


def test_places_that_cannot_be_written(explain_model, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(lrpfx.ArtefactError, match="is a file"):
        lrpfx.datasets.attribute(explain_model, Noise(4), tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("text")
    with pytest.raises(lrpfx.ArtefactError, match="is not a store of lrpfx"):
        lrpfx.datasets.attribute(explain_model, Noise(4), tmp_path / "folder")
    assert (tmp_path / "folder" / "notes.txt").read_text() == "text"
    with pytest.raises(lrpfx.ArtefactError, match="cannot be written"):
        lrpfx.datasets.attribute(explain_model, Noise(4), tmp_path / "file" / "store")


def test_the_model_stays_as_it_is(tmp_path):
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlus())
    lrpfx.datasets.attribute(explain_model, Noise(4), tmp_path / "a", workers=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in explain_model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_progress(explain_model, tmp_path, capsys):
    seen = []
    lrpfx.datasets.attribute(
        explain_model, Noise(10), tmp_path / "a", batch_size=4, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(4, 10), (8, 10), (10, 10)]
    lrpfx.datasets.attribute(explain_model, Noise(10), tmp_path / "b", progress=True)
    assert "10/10" in capsys.readouterr().err


# --- what strangers found ----------------------------------------------------------------------------------------------------


def test_a_finished_store_of_a_stream_takes_no_other_data(tmp_path):
    explain_model, settings = small_explain_model(), {"block_size": 8}
    path = tmp_path / "store"
    lrpfx.datasets.attribute(explain_model, Stream(Noise(40)), path, **settings)
    assert len(lrpfx.datasets.attribute(explain_model, Stream(Noise(40)), path, **settings)) == 40
    for other in (Stream(Noise(60)), Stream(Noise(38)), Stream(Subset(Noise(100), range(5, 45)))):
        with pytest.raises(lrpfx.InputError, match="the data set has changed"):
            lrpfx.datasets.attribute(explain_model, other, path, **settings)


@pytest.mark.parametrize(
    ("target", "wrong", "reason"),
    [("predicted", 1 << 70, "class indices"), ("true", 1 << 70, "class indices"), ("true", -1, "has no label")],
)
def test_a_wrong_label_costs_its_own_row(target, wrong, reason, tmp_path):
    samples = [(image, wrong if number in (3, 9) else label) for number, (image, label) in enumerate(Noise(16))]
    found = lrpfx.datasets.attribute(small_explain_model(), samples, tmp_path / "store", target=target)
    assert list(found.errors) == [3, 9] and reason in found.errors[9]


@pytest.mark.parametrize("kind", [list, iter])
def test_other_labels_are_another_data_set(kind, tmp_path):
    explain_model, path = small_explain_model(), tmp_path / "store"
    samples = list(Noise(40))
    begun(explain_model, path, kind(samples))
    others = [(image, (label + 1) % CLASSES) for image, label in samples]
    with pytest.raises(lrpfx.InputError, match="the data set has changed"):
        lrpfx.datasets.attribute(explain_model, kind(others), path)
    assert lrpfx.datasets.attribute(explain_model, kind(samples), path).done.all()
