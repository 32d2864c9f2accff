"""Graphs of latents against products of weights, sums of values, and the paths of ordinary relevance."""

import json

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import CPLRP
from lrpfx.concepts import LatentNode, latent_graph
from lrpfx.errors import InputError, InputTypeError

TOKENS, WIDTH, LATENTS = 11, 6, 9
IDS = torch.tensor([[3, 1, 4, 1, 5]])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, attends):
        super().__init__()
        self.attention = Attention() if attends else None
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x):
        if self.attention is not None:
            x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, attends=True, layers=3):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(attends) for _ in range(layers))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_transcoders(attends=True, reads="mlp"):
    torch.manual_seed(0)
    model = Decoder(attends).double().eval()
    coders = []
    for number in range(len(model.layers)):
        encoder = nn.Sequential(nn.Linear(WIDTH, LATENTS, bias=False), nn.ReLU()).double()
        coders.append((encoder, nn.Linear(LATENTS, WIDTH, bias=False).double()))
        place = f"layers.{number}.mlp"
        model = lrpfx.dictionary(model, place, *coders[-1], reads=f"layers.{number}.{reads}")
    return lrpfx.transform(model, CPLRP(), IDS), model, coders


@pytest.fixture(scope="module")
def decoder():
    explain_model, model, _ = with_transcoders()
    return explain_model, model, latent_graph(explain_model, IDS, 3, latents=1000)


def into(graph, node):
    return sum(data["weight"] for _, _, data in graph.in_edges(node, data=True))


def test_weights_into_a_node_sum_to_its_value(decoder):
    _, model, found = decoder
    graph = found.graph
    assert sum(node.kind == "logit" for node in graph) == 3
    for node, data in graph.nodes(data=True):
        if node.kind in ("latent", "logit"):
            assert into(graph, node) == pytest.approx(data["value"], rel=1e-9, abs=1e-12)
    logits = model(IDS)[0, -1]
    for node in (one for one in graph if one.kind == "logit"):
        assert graph.nodes[node]["value"] == pytest.approx(float(logits[node.index]))
        assert found.probabilities[node.index] == pytest.approx(float(logits.softmax(-1)[node.index]))


def test_paths_sum_to_the_relevance_of_latents(decoder):
    """What reaches a latent along all paths is its relevance in an ordinary pass."""
    explain_model, _, found = decoder
    graph = found.graph
    target = next(node for node in graph if node.kind == "logit")
    names = {place: f"{place}.dictionary.encoder" for place in found.places}
    expected = lrpfx.attribute(explain_model, IDS, (-1, target.index), record=list(names.values()))
    arrived = dict.fromkeys(graph, 0.0)
    arrived[target] = graph.nodes[target]["value"]
    for node in reversed(list(nx.topological_sort(graph))):
        if node.kind in ("latent", "logit") and arrived[node]:
            for source, _, data in graph.in_edges(node, data=True):
                arrived[source] += arrived[node] * data["weight"] / graph.nodes[node]["value"]
    for node in graph:
        if node.kind == "latent":
            relevance = float(expected.layers[names[node.place]][0, node.position, node.index])
            assert arrived[node] == pytest.approx(relevance, rel=1e-8, abs=1e-12)
        elif node.kind == "token":
            relevance = float(expected.relevance[0, node.position].sum())
            assert arrived[node] == pytest.approx(relevance, rel=1e-8, abs=1e-12)


def test_without_attention_weights_are_products_of_weights():
    explain_model, _, coders = with_transcoders(attends=False, reads="norm")
    graph = latent_graph(explain_model, IDS, [7], latents=1000).graph
    for source, target, data in graph.edges(data=True):
        if source.kind == target.kind == "latent":
            assert source.position == target.position
            below, above = (int(node.place.split(".")[1]) for node in (source, target))
            assert below < above
            product = coders[above][0][0].weight[target.index] @ coders[below][1].weight[:, source.index]
            assert data["weight"] == pytest.approx(graph.nodes[source]["value"] * float(product), rel=1e-8, abs=1e-12)
    latents = [(source.place, target.place) for source, target in graph.edges if source.kind == target.kind == "latent"]
    assert ("layers.0.mlp", "layers.2.mlp") in latents  # past the dictionary between them


