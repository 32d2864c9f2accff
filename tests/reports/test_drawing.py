"""Pictures of the rule graph."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import graphviz
import networkx as nx
import pytest
import torch
from helpers import Layered, Unary, small_net, torchvision_model
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat, GuidedBackprop, LayerMapComposite
from lrpfx.reports import drawing


def node_statement(source, name):
    """The statement of a node in the DOT language."""
    (statement,) = re.findall(rf'^\t*"?node_{re.escape(name)}"? (\[.*?\])$', source, re.DOTALL | re.MULTILINE)
    return statement


@pytest.fixture
def explain_model():
    return lrpfx.transform(small_net(), EpsilonPlusFlat(), example_inputs=torch.randn(2, 3, 8, 8))


def test_networkx(explain_model):
    graph = lrpfx.to_networkx(explain_model)
    assert isinstance(graph, nx.MultiDiGraph) and nx.is_directed_acyclic_graph(graph)
    assert list(graph)[:-1] == lrpfx.node_names(explain_model) and list(graph)[-1] == "output"
    assert set(graph.predecessors("add")) == {"conv2", "relu"}
    assert graph.nodes["conv1"]["rule"] == "Flat(stabilizer=1e-06)" and graph.nodes["conv1"]["shape"] == (2, 6, 8, 8)
    assert graph.edges["conv1", "relu", 0]["shape"] == (2, 6, 8, 8)
    assert nx.has_path(graph, "x", "output")


def test_a_value_used_twice_by_one_node_has_two_edges():
    graph = lrpfx.to_networkx(lrpfx.transform(Unary(lambda x: torch.cat([x.relu()] * 2)), EpsilonPlus()))
    assert graph.number_of_edges("relu", "cat") == 2


def clashing(module_name, argument, layer):
    """A transformed model with a module and an argument of these names."""

    class Clashing(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(module_name, layer())
            self.head = nn.Linear(4, 3)

    class OfX(Clashing):
        def forward(self, x):
            return self.head(getattr(self, module_name)(x).relu() + x)

    class OfFeatures(Clashing):
        def forward(self, features):
            return self.head(getattr(self, module_name)(features).relu() + features)

    class OfOutput(Clashing):
        def forward(self, output):
            return self.head(getattr(self, module_name)(output).relu() + output)

    model = {"x": OfX, "features": OfFeatures, "output": OfOutput}[argument]()
    x = torch.rand(1, 4)
    return lrpfx.transform(model.eval(), EpsilonPlus(), example_inputs=x), x


@pytest.mark.parametrize(
    ("module_name", "argument", "inputs", "end"),
    [
        ("output", "x", "x", "output (output)"),
        ("features", "features", "features (input)", "output"),
        ("features", "output", "output", "output (output)"),
        ("output", "output", "output (input)", "output (output)"),
    ],
)
@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
def test_ends_are_told_apart_from_modules_of_their_name(module_name, argument, inputs, end, layer):
    explain_model, x = clashing(module_name, argument, layer)
    graph, accounts = lrpfx.to_networkx(explain_model), lrpfx.ledger(explain_model, x, 0)
    assert nx.is_directed_acyclic_graph(graph) and len(graph) == len(lrpfx.node_names(explain_model)) + 1
    assert [name for name in graph if graph.in_degree(name) == 0] == [inputs]
    assert [name for name in graph if graph.out_degree(name) == 0] == [end]
    assert (graph.nodes[inputs]["name"], graph.nodes[inputs]["kind"]) == (argument, "input")
    assert (graph.nodes[end]["name"], graph.nodes[end]["kind"]) == ("output", "output")
    assert set(accounts.flows) == set(graph.edges())
    arrived = {name: sum(flow for (source, _), flow in accounts.flows.items() if source == name) for name in graph}
    assert arrived.pop(end) == 0 and arrived.pop(inputs) == pytest.approx(accounts.inputs[argument], abs=1e-6)
    assert arrived == pytest.approx({entry.name: entry.relevance_in for entry in accounts}, abs=1e-6)
    assert accounts.inputs == pytest.approx({argument: float(lrpfx.attribute(explain_model, x, 0).relevance.sum())}, abs=1e-6)
    for depth in (None, 1):
        source = lrpfx.draw(explain_model, depth=depth, ledger=accounts).source
        pairs = re.findall(r'^\t*"?(node_[^"]*?)"? -> "?(node_[^"]*?)"? \[', source, re.MULTILINE)
        assert len(set(pairs)) == len(pairs) and not any(one == other for one, other in pairs)


def test_an_embedding_and_an_input_of_its_name_have_accounts_of_their_own():
    class Net(Layered):
        def forward(self, ids, words):
            return self.out((self.words(ids) + words).mean(1))

    inputs = {"ids": torch.tensor([[1, 2]]), "words": torch.rand(1, 2, 4)}
    explain_model = lrpfx.transform(Net(words=nn.Embedding(5, 4), out=nn.Linear(4, 3)), EpsilonPlus(), example_inputs=inputs)
    accounts, relevance = lrpfx.ledger(explain_model, inputs, 0), lrpfx.attribute(explain_model, inputs, 0).relevance
    assert accounts.inputs == pytest.approx(
        {"words": float(relevance["ids"].sum()), "words (input)": float(relevance["words"].sum())}, abs=1e-6
    )
    assert accounts.flows["words (input)", "add"] == pytest.approx(float(relevance["words"].sum()), abs=1e-6)
    assert abs(accounts.balance) < 1e-6


def test_names_with_colons_have_nodes_of_their_own():
    model = nn.Sequential()
    for name in ("a:b", "a_b", "a%3Ab"):
        model.add_module(name, nn.Linear(3, 3))
    source = lrpfx.draw(lrpfx.transform(model.eval(), EpsilonPlus())).source
    assert len(set(re.findall(r'"?(node_a[^" ]*)"? \[', source))) == 3


def test_every_node_is_coloured_by_its_rule(explain_model):
    picture = lrpfx.draw(explain_model)
    assert isinstance(picture, graphviz.Digraph)
    for name in lrpfx.node_names(explain_model):
        statement = node_statement(picture.source, name)
        rule = lrpfx.assignment(explain_model).rule_of(name).partition("(")[0]
        color = {"neutral": drawing.NEUTRAL_COLOR, "input": drawing.END_COLOR}.get(rule) or drawing.RULE_COLORS[rule]
        assert f'fillcolor="{color}"' in statement
    assert "2×6×8×8" in picture.source
    for rule in ("Flat(stabilizer=1e-06)", "Epsilon(epsilon=1e-06)", "neutral: its gradient is its relevance"):
        assert rule in picture.source
    assert "cluster_legend" not in lrpfx.draw(explain_model, legend=False).source


def test_nodes_without_a_rule_are_red():
    source = lrpfx.draw(lrpfx.transform(small_net(), GuidedBackprop())).source
    assert source.count(drawing.UNASSIGNED_COLOR) == 8  # seven nodes and the legend
    assert "no rule: plain gradient" in source
    collapsed = lrpfx.draw(lrpfx.transform(torchvision_model("resnet18"), GuidedBackprop()), depth=1).source
    assert drawing.UNASSIGNED_COLOR in node_statement(collapsed, "layer1")


def test_rules_of_ones_own_get_a_colour():
    class Mine(lrpfx.rules.Epsilon):
        pass

    model = nn.Sequential(nn.Linear(3, 2)).eval()
    source = lrpfx.draw(lrpfx.transform(model, LayerMapComposite([(nn.Linear, Mine())]))).source
    assert drawing.SPARE_COLORS[0] in source and "Mine(epsilon=1e-06)" in source


def test_clusters_and_depth():
    explain_model = lrpfx.transform(torchvision_model("resnet18"), EpsilonPlus())
    full = lrpfx.draw(explain_model).source
    for name in ("layer1", "layer1.0", "layer2.0.downsample"):
        assert f"cluster_{name}" in full
    one, two = lrpfx.draw(explain_model, depth=1).source, lrpfx.draw(explain_model, depth=2).source
    assert "cluster_layer1" not in one and "node_layer1 [" in one and "20 nodes" not in one and "10 nodes" in one
    assert "cluster_layer1" in two and '"node_layer1.0" [' in two and "layer1.0.conv1" not in two
    assert "Norm, Pass, ZPlus" in one


@pytest.mark.parametrize("with_dot", [False, True])
def test_rendering(explain_model, tmp_path, monkeypatch, with_dot):
    """With Graphviz's program where it is installed, and with pygraphviz where it is not."""
    if not with_dot:
        monkeypatch.setattr(drawing.shutil, "which", lambda program: None)
    picture = lrpfx.draw(explain_model)
    path = picture.render(tmp_path / "graph", format="svg", cleanup=True)
    assert [file.name for file in tmp_path.iterdir()] == ["graph.svg"] and path.endswith("graph.svg")
    text = "".join(ElementTree.parse(path).getroot().itertext())
    assert all(name in text for name in ("conv1", "Epsilon", "rules"))
    outfile = tmp_path / "picture.png"
    picture.render(outfile=outfile)
    assert outfile.read_bytes().startswith(b"\x89PNG")
    assert picture.pipe(format="svg", encoding="utf-8").lstrip().startswith("<?xml")
    assert picture._repr_mimebundle_()["image/svg+xml"]


def test_rendering_without_any_graphviz(explain_model, monkeypatch):
    monkeypatch.setattr(drawing.shutil, "which", lambda program: None)
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(lrpfx.LrpfxError, match=r"pip install 'lrpfx\[draw\]'"):
        lrpfx.draw(explain_model).pipe("svg")
