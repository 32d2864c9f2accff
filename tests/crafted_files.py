"""Files made to do harm: programs with code, with operators that read unchecked, and models that ask for too much."""

import hashlib
import io
import json
import pickle
from pathlib import Path

import numpy as np
import onnx
import torch

from lrpfx.deploy import archive
from lrpfx.deploy.backends import exported as exported_backend
from lrpfx.deploy.backends import onnx as onnx_backend

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


# --- operators that read unchecked ------------------------------------------------------------------------------------------


class Calls(torch.nn.Module):
    """A program that calls an operator with these arguments."""

    def __init__(self, operator, *arguments):
        super().__init__()
        self.operator = operator
        self.arguments = arguments
        for place, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                self.register_buffer(f"argument{place}", value)

    def forward(self, input, target):
        values = [
            getattr(self, f"argument{place}") if isinstance(value, torch.Tensor) else value
            for place, value in enumerate(self.arguments)
        ]
        result = self.operator(*values)
        return {"output": result[0] if isinstance(result, tuple) else result}


def program_that_calls(entries, operator, *arguments):
    """An archive with right hashes and a program that calls an operator."""
    buffer = io.BytesIO()
    exported = torch.export.export(Calls(operator, *arguments), (torch.rand(2, 3, 8, 8), torch.tensor([0, 1])), strict=False)
    exported._example_inputs = None
    torch.export.save(exported, buffer)
    kept = {name: value for name, value in entries.items() if name.startswith("lrpfx")}
    crafted = exported_backend.plain_entries(buffer.getvalue())
    return archive.archive_of(signed({**kept, **crafted}))


