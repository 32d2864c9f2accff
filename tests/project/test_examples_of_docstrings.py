"""The examples in docstrings run, each alone, and give what they show."""

import doctest
import inspect

import numpy as np
import pytest
import torch
from PIL import Image
from tools.public_names import public_names
from torch import nn

import lrpfx

WITH_EXAMPLES = {name: value for name, value in public_names() if ">>> " in (inspect.getdoc(value) or "")}
#: the names that the guides use most
MOST_USED = {
    *("explain", "Explainer", "Explanation", "Explanations", "transform", "capture", "check", "assignment", "history", "draw"),
    *("node_names", "attribute", "condition", "ledger", "report", "compare", "lower", "save", "load"),
    *("rules.Epsilon", "rules.Gamma", "rules.ZPlus", "composites.EpsilonPlusFlat", "composites.EpsilonGammaBox"),
    *("composites.GammaByDepth", "composites.AttnLRP", "composites.LayerMapComposite", "composites.NameMapComposite"),
    *("attribution.SmoothGrad", "concepts.relevances", "pictures.heatmap", "text.heatmap"),
}


def test_the_most_used_names_have_examples():
    assert {f"lrpfx.{name}" for name in MOST_USED} <= WITH_EXAMPLES.keys()


@pytest.fixture
def known(tmp_path, monkeypatch):
    """What examples take as given: a small classifier and its inputs, photographs, and an explainable module."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    for name in ("cat.jpg", "dog.jpg"):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(name)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval(), torch.rand(2, 3, 8, 8)
    explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat())

    def preprocess(image):
        return torch.from_numpy(np.asarray(image.resize((8, 8)), dtype=np.float32) / 255).permute(2, 0, 1)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, edge_index):
            sent = torch.relu(self.layer(x))
            return self.head(sent.index_add(0, edge_index[1], sent[edge_index[0]]).mean(0, keepdim=True))

    class Detector(lrpfx.detection.DetectorHeads):
        def raw(self, images):
            logits = self.detector(images)[:, None].expand(-1, 2, -1)
            boxes = torch.tensor([[1.0, 1.0, 4.0, 4.0], [3.0, 3.0, 8.0, 8.0]])
            return lrpfx.detection.RawHeads(logits, boxes.expand(len(images), 2, 4), torch.softmax(logits, -1))

        def input_of(self, given):
            return preprocess

    ring = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    return {
        **{"network": Network().eval(), "data": {"x": torch.rand(5, 3), "edge_index": torch.cat([ring, ring.flip(0)], 1)}},
        **{"lrpfx": lrpfx, "torch": torch, "nn": nn, "model": model, "x": x, "explain_model": explain_model},
        **{"preprocess": preprocess, "detector": Detector(model)},
        "explainer": lrpfx.Explainer(model, preprocess=preprocess, categories=["cat", "dog"]),
        "explanation": lrpfx.explain(model, "cat.jpg", preprocess=preprocess, categories=["cat", "dog"]),
        "attribution": lrpfx.attribute(explain_model, x, target=1),
    }


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_example(known, name):
    if name == "lrpfx.load":
        pytest.importorskip("onnxruntime")
        lrpfx.save(lrpfx.lower(known["explain_model"], known["x"]), "model.onnx")
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(WITH_EXAMPLES[name]), known, name, None, 0)
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=printed.append)
    assert example.examples and not runner.summarize(verbose=False).failed, "".join(printed)
