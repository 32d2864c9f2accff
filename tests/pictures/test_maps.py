"""Maps of relevance: forms of arrays, scales, and smoothing against scipy's."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn
from torch.nn.functional import interpolate

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures import relevance_map, scale_of, smoothed
from lrpfx.pictures.maps import resized

RANDOM = np.random.default_rng(0)


def test_pictures_need_neither_torch_nor_matplotlib():
    code = "import sys, lrpfx.pictures; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# --- forms -------------------------------------------------------------------------------------------------------------------

FORMS = [
    ((5, 7), None, None),
    ((1, 5, 7), None, 0),
    ((3, 5, 7), None, 0),
    ((4, 5, 7), None, 0),
    ((5, 7, 1), None, 2),
    ((5, 7, 3), None, 2),
    ((5, 7, 4), None, 2),
    ((1, 3, 5, 7), None, 1),
    ((1, 5, 7, 3), None, 3),
    ((1, 1, 5, 7), None, 1),
    ((64, 5, 7), "first", 0),
    ((5, 7, 64), "last", 2),
    ((1, 64, 5, 7), "first", 1),
    ((3, 5, 3), "first", 0),
    ((3, 5, 3), "last", 2),
]


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, lambda array: torch.tensor(array, requires_grad=True), list])
@pytest.mark.parametrize(("shape", "channels", "axis"), FORMS)
def test_channels_are_summed(shape, channels, axis, convert):
    array = RANDOM.normal(size=shape)
    expected = array if axis is None else array.sum(axis)
    result = relevance_map(convert(array), channels)
    assert result.dtype == np.float64 and result.ndim == 2
    np.testing.assert_array_equal(result, expected.reshape(result.shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_of_less_precision_are_summed_in_double_precision(dtype):
    tensor = torch.rand(3, 4, 5).to(dtype)
    np.testing.assert_array_equal(relevance_map(tensor), tensor.double().sum(0).numpy())


def test_the_array_that_was_given_is_not_changed():
    array = RANDOM.normal(size=(8, 8))
    before = array.copy()
    for result in (relevance_map(array), smoothed(array, 0), smoothed(array)):
        result += 1.0
    assert np.array_equal(array, before)


AMBIGUOUS = "channels='first' or channels='last'"
WRONG = [
    (np.zeros((3, 8, 3)), InputTypeError, f"3 channels of 8×3 pixels or 3×8 pixels of 3 channels: pass {AMBIGUOUS}"),
    (np.zeros((1, 8, 4)), InputTypeError, AMBIGUOUS),
    (np.zeros((1, 3, 5, 4)), InputTypeError, r"shape \(1, 3, 5, 4\).*" + AMBIGUOUS),
    (np.zeros((64, 8, 8)), InputTypeError, r"shape \(64, 8, 8\) has 1, 3 or 4 channels neither first nor last"),
    (np.zeros((2, 3, 8, 8)), InputTypeError, r"batch of 2: draw one at a time, relevance\[0\]"),
    (np.zeros(8), InputTypeError, r"shape \(8,\) is not that of an image"),
    (np.zeros((1, 1, 3, 8, 8)), InputTypeError, "is not that of an image"),
    (np.zeros((0, 8)), InputTypeError, "no pixels"),
    (np.zeros((8, 8), int), InputTypeError, "int64, which is that of masks, labels or pixels: convert it to floating point"),
    (np.zeros((8, 8), np.uint8), InputTypeError, "uint8"),
    (torch.zeros(8, 8, dtype=torch.long), InputTypeError, "int64"),
    (np.zeros((8, 8), bool), InputTypeError, "bool"),
    (np.zeros((8, 8), complex), InputTypeError, "not of complex128"),
    (torch.zeros(8, 8, dtype=torch.complex64), InputTypeError, "not of complex64"),
    (Image.new("RGB", (8, 8)), InputTypeError, "uint8"),
    ("relevance.npy", InputTypeError, "not str"),
    (None, InputTypeError, "not NoneType"),
    ([[1.0, 2.0], [3.0]], InputTypeError, "array or tensor"),
    (np.array([[1.0, np.nan], [np.inf, 0.0]]), InputError, r"2 values that are not finite, the first at \(0, 1\)"),
]


@pytest.mark.parametrize(("relevance", "error", "message"), WRONG)
def test_what_is_no_map_is_an_error(relevance, error, message):
    with pytest.raises(error, match=message):
        relevance_map(relevance)


def test_the_result_of_attribute_has_its_relevance_in_an_attribute():
    explain_model = lrpfx.transform(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), EpsilonPlusFlat())
    attribution = lrpfx.attribute(explain_model, torch.rand(1, 1, 2, 2), 0)
    with pytest.raises(InputTypeError, match=r"pass its attribute \.relevance"):
        relevance_map(attribution)


def test_channels_is_first_or_last():
    with pytest.raises(InputError, match="channels is 'first', 'last' or None"):
        relevance_map(np.zeros((3, 8, 8)), channels="middle")


# --- scales ------------------------------------------------------------------------------------------------------------------


def test_the_scale_is_a_percentile_of_magnitudes():
    array = RANDOM.normal(size=(30, 40))
    assert scale_of(array, 90, sigma=0) == np.percentile(np.abs(array), 90)
    assert scale_of(array, 100, sigma=0) == np.abs(array).max()
    assert scale_of(array) == np.percentile(np.abs(smoothed(array)), 99.5)


@pytest.mark.parametrize("put", [list, tuple, lambda maps: dict(enumerate(maps))])
def test_several_maps_have_one_scale(put):
    maps = [RANDOM.normal(size=(8, 9)), torch.randn(3, 20, 10) * 5]
    both = np.concatenate([np.abs(relevance_map(one)).ravel() for one in maps])
    assert scale_of(put(maps), 95, sigma=0) == np.percentile(both, 95)


def test_nested_lists_are_one_map():
    assert scale_of([[1.0, 2.0], [3.0, -4.0]], 100, sigma=0) == 4.0


@pytest.mark.parametrize("sigma", [None, 0, 1.0, 2.5, 4.0])
def test_the_scale_of_few_pixels_is_theirs(sigma):
    array = np.zeros((224, 224))
    assert scale_of(array, sigma=sigma) == 0.0
    array[100, 100] = -2.0
    spot = np.abs(smoothed(array, sigma))
    assert 0.05 * spot.max() < scale_of(array, sigma=sigma) <= spot.max()


@pytest.mark.parametrize("channels", [3, 4])
def test_a_stack_of_maps_is_no_map_with_channels(channels):
    maps = RANDOM.normal(size=(channels, 12, 20))
    with pytest.raises(InputTypeError, match=r"maps or one with . channels: pass list\(maps\)"):
        scale_of(maps)
    assert scale_of(list(maps)) != scale_of(maps, channels="first") == scale_of(maps[None]) == scale_of(maps.sum(0))


@pytest.mark.parametrize("percentile", [0, -1, 101, float("nan"), True, "99", None])
def test_percentiles_are_numbers_to_a_hundred(percentile):
    with pytest.raises(InputError, match="percentile is a number above 0"):
        scale_of(np.ones((4, 4)), percentile)


# --- smoothing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0, 9.5, 60.0])
@pytest.mark.parametrize("shape", [(31, 50), (64, 64)])
def test_smoothing_is_that_of_scipy_with_reflection(shape, sigma):
    array = RANDOM.normal(size=shape)
    expected = gaussian_filter(array, sigma, mode="reflect", truncate=12)
    np.testing.assert_allclose(smoothed(array, sigma), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sigma", [None, 0.5, 4, 100])
@pytest.mark.parametrize("shape", [(224, 224), (1, 9), (7, 300), (15, 4)])
def test_smoothing_keeps_the_total_and_signs(shape, sigma):
    array = RANDOM.normal(size=shape) ** 3
    assert abs(smoothed(array, sigma).sum() - array.sum()) <= 1e-12 * np.abs(array).sum()
    assert smoothed(np.abs(array), sigma).min() >= 0
    np.testing.assert_allclose(smoothed(np.full(shape, 0.7), sigma), 0.7, rtol=1e-14)


@pytest.mark.parametrize("place", [(0, 0), (0, 223), (100, 223), (112, 112)])
def test_no_relevance_is_lost_at_borders(place):
    array = np.zeros((224, 224))
    array[place] = 1e-30
    result = smoothed(array)
    assert abs(result.sum() - 1e-30) <= 1e-42
    assert np.unravel_index(result.argmax(), result.shape) == place
    assert (result == 0).mean() > 0.9  # far away, there is none


def test_the_default_sigma_is_two_pixels_at_224():
    array = RANDOM.normal(size=(224, 300))
    assert np.array_equal(smoothed(array), smoothed(array, 2.0))
    assert np.array_equal(smoothed(array, 0), array)


@pytest.mark.parametrize("sigma", [-1, float("nan"), float("inf"), True, "4", (1, 2)])
def test_sigma_is_a_number_of_pixels(sigma):
    with pytest.raises(InputError, match="sigma is a number of pixels"):
        smoothed(np.ones((4, 4)), sigma)


def energy_of_grid(values, stride):
    """The share of the energy, without the mean, at the frequencies that repeat after `stride` pixels."""
    energy = np.abs(np.fft.fft2(values - values.mean())) ** 2
    step = len(values) // stride
    return energy[::step, ::step].sum() / energy.sum()


@pytest.mark.parametrize("stride", [2, 4])
def test_the_grid_of_a_strided_layer_is_gone(stride):
    """A kernel that is not a multiple of its stride reads some pixels more often, which leaves a grid in the relevance."""
    torch.set_default_dtype(torch.float32)
    convolution = nn.Conv2d(3, 8, stride + 1, stride=stride, padding=1)
    model = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    model[-1].weight.data.abs_()
    explain_model = lrpfx.transform(model.eval(), EpsilonPlusFlat())
    values = relevance_map(lrpfx.attribute(explain_model, torch.rand(1, 3, 224, 224), 0).relevance)
    assert energy_of_grid(values, stride) > 0.05
    assert energy_of_grid(smoothed(values), stride) < 1e-3


# --- sizes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(50, 30), (14, 21), (13, 8), (7, 11)])
def test_enlarged_maps_are_those_of_torch(size):
    array = RANDOM.normal(size=(8, 7))
    expected = interpolate(torch.tensor(array)[None, None], size[::-1], mode="bilinear", align_corners=False)[0, 0]
    np.testing.assert_allclose(resized(array, size), expected.numpy(), atol=1e-14)


def test_shrunk_maps_are_means_over_areas():
    array = RANDOM.normal(size=(12, 20))
    np.testing.assert_allclose(resized(array, (5, 4)), array.reshape(4, 3, 5, 4).mean((1, 3)), atol=1e-14)
    uneven = resized(array, (7, 5))
    assert uneven.shape == (5, 7) and abs(uneven.mean() - array.mean()) <= 1e-14


@pytest.mark.parametrize("size", [(50, 30), (5, 4), (3, 40), (7, 8)])
def test_resizing_changes_no_sign(size):
    array = np.abs(RANDOM.normal(size=(8, 7))) * 10.0 ** RANDOM.integers(-12, 12, (8, 7))
    assert resized(array, size).min() > 0
    array[:, 3:] = 0
    assert resized(array, size).min() >= 0 and resized(-array, size).max() <= 0
