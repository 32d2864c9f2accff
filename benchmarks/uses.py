"""What relevance is for, measured: `make uses` draws and prints it for relevance_of_weights.md, correcting.md and concepts.md.

Pruning: weights are set to 0 by a score, the least first, without training afterwards.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, EpsilonPlus
from lrpfx.demo import digits, sentence_similarity

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Scores = dict[str, torch.Tensor]
#: A value at each share, by what scores weights.
Curves = dict[str, list[float]]

#: Of eight topics. Those at even places choose weights, the others measure, and the other way round.
SENTENCES = """
The cat sleeps on the warm sofa. A kitten is napping on the couch. The dog chases a ball in the park. Two puppies run
across the grass. She cooked pasta with tomatoes and basil. He baked bread in the old oven. The restaurant serves
spicy noodles. They ate soup at the kitchen table. The train to Berlin leaves at noon. Our flight was delayed by two
hours. He drives to work on the motorway. The bus stops in front of the station. The stock market fell sharply today.
Banks raised their interest rates. The company reported record profits. Prices of oil rose again this week. The team
won the final in extra time. She scored two goals in the first half. The runner finished the marathon in three hours.
He trains for the swimming competition. Doctors recommend a new vaccine. The nurse measured the patient's temperature.
The hospital opened a ward for children. He takes medicine against the pain. The telescope discovered a distant
galaxy. Astronomers observe the moons of Jupiter. The rocket carried a satellite into orbit. The experiment confirmed
the theory of gravity. It will rain heavily in the mountains. Snow covers the roads in the north. The storm damaged
several houses. Tomorrow will be sunny and warm. The orchestra played a symphony by Mozart. She practises the violin
every evening. The band released a new album. He sings in the choir of the church. The students wrote an exam in
mathematics. The teacher explains the equation on the board. The library closes at eight in the evening. She reads a
novel about a detective.
"""


def sum_of_magnitudes(parts: Iterable[Mapping[str, torch.Tensor]]) -> Scores:
    """The sum of the magnitudes of what each sample gives to the weights."""
    total: Scores = {}
    for part in parts:
        for name, values in part.items():
            total[name] = total[name] + values.abs() if name in total else values.abs()
    return total


def without(model: nn.Module, scores: Scores, share: float, by_layer: bool) -> nn.Module:
    """A copy of the model without the share of weights that have the smallest scores, of all layers together or of each."""
    pruned = copy.deepcopy(model)

    def least(values: torch.Tensor) -> torch.Tensor:
        """The smallest score that stays."""
        return values.kthvalue(int(share * len(values)) + 1).values

    of_all = least(torch.cat([values.flatten() for values in scores.values()]))
    with torch.no_grad():
        for name, values in scores.items():
            pruned.get_parameter(name).mul_(values >= (least(values.flatten()) if by_layer else of_all))
    return pruned


def gradients(model: nn.Module, loss: torch.Tensor, names: Sequence[str]) -> Scores:
    """Each weight times the gradient of a loss."""
    weights = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(loss, weights)
    return {name: (weight * one).detach() for name, weight, one in zip(names, weights, found, strict=True)}


def other_scores(model: nn.Module, names: Sequence[str], seed: int) -> dict[str, Scores]:
    """What needs no samples: the magnitude, and chance."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: model.get_parameter(name).detach() for name in names}
    return {
        "magnitude": {name: weight.abs() for name, weight in weights.items()},
        "random": {name: torch.rand(weight.shape, generator=generator) for name, weight in weights.items()},
    }


def curves_of(model: nn.Module, scores: Mapping[str, Scores], measure: Callable[[nn.Module], float]) -> dict[bool, Curves]:
    """The measure at each share, for the weights of all layers together (False) and for those of each layer (True)."""
    return {
        by_layer: {name: [measure(without(model, one, share, by_layer)) for share in SHARES] for name, one in scores.items()}
        for by_layer in (False, True)
    }


def pruning_of_digits(seed: int) -> dict[bool, Curves]:
    """Accuracy on held-out digits. Ten training digits of each class choose weights."""
    train, test = digits.load(seed=seed)
    network = digits.train(train, epochs=15, seed=seed)
    chosen = torch.cat([(train.labels == label).nonzero().flatten()[:10] for label in range(10)])
    samples = [(train.images[place][None], int(train.labels[place])) for place in chosen]
    scores = {}
    for composite in (AttnLRP(), EpsilonPlus()):
        explain_model = lrpfx.transform(network, composite)
        relevance = [lrpfx.relevance_of_weights(explain_model, image, label) for image, label in samples]
        scores[f"relevance, {composite.__class__.__name__}"] = sum_of_magnitudes(relevance)
        if isinstance(composite, AttnLRP):
            names = list(relevance[0])
            scores["signed relevance, AttnLRP"] = {name: sum(one[name] for one in relevance) for name in names}
    losses = (functional.cross_entropy(network(image), torch.tensor([label])) for image, label in samples)
    scores["gradient of the loss"] = sum_of_magnitudes(gradients(network, loss, names) for loss in losses)
    scores.update(other_scores(network, names, seed))
    return curves_of(network, scores, lambda pruned: digits.accuracy(pruned, test))


