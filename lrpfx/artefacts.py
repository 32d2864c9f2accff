"""Artefacts: lowered programs as files, and runners that load them.

A file carries the program, a manifest (what it is, what it takes and returns, and a hash of all the rest) and a self-test:
inputs with the results that the program had when it was saved. Loading needs torch and this module, not the model's code.
"""

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from .errors import ArtefactError, InputError, InputTypeError
from .lowering import argument_examples, facts_of

FORMAT = 1
_FOLDER = "lrpfx"
_MANIFEST, _SELF_TEST = f"{_FOLDER}/manifest.json", f"{_FOLDER}/self_test.npz"

Array = torch.Tensor | np.ndarray


def save(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Write a lowered program to `path`, which ends in `.pt2`: portable, to be loaded wherever torch is.

    The file appears whole or not at all. Errors: `ArtefactError`.
    """
    path = _checked_path(path)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return _write(program, buffer.getvalue(), path, "exported")


def package(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Compile a lowered program with AOTInductor into `path`, which ends in `.pt2`: native code for machines like this one.

    It needs a C++ compiler, and may take minutes. The file appears whole or not at all. Errors: `ArtefactError`.
    """
    path = _checked_path(path)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "program.pt2"
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(target))
        except Exception as error:
            raise ArtefactError(f"AOTInductor cannot compile the program: {type(error).__name__}: {error}") from error
        return _write(program, target.read_bytes(), path, "compiled")


def _checked_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix != ".pt2":
        raise ArtefactError(f"the file's suffix says what it is: .pt2, not {path.suffix or 'none'!r} ({path})")
    if not path.parent.is_dir():
        raise ArtefactError(f"there is no folder {path.parent}")
    return path


def _write(program: ExportedProgram, archive: bytes, path: Path, kind: str) -> Path:
    facts = facts_of(program)
    if facts is None:
        raise ArtefactError("the program was not made by lrpfx.lower, so that nothing is known of what it takes and returns")
    arguments = argument_examples(program)
    results = program.module()(*arguments.values())
    entries = _entries(archive)
    self_test = io.BytesIO()
    arrays: dict[str, Any] = {f"in.{name}": _to_numpy(value) for name, value in arguments.items()}
    arrays.update({f"out.{name}": _to_numpy(value) for name, value in results.items()})
    np.savez(self_test, **arrays)
    prefix = next(iter(entries)).partition("/")[0]
    added = {f"{prefix}/{_SELF_TEST}": self_test.getvalue()}
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "torch": str(torch.__version__),
        **facts,
        "arguments": {name: _describe(value) for name, value in arguments.items()},
        "results": {name: _describe(value) for name, value in results.items()},
        "hash": _hash({**entries, **added}),
    }
    text = json.dumps(manifest, indent=1).encode()
    manifest_entry = {f"{prefix}/{_MANIFEST}": text, f"{prefix}/{_MANIFEST}.sha256": hashlib.sha256(text).hexdigest().encode()}
    whole = io.BytesIO(archive)
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_STORED) as file:
        for name, content in {**added, **manifest_entry}.items():
            file.writestr(name, content)
    _replace(path, whole.getvalue())
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write a file beside `path` and put it in its place in one step."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _describe(value: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _to_numpy(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    result: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    return result


