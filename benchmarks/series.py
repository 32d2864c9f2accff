"""How well maps of trained recurrent and convolutional networks agree with occlusion; writes the tables of docs/composites.md.

Each network learns one of four tasks on series of 20 steps. Occlusion replaces one step by zeros (in a text, by the mean of all
words); its effect on the output is compared with the relevance of the step.
"""

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from documents import write_between
from torch import nn

import lrpfx
from lrpfx import composites, rules, types

DOCUMENT = Path(__file__).parent.parent / "docs" / "composites.md"
STEPS, UNITS, WORDS, SEEDS = 20, 32, 60, (0, 1, 2)

# --- tasks -------------------------------------------------------------------------------------------------------------------

Batch = tuple[torch.Tensor, torch.Tensor]


def regression(count: int) -> Batch:
    """The weighted sum of three values at fixed steps, among noise."""
    x = torch.randn(count, STEPS, 4)
    return x, x[:, 4, 0] - 2 * x[:, 9, 1] + x[:, 15, 2]


def addition(count: int) -> Batch:
    """The sum of the two values that are marked."""
    values, marks = torch.rand(count, STEPS) * 2 - 1, torch.zeros(count, STEPS)
    marks.scatter_(1, torch.rand(count, STEPS).topk(2).indices, 1.0)
    return torch.stack([values, marks], 2), (values * marks).sum(1)


def memory(count: int) -> Batch:
    """The last value that is marked."""
    values, marks = torch.rand(count, STEPS) * 2 - 1, (torch.rand(count, STEPS) < 0.15).float()
    marks[:, 0] = 1.0
    last = (marks * torch.arange(STEPS)).argmax(1, keepdim=True)
    return torch.stack([values, marks], 2), values.gather(1, last)[:, 0]


def sentiment(count: int) -> Batch:
    """Words: how many are good (10 to 24), less how many are bad (25 to 39). A negation (below 10) reverses the next word."""
    words = torch.where(
        torch.rand(count, STEPS) < 0.25, torch.randint(10, 40, (count, STEPS)), 40 + torch.randint(0, 20, (count, STEPS))
    )
    says = (words < 40).float()
    negates = (torch.rand(count, STEPS - 1) < 0.3) & (says[:, 1:] > 0) & (says[:, :-1] == 0)
    words[:, :-1] = torch.where(negates, torch.randint(0, 10, negates.shape), words[:, :-1])
    values = says * torch.where(words < 25, 1.0, -1.0)
    values[:, :-1] = torch.where(negates, 0.0, values[:, :-1])
    values[:, 1:] = torch.where(negates, -values[:, 1:], values[:, 1:])
    return words, values.sum(1)


#: Name -> (task, features, 0 for words).
TASKS: dict[str, tuple[Callable[[int], Batch], int]] = {
    "regression on three of 80 values": (regression, 4),
    "sum of two marked values": (addition, 2),
    "the last marked value": (memory, 2),
    "sentiment of words with negations": (sentiment, 0),
}

# --- networks ----------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer, and a dense layer on its last state."""

    def __init__(self, layer: type[nn.RNNBase], features: int) -> None:
        super().__init__()
        self.layer = layer(features, UNITS, batch_first=True)
        self.head = nn.Linear(UNITS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for series (batch, steps, features)."""
        return self.head(self.layer(x)[0][:, -1])


class Convolutional(nn.Module):
    """A temporal convolutional network: causal convolutions, each over a wider context, with residual connections."""

    def __init__(self, features: int) -> None:
        super().__init__()
        widths = [features, UNITS, UNITS, UNITS]
        self.layers = nn.ModuleList(
            nn.Conv1d(width, UNITS, 3, padding=2 * 2**depth, dilation=2**depth) for depth, width in enumerate(widths)
        )
        self.head = nn.Linear(UNITS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for series (batch, steps, features)."""
        value = x.transpose(1, 2)
        for depth, layer in enumerate(self.layers):
            changed = torch.relu(layer(value)[..., :STEPS])
            value = value + changed if depth else changed
        return self.head(value[..., -1])


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "LSTM": lambda features: Recurrent(nn.LSTM, features),
    "GRU": lambda features: Recurrent(nn.GRU, features),
    "RNN": lambda features: Recurrent(nn.RNN, features),
    "TCN": Convolutional,
}
RECURRENT = {
    "SignalTakesAll": composites.EpsilonPlus(layer_map=[(types.Recurrent, rules.SignalTakesAll())]),
    "Epsilon (default)": composites.EpsilonPlus(),
}
CONVOLUTIONAL = {
    "EpsilonPlus": composites.EpsilonPlus(),
    "GammaByDepth": composites.GammaByDepth(),
    "Epsilon everywhere": composites.EpsilonPlus(layer_map=[(types.Linear, rules.Epsilon())]),
}


def trained(task: str, network: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A trained network, and 200 series in the form that it reads: words are embedded."""
    torch.manual_seed(seed)
    make, features = TASKS[task]
    embedding = nn.Identity() if features else nn.Embedding(WORDS, 16)
    model = NETWORKS[network](features or 16)
    parameters, steps = [*embedding.parameters(), *model.parameters()], 1500
    optimizer = torch.optim.Adam(parameters)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        x, wanted = make(128)
        optimizer.zero_grad()
        (model(embedding(x))[:, 0] - wanted).square().mean().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False), embedding(make(200)[0]).detach()


def effects(model: nn.Module, x: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """By how much the output falls if one step is replaced by the baseline, for each step. Shape (batch, steps)."""
    found = []
    for step in range(STEPS):
        cut = x.clone()
        cut[:, step] = baseline
        found.append((model(x) - model(cut))[:, 0])
    return torch.stack(found, 1)


def agreement(relevance: torch.Tensor, effect: torch.Tensor) -> float:
    """The mean correlation over the steps of a series."""
    pairs = (torch.stack(pair) for pair in zip(relevance, effect, strict=True))
    return float(torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs]).nanmean())


def measured(task: str, network: str) -> dict[str, float]:
    """The median agreement over the seeds, for each composite."""
    chosen = CONVOLUTIONAL if network == "TCN" else RECURRENT
    found: dict[str, list[float]] = {name: [] for name in chosen}
    for seed in SEEDS:
        model, x = trained(task, network, seed)
        baseline = torch.zeros(x.shape[-1]) if TASKS[task][1] else x.mean((0, 1))
        effect = effects(model, x, baseline)
        for name, composite in chosen.items():
            explain_model = lrpfx.transform(model, composite, example_inputs=x)
            found[name].append(agreement(lrpfx.attribute(explain_model, x, 0).relevance.sum(2), effect))
    return {name: statistics.median(values) for name, values in found.items()}


def table(networks: list[str], columns: list[str]) -> str:
    """A line for each task and network."""
    lines = [
        f"| task | network | {' | '.join(f'`{one}`' if ' ' not in one else one for one in columns)} |",
        "|---|---|" + "---:|" * len(columns),
    ]
    for task in TASKS:
        for network in networks:
            values = measured(task, network)
            lines.append(f"| {task} | {network} | {' | '.join(f'{values[one]:.2f}' for one in columns)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the tables."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tables = table(["LSTM", "GRU", "RNN"], list(RECURRENT)), table(["TCN"], list(CONVOLUTIONAL))
    write_between(DOCUMENT, "series", "\n" + "\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
