"""Limits of a server: size, number and time of requests, and who may send them."""

import asyncio
import contextlib
import socket
import time

import numpy as np
import pytest
from serve.servers import Client, doubled, floats, python_runner, request_of, serving, together

import lrpfx.serve
from lrpfx.errors import InputError
from lrpfx.serve import Settings, service
from lrpfx.serve.service import Service

ROW = np.ones((1, 3), dtype=np.float32)
TOKEN = "0123456789abcdef"


def test_bodies_have_a_largest_size():
    with serving({"double": doubled()}, max_request_bytes=1000) as client:
        for headers in ({}, {"transfer-encoding": "chunked"}):
            body = b" " * 1001 if not headers else b"3e9\r\n" + b" " * 1001 + b"\r\n0\r\n\r\n"
            with socket.create_connection(("127.0.0.1", client.port)) as connection:
                length = "transfer-encoding: chunked" if headers else "content-length: 1001"
                head = f"POST /v2/models/double/infer HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n"
                connection.sendall(head.encode() + body)
                assert b" 413 " in connection.recv(100)
        with socket.create_connection(("127.0.0.1", client.port)) as connection:  # not read before it is refused
            connection.sendall(
                b"POST /v2/models/double/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n"
            )
            assert b" 413 " in connection.recv(100)
        assert client.results("double", x=ROW)["output"].tolist() == [[2, 2, 2]]


def test_the_queue_has_a_largest_length():
    with serving({"slow": doubled(0.3)}, max_queue=3, max_batch=1) as client:
        answers = together(lambda _: client.post("slow", request_of(x=ROW)), range(12))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
        assert all("try again" in answer["error"] for status, answer in answers if status == 429)
        assert client.results("slow", x=ROW)["output"].tolist() == [[2, 2, 2]]


def test_all_bodies_have_a_largest_size_together():
    body = request_of(x=ROW)
    with serving({"slow": doubled(0.3)}, max_request_bytes=200, max_waiting_bytes=200, max_batch=1) as client:
        statuses = [status for status, _ in together(lambda _: client.post("slow", body), range(4))]
        assert 429 in statuses and 200 in statuses
        assert client.post("slow", body)[0] == 200


def test_requests_have_a_time_limit():
    with serving({"slow": doubled(0.4)}, timeout=0.6, max_batch=1) as client:
        answers = together(lambda _: client.post("slow", request_of(x=ROW)), range(5))
        assert {status for status, _ in answers} == {200, 504}
        assert any("0.6 seconds" in answer["error"] for status, answer in answers if status == 504)
        time.sleep(0.5)
        assert client.post("slow", request_of(x=ROW))[0] == 200


def test_bodies_have_a_time_limit():
    with serving({"double": doubled()}, timeout=0.3) as client:
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            assert b" 408 " in connection.recv(100)
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert client.post("double", request_of(x=ROW))[0] == 200


def test_a_server_is_ready_after_the_self_test():
    with serving({"slow": doubled(0.3)}, ready=False) as client:
        assert client.get("/v2/health/live") == (200, {"live": True})
        assert client.get("/v2/health/ready") == (400, {"ready": False})
        assert client.get("/v2/models/slow/ready") == (400, {"name": "slow", "ready": False})
        status, answer = client.post("slow", request_of(x=ROW))
        assert status == 503 and "self-test" in answer["error"]
        assert client.until_ready().post("slow", request_of(x=ROW))[0] == 200


def test_a_program_that_fails_its_self_test_is_never_ready():
    failing = doubled()
    failing.self_test.arrays["out.output"] = failing.self_test.arrays["out.output"] + 1
    with serving({"good": doubled(), "failing": failing}, ready=False) as client:
        while client.get("/v2/models/good/ready")[0] != 200:
            time.sleep(0.01)
        time.sleep(0.1)
        assert client.get("/v2/models/failing/ready")[0] == 400 and client.get("/v2/health/ready")[0] == 400
        assert client.post("good", request_of(x=ROW))[0] == 200 and client.post("failing", request_of(x=ROW))[0] == 503


