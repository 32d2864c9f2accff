"""Stores in folders, and on paths of object stores."""

import os
import shutil
import subprocess

import fsspec
import numpy as np
import pytest
import torch
import zarr
from data_sets import LAYERS, Noise, Objects, Stream, tree, without_run
from PIL import Image

import lrpfx
import lrpfx.datasets
from lrpfx.datasets.engines import EmbeddedEngine
from lrpfx.datasets.locations import location_of
from lrpfx.datasets.store import create

COUNT = 100
SETTINGS = {"record": LAYERS, "batch_size": 8, "block_size": 16, "dtype": "float16"}


@pytest.fixture(params=["memory", "objects"])
def remote(request, tmp_path):
    """A path of an object store, and its file system."""
    path = "memory://bucket/store" if request.param == "memory" else f"objects:/{tmp_path}/store"
    system, root = fsspec.core.url_to_fs(path)
    yield path, system, root
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.mark.parametrize("data", [Noise(COUNT, broken=(5, 40), infinite=(17,)), Stream(Noise(COUNT, infinite=(17,)))])
def test_an_object_store_has_what_a_folder_has(data, explain_model, remote, tmp_path):
    path, system, root = remote
    found = lrpfx.datasets.attribute(explain_model, data, path, **SETTINGS)
    lrpfx.datasets.attribute(explain_model, data, tmp_path / "folder", **SETTINGS)
    assert found.path == path and len(found) == COUNT and found.done.all()
    content = {name.removeprefix(root).strip("/"): system.cat_file(name) for name in system.find(root)}
    assert without_run(content) == tree(tmp_path / "folder")


@pytest.mark.parametrize("data", [Noise(COUNT), Stream(Noise(COUNT))])
@pytest.mark.thorough
def test_a_run_goes_on(data, explain_model, remote, tmp_path):
    path, system, root = remote
    seen = []

    def stop(done, total):
        seen.append(done)
        if done >= COUNT // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explain_model, data, path, progress=stop, **SETTINGS)
    assert 0 < lrpfx.datasets.open(path).done.sum() < COUNT
    seen.clear()
    system.rm(f"{root}/done/c/1")
    found = lrpfx.datasets.attribute(explain_model, data, path, progress=lambda done, total: seen.append(done), **SETTINGS)
    assert found.done.all() and min(seen) > COUNT // 4
    lrpfx.datasets.attribute(explain_model, data, tmp_path / "folder", **SETTINGS)
    content = {name.removeprefix(root).strip("/"): system.cat_file(name) for name in system.find(root)}
    assert without_run(content) == tree(tmp_path / "folder")
    with pytest.raises(lrpfx.InputError, match="begun with other"):
        lrpfx.datasets.attribute(explain_model, data, path, **{**SETTINGS, "dtype": "float64"})


@pytest.mark.parametrize("kind", ["objects", "group", "partial"])
def test_what_is_there_already_is_kept(kind, explain_model, remote):
    path, system, root = remote
    if kind == "group":
        zarr.create_group(location_of(path).zarr_store(), zarr_format=3).create_array("label", shape=(3,), dtype="int64")
    else:
        system.pipe_file(f"{root}/photograph.{'partial' if kind == 'partial' else 'jpg'}", b"1234")
    before = {name: system.cat_file(name) for name in system.find(root)}
    with pytest.raises(lrpfx.ArtefactError, match=r"did not write|is not a store of lrpfx"):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    assert {name: system.cat_file(name) for name in system.find(root)} == before


def test_partial_files_of_others_are_kept(explain_model, tmp_path):
    path = tmp_path / "store"
    lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    (path / "done" / "c" / "1").unlink()
    (path / "notes.partial").write_text("mine")
    left = path / "label" / "c" / f"3.{'0123456789abcdef' * 2}.partial"
    left.write_bytes(b"half")
    assert lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS).is_complete
    assert (path / "notes.partial").exists() and not left.exists()


