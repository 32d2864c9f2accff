"""Numbers and arrays as data of a page."""

import base64
import json

import numpy as np
import pytest

from lrpfx.reports.pages.encoding import figure, packed, reduced


def unpacked(data):
    """What the page makes of a packed array."""
    integers = np.frombuffer(base64.b64decode(data["data"]), dtype=f"<i{data['bits'] // 8}").astype(np.float64)
    top = 2 ** (data["bits"] - 1) - 1
    values = np.where(integers < -top, np.nan, integers * float(data["scale"]) / top)
    return values.reshape(data["shape"])


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-300, 123456789.0, 3.4e38])
def test_figures_have_seven_digits(value):
    assert json.loads(json.dumps(figure(value))) == pytest.approx(value, rel=5e-7)


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "Infinity"), (-np.inf, "-Infinity")])
def test_figures_that_json_does_not_have_are_texts(value, text):
    assert figure(value) == text


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (0,), (1, 1)])
def test_packed_values_are_rounded_to_the_nearest(bits, shape):
    values = np.random.default_rng(0).normal(size=shape)
    step = np.abs(values).max(initial=0.0) / (2 ** (bits - 1) - 1)
    found = unpacked(packed(values, bits=bits))
    assert found.shape == shape and np.abs(found - values).max(initial=0.0) <= 0.5001 * step


def test_values_beyond_the_scale_are_clipped_and_others_are_not_numbers():
    found = unpacked(packed(np.array([3.0, -3.0, 0.5, np.nan, np.inf, 0.0]), scale=1.0, bits=8))
    assert np.array_equal(np.isnan(found), [False, False, False, True, True, False])
    assert found[[0, 1, 5]].tolist() == [1.0, -1.0, 0.0] and found[2] == pytest.approx(0.5, abs=0.004)


def test_zeros():
    assert unpacked(packed(np.zeros(3))).tolist() == [0.0] * 3


def mean_over(values, top, bottom, left, right):
    """The mean of a map over an area, by the share of each pixel that lies in it."""
    total = 0.0
    for (row, column), value in np.ndenumerate(values):
        high = max(0.0, min(bottom, row + 1) - max(top, row))
        wide = max(0.0, min(right, column + 1) - max(left, column))
        total += value * high * wide
    return total / ((bottom - top) * (right - left))


@pytest.mark.parametrize("shape", [(7, 5), (6, 6), (13, 7), (1, 30), (9, 10)])
def test_a_reduced_map_has_the_means_of_equal_areas(shape):
    values = np.random.default_rng(0).normal(size=shape)
    found = reduced(values, 6)
    assert found.shape == tuple(min(6, size) for size in shape)
    high, wide = (size / count for size, count in zip(shape, found.shape, strict=True))
    for (row, column), mean in np.ndenumerate(found):
        expected = mean_over(values, row * high, (row + 1) * high, column * wide, (column + 1) * wide)
        assert mean == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(found.sum() * high * wide, values.sum(), atol=1e-10)


@pytest.mark.parametrize("shape", [(38, 38), (600, 500), (900, 300), (29, 1), (28, 28)])
def test_equal_relevance_looks_equal(shape):
    np.testing.assert_allclose(reduced(np.full(shape, 0.3), 28), 0.3, rtol=1e-12)


def test_a_small_map_stays_as_it_is():
    values = np.random.default_rng(0).normal(size=(28, 5))
    assert np.array_equal(reduced(values, 28), values)
