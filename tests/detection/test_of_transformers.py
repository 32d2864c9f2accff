"""Detectors of queries: what the heads say is what image processors return, and relevance is that of a seed by hand."""

import pytest
import torch
from helpers import assert_close
from PIL import Image
from small_detectors import TRANSFORMERS, of_transformers, transformers

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.request import Box
from lrpfx.request.candidates import Candidates

FAMILIES = [pytest.param(name, marks=[pytest.mark.slow] if name == "RTDetr" else []) for name in TRANSFORMERS]
PROCESSORS = {"RTDetr": "RTDetrImageProcessor", "ConditionalDetr": "ConditionalDetrImageProcessor"}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_candidates_are_what_the_image_processor_returns(name):
    detector, x = of_transformers(name), torch.rand(2, 3, 64, 96)
    processor = getattr(transformers, PROCESSORS.get(name, "DetrImageProcessor"))()
    heads = lrpfx.detection.heads(detector, threshold=0.2)
    with torch.no_grad():
        found = processor.post_process_object_detection(detector(x), threshold=0.2, target_sizes=torch.tensor([[64, 96]] * 2))
        candidates = Candidates(heads(x))
    candidates.check()
    for number, expected in enumerate(found):
        order = expected["scores"].argsort(descending=True)
        count = len(order)
        number_found = int((candidates.confidences[number] > 0).sum())
        assert count > 1 and (number_found == count or (name == "RTDetr" and count == 12))  # no more than there are queries
        assert_close(candidates.confidences[number, :count], expected["scores"][order], 1e-12)
        distances = (candidates.corners[number, :count, None] - expected["boxes"]).abs().amax(-1)
        assert distances.amin(1).max() < 1e-5  # equal confidences have any order
        assert candidates.labels[number, :count].sort().values.equal(expected["labels"].sort().values)
    assert lrpfx.detection.heads(detector).threshold == 0.5


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*functions of their own")  # the inverse of a sigmoid is a logarithm
def test_relevance_is_that_of_the_detector_itself_with_a_seed_by_hand(name):
    detector, x = of_transformers(name), torch.rand(1, 3, 64, 64)
    heads = lrpfx.detection.heads(detector, threshold=0.2)
    passing = [(lrpfx.types.Detach, lrpfx.rules.Pass())] if name == "RTDetr" else []
    explain_model = lrpfx.transform(heads, AttnLRP(layer_map=passing), x)
    itself = lrpfx.transform(detector, AttnLRP(layer_map=passing), {"pixel_values": x})
    logits = detector(x).logits.detach()
    candidates = Candidates(explain_model(x).detach())
    for number in (0, 1):
        label, confidence = candidates.labels[0, number], candidates.confidences[0, number]
        shares = logits.sigmoid() if logits.shape[2] == 4 else logits.softmax(-1)
        query = (shares[0, :, label] - confidence).abs().argmin()
        seed = torch.zeros_like(logits)
        seed[0, query, label] = logits[0, query, label]
        expected = lrpfx.attribute(itself, x, seed).relevance
        assert_close(lrpfx.attribute(explain_model, x, Box(number)).relevance, expected, 1e-9)
    accounts = lrpfx.ledger(explain_model, x, Box(1, "x2"))
    assert accounts.seed == pytest.approx(float(candidates.corners[0, 1, 2])) and accounts.unexplained < 1e-9


@pytest.mark.filterwarnings("ignore:.*functions of their own")
@pytest.mark.parametrize("name", [pytest.param("RTDetr", marks=pytest.mark.slow), "Yolos"])
def test_through_the_front_door(name):
    detector = of_transformers(name).float()
    detector.config.id2label = {0: "cat", 1: "dog", 2: "hen", 3: "fox"}
    processor = transformers.DetrImageProcessor(size={"height": 64, "width": 64}, do_pad=False)
    photograph = Image.effect_noise((96, 64), 60).convert("RGB")
    explainer = lrpfx.Explainer(lrpfx.detection.heads(detector, threshold=0.2), preprocess=processor)
    explanation = explainer(photograph)
    assert explanation.boxes and {one.name for one in explanation.boxes} <= {"cat", "dog", "hen", "fox"}
    assert explanation.relevance.shape == (64, 96) and explanation.relevance.any()
    own = getattr(transformers, PROCESSORS.get(name, "DetrImageProcessor"))()  # by softmax or by sigmoid
    expected = own.post_process_object_detection(
        detector(explanation.input[None]), threshold=0.2, target_sizes=torch.tensor([[64, 96]])
    )
    assert explanation.boxes[0].confidence == pytest.approx(float(expected[0]["scores"].max()), rel=1e-4)
    distances = (torch.tensor(explanation.boxes[0].corners) - expected[0]["boxes"]).abs().amax(1)
    assert distances.min() < 0.01  # several may have the same confidence
    assert explanation.sheet()
    if name == "Yolos":
        layer, images = "detector.vit.embeddings.patch_embeddings.projection", explanation.input
        collection = lrpfx.concepts.collect(explainer.explain_model, [images], [layer], target=Box(0), top=1, normalize=[])
        found = lrpfx.attribute(explainer.explain_model, images[None], Box(0), record=[layer]).layers[layer].flatten(2).sum(2)
        best = collection.top(layer, 2, by="relevance", reduction="sum")[0]
        assert best.score == pytest.approx(float(found[0, 2]), rel=1e-4)
