"""Artefacts: lowered programs as files, and runners that load them.

A file contains the program, a manifest (a description of the program, its arguments and results, and a hash of everything else)
and a self-test: inputs with the program's results when it was saved. Loading needs lrpfx, but not the model's code.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from lrpfx.deploy import self_test
from lrpfx.deploy.backends import BACKENDS, Backend
from lrpfx.deploy.backends.backend import Stored
from lrpfx.deploy.image_facts import image_facts
from lrpfx.deploy.manifest import MOST_TOLERATED, UNDETERMINED, checked_facts, describe, warn_undetermined
from lrpfx.deploy.program_facts import argument_examples
from lrpfx.deploy.runner import Function, Runner
from lrpfx.deploy.self_test import SelfTest
from lrpfx.deploy.signatures import Key, check_signature, write_signature
from lrpfx.deploy.verification import shaken
from lrpfx.errors import ArtefactError, InputError, LrpfxError, LrpfxWarning, os_errors
from lrpfx.passes.driver import run_passes
from lrpfx.passes.program import Program
from lrpfx.passes.properties import EXPORTED
from lrpfx.passes.stages import Settings, Stage, passes_of
from lrpfx.runtime.compiled_graph import HISTORY, PassRecord
from lrpfx.support.files import as_path, checked_path, whole_file
from lrpfx.support.interrupts import tracing, undisturbed
from lrpfx.support.stored_arrays import RefusedError
from lrpfx.support.torch_internals import OLDEST_FOR_FILES, require

logger = logging.getLogger(__name__)


def suffixes() -> tuple[str, ...]:
    """The distinct suffixes of files."""
    return tuple(dict.fromkeys(backend.suffix for backend in BACKENDS.values()))


def backends_for(suffix: str) -> dict[str, Backend]:
    """The backends for files with this suffix, by kind; for an unknown suffix, those for archives."""
    known = suffix if suffix in suffixes() else suffixes()[0]
    return {kind: backend for kind, backend in BACKENDS.items() if backend.suffix == known}


def check_before_work(path: str | os.PathLike[str], *, compiled: bool = False) -> None:
    """Raise what `save`, or `package` if `compiled`, would raise for the path or for missing packages, before the work."""
    _written_by(path, compiled)[2].check_requirements()


def _written_by(path: str | os.PathLike[str], compiled: bool) -> tuple[Path, Path, Backend]:
    """The given path, the file that it leads to, and the backend with which `save`, or `package` if `compiled`, writes it."""
    backends = {backend.suffix: backend for backend in BACKENDS.values() if backend.is_compiled == compiled}
    given, target = checked_path(path, tuple(backends))
    return given, target, backends[given.suffix]


@tracing()
@undisturbed()
def save(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    preprocess: Callable[..., Any] | None = None,
    categories: Sequence[str] | None = None,
) -> Path:
    """Write a lowered program to a file, which appears whole or not at all, and only after it has passed its self-test.

    An overwritten file keeps its mode, and a link to it stays a link. Returns the path.

    Parameters
    ----------
    program
        What `lrpfx.lower` returned.
    path
        Ends in `.pt2` for torch, in `.onnx` for ONNX Runtime and similar, and in `.pte` for ExecuTorch. Parameters of more
        than 1.5 GiB go to a second file beside an `.onnx` file.
    preprocess
        How photographs become inputs, for `lrpfx.explain` and `lrpfx run`: the transforms of torchvision, timm or Hugging Face,
        or a `StoredPreprocessing`. Their resize, crop, mean and deviation are stored.
    categories
        The names of the classes, for the same.

    Raises
    ------
    InputError
        The preprocessing or the categories cannot be stored, or do not fit the program.
    ArtefactError
        The file cannot be written, or it fails its self-test.
    LoweringError
        ONNX or ExecuTorch cannot express the program.

    Examples
    --------
    >>> path = lrpfx.save(lrpfx.lower(explain_model, x), "model.onnx")
    """
    given, target, backend = _written_by(path, compiled=False)
    return write_with(program, given, target, backend, image_facts(preprocess, categories))


@tracing()
@undisturbed()
def package(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    preprocess: Callable[..., Any] | None = None,
    categories: Sequence[str] | None = None,
) -> Path:
    """Compile a lowered program with AOTInductor to native code for machines like this one, or for ExecuTorch with XNNPACK.

    AOTInductor also chooses the layout of weights for these machines, which can double their space in the file. It needs a C++
    compiler and may take minutes. XNNPACK needs all weights stored, which can triple their space.

    `path`: it ends in `.pt2` for native code, and in `.pte` for ExecuTorch with XNNPACK. Other arguments: as for `save`, and so
    are the errors and what is returned.
    """
    given, target, backend = _written_by(path, compiled=True)
    return write_with(program, given, target, backend, image_facts(preprocess, categories))


def write_with(
    program: ExportedProgram, given: Path, target: Path, backend: Backend, photographs: Mapping[str, Any] | None = None
) -> Path:
    """Write a lowered program with a backend to `target`, the file that the path `given` leads to. Returns `given`."""
    with os_errors(ArtefactError, target, "written"):
        backend.check_requirements()
        _check_torch(target)
        checked_facts(program)
        backend.check_program(program)
        legal, stages = legalized(program, backend)
        runtimes = {backend.runtime: version(backend.runtime)}
        manifest, tested = describe(program, backend.kind, runtimes, stages, photographs or {})
        backend.write(legal, manifest, tested, target, lambda content: _replace(target, content, backend.suffix, program))
    return given


def legalized(program: ExportedProgram, backend: Backend) -> tuple[ExportedProgram, list[PassRecord]]:
    """The program in operators that a backend supports, and the stages that made it."""
    title = checked_facts(program)["title"]
    history = list(program.graph_module.meta[HISTORY])
    lowered = Program(program.graph_module, program.graph, title, history=history, properties=[EXPORTED], exported=program)
    run_passes(lowered, passes_of(Settings(legalize=backend.legalize), Stage.LEGALIZE))
    return lowered.exported or program, lowered.history


def _replace(path: Path, content: bytes, suffix: str, program: ExportedProgram | None = None) -> None:
    """Write a program's file, and move it to `path` after it has passed its self-test.

    `program`: what was written, with which the file is compared for further sizes that it takes.
    """
    logger.info("loading %s for its self-test", path.name)
    with whole_file(path, suffix) as temporary:
        temporary.write_bytes(content)
        try:
            runner = load(temporary)
            runner.verify()
            if program is not None:
                _compare_for_other_sizes(runner, program)
        except ArtefactError as error:
            raise ArtefactError(str(error).replace(str(temporary), str(path)), topic=error.topic) from error


def _compare_for_other_sizes(runner: Runner, program: ExportedProgram) -> None:
    """Raise `ArtefactError` where a file has other results than its program for other sizes than the example's.

    Rounding may change them more than those of the self-test: what is looked for is a translation that holds one size fast. A
    result that rounding alone changes as much is a warning.
    """
    function = program.module()
    for arguments in argument_examples(program)[1:]:
        expected, found = function(*arguments.values()), runner(**arguments)
        for name, value in expected.items():
            scale = expected["output" if name == "balance" else name].double().norm()  # a balance is a difference of sums
            if found[name].shape == value.shape:
                change = (found[name].double() - value.double()).norm()
                if change <= UNDETERMINED * scale:
                    continue
                rounded = (function(*near)[name] for near in shaken(list(arguments.values()), value.dtype))
                if any(change <= 10 * (other.double() - value.double()).norm() for other in rounded):
                    warn_undetermined(runner.manifest["title"], float(change / scale))
                    continue
            shapes = ", ".join(f"{one} {tuple(tensor.shape)}" for one, tensor in arguments.items())
            raise ArtefactError(
                f"{runner.manifest['kind']} computes another {name} for {shapes} than the program: lower it with "
                "dynamic_batch=False, for the example's sizes alone",
                topic="lowering",
            )


@undisturbed()
def sign(path: str | os.PathLike[str], key: Key | None = None, *, tolerance: float | None = None) -> Path:
    """Write the hashes of a file anew, after another program has changed it, and sign it with a private key.

    The file must pass its self-test and all checks of `load`. The signature lies beside it, as `model.onnx.sig`. Returns the
    path of the file.

    Parameters
    ----------
    path
        A file that `save` or `package` wrote. It is written again only if its hashes or its tolerance are others.
    key
        A private key of Ed25519 in PEM format, as a path or bytes. Without one, the file is not signed.
    tolerance
        The largest difference that its self-test allows, at most 0.1; by default that of the file.

    Raises
    ------
    ArtefactError
        The file is damaged, is not an artefact of lrpfx, or fails its self-test.
    InputError
        The key or the tolerance is invalid.
    """
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance <= MOST_TOLERATED):
        raise InputError(f"tolerance is a number between 0 and {MOST_TOLERATED}, not {tolerance!r}")
    given, target = checked_path(path, suffixes())
    backend = next(iter(backends_for(given.suffix).values()))
    with os_errors(ArtefactError, target, "read"):
        content = target.read_bytes()
    with _refusals(target):
        hashed = backend.hashed_anew(content, {} if tolerance is None else {"tolerance": tolerance})
    if hashed != content:
        _replace(target, hashed, given.suffix)
    else:
        load(target).verify()
    if key is not None:
        write_signature(given, hashed, key)
    return given


@undisturbed()
def load(path: str | os.PathLike[str], *, allow_native: bool = True, signed_by: Key | None = None) -> Runner:
    """The runner of a file that `save` or `package` wrote.

    The file is used only after its hash and all its entries have been checked. Nothing is unpickled or computed, and no text is
    evaluated but short arithmetic of sizes. A program that `package` compiled is native code, which no check makes safe, and
    ExecuTorch trusts its files.

    Parameters
    ----------
    path
        The file.
    allow_native
        Whether the file may contain native code, or be one for ExecuTorch. Pass False for files of others.
    signed_by
        A public key of Ed25519 in PEM format, as a path or bytes: `sign` must have signed the file with its private key.

    Raises
    ------
    ArtefactError
        The file is damaged, truncated or not an artefact of lrpfx.

    Examples
    --------
    >>> runner = lrpfx.load("model.onnx")
    >>> runner(x, torch.tensor([1, 0]))["relevance"].shape
    torch.Size([2, 3, 8, 8])
    """
    path = as_path(path)
    _check_torch(path)
    with _refusals(path):
        backend, stored, test = _checked(path, allow_native, signed_by)
        function = _loaded(path, backend, stored)
    _warn_of_other_runtime(path, backend, stored.manifest)
    return Runner(function, stored.manifest, test)


def _check_torch(path: Path) -> None:
    if path.suffix == ".pt2":
        require("a .pt2 file", OLDEST_FOR_FILES, ArtefactError)


def _loaded(path: Path, backend: Backend, stored: Stored) -> Function:
    try:
        return backend.load(path, stored)
    except (RefusedError, LrpfxError):
        raise
    except Exception as error:
        runtime = f"{backend.runtime} {version(backend.runtime)}"
        raise RefusedError(f"{runtime} cannot load it: {type(error).__name__}: {error}") from error


def _warn_of_other_runtime(path: Path, backend: Backend, manifest: Mapping[str, Any]) -> None:
    """Warn of an older runtime than the one that a file was verified with, or of any other one for native code."""
    was = manifest["runtimes"].get(backend.runtime)
    now = version(backend.runtime)
    if was is not None and (_release(now) < _release(was) or (backend.is_native and _release(now) != _release(was))):
        warnings.warn(
            LrpfxWarning(
                f"{path} was written with {backend.runtime} {was}, but this is {now}: verify() tells whether "
                "results are the same",
                topic="running-programs",
            ),
            stacklevel=4,
        )


def _release(version: str) -> tuple[int, ...]:
    """The major and minor version."""
    return tuple(map(int, re.findall(r"\d{1,9}", version)[:2]))


def manifest_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file says of its program, after the checks of `load`. The program is not loaded, so no code of the file runs.

    Errors: `ArtefactError`, as `load`.
    """
    path = as_path(path)
    with _refusals(path):
        return _checked(path)[1].manifest


