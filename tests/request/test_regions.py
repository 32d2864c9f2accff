"""Regions as targets, in all forms: the relevance is that of a seed by hand, through every door."""

import pickle
import sys

import numpy as np
import pytest
import torch
from command_line.commands import rows_of, run
from helpers import assert_close
from PIL import Image
from torch import nn

import lrpfx
import lrpfx.datasets
from lrpfx.composites import EpsilonPlus
from lrpfx.concepts import collect
from lrpfx.errors import InputError
from lrpfx.request import Class, Region, as_target
from lrpfx.request.places import scores_of_classes

NAMES = ["ground", "cat", "dog", "tree"]


class Segmenter(nn.Module):
    """Scores of four classes at each place, in half the size of the image, as SegFormer's, in a dict, as torchvision's."""

    def __init__(self, classes=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, classes, 3, padding=1))

    def forward(self, x):
        return {"out": self.layers(x)}


def made(classes=4):
    torch.manual_seed(1)
    return Segmenter(classes).float().eval()  # float32 is what programs and photographs have


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def explain_model(model):
    return lrpfx.transform(model, EpsilonPlus())


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 3, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def seed_of(output, index, region, positive=True):
    """The relevance of an output (batch, classes, height, width), place by place."""
    seed = torch.zeros_like(output)
    for place in region.nonzero().tolist():
        sample, row, column = place
        value = output[sample, index, row, column]
        seed[sample, index, row, column] = value if value > 0 or not positive else 0.0
    return seed


MASK = np.zeros((6, 8), dtype=np.uint8)
MASK[1:4, 2:7] = 1
FORMS = {
    "index": (2, True, lambda output: output.argmax(1) == 2),
    "largest": (None, True, None),
    "region": (Region(2), True, lambda output: output.argmax(1) == 2),
    "all places": (Region(2, None), True, lambda output: output[:, 2] == output[:, 2]),
    "mask": (Region(2, MASK), True, lambda output: torch.from_numpy(MASK).bool().expand(len(output), 6, 8)),
    "with negative outputs": (Region(2, positive=False), False, lambda output: output.argmax(1) == 2),
    "mask with negative outputs": (Region(2, MASK.tolist(), positive=False), False, lambda output: MASKS(output)),
    "an index for each": ([2, 2, Region(2)], True, lambda output: output.argmax(1) == 2),
    "a tensor": (torch.tensor([2, 2, 2]), True, lambda output: output.argmax(1) == 2),
}


def MASKS(output):
    return torch.from_numpy(MASK).bool().expand(len(output), 6, 8)


def expected_of(form, output):
    _, positive, region = FORMS[form]
    if form != "largest":
        return seed_of(output, 2, region(output), positive)
    seeds = torch.zeros_like(output)
    for number, one in enumerate(output):
        candidates = [seed_of(one[None], index, one[None].argmax(1) == index) for index in range(4)]
        seeds[number] = max(candidates, key=lambda seed: seed.sum())[0]
    return seeds


@pytest.mark.parametrize("form", FORMS)
def test_relevance_is_that_of_a_seed_by_hand(explain_model, images, form):
    target, output = FORMS[form][0], explain_model(images)["out"].detach()
    seed = expected_of(form, output)
    assert seed.any()
    found = lrpfx.attribute(explain_model, images, target)
    assert_close(found.relevance, lrpfx.attribute(explain_model, images, seed).relevance, 1e-6)
    if not isinstance(target, list):
        accounts = lrpfx.ledger(explain_model, images, target)
        assert accounts.seed == pytest.approx(float(seed.sum()), rel=1e-5) and accounts.unexplained < 1e-6
    several = lrpfx.attribute(explain_model, images, targets=[0, target])
    assert_close(several.relevance[1], found.relevance, 1e-5)


def test_one_class_is_there_where_its_output_is_positive(images):
    model = made(1)
    explain_model, output = lrpfx.transform(model, EpsilonPlus()), model(images)["out"].detach()
    expected = lrpfx.attribute(explain_model, images, output.clamp(min=0)).relevance
    for target in (None, 0, Region(0), Region(0, None)):
        assert_close(lrpfx.attribute(explain_model, images, target).relevance, expected, 1e-6)
    assert Region(0).region(output).equal(output[:, 0] > 0)


