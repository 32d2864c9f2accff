"""Changes of a saved program, each with code that would create a file where it is run."""

import hashlib
import io
import json
import pickle
from pathlib import Path

import numpy as np
import torch

from lrpfx.deploy import archive

MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CONSTANTS, SAMPLES = "data/constants/model_constants_config.json", "data/sample_inputs/model.pt"


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def pickled(marker):
    return pickle.dumps(Payload(marker))


def saved(marker):
    """What torch.load would unpickle."""
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    return buffer.getvalue()


def signed(entries, **changes):
    """The entries with right hashes."""
    content = {name: value for name, value in entries.items() if not name.startswith(archive.MANIFEST)}
    manifest = {**json.loads(entries[archive.MANIFEST]), **changes, "hash": archive.hash_of(content)}
    text = json.dumps(manifest).encode()
    return {**content, archive.MANIFEST: text, archive.MANIFEST_HASH: hashlib.sha256(text).hexdigest().encode()}


def config_with(entries, config, **changes):
    """A list of tensors with another one first."""
    listed = json.loads(entries[WEIGHTS])["config"]
    first = {**next(iter(listed.values())), **changes}
    return json.dumps({"config": {"first": first, **(listed if config == WEIGHTS else {})}}).encode()


def meta_with(entries, **entry):
    """What a list says of its first tensor, with other sizes or strides of its last dimension."""
    meta = next(iter(json.loads(entries[WEIGHTS])["config"].values()))["tensor_meta"]
    return {**meta, **{key: [*meta[key][:-1], {"as_int": value}] for key, value in entry.items()}}


def in_program(change):
    """Entries with a changed program."""

    def changed(entries, marker):
        program = json.loads(entries[MODEL])
        change(program, f"__import__('pathlib').Path({str(marker)!r}).touch()")
        return {MODEL: json.dumps(program).encode()}

    return changed


def renamed(program, old, new):
    return json.loads(json.dumps(program).replace(json.dumps(old), json.dumps(new)))


def first_operator(program):
    return program["graph_module"]["graph"]["nodes"][0]


def with_expression(program, code):
    text = json.dumps(program)
    (expression,) = {json.dumps(found) for found in _expressions(program)}
    program.update(json.loads(text.replace(expression, json.dumps(code))))


def _expressions(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "expr_str":
                yield inner
            yield from _expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _expressions(inner)


def with_structure(program, code):
    context = {"type": "enum", "context": {"__enum__": True, "fqn": "antigravity:x", "name": "y"}, "children_spec": []}
    program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, context])


IN_FILES = {
    "pickled inputs": lambda entries, marker: {SAMPLES: saved(marker)},
    "a pickled weight": lambda entries, marker: {
        WEIGHTS: config_with(entries, WEIGHTS, use_pickle=True, path_name="weight_99"),
        "data/weights/weight_99": saved(marker),
    },
    "a pickled constant": lambda entries, marker: {
        CONSTANTS: config_with(entries, CONSTANTS, use_pickle=True, path_name="tensor_0"),
        "data/constants/tensor_0": saved(marker),
    },
    "an opaque object": lambda entries, marker: {
        CONSTANTS: config_with(entries, CONSTANTS, use_pickle=True, path_name="opaque_obj_0", tensor_meta=None),
        "data/constants/opaque_obj_0": pickled(marker),
    },
    "an object of torch's": lambda entries, marker: {
        CONSTANTS: config_with(entries, CONSTANTS, use_pickle=True, path_name="custom_obj_0", tensor_meta=None),
        "data/constants/custom_obj_0": saved(marker),
    },
    "a pickle that nothing names": lambda entries, marker: {"data/weights/model.pt": saved(marker)},
    "an expression": in_program(with_expression),
    "an expression within one": in_program(lambda program, code: with_expression(program, f"Max(Symbol('s31'), {code})")),
    "an attribute in an expression": in_program(lambda program, code: with_expression(program, "Integer.mro()[1]")),
    "a number too large to compute": in_program(lambda program, code: with_expression(program, "Pow(9, Pow(9, Integer(9)))")),
    "a condition": in_program(lambda program, code: program.update(guards_code=[code])),
    "a condition of a size": in_program(lambda program, code: program.update(guards_code=["L['input'].size()[0] > 0"])),
    "operators of others": in_program(lambda program, code: program["opset_version"].update(evil=1)),
    "torch.load": in_program(lambda program, code: first_operator(program).update(target="torch.load")),
    "a library": in_program(lambda program, code: first_operator(program).update(target="torch.ops.load_library")),
    "a file's content": in_program(
        lambda program, code: first_operator(program).update(target="torch.ops.aten.from_file.default")
    ),
    "another namespace": in_program(lambda program, code: first_operator(program).update(target="torch.ops.profiler.x.y")),
    "an attribute of an operator": in_program(
        lambda program, code: first_operator(program).update(target="torch.ops.aten.relu.__class__")
    ),
    "what operators are made of": in_program(
        lambda program, code: first_operator(program).update(target="_operator.attrgetter")
    ),
    "an extension": in_program(lambda program, code: first_operator(program).update(target="#x:y")),
    "the name of an input": in_program(
        lambda program, code: program.update(renamed(program, "input", f"input=({code})"))
    ),
    "a module to import": in_program(with_structure),
    "notes": in_program(lambda program, code: first_operator(program).update(metadata={"stack_trace": code})),
    "an array of objects": lambda entries, marker: {archive.SELF_TEST: npz({"in.input": Payload(marker)})},
    "memory of others": in_program(
        lambda program, code: first_operator(program).update(target="torch.ops.aten._reshape_alias.default")
    ),
    "an operator that writes": in_program(
        lambda program, code: first_operator(program).update(target="torch.ops.aten.fill_.Scalar")
    ),
    "a setting of the process": in_program(
        lambda program, code: first_operator(program).update(target="torch.ops.aten.set_grad_enabled.default")
    ),
    "an operator of TorchScript": in_program(
        lambda program, code: first_operator(program).update(target="torch.ops.aten.len.t")
    ),
    "a power of powers": in_program(
        lambda program, code: with_expression(program, "Pow(" * 12 + "Integer(9)" + ", 9)" * 12)
    ),
    "a long name": in_program(lambda program, code: with_expression(program, "Symbol('a' * 3000000000)")),
    "many sizes": in_program(
        lambda program, code: with_expression(program, f"Max({', '.join(f's{number}' for number in range(400))})")
    ),
    "a long text": in_program(lambda program, code: with_expression(program, " + ".join(["s31"] * 10_000))),
    "a weight that is larger than the file": lambda entries, marker: {
        WEIGHTS: config_with(entries, WEIGHTS, tensor_meta=meta_with(entries, sizes=10**9, strides=0))
    },
    "another form": lambda entries, marker: {"archive_format": b"pt1"},
    "an earlier version": lambda entries, marker: {"archive_version": b"-1"},
    "a later version": lambda entries, marker: {"archive_version": b"1"},
    "a folder above": lambda entries, marker: {"../../../tmp/x": b""},
    "an absolute name": lambda entries, marker: {"/etc/x": b""},
    "more of torch": lambda entries, marker: {"extra/notes.txt": b"", "data/aotinductor/model/x.so": b"\x7fELF"},
}  # fmt: skip
#: What torch.export.load runs of these.
RUNS_IN_TORCH = ["pickled inputs", "an opaque object", "an expression", "an expression within one"]


def npz(arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.array([value], dtype=object) for name, value in arrays.items()})
    return buffer.getvalue()
