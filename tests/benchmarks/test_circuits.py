"""Circuits of a trained model against patching itself."""

from dataclasses import replace

import circuits
import pytest
import torch

import lrpfx
from lrpfx.composites import RelP
from lrpfx.concepts import faithfulness


@pytest.mark.slow
def test_an_induction_model():
    """Scores of a model that learned to repeat sequences, against patching itself."""
    model = circuits.induction_model()
    points = []
    for ids, others, target in circuits.induction_pairs(4):
        module = lrpfx.transform(model, RelP(), example_inputs=ids)
        circuit = lrpfx.circuits(module, ids, target, others=others)
        assert float(circuit.node("output")) < -5, "the other sequence has another next token"
        for row, writer in enumerate(circuit.writers[1:], 1):
            kept = circuit.exists.clone()
            kept[row] = False
            found = faithfulness(module, replace(circuit, kept=kept), ids, target, others=others)
            points.append([float(circuit.node(writer)), float(found.kept - found.complete)])
    assert torch.corrcoef(torch.tensor(points).T)[0, 1] > 0.8
