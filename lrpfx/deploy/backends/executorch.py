"""Programs for ExecuTorch: .pte files for phones and other small devices.

Such a file is a program as ExecuTorch writes it, whose header gives its length, followed by an archive of the manifest and the
self-test, which ExecuTorch does not read.
"""

import json
import logging
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lrpfx.deploy.archive import (
    MANIFEST,
    SELF_TEST,
    Entries,
    RefusedError,
    archive_of,
    read_archive,
    read_signed_entries,
    signed_entries,
)
from lrpfx.deploy.backends.backend import Backend, Replace, Stored, operators_missing
from lrpfx.deploy.manifest import manifest_of
from lrpfx.deploy.runner import Function
from lrpfx.deploy.self_test import SelfTest
from lrpfx.errors import ArtefactError, LoweringError
from lrpfx.passes.lower.legalize_for_executorch import LegalizeForExecuTorch
from lrpfx.support.torch_internals import pytree

logger = logging.getLogger(__name__)

PROGRAM = "program.pte"  # the entry whose content precedes the archive

#: The beginning of a program: its format, and a header with the length of the program itself and, if weights follow it, with
#: their offset and length.
HEADER = struct.Struct("<4x4s4sIQQQ")
FORMAT, EXTENDED = b"ET12", b"eh00"


class ExecuTorch(Backend):
    """A program for the portable kernels of ExecuTorch, for inputs of one size."""

    kind = "executorch"
    suffix = ".pte"
    is_native = True  # the runtime trusts its files
    runtime = "executorch"
    legalize = (LegalizeForExecuTorch,)

    def check_requirements(self) -> None:
        try:
            import executorch.exir
            import executorch.runtime  # noqa: F401
        except ImportError as error:
            raise _missing(error) from error

    def check_program(self, program: ExportedProgram) -> None:
        values = [node.meta.get("val") for node in program.graph.nodes]
        leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(size, torch.SymInt) for leaf in leaves for size in leaf.shape):
            raise LoweringError(
                "ExecuTorch plans the memory of a program for one size of its inputs: lower it with dynamic_batch=False",
                topic="formats-of-programs",
            )
        if any(leaf.dtype == torch.float64 for leaf in leaves):
            raise LoweringError(
                "ExecuTorch rounds numbers in float64 to float32: convert the model with .float() before transforming it, or "
                "use a .pt2 file",
                topic="formats-of-programs",
            )

    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        logger.info("translating into operators of ExecuTorch")
        replace(_joined(_executorch_program(program), manifest, self_test))

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


def _missing(error: ImportError) -> ArtefactError:
    return ArtefactError(f"ExecuTorch is not installed: pip install 'lrpfx[executorch]' ({error})", topic="missing-package")


def _executorch_program(program: ExportedProgram) -> bytes:
    """A legalized program in ExecuTorch's form. `LoweringError` names operators without a portable kernel."""
    from executorch.exir import EdgeCompileConfig, to_edge
    from executorch.exir.dialects.edge._ops import EdgeOpOverload
    from executorch.runtime import Runtime

    kernels = Runtime.get().operator_registry.operator_names
    try:
        edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        called = [node for node in edge.exported_program().graph.nodes if isinstance(node.target, EdgeOpOverload)]
        missing = [node for node in called if _kernel_of(node.target) not in kernels]
        if missing:
            raise operators_missing(
                "ExecuTorch has no portable kernels of these operators",
                {node: node.target._op for node in missing},
                "use a .pt2 or .onnx file, which support these operators",
            )
        return bytes(edge.to_executorch().buffer)
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(
            f"ExecuTorch cannot translate the program: {type(error).__name__}: {error}", topic="formats-of-programs"
        ) from error


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
    if format != FORMAT or extended != EXTENDED or size < HEADER.size - 8:
        raise RefusedError("it does not have ExecuTorch's current format")
    return int(max(program, start + segments if segments else 0))
