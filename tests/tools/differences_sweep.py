"""Differences from a reference: what DeepLIFT misses on networks of torchvision, transformers, timm and recurrent ones.

Run as a program, it examines each network in a separate process, with a time limit, and writes the table of
docs/differences.md. Names as arguments examine only networks whose names contain one of them, and write nothing.
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch

# isort: split
from documents import write_between
from small_transformers import ARCHITECTURES, architecture, inputs_for, small_model
from torch import nn
from torchvision_sweep import classifiers, random_model, smallest_input
from transformers_sweep import explained, largest, shortened

import lrpfx
from lrpfx.composites import DeepLIFT
from lrpfx.ir.node import floating_tensors

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "differences.md"
SECONDS = 300
MOST, MOST_IN_PART = 1e-9, 1e-6  # the latter for networks that compute in part in single precision
#: Networks of timm with building blocks that torchvision's lack.
TIMM = (
    *("resnetv2_50", "efficientvit_b0", "mobilenetv4_conv_small", "convnextv2_atto", "fastvit_t8", "coat_lite_tiny"),
    *("mixer_s32_224", "cait_xxs24_224", "edgenext_xx_small", "maxvit_rmlp_pico_rw_256", "ghostnet_100", "repvgg_a0"),
)


class Recurrent(nn.Module):
    """Two bidirectional recurrent layers and a dense layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(6, 8, 2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.layer(x)[0].mean(1))


RECURRENT = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
#: What the reference of an input is: zeros of what carries content; masks and positions keep their values.
CONTENT = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds", "decoder_input_ids", "x")


def networks():
    """The networks by group: name -> names."""
    return {
        "torchvision": classifiers(),
        "transformers": [one.name for one in ARCHITECTURES],
        "timm": list(TIMM),
        "recurrent": list(RECURRENT),
    }


def examine(group, name):
    """The larger gap of two references, relative to the larger output, and the node with the largest part of it."""
    said, output, target = {}, None, largest
    torch.manual_seed(0)
    if group == "torchvision":
        model = _perturbed(random_model(name))
        inputs = {"x": smallest_input(model)[0]}
    elif group == "timm":
        import timm

        model = _perturbed(timm.create_model(name, pretrained=False, num_classes=10).eval().double())
        size = model.default_cfg["input_size"][-1]
        inputs = {"x": torch.randn(1, 3, size, size, dtype=torch.float64)}
    elif group == "recurrent":
        model, inputs = Recurrent(RECURRENT[name]).eval().double(), {"x": torch.randn(2, 9, 6, dtype=torch.float64)}
    else:
        one = architecture(name)
        model = small_model(one)
        inputs, said, output = inputs_for(one, model, one.lengths[0]), one.said, explained
        if one.called_before:
            with torch.no_grad():
                model(**inputs, **said)
    given = {**inputs, **said} if group == "transformers" else next(iter(inputs.values()))
    explain_model = lrpfx.transform(model, DeepLIFT(), given)
    gaps = [gap(explain_model, given, inputs, output, target, random) for random in (False, True)]
    accounts = lrpfx.ledger(explain_model, given, target, output=output, reference=_references(given, inputs, True))
    worst = max(accounts, key=lambda entry: abs(entry.unexplained))
    return {"gap": max(gaps), "nodes": len(lrpfx.assignment(explain_model)), "worst": f"{worst.name} ({worst.kind})"}


def _perturbed(model):
    """The model with other parameters: some weights and all biases start at zero, and normalize a reference of zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def gap(explain_model, given, inputs, output, target, random):
    """What relevance misses of the difference of the outputs, relative to the larger one."""
    reference = _references(given, inputs, random)
    found = lrpfx.attribute(explain_model, given, target, output=output, reference=reference)
    weights = (target(found.output) != 0).to(found.output.dtype)
    ours, theirs = (float((weights * one).sum()) for one in (found.output, found.reference_output))
    relevances = floating_tensors(found.relevance)
    assert all(torch.isfinite(one).all() for one in relevances), "relevance is not finite"
    return abs(sum(float(one.sum()) for one in relevances) - (ours - theirs)) / max(abs(ours), abs(theirs))


def _references(given, inputs, random):
    """References of the inputs with content: zeros or, if `random`, other samples."""
    references = {name: _reference(value, random) for name, value in inputs.items() if name in CONTENT}
    return references if isinstance(given, dict) else next(iter(references.values()))


def _reference(value, random):
    if not random:
        return torch.zeros_like(value)
    torch.manual_seed(1)
    return value.flip(-1) if not value.is_floating_point() else torch.randn_like(value)


# --- the table ---------------------------------------------------------------------------------------------------------------


def examine_apart(group, name):
    """`examine` in a separate process, so that a crash or an endless loop is a row of the table."""
    command = [sys.executable, __file__, "--one", group, name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {SECONDS} seconds"}
    if run.returncode:
        told = [text for text in run.stderr.splitlines() if "Error" in text] or [f"exit {run.returncode}"]
        return {"error": shortened(told[-1])}
    return json.loads(run.stdout.splitlines()[-1])


def summary(rows):
    """The table: a row for each group, and one for each network that misses the bound."""
    lines = ["| networks | examined | gap at most 1e-9 | at most 1e-6 | median gap |", "| --- | --- | --- | --- | --- |"]
    others = ["| network | gap | where |", "| --- | --- | --- |"]
    for group, of_group in rows.items():
        gaps = sorted(row["gap"] for row in of_group.values() if "gap" in row)
        counts = [len(of_group), *(sum(one <= most for one in gaps) for most in (MOST, MOST_IN_PART))]
        lines.append(f"| {group} | {' | '.join(map(str, counts))} | {gaps[len(gaps) // 2]:.0e} |")
        for name, row in of_group.items():
            if "error" in row:
                others.append(f"| {name} | | {row['error']} |")
            elif row["gap"] > MOST_IN_PART:
                others.append(f"| {name} | {row['gap']:.0e} | {row['worst']} |")
    return "\n".join([*lines, *(["", "The others:", "", *others] if len(others) > 2 else [])])


def main(words):
    rows = {}
    for group, names in networks().items():
        for name in names:
            if words and not any(word in (group, name) or (len(word) > 2 and word in name) for word in words):
                continue
            row = rows.setdefault(group, {})[name] = examine_apart(group, name)
            print(group, name, json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        warnings.simplefilter("ignore")
        print(json.dumps(examine(*sys.argv[2:])))
    else:
        found = main(sys.argv[1:])
        if not sys.argv[1:]:
            write_between(DOCUMENT, "networks", summary(found))
