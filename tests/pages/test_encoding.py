"""Numbers and arrays as data of a page."""

import base64
import json

import numpy as np
import pytest

from lrpfx.pages.encoding import figure, packed, reduced


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


@pytest.mark.parametrize("shape", [(7, 5), (28, 28), (100, 57), (1, 300)])
def test_a_reduced_map_keeps_the_total(shape):
    values = np.random.default_rng(0).normal(size=shape)
    found = reduced(values, 28)
    assert found.shape == tuple(min(28, size) for size in shape)
    np.testing.assert_allclose(found.sum(), values.sum(), atol=1e-10)
    if max(shape) <= 28:
        assert np.array_equal(found, values)


def test_a_reduced_map_sums_areas():
    found = reduced(np.arange(16.0).reshape(4, 4), 2)
    assert found.tolist() == [[10.0, 18.0], [42.0, 50.0]]
