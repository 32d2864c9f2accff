"""Loops over time of transformers' models: one operator each, with MambaLRP's relevance, and no trace of the replacement."""

import dataclasses
import functools
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.errors import LrpfxWarning
from lrpfx.frontends.time_loops import loops_as_operators
from lrpfx.ir.node import node_info

small = pytest.importorskip("small_transformers")

LOOPS = {
    "MambaForCausalLM": "selective_scan",
    "FalconMambaForCausalLM": "selective_scan",
    "RwkvForCausalLM": "weighted_key_value",
    "RecurrentGemmaForCausalLM": "linear_recurrence",
    "Qwen3NextForCausalLM": "gated_delta_rule",
    "Qwen3_5ForCausalLM": "gated_delta_rule",
    "OlmoHybridForCausalLM": "gated_delta_rule",
    "KimiLinearForCausalLM": "channel_delta_rule",
}


def transformed(name, length=7, dtype=None):
    one = small.architecture(name)
    model = small.small_model(one, dtype)
    inputs = small.inputs_for(one, model, length, dtype)
    if one.called_before:
        with torch.no_grad():
            model(**inputs)
    inputs |= one.said
    return model, inputs, lrpfx.transform(model, AttnLRP(), example_inputs=inputs, capture="export")


def last_of_first(output):
    """Relevance of one token of one sample."""
    seed = torch.zeros_like(output)
    seed[0, -1, 3] = output[0, -1, 3]
    return seed


@pytest.mark.filterwarnings("ignore:.*functions of their own")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("FalconMambaForCausalLM", "Qwen3_5ForCausalLM")))
        for name in LOOPS
    ],
)
@pytest.mark.thorough
def test_a_loop_is_one_operator(name):
    """Its output is the model's, all relevance is accounted for, and the graph has as many nodes for any length."""
    sizes = set()
    for length in (5, 9):
        model, inputs, explain_model = transformed(name, length)
        rows = [str(node_info(node).operator) for node in explain_model.graph.nodes if node.op.startswith("call")]
        assert rows.count(LOOPS[name]) == (1 if LOOPS[name].endswith("delta_rule") else 2)  # one in each layer of its kind
        sizes.add(len(rows))
        accounts = lrpfx.ledger(explain_model, inputs, last_of_first, output="logits")
        assert accounts.unexplained <= 1e-5  # the models compute in single precision here and there
        with torch.no_grad():
            tolerance = {"gated_delta_rule": 1e-6, "channel_delta_rule": 1e-4}.get(LOOPS[name], 1e-9)  # in single precision
            found, expected = explain_model(**inputs)["logits"], model(**inputs)["logits"]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert len(sizes) == 1


@pytest.mark.programs
def test_programs_take_any_batch_and_the_length_of_the_example(tmp_path):
    """A loop is doubled as often as its length needs, so other lengths have other operations."""
    _, inputs, explain_model = transformed("MambaForCausalLM")
    with pytest.warns(LrpfxWarning, match=r"other operations for other sizes.*: dimension 1 of input_ids \(7\)"):
        program = lrpfx.lower(explain_model, inputs, target="token", output="logits")
    runner = lrpfx.load(lrpfx.save(program, tmp_path / "mamba.pt2"))
    for batch in (1, 5):
        ids = inputs["input_ids"][:1].expand(batch, -1).add(torch.arange(batch)[:, None]) % 10
        places, tokens = torch.full((batch,), -1), torch.arange(batch)
        mask = torch.ones_like(ids)
        found = runner(ids, mask, torch.stack([places, tokens], 1))
        expected = lrpfx.attribute(explain_model, {"input_ids": ids, "attention_mask": mask}, (places, tokens), output="logits")
        torch.testing.assert_close(found["relevance"], expected.relevance["input_ids"], rtol=1e-5, atol=1e-8)
    with pytest.raises(lrpfx.InputError, match="dimension 1 was fixed at 7"):
        runner(ids[:, :6], mask[:, :6], torch.zeros(batch, 2, dtype=torch.long))


def test_relevance_of_a_mamba_block_follows_the_formulas_of_mamba_lrp():
    """Factors of the scan, σ(x) of SiLU and norms are constants, and a gated product gives half to each factor."""
    model, inputs, explain_model = transformed("MambaForCausalLM")
    found = lrpfx.attribute(explain_model, inputs, last_of_first, output="logits").relevance["input_ids"]
    embedded = model.backbone.embeddings(inputs["input_ids"]).detach().requires_grad_()
    logits = model.lm_head(norm(model.backbone.norm_f, block_stack(model, embedded, inputs["attention_mask"])))
    (gradient,) = torch.autograd.grad(last_of_first(logits).sum(), embedded)
    expected = (embedded * gradient).detach()
    assert (found - expected).norm() <= 1e-6 * expected.norm()  # the model rounds to single precision
    assert expected.norm() > 0


