"""Artefacts: lowered programs as files, and runners that load them.

A file carries the program, a manifest (what it is, what it takes and returns, and a hash of all the rest) and a self-test:
inputs with the results that the program had when it was saved. Loading needs torch and this module, not the model's code.
"""

import base64
import copy
import hashlib
import io
import json
import logging
import mmap
import os
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.export import ExportedProgram

from lrpfx.deploy import self_test
from lrpfx.deploy.archives import (
    MANIFEST,
    MANIFEST_HASH,
    SELF_TEST,
    RefusedError,
    archive_of,
    check_entries,
    plain_entries,
    program_of,
    read_archive,
)
from lrpfx.deploy.derived_weights import fold_constants
from lrpfx.deploy.lowering import TARGETS, argument_examples, facts_of
from lrpfx.deploy.onnx_export import onnx_model
from lrpfx.deploy.self_test import SelfTest, as_array
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxError, is_out_of_memory, os_errors
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.tensors import not_dense
from lrpfx.support.torch_internals import (
    OLDEST_FOR_PROGRAMS,
    DisableTorchFunction,
    compile_program,
    load_compiled,
    require,
)

logger = logging.getLogger(__name__)

FORMAT = 5

#: Bytes of parameters from which on an .onnx file keeps them in a second one; a file of its own may have 2 GiB at most.
EXTERNAL_DATA_FROM = 3 * 2**29

#: Bytes of the smallest parameter that goes there.
SMALLEST_MOVED = 1024

#: Weights are laid out ahead of time. Values between layers are not: inductor mistakes the layout of a batch of one in 3-d
#: convolutions, and the relevance is wrong.
INDUCTOR = {"freezing": True, "layout_optimization": False}

#: torch notes in a variable of the process what it reads.
_DESERIALIZING = threading.Lock()

Array = torch.Tensor | np.ndarray
Function = Callable[..., Mapping[str, torch.Tensor]]