def pruning_of_sentences(swapped: bool) -> dict[bool, Curves]:
    """Correlation of the similarities of pairs of sentences with those before pruning."""
    minilm = sentence_similarity.load()
    model = minilm.model
    sentences = [f"{one.strip()}." for one in SENTENCES.replace("\n", " ").split(".") if one.strip()]
    seen, held_out = (sentences[swapped::2], sentences[1 - swapped :: 2])

    def embeddings(model: nn.Module, sentences: Sequence[str]) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model.embed(input_ids=minilm.ids(one)) for one in sentences])

    def similarities(model: nn.Module) -> torch.Tensor:
        found = embeddings(model, held_out)
        first, second = torch.triu_indices(len(found), len(found), 1)
        return (found @ found.T)[first, second]

    before = similarities(model)
    others = embeddings(model, seen).roll(7, 0)  # each with one of another topic
    samples = [(minilm.ids(one), other[None]) for one, other in zip(seen, others, strict=True)]
    scores = {}
    for composite in (AttnLRP(), CPLRP()):
        explain_model = lrpfx.transform(model, composite, example_inputs=samples[0], constants=["reference"])
        relevance = (lrpfx.relevance_of_weights(explain_model, sample, 0, parameters="encoder.encoder.*") for sample in samples)
        scores[f"relevance, {composite.__class__.__name__}"] = sum_of_magnitudes(relevance)
    names = list(next(iter(scores.values())))
    scores["gradient"] = sum_of_magnitudes(gradients(model, model(*sample).sum(), names) for sample in samples)
    scores.update(other_scores(model, names, 0))

    def agreement(pruned: nn.Module) -> float:
        return float(torch.corrcoef(torch.stack([similarities(pruned), before]))[0, 1])

    return curves_of(model, scores, agreement)


def print_curves(runs: Sequence[Curves], title: str) -> None:
    """The means of runs, as a table."""
    print(f"\n{title}, {len(runs)} runs\n\n| pruned | {' | '.join(f'{share:.0%}' for share in SHARES)} |")
    print("| --- |" + " --- |" * len(SHARES))
    for name in runs[0]:
        values = torch.tensor([run[name] for run in runs]).mean(0)
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |")


def draw_curves(runs: Sequence[Curves], axes: plt.Axes, title: str, label: str) -> None:
    """The means of runs, with bands from the smallest to the largest value."""
    for name in runs[0]:
        values = torch.tensor([run[name] for run in runs])
        (line,) = axes.plot(SHARES, values.mean(0), label=name, linestyle="--" if name == "random" else "-")
        axes.fill_between(SHARES, values.amin(0), values.amax(0), color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("share of weights set to 0")
    axes.set_ylabel(label)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


TITLES = {False: "all layers together", True: "the same share of each layer"}


def draw_pruning() -> None:
    """Both ways to choose weights are printed; the one that is better for relevance is drawn."""
    figure, (of_digits, of_sentences) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    runs = {
        "digits": [pruning_of_digits(seed) for seed in range(5)],
        "MiniLM": [pruning_of_sentences(bool(number)) for number in range(2)],
    }
    for name, found in runs.items():
        for by_layer, title in TITLES.items():
            print_curves([one[by_layer] for one in found], f"{name}, {title}")
    for name, axes, by_layer, label in (
        ("digits", of_digits, False, "accuracy on held-out digits"),
        ("MiniLM", of_sentences, True, "correlation with similarities before"),
    ):
        draw_curves([one[by_layer] for one in runs[name]], axes, f"{name}, {TITLES[by_layer]}", label)
    figure.savefig(IMAGES / "pruning.png", dpi=110)


def print_cost(count: int = 100, rounds: int = 20) -> None:
    """The time of the relevance of all weights, in gradients of the output with respect to the weights."""
    train, _ = digits.load()
    network = digits.train(train, epochs=1)
    images, labels = train.images[:count], train.labels[:count]
    weights = [one for name, one in network.named_parameters() if one.ndim > 1]
    calls: dict[str, Callable[[], object]] = {
        "gradient": lambda: torch.autograd.grad(network(images).gather(1, labels[:, None]).sum(), weights)
    }
    for composite in (AttnLRP(), EpsilonPlus()):
        explain_model = lrpfx.transform(network, composite)
        calls[type(composite).__name__] = partial(lrpfx.relevance_of_weights, explain_model, images, labels)
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds + 1)][1:]
    for name in list(calls)[1:]:
        print(f"{name}: {statistics.median(one[name] / one['gradient'] for one in times):.1f} gradients")