def test_influence_is_what_leads_to_the_logits(decoder):
    graph = decoder[2].graph
    nodes = list(graph)
    shares = np.array([[abs(graph.edges[a, b]["weight"]) if graph.has_edge(a, b) else 0 for a in nodes] for b in nodes])
    shares /= np.maximum(shares.sum(1, keepdims=True), 1e-300)
    probabilities = np.array([decoder[2].probabilities[node.index] if node.kind == "logit" else 0 for node in nodes])
    step = total = probabilities / probabilities.sum()
    for _ in range(8):
        step = step @ shares
        total = total + step
    found = np.array([graph.nodes[node]["influence"] for node in nodes])
    np.testing.assert_allclose(found, total, rtol=1e-9, atol=1e-14)


def test_the_strongest_latents_are_kept():
    explain_model, _, _ = with_transcoders()
    whole = latent_graph(explain_model, IDS, 3, latents=1000)
    few = latent_graph(explain_model, IDS, 3, latents=6)
    assert len(few.latents()) == 6
    assert set(few.latents()) < set(whole.latents())
    for edge in few.graph.edges:
        assert few.graph.edges[edge]["weight"] == pytest.approx(whole.graph.edges[edge]["weight"], rel=1e-12)
    pruned = whole.pruned(0.9, 0.98)
    assert 0 < len(pruned.latents()) < len(whole.latents())
    assert all(pruned.graph.out_degree(node) and pruned.graph.in_degree(node) for node in pruned.latents())
    assert {node for node in whole.graph if node.kind in ("token", "logit")} <= set(pruned.graph)
    assert nx.utils.graphs_equal(nx.DiGraph(whole.graph), nx.DiGraph(whole.pruned(1, 1).graph))


def test_the_file_for_a_front_end(decoder, tmp_path):
    found = decoder[2].pruned(0.95)
    path = tmp_path / "graph.json"
    written = found.to_json(list("abcde"), path, slug="small")
    assert written == path.read_text()
    content = json.loads(written)
    assert content["metadata"]["prompt_tokens"] == list("abcde")
    names = [node["node_id"] for node in content["nodes"]]
    assert len(set(names)) == len(names) == len(found.graph)
    assert {link[end] for link in content["links"] for end in ("source", "target")} <= set(names)
    assert len(content["links"]) == found.graph.number_of_edges()
    by_kind = {node["feature_type"]: node for node in content["nodes"]}
    assert set(by_kind) == {"cross layer transcoder", "mlp reconstruction error", "embedding", "logit"}
    assert by_kind["logit"]["layer"] == "4"
    assert by_kind["embedding"]["layer"] == "E"
    assert sum(node["is_target_logit"] for node in content["nodes"]) == 1
    latent = by_kind["cross layer transcoder"]
    layer, index, position = map(int, latent["node_id"].split("_"))
    assert latent["activation"] == found.graph.nodes[LatentNode("latent", f"layers.{layer}.mlp", position, index)]["value"]


def test_autoencoders_of_the_stream_make_a_chain():
    torch.manual_seed(0)
    model = Decoder().double().eval()
    for number in range(2):
        encoder = nn.Sequential(nn.Linear(WIDTH, LATENTS), nn.ReLU()).double()
        model = lrpfx.dictionary(model, f"layers.{number}", encoder, nn.Linear(LATENTS, WIDTH).double())
    graph = latent_graph(lrpfx.transform(model, CPLRP(), IDS), IDS, 2).graph
    targets = {target.kind for source, target in graph.edges if source.place == "layers.0" and source.kind == "latent"}
    assert targets == {"latent"}  # the second dictionary is between the first and the logits


def test_questions_without_a_graph(decoder):
    explain_model, _, found = decoder
    plain = lrpfx.transform(Decoder().double().eval(), CPLRP(), IDS)
    for error, match, run in (
        (InputError, "has no dictionary", lambda: latent_graph(plain, IDS)),
        (InputError, "one prompt, not of 2", lambda: latent_graph(explain_model, IDS.repeat(2, 1))),
        (InputError, "different ids of 11 tokens", lambda: latent_graph(explain_model, IDS, [11])),
        (InputTypeError, "number, or a list", lambda: latent_graph(explain_model, IDS, "cat")),
        (InputError, "logits", lambda: latent_graph(explain_model, IDS, 0)),
        (InputError, "latents", lambda: latent_graph(explain_model, IDS, latents=0)),
        (InputError, "each of the 5 tokens", lambda: found.to_json(["a"])),
        (InputError, "cannot be written", lambda: found.to_json(list("abcde"), "/nowhere/graph.json")),
        (InputError, "share in", lambda: found.pruned(0)),
        (InputError, "no dictionary is at 'embed'", lambda: found.latents("embed")),
    ):
        with pytest.raises(error, match=match):
            run()


