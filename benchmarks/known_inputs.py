"""How much relevance falls on the inputs that are known to decide; writes the table of docs/series_and_tables.md.

Each network learns a task whose answer depends on some of its inputs alone. The figure is the share of |attribution| on these,
a mean over samples, and the median over networks with several seeds. Networks that have not learnt the task are left out.
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
from lrpfx.measures import methods

DOCUMENT = Path(__file__).parent.parent / "docs" / "series_and_tables.md"
STEPS, FEATURES, COLUMNS, UNITS, SEEDS, SAMPLES = 32, 3, 12, 32, (0, 1, 2), 200

# --- tasks: inputs, the answer, and which inputs decide ----------------------------------------------------------------------

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def motif(count: int) -> Batch:
    """Which of two waves of 6 steps stands somewhere in one of the features, among noise."""
    x, decides = 0.5 * torch.randn(count, STEPS, FEATURES), torch.zeros(count, STEPS, FEATURES, dtype=torch.bool)
    kind, first, feature = (torch.randint(0, most, (count,)) for most in (2, STEPS - 6, FEATURES))
    places = first[:, None] + torch.arange(6)
    waves = 2 * torch.stack([torch.tensor([1.0, 1, 1, -1, -1, -1]), torch.tensor([1.0, -1, 1, -1, 1, -1])])
    rows = torch.arange(count)[:, None]
    x[rows, places, feature[:, None]] += waves[kind]
    decides[rows, places, feature[:, None]] = True
    return x, 2.0 * kind - 1, decides


def weighted(count: int) -> Batch:
    """The weighted sum of three values at fixed steps, among noise."""
    x, decides = torch.randn(count, STEPS, FEATURES), torch.zeros(count, STEPS, FEATURES, dtype=torch.bool)
    decides[:, [4, 15, 29], [0, 1, 2]] = True
    return x, x[:, 4, 0] - 2 * x[:, 15, 1] + x[:, 29, 2], decides


def formula(count: int) -> Batch:
    """A product, a rectified value and a square of four of twelve columns."""
    x, decides = torch.randn(count, COLUMNS), torch.zeros(count, COLUMNS, dtype=torch.bool)
    decides[:, :4] = True
    return x, x[:, 0] * x[:, 1] + 2 * x[:, 2].relu() + x[:, 3].square() - 1, decides


def switch(count: int) -> Batch:
    """One of two columns, chosen by the sign of a third."""
    x, decides = torch.randn(count, COLUMNS), torch.zeros(count, COLUMNS, dtype=torch.bool)
    first = x[:, 0] > 0
    decides[:, 0], decides[:, 1], decides[:, 2] = True, first, ~first
    return x, 2 * torch.where(first, x[:, 1], x[:, 2]), decides


# --- networks ----------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM, and a dense layer on the mean of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(FEATURES, UNITS, batch_first=True), nn.Linear(UNITS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for series (batch, steps, features)."""
        return self.head(self.layer(x)[0].mean(1))


class Convolutional(nn.Module):
    """A temporal convolutional network with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(width, UNITS, 3, padding=2**depth, dilation=2**depth)
            for depth, width in enumerate([FEATURES, UNITS, UNITS, UNITS])
        )
        self.head = nn.Linear(UNITS * STEPS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for series (batch, steps, features)."""
        value = x.transpose(1, 2)
        for depth, layer in enumerate(self.layers):
            changed = torch.relu(layer(value))
            value = value + changed if depth else changed
        return self.head(value.flatten(1))


