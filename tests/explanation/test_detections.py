"""A whole detector and photographs in, explanations of boxes out, through every door."""

import pickle

import numpy as np
import pytest
import torch
from command_line.commands import rows_of, run
from helpers import assert_close
from PIL import Image
from small_detectors import made, replace_kernels

import lrpfx
import lrpfx.datasets
from lrpfx.composites import EpsilonPlus
from lrpfx.concepts import collect
from lrpfx.request import Box

NAMES = ["background", "cat", "dog", "tree"]


@pytest.fixture(scope="module")
def detector():
    return made("RetinaNet").float()


@pytest.fixture(scope="module")
def photograph():
    noise = np.random.default_rng(0).integers(0, 256, (10, 15, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((75, 50), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def explainer(detector):
    return lrpfx.Explainer(detector, composite=EpsilonPlus(), categories=NAMES)


@pytest.fixture(scope="module")
def explanation(explainer, photograph):
    return explainer(photograph)


class Scores(torch.nn.Module):
    """A module of a user's own around a detector."""

    def __init__(self, detector):
        super().__init__()
        self.net = detector

    def forward(self, images):
        return self.net(list(images))[0]["scores"][None]


def test_a_detector_within_a_module_is_named(detector):
    with pytest.raises(lrpfx.InputError, match=r"Scores has a detector within, net:.*lrpfx\.Explainer\(model\.net\)"):
        lrpfx.explain(Scores(detector).eval(), torch.rand(1, 3, 50, 75), 0)


def test_boxes_are_those_that_the_detector_returns(detector, photograph, explanation, monkeypatch):
    replace_kernels(monkeypatch)
    values = torch.from_numpy(np.array(photograph)).permute(2, 0, 1).float() / 255
    with torch.no_grad():
        (expected,) = detector([values])
    boxes = explanation.boxes
    assert len(boxes) == len(expected["scores"]) > 10
    assert_close(torch.tensor([one.corners for one in boxes]), expected["boxes"].double(), 1e-4)
    assert_close(torch.tensor([one.confidence for one in boxes]), expected["scores"].double(), 1e-5)
    assert [one.name for one in boxes] == [NAMES[label] for label in expected["labels"]]
    assert [one.number for one in boxes] == list(range(len(boxes)))


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (None, Box(0)),
        (Box(3), Box(3)),
        ("dog", Box(0, class_=2)),
        (2, Box(0, class_=2)),
        (Box(1, "y1", class_="dog"), Box(1, "y1", class_=2)),
        (Box(2, "cat"), Box(2, 1)),
    ],
)
def test_relevance_is_that_of_attribute(explainer, photograph, given, resolved):
    found = explainer(photograph, given)
    expected = lrpfx.attribute(explainer.explain_model, found.input[None], resolved)
    assert_close(torch.tensor(found.input_relevance), expected.relevance[0], 1e-6)
    assert found.target.score == pytest.approx(float(resolved.relevance(expected.output).sum()), rel=1e-5)
    assert found.ledger.seed == pytest.approx(found.target.score, rel=1e-5) and found.ledger.unexplained < 1e-6
    assert found.relevance.shape == (50, 75)


def test_near_is_in_pixels_of_the_photograph(explainer, explanation, photograph):
    fourth = explanation.boxes[3]
    near = explainer(photograph, Box.near(fourth.corners, fourth.name))
    assert near.target == fourth.category
    assert_close(torch.tensor(near.relevance), torch.tensor(fourth.relevance), 1e-5)
    mirrored = lrpfx.Explainer(
        explainer.model.detector,
        composite=EpsilonPlus(),
        categories=NAMES,
        preprocess=lambda image: torch.from_numpy(np.array(image)[:, ::-1].copy()).permute(2, 0, 1).float() / 255,
    )
    turned = mirrored(photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    for one, other in zip(turned.boxes[:5], explanation.boxes[:5], strict=True):
        x1, y1, x2, y2 = other.corners
        assert one.corners == pytest.approx((75 - x2, y1, 75 - x1, y2), abs=0.01) and one.name == other.name


def test_each_box_has_pictures_and_questions(explanation):
    second = explanation.boxes[1]
    explained = second.explain("x1", "score")
    assert explained.answers[0].category.name == f"x1 of {second.name}"
    assert explained.answers[0].category.score == pytest.approx(explanation.output[1, -7], rel=1e-6)
    assert_close(torch.tensor(explained.answers[1].input_relevance), torch.tensor(second.explain().input_relevance), 1e-5)
    assert second.overlay().size == second.heatmap().size == explanation.photograph.size
    assert second.overlay() == second.explain().overlay() != explanation.overlay()
    assert second.relevance.shape == (50, 75) and repr(second).startswith(f"<box 1: {second.name} (")


def test_the_outline_is_the_box(explainer, explanation, photograph):
    largest = max(explanation.boxes, key=lambda one: (one.corners[2] - one.corners[0]) * (one.corners[3] - one.corners[1]))
    drawn = np.asarray(explainer(photograph, Box(largest.number)).overlay(scale=1e9)).astype(int)
    rows, columns = np.nonzero((drawn[..., 0] - drawn[..., 2]) > 150)
    found = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert np.abs(np.array(found) - largest.corners).max() < 3


def test_an_explanation_is_plain_data_with_pictures(explanation):
    copy = pickle.loads(pickle.dumps(explanation))
    assert copy == explanation and repr(copy.boxes) == repr(explanation.boxes)
    with pytest.raises(lrpfx.InputError, match="copy without the model"):
        copy.boxes[1].overlay()
    assert explanation.target == explanation.boxes[0].category == explanation.top(1)[0]
    assert explanation.sheet() and explanation.compare(3) and explanation.compare([Box(4), "dog"]) and explanation._repr_html_()
    assert explanation.photograph_with_boxes().size == explanation.photograph.size
    frame = explanation.to_pandas()
    assert frame["explained"].tolist() == [explanation.boxes[0].name] == frame["predicted"].tolist()


def test_several_photographs_of_several_sizes(explainer, explanation, photograph):
    found = explainer([photograph, photograph.resize((60, 50)), photograph], targets=[Box(0), Box(1, "x2")])
    assert [len(one.answers) for one in found] == [2, 2, 2]
    for one in (found[0], found[2]):
        assert_close(torch.tensor(one.input_relevance), torch.tensor(explanation.input_relevance), 1e-5)
    assert found.sheet() and found[1].relevance.shape == (50, 60)


def test_regions_through_the_front_door(photograph, monkeypatch):
    """A head of regions gets the proposals of each photograph, and its relevance is that of the heads."""
    replace_kernels(monkeypatch)
    detector = made("FasterRCNN", seed=2).float()
    explainer = lrpfx.Explainer(detector, composite=EpsilonPlus(), categories=NAMES)
    photographs = [photograph, photograph.transpose(Image.Transpose.FLIP_TOP_BOTTOM), photograph.resize((60, 50))]
    for one, given in zip(explainer(photographs, Box(1)), photographs, strict=True):
        values = torch.from_numpy(np.array(given)).permute(2, 0, 1).float() / 255
        with torch.no_grad():
            (expected,) = detector([values])
        confidences = torch.tensor([box.confidence for box in one.boxes])
        assert_close(confidences, expected["scores"].double(), 1e-4)
        distances = (torch.tensor([box.corners for box in one.boxes])[:, None] - expected["boxes"]).abs().amax(-1)
        assert (distances < 1e-3).any(1).all()  # those of nearly the same confidence have any order in float32
        arguments = (one.input[None], *explainer.model.further(one.input[None]))
        found = lrpfx.attribute(explainer.explain_model, arguments, Box(1))
        assert_close(torch.tensor(one.input_relevance), found.relevance[0][0], 1e-5)
        assert one.ledger.unexplained < 1e-6 and one.boxes[2].overlay()


def test_no_region_is_no_box(photograph, monkeypatch):
    """A detector whose first stage proposes nothing finds nothing, and says so as others do."""
    replace_kernels(monkeypatch)
    detector = made("MaskRCNN", seed=2).float()
    detector.rpn.score_thresh = 1.0
    explainer = lrpfx.Explainer(detector, composite=EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="finds no box 0: it finds none"):
        explainer(photograph)


@pytest.mark.filterwarnings("ignore:the map is empty")  # of an edge that is cut off, or that the network does not move
@pytest.mark.parametrize("name", ["RetinaNet", "FCOS", "SSD", "FasterRCNN"])
def test_compiled_with_a_small_example_as_with_the_photograph(name, photograph, monkeypatch):
    """The maps of a large photograph are those of heads that are compiled with it; other sizes and batches run, too."""
    replace_kernels(monkeypatch)
    detector = made(name, seed=2)
    detector.transform.min_size, detector.transform.max_size = (144,), 320
    detector.transform.fixed_size = (272, 192) if name == "SSD" else None
    if name == "FasterRCNN":
        detector.rpn._pre_nms_top_n = {"testing": 80}
    explainer = lrpfx.Explainer(detector.double(), composite=EpsilonPlus(), categories=NAMES)
    heads = explainer.model
    targets = [Box(number, what) for number in range(6) for what in ("score", "x2")]
    for given in ([photograph], [photograph.resize((50, 70))] * 2):
        one = explainer(given, targets=targets)[-1]
        images = one.input[None].double()
        arguments = (images, *heads.further(images))
        whole = lrpfx.transform(heads, EpsilonPlus(), arguments, constants=heads.further_names)
        expected = lrpfx.attribute(whole, arguments, targets=targets).relevance[0]
        assert expected[::2].any() and min(images.shape[2:]) > 128
        assert_close(torch.tensor(np.stack([answer.input_relevance for answer in one.answers]))[:, None], expected, 1e-10)
    shapes = {node.meta["lrpfx"].shape for node in explainer.explain_model.graph.nodes if node.op == "placeholder"}
    assert (1, 3, 128, 160) in shapes


def test_models_of_one_size_are_compiled_with_the_photograph(photograph):
    class FixedHeads(lrpfx.detection.DetectorHeads):
        def raw(self, images):
            found = self.detector(images).flatten(2).transpose(1, 2)
            places = torch.arange(40 * 50).reshape(-1, 1)  # of 160 × 200 pixels
            return lrpfx.detection.RawHeads(found[..., :2], places + found[..., 2:], torch.sigmoid(found[..., :2]))

    torch.manual_seed(0)
    explainer = lrpfx.Explainer(FixedHeads(torch.nn.Conv2d(3, 6, 4, 4).double().eval(), 0.1), composite=EpsilonPlus())
    found = explainer(torch.rand(1, 3, 160, 200).double())[0]
    expected = lrpfx.attribute(explainer.explain_model, found.input[None], Box(0)).relevance[0]
    assert_close(torch.tensor(found.input_relevance), expected, 1e-10)


def test_a_threshold_of_ones_own(detector, photograph, explanation):
    heads = lrpfx.detection.heads(detector, threshold=0.8)
    few = lrpfx.Explainer(heads, composite=EpsilonPlus())(photograph).boxes
    assert len(few) == sum(one.confidence > 0.8 for one in explanation.boxes) and few[0].name in "0123"
    none = lrpfx.Explainer(lrpfx.detection.heads(detector, threshold=0.999), composite=EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="finds no box 0: it finds none"):
        none(photograph)


def test_photographs_without_the_box(detector, explanation, photograph, tmp_path):
    """In a folder they are left out, in a list they are named, and the others are explained."""
    heads = lrpfx.detection.heads(detector, threshold=explanation.boxes[0].confidence - 1e-4)
    explainer = lrpfx.Explainer(heads, composite=EpsilonPlus(), categories=NAMES)
    dark = Image.new("RGB", photograph.size, (90, 90, 90))
    for name, one in {"a.png": photograph, "b.png": dark, "c.png": photograph}.items():
        one.save(tmp_path / name)
    with pytest.warns(lrpfx.LrpfxWarning, match="1 of 3 files were left out; `problems` says why: b.png"):
        found = explainer(tmp_path)
    assert [one.name for one in found] == ["a.png", "c.png"] and "finds no box 0: it finds none" in found.problems["b.png"]
    assert_close(torch.tensor(found[1].input_relevance), torch.tensor(explanation.input_relevance), 1e-5)
    with pytest.raises(lrpfx.InputError, match="image 2: the detector finds no box 0"):
        explainer([photograph, dark])
    with pytest.raises(lrpfx.InputError, match=r"^a\.png: the detector finds no box 999"):
        explainer(tmp_path, Box(999))


@pytest.mark.parametrize("threshold", [1.0, -0.1, float("nan"), "much", True])
def test_thresholds_are_checked(detector, threshold):
    with pytest.raises(lrpfx.InputError, match="confidence from 0 to below 1"):
        lrpfx.detection.heads(detector, threshold=threshold)


def test_heads_get_another_threshold(detector):
    heads = lrpfx.detection.heads(detector, threshold=0.3)
    other = lrpfx.detection.heads(heads, threshold=0.6)
    assert (heads.threshold, other.threshold, lrpfx.detection.heads(heads).threshold) == (0.3, 0.6, 0.3)
    assert other.detector is detector


def test_regions_in_training_mode_are_refused():
    with pytest.raises(lrpfx.CaptureError, match="training mode") as caught:
        lrpfx.Explainer(made("FasterRCNN").train())
    assert caught.value.topic == "training-mode"


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (lrpfx.Region("cat"), lrpfx.InputTypeError, r"lrpfx.Box.*not cat in its region"),
        ({0: 1.0, 1: -1.0}, lrpfx.InputTypeError, "lrpfx.Box"),
        (lambda output: output, lrpfx.InputTypeError, "lrpfx.Box"),
        ("hen", lrpfx.InputError, "hen"),
        (Box(999), lrpfx.InputError, "finds no box 999"),
        (Box.near((0, 0, 1, 1)), lrpfx.InputError, "in pixels of the model's input: the nearest"),
    ],
)
def test_other_targets_are_refused(explainer, photograph, target, kind, message):
    with pytest.raises(kind, match=message):
        explainer(photograph, target)


