"""`lrpfx serve` as a process: its files, its signals, and a load of requests."""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from command_line.commands import run_program
from helpers import ROOT
from serve.servers import Client, request_of
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlusFlat

pytestmark = pytest.mark.programs

TOKEN = "0123456789abcdef"
IMAGE = np.random.default_rng(0).random((1, 3, 8, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5)).float().eval()
    example = torch.rand(2, 3, 8, 8, dtype=torch.float32)
    return lrpfx.lower(lrpfx.transform(model, EpsilonPlusFlat()), example, target="max")


@pytest.fixture(scope="module")
def folder(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name in ("model.pt2", "model.onnx"):
        lrpfx.save(program, folder / name)
    return folder


def started(*arguments, **environment):
    command = [sys.executable, "-m", "lrpfx", "serve", *map(str, arguments), "--port", "0"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def client_of(process, **headers):
    line = process.stdout.readline()
    assert "Ctrl-C ends the server" in line, process.stderr.read()
    return Client(int(re.search(r":(\d+);", line)[1]), headers).until_ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_several_programs_and_the_end(folder, number):
    process = started(folder / "model.pt2", f"onnx={folder / 'model.onnx'}", "--max-delay", "1500")
    try:
        client = client_of(process)
        expected = lrpfx.load(folder / "model.pt2")(IMAGE)
        for name in ("model", "onnx"):
            found = client.results(name, input=IMAGE)
            for result, value in expected.items():
                assert np.linalg.norm(found[result] - value) <= 1e-5 * np.linalg.norm(value)
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(client.post("model", request_of(input=IMAGE))))
        waiting.start()
        time.sleep(0.5)
        process.send_signal(number)
        waiting.join()
        assert [status for status, _ in answers] == [200]
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_tokens_of_the_environment_and_of_a_file(folder, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    for arguments, environment in ((["--token-file", tmp_path / "token"], {}), ([], {"LRPFX_TOKEN": TOKEN})):
        process = started(folder / "model.pt2", "--host", "0.0.0.0", *arguments, **environment)
        try:
            client = client_of(process)
            assert client.get("/v2")[0] == 401
            assert Client(client.port, {"authorization": f"Bearer {TOKEN}"}).get("/v2")[0] == 200
        finally:
            process.kill()
            process.wait()


def failed(*arguments):
    """The message of a command that fails before it serves anything."""
    status, printed = run_program("serve", *arguments, "--port", "0")
    assert status == 2 and "Traceback" not in printed
    return " ".join(printed.split())


def test_files_are_refused(folder, tmp_path, program):
    assert "needs a token" in failed(folder / "model.pt2", "--host", "0.0.0.0")
    assert "two programs have the name model" in failed(folder / "model.pt2", folder / "model.onnx")
    assert "cannot be read" in failed(tmp_path / "missing.pt2")
    assert "name of a program" in failed(f"a b={folder / 'model.pt2'}")
    (tmp_path / "damaged.pt2").write_bytes((folder / "model.pt2").read_bytes()[:-100])
    assert "is not loaded" in failed(tmp_path / "damaged.pt2")
    (tmp_path / "token").write_text("short")
    assert "openssl rand" in failed(folder / "model.pt2", "--token-file", tmp_path / "token")
    lrpfx.package(program, tmp_path / "native.pt2")
    assert "--allow-native" in failed(tmp_path / "native.pt2")
    process = started(tmp_path / "native.pt2", "--allow-native")
    try:
        assert client_of(process).results("native", input=IMAGE)["output"].shape == (1, 5)
    finally:
        process.kill()
        process.wait()


def test_signatures(folder, tmp_path):
    for command in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "private.pem"],
        ["openssl", "pkey", "-in", tmp_path / "private.pem", "-pubout", "-out", tmp_path / "public.pem"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    path = tmp_path / "signed.pt2"
    path.write_bytes((folder / "model.pt2").read_bytes())
    assert "is not signed" in failed(path, "--signed-by", tmp_path / "public.pem")
    lrpfx.sign(path, tmp_path / "private.pem")
    process = started(path, "--signed-by", tmp_path / "public.pem")
    try:
        assert client_of(process).get("/v2/models/signed")[0] == 200
    finally:
        process.kill()
        process.wait()


def test_a_file_that_fails_its_self_test_ends_the_server(folder):
    code = (
        "import sys, lrpfx, lrpfx.serve; runner = lrpfx.load(sys.argv[1]); runner.self_test.arrays['out.output'][:] += 1; "
        "lrpfx.serve.run({'model': runner}, port=0)"
    )
    result = subprocess.run([sys.executable, "-c", code, folder / "model.pt2"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "ArtefactError: output differs from the program's result" in result.stderr


def test_a_load_of_requests(tmp_path, monkeypatch):
    """What `make load` does, with fewer requests: all answers are right, and memory stays as it is."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # also for the process of the clients
    serving = importlib.import_module("serving")
    for path in serving.exported(tmp_path):
        load = serving.loaded(path, binary=path.suffix == ".onnx", count=8, requests=60)
        assert load.wrong == 0 and len(load.seconds) == 480 and load.rows > 1
        assert load.after - load.before < 16 * 2**20
