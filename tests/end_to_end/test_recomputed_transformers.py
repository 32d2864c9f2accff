"""Layers of transformers that are computed again in the backward pass give the same maps."""

from functools import cache

import pytest
import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision

# isort: split
import transformers
from helpers import assert_same, blocks

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 30},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}
IDS = torch.tensor([[5, 17, 2, 8, 9, 23]])
LLAMA = {**SIZES, "num_key_value_heads": 1, "use_cache": False}
#: name -> the class of a model, its configuration, the layers, and a part of them
FAMILIES = {
    "Llama": ("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA), "model.layers.*", "mlp"),
    "Gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config(**LLAMA, head_dim=8), "model.layers.*", "mlp"),
    "GPT-2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=30, bos_token_id=0, eos_token_id=0, use_cache=False),
        "transformer.h.*",
        "mlp",
    ),
    "BERT": ("BertForMaskedLM", transformers.BertConfig(**SIZES), "bert.encoder.layer.*", "intermediate"),
    "ALBERT": (
        "AlbertForMaskedLM",
        transformers.AlbertConfig(**SIZES, embedding_size=8),
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        "ffn",
    ),
}


@cache
def captured(family):
    kind, configuration, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(configuration).double().eval()
    return lrpfx.capture(model, {"input_ids": IDS})


@pytest.mark.parametrize("composite", [AttnLRP(), CPLRP(), AttnLRP(gamma=0.1)], ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
def test_maps_of_transformers_are_the_same(family, composite):
    (*_, layers, part), inputs = FAMILIES[family], {"input_ids": IDS}
    plain = lrpfx.transform(captured(family), composite)
    again = lrpfx.transform(captured(family), composite, checkpoint=layers)
    assert len(blocks(again)) == 3
    options = {"output": "logits", "record": ("*.softmax", f"{layers}.{part}")}
    assert_same(lrpfx.attribute(again, inputs, (-1, 7), **options), lrpfx.attribute(plain, inputs, (-1, 7), **options))
    options = {"output": "logits", "targets": [(-1, 7), (2, 3), (0, 1)]}
    expected = lrpfx.attribute(plain, inputs, **options)
    assert_same(lrpfx.attribute(again, inputs, **options), expected)
    several = lrpfx.attribute(again, inputs, **options, chunk_size=3)
    torch.testing.assert_close(several.relevance, expected.relevance, rtol=1e-9, atol=1e-12)
