"""What `verify` finds in stores that were damaged, and how they are whole again."""

import os

import numpy as np
import pytest
import zarr
from data_sets import LAYERS, Noise, tree

import lrpfx
import lrpfx.datasets
from lrpfx.datasets import locations

COUNT, SETTINGS = 30, {"record": LAYERS, "block_size": 8, "batch_size": 8, "dtype": "float16"}


@pytest.fixture
def path(explain_model, tmp_path):
    lrpfx.datasets.attribute(explain_model, Noise(COUNT, broken=[3]), tmp_path / "store", **SETTINGS)
    return tmp_path / "store"


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


DAMAGES = {
    "a flipped bit in relevance": ("relevance/c/1/0/0/0", flipped),
    "a flipped bit in texts": ("error/c/2", flipped),
    "a flipped bit in labels": ("label/c/0", flipped),
    "an empty file": ("output/c/3/0", lambda file: file.write_bytes(b"")),
    "half a file": ("layers.first/c/1/0/0/0", lambda file: file.write_bytes(file.read_bytes()[:100])),
    "a lost file": ("digest/c/2", lambda file: file.unlink()),
    "an empty mark": ("done/c/2", lambda file: file.write_bytes(b"")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_repaired(name, explain_model, path):
    before, (chunk, damage) = tree(path), DAMAGES[name]
    found = lrpfx.datasets.verify(path)
    assert found.is_sound and found.done == 4 and "4 blocks done, 0 damaged chunks" in str(found)
    damage(path / chunk)
    harmed = tree(path)
    found = lrpfx.datasets.verify(path)
    assert not found.is_sound and list(found.damaged) == [chunk] and chunk in str(found) and tree(path) == harmed
    found = lrpfx.datasets.verify(path, repair=True)
    assert found.is_sound and list(found.damaged) == [chunk] and not lrpfx.datasets.open(path).done.all()
    assert lrpfx.datasets.verify(path).done == 3
    lrpfx.datasets.attribute(explain_model, Noise(COUNT, broken=[3]), path, **SETTINGS)
    assert tree(path) == before


def test_a_state_that_does_not_fit(path):
    """A file of another moment, which is whole in itself."""
    zarr.open_group(path)["status"][2:4] = np.zeros(2, dtype=np.uint8)
    assert list(lrpfx.datasets.verify(path).damaged) == ["status/c/0"]


def test_what_a_stopped_run_left(explain_model, path):
    before = tree(path)
    (path / "done/c/1").unlink()
    (path / "relevance/c" / f"5.{'0' * 32}.partial").write_bytes(b"half")
    found = lrpfx.datasets.verify(path)
    assert found.is_sound and found.unfinished == [1] and len(found.leftovers) == 1 and "1 unfinished block" in str(found)
    assert not lrpfx.datasets.verify(path, repair=True).damaged and not list(path.rglob("*.partial"))
    lrpfx.datasets.attribute(explain_model, Noise(COUNT, broken=[3]), path, **SETTINGS)
    assert tree(path) == before


def test_files_of_others(path):
    """Such as a file manager leaves."""
    (path / "seed/c/.DS_Store").write_bytes(b"1")
    found = lrpfx.datasets.verify(path, repair=True)
    assert found.is_sound and not found.is_repaired and "removed" not in str(found)


@pytest.mark.parametrize(("array", "old", "new"), [("output", "30,\n", "20,\n"), ("label", '"int64"', '"int32"')])
def test_a_description_that_is_not_that_of_the_manifest(array, old, new, path):
    description = path / array / "zarr.json"
    assert old in description.read_text()
    description.write_text(description.read_text().replace(old, new, 1))
    for function in (lrpfx.datasets.open, lrpfx.datasets.verify):
        with pytest.raises(lrpfx.errors.ArtefactError, match=f"description of the array '{array}' is damaged"):
            function(path)


def test_what_cannot_be_repaired(path, tmp_path):
    with pytest.raises(lrpfx.errors.ArtefactError, match="not a store"):
        lrpfx.datasets.verify(tmp_path)
    (path / "relevance/zarr.json").write_text("{")
    with pytest.raises(lrpfx.errors.ArtefactError, match="is damaged"):
        lrpfx.datasets.verify(path, repair=True)


def test_rows_reach_the_disk_before_they_count(explain_model, tmp_path, monkeypatch):
    """At each mark, all chunks of its block and the folders that they are in have been synchronized since they were written."""
    synchronized = []
    monkeypatch.setattr(locations, "_synchronize", lambda path: synchronized.append(path))
    marks, path, replace = [], tmp_path / "store", os.replace

    def watched(source, target, **arguments):
        replace(source, target, **arguments)
        array, _, block, *_ = os.path.relpath(target, path).split("/") + [""] * 2
        if array == "done" and block.isdigit():
            chunks = [one for one in path.glob(f"*/c/{block}/**/*") if one.is_file()]
            chunks += [one for one in path.glob(f"*/c/{block}") if one.is_file() and one != target]
            folders = {folder for one in chunks for folder in one.parents if folder.is_relative_to(path)}
            marks.append({*chunks, *folders} - set(synchronized) - {target})
            synchronized.clear()

    monkeypatch.setattr(os, "replace", watched)
    lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    assert len(marks) == 4 and not any(marks)
