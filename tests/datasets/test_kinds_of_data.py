"""Data sets of tables, series, waves, volumes and several inputs: what is stored is what the explainer says of each sample."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import lrpfx
import lrpfx.datasets
from lrpfx.concepts import collect
from lrpfx.errors import InputError, InputTypeError


class Both(nn.Module):
    """A class for an image and a row of numbers."""

    def __init__(self):
        super().__init__()
        self.filters, self.dense = nn.Conv2d(3, 2, 3), nn.Linear(2, 2)

    def forward(self, image, facts):
        return self.filters(image).relu().mean((2, 3)) + self.dense(facts)


def dense(features):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 2)).float().eval()


def convolving(layer, features):
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(features, 2)).float().eval()


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


CASES = {
    "table": (lambda: lrpfx.Explainer(dense(3)), (5, 3)),
    "series": (lambda: lrpfx.Explainer(convolving(nn.Conv1d(2, 4, 3), 32), names=["left", "right"]), (5, 2, 10)),
    "wave": (
        lambda: lrpfx.Explainer(convolving(nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 3)), 192), rate=100),
        (5, 50),
    ),
    "wave of a channel": (lambda: lrpfx.Explainer(convolving(nn.Conv1d(1, 4, 3), 192), rate=100), (5, 50)),
    "volume": (lambda: lrpfx.Explainer(convolving(nn.Conv3d(1, 2, 3), 48)), (3, 1, 4, 5, 6)),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_store_has_what_the_explainer_says(kind, tmp_path):
    make, shape = CASES[kind]
    data = torch.randn(shape)
    torch.manual_seed(0)
    stored = lrpfx.datasets.attribute(make(), data, tmp_path / "store")
    torch.manual_seed(0)
    found = make()(data)
    np.testing.assert_allclose(
        stored["relevance"][:].reshape(len(data), -1).sum(1), [one.balance.inputs for one in found], rtol=1e-3, atol=1e-5
    )
    assert stored.manifest["composite"] == found[0].rules, "rules are chosen by the kind of data, here as there"


@pytest.mark.parametrize(
    "preprocess", [None, lambda frame: torch.tensor(frame[["b", "a"]].to_numpy().copy(), dtype=torch.float32)]
)
def test_a_data_frame(preprocess, tmp_path):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(6, 2)), columns=["a", "b"])
    explainer = lrpfx.Explainer(dense(2), preprocess=preprocess, form="table")
    stored = lrpfx.datasets.attribute(explainer, frame, tmp_path / "store")
    np.testing.assert_allclose(stored["relevance"][:], explainer(frame).relevance, rtol=1e-3, atol=1e-5)
    with pytest.raises(InputTypeError, match="Explainer"):
        lrpfx.datasets.attribute(explainer.explain_model, frame, tmp_path / "other")


class OfCategories(nn.Module):
    """A number for numbers and a category, in two forms of the inputs."""

    def __init__(self, by_name):
        super().__init__()
        torch.manual_seed(0)
        self.by_name, self.embedding, self.head = by_name, nn.Embedding(3, 4), nn.Linear(6, 1)

    def preprocess(self, frame):
        numbers, codes = torch.tensor(frame[["size", "age"]].to_numpy(np.float32).copy()), frame["city"].cat.codes.to_numpy()
        codes = torch.tensor(codes.astype(np.int64))
        return {"codes": codes, "numbers": numbers} if self.by_name else (numbers, codes)

    def forward(self, numbers, codes):
        return self.head(torch.cat([numbers, self.embedding(codes)], 1))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_data_frame_with_categories(by_name, tmp_path):
    """Each column has its relevance, as `explain` gives it, with its name, and each row its title."""
    model = OfCategories(by_name).eval()
    frame = pd.DataFrame(
        {"age": [1.0, 2.0, 3.0], "city": pd.Categorical(["a", "b", "a"], ["a", "b", "c"]), "size": [4.0, 4.0, 4.0]}, [*"uvw"]
    )
    explainer = lrpfx.Explainer(model, preprocess=model.preprocess)
    stored = lrpfx.datasets.attribute(explainer, frame, tmp_path / "store", targets=[0, {0: -1.0}], dtype="float64")
    weight, codes = model.head.weight[0].detach().numpy(), frame["city"].cat.codes.to_numpy()
    expected = {
        "size": frame["size"] * weight[0],
        "age": frame["age"] * weight[1],
        "city": model.embedding.weight.detach().numpy()[codes] @ weight[2:],
    }
    names = ["city", "size", "age"] if by_name else ["size", "age", "city"]
    assert stored.manifest["features"] == names and stored.keys == [*"uvw"] and not (stored.labels >= 0).any()
    for sign, place in ((1, 0), (-1, 1)):
        for number, name in enumerate(names):
            np.testing.assert_allclose(stored["relevance"][:, place, number], sign * expected[name], rtol=1e-5)
    assert list(stored.to_xarray()["feature"].to_numpy()) == names
    np.testing.assert_allclose(explainer(frame)[1].relevance, stored["relevance"][1, 0], rtol=1e-5)
    assert explainer(frame.iloc[[1]])[0].features == tuple(names), "of one row, too"
    with pytest.raises(InputError, match="features"):
        other = lrpfx.Explainer(model, preprocess=model.preprocess, names=["1", "2", "3"])
        lrpfx.datasets.attribute(other, frame, tmp_path / "store", targets=[0, {0: -1.0}], dtype="float64")


def test_several_inputs_by_name(tmp_path):
    model = Both().eval()
    samples = [{"image": torch.rand(3, 5, 5), "facts": torch.rand(2)} for _ in range(3)]
    stored = lrpfx.datasets.attribute(lrpfx.Explainer(model), samples, tmp_path / "store")
    found = lrpfx.explain(model, [{name: one[None] for name, one in sample.items()} for sample in samples])
    for name in ("image", "facts"):
        totals = stored[f"relevance.{name}"][:].reshape(3, -1).sum(1)
        np.testing.assert_allclose(totals, [one.shares[name] for one in found], rtol=1e-3, atol=1e-5)


def standardized(values):
    """Rows, series or waves in a batch, as a user's function prepares them."""
    values = torch.as_tensor(np.asarray(values), dtype=torch.float32)
    return (values - 0.5) * 3


