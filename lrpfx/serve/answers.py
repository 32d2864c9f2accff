"""Answers of a server in JSON."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from lrpfx.serve.refusals import BUSY, LONGEST_MESSAGE, NOT_READY, UNAUTHORIZED, RequestError

_HEADERS: dict[int, dict[str, str]] = {
    UNAUTHORIZED: {"www-authenticate": "Bearer"},
    BUSY: {"retry-after": "1"},
    NOT_READY: {"retry-after": "1"},
}


def json_answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def answer_of(refusal: RequestError) -> Response:
    """The answer to a request that is refused: its message under the key "error"."""
    message = str(refusal)[:LONGEST_MESSAGE]
    return json_answer({"error": message}, refusal.status, _HEADERS.get(refusal.status))