def test_what_a_skip_connection_adds_is_no_error():
    """It reaches the sources past the latents, and the error is what the dictionary misses times what follows."""
    torch.manual_seed(0)
    plain = Decoder(attends=False, layers=1).double().eval()
    encoder = nn.Sequential(nn.Linear(WIDTH, LATENTS, bias=False), nn.ReLU()).double()
    decoder, skip = nn.Linear(LATENTS, WIDTH).double(), nn.Linear(WIDTH, WIDTH, bias=False).double()
    model = lrpfx.dictionary(plain, "layers.0.mlp", encoder, decoder, skip=skip, reads="layers.0.mlp")
    found = latent_graph(lrpfx.transform(model, CPLRP(), IDS), IDS, 1, latents=1000)
    graph = found.graph
    (logit,) = (node for node in graph if node.kind == "logit")
    head = plain.head.weight[logit.index]
    assert into(graph, logit) == pytest.approx(graph.nodes[logit]["value"] - float(head @ decoder.bias), abs=1e-6)
    embedded = plain.embed(IDS)[0, -1]
    read = plain.layers[0].norm(embedded)
    error = plain.layers[0].mlp(read) - decoder(encoder(read)) - skip(read)
    weights = {source.kind: data["weight"] for source, _, data in graph.in_edges(logit, data=True) if source.kind != "latent"}
    assert weights["error"] == pytest.approx(float(head @ error), rel=1e-6)
    assert weights["token"] == pytest.approx(float(head @ (embedded + skip(read))), rel=1e-6)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.magnitude, self.gate = nn.Linear(WIDTH, LATENTS, bias=False), nn.Linear(WIDTH, LATENTS)

    def forward(self, x):
        return self.magnitude(x).relu() * (self.gate(x) > 0).to(x.dtype)


def test_gates_take_no_relevance():
    torch.manual_seed(0)
    model = Decoder(layers=2).double().eval()
    for number in (0, 1):
        place = f"layers.{number}.mlp"
        model = lrpfx.dictionary(model, place, Gated().double(), nn.Linear(LATENTS, WIDTH, bias=False).double(), reads=place)
    found = latent_graph(lrpfx.transform(model, CPLRP(), IDS), IDS, 2, latents=1000)
    nodes = [node for node in found.graph if node.kind in ("latent", "logit")]
    assert {node.place for node in nodes} == {"layers.0.mlp", "layers.1.mlp", ""}
    for node in nodes:
        assert into(found.graph, node) == pytest.approx(found.graph.nodes[node]["value"], rel=1e-5, abs=1e-7)


class Masked(Decoder):
    def forward(self, mask, ids):
        return super().forward(ids) * mask[..., None].to(self.head.weight.dtype)


@pytest.mark.parametrize("named", [True, False])
def test_tokens_are_those_that_an_embedding_reads(named):
    torch.manual_seed(0)
    model = Masked().double().eval()
    encoder = nn.Sequential(nn.Linear(WIDTH, LATENTS), nn.ReLU()).double()
    model = lrpfx.dictionary(model, "layers.1.mlp", encoder, nn.Linear(LATENTS, WIDTH).double())
    inputs = {"mask": torch.ones_like(IDS), "ids": IDS} if named else (torch.ones_like(IDS), IDS)
    found = latent_graph(lrpfx.transform(model, CPLRP(), inputs), inputs, 2)
    assert found.tokens == tuple(IDS[0].tolist())
    assert {node.index for node in found.graph if node.kind == "token"} <= set(found.tokens)


def test_a_place_that_is_called_twice_is_refused():
    class Twice(Decoder):
        def forward(self, ids):
            x = self.embed(ids)
            return self.head(self.layers[0](self.layers[0](x)))

    model = Twice(layers=1).double().eval()
    encoder = nn.Sequential(nn.Linear(WIDTH, LATENTS), nn.ReLU()).double()
    model = lrpfx.dictionary(model, "layers.0.mlp", encoder, nn.Linear(LATENTS, WIDTH).double())
    with pytest.raises(InputError, match="called more than once"):
        latent_graph(lrpfx.transform(model, CPLRP(), IDS), IDS)
