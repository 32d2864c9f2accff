"""Attribution graphs against masks written out by hand, and their pictures."""

import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlusFlat
from lrpfx.concepts import Feature, attribution_graph
from lrpfx.concepts.attribution_graphs import TARGET, AttributionGraph
from lrpfx.pictures import colors_of


class Chain(nn.Module):
    """Convolutions in a row, with a skip around the last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
        self.third = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.second(self.first(x).relu()).relu()
        return self.head((self.third(x) + x).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def setting():
    torch.manual_seed(0)
    x = torch.randn(1, 3, 7, 7).double()
    return lrpfx.transform(Chain().double().eval(), EpsilonPlusFlat(), example_inputs=x), x


LAYERS = ["first", "add", "second"]


def mask(chosen, channels):
    kept = torch.zeros(1, channels, 1, 1, dtype=torch.double)
    kept[0, list(chosen)] = 1
    return kept


@pytest.mark.parametrize("width", [2, [1, 3, 2], [6, 6, 5]])
def test_relevance_flows_through_the_concepts_alone(setting, width):
    explain_model, x = setting
    found = attribution_graph(explain_model, x, 1, layers=LAYERS, width=width)
    assert found.layers == ("add", "second", "first")
    sizes = dict(zip(found.layers, (6, 6, 5), strict=True))
    above = {}
    for place, (name, below) in enumerate(itertools.pairwise([*found.layers, None])):
        kept = found.concepts(name)
        assert len(kept) == (width if isinstance(width, int) else width[place])
        plain = lrpfx.attribute(explain_model, x, 1, conditions=[above] if above else None, record=name)
        values = (plain.layers[name][0] if above else plain.layers[name])[0].sum((1, 2))
        for channel in kept:
            facts = found.graph.nodes[name, channel]
            assert facts["relevance"] == pytest.approx(float(values[channel]), rel=1e-9)
            assert facts["share"] == pytest.approx(float(values[channel] / values.abs().sum()), rel=1e-9)
            inflow = sum(edge["relevance"] for _, _, edge in found.graph.in_edges((name, channel), data=True))
            assert inflow == pytest.approx(facts["relevance"], rel=1e-9)
            condition = {**above, name: mask([channel], sizes[name])}
            alone = lrpfx.attribute(explain_model, x, 1, conditions=[condition], record=below or ())
            assert_close(facts["heatmap"], alone.relevance[0, 0])
            if below is not None:
                flow = alone.layers[below][0, 0].sum((1, 2))
                for _, (_, lower), edge in found.graph.out_edges((name, channel), data=True):
                    assert edge["relevance"] == pytest.approx(float(flow[lower]), rel=1e-9)
                    assert edge["share"] == pytest.approx(float(flow[lower] / flow.abs().sum()), rel=1e-9)
        least = min(abs(float(values[channel])) for channel in kept)
        assert all(abs(float(values[other])) <= least for other in set(range(sizes[name])) - set(kept))
        above = {**above, name: mask(kept, sizes[name])}


def test_all_concepts_carry_all_relevance(setting):
    explain_model, x = setting
    whole = lrpfx.attribute(explain_model, x, 2)
    found = attribution_graph(explain_model, x, 2, layers=["add"], width=6)
    assert nx.is_directed_acyclic_graph(found.graph) and len(found.graph) == 7
    heatmaps = [found.graph.nodes["add", channel]["heatmap"] for channel in found.concepts("add")]
    assert_close(sum(heatmaps), whole.relevance[0])
    assert_close(found.graph.nodes[TARGET]["heatmap"], whole.relevance[0])
    assert found.graph.nodes[TARGET]["relevance"] == pytest.approx(float(whole.output[0, 2]))


def test_it_begins_with_the_channels_that_are_given(setting):
    explain_model, x = setting
    found = attribution_graph(explain_model, x, layers=LAYERS, channels=[-1, 2], width=2)
    assert set(found.concepts("add")) == {5, 2}
    assert len(found.concepts("second")) == 2


def test_pictures(setting):
    explain_model, x = setting
    found = attribution_graph(explain_model, x, 1, layers=LAYERS)
    plain, over = found.picture(), found.picture(np.zeros((40, 40, 3), dtype=np.uint8), width=700)
    assert plain.width == 1200 and over.width == 700
    assert plain.height > 3 * 150 and "<img" in found._repr_html_()
    assert np.asarray(plain).std() > 5 and np.asarray(over).mean() < np.asarray(plain).mean()
    with pytest.raises(lrpfx.InputError, match="width is a number of pixels"):
        found.picture(width=10)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(9, 6), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, ids):
        return self.head(self.mix(self.embedding(ids)).relu().mean(1))


def test_features_of_tokens():
    torch.manual_seed(0)
    ids = torch.tensor([[1, 4, 2, 8]])
    explain_model = lrpfx.transform(Tokens().double().eval(), AttnLRP(), example_inputs=ids)
    found = attribution_graph(explain_model, ids, 1, layers={"mix": None, "mean": Feature}, width=7)
    heatmaps = [found.graph.nodes["mix", channel]["heatmap"] for channel in found.concepts("mix")]
    assert_close(sum(heatmaps), lrpfx.attribute(explain_model, ids, 1).relevance[0])
    assert found.picture().size[0] == 1200  # boxes, since it is not an image


def test_frames_and_edges_have_the_colours_of_their_signs():
    """From left to right: a concept with positive, one with negative, and one without relevance."""
    found = AttributionGraph(nx.DiGraph(), ("layer",))
    found.graph.add_node(TARGET, relevance=0.0, share=1.0, heatmap=None)
    for channel, relevance in enumerate([2.0, -1.0, 0.0]):
        found.graph.add_node(("layer", channel), relevance=relevance, share=0.5, heatmap=None)
        found.graph.add_edge(TARGET, ("layer", channel), relevance=relevance, share=0.5)
    picture, colors = np.asarray(found.picture(cmap="coldnhot")), colors_of("coldnhot")
    positive, negative = ((colors(np.array(one)) * 255).astype(int) for one in (0.8, -0.8))
    columns = [(picture == color).all(2).any(0).nonzero()[0] for color in (positive, negative, (210, 210, 210))]
    assert len(picture) - 40 < (picture != 255).any((1, 2)).nonzero()[0].max() < len(picture) - 5
    assert all(map(len, columns)) and columns[0].mean() < columns[1].mean() < columns[2].mean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": []}, "no layers are named"),
        ({"layers": ["ad"]}, "no node or module named 'ad'"),
        ({"channels": [6]}, "channel 6 is out of range: add has 6"),
        ({"channels": []}, "channels are one or more indices"),
        ({"channels": [1.5]}, "channels are one or more indices"),
        ({"width": 0}, "width is a number of concepts"),
        ({"width": [1, 2]}, "2 widths for 3 layers"),
        ({"width": [1, 2, 3, 4]}, "4 widths for 3 layers"),
        ({"target": 4}, "out of range"),
        ({"inputs": torch.randn(2, 3, 7, 7).double()}, "that of one sample, but the batch is 2"),
    ],
)
def test_what_is_wrong(setting, settings, message):
    explain_model, x = setting
    with pytest.raises(lrpfx.InputError, match=message):
        attribution_graph(**{"explain_model": explain_model, "inputs": x, "layers": LAYERS, **settings})


def test_layers_beside_each_other():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.one(x).relu() + self.other(x).relu())

    x = torch.randn(1, 4)
    explain_model = lrpfx.transform(Beside().eval(), EpsilonPlusFlat(), example_inputs=x)
    with pytest.raises(lrpfx.InputError, match="other does not depend on one"):
        attribution_graph(explain_model, x, layers=["one", "other"])
