"""Measure methods where the answer is known; write docs/measured.md: `make measured`, or the names of tasks.

Numbers are kept in build/measured, so a stopped run goes on.
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from documents import write_between
from measured_tasks import DEFAULT, TASKS, Task

import lrpfx
from lrpfx.measures import ImageData, PartData
from lrpfx.measures.evaluation import Evaluation
from lrpfx.support.table import Table

DOCUMENT = Path(__file__).parents[1] / "docs" / "measured.md"
RESULTS = Path(__file__).parents[1] / "build" / "measured"
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"some of {', '.join(TASKS)}; by default all")
    tasks = parser.parse_args().tasks or list(TASKS)
    unknown = [name for name in tasks if name not in TASKS]
    if unknown:
        parser.error(f"there is no task {unknown[0]}")
    warnings.simplefilter("ignore")
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in tasks:
        found[name] = measured(name)
        print(f"\n{TASKS[name].title}\n{found[name]}", flush=True)
    if set(found) == set(TASKS):
        write(found)


def measured(name: str) -> Evaluation:
    """The evaluation of a task, over the networks of all seeds."""
    task, found = TASKS[name], []
    for seed, data in enumerate(task.data()):
        output = RESULTS / f"{name}_{seed}.json"
        found.append(lrpfx.evaluate(methods_for(task, data), data, task.metrics, batch_size=BATCH, output=output))
    return together(found)


def methods_for(task: Task, data: ImageData | PartData) -> dict[str, Any]:
    """The methods by name, with what an explainer does without `composite=`."""
    default = lrpfx.Explainer(data.model) if isinstance(data, ImageData) else data.parts.by_composite(None)
    return {DEFAULT: default, **{name: name for name in task.methods}}


def together(found: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of the inputs of several, whose groups stay apart."""
    first = found[0]
    prices = {name: sum(one.prices[name] for one in found) / len(found) for name in first.methods}
    groups = tuple((place, group) for place, one in enumerate(found) for group in one.groups)
    samples = torch.cat([one.samples for one in found], 2)
    return Evaluation(first.methods, first.metrics, samples, groups, prices, first.notes, first.unit, first.noun)


def write(found: dict[str, Evaluation]) -> None:
    """Write the tables."""
    write_between(DOCUMENT, "places", places(found))
    for name, evaluation in found.items():
        write_between(DOCUMENT, name, table(evaluation))


def places(found: dict[str, Evaluation]) -> str:
    """Where the default stands in each task, by its first metric."""
    rows = []
    for name, evaluation in found.items():
        metric = next(iter(evaluation.metrics))
        order = _ordered(evaluation, metric)
        ahead, behind = [], []
        for other in order:
            one = evaluation.difference(other, DEFAULT, metric)
            if other != DEFAULT and one.low > 0:
                ahead.append(other)
            if other != DEFAULT and one.high < 0:
                behind.append(other)
        first = f"{order.index(DEFAULT) + 1} of {len(order)}"
        rows.append((TASKS[name].title, f"`{metric}`", first, ", ".join(ahead) or "-", str(len(behind))))
    columns = ("task", "by", "place of the default", "better for certain", "worse for certain")
    return Table(dict.fromkeys(columns, "str"), rows).to_markdown()


def table(evaluation: Evaluation) -> str:
    """All methods, the best one first."""
    metrics = list(evaluation.metrics)
    values = {(one.method, one.metric): f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in evaluation.scores}
    rows = [
        (
            f"**{name}**" if name == DEFAULT else name,
            *(values[name, metric] for metric in metrics),
            f"{evaluation.prices[name]:.1f}",
        )
        for name in _ordered(evaluation, metrics[0])
    ]
    columns = {"method": "str", **dict.fromkeys(metrics, "str"), evaluation.unit: "float64"}
    return Table(columns, rows).to_markdown()


def _ordered(evaluation: Evaluation, metric: str) -> list[str]:
    mean = {one.method: one.mean for one in evaluation.scores if one.metric == metric}
    sign = -1.0 if evaluation.metrics[metric] == "higher" else 1.0
    return sorted(evaluation.methods, key=lambda name: sign * mean[name])


if __name__ == "__main__":
    main()
