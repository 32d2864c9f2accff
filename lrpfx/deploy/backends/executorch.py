"""Programs for ExecuTorch: .pte files for phones and other small devices.

Such a file is a program as ExecuTorch writes it, whose header gives its length, followed by an archive of the manifest and the
self-test, which ExecuTorch does not read.
"""

import json
import logging
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lrpfx.deploy.archive import MANIFEST, SELF_TEST, archive_of, read_archive, read_signed_entries, signed_entries
from lrpfx.deploy.backends.backend import Backend, Replace, Stored, operators_missing
from lrpfx.deploy.backends.exported import fold_constants
from lrpfx.deploy.manifest import manifest_of
from lrpfx.deploy.runner import Function
from lrpfx.deploy.self_test import SelfTest
from lrpfx.errors import ArtefactError, LoweringError
from lrpfx.ir.node import attribute_of
from lrpfx.passes.lower.legalize_for_executorch import LegalizeForExecuTorch
from lrpfx.support.stored_arrays import Entries, RefusedError
from lrpfx.support.torch_internals import pytree

logger = logging.getLogger(__name__)

PROGRAM = "program.pte"  # the entry whose content precedes the archive

#: The beginning of a program: its format, and a header with the length of the program itself and, if weights follow it, with
#: their offset and length.
HEADER = struct.Struct("<4x4s4sIQQQ")
FORMAT, EXTENDED = b"ET12", b"eh00"

#: The last record of an archive: its signature, and the length and place of the archive's directory.
LAST_RECORD = struct.Struct("<4s8xII2x")
END_OF_ARCHIVE = b"PK\5\6"


@contextmanager
def _same_logging() -> Iterator[None]:
    """Keep the root logger as it is: modules of ExecuTorch configure it when they are imported, and print their progress.

    A logger that has a handler is not configured, so it gets the one that Python uses in its absence.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    if not handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class ExecuTorch(Backend):
    """A program for the portable kernels of ExecuTorch, for inputs of one size."""

    kind = "executorch"
    suffix = ".pte"
    is_native = True  # the runtime trusts its files
    runtime = "executorch"
    legalize = (LegalizeForExecuTorch,)

    @_same_logging()
    def check_requirements(self) -> None:
        try:
            import executorch.exir
            import executorch.runtime  # noqa: F401  runs the self-test
        except ImportError as error:
            raise _missing(error) from error

    def check_program(self, program: ExportedProgram) -> None:
        values = [node.meta.get("val") for node in program.graph.nodes]
        leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(size, torch.SymInt) for leaf in leaves for size in leaf.shape):
            raise LoweringError(
                "ExecuTorch plans the memory of a program for one size of its inputs: lower it with dynamic_batch=False, or "
                "export it with --fixed-batch",
                topic="formats-of-programs",
            )
        convolutions = [node for node in program.graph.nodes if node.target == torch.ops.aten.convolution.default]
        if any(node.meta["val"].ndim > 4 for node in convolutions):
            raise LoweringError(
                "ExecuTorch has no kernel of convolutions in three dimensions: use a .pt2 or .onnx file",
                topic="formats-of-programs",
            )
        if any(leaf.dtype == torch.float64 for leaf in leaves):
            raise LoweringError(
                "ExecuTorch rounds numbers in float64 to float32: convert the model with .float() before transforming it, or "
                "use a .pt2 file",
                topic="formats-of-programs",
            )

    @_same_logging()
    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        logger.info("translating into operators of ExecuTorch")
        try:
            content = _written(self.edge_program(program))
        except LoweringError:
            raise
        except Exception as error:
            raise LoweringError(
                f"ExecuTorch cannot translate the program: {type(error).__name__}: {error}", topic="formats-of-programs"
            ) from error
        replace(_joined(content, manifest, self_test))

    def edge_program(self, program: ExportedProgram) -> Any:
        """A legalized program in the operators of ExecuTorch."""
        from executorch.exir import EdgeCompileConfig, to_edge

        return to_edge(_in_plain_memory(program), compile_config=EdgeCompileConfig(_check_ir_validity=False))

    def read(self, path: Path, content: bytes) -> Stored:
        text, self_test, entries = read_signed_entries(_entries(content))
        return Stored(manifest_of(text), self_test, entries)

    def hashed_anew(self, content: bytes, changes: Mapping[str, Any]) -> bytes:
        entries = _entries(content)
        return _joined(entries[PROGRAM], {**json.loads(entries[MANIFEST]), **changes}, entries[SELF_TEST])

    def check(self, path: Path, stored: Stored, test: SelfTest) -> None:
        strange = sorted(set(stored.content) - {PROGRAM})
        if strange:
            raise RefusedError(f"it holds {strange[0]!r}, which does not belong in it")

    @_same_logging()
    def load(self, path: Path, stored: Stored) -> Function:
        try:
            from executorch.runtime import Runtime
        except ImportError as error:
            raise _missing(error) from error
        program, lock = Runtime.get().load_program(stored.content[PROGRAM]), threading.Lock()
        program.load_method("forward")
        names = list(stored.manifest["results"])

        def run(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            with lock:  # calls share the memory of the program, which must outlive its method
                values = program.load_method("forward").execute([tensor.cpu() for tensor in tensors])
            return dict(zip(names, values, strict=True))

        return run


class Xnnpack(ExecuTorch):
    """A program for ExecuTorch whose convolutions, products and activations XNNPACK computes, with all weights stored."""

    kind = "xnnpack"
    is_compiled = True

    def edge_program(self, program: ExportedProgram) -> Any:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        config = EdgeCompileConfig(_check_ir_validity=False)
        return to_edge_transform_and_lower(
            _with_stored_weights(program), partitioner=[XnnpackPartitioner()], compile_config=config
        )


def _with_stored_weights(program: ExportedProgram) -> ExportedProgram:
    """The program without operations on weights alone, since XNNPACK computes only layers whose weights are stored.

    Each transposed convolution has a weight of its own: XNNPACK 1.5 computes wrong values if a convolution reads the same one.
    """
    module = ExportedProgram.module(program, check_guards=False)
    fold_constants(module)
    _lay_out(module)
    weights = module.graph.find_nodes(op="get_attr")
    readers = Counter(str(weight.target) for weight in weights for _ in weight.users)
    for number, node in enumerate(module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)):
        weight, is_transposed = node.args[1], node.args[6]
        if is_transposed and weight in weights and readers[weight.target] > 1:
            name = f"transposed_{number}"
            module.register_buffer(name, attribute_of(weight, module).detach().clone())
            with module.graph.inserting_before(node):
                node.update_arg(1, module.graph.create_node("get_attr", name))
    module.recompile()
    return _exported(module)


def _in_plain_memory(program: ExportedProgram) -> ExportedProgram:
    """The program with stored tensors as ExecuTorch takes them."""
    module = ExportedProgram.module(program, check_guards=False)
    return _exported(module) if _lay_out(module) else program


def _lay_out(module: fx.GraphModule) -> bool:
    """Store all tensors in the order of their dimensions: kernels of ExecuTorch take no others, even for dimensions of size 1.

    Returns whether any tensor was in another order.
    """
    is_changed = False
    for node in module.graph.find_nodes(op="get_attr"):
        value = attribute_of(node, module)
        plain = torch.empty(value.shape, device="meta").stride()
        if value.stride() != plain:
            path, _, name = str(node.target).rpartition(".")
            owner = module.get_submodule(path)
            delattr(owner, name)
            owner.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
            is_changed = True
    return is_changed


def _exported(module: fx.GraphModule) -> ExportedProgram:
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    arguments = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in inputs)
    return torch.export.export(module, arguments, strict=False)


def _missing(error: ImportError) -> ArtefactError:
    return ArtefactError(f"ExecuTorch is not installed: pip install 'lrpfx[executorch]' ({error})", topic="missing-package")


def _written(edge: Any) -> bytes:
    """A program in ExecuTorch's form. `LoweringError` names operators without a portable kernel."""
    from executorch.exir.dialects.edge._ops import EdgeOpOverload
    from executorch.runtime import Runtime

    kernels = Runtime.get().operator_registry.operator_names
    called = [node for node in edge.exported_program().graph.nodes if isinstance(node.target, EdgeOpOverload)]
    missing = {node: node.target._op for node in called if _kernel_of(node.target) not in kernels}
    if missing:
        raise operators_missing(
            "ExecuTorch has no portable kernels of these operators",
            missing,
            "use a .pt2 or .onnx file, which support these operators",
        )
    return bytes(edge.to_executorch().buffer)


