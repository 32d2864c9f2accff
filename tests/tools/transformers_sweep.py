"""Architectures of Hugging Face transformers: transform, forward, relevance and ledger, as a table.

Run as a program, it examines each architecture in a separate process, with a time limit, and writes docs/transformers.md. A
name as an argument examines only architectures whose names contain it, and writes nothing.
"""

import json
import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import transformers
from small_transformers import ARCHITECTURES, architecture, inputs_for, small_model

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.ir.node import floating_tensors

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "transformers.md"
SECONDS, AT_ONCE = 300, 2
MOST_UNEXPLAINED = 1e-6


def explained(output):
    """The logits of an output, or its first tensor: scores or states."""
    return output["logits"] if "logits" in output else floating_tensors(dict(output))[0]


def largest(output):
    """Relevance of the largest entry of each sample."""
    flat = output.flatten(1)
    chosen = torch.nn.functional.one_hot(flat.argmax(1), flat.shape[1]) == 1
    return torch.where(chosen, flat, 0).reshape(output.shape)


def examine(name):
    """Check one architecture and return the figures of its row."""
    one = architecture(name)
    model = small_model(one)
    first, second = (inputs_for(one, model, length) for length in one.lengths)
    if one.called_before:
        with torch.no_grad():
            model(**first, **one.said)
    start = time.perf_counter()
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs={**first, **one.said}, constants=one.constants)
    row = {"transform": time.perf_counter() - start, "nodes": len(lrpfx.assignment(explain_model))}
    row["front_end"] = lrpfx.history(explain_model)[0].name
    row.update(figures(model, explain_model, first, one.said))
    row["second"] = ""
    if any(value.shape != second[name].shape for name, value in first.items()):
        try:
            other = figures(model, explain_model, second, one.said)
            row["second"] = "the same module"
        except lrpfx.InputError as error:
            row["refused"] = str(error).partition(":")[0]
            again = lrpfx.transform(model, AttnLRP(), example_inputs={**second, **one.said}, constants=one.constants)
            other = figures(model, again, second, one.said)
            row["second"] = "a transform of its own"
        for part in ("forward", "unexplained"):
            row[part] = max(row[part], other[part])
    said = [f"`{name}={value}`" for name, value in one.said.items()]
    said += [f"`constants={[*one.constants]}`"] if one.constants else []
    row["said"] = ", ".join([*said, *(["one call before"] if one.called_before else [])])
    row["masked"] = "attention_mask" in first
    row["precision"] = 1e-9 if one.dtype == torch.float64 else 1e-5
    return row


def figures(model, explain_model, inputs, said):
    given = {**inputs, **said}
    with torch.no_grad():
        expected = explained(model(**given))
    start = time.perf_counter()
    attribution = lrpfx.attribute(explain_model, given, largest, output=explained)
    seconds = time.perf_counter() - start
    forward = float((attribution.output - expected).norm() / expected.norm())
    for relevance in floating_tensors(attribution.relevance):
        assert torch.isfinite(relevance).all(), "relevance is not finite"
    accounts = lrpfx.ledger(explain_model, given, largest, output=explained)
    assert accounts.seed_magnitude, "the output is zero"
    worst = max(accounts, key=lambda entry: abs(entry.unexplained))
    return {
        "attribute": seconds,
        "forward": forward,
        "unexplained": accounts.unexplained,
        "worst": worst.name,
        "balance": abs(accounts.balance) / accounts.seed_magnitude,
    }


HEADER = """# Architectures of transformers

{count} architectures of Hugging Face transformers {version} as they are, in small random configurations: two samples, the end
of the second hidden by the mask where the architecture takes one, and a second length where inputs have a length. The composite
is `AttnLRP()`, and the explained output is the largest entry of each sample. For {right} of them, `lrpfx.transform` succeeds,
the output equals the model's, and the ledger has nothing unexplained (at most 1e-6 of the seed at any node), for both lengths.
The rows of the others tell why not. `make sweep-transformers` writes this page.

*Said* is what had to be said beyond the model's own inputs. *Second length*: whether one explainable module takes both lengths.
*Forward* and *unexplained* are the larger figures of both; models that compute in single precision, all of them or in part,
have some 1e-7. Seconds are those of one thread, with two architectures examined at a time.

"""
COLUMNS = ("architecture", "nodes", "said", "mask", "second length", "forward", "unexplained", "transform", "attribute")


def is_right(row):
    return "error" not in row and row["forward"] <= row["precision"] and row["unexplained"] <= MOST_UNEXPLAINED


def line(one, row):
    if "error" in row:
        return f"| {one.name} | {row['error']} |" + " |" * (len(COLUMNS) - 2)
    cells = [one.name, row["nodes"], row["said"], "yes" if row["masked"] else "", row["second"]]
    cells += [f"{row['forward']:.0e}", f"{row['unexplained']:.0e}", f"{row['transform']:.1f} s", f"{row['attribute']:.2f} s"]
    return "| " + " | ".join(map(str, cells)) + " |"


def shortened(error):
    """An error as the cell of a table: its first sentence, without paths of files."""
    first = re.sub(r"\(?(in [^()]*, )?/\S+:\d+\)?", "", error.replace("|", "/")).partition(". ")[0]
    return first if len(first) < 240 else first[:240].rsplit(" ", 1)[0] + " ..."


def examine_apart(one):
    """`examine` in a separate process, so that a crash or an endless loop is a row of the table."""
    command = [sys.executable, __file__, "--one", one.name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {SECONDS} seconds"}
    if run.returncode:
        told = [text for text in run.stderr.splitlines() if text.strip()]
        kept = [text for text in told if "Error" in text or "error:" in text.lower()] or told or [f"exit {run.returncode}"]
        return {"error": shortened(kept[-1]), "stderr": run.stderr}
    return json.loads(run.stdout.splitlines()[-1])


def main(chosen, log=None):
    """Examine architectures, print their rows, and return them. `log`: a file for all figures."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = []
        for one, row in zip(chosen, pool.map(examine_apart, chosen), strict=True):
            rows.append(row)
            print(line(one, row), flush=True)
            if log is not None:
                print(json.dumps({"name": one.name, **row}), file=log, flush=True)
    return rows


def document(rows):
    parts = [HEADER.format(count=len(rows), right=sum(map(is_right, rows)), version=transformers.__version__)]
    for modality in dict.fromkeys(one.modality for one in ARCHITECTURES):
        parts += [f"## {modality[0].upper()}{modality[1:]}\n", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        parts += [line(one, row) for one, row in zip(ARCHITECTURES, rows, strict=True) if one.modality == modality]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        warnings.simplefilter("ignore")
        print(json.dumps(examine(sys.argv[2])))
    else:
        wanted = [one for one in ARCHITECTURES if not sys.argv[1:] or any(word in one.name for word in sys.argv[1:])]
        found = main(wanted)
        if len(wanted) == len(ARCHITECTURES):
            DOCUMENT.write_text(document(found))
        sys.exit(not all(map(is_right, found)))
