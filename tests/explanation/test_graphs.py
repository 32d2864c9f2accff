"""Graphs through the same door: relevance of nodes, edges and walks."""

import pickle
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.errors import InputError, InputTypeError

EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 2], [1, 0, 2, 3, 2, 2, 4]])


class Layer(nn.Module):
    """The sum of what each neighbour sends, weighted by the edge, and the node's own share."""

    def __init__(self, before, after, bias=False, how="index_add"):
        super().__init__()
        self.sent, self.own = nn.Linear(before, after, bias=False), nn.Linear(before, after, bias=bias)
        self.how = how

    def forward(self, x, edge_index, edge_weight=None):
        source, target = edge_index
        messages = self.sent(x)[source]
        if edge_weight is not None:
            messages = messages * edge_weight[:, None]
        empty, index = torch.zeros(len(x), messages.shape[1], dtype=x.dtype), target[:, None].expand_as(messages)
        if self.how == "index_add":
            return self.own(x) + empty.index_add(0, target, messages)
        if self.how == "scatter_add":
            return self.own(x) + empty.scatter_add(0, index, messages)
        return self.own(x) + empty.scatter_reduce(0, index, messages, self.how, include_self=False)


class Network(nn.Module):
    def __init__(self, of_nodes=False, activation=nn.ReLU, how="index_add"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Layer(3, 8, how=how), Layer(8, 8, how=how)
        self.activation, self.head, self.of_nodes = activation(), nn.Linear(8, 4, bias=False), of_nodes

    def forward(self, x, edge_index, edge_weight=None, batch=None):
        states = self.activation(self.first(x, edge_index, edge_weight))
        states = self.activation(self.second(states, edge_index, edge_weight))
        return self.head(states if self.of_nodes else states.mean(0, keepdim=True))


def graph(**further):
    torch.manual_seed(1)
    return SimpleNamespace(x=torch.randn(5, 3, dtype=torch.float64), edge_index=EDGES, y=torch.tensor([1]), **further)


def dense(layer, weights):
    """What the states of a node contribute to those of another along an edge or by staying: (to, from, after, before)."""
    steps = torch.zeros(5, 5, *layer.own.weight.shape, dtype=torch.float64)
    for (source, target), weight in zip(EDGES.T.tolist(), weights.tolist(), strict=True):
        steps[target, source] += weight * layer.sent.weight.detach()
    for node in range(5):
        steps[node, node] += layer.own.weight.detach()
    return steps


@pytest.mark.parametrize("how", ["index_add", "scatter_add"])
def test_walks_and_edges_of_a_linear_network_are_its_products(how):
    network = Network(activation=nn.Identity, how=how).double().eval()
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, -1.0, 0.3, 0.7], dtype=torch.float64)
    data = graph(edge_weight=weights)
    found = lrpfx.explain(network, data, 2, composite=AttnLRP())
    first, second = dense(network.first, weights), dense(network.second, weights)
    expected = torch.einsum(
        "h,wvhj,vuji,ui->uvw", network.head.weight[2].detach() / 5, second, first, data.x
    )  # of walks u → v → w
    walks = {walk.nodes: walk.relevance for walk in found.walks(None)}
    for nodes, relevance in walks.items():
        assert relevance == pytest.approx(float(expected[nodes]), abs=1e-9)
    assert sum(walks.values()) == pytest.approx(float(expected.sum()), abs=1e-9)
    np.testing.assert_allclose(found.nodes, expected.sum((1, 2)), atol=1e-9)
    assert found.balance.share == pytest.approx(1.0, abs=1e-9)
    sources, targets = EDGES
    np.testing.assert_allclose(found.layers_of_edges[0], expected.sum(2)[sources, targets], atol=1e-9)
    np.testing.assert_allclose(found.layers_of_edges[1], expected.sum(0)[sources, targets], atol=1e-9)


@pytest.mark.parametrize("how", ["index_add", "mean", "amax"])
def test_walks_from_a_node_add_up_to_it(how):
    found = lrpfx.explain(Network(how=how).double().eval(), graph(), targets=[0, 3])
    total = np.zeros(5)
    walks = found.walks(None)
    for walk in walks:
        total[walk.nodes[0]] += walk.relevance
    np.testing.assert_allclose(total, found.nodes, atol=1e-9)
    assert [abs(one.relevance) for one in walks] == sorted([abs(one.relevance) for one in walks], reverse=True)
    assert found.walks(2) == walks[:2] and len(found.answers) == 2


