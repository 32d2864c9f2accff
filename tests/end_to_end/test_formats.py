"""What docs/formats.md says, measured again: a few operators at once, the others and classifiers as slow tests."""

import json

import pytest
import torch
from tools import format_sweep, support_matrix

from lrpfx.core import Hook

COMPOSITES = sorted(format_sweep.COMPOSITES)


@pytest.fixture(autouse=True)
def _single():
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_a_classifier_in_processes_that_do_not_know_it():
    row = format_sweep.examine("alexnet", "EpsilonPlusFlat", ("pt2", "ONNX"), record=["features.3", "features.7"])
    assert row["pt2"] <= 1e-5 and row["ONNX"] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("name", format_sweep.MODELS)
def test_classifiers(name, composite):
    row = format_sweep.examine(name, composite)
    assert max(row[kind] for kind in format_sweep.FORMATS) <= 1e-5


FEW = ("adaptive_max_pool2d, uneven", "take_along_dim", "prelu")
MORE = (
    "interpolate, bicubic, antialias",
    "pad, circular",
    "avg_pool2d",
    "interpolate",
    "glu",
    "diagonal",
    "pad, replicate",
    "logsigmoid",
)


@pytest.mark.parametrize("some", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.thorough
def test_a_few_operators(some):
    cases = [case for case in support_matrix.CASES if case.operator in some]
    for row in support_matrix.measure(cases, ("pt2", "ONNX")):
        assert max(row["pt2"], row["ONNX"]) <= 1e-5, row


@pytest.mark.slow
def test_every_case_has_a_rule_that_fits():
    support_matrix.explained(support_matrix.CASES)


class Bounded(Hook):
    def propagate(self, call, relevance):
        return (relevance.clamp(max=relevance.flatten(1).median(1).values.view(-1, *[1] * (relevance.ndim - 1))),)


def test_a_reason_takes_the_place_of_a_difference():
    case = support_matrix.Case("relu", "b", torch.nn.ReLU, Bounded())
    (row,) = support_matrix.measure([case], ("ONNX",))
    assert "aten.median.dim" in row["ONNX"]


def test_the_page_has_every_case():
    page = format_sweep.DOCUMENT.read_text()
    for case in support_matrix.CASES:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {case.operator} |") and _rule(case) in line][:1]
        assert line.count("|") == 6
    for name in (*format_sweep.MODELS, *format_sweep.FURTHER):
        assert all(f"| {name} | {composite} |" in page for composite in COMPOSITES)


def _rule(case):
    return "" if case.rule is None else str(case.rule).partition("(")[0]


def test_the_page_is_written_from_measurements():
    figures = {"pt2": 0.0, "AOTInductor": 2e-6, "ONNX": 3e-6, "rounding": 1e-6, "determined": 0.5}
    row = {"model": "net", "composite": "EpsilonPlus", "nodes": 12, **figures}
    cases = [
        {"operator": "conv2d", "rule": "ZPlus(stabilizer=1e-06)", "pt2": 1e-7, "AOTInductor": 2e-3, "ONNX": "no such operator"},
        {"operator": "conv2d", "rule": "Flat()", "pt2": 1e-7, "AOTInductor": 2e-3, "ONNX": "no such operator"},
    ]
    page = format_sweep.document(json.loads(json.dumps([row])), cases)
    assert "| net | EpsilonPlus | 12 | 0.0e+00 | 2.0e-06 | 3.0e-06 | 1.0e-06 | 50% |" in page
    assert "| conv2d | ZPlus, Flat | ✓ | 2e-03 | no (1) |" in page and "1. no such operator" in page
