"""`python benchmarks/sentences.py`: which tokens make two sentences similar, and measures of the explanations by deletion."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import sentence_explanations
import torch
from sentence_explanations import COMPOSITES, Question
from sentence_pairs import PAIRS
from torch import nn
from tqdm import tqdm

import lrpfx
from lrpfx.demo import sentence_similarity
from lrpfx.demo.sentence_similarity import MiniLM
from lrpfx.measures.deletion import Deletion, deletions
from lrpfx.measures.intervals import Mean, interval, means, resampled_means
from lrpfx.support.table import Table
from lrpfx.text import heatmap

matplotlib.use("Agg")
from matplotlib import pyplot

OURS = "AttnLRP"  # what the others are compared with
GRADIENT, INTEGRATED, LXT = "gradient × input", "integrated gradients", "LXT AttnLRP"
OCCLUSION, RANDOM = "occlusion", "random order"
METHODS = (*COMPOSITES, LXT, GRADIENT, INTEGRATED, OCCLUSION, RANDOM)
SEEDS = 5  # random orders for each sentence
GRID = np.linspace(0.0, 1.0, 41)  # shares of masked tokens, at which curves of sentences of different lengths are averaged
DRAWN = (2, 19, 33, 57)  # the pairs in the picture of heatmaps, one of each kind


@dataclass(frozen=True)
class Result:
    """The measures of one method."""

    method: str
    most_relevant_first: Mean  # the area under the curve: lower is better
    least_relevant_first: Mean  # higher is better
    between: Mean  # the area between the curves
    minus_ours: Mean  # `between` minus that of `OURS`, pair by pair


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/sentences.py", description=__doc__)
    directory = Path("demo") / "text"
    parser.add_argument("--directory", type=Path, default=directory, help=f"where the results go (default: {directory})")
    run(parser.parse_args().directory)


def run(directory: Path) -> None:
    """Run the demo and write the results to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    minilm = sentence_similarity.load()
    questions = [_question(minilm, pair.first, pair.second) for pair in PAIRS]
    models = sentence_explanations.explainable(sentence_explanations.export(minilm, questions[0]))
    relevances = list(_relevances(minilm, models, questions))

    curves = [
        deletions(
            lambda masks, question=question: sentence_explanations.score_masked(minilm, question, masks),  # type: ignore[misc]
            {name: found[question.inner] for name, found in _with_random(relevance, number).items()},
        )
        for number, (question, relevance) in enumerate(
            zip(tqdm(questions, desc="deletion", unit="pair"), relevances, strict=True)
        )
    ]
    results = measure(curves)
    shares = {name: _shares(model, questions, relevances, name) for name, model in models.items()}

    tables = (_results_table(results), _shares_table(shares))
    for table in tables:
        print(table, end="\n\n")
    largest = max(float(relevance[OURS].abs().max()) for relevance in relevances)
    apart = max(float((relevance[OURS] - relevance[LXT]).abs().max()) for relevance in relevances)
    print(f"LXT's relevance differs by at most {apart / largest:.0e} of the largest\n")

    (directory / "results.md").write_text("\n".join(table.to_markdown() for table in tables))
    (directory / "results.json").write_text(_json(results, shares, curves))
    _write_curves(directory / "deletion.png", curves, results)
    _write_heatmaps(directory / "heatmaps.png", minilm, questions, relevances)
    print(f"written to {directory}/: " + ", ".join(sorted(path.name for path in directory.iterdir())))


def _question(minilm: MiniLM, explained: str, other: str) -> Question:
    with torch.no_grad():
        return Question(minilm.ids(explained), minilm.model.embed(input_ids=minilm.ids(other)))


