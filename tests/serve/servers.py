"""Servers in this process, their clients, and programs in Python that they run."""

import concurrent.futures
import contextlib
import http.client
import json
import threading
import time

import numpy as np
import torch
import uvicorn

from lrpfx.deploy.runner import Runner
from lrpfx.deploy.self_test import recorded
from lrpfx.serve import Settings
from lrpfx.serve.server import configuration
from lrpfx.serve.service import application


def python_runner(function, arguments, opened=(0,), sizes=(), tolerance=1e-5, target="max"):
    """A runner of a function of tensors; `arguments` are those of its self-test. Sizes of the dimensions `opened` may vary."""
    test, results = recorded(function, arguments, True, tolerance)

    def described(values):
        return {
            name: {
                "shape": [None if number in opened else size for number, size in enumerate(value.shape)],
                "dtype": str(value.dtype).removeprefix("torch."),
            }
            for name, value in values.items()
        }

    manifest = {
        **{"kind": "exported", "title": "function", "composite": "none", "target": target, "reduce": None, "explained": None},
        "dynamic_batch": 0 in opened,
        **{
            "arguments": described(arguments),
            "results": described(results),
            "conditions": {},
            "masks": [],
            "sizes": list(sizes),
        },
        "tolerance": tolerance,
    }
    return Runner(function, manifest, test)


def floats(*shape):
    return torch.rand(shape, dtype=torch.float32)


def doubled(seconds=0.0):
    """A runner whose output is twice its input, after `seconds`; the relevance of an input is the input."""

    def function(x):
        time.sleep(seconds)
        return {"output": 2 * x, "relevance": x.clone()}

    return python_runner(function, {"x": floats(2, 3)})


class Client:
    """Requests to a server, each with its own connection."""

    def __init__(self, port, headers=None):
        self.port = port
        self.headers = headers or {}

    def __call__(self, method, path, body=None, headers=None):
        """The status, the headers and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def get(self, path):
        status, _, content = self("GET", path)
        return status, json.loads(content)

    def post(self, name, request, **headers):
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        status, _, content = self("POST", f"/v2/models/{name}/infer", body, headers)
        return status, json.loads(content)

    def results(self, name, **arrays):
        """The results for arrays, by JSON."""
        status, answer = self.post(name, request_of(**arrays))
        assert status == 200, answer
        return {one["name"]: np.array(one["data"], dtype="float32").reshape(one["shape"]) for one in answer["outputs"]}

    def metric(self, name):
        """The sum of a metric over its labels."""
        lines = self("GET", "/metrics")[2].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def until_ready(self):
        for _ in range(3000):
            if self("GET", "/v2/health/ready")[0] == 200:
                return self
            time.sleep(0.01)
        raise AssertionError("the server is not ready after 30 seconds")


def request_of(**arrays):
    names = {"float32": "FP32", "int64": "INT64"}
    return {
        "inputs": [
            {"name": name, "shape": list(array.shape), "datatype": names[array.dtype.name], "data": array.ravel().tolist()}
            for name, array in arrays.items()
        ]
    }


@contextlib.contextmanager
def serving(programs, ready=True, headers=None, **settings):
    """A client of a server that runs in a thread of this process."""
    settings = Settings(**settings)
    config = configuration(application(programs, settings), settings)
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
            assert thread.is_alive()
        client = Client(server.servers[0].sockets[0].getsockname()[1], headers)
        yield client.until_ready() if ready else client
    finally:
        server.should_exit = True
        thread.join()


def together(function, items, threads=32):
    """What a function returns for items, in as many threads at the same time."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
