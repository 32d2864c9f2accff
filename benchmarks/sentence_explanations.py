"""Relevance of the tokens of a sentence for its similarity to another, by several methods."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from captum.attr import IntegratedGradients
from torch import nn
from torch.export import Dim, ExportedProgram

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, Composite
from lrpfx.demo.sentence_similarity import MiniLM

GAMMA = 0.1  # not tuned
STEPS = 20  # of integrated gradients

COMPOSITES: dict[str, Composite] = {
    "AttnLRP": AttnLRP(),
    "CP-LRP": CPLRP(),
    f"AttnLRP, gamma {GAMMA}": AttnLRP(gamma=GAMMA),
}


@dataclass(frozen=True)
class Question:
    """Why one sentence, with `ids` of shape (1, tokens), is similar to another, the `reference` of shape (1, features)."""

    ids: torch.Tensor
    reference: torch.Tensor

    @property
    def inner(self) -> slice:
        """The tokens between the special ones at both ends."""
        return slice(1, self.ids.shape[1] - 1)


def export(minilm: MiniLM, example: Question) -> ExportedProgram:
    """The model as a graph for any number and length of sentences: captured once, for all composites."""
    inputs = {"input_ids": example.ids.expand(2, -1), "reference": example.reference.expand(2, -1)}
    batch, tokens = Dim("batch"), Dim("tokens", max=minilm.model.encoder.config.max_position_embeddings)
    sizes = {"input_ids": {0: batch, 1: tokens}, "reference": {0: batch}}
    return torch.export.export(minilm.model, (), inputs, dynamic_shapes=sizes, strict=False)


def explainable(program: ExportedProgram) -> dict[str, nn.Module]:
    return {name: lrpfx.transform(program, rules, constants=("reference",)) for name, rules in COMPOSITES.items()}


def lrp(explain_model: nn.Module, question: Question) -> torch.Tensor:
    """Relevance of all tokens, of shape (tokens,): the sum over the features of their word embeddings."""
    inputs = {"input_ids": question.ids, "reference": question.reference}
    relevance: torch.Tensor = lrpfx.attribute(explain_model, inputs, target=0).relevance["input_ids"]
    return relevance.sum((0, 2))


def gradient_times_input(minilm: MiniLM, question: Question) -> torch.Tensor:
    """The derivative by the word embeddings times these. Shape (tokens,)."""
    embeddings = _embedded(minilm, question.ids).requires_grad_()
    similarity = (minilm.model.embed(inputs_embeds=embeddings) * question.reference).sum()
    (gradient,) = torch.autograd.grad(similarity, embeddings)
    return (gradient * embeddings).sum((0, 2)).detach()


def integrated_gradients(minilm: MiniLM, question: Question) -> torch.Tensor:
    """Captum's integrated gradients, from a sentence of masks to this one. Shape (tokens,)."""

    def similarity(embeddings: torch.Tensor) -> torch.Tensor:
        return (minilm.model.embed(inputs_embeds=embeddings) * question.reference).sum(-1)

    found = IntegratedGradients(similarity).attribute(
        _embedded(minilm, question.ids),
        baselines=_embedded(minilm, masked(minilm, question, torch.ones(1, _length(question), dtype=torch.bool))),
        n_steps=STEPS,
    )
    relevance: torch.Tensor = found.sum((0, 2)).detach()
    return relevance


def occlusion(minilm: MiniLM, question: Question) -> torch.Tensor:
    """How much the similarity falls if one token is masked; 0 for the special ones. Shape (tokens,)."""
    count = _length(question)
    masks = torch.cat([torch.zeros(1, count, dtype=torch.bool), torch.eye(count, dtype=torch.bool)])
    scores = score_masked(minilm, question, masks)
    relevance = torch.zeros(question.ids.shape[1])
    relevance[question.inner] = scores[0] - scores[1:]
    return relevance


def by_lxt(questions: Sequence[Question]) -> list[torch.Tensor]:
    """LXT's AttnLRP for each question, of shape (tokens,), from another process, because LXT changes classes of torch."""
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = Path(directory, "questions.pt"), Path(directory, "answers.pt")
        torch.save([(question.ids, question.reference) for question in questions], asked)
        subprocess.run([sys.executable, str(Path(__file__).with_name("with_lxt.py")), str(asked), str(answered)], check=True)
        relevances: list[torch.Tensor] = torch.load(answered)
        return relevances


@torch.no_grad()
def score_masked(minilm: MiniLM, question: Question, masks: torch.Tensor) -> torch.Tensor:
    """The similarity, of shape (n,), for masks of shape (n, tokens without the special ones)."""
    ids = masked(minilm, question, masks)
    similarity: torch.Tensor = minilm.model(ids, question.reference)
    return similarity.squeeze(1)


def masked(minilm: MiniLM, question: Question, masks: torch.Tensor) -> torch.Tensor:
    """Token ids, of shape (n, tokens), with [MASK] where `masks`, of shape (n, tokens without the special ones), is true."""
    ids = question.ids.repeat(len(masks), 1)
    ids[:, question.inner] = ids[:, question.inner].masked_fill(masks, minilm.tokenizer.mask_token_id)
    return ids


def _embedded(minilm: MiniLM, ids: torch.Tensor) -> torch.Tensor:
    return minilm.word_embeddings[ids]


def _length(question: Question) -> int:
    return question.ids.shape[1] - 2
