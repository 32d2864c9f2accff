"""Check an .onnx file of lrpfx with a runtime and numpy alone: the file holds inputs and the results that belong to them.

    python check.py model.onnx [onnxruntime | openvino]

Prints the largest difference of each result, relative to its largest entry, and exits with 1 if one is too large.
"""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np

METADATA = 14  # the field of an ONNX model with its notes, pairs of key (1) and value (2)


def number_at(content, place):
    """A number as protobuf writes it, seven bits in a byte, and the place behind it."""
    number, shift = 0, 0
    while True:
        byte = content[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number, place


def fields(content):
    """The fields of a protobuf message: number, and bytes or number."""
    place = 0
    while place < len(content):
        key, place = number_at(content, place)
        if key & 7 == 2:
            length, place = number_at(content, place)
            yield key >> 3, content[place : place + length]
            place += length
        elif key & 7 == 0:
            number, place = number_at(content, place)
            yield key >> 3, number
        else:
            raise ValueError(f"a field of the kind {key & 7}, which ONNX models do not have here")


def notes_of(path):
    """What the file notes: its manifest, and the arrays of its self-test."""
    entries = [dict(fields(value)) for number, value in fields(memoryview(path.read_bytes())) if number == METADATA]
    notes = {bytes(entry[1]).decode(): bytes(entry[2]) for entry in entries}
    arrays = np.load(io.BytesIO(base64.b64decode(notes["lrpfx_self_test"])), allow_pickle=False)
    return json.loads(notes["lrpfx"]), dict(arrays)


def rows(array, size):
    """The first rows of an array, which repeat if it has fewer."""
    return np.resize(array, (size, *array.shape[1:])) if array.ndim else array


def with_onnxruntime(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return lambda arguments: dict(zip(names, session.run(names, arguments), strict=True))


def with_openvino(path):
    import openvino

    program = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda arguments: {name: value for result, value in program(arguments).items() for name in result.names}


RUNTIMES = {"onnxruntime": with_onnxruntime, "openvino": with_openvino}


def differences(path, runtime):
    """For each result the largest difference in a batch of the self-test, and the norm of all its differences."""
    manifest, arrays = notes_of(path)
    run = RUNTIMES[runtime](path)
    found = {}
    for size in manifest["self_test"]:
        results = run({name: rows(arrays[f"in.{name}"], size) for name in manifest["arguments"]})
        for name in manifest["results"]:
            of_size = f"{size}.out.{name}"
            expected = rows(arrays[of_size if of_size in arrays else f"out.{name}"], size).astype(np.float64)
            change = np.nan_to_num(np.abs(np.asarray(results[name], dtype=np.float64) - expected), nan=np.inf)
            scale = rows(arrays["out.output" if name == "balance" else f"out.{name}"], manifest["self_test"][0])
            largest = change.max() / (np.abs(scale).max() or 1.0)
            norm = np.linalg.norm(change) / (np.linalg.norm(scale.astype(np.float64)) or 1.0)
            found[name] = np.maximum(found.get(name, 0.0), (largest, norm))
    return manifest["tolerance"], found


def main(path, runtime="onnxruntime"):
    tolerance, found = differences(Path(path), runtime)
    for name, (largest, _) in found.items():
        print(f"{name}: {largest:.1e}")
    return int(any(norm > tolerance for _, norm in found.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
