"""Connections: HTTP/1.1 as uvicorn speaks it, with stricter and with kinder rules."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server.errors import ApiError

STALLED_SECONDS = 60.0  # how long a client may read nothing while its buffers are full
# How often it is looked whether a client that will send no more has left altogether.
FIRST_LOOK_SECONDS = 0.05
LONGEST_LOOK_SECONDS = 5.0


class StrictConnection(h11.Connection):
    """h11's connection with two rules of RFC 9112 more."""

    def next_event(self) -> Any:
        """Return the next event.

        A request whose length has two meanings raises RemoteProtocolError, because a proxy before
        this server may take the other one, and then the end of the body for another request
        (section 6.3). Of a request for a whole URI, only the path stays the target (3.2.2).
        """
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        names = {name for name, _ in event.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        scheme, mark, rest = event.target.partition(b"://")
        if not mark or scheme.lower() not in (b"http", b"https"):
            return event
        authority, slash, path = rest.partition(b"/")
        authority, question, query = authority.partition(b"?")
        headers = [(b"host", authority)]
        headers += [(name, value) for name, value in event.headers if name != b"host"]
        return h11.Request(
            method=event.method,
            target=b"/" + path if slash else b"/" + question + query,
            headers=headers,
            http_version=event.http_version,
        )


class Protocol(H11Protocol):
    """uvicorn's protocol, which also closes connections that do nothing.

    These are connections without a request, connections whose headers do not end, and those of
    clients that have stopped reading.

    A client that has ended its own side may wait for its answers, or may have left. Only something
    that is sent to it shows which: an interim response before the answer, and a part without
    content in a stream. If it has left, its machine resets the connection. If not, all requests
    that came whole are answered, also those that were sent before the first answer (RFC 9112,
    section 9.3.2), and then the connection is closed.
    """

    _timer: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _has_ended = False  # the client's side

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER)

    def _abort_after(self, seconds: float | None) -> None:
        """Close the connection after some seconds, or never (None).

        Each call replaces the one before it.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._abort_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._abort_after(None)
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data. Headers that come in parts do not restart the timer."""
        super().data_received(data)
        are_headers_incomplete = (
            self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        )
        if are_headers_incomplete:
            if self._timer is None:
                self._abort_after(self.timeout_keep_alive)
        elif not self.flow.write_paused:
            self._abort_after(None)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open although the client sends no more.

        It does while a request that came whole has no answer.
        """
        if not self._is_answering():
            return False
        self._has_ended = True
        self._probe()
        self._look_after(FIRST_LOOK_SECONDS)
        return True

    def _is_answering(self) -> bool:
        """Return whether a request that came whole has no answer yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def on_response_complete(self) -> None:
        """Go on with the next request that has come, or close if no other one will come."""
        super().on_response_complete()
        if self._has_ended and not self._is_answering():
            self.transport.close()

    def _probe(self) -> None:
        """Send something that means nothing, which a client that has left refuses."""
        idle_event = self.cycle.scope["state"].get("idle_event")
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(interim) or b"")
        elif self.conn.our_state is h11.SEND_BODY and idle_event is not None:
            self.transport.write(self.conn.send(h11.Data(data=idle_event)) or b"")

    def _look_after(self, seconds: float) -> None:
        """Look after some seconds, and then again and again, whether the client has left."""
        self._look = self.loop.call_later(seconds, self._look_now, seconds)

    def _look_now(self, seconds: float) -> None:
        """Close the connection if the client has refused what was sent to it."""
        end: socket.socket = self.transport.get_extra_info("socket")
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self._look_after(min(2 * seconds, LONGEST_LOOK_SECONDS))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, and close the connection."""
        error = ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http")
        response = error.response("", Connection="close")  # no path is known
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = h11.Response(
                status_code=400, headers=response.raw_headers, reason=b"Bad Request"
            )
            body = h11.Data(data=bytes(response.body))
            for event in (head, body, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Begin to wait for a client whose buffers are full."""
        super().pause_writing()
        self._abort_after(STALLED_SECONDS)

    def resume_writing(self) -> None:
        """Stop the timer, because the client reads again."""
        self._abort_after(None)
        super().resume_writing()
