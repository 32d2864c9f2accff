"""Language models as they come: what a tokenizer returns, padding on either side, other lengths, caches, options."""

import pytest
import torch
from helpers import assert_close

import lrpfx
from lrpfx.composites import EpsilonPlus

transformers = pytest.importorskip("transformers")

COMPOSITE = EpsilonPlus(epsilon=1e-9)
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GROUPED = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 32}
HEADS = {"num_labels": 3, "max_position_embeddings": 32, "pad_token_id": 2}

#: name -> the class, its configuration and options of the configuration
ENCODERS = {
    "BERT": ("BertForSequenceClassification", "BertConfig", {**SIZES, **HEADS}),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", {**SIZES, **HEADS}),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, **HEADS},
    ),
    "ModernBERT": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {
            **SIZES,
            **SPECIAL,
            **HEADS,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 0,
            "sep_token_id": 1,
        },
    ),
}
DECODERS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **SPECIAL},
    ),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 4}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 32, "word_embed_proj_dim": 16, **SPECIAL},
    ),
}  # fmt: skip
PAIRS = {
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
         **SPECIAL},
    ),
    "BART": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
         "decoder_start_token_id": 0, "forced_eos_token_id": None, **SPECIAL},
    ),
}  # fmt: skip
PAD = 2
FIRST = ("BERT", "Llama", "GPT-2", "T5")  # the others are slow


def some(*names):
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in names]


def model_of(name, **changes):
    torch.manual_seed(0)
    model_class, config_class, options = (ENCODERS | DECODERS | PAIRS)[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options | changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that biases and attention matter
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(5.0)
    return model


def tokens(batch, length):
    return torch.randint(3, 40, (batch, length))


def encoded(*sentences, side="right", length=None, **further):
    """What a tokenizer returns for sentences of token ids, padded on one side."""
    length = length or max(map(len, sentences))
    padding = [torch.full((length - len(one),), PAD) for one in sentences]
    order = (lambda pair: pair) if side == "right" else (lambda pair: pair[::-1])
    ids = torch.stack([torch.cat(order((one, pad))) for one, pad in zip(sentences, padding, strict=True)])
    mask = torch.stack([torch.cat(order((one * 0 + 1, pad * 0))) for one, pad in zip(sentences, padding, strict=True)])
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, **further})


def with_positions(inputs):
    """Positions that do not count padding, as `generate` passes them."""
    return {**inputs, "position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def relevance_of_words(attribution):
    """The relevance of the words; of several embeddings that read the tokens, that of the first."""
    found = attribution.relevance["input_ids"]
    return next(iter(found.values())) if isinstance(found, dict) else found


def compare(model, explain_model, alone, padded, row, targets):
    """Relevance of one sentence alone, and padded in a batch."""
    of_padded = slice(None) if padded["attention_mask"][row].all() else padded["attention_mask"][row].bool()
    expected, found = (
        lrpfx.attribute(explain_model, inputs, target) for inputs, target in zip((alone, padded), targets, strict=True)
    )
    with torch.no_grad():
        assert_close(found.output, model(**padded).logits, 1e-11)
    relevance = relevance_of_words(found)[row]
    assert_close(relevance[of_padded], relevance_of_words(expected)[0], 1e-6)
    assert not relevance[padded["attention_mask"][row] == 0].any()
    assert lrpfx.ledger(explain_model, padded, targets[1]).unexplained <= 1e-5


@pytest.mark.parametrize("name", some(*ENCODERS))
@pytest.mark.thorough
def test_padding_changes_nothing_in_encoders(name):
    model, sentence = model_of(name), tokens(1, 5)[0]
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=encoded(*tokens(2, 7)))
    for length, others in ((9, []), (8, [tokens(1, 8)[0], tokens(1, 3)[0]])):
        compare(model, explain_model, encoded(sentence), encoded(sentence, *others, length=length), 0, (1, 1))


#: The side on which a name is padded in the default suite.
SIDES = {"Llama": "left", "GPT-2": "right"}


@pytest.mark.parametrize(
    "side, name",
    [
        pytest.param(side, name, marks=[] if SIDES.get(name) == side else [pytest.mark.slow])
        for side in ("left", "right")
        for name in DECODERS
    ],
)
@pytest.mark.thorough
def test_padding_changes_nothing_in_decoders(name, side):
    model, sentence = model_of(name), tokens(1, 5)[0]
    positions = (lambda inputs: inputs) if name == "OPT" else with_positions  # OPT's own positions do not count padding
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=positions(encoded(*tokens(2, 7))))
    for length, others in ((9, []), (8, [tokens(1, 8)[0], tokens(1, 3)[0]])):
        padded = encoded(sentence, *others, side=side, length=length)
        last = torch.tensor([5, 8, 3][: 1 + len(others)]) - 1 if side == "right" else -1
        compare(model, explain_model, positions(encoded(sentence)), positions(padded), 0, ((-1, 7), (last, 7)))


