"""The measurements of docs/gallery.md, on a small random network."""

import sys

import pytest
import torch
from torch import nn

pytest.importorskip("skimage")
pytest.importorskip("efficientnet_lite_pytorch")

import gallery
from gallery import OURS, RANDOM

from lrpfx.demo.photographs import NETWORKS, Classifier
from lrpfx.measures.evaluation import Evaluation


@pytest.fixture
def small():
    """A random classifier of 40×40 pixels, which are 3×3 blocks, of which the last ones are half."""
    torch.set_default_dtype(torch.float32)  # as photographs are; the tests' float64 comes back after each test
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU6(), nn.Conv2d(4, 4, 3), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return Classifier(model.eval(), 40, ["a", "b", "c"])


def test_views_are_parts_of_the_photograph_and_their_mirror_images(small):
    found = [small.preprocess_whole(view) for view in gallery.views("coffee")]
    assert len(found) == 10 and len({view.sum().item() for view in found[::2]}) == 5
    for view, mirrored in zip(found[::2], found[1::2], strict=True):
        torch.testing.assert_close(mirrored, view.flip(2), rtol=0.0, atol=0.02)
    assert gallery.views("coffee", 3)[2] == gallery.views("coffee")[2] and len(gallery.views("coffee", 3)) == 3


def test_guided_backpropagation_adds_up_magnitudes(small):
    images = torch.stack([small.preprocess_whole(view) for view in gallery.views("flower", 2)])
    relevance = gallery.guided_by_magnitude(small.model, images, torch.tensor([0, 2]))
    assert relevance.shape == images.shape and float(relevance.min()) >= 0.0 < float(relevance.max())


def test_the_table_has_differences_to_ours():
    areas = torch.tensor([[0.5, 0.9, 0.2], [0.1, 0.4, 0.3], [0.0, 0.1, -0.1]], dtype=torch.float64)
    samples = torch.stack([areas, areas, areas], 1)
    methods = (OURS, "other", RANDOM)
    found = Evaluation(methods, gallery.METRIC.columns, samples, ("a", "b", "c"), dict.fromkeys(methods, 2.0), {})
    ours, other, random = ([cell.strip() for cell in row.split("|")[1:-1]] for row in gallery.table(found).splitlines()[2:])
    assert ours == [OURS, "0.533 [0.200, 0.900]", "", "2.0"]
    assert other == ["other", "0.267 [0.100, 0.400]", "-0.267 [-0.500, 0.100]", "2.0"]
    assert random[0] == RANDOM and random[3] == ""


def test_the_whole_run(small, tmp_path, monkeypatch, capsys):
    """Two views of two photographs, with the table in a document, and once more from the numbers that were kept."""
    text = gallery.DOCUMENT.read_text(encoding="utf-8")
    assert all(text.count(f"<!-- {name} -->") == text.count(f"<!-- end of {name} -->") == 1 for name in NETWORKS)
    document = tmp_path / "gallery.md"
    document.write_text("before\n<!-- lite1 -->\nold\n<!-- end of lite1 -->\nafter\n")
    monkeypatch.setattr(gallery.photographs, "load_classifier", lambda name: small)
    monkeypatch.setattr(gallery, "PHOTOGRAPHS", ("flower", "rocket"))
    monkeypatch.setattr(gallery, "DOCUMENT", document)
    monkeypatch.setattr(gallery, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["gallery", "lite1", "--views", "2"])
    gallery.main()
    text = document.read_text()
    assert text.startswith("before\n<!-- lite1 -->\n\nEfficientNet-Lite1, 4 inputs of 2 photographs:\n\n| method |")
    assert text.endswith("|\n\n<!-- end of lite1 -->\nafter\n") and "old" not in text
    assert all(f"| {name} | " in text for name in gallery.METHODS)
    gallery.main()
    assert document.read_text() == text  # with its times: nothing was measured again
