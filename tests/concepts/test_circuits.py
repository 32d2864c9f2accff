"""Circuits against path patching written by hand, and over families of transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision
import transformers
from torch import nn

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, EpsilonPlus, RelP
from lrpfx.concepts import faithfulness, patching_effects
from lrpfx.concepts.circuit import HeldScale, Run
from lrpfx.errors import InputError, InputTypeError, UnsupportedOperationError

LAYERS, HEADS, WIDTH, TOKENS = 2, 2, 8, 5
IDS, OTHERS = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[3, 2, 4, 6, 5]])
TARGET = (-1, 7)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class PathPatching:
    """The model written out with one stream for each reader. `added`: to the streams of readers.

    `frozen`: statistics of norms, the slopes of ReLUs, and with `patterns` the attention weights are those of the clean run.
    """

    def __init__(self, model, frozen=False, patterns=False):
        self.model, self.frozen, self.patterns = model, frozen, patterns
        self.known = {}

    def kept(self, name, value, is_frozen):
        """A value of this run, or of the first run."""
        return self.known.setdefault(name, value) if is_frozen else value

    def norm(self, name, layer, x):
        scale = self.kept(name, (x.var(-1, unbiased=False, keepdim=True) + layer.eps).rsqrt(), self.frozen)
        return (x - x.mean(-1, keepdim=True)) * scale * layer.weight + layer.bias

    def run(self, ids, added=None):
        added = added or {}
        written = {"embed": self.model.embedding(ids)}
        x = written["embed"] + self.model.position

        def read(reader):
            return x + added.get(reader, 0.0)

        for number, layer in enumerate(self.model.layers):
            attn = f"layers.{number}.attn"
            future = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
            for head in range(HEADS):
                part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                made = {}
                for role in "qkv":
                    reader = f"{attn}.head.{head}.{role}"
                    h, projection = self.norm(reader, layer.attention_norm, read(reader)), getattr(layer, role)
                    made[role] = h @ projection.weight[part].T + projection.bias[part]
                scores = made["q"] @ made["k"].transpose(-2, -1) / math.sqrt(WIDTH // HEADS) + future
                pattern = self.kept(f"{attn}.{head}", scores.softmax(-1), self.patterns)
                written[f"{attn}.head.{head}"] = pattern @ made["v"] @ layer.o.weight[:, part].T
            x = x + sum(written[f"{attn}.head.{head}"] for head in range(HEADS)) + layer.o.bias
            mlp = f"layers.{number}.mlp"
            h = layer.up(self.norm(mlp, layer.mlp_norm, read(mlp)))
            written[mlp] = layer.down(h * self.kept(f"{mlp}.slope", (h > 0).to(h), self.frozen))
            x = x + written[mlp]
        output = self.model.head(self.norm("output", self.model.norm, read("output")))
        return float(output[0, TARGET[0], TARGET[1]].detach()), written

    def effects(self, circuit, scale=1.0):
        """The change of the logit if one edge at a time transmits what its writer adds for the other input."""
        clean, written = self.run(IDS)
        changes = {name: value - written[name] for name, value in PathPatching(self.model).run(OTHERS)[1].items()}
        found = torch.zeros(circuit.exists.shape)
        for row, column in circuit.exists.nonzero().tolist():
            patched, _ = self.run(IDS, {circuit.readers[column]: scale * changes[circuit.writers[row]]})
            found[row, column] = (patched - clean) / scale
        return found


@pytest.fixture(autouse=True)
def _in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def explained(composite):
    return lrpfx.transform(Transformer().eval(), composite, example_inputs=IDS)


def test_the_model_written_out_is_the_model():
    model = Transformer()
    assert PathPatching(model).run(IDS)[0] == pytest.approx(float(model(IDS)[0, TARGET[0], TARGET[1]].detach()), abs=1e-12)


def test_edges_are_exact_where_all_that_follows_is_linear():
    circuit = lrpfx.circuits(explained(CPLRP()), IDS, TARGET, others=OTHERS)
    reference = PathPatching(Transformer(), frozen=True, patterns=True).effects(circuit)
    assert int(circuit.exists.sum()) == 1 * 6 + 3 + 4 * 6 + 6 + 7 and (reference != 0).sum() > 20
    assert torch.allclose(circuit.edges[0], reference, rtol=0, atol=1e-12)
    assert not circuit.edges[0, :, [name.endswith((".q", ".k")) for name in circuit.readers]].any(), "weights are held"


def test_edges_of_relp_are_derivatives_where_only_attention_weights_react():
    circuit = lrpfx.circuits(explained(RelP()), IDS, TARGET, others=OTHERS)
    reference = PathPatching(Transformer(), frozen=True).effects(circuit, scale=1e-6)
    assert torch.allclose(circuit.edges[0], reference, rtol=1e-6, atol=1e-8)
    for role in "qkv":
        assert circuit.edges[0, :, [name.endswith(f".{role}") for name in circuit.readers]].abs().amax() > 1e-4


def test_positions_add_up():
    module = explained(RelP())
    summed = lrpfx.circuits(module, IDS, TARGET, others=OTHERS)
    apart = lrpfx.circuits(module, IDS, TARGET, others=OTHERS, positions=True)
    assert apart.edges.shape == (*summed.edges.shape, TOKENS) and torch.allclose(apart.edges.sum(-1), summed.edges)
    for name, scores in apart.nodes.items():
        assert torch.allclose(scores.sum(-1) if name != "output" else scores, summed.nodes[name])
    assert torch.allclose(apart.edge_means, summed.edge_means) and apart.node_means == pytest.approx(summed.node_means)
    same = IDS[0] == OTHERS[0]
    assert not apart.node("embed")[0, same].any() and apart.node("embed")[0, ~same].any()


def test_real_path_patching():
    """Each edge alone in the model as it is: the run of the graph against the model written out."""
    module = explained(RelP())
    circuit = lrpfx.circuits(module, IDS, TARGET, others=OTHERS)
    reference = PathPatching(Transformer()).effects(circuit)
    complete = PathPatching(Transformer()).run(IDS)[0]
    for row, column in circuit.exists.nonzero().tolist()[::3]:
        kept = circuit.exists.clone()
        kept[row, column] = False
        found = faithfulness(module, replace(circuit, kept=kept), IDS, TARGET, others=OTHERS)
        assert float(found.kept - found.complete) == pytest.approx(float(reference[row, column]), abs=1e-12)
        assert float(found.complete) == pytest.approx(complete, abs=1e-12)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": SIZES | SHARED,
    "BertForMaskedLM": SIZES,
    "GPTNeoXForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES | SHARED,
    "Gemma2ForCausalLM": SIZES | SHARED,
    "GPTJForCausalLM": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "FalconForCausalLM": SIZES,
    "OPTForCausalLM": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2ForCausalLM": SIZES | {"num_key_value_heads": 2},
    "T5EncoderModel": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}
#: The part of a name that follows "layers.", as the model itself writes it.
MLPS = {
    "GPT2LMHeadModel": "transformer.h.{}.mlp",
    "LlamaForCausalLM": "model.layers.{}.mlp",
    "GPTNeoXForCausalLM": "gpt_neox.layers.{}.mlp",
    "FalconForCausalLM": "transformer.h.{}.mlp",
}


def of_family(name):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    options = {"vocab_size": 40, "use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = cls(cls.config_class(**options | FAMILIES[name])).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """The scores are those of `patching_effects`, the edges of each writer add up to it, and so do those of each layer."""
    ids = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])}
    others = {"input_ids": ids["input_ids"].flip(0)}
    target = (-1, 7)
    module = lrpfx.transform(of_family(name), RelP(), example_inputs=ids)
    circuit = lrpfx.circuits(module, ids, target, others=others)
    layers = [f"layers.{number}" for number in range(2)]
    assert {*circuit.writers} == {
        "embed",
        *(f"{one}.attn.head.{head}" for one in layers for head in range(4)),
        *(f"{one}.mlp" for one in layers),
    }
    assert {f"{one}.attn.head.3.q" for one in layers} <= {*circuit.readers}
    assert {"layers.0.resid_pre", "layers.1.resid_pre", "layers.1.resid_post"} <= {*circuit.nodes}
    for row, writer in enumerate(circuit.writers):
        assert torch.allclose(circuit.edges[:, row].sum(1), circuit.node(writer), rtol=1e-6, atol=1e-7)
    names = {one: MLPS[name].format(one[-1]) if name in MLPS else circuit.node_names[f"{one}.mlp"] for one in layers}
    effects = patching_effects(module, ids, others, target, names=list(names.values()))
    for one, node in names.items():
        assert torch.allclose(effects[node].double().reshape(2, -1).sum(1), circuit.node(f"{one}.mlp"), rtol=1e-6, atol=1e-8)
    stream = [f"{one}.resid_pre" for one in layers]
    effects = patching_effects(module, ids, others, target, names=[circuit.node_names[one] for one in stream])
    for role in stream:
        assert torch.allclose(
            effects[circuit.node_names[role]].double().reshape(2, -1).sum(1), circuit.node(role), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "Gemma2ForCausalLM"])
def test_all_edges_and_none(name):
    """A run with all edges is the model, and one with all edges patched is the model for the other inputs."""
    ids, others = ({"input_ids": torch.tensor([one])} for one in ([3, 1, 4, 1, 5], [2, 6, 5, 3, 8]))
    model = of_family(name)
    module = lrpfx.transform(model, AttnLRP(), example_inputs=ids)
    circuit = lrpfx.circuits(module, ids, (-1, 7), others=others)
    found = faithfulness(module, circuit, ids, (-1, 7), others=others)
    with torch.no_grad():
        clean, other = (float(model(**one).logits[0, -1, 7]) for one in (ids, others))
    assert float(found.complete) == pytest.approx(clean, rel=1e-9) and float(found.without) == pytest.approx(other, rel=1e-6)
    assert found.share == pytest.approx(1.0, abs=1e-9)
    assert found.share != pytest.approx(faithfulness(module, circuit.pruned(edges=10), ids, (-1, 7), others=others).share)
    ablated = faithfulness(module, circuit, ids, (-1, 7))
    assert float(ablated.complete) == pytest.approx(clean, rel=1e-9) and float(ablated.without) != pytest.approx(
        other, rel=1e-3
    )


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("GPT2LMHeadModel", torch.float64),
        ("BertForMaskedLM", torch.float64),
        ("OPTForCausalLM", torch.float64),
        ("LlamaForCausalLM", torch.float32),  # its norms are in float32
        ("Gemma2ForCausalLM", torch.float32),
    ],
)
def test_norms_as_products_and_rows_of_the_output_are_what_a_backward_pass_gives(name, dtype, monkeypatch):
    ids = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])}
    module = lrpfx.transform(of_family(name).to(dtype), RelP(), example_inputs=ids)
    used = {"norm": 0, "rows": 0}

    def counted(what, function):
        def call(*args):
            found = function(*args)
            used[what] += found is not None
            return found

        return call

    with monkeypatch.context() as counting:
        counting.setattr(HeldScale, "found", counted("norm", HeldScale.found))
        counting.setattr(Run, "_before_unembedding", counted("rows", Run._before_unembedding))
        fast = lrpfx.circuits(module, ids, (-1, 7))
    assert used["norm"] >= 2 - (name == "BertForMaskedLM") and used["rows"] == (name != "Gemma2ForCausalLM"), "a tanh follows"
    monkeypatch.setattr(HeldScale, "found", lambda *values: None)
    monkeypatch.setattr(Run, "_before_unembedding", lambda run: None)
    direct = lrpfx.circuits(module, ids, (-1, 7))
    bound = (1e-10 if dtype == torch.float64 else 1e-4) * float(direct.edges.abs().amax())
    assert float((fast.edges - direct.edges).abs().amax()) <= bound
    for node, scores in direct.nodes.items():
        assert torch.allclose(fast.node(node), scores, rtol=0, atol=bound)


def test_a_product_or_a_norm_is_told_from_what_is_neither():
    torch.manual_seed(0)
    x, given = torch.randn(2, 5, 8, requires_grad=True), torch.randn(7, 2, 5, 8)
    factor, matrix = torch.randn(2, 5, 8), torch.randn(8, 8)
    for value, is_centered in ((x * factor, False), ((x - x.mean(-1, keepdim=True)) * factor, True)):
        scale = HeldScale.found(value, x)
        assert scale.centered == is_centered
        (direct,) = torch.autograd.grad(value, x, given, is_grads_batched=True)
        assert torch.allclose(scale.pull(given, torch.empty_like(given)), direct, rtol=0, atol=1e-12)
    for value in (x @ matrix, x * factor + 1e-3 * x.roll(1, 1), nn.functional.layer_norm(x, (8,)), (x * factor)[..., :4]):
        assert HeldScale.found(value, x) is None


def test_a_picture_has_an_edge_for_each_that_is_kept():
    circuit = lrpfx.circuits(explained(RelP()), IDS, TARGET, others=OTHERS)
    pictures = [circuit.pruned(edges=edges).picture(width=400, height=300) for edges in (8, 16, 100)]
    assert all(one.size == (400, 300) for one in pictures)
    drawn = [float((np.asarray(one.convert("L")) < 250).sum()) for one in pictures]
    assert drawn == sorted(drawn) and drawn[0] < 0.7 * drawn[-1], "more edges take more ink"
    for size in ({"width": 400}, {"cmap": "viridis"}):
        assert circuit.pruned(edges=8).picture(**size) != pictures[0]
    with pytest.raises(InputError, match="no edge"):
        circuit.pruned(1e9).picture()


def test_pruning_and_graphs():
    circuit = lrpfx.circuits(explained(RelP()), IDS, TARGET, others=OTHERS)
    few = circuit.pruned(edges=8)
    assert 0 < int(few.kept.sum()) <= 8 and not (few.kept & ~circuit.exists).any()
    graph = few.to_networkx()
    assert graph.nodes["output"]["score"] == pytest.approx(float(circuit.node("output")))
    for writer, reader, facts in graph.edges(data=True):
        if "score" in facts:
            assert facts["score"] == pytest.approx(float(circuit.edge(writer, reader)))
        else:
            assert reader in few.users[writer]
    import networkx as nx

    ends = {name for name in graph if graph.out_degree(name) == 0}
    assert ends == {"output"} and all(nx.has_path(graph, name, "output") for name in graph)
    threshold = float(circuit.edge_means.abs().flatten().sort().values[-12])
    many = circuit.pruned(threshold)
    assert (many.edge_means.abs()[many.kept] >= threshold).all() and len(many.edge_table.rows) == int(many.kept.sum())
    scores = [abs(row[-1]) for row in many.edge_table.rows]
    assert scores == sorted(scores, reverse=True) and str(many).startswith("from")
    assert {row[0] for row in circuit.node_table.rows} == {*circuit.nodes}
    assert not circuit.pruned(1e9).kept.any() and circuit.pruned(0.0).kept.equal(circuit.exists)


def test_what_cannot_be():
    module = explained(RelP())
    circuit = lrpfx.circuits(module, IDS, TARGET)
    with pytest.raises(InputError, match=r"no edge from layers\.1\.mlp to layers\.0\.mlp"):
        circuit.edge("layers.1.mlp", "layers.0.mlp")
    with pytest.raises(InputError, match=r"no 'layers.0.attn.head.2' among the writers.*Did you mean"):
        circuit.edge("layers.0.attn.head.2", "output")
    with pytest.raises(InputError, match=r"'layers.0.mpl' among the nodes.*layers.0.mlp"):
        circuit.node("layers.0.mpl")
    with pytest.raises(InputError, match="threshold, or how many"):
        circuit.pruned()
    for given, message in (
        ({"edges": -3}, "edges= is a number, 0 or more, not -3"),
        ({"edges": 2.7}, "not 2.7"),
        ({"edges": True}, "not True"),
        ({"threshold": math.nan}, "threshold must be a finite number, not nan"),
        ({"threshold": "a"}, "threshold must be a finite number, not 'a'"),
    ):
        with pytest.raises(InputError, match=message):
            circuit.pruned(**given)
    assert not circuit.pruned(edges=0).kept.any()
    for ask in (lambda: circuit.edge(0, 1), lambda: circuit.edge("embed", ["output"]), lambda: circuit.node(["embed"])):
        with pytest.raises(InputTypeError, match="the parts of a circuit have names, such as '"):
            ask()
    with pytest.raises(InputError, match="shapes"):
        lrpfx.circuits(module, IDS, TARGET, others=OTHERS[:, :4].repeat(2, 1)[:1].expand(2, 4)[:, [0, 1, 2, 3, 3]])
    with pytest.raises(InputError, match="carries relevance under EpsilonPlus"):
        lrpfx.circuits(explained(EpsilonPlus()), IDS, TARGET)
    plain = lrpfx.transform(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), RelP(), example_inputs=torch.randn(1, 4))
    with pytest.raises(UnsupportedOperationError, match="no attention"):
        lrpfx.circuits(plain, torch.randn(1, 4), 0)
    torch.set_default_dtype(torch.float32)
    two = {"input_ids": torch.tensor([[3, 1, 4]]), "decoder_input_ids": torch.tensor([[3, 1]])}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=20, use_cache=False, **sizes)).eval()
    with pytest.raises(UnsupportedOperationError, match="encoders with decoders"):
        lrpfx.circuits(lrpfx.transform(model, RelP(), example_inputs=two), two, (-1, 7))


class Mixing(Transformer):
    """A branch that moves information between positions, without attention."""

    def forward(self, ids):
        x = self.embedding(ids) + self.position
        x = self.layers[0](x)
        x = x + self.layers[1].q(x).cumsum(1) if self.shifts else x
        return self.head(self.norm(x))


class TwoReaders(Transformer):
    """The output reads the stream twice: behind the last layer and between."""

    def forward(self, ids):
        x = self.embedding(ids) + self.position
        y = self.layers[0](x)
        x = self.layers[1](y)
        return self.head(self.norm(x)) + self.head(y)


def test_what_is_no_transformer_is_not_taken_for_one():
    mixing = Mixing().eval()
    mixing.shifts = True
    with pytest.raises(UnsupportedOperationError, match="other positions of the stream"):
        lrpfx.circuits(lrpfx.transform(mixing, RelP(), example_inputs=IDS), IDS, TARGET)
    with pytest.raises(lrpfx.LrpfxError, match="something else reads the stream"):
        lrpfx.circuits(lrpfx.transform(TwoReaders().eval(), RelP(), example_inputs=IDS), IDS, TARGET)


def test_a_dictionary_of_an_mlp_is_in_the_circuit_and_one_of_a_block_is_an_error_that_says_so():
    """Identities change no score."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, num_key_value_heads=2, **sizes)).double().eval()
    )
    x = {"input_ids": torch.tensor([[1, 5, 7, 9]])}

    def circuit(*dictionary):
        spliced = lrpfx.dictionary(model, *dictionary) if dictionary else model
        return lrpfx.circuits(lrpfx.transform(spliced, CPLRP(), x), x, (-1, 3), output="logits")

    plain = circuit()
    for at in ("model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.0"):
        found = circuit(at, nn.Identity(), nn.Identity())
        assert found.nodes.keys() == plain.nodes.keys()
        for name, scores in plain.nodes.items():
            torch.testing.assert_close(found.nodes[name], scores, rtol=1e-9, atol=1e-12)
    parts = nn.Sequential(nn.Linear(16, 40), nn.ReLU()).double(), nn.Linear(40, 16).double()
    assert "layers.0.mlp" in circuit("model.layers.0.mlp", *parts).nodes
    with pytest.raises(UnsupportedOperationError, match=r"dictionary of 'model\.layers\.0' stands for the stream"):
        circuit("model.layers.0", *parts)
