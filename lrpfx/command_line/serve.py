"""`lrpfx serve`: answers requests over HTTP with exported programs."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import lrpfx
from lrpfx.command_line.options import ALLOW_NATIVE
from lrpfx.command_line.terminal import say, stages
from lrpfx.deploy.artefact import load
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, os_errors

#: The environment variable with the token.
TOKEN = "LRPFX_TOKEN"

invalid = partial(InputError, topic="serving-programs")
_DEFAULTS = lrpfx.serve.Settings()


def serve(
    programs: Annotated[
        list[str], typer.Argument(help="Files that `lrpfx export` wrote, or NAME=FILE; without a name, it is that of the file.")
    ],
    host: Annotated[str, typer.Option(help="The address to listen at; any but those of this machine alone need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="The most rows that are computed at once.")] = _DEFAULTS.max_batch,
    max_delay: Annotated[float, typer.Option(help="Milliseconds that a request waits for others.")] = (
        1000 * _DEFAULTS.max_delay
    ),
    max_queue: Annotated[int, typer.Option(help="The most requests at the same time.")] = _DEFAULTS.max_queue,
    max_request: Annotated[float, typer.Option(help="The most megabytes in the body of a request.")] = (
        _DEFAULTS.max_request_bytes / 2**20
    ),
    max_waiting: Annotated[float, typer.Option(help="The most megabytes in the bodies of all requests at the same time.")] = (
        _DEFAULTS.max_waiting_bytes / 2**20
    ),
    max_size: Annotated[int, typer.Option(help="The largest size in a dimension that a program leaves open.")] = (
        _DEFAULTS.max_size
    ),
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = _DEFAULTS.timeout,
    token_file: Annotated[
        Path | None, typer.Option(help=f"A file with the bearer token of all requests; otherwise {TOKEN} may have it.")
    ] = None,
    allow_native: ALLOW_NATIVE = False,
    signed_by: Annotated[Path | None, typer.Option(help="A public key: all files must be signed by its owner.")] = None,
) -> None:
    """Serve exported programs over HTTP by the Open Inference Protocol: predictions and explanations, in batches.

    The server is ready when the self-tests have passed. Ctrl-C ends it after the requests that have begun.
    """
    settings = lrpfx.serve.Settings(
        max_batch=max_batch,
        max_delay=max_delay / 1000,
        max_queue=max_queue,
        max_request_bytes=_bytes(max_request),
        max_waiting_bytes=_bytes(max_waiting),
        max_size=max_size,
        timeout=timeout,
        token=_token(token_file),
    )
    with stages("loading"):
        runners = _loaded(programs, allow_native, signed_by)
    lrpfx.serve.run(
        runners,
        settings,
        host=host,
        port=port,
        on_start=lambda address: say(f"serving {', '.join(runners)} at {address}; Ctrl-C ends the server"),
    )


def _bytes(megabytes: float) -> int:
    if not 0 < megabytes <= 2**20:
        raise invalid(f"megabytes are a number from 0 to {2**20}, not {megabytes}")
    return max(1, int(megabytes * 2**20))


def _token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(TOKEN)
    with os_errors(InputError, file, "read"):
        return file.read_text(errors="backslashreplace").strip()


def _loaded(programs: Sequence[str], allow_native: bool, signed_by: Path | None) -> dict[str, Runner]:
    runners: dict[str, Runner] = {}
    for one in programs:
        name, separator, path = one.partition("=")
        if not separator:
            name, path = Path(one).stem, one
        if name in runners:
            raise invalid(f"two programs have the name {name}: give them others, as NAME=FILE")
        runners[name] = load(path, allow_native=allow_native, signed_by=signed_by)
    return runners
