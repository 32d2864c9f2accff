"""Measure everything; write docs/benchmarks.md and the tables of docs/performance.md: `make bench`, or the names of parts."""

import argparse
import json
import warnings
from pathlib import Path

import captures
import compilation
import conditions
import evaluation
import language
import memory
import report
import speed
import torch
from contenders import COMPOSITES

NETWORKS = ["vgg16", "resnet50"]
PARTS = ("speed", "formats", "profile", "memory", "compilation", "language", "conditions")
CAPTURES, EXPORTS, EVALUATION = "captures", "exports", "evaluation"
RESULTS = Path(__file__).parents[1] / "build" / "benchmarks.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    parser.add_argument("parts", nargs="*", default=[*PARTS, CAPTURES, EXPORTS, EVALUATION])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measures = {
        CAPTURES: lambda: captures.measure(arguments.rounds),
        EXPORTS: lambda: captures.measure_exports(arguments.rounds),
        "compilation": compilation.measure,
        "conditions": lambda: conditions.measure(arguments.rounds),
        EVALUATION: evaluation.measure,
        "language": lambda: language.measure(arguments.rounds),
        "memory": lambda: memory.measure(arguments.networks, list(COMPOSITES)),
        "speed": lambda: [record for name in arguments.networks for record in speed.measure(name, arguments.rounds)],
        "formats": lambda: [record for name in arguments.networks for record in speed.formats(name, arguments.rounds)],
        "profile": lambda: [record for name in arguments.networks for record in speed.profile(name)],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    for part in arguments.parts:
        results[part] = measures[part]()
        RESULTS.write_text(json.dumps(results, indent=1))
    if CAPTURES in arguments.parts:
        report.write_captures(results[CAPTURES])
    if EXPORTS in arguments.parts:
        report.write_exports(results[EXPORTS])
    if EVALUATION in arguments.parts:
        report.write_evaluation(results[EVALUATION])
    if not set(arguments.parts) <= {CAPTURES, EXPORTS, EVALUATION}:
        report.write(*(results.get(part, []) for part in PARTS))


if __name__ == "__main__":
    main()
