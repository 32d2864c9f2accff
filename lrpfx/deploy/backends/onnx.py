"""Programs in ONNX operators: .onnx files for ONNX Runtime and similar runtimes.

Such a file is an ONNX model. Its metadata holds the manifest, the self-test and, at the end, the hash of all bytes before it.
"""

import base64
import hashlib
import json
import logging
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from lrpfx.deploy.backends.backend import Backend, Replace, Stored, inexpressible, operators_missing, origin_of, packages_of
from lrpfx.deploy.manifest import manifest_of
from lrpfx.deploy.onnx_operators import DIVIDED, check_operators, check_sizes
from lrpfx.deploy.runner import Function
from lrpfx.deploy.self_test import SelfTest
from lrpfx.errors import LrpfxError
from lrpfx.passes.lower.legalize_for_onnx import LegalizeForOnnx, expanded
from lrpfx.runtime.propagation import ORIGIN
from lrpfx.support.files import behind_links, hash_of_file, put_in_place, temporary_file
from lrpfx.support.stored_arrays import RefusedError
from lrpfx.support.tensors import as_array
from lrpfx.support.torch_internals import OpOverload, decompositions_for_onnx, onnx_registry, pytree, translated_for_onnx

logger = logging.getLogger(__name__)

OPSET = 20

#: If the parameters have more bytes than this, a second file holds them: an .onnx file must not exceed 2 GiB.
EXTERNAL_DATA_FROM = 3 * 2**29

#: Parameters with fewer bytes stay in the .onnx file.
SMALLEST_MOVED = 1024

#: Operators whose translation ONNX Runtime has no kernel for on the CPU, in float64.
_NAMES_WITHOUT_FLOAT64 = """
    _native_batch_norm_legit _prelu_kernel acos acosh asin asinh atan atan2 atanh avg_pool2d avg_pool3d celu col2im convolution
    cosh elu erf gelu hardsigmoid hardswish im2col leaky_relu mish native_group_norm rrelu_with_noise_functional selu sinh
    softplus tan
"""
_WITHOUT_FLOAT64 = frozenset(_NAMES_WITHOUT_FLOAT64.split())


