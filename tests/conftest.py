"""Shared set-up: float64 by default, and torchvision beside a CPU build of torch."""

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


def pytest_configure(config):
    torch.set_num_threads(1)  # the suite runs in parallel processes
