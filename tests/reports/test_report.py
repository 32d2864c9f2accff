"""`lrpfx.report`: what the page is given, and that it is a page of its own."""

import base64
import hashlib
import json
import os
import pickle
import re

import numpy as np
import pytest
import torch
from explanation.test_sentences import Tokenizer, classifier
from helpers import Layered, small_net
from reports.test_drawing import clashing
from reports.test_encoding import unpacked
from torch import nn

import lrpfx
from lrpfx.attribution.ledger import PARTS
from lrpfx.composites import AttnLRP, EpsilonPlus, EpsilonPlusFlat, LayerMapComposite
from lrpfx.errors import InputError, InputTypeError, LrpfxWarning
from lrpfx.explanation.compiled import origin_of
from lrpfx.reports.pages.accounts import recorded
from lrpfx.reports.pages.questions import NO_MODEL, Query
from lrpfx.reports.pages.report import document, page, report
from lrpfx.request.targets import as_target
from lrpfx.rules import AlphaBeta, Epsilon, Gamma


@pytest.fixture
def call():
    """An explainable module, an input, and the class to explain."""
    x = torch.randn(1, 3, 8, 8)
    return lrpfx.transform(small_net(), EpsilonPlusFlat(), example_inputs=x), x, 1


def read(path):
    """The document in a page."""
    (text,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def test_a_page_holds_the_document(call, tmp_path):
    path = lrpfx.report(call, tmp_path / "report.html", title="A title")
    assert path == tmp_path / "report.html" and os.listdir(tmp_path) == ["report.html"]
    assert read(path) == json.loads(json.dumps(document(call, "A title")))
    assert "<title>A title</title>" in path.read_text()


def test_nothing_is_fetched(call, tmp_path):
    text = lrpfx.report(call, tmp_path / "report.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for content in (script, style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|innerHTML|eval\(", script)


# --- graph and accounts ------------------------------------------------------------------------------------------------------


def test_nodes_are_those_of_the_assignment(call):
    (graph,) = document(call)["graphs"]
    nodes = {node["name"]: node for node in graph["nodes"]}
    for row in lrpfx.assignment(call[0]):
        node = nodes.pop(row.name)
        assert (node["rule"], node["chosenBy"], tuple(node["merged"])) == (row.rule, row.chosen_by, row.merged)
        assert row.source.rpartition("/")[2] in node["source"] or not row.source
    assert [node["rule"] for node in nodes.values()] == ["output"]
    conv = graph["nodes"][1]
    assert conv["shape"] == [1, 6, 8, 8] and "as if W were 1" in conv["formula"] and "conv" in conv["line"]
    assert conv["source"].endswith(".py:" + conv["source"].rpartition(":")[2]) and not conv["source"].startswith("/")


def test_accounts_and_edges_are_those_of_the_ledger(call):
    found = document(call)
    (graph,), (view,), accounts = found["graphs"], found["views"], lrpfx.ledger(*call)
    assert found["parts"] == list(PARTS)
    names = [node["name"] for node in graph["nodes"]]
    for row, entry in zip(view["ledger"]["rows"], accounts, strict=True):
        figures = [entry.relevance_in, entry.relevance_out, *(getattr(entry, part) for part in PARTS), entry.unexplained]
        assert names[row[0]] == entry.name and row[1:] == pytest.approx(figures, rel=1e-6)
    assert view["ledger"]["seed"] == pytest.approx(accounts.seed, rel=1e-6)
    edges = {
        (names[source], names[target]): flow for (source, target, _), flow in zip(graph["edges"], view["flows"], strict=True)
    }
    assert set(accounts.flows) <= set(edges) == set(lrpfx.to_networkx(call[0]).edges())
    assert edges == pytest.approx({edge: accounts.flows.get(edge, 0.0) for edge in edges}, rel=1e-6)


@pytest.mark.parametrize(("module_name", "argument"), [("output", "x"), ("features", "features"), ("output", "output")])
def test_ends_and_modules_of_one_name_are_several_nodes(module_name, argument):
    explain_model, x = clashing(module_name, argument, lambda: nn.Linear(4, 4))
    found = document((explain_model, x, 0))
    (graph,), (view,), accounts = found["graphs"], found["views"], lrpfx.ledger(explain_model, x, 0)
    shown = [(node["name"], node["kind"]) for node in graph["nodes"]]
    between = [("relu", "Activation"), ("add", "Sum"), ("head", "Linear")]
    assert shown == [(argument, "input"), (module_name, "Linear"), *between, ("output", "output")]
    assert sorted(edge[:2] for edge in graph["edges"]) == [[0, 1], [0, 3], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert view["ledger"]["inputs"] == [[argument, pytest.approx(accounts.inputs[argument], rel=1e-6), 0]]
    assert [row[0] for row in view["ledger"]["rows"]] == [1, 2, 3, 4]
    assert graph["nodes"][0]["formula"].startswith("An input")
    assert graph["nodes"][0]["formula"] != graph["nodes"][1]["formula"] != graph["nodes"][5]["formula"]


def test_pictures_of_nodes_are_sums_over_channels(call):
    found = document(call)
    names = [node["name"] for node in found["graphs"][0]["nodes"]]
    pictures = {names[int(place)]: picture for place, picture in found["views"][0]["pictures"].items()}
    layers = lrpfx.attribute(*call, record=list(pictures)).layers
    assert {"conv1", "relu", "add"} <= set(pictures)
    for name, picture in pictures.items():
        expected = layers[name][0].sum(0).numpy()
        scale = np.percentile(np.abs(expected), 99)
        np.testing.assert_allclose(unpacked(picture), expected.clip(-scale, scale), atol=0.51 * scale / 127)


def test_recording_in_parts_changes_nothing(call):
    module, inputs, target = call
    query = Query(module, inputs, as_target(target), None)
    whole, parts = dict(recorded(query)), dict(recorded(query, most=1))
    assert list(whole) == list(parts) and len(whole) > 3
    for name, relevance in whole.items():
        np.testing.assert_allclose(parts[name], relevance, rtol=1e-6, atol=1e-12)


def test_stages_of_the_compilation(call):
    (graph,) = document(call)["graphs"]
    history = lrpfx.history(call[0])
    assert [graph["codes"][stage["code"]] for stage in graph["history"]] == [one.code for one in history]
    assert [(stage["name"], stage["matches"]) for stage in graph["history"]] == [(one.name, one.matches) for one in history]
    assert len(set(graph["codes"])) == len(graph["codes"]) < len(history)


def test_the_model_and_the_inputs_stay_as_they_are(call):
    model, x, target = call
    before = {name: value.clone() for name, value in model.state_dict().items()}, x.clone()
    document((model, x, target))
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(x, before[1]) and not x.requires_grad and all(one.grad is None for one in model.parameters())


# --- samples -----------------------------------------------------------------------------------------------------------------


def test_a_photograph_has_its_map(call):
    (view,) = document(call)["views"]
    expected = lrpfx.attribute(*call).relevance[0].sum(0).numpy()
    np.testing.assert_allclose(unpacked(view["map"]["exact"]), expected, atol=0.51 * np.abs(expected).max() / 32767)
    drawn = lrpfx.pictures.smoothed(expected)
    scale = lrpfx.pictures.scale_of(expected)
    np.testing.assert_allclose(unpacked(view["map"]["drawn"]), drawn.clip(-scale, scale), atol=0.51 * scale / 127)


@pytest.mark.parametrize("size", [(500, 40), (40, 500), (512, 512)])
def test_large_maps_and_thumbnails_of_equal_relevance_look_equal(size):
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).eval()
    for weight in model.parameters():
        nn.init.constant_(weight, 0.25)
    x = torch.full((1, 3, *size), 0.5)
    module = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    (view,) = document((module, x, 1))["views"]
    expected = lrpfx.attribute(module, x, 1).relevance[0].sum(0)
    for name in ("exact", "drawn"):
        np.testing.assert_allclose(unpacked(view["map"][name]), float(expected.mean()), rtol=0.01)
    assert view["map"]["pixels"] == [size[1], size[0]]
    assert view["map"]["exact"]["shape"] == [min(448, length) for length in size]
    for picture in view["pictures"].values():
        values = unpacked(picture)
        np.testing.assert_allclose(values, values.mean(), rtol=0.01)
    assert [picture["of"] for picture in view["pictures"].values()][:1] == ([list(size)] if max(size) < 8 * min(size) else [])


def test_a_batch_is_several_samples_and_a_list_several_targets(call):
    model, x = call[0], torch.randn(2, 3, 8, 8)
    found = document((model, x, [0, 2]))
    assert [sample["name"] for sample in found["samples"]] == ["sample 1", "sample 2"] and len(found["graphs"]) == 1
    assert [(view["sample"], view["target"]["name"]) for view in found["views"]] == [
        (0, "class 0"),
        (0, "class 2"),
        (1, "class 0"),
        (1, "class 2"),
    ]
    for view in found["views"]:
        expected = lrpfx.attribute(model, x[view["sample"]][None], int(view["target"]["name"][-1]))
        assert view["target"]["score"] == pytest.approx(float(expected.output[0, int(view["target"]["name"][-1])]), rel=1e-6)
        assert view["ledger"]["inputs"][0][1] == pytest.approx(float(expected.relevance.sum()), rel=1e-6)


@pytest.mark.parametrize("target", [torch.tensor([2, 0]), np.array([2, 0])])
def test_a_tensor_has_a_target_for_each_sample(call, target):
    views = document((call[0], torch.randn(2, 3, 8, 8), target))["views"]
    assert [view["target"]["name"] for view in views] == ["class 2", "class 0"]


def test_a_contrast_is_that_of_each_sample(call):
    views = document((call[0], torch.randn(2, 3, 8, 8), {0: 1.0, 1: -1.0}))["views"]
    assert [view["target"]["name"] for view in views] == ["{0: 1.0, 1: -1.0}"] * 2 and all("map" in view for view in views)


def test_a_target_of_the_whole_batch(call):
    (view,) = document((call[0], torch.randn(2, 3, 8, 8), lambda output: output * 0.5))["views"]
    assert view["inputs"][0]["shape"] == [2, 3, 8, 8] and "map" not in view


class Recurrent(Layered):
    """Time is the first dimension of its input."""

    def forward(self, x):
        return self.out(self.lstm(x)[0][-1])


class Centred(Layered):
    """Each sample depends on the mean of the batch."""

    def forward(self, x):
        return self.out(x - x.mean(0, keepdim=True))


class Paired(Layered):
    """It takes batches of two alone."""

    def forward(self, x):
        return self.out(x.reshape(2, 4))


COUPLED = [
    *((lambda: Recurrent(lstm=nn.LSTM(4, 5), out=nn.Linear(5, 3)), shape) for shape in ((6, 1, 4), (2, 2, 4), (3, 3, 4))),
    (lambda: Centred(out=nn.Linear(4, 3)), (3, 4)),
    (lambda: Paired(out=nn.Linear(4, 3)), (2, 4)),
]


@pytest.mark.parametrize(("model", "shape"), COUPLED)
@pytest.mark.parametrize("target", [1, torch.tensor(1), None, [0, 2]], ids=str)
@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")
def test_figures_are_those_of_the_whole_batch(model, shape, target):
    x = torch.randn(shape)
    module = lrpfx.transform(model(), EpsilonPlus(), example_inputs=x)
    found = document((module, x, target))
    targets = target if isinstance(target, list) else [target]
    assert len(found["samples"]) == 1 and len(found["views"]) == len(targets)
    for view, one in zip(found["views"], targets, strict=True):
        expected = lrpfx.attribute(module, x, one).relevance
        assert view["inputs"][0]["total"] == pytest.approx(float(expected.sum()), rel=1e-4, abs=1e-6)
        assert view["ledger"]["seed"] == pytest.approx(lrpfx.ledger(module, x, one).seed, rel=1e-4, abs=1e-6)
        for index, _, relevance in view["inputs"][0]["entries"]:
            assert relevance == pytest.approx(float(expected[tuple(index)]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "target",
    [torch.tensor([0, 1, 2]), torch.ones(5, 3), np.array([0]), torch.tensor(99), torch.tensor([True, False])],
    ids=str,
)
def test_targets_are_checked_for_the_whole_batch(call, target):
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(InputError) as expected:
        lrpfx.attribute(call[0], x, target)
    with pytest.raises(InputError, match=f"^{re.escape(str(expected.value))}$"):
        document((call[0], x, target))


@pytest.mark.parametrize("target", [torch.tensor(2), np.array(2), np.int64(2), torch.tensor([2]), 2], ids=repr)
def test_a_number_is_told_as_a_class(call, target):
    (view,) = document((*call[:2], target))["views"]
    score = float(lrpfx.attribute(*call[:2], 2).output[0, 2])
    assert view["target"] == {"name": "class 2", "score": pytest.approx(score, rel=1e-6), "probability": None}


def test_relevance_of_the_output_is_split_with_the_batch(call):
    x = torch.randn(2, 3, 8, 8)
    relevance = torch.rand_like(call[0](x))
    views = document((call[0], x, relevance))["views"]
    assert [view["ledger"]["seed"] for view in views] == pytest.approx(relevance.sum(1).tolist(), rel=1e-6)
    assert {view["target"]["name"] for view in views} == {"relevance given as a tensor"}


def test_an_output_among_several_is_chosen():
    class Two(Layered):
        def forward(self, x):
            return self.one(x), self.other(x)

    x = torch.randn(2, 4)
    module = lrpfx.transform(Two(one=nn.Linear(4, 3), other=nn.Linear(4, 2)), EpsilonPlus(), example_inputs=x)
    with pytest.raises(InputTypeError, match="choose one with output="):
        document((module, x, 1))
    for output in (0, 1, lambda found: found[1]):
        views = document((module, x, 1), output=output)["views"]
        expected = lrpfx.attribute(module, x, 1, output=output)
        assert [view["target"]["score"] for view in views] == pytest.approx(expected.output[:, 1].tolist(), rel=1e-6)
        assert [view["ledger"]["seed"] for view in views] == pytest.approx(expected.output[:, 1].tolist(), rel=1e-6)
        totals = [view["inputs"][0]["total"] for view in views]
        assert totals == pytest.approx(expected.relevance.sum(1).tolist(), rel=1e-5)
    with pytest.raises(InputError, match="an explanation has chosen its output"):
        document(explained(), output=0)


def test_a_list_has_the_samples_of_its_parts(call):
    whole = explained()
    assert document(list(whole)) == document(whole)
    found = document([call, (call[0], torch.randn(1, 3, 8, 8), 0)])
    assert [view["sample"] for view in found["views"]] == [0, 1] and len(found["graphs"]) == 1


def test_composites_are_compared_on_one_sample(call):
    other = lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=call[1])
    found = document({"flat": call, "plus": (other, *call[1:])})
    assert [(view["composite"], view["sample"], view["graph"]) for view in found["views"]] == [("flat", 0, 0), ("plus", 0, 1)]
    assert len(found["samples"]) == 1 and found["graphs"][0]["rules"] != found["graphs"][1]["rules"]


def explained(**settings):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    return lrpfx.Explainer(model, composite=EpsilonPlus(), categories=list("abcde"))(torch.rand(2, 3, 8, 8), **settings)


def test_explanations_of_photographs():
    found = explained(targets=["b", "d"])
    data = document(found)
    assert [view["target"]["name"] for view in data["views"]] == ["b", "d"] * 2
    for view, answer in zip(data["views"], [answer for one in found for answer in one.answers], strict=True):
        assert view["target"]["score"] == pytest.approx(answer.category.score, rel=1e-6)
        assert view["ledger"]["seed"] == pytest.approx(answer.category.score, rel=1e-6)
        assert view["balance"]["inputs"] == pytest.approx(answer.balance.inputs, rel=1e-6)
    assert data["title"] == "image 1, image 2"
    assert document(found[0])["samples"][0]["photograph"].startswith("data:image/jpeg;base64,")


def test_crops_and_mirrors_are_told(tmp_path):
    from PIL import Image

    def mirrored(photograph):
        pixels = np.asarray(photograph.crop((4, 2, 12, 10)), dtype=np.float64)[:, ::-1] / 255
        return torch.tensor(pixels.copy()).movedim(-1, 0)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    photograph = Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8))
    explanation = lrpfx.explain(model, photograph, preprocess=mirrored, composite=EpsilonPlus())
    (view,) = document(explanation)["views"]
    assert view["map"]["box"] == pytest.approx([4, 2, 12, 10], abs=0.02) and view["map"]["mirrored"] == [True, False]


