"""The small network, explained, and processes that tests kill."""

import multiprocessing
import os

import pytest
from data_sets import small_explain_model
from helpers import ROOT


@pytest.fixture(scope="session")
def explain_model():
    return small_explain_model()


@pytest.fixture(scope="session")
def context():
    """Processes are forked from one that has imported everything, but has no threads."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["data_sets"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        first = found.Process(target=str)
        first.start()
        first.join(60)
    assert first.exitcode == 0
    return found
