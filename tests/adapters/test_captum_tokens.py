"""Captum's attributions of language models with the rules of lrpfx."""

import pytest
import torch
import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision
import transformers

pytest.importorskip("captum")

from captum.attr import LLMGradientAttribution, TextTokenInput
from tokenizers import Tokenizer, models, pre_tokenizers

import lrpfx
from lrpfx.adapters.captum import TokenLRP
from lrpfx.composites import AttnLRP
from lrpfx.errors import InputError

WORDS = ["the", "cat", "dog", "saw", "a", "red", "car", "house", ".", "it", "wants", "fish"]


@pytest.fixture(scope="module")
def spoken():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    spelled = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=spelled)
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def test_each_token_is_explained_as_by_attribute(spoken):
    model, tokenizer = spoken
    prompt, answer = "the dog saw a red car . it", "wants fish ."
    method = LLMGradientAttribution(TokenLRP(model, AttnLRP()), tokenizer)
    found = method.attribute(TextTokenInput(prompt, tokenizer), target=answer)
    assert found.token_attr.shape == (3, 8)
    ids, generated = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (prompt, answer))
    for number in range(3):
        read = {"input_ids": torch.cat([ids, generated[:, :number]], 1)}
        explain_model = lrpfx.transform(model, AttnLRP(), read)
        relevance = lrpfx.attribute(explain_model, read, (-1, int(generated[0, number]))).relevance["input_ids"]
        torch.testing.assert_close(found.token_attr[number], relevance[0, :8].sum(-1), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found.seq_attr, found.token_attr.sum(0))


def test_tokens_that_captum_leaves_out_and_what_the_model_says(spoken):
    model, tokenizer = spoken
    prompt = TextTokenInput("the dog saw a red car . it", tokenizer, skip_tokens=["."])
    method = LLMGradientAttribution(TokenLRP(model), tokenizer)
    found = method.attribute(prompt, gen_args={"max_new_tokens": 2, "do_sample": False})
    assert found.token_attr.shape == (2, 7)
    assert found.token_attr.isfinite().all()


def test_other_callers_are_told_of_lrp(spoken):
    with pytest.raises(InputError, match="take LRP"):
        TokenLRP(spoken[0]).attribute(torch.tensor([[1, 2, 3]]))
