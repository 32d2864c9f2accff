"""The Open Inference Protocol, version 2: bodies of requests as tensors, and results as bodies of answers.

Tensors are JSON or, by the protocol's extension for binary tensors, bytes behind the JSON.
"""

import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch

from lrpfx.errors import InputError, nearest
from lrpfx.serve.programs import DATATYPES, VERSION, ServedProgram, Tensors
from lrpfx.serve.refusals import invalid
from lrpfx.support.tensors import as_array

#: The header with the length of the JSON in a body that has bytes behind it.
LENGTH_OF_JSON = "inference-header-content-length"

_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_MOST_DIMENSIONS = 16
_MOST_ENTRIES = 2**48  # with sizes of 0 taken as 1: NumPy refuses 2**63 bytes even for an array that is empty
#: Parameters that clients send without asking for anything: the one of MLServer.
_IGNORED = frozenset({"content_type"})


@dataclass(frozen=True)
class InferenceRequest:
    """The arguments of a request, checked, and the results that it asks for, each with whether it is binary."""

    arguments: Tensors
    results: Mapping[str, bool]
    id: str | None


def parsed(program: ServedProgram, body: bytes, length_of_json: str | None) -> InferenceRequest:
    """The request in a body. `length_of_json`: the value of the header, if there is one. Errors: `InputError`."""
    text, data = body, memoryview(b"")
    if length_of_json is not None:
        length = number_in(length_of_json)
        if length is None or length > len(body):
            raise invalid("Inference-Header-Content-Length is the number of bytes of JSON at the beginning of the body")
        text, data = body[:length], memoryview(body)[length:]
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise invalid("the body is not a JSON object with the key inputs")
    _check_keys("the request", request, {"inputs"}, {"id", "outputs", "parameters"})
    identity = request.get("id")
    if identity is not None and not isinstance(identity, str):
        raise invalid("the id of a request is a string")
    parameters = _parameters("the request", request, {"binary_data_output"})
    return InferenceRequest(
        program.checked(_arguments(program, request["inputs"], data)),
        _results(program, request.get("outputs"), _flag("binary_data_output", parameters)),
        identity,
    )


def number_in(header: str) -> int | None:
    """The whole number that a header gives, or None if it gives none, or one of more than 20 digits."""
    return int(header) if re.fullmatch("[0-9]{1,20}", header) else None


def _arguments(program: ServedProgram, inputs: Any, data: memoryview) -> dict[str, torch.Tensor]:
    known = program.manifest["arguments"]
    _check_objects("inputs", inputs, "name, datatype, shape and data")
    if len(inputs) > len(known):
        raise invalid(f"the program takes {', '.join(known)}, not {len(inputs)} inputs")
    given: dict[str, torch.Tensor] = {}
    start = 0
    for one in inputs:
        name = _name_among(known, one, "takes")
        if name in given:
            raise invalid(f"the input {name} is given twice")
        _check_keys(name, one, {"name", "datatype", "shape"}, {"data", "parameters"})
        datatype, shape = one["datatype"], _shape(name, one["shape"])
        if not isinstance(datatype, str) or datatype not in _DTYPES:
            raise invalid(f"{name} has the datatype {_shown(datatype)}, which is not one of {', '.join(_DTYPES)}")
        size = _parameters(name, one, {"binary_data_size"}).get("binary_data_size")
        if (size is None) == ("data" not in one):
            raise invalid(f"{name} has either data or the parameter binary_data_size")
        if size is None:
            given[name] = _from_json(name, one["data"], datatype, shape)
        else:
            if type(size) is not int or not 0 <= size <= len(data) - start:
                raise invalid(
                    f"{name} has the binary_data_size {_shown(size)}, but {len(data) - start} bytes are left in the body"
                )
            given[name] = _from_bytes(name, data[start : start + size], datatype, shape)
            start += size
    if start != len(data):
        raise invalid(f"the body has {len(data) - start} more bytes than its inputs say")
    return given


def _shape(name: str, shape: Any) -> list[int]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise invalid(f"the shape of {name} is a list of whole numbers from 0")
    if len(shape) > _MOST_DIMENSIONS:
        raise invalid(f"the shape of {name} has {len(shape)} dimensions, but at most {_MOST_DIMENSIONS} are allowed")
    if math.prod(max(size, 1) for size in shape) > _MOST_ENTRIES:
        raise invalid(f"the shape of {name} is {shape}, which no array has")
    return shape


def _from_json(name: str, data: Any, datatype: str, shape: list[int]) -> torch.Tensor:
    """A tensor from a flat list of its values, or from nested lists in its shape."""
    if not isinstance(data, list):
        raise invalid(f"the data of {name} is a list")
    values, nested = data, list[int]()
    while values and isinstance(values[0], list) and len(nested) < len(shape):
        lengths = {len(one) if isinstance(one, list) else -1 for one in values}
        if len(lengths) > 1:
            raise invalid(f"the data of {name} has lists of different lengths")
        nested.append(lengths.pop())
        values = list(itertools.chain.from_iterable(values))
    if nested and [len(data), *nested] != shape:
        raise invalid(f"the data of {name} is nested in the sizes {[len(data), *nested]}, but its shape is {shape}")
    if len(values) != math.prod(shape):
        raise invalid(f"the data of {name} has {len(values)} values, but the shape {shape} has {math.prod(shape)}")
    dtype = _DTYPES[datatype]
    kinds: set[type] = {bool} if dtype == "bool" else {int, float} if "float" in dtype else {int}
    strange = set(map(type, values)) - kinds
    if strange:
        raise invalid(f"the data of {name} has {_kinds(strange)}, but {datatype} has {_kinds(kinds)}")
    try:
        with np.errstate(over="ignore"):  # the runner refuses what becomes infinite
            array = np.array(values, dtype="float32" if dtype == "bfloat16" else dtype).reshape(shape)
    except OverflowError as error:
        raise invalid(f"the data of {name} has a value out of the range of {datatype}") from error
    return torch.from_numpy(array).to(getattr(torch, dtype))


