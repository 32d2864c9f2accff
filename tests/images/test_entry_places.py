"""Places of a processor's entries on a photograph, against the places that the tests put them at."""

import numpy as np
import pytest
from PIL import Image

from lrpfx.errors import InputError
from lrpfx.images.entry_places import entry_places


def photograph(width, height):
    rows, columns = np.mgrid[:height, :width]
    disc = (columns - width / 3) ** 2 + (rows - height / 2) ** 2 < (height / 4) ** 2
    red, green = 127 + 100 * np.sin(columns / width * 9 + rows / height * 3), 127 + 100 * np.cos(rows / height * 7)
    return Image.fromarray(np.stack([red, green, 255 * disc], -1).clip(0, 255).astype(np.uint8))


def array(picture, size=None, box=None):
    """(channels, height, width), about zero."""
    picture = picture if size is None else picture.resize(size, Image.Resampling.BICUBIC, box)
    return np.moveaxis(np.asarray(picture, dtype=np.float64), -1, 0) / 127.5 - 1


def rows_of_patches(picture):
    """As Qwen2-VL has them: two frames of each patch, one row for each."""
    image = array(picture)
    channels, height, width = image.shape
    patches = image.reshape(channels, height // 4, 4, width // 4, 4).transpose(1, 3, 0, 2, 4)[:, :, :, None]
    return np.repeat(patches, 2, 3).reshape(-1, channels * 2 * 16)


def pixels_of_patches(rows, width, height):
    """The inverse: the sum of the entries of each pixel."""
    patches = rows.reshape(height // 4, width // 4, 3, 2, 4, 4).sum((2, 3))
    return patches.transpose(0, 2, 1, 3).reshape(height, width)


def smoothed(image):
    return sum(np.roll(image, (down, across), (0, 1)) for down in (-1, 0, 1) for across in (-1, 0, 1)) / 9


@pytest.mark.parametrize("size", [(48, 32), (200, 160)])
def test_rows_of_patches_lie_where_they_were_cut(size):
    """To a fraction of a pixel: a ramp has 256 levels."""
    places = entry_places(rows_of_patches, photograph(*size))
    relevance = np.random.default_rng(0).standard_normal(size[0] * size[1] * 6)
    found, expected = places.undo(relevance), pixels_of_patches(relevance, *size)
    assert found.shape == (size[1], size[0])
    np.testing.assert_allclose(found.sum(), relevance.sum(), rtol=1e-9)
    assert np.corrcoef(smoothed(found).ravel(), smoothed(expected).ravel())[0, 1] > (0.98 if size[0] < 100 else 0.9)
    middle = (places.left + places.right) / 2
    columns = np.repeat(np.arange(size[0])[None], size[1], 0)
    exact = rows_of_patches(Image.fromarray(np.repeat(columns[..., None], 3, 2).astype(np.uint8)))
    np.testing.assert_allclose(middle, (exact.ravel() + 1) * 127.5 + 0.5, atol=0.3)


def test_a_smaller_image_has_larger_entries():
    places = entry_places(lambda picture: array(picture, (20, 10))[None], photograph(120, 80))
    np.testing.assert_allclose(places.right - places.left, 6, atol=0.3)
    np.testing.assert_allclose(places.bottom - places.top, 8, atol=0.4)
    found = places.undo(np.eye(600)[0])  # the upper left corner
    assert found[:8, :6].sum() > 0.9 and found.sum() == pytest.approx(1)


def tiles(picture):
    """Four quarters, the whole, and a tile of padding."""
    width, height = picture.size
    boxes = [(x, y, x + width // 2, y + height // 2) for y in (0, height // 2) for x in (0, width // 2)]
    made = [array(picture, (16, 16), box) for box in (*boxes, (0, 0, width, height))]
    return np.stack([*made, np.zeros_like(made[0])])[None]


def test_tiles_have_sizes_of_their_own_and_padding_has_no_place():
    places = entry_places(tiles, photograph(64, 48))
    widths = (places.right - places.left).reshape(6, -1)
    np.testing.assert_allclose(np.median(widths[:4], 1), 2, atol=0.2)
    np.testing.assert_allclose(np.median(widths[4]), 4, atol=0.2)
    assert np.isnan(widths[5]).all()
    ones = np.zeros((6, 3 * 16 * 16))
    ones[1] = 1  # the quarter to the right
    found = places.undo(ones)
    assert found[:24, 32:].sum() > 0.97 * found.sum() == pytest.approx(0.97 * 768)


def by_content(picture):
    """Moves what is coloured."""
    made = array(picture)
    return made if (made[0] == made[1]).all() else np.roll(made, 20, 2)


REFUSED = {
    r"drops 33% of the photograph .* image\.crop\(\(1[01], 0, 5[01], 40\)\)": lambda one: array(one, (16, 16), (10, 0, 50, 40)),
    "standardizes each picture": lambda one: (array(one) - array(one).mean()) / (array(one).std() + 1e-9),
    "is random": lambda one: array(one) + np.random.default_rng().random(),
    "other entries of other pictures": lambda one: np.zeros(np.asarray(one).max() + 3),
    "by what a picture shows": by_content,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_undone_is_an_error(message):
    with pytest.raises(InputError, match=message):
        entry_places(REFUSED[message], photograph(60, 40))
