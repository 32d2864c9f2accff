"""Settings as plain data: what differs has another description, in each process the same."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT
from torch import nn

from lrpfx.support.identity.descriptions import described

pytestmark = pytest.mark.programs


class Weight:
    def __init__(self, value):
        self.value = value
        self.around = self  # objects may refer to themselves


class Scorer:
    def __init__(self, weight):
        self.weight = Weight(weight)

    def of(self, output):
        return output * self.weight.value

    __call__ = of


def closure(value):
    return lambda output: output * value


def global_value(value):
    namespace = {"factor": value}
    exec("def target(output): return output * factor", namespace)
    return namespace["target"]


def deep(value):
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, value)
    for _ in range(4):
        module = nn.Sequential(nn.ReLU(), module)
    return module


def scaled(value, output):
    return output * value


def traced(value, slope=0.1):
    """A graph with a buffer that is not saved, and a child with a setting."""
    found = torch.fx.symbolic_trace(nn.Sequential(nn.LeakyReLU(slope)))
    found.register_buffer("factor", torch.full((1,), value), persistent=False)
    return found


MAKES = {
    "number": lambda value: value,
    "tensor": lambda value: torch.full((3,), value),
    "array": lambda value: np.full(3, value),
    "nested": lambda value: {"a": [1, (2, {"b": value})]},
    "partial": lambda value: functools.partial(scaled, value),
    "closure": closure,
    "closure over an object": lambda value: closure(Scorer(value)),
    "global": global_value,
    "callable object": Scorer,
    "bound method": lambda value: Scorer(value).of,
    "method of a class": lambda value: type("Own", (), {"__call__": closure(value)})(),
    "module": deep,
    "graph": lambda value: torch.fx.symbolic_trace(type("Times", (nn.Module,), {"forward": lambda self, x: x * value})()),
    "buffer of a graph": traced,
    "setting of a child of a graph": lambda value: traced(1.0, value),
    "set": lambda value: frozenset({value, "a", "b"}),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_values_are_told_apart(make):
    assert described(make(2.0)) == described(make(2.0)) != described(make(3.0))
    json.dumps(described(make(2.0)))


def test_annotations_do_not_count():
    """Python 3.14 makes them when they are first read, by a function that the class has beside its methods."""

    def scorer(annotation):
        class Scorer:
            weight: annotation = 2.0

            def __call__(self, output):
                return output * self.weight

        return Scorer()

    first, second = scorer(float), scorer(torch.Tensor)
    before = described(first)
    assert type(first).__annotations__ == {"weight": float}
    assert described(first) == before == described(second)


def test_each_process_gives_the_same():
    script = (
        "import torchvision_cpu; from support.identity.test_descriptions import MAKES, described; import json; "
        "print(json.dumps([described(make(2.0)) for make in MAKES.values()]))"
    )
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert found[0].returncode == 0, found[0].stderr
    assert found[0].stdout == found[1].stdout


def test_what_is_shared_is_described_once():
    """Functions that read each other, each two of the next, and objects that are arranged so."""
    namespace = {}
    for number in range(40):
        one, other = (f"function_{max(0, number - step)}" for step in (1, 2))
        exec(f"def function_{number}(x): return {one}(x) + {other}(x)", namespace)
    described(namespace["function_39"])
    shared = Weight(2.0)
    for _ in range(40):
        shared = Scorer((shared, shared))
    described(shared)


def test_code_of_packages_counts_by_their_release(monkeypatch):
    import matplotlib
    from matplotlib.pyplot import imshow  # which reads a great part of its package

    def target(output):
        return imshow(output)

    before = described(target)
    assert described(target) == before
    monkeypatch.setattr(matplotlib, "__version__", "0")
    assert described(target) != before
