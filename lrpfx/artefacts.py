"""Artefacts: lowered programs as files, and runners that load them.

A file carries the program, a manifest (what it is, what it takes and returns, and a hash of all the rest) and a self-test:
inputs with the results that the program had when it was saved. Loading needs torch and this module, not the model's code.
"""

import base64
import copy
import hashlib
import io
import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from .errors import ArtefactError, InputError, InputTypeError
from .lowering import argument_examples, facts_of
from .onnx_export import onnx_model

FORMAT = 3
_FOLDER = "lrpfx"
_MANIFEST, _SELF_TEST = f"{_FOLDER}/manifest.json", f"{_FOLDER}/self_test.npz"

#: Bytes of parameters from which on an .onnx file keeps them in a second one; a file of its own may have 2 GiB at most.
EXTERNAL_DATA_FROM = 3 * 2**29

#: Weights are laid out ahead of time. Values between layers are not: inductor mistakes the layout of a batch of one in 3-d
#: convolutions, and the relevance is wrong.
INDUCTOR = {"freezing": True, "layout_optimization": False}

Array = torch.Tensor | np.ndarray
SelfTest = dict[str, np.ndarray]
Function = Callable[..., Mapping[str, torch.Tensor]]


def save(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Write a lowered program to `path`: for torch if it ends in `.pt2`, for ONNX Runtime and its like if in `.onnx`.

    The file appears whole or not at all, and only after it was loaded and passed its self-test. Parameters of more than
    1.5 GiB go to a second file beside an `.onnx` one. Errors: `ArtefactError`; `LoweringError` for what ONNX cannot express.
    """
    path = _checked_path(path, (".pt2", ".onnx"))
    if path.suffix == ".onnx":
        return _write_onnx(program, path)
    plain = copy.copy(program)
    plain._example_inputs = None  # they would be pickled
    buffer = io.BytesIO()
    torch.export.save(plain, buffer)
    return _write_archive(program, buffer.getvalue(), path, "exported")


def package(program: ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Compile a lowered program with AOTInductor into `path`, which ends in `.pt2`: native code for machines like this one.

    Weights are laid out for these machines too, which takes up to twice their space in the file. It needs a C++ compiler, and
    may take minutes. The file appears whole or not at all, and only after it passed its self-test. Errors: `ArtefactError`.
    """
    path = _checked_path(path, (".pt2",))
    _facts(program)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "program.pt2"
        try:
            with torch.no_grad():  # where gradients are on, inductor silently does without freezing
                torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs=INDUCTOR)
        except Exception as error:
            raise ArtefactError(f"AOTInductor cannot compile the program: {type(error).__name__}: {error}") from error
        return _write_archive(program, target.read_bytes(), path, "compiled")


def _checked_path(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    path = Path(path)
    if path.suffix not in suffixes:
        raise ArtefactError(
            f"the file's suffix says what it is: {' or '.join(suffixes)}, not {path.suffix or 'none'!r} ({path})"
        )
    if not path.parent.is_dir():
        raise ArtefactError(f"there is no folder {path.parent}")
    return path


# --- writing ----------------------------------------------------------------------------------------------------------------


def _facts(program: ExportedProgram) -> dict[str, Any]:
    facts = facts_of(program)
    if facts is None:
        raise ArtefactError("the program was not made by lrpfx.lower, so that nothing is known of what it takes and returns")
    return facts


def _described(program: ExportedProgram, kind: str) -> tuple[dict[str, Any], bytes]:
    """The manifest without hashes, and the self-test."""
    facts = _facts(program)
    arguments = argument_examples(program)
    traced = len(next(iter(arguments.values())))
    batch = None if facts["dynamic_batch"] else traced
    run = program.module()
    arrays: dict[str, Any] = {}
    # compilers may take a batch of one for another memory format
    for size in (traced, 1 if traced > 1 else 2)[: 2 if facts["dynamic_batch"] else 1]:
        chosen = {name: value[torch.arange(size, device=value.device) % traced] for name, value in arguments.items()}
        results = run(*chosen.values())
        arrays.update({f"{size}.in.{name}": _to_numpy(value) for name, value in chosen.items()})
        arrays.update({f"{size}.out.{name}": _to_numpy(value) for name, value in results.items()})
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "torch": str(torch.__version__),
        **facts,
        "arguments": {name: _description(value, batch) for name, value in arguments.items()},
        "results": {name: _description(value, batch) for name, value in results.items()},
    }
    self_test = io.BytesIO()
    np.savez(self_test, **arrays)
    return manifest, self_test.getvalue()