class Losing(EmbeddedEngine):
    """An engine one of whose processes is killed while it writes. Others do its work."""

    def steps(self, work):
        for step in super().steps(work):
            (work.writer.location.path / "label" / f"0.{'0123456789abcdef' * 2}.partial").write_bytes(b"half")
            yield step


@pytest.mark.parametrize("data", [Noise(COUNT), Stream(Noise(COUNT))])
def test_what_killed_processes_left_is_removed_at_the_end(data, explain_model, tmp_path):
    lrpfx.datasets.attribute(explain_model, data, tmp_path / "whole", **SETTINGS)
    lrpfx.datasets.attribute(explain_model, data, tmp_path / "store", engine=Losing(), **SETTINGS)
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")


class Failing(Objects):
    """An object store that stops to take objects."""

    protocol = "failing"
    allowed = 0

    def pipe_file(self, path, value, **options):
        Failing.allowed -= 1
        if Failing.allowed < 0:
            raise RuntimeError("SlowDown: reduce your request rate")
        super().pipe_file(path, value, **options)


@pytest.mark.parametrize("allowed", [0, 5, 30, 60])
def test_errors_of_an_object_store(allowed, explain_model, tmp_path):
    fsspec.register_implementation("failing", Failing, clobber=True)
    path, Failing.allowed = f"failing:/{tmp_path}/store", allowed
    with pytest.raises(lrpfx.ArtefactError, match="SlowDown"):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    if 0 < allowed < 15:  # there are descriptions of arrays alone, which the next run replaces
        with pytest.raises(lrpfx.ArtefactError, match="not a store yet"):
            lrpfx.datasets.open(path)
    Failing.allowed = 10_000
    assert lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS).is_complete
    lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "folder", **SETTINGS)
    assert tree(tmp_path / "store") == tree(tmp_path / "folder")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nosuch://bucket/store", None, "Protocol not known"),
        ("memory://bucket/store", 3, "a dict"),
        ("folder", {"key": "x"}, "of this machine"),
        ("memory://", None, "a whole file system"),
        ("zip:///tmp::file:///tmp", None, "not a path that fsspec opens"),
    ],
)
def test_paths_that_cannot_be_opened(path, options, message, explain_model):
    for call in (
        lambda: lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, storage_options=options),
        lambda: lrpfx.datasets.open(path, storage_options=options),
    ):
        with pytest.raises(lrpfx.InputError, match=message):
            call()


def test_options_go_to_the_file_system(explain_model, tmp_path):
    given = {"path": str(tmp_path)}
    found = lrpfx.datasets.attribute(explain_model, Noise(20), "objects://store", storage_options=given, **SETTINGS)
    assert (tmp_path / "store" / "zarr.json").exists() and found.done.all()
    assert np.array_equal(lrpfx.datasets.open("objects://store", storage_options=given).labels, found.labels)


