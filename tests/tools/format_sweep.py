"""Classifiers of torchvision in every format, loaded by processes without their code and, for ONNX, without torch.

Run as a program, it examines each model and composite in a separate process and writes docs/formats.md, including the table
of operators and rules that `support_matrix.py` measures.
"""

import copy
import json
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch

# isort: split
import torchvision
from helpers import relative_difference
from PIL import Image
from sklearn.datasets import load_sample_images

import lrpfx
from lrpfx.composites import EpsilonGammaBox, EpsilonPlusFlat
from tools import support_matrix

COMPOSITES = {"EpsilonPlusFlat": EpsilonPlusFlat, "EpsilonGammaBox": lambda: EpsilonGammaBox(low=0.0, high=1.0)}
FORMATS = ("pt2", "AOTInductor", "ONNX")
VANISHING = ("alexnet", "vgg16_bn", "mobilenet_v3_large", "efficientnet_b0")
DETERMINED = 3e-6
MODELS = ("alexnet", "vgg16_bn", "resnet50", "densenet121", "mobilenet_v3_large", "efficientnet_b0")
#: Further models, among them one without batch norm and ReLU.
FURTHER = ("squeezenet1_1", "googlenet", "convnext_tiny")
#: Number of crops from which images are chosen, larger for models with few determined ones. Default: 24.
CANDIDATES = {"resnet50": 48, "mobilenet_v3_large": 96}
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "formats.md"
RESULTS = Path(__file__).parent.parent.parent / "build" / "formats.json"

#: Loads files with lrpfx, in a process without the model's code.
WITH_LRPFX = """
    import sys
    import numpy as np, torch
    from lrpfx.deploy.artefact import load

    folder = sys.argv[1]
    inputs, targets = np.load(f"{folder}/inputs.npz"), np.load(f"{folder}/targets.npz")
    for kind in sys.argv[2:]:
        runner = load(f"{folder}/{kind}.pt2")
        for name in inputs.files:
            x, target = torch.from_numpy(inputs[name]), torch.from_numpy(targets[name])
            for layout in (torch.contiguous_format, torch.channels_last):
                results = runner(x.contiguous(memory_format=layout), target)
                np.savez(f"{folder}/{kind}.{name}.{layout}.npz", **{k: v.numpy() for k, v in results.items()})
    assert "torchvision" not in sys.modules
"""

#: Runs an ONNX file where torch cannot be imported.
WITHOUT_TORCH = """
    import sys
    import numpy as np, onnxruntime

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "lrpfx", "torchvision"):
                raise ImportError(name)

    sys.meta_path.insert(0, Absent())
    folder = sys.argv[1]
    session = onnxruntime.InferenceSession(f"{folder}/ONNX.onnx")
    names = [result.name for result in session.get_outputs()]
    inputs, targets = np.load(f"{folder}/inputs.npz"), np.load(f"{folder}/targets.npz")
    for name in inputs.files:
        x, target = inputs[name], targets[name]
        last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        for number, layout in enumerate((x, last)):
            results = dict(zip(names, session.run(None, {"input": layout, "target": target})))
            np.savez(f"{folder}/ONNX.{name}.{number}.npz", **results)
    assert "torch" not in sys.modules
"""


def crops(count, size=224, seed=0):
    """Crops of two photographs at many scales. Shape (count, 3, size, size), values in [0, 1]."""
    generator = random.Random(seed)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    pieces = []
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        side = generator.randint(64, min(photograph.size))
        left, top = (generator.randint(0, length - side) for length in photograph.size)
        piece = photograph.crop((left, top, left + side, top + side)).resize((size, size))
        pieces.append(torch.from_numpy(np.array(piece)).permute(2, 0, 1) / 255.0)
    return torch.stack(pieces)


