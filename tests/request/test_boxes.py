"""Boxes as targets of candidates: which one is chosen, what of it, and what is refused."""

import pickle
import re

import numpy as np
import pytest
import torch

import lrpfx
from lrpfx.request import Box, as_target
from lrpfx.request.candidates import Candidates, overlap_of

ROWS = [  # x1, y1, x2, y2, confidence, class
    (0, 0, 10, 10, 0.9, 1),
    (0, 0, 10, 8, 0.8, 1),  # a double of the first
    (0, 0, 10, 8, 0.7, 2),  # of another class
    (5, 0, 15, 10, 0.6, 1),  # overlaps the first by a third
    (50, 50, 60, 70, 0.5, 0),
    (50, 50, 60, 60, 0.0, 0),  # the detector drops it
]


def output_of(rows=ROWS, overlap=0.5):
    rows = torch.tensor(rows)
    logits = torch.arange(len(rows) * 3.0).view(-1, 3) + 100.0
    return torch.cat([logits, rows, torch.full((len(rows), 1), overlap)], 1)[None]


def test_boxes_are_found_by_confidence_without_doubles():
    found = [Box(k).places(Candidates(output_of()))[0].item() for k in range(4)]
    assert found == [0, 2, 3, 4]
    assert [Box(k).places(Candidates(output_of(overlap=0.3)))[0].item() for k in range(3)] == [0, 2, 4]
    assert [Box(k).places(Candidates(output_of(overlap=1.0)))[0].item() for k in range(5)] == [0, 1, 2, 3, 4]
    assert Box(1, class_=1).places(Candidates(output_of()))[0].item() == 3


@pytest.mark.parametrize(
    ("target", "place"),
    [
        (Box(1), (2, 2)),
        (Box(0), (0, 1)),
        (Box(2, "x1"), (3, 3)),
        (Box(2, "y2"), (3, 6)),
        (Box(0, 2), (0, 2)),
        (Box(0, class_=2), (2, 2)),
        (Box.near((51, 51, 60, 70)), (4, 0)),
        (Box.near((0, 0, 10, 9), 2), (2, 2)),
        (Box.near(np.array([4.0, 0, 15, 10]), what="x2"), (3, 5)),
    ],
)
def test_relevance_is_the_entry(target, place):
    output = output_of()
    expected = torch.zeros_like(output)
    expected[0, place[0], place[1]] = output[0, place[0], place[1]]
    assert target.seed(output).equal(expected)
    assert target.seed(torch.cat([output, output.flip(1)]))[1].equal(expected[0].flip(0))  # candidates in another order


def test_overlaps():
    boxes = torch.tensor([[0.0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 30], [3, 3, 3, 3]])
    assert overlap_of(boxes, boxes[:1]).tolist() == pytest.approx([1.0, 1 / 3, 0.0, 0.0])
    assert overlap_of(boxes[3], boxes[3]).item() == 0.0


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (Box(4), lrpfx.InputError, "no box 4: it finds 4, and"),
        (Box(3, class_=1), lrpfx.InputError, "box 3 of class 1: it finds 2 of this class"),
        (Box(0, class_=3), lrpfx.InputError, "3 is out of range: the output has 3 classes"),
        (Box(0, 7), lrpfx.InputError, "7 is out of range"),
        (Box(0, class_="cat"), lrpfx.InputTypeError, "'cat'"),
        (Box(0, "x3"), lrpfx.InputTypeError, "'x3'"),
        (Box.near((0, 0, 10, 3)), lrpfx.InputError, r"the nearest one, of class 1 at \(0, 0, 10, 8\), overlaps it by 0.38"),
        (Box.near((90, 90, 99, 99)), lrpfx.InputError, "none overlaps"),
        (Box.near((50, 50, 60, 60), iou=0.9), lrpfx.InputError, "by 0.50"),  # the same box has no confidence
    ],
)
def test_a_box_that_there_is_not_is_refused(target, kind, message):
    with pytest.raises(kind, match=message) as caught:
        target.seed(output_of())
    assert caught.value.topic in ("targets", "detectors")
    with pytest.raises(lrpfx.InputError, match="in sample 1"):
        Box(4).seed(torch.cat([output_of([*ROWS, (80, 80, 90, 90, 0.1, 0)]), output_of([*ROWS, ROWS[-1]])]))


@pytest.mark.parametrize("output", [torch.rand(1, 5), torch.randn(1, 6, 12), torch.rand(1, 4, 8, 8), torch.rand(1, 3, 7)])
def test_other_outputs_are_refused(output):
    with pytest.raises(lrpfx.InputError, match="detection") as caught:
        Box(0).seed(output)
    assert caught.value.topic == "detectors"


@pytest.mark.parametrize("target", [lrpfx.Region(1), lrpfx.Region(4), lrpfx.Region(1, mask=np.ones(len(ROWS)))])
def test_candidates_are_no_places_of_a_region(target):
    with pytest.raises(lrpfx.InputTypeError, match=r"lrpfx\.Box, not class") as caught:
        target.seed(output_of())
    assert caught.value.topic == "detectors"
    assert not Candidates(torch.zeros(1, len(ROWS), 11)).are_there


@pytest.mark.parametrize(
    ("target", "box"),
    [(1, "Box(0, class_=1)"), (None, "Box(0)"), ({1: 1.0, 0: -1.0}, "Box(0, class_=1)"), ([2], "Box(0, class_=2)")],
)
def test_the_error_for_a_class_of_candidates_is_the_line_to_write(target, box):
    with pytest.raises(lrpfx.InputTypeError, match=re.escape(f"explained by lrpfx.Box: target=lrpfx.{box}, not")) as caught:
        as_target(target).seed(output_of())
    assert len(str(caught.value)) < 128 and caught.value.topic == "detectors"
    eval(box, {"Box": Box}).seed(output_of())


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"k": -1}, lrpfx.InputError),
        ({"k": 1.0}, lrpfx.InputTypeError),
        ({"k": True}, lrpfx.InputTypeError),
        ({"what": None}, lrpfx.InputTypeError),
        ({"class_": 0.5}, lrpfx.InputTypeError),
        ({"corners": (1, 2, 3)}, lrpfx.InputError),
        ({"corners": (3, 2, 1, 4)}, lrpfx.InputError),
        ({"corners": (0, 0, float("nan"), 1)}, lrpfx.InputError),
        ({"corners": "box"}, lrpfx.InputTypeError),
        ({"corners": (0, 0, 1, 1), "iou": 0}, lrpfx.InputError),
        ({"corners": (0, 0, 1, 1), "iou": "much"}, lrpfx.InputError),
    ],
)
def test_arguments_are_checked(arguments, kind):
    with pytest.raises(kind):
        Box(**arguments)


def test_boxes_are_values():
    assert Box(1) == Box(np.int64(1)) != Box(2) and as_target(Box(1)) == pickle.loads(pickle.dumps(Box(1)))
    assert Box.near([0, 0, 1, 1]) == Box.near(torch.tensor([0.0, 0, 1, 1])) != Box.near((0, 0, 1, 2))
    names = ["cat", "dog", "hen"]
    resolved = Box(0, "dog", class_="cat").resolved(names.index)
    assert resolved == Box(0, 1, class_=0) and Box(0, "x1").resolved(names.index) == Box(0, "x1")
    assert resolved.title(names.__getitem__) == "dog of box 0 of cat"
    assert str(Box.near((0, 0, 1, 2.5), 1, "y1")) == "y1 of box of class 1 near (0, 0, 1, 2.5)"
