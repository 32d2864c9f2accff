"""Artefacts: lowered programs as files, and runners that load them.

A file carries the program, a manifest (what it is, what it takes and returns, and a hash of all the rest) and a self-test:
inputs with the results that the program had when it was saved. Loading needs torch and this module, not the model's code.
"""

import logging
import os
from pathlib import Path

import torch
from torch.export import ExportedProgram

from lrpfx.deploy import self_test
from lrpfx.deploy.archive import RefusedError
from lrpfx.deploy.backends import BACKENDS, Backend
from lrpfx.deploy.files import as_path, checked_path, whole_file
from lrpfx.deploy.manifest import checked_facts, describe
from lrpfx.deploy.runner import Runner
from lrpfx.errors import ArtefactError, LrpfxError, os_errors
from lrpfx.passes.driver import run_passes
from lrpfx.passes.program import PassRecord, Program
from lrpfx.passes.properties import EXPORTED
from lrpfx.reports.assignment import history
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.torch_internals import OLDEST_FOR_PROGRAMS, require

logger = logging.getLogger(__name__)


def suffixes() -> tuple[str, ...]:
    """The suffixes of files, each once."""
    return tuple(dict.fromkeys(backend.suffix for backend in BACKENDS.values()))


def backends_for(suffix: str) -> dict[str, Backend]:
    """The backends whose files have this suffix, by kind; those of the first suffix if none has."""
    known = suffix if suffix in suffixes() else suffixes()[0]
    return {kind: backend for kind, backend in BACKENDS.items() if backend.suffix == known}


@undisturbed()
def save(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Write a lowered program to `path`: for torch if it ends in `.pt2`, for ONNX Runtime and its like if in `.onnx`.

    The file appears whole or not at all, and only after it was loaded and passed its self-test. Parameters of more than
    1.5 GiB go to a second file beside an `.onnx` one. A file that is overwritten keeps its mode, and a link to it stays one.
    Errors: `ArtefactError`, also where the file cannot be written; `LoweringError` for what ONNX cannot express.
    """
    given, target = checked_path(path, suffixes())
    return write_with(program, given, target, next(iter(backends_for(given.suffix).values())))


@undisturbed()
def package(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Compile a lowered program with AOTInductor into `path`, which ends in `.pt2`: native code for machines like this one.

    Weights are laid out for these machines too, which takes up to twice their space in the file. It needs a C++ compiler, and
    may take minutes. The file appears whole or not at all, and only after it passed its self-test. Errors: as of `save`.
    """
    backend = BACKENDS["compiled"]
    given, target = checked_path(path, (backend.suffix,))
    return write_with(program, given, target, backend)


def write_with(program: ExportedProgram, given: Path, target: Path, backend: Backend) -> Path:
    """Write a lowered program with a backend to `target`, the file behind `given`; returns `given`."""
    checked_facts(program)
    with os_errors(ArtefactError, target, "written"):
        legal, stages = legalized(program, backend)
        manifest, tested = describe(program, backend.kind, stages)
        backend.write(legal, manifest, tested, target, lambda content: _replace(target, content, backend.suffix))
    return given


def legalized(program: ExportedProgram, backend: Backend) -> tuple[ExportedProgram, list[PassRecord]]:
    """The program in operators that a backend has, and the stages that it was made in."""
    lowered = Program(
        program.graph_module,
        program.graph,
        checked_facts(program)["title"],
        history=list(history(program)),
        properties=[EXPORTED],
        exported=program,
    )
    run_passes(lowered, [step() for step in backend.legalize])
    return lowered.exported or program, lowered.history


def _replace(path: Path, content: bytes, suffix: str) -> None:
    """Write a program's file, and put it in its place after it has passed its self-test."""
    logger.info("loading %s for its self-test", path.name)
    with whole_file(path, suffix) as temporary:
        temporary.write_bytes(content)
        try:
            load(temporary).verify()
        except ArtefactError as error:
            raise ArtefactError(str(error).replace(str(temporary), str(path))) from error


@undisturbed()
def load(path: str | os.PathLike[str]) -> Runner:
    """The runner of a file that `save` or `package` wrote.

    Nothing of the file is used before its hash was found right and everything in it was found to be what belongs there; nothing
    is unpickled, and no text in it evaluated as Python. What its program computes is another matter: a compiled program is
    native code. Errors: `ArtefactError` for a file that is damaged, truncated or not an artefact of lrpfx.
    """
    require("lrpfx.load", OLDEST_FOR_PROGRAMS, ArtefactError)
    path = as_path(path)
    with os_errors(ArtefactError, path, "read"):
        if path.exists() and not path.is_file():
            raise ArtefactError(f"{path} is not a file")
        content = path.read_bytes()
    try:
        return _load(path, content)
    except RefusedError as error:
        raise ArtefactError(f"{path} is not loaded: {error}") from error
    except (LrpfxError, MemoryError):
        raise
    except Exception as error:
        raise ArtefactError(f"{path} is damaged, or was not written by lrpfx: {type(error).__name__}: {error}") from error


def _load(path: Path, content: bytes) -> Runner:
    backends = backends_for(path.suffix)
    stored = next(iter(backends.values())).read(path, content)
    del content
    backend = backends.get(stored.manifest["kind"])
    if backend is None:
        raise RefusedError(f"it is of the kind {stored.manifest['kind']!r}, which is not known")
    test = self_test.read(stored.self_test, stored.manifest)
    try:
        function = backend.load(path, stored)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"torch {torch.__version__} cannot load it: {type(error).__name__}: {error}") from error
    return Runner(function, stored.manifest, test)