def _kernel_of(operator: Any) -> str | None:
    """The name of the kernel that ExecuTorch calls for an operator, or None if it has none."""
    try:
        return str(operator.to_out_variant().name())
    except RuntimeError:
        return None


def _joined(program: bytes, manifest: Mapping[str, Any], self_test: bytes) -> bytes:
    entries = signed_entries({PROGRAM: program}, manifest, self_test)
    del entries[PROGRAM]
    return program + archive_of(entries)


def _entries(content: bytes) -> Entries:
    """The entries of the archive behind a program, and the program itself."""
    length = _length_of_program(content)
    return {**read_archive(content[length:]), PROGRAM: content[:length]}


def _length_of_program(content: bytes) -> int:
    if len(content) < HEADER.size:
        raise RefusedError("it is damaged: it ends within its header")
    format, extended, size, program, start, segments = HEADER.unpack_from(content)
    if format == FORMAT and extended != EXTENDED:  # ExecuTorch writes no header for a program without weights
        return _length_before_archive(content)
    if format != FORMAT or size < HEADER.size - 8:
        raise RefusedError("it does not have ExecuTorch's current format")
    return int(max(program, start + segments if segments else 0))


def _length_before_archive(content: bytes) -> int:
    """Where the archive at the end of the content begins: its last record gives the length of what is before it."""
    place = content.rfind(END_OF_ARCHIVE)
    if place < 0 or len(content) - place < LAST_RECORD.size:
        raise RefusedError("it does not have ExecuTorch's current format, or no archive of lrpfx follows the program")
    _, directory, offset = LAST_RECORD.unpack_from(content, place)
    if not place - directory - offset > 0:
        raise RefusedError("it is damaged: the archive does not have the length that it gives")
    return int(place - directory - offset)