class Onnx(Backend):
    """An ONNX model. A second file beside it holds parameters of more than 1.5 GiB."""

    kind = "onnx"
    suffix = ".onnx"
    runtime = "onnxruntime"
    legalize = (LegalizeForOnnx,)

    def check_requirements(self) -> None:
        with packages_of("onnx"):
            import onnxruntime  # noqa: F401  loads the model
            import onnxscript  # noqa: F401  torch.onnx needs it

    def check_program(self, program: ExportedProgram) -> None:
        for node in program.graph.nodes:
            if not isinstance(node.target, OpOverload):
                continue
            if node.meta.get("unbacked_bindings"):
                origin = f", from {origin_of(node)}" if origin_of(node) else ""
                raise inexpressible(
                    f"how many values {node.target} returns depends on the data{origin}, and in files of ONNX all sizes follow "
                    "from those of the arguments: use a .pt2 file"
                )
            dtypes = {getattr(value, "dtype", None) for value in pytree.tree_leaves(node.meta.get("val"))}
            name = node.target._schema.name.removeprefix("aten::")
            lacking = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float64
            if lacking in dtypes and (lacking == torch.bfloat16 or name in _WITHOUT_FLOAT64):
                origin = f", from {origin_of(node)}" if origin_of(node) else ""
                kind = str(lacking).removeprefix("torch.")
                raise inexpressible(
                    f"ONNX Runtime does not compute {node.target} in {kind}{origin}: convert the model with .float() before "
                    "transforming it, or use a .pt2 file or lrpfx.package"
                )

    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        self.check_requirements()
        logger.info("translating into operators of ONNX")
        model = onnx_model(program, list(manifest["arguments"]), list(manifest["results"]))
        replaced, written = _data_of(path), None
        try:
            if sum(tensor.nbytes for tensor in program.state_dict.values()) > EXTERNAL_DATA_FROM:
                written, manifest["data"] = _move_parameters(model, path)
            replace(_hashed(model, json.dumps(manifest), base64.b64encode(self_test).decode()))
        except BaseException:
            if written is not None:
                written.unlink(missing_ok=True)
            raise
        if replaced is not None and replaced.name != manifest.get("data", {}).get("file") and not _is_named(replaced, path):
            replaced.unlink(missing_ok=True)

    def read(self, path: Path, content: bytes) -> Stored:
        with packages_of("onnx"):
            return Stored(*_read(content), content)

    def hashed_anew(self, content: bytes, changes: Mapping[str, Any]) -> bytes:
        import onnx

        model = onnx.ModelProto.FromString(content)
        metadata = _entries(model.metadata_props)
        if not {"lrpfx", "lrpfx_self_test"} <= set(metadata):
            raise RefusedError("it was not written by lrpfx, or what changed it removed its manifest")
        manifest = {**json.loads(metadata["lrpfx"]), **changes}
        return _hashed(model, json.dumps(manifest), metadata["lrpfx_self_test"])

    def check(self, path: Path, stored: Stored, test: SelfTest) -> None:
        import onnx

        model = onnx.ModelProto.FromString(stored.content)
        check_operators(model)
        shapes = {name: value.shape for name, value in test.arguments(stored.manifest, test.sizes[-1]).items()}
        data = _data_beside(path, stored.manifest)
        check_sizes(model, shapes, len(stored.content) + (data.stat().st_size if data is not None else 0))

    def load(self, path: Path, stored: Stored) -> Function:
        with packages_of("onnx"):
            import onnxruntime
        manifest = stored.manifest
        data = _data_beside(path, manifest)
        options = onnxruntime.SessionOptions()
        parameters = {} if data is None else _parameters_in(data, manifest["data"]["sha256"], stored.content)
        options.add_external_initializers(list(parameters), list(parameters.values()))
        try:
            session = onnxruntime.InferenceSession(stored.content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RefusedError(f"onnxruntime {onnxruntime.__version__} cannot load it: {error}") from error
        names = list(manifest["results"])

        def run(*tensors: torch.Tensor, parameters: Any = parameters) -> dict[str, torch.Tensor]:
            # the session reads the memory of `parameters`
            arrays = dict(zip(manifest["arguments"], map(as_array, tensors), strict=True))
            return dict(zip(names, map(torch.from_numpy, session.run(names, arrays)), strict=True))

        return run


def _data_beside(path: Path, manifest: Mapping[str, Any]) -> Path | None:
    """The file that holds the parameters of an .onnx file, or None if that file holds them."""
    if "data" not in manifest:
        return None
    data = behind_links(path).parent / str(manifest["data"]["file"])
    if data.is_symlink() or not data.is_file():
        raise RefusedError(f"the file of its parameters, {data.name}, is missing")
    return data


def _parameters_in(data: Path, digest: str, content: bytes) -> dict[str, Any]:
    """The parameters of a model that are in another file, whose hash is verified, as ONNX Runtime takes them.

    By itself, ONNX Runtime would read both files again, which may have changed since they were verified.
    """
    import onnx
    from onnxruntime import OrtValue

    stored, found = data.read_bytes(), {}
    if hashlib.sha256(stored).hexdigest() != digest:
        raise RefusedError(f"it is damaged: {data.name} has another hash")
    for tensor in onnx.ModelProto.FromString(content).graph.initializer:
        if tensor.external_data:
            place = _entries(tensor.external_data)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            values = np.frombuffer(stored, dtype, math.prod(tensor.dims), int(place.get("offset", 0)))
            found[tensor.name] = OrtValue.ortvalue_from_numpy(np.require(values.reshape(tensor.dims), requirements="A"))
    return found


# --- translation -----------------------------------------------------------------------------------------------------------


def onnx_model(program: ExportedProgram, arguments: Sequence[str], results: Sequence[str]) -> Any:
    """A legalized program as an `onnx.ModelProto` with inputs named `arguments` and outputs named `results`.

    Errors: `LoweringError`, which names operators that ONNX lacks with the nodes and rules that they come from.
    """
    import onnx_ir
    from onnxscript.version_converter import convert_version

    registry = onnx_registry(OPSET)
    translatable = _in_onnx_operators(program, registry)
    try:
        model = translated_for_onnx(translatable, registry)
        convert_version(model, OPSET, fallback=True)
    except Exception as error:
        raise inexpressible(f"torch.onnx cannot translate the program: {error}") from error
    _simplify(model)
    _rename(model.graph, [*arguments, *results])
    _separate_weights(model)
    _limit_dividends(model.graph)
    stored = onnx_ir.to_proto(model)
    _tidy(stored, {node.name: origin_of(node) for node in program.graph.nodes})
    return stored


def _in_onnx_operators(program: ExportedProgram, registry: Any) -> ExportedProgram:
    """A copy of the program in operators that torch.onnx translates. `LoweringError` names operators without a translation."""
    program = expanded(program, decompositions_for_onnx(registry))
    operations = [node for node in program.graph.nodes if isinstance(node.target, OpOverload)]
    missing = [node for node in operations if not registry.is_registered(node.target)]
    if missing:
        raise operators_missing(
            "ONNX has no equivalent of these operators",
            {node: node.target for node in missing},
            "use a .pt2 file or lrpfx.package, which support these operators",
        )
    return program


def _simplify(model: Any) -> None:
    """Compute what is constant, and remove what has no effect.

    These are onnxscript's own steps for this, without one rule whose time grows with the square of the number of operations.
    """
    from onnx_ir.passes import Sequential
    from onnx_ir.passes import common as passes
    from onnxscript.optimizer import fold_constants
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules import common as rules

    rewrite = RewritePass(
        [
            *(rules.mul_by_1_rule, rules.add_0_rule, rules.sub_0_rule, rules.div_by_1_rule),
            *(rules.collapse_slice_rule, rules.collapse_slice2_rule, rules.materialize_reshape_shape_rule),
            *(rules.cast_cast_rule, rules.no_op_cast_rule, rules.no_op_expand_rule),
            *(rules.reshape_reshape_rule, rules.no_op_transpose_rule, rules.transpose_transpose_rule),
            *(rules.unsqueeze_unsqueeze_rule, rules.squeeze_reshape_1d_rule),
            *(rules.no_op_dynamic_scatter_nd_rule, rules.no_op_static_scatter_nd_rule),
        ]
    )
    passes.InlinePass()(model)
    for _ in range(2):  # some rules need the constants that others leave
        fold_constants(model, onnx_shape_inference=True)
        rewrite(model)
        passes.RemoveUnusedNodesPass()(model)
    Sequential(
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)


def _rename(graph: Any, names: Sequence[str]) -> None:
    """Give arguments and results their names. Inner values that already have these names are renamed."""
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        if value.name in names:
            value.name = f"{value.name}.inside"
    for value, name in zip((*graph.inputs, *graph.outputs), names, strict=True):
        value.name = name


def _separate_weights(model: Any) -> None:
    """Give each transposed convolution a stored weight of its own: OpenVINO computes wrong values where others read it, too.

    A weight that operations derive is computed here. The same operations on a copy of the parameter do not help.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph = model.graph
    constant = set(graph.initializers.values())
    for number, node in enumerate(graph):
        if node.inputs and constant.issuperset(node.inputs):
            constant.update(node.outputs)
        weight = node.inputs[1] if node.op_type == "ConvTranspose" else None
        if weight is not None and weight in constant and (weight.producer() or len(weight.uses()) > 1):
            value = onnx_ir.tensor(_computed(weight), name=f"{weight.name}.transposed{number}")
            own = onnx_ir.Value(name=value.name, shape=weight.shape, type=weight.type, const_value=value)
            graph.register_initializer(own)
            node.replace_input_with(1, own)
    RemoveUnusedNodesPass()(model)


def _limit_dividends(graph: Any) -> None:
    """Give dividends of whole numbers a limit, which is all but the least number: that one divided by -1 ends the process."""
    import onnx_ir

    for number, node in enumerate(graph):
        kind = next((one.dtype for one in (*node.outputs, *node.inputs) if one.dtype is not None), None)
        if node.op_type not in ("Div", "Mod") or kind not in DIVIDED:
            continue
        dividend, divisor = node.inputs
        stored = divisor.const_value.numpy() if divisor.name in graph.initializers else None
        if stored is not None and stored.size == 1 and stored.item() not in (0, -1):
            continue
        name = f"least_dividend_{kind.name.lower()}"
        if name not in graph.initializers:
            value = onnx_ir.tensor(DIVIDED[kind] + 1, dtype=kind, name=name)
            limit = onnx_ir.Value(name=name, shape=onnx_ir.Shape(()), type=onnx_ir.TensorType(kind), const_value=value)
            graph.register_initializer(limit)
        larger = onnx_ir.node("Max", [dividend, graph.initializers[name]])
        larger.outputs[0].name = f"dividend{number}"
        larger.outputs[0].type = onnx_ir.TensorType(kind)
        graph.insert_before(node, larger)
        node.replace_input_with(0, larger.outputs[0])


def _computed(value: Any) -> Any:
    """A value of a model that depends on stored ones alone, as an array."""
    import onnx_ir
    from onnx.reference import ReferenceEvaluator

    maker = value.producer()
    if maker is None:
        return value.const_value.numpy()
    given = {one.name: _computed(one) for one in maker.inputs if one is not None}
    results: Any = ReferenceEvaluator(onnx_ir.to_proto(maker)).run(None, given)
    return results[value.index()]


def _tidy(model: Any, origins: Mapping[str, str]) -> None:
    """Name the batch dimension "batch", and reduce the notes of each operation to its node and rule of origin."""
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    batches = {value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input}
    for value in values:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param and dimension.dim_param in batches:
                dimension.dim_param = "batch"
        del value.metadata_props[:]
    for node in model.graph.node:
        traced = _entries(node.metadata_props).get("pkg.torch.onnx.fx_node", "").partition(" ")[0].removeprefix("%")
        del node.metadata_props[:]
        if origins.get(traced):
            node.metadata_props.add(key=ORIGIN, value=origins[traced])
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
    del model.graph.metadata_props[:]


# --- files -----------------------------------------------------------------------------------------------------------------


def _data_of(path: Path) -> Path | None:
    """The parameter file that belongs to an .onnx file of lrpfx, or None."""
    try:
        manifest = _read(path.read_bytes())[0]
    except (OSError, LrpfxError, RefusedError):
        return None
    return path.parent / manifest["data"]["file"] if "data" in manifest else None


def _is_named(data: Path, path: Path) -> bool:
    """Whether a parameter file may belong to an .onnx file other than `path`, judged by its name or that file's content."""
    if not data.name.startswith(f"{path.name}."):
        return True
    name = os.fsencode(data.name)
    for other in path.parent.iterdir():
        if other.suffix == ".onnx" and other.name != path.name:
            with suppress(OSError, ValueError), ExitStack() as stack:
                file = stack.enter_context(open(other, "rb"))
                if stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).find(name) >= 0:
                    return True
    return False