def test_how_many_requests_a_block_takes(explain_model, tmp_path):
    """As docs/scale.md says: one for each array and block, with that of what is done, and one for each array to begin."""
    Objects.requests.clear()
    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT), f"objects:/{tmp_path}/store", **SETTINGS)
    blocks, arrays = -(-COUNT // 16), len(found.manifest["arrays"])
    assert Objects.requests["put"] == blocks * arrays + arrays + 2
    before = Objects.requests["get"], Objects.requests["list"]
    assert found.done.all()
    assert (Objects.requests["get"], Objects.requests["list"]) == (before[0], before[1] + 1)


def test_a_path_of_a_file_is_a_folder(explain_model, tmp_path):
    found = lrpfx.datasets.attribute(explain_model, Noise(20), f"file://{tmp_path}/store", **SETTINGS)
    assert found.path == tmp_path / "store"


@pytest.mark.parametrize("data", [Noise(COUNT, broken=(5,)), Stream(Noise(COUNT))], ids=["sequence", "stream"])
@pytest.mark.thorough
def test_a_lost_chunk_is_missed_and_its_block_explained_anew(data, explain_model, remote):
    path, system, root = remote
    found = lrpfx.datasets.attribute(explain_model, data, path, **SETTINGS)
    content = {name: system.cat_file(name) for name in system.find(root)}
    for block, name in enumerate(found.names):
        chunk = next(one for one in content if one.startswith(f"{root}/{name}/c/{block % 7}"))
        system.rm(chunk)
        with pytest.raises(lrpfx.ArtefactError, match=rf"{chunk.removeprefix(root)} cannot be read: it is lost"):
            lrpfx.datasets.open(path)[name][:]
        assert len(lrpfx.datasets.open(path)[name][[0] if block % 7 else [99]]) == 1  # others are there
        steps: list[int] = []
        lrpfx.datasets.attribute(
            explain_model, data, path, progress=lambda done, _, steps=steps: steps.append(done), **SETTINGS
        )
        assert len(steps) in (1, 2, 3) and {name: system.cat_file(name) for name in system.find(root)} == content


def links_to_nothing(folder):
    (folder / "latest").symlink_to(folder / "nowhere")


@pytest.mark.parametrize("beginning", [False, True])
@pytest.mark.parametrize("others", [links_to_nothing, lambda folder: (folder / "work.txt").write_text("years")])
def test_no_run_removes_what_it_did_not_make(others, beginning, explain_model, tmp_path):
    """Neither a link that leads nowhere nor what a killed beginning left makes a folder an empty one."""
    path = tmp_path / "store"
    (path / "thesis").mkdir(parents=True)
    (path / "thesis" / "chapter").write_text("years")
    others(path)
    if beginning:
        (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {"lrpfx": "beginning"}}')
    before = sorted(path.rglob("*"))
    with pytest.raises(lrpfx.ArtefactError):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    manifest = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "other", **SETTINGS)._manifest
    with pytest.raises(lrpfx.ArtefactError, match="is not empty"):
        create(location_of(path), manifest)
    assert sorted(path.rglob("*")) == before


def test_a_store_with_a_link_to_nothing_is_a_store(explain_model, tmp_path):
    path = tmp_path / "store"
    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    before = found.relevance[:]
    links_to_nothing(path)
    with pytest.raises(lrpfx.InputError, match="begun with other"):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **{**SETTINGS, "dtype": "float64"})
    again = lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)
    np.testing.assert_array_equal(again.relevance[:], before)


def test_an_object_is_no_folder(explain_model, tmp_path):
    path = f"objects:/{tmp_path}/store"
    (tmp_path / "store").write_text("years")
    for call in (lrpfx.datasets.open, lambda path: lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)):
        with pytest.raises(lrpfx.ArtefactError, match="is a file, not a folder"):
            call(path)
    assert (tmp_path / "store").read_text() == "years"


def test_files_in_folders(tmp_path):
    (tmp_path / "file").write_text("years")
    assert location_of(str(tmp_path)).sizes() == {"file": 5} and location_of(str(tmp_path)).sizes("missing") == {}
    with pytest.raises(lrpfx.ArtefactError, match="file is a file, not a folder"):
        location_of(str(tmp_path)).sizes("file")


def test_two_runs_at_once(explain_model, tmp_path):
    """The second is refused, and readers are not."""
    seen = []

    def second(done, total):
        with pytest.raises(lrpfx.InputError, match="another run writes"):
            lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", **SETTINGS)
        seen.append(lrpfx.datasets.open(tmp_path / "store").is_complete)

    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", progress=second, **SETTINGS)
    assert found.done.all() and not seen[0] and [one.name for one in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("path", ["", "file://"])
def test_an_empty_path_is_not_the_current_folder(path, explain_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lrpfx.datasets.open, lambda path: lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)):
        with pytest.raises(lrpfx.InputError, match="the path is empty"):
            call(path)
    with pytest.raises(lrpfx.InputError, match="the path of the data is empty"):
        lrpfx.datasets.attribute(explain_model, path.removeprefix("file://"), tmp_path / "store", **SETTINGS)
    assert not list(tmp_path.iterdir())


