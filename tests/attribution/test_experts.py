"""Relevance of experts."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.attribution.experts import relevance_of_experts
from lrpfx.composites import AttnLRP

small = pytest.importorskip("small_transformers")


def last_token(output):
    seed = torch.zeros_like(output)
    seed[0, -1, 3] = output[0, -1, 3]
    return seed


@functools.cache
def explained(name, implementation, dtype, gamma=None):
    one = small.architecture(name)
    if name == "DeepseekV3ForCausalLM":  # one layer, with experts
        one = dataclasses.replace(one, options={**one.options, "num_hidden_layers": 1, "first_k_dense_replace": 0})
    model = small.small_model(one, dtype)
    model.set_experts_implementation(implementation)
    inputs = small.inputs_for(one, model, 5, dtype) | one.said
    explain_model = lrpfx.transform(model, AttnLRP(gamma=gamma), example_inputs=inputs, capture="export")
    return model, inputs, explain_model


@pytest.mark.parametrize("implementation, dtype", [("grouped_mm", torch.float32), ("batched_mm", torch.float64)])
def test_relevance_of_experts_is_that_of_their_mixture(implementation, dtype, name="MixtralForCausalLM"):
    """For each token, over the experts to which the router sends it, as the model's own router tells."""
    model, inputs, explain_model = explained(name, implementation, dtype)
    found = relevance_of_experts(explain_model, inputs, last_token, output="logits")
    assert list(found) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    chosen, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.mlp.gate.register_forward_hook(lambda module, args, result: chosen.append(result[-1])))
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    names = [f"{path}.sum" for path in found]
    layers = lrpfx.attribute(explain_model, inputs, last_token, record=names, output="logits").layers
    for (path, relevance), indices in zip(found.items(), chosen, strict=True):
        assert relevance.shape == (10, 4) and relevance.abs().sum() > 0
        selected = torch.zeros(10, 4, dtype=torch.bool).scatter(1, indices, True)
        assert not relevance[~selected].any()
        of_tokens = layers[f"{path}.sum"].flatten(0, -2).sum(-1)
        assert (relevance.sum(1) - of_tokens).norm() <= (1e-5 if dtype is torch.float32 else 1e-12) * of_tokens.norm()


@pytest.mark.parametrize("gamma", [None, 0.1])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_both_implementations_give_equal_relevance(name, gamma):
    """In single precision: grouped products take no more."""
    maps = []
    for implementation in ("grouped_mm", "batched_mm"):
        _, inputs, explain_model = explained(name, implementation, torch.float32, gamma)
        maps.append(lrpfx.attribute(explain_model, inputs, last_token, output="logits").relevance["input_ids"])
        accounts = lrpfx.ledger(explain_model, inputs, last_token, output="logits")
        assert accounts.unexplained <= 1e-5
    assert (maps[0] - maps[1]).norm() <= 1e-4 * maps[1].norm()


def test_routers_get_no_relevance():
    """Their weights scale what experts return, like gates."""
    _, inputs, explain_model = explained("MixtralForCausalLM", "batched_mm", torch.float64)
    names = [f"model.layers.{layer}.mlp.gate.{node}" for layer in range(2) for node in ("linear", "softmax")]
    layers = lrpfx.attribute(explain_model, inputs, last_token, record=names, output="logits").layers
    assert len(layers) == 4 and not any(value.any() for value in layers.values())


def test_models_without_experts_are_refused():
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(3, 2)).eval(), AttnLRP())
    with pytest.raises(lrpfx.InputError, match="no mixture of experts"):
        relevance_of_experts(explain_model, torch.rand(1, 3))
