"""Data sets of graphs: what is stored is what the explainer says of each."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lrpfx
import lrpfx.datasets
from lrpfx.errors import InputError, InputTypeError, LrpfxWarning


class Network(nn.Module):
    """Two sums of messages, which the features of edges add to; an output for the graph or for each node."""

    def __init__(self, of_nodes=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.edges, self.second = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 8)
        self.head, self.of_nodes = nn.Linear(8, 4), of_nodes

    def forward(self, x, edge_index, edge_attr=None, edge_weight=None, batch=None):
        source, target = edge_index
        messages = self.first(x)[source]
        if edge_attr is not None:
            messages = messages + self.edges(edge_attr)
        if edge_weight is not None:
            messages = messages * edge_weight[:, None]
        states = torch.relu(self.first(x).index_add(0, target, messages))
        states = torch.relu(states.index_add(0, target, self.second(states)[source]))
        return self.head(states if self.of_nodes else states.mean(0, keepdim=True))


class OfObject(nn.Module):
    """The same for the data as one object, and kinds of nodes in place of features."""

    def __init__(self):
        super().__init__()
        self.inner = Network()
        self.kinds = nn.Embedding(5, 3)

    def forward(self, data):
        return self.inner(self.kinds(data.x), data.edge_index, data.edge_attr)


def graph(number, nodes, edges, **further):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(nodes, 3, dtype=torch.float64, generator=generator)
    return {"x": x, "edge_index": torch.randint(nodes, (2, edges), generator=generator), "y": torch.tensor([number]), **further}


#: The first and the last have the same sizes, and one has no edge.
GRAPHS = [graph(0, 5, 7), graph(1, 3, 4), graph(2, 9, 20), graph(3, 1, 0), graph(0, 5, 7)]


def check(stored, explanations):
    """The rows of a store are what an explainer says of each graph, and 0 beyond its nodes and edges."""
    assert not stored.errors and stored.is_complete
    for number, found in enumerate(explanations):
        nodes, edges = int(stored["nodes"][number]), int(stored["edges"][number])
        assert (nodes, edges) == (len(found.positions), found.edge_index.shape[1])
        for place, answer in enumerate(found.answers):
            at = (number, place) if stored["seed"].ndim == 2 else number
            expected = {"relevance": answer.of_nodes, "messages": answer.of_messages}
            expected |= {f"relevance.{name}": one.sum(1) for name, one in answer.of_edges.items()}
            for name, values in expected.items():
                row = stored[name][at]
                np.testing.assert_allclose(row[: len(values)], values, rtol=1e-12, atol=1e-12)
                assert not row[len(values) :].any()
            np.testing.assert_allclose(stored["reached"][at], answer.balance.inputs, atol=1e-12)
            np.testing.assert_allclose(stored["seed"][at], answer.category.score)
        np.testing.assert_allclose(stored["output"][number], found.output)
        assert stored["prediction"][number] == found.output.argmax()


#: How graphs are given.
FORMS = {
    "dicts": lambda one: one,
    "objects": lambda one: SimpleNamespace(**one),
    "arrays": lambda one: {name: value.numpy() for name, value in one.items()},
    "pairs": lambda one: ({"x": one["x"], "edge_index": one["edge_index"]}, int(one["y"])),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_store_has_what_the_explainer_says(form, tmp_path):
    explainer, data = lrpfx.Explainer(Network().double().eval()), [FORMS[form](one) for one in GRAPHS]
    targets = ["predicted", "true", {2: 1.0, 0: -1.0}]
    stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", targets=targets, dtype="float64")
    assert stored["relevance"].shape == (5, 3, 9) and stored["messages"].shape == (5, 3, 20)
    assert stored["messages"].dimensions == ("sample", "target", "edge") and list(stored.labels) == [0, 1, 2, 3, 0]
    check(stored, [explainer(one, targets=[None, int(one["y"]), {2: 1.0, 0: -1.0}]) for one in GRAPHS])
    assert stored.manifest["composite"] == explainer(GRAPHS[0]).rules


def test_tuples_have_the_order_of_the_arguments(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())
    data = [(one["x"], one["edge_index"]) for one in GRAPHS]
    stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", target=1, dtype="float64")
    check(stored, explainer(GRAPHS, targets=[1]))
    assert list(stored.labels) == [-1] * 5


def with_edge_features(one):
    return {**one, "edge_attr": torch.randn(one["edge_index"].shape[1], 2, dtype=torch.float64)}


def test_features_and_weights_of_edges(tmp_path):
    weighted = [with_edge_features(one) | {"edge_weight": torch.rand(one["edge_index"].shape[1]).double()} for one in GRAPHS]
    explainer = lrpfx.Explainer(Network().double().eval())
    stored = lrpfx.datasets.attribute(explainer, weighted, tmp_path / "store", dtype="float64")
    assert stored["relevance.edge_attr"].dimensions == ("sample", "edge") and stored["relevance.edge_attr"][2].any()
    check(stored, explainer(weighted))


def test_a_model_that_takes_the_object(tmp_path):
    kinds = [with_edge_features(one) | {"x": torch.arange(len(one["x"])) % 5} for one in GRAPHS]
    data = [SimpleNamespace(**one, train_mask=None) for one in kinds]
    explainer = lrpfx.Explainer(OfObject().double().eval())
    stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", target="true", dtype="float64")
    check(stored, [explainer(one, int(one.y)) for one in data])


def test_an_explainable_module(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())
    explanations = explainer(GRAPHS)
    stored = lrpfx.datasets.attribute(explainer.explain_model, GRAPHS, tmp_path / "store", dtype="float64")
    check(stored, explanations)


def test_a_node(tmp_path):
    explainer = lrpfx.Explainer(Network(of_nodes=True).double().eval(), categories=["a", "b", "c", "d"])
    with pytest.warns(LrpfxWarning, match="1 of 5"):
        stored = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "store", target=(2, "b"), dtype="float64")
    assert list(stored.errors) == [3] and "node 2 is out of range: the graph has 1 nodes" in stored.errors[3]
    assert np.isnan(stored.relevance[3]).all() and stored["nodes"][3] == -1
    of_others = [one for number, one in enumerate(GRAPHS) if number != 3]
    stored = lrpfx.datasets.attribute(explainer, of_others, tmp_path / "others", target=(2, "b"), dtype="float64")
    check(stored, explainer(of_others, targets=[(2, "b")]))
    with pytest.raises(InputError, match="an output for each node"):
        lrpfx.datasets.attribute(explainer, of_others, tmp_path / "predicted")


def test_a_run_goes_on(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())

    def stop(done, total):
        if done >= 3:
            raise KeyboardInterrupt

    settings = {"batch_size": 1, "block_size": 2}
    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "store", progress=stop, **settings)
    assert 0 < lrpfx.datasets.open(tmp_path / "store").done.sum() < 5
    again = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "store", **settings)
    whole = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "whole")
    for name in ("relevance", "messages", "nodes", "edges", "output", "digest"):
        np.testing.assert_array_equal(again[name][:], whole[name][:])
    with pytest.raises(InputError, match="changed"):
        lrpfx.datasets.attribute(explainer, [*GRAPHS[:4], graph(5, 5, 7)], tmp_path / "store", **settings)


def test_graphs_that_fail_have_a_reason(tmp_path):
    wrong = [
        {**GRAPHS[1], "edge_index": torch.tensor([[0], [3]])},
        {"x": GRAPHS[0]["x"] * torch.nan, "edge_index": GRAPHS[0]["edge_index"]},
        {"x": GRAPHS[0]["x"], "edges": GRAPHS[0]["edge_index"]},
        {**GRAPHS[0], "x": torch.rand(5, 4)},
    ]
    explainer = lrpfx.Explainer(Network().double().eval())
    with pytest.warns(LrpfxWarning, match="4 of 9"):
        stored = lrpfx.datasets.attribute(explainer, [*GRAPHS, *wrong], tmp_path / "store", target=0, dtype="float64")
    assert list(stored.errors) == [5, 6, 7, 8]
    for number, reason in zip(range(5, 9), ("names nodes 0 to 3", "not finite", "no x and edge_index", "4"), strict=True):
        assert reason in stored.errors[number]
    assert np.isfinite(stored.relevance[:5]).all()


def test_what_graphs_do_not_have(tmp_path):
    model = Network().double().eval()
    with pytest.raises(InputTypeError, match="graphs are a list"):
        lrpfx.datasets.attribute(lrpfx.Explainer(model), iter(GRAPHS), tmp_path / "store")
    with pytest.raises(InputError, match="takes a list of graphs"):
        lrpfx.datasets.attribute(lrpfx.Explainer(OfObject()), iter(GRAPHS), tmp_path / "store")
    with pytest.raises(InputError, match="reduce="):
        lrpfx.datasets.attribute(lrpfx.Explainer(model), GRAPHS, tmp_path / "store", reduce="sum")
    with pytest.raises(InputError, match="reference="):
        lrpfx.datasets.attribute(lrpfx.Explainer(model, reference=0.0), GRAPHS, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_statistics_and_tables(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())
    stored = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "store", target=0, dtype="float64")
    expected = explainer(GRAPHS, targets=[0])
    arrays = {name: stored[name] for name in ("relevance", "messages")}
    found = lrpfx.datasets.summarize(arrays, stored.labels, seeds=stored["seed"])
    assert found.of("relevance").total == pytest.approx(np.mean([one.nodes.sum() for one in expected]))
    assert found.of("messages", 2).total == pytest.approx(expected[2].edges.sum())
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(lrpfx.datasets.write_table(stored, tmp_path / "table.parquet"))
    shares = [one.edges.sum() / one.target.score for one in expected]
    np.testing.assert_allclose(frame["share.messages"], shares)


class Branching(Network):
    def forward(self, x, edge_index):
        return super().forward(x if x.shape[0] > 4 else x * 2, edge_index)


def test_graphs_of_another_branch_have_a_reason(tmp_path):
    explainer = lrpfx.Explainer(Branching().double().eval())
    with pytest.warns(LrpfxWarning, match="2 of 5"):
        stored = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "store", target=1, dtype="float64")
    assert list(stored.errors) == [1, 3] and "the graph is valid only for size" in stored.errors[1]
    for number in (0, 2, 4):
        expected = explainer(GRAPHS[number], 1).nodes
        np.testing.assert_allclose(stored.relevance[number, : len(expected)], expected, atol=1e-12)


def test_graphs_without_edges(tmp_path):
    data = [graph(0, 3, 0), graph(1, 1, 0)]
    explainer = lrpfx.Explainer(Network().double().eval())
    for _ in range(2):
        stored = lrpfx.datasets.attribute(explainer, data, tmp_path / "store", target=1, dtype="float64")
        assert stored["messages"].shape == (2, 0) and lrpfx.datasets.verify(tmp_path / "store").is_sound
        check(stored, explainer(data, targets=[1]))


def test_conditions(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())
    explainer(GRAPHS[0])
    conditions, settings = [{"relu": list(range(4))}, {"relu": list(range(4, 8))}], {"target": 1, "dtype": "float64"}
    parts = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "parts", conditions=conditions, **settings)
    whole = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "whole", **settings)
    assert parts.relevance.dimensions == ("sample", "condition", "node")
    np.testing.assert_allclose(parts.relevance[:].sum(1), whole.relevance[:], atol=1e-12)
    np.testing.assert_allclose(parts["reached"][:], parts.relevance[:].sum(2), atol=1e-12)


def test_clusters_need_the_same_nodes(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())
    stored = lrpfx.datasets.attribute(explainer, GRAPHS, tmp_path / "store", target="true")
    with pytest.raises(InputError, match="1 to 9 nodes"):
        lrpfx.datasets.spray(stored)
    alike = lrpfx.datasets.attribute(explainer, [graph(number, 5, 7) for number in range(30)], tmp_path / "alike", target=1)
    found = lrpfx.datasets.spray(alike, labels=np.zeros(30, int), neighbors=5, clusters=(2,), embeddings=())
    assert len(found[0].clustering(2).clusters) == 2


def test_graphs_of_pytorch_geometric(tmp_path):
    """As a list, and lent by its DataLoader, whose batches are of one graph then."""
    data = pytest.importorskip("torch_geometric.data")
    loader = pytest.importorskip("torch_geometric.loader").DataLoader
    graphs = [data.Data(**one) for one in GRAPHS]
    explainer = lrpfx.Explainer(Network().double().eval())
    for number, given in enumerate((graphs, loader(graphs, batch_size=2))):
        stored = lrpfx.datasets.attribute(explainer, given, tmp_path / str(number), target="true", dtype="float64")
        check(stored, explainer(graphs, [int(one.y) for one in graphs]))


def test_processes_that_load_graphs(tmp_path):
    explainer = lrpfx.Explainer(Network().double().eval())
    loader = DataLoader(GRAPHS, batch_size=2, num_workers=1, collate_fn=lambda graphs: graphs[0])
    stored = lrpfx.datasets.attribute(explainer, loader, tmp_path / "store", target=1, dtype="float64")
    check(stored, explainer(GRAPHS, targets=[1]))