def random_model(name):
    """A model as torchvision initializes it or, if its activations would vanish, with other weights and measured statistics."""
    torch.manual_seed(0)
    settings = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, weights=None, **settings)
    if name not in VANISHING:
        return model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # the average over all batches
        elif isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    with torch.no_grad():
        model.train()(crops(32, 64, seed=1))
    return model.eval()


def determined(explain_model, images):
    """The images, sorted by how much rounding changes their output or relevance, and these changes relative to the norm.

    Relevance jumps where a value crosses zero: if rounding moves a share f of the values across zero, relevance changes by
    about the square root of f. On such images, no two float32 kernels agree to 1e-5.
    """
    target = explain_model(images).argmax(1)
    single = lrpfx.attribute(explain_model, images, target)
    others = [lrpfx.attribute(copy.deepcopy(explain_model).double(), images.double(), target)]
    for seed in range(3):
        signs = torch.randint(2, images.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        shaken = (images * (1 + 4 * torch.finfo(images.dtype).eps * signs)).clamp(0.0, 1.0)
        others.append(lrpfx.attribute(explain_model, shaken, target))

    def change(values, reference):
        return (values - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)

    found = [change(other.relevance, single.relevance) for other in others]
    found += [change(other.output.detach(), single.output.detach()) for other in others]
    changes, order = torch.stack(found).amax(0).sort()
    return images[order], changes


def examine(name, composite, formats=FORMATS, record=()):
    """Largest relative L2 difference to `lrpfx.attribute`, output and relevance, for each format."""
    model = random_model(name)
    candidates = crops(CANDIDATES.get(name, 24), 64)
    explain_model = lrpfx.transform(model, COMPOSITES[composite](), input_range=(0.0, 1.0), example_inputs=candidates[:2])
    start = time.perf_counter()
    images, changes = determined(explain_model, candidates)
    program = lrpfx.lower(explain_model, images[:2], record=record)
    row = {"model": name, "composite": composite, "nodes": len(program.graph.nodes), "lower": time.perf_counter() - start}
    inputs = {f"batch{batch}": images[:batch] for batch in (1, 2, 5)}
    targets = {key: explain_model(value).argmax(1) for key, value in inputs.items()}
    writers = {"pt2": lrpfx.save, "AOTInductor": lrpfx.package, "ONNX": lrpfx.save}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/inputs.npz", **{key: value.numpy() for key, value in inputs.items()})
        np.savez(f"{folder}/targets.npz", **{key: value.numpy() for key, value in targets.items()})
        for kind in formats:
            start = time.perf_counter()
            writers[kind](program, f"{folder}/{kind}.{'onnx' if kind == 'ONNX' else 'pt2'}")
            row[f"{kind} seconds"] = time.perf_counter() - start
        archives = [kind for kind in formats if kind != "ONNX"]
        _run(WITH_LRPFX, folder, *archives)
        if "ONNX" in formats:
            _run(WITHOUT_TORCH, folder)
        expected = {}
        for key, x in inputs.items():
            found = lrpfx.attribute(explain_model, x, targets[key], record=record)
            expected[key] = {"output": found.output, "relevance": found.relevance, **found.layers}
        for kind in formats:
            paths = sorted(Path(folder).glob(f"{kind}.batch*.npz"))
            assert len(paths) == 2 * len(inputs)
            row[kind] = max(_difference(path, expected[path.name.split(".")[1]]) for path in paths)
    row["rounding"] = float(changes[:5].max())
    row["determined"] = float((changes < DETERMINED).double().mean())
    return row


def _run(code, *arguments):
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], check=True)


def _difference(path, expected):
    with np.load(path) as actual:
        assert list(actual.files) == list(expected)
        pairs = [(torch.from_numpy(actual[name]), value) for name, value in expected.items()]
    return max(relative_difference(one, other) for one, other in pairs)


