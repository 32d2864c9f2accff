"""Programs as native code: .pt2 files that AOTInductor compiles."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lrpfx.deploy.archive import archive_of, check_entries, read_archive, signed_archive
from lrpfx.deploy.backends.backend import Replace, Stored
from lrpfx.deploy.backends.exported import Exported
from lrpfx.deploy.runner import Function
from lrpfx.deploy.self_test import SelfTest
from lrpfx.errors import ArtefactError
from lrpfx.support.torch_internals import compile_program, load_compiled, problem_of_cpp_compiler

logger = logging.getLogger(__name__)

#: The layout of weights is optimized ahead of time, but not that of activations: inductor mistakes the layout of a batch of one
#: in 3-d convolutions, and the relevance is then wrong.
INDUCTOR = {"freezing": True, "layout_optimization": False}


class NativeCode(Exported):
    """Native code for machines like this one, in an archive with the form of an exported program's."""

    kind = "compiled"
    is_native = True
    is_compiled = True

    def check_requirements(self) -> None:
        problem = problem_of_cpp_compiler()
        if problem is not None:
            raise ArtefactError(f"AOTInductor needs a C++ compiler: {problem}", topic="missing-package")

    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        doubles = any(value.dtype == torch.float64 for value in program.state_dict.values())
        configs = {**INDUCTOR, "freezing": not doubles}  # frozen convolutions use oneDNN, which lacks float64
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / "program.pt2"
            logger.info("compiling with AOTInductor")
            try:
                with torch.no_grad():  # inductor silently skips freezing if gradients are enabled
                    compile_program(program, str(compiled), configs)
            except Exception as error:
                raise ArtefactError(
                    f"AOTInductor cannot compile the program: {type(error).__name__}: {error}", topic="formats-of-programs"
                ) from error
            entries = read_archive(compiled.read_bytes())
        replace(signed_archive(entries, manifest, self_test))

    def check(self, path: Path, stored: Stored, test: SelfTest) -> None:
        check_entries(stored.content, r"data/aotinductor/model/\w+(\.\w+)+")

    def load(self, path: Path, stored: Stored) -> Function:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "program.pt2"
            archive.write_bytes(archive_of(stored.content))
            return load_compiled(str(archive))