class Patches(nn.Module):
    """As PatchTST: patches of four steps as tokens of an encoder, and a dense layer on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4 * FEATURES, UNITS)
        self.positions = nn.Parameter(0.02 * torch.randn(STEPS // 4, UNITS))
        layer = nn.TransformerEncoderLayer(UNITS, 4, 2 * UNITS, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(UNITS * STEPS // 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for series (batch, steps, features)."""
        tokens = self.embed(x.reshape(-1, STEPS // 4, 4 * FEATURES)) + self.positions
        return self.head(self.encoder(tokens).flatten(1))


class Stacks(nn.Module):
    """As N-BEATS: blocks that each take from the series what they explain, and add to the forecast."""

    def __init__(self) -> None:
        super().__init__()
        size = STEPS * FEATURES
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * UNITS), nn.ReLU(), nn.Linear(2 * UNITS, 2 * UNITS), nn.ReLU()) for _ in range(3)
        )
        self.backcasts = nn.ModuleList(nn.Linear(2 * UNITS, size) for _ in range(3))
        self.forecasts = nn.ModuleList(nn.Linear(2 * UNITS, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for series (batch, steps, features)."""
        rest, total = x.flatten(1), torch.zeros(1)
        for block, backcast, forecast in zip(self.blocks, self.backcasts, self.forecasts, strict=True):
            hidden = block(rest)
            rest, total = rest - backcast(hidden), total + forecast(hidden)
        return total


def dense() -> nn.Module:
    """Three dense layers."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


class Tokens(nn.Module):
    """As FT-Transformer: each column is a token, and a further token collects the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(0.2 * torch.randn(COLUMNS, UNITS)) for _ in range(2))
        self.collects = nn.Parameter(0.2 * torch.randn(1, UNITS))
        layer = nn.TransformerEncoderLayer(UNITS, 4, 2 * UNITS, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(UNITS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for rows (batch, columns)."""
        tokens = x[:, :, None] * self.weight + self.bias
        tokens = torch.cat([self.collects.expand(x.shape[0], 1, UNITS), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])


class Masks(nn.Module):
    """As TabNet: in each of two steps, a mask chooses columns, and a gated layer reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, 2 * UNITS)
        self.choose = nn.ModuleList(nn.Linear(UNITS, COLUMNS) for _ in range(2))
        self.read = nn.ModuleList(nn.Linear(COLUMNS, 2 * UNITS) for _ in range(2))
        self.head = nn.Linear(UNITS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for rows (batch, columns)."""
        hidden, total = nn.functional.glu(self.first(x)), 0.0
        for choose, read in zip(self.choose, self.read, strict=True):
            hidden = nn.functional.glu(read(x * choose(hidden).softmax(1)))
            total = total + torch.relu(hidden)
        return self.head(total)


#: Task -> (how samples are drawn, its networks by name).
TASKS: dict[str, tuple[Callable[[int], Batch], dict[str, Callable[[], nn.Module]]]] = {
    "a motif in noise": (motif, {"LSTM": Recurrent, "TCN": Convolutional, "PatchTST": Patches, "N-BEATS": Stacks}),
    "three of 96 values": (weighted, {"LSTM": Recurrent, "TCN": Convolutional, "PatchTST": Patches, "N-BEATS": Stacks}),
    "formula of 4 of 12 columns": (formula, {"dense": dense, "FT-Transformer": Tokens, "TabNet": Masks}),
    "a column chosen by another": (switch, {"dense": dense, "FT-Transformer": Tokens, "TabNet": Masks}),
}


def trained(task: str, network: str, seed: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, float]:
    """A trained network, samples, which of their inputs decide, and the share of the variance that it explains."""
    torch.manual_seed(seed)
    make, networks = TASKS[task]
    model, steps = networks[network](), 1500
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(steps):
        x, wanted, _ = make(128)
        optimizer.zero_grad()
        (model(x)[:, 0] - wanted).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model = model.eval().requires_grad_(False)
    x, wanted, decides = make(SAMPLES)
    return model, x, decides, float(1 - (model(x)[:, 0] - wanted).square().mean() / wanted.var())


# --- attributions ------------------------------------------------------------------------------------------------------------

Attribute = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def of_composite(make: Callable[[], composites.Composite]) -> Attribute:
    """Relevance of the rules of a composite."""

    def attribute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return lrpfx.attribute(lrpfx.transform(model, make(), example_inputs=x), x, 0).relevance

    return attribute


def integrated_gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The input times its mean gradient on the way from zeros."""
    return methods.integrated_gradients(model, x, torch.zeros(len(x), dtype=torch.long), torch.zeros_like(x), 32)


def occlusion(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By how much the output falls if one value is replaced by zero."""
    flat, found = x.flatten(1), []
    for place in range(flat.shape[1]):
        cut = flat.clone()
        cut[:, place] = 0
        found.append((model(x) - model(cut.reshape(x.shape)))[:, 0])
    return torch.stack(found, 1).reshape(x.shape)


ATTRIBUTIONS: dict[str, Attribute] = {
    "`EpsilonPlus`": of_composite(composites.EpsilonPlus),
    "`GammaByDepth`": of_composite(composites.GammaByDepth),
    "Epsilon everywhere": of_composite(lambda: composites.EpsilonPlus(layer_map=[(types.Linear, rules.Epsilon())])),
    "Gamma for convolutions (default)": of_composite(
        lambda: composites.EpsilonPlus(layer_map=[(types.Convolution, rules.Gamma(0.25))])
    ),
    "Gamma everywhere": of_composite(lambda: composites.EpsilonPlus(layer_map=[(types.Linear, rules.Gamma(0.25))])),
    "integrated gradients": integrated_gradients,
    "occlusion": occlusion,
}


def share_on(attribution: torch.Tensor, decides: torch.Tensor) -> float:
    """The share of |attribution| on the inputs that decide, a mean over samples."""
    size = attribution.abs()
    return float(((size * decides).flatten(1).sum(1) / size.flatten(1).sum(1).clamp(min=1e-30)).mean())


def measured(task: str, network: str) -> tuple[dict[str, float], int]:
    """The median share of each attribution, and the number of networks that learnt the task."""
    found: dict[str, list[float]] = {name: [] for name in ATTRIBUTIONS}
    for seed in SEEDS:
        model, x, decides, explained = trained(task, network, seed)
        if explained < 0.7:
            print(f"{task}, {network}, seed {seed}: explains {explained:.2f} of the variance: left out", flush=True)
            continue
        for name, attribute in ATTRIBUTIONS.items():
            found[name].append(share_on(attribute(model, x), decides))
    return {name: statistics.median(values) for name, values in found.items() if values}, len(found["occlusion"])


def table() -> str:
    """A line for each task and network; the best share of a line is bold."""
    lines = [f"| task | network | {' | '.join(ATTRIBUTIONS)} |", "|---|---|" + "---:|" * len(ATTRIBUTIONS)]
    for task, (_, networks) in TASKS.items():
        for network in networks:
            values, _ = measured(task, network)
            if values:
                shown = {name: f"{value:.2f}" for name, value in values.items()}
                best = max(shown.values())
                cells = [f"**{shown[name]}**" if shown[name] == best else shown[name] for name in ATTRIBUTIONS]
                lines.append(f"| {task} | {network} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write_between(DOCUMENT, "known inputs", f"\n{table()}\n")


if __name__ == "__main__":
    main()
