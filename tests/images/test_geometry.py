"""Relevance goes back to the pixels that it came from, and its total is kept."""

import numpy as np
import pytest

from lrpfx.images.geometry import Axis, Geometry


def naive(axis, values):
    """Each input pixel divided among the photograph's pixels by overlap, one pair at a time."""
    found = np.zeros(axis.length)
    for number, value in enumerate(values):
        low, high = sorted(axis.edges[number : number + 2])
        if not 0 <= (low + high) / 2 <= axis.length:
            continue  # padding
        inside = min(high, axis.length) - max(low, 0)
        for pixel in range(axis.length):
            overlap = min(high, pixel + 1) - max(low, pixel)
            if overlap > 0:
                found[pixel] += value * overlap / inside
    return found


@pytest.mark.parametrize(
    "axis",
    [
        Axis(0.0, 2.5, 8, 20),  # enlarged
        Axis(3.2, 0.4, 10, 12),  # several pixels of the input in one of the photograph
        Axis(2.0, 1.0, 5, 9),
        Axis(17.0, -1.7, 9, 20),  # mirrored
        Axis(-3.0, 1.5, 10, 9),  # padding on both sides
        Axis(-0.4, 1.3, 7, 8),  # pixels are partly outside: one by less than a half, one by more
        Axis(-3.001, 1.5, 9, 9),  # padding, measured with an error
    ],
)
def test_spread(axis):
    values = np.random.default_rng(0).normal(size=(3, axis.pixels))
    found = axis.spread(values)
    np.testing.assert_allclose(found, [naive(axis, row) for row in values], atol=1e-13)
    centres = (axis.edges[:-1] + axis.edges[1:]) / 2
    inside = (centres > 0) & (centres < axis.length)
    np.testing.assert_allclose(found.sum(1), values[:, inside].sum(1), atol=1e-12)


@pytest.mark.parametrize("size", [(20, 15), (80, 30)])
def test_other_sizes_and_parts(size):
    geometry = Geometry(Axis(4.0, 2.0, 3, 12), Axis(9.0, -3.0, 2, 10))
    relevance = np.random.default_rng(0).normal(size=(3, 2))
    resized = geometry.resized(*size)
    assert resized.undo(relevance).shape == size[::-1] and resized.undo(relevance).sum() == pytest.approx(relevance.sum())
    np.testing.assert_allclose(np.array(resized.box) / (2 * size), np.array(geometry.box) / (10, 12, 10, 12))
    left, top, right, bottom = resized.pixel_box
    part = resized.cropped(left, top, right, bottom).undo(relevance)
    np.testing.assert_allclose(part, resized.undo(relevance)[top:bottom, left:right], atol=1e-12)


def test_both_axes_and_the_box():
    geometry = Geometry(Axis(4.0, 2.0, 3, 12), Axis(9.0, -3.0, 2, 10))
    relevance = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    found = geometry.undo(relevance)
    assert found.shape == (12, 10) and geometry.box == (3.0, 4.0, 9.0, 10.0)
    assert found[4, 8] == pytest.approx(1 / 6) and found[4, 3] == pytest.approx(2 / 6) and found[9, 4] == pytest.approx(1.0)
    assert not found[:4].any() and not found[10:].any() and not found[:, :3].any() and not found[:, 9:].any()
    assert found.sum() == pytest.approx(relevance.sum(), abs=1e-12)