@pytest.mark.parametrize(
    "end",
    [
        lambda maps: maps.squeeze(1),
        lambda maps: maps[:, 0],
        lambda maps: maps[:, 0].relu(),
        lambda maps: maps.mean(1),
        lambda maps: maps.squeeze(),
    ],
)
def test_one_class_without_a_dimension(end, images):
    """Rows of pixels are not read as positions, nor columns as classes, and what the error says works."""

    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = made(1).layers

        def forward(self, x):
            return end(self.layers(x))

    model = Mask().eval()
    explain_model, whole = lrpfx.transform(model, EpsilonPlus(), images), lrpfx.transform(made(1), EpsilonPlus(), images)
    for ask in (
        lambda: lrpfx.attribute(explain_model, images, Region(0)),
        lambda: lrpfx.attribute(explain_model, images, None),
        lambda: lrpfx.attribute(explain_model, images, (1, 2)),
        lambda: lrpfx.ledger(explain_model, images, Region(0)),
        lambda: lrpfx.explain(model, images, Region(0)),
    ):
        with pytest.raises(lrpfx.InputError, match=r"output=lambda output: output\[:, None\]"):
            ask()
    found = lrpfx.attribute(explain_model, images, Region(0), output=lambda output: output[:, None])
    if found.output.min() < 0:  # a mean has a stabilizer of its own
        assert_close(found.relevance, lrpfx.attribute(whole, images, Region(0)).relevance, 1e-5)
    assert lrpfx.attribute(explain_model, images, (1, 2), output=lambda output: output).relevance.any(), "if they are positions"


def test_contrasts_of_regions(explain_model, model, images):
    """A sum of seeds by hand: of classes in their predicted regions, and of several classes in one mask."""
    output = explain_model(images)["out"].detach()
    first, second = (seed_of(output, index, output.argmax(1) == index) for index in (2, 1))
    in_mask = seed_of(output, 2, MASKS(output), False) - 0.5 * seed_of(output, 0, MASKS(output), False)
    cases = {
        ((2, 1.0), (1, -1.0)): first - second,
        ((Region(2), 1.0), (Region(1), -1.0)): first - second,
        ((Region(2, MASK, False), 1.0), (Region(0, MASK, False), -0.5)): in_mask,
    }
    for terms, seed in cases.items():
        target = dict(terms)
        expected = lrpfx.attribute(explain_model, images, seed).relevance
        assert expected.any()
        assert_close(lrpfx.attribute(explain_model, images, target).relevance, expected, 1e-6)
        assert lrpfx.ledger(explain_model, images, target).unexplained < 1e-6
    explainer = lrpfx.Explainer(model, composite=EpsilonPlus(), categories=NAMES)
    one = explainer(images, {Region("dog"): 1.0, Region("cat"): -1.0})[0]
    assert one.target.name == "dog in its region − cat in its region"
    assert_close(
        torch.tensor(one.input_relevance), lrpfx.attribute(explain_model, images[:1], first[:1] - second[:1]).relevance[0], 1e-6
    )
    assert one.answers[0].region.tolist() == ((output[0].argmax(0) == 2) | (output[0].argmax(0) == 1)).tolist()
    assert one.sheet() and pickle.loads(pickle.dumps(one)) == one
    large = np.kron(MASK, np.ones((2, 2), dtype=np.uint8))  # in the size of the photograph
    with_mask = explainer(images[0], {Region("dog", large): 1.0, Region("cat"): -1.0})
    assert_close(
        torch.tensor(with_mask.input_relevance),
        lrpfx.attribute(explain_model, images[:1], {Region(2, MASK): 1.0, Region(1): -1.0}).relevance[0],
        1e-6,
    )
    assert one.compare(["dog", Region("cat"), {"dog": 1.0, "cat": -1.0}]).width > 100
    for wrong in (("dog", Region("cat")), ("dog", "cat"), (Region("cat"),)):
        with pytest.raises(lrpfx.InputTypeError, match=r"compare\(\[one, other\]\)"):
            one.compare(*wrong)
    steps = lrpfx.transform(nn.Linear(5, 3).eval(), EpsilonPlus())
    x = torch.rand(2, 7, 5)
    parts = [lrpfx.attribute(steps, x, Region(index, None)).relevance for index in (0, 1)]
    found = lrpfx.attribute(steps, x, {Region(0, None): 1.0, Region(1, None): -2.0})
    assert_close(found.relevance, parts[0] - 2 * parts[1], 1e-6)


