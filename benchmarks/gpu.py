"""Attributions on a GPU against the plain gradient, Zennit and LXT: `make gpu`, which writes the table of docs/gpus.md."""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import COMPOSITES, PLAIN, RANGE, gradient_of, lrpfx_of, merged, network, zennit_of
from documents import write_between
from memory import answer_of

# isort: split
import language
import transformers
from torch import nn

import lrpfx

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpus.md"
NETWORKS, COMPOSITE, IMAGES = ("resnet50", "vgg16"), "EpsilonPlusFlat", 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLASSIFIERS = [f"{name} {dtype}" for name in NETWORKS for dtype in DTYPES]
TOKENS = (2_048, 8_192, 32_768)

Run = Callable[[], torch.Tensor]


def llama(tokens: int, device: torch.device, is_small: bool) -> tuple[nn.Module, torch.Tensor]:
    """An untrained decoder with the widths of a small Llama, in bfloat16, and a text of so many tokens."""
    torch.manual_seed(0)
    wide = {"hidden_size": 64, "intermediate_size": 128} if is_small else {"hidden_size": 2048, "intermediate_size": 8192}
    configuration = transformers.LlamaConfig(
        num_hidden_layers=2 if is_small else 16,
        num_attention_heads=4 if is_small else 32,
        max_position_embeddings=tokens,
        vocab_size=1000,
        use_cache=False,
        **wide,
    )
    with device:
        model = transformers.LlamaForCausalLM(configuration).to(torch.bfloat16)
    return model.eval().requires_grad_(False), torch.randint(0, 1000, (1, tokens), device=device)


def of_images(name: str, dtype: torch.dtype, count: int, size: int, device: torch.device) -> dict[str, Callable[[], Run]]:
    """What makes each contender for a classifier. Zennit leaves its hooks in a network of its own."""
    images = torch.rand(count, 3, size, size, device=device, dtype=dtype)

    def compiled() -> nn.Module:
        return lrpfx.transform(network(name).to(device, dtype), COMPOSITES[COMPOSITE].lrpfx, input_range=RANGE)

    makers: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
        PLAIN: lambda: gradient_of(merged(network(name)).to(device, dtype)),
        "lrpfx": lambda: lrpfx_of(compiled()),
        "lrpfx, compiled": lambda: lrpfx_of(torch.compile(compiled(), fullgraph=True)),
        "Zennit": lambda: zennit_of(network(name).to(device, dtype), COMPOSITE),
    }
    return {contender: lambda make=make: partial(make(), images) for contender, make in makers.items()}


def of_texts(tokens: int, device: torch.device, is_small: bool) -> dict[str, Callable[[], Run]]:
    """The same for a decoder. LXT comes last: it patches transformers for good."""
    model, ids = llama(tokens, device, is_small)
    return {
        PLAIN: lambda: language.gradient_of(model, ids),
        "lrpfx": lambda: language.lrpfx_of(model, ids),
        "LXT": lambda: language.lxt_of(model, ids),
    }


def seconds_of(run: Run, device: torch.device, rounds: int) -> list[float]:
    """The time of each of some calls, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - started)
    return found[1:]


def peak_of(run: Run, device: torch.device) -> float | None:
    """The peak of a call above what is held before it, in MiB; None where it is not known."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def measured(
    what: str, makers: dict[str, Callable[[], Run]], units: int, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """One record for each contender; `units` are explained by a call. Contenders that run out of memory are records, too."""
    records: list[dict[str, Any]] = []
    for contender, make in makers.items():
        record: dict[str, Any] = {"what": what, "contender": contender, "rate": None, "peak": None}
        records.append(record)
        try:
            run = make()
            seconds = statistics.median(seconds_of(run, device, rounds))
            record |= {"rate": units / seconds, "peak": peak_of(run, device)}
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return records


def of_one(what: str, device: torch.device, rounds: int, is_small: bool) -> list[dict[str, Any]]:
    """The records of a classifier, or of a decoder for so many tokens."""
    if what in CLASSIFIERS:
        name, dtype = what.split()
        count, size = (2, 64) if is_small else (IMAGES, 224)
        makers = of_images(name, DTYPES[dtype], count, size, device)
        return measured(f"{name}, {count}×3×{size}×{size}, {dtype}", makers, count, device, rounds)
    tokens = 32 if is_small else int(what)
    return measured(f"Llama, {tokens:,} tokens, bfloat16", of_texts(tokens, device, is_small), tokens, device, rounds)


def table(records: list[dict[str, Any]]) -> str:
    """The records as a table: contenders of one model beside its gradient."""
    rows = ["| | | images or tokens/s | cost / gradient | peak MiB | peak / gradient |", "|---|---|---:|---:|---:|---:|"]
    plain: dict[str, Any] = {}
    for record in records:
        plain = record if record["contender"] == PLAIN else plain
        rate, peak = record["rate"], record["peak"]
        cells = [
            "out of memory" if rate is None else f"{rate:,.1f}",
            "" if rate is None or plain["rate"] is None else f"{plain['rate'] / rate:.2f}",
            "" if peak is None else f"{peak:,.0f}",
            "" if peak is None or plain["peak"] is None else f"{peak / plain['peak']:.2f}",
        ]
        rows.append(f"| {record['what']} | {record['contender']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--only", help="one model and dtype, or number of tokens, in this process")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    if options.only is not None:
        print(json.dumps(of_one(options.only, device, options.rounds, options.small)))
        return
    arguments = ["--device", options.device, "--rounds", str(options.rounds), *["--small"] * options.small]
    names = [*CLASSIFIERS, *map(str, TOKENS[:1] if options.small else TOKENS)]
    records = []
    for name in names:
        records += answer_of(__file__, "--only", name, *arguments)
        print(*records[-4:], sep="\n", flush=True)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    text = f"Measured on {machine} with torch {torch.__version__}:\n\n{table(records)}"
    print(text)
    write_between(options.document, "measured", text)


if __name__ == "__main__":
    main()
