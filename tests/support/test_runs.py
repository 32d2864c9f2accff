"""Runs: one writer at a time, and the same facts as before."""

import errno
import os
import signal
import time

import pytest

from lrpfx.errors import ArtefactError, InputError, LrpfxWarning
from lrpfx.support.runs import check_same_run, differences, sole_writer


@pytest.mark.parametrize("name", ["store", "link", "linked/store"])
def test_one_run_writes_to_a_target(name, tmp_path):
    target = tmp_path / "folder" / "store"
    target.mkdir(parents=True)
    (tmp_path / "folder" / "link").symlink_to(target)
    (tmp_path / "folder" / "linked").symlink_to(target.parent)
    with sole_writer(target), pytest.raises(InputError) as refused, sole_writer(tmp_path / "folder" / name):
        raise AssertionError("two at once")
    assert refused.value.topic == "files-and-folders" and str(target) in str(refused.value)
    with sole_writer(target):
        pass
    assert not list(tmp_path.rglob("*.lrpfx-lock"))


def test_the_lock_ends_with_the_process_that_has_it(tmp_path):
    """Also if it is killed, and a process that it has started, such as one that loads samples, lives on."""
    target, child = tmp_path / "store", tmp_path / "child"
    writer = os.fork()
    if not writer:
        with sole_writer(target):
            worker = os.fork()
            if worker:
                child.write_text(str(worker))
            time.sleep(60)
        os._exit(0)
    while not child.exists() or not child.read_text():
        time.sleep(0.01)
    try:
        with pytest.raises(InputError), sole_writer(target):
            pass
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        os.kill(int(child.read_text()), 0)  # it is there
        with sole_writer(target):
            pass
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_written_to(number, tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(LrpfxWarning, match="without locks"), sole_writer(tmp_path / "store"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtefactError), sole_writer(tmp_path / "file" / "store"):
        pass


def test_what_differs_is_named():
    before = {"target": "predicted", "layers": list(range(40)), "top": 5}
    check_same_run("store", dict(before), before)
    with pytest.raises(InputError) as refused:
        check_same_run("store", {**before, "target": 1, "layers": [], "seed": 0}, before)
    assert refused.value.topic == "changed-data"
    found = differences({**before, "target": 1, "layers": [], "seed": 0}, before)
    assert found == ["target (it was 'predicted', and is 1 now)", "layers", "seed (it was None, and is 0 now)"]
