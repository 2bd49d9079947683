"""uvicorn's connection with limits of its own: on slow clients, on their number, and errors in OpenAI's shape."""

import asyncio
import json
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from megalite.serve.errors import ApiError
from megalite.serve.settings import ServeSettings

_LINGER_SECONDS = 1.0


class Connection(H11Protocol):
    """One client. settings: the limits; `limited` makes the class that uvicorn is given."""

    settings: ServeSettings

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse(
                503, f"more than {self.settings.max_connections} connections are open", "too_many_connections"
            )
            return
        self._limit_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        # A part of a head, or a body behind its answer, which is read and dropped: a client that is still sending
        # would not see the answer over a connection that ends.
        dropping = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if dropping or self.conn.their_state is h11.IDLE:
            self._limit_reading()
        elif self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._finish_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._finish_closing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # a response is being written
            return
        self._refuse(400, "this is no HTTP request", "invalid_http")

    def _limit_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.settings.read_seconds, self.transport.abort)

    def _finish_closing(self) -> None:
        """See that a closing transport does not wait for ever for a client that takes no bytes."""
        if self.transport.is_closing():
            self._writing = self._writing or self._abort_later()

    def _abort_later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.settings.write_seconds, self.transport.abort)

    def _refuse(self, status: int, message: str, code: str) -> None:
        content = json.dumps(ApiError(status, message, code=code).body).encode()
        head = (
            f"HTTP/1.1 {status} {STATUS_PHRASES[status].decode()}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self._refused = True
        self.transport.write(head.encode() + content)
        # The client is heard a little longer: it would not see the answer over a connection that ends.
        self.transport.write_eof()
        self.loop.call_later(min(_LINGER_SECONDS, self.settings.write_seconds), self.transport.abort)


def limited(settings: ServeSettings) -> type[Connection]:
    """Return the class of connections with these limits."""
    return cast(type[Connection], type("LimitedConnection", (Connection,), {"settings": settings}))
