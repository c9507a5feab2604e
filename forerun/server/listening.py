"""The socket, taken before anything long begins: this file imports neither torch nor uvicorn."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ValueError for an address that cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)  # type: ignore[arg-type]
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"cannot listen on {host}:{port}: {reason}") from None
    listener.setblocking(False)
    return listener
