"""Each kind of model through every door: the table of the start page is true, also where it has no mark."""

import functools
import sys
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from command_line.commands import run
from PIL import Image
from small_detectors import yolo
from torch import nn

import lrpfx
import lrpfx.datasets
from lrpfx.composites import EpsilonPlus
from lrpfx.concepts import collect
from lrpfx.errors import InputError, InputTypeError

TABLE = Path(__file__).parents[2] / "docs" / "index.md"
#: What an error says in a cell without a mark.
REMEDIES = {
    "in Python": "explained (as a data set )?in Python",
    "as tokens": "explainable module, with tokens",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def preprocess(photograph):
    return torch.from_numpy(np.array(photograph.convert("RGB"))).permute(2, 0, 1).float() / 255


def network(*layers):
    return nn.Sequential(*layers).eval()


def pooling(convolution, mean):
    return network(convolution, nn.ReLU(), mean, nn.Flatten(), nn.Linear(4, 2))


class OfSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


class OfNodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.sent, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, edge_index):
        states = self.sent(x).relu()
        return self.head(torch.zeros_like(states).index_add(0, edge_index[1], states[edge_index[0]]).mean(0, keepdim=True))


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters, self.dense = nn.Conv2d(3, 2, 3), nn.Linear(2, 2)

    def forward(self, image, facts):
        return self.filters(image).relu().mean((2, 3)) + self.dense(facts)


class OfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 2)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.words(input_ids).relu().mean(1))


def tokenizer():
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "a", "good", "bad", "film"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


# --- kinds --------------------------------------------------------------------------------------------------------------------


def kind(model, given, layer, *, batch=None, samples=None, target=1, settings=None, options=("--target", "1")):
    """A kind: what the front door takes, `given`, and its `settings`; a `batch` for the module; `samples` of a data set."""
    batch = given if batch is None else batch
    samples = batch if samples is None else samples
    return SimpleNamespace(**locals())


def photographs(model, layer, target=1, options=("--target", "1")):
    given = [Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)) for number in range(2)]
    settings, batch = {"preprocess": preprocess}, torch.stack(list(map(preprocess, given)))
    found = kind(model, given, layer, batch=batch, samples=given, target=target, settings=settings)
    found.options = ("--raw", "--size", "32", *options)
    return found


