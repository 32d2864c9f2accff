"""Archives: .pt2 files as zip files of torch's, and everything that one may hold, checked before torch reads any of it.

torch's own loader does what a file says: it unpickles, evaluates expressions and conditions that are written in it, and imports
what is named in it. Here each entry is known by name and kind, and each text in a program by its place; all else is refused.
"""

import ast
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from lrpfx.operators.table import aten_names
from lrpfx.support.torch_internals import OpOverload, load_archive

Entries = dict[str, bytes]  # name, without the folder that all entries of an archive are in -> content

FOLDER = "lrpfx"
MANIFEST, MANIFEST_HASH, SELF_TEST = f"{FOLDER}/manifest.json", f"{FOLDER}/manifest.json.sha256", f"{FOLDER}/self_test.npz"
_TOP = "program"
_MODEL, _SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_ORIGIN = "lrpfx"  # the note of a node that says which operation it is of
_FORMAT, _VERSION = "archive_format", "archive_version"

_ALWAYS = ("archive_format|archive_version|byteorder", r"\.data/(version|serialization_id)", r"lrpfx/self_test\.npz")
#: kind -> what its entries are called
_NAMES = {
    "exported": re.compile(
        "|".join([*_ALWAYS, *map(re.escape, (_MODEL, _SAMPLES, *_CONFIGS)), r"data/(weights|constants)/\w+"])
    ),
    "compiled": re.compile("|".join([*_ALWAYS, r"data/aotinductor/model/\w+(\.\w+)+"])),
}
_NEEDED = {"exported": (_FORMAT, _VERSION, _MODEL, *_CONFIGS), "compiled": (_FORMAT, _VERSION)}


class RefusedError(ValueError):
    """What is wrong with a file."""


# --- zip files -----------------------------------------------------------------------------------------------------------


