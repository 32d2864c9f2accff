"""Mean maps and shares of relevance, against plain sums."""

import numpy as np
import pytest
import zarr
from data_sets import Noise, small_explain_model
from torch import nn, rand

import lrpfx
import lrpfx.datasets
from lrpfx.concepts import Channel
from lrpfx.datasets.statistics import summarize
from lrpfx.errors import InputError, InputTypeError

COUNT = 50
RANDOM = np.random.default_rng(0)
ARRAYS = {"input": RANDOM.standard_normal((COUNT, 3, 4, 5)), "dense": RANDOM.standard_normal((COUNT, 7)).astype(np.float32)}
SEEDS = RANDOM.standard_normal(COUNT)
SINGLE = RANDOM.integers(-1, 3, COUNT)
SEVERAL = RANDOM.random((COUNT, 4)) < [0.5, 0.2, 0.9, 0.0]


def members(labels, label):
    if label is None:
        return np.ones(COUNT, bool)
    return labels[:, label] if labels.ndim == 2 else labels == label


@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
@pytest.mark.parametrize("samples", [None, range(3, 40, 2)])
@pytest.mark.parametrize("normalize", [False, True])
def test_sums(labels, samples, normalize):
    sources = {"input": list(ARRAYS["input"]), "dense": zarr.array(ARRAYS["dense"], chunks=(9, 7))}  # one is read row by row
    found = summarize(sources, labels, seeds=SEEDS, samples=samples, normalize=normalize)
    used = np.isin(np.arange(COUNT), np.arange(COUNT) if samples is None else list(samples))
    assert [row.label for row in found] == [None, 0, 1, 2] * 2 and len(found) == 8
    for row in found:
        mine = used & members(labels, row.label)
        values = ARRAYS[row.array].astype(np.float64)[mine]
        totals = values.reshape(len(values), -1).sum(1)
        assert row.samples == mine.sum() == len(values) and row == found.of(row.array, row.label)
        np.testing.assert_allclose(row.total, totals.mean(), atol=1e-12)
        np.testing.assert_allclose(row.magnitude, np.abs(values).reshape(len(values), -1).sum(1).mean(), rtol=1e-12)
        np.testing.assert_allclose(row.share, (np.sign(SEEDS[mine]) * totals).sum() / np.abs(SEEDS[mine]).sum(), atol=1e-12)
        maps = values.sum(1) if row.array == "input" else values
        if normalize:
            maps = maps / np.abs(maps).reshape(len(maps), -1).sum(1).reshape(-1, *[1] * (maps.ndim - 1))
        np.testing.assert_allclose(found.mean_map(row.array, row.label), maps.mean(0), atol=1e-12)


def test_without_labels_or_seeds():
    (row,) = found = summarize({"input": ARRAYS["input"]})
    assert row.label is None and row.share is None and row.samples == COUNT
    assert found.picture("input").width == 1200