def test_a_node(tmp_path):
    network = Network(of_nodes=True).double().eval()
    explainer = lrpfx.Explainer(network, categories=["a", "b", "c", "d"])
    found = explainer(graph(), (4, "c"))
    assert found.node == 4 and found.target.name == "c" and set(np.nonzero(found.nodes)[0]) == {1, 2, 3, 4}
    with torch.no_grad():
        assert found.target.score == pytest.approx(float(network(graph().x, EDGES)[4, 2]))
    assert all(walk.nodes[-1] == 4 for walk in found.walks(None) if walk.relevance)
    assert explainer(graph(), (-1, None)).node == 4
    both = explainer([graph(), graph()], [(4, 2), (0, 1)])
    assert [one.node for one in both] == [4, 0] and len(both.save(tmp_path / "graphs")) == 2
    np.testing.assert_array_equal(both[0].edges, found.edges)


def test_further_graphs_need_no_compilation():
    explainer = lrpfx.Explainer(Network().double().eval())
    explainer(graph(), 1)
    compiled = explainer.explain_model
    data = {
        "x": torch.randn(9, 3, dtype=torch.float64),
        "edge_index": torch.tensor([[0, 8, 8, 3], [8, 0, 3, 8]]),
        "batch": None,
    }
    found = explainer(data, 1)
    assert explainer.explain_model is compiled and found.nodes.shape == (9,) and found.edges.shape == (4,)


def test_graphs_that_are_views_of_a_batch():
    """A batch of PyTorch Geometric holds its graphs as parts of one tensor each."""
    x, edges = torch.randn(7, 3, dtype=torch.float64), torch.tensor([[0, 8, 8, 3, 0], [8, 0, 3, 8, 1]]) % 5
    parts = [{"x": x[:5], "edge_index": edges[:, :4]}, {"x": x[5:], "edge_index": edges[:, 4:]}]
    model = Network().double().eval()
    found = lrpfx.explain(model, parts, 1)
    for one, part in zip(found, parts, strict=True):
        alone = lrpfx.explain(model, {name: value.clone() for name, value in part.items()}, 1)
        np.testing.assert_allclose(one.edges, alone.edges, atol=1e-12)


class OfObjects(nn.Module):
    """Takes a graph as one object, and has loops to itself as layers of PyTorch Geometric add them."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, data):
        loops = torch.arange(data.num_nodes).expand(2, -1)
        return self.network(data.x, torch.cat([data.edge_index, loops], 1), batch=data.batch)


def test_a_model_of_objects_is_explained_again():
    """Another call, for a graph with other inputs, compiles the model anew."""
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(OfObjects(Network()).double().eval())
    first = explainer(graph(), 2)
    explainer(graph(pos=torch.rand(5, 2, dtype=torch.float64)), 2)
    np.testing.assert_allclose(explainer(graph(), 2).nodes, first.nodes, atol=1e-12)


def test_models_of_objects_and_loops():
    network = Network(activation=nn.Identity).double().eval()
    found = lrpfx.explain(OfObjects(network).eval(), graph(), 2, composite=AttnLRP())
    loops = torch.cat([EDGES, torch.arange(5).expand(2, -1)], 1)
    with_loops = SimpleNamespace(x=graph().x, edge_index=loops)
    expected = lrpfx.explain(network, with_loops, 2, composite=AttnLRP())
    np.testing.assert_allclose(found.layers_of_edges, expected.layers_of_edges[:, : EDGES.shape[1]], atol=1e-12)
    np.testing.assert_allclose(found.nodes, expected.nodes, atol=1e-12)


class WithFeatures(nn.Module):
    """Kinds of nodes by an embedding, and features of edges in each message."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kinds, self.of_edges, self.head = nn.Embedding(4, 6), nn.Linear(2, 6), nn.Linear(6, 2)

    def forward(self, x, edge_index, edge_attr, batch):
        states = self.kinds(x).squeeze(1)
        for _ in range(2):
            messages = torch.relu(states[edge_index[0]] + self.of_edges(edge_attr))
            states = states + torch.zeros_like(states).index_add(0, edge_index[1], messages)
        return self.head(states.mean(0, keepdim=True))


