"""inseq's attributions with the rules of lrpfx."""

import copy

import pytest
import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision
import transformers

pytest.importorskip("inseq")

import inseq
from tokenizers import Tokenizer, models, pre_tokenizers

import lrpfx
from lrpfx.adapters.inseq import LRPAttribution
from lrpfx.composites import CPLRP, AttnLRP
from lrpfx.errors import InputError

WORDS = ["the", "cat", "dog", "saw", "a", "red", "car", "house", ".", "it", "wants", "fish", "<pad>"]
PROMPT, ANSWER = "the dog saw a red car . it", " wants fish ."


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def spoken(request):
    torch.manual_seed(0)
    tokens = {"vocab_size": len(WORDS), "bos_token_id": 0, "eos_token_id": 8, "pad_token_id": 12}
    if request.param == "llama":
        config = transformers.LlamaConfig(
            **tokens, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    spelled = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spelled, pad_token="<pad>", eos_token=".", bos_token="the", unk_token="."
    )
    return model.float().eval(), tokenizer


def test_each_token_is_explained_as_by_attribute(spoken):
    model, tokenizer = spoken
    asked = inseq.load_model(model, "lrp", tokenizer=tokenizer)
    found = asked.attribute(PROMPT, PROMPT + ANSWER, attributed_fn="logit", show_progress=False)
    scores = found.aggregate("sum", normalize=False)[0].target_attributions
    ids = tokenizer(PROMPT + ANSWER, return_tensors="pt")["input_ids"]
    first = ids.shape[1] - scores.shape[1]
    assert first == 8
    for number in range(scores.shape[1]):
        read = {"input_ids": ids[:, : first + number]}
        explain_model = lrpfx.transform(model, AttnLRP(), read)
        relevance = lrpfx.attribute(explain_model, read, (-1, int(ids[0, first + number]))).relevance["input_ids"]
        torch.testing.assert_close(
            scores[: first + number, number].float(), relevance[0].sum(-1), rtol=1e-4, atol=1e-6, check_device=False
        )


def test_several_prompts_and_another_composite(spoken):
    model, tokenizer = spoken
    asked = inseq.load_model(model, "lrp", tokenizer=tokenizer, composite=CPLRP())
    assert asked.attribution_method.composite == CPLRP() or repr(asked.attribution_method.composite) == repr(CPLRP())
    prompts = ["the cat saw a house", PROMPT]
    together = asked.attribute(prompts, [one + ANSWER for one in prompts], attributed_fn="logit", show_progress=False)
    alone = asked.attribute(prompts[0], prompts[0] + ANSWER, attributed_fn="logit", show_progress=False)
    both, one = (each.aggregate("sum", normalize=False)[0].target_attributions for each in (together, alone))
    torch.testing.assert_close(both[~both.isnan()], one[~one.isnan()], rtol=1e-3, atol=1e-5)


def test_probabilities_are_no_logits(spoken):
    model, tokenizer = spoken
    asked = inseq.load_model(model, "lrp", tokenizer=tokenizer)
    with pytest.raises(InputError, match="attributed_fn='logit'"):
        asked.attribute(PROMPT, PROMPT + ANSWER, show_progress=False)
    assert isinstance(asked.attribution_method, LRPAttribution)


def test_each_call_explains_the_model_as_it_is_then(spoken):
    model, tokenizer = spoken
    model = copy.deepcopy(model)
    asked = inseq.load_model(model, "lrp", tokenizer=tokenizer)
    scores = []
    for _ in range(2):
        found = asked.attribute(PROMPT, PROMPT + ANSWER, attributed_fn="logit", show_progress=False)
        scores.append(found.aggregate("sum", normalize=False)[0].target_attributions.nan_to_num())
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.flip(0))
    assert not torch.allclose(*scores, rtol=1e-2)
    assert asked.attribution_method._explain_model is None