def test_volumes_and_sequences_of_labels():
    volumes = nn.Conv3d(1, 3, 1).eval()
    x = torch.rand(2, 1, 4, 5, 6)
    explain_model, output = lrpfx.transform(volumes, EpsilonPlus()), volumes(x).detach()
    index = int(output.argmax(1).flatten().mode().values)
    seed = output.clamp(min=0) * (torch.arange(3) == index)[:, None, None, None] * (output.argmax(1) == index)[:, None]
    assert seed.any()
    assert_close(lrpfx.attribute(explain_model, x, index).relevance, lrpfx.attribute(explain_model, x, seed).relevance, 1e-6)

    labels = nn.Linear(5, 3).eval()  # of each position
    x = torch.rand(2, 7, 5)
    explain_model, output = lrpfx.transform(labels, EpsilonPlus()), labels(x).detach()
    mask = torch.tensor([True] * 4 + [False] * 3)
    by_hand = {
        Region(1, None, positive=False): torch.ones(2, 7, dtype=torch.bool),
        Region(1, mask, positive=False): mask.expand(2, 7),
        Region(index := int(output[0, 0].argmax()), positive=False): output.argmax(2) == index,
    }
    for target, region in by_hand.items():
        seed = output * (torch.arange(3) == target.class_) * region[..., None]
        expected = lrpfx.attribute(explain_model, x, seed).relevance
        assert_close(lrpfx.attribute(explain_model, x, target).relevance, expected, 1e-6)
    with pytest.raises(lrpfx.InputError, match="position, class"):  # a class alone is not a target of a sequence
        lrpfx.attribute(explain_model, x, 1)


def test_errors_name_what_is_wrong(explain_model, images):
    cases = [
        (Region(4), lrpfx.InputError, "out of range"),
        (Region("cat"), lrpfx.InputTypeError, "categories"),
        (Region(1, torch.ones(5, 5)), lrpfx.InputError, r"\(5, 5\).*\(6, 8\)"),
        ({0: 1.0, Region(4): -1.0}, lrpfx.InputError, "out of range"),
        ({0: 1.0, Region(1, torch.ones(5, 5)): -1.0}, lrpfx.InputError, r"\(5, 5\).*\(6, 8\)"),
    ]
    for target, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            lrpfx.attribute(explain_model, images, target)
        assert caught.value.topic == "targets"
    for arguments, kind in [
        ((1.5,), lrpfx.InputTypeError),
        ((True,), lrpfx.InputTypeError),
        ((1, "all"), lrpfx.InputTypeError),
        ((1, [[0.5]]), lrpfx.InputError),
        ((1, [[float("nan")]]), lrpfx.InputError),
    ]:
        with pytest.raises(kind):
            Region(*arguments)
    dense = lrpfx.transform(nn.Linear(3, 4).eval(), EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match="class alone"):
        lrpfx.attribute(dense, torch.rand(1, 3), Region(1))


def test_regions_with_the_same_places_are_equal():
    assert Region(1) == Region(np.int64(1)) != Region(2) and Region(1) != Region(1, None) != Region(1, MASK)
    assert Region(1, MASK) == Region(1, torch.from_numpy(MASK)) != Region(1, 1 - MASK)
    assert len({Region(1, MASK), Region(1, MASK.astype(bool))}) == 1 and Region(1) != Class(1)
    assert as_target(Region(1)) == pickle.loads(pickle.dumps(Region(1)))


@pytest.mark.parametrize("target", ["dog", Region("dog"), Region("dog", MASK), None])
def test_explanations_have_the_region(model, images, target):
    explainer = lrpfx.Explainer(model, composite=EpsilonPlus(), categories=NAMES)
    for one in explainer(images, target):
        resolved = {"dog": 2, None: None}[target] if not isinstance(target, Region) else Region(2, target.mask)
        found = lrpfx.attribute(explainer.explain_model, one.input[None], resolved)
        assert_close(torch.tensor(one.input_relevance), found.relevance[0], 1e-6)
        region = as_target(resolved).region(found.output)[0]
        assert torch.equal(torch.from_numpy(one.answers[0].region), region)
        assert one.target.area == pytest.approx(float(region.float().mean()))
        assert one.balance.output == pytest.approx(one.ledger.seed, rel=1e-5)
        scores = sorted(scores_of_classes(found.output)[0].tolist(), reverse=True)
        assert [category.score for category in one.top(4)] == pytest.approx(scores, rel=1e-5)
        assert pickle.loads(pickle.dumps(one)) == one
        assert one.compare(["cat", "dog"]) and one.layers(["layers.0"]) and one._repr_html_()
    if target is None:
        assert one.target == one.top(1)[0]
    elif isinstance(target, Region):
        assert one.target.index is None and one.target.name.startswith("dog in")


