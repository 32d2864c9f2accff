"""Collections of graphs: the scores of each channel are those of what the explainer records of each graph."""

import numpy as np
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.concepts import Collection, collect, gallery
from lrpfx.errors import InputError, LrpfxWarning

LAYERS = ["relu", "relu_1", "mean"]


class Network(nn.Module):
    """Two sums of messages, with an output for the graph or for each node."""

    def __init__(self, of_nodes=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head, self.of_nodes = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4), of_nodes

    def forward(self, x, edge_index):
        source, target = edge_index
        states = torch.relu(self.first(x).index_add(0, target, self.first(x)[source]))
        states = torch.relu(states.index_add(0, target, self.second(states)[source]))
        return self.head(states if self.of_nodes else states.mean(0, keepdim=True))


def graph(number, nodes, edges):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(nodes, 3, dtype=torch.float64, generator=generator)
    return {"x": x, "edge_index": torch.randint(nodes, (2, edges), generator=generator), "y": torch.tensor([number % 4])}


#: Two have the same sizes, so that they could run together.
GRAPHS = [graph(0, 5, 7), graph(1, 3, 4), graph(2, 9, 20), graph(3, 5, 7)]


def explained():
    """The explainable module, and what is recorded of each graph."""
    explainer = lrpfx.Explainer(Network().double().eval(), record=LAYERS)
    recorded = [explainer(one, int(one["y"])).recorded for one in GRAPHS]
    return explainer.explain_model, recorded


def test_scores_are_those_of_each_graph(tmp_path):
    module, recorded = explained()
    found = collect(module, GRAPHS, LAYERS, tmp_path / "found.npz", target="true", normalize=())
    assert [one.channels for one in found.facts.layers.values()] == [8, 8, 8]
    for layer in LAYERS:
        for channel in range(8):
            values = [one[layer][:, channel] for one in recorded]
            for reduction, scores in (("sum", [one.sum() for one in values]), ("max", [one.max() for one in values])):
                ranked = {one.sample: one for one in found.top(layer, channel, reduction=reduction)}
                np.testing.assert_allclose([ranked[number].score for number in range(4)], scores, atol=1e-12)
                for number, one in enumerate(values):
                    assert one[ranked[number].position] == pytest.approx(one.max(), abs=1e-12)
    assert [one.sample for one in found.top("relu", 0, true=2)] == [2]
    again = collect(module, GRAPHS, LAYERS, tmp_path / "found.npz", target="true", normalize=())
    assert again.count == Collection.load(tmp_path / "found.npz").count == 4


def test_activations_are_those_of_the_network():
    module, _ = explained()
    found, network = collect(module, GRAPHS, ["relu"], normalize=()), Network().double().eval()
    for ranked in found.top("relu", 3, by="activation", reduction="max"):
        one = GRAPHS[ranked.sample]
        source, target = one["edge_index"]
        sent = network.first(one["x"])
        states = sent.index_add(0, target, sent[source]).relu()[:, 3]
        assert ranked.score == pytest.approx(float(states.max().detach())) and states[ranked.position] == states.max()


def test_a_node():
    explainer = lrpfx.Explainer(Network(of_nodes=True).double().eval(), record=["relu"])
    several = [one for one in GRAPHS if len(one["x"]) > 4]
    recorded = [explainer(one, (4, 1)).recorded["relu"] for one in several]
    with pytest.warns(LrpfxWarning, match="1 of 4"):
        found = collect(explainer.explain_model, GRAPHS, ["relu"], target=(4, 1), normalize=())
    assert "node 4 is out of range" in found.errors[1]
    scores = {one.sample: one.score for one in found.top("relu", 2)}
    np.testing.assert_allclose([scores[number] for number in (0, 2, 3)], [one[:, 2].sum() for one in recorded], atol=1e-12)


def test_graphs_have_no_references():
    module, _ = explained()
    found = collect(module, GRAPHS, ["relu"])
    with pytest.raises(InputError, match=r"collection\.top"):
        gallery(module, GRAPHS, found, "relu", [0])