#: The explainer, a sample, and how the explainer itself is given one.
PREPROCESSED = {
    "wave": (lambda: lrpfx.Explainer(dense(50), rate=100, preprocess=standardized), np.zeros(50), lambda one: one),
    "wave with a channel that preprocessing adds": (
        lambda: lrpfx.Explainer(
            convolving(nn.Conv1d(1, 4, 3), 192), form="wave", rate=100, preprocess=lambda wave: standardized(wave)[:, None]
        ),
        np.zeros(50),
        lambda one: one,
    ),
    "wave of two channels": (
        lambda: lrpfx.Explainer(convolving(nn.Conv1d(2, 4, 3), 192), rate=100, preprocess=standardized),
        np.zeros((2, 50)),
        lambda one: one[None],
    ),
    "series": (
        lambda: lrpfx.Explainer(nn.Sequential(nn.Flatten(), dense(20)).eval(), form="series", preprocess=standardized),
        np.zeros((10, 2)),
        lambda one: one,
    ),
    "series with names alone": (
        lambda: lrpfx.Explainer(nn.Sequential(nn.Flatten(), dense(20)).eval(), names=["a", "b"], preprocess=standardized),
        np.zeros((10, 2)),
        lambda one: one[None],
    ),
    "row": (lambda: lrpfx.Explainer(dense(3), form="table", preprocess=standardized), np.zeros(3), lambda one: one),
}


@pytest.mark.parametrize("form", ["arrays", "tensors", "labelled", "dicts"])
@pytest.mark.parametrize("kind", PREPROCESSED)
def test_numbers_are_preprocessed_one_by_one(kind, form, tmp_path):
    make, like, given = PREPROCESSED[kind]
    samples = [np.random.default_rng(number).random(like.shape) for number in range(3)]
    data = {
        "arrays": samples,
        "tensors": [torch.from_numpy(one) for one in samples],
        "labelled": [(one, 1) for one in samples],
        "dicts": [{"values": one, "label": 1} for one in samples],
    }[form]
    explainer = make()
    stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", target=1)
    assert not stored.errors and list(stored["label"][:]) == [1 if form in ("labelled", "dicts") else -1] * 3
    for row, one in zip(stored["relevance"][:], samples, strict=True):
        found = explainer(given(one), 1)
        alone = found if isinstance(found, lrpfx.explanation.explanation.Explained) else found[0]
        np.testing.assert_allclose(row, alone.answers[0].input_relevance.reshape(row.shape), rtol=1e-4, atol=1e-6)


def test_a_series_of_a_data_frame_is_preprocessed(tmp_path):
    frames = [pd.DataFrame(np.random.default_rng(one).random((10, 2)), columns=["a", "b"]) for one in range(2)]
    explainer = lrpfx.Explainer(nn.Sequential(nn.Flatten(), dense(20)).eval(), form="series", preprocess=standardized)
    stored = lrpfx.datasets.attribute(explainer, frames, tmp_path / "store", target=1)
    for row, frame in zip(stored["relevance"][:], frames, strict=True):
        np.testing.assert_allclose(row, explainer(frame, 1).relevance, rtol=1e-4, atol=1e-6)


