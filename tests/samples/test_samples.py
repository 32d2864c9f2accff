"""The parts of samples: inputs, label and name."""

from pathlib import Path

import numpy as np
import pytest
import torch

import lrpfx
from lrpfx.samples.items import identity_of, parts_of
from lrpfx.samples.plan import KnownSamples
from lrpfx.samples.preparation import Preparation, SampleGroup
from lrpfx.samples.selection import SampleSelection

IMAGE = torch.arange(4.0).reshape(1, 2, 2)


@pytest.mark.parametrize(
    ("item", "label", "identity"),
    [
        (IMAGE, None, None),
        ((IMAGE, 3), 3, None),
        ([IMAGE, np.int64(3)], 3, None),
        ((IMAGE, torch.tensor(3)), 3, None),
        ((IMAGE, torch.tensor(3, dtype=torch.uint8)), 3, None),
        ((IMAGE, np.array(3)), 3, None),
        ((IMAGE, torch.tensor(0.5)), None, None),
        ((IMAGE, IMAGE), None, None),
        ({"x": IMAGE, "label": 3}, 3, None),
        ({"x": IMAGE, "labels": torch.tensor(3), "id": 7}, 3, "7"),
        ({"__key__": "a/b", "__url__": "x.tar", "x": IMAGE, "cls": 3}, 3, "a/b"),
        ({"x": IMAGE, "path": Path("a") / "b"}, None, "a/b"),
        (("photo.jpg", 2), 2, "photo.jpg"),
        (Path("photo.jpg"), None, "photo.jpg"),
    ],
    ids=str,
)
def test_parts(item, label, identity):
    inputs, found = parts_of(item)
    assert found == label and identity_of(item) == identity
    if isinstance(item, dict):
        assert inputs["x"] is IMAGE and not {"label", "labels", "cls", "__key__", "__url__"} & set(inputs)
    elif label is not None:
        assert inputs is item[0]
    else:
        assert inputs is item


@pytest.mark.parametrize("label", [True, "cat", None, 2.0])
@pytest.mark.parametrize("form", [lambda label: (IMAGE, label), lambda label: {"x": IMAGE, "label": label}])
def test_labels_that_are_no_class_indices(form, label):
    with pytest.raises(lrpfx.InputTypeError, match="labels are class indices"):
        parts_of(form(label))


def numbers_in_batches(dataset, samples=None, done=()):
    choosing = SampleSelection(dataset, Preparation(("x",)))
    batches = list(choosing.batches(samples, set(done).__contains__, 2, KnownSamples.of((), ())))
    return [[batch.samples[place].number for place in group.places] for batch in batches for group in batch.groups]


@pytest.mark.parametrize("form", [list, iter])
def test_batches_are_of_the_wanted_samples_that_are_not_done(form):
    pairs = [(IMAGE + number, number) for number in range(5)]
    assert numbers_in_batches(form(pairs)) == [[0, 1], [2, 3], [4]]
    assert numbers_in_batches(form(pairs), [4, 0, 2], done=[2]) == [[0, 4]]
    for wrong in ([-1], [0.0], [True]):
        with pytest.raises(lrpfx.InputTypeError, match="numbers of samples, from 0"):
            numbers_in_batches(form(pairs), wrong)


def test_samples_of_several_shapes_are_batches_of_their_own():
    assert numbers_in_batches([IMAGE, IMAGE, IMAGE, IMAGE[:, :1]], done=[0, 2]) == [[1], [3]]


@pytest.mark.parametrize("form", [list, iter])
def test_samples_that_cannot_be_loaded_are_in_the_batches_with_the_reason(form):
    broken = [IMAGE, (IMAGE, "cat"), IMAGE, torch.full_like(IMAGE, torch.nan), IMAGE]
    assert numbers_in_batches(form(broken)) == [[0], [2], [4]]
    batches = SampleSelection(form(broken), Preparation(("x",))).batches(None, {1}.__contains__, 3, KnownSamples.of((), ()))
    problems = {sample.number: sample.problem for batch in batches for sample in batch.samples}
    assert problems == {**dict.fromkeys((0, 2, 4)), 3: "the input has values that are not finite"}


def test_the_halves_of_a_group():
    halves = list(SampleGroup([1, 4, 6], {"x": torch.arange(3), "scale": 2}).halves())
    assert [half.places for half in halves] == [[1], [4, 6]]
    assert [(half.inputs["x"].tolist(), half.inputs["scale"]) for half in halves] == [([0], 2), ([1, 2], 2)]
