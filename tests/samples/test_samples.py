"""The parts of samples: inputs, label and name."""

from pathlib import Path

import numpy as np
import pytest
import torch

import lrpfx
from lrpfx.samples.items import identity_of, parts_of
from lrpfx.samples.preparation import Preparation
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
    return [batch.numbers for batch in choosing.batches(samples, set(done).__contains__, 2, {})]


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


def test_a_sample_that_cannot_be_loaded_ends_the_batches():
    broken = [IMAGE, (IMAGE, "cat"), IMAGE, torch.full_like(IMAGE, torch.nan), IMAGE]
    with pytest.raises(lrpfx.InputError, match="sample 1: labels are class indices"):
        numbers_in_batches(broken)
    with pytest.raises(lrpfx.InputError, match="sample 3: the input has values that are not finite"):
        numbers_in_batches(broken, done=[1])
