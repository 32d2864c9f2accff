"""RelP equals the gradients of forward passes written by hand, at the embeddings and at the nodes that patching asks for."""

import functools

import pytest
import torch
from helpers import relative_difference
from reference import relp
from reference.transformer_models import LANGUAGE_MODELS, in_double_precision

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, RelP

BY_HAND = {"llama": (relp.llama, "model.embed_tokens"), "gpt2": (relp.gpt2, "transformer.wte")}
TARGET = (-1, 3)


@functools.cache
def multipliers_by_hand(name, holds_weights=False):
    """The logits and the multipliers of the explained logit by node."""
    model, (run, embedding) = LANGUAGE_MODELS[name], BY_HAND[name]
    kept = {}

    def keep(node, value):
        kept[node] = value.requires_grad_() if value.is_leaf else value
        value.retain_grad()
        return value

    with in_double_precision(model.module):
        made = model.make("eager")
        embedded = keep(embedding, made.get_input_embeddings()(model.tokens()))
        logits = run(made, embedded, keep, holds_weights)
    position, token = TARGET
    logits[:, position, token].sum().backward()
    return logits.detach(), {node: value.grad for node, value in kept.items()}


@functools.cache
def explained(name, composite):
    model = LANGUAGE_MODELS[name]
    with in_double_precision(model.module):
        program = torch.export.export(model.make("sdpa"), (), {"input_ids": model.tokens()}, strict=False)
    return lrpfx.transform(program, composite, example_inputs={"input_ids": model.tokens()})


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("holds_weights", [False, True])
def test_multipliers(name, holds_weights):
    inputs = {"input_ids": LANGUAGE_MODELS[name].tokens()}
    explain_model = explained(name, CPLRP(gates="half") if holds_weights else RelP())
    logits, expected = multipliers_by_hand(name, holds_weights)
    found = lrpfx.attribute(explain_model, inputs, TARGET, output="logits", record_multipliers=list(expected))
    assert relative_difference(found.output, logits) <= 1e-12
    for node, multiplier in expected.items():
        assert found.multipliers[node].abs().max() > 0
        assert relative_difference(found.multipliers[node], multiplier) <= 1e-10, node


@pytest.mark.parametrize("name", BY_HAND)
def test_it_is_neither_of_the_others(name):
    inputs = {"input_ids": LANGUAGE_MODELS[name].tokens()}
    _, expected = multipliers_by_hand(name)
    for composite in (AttnLRP(), CPLRP()):
        found = lrpfx.attribute(explained(name, composite), inputs, TARGET, output="logits", record_multipliers=list(expected))
        assert relative_difference(found.multipliers[BY_HAND[name][1]], expected[BY_HAND[name][1]]) > 1e-3


@pytest.mark.parametrize("name", BY_HAND)
def test_what_products_add_is_accounted_for(name):
    inputs = {"input_ids": LANGUAGE_MODELS[name].tokens()}
    accounts = lrpfx.ledger(explained(name, RelP()), inputs, TARGET, output="logits")
    products = [entry for entry in accounts if entry.rule.startswith("ProductTaylor")]
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
    for entry in products:
        assert entry.expansion == pytest.approx(entry.relevance_in - entry.relevance_out, abs=1e-9)
    assert any(entry.expansion == pytest.approx(-entry.relevance_in, rel=1e-9) for entry in products)