def _description(value: torch.Tensor, batch: int | None) -> dict[str, Any]:
    """Shape, with None for any batch size, and dtype."""
    return {"shape": [batch, *value.shape[1:]] if value.ndim else [], "dtype": str(value.dtype).removeprefix("torch.")}


def _to_numpy(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    result: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    return result


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` for a file that is moved to `path` in one step when the context ends without an error."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _replace(path: Path, content: bytes) -> None:
    """Write a program's file, and put it in its place after it has passed its self-test."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
        load(temporary).verify()


# An archive: a zip file of torch's, with three more files in it.


def _write_archive(program: ExportedProgram, archive: bytes, path: Path, kind: str) -> Path:
    manifest, self_test = _described(program, kind)
    entries = _entries(archive)
    prefix = next(iter(entries)).partition("/")[0]
    added = {f"{prefix}/{_SELF_TEST}": self_test}
    text = json.dumps({**manifest, "hash": _hash({**entries, **added})}, indent=1).encode()
    added[f"{prefix}/{_MANIFEST}"] = text
    added[f"{prefix}/{_MANIFEST}.sha256"] = hashlib.sha256(text).hexdigest().encode()
    whole = io.BytesIO(archive)
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_STORED) as file:
        for name, content in added.items():
            file.writestr(name, content)
    _replace(path, whole.getvalue())
    return path


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


# An ONNX file: metadata of the model, the last of them the hash of all bytes before it.


def _write_onnx(program: ExportedProgram, path: Path) -> Path:
    manifest, self_test = _described(program, "onnx")
    model = onnx_model(program, list(manifest["arguments"]), list(manifest["results"]))
    before = set(path.parent.glob(f"{path.name}.*.data"))
    try:
        if sum(tensor.nbytes for tensor in program.state_dict.values()) > EXTERNAL_DATA_FROM:
            manifest["data"] = _move_parameters(model, path)
        metadata = {"lrpfx": json.dumps(manifest), "lrpfx_self_test": base64.b64encode(self_test).decode()}
        for key, value in metadata.items():
            entry = model.metadata_props.add()
            entry.key, entry.value = key, value
        body = model.SerializeToString(deterministic=True)
        _replace(path, body + _trailer(body))
    except BaseException:
        for other in set(path.parent.glob(f"{path.name}.*.data")) - before:
            other.unlink()
        raise
    for other in before:
        if other.name != manifest.get("data", {}).get("file"):
            other.unlink()  # of the file that was replaced
    return path


def _trailer(body: bytes) -> bytes:
    """One more entry of the metadata, as protobuf writes it, so that the whole is an ONNX model again."""
    key, value = b"lrpfx_sha256", hashlib.sha256(body).hexdigest().encode()
    entry = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([len(value)]) + value
    return b"\x72" + bytes([len(entry)]) + entry


def _move_parameters(model: Any, path: Path) -> dict[str, str]:
    """Move the parameters of `model` to a file beside `path`, named by its hash: what the manifest says of it."""
    from onnx import external_data_helper

    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
        external_data_helper.convert_model_to_external_data(model, location="data", size_threshold=1024)
        external_data_helper.write_external_data_tensors(model, folder)
        written = Path(folder) / "data"
        digest = _hash_of_file(written)
        name = f"{path.name}.{digest[:16]}.data"
        os.replace(written, path.parent / name)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    return {"file": name, "sha256": digest}


def _hash_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- loading ----------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> "Runner":
    """The runner of a file that `save` or `package` wrote.

    Nothing of the file is used before its hash was found right, and nothing is unpickled. The hash finds damage, not malice: a
    compiled program is native code. Errors: `ArtefactError` for a file that is damaged, truncated or no artefact of lrpfx.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix == ".onnx":
        return _load_onnx(path, content)
    return _load_archive(path, content)


def _load_archive(path: Path, archive: bytes) -> "Runner":
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
    manifest = _known_format(path, json.loads(text))
    if _hash(entries) != manifest["hash"]:
        raise ArtefactError(f"{path} is damaged: its content has another hash")
    pickled = sorted(filter(None, map(_pickled, entries, entries.values())))
    if pickled:
        raise ArtefactError(f"{path} holds pickled objects, which are not loaded: {', '.join(pickled)}")
    load_function = _compiled if manifest["kind"] == "compiled" else _exported
    try:
        function = load_function(archive)
    except Exception as error:
        raise ArtefactError(f"{path} cannot be loaded by torch {torch.__version__}: {type(error).__name__}: {error}") from error
    return Runner(function, manifest, _read_self_test(entries[found[_SELF_TEST]]))


def _known_format(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    if manifest["format"] != FORMAT:
        raise ArtefactError(f"{path} has format {manifest['format']}; this version of lrpfx reads format {FORMAT}")
    return manifest


def _read_self_test(content: bytes) -> SelfTest:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _pickled(name: str, content: bytes) -> str:
    """The name of a file which torch's loader would unpickle, or nothing."""
    leaf = name.rpartition("/")[2]
    if "/data/sample_inputs/" in name:
        return name if content else ""
    if "/data/weights/" not in name and "/data/constants/" not in name:
        return ""
    if leaf.endswith("_config.json"):
        return name if any(payload["use_pickle"] for payload in json.loads(content)["config"].values()) else ""
    return "" if leaf.startswith(("weight_", "tensor_")) and not leaf.endswith(".pt") else name


def _exported(archive: bytes) -> Function:
    function: Function = torch.export.load(io.BytesIO(archive)).module()
    return function


def _compiled(archive: bytes) -> Function:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pt2"
        path.write_bytes(archive)
        loaded: Function = torch._inductor.aoti_load_package(str(path))
        return loaded


def _load_onnx(path: Path, content: bytes) -> "Runner":
    try:
        import onnxruntime
    except ImportError as error:
        raise ArtefactError(f"ONNX needs packages that are not installed: pip install 'lrpfx[onnx]' ({error})") from error
    length = len(_trailer(b""))
    body, trailer = content[:-length], content[-length:]
    if b"lrpfx_sha256" not in trailer:
        raise ArtefactError(f"{path} is damaged, or was not written by lrpfx: it has no hash")
    if trailer != _trailer(body):
        raise ArtefactError(f"{path} is damaged: its content has another hash")
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ArtefactError(
            f"{path} cannot be loaded by onnxruntime {onnxruntime.__version__}, or a file that it needs is not there: {error}"
        ) from error
    metadata = session.get_modelmeta().custom_metadata_map
    manifest = _known_format(path, json.loads(metadata["lrpfx"]))
    if "data" in manifest and _hash_of_file(path.parent / manifest["data"]["file"]) != manifest["data"]["sha256"]:
        raise ArtefactError(f"{path} is damaged: {manifest['data']['file']} has another hash")
    names = list(manifest["results"])

    def run(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = dict(zip(manifest["arguments"], map(_to_numpy, tensors), strict=True))
        return dict(zip(names, map(torch.from_numpy, session.run(names, arrays)), strict=True))

    return Runner(run, manifest, _read_self_test(base64.b64decode(metadata["lrpfx_self_test"])))


class Runner:
    """A loaded program: `runner(input, target)` returns a dict of results, arrays for arrays and tensors for tensors.

    Inputs are checked before they run: compiled programs give wrong results for another memory format, without an error.
    """

    def __init__(self, function: Function, manifest: dict[str, Any], self_test: SelfTest) -> None:
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
        if self.manifest["target"] == "index":
            self._check_classes(tensors[-1])
        try:
            with torch.no_grad():
                results = self.function(*tensors)
        except Exception as error:  # such as an index that an embedding does not have
            raise InputError(f"the program cannot run on these inputs: {type(error).__name__}: {error}") from error
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
        sizes = sorted({int(key.partition(".")[0]) for key in self.self_test}, reverse=True)
        largest = 0.0
        for size in sizes:
            arguments = {}
            for name, described in self.manifest["arguments"].items():
                value = torch.from_numpy(self.self_test[f"{size}.in.{name}"])
                arguments[name] = value.to(getattr(torch, described["dtype"]))
            for name, value in self(**arguments).items():
                scale = self.self_test[f"{sizes[0]}.out.{'output' if name == 'balance' else name}"]  # a rest of two sums
                change = np.linalg.norm(value.double().numpy() - self.self_test[f"{size}.out.{name}"])
                difference = float(change / (np.linalg.norm(scale) or 1.0))
                largest = max(largest, difference)
                if not difference <= self.manifest["tolerance"]:
                    raise ArtefactError(
                        f"{name} differs from what the program gave when it was saved, by {difference:.1e} of its norm in a "
                        f"batch of {size}, which is more than {self.manifest['tolerance']:.0e}"
                    )
        return largest

    def __repr__(self) -> str:
        return f"<{self.manifest['kind']} program of {self.manifest['title']}: {', '.join(self.manifest['arguments'])}>"