def _relevances(
    minilm: MiniLM, models: dict[str, nn.Module], questions: Sequence[Question]
) -> Iterator[dict[str, torch.Tensor]]:
    """For each question, the relevance of all tokens by each method but the random order."""
    of_lxt = sentence_explanations.by_lxt(questions)
    for question, by_lxt in zip(tqdm(questions, desc="explaining", unit="pair"), of_lxt, strict=True):
        yield {
            **{name: sentence_explanations.lrp(model, question) for name, model in models.items()},
            LXT: by_lxt,
            GRADIENT: sentence_explanations.gradient_times_input(minilm, question),
            INTEGRATED: sentence_explanations.integrated_gradients(minilm, question),
            OCCLUSION: sentence_explanations.occlusion(minilm, question),
        }


def _with_random(relevance: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    orders = {_random(seed): torch.rand(relevance[OURS].shape, generator=generator) for seed in range(SEEDS)}
    return {**relevance, **orders}


def _random(seed: int) -> str:
    return f"{RANDOM} {seed}"


def _names(method: str) -> list[str]:
    return [_random(seed) for seed in range(SEEDS)] if method == RANDOM else [method]


# --- measures ----------------------------------------------------------------------------------------------------------------


def measure(curves: Sequence[dict[str, Deletion]]) -> list[Result]:
    """Areas of each method with confidence intervals over the pairs of sentences, largest area between the curves first."""

    def values(area: str) -> torch.Tensor:
        """Of shape (methods, pairs); the mean over the random orders."""
        rows = [[np.mean([getattr(found[name], area) for name in _names(method)]) for found in curves] for method in METHODS]
        return torch.tensor(np.array(rows))

    between = values("area")
    measures = (
        means(values("area_most_relevant_first")),
        means(values("area_least_relevant_first")),
        means(between),
        means(between - between[METHODS.index(OURS)]),
    )
    results = [Result(method, *found) for method, *found in zip(METHODS, *measures, strict=True)]
    return sorted(results, key=lambda result: -result.between.mean)


def _shares(
    model: nn.Module, questions: Sequence[Question], relevances: Sequence[dict[str, torch.Tensor]], name: str
) -> dict[str, float]:
    """Where the similarities of all pairs go, as shares of their sum: to tokens, and to what the ledger lists."""
    of_words = sum(float(found[name][question.inner].sum()) for question, found in zip(questions, relevances, strict=True))
    seed = tokens = types = positions = constants = bias = expansion = 0.0
    for length in sorted({question.ids.shape[1] for question in questions}):  # a ledger adds up a batch
        batch = [question for question in questions if question.ids.shape[1] == length]
        ids, references = (torch.cat(parts) for parts in zip(*((one.ids, one.reference) for one in batch), strict=True))
        accounts = lrpfx.ledger(model, {"input_ids": ids, "reference": references}, target=0)
        seed += accounts.seed
        tokens += sum(accounts.inputs.values())
        types += accounts.entry("encoder.embeddings.add").constants  # words + types
        positions += accounts.entry("encoder.embeddings.add_1").constants  # ... + positions
        constants += accounts.total("constants")
        bias += accounts.total("bias")
        expansion += accounts.total("expansion")
    parts = {
        "words": of_words,
        "[CLS] and [SEP]": tokens - of_words,
        "token types": types,
        "positions": positions,
        "other constants": constants - types - positions,
        "bias": bias,
        "expansion": expansion,
    }
    return {part: value / seed for part, value in parts.items()}


# --- tables ------------------------------------------------------------------------------------------------------------------


def _results_table(results: Sequence[Result]) -> Table:
    header = ("deletion, areas", "most relevant first", "least relevant first", "between", f"between, minus {OURS}")
    rows: list[tuple[str, ...]] = [
        (
            result.method,
            str(result.most_relevant_first),
            str(result.least_relevant_first),
            str(result.between),
            "" if result.method == OURS else str(result.minus_ours),
        )
        for result in results
    ]
    return Table(dict.fromkeys(header, "float64") | {header[0]: "str"}, rows)


def _shares_table(shares: dict[str, dict[str, float]]) -> Table:
    parts = next(iter(shares.values()))
    rows = [(name, *(f"{share:.1%}" for share in found.values())) for name, found in shares.items()]
    return Table({"shares of the similarity": "str", **dict.fromkeys(parts, "float64")}, rows)


def _json(results: Sequence[Result], shares: dict[str, dict[str, float]], curves: Sequence[dict[str, Deletion]]) -> str:
    def of_mean(mean: Mean) -> dict[str, float]:
        return {"mean": mean.mean, "low": mean.low, "high": mean.high}

    methods: dict[str, Any] = {
        result.method: {
            measure: of_mean(getattr(result, measure))
            for measure in ("most_relevant_first", "least_relevant_first", "between", "minus_ours")
        }
        for result in results
    }
    pairs = [
        {
            "kind": pair.kind,
            "first": pair.first,
            "second": pair.second,
            "between": {method: float(np.mean([found[name].area for name in _names(method)])) for method in METHODS},
        }
        for pair, found in zip(PAIRS, curves, strict=True)
    ]
    return json.dumps({"methods": methods, "shares": shares, "pairs": pairs}, indent=2, ensure_ascii=False) + "\n"


# --- pictures ----------------------------------------------------------------------------------------------------------------


def _write_curves(path: Path, curves: Sequence[dict[str, Deletion]], results: Sequence[Result]) -> None:
    """A panel for each method: the mean curves in both orders with 95 % bands, over those of the random order."""
    columns = 4
    rows = math.ceil(len(results) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3 * columns, 2.9 * rows), sharex=True, sharey=True, layout="constrained"
    )
    for axis, result in zip(axes.flat, results, strict=False):
        for order, color in (("most_relevant_first", "C3"), ("least_relevant_first", "C0")):
            values = _on_grid(curves, result.method, order)
            low, high = interval(resampled_means(values))
            axis.fill_between(GRID, low, high, color=color, alpha=0.2, linewidth=0)
            axis.plot(GRID, values.mean(1), color=color, label=order.replace("_", " "))
            axis.plot(GRID, _on_grid(curves, RANDOM, order).mean(1), color="0.6", linewidth=0.8, zorder=0)
        axis.set_title(f"{result.method}: {result.between.mean:.3f}", fontsize=10)
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("share of masked tokens (grey: random orders)", fontsize=10)
    figure.supylabel("cosine similarity", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _on_grid(curves: Sequence[dict[str, Deletion]], method: str, order: str) -> torch.Tensor:
    """Curves at the shares of `GRID`, of shape (shares, pairs)."""

    def of_pair(found: dict[str, Deletion]) -> np.ndarray:
        curve = np.mean([getattr(found[name], order).numpy() for name in _names(method)], 0)
        return np.interp(GRID, np.linspace(0.0, 1.0, len(curve)), curve)

    return torch.tensor(np.stack([of_pair(found) for found in curves], 1))


def _write_heatmaps(
    path: Path, minilm: MiniLM, questions: Sequence[Question], relevances: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Heatmaps for a few pairs: a row for each method, with its own scale, over the words of the first sentence."""
    shown = [method for method in METHODS if method not in (LXT, RANDOM)]
    figure, axes = pyplot.subplots(len(DRAWN), 1, figsize=(9, 2.3 * len(DRAWN)), layout="constrained")
    for axis, number in zip(axes, DRAWN, strict=True):
        question = questions[number]
        rows = torch.stack([relevances[number][method] for method in shown])
        names = [method.replace("×", "x") for method in shown]  # Pillow's font has no ×
        axis.imshow(heatmap(rows, question.ids[0], minilm.tokenizer, targets=names, scale="own").to_image())
        axis.axis("off")
        with torch.no_grad():
            similarity = float(minilm.model(question.ids, question.reference))
        axis.set_title(f"{PAIRS[number].kind}, {similarity:.2f} with: {PAIRS[number].second}", fontsize=9, loc="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