def test_preprocessing_that_fails_on_a_sample_is_its_problem(tmp_path):
    explainer = lrpfx.Explainer(dense(50), rate=100, preprocess=standardized)
    with pytest.warns(lrpfx.errors.LrpfxWarning, match="integers|int16"):
        stored = lrpfx.datasets.attribute(explainer, [np.zeros(50), np.zeros(50, np.int16), np.ones(50)], tmp_path / "store")
    assert list(stored.errors) == [1]


def test_a_data_frame_is_not_collected(tmp_path):
    """Nor read as a sequence, whose samples would be columns."""
    module = lrpfx.transform(dense(2), lrpfx.composites.EpsilonPlus())
    with pytest.raises(InputTypeError, match=r"torch\.tensor\(frame\.to_numpy\(\)\)"):
        collect(module, pd.DataFrame({"a": [1.0], "b": [2.0]}), ["0"], target=1)


def test_a_list_as_the_target_of_samples(tmp_path):
    with pytest.raises(InputTypeError, match=r'target="true".*targets='):
        lrpfx.datasets.attribute(lrpfx.Explainer(dense(3)), torch.rand(3, 3), tmp_path / "store", target=[0, 1, 0])


def test_a_first_sample_that_is_not_finite(tmp_path):
    """It is stored with its reason, and the model is compiled for the next."""
    rows = torch.randn(4, 3)
    rows[0, 1] = torch.nan
    with pytest.warns(lrpfx.errors.LrpfxWarning, match="finite"):
        stored = lrpfx.datasets.attribute(lrpfx.Explainer(dense(3)), rows, tmp_path / "store")
    assert list(stored.errors) == [0] and len(stored) == 4
    with pytest.raises(InputError, match="finite"):
        lrpfx.datasets.attribute(lrpfx.Explainer(dense(3)), rows[:1], tmp_path / "other")


def test_waves_of_a_channel_in_other_forms(tmp_path):
    """As entries of dicts, and as sums over the channel, they are what the explainer says."""
    data = torch.randn(3, 50)
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(convolving(nn.Conv1d(1, 4, 3), 192), rate=100)
    expected = [one.relevance for one in explainer(data, 1)]
    for number, items in enumerate(([{"input": one, "label": 1} for one in data], (one for one in data), data[:, None])):
        stored = lrpfx.datasets.attribute(explainer, items, tmp_path / str(number), target=1)
        found = stored["relevance" if number else "relevance.input"][:, 0]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "sum", target=1, reduce="sum")
    np.testing.assert_allclose(stored["relevance"][:], expected, rtol=1e-3, atol=1e-6)


def _half(volume):
    """Every second slice, of an array or of the frames of a video."""
    if isinstance(volume, list):
        return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in volume], 1)[:, ::2] / 255
    return torch.as_tensor(np.asarray(volume))[:, ::2]


@pytest.mark.parametrize("kind", ["scans", "labelled", "dicts", "files", "folder", "frames"])
def test_volumes_and_videos_are_preprocessed_one_by_one(kind, tmp_path):
    rng, preprocess = np.random.default_rng(0), _half
    volumes = [torch.from_numpy(rng.random((1, 6, 5, 7), np.float32)) for _ in range(2)]
    model = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 3)).eval()
    if kind == "frames":
        model[0] = nn.Conv3d(3, 2, 3)
        volumes = [[Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)) for _ in range(6)] for _ in range(2)]
    if kind in ("files", "folder"):
        nibabel, preprocess = pytest.importorskip("nibabel"), None
        for number, one in enumerate(volumes):
            nibabel.save(nibabel.Nifti1Image(one[0].numpy(), np.eye(4)), tmp_path / f"{number}.nii.gz")
        volumes = [tmp_path / f"{number}.nii.gz" for number in range(2)] if kind == "files" else str(tmp_path)
    labelled = {"labelled": [(one, 1) for one in volumes], "dicts": [{"scan": one, "label": 1} for one in volumes]}
    data = labelled.get(kind, volumes)
    explainer = lrpfx.Explainer(model, form="volume", preprocess=preprocess)
    stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", target=1)
    assert not stored.errors and list(stored["label"][:]) == [1 if kind in ("labelled", "dicts") else -1] * 2
    for row, one in zip(stored["relevance"][:], explainer(volumes, 1), strict=True):
        np.testing.assert_allclose(row.sum(0), one.relevance, rtol=1e-4, atol=1e-6)