def _entries(archive: bytes) -> dict[str, bytes]:
    """All files of an archive, their checksums verified."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def _hash(entries: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(entries):
        total.update(f"{name}\n{len(entries[name])}\n".encode())
        total.update(entries[name])
    return total.hexdigest()


def load(path: str | os.PathLike[str]) -> "Runner":
    """The runner of a file that `save` or `package` wrote.

    Nothing of the file is used before its hash was found right. Errors: `ArtefactError` for a file that is damaged, truncated
    or no artefact of lrpfx.
    """
    path = Path(path)
    try:
        archive = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries = _entries(archive)
    except Exception as error:
        raise ArtefactError(f"{path} is damaged, or no archive at all: {error}") from error
    found = {name.partition("/")[2]: name for name in entries}
    if _MANIFEST not in found or f"{_MANIFEST}.sha256" not in found or _SELF_TEST not in found:
        raise ArtefactError(f"{path} is damaged, or was not written by lrpfx: it has no manifest")
    text = entries.pop(found[_MANIFEST])
    if hashlib.sha256(text).hexdigest().encode() != entries.pop(found[f"{_MANIFEST}.sha256"]):
        raise ArtefactError(f"{path} is damaged: its manifest has another hash")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ArtefactError(f"{path} has format {manifest['format']}; this version of lrpfx reads format {FORMAT}")
    if _hash(entries) != manifest["hash"]:
        raise ArtefactError(f"{path} is damaged: its content has another hash")
    with np.load(io.BytesIO(entries[found[_SELF_TEST]]), allow_pickle=False) as file:
        self_test = {name: file[name] for name in file.files}
    try:
        function = _compiled(archive) if manifest["kind"] == "compiled" else _exported(archive)
    except Exception as error:
        raise ArtefactError(f"{path} cannot be loaded by torch {torch.__version__}: {type(error).__name__}: {error}") from error
    return Runner(function, manifest, self_test)


def _exported(archive: bytes) -> Callable[..., Any]:
    return torch.export.load(io.BytesIO(archive)).module()


def _compiled(archive: bytes) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pt2"
        path.write_bytes(archive)
        loaded: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
        return loaded


class Runner:
    """A loaded program: `runner(input, target)` returns a dict of results, arrays for arrays and tensors for tensors.

    Inputs are checked before they run: compiled programs give wrong results for another memory format, without an error.
    """

    def __init__(self, function: Callable[..., Any], manifest: dict[str, Any], self_test: dict[str, np.ndarray]) -> None:
        self.function = function
        self.manifest = manifest
        self.self_test = self_test

    def __call__(self, *args: Array, **keywords: Array) -> dict[str, Any]:
        names = list(self.manifest["arguments"])
        if len(args) > len(names):
            raise InputError(f"the program takes {', '.join(names)}, not {len(args)} arguments")
        given = {**dict(zip(names, args, strict=False)), **keywords}
        missing = [name for name in names if name not in given]
        unknown = [name for name in given if name not in names]
        if missing or unknown:
            raise InputError(
                f"the program takes {', '.join(names)}; missing: {missing or 'none'}, unknown: {unknown or 'none'}"
            )
        tensors = [self._checked(name, given[name]) for name in names]
        if len({len(tensor) for tensor in tensors}) > 1:
            raise InputError(
                f"the batch sizes differ: {', '.join(f'{n} {len(t)}' for n, t in zip(names, tensors, strict=True))}"
            )
        with torch.no_grad():
            results: dict[str, torch.Tensor] = self.function(*tensors)
        if any(isinstance(value, np.ndarray) for value in given.values()):
            return {name: _to_numpy(value) for name, value in results.items()}
        return dict(results)

    def _checked(self, name: str, value: Array) -> torch.Tensor:
        """The tensor that the program takes, contiguous."""
        wanted = self.manifest["arguments"][name]
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            raise InputTypeError(f"{name} is a {type(value).__name__}, not a tensor or an array")
        tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value.detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != wanted["dtype"]:
            raise InputTypeError(f"{name} has dtype {dtype}, but the program takes {wanted['dtype']}")
        shape = list(tensor.shape)
        sizes = wanted["shape"] if not self.manifest["dynamic_batch"] else [None, *wanted["shape"][1:]]
        if len(shape) != len(sizes) or any(want not in (None, have) for have, want in zip(shape, sizes, strict=True)):
            shown = "×".join("batch" if size is None else str(size) for size in sizes)
            raise InputError(f"{name} has shape {'×'.join(map(str, shape))}, but the program takes {shown}")
        if not len(tensor):
            raise InputError(f"{name} is an empty batch")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"{name} has values that are not finite")
        return tensor.contiguous()

    def verify(self) -> float:
        """Run the self-test: the largest difference of a result, relative to its norm. `ArtefactError` above the tolerance."""
        arguments = {}
        for name, described in self.manifest["arguments"].items():
            arguments[name] = torch.from_numpy(self.self_test[f"in.{name}"]).to(getattr(torch, described["dtype"]))
        largest = 0.0
        for name, value in self(**arguments).items():
            expected = self.self_test[f"out.{name}"]
            scale = self.self_test["out.output"] if name == "balance" else expected  # a balance is the rest of two sums
            difference = float(np.linalg.norm(_to_numpy(value.double()) - expected) / (np.linalg.norm(scale) or 1.0))
            largest = max(largest, difference)
            if not difference <= self.manifest["tolerance"]:
                raise ArtefactError(
                    f"{name} differs from what the program gave when it was saved, by {difference:.1e} of its norm, "
                    f"which is more than {self.manifest['tolerance']:.0e}"
                )
        return largest

    def __repr__(self) -> str:
        return f"<{self.manifest['kind']} program of {self.manifest['title']}: {', '.join(self.manifest['arguments'])}>"