FAR = 2**40
aten = torch.ops.aten
#: What reads or writes where a number in the file says, or returns what others have left in memory.
UNCHECKED = {
    "a loss": (
        aten.nll_loss_backward.default,
        *(torch.ones(()), torch.rand(2, 3), torch.tensor([FAR, 0]), None, 1, -100, torch.ones(())),
    ),
    "pooling": (
        aten.max_pool2d_with_indices_backward.default,
        *(torch.rand(1, 1, 2, 2), torch.rand(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, torch.full((1, 1, 2, 2), FAR)),
    ),
    "pooling of volumes": (
        aten.max_pool3d_with_indices_backward.default,
        *(torch.rand(1, 1, 1, 2, 2), torch.rand(1, 1, 2, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False),
        torch.full((1, 1, 1, 2, 2), FAR),
    ),
    "adaptive pooling": (
        aten.adaptive_max_pool2d_backward.default,
        *(torch.rand(1, 1, 2, 2), torch.rand(1, 1, 4, 4), torch.full((1, 1, 2, 2), FAR)),
    ),
    "bags": (
        aten._embedding_bag_dense_backward.default,
        *(torch.rand(2, 3), torch.tensor([0, FAR]), torch.tensor([0, 1]), torch.ones(2, dtype=torch.int64)),
        *(torch.zeros(2, dtype=torch.int64), 4, False, 0, None, -1),
    ),
    "memory of others": (aten.empty.memory_format, [1000]),
    "memory of others, like an input": (aten.empty_like.default, torch.rand(10)),
    "draws": (aten.rand.default, [10]),
}  # fmt: skip


# --- ONNX ---------------------------------------------------------------------------------------------------------------------


def resigned(model):
    entries = [entry for entry in model.metadata_props if entry.key != "lrpfx_sha256"]
    del model.metadata_props[:]
    model.metadata_props.extend(entries)
    body = model.SerializeToString(deterministic=True)
    return body + onnx_backend._trailer(body)


def calling(*nodes, values=None, functions=(), domain=None):
    """A change of a model: it computes nodes of constants first."""

    def changed(model):
        for name, value in (values or {}).items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
        model.graph.node.extend(onnx.helper.make_node(*node[:3], **node[3]) for node in nodes)
        model.functions.extend(functions)
        if domain is not None:
            model.opset_import.append(onnx.helper.make_opsetid(domain, 1))

    return changed


def graph_of(*nodes, inputs=(), outputs=()):
    infos = [[onnx.helper.make_tensor_value_info(*one) for one in some] for some in (inputs, outputs)]
    return onnx.helper.make_graph([onnx.helper.make_node(*node) for node in nodes], "inner", *infos)


BOOL, INT = onnx.TensorProto.BOOL, onnx.TensorProto.INT64
BODY = graph_of(
    *((["Identity", ["on"], ["still"]]), ["Identity", ["number"], ["result"]]),
    inputs=[("number", INT, []), ("on", BOOL, [])],
    outputs=[("still", BOOL, []), ("result", INT, [])],
)
BRANCH = graph_of(["Identity", ["size"], ["result"]], outputs=[("result", INT, None)])
#: Change of a model -> why its file is refused.
IN_MODELS = {
    "zeros": (calling(("ConstantOfShape", ["size"], ["a"], {}), values={"size": [2**31]}), "too many for a file"),
    "an expansion": (
        calling(("Expand", ["one", "size"], ["a"], {}), values={"one": [1.0], "size": [2**15, 2**15]}),
        "too many for a file",
    ),
    "a tiling": (calling(("Tile", ["one", "size"], ["a"], {}), values={"one": [1.0], "size": [2**31]}), "too many for a file"),
    "a range": (
        calling(("Range", ["a", "size", "b"], ["c"], {}), values={"a": 0, "size": 2**40, "b": 1}),
        "too many for a file|cannot be derived",
    ),
    "padding": (
        calling(("Pad", ["one", "size"], ["a"], {}), values={"one": [1.0], "size": [0, 2**31]}),
        "too many for a file",
    ),
    "an axis out of range": (
        calling(
            ("Slice", ["size", "zero", "one", "far"], ["a"], {}),
            values={"size": [3], "zero": [0], "one": [1], "far": [-(2**63)]},
        ),
        "numbers out of range",
    ),
    "more parts than results": (
        calling(("Split", ["size"], ["a", "b"], {"num_outputs": 1}), values={"size": [3, 4]}),
        "numbers out of range",
    ),
    "dimensions before the first": (
        calling(("GatherND", ["one", "zero"], ["a"], {"batch_dims": -64}), values={"one": [[1.0]], "zero": [[0]]}),
        "numbers out of range",
    ),
    "a kernel without end": (
        calling(("MaxPool", ["one"], ["a"], {"kernel_shape": [2**62]}), values={"one": [[[1.0]]]}),
        "numbers out of range",
    ),
    "a size that is computed": (
        calling(
            *(("Mul", ["size", "size"], ["a"], {}), ("Mul", ["a", "a"], ["b"], {}), ("ConstantOfShape", ["b"], ["c"], {})),
            values={"size": [2**8]},
        ),
        "too many for a file",
    ),
    "a size of floating point": (
        calling(
            *(("Exp", ["size"], ["a"], {}), ("Cast", ["a"], ["b"], {"to": INT}), ("ConstantOfShape", ["b"], ["c"], {})),
            values={"size": [20.0]},
        ),
        "cannot be derived",
    ),
    "many values": (
        calling(
            *(("ConstantOfShape", ["size"], [f"a{number}"], {}) for number in range(40)),
            values={"size": [2**21]},
        ),
        "a runtime would compute",
    ),
    "a product of numbers": (
        calling(
            *(("Unsqueeze", ["one", "zero"], ["a"], {}), ("Unsqueeze", ["one", "first"], ["b"], {})),
            ("Mul", ["a", "b"], ["c"], {}),
            values={"one": np.ones(2**15, np.float32), "zero": [0], "first": [1]},
        ),
        "too many for a file",
    ),
    "a division of 32 bits by -1": (
        calling(("Mod", ["least", "other"], ["a"], {}), values={"least": np.int32([-(2**31)]), "other": np.int32([-1])}),
        "divisor may be -1",
    ),
    "a division by several numbers": (
        calling(("Div", ["least", "other"], ["a"], {}), values={"least": [-(2**63)], "other": [2, -1]}),
        "divisor may be -1",
    ),
    "a division by a size": (
        calling(
            *(("Shape", ["input"], ["a"], {}), ("Sub", ["a", "other"], ["b"], {}), ("Div", ["least", "b"], ["c"], {})),
            values={"least": [-(2**63)], "other": [4, 4, 9, 9]},
        ),
        "divisor may be -1",
    ),
    "a division whose limit is the least number": (
        calling(
            *(("Max", ["least", "other"], ["a"], {}), ("Mod", ["a", "zero"], ["b"], {})),
            values={"least": -(2**63), "other": -(2**63), "zero": 0},
        ),
        "divisor may be -1",
    ),
    "a loop": (
        calling(("Loop", ["size", "on"], ["a"], {"body": BODY}), values={"size": 2**62, "on": True}),
        "calls Loop",
    ),
    "a choice": (
        calling(("If", ["on"], ["a"], {"then_branch": BRANCH, "else_branch": BRANCH}), values={"on": True, "size": [1]}),
        "calls If",
    ),
    "a quotient out of range": (
        calling(("Div", ["size", "one"], ["a"], {}), values={"size": [-(2**63)], "one": [-1]}),
        "divisor may be -1",
    ),
    "a remainder out of range": (
        calling(("Mod", ["size", "one"], ["a"], {}), values={"size": [-(2**63)], "one": [-1]}),
        "divisor may be -1",
    ),
    "a graph where none belongs": (calling(("Relu", ["one"], ["a"], {"body": BODY}), values={"one": [1.0]}), "a graph inside"),
    "draws": (calling(("RandomUniform", [], ["a"], {"shape": [10]})), "calls RandomUniform"),
    "an operator of the runtime": (
        calling(("FusedMatMul", ["one", "one"], ["a"], {"domain": "com.microsoft"}), values={"one": [[1.0]]}),
        "operators of 'com.microsoft'",
    ),
    "an operator of others": (calling(domain="evil"), "operators of 'evil'"),
    "a function": (
        calling(
            functions=[
                onnx.helper.make_function(
                    "", "Relu", ["x"], ["y"], [onnx.helper.make_node("Relu", ["x"], ["y"])], [onnx.helper.make_opsetid("", 20)]
                )
            ]
        ),
        "has functions",
    ),
    "an initializer that is larger than its data": (
        lambda model: model.graph.initializer.append(onnx.TensorProto(name="large", data_type=1, dims=[2**40])),
        "larger than its data",
    ),
}  # fmt: skip
