"""Differences from a reference: what DeepLIFT misses on networks of torchvision, transformers, timm, and others.

Run as a program, it examines each network in a separate process, with a limit of processor time, and writes the table of
docs/differences.md. Names as arguments examine only networks whose names contain one of them, and write nothing. After
`--rows FILE`, what is found is appended to the file, one line for each network, and what it holds already is not examined
again.
"""

import json
import multiprocessing
import resource
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import pytest
import small_detectors
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
SECONDS = 600  # of the processor, for each network
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
STATE_SPACE = "state space"  # the modality of architectures


class LogitsOfBoxes(nn.Module):
    """The logits of all boxes of a detector, before any are chosen."""

    def __init__(self, detector):
        super().__init__()
        self.heads = lrpfx.detection.heads(detector)

    def forward(self, x, proposals=None):
        if proposals is None:
            return self.heads.raw(x).logits.flatten(1)
        return self.heads._of_proposals(self.heads.maps(self.heads.padded(x)), x, proposals).logits.flatten(1)


#: What the reference of an input is: zeros of what carries content; masks and positions keep their values.
CONTENT = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds", "decoder_input_ids", "x")


def networks():
    """The networks by group: name -> names."""
    return {
        "torchvision": classifiers(),
        "transformers": [one.name for one in ARCHITECTURES if one.modality != STATE_SPACE],
        "state-space models": [one.name for one in ARCHITECTURES if one.modality == STATE_SPACE],
        "timm": list(TIMM),
        "recurrent": list(RECURRENT),
        "detectors' heads": [*small_detectors.TORCHVISION, *small_detectors.TRANSFORMERS, "Yolo"],
    }


def examine(group, name):
    """The larger gap of two references, relative to the larger output, and the node with the largest part of it."""
    said, output, target = {}, None, largest
    torch.manual_seed(0)
    constants = ()
    if group == "torchvision":
        model = _perturbed(random_model(name))
        inputs = {"x": smallest_input(model)[0][:1]}
    elif group == "detectors' heads":
        model, inputs, constants = _detector(name)
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
    given = {**inputs, **said} if len(inputs) > 1 or said or "x" not in inputs else inputs["x"]
    explain_model = lrpfx.transform(model, DeepLIFT(), given, constants=constants)
    gaps = [gap(explain_model, given, inputs, output, target, random) for random in (False, True)]
    row = {"gap": max(gaps)}
    if row["gap"] > MOST:
        ask = partial(lrpfx.ledger, explain_model, given, target, output=output)
        row["worst"] = _place_of_gap(ask(reference=_references(given, inputs, gaps[1] > gaps[0])))
    return row


def _detector(name):
    """The logits of the boxes of a small detector, the inputs, and the names of those that are no signals."""
    torch.manual_seed(0)
    if name in small_detectors.TRANSFORMERS:
        detector = small_detectors.of_transformers(name)
    elif name == "Yolo":
        detector = small_detectors.yolo().double()
    else:
        small_detectors.replace_kernels(pytest.MonkeyPatch())
        detector = small_detectors.made(name).double()
    model = LogitsOfBoxes(detector).eval()
    inputs = {"x": torch.rand(1, 3, 64, 96 if name == "Yolo" else 64, dtype=torch.float64)}
    names = model.heads.further_names
    further = model.heads.further(inputs["x"])
    return model, {**inputs, **dict(zip(names, further, strict=True))}, names


def _place_of_gap(accounts):
    """The node that explains least of its difference, or what constants take that differ for the reference."""
    worst = max(accounts, key=lambda entry: abs(entry.unexplained))
    booked = max(accounts, key=lambda entry: abs(entry.constants))
    if abs(booked.constants) > abs(worst.unexplained):
        return f"{booked.name} ({booked.kind}): constants that differ for the reference"
    return f"{worst.name} ({worst.kind})"


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
    """`examine` in a process of its own, so that a crash or an endless loop is a row of the table."""
    context = multiprocessing.get_context("fork")  # what is imported stays so
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, group, name))
    process.start()
    sender.close()
    try:
        row = receiver.recv()
    except EOFError:
        row = None
    process.join()
    if row is None:
        code = process.exitcode
        return {"error": f"more than {SECONDS} seconds" if code == -signal.SIGXCPU else f"exit code {code}"}
    return row


def _send(sender, group, name):
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        sender.send(examine(group, name))
    except Exception as error:
        sender.send({"error": shortened(" ".join(f"{type(error).__name__}: {error}".split()))})


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


def main(words, kept):
    rows = {}
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept is not None and kept.exists() else []
    known = {(group, name): row for group, name, row in known}
    for group, names in networks().items():
        for name in names:
            if words and not any(word in (group, name) or (len(word) > 2 and word in name) for word in words):
                continue
            row = known.get((group, name))
            if row is None:
                row = examine_apart(group, name)
                print(group, name, json.dumps(row), flush=True)
                if kept is not None:
                    with kept.open("a") as file:
                        print(json.dumps([group, name, row]), file=file)
            rows.setdefault(group, {})[name] = row
    return rows


if __name__ == "__main__":
    words = sys.argv[1:]
    kept = Path(words[words.index("--rows") + 1]) if "--rows" in words else None
    words = [word for word in words if word not in ("--rows", str(kept))]
    found = main(words, kept)
    if not words:
        write_between(DOCUMENT, "networks", summary(found))