def seconds(function: Callable[[], object]) -> float:
    """Of the processor."""
    start = time.process_time()
    function()
    return time.process_time() - start


MARKED_CLASS = 3
MARK = torch.zeros(8, 8, dtype=torch.bool)
MARK[:2, :2] = True
#: What is in the picture.
SHOWN = {"none": "none", "gradient": "gradient", "relevance, AttnLRP": "relevance"}
#: Rules of penalties.
PENALIZED = {"relevance, AttnLRP": AttnLRP(), "relevance, EpsilonPlus": EpsilonPlus()}


def with_mark(images: torch.Tensor) -> torch.Tensor:
    marked = images.clone()
    marked[..., MARK] = 1.0
    return marked


def classifier(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    ).eval()


def trained(kind: str, data: digits.Digits, seed: int, epochs: int = 12) -> nn.Module:
    """A network whose loss has a penalty for the relevance of the mark's pixels, for their gradient, or for nothing."""
    network = classifier(seed)
    composite = PENALIZED.get(kind)
    live = None if composite is None else lrpfx.transform(network, composite, fold=False, share=True)
    optimizer = torch.optim.Adam((network if live is None else live).parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.labels)).split(64):
            images, labels = data.images[batch], data.labels[batch]
            optimizer.zero_grad()
            if live is not None:

                def objective(logits: torch.Tensor, relevance: torch.Tensor, labels: torch.Tensor = labels) -> torch.Tensor:
                    return functional.cross_entropy(logits, labels) + 5.0 * relevance[..., MARK].abs().sum(-1).mean()

                lrpfx.backward_through_relevance(live, images, objective, labels)
            else:
                images = images.clone().requires_grad_()
                logits = network(images)
                loss = functional.cross_entropy(logits, labels)
                if kind == "gradient":
                    score = logits.gather(1, labels[:, None]).sum()
                    (gradient,) = torch.autograd.grad(score, images, create_graph=True)
                    loss = loss + gradient[..., MARK].square().sum(-1).mean()
                loss.backward()
            optimizer.step()
    return network


def draw_correction(seeds: Sequence[int] = range(2, 7)) -> None:
    """The settings of the penalties by gradient and with AttnLRP were chosen on seeds 0 and 1; EpsilonPlus has the latter's."""
    accuracies: dict[str, list[tuple[float, float, float]]] = {}
    shown: list[Any] = []
    for seed in seeds:
        train, test = digits.load(seed=seed)
        has_mark = train.labels == MARKED_CLASS
        images = torch.where(has_mark[:, None, None, None], with_mark(train.images), train.images)
        for kind in ("none", "gradient", *PENALIZED):
            begun = time.process_time()
            network = trained(kind, digits.Digits(images, train.labels), seed)
            taken = time.process_time() - begun
            attacked = digits.Digits(with_mark(test.images), test.labels)
            found = (digits.accuracy(network, test), digits.accuracy(network, attacked), taken)
            accuracies.setdefault(kind, []).append(found)
            if seed == seeds[0] and kind in SHOWN:
                first = with_mark(test.images[(test.labels == 5).nonzero()[:1, 0]])
                relevance = lrpfx.attribute(lrpfx.transform(network, AttnLRP()), first, MARKED_CLASS).relevance
                shown.append((f"penalty: {SHOWN[kind]}", lrpfx.pictures.heatmap(relevance, size=(240, 240), sigma=0)))
    pixels = Image.fromarray((first[0, 0] * 255).byte().numpy()).resize((240, 240), Image.Resampling.NEAREST)
    lrpfx.pictures.sheet([("a five with the mark", pixels), *shown], legend=lrpfx.pictures.LEGEND).save(
        IMAGES / "correction.png", optimize=True
    )
    print("\n| penalty | held-out digits | with the mark on all of them | seconds |\n| --- | --- | --- | --- |")
    for kind, runs in accuracies.items():
        clean, attacked, taken = torch.tensor(runs).T
        least = f"{attacked.mean():.3f} ({attacked.min():.3f} to {attacked.max():.3f})"
        print(f"| {kind} | {clean.mean():.3f} | {least} | {taken.mean():.1f} |")