def _checked(path: Path, allow_native: bool = True, signed_by: Key | None = None) -> tuple[Backend, Stored, SelfTest]:
    """The backend, the content and the self-test of a file, which have passed all checks that need no loading."""
    with os_errors(ArtefactError, path, "read"):
        if path.exists() and not path.is_file():
            raise ArtefactError(f"{path} is not a file", topic="files-and-folders")
        content = path.read_bytes()
        if signed_by is not None:
            check_signature(path, content, signed_by)
    backends = backends_for(path.suffix)
    stored = next(iter(backends.values())).read(path, content)
    backend = backends.get(stored.manifest["kind"])
    if backend is None:
        raise RefusedError(f"it is of the unknown kind {stored.manifest['kind']!r}")
    if backend.is_native and not allow_native:
        raise RefusedError("it contains native code, or its runtime checks it as little; allow_native=False refuses such files")
    test = self_test.read(stored.self_test, stored.manifest)
    backend.check(path, stored, test)
    return backend, stored, test


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """A context in which errors of a damaged file become an `ArtefactError`."""
    try:
        yield
    except RefusedError as error:
        raise ArtefactError(f"{path} is not loaded: {error}") from error
    except (LrpfxError, MemoryError):
        raise
    except Exception as error:
        raise ArtefactError(f"{path} is damaged, or was not written by lrpfx: {type(error).__name__}: {error}") from error
