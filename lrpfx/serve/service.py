"""The server as an ASGI application."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lrpfx.deploy.runner import Runner
from lrpfx.errors import ArtefactError, LrpfxError
from lrpfx.serve.answers import answer_of, json_answer
from lrpfx.serve.batches import Batches
from lrpfx.serve.guard import Guard
from lrpfx.serve.metrics import Metrics
from lrpfx.serve.programs import ServedProgram
from lrpfx.serve.protocol import LENGTH_OF_JSON, InferenceRequest, encoded, number_in, parsed
from lrpfx.serve.refusals import (
    BAD_REQUEST,
    BUSY,
    FAILED,
    NOT_FOUND,
    NOT_READY,
    TIMED_OUT,
    TOO_LARGE,
    TOO_SLOW,
    UNSUPPORTED,
    RequestError,
    invalid,
    refusal_of,
)
from lrpfx.serve.settings import Settings

Result = TypeVar("Result")


def application(
    programs: Mapping[str, Runner],
    settings: Settings | None = None,
    *,
    on_failure: Callable[[LrpfxError], object] | None = None,
) -> Starlette:
    """A server of the Open Inference Protocol as an ASGI application, for a server such as uvicorn.

    Its endpoints are `/v2`, `/v2/health/live`, `/v2/health/ready`, `/v2/models/NAME`, `/v2/models/NAME/ready`,
    `/v2/models/NAME/infer` and `/metrics`. It starts with the self-tests, and is ready when all have passed. One thread runs
    all programs, so the application belongs to one process with one event loop.

    `on_failure`: called with the error if a self-test fails. The program is never ready then. `InputError` if there are no
    programs, or a name is invalid. Other arguments: as for `lrpfx.serve.run`.
    """
    return Service(programs, settings or Settings(), on_failure).application()


class Service:
    """The endpoints, and what they share."""

    def __init__(
        self, programs: Mapping[str, Runner], settings: Settings, on_failure: Callable[[LrpfxError], object] | None
    ) -> None:
        if not programs:
            raise invalid("a server needs a program: lrpfx.serve.run({'name': lrpfx.load(path)})")
        self.settings = settings
        self.programs = {name: ServedProgram(name, runner, settings) for name, runner in programs.items()}
        self.metrics = Metrics(self.programs)
        self.on_failure = on_failure
        self.batches: Batches
        self.conversions: anyio.CapacityLimiter
        self.requests = 0  # that are read, wait or are computed
        self.bytes = 0  # in their bodies

    def application(self) -> Starlette:
        of_model = "/v2/models/{name}"
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route(of_model, self.model),
            Route(f"{of_model}/ready", self.model_ready),
            Route(f"{of_model}/infer", self.infer, methods=["POST"]),
            Route("/metrics", self.numbers),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard, token=self.settings.token)],
            exception_handlers={HTTPException: _http_error, LrpfxError: _lrpfx_error, Exception: _defect},
            lifespan=self.lifespan,
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batches = Batches(self.settings, self.metrics)
        self.conversions = anyio.CapacityLimiter(1)  # more threads would only compete for the interpreter
        self.metrics.count_waiting(lambda: len(self.batches.waiting))
        tasks = [asyncio.create_task(self.prepare()), asyncio.create_task(self.batches.compute())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.batches.close()

    async def prepare(self) -> None:
        """Run the self-tests."""
        for program in self.programs.values():
            try:
                await self.batches.in_thread(program.prepare)
            except Exception as error:
                if self.on_failure is not None:
                    defect = ArtefactError(f"the self-test of {program.name} fails: {type(error).__name__}: {error}")
                    self.on_failure(error if isinstance(error, LrpfxError) else defect)
                raise
            self.metrics.ready(program.name)

    # --- the endpoints ---

    async def server(self, _: Request) -> Response:
        return json_answer({"name": "lrpfx", "version": version("lrpfx"), "extensions": ["binary_tensor_data"]})

    async def live(self, _: Request) -> Response:
        return json_answer({"live": True})

    async def ready(self, _: Request) -> Response:
        ready = all(program.ready for program in self.programs.values())
        return json_answer({"ready": ready}, 200 if ready else BAD_REQUEST)  # the protocol demands a status from 400 to 499

    async def model(self, request: Request) -> Response:
        return json_answer(self._program(request).metadata())

    async def model_ready(self, request: Request) -> Response:
        program = self._program(request)
        return json_answer({"name": program.name, "ready": program.ready}, 200 if program.ready else BAD_REQUEST)

    async def numbers(self, request: Request) -> Response:
        content, content_type = self.metrics.text(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    async def infer(self, request: Request) -> Response:
        program, started = self._program(request), time.perf_counter()
        try:
            answer = await self._inferred(request, program)
        except (LrpfxError, MemoryError) as error:
            answer = answer_of(refusal_of(error))
        except Exception:
            self.metrics.request(program.name, FAILED, time.perf_counter() - started)
            raise
        self.metrics.request(program.name, answer.status_code, time.perf_counter() - started)
        return answer

    async def _inferred(self, request: Request, program: ServedProgram) -> Response:
        if not program.ready:
            raise RequestError(f"{program.name} is not ready: its self-test has not passed yet", NOT_READY)
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        with self._admitted() as count_bytes:
            body = await self._body(request, deadline, count_bytes)
            header = request.headers.get(LENGTH_OF_JSON)
            try:
                with anyio.fail_after(deadline - anyio.current_time()):
                    asked: InferenceRequest = await self._converted(parsed, program, body, header)
                    del body
                    results = await self.batches.results(program, asked.arguments)
                    content, headers = await self._converted(encoded, program, asked, results)
            except TimeoutError as error:
                raise RequestError(
                    f"the request was not answered within {self.settings.timeout:g} seconds, since others are before it",
                    TIMED_OUT,
                ) from error
        return Response(content, headers=headers)

    async def _converted(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What a function returns in another thread than that of the event loop, which goes on meanwhile."""
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self.conversions)

    @contextmanager
    def _admitted(self) -> Iterator[Callable[[int], None]]:
        """A place among the requests, and a function that counts bytes of the body. Raises `RequestError` if there is none."""
        if self.requests >= self.settings.max_queue:
            raise RequestError(f"{self.requests} requests wait, which is the limit of this server: try again later", BUSY)
        self.requests += 1
        of_this = 0

        def count(number: int) -> None:
            nonlocal of_this
            if self.bytes + number > self.settings.max_waiting_bytes:
                raise RequestError("the requests that wait have as many bytes as this server allows: try again later", BUSY)
            self.bytes += number
            of_this += number

        try:
            yield count
        finally:
            self.requests -= 1
            self.bytes -= of_this

    async def _body(self, request: Request, deadline: float, count_bytes: Callable[[int], None]) -> bytes:
        """The body of a request. Raises `RequestError` if it is too large, too slow, or compressed."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("the body is compressed, which this server does not support", UNSUPPORTED)
        if (number_in(request.headers.get("content-length", "")) or 0) > self.settings.max_request_bytes:
            raise self._too_large()
        parts, size = [], 0
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                async for part in request.stream():
                    size += len(part)
                    if size > self.settings.max_request_bytes:
                        raise self._too_large()
                    count_bytes(len(part))
                    parts.append(part)
        except TimeoutError as error:
            raise RequestError(f"the body did not arrive within {self.settings.timeout:g} seconds", TOO_SLOW) from error
        except ClientDisconnect as error:
            raise RequestError("the connection ended before the body did", BAD_REQUEST) from error
        return b"".join(parts)

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body has more than {self.settings.max_request_bytes} bytes, the limit of this server", TOO_LARGE
        )

    def _program(self, request: Request) -> ServedProgram:
        name = request.path_params["name"]
        if name not in self.programs:
            raise RequestError(f"there is no program {name[:100]!r}; the programs are {', '.join(self.programs)}", NOT_FOUND)
        return self.programs[name]


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_answer({"error": error.detail}, error.status_code, error.headers)


async def _lrpfx_error(_: Request, error: Exception) -> Response:
    return answer_of(refusal_of(error))


async def _defect(_: Request, error: Exception) -> Response:
    """The answer to a request that met a defect, which the server's log shows."""
    return answer_of(RequestError("the server failed; its log has the reason", FAILED))
