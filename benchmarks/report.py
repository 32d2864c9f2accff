"""Writes the measurements to docs/benchmarks.md, with a plot."""

import platform
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from contenders import FURTHER
from documents import write_between

DOCS = Path(__file__).parents[1] / "docs"


def _table(records: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """The records as Markdown. `columns`: title of each column, and the key of its values."""
    lines = [list(columns), ["---"] * len(columns), *([record[key] for key in columns.values()] for record in records)]
    return "\n".join("| " + " | ".join(_shown(cell) for cell in line) + " |" for line in lines)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _plot(records: list[dict[str, Any]]) -> None:
    bars = [record for record in records if "milliseconds" in record and "plain" not in record["contender"]]
    groups = list(dict.fromkeys((record["network"], record["composite"]) for record in bars))
    contenders = list(dict.fromkeys(record["contender"] for record in bars))
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        found = {(one["network"], one["composite"]): one["to_gradient"] for one in bars if one["contender"] == contender}
        places = [place for place, group in enumerate(groups) if group in found]
        heights = [found[groups[place]] for place in places]
        axes.bar([place + number * width for place in places], heights, width, label=contender)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(groups))], ["\n".join(group) for group in groups], fontsize=7
    )
    axes.set_ylabel("time / plain gradient")
    axes.legend(fontsize=8)
    figure.savefig(DOCS / "images" / "benchmarks.png", dpi=110)


def write(
    speed: list[dict[str, Any]],
    formats: list[dict[str, Any]],
    profile: list[dict[str, Any]],
    memory: list[dict[str, Any]],
    compilation: list[dict[str, Any]],
    language: list[dict[str, Any]],
    conditions: list[dict[str, Any]],
) -> None:
    """Write the document and the plot."""
    if speed:
        _plot(speed)
    for record in (*speed, *formats, *memory, *profile, *language):
        record.update({key: round(record[key]) for key in ("milliseconds", "peak", "held") if record.get(key) is not None})
    timed = [record for record in speed if record["contender"] != FURTHER]
    further = [record for record in speed if record["contender"] == FURTHER]
    for record in profile:
        record["arithmetic"] = f"{100 * record['arithmetic']:.0f}%"
    what = {"network": "network", "composite": "composite"}
    who = {**what, "contender": "contender"}
    costs = {**who, "ms": "milliseconds", "/ gradient": "to_gradient", "faster than Zennit": "faster_than_zennit"}
    peaks = {**who, "peak, MiB": "peak", "/ gradient": "to_gradient", "/ Zennit": "to_zennit", "held, MiB": "held"}
    shares = {"network": "network", "what": "what", "ms": "milliseconds", "convolutions and products": "arithmetic"}
    growth = {"network": "network", "nodes": "nodes", "seconds": "seconds", "ms per node": "milliseconds_per_node"}
    transformers = {"model": "model", "contender": "contender", "ms": "milliseconds", "/ gradient": "to_gradient"}
    transformers |= {"peak, MiB": "peak", "peak / gradient": "peak_to_gradient"}
    text = f"""# Benchmarks

Written by `make bench`, on {platform.machine()} with torch {torch.__version__}, two threads. Batches of four images of 224×224,
float32. Contenders take turns in one process; every ratio is a median over rounds. The plain gradient is that of the same
network with batch norm merged; compiled contenders are compared with the compiled plain gradient.

![Time relative to the plain gradient](images/benchmarks.png)

## Speed

"Convolutions" counts the convolutions that run, forward and transposed. "Floor" is the arithmetic of convolutions and matrix
products relative to that of the plain gradient: the ratio if nothing else took time. Captum uses its own default rules.

{_table(timed, {**costs, "convolutions": "convolutions", "floor": "floor"})}

## Transformers

AttnLRP with an epsilon of 0, whose backward pass carries multipliers instead of relevance, relative to the plain gradient times
the input. Random weights; GPT-2 and Llama with a hidden size of 256 explain the largest logit at the last position. Compiled
contenders are compared with the compiled gradient, and LXT with lrpfx, in turns: it patches the model for good. Peaks are above
the memory in use before one attribution.

{_table(language, transformers)}

## Formats

The lowered program in each format, run by `lrpfx.load`, compared with eager `lrpfx.attribute`.

{_table(formats, {**who, "ms": "milliseconds", "/ eager": "to_eager"})}

## Each further target

Ten targets share one forward pass. The table shows the cost of each target after the first, relative to a plain gradient. The
floor is the cost of the transposed convolutions alone: 0.5 with one for each layer. AlphaBeta needs two for each layer, and so
does Gamma where a convolution feeds a sum.

{_table(further, {**what, "/ gradient": "to_gradient"})}

## Conditions

Fifty conditional maps of one image, each through another channel of one layer of ResNet-50, under EpsilonPlusFlat. In lrpfx
they share one forward pass.

{_table(conditions, {"contender": "contender", "seconds": "seconds", "lrpfx / contender": "lrpfx_to"})}

## Where the time goes

One eager attribution under the profiler: the share of convolutions and matrix products, and the largest other operators.

{_table(profile, {**shares, "others": "others"})}

## Memory

The peak of one attribution above the memory in use before it, with each contender in a separate process, and the parameters and
buffers that the network holds permanently: in lrpfx those of the model, those with batch norm merged, and modified ones.

{_table(memory, peaks)}

## Compilation

The time of `lrpfx.transform` without example inputs.

{_table(compilation, growth)}
"""
    (DOCS / "benchmarks.md").write_text(text)


def write_captures(captures: list[dict[str, Any]]) -> None:
    """Write the first table of docs/performance.md."""
    columns = {"network": "network", "": "contender", "/ gradient": "to_gradient", "/ torch.export": "to_export"}
    write_between(DOCS / "performance.md", "captures", _table(captures, columns))


def write_exports(exports: list[dict[str, Any]]) -> None:
    """Write the second table of docs/performance.md."""
    columns = {
        "network": "network",
        "seconds": "seconds",
        "/ export, the same open sizes": "to_open",
        "/ export, fixed sizes": "to_fixed",
        "one sample: / open": "one_to_open",
        "/ fixed": "one_to_fixed",
    }
    write_between(DOCS / "performance.md", "exports", _table(exports, columns))


def write_evaluation(evaluation: list[dict[str, Any]]) -> None:
    """Write the third table of docs/performance.md."""
    columns = {"": "contender", "seconds": "seconds", "/ forwards": "to_forwards"}
    write_between(DOCS / "performance.md", "evaluation", _table(evaluation, columns))