def _from_bytes(name: str, data: memoryview, datatype: str, shape: list[int]) -> torch.Tensor:
    """A tensor from its values as little-endian bytes, row after row."""
    dtype = _DTYPES[datatype]
    stored = np.dtype("uint8" if dtype == "bool" else "int16" if dtype == "bfloat16" else dtype).newbyteorder("<")
    wanted = math.prod(shape) * stored.itemsize
    if len(data) != wanted:
        raise invalid(f"{name} has {len(data)} bytes, but {datatype} in the shape {shape} has {wanted}")
    array = np.frombuffer(data, stored).astype(stored.newbyteorder("=")).reshape(shape)
    tensor = torch.from_numpy(array)
    if dtype == "bool":
        if array.size and array.max() > 1:
            raise invalid(f"{name} has bytes other than 0 and 1, but the datatype BOOL")
        return tensor.to(torch.bool)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _results(program: ServedProgram, outputs: Any, binary: bool) -> dict[str, bool]:
    known = program.manifest["results"]
    if outputs is None or outputs == []:
        return dict.fromkeys(known, binary)
    _check_objects("outputs", outputs, "a name")
    asked: dict[str, bool] = {}
    for one in outputs:
        name = _name_among(known, one, "gives")
        if name in asked:
            raise invalid(f"the output {name} is asked for twice")
        _check_keys(name, one, {"name"}, {"parameters"})
        parameters = _parameters(name, one, {"binary_data"})
        asked[name] = _flag("binary_data", parameters) if "binary_data" in parameters else binary
    return asked


def _check_objects(what: str, values: Any, keys: str) -> None:
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise invalid(f"{what} is a list of objects with {keys}")


def _name_among(known: Collection[str], one: Mapping[str, Any], verb: str) -> str:
    """The name of an input that the program takes, or of an output that it gives."""
    name = one.get("name")
    if not isinstance(name, str) or name not in known:
        close = nearest(name, known) if isinstance(name, str) and len(name) <= 100 else ""
        raise invalid(f"the program {verb} {', '.join(known)}, and not {_shown(name)}.{close}")
    return name


def _check_keys(what: str, value: Mapping[str, Any], needed: set[str], allowed: set[str]) -> None:
    missing, unknown = needed - value.keys(), sorted(value.keys() - needed - allowed)
    if missing:
        raise invalid(f"{what} has no {', '.join(sorted(missing))}")
    if unknown:
        raise invalid(f"{what} has {_shown(unknown[0])}, but the server knows only {', '.join(sorted(needed | allowed))}")


def _parameters(what: str, value: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    parameters = value.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise invalid(f"the parameters of {what} are an object")
    unknown = sorted(parameters.keys() - known - _IGNORED)
    if unknown:
        raise invalid(f"{what} has the parameter {_shown(unknown[0])}, but the server knows only {', '.join(sorted(known))}")
    return parameters


def _flag(name: str, parameters: Mapping[str, Any]) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise invalid(f"{name} is true or false")
    return value


def _kinds(kinds: set[type]) -> str:
    """Types of Python in words of JSON."""
    names = {bool: "true and false", int: "whole numbers", float: "numbers with a fraction", str: "strings", list: "lists"}
    return " and ".join(sorted(names.get(kind, "objects" if kind is dict else "null") for kind in kinds))


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):  # which may be nested too deeply for Python's `repr`
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def encoded(program: ServedProgram, request: InferenceRequest, results: Tensors) -> tuple[bytes, dict[str, str]]:
    """The body of an answer, and its headers.

    Errors: `InputError` if a result that is asked for in JSON has values that JSON lacks.
    """
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, binary in request.results.items():
        value = results[name].detach().cpu().contiguous()
        one: dict[str, Any] = {
            "name": name,
            "datatype": DATATYPES[str(value.dtype).removeprefix("torch.")],
            "shape": list(value.shape),
        }
        if binary:
            part = _bytes_of(value)
            parts.append(part)
            one["parameters"] = {"binary_data_size": len(part)}
        else:
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise InputError(
                    f"{name} has values that are not finite, which JSON cannot express: ask for it with the parameter "
                    '"binary_data": true',
                    topic="values-not-finite",
                )
            one["data"] = as_array(value).ravel()
        outputs.append(one)
    answer = {"model_name": program.name, "model_version": VERSION, "outputs": outputs}
    if request.id is not None:
        answer["id"] = request.id
    text = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if not parts:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", LENGTH_OF_JSON: str(len(text))}
    return b"".join([text, *parts]), headers


def _bytes_of(value: torch.Tensor) -> bytes:
    array = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
