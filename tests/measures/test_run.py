"""Runs of `lrpfx.evaluate` that stop and go on, here and on Ray."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.errors import ArtefactError, InputError
from lrpfx.measures import PartData, RandomDeletion, RandomMasks, Values
from lrpfx.measures.run import _Measured

NAMES = ["epsilon_plus", "gradient_times_input", "random"]
METRICS = [RandomMasks(count=5), "relevance_mass"]


def brightness(model, images, targets):
    return images.sum(1)


def test_a_run_goes_on_where_it_stopped(data, tmp_path, monkeypatch):
    """The numbers are those of a run without a stop, and what is done is not measured again, with batches of any size."""
    path, count = tmp_path / "found.json", len(data)
    methods = {"mine": brightness, "epsilon_plus": "epsilon_plus"}
    whole = lrpfx.evaluate(methods, data, METRICS, batch_size=2)
    measure, calls = _Measured.__call__, []

    def interrupted(self, numbers):
        calls.append(numbers)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(_Measured, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lrpfx.evaluate(methods, data, METRICS, batch_size=2, output=path)
    assert calls == [[0, 1], [2, 3]] and json.loads(path.read_text())["rows"]["numbers"] == [0, 1]
    found = lrpfx.evaluate(methods, data, METRICS, batch_size=3, output=path)
    torch.testing.assert_close(found.samples, whole.samples)
    assert found.samples.shape[2] == count and list(path.parent.iterdir()) == [path]
    before = path.read_bytes()
    again = lrpfx.evaluate(methods, data, METRICS, output=str(path))
    assert torch.equal(again.samples, found.samples) and again.prices == found.prices and path.read_bytes() == before


class Twice(RandomMasks):
    def scores(self, sample, maps):
        return tuple(2 * one for one in super().scores(sample, maps))


Twice.__qualname__ = "RandomMasks"  # the same repr


def test_a_complete_run_measures_nothing(data, tmp_path, monkeypatch):
    """Metrics are not called again."""
    path = tmp_path / "found.json"
    lrpfx.evaluate(NAMES, data, METRICS, output=path)
    with monkeypatch.context() as patch:
        patch.setattr(RandomMasks, "scores", lambda *_: pytest.fail("measured again"))
        assert lrpfx.evaluate(NAMES, data, METRICS, output=path).samples.shape == (3, 2, 5)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: {"methods": ["epsilon_plus", "random"]}, "methods"),
        (lambda data: {"methods": {**dict(zip(NAMES, NAMES, strict=True)), "random": brightness}}, "methods"),
        (lambda data: {"methods": {**dict(zip(NAMES, NAMES, strict=True)), "random": lrpfx.composites.AttnLRP()}}, "methods"),
        (lambda data: {"methods": NAMES[::-1]}, "methods"),  # whose numbers would be those of each other
        (lambda data: {"metrics": [RandomMasks(count=6), "relevance_mass"]}, "metrics"),
        (lambda data: {"metrics": [Twice(count=5), "relevance_mass"]}, "metrics"),
        (lambda data: {"data": dataclasses.replace(data, images=data.images + 0.1)}, "images"),
        (lambda data: {"data": dataclasses.replace(data, targets=1)}, "images, targets and masks"),
        (lambda data: {"data": dataclasses.replace(data, model=nn.Sequential(data.model, nn.Softmax(1)).eval())}, "model"),
    ],
)
def test_another_question_is_an_error(data, tmp_path, change, what):
    path = tmp_path / "found.json"
    lrpfx.evaluate(NAMES, data, METRICS, output=path)
    before = path.read_bytes()
    asked = {"methods": NAMES, "data": data, "metrics": METRICS, **change(data)}
    with pytest.raises(InputError, match=f"was begun with other .*{what}"):
        lrpfx.evaluate(**asked, output=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"{}",
        b"[" * 10_000,
        b"[]",
        b'{"format": "lrpfx evaluation 1", "facts": null, "rows": {}}',
    ],
)
def test_other_files_are_kept(data, tmp_path, content):
    path = tmp_path / "found.json"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=r"no file of lrpfx\.evaluate"):
        lrpfx.evaluate(["random"], data, METRICS, output=path)
    assert path.read_bytes() == content
    with pytest.raises(ArtefactError, match="suffix must be"):
        lrpfx.evaluate(["random"], data, METRICS, output=tmp_path / "found.csv")


def rows(**changed):
    return lambda content: content["rows"].update(changed)


@pytest.mark.parametrize(
    "damage",
    [
        rows(numbers=[0, True, 2]),
        rows(numbers=[0.0, 1, 2]),
        rows(numbers=[0, 1, 3]),
        rows(values=[[[0.0, 0.0]]] * 3),  # of one method
        rows(values=[[[0.0]] * 2] * 3),  # of one column
        rows(values=[0.0] * 3),
        rows(values=[[[10**400] * 2] * 2] * 3),
        rows(ratios={}),
        rows(ratios=None),
        rows(ratios={"epsilon_plus": [1.0], "random": []}),
        rows(ratios={"epsilon_plus": [1.0], "random": ["1"]}),
        rows(ratios={"random": [1.0], "epsilon_plus": [1.0], "other": [1.0]}),
        lambda content: content.update(rows=None),
        lambda content: content.update(format="lrpfx evaluation 9"),
    ],
)
def test_rows_that_are_damaged_are_errors(data, tmp_path, damage):
    path = tmp_path / "found.json"
    data = dataclasses.replace(data, images=data.images[:3], masks=data.masks[:3], groups=None)
    lrpfx.evaluate(["epsilon_plus", "random"], data, METRICS, output=path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    with pytest.raises(ArtefactError, match=r"no file of lrpfx\.evaluate"):
        lrpfx.evaluate(["epsilon_plus", "random"], data, METRICS, output=path)
    assert path.read_bytes() == before


def test_explainers_are_told_by_their_rules(data, tmp_path):
    """Not by what they have compiled meanwhile; parts of arrays neither."""
    path, explainer = tmp_path / "found.json", lrpfx.Explainer(data.model, composite="epsilon_plus")
    first = lrpfx.evaluate(explainer, data, METRICS, output=path)
    again = lrpfx.evaluate(lrpfx.Explainer(data.model, composite="epsilon_plus"), data, METRICS, output=path)
    assert torch.equal(first.samples, again.samples)
    with pytest.raises(InputError, match="methods"):
        lrpfx.evaluate(lrpfx.Explainer(data.model, composite="epsilon_plus_flat"), data, METRICS, output=path)
    rows = PartData(Values(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()), torch.rand(4, 4))
    path = tmp_path / "rows.json"
    first = lrpfx.evaluate(["epsilon_plus"], rows, output=path)
    assert torch.equal(lrpfx.evaluate(["epsilon_plus"], rows, output=path).samples, first.samples)


def test_a_search_goes_on(tmp_path, monkeypatch):
    """What a search has measured is not measured again."""
    rows = PartData(Values(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).eval()), torch.randn(20, 4))
    first = lrpfx.choose(["random", "occlusion"], rows, "random_deletion", output=tmp_path / "found.json")
    with monkeypatch.context() as patch:
        patch.setattr(RandomDeletion, "scores", lambda *_: pytest.fail("measured again"))
        again = lrpfx.choose(["random", "occlusion"], rows, "random_deletion", output=tmp_path / "found.json")
    assert again.name == first.name and torch.equal(again.evaluation.samples, first.evaluation.samples)


@pytest.mark.ray
def test_on_ray(data, tmp_path):
    """The same numbers from several processes, with functions of one's own; an interrupted run goes on there."""
    methods = {
        "mine": lambda model, images, targets: images.sum(1),
        **dict(zip(NAMES, NAMES, strict=True)),
        "grad_cam": "grad_cam",
    }
    metrics = [RandomMasks(count=5), "relevance_mass", "sensitivity"]
    here = lrpfx.evaluate(methods, data, metrics, batch_size=2)
    path = tmp_path / "found.json"
    there = lrpfx.evaluate(methods, data, metrics, batch_size=2, engine="ray", output=path)
    torch.testing.assert_close(there.samples, here.samples)
    assert torch.equal(lrpfx.evaluate(methods, data, metrics, batch_size=2, output=path).samples, there.samples)
