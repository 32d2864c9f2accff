"""Shared set-up: float64 by default, and torchvision beside a CPU build of torch."""

import sys

import pytest
import torch
import torchvision_cpu  # noqa: F401  before anything imports torchvision


@pytest.fixture(autouse=True)
def _double_precision():
    """Every test starts from the same seed and computes in float64 unless it says otherwise."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def _own_compilations():
    """torch.compile gives up on code that it has compiled eight times: each file starts to count anew."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pytest_configure(config):
    torch.set_num_threads(1)  # the suite runs in parallel processes