def test_defects_are_counted(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(service, "parsed", fails)
    with serving({"double": doubled()}) as client:
        status, answer = client.post("double", request_of(x=ROW))
        assert status == 500 and "the server failed" in answer["error"]
        assert 'lrpfx_requests_total{model="double",status="500"} 1.0' in client("GET", "/metrics")[2].decode().splitlines()


@pytest.mark.parametrize("given", [None, "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"])
def test_a_token_is_needed(given):
    with serving({"double": doubled()}, token=TOKEN) as client:
        stranger = Client(client.port, {} if given is None else {"authorization": given})
        for path in ("/v2", "/v2/models/double", "/metrics", "/nothing"):
            status, headers, content = stranger("GET", path)
            assert status == 401 and headers["www-authenticate"] == "Bearer" and TOKEN.encode() not in content
        assert stranger.post("double", request_of(x=ROW))[0] == 401
        assert stranger.get("/v2/health/live")[0] == stranger.get("/v2/health/ready")[0] == 200
        friend = Client(client.port, {"authorization": f"Bearer {TOKEN}", "host": "example.org"})
        assert friend.post("double", request_of(x=ROW))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:8", 200), ("example.org", 403)]
)
def test_without_a_token_requests_name_this_machine(host, status):
    with serving({"double": doubled()}) as client:
        assert Client(client.port, {"host": host}).get("/v2")[0] == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_hosts_need_a_token(host):
    with pytest.raises(InputError, match="needs a token"):
        lrpfx.serve.run({"double": doubled()}, host=host, port=0)


def test_addresses():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="cannot listen"):
        lrpfx.serve.run({"double": doubled()}, port=taken.getsockname()[1])
    for host, port, message in (
        ("no host", 0, "not the address"),
        ("", 0, "not the address"),
        ("127.0.0.1", 65536, "a port is"),
        ("127.0.0.1", "1", "a port"),
    ):
        with pytest.raises(InputError, match=message):
            lrpfx.serve.run({"double": doubled()}, host=host, port=port)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_batch": 0}, "max_batch"),
        ({"max_queue": True}, "max_queue"),
        ({"max_delay": -1}, "max_delay"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_waiting_bytes": 1}, "max_waiting_bytes"),
        ({"token": "short"}, "openssl rand"),
        ({"token": "0123456789 abcdef"}, "without spaces"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(InputError, match=message):
        Settings(**setting)


def test_tokens_are_not_printed():
    assert TOKEN not in repr(Settings(token=TOKEN))


def test_a_server_needs_a_program():
    with pytest.raises(InputError, match="needs a program"):
        lrpfx.serve.run({})


def test_connections_that_ask_for_nothing_keep_no_others_out():
    runner = python_runner(lambda x: {"output": x}, {"x": floats(2, 3)})
    with serving({"model": runner}, max_queue=4) as client, contextlib.ExitStack() as stack:
        for number in range(100):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
            silent.sendall(b"GET /v2/health/live HT" if number % 2 else b"")
        rows = np.ones((1, 3), dtype=np.float32)
        assert (client.results("model", x=rows)["output"] == 1).all()
        assert client.get("/v2/health/live")[0] == 200


def test_a_self_test_that_breaks_ends_the_server():
    runner = python_runner(lambda x: {"output": x}, {"x": floats(2, 3)})
    runner.verify = lambda: 1 / 0
    failures = []

    async def prepared():
        service = Service({"model": runner}, Settings(), failures.append)
        async with service.lifespan(None):
            await asyncio.sleep(0.5)

    asyncio.run(prepared())
    (failure,) = failures
    assert isinstance(failure, lrpfx.ArtefactError) and "the self-test of model fails: ZeroDivisionError" in str(failure)
