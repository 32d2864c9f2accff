"""The server as a process: its socket, its signals and its end."""

import math
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import uvicorn
from starlette.applications import Starlette

from lrpfx.deploy.runner import Runner
from lrpfx.errors import LrpfxError
from lrpfx.serve.connections import Connection
from lrpfx.serve.guard import is_loopback
from lrpfx.serve.refusals import invalid
from lrpfx.serve.service import application
from lrpfx.serve.settings import Settings

#: Connections beside those of the requests that may wait, for health and metrics.
_MORE_CONNECTIONS = 64


def run(
    programs: Mapping[str, Runner],
    settings: Settings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_start: Callable[[str], object] | None = None,
) -> None:
    """Serve programs until the process gets SIGINT or SIGTERM, and then answer the requests that have begun.

    `programs`: what `lrpfx.load` returned, by the names in requests. `settings`: the limits, and the token, which all hosts
    need except for those of this machine alone. `host` and `port`: where to listen; port 0 is any that is free. `on_start`:
    called with the address, such as `http://127.0.0.1:8000`, when the server listens. Raises `InputError` if a name or the
    address is invalid or in use, or is not of this machine alone and there is no token, and `ArtefactError` if a self-test
    failed.
    """
    settings = settings or Settings()
    problems: list[LrpfxError] = []

    def fail(error: LrpfxError) -> None:
        problems.append(error)
        server.should_exit = True

    server = uvicorn.Server(configuration(application(programs, settings, on_failure=fail), settings))
    with closing(_listening(host, port, settings)) as listener, _ending_quietly():
        if on_start is not None:
            address, bound = listener.getsockname()[:2]
            on_start(f"http://{f'[{address}]' if ':' in address else address}:{bound}")
        server.run([listener])
    if problems:
        raise problems[0]


def configuration(served: Starlette, settings: Settings) -> uvicorn.Config:
    """How an application is served: its connections, and none of what uvicorn writes of its own."""
    return uvicorn.Config(
        served,
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.max_queue + _MORE_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(settings.timeout),
    )


def _listening(host: str, port: int, settings: Settings) -> socket.socket:
    if type(port) is not int or not 0 <= port < 2**16:
        raise invalid(f"a port is a number from 0 to 65535, not {port!r}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise invalid(f"{host} is not the address of a host: {error}") from error
    if settings.token is None and not is_loopback(str(address[0])):
        raise invalid(f"{host} is not for this machine alone, so the server needs a token that its clients send")
    try:
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise invalid(f"the server cannot listen at {host}, port {port}: {error.strerror or error}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)  # of its connections too: answers are sent in two parts
    return listener


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """A context in which a signal ends the server and nothing else: uvicorn raises it once more when the server has ended."""
    try:
        former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # another thread than the main one, where uvicorn takes no signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