def strange(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images as no training digit is."""
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(1))
    return {
        "half noise": (images + noise) / 2,
        "inverted": 1 - images,
        "turned by 90°": images.rot90(1, (2, 3)),
        "mark in the corner": with_mark(images),
    }


def shares(values: torch.Tensor) -> torch.Tensor:
    """The sum of each channel, as part of the sum of magnitudes over all channels."""
    sums = values.flatten(2).sum(2)
    return sums / sums.abs().sum(1, keepdim=True)


def detection(seed: int, layer: str = "block2.add") -> dict[str, dict[str, float]]:
    """How well scores tell held-out digits from strange ones, as the area under the ROC curve."""
    train, test = digits.load(seed=seed)
    network = digits.train(train, epochs=15, seed=seed)
    explain_model = lrpfx.transform(network, EpsilonPlus())

    def read(images: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        values: list[torch.Tensor] = []
        handle = network.get_submodule(layer.partition(".")[0]).register_forward_hook(
            lambda module, arguments, output: values.append(output.detach())
        )
        with torch.no_grad():
            logits = network(images)
        handle.remove()
        classes = logits.argmax(1) if labels is None else labels
        relevance = lrpfx.attribute(explain_model, images, classes, record=layer).layers[layer]
        confidence = logits.softmax(1).amax(1)
        return {
            "classes": classes,
            "relevance of channels": shares(relevance),
            "activation of channels": shares(values[0]),
            "confidence": confidence,
        }

    known, ordinary = read(train.images, train.labels), read(test.images)
    found: dict[str, dict[str, float]] = {"confidence": {}}
    prototypes = {}
    for kind in ("relevance of channels", "activation of channels"):
        found[kind] = {}
        for label in range(10):
            vectors = known[kind][known["classes"] == label].numpy()
            prototypes[kind, label] = GaussianMixture(3, reg_covar=1e-5, random_state=0).fit(vectors)

    def likelihoods(read: Mapping[str, Any], kind: str) -> np.ndarray:
        scores = [
            prototypes[kind, int(label)].score_samples(vector[None].numpy())
            for label, vector in zip(read["classes"], read[kind], strict=True)
        ]
        return np.concatenate(scores)

    for name, images in strange(test.images).items():
        other = read(images)
        truth = np.repeat([1, 0], len(images))
        for kind in found:
            if kind == "confidence":
                scores = torch.cat([ordinary[kind], other[kind]]).numpy()
            else:
                scores = np.concatenate([likelihoods(ordinary, kind), likelihoods(other, kind)])
            found[kind][name] = float(roc_auc_score(truth, scores))
    return found


def draw_prototypes() -> None:
    """The digits nearest to the prototypes of two classes, and how well prototypes find strange images."""
    train, _ = digits.load()
    network = digits.train(train, epochs=15)
    explain_model = lrpfx.transform(network, EpsilonPlus())
    relevance = lrpfx.attribute(explain_model, train.images, train.labels, record="block2.add").layers["block2.add"]
    vectors = shares(relevance).numpy()
    rows = []
    for label in (1, 9):
        members = (train.labels == label).nonzero().flatten().numpy()
        mixture = GaussianMixture(3, reg_covar=1e-5, random_state=0).fit(vectors[members])
        belongs = mixture.predict(vectors[members])
        for number, center in enumerate(mixture.means_):
            distance = np.linalg.norm(vectors[members] - center, axis=1)
            distance[belongs != number] = np.inf
            nearest = members[distance.argsort()[:8]]
            pixels = (train.images[nearest, 0] * 255).byte().numpy()
            shown = [Image.fromarray(one).resize((96, 96), Image.Resampling.NEAREST) for one in pixels]
            share = (belongs == number).mean()
            rows.append([(f"{label}: {share:.0%}" if place == 0 else "", one) for place, one in enumerate(shown)])
    lrpfx.pictures.sheet(rows, width=900).save(IMAGES / "prototypes.png", optimize=True)
    runs = [detection(seed) for seed in range(5)]
    kinds = list(runs[0]["confidence"])
    print(f"\n| | {' | '.join(kinds)} |\n|{' --- |' * (len(kinds) + 1)}")
    for name in runs[0]:
        means = [np.mean([run[name][kind] for run in runs]) for kind in kinds]
        print(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |")


MEASUREMENTS = {"cost": print_cost, "pruning": draw_pruning, "correction": draw_correction, "prototypes": draw_prototypes}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MEASUREMENTS:
        MEASUREMENTS[name]()
