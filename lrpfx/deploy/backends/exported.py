"""Programs for torch: .pt2 files as torch.export writes them.

torch's own loader trusts a file: it unpickles objects, evaluates expressions and conditions, and imports modules that the file
names. This loader checks the name and kind of each entry, and each string in a program by its key, and refuses all others.
"""

import ast
import copy
import io
import json
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lrpfx.deploy.archive import (
    MANIFEST,
    MANIFEST_HASH,
    SELF_TEST,
    check_entries,
    read_archive,
    read_signed_archive,
    signed_archive,
)
from lrpfx.deploy.backends.backend import Backend, Replace, Stored, operators_missing
from lrpfx.deploy.manifest import manifest_of
from lrpfx.deploy.program_reader import CONFIGS, MODEL, read_program
from lrpfx.deploy.runner import Function
from lrpfx.deploy.self_test import SelfTest
from lrpfx.deploy.torch_operators import bounded, check_calls, guarded, is_allowed
from lrpfx.errors import LoweringError
from lrpfx.ir.node import attribute_of
from lrpfx.runtime.propagation import ORIGIN
from lrpfx.support.stored_arrays import Entries, RefusedError
from lrpfx.support.torch_internals import OpOverload, pytree, serialize_error

_FOLDING = threading.Lock()

_SAMPLES = "data/sample_inputs/model.pt"


class Exported(Backend):
    """A program of ATen operators, for torch on any machine."""

    kind = "exported"
    suffix = ".pt2"

    def check_requirements(self) -> None:
        """Nothing but torch writes these files."""

    def check_program(self, program: ExportedProgram) -> None:
        lacking = {
            node: node.target
            for node in program.graph.nodes
            if isinstance(node.target, OpOverload) and not is_allowed(node.target)
        }
        if lacking:
            raise operators_missing(
                "the program calls operators that .pt2 files do not contain, since nobody has shown that they check their "
                "arguments",
                lacking,
                "use an .onnx file or lrpfx.package",
            )

    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        plain = copy.copy(program)
        plain._example_inputs = None  # they would be pickled
        buffer = io.BytesIO()
        try:
            torch.export.save(plain, buffer)
        except serialize_error() as error:
            raise LoweringError(
                "torch.export cannot write the program, for example because it rounds a size that may vary; lower it with "
                "dynamic_batch=False, for the sizes of the example"
            ) from error
        replace(signed_archive(plain_entries(buffer.getvalue()), manifest, self_test))

    def read(self, path: Path, content: bytes) -> Stored:
        text, self_test, entries = read_signed_archive(content)
        return Stored(manifest_of(text), self_test, entries)

    def hashed_anew(self, content: bytes, changes: Mapping[str, Any]) -> bytes:
        entries = read_archive(content)
        kept = {name: value for name, value in entries.items() if name not in (MANIFEST, MANIFEST_HASH, SELF_TEST)}
        return signed_archive(kept, {**json.loads(entries[MANIFEST]), **changes}, entries[SELF_TEST])

    def check(self, path: Path, stored: Stored, test: SelfTest) -> None:
        entries = stored.content
        check_entries(
            entries,
            "|".join([*map(re.escape, (MODEL, _SAMPLES, *CONFIGS)), r"data/(weights|constants)/\w+"]),
            (MODEL, *CONFIGS),
        )
        if entries.get(_SAMPLES):
            raise RefusedError("it holds pickled inputs")
        for config in CONFIGS:
            _check_config(entries, config)
        _check_program(entries[MODEL])

    def load(self, path: Path, stored: Stored) -> Function:
        program, names = read_program(stored.content)
        check_calls(program.graph)
        for node in program.graph.nodes:
            if isinstance(node.target, OpOverload):
                node.target = guarded(node.target)
            elif node.op == "call_function" and node.target.__module__ == "_operator" and node.target is not operator.getitem:
                node.target = bounded(node.target)
        program.recompile()
        return _Program(program, names)


class _Program:
    """A program that computes what depends only on its tensors in its first call: loading computes nothing."""

    def __init__(self, module: fx.GraphModule, names: Sequence[str]) -> None:
        """`module`: from tensors to a tuple of results with these names."""
        self.module = module
        self.names = names
        self.is_folded = False

    def __call__(self, *tensors: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not self.is_folded:
            with _FOLDING:
                if not self.is_folded:
                    fold_constants(self.module)
                    self.is_folded = True
        return dict(zip(self.names, self.module(*tensors), strict=True))


def plain_entries(content: bytes) -> Entries:
    """The entries of an archive that torch.export.save wrote, without parts that a program does not need.

    These are stack traces, which contain paths of this machine, and conditions on sizes, which runners check.
    """
    entries = read_archive(content)
    program = json.loads(entries[MODEL])
    program["guards_code"] = []
    for node in program["graph_module"]["graph"]["nodes"]:
        origin = json.loads(node["metadata"].get("custom", "{}")).get(ORIGIN)
        node["metadata"] = {} if origin is None else {"custom": json.dumps({ORIGIN: origin})}
    entries[MODEL] = json.dumps(program).encode()
    return entries


def _check_config(entries: Mapping[str, bytes], name: str) -> None:
    """Check the list of tensors in the entry `name`. Raises `RefusedError`."""
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
        raise RefusedError(f"it holds {unknown[0]}, but does not refer to it")


_TEXT = re.compile(r"[\w.:+/@ -]*")  # for paths in a model, devices, modes such as "bicubic"
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_OPERATOR = re.compile(
    r"torch\.ops\.aten(\.\w+){2}|torch\.sym_(float|int|ite|max|min|not|sqrt)|math\.(trunc|ceil|floor)"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|neg|pow|pos|eq|ne|lt|le|gt|ge|and_|or_|xor|not_|getitem)"
)
_NAMES_IN_EXPRESSIONS = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|true|false|oo|int_oo|FloorDiv|ModularIndexing|Where|PythonMod"
    "|CleanDiv|CeilToInt|FloorToInt|CeilDiv|FloatTrueDiv|IntTrueDiv|TruncToInt|RoundToInt|ToFloat|FloatPow|Identity|Equality|Unequality"
    r"|LessThan|StrictLessThan|GreaterThan|StrictGreaterThan|And|Or|Not|[suz]+\d+"
)
_NUMBER = r"True|False|-?[\d.e+-]{1,20}"
_CONSTANTS = {"Symbol": r"'\w{1,40}'", "Float": r"'-?\d{1,20}(\.\d{1,20})?(e[+-]?\d{1,3})?'"}  # the first arguments of calls
_EXPONENT = re.compile(r"(Integer\()?-?\d\)?|Float\('-?\d(\.\d{1,20})?', precision=53\)")
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
    """Check all strings of a program by their keys. Raises `RefusedError`."""
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
    """Check the metadata of a node: it may only hold the origin that `lower` records. Raises `RefusedError`."""
    if not isinstance(value, dict) or not set(value) <= {"custom"}:
        raise RefusedError("its program has notes that lrpfx does not make")
    notes = json.loads(value.get("custom", "{}"))
    if not set(notes) <= {ORIGIN} or not all(isinstance(note, str) for note in notes.values()):
        raise RefusedError("its program has notes that lrpfx does not make")