def test_a_current_folder_that_is_gone(explain_model, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for call in (lrpfx.datasets.open, lambda path: lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, **SETTINGS)):
        with pytest.raises(lrpfx.LrpfxError, match="the current folder"):
            call("store")


# --- stores that cannot be written to ----------------------------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path):
    """Make the folder of stores one that cannot be written to, though root may write where permissions say no."""
    folder = tmp_path / "stores"
    folder.mkdir()

    def protect():
        if os.geteuid():
            folder.chmod(0o555)
        for command in [["--bind", folder, folder], ["-o", "remount,ro,bind", folder]] if not os.geteuid() else []:
            if subprocess.run(["mount", *command], capture_output=True).returncode:
                pytest.skip("permissions do not bind root, and this container may not mount")

    yield folder, protect
    subprocess.run(["umount", folder], capture_output=True)
    folder.chmod(0o755)


@pytest.mark.parametrize("data", [Noise(COUNT, broken=(5,)), Stream(Noise(COUNT))], ids=["sequence", "stream"])
def test_a_whole_store_that_cannot_be_written_to_is_opened(data, explain_model, read_only):
    folder, protect = read_only
    written = lrpfx.datasets.attribute(explain_model, data, folder / "store", **SETTINGS)
    (folder / "store" / "label" / f"c.{'0' * 32}.partial").write_text("")  # left by a process that was killed
    protect()
    found = lrpfx.datasets.attribute(explain_model, data, folder / "store", **SETTINGS)
    np.testing.assert_array_equal(found.relevance[:], written.relevance[:])
    with pytest.raises(lrpfx.InputError, match="begun with other"):
        lrpfx.datasets.attribute(explain_model, data, folder / "store", **{**SETTINGS, "dtype": "float32"})
    with pytest.raises(lrpfx.ArtefactError, match="cannot be written"):
        lrpfx.datasets.attribute(explain_model, data, folder / "other", **SETTINGS)
    if written.errors:
        with pytest.raises(lrpfx.ArtefactError, match=r"cannot be written to, .* 84 of 100"):
            lrpfx.datasets.attribute(explain_model, data, folder / "store", retry_failed=True, **SETTINGS)


def test_a_copied_folder_of_images_and_a_whole_store_that_cannot_be_written_to(read_only, tmp_path):
    folder, protect = read_only
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8), (50 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)).eval()
    explainer = lrpfx.Explainer(model, preprocess=lambda image: torch.tensor(np.asarray(image) / 255.0).permute(2, 0, 1))
    lrpfx.datasets.attribute(explainer, tmp_path / "images", folder / "store")
    copy = shutil.copytree(tmp_path / "images", tmp_path / "copy", copy_function=shutil.copyfile)
    protect()
    assert lrpfx.datasets.attribute(explainer, copy, folder / "store").is_complete


def test_a_folder_whose_lock_cannot_be_written_is_not_begun(explain_model, read_only):
    folder, protect = read_only
    (folder / "store").mkdir()
    protect()
    with pytest.raises(lrpfx.ArtefactError, match=r"cannot be written to, .* 0 of 100 are done"):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), folder / "store", **SETTINGS)
    assert not list((folder / "store").iterdir())


@pytest.mark.parametrize("data", [Noise(COUNT), Stream(Noise(COUNT))], ids=["sequence", "stream"])
def test_half_a_store_that_cannot_be_written_to_is_an_error(data, explain_model, read_only):
    folder, protect = read_only

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explain_model, data, folder / "store", progress=stop, **SETTINGS)
    protect()
    before = tree(folder / "store")
    with pytest.raises(
        lrpfx.ArtefactError, match=rf"{folder}/store or the folder .* cannot be written to, .* are done"
    ) as caught:
        lrpfx.datasets.attribute(explain_model, data, folder / "store", progress=stop, **SETTINGS)
    assert caught.value.topic == "files-and-folders" and tree(folder / "store") == before