def _entries(stored: Any) -> dict[str, str]:
    """Entries of a protobuf message by their keys."""
    return {entry.key: entry.value for entry in stored}


def _hashed(model: Any, manifest: str, self_test: str) -> bytes:
    """The content of a file: the model with its manifest, its self-test and its hash."""
    del model.metadata_props[:]
    for key, value in (("lrpfx", manifest), ("lrpfx_self_test", self_test)):
        model.metadata_props.add(key=key, value=value)
    body: bytes = model.SerializeToString(deterministic=True)
    return body + _trailer(body)


def _trailer(body: bytes) -> bytes:
    """A metadata entry with the hash of `body`, as protobuf writes it. `body` followed by it is an ONNX model again."""
    key, value = b"lrpfx_sha256", hashlib.sha256(body).hexdigest().encode()
    entry = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([len(value)]) + value
    return b"\x72" + bytes([len(entry)]) + entry


def _move_parameters(model: Any, path: Path) -> tuple[Path | None, dict[str, str]]:
    """Move the parameters of `model` to a file beside `path`, named by its hash.

    Returns the file, or None if it existed before, and its entry in the manifest.
    """
    from onnx import external_data_helper

    with temporary_file(path.parent / f"{path.name}.data", ".data") as temporary:
        for tensor in model.graph.initializer:
            if tensor.HasField("raw_data") and len(tensor.raw_data) >= SMALLEST_MOVED:
                external_data_helper.set_external_data(tensor, temporary.name)
        external_data_helper.write_external_data_tensors(model, str(path.parent))
        digest = hash_of_file(temporary)
        target = path.parent / f"{path.name}.{digest[:16]}.data"
        is_new = not target.exists()
        put_in_place(temporary, target, like=path)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = target.name
    return target if is_new else None, {"file": target.name, "sha256": digest}


