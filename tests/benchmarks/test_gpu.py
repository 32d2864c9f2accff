"""The benchmark for GPUs, tried on the CPU with small models."""

import json
import subprocess
import sys

import gpu
import pytest
from helpers import ROOT


def test_contenders_without_enough_memory_are_in_the_table():
    gradient = {"what": "net", "contender": gpu.PLAIN, "rate": 100.0, "peak": 50.0}
    ours = {"what": "net", "contender": "lrpfx", "rate": 40.0, "peak": 75.0}
    lost = {"what": "net", "contender": "Zennit", "rate": None, "peak": None}
    assert gpu.table([gradient, ours, lost]).splitlines()[2:] == [
        "| net | plain gradient | 100.0 | 1.00 | 50 | 1.00 |",
        "| net | lrpfx | 40.0 | 2.50 | 75 | 1.50 |",
        "| net | Zennit | out of memory |  |  |  |",
    ]


@pytest.mark.programs
def test_a_decoder_on_the_cpu():
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--only", "2048", "--device", "cpu", "--small", "--rounds", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = json.loads(printed.splitlines()[-1])
    assert [one["contender"] for one in records] == [gpu.PLAIN, "lrpfx", "LXT"]
    assert all(one["rate"] > 0 and one["peak"] is None for one in records)