def test_kinds_of_nodes_and_features_of_edges():
    data = {"x": torch.tensor([[0], [1], [2], [3], [0]]), "edge_index": EDGES, "edge_attr": torch.rand(7, 2)}
    found = lrpfx.explain(WithFeatures().eval(), data, 1, composite="AttnLRP")
    assert found.edge_features["edge_attr"].shape == (7,) and found.nodes.shape == (5,)
    total = found.nodes.sum() + found.edge_features["edge_attr"].sum()
    assert found.balance.inputs == pytest.approx(total, rel=1e-5)
    walks = found.walks(None)
    assert sum(walk.relevance for walk in walks) == pytest.approx(found.nodes.sum(), rel=1e-4)


def test_pictures_and_data(tmp_path):
    found = lrpfx.explain(Network().double().eval(), graph(), 1)
    assert found.heatmap((300, 200)).size == (300, 200) and found.save(tmp_path / "graph.png").exists()
    with np.load(found.save(tmp_path / "graph.npz")) as arrays:
        np.testing.assert_array_equal(arrays["edges"], found.edges)
    both = lrpfx.explain(Network().double().eval(), graph(), targets=[0, 1])
    with np.load(both.save(tmp_path / "both.npz")) as arrays:
        assert arrays["nodes"].shape == (2, 5) and arrays["edges"].shape == (2, 7) and arrays["edge_index"].shape == (2, 7)
        np.testing.assert_array_equal(arrays["edges"], [one.of_messages for one in both.answers])
        assert list(arrays["targets"]) == ["0", "1"]
    drawn = found.to_networkx()
    assert drawn.number_of_edges() == 7 and drawn.edges[1, 2]["relevance"] == found.edges[2]
    assert "graph 1" in found._repr_html_() and len(found.to_pandas()) == 1
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    with pytest.raises(InputError, match="copy"):
        copy.walks()