def block_stack(model, hidden, mask):
    for block in model.backbone.layers:
        hidden = hidden + mixed(block.mixer, norm(block.norm, hidden), mask)
    return hidden


def mixed(mixer, hidden, mask):
    signal, gate = mixer.in_proj(hidden * mask[..., None]).transpose(1, 2).chunk(2, 1)
    signal = activated(mixer.conv1d(signal)[..., : hidden.shape[1]]) * mask[:, None]
    step, into, out = mixer.x_proj(signal.transpose(1, 2)).split([mixer.time_step_rank, *[mixer.ssm_state_size] * 2], -1)
    step = functional.softplus(mixer.dt_proj(step)).transpose(1, 2).detach()
    state, decay = 0.0, -mixer.A_log.exp()
    results = []
    for t in range(hidden.shape[1]):
        factor = (decay * step[:, :, t, None]).exp()
        state = factor * state + step[:, :, t, None] * into.detach()[:, t, None] * signal[:, :, t, None]
        results.append((state * out.detach()[:, t, None]).sum(2))
    scanned = torch.stack(results, 2) + signal * mixer.D[:, None]
    product = scanned * activated(gate)
    return mixer.out_proj((product / 2 + product.detach() / 2).transpose(1, 2))


def activated(x):
    return x * x.sigmoid().detach()


def norm(module, x):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon).detach()
    return module.weight * (x * scale)


def test_a_replacement_does_not_outlive_its_context():
    model = small.small_model(small.architecture("MambaForCausalLM"))
    namespace = vars(sys.modules[type(model.backbone.layers[0].mixer).__module__])
    original = namespace["mamba_selective_scan"]
    with pytest.raises(KeyboardInterrupt), loops_as_operators(model):
        assert namespace["mamba_selective_scan"] is not original
        raise KeyboardInterrupt
    assert namespace["mamba_selective_scan"] is original


def test_other_threads_run_their_own_loop_meanwhile():
    """With its gradient, which the operator for the export lacks."""
    one = small.architecture("MambaForCausalLM")
    model = small.small_model(one)
    inputs = small.inputs_for(one, model, 5)
    expected = model(**inputs).logits
    found = []
    with loops_as_operators(model):
        other = threading.Thread(target=lambda: found.append(model(**inputs).logits))
        other.start()
        other.join()
    assert torch.equal(found[0], expected) and found[0].requires_grad


class Counter(nn.Module):
    """A module of the user's own with a method that happens to have the name."""

    def _rnn_scan(self, x):
        return x.cumsum(1)

    def forward(self, x):
        return self._rnn_scan(x)


def test_other_modules_keep_their_methods():
    model, x = Counter().eval(), torch.rand(2, 4)
    with loops_as_operators(model):
        assert torch.equal(model(x), x.cumsum(1)) and "_rnn_scan" not in vars(model)


@functools.cache
def map_in(name, dtype):
    """The relevance of tokens in a model of one layer that computes in `dtype`, or in the architecture's own for None."""
    one = small.architecture(name)
    one = dataclasses.replace(one, options={**one.options, "num_hidden_layers": 1})
    model = small.small_model(one)
    inputs = small.inputs_for(one, model, 7) | one.said
    cast = model if dtype is None else small.small_model(one, dtype)
    cast.load_state_dict(model.state_dict())
    explain_model = lrpfx.transform(cast, AttnLRP(), example_inputs=inputs, capture="export")
    target = (lambda output: output) if one.modality == "text encoder" else last_of_first
    return lrpfx.attribute(explain_model, inputs, target, output="logits").relevance["input_ids"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        pytest.param("MixtralForCausalLM", marks=pytest.mark.slow),
        "MambaForCausalLM",
        pytest.param("BertForSequenceClassification", marks=pytest.mark.slow),
    ],
)
@pytest.mark.thorough
def test_models_of_half_precision(name, dtype):
    """They transform and run; their maps are those of higher precision to a few rounding units."""
    exact, found = map_in(name, None), map_in(name, dtype)
    assert found.dtype == dtype
    assert (found.double() - exact.double()).norm() <= (5e-2 if dtype is torch.float16 else 3e-1) * exact.norm()