def test_an_output_cannot_be_chosen(detector):
    with pytest.raises(lrpfx.InputError, match="output= is for other models"):
        lrpfx.Explainer(detector, output=0)


def test_models_that_are_no_detectors(photograph):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
    assert not lrpfx.detection.is_detector(model)
    with pytest.raises(lrpfx.InputError, match="no detector of a known family") as caught:
        lrpfx.detection.heads(model)
    assert caught.value.topic == "detectors"
    with pytest.raises(lrpfx.InputError, match="a box is a target for"):
        lrpfx.Explainer(model)(torch.rand(1, 3, 8, 8), Box(0))


def test_a_target_of_another_kind_names_boxes(explainer, explanation):
    with pytest.raises(lrpfx.InputError, match=r"explained by lrpfx\.Box: target=lrpfx\.Box\(0, class_=2\)"):
        lrpfx.attribute(explainer.explain_model, torch.rand(1, 3, 64, 96).float(), 2)


# --- the other doors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(photograph, tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(3):
        photograph.rotate(90 * number, resample=Image.Resampling.BILINEAR).save(tmp_path / "images" / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.parametrize(("target", "box"), [("predicted", Box(0)), ("dog", Box(0, class_=2)), (Box(1, "x1"), Box(1, "x1"))])
def test_data_sets(explainer, folder, tmp_path, target, box):
    view = lrpfx.datasets.attribute(explainer, folder, tmp_path / "store", target=target)
    for number, one in enumerate(sorted(folder.iterdir())):
        expected = explainer(one, box)
        assert_close(torch.tensor(view["relevance"][number]).double(), torch.tensor(expected.input_relevance).double(), 1e-2)
        assert view["seed"][number] == pytest.approx(expected.target.score, rel=1e-4)


def test_corners_are_of_one_photograph(explainer, folder, tmp_path):
    with pytest.raises(lrpfx.InputError, match="pixels of one photograph") as caught:
        lrpfx.datasets.attribute(explainer, folder, tmp_path / "store", targets=[Box(0), Box.near((10, 10, 60, 60))])
    assert caught.value.topic == "detectors"


def test_data_sets_of_heads_on_proposals(folder, tmp_path, monkeypatch):
    """Each photograph has proposals of its own, in a batch as alone; those that are found elsewhere have no relevance."""
    replace_kernels(monkeypatch)
    explainer = lrpfx.Explainer(made("FasterRCNN", seed=2).float(), composite=EpsilonPlus())
    view = lrpfx.datasets.attribute(explainer, folder, tmp_path / "store", target=Box(1), batch_size=3)
    assert not view.errors and view.names[0] == "relevance"
    inputs = []
    for number, one in enumerate(sorted(folder.iterdir())):
        expected = explainer(one, Box(1))
        inputs.append(expected.input)
        assert_close(torch.tensor(view["relevance"][number]).double(), torch.tensor(expected.input_relevance).double(), 1e-2)
        assert view["seed"][number] == pytest.approx(expected.target.score, rel=1e-4)
    layer, heads = "detector.backbone.first.0", explainer.model
    samples = [{"images": one, "proposals": heads.further(one[None])[0][0]} for one in inputs]
    collection = collect(explainer.explain_model, samples, [layer], target=Box(1), top=3)
    assert not collection.errors and len(collection.top(layer, 0)) == 3
    of_module = lrpfx.datasets.attribute(explainer.explain_model, samples, tmp_path / "of_module", target=Box(1))
    assert [name for name in of_module.names if name.startswith("relevance")] == ["relevance.images"]
    assert_close(torch.tensor(of_module["relevance.images"][:]), torch.tensor(view["relevance"][:]), 1e-2)


def test_collections_and_reports(explainer, explanation, tmp_path):
    module, x = explainer.explain_model, explanation.input[None]
    layer = "detector.backbone.first.0"
    collection = collect(module, [explanation.input], [layer], target=Box(0), top=1, normalize=[])
    found = lrpfx.attribute(module, x, Box(0), record=[layer]).layers[layer].flatten(2).sum(2)
    best = collection.top(layer, 2, by="relevance", reduction="sum")[0]
    assert best.score == pytest.approx(float(found[0, 2]), rel=1e-4)
    assert explanation.target.name in lrpfx.report(explanation, tmp_path / "explained.html").read_text()
    assert "x1 of box 2" in lrpfx.report((module, x, Box(2, "x1")), tmp_path / "attributed.html").read_text()


@pytest.mark.programs
@pytest.mark.parametrize("name", ["x.pt2", "x.onnx"])
@pytest.mark.parametrize("target", [Box(2), Box(0, "x2", class_=2), Box.near((10, 10, 60, 60), iou=0.2)], ids=str)
def test_programs(explainer, photograph, name, target, tmp_path):
    explainer(photograph)
    module, x = explainer.explain_model, torch.rand(2, 3, 64, 96).float()
    expected = lrpfx.attribute(module, x, target)
    assert expected.relevance.any()
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(module, x, target=target), tmp_path / name))
    assert_close(runner(x)["relevance"], expected.relevance, 1e-4)