def of_equal_names():
    """A report's argument with samples, composites and targets of equal names."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    explainers = [
        lrpfx.Explainer(model, composite=one, categories=["crane", "ox", "crane"]) for one in (EpsilonPlus(), EpsilonPlusFlat())
    ]
    images = [torch.rand(3, 8, 8) for _ in range(2)]
    return {
        key: [explainer(image, targets=[0, 1, 2]) for image in images]
        for key, explainer in zip((1, "1"), explainers, strict=True)
    }


def test_samples_composites_and_targets_of_equal_names():
    found = document(of_equal_names())
    shown = [(found["samples"][view["sample"]]["name"], view["composite"], view["target"]["name"]) for view in found["views"]]
    samples = [sample["name"] for sample in found["samples"]]
    assert len(set(samples)) == len(samples) == 2 and {view["composite"] for view in found["views"]} == {"1", "1 (2)"}
    assert len(set(shown)) == len(shown) == 12
    assert [name for _, _, name in shown] == ["crane", "ox", "crane (2)"] * 4


def test_a_pickled_explanation_has_no_graph(tmp_path):
    data = document(pickle.loads(pickle.dumps(explained()[0])))
    (view,) = data["views"]
    assert view["graph"] is None and view["note"] == NO_MODEL and "map" in view and data["graphs"] == []


def test_a_text_has_the_path_of_its_words():
    """What flows through a place is what arrives at the words when relevance starts in that layer, at that place alone."""
    model = classifier().double()
    explainer = lrpfx.Explainer(model, tokenizer=Tokenizer(), composite=AttnLRP())
    found = explainer("the film was good", targets=["dull", "great"])
    data = document(found)
    assert [word["text"] for word in data["samples"][0]["words"]] == ["[CLS]", "the", "film", "was", "good", "[SEP]"]
    names = [node["name"] for node in data["graphs"][0]["nodes"]]
    inputs = origin_of(found).inputs
    for place, view in enumerate(data["views"]):
        scores = found.picture.scores[place]
        assert view["words"] == pytest.approx(scores.tolist(), rel=1e-6)
        steps = [names[step["node"]] for step in view["path"]]
        assert steps == [
            "bert.embeddings.add",
            "bert.embeddings.LayerNorm",
            "bert.encoder.layer.0.attention.output.LayerNorm",
            "bert.encoder.layer.0.output.LayerNorm",
        ]
        explain_model = explainer.explain_model
        layers = lrpfx.attribute(explain_model, inputs, place, record=steps).layers
        for name, step in zip(steps, view["path"], strict=True):
            assert_packed(step["words"], layers[name][0].sum(-1))
            alone = [layers[name] * (torch.arange(6) == word)[:, None] for word in range(6)]
            expected = lrpfx.attribute(explain_model, inputs, targets=alone, start=name).relevance["input_ids"].sum(-1)
            assert_packed(step["through"], expected[:, 0])
            np.testing.assert_allclose(expected[:, 0].sum(0), scores, rtol=1e-9)
    assert view["path"][-1]["through"]["scale"] > 0
    again = document(pickle.loads(pickle.dumps(found)))
    assert [view["graph"] for view in again["views"]] == [None, None] and again["samples"] == data["samples"]


def assert_packed(found, expected):
    np.testing.assert_allclose(
        unpacked(found).reshape(found["shape"]), expected, atol=0.51 * float(expected.abs().max()) / 32767
    )


@pytest.mark.parametrize(("passes", "traced"), [(5, []), (6, [3]), (13, [0, 3]), (23, [0, 2, 3]), (24, [0, 1, 2, 3])])
def test_paths_of_long_texts_are_followed_in_some_layers(passes, traced, monkeypatch):
    monkeypatch.setattr("lrpfx.reports.pages.word_paths.MOST_PASSES", passes)
    explainer = lrpfx.Explainer(classifier(), tokenizer=Tokenizer(), composite=AttnLRP())
    (view,) = document(explainer("the film was good", "great"))["views"]
    assert len(view["path"]) == 4
    assert [place for place, step in enumerate(view["path"]) if "through" in step] == traced


def test_several_inputs_are_listed_by_their_largest_entries():
    class Two(Layered):
        def forward(self, ids, y):
            return self.out((self.embedding(ids) + y).mean(1))

    inputs = {"ids": torch.randint(0, 9, (1, 5)), "y": torch.randn(1, 5, 4)}
    module = lrpfx.transform(Two(embedding=nn.Embedding(9, 4), out=nn.Linear(4, 3)), AttnLRP(), example_inputs=inputs)
    (view,) = document((module, inputs, 1))["views"]
    relevance = lrpfx.attribute(module, inputs, 1).relevance
    expected = {"ids": relevance["ids"].sum(-1), "y": relevance["y"]}
    assert [one["name"] for one in view["inputs"]] == ["ids", "y"]
    for one in view["inputs"]:
        values = [float(expected[one["name"]][tuple(index)]) for index, _, _ in one["entries"]]
        assert [entry[2] for entry in one["entries"]] == pytest.approx(values, rel=1e-6)
        assert np.all(np.diff(np.abs(values)) <= 1e-12) and one["total"] == pytest.approx(
            float(expected[one["name"]].sum()), rel=1e-6
        )


# --- what may go wrong -------------------------------------------------------------------------------------------------------

HOSTILE = ("</script><script>alert(1)</script>", "<!--<script>", "<img src=x onerror=alert(1)>", "\u2028&", "__proto__")


def test_names_stay_text(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name in HOSTILE:
                self.add_module(name.replace(".", ""), nn.Linear(3, 3))

        def forward(self, x):
            for layer in self.children():
                x = layer(x)
            return x

    x = torch.randn(1, 3)
    module = lrpfx.transform(Net().eval(), EpsilonPlus(), example_inputs=x)
    path = lrpfx.report({HOSTILE[0]: (module, x, 0)}, tmp_path / "report.html", title=f"</title>{HOSTILE[0]}\ud800")
    text = path.read_text()
    assert text.count("<script") == text.count("</script>") == 2 and "<!--" not in text and "<img" not in text
    data = read(path)
    assert [node["name"] for node in data["graphs"][0]["nodes"]][1:3] == list(HOSTILE[:2]) and data["title"].startswith(
        "</title>"
    )


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")
def test_values_that_are_not_finite(tmp_path):
    class Net(Layered):
        def forward(self, x):
            return self.out((self.conv(x).relu() / 0).mean((2, 3)))

    module = lrpfx.transform(Net(conv=nn.Conv2d(1, 2, 3), out=nn.Linear(2, 2)), EpsilonPlus())
    path = lrpfx.report((module, torch.rand(1, 1, 8, 8), 0), tmp_path / "report.html")
    (view,) = read(path)["views"]
    assert "map" not in view and view["ledger"]["seed"] == "NaN" and "not determined" in view["objection"]


def test_warnings_of_the_ledger_are_given():
    class Difference(Layered):
        def forward(self, x):
            return self.one(x) - self.other(x)

    model, x = Difference(one=nn.Linear(4, 3, bias=False), other=nn.Linear(4, 3, bias=False)), torch.rand(1, 4)
    with torch.no_grad():
        model.other.weight.copy_(model.one.weight * (1 - 1e-7))
    module = lrpfx.transform(model, EpsilonPlus(epsilon=1e-15, stabilizer=1e-15), example_inputs=x)
    with pytest.warns(LrpfxWarning, match="not determined"):
        (view,) = document((module, x, 0))["views"]
    assert "amounts of up to" in view["objection"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (nn.Linear(2, 2), "a report is on an explanation"),
        ((1, 2), "a tuple is"),
        ([], "no explanations"),
        ([3], "a report is on an explanation.*not on int"),
        ((nn.Linear(2, 2), torch.zeros(1, 2)), "takes the module that lrpfx.transform"),
        ({}, "empty"),
        ({"a": 3}, "a report is on an explanation"),
    ],
)
def test_other_arguments(what, message, tmp_path):
    with pytest.raises(InputError, match=message):
        report(what, tmp_path / "report.html")
    assert not os.listdir(tmp_path)


def test_other_targets_and_files(call, tmp_path):
    with pytest.raises(InputError, match="list of targets is empty"):
        report((*call[:2], []), tmp_path / "report.html")
    with pytest.raises(InputError, match=r"written as \.html"):
        report(call, tmp_path / "report.pdf")
    with pytest.raises(InputTypeError, match="title"):
        report(call, tmp_path / "report.html", title=3)
    with pytest.raises(InputError, match="no explanations"):
        report(explained()[:0], tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        report(call, tmp_path / "file" / "report.html")


def test_a_model_that_changed_since_is_noticed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    explanation = lrpfx.explain(explain_model, torch.rand(1, 3, 8, 8))[0]
    with torch.no_grad():
        next(explain_model.parameters()).mul_(3)
    with pytest.raises(InputError, match="changed since"):
        document(explanation)


def test_a_large_graph_is_small_data():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(80)))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    x = torch.randn(1, 4)
    module = lrpfx.transform(Net().eval(), EpsilonPlus(), example_inputs=x)
    data = document((module, x, 0))
    assert len(data["graphs"][0]["nodes"]) == 322 and len(page(data)) < 1e6


@pytest.mark.parametrize(
    ("rule", "formula"), [(Gamma(0.25), "R' = x⁺ (Pᵀ s₊"), (AlphaBeta(2.0, 1.0), "R' = alpha ("), (Epsilon(1e-6), "R' = x Wᵀ")]
)
def test_a_node_shows_the_formula_of_its_rule(rule, formula, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).eval()
    explain_model = lrpfx.transform(model, LayerMapComposite([(nn.Linear, rule)]))
    path = lrpfx.report((explain_model, torch.rand(1, 4), [0]), tmp_path / "page.html")
    assert formula in path.read_text(encoding="utf-8")


class OfGraphs(nn.Module):
    """Two classes of a graph, or of each node."""

    def __init__(self, is_of_nodes):
        super().__init__()
        self.layer, self.head, self.is_of_nodes = nn.Linear(3, 4), nn.Linear(4, 2), is_of_nodes

    def forward(self, x, edge_index):
        sent = self.layer(x).relu()
        received = self.head(torch.zeros_like(sent).index_add(0, edge_index[1], sent[edge_index[0]]))
        return received if self.is_of_nodes else received.mean(0, keepdim=True)


def other_explanations():
    dense = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    graph = {"x": torch.rand(4, 3), "edge_index": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])}
    return {
        "table": lrpfx.explain(dense, torch.rand(6), 1, names=list("abcdef")),
        "series": lrpfx.explain(nn.Sequential(nn.Flatten(), dense).eval(), torch.rand(3, 2), form="series", names=["u", "v"]),
        "features first": lrpfx.explain(
            nn.Sequential(nn.Flatten(), dense).eval(), torch.rand(2, 3), form="series", names=["u", "v"]
        ),
        "wave": lrpfx.explain(dense, torch.rand(6), rate=10),
        "graph": lrpfx.explain(OfGraphs(False).eval(), graph, 1),
        "node": lrpfx.explain(OfGraphs(True).eval(), graph, (2, 1)),
    }


@pytest.mark.parametrize("kind", ["table", "series", "features first", "wave", "graph", "node"])
def test_numbers_and_graphs_are_shown_by_their_entries(kind):
    explained = other_explanations()[kind]
    found = document(explained)
    (view,) = found["views"]
    assert found["samples"][0]["name"] == explained.name and view["target"]["name"] == explained.target.name
    assert float(view["target"]["score"]) == pytest.approx(explained.target.score)
    total = sum(float(one["total"]) for one in view["inputs"] if one["total"] is not None)
    assert total == pytest.approx(explained.balance.inputs)
    entries = {tuple(place): float(relevance) for place, _, relevance in view["inputs"][0]["entries"]}
    if kind == "table":
        assert entries == pytest.approx({(name,): value for name, value in zip("abcdef", explained.relevance, strict=True)})
    if kind in ("series", "features first"):
        frame = explained.to_pandas()
        assert entries == pytest.approx({(str(step), name): frame.loc[step, name] for step in frame.index for name in frame})
    assert view["graph"] == 0 and page(found)


def test_a_volume_is_shown_by_its_slices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 3 * 2 * 4, 2)).eval()
    explained = lrpfx.explain(model, torch.rand(1, 5, 4, 6), targets=[0, 1])
    found = document(explained)
    assert (found["samples"][0]["width"], found["samples"][0]["height"]) == (3 * 6, 2 * 4)
    for view, answer in zip(found["views"], explained.answers, strict=True):
        tiles = unpacked(view["map"]["exact"]).reshape(2, 4, 3, 6).transpose(0, 2, 1, 3).reshape(6, 4, 6)
        np.testing.assert_allclose(tiles[:5], answer.summed, rtol=0, atol=1e-4 * np.abs(answer.summed).max())  # of 16 bits
        assert not tiles[5].any() and view["graph"] == 0


def test_a_report_on_a_copy_of_numbers_says_what_is_missing(tmp_path):
    explained = pickle.loads(pickle.dumps(other_explanations()["table"]))
    with pytest.raises(InputError, match="copy"):
        lrpfx.report(explained, tmp_path / "report.html")
