"""Shared set-up: float64 by default, and torchvision beside a CPU build of torch."""

import gc
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torchvision_cpu  # noqa: F401  before anything imports torchvision

from lrpfx.errors import LrpfxError
from lrpfx.frontends import capture
from lrpfx.frontends.guessed_inputs import Guess
from lrpfx.operators import table
from lrpfx.support.torch_internals import NEWEST_KNOWN, OLDEST_FOR_FILES, release

#: Files that need packages which `make test-torch` does not install, since these need the newest torch or much else.
OF_NEWEST = (
    "adapters/test_virelay",
    "adapters/test_virelay_export",
    "command_line/test_spray",
    "datasets/test_folders_of_images",
    "deploy/test_executorch",
    "end_to_end/test_against_lxt",
    "end_to_end/test_modules",
)
collect_ignore = [f"{name}.py" for name in OF_NEWEST] if release() < NEWEST_KNOWN else []

HERE = Path(__file__).parent
#: The rooms that all others are built on: their tests are the first to run.
CORE = ("ir", "operators", "rules", "passes", "runtime")
OTHERS = ("slow", "thorough", "programs", "ray", "examples", "gpu")

#: Tests that fail with an older torch, by release: `tests/tools/other_torch.py --write-known` writes them.
KNOWN_FAILURES = HERE / "known_failures" / f"torch-{'.'.join(map(str, release()))}.txt"


def pytest_collectstart(collector):
    """Models and tensors among the parameters of tests are the same in every run."""
    if isinstance(collector, pytest.Module):
        torch.default_generator.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Give each test its tier: `core` or `rooms`, unless it has another one. Of the cases of `sampled(n)`, each n-th has it."""
    cases = {}
    known = set(KNOWN_FAILURES.read_text().splitlines()) if KNOWN_FAILURES.exists() else set()
    for item in items:
        if item.nodeid in known:
            item.add_marker(pytest.mark.xfail(strict=True, reason="a known difference of this release of torch"))
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("slow") is None:
            number = cases[item.function] = cases.get(item.function, -1) + 1
            if number % sampled.args[0]:
                item.add_marker("thorough")
        if not any(map(item.get_closest_marker, OTHERS)):
            item.add_marker("core" if item.path.relative_to(HERE).parts[0] in CORE else "rooms")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Tests of what a newer torch is needed for are left out."""
    try:
        return (yield)
    except (LrpfxError, AssertionError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if release() < OLDEST_FOR_FILES and "or newer; this is torch" in text:
            pytest.skip(text)
        raise


@pytest.fixture(autouse=True)
def _double_precision():
    """Every test starts from the same seed and computes in float64 unless it says otherwise."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond: it prepares for GPUs
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def _own_compilations():
    """torch.compile gives up on code that it has compiled eight times: each file starts to count anew."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def heard_interrupts():
    """Ctrl-C is heard, also in a process that was started to ignore it, as shells start those in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_table(monkeypatch):
    """An operator table whose new rows are gone after the test."""
    with monkeypatch.context() as patched:
        for dictionary in ("_operators", "_functions", "_methods", "_foreign"):
            patched.setattr(table, dictionary, dict(getattr(table, dictionary)))
        yield
    table.rows_of_class.cache_clear()


def pytest_collection_finish():
    """What is there before the first test stays: to look through it for garbage again and again takes a tenth of the time.

    What tests leave, exported programs above all, is collected as often while it is young, and seldom as a whole.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 10, 100)


def pytest_configure(config):
    torch.set_num_threads(1)  # the suite runs in parallel processes


@pytest.fixture(scope="session")
def context():
    """Starts processes that tests kill. They are forked from one that has imported everything, but has no threads."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["data_sets"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
        first = found.Process(target=str)
        first.start()
        first.join(60)
    assert first.exitcode == 0
    return found


@pytest.fixture
def no_guessed_inputs(monkeypatch):
    """No inputs are guessed for models without examples, as if none fitted."""
    monkeypatch.setattr(capture, "guessed_inputs", lambda program: Guess())
