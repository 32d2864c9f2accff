"""Who may use a server."""

import hashlib
import hmac
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lrpfx.serve.answers import answer_of
from lrpfx.serve.refusals import FORBIDDEN, UNAUTHORIZED, RequestError

#: What probes of health ask for, which have no token.
OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})


class Guard:
    """Lets requests pass that have the bearer token or, for a server without one, that name this machine as their host.

    A page in a browser may make its own host name lead to this machine and then read what a server without a token answers.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self.app if refusal is None else answer_of(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            return None
        if self.token is None:
            if is_loopback(re.sub(r":\d+$", "", headers.get("host", "")).strip("[]")):
                return None
            return RequestError(
                "without a token, requests are for localhost; start the server with a token for other hosts", FORBIDDEN
            )
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _is_same(given.strip(), self.token):
            return None
        return RequestError(
            "the request needs the header `Authorization: Bearer TOKEN` with the token of this server", UNAUTHORIZED
        )


def _is_same(given: str, token: str) -> bool:
    """Compare two texts in a time that depends neither on their contents nor on their lengths."""
    return hmac.compare_digest(*(hashlib.sha256(one.encode()).digest() for one in (given, token)))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