def read_zip(content: bytes) -> Entries:
    """The files in a zip file as torch and numpy write it: each name once, nothing compressed, their checksums verified.

    No entry is larger than the file, so that a small file cannot ask for much memory.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        names = Counter(info.orig_filename for info in infos)
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise RefusedError(f"it has {len(twice)} names of entries twice: {', '.join(twice[:3])}")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise RefusedError(f"{info.filename} is compressed, which lrpfx does not write")
        if sum(info.file_size for info in infos) > len(content):
            raise RefusedError("its entries are larger than the file")
        return {info.orig_filename: archive.read(info) for info in infos}


def read_archive(content: bytes) -> Entries:
    """The entries of an archive."""
    files = read_zip(content)
    folders = {name.partition("/")[0] for name in files}
    if len(folders) != 1:
        raise RefusedError("it is damaged, or was not written by lrpfx: its entries are not in one folder")
    return {name.partition("/")[2]: value for name, value in files.items()}


def archive_of(entries: Mapping[str, bytes]) -> bytes:
    """An archive of these entries: what torch reads is what was checked, whatever else a file may hold."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(f"{_TOP}/{name}"), content)  # of no date: equal entries, equal archives
    return whole.getvalue()


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; each is as large as its entry."""
    arrays = {}
    for name, data in read_zip(content).items():
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise RefusedError(f"the array {name} has an unknown form")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        rest = data[file.tell() :]
        size = int(np.prod([1, *shape], dtype=object))
        if dtype.hasobject or fortran or size * dtype.itemsize != len(rest):
            raise RefusedError(f"the array {name} is not as large as it says")
        arrays[name.removesuffix(".npy")] = np.frombuffer(rest, dtype).reshape(shape).copy()
    return arrays


# --- programs ------------------------------------------------------------------------------------------------------------


def plain_entries(content: bytes) -> Entries:
    """The entries of an archive that torch.export.save wrote, without what a program does not need.

    Those are stack traces, with paths of the machine that it was made on, and conditions on sizes, which runners check.
    """
    entries = read_archive(content)
    program = json.loads(entries[_MODEL])
    program["guards_code"] = []
    for node in program["graph_module"]["graph"]["nodes"]:
        origin = json.loads(node["metadata"].get("custom", "{}")).get(_ORIGIN)
        node["metadata"] = {} if origin is None else {"custom": json.dumps({_ORIGIN: origin})}
    entries[_MODEL] = json.dumps(program).encode()
    return entries


def check_entries(entries: Mapping[str, bytes], kind: str) -> None:
    """`RefusedError` unless each entry is one that an archive of this kind has, and holds what it should."""
    if kind not in _NAMES:
        raise RefusedError(f"it is of the kind {kind!r}, which is not known")
    strange = [name for name in entries if not _NAMES[kind].fullmatch(name)]
    if strange:
        raise RefusedError(f"it holds {', '.join(map(repr, strange[:3]))}, which does not belong in it")
    missing = [name for name in _NEEDED[kind] if name not in entries]
    if missing or entries[_FORMAT] != b"pt2" or entries[_VERSION] != b"0":
        raise RefusedError(f"it is no archive of torch's present form{f': it has no {missing[0]}' if missing else ''}")
    if kind == "exported":
        if entries.get(_SAMPLES):
            raise RefusedError("it holds pickled inputs")
        for config in _CONFIGS:
            _check_config(entries, config)
        _check_program(entries[_MODEL])


def program_of(entries: Mapping[str, bytes]) -> ExportedProgram:
    """The program of an archive that was checked. torch.export.load would go on with an older form, which is pickled."""
    program: ExportedProgram = load_archive(io.BytesIO(archive_of(entries))).exported_programs["model"]
    return program


def _check_config(entries: Mapping[str, bytes], name: str) -> None:
    """What a list of tensors says of each."""
    folder = name.rpartition("/")[0]
    listed = {name}
    for tensor, payload in json.loads(entries[name])["config"].items():
        _check_texts(payload, "")
        if payload["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
            raise RefusedError(f"{tensor} is pickled")
        listed.add(f"{folder}/{payload['path_name']}")
        if f"{folder}/{payload['path_name']}" not in entries:
            raise RefusedError(f"{payload['path_name']} is missing")
    unknown = [entry for entry in entries if entry.startswith(f"{folder}/") and entry not in listed]
    if unknown:
        raise RefusedError(f"it holds {unknown[0]}, which nothing in it refers to")


_TEXT = re.compile(r"[\w.:+/@ -]*")  # of paths in a model, devices, modes such as "bicubic"
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)(\.\w+){2}|torch\.sym_(float|int|ite|max|min|not|sqrt)|math\.(trunc|ceil|floor)"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|neg|pow|pos|eq|ne|lt|le|gt|ge|and_|or_|xor|not_|getitem)"
)
#: Operators of programs that are neither torch's core ones nor in the operator table: those that torch takes others apart into.
_OPERATORS = frozenset(
    {"_unsafe_view", "new_full", "new_ones", "new_zeros", "new_empty", "ones_like", "zeros_like", "full_like"}
)
_OPERATORS |= {"empty_like", "zeros", "ones", "full", "arange", "linspace", "scalar_tensor", "linalg_vector_norm", "unfold"}
_OPERATORS |= {"_prelu_kernel", "log_sigmoid_forward", "rrelu_with_noise_functional", "new_empty_strided", "_unsafe_index"}
_OPERATORS |= {"_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"}
_BACKWARDS = ("_backward", "_backward_data")
_NAMES_IN_EXPRESSIONS = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|true|false|oo|int_oo|FloorDiv|ModularIndexing|Where|PythonMod"
    "|CleanDiv|CeilToInt|FloorToInt|CeilDiv|FloatTrueDiv|IntTrueDiv|TruncToInt|RoundToInt|ToFloat|Identity|Equality|Unequality"
    r"|LessThan|StrictLessThan|GreaterThan|StrictGreaterThan|And|Or|Not|[suz]+\d+"
)
_LONGEST_EXPRESSION, _MOST_NODES = 1000, 100
_EXPRESSIONS = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.UnaryOp, ast.USub, ast.BinOp)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_CONTAINERS = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})
_CONTAINERS |= {"torch.fx.immutable_collections.immutable_dict", "torch.fx.immutable_collections.immutable_list"}


def _check_program(content: bytes) -> None:
    program = json.loads(content)
    if program["guards_code"]:
        raise RefusedError("its program has conditions written in Python")
    _check_texts(program, "")
    for name in program["opset_version"]:
        if name not in ("aten", "prims", "torchvision"):
            raise RefusedError(f"its program uses operators of {name!r}")


def _check_texts(value: Any, key: str) -> None:
    """All texts of a program, by the key that each stands under."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_text(name, "")
            if name == "metadata":
                _check_metadata(inner)
            else:
                _check_texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_texts(inner, key)
    elif isinstance(value, str):
        _check_text(value, key)