@pytest.mark.programs
def test_the_command_line(photograph, folder, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "detector_of_test.py").write_text("from small_detectors import made\nmake = lambda: made('SSD')\n")
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    arguments = ("explain", "detector_of_test:make", "images", "--raw", "--output", "out", "--categories", "names.txt")
    assert run(*arguments)[0] == 0
    explanation = lrpfx.Explainer(made("SSD"), categories=NAMES)(folder / "0.png")
    row = rows_of("out", "explanations.csv")["0.png"]
    best = explanation.boxes[0]
    assert row["explained"] == f"{best.name} {best.confidence:.1%}" and row["predicted"].startswith(row["explained"])
    other = next(one for one in explanation.boxes if one.name != best.name)
    assert run(*arguments[:-4], "--output", "two", *arguments[-2:], "--target", best.name, "--target", other.name)[0] in (0, 2)
    row = rows_of("two", "explanations.csv")["0.png"]
    assert row["explained"] == f"{best.name} {best.confidence:.1%}; {other.name} {other.confidence:.1%}"
    corners = ",".join(f"{edge:.3f}" for edge in other.corners)
    assert run(*arguments[:-4], "--output", "three", *arguments[-2:], "--box", "1:x1", "--box", corners)[0] in (0, 2)
    first, second = rows_of("three", "explanations.csv")["0.png"]["relevance"].split("; ")
    expected = lrpfx.Explainer(made("SSD"), categories=NAMES)(folder / "0.png", targets=[Box(1, "x1"), Box.near(other.corners)])
    assert float(first) == pytest.approx(expected.answers[0].balance.inputs, rel=1e-3)
    assert float(second) == pytest.approx(expected.answers[1].balance.inputs, rel=1e-3)


def test_boxes_of_small_photographs_are_drawn_in_a_size_in_which_names_fit(explanation):
    (_, boxes), (_, heatmap), _ = explanation.row()
    assert boxes.width >= 380 and boxes.width / boxes.height == pytest.approx(heatmap.width / heatmap.height, rel=0.02)
