"""What the numbers of an output are."""

import pytest
import torch

from lrpfx.request.outputs import are_probabilities


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[0.2, 0.8], [1.0, 0.0]], True),
        ([[0.2, 0.8005]], True),  # rounding
        ([[0.2, 0.8], [0.5, 0.4]], False),
        ([[1.5, -0.5]], False),
        ([[3.0, 1.0]], False),
    ],
)
def test_probabilities(scores, expected):
    assert are_probabilities(torch.tensor(scores)) is expected
    assert are_probabilities(torch.tensor(scores, dtype=torch.float32)) is expected