class Reading(nn.Module):
    """Its output reads the states of both layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Layer(3, 8), Layer(8, 8), nn.Linear(16, 2)

    def forward(self, x, edge_index):
        states = torch.relu(self.first(x, edge_index))
        pooled = [one.mean(0, keepdim=True) for one in (states, torch.relu(self.second(states, edge_index)))]
        return self.head(torch.cat(pooled, 1))


def test_errors():
    network, of_nodes = Network().double().eval(), Network(of_nodes=True).double().eval()
    for model, data, target in (
        (of_nodes, graph(), 1),
        (of_nodes, graph(), (9, 1)),
        (network, graph(), (1, 1)),
        (network, {"x": graph().x, "edge_index": EDGES.T}, 1),
        (network, {"x": graph().x[:3], "edge_index": EDGES}, 1),
        (network, {"x": graph().x, "edge_index": EDGES, "batch": torch.tensor([0, 0, 0, 1, 1])}, 1),
        (WithFeatures().eval(), {"x": torch.zeros(5, 1).long(), "edge_index": EDGES}, 1),
        (nn.Bilinear(3, 3, 2).eval(), graph(), 1),
    ):
        with pytest.raises(InputError) as raised:
            lrpfx.explain(model, data, target)
        assert raised.value.topic == "graph-networks"
    two = [graph(), graph()]  # for which a tuple is a class each
    with pytest.raises(InputError, match=r"targets=\[\(node, class\)\]"):
        lrpfx.explain(of_nodes, two, (2, 1))
    assert len(lrpfx.explain(of_nodes, two, targets=[(2, 1)])) == 2
    arguments = {"x": two[0].x, "edge_index": EDGES}
    explain_model = lrpfx.transform(of_nodes, lrpfx.composites.AttnLRP(), arguments)
    with pytest.raises(InputError, match=r"output\[node : node \+ 1\]"):
        lrpfx.attribute(explain_model, arguments, (2, 1))
    chosen = lrpfx.attribute(explain_model, arguments, 1, output=lambda output: output[2:3])
    assert chosen.output.tolist() == of_nodes(**arguments)[2:3].tolist() and chosen.relevance["x"].any()
    with pytest.raises(InputTypeError):
        lrpfx.explain(network, {"x": [[1.0]], "edge_index": EDGES}, 1)
    with pytest.raises(InputError, match="no walks"):
        lrpfx.explain(Reading().double().eval(), graph(), 1).walks()
    with pytest.raises(InputError, match="more than 3"):
        lrpfx.explain(network, graph(), 1).walks(limit=3)


def motif(is_there):
    """A random tree with a ring of three nodes, 15 to 17, which are of the kinds 0, 1 and 2, or not."""
    edges = [(node, int(torch.randint(node, ()))) for node in range(1, 15)]
    edges += [(15, 16), (16, 17), (17, 15), (15 + int(torch.randint(3, ())), int(torch.randint(15, ())))]
    kinds = torch.randint(6, (18,))
    kinds[15:] = torch.arange(3)
    if not is_there:
        kinds[15 + int(torch.randint(3, ()))] = 3 + int(torch.randint(3, ()))
    forth = torch.tensor(edges).T
    return SimpleNamespace(x=torch.eye(6)[kinds], edge_index=torch.cat([forth, forth.flip(0)], 1))


def layers_of_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    return {
        "GCN": geometric.GCNConv,
        "GAT": lambda before, after: geometric.GATConv(before, after // 4, heads=4),
        "GIN": lambda before, after: geometric.GINConv(
            nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after))
        ),
        "SAGE": geometric.SAGEConv,
    }


class OfTorchGeometric(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second, self.head = layer(6, 32), layer(32, 32), nn.Linear(32, 2)

    def forward(self, x, edge_index):
        states = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        return self.head(states.unflatten(0, (-1, 18)).mean(1) if len(states) % 18 == 0 else states.mean(0, keepdim=True))


def trained(layer, steps=300):
    """The network, trained on graphs of 18 nodes each."""
    torch.manual_seed(0)
    model, graphs = OfTorchGeometric(layer).float(), [motif(number % 2 == 0) for number in range(400)]
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(steps):
        places = torch.randperm(400)[:48].tolist()
        edges = torch.cat([graphs[place].edge_index + 18 * number for number, place in enumerate(places)], 1)
        output = model(torch.cat([graphs[place].x for place in places]), edges)
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, torch.tensor(places) % 2).backward()
        optimizer.step()
    return model.eval()


def gradient_times_messages(model, data):
    """Of each edge, in both layers."""
    kept = []
    hooks = [
        layer.register_message_forward_hook(lambda layer, given, messages: kept.append(messages))
        for layer in (model.first, model.second)
    ]
    output = model(data.x.clone().requires_grad_(), data.edge_index)[0, 0]
    products = [one * gradient for one, gradient in zip(kept, torch.autograd.grad(output, kept), strict=True)]
    for hook in hooks:
        hook.remove()
    return sum(one.flatten(1).sum(1)[: data.edge_index.shape[1]] for one in products).detach().numpy()


@pytest.mark.parametrize("shared", [False, True])
def test_messages_of_several_stacks_of_features(shared):
    """Messages (stacks, edges, features): without rules that are not linear, their relevance is gradient times message."""
    layers = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    settings = {"num_stacks": 2, "num_layers": 2, "shared_weights": shared, "act": None, "bias": False}

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = layers.ARMAConv(3, 4, **settings), nn.Linear(4, 2, bias=False)
            self.second = layers.ARMAConv(4, 4, **settings)

        def forward(self, x, edge_index):
            return self.head(self.second(self.first(x, edge_index), edge_index).mean(0, keepdim=True))

    model = Stacked().double().eval()
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
    x = torch.randn(6, 3, dtype=torch.float64)
    found = lrpfx.explain(model, (x, edges), 0, composite=lrpfx.composites.AttnLRP())
    kept = []
    for layer in (model.first, model.second):
        layer.register_message_forward_hook(lambda layer, given, messages: kept.append(messages))
    gradients = torch.autograd.grad(model(x.requires_grad_(), edges)[0, 0], kept)
    expected = [(one * slope).sum((0, 2)).detach() for one, slope in zip(kept, gradients, strict=True)]
    np.testing.assert_allclose(found.layers_of_edges, torch.stack(expected), rtol=1e-4, atol=1e-8)


def area_under_curve(scores, wanted):
    higher, others = scores[wanted][:, None], scores[~wanted]
    return (higher > others).mean() + (higher == others).mean() / 2


@pytest.mark.parametrize(
    ("name", "least", "ahead"), [("GCN", 0.95, 0.0), ("GAT", 0.9, -0.04), ("GIN", 0.95, 0.0), ("SAGE", 0.95, 0.0)]
)
def test_edges_of_a_planted_motif_are_found(name, least, ahead):
    """Better than by the gradient times the messages, but for attention, where it is ahead."""
    torch.set_default_dtype(torch.float32)
    model = trained(layers_of_torch_geometric()[name])
    graphs = [motif(True) for _ in range(30)]
    explainer = lrpfx.Explainer(model)
    found = explainer(graphs, 0)
    rings = [(one.edge_index > 14).all(0).numpy() for one in graphs]
    areas = [
        np.mean([area_under_curve(one, ring) for one, ring in zip(some, rings, strict=True)])
        for some in ([one.edges for one in found], [gradient_times_messages(model, one) for one in graphs])
    ]
    assert areas[0] >= least and areas[0] >= areas[1] + ahead, areas
    for one in found[:3]:
        total = np.zeros(18)
        for walk in one.walks(None):
            total[walk.nodes[0]] += walk.relevance
        np.testing.assert_allclose(total, one.nodes, rtol=1e-4, atol=1e-4)


def ring_of(count):
    forth = torch.stack([torch.arange(count), (torch.arange(count) + 1) % count])
    return {"x": torch.randn(count, 6), "edge_index": torch.cat([forth, forth.flip(0)], 1)}


@pytest.mark.parametrize("name", ["GCN", pytest.param("GAT", marks=pytest.mark.thorough), "GIN", "SAGE"])
def test_graphs_of_other_sizes_and_programs(name, tmp_path):
    """Smaller graphs than the first, too: what is captured does not depend on the numbers of nodes that edges name."""
    model = OfTorchGeometric(layers_of_torch_geometric()[name]).double().eval()
    explainer = lrpfx.Explainer(model)
    explainer(ring_of(20), 1)
    compiled = explainer.explain_model
    for count in (5, 2, 31):
        data = ring_of(count)
        found, alone = explainer(data, 1), lrpfx.explain(model, data, 1)
        np.testing.assert_allclose(found.answers[0].input_relevance, alone.answers[0].input_relevance, atol=1e-9)
        np.testing.assert_allclose(found.layers_of_edges, alone.layers_of_edges, atol=1e-9)
    assert explainer.explain_model is compiled
    program = lrpfx.lower(compiled, ring_of(6))
    runner = lrpfx.load(lrpfx.save(program, tmp_path / "graphs.pt2"))
    of_one_size = lrpfx.lower(compiled, ring_of(31), dynamic_batch=False)
    for count, edges in ((31, 62), (3, 4), (2, 1), (1, 1)):
        other = {"x": torch.randn(count, 6), "edge_index": torch.randint(count, (2, edges))}
        expected = lrpfx.attribute(compiled, other, 1).relevance["x"]
        for run in (runner, program.module(), *[of_one_size.module()] * (count == 31)):
            torch.testing.assert_close(run(*other.values(), torch.tensor([1]))["relevance"], expected, rtol=0, atol=1e-9)
    if name in ("GCN", "GAT"):
        with pytest.raises(lrpfx.LoweringError, match=r"depends on the data, from first\.index"):
            lrpfx.save(program, tmp_path / "graphs.onnx")
    with pytest.raises(InputError, match="x is empty"):
        runner(torch.randn(0, 6), torch.zeros(2, 0).long(), torch.tensor([1]))


def test_layers():
    """The nodes after each sum of messages have the relevance that `attribute` records, whose share stands beside them."""
    model = OfTorchGeometric(layers_of_torch_geometric()["GCN"]).double().eval()
    data = ring_of(5)
    found, recorded = lrpfx.explain(model, data, 1), lrpfx.explain(model, data, 1, record=["relu"])
    picture = found.layers()
    assert picture.width > 1000 and (np.asarray(picture) != 255).any()
    kept = recorded.layers()
    assert (np.asarray(kept) == np.asarray(found.layers(["relu"]))).all() and kept.size != picture.size
    with pytest.raises(InputError, match=r"not \(5 nodes, features\)"):
        found.layers(["head"])
    with pytest.raises(InputError, match="a copy without the model"):
        pickle.loads(pickle.dumps(found)).layers()


def test_arrays_and_precision_of_the_data():
    """NumPy, also of features of edges, and other precision than that of the model."""
    network = WithFeatures().float().eval()
    data = {"x": np.array([[0], [1], [2], [3], [0]]), "edge_index": EDGES.numpy(), "edge_attr": np.random.rand(7, 2)}
    found = lrpfx.explain(network, data, 1, composite="AttnLRP")
    assert found.edge_features["edge_attr"].shape == (7,)


class OfMatrix(nn.Module):
    """Takes the edges as a matrix."""

    def __init__(self, dim):
        super().__init__()
        self.sent, self.head, self.dim = nn.Linear(3, 4), nn.Linear(4, 2), dim

    def forward(self, x, adj):
        return self.head((adj @ self.sent(x).relu()).mean(self.dim, keepdim=not self.dim))


def test_graphs_without_edges():
    """Nodes are explained by themselves, one node and edges to itself alike, and graphs with edges come before and after."""
    network = Network().double().eval()
    x, none = torch.randn(4, 3, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.long)
    dense = nn.Sequential(network.first.own, nn.ReLU(), network.second.own, nn.ReLU(), network.head)
    explain_dense = lrpfx.transform(dense, AttnLRP())
    of_each = lrpfx.attribute(explain_dense, x, lambda output: (output * (torch.arange(4) == 2)) / 4).relevance
    explainer = lrpfx.Explainer(network, composite=AttnLRP())
    for _ in range(2):
        found = explainer({"x": x, "edge_index": none}, 2)
        np.testing.assert_allclose(found.answers[0].input_relevance, of_each, atol=1e-9)
        assert found.edges.shape == (0,) and found.sheet() and found.layers() and not abs(found.ledger.unexplained) > 1e-9
        one = explainer({"x": x[:1], "edge_index": none}, 2)
        assert one.nodes.sum() == pytest.approx(float(dense(x[:1])[0, 2]), abs=1e-5)
        assert one.sheet() and len(one.to_networkx()) == 1
        explainer(graph(), 2)
    loop = explainer({"x": x[:1], "edge_index": torch.zeros(2, 1, dtype=torch.long)}, 2)
    assert loop.edges.tolist() == [0.0] and loop.nodes[0] == pytest.approx(loop.target.score, abs=1e-4)
    both = explainer([{"x": x, "edge_index": none}, graph()], 2)
    np.testing.assert_allclose(both[1].edges, explainer(graph(), 2).edges)
    with pytest.raises(InputError, match="no nodes"):
        explainer({"x": x[:0], "edge_index": none}, 2)


@pytest.mark.parametrize("name", ["GCN", pytest.param("GAT", marks=pytest.mark.thorough), "GIN", "SAGE"])
def test_layers_of_torch_geometric_without_edges(name):
    model = OfTorchGeometric(layers_of_torch_geometric()[name]).double().eval()
    explainer, none = lrpfx.Explainer(model), torch.zeros(2, 0, dtype=torch.long)
    x = torch.randn(3, 6, dtype=torch.float64)
    first, after = explainer({"x": x, "edge_index": none}, 1), explainer(ring_of(5), 1)
    np.testing.assert_allclose(first.output, model(x, none)[0].detach(), atol=1e-9)
    assert first.edges.shape == (0,) and abs(first.ledger.unexplained) < 1e-9 and after.edges.any()
    alone = lrpfx.Explainer(model)
    data = ring_of(5)
    np.testing.assert_allclose(alone(data, 1).edges, explainer(data, 1).edges, atol=1e-9)
    np.testing.assert_allclose(alone({"x": x, "edge_index": none}, 1).nodes, first.nodes, atol=1e-9)


def test_other_forms_of_graphs_are_named():
    network, x = Network().eval(), torch.randn(4, 3)
    matrix = torch.eye(4) + torch.eye(4).roll(1, 0)
    several = SimpleNamespace(x_dict={"a": x}, edge_index_dict={("a", "to", "a"): EDGES})
    for model, given, message in [
        (network, {"x": x, "edge_index": matrix}, r"adj\.nonzero"),
        (network, {"x": x, "edge_index": None, "adj_t": matrix}, "adj_t"),
        (network, several, r"x_dict.*lrpfx\.attribute|lrpfx\.attribute.*x_dict"),
        (network, vars(several), "not 'x_dict'|holds several tensors"),
        (network, nx.path_graph(4), "from_networkx"),
        (OfMatrix(1), {"x": x, "edge_index": None, "adj": matrix}, "several inputs"),
        (OfMatrix(0), {"x": x, "adj": matrix}, r"x\[None\] and adj\[None\].*lrpfx\.attribute"),
        (OfMatrix(1), {"x": x[None], "adj": matrix[None].to_sparse()}, r"to_dense\(\)"),
    ]:
        with pytest.raises((InputError, InputTypeError), match=message):
            lrpfx.explain(model.eval(), given, 1)
    composite = AttnLRP()
    both = lrpfx.explain(OfMatrix(1).eval(), {"x": x[None], "adj": matrix[None]}, 1, composite=composite)
    assert set(both.shares) == {"x", "adj"}
    model = OfMatrix(0).eval()
    module = lrpfx.transform(model, composite, example_inputs={"x": x, "adj": matrix})
    assert lrpfx.attribute(module, {"x": x, "adj": matrix}, 1).relevance["x"].shape == x.shape