def _read(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The manifest and self-test of an ONNX file. Verifies its hash, and that it refers only to the file in the manifest."""
    import onnx

    length = len(_trailer(b""))
    body, trailer = content[:-length], content[-length:]
    if b"lrpfx_sha256" not in trailer:
        raise RefusedError("it is damaged, or was not written by lrpfx: it has no hash")
    if trailer != _trailer(body):
        raise RefusedError("it is damaged: its content has another hash")
    model = onnx.ModelProto.FromString(content)
    keys = sorted(entry.key for entry in model.metadata_props)
    if keys != ["lrpfx", "lrpfx_self_test", "lrpfx_sha256"]:
        raise RefusedError(f"its metadata has the keys {', '.join(keys)}, not those of lrpfx")
    metadata = _entries(model.metadata_props)
    manifest = manifest_of(metadata["lrpfx"])
    data = manifest.get("data", {})
    if data and not (re.fullmatch(r"[^/\\\0]+\.[0-9a-f]{16}\.data", data["file"]) and isinstance(data["sha256"], str)):
        raise RefusedError(f"it names {data['file']!r} as the file of its parameters")
    files = list(_files_read(model))
    elsewhere = set(files) - {data.get("file")}
    if elsewhere:
        raise RefusedError(f"it reads another file, {min(elsewhere)!r}")
    if len(files) > sum(bool(tensor.external_data) for tensor in model.graph.initializer):
        raise RefusedError("it reads a file for what is no parameter of its graph")
    return manifest, base64.b64decode(metadata["lrpfx_self_test"], validate=True)


def _files_read(message: Any) -> Iterator[str]:
    """The files from which tensors anywhere in a protobuf message are read."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in value if isinstance(value, Sequence) else [value]:
            if field.name == "external_data":
                if one.key == "location":
                    yield one.value
            else:
                yield from _files_read(one)
