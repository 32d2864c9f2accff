"""Photographs in all forms that users have become the same picture in RGB."""

import collections
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrpfx.command_line.image_files import images_in
from lrpfx.errors import InputError, InputTypeError
from lrpfx.images.opening import count_of, image_files, images_of_inputs, is_several, opened_images


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)


def one(image):
    (found,) = opened_images(image)
    assert found.image.mode == "RGB"
    return np.asarray(found.image)


def test_forms(pixels, tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    floats = pixels / 255.0
    forms = [path, str(path), Image.fromarray(pixels), pixels, pixels.transpose(2, 0, 1), floats, floats.astype(np.float32)]
    forms += [torch.tensor(pixels), torch.tensor(pixels).permute(2, 0, 1), torch.tensor(floats).permute(2, 0, 1).bfloat16()]
    for form in forms:
        assert np.abs(one(form).astype(int) - pixels).max() <= (2 if getattr(form, "dtype", None) == torch.bfloat16 else 0)


def test_grey_and_transparent(pixels):
    grey = pixels[..., 0]
    for form in (grey, grey[None], grey[..., None], Image.fromarray(grey)):
        assert (one(form) == grey[..., None]).all()
    transparent = np.dstack([pixels, np.zeros((7, 9), dtype=np.uint8)])
    assert (one(transparent) == 255).all() and (one(Image.fromarray(transparent)) == 255).all()
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert (one(deep) == grey[..., None]).all()
    assert one(Image.fromarray(pixels).convert("CMYK")).shape == (7, 9, 3)
    assert one(Image.fromarray(pixels).quantize(4)).shape == (7, 9, 3)


def test_photographs_are_upright(pixels, tmp_path):
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # a quarter turn
    image.save(tmp_path / "turned.png", exif=exif)
    assert (one(tmp_path / "turned.png") == np.rot90(pixels, -1)).all()


def test_folders_and_lists(pixels, tmp_path):
    (tmp_path / "inner").mkdir()
    for name in ("b.png", "a.JPG", "inner/c.webp", "notes.txt"):
        (tmp_path / name).write_text("text") if name.endswith("txt") else Image.fromarray(pixels).save(tmp_path / name)
    assert [found.name for found in opened_images(tmp_path)] == ["a.JPG", "b.png", "inner/c.webp"]
    names = [found.name for found in opened_images([pixels, tmp_path / "b.png", torch.tensor(pixels)[None]])]
    assert names == ["image 1", "b.png", "image 3"]
    assert is_several(tmp_path) and is_several([pixels]) and is_several(pixels[None])
    assert not is_several(pixels) and not is_several(tmp_path / "b.png") and not is_several("https://example.org/a.png")


def test_open_files(pixels, tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    content = path.read_bytes()
    assert (one(io.BytesIO(content)) == pixels).all()
    with path.open("rb") as file:
        assert not is_several(file) and [found.name for found in opened_images(file)] == ["photo.png"]
    with pytest.raises(InputError, match="the BytesIO is not an image"):
        one(io.BytesIO(content[5:]))
    with pytest.raises(InputError, match="the BytesIO cannot be opened"):
        one(io.BytesIO(content[:-40]))


def test_iterables_of_photographs(pixels, tmp_path):
    pandas = pytest.importorskip("pandas")
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    for path in paths:
        Image.fromarray(pixels).save(path)
    objects = np.empty(2, dtype=object)
    objects[:] = [Path(paths[0]), Image.fromarray(pixels)]
    for make in (
        lambda: (path for path in paths),
        lambda: map(Image.open, paths),
        lambda: iter([pixels, pixels]),
        lambda: sorted(tmp_path.glob("*.png")),
        lambda: pandas.Series(paths),
        lambda: np.array(paths),
        lambda: objects,
        lambda: dict(enumerate(paths)).values(),
        lambda: collections.deque(paths),
    ):
        assert is_several(make())
        found = list(opened_images(make()))
        assert len(found) == 2 and all((np.asarray(one.image) == pixels).all() for one in found)
        assert count_of(make()) in (2, None)
    assert count_of(iter(paths)) is None and count_of(np.array(paths)) == 2
    with pytest.raises(InputError, match="the generator of images is empty"):
        list(opened_images(one for one in ()))


def test_home_folders(pixels, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "inner").mkdir()
    Image.fromarray(pixels).save(tmp_path / "inner" / "a.png")
    assert (one("~/inner/a.png") == pixels).all() and is_several("~/inner") and (one(Path("~/inner")) == pixels).all()


def test_hidden_files_are_left_out(pixels, tmp_path):
    for name in (".ipynb_checkpoints/a.png", "._a.jpg", "inner/.b.png", "inner/.git/c.png", "inner/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    assert [found.name for found in opened_images(tmp_path)] == ["inner/d.png"]
    hidden = tmp_path / ".ipynb_checkpoints"
    assert [found.name for found in opened_images(hidden)] == ["a.png"]  # it was asked for


def test_errors_name_the_file_of_a_folder(pixels, tmp_path):
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for content, message in ((b"", "not an image"), (b"junk", "not an image")):
        (tmp_path / "b.jpg").write_bytes(content)
        with pytest.raises(InputError, match=f"b.jpg is {message}"):
            list(opened_images(tmp_path))
    (tmp_path / "b.jpg").unlink()
    Image.fromarray(pixels[..., 0].astype(np.uint16)).save(tmp_path / "c.tif")
    with pytest.raises(InputError, match=r"c\.tif: .* nearly black"):
        list(opened_images(tmp_path))


def test_three_axes_are_one_photograph(pixels):
    grey = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
    assert len(list(opened_images(grey[:3]))) == 1 and len(list(opened_images(list(grey)))) == 4
    assert len(list(opened_images(grey[:, None]))) == 4
    for stack in (grey, torch.tensor(grey), grey / 255):
        with pytest.raises(InputTypeError, match=r"four photographs in grey, .*: pass list\(array\)"):
            list(opened_images(stack))


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("https://example.org/cat.jpg", InputError, "is an address: download"),
        ("data:image/png;base64,AAAA", InputError, "is an address"),
        ("missing.png", InputError, "there is no file"),
        ("", InputError, "the path of the image is empty; for the current folder, pass '.'"),
        (["a sentence " * 400], InputError, "cannot be opened"),
        ("a\0b.png", InputError, "cannot be opened"),
        ("~nobody_of_this_name/a.png", InputError, "home"),
        (None, InputTypeError, "not None"),
        (b"abc", InputTypeError, r"not bytes; for the content of a file, pass io.BytesIO\(content\)"),
        ({"a": 1}, InputTypeError, r"which a dict does not give .* list\(images.values\(\)\)"),
        ({"a.png"}, InputTypeError, "which a set does not give"),
        ([[0.1, 0.2], [0.3, 0.4]], InputTypeError, "not float"),
        (3, InputTypeError, "uint8, uint16 or floating point, .* not int"),
        ([], InputError, "empty"),
        (np.zeros((0, 3, 4, 4)), InputError, "empty"),
        (np.zeros((5, 6, 7)), InputTypeError, "1, 3 or 4 channels"),
        (np.zeros((3, 5, 4)), InputTypeError, "can be 3 channels"),
        (np.full((4, 4), 255.0), InputError, "divide by 255"),
        (np.full((4, 4), np.nan), InputError, "not finite"),
        (np.zeros((4, 4), dtype=np.int64), InputTypeError, "int64"),
        (np.zeros(4), InputTypeError, "1, 3 or 4 channels"),
        (np.array("a.png"), InputTypeError, "not of <U5"),
    ],
)
def test_wrong_images(image, error, message):
    with pytest.raises(error, match=message):
        list(opened_images(image))


def test_damaged_files(tmp_path, pixels):
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(InputError, match="not an image that Pillow can read"):
        one(tmp_path / "text.png")
    Image.fromarray(np.zeros((99, 99, 3), dtype=np.uint8)).save(tmp_path / "cut.bmp")
    (tmp_path / "cut.bmp").write_bytes((tmp_path / "cut.bmp").read_bytes()[:200])
    with pytest.raises(InputError, match="cannot be opened"):
        one(tmp_path / "cut.bmp")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no image in the folder"):
        one(tmp_path / "empty")


def test_pictures_of_inputs():
    inputs = torch.stack([torch.linspace(-2, 2, 12).reshape(3, 2, 2), torch.zeros(3, 2, 2)])
    first, second = images_of_inputs(inputs)
    assert np.asarray(first.image).min() == 0 and np.asarray(first.image).max() == 255
    assert (np.asarray(second.image) == 128).all()
    assert images_of_inputs(torch.rand(1, 5, 4, 4))[0].image.size == (4, 4)


def test_no_program_is_started_for_a_photograph(tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("page.png", "page.eps"):
        (tmp_path / name).write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
        with pytest.raises(InputError, match="not an image that Pillow can read"):
            list(opened_images(tmp_path / name))
    assert not (tmp_path / "started").exists() and [path.name for path in image_files(tmp_path)] == ["page.png"]


def test_formats_that_are_only_recognized_are_not_read(tmp_path):
    for name in ("weights.h5", "film.mpg", "field.grib", "drawing.eps"):
        (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n")
    assert image_files(tmp_path) == []
    Image.new("RGB", (4, 4)).save(tmp_path / "photo.jfif", format="JPEG")
    assert [path.name for path in image_files(tmp_path)] == ["photo.jfif"]


LINKS = {
    "a folder": ({"linked": "../elsewhere"}, ["linked/deep/two.png", "linked/one.png"]),
    "twice": ({"a": "../elsewhere", "b": "../elsewhere/deep"}, ["a/deep/two.png", "a/one.png", "b/two.png"]),
    "a chain": ({"first": "second", "second": "../elsewhere/deep"}, ["first/two.png", "second/two.png"]),
    "itself": ({"again": "."}, []),
    "above": ({"up": ".."}, ["up/elsewhere/deep/two.png", "up/elsewhere/one.png"]),
    "a cycle": ({"out": "../elsewhere", "../elsewhere/back": "../photos"}, ["out/deep/two.png", "out/one.png"]),
    "hidden": ({".linked": "../elsewhere"}, []),
    "nowhere": ({"lost": "../nothing", "loop": "loop"}, []),
    "a file": ({"three.png": "../elsewhere/one.png"}, ["three.png"]),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_in_folders_are_followed(name, pixels, tmp_path):
    links, expected = LINKS[name]
    folder = tmp_path / "above" / "photos"
    (tmp_path / "above" / "elsewhere" / "deep").mkdir(parents=True)
    folder.mkdir()
    for file in ("photos/own.png", "elsewhere/one.png", "elsewhere/deep/two.png"):
        Image.fromarray(pixels).save(tmp_path / "above" / file)
    for link, target in links.items():
        (folder / link).symlink_to(target, target_is_directory=True)
    found = [path.relative_to(folder).as_posix() for path in image_files(folder)]
    assert found == sorted([*expected, "own.png"])
    assert [one.name for one in opened_images(folder)] == found
    assert len({one.source for one in images_in([folder])}) == len(found)


def test_images_that_a_dataset_did_not_decode(pixels, tmp_path):
    """With the orientation that the camera noted, as from a file."""
    path, orientation = tmp_path / "photo.png", Image.Exif()
    orientation[0x112] = 6
    Image.fromarray(pixels).save(path, exif=orientation)
    expected = one(path)
    assert expected.shape[:2] == pixels.shape[1::-1]
    forms = [
        {"bytes": path.read_bytes(), "path": None},
        {"bytes": None, "path": str(path)},
        {"bytes": b"cut", "path": "a/b.png"},
    ]
    for form in forms[:2]:
        assert np.array_equal(one(form), expected)
    with pytest.raises(InputError, match=r"a/b\.png is not an image"):
        list(opened_images({"bytes": b"cut", "path": "a/b.png"}))
    for form in ({"bytes": None, "path": None}, {"bytes": [1, 2], "path": "photo.png"}):
        with pytest.raises(InputTypeError, match="neither its content as bytes nor a path"):
            list(opened_images(form))