def _is_operator(text: str) -> bool:
    """Whether `text` names an operator that a node may call."""
    if not _OPERATOR.fullmatch(text):
        return False
    if not text.startswith("torch.ops."):
        return True
    name, overload = text.split(".")[3:]
    found = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return isinstance(found, OpOverload) and is_allowed(found)


def _is_expression(text: str) -> bool:
    """Whether `text` is short arithmetic of sizes. torch evaluates it as Python with sympy; longer ones could take years."""
    if len(text) > _LONGEST_EXPRESSION:
        return False
    nodes = list(ast.walk(ast.parse(text, mode="eval")))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if len(nodes) > _MOST_NODES or not all(isinstance(call.func, ast.Name) for call in calls):
        return False
    texts = {id(call.args[0]): ast.unparse(call.func) for call in calls if call.args}
    for node in nodes:
        if not isinstance(node, (*_EXPRESSIONS, *_ARITHMETIC)):
            return False
        if isinstance(node, ast.Name) and not _NAMES_IN_EXPRESSIONS.fullmatch(node.id):
            return False
        pattern = _CONSTANTS.get(texts.get(id(node), ""), _NUMBER)
        if isinstance(node, ast.Constant) and not re.fullmatch(pattern, repr(node.value)):
            return False
    powers = [call for call in calls if ast.unparse(call.func) in ("Pow", "FloatPow")]
    return all(
        len(power.args) == 2
        and _EXPONENT.fullmatch(ast.unparse(power.args[1]))
        and "Pow" not in ast.unparse(power.args[0])  # nested powers grow without bound
        for power in powers
    )


def _is_structure(text: str) -> bool:
    """Whether `text` describes the containers of arguments and results."""

    def types_of(tree: Any) -> Iterator[Any]:
        yield tree["type"], tree["context"]
        for child in tree["children_spec"]:
            yield from types_of(child)

    version, tree = json.loads(text)
    return version == 1 and all(
        name in _CONTAINERS and (context is None or re.fullmatch(r'null|\[("[\w.]+"(, )?)*\]', context))
        for name, context in types_of(tree)
    )


#: key -> the test for strings with this key; all others must match `_TEXT`
_KINDS_OF_TEXT: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _IDENTIFIER.fullmatch),
    "target": _is_operator,
    "expr_str": _is_expression,
    "in_spec": _is_structure,
    "out_spec": _is_structure,
}


# --- constants ---


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 8


def _without_values(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


#: `fold_constants` computes at most this many times the size of the program's tensors, plus this many bytes.
MOST_FOLDED = 32, 2**28
#: The largest single result in bytes, unless it is at most twice as large as its largest operand.
MOST_MADE = 2**26


def fold_constants(module: fx.GraphModule) -> None:
    """Compute values that depend only on the tensors of `module` once. `derive_weights` relies on this.

    Sizes are limited: a file may hold any program, and a small file must not use much memory.
    """
    values: dict[fx.Node, Any] = {node: attribute_of(node, module) for node in module.graph.find_nodes(op="get_attr")}
    left = MOST_FOLDED[0] * sum(map(_bytes_of, values.values())) + MOST_FOLDED[1]
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op != "call_function" or not node.all_input_nodes or not values.keys() >= set(node.all_input_nodes):
                continue
            shapes = fx.map_arg((node.args, node.kwargs), lambda one: pytree.tree_map(_without_values, values[one]))
            try:
                size = sum(map(_bytes_of, pytree.tree_leaves(node.target(*shapes[0], **shapes[1]))))
            except Exception:  # torch cannot run the operator without values: each call runs it
                continue
            left -= size
            largest = max(_bytes_of(leaf) for one in node.all_input_nodes for leaf in pytree.tree_leaves(values[one]))
            if size <= max(2 * largest, MOST_MADE) and left >= 0:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if node.op == "call_function" and isinstance(value, torch.Tensor) and not values.keys() >= set(node.users):
            name = f"constant_{node.name}"
            module.register_buffer(name, value, persistent=False)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.create_node("get_attr", name))
    for node in reversed(values):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
