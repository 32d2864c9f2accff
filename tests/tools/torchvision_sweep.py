"""All classifiers of torchvision under three composites: transform, forward, relevance and ledger, as a table.

Run as a program, it examines each model and composite in a separate process and writes docs/torchvision.md.
"""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch

# isort: split
import torchvision
from helpers import randomize_batch_norm
from torch import nn

import lrpfx
from lrpfx.attribution.ledger import PARTS
from lrpfx.composites import EpsilonAlpha2Beta1Flat, EpsilonGammaBox, EpsilonPlus

COMPOSITES = {
    "EpsilonPlus": EpsilonPlus,
    "EpsilonAlpha2Beta1Flat": EpsilonAlpha2Beta1Flat,
    "EpsilonGammaBox": lambda: EpsilonGammaBox(low=-3.0, high=3.0),
}
SIZES = (32, 64, 75, 96, 128, 224)
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "torchvision.md"


def classifiers():
    return torchvision.models.list_models(module=torchvision.models)


def random_model(name):
    """A model with random weights and statistics, in float64."""
    torch.manual_seed(0)
    settings = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = randomize_batch_norm(torchvision.models.get_model(name, weights=None, **settings)).eval().double()
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():  # the head of a vision transformer starts at zero
            nn.init.normal_(module.weight, std=0.05)
    return model


def smallest_input(model):
    """The smallest square inputs that the model takes, up to 224: two images, one for models beyond 400 million parameters."""
    images = 1 if sum(parameter.numel() for parameter in model.parameters()) > 400_000_000 else 2
    for size in SIZES:
        x = torch.randn(images, 3, size, size, dtype=torch.float64).clamp(-3, 3)
        try:
            with torch.no_grad():
                return x, model(x)
        except Exception:
            if size == SIZES[-1]:
                raise
    raise AssertionError("no size fits")


def examine(name, composites=tuple(COMPOSITES)):
    """Check one model and return the figures of the table: a dict for each composite."""
    model = random_model(name)
    return examine_model(name, model, smallest_input(model)[0], composites)


def examine_model(name, model, x, composites=tuple(COMPOSITES)):
    """The same for any model."""
    rows, expected = [], model(x).detach()
    for key in composites:
        start = time.perf_counter()
        explain_model = lrpfx.transform(model, COMPOSITES[key](), example_inputs=x)
        seconds = time.perf_counter() - start
        table = lrpfx.assignment(explain_model)
        attribution = lrpfx.attribute(explain_model, x)
        assert (attribution.output - expected).norm() <= 1e-9 * expected.norm()
        assert attribution.relevance.shape == x.shape and torch.isfinite(attribution.relevance).all()
        accounts = lrpfx.ledger(explain_model, x)
        assert accounts.unexplained <= 1e-9, max(accounts, key=lambda entry: abs(entry.unexplained))
        assert abs(accounts.inputs["x"] - attribution.relevance.sum()) <= 1e-9 * accounts.seed_magnitude
        assert "gradient" not in {row.rule for row in table}
        stages = [stage for stage in lrpfx.history(explain_model) if stage.stage == "canonize"]
        reasons = [reason for stage in stages for _, reason in stage.reasons]
        left = [row.name for row in table if row.kind == "BatchNorm"]
        rules = {row.rule.partition("(")[0] for row in table} - {"neutral", "input"}
        rows.append(
            {
                "model": name,
                "composite": key,
                "input": x.shape[-1],
                "front_end": lrpfx.history(explain_model)[0].name,
                "nodes": len(table),
                "rules": sorted(rules),
                "batch_norms": sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
                "left": len(left),
                "why": reasons[-1] if left else "",
                "seconds": seconds,
                "unexplained": accounts.unexplained,
                "input_share": accounts.inputs["x"] / accounts.seed,
                **{part: accounts.total(part) / accounts.seed for part in PARTS},
            }
        )
    return rows


HEADER = """# torchvision's classifiers

All {count} classification models of torchvision {version}, unmodified: random weights, random batch norm statistics, float64,
two images of the smallest size that the model takes (one for the two models beyond 400 million parameters). For every model
and composite, `lrpfx.transform` succeeds, the output equals the model's (1e-9 relative), relevance is finite, every node has a
rule, and the ledger has nothing unexplained (at most 1e-9 of the seed at every node). `make sweep` writes this page.

The shares show where the relevance of the output goes; they sum to 1. In networks with random weights, biases absorb most of
it, and a share may exceed 1 where another is negative.

"""
COLUMNS = (
    *("model", "composite", "input", "front end", "nodes", "rules", "batch norms merged / left"),
    *("inputs", *PARTS, "unexplained", "transform"),
)


def line(row):
    left = f"{row['left']} ({row['why']})" if row["left"] else "0"
    cells = [row["model"], row["composite"], row["input"], row["front_end"], row["nodes"], ", ".join(row["rules"])]
    cells += [f"{row['batch_norms'] - row['left']} / {left}"]
    cells += [f"{row[part]:.3g}" for part in ("input_share", *PARTS)]
    cells += [f"{row['unexplained']:.0e}", f"{row['seconds']:.1f} s"]
    return "| " + " | ".join(map(str, cells)) + " |"


def examine_apart(name, composite):
    """`examine` in a separate process: the largest model needs some 30 GB."""
    command = [sys.executable, __file__, "--one", name, composite]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main(names):
    rows, failed = [], []
    for name, composite in itertools.product(names, COMPOSITES):
        run = examine_apart(name, composite)
        if run.returncode:
            failed.append(name)
            print(f"{name}: FAILED\n{run.stderr[-2000:]}", flush=True)
            continue
        rows.append(json.loads(run.stdout.splitlines()[-1]))
        print(line(rows[-1]), flush=True)
    if not failed and len(names) == len(classifiers()):
        header = HEADER.format(count=len(names), version=torchvision.__version__.partition("+")[0])
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), *map(line, rows)]
        DOCUMENT.write_text(header + "\n".join(lines) + "\n")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(examine(sys.argv[2], (sys.argv[3],))[0]))
    else:
        sys.exit(bool(main(sys.argv[1:] or classifiers())))