class Brightness(nn.Module):
    """The class 1 where the image is bright."""

    def forward(self, x):
        bright = x.mean(1, keepdim=True) - 0.5
        return torch.cat([-bright, bright], 1)[:, :, ::4, ::4]


def test_the_outline_is_around_the_region():
    """The line lies inside the region in the photograph, whatever the preprocessing cropped and scaled."""
    pixels = np.zeros((80, 160, 3), dtype=np.uint8)
    pixels[20:60, 60:120] = 255

    def preprocess(image):
        image = image.crop((40, 0, 140, 80)).resize((50, 40), Image.Resampling.BOX)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    explanation = lrpfx.explain(Brightness().eval(), Image.fromarray(pixels), 1, preprocess=preprocess, composite=EpsilonPlus())
    drawn = np.asarray(explanation.overlay(scale=1e9)).astype(int)
    yellow = (drawn[..., 0] - drawn[..., 2]) > 150
    rows, columns = np.nonzero(yellow)
    for found, expected in ((rows, (20, 59)), (columns, (60, 119))):
        assert np.abs(np.array([found.min(), found.max()]) - expected).max() <= 8  # a place has the size of eight pixels
    assert not yellow[36:44, 80:100].any()
    assert (np.asarray(explanation.heatmap()) != drawn).any() and explanation.sheet()


def test_a_class_that_is_predicted_nowhere_has_no_relevance(model, images):
    explainer = lrpfx.Explainer(model, composite=EpsilonPlus(), categories=NAMES)
    absent = int((~(model(images[:1])["out"].argmax(1) == torch.arange(4)[:, None, None]).flatten(1).any(1)).nonzero()[0])
    (found,) = explainer(images[:1], absent)
    assert str(found.target) == f"{NAMES[absent]} (nowhere)" and not found.relevance.any() and found.overlay()


@pytest.mark.programs
@pytest.mark.parametrize("name", ["x.pt2", "x.onnx"])
def test_programs(explain_model, images, name, tmp_path):
    wanted = {target: lrpfx.attribute(explain_model, images, target).relevance for target in (1, 2, None)}
    for settings in ({"target": Region(1, MASK)}, {"target": "max"}, {"target": Region(2)}, {"target": {1: 1.0, 2: -1.0}}):
        program = lrpfx.lower(explain_model, images[:2], **settings)
        runner = lrpfx.load(lrpfx.save(program, tmp_path / name))
        target = None if settings["target"] == "max" else settings["target"]
        assert_close(runner(images)["relevance"], lrpfx.attribute(explain_model, images, target).relevance, 1e-4)
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, images[:2], target="index"), tmp_path / name))
    assert_close(runner(images, torch.tensor([1, 1, 1]))["relevance"], wanted[1], 1e-4)
    explainer = lrpfx.Explainer(runner, categories=NAMES)
    for target, relevance in wanted.items():
        found = explainer(images, target)
        assert_close(torch.tensor(np.stack([one.input_relevance for one in found])), relevance, 1e-4)
        assert found[0].answers[0].region.shape == (6, 8)


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return torch.rand(3, 12, 16, generator=torch.Generator().manual_seed(number), dtype=torch.float32), number % 4


def test_data_sets_and_collections(explain_model, tmp_path):
    images = torch.stack([Numbered()[number][0] for number in range(5)])
    targets = [Region(1, MASK), "predicted", "true", {Region(1): 1.0, 2: -1.0}]
    view = lrpfx.datasets.attribute(explain_model, Numbered(), tmp_path / "store", targets=targets)
    alone = [Region(1, MASK), None, torch.arange(5) % 4, {1: 1.0, 2: -1.0}]
    for number, target in enumerate(alone):
        expected = lrpfx.attribute(explain_model, images, target)
        assert_close(torch.tensor(view["relevance"][:, number]), expected.relevance, 1e-2)  # float16
    assert view["prediction"][:].tolist() == scores_of_classes(expected.output).argmax(1).tolist()
    with pytest.raises(lrpfx.InputError, match="targets"):
        lrpfx.datasets.attribute(explain_model, Numbered(), tmp_path / "store", targets=[Region(1, 1 - MASK), *targets[1:]])
    few = lrpfx.datasets.attribute(explain_model, Numbered(), tmp_path / "few", target=Region(1), scores=2)
    assert few["top_classes"][:][:, 0].tolist() == view["prediction"][:].tolist()
    collection = collect(explain_model, Numbered(), ["layers.0"], target=Region(1), top=1, normalize=[])
    found = lrpfx.attribute(explain_model, images, Region(1), record=["layers.0"]).layers["layers.0"].flatten(2).sum(2)
    best = collection.top("layers.0", 3, by="relevance", reduction="sum")[0]
    assert best.sample == int(found[:, 3].argmax()) and best.score == pytest.approx(float(found[:, 3].max()), rel=1e-5)