@undisturbed()
def save(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Write a lowered program to `path`: for torch if it ends in `.pt2`, for ONNX Runtime and its like if in `.onnx`.

    The file appears whole or not at all, and only after it was loaded and passed its self-test. Parameters of more than
    1.5 GiB go to a second file beside an `.onnx` one. A file that is overwritten keeps its mode, and a link to it stays one.
    Errors: `ArtefactError`, also where the file cannot be written; `LoweringError` for what ONNX cannot express.
    """
    given, target = _checked_path(path, (".pt2", ".onnx"))
    _facts(program)
    with os_errors(ArtefactError, target, "written"):
        if given.suffix == ".onnx":
            _write_onnx(program, target)
        else:
            plain = copy.copy(program)
            plain._example_inputs = None  # they would be pickled
            buffer = io.BytesIO()
            torch.export.save(plain, buffer)
            _write_archive(program, plain_entries(buffer.getvalue()), target, "exported")
    return given


@undisturbed()
def package(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Compile a lowered program with AOTInductor into `path`, which ends in `.pt2`: native code for machines like this one.

    Weights are laid out for these machines too, which takes up to twice their space in the file. It needs a C++ compiler, and
    may take minutes. The file appears whole or not at all, and only after it passed its self-test. Errors: as of `save`.
    """
    given, target = _checked_path(path, (".pt2",))
    _facts(program)
    doubles = any(value.dtype == torch.float64 for value in program.state_dict.values())
    configs = {**INDUCTOR, "freezing": not doubles}  # frozen convolutions are oneDNN's, which has none in float64
    with os_errors(ArtefactError, target, "written"), tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "program.pt2"
        logger.info("compiling with AOTInductor")
        try:
            with torch.no_grad():  # where gradients are on, inductor silently does without freezing
                compile_program(program, str(compiled), configs)
        except Exception as error:
            raise ArtefactError(f"AOTInductor cannot compile the program: {type(error).__name__}: {error}") from error
        _write_archive(program, read_archive(compiled.read_bytes()), target, "compiled")
    return given


def _checked_path(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> tuple[Path, Path]:
    """The path as it was given, whose suffix says what the file is, and where it is written: behind links."""
    path = _as_path(path)
    if path.suffix not in suffixes:
        raise ArtefactError(
            f"the file's suffix says what it is: {' or '.join(suffixes)}, not {path.suffix or 'none'!r} ({path})"
        )
    with os_errors(ArtefactError, path, "written"):
        target = _behind_links(path)
        if target.exists() and not target.is_file():
            raise ArtefactError(f"{path} is not a file, so that it cannot be replaced by one")
        if not target.parent.is_dir():
            raise ArtefactError(f"there is no folder {target.parent}")
    return path, target


def _as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InputTypeError(f"a path is a str or a Path, not a {type(path).__name__}")
    if "\0" in os.fspath(path):
        raise ArtefactError(f"{os.fspath(path)!r} is not the name of a file")
    return Path(path)


def _behind_links(path: Path) -> Path:
    """The file that a link is for; the path itself where it is not a link."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError as error:
        raise ArtefactError(f"{path} is a link to itself") from error


# --- writing ----------------------------------------------------------------------------------------------------------------


def _facts(program: ExportedProgram) -> dict[str, Any]:
    if not isinstance(program, ExportedProgram):
        raise InputTypeError(f"a program is what lrpfx.lower returns, not a {type(program).__name__}")
    facts = facts_of(program)
    if facts is None:
        raise ArtefactError("the program was not made by lrpfx.lower, so that nothing is known of what it takes and returns")
    return facts


def _described(program: ExportedProgram, kind: str) -> tuple[dict[str, Any], bytes]:
    """The manifest without hashes, and the self-test."""
    logger.info("recording a self-test")
    facts = _facts(program)
    arguments = argument_examples(program)
    batch = None if facts["dynamic_batch"] else len(next(iter(arguments.values())))
    test, results = self_test.recorded(program.module(), arguments, facts["dynamic_batch"], facts["tolerance"])
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "torch": str(torch.__version__),
        **facts,
        "arguments": {name: _description(value, batch) for name, value in arguments.items()},
        "results": {name: _description(value, batch) for name, value in results.items()},
        "self_test": list(test.sizes),
    }
    return manifest, test.to_bytes()


def _description(value: torch.Tensor, batch: int | None) -> dict[str, Any]:
    """Shape, with None for any batch size, and dtype."""
    return {"shape": [batch, *value.shape[1:]] if value.ndim else [], "dtype": str(value.dtype).removeprefix("torch.")}


@contextmanager
def whole_file(path: Path, suffix: str) -> Iterator[Path]:
    """A name beside `path` for a file that is moved to `path` in one step when the context ends without an error."""
    with _temporary(path, suffix) as temporary:
        yield temporary
        _put(temporary, path)


@contextmanager
def _temporary(path: Path, suffix: str) -> Iterator[Path]:
    """A file beside `path` while it is written. What killed writers of the same file left goes first."""
    own = f".lrpfx.{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}"  # as long for any name of a file
    for left in path.parent.glob(f"{own}.*"):
        with suppress(OSError), open(left, "rb") as file:
            if locked(file.fileno()):  # nobody writes it any more
                left.unlink()
    temporary = path.parent / f"{own}.{secrets.token_hex(8)}{suffix}"
    try:
        with open(temporary, "xb") as file:
            locked(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _put(temporary: Path, target: Path, like: Path | None = None) -> None:
    """Move a file that was written to its place, with the mode of the file `like`, by default of the one that it replaces."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    with suppress(FileNotFoundError):
        os.chmod(temporary, stat.S_IMODE((like or target).stat().st_mode))
    os.replace(temporary, target)


def locked(file: int) -> bool | None:
    """Whether an open file could be locked, which it is until it is closed; None on a system without such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _replace(path: Path, content: bytes, suffix: str) -> None:
    """Write a program's file, and put it in its place after it has passed its self-test."""
    logger.info("loading %s for its self-test", path.name)
    with whole_file(path, suffix) as temporary:
        temporary.write_bytes(content)
        try:
            load(temporary).verify()
        except ArtefactError as error:
            raise ArtefactError(str(error).replace(str(temporary), str(path))) from error


# An archive of torch's, with three more files in it.


def _write_archive(program: ExportedProgram, entries: dict[str, bytes], path: Path, kind: str) -> None:
    manifest, entries[SELF_TEST] = _described(program, kind)
    text = json.dumps({**manifest, "hash": _hash(entries)}, indent=1).encode()
    entries[MANIFEST], entries[MANIFEST_HASH] = text, hashlib.sha256(text).hexdigest().encode()
    _replace(path, archive_of(entries), ".pt2")


def _hash(entries: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(entries):
        total.update(f"{name}\n{len(entries[name])}\n".encode())
        total.update(entries[name])
    return total.hexdigest()


# An ONNX file: metadata of the model, the last of them the hash of all bytes before it.


def _write_onnx(program: ExportedProgram, path: Path) -> None:
    manifest, tested = _described(program, "onnx")
    logger.info("translating into operators of ONNX")
    model = onnx_model(program, list(manifest["arguments"]), list(manifest["results"]))
    replaced, written = _data_of(path), None
    try:
        if sum(tensor.nbytes for tensor in program.state_dict.values()) > EXTERNAL_DATA_FROM:
            written, manifest["data"] = _move_parameters(model, path)
        metadata = {"lrpfx": json.dumps(manifest), "lrpfx_self_test": base64.b64encode(tested).decode()}
        for key, value in metadata.items():
            entry = model.metadata_props.add()
            entry.key, entry.value = key, value
        body = model.SerializeToString(deterministic=True)
        _replace(path, body + _trailer(body), ".onnx")
    except BaseException:
        if written is not None:
            written.unlink(missing_ok=True)
        raise
    if replaced is not None and replaced.name != manifest.get("data", {}).get("file") and not _is_named(replaced, path):
        replaced.unlink(missing_ok=True)


def _data_of(path: Path) -> Path | None:
    """The file with parameters that an .onnx file of lrpfx keeps beside it, if there is one."""
    try:
        manifest = _read_onnx(path.read_bytes())[0]
    except (OSError, LrpfxError, RefusedError):
        return None
    return path.parent / manifest["data"]["file"] if "data" in manifest else None


def _is_named(data: Path, path: Path) -> bool:
    """Whether a file of parameters may belong to another .onnx file than `path`, by its name or by what stands in that file."""
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


def _trailer(body: bytes) -> bytes:
    """One more entry of the metadata, as protobuf writes it, so that the whole is an ONNX model again."""
    key, value = b"lrpfx_sha256", hashlib.sha256(body).hexdigest().encode()
    entry = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([len(value)]) + value
    return b"\x72" + bytes([len(entry)]) + entry


def _move_parameters(model: Any, path: Path) -> tuple[Path | None, dict[str, str]]:
    """Move the parameters of `model` to a file beside `path`, named by its hash.

    The file, unless there was one already, and what the manifest says of it.
    """
    from onnx import external_data_helper

    with _temporary(path.parent / f"{path.name}.data", ".data") as temporary:
        for tensor in model.graph.initializer:
            if tensor.HasField("raw_data") and len(tensor.raw_data) >= SMALLEST_MOVED:
                external_data_helper.set_external_data(tensor, temporary.name)
        external_data_helper.write_external_data_tensors(model, str(path.parent))
        digest = hash_of_file(temporary)
        target = path.parent / f"{path.name}.{digest[:16]}.data"
        is_new = not target.exists()
        _put(temporary, target, like=path)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = target.name
    return target if is_new else None, {"file": target.name, "sha256": digest}


def hash_of_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- loading ----------------------------------------------------------------------------------------------------------------


@undisturbed()
def load(path: str | os.PathLike[str]) -> "Runner":
    """The runner of a file that `save` or `package` wrote.

    Nothing of the file is used before its hash was found right and everything in it was found to be what belongs there; nothing
    is unpickled, and no text in it evaluated as Python. What its program computes is another matter: a compiled program is
    native code. Errors: `ArtefactError` for a file that is damaged, truncated or no artefact of lrpfx.
    """
    require("lrpfx.load", OLDEST_FOR_PROGRAMS, ArtefactError)
    path = _as_path(path)
    with os_errors(ArtefactError, path, "read"):
        if path.exists() and not path.is_file():
            raise ArtefactError(f"{path} is not a file")
        content = path.read_bytes()
    try:
        return _load_onnx(path, content) if path.suffix == ".onnx" else _load_archive(content)
    except RefusedError as error:
        raise ArtefactError(f"{path} is not loaded: {error}") from error
    except (LrpfxError, MemoryError):
        raise
    except Exception as error:
        raise ArtefactError(f"{path} is damaged, or was not written by lrpfx: {type(error).__name__}: {error}") from error


def _load_archive(content: bytes) -> "Runner":
    entries = read_archive(content)
    del content
    if not {MANIFEST, MANIFEST_HASH, SELF_TEST} <= set(entries):
        raise RefusedError("it is damaged, or was not written by lrpfx: it has no manifest")
    text = entries.pop(MANIFEST)
    if hashlib.sha256(text).hexdigest().encode() != entries.pop(MANIFEST_HASH):
        raise RefusedError("it is damaged: its manifest has another hash")
    manifest = _manifest_of(text)
    if _hash(entries) != manifest["hash"]:
        raise RefusedError("it is damaged: its content has another hash")
    check_entries(entries, manifest["kind"])
    test = self_test.read(entries.pop(SELF_TEST), manifest)
    try:
        function = _compiled(entries) if manifest["kind"] == "compiled" else _exported(entries)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"torch {torch.__version__} cannot load it: {type(error).__name__}: {error}") from error
    return Runner(function, manifest, test)


def _manifest_of(text: str | bytes) -> dict[str, Any]:
    """The manifest, in which everything stands that is read of one."""
    manifest = json.loads(text)
    if not isinstance(manifest, dict):
        raise RefusedError("its manifest is not one")
    if manifest.get("format") != FORMAT:
        raise RefusedError(f"it has format {manifest.get('format')!r}, and this version of lrpfx reads format {FORMAT}")
    for key, kind in _MANIFEST_KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise RefusedError(f"its manifest has no {key}, or another value than it may have")
    for role in ("arguments", "results"):
        for name, described in manifest[role].items():
            sizes, dtype = described["shape"], described["dtype"]
            if not all(size is None or (type(size) is int and size >= 0) for size in sizes) or dtype not in _DTYPES:
                raise RefusedError(f"its manifest does not say what {name} is")
            if any(size is None for size in sizes[1:]) or (role == "arguments" and not sizes):
                raise RefusedError(f"its manifest does not say what {name} is")
    names, results = list(manifest["arguments"]), manifest["results"]
    if not names or "output" not in results or not 0 < manifest["tolerance"] < 1 or manifest["target"] not in TARGETS:
        raise RefusedError("its manifest does not say what the program takes and returns")
    has_target = names[-1] == "target" if manifest["target"] != "max" else "target" not in names
    if not has_target or (manifest["target"] == "index" and len(results["output"]["shape"]) != 2):
        raise RefusedError("its manifest does not say what the program takes as its target")
    described = [manifest["canonizers"], list(manifest["rules"].values()), *manifest["merged"].values()]
    if not all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in described):
        raise RefusedError("its manifest does not say which rules its nodes have")
    strange = next((text for text in _texts_of(manifest) if not text.isprintable()), None)
    if strange is not None:
        raise RefusedError(f"its manifest has {strange!r}, which cannot be printed")
    return manifest


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_of([*value, *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_of(inner)


_MANIFEST_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("kind", "torch", "lrpfx", "title", "composite", "target"), str),
    **dict.fromkeys(("arguments", "results", "rules", "merged"), dict),
    **{"canonizers": list, "reduce": (str, type(None)), "dynamic_batch": bool, "tolerance": float},
    "self_test": list,
}
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def _exported(entries: Mapping[str, bytes]) -> Function:
    with _DESERIALIZING, torch.device("cpu"):  # torch's reader is made for one thread, and for tensors without a mode
        exported = program_of(entries)
        for name, tensor in {**exported.state_dict, **exported.constants}.items():
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() < tensor.nbytes:
                raise RefusedError(f"{name} is larger than what the file has of it")
        program = exported.module()
        fold_constants(program)
    function: Function = program
    return function


def _compiled(entries: Mapping[str, bytes]) -> Function:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pt2"
        path.write_bytes(archive_of(entries))
        return load_compiled(str(path))


def _read_onnx(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The manifest of an ONNX file and its self-test, its hash verified. It reads no file but the one in the manifest."""
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
        raise RefusedError(f"its metadata is {', '.join(keys)}, not that of lrpfx")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    manifest = _manifest_of(metadata["lrpfx"])
    data = manifest.get("data", {})
    if data and not (re.fullmatch(r"[^/\\\0]+\.[0-9a-f]{16}\.data", data["file"]) and isinstance(data["sha256"], str)):
        raise RefusedError(f"it names {data['file']!r} as the file of its parameters")
    elsewhere = set(_files_read(model)) - {data.get("file")}
    if elsewhere:
        raise RefusedError(f"it reads another file, {min(elsewhere)!r}")
    return manifest, base64.b64decode(metadata["lrpfx_self_test"], validate=True)


def _files_read(message: Any) -> Iterator[str]:
    """The files that tensors anywhere in a message of protobuf are read from."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in value if isinstance(value, Sequence) else [value]:
            if field.name == "external_data":
                if one.key == "location":
                    yield one.value
            else:
                yield from _files_read(one)


def _load_onnx(path: Path, content: bytes) -> "Runner":
    try:
        import onnxruntime

        manifest, tested = _read_onnx(content)
    except ImportError as error:
        raise ArtefactError(f"ONNX needs packages that are not installed: pip install 'lrpfx[onnx]' ({error})") from error
    path = _behind_links(path)
    data = path.parent / manifest["data"]["file"] if "data" in manifest else None
    if data is not None:
        if data.is_symlink() or not data.is_file():
            raise RefusedError(f"the file of its parameters, {data.name}, is not there")
        if hash_of_file(data) != manifest["data"]["sha256"]:
            raise RefusedError(f"it is damaged: {data.name} has another hash")
    try:
        session = onnxruntime.InferenceSession(content if data is None else path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RefusedError(f"onnxruntime {onnxruntime.__version__} cannot load it: {error}") from error
    names = list(manifest["results"])

    def run(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = dict(zip(manifest["arguments"], map(as_array, tensors), strict=True))
        return dict(zip(names, map(torch.from_numpy, session.run(names, arrays)), strict=True))

    return Runner(run, manifest, self_test.read(tested, manifest))


def _plain(name: str, value: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as compiled code reads them from memory."""
    problem = not_dense(value)
    if problem is not None:
        raise InputTypeError(f"{name} is {problem}, but the program takes dense tensors with values")
    with DisableTorchFunction():  # a subclass may change what its methods do
        return value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()


class Runner:
    """A loaded program: `runner(input, target)` returns a dict of results, arrays for arrays and tensors for tensors.

    Inputs are checked before they run: compiled programs give wrong results for another memory format, without an error. What
    surrounds a call, such as autocast, does not change its results.
    """

    def __init__(self, function: Function, manifest: dict[str, Any], self_test: SelfTest) -> None:
        self.function = function
        self.manifest = manifest
        self.self_test = self_test

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runner":
        return Runner(copy.deepcopy(self.function, memo), self.manifest, self.self_test)

    def __reduce__(self) -> NoReturn:
        raise InputTypeError("a runner is not pickled: load the file where it is to run")

    def __call__(self, /, *args: Array, **keywords: Array) -> dict[str, Any]:
        """The results by name. Arguments have the shapes and dtypes of `manifest["arguments"]`, in their order or by name.

        Errors: `InputError` and `InputTypeError` for arguments that the program does not take; `ArtefactError` where it fails
        on what it takes; `MemoryError`.
        """
        names = list(self.manifest["arguments"])
        if len(args) > len(names):
            raise InputError(f"the program takes {', '.join(names)}, not {len(args)} arguments")
        given = {**dict(zip(names, args, strict=False)), **keywords}
        missing = [name for name in names if name not in given]
        unknown = [name for name in given if name not in names]
        twice = [name for name in names[: len(args)] if name in keywords]
        if missing or unknown or twice:
            raise InputError(
                f"the program takes {', '.join(names)}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}, given twice: {', '.join(twice) or 'none'}"
            )
        try:
            tensors = [self._checked(name, given[name]) for name in names]
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
        if len({len(tensor) for tensor in tensors}) > 1:
            raise InputError(
                f"the batch sizes differ: {', '.join(f'{n} {len(t)}' for n, t in zip(names, tensors, strict=True))}"
            )
        if self.manifest["target"] == "index":
            self._check_classes(tensors[-1])
        results = self._run(tensors)
        if any(isinstance(value, np.ndarray) for value in given.values()):
            return {name: as_array(value) for name, value in results.items()}
        return results

    @undisturbed()  # an interrupt within an `__exit__` would leave gradients off
    def _run(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        devices = {"cpu", *(tensor.device.type for tensor in tensors)}
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for device in devices:
                    stack.enter_context(torch.autocast(device, enabled=False))
                return dict(self.function(*tensors))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            if any(tensor.dtype == torch.int64 for tensor in tensors[: len(self._inputs())]):
                raise InputError(  # nothing else of what was checked can be wrong with inputs
                    f"the program cannot run on these inputs, perhaps for an index that it does not have: {error}"
                ) from error
            raise ArtefactError(f"the program fails: {type(error).__name__}: {error}") from error

    def _inputs(self) -> list[str]:
        """The arguments of the model itself."""
        return [name for name in self.manifest["arguments"] if name != "target"]

    def _checked(self, name: str, value: Array) -> torch.Tensor:
        """The tensor that the program takes, contiguous."""
        wanted = self.manifest["arguments"][name]
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            raise InputTypeError(f"{name} is a {type(value).__name__}, not a tensor or an array")
        if isinstance(value, np.ndarray):
            if value.dtype.name not in _DTYPES:
                raise InputTypeError(f"{name} has dtype {value.dtype}, but the program takes {wanted['dtype']}")
            if isinstance(value, np.ma.MaskedArray):
                raise InputTypeError(f"{name} is a masked array, and the program knows no mask; fill it with values")
            tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        else:
            tensor = _plain(name, value)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != wanted["dtype"]:
            raise InputTypeError(f"{name} has dtype {dtype}, but the program takes {wanted['dtype']}")
        shape, sizes = list(tensor.shape), wanted["shape"]
        if len(shape) != len(sizes) or any(want not in (None, have) for have, want in zip(shape, sizes, strict=True)):
            shown = "×".join("batch" if size is None else str(size) for size in sizes)
            raise InputError(f"{name} has shape {'×'.join(map(str, shape))}, but the program takes {shown}")
        if not len(tensor):
            raise InputError(f"{name} is an empty batch")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"{name} has values that are not finite")
        return tensor.contiguous()

    def _check_classes(self, target: torch.Tensor) -> None:
        classes = self.manifest["results"]["output"]["shape"][1]
        outside = target[(target < 0) | (target >= classes)]
        if outside.numel():
            raise InputError(f"target {int(outside[0])} is out of range: the output has {classes} classes")

    def verify(self) -> float:
        """Run the self-test, for two batch sizes where any is allowed: the largest difference of a result.

        It is relative to the norm of what is expected of the larger batch. Errors: `ArtefactError` above the tolerance.
        """
        largest = 0.0
        for size in self.self_test.sizes:
            arguments = {
                name: torch.from_numpy(value).to(getattr(torch, self.manifest["arguments"][name]["dtype"]))
                for name, value in self.self_test.arguments(list(self.manifest["arguments"]), size).items()
            }
            for name, value in self(**arguments).items():
                difference = self.self_test.difference(name, size, as_array(value))
                largest = max(largest, difference)
                if not difference <= self.manifest["tolerance"]:
                    raise ArtefactError(
                        f"{name} differs from what the program gave when it was saved, by {difference:.1e} of its norm in a "
                        f"batch of {size}, which is more than {self.manifest['tolerance']:.0e}"
                    )
        return largest

    def __repr__(self) -> str:
        return f"<{self.manifest['kind']} program of {self.manifest['title']}: {', '.join(self.manifest['arguments'])}>"
