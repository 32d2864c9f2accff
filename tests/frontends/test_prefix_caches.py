"""Caches of the keys and values of a prefix are inputs of a graph, and constants."""

import pickle

import pytest
import torch
from explanation.test_generation import WithCache

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.errors import InputError, InputTypeError

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_LLAMA = {**SIZES, "vocab_size": 60, "num_key_value_heads": 2}
FAMILIES = {
    "Llama": OF_LLAMA,
    "GPT2": {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Mistral": {**OF_LLAMA, "sliding_window": 3},
}
PREFIX, IDS = torch.tensor([[3, 9, 11, 7]]), torch.tensor([[5, 17, 42, 8, 23]])


def small(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config).double().eval()


def cache_for(model, prefix):
    with torch.no_grad():
        return model(prefix, use_cache=True).past_key_values


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_reads_the_cache_of_each_call(family):
    model = small(family)
    cache = cache_for(model, PREFIX)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    x = {"input_ids": IDS, "past_key_values": cache}
    explain_model = lrpfx.transform(model, AttnLRP(), x)
    for prefix in (PREFIX, PREFIX.flip(1)):
        given = {"input_ids": IDS, "past_key_values": cache_for(model, prefix)}
        whole = model(torch.cat([prefix, IDS], 1)).logits[:, 4:]
        torch.testing.assert_close(explain_model(**given)["logits"], whole, rtol=1e-9, atol=1e-12)
    found = lrpfx.attribute(explain_model, x, (-1, 7), output="logits").relevance["input_ids"]
    if family != "Mistral":  # whose cache holds a window
        alone = lrpfx.transform(WithCache(model, cache), AttnLRP(), IDS)
        torch.testing.assert_close(found, lrpfx.attribute(alone, IDS, (-1, 7)).relevance, rtol=1e-9, atol=1e-12)
    assert lrpfx.ledger(explain_model, x, (-1, 7), output="logits").unexplained < 1e-6
    again = pickle.loads(pickle.dumps(explain_model))
    torch.testing.assert_close(again(**x)["logits"], explain_model(**x)["logits"], rtol=0, atol=0)
    assert len(cache.layers) == 2
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_other_caches_are_refused():
    model = small("Llama")
    x = {"input_ids": IDS, "past_key_values": cache_for(model, PREFIX)}
    explain_model = lrpfx.transform(model, AttnLRP(), x)
    with pytest.raises(InputError, match=r"past_key_values\[0\]\['keys'\]\" has size 8 in dimension 2"):
        explain_model(input_ids=IDS, past_key_values=cache_for(model, torch.cat([PREFIX, PREFIX], 1)))
    with pytest.raises(InputError, match="past_key_values"):
        explain_model(input_ids=IDS)
    with pytest.raises(InputError, match="the cache is empty"):
        lrpfx.attribute(explain_model, {**x, "past_key_values": transformers.DynamicCache()}, (-1, 7), output="logits")
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(InputTypeError, match="StaticLayer"):
        lrpfx.transform(model, AttnLRP(), {**x, "past_key_values": static})
    within = small("Mistral")
    explain_within = lrpfx.transform(within, AttnLRP(), {"input_ids": IDS, "past_key_values": cache_for(within, PREFIX)})
    with pytest.raises(InputError, match="cumulative_length"):  # the window is full in both
        explain_within(input_ids=IDS, past_key_values=cache_for(within, torch.cat([PREFIX, PREFIX], 1)))


class LearnedPrefix(WithCache):
    """As prefix tuning of PEFT, which the tests do not install: forward makes a cache of parameters, and returns it, too."""

    def __init__(self, model, cache):
        super().__init__(model, cache)
        for name, value in list(self.named_buffers(recurse=False)):
            delattr(self, name)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, input_ids, **settings):
        cache = transformers.DynamicCache(
            [(getattr(self, f"keys_{place}"), getattr(self, f"values_{place}")) for place in range(self.count)]
        )
        return self.model(input_ids=input_ids, past_key_values=cache, **settings)


def test_prefixes_that_were_learned():
    model = small("Llama")
    cache = cache_for(model, PREFIX)
    tuned = LearnedPrefix(model, cache).eval()
    assert tuned(IDS).past_key_values is not None
    explain_model = lrpfx.transform(tuned, AttnLRP(), {"input_ids": IDS})
    for ids in (IDS, IDS[:, :3]):
        torch.testing.assert_close(explain_model(ids)["logits"], tuned(ids).logits, rtol=1e-9, atol=1e-12)
    found = lrpfx.attribute(explain_model, IDS, (-1, 7), output="logits").relevance
    given = {"input_ids": IDS, "past_key_values": cache}
    expected = lrpfx.attribute(lrpfx.transform(model, AttnLRP(), given), given, (-1, 7), output="logits").relevance["input_ids"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(lrpfx.CaptureError, match="Cache, which a graph cannot hold"):
        lrpfx.transform(tuned, AttnLRP(), {"input_ids": IDS, "use_cache": True})
