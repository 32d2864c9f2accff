"""Connections of clients, of which those that ask for nothing keep no others out."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection that may be closed for a newer one while no request on it is whole.

    uvicorn refuses all requests, those for health too, while as many connections are open as its limit allows, and waits for
    the headers of a request without end.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's class
        super().connection_made(transport)
        self.since = self.loop.time()
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            idle = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.is_idle]
            if idle:
                min(idle, key=lambda one: one.since).transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is read or computed, and the connection is not closed yet."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()