def test_shares_of_layers():
    """What a layer without bias passes on arrives; what a bias has is missing below it."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    model = model.double().eval()
    explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlus())
    inputs = rand(30, 6).double()
    found = lrpfx.attribute(explain_model, inputs, None, record=["0", "2"])
    seeds = found.output.max(1).values.detach()
    names = {"input": found.relevance, "0": found.layers["0"], "2": found.layers["2"]}
    summary = summarize(names, found.output.argmax(1), seeds=seeds)
    assert abs(summary.of("2").share - 1) < 1e-4 and abs(summary.of("0").share - 1) < 1e-4
    assert abs(summary.of("input").share - 1) > 0.01


def test_tables_and_pictures():
    found = summarize(ARRAYS, SINGLE)
    frame = found.to_pandas()
    assert frame.columns.tolist() == ["array", "class", "samples", "total", "magnitude", "share"] and len(frame) == 8
    assert str(found).splitlines()[2].split()[:3] == ["input", "all", str(COUNT)] and found._repr_html_().startswith("<table")
    assert "more" not in str(found)
    many = str(summarize({"input": ARRAYS["input"]}, np.arange(COUNT) % 43)).splitlines()
    assert many[-1] == "... and 4 more" and len(many) == len(str(found).splitlines()) - 8 + 40 + 1
    assert found.picture("input", names=["a", "b", "c"], columns=2).height > found.picture("input", columns=3).height
    for question, message in (
        (lambda: found.picture("dense"), "dense has vectors"),
        (lambda: found.mean_map("inputs"), "Did you mean 'input'"),
        (lambda: found.of("input", 3), r"no sample has the class 3; the classes are \[0, 1, 2\]"),
    ):
        with pytest.raises(InputError, match=message):
            question()


NAN = np.ones((COUNT, 4))
NAN[31, 2] = np.inf


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"relevance": {"layer": NAN}}, InputError, "layer of sample 31 is not finite"),
        ({"relevance": {}}, InputTypeError, "mapping from names to arrays"),
        ({"relevance": NAN}, InputTypeError, "mapping from names to arrays"),
        (
            {"relevance": {"a": np.ones((COUNT, 2)), "b": np.ones((9, 2))}},
            InputError,
            "b has 9 samples, the other arrays have 50",
        ),
        ({"relevance": {"a": [np.ones(3), np.ones(4)] * 25}}, InputError, "a of sample 1 has another shape"),
        ({"seeds": np.ones((COUNT, 2))}, InputError, "seeds are one number for each sample"),
        ({"seeds": np.full(COUNT, np.nan)}, InputError, "seeds of sample 0 is not finite"),
        ({"labels": np.ones(COUNT)}, InputTypeError, "labels are integers"),
        ({"samples": [-1]}, InputError, "numbers of samples, from 0"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        summarize(**{"relevance": ARRAYS, **arguments})


PURPOSES = {
    "summarize": lambda array, folder: summarize({"layer": array}),
    "spray": lambda array, folder: lrpfx.datasets.spray(array, [0] * COUNT, clusters=(2,)),
    "picture": lambda array, folder: lrpfx.datasets.spray(
        np.random.default_rng(0).random((COUNT, 6, 6)), [0] * COUNT, clusters=(2,), embeddings=()
    ).picture(0, array),
    "write_project": lambda array, folder: lrpfx.adapters.virelay.write_project(
        folder, images=np.zeros((COUNT, 6, 6)), relevance=array, outputs=np.zeros((COUNT, 2)), labels=[0] * COUNT
    ),
}
SEVERAL = {
    "target": {"targets": ["predicted", "true"]},
    "target of one": {"targets": ["predicted"]},
    "condition": {"conditions": [{"first": Channel(1, 3)}]},
}


@pytest.fixture(scope="module", params=SEVERAL)
def several(request, tmp_path_factory):
    """A view with relevance of several targets or conditions, which has as many dimensions as maps with channels."""
    path = tmp_path_factory.mktemp("stores") / "store"
    return lrpfx.datasets.attribute(small_explain_model(), Noise(COUNT), path, reduce="sum", **SEVERAL[request.param])


@pytest.mark.parametrize("by_zarr", [False, True])
@pytest.mark.parametrize("purpose", PURPOSES)
def test_targets_and_conditions_are_no_channels(purpose, by_zarr, several, tmp_path):
    array = zarr.open_group(several.path, mode="r")["relevance"] if by_zarr else several.relevance
    with pytest.raises(InputError, match=r"has a dimension for (target|condition)s, .* such as \[:, 0\]"):
        PURPOSES[purpose](array, tmp_path)
    assert summarize({"layer": several.relevance[:, 0]}).mean_map("layer").shape == (6, 6)


class Counted:
    """An array that knows how much was read of it."""

    shape = (4000, 3, 32, 32)
    dtype = np.dtype("float32")

    def __init__(self):
        self.reads = []

    def __getitem__(self, part):
        self.reads.append((part.start, part.stop))
        return np.ones((part.stop - part.start, *self.shape[1:]), np.float32)


def test_one_pass_in_blocks():
    array = Counted()
    found = summarize({"input": array}, np.arange(4000) % 10)
    assert [start for start, _ in array.reads] == [0, *(stop for _, stop in array.reads[:-1])] and array.reads[-1][1] == 4000
    assert max(stop - start for start, stop in array.reads) < 1000 and (found.mean_map("input", 3) == 3).all()