def _check_text(text: str, key: str) -> None:
    if not _KINDS_OF_TEXT.get(key, _TEXT.fullmatch)(text):
        raise RefusedError(f"its program has {text[:60]!r}{f' as {key}' if key else ''}, which does not belong there")


def _check_metadata(value: Any) -> None:
    """Where a node comes from, as `lower` notes it."""
    if not isinstance(value, dict) or not set(value) <= {"custom"}:
        raise RefusedError("its program has notes that lrpfx does not make")
    notes = json.loads(value.get("custom", "{}"))
    if not set(notes) <= {_ORIGIN} or not all(isinstance(note, str) for note in notes.values()):
        raise RefusedError("its program has notes that lrpfx does not make")


def _is_operator(text: str) -> bool:
    """Whether a node may call it: a pure function of tensors that checks its arguments, as programs of `lower` have them."""
    if not _OPERATOR.fullmatch(text):
        return False
    if not text.startswith("torch.ops."):
        return True
    namespace, name, overload = text.split(".")[2:]
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable:
        return False
    known = torch.Tag.core in found.tags or torch.Tag.pointwise in found.tags or name in aten_names()
    return (known or name in _OPERATORS or name.endswith(_BACKWARDS)) and _has_tensor(found)


def _has_tensor(operator: OpOverload) -> bool:
    """Whether it takes or returns a tensor: others are those of TorchScript, and settings of the process."""
    values = (*operator._schema.arguments, *operator._schema.returns)
    return any("Tensor" in str(value.type) for value in values)


def _is_expression(text: str) -> bool:
    """Whether it is short arithmetic of sizes, which torch has sympy evaluate as Python: larger ones could take years."""
    if len(text) > _LONGEST_EXPRESSION:
        return False
    nodes = list(ast.walk(ast.parse(text, mode="eval")))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if len(nodes) > _MOST_NODES or not all(isinstance(call.func, ast.Name) for call in calls):
        return False
    names = {id(call.args[0]) for call in calls if ast.unparse(call.func) == "Symbol" and call.args}
    for node in nodes:
        if not isinstance(node, (*_EXPRESSIONS, *_ARITHMETIC)):
            return False
        if isinstance(node, ast.Name) and not _NAMES_IN_EXPRESSIONS.fullmatch(node.id):
            return False
        if isinstance(node, ast.Constant):
            pattern = r"'\w{1,40}'" if id(node) in names else r"True|False|-?[\d.e+-]{1,20}"
            if not re.fullmatch(pattern, repr(node.value)):
                return False
    powers = [call for call in calls if ast.unparse(call.func) == "Pow"]
    return all(
        len(power.args) == 2
        and re.fullmatch(r"(Integer\()?-?\d\)?", ast.unparse(power.args[1]))
        and "Pow" not in ast.unparse(power.args[0])  # a power of powers has no end
        for power in powers
    )


def _is_structure(text: str) -> bool:
    """Whether it says which containers the arguments and results are in."""

    def types_of(tree: Any) -> Iterator[Any]:
        yield tree["type"], tree["context"]
        for child in tree["children_spec"]:
            yield from types_of(child)

    version, tree = json.loads(text)
    return version == 1 and all(
        name in _CONTAINERS and (context is None or re.fullmatch(r'null|\[("[\w.]+"(, )?)*\]', context))
        for name, context in types_of(tree)
    )


#: key -> what is true of the texts that stand under it; of all others, that they are a `_TEXT`
_KINDS_OF_TEXT: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _IDENTIFIER.fullmatch),
    "target": _is_operator,
    "expr_str": _is_expression,
    "in_spec": _is_structure,
    "out_spec": _is_structure,
}
