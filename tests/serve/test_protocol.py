"""The Open Inference Protocol: metadata, tensors as JSON and as bytes, and requests that are refused."""

import functools
import json
import re
import types

import numpy as np
import pytest
import torch
from serve.servers import doubled, floats, python_runner, request_of, serving

import lrpfx.serve

DATATYPES = {
    **{"BOOL": "bool", "UINT8": "uint8", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64"},
    **{"FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64"},
}


@pytest.fixture(scope="module")
def client():
    classes = python_runner(
        lambda input, target: {"output": input[:, :4], "relevance": input * target[:, None]},
        {"input": floats(2, 6), "target": torch.tensor([0, 1])},
        target="index",
    )
    with serving({"double": doubled(), "classes": classes}, max_delay=0.0, max_request_bytes=100_000) as client:
        yield client


def test_metadata(client):
    status, server = client.get("/v2")
    assert status == 200 and server["name"] == "lrpfx" and server["extensions"] == ["binary_tensor_data"]
    status, model = client.get("/v2/models/classes")
    assert status == 200 and model["platform"] == "lrpfx_exported" and model["versions"] == ["1"]
    assert model["inputs"] == [
        {"name": "input", "datatype": "FP32", "shape": [-1, 6]},
        {"name": "target", "datatype": "INT64", "shape": [-1]},
    ]
    assert [one["name"] for one in model["outputs"]] == ["output", "relevance"]
    assert client.get("/v2/models/classes/ready") == (200, {"name": "classes", "ready": True})
    status, answer = client.get("/v2/models/other")
    assert status == 404 and "double, classes" in answer["error"]
    assert client.get("/v2/models/double/infer")[0] == 405 and client.get("/v2/repository/index")[0] == 404


def test_predictions_and_explanations(client):
    row = np.arange(6, dtype=np.float32)[None]
    request = {"id": "a request", **request_of(input=row, target=np.array([3]))}
    status, answer = client.post("classes", request)
    assert status == 200 and answer["id"] == "a request" and answer["model_name"] == "classes"
    assert answer["outputs"] == [
        {"name": "output", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]},
        {"name": "relevance", "datatype": "FP32", "shape": [1, 6], "data": [0, 3, 6, 9, 12, 15]},
    ]
    for names in (["output"], ["relevance", "output"]):
        status, answer = client.post("classes", {**request, "outputs": [{"name": name} for name in names]})
        assert status == 200 and [one["name"] for one in answer["outputs"]] == names


def test_nested_data(client):
    request = request_of(x=np.ones((2, 3), dtype=np.float32))
    request["inputs"][0]["data"] = [[1, 2.5, 3], [4, 5, 6]]
    assert client.post("double", request)[1]["outputs"][0]["data"] == [2, 5, 6, 8, 10, 12]


def test_bytes_are_the_same_as_json(client):
    values = np.random.default_rng(0).random((2, 3), dtype=np.float32)
    expected = client.results("double", x=values)
    one = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}}
    for parameters, outputs in (
        ({"binary_data_output": True}, None),
        ({}, [{"name": "output", "parameters": {"binary_data": True}}, {"name": "relevance"}]),
    ):
        head = json.dumps({"inputs": [one], "parameters": parameters, **({} if outputs is None else {"outputs": outputs})})
        length = {"Inference-Header-Content-Length": str(len(head))}
        status, headers, content = client("POST", "/v2/models/double/infer", head.encode() + values.tobytes(), length)
        assert status == 200
        text = content[: int(headers["inference-header-content-length"])]
        start = len(text)
        for result in json.loads(text)["outputs"]:
            size = result.get("parameters", {}).get("binary_data_size")
            if size is None:
                found = np.array(result["data"], dtype=np.float32).reshape(result["shape"])
            else:
                found = np.frombuffer(content[start : start + size], dtype="<f4").reshape(result["shape"])
                start += size
            assert (found == expected[result["name"]]).all()
        assert start == len(content) and ("data" not in json.loads(text)["outputs"][0])


@pytest.mark.parametrize(("datatype", "dtype"), DATATYPES.items())
def test_all_datatypes_go_in_and_out(datatype, dtype):
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype))
    runner = python_runner(lambda x: {"output": x.clone()}, {"x": values})
    written = values.tolist()
    stored = (values.view(torch.int16) if dtype == "bfloat16" else values).numpy().tobytes()
    with serving({"same": runner}) as client:
        one = {"name": "x", "shape": [2, 3], "datatype": datatype}
        status, answer = client.post("same", {"inputs": [{**one, "data": written}]})
        assert status == 200 and answer["outputs"][0]["datatype"] == datatype
        assert answer["outputs"][0]["data"] == [value for row in written for value in row]
        head = {
            "inputs": [{**one, "parameters": {"binary_data_size": len(stored)}}],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(head).encode()
        length = {"Inference-Header-Content-Length": str(len(text))}
        status, headers, content = client("POST", "/v2/models/same/infer", text + stored, length)
        assert status == 200 and content[int(headers["inference-header-content-length"]) :] == stored


def test_results_that_json_cannot_express():
    runner = python_runner(lambda x: {"output": x / x}, {"x": floats(2, 3)})
    with serving({"ratio": runner}) as client:
        request = request_of(x=np.zeros((1, 3), dtype=np.float32))
        status, answer = client.post("ratio", request)
        assert status == 400 and "binary_data" in answer["error"]
        request["parameters"] = {"binary_data_output": True}
        status, _, content = client("POST", "/v2/models/ratio/infer", json.dumps(request))
        assert status == 200 and np.isnan(np.frombuffer(content[-12:], dtype="<f4")).all()


X = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}