HEADER = """# Formats

Results of lowered programs in each format, compared with `lrpfx.attribute`. `make formats` writes this page.

## Classifiers

The largest relative L2 difference from eager output and relevance in float32, for batches of 1, 2 (as traced) and 5 images of
64×64, contiguous and channels_last. pt2 and AOTInductor files are loaded by a process that does not import the models' code;
ONNX files run where torch cannot be imported. Networks are untrained: as torchvision {version} initializes them or, where their
activations would vanish ({vanishing}), with He initialization and
batch norm statistics from photographs.

Relevance jumps where a value crosses zero: if rounding moves a share f of all values across zero, relevance changes by about
the square root of f in any implementation. "Rounding" is the largest change of output or relevance for the images of the row,
between float32 and float64 and between inputs that differ by four units in the last place. The images are those with the
smallest change out of 24 crops of photographs ({candidates}); "determined" is the share of the crops whose change
is below {determined}.

"""
MATRIX = """
## Operators and rules

Whether each format gives the relevance of `lrpfx.attribute` to 1e-5 (relative L2, batches of 1, 2 and 5); a figure is a larger
difference. Where no rule is named, the composites' shared entries choose it; neutral operators have none.

"""
WITHOUT = "Rows of the operator table that were not measured separately: "


def _markdown(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def document(rows, matrix):
    """The page."""
    columns = ["model", "composite", "operations", *FORMATS, "rounding", "determined"]
    lines = []
    for row in rows:
        figures = [f"{row[kind]:.1e}" for kind in (*FORMATS, "rounding")]
        lines.append([row["model"], row["composite"], row["nodes"], *figures, f"{row['determined']:.0%}"])
    header = HEADER.format(
        version=torchvision.__version__.partition("+")[0],
        vanishing=", ".join(VANISHING),
        candidates=", ".join(f"{name}: {count}" for name, count in CANDIDATES.items()),
        determined=DETERMINED,
    )
    notes, cells = [], {}
    for row in matrix:
        shown = tuple(_cell(row[kind], notes) for kind in FORMATS)
        cells.setdefault((row["operator"], shown), []).append(row["rule"].partition("(")[0])
    operators = [[name, ", ".join(filter(None, found)), *shown] for (name, shown), found in cells.items()]
    remarks = "".join(f"\n{number}. {note}" for number, note in enumerate(notes, 1))
    table = _markdown(["operator", "rules", *FORMATS], operators) + remarks + "\n" * bool(remarks)
    without = ", ".join(support_matrix.missing())
    return f"{header}{_markdown(columns, lines)}{MATRIX}{table}\n{WITHOUT}{without}.\n"


def _cell(value, notes):
    """A tick, a difference, or the number of a note with the reason for a failure."""
    if not isinstance(value, str):
        return "✓" if value <= 1e-5 else f"{value:.0e}"
    reason = re.sub(r", from case.*", "", value)
    reason = " ".join(reason.partition("\nGive")[0].split()).replace("](", "] (")  # which would be a link
    if reason not in notes:
        notes.append(reason)
    return f"no ({notes.index(reason) + 1})"


def main(models):
    """Add rows for the given models to the results, or "operators" for the table of operators, and write the page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    RESULTS.parent.mkdir(exist_ok=True)
    for name in models:
        if name == "operators":
            results["operators"] = support_matrix.measure()
        else:
            for composite in COMPOSITES:
                command = [sys.executable, __file__, "--one", name, composite]
                run = subprocess.run(command, capture_output=True, text=True, check=False)
                if run.returncode:
                    failed = True
                    print(f"{name} {composite}: FAILED\n{run.stderr[-3000:]}", flush=True)
                    continue
                results[f"{name} {composite}"] = json.loads(run.stdout.splitlines()[-1])
                print(results[f"{name} {composite}"], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1))
    operators = results.pop("operators", [])
    DOCUMENT.write_text(document(list(results.values()), operators))
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(examine(sys.argv[2], sys.argv[3])))
    else:
        sys.exit(main(sys.argv[1:] or [*MODELS, *FURTHER, "operators"]))
