"""Explanations of photographs, measured by blurring blocks; the whole run on a small random network."""

import json
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("skimage")
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("captum")
pytest.importorskip("onnxruntime")

import region_perturbation
from region_perturbation import GRADIENT, OURS, RANDOM, Explained, View

from lrpfx.composites import GammaByDepth
from lrpfx.demo import photographs
from lrpfx.demo.photographs import Classifier
from lrpfx.measures.perturbation import sums_over_blocks

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def float32(_double_precision):
    """As the networks have it, in place of the tests' float64."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def small():
    """A random classifier of 40×40 pixels, which are 3×3 blocks, of which the last ones are half."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU6(), nn.Conv2d(4, 4, 3), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return Classifier(model.eval(), 40, ["a", "b", "c"])


def test_views_are_parts_of_the_photograph_and_their_mirror_images(small):
    found = region_perturbation.views(small, "coffee")
    assert len(found) == 10 and len({view.sharp.sum().item() for view in found}) >= 5
    assert {view.sharp.shape for view in found} == {view.blurred.shape for view in found} == {(1, 3, 40, 40)}
    for view, mirrored in zip(found[::2], found[1::2], strict=True):
        torch.testing.assert_close(mirrored.sharp, view.sharp.flip(3), rtol=0.0, atol=0.02)
    assert all(_detail(view.blurred) < 0.25 * _detail(view.sharp) for view in found)
    assert len(region_perturbation.views(small, "coffee", 3)) == 3


def _detail(image):
    return image.diff(dim=3).abs().mean()


def test_a_random_order_does_not_know_which_blocks_are_incomplete(small):
    """The last block, of 8×8 pixels, comes before the first one half of the time."""
    random = region_perturbation.methods(small, {})[RANDOM]
    image = torch.zeros(1, 3, 40, 40)
    maps = torch.stack([sums_over_blocks(random(image, 0), 16)[0] for _ in range(200)])
    assert 0.35 < float((maps[:, 8] > maps[:, 0]).double().mean()) < 0.65


def test_masked_blocks_are_blurred():
    """A model that reads one pixel of the second block of the first row: only there does a mask change anything."""

    def logits(images):
        return torch.stack([images[:, 0, 5, 20], torch.zeros(len(images))], 1)

    view = View("", torch.ones(1, 3, 40, 40), torch.full((1, 3, 40, 40), -2.0))
    masks = torch.eye(9, dtype=torch.bool)
    scores = region_perturbation.score_blurred(logits, view, 0, masks)
    expected = torch.ones(9)
    expected[1] = torch.tensor(-2.0).sigmoid() / torch.tensor(1.0).sigmoid()
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(region_perturbation.score_blurred(logits, view, 1, masks), torch.ones(9))  # at most 1


def test_onnx_runtime_gives_the_same_logits(small):
    images = torch.randn(5, 3, 40, 40)
    torch.testing.assert_close(
        region_perturbation.fast_logits(small)(images), small.model(images).detach(), rtol=1e-5, atol=1e-6
    )


def test_methods_explain_the_class_that_they_are_given(small):
    """Those that conserve the logit do so; Grad-CAM is as large as the input."""
    image = region_perturbation.views(small, "flower", 1)[0].sharp
    found = region_perturbation.methods(small, {OURS: GammaByDepth(stabilizer=1e-9, zero_params="bias")})
    assert next(iter(found)) == OURS and len(found) == 6
    for target in (0, 2):
        relevances = {name: method(image, target) for name, method in found.items()}
        assert {relevance.shape for relevance in relevances.values()} == {(1, 40, 40)}
        logit, empty = (small.model(one)[0, target].item() for one in (image, torch.zeros_like(image)))
        assert float(relevances["integrated gradients"].sum()) == pytest.approx(logit - empty, rel=0.05, abs=1e-3)
        assert float(relevances["guided backpropagation"].min()) >= 0.0
    leaf = image.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(small.model(leaf)[0, 2], leaf)
    torch.testing.assert_close(relevances[GRADIENT], (leaf * gradient).sum(1).detach())


def test_confidence_is_in_photographs_and_differences_are_paired():
    """Two views of one photograph are one sample: repeating them changes nothing."""
    areas = {"a": (0.5, 0.1), "b": (0.9, 0.4), "c": (0.2, 0.3)}
    seconds = {OURS: 0.2, GRADIENT: 0.1}
    explained = [Explained(name, "", {OURS: ours, GRADIENT: other}, seconds) for name, (ours, other) in areas.items()]
    results = region_perturbation.measure(explained)
    assert [result.method for result in results] == [OURS, GRADIENT]
    assert results[0].between.mean == pytest.approx(1.6 / 3) and results[1].minus_ours.mean == pytest.approx(-0.8 / 3)
    assert results[1].minus_ours.low == pytest.approx(-0.5) and results[1].minus_ours.high == pytest.approx(0.1)
    assert results[0].minus_ours.low == results[0].minus_ours.high == 0.0
    again = region_perturbation.measure([one for one in explained for _ in range(4)])
    assert [result.between for result in again] == [result.between for result in results]
    assert region_perturbation.table(results).rows[0][3] == "2.0"


def test_the_whole_run(small, tmp_path, monkeypatch, capsys):
    """Two views of two photographs, with the table in a document."""
    document = tmp_path / "gallery.md"
    document.write_text("before\n<!-- lite0 -->\nold\n<!-- end of lite0 -->\nafter\n")
    monkeypatch.setattr(region_perturbation, "load_classifier", lambda name: small)
    monkeypatch.setattr(region_perturbation, "PHOTOGRAPHS", ("flower", "rocket"))
    arguments = ["--directory", str(tmp_path / "results"), "--document", str(document), "--views", "2"]
    monkeypatch.setattr(sys, "argv", ["region_perturbation", *arguments])
    region_perturbation.main()
    text = document.read_text()
    assert text.startswith("before\n<!-- lite0 -->\n\nEfficientNet-Lite0, 4 inputs of 2 photographs:\n\n| method |")
    assert text.endswith("|\n\n<!-- end of lite0 -->\nafter\n") and "old" not in text
    names = {*region_perturbation.COMPOSITES, GRADIENT, RANDOM, "integrated gradients", "guided backpropagation", "Grad-CAM"}
    assert all(f"| {name} | " in text for name in names)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    explained = json.loads((tmp_path / "results" / "lite0.json").read_text())
    assert [one["photograph"] for one in explained] == ["flower", "flower", "rocket", "rocket"]
    assert all(set(one["areas"]) == set(one["seconds"]) == names for one in explained)


def test_relevance_tells_what_matters_in_a_photograph():
    """On the real network: blurring what GammaByDepth finds takes the class away, a random order does not tell."""
    classifier = photographs.load_classifier()
    found = region_perturbation.methods(classifier, {OURS: region_perturbation.COMPOSITES[OURS]})
    chosen = {name: found[name] for name in (OURS, RANDOM)}
    (view,) = region_perturbation.views(classifier, "china", 1)
    (explained,) = region_perturbation.explain_and_perturb(classifier, chosen, [view])
    assert explained.category == "palace"
    assert explained.areas[OURS] > 0.4 and abs(explained.areas[RANDOM]) < 0.2