def _with(**changes):
    return {"inputs": [{**X, **changes}]}


def _nested(depth):
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


REFUSED = {
    "half a JSON": (b'{"inputs": [{"name": "x"', "not JSON"),
    "nothing": (b"", "not JSON"),
    "a list": ([X], "not a JSON object"),
    "deep lists": (b'{"inputs": ' + b"[" * 40_000, "not JSON"),
    "bytes": (b"\xff\xfe\x00", "not JSON"),
    "NaN": (json.dumps(_with(data=[1, float("nan"), 3])).encode(), "not JSON"),
    "infinity": (b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1e400, 1, 1]}]}', "finite|not JSON"),
    "out of range": (_with(data=[1e39, 1, 1]), "not finite"),
    "no inputs": ({}, "has no inputs"),
    "inputs are an object": ({"inputs": X}, "inputs is a list"),
    "inputs are numbers": ({"inputs": [1]}, "inputs is a list"),
    "an absent input": ({"inputs": []}, "missing: x"),
    "an extra input": ({"inputs": [X, {**X, "name": "y"}]}, "not 2 inputs"),
    "the same input twice": ({"inputs": [X, X]}, "not 2 inputs"),
    "a wrong name": (_with(name="y"), "and not 'y'"),
    "a long name": (_with(name="y" * 50_000), r"y{99}\.\.\."),
    "a name that is a number": (_with(name=7), "and not 7"),
    "a wrong dtype": (_with(datatype="FP64"), "x has dtype float64, but the program takes float32"),
    "an unknown dtype": (_with(datatype="BYTES"), "BYTES"),
    "a dtype that is a list": (_with(datatype=["FP32"]), "FP32"),
    "a wrong shape": (_with(shape=[3, 1]), "x has shape 3×1, but the program takes batch×3"),
    "no batch": (_with(shape=[3]), "x has shape 3, but"),
    "an empty batch": (_with(shape=[0, 3], data=[]), "empty batch"),
    "a negative shape": (_with(shape=[-1, 3]), "whole numbers from 0"),
    "a shape of fractions": (_with(shape=[1.0, 3]), "whole numbers from 0"),
    "a shape of truth values": (_with(shape=[True, 3]), "whole numbers from 0"),
    "a huge shape": (_with(shape=[2**62, 2**62]), "which no array has"),
    "a huge shape without entries": (_with(shape=[0, 10**18, 10**18], data=[]), "which no array has"),
    "a size beyond 63 bits": (_with(shape=[0, 2**64 - 1], data=[]), "which no array has"),
    "a dtype of nested lists": (_with(datatype=_nested(700)), "a list, which is not one of"),
    "data of nested lists": (_with(data=_nested(700)), "different lengths|nested in the sizes"),
    "many dimensions": (_with(shape=[1] * 1000), "1000 dimensions"),
    "data of another length": (_with(data=[1, 2]), "has 2 values, but the shape"),
    "data that is a number": (_with(data=1), "is a list"),
    "data that is a string": (_with(data="AAAA"), "is a list"),
    "strings": (_with(data=["1", "2", "3"]), "strings, but FP32"),
    "truth values": (_with(data=[True, 2, 3]), "true and false, but FP32"),
    "null": (_with(data=[None, 2, 3]), "null, but FP32"),
    "objects": (_with(data=[{}, 2, 3]), "objects, but FP32"),
    "uneven lists": (_with(data=[[1, 2], [3]]), "different lengths"),
    "lists and numbers": (_with(data=[[1, 2], 3]), "different lengths"),
    "lists of another shape": (_with(data=[[1], [2], [3]]), r"nested in the sizes \[3, 1\]"),
    "lists of more dimensions": (_with(data=[[[1, 2, 3]]]), r"nested in the sizes \[1, 1, 3\]"),
    "lists within lists": (_with(data=[[1, 2, []]]), "lists, but FP32"),
    "integers beyond 64 bits": (_with(datatype="INT64", data=[2**70, 1, 1]), "whole numbers|range|not JSON"),
    "integers out of range": (_with(datatype="INT8", data=[300, 1, 1]), "out of the range of INT8"),
    "fractions as integers": (_with(datatype="INT64", data=[1.5, 1, 1]), "numbers with a fraction, but INT64"),
    "no data": ({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32"}]}, "either data or"),
    "data and bytes": (_with(parameters={"binary_data_size": 12}), "either data or"),
    "unknown keys": (_with(path="/etc/passwd"), "'path', but the server knows only"),
    "a region of memory": (_with(parameters={"shared_memory_region": "x"}), "shared_memory_region"),
    "parameters in a list": (_with(parameters=[1]), "are an object"),
    "an unknown parameter": ({**_with(), "parameters": {"sequence_id": 7}}, "sequence_id"),
    "an id that is a number": ({**_with(), "id": 7}, "id of a request"),
    "an unknown output": ({**_with(), "outputs": [{"name": "relevence"}]}, "Did you mean 'relevance'"),
    "an output twice": ({**_with(), "outputs": [{"name": "output"}] * 2}, "twice"),
    "outputs are names": ({**_with(), "outputs": ["output"]}, "outputs is a list"),
    "a flag that is a string": ({**_with(), "parameters": {"binary_data_output": "yes"}}, "true or false"),
    "classification": ({**_with(), "outputs": [{"name": "output", "parameters": {"classification": 2}}]}, "classification"),
    "10,000 × 10,000": (_with(shape=[10_000, 10_000]), "has 3 values, but the shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused(client, case):
    request, message = REFUSED[case]
    status, answer = client.post("double", request)
    assert status == 400 and list(answer) == ["error"] and len(answer["error"]) <= 1000
    assert re.search(message, answer["error"]), answer["error"]
    assert client.post("double", _with())[0] == 200


def test_targets_are_checked(client):
    request = request_of(input=np.ones((1, 6), dtype=np.float32), target=np.array([4]))
    status, answer = client.post("classes", request)
    assert status == 400 and "target 4 is out of range: the output has 4 classes" in answer["error"]
    request = request_of(input=np.ones((2, 6), dtype=np.float32), target=np.array([1]))
    status, answer = client.post("classes", request)
    assert status == 400 and "the batch sizes differ: input 2, target 1" in answer["error"]


BINARY = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": 12}}


@pytest.mark.parametrize(
    ("length", "size", "data", "message"),
    [
        (None, 12, 12, "not JSON"),
        ("x", 12, 12, "number of bytes"),
        ("-1", 12, 12, "number of bytes"),
        ("9" * 30, 12, 12, "number of bytes"),
        ("0" * 5000 + "5", 12, 12, "number of bytes"),
        ("\xb2", 12, 12, "number of bytes"),
        ("3", 12, 12, "not JSON"),
        ("0", 12, 12, "not JSON"),
        (True, 12, 8, "8 bytes are left"),
        (True, 12, 13, "1 more bytes"),
        (True, 8, 8, "8 bytes, but FP32 in the shape"),
        (True, -4, 12, "binary_data_size -4"),
        (True, "12", 12, "binary_data_size '12'"),
        (True, True, 12, "binary_data_size True"),
    ],
)
def test_bad_bytes_are_refused(client, length, size, data, message):
    text = json.dumps({"inputs": [{**BINARY, "parameters": {"binary_data_size": size}}]}).encode()
    header = {} if length is None else {"Inference-Header-Content-Length": str(len(text)) if length is True else length}
    status, answer = client.post("double", text + bytes(data), **header)
    assert status == 400 and message in answer["error"]


def test_bytes_of_truth_values_and_of_nan():
    with serving({"not": python_runner(lambda x: {"output": ~x}, {"x": torch.tensor([[True], [False]])})}) as client:
        text = json.dumps({"inputs": [{**BINARY, "datatype": "BOOL", "shape": [1, 1], "parameters": {"binary_data_size": 1}}]})
        length = {"Inference-Header-Content-Length": str(len(text))}
        assert client.post("not", text.encode() + b"\x01", **length)[1]["outputs"][0]["data"] == [False]
        status, answer = client.post("not", text.encode() + b"\x02", **length)
        assert status == 400 and "other than 0 and 1" in answer["error"]


def test_bytes_that_are_not_finite(client):
    text = json.dumps({"inputs": [BINARY]}).encode()
    data = np.array([1, np.nan, 1], dtype="<f4").tobytes()
    status, answer = client.post("double", text + data, **{"Inference-Header-Content-Length": str(len(text))})
    assert status == 400 and "x has values that are not finite" in answer["error"]


def test_a_huge_shape_without_bytes(client):
    text = json.dumps({"inputs": [{**BINARY, "shape": [0, 10**18, 10**18], "parameters": {"binary_data_size": 0}}]}).encode()
    status, answer = client.post("double", text, **{"Inference-Header-Content-Length": str(len(text))})
    assert status == 400 and "which no array has" in answer["error"]


def test_compressed_bodies_are_refused(client):
    status, answer = client.post("double", b"{}", **{"content-encoding": "gzip"})
    assert status == 415 and "compressed" in answer["error"]


def test_paths_are_names_of_programs_only(client, tmp_path):
    for path in ("..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "http:%2f%2fexample.org", "double%00"):
        assert client("GET", f"/v2/models/{path}")[0] == 404


def test_public_names_are_no_modules():
    """Importing a module sets its name in the package, where it would hide a function of that name."""
    assert lrpfx.serve.run is not None
    assert [name for name in lrpfx.serve.__all__ if isinstance(getattr(lrpfx.serve, name), types.ModuleType)] == []