def test_reports(explain_model, model, images, tmp_path):
    explanations = lrpfx.Explainer(model, composite=EpsilonPlus(), categories=NAMES)(images[:1], Region("cat", MASK))
    assert "cat in a mask" in lrpfx.report(explanations, tmp_path / "explained.html").read_text()
    asked = explain_model, images[:1], Region(1)
    assert "class 1 in its region" in lrpfx.report(asked, tmp_path / "attributed.html").read_text()


@pytest.mark.programs
def test_the_command_line(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "segmenter", raising=False)
    lines = (
        "import torch",
        "def make():",
        "    torch.manual_seed(1)",
        "    return torch.nn.Conv2d(3, 4, 3, padding=1).float()",
    )
    (tmp_path / "segmenter.py").write_text("\n".join(lines))
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3, padding=1).float().eval()
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    scores = scores_of_classes(model(x).detach())[0]
    index = int(scores.argmax())
    status, _ = run("explain", "segmenter:make", "photo.png", "--raw", "--output", "out", "--target", str(index))
    assert status == 0
    row = rows_of("out", "explanations.csv")["photo.png"]
    assert row["explained"] == f"{index} {float(scores[index]):.4g}" == row["predicted"].partition(";")[0]
    assert run("export", "segmenter:make", "model.pt2", "--shape", "1,3,12,16", "--raw")[0] == 0
    (tmp_path / "images").mkdir()
    Image.fromarray(pixels).save(tmp_path / "images" / "photo.png")
    assert run("run", "model.pt2", "images", "results")[0] == 0
    row = rows_of("results")["photo.png"]
    assert int(row["explained"]) == index and float(row[f"output_{index}"]) == pytest.approx(float(scores[index]), rel=1e-5)


class _OfSignals(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.filters, self.end = nn.Conv2d(1, 2, (1, 9), padding=(0, 4)), end

    def forward(self, x):
        return self.end(self.filters(x[:, None, None]).relu())


@pytest.mark.parametrize(
    "end",
    [
        lambda maps: maps.squeeze(2),
        lambda maps: maps.flatten(2),
        lambda maps: maps.reshape(maps.shape[0], 2, -1),
        lambda maps: maps[:, :, 0],
        lambda maps: maps[..., 0, :],
        lambda maps: maps.select(2, 0),
        lambda maps: maps.mean(-2),
        lambda maps: maps.amax(2),
        lambda maps: {"logits": maps.squeeze(2)},
    ],
)
def test_positions_of_an_output_with_its_classes_second(end, tmp_path):
    """The graph says where the classes are: steps are not read as classes, through no door, and what the error says works."""
    waves, model = torch.randn(2, 30), _OfSignals(end).eval()
    module = lrpfx.transform(model, EpsilonPlus(), waves)
    explainer = lrpfx.Explainer(model, rate=100)
    for ask in (
        lambda: lrpfx.attribute(module, waves, lrpfx.Region(1)),
        lambda: lrpfx.attribute(module, waves, [(1, 1), (1, 0)]),
        lambda: lrpfx.ledger(module, waves, lrpfx.Region(1)),
        lambda: lrpfx.lower(module, waves, target=lrpfx.Region(1)),
        lambda: explainer(waves, lrpfx.Region(1)),
        lambda: lrpfx.datasets.attribute(explainer, waves, tmp_path / "store", target=lrpfx.Region(1)),
    ):
        with pytest.raises(InputError, match=r"channels in dimension 1.*output=lambda output: output\.movedim\(1, 2\)"):
            ask()
    value = (lambda output: output["logits"]) if isinstance(model(waves), dict) else lambda output: output
    found = lrpfx.attribute(module, waves, lrpfx.Region(1), output=lambda output: value(output).movedim(1, 2))
    scores = value(model(waves))
    seed = torch.where(scores.argmax(1) == 1, scores[:, 1].clamp(min=0), 0.0)
    torch.testing.assert_close(found.output, scores.movedim(1, 2))
    expected = lrpfx.attribute(module, waves, lambda output: torch.stack([torch.zeros_like(seed), seed], 1), output=value)
    torch.testing.assert_close(found.relevance, expected.relevance)