GRAPH = {"x": torch.randn(4, 3), "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]])}
PAIR = {"image": torch.rand(1, 3, 8, 8), "facts": torch.rand(1, 2)}
TOKENS = [{"input_ids": torch.tensor(one)} for one in ([2, 3, 5], [2, 4, 5])]
KINDS = {
    "photographs": lambda: photographs(pooling(nn.Conv2d(3, 4, 5), nn.AdaptiveAvgPool2d(1)), "0"),
    "regions": lambda: photographs(network(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), "0", lrpfx.Region(1)),
    "boxes": lambda: photographs(yolo(), "detector.model.0.0", lrpfx.Box(0), ("--box", "0")),
    "waves": lambda: kind(
        network(nn.Unflatten(1, (1, -1)), *pooling(nn.Conv1d(1, 4, 9), nn.AdaptiveAvgPool1d(1))),
        torch.randn(2, 90),
        "1",
        settings={"rate": 100},
    ),
    "series": lambda: kind(
        OfSteps().eval(),
        torch.randn(2, 6, 3),
        "recurrent",
        settings={"form": "series"},
        options=("--form", "series", "--target", "1"),
    ),
    "tables": lambda: kind(network(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 3), "0"),
    "volumes": lambda: kind(pooling(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(1)), torch.randn(2, 1, 5, 6, 7), "0"),
    "videos": lambda: kind(pooling(nn.Conv3d(3, 4, 3), nn.AdaptiveAvgPool3d(1)), torch.rand(2, 3, 5, 6, 7), "0"),
    "graphs": lambda: kind(OfNodes().eval(), GRAPH, "sent", samples=[GRAPH, GRAPH]),
    "several inputs": lambda: kind(OfTwo().eval(), PAIR, "filters", samples=[{name: one[0] for name, one in PAIR.items()}] * 2),
    "texts": lambda: kind(
        OfWords().eval(),
        ["a good film", "a bad film"],
        "words",
        batch={"input_ids": torch.stack([one["input_ids"] for one in TOKENS])},
        samples=TOKENS,
        settings={"tokenizer": tokenizer()},
    ),
}
#: Kinds whose cells take minutes: tests of their own have them.
OTHERS = {"maps of queries", "boxes on proposals"}


@functools.cache
def made(name):
    """The kind, and the explainable module of its model."""
    torch.manual_seed(0)
    found = KINDS[name]()
    model = lrpfx.detection.heads(found.model) if lrpfx.detection.is_detector(found.model) else found.model
    return found, lrpfx.transform(model, EpsilonPlus(), found.batch)


# --- doors --------------------------------------------------------------------------------------------------------------------


def explainer(one):
    return lrpfx.Explainer(one.model, **(one.settings or {}))


def explained(one):
    return explainer(one)(one.given, one.target)


def shown(one):
    found = explained(one)
    assert Path(lrpfx.report([*found] if hasattr(found, "__len__") else found, "report.html")).stat().st_size > 10_000


def stored(one):
    data = one.given if one.settings and "tokenizer" in one.settings else one.samples
    view = lrpfx.datasets.attribute(explainer(one), data, "store", target=one.target)
    assert len(view) == len(one.samples) and not view.errors


def collected(one, module):
    found = collect(
        module, one.samples if isinstance(one.samples[0], dict) else list(one.batch), [one.layer], target=one.target
    )
    assert not found.errors and found.top(one.layer, 0)


def command(name, one, several):
    """A command on a file, or on those of a folder, with the model of the kind."""
    sys.modules["model_of_kind"] = SimpleNamespace(model=one.model)
    try:
        path = written(name, one, several)
        assert run("dataset" if several else "explain", "model_of_kind:model", path, *one.options, "--output", "out")[0] == 0
    finally:
        del sys.modules["model_of_kind"]


def written(name, one, several):
    """A file of a kind, or what has several samples."""
    if isinstance(one.given[0] if isinstance(one.given, list) else None, Image.Image):
        Path("files").mkdir()
        for number, photograph in enumerate(one.given):
            photograph.save(f"files/{number}.png")
        return "files" if several else "files/0.png"
    if name == "waves":
        with wave.open("one.wav", "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(100)
            file.writeframes((one.given[0].numpy() * 3000).astype("<i2").tobytes())
        return "one.wav"
    if name == "tables":
        pd.DataFrame(one.given.numpy(), columns=["a", "b", "c"]).to_csv("one.csv", index=False)
        return "one.csv"
    if name == "texts":
        Path("one.txt").write_text(one.given[0])
        return "one.txt"
    if isinstance(one.given, dict):
        np.savez("one.npz", **{key: value.numpy() for key, value in one.given.items()})
        return "one.npz"
    np.save("one.npy", (one.given if several or name == "series" else one.given[0]).numpy())
    return "one.npy"


DOORS = {
    "explain": lambda name, one, module: explained(one),
    "attribute": lambda name, one, module: lrpfx.attribute(module, one.batch, one.target),
    "lower": lambda name, one, module: lrpfx.lower(module, one.batch, target="index" if one.target == 1 else one.target),
    "data sets": lambda name, one, module: stored(one),
    "collect": lambda name, one, module: collected(one, module),
    "report": lambda name, one, module: shown(one),
    "lrpfx explain": lambda name, one, module: command(name, one, False),
    "lrpfx dataset": lambda name, one, module: command(name, one, True),
}


def cells():
    """The cells of the table by row and column."""
    section = TABLE.read_text(encoding="utf-8").split("## Each kind through every door")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][1:] == [
        "`explain`", "`attribute`", "`lower`", "[data sets](datasets.md)", "[`collect`](concepts.md)", "[`report`](report.md)",
        "[`lrpfx explain`](command_line.md)", "`lrpfx dataset`",
    ]  # fmt: skip
    return {row[0]: dict(zip(DOORS, row[1:], strict=True)) for row in rows[2:]}


def test_the_table_has_all_kinds():
    assert set(cells()) == {*KINDS, *OTHERS}


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")
@pytest.mark.parametrize(
    "door", [pytest.param(one, marks=pytest.mark.programs) if one == "lower" or "lrpfx" in one else one for one in DOORS]
)
@pytest.mark.parametrize("name", KINDS)
def test_a_cell(name, door):
    one, module = made(name)
    cell = cells()[name][door]
    if cell == "✓":
        DOORS[door](name, one, module)
        return
    with pytest.raises((InputError, InputTypeError), match=REMEDIES[cell]):
        DOORS[door](name, one, module)