@pytest.mark.parametrize("name", some(*PAIRS))
@pytest.mark.thorough
def test_padding_changes_nothing_in_pairs_of_encoder_and_decoder(name):
    model, sentence, answer = model_of(name), tokens(1, 5)[0], tokens(1, 4)
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=encoded(*tokens(2, 7), decoder_input_ids=tokens(2, 3)))
    alone = encoded(sentence, decoder_input_ids=answer)
    for length, others in ((9, []), (8, [tokens(1, 8)[0]])):
        padded = encoded(sentence, *others, length=length, decoder_input_ids=answer.expand(1 + len(others), 4))
        compare(model, explain_model, alone, padded, 0, ((-1, 7), (-1, 7)))


def test_positions_beyond_the_table():
    explain_model = lrpfx.transform(model_of("GPT-2"), COMPOSITE, example_inputs=encoded(*tokens(2, 7)))
    lrpfx.attribute(explain_model, encoded(*tokens(1, 32)), (-1, 3))
    with pytest.raises(lrpfx.InputError, match=r"dimension 1 of the input 'input_ids' has size 33, .* size <= 32"):
        lrpfx.attribute(explain_model, encoded(*tokens(1, 33)), (-1, 3))


def test_relevance_of_positions_is_not_that_of_the_mask():
    explain_model = lrpfx.transform(model_of("GPT-2"), COMPOSITE, example_inputs=encoded(*tokens(2, 7)))
    assert lrpfx.attribute(explain_model, encoded(*tokens(2, 5)), (-1, 3)).relevance["attention_mask"] is None


@pytest.mark.parametrize("name", ["Llama", pytest.param("T5", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_caches_need_no_word_and_configurations_stay(name):
    model = model_of(name, **{"num_layers" if name == "T5" else "num_hidden_layers": 1})
    before = [(module, module.config.use_cache) for module in model.modules() if hasattr(module, "config")]
    assert any(keeps for _, keeps in before)
    inputs = {"input_ids": tokens(2, 5)} | ({"decoder_input_ids": tokens(2, 3)} if name == "T5" else {})
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=inputs)
    assert all(module.config.use_cache == keeps for module, keeps in before)
    result, expected = explain_model(**inputs), model(**inputs)
    assert type(result) is type(expected) and list(result) == [key for key in expected if key != "past_key_values"]
    for key in result:
        assert_close(result[key].detach(), expected[key].detach(), 1e-13)
    with pytest.raises(lrpfx.CaptureError, match=r"Cache, which a graph cannot hold.* use_cache=False"):
        lrpfx.transform(model, COMPOSITE, example_inputs={**inputs, "use_cache": True})


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"logits_to_keep": 1}, ["logits"]),
        ({"output_hidden_states": True, "return_dict": True}, ["logits", "hidden_states"]),
        ({"return_dict": False, "use_cache": False}, None),
        ({"token_type_ids": torch.zeros(2, 5, dtype=torch.long)}, ["logits"]),  # which Llama ignores
    ],
)
@pytest.mark.thorough
def test_options_of_a_call(options, keys):
    model, inputs = model_of("Llama", num_hidden_layers=1), {**encoded(*tokens(2, 5)), **options}
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=inputs)
    result, expected = explain_model(**inputs), model(**{**inputs, "use_cache": False})
    assert type(result) is type(expected) and (keys is None or list(result) == keys)
    kept = 1 if "logits_to_keep" in options else 5
    attribution = lrpfx.attribute(explain_model, inputs, (-1, 3))
    assert attribution.output.shape == (2, kept, 40)
    assert attribution.relevance["input_ids"].any() and attribution.relevance["attention_mask"] is None


def test_the_last_hidden_state_is_explained_where_there_are_no_logits():
    model = model_of("BERT").bert
    inputs = encoded(*tokens(2, 5))
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=inputs)
    found, named = (lrpfx.attribute(explain_model, inputs, torch.sin, output=name) for name in (None, "last_hidden_state"))
    assert found.output.shape == (2, 5, 16) and torch.equal(found.relevance["input_ids"], named.relevance["input_ids"])


def test_check_takes_what_a_tokenizer_returns():
    model, inputs = model_of("BERT"), encoded(*tokens(2, 5))
    for report in (lrpfx.check(model, COMPOSITE, inputs), lrpfx.check(model, COMPOSITE, **inputs)):
        assert report.ok and report.front_ends["export"] == "works"
