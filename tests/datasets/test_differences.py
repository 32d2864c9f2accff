"""Data sets take an explainer with a reference, and a run with another reference is another run."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import DeepLIFT


def explainer(reference):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    return lrpfx.Explainer(model, composite=DeepLIFT(), reference=reference)


def test_relevance_of_a_data_set_is_that_of_the_reference(tmp_path):
    images = torch.randn(5, 3, 8, 8)
    samples = [(image, 0) for image in images]
    found = lrpfx.datasets.attribute(explainer(0.5), samples, tmp_path / "store", target=1)
    model = explainer(0.5).model
    expected = (model(images) - model(torch.full_like(images, 0.5)))[:, 1].detach()
    relevance = torch.as_tensor(found["relevance"][:])
    torch.testing.assert_close(relevance.flatten(1).sum(1).double(), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(lrpfx.LrpfxError, match="reference"):
        lrpfx.datasets.attribute(explainer(0.0), samples, tmp_path / "store", target=1)
    assert torch.allclose(torch.as_tensor(found["seed"][:]), expected, rtol=1e-4, atol=1e-4)  # what relevance adds up to
    assert torch.allclose(torch.as_tensor(found["reached"][:]), expected, rtol=1e-3, atol=1e-3)


def test_several_references_are_averaged(tmp_path):
    images = torch.randn(5, 3, 8, 8)
    samples = [(image, 0) for image in images]
    several = lrpfx.datasets.attribute(explainer([0.0, 1.0]), samples, tmp_path / "several", target=1)
    each = [lrpfx.datasets.attribute(explainer(one), samples, tmp_path / f"{one}", target=1) for one in (0.0, 1.0)]
    for name in ("relevance", "seed", "reached"):
        first, last, mean = (torch.as_tensor(one[name][:]).double() for one in (*each, several))
        torch.testing.assert_close(mean, (first + last) / 2, rtol=2e-3, atol=1e-4)
    with pytest.raises(lrpfx.LrpfxError, match="reference"):
        lrpfx.datasets.attribute(explainer([0.0, 2.0]), samples, tmp_path / "several", target=1)
