"""Deletion curves by hand."""

import pytest
import torch

from lrpfx.measures.deletion import Deletion, deletions


def test_deletion_by_hand():
    """The score is the sum of the weights of the tokens that are left; a right relevance falls first where it is largest."""
    weights = torch.tensor([1.0, 4.0, 2.0])
    asked = []

    def score(masks):
        asked.append(masks)
        return (~masks).double() @ weights

    found = deletions(score, {"right": weights, "wrong": -weights})
    torch.testing.assert_close(found["right"].most_relevant_first, torch.tensor([7.0, 3.0, 1.0, 0.0]))
    torch.testing.assert_close(found["right"].least_relevant_first, torch.tensor([7.0, 6.0, 4.0, 0.0]))
    torch.testing.assert_close(found["wrong"].most_relevant_first, found["right"].least_relevant_first)
    assert found["right"].area == pytest.approx((3.5 + 6 + 4) / 3 - (3.5 + 3 + 1) / 3)
    assert found["right"].area_most_relevant_first == pytest.approx(7.5 / 3)
    assert found["right"].area_least_relevant_first == pytest.approx(13.5 / 3)
    assert found["wrong"].area == -found["right"].area
    (masks,) = asked
    assert masks.dtype == torch.bool and len(masks) == 6  # none, all, and two orders of two between, each asked for once


def test_equal_relevance_is_deleted_in_both_orders():
    """Ties are broken by the place in the text, and the second order is the first one backwards."""
    asked = []
    deletions(lambda masks: asked.append(masks) or torch.zeros(len(masks)), {"flat": torch.zeros(3)})
    assert {tuple(mask) for mask in asked[0].int().tolist()} == {
        (0, 0, 0),
        (1, 0, 0),
        (1, 1, 0),
        (1, 1, 1),
        (0, 0, 1),
        (0, 1, 1),
    }


def test_deletion_in_steps():
    """Of five parts in two steps: none, half of them to rounding, and all."""
    weights = torch.tensor([1.0, 4.0, 2.0, 8.0, 16.0])
    found = deletions(lambda masks: (~masks).double() @ weights.double(), {"right": weights}, steps=2)["right"]
    torch.testing.assert_close(found.most_relevant_first, torch.tensor([31.0, 7.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(found.least_relevant_first, torch.tensor([31.0, 28.0, 0.0], dtype=torch.float64))


def test_areas_do_not_depend_on_the_number_of_tokens():
    """Straight lines from 1 to 0 have the area of a triangle."""
    for count in (2, 3, 8):
        line = torch.linspace(1.0, 0.0, count + 1)
        assert Deletion(line, line).area_most_relevant_first == pytest.approx(0.5)
        assert Deletion(line, line).area == 0.0
