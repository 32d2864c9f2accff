"""Programs of small networks in runtimes of others, and after tools of others have changed their files.

Run as a program, it writes the tables of docs/deploying.md. It needs ExecuTorch, onnxslim, onnxsim, and the packages of
examples/javascript.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import onnx
import onnxsim
import onnxslim
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch
from small_families import small_family

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlusFlat
from lrpfx.support.tensors import as_array

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "deploying.md"
TRANSFORMERS = ("vit", "swin")
NETWORKS = (
    *("alexnet", "vgg", "resnet", "densenet", "squeezenet", "mobilenet_v2", "mobilenet_v3", "shufflenet"),
    *("efficientnet", "regnet_y", "convnext", *TRANSFORMERS),
)


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check, shrink = example("check"), example("shrink")


def in_python(path, runtime="onnxruntime"):
    """The largest difference of a result from the self-test of an .onnx file, relative to the largest entry."""
    return max(largest for largest, _ in check.differences(path, runtime)[1].values())


def in_javascript(path, runtime):
    command = ["node", str(ROOT / "examples" / "javascript" / "check.js"), str(path), runtime]
    printed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert printed.stdout, printed.stderr
    return max(float(line.split(": ")[1]) for line in printed.stdout.splitlines())


def in_executorch(path):
    runner = lrpfx.load(path)
    test, found = runner.self_test, 0.0
    for size in test.sizes:
        for name, value in runner(**test.arguments(list(runner.manifest["arguments"]), size)).items():
            expected = test.expected(name, size)
            found = max(found, float(np.abs(as_array(torch.as_tensor(value)) - expected).max() / np.abs(expected).max()))
    return found


def changed(path, model):
    """A file beside `path` with another model and the same notes."""
    target = path.with_name("changed.onnx")
    onnx.save(shrink.with_notes(model, onnx.load(path)), target)
    return target


#: Column -> the largest difference for an .onnx file and those of ExecuTorch, by `save` and by `package`.
AGREEING = {
    "ONNX Runtime": lambda file, portable, packaged: in_python(file),
    "OpenVINO": lambda file, portable, packaged: in_python(file, "openvino"),
    "onnxruntime-node": lambda file, portable, packaged: in_javascript(file, "onnxruntime-node"),
    "onnxruntime-web": lambda file, portable, packaged: in_javascript(file, "onnxruntime-web"),
    "after onnxslim": lambda file, portable, packaged: in_python(changed(file, onnxslim.slim(str(file)))),
    "after onnxsim": lambda file, portable, packaged: in_python(changed(file, onnxsim.simplify(str(file))[0])),
    "ExecuTorch": lambda file, portable, packaged: in_executorch(portable),
    "XNNPACK": lambda file, portable, packaged: in_executorch(packaged),
}

#: Column -> a smaller model.
SMALLER = {
    "weights in float16": lambda file: shrink.with_float16_weights(onnx.load(file)),
    "dense layers in int8": lambda file: shrink.with_int8_products(onnx.load(file)),
    "convolutions too": lambda file: shrink.with_int8_products(onnxslim.slim(str(file)), ("MatMul", "Gemm", "Conv")),
}


def files(name, folder):
    model, images = small_family(name)
    model, images = model.float(), images.float()
    composite = AttnLRP() if name in TRANSFORMERS else EpsilonPlusFlat()
    explain_model = lrpfx.transform(model, composite, images)
    fixed = lrpfx.lower(explain_model, images, dynamic_batch=False)
    return (
        lrpfx.save(lrpfx.lower(explain_model, images), folder / "model.onnx"),
        lrpfx.save(fixed, folder / "portable.pte"),
        lrpfx.package(fixed, folder / "packaged.pte"),
    )


def measured(name):
    """The largest differences of a network by column, and the sizes and differences of smaller files."""
    with tempfile.TemporaryDirectory() as folder:
        file, portable, packaged = files(name, Path(folder))
        agreeing = [f"{measure(file, portable, packaged):.0e}" for measure in AGREEING.values()]
        smaller = []
        for form in SMALLER.values():
            small = changed(file, form(file))
            changes = check.differences(small, "onnxruntime")[1]
            size = small.stat().st_size / file.stat().st_size
            smaller.append(f"{size:.0%}: {changes['output'][1]:.1%}, {changes['relevance'][1]:.1%}")
    return agreeing, smaller


def table(columns, rows):
    lines = [("network", *columns), ("---", *["---:"] * len(columns)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(key, text):
    """Put a table between its marks in the document."""
    document = DOCUMENT.read_text()
    begin, end = f"<!-- {key} -->\n", f"<!-- end of {key} -->"
    before, after = document.split(begin)[0], document.split(end)[1]
    DOCUMENT.write_text(before + begin + text + end + after)


def main():
    rows = {}
    for name in NETWORKS:
        rows[name] = measured(name)
        print(name, *rows[name], flush=True)
    write("runtimes", table(AGREEING, [(name, *agreeing) for name, (agreeing, _) in rows.items()]))
    write("smaller files", table(SMALLER, [(name, *smaller) for name, (_, smaller) in rows.items()]))


if __name__ == "__main__":
    main()
